"""The typed expression tree of a residual condition: what backends evaluate.

Its operations are few (`Op`); `gpu_ops.conditions.builder` brings everything else down to them. The operands of a
comparison have one type when they reach a backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from typing import Final

import numpy as np
import pyarrow as pa

ADVICE: Final = (
    "compute it as a column of the input, before the join (with Spark, where= and sql() do that by themselves)"
)

Value = bool | int | float | Decimal | str | None


class Op(StrEnum):
    """Every operation a backend must know; of arguments typed as stated; null makes null, unless stated."""

    EQ = "="
    """Two of one type. NaN equals NaN, -0.0 equals 0.0."""
    LT = "<"
    """As EQ; NaN is greater than any other number; strings and binary compare bytewise."""
    AND = "and"
    """Two booleans, Kleene."""
    OR = "or"
    NOT = "not"
    IS_NULL = "is_null"
    """One of any type, nested ones too; NaN is no null."""
    ADD = "+"
    """Two of one numeric type (integers wrap around; ``Call.type`` of decimals has a digit more); for rows that tasks
    filter a timestamp and an interval, too."""
    SUB = "-"
    MUL = "*"
    """Two of one numeric type, or two decimals (``Call.type`` holds any product)."""
    DIV = "/"
    """Two doubles; a zero divisor makes null."""
    MOD = "%"
    """Two integers or two floats; the sign is the dividend's (C's fmod); a zero divisor makes null."""
    NEG = "negate"
    """One number; the smallest integer stays as it is."""
    CASE = "case"
    """condition, value, ..., else: the value after the first condition that is true (unknown is not)."""
    CAST = "cast"
    """To a wider ``Call.type``: integer to integer, float, decimal; float to double; decimal to one with no fewer
    digits before and after the point; timestamp or interval to nanoseconds (the farthest there are, where these do
    not reach); null to any."""
    IN = "in"
    """A value and the literals it is looked up among; none is null or a floating point number. This and LIKE are for
    rows that tasks filter (`gpu_ops.spark.tasks.rows`): joins have neither, and the GPU has no code for them."""
    LIKE = "like"
    """Two strings, the second a literal: SQL's pattern, escaped by a backslash."""


@dataclass(frozen=True)
class Column:
    """A column of an input.

    A backend that holds it in another type (dictionary, large_string) casts it to ``type``.
    """

    input: str
    name: str
    type: pa.DataType


@dataclass(frozen=True)
class Literal:
    """A constant, None for null.

    Dates are days since 1970-01-01; timestamps (in UTC where zoned) count the type's unit.
    """

    value: Value
    type: pa.DataType


@dataclass(frozen=True)
class Call:
    """An operation. One node may stand at several places of a tree, as one object."""

    op: Op
    args: tuple[Node, ...]
    type: pa.DataType


Node = Column | Literal | Call


class TypeProblemError(Exception):
    """Operands that do not fit together; the parser adds the position."""


BOOL, INT, BIGINT, FLOAT, DOUBLE = pa.bool_(), pa.int32(), pa.int64(), pa.float32(), pa.float64()
STRING, DATE = pa.string(), pa.date32()
_NAMES = {
    pa.int8(): "TINYINT", pa.int16(): "SMALLINT", INT: "INT", BIGINT: "BIGINT", FLOAT: "FLOAT", DOUBLE: "DOUBLE",
}  # fmt: skip
_BINARY = pa.binary()
_WIDER = {
    pa.uint8(): pa.int16(), pa.uint16(): INT, pa.uint32(): BIGINT, pa.uint64(): pa.decimal128(20, 0),
    pa.float16(): FLOAT, pa.large_string(): STRING, pa.string_view(): STRING, pa.large_binary(): _BINARY,
    pa.binary_view(): _BINARY, pa.date64(): DATE,
}  # fmt: skip
_DIGITS = {8: 3, 16: 5, 32: 10, 64: 20}  # decimal digits an integer type takes: Spark's DecimalType.forType
_KINDS = (
    ("boolean", pa.types.is_boolean), ("integer", pa.types.is_signed_integer),
    ("float", lambda type_: type_ in (FLOAT, DOUBLE)), ("decimal", pa.types.is_decimal128),
    ("string", pa.types.is_string), ("binary", pa.types.is_binary), ("date", pa.types.is_date32),
    ("timestamp", lambda type_: pa.types.is_timestamp(type_) and type_.tz is not None),
    ("timestamp_ntz", pa.types.is_timestamp), ("interval", pa.types.is_duration), ("null", pa.types.is_null),
)  # fmt: skip
NUMERIC = {"integer", "float", "decimal"}
_TIMES = {"timestamp", "timestamp_ntz", "interval"}
_COMPARABLE = {*_TIMES, "boolean", "string", "binary", "date"}


