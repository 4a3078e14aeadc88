"""Joins by time in an analysed plan: their marks, and a node above each that no rule of Catalyst sees through.

A filter above an ASOF join must stay there: below, on the right, another row would be the nearest one. So each
is put below a `ReturnAnswer`, a node of Spark's own that passes its rows through, past which nothing is pushed,
reordered or made plain.

So must a condition in ``ON`` on the right of a temporal join: it is asked of the version that was valid, and below the
join the one before would be valid in place of one that does not meet it. Hence conditions are taken out, but for those
that mean the same below the join: of an inner join those on the left; of an ASOF or lookup join, which choose among
the rows that meet their condition, those on the right. To Catalyst what is left is an outer join, which it neither
reorders nor gives other filters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Final

from gpu_ops.query.by_time.text import MARK, Kind, QueryText, error_at
from gpu_ops.query.catalyst import Catalyst, class_of, conjuncts, id_of, items

APART: Final = "ReturnAnswer"
"""The node above a join by time."""


@dataclasses.dataclass(frozen=True)
class ByTime:
    """What the text says of a join by time.

    Attributes:
        number: of its mark.
        kind: of join.
        as_of: the id of the attribute that stands after ``FOR SYSTEM_TIME AS OF``; None for the other kinds.
        on: what of its condition is not below it, parts joined by AND, as Catalyst has them.
    """

    number: int
    kind: Kind
    as_of: int | None = None
    on: tuple[Any, ...] = ()


def set_apart(catalyst: Catalyst, plan: Any, text: QueryText) -> tuple[Any, Mapping[frozenset[str], ByTime]]:
    """A plan without sub-queries, its joins by time set apart and without their marks.

    Args:
        catalyst: the analyser.
        plan: the plan.
        text: the query.

    Returns:
        The plan, and what each such join is, by the ids of its leaves' first columns.
    """
    apart = _Apart(catalyst, text)
    return (apart.plan(plan) if text.marks else plan), apart.found


def check_all_found(text: QueryText, found: Iterable[ByTime]) -> None:
    """That each join by time of a text is one in the plan.

    Raises:
        SqlError: a mark is not where it was put: in a sub-query of WHERE, or beside an OR.
    """
    numbers = {each.number for each in found}
    for number, mark in enumerate(text.marks):
        if number not in numbers:
            raise error_at(
                f"{mark.name} stands in FROM, and its conditions are joined by AND: ON l.k = r.k AND l.j = r.j",
                text.given,
                mark.start,
            )


class _Apart:
    def __init__(self, catalyst: Catalyst, text: QueryText) -> None:
        self.catalyst, self.text = catalyst, text
        self.found: dict[frozenset[str], ByTime] = {}

    def plan(self, node: Any) -> Any:
        below = items(node.children())
        made = [self.plan(child) for child in below]
        if any(new is not old for new, old in zip(made, below, strict=True)):
            node = node.withNewChildren(self.catalyst.seq(made))
        if str(node.nodeName()) != "Join" or not node.condition().isDefined():
            return node
        parts = conjuncts(node.condition().get())
        marks = {position: found for position, part in enumerate(parts) if (found := _mark(part)) is not None}
        if not marks:
            return node
        ((number, as_of), *_) = reversed(marks.values())
        kind, inner = self.text.marks[number].kind, str(node.joinType()) == "Inner"
        left, right, on = [], [], []
        for position, part in enumerate(parts):
            if position in marks:
                continue
            if inner and part.references().subsetOf(node.left().outputSet()):
                left.append(part)
            elif kind != "temporal" and part.references().subsetOf(node.right().outputSet()):
                right.append(part)
            else:
                on.append(part)
        self.found[_leaves(node)] = ByTime(number, kind, as_of, tuple(on))
        return self.catalyst.apart(node, left, right)


def _mark(part: Any) -> tuple[int, int | None] | None:
    """The number in a mark, and the id of the attribute in it."""
    if class_of(part) != "IsNotNull" or class_of(part.child()) != "CreateNamedStruct":
        return None
    values = items(part.child().children())[1::2]
    text = str(values[0])
    if not text.startswith(MARK):
        return None
    return int(text.removeprefix(MARK)), id_of(values[1]) if len(values) > 1 else None


def _leaves(plan: Any) -> frozenset[str]:
    outputs: Iterable[Any] = (leaf.output() for leaf in items(plan.collectLeaves()))
    return frozenset(str(output.apply(0).exprId().id()) for output in outputs if output.length())
