"""Association counts by key: how many live rows of one input each key has, for the rows of the other.

Where no residual condition is, a row's count is the number of live rows of its key. So it is kept by key, never by
pair: a micro-batch costs its changes and the rows that appear or disappear. While its key has rows on the other side, a
row has a *spell* of matches. To `gpu_ops.operators.core.visibility.changes_per_event` spells are what pairs are where
each pair must be looked at. For a key that has rows until logical time 4 and again from 7 on, and a row born at 3:

    spells of the key    [ALWAYS, 4)  [7, NEVER)
    spells of the row    [3, 4)       [7, NEVER)

With a TTL a row's count is kept beside it: the matches that have expired still count for the rows that they met. It is
moved by what its key's count is moved by, so a micro-batch costs the rows of the keys that it touches. A row that has
counted more than its key has now can never fall to zero again, and has no spells.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final

import numpy as np
import pyarrow as pa

from gpu_ops import layouts
from gpu_ops.arrays import Array, LogicalTimes, Positions, Slots, written_out
from gpu_ops.kernels import Among, Columns, Frame, Kernels, as_slots, distinct
from gpu_ops.operators.core.changes import ALWAYS, NEVER, Lifetimes
from gpu_ops.operators.core.key_table import KeyTable
from gpu_ops.operators.core.match import match_among
from gpu_ops.operators.core.visibility import (
    NetVisibility,
    Spells,
    VisibilityChanges,
    When,
    changes_per_batch,
    changes_per_event,
    crossings,
)
from gpu_ops.state.keyed_table import KeyedTable
from gpu_ops.state.table import DEAD, LIVE, rows_at_once

_ROWS: Final = "rows"

_TIME_BITS: Final = layouts.LOGICAL_TIME_BITS + 2
"""Room for logical times from `ALWAYS` to `NEVER`, in one number with a key's slot."""


@dataclasses.dataclass(frozen=True)
class _Touched:
    """The changes that a micro-batch makes to the numbers of rows of g keys.

    Attributes:
        slots: of the keys, ascending.
        before: g numbers of rows.
        after: likewise.
        events: of each row that comes or goes: which of the keys, when, and 1 or -1.
    """

    slots: Slots
    before: Array
    after: Array
    events: tuple[Array, LogicalTimes, Array]


