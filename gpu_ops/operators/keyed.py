"""What joins by key have in common: regular, semi, anti and multi-way.

A micro-batch, step by step: rows past their TTL are forgotten, changes become lifetimes (`core.changes`), the operator
finds what they make and unmake and gives it row kinds, and the rows are gathered. With ``per_batch``, or
after a backlog, only the net change comes out: rows that leave and equal ones that come cancel each other.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gpu_ops.arrays import Array, Positions
from gpu_ops.descriptions.changelog import DELETE
from gpu_ops.descriptions.join import Join
from gpu_ops.ingest import Ingested
from gpu_ops.kernels import Frame, Kernels, TooMany, looked_at
from gpu_ops.operators.core import emission
from gpu_ops.operators.core.changes import Lifetimes, applied, on_device
from gpu_ops.operators.core.emission import OutputRows, Pairs
from gpu_ops.operators.core.key_counts import KeyCounts
from gpu_ops.operators.core.looks import side_by_side
from gpu_ops.operators.core.visibility import When, visible_per_batch, visible_per_event
from gpu_ops.operators.operator import Operator
from gpu_ops.output import Output, SlotRows, gathered
from gpu_ops.state.keyed_table import COUNT_COLUMN, KeyedTable
from gpu_ops.state.pieces import FromSnapshot, Storable
from gpu_ops.state.table import KeySet

_MANY: Final = 4096
"""Rows of an output that nobody asks for room for."""
_NUMBERS: Final = {"per_batch": 40, "per_event": 140}
"""Bytes of numbers beside a row of an output in the making: slots, logical times, what they are ordered by."""
_PAIRS_A_CHANGE: Final = 16
_FEW_PAIRS: Final = 1 << 15
"""A micro-batch with more candidates than these two give is less work by key."""


class KeyedOperator(Operator):
    """A join by key over one partition.

    Attributes:
        null_sides: of each input, whether nulls may stand for its row in the output; None for all.
    """

    tables: Sequence[KeyedTable]
    null_sides: Sequence[bool] | None = None

    @abc.abstractmethod
    def find(self, sides: Sequence[Lifetimes], *, net: bool) -> Any:
        """Finds what the micro-batch adds to the operator's result and takes from it.

        Args:
            sides: the lifetimes of each input's rows.
            net: whether only the net change counts.
        """

    @abc.abstractmethod
    def rows(self, matches: Any, sides: Sequence[Lifetimes], event_kinds: Array | None) -> OutputRows:
        """The rows of the changelog, in order.

        Args:
            matches: what `find` gave.
            sides: the lifetimes of each input's rows.
            event_kinds: the row kind of each logical time; None for a net change.
        """

    gathers = True
    """Whether the rows that come out are gathered here; a dataflow leaves that to the operator that reads them."""

    def values(self, rows: OutputRows) -> Frame | SlotRows:
        """The values of the changelog's rows."""
        if self.gathers:
            shown = self.description, self.kernels, self.tables, rows.slots, self.null_sides
            return gathered(*shown, missing=rows.missing)
        return SlotRows(self.description, self.kernels, self.tables, tuple(rows.slots), self.null_sides)

    def may_cancel(self, rows: OutputRows, sides: Sequence[Lifetimes], frame: Frame) -> Positions:
        """Positions of rows of a net change among which one that leaves may equal one that comes.

        Args:
            rows: of the changelog; some leave and some come.
            sides: the lifetimes of each input's rows.
            frame: the rows' values.
        """
        return self._nothing

    def chosen(self, changes: tuple[Ingested, ...]) -> tuple[Ingested, ...]:
        """The changes that count; all of them."""
        return changes

    def check_output(self, rows: int) -> None:
        """Refuse an output of so many rows if it would not fit; see `gpu_ops.operators.operator.Room`."""
        if rows > _MANY:
            widths = (table.store.nbytes / max(1, len(table)) for table in self.tables)
            self.room.check_output(rows, _NUMBERS.get(self.description.emit, _NUMBERS["per_batch"]) + sum(widths))

    def count_expired(self) -> None:
        """Takes rows that have just expired off the counts of the other rows."""

    def __init__(self, description: Any, kernels: Kernels) -> None:
        self.description, self.kernels = description, kernels
        self._nothing = kernels.xp.empty(0, np.int64)
        self._counters: dict[str, int] = {}

    def prepare(self, changes: tuple[Ingested, ...], clock_ms: int, watermark_ms: int | None) -> Output:
        """Compute one micro-batch; no watermark matters."""
        return self._prepare(changes, clock_ms, net=self.description.emit == "per_batch")

    def prepare_net(self, changes: tuple[Ingested, ...], clock_ms: int) -> Output:
        """Computes one micro-batch like `prepare`, but only its net change, whatever ``emit`` is."""
        return self._prepare(changes, clock_ms, net=True)

    def _prepare(self, changes: tuple[Ingested, ...], clock_ms: int, *, net: bool) -> Output:
        started = time.perf_counter()
        kernels = self.kernels
        expired = [table.expire(clock_ms) for table in self.tables]
        self.count_expired()
        total = sum(c.kinds.size for c in changes)
        changes = self.chosen(changes)
        event_kinds = None if net else kernels.xp.zeros(2 * total + 2, np.int8)
        given = zip(self.tables, changes, on_device(self.tables, changes, net=net), strict=True)
        works = [applied(table, change.frame(kernels), what, event_kinds, net=net) for table, change, what in given]
        sides = side_by_side(kernels, works)
        updated = time.perf_counter()
        matches = self.find(sides, net=net)
        probed = time.perf_counter()
        rows = self.rows(matches, sides, event_kinds)
        self.check_output(rows.size)
        values = self.values(rows)
        kinds = _on_host(kernels, rows.kinds)
        if net and 0 < np.count_nonzero(kinds == DELETE) < kinds.size:
            frame = values.frame if isinstance(values, SlotRows) else values
            rows, values = self._folded(rows, frame, self.may_cancel(rows, sides, frame))
            kinds = _on_host(kernels, rows.kinds)
        metrics: dict[str, int | float] = {**self._counters}
        unknown = _counts(kernels, [side.unknown for side in sides])
        for name, missed, gone in zip(self.description.sides, unknown, expired, strict=True):
            metrics[f"{name}_unknown_retractions"] = missed
            metrics[f"{name}_expired"] = gone
        metrics |= {
            "update_ms": (updated - started) * 1e3,
            "probe_ms": (probed - updated) * 1e3,
            "emit_ms": (time.perf_counter() - probed) * 1e3,
        }
        sequence = np.zeros(kinds.size, np.int64) if net else rows.sequence(kernels)
        return Output(values, kinds, sequence, metrics)

    def _folded(self, rows: OutputRows, frame: Frame, doubtful: Positions) -> tuple[OutputRows, Frame]:
        """The rows and their values without those that cancel among the doubtful ones."""
        kernels, xp = self.kernels, self.kernels.xp
        if not doubtful.size:
            return rows, frame
        rows.kinds = kernels.asarray(rows.kinds)
        columns, types = tuple(c.name for c in self.description.output), tuple(c.type for c in self.description.output)
        some = frame if doubtful.size == rows.size else kernels.take(frame, doubtful, columns, present=True)
        left = doubtful[emission.fold(kernels, some, rows.kinds[doubtful] == DELETE, columns, types)]
        if left.size == doubtful.size:
            return rows, frame
        stays = xp.ones(rows.size, bool)
        stays[doubtful] = False
        stays[left] = True
        kept = xp.flatnonzero(stays)
        return rows.pick(kept), kernels.take(frame, kept, columns, present=True)


