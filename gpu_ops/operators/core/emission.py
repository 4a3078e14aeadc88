"""Rows on their way out: which state rows they are made of, of what kind, and in what order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gpu_ops import layouts
from gpu_ops.arrays import Array, LogicalTimes, Positions, Slots
from gpu_ops.conditions import Condition
from gpu_ops.descriptions.changelog import DELETE, INSERT
from gpu_ops.kernels import Among, Columns, Flagged, Frame, Kernels, SoleLookup
from gpu_ops.operators.core.changes import ALWAYS, NEVER, Lifetimes
from gpu_ops.operators.core.match import fulfilling, in_one, in_pieces, match_among
from gpu_ops.operators.core.order import Groups, within
from gpu_ops.state.keyed_table import KeyedTable
from gpu_ops.state.table import DYING, LIVE

# Order within one logical time: an unmatched row's retraction comes before the rows that replace it, an unmatched row
# after the rows it replaces.
UNMATCHED_GOES, JOINED, UNMATCHED_COMES = 0, 1, 2


@dataclasses.dataclass
class OutputRows:
    """N rows that enter or leave the result: parallel arrays.

    A left row in slot 3 that loses its unmatched row because change 5 brings its first match, in slot 8:

        kinds          [DELETE, INSERT]
        slots         ([3,      3     ],
                       [-1,     8     ])
        logical_times  [11,     11    ]

    Attributes:
        kinds: in host memory where `net_rows` made them: only the host looks at them.
        slots: of each input; -1 stands for a row of nulls.
        logical_times: None of a net change.
        missing: of each input, how many rows of nulls there are, where that is known.
    """

    kinds: Array
    slots: tuple[Slots, ...]
    logical_times: LogicalTimes | None
    missing: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        """The number of rows."""
        return int(self.kinds.size)

    def sequence(self, kernels: Kernels) -> npt.NDArray[np.int64]:
        """For each row the sequence of the change that caused it, in host memory."""
        assert self.logical_times is not None
        return kernels.asnumpy(self.logical_times) >> 1

    def pick(self, positions: Positions) -> OutputRows:
        """Gathers some of the rows, in the order given."""
        slots = tuple(s[positions] for s in self.slots)
        times = None if self.logical_times is None else self.logical_times[positions]
        return OutputRows(self.kinds[positions], slots, times)


def left_right(side: int, own: Any, other: Any) -> tuple[Any, Any]:
    """Orders a pair of one input's and the other's: the left's first."""
    return (own, other) if side == 0 else (other, own)


def with_nulls(xp: Any, side: int, slots: Slots) -> tuple[Slots, Slots]:
    """Left and right slots of rows of one side, beside nulls of the other."""
    return left_right(side, slots, xp.full(slots.size, -1, np.int64))


def row_parts(side: int, parts: Sequence[Flagged]) -> list[Flagged]:
    """Rows of one side, beside nulls of the other, as `net_rows` takes them; given by their slots."""
    return [Flagged(part.flags, left_right(side, part.columns[0], None)) for part in parts]


def chained(kernels: Kernels, parts: Sequence[OutputRows]) -> OutputRows:
    """Several groups of rows, one after the other."""
    cat = kernels.xp.concatenate
    slots = tuple(cat(of_input) for of_input in zip(*(p.slots for p in parts), strict=True))
    return OutputRows(cat([p.kinds for p in parts]), slots, cat([p.logical_times for p in parts]))


def in_order(kernels: Kernels, parts: Sequence[tuple[OutputRows, int]]) -> OutputRows:
    """Groups of rows, each with a rank: by the event that caused a row, then by rank, else as they stand."""
    rows = chained(kernels, [part for part, _ in parts])
    assert rows.logical_times is not None
    ranks = kernels.xp.concatenate([kernels.xp.full(part.size, rank, np.int64) for part, rank in parts])
    return rows.pick(kernels.argsort((rows.logical_times << layouts.RANK_BITS) | ranks))


