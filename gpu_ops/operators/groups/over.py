"""Rows with what functions give over the windows around them: ``OVER (PARTITION BY ... ORDER BY ...)`` of SQL.

Law: the result has each row of the input that lives, and behind its columns what each function gives of the rows of
its partition that live, in their order; of rows that order alike those that arrived earlier come first.

A micro-batch changes that only in partitions of which it brings or takes rows. The rows of these are read and ordered,
functions are computed of them as they were and as they are (`windows`), and what differs comes out: so a row whose
frame has not changed is not in the changelog. An updated row arrives anew, behind those that order as it does.

Row kinds (``per_event``): a row that comes is ``+I``, one that goes ``-D``, and one for which a function gives
something else ``-U`` and ``+U``; all rows that leave by a change stand before those that come. Each change of a
partition is a *moment*, at which its rows are a segment of their own; two segments that follow one another are
compared. With ``per_batch`` a partition has two moments, before and after.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from gpu_ops import layouts
from gpu_ops.arrays import Array, Positions, Slots, value_changes, written_out
from gpu_ops.descriptions.changelog import DELETE, INSERT, UPDATE_AFTER, UPDATE_BEFORE
from gpu_ops.descriptions.over import OF_ONE_ROW, Over
from gpu_ops.kernels import Among, Columns, Flagged, Frame, Kernels, distinct
from gpu_ops.operators.core.changes import NEVER, Lifetimes, TouchedGroups, touched_groups
from gpu_ops.operators.core.emission import OutputRows, chained, in_order, net_rows
from gpu_ops.operators.core.match import in_one, in_pieces, match_among
from gpu_ops.operators.core.order import order_keys
from gpu_ops.operators.groups.windows import RowValues, Segments, numbers_of, row_shown
from gpu_ops.operators.keyed import KeyedOperator
from gpu_ops.state.keyed_table import KeyedTable
from gpu_ops.state.table import DYING, LIVE, KeySet

_AT_ONCE: Final = 1 << 20
"""Rows of segments that are in memory at once, unless two moments of one partition have more."""


@dataclasses.dataclass(frozen=True)
class OrderedRows:
    """The rows of the partitions that a micro-batch touches: by partition, and within it in their order.

    Attributes:
        groups: of n rows the number of the partition, from 0.
        slots: of each.
        peers: ascending numbers, the same for rows of a partition that order alike.
        values: of each what functions look at; None without rows.
    """

    groups: Array
    slots: Slots
    peers: Array
    values: RowValues | None


@dataclasses.dataclass(frozen=True)
class RowMoments:
    """From which moment to which rows are there.

    Attributes:
        begins: of n rows the first moment.
        ends: the moment from which on it is not there any more, or that behind the last one of its partition.
        firsts: flags of m moments that are the first ones of their partitions: before the micro-batch.
        logical_times: of m moments that of the change.
    """

    begins: Positions
    ends: Positions
    firsts: Array
    logical_times: Array


class WindowedRows(KeyedOperator):
    """The rows of one input over one partition, with what functions give.

    Args:
        description: the description.
        kernels: the backend.
    """

    description: Over
    null_sides = (False,)

    def __init__(self, description: Over, kernels: Kernels) -> None:
        super().__init__(description, kernels)
        source = description.source
        keys = KeySet.of_group(source.schema, description.by)
        self._table = KeyedTable(kernels, source, [keys], findable=not source.insert_only, arrival_counts=True)
        self.tables = (self._table,)
        asked = [call for call in description.calls if call.function not in ("lag", "first", "last", "nth")]
        asked += [call for call in description.calls if call.ignore_nulls]
        looked_at = [*(one.column for one in description.order), *(name for call in asked for name in call.columns)]
        self._looked_at = pa.schema([source.schema.field(name) for name in dict.fromkeys(looked_at)])
        self._given = pa.schema([(call.name, description.type_of(call)) for call in description.calls])
        self._results = kernels.store(self._given)

    def find(self, sides: Sequence[Lifetimes], *, net: bool) -> OrderedRows:
        """The rows of the partitions that the micro-batch touches, in order."""
        (side,), xp, nothing = sides, self.kernels.xp, self._nothing
        touched = touched_groups(self._table, side, self.description.by)
        if touched is None:
            return OrderedRows(nothing, nothing, nothing, None)
        held_by, held = self._held(touched)
        return self._ordered(xp.concatenate([held_by, touched.of_new]), xp.concatenate([held, touched.new]))

    def _held(self, touched: TouchedGroups) -> tuple[Array, Slots]:
        """The rows of partitions that were there before the micro-batch: numbers of partitions, and slots."""
        table, kernels, by = self._table, self.kernels, self.description.by
        probe_rows = kernels.sort(kernels.entries(touched.hashes, 0))
        columns = Columns(touched.leaders, by), Columns(table.store, by)
        among = Among(table.status.values, LIVE, DYING)

        def candidates(rows: Array, at_most: int | None) -> Array:
            return table.key_index.meet(rows, staged=False, at_most=at_most)

        pieces = in_pieces(kernels, probe_rows, candidates)
        parts = (match_among(kernels, table.key_types, piece, columns, among) for piece in pieces)
        return in_one(kernels.xp, parts, self.check_output)

    def _ordered(self, groups: Array, slots: Slots) -> OrderedRows:
        kernels, order = self.kernels, self.description.order
        looked_at, names = self._looked_at.empty_table(), self._looked_at.names
        if names:
            looked_at = kernels.to_arrow(self._table.store.take(slots, names, present=True), self._looked_at)
        keys = order_keys([looked_at[one.column] for one in order], order)
        sorted_ = np.lexsort((kernels.asnumpy(slots), *reversed(keys), kernels.asnumpy(groups)))
        at = kernels.asarray(sorted_)
        groups, slots = groups[at], slots[at]
        opens = kernels.asnumpy(value_changes(kernels.xp, groups))
        for key in keys:
            opens |= value_changes(np, key[sorted_])
        peers = kernels.asarray(np.cumsum(opens))
        values = RowValues(kernels, looked_at.take(pa.array(sorted_)) if names else looked_at)
        return OrderedRows(groups, slots, peers, values)

    def _spans(self, rows: OrderedRows, side: Lifetimes, *, net: bool) -> RowMoments:
        """While which moments the rows are there."""
        xp, groups, slots = self.kernels.xp, rows.groups, rows.slots
        if net:
            begins = 2 * groups + (slots >= side.first_new)
            ends = 2 * groups + 1 + (side.died(xp, slots) == NEVER)
            size = 2 * (int(groups[-1]) + 1)
            firsts = xp.arange(size, dtype=np.int64) % 2 == 0
            return RowMoments(begins, ends, firsts, xp.zeros(size, np.int64))
        born, died = side.born(xp, slots), side.died(xp, slots)
        begin = layouts.owned(groups, xp.where(born < 0, 0, (born >> 1) + 1))
        start, forever = xp.zeros(groups.size, np.int64), died == NEVER
        end = xp.where(forever, layouts.owned(groups + 1, start), layouts.owned(groups, (died >> 1) + 1))
        # of each partition the time before the micro-batch, and every change of it
        moments = distinct(self.kernels, xp.concatenate([layouts.owned(groups, start), begin, end[~forever]]))
        times = layouts.unowned(moments)[1]
        return RowMoments(xp.searchsorted(moments, begin), xp.searchsorted(moments, end), times == 0, 2 * (times - 1))

    def rows(self, matches: OrderedRows, sides: Sequence[Lifetimes], event_kinds: Array | None) -> OutputRows:
        """Rows that come or go, and those for which a function gives something else."""
        (side,), kernels, xp = sides, self.kernels, self.kernels.xp
        self._results = kernels.store(self._given)
        if matches.values is None:
            return OutputRows(xp.empty(0, np.int8), (self._nothing, self._nothing), self._nothing)
        spans = self._spans(matches, side, net=event_kinds is None)
        parts = [self._compared(matches, spans, *piece) for piece in self._pieces(spans)]
        rows = chained(kernels, parts)
        leaves = (rows.kinds == DELETE) | (rows.kinds == UPDATE_BEFORE)
        if event_kinds is None:
            return net_rows(kernels, [Flagged(leaves, rows.slots)], [Flagged(~leaves, rows.slots)])
        leaving, coming = rows.pick(xp.flatnonzero(leaves)), rows.pick(xp.flatnonzero(~leaves))
        return in_order(kernels, [(leaving, 0), (coming, 1)])

    def _pieces(self, spans: RowMoments) -> Iterator[tuple[int, int]]:
        """Cuts the moments into pieces of not too many rows, each with the last moment of the one before."""
        kernels, size = self.kernels, int(spans.firsts.size)
        most = 16 if kernels.tiny_segments else _AT_ONCE
        there = kernels.xp.zeros(size + 1, np.int64)
        kernels.scatter_add(there, spans.begins, kernels.xp.ones(spans.begins.size, np.int64))
        kernels.scatter_add(there, spans.ends, kernels.xp.full(spans.ends.size, -1, np.int64))
        rows = kernels.asnumpy(kernels.xp.cumsum(kernels.xp.cumsum(there)))  # up to each moment
        at = 0
        while at < size - 1:
            before = int(rows[at - 1]) if at else 0
            last = min(max(int(np.searchsorted(rows, before + most, side="right")), at + 2), size)
            yield at, last
            at = last - 1

    def _compared(self, rows: OrderedRows, spans: RowMoments, at: int, last: int) -> OutputRows:
        """The differences between some moments, each with the one before it."""
        kernels, xp = self.kernels, self.kernels.xp
        here = xp.flatnonzero((spans.begins < last) & (spans.ends > at))
        begins, ends = xp.maximum(spans.begins[here], at), xp.minimum(spans.ends[here], last)
        span, moment = written_out(xp, begins, ends - begins)
        row = here[span]
        by_moment = kernels.argsort(moment)
        place = xp.empty(by_moment.size, np.int64)
        place[by_moment] = xp.arange(by_moment.size, dtype=np.int64)
        results = self._results_of(rows, row[by_moment], moment[by_moment])
        # a row that stays stands beside itself
        stays = xp.flatnonzero(span[1:] == span[:-1])
        types = tuple(field.type for field in self._given)
        columns = Columns(results, self._given.names)
        same = kernels.equal_at(types, (columns, place[stays]), (columns, place[stays + 1]))
        differs = stays[xp.flatnonzero(~same)]
        comes = xp.flatnonzero((moment == spans.begins[row]) & (moment > at) & ~spans.firsts[moment])
        next_ = moment + 1
        ended = (next_ == spans.ends[row]) & (next_ < last)
        goes = xp.flatnonzero(ended & ~spans.firsts[xp.minimum(next_, spans.firsts.size - 1)])
        parts = [(goes, 1, DELETE), (differs, 1, UPDATE_BEFORE), (differs + 1, 0, UPDATE_AFTER), (comes, 0, INSERT)]
        which = xp.concatenate([positions for positions, _, _ in parts])
        kinds = xp.concatenate([xp.full(positions.size, kind, np.int8) for positions, _, kind in parts])
        happens = xp.concatenate([moment[positions] + later for positions, later, _ in parts])
        # so that the order does not follow from the pieces
        order = kernels.argsort(layouts.pairs(happens, row[which]))
        which, kinds, times = which[order], kinds[order], spans.logical_times[happens[order]]
        first = len(self._results)
        self._results.append(kernels.take(results, place[which], self._given.names, present=True))
        stored = xp.arange(first, first + which.size, dtype=np.int64)
        return OutputRows(kinds, (rows.slots[row[which]], stored), times)

    def _results_of(self, rows: OrderedRows, row: Positions, moment: Array) -> Frame:
        """The values that all functions give to rows in segments.

        Args:
            rows: the rows.
            row: n positions among these, segment by segment.
            moment: of each the number of its segment.
        """
        kernels, xp, values = self.kernels, self.kernels.xp, rows.values
        assert values is not None
        segments, numbers = Segments(kernels, moment, rows.peers[row]), dict[str, pa.Array]()
        found: dict[str, tuple[Frame, str]] = {}
        for call, field in zip(self.description.calls, self._given, strict=True):
            if call.function in OF_ONE_ROW and call.column is not None:
                shown = row_shown(call, segments, values, row)
                slots = xp.where(shown >= 0, rows.slots[xp.maximum(shown, 0)], -1)
                found[call.name] = self._table.store.take(slots, [call.column]), call.column
            else:
                numbers[call.name] = numbers_of(call, field.type, segments, values, row)
        if numbers:
            frame = kernels.frame(pa.table(numbers))
            found |= {name: (frame, name) for name in numbers}
        return kernels.combine([(name, *found[name]) for name in self._given.names])

    def values(self, rows: OutputRows) -> Frame:
        """The rows, and what functions give beside them."""
        schema = self.description.source.schema
        own = self._table.store.take(rows.slots[0], schema.names, present=True)
        given = self._results.take(rows.slots[1], self._given.names, present=True)
        columns = [(name, own, name) for name in schema.names]
        return self.kernels.combine([*columns, *((name, given, name) for name in self._given.names)])

    def may_cancel(self, rows: OutputRows, sides: Sequence[Lifetimes], frame: Frame) -> Positions:
        """Any: an equal row may take the place of one that leaves."""
        return self.kernels.xp.arange(rows.size, dtype=np.int64)


make = WindowedRows
