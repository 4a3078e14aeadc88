"""The state table of one input in one partition: rows, and what stands beside them.

Rows sit in a `Store` by slot and never move but for compaction. Beside them stand a status and whatever numbers a
kind of table declares (association counts, last writes, times), one a slot; indexes and queues lead to slots. A
micro-batch first *prepares* (rows staged, numbers moved, rows marked; all of it in an undo journal) and is then
committed or discarded. What an operator needs beyond that is a subclass: `KeyedTable`, `IntervalTable`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol, Self, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gpu_ops.arrays import Array, Slots
from gpu_ops.descriptions.inputs import Input
from gpu_ops.errors import StateError
from gpu_ops.files.disk import LEAST, Disk
from gpu_ops.kernels import Frame, Kernels, Store, as_slots
from gpu_ops.layouts import MAX_SLOTS
from gpu_ops.state.index import HashIndex
from gpu_ops.state.numbers import Growing, cool, copied, fetch, retained, write
from gpu_ops.state.pieces import (
    STATUS_COLUMN,
    Flush,
    FromSnapshot,
    LiveRows,
    Piece,
    RowNumbers,
    StoredTable,
    renumbered,
)
from gpu_ops.state.runs import FollowedRuns, Following, Runs, postponed
from gpu_ops.state.time_index import TimeQueue
from gpu_ops.values import with_types

DEAD, LIVE, DYING = 0, 1, 2
_FEW = 4096
"""Dead rows that stay whatever there is; slots that a compaction looks at in any micro-batch."""
_SLOTS_A_CHANGE = 4
"""And so many more for each of its changes."""
ENTRIES_FORMAT = 1
"""Of index entries in pieces: to be raised when the CPU's hashes change."""


class KeySet(NamedTuple):
    """Columns by which rows are looked up.

    Attributes:
        names: the columns.
        types: the types they are compared in.
        strict: those of them in which null matches nothing.
    """

    names: tuple[str, ...]
    types: tuple[pa.DataType, ...]
    strict: tuple[str, ...]

    @classmethod
    def of_group(cls, schema: pa.Schema, by: tuple[str, ...]) -> Self:
        """The columns that make a group, in which null is a value of its own."""
        return cls(by, tuple(schema.field(column).type for column in by), ())

    @property
    def label(self) -> str:
        """Under which a piece has the index entries of its rows."""
        return json.dumps([ENTRIES_FORMAT, self.names, list(map(str, self.types)), self.strict])


_LEAST_AT_ONCE = 1 << 22
_COPIES, _BESIDE = 4, 128
"""Of a row that comes in: as it came, sorted and gathered; its hash, slot, entries and places."""


def rows_at_once(kernels: Kernels, row_bytes: float | None = None) -> int:
    """Rows that go from or to a GPU in one piece, when all of them may be more than it has room for.

    Args:
        kernels: the backend.
        row_bytes: of a row; more of them go at once where a piece of the card's memory has room for them.
    """
    if kernels.tiny_segments:
        return 3
    if row_bytes is None or kernels.piece_bytes is None:
        return _LEAST_AT_ONCE
    return max(_LEAST_AT_ONCE, int(kernels.piece_bytes / (_BESIDE + _COPIES * row_bytes)))


def stored_rows(kernels: Kernels, store: Store, schema: pa.Schema, slots: Slots) -> pa.Table:
    """Rows of a store as a table."""
    every = max(1, int(slots.size))
    step = every if kernels.host is None else rows_at_once(kernels, store.nbytes / max(1, len(store)))
    taken = (store.take(slots[at : at + step], schema.names, present=True) for at in range(0, int(slots.size), step))
    return pa.concat_tables([kernels.to_arrow(frame, schema) for frame in taken] or [schema.empty_table()])


def put_behind(rows: pa.Table, beside: Mapping[str, Any]) -> pa.Table:
    """Rows with what stands beside them, as a snapshot has them.

    What is ours is known by its position behind the user's columns: those may have any name.
    """
    names = [*rows.column_names, *beside]
    behind = (v if isinstance(v, pa.Array | pa.ChunkedArray) else pa.array(v) for v in beside.values())
    return pa.Table.from_arrays([*rows.columns, *behind], names=names)


