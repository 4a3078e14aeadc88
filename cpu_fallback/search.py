"""Lookups in sorted runs, and which of the rows found are equal.

A lookup (`gpu_ops.kernels.Kernels.search`) is a jump to a hash prefix, then a bisection.

Equality, in general: keys are gathered and compared, for types of any kind. Written on arrays of either backend; the
GPU's comes here for what its kernels do not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cpu_fallback.hashing import UInt64s, expand
from gpu_ops import layouts
from gpu_ops.arrays import Array, ArrowTypes, Hashes, Ints, Positions, Slots
from gpu_ops.kernels import Among, Columns, Flagged, Frame, Kernels, SearchedRun, TooMany, as_slots, looked_at


def equal_at(
    kernels: Kernels,
    types: ArrowTypes,
    one: tuple[Columns, Array],
    other: tuple[Columns, Array],
    where: Array | None = None,
) -> Array:
    """See `gpu_ops.kernels.Kernels.equal_at`."""
    (first, rows), (second, slots), xp = one, other, kernels.xp
    if where is not None:
        at, equal = xp.flatnonzero(where), xp.zeros(where.size, bool)
        if at.size:
            equal[at] = equal_at(kernels, types, (first, rows[at]), (second, slots[at]))
        return equal
    return kernels.equal_rows(_gathered(first, rows), first.names, _gathered(second, slots), second.names, types)


def _gathered(columns: Columns, rows: Array) -> Frame:
    wanted = rows if columns.rows is None else columns.rows[rows]
    return columns.source.take(wanted, columns.names, present=True)


def matches(
    kernels: Kernels,
    types: ArrowTypes,
    pairs: Array,
    columns: tuple[Columns, Columns],
    among: Among | None,
    *,
    by_candidate: bool = False,
) -> tuple[Array, Slots]:
    """See `gpu_ops.kernels.Kernels.matches`."""
    # One key per pair, sorted as a value: cheaper than an argsort and two gathers.
    probe_row, slots = layouts.unpaired(kernels.sort(pairs))
    if by_candidate:
        probe_row, slots = slots, probe_row
    mask = None
    if among is not None:
        states = among.states[slots]
        one = among.least == among.most
        mask = states == among.least if one else (states >= among.least) & (states <= among.most)
    if types and probe_row.size:
        same = equal_at(kernels, types, (columns[0], probe_row), (columns[1], slots))
        mask = same if mask is None else mask & same
    kept = None if mask is None else kernels.xp.flatnonzero(mask)
    return (probe_row, slots) if kept is None or kept.size == probe_row.size else (probe_row[kept], slots[kept])


def sole_matches(
    kernels: Kernels,
    types: ArrowTypes,
    pairs: Array,
    columns: tuple[Columns, Columns],
    among: Among | None,
    *,
    size: int,
) -> Slots:
    """See `gpu_ops.kernels.Kernels.sole_matches`."""
    probe_row, slots = matches(kernels, types, pairs, columns, among)
    found: Slots = kernels.xp.full(size, -1, np.int64)
    found[probe_row] = slots
    return found


def grouped(
    kernels: Kernels, types: ArrowTypes, own: Columns, hashes: Hashes
) -> tuple[Positions, Positions, Array, Positions]:
    """See `gpu_ops.kernels.Kernels.grouped`."""
    xp, size = kernels.xp, int(hashes.size)
    # Positions in the lower bits: one sort of values, and few hashes are alike in what is left of them.
    bits = np.uint64(size.bit_length())
    lower = (np.uint64(1) << bits) - np.uint64(1)
    packed = hashes & ~lower
    packed |= xp.arange(size, dtype=np.uint64)
    packed = kernels.sort(packed)
    order = (packed & lower).view(np.int64)
    packed >>= bits
    begins = xp.ones(size + 1, bool)
    xp.not_equal(packed[1:], packed[:-1], out=begins[1:-1])
    bounds, first = xp.flatnonzero(begins), begins[:-1]
    group = xp.cumsum(first) - 1
    rest = xp.flatnonzero(~first) if bounds.size <= size else first[:0]
    if 2 * int(rest.size) <= size:
        same = equal_at(kernels, types, (own, order[rest]), (own, order[rest - 1])) if rest.size else first[:0]
        return order, bounds, group, rest[:0] if bool(same.all()) else rest[~same]
    # most rows have an equal one before them: each is gathered once
    sorted_ = _gathered(own, order)
    same = kernels.equal_rows(sorted_.slice(1, size - 1), own.names, sorted_.slice(0, size - 1), own.names, types)
    same = same | first[1:]
    return order, bounds, group, rest[:0] if bool(same.all()) else xp.flatnonzero(~same) + 1


def flagged(
    kernels: Kernels, parts: Sequence[Flagged], numbers: Sequence[Array] = (), *, chained: bool = False
) -> tuple[list[list[Array]], list[int], list[int]]:
    """See `gpu_ops.kernels.Kernels.flagged`."""
    xp, found, sizes = kernels.xp, [], list[int]()
    for part in parts:
        flags, columns = _flags(xp, part), part.columns
        some = [one for one in columns if one is not None and not isinstance(one, int)]
        if len(columns) == 1 and some and flags is not None:
            rows = [xp.compress(flags, some[0])]
        else:
            length = int((some[0] if flags is None else flags).size)
            at = xp.flatnonzero(flags) if flags is not None else as_slots(kernels, 0, length) if not some else None
            rows = [_picked(xp, at, one, length if at is None else int(at.size)) for one in columns]
        found.append(rows)
        sizes.append(int(rows[0].size))
    if chained and len(found) > 1:
        found = [[xp.concatenate(column) for column in zip(*found, strict=True)]]
    return found, sizes, looked_at(kernels, numbers)


def _flags(xp: Any, part: Flagged) -> Array | None:
    """The flags of rows that are wanted, in their order; None for all."""
    flags, _, unless, places = part
    if unless is not None:
        flags = ~unless if flags is None else flags > unless
    if places is None:
        return flags
    by_row = xp.empty(places.size, bool)
    by_row[places] = flags
    return by_row


def _picked(xp: Any, at: Array | None, column: Array | int | None, size: int) -> Array:
    """A column of the rows at some positions; None for all rows."""
    if column is None:
        return xp.full(size, -1, np.int64)
    if isinstance(column, int):
        return (xp.arange(size, dtype=np.int64) if at is None else at) + column
    return column if at is None else column[at]


def bisect_ranges(
    kernels: Kernels,
    columns: Sequence[Array],
    ranges: tuple[Positions, Positions],
    wanted: Sequence[Array],
    *,
    after: bool = False,
) -> Positions:
    """See `gpu_ops.kernels.Kernels.bisect_ranges`: all ranges side by side, half of each at a step."""
    xp, low, high = kernels.xp, ranges[0].copy(), ranges[1].copy()
    open_ = xp.flatnonzero(low < high)
    while open_.size:
        middle = (low[open_] + high[open_]) >> 1
        before = xp.full(open_.size, after)
        for column, than in zip(reversed(columns), reversed(wanted), strict=True):
            value, limit = column[middle], than[open_]
            before = (value < limit) | ((value == limit) & before)
        low[open_] = xp.where(before, middle + 1, low[open_])
        high[open_] = xp.where(before, high[open_], middle)
        open_ = open_[low[open_] < high[open_]]
    return low


_NEVER_BORN, _NEVER_THERE = np.iinfo(np.int64).max, np.iinfo(np.int64).min


def lives(kernels: Kernels, born: Array, died: Array) -> tuple[Array, Array]:
    """See `gpu_ops.kernels.Kernels.lives`: level by level."""
    xp, width = kernels.xp, 1 << int(born.size - 1).bit_length()
    trees = xp.full(2 * width, _NEVER_BORN, np.int64), xp.full(2 * width, _NEVER_THERE, np.int64)
    for tree, own, of_two in zip(trees, (born, died), (xp.minimum, xp.maximum), strict=True):
        tree[width : width + own.size] = own
        level = width >> 1
        while level:
            below = tree[2 * level : 4 * level]
            of_two(below[::2], below[1::2], out=tree[level : 2 * level])
            level >>= 1
    return trees


_ANY_LEVEL = 63


def last_there(
    kernels: Kernels,
    lives: tuple[Array, Array],
    ranges: tuple[Positions, Positions],
    spans: tuple[Array, Array],
) -> Positions:
    """See `gpu_ops.kernels.Kernels.last_there`: all ranges side by side, a node of the tree at a step."""
    xp, (born, died), (low, high), (begin, end) = kernels.xp, lives, ranges, spans
    width = born.size // 2
    powers = np.int64(1) << xp.arange(int(width).bit_length(), dtype=np.int64)
    found: Positions = xp.full(low.size, -1, np.int64)
    at = high.copy()
    most = xp.full(low.size, _ANY_LEVEL, np.int64)
    open_ = xp.flatnonzero(low < at)
    while open_.size:
        # the largest node that ends here, or, where that has such a row, the right half of it
        to = at[open_]
        level = xp.minimum(xp.searchsorted(powers, to & ~(to - 1)), most[open_])
        node = ((width + to) >> level) - 1
        has = (born[node] < end[open_]) & (died[node] > begin[open_])
        hit = has & (level == 0)
        found[open_[hit]] = to[hit] - 1
        most[open_] = xp.where(has, level - 1, _ANY_LEVEL)
        at[open_] = xp.where(has, to, to - (np.int64(1) << level))
        open_ = open_[~hit & (at[open_] > low[open_])]
    return found


_LOW = np.uint64(0xFFFFFFFF)
# Larger buckets, rare but for keys of many rows, are left out of the common bisection: it would read farther off.
_CROWDED = 15
# Probe rows at a time: what they read of a run fits the second-level cache.
_BLOCK = 1 << 13
# Buckets of up to this many entries with times are read in full: cheaper than bisecting them.
_SCAN = 12
# Where this many probe rows look into large buckets, each for itself costs more than one key of hash and time for all
# entries of the part of the run that they look into, if that has at most so many entries a probe row.
_MANY, _PART = 1 << 10, 8


def by_hash(found_in: SearchedRun, hashes: UInt64s, at_most: int | None = None) -> tuple[Ints, Ints]:
    """Entries with a probe row's hash: the first of each hash, and those that follow it.

    Args:
        found_in: a run.
        hashes: n uint64, the upper halves of hashes.
        at_most: how many there may be.

    Returns:
        Positions of probe rows, and slots, in any order.

    Raises:
        TooMany: there are more than there may be.
    """
    run = found_in.entries
    if not hashes.size or not run.size:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    keys = hashes << np.uint64(32)
    place = np.empty(keys.size, np.int64)
    first, second = np.empty(keys.size, np.uint64), np.empty(keys.size, np.uint64)
    # Block by block, so that the lines of the run which one step of the bisection reads are there for the next.
    for start in range(0, keys.size, _BLOCK):
        block = slice(start, start + _BLOCK)
        at, key = place[block], keys[block]
        _first_not_less(run, found_in.directory, found_in.shift, key, at)
        # the exclusive or leaves the slot where the hash is the same
        np.bitwise_xor(run.take(at, mode="clip", out=first[block]), key, out=first[block])
        at += 1
        np.bitwise_xor(run.take(at, mode="clip", out=second[block]), key, out=second[block])
    probe_row = np.flatnonzero(first <= _LOW)
    slots = first[probe_row].view(np.int64)
    # Few hashes have more than one entry, but for keys of many rows: their ends are found by themselves.
    twin = np.flatnonzero(second <= _LOW)
    if twin.size:
        begin = place[twin]
        end = np.searchsorted(run, keys[twin] | _LOW, side="right")
        count = np.maximum(end - begin, 0)
        if at_most is not None and probe_row.size + int(count.sum()) > at_most:
            raise TooMany
        number, position = expand(begin, count)
        probe_row = np.concatenate([probe_row, twin[number]])
        slots = np.concatenate([slots, (run[position] & _LOW).view(np.int64)])
    return probe_row, slots


def by_time(run: SearchedRun, hashes: UInt64s, earliest: Ints, latest: Ints) -> tuple[Ints, Array]:
    """Entries with a probe row's hash and a time that it wants.

    Args:
        run: with times.
        hashes: n uint64, the upper halves of hashes.
        earliest: n.
        latest: n, inclusive.

    Returns:
        Positions of probe rows, and slots.
    """
    times = run.times
    assert times is not None
    begin, end = _bucket(run, hashes)
    count = end - begin
    large = np.flatnonzero(count > _SCAN)
    if large.size:
        part, ends = hashes[large], (begin[large], end[large])
        begin[large] = _bisect(run, part, earliest[large], ends, after=False)
        count[large] = np.maximum(_bisect(run, part, latest[large], ends, after=True) - begin[large], 0)
    probe_row, place = expand(begin, count)
    time, entry = times[place], run.entries[place]
    fits = (
        (layouts.entry_hashes(entry) == hashes[probe_row]) & (time >= earliest[probe_row]) & (time <= latest[probe_row])
    )
    found = np.flatnonzero(fits)
    return probe_row[found], layouts.entry_slots(entry[found])


def bisect(run: SearchedRun, hashes: UInt64s, times: Ints, *, after: bool) -> Ints:
    """The position of the first entry not before (or, `after`, beyond) each probe row's hash and time."""
    begin, end = _bucket(run, hashes)
    if hashes.size >= _MANY and int((end - begin).sum()) > _SCAN * hashes.size:
        first, last = int(begin.min()), int(end.max())
        if last - first <= _PART * hashes.size:
            found = _among(run, slice(first, last), hashes, times, after=after)
            if found is not None:
                return found
    return _bisect(run, hashes, times, (begin, end), after=after)


