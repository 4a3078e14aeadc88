"""The least ranks at each moment, by CUDA kernels: a tree over moments whose nodes all spans write to at the same time.

`gpu_ops.operators.core.order.least` goes level by level, and the host learns at each which spans are left.
"""

from __future__ import annotations

import cupy as cp
import numpy as np

from gpu_ops.arrays import Array, Positions
from gpu_ops.cudf_backend.device import LIMITS, launch

NO_RANK = LIMITS["NO_RANK"]
_MOST = 16
"""Ranks wanted at a moment, at most: each is put in its place by a walk over the others."""


def least(begins: Positions, ends: Positions, ranks: Array, *, size: int, n: int) -> Array | None:
    """Puts spans into the tree and looks at what is above each moment; see `gpu_ops.kernels.Kernels.least`."""
    if n > _MOST:
        return None
    out = cp.full((size, n), NO_RANK, np.int64)
    if size and ranks.size:
        width, wanted = np.int64(1 << (size - 1).bit_length()), np.int64(n)
        tree = cp.full(2 * int(width) * n, NO_RANK, np.uint64)
        launch("put_spans", ranks.size, begins, ends, ranks, np.int64(ranks.size), width, wanted, tree)
        launch("least_at_moments", size, tree, width, wanted, np.int64(size), out.view(np.uint64))
    return out
