"""The index of a state table: from the hash of a key to the slots of its rows.

A short list of immutable sorted runs, merged geometrically like the levels of an LSM tree (O'Neil
et al. 1996), so that a micro-batch costs what it adds, amortised, never a pass over the state. An
entry is one uint64: the upper half of the row's hash, then its slot; sorting entries sorts by hash
and, within a hash, by slot. Each run has a directory of hash prefixes, so a lookup is one jump and a
short scan, without a search. Hashes may collide: callers verify candidates by real equality.

Rows of the current micro-batch are *staged* in a run of their own until it is committed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from gpu_ops.kernels import Array, Kernels

SLOT_BITS = 32
MAX_SLOTS = (1 << SLOT_BITS) - 2

# A run is merged into the one before while that one is at most this many times as large. In 100k-change micro-batches
# up to 6M rows 1, 2, 4 and 8 took 2.6, 2.7, 2.6 and 3.0 s in all; with 4 a lookup has the fewest runs to look in.
_GROWTH = 4
# Entries per directory bucket, on average: at most this many. 1, 2 and 4: 1.6, 1.45 and 1.35M changes/s,
# for 4, 2 and 1 bytes per row.
_BUCKET = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """Entries in ascending order and where each hash prefix begins among them."""

    entries: Array
    directory: Array
    shift: int

    @property
    def nbytes(self) -> int:
        """Bytes of both arrays."""
        return int(self.entries.nbytes + self.directory.nbytes)


class HashIndex:
    """Slots by hash."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._xp: Any = kernels.xp
        self.runs: list[Run] = []
        self.staged: Run | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all runs."""
        return sum(r.nbytes for r in self.runs) + (self.staged.nbytes if self.staged else 0)

    def stage(self, hashes: Array, slots: Array) -> None:
        """Make rows findable, until `commit` for good or `discard` not at all.

        Args:
            hashes: n uint64.
            slots: n int64, ascending.
        """
        if slots.size:
            entries = (hashes & np.uint64(0xFFFFFFFF00000000)) | slots.view(np.uint64)
            self.staged = self._run(self._xp.sort(entries))

    def commit(self) -> None:
        """Keep the staged rows."""
        if self.staged is None:
            return
        self.runs.append(self.staged)
        self.staged = None
        merged = self.runs.pop()
        pending = [merged.entries]
        size = merged.entries.size
        while self.runs and self.runs[-1].entries.size <= _GROWTH * size:
            run = self.runs.pop()
            pending.append(run.entries)
            size += run.entries.size
        if len(pending) > 1:
            # Two sorted runs: a stable sort merges them in one linear pass (timsort).
            entries = pending[0]
            for other in pending[1:]:
                entries = self._xp.sort(self._xp.concatenate([other, entries]), kind="stable")
            merged = self._run(entries)
        self.runs.append(merged)

    def discard(self) -> None:
        """Forget the staged rows."""
        self.staged = None

    def probe(self, hashes: Array, *, staged: bool) -> tuple[Array, Array]:
        """Candidates for each of n hashes.

        Args:
            hashes: n uint64, in any order.
            staged: whether staged rows are candidates too.

        Returns:
            Positions of needles and candidate slots (int64), ordered by needle, then by slot.
        """
        xp = self._xp
        upper = hashes >> np.uint64(32)
        runs = [*self.runs, self.staged] if staged and self.staged is not None else self.runs
        found = [self._kernels.search(r.entries, r.directory, r.shift, upper) for r in runs]
        found = [f for f in found if f[0].size]
        if not found:
            return xp.empty(0, np.int64), xp.empty(0, np.int64)
        if len(found) == 1:
            return found[0]
        needles, slots = (xp.concatenate(parts) for parts in zip(*found, strict=True))
        # One key per pair, sorted as a value: cheaper than an argsort and two gathers.
        keys = xp.sort((needles << SLOT_BITS) | slots)
        return keys >> SLOT_BITS, keys & ((1 << SLOT_BITS) - 1)

    def renumber(self, new_slots: Array) -> None:
        """Follow a compaction.

        Args:
            new_slots: int64, the new slot of each old one, ascending, -1 for slots that went.
        """
        mask = np.uint64((1 << SLOT_BITS) - 1)
        kept = []
        for run in self.runs:
            slots = new_slots[(run.entries & mask).view(np.int64)]
            alive = slots >= 0
            entries = (run.entries[alive] & ~mask) | slots[alive].view(np.uint64)
            if entries.size:
                kept.append(self._run(entries))
        self.runs = kept

    def _run(self, entries: Array) -> Run:
        return Run(entries, *make_directory(self._xp, entries))


def make_directory(xp: Any, entries: Array) -> tuple[Array, int]:
    """Where each hash prefix begins among ascending entries, and by how much a hash is shifted to be one."""
    bits = max(1, int(entries.size // _BUCKET).bit_length())
    shift = 32 - bits
    prefixes = (entries >> np.uint64(32 + shift)).view(np.int64)
    directory = xp.zeros((1 << bits) + 1, np.int32)
    xp.cumsum(xp.bincount(prefixes, minlength=1 << bits), dtype=np.int32, out=directory[1:])
    return directory, shift
