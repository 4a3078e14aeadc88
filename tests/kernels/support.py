"""Columns of every type of DESIGN 3.7 (and a few more), with the values that are special in each."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
from oracle.drive import canonical

from gpu_ops.arrays import Array
from gpu_ops.kernels import Frame, Kernels

_DAY, _MOMENT = dt.date(1969, 2, 28), dt.datetime(1969, 12, 31, 23, 59, 59, 999_999)
_FLOATS = [0.0, -0.0, math.nan, -math.nan, math.inf, -math.inf, 1.5, -1.5]
_TEXT = ["", "a", "b", "aa", "a\0", "ä", "日本", "\U0001f600", "x" * 40]
_BYTES = [b"", b"\0", b"\xff", b"\xff\0", b"abc", b"\x80" * 20]
_STRUCT = pa.struct([("a", pa.int16()), ("b", pa.string()), ("c", pa.float64())])
_DEEP = pa.list_(pa.struct([("at", pa.timestamp("us", "UTC")), ("tags", pa.list_(pa.string()))]))


def _integers(bits: int, *, signed: bool) -> list[int]:
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    return [0, 1, 2, low, high, high - 1]


TYPES: dict[str, tuple[pa.DataType, list[Any]]] = {
    **{f"int{b}": (getattr(pa, f"int{b}")(), _integers(b, signed=True)) for b in (8, 16, 32, 64)},
    **{f"uint{b}": (getattr(pa, f"uint{b}")(), _integers(b, signed=False)) for b in (8, 16, 32, 64)},
    "float": (pa.float32(), _FLOATS),
    "double": (pa.float64(), [*_FLOATS, 5e-324, 1e300]),
    "boolean": (pa.bool_(), [True, False]),
    "decimal": (pa.decimal128(10, 2), [Decimal("1.50"), Decimal("-1.50"), Decimal("0.00"), Decimal("99999999.99")]),
    "decimal38": (pa.decimal128(38, 6), [Decimal(0), Decimal(10) ** 31, -(Decimal(10) ** 31), Decimal("1e-6")]),
    "string": (pa.string(), _TEXT),
    "large_string": (pa.large_string(), _TEXT),
    "binary": (pa.binary(), _BYTES),
    "large_binary": (pa.large_binary(), _BYTES),
    "fixed_binary": (pa.binary(3), [b"abc", b"\0\0\0", b"\xff\xff\xff"]),
    "date": (pa.date32(), [_DAY, dt.date(1970, 1, 1), dt.date(9999, 12, 31), dt.date(1, 1, 1)]),
    "timestamp": (pa.timestamp("us", "Europe/Berlin"), [0, 1, -1, 253_402_300_799_999_999, -62_135_596_800_000_000]),
    "timestamp_ntz": (pa.timestamp("us"), [_MOMENT, dt.datetime(2026, 3, 29, 2, 30)]),
    "timestamp_ns": (pa.timestamp("ns"), [0, 1, -1, (1 << 63) - 1, -(1 << 63)]),
    "time": (pa.time64("us"), [dt.time(0), dt.time(23, 59, 59, 999_999)]),
    "duration": (pa.duration("us"), [0, 1, -1, (1 << 62)]),
    "array": (pa.list_(pa.int32()), [[], [1], [1, None], [None, 1], [1, 1], [None]]),
    "array_of_doubles": (pa.list_(pa.float64()), [[], [0.0, math.nan], [-0.0, math.nan], [math.nan, 0.0], [None]]),
    "struct": (_STRUCT, [{"a": 1, "b": "x", "c": 0.0}, {"a": 1, "b": "x", "c": -0.0}, {"a": None, "b": None, "c": None}]),
    "map": (pa.map_(pa.string(), pa.int64()), [[], [("a", 1)], [("a", None)], [("b", 1)], [("a", 1), ("b", 2)]]),
    "deep": (_DEEP, [[], [None], [{"at": None, "tags": ["x", None]}], [{"at": _MOMENT, "tags": []}] * 2]),
    "null": (pa.null(), [None]),
}  # fmt: skip


def every(name: str) -> pa.Array:
    """Each value of a type twice, nulls between."""
    kind, values = TYPES[name]
    return pa.array([*values, None, *values, None], kind)


def some(name: str, count: int, rng: np.random.Generator) -> pa.Array:
    """So many of a type's values and nulls, at random."""
    return every(name).take(pa.array(rng.integers(0, len(every(name)), count)))


def everything(count: int, rng: np.random.Generator) -> pa.Table:
    """A table with a column of every type."""
    return pa.table({name: some(name, count, rng) for name in TYPES})


def plain_rows(table: pa.Table) -> list[tuple[Any, ...]]:
    """Rows that compare as the pack compares: NaN equals NaN, -0.0 equals 0.0, null equals null."""
    return list(zip(*(plain_values(column) for column in table.columns), strict=True)) or [()] * table.num_rows


def plain_values(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    """A column's values likewise."""
    return [canonical(value) for value in integral(column).to_pylist()]


def frame_of(kernels: Kernels, **columns: pa.Array) -> Frame:
    """A frame of these columns."""
    return kernels.frame(pa.table(columns))


def rows_of(kernels: Kernels, positions: Sequence[int]) -> Array:
    """Positions in the backend's memory."""
    return kernels.asarray(np.array(positions, np.int64))


def same(found: pa.Table, wanted: pa.Table) -> None:
    """Assert that two tables hold the same rows, bit by bit, NaN excepted."""
    assert found.schema.equals(wanted.schema), f"{found.schema}\nis not\n{wanted.schema}"
    found.validate(full=True)
    for name in wanted.column_names:
        assert _exact(found[name]) == _exact(wanted[name]), f"column {name}"


def _exact(column: pa.ChunkedArray) -> list[str]:
    return [repr(value) for value in integral(column).to_pylist()]


def integral(column: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Times as the integers they are: Python's have no nanoseconds, and end in the year 9999 of every zone."""
    wide = pa.types.is_timestamp(column.type) or pa.types.is_duration(column.type)
    return column.cast(pa.int64()) if wide else column
