"""Hashes and equality of rows in GPU memory, for columns of any type, nested ones included.

The rules are those of `cpu_fallback.hashing`: NaN equals NaN, -0.0 equals 0.0, null equals null; equal rows have
equal hashes. The hashes themselves differ from the CPU's (libcudf's xxHash64 takes all columns of a row in one
call), and nothing that is seen outside may depend on them.

Groups and order of rows that are all there, by libcudf, where it says exactly what the CPU does.

Sums of floats stay on the CPU: the card adds them up in whatever order, so their last bits would differ.

**Decimals** are 128-bit integers as two arrays of 64 bits, their scale part of their type and not stored: cupy has no
such type. Numbers are two's complement: ``high`` int64, ``low`` uint64; results wrap around.
Shapes broadcast.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import cupy as cp
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pylibcudf as plc

from gpu_ops.arrays import Array
from gpu_ops.cudf_backend.device import spread
from gpu_ops.cudf_backend.frame import DeviceColumn, Frame, from_values, gather, to_arrow, valid_mask, values
from gpu_ops.cudf_backend.storage import decoded, element_type, is_bytes, is_decimal, is_list, storage_type

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


@dataclasses.dataclass(frozen=True, slots=True)
class Wide:
    """An array of 128-bit integers."""

    high: Array
    low: Array

    def __add__(self, other: Wide) -> Wide:
        low = self.low + other.low
        carry = (low < self.low).astype(np.int64)
        return Wide(self.high + other.high + carry, low)

    def __neg__(self) -> Wide:
        low = ~self.low + np.uint64(1)
        return Wide(~self.high + (low == 0).astype(np.int64), low)

    def __sub__(self, other: Wide) -> Wide:
        borrow = (self.low < other.low).astype(np.int64)
        return Wide(self.high - other.high - borrow, self.low - other.low)

    def __mul__(self, other: Wide) -> Wide:
        high, low = _product(self.low, other.low)
        cross = self.low * other.high.view(np.uint64) + self.high.view(np.uint64) * other.low
        return Wide((high + cross).view(np.int64), low)

    def equal(self, other: Wide) -> Array:
        """Mask of equal numbers."""
        return (self.high == other.high) & (self.low == other.low)

    def less(self, other: Wide) -> Array:
        """Mask of smaller numbers."""
        return (self.high < other.high) | ((self.high == other.high) & (self.low < other.low))


def constant(number: int) -> Wide:
    """One number, of shape (1,)."""
    bits = number & ((1 << 128) - 1)
    high, low = np.array([bits >> 64], np.uint64), np.array([bits & ((1 << 64) - 1)], np.uint64)
    return Wide(cp.asarray(high.view(np.int64)), cp.asarray(low))


def from_lanes(lanes: Array) -> Wide:
    """From a decimal128 buffer as int64: low, high, low, high, ..."""
    return Wide(cp.ascontiguousarray(lanes[1::2]), cp.ascontiguousarray(lanes[::2]).view(np.uint64))


def to_lanes(wide: Wide) -> Array:
    """Lays 128-bit integers out like a decimal128 buffer."""
    lanes = cp.empty(2 * wide.low.size, np.int64)
    lanes[::2], lanes[1::2] = wide.low.view(np.int64), wide.high
    return lanes


def from_integers(values: Array) -> Wide:
    """From signed or unsigned integers of any width."""
    if values.dtype == np.uint64:
        return Wide(cp.zeros(values.shape, np.int64), values)
    wide = values.astype(np.int64)
    return Wide(wide >> 63, wide.view(np.uint64))


def choose(mask: Array, first: Wide, second: Wide) -> Wide:
    """First's numbers where the mask is set, else second's."""
    return Wide(cp.where(mask, first.high, second.high), cp.where(mask, first.low, second.low))


def scale_up(wide: Wide, digits: int) -> Wide:
    """Multiplies by a power of ten."""
    return wide * constant(10**digits) if digits else wide


def _product(a: Array, b: Array) -> tuple[Array, Array]:
    """High and low 64 bits of the product of two uint64."""
    a0, a1, b0, b1 = a & _LOW, a >> _HALF, b & _LOW, b >> _HALF
    low, mid, other, high = a0 * b0, a1 * b0, a0 * b1, a1 * b1
    middle = (low >> _HALF) + (mid & _LOW) + (other & _LOW)
    return high + (mid >> _HALF) + (other >> _HALF) + (middle >> _HALF), a * b


_MUL1, _MUL2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_NULL = np.uint64(0xA5A5_5A5A_1234_4321)
_EMPTY = np.uint64(0x1B87_3593_CC9E_2D51)

Typed = tuple[DeviceColumn, pa.DataType, pa.DataType]
"""A column, its Arrow type, and the type it is compared in."""


def mix(numbers: Array) -> Array:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014): a bijection that spreads every bit."""
    x = numbers + _GOLDEN
    x ^= x >> np.uint64(30)
    x *= _MUL1
    x ^= x >> np.uint64(27)
    x *= _MUL2
    x ^= x >> np.uint64(31)
    return x


