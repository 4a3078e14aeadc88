"""A micro-batch's calls of the GPU's libraries do not grow with its rows, and do not become more unnoticed."""

from __future__ import annotations

from typing import Any

import pytest

from kernels.counting import count

pytestmark = pytest.mark.thorough

# Calls and waits, as counted when this was written; what is aimed at is 200 and 25 of a net change, 300 and 35 else.
MOST = {("per_batch", "changes"): (207, 25), ("per_batch", "inserts"): (91, 10), ("per_event", "changes"): (387, 35)}


@pytest.mark.parametrize(("emit", "mix"), MOST)
def test_calls(emit: Any, mix: str) -> None:
    few, many = (count(changes, emit, mix) for changes in (1000, 8000))
    calls, waits = MOST[emit, mix]
    assert 50 < sum(many.calls.values()) <= calls
    assert 5 < sum(many.waits.values()) <= waits
    assert sum(few.calls.values()) <= 1.1 * calls
    assert sum(few.waits.values()) <= 1.1 * waits
    assert sum(many.bytes.values()) > 4 * sum(few.bytes.values())
