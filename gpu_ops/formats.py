"""Files as Arrow record batches: CSV, JSON lines, Parquet, ORC and Arrow, in the order of their rows.

What is read, and how, is Arrow's; this says what of it is Spark's too: the names of the options, that an empty
field of a CSV file is null, that a time without a zone is one in the session's.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, get_args

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv
import pyarrow.dataset as pads
import pyarrow.fs as pafs
import pyarrow.json as pjson

from gpu_ops.errors import BadInputError, DescriptionError

FormatName = Literal["csv", "json", "parquet", "orc", "arrow"]
FORMATS: Final[tuple[str, ...]] = get_args(FormatName)

OPTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "csv": ("header", "sep", "quote", "escape", "nullValue", "encoding", "multiLine", "timeZone", "missingColumns"),
    "json": ("timeZone",),
    "parquet": ("missingColumns",),
    "orc": ("missingColumns",),
    "arrow": ("missingColumns",),
}
"""What can be said about the files of a format, in Spark's words, as far as Spark has any."""

_BLOCK_BYTES: Final = 8 << 20
"""Read at once of a text file; no row is longer."""

_ROWS: Final = 1 << 17
"""Read at once of the other formats."""

_ZONED: Final = r"(Z|[+-]\d{2}(:?\d{2})?)$"
_CLOCK: Final = r":\d{2}"


