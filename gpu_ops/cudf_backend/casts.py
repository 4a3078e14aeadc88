"""Casts of conditions on columns in GPU memory, and what of a condition runs on the host."""

from __future__ import annotations

import dataclasses
import decimal
from typing import Any

import cupy as cp
import numpy as np
import pyarrow as pa
import pylibcudf as plc

from gpu_ops.arrays import Array
from gpu_ops.conditions.expressions import Call, Op, kind
from gpu_ops.cudf_backend import decimals
from gpu_ops.cudf_backend.decimals import Wide
from gpu_ops.cudf_backend.frame import Column, from_values, to_arrow, valid_mask, values, with_valid
from gpu_ops.cudf_backend.hashing import rescale
from gpu_ops.cudf_backend.storage import is_bytes, is_decimal, storage_type, to_storage

EXACT = decimal.Context(prec=100)
PER_DAY = {"us": 86_400 * 10**6, "ns": 86_400 * 10**9}


@dataclasses.dataclass(frozen=True, slots=True)
class Datum:
    """A node's value: n rows, or one that counts for all.

    Attributes:
        data: a cupy array; a `Wide` for decimals; a string column for text; None for types of which only
            the nulls are known. Nulls hold whatever is there.
        valid: mask of rows that are not null, None for all.
    """

    data: Any
    valid: Array | None

    @property
    def size(self) -> int:
        """Rows of the data."""
        if isinstance(self.data, Wide):
            return int(self.data.low.size)
        return int(self.data.size() if callable(self.data.size) else self.data.size)


def is_text(type_: pa.DataType) -> bool:
    """Types whose data is a string column."""
    return kind(type_) in ("string", "binary")


def dtype(type_: pa.DataType) -> Any:
    """What the arrays of a type hold."""
    return np.dtype(storage_type(type_).to_pandas_dtype()) if kind(type_) not in ("null", "months") else np.dtype(bool)


def one_text(value: object) -> pa.Array:
    """One string or binary value as it is stored; empty for None."""
    data = value.encode() if isinstance(value, str) else value or b""
    return to_storage(pa.array([data], pa.binary()))


def widened(column: Column, own: pa.DataType, type_: pa.DataType) -> Datum:
    """A column in the type that a condition gives it, which is `expressions.column_type` of its own."""
    valid = valid_mask(column)
    if is_decimal(own) and kind(type_) == "decimal":
        wide = decimals.from_lanes(values(column, np.int64, lanes=2))
        return Datum(decimals.scale_up(wide, type_.scale - own.scale), valid)
    if is_bytes(own):
        return Datum(column, valid)
    if kind(type_) in ("other", "null"):
        missing = cp.zeros(column.size(), bool) if kind(type_) == "null" else valid
        return Datum(cp.zeros(column.size(), bool), missing)
    numbers = values(column, storage_type(own).to_pandas_dtype())
    if kind(type_) == "decimal":
        return Datum(decimals.from_integers(numbers), valid)
    if pa.types.is_date64(own):
        numbers = numbers // (86_400 * 1000)
    elif kind(type_) in ("timestamp", "interval") and own.unit != type_.unit:
        numbers = rescale(numbers, own.unit, type_.unit)
    return Datum(numbers.astype(dtype(type_), copy=False), valid)


def on_host(node: Call) -> bool:
    """Whether an operation goes through `cpu_fallback`: libcudf would answer some rows differently."""
    if node.op in (Op.LOWER, Op.UPPER, Op.TRY_CAST):
        return True
    if node.op is not Op.CAST:
        return False
    source, target = node.args[0].type, node.type
    if kind(source) == kind(target) == "timestamp":
        return bool((source.tz is None) != (target.tz is None))
    return "string" in (kind(source), kind(target))


def host(datum: Datum, node: Call) -> Datum:
    """The operation on the host, by the CPU backend."""
    from cpu_fallback import casts as cpu  # noqa: PLC0415 - only conditions with text need it

    source = node.args[0].type
    column = datum.data if is_text(source) else _column(datum.data)
    if datum.valid is not None:
        column = with_valid(column, cp.array(cp.broadcast_to(datum.valid, (column.size(),))))
    array = to_arrow(column, source)
    match node.op:
        case Op.LOWER:
            result = cpu.lower(array)
        case Op.UPPER:
            result = cpu.upper(array)
        case Op.TRY_CAST:
            result = cpu.to_integer(array, node.type, whole=True)
        case _:
            result = cpu.cast(array, node.type)
    back = plc.Column.from_arrow(to_storage(result))
    if is_text(node.type):
        return Datum(back, valid_mask(back))
    return Datum(values(back, dtype(node.type)), valid_mask(back))


