"""Operators without output until their input ends, after Flink's FLIP-331: joins with ``emit="at_end"``.

Until then an input is only kept: no index, no association counts, no output. At the end it is joined once, as a batch
operator would, and the result comes as insertions. What arrives is parted by its keys' hashes at once, so that the end
joins some parts at a time, few enough for the caches, or for a GPU's memory; a budget moves what is kept to disk
meanwhile.

The law is the other operators' own: a part is one micro-batch of ``per_batch``, from an empty state.

Where rows are found by keys, a part is joined without any state (`merge_join`): a sorted merge of key hashes, on a GPU
libcudf's hash join. Hashes may collide, so what they pair is compared.

A join that begins with a *backlog*, after Flink's FLIP-327 (``RecordAttributes.isBacklog``), which no Flink 2.3
operator acts on yet (FLINK-33398): a long history is taken in silently, its net result comes out, then it is live.
While the backlog lasts its changes are only kept; when the first live micro-batch comes they are one micro-batch of net
changes to the streaming operator, whose state is then what it would be without a backlog.
"""

from __future__ import annotations

import abc
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import pyarrow as pa

from gpu_ops import layouts, operators
from gpu_ops.arrays import Array, Positions, Slots
from gpu_ops.descriptions.changelog import INSERT, adds
from gpu_ops.descriptions.description import Description
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.join import Join
from gpu_ops.errors import out_of_memory
from gpu_ops.files.disk import Disk, File
from gpu_ops.ingest import Ingested, with_times
from gpu_ops.kernels import Columns, Frame, Kernels, Store, TooMany
from gpu_ops.operators.core.changes import apply_changes, given
from gpu_ops.operators.core.emission import with_nulls
from gpu_ops.operators.core.match import fulfilling, in_pieces, match
from gpu_ops.operators.core.order import Groups
from gpu_ops.operators.operator import InputTable, Operator, Room
from gpu_ops.output import (
    Changelog,
    Output,
    changelog,
    changelog_table,
    gathered,
    no_output,
    together,
    values_table,
)
from gpu_ops.state.keyed_table import KeyedTable
from gpu_ops.state.pieces import STATUS_COLUMN, Entries, Flush, FromSnapshot, Piece, RowNumbers, Storable
from gpu_ops.state.table import Coolable, KeySet, parts_of, put_behind
from gpu_ops.values import with_types

_log = logging.getLogger("gpu_ops")

PARTS = 64
KIND_COLUMN = "__kind"
# Rows joined at a time, all inputs together: enough to be worth the fixed cost, few enough for the caches. A GPU takes
# as many as its memory has room for, a part of it: each row as it came, sorted, and gathered for the output twice, its
# hash, slot, entry, place in a hash table and pair.
_ROWS_AT_ONCE = 400_000
_MEMORY_SHARE, _COPIES, _BESIDE = 0.5, 4, 128


class Present:
    """The rows of one input, as far as they are gathered from; see `gpu_ops.output.HasStore`."""

    def __init__(self, kernels: Kernels, source: Input, store: Store | FrameStore, length: int) -> None:
        self._kernels, self._source = kernels, source
        self.store: Any = store
        self.length = length

    def to_arrow(self) -> pa.Table:
        """The rows, of the input's schema."""
        slots = self._kernels.xp.arange(self.length, dtype=np.int64)
        return self._kernels.to_arrow(
            self.store.take(slots, self._source.schema.names, present=True), self._source.schema
        )


class FrameStore:
    """A frame's rows by slot."""

    def __init__(self, kernels: Kernels, frame: Frame) -> None:
        self._kernels, self._frame = kernels, frame

    def take(self, slots: Slots, columns: Sequence[str], *, present: bool = False) -> Frame:
        """Gathers rows like `gpu_ops.kernels.Store.take`."""
        return self._kernels.take(self._frame, cast("Positions", slots), columns, present=present)


def present_rows(kernels: Kernels, source: Input, changes: Ingested) -> Present:
    """Folds an input's changes to the rows that are left."""
    frame = changes.frame(kernels)
    if source.insert_only:
        return Present(kernels, source, FrameStore(kernels, frame), changes.kinds.size)
    table = KeyedTable(kernels, source, [KeySet((), (), ())], findable=True)
    (what,) = given([table], [changes], net=True)
    apply_changes(table, frame, what, None, net=True)
    return Present(kernels, source, table.store, len(table))


