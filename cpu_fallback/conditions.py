"""Residual conditions on Arrow columns: the tree of `gpu_ops.conditions.expressions`, evaluated with pyarrow.compute.

NaN is looked for only where it can change the result, and one pass over a column tells whether there is any.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cpu_fallback import casts
from gpu_ops.conditions import Condition
from gpu_ops.conditions.expressions import DATE, INT, STRING, Call, Column, Literal, Node, Op, kind

Datum = Any
"""A pyarrow Array, or a Scalar where a node is constant."""


def evaluate(
    condition: Condition, frames: Mapping[str, pa.RecordBatch | pa.Table], length: int | None = None
) -> npt.NDArray[np.bool_]:
    """Where the condition is true; unknown (null) is not.

    Args:
        condition: the condition.
        frames: per input row-aligned columns, at least those of ``condition.columns``; an input that
            the condition needs nothing of may be missing.
        length: number of rows; needed only by a condition without columns.

    Returns:
        A bool array of that many rows, owned by the caller.

    Raises:
        ValueError: frames of different lengths, or no way to know the length.
        EvaluationError: a row for which it fails, in ANSI mode.
    """
    columns: dict[tuple[str, str], pa.Array] = {}
    for name, used in condition.columns.items():
        for column in used:
            columns[name, column] = array = _array(frames[name].column(column))
            length = len(array) if length is None else length
            if len(array) != length:
                raise ValueError(f"column {name}.{column} has {len(array)} rows where {length} are expected")
    if length is None:
        raise ValueError("a condition without columns needs a length")
    evaluation = _Evaluation(columns)
    if condition.fails is not None:
        failing = _mask(evaluation(condition.fails), length)
        if failing.any():
            row = int(failing.argmax())
            raise condition.failure({".".join(name): array[row].as_py() for name, array in columns.items()})
    return _mask(evaluation(condition.root), length)


def _mask(datum: Datum, length: int) -> npt.NDArray[np.bool_]:
    """Where a boolean is true."""
    if isinstance(datum, pa.Scalar):
        return np.full(length, datum.as_py() is True)
    return _bits(datum if datum.null_count == 0 else pc.fill_null(datum, False))


def _array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    if isinstance(column, pa.ChunkedArray):
        return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return column


def _bits(mask: pa.BooleanArray) -> npt.NDArray[np.bool_]:
    if len(mask) == 0:
        return np.zeros(0, dtype=np.bool_)
    start = mask.offset // 8
    packed = np.frombuffer(mask.buffers()[1], dtype=np.uint8)[start:]
    skip = mask.offset - 8 * start
    return np.unpackbits(packed, count=skip + len(mask), bitorder="little")[skip:].view(np.bool_)


class _Evaluation:
    """One evaluation; nodes that stand at several places are evaluated once."""

    def __init__(self, columns: Mapping[tuple[str, str], pa.Array]) -> None:
        self.columns = columns
        self.done: dict[int, Datum] = {}

    def __call__(self, root: Node) -> Datum:
        # A stack of its own: a long chain of operators is a tree deeper than Python's.
        stack = [root]
        while stack:
            node = stack[-1]
            waiting = [arg for arg in _operands(node) if id(arg) not in self.done]
            if waiting:
                stack += waiting
                continue
            stack.pop()
            if id(node) not in self.done:
                self.done[id(node)] = self._value(node)
        return self.done[id(root)]

    def _value(self, node: Node) -> Datum:
        match node:
            case Literal():
                return pa.scalar(node.value, node.type)
            case Column():
                return self._column(node)
            case Call():
                args = [self.done[id(arg)] for arg in _operands(node)]
                special = _TYPED.get(node.op)
                return special(args, node) if special else _PLAIN[node.op](*args)

    def _column(self, node: Column) -> Datum:
        array = self.columns[node.input, node.name]
        if array.type == node.type:
            return array
        if pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        return array if array.type == node.type else pc.cast(array, node.type)


def _operands(node: Node) -> tuple[Node, ...]:
    if not isinstance(node, Call):
        return ()
    return node.args[:1] if node.op is Op.IN else node.args


# --- comparisons -----------------------------------------------------------------------------


def _has_nan(datum: Datum) -> bool:
    """Whether a float datum may hold NaN: False is certain, True may come from what lies under a null."""
    if isinstance(datum, pa.Scalar):
        return datum.is_valid and math.isnan(datum.as_py())
    with np.errstate(invalid="ignore"):
        return len(datum) > 0 and bool(np.isnan(np.min(casts.values(datum))))


def _equal(args: list[Datum], node: Call) -> Datum:
    left, right = args
    equal = pc.equal(left, right)
    if kind(node.args[0].type) == "float" and _has_nan(left) and _has_nan(right):
        equal = pc.or_(equal, pc.and_(pc.is_nan(left), pc.is_nan(right)))
    return equal


def _less(compare: Callable[[Datum, Datum], Datum], *, or_equal: bool) -> Callable[[list[Datum], Call], Datum]:
    def less(args: list[Datum], node: Call) -> Datum:
        left, right = args
        result = compare(left, right)
        if kind(node.args[0].type) == "float" and _has_nan(right):
            # NaN is the greatest: above all, and equal to itself. IEEE finds it below nothing.
            below = pc.is_nan(right)
            if not or_equal and _has_nan(left):
                below = pc.and_(below, pc.invert(pc.is_nan(left)))
            result = pc.or_(result, below)
        return result

    return less


def _same(args: list[Datum], node: Call) -> Datum:
    equal = _equal(args, node)
    if equal.null_count == 0 if isinstance(equal, pa.Array) else equal.is_valid:
        return equal
    return pc.or_(pc.fill_null(equal, False), pc.and_(*(_is_null(arg) for arg in args)))


def _is_null(datum: Datum) -> Datum:
    return pc.is_null(datum, nan_is_null=False)


_FEW = 8  # up to so many comparisons of numbers are faster than a hash table


def _is_in(args: list[Datum], node: Call) -> Datum:
    (value,), (_, *members) = args, node.args
    type_ = members[0].type
    known = [member.value for member in members if isinstance(member, Literal)]
    if len(known) <= _FEW and kind(type_) in ("integer", "float", "date", "timestamp"):
        equals = (_equal([value, pa.scalar(member, type_)], node) for member in known)
        return functools.reduce(pc.or_, equals)
    if kind(type_) == "float" and 0.0 in known:
        known += [0.0, -0.0]  # is_in looks at bits, and tells the zeros apart
    found = pc.is_in(value, value_set=pa.array(known, type_))
    if isinstance(value, pa.Scalar):
        return found if value.is_valid else pa.scalar(None, pa.bool_())
    return found if value.null_count == 0 else pc.if_else(value.is_valid(), found, pa.scalar(None, pa.bool_()))


# --- numbers and times -----------------------------------------------------------------------


def _divide(left: Datum, right: Datum) -> Datum:
    return pc.divide(left, _nonzero(right))


def _nonzero(divisor: Datum) -> Datum:
    zero = pc.equal(divisor, pa.scalar(0, divisor.type))
    if isinstance(divisor, pa.Scalar):
        return pa.scalar(None, divisor.type) if zero.as_py() else divisor
    return pc.if_else(zero, pa.scalar(None, divisor.type), divisor) if pc.any(zero).as_py() else divisor


def _remainder(args: list[Datum], node: Call) -> Datum:
    left, right = args[0], _nonzero(args[1])
    if any(isinstance(arg, pa.Scalar) and not arg.is_valid for arg in (left, right)):
        return pa.scalar(None, node.type)
    if isinstance(left, pa.Scalar) and isinstance(right, pa.Scalar):
        return _remainder([casts.broadcast(left), right], node)[0]
    numbers = [arg.as_py() if isinstance(arg, pa.Scalar) else casts.values(arg) for arg in (left, right)]
    with np.errstate(all="ignore"):
        result = np.fmod(*numbers, dtype=node.type.to_pandas_dtype())
    return casts.like(result, node.type, left, right)


def _add(args: list[Datum], node: Call) -> Datum:
    return _plus(pc.add, args, node)


def _subtract(args: list[Datum], node: Call) -> Datum:
    return _plus(pc.subtract, args, node)


def _plus(function: Callable[[Datum, Datum], Datum], args: list[Datum], node: Call) -> Datum:
    if node.type == DATE:
        return function(args[0].cast(INT), args[1]).cast(DATE)
    return function(*args)


def _add_months(args: list[Datum], node: Call) -> Datum:
    start, months = args[0], args[1].as_py()
    if isinstance(start, pa.Scalar) and not start.is_valid:
        return start
    if isinstance(start, pa.Scalar):
        return _add_months([casts.broadcast(start), args[1]], node)[0]
    unit = "D" if node.type == DATE else node.type.unit
    moments = casts.values(start).astype(f"M8[{unit}]")
    days = moments.astype("M8[D]")
    first = days.astype("M8[M]")
    target = first + np.timedelta64(months, "M")
    last = (target + np.timedelta64(1, "M")).astype("M8[D]") - np.timedelta64(1, "D")
    moved = np.minimum(target.astype("M8[D]") + (days - first.astype("M8[D]")), last)
    result = (moved.astype(moments.dtype) + (moments - days.astype(moments.dtype))).view(np.int64)
    return casts.like(result.astype(np.int32) if node.type == DATE else result, node.type, start)


# --- the rest --------------------------------------------------------------------------------


def _case(args: list[Datum], node: Call) -> Datum:
    result = args[-1]
    for test, value in zip(args[-3::-2], args[-2::-2], strict=True):
        known = test if isinstance(test, pa.Array) and test.null_count == 0 else pc.fill_null(test, False)
        result = pc.if_else(known, value, result)
    return result


_LIKE = re.compile(r"\\(.)|([%_])|([^\\%_]+)", re.DOTALL)


def _like(value: Datum, pattern: str) -> Datum:
    """LIKE: a search for plain text where that will do, else a regular expression.

    Not Arrow's ``match_like``: it takes the backslashes of a plain prefix, suffix or substring literally.
    """
    parts = [(wild, escaped or plain) for escaped, wild, plain in _LIKE.findall(pattern)]
    text = "".join(part for wild, part in parts if not wild)
    match "".join(wild or "." for wild, _ in itertools.groupby(wild for wild, _ in parts)):
        case "" | ".":
            return pc.equal(value, text)
        case ".%":
            return pc.starts_with(value, text)
        case "%.":
            return pc.ends_with(value, text)
        case "%.%":
            return pc.match_substring(value, text)
    regex = "".join(_REGEX.get(wild) or _SPECIAL.sub(r"\\\g<0>", part).replace("\0", r"\x00") for wild, part in parts)
    return pc.match_substring_regex(value, rf"(?s)\A{regex}\z")


_REGEX = {"%": ".*", "_": "."}
_SPECIAL = re.compile(r"[!-/:-@\[-^`{-~]")  # what RE2 takes after a backslash as itself


def _length(value: Datum) -> Datum:
    return pc.utf8_length(value) if value.type == STRING else pc.binary_length(value)


_PLAIN: dict[Op, Callable[..., Datum]] = {
    Op.AND: pc.and_kleene,
    Op.OR: pc.or_kleene,
    Op.NOT: pc.invert,
    Op.IS_NULL: _is_null,
    Op.LIKE: lambda value, pattern: _like(value, pattern.as_py()),
    Op.MUL: pc.multiply,
    Op.DIV: _divide,
    Op.NEG: pc.negate,
    Op.ABS: pc.abs,
    Op.COALESCE: pc.coalesce,
    Op.LOWER: casts.lower,
    Op.UPPER: casts.upper,
    Op.LENGTH: _length,
}
_TYPED: dict[Op, Callable[[list[Datum], Call], Datum]] = {
    Op.EQ: _equal,
    Op.LT: _less(pc.less, or_equal=False),
    Op.LE: _less(pc.less_equal, or_equal=True),
    Op.SAME: _same,
    Op.IN: _is_in,
    Op.ADD: _add,
    Op.SUB: _subtract,
    Op.MOD: _remainder,
    Op.ADD_MONTHS: _add_months,
    Op.CASE: _case,
    Op.CAST: lambda args, node: casts.cast(args[0], node.type),
    Op.TRY_CAST: lambda args, node: casts.to_integer(args[0], node.type, whole=True),
}
