"""The row of a key that is nearest in time, against a look at all rows."""

from __future__ import annotations

import bisect
import itertools
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from gpu_ops.kernels import Among, Columns, Kernels
from gpu_ops.operators.core.nearest import Nearest, SearchDirection
from gpu_ops.state.time_index import TimeIndex

KEY = (pa.int64(),)


def _hashes(keys: np.ndarray) -> np.ndarray:
    """Keys 0 to 2 share the upper half, which is all that an index knows."""
    return np.where(keys < 3, 5, keys).astype(np.uint64) << np.uint64(59) | keys.astype(np.uint64)


def _nearest(rows: dict[str, np.ndarray], key: int, time: int, order: np.ndarray, **how: Any) -> int:
    back, exact, farthest = how["back"], how["exact"], how["farthest"]
    sign = 1 if back else -1
    distance = sign * (time - rows["time"])
    fits = rows["alive"] & (rows["key"] == key) & (distance >= (0 if exact else 1))
    if farthest is not None:
        fits &= sign * (rows["time"] - farthest) >= 0
    at = np.flatnonzero(fits)
    return int(min(at, key=lambda s: (distance[s], -order[s], -s))) if at.size else -1


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_nearest_is_what_a_look_at_all_rows_finds(kernels: Kernels, seed: int, tied: bool) -> None:
    rng, span = np.random.default_rng(seed), (20, 1 << 40)[seed % 2]
    index = TimeIndex(kernels)
    rows = {name: np.empty(0, np.int64) for name in ("key", "time", "order")}
    for number in range(7):
        size = int(rng.integers(1, 120))
        more = {"key": rng.integers(0, 6, size), "time": rng.integers(-span, span, size)}
        more["order"] = rng.integers(0, 3, size)
        slots = np.arange(rows["key"].size, rows["key"].size + size)
        given = (_hashes(more["key"]), slots, more["time"])
        given += (more["order"],) if tied else ()
        index.stage(*(kernels.asarray(array) for array in given))
        rows = {name: np.concatenate([values, more[name]]) for name, values in rows.items() if name in more}
        if number < 6:
            index.commit()
        if number == 2 and seed % 3 == 0:  # else all runs lie in one memory
            index.cool(1)
    # a stretch of rows that are gone, longer than any number of single steps
    rows["alive"] = (rng.random(rows["key"].size) < 0.4) & (rows["key"] != 4)
    wanted = {"key": rng.integers(0, 7, 150), "time": rng.integers(-span, span, 150)}
    own, found = (Columns(kernels.frame(pa.table({"key": part["key"]})), ("key",)) for part in (wanted, rows))
    alive = Among(kernels.asarray(rows["alive"].astype(np.int8)), 1, 1)
    hashes, times = kernels.asarray(_hashes(wanted["key"])), kernels.asarray(wanted["time"])
    farthest = rng.integers(-span, span, 150)
    every = kernels.xp.arange(150, dtype=np.int64)
    table = Nearest(kernels, index, KEY, found, alive, newer=kernels.asarray(rows["order"]) if tied else None)
    by = rows["order"] if tied else np.zeros_like(rows["order"])
    for back, exact, limit in itertools.product((True, False), (True, False), (None, farthest)):
        slots = table.search(
            (own, every),
            hashes,
            times,
            "backward" if back else "forward",
            exact=exact,
            farthest=None if limit is None else kernels.asarray(limit),
        )
        expected = [
            _nearest(rows, k, t, by, back=back, exact=exact, farthest=None if limit is None else limit[i])
            for i, (k, t) in enumerate(zip(wanted["key"], wanted["time"], strict=True))
        ]
        assert kernels.asnumpy(slots).tolist() == expected
    assert max(len(index.runs), 2) > 1