def taken_apart(source: Input, table: pa.Table, names: Sequence[str]) -> tuple[pa.Table, RowNumbers]:
    """The inverse of `put_behind`.

    Args:
        source: whose rows they are.
        table: as a snapshot has it.
        names: what must stand beside them; anything else there is left out.

    Raises:
        StateError: a column is missing.
    """
    own = len(source.schema)
    behind = {name: own + number for number, name in enumerate(table.column_names[own:])}
    missing = {n for n, m in zip_longest(source.schema.names, table.column_names[:own]) if n != m}
    missing |= {name for name in names if name not in behind}
    if missing:
        raise StateError(f"the snapshot of input '{source.name}' lacks {', '.join(sorted(missing))}")
    rows, numbers = with_types(table.select(list(range(own))), source.schema), {}
    for name in names:
        column = table.column(behind[name])
        if not pa.types.is_integer(column.type) or column.null_count:
            raise StateError(f"the snapshot of input '{source.name}': {name} is {column.type}, or holds nulls")
        numbers[name] = column.to_numpy()
    return rows, numbers


def parts_of(source: Input, stored: FromSnapshot, names: Sequence[str]) -> Iterator[LiveRows]:
    """The rows of a snapshot with the numbers beside them; arguments and errors as `taken_apart`."""
    if isinstance(stored, StoredTable):
        for part in stored.parts():
            yield LiveRows(*taken_apart(source, put_behind(part.rows, part.numbers), names), part.entries, part.piece)
    else:
        yield LiveRows(*taken_apart(source, stored, names), {}, None)


class Coolable(Protocol):
    """A state table, as what can be moved: from GPU memory to the host's, and from there to disk."""

    @property
    def nbytes(self) -> int:
        """Bytes of state, wherever they lie."""

    @property
    def host_bytes(self) -> int:
        """Bytes that lie in host memory."""

    @property
    def disk_bytes(self) -> int:
        """Bytes that lie on disk."""

    def cool_rows(self, wanted: int, disk: Disk | None = None) -> int:
        """Move the oldest rows one place further, see `gpu_ops.kernels.Store.cool`; the bytes freed."""

    def cool_indexes(self, wanted: int, disk: Disk | None = None) -> int:
        """Moves the oldest part of the indexes one place further, like `cool_rows`; gives the bytes freed."""

    def cool_numbers(self, wanted: int, disk: Disk) -> int:
        """Moves numbers beside rows to disk; gives the bytes freed, none by default."""
        return 0

    def warm(self) -> None:
        """Move everything back to GPU memory."""


def cooled(parts: Iterable[Callable[[int], int]], wanted: int) -> int:
    """Move parts one after the other until enough is freed; the bytes freed."""
    freed = 0
    for part in parts:
        if freed < wanted:
            freed += part(wanted - freed)
    return freed


def _cooled_store(store: Store, disk: Disk | None, committed: int, wanted: int) -> int:
    return store.cool(wanted, disk, min(committed, len(store)))


class _Compaction(NamedTuple):
    """A compaction that is under way.

    Attributes:
        store: the rows that stay, of the slots that were looked at.
        new_slots: of the slots that were looked at the new ones, -1 for those that go.
    """

    store: Store
    new_slots: Growing


@dataclasses.dataclass
class Journal:
    """The changes that a prepared micro-batch has made to a table, newest last, and how each is undone."""

    first_new: int
    """The slot of its first row."""
    undo: list[Callable[[], None]]
    """What takes it back. A step sets what stands in columns, allocates nothing, and is there before what it undoes."""
    ends: list[Slots]
    """Slots of rows that are dead once it is committed."""
    live: int
    """How many live rows more there are then, new rows and those that end left out."""
    forgotten: list[Slots] = dataclasses.field(default_factory=list)
    """Slots of rows that are dead already, and come back if it is discarded."""


