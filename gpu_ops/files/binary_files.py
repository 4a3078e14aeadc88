"""Rows of Parquet, ORC and Arrow files, with the types, names and calendar that Spark's readers go by.

**Types.** Each format has its own table of which types fit a declared one (`parquet_leaf`, `orc_leaf`, `arrow_leaf`): a
type of the same kind, if each value fits, and a wider one that Spark reads, too. Another kind is refused even where
Spark takes the bytes for what they are not.

**Calendar.** Parquet: `gpu_ops.files.calendars`. Arrow does not say which calendar an ORC file's days are of, so its
dates before 1582-10-15 are refused, at any depth. It has the local time of ORC's timestamps, in the zone of the JVM
that wrote them: those of an hour that clocks repeat are refused, and those of before a zone's first change of clocks,
or 1900, on which Java and Arrow do not agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
import pyarrow.fs as pafs
import pyarrow.orc as porc

from gpu_ops.files.calendars import GREGORIAN, STANDARD_TIME, Calendar
from gpu_ops.files.columns import (
    SAME,
    ColumnPart,
    Conversion,
    Leaf,
    Rules,
    WrongError,
    cast_to,
    conversions,
    kind_of,
    names_within,
    part_of,
    typed,
)
from gpu_ops.zones import first_change, in_zone

ROWS: Final = 1 << 17
"""Read at once."""

_DAY: Final = 86_400_000_000
_MICROS: Final = pa.timestamp("us")
_CATALYST: Final = b"spark.sql.catalyst.type"
"""Where Spark says in an ORC file what a column of another type is of its own."""


class ReadOptions(NamedTuple):
    """The options of a reader besides the schema.

    Attributes:
        case_sensitive: whether names that differ in case are different ones.
        missing_is_null: whether columns and fields that a file lacks are null, and no error.
        zone: of ORC's times without one, and of Parquet files in the Julian calendar that do not name theirs.
        date_mode: the calendar of Parquet files that Spark did not write (`Calendar.mode`).
        int96_mode: the same of their timestamps of 96 bits.
    """

    case_sensitive: bool = False
    missing_is_null: bool = False
    zone: str = "UTC"
    date_mode: str = "CORRECTED"
    int96_mode: str = "CORRECTED"


def read_binary(  # noqa: PLR0917 - what, where, and how
    name: str,
    file_system: pafs.FileSystem,
    path: str,
    schema: pa.Schema,
    columns: Sequence[str],
    reading: ReadOptions = ReadOptions(),  # noqa: B008 - a tuple of constants
    look: Callable[[Mapping[str, Any]], None] = lambda _: None,
) -> Iterator[pa.RecordBatch]:
    """The rows of a file, in its order.

    Args:
        name: ``"parquet"``, ``"orc"`` or ``"arrow"``.
        file_system: where it lies.
        path: the file there.
        schema: the declared columns. All of them are looked at, so that what is read does not depend on what is needed.
        columns: which of them are given, and in which order.
        reading: see there.
        look: is given the names of the file's columns, as `gpu_ops.files.new_columns` takes them.

    Returns:
        Batches of ``columns``, in the declared types.

    Raises:
        WrongError: a column that is missing, is there twice or is of another kind, or a value that has no place; names
            the column.
        ArrowException: what is no such file.
        OSError: it cannot be read.
    """
    file_format = _FORMATS[name]()
    fragment = file_format.make_fragment(path, file_system)
    there: pa.Schema = fragment.physical_schema
    parts, leaf = _described(name, fragment, there, reading)
    found = conversions(parts, schema, Rules(leaf, reading.case_sensitive, reading.missing_is_null))
    look({part.name: names_within(part) for part in parts})
    needed = set(columns)
    # others are read only where one of their values may be wrong
    chosen = {x: taken for x, taken in found.items() if taken is not None and (x in needed or not taken[1].total)}
    changes = {column: change for column, (_, change) in chosen.items()}
    for batch in _batches(name, fragment, [parts[place].name for place, _ in chosen.values()], file_system):
        yield typed(batch, changes, columns, schema)


class PlainFile(NamedTuple):
    """A Parquet file some of whose columns are read as they stand there.

    Attributes:
        rows: how many it has.
        size: the bytes of these columns in it.
        of: the bytes of all columns.
    """

    rows: int
    size: int
    of: int


_CODECS: Final = ("UNCOMPRESSED", "SNAPPY", "GZIP", "ZSTD")
"""Of which nobody doubts how they are meant."""


def plain_parquet(  # noqa: PLR0917 - as `read_binary`
    file_system: pafs.FileSystem,
    path: str,
    schema: pa.Schema,
    columns: Sequence[str],
    reading: ReadOptions,
    look: Callable[[Mapping[str, Any]], None],
) -> PlainFile | None:
    """Looks into the footer of a Parquet file; None where its rows are other than what lies under those names there.

    That is: where `read_binary`, whose arguments these are, would refuse the file, give nulls or convert a value, or
    where a column has its name in other letters, or one of several parts.
    """
    fragment = _FORMATS["parquet"]().make_fragment(path, file_system)
    there: pa.Schema = fragment.physical_schema
    parts, leaf = _described("parquet", fragment, there, reading)
    try:
        found = conversions(parts, schema, Rules(leaf, reading.case_sensitive, reading.missing_is_null))
    except WrongError:
        return None  # to be said where it is read
    look({part.name: names_within(part) for part in parts})
    for name in schema.names:
        taken = found[name]
        if name not in columns:
            if taken is not None and not taken[1].total:
                return None
        elif taken is None or not taken[1].same or parts[taken[0]].name != name or "." in name:
            return None
    groups, size, of = fragment.metadata, 0, 0
    for group in map(groups.row_group, range(groups.num_row_groups)):
        for chunk in map(group.column, range(group.num_columns)):
            of += chunk.total_compressed_size
            if chunk.path_in_schema in columns:
                if chunk.compression not in _CODECS or chunk.physical_type == "INT96":
                    return None
                size += chunk.total_compressed_size
    return PlainFile(groups.num_rows, size, of)


def parquet_batches(content: pa.Buffer, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of what `plain_parquet` has looked at, in its order, by the names and types of these columns.

    Raises:
        ArrowException, OSError: it is no such file.
    """
    fragment = _FORMATS["parquet"]().make_fragment(pa.BufferReader(content))
    for batch in fragment.to_batches(columns=schema.names, batch_size=ROWS, use_threads=False):
        if batch.schema.types != schema.types:
            raise pa.ArrowInvalid(f"it has {batch.schema.types}, not {schema.types}")
        yield batch