@pytest.mark.parametrize("span", [50, (1 << 32) - 1, 1 << 40])
def test_many_needles_stand_where_each_alone_would(kernels: Kernels, span: int) -> None:
    rng, size = np.random.default_rng(span), 6000
    keys, times = rng.integers(1, 9, size), rng.integers(-span // 2, span // 2, size)
    times[:2] = -span // 2, span - span // 2 - 1
    index = TimeIndex(kernels)
    index.stage(*(kernels.asarray(a) for a in (keys.astype(np.uint64) << np.uint64(32), np.arange(size), times)))
    assert index.staged is not None
    stored = sorted(zip(keys.tolist(), times.tolist(), strict=True))
    ends = np.array([np.iinfo(np.int64).min, -span // 2 - 1, -span // 2, span // 2, np.iinfo(np.int64).max])
    wanted = np.concatenate([rng.integers(-span, span, 1500), rng.choice(ends, 500), times[:1000]])
    of = rng.integers(0, 11, wanted.size)
    needles = (kernels.asarray(of.astype(np.uint64) << np.uint64(32)), kernels.asarray(wanted))
    for after, stand in ((False, bisect.bisect_left), (True, bisect.bisect_right)):
        found = kernels.asnumpy(index.bisect(index.staged, *needles, after=after))
        assert found.tolist() == [stand(stored, needle) for needle in zip(of.tolist(), wanted.tolist(), strict=True)]


def test_what_is_gone_is_not_walked_through(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind 20,000 rows that are gone lies one that is there: few steps find it."""
    size, index = 20_000, TimeIndex(kernels)
    index.stage(*(kernels.asarray(a) for a in (np.zeros(size, np.uint64), np.arange(size), np.arange(size))))
    index.commit()
    read, steps = TimeIndex.read, []
    monkeypatch.setattr(TimeIndex, "read", lambda self, run, at: steps.append(at.size) or read(self, run, at))
    rows = Columns(kernels.frame(pa.table({"key": np.zeros(size, np.int64)})), ("key",))
    states = np.zeros(size, np.int8)
    states[[3, size - 3]] = 1
    table = Nearest(kernels, index, KEY, rows, Among(kernels.asarray(states), 1, 1))
    needles = kernels.asarray(np.arange(8000, 8100))
    for direction, slot in (("backward", 3), ("forward", size - 3)):
        own = (rows, kernels.xp.zeros(100, np.int64))
        found = table.search(own, kernels.xp.zeros(100, np.uint64), needles, direction)
        assert kernels.asnumpy(found).tolist() == [slot] * 100
        assert len(steps) < 40
        steps.clear()


@pytest.mark.parametrize("direction", ["backward", "forward"])
def test_rows_of_one_key_and_time_cost_one_search(
    kernels: Kernels, direction: SearchDirection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many there are, and in whichever order they came."""
    read, reads, steps = TimeIndex.read, [], set()
    monkeypatch.setattr(TimeIndex, "read", lambda self, run, at: reads.append(at.size) or read(self, run, at))
    for size in (10, 1000, 20_000):
        rng, index = np.random.default_rng(size), TimeIndex(kernels)
        ties = kernels.asarray(rng.permutation(size))
        zero = kernels.asarray(np.zeros(size, np.int64))
        for half in (slice(0, size // 2), slice(size // 2, size)):
            slots = kernels.asarray(np.arange(size)[half])
            index.stage(zero[half].view(np.uint64), slots, zero[half] + 50, ties[half])
            index.commit()
        rows = Columns(kernels.frame(pa.table({"key": np.zeros(size, np.int64)})), ("key",))
        table = Nearest(kernels, index, KEY, rows, lambda slots: slots >= 0, newer=ties)
        reads.clear()
        needles = kernels.asarray(np.array([0, 100, 50]))
        found = table.search((rows, kernels.xp.zeros(3, np.int64)), zero[:3].view(np.uint64), needles, direction)
        newest = int(np.argmax(kernels.asnumpy(ties)))
        assert kernels.asnumpy(found).tolist() == [
            newest if (t <= 50) == (direction == "forward") or t == 50 else -1 for t in (0, 100, 50)
        ]
        steps.add(len(reads))
    assert max(steps) <= 8