@dataclasses.dataclass(frozen=True)
class FileFormat:
    """How the files of a stream are read.

    Attributes:
        name: one of `FORMATS`.
        schema: of their rows. A CSV file without a header has these columns, in this order.
        options: some of `OPTIONS`: ``header`` (the first row has names: then columns may come in any order, and
            more may be there), ``sep``, ``quote``, ``escape``, ``nullValue`` (besides the empty field),
            ``encoding``, ``multiLine`` (values may have line breaks), ``timeZone`` (of times that name none),
            ``missingColumns``: ``fail``, or ``null`` for columns that a file lacks.

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
        for option in ("header", "multiLine"):
            if self._option(option, "false") not in ("true", "false"):
                raise DescriptionError(f"{option}={self._option(option, '')!r} is true or false")
        for option in ("sep", "quote", "escape"):
            if len(self._option(option, " ")) != 1:
                raise DescriptionError(f"{option}={self._option(option, '')!r} is one character")
        if self._option("missingColumns", "fail") not in ("fail", "null"):
            raise DescriptionError(f"missingColumns={self._option('missingColumns', '')!r} is fail or null")
        for field in self.schema:
            if (self.name == "csv" and pa.types.is_nested(field.type)) or (
                self.name == "json" and _is_bytes(field.type)
            ):
                raise DescriptionError(f"column {field.name!r} is {field.type}; a file of format {self.name} has none")

    def read(self, uri: str, columns: Sequence[str], input_name: str) -> Iterator[pa.RecordBatch]:
        """The rows of a file, in its order.

        Args:
            uri: the file; Hadoop's spelling of a path will do.
            columns: which of the schema's, and in which order.
            input_name: for errors.

        Raises:
            BadInputError: a file that is not there, or not what was said; names column and value where it can.
        """
        file_system, path = file_system_of(uri, input_name)
        try:
            if self.name == "csv":
                batches = self._csv(file_system, path, columns)
            elif self.name == "json":
                batches = self._json(file_system, path, columns)
            else:
                batches = self._dataset(file_system, path, columns)
            yield from batches
        except (pa.ArrowException, OSError, KeyError, ValueError) as error:
            raise self._refused(error, uri, input_name) from error

    def _csv(self, file_system: pafs.FileSystem, path: str, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        if _is_empty(file_system, path):
            return
        header = self._option("header", "false") == "true"
        types = {name: self._read_as(name) for name in columns}
        reader = pcsv.open_csv(
            file_system.open_input_stream(path),
            read_options=pcsv.ReadOptions(
                use_threads=False,
                block_size=_BLOCK_BYTES,
                column_names=None if header else self.schema.names,
                encoding=self._option("encoding", "utf8"),
            ),
            parse_options=pcsv.ParseOptions(
                delimiter=self._option("sep", ","),
                quote_char=self._option("quote", '"'),
                escape_char=self._option("escape", "") or False,
                newlines_in_values=self._option("multiLine", "false") == "true",
            ),
            convert_options=pcsv.ConvertOptions(
                column_types=types,
                include_columns=list(columns),
                include_missing_columns=self._option("missingColumns", "fail") == "null",
                null_values=["", self._option("nullValue", "")],
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
            ),
        )
        for batch in reader:
            yield self._timed(batch, columns)

    def _json(self, file_system: pafs.FileSystem, path: str, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        if _is_empty(file_system, path):
            return
        wanted = pa.schema([pa.field(name, self._read_as(name)) for name in columns])
        reader = pjson.open_json(
            file_system.open_input_stream(path),
            read_options=pjson.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES),
            parse_options=pjson.ParseOptions(explicit_schema=wanted, unexpected_field_behavior="ignore"),
        )
        for batch in reader:
            yield self._timed(batch.select(list(columns)), columns)

    def _dataset(self, file_system: pafs.FileSystem, path: str, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        kinds = {"parquet": "ParquetFileFormat", "orc": "OrcFileFormat", "arrow": "IpcFileFormat"}
        fragment = getattr(pads, kinds[self.name])().make_fragment(path, file_system)
        if self._option("missingColumns", "fail") == "fail":
            there = fragment.physical_schema.names
            for name in columns:
                if name not in there:
                    raise KeyError(f"Column '{name}' is not among its columns {', '.join(there)}")
        wanted = pa.schema([self.schema.field(name) for name in columns])
        for batch in fragment.to_batches(schema=wanted, columns=list(columns), batch_size=_ROWS, use_threads=False):
            yield batch if batch.schema.equals(wanted) else batch.cast(wanted)

    def _read_as(self, name: str) -> pa.DataType:
        """The type a column of a text file is read as.

        Times with a zone are read as text, which may name another zone or none; dates too in JSON, where to Arrow they
        are numbers.
        """
        kind = self.schema.field(name).type
        return pa.string() if _is_zoned(kind) or (self.name == "json" and pa.types.is_date(kind)) else kind

    def _timed(self, batch: pa.RecordBatch, columns: Sequence[str]) -> pa.RecordBatch:
        """A batch of a text file, its times no longer text."""
        for place, name in enumerate(columns):
            field = self.schema.field(name)
            if batch.schema.field(place).type == field.type:
                continue
            try:
                if _is_zoned(field.type):
                    values = instants(batch[place], field.type, self._option("timeZone", "UTC"))
                else:
                    values = batch[place].cast(field.type)
            except pa.ArrowInvalid as error:
                raise pa.ArrowInvalid(f"Column '{name}': {error}") from error
            batch = batch.set_column(place, field, values)
        return batch

    def _option(self, name: str, default: str) -> str:
        return dict(self.options).get(name, default)

    def _refused(self, error: Exception, uri: str, input_name: str) -> BadInputError:
        text = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
        named = re.search(r"[Cc]olumn '([^']+)'", text) or re.search(r"Column\(/([^)/]+)\)", text)
        column = named.group(1) if named is not None else None
        numbered = re.search(r"In CSV column #(\d+)", text)
        if numbered is not None and self._option("header", "false") == "false":
            column = self.schema.names[int(numbered.group(1))]
        value = re.search(r"invalid value '([^']*)'", text) or re.search(r"string: '([^']*)'", text)
        return BadInputError(
            input_name, column, f"cannot read {uri}: {text}", value.group(1) if value is not None else None
        )


def instants(texts: pa.Array, kind: pa.TimestampType, zone: str) -> pa.Array:
    """Times written as text, as instants.

    Args:
        texts: ISO 8601, each with a zone's offset or without.
        kind: a timestamp with a zone.
        zone: of those without an offset.

    Raises:
        ArrowInvalid: a text that is no time.
    """
    clocked = pc.match_substring_regex(texts, _CLOCK)
    has_zone = pc.and_(clocked, pc.match_substring_regex(texts, _ZONED))
    if pc.all(has_zone).as_py():  # also of nothing, and of nulls only
        return texts.cast(kind)
    local = pc.if_else(has_zone, pa.scalar(None, pa.string()), texts).cast(pa.timestamp(kind.unit))
    found = pc.assume_timezone(local, zone, ambiguous="earliest", nonexistent="latest").cast(kind)
    if not pc.any(has_zone).as_py():
        return found
    other = pc.if_else(has_zone, texts, pa.scalar(None, pa.string())).cast(kind)
    return pc.coalesce(found, other)


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
    parts = re.fullmatch(r"([a-z][a-z0-9+.-]*):(?://([^/]*))?(/.*)", uri)
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


def _is_empty(file_system: pafs.FileSystem, path: str) -> bool:
    """Whether a file has no byte: to Arrow's text readers an error, to a stream a file without rows.

    Raises:
        FileNotFoundError: there is none.
    """
    found = file_system.get_file_info(path)
    if found.type == pafs.FileType.NotFound:
        raise FileNotFoundError("it is not there")
    return not found.size


def _is_zoned(kind: Any) -> bool:
    return bool(pa.types.is_timestamp(kind) and kind.tz is not None)


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind))
