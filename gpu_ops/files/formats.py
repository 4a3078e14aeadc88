"""Files as Arrow record batches: CSV, JSON lines, Parquet, ORC, Arrow and commits of Delta, in the order of their rows.

Arrow reads. Spark's are the names of the options, and that an empty field of a CSV file is null and a time without a
zone one in the session's.

The change feed of a Delta table is read a commit at a time, by the package ``deltalake``.
"""

from __future__ import annotations

import codecs
import collections
import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal, get_args

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs

from gpu_ops.errors import BadInputError, DescriptionError, NotBuiltError
from gpu_ops.files.binary_files import Reading, arrow_leaf, read_binary
from gpu_ops.files.columns import (
    SAME,
    Conversion,
    Leaf,
    Part,
    Rules,
    WrongError,
    conversion,
    conversions,
    part_of,
    typed,
)
from gpu_ops.files.csv_files import CsvFile
from gpu_ops.files.json_files import json_batches
from gpu_ops.values import arrow_zone, cast_plain, is_bytes, rebuilt

LOG: Final = "_delta_log"
_MAPPED: Final = (
    "the table has column mapping, which the package deltalake does not read: read it with spark.readStream"
)
_CHANGE: Final = "_change_type"


def changes_of(commit: str, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """What a commit changed: its rows, and ``_change_type``, ``_commit_version`` and ``_commit_timestamp``.

    Rows that it takes come before those that it brings. Either are sorted by all columns: deltalake gives them in any
    order, and a micro-batch that is repeated has to have its rows in the same one.

    Args:
        commit: a file of the table's log; Hadoop's spelling of a path will do.
        columns: the ones that are wanted.

    Raises:
        ValueError: it cannot be read, or it lacks a column.
        NotBuiltError: the package is not installed.
    """
    try:
        import deltalake  # noqa: PLC0415 - not installed by default
    except ImportError as error:
        raise NotBuiltError("a Delta table's change feed needs deltalake: pip install 'gpu-join[delta]'") from error
    named = re.fullmatch(rf"(.*)/{LOG}/(\d+)\.json", commit, re.DOTALL)
    if named is None:
        raise ValueError(f"it is no commit of a Delta table's log, {LOG}/*.json")
    table, version = re.sub("^file:/*", "/", named.group(1)), int(named.group(2))
    try:
        opened = deltalake.DeltaTable(table)
        mapping = opened.metadata().configuration.get("delta.columnMapping.mode", "none")
        if mapping != "none":
            raise ValueError(f"{_MAPPED} (delta.columnMapping.mode is {mapping!r})")
        feed = opened.load_cdf(starting_version=version, ending_version=version)
        views = pa.table(feed)
    except deltalake.exceptions.DeltaError as error:
        if "column mapping" in str(error).lower():
            raise ValueError(f"{_MAPPED}: {error}") from error
        feedless = "change data" in str(error).lower()
        hint = " (delta.enableChangeDataFeed has to be set, and startingVersion after that)" if feedless else ""
        raise ValueError(f"{error}{hint}") from error
    changes = views.cast(pa.schema([field.with_type(rebuilt(field.type, _plain)) for field in views.schema]))
    missing = [name for name in columns if name not in changes.schema.names]
    if missing:
        raise ValueError(f"{missing[0]!r} is not among its columns {', '.join(changes.schema.names)}")
    taken = pc.is_in(changes[_CHANGE], pa.array(["delete", "update_preimage"]))
    for mask in (taken, pc.invert(taken)):
        part = changes.filter(mask)
        keys = [
            (x.name, "ascending") for x in part.schema if not (pa.types.is_nested(x.type) or pa.types.is_null(x.type))
        ]
        yield from (part.sort_by(keys) if keys else part).select(list(columns)).to_batches()


def _plain(kind: pa.DataType) -> pa.DataType:
    """A type for a view, which deltalake gives and Arrow cannot filter."""
    return {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}.get(kind, kind)


FormatName = Literal["csv", "json", "parquet", "orc", "arrow", "delta"]
FORMATS: Final[tuple[str, ...]] = get_args(FormatName)

OPTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "csv": (
        "header", "sep", "quote", "escape", "nullValue", "encoding", "multiLine", "timeZone", "missingColumns",
        "caseSensitive",
    ),
    "json": ("timeZone",),
    "parquet": ("missingColumns", "caseSensitive", "timeZone", "datetimeRebaseMode", "int96RebaseMode"),
    "orc": ("missingColumns", "caseSensitive", "timeZone"),
    "arrow": ("missingColumns", "caseSensitive"),
    "delta": ("startingVersion", "failOnDataLoss"),
}  # fmt: skip
"""Options of each format, by Spark's names where Spark has them."""

_ALLOWED: Final = {
    **dict.fromkeys(("header", "multiLine", "failOnDataLoss", "caseSensitive"), ("true|false", "true or false")),
    **dict.fromkeys(
        ("datetimeRebaseMode", "int96RebaseMode"), ("CORRECTED|LEGACY|EXCEPTION", "CORRECTED, LEGACY or EXCEPTION")
    ),
    **dict.fromkeys(("sep", "quote", "escape"), (r"[\x01-\x7f]", "one character of ASCII")),
    "missingColumns": ("fail|null", "fail or null"),
    "startingVersion": (r"\d+", "a number"),
}
"""Values of options, where not any will do, and the words for them."""

