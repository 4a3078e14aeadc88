"""A micro-batch's calls of the GPU's libraries do not grow with its rows, and do not become more unnoticed."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.gpu.operators import OPERATORS
from kernels.counting import count, count_operator

pytestmark = pytest.mark.thorough

# Calls and waits, as counted when this was written; of a net change 90 and 3 were aimed at.
MOST = {("per_batch", "changes"): (83, 3), ("per_batch", "inserts"): (69, 6), ("per_event", "changes"): (342, 18)}


@pytest.mark.parametrize(("emit", "mix"), MOST)
def test_calls(emit: Any, mix: str) -> None:
    few, many = (count(changes, emit, mix) for changes in (1000, 8000))
    calls, waits = MOST[emit, mix]
    assert 50 < sum(many.calls.values()) <= calls
    assert 2 < sum(many.waits.values()) <= waits
    assert sum(few.calls.values()) <= 1.1 * calls
    assert sum(few.waits.values()) <= 1.1 * waits
    assert sum(many.bytes.values()) > 4 * sum(few.bytes.values())


OF_OPERATORS = {
    "left join, per_batch": (88, 3),
    "left join, per_event": (347, 18),
    "inner join, per_batch": (80, 3),
    "full join, per_batch": (103, 3),
    "left join, residual, per_batch": (109, 6),
    "left join, multisets, per_batch": (359, 20),
    "semi join, per_batch": (84, 3),
    "semi join, per_event": (317, 17),
    "anti join, per_batch": (84, 3),
    "interval join, per_batch": (241, 27),
    "interval join, per_event": (253, 27),
    "ASOF join, per_batch": (171, 14),
    "ASOF join, per_event": (400, 26),
    "ASOF join, at_watermark": (208, 23),
    "temporal join": (341, 39),
    "three inputs, per_batch": (702, 58),
    "three inputs, per_event": (651, 52),
    "aggregate of insertions, per_batch": (414, 31),
    "aggregate, per_batch": (643, 42),
    "aggregate of many groups, per_batch": (700, 44),
    "aggregate, per_event": (742, 42),
    "top 2, per_batch": (440, 28),
    "top 2, per_event": (526, 34),
    "latest, per_batch": (33, 2),
}
"""Calls and waits of a micro-batch of 1,000 changes, prepared and committed: they only ever fall.

Where waits did on 2026-11-29, some calls rose: cupy's own compaction counts as one, `Kernels.flagged` as five, for many.

`python -m kernels.counting --changes 1000 --operator all` says how many there are now.
"""


@pytest.mark.parametrize("name", OPERATORS)
def test_calls_of_operators(name: str) -> None:
    found = count_operator(name, 1000)
    calls, waits = sum(found.calls.values()), sum(found.waits.values())
    most = OF_OPERATORS[name]
    assert calls <= most[0], "more calls than before"
    assert waits <= most[1], "more waits than before"
    assert calls > 0.95 * most[0], f"fewer than before: write down ({calls}, {waits})"
