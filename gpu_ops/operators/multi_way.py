"""The multi-way join: inner and left steps over many inputs, after Flink's ``StreamingMultiJoinOperator``.

Law: each change is completed to tuples with the rows alive at its instant, input by input (`multi_plan`), and where a
change of a left step's input makes or ends the last match of what is to its left, a pad comes or goes
(`associations`) and is completed likewise. There is no intermediate state: only the inputs' rows, and counts.

``per_batch`` is the same with other instants: what dies goes first, input by input, then what is born comes, the last
input's first. So a row of the result is hardly ever made and unmade, and what is left of that is folded.

Row kinds (``per_event``), as Flink 2.3.0 has them: a joined row carries the kind of the change that caused it,
after a left step, too; pads are ``-D`` before and ``+I`` after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pyarrow as pa

from gpu_ops import layouts
from gpu_ops.arrays import Array, Positions, Slots
from gpu_ops.descriptions.changelog import DELETE, INSERT
from gpu_ops.descriptions.description import Description
from gpu_ops.descriptions.multi_join import MultiJoin
from gpu_ops.ingest import Ingested
from gpu_ops.kernels import Frame, Kernels
from gpu_ops.operators.associations import counted_changes, mark_afresh, step_count
from gpu_ops.operators.core.changes import apply_changes
from gpu_ops.operators.core.emission import JOINED, PAD_COMES, PAD_GOES, fold
from gpu_ops.operators.core.lifetimes import Lifetimes
from gpu_ops.operators.multi_plan import Bind, Extend, Lookup, Operation, make_plan
from gpu_ops.operators.operator import Operator, Output, TooMuch
from gpu_ops.operators.tuples import NOBODY, Finder, Tuples, join_tuples
from gpu_ops.output import multi_changelog_table
from gpu_ops.state.keyed_table import KeyedTable


def make(described: Description, kernels: Kernels, too_much: TooMuch) -> MultiWayJoin:
    """See `gpu_ops.operators.operator.Make`."""
    del too_much
    assert isinstance(described, MultiJoin)
    return MultiWayJoin(described, kernels)


class MultiWayJoin(Operator):
    """A multi-way join; see `gpu_ops.operators.operator.Operator`.

    Args:
        join: its description.
        kernels: the backend.
    """

    def __init__(self, join: MultiJoin, kernels: Kernels) -> None:
        self.kernels, self.join = kernels, join
        self._plan = make_plan(join)
        counted = self._plan.counted
        self._tables = tuple(
            KeyedTable(
                kernels,
                source,
                self._plan.key_sets[place],
                counts=[step_count(step) for step, owner in enumerate(counted) if owner == place],
                findable=not source.insert_only or source.ttl_ms is not None,
            )
            for place, source in enumerate(join.inputs)
        )

    @property
    def tables(self) -> tuple[KeyedTable, ...]:
        """The state of each input."""
        return self._tables

    def prepare(self, changes: tuple[Ingested, ...], clock_ms: int, watermark_ms: int | None) -> Output:
        """Compute one micro-batch; no watermark matters."""
        del watermark_ms
        return self._prepare(changes, clock_ms, net=self.join.emit == "per_batch")

    def prepare_net(self, changes: tuple[Ingested, ...], clock_ms: int) -> Output:
        """As `prepare`, but only the net change is said, whatever the join's ``emit``."""
        return self._prepare(changes, clock_ms, net=True)

    def _prepare(self, changes: tuple[Ingested, ...], clock_ms: int, *, net: bool) -> Output:
        started = time.perf_counter()
        kernels, xp = self.kernels, self.kernels.xp
        inputs = len(self.tables)
        expired = [t.expire(clock_ms) for t in self.tables]
        self._uncount_expired()
        total = sum(c.kinds.size for c in changes)
        event_kinds = xp.zeros(2 * (total + inputs), np.int8)
        sides: list[Lifetimes] = []
        for table, change in zip(self.tables, changes, strict=True):
            frame = kernels.frame(change.table)
            sides.append(apply_changes(table, frame, change, None if net else event_kinds, net=net))
        if net:
            for place, side in enumerate(sides):
                side.happens(xp, deaths=place, births=2 * inputs - 1 - place)
            event_kinds[:inputs] = DELETE
            event_kinds[inputs : 2 * inputs] = INSERT
        updated = time.perf_counter()
        finder = Finder(self.join, kernels, self.tables, sides)
        found = self._complete(finder, net=net)
        probed = time.perf_counter()
        kinds = self._kinds(found, event_kinds)
        order = self._order(found, net=net)
        found, kinds = found.pick(order), kinds[order]
        slots = [found.slots[place] for place in range(inputs)]
        output, frame = multi_changelog_table(self.join, kernels, self.tables, kinds, slots)
        doubtful = self._may_cancel(found, sides, frame) if net else xp.empty(0, np.int64)
        if doubtful.size:
            columns, types = tuple(c.name for c in self.join.output), tuple(c.type for c in self.join.output)
            some = kernels.take(frame, doubtful, columns, present=True)
            left_over = doubtful[fold(kernels, some, kinds[doubtful] == DELETE, columns, types)]
            if left_over.size < doubtful.size:
                stays = xp.ones(kinds.size, bool)
                stays[doubtful] = False
                stays[left_over] = True
                kept = xp.flatnonzero(stays)
                kinds, found = kinds[kept], found.pick(kept)
                output = output.take(pa.array(kernels.asnumpy(kept)))
        metrics: dict[str, int | float] = {"candidates": finder.candidates}
        for name, side, gone in zip(self.join.sides, sides, expired, strict=True):
            metrics[f"{name}_unknown_retractions"] = int(side.unknown)
            metrics[f"{name}_expired"] = gone
        metrics |= {
            "update_ms": (updated - started) * 1e3,
            "probe_ms": (probed - updated) * 1e3,
            "emit_ms": (time.perf_counter() - probed) * 1e3,
        }
        instants = kernels.asnumpy(found.instants)
        sequence_out = np.zeros(instants.size, np.int64) if net else instants >> 1
        return Output(output, sequence_out, kernels.asnumpy(kinds), metrics)

    def _uncount_expired(self) -> None:
        """Rows that have expired match nothing any more; nothing is said of it (Flink counts only what is there)."""
        for place, owner in enumerate(self._plan.counted):
            gone = self.tables[place].expired
            if owner is None or not gone.size:
                continue
            nothing = [_untouched(self.kernels, t) for t in self.tables]
            finder = Finder(self.join, self.kernels, self.tables, nothing)
            rows, slots = finder.matches({place: gone}, _back(self._plan.paths[place]))
            kept = finder.fulfils(place, {place: gone[rows], owner: slots}, int(slots.size))
            slots = slots if kept is None else slots[kept]
            self.tables[owner].add(step_count(place), slots, self.kernels.xp.full(slots.size, -1, np.int32))

    def _complete(self, finder: Finder, *, net: bool) -> Tuples:
        """All tuples that the micro-batch's changes make or unmake."""
        plan = self._plan
        begun: list[Tuples] = []
        hidden: list[tuple[int, Slots] | None] = []
        for place, owner in enumerate(plan.counted):
            if owner is None:
                begun.append(finder.events(place))
                hidden.append(None)
            else:
                changes, rows = counted_changes(
                    finder, place, owner, plan.steps[place], _back(plan.paths[place]), net=net
                )
                begun.append(changes)
                hidden.append((owner, self.kernels.xp.unique(rows)))
        found = [self._completed(finder, place, tuples, hidden) for place, tuples in enumerate(begun)]
        return join_tuples(self.kernels, found)

    def _completed(
        self, finder: Finder, place: int, begun: Tuples, hidden: Sequence[tuple[int, Slots] | None]
    ) -> Tuples:
        """The changes of one input, completed: to the left along its path, then to the right step by step."""
        plan, tuples = self._plan, begun
        for operation in plan.paths[place]:
            if isinstance(operation, Bind):
                if operation.lookup.place not in tuples.slots:
                    tuples = finder.bind(tuples, operation.lookup)
            elif isinstance(operation, Extend):
                tuples = finder.extend(tuples, plan.steps[operation.place], hidden[operation.place])
            elif operation.place != place or plan.counted[place] is None:  # else it was checked while counting
                tuples = finder.check(tuples, operation.place)
        if place and self.join.steps[place - 1].how == "left":
            if plan.counted[place] is None:
                mark_afresh(finder, place, plan.steps[place], tuples, self.join.references[place - 1])
            tuples = self._with_pads(tuples, place)
        for later in range(place + 1, len(self.tables)):
            tuples = finder.extend(tuples, plan.steps[later], hidden[later])
        return tuples

    def _with_pads(self, tuples: Tuples, place: int) -> Tuples:
        """The tuples, and the pads that come and go with them."""
        xp = self.kernels.xp
        marked = xp.flatnonzero(tuples.pads)
        if not marked.size:
            return tuples
        pads = tuples.pick(marked)
        pads.slots[place] = xp.full(marked.size, NOBODY, np.int64)
        pads.signs = pads.pads
        pads.ranks = xp.where(pads.signs > 0, PAD_COMES, PAD_GOES).astype(np.int8)
        return join_tuples(self.kernels, [tuples, pads])

    def _kinds(self, found: Tuples, event_kinds: Array) -> Array:
        xp = self.kernels.xp
        pads = xp.where(found.signs > 0, np.int8(INSERT), np.int8(DELETE))
        return xp.where(found.ranks == JOINED, event_kinds[found.instants], pads)

    def _order(self, found: Tuples, *, net: bool) -> Positions:
        """By the change that caused it, and within it what a pad's going and coming has to be before and after."""
        xp = self.kernels.xp
        key = (found.signs > 0).astype(np.int64) if net else (found.instants << layouts.RANK_BITS) | found.ranks
        return layouts.sorted_positions(xp, key)

    def _may_cancel(self, found: Tuples, sides: list[Lifetimes], frame: Frame) -> Positions:
        """Positions of rows among which one that goes may equal one that comes.

        With equal rows in a multiset one instance's tuple may go while another's comes, anywhere. All else has to do
        with pads: what one input's change makes of a pad another's undoes, and a pad may equal a row whose
        columns are all null.
        """
        xp = self.kernels.xp
        nothing = xp.empty(0, np.int64)
        if not (bool((found.signs > 0).any()) and bool((found.signs < 0).any())):
            return nothing
        if any(t.source.unique_key is None and s.any_death for t, s in zip(self.tables, sides, strict=True)):
            return xp.arange(found.size, dtype=np.int64)
        if not bool((found.ranks != JOINED).any()):
            return nothing
        padded = xp.zeros(found.size, bool)
        for place, step in enumerate(self.join.steps, start=1):
            if step.how == "left":
                padded |= found.slots[place] == NOBODY
                padded |= self._looks_padded(place, frame, found.size)
        return xp.flatnonzero(padded)

    def _looks_padded(self, place: int, frame: Frame, size: int) -> Array | bool:
        """Mask of rows all of whose columns of one input are null; False where none can be."""
        never = {k.own for k in self.join.steps[place - 1].on if not k.null_safe}
        never |= set(self.join.inputs[place].unique_key or ())
        shown = [c for c in self.join.output if c.side == place]
        if any(c.column in never for c in shown):
            return False
        mask = self.kernels.xp.ones(size, bool)
        for column in shown:
            valid = self.kernels.valid(frame, [column.name])
            if valid is None:
                return False
            mask &= ~valid
        return mask

    def restore(self, state: Mapping[str, pa.Table], settle: Callable[[], None]) -> None:
        """Take over a snapshot.

        Raises:
            StateError: it lacks a column.
        """
        for name, table in zip(self.join.sides, self.tables, strict=True):
            table.restore(state[name], settle)


def _back(path: tuple[Operation, ...]) -> Lookup:
    """From a counted step's input to the rows that count it: its path's first lookup."""
    first = path[0]
    assert isinstance(first, Bind)
    return first.lookup


def _untouched(kernels: Kernels, table: KeyedTable) -> Lifetimes:
    """No change of any row."""
    nothing = kernels.xp.empty(0, np.int64)
    return Lifetimes(len(table), nothing, None, nothing, nothing, 0)