def hash_columns(columns: Sequence[Typed], length: int) -> Array:
    """One hash per row (uint64) over all columns, in order."""
    if not columns:
        return mix(cp.full(length, _EMPTY, np.uint64))
    if length == 0:
        return cp.empty(0, np.uint64)
    numbers, mixed = _numbers(*columns[0])
    if mixed and len(columns) == 1:
        return numbers[0]
    for column in columns[1:]:
        numbers.extend(_numbers(*column)[0])
    # without nulls: to libcudf, what comes before a null in a row counts for nothing
    return values(plc.hashing.xxhash_64(plc.Table([from_values(n) for n in numbers])), np.uint64)


def hash_column(column: DeviceColumn, kind: pa.DataType, compared: pa.DataType) -> Array:
    """One hash per value; all nulls have the same."""
    return hash_columns([(column, kind, compared)], column.size())


def _numbers(column: DeviceColumn, kind: pa.DataType, compared: pa.DataType) -> tuple[list[Array], bool]:
    """Gives the uint64 numbers to be hashed of a column, one for all nulls; and whether they are hashes already."""
    kind, compared = decoded(kind), decoded(compared)
    if pa.types.is_null(kind):
        return [cp.full(column.size(), _NULL, np.uint64)], True
    mixed = True
    if pa.types.is_struct(kind):
        found = [hash_columns(_children(column, kind), column.size())]
    elif is_list(kind):
        found = [_hash_lists(column, kind)]
    elif is_bytes(kind):
        found = [values(plc.hashing.xxhash_64(plc.Table([column])), np.uint64)]
    else:
        found, mixed = lanes(column, kind, compared), False
    valid = valid_mask(column)
    return found if valid is None else [cp.where(valid, n, _NULL) for n in found], mixed


def equal_columns(
    left: DeviceColumn, left_kind: pa.DataType, right: DeviceColumn, right_kind: pa.DataType, compared: pa.DataType
) -> Array:
    """Mask of positions with equal values."""
    left_kind, right_kind, compared = decoded(left_kind), decoded(right_kind), decoded(compared)
    length = left.size()
    if length == 0 or pa.types.is_null(left_kind):
        return cp.ones(length, bool)
    if pa.types.is_struct(left_kind):
        pairs = zip(_children(left, left_kind), _children(right, right_kind), strict=True)
        same = [equal_columns(a, kind, b, other, kind) for (a, kind, _), (b, other, _) in pairs]
    elif is_list(left_kind):
        same = [_equal_lists(left, left_kind, right, right_kind)]
    elif is_bytes(left_kind):
        found = plc.binaryop.binary_operation(
            left, right, plc.binaryop.BinaryOperator.EQUAL, plc.DataType(plc.TypeId.BOOL8)
        )
        same = [values(found, np.bool_)]
    else:
        both = zip(lanes(left, left_kind, compared), lanes(right, right_kind, compared), strict=True)
        same = [x == y for x, y in both]
    a, b = valid_mask(left), valid_mask(right)
    if a is None and b is None:
        return functools.reduce(operator.and_, same)
    if a is None or b is None:
        return functools.reduce(operator.and_, same, b if a is None else a)
    return functools.reduce(operator.and_, same, a & b) | ~(a | b)


