"""Files as Arrow record batches: CSV, JSON lines, Parquet, ORC, Arrow and commits of Delta, in the order of their rows.

Arrow reads. Spark's are the names of the options, and that an empty field of a CSV file is null and a time without a
zone one in the session's.

The change feed of a Delta table is read a commit at a time (`gpu_ops.files.delta_feed`).
"""

from __future__ import annotations

import codecs
import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
import pyarrow.fs as pafs
import pyarrow.json as pjson

from gpu_ops.errors import BadInputError, DescriptionError
from gpu_ops.files.csv_files import CsvFile, WrongError, refuse_compressed, shown
from gpu_ops.files.delta_feed import Changes
from gpu_ops.files.file_systems import file_system_of
from gpu_ops.values import arrow_zone, as_text, cast, fits, is_bytes, keeps

FormatName = Literal["csv", "json", "parquet", "orc", "arrow", "delta"]
FORMATS: Final[tuple[str, ...]] = get_args(FormatName)

OPTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "csv": ("header", "sep", "quote", "escape", "nullValue", "encoding", "multiLine", "timeZone", "missingColumns"),
    "json": ("timeZone",),
    "parquet": ("missingColumns",),
    "orc": ("timeZone", "missingColumns"),
    "arrow": ("missingColumns",),
    "delta": ("startingVersion", "failOnDataLoss", "timeZone"),
}
"""Options of each format, by Spark's names where Spark has them."""

_ALLOWED: Final = {
    **dict.fromkeys(("header", "multiLine", "failOnDataLoss"), ("true|false", "true or false")),
    **dict.fromkeys(("sep", "quote", "escape"), (r"[\x01-\x7f]", "one character of ASCII")),
    "missingColumns": ("fail|null", "fail or null"),
    "startingVersion": (r"\d+", "a number"),
}
"""Values of options, where not any will do, and the words for them."""

_BLOCK_BYTES: Final = 8 << 20
"""Read at once of a text file; no row of a CSV file is longer."""

_ROWS: Final = 1 << 17
"""Read at once of the other formats."""

_SAMPLE: Final = (
    r"invalid value '(.*)'|string:? '(.*)' (?:as|is)|couldn't parse:(.*)$|"
    r"value (\S+) (?:not in range|was truncated)|would lose data: (\S+)|"
    r"Decimal value (\S+) does"
)

_BLANK: Final = b" \t\r\n"
_NOT_FINITE: Final = rb'"(NaN|[+-]?INF|[+-]?Infinity)"'

_GREGORIAN: Final = -141427
"""The first day of the Gregorian calendar, 1582-10-15, as days from 1970."""


