"""Files as Arrow record batches: CSV, JSON lines, Parquet, ORC, Arrow and commits of Delta, in the order of their rows.

Arrow reads. Spark's are the names of the options, and that an empty field of a CSV file is null and a time without a
zone one in the session's.

The change feed of a Delta table is read a commit at a time (`gpu_ops.files.delta_feed`).
"""

from __future__ import annotations

import codecs
import collections
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, get_args

import pyarrow as pa
import pyarrow.fs as pafs

from gpu_ops.errors import BadInputError, DescriptionError
from gpu_ops.files.binary_files import PlainFile, ReadOptions, plain_parquet, read_binary
from gpu_ops.files.columns import (
    SAME,
    ColumnPart,
    Conversion,
    Leaf,
    Rules,
    WrongError,
    conversion,
    conversions,
    part_of,
    typed,
)
from gpu_ops.files.csv_files import CsvFile
from gpu_ops.files.delta_feed import CommitChanges
from gpu_ops.files.delta_schema import delta_leaf
from gpu_ops.files.file_systems import file_system_of
from gpu_ops.files.json_files import json_batches
from gpu_ops.files.new_columns import log_new_columns
from gpu_ops.values import arrow_zone, cast_plain, is_bytes

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
    "delta": ("startingVersion", "failOnDataLoss", "timeZone", "datetimeRebaseMode", "int96RebaseMode"),
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


_Look = Callable[[Mapping[str, Any]], None]


