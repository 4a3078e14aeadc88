"""The least of what is there at each moment, against a look at everything."""

from __future__ import annotations

import numpy as np
import pytest

from gpu_ops.kernels import Kernels
from gpu_ops.operators.core.order import NONE, least


@pytest.mark.parametrize("n", [1, 2, 7])
@pytest.mark.parametrize("size", [1, 2, 3, 8, 61])
def test_least_is_what_a_look_at_everything_finds(kernels: Kernels, size: int, n: int) -> None:
    rng = np.random.default_rng(size)
    for rows in (0, 1, 5, 80):
        begins = rng.integers(0, size, rows)
        ends = np.minimum(begins + 1 + rng.integers(0, size, rows), size)
        ends[: rows // 8] = begins[: rows // 8]  # never there
        ranks = rng.permutation(rows).astype(np.int64)
        wanted = np.full((size, n), NONE, np.int64)
        for moment in range(size):
            there = np.sort(ranks[(begins <= moment) & (moment < ends)])[:n]
            wanted[moment, : there.size] = there
        given = (kernels.asarray(array) for array in (begins, ends, ranks))
        np.testing.assert_array_equal(kernels.asnumpy(least(kernels, *given, size=size, n=n)), wanted)