def merge_join(join: Join, kernels: Kernels, changes: Sequence[Ingested], room: Room) -> Changelog:
    """The join of two inputs, as insertions.

    Args:
        join: its description.
        kernels: the backend.
        changes: of both inputs, each in order.
        room: that memory has for them.

    Raises:
        StateError: there is none for so many.
    """
    xp = kernels.xp
    sides = [present_rows(kernels, s, c) for s, c in zip(join.inputs, changes, strict=True)]
    one_sided, rows = join.how in ("semi", "anti"), 0
    row_bytes = 32 + sum(c.table.nbytes / max(1, c.table.num_rows) for c in changes)
    matched = [xp.zeros(side.length, bool) for side in sides]
    parts: list[tuple[Slots, Slots]] = []
    for left, right in _pairs(join, kernels, sides):
        matched[0][left] = True
        matched[1][right] = True
        if not one_sided:
            parts.append((left, right))
            rows += int(left.size)
            room.check_output(rows, row_bytes)
    shown = (join.how == "anti", False) if one_sided else join.outer
    if join.how == "semi":
        parts.append(with_nulls(xp, 0, xp.flatnonzero(matched[0])))
    parts += [with_nulls(xp, side, xp.flatnonzero(~matched[side])) for side in (0, 1) if shown[side]]
    slots_out = [xp.concatenate([xp.empty(0, np.int64), *of_input]) for of_input in zip(*parts, strict=True)]
    kinds = np.full(slots_out[0].size, INSERT, np.int8)
    return changelog_table(join, kernels, gathered(join, kernels, sides, slots_out), kinds)


def _pairs(join: Join, kernels: Kernels, sides: Sequence[Present]) -> Iterator[tuple[Slots, Slots]]:
    """Matching rows, piece by piece; of a semi or anti join without a residual condition all left ones, at least."""
    xp = kernels.xp
    keys, hashes, able = [], [], []
    for side, present in enumerate(sides):
        names = join.key_columns(side)
        slots = xp.arange(present.length, dtype=np.int64)
        frame = present.store.take(slots, names, present=True)
        strict = join.key_columns(side, strict=True)
        valid = kernels.valid(frame, strict) if strict else None
        keys.append(frame)
        hashes.append(kernels.hash_rows(frame, names, join.key_types))
        able.append(slots if valid is None else slots[valid])
    left, right = (layouts.entries(hashes[side][able[side]], able[side]) for side in (0, 1))

    def residual(left: Slots, right: Slots) -> Positions | None:
        rows = zip(join.inputs, sides, (left, right), strict=True)
        return fulfilling(kernels, join.condition, {s.name: (p.store, at) for s, p, at in rows}, int(left.size))

    of_left, of_right = (Columns(keys[side], join.key_columns(side)) for side in (0, 1))
    # where memory has room for so many rows at once, it has for as many pairs
    most_pairs = 0 if kernels.host is None else int(left.size + right.size)
    pieces: Iterable[Array] = in_pieces(
        kernels, left, lambda some, most: kernels.join(some, right, at_most=most), most_pairs
    )
    if join.how in ("semi", "anti") and join.condition is None:
        try:
            pieces = [kernels.join(left, right, at_most=int(left.size + right.size))]
        except TooMany:  # of each key one row is enough
            names = join.key_columns(1)
            own = Groups(kernels, keys[1], names, join.key_types, hashes[1])
            first = xp.zeros(sides[1].length, bool)
            first[own.leader] = True
            able[1] = able[1][first[able[1]]]
            right = layouts.entries(hashes[1][able[1]], able[1])
    for candidates in pieces:
        pairs = layouts.unpaired(xp.sort(candidates))
        yield match(kernels, pairs, join.key_types, (of_left, of_right), residual=residual)


