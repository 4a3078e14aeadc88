"""The typed expression tree of a residual condition: what backends evaluate.

Its operations are few (`Op`); `gpu_ops.conditions.lowering` brings everything else down to them. Both arguments of a
comparison have the same type when they reach a backend (timestamps may differ in their zones).

Types and implicit casts are those of Spark (TypeCoercion, AnsiTypeCoercion, DecimalPrecision), narrowed: what Spark
would guess at (a string beside a number, a number beside a boolean) is refused here.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum

import pyarrow as pa

from gpu_ops.conditions import literals

ANSI: ContextVar[bool] = ContextVar("ANSI", default=False)
"""Whether the text that is being read is one of a session with ``spark.sql.ansi.enabled``."""

Value = bool | int | float | Decimal | str | bytes | None


class Op(StrEnum):
    """Every operation a backend must know; of arguments typed as said; null makes null, unless said."""

    EQ = "="
    """Two of one type. NaN equals NaN, -0.0 equals 0.0."""
    LT = "<"
    """As EQ; NaN is greater than any other number; strings and binary compare bytewise."""
    LE = "<="
    SAME = "<=>"
    """IS NOT DISTINCT FROM: as EQ, and null is the same as null; never null."""
    AND = "and"
    """Two booleans, Kleene."""
    OR = "or"
    NOT = "not"
    IS_NULL = "is_null"
    """One of any type, nested ones too; NaN is no null."""
    IN = "in"
    """A value and literals of its type, none null: the OR of EQ."""
    LIKE = "like"
    r"""A string and a literal, the pattern of all of it: % and _ as in SQL, newlines too; \ escapes."""
    ADD = "+"
    """Two of one numeric type (integers wrap around; ``Call.type`` of decimals has a digit more), or
    timestamp and duration of one unit, or date and int32 days."""
    SUB = "-"
    """As ADD; also two timestamps without zone, which make a duration."""
    MUL = "*"
    """Two of one numeric type, or two decimals (``Call.type`` holds any product)."""
    DIV = "/"
    """Two doubles; a zero divisor makes null."""
    MOD = "%"
    """Two integers or two floats; the sign is the dividend's (C's fmod); a zero divisor makes null."""
    NEG = "negate"
    """One number; the smallest integer stays as it is."""
    ABS = "abs"
    """As NEG."""
    ADD_MONTHS = "add_months"
    """A date or timestamp without zone and an int32 literal; the day is clipped to the month's last."""
    CASE = "case"
    """condition, value, ..., else: the value after the first condition that is true (unknown is not)."""
    COALESCE = "coalesce"
    """Two or more of one type."""
    CAST = "cast"
    """One value, to ``Call.type``. The pairs there are: `gpu_ops.conditions.functions.cast`."""
    TRY_CAST = "try_cast"
    """A string to an integer, of digits only (CAST takes '1.9' too, as 1)."""
    LOWER = "lower"
    UPPER = "upper"
    LENGTH = "length"
    """Characters of a string, bytes of a binary; int32."""


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

    Dates are days since 1970-01-01; timestamps (in UTC where zoned) and durations count the type's unit.
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
STRING, DATE, INTERVAL, MONTHS = pa.string(), pa.date32(), pa.duration("us"), pa.month_day_nano_interval()
_NAMES = {
    BOOL: "BOOLEAN", pa.int8(): "TINYINT", pa.int16(): "SMALLINT", INT: "INT", BIGINT: "BIGINT",
    FLOAT: "FLOAT", DOUBLE: "DOUBLE", STRING: "STRING", pa.binary(): "BINARY", DATE: "DATE",
    pa.null(): "NULL", MONTHS: "INTERVAL of months",
}  # fmt: skip
_SIGNED = {pa.uint8(): pa.int16(), pa.uint16(): INT, pa.uint32(): BIGINT, pa.uint64(): pa.decimal128(20, 0)}
_DIGITS = {8: 3, 16: 5, 32: 10, 64: 20}  # decimal digits an integer type takes: Spark's DecimalType.forType
_KINDS = (
    ("boolean", pa.types.is_boolean), ("integer", pa.types.is_signed_integer),
    ("float", lambda type_: type_ in (FLOAT, DOUBLE)), ("decimal", pa.types.is_decimal128),
    ("string", pa.types.is_string), ("binary", pa.types.is_binary), ("date", pa.types.is_date32),
    ("timestamp", pa.types.is_timestamp), ("interval", pa.types.is_duration),
    ("months", lambda type_: type_ == MONTHS), ("null", pa.types.is_null),
)  # fmt: skip
NUMERIC = {"integer", "float", "decimal"}
_COMPARABLE = {*NUMERIC, "boolean", "string", "binary", "date", "timestamp", "interval"}


