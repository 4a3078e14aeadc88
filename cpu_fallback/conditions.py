"""Expressions on Arrow columns: `gpu_ops.conditions.expressions`, evaluated with pyarrow.compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cpu_fallback.functions import FUNCTIONS
from gpu_ops.conditions import Expression, nodes_of
from gpu_ops.conditions.expressions import BIGINT, Call, ColumnRef, Literal, Op, kind

Datum = Any
"""A pyarrow Array, or a Scalar where a node is constant."""


def evaluate(
    condition: Expression, frames: Mapping[str, pa.RecordBatch | pa.Table], length: int | None = None
) -> npt.NDArray[np.bool_]:
    """Flags the rows for which a condition is true; unknown (null) is not.

    Args:
        condition: of type boolean.
        frames: per input row-aligned columns, at least those of ``condition.columns``; an input that
            the condition needs nothing of may be missing.
        length: number of rows; needed only by a condition without columns.

    Returns:
        A bool array of that many rows, owned by the caller.

    Raises:
        ValueError: frames of different lengths, or no way to know the length.
        EvaluationError: a row for which it fails, in ANSI mode.
    """
    (found,), length = _evaluated([condition], frames, length)
    return _mask(found, length)


def values(
    expressions: Sequence[Expression], frames: Mapping[str, pa.RecordBatch | pa.Table], length: int | None = None
) -> list[pa.Array]:
    """Computes the values of expressions; arguments and errors as of `evaluate`."""
    found, length = _evaluated(expressions, frames, length)
    return [pa.repeat(datum, length) if isinstance(datum, pa.Scalar) else datum for datum in found]


def _evaluated(
    expressions: Sequence[Expression], frames: Mapping[str, pa.RecordBatch | pa.Table], length: int | None
) -> tuple[list[Datum], int]:
    """Computes the values of expressions, and the number of rows."""
    columns: dict[tuple[str, str], pa.Array] = {}
    for name, column in [(name, x) for one in expressions for name, used in one.columns.items() for x in used]:
        columns[name, column] = array = _array(frames[name].column(column))
        length = len(array) if length is None else length
        if len(array) != length:
            raise ValueError(f"column {name}.{column} has {len(array)} rows where {length} are expected")
    if length is None:
        raise ValueError("a condition without columns needs a length")
    known: dict[int, Datum] = {}
    for node in nodes_of(*(one.fails for one in expressions), *(one.root for one in expressions)):
        match node:
            case Literal():
                known[id(node)] = pa.scalar(node.value, node.type)
            case ColumnRef():
                known[id(node)] = _typed(columns[node.input, node.name], node.type)
            case Call():
                known[id(node)] = _OPERATIONS[node.op]([known[id(arg)] for arg in node.args], node)
    for one in expressions:
        failing = np.zeros(0, np.bool_) if one.fails is None else _mask(known[id(one.fails)], length)
        if failing.any():
            row = int(failing.argmax())
            used = [(name, column) for name, own in one.columns.items() for column in own]
            raise one.failure({".".join(filter(None, place)): columns[place][row].as_py() for place in used})
    return [known[id(one.root)] for one in expressions], length


def _array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    if isinstance(column, pa.ChunkedArray):
        return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return column


def _typed(array: pa.Array, type_: pa.DataType) -> pa.Array:
    """A column in the type that a condition gives it."""
    array = array.dictionary_decode() if pa.types.is_dictionary(array.type) else array
    return array if array.type == type_ else pc.cast(array, type_)


def _mask(datum: Datum, length: int) -> npt.NDArray[np.bool_]:
    """Flags where a boolean is true."""
    if isinstance(datum, pa.Scalar):
        return np.full(length, datum.as_py() is True)
    mask = datum if datum.null_count == 0 else pc.fill_null(datum, False)
    if not len(mask):
        return np.zeros(0, dtype=np.bool_)
    first = mask.offset // 8  # to_numpy() goes value by value
    packed = np.frombuffer(mask.buffers()[1], dtype=np.uint8)[first:]
    skip = mask.offset - 8 * first
    return np.unpackbits(packed, count=skip + len(mask), bitorder="little")[skip:].view(np.bool_)


def _may_be_nan(datum: Datum, type_: pa.DataType) -> bool:
    """Tells whether a NaN may be among the values; False is certain, and found by one quick pass."""
    if kind(type_) != "float":
        return False
    values = datum.to_numpy(zero_copy_only=False) if isinstance(datum, pa.Array) else np.array(datum.as_py(), float)
    return bool(np.isnan(values).any())


def _equal(args: list[Datum], node: Call) -> Datum:
    equal = pc.equal(*args)
    if not _may_be_nan(args[0], node.args[0].type):
        return equal
    return pc.or_(equal, pc.and_(*(pc.is_nan(arg) for arg in args)))


def _less(args: list[Datum], node: Call) -> Datum:
    less = pc.less(*args)
    if not _may_be_nan(args[1], node.args[0].type):
        return less
    left, right = (pc.is_nan(arg) for arg in args)  # NaN is the greatest; IEEE finds nothing below it
    return pc.or_(less, pc.and_not(right, left))


def _nonzero(divisor: Datum) -> Datum:
    return pc.if_else(pc.equal(divisor, pa.scalar(0, divisor.type)), pa.scalar(None, divisor.type), divisor)


def _remainder(args: list[Datum], node: Call) -> Datum:
    operands = [args[0], _nonzero(args[1])]
    filled = [pc.fill_null(operand, pa.scalar(1, node.type)) for operand in operands]
    numbers = [x.to_numpy(zero_copy_only=False) if isinstance(x, pa.Array) else x.as_py() for x in filled]
    with np.errstate(all="ignore"):
        rest = pa.array(np.atleast_1d(np.fmod(*numbers, dtype=node.type.to_pandas_dtype())), node.type)
    constant = all(isinstance(operand, pa.Scalar) for operand in operands)
    known = pc.and_(*(pc.is_valid(operand) for operand in operands))
    return pc.if_else(known, rest[0] if constant else rest, pa.scalar(None, node.type))


def _case(args: list[Datum], _: Call) -> Datum:
    result = args[-1]
    for test, value in zip(args[-3::-2], args[-2::-2], strict=True):
        true = pc.fill_null(test, False)
        if pc.all(true).as_py():
            result = value
        elif pc.any(true).as_py():
            result = pc.if_else(true, value, result)
    return result


def _cast(args: list[Datum], node: Call) -> Datum:
    (value,), type_ = args, node.type
    if getattr(type_, "unit", None) == "ns" and kind(value.type) != "null":
        # What nanoseconds cannot reach becomes the farthest they do: so comparisons still come out right.
        limit = pa.scalar(((1 << 63) - 1) // 1000, BIGINT)
        counts = pc.min_element_wise(pc.cast(value, BIGINT), limit, skip_nulls=False)
        counts = pc.max_element_wise(counts, pc.negate(limit), skip_nulls=False)
        return pc.cast(pc.multiply(counts, 1000), type_)
    return pc.cast(value, type_, safe=False)


def _among(args: list[Datum], _: Call) -> Datum:
    value, *members = args
    found = pc.is_in(value, value_set=pa.array(members, value.type))
    return pc.if_else(pc.is_valid(value), found, pa.scalar(None, pa.bool_()))


_OPERATIONS: dict[Op, Callable[[list[Datum], Call], Datum]] = {
    Op.EQ: _equal,
    Op.LT: _less,
    Op.AND: lambda args, _: pc.and_kleene(*args),
    Op.OR: lambda args, _: pc.or_kleene(*args),
    Op.NOT: lambda args, _: pc.invert(*args),
    Op.IS_NULL: lambda args, _: pc.is_null(*args),
    Op.ADD: lambda args, _: pc.add(*args),
    Op.SUB: lambda args, _: pc.subtract(*args),
    Op.MUL: lambda args, _: pc.multiply(*args),
    Op.DIV: lambda args, _: pc.divide(args[0], _nonzero(args[1])),
    Op.MOD: _remainder,
    Op.NEG: lambda args, _: pc.negate(*args),
    Op.CASE: _case,
    Op.CAST: _cast,
    Op.IN: _among,
    **FUNCTIONS,
}
