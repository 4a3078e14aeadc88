"""Casts and functions of conditions, brought down to the operations of `gpu_ops.conditions.expressions`.

As in `gpu_ops.conditions.lowering`, operands that do not fit raise `TypeProblemError`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal

import pyarrow as pa

from gpu_ops.conditions import checks, literals
from gpu_ops.conditions.expressions import (
    BIGINT,
    BOOL,
    DOUBLE,
    INT,
    NUMERIC,
    STRING,
    Call,
    Literal,
    Node,
    Op,
    TypeProblemError,
    as_decimal,
    convert,
    kind,
    type_name,
)
from gpu_ops.conditions.lowering import (
    agree,
    arithmetic,
    case,
    compare,
    date_literal,
    extreme,
    logic,
    number,
    timestamp_literal,
)

_NO_CAST = "CAST from {} to {} is not supported in a condition"


def cast(node: Node, type_: pa.DataType, *, safe: bool) -> Node:
    """CAST, and TRY_CAST when ``safe``.

    CAST does what Spark does with ANSI off: integers wrap, floats saturate, strings and decimals that do not
    fit are null; in ANSI mode, where that happens is noted. TRY_CAST makes null of all that. Backends see these
    pairs only: integer to integer, float, decimal, string; boolean to integer, float; float to int32, int64,
    float; decimal to int64, float, decimal; string to boolean, integer, float; date to string, timestamp without
    zone; timestamp to the same of another unit or zone, from and to the wall clock; timestamp without zone to
    date; null to any.
    """
    if node.type == type_:
        return node
    if kind(node.type) == "null":
        return convert(node, type_)
    result = _cast(node, type_, safe=safe)
    return result if safe else checks.note(result, lambda: _failure(node, type_, result))


def _failure(node: Node, type_: pa.DataType, result: Node) -> Node | None:
    """Where a CAST fails in ANSI mode; None where it cannot."""
    match kind(node.type), kind(type_):
        case "integer" | "float" | "decimal", "integer":
            inside = _in_range(node, type_)
            return None if inside is None else checks.negation(inside)
        case "boolean", "decimal":
            return node if type_.precision == type_.scale else None
        case "string", "integer":
            result = Call(Op.TRY_CAST, (node,), type_)
        case ("string", "boolean" | "float") | ("integer" | "decimal", "decimal"):
            pass
        case _:
            return None
    here = checks.negation(Call(Op.IS_NULL, (node,), BOOL))
    return checks.both(here, Call(Op.IS_NULL, (result,), BOOL))


def _cast(node: Node, type_: pa.DataType, *, safe: bool) -> Node:
    source, target = kind(node.type), kind(type_)
    if isinstance(node, Literal) and isinstance(node.value, str) and target in ("date", "timestamp"):
        return date_literal(node.value) if target == "date" else timestamp_literal(node.value, type_.tz)
    if safe and target == "integer" and source in NUMERIC:
        return _cast_in_range(node, type_)
    match source, target:
        case "integer" | "float" | "decimal", "boolean":
            zero = convert(Literal(0, INT), node.type)
            return Call(Op.NOT, (Call(Op.EQ, (node, zero), BOOL),), BOOL)
        case "boolean", "string":
            return _choose(node, Literal("true", type_), Literal("false", type_))
        case "boolean", "decimal":
            one = Literal(Decimal(1) if type_.precision > type_.scale else None, type_)
            return _choose(node, one, Literal(Decimal(0), type_))
        case "float", "integer" if type_.bit_width < 32:
            return Call(Op.CAST, (Call(Op.CAST, (node,), INT),), type_)
        case "decimal", "integer" if type_.bit_width < 64:
            return Call(Op.CAST, (Call(Op.CAST, (node,), BIGINT),), type_)
        case "string", "integer":
            return Call(Op.TRY_CAST if safe else Op.CAST, (node,), type_)
        case "date" | "timestamp", "date":
            return convert(node, type_)
        case "date" | "timestamp", "timestamp":
            return convert(node, pa.timestamp(getattr(node.type, "unit", "us"), type_.tz))
        case (
            ("integer" | "boolean", "integer" | "float")
            | ("integer", "decimal" | "string")
            | ("float", "integer" | "float")
            | ("decimal", "integer" | "float" | "decimal")
            | ("string", "boolean" | "float")
            | ("date", "string")
        ):
            return Call(Op.CAST, (node,), type_)
        case _:
            raise TypeProblemError(_NO_CAST.format(type_name(node.type), type_name(type_)))


def _choose(test: Node, yes: Literal, no: Literal) -> Node:
    return Call(Op.CASE, (test, yes, Call(Op.NOT, (test,), BOOL), no, Literal(None, yes.type)), yes.type)


def _cast_in_range(node: Node, type_: pa.DataType) -> Node:
    inside, result = _in_range(node, type_), _cast(node, type_, safe=False)
    return result if inside is None else case([(inside, result)], Literal(None, type_), "CAST")


def _in_range(node: Node, type_: pa.DataType) -> Node | None:
    """Whether a number, its fraction cut off, is one of an integer type; None where it always is."""
    bound = 1 << (type_.bit_width - 1)
    if kind(node.type) == "integer" and node.type.bit_width <= type_.bit_width:
        return None
    if kind(node.type) == "float":
        # Of a BIGINT both ends belong to it in Spark: as a double its largest value is 2^63.
        wide, strict = convert(node, DOUBLE), type_ != BIGINT
        low = compare("<" if strict else "<=", Literal(float(-bound - strict), DOUBLE), wide)
        return logic(Op.AND, low, compare("<" if strict else "<=", wide, Literal(float(bound), DOUBLE)))
    # A decimal with fewer digits than the bound is inside, and comparing it might take too many digits.
    limits = [_literal(-bound - 1), _literal(bound)]
    digits = as_decimal(limits[1]).precision
    if kind(node.type) == "decimal" and node.type.precision - node.type.scale < digits:
        return None
    return logic(Op.AND, compare("<", limits[0], node), compare("<", node, limits[1]))


def _literal(value: int) -> Literal:
    return Literal(*literals.number(str(value)))


def _null_of(*nodes: Node) -> Node:
    return case([(compare("=", *nodes), Literal(None, pa.null()))], nodes[0], "NULLIF")


def _coalesce(*nodes: Node) -> Node:
    nodes = tuple(agree(nodes, "take COALESCE of"))
    return Call(Op.COALESCE, nodes, nodes[0].type) if len(nodes) > 1 else nodes[0]


def _is_nan(node: Node) -> Node:
    if kind(node.type) not in NUMERIC | {"null"}:
        raise TypeProblemError(f"ISNAN takes a number, not {type_name(node.type)}")
    return Call(Op.SAME, (convert(node, DOUBLE), Literal(float("nan"), DOUBLE)), BOOL)


def _text(op: Op, node: Node, type_: pa.DataType) -> Node:
    accepted = ("string", "null", "binary") if op is Op.LENGTH else ("string", "null")
    if kind(node.type) not in accepted:
        raise TypeProblemError(f"{op.upper()} takes a STRING, not {type_name(node.type)}")
    return Call(op, (convert(node, STRING) if kind(node.type) == "null" else node,), type_)


def _is_null(node: Node) -> Node:
    return Call(Op.IS_NULL, (node,), BOOL)


_FUNCTIONS: dict[str, tuple[int, int | None, Callable[..., Node]]] = {
    "abs": (1, 1, lambda node: number(Op.ABS, node, "ABS")),
    "coalesce": (1, None, _coalesce),
    "greatest": (2, None, lambda *nodes: extreme(nodes, ">=", "GREATEST")),
    "if": (3, 3, lambda test, yes, no: case([(test, yes)], no, "IF")),
    "ifnull": (2, 2, _coalesce),
    "isnan": (1, 1, _is_nan),
    "isnotnull": (1, 1, lambda node: logic(Op.NOT, _is_null(node))),
    "isnull": (1, 1, _is_null),
    "least": (2, None, lambda *nodes: extreme(nodes, "<=", "LEAST")),
    "length": (1, 1, lambda node: _text(Op.LENGTH, node, INT)),
    "lower": (1, 1, lambda node: _text(Op.LOWER, node, STRING)),
    "mod": (2, 2, lambda left, right: arithmetic("%", left, right, "UTC")),
    "nullif": (2, 2, _null_of),
    "nvl": (2, 2, _coalesce),
    "nvl2": (3, 3, lambda test, yes, no: case([(_is_null(test), no)], yes, "NVL2")),
    "upper": (1, 1, lambda node: _text(Op.UPPER, node, STRING)),
}
_ALIASES = {
    "char_length": "length", "character_length": "length", "len": "length",
    "lcase": "lower", "ucase": "upper",
}  # fmt: skip
FUNCTIONS = sorted([*_FUNCTIONS, *_ALIASES, "cast", "try_cast"])
"""The names of all functions there are."""


def function(name: str, args: Sequence[Node]) -> Node:
    """A function of `FUNCTIONS`, but the casts."""
    least, most, builder = _FUNCTIONS[_ALIASES.get(name, name)]
    if len(args) < least or (most is not None and len(args) > most):
        wanted = f"{least}" if least == most else f"at least {least}"
        raise TypeProblemError(f"{name.upper()} takes {wanted} argument{'s' * (wanted != '1')}, not {len(args)}")
    return builder(*args)
