"""Residual conditions on columns in GPU memory: the tree of `gpu_ops.conditions.expressions`, evaluated with cupy.

The answers are those of `cpu_fallback.conditions`, row for row. Numbers, times and booleans are cupy arrays,
decimals pairs of them (`decimals`), text stays with libcudf. A few operations whose answers libcudf would give
differently (case mapping, casts from and to text, time zones) run on the host; `check` names them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

import cupy as cp
import numpy as np
import pyarrow as pa
import pylibcudf as plc

from gpu_ops.arrays import Array
from gpu_ops.conditions import Condition, nodes_of
from gpu_ops.conditions.expressions import DATE, STRING, Call, Column, Literal, Node, Op, kind
from gpu_ops.cudf_backend import casts, decimals
from gpu_ops.cudf_backend.casts import Datum, is_text
from gpu_ops.cudf_backend.decimals import Wide
from gpu_ops.cudf_backend.frame import Frame, choose, to_arrow, values
from gpu_ops.cudf_backend.storage import decoded, storage_type
from gpu_ops.errors import BackendError

_BINARY = plc.binaryop.BinaryOperator


def check(condition: Condition) -> tuple[str, ...]:
    """The operations of a condition that run on the host, each once.

    Raises:
        BackendError: an operation, a cast or a type that this backend does not know.
    """
    on_host: dict[str, None] = {}
    for node in nodes_of(condition.root, condition.fails):
        if isinstance(node, Call):
            if node.op not in _OPERATIONS:
                raise BackendError(f"the GPU backend cannot evaluate {str(node.op)!r} of {condition.sql!r}")
            if casts.on_host(node):
                on_host[node.op.value] = None
        elif kind(node.type) != "other":
            storage_type(node.type)
    return tuple(on_host)


def evaluate(condition: Condition, frames: Mapping[str, Frame], length: int) -> Array:
    """Where the condition is true; unknown (null) is not.

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
    for name, used in condition.columns.items():
        if used and frames[name].length != length:
            raise ValueError(f"input {name} has {frames[name].length} rows where {length} are expected")
    if length == 0:
        return cp.zeros(0, bool)
    evaluation = _Evaluation(frames)
    if condition.fails is not None:
        failing = _mask(evaluation(condition.fails), length)
        if failing.any():
            raise condition.failure(_sample(condition, frames, cp.flatnonzero(failing)[:1]))
    return _mask(evaluation(condition.root), length)


def _sample(condition: Condition, frames: Mapping[str, Frame], row: Array) -> dict[str, object]:
    """The columns of one row, in host memory."""
    taken = {name: frames[name].take(row, used, present=True) for name, used in condition.columns.items() if used}
    return {
        f"{name}.{column}": to_arrow(found, frame.types[column])[0].as_py()
        for name, frame in taken.items()
        for column, found in frame.columns.items()
    }


def _mask(found: Datum, length: int) -> Array:
    """Where a boolean is true."""
    return cp.array(cp.broadcast_to(_is(found, false=False), (length,)))


class _Evaluation:
    """One evaluation; nodes that stand at several places are evaluated once."""

    def __init__(self, frames: Mapping[str, Frame]) -> None:
        self.frames = frames
        self.done: dict[int, Datum] = {}

    def __call__(self, node: Node) -> Datum:
        result = self.done.get(id(node))
        if result is None:
            if isinstance(node, Literal):
                result = literal(node)
            else:
                result = self._column(node) if isinstance(node, Column) else self._call(node)
            self.done[id(node)] = result
        return result

    def _column(self, node: Column) -> Datum:
        frame = self.frames[node.input]
        column, own = frame.columns[node.name], decoded(frame.types[node.name])
        return casts.widened(column, own, node.type)

    def _call(self, node: Call) -> Datum:
        return _OPERATIONS[node.op]([self(arg) for arg in node.args], node)


def literal(node: Literal) -> Datum:
    """A constant: arrays of shape (1,), text as a column of one row."""
    type_, value = node.type, node.value
    valid = cp.zeros(1, bool) if value is None else None
    if is_text(type_):
        return Datum(plc.Column.from_arrow(casts.one_text(value)), valid)
    if kind(type_) == "decimal":
        scaled = Decimal(0) if value is None else Decimal(value)  # type: ignore[arg-type]
        digits = int(scaled.scaleb(type_.scale, casts.EXACT).to_integral_exact(context=casts.EXACT))
        return Datum(decimals.constant(digits), valid)
    return Datum(cp.full(1, 0 if value is None else value, casts.dtype(type_)), valid)


