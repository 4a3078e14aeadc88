"""One micro-batch as the aggregates see it: events of groups, the rows they bring or take, and numbers that move.

An *event* brings a row to a group or takes one away. With ``per_event`` each event is a moment; they stand by group and
logical time, so what a group comes to at each moment is a segmented running sum. With ``per_batch`` a group has one
moment, after all of its events.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

from gpu_ops import layouts
from gpu_ops.arrays import Array, LogicalTimes, Positions, Slots
from gpu_ops.kernels import Frame, Kernels
from gpu_ops.operators.core.changes import Lifetimes
from gpu_ops.operators.core.key_table import KeyTable
from gpu_ops.state.keyed_table import KeyedTable
from gpu_ops.state.numbers import on_disk
from gpu_ops.values import one_array

Moves: TypeAlias = tuple[Any, Array]
"""By how much events have moved a number of their group before and after each moment; before: perhaps 0 for all."""


class Timeline:
    """The events of groups, and the moments they make.

    Args:
        kernels: the backend.
        slots: of g groups, each with an event at least.
        group: of n events, which of the groups it is of.
        logical_times: when each is; one group has no two at a logical time.
        net: whether only what they come to together counts.
    """

    def __init__(self, kernels: Kernels, slots: Slots, group: Array, logical_times: LogicalTimes, *, net: bool) -> None:
        xp = kernels.xp
        self._kernels, self.slots, self.net = kernels, slots, net
        self.event_group = group
        groups = int(slots.size)
        self.groups = groups
        if net:
            self._logical_times = None
            self.size = groups
            self.group: Array = xp.arange(groups, dtype=np.int64)
            self.starts: Positions = self.group
            self.last: Positions = self.group
        else:
            self._logical_times = logical_times
            self.size = int(group.size)
            self.group = group[self.order]
            self.starts = xp.searchsorted(self.group, xp.arange(groups, dtype=np.int64))
            self.last = xp.concatenate([self.starts[1:], xp.full(1, self.size, np.int64)])[:groups] - 1

    @functools.cached_property
    def order(self) -> Positions:
        """The events by group, within a group by logical time; of a net change as they stand."""
        kernels = self._kernels
        if self._logical_times is None:
            return kernels.argsort(self.event_group)
        return kernels.argsort(layouts.owned(self.event_group, self._logical_times))

    @functools.cached_property
    def moment(self) -> Positions:
        """The moment of each event."""
        xp = self._kernels.xp
        if self.net:
            return self.event_group
        place = xp.empty(self.size, np.int64)
        place[self.order] = xp.arange(self.size, dtype=np.int64)
        return place

    def logical_times(self) -> LogicalTimes:
        """When the moments are; of no net change."""
        assert self._logical_times is not None
        return self._logical_times[self.order]

    def moment_at(self, group: Array, logical_times: LogicalTimes) -> Positions:
        """The moments of some groups' events at some logical times; of no net change."""
        return self._kernels.xp.searchsorted(
            layouts.owned(self.group, self.logical_times()), layouts.owned(group, logical_times)
        )

    def moves(self, deltas: Array) -> Moves:
        """By how much numbers are moved, of n numbers (int64), one per event."""
        xp = self._kernels.xp
        if self.net:
            moved = xp.zeros(self.groups, np.int64)
            self._kernels.scatter_add(moved, self.event_group, deltas)
            return 0, moved
        deltas = deltas[self.order]
        after = xp.cumsum(deltas)
        after -= (after - deltas)[self.starts][self.group]
        return after - deltas, after

    def summed(self, moves: Moves | None, base: Array) -> tuple[Array, Array]:
        """Numbers that events move, before and after each moment.

        Args:
            moves: by how much; None where nothing moves them.
            base: g numbers, before the micro-batch.
        """
        of_moments = base if self.net else base[self.group]
        if moves is None:
            return of_moments, of_moments
        return of_moments if self.net else of_moments + moves[0], of_moments + moves[1]

    def final(self, after: Array) -> Array:
        """Takes each group's value after its last moment."""
        return after if self.net else after[self.last]

    def shifted(self, after: Array, base: Array) -> Array:
        """Gives the values before each moment, from those after each, and those before the first of each group."""
        if self.net:
            return base
        before = self._kernels.xp.empty(after.size, after.dtype)
        before[1:] = after[:-1]
        before[self.starts] = base
        return before


class Running(NamedTuple):
    """An aggregate's values over the moments.

    Attributes:
        before: arrays of one number per moment (int64 or bool); where all are the same, so is the aggregate.
        after: the same after it.
        to_arrow: the aggregate in Arrow, of such numbers on the host.
        compared: how many of the arrays count in that; None for all.
        first_made: how many of them, at the beginning, the aggregate is not made of.
    """

    before: tuple[Array, ...]
    after: tuple[Array, ...]
    to_arrow: Callable[..., pa.Array]
    compared: int | None = None
    first_made: int = 0


class Kept(NamedTuple):
    """The rows that an input with retractions has, and what the micro-batch does to them."""

    table: KeyedTable
    lifetimes: Lifetimes


