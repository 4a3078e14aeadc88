"""How much memory state may take, and what an engine does about it.

One budget counts for all engines of a process, on the GPU, on the host and on local disk. Beyond the GPU's part the
coldest state moves to host memory and is probed there (`gpu_ops.state.runs`), beyond the host's part to disk, from
where it is read (`gpu_ops.files.disk`); beyond that a micro-batch is refused before anything is lost. What fails for
want of GPU memory is begun again.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import pyarrow as pa

from gpu_ops.errors import DescriptionError, StateError, out_of_memory
from gpu_ops.files.disk import Disk, NoRoomError, faults, local_folders
from gpu_ops.kernels import Kernels
from gpu_ops.state.table import Coolable

if TYPE_CHECKING:
    from gpu_ops.operators.operator import InputTable, Operator

_log = logging.getLogger("gpu_ops")

Result = TypeVar("Result")

STATE_SHARE: Final = 0.6
"""The part of a GPU budget that state may take once a micro-batch is committed; the rest is room to work in."""

_AHEAD: Final = 1 / 8
"""The part of a host's budget that is freed beyond what has to be, so that not every micro-batch writes to disk."""

_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


_SMALL: Final = 1 << 26
"""Bytes for which nobody asks how much memory there is."""


class StateBytes(NamedTuple):
    """Bytes of state by where they lie."""

    gpu: int = 0
    host: int = 0
    disk: int = 0