class KeptInput(Coolable):
    """The changes of one input, in order, parted by the hash of their key.

    Args:
        kernels: the backend.
        source: the input.
        keys: the columns by which it is parted, with the types they are compared in; none for one part.
    """

    def __init__(self, kernels: Kernels, source: Input, keys: tuple[tuple[str, pa.DataType], ...]) -> None:
        self._kernels, self._keys, self.source = kernels, keys, source
        self.schema = pa.schema([*source.schema, pa.field(KIND_COLUMN, pa.int8())])
        self.segments: list[tuple[pa.Table | range, np.ndarray[tuple[int], np.dtype[np.int64]]]] = []
        """Changes, or where in the file they are; and where the parts begin among them, and end."""
        self.pending: pa.Table | None = None
        self.live = 0
        self.pieces: tuple[Piece, ...] = ()
        self._rows = self._bytes = self._added = 0
        self._file: File | None = None

    def __len__(self) -> int:
        return self._rows

    @property
    def nbytes(self) -> int:
        """Bytes in memory and on disk."""
        return self.host_bytes + self.disk_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory, where all rows that are only kept stay."""
        return self._bytes + (self.pending.nbytes if self.pending is not None else 0)

    @property
    def disk_bytes(self) -> int:
        """Bytes that lie on disk."""
        return 0 if self._file is None else self._file.size

    def cool_rows(self, wanted: int, disk: Disk | None = None) -> int:
        """Move the oldest changes to disk."""
        freed = 0
        for number, (table, bounds) in enumerate(self.segments):
            if disk is None or freed >= wanted:
                break
            if isinstance(table, range):
                continue
            self._file = self._file or disk.file()
            sink, begin = pa.BufferOutputStream(), self._file.size
            with pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
            written = np.frombuffer(sink.getvalue(), np.uint8)
            self._file.append(np.pad(written, (0, -written.size % 64)))
            self.segments[number] = range(begin, self._file.size), bounds
            self._bytes -= table.nbytes
            freed += table.nbytes
        return freed

    def cool_indexes(self, wanted: int, disk: Disk | None = None) -> int:
        """Moves nothing, as there are no indexes."""
        return 0

    def warm(self) -> None:
        """Does nothing: no part of the rows was moved."""

    def live_after(self) -> int:
        """Insertions less retractions, once the prepared micro-batch is committed."""
        return self.live + self._added

    def prepare(self, changes: Ingested) -> None:
        """Take in a micro-batch, to be followed by `commit` or `discard`."""
        kinds = changes.kinds
        self._added = _net(kinds)
        self.pending = with_types(put_behind(changes.table, {KIND_COLUMN: pa.array(kinds, pa.int8())}), self.schema)

    def commit(self, clock_ms: int) -> None:
        """Keep the prepared micro-batch."""
        table, self.pending = self.pending, None
        if table is not None and table.num_rows:
            self.add(table)
        self.live += self._added
        self._added = 0

    def discard(self) -> None:
        """Forget the prepared micro-batch."""
        self.pending, self._added = None, 0

    def add(self, table: pa.Table) -> None:
        """Keep changes: sorted by part, in their order within one."""
        bounds = np.array([0, table.num_rows], np.int64)
        if self._keys:
            kernels, names = self._kernels, [n for n, _ in self._keys]
            keys = table.select([self.source.schema.get_field_index(name) for name in names])
            hashes = kernels.hash_rows(kernels.frame(keys), names, [t for _, t in self._keys])
            part = kernels.asnumpy(hashes & np.uint64(PARTS - 1)).astype(np.uint8)
            table = table.take(pa.array(np.argsort(part, kind="stable")))
            bounds = np.concatenate([[0], np.cumsum(np.bincount(part, minlength=PARTS))]).astype(np.int64)
        table = table.combine_chunks()
        self.segments.append((table, bounds))
        self._rows += table.num_rows
        self._bytes += table.nbytes

    def _table(self, segment: pa.Table | range) -> pa.Table:
        """Changes, wherever they are; on disk they are read when they are looked at."""
        if not isinstance(segment, range):
            return segment
        assert self._file is not None
        stored = self._file.mapped("MADV_NORMAL")[segment.start : segment.stop]
        return pa.ipc.open_stream(pa.py_buffer(stored)).read_all()

    def sizes(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The number of rows of each part."""
        total = np.zeros(PARTS if self._keys else 1, np.int64)
        for _, bounds in self.segments:
            total += np.diff(bounds)
        return total

    def part(self, first: int, last: int) -> pa.Table:
        """The changes of the parts from ``first`` to before ``last``, in order within each key."""
        if not self._keys:
            first, last = 0, 1
        there = [(table, bounds[first], bounds[last] - bounds[first]) for table, bounds in self.segments]
        pieces = [self._table(table).slice(begin, count) for table, begin, count in there if count]
        return pa.concat_tables(pieces or [self.schema.empty_table()])

    def snapshot(self) -> pa.Table:
        """All changes, in order within each key."""
        return pa.concat_tables([self._table(t) for t, _ in self.segments] or [self.schema.empty_table()])

    def snapshot_parts(self, most: int | None = None) -> Iterator[tuple[pa.Table, RowNumbers]]:
        """Gives the rows of `snapshot` in parts; see `gpu_ops.state.pieces.Pieced`."""
        rows = self.snapshot()
        size = max(1, len(rows))
        yield from ((rows.slice(first, most or size), {}) for first in range(0, size, most or size))

    def entries_of(self, rows: pa.Table) -> Entries:
        """None: it has no index."""
        return {}

    def flush(self) -> Flush:
        """Gives the parts of a snapshot; see `gpu_ops.state.pieces.Pieced`."""
        first = sum(piece.rows for piece in self.pieces)
        rows = self.snapshot().slice(first)
        if len(rows):
            self.pieces = (*self.pieces, Piece(None, len(rows), rows.nbytes))
        return Flush(self.pieces, rows, {STATUS_COLUMN: np.ones(first + len(rows), np.int8)})

    def restore(self, stored: FromSnapshot, settle: Callable[[], None]) -> None:
        """Fill an empty one with changes of a snapshot; ``settle``: called after each part.

        Raises:
            StateError: it lacks a column, or a piece cannot be read.
        """
        for part in parts_of(self.source, stored, [KIND_COLUMN]):
            if len(part.rows):
                self.add(with_types(put_behind(part.rows, part.numbers), self.schema))
            self.live += _net(part.numbers[KIND_COLUMN])
            self.pieces = self.pieces if part.piece is None else (*self.pieces, part.piece)
            settle()

    def close(self) -> None:
        """Give back what is on disk."""
        self.segments, self._file = [], None