def net_rows(
    kernels: Kernels, leaving: Sequence[Flagged], coming: Sequence[Flagged], *, present: bool = False
) -> OutputRows:
    """The rows of a net change; those that leave first.

    Args:
        kernels: the backend.
        leaving: rows by the slots of each input.
        coming: likewise.
        present: no slot in an array of them is -1.
    """
    parts = [*leaving, *coming]
    (slots,), sizes, _ = kernels.flagged(parts, chained=True)
    kinds = np.full(sum(sizes), INSERT, np.int8)
    kinds[: sum(sizes[: len(leaving)])] = DELETE
    missing = None
    if present:
        beside = [
            [size if column is None else 0 for column in part.columns] for part, size in zip(parts, sizes, strict=True)
        ]
        missing = tuple(map(sum, zip(*beside, strict=True)))
    return OutputRows(kinds, tuple(slots), None, missing)


def fold(
    kernels: Kernels, frame: Frame, removes: Array, columns: tuple[str, ...], types: tuple[pa.DataType, ...]
) -> Positions:
    """Positions of the rows that are left when equal rows added and removed cancel each other.

    Args:
        kernels: the backend.
        frame: the rows' values.
        removes: mask of rows that remove; the others add.
        columns: the columns compared.
        types: their types.
    """
    xp = kernels.xp
    hashes = kernels.hash_rows(frame, columns, types)
    groups = Groups(kernels, frame, columns, types, hashes)
    number = int(groups.leader.size)
    sign = xp.where(removes[groups.order], -1, 1)
    net = xp.zeros(number, np.int64)
    kernels.scatter_add(net, groups.group, sign)
    # of each group, the first |net| rows that point the net's way
    right_way = sign * net[groups.group] > 0
    kept = xp.flatnonzero(right_way & (within(xp, groups, right_way) < xp.abs(net)[groups.group]))
    return kernels.sort(groups.order[kept])


SideTables = tuple[KeyedTable, KeyedTable]
SideLifetimes = tuple[Lifetimes, Lifetimes]


class PairRequest(NamedTuple):
    """The condition and the limits by which pairs are looked for.

    Attributes:
        condition: the residual condition.
        names: of the inputs in it.
        check: told now and then how many pairs there are so far; it may refuse them.
        at_most: how many candidates there may be.
    """

    condition: Condition | None
    names: tuple[str, str]
    check: Callable[[int], None]
    at_most: int | None = None


@dataclasses.dataclass
class Pairs:
    """Matching pairs that a micro-batch makes or unmakes: parallel arrays.

    Attributes:
        deltas: by how much each pair moves the association counts of its two rows.
    """

    slots: tuple[Slots, Slots]
    deltas: Array


@dataclasses.dataclass
class NetPairs(Pairs):
    """The pairs of a net change. Those of a row that comes with one that goes are among them, and count for nothing.

    Attributes:
        comes: flags of those that the micro-batch makes; None for all.
        goes: flags of those that it unmakes; None for none.
        states: of the left, the right rows of pairs, `DYING` of some; None where none dies.
        sole: whether a row of the left, of the right that stays has one match at most, before and after.
        whole: whether all are pairs; if not, some slots are -1, both of a pair's.
    """

    comes: Array | None
    goes: Array | None
    states: tuple[Array | None, Array | None]
    sole: tuple[bool, bool]
    whole: bool


@dataclasses.dataclass
class TimedPairs(Pairs):
    """All pairs that live at some logical time of the micro-batch, with their times (int64).

    Attributes:
        comes: positions of those that the micro-batch makes.
        goes: positions of those that it unmakes.
        deaths: when the left and the right row die.
        begin: the later birth; `ALWAYS` if the pair is older than the micro-batch.
        end: the earlier death; `NEVER` if the pair outlives it.
    """

    comes: Positions
    goes: Positions
    deaths: tuple[LogicalTimes, LogicalTimes]
    begin: LogicalTimes
    end: LogicalTimes


def net_pairs(tables: SideTables, sides: SideLifetimes, request: PairRequest) -> NetPairs:
    """The pairs one of whose rows the micro-batch touches, by its net change."""
    kernels, xp = tables[0].kernels, tables[0].kernels.xp
    # Those that a residual condition looks at have to be pairs, and with a TTL each is a write of its rows.
    whole = request.condition is not None or any(table.written is not None for table in tables)
    slots, whole = _candidates(tables, sides, request, whole=whole), whole or kernels.host is None
    states = sides[0].states(slots[0]), sides[1].states(slots[1])
    sole, new = (tables[1].one_a_key, tables[0].one_a_key), (sides[0].first_new, sides[1].first_new)
    if states[0] is not None or states[1] is not None:
        deltas, comes, goes = kernels.fused(_net if whole else _net_of_some)(*slots, *new, *states)
        return NetPairs(slots, deltas, comes, goes, states, sole, whole)
    if whole:  # all pairs have a new row
        return NetPairs(slots, xp.ones(slots[0].size, np.int32), None, None, states, sole, whole)
    deltas, comes = kernels.fused(_come)(*slots, *new)
    return NetPairs(slots, deltas, comes, None, states, sole, whole)