class EventRows(NamedTuple):
    """The rows that come or go: n new ones, then those that were there before.

    Attributes:
        frame: their columns.
        column: gives a column of them in Arrow.
        group: of each, which of the groups it is of.
        new: how many are new.
        kept: where the input's rows are kept; None of an input that only grows.
    """

    frame: Frame
    column: Callable[[str], pa.ChunkedArray]
    group: Array
    new: int
    kept: Kept | None


class Events(NamedTuple):
    """N events; the first ones bring the new rows, in their order.

    Attributes:
        row: of each, its row.
        logical_times: when it is.
        sign: 1 where its row comes, -1 where it goes (int64); None where all come.
    """

    row: Positions
    logical_times: LogicalTimes
    sign: Array | None


class AggregateStep:
    """The events of one micro-batch over the groups that they touch.

    Args:
        groups: the groups, with the numbers beside them.
        line: the events and moments.
        events: the events.
        rows: the rows.
    """

    def __init__(self, groups: KeyTable, line: Timeline, events: Events, rows: EventRows) -> None:
        self.kernels, self.xp = groups.kernels, groups.kernels.xp
        self.groups, self.line = groups, line
        self.row, self.logical_times, self.sign = events
        self.rows, self.kept, self.new = rows, rows.kept, rows.new
        self.floats: dict[int, tuple[Array, Array]] = {}
        self.wholes: dict[str, tuple[Moves, bool]] = {}
        self.taken: dict[str, Any] = {}
        self.words: dict[str, tuple[int, tuple[list[Array], list[Array]]]] = {}
        self._moved: dict[str, tuple[Array, Array]] = {}
        self._kept: dict[str, tuple[Array, Array]] = {}
        self._columns: dict[str, pa.Array] = {}

    @classmethod
    def without_events(cls, groups: KeyTable, slots: Slots, schema: pa.Schema) -> AggregateStep:
        """Makes a step of groups without any event, which gives them as they are.

        Args:
            groups: the groups.
            slots: which.
            schema: of the input's rows, of which there are none.
        """
        none, nothing = groups.kernels.xp.empty(0, np.int64), schema.empty_table()
        line = Timeline(groups.kernels, slots, none, none, net=True)
        return cls(
            groups,
            line,
            Events(none, none, None),
            EventRows(groups.kernels.frame(nothing), nothing.column, none, 0, None),
        )

    def column(self, name: str) -> pa.Array:
        """A column of the rows, in one piece."""
        if name not in self._columns:
            self._columns[name] = one_array(self.rows.column(name))
        return self._columns[name]

    @functools.cached_property
    def _on_disk(self) -> dict[str, Array]:
        """The numbers that lie on disk, as they were."""
        return on_disk(self.groups.beside, self.line.slots)

    def base(self, name: str) -> Array:
        """A number beside the groups, as it was."""
        return self._on_disk[name] if name in self._on_disk else self.groups.beside[name].values[self.line.slots]

    def keep(self, name: str, values: Array, before: Array) -> None:
        """Make a number beside the groups another, of each, with the next `write`; ``before``: what it was."""
        self._kept[name] = values, before

    def write(self) -> None:
        """Write what was kept."""
        if self._kept:
            self.groups.put_all(self.line.slots, self._kept)
            self._kept = {}

    def counted(self) -> tuple[Array, Array]:
        """The number of rows of each group, before and after each moment."""
        return self.summed("rows", lambda: self.rows_moved)

    def summed(self, name: str, moves: Callable[[], Moves | None]) -> tuple[Array, Array]:
        """A number beside the groups that rows move, before and after each moment; moved once, whoever asks.

        Args:
            name: of the number.
            moves: gives by how much it is moved; None for not at all.
        """
        if name not in self._moved:
            by, base = moves(), self.base(name)
            self._moved[name] = self.line.summed(by, base)
            if by is not None:
                self.keep(name, self.line.final(self._moved[name][1]), base)
        return self._moved[name]

    @functools.cached_property
    def rows_moved(self) -> Moves:
        """By how much events move the number of rows."""
        return self.line.moves(self.xp.ones(self.row.size, np.int64) if self.sign is None else self.sign)

    def moves(self, numbers: Array) -> Moves:
        """By how much events move the sum of numbers (int64) of their rows."""
        return self.line.moves(self.signed(numbers))

    def signed(self, numbers: Array) -> Array:
        """Gives each event the number of its row, negative where the row goes."""
        if not self.line.net:  # else an event is a row
            numbers = numbers[self.row]
        return numbers if self.sign is None else numbers * self.sign

    def not_null(self, column: str) -> Array | None:
        """Mask of rows without a null in a column; None for all."""
        found = self.column(column)
        if not found.null_count:
            return None
        return self.kernels.asarray(found.is_valid().to_numpy(zero_copy_only=False))

    def known(self, number: int, column: str) -> tuple[Array, Array]:
        """Counts a column's values that are not null, before and after each moment.

        Args:
            number: of the column in the input, for the name beside the groups.
            column: its name.
        """

        def moves() -> Moves:
            mask = self.not_null(column)
            return self.rows_moved if mask is None else self.moves(mask.astype(np.int64))

        return self.summed(f"count_{number}", moves)
