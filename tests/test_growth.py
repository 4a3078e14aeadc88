"""What a change costs grows as what it gives, no faster: hot keys, ties, many keys, wide rows, long text, deletes."""

from __future__ import annotations

import pytest

from benchmarks.growth import LEAST, cases, expected, growth, measured

pytestmark = pytest.mark.thorough

_ROOM = {"seconds": 0.6, "bytes": 0.35}
"""So much more than expected passes: times are noisy, and a logarithm is no fault."""


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", list(cases()), ids="-".join)
def test_costs_grow_as_results_do(case: tuple[str, str]) -> None:
    """Of one change and of a micro-batch, as what is there doubles four times; measured again before it fails."""
    for attempt in (1, 2, 3):
        found = measured(case, 100 * attempt, repeats=2 * attempt)
        bad = {
            what: costs
            for what, costs in found.items()
            if growth(costs, LEAST[unit := what.split()[-1]]) > expected(case, what) + _ROOM[unit]
        }
        if not bad:
            return
    pytest.fail(f"{bad}: expected to grow by n to the power of {[expected(case, what) for what in bad]} at most")