def _net(  # noqa: PLR0917 - what is fused takes no keywords
    left: Array, right: Array, new_left: int, new_right: int, left_states: Array | None, right_states: Array | None
) -> tuple[Array, Array, Array]:
    """Computes by how much pairs of slots move counts, and masks of those that come and of those that go."""
    new, dies = (left >= new_left) | (right >= new_right), _dies(left_states, right_states)
    return new.astype(np.int32) - dies, new & ~dies, dies & ~new


def _net_of_some(  # noqa: PLR0917 - what is fused takes no keywords
    left: Array, right: Array, new_left: int, new_right: int, left_states: Array | None, right_states: Array | None
) -> tuple[Array, Array, Array]:
    """Computes the same as `_net` where there may be no pair, -1."""
    new, dies = (left >= new_left) | (right >= new_right), _dies(left_states, right_states) & (left >= 0)
    return new.astype(np.int32) - dies, new & ~dies, dies & ~new


def _come(left: Array, right: Array, new_left: int, new_right: int) -> tuple[Array, Array]:
    """Computes the same as `_net_of_some` where no row dies, and no pair goes."""
    new = (left >= new_left) | (right >= new_right)
    return new.astype(np.int32), new


def _dies(left_states: Array | None, right_states: Array | None) -> Array:
    """Flags pairs one of whose rows dies; of one side at least they are given."""
    left = None if left_states is None else left_states == DYING
    right = None if right_states is None else right_states == DYING
    return right if left is None else left if right is None else left | right


def timed_pairs(tables: SideTables, sides: SideLifetimes, request: PairRequest) -> TimedPairs:
    """All pairs one of whose rows the micro-batch touches and that live at some logical time of it."""
    xp = tables[0].kernels.xp
    slots = _candidates(tables, sides, request, whole=True)
    deaths = sides[0].died(xp, slots[0]), sides[1].died(xp, slots[1])
    begin = xp.maximum(sides[0].born(xp, slots[0]), sides[1].born(xp, slots[1]))
    end = xp.minimum(*deaths)
    if any(side.any_death for side in sides):
        live = xp.flatnonzero(begin < end)
        if live.size < begin.size:
            slots, deaths = (slots[0][live], slots[1][live]), (deaths[0][live], deaths[1][live])
            begin, end = begin[live], end[live]
    deltas, *flags = tables[0].kernels.fused(_timed)(begin, end)
    (comes,), (goes,) = tables[0].kernels.flagged([Flagged(mask, [0]) for mask in flags])[0]
    return TimedPairs(slots, deltas, comes, goes, deaths, begin, end)


def _timed(begin: LogicalTimes, end: LogicalTimes) -> tuple[Array, Array, Array]:
    """Computes by how much pairs of such times move counts, and masks of those that come and of those that go."""
    comes, goes = begin != ALWAYS, end != NEVER
    return comes.astype(np.int32) - goes, comes, goes


def _candidates(tables: SideTables, sides: SideLifetimes, request: PairRequest, *, whole: bool) -> tuple[Slots, Slots]:
    """Left and right slots of all pairs one of whose rows the micro-batch touches; see `probe`."""
    found = _sole_pairs(tables, sides, {0: True, 1: False}, request, whole=whole)
    if found is not None:
        return found
    xp = tables[0].kernels.xp
    left, right = probe(tables, sides, 0, request, dying=True, whole=whole)
    other_right, other_left = probe(tables, sides, 1, request, dying=False, whole=whole)
    return xp.concatenate([left, other_left]), xp.concatenate([right, other_right])


