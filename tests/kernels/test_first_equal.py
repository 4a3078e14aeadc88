"""`gpu_ops.operators.core.match.first_equal` against a loop, with hashes that are alike of keys that are not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from gpu_ops.operators.core.match import first_equal


@pytest.mark.parametrize("text", [False, True], ids=["numbers", "text"])
@pytest.mark.parametrize("different", [False, True])
def test_first_equal(kernels: Any, different: bool, text: bool) -> None:
    """The first of equal ones, or the only one; of text, which the GPU's own kernels do not know, likewise."""
    rng = np.random.default_rng(3)
    own, others = rng.integers(0, 60, 200), rng.permutation(60)[:40]
    if not different:
        others = np.concatenate([others, others[:7]])
    kind = pa.string() if text else pa.int64()
    sides = []
    for values in (own, others):
        frame = kernels.frame(pa.table({"k": pa.array(values).cast(kind)}))
        hashes = kernels.asarray((values // 3).astype(np.uint64) << np.uint64(50))
        sides.append((frame, hashes, ("k",)))
    found = kernels.asnumpy(first_equal(kernels, sides[0], sides[1], (kind,), different=different))
    places = others.tolist()
    assert found.tolist() == [places.index(value) if value in places else -1 for value in own.tolist()]
