"""The typed expression tree of a residual condition: what backends evaluate, and what makes it.

Its operations are few (`Op`). `Builder` brings SQL's down to them, types checked, casts made explicit: ``>`` becomes
``<`` and ``<=`` its negation; ``<=>``, IN, BETWEEN and COALESCE become AND, OR and CASE. The operands of a comparison
have one type when they reach a backend. Whatever builds raises `TypeProblemError` for operands that do not fit.

In ANSI mode (``spark.sql.ansi.enabled``) arithmetic fails where it gives null or wraps around without. `failing` makes
one condition of the tests of the rows in which it does, which backends evaluate like any other: it knows that AND, OR
and CASE leave operands out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """Every operation a backend must know; of arguments typed as stated; null makes null, unless stated.

    Attributes:
        EQ: two of one type. NaN equals NaN, -0.0 equals 0.0.
        LT: as EQ; NaN is greater than any other number; strings and binary compare bytewise.
        AND: two booleans, Kleene.
        IS_NULL: one of any type, nested ones too; NaN is no null.
        ADD: two of one numeric type (integers wrap around; ``Call.type`` of decimals has a digit more); for rows that
            tasks filter a timestamp and an interval, too.
        MUL: two of one numeric type, or two decimals (``Call.type`` holds any product).
        DIV: two doubles; a zero divisor makes null.
        MOD: two integers or two floats; the sign is the dividend's (C's fmod); a zero divisor makes null.
        NEG: one number; the smallest integer stays as it is.
        CASE: condition, value, ..., else: the value after the first condition that is true (unknown is not).
        CAST: to a wider ``Call.type``: integer to integer, float, decimal; float to double; decimal to one with no
            fewer digits before and after the point; timestamp or interval to nanoseconds (the farthest there are, where
            these do not reach); null to any.
        IN: a value and the literals it is looked up among; none is null or a floating point number. This and what
            follows is for rows that are filtered and projected (`gpu_ops.descriptions.projection`): joins have none of
            it, and of it the GPU has code for IN alone (`ON_HOST`).
        LIKE: two strings, the second a literal: SQL's pattern, escaped by a backslash.
        TEXT: an integer or a boolean as SQL writes it.
        LENGTH: a string; its characters (Unicode code points), as in the next one.
        SUBSTRING: a string, and two literals: the first character, from 1, or negative from the end; how many.
        CONCAT: any number of strings, one behind the other.
        TRIM: a string, a literal of the characters that are taken off, and one that says where: ``"BOTH"``,
            ``"LEADING"``, ``"TRAILING"``.
        REPLACE: a string, a literal that is not empty, and one that takes its place.
        PART: a date or timestamp (in UTC), and a literal: ``"YEAR"`` and so on.
        TRUNC: likewise; the start of the year and so on that it is in, as a date or a timestamp.
        FORMAT: a date or timestamp (in UTC), and a literal: Java's pattern, of ``yyyy MM dd HH mm ss`` and marks.
    """

    EQ = "="
    LT = "<"
    AND = "and"
    OR = "or"
    NOT = "not"
    IS_NULL = "is_null"
    ADD = "+"
    SUB = "-"
    MUL = "*"
    DIV = "/"
    MOD = "%"
    NEG = "negate"
    CASE = "case"
    CAST = "cast"
    IN = "in"
    LIKE = "like"
    TEXT = "text"
    LENGTH = "length"
    SUBSTRING = "substring"
    CONCAT = "concat"
    TRIM = "trim"
    REPLACE = "replace"
    PART = "part"
    TRUNC = "trunc"
    FORMAT = "format"


ON_HOST: Final = frozenset({
    Op.LIKE, Op.TEXT, Op.LENGTH, Op.SUBSTRING, Op.CONCAT, Op.TRIM, Op.REPLACE, Op.PART, Op.TRUNC, Op.FORMAT,
})  # fmt: skip
"""The operations that the GPU has no code for."""


@dataclass(frozen=True)
class ColumnRef:
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


Node = ColumnRef | Literal | Call


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


# --- building -------------------------------------------------------------------------------------

_FALSE, _TRUE = Literal(False, BOOL), Literal(True, BOOL)
_CALCULATES: Final = (Op.ADD, Op.SUB, Op.MUL, Op.DIV, Op.MOD, Op.NEG)


def nodes_of(*roots: Node | None) -> list[Node]:
    """The nodes of trees, each once, operands first; without recursion, as a long chain of operators is a deep tree."""
    nodes: dict[int, Node] = {}
    stack = [root for root in roots[::-1] if root is not None]
    while stack:
        node = stack[-1]
        waiting = [arg for arg in (node.args if isinstance(node, Call) else ()) if id(arg) not in nodes]
        stack += waiting[::-1]
        if not waiting:
            nodes.setdefault(id(stack.pop()), node)
    return list(nodes.values())


def replaced(root: Node, by: Mapping[ColumnRef, ColumnRef]) -> Node:
    """A tree with other columns in the place of its own."""
    replacement: dict[int, Node] = {}
    for node in nodes_of(root):
        if isinstance(node, Call):
            replacement[id(node)] = Call(node.op, tuple(replacement[id(arg)] for arg in node.args), node.type)
        else:
            replacement[id(node)] = by.get(node, node) if isinstance(node, ColumnRef) else node
    return replacement[id(root)]


def boolean(node: Node, what: str) -> Node:
    """The node as an operand of AND, OR, NOT, WHEN; NULL is the unknown boolean."""
    if kind(node.type) not in ("boolean", "null"):
        raise TypeProblemError(f"{what} takes a BOOLEAN, not {type_name(node.type)}")
    return convert(node, BOOL)


def logic(op: Op, *args: Node) -> Node:
    """AND or OR of any number, or NOT. A long chain becomes a flat tree: halves of halves."""
    if len(args) > 2:
        half = len(args) // 2
        return logic(op, logic(op, *args[:half]), logic(op, *args[half:]))
    if len(args) == 1 and op is not Op.NOT:
        return args[0]
    return Call(op, tuple(boolean(arg, op.upper()) for arg in args), BOOL)


def is_null(node: Node) -> Node:
    """The tree of ``IS NULL``."""
    return Call(Op.IS_NULL, (node,), BOOL)


def _case(test: Node, value: Node, otherwise: Node) -> Node:
    return Call(Op.CASE, (test, value, otherwise), value.type)


class Builder:
    """Builds the tree of one condition.

    Attributes:
        ansi: whether in ANSI mode.
        mode_matters: whether the tree would be another one in the other mode; beside that, see `failing`.
    """

    def __init__(self, *, ansi: bool) -> None:
        self.ansi, self.mode_matters = ansi, False

    def agree(self, nodes: Sequence[Node], doing: str) -> list[Node]:
        """The nodes, all in one type."""
        type_ = common_type(nodes, doing, ansi=self.ansi)
        self.mode_matters |= type_ != common_type(nodes, doing, ansi=not self.ansi)
        return [convert(node, type_) for node in nodes]

    def compare(self, operator: str, left: Node, right: Node) -> Node:
        """One of ``= <> != < <= > >= <=>``."""
        left, right = self.agree((left, right), "compare")
        if left.type == pa.null():
            return Literal(True if operator == "<=>" else None, BOOL)
        if operator in (">", "<="):
            left, right = right, left
        result = Call(Op.LT if operator in ("<", "<=", ">", ">=") else Op.EQ, (left, right), BOOL)
        if operator == "<=>":
            return _case(result, _TRUE, logic(Op.AND, is_null(left), is_null(right)))
        return logic(Op.NOT, result) if operator in ("<>", "!=", "<=", ">=") else result

    def is_in(self, value: Node, members: Sequence[Node]) -> Node:
        """The tree of ``IN`` with a list."""
        value, *members = self.agree((value, *members), "compare")
        return logic(Op.OR, *(self.compare("=", value, member) for member in members))

    def case(self, branches: Sequence[tuple[Node, Node]], otherwise: Node) -> Node:
        """The tree of ``CASE WHEN``."""
        *values, last = self.agree([*(value for _, value in branches), otherwise], "return from CASE")
        tests = [boolean(test, "WHEN") for test, _ in branches]
        args = [node for pair in zip(tests, values, strict=True) for node in pair]
        return Call(Op.CASE, (*args, last), last.type)

    def coalesce(self, nodes: Sequence[Node]) -> Node:
        """The tree of ``COALESCE(...)``."""
        *first, last = self.agree(nodes, "take COALESCE of")
        args = [arg for node in first for arg in (logic(Op.NOT, is_null(node)), node)]
        return Call(Op.CASE, (*args, last), last.type) if args else last

    def cast(self, node: Node, type_: pa.DataType) -> Node:
        """CAST to an integer type or DOUBLE that has all of the operand's values (of a BIGINT's, the nearest ones)."""
        operand_kind, new = kind(node.type), kind(type_)
        wider = (
            node.type.bit_width <= type_.bit_width
            if operand_kind == new
            else operand_kind == "integer" and new == "float"
        )
        constant = operand_kind == "decimal" and new == "float" and isinstance(node, Literal)
        if not (wider or constant or operand_kind == "null"):
            names = f"CAST of {type_name(node.type)} to {type_name(type_)}"
            raise TypeProblemError(f"{names} is not evaluated in a join's condition: {ADVICE}")
        return convert(node, type_)

    def negative(self, node: Node) -> Node:
        """The tree of a unary minus."""
        if kind(node.type) not in {*NUMERIC, "null"}:
            raise TypeProblemError(f"'-' takes a number, not {type_name(node.type)}")
        return Call(Op.NEG, (node,), node.type) if kind(node.type) != "null" else node

    def arithmetic(self, operator: str, left: Node, right: Node) -> Node:
        """One of ``+ - * / %``."""
        if not {kind(left.type), kind(right.type)} <= {*NUMERIC, "null"}:
            names = " and ".join(type_name(node.type) for node in (left, right))
            raise TypeProblemError(f"'{operator}' takes numbers, not {names}. For anything else, {ADVICE}")
        one, other = self.agree((left, right), "calculate with")
        if kind(one.type) == "decimal":
            return self._decimals(operator, left, right)
        if operator == "/" or one.type == pa.null():
            one, other = convert(one, DOUBLE), convert(other, DOUBLE)
        return Call(Op(operator), (one, other), one.type)

    def _decimals(self, operator: str, left: Node, right: Node) -> Node:
        if operator in "/%":
            raise TypeProblemError(f"'{operator}' of DECIMAL is not evaluated in a join's condition: {ADVICE}")
        if "null" in (kind(left.type), kind(right.type)):
            return Literal(None, as_decimal(right if kind(left.type) == "null" else left))
        types = first, second = as_decimal(left), as_decimal(right)
        if operator == "*":
            digits = first.precision + second.precision + 1
            type_ = decimal_type(digits, first.scale + second.scale, "multiply", types)
            return Call(Op.MUL, (convert(left, first), convert(right, second)), type_)
        same = common_type((left, right), "add", ansi=self.ansi)
        type_ = decimal_type(same.precision + 1, same.scale, "add", types)
        return Call(Op(operator), (convert(left, same), convert(right, same)), type_)


# --- ANSI mode ------------------------------------------------------------------------------------


def failing(root: Node) -> Node | None:
    """A boolean tree that is true where Spark fails in ANSI mode, null elsewhere; None where it cannot fail."""
    found: dict[int, dict[int, Node]] = {}
    for node in nodes_of(root):
        tests: list[Node] = []
        if isinstance(node, Call):
            own = _failure(node) if node.op in _CALCULATES else None
            tests = [*_of_operands(node, found), *([] if own is None else [own])]
        found[id(node)] = {id(test): test for test in tests}
    return _any(found[id(root)])


def _failure(node: Call) -> Node | None:
    """The rows where an operation fails by itself: an integer overflows, a divisor is zero."""
    left, right = node.args[0], node.args[-1]
    if node.op in (Op.DIV, Op.MOD):
        if isinstance(right, Literal) and right.value:
            return None
        zero = Call(Op.EQ, (right, convert(Literal(0, pa.int8()), right.type)), BOOL)
        return logic(Op.AND, zero, logic(Op.NOT, is_null(left)))
    if kind(node.type) != "integer":
        return None
    lowest = -(1 << (node.type.bit_width - 1))
    if node.op is Op.NEG:
        return Call(Op.EQ, (left, Literal(lowest, left.type)), BOOL)
    # What has wrapped around is far from what the same comes to in floating point, where nothing does.
    near = Call(node.op, (convert(left, DOUBLE), convert(right, DOUBLE)), DOUBLE)
    off = Call(Op.SUB, (convert(node, DOUBLE), near), DOUBLE)
    low, high = Literal(lowest / 2.0, DOUBLE), Literal(-lowest / 2.0, DOUBLE)
    return logic(Op.OR, Call(Op.LT, (off, low), BOOL), Call(Op.LT, (high, off), BOOL))


def _of_operands(node: Call, tests: dict[int, dict[int, Node]]) -> list[Node]:
    """The failures of a node's operands, where they are evaluated at all."""
    args = node.args
    if node.op in (Op.AND, Op.OR):
        first, second = _any(tests[id(args[0])]), _any(tests[id(args[1])])
        decides = args[0] if node.op is Op.OR else logic(Op.NOT, args[0])  # true: the second is not looked at
        reached = [logic(Op.AND, _case(decides, _FALSE, _TRUE), second)] if second is not None else []
        return [*([first] if first is not None else []), *reached]
    if node.op is not Op.CASE:
        return [test for arg in args for test in tests[id(arg)].values()]
    result = _any(tests[id(args[-1])])
    for test, value in zip(args[-3::-2], args[-2::-2], strict=True):
        inside = _any(tests[id(value)])
        if inside is not None or result is not None:
            result = _case(test, inside or _FALSE, result or _FALSE)
        result = _any({**tests[id(test)], **({} if result is None else {id(result): result})})
    return [result] if result is not None else []


def _any(tests: dict[int, Node]) -> Node | None:
    return logic(Op.OR, *tests.values()) if tests else None