def lanes(column: DeviceColumn, kind: pa.DataType, compared: pa.DataType) -> list[Array]:
    """The values of a fixed-width column as uint64s, equal exactly when the values are; nulls anything."""
    if is_decimal(kind):
        wide = from_lanes(values(column, np.int64, lanes=2))
        wide = scale_up(wide, max(compared.scale - kind.scale, 0)) if is_decimal(compared) else wide
        return [wide.low, wide.high.view(np.uint64)]
    if pa.types.is_floating(kind):
        doubles = values(as_doubles(column), np.float64) + 0.0  # -0.0 becomes 0.0
        return [cp.where(cp.isnan(doubles), np.nan, doubles).view(np.uint64)]
    numbers = values(column, storage_type(kind).to_pandas_dtype())
    if pa.types.is_timestamp(kind) and pa.types.is_timestamp(compared) and kind.unit != compared.unit:
        numbers = rescale(numbers, kind.unit, compared.unit)
    wide = numbers if numbers.dtype in (np.int64, np.uint64) else numbers.astype(np.int64)
    return [wide.view(np.uint64)]


def as_doubles(column: DeviceColumn) -> DeviceColumn:
    """Floats as doubles, by libcudf: cupy compiles with ``-ftz=true``, to which subnormal floats are all 0."""
    double = plc.TypeId.FLOAT64
    return column if column.type().id() == double else plc.unary.cast(column, plc.DataType(double))


_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


def rescale(numbers: Array, unit: str, finer: str) -> Array:
    """Counts of one time unit in a finer one; what 64 bits cannot reach becomes the farthest they do."""
    factor = _PER_SECOND[finer] // _PER_SECOND[unit]
    limit = ((1 << 63) - 1) // factor
    return cp.clip(numbers, -limit, limit) * factor


def _children(column: DeviceColumn, kind: pa.DataType) -> list[Typed]:
    types = [kind.field(i).type for i in range(kind.num_fields)]
    return [(column.child(i), type_, type_) for i, type_ in enumerate(types)]


def _list_parts(column: DeviceColumn) -> tuple[Array, Array, DeviceColumn]:
    """Start and length of each list (null ones are empty), and the column of their elements."""
    view = column.list_view()
    offsets = values(view.offsets(), np.int32)[: column.size() + 1].astype(np.int64)
    lengths = offsets[1:] - offsets[:-1]
    valid = valid_mask(column)
    return offsets[:-1], lengths if valid is None else cp.where(valid, lengths, 0), view.child()


def _elements(starts: Array, lengths: Array) -> tuple[Array, Array, Array]:
    """Lists all elements of all lists, list by list: their positions, their rows, their places in the row's list."""
    rows = spread(lengths)
    place = cp.arange(rows.size, dtype=np.int64) - (cp.cumsum(lengths) - lengths)[rows]
    return starts[rows] + place, rows, place


def _hash_lists(column: DeviceColumn, kind: pa.DataType) -> Array:
    starts, lengths, child = _list_parts(column)
    positions, rows, place = _elements(starts, lengths)
    total = mix(lengths.view(np.uint64))
    if positions.size:
        element = element_type(kind)
        hashes = hash_column(gather([child], positions, [element], missing=0)[0], element, element)
        cp.add.at(total, rows, mix(hashes + mix(place.view(np.uint64))))
    return mix(total)


def _equal_lists(left: DeviceColumn, left_kind: pa.DataType, right: DeviceColumn, right_kind: pa.DataType) -> Array:
    left_starts, left_lengths, ours = _list_parts(left)
    right_starts, right_lengths, theirs = _list_parts(right)
    equal = left_lengths == right_lengths
    positions, rows, place = _elements(left_starts, cp.where(equal, left_lengths, 0))
    if positions.size:
        element, other = element_type(left_kind), element_type(right_kind)
        mine = gather([ours], positions, [element], missing=0)[0]
        yours = gather([theirs], right_starts[rows] + place, [other], missing=0)[0]
        equal[rows[~equal_columns(mine, element, yours, other, element)]] = False
    return equal


