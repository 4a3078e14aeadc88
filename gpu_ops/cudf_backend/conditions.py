"""Residual conditions on columns in GPU memory: the tree of `gpu_ops.conditions.expressions`, evaluated with cupy.

The answers are those of `cpu_fallback.conditions`, row for row. Numbers, times and booleans are cupy arrays,
decimals pairs of them (`hashing`), text stays with libcudf. Floats are doubles that libcudf has rounded (`_rounded`).
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping
from decimal import Context, Decimal
from typing import Any

import cupy as cp
import numpy as np
import pyarrow as pa
import pylibcudf as plc

from gpu_ops.arrays import Array
from gpu_ops.conditions import Expression, nodes_of
from gpu_ops.conditions.expressions import FLOAT, Call, ColumnRef, Literal, Op, kind
from gpu_ops.cudf_backend import hashing
from gpu_ops.cudf_backend.frame import Frame, choose, from_values, to_arrow, valid_mask, values
from gpu_ops.cudf_backend.hashing import Wide, rescale
from gpu_ops.cudf_backend.storage import decoded, is_bytes, is_decimal, storage_type, to_storage


@dataclasses.dataclass(frozen=True, slots=True)
class Datum:
    """A node's value: n rows, or one that counts for all.

    Attributes:
        data: a cupy array; a `Wide` for decimals; a stored column for text, and for types of which only the nulls
            count. Nulls hold whatever is there.
        valid: mask of rows that are not null, None for all.
    """

    data: Any
    valid: Array | None

    @property
    def null(self) -> Array:
        """Mask of rows that are null."""
        return cp.zeros(1, bool) if self.valid is None else ~self.valid

    @property
    def true(self) -> Array:
        """Flags where a boolean is true, and known."""
        return self.data if self.valid is None else self.data & self.valid


def evaluate(condition: Expression, frames: Mapping[str, Frame], length: int) -> Array:
    """Flags the rows for which a condition is true; unknown (null) is not.

    Args:
        condition: the condition.
        frames: per input row-aligned columns, at least those of ``condition.columns``.
        length: number of rows.

    Returns:
        A bool array of that many rows, owned by the caller.

    Raises:
        ValueError: frames of different lengths.
        EvaluationError: a row for which it fails, in ANSI mode.
    """
    if length == 0:
        return cp.zeros(0, bool)
    known: dict[int, Datum] = {}
    for node in nodes_of(condition.fails, condition.root):
        match node:
            case Literal():
                known[id(node)] = _literal(node)
            case ColumnRef():
                frame = frames[node.input]
                known[id(node)] = _column(frame.columns[node.name], decoded(frame.types[node.name]), node.type)
            case Call():
                known[id(node)] = _OPERATIONS[node.op]([known[id(arg)] for arg in node.args], node)
    if condition.fails is not None:
        failing = cp.broadcast_to(known[id(condition.fails)].true, (length,))
        if failing.any():
            raise condition.failure(_sample(condition, frames, cp.flatnonzero(failing)[:1]))
    return cp.array(cp.broadcast_to(known[id(condition.root)].true, (length,)))


def _sample(condition: Expression, frames: Mapping[str, Frame], row: Array) -> dict[str, object]:
    """The columns of one row, in host memory."""
    sample: dict[str, object] = {}
    for name, column in ((name, column) for name, used in condition.columns.items() for column in used):
        taken = frames[name].take(row, [column], present=True)
        sample[f"{name}.{column}"] = to_arrow(taken.columns[column], taken.types[column])[0].as_py()
    return sample


def _literal(node: Literal) -> Datum:
    """A constant: arrays of shape (1,), text as a column of one row."""
    type_, value = node.type, node.value
    valid = cp.zeros(1, bool) if value is None else None
    if is_bytes(type_):
        return Datum(plc.Column.from_arrow(to_storage(pa.array([value or ""], pa.string()))), valid)
    if kind(type_) == "decimal":
        return Datum(hashing.constant(int(Decimal(value or 0).scaleb(type_.scale, Context(prec=100)))), valid)
    return Datum(cp.full(1, value or 0, _dtype(type_)), valid)


def _dtype(type_: pa.DataType) -> Any:
    return np.float64 if type_ == FLOAT else storage_type(type_).to_pandas_dtype()


def _rounded(numbers: Array, type_: pa.DataType) -> Array:
    """A node's numbers; those of a float to the nearest one, as a double, see `hashing.as_doubles`."""
    if type_ != FLOAT:
        return numbers
    floats = plc.unary.cast(from_values(numbers), plc.DataType(plc.TypeId.FLOAT32))
    return values(hashing.as_doubles(floats), np.float64)


