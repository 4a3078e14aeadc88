"""A condition over both inputs, taken apart: what is one input's is a column that Spark computes below the join.

The engine evaluates what is left of it: comparisons, three-valued logic, arithmetic, tests for null and IN, over
columns whose types Catalyst has made equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from gpu_ops.query.expressions import Column, Expr, is_no_op, widens_literal

Parts = list["str | Column"]
"""Text and columns."""

_COMPARISONS: Final = {
    "EqualTo": "=", "EqualNullSafe": "<=>", "LessThan": "<", "LessThanOrEqual": "<=", "GreaterThan": ">",
    "GreaterThanOrEqual": ">=",
}  # fmt: skip
_LOGIC: Final = {"And": " AND ", "Or": " OR "}
_ARITHMETIC: Final = {"Add": " + ", "Subtract": " - ", "Multiply": " * ", "Divide": " / ", "Remainder": " % "}
_TESTS: Final = {"IsNull": " IS NULL", "IsNotNull": " IS NOT NULL"}
_WIDER: Final = {"byte": "TINYINT", "short": "SMALLINT", "integer": "INT", "long": "BIGINT", "double": "DOUBLE"}
_PLAIN: Final = {"boolean", "integer", "long", "short", "byte"}


class NotOursError(Exception):
    """An expression over both inputs that only Spark evaluates.

    Args:
        expr: the expression.
        why: what is the matter with it.
    """

    def __init__(self, expr: Expr, why: str) -> None:
        super().__init__(why)
        self.expr, self.why = expr, why


class Lowering:
    """Takes conditions of one join apart."""

    def __init__(
        self, one_side: Callable[[Expr], bool], column: Callable[[Expr], Column], *, plain: bool = True
    ) -> None:
        """Whether one input has all columns of an expression; the column for it; whether plain ones are left whole.

        What only names columns, compares them and joins that by AND, OR and NOT means the same to
        the engine as to Spark.
        """
        self.one_side, self.column, self.plain = one_side, column, plain

    def lower(self, expr: Expr) -> Parts:
        """Text in the engine's language (`gpu_ops.conditions`).

        Raises:
            NotOursError: that has no such expression.
        """
        if not self.one_side(expr):
            return self._structure(expr, self.lower)
        if self.plain or expr.column is not None or not expr.columns:
            try:
                return self._plain(expr)
            except NotOursError:
                pass
        return [self.column(expr)]

    def _plain(self, expr: Expr) -> Parts:
        """An expression of one input without a column of its own."""
        if expr.column is not None:
            return [self.column(expr)]
        return self._structure(expr, self._plain)

    def _structure(self, expr: Expr, lower: Callable[[Expr], Parts]) -> Parts:
        """An expression by its kind; ``lower`` gives the text of its operands."""
        kind, args = expr.kind, expr.args
        if kind == "Literal":
            return [_literal(expr)]
        if (kind == "Cast" and is_no_op(expr)) or widens_literal(expr):
            return lower(args[0])
        if kind == "Cast" and _widens(expr):
            return ["CAST(", *lower(args[0]), f" AS {_WIDER[expr.tree.fields['dataType']]})"]
        if kind in _LOGIC or kind in _COMPARISONS:
            return ["(", *lower(args[0]), _LOGIC.get(kind) or f" {_COMPARISONS[kind]} ", *lower(args[1]), ")"]
        if kind in _TESTS:
            return ["(", *lower(args[0]), _TESTS[kind], ")"]
        if kind == "Not" and args[0].kind == "EqualTo":
            return ["(", *lower(args[0].args[0]), " <> ", *lower(args[0].args[1]), ")"]
        if kind == "Not":
            return ["(NOT ", *lower(args[0]), ")"]
        if kind == "In":
            tests = [["(", *lower(args[0]), " = ", *lower(x), ")"] for x in args[1:]]
            return ["(", *_between(tests, " OR "), ")"]
        if kind in _ARITHMETIC:
            return ["(", *lower(args[0]), _ARITHMETIC[kind], *lower(args[1]), ")"]
        if kind == "Coalesce":
            return ["COALESCE(", *_between([lower(arg) for arg in args], ", "), ")"]
        if kind in ("CaseWhen", "If"):
            *branches, otherwise = [lower(arg) for arg in args] + ([["NULL"]] if len(args) % 2 == 0 else [])
            cases = [[" WHEN ", *a, " THEN ", *b] for a, b in zip(branches[::2], branches[1::2], strict=True)]
            return ["CASE", *_between(cases, ""), " ELSE ", *otherwise, " END"]
        raise NotOursError(expr, f"{expr.java.sql()} takes columns of both inputs")


def _widens(cast: Expr) -> bool:
    """Whether a CAST gives the same number in a type that has all of the operand's."""
    order = list(_WIDER)
    kind, own = cast.tree.fields["dataType"], str(cast.args[0].java.dataType().typeName())
    return kind in order and own in order[: order.index(kind)]


def _literal(expr: Expr) -> str:
    kind, value = expr.tree.fields["dataType"], expr.tree.fields["value"]
    if kind in _PLAIN or value is None:
        return "NULL" if value is None else str(value)
    if kind == "string" and not set(value) & {"'", "\\"}:
        return f"'{value}'"
    raise NotOursError(expr, f"a constant of type {kind} is no part of a condition over both inputs")


def _between(items: Sequence[Parts], separator: str) -> Parts:
    return [part for number, item in enumerate(items) for part in ([separator] if number else []) + item]


def written(parts: Parts, call: Callable[[Column], str]) -> str:
    """Parts as text, without parentheses around all of it."""
    if parts[0] == "(" and parts[-1] == ")" and _matching(parts) == len(parts) - 1:
        parts = parts[1:-1]
    return "".join(part if isinstance(part, str) else call(part) for part in parts)


def _matching(parts: Parts) -> int:
    depth = 0
    for number, part in enumerate(parts):
        depth += part in ("(", "(NOT ", "COALESCE(") if isinstance(part, str) else 0
        depth -= part == ")" if isinstance(part, str) else 0
        if depth == 0:
            return number
    return -1