def _batches(
    name: str, fragment: pads.Fragment, names: list[str], file_system: pafs.FileSystem
) -> Iterator[pa.RecordBatch]:
    """Columns by their names, which are there once each, as they come."""
    if name == "orc" and any("." in column for column in names):
        # Arrow takes a dot in the name of an ORC column for a way into a struct, and gives nulls
        with file_system.open_input_file(fragment.path) as file:
            reader = porc.ORCFile(file)
            for stripe in range(reader.nstripes):
                rows = reader.read_stripe(stripe).select(names)
                yield from (rows.slice(start, ROWS) for start in range(0, rows.num_rows, ROWS))
        return
    yield from fragment.to_batches(columns=names, batch_size=ROWS, use_threads=False)


def _described(name: str, fragment: Any, there: pa.Schema, reading: ReadOptions) -> tuple[list[ColumnPart], Leaf]:
    """A file's columns, and what becomes of their parts."""
    if name == "arrow":
        return [part_of(field) for field in there], arrow_leaf
    if name == "orc":
        spark = lambda field: (field.metadata or {}).get(_CATALYST, b"").decode()  # noqa: E731
        return [part_of(field, spark) for field in there], orc_leaf(reading.zone)
    schema, metadata = fragment.metadata.schema, fragment.metadata.metadata or {}
    physical = (schema.column(number).physical_type for number in range(len(schema)))
    parts = [part_of(field, lambda _: next(physical)) for field in there]
    modes = {False: reading.date_mode, True: reading.int96_mode}
    calendar, of_int96 = (
        Calendar.of_file(metadata, int96=int96, mode=mode, zone=reading.zone) for int96, mode in modes.items()
    )
    return parts, parquet_leaf(calendar, of_int96)


_FITS: Final = {
    "boolean": ("boolean",),
    "integer": ("integer",),
    "float": ("float",),
    "decimal": ("decimal",),
    "text": ("text", "binary"),
    "binary": ("binary", "text", "fixed"),
    "date": ("date",),
    "instant": ("instant", "local"),
    "local": ("local", "date"),
    "duration": ("duration",),
    "time": ("time",),
}
"""Of which kinds (`kind_of`) values are that can be of a declared one; what else fits depends on the types."""

_DIGITS: Final = {8: 10, 16: 10, 32: 10, 64: 20}
"""Digits before the point of a decimal that Spark reads integers of so many bits as."""


def _plain_leaf(part: ColumnPart, kind: pa.DataType) -> Conversion | None:
    """Converts types that fit in all formats; None for others."""
    there, wanted = kind_of(part.type), kind_of(kind)
    if part.type == kind:
        return SAME
    if there == "integer" and wanted == "float":
        exact = pa.types.is_signed_integer(part.type) and part.type.bit_width <= 32 and kind == pa.float64()
        return cast_to(kind, total=True) if exact else None
    if there == "integer" and wanted == "decimal":
        wide = kind.precision - kind.scale >= _DIGITS[part.type.bit_width]
        # from integers Arrow has only decimals without a scale
        return cast_to(kind, before=pa.decimal128(_DIGITS[part.type.bit_width], 0), total=True) if wide else None
    if there not in _FITS.get(wanted, ()):
        return None
    if wanted == "float":
        return cast_to(kind, total=True) if part.type.bit_width <= kind.bit_width else None
    return cast_to(kind, total=_is_total(part.type, kind))


