"""From what SQL can say to the few operations of `gpu_ops.conditions.expressions`: types checked, casts made explicit.

``>`` becomes ``<``; BETWEEN two comparisons; IF, NULLIF, GREATEST and LEAST become CASE; arithmetic on time
in zones whose offset changes becomes arithmetic on the wall clock between two casts, as Spark does it.
Every function here raises `TypeProblemError` for operands that do not fit.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal

import pyarrow as pa

from gpu_ops.conditions import checks, literals
from gpu_ops.conditions.expressions import (
    ANSI,
    BOOL,
    DATE,
    DOUBLE,
    INT,
    MONTHS,
    NUMERIC,
    STRING,
    Call,
    Literal,
    Node,
    Op,
    TypeProblemError,
    Value,
    as_decimal,
    common_type,
    convert,
    decimal_type,
    kind,
    type_name,
)

_DAY = 86_400_000_000


def boolean(node: Node, what: str) -> Node:
    """The node as an operand of AND, OR, NOT, WHEN; NULL is the unknown boolean."""
    if kind(node.type) not in ("boolean", "null"):
        raise TypeProblemError(f"{what} takes a BOOLEAN, not {type_name(node.type)}")
    return convert(node, BOOL)


def logic(op: Op, *args: Node) -> Node:
    """AND or OR of any number, or NOT. A long chain becomes a flat tree: halves of halves."""
    if len(args) <= 2:
        return Call(op, tuple(boolean(arg, op.upper()) for arg in args), BOOL)
    half = len(args) // 2
    return logic(op, *(logic(op, *part) if len(part) > 1 else part[0] for part in (args[:half], args[half:])))


def _is_text(node: Node) -> bool:
    return isinstance(node, Literal) and isinstance(node.value, str)


def read_times(nodes: Sequence[Node]) -> list[Node]:
    """String literals beside times as times. Spark makes null or an error of one that is none; here it is refused."""
    kinds = {kind(node.type) for node in nodes}
    if not kinds & {"date", "timestamp"}:
        return list(nodes)
    stamps = [node for node in nodes if kind(node.type) == "timestamp"]
    zone = next((node.type.tz for node in stamps if node.type.tz), None)
    read: list[Node] = []
    for node in nodes:
        if isinstance(node, Literal) and isinstance(node.value, str):
            node = date_literal(node.value) if not stamps else timestamp_literal(node.value, zone)  # noqa: PLW2901
        read.append(node)
    return read


_AS_SPARK_WRITES = {
    "date": re.compile(r"\d{4}-\d\d-\d\d"),
    "timestamp": re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(\.\d{0,5}[1-9])?"),
}


def _times_as_text(nodes: Sequence[Node]) -> list[Node]:
    """Times of an IN in which a string stands, too: without ANSI mode Spark compares them all as text.

    So texts must look as Spark writes a time. Equal text is equal time on the wall clock, which an hour that comes
    twice shows twice.
    """
    kinds = {kind(node.type) for node in nodes} & {"date", "timestamp"}
    if not kinds or ANSI.get() or not any(map(_is_text, nodes)):
        return list(nodes)
    if len(kinds) > 1:
        raise TypeProblemError("cannot compare DATE and TIMESTAMP with STRING in an IN: CAST them to one type")
    (own,) = kinds
    read: list[Node] = []
    for node in nodes:
        if isinstance(node, Literal) and isinstance(node.value, str):
            if not _AS_SPARK_WRITES[own].fullmatch(node.value):
                raise TypeProblemError(
                    f"without ANSI mode Spark compares {node.value!r} in an IN with the {own.upper()} as text, which "
                    f"never looks so: write {own.upper()} {node.value!r}"
                )
            node = date_literal(node.value) if own == "date" else timestamp_literal(node.value, None)  # noqa: PLW2901
        read.append(_wall(node, node.type.unit) if kind(node.type) == "timestamp" else node)
    return read


def _fixed_offset(nodes: Sequence[Node]) -> list[Node]:
    """Zoned literals beside columns without zone as wall-clock times, so that no column is cast.

    Only where the offset never changes: in the hours that a change skips or repeats it is not the same.
    """
    stamps = [node for node in nodes if kind(node.type) == "timestamp"]
    zone = next((node.type.tz for node in stamps if node.type.tz), None)
    columns = [node for node in stamps if not isinstance(node, Literal)]
    if not zone or literals.shifts(zone) or not columns or any(node.type.tz for node in columns):
        return list(nodes)
    walls = [isinstance(node, Literal) and kind(node.type) == "timestamp" for node in nodes]
    return [_wall(n, n.type.unit) if wall else n for n, wall in zip(nodes, walls, strict=True)]


def date_literal(text: str) -> Literal:
    """DATE '...'."""
    try:
        return Literal(literals.date(text), DATE)
    except ValueError as error:
        raise TypeProblemError(str(error)) from None


def timestamp_literal(text: str, zone: str | None) -> Literal:
    """TIMESTAMP '...', in this zone unless the text names one; TIMESTAMP_NTZ, which ignores it, without."""
    try:
        wall, own = literals.timestamp(text)
        value = literals.to_utc(wall, own or zone or "UTC") if zone else wall
    except (ValueError, KeyError) as error:
        raise TypeProblemError(f"{text!r} is not a timestamp: {error}") from None
    return Literal(value, pa.timestamp("us", zone))


def agree(nodes: Sequence[Node], doing: str) -> list[Node]:
    """The nodes, all in one type. Without ANSI mode Spark makes text of times beside text; that is refused."""
    nodes = read_times(nodes) if ANSI.get() else nodes
    type_ = common_type(nodes, doing)
    return [convert(node, type_) for node in nodes]


def _comparable(nodes: Sequence[Node]) -> list[Node]:
    """As `agree`, but in a column's own type where that says the same: no column is cast for a literal."""
    nodes = _fixed_offset(read_times(nodes))
    common = common_type(nodes, "compare")
    types = {node.type for node in nodes if not isinstance(node, Literal)}
    if len(types) == 1 and kind(common) in ("integer", "decimal"):
        own = types.pop()
        if all(node.value is None or _fits(node.value, own) for node in nodes if isinstance(node, Literal)):
            common = own
    return [convert(node, common) for node in nodes]


