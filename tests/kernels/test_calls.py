"""A micro-batch's calls of the GPU's libraries do not grow with its rows, and do not become more unnoticed."""

from __future__ import annotations

from typing import Any

import pytest

from kernels.counting import count

# What was counted when this was written, and a fifth more.
MOST = {("per_batch", "changes"): 570, ("per_batch", "inserts"): 250, ("per_event", "changes"): 710}


@pytest.mark.parametrize(("emit", "mix"), MOST)
def test_calls(emit: Any, mix: str) -> None:
    few, many = (count(changes, emit, mix) for changes in (1000, 8000))
    numbers = sum(few.calls.values()), sum(many.calls.values())
    assert 100 < numbers[0] <= MOST[emit, mix]
    assert numbers[1] <= 1.1 * numbers[0]
    assert sum(many.waits.values()) <= 1.1 * sum(few.waits.values()) <= 90
    assert sum(many.bytes.values()) > 4 * sum(few.bytes.values())