_BLOCK_BYTES: Final = 8 << 20
"""Read at once of a text file; no row of a CSV file is longer."""

_SAMPLE: Final = (
    r"invalid value '(.*)'|string:? '(.*)' (?:as|is)|couldn't parse:(.*)$|"
    r"value (\S+) (?:not in range|was truncated)|would lose data: (\S+)|"
    r"Decimal value (\S+) does"
)


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
            that Spark writes to ORC are its JVM's, and so are Parquet's in the Julian calendar), ``missingColumns``:
            ``fail``, or ``null`` for columns and fields that a file lacks; ``caseSensitive``: whether names that differ
            in case are different ones (false); ``datetimeRebaseMode`` and ``int96RebaseMode``: the calendar of Parquet
            files that do not name theirs (`gpu_ops.files.calendars.Calendar`); ``startingVersion``, the first commit of
            a Delta table that is read; ``failOnDataLoss``: whether commits that are gone are an error.

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
        case = str if self._option("caseSensitive", "false") == "true" else str.lower
        names = collections.Counter(map(case, self.schema.names))
        if (twice := next((name for name, count in names.items() if count > 1), None)) is not None:
            raise DescriptionError(f"the schema has two columns {twice!r}")
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
                yield from self._delta(uri, file_system.open_input_stream(path).read(), columns)
            elif self.name in ("csv", "json"):
                yield from self._text(file_system, path, columns)
            else:
                yield from read_binary(self.name, file_system, path, self.schema, columns, self._reading())
        except (pa.ArrowException, OSError, ValueError) as error:
            raise self._refused(error, uri, input_name) from error

    def _text(self, file_system: pafs.FileSystem, path: str, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Rows of CSV or JSON, which come in the types of the schema, but times as text."""
        rules = Rules(_text_leaf(arrow_zone(self._option("timeZone", "UTC"))))
        change = functools.cache(lambda field: conversion(part_of(field), self.schema.field(field.name).type, rules))
        for batch in (self._csv if self.name == "csv" else self._json)(file_system, path, columns):
            yield typed(batch, {field.name: change(field) for field in batch.schema}, columns, self.schema)

    def _csv(self, file_system: pafs.FileSystem, path: str, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        packed = re.search(r"\.(gz|bz2|zst|lz4|br)$", path) is not None
        again = functools.partial(file_system.open_input_stream if packed else file_system.open_input_file, path)
        return CsvFile(again, self.schema, columns, dict(self.options), _BLOCK_BYTES).batches()

    def _json(self, file_system: pafs.FileSystem, path: str, _: Sequence[str]) -> Iterator[pa.RecordBatch]:
        with file_system.open_input_stream(path) as stream:
            yield from json_batches(stream, self.schema, _BLOCK_BYTES)

    def _delta(self, commit: str, actions: bytes, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        if b'"deletionVector":{' in actions and b'"cdc":' not in actions:
            raise WrongError("the commit has deletion vectors and no change data: read the table with spark.readStream")
        for batch in changes_of(commit, self.schema.names):
            found = conversions([part_of(field) for field in batch.schema], self.schema, Rules(arrow_leaf))
            changes = {name: taken[1] for name, taken in found.items() if taken is not None}
            yield typed(batch, changes, columns, self.schema)

    def _reading(self) -> Reading:
        return Reading(
            self._option("caseSensitive", "false") == "true",
            self._option("missingColumns", "fail") == "null",
            arrow_zone(self._option("timeZone", "UTC")) if self.name == "orc" else self._option("timeZone", "UTC"),
            self._option("datetimeRebaseMode", "CORRECTED"),
            self._option("int96RebaseMode", "CORRECTED"),
        )

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


def _text_leaf(zone: str) -> Leaf:
    """What values of text become, which are of the declared types, but for times: they are text yet."""

    def leaf(part: Part, kind: pa.DataType) -> Conversion | None:
        if pa.types.is_decimal(kind):
            return Conversion(_checked, total=False)
        return SAME if part.type == kind else Conversion(lambda values: cast_plain(values, kind, zone), total=False)

    return leaf


def _checked(values: pa.Array) -> pa.Array:
    values.validate(full=True)  # Arrow's readers let some decimals through that have a digit too many
    return values


def _holds(name: str, kind: pa.DataType) -> bool:
    """Whether a format has such values, as far as Arrow reads them."""
    t = pa.types
    if name not in ("csv", "json"):
        return True
    if t.is_list(kind) or t.is_struct(kind):
        children = [kind.value_type] if t.is_list(kind) else [field.type for field in kind]
        return name == "json" and all(_holds(name, child) for child in children)
    return not (t.is_nested(kind) or t.is_duration(kind) or t.is_time(kind) or (name == "json" and is_bytes(kind)))