def _fits(value: Value, type_: pa.DataType) -> bool:
    if not isinstance(value, int | Decimal) or kind(type_) not in ("integer", "decimal"):
        return False
    if kind(type_) == "integer":
        bound = 1 << (type_.bit_width - 1)
        return bool(-bound <= value < bound and value == int(value))
    own = as_decimal(Literal(value, INT)) if isinstance(value, int) else literals.decimal(str(value))[1]
    return bool(own.scale <= type_.scale and own.precision - own.scale <= type_.precision - type_.scale)


def compare(operator: str, left: Node, right: Node) -> Node:
    """One of ``= <> < <= > >= <=>``."""
    left, right = _comparable((left, right))
    if left.type == pa.null():
        return Literal(True if operator == "<=>" else None, BOOL)
    match operator:
        case "<>":
            return Call(Op.NOT, (Call(Op.EQ, (left, right), BOOL),), BOOL)
        case ">" | ">=":
            return Call(Op.LT if operator == ">" else Op.LE, (right, left), BOOL)
        case _:
            return Call(Op(operator), (left, right), BOOL)


def is_in(value: Node, members: Sequence[Node]) -> Node:
    """IN over a list; a null member makes unknown of what is not found."""
    value, *members = _comparable(_times_as_text((value, *members)))
    if value.type == pa.null():
        return Literal(None, BOOL)
    known = tuple(dict.fromkeys(m for m in members if isinstance(m, Literal) and m.value is not None))
    found: list[Node] = [Call(Op.IN, (value, *known), BOOL)] if known else []
    found += [compare("=", value, member) for member in members if not isinstance(member, Literal)]
    if any(isinstance(member, Literal) and member.value is None for member in members):
        found.append(Literal(None, BOOL))
    return logic(Op.OR, *found) if len(found) > 1 else found[0]


