"""Files that a backend writes out of its memory, beside pyarrow's of the same rows, as DuckDB reads both."""

from __future__ import annotations

import datetime as dt
import io
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from gpu_ops.kernels import Kernels
from kernels.conftest import only_on

pytestmark = pytest.mark.thorough
GROUP = 5000  # libcudf makes row groups of whole fragments, which have so many rows
ROWS = 2 * GROUP + 2000
_RNG = np.random.default_rng(56)


def _numbers(kind: pa.DataType) -> pa.Array:
    bits = kind.bit_width - 1
    ends = np.array([-(2**bits), 2**bits - 1, 0, 1], object)
    values = [*ends, *map(int, _RNG.integers(-100, 100, ROWS - 4))]
    return pa.array(values, kind)


def _times(unit: str, zone: str | None) -> pa.Array:
    numbers = pa.array([-1, 0, *map(int, _RNG.integers(0, 1 << 50, ROWS - 2))], pa.int64())
    return numbers.cast(pa.timestamp(unit, zone))


_FLOATS = [0.0, -0.0, 1.5, float("inf"), float("-inf"), *_RNG.normal(size=ROWS - 5)]
_TEXT = ["", "ä", "\U0001f600", "z" * 70, *(f"text {n}" for n in _RNG.integers(0, 50, ROWS - 4))]
COLUMNS = {
    "bool": pa.array(_RNG.integers(0, 2, ROWS).astype(bool)),
    **{f"int{bits}": _numbers(getattr(pa, f"int{bits}")()) for bits in (8, 16, 32, 64)},
    "float32": pa.array(_FLOATS, pa.float32()),
    "float64": pa.array(_FLOATS, pa.float64()),
    "finite": pa.array(_RNG.normal(size=ROWS), pa.float32()),  # of infinite bounds DuckDB says nothing
    "zero": pa.array(_RNG.choice([0.0, -0.0], ROWS)),
    **{
        f"decimal({p}, {s})": pa.array([Decimal(f"{n}e-{s}") for n in (-(10**p) + 1, 10**p - 1, 0)] * (ROWS // 3), pa.decimal128(p, s))
        for p, s in ((1, 0), (9, 2), (10, 2), (18, 18), (19, 4), (38, 10))
    },
    "text": pa.array(_TEXT),
    "bytes": pa.array([b"", b"\xff\x00", *(bytes([n]) for n in _RNG.integers(0, 256, ROWS - 2))], pa.binary()),
    "date": pa.array([dt.date(1, 1, 1), dt.date(9999, 12, 31), dt.date(1969, 12, 31)] * (ROWS // 3)),
    **{f"at {unit}": _times(unit, "UTC") for unit in ("ms", "us", "ns")},
    "at in a zone": _times("us", "Europe/Berlin"),
    "lasting": pa.array(_RNG.integers(-(1 << 40), 1 << 40, ROWS), pa.int64()).cast(pa.duration("us")),
    "row kind": pa.array(_RNG.choice(["+I", "-U", "+U", "-D"], ROWS)),
}  # fmt: skip
_MISSING = pa.array(_RNG.random(ROWS) < 0.2)


def _table(*, nulls: bool) -> pa.Table:
    arrays = [pc.if_else(_MISSING, pa.scalar(None, x.type), x) for x in COLUMNS.values()] if nulls else COLUMNS.values()
    return pa.table(list(arrays), list(COLUMNS))


def _written(kernels: Kernels, table: pa.Table, path: Path, compression: str | None = "snappy") -> None:
    assert kernels.files is not None
    rows = range(table.num_rows)
    frame = kernels.frame(table)
    kernels.files.write_parquet(frame, table.schema, rows, str(path), compression=compression, rows_per_group=GROUP)


def _said(path: Path) -> dict[str, Any]:
    """What DuckDB says of a file; lengths and encodings are the writer's own affair."""
    con = duckdb.connect()
    con.execute("SET TimeZone = 'UTC'")
    schema = con.sql(
        f"SELECT name, CASE type WHEN 'INT96' THEN type ELSE replace(type, 'FIXED_LEN_BYTE_ARRAY', 'FLBA') END, "
        f"repetition_type, num_children, converted_type, scale, precision, logical_type FROM parquet_schema('{path}')"
    ).fetchall()
    groups = con.sql(
        "SELECT row_group_id, row_group_num_rows, path_in_schema, num_values, stats_null_count, "
        f"stats_min_value, stats_max_value FROM parquet_metadata('{path}') ORDER BY ALL"
    ).fetchall()
    described = con.sql(f"DESCRIBE FROM read_parquet('{path}')").fetchall()
    rows = con.sql(f"SELECT * REPLACE (hex(bytes) AS bytes) FROM read_parquet('{path}')").fetchall()
    return {
        "schema": schema[1:],
        "groups": groups,
        "types": described,
        "rows": [repr(row) for row in rows],
    }


@only_on("gpu", "emulated")
@pytest.mark.parametrize("nulls", [False, True])
def test_types_statistics_and_rows_are_those_of_pyarrow(kernels: Kernels, tmp_path: Path, nulls: bool) -> None:
    table = _table(nulls=nulls)
    _written(kernels, table, tmp_path / "card.parquet")
    pq.write_table(table, tmp_path / "host.parquet", compression="snappy", row_group_size=GROUP)
    card, host = (_said(tmp_path / f"{name}.parquet") for name in ("card", "host"))
    for part in host:
        assert card[part] == host[part], part
    bounds = {name: (least, most) for _, _, name, _, _, least, most in card["groups"]}  # of the last row group
    assert all(None not in ends for ends in bounds.values())
    assert bounds["zero"] == ("-0.0", "0.0")
    assert pq.read_table(tmp_path / "card.parquet").equals(table)
    fields = [list(pq.read_schema(tmp_path / f"{name}.parquet")) for name in ("card", "host")]
    assert fields[0] == fields[1]


@only_on("gpu", "emulated")
@pytest.mark.parametrize("compression", [None, "snappy", "zstd", "lz4"])
def test_compressions_are_those_of_pyarrow(kernels: Kernels, tmp_path: Path, compression: str | None) -> None:
    table = pa.table({"text": [f"{'many times ' * 5}{n}" for n in range(ROWS)], "number": pa.array(range(ROWS))})
    _written(kernels, table, tmp_path / "card.parquet", compression)
    pq.write_table(table, tmp_path / "host.parquet", compression=compression or "none")
    card, host = (_codecs(tmp_path / f"{name}.parquet") for name in ("card", "host"))
    assert card == host
    assert pq.read_table(tmp_path / "card.parquet").equals(table)


def _codecs(path: Path) -> Any:
    return duckdb.sql(
        f"SELECT DISTINCT path_in_schema, compression FROM parquet_metadata('{path}') ORDER BY 1"
    ).fetchall()


@only_on("gpu", "emulated")
def test_columns_without_nulls_and_parts_of_rows(kernels: Kernels, tmp_path: Path) -> None:
    """Also into memory, from which a file goes to an object store."""
    schema = pa.schema([pa.field("kind", pa.string(), nullable=False), ("at", pa.timestamp("us")), ("n", pa.int16())])
    at = pa.array([None, *range(ROWS - 1)], pa.int64()).cast(pa.timestamp("us"))
    table = pa.table([COLUMNS["row kind"], at, COLUMNS["int16"]], schema=schema)
    assert kernels.files is not None
    frame, found = kernels.frame(table), []
    assert kernels.files.nbytes(frame) >= ROWS * 10
    for start in range(0, ROWS, 700):
        rows, sink = range(start, min(start + 700, ROWS)), io.BytesIO()
        kernels.files.write_parquet(frame, schema, rows, sink, compression="snappy", rows_per_group=1 << 20)
        found.append(pq.read_table(pa.BufferReader(sink.getvalue())))
        assert found[-1].schema.equals(schema)
    assert pa.concat_tables(found).equals(table)
    path = tmp_path / "card.parquet"
    kernels.files.write_parquet(frame, schema, range(ROWS), str(path), compression=None, rows_per_group=GROUP)
    said = duckdb.sql(f"SELECT name, repetition_type, logical_type FROM parquet_schema('{path}') OFFSET 1").fetchall()
    assert [row[:2] for row in said] == [("kind", "REQUIRED"), ("at", "OPTIONAL"), ("n", "OPTIONAL")]
    assert "isAdjustedToUTC=0" in said[1][2]


@only_on("gpu", "emulated")
def test_numbers_that_are_none_have_no_bounds(kernels: Kernels, tmp_path: Path) -> None:
    """Of a row group with a NaN libcudf says none at all, where pyarrow has those of the other floats."""
    floats = pa.array([float("nan"), 1.0, None, *[float(n) for n in range(GROUP - 3)], *[2.5] * GROUP])
    assert len(floats) == 2 * GROUP
    table = pa.table({"f": floats, "nothing": pa.nulls(len(floats), pa.int32())})
    _written(kernels, table, tmp_path / "card.parquet")
    said = duckdb.sql(
        "SELECT path_in_schema, stats_min_value, stats_max_value "
        f"FROM parquet_metadata('{tmp_path / 'card.parquet'}') ORDER BY 1, row_group_id"
    ).fetchall()
    assert said[0] == ("f", None, None)  # the second group has bounds on a card
    assert said[2:] == [("nothing", None, None)] * 2
    found = duckdb.sql(f"SELECT count(*) FROM read_parquet('{tmp_path / 'card.parquet'}') WHERE isnan(f)").fetchall()
    assert found == [(1,)]


def _read(kernels: Kernels, path: Path, schema: pa.Schema) -> pa.Table:
    assert kernels.files is not None
    frame = kernels.files.read_parquet(str(path), schema)
    return kernels.to_arrow(frame, schema)


@only_on("gpu", "emulated")
@pytest.mark.parametrize("nulls", [False, True])
@pytest.mark.parametrize("integers", [False, True])
def test_what_is_read_is_what_pyarrow_reads(kernels: Kernels, tmp_path: Path, nulls: bool, integers: bool) -> None:
    """Of files of pyarrow's, whose decimals are of any width, and of libcudf's own; DuckDB finds as many values."""
    table = _table(nulls=nulls)
    path = tmp_path / "host.parquet"
    pq.write_table(table, path, row_group_size=GROUP, store_decimal_as_integer=integers)
    assert _read(kernels, path, table.schema).equals(table)
    some = pa.schema([table.schema.field(name) for name in ("text", "decimal(9, 2)", "at us", "bool")])
    assert _read(kernels, path, some).equals(table.select(some.names))
    _written(kernels, table, tmp_path / "card.parquet")
    assert _read(kernels, tmp_path / "card.parquet", table.schema).equals(table)
    counted = ", ".join(f'count("{name}")' for name in table.column_names)
    (found,) = duckdb.sql(f"SELECT {counted} FROM read_parquet('{path}')").fetchall()
    read = _read(kernels, path, table.schema)
    assert list(found) == [len(column) - column.null_count for column in read.columns]


@only_on("gpu", "emulated")
def test_spark_writes_other_widths(kernels: Kernels, tmp_path: Path) -> None:
    """A file without Arrow's schema, and with columns that nobody asks for."""
    table = _table(nulls=True).drop_columns(["lasting"])
    pq.write_table(table, tmp_path / "spark.parquet", store_schema=False, compression="gzip", data_page_version="2.0")
    found = pq.read_table(tmp_path / "spark.parquet")
    some = pa.schema(
        [(name, kind) for name, kind in zip(found.column_names, found.schema.types, strict=True) if name != "text"]
    )
    assert _read(kernels, tmp_path / "spark.parquet", some).equals(found.drop_columns(["text"]))


@only_on("gpu", "emulated")
@pytest.mark.parametrize(
    ("column", "kind"),
    [("int32", pa.int64()), ("at ms", pa.timestamp("us", "UTC")), ("text", pa.int32()), ("none", pa.int32())],
)
def test_other_columns_than_the_files_are_refused(
    kernels: Kernels, tmp_path: Path, column: str, kind: pa.DataType
) -> None:
    pq.write_table(_table(nulls=False), tmp_path / "a.parquet")
    with pytest.raises((ValueError, RuntimeError), match=column):
        _read(kernels, tmp_path / "a.parquet", pa.schema([(column, kind)]))
    with pytest.raises(OSError, match=r"b\.parquet"):
        _read(kernels, tmp_path / "b.parquet", pa.schema([("int32", pa.int32())]))
