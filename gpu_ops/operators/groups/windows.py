"""What functions give over frames of ordered rows, by numbers alone: no loop over rows, segments or frames.

A *segment* is the rows of one partition at one moment, side by side and in their order. A frame is then a span of
places, and what adds up over it is the difference of two running sums, of integers that are exact
(`gpu_ops.operators.groups.aggregate.sums`). The least of a span is that of two spans of a power of two that cover it
(a sparse table). The value of a function that shows one row's is not looked at here, only which row it is.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import numpy as np
import pyarrow as pa

from gpu_ops.arrays import Array, Positions, value_changes
from gpu_ops.descriptions.aggregate import MOMENTS
from gpu_ops.descriptions.over import NUMBERING, WindowCall, WindowFrame
from gpu_ops.kernels import Kernels
from gpu_ops.operators.core.order import order_codes
from gpu_ops.operators.groups.aggregate import moments, sums
from gpu_ops.values import one_array

_POWERS: Final = 1 << np.arange(32, dtype=np.int64)


class RowValues:
    """The values of n ordered rows that functions look at.

    Args:
        kernels: the backend.
        table: the values of the columns that are looked at.
    """

    def __init__(self, kernels: Kernels, table: pa.Table) -> None:
        self.kernels, self._table = kernels, table
        self._known: dict[str, Array] = {}
        self._ranked: dict[tuple[str, bool], tuple[Array, Array]] = {}
        self._added_up: dict[tuple[Any, ...], dict[str, Array]] = {}

    def column(self, name: str) -> pa.Array:
        """Takes a column, in one piece."""
        return one_array(self._table[name])

    def known(self, name: str) -> Array:
        """1 where a column is not null, else 0 (int64)."""
        if name not in self._known:
            valid = self.column(name).is_valid().to_numpy(zero_copy_only=False)
            self._known[name] = self.kernels.asarray(valid.astype(np.int64))
        return self._known[name]

    def ranked(self, name: str, *, greatest: bool) -> tuple[Array, Positions]:
        """Different numbers of the rows, from 0, in the order of a column or its reverse, and by number the row.

        Nulls have the number n, which is that of row -1.
        """
        if (name, greatest) not in self._ranked:
            column = self.column(name)
            nulls, codes = column.is_null().to_numpy(zero_copy_only=False), order_codes(column)
            order = np.lexsort((~codes if greatest else codes, nulls))
            ranks = np.empty(order.size, np.int64)
            ranks[order] = np.arange(order.size)
            ranks[nulls] = order.size
            both = ranks, np.append(order, -1)
            self._ranked[name, greatest] = self.kernels.asarray(both[0]), self.kernels.asarray(both[1])
        return self._ranked[name, greatest]

    def added_up(self, call: WindowCall) -> dict[str, Array]:
        """Integers of each row that add up to an aggregate, by name."""
        asked = call.function, *call.columns
        if asked not in self._added_up:
            columns = [self.column(name) for name in call.columns]
            of_moments = call.function in MOMENTS
            made = moments.added_up(call.measure, columns) if of_moments else sums.added_up(call.measure, columns[0])
            self._added_up[asked] = {name: self.kernels.asarray(part) for name, part in made.items()}
        return self._added_up[asked]


class Segments:
    """N rows in segments, and where each is in its own.

    Args:
        kernels: the backend.
        segment: of each row the number of its segment, ascending.
        peers: of each row a number, ascending within a segment, the same for rows that order alike, its peers.

    Attributes:
        place: that of each row among all.
        start: the place at which the segment of each row begins.
        end: the place behind it.
    """

    def __init__(self, kernels: Kernels, segment: Array, peers: Array) -> None:
        self._xp = kernels.xp
        opens = value_changes(self._xp, segment)
        self._peer_opens = opens | value_changes(self._xp, peers)
        self.place = self._xp.arange(segment.size, dtype=np.int64)
        self.start, self.end = self._spans(opens)

    def _spans(self, opens: Array) -> tuple[Positions, Positions]:
        """The place at which the span of each row begins, and that at which it ends."""
        starts = self._xp.flatnonzero(opens)
        bounds = self._xp.concatenate([starts, self._xp.full(1, opens.size, np.int64)])
        span = self._xp.cumsum(opens) - 1
        return bounds[span], bounds[span + 1]

    @functools.cached_property
    def alike(self) -> tuple[Positions, Positions]:
        """The places at which each row's peers begin and end."""
        return self._spans(self._peer_opens)

    def frame(self, frame: WindowFrame | None) -> tuple[Positions, Positions]:
        """The places at which the frame of each row begins and ends; an empty one ends where it begins."""
        if frame is None:
            return self.start, self.end
        xp, first, last = self._xp, self.start, self.end
        if frame.unit == "range":
            alike = self.alike
            return first if frame.first is None else alike[0], last if frame.last is None else alike[1]
        if frame.first is not None:
            first = xp.minimum(xp.maximum(self.place + frame.first, self.start), self.end)
        if frame.last is not None:
            last = xp.minimum(xp.maximum(self.place + (frame.last + 1), self.start), self.end)
        return first, xp.maximum(first, last)

    # --- which row's value ------------------------------------------------------------------------

    def shown(self, call: WindowCall, known: Array | None) -> Positions:
        """The place of the row whose value ``lag``, ``first``, ``last`` or ``nth`` shows; -1 for none.

        Args:
            call: the function.
            known: 1 for rows whose value counts; None for all.
        """
        xp, number = self._xp, call.number or 1
        if known is None:
            counted, of_count = xp.arange(self.place.size + 1, dtype=np.int64), self.place
        else:
            counted, of_count = self._before(known), xp.flatnonzero(known)
        first, last = (counted[bound] for bound in self.frame(call.frame))
        if call.function == "lag":
            number = 1 if call.number is None else call.number
            at = counted[self.place] - number if number > 0 else counted[self.place + 1] - 1 - number
        elif call.function == "last":
            at = last - 1
        else:
            at = first + (number - 1)
        there = (at >= first) & (at < last)
        if not of_count.size:
            return xp.full(self.place.size, -1, np.int64)
        return xp.where(there, of_count[xp.where(there, at, 0)], -1)

    def least(self, ranks: Array, frame: WindowFrame | None, none: int) -> Array:
        """The least number in the frame of each row.

        Args:
            ranks: of each row.
            frame: the frame.
            none: what an empty frame has.
        """
        xp, (first, last) = self._xp, self.frame(frame)
        found, size = xp.full(ranks.size, none, np.int64), last - first
        level = xp.searchsorted(xp.asarray(_POWERS), size, side="right") - 1
        levels = int(level.max()) + 1 if level.size else 0
        for number in range(levels):
            here, width = xp.flatnonzero(level == number), 1 << number
            found[here] = xp.minimum(ranks[first[here]], ranks[last[here] - width])
            if number + 1 < levels:
                ranks = xp.minimum(ranks[:-width], ranks[width:])
        return found

    # --- numbers ----------------------------------------------------------------------------------

    def _before(self, numbers: Array) -> Array:
        """Running sums of numbers: up to each place, without it, and up to the end."""
        return self._xp.concatenate([self._xp.zeros(1, np.int64), self._xp.cumsum(numbers)])

    def total(self, numbers: Array, frame: WindowFrame | None) -> Array:
        """Adds integers up over the frame of each row; beyond 64 bits they wrap around."""
        before, (first, last) = self._before(numbers), self.frame(frame)
        return before[last] - before[first]

    def numbering(self, call: WindowCall) -> Array:
        """Numbers the rows, by a function that goes by a row's place alone."""
        xp, row, size = self._xp, self.place - self.start, self.end - self.start
        match call.function:
            case "row_number":
                return (row + 1).astype(np.int32)
            case "dense_rank":
                opened = xp.cumsum(self._peer_opens)
                return (opened - opened[self.start] + 1).astype(np.int32)
            case "cume_dist":
                return (self.alike[1] - self.start) / size
            case "ntile":
                parts = call.number or 1
                least, more = size // parts, size % parts
                longer = more * (least + 1)
                behind = more + (row - longer) // xp.maximum(least, 1)
                return (xp.where(row < longer, row // (least + 1), behind) + 1).astype(np.int32)
        rank = self.alike[0] - self.start
        return (rank + 1).astype(np.int32) if call.function == "rank" else rank / xp.maximum(size - 1, 1)


def row_shown(call: WindowCall, segments: Segments, values: RowValues, rows: Positions) -> Positions:
    """The row whose value a function of `gpu_ops.descriptions.over.OF_ONE_ROW` shows; -1 for none.

    Args:
        call: the function.
        segments: where rows stand.
        values: of the ordered rows.
        rows: which of these stand there.
    """
    assert call.column is not None
    if call.function in ("min", "max"):
        ranks, by_rank = values.ranked(call.column, greatest=call.function == "max")
        return by_rank[segments.least(ranks[rows], call.frame, int(by_rank.size) - 1)]
    xp = values.kernels.xp
    at = segments.shown(call, values.known(call.column)[rows] if call.ignore_nulls else None)
    return xp.where(at >= 0, rows[xp.maximum(at, 0)], -1)


def numbers_of(call: WindowCall, kind: pa.DataType, segments: Segments, values: RowValues, rows: Positions) -> pa.Array:
    """The values that any other function gives; arguments as `row_shown`, and the type of the result."""
    host = values.kernels.asnumpy
    if call.function in NUMBERING:
        return pa.array(host(segments.numbering(call)), kind)
    if call.function == "count" and call.column is None:
        first, last = segments.frame(call.frame)
        return pa.array(host(last - first), kind)
    assert call.column is not None
    column = values.column(call.column)
    if call.function not in MOMENTS:
        counts = host(segments.total(values.known(call.column)[rows], call.frame))
    if call.function == "count":
        return pa.array(counts, kind)
    parts = values.added_up(call)
    totals = {name: host(segments.total(part[rows], call.frame)) for name, part in parts.items()}
    if call.function in MOMENTS:
        return moments.of_totals(call.measure, totals)
    return sums.of_totals(call.measure, totals, counts, (column.type, kind)).cast(kind)
