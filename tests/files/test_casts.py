"""Files whose columns are of another type than was declared: of the same kind and without loss, or refused."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.orc as porc
import pyarrow.parquet as pq
import pytest

from gpu_ops.errors import BadInputError
from gpu_ops.files import binary_files
from gpu_ops.files.columns import Rules, conversion, part_of
from gpu_ops.files.formats import FileFormat

UTC = pa.timestamp("us", "UTC")
LOCAL = pa.timestamp("us")
NOON = dt.datetime(2024, 7, 1, 12)
ZONED = NOON.replace(tzinfo=dt.UTC)


def read(path: Path, name: str, there: pa.Array, kind: pa.DataType, **options: str) -> list[Any]:
    table = pa.table({"x": there})
    if name == "parquet":
        pq.write_table(table, path)
    elif name == "orc":
        porc.write_table(table, path)
    else:
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
    batches = list(FileFormat(name, pa.schema([("x", kind)]), tuple(options.items())).read(str(path), ["x"], "orders"))
    for batch in batches:
        assert batch.schema.field("x").type == kind
        batch.validate(full=True)
    return [value for batch in batches for value in batch["x"].to_pylist()]


SAME_KIND: list[tuple[pa.Array, pa.DataType, list[Any]]] = [
    (pa.array([1, None], pa.int8()), pa.int64(), [1, None]),
    (pa.array([1, -(2**31)], pa.int64()), pa.int32(), [1, -(2**31)]),
    (pa.array([1.5, None], pa.float32()), pa.float64(), [1.5, None]),
    (pa.array([Decimal("1.5")], pa.decimal128(5, 1)), pa.decimal128(12, 4), [Decimal("1.5000")]),
    (pa.array([Decimal("1.50")], pa.decimal128(5, 2)), pa.decimal128(4, 1), [Decimal("1.5")]),
    (pa.array([b"\xc3\xbc"]), pa.string(), ["ü"]),
    (pa.array(["ü"]), pa.binary(), [b"\xc3\xbc"]),
    (pa.array(["x", None], pa.large_string()), pa.string(), ["x", None]),
    (pa.array([NOON], pa.timestamp("ms")), LOCAL, [NOON]),
    (pa.array([NOON], pa.timestamp("ns")), LOCAL, [NOON]),
    (pa.array([ZONED], pa.timestamp("us", "Asia/Tokyo")), UTC, [ZONED]),
    (pa.array([NOON], LOCAL), UTC, [ZONED]),
    (pa.array([1, None], pa.int32()), pa.float64(), [1.0, None]),
    (pa.array([-(2**31)], pa.int32()), pa.decimal128(12, 2), [Decimal("-2147483648.00")]),
    (pa.array([2**63 - 1]), pa.decimal128(20, 0), [Decimal(2**63 - 1)]),
    (pa.array([[1, None], None, []], pa.list_(pa.int8())), pa.list_(pa.int64()), [[1, None], None, []]),
    (
        pa.array(
            [{"a": 1, "b": "x", "c": 2.5}], pa.struct([("a", pa.int8()), ("b", pa.string()), ("c", pa.float64())])
        ),
        pa.struct([("B", pa.string()), ("a", pa.int64())]),
        [{"B": "x", "a": 1}],
    ),
    (
        pa.array([[("k", NOON), ("l", None)], [], None], pa.map_(pa.string(), LOCAL)),
        pa.map_(pa.string(), UTC),
        [[("k", ZONED), ("l", None)], [], None],
    ),
]


@pytest.mark.parametrize("name", ["parquet", "orc", "arrow"])
@pytest.mark.parametrize(("there", "kind", "expected"), SAME_KIND, ids=[f"{t.type}-{k}" for t, k, _ in SAME_KIND])
def test_types_of_the_same_kind(
    name: str, there: pa.Array, kind: pa.DataType, expected: list[Any], tmp_path: Path
) -> None:
    if name == "orc" and {there.type, kind} == {pa.string(), pa.binary()}:
        with pytest.raises(BadInputError, match="and not"):  # Spark has the digits of bytes for text
            read(tmp_path / "f", name, there, kind)
    else:
        assert read(tmp_path / "f", name, there, kind) == expected


@pytest.mark.parametrize(
    ("there", "kind", "expected"),
    [
        (pa.array(["x", None, "x"]).dictionary_encode(), pa.string(), ["x", None, "x"]),
        (pa.nulls(2), pa.list_(pa.string()), [None, None]),
        (pa.array([[1, 2], None], pa.list_(pa.int8(), 2)), pa.list_(pa.int32()), [[1, 2], None]),
        (pa.array([[1]], pa.large_list(pa.int8())), pa.list_(pa.int32()), [[1]]),
        (pa.array([2**63 - 1], pa.uint64()), pa.int64(), [2**63 - 1]),
        (pa.array([b"ab"], pa.binary(2)), pa.binary(), [b"ab"]),
        (pa.array([dt.date(2024, 1, 2)], pa.date64()), pa.date32(), [dt.date(2024, 1, 2)]),
        (pa.array(["x"], pa.string_view()), pa.string(), ["x"]),
        (
            pa.array([{"a": "x"}, None], pa.struct([("a", pa.dictionary(pa.int8(), pa.string()))])),
            pa.struct([("a", pa.string())]),
            [{"a": "x"}, None],
        ),
        (pa.array([2**64 - 1], pa.uint64()), pa.decimal128(20, 0), [Decimal(2**64 - 1)]),
        (pa.array([0, 1], pa.bool8()), pa.int8(), [0, 1]),
    ],
)
def test_types_that_only_arrow_has(there: pa.Array, kind: pa.DataType, expected: list[Any], tmp_path: Path) -> None:
    assert read(tmp_path / "f", "arrow", there, kind) == expected


@pytest.mark.parametrize("name", ["parquet", "orc", "arrow"])
@pytest.mark.parametrize(
    ("there", "kind"),
    [
        (pa.array([1]), pa.string()), (pa.array(["1"]), pa.int64()), (pa.array(["1.5"]), pa.float64()),
        (pa.array([1.0]), pa.int64()), (pa.array([1]), pa.float64()), (pa.array([1.5]), pa.float32()),
        (pa.array([1]), pa.bool_()), (pa.array([True]), pa.int32()), (pa.array([1]), pa.decimal128(20, 1)),
        (pa.array([1], pa.int32()), pa.decimal128(11, 2)), (pa.array([1], pa.int32()), pa.float32()),
        (pa.array([1]), pa.date32()), (pa.array([1]), LOCAL), (pa.array([1], pa.int32()), pa.date32()),
        (pa.array([NOON], LOCAL), pa.date32()), (pa.array([1]), UTC),
        (pa.array([ZONED], UTC), LOCAL), (pa.array(["2024-01-02"]), pa.date32()), (pa.array([1]), pa.list_(pa.int64())),
        (pa.array([[1]]), pa.string()), (pa.array([[1]]), pa.list_(pa.string())),
        (pa.array([{"a": 1}]), pa.struct([("a", pa.string())])),
        (pa.array([{"a": 1}]), pa.map_(pa.string(), pa.int64())),
    ],
)  # fmt: skip
def test_types_of_another_kind(name: str, there: pa.Array, kind: pa.DataType, tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"'orders', column 'x': .*it is .* there, and not") as caught:
        read(tmp_path / "f", name, there, kind)
    assert caught.value.column == "x"


@pytest.mark.parametrize("name", ["parquet", "orc", "arrow"])
@pytest.mark.parametrize(
    ("there", "kind", "sample"),
    [
        (pa.array([1, 2**40]), pa.int32(), str(2**40)),
        (pa.array([200], pa.int16()), pa.int8(), "200"),
        (pa.array([1001], pa.timestamp("ns")), LOCAL, "1001"),
        (pa.array([Decimal("1.55")], pa.decimal128(5, 2)), pa.decimal128(5, 1), None),
        (pa.array([Decimal(1000)], pa.decimal128(5, 0)), pa.decimal128(5, 2), None),
        (pa.array([b"\xff"]), pa.string(), None),
        (pa.array([[1, 300]]), pa.list_(pa.int8()), "300"),
    ],
)
def test_values_that_have_no_place(
    name: str, there: pa.Array, kind: pa.DataType, sample: str | None, tmp_path: Path
) -> None:
    with pytest.raises(BadInputError, match=r"'orders', column 'x': cannot read") as caught:
        read(tmp_path / "f", name, there, kind)
    assert caught.value.sample == sample


@pytest.mark.parametrize(("zone", "hour"), [("UTC", 12), ("America/New_York", 16)])
def test_orc_has_times_of_no_zone(zone: str, hour: int, tmp_path: Path) -> None:
    instant = ZONED.replace(hour=hour)
    path = tmp_path / "f"
    assert read(path, "orc", pa.array([NOON], LOCAL), UTC, timeZone=zone) == [instant]
    kind = pa.struct([("p", pa.list_(LOCAL)), ("q", pa.map_(pa.string(), LOCAL))])
    zoned = pa.struct([("p", pa.list_(UTC)), ("q", pa.map_(pa.string(), UTC))])
    there = pa.array([{"p": [NOON, None], "q": [("k", NOON)]}], kind)
    assert read(path, "orc", there, zoned, timeZone=zone) == [{"p": [instant, None], "q": [("k", instant)]}]
    # an instant is one in any zone, and a time without a zone stays one
    assert read(path, "orc", pa.array([ZONED], UTC), UTC, timeZone=zone) == [ZONED]
    assert read(path, "orc", pa.array([NOON], LOCAL), LOCAL, timeZone=zone) == [NOON]


def test_days_of_orc_are_of_one_calendar(tmp_path: Path) -> None:
    first = dt.date(1582, 10, 15)
    days = pa.array([dt.date(2024, 1, 1), None, first])
    assert read(tmp_path / "f", "orc", days, pa.date32()) == days.to_pylist()
    with pytest.raises(BadInputError, match=r"column 'x'.*1582-10-14"):
        read(tmp_path / "f", "orc", pa.array([first - dt.timedelta(days=1)]), pa.date32())


def test_times_of_parquet_as_96_bits(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": pa.array([NOON], LOCAL)}), tmp_path / "f", use_deprecated_int96_timestamps=True)
    assert pq.ParquetFile(tmp_path / "f").schema.column(0).physical_type == "INT96"
    found = FileFormat("parquet", pa.schema([("x", UTC)])).read(str(tmp_path / "f"), ["x"], "orders")
    assert [row for batch in found for row in batch.to_pylist()] == [{"x": ZONED}]


def test_parts_of_nested_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binary_files, "ROWS", 2)
    items = [{"a": n, "b": [n] * (n % 3)} if n % 4 else None for n in range(9)]
    there = pa.array([items[:n] if n % 5 else None for n in range(9)])
    kind = pa.list_(pa.struct([("b", pa.list_(pa.int32())), ("a", pa.int8())]))
    expected = [v and [i and {"b": i["b"], "a": i["a"]} for i in v] for v in there.to_pylist()]
    for name in ("parquet", "arrow"):
        assert read(tmp_path / "f", name, there, kind) == expected
    change = conversion(part_of(pa.field("x", there.type)), kind, Rules(binary_files.arrow_leaf))
    for start in range(9):
        part = change.apply(there[start : start + 3])
        part.validate(full=True)
        assert part.to_pylist() == expected[start : start + 3]