def like(value: Node, pattern: Node, escape: str) -> Node:
    r"""LIKE; the pattern is rewritten to ``\`` as escape. Rules: Spark's StringUtils.escapeLikeRegex."""
    for node in (value, pattern):
        if kind(node.type) not in ("string", "null"):
            raise TypeProblemError(f"LIKE takes a STRING, not {type_name(node.type)}")
    if not isinstance(pattern, Literal):
        raise TypeProblemError("the pattern of LIKE must be a literal")
    if pattern.value is None:
        return Literal(None, BOOL)
    out, rest = [], iter(str(pattern.value))
    for char in rest:
        if char != escape:
            out.append("\\\\" if char == "\\" else char)
            continue
        escaped = next(rest, "")
        if not escaped or escaped not in ("%", "_", escape):
            problem = f"in the LIKE pattern {pattern.value!r}, {escape!r} must stand before %, _ or itself"
            raise TypeProblemError(problem)
        out.append("\\" + escaped if escaped in "%_\\" else escaped)
    return Call(Op.LIKE, (convert(value, STRING), Literal("".join(out), STRING)), BOOL)


def case(branches: Sequence[tuple[Node, Node]], otherwise: Node, name: str) -> Node:
    """CASE WHEN, IF and what is made of them."""
    *values, last = agree([*(value for _, value in branches), otherwise], f"return from {name}")
    tests = [boolean(test, "WHEN" if name == "CASE" else name) for test, _ in branches]
    args = [node for pair in zip(tests, values, strict=True) for node in pair]
    return Call(Op.CASE, (*args, last), last.type)


def extreme(nodes: Sequence[Node], operator: str, name: str) -> Node:
    """GREATEST (``>=``) or LEAST (``<=``): nulls are skipped, NaN is the greatest."""
    first, *others = agree(nodes, f"take {name} of")
    for other in others:
        better = logic(Op.OR, compare(operator, first, other), Call(Op.IS_NULL, (other,), BOOL))
        first = case([(better, first)], other, name)
    return first


def negate(node: Node) -> Node:
    """Unary minus."""
    if kind(node.type) == "null":
        return Literal(None, DOUBLE)
    if kind(node.type) in ("interval", "months") and isinstance(node, Literal):
        assert isinstance(node.value, int)
        return Literal(-node.value, node.type)
    return number(Op.NEG, node, "'-'")


def plus(node: Node) -> Node:
    """Unary plus."""
    if kind(node.type) not in NUMERIC | {"null", "interval", "months"}:
        raise TypeProblemError(f"'+' takes a number, not {type_name(node.type)}")
    return node


def number(op: Op, node: Node, name: str) -> Node:
    """NEG or ABS."""
    if kind(node.type) == "null":
        return Literal(None, DOUBLE)
    if kind(node.type) not in NUMERIC:
        raise TypeProblemError(f"{name} takes a number, not {type_name(node.type)}")
    return checks.calculated(Call(op, (node,), node.type))


def arithmetic(operator: str, left: Node, right: Node, zone: str) -> Node:
    """One of ``+ - * / %``; ``zone`` is the session's, where a date with a time of day needs one."""
    kinds = {kind(left.type), kind(right.type)}
    if kinds & {"date", "timestamp"}:
        return _on_time(operator, left, right, zone)
    if not kinds <= NUMERIC | {"null"}:
        names = " and ".join(type_name(node.type) for node in (left, right))
        raise TypeProblemError(f"'{operator}' takes numbers, not {names}")
    type_ = common_type((left, right), "calculate with")
    if kind(type_) == "decimal":
        return _decimals(operator, left, right)
    if operator == "/" or type_ == pa.null():
        type_ = DOUBLE
    return checks.calculated(Call(Op(operator), (convert(left, type_), convert(right, type_)), type_))


