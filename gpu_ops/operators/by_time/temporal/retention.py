"""State TTL of a temporal join, after Flink's ``BaseTwoInputStreamOperatorWithStateRetention``.

Law: a key has one clean-up time. What comes for the key, and a firing of its timer that leaves anything of it, set that
time to 1.5 TTL from now, unless it is a TTL away or more as it is: so it is moved once in half a TTL at most. A firing
that leaves nothing takes it away. When the clock reaches it, all that there is of the key goes: left rows that wait,
without coming out, and versions. The clock is that of the micro-batch, and moves before the watermark.

Not taken over: in Flink the timer of a key that went so stays registered, and when it fires it counts for the
rows that the key has by then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa

from gpu_ops.arrays import Array, Hashes, Positions, Slots
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.times import AFTER_ALL, BEFORE_ALL, clipped
from gpu_ops.kernels import Columns, Frame, Kernels
from gpu_ops.operators.core.groups import Groups
from gpu_ops.operators.core.match import match
from gpu_ops.state.columns import DEAD, LIVE, KeySet
from gpu_ops.state.interval_table import IntervalTable

CLEANUP = "__cleanup"
"""Beside the rows of a snapshot: the clean-up time of their key."""


class Retention:
    """The clean-up times of keys, ms since the epoch; of several rows of a key the one that is alive has it.

    Args:
        kernels: the backend.
        types: what keys are compared as.
        ttl_ms: the TTL.
    """

    def __init__(self, kernels: Kernels, types: Sequence[pa.DataType], ttl_ms: int) -> None:
        self.kernels, self.ttl = kernels, ttl_ms
        names = tuple(f"key_{number}" for number in range(len(types)))
        self.schema = pa.schema(list(zip(names, types, strict=True)))
        self.table = IntervalTable(kernels, Input("keys", self.schema), KeySet(names, tuple(types), ()))

    def begin(self, clock_ms: int) -> Slots:
        """Prepare a micro-batch: the keys whose clean-up time has come, which are gone from here on."""
        self.table.begin()
        slots = self.table.due.take(clock_ms)
        slots = slots[self.table.status.values[slots] == LIVE]
        self.table.move(slots, LIVE, DEAD)
        return slots

    def keys(self, slots: Slots) -> tuple[Columns, Hashes]:
        """Keys, and their hashes."""
        frame = self.table.take_keys(slots)
        return Columns(frame, self.table.keys), self.table.hash_keys(frame)

    def found(self, own: Columns, hashes: Hashes) -> tuple[Positions, Slots]:
        """Of keys those that have a clean-up time, by number, and their slots."""
        return rows_of(self.table, own, hashes)

    def forget(self, slots: Slots) -> None:
        """Take away clean-up times."""
        self.table.move(slots, LIVE, DEAD)

    def touch(self, frames: Iterable[tuple[Frame, tuple[str, ...], pa.Schema]], fired: Slots, clock_ms: int) -> None:
        """Set the clean-up times of keys, where they are not far enough away.

        Args:
            frames: keys of rows that came, in the columns of their input.
            fired: keys that have fired, and of which something is left.
            clock_ms: now.
        """
        table, parts = self.table, [self._plain(*each) for each in frames]
        soon = clipped(clock_ms + self.ttl)
        again = fired[table.time[fired] < soon]
        if again.size:
            parts.append(self.kernels.to_arrow(table.take_keys(again), self.schema))
        frame, hashes, leader = self._distinct(parts)
        if not leader.size:
            return
        xp, until = self.kernels.xp, clipped(clock_ms + 3 * self.ttl // 2)
        number, slots = self.found(Columns(frame, table.keys), hashes)
        late = table.time[slots] < soon
        stays = xp.zeros(leader.size, bool)
        stays[number[~late]] = True
        self.forget(slots[late])
        self._stage(frame, hashes, xp.full(leader.size, until, np.int64), xp.flatnonzero(~stays))

    def times(self, frame: Frame, columns: tuple[str, ...], schema: pa.Schema) -> Array:
        """The clean-up time of each row's key, for a snapshot."""
        own = self.kernels.frame(self._plain(frame, columns, schema))
        number, slots = self.found(Columns(own, self.table.keys), self.table.hash_keys(own))
        times = self.kernels.xp.zeros(self.kernels.num_rows(frame), np.int64)
        times[number] = self.table.time[slots]
        return times

    def restore(self, frames: Iterable[tuple[Frame, tuple[str, ...], pa.Schema, Array]]) -> None:
        """Take over what a snapshot has of it: keys in the columns of their input, and what `times` gave of them."""
        given = list(frames)
        frame, hashes, leader = self._distinct([self._plain(*each[:3]) for each in given])
        times = self.kernels.xp.concatenate([each[3] for each in given])[leader]
        self.table.begin()
        self._stage(frame, hashes, times, self.kernels.xp.arange(leader.size, dtype=np.int64))
        self.table.commit(0)

    def _stage(self, frame: Frame, hashes: Hashes, times: Array, rows: Array) -> None:
        table = self.table
        if rows.size:
            frame = self.kernels.take(frame, rows, table.keys, present=True)
            table.stage(frame, hashes[rows], times[rows], None, None)

    def _plain(self, frame: Frame, columns: tuple[str, ...], schema: pa.Schema) -> pa.Table:
        """Keys in the types they are compared in."""
        found = self.kernels.to_arrow(frame, pa.schema([schema.field(name) for name in columns]))
        return found.rename_columns(self.schema.names).cast(self.schema)

    def _distinct(self, parts: Sequence[pa.Table]) -> tuple[Frame, Hashes, Array]:
        """Keys, each once, their hashes, and which of all rows each of them was."""
        kernels, table = self.kernels, self.table
        frame = kernels.frame(pa.concat_tables([self.schema.empty_table(), *parts]))
        hashes = table.hash_keys(frame)
        leader = kernels.xp.sort(Groups(kernels, frame, table.keys, table.key_types, hashes).leader)
        return kernels.take(frame, leader, table.keys, present=True), hashes[leader], leader


def rows_of(table: IntervalTable, own: Columns, hashes: Hashes) -> tuple[Positions, Slots]:
    """The committed rows of n keys: the number of the key, and the slot, of each."""
    xp = table.kernels.xp
    earliest, latest = (xp.full(hashes.size, time, np.int64) for time in (BEFORE_ALL, AFTER_ALL))
    return match(
        table.kernels,
        table.index.probe(hashes, earliest, latest, staged=False),
        table.key_types,
        (own, Columns(table.store, table.keys)),
        alive=lambda _, slots: table.status.values[slots] == LIVE,
    )