@dataclasses.dataclass(frozen=True)
class FileFormat:
    """The format, schema and options by which the files of a stream are read.

    Attributes:
        name: one of `FORMATS`.
        schema: of their rows. A CSV file without a header has these columns, in this order.
        options: some of `OPTIONS`: ``header`` (the first row has names: then columns may come in any order, and
            more may be there), ``sep``, ``quote`` (doubled in a quoted value for one quote), ``escape`` (in quotes,
            before a quote or another escape; none by default, where Spark has the backslash), ``nullValue`` (besides
            the empty field, in quotes or not; without it ``""`` is an empty text), ``encoding``, ``multiLine`` (values
            may have line breaks), ``timeZone`` (of times that name none; those of Parquet and Arrow are UTC's, those
            that Spark writes to ORC are its JVM's, and so are Parquet's in the Julian calendar; of a Delta table's
            partitions too), ``missingColumns``: ``fail``, or ``null`` for columns and fields that a file lacks;
            ``caseSensitive``: whether names that differ in case are different ones (false); ``datetimeRebaseMode`` and
            ``int96RebaseMode``: the calendar of Parquet files that do not name theirs
            (`gpu_ops.files.calendars.Calendar`); ``startingVersion``, the first commit of a Delta table that is read;
            ``failOnDataLoss``: whether commits that are gone are an error.

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
        """The rows of a file, in its order; columns that it has got lately and nothing names are logged once.

        Args:
            uri: the file; Hadoop's spelling of a path will do.
            columns: which of the schema's, and in which order.
            input_name: for errors.

        Raises:
            BadInputError: a file that is not there, or not as described; names column and value where it can.
        """
        yield from self._read(uri, columns, input_name, self._look(uri, input_name))

    def plain(self, path: str, uri: str, columns: Sequence[str], input_name: str) -> PlainFile | None:
        """Looks whether columns of a local Parquet file are read as they stand there; see `plain_parquet`.

        Args:
            path: the file, or a copy of it.
            uri: the file, for the log.
            columns: which of the schema's.
            input_name: for the log.

        Returns:
            None also where it is no such file: `read` says why.
        """
        look = self._look(uri, input_name)
        try:
            return plain_parquet(pafs.LocalFileSystem(), path, self.schema, columns, self._reading(), look)
        except (pa.ArrowException, OSError, ValueError):
            return None

    def _look(self, uri: str, input_name: str) -> _Look:
        """Takes the names of a file's columns, for the log of new ones."""
        plain = str if self.name == "json" or self._option("caseSensitive", "false") == "true" else str.lower

        def look(names: Mapping[str, Any]) -> None:
            log_new_columns(input_name, uri, self.schema, names, plain)

        return look

    def _read(self, uri: str, columns: Sequence[str], input_name: str, look: _Look) -> Iterator[pa.RecordBatch]:
        try:
            file_system, path = file_system_of(uri, input_name)
            if self.name == "delta":
                yield from self._delta(uri, columns, input_name, look)
            elif self.name in ("csv", "json"):
                yield from self._text(file_system, path, columns, look)
            else:
                yield from read_binary(self.name, file_system, path, self.schema, columns, self._reading(), look)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise self._refused(error, uri, input_name) from error

    def _text(
        self, file_system: pafs.FileSystem, path: str, columns: Sequence[str], look: _Look
    ) -> Iterator[pa.RecordBatch]:
        """Rows of CSV or JSON, which come in the types of the schema, but times as text."""
        rules = Rules(_text_leaf(arrow_zone(self._option("timeZone", "UTC"))))
        change = functools.cache(lambda field: conversion(part_of(field), self.schema.field(field.name).type, rules))

        def finish(batch: pa.RecordBatch) -> pa.RecordBatch:
            return typed(batch, {field.name: change(field) for field in batch.schema}, columns, self.schema)

        if self.name == "csv":
            packed = re.search(r"\.(gz|bz2|zst|lz4|br)$", path) is not None
            again = functools.partial(file_system.open_input_stream if packed else file_system.open_input_file, path)
            file = CsvFile(again, self.schema, columns, dict(self.options), _BLOCK_BYTES, finish=finish, look=look)
            yield from file.batches()
        else:
            with file_system.open_input_stream(path) as stream:
                yield from json_batches(stream, self.schema, _BLOCK_BYTES, finish, look)

    def _delta(self, commit: str, columns: Sequence[str], input_name: str, look: _Look) -> Iterator[pa.RecordBatch]:
        of_files = (("missingColumns", "null"), *(x for x in self.options if x[0] in OPTIONS["parquet"]))

        def read_parquet(uri: str, wanted: pa.Schema) -> Iterator[pa.RecordBatch]:
            return FileFormat("parquet", wanted, of_files)._read(uri, wanted.names, input_name, lambda _: None)

        zone = arrow_zone(self._option("timeZone", "UTC"))
        changes = CommitChanges(commit, self.schema, zone, read_parquet, input_name)
        look(changes.names)
        found = conversions([part_of(field) for field in changes.schema], self.schema, Rules(delta_leaf))
        wanted = set(columns or self.schema.names)  # where none is, the number of rows is
        chosen = {x: taken[1] for x, taken in found.items() if taken and (x in wanted or not taken[1].total)}
        for batch in changes.batches(list(chosen)):
            yield typed(batch, chosen, columns, self.schema)

    def _reading(self) -> ReadOptions:
        return ReadOptions(
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


def _text_leaf(zone: str) -> Leaf:
    """Makes the conversion of values of text files: all are of the declared types but times, which are text yet."""

    def leaf(part: ColumnPart, kind: pa.DataType) -> Conversion | None:
        if pa.types.is_decimal(kind):
            return Conversion(_checked, total=False)
        return SAME if part.type == kind else Conversion(lambda values: cast_plain(values, kind, zone), total=False)

    return leaf


def _checked(values: pa.Array) -> pa.Array:
    values.validate(full=True)  # Arrow's readers let some decimals through that have a digit too many
    return values


def _holds(name: str, kind: pa.DataType) -> bool:
    """Tells whether a format has values of a type, as far as Arrow reads them."""
    t = pa.types
    if name not in ("csv", "json"):
        return True
    if t.is_list(kind) or t.is_struct(kind):
        children = [kind.value_type] if t.is_list(kind) else [field.type for field in kind]
        return name == "json" and all(_holds(name, child) for child in children)
    return not (t.is_nested(kind) or t.is_duration(kind) or t.is_time(kind) or (name == "json" and is_bytes(kind)))