class AtEnd(Operator):
    """An operator that keeps its input and has its output at the end; see `gpu_ops.operators.operator.Operator`.

    Args:
        join: its description.
        kernels: the backend.
    """

    tables: tuple[KeptInput, ...]

    def __init__(self, join: Any, kernels: Kernels) -> None:
        self.join, self.kernels = join, kernels
        self._clock_ms = 0
        self.tables = tuple(KeptInput(kernels, s, part_keys(join, i)) for i, s in enumerate(join.inputs))

    @abc.abstractmethod
    def result(self, changes: tuple[Ingested, ...]) -> Changelog:
        """Computes the result of one part of the input, in rows of the ``output_schema``.

        Args:
            changes: of each input, all that have the part's keys.
        """

    def prepare(self, changes: tuple[Ingested, ...], clock_ms: int, watermark_ms: int | None) -> Output:
        """Keep the changes; there is no output yet."""
        return keep(self.join, self.tables, changes)

    def commit(self, clock_ms: int) -> None:
        """Make the prepared micro-batch final."""
        self._clock_ms = clock_ms
        super().commit(clock_ms)

    def finish(self) -> Iterator[Changelog]:
        """The result, part by part, as insertions."""
        sizes = np.sum([t.sizes() for t in self.tables], axis=0)
        at_once = self._rows_at_once(int(sizes.sum()))
        if any(moves_between_parts(self.join, input_index) for input_index in range(len(self.tables))):
            at_once = 0
        first = 0
        while first < sizes.size:
            last, rows = first + 1, int(sizes[first])
            while last < sizes.size and rows + int(sizes[last]) <= at_once:
                rows += int(sizes[last])
                last += 1
            if rows or sizes.size == 1:
                try:
                    found = self.result(self._changes(first, last))
                except Exception as error:
                    if self.kernels.host is None or last - first == 1 or not out_of_memory(error):
                        raise
                    _log.info("GPU memory ran out over %d rows at the end of input (%s): now half as many", rows, error)
                    at_once = rows // 2
                    continue
                yield found
                del found  # its memory is the next one's
            first = last

    def _rows_at_once(self, rows: int) -> int:
        """Chooses how many of an input's rows are joined at a time, if their parts are no larger."""
        if self.kernels.tiny_segments:
            return 4
        limit = self.kernels.memory_limit
        if self.kernels.host is None or limit is None:
            return _ROWS_AT_ONCE
        bytes_a_row = _BESIDE + _COPIES * sum(table.nbytes for table in self.tables) / max(1, rows)
        return max(_ROWS_AT_ONCE, min(layouts.MAX_CHANGES, int(_MEMORY_SHARE * limit / bytes_a_row)))

    def _changes(self, first: int, last: int) -> tuple[Ingested, ...]:
        return in_turn(self.join, (kept.part(first, last) for kept in self.tables))

    def close(self) -> None:
        """Give back what is on disk."""
        for table in self.tables:
            table.close()


