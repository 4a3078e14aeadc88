"""The first rows of keys in an index, found without a look at the others.

The entries of a hash stand in each run in the index's order: by arrival, by time, by a value. So the first rows of a
key are read from where its hash begins in the run: as many as are wanted, and more where some are gone or have another
key. Where rows in front go again and again, what is gone is passed over once, as the run notes where it ends
(`gpu_ops.state.runs.Passed`). The oldest of equal rows, the least row of a group and the first n rows are found so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from gpu_ops import layouts
from gpu_ops.arrays import Array, Hashes, Positions, Slots, value_changes, written_up_to
from gpu_ops.kernels import Columns, Flagged, sorted_by
from gpu_ops.operators.core.looks import Asked, Steps, side_by_side
from gpu_ops.state.index import OrderIndex
from gpu_ops.state.keyed_table import KeyedTable
from gpu_ops.state.runs import Runs
from gpu_ops.state.table import DEAD, LIVE

_MARGIN: Final = 4
"""Read beyond what is wanted, at first."""
_LONG: Final = 64
"""Entries of rows that are gone, side by side, of which the run notes where they end."""
_CANDIDATES_A_KEY: Final = 64
_CANDIDATES: Final = 1024


def most_candidates(table: KeyedTable, keys: int) -> int:
    """Candidates of so many keys that are looked at one by one; of more only the first ones are looked for."""
    return 2 * keys if table.kernels.tiny_segments else _CANDIDATES_A_KEY * keys + _CANDIDATES


def order_rows(
    table: KeyedTable,
    index: OrderIndex,
    columns: Sequence[str],
    ranks: Callable[[pa.Table, Slots], Sequence[Array]],
    *,
    valued: str | None = None,
) -> None:
    """Bring an index of a table's rows by key, in an order of values, up to date.

    Args:
        table: the rows.
        index: of these.
        columns: those whose values decide.
        ranks: gives, of these values and the slots of rows, numbers to sort them by, the first above all.
        valued: only rows that have a value in this column are wanted.
    """
    kernels, xp, schema = table.kernels, table.kernels.xp, table.source.schema
    names = list(dict.fromkeys([*table.keys, *columns, *([] if valued is None else [valued])]))

    def ordered(slots: Slots) -> Array:
        present = table.status.values[slots] != DEAD
        for forgotten in table.journal.forgotten:  # they come back if this micro-batch is discarded
            present |= xp.isin(slots, forgotten)
        slots = slots[xp.flatnonzero(present)]
        rows = table.store.take(slots, names, present=True)
        valid = None if valued is None else kernels.valid(rows, [valued])
        if valid is not None:
            kept = xp.flatnonzero(valid)
            slots, rows = slots[kept], kernels.take(rows, kept, names, present=True)
        hashes, values = kernels.hash_rows(rows, table.keys, table.key_types), pa.table({})
        if columns:
            value_columns = kernels.combine([(name, rows, name) for name in columns])
            values = kernels.to_arrow(value_columns, pa.schema([schema.field(name) for name in columns]))
        order = sorted_by(kernels, hashes >> np.uint64(32), *ranks(values, slots))
        return layouts.entries(hashes[order], slots[order])

    index.update(table.first_new, ordered)


class _SpanRows(NamedTuple):
    """Rows that were read in spans of a run, in arrays of a number each.

    Attributes:
        rows: the numbers of keys and the slots of those that are there and have their key, as they are asked for.
        staying: how many of those stay, of each span.
        more: of each span, whether it ends in an entry of its hash.
        stops: gives, of each span, where its first entry is that is not of a row that is gone; else its end.
    """

    rows: tuple[Flagged, Flagged]
    staying: Array
    more: Array
    stops: Callable[[], Steps[Positions]]


class FirstRows:
    """Looks up the first rows of keys.

    Args:
        table: the rows.
        index: leads to the committed ones.
        names: the columns of a key in the table.
        types: what keys are compared as; none where there is no key.

    Attributes:
        read: how many entries of the index were read.
    """

    def __init__(self, table: KeyedTable, index: Runs[Any], names: Sequence[str], types: Sequence[pa.DataType]) -> None:
        self._table, self._index, self._kernels = table, index, table.kernels
        self._found, self._types = Columns(table.store, names), types
        self.read = 0

    def search(self, keys: Columns, hashes: Hashes, counts: Array) -> tuple[Array, Slots]:
        """The first rows of each of n keys, and perhaps some that follow them.

        Args:
            keys: the columns of each key's row.
            hashes: n.
            counts: how many of each that stay, n positive numbers; those that this micro-batch takes are not counted.

        Returns:
            Numbers of keys and slots, by number and slot.
        """
        xp = self._kernels.xp
        parts = [(xp.empty(0, np.int64), xp.empty(0, np.int64))]
        for found in side_by_side(self._kernels, [self._of_run(run, keys, hashes, counts) for run in self._index.runs]):
            parts += found
        numbers, slots = (xp.concatenate(part) for part in zip(*parts, strict=True))
        return layouts.unpaired(xp.sort(layouts.pairs(numbers, slots)))

    def _of_run(self, run: Any, keys: Columns, hashes: Hashes, counts: Array) -> Steps[list[tuple[Array, Slots]]]:
        """The first rows in one run: numbers of keys, and slots."""
        xp, parts, long = self._kernels.xp, [], None
        begins = self._index.begin(run, hashes)
        first = at = run.passed.beyond(xp, begins)
        ends_of_gone, only_gone = first.copy(), xp.ones(hashes.size, bool)
        numbers, left, width = xp.arange(hashes.size, dtype=np.int64), counts, counts + _MARGIN
        while numbers.size:
            ends = xp.minimum(at + width, run.entries.size)
            read = yield from self._read(run, keys, hashes, (numbers, at, ends))
            left = left - read.staying
            on = left > 0
            seen = yield Asked([*read.rows, Flagged(read.more, [0], on), Flagged(read.more & on, [0])])
            of_keys, slots, done, on = seen.rows
            parts.append((of_keys, slots))
            parts += yield from self._alike(run, keys, hashes, numbers[done], ends[done])
            if on.size or at is not first:  # what the first turn alone reads is no long way
                stops = yield from read.stops()
                ends_of_gone[numbers] = xp.where(only_gone[numbers], stops, ends_of_gone[numbers])
                only_gone[numbers] &= stops == ends
                long = ends_of_gone - first > (1 if self._kernels.tiny_segments else _LONG)
            numbers, at, left, width = numbers[on], ends[on], left[on], 2 * width[on]
        if long is not None and not self._table.journal.forgotten:  # these come back if this micro-batch is discarded
            (from_, to) = (yield Asked([Flagged(long, [begins]), Flagged(long, [ends_of_gone])])).rows
            if from_.size:
                run.passed.note(xp, from_, to)
        return parts

    def _alike(
        self, run: Any, keys: Columns, hashes: Hashes, numbers: Array, ends: Positions
    ) -> Steps[list[tuple[Array, Slots]]]:
        """Rows behind the first ones that the index does not tell from the last of these: none.

        Args:
            run: the run.
            keys: as of `search`.
            hashes: likewise.
            numbers: of keys.
            ends: up to where entries of each were read.
        """
        yield from ()
        return []

    def _read(
        self,
        run: Any,
        keys: Columns,
        hashes: Hashes,
        spans: tuple[Array, Positions, Positions],
        check: Callable[[int], None] = lambda _: None,
    ) -> Steps[_SpanRows]:
        """The rows in some spans of a run: of each the number of a key, its begin and its end.

        ``check``: told how many entries these have; it may refuse them.
        """
        xp, (numbers, begins, ends) = self._kernels.xp, spans
        behind = xp.cumsum(ends - begins)
        (total,) = (yield Asked([], [behind[-1]])).numbers
        check(total)
        self.read += total
        span, places = written_up_to(xp, begins, behind, total)
        entries = self._index.entries_at(run, places)
        slots, key = layouts.entry_slots(entries), numbers[span]
        same, status = (
            layouts.entry_hashes(entries) == layouts.entry_hashes(hashes)[key],
            self._table.status.values[slots],
        )
        gone = same & (status == DEAD)
        mine = same & (status != DEAD)
        if self._types and total:
            mine = self._kernels.equal_at(self._types, (keys, key), (self._found, slots), mine)
        more = (ends > begins) & same[xp.maximum(behind - 1, 0)] if total else xp.zeros(numbers.size, bool)
        of_none = numbers.size
        staying = xp.bincount(xp.where(mine & (status == LIVE), span, of_none), minlength=of_none + 1)[:of_none]

        def stops() -> Steps[Positions]:
            others, stop = (yield Asked([Flagged(None, [0], gone)])).rows[0], ends.copy()
            first = value_changes(xp, span[others])
            (others,) = (yield Asked([Flagged(first, [others])])).rows
            stop[span[others]] = places[others]
            return stop

        return _SpanRows((Flagged(mine, [key]), Flagged(mine, [slots])), staying, more, stops)
