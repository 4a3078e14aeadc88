"""A filter in one of Spark's plans as conditions that files can be sifted by, where they mean the same there.

Comparisons of columns with constants, ``IN``, ``IS NULL`` of any column, and what AND, OR and NOT make of them;
integers, text in the order of its bytes, booleans, dates and timestamps. In floating point Spark's NaN is equal to
itself and Arrow's is not.
"""

from __future__ import annotations

from typing import Any, Final

import pyarrow as pa
from py4j.protocol import Py4JError

from gpu_ops.files.row_filter import Both, Compared, Condition, Either, Flag, Missing, Not, OneOf

_COMPARISONS: Final = {
    "EqualTo": "=",
    "LessThan": "<",
    "LessThanOrEqual": "<=",
    "GreaterThan": ">",
    "GreaterThanOrEqual": ">=",
}
_TURNED: Final = {"=": "=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}
_TYPES: Final = {
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "string": pa.string(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}
"""By Spark's name the types that both compare alike."""

_MOST_VALUES: Final = 1000
"""Of an ``IN``: each costs the driver some calls."""

_INTEGERS: Final = ("tinyint", "smallint", "int", "bigint")


class _UnknownError(Exception):
    """Something that only Spark evaluates."""


def conditions_of(expression: Any, columns: list[int]) -> Condition | None:
    """A filter's condition, or None where only Spark evaluates it.

    Args:
        expression: Catalyst's, analyzed.
        columns: takes the ids of the attributes that it names; columns of the condition are places in it.
    """
    try:
        return _condition(expression, columns)
    except (_UnknownError, Py4JError):  # the latter where another version of Spark has other classes
        return None


def _condition(expression: Any, columns: list[int]) -> Condition:
    name = str(expression.nodeName())
    if name in ("And", "Or"):
        left, right = _condition(expression.left(), columns), _condition(expression.right(), columns)
        return Both(left, right) if name == "And" else Either(left, right)
    if name == "Between":
        value, least, most = (expression.productElement(place) for place in range(3))
        column, kind = _column(value, columns)
        return Both(Compared(">=", column, _constant(least, kind)), Compared("<=", column, _constant(most, kind)))
    if name == "Not":
        return Not(_condition(expression.child(), columns))
    if name in ("IsNull", "IsNotNull"):
        missing = Missing(_place(expression.child(), columns))
        return missing if name == "IsNull" else Not(missing)
    if name == "In":
        column, kind = _column(expression.value(), columns)
        given = expression.list()
        if not 0 < given.length() <= _MOST_VALUES:
            raise _UnknownError
        values = [_constant(given.apply(place), kind) for place in range(given.length())]
        return OneOf(column, pa.array(values, values[0].type))
    if name in _COMPARISONS:
        op = _COMPARISONS[name]
        if _is_constant(expression.left()):
            column, kind = _column(expression.right(), columns)
            return Compared(_TURNED[op], column, _constant(expression.left(), kind))
        column, kind = _column(expression.left(), columns)
        return Compared(op, column, _constant(expression.right(), kind))
    column, kind = _column(expression, columns)
    if kind != "boolean":
        raise _UnknownError
    return Flag(column)


def _column(expression: Any, columns: list[int]) -> tuple[int, str]:
    """The place of a column, and the type it is compared in."""
    kind = _type(expression)
    if str(expression.nodeName()) == "Cast":
        expression = expression.child()
        own = _type(expression)
        if own not in _INTEGERS or kind not in _INTEGERS[_INTEGERS.index(own) :]:
            raise _UnknownError
    return _place(expression, columns), kind


def _place(expression: Any, columns: list[int]) -> int:
    if str(expression.nodeName()) != "AttributeReference":
        raise _UnknownError
    number = int(expression.exprId().id())
    if number not in columns:
        columns.append(number)
    return columns.index(number)


def _type(expression: Any) -> str:
    kind = str(expression.dataType().sql()).lower()
    if kind not in _TYPES:
        raise _UnknownError
    return kind


def _is_constant(expression: Any) -> bool:
    """A literal, or the cast of one: what Spark may fold now, as it will be the same in every micro-batch."""
    while str(expression.nodeName()) in ("Cast", "UnaryMinus"):
        expression = expression.child()
    return str(expression.nodeName()) == "Literal"


def _constant(expression: Any, kind: str) -> pa.Scalar:
    """A constant's value in the type that it is compared in; integers of all widths compare with each other."""
    if not _is_constant(expression):
        raise _UnknownError
    own = _type(expression)
    if own != kind and not (own in _INTEGERS and kind in _INTEGERS):
        raise _UnknownError
    compared = _TYPES[kind if own == kind else "bigint"]
    try:
        value = expression.eval(None)
    except Exception as error:  # Spark's own refusal, which comes when it evaluates it
        raise _UnknownError from error
    if value is None:
        raise _UnknownError
    if pa.types.is_temporal(compared):
        bits = pa.int32() if kind == "date" else pa.int64()
        return pa.scalar(int(value), bits).cast(compared)
    return pa.scalar(value.toString() if kind == "string" else value, compared)
