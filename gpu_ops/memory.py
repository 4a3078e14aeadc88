"""How much memory state may take, and what an engine does about it.

One budget counts for all engines of a process, on the GPU and on the host. Beyond the GPU's part the coldest state
moves to host memory and is probed there (`gpu_ops.state.index`); beyond the host's a micro-batch is refused before
anything is lost. What fails for want of GPU memory is begun again.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from gpu_ops.errors import DescriptionError, StateError, out_of_memory
from gpu_ops.kernels import Kernels
from gpu_ops.state.table import Coolable

if TYPE_CHECKING:
    from gpu_ops.operators.operator import InputTable, Operator

_log = logging.getLogger("gpu_ops")

Result = TypeVar("Result")

STATE_SHARE: Final = 0.6
"""The part of a GPU budget that state may take once a micro-batch is committed; the rest is room to work in."""

_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


_SMALL: Final = 1 << 26
"""Bytes for which nobody asks how much memory there is."""


class Budget:
    """What the state of all engines that share it may take, together. Safe for threads.

    Args:
        gpu: bytes of GPU memory, working memory included; None for what the card has.
        host: bytes of host memory; None for no limit.
    """

    def __init__(self, gpu: int | None = None, host: int | None = None) -> None:
        for name, limit in (("gpu", gpu), ("host", host)):
            if limit is not None and limit <= 0:
                raise DescriptionError(f"a budget of {limit} bytes ({name}) is none; it is positive")
        self.gpu, self.host = gpu, host
        self._lock = threading.Lock()
        self._used: dict[int, tuple[int, int]] = {}

    def charge(self, owner: object, gpu: int, host: int) -> None:
        """Note what the state of one engine takes now.

        Args:
            owner: the engine.
            gpu: bytes of GPU memory.
            host: bytes of host memory.
        """
        with self._lock:
            self._used[id(owner)] = gpu, host

    def release(self, owner: object) -> None:
        """Forget an engine, which gives all of it back."""
        with self._lock:
            self._used.pop(id(owner), None)

    @property
    def used(self) -> tuple[int, int]:
        """Bytes of all engines on the GPU and on the host, as last noted."""
        with self._lock:
            gpu, host = zip(*self._used.values(), strict=True) if self._used else ((), ())
            return sum(gpu), sum(host)

    def gpu_excess(self) -> int:
        """Bytes that have to leave the GPU, 0 if none."""
        return 0 if self.gpu is None else max(0, self.used[0] - int(STATE_SHARE * self.gpu))

    def has_room_for(self, more: int) -> bool:
        """Whether more bytes of state on the GPU leave half of the state's share free."""
        return self.gpu is None or self.used[0] + more <= STATE_SHARE * self.gpu / 2

    def host_excess(self, owner: object, host: int) -> int:
        """Bytes over the host's budget if one engine took ``host`` bytes of it, 0 if none."""
        if self.host is None:
            return 0
        with self._lock:
            others = sum(bytes_ for key, (_, bytes_) in self._used.items() if key != id(owner))
        return max(0, others + host - self.host)