def _is_total(there: pa.DataType, kind: pa.DataType) -> bool:
    """Tells whether each value of a type has its place in another type of the same kind."""
    t = pa.types
    if t.is_signed_integer(there) and t.is_signed_integer(kind):
        return bool(there.bit_width <= kind.bit_width)
    if t.is_timestamp(there) and t.is_timestamp(kind):
        return bool(there.unit == kind.unit)
    if t.is_decimal(there) and t.is_decimal(kind):
        return bool(kind.scale >= there.scale and kind.precision - kind.scale >= there.precision - there.scale)
    return kind_of(kind) == "binary" or kind_of(there) == kind_of(kind) == "text"


def arrow_leaf(part: ColumnPart, kind: pa.DataType) -> Conversion | None:
    """Converts values of an Arrow file: Arrow's own types, and no calendar but today's."""
    return _plain_leaf(part, kind)


def parquet_leaf(calendar: Calendar, of_int96: Calendar) -> Leaf:
    """Makes the conversion of values of a Parquet file, by Spark's ``ParquetVectorUpdaterFactory``.

    Args:
        calendar: of its dates and timestamps.
        of_int96: of its timestamps of 96 bits.
    """

    def leaf(part: ColumnPart, kind: pa.DataType) -> Conversion | None:
        there, wanted = kind_of(part.type), kind_of(kind)
        counted = of_int96 if part.about == "INT96" else calendar
        if wanted == "instant" and there in ("instant", "local"):
            # a time without a zone is one of UTC to Spark
            exact = part.type.unit == "us" and counted.mode == "CORRECTED"
            if part.type == kind and counted.mode == "CORRECTED":
                return SAME
            return cast_to(kind, counted.instants, before=_MICROS if part.type.tz is None else kind, total=exact)
        if there == "date" and wanted in ("date", "local") and calendar.mode != "CORRECTED":
            return cast_to(kind, calendar.days, before=pa.date32(), total=calendar.mode == "LEGACY")
        if wanted == "duration" and part.about == "INT64" and part.type == pa.int64():
            return cast_to(kind, before=pa.duration("us"), total=True)  # so Spark has an interval
        return _plain_leaf(part, kind)

    return leaf


def orc_leaf(zone: str) -> Leaf:
    """Makes the conversion of values of an ORC file.

    Args:
        zone: of its times, which have none.
    """
    change = first_change(zone)
    begin = None if change is None else max(change, STANDARD_TIME) + _DAY

    def leaf(part: ColumnPart, kind: pa.DataType) -> Conversion | None:
        there, wanted = kind_of(part.type), kind_of(kind)
        if there == "date" and wanted == "date":
            return cast_to(kind, _days_of_one_calendar, total=False)
        if there == "local" and wanted == "instant":
            instant = pa.timestamp("us", kind.tz)

            def instants(values: pa.Array) -> pa.Array:
                first = pc.min(values)
                if first.is_valid and begin is not None and first.cast(pa.int64()).as_py() < begin:
                    problem = f"a timestamp before 1900, or before the clocks of {zone} were changed for the first time"
                    raise WrongError(problem, sample=str(first.cast(pa.string())))
                found = in_zone(values, instant, zone)
                twice = pc.index(pc.equal(found, in_zone(values, instant, zone, "latest")), False).as_py()
                if twice >= 0:
                    problem = (
                        f"a timestamp in an hour that the clocks of {zone} repeat, which Arrow does not tell apart"
                    )
                    raise WrongError(problem, sample=str(values[twice]))
                return found

            return cast_to(kind, instants, before=_MICROS, total=False)
        if there == "local" and wanted == "local" and part.about == "timestamp":
            return None  # an instant of Spark's
        if there == "integer" and wanted in ("local", "duration"):
            # so Spark has times without a zone, and intervals
            said = "timestamp_ntz" if wanted == "local" else "interval"
            return cast_to(kind, before=_counted(kind), total=True) if part.about.startswith(said) else None
        # Spark does not read dates as times, and has the digits of bytes for text
        other = (there, wanted) in {("date", "local"), ("binary", "text"), ("text", "binary")}
        return None if other else _plain_leaf(part, kind)

    return leaf


def _counted(kind: pa.DataType) -> pa.DataType:
    return _MICROS if pa.types.is_timestamp(kind) else pa.duration("us")


def _days_of_one_calendar(days: pa.Array) -> pa.Array:
    """Refuses dates that a file of ORC may have by the Julian calendar; Arrow does not tell them apart."""
    first = pc.min(days)
    if first.is_valid and first.cast(pa.int32()).as_py() < GREGORIAN:
        raise WrongError("a date before 1582-10-15", sample=str(first.cast(pa.string())))
    return days


_FORMATS: Final = {
    # timestamps of 96 bits are nanoseconds to Arrow otherwise, which hold three centuries on either side of 1970
    "parquet": lambda: pads.ParquetFileFormat(coerce_int96_timestamp_unit="us"),
    "orc": pads.OrcFileFormat,
    "arrow": pads.IpcFileFormat,
}
