"""What a change costs grows as what it gives, no faster: hot keys, ties, many keys, wide rows, rows that go."""

from __future__ import annotations

import pytest

from benchmarks.growth import CURVES, LEAST, SHAPES, cases, cost, expected, growth, measured

_ROOM = {"seconds": 0.6, "bytes": 0.35, "rows": 0.35}
"""So much more than expected passes: times are noisy, and a logarithm is no fault."""


@pytest.mark.parametrize("case", [case for case in cases() if SHAPES[case[1]].goes], ids="-".join)
def test_rows_that_are_looked_at_when_one_goes_do_not_grow(case: tuple[str, str]) -> None:
    """One of n equal rows, and the least and the greatest of a group of n; an index is made once it pays."""
    few, many = (cost(case, size, 3, ("change",)) for size in (2_000, 32_000))
    assert 0 < many["change rows"] <= 1.5 * few["change rows"] + 200
    assert many["change bytes"] <= 1.5 * few["change bytes"] + 2**15


def test_counting_rows_notices_a_pass_over_them() -> None:
    """Of insertions that match n rows."""
    assert "hot key" in CURVES["join inner"].linear
    few, many = (cost(("join inner", "hot key"), size, 1, ("change",)) for size in (200, 1600))
    assert many["change rows"] > 7 * few["change rows"]


@pytest.mark.thorough
@pytest.mark.one_in(4)
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
