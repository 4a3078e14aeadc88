"""Sort and stable argsort of every backend, of what it takes one way or another."""

from __future__ import annotations

import numpy as np
import pytest

from cpu_fallback import kernels as cpu
from gpu_ops.kernels import Kernels


@pytest.mark.parametrize("dtype", ["int64", "uint64", "int32", "int8"])
@pytest.mark.parametrize("size", [0, 1, 127, 128, 3000])
def test_argsort_is_stable(kernels: Kernels, size: int, dtype: str) -> None:
    rng = np.random.default_rng(size)
    limits = np.iinfo(dtype)
    for low, high in (
        (0, 2),
        (-50 if limits.min < 0 else 0, 50),
        (limits.min // 2, limits.max),
        (limits.min, limits.max),
    ):
        values = rng.integers(low, high, size, dtype, endpoint=True)
        runs = np.concatenate([np.sort(part) for part in np.array_split(values, 5)])
        for given in (values, runs, np.sort(values), np.sort(values)[::-1].copy(), np.full_like(values, high)):
            found = kernels.asnumpy(kernels.argsort(kernels.asarray(given)))
            np.testing.assert_array_equal(found, np.argsort(given, kind="stable"))
            assert found.dtype == np.int64


@pytest.mark.parametrize("by_digits", [True, False])
@pytest.mark.parametrize("dtype", ["int64", "uint64"])
@pytest.mark.parametrize("size", [0, 1, 3000, 20_000])
def test_sort_is_numpys(
    kernels: Kernels, size: int, dtype: str, by_digits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "_digits_are_faster", lambda: by_digits)
    monkeypatch.setattr(cpu, "_MANY", 10_000)
    rng = np.random.default_rng(size)
    limits = np.iinfo(dtype)
    for low, high in ((0, 1 << 15), (0, 1 << 31), (-5 if limits.min < 0 else 0, 1 << 40), (limits.min, limits.max)):
        values = rng.integers(low, high, size, dtype, endpoint=True)
        skewed = np.where(rng.random(size) < 0.9, values % np.dtype(dtype).type(1000), values)
        for given in (values, skewed, np.sort(values), np.sort(values)[::-1].copy(), np.full_like(values, high)):
            found = kernels.asnumpy(kernels.sort(kernels.asarray(given.copy())))
            np.testing.assert_array_equal(found, np.sort(given))
