"""The card that this process sees."""

from __future__ import annotations

import cupy as cp


def total_memory() -> int:
    """Bytes of the card's memory, used or not."""
    return int(cp.cuda.runtime.memGetInfo()[1])
