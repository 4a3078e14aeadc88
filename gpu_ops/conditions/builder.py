"""From SQL's operators to the few operations of `gpu_ops.conditions.expressions`: types checked, casts made explicit.

``>`` becomes ``<`` and ``<=`` its negation; ``<=>``, IN, BETWEEN and COALESCE become AND, OR and CASE. Every method
raises `TypeProblemError` for operands that do not fit.

In ANSI mode (``spark.sql.ansi.enabled``) arithmetic fails where it gives null or wraps around without. For each node
that may fail, a `Builder` keeps the test of the rows in which it does; `Builder.failing` makes one condition of them,
which backends evaluate like any other: it knows that AND, OR and CASE leave operands out.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from gpu_ops.conditions.expressions import (
    ADVICE,
    BOOL,
    DOUBLE,
    NUMERIC,
    Call,
    Literal,
    Node,
    Op,
    TypeProblemError,
    as_decimal,
    common_type,
    convert,
    decimal_type,
    kind,
    type_name,
)

_FALSE, _TRUE = Literal(False, BOOL), Literal(True, BOOL)


def nodes_of(*roots: Node | None) -> list[Node]:
    """The nodes of trees, each once, operands first; without recursion, as a long chain of operators is a deep tree."""
    found: dict[int, Node] = {}
    stack = [root for root in roots[::-1] if root is not None]
    while stack:
        node = stack[-1]
        waiting = [arg for arg in (node.args if isinstance(node, Call) else ()) if id(arg) not in found]
        stack += waiting[::-1]
        if not waiting:
            found.setdefault(id(stack.pop()), node)
    return list(found.values())


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
    """IS NULL."""
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
        self._failures: dict[int, tuple[Node, Node]] = {}  # with the node, so that no other one gets its id

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
        """IN a list."""
        value, *members = self.agree((value, *members), "compare")
        return logic(Op.OR, *(self.compare("=", value, member) for member in members))

    def case(self, branches: Sequence[tuple[Node, Node]], otherwise: Node) -> Node:
        """CASE WHEN."""
        *values, last = self.agree([*(value for _, value in branches), otherwise], "return from CASE")
        tests = [boolean(test, "WHEN") for test, _ in branches]
        args = [node for pair in zip(tests, values, strict=True) for node in pair]
        return Call(Op.CASE, (*args, last), last.type)

    def coalesce(self, nodes: Sequence[Node]) -> Node:
        """COALESCE."""
        *first, last = self.agree(nodes, "take COALESCE of")
        args = [arg for node in first for arg in (logic(Op.NOT, is_null(node)), node)]
        return Call(Op.CASE, (*args, last), last.type) if args else last

    def cast(self, node: Node, type_: pa.DataType) -> Node:
        """CAST to an integer type or DOUBLE that has all of the operand's values (of a BIGINT's, the nearest ones)."""
        own, new = kind(node.type), kind(type_)
        wider = node.type.bit_width <= type_.bit_width if own == new else own == "integer" and new == "float"
        constant = own == "decimal" and new == "float" and isinstance(node, Literal)
        if not (wider or constant or own == "null"):
            names = f"CAST of {type_name(node.type)} to {type_name(type_)}"
            raise TypeProblemError(f"{names} is not evaluated in a join's condition: {ADVICE}")
        return convert(node, type_)

    def negative(self, node: Node) -> Node:
        """Unary minus."""
        if kind(node.type) not in {*NUMERIC, "null"}:
            raise TypeProblemError(f"'-' takes a number, not {type_name(node.type)}")
        return self._calculated(Call(Op.NEG, (node,), node.type)) if kind(node.type) != "null" else node

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
        return self._calculated(Call(Op(operator), (one, other), one.type))

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

    # --- ANSI mode --------------------------------------------------------------------------------

    def _calculated(self, node: Call) -> Call:
        """The node; in ANSI mode with the test of the rows where it fails: an integer overflows, a divisor is zero."""
        test = self._failure(node) if self.ansi else None
        if test is not None:
            self._failures[id(node)] = node, test
        return node

    def _failure(self, node: Call) -> Node | None:
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

    def failing(self, root: Node) -> Node | None:
        """Where Spark fails at this tree: a boolean node, null for no; None where it cannot."""
        if not self._failures:
            return None
        found: dict[int, dict[int, Node]] = {}
        for node in nodes_of(root):
            tests = _of_operands(node, found) if isinstance(node, Call) else []
            if id(node) in self._failures:
                tests.append(self._failures[id(node)][1])
            found[id(node)] = {id(test): test for test in tests}
        return _any(found[id(root)])


def _of_operands(node: Call, found: dict[int, dict[int, Node]]) -> list[Node]:
    """The failures of a node's operands, where they are evaluated at all."""
    args = node.args
    if node.op in (Op.AND, Op.OR):
        first, second = _any(found[id(args[0])]), _any(found[id(args[1])])
        decides = args[0] if node.op is Op.OR else logic(Op.NOT, args[0])  # true: the second is not looked at
        reached = [logic(Op.AND, _case(decides, _FALSE, _TRUE), second)] if second is not None else []
        return [*([first] if first is not None else []), *reached]
    if node.op is not Op.CASE:
        return [test for arg in args for test in found[id(arg)].values()]
    result = _any(found[id(args[-1])])
    for test, value in zip(args[-3::-2], args[-2::-2], strict=True):
        inside = _any(found[id(value)])
        if inside is not None or result is not None:
            result = _case(test, inside or _FALSE, result or _FALSE)
        result = _any({**found[id(test)], **({} if result is None else {id(result): result})})
    return [result] if result is not None else []


def _any(tests: dict[int, Node]) -> Node | None:
    return logic(Op.OR, *tests.values()) if tests else None