class Budget:
    """The memory that the state of all engines that share it may take, together. Safe for threads.

    Args:
        gpu: bytes of GPU memory, working memory included; None for what the card has.
        host: bytes of host memory; None for no limit. What is more moves to disk.
        disk: bytes of local disk; None for what there is, 0 for none: then what is more than ``host`` is refused.
        folder: where on the disk, or several such folders, separated by commas; None for Spark's local folders where
            Spark says them, else the temporary folder.
    """

    def __init__(
        self, gpu: int | None = None, host: int | None = None, disk: int | None = None, folder: str | None = None
    ) -> None:
        for name, limit in (("gpu", gpu), ("host", host)):
            if limit is not None and limit <= 0:
                raise DescriptionError(f"a budget of {limit} bytes ({name}) is none; it is positive")
        if disk is not None and disk < 0:
            raise DescriptionError(f"a budget of {disk} bytes (disk) is none; it is positive, or 0 for no disk")
        self.gpu, self.host, self.disk, self.folder = gpu, host, disk, folder
        self._lock = threading.Lock()
        # by engine, and gone with it where nobody closes it
        self._used: weakref.WeakKeyDictionary[object, StateBytes] = weakref.WeakKeyDictionary()

    def charge(self, owner: object, taken: StateBytes) -> None:
        """Note what the state of one engine takes now.

        Args:
            owner: the engine.
            taken: by its state.
        """
        with self._lock:
            self._used[owner] = taken

    def release(self, owner: object) -> None:
        """Forget an engine, which gives all of it back."""
        with self._lock:
            self._used.pop(owner, None)

    @property
    def used(self) -> StateBytes:
        """Bytes of all engines, as last noted."""
        return self._others(None)

    def _others(self, owner: object) -> StateBytes:
        """Bytes of all engines but one."""
        with self._lock:
            there = [taken for engine, taken in self._used.items() if engine is not owner]
        return StateBytes(*(sum(bytes_) for bytes_ in zip(*there, strict=True)))

    def gpu_excess(self) -> int:
        """Bytes that have to leave the GPU, 0 if none."""
        return 0 if self.gpu is None else max(0, self.used.gpu - int(STATE_SHARE * self.gpu))

    def has_room_for(self, more: int) -> bool:
        """Tells whether more bytes of state on the GPU leave half of the state's share free."""
        return self.gpu is None or self.used.gpu + more <= STATE_SHARE * self.gpu / 2

    def disk_for(self, owner: object) -> Disk | None:
        """The disk of one engine; None where there is none to be used."""
        if self.disk == 0:
            return None
        left = (lambda: None) if self.disk is None else lambda: (self.disk or 0) - self._others(owner).disk
        return Disk(local_folders(self.folder), left)

    def host_excess(self, owner: object, host: int) -> int:
        """Bytes over the host's budget if one engine took ``host`` bytes of it, 0 if none."""
        if self.host is None:
            return 0
        return max(0, self._others(owner).host + host - self.host)

    def check_host(self, owner: object, host: int) -> None:
        """Refuse what would be too much.

        Raises:
            StateError: the host's budget is smaller.
        """
        if not self.host_excess(owner, host):
            return
        gc.collect()  # engines that nobody has any more may wait for it in cycles
        if self.host is None or not self.host_excess(owner, host):
            return
        others = self._others(owner).host
        raise StateError(
            f"the state of this engine would take {size_text(host)} of host memory"
            + (f", that of the engines that share its budget takes {size_text(others)}" if others else "")
            + f", and memory_limit is {size_text(self.host)} for all of it together"
            + ("" if self.disk == 0 else ", of which no more can go to disk")
            + "; give it more, use more partitions, or let old rows go with ttl="
        )


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
        self.disk = self.budget.disk_for(self)
        self._told = (0, 0)
        self._faults: int | None = None

    def bytes(self, tables: Sequence[InputTable]) -> StateBytes:
        """Bytes of state, by where they lie."""
        total, disk = sum(t.nbytes for t in tables), sum(t.disk_bytes for t in tables)
        host = total - disk if self._kernels.host is None else sum(t.host_bytes for t in tables)
        return StateBytes(total - host - disk, host, disk)

    def charge(self, tables: Sequence[InputTable]) -> StateBytes:
        """Note what the state takes now, and say it."""
        taken = self.bytes(tables)
        self.budget.charge(self, taken)
        return taken

    def release(self) -> None:
        """Give all of it back."""
        self.budget.release(self)

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
        """Refuse a prepared micro-batch whose state would find no room in any place.

        Raises:
            StateError: it would not.
        """
        taken = self.charge(tables)
        coming = min(taken.gpu, self.budget.gpu_excess())
        taken = self._to_disk(tables, taken, coming)
        self.budget.check_host(self, taken.host + coming)

    def _to_disk(self, tables: Sequence[InputTable], taken: StateBytes, coming: int = 0) -> StateBytes:
        """Move to disk what is over the host's budget.

        Args:
            tables: whose state moves.
            taken: by it now.
            coming: bytes that are about to come from the GPU.

        Returns:
            What is taken then.

        Raises:
            NoRoomError: there is no room for all of it.
        """
        excess = self.budget.host_excess(self, taken.host + coming)
        if not excess or self.disk is None:
            return taken
        try:
            make_room(tables, excess, self.disk, int((self.budget.host or 0) * _AHEAD))
        finally:
            taken = self.charge(tables)
            give_back()
        return taken

    def begin(self) -> None:
        """A micro-batch begins, in this thread; see `moved`."""
        if self.disk is not None:
            self.disk.micro_batch += 1
        self._faults = faults() if self.disk is not None and self.disk.used else None

    def moved(self) -> dict[str, int]:
        """Bytes written to disk since this was last asked, and pages that were waited for, as metrics."""
        now = (0, 0) if self.disk is None else (self.disk.written, self.disk.pages_read)
        (written, read), self._told = (new - old for new, old in zip(now, self._told, strict=True)), now
        read += 0 if self._faults is None else faults() - self._faults
        return {"disk_written_bytes": written, "disk_pages_read": read}

    def settle(self, tables: Sequence[InputTable]) -> None:
        """Keep memory free to work in: what is over the state's share of the GPU's moves to the host, or back.

        What is over the host's moves to disk. A full disk is no error here: `check` refuses the next micro-batch.
        """
        taken = self.charge(tables)
        if self._kernels.host is not None:
            excess = self.budget.gpu_excess()
            if excess:
                make_room(tables, excess)
            elif self.budget.has_room_for(taken.host + taken.disk):
                for table in tables:
                    table.warm()
            taken = self.charge(tables)
        try:
            self._to_disk(tables, taken)
        except NoRoomError as error:
            _log.warning("%s", error)

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
            freed = make_room(operator.tables, max(1, self.bytes(operator.tables).gpu // 2))
            self.charge(operator.tables)
            if not freed:
                raise StateError(
                    f"{what} needs more GPU memory than there is, and no state is left to move to the host ({why}); "
                    "give it more (memory_limit), or smaller micro-batches"
                )
            _log.warning("GPU memory ran out over %s (%s); %d bytes of state moved to the host", what, why, freed)


def give_back() -> None:
    """Give the system what our allocators have free: of 100 MB beside state that went to disk, it was 50."""
    pa.default_memory_pool().release_unused()
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


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


def disk_size(text: str) -> int:
    """An amount of disk: as `memory_size`, but no share, and 0 for none.

    Raises:
        DescriptionError: it is none.
    """
    found = 0 if text.strip() == "0" else memory_size(text)
    if isinstance(found, float):
        raise DescriptionError(f"{text!r} is no amount of disk; '100g' is, or 0 for none")
    return found


def size_text(size: int) -> str:
    """Writes a number of bytes for people."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 2**power:
            return f"{size / 2**power:,.1f} {unit}"
    return f"{size} B"


def make_room(tables: Sequence[Coolable], wanted: int, disk: Disk | None = None, ahead: int = 0) -> int:
    """Move state one place further, the coldest first, until so much is freed or nothing is left to move.

    Args:
        tables: of one engine.
        wanted: bytes of GPU memory, or with a disk of the host's.
        disk: where what is in host memory goes; None to move what is in GPU memory to the host's.
        ahead: bytes more, where rows or indexes have them: numbers beside rows go only if they must.

    Returns:
        Bytes freed.

    Raises:
        NoRoomError: the disk is full.
    """
    freed = 0
    ways: tuple[tuple[int, Callable[[Coolable, int], int]], ...] = (
        (wanted + ahead, lambda table, more: table.cool_rows(more, disk)),
        (wanted + ahead, lambda table, more: table.cool_indexes(more, disk)),
        (wanted, lambda table, more: 0 if disk is None else table.cool_numbers(more, disk)),
    )
    for most, way in ways:
        movable = list(tables)
        while freed < most and movable:
            largest = max(
                movable, key=lambda t: t.nbytes - t.host_bytes - t.disk_bytes if disk is None else t.host_bytes
            )
            moved = way(largest, most - freed)
            freed += moved
            if not moved:
                movable.remove(largest)
    return freed