def _first_not_less(run: UInt64s, directory: Ints, shift: int, key: UInt64s, at: Ints) -> None:
    """Into ``at`` the position of the first entry of a run that is not less than a key; anything beyond the end."""
    bucket = (key >> np.uint64(32 + shift)).view(np.int64)
    at[:] = directory.take(bucket)
    bucket += 1
    count = directory.take(bucket) - at
    width = int(count.max())
    crowded = np.flatnonzero(count > _CROWDED) if width > _CROWDED else None
    step = 1 << min(width, _CROWDED).bit_length() >> 1
    # ``at`` is the last entry known to be less. A step out of the bucket ends at a greater entry, or, when the key
    # is greater than all entries, anywhere.
    at -= 1
    middle, less, entry = np.empty_like(at), np.empty(at.size, bool), np.empty_like(key)
    while step:
        np.add(at, step, out=middle)
        run.take(middle, mode="clip", out=entry)
        np.less(entry, key, out=less)
        np.multiply(less, step, out=middle)
        at += middle
        step >>= 1
    at += 1
    if crowded is not None:
        at[crowded] = np.searchsorted(run, key[crowded])


def _bucket(run: SearchedRun, hashes: UInt64s) -> tuple[Ints, Ints]:
    """The places where the entries that share each hash's prefix begin and end."""
    bucket = (hashes >> np.uint64(run.shift)).view(np.int64)
    return run.directory[bucket].astype(np.int64), run.directory[bucket + 1].astype(np.int64)


