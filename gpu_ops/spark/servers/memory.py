"""The memory that a state server may use, from the words of its command line."""

from __future__ import annotations

import logging
import os

from gpu_ops.memory import Budget, memory_size

_log = logging.getLogger(__name__)


def server_budget(gpu: str | None, host: str | None) -> Budget:
    """The budget that all partitions of a server share.

    Args:
        gpu: an amount, or a share of the card's whole memory; None for what the card has free.
        host: an amount, or a share of the machine's memory; None for no limit.

    Raises:
        DescriptionError: one is no amount of memory.
    """
    on_card = None if gpu is None else memory_size(gpu)
    if isinstance(on_card, float):
        total = _card()
        on_card = None if total is None else int(on_card * total)
    on_host = None if host is None else memory_size(host)
    if isinstance(on_host, float):
        on_host = int(on_host * host_memory())
    _log.info("memory for state: %s bytes on the GPU, %s on the host", on_card or "any", on_host or "any")
    return Budget(on_card, on_host)


def host_memory() -> int:
    """Bytes of the machine's memory, used or not."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _card() -> int | None:
    """Bytes of the card's memory, used or not; None where there is no card to ask."""
    try:
        from gpu_ops.cudf_backend.device import total_memory  # noqa: PLC0415 - only where a card may be

        return total_memory()
    except Exception as error:  # no cupy, no driver, no card: there is no GPU to limit
        _log.info("no GPU to limit the memory of: %s", error)
        return None