# --- comparisons -----------------------------------------------------------------------------


def _both(left: Datum, right: Datum) -> Array | None:
    if left.valid is None or right.valid is None:
        return left.valid if right.valid is None else right.valid
    return left.valid & right.valid


def _equal(args: list[Datum], node: Call) -> Datum:
    left, right = args
    return Datum(_equal_data(left, right, node.args[0].type), _both(left, right))


def _equal_data(left: Datum, right: Datum, type_: pa.DataType) -> Array:
    if is_text(type_):
        return _compare_text(left, right, _BINARY.EQUAL)
    if kind(type_) == "decimal":
        return left.data.equal(right.data)
    equal = left.data == right.data
    if kind(type_) == "float":
        equal |= cp.isnan(left.data) & cp.isnan(right.data)
    return equal


def _less(args: list[Datum], node: Call) -> Datum:
    left, right = args
    type_ = node.args[0].type
    if is_text(type_):
        less = _compare_text(left, right, _BINARY.LESS)
    elif kind(type_) == "decimal":
        less = left.data.less(right.data)
    else:
        less = left.data < right.data
        if kind(type_) == "float":  # NaN is the greatest
            less |= cp.isnan(right.data) & ~cp.isnan(left.data)
    return Datum(less, _both(left, right))


def _less_or_equal(args: list[Datum], node: Call) -> Datum:
    above = _less(args[::-1], node)
    return Datum(~above.data, above.valid)


def _same(args: list[Datum], node: Call) -> Datum:
    left, right = args
    equal = _equal_data(left, right, node.args[0].type)
    valid = _both(left, right)
    if valid is not None:
        equal = (equal & valid) | (_is_null(left) & _is_null(right))
    return Datum(equal, None)


def _compare_text(left: Datum, right: Datum, operator: Any) -> Array:
    a, b = left.data, right.data
    if a.size() != b.size():
        a, b = (column.to_scalar() if column.size() == 1 else column for column in (a, b))
    # bytewise: cudf::string_view::compare looks at unsigned chars
    return values(plc.binaryop.binary_operation(a, b, operator, plc.DataType(plc.TypeId.BOOL8)), np.bool_)


def _is_null(datum: Datum) -> Array:
    return cp.zeros(1, bool) if datum.valid is None else ~datum.valid


def _is_in(args: list[Datum], node: Call) -> Datum:
    value, *members = args
    type_ = node.args[0].type
    equals = (_equal_data(value, member, type_) for member in members)
    return Datum(functools.reduce(cp.logical_or, equals), value.valid)


# --- logic -----------------------------------------------------------------------------------


def _and(args: list[Datum], _: Call) -> Datum:
    left, right = args
    valid = _both(left, right)
    if valid is not None:  # false and unknown is false
        valid = valid | _is(left, false=True) | _is(right, false=True)
    return Datum(left.data & right.data, valid)


def _or(args: list[Datum], _: Call) -> Datum:
    left, right = args
    valid = _both(left, right)
    if valid is None:
        return Datum(left.data | right.data, None)
    known = _is(left, false=False), _is(right, false=False)
    return Datum(known[0] | known[1], valid | known[0] | known[1])


def _is(datum: Datum, *, false: bool) -> Array:
    """Where it is false, or true; not where it is unknown."""
    data = ~datum.data if false else datum.data
    return data if datum.valid is None else data & datum.valid


def _case(args: list[Datum], node: Call) -> Datum:
    result = args[-1]
    for test, value in zip(args[-3::-2], args[-2::-2], strict=True):
        result = _pick(_is(test, false=False), value, result, node.type)
    return result


def _coalesce(args: list[Datum], node: Call) -> Datum:
    result = args[-1]
    for value in args[-2::-1]:
        if value.valid is None and value.size >= result.size:
            result = value
        else:
            result = _pick(~_is_null(value), value, result, node.type)
    return result


def _pick(mask: Array, first: Datum, second: Datum, type_: pa.DataType) -> Datum:
    """First where the mask is set, else second; masks and data of one row count for all rows."""
    valid = None
    if first.valid is not None or second.valid is not None:
        valid = cp.where(mask, ~_is_null(first), ~_is_null(second))
    if is_text(type_):
        rows = max(mask.size, first.size, second.size)
        column = choose(cp.broadcast_to(mask, (rows,)), first.data, second.data, STRING)
        return Datum(column, valid)
    if isinstance(first.data, Wide):
        return Datum(decimals.choose(mask, first.data, second.data), valid)
    return Datum(cp.where(mask, first.data, second.data), valid)


