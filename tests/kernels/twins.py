"""The GPU backend's own CUDA kernels in numpy, for the stand-in of cupy: by name, with the kernel's arguments.

`test_cuda_source` compiles the CUDA itself as C++ and holds it against these.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
from typing import Any

import numpy as np

LOW = np.uint64(0xFFFFFFFF)
NEAREST_STEPS = 256
"""As in ``kernels.cu``."""


def memory(address: Any, dtype: Any, size: int) -> np.ndarray:
    """Numbers at an address of the card's memory, which is the host's here."""
    nbytes = size * np.dtype(dtype).itemsize
    if not nbytes:
        return np.empty(0, dtype)
    return np.frombuffer((ctypes.c_char * nbytes).from_address(int(address)), dtype)


class _Run:
    def __init__(self, told: Any) -> None:
        self.shift = np.uint64(told["shift"])
        self.directory = memory(told["directory"], np.int32, (1 << (32 - int(told["shift"]))) + 1)
        size = int(self.directory[-1])
        self.entries = memory(told["entries"], np.uint64, size)
        self.times = memory(told["times"], np.int64, size) if told["times"] else None

    def span(self, hashes: np.ndarray, earliest: np.ndarray, latest: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where each needle's entries begin and end."""
        stored = self.entries >> np.uint64(32)
        begin, end = (np.searchsorted(stored, hashes, side) for side in ("left", "right"))
        buckets = self.directory[hashes >> self.shift], self.directory[(hashes >> self.shift) + np.uint64(1)]
        assert ((buckets[0] <= begin) & (end <= buckets[1])).all(), "a directory that leads elsewhere"
        if self.times is not None:
            for at in np.flatnonzero(begin < end):
                times = self.times[begin[at] : end[at]]
                low, high = np.searchsorted(times, earliest[at]), np.searchsorted(times, latest[at], "right")
                begin[at], end[at] = begin[at] + low, begin[at] + max(low, high)
        return begin, end