class StateTable:
    """Rows of one input, with columns of numbers beside them.

    Args:
        kernels: the backend.
        source: the input's description.
        columns: the numbers beside the rows, by the name that snapshots have them under.

    Attributes:
        beside: these columns.
        indexes: what leads from keys to slots, by name.
        key_sets_of: by what each index finds rows; none where that is not all there is to an index.
        queues: what leads from times to slots, by name.
        attached: tables of what follows from the rows: theirs is this one's memory, and the fate of each micro-batch.
        pieces: the stored form of the first rows; see `gpu_ops.state.pieces`.
        live: rows with status `LIVE`, as of the last micro-batch.
    """

    def __init__(self, kernels: Kernels, source: Input, columns: Mapping[str, npt.DTypeLike]) -> None:
        self.kernels, self.source = kernels, source
        self.store = kernels.store(source.schema)
        self.status = Growing(kernels.xp, np.int8)
        self.beside = {name: Growing(kernels.xp, dtype) for name, dtype in columns.items()}
        self.indexes: dict[str, Runs[Any]] = {}
        self.key_sets_of: dict[str, KeySet] = {}
        self.queues: dict[str, TimeQueue] = {}
        self.attached: list[StateTable] = []
        self.pieces: tuple[Piece, ...] = ()
        self._compaction: _Compaction | None = None
        self.live = 0
        self._journal: Journal | None = None

    def __len__(self) -> int:
        return len(self.store)

    @property
    def nbytes(self) -> int:
        """Bytes of rows, indexes and numbers, wherever they lie."""
        numbers = self.status.nbytes + sum(column.nbytes for column in self.beside.values())
        numbers += 0 if self._compaction is None else self._compaction.new_slots.nbytes
        indexes = sum(index.nbytes for index in self.indexes.values())
        rows = sum(store.nbytes for store in self._stores())
        return rows + numbers + indexes + sum(table.nbytes for table in self.attached)

    def _stores(self) -> list[Store]:
        """The rows, and those of a compaction that is under way."""
        return [self.store] if self._compaction is None else [self._compaction.store, self.store]

    @property
    def disk_bytes(self) -> int:
        """Bytes on disk, of rows, indexes, numbers and attached tables."""
        indexes = sum(index.disk_bytes for index in self.indexes.values())
        numbers = sum(column.disk_bytes for column in self.beside.values())
        rows = sum(store.disk_bytes for store in self._stores())
        return rows + indexes + numbers + sum(table.disk_bytes for table in self.attached)

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory, of rows, indexes and attached tables."""
        if self.kernels.host is None:
            return self.nbytes - self.disk_bytes
        indexes = sum(index.host_bytes for index in self.indexes.values())
        return self.store.host_bytes + indexes + sum(table.host_bytes for table in self.attached)

    # --- a micro-batch -----------------------------------------------------------------------

    @property
    def journal(self) -> Journal:
        """The journal of the prepared micro-batch; a new one where none is prepared."""
        if self._journal is None:
            self._journal = Journal(len(self.store), [], [], 0)
        return self._journal

    @property
    def first_new(self) -> int:
        """The slot of the prepared micro-batch's first row."""
        return self.journal.first_new

    def append(self, frame: Frame) -> int:
        """Stage new rows, all numbers beside them 0; how many.

        Raises:
            StateError: there is no room for so many.
        """
        first, added = len(self.store), self.kernels.num_rows(frame)
        if first + added > MAX_SLOTS:
            raise StateError(
                f"input '{self.source.name}': a partition holds at most {MAX_SLOTS} rows; use more partitions"
            )
        _ = self.journal
        if added:
            self.store.append(frame)
            self.status.extend(added, LIVE)
            for column in self.beside.values():
                column.extend(added, 0)
        return added

    def move(self, slots: Slots, old: int, new: int) -> None:
        """Give committed rows of one status another, undoably."""
        if slots.size:
            self.journal.undo.append(lambda: self.status.values.__setitem__(slots, old))
            self.status.values[slots] = new
            if new == DEAD:
                self.journal.forgotten.append(slots)
            self.journal.live += int(slots.size) * ((new == LIVE) - (old == LIVE))

    def end(self, slots: Slots) -> None:
        """Rows that are dead once the micro-batch is committed."""
        if slots.size:
            self.journal.ends.append(slots)

    def add(self, name: str, slots: Slots, deltas: Array, before: Array | None = None) -> None:
        """Move a column by one scatter-add, undoably.

        Args:
            name: of the column.
            slots: n slots, repeated ones included.
            deltas: n numbers.
            before: n numbers that are there, where somebody has them already.
        """
        if slots.size:
            deltas = deltas.astype(np.int32) if deltas.dtype != np.int32 else deltas
            column = self.beside[name]
            if before is None:
                self.fetch(slots)
            noted = column.values[slots] if before is None else before
            self.journal.undo.append(lambda: column.values.__setitem__(slots, noted))
            self.kernels.scatter_add(column.values, slots, deltas)

    def put(self, name: str, slots: Slots, value: int | Array, before: Array | None = None) -> None:
        """Set a column of committed and new rows, no slot twice, to a number or to one each, undoably.

        Args:
            name: of the column.
            slots: n slots.
            value: what it becomes.
            before: n numbers that are there, where somebody has them already.
        """
        if slots.size:
            column = self.beside[name]
            if before is None:
                self.fetch(slots)
            noted = column.values[slots] if before is None else before
            self.journal.undo.append(lambda: column.values.__setitem__(slots, noted))
            column.values[slots] = value

    def put_all(self, slots: Slots, numbers: Mapping[str, tuple[Array, Array]]) -> None:
        """Writes several columns of numbers like `put`: the new and the present values, by column name."""
        before = {name: noted for name, (_, noted) in numbers.items()}
        self.journal.undo.append(lambda: write(self.beside, slots, before))
        write(self.beside, slots, {name: values for name, (values, _) in numbers.items()})

    def live_after(self) -> int:
        """Live rows once the prepared micro-batch is committed."""
        done = self._journal
        if done is None:
            return self.live
        ended = sum(int(slots.size) for slots in done.ends)
        return self.live + done.live + len(self.store) - done.first_new - ended

    def commit(self, clock_ms: int) -> None:
        """Make the prepared micro-batch final; without one, nothing happens.

        A `MemoryError` on the way leaves a micro-batch that can be committed again.
        """
        for table in self.attached:
            table.commit(clock_ms)
        done = self._journal
        if done is None:
            return
        for slots in done.ends:
            self.status.values[slots] = DEAD
        self._finalize(done, clock_ms)
        changes = len(self.store) - done.first_new + sum(int(slots.size) for slots in done.ends) + abs(done.live)
        changes = max([changes, *(part.coming for part in self._parts())])
        for part in self._parts():
            part.commit()
        # from here on nothing is allocated
        self.live = self.live_after()
        self._settle()
        self._journal = None
        # so that each dead row costs once
        tiny = self.kernels.tiny_segments
        if self._compaction is not None or self._dead() > max(self.live, 4 if tiny else _FEW):
            with postponed(self.kernels, "dropping dead rows"):
                self.compact(_SLOTS_A_CHANGE * changes + (4 if tiny else _FEW))

    def _parts(self) -> list[Following[Any]]:
        return [*self.indexes.values(), *self.queues.values()]

    def _finalize(self, done: Journal, clock_ms: int) -> None:
        """Hook of a kind of table before its indexes and queues are committed; may run twice."""

    def _settle(self) -> None:
        """Hook by which the counts of a kind of table follow a commit; nothing may be allocated."""

    def _dead(self) -> int:
        """Rows that a compaction would drop."""
        return len(self.store) - self.live

    def discard(self) -> None:
        """Undo the prepared micro-batch.

        A `MemoryError` on the way leaves a micro-batch whose undoing goes on where it was.
        """
        for table in self.attached:
            table.discard()
        done = self._journal
        if done is None:
            return
        for part in self._parts():
            part.discard()
        self.store.truncate(done.first_new)
        while done.undo:
            done.undo[-1]()
            done.undo.pop()
        for column in (self.status, *self.beside.values()):
            column.length = done.first_new
        self._journal = None

    def compact(self, most: int | None = None) -> None:
        """Drop dead rows; done when they outnumber the live, so each dead row costs once.

        The rows that stay are copied some at a time, then indexes and queues follow, some entries at a time, so that no
        micro-batch waits for all of them; rows that die meanwhile stay until the next time. A GPU does it all at once.

        Args:
            most: slots to be looked at now, at most, and as many entries of each index; None for all.
        """
        xp, status, parts = self.kernels.xp, self.status.values, self._parts()
        most = None if self.kernels.host is not None else most
        begun = None if most is None else self._compaction
        followed: list[FollowedRuns[Any]] = [{} if begun is None else part.followed for part in parts]
        self._compaction = None  # what fails half-way begins again
        for part in parts:
            part.followed = {}
        if begun is None:
            room = int(status.size) * (1 if most is None else 2)  # memory that is never touched costs nothing
            new_slots, copied = Growing(xp, np.int64, room), 0
        else:
            new_slots, copied = begun.new_slots, len(begun.store)
        first = len(new_slots)
        last = status.size if most is None else min(first + most, status.size)
        stays = xp.flatnonzero(status[first:last] != DEAD) + first
        store = self.store.retained(stays, None if begun is None else begun.store)
        new_slots.extend(last - first, -1)
        new_slots.values[stays] = as_slots(self.kernels, copied, stays.size)
        left = [part.left(own) for part, own in zip(parts, followed, strict=True)]
        longest = max(left, default=0)
        if most is not None and (last < status.size or longest > most):
            if last == status.size:  # all are ready at once: what has followed is not merged with what comes
                shares = [-(-most * entries // longest) for entries in left]
                each = zip(parts, followed, shares, strict=True)
                followed = [part.follow(new_slots.values, own, share) for part, own, share in each]
            for part, own in zip(parts, followed, strict=True):
                part.followed = own
            self._compaction = _Compaction(store, new_slots)
            return
        alive = new_slots.values >= 0
        slots = xp.flatnonzero(alive)
        kept = retained({STATUS_COLUMN: self.status}, slots)[STATUS_COLUMN]
        beside = retained(self.beside, slots)
        made: list[Any] = [part.renumbered(new_slots.values, own) for part, own in zip(parts, followed, strict=True)]
        indexes = dict(zip(self.indexes, made, strict=False))
        queues = dict(zip(self.queues, made[len(indexes) :], strict=True))
        pieces = renumbered(self.pieces, self.kernels.asnumpy(alive))
        self._renumber(new_slots.values)
        # from here on nothing is allocated
        self.store, self.status, self.beside, self.indexes, self.queues = store, kept, beside, indexes, queues
        self.pieces = pieces

    def _renumber(self, new_slots: Slots) -> None:
        """Hook by which what else goes by slots follows a compaction, all of it or, on an error, none."""

    # --- three places ------------------------------------------------------------------------

    def cool_rows(self, wanted: int, disk: Disk | None = None) -> int:
        """Move the oldest rows one place further; see `gpu_ops.state.runs`. On the GPU none where some are staged."""
        committed = len(self.store) if self._journal is None else self._journal.first_new
        staged = disk is None and committed < len(self.store)
        own = [] if staged else [partial(_cooled_store, store, disk, committed) for store in self._stores()]
        return cooled([*own, *(partial(table.cool_rows, disk=disk) for table in self.attached)], wanted)

    def cool_indexes(self, wanted: int, disk: Disk | None = None) -> int:
        """Move the oldest part of indexes one place further."""
        indexes = (partial(index.cool, disk=disk) for index in self.indexes.values())
        return cooled([*indexes, *(partial(table.cool_indexes, disk=disk) for table in self.attached)], wanted)

    def cool_numbers(self, wanted: int, disk: Disk) -> int:
        """Move numbers beside rows to disk; those of a GPU stay where they are."""
        least = 1 if self.kernels.tiny_segments else LEAST
        large = [column for column in self.beside.values() if self.kernels.host is None and column.nbytes >= least]
        attached = (partial(table.cool_numbers, disk=disk) for table in self.attached)
        return cooled([lambda _: cool(large, disk), *attached], wanted)

    def fetch(self, slots: Slots) -> None:
        """The numbers beside some rows are going to be looked at: those on disk are read together."""
        fetch(self.beside, slots)

    def warm(self) -> None:
        """Moves rows and indexes, and those of attached tables, back to the faster memory."""
        self.store.warm()
        for index in self.indexes.values():
            index.warm()
        for table in self.attached:
            table.warm()

    # --- the stored form ---------------------------------------------------------------------

    def snapshot(self) -> pa.Table:
        """The rows that are not dead, with the numbers beside them."""
        return put_behind(*next(self.snapshot_parts()))

    def snapshot_parts(self, most: int | None = None) -> Iterator[tuple[pa.Table, RowNumbers]]:
        """Gives all stored rows with their numbers in parts; see `gpu_ops.state.pieces.Pieced`."""
        slots, numbers = self.kernels.xp.flatnonzero(self.status.values), self._numbers(self._stored())
        size = max(1, int(slots.size))
        for first in range(0, size, most or size):
            own = slots[first : first + (most or size)]
            rows, there = stored_rows(self.kernels, self.store, self.source.schema, own), self.kernels.asnumpy(own)
            yield rows, {name: values[there].astype(np.int64) for name, values in numbers.items()}

    def flush(self) -> Flush:
        """Gives the parts of a snapshot of the committed rows; see `gpu_ops.state.pieces.Pieced`."""
        first = sum(piece.slots for piece in self.pieces)
        rows = stored_rows(
            self.kernels, self.store, self.source.schema, as_slots(self.kernels, first, len(self) - first)
        )
        if len(rows):
            self.pieces = (*self.pieces, Piece(None, len(rows), rows.nbytes))
        numbers = self._numbers({STATUS_COLUMN: self.status, **self._stored()})
        return Flush(self.pieces, rows, numbers, self.entries_of)

    def entries_of(self, rows: pa.Table) -> dict[str, Array]:
        """The index entries that a piece has beside its rows: of the CPU's hashes only."""
        return {} if self.kernels.host is not None else self._entries(self.kernels.frame(rows))

    def _entries(self, frame: Frame) -> dict[str, Array]:
        """Entries of rows for each index, ascending, by the labels of what they find rows by; the first slot is 0."""
        found = {}
        for keys in self.key_sets_of.values():
            entries = self.kernels.entries(self.kernels.hash_rows(frame, keys.names, keys.types), 0)
            able = self.kernels.valid(frame, keys.strict) if keys.strict else None
            found[keys.label] = entries if able is None else entries[able]
            found[keys.label].sort()
        return found

    def _stored(self) -> dict[str, Growing]:
        """The columns that a snapshot has behind the rows, by name."""
        return self.beside

    def _numbers(self, columns: Mapping[str, Growing]) -> RowNumbers:
        """Columns as a snapshot has them, of all slots; later changes leave them alone."""
        return copied(self.kernels, columns)

    def _restore(
        self,
        stored: FromSnapshot,
        settle: Callable[[], None],
        take_in: Callable[[Frame, Mapping[str, npt.NDArray[Any]]], object] | None = None,
    ) -> None:
        """Fill an empty table from a snapshot.

        Args:
            stored: as `snapshot` gives it, or in pieces.
            settle: called after each part of it: there may be more than the GPU has room for.
            take_in: prepares the rows of a part, given with the numbers beside them; these themselves follow then.
                None where `key_sets_of` says all there is to the indexes.

        Raises:
            StateError: it lacks a column, or a piece cannot be read.
        """
        columns, found = self._stored(), []
        for part in parts_of(self.source, stored, list(columns)):
            first = len(self)
            rows = max(1, part.rows.num_rows)
            step = rows if self.kernels.host is None else rows_at_once(self.kernels, part.rows.nbytes / rows)
            for at in range(0, rows, step):
                frame = self.kernels.frame(part.rows.slice(at, step))
                if take_in is None:
                    self._take_in(frame, part.entries)
                else:
                    take_in(frame, {name: values[at : at + step] for name, values in part.numbers.items()})
                self.commit(0)
                settle()
            for name, column in columns.items():
                column.values[first:] = self.kernels.asarray(part.numbers[name].astype(column.values.dtype))
            found += [] if part.piece is None else [part.piece]
        if self.kernels.host is None:
            for name in self.key_sets_of:
                cast("HashIndex", self.indexes[name]).unite()
        self.pieces = tuple(found)

    def _take_in(self, frame: Frame, stored: Mapping[str, Array]) -> None:
        """Prepare rows of a snapshot, with the index entries that a piece has of them: a GPU's differ."""
        first, labels = np.uint64(len(self)), {keys.label for keys in self.key_sets_of.values()}
        if self.append(frame):
            known = self.kernels.host is None and labels <= stored.keys()
            entries = stored if known else self._entries(frame)
            for name, keys in self.key_sets_of.items():
                cast("HashIndex", self.indexes[name]).put(entries[keys.label] + first)
