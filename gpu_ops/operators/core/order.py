"""Rows by group and in order: groups of equal rows, numbers in the order of values, the least rows at each moment.

`least` says which rows are the first n while rows come and go, by a segment tree over the moments (Bentley 1977): a row
that is there from one moment to another is written at the few nodes that make up this span, of each node only the n
least are kept, and each node's are handed to the two below it. Rows of one group have their moments side by side, so
that one tree serves all groups.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gpu_ops.arrays import Array, Hashes, Ints, Positions, value_changes, written_out
from gpu_ops.descriptions.groups import Order
from gpu_ops.kernels import Columns, Frame, Kernels, distinct
from gpu_ops.values import is_bytes, one_array

NONE: Final = np.iinfo(np.int64).max
"""Stands where fewer than n are there."""

_LOWEST: Final = np.int64(np.iinfo(np.int64).min)
_PREFIX: Final = 8
"""Bytes of a text that its number has."""


class Groups:
    """The rows of a frame grouped by equal columns; within a group, in their own order.

    Attributes:
        order: n row positions, group by group.
        group: n group numbers, for the rows in that order.
        bounds: where groups begin in that order, ascending, and at the end n.
    """

    def __init__(
        self, kernels: Kernels, frame: Frame, columns: tuple[str, ...], types: tuple[Any, ...], hashes: Hashes
    ) -> None:
        key_columns = Columns(frame, columns)
        self.order, self.bounds, self.group, unlike = kernels.grouped(types, key_columns, hashes)
        if unlike.size:
            self._part(kernels, types, key_columns, unlike)

    def _part(self, kernels: Kernels, types: tuple[Any, ...], key_columns: Columns, unlike: Positions) -> None:
        """Hashes that look equal, unequal rows: within such a group, put those unlike its leader last.

        Only these groups are looked at: among 10M different rows a few dozen are there by chance, and hardly ever more.
        """
        xp = kernels.xp
        mixed = distinct(kernels, self.group[unlike])
        begin = self.bounds[mixed]
        number, places = written_out(xp, begin, self.bounds[mixed + 1] - begin)
        order, first = self.order[places], value_changes(xp, number)
        while True:
            group = xp.cumsum(first) - 1
            leader, rest = order[xp.flatnonzero(first)], xp.flatnonzero(~first)
            same = kernels.equal_at(types, (key_columns, order[rest]), (key_columns, leader[group[rest]]))
            if bool(same.all()):
                break
            mark = 2 * group
            mark[rest] += ~same
            refine = kernels.argsort(mark)
            order, mark = order[refine], mark[refine]
            first = value_changes(xp, mark)
        self.order[places] = order
        first &= ~value_changes(xp, number)
        begins = places[xp.flatnonzero(first)]
        self.bounds = xp.sort(xp.concatenate([self.bounds, begins]))
        more = xp.zeros(self.order.size, np.int64)
        more[begins] = 1
        self.group = self.group + xp.cumsum(more)

    @property
    def starts(self) -> Positions:
        """The position at which each group begins."""
        return self.bounds[:-1]

    @functools.cached_property
    def leader(self) -> Positions:
        """The first row of each group."""
        return self.order[self.starts]

    @functools.cached_property
    def last(self) -> Positions:
        """The last row of each group."""
        return self.order[self.bounds[1:] - 1]


def within(xp: Any, groups: Groups, flags: Array) -> Array:
    """For grouped rows, how many flags stand before each row in its group."""
    before = xp.cumsum(flags) - flags
    return before - before[groups.starts][groups.group]


def float_codes(values: npt.NDArray[np.float64]) -> Ints:
    """Numbers that are in the order of n double numbers: one zero, and one NaN behind infinity."""
    values = values + 0.0
    wrong = np.isnan(values)
    if wrong.any():
        values[wrong] = np.nan
    bits = values.view(np.int64)
    bits ^= (bits >> 63) & np.int64(np.iinfo(np.int64).max)  # of negative numbers all but the sign
    return bits


def one_zero(column: pa.Array) -> pa.Array:
    """A column in which zero is one value."""
    if not pa.types.is_floating(column.type):
        return column
    zero = pa.scalar(0.0, column.type)
    return pc.if_else(pc.equal(column, zero), zero, column) if column.type == pa.float16() else pc.add(column, zero)


def one_nan(column: pa.Array) -> pa.Array:
    """A column in which NaN is one value, whatever its bits are."""
    if not pa.types.is_floating(column.type) or not pc.any(nan := pc.is_nan(column)).as_py():
        return column
    return pc.if_else(nan, pa.scalar(np.nan, column.type), column)


def order_codes(column: pa.Array) -> Ints:
    """Numbers that are in the order of values: null is the least, NaN the greatest, zero one value."""
    t, kind = pa.types, column.type
    integer_codes = _own_codes(column)
    if integer_codes is not None:
        return integer_codes
    if not len(column) or t.is_null(kind):
        return np.zeros(len(column), np.int64)
    if t.is_duration(kind):
        column = column.cast(pa.int64())
    if t.is_floating(kind):
        column = one_zero(column)
        nan = pc.fill_null(pc.is_nan(column), False)
        codes = _dense(pc.if_else(nan, pa.scalar(None, kind), column))
        return np.where(nan.to_numpy(zero_copy_only=False), np.int64(len(column) + 1), codes)
    return _dense(column)


def order_keys(columns: Sequence[pa.ChunkedArray], order: Sequence[Order]) -> list[npt.NDArray[np.generic]]:
    """Numbers by which rows are in an order, the first above all; rows that order alike have the same ones.

    Args:
        columns: n values of each of the order's columns.
        order: by what.
    """
    keys: list[npt.NDArray[np.generic]] = []
    for column, by in zip(columns, order, strict=True):
        nulls = column.is_null().to_numpy()
        codes = order_codes(one_array(column))
        keys += [~nulls if by.nulls_first else nulls, np.where(nulls, 0, ~codes if by.descending else codes)]
    return keys


def order_codes_of(held: pa.ChunkedArray, fresh: pa.Array) -> tuple[Ints, Ints]:
    """`order_codes` of values that lie in two columns."""
    parts = [_own_codes(one_array(held)), _own_codes(fresh)]
    if parts[0] is not None and parts[1] is not None:
        return parts[0], parts[1]
    codes = order_codes(one_array(pa.chunked_array([*held.chunks, fresh], held.type)))
    return codes[: len(held)], codes[len(held) :]


def _own_codes(column: pa.Array) -> Ints | None:
    """`order_codes` where those of a value do not depend on the others; else None."""
    return None if column.null_count or not exact(column.type) else value_codes(pa.chunked_array([column]))


def exact(kind: pa.DataType) -> bool:
    """Tells whether different values of a type always have different `value_codes`."""
    t = pa.types
    if t.is_decimal(kind):
        return bool(kind.precision <= 18)
    return not (t.is_string(kind) or t.is_large_string(kind) or is_bytes(kind))


def value_codes(column: pa.ChunkedArray) -> Ints:
    """Numbers in the order of values, NaN behind infinity, anything for nulls; if not `exact` some are the same."""
    kind, t = column.type, pa.types
    if t.is_decimal(kind) and kind.precision > 18:
        column, kind = column.cast(pa.float64(), safe=False), pa.float64()
    if t.is_floating(kind):
        return float_codes(column.cast(pa.float64()).fill_null(0).to_numpy())
    if t.is_decimal(kind):
        # the lower halves of short ones are the whole
        return np.concatenate([np.empty(0, np.int64), *(decimal_halves(chunk)[0] for chunk in column.chunks)])
    if t.is_string(kind) or t.is_large_string(kind) or is_bytes(kind):
        chunks = [_text_numbers(chunk.cast(pa.large_binary())) for chunk in column.chunks]
        return np.concatenate([np.empty(0, np.int64), *chunks])
    if kind == pa.uint64():
        values = column.fill_null(0).to_numpy().view(np.int64)
        return np.asarray(values ^ _LOWEST)
    if t.is_boolean(kind):
        column = column.cast(pa.int8())
    elif t.is_date32(kind) or t.is_time32(kind):
        column = column.cast(pa.int32())
    whole: Ints = column.cast(pa.int64()).fill_null(0).to_numpy()
    return whole


def _text_numbers(values: pa.LargeBinaryArray) -> Ints:
    """The first bytes of each value as one number."""
    _, offsets, data = values.buffers()
    ends = np.frombuffer(offsets, np.int64)[values.offset : values.offset + len(values) + 1]
    numbers = np.zeros(len(values), np.uint64)
    if data is None or not data.size:
        return numbers.view(np.int64) ^ _LOWEST
    content = np.frombuffer(data, np.uint8)
    for number in range(_PREFIX):
        at = ends[:-1] + number
        byte = np.where(at < ends[1:], content[np.minimum(at, content.size - 1)], np.uint8(0))
        numbers = (numbers << np.uint64(8)) | byte
    return numbers.view(np.int64) ^ _LOWEST


def _dense(column: pa.Array) -> Ints:
    ranks = pc.rank(column, "ascending", tiebreaker="dense").to_numpy().astype(np.int64)
    return np.where(column.is_valid().to_numpy(zero_copy_only=False), ranks, 0)


def decimal_halves(column: pa.Array) -> tuple[Ints, Ints]:
    """The lower and the upper 64 bits of n decimals, 0 for null."""
    kind = column.type
    if not pa.types.is_decimal128(kind):
        column = column.cast(pa.decimal128(kind.precision, kind.scale))
    words = np.frombuffer(column.buffers()[1], np.int64)[2 * column.offset :][: 2 * len(column)].reshape(-1, 2)
    if column.null_count:
        words = np.where(column.is_valid().to_numpy(zero_copy_only=False)[:, None], words, 0)
    return np.ascontiguousarray(words[:, 0]), np.ascontiguousarray(words[:, 1])


def least(kernels: Kernels, begins: Positions, ends: Positions, ranks: Array, *, size: int, n: int = 1) -> Array:
    """The n least ranks at each moment.

    Args:
        kernels: the backend.
        begins: m moments from which on a rank is there.
        ends: m moments from which on it is not any more.
        ranks: m different numbers (int64) from 0, below 2**31.
        size: how many moments there are, at most 2**31.
        n: how many are wanted.

    Returns:
        An array of ``size`` rows and n columns (int64): each row ascending, `NONE` behind the last.
    """
    quick = kernels.least(begins, ends, ranks, size=size, n=n)
    if quick is not None:
        return quick
    xp, levels = kernels.xp, max(0, size - 1).bit_length()
    nodes: list[tuple[Array, Array]] = []
    low, high = begins, ends
    for _ in range(levels + 1):
        # a span's ends that are no ends of a node of the next level have a node of this one
        inside = xp.flatnonzero(low < high)
        low, high, ranks = low[inside], high[inside], ranks[inside]
        first, last = xp.flatnonzero(low & 1), xp.flatnonzero(high & 1)
        nodes.append((xp.concatenate([low[first], high[last] - 1]), xp.concatenate([ranks[first], ranks[last]])))
        low, high = (low + 1) >> 1, high >> 1
    least_ranks = xp.full((1, n), NONE, np.int64)
    for level in range(levels, -1, -1):
        width = ((size - 1) >> level) + 1
        least_ranks = least_ranks[xp.arange(width, dtype=np.int64) >> 1]
        _write(xp, least_ranks, *nodes[level], n)
    return least_ranks


def _write(xp: Any, least_ranks: Array, nodes: Positions, ranks: Array, n: int) -> None:
    """Take ranks into the n least of their nodes, which are rows of what was found."""
    if not nodes.size:
        return
    packed = xp.sort((nodes << 32) | ranks)
    nodes, ranks = packed >> 32, packed & 0xFFFFFFFF
    opens = value_changes(xp, nodes)
    starts = xp.flatnonzero(opens)
    node = xp.cumsum(opens) - 1
    place = xp.arange(nodes.size, dtype=np.int64) - starts[node]
    few = xp.flatnonzero(place < n)
    added = xp.full((starts.size, n), NONE, np.int64)
    added[node[few], place[few]] = ranks[few]
    where = nodes[starts]
    if n == 1:
        least_ranks[where] = xp.minimum(least_ranks[where], added)
    else:
        least_ranks[where] = xp.sort(xp.concatenate([least_ranks[where], added], axis=1), axis=1)[:, :n]