class JoinAtEnd(AtEnd):
    """A join that emits only at the end of its input; arguments as `AtEnd`."""

    def result(self, changes: tuple[Ingested, ...]) -> Changelog:
        """The join of a part, as insertions: at once, or by the operator that joins live."""
        if self.join.merges:
            return merge_join(self.join, self.kernels, changes, self.room)
        live = "per_batch" if "per_batch" in self.join.emits else "at_watermark"
        operator = operators.make(dataclasses.replace(self.join, emit=live), self.kernels, self.room)
        parts = [operator.prepare(changes, self._clock_ms, None)]
        if operator.last_watermark_ms is not None:
            operator.commit(self._clock_ms)
            nothing = tuple(c.pick(np.zeros(c.kinds.size, np.bool_)) for c in changes)
            parts.append(operator.prepare(nothing, self._clock_ms, operator.last_watermark_ms))
        made = [changelog(self.join, self.kernels, part) for part in parts]
        return together(self.join.output_schema, self.kernels, made)


make = JoinAtEnd


def keep(join: Description, tables: Sequence[KeptInput], changes: Sequence[Ingested]) -> Output:
    """Take in a micro-batch, without output.

    Args:
        join: whose inputs they are.
        tables: what is kept of each.
        changes: of each.
    """
    started = time.perf_counter()
    for table, change in zip(tables, changes, strict=True):
        table.prepare(change)
    metrics: dict[str, int | float] = {"update_ms": (time.perf_counter() - started) * 1e3}
    for name in join.sides:
        metrics[f"{name}_unknown_retractions"] = metrics[f"{name}_expired"] = 0
    return no_output(join, metrics)


def in_turn(join: Description, tables: Iterable[pa.Table]) -> tuple[Ingested, ...]:
    """Storable changes as one micro-batch: one input after the other."""
    changes, start = [], 0
    for table in tables:
        *own, kind = range(table.num_columns)
        kinds = table.column(kind).to_numpy()
        sequence = np.arange(start, start + kinds.size, dtype=np.int64)
        changes.append(Ingested(table.select(own), kinds, sequence, kinds.size, 0, None))
        start += kinds.size
    return with_times(join, changes)


def _net(kinds: np.ndarray[tuple[int], np.dtype[np.int8]]) -> int:
    """Counts insertions less retractions."""
    return 2 * int(adds(kinds).sum()) - kinds.size


def moves_between_parts(join: Description, input_index: int) -> bool:
    """Tells whether an update may take an input's row to another part.

    Then its changes are in order within one part only. So it is where old rows always come
    (`gpu_ops.descriptions.inputs.Updates`), and may have had another key.
    """
    unique = join.inputs[input_index].unique_key
    return unique is not None and not {column for column, _ in part_keys(join, input_index)} <= set(unique)


def part_keys(join: Description, input_index: int) -> tuple[tuple[str, pa.DataType], ...]:
    """By what an input's changes are parted: what rows that may match, and the changes of one row, have in common."""
    return tuple((shuffle.columns[input_index], shuffle.type) for shuffle in join.shuffled_by)


