"""Several numbers in one integer: they sort as they should, and come out as they went in, up to the limits."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gpu_ops import layouts
from gpu_ops.layouts import CODE_BITS, LOGICAL_TIME_BITS, MAX_CHANGES, MAX_SLOTS

SLOTS = st.integers(0, MAX_SLOTS)
LOGICAL_TIMES = st.integers(0, 2 * MAX_CHANGES + 1)


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), SLOTS), min_size=1))
def test_entries(rows: list[tuple[int, int]]) -> None:
    hashes, slots = np.array([h for h, _ in rows], np.uint64), np.array([s for _, s in rows], np.int64)
    made = np.sort(layouts.entries(hashes, slots))
    found = zip(layouts.entry_hashes(made).tolist(), layouts.entry_slots(made).tolist(), strict=True)
    assert list(found) == sorted((h >> 32, s) for h, s in rows)


@given(st.lists(st.tuples(SLOTS, SLOTS), min_size=1))
def test_pairs(rows: list[tuple[int, int]]) -> None:
    first, second = np.array(rows, np.int64).T
    made = layouts.unpaired(np.sort(layouts.pairs(first, second)))
    assert list(zip(*(m.tolist() for m in made), strict=True)) == sorted(rows)


@given(st.lists(st.tuples(st.booleans(), SLOTS, SLOTS)), st.integers(0, 3))
def test_pairs_of_two_sides(rows: list[tuple[bool, int, int]], none: int) -> None:
    """Those of the left first, by the right slot; those of the right by the left slot; behind them what is no pair."""
    made = [layouts.pairs(np.int64(found), np.int64(own)) | np.int64(-int(side) << 63) for side, found, own in rows]
    ascending = np.sort(np.array([*made, *[-1] * none], np.int64).view(np.uint64)).view(np.int64)
    left, right = layouts.unpaired_by_side(ascending)
    wanted = [(found, own) if side else (own, found) for side, found, own in sorted(rows)]
    assert list(zip(left.tolist(), right.tolist(), strict=True)) == wanted + [(-1, -1)] * none


@given(st.lists(st.tuples(SLOTS, LOGICAL_TIMES, st.integers(0, 2**CODE_BITS - 1)), min_size=1))
def test_moments(rows: list[tuple[int, int, int]]) -> None:
    owned, codes = layouts.without_codes(np.sort(layouts.moments(*np.array(rows, np.int64).T)))
    made = (*layouts.unowned(owned), codes)
    assert list(zip(*(m.tolist() for m in made), strict=True)) == sorted(rows)
    assert layouts.owned(*layouts.unowned(owned)).tolist() == owned.tolist()


def test_logical_times_end_before_what_is_after_them_all() -> None:
    assert 2 * MAX_CHANGES + 1 < 1 << LOGICAL_TIME_BITS
