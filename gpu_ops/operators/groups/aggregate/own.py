"""Aggregate functions of a user's: the state of each group is a row of a table, beside the group stands its slot.

With ``per_event`` the first events of all groups are one call, then the second ones, and so on: as many calls as the
busiest group has events. A function is called on the host, whatever the backend.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gpu_ops.descriptions.aggregate import AggregateFunction, Measure
from gpu_ops.errors import DescriptionError, GpuJoinError
from gpu_ops.kernels import as_slots
from gpu_ops.operators.core.key_table import ValueTable
from gpu_ops.operators.core.order import one_zero
from gpu_ops.operators.groups.aggregate.extremes import NO_ROW
from gpu_ops.operators.groups.aggregate.step import Running, Step
from gpu_ops.values import one_array

Ints = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class OwnFunction:
    """An aggregate that a user's function makes.

    Attributes:
        measure: which.
        number: of the aggregate, for names.
        table: the states of groups.
        own: that table has nothing else.
    """

    measure: Measure
    number: int
    table: ValueTable
    own: bool = True

    @property
    def name(self) -> str:
        """Of the number beside a group."""
        return f"state_{self.number}"

    @property
    def function(self) -> AggregateFunction:
        """The user's."""
        assert self.measure.own is not None
        return self.measure.own

    def moved(self, step: Step) -> Running:
        """The aggregate at each moment."""
        line = step.line
        state = self._states(step)
        base = self._called("result", len(state), state)
        after, final = self._of_groups(step, state) if line.net else self._of_moments(step, state)
        found = self._called("result", len(after), after)
        values = one_zero(one_array(pa.chunked_array([*base.chunks, *found.chunks], base.type)))
        codes = np.arange(len(values))
        if not pa.types.is_nested(values.type):
            codes = values.dictionary_encode("encode").indices.to_numpy().astype(np.int64)
        values = values.take(pa.array(np.unique(codes, return_index=True)[1]))
        numbers = step.kernels.asarray(codes)
        of_base, of_after = numbers[: len(base)], numbers[len(base) :]
        if step.row.size:
            self._keep(step, final)
        before = of_base if line.net else line.shifted(of_after, of_base)
        return Running((before,), (of_after,), lambda number: values.take(pa.array(number)))

    def _states(self, step: Step) -> pa.Table:
        """The state of each group, as it was."""
        xp, schema = step.xp, self.function.state
        slots = step.base(self.name) - 1
        known = xp.flatnonzero(slots >= 0)
        held = step.kernels.to_arrow(self.table.store.take(slots[known], schema.names, present=True), schema)
        fresh = int(slots.size - known.size)
        made = pa.concat_tables([held, self._called("empty", fresh, fresh)])
        place = np.full(int(slots.size), -1, np.int64)
        there = step.kernels.asnumpy(known)
        place[there] = np.arange(there.size)
        place[place < 0] = np.arange(fresh) + there.size
        return made.take(pa.array(place))

    def _of_groups(self, step: Step, state: pa.Table) -> tuple[pa.Table, pa.Table]:
        rows, groups, comes = self._events(step)
        final = self._applied(state, groups, rows, comes, step)
        return final, final

    def _of_moments(self, step: Step, state: pa.Table) -> tuple[pa.Table, pa.Table]:
        """States after each moment, and those of each group in the end."""
        rows, groups, comes = self._events(step)
        asnumpy, line = step.kernels.asnumpy, step.line
        order, last = asnumpy(line.order), asnumpy(line.last)
        rows, groups, comes = rows[order], groups[order], comes[order]
        turn = np.arange(groups.size) - asnumpy(line.starts)[groups]
        by_turn = np.argsort(turn, kind="stable")
        ends = np.cumsum(np.bincount(turn)) if turn.size else np.empty(0, np.int64)
        parts, before, held = [], state, np.arange(len(state))
        for begin, end in zip([0, *ends[:-1]], ends, strict=True):
            now = by_turn[begin:end]  # a moment of each group that has so many
            before = before.take(pa.array(np.searchsorted(held, groups[now])))
            held = groups[now]
            before = self._applied(before, np.arange(held.size), rows[now], comes[now], step)
            parts.append(before)
        place = np.empty(by_turn.size, np.int64)
        place[by_turn] = np.arange(by_turn.size)
        after = pa.concat_tables([state.slice(0, 0), *parts]).take(pa.array(place))
        return after, after.take(pa.array(last))

    def _events(self, step: Step) -> tuple[Ints, Ints, npt.NDArray[np.bool_]]:
        """Of each event its row, its group, and whether the row comes."""
        asnumpy = step.kernels.asnumpy
        rows = asnumpy(step.row)
        comes = np.ones(rows.size, bool) if step.sign is None else asnumpy(step.sign) > 0
        return rows, asnumpy(step.line.event_group), comes

    def _applied(self, state: pa.Table, groups: Ints, rows: Ints, comes: npt.NDArray[np.bool_], step: Step) -> pa.Table:
        for method, mask in (("add", comes), ("retract", ~comes)):
            some = np.flatnonzero(mask)
            if some.size:
                taken = pa.array(rows[some])
                columns = [step.column(name).take(taken) for name in self.function.columns]
                values = pa.Table.from_arrays(columns, names=list(self.function.columns))
                state = self._called(method, len(state), state, pa.array(groups[some]), values)
        return state

    def _called(self, method: str, size: int, *given: Any) -> Any:
        return called(self.measure, method, size, *given)

    def _keep(self, step: Step, final: pa.Table) -> None:
        """Note each group's state; of groups without rows there is none."""
        xp, kernels = step.xp, step.kernels
        rows = step.line.final(step.counted()[1])
        stays = xp.flatnonzero(rows > 0)
        old = step.base(self.name)
        self.table.end(old[xp.flatnonzero(old > NO_ROW)] - 1)
        first = len(self.table)
        self.table.append(kernels.frame(final.take(pa.array(kernels.asnumpy(stays)))))
        slots = xp.full(old.size, NO_ROW, np.int64)
        slots[stays] = as_slots(kernels, first, int(stays.size)) + 1
        step.keep(self.name, slots)


def called(measure: Measure, method: str, size: int, *given: Any) -> Any:
    """What a method of a user's function gives, looked at.

    Args:
        measure: the aggregate.
        method: the method's name.
        size: how many groups it is about.
        given: its arguments.

    Raises:
        DescriptionError: it failed, or gave something else than it has to.
    """
    function, what = measure.own, f"{measure}: {method}()"
    assert function is not None
    try:
        found = getattr(function, method)(*given)
    except GpuJoinError:
        raise
    except Exception as error:
        raise DescriptionError(f"{what} failed: {type(error).__name__}: {error}") from error
    wanted, kind = (pa.Array | pa.ChunkedArray, "an array") if method == "result" else (pa.Table, "a table")
    if not isinstance(found, wanted):
        raise DescriptionError(f"{what} gave {type(found).__name__}, it is {kind} of pyarrow")
    if len(found) != size:
        raise DescriptionError(f"{what} gave {len(found)} rows for {size} groups")
    try:
        if method == "result":
            chunked = found if isinstance(found, pa.ChunkedArray) else pa.chunked_array([found])
            return chunked.cast(function.result_type)
        return found.select(function.state.names).cast(function.state)
    except (pa.ArrowException, KeyError) as error:
        raise DescriptionError(f"{what} gave something else than was declared: {error}") from error
