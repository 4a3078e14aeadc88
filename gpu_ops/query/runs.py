"""Which joins next to one another become one multi-way join.

Flink's rule (``JoinToMultiJoinRule``, ``AttributeBasedJoinKeyExtractor``): a left-deep run of inner and left joins
whose equalities lead from one column of the first input to every other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

from gpu_ops.descriptions.description import Emit
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.keys import Equality
from gpu_ops.descriptions.multi_join import JoinStep, MultiJoin
from gpu_ops.query.choose import Chooser, Computed, KeyColumns, ResidualCondition, columns_of, where_of
from gpu_ops.query.errors import one
from gpu_ops.query.expressions import Expr, NotOursError, QueryColumn
from gpu_ops.query.relations import Called, JoinOf, Relation

Link = tuple[int, KeyColumns]
"""A key of a step, and which input to its left it leads to."""


@dataclasses.dataclass(frozen=True, eq=False)
class MultiWayRun:
    """Joins as one multi-way join.

    Attributes:
        inputs: in order.
        hows: of each step.
        links: keys of each step.
        residual: conditions of each step.
        computed: columns to compute below, per input.
        above: conditions that the operator does not understand.
        steps: the joins.
    """

    kind: ClassVar[Literal["multi-way"]] = "multi-way"

    inputs: tuple[Relation, ...]
    hows: tuple[str, ...]
    links: tuple[tuple[Link, ...], ...]
    residual: tuple[tuple[ResidualCondition, ...], ...]
    computed: tuple[Computed, ...]
    above: tuple[Expr, ...]
    steps: tuple[JoinOf, ...]

    @property
    def outputs(self) -> tuple[Relation, ...]:
        """All inputs: the columns of each come out."""
        return self.inputs

    @property
    def used(self) -> frozenset[QueryColumn]:
        """The columns that it looks at."""
        return self._keys | columns_of(self.remarked)

    @property
    def remarked(self) -> list[ResidualCondition]:
        """The conditions of which it is worth saying that they stayed where they are."""
        return [condition for step in self.residual for condition in step]

    @property
    def _keys(self) -> frozenset[QueryColumn]:
        return frozenset(c for links in self.links for _, key in links for c in (key.left, key.right))

    def describe(self, inputs: Sequence[Input], called: Called, emit: Emit, *, ansi: bool) -> MultiJoin:
        """The description of it; arguments and errors as of `gpu_ops.query.choose.Choice.describe`."""
        steps = []
        for index, (how, links, residual) in enumerate(zip(self.hows, self.links, self.residual, strict=True), start=1):
            on = tuple(Equality(n, called(key.left), called(key.right), key.null_safe) for n, key in links)
            sides = self.inputs[: index + 1], self.computed[: index + 1], inputs[: index + 1]
            steps.append(JoinStep(how, on, where_of(residual, *sides, called, ansi=ansi)))  # type: ignore[arg-type]
        return MultiJoin(tuple(inputs), tuple(steps), emit=emit, ansi=ansi)

    def why(self, description: MultiJoin, called: Called, total: int) -> str:
        """The reason for the operator, which stands for some of ``total`` joins in a row."""

        def text(column: QueryColumn) -> str:
            computed = next((each[column].text() for each in self.computed if column in each), None)
            return str(column) if computed is None else f"({computed})"

        shown = {called(column): text(column) for column in self._keys}
        common = [" = ".join(dict.fromkeys(shown[column] for column in key)) for key in description.common_key]
        count = len(self.steps)
        which = f"all {count} joins share" if count == total else f"{count} of {total} joins share"
        return f"multi-way: {which} {', and '.join(common)}"


def run_of(steps: Sequence[JoinOf], chooser: Chooser) -> MultiWayRun | str:
    """Makes one multi-way join of joins, or says why there is none; that they share a key is checked later."""
    first = steps[0]
    turned = first.how == "right" and not isinstance(first.left, JoinOf)
    inputs = [first.right, first.left] if turned else [first.left, first.right]
    inputs += [step.right for step in steps[1:]]
    computed: list[Computed] = [{} for _ in inputs]
    links: list[tuple[Link, ...]] = []
    residual: list[tuple[ResidualCondition, ...]] = []
    hows: list[str] = []
    padded = [False]
    for index, step in enumerate(steps, start=1):
        choice = chooser.choice(step)
        if choice.kind != "regular":
            return f"{one(choice.kind)} join is no part of a multi-way join"
        how = "left" if turned and step is first else step.how
        if how not in ("inner", "left"):
            return f"a {how} join is no part of a multi-way join"
        if choice.above and step is not steps[-1]:
            return f"the condition {choice.above[0].text()!r} is evaluated in Spark, between the joins"
        if not choice.keys:
            return "a step has no equality"
        step_links = []
        for key in choice.keys:
            swapped = KeyColumns(key.right, key.left, key.null_safe) if turned and step is first else key
            sides = choice.computed[::-1] if turned and step is first else choice.computed
            owner = _owner(swapped.left, sides[0], inputs[:index])
            if owner is None:
                return f"the key {sides[0][swapped.left].text()!r} is made of several inputs"
            if swapped.left in sides[0] and padded[owner] and not chooser.null_of_pad(sides[0][swapped.left]):
                return (
                    f"the key {sides[0][swapped.left].text()!r} is something else than null where its input has no row"
                )
            for column, side, number in ((swapped.left, sides[0], owner), (swapped.right, sides[1], index)):
                if column in side:
                    computed[number][column] = side[column]
            step_links.append((owner, swapped))
        links.append(tuple(step_links))
        hows.append(how)
        try:
            among = inputs[: index + 1]
            columns = computed[: index + 1]
            residual.append(tuple(chooser.residual(x.expr, among, columns, [*padded, False]) for x in choice.residual))
        except NotOursError as error:
            return f"the condition {error.expr.text()!r} is made of several inputs, or of one that may have no row"
        padded.append(how == "left")
    return MultiWayRun(
        tuple(inputs), tuple(hows), tuple(links), tuple(residual), tuple(computed),
        chooser.choice(steps[-1]).above, tuple(steps),
    )  # fmt: skip


def _owner(column: QueryColumn, computed: Computed, inputs: Sequence[Relation]) -> int | None:
    """The number of the input that a column, or all that it is computed from, comes from."""
    needs = frozenset(computed[column].columns) if column in computed else frozenset({column})
    return next((number for number, side in enumerate(inputs) if needs <= side.columns), None)


def segments(count: int, possible: Callable[[int, int], bool]) -> list[tuple[int, int]]:
    """``count`` steps cut into runs: the longest possible one first, then what is before and after it.

    Args:
        count: how many steps there are.
        possible: whether steps ``i`` up to ``j`` (not included) can be one join; asked for two and more.

    Returns:
        Their ends ``(i, j)``, in order.
    """

    def cut(first: int, stop: int) -> list[tuple[int, int]]:
        for length in range(stop - first, 1, -1):
            for i in range(first, stop - length + 1):
                if possible(i, i + length):
                    return [*cut(first, i), (i, i + length), *cut(i + length, stop)]
        return [(i, i + 1) for i in range(first, stop)]

    return cut(0, count)
