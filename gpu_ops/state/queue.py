"""A queue of slots by time: what is due is found without a look at the rest."""

from __future__ import annotations

import dataclasses

import numpy as np

from gpu_ops.arrays import Array, Slots
from gpu_ops.kernels import Kernels


@dataclasses.dataclass(frozen=True)
class _Chunk:
    times: Array
    """Ascending."""
    slots: Slots


class TimeQueue:
    """Slots by time, earliest first; taking what is due costs what is due."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._chunks: list[_Chunk] = []
        self._left: list[_Chunk] | None = None
        self._added: _Chunk | None = None

    def take(self, until: int) -> Slots:
        """All slots of times up to ``until``, inclusive; for good with `commit`, not at all with `discard`."""
        xp = self._kernels.xp
        found, left = [xp.empty(0, np.int64)], []
        for chunk in self._chunks:
            due = int(xp.searchsorted(chunk.times, until, side="right"))
            found.append(chunk.slots[:due])
            if due < chunk.slots.size:
                left.append(_Chunk(chunk.times[due:], chunk.slots[due:]) if due else chunk)
        self._left = left
        return xp.concatenate(found)

    def add(self, times: Array, slots: Slots) -> None:
        """More slots, in any order; they count from the next micro-batch on."""
        if slots.size:
            order = self._kernels.xp.argsort(times)
            self._added = _Chunk(times[order], slots[order])

    def commit(self) -> None:
        """Make the last `take` and `add` final; a `MemoryError` on the way leaves them to be committed again."""
        if self._left is None and self._added is None:
            return
        chunks = self._chunks if self._left is None else self._left
        if self._added is not None:
            chunks = [*chunks, self._added]
            while len(chunks) > 1 and chunks[-2].slots.size <= chunks[-1].slots.size:
                chunks[-2:] = [self._merged(*chunks[-2:])]
        self._chunks = chunks
        self.discard()

    def _merged(self, older: _Chunk, newer: _Chunk) -> _Chunk:
        xp = self._kernels.xp
        times = xp.concatenate([older.times, newer.times])
        order = self._kernels.argsort(times)
        return _Chunk(times[order], xp.concatenate([older.slots, newer.slots])[order])

    def discard(self) -> None:
        """Forget the last `take` and `add`."""
        self._left = self._added = None

    def renumbered(self, new_slots: Slots) -> TimeQueue:
        """Another queue that follows a compaction; slots that went are -1."""
        queue = TimeQueue(self._kernels)
        for chunk in self._chunks:
            slots = new_slots[chunk.slots]
            kept = slots >= 0
            if bool(kept.any()):
                queue._chunks.append(_Chunk(chunk.times[kept], slots[kept]))
        return queue
