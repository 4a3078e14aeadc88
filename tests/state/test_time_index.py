"""The index by hash and time, and the queue by time, against a plain list."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from conftest import slow_but

from cpu_fallback import CpuKernels, search
from gpu_ops.state import runs, time_index
from gpu_ops.state.index import HashIndex
from gpu_ops.state.time_index import TimeIndex, TimeQueue

SPANS = (50, 1 << 20, 1 << 45)
"""Of times: many equal ones; some; and more than fit beside a hash in one number."""


def some_rows(rng: np.random.Generator, size: int, span: int) -> tuple[np.ndarray, np.ndarray]:
    """Hashes, of which one is hot and some share their upper half, and times."""
    hashes = rng.integers(0, 30, size).astype(np.uint64) << np.uint64(59)
    hashes |= rng.integers(0, 3, size).astype(np.uint64)
    hashes[rng.random(size) < 0.4] = 7
    return hashes, rng.integers(-span, span, size)


@pytest.mark.parametrize("span", SPANS)
def test_index_finds_what_a_scan_finds(span: int) -> None:
    rng = np.random.default_rng(span)
    index, hashes, times = TimeIndex(CpuKernels()), np.empty(0, np.uint64), np.empty(0, np.int64)
    for number in range(12):
        more = some_rows(rng, int(rng.integers(1, 300)), span)
        slots = np.arange(hashes.size, hashes.size + more[0].size)
        index.stage(more[0], slots, more[1])
        if number % 3 == 1:
            index.discard()
            index.stage(more[0], slots, more[1])
        committed = hashes.size
        hashes, times = np.concatenate([hashes, more[0]]), np.concatenate([times, more[1]])
        needles, low = some_rows(rng, 60, span)
        high = low + rng.integers(-1, span // 4, low.size)
        upper = hashes >> np.uint64(32)
        for old, new in ((True, True), (True, False), (False, True)):
            found = index.probe(needles, low, high, committed=old, staged=new)
            inside = [
                (upper == n >> np.uint64(32)) & (times >= a) & (times <= b)
                for n, a, b in zip(needles, low, high, strict=True)
            ]
            for mask in inside:
                mask[:committed] &= old
                mask[committed:] &= new
            wanted = [(i, s) for i, mask in enumerate(inside) for s in np.flatnonzero(mask)]
            assert list(zip(*map(np.ndarray.tolist, found), strict=True)) == wanted
        runs = index.first(needles, low)
        needle = np.concatenate([np.empty(0, np.int64), *(r[0] for r in runs)])
        first = times[np.concatenate([np.empty(0, np.int64), *(r[1] for r in runs)])]
        for i, (n, a) in enumerate(zip(needles, low, strict=True)):
            mine = times[:committed][(upper[:committed] == n >> np.uint64(32)) & (times[:committed] >= a)]
            best = first[needle == i]
            assert (best.min() if best.size else None) == (mine.min() if mine.size else None)
        index.commit()
        if number == 8:
            keep = rng.random(hashes.size) < 0.5
            index = index.renumbered(np.where(keep, np.cumsum(keep) - 1, -1))
            hashes, times = hashes[keep], times[keep]


def test_a_hot_key_is_not_read_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten rows of a key of 100,000 are found by looking at few entries."""
    index, looked = TimeIndex(CpuKernels()), []
    index.stage(np.zeros(100_000, np.uint64), np.arange(100_000), np.arange(100_000))
    index.commit()
    honest = search.expand

    def expand(first: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        looked.append(int(count.sum()))
        return honest(first, count)

    monkeypatch.setattr(search, "expand", expand)
    low = np.arange(0, 90_000, 1000)
    needles, slots = index.probe(np.zeros(low.size, np.uint64), low, low + 9)
    assert needles.size == slots.size == 10 * low.size
    assert sum(looked) == 10 * low.size


@pytest.mark.parametrize("seed", range(4))
def test_queue_gives_what_is_due(seed: int) -> None:
    rng = np.random.default_rng(seed)
    queue, waiting, now, used = TimeQueue(CpuKernels()), {}, 0, 0
    for number in range(60):
        now += int(rng.integers(0, 8))
        times = rng.integers(now - 5, now + 40, int(rng.integers(0, 9)))
        slots = np.arange(used, used + times.size)
        for attempt in range(2):
            due = queue.take(now)
            assert due.tolist() == sorted(s for s, t in waiting.items() if t <= now)
            queue.add(times, slots)
            if attempt == 0 and number % 2:
                queue.discard()
                continue
            queue.commit()
            break
        waiting = {s: t for s, t in waiting.items() if t > now} | dict(zip(slots.tolist(), times.tolist(), strict=True))
        used += times.size
        if number % 20 == 19:
            old = sorted(waiting)
            new = np.full(used, -1)
            new[old] = np.arange(len(old))
            queue = queue.renumbered(new)
            waiting, used = {int(new[s]): t for s, t in waiting.items()}, len(old)


@pytest.mark.parametrize("seed", range(4))
def test_some_entries_at_a_time_follow_as_all_at_once(seed: int) -> None:
    """While more come, runs are merged, and what is due is taken."""
    rng, kernels, used, complete = np.random.default_rng(seed), CpuKernels(), 0, 0
    stays = rng.random(5000) < 0.5
    new_slots = np.where(stays, np.cumsum(stays) - 1, -1)
    new_slots[1200:1300] = -1
    index, hashed, queue = TimeIndex(kernels), HashIndex(kernels), TimeQueue(kernels)
    for number in range(600):
        count = int(rng.integers(1, 9))
        slots, used = np.arange(used, used + count), used + count
        hashes, times = some_rows(rng, count, 50)
        index.stage(hashes, slots, times)
        hashed.stage(hashes, slots)
        queue.take(number)
        queue.add(number + rng.integers(0, 100, count), slots)
        for part in (index, hashed, queue):
            part.commit()
            if number < 200:
                continue
            part.followed = part.follow(new_slots, part.followed, 12)
            if part.left(part.followed) <= 12:
                ones = part.renumbered(new_slots, part.followed), part.renumbered(new_slots)
                found = [np.concatenate([run.entries[getattr(run, "first", 0) :] for run in one.runs]) for one in ones]
                assert sorted(found[0]) == sorted(found[1])
                assert len(part.runs) < 20
                part.followed, complete = {}, complete + 1
    assert complete > 6


@pytest.mark.parametrize("span", slow_but(SPANS, SPANS[0]))
def test_no_micro_batch_waits_for_a_merge(span: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many entries there are, some for each that comes are merged; what has been taken meanwhile stays so."""
    done, rng, kernels, each = [0], np.random.default_rng(span), CpuKernels(), 64  # entries in each micro-batch
    in_order, by_first = time_index._in_order, time_index._by_first

    def counting(ordered: Any) -> Any:
        def count(home: CpuKernels, *arrays: np.ndarray, **span: Any) -> list[np.ndarray]:
            done[-1] += arrays[0].size
            found: list[np.ndarray] = ordered(home, *arrays, **span)
            return found

        return count

    monkeypatch.setattr(runs, "_PART", 16)
    monkeypatch.setattr(time_index, "_in_order", counting(in_order))
    monkeypatch.setattr(time_index, "_by_first", counting(by_first))
    index, queue, due = TimeIndex(kernels), TimeQueue(kernels), dict[int, int]()
    hashes, times = rng.integers(0, 1 << 63, 500 * each).astype(np.uint64), rng.integers(-span, span, 500 * each)
    for number in range(500):
        slots, now = np.arange(number * each, (number + 1) * each), -span + number * span // 300
        index.stage(hashes[slots], slots, times[slots])
        index.commit()
        assert queue.take(now).tolist() == sorted(slot for slot, time in due.items() if time <= now)
        due = {slot: time for slot, time in due.items() if time > now} | dict(
            zip(slots.tolist(), times[slots].tolist(), strict=True)
        )
        queue.add(times[slots], slots)
        queue.commit()
        done.append(0)
        assert len(index.runs) < 25
    assert max(done) < 4 * (8 * each + 16)
    assert index.runs[0].entries.size > 250 * each
    needles, found = index.probe(hashes[::7], times[::7], times[::7])
    upper, wanted = hashes >> np.uint64(32), set[tuple[int, int]]()
    for at, (own, time) in enumerate(zip(upper[::7], times[::7], strict=True)):
        wanted |= {(at, slot) for slot in np.flatnonzero((upper == own) & (times == time)).tolist()}
    assert set(zip(needles.tolist(), found.tolist(), strict=True)) == wanted


@pytest.mark.parametrize("kind", [TimeIndex, TimeQueue, HashIndex])
def test_what_a_compaction_replaces_is_gone_at_once(kind: Any) -> None:
    """Not when Python next looks for cycles, which may be many micro-batches later."""
    gc.disable()
    try:
        gone = weakref.ref(kind(CpuKernels()))
        assert gone() is None
    finally:
        gc.enable()