def _decimals(operator: str, left: Node, right: Node) -> Node:
    if operator in "/%":
        raise TypeProblemError(f"'{operator}' of DECIMAL is not supported: CAST to DOUBLE or BIGINT")
    if "null" in (kind(left.type), kind(right.type)):
        return Literal(None, as_decimal(right if kind(left.type) == "null" else left))
    types = first, second = as_decimal(left), as_decimal(right)
    if operator == "*":
        digits = first.precision + second.precision + 1
        type_ = decimal_type(digits, first.scale + second.scale, "multiply", types)
        return Call(Op.MUL, (convert(left, first), convert(right, second)), type_)
    scale = max(first.scale, second.scale)
    whole = max(first.precision - first.scale, second.precision - second.scale)
    type_ = decimal_type(whole + scale + 1, scale, "add", types)
    same = pa.decimal128(whole + scale, scale)
    return Call(Op(operator), (convert(left, same), convert(right, same)), type_)


def _on_time(operator: str, left: Node, right: Node, zone: str) -> Node:
    kinds = kind(left.type), kind(right.type)
    if operator == "+" and kinds[1] in ("date", "timestamp"):
        left, right, kinds = right, left, kinds[::-1]
    match operator, kinds[0], kinds[1]:
        case "-", "date" | "timestamp", "date" | "timestamp":
            unit = "ns" if "ns" in (getattr(left.type, "unit", ""), getattr(right.type, "unit", "")) else "us"
            return Call(Op.SUB, (_wall(left, unit), _wall(right, unit)), pa.duration(unit))
        case "+" | "-", "date", "integer" if right.type.bit_width <= 32:
            return Call(Op(operator), (left, convert(right, INT)), DATE)
        case "+" | "-", "date" | "timestamp", "interval" | "months" if isinstance(right, Literal):
            assert isinstance(right.value, int)
            amount = right.value if operator == "+" else -right.value
            return _shift(left, amount, months=right.type == MONTHS, zone=zone)
        case _, _, "interval":
            raise TypeProblemError("only an INTERVAL literal can be added to a date or timestamp")
        case _:
            names = type_name(left.type), type_name(right.type)
            raise TypeProblemError(f"cannot calculate {names[0]} {operator} {names[1]}")


def _wall(node: Node, unit: str) -> Node:
    return convert(node, pa.timestamp(unit))


def _shift(node: Node, amount: int, *, months: bool, zone: str) -> Node:
    """A date or timestamp plus months, or plus microseconds: days first, by the wall clock, as Spark."""
    days = 0 if months else abs(amount) // _DAY * (1 if amount > 0 else -1)
    rest = amount - days * _DAY
    if node.type == DATE:
        if months:
            return Call(Op.ADD_MONTHS, (node, Literal(amount, INT)), DATE)
        if not rest:
            return Call(Op.ADD, (node, Literal(days, INT)), DATE)
        node = convert(node, pa.timestamp("us", zone))
    type_, wall = node.type, _wall(node, node.type.unit)
    if months:
        return _at_wall(node, wall, Call(Op.ADD_MONTHS, (wall, Literal(amount, INT)), wall.type))
    if days and literals.shifts(type_.tz):
        node = _at_wall(node, wall, Call(Op.ADD, (wall, _span(days * _DAY, type_.unit)), wall.type))
        amount = rest
    return Call(Op.ADD, (node, _span(amount, type_.unit)), type_) if amount else node


def _at_wall(node: Node, wall: Node, shifted: Node) -> Node:
    """The instant of a shifted wall-clock time; where that comes twice, with the offset that ``node`` had."""
    instant = convert(shifted, node.type)
    if not literals.shifts(getattr(node.type, "tz", None)):
        return instant
    span = Call(Op.SUB, (shifted, wall), pa.duration(node.type.unit))
    kept = Call(Op.ADD, (node, span), node.type)
    return case([(compare("=", _wall(kept, node.type.unit), shifted), kept)], instant, "CASE")


def _span(micros: int, unit: str) -> Literal:
    return Literal(micros if unit == "us" else micros * 1000, pa.duration(unit))
