"""Whether a condition turns rows away in which some columns are null, and what can be null at all.

A LEFT JOIN whose WHERE turns its pads away is an INNER JOIN (Flink: ``FlinkFilterJoinRule``; Spark:
``EliminateOuterJoin``). A condition that `gpu_ops.conditions` does not understand is taken to keep them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

import pyarrow as pa

from gpu_ops.conditions import expressions as ex
from gpu_ops.conditions import parse
from gpu_ops.conditions.expressions import Op
from gpu_ops.errors import ConditionError
from gpu_ops.query.names import Column
from gpu_ops.query.relations import Compute, Condition, Filter, Relation, Scan

_NULL: Final = "null"
_TRUE: Final = "true"
_FALSE: Final = "false"
_SOME: Final = "some value"
_ANY: Final = "anything"
_LENIENT: Final = {Op.SAME, Op.AND, Op.OR, Op.NOT, Op.IS_NULL, Op.CASE, Op.COALESCE}


def tree(
    condition: Condition, time_zone: str | None = None, *, ansi: bool = False
) -> tuple[Any, dict[str, Column]] | None:
    """The condition's expression tree and its columns by the names they have in it; None for others."""
    columns = list(condition.expr.columns)
    if any(c.type is None for c in columns):
        return None
    names = {c: f"c{number}" for number, c in enumerate(columns)}
    schema = pa.schema([pa.field(name, c.type) for c, name in names.items()])
    try:
        root = parse(condition.expr.text(names.__getitem__), {"_": schema}, time_zone=time_zone, ansi=ansi).root
    except ConditionError:
        return None
    return root, {name: c for c, name in names.items()}


def rejects(condition: Condition, columns: Collection[Column]) -> bool:
    """Whether the condition is never true where all of these columns are null."""
    if not any(c in columns for c in condition.expr.columns):
        return False
    found = tree(condition)
    if found is None:
        return False
    root, named = found
    nulls = {name for name, column in named.items() if column in columns}
    return _value(root, nulls) in (_NULL, _FALSE)


def _value(node: Any, nulls: set[str]) -> str:
    """What a tree comes to, where these columns are null and nothing is known of the others."""
    if isinstance(node, ex.Column):
        return _NULL if node.name in nulls else _ANY
    if isinstance(node, ex.Literal):
        if node.value is None:
            return _NULL
        return _SOME if not isinstance(node.value, bool) else _TRUE if node.value else _FALSE
    args = [_value(arg, nulls) for arg in node.args]
    if node.op not in _LENIENT:
        return _NULL if _NULL in args else _ANY
    return _lenient(node.op, args)


def _lenient(op: Op, args: list[str]) -> str:
    match op:
        case Op.IS_NULL:
            return {_NULL: _TRUE, _ANY: _ANY}.get(args[0], _FALSE)
        case Op.NOT:
            return {_TRUE: _FALSE, _FALSE: _TRUE, _NULL: _NULL}.get(args[0], _ANY)
        case Op.AND | Op.OR:
            strong, weak = (_FALSE, _TRUE) if op is Op.AND else (_TRUE, _FALSE)
            if strong in args:
                return strong
            rest = set(args) - {weak}
            # null AND anything is null or false: not true either way, which is all that is asked
            return weak if not rest else _NULL if rest == {_NULL} or (op is Op.AND and _NULL in rest) else _ANY
        case Op.SAME:
            if args == [_NULL, _NULL]:
                return _TRUE
            return _FALSE if _NULL in args and _ANY not in args else _ANY
        case Op.COALESCE:
            return next((arg for arg in args if arg != _NULL), _NULL)
        case _:
            return _case(args)


def _case(args: list[str]) -> str:
    *branches, otherwise = args
    possible = set()
    for test, value in zip(branches[::2], branches[1::2], strict=True):
        if test in (_TRUE, _ANY, _SOME):
            possible.add(value)
        if test == _TRUE:
            break
    else:
        possible.add(otherwise)
    return possible.pop() if len(possible) == 1 else _ANY


def never_null(relation: Relation) -> frozenset[Column]:
    """The columns of a relation in which there is no null."""
    if isinstance(relation, Scan):
        return frozenset(c for c in relation.columns if not c.nullable)
    if isinstance(relation, Filter):
        known = never_null(relation.below)
        return known | _required(relation.conditions, relation.columns)
    if isinstance(relation, Compute):
        return never_null(relation.below) | frozenset(c for c in relation.computed if not c.nullable)
    left, right = never_null(relation.left), never_null(relation.right)
    match relation.how:
        case "inner":
            return left | right | _required(relation.on, relation.columns)
        case "semi":
            return left | _required(relation.on, relation.columns)
        case "left" | "anti":
            return left
        case "right":
            return right
        case _:
            return frozenset()


def _required(conditions: Collection[Condition], columns: frozenset[Column]) -> frozenset[Column]:
    return frozenset(c for c in columns if any(rejects(condition, {c}) for condition in conditions))