def kind(type_: pa.DataType) -> str:
    """The family of a type; 'other' knows IS NULL and nothing else."""
    return next((name for name, test in _KINDS if test(type_)), "other")


def type_name(type_: pa.DataType) -> str:
    """The type as Spark SQL writes it."""
    match kind(type_):
        case "decimal":
            return f"DECIMAL({type_.precision},{type_.scale})"
        case "timestamp":
            return "TIMESTAMP" if type_.tz else "TIMESTAMP_NTZ"
        case "interval":
            return "INTERVAL"
        case _:
            return _NAMES.get(type_, str(type_))


def column_type(type_: pa.DataType) -> pa.DataType:
    """A column's type in a condition, zone aside: dictionaries decoded, unsigned widened, seconds as microseconds."""
    if pa.types.is_dictionary(type_):
        return column_type(type_.value_type)
    if type_ in _SIGNED:
        return _SIGNED[type_]
    if pa.types.is_float16(type_):
        return FLOAT
    if pa.types.is_large_string(type_) or pa.types.is_string_view(type_):
        return STRING
    if pa.types.is_large_binary(type_) or pa.types.is_fixed_size_binary(type_) or pa.types.is_binary_view(type_):
        return pa.binary()
    if pa.types.is_date64(type_):
        return DATE
    if pa.types.is_timestamp(type_) and type_.unit != "ns":
        return pa.timestamp("us", type_.tz)
    if pa.types.is_duration(type_) and type_.unit != "ns":
        return INTERVAL
    if pa.types.is_decimal(type_):
        scale = max(type_.scale, 0)
        precision = max(type_.precision - min(type_.scale, 0), scale)
        return pa.decimal128(precision, scale) if precision <= 38 else type_
    return type_


def decimal_type(precision: int, scale: int, doing: str, types: Sequence[pa.DataType]) -> pa.DataType:
    """DECIMAL(precision, scale), or what to do when that is wider than 38 digits (Spark would round)."""
    if precision > 38:
        names = " and ".join(type_name(type_) for type_ in types)
        raise TypeProblemError(f"cannot {doing} {names} exactly in 38 digits: CAST to fewer digits, or to DOUBLE")
    return pa.decimal128(precision, scale)


def as_decimal(node: Node) -> pa.DataType:
    """The decimal type that holds an integer or decimal node; a literal's has just its digits."""
    if kind(node.type) == "decimal":
        return node.type
    if isinstance(node, Literal) and isinstance(node.value, int):
        return pa.decimal128(len(str(abs(node.value))), 0)
    return pa.decimal128(_DIGITS[node.type.bit_width], 0)


