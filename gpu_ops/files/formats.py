"""Files as Arrow record batches: CSV, JSON lines, Parquet, ORC, Arrow and commits of Delta, in the order of their rows.

Arrow reads. Spark's are the names of the options, and that an empty field of a CSV file is null and a time without a
zone one in the session's.
"""

from __future__ import annotations

import codecs
import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal, get_args

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv
import pyarrow.dataset as pads
import pyarrow.fs as pafs
import pyarrow.json as pjson

from gpu_ops.errors import BadInputError, DescriptionError
from gpu_ops.files.casts import cast, fits
from gpu_ops.files.delta import changes_of
from gpu_ops.files.times import arrow_zone, as_text

FormatName = Literal["csv", "json", "parquet", "orc", "arrow", "delta"]
FORMATS: Final[tuple[str, ...]] = get_args(FormatName)

OPTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "csv": ("header", "sep", "quote", "escape", "nullValue", "encoding", "multiLine", "timeZone", "missingColumns"),
    "json": ("timeZone",),
    "parquet": ("missingColumns",),
    "orc": ("timeZone", "missingColumns"),
    "arrow": ("missingColumns",),
    "delta": ("startingVersion",),
}
"""Options of each format, by Spark's names where Spark has them."""

_ALLOWED: Final = {
    **dict.fromkeys(("header", "multiLine"), ("true|false", "true or false")),
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

_SHOWN: Final = 100
"""Bytes of a line that an error shows."""

_GREGORIAN: Final = -141427
"""The first day of the Gregorian calendar, 1582-10-15, as days from 1970."""


@dataclasses.dataclass(frozen=True)
class FileFormat:
    """How the files of a stream are read.

    Attributes:
        name: one of `FORMATS`.
        schema: of their rows. A CSV file without a header has these columns, in this order.
        options: some of `OPTIONS`: ``header`` (the first row has names: then columns may come in any order, and
            more may be there), ``sep``, ``quote`` (doubled in a quoted value for one quote), ``escape`` (before any
            character; none by default, where Spark has the backslash), ``nullValue`` (besides the empty field; in
            quotes it is none), ``encoding``, ``multiLine`` (values may have line breaks), ``timeZone`` (of times that
            name none; those of Parquet and Arrow are UTC's, those that Spark writes to ORC are its JVM's),
            ``missingColumns``: ``fail``, or ``null`` for columns that a file lacks; ``startingVersion``, the first
            commit of a Delta table that is read.

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
            if self.name == "delta":
                yield from (self._typed(batch, columns) for batch in changes_of(uri, columns))
                return
            file_system, path = file_system_of(uri, input_name)
            if self.name == "csv":
                batches = self._csv(file_system, path, columns)
            elif self.name == "json":
                batches = self._json(file_system, path, columns)
            else:
                batches = self._dataset(file_system, path, columns)
            yield from batches
        except (pa.ArrowException, OSError, ValueError) as error:
            raise self._refused(error, uri, input_name) from error

    def _csv(self, file_system: pafs.FileSystem, path: str, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        header = self._option("header", "false") == "true"
        read = pcsv.ReadOptions(
            use_threads=False,
            block_size=_BLOCK_BYTES,
            column_names=None if header else self.schema.names,
            encoding=self._option("encoding", "utf8"),
        )
        quote, escape = self._option("quote", '"'), self._option("escape", "")
        parse = pcsv.ParseOptions(
            delimiter=self._option("sep", ","),
            quote_char=quote,
            escape_char=False if escape in ("", quote) else escape,  # a quote twice is one in any case
            newlines_in_values=self._option("multiLine", "false") == "true",
        )
        convert = pcsv.ConvertOptions(
            column_types={name: as_text(self.schema.field(name).type) for name in columns},
            include_columns=list(columns),
            include_missing_columns=self._option("missingColumns", "fail") == "null",
            null_values=["", self._option("nullValue", "")],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        )
        try:
            for batch in pcsv.open_csv(file_system.open_input_stream(path), read, parse, convert):
                if not parse.newlines_in_values:
                    _in_one_line(batch)
                yield self._typed(batch, columns)
        except pa.ArrowInvalid as error:
            if "Empty CSV file" in str(error):
                return
            numbered = re.search(r"In CSV column #(\d+)", str(error))
            if numbered is None:
                raise
            names = self.schema.names
            if header:
                names = pcsv.open_csv(file_system.open_input_stream(path), read, parse).schema.names
            raise _WrongError(str(error), names[int(numbered.group(1))]) from error

    def _json(self, file_system: pafs.FileSystem, path: str, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        wanted = pa.schema([pa.field(name, as_text(self.schema.field(name).type)) for name in columns])
        with file_system.open_input_stream(path) as stream:
            for block in _lines(stream):
                for batch in _parsed(block, wanted):
                    yield self._typed(batch, columns)

    def _dataset(self, file_system: pafs.FileSystem, path: str, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        fragment = _binary_format(self.name).make_fragment(path, file_system)
        there = {field.name: field.type for field in fragment.physical_schema}
        for name in columns:
            kind = self.schema.field(name).type
            if name not in there:
                if self._option("missingColumns", "fail") == "fail":
                    raise _WrongError(f"it is not among its columns {', '.join(there)}", name)
            elif not fits(there[name], kind):
                raise _WrongError(f"it is {there[name]} there, and not {kind}", name)
        found = [name for name in columns if name in there]
        for batch in fragment.to_batches(columns=found, batch_size=_ROWS, use_threads=False):
            yield self._typed(batch, columns)

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
                raise _WrongError(str(error), name) from error
        return pa.RecordBatch.from_arrays(made, schema=pa.schema([self.schema.field(name) for name in columns]))

    def _option(self, name: str, default: str) -> str:
        return dict(self.options).get(name, default)

    def _refused(self, error: Exception, uri: str, input_name: str) -> BadInputError:
        text = str(error)
        named = re.search(r"Column '([^']+)'", text) or re.search(r"Column\(/([^)/]+)", text)
        column = named.group(1) if named is not None else None
        value = re.search(_SAMPLE, text, re.DOTALL)
        sample = next(filter(None, value.groups()), None) if value is not None else None
        if isinstance(error, _WrongError):
            column, sample = error.column or column, error.sample or sample
        return BadInputError(input_name, column, f"cannot read {uri}: {text}", sample)


class _WrongError(ValueError):
    """What is wrong with a file, with column and sample where they are known."""

    def __init__(self, problem: str, column: str | None = None, sample: str | None = None) -> None:
        super().__init__(problem)
        self.column, self.sample = column, sample


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
    block = block.removeprefix(codecs.BOM_UTF8).lstrip()
    if not block:
        return []
    if not block.startswith(b"{") or b"\nnull" in block:
        # Arrow ends the process at a null there (apache/arrow issue 47409)
        line = block.partition(b"\n")[0] if not block.startswith(b"{") else b"null"
        raise _WrongError("a line is no object", sample=_shown(line))
    if not block.isascii():
        block.decode()  # Arrow takes any bytes for text

    try:
        return list(read_objects(block, wanted).to_batches())
    except pa.ArrowInvalid as error:
        numbered = re.fullmatch(r"(.*) in row (\d+)", str(error), re.DOTALL)
        if numbered is not None:  # of the block, which its reader knows nothing of
            rows = [line for line in block.splitlines() if line.strip()]
            row = rows[min(int(numbered.group(2)), len(rows) - 1)]
            raise _WrongError(numbered.group(1), sample=_shown(row)) from error
        for field in wanted:
            try:
                read_objects(block, pa.schema([field]))
            except pa.ArrowInvalid as of_one:
                raise _WrongError(str(of_one), field.name) from error
        raise


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


@functools.lru_cache(maxsize=64)
def _file_system(root: str) -> tuple[pafs.FileSystem, str]:
    file_system, base = pafs.FileSystem.from_uri(root)
    return file_system, base.rstrip("/")


def file_system_of(uri: str, input_name: str) -> tuple[pafs.FileSystem, str]:
    """Where a file lies, and its path there.

    Args:
        uri: as Hadoop writes it, that is without escapes: ``file:/a b``, ``s3a://bucket/a``, ``hdfs://host/a``.
        input_name: for the error.

    Raises:
        BadInputError: a file system that Arrow does not know.
    """
    parts = re.fullmatch(r"([a-z][a-z0-9+.-]*):(?://([^/]*))?(/.*)", uri, re.DOTALL)
    if parts is None or parts.group(1) == "file":
        return pafs.LocalFileSystem(), uri if parts is None else re.sub("^/+", "/", parts.group(3))
    scheme, host, path = parts.groups()
    scheme = {"s3a": "s3", "s3n": "s3"}.get(scheme, scheme)
    try:
        file_system, base = _file_system(f"{scheme}://{host or ''}/")
    except (pa.ArrowException, OSError, ValueError) as error:
        raise BadInputError(
            input_name, None, f"cannot open {uri}: {error}. Read it with spark.readStream instead"
        ) from error
    return file_system, base + path


def _in_one_line(batch: pa.RecordBatch) -> None:
    """Refuses a value that goes on in the next line: a quote may be missing, and rows are part of it."""
    for name, values in zip(batch.schema.names, batch.columns, strict=True):
        text = values.buffers()[-1] if pa.types.is_string(values.type) or pa.types.is_binary(values.type) else None
        if text is not None and re.search(b"\n", text):
            first = pc.filter(values, pc.match_substring(values, "\n"))[0].as_buffer().to_pybytes()
            raise _WrongError("a quoted value has a line break, which is for multiLine=true", name, _shown(first))


def _shown(line: bytes) -> str:
    return line[:_SHOWN].decode(errors="replace").strip()


def _binary_format(name: str) -> pads.FileFormat:
    if name == "parquet":
        # the times of Spark's files, INT96, are nanoseconds to Arrow, which hold three centuries on either side of 1970
        return pads.ParquetFileFormat(coerce_int96_timestamp_unit="us")
    return pads.OrcFileFormat() if name == "orc" else pads.IpcFileFormat()


def _in_one_calendar(days: pa.Array, name: str) -> None:
    """Refuses dates that a file of ORC may have by the Julian calendar; Arrow does not tell them apart."""
    first = pc.min(days)
    if first.is_valid and first.cast(pa.int32()).as_py() < _GREGORIAN:
        raise _WrongError("a date before 1582-10-15", name, str(first.cast(pa.string())))


def _holds(name: str, kind: pa.DataType) -> bool:
    """Whether a format has such values, as far as Arrow reads them."""
    t = pa.types
    if name not in ("csv", "json"):
        return True
    if t.is_list(kind) or t.is_struct(kind):
        children = [kind.value_type] if t.is_list(kind) else [field.type for field in kind]
        return name == "json" and all(_holds(name, child) for child in children)
    is_bytes = t.is_binary(kind) or t.is_large_binary(kind) or t.is_fixed_size_binary(kind)
    return not (t.is_nested(kind) or t.is_duration(kind) or t.is_time(kind) or (name == "json" and is_bytes))