def _column(column: Any, own: pa.DataType, type_: pa.DataType) -> Datum:
    """A column in the type that a condition gives it, which is `expressions.column_type` of its own."""
    valid = valid_mask(column)
    if is_bytes(own) or kind(type_) == "other":  # of the latter only the nulls count
        return Datum(column, valid)
    if is_decimal(own):
        return _cast(Datum(hashing.from_lanes(values(column, np.int64, lanes=2)), valid), own, type_)
    if storage_type(own) == FLOAT:
        return Datum(values(hashing.as_doubles(column), np.float64), valid)
    numbers = values(column, storage_type(own).to_pandas_dtype())
    return _cast(Datum(numbers // (86_400 * 1000) if pa.types.is_date64(own) else numbers, valid), own, type_)


def _cast(datum: Datum, own: pa.DataType, type_: pa.DataType) -> Datum:
    data, unit = datum.data, getattr(type_, "unit", None)
    if kind(own) == "null":
        return _literal(Literal(None, type_))
    if kind(type_) == "decimal":
        wide = data if isinstance(data, Wide) else hashing.from_integers(data)
        return Datum(hashing.scale_up(wide, type_.scale - getattr(own, "scale", 0)), datum.valid)
    if getattr(own, "unit", unit) != unit:
        return Datum(rescale(data, own.unit, type_.unit), datum.valid)
    if type_ == FLOAT and own != FLOAT:
        return Datum(_rounded(data, type_), datum.valid)
    return Datum(data.astype(_dtype(type_), copy=False), datum.valid)


# --- comparisons and logic -------------------------------------------------------------------


def _both(left: Datum, right: Datum) -> Array | None:
    if left.valid is None or right.valid is None:
        return left.valid if right.valid is None else right.valid
    return left.valid & right.valid


def _compare(args: list[Datum], node: Call) -> Datum:
    left, right = (arg.data for arg in args)
    type_, less = node.args[0].type, node.op is Op.LT
    if is_bytes(type_):  # bytewise: cudf::string_view::compare looks at unsigned chars
        if left.size() != right.size():
            left, right = (column.to_scalar() if column.size() == 1 else column for column in (left, right))
        way = plc.binaryop.BinaryOperator.LESS if less else plc.binaryop.BinaryOperator.EQUAL
        found = plc.binaryop.binary_operation(left, right, way, plc.DataType(plc.TypeId.BOOL8))
        result = values(found, np.bool_)
    elif isinstance(left, Wide):
        result = left.less(right) if less else left.equal(right)
    else:
        result = left < right if less else left == right
        if kind(type_) == "float":  # NaN is the greatest, and equal to itself
            result |= cp.isnan(right) & (~cp.isnan(left) if less else cp.isnan(left))
    return Datum(result, _both(*args))


def _among(args: list[Datum], node: Call) -> Datum:
    """A value among constants of its type, none of which is null."""
    value, *members = args
    found = [_compare([value, member], node).data for member in members]
    return Datum(functools.reduce(operator.or_, found), value.valid)


def _and(args: list[Datum], _: Call) -> Datum:
    left, right = args
    possible = (left.data | left.null) & (right.data | right.null)  # false and unknown is false
    valid = _both(left, right)
    return Datum(possible, None if valid is None else valid | ~possible)


def _or(args: list[Datum], _: Call) -> Datum:
    negated = _and([Datum(~arg.data, arg.valid) for arg in args], _)
    return Datum(~negated.data, negated.valid)


def _case(args: list[Datum], node: Call) -> Datum:
    result = args[-1]
    for test, value in zip(args[-3::-2], args[-2::-2], strict=True):
        mask, valid = test.true, None
        if value.valid is not None or result.valid is not None:
            valid = ~cp.where(mask, value.null, result.null)
        if is_bytes(node.type):
            rows = max(mask.size, value.data.size(), result.data.size())
            data = choose(cp.broadcast_to(mask, (rows,)), value.data, result.data, pa.string())
        else:
            pick = hashing.choose if isinstance(value.data, Wide) else cp.where
            data = pick(mask, value.data, result.data)
        result = Datum(data, valid)
    return result


# --- numbers ---------------------------------------------------------------------------------


def _arithmetic(operation: Callable[..., Any]) -> Callable[[list[Datum], Call], Datum]:
    return lambda args, node: Datum(
        _rounded(operation(*(arg.data for arg in args)), node.type), _both(args[0], args[-1])
    )


def _quotient(args: list[Datum], node: Call) -> Datum:
    """Quotient or remainder; null for a divisor of zero."""
    dividend, divisor = (arg.data for arg in args)
    zero = divisor == 0
    valid = Datum(~zero, _both(*args)).true
    divisor = cp.where(zero, divisor.dtype.type(1), divisor)
    if node.op is Op.DIV:
        return Datum(_rounded(dividend / divisor, node.type), valid)
    if dividend.dtype.kind == "f":
        return Datum(cp.fmod(dividend, divisor), valid)
    # the sign is the dividend's; -1 divides everything, and overflows where it divides the smallest
    divisor = cp.where(divisor == -1, divisor.dtype.type(1), divisor)
    rest = dividend % divisor
    return Datum(cp.where((rest != 0) & ((rest < 0) != (dividend < 0)), rest - divisor, rest), valid)


_OPERATIONS: dict[Op, Callable[[list[Datum], Call], Datum]] = {
    Op.EQ: _compare,
    Op.LT: _compare,
    Op.IN: _among,
    Op.AND: _and,
    Op.OR: _or,
    Op.NOT: _arithmetic(lambda a: ~a),
    Op.IS_NULL: lambda args, _: Datum(args[0].null, None),
    Op.ADD: _arithmetic(lambda a, b: a + b),
    Op.SUB: _arithmetic(lambda a, b: a - b),
    Op.MUL: _arithmetic(lambda a, b: a * b),
    Op.DIV: _quotient,
    Op.MOD: _quotient,
    Op.NEG: _arithmetic(lambda a: -a),
    Op.CASE: _case,
    Op.CAST: lambda args, node: _cast(args[0], node.args[0].type, node.type),
}
