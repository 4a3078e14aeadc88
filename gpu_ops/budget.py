"""How much memory state may take: one budget for all engines of a process, on the GPU and on the host.

Beyond the GPU's part the coldest state moves to host memory and is probed there (`gpu_ops.state.cold`); beyond the
host's a micro-batch is refused before anything is lost.
"""

from __future__ import annotations

import re
import threading
from typing import Final

from gpu_ops.errors import DescriptionError, StateError

STATE_SHARE: Final = 0.6
"""The part of a GPU budget that state may take once a micro-batch is committed; the rest is room to work in."""

_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


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

    def check_host(self, owner: object, host: int) -> None:
        """Refuse what would be too much.

        Raises:
            StateError: the host's budget is smaller.
        """
        if self.host_excess(owner, host):
            raise StateError(
                f"the state would take {host} bytes of host memory, memory_limit is {self.host} for all state of "
                "this process; give it more, use more partitions, or let old rows go with ttl="
            )


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


def readable(size: int) -> str:
    """Bytes for people."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 2**power:
            return f"{size / 2**power:,.1f} {unit}"
    return f"{size} B"
