"""Sorted runs, merged geometrically like the levels of an LSM tree (O'Neil et al. 1996): what all indexes are made of.

A micro-batch's run is *staged* until it is committed. The oldest runs may have moved to host memory
(`gpu_ops.state.cold`); they are searched and merged there.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from gpu_ops.arrays import Array, Slots
from gpu_ops.kernels import Kernels, SearchedRun
from gpu_ops.state.cold import Both, postponed


class AnyRun(SearchedRun, Protocol):
    """Immutable entries in ascending order, and what stands beside them."""

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""

    @property
    def home(self) -> Kernels:
        """The backend in whose memory it lies."""


R = TypeVar("R", bound=AnyRun)


class Runs(abc.ABC, Generic[R]):
    """An index as a short list of runs, oldest first.

    Args:
        kernels: the backend.
    """

    growth: int
    """A run is merged into the one before while that one is at most this many times as large."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._xp: Any = kernels.xp
        self.runs: list[R] = []
        self.staged: R | None = None

    @staticmethod
    @abc.abstractmethod
    def _merged(older: R, newer: R) -> R:
        """One run of two of one memory."""

    @staticmethod
    @abc.abstractmethod
    def _moved(run: R, copy: Callable[[Array], Array], home: Kernels) -> R:
        """The run in another memory; ``copy`` takes an array there."""

    @abc.abstractmethod
    def renumbered(self, new_slots: Slots) -> Runs[R]:
        """Another index that follows a compaction.

        Args:
            new_slots: int64, the new slot of each old one, ascending, -1 for slots that went.
        """

    @property
    def nbytes(self) -> int:
        """Bytes of all runs."""
        return sum(r.nbytes for r in self.runs) + (self.staged.nbytes if self.staged else 0)

    @property
    def host_bytes(self) -> int:
        """Bytes of the runs that lie in host memory."""
        return sum(r.nbytes for r in self.runs if r.home.host is None)

    def commit(self) -> None:
        """Keep the staged rows."""
        if self.staged is None:
            return
        self.runs.append(self.staged)
        self.staged = None
        with postponed(self._kernels, "merging an index"):
            while len(self.runs) > 1 and self._grows(self.runs[-2], self.runs[-1]):
                self.runs[-2:] = [self._merged(*self.runs[-2:])]

    def _grows(self, run: R, added: R) -> bool:
        """Whether a run and the one after it become one."""
        most = self._kernels.piece_bytes
        small = most is None or run.nbytes + added.nbytes <= most
        return small and run.home is self._kernels and self._near(run, added)

    def _near(self, run: R, added: R) -> bool:
        return bool(run.entries.size <= self.growth * added.entries.size)

    def found(
        self,
        runs: Sequence[R],
        needles: Array,
        times: tuple[Array, Array] | None = None,
        *,
        by_candidate: bool = False,
        at_most: int | None = None,
    ) -> Array:
        """Candidates in some of the runs, in whichever memory each lies; see `gpu_ops.kernels.Kernels.search`."""
        pairs = []
        given = [Both(self._kernels, array) for array in (needles, *(times or ()))]
        for home in (self._kernels.host, self._kernels):
            there = [run for run in runs if run.home is home]
            if home is not None and there:
                own, *span = (array.at(home) for array in given)
                within = (span[0], span[1]) if times is not None else None
                found = home.search(there, own, within, by_candidate=by_candidate, at_most=at_most)
                at_most = None if at_most is None else at_most - int(found.size)
                pairs.append(found if home is self._kernels else self._kernels.asarray(found))
        if len(pairs) == 1:
            return pairs[0]
        return self._xp.concatenate([self._xp.empty(0, np.int64), *pairs])

    def discard(self) -> None:
        """Forget the staged rows."""
        self.staged = None

    def cool(self) -> int:
        """Move the oldest run in GPU memory to the host's; the bytes freed, 0 if none is there."""
        host = self._kernels.host
        number = sum(r.home is host for r in self.runs)
        if host is None or number == len(self.runs):
            return 0
        run = self.runs[number]
        self.runs[number] = self._moved(run, self._kernels.asnumpy, host)
        while number and self._near(self.runs[number - 1], self.runs[number]):
            number -= 1
            self.runs[number : number + 2] = [self._merged(*self.runs[number : number + 2])]
        return run.nbytes

    def warm(self) -> None:
        """Move all runs back to GPU memory."""
        for number, run in enumerate(self.runs):
            if run.home is not self._kernels:
                self.runs[number] = self._moved(run, self._kernels.asarray, self._kernels)