# --- numbers and times -----------------------------------------------------------------------


def _arithmetic(operation: Callable[[Any, Any], Any]) -> Callable[[list[Datum], Call], Datum]:
    def apply(args: list[Datum], _: Call) -> Datum:
        return Datum(operation(args[0].data, args[1].data), _both(*args))

    return apply


def _nonzero(args: list[Datum]) -> tuple[Array, Array, Array]:
    """Dividend, divisor with 1 for 0, and where the result is not null."""
    left, right = args
    zero = right.data == 0
    known = _both(left, right)
    return (
        left.data,
        cp.where(zero, right.data.dtype.type(1), right.data),
        ~zero if known is None else known & ~zero,
    )


def _divide(args: list[Datum], _: Call) -> Datum:
    dividend, divisor, valid = _nonzero(args)
    return Datum(dividend / divisor, valid)


def _remainder(args: list[Datum], _: Call) -> Datum:
    dividend, divisor, valid = _nonzero(args)
    if dividend.dtype.kind == "f":
        return Datum(cp.fmod(dividend, divisor), valid)
    # the sign is the dividend's; -1 divides everything, and overflows where it divides the smallest
    divisor = cp.where(divisor == -1, divisor.dtype.type(1), divisor)
    rest = dividend % divisor
    return Datum(cp.where((rest != 0) & ((rest < 0) != (dividend < 0)), rest - divisor, rest), valid)


def _unary(operation: Callable[[Any], Any]) -> Callable[[list[Datum], Call], Datum]:
    def apply(args: list[Datum], _: Call) -> Datum:
        return Datum(operation(args[0].data), args[0].valid)

    return apply


def _add_months(args: list[Datum], node: Call) -> Datum:
    start, amount = args
    if node.type == DATE:
        return Datum(casts.add_months(start.data.astype(np.int64), amount.data).astype(np.int32), start.valid)
    day = casts.PER_DAY[node.type.unit]
    days = start.data // day
    moved = casts.add_months(days, amount.data)
    return Datum(moved * day + (start.data - days * day), start.valid)


# --- text ------------------------------------------------------------------------------------


def _like(args: list[Datum], node: Call) -> Datum:
    pattern = node.args[1]
    assert isinstance(pattern, Literal)
    found = plc.strings.contains.like(args[0].data, str(pattern.value), "\\")
    return Datum(values(found, np.bool_), args[0].valid)


def _length(args: list[Datum], node: Call) -> Datum:
    attributes = plc.strings.attributes
    count = attributes.count_characters if node.args[0].type == STRING else attributes.count_bytes
    return Datum(values(count(args[0].data), np.int32), args[0].valid)


def _on_host(args: list[Datum], node: Call) -> Datum:
    return casts.host(args[0], node)


def _cast(args: list[Datum], node: Call) -> Datum:
    return casts.host(args[0], node) if casts.on_host(node) else casts.cast(args[0], node.args[0].type, node.type)


_OPERATIONS: dict[Op, Callable[[list[Datum], Call], Datum]] = {
    Op.EQ: _equal,
    Op.LT: _less,
    Op.LE: _less_or_equal,
    Op.SAME: _same,
    Op.AND: _and,
    Op.OR: _or,
    Op.NOT: _unary(lambda a: ~a),
    Op.IS_NULL: lambda args, _: Datum(_is_null(args[0]), None),
    Op.IN: _is_in,
    Op.LIKE: _like,
    Op.ADD: _arithmetic(lambda a, b: a + b),
    Op.SUB: _arithmetic(lambda a, b: a - b),
    Op.MUL: _arithmetic(lambda a, b: a * b),
    Op.DIV: _divide,
    Op.MOD: _remainder,
    Op.NEG: _unary(lambda a: -a),
    Op.ABS: _unary(abs),
    Op.ADD_MONTHS: _add_months,
    Op.CASE: _case,
    Op.COALESCE: _coalesce,
    Op.CAST: _cast,
    Op.TRY_CAST: _on_host,
    Op.LOWER: _on_host,
    Op.UPPER: _on_host,
    Op.LENGTH: _length,
}
