"""Parquet, ORC and Arrow files: calendars, names and types, which Arrow alone does not read as Spark does."""

from __future__ import annotations

import datetime as dt
import time
from decimal import Decimal
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pyarrow.orc as porc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as hs

from gpu_ops.errors import BadInputError, DescriptionError
from gpu_ops.files.calendars import Calendar
from gpu_ops.files.formats import FileFormat

UTC, LOCAL, DATE = pa.timestamp("us", "UTC"), pa.timestamp("us"), pa.date32()
SPARK, OLD, OLD_INT96 = b"org.apache.spark.version", b"org.apache.spark.legacyDateTime", b"org.apache.spark.legacyINT96"
ZONE = b"org.apache.spark.timeZone"
BINARY = ("parquet", "orc", "arrow")


def write(path: Path, name: str, table: pa.Table, **options: Any) -> None:
    if name == "parquet":
        pq.write_table(table, path, **options)
    elif name == "orc":
        porc.write_table(table, str(path))
    else:
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)


def read(path: Path, name: str, schema: pa.Schema, **options: str) -> list[dict[str, Any]]:
    batches = FileFormat(name, schema, tuple(options.items())).read(str(path), schema.names, "orders")
    return [row for batch in batches for row in batch.to_pylist()]


def marked(path: Path, values: pa.Array, declared: pa.DataType, *, int96: bool = False, **marks: str) -> list[Any]:
    """A column of a Parquet file with Spark's metadata, read."""
    names = {"version": SPARK, "old": OLD, "old96": OLD_INT96, "zone": ZONE}
    metadata = {names[name]: value for name, value in marks.items()}
    table = pa.table({"x": values}).replace_schema_metadata(metadata)
    pq.write_table(table, path, use_deprecated_int96_timestamps=int96)
    return [row["x"] for row in read(path, "parquet", pa.schema([("x", declared)]))]


def julian_days(year: int, month: int, day: int) -> int:
    """Days from 1970 of a date of the Julian calendar (L. E. Doggett, Explanatory Supplement, 1992)."""
    return (
        367 * year - 7 * (year + 5001 + int((month - 9) / 7)) // 4 + 275 * month // 9 + day + 1_729_777
    ) - 2_440_588  # of 1970-01-01


@given(hs.lists(hs.tuples(hs.integers(1, 1582), hs.integers(1, 12), hs.integers(1, 28))))
def test_a_date_keeps_its_year_month_and_day(dates: list[tuple[int, int, int]]) -> None:
    dates = [date for date in dates if date < (1582, 10, 5)]
    days = [julian_days(*date) if date > (1, 1, 1) else -719164 for date in dates]
    made = Calendar("LEGACY").days(pa.array(days, pa.int32()).cast(DATE))
    assert made.to_pylist() == [dt.date(*date) if date > (1, 1, 1) else dt.date(1, 1, 1) for date in dates]
    noon = [day * 86_400_000_000 + 43_200_000_000 for day in days]
    made = Calendar("LEGACY", "UTC").instants(pa.array(noon).cast(UTC))
    assert [at.date() for at in made.to_pylist()] == [dt.date(*date) for date in dates]


OLD_DAY, DAY = dt.date(1001, 1, 7), dt.date(1001, 1, 1)  # the second is the first by the Julian calendar
NESTED = [
    (DATE, OLD_DAY, DAY),
    (pa.list_(DATE), [OLD_DAY, None], [DAY, None]),
    (pa.struct([("d", DATE)]), {"d": OLD_DAY}, {"d": DAY}),
    (pa.map_(DATE, pa.list_(DATE)), [(OLD_DAY, [OLD_DAY])], [(DAY, [DAY])]),
]


@pytest.mark.parametrize(("kind", "there", "expected"), NESTED, ids=[str(kind) for kind, _, _ in NESTED])
def test_dates_of_the_julian_calendar_at_any_depth(
    kind: pa.DataType, there: Any, expected: Any, tmp_path: Path
) -> None:
    values = pa.array([there, None], kind)
    for marks in ({"version": "2.4.5"}, {"version": "4.2.0", "old": ""}):
        assert marked(tmp_path / "f", values, kind, **marks) == [expected, None]
    for marks in ({}, {"version": "3.0.0"}, {"version": "4.2.0", "old96": ""}):
        assert marked(tmp_path / "f", values, kind, **marks) == [there, None]


