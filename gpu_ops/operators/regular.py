"""The regular join: inner, left, right and full, after Flink's ``StreamingJoinOperator``.

Law: the changelog is the pairs that come and go (`pairs`), and for an outer side the pads that come
and go (`visibility`).

Row kinds (``per_event``), as Flink 2.3.0 has them: an inner join forwards the kind of the change that
caused the row; with an outer side, insertions are ``+I``; a retraction is ``-D`` if the retracted
row's own side is outer, else it keeps its kind (so a left join can say ``-U`` and then ``+I``,
FLINK-17337). Pads are ``+I`` and ``-D``. ``per_batch`` says ``-D`` for what leaves, ``+I`` for what comes.
"""

from __future__ import annotations

import numpy as np

from gpu_ops.arrays import Array, Slots
from gpu_ops.descriptions.changelog import DELETE, INSERT
from gpu_ops.descriptions.join import Join
from gpu_ops.operators.core.emission import JOINED, PAD_COMES, PAD_GOES, Rows, in_order, join_rows, net_rows
from gpu_ops.operators.core.pairs import NetPairs, Pairs, Sides, Tables, TimedPairs
from gpu_ops.operators.core.visibility import visible_per_batch, visible_per_event


def emit(join: Join, tables: Tables, sides: Sides, pairs: Pairs, event_kinds: Array | None) -> Rows:
    """The changelog rows of one prepared micro-batch.

    Args:
        join: its description.
        tables: left and right state, prepared; association counts are moved here.
        sides: left and right lifetimes.
        pairs: the micro-batch's pairs.
        event_kinds: the row kind of each instant; None for a net change.
    """
    if isinstance(pairs, NetPairs):
        return _net(join, tables, sides, pairs)
    assert isinstance(pairs, TimedPairs)
    assert event_kinds is not None
    kernels, xp = tables[0].kernels, tables[0].kernels.xp
    outer = join.outer
    begins, ends = pairs.comes, pairs.goes
    come_at, go_at = pairs.begin[begins], pairs.end[ends]
    if any(outer):
        come_kinds = xp.full(begins.size, INSERT, np.int8)
        left_dies = pairs.deaths[0][ends] == go_at
        own_outer = xp.where(left_dies, outer[0], outer[1])
        go_kinds = xp.where(own_outer, np.int8(DELETE), event_kinds[go_at])
    else:
        come_kinds, go_kinds = event_kinds[come_at], event_kinds[go_at]
    go = Rows(go_kinds, pairs.slots[0][ends], pairs.slots[1][ends], go_at)
    come = Rows(come_kinds, pairs.slots[0][begins], pairs.slots[1][begins], come_at)
    pads_go: list[Rows] = []
    pads_come: list[Rows] = []
    for side in (0, 1):
        if not outer[side]:
            continue
        pads = visible_per_event(tables[side], sides[side], pairs, side, when_alone=True)
        for target, kind, mask in ((pads_come, INSERT, pads.appears), (pads_go, DELETE, ~pads.appears)):
            at = xp.flatnonzero(mask)
            none = xp.full(at.size, -1, np.int64)
            slots: tuple[Slots, Slots] = (pads.slots[at], none) if side == 0 else (none, pads.slots[at])
            target.append(Rows(xp.full(at.size, kind, np.int8), *slots, pads.instants[at]))
    parts = [*pads_go, go, come, *pads_come]
    rows = join_rows(kernels, parts)
    ranks = [*(PAD_GOES for _ in pads_go), JOINED, JOINED, *(PAD_COMES for _ in pads_come)]
    rank = xp.concatenate([xp.full(p.size, r, np.int64) for p, r in zip(parts, ranks, strict=True)])
    return in_order(kernels, rows, rank)


def _net(join: Join, tables: Tables, sides: Sides, pairs: NetPairs) -> Rows:
    """What leaves, pads first, then what comes, pads last."""
    xp = tables[0].kernels.xp
    pads = [
        visible_per_batch(tables[side], sides[side], pairs, side, when_alone=True) if join.outer[side] else None
        for side in (0, 1)
    ]
    slots = []
    for side in (0, 1):
        found = [pairs.slots[side][pairs.goes], pairs.slots[side][pairs.comes]]
        parts: tuple[list[Array], list[Array]] = [], []
        for of, pad in enumerate(pads):
            if pad is not None:
                for part, rows in zip(parts, pad, strict=True):
                    part.append(rows if of == side else xp.full(rows.size, -1, np.int64))
        slots.append(xp.concatenate([*parts[0], *found, *parts[1]]))
    removed = int(pairs.goes.size) + sum(int(pad[0].size) for pad in pads if pad is not None)
    return net_rows(xp, slots[0], slots[1], removed)


def may_cancel(join: Join, tables: Tables, sides: Sides, rows: Rows) -> bool:
    """Whether a net change may hold a row that goes and an equal one that comes.

    With equal rows in a multiset, one instance's pair may go while another's comes. And a pad equals
    a pair whose other row is null in every column shown, which a key compared by ``=`` rules out.
    """
    xp = tables[0].kernels.xp
    if rows.removed in (0, rows.size):
        return False
    if any(t.source.unique_key is None for t in tables) and any(s.any_death for s in sides):
        return True
    for side in (0, 1):
        if join.outer[side]:
            other = 1 - side
            shown = [c.column for c in join.output if c.side == other]
            if any(k.column(other) in shown and not k.null_safe for k in join.keys):
                continue
            if not all(tables[other].store.may_be_null(c) for c in shown):
                continue
            slots = rows.right if side == 0 else rows.left
            joined = slots[xp.flatnonzero((rows.left >= 0) & (rows.right >= 0))]
            frame = tables[other].store.take(joined, shown, present=True)
            if all(tables[0].kernels.valid(frame, [c]) is not None for c in shown):
                return True
    return False
