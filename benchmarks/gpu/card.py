"""Measuring on a card: its name and driver, timers, the copy bandwidth that figures are held against, a time budget.

Times are CUDA events on the default stream, which both libraries use. A figure is the median of some rounds after a
warm-up, over inputs that change from round to round, so that no cache answers.
"""

from __future__ import annotations

import dataclasses
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.common import Summary, summarise
from gpu_ops.arrays import Array
from gpu_ops.kernels import Frame, Kernels

SECTOR = 32
"""Bytes that the card reads at least, wherever one byte is needed."""
INPUTS = 8
"""Input sets that rounds take in turns; eight sets of a million rows are more than a card's second-level cache."""


WARMUPS = 2


class Clock:
    """A time budget, and the rest of it.

    Args:
        seconds: the budget; None for no end.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds

    def left(self) -> float:
        """Seconds left, infinite without a budget, negative when it is spent."""
        return float("inf") if self._end is None else self._end - time.monotonic()

    def lacks(self, seconds: float) -> str | None:
        """Why something that takes so many seconds is left out; None if there is time for it."""
        return None if self.left() >= seconds else f"time: {seconds:.0f} s needed, {max(0.0, self.left()):.0f} s left"


def synchronize() -> None:
    """Wait for the card."""
    import cupy as cp

    cp.cuda.Device().synchronize()


def elapsed_ms(work: Callable[[], object]) -> float:
    """Milliseconds between two events around some work."""
    import cupy as cp

    start, end = cp.cuda.Event(), cp.cuda.Event()
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(cp.cuda.get_elapsed_time(start, end))


def device_ms(works: Sequence[Callable[[], object]], rounds: int) -> Summary:
    """Milliseconds of the card's work per round, each round on the next of the inputs.

    Args:
        works: the same work on different inputs; the first `WARMUPS` of them are done before the first round.
        rounds: how many are kept, at least one.
    """
    for work in works[:WARMUPS]:
        work()
    return summarise(elapsed_ms(works[number % len(works)]) for number in range(max(1, rounds)))


def figure(ms: Summary, moved: int, bandwidth: float | None) -> dict[str, Any]:
    """A time with the bytes it must move and its share of what a plain copy reaches.

    Args:
        ms: milliseconds.
        moved: bytes read and written at least, random accesses counted as whole sectors.
        bandwidth: bytes per second of a copy, read and written; None if it was not measured.
    """
    rate = moved / (ms.median / 1e3) if ms.median else 0.0
    return {
        "ms": ms,
        "bytes": int(moved),
        "gb_per_second": rate / 1e9,
        "share_of_copy_bandwidth": rate / bandwidth if bandwidth else None,
    }


@dataclasses.dataclass(frozen=True)
class Plan:
    """The settings of a measurement: repetitions, bandwidth, time budget.

    Attributes:
        rounds: timed repetitions of a piece of work.
        bandwidth: bytes per second of a copy; None if it was not measured.
        clock: the time budget.
    """

    rounds: int = 9
    bandwidth: float | None = None
    clock: Clock = dataclasses.field(default_factory=Clock)

    def figure(self, works: Sequence[Callable[[], object]], moved: int) -> dict[str, Any]:
        """The card's time for the same work on different inputs; see `device_ms` and `figure`."""
        return figure(device_ms(works, self.rounds), moved, self.bandwidth)


def device() -> dict[str, Any]:
    """The card, its driver and CUDA's versions, and its memory."""
    import cupy as cp

    runtime = cp.cuda.runtime
    properties = runtime.getDeviceProperties(cp.cuda.Device().id)
    free, total = runtime.memGetInfo()
    return {
        "name": properties["name"].decode(),
        "compute_capability": f"{properties['major']}.{properties['minor']}",
        "memory_gib": round(total / 2**30, 1),
        "free_gib": round(free / 2**30, 1),
        "driver": driver(),
        "driver_cuda": runtime.driverGetVersion(),
        "runtime_cuda": runtime.runtimeGetVersion(),
    }


def driver() -> str | None:
    """The driver's version; None where nvidia-smi does not say."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return said[0] if said else None


def free_bytes() -> int:
    """Bytes of the card that nobody holds."""
    import cupy as cp

    return int(cp.cuda.runtime.memGetInfo()[0])


def lacks_memory(needed: int, free: int) -> str | None:
    """Why something of this size is left out; None if it fits."""
    if needed <= free:
        return None
    return f"memory: about {needed / 2**30:.1f} GiB needed, {free / 2**30:.1f} GiB free"


def copy_bandwidth(kernels: Kernels, size: int, rounds: int) -> dict[str, Any]:
    """Bytes per second of a copy within the card's memory.

    Args:
        kernels: the GPU backend.
        size: bytes of the array copied; many times the cache.
        rounds: how many copies.
    """
    xp = kernels.xp
    source, target = xp.arange(size // 8, dtype=np.int64), xp.empty(size // 8, np.int64)

    def copy() -> None:
        target[:] = source

    ms = device_ms([copy], rounds)
    moved = 2 * source.nbytes
    return {"ms": ms, "bytes": moved, "bytes_per_second": moved / (ms.median / 1e3)}


def device_frame(columns: Mapping[str, Array], types: Mapping[str, pa.DataType]) -> Frame:
    """A frame over arrays that are on the card already.

    Args:
        columns: n values each.
        types: their Arrow types.
    """
    from gpu_ops.cudf_backend.frame import Frame as CudfFrame
    from gpu_ops.cudf_backend.frame import from_values

    length = next(iter(columns.values())).size
    return CudfFrame(int(length), {name: from_values(values) for name, values in columns.items()}, dict(types))