class Memory:
    """An engine's part of a budget.

    Args:
        kernels: the engine's backend.
        limit: bytes of the backend's memory, or a budget, which others may share; None for what there is.
    """

    def __init__(self, kernels: Kernels, limit: int | Budget | None) -> None:
        self._kernels, on_gpu = kernels, kernels.host is not None
        self.budget = limit if isinstance(limit, Budget) else Budget(host=None if on_gpu else limit)
        if on_gpu and self.budget.gpu is None:
            self.budget.gpu = kernels.memory_limit

    @staticmethod
    def bytes(tables: Sequence[InputTable]) -> tuple[int, int]:
        """Bytes of state in GPU memory and in the host's."""
        host = sum(t.host_bytes for t in tables)
        return sum(t.nbytes for t in tables) - host, host

    def charge(self, tables: Sequence[InputTable]) -> None:
        """Note what the state takes now."""
        self.budget.charge(self, *self.bytes(tables))

    def release(self) -> None:
        """Give all of it back."""
        self.budget.release(self)

    def too_much(self, host: int) -> bool:
        """Whether so many bytes are more than the host's budget has left."""
        return self.budget.host_excess(self, host) > 0

    def check_output(self, rows: int, row_bytes: float) -> None:
        """Refuse an output of so many rows, of about so many bytes each, before it is made.

        What the GPU's memory has no room for is known when it has none left; here, the system would end the process.

        Raises:
            StateError: it is larger than the host's budget, or than what the machine has left.
        """
        size, limit = int(rows * row_bytes), self.budget.host
        if self._kernels.host is not None:
            return
        there = available_memory() if size >= _SMALL else None
        if limit is not None and size > limit:
            what = f"memory_limit is {size_text(limit)}"
        elif there is not None and size > there:
            what = f"this machine has {size_text(there)} left"
        else:
            return
        raise StateError(
            f"this micro-batch has an output of {rows:,} rows or more, which take about {size_text(size)}, and {what}: "
            "a key has many rows on both sides. Give smaller micro-batches, more memory, or a condition that tells "
            "its rows apart; nothing has changed"
        )

    def check(self, tables: Sequence[InputTable]) -> None:
        """Refuse a prepared micro-batch whose state would find no room in either memory.

        Raises:
            StateError: it would not.
        """
        gpu, host = self.bytes(tables)
        self.budget.charge(self, gpu, host)
        host += min(gpu, self.budget.gpu_excess())
        if self.too_much(host):
            raise StateError(
                f"the state would take {host} bytes of host memory, memory_limit is {self.budget.host} for all state "
                "of this process; give it more, use more partitions, or let old rows go with ttl="
            )

    def settle(self, tables: Sequence[InputTable]) -> None:
        """Keep GPU memory free to work in: what is over the state's share of it moves to the host, or back."""
        self.charge(tables)
        if self._kernels.host is None:
            return
        excess = self.budget.gpu_excess()
        if excess:
            make_room(tables, excess)
        elif self.budget.has_room_for(self.bytes(tables)[1]):
            for table in tables:
                table.warm()
        self.charge(tables)

    def within(
        self, what: str, operator: Operator, work: Callable[[], Result], undo: Callable[[], None] | None = None
    ) -> Result:
        """Do what can be begun again; when the GPU's memory runs out, again after moving state to the host.

        Args:
            what: it is, for errors.
            operator: whose state moves.
            work: does it.
            undo: what has to come before it is begun again, if anything; it goes on where it was after an error.

        Raises:
            StateError: nothing is left to move.
        """
        while True:
            try:
                return work()
            except Exception as error:
                if self._kernels.host is None or not out_of_memory(error):
                    raise
                why = str(error) or type(error).__name__
            # Out of the handler: the error held on to the memory of all that was in the works.
            if undo is not None:
                self.within(f"taking back {what}", operator, undo)
            freed = make_room(operator.tables, max(1, self.bytes(operator.tables)[0] // 2))
            self.charge(operator.tables)
            if not freed:
                raise StateError(
                    f"{what} needs more GPU memory than there is, and no state is left to move to the host ({why}); "
                    "give it more (memory_limit), or smaller micro-batches"
                )
            _log.warning("GPU memory ran out over %s (%s); %d bytes of state moved to the host", what, why, freed)


def available_memory() -> int | None:
    """Bytes that this process may still take before the system ends it; None where the system does not say."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) << 10
        with contextlib.suppress(OSError, ValueError):  # no control group, or one without a limit
            group = Path("/sys/fs/cgroup")
            limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
            files = re.search(r"^inactive_file (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
            free = min(free, limit - used + (int(files[1]) if files else 0))
        return free
    return None


def memory_size(text: str) -> int | float:
    """An amount of memory: bytes as an int, or a share of what there is as a float between 0 and 1.

    Args:
        text: ``"512m"``, ``"40g"``, ``"1000000"``, or ``"0.4"``.

    Raises:
        DescriptionError: it is neither.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?\s*", text.lower())
    if found is not None:
        number, unit = float(found[1]), found[2]
        if not unit and "." in found[1]:
            if 0 < number <= 1:
                return number
        elif number * _UNITS[unit] >= 1:
            return int(number * _UNITS[unit])
    raise DescriptionError(f"{text!r} is no amount of memory; '40g', '512m' or a share such as '0.4' are")


def size_text(size: int) -> str:
    """Bytes for people."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 2**power:
            return f"{size / 2**power:,.1f} {unit}"
    return f"{size} B"


def make_room(tables: Sequence[Coolable], wanted: int) -> int:
    """Move state to the host, the coldest first, until so much is freed or nothing is left to move.

    Args:
        tables: of one engine.
        wanted: bytes of GPU memory.

    Returns:
        Bytes freed.
    """
    freed = 0
    ways: tuple[Callable[[Coolable], int], ...] = (lambda t: t.cool_rows(), lambda t: t.cool_indexes())
    for way in ways:
        movable = list(tables)
        while freed < wanted and movable:
            largest = max(movable, key=lambda t: t.nbytes - t.host_bytes)
            moved = way(largest)
            freed += moved
            if not moved:
                movable.remove(largest)
    return freed