def test_timestamps_of_the_julian_calendar_are_of_their_zone(tmp_path: Path) -> None:
    """An hour of 1880 in Paris was 9:21 ahead of UTC, which Java's old calendar rounded to the hour."""
    at = dt.datetime(1880, 1, 1, tzinfo=dt.UTC)
    values = pa.array([at, None], UTC)
    later = [at + dt.timedelta(seconds=3039), None]
    assert marked(tmp_path / "f", values, UTC, version="3.5.0", old="", zone="Europe/Paris") == later
    assert marked(tmp_path / "f", values, UTC, version="3.5.0", old="", zone="UTC") == [at, None]
    assert marked(tmp_path / "f", values, LOCAL, int96=True, version="3.5.0", old96="") == [
        at.replace(tzinfo=None),
        None,
    ]
    of_int96 = {"int96": True, "version": "3.5.0", "zone": "Europe/Paris"}
    assert marked(tmp_path / "f", values, UTC, **of_int96, old96="") == later
    assert marked(tmp_path / "f", values, UTC, **of_int96, old="") == [at, None]
    assert marked(tmp_path / "f", values, UTC, **{**of_int96, "version": "3.0.3"}) == later
    with pytest.raises(BadInputError, match=r"column 'x'.*Mars/Phobos.*julian-gregorian") as caught:
        marked(tmp_path / "f", values, UTC, version="3.5.0", old="", zone="Mars/Phobos")
    assert caught.value.sample == "1880-01-01 00:00:00.000000"