class Backlog(Operator):
    """A join with a backlog before it; see `gpu_ops.operators.operator.Operator`.

    Args:
        join: its description.
        kernels: the backend.
        room: that memory has; what of the backlog is too much goes to disk meanwhile.
    """

    def __init__(self, join: Description, kernels: Kernels, room: Room) -> None:
        self.join, self.kernels = join, kernels
        self.room = room
        self._kept = self._empty()
        self._live: Operator | None = None
        self._switching = False
        self.backlog = False
        """Whether the next micro-batch is backlog, as its source has it; without effect once a live one has come."""

    def _make(self) -> Operator:
        return operators.make(self.join, self.kernels, self.room)

    def _empty(self) -> tuple[KeptInput, ...]:
        # in one part: a row's changes may have several keys, and are taken in together, in their order
        return tuple(KeptInput(self.kernels, s, ()) for s in self.join.inputs)

    @property
    def tables(self) -> Sequence[InputTable]:  # type: ignore[override]
        """The backlog, or the state of each input."""
        return self._kept if self._live is None else self._live.tables

    @property
    def live(self) -> bool:
        """Tells whether a live micro-batch has come."""
        return self._live is not None

    def prepare(self, changes: tuple[Ingested, ...], clock_ms: int, watermark_ms: int | None) -> Output:
        """Keep a micro-batch of the backlog, or join a live one; the backlog's result comes with the first of these."""
        if self._live is not None:
            return self._live.prepare(changes, clock_ms, watermark_ms)
        if self.backlog:
            return keep(self.join, self._kept, changes)
        self._switching = True
        self._live = self._make()
        if not any(len(k) for k in self._kept):
            return self._live.prepare(changes, clock_ms, watermark_ms)
        first = self._live.prepare_net(self._all(), clock_ms)
        self._live.commit(clock_ms)
        then = self._live.prepare(changes, clock_ms, watermark_ms)
        metrics = dict(then.metrics)
        for name, value in first.metrics.items():
            metrics[name] = metrics.get(name, 0) + value
        values = [values_table(self.join, self.kernels, made.values) for made in (first, then)]
        before = np.full(first.sequence.size, -1, np.int64)
        sequences, beside = [then.sequence[: then.kinds.size]], [then.sequence[then.kinds.size :]]
        return Output(
            pa.concat_tables(values),
            np.concatenate([first.kinds, then.kinds]),
            np.concatenate([before[: first.kinds.size], *sequences, before[first.kinds.size :], *beside]),
            metrics,
            beside=(*first.beside, *then.beside),
        )

    def _all(self) -> tuple[Ingested, ...]:
        return in_turn(self.join, (kept.snapshot() for kept in self._kept))

    def commit(self, clock_ms: int) -> None:
        """Make the prepared micro-batch final."""
        (super().commit if self._live is None else self._live.commit)(clock_ms)
        if self._switching:
            self._switching = False
            self.close()
            self._kept = self._empty()

    def discard(self) -> None:
        """Forget the prepared micro-batch; the first live one leaves the backlog as it was."""
        for kept in self._kept:
            kept.discard()
        if self._switching:
            self._live, self._switching = None, False
        elif self._live is not None:
            self._live.discard()

    def kept(self) -> dict[str, Storable]:
        """The backlog's changes, or the state."""
        return super().kept() if self._live is None else self._live.kept()

    def restore(self, state: Mapping[str, FromSnapshot], settle: Callable[[], None]) -> None:
        """Take over a snapshot."""
        inputs = zip(self.join.sides, self.join.inputs, strict=True)
        if not all(KIND_COLUMN in state[name].column_names[len(source.schema) :] for name, source in inputs):
            self._live = self._make()
        (super().restore if self._live is None else self._live.restore)(state, settle)

    def finish(self) -> Iterator[Changelog]:
        """The backlog's net result, if no live micro-batch has come; nothing is changed."""
        if self._live is None:
            yield changelog(self.join, self.kernels, self._make().prepare_net(self._all(), 0))

    def close(self) -> None:
        """Delete what was moved to disk."""
        for kept in self._kept:
            kept.close()
