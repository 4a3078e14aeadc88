"""The multi-way join: inner and left steps over many inputs, after Flink's ``StreamingMultiJoinOperator``.

Law: each change is completed to tuples with the rows alive at its instant, input by input (`multi.lookups`), and where
a change of a left step's input makes or ends the last match of what is to its left, a pad comes or goes
(`multi.pads`) and is completed likewise. There is no intermediate state: only the inputs' rows, and counts.

``per_batch`` is the same with other instants: what dies goes first, input by input, then what is born comes, the last
input's first. So a row of the result is hardly ever made and unmade, and what is left of that is folded.

Row kinds (``per_event``), as Flink 2.3.0 has them: a joined row carries the kind of the change that caused it,
after a left step, too; pads are ``-D`` before and ``+I`` after it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpu_ops import layouts
from gpu_ops.arrays import Array, Positions, Slots
from gpu_ops.descriptions.changelog import DELETE, INSERT
from gpu_ops.descriptions.multi_join import MultiJoin
from gpu_ops.kernels import Frame, Kernels
from gpu_ops.operators.core.emission import JOINED, PAD_COMES, PAD_GOES, OutputRows
from gpu_ops.operators.core.lifetimes import Lifetimes
from gpu_ops.operators.keyed import KeyedOperator
from gpu_ops.operators.multi.lookups import Bind, Extend, Lookup, Operation, make_plan
from gpu_ops.operators.multi.pads import counted_changes, mark_afresh, step_count
from gpu_ops.operators.multi.tuples import NO_ROW, Finder, Tuples, join_tuples
from gpu_ops.state.keyed_table import KeyedTable


class MultiWayJoin(KeyedOperator):
    """A multi-way join; see `gpu_ops.operators.operator.Operator`.

    Args:
        join: its description.
        kernels: the backend.
    """

    def __init__(self, join: MultiJoin, kernels: Kernels) -> None:
        super().__init__(join, kernels)
        self._plan = make_plan(join)
        counted = self._plan.counted
        self.tables = tuple(
            KeyedTable(
                kernels,
                source,
                self._plan.key_sets[input_index],
                counts=[step_count(step) for step, owner in enumerate(counted) if owner == input_index],
                findable=not source.insert_only or source.ttl_ms is not None,
            )
            for input_index, source in enumerate(join.inputs)
        )

    def find(self, sides: Sequence[Lifetimes], *, net: bool) -> Tuples:
        """All tuples that the micro-batch's changes make or unmake."""
        if net:
            for number, side in enumerate(sides):
                side.happens(deaths=number, births=2 * len(sides) - 1 - number)
        finder = Finder(self.join, self.kernels, self.tables, sides, check=self.check_output)
        found = self._complete(finder, net=net)
        self._counters["candidates"] = finder.candidates
        return found

    def rows(self, found: Tuples, sides: Sequence[Lifetimes], event_kinds: Array | None) -> OutputRows:
        """The tuples by the change that caused them, a pad's going before and its coming after the others."""
        xp = self.kernels.xp
        kinds = xp.where(found.signs > 0, np.int8(INSERT), np.int8(DELETE))
        if event_kinds is None:
            order = layouts.sorted_positions(xp, (found.signs > 0).astype(np.int64))
        else:
            kinds = xp.where(found.ranks == JOINED, event_kinds[found.instants], kinds)
            order = layouts.sorted_positions(xp, (found.instants << layouts.RANK_BITS) | found.ranks)
        self._pads = bool((found.ranks != JOINED).any())
        slots = tuple(found.slots[number] for number in range(len(sides)))
        return OutputRows(kinds, slots, found.instants).pick(order)

    def count_expired(self) -> None:
        """Rows that have expired match nothing any more; no row comes of it (Flink counts only what is there)."""
        for input_index, owner in enumerate(self._plan.counted):
            gone = self.tables[input_index].expired
            if owner is None or not gone.size:
                continue
            nothing = [_untouched(self.kernels, t) for t in self.tables]
            finder = Finder(self.join, self.kernels, self.tables, nothing, check=self.check_output)
            slots = finder.matches({input_index: gone}, _back(self._plan.paths[input_index]), step=input_index)[1]
            self.tables[owner].add(step_count(input_index), slots, self.kernels.xp.full(slots.size, -1, np.int32))

    def _complete(self, finder: Finder, *, net: bool) -> Tuples:
        """All tuples that the micro-batch's changes make or unmake."""
        plan = self._plan
        begun: list[Tuples] = []
        hidden: list[tuple[int, Slots] | None] = []
        for input_index, owner in enumerate(plan.counted):
            if owner is None:
                begun.append(finder.events(input_index))
                hidden.append(None)
            else:
                changes, rows = counted_changes(
                    finder, input_index, owner, plan.steps[input_index], _back(plan.paths[input_index]), net=net
                )
                begun.append(changes)
                hidden.append((owner, self.kernels.xp.unique(rows)))
        found = [self._completed(finder, input_index, tuples, hidden) for input_index, tuples in enumerate(begun)]
        return join_tuples(self.kernels, found)

    def _completed(
        self, finder: Finder, input_index: int, begun: Tuples, hidden: Sequence[tuple[int, Slots] | None]
    ) -> Tuples:
        """The changes of one input, completed: to the left along its path, then to the right step by step."""
        plan, tuples = self._plan, begun
        for operation in plan.paths[input_index]:
            if isinstance(operation, Bind):
                if operation.lookup.input_index not in tuples.slots:
                    tuples = finder.bind(tuples, operation.lookup)
            elif isinstance(operation, Extend):
                tuples = finder.extend(tuples, plan.steps[operation.input_index], hidden[operation.input_index])
            elif operation.input_index != input_index or plan.counted[input_index] is None:
                # else it was checked while counting
                tuples = finder.check(tuples, operation.input_index)
        if input_index and self.join.steps[input_index - 1].how == "left":
            if plan.counted[input_index] is None:
                mark_afresh(finder, input_index, plan.steps[input_index], tuples, self.join.references[input_index - 1])
            tuples = self._with_pads(tuples, input_index)
        for later in range(input_index + 1, len(self.tables)):
            tuples = finder.extend(tuples, plan.steps[later], hidden[later])
        return tuples

    def _with_pads(self, tuples: Tuples, input_index: int) -> Tuples:
        """The tuples, and the pads that come and go with them."""
        xp = self.kernels.xp
        marked = xp.flatnonzero(tuples.pads)
        if not marked.size:
            return tuples
        pads = tuples.pick(marked)
        pads.slots[input_index] = xp.full(marked.size, NO_ROW, np.int64)
        pads.signs = pads.pads
        pads.ranks = xp.where(pads.signs > 0, PAD_COMES, PAD_GOES).astype(np.int8)
        return join_tuples(self.kernels, [tuples, pads])

    def may_cancel(self, rows: OutputRows, sides: Sequence[Lifetimes], frame: Frame) -> Positions:
        """Positions of rows among which one that goes may equal one that comes.

        With equal rows in a multiset one instance's tuple may go while another's comes, anywhere. All else has to do
        with pads: what one input's change makes of a pad another's undoes, and a pad may equal a row whose
        columns are all null.
        """
        xp = self.kernels.xp
        if any(t.source.unique_key is None and s.any_death for t, s in zip(self.tables, sides, strict=True)):
            return xp.arange(rows.size, dtype=np.int64)
        if not self._pads:
            return self._nothing
        padded = xp.zeros(rows.size, bool)
        for input_index, step in enumerate(self.join.steps, start=1):
            if step.how == "left":
                padded |= rows.slots[input_index] == NO_ROW
                padded |= self._looks_padded(input_index, frame, rows.size)
        return xp.flatnonzero(padded)

    def _looks_padded(self, input_index: int, frame: Frame, size: int) -> Array | bool:
        """Mask of rows all of whose columns of one input are null; False where none can be."""
        never = {k.own for k in self.join.steps[input_index - 1].on if not k.null_safe}
        never |= set(self.join.inputs[input_index].unique_key or ())
        shown = [c for c in self.join.output if c.side == input_index]
        if any(c.column in never for c in shown):
            return False
        mask = self.kernels.xp.ones(size, bool)
        for column in shown:
            valid = self.kernels.valid(frame, [column.name])
            if valid is None:
                return False
            mask &= ~valid
        return mask


make = MultiWayJoin


def _back(path: tuple[Operation, ...]) -> Lookup:
    """From a counted step's input to the rows that count it: its path's first lookup."""
    first = path[0]
    assert isinstance(first, Bind)
    return first.lookup


def _untouched(kernels: Kernels, table: KeyedTable) -> Lifetimes:
    """No change of any row."""
    return Lifetimes.of_new(kernels.xp, len(table), 0, kernels.xp.empty(0, np.int64))