def convert(column: DeviceColumn, kind: pa.DataType, target: pa.DataType) -> Any:
    """A column in a wider type of its family: integers, floats, decimals by scale, timestamps by unit."""
    source, wanted = storage_type(kind), storage_type(target)
    if kind == target or (source == wanted and not is_decimal(kind) and not pa.types.is_timestamp(kind)):
        return column
    if is_decimal(kind):
        wide = from_lanes(values(column, np.int64, lanes=2))
        numbers = to_lanes(scale_up(wide, max(target.scale - kind.scale, 0)))
        data = plc.Column(
            plc.DataType(plc.TypeId.DECIMAL128, 0), column.size(), plc.gpumemoryview(numbers), None, 0, 0, []
        )
    elif pa.types.is_timestamp(kind):
        if kind.unit == target.unit:
            return column
        data = from_values(rescale(values(column, np.int64), kind.unit, target.unit))
    elif wanted == pa.float64() and source == pa.float32():
        return as_doubles(column)
    else:
        data = from_values(values(column, source.to_pandas_dtype()).astype(wanted.to_pandas_dtype()))
    return data.with_mask(column.null_mask(), column.null_count())


def _is_number(kind: pa.DataType) -> bool:
    t = pa.types
    return bool(
        t.is_integer(kind) or t.is_date32(kind) or t.is_timestamp(kind) or t.is_float32(kind) or t.is_float64(kind)
    )


def _is_key(kind: pa.DataType) -> bool:
    t = pa.types
    text = t.is_string(kind) or t.is_large_string(kind)
    return bool(_is_number(kind) or text or t.is_boolean(kind) or t.is_decimal128(kind))


def countable(table: pa.Table, by: Sequence[str], calls: Sequence[tuple[Any, str]]) -> bool:
    """Tells whether `aggregate` gives what the CPU does."""
    if not table.num_rows or not by or not all(_is_key(table.schema.field(name).type) for name in by):
        return False
    allowed = {"count": _is_key, "sum": pa.types.is_signed_integer, "min": _is_number, "max": _is_number}
    kinds = [(table.schema.field(column).type, function) for column, function in calls if function != "count_all"]
    return all(function in allowed and allowed[function](kind) for kind, function in kinds)


def aggregate(
    frame: Frame, by: Sequence[str], calls: Sequence[tuple[Any, str]]
) -> tuple[npt.NDArray[np.int32], dict[str, pa.Array]]:
    """Groups in the order of their first rows.

    Args:
        frame: n rows, one at least.
        by: columns whose values make a group.
        calls: a column and a function each, `countable` ones.

    Returns:
        The position of each group's first row, and what each call gave, named ``column_function``.
    """
    policy, kinds, request = plc.types.NullPolicy, plc.aggregation, plc.groupby.GroupByRequest
    places = from_values(cp.arange(frame.length, dtype=np.int32))
    requests, types = [request(places, [kinds.min()])], {}
    for column, function in calls:
        if function == "count_all":
            types[function] = pa.int32()
            requests.append(request(places, [kinds.count(policy.INCLUDE)]))
            continue
        made = {"sum": kinds.sum, "min": kinds.min, "max": kinds.max}
        wanted = kinds.count(policy.EXCLUDE) if function == "count" else made[function]()
        given = {"count": pa.int32(), "sum": pa.int64()}
        types[f"{column}_{function}"] = given.get(function, frame.types.get(column))
        requests.append(request(frame.columns[column], [wanted]))
    keys = plc.Table([frame.columns[name] for name in by])
    first, *found = plc.groupby.GroupBy(keys, policy.INCLUDE).aggregate(requests)[1]
    begins = cp.asnumpy(values(first.columns()[0], np.int32))
    order = np.argsort(begins)
    said = {}
    for (name, kind), result in zip(types.items(), found, strict=True):
        rows = to_arrow(result.columns()[0], kind).take(pa.array(order))
        said[name] = (
            rows.cast(pa.int64()) if name.endswith(("_count", "count_all")) else rows
        )  # libcudf counts in int32
    return begins[order], said


def sortable(keys: pa.Table) -> bool:
    """Tells whether `sorted_order` gives what the CPU does."""
    return bool(keys.num_rows and all(_is_key(kind) for kind in keys.schema.types))


def sorted_order(frame: Frame) -> npt.NDArray[np.int32]:
    """Positions of rows in ascending order, column by column, NaN behind numbers and nulls last; a stable sort."""
    columns = list(frame.columns.values())
    order = [plc.types.Order.ASCENDING] * len(columns)
    nulls = [plc.types.NullOrder.AFTER] * len(columns)
    found = plc.sorting.stable_sorted_order(plc.Table(columns), order, nulls)
    host: npt.NDArray[np.int32] = cp.asnumpy(values(found, np.int32))
    return host
