"""Filters brought below joins, outer joins made plain where their pads are turned away, and joins put in order.

Where SQL allows it, and where changes do: a filter below a join drops rows by value, so it is right for rows that
are only added, and for rows that are taken back as they were. It is wrong for an input whose rows are
replaced by their unique key alone: the row before, which passed the filter, would stay. Such a condition stays
with the join or above it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from gpu_ops.query.nulls import rejects
from gpu_ops.query.relations import Compute, Condition, Filter, JoinOf, Relation, Scan, filtered, upserted

Fail = Callable[[str, int], None]
"""Raises SqlError."""


def push(relation: Relation, conditions: Sequence[Condition], fail: Fail) -> tuple[Relation, list[Condition]]:
    """A relation with the conditions as far down in it as they may be.

    Args:
        relation: any.
        conditions: over its columns.
        fail: raises an error.

    Returns:
        The relation, and the conditions that have to be met above it, or in the join above it.
    """
    if isinstance(relation, Filter):
        return push(relation.below, [*relation.conditions, *conditions], fail)
    if isinstance(relation, Scan):
        if relation.table.upserts:
            return relation, list(conditions)
        return filtered(relation, list(conditions)), []
    if isinstance(relation, Compute):
        computed = frozenset(relation.computed)
        above = [c for c in conditions if c.columns & computed]
        below, left_over = push(relation.below, [c for c in conditions if c not in above], fail)
        made: Relation = Compute(below, relation.computed)
        if upserted(below) is not None:
            return made, [*left_over, *above]
        return filtered(made, above), left_over
    relation = simplified(relation, conditions)
    if relation.how == "inner":
        return _inner(relation, conditions, fail), []
    return _outer(relation, conditions, fail)


def simplified(join: JoinOf, conditions: Sequence[Condition]) -> JoinOf:
    """An outer join without the pads that the conditions above it turn away."""
    if join.how not in ("left", "right", "full"):
        return join
    pads_right = join.how in ("left", "full") and not any(rejects(c, join.right.columns) for c in conditions)
    pads_left = join.how in ("right", "full") and not any(rejects(c, join.left.columns) for c in conditions)
    how = {(False, False): "inner", (True, False): "left", (False, True): "right"}.get((pads_right, pads_left), "full")
    if how == join.how:
        return join
    spoken = f"{join.spoken}, less the pads that a condition above it turns away"
    return dataclasses.replace(join, how=how, spoken=spoken)  # type: ignore[arg-type]


def _outer(join: JoinOf, conditions: Sequence[Condition], fail: Fail) -> tuple[Relation, list[Condition]]:
    """Any join but an inner one."""
    to_left: list[Condition] = []
    to_right: list[Condition] = []
    above: list[Condition] = []
    on: list[Condition] = []
    kept = {"left": "left", "right": "right", "semi": "left", "anti": "left"}.get(join.how, "")
    for condition in conditions:
        if kept == "left" and condition.columns <= join.left.columns:
            to_left.append(condition)
        elif kept == "right" and condition.columns <= join.right.columns:
            to_right.append(condition)
        else:
            above.append(condition)
    for condition in join.on:
        if condition.member:
            on.append(condition)  # what NOT IN compares must not be filtered by: a null would be lost
        elif join.how in ("left", "semi", "anti") and _only(condition, join.right):
            to_right.append(condition)
        elif join.how in ("right", "semi") and _only(condition, join.left):
            to_left.append(condition)
        else:
            on.append(condition)
    left, left_over = push(join.left, to_left, fail)
    right, right_over = push(join.right, to_right, fail)
    if join.how == "full" and (left_over or right_over):
        first = (left_over or right_over)[0]
        fail(
            "this filter would have to stand below a full join, on an input that brings upserts: its row before would "
            "stay. Give the input's old rows too (stream(..., updates='retract')), or filter above the join",
            first.expr.at,
        )
    if kept == "left":
        above, on = [*above, *left_over], [*on, *right_over]
    else:
        above, on = [*above, *right_over], [*on, *left_over]
    made = dataclasses.replace(join, left=left, right=right, on=tuple(on))
    return filtered(made, above), []


def _only(condition: Condition, side: Relation) -> bool:
    return bool(condition.columns) and condition.columns <= side.columns


def _inner(join: JoinOf, conditions: Sequence[Condition], fail: Fail) -> Relation:
    """Inner joins next to one another, with all their conditions, in an order in which each has a key if it can."""
    joins, leaves, every = _flattened(join)
    every += conditions
    order = _order(leaves, every)
    result, first_over = _pushed(order[0], every, fail)
    waiting = [c for c in every if not _only(c, order[0])]
    waiting += first_over
    for number, leaf in enumerate(order[1:]):
        right, over = _pushed(leaf, waiting, fail)
        waiting = [c for c in waiting if not _only(c, leaf)] + over
        columns = result.columns | right.columns
        here = [c for c in waiting if c.columns <= columns]
        waiting = [c for c in waiting if c not in here]
        said = joins[min(number, len(joins) - 1)]
        result = JoinOf("inner", result, right, tuple(here), said.at, said.spoken)
    return result


def _pushed(leaf: Relation, conditions: Sequence[Condition], fail: Fail) -> tuple[Relation, list[Condition]]:
    return push(leaf, [c for c in conditions if _only(c, leaf)], fail)


def _flattened(join: JoinOf) -> tuple[list[JoinOf], list[Relation], list[Condition]]:
    """The inner joins on the left of one another, what they join, and their conditions."""
    joins, leaves, conditions = [join], [join.right], list(join.on)
    below: Relation = join.left
    while True:
        if isinstance(below, Filter) and isinstance(below.below, JoinOf) and below.below.how == "inner":
            conditions = [*below.conditions, *conditions]
            below = below.below
        elif isinstance(below, JoinOf) and below.how == "inner":
            joins, leaves, conditions = [below, *joins], [below.right, *leaves], [*below.on, *conditions]
            below = below.left
        else:
            return joins, [below, *leaves], conditions


def _order(leaves: list[Relation], conditions: Sequence[Condition]) -> list[Relation]:
    """What is joined, in the query's order but where that would pair every row with every other."""
    order, rest = leaves[:1], leaves[1:]
    while rest:
        columns = frozenset(c for leaf in order for c in leaf.columns)
        linked = [leaf for leaf in rest if any(_links(c, columns, leaf.columns) for c in conditions)]
        order.append(linked[0] if linked else rest[0])
        rest.remove(order[-1])
    return order


def _links(condition: Condition, left: frozenset[object], right: frozenset[object]) -> bool:
    """Whether a condition is an equality between two sides."""
    if condition.equality is None:
        return False
    sides = [frozenset(side.columns) for side in condition.equality]
    return all(sides) and any(a <= left and b <= right for a, b in (sides, sides[::-1]))