def _sole_pairs(
    tables: SideTables, sides: SideLifetimes, dying: Mapping[int, bool], request: PairRequest, *, whole: bool
) -> tuple[Slots, Slots] | None:
    """Left and right slots of what `probe` finds, of one side or of both, where each row has one match at most.

    One side after the other, in the order in which `probe` has them; what is no pair stands behind. None where the
    backend has no way of its own.

    Args:
        tables: of both sides.
        sides: the lifetimes of their rows.
        dying: by side that looks, whether it meets rows that die.
        request: as of `probe`.
        whole: as of `probe`.
    """
    kernels, lookups = tables[0].kernels, []
    found = [tables[1 - side] for side in dying]
    here = all(run.home is kernels for table in found for run in table.key_index.runs)
    sole = all(table.one_a_key for table in found) and all(sides[1 - side].net is not None for side in dying)
    if kernels.host is None or not here or not sole:
        return None
    for side, dies in dying.items():
        own, other = tables[side], tables[1 - side]
        touched, index = own.touched(), other.key_index
        if touched.size and len(other):
            new = [index.staged] if side == 0 and index.staged is not None else []
            among = _among(other, sides[1 - side], dying=dies)
            columns = Columns(own.store, own.keys), Columns(other.store, other.keys)
            lookups.append(SoleLookup(side, [list(index.runs), new], own.key_types, columns, touched, among))
    made = kernels.sole_pairs(lookups) if lookups else None
    if made is None:
        return None
    if whole:
        ((made,),), _, _ = kernels.flagged([Flagged(made != -1, [made])])
    in_order = kernels.sort(made.view(np.uint64)).view(np.int64)
    left, right = kernels.fused(layouts.unpaired_by_side)(in_order)
    if not whole:
        return left, right
    rows = {name: (table.store, slots) for name, table, slots in zip(request.names, tables, (left, right), strict=True)}
    kept = fulfilling(kernels, request.condition, rows, int(left.size))
    left, right = (left, right) if kept is None else (left[kept], right[kept])
    request.check(int(left.size))
    return left, right


def _among(table: KeyedTable, side: Lifetimes, *, dying: bool) -> Among | None:
    """The rows of a side that are met; ``dying``: those that die are among them."""
    every = table.all_alive and not side.killed.size
    return None if every else Among(table.status.values, LIVE, DYING if dying else LIVE)


def probe(
    tables: SideTables, sides: SideLifetimes, side: int, request: PairRequest, *, dying: bool, whole: bool = True
) -> tuple[Slots, Slots]:
    """Touched rows of one side with their matches: slots of that side, slots of the other.

    The left's touched rows meet new rows, too, and those that are ``dying`` or not; the right's only rows that the
    micro-batch leaves alone, so no pair is found twice. What is looked at before it is known to match is looked at in
    pieces of a bounded size. Unless they have to be ``whole``, slots of no pair, -1, may be among them on a GPU, which
    need not say then how many there are.

    Raises:
        TooMany: there are more candidates than there may be.
    """
    own, other = tables[side], tables[1 - side]
    kernels, xp = own.kernels, own.kernels.xp
    touched = own.touched()
    if touched.size == 0 or len(other) == 0:
        return xp.empty(0, np.int64), xp.empty(0, np.int64)

    found = _sole_pairs(tables, sides, {side: dying}, request, whole=whole)
    if found is not None:
        return left_right(side, *found)
    among = _among(other, sides[1 - side], dying=dying)
    columns = Columns(own.store, own.keys), Columns(other.store, other.keys)

    def residual(probe_slots: Slots, slots: Slots) -> Positions | None:
        rows = {request.names[side]: (own.store, probe_slots), request.names[1 - side]: (other.store, slots)}
        return fulfilling(kernels, request.condition, rows, int(slots.size))

    def candidates(rows: Array, at_most: int | None) -> Array:
        # The other side's rows are read in the order in which they lie, the touched ones are few and near.
        return other.key_index.meet(rows, staged=side == 0, by_candidate=True, at_most=at_most)

    few = request.at_most is not None
    pieces = [candidates(touched, request.at_most)] if few else in_pieces(kernels, touched, candidates)
    parts = (
        match_among(kernels, own.key_types, piece, columns, among, by_candidate=True, residual=residual)
        for piece in pieces
    )
    return in_one(xp, parts, request.check, by_candidate=True)