def common_type(nodes: Sequence[Node], doing: str) -> pa.DataType:
    """The type that all nodes can take.

    Raises:
        TypeProblemError: there is none; ``doing`` says what wanted it.
    """
    typed = [node for node in nodes if kind(node.type) != "null"]
    types = [node.type for node in typed]
    kinds = {kind(type_) for type_ in types}
    if not types:
        return pa.null()
    if kinds <= NUMERIC:
        if "float" in kinds:
            wide = "decimal" in kinds or ("integer" in kinds and ANSI.get())
            return DOUBLE if DOUBLE in types or wide else FLOAT
        if "decimal" not in kinds:
            return max(types, key=lambda type_: type_.bit_width)
        decimals = [as_decimal(node) for node in typed]
        scale = max(type_.scale for type_ in decimals)
        whole = max(type_.precision - type_.scale for type_ in decimals)
        return decimal_type(whole + scale, scale, doing, decimals)
    if kinds <= {"date", "timestamp"} and "timestamp" in kinds:
        stamps = [type_ for type_ in types if kind(type_) == "timestamp"]
        return pa.timestamp(_unit(typed), next((type_.tz for type_ in stamps if type_.tz), None))
    if kinds == {"interval"}:
        return pa.duration(_unit(typed))
    names = [type_name(type_) for type_ in {kind(type_): type_ for type_ in reversed(types)}.values()][::-1]
    if len(kinds) > 1:
        raise TypeProblemError(f"cannot {doing} {' and '.join(names)}: CAST one of them")
    if not kinds <= _COMPARABLE:
        raise TypeProblemError(f"cannot {doing} values of type {names[0]}")
    return types[0]


def _unit(nodes: Sequence[Node]) -> str:
    stamps = [node for node in nodes if kind(node.type) != "date"]
    if all(node.type.unit == "us" for node in stamps):
        return "us"
    # The nanoseconds up to 9999-12-31 take more than 64 bits; beside so far a literal microseconds will do.
    scales = {"date": 86_400 * 10**9, "timestamp": 1000, "interval": 1000}
    far = [n for n in nodes if isinstance(n, Literal) and isinstance(n.value, int) and n.type != pa.timestamp("ns")]
    return "us" if any(abs(int(n.value or 0)) * scales[kind(n.type)] >= 1 << 63 for n in far) else "ns"


def convert(node: Node, type_: pa.DataType) -> Node:
    """The node in a type that `common_type` found: a literal at once, others by CAST, one step at a time."""
    if node.type == type_:
        return node
    if isinstance(node, Literal):
        return _convert_literal(node, type_)
    own, new = kind(node.type), kind(type_)
    if own == "date" and new == "timestamp" and type_.tz:
        return Call(Op.CAST, (convert(node, pa.timestamp(type_.unit)),), type_)
    if own == new == "timestamp" and node.type.unit != type_.unit and node.type.tz != type_.tz:
        return convert(Call(Op.CAST, (node,), pa.timestamp(type_.unit, node.type.tz)), type_)
    if own == "timestamp" and new == "date" and node.type.tz:
        return Call(Op.CAST, (convert(node, pa.timestamp(node.type.unit)),), type_)
    return Call(Op.CAST, (node,), type_)


def _convert_literal(node: Literal, type_: pa.DataType) -> Literal:
    value = node.value
    if value is None:
        return Literal(None, type_)
    match kind(node.type), kind(type_):
        case _, "float":
            value = float(value)
            if FLOAT in (node.type, type_):
                value = struct.unpack("f", struct.pack("f", value))[0]
        case _, "decimal":
            assert isinstance(value, int | Decimal)
            value = Decimal(value)
        case _, "integer":
            value = int(value)
        case "timestamp", "date":
            assert isinstance(value, int)
            wall = _convert_literal(node, pa.timestamp("us")).value
            assert isinstance(wall, int)
            value = wall // 86_400_000_000
        case "date", "timestamp":
            assert isinstance(value, int)
            midnight = Literal(value * 86_400_000_000, pa.timestamp("us"))
            return _convert_literal(midnight, type_)
        case "timestamp", "timestamp":
            assert isinstance(value, int)
            micros, nanos = (value, 0) if node.type.unit == "us" else divmod(value, 1000)
            if node.type.tz and not type_.tz:
                micros = literals.to_wall(micros, node.type.tz)
            elif type_.tz and not node.type.tz:
                micros = literals.to_utc(micros, type_.tz)
            value = micros if type_.unit == "us" else _nanoseconds(micros, nanos)
        case "interval", "interval":
            assert isinstance(value, int)
            value = value if node.type.unit == type_.unit else _nanoseconds(value, 0)
        case _:
            pass
    return Literal(value, type_)


def _nanoseconds(micros: int, nanos: int) -> int:
    limit = ((1 << 63) - 1) // 1000
    return min(max(micros, -limit), limit) * 1000 + nanos
