"""An input that is only kept, until it ends or a backlog is over: its changes as they came, in parts by key."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from gpu_ops.descriptions.changelog import adds
from gpu_ops.descriptions.description import Description
from gpu_ops.descriptions.inputs import Input
from gpu_ops.files.disk import Disk, File
from gpu_ops.ingest import Ingested, with_times
from gpu_ops.kernels import Kernels
from gpu_ops.output import (
    Output,
    no_output,
)
from gpu_ops.state.pieces import STATUS_COLUMN, Entries, Flush, FromSnapshot, Piece, RowNumbers
from gpu_ops.state.table import Coolable, parts_of, put_behind
from gpu_ops.values import with_types

PARTS = 64

KIND_COLUMN = "__kind"


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


def keep(description: Description, tables: Sequence[KeptInput], changes: Sequence[Ingested]) -> Output:
    """Take in a micro-batch, without output.

    Args:
        description: the operator whose inputs they are.
        tables: what is kept of each.
        changes: of each.
    """
    started = time.perf_counter()
    for table, change in zip(tables, changes, strict=True):
        table.prepare(change)
    metrics: dict[str, int | float] = {"update_ms": (time.perf_counter() - started) * 1e3}
    for name in description.sides:
        metrics[f"{name}_unknown_retractions"] = metrics[f"{name}_expired"] = 0
    return no_output(description, metrics)


def in_turn(description: Description, tables: Iterable[pa.Table]) -> tuple[Ingested, ...]:
    """Storable changes as one micro-batch: one input after the other."""
    changes, start = [], 0
    for table in tables:
        *own, kind = range(table.num_columns)
        kinds = table.column(kind).to_numpy()
        sequence = np.arange(start, start + kinds.size, dtype=np.int64)
        changes.append(Ingested(table.select(own), kinds, sequence, kinds.size, 0, None))
        start += kinds.size
    return with_times(description, changes)


def _net(kinds: np.ndarray[tuple[int], np.dtype[np.int8]]) -> int:
    """Counts insertions less retractions."""
    return 2 * int(adds(kinds).sum()) - kinds.size


def moves_between_parts(description: Description, input_index: int) -> bool:
    """Tells whether an update may take an input's row to another part.

    Then its changes are in order within one part only. So it is where old rows always come
    (`gpu_ops.descriptions.inputs.Updates`), and may have had another key.
    """
    unique = description.inputs[input_index].unique_key
    return unique is not None and not {column for column, _ in part_keys(description, input_index)} <= set(unique)


def part_keys(description: Description, input_index: int) -> tuple[tuple[str, pa.DataType], ...]:
    """By what an input's changes are parted: what rows that may match, and the changes of one row, have in common."""
    return tuple((shuffle.columns[input_index], shuffle.type) for shuffle in description.shuffled_by)