@dataclasses.dataclass(frozen=True)
class FileFormat:
    """How the files of a stream are read.

    Attributes:
        name: one of `FORMATS`.
        schema: of their rows. A CSV file without a header has these columns, in this order.
        options: some of `OPTIONS`: ``header`` (the first row has names: then columns may come in any order, and
            more may be there), ``sep``, ``quote`` (doubled in a quoted value for one quote), ``escape`` (in quotes,
            before a quote or another escape; none by default, where Spark has the backslash), ``nullValue`` (besides
            the empty field, in quotes or not; without it ``""`` is an empty text), ``encoding``, ``multiLine`` (values
            may have line breaks), ``timeZone`` (of times that name none; those of Parquet and Arrow are UTC's, those
            that Spark writes to ORC are its JVM's),
            ``missingColumns``: ``fail``, or ``null`` for columns that a file lacks; ``startingVersion``, the first
            commit of a Delta table that is read; ``failOnDataLoss``: whether commits that are gone are an error.

    Raises:
        DescriptionError: no such format, option or value, or a column that the format cannot hold.
    """

    name: str
    schema: pa.Schema
    options: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if self.name not in FORMATS:
            raise DescriptionError(f"format={self.name!r}; there are {', '.join(FORMATS)}")
        for option, value in self.options:
            if option not in OPTIONS[self.name]:
                known = ", ".join(OPTIONS[self.name])
                raise DescriptionError(f"{option}={value!r}: files of format {self.name} have {known}")
            allowed, words = _ALLOWED.get(option, (".*", ""))
            if not re.fullmatch(allowed, value, re.DOTALL):
                raise DescriptionError(f"{option}={value!r} is {words}")
        try:
            codecs.lookup(self._option("encoding", "utf8"))
            arrow_zone(self._option("timeZone", "UTC"))
        except (LookupError, pa.ArrowException) as error:
            raise DescriptionError(f"{error}") from error
        for field in self.schema:
            if not _holds(self.name, field.type):
                raise DescriptionError(f"column {field.name!r} is {field.type}; a file of format {self.name} has none")

    def read(self, uri: str, columns: Sequence[str], input_name: str) -> Iterator[pa.RecordBatch]:
        """The rows of a file, in its order.

        Args:
            uri: the file; Hadoop's spelling of a path will do.
            columns: which of the schema's, and in which order.
            input_name: for errors.

        Raises:
            BadInputError: a file that is not there, or not as described; names column and value where it can.
        """
        try:
            file_system, path = file_system_of(uri, input_name)
            if self.name == "delta":
                batches = self._delta(uri, columns, input_name)
            elif self.name == "csv":
                batches = self._csv(file_system, path, columns)
            elif self.name == "json":
                batches = self._json(file_system, path)
            else:
                batches = self._dataset(file_system, path, columns)
            for batch in batches:
                yield batch.select(list(columns))
        except (pa.ArrowException, OSError, ValueError) as error:
            raise self._refused(error, uri, input_name) from error

    def _csv(self, file_system: pafs.FileSystem, path: str, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        packed = re.search(r"\.(gz|bz2|zst|lz4|br)$", path) is not None
        again = functools.partial(file_system.open_input_stream if packed else file_system.open_input_file, path)
        file = CsvFile(again, self.schema, columns, dict(self.options), _BLOCK_BYTES)
        yield from (self._typed(batch, batch.schema.names) for batch in file.batches())

    def _json(self, file_system: pafs.FileSystem, path: str) -> Iterator[pa.RecordBatch]:
        wanted = pa.schema([pa.field(field.name, as_text(field.type)) for field in self.schema])
        with file_system.open_input_stream(path) as stream:
            for block in _lines(stream):
                for batch in _parsed(block, wanted):
                    yield self._typed(batch, self.schema.names)

    def _delta(self, commit: str, columns: Sequence[str], input_name: str) -> Iterator[pa.RecordBatch]:
        def read_parquet(uri: str, wanted: pa.Schema) -> Iterator[pa.RecordBatch]:
            data = FileFormat("parquet", wanted, (("missingColumns", "null"),))
            return data.read(uri, wanted.names, input_name)

        zone = arrow_zone(self._option("timeZone", "UTC"))
        changes = Changes(commit, self.schema, zone, read_parquet, input_name)
        self._check_kinds(changes.schema)
        names = [x.name for x in self.schema if x.name in columns or not self._keeps(changes.schema, x)]
        for batch in changes.batches(names):
            yield self._typed(batch, names)

    def _dataset(self, file_system: pafs.FileSystem, path: str, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        fragment = _binary_format(self.name).make_fragment(path, file_system)
        there = fragment.physical_schema
        self._check_kinds(there)
        # others are read only where one of their values may be wrong
        names = [x.name for x in self.schema if x.name in columns or not self._keeps(there, x)]
        found = [name for name in names if name in there.names]
        for batch in fragment.to_batches(columns=found, batch_size=_ROWS, use_threads=False):
            yield self._typed(batch, names)

    def _keeps(self, there: pa.Schema, field: pa.Field) -> bool:
        """Whether no value of a file's column can be one that the declared type has no place for."""
        if field.name not in there.names:
            return True
        timed = self.name == "orc" and as_text(field.type) != field.type
        return not timed and keeps(there.field(field.name).type, field.type)

    def _check_kinds(self, there: pa.Schema) -> None:
        for field in self.schema:
            if field.name not in there.names:
                if self._option("missingColumns", "fail") == "fail":
                    raise WrongError(f"it is not among its columns {', '.join(there.names)}", field.name)
            elif not fits(there.field(field.name).type, field.type):
                raise WrongError(f"it is {there.field(field.name).type} there, and not {field.type}", field.name)

    def _typed(self, batch: pa.RecordBatch, columns: Sequence[str]) -> pa.RecordBatch:
        """A batch in the types of the schema; columns that it lacks are null."""
        zone = arrow_zone(self._option("timeZone", "UTC"))
        there, made = set(batch.schema.names), []
        for name in columns:
            kind = self.schema.field(name).type
            values = batch[name] if name in there else pa.nulls(batch.num_rows, kind)
            try:
                if self.name == "orc" and pa.types.is_date(kind):
                    _in_one_calendar(values, name)
                if self.name in ("csv", "json") and "decimal" in str(kind):
                    values.validate(full=True)  # Arrow's readers let some through that have a digit too many
                made.append(cast(values, kind, zone))
            except pa.ArrowInvalid as error:
                raise WrongError(str(error), name) from error
        if not made:
            return batch.select([])
        return pa.RecordBatch.from_arrays(made, schema=pa.schema([self.schema.field(name) for name in columns]))

    def _option(self, name: str, default: str) -> str:
        return dict(self.options).get(name, default)

    def _refused(self, error: Exception, uri: str, input_name: str) -> BadInputError:
        text = str(error)
        named = re.search(r"Column '([^']+)'", text) or re.search(r"Column\(/([^)/]+)", text)
        column = named.group(1) if named is not None else None
        value = re.search(_SAMPLE, text, re.DOTALL)
        sample = next(filter(None, value.groups()), None) if value is not None else None
        if isinstance(error, WrongError):
            column, sample = error.column or column, error.sample or sample
        return BadInputError(input_name, column, f"cannot read {uri}: {text}", sample)


def _lines(stream: pa.NativeFile) -> Iterator[bytes]:
    """A text file in blocks of whole lines, be a line as long as it will."""
    begun: list[bytes] = []
    while more := stream.read(_BLOCK_BYTES):
        cut = more.rfind(b"\n") + 1
        begun.append(more[:cut] if cut else more)
        if cut:
            yield b"".join(begun)
            begun = [more[cut:]]
    yield b"".join(begun)


def _parsed(block: bytes, wanted: pa.Schema) -> list[pa.RecordBatch]:
    """The objects of a block of JSON lines.

    Raises:
        ValueError: anything else; names the column.
    """
    block = block.removeprefix(codecs.BOM_UTF8).strip(_BLANK)
    if not block:
        return []
    refuse_compressed(block)
    _check_lines(block)
    if not block.isascii():
        block.decode()  # Arrow takes any bytes for text
    try:
        return _read_lines(block, wanted)
    except pa.ArrowInvalid as error:
        if re.search(_NOT_FINITE, block) is not None:
            return _parsed_floats(block, wanted)
        raise _of_one_line(block, wanted, error) from error


def _check_lines(block: bytes) -> None:
    """Refuses lines that are no object, or begin or end within one.

    A line break between ``}`` and ``{`` is between objects. At a null there some versions of Arrow end the process
    (apache/arrow issue 47409), and behind a null character they read nothing.
    """
    wrong = None if block.startswith(b"{") else re.match(rb".*", block)
    ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
    data = np.frombuffer(block, np.uint8)
    if not ((data[ends - 1] == ord("}")) & (data[ends + 1] == ord("{"))).all():
        wrong = wrong or re.search(rb"(?m)^[ \t\r]*[^{ \t\r\n].*$|^.*[^} \t\r\n][ \t\r]*$", block)
    wrong = wrong or re.search(rb"(?m)^.*\0.*$", block)
    if wrong is not None or not block.endswith(b"}"):
        line = block.rpartition(b"\n")[2] if wrong is None else wrong.group()
        raise WrongError("a line is no object", sample=shown(line))


def _read_lines(block: bytes, wanted: pa.Schema) -> list[pa.RecordBatch]:
    read = read_objects(block, wanted)
    lines = block.count(b"\n") + 1
    if read.num_rows != lines and read.num_rows != sum(map(bool, map(bytes.strip, block.split(b"\n")))):
        raise WrongError(
            "a line has several objects", sample=next(map(shown, re.findall(rb".*\}[ \t\r]*\{.*", block)), None)
        )
    return list(read.to_batches())


def _parsed_floats(block: bytes, wanted: pa.Schema) -> list[pa.RecordBatch]:
    """Objects of which some have NaN or an infinity as text, as Spark writes them.

    Each column that has floats is read from a block of its own, in which the texts of these are none.
    """
    columns = {}
    for field in wanted:
        spelled, names = block, _named_floats(field)
        if names:
            of_one = b"|".join(re.escape(name.encode()) for name in names)
            pattern = rb'((?<!\\)"(?:%s)"\s*:\s*(?:\[[^"{}:]*?)?)%s' % (of_one, _NOT_FINITE)
            while (more := re.sub(pattern, _bare, spelled)) != spelled:  # one of each list at a time
                spelled = more
        try:
            (columns[field.name],) = read_objects(spelled, pa.schema([field])).columns
        except pa.ArrowInvalid as error:
            raise _of_one_line(spelled, pa.schema([field]), error) from error
    return list(pa.table(columns, schema=wanted).combine_chunks().to_batches())


def _bare(text: re.Match[bytes]) -> bytes:
    before, value = text.groups()
    finite = {b"I": b"Infinity", b"-": b"-Infinity", b"N": b"NaN"}
    return bytes(before + finite[value.lstrip(b"+")[:1]])


def _named_floats(field: pa.Field) -> list[str]:
    """The names in a column whose values are floats, or lists of them."""
    kind = field.type
    while pa.types.is_list(kind):
        kind = kind.value_type
    if pa.types.is_struct(kind):
        return [name for part in kind for name in _named_floats(part)]
    return [field.name] if pa.types.is_floating(kind) else []


def _of_one_line(block: bytes, wanted: pa.Schema, error: Exception) -> Exception:
    """An error of a block that names the line or the column."""
    numbered = re.fullmatch(r"(.*) in row (\d+)", str(error), re.DOTALL)
    if numbered is not None:  # of the block, which its reader knows nothing of
        rows = [line for line in block.split(b"\n") if line.strip()]
        return WrongError(numbered.group(1), sample=shown(rows[min(int(numbered.group(2)), len(rows) - 1)]))
    for field in wanted:
        try:
            read_objects(block, pa.schema([field]))
        except pa.ArrowInvalid as of_one:
            return WrongError(str(of_one), field.name)
    return error


def read_objects(block: bytes | pa.Buffer, schema: pa.Schema) -> pa.Table:
    """JSON objects, one behind the other, as Arrow reads them; what the schema does not name is left out.

    Args:
        block: UTF-8, nothing but objects: at a null between them some versions of Arrow end the process.
        schema: of types that Arrow reads from JSON.

    Raises:
        ArrowException: no JSON, or a value of another type.
    """
    return pjson.read_json(
        pa.BufferReader(block),
        pjson.ReadOptions(use_threads=False, block_size=len(block) + 1),
        pjson.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
    )


def _binary_format(name: str) -> pads.FileFormat:
    if name == "parquet":
        # the times of Spark's files, INT96, are nanoseconds to Arrow, which hold three centuries on either side of 1970
        return pads.ParquetFileFormat(coerce_int96_timestamp_unit="us")
    return pads.OrcFileFormat() if name == "orc" else pads.IpcFileFormat()


def _in_one_calendar(days: pa.Array, name: str) -> None:
    """Refuses dates that a file of ORC may have by the Julian calendar; Arrow does not tell them apart."""
    first = pc.min(days)
    if first.is_valid and first.cast(pa.int32()).as_py() < _GREGORIAN:
        raise WrongError("a date before 1582-10-15", name, str(first.cast(pa.string())))


def _holds(name: str, kind: pa.DataType) -> bool:
    """Whether a format has such values, as far as Arrow reads them."""
    t = pa.types
    if name not in ("csv", "json"):
        return True
    if t.is_list(kind) or t.is_struct(kind):
        children = [kind.value_type] if t.is_list(kind) else [field.type for field in kind]
        return name == "json" and all(_holds(name, child) for child in children)
    return not (t.is_nested(kind) or t.is_duration(kind) or t.is_time(kind) or (name == "json" and is_bytes(kind)))