def kind(type_: pa.DataType) -> str:
    """The family of a type; 'other' knows IS NULL and nothing else."""
    return next((name for name, test in _KINDS if test(type_)), "other")


def type_name(type_: pa.DataType) -> str:
    """The type as Spark SQL writes it."""
    family = kind(type_)
    if family == "decimal":
        return f"DECIMAL({type_.precision},{type_.scale})"
    return _NAMES.get(type_) or (str(type_) if family == "other" else family.upper())


def column_type(type_: pa.DataType) -> pa.DataType:
    """A column's type in a condition: dictionaries decoded, unsigned widened, seconds as microseconds, zones as UTC."""
    if pa.types.is_dictionary(type_):
        return column_type(type_.value_type)
    if pa.types.is_fixed_size_binary(type_):
        return _BINARY
    if kind(type_) in _TIMES:
        unit = "ns" if type_.unit == "ns" else "us"
        return pa.duration(unit) if pa.types.is_duration(type_) else pa.timestamp(unit, "UTC" if type_.tz else None)
    if pa.types.is_decimal(type_):
        scale = max(type_.scale, 0)
        precision = max(type_.precision - min(type_.scale, 0), scale)
        return pa.decimal128(precision, scale) if precision <= 38 else type_
    return _WIDER.get(type_, type_)


def decimal_type(precision: int, scale: int, doing: str, types: Sequence[pa.DataType]) -> pa.DataType:
    """DECIMAL(precision, scale), or what to do when that is wider than 38 digits (Spark would round)."""
    if precision > 38:
        names = " and ".join(type_name(type_) for type_ in types)
        advice = "CAST them to fewer digits, or to DOUBLE, in columns of the inputs"
        raise TypeProblemError(f"cannot {doing} {names} exactly in 38 digits: {advice}")
    return pa.decimal128(precision, scale)


def as_decimal(node: Node) -> pa.DataType:
    """The decimal type that holds an integer or decimal node; a literal's has just its digits."""
    if kind(node.type) == "decimal":
        return node.type
    if isinstance(node, Literal) and isinstance(node.value, int):
        return pa.decimal128(len(str(abs(node.value))), 0)
    return pa.decimal128(_DIGITS[node.type.bit_width], 0)


def common_type(nodes: Sequence[Node], doing: str, *, ansi: bool) -> pa.DataType:
    """The type that all nodes can take: Spark's (TypeCoercion, AnsiTypeCoercion), as far as it only widens numbers.

    Raises:
        TypeProblemError: there is none; ``doing`` names what needed it.
    """
    typed = [node for node in nodes if kind(node.type) != "null"]
    types = [node.type for node in typed]
    kinds = {kind(type_) for type_ in types}
    exact = [node for node in typed if kind(node.type) == "decimal" and not isinstance(node, Literal)]
    if not types:
        return pa.null()
    if "float" in kinds and kinds <= NUMERIC and not exact:
        wide = DOUBLE in types or "decimal" in kinds or ("integer" in kinds and ansi)
        return DOUBLE if wide else FLOAT
    if kinds == {"integer"}:
        return max(types, key=lambda type_: type_.bit_width)
    if kinds <= {"integer", "decimal"}:
        decimals = [as_decimal(node) for node in typed]
        scale = max(type_.scale for type_ in decimals)
        whole = max(type_.precision - type_.scale for type_ in decimals)
        return decimal_type(whole + scale, scale, doing, decimals)
    names = list(dict.fromkeys(type_name(type_) for type_ in types))
    if len(kinds) > 1:
        written = "A constant time is written DATE '...', TIMESTAMP '...' or TIMESTAMP_NTZ '...'. "
        hint = written if "string" in kinds and kinds & {"date", "timestamp", "timestamp_ntz"} else ""
        raise TypeProblemError(f"cannot {doing} {' and '.join(names)}. {hint}To make one type of them, {ADVICE}")
    if not kinds <= _COMPARABLE:
        raise TypeProblemError(f"cannot {doing} values of type {names[0]}")
    return next((type_ for type_ in types if getattr(type_, "unit", None) == "ns"), types[0])


def convert(node: Node, type_: pa.DataType) -> Node:
    """The node in a type that `common_type` found: a literal at once, others by CAST."""
    if node.type == type_:
        return node
    if not isinstance(node, Literal):
        return Call(Op.CAST, (node,), type_)
    value = node.value
    if value is None:
        return Literal(None, type_)
    assert not isinstance(value, str)
    match kind(type_):
        case "float":
            return Literal(float(np.float32(value)) if type_ == FLOAT else float(value), type_)
        case "decimal":
            return Literal(Decimal(value), type_)
        case "timestamp" | "timestamp_ntz":  # microseconds; the nanoseconds up to 9999-12-31 take more than 64 bits
            limit = ((1 << 63) - 1) // 1000
            return Literal(min(max(int(value), -limit), limit) * 1000, type_)
        case _:
            return Literal(int(value), type_)