def _column(data: Any) -> Column:
    if isinstance(data, Wide):
        lanes = plc.gpumemoryview(decimals.to_lanes(data))
        return plc.Column(plc.DataType(plc.TypeId.DECIMAL128, 0), int(data.low.size), lanes, None, 0, 0, [])
    return from_values(data)


def cast(datum: Datum, source: pa.DataType, target: pa.DataType) -> Datum:
    """CAST; the pairs of types are those of `gpu_ops.conditions.functions.cast`, without those of `on_host`."""
    data, valid = datum.data, datum.valid
    match kind(source), kind(target):
        case "float", "integer":
            return Datum(_saturated(data, target), valid)
        case "integer" | "decimal", "decimal":
            return _to_decimal(datum, source, target)
        case "decimal", "integer":
            whole = decimals.scale_down(data, source.scale)
            return Datum(whole.low.view(np.int64).astype(dtype(target), copy=False), valid)
        case "decimal", "float":
            return Datum(decimals.to_float(data, source.scale, dtype(target)), valid)
        case "date", "timestamp":
            return Datum(data.astype(np.int64) * PER_DAY[target.unit], valid)
        case "timestamp", "date":
            return Datum((data // PER_DAY[source.unit]).astype(np.int32), valid)
        case "timestamp", "timestamp":
            return Datum(_to_unit(data, source.unit, target.unit), valid)
        case _:
            return Datum(data.astype(dtype(target), copy=False), valid)


def _saturated(data: Array, target: pa.DataType) -> Array:
    wide = data.astype(np.float64)
    low, high = float(-(1 << (target.bit_width - 1))), float(1 << (target.bit_width - 1))
    inside = (wide > low - 1) & (wide < high)
    result = cp.where(inside, wide, 0.0).astype(dtype(target))
    limits = np.iinfo(dtype(target))
    result[wide >= high] = limits.max
    result[wide <= low] = limits.min
    return result


_DIGITS = {8: 3, 16: 5, 32: 10, 64: 19}


def _to_decimal(datum: Datum, source: pa.DataType, target: pa.DataType) -> Datum:
    """To another precision and scale, rounding half up; what has too many digits before the point is null."""
    data, valid = datum.data, datum.valid
    if kind(source) == "integer":
        data, scale, known = decimals.from_integers(data), 0, _DIGITS[source.bit_width]
    else:
        scale, known = source.scale, source.precision - source.scale
    whole = target.precision - target.scale
    up, down = max(target.scale - scale, 0), max(scale - target.scale, 0)
    rounded = decimals.round_down(data, down)
    # a number that fits has at most so many digits here, before it is scaled up and could overflow
    digits = target.precision - up
    if (whole <= known if down else whole < known) and digits < 39:
        fits = abs(rounded).less(decimals.constant(10**digits))
        valid = fits if valid is None else valid & fits
    return Datum(decimals.scale_up(rounded, up), valid)


def _to_unit(data: Array, unit: str, target: str) -> Array:
    if unit == target:
        return data
    if target == "ns":
        return rescale(data, unit, target)
    # Arrow cuts off towards zero
    whole = data // 1000
    return cp.where((data < 0) & (whole * 1000 != data), whole + 1, whole)


def add_months(days: Array, months: Array) -> Array:
    """Days since 1970-01-01 plus calendar months, the day clipped to the month's last (int64)."""
    year, month, day = _civil(days)
    index = year * 12 + (month - 1) + months
    year, month = index // 12, index % 12 + 1
    first = _days(year, month)
    following = _days(year + (month == 12), cp.where(month == 12, 1, month + 1))
    return cp.minimum(first + day - 1, following - 1)


def _civil(days: Array) -> tuple[Array, Array, Array]:
    """Year, month, day: ``civil_from_days`` (Hinnant, "chrono-Compatible Low-Level Date Algorithms")."""
    shifted = days + 719_468
    era = shifted // 146_097
    of_era = shifted - era * 146_097
    year_of_era = (of_era - of_era // 1460 + of_era // 36_524 - of_era // 146_096) // 365
    of_year = of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    from_march = (5 * of_year + 2) // 153
    day = of_year - (153 * from_march + 2) // 5 + 1
    month = cp.where(from_march < 10, from_march + 3, from_march - 9)
    return year_of_era + era * 400 + (month <= 2), month, day


def _days(year: Array, month: Array) -> Array:
    """Days since 1970-01-01 of a month's first: ``days_from_civil`` for day 1."""
    year = year - (month <= 2)
    era = year // 400
    of_era = year - era * 400
    of_year = (153 * cp.where(month > 2, month - 3, month + 9) + 2) // 5
    return era * 146_097 + of_era * 365 + of_era // 4 - of_era // 100 + of_year - 719_468