def find(
    runs: Any,
    size: Any,
    lookups: Any,
    needles: Any,
    earliest: Any,
    latest: Any,
    begins: Any,
    counts: Any,
) -> None:
    """Of `gpu_ops.cudf_backend.search`."""
    for number in range(int(lookups // size)):
        begin, end = _Run(runs["run"][0, number]).span(needles >> np.uint64(32), earliest, latest)
        own = slice(number * size, (number + 1) * size)
        begins[own], counts[own] = begin, end - begin


def bisect_run(runs: Any, size: Any, needles: np.ndarray, times: np.ndarray, after: Any, positions: np.ndarray) -> None:
    """Of `gpu_ops.cudf_backend.search`."""
    assert needles.size == times.size == positions.size == size
    begin, end = _Run(runs["run"][0, 0]).span(needles >> np.uint64(32), times, times)
    positions[:] = end if after else begin


def write_pairs(
    runs: Any, size: Any, lookups: Any, needles: Any, begins: Any, ends: Any, total: Any, by_candidate: Any, pairs: Any
) -> None:
    """Of `gpu_ops.cudf_backend.search`."""
    assert ends.size == lookups
    assert pairs.size == total == ends[-1]
    at = np.arange(int(total))
    lookup = np.searchsorted(ends, at, side="right")
    place = begins[lookup] + at - np.where(lookup, ends[lookup - 1], 0)
    own = (needles[lookup % size] & LOW).astype(np.int64)
    slot = np.empty(at.size, np.int64)
    for number in range(int(lookups // size)):
        mine = lookup // size == number
        slot[mine] = (_Run(runs["run"][0, number]).entries[place[mine]] & LOW).astype(np.int64)
    pairs[:] = slot << 32 | own if by_candidate else own << 32 | slot


def gather_rows(
    sources: Any,
    segments: Any,
    threads: Any,
    size: Any,
    rows: np.ndarray,
    words: Any,
    mask_at: Any,
    out: np.ndarray,
) -> None:
    """Of `gpu_ops.cudf_backend.frame`."""
    assert rows.size == size
    assert out.size == mask_at + 4 * words
    flags = np.zeros(32 * int(words), bool)
    flags[: int(size)] = (rows >= 0)[: flags.size]
    out[int(mask_at) :] = np.packbits(flags, bitorder="little")
    rows = np.maximum(rows, 0)
    starts = sources["starts"][0, : int(segments)]
    owner = np.searchsorted(starts, rows, side="right") - 1
    for column in range(int(threads // size)):
        width, offset = int(sources["widths"][0, column]), int(sources["offsets"][0, column])
        target = out[offset : offset + int(size) * width].reshape(-1, width)
        for number in range(int(segments)):
            mine = np.flatnonzero(owner == number)
            if mine.size:
                own = rows[mine] - starts[number]
                data = memory(sources["data"][0, column, number], np.uint8, (int(own.max()) + 1) * width)
                target[mine] = data.reshape(-1, width)[own]


def add_numbers(index: np.ndarray, values: np.ndarray, size: Any, target: np.ndarray) -> None:
    """Of `gpu_ops.cudf_backend.kernels`."""
    assert index.size == values.size == size
    some = values != 0
    assert (index[some] >= 0).all()
    np.add.at(target, index[some], values[some])


def _rows(told: Any, numbers: np.ndarray) -> np.ndarray:
    if not told["rows"]:
        return numbers
    return memory(told["rows"], np.int64, int(numbers.max()) + 1)[numbers] & 0xFFFFFFFF


def _equal(compared: Any, numbers: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Whether rows are equal, one by one."""
    by, equal = compared[0], np.ones(numbers.size, bool)
    for column in range(int(by["columns"]) if numbers.size else 0):
        width = int(by["widths"][column])
        found = []
        for told, which in ((by["one"], numbers), (by["other"], others)):
            rows, starts = _rows(told, which), told["starts"][: int(told["segments"])]
            owner, values = np.searchsorted(starts, rows, side="right") - 1, np.empty((rows.size, abs(width)), np.uint8)
            for number in range(starts.size):
                mine = np.flatnonzero(owner == number)
                if mine.size:
                    own = rows[mine] - starts[number]
                    data = memory(told["data"][column, number], np.uint8, (int(own.max()) + 1) * abs(width))
                    values[mine] = data.reshape(-1, abs(width))[own]
            found.append(values)
        if width > 0:
            equal &= (found[0] == found[1]).all(axis=1)
        else:
            a, b = (values.view({-4: np.float32, -8: np.float64}[width])[:, 0] for values in found)
            equal &= (a == b) | (np.isnan(a) & np.isnan(b))
    return equal


def compare_rows(
    compared: Any, size: Any, rows: np.ndarray, others: np.ndarray, where: Any, everywhere: Any, out: np.ndarray
) -> None:
    """Of `gpu_ops.cudf_backend.compare`."""
    assert rows.size == others.size == out.size == size
    at = np.arange(rows.size) if everywhere else np.flatnonzero(where)
    out[:] = False
    out[at] = _equal(compared, rows[at], others[at])


def _matching(
    compared: Any, needle: np.ndarray, slot: np.ndarray, states: np.ndarray, every: Any, least: Any, most: Any
) -> np.ndarray:
    there = np.ones(slot.size, bool) if every else (states[slot] >= least) & (states[slot] <= most)
    at = np.flatnonzero(there)
    there[at] = _equal(compared, needle[at], slot[at])
    return there


def mark_matches(
    compared: Any,
    size: Any,
    pairs: np.ndarray,
    by_candidate: Any,
    states: np.ndarray,
    every: Any,
    least: Any,
    most: Any,
    out: np.ndarray,
) -> None:
    """Of `gpu_ops.cudf_backend.compare`."""
    assert pairs.size == out.size == size
    first, second = pairs >> 32, pairs & 0xFFFFFFFF
    needle, slot = (second, first) if by_candidate else (first, second)
    out[:] = _matching(compared, needle, slot, states, every, least, most)


def put_matches(
    compared: Any, size: Any, pairs: np.ndarray, states: np.ndarray, every: Any, least: Any, most: Any, out: np.ndarray
) -> None:
    """Of `gpu_ops.cudf_backend.compare`."""
    assert pairs.size == size
    needle, slot = pairs >> 32, pairs & 0xFFFFFFFF
    found = np.flatnonzero(_matching(compared, needle, slot, states, every, least, most))
    assert np.unique(needle[found]).size == found.size, "a needle with two matches: on a card any of them may stay"
    out[needle[found]] = slot[found]


def sole_in_runs(
    compared: Any,
    told: Any,
    size: Any,
    lookups: Any,
    hashes: np.ndarray,
    rows: np.ndarray,
    every_row: Any,
    paired: Any,
    side: Any,
    begins: Any,
    states: np.ndarray,
    every: Any,
    least: Any,
    most: Any,
    out: np.ndarray,
) -> None:
    """Of `gpu_ops.cudf_backend.nearest`."""
    assert rows.size == size
    assert out.size == lookups
    if begins:
        out[:] = -1
    assert every_row or not paired
    by_index, own = out.reshape(-1, int(size)), hashes if every_row else hashes[rows]
    open_ = by_index == -1
    for number in range(int(told["number"][0])):
        run, index = _Run(told["run"][0, number]), int(told["index"][0, number])
        low, high = run.span(own >> np.uint64(32), out, out)
        found = by_index[index]
        for at in range(int(size)):
            slots = (run.entries[low[at] : high[at]] & LOW).astype(np.int64)
            if open_[index, at] and slots.size:
                hit = slots[_matching(compared, np.full(slots.size, at), slots, states, every, least, most)]
                assert hit.size <= 1, "a row with two matches: which is found is left to the order"
                assert not hit.size or found[at] == -1, "a row with two matches: which is found is left to the order"
                if hit.size:
                    found[at] = hit[0] << 32 | int(own[at] & LOW) | -int(side) << 63 if paired else hit[0]


def pack_positions(hashes: np.ndarray, size: Any, bits: Any, out: np.ndarray) -> None:
    """Of `gpu_ops.cudf_backend.compare`."""
    assert hashes.size == out.size == size
    shift = np.uint64(bits)
    out[:] = (hashes >> shift << shift) | np.arange(int(size)).astype(np.uint64)


def begin_groups(
    compared: Any, packed: np.ndarray, size: Any, bits: Any, order: np.ndarray, begins: np.ndarray
) -> None:
    """Of `gpu_ops.cudf_backend.compare`."""
    assert packed.size == order.size == begins.size == size
    order[:] = packed & np.uint64((1 << int(bits)) - 1)
    hashes = packed >> np.uint64(bits)
    begins[0] = 1
    begins[1:] = np.where(hashes[1:] != hashes[:-1], 1, np.where(_equal(compared, order[1:], order[:-1]), 0, 1 << 32))


def find_neighbours(
    compared: Any,
    packed: np.ndarray,
    size: Any,
    bits: Any,
    flags: np.ndarray,
    order: np.ndarray,
    mine: np.ndarray,
    before: np.ndarray,
    last: np.ndarray,
) -> None:
    """Of `gpu_ops.cudf_backend.compare`."""
    assert packed.size == flags.size == order.size == mine.size == before.size == last.size == size
    order[:] = packed & np.uint64((1 << int(bits)) - 1)
    hashes = packed >> np.uint64(bits)
    follows = hashes[1:] == hashes[:-1]
    last[:-1], last[-1] = ~follows, True
    mine[:], before[0] = flags[order], -1
    same = _equal(compared, order[1:], order[:-1])
    before[1:] = np.where(follows, np.where(same, mine[:-1], -2), -1)


def number_groups(running: np.ndarray, size: Any, group: np.ndarray, bounds: np.ndarray) -> None:
    """Of `gpu_ops.cudf_backend.compare`."""
    assert running.size == group.size == size
    group[:] = (running & 0xFFFFFFFF) - 1
    assert bounds.size == group[-1] + 2
    bounds[:] = np.searchsorted(group, np.arange(bounds.size))


def _walked(
    compared: Any,
    run: _Run,
    standing: tuple[np.ndarray, np.ndarray],
    limits: tuple[np.ndarray, np.ndarray],
    back: bool,
    hashes: np.ndarray,
    states: np.ndarray,
    span: tuple[int, int],
) -> np.ndarray:
    """The place of each probe row that walks, -1 for none, -2 after too many steps."""
    probe_rows, place = standing[0], standing[1].copy()
    found, going = np.full(place.size, -2), np.arange(place.size)
    for _ in range(NEAREST_STEPS):
        at = place[going]
        inside = (at >= 0) & (at < run.entries.size)
        inside[inside] &= run.entries[at[inside]] >> np.uint64(32) == hashes[probe_rows[going[inside]]] >> np.uint64(32)
        near, (any_, limit) = inside.copy(), (part[going] for part in limits)
        time = run.times[at[inside]]
        near[inside] &= any_[inside] | ((time >= limit[inside]) if back else (time <= limit[inside]))
        found[going[~near]] = -1
        going, at = going[near], at[near]
        slots = (run.entries[at] & LOW).astype(np.int64)
        hit = _matching(compared, probe_rows[going], slots, states, False, *span)
        found[going[hit]] = at[hit]
        going = going[~hit]
        place[going] += -1 if back else 1
        if not going.size:
            break
    return found


def nearest_in_run(
    compared: Any,
    told: Any,
    wanted: Any,
    entries: Any,
    size: Any,
    hashes: np.ndarray,
    times: np.ndarray,
    farthest: np.ndarray,
    states: np.ndarray,
    least: Any,
    most: Any,
    ties: np.ndarray,
    best: np.ndarray,
    best_times: np.ndarray,
) -> None:
    """Of `gpu_ops.cudf_backend.nearest`."""
    run, back, span = _Run(told[0]), bool(wanted["back"][0]), (int(least), int(most))
    assert run.entries.size == entries
    assert hashes.size == times.size == best.size == best_times.size == size
    every, has = np.arange(int(size)), best >= 0
    without, limit = np.full(int(size), bool(wanted["any"][0])), farthest.copy()
    nearer = has & (without | ((best_times > limit) if back else (best_times < limit)))
    limit[nearer] = best_times[nearer]
    without[has] = False
    low, high = run.span(hashes >> np.uint64(32), times, times)
    place = (high if bool(wanted["exact"][0]) == back else low) - back
    found = _walked(compared, run, (every, place), (without, limit), back, hashes, states, span)
    some = np.flatnonzero((found >= 0) & (best > -2))
    if not back and some.size:
        time = run.times[found[some]]
        place = run.span(hashes[some] >> np.uint64(32), time, time)[1] - 1
        all_, none = np.ones(some.size, bool), np.zeros(some.size, np.int64)
        found[some] = _walked(compared, run, (some, place), (all_, none), True, hashes, states, span)
    found[best == -2] = -2
    best[found == -2] = -2
    at = np.flatnonzero(found >= 0)
    time, slot = run.times[found[at]], (run.entries[found[at]] & LOW).astype(np.int64)
    same, before = has[at] & (time == best_times[at]), np.maximum(best[at], 0)
    newer = slot > before
    if not wanted["arrival"][0]:
        newer = (ties[slot] > ties[before]) | ((ties[slot] == ties[before]) & newer)
    takes = ~same | newer
    best[at[takes]], best_times[at[takes]] = slot[takes], time[takes]


def bisect_ranges(
    first: np.ndarray,
    second: np.ndarray,
    third: np.ndarray,
    wanted: np.ndarray,
    then: np.ndarray,
    last: np.ndarray,
    size: Any,
    lows: np.ndarray,
    highs: np.ndarray,
    after: Any,
    out: np.ndarray,
) -> None:
    """Of `gpu_ops.cudf_backend.nearest`."""
    assert wanted.size == then.size == last.size == lows.size == highs.size == out.size == size
    for at in range(int(size)):
        part = slice(int(lows[at]), int(highs[at]))
        stored = list(zip(*(column[part].tolist() for column in (first, second, third)), strict=True))
        than = int(wanted[at]), int(then[at]), int(last[at])
        out[at] = part.start + (bisect.bisect_right if after else bisect.bisect_left)(stored, than)


def fold_lives(
    own_born: np.ndarray,
    own_died: np.ndarray,
    size: Any,
    level: Any,
    up: Any,
    begins: Any,
    born: np.ndarray,
    died: np.ndarray,
) -> None:
    """Of `gpu_ops.cudf_backend.nearest`."""
    assert own_born.size == own_died.size == size
    info = np.iinfo(np.int64)
    for of_two, own, values, never in ((np.minimum, own_born, born, info.max), (np.maximum, own_died, died, info.min)):
        if begins:
            assert values.size == 2 * level
            values[int(level) :] = never
            values[int(level) : int(level + size)] = own
        for step in range(int(up)):
            below = int(level) >> step
            values[below // 2 : below] = of_two(values[below : 2 * below : 2], values[below + 1 : 2 * below : 2])


def last_there(
    born: np.ndarray,
    died: np.ndarray,
    width: Any,
    size: Any,
    lows: np.ndarray,
    highs: np.ndarray,
    begins: np.ndarray,
    ends: np.ndarray,
    out: np.ndarray,
) -> None:
    """Of `gpu_ops.cudf_backend.nearest`."""
    assert born.size == died.size == 2 * width
    assert lows.size == highs.size == begins.size == ends.size == out.size == size
    for of_two, values in ((np.minimum, born), (np.maximum, died)):
        assert (values[1 : int(width)] == of_two(values[2::2], values[3::2])).all()
    rows_born, rows_died = born[int(width) :], died[int(width) :]
    for at in range(int(size)):
        part = slice(int(lows[at]), int(highs[at]))
        there = np.flatnonzero((rows_born[part] < ends[at]) & (rows_died[part] > begins[at]))
        out[at] = part.start + there[-1] if there.size else -1


def put_spans(
    begins: np.ndarray, ends: np.ndarray, ranks: np.ndarray, spans: Any, width: Any, n: Any, tree: np.ndarray
) -> None:
    """Of `gpu_ops.cudf_backend.least`."""
    assert begins.size == ends.size == ranks.size == spans
    assert tree.size == 2 * width * n
    nodes: dict[int, list[int]] = {}
    for begin, end, rank in zip(begins.tolist(), ends.tolist(), ranks.tolist(), strict=True):
        low, high = begin + int(width), end + int(width)
        while low < high:
            if low & 1:
                nodes.setdefault(low, []).append(rank)
                low += 1
            if high & 1:
                high -= 1
                nodes.setdefault(high, []).append(rank)
            low, high = low >> 1, high >> 1
    for node, found in nodes.items():
        few = sorted(found)[: int(n)]
        tree[node * int(n) : node * int(n) + len(few)] = few


def least_at_moments(tree: np.ndarray, width: Any, n: Any, size: Any, out: np.ndarray) -> None:
    """Of `gpu_ops.cudf_backend.least`."""
    assert tree.size == 2 * width * n
    lists, node = tree.reshape(-1, int(n)), np.arange(int(size)) + int(width)
    found = out.reshape(-1, int(n))
    while node[0]:
        found[:] = np.sort(np.concatenate([found, lists[node]], axis=1), axis=1)[:, : int(n)]
        node >>= 1


def _part_of(parts: Any, size: Any) -> tuple[np.ndarray, np.ndarray]:
    """Of each row its part, and its place in it."""
    number = int(parts["number"][0])
    ends = parts["part"]["end"][0, :number]
    assert (np.diff(ends, prepend=0) > 0).all(), "a part without rows"
    assert ends[-1] == size
    at = np.arange(int(size))
    part = np.searchsorted(ends, at, side="right")
    return part, at - np.concatenate([[0], ends[:-1]])[part]


def flag_rows(parts: Any, size: Any, out: np.ndarray) -> None:
    """Of `gpu_ops.cudf_backend.flagged`."""
    assert out.size == size
    of, place = _part_of(parts, size)
    for number, part in enumerate(parts["part"][0][: int(parts["number"][0])]):
        mine = of == number
        length = int(mine.sum())
        wanted = memory(part["flags"], np.bool_, length).copy() if part["flags"] else np.ones(length, bool)
        if part["unless"]:
            wanted &= ~memory(part["unless"], np.bool_, length)
        places = memory(part["places"], np.int64, length) if part["places"] else place[mine]
        assert np.array_equal(np.sort(places), np.arange(length)), "rows that no flag is of"
        out[np.flatnonzero(mine)[places]] = wanted


def put_flagged(
    parts: Any,
    numbers: Any,
    size: Any,
    columns: Any,
    every: Any,
    running: np.ndarray,
    out: np.ndarray,
    told: np.ndarray,
) -> None:
    """Of `gpu_ops.cudf_backend.flagged`."""
    assert running.size == size
    assert out.size == columns * size
    of, place = _part_of(parts, size)
    wanted = np.ones(int(size), bool) if every else np.diff(running, prepend=0) > 0
    for number, part in enumerate(parts["part"][0][: int(parts["number"][0])]):
        mine = np.flatnonzero(of == number)
        told[number] = mine[-1] + 1 if every else running[mine[-1]]
        some = mine[wanted[mine]]
        to = some if every else running[some] - 1
        for column in range(int(columns)):
            given = part["columns"][column]
            rows = place[some]
            counted = part["firsts"][column] + part["steps"][column] * rows
            out[column * int(size) + to] = memory(given, np.int64, mine.size)[rows] if given else counted
    for number in range(int(numbers["number"][0])):
        told[int(parts["number"][0]) + number] = memory(numbers["at"][0, number], np.int64, 1)[0]


def make_entries(
    hashes: np.ndarray,
    given_rows: np.ndarray,
    slots: np.ndarray,
    given: Any,
    rows: np.ndarray,
    every: Any,
    first: Any,
    size: Any,
    out: np.ndarray,
) -> None:
    """Of `gpu_ops.cudf_backend.search`."""
    assert out.size == size == given + rows.size
    assert given == 0 or given == slots.size == given_rows.size
    own, counted = hashes if every else hashes[rows], np.arange(int(first), int(first + size - given))
    upper = np.concatenate([hashes[given_rows[: int(given)]], own]) & ~LOW
    out[:] = upper | np.concatenate([slots[: int(given)], counted]).astype(np.uint64)


def merge_entries(first: np.ndarray, size: Any, second: np.ndarray, total: Any, out: np.ndarray) -> None:
    """Of `gpu_ops.cudf_backend.search`."""
    assert (first.size, first.size + second.size, out.size) == (size, total, total)
    out[:] = np.sort(np.concatenate([first, second]))


def begin_prefixes(
    entries: np.ndarray, size: Any, shift: Any, prefixes: Any, others: np.ndarray, more: Any, directory: np.ndarray
) -> None:
    """Of `gpu_ops.cudf_backend.search`."""
    assert entries.size == size
    assert directory.size == others.size == prefixes + 1
    before = others.copy() if more else 0
    directory[:] = np.searchsorted(
        entries >> np.uint64(32 + int(shift)), np.arange(int(prefixes) + 1).astype(np.uint64)
    )
    directory[:] += before


def find_invalid_text(text: np.ndarray, offsets: np.ndarray, size: Any, out: np.ndarray) -> None:
    """Of `gpu_ops.cudf_backend.dataframes`."""
    assert offsets.size == size + 1
    assert out.size == size
    whole = text.tobytes()
    for row, (begin, end) in enumerate(itertools.pairwise(offsets.tolist())):
        try:
            whole[begin:end].decode()
        except UnicodeDecodeError:
            out[row] = True
        else:
            out[row] = False


_KERNELS = (
    find,
    bisect_run,
    write_pairs,
    gather_rows,
    add_numbers,
    merge_entries,
    begin_prefixes,
    make_entries,
    compare_rows,
    mark_matches,
    put_matches,
    pack_positions,
    begin_groups,
    find_neighbours,
    number_groups,
    nearest_in_run,
    bisect_ranges,
    fold_lives,
    last_there,
    sole_in_runs,
    flag_rows,
    put_flagged,
    put_spans,
    least_at_moments,
    find_invalid_text,
)
TWINS = {kernel.__name__: kernel for kernel in _KERNELS}
