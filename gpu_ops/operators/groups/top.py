"""The first n rows of each group, after Flink's ``RetractableTopNFunction`` and ``AppendOnlyTopNFunction``.

Law: a row is in the result while it lives and fewer than n live rows of its group come before it: by the order, of
equal ones those that arrived earlier. With a number, the result's row is the row and one more than how many that are.

A micro-batch changes that only for groups of which it brings or takes rows. Those that are among a group's first n at
any time were among the first before, up to the n-th that stays, or are new: these are ordered anew. Of insertions only,
rows behind the first n never come back, and are forgotten.

With a TTL a group that nothing has changed for so long is forgotten, and nothing is said of it: its next row begins it
anew. In Flink each row of a group has a TTL of its own, so that the rows behind it may move up without a word.

Row kinds (``per_event``): a row that comes to be among the first is ``+I``, one that is not any more ``-D``. With a
number, ``-U`` and ``+U`` where another row has got the number; all rows that leave by a change stand before those
that come, where Flink has them number by number.

**The order as numbers**: of the first column of an order each value becomes an integer (`sort_keys`), lower for rows in
front. Text, binary and long decimals lose something on the way, but never change places: rows with equal numbers are
compared by `places`.

**First rows** that were there before a micro-batch come from the index by group and order, each run of which is ordered
by (hash, number of the order, arrival): those that the micro-batch takes, and the first n that stay
(`gpu_ops.operators.core.first_rows`). Where many rows have the number of the last one, they come from an index in the
order itself, which is made once it pays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol, Self, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gpu_ops import layouts
from gpu_ops.arrays import Array, Hashes, Positions, Slots
from gpu_ops.descriptions.changelog import DELETE, INSERT, UPDATE_AFTER, UPDATE_BEFORE
from gpu_ops.descriptions.description import Description
from gpu_ops.descriptions.groups import Order, Top
from gpu_ops.descriptions.times import AFTER_ALL, BEFORE_ALL
from gpu_ops.ingest import Ingested
from gpu_ops.kernels import Columns, Flagged, Frame, Kernels, TooMany, distinct, sorted_by
from gpu_ops.operators.core.changes import NEVER, Lifetimes, touched_groups
from gpu_ops.operators.core.emission import OutputRows, chained, in_order, net_rows
from gpu_ops.operators.core.first_rows import FirstRows, most_candidates, order_rows
from gpu_ops.operators.core.looks import Asked, Steps
from gpu_ops.operators.core.order import NONE, exact, least, order_keys, value_codes
from gpu_ops.operators.groups.aggregate.state import GroupState, group_table, one_key
from gpu_ops.operators.keyed import KeyedOperator
from gpu_ops.operators.operator import Cut, Parts, Targets
from gpu_ops.output import Output
from gpu_ops.state.index import OrderIndex
from gpu_ops.state.keyed_table import TIME_COLUMN, KeyedTable
from gpu_ops.state.pieces import FromSnapshot, Storable
from gpu_ops.state.runs import postponed
from gpu_ops.state.table import DEAD, LIVE, KeySet
from gpu_ops.state.time_index import TimeRun
from gpu_ops.values import one_array

FIRST: Final = BEFORE_ALL + 2
LAST: Final = AFTER_ALL - 1
"""The numbers of values; nulls have one below or above. What is beyond counts as one of these."""

_EXACTLY: Final = "exactly"
"""Names the index in the order itself."""

_AT_ONCE: Final = 1 << 22
"""Numbers of first rows, moment by moment, that are in memory at once."""


def sort_keys(column: pa.ChunkedArray, order: Order) -> npt.NDArray[np.int64]:
    """A number for each row; rows with a lower one come before others.

    Args:
        column: n values of the order's column.
        order: by what.

    Returns:
        N int64, none of them `BEFORE_ALL`.
    """
    numbers = value_codes(column)
    found = np.clip(~numbers if order.descending else numbers, FIRST, LAST)
    if column.null_count:
        found[column.is_null().to_numpy()] = FIRST - 1 if order.nulls_first else LAST + 1
    return found


def places(
    columns: Sequence[pa.ChunkedArray], order: Sequence[Order], arrival: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """The positions of n rows in their order.

    Args:
        columns: n values of each of the order's columns.
        order: by what.
        arrival: n numbers, of rows that are equal in the order the least comes first.

    Returns:
        N positions (int64): where each of the rows stands.
    """
    keys = order_keys(columns, order)
    sorted_ = np.lexsort((arrival, *reversed(keys)))
    found = np.empty(sorted_.size, np.int64)
    found[sorted_] = np.arange(sorted_.size)
    return found


class HasColumns(Protocol):
    """Rows whose columns are given in Arrow: a table, or changes."""

    def column(self, name: str, /) -> pa.ChunkedArray:
        """Gives a column by its name."""


class FirstOfGroup(NamedTuple):
    """Keeps of each group the rows that may be among its first n, where no row is taken back.

    Attributes:
        by: the columns of a group.
        order: the first order of the rows.
        n: the number of rows that each group needs.
    """

    by: tuple[str, ...]
    order: Order
    n: int

    @classmethod
    def for_operator(cls, operator: Description) -> Self | None:
        """The filter for the input of an operator without retractions; None where it needs all rows."""
        if not isinstance(operator, Top) or operator.emit == "per_event" or not operator.source.insert_only:
            return None
        if any(pa.types.is_nested(operator.source.schema.field(column).type) for column in operator.by):
            return None  # Arrow does not number those
        return cls(operator.by, operator.order[0], operator.n)

    def among(self, rows: HasColumns, keys: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.bool_]:
        """Flags the rows that are kept.

        Args:
            rows: n rows.
            keys: their `sort_keys`, if they are known.
        """
        keys = sort_keys(rows.column(self.order.column), self.order) if keys is None else keys
        group, groups = self._groups(rows, keys.size)
        last = np.full(groups, np.iinfo(np.int64).max)
        if self.n == 1:
            np.minimum.at(last, group, keys)
        else:
            ranked = np.lexsort((keys, group))
            begins = np.searchsorted(group[ranked], np.arange(groups))
            full = np.flatnonzero(np.bincount(group, minlength=groups) >= self.n)
            last[full] = keys[ranked[begins[full] + self.n - 1]]
        return keys <= last[group]

    def _groups(self, rows: HasColumns, size: int) -> tuple[npt.NDArray[np.int64], int]:
        """The group number of each row, and the number of group numbers; one group may have several numbers."""
        group, count = np.zeros(size, np.int64), 1
        for name in self.by:
            codes = pc.dictionary_encode(one_array(rows.column(name)), null_encoding="encode")
            values = max(1, len(codes.dictionary))
            pairs = group * values + codes.indices.to_numpy().astype(np.int64)
            numbers, group = np.unique(pairs, return_inverse=True) if count > 1 else (np.arange(values), pairs)
            count = len(numbers)
        return group, count


class FirstByNumber(FirstRows):
    """Looks up the first rows of groups by the order's numbers, which are the table's times.

    Args:
        table: the state.
        decides: whether rows with different values have different numbers, those between `FIRST` and `LAST`. Of other
            numbers all rows are found that have the last one's.
    """

    def __init__(self, table: KeyedTable, *, decides: bool) -> None:
        super().__init__(table, table.time_index, table.keys, table.key_types)
        self._decides, self._exactly = decides, cast("OrderIndex", table.indexes[_EXACTLY])

    def _alike(
        self, run: TimeRun, own: Columns, hashes: Hashes, numbers: Array, ends: Positions
    ) -> Steps[list[tuple[Array, Slots]]]:
        """Rows behind the first ones with the last one's number, where that does not decide.

        Raises:
            TooMany: they are so many that an index in the order itself pays.
        """
        xp, index = self._kernels.xp, self._table.time_index
        if not numbers.size:
            return []
        last = index.read(run, ends - 1)[1]
        undecided = (last == FIRST) | (last == LAST) if self._decides else xp.ones(last.size, bool)
        (at,) = (yield Asked([Flagged(undecided, [0])])).rows
        if not at.size:
            return []
        numbers, ends = numbers[at], ends[at]
        behind = index.bisect(run, hashes[numbers], last[at], after=True)

        def check(more: int) -> None:
            most = most_candidates(self._table, int(hashes.size))
            if more > most and self._exactly.pays(self._table.first_new, more):
                raise TooMany

        read = yield from self._read(run, own, hashes, (numbers, ends, behind), check)
        of_keys, slots = (yield Asked(read.rows)).rows
        return [(of_keys, slots)]


@dataclasses.dataclass(frozen=True)
class Candidates:
    """The rows of changed groups that can be among the first: by group, and within it in their order."""

    groups: Array
    slots: Slots


class TopRows(KeyedOperator):
    """The first rows of each group.

    Args:
        description: the description.
        kernels: the backend.
    """

    description: Top
    null_sides = (False,)

    def __init__(self, description: Top, kernels: Kernels) -> None:
        super().__init__(description, kernels)
        source = dataclasses.replace(description.source, ttl_ms=None)  # a group goes as one
        keys, findable = KeySet.of_group(source.schema, description.by), not source.insert_only
        self._table = KeyedTable(kernels, source, [keys], findable=findable, beside=[TIME_COLUMN], arrival_counts=True)
        self._state: GroupState | None = None
        if description.source.ttl_ms is not None:
            self._groups, self._clock = group_table(kernels, description.source, description.by, {}), 0
            self._state = GroupState(description.source, self._groups, self._table, {}, [])
        self._table.indexes[_EXACTLY] = OrderIndex(kernels)
        self.tables = (self._table,)
        first = source.schema.field(description.order[0].column).type
        self._sole = len(description.order) == 1 and exact(first)
        self._skipped = 0
        self._first = FirstOfGroup.for_operator(description)
        if description.number is not None:
            self._numbers = kernels.store(pa.schema([(description.number, pa.int32())]))
            counted = pa.array(range(1, description.n + 1), pa.int32())
            self._numbers.append(kernels.frame(pa.table({description.number: counted})))

    def _prepare(self, changes: tuple[Ingested, ...], clock_ms: int, *, net: bool) -> Output:
        if net and self._first is not None and self.kernels.host is None:  # a card orders them all as fast
            (change,) = self.chosen(changes)
            changes = (change.pick(self._first.among(change, change.times)),)
        if self._state is None:
            return super()._prepare(changes, clock_ms, net=net)
        self._clock, gone = clock_ms, self._state.forget(self._groups.expired(clock_ms))
        made = super()._prepare(changes, clock_ms, net=net)
        made.metrics[f"{self.description.source.name}_expired"] = gone
        return made

    def chosen(self, changes: tuple[Ingested, ...]) -> tuple[Ingested, ...]:
        """All of them, with the order's numbers as their times."""
        (change,), order = changes, self.description.order[0]
        if change.times is not None:
            return changes
        kind = self.description.source.schema.field(order.column).type
        column = change.column(order.column)
        return (dataclasses.replace(change, times=sort_keys(column.cast(kind), order)),)

    def find(self, sides: Sequence[Lifetimes], *, net: bool) -> Candidates:
        """The rows of changed groups that can be among the first."""
        (side,), description, kernels, xp, table = sides, self.description, self.kernels, self.kernels.xp, self._table
        touched = touched_groups(table, side, description.by)
        if touched is None:
            return Candidates(self._nothing, self._nothing)
        leaders, hashes = touched.leaders, touched.hashes
        if self._state is not None:
            keys = leaders if description.by else one_key(kernels, 1)
            self._groups.touch(self._groups.locate(keys).slots, self._clock)
        own = Columns(leaders, description.by)
        first: FirstRows = FirstByNumber(table, decides=self._sole)
        wanted = xp.full(hashes.size, description.n, np.int64)
        try:
            held_by, held = first.search(own, hashes, wanted)
        except TooMany:
            index = cast("OrderIndex", table.indexes[_EXACTLY])
            order_rows(table, index, [one.column for one in description.order], self._places)
            first = FirstRows(table, index, table.keys, table.key_types)
            held_by, held = first.search(own, hashes, wanted)
        self._skipped += max(0, first.read - 8 * int(held.size) - 64 * len(table.time_index.runs) * int(hashes.size))
        groups, slots = xp.concatenate([held_by, touched.of_new]), xp.concatenate([held, touched.new])
        order = self._ordered(groups, slots)
        return Candidates(groups[order], slots[order])

    def _ordered(self, groups: Array, slots: Slots) -> Positions:
        """Positions of rows by group, order and arrival."""
        kernels, order = self.kernels, self.description.order
        numbers = self._table.beside[TIME_COLUMN].values[slots]
        if self._sole and not bool(((numbers == FIRST) | (numbers == LAST)).any()):
            return sorted_by(kernels, groups, numbers, slots)
        schema = pa.schema([self.description.source.schema.field(one.column) for one in order])
        rows = kernels.to_arrow(self._table.store.take(slots, schema.names, present=True), schema)
        return sorted_by(kernels, groups, *self._places(rows, slots))

    def _places(self, values: pa.Table, slots: Slots) -> list[Array]:
        """The positions of rows in the order."""
        kernels = self.kernels
        return [kernels.asarray(places(values.columns, self.description.order, kernels.asnumpy(slots)))]

    def rows(self, matches: Candidates, sides: Sequence[Lifetimes], event_kinds: Array | None) -> OutputRows:
        """Rows that come to be among the first, and rows that are not any more."""
        (side,), xp, n = sides, self.kernels.xp, self.description.n
        groups, slots = matches.groups, matches.slots
        starts = xp.searchsorted(groups, groups)
        old, stays = slots < side.first_new, side.died(xp, slots) == NEVER
        was, now = _number(xp, old, starts), _number(xp, stays, starts)
        before, after = old & (was <= n), stays & (now <= n)
        if self.description.source.insert_only:
            self._forget(slots[xp.flatnonzero(~after)], side.first_new)
        if event_kinds is not None:
            return self._moments(matches, side)
        again = before & after
        if self.description.number is not None:
            again &= was == now
        leaving = Flagged(before & ~again, [slots, was - 1][: self._width])
        coming = Flagged(after & ~again, [slots, now - 1][: self._width])
        return net_rows(self.kernels, [leaving], [coming])

    @property
    def _width(self) -> int:
        """The count of numbers that make an output row: its slot, and its number in the group if that is shown."""
        return 1 if self.description.number is None else 2

    def _forget(self, slots: Slots, first_new: int) -> None:
        """Rows behind the first, of insertions only."""
        self._table.move(slots[slots < first_new], LIVE, DEAD)
        self._table.end(slots[slots >= first_new])

    def _moments(self, candidates: Candidates, side: Lifetimes) -> OutputRows:
        """Compares the first rows change by change; what a change takes and brings happens at once."""
        xp, groups, slots = self.kernels.xp, candidates.groups, candidates.slots
        born, died = side.born(xp, slots), side.died(xp, slots)
        begin = layouts.owned(groups, xp.where(born < 0, 0, (born >> 1) + 1))
        start, forever = xp.zeros(groups.size, np.int64), died == NEVER
        end = xp.where(forever, layouts.owned(groups + 1, start), layouts.owned(groups, (died >> 1) + 1))
        # of each group the time before the micro-batch, and every change of it
        moments = distinct(self.kernels, xp.concatenate([layouts.owned(groups, start), begin, end[~forever]]))
        size, n = int(moments.size), self.description.n
        begin, end = xp.searchsorted(moments, begin), xp.searchsorted(moments, end)
        parts: list[OutputRows] = []
        step = max(1, _AT_ONCE // n)
        for at in range(0, max(1, size - 1), step):
            # one more, with which the first of this part is compared
            last = min(at + step + 1, size)
            here = xp.flatnonzero((begin < last) & (end > at))
            spans = xp.maximum(begin[here], at) - at, xp.minimum(end[here], last) - at
            first = least(self.kernels, *spans, here, size=last - at, n=n)
            parts.append(self._changes(first, moments[at:last], slots))
        return self._sorted(chained(self.kernels, parts))

    def _changes(self, first: Array, moments: Array, slots: Slots) -> OutputRows:
        """Lists the differences between the first rows at a moment and those at the one before, of the same group."""
        xp, n = self.kernels.xp, self.description.n
        sequence = (layouts.unowned(moments)[1] - 1)[1:]
        before, after = first[:-1].reshape(-1), first[1:].reshape(-1)
        moment = xp.arange(before.size, dtype=np.int64) // n
        same = (before == after) | (sequence[moment] < 0)
        there, here = xp.flatnonzero(~same & (before != NONE)), xp.flatnonzero(~same & (after != NONE))
        if self.description.number is None:
            # what only has another number is neither taken nor brought
            size = slots.size
            taken, brought = moment[there] * size + before[there], moment[here] * size + after[here]
            both = xp.sort(xp.concatenate([taken * 2, brought * 2 + 1]))
            again = xp.zeros(both.size, bool)
            again[1:] = both[1:] >> 1 == both[:-1] >> 1
            again[:-1] |= again[1:]
            both = both[xp.flatnonzero(~again)]
            comes, both = both & 1, both >> 1
            at, which = both // size, [slots[both % size]]
            kinds = xp.where(comes == 1, np.int8(INSERT), np.int8(DELETE))
        else:
            at, rank = xp.concatenate([moment[there], moment[here]]), xp.concatenate([before[there], after[here]])
            place = xp.concatenate([there, here])
            which = [slots[rank], place % n]
            kinds = xp.concatenate(
                [
                    xp.where(after[there] == NONE, np.int8(DELETE), np.int8(UPDATE_BEFORE)),
                    xp.where(before[here] == NONE, np.int8(INSERT), np.int8(UPDATE_AFTER)),
                ]
            )
        return OutputRows(kinds, tuple(which), 2 * sequence[at])

    def _sorted(self, rows: OutputRows) -> OutputRows:
        """By the change that caused them, those that leave first."""
        xp = self.kernels.xp
        leaves = (rows.kinds == DELETE) | (rows.kinds == UPDATE_BEFORE)
        parts = rows.pick(xp.flatnonzero(leaves)), rows.pick(xp.flatnonzero(~leaves))
        return in_order(self.kernels, [(parts[0], 0), (parts[1], 1)])

    def values(self, rows: OutputRows) -> Frame:
        """The rows, and their numbers beside them."""
        if self.description.number is None:
            return super().values(rows)
        schema, name = self.description.source.schema, self.description.number
        own = self._table.store.take(rows.slots[0], schema.names, present=True)
        numbers = self._numbers.take(rows.slots[1], [name], present=True)
        return self.kernels.combine([*((column, own, column) for column in schema.names), (name, numbers, name)])

    def may_cancel(self, rows: OutputRows, sides: Sequence[Lifetimes], frame: Frame) -> Positions:
        """Any: an equal row may take the place of one that leaves."""
        return self.kernels.xp.arange(rows.size, dtype=np.int64)

    def commit(self, clock_ms: int) -> None:
        """Make the prepared micro-batch final.

        Where rows in front go again and again, their entries lie in the way of each lookup: once as many were passed
        over as there are rows, they are dropped.
        """
        super().commit(clock_ms)
        if self._skipped > len(self._table) > self._table.live:
            with postponed(self.kernels, "dropping rows that are gone"):
                self._table.compact()
        if self._skipped > len(self._table):
            self._skipped = 0

    # --- the stored form ---------------------------------------------------------------------

    def kept(self) -> dict[str, Storable]:
        """The rows, and the groups where they expire."""
        return super().kept() if self._state is None else self._state.kept()

    def cut(
        self, parts: Parts, targets: Sequence[Sequence[Targets]], to: Callable[[pa.Table], Targets], count: int
    ) -> Cut:
        """The groups where they expire, for other partitions; see `gpu_ops.operators.operator.Operator`."""
        if self._state is None:
            return super().cut(parts, targets, to, count)
        return self._state.cut(parts, targets[0], to, count)

    def restore(self, state: Mapping[str, FromSnapshot], settle: Callable[[], None]) -> None:
        """Take over a snapshot; see `gpu_ops.operators.operator.Operator`."""
        (super().restore if self._state is None else self._state.restore)(state, settle)


make = TopRows


def _number(xp: Any, counted: Array, starts: Positions) -> Array:
    """Numbers rows side by side by group: how many that count there are up to each of them.

    Args:
        xp: numpy or cupy.
        counted: n flags.
        starts: where each row's group begins.
    """
    total = xp.cumsum(counted)
    return total - (total - counted)[starts]