def _among(run: SearchedRun, part: slice, hashes: UInt64s, times: Ints, *, after: bool) -> Ints | None:
    """Bisects a part of a run by one number of hash and time; None where these are too far apart for that."""
    assert run.times is not None
    stored = run.times[part]
    low, high = stored.min(), stored.max()
    # the prefixes of the probe rows are those of the part
    least, most = int(hashes.min()) >> run.shift << run.shift, int(hashes.max()) | (1 << run.shift) - 1
    bits = (int(high) - int(low) + 1).bit_length()
    if (most - least).bit_length() + bits >= 64:
        return None
    own = layouts.entry_hashes(run.entries[part]) - np.uint64(least)
    keys = layouts.by_hash_and(own, stored - low, bits)
    wanted = np.clip(times, low, high) - low
    wanted += times >= low if after else times > high
    probe_rows: UInt64s = layouts.by_hash_and(hashes - np.uint64(least), wanted, bits)
    found: Ints = np.searchsorted(keys, probe_rows)
    found += part.start
    return found


def _bisect(run: SearchedRun, hashes: UInt64s, times: Ints, ends: tuple[Ints, Ints], *, after: bool) -> Ints:
    """Within ``[ends[0], ends[1])``, the first entry not before (or, `after`, beyond) a probe row's hash and time."""
    stored = run.times
    assert stored is not None
    low, high = ends[0].copy(), ends[1].copy()
    open_ = np.flatnonzero(low < high)
    while open_.size:
        middle = (low[open_] + high[open_]) >> 1
        entry, time = layouts.entry_hashes(run.entries[middle]), stored[middle]
        wanted, limit = hashes[open_], times[open_]
        before = (entry < wanted) | ((entry == wanted) & ((time <= limit) if after else (time < limit)))
        low[open_] = np.where(before, middle + 1, low[open_])
        high[open_] = np.where(before, high[open_], middle)
        open_ = open_[low[open_] < high[open_]]
    return low
