"""`gpu_ops.kernels.Kernels.flagged` against a loop over rows, on every backend; and work that is looked at together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpu_ops.kernels import Flagged
from gpu_ops.operators.core.looks import Asked, Seen, Steps, side_by_side


def _rows(part: Flagged, length: int) -> list[tuple[int, ...]]:
    """The rows of a part of host arrays, one by one."""
    flags = np.ones(length, bool) if part.flags is None else part.flags
    if part.unless is not None:
        flags = flags & ~part.unless
    if part.places is not None:
        flags = flags[np.argsort(part.places)]
    wanted = np.flatnonzero(flags).tolist()
    columns = [[-1] * length if c is None else range(c, c + length) if isinstance(c, int) else c for c in part.columns]
    return [tuple(int(column[at]) for column in columns) for at in wanted]


def _given(kernels: Any, part: Flagged) -> Flagged:
    """The part in the backend's memory."""
    moved = [c if c is None or isinstance(c, int) else kernels.asarray(np.array(c)) for c in part.columns]
    flags, unless, places = (None if a is None else kernels.asarray(a) for a in (part.flags, part.unless, part.places))
    return Flagged(flags, moved, unless, places)


@pytest.mark.parametrize("columns", [1, 2, 3])
@pytest.mark.parametrize("lengths", [(5,), (0,), (0, 0), (300, 0, 1, 40), (0, 700), (1,) * 30])
@pytest.mark.parametrize("some", [True, False], ids=["some", "every"])
def test_flagged(kernels: Any, columns: int, lengths: tuple[int, ...], some: bool) -> None:
    """Parts of all kinds, more of them than a launch takes, without rows, and with all."""
    rng = np.random.default_rng(sum(lengths) + columns)
    parts = []
    for number, length in enumerate(lengths):
        kinds = [rng.integers(-1, 1 << 40, length), 100 * number, None]
        own = [kinds[(number + at) % 3] for at in range(columns)]
        flags = rng.random(length) < 0.3
        if not some or (number % 4 == 3 and isinstance(own[0], np.ndarray)):
            flags, own[0] = None, kinds[0]
        unless = rng.random(length) < 0.4 if some and number % 2 else None
        if unless is not None and rng.random() < 0.5:
            flags = None
        given = flags is not None or unless is not None
        parts.append(Flagged(flags, own, unless, rng.permutation(length) if given and rng.random() < 0.5 else None))
    wanted = [_rows(part, length) for part, length in zip(parts, lengths, strict=True)]
    given = [_given(kernels, part) for part in parts]
    numbers = [kernels.asarray(np.arange(10)).sum(), kernels.asarray(np.array([-7])).sum()]
    found, sizes, told = kernels.flagged(given, numbers)
    assert sizes == [len(rows) for rows in wanted]
    assert told == [45, -7]
    for own, rows in zip(found, wanted, strict=True):
        assert list(zip(*(kernels.asnumpy(column).tolist() for column in own), strict=True)) == rows
    (whole,), sizes, told = kernels.flagged(given, chained=True)
    assert sizes == [len(rows) for rows in wanted]
    assert told == []
    assert list(zip(*(kernels.asnumpy(column).tolist() for column in whole), strict=True)) == [
        row for rows in wanted for row in rows
    ]


def test_flagged_of_other_types(kernels: Any) -> None:
    """Hashes are no int64, and views may have gaps."""
    flags = np.arange(20) % 3 == 0
    hashes = np.arange(20).astype(np.uint64) << np.uint64(60)
    wide = kernels.asarray(np.arange(40).reshape(20, 2))[:, 1]
    for column, values in ((kernels.asarray(hashes), hashes), (wide, np.arange(1, 40, 2))):
        ((found,),), _, _ = kernels.flagged([Flagged(kernels.asarray(flags), [column])])
        assert kernels.asnumpy(found).astype(np.uint64).tolist() == values[flags].astype(np.uint64).tolist()


def _countdown(kernels: Any, start: int) -> Steps[list[int]]:
    """Rows 0 to ``start``, without the last one at each step."""
    rows, seen = kernels.asarray(np.arange(start)), []
    for left in range(start, 0, -1):
        flags = kernels.asarray(np.arange(left) < left - 1)
        found: Seen = yield Asked([Flagged(flags, [rows])], [flags.sum()])
        (rows,) = found.rows
        seen += found.numbers
        assert kernels.asnumpy(rows).tolist() == list(range(left - 1))
    return seen


def test_side_by_side(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Works of several lengths have the answers that each would have by itself, by the looks of the longest."""
    looks, own = [], kernels.flagged

    def counted(parts: Any, numbers: Any) -> Any:
        looks.append(len(parts))
        return own(parts, numbers)

    monkeypatch.setattr(kernels, "flagged", counted)
    found = side_by_side(kernels, [_countdown(kernels, start) for start in (3, 0, 5)])
    assert found == [[2, 1, 0], [], [4, 3, 2, 1, 0]]
    assert looks == [2, 2, 2, 1, 1]


@pytest.mark.parametrize("sizes", [(), (0,), (0, 0), (5, 0, 300)])
def test_on_host(kernels: Any, sizes: tuple[int, ...]) -> None:
    """Arrays of several types, empty ones and views with gaps among them."""
    kinds = (np.int64, bool, np.float64)
    given = [(np.arange(2 * size) % 7 % 3).astype(kind)[::2] for size, kind in zip(sizes, kinds, strict=False)]
    found = kernels.on_host([kernels.asarray(array) for array in given])
    assert [array.tolist() for array in found] == [array.tolist() for array in given]
    assert [array.dtype for array in found] == [array.dtype for array in given]