def side_keys(description: Join, side: int) -> KeySet:
    """The keys of one input of a join."""
    return KeySet(description.key_columns(side), description.key_types, description.key_columns(side, strict=True))


def side_table(description: Join, kernels: Kernels, side: int, **more: Any) -> KeyedTable:
    """The table of one input of a join by key; ``more``: arguments of `KeyedTable`."""
    source = description.inputs[side]
    findable = not source.insert_only or source.ttl_ms is not None
    return KeyedTable(kernels, source, [side_keys(description, side)], **{"findable": findable, **more})


def _on_host(kernels: Kernels, kinds: Array) -> npt.NDArray[np.int8]:
    return kinds if type(kinds) is np.ndarray else kernels.asnumpy(kinds)


def _counts(kernels: Kernels, counts: Sequence[Array | int]) -> list[int]:
    """Numbers and arrays of no dimensions as numbers, in one look."""
    if any(isinstance(count, int) for count in counts):
        return [int(count) for count in counts]
    return looked_at(kernels, counts)


class TwoWayJoin(KeyedOperator):
    """A join by key of two inputs.

    Association counts stand beside rows, and are moved pair by pair, while that is little work: most keys have few
    rows. Where a key has many, and no residual condition asks for each pair, they are kept by key from then on.

    Args:
        description: its description.
        kernels: the backend.
        counted: whether rows of the left, of the right count their matches.

    Attributes:
        counts: of the left and the right, the counts by key, where they are kept so.
    """

    description: Join
    tables: tuple[KeyedTable, KeyedTable]

    def __init__(self, description: Join, kernels: Kernels, counted: tuple[bool, bool]) -> None:
        super().__init__(description, kernels)

        counts = [[COUNT_COLUMN] if counts else [] for counts in counted]
        self.tables = (
            side_table(description, kernels, 0, counts=counts[0]),
            side_table(description, kernels, 1, counts=counts[1], track_null_keys=description.null_aware),
        )
        self.counts: tuple[KeyCounts | None, KeyCounts | None] = None, None
        self._counted = counted
        if description.null_aware:
            self._count_by_key()

    def _count_by_key(self) -> None:
        """Keep counts by key from here on."""
        left, right = self.tables
        # With a TTL matches count that have expired: a row's count is not its key's.
        beside = any(source.ttl_ms is not None for source in self.description.inputs)
        both = zip(self._counted, (left, right), (right, left), strict=True)
        of_left, of_right = (
            KeyCounts(self.kernels, own, other, beside=beside) if counts else None for counts, own, other in both
        )
        self.counts = of_left, of_right

    @property
    def by_key(self) -> bool:
        """Tells whether association counts are kept by key."""
        return any(self.counts)

    def pairs(self, sides: Sequence[Lifetimes], *, net: bool, needed: bool) -> Pairs | None:
        """The pairs that the micro-batch makes and unmakes.

        Args:
            sides: the lifetimes of each input's rows.
            net: whether only the net change counts.
            needed: whether they are the result; if not, None where counts are kept by key.
        """
        find, names = (
            emission.net_pairs if net else emission.timed_pairs,
            (self.description.left.name, self.description.right.name),
        )
        request, both = emission.PairRequest(self.description.condition, names, self.check_output), (sides[0], sides[1])
        if self.description.condition is None and any(self._counted) and not self.by_key:
            changes = sum(side.new + int(side.killed.size) for side in sides)
            most = changes if self.kernels.tiny_segments else _PAIRS_A_CHANGE * changes + _FEW_PAIRS
            try:
                return find(self.tables, both, request._replace(at_most=most))
            except TooMany:
                self._count_by_key()
        return find(self.tables, both, request) if needed or not self.by_key else None

    def visible(self, side: int, sides: Sequence[Lifetimes], pairs: Any, when: When, *, net: bool) -> Any:
        """Computes how the visibility of one input's rows changes; moves their association counts.

        Args:
            side: the input.
            sides: the lifetimes of each input's rows.
            pairs: the micro-batch's; None where counts are kept by key.
            when: rows are visible.
            net: whether only the net change counts.

        Returns:
            The changes, as of `gpu_ops.operators.core.visibility.visible_per_event` or of ``visible_per_batch``.
        """
        counts = self.counts[side]
        if counts is not None:
            return (counts.per_batch if net else counts.per_event)(sides[side], sides[1 - side], when)
        by_pair: Callable[..., Any] = visible_per_batch if net else visible_per_event
        return by_pair(self.tables[side], sides[side], pairs, side, when)

    def count_expired(self) -> None:
        """Rows that have expired are no rows of their keys any more."""
        for counts in filter(None, self.counts):
            counts.expire()

    def kept(self) -> dict[str, Storable]:
        """The committed state of each input, with the count of each row."""
        for counts in filter(None, self.counts):
            counts.write_out()
        return super().kept()

    def restore(self, state: Mapping[str, FromSnapshot], settle: Callable[[], None]) -> None:
        """Take over a snapshot; see `gpu_ops.operators.operator.Operator`."""
        super().restore(state, settle)
        for counts in filter(None, self.counts):
            counts.fill(settle)