def test_a_calendar_that_is_not_said(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": pa.array([OLD_DAY])}), tmp_path / "f")
    schema = pa.schema([("x", DATE)])
    assert read(tmp_path / "f", "parquet", schema, datetimeRebaseMode="LEGACY") == [{"x": DAY}]
    with pytest.raises(BadInputError, match=r"column 'x'.*datetimeRebaseMode") as caught:
        read(tmp_path / "f", "parquet", schema, datetimeRebaseMode="EXCEPTION")
    assert caught.value.sample == "1001-01-07"


@pytest.mark.parametrize(("kind", "there", "_"), NESTED, ids=[str(kind) for kind, _, _ in NESTED])
def test_dates_of_orc_before_1582_are_refused_at_any_depth(
    kind: pa.DataType, there: Any, _: Any, tmp_path: Path
) -> None:
    write(tmp_path / "f", "orc", pa.table({"x": pa.array([there], kind), "y": [1]}))
    for columns in (["x"], ["y"]):
        reader = FileFormat("orc", pa.schema([("x", kind), ("y", pa.int64())]))
        with pytest.raises(BadInputError, match=r"'orders', column 'x'.*before 1582") as caught:
            list(reader.read(str(tmp_path / "f"), columns, "orders"))
        assert caught.value.sample == "1001-01-07"


def test_timestamps_of_orc_in_an_hour_that_clocks_repeat(tmp_path: Path) -> None:
    """Spark writes instants, of which Arrow has the local time: two of them are one."""
    schema = pa.schema([("x", UTC)])
    for year in (2024, 2044):
        first = dt.datetime(2024, 11, 3) if year == 2024 else dt.datetime(2044, 11, 6)
        for minutes, once in ((59, True), (60, False), (119, False), (120, True)):
            at = first + dt.timedelta(minutes=minutes)
            write(tmp_path / "f", "orc", pa.table({"x": [at]}))
            if once:
                (row,) = read(tmp_path / "f", "orc", schema, timeZone="America/New_York")
                assert row["x"] == at.replace(tzinfo=ZoneInfo("America/New_York"))
                continue
            with pytest.raises(BadInputError, match=r"column 'x'.*clocks of America/New_York repeat"):
                read(tmp_path / "f", "orc", schema, timeZone="America/New_York")


def test_timestamps_of_orc_before_1900(tmp_path: Path) -> None:
    """In Paris Arrow was 3,039 seconds off those that Spark had written."""
    kind = pa.struct([("at", pa.list_(UTC))])
    write(tmp_path / "f", "orc", pa.table({"x": [{"at": [dt.datetime(1899, 12, 31)]}]}))
    with pytest.raises(BadInputError, match=r"column 'x'.*before 1900, or .* Europe/Paris"):
        read(tmp_path / "f", "orc", pa.schema([("x", kind)]), timeZone="Europe/Paris")
    at = [dt.datetime(1899, 12, 31, tzinfo=dt.UTC)]
    for zone in ("UTC", "GMT", "Etc/UTC"):
        assert read(tmp_path / "f", "orc", pa.schema([("x", kind)]), timeZone=zone) == [{"x": {"at": at}}]


THERE = pa.table({
    "S": pa.array([{"Name": "x", "AGE": 5, "In": [{"K": 1}]}]), "ID": [7], "a.b": [8],
    "m": pa.array([[("k", {"V": 2})]], pa.map_(pa.string(), pa.struct([("V", pa.int64())]))),
})  # fmt: skip
IN = pa.list_(pa.struct([("k", pa.int64())]))
ALIKE = pa.schema([
    ("id", pa.int64()), ("s", pa.struct([("in", IN), ("age", pa.int32()), ("name", pa.string())])), ("A.B", pa.int64()),
    ("M", pa.map_(pa.string(), pa.struct([("v", pa.int64())]))),
])  # fmt: skip


@pytest.mark.parametrize("name", BINARY)
def test_names_are_found_at_any_depth(name: str, tmp_path: Path) -> None:
    """A struct's field whose name differs in case was null without a word; so was a column of ORC with a dot."""
    path = tmp_path / "f"
    write(path, name, THERE)
    inner = {"in": [{"k": 1}], "age": 5, "name": "x"}
    assert read(path, name, ALIKE) == [{"id": 7, "s": inner, "A.B": 8, "M": [("k", {"v": 2})]}]
    for schema, said in (
        (pa.schema([("id", pa.int64())]), "it is not among its columns S, ID"),
        (pa.schema([("S", pa.struct([("In", IN)]))]), r"field In\.item\.k is not among its columns K"),
    ):
        with pytest.raises(BadInputError, match=said) as caught:
            read(path, name, schema, caseSensitive="true")
        assert caught.value.column == schema.names[0]
        (row,) = read(path, name, schema, caseSensitive="true", missingColumns="null")
        assert row in ({"id": None}, {"S": {"In": [{"k": None}]}})


@pytest.mark.parametrize("name", BINARY)
def test_a_field_that_is_missing(name: str, tmp_path: Path) -> None:
    write(tmp_path / "f", name, pa.table({"s": [{"a": 1}]}))
    schema = pa.schema([("s", pa.struct([("a", pa.int64()), ("z", DATE)]))])
    with pytest.raises(BadInputError, match=r"column 's'.* its field z is not among its columns a") as caught:
        read(tmp_path / "f", name, schema)
    assert caught.value.column == "s"
    assert read(tmp_path / "f", name, schema, missingColumns="null") == [{"s": {"a": 1, "z": None}}]


@pytest.mark.parametrize("name", ["parquet", "arrow"])  # ORC's writer takes no such table
def test_two_columns_of_one_name(name: str, tmp_path: Path) -> None:
    one, two = pa.array([1]), pa.array([2])
    for names, declared in ((["a", "a", "b"], "a"), (["a", "A", "b"], "a"), (["a", "A", "b"], "A")):
        write(tmp_path / "f", name, pa.table([one, two, one], names=names))
        with pytest.raises(BadInputError, match=r"column '[aA]'.*it is there 2 times, as 'a', '[aA]'"):
            read(tmp_path / "f", name, pa.schema([(declared, pa.int64())]))
        assert read(tmp_path / "f", name, pa.schema([("b", pa.int64())])) == [{"b": 1}]
    both = pa.schema([("A", pa.int64()), ("a", pa.int64())])
    assert read(tmp_path / "f", name, both, caseSensitive="true") == [{"A": 2, "a": 1}]
    with pytest.raises(DescriptionError, match="two columns 'a'"):
        FileFormat(name, both)
    inner = pa.table({"s": pa.StructArray.from_arrays([one, two], ["x", "X"])})
    write(tmp_path / "f", name, inner)
    with pytest.raises(BadInputError, match=r"column 's'.*its field x is there 2 times, as 'x', 'X'"):
        read(tmp_path / "f", name, pa.schema([("s", pa.struct([("x", pa.int64())]))]))


def test_the_header_of_a_csv_file_is_found_as_columns_are(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("ID,more,Name\n1,2,x\n")
    schema = pa.schema([("name", pa.string()), ("id", pa.int64())])
    options = {"header": "true", "missingColumns": "null"}
    assert read(tmp_path / "f", "csv", schema, **options) == [{"name": "x", "id": 1}]
    assert read(tmp_path / "f", "csv", schema, **options, caseSensitive="true") == [{"name": None, "id": None}]
    (tmp_path / "f").write_text("id,ID,name\n1,2,x\n")
    with pytest.raises(BadInputError, match=r"column 'id'.*2 times"):
        read(tmp_path / "f", "csv", schema, **options)


WIDER = [
    (pa.array([5], pa.int32()), pa.float64(), 5.0),
    (pa.array([5], pa.int8()), pa.decimal128(12, 2), Decimal("5.00")),
    (pa.array([0.5], pa.float32()), pa.float64(), 0.5),
    (pa.array([dt.date(2026, 1, 1)]), LOCAL, dt.datetime(2026, 1, 1)),
]


@pytest.mark.parametrize(("there", "kind", "expected"), WIDER, ids=[f"{x.type}-{kind}" for x, kind, _ in WIDER])
def test_what_loses_nothing_is_read(there: pa.Array, kind: pa.DataType, expected: Any, tmp_path: Path) -> None:
    """Spark 4.2 reads these, at any depth; not dates as timestamps in ORC."""
    wrapped = pa.array(
        [{"y": [("k", there.to_pylist())]}], pa.struct([("y", pa.map_(pa.string(), pa.list_(there.type)))])
    )
    nested = pa.struct([("y", pa.map_(pa.string(), pa.list_(kind)))])
    for name in BINARY:
        write(tmp_path / "f", name, pa.table({"x": there, "s": wrapped}))
        if (name, kind) == ("orc", LOCAL):
            with pytest.raises(BadInputError, match="and not timestamp"):
                read(tmp_path / "f", name, pa.schema([("x", kind)]))
            continue
        rows = read(tmp_path / "f", name, pa.schema([("x", kind), ("s", nested)]))
        assert rows == [{"x": expected, "s": {"y": [("k", [expected])]}}]


@pytest.mark.parametrize(
    ("there", "kind"),
    [
        (pa.array([1_700_000_000_000]), LOCAL), (pa.array([1_700_000_000_000]), UTC),
        (pa.array([20_000], pa.int32()), DATE),
        (pa.array([b"0123456789abcdef"], pa.binary(16)), pa.string()), (pa.array([Decimal("1.50")]), pa.int64()),
        (pa.array([dt.date(2026, 1, 1)]), pa.int32()), (pa.array([dt.date(2026, 1, 1)]), UTC),
        (pa.array([1]), pa.float64()), (pa.array([1], pa.int32()), pa.float32()), (pa.array([1.5]), pa.float32()),
        (pa.array([1], pa.int32()), pa.decimal128(9, 0)), (pa.array([Decimal(1)]), pa.binary()),
    ],
)  # fmt: skip
def test_what_a_column_is_not(there: pa.Array, kind: pa.DataType, tmp_path: Path) -> None:
    """An int64 was taken for microseconds, and sixteen bytes for text."""
    for name in BINARY:
        if name == "orc" and pa.types.is_fixed_size_binary(there.type):
            continue  # it has bytes of any length only
        for values, declared in (
            (there, kind),
            (
                pa.array([{"y": there.to_pylist()}], pa.struct([("y", pa.list_(there.type))])),
                pa.struct([("y", pa.list_(kind))]),
            ),
        ):
            write(tmp_path / "f", name, pa.table({"x": values}))
            with pytest.raises(BadInputError, match=r"column 'x'.*it is .* there, and not") as caught:
                read(tmp_path / "f", name, pa.schema([("x", declared)]))
            assert caught.value.column == "x"


def test_an_interval_of_spark_is_an_int64_in_parquet_alone(tmp_path: Path) -> None:
    schema = pa.schema([("x", pa.duration("us"))])
    table = pa.table({"x": [1_000_001]})
    write(tmp_path / "f", "parquet", table)
    assert read(tmp_path / "f", "parquet", schema) == [{"x": dt.timedelta(seconds=1, microseconds=1)}]
    for name in ("orc", "arrow"):  # there Spark, or Arrow, says that it is one
        write(tmp_path / "f", name, table)
        with pytest.raises(BadInputError, match="it is int64 there, and not duration"):
            read(tmp_path / "f", name, schema)


def test_thousands_of_columns_are_read_in_linear_time(tmp_path: Path) -> None:
    """Names were searched in a list for each column: ten thousand took 127 s."""
    taken = []
    for count in (500, 5_000):
        names = [f"c{number}" for number in range(count)]
        write(tmp_path / "f", "parquet", pa.table({name: [1] for name in names}))
        begin = time.process_time()
        assert len(read(tmp_path / "f", "parquet", pa.schema([(name, pa.int64()) for name in names]))[0]) == count
        taken.append(time.process_time() - begin)
    assert taken[1] < 40 * taken[0]