class KeyCounts:
    """Counts the live rows of one input by key, for the rows of the other.

    Args:
        kernels: the backend.
        own: the rows whose count that is.
        counted: the rows that are counted; the keys are part of this table. Those of before the micro-batch, which
            may be prepared, are counted at once.
        beside: whether what counts for a row is what stands beside it.
    """

    def __init__(self, kernels: Kernels, own: KeyedTable, counted: KeyedTable, *, beside: bool) -> None:
        self._kernels, self._own, self._counted, self._beside = kernels, own, counted, beside
        self._names = tuple(f"{number}" for number in range(len(counted.keys)))
        kinds = [counted.source.schema.field(column).type for column in counted.keys]
        # without a key all rows have the same
        schema = pa.schema(list(zip(self._names, kinds, strict=True)) or [("all", pa.int8())])
        types = counted.key_types or None
        self._keys = KeyTable(kernels, schema, {_ROWS: np.int32}, f"keys of {counted.source.name}", types=types)
        self.fill(lambda: None)
        counted.attached.append(self._keys)
        self.expire()  # undone with the micro-batch that is prepared, as what expired in it is

    # --- keys --------------------------------------------------------------------------------

    def _frame(self, table: KeyedTable, slots: Slots) -> tuple[Frame, Positions | None]:
        """The keys of some rows, and which of the rows can match at all, None for all."""
        kernels = self._kernels
        if not table.keys:
            return kernels.frame(pa.table({"all": np.zeros(slots.size, np.int8)})), None
        key_columns = table.store.take(slots, table.keys, present=True)
        valid = kernels.valid(key_columns, table.strict) if table.strict else None
        frame = kernels.combine(
            [(name, key_columns, column) for name, column in zip(self._names, table.keys, strict=True)]
        )
        if valid is None or bool(valid.all()):
            return frame, None
        able = kernels.xp.flatnonzero(valid)
        return kernels.take(frame, able, self._names, present=True), able

    def _keys_of(self, table: KeyedTable, slots: Slots) -> Slots:
        """The key of each of some rows, -1 for one that no live row of the counted input has, or none can have."""
        xp = self._kernels.xp
        if not slots.size or not len(self._keys):
            return xp.full(slots.size, -1, np.int64)
        frame, able = self._frame(table, slots)
        keys = self._keys.find(frame)
        if able is None:
            return keys
        all_keys = xp.full(slots.size, -1, np.int64)
        all_keys[able] = keys
        return all_keys

    def _numbers(self, keys: Slots) -> Array:
        """The number of rows that each of some keys has now; 0 for a key that is not there."""
        xp, rows = self._kernels.xp, self._keys.beside[_ROWS].values
        return xp.where(keys >= 0, rows[keys], 0) if rows.size else xp.zeros(keys.size, np.int32)

    def _rows_of(self, keys: Slots) -> tuple[Array, Slots]:
        """The rows of some keys that were there and stay: which of the keys, and their slots."""
        kernels, xp, own = self._kernels, self._kernels.xp, self._own
        if not keys.size or not own.first_new:
            return xp.empty(0, np.int64), xp.empty(0, np.int64)
        frame = self._keys.store.take(keys, self._keys.source.schema.names, present=True)
        probe_rows = kernels.sort(kernels.entries(kernels.hash_rows(frame, self._names, own.key_types), 0))
        candidates = own.key_index.meet(probe_rows, staged=False, by_candidate=True)
        columns = Columns(frame, self._names), Columns(own.store, own.keys)
        among = None if own.all_alive and not own.killed.size else Among(own.status.values, LIVE, LIVE)
        return match_among(kernels, own.key_types, candidates, columns, among, by_candidate=True)

    # --- a micro-batch -----------------------------------------------------------------------

    def _touched(self, change: Lifetimes) -> _Touched:
        """The keys that the counted input's changes touch; those that are new are staged, without rows."""
        kernels, xp = self._kernels, self._kernels.xp
        rows, logical_times, signs = change.events(kernels)
        signs = signs.astype(np.int64)
        if not rows.size:
            nothing = xp.empty(0, np.int64)
            return _Touched(nothing, nothing, nothing, (nothing, logical_times, signs))
        frame, able = self._frame(self._counted, rows)
        if able is not None:
            logical_times, signs = logical_times[able], signs[able]
        located = self._keys.locate(frame)
        before = self._keys.beside[_ROWS].values[located.slots].astype(np.int64)
        after = before.copy()
        kernels.scatter_add(after, located.number, signs)
        return _Touched(located.slots, before, after, (located.number, logical_times, signs))

    def _move(self, touched: _Touched, own: Lifetimes) -> None:
        """Make the counts what they are after the micro-batch; where they stand beside rows, that is a write."""
        kernels, table = self._kernels, self._own
        self._keys.put(_ROWS, touched.slots, touched.after, touched.before)
        self._keys.end(touched.slots[touched.after == 0])
        if self._beside:
            number, rows = self._rows_of(touched.slots)
            table.add_counts(rows, (touched.after - touched.before)[number])
            new = as_slots(kernels, own.first_new, own.new)
            table.add_counts(new, self._numbers(self._keys_of(table, new)))

    def expire(self) -> None:
        """The counted input's rows that have expired are there no more."""
        gone, xp = self._counted.expired, self._kernels.xp
        if gone.size:
            keys = self._keys_of(self._counted, gone)
            keys = keys[keys >= 0]
            self._keys.add(_ROWS, keys, xp.full(keys.size, -1, np.int32))
            keys = distinct(self._kernels, keys.copy())
            self._keys.move(keys[self._keys.beside[_ROWS].values[keys] == 0], LIVE, DEAD)

    def per_batch(self, own: Lifetimes, other: Lifetimes, when: When) -> NetVisibility:
        """The net changes of visibility; moves the counts. Arguments as `per_event`."""
        xp, table = self._kernels.xp, self._own
        touched = self._touched(other)
        if when.barrier_moves(table):
            # every row may appear or disappear: nothing less than a pass tells which
            rows = xp.flatnonzero(table.status.values[: own.first_new] == LIVE)
            keys = self._keys_of(table, rows)
            before = self._numbers(keys)
        else:
            crosses = (touched.before == 0) ^ (touched.after == 0)
            at = xp.flatnonzero(crosses)
            number, rows = self._rows_of(touched.slots[at])
            keys, before = touched.slots[at[number]], touched.before[at[number]]
        died = self._numbers(self._keys_of(table, own.killed))
        if self._beside:
            table.fetch(rows)
            before, died = table.count[rows], table.count[own.killed]
        self._move(touched, own)
        after = table.count[rows] if self._beside else self._numbers(keys)
        new = as_slots(self._kernels, own.first_new, own.new)
        born = self._numbers(self._keys_of(table, new))
        return changes_per_batch(table, own, (rows, before, after), (born, died), when)

    def per_event(self, own: Lifetimes, other: Lifetimes, when: When) -> VisibilityChanges:
        """Every change of visibility in order of logical time; moves the counts.

        Args:
            own: the lifetimes of the rows whose count that is.
            other: those of the rows that are counted.
            when: rows are visible.
        """
        xp, table = self._kernels.xp, self._own
        touched = self._touched(other)
        switches = self._switches(touched)
        rows = xp.concatenate([own.killed, as_slots(self._kernels, own.first_new, own.new)])
        if when.barrier_moves(table):
            rows = xp.flatnonzero(table.status.values)
            keys = self._keys_of(table, rows)
        else:
            crossing = distinct(self._kernels, switches[0].copy())
            number, staying = self._rows_of(crossing)
            keys = xp.concatenate([self._keys_of(table, rows), crossing[number]])
            rows = xp.concatenate([rows, staying])
        matched = self._numbers(keys)
        begins, ends = self._spells(touched, switches, distinct(self._kernels, keys[matched > 0]))
        born, died = own.born(xp, rows), own.died(xp, rows)
        first = xp.searchsorted(ends, _packed(keys, born), side="right")
        count = xp.searchsorted(begins, _packed(keys, died)) - first
        was = matched > 0
        if self._beside:
            table.fetch(rows)
            was = table.count[rows] > 0
            count[(table.count[rows] > matched) & (rows < own.first_new)] = 0
        number, at = written_out(xp, first, count)
        begin, end = xp.maximum(born[number], _time(begins[at])), xp.minimum(died[number], _time(ends[at]))
        order = self._kernels.argsort(rows)
        was &= rows < own.first_new
        spells = Spells(
            rows[number],
            begin,
            end,
            xp.flatnonzero(begin != ALWAYS),
            xp.flatnonzero(end != NEVER),
            lambda asked: was[order][xp.searchsorted(rows[order], asked)],
        )
        changes = changes_per_event(table, own, spells, when)
        self._move(touched, own)
        return changes

    def _switches(self, touched: _Touched) -> tuple[Slots, LogicalTimes, Array]:
        """Finds when keys get their first row and lose their last: slots, by slot and logical time; times; ends or not.

        What an upsert takes and gives back within one change is left out.
        """
        number, logical_times, _ = touched.events
        crossed = crossings(self._kernels, touched.events, touched.before[number], None, net=False)
        return touched.slots[number[crossed.first]], logical_times[crossed.first], crossed.appears > 0

    def _spells(
        self, touched: _Touched, switches: tuple[Slots, LogicalTimes, Array], standing: Slots
    ) -> tuple[Array, Array]:
        """When keys begin and cease to have rows, as `_packed` has it: ascending, and the n-th end is the n-th begin's.

        Args:
            touched: the keys that the micro-batch touches.
            switches: what becomes of them.
            standing: keys that had rows before it, ascending; touched ones may be among them.
        """
        xp, (slots, logical_times, ceases) = self._kernels.xp, switches
        others = standing
        if standing.size and touched.slots.size:
            at = xp.minimum(xp.searchsorted(touched.slots, standing), touched.slots.size - 1)
            others = standing[touched.slots[at] != standing]
        before = xp.concatenate([touched.slots[touched.before > 0], others])
        after = xp.concatenate([touched.slots[touched.after > 0], others])
        begins = xp.concatenate([_packed(before, ALWAYS), _packed(slots[~ceases], logical_times[~ceases])])
        ends = xp.concatenate([_packed(after, NEVER), _packed(slots[ceases], logical_times[ceases])])
        return xp.sort(begins), xp.sort(ends)

    # --- the stored form ---------------------------------------------------------------------

    def fill(self, settle: Callable[[], None]) -> None:
        """Count the rows that there were before the micro-batch; ``settle``: called now and then."""
        kernels, counted = self._kernels, self._counted
        live = kernels.xp.flatnonzero(counted.status.values[: counted.first_new])
        rows = kernels.xp.concatenate([live, counted.expired])
        step = rows_at_once(kernels) if kernels.host is not None else max(1, int(rows.size))
        for at in range(0, int(rows.size), step):
            located = self._keys.locate(self._frame(self._counted, rows[at : at + step])[0])
            slots = located.slots[located.number]
            self._keys.add(_ROWS, slots, kernels.xp.ones(slots.size, np.int32))
            self._keys.commit(0)
            settle()

    def write_out(self) -> None:
        """Put beside the rows what a snapshot has there: the counts of all of them."""
        own = self._own
        if not self._beside:
            rows = self._kernels.xp.flatnonzero(own.status.values)
            own.count[rows] = self._numbers(self._keys_of(own, rows))


def _packed(keys: Slots, logical_times: LogicalTimes | int) -> Array:
    """Keys and logical times in one number that is sorted by both; of no key (-1) it is less than all others."""
    return (keys << _TIME_BITS) | (logical_times + 1)


def _time(packed: Array) -> LogicalTimes:
    return (packed & ((1 << _TIME_BITS) - 1)) - 1
