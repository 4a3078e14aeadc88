"""The stored form of a table in pieces: rows that are written once, and the numbers beside them, which change.

A snapshot of a table names pieces, and holds the numbers of all their rows. Rows that have come since the last one are
flushed to a new piece. Pieces as small before it are merged with it, up to `most_bytes`; and a piece of which more than
half is obsolete is written again without that. So each row is written a few times at most, and what a snapshot costs
follows the changes since the last one, but for the numbers, which are a few bytes a row.

A large piece has the index entries of its rows, too, which a restart then need not hash and sort. Small ones, which are
soon merged, have none; neither have those of earlier versions.

A row of a piece has a slot of the table, in the same order, until a compaction drops it: then it is *obsolete*, and its
numbers are 0; a status of 0 says that a row is no more.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gpu_ops import layouts
from gpu_ops.errors import StateError
from gpu_ops.state.files import seen_to_move

STATUS_COLUMN: Final = "__status"
PIECE_BYTES: Final = 64 << 20
"""Pieces are merged up to this size, or to a smaller one."""
WHOLE_BYTES: Final = 1 << 20
"""A smaller table is stored whole: pieces would cost more files than they spare bytes."""
_FANOUT: Final = 7
"""So many pieces are merged with a later one, when none is much larger: each time a row is written again it is in a
piece eight times as large."""

RowNumbers = dict[str, npt.NDArray[Any]]
"""Numbers of rows, by name."""

Entries: TypeAlias = Mapping[str, npt.NDArray[np.uint64]]
"""Index entries of rows (see `gpu_ops.layouts`), ascending, by a label that says what they find rows by. The slots are
places among the rows; a row that nothing is to find has none."""


def most_bytes(table: int) -> int:
    """Up to which size pieces of a table of so many bytes are merged: these are in memory for a while, beside it."""
    return min(PIECE_BYTES, max(PIECE_BYTES // 4, table // 16))


class Content(NamedTuple):
    """The rows of a piece, and their index entries if it has them."""

    rows: pa.Table
    entries: Entries

    def of(self, present: npt.NDArray[np.bool_] | None) -> Content:
        """The content without the rows whose flag is False; None keeps all."""
        if present is None:
            return self
        places: Any = np.where(present, np.cumsum(present) - 1, -1)
        entries = {label: layouts.renumbered(own, places)[0] for label, own in self.entries.items()}
        return Content(self.rows.filter(pa.array(present)), entries)


@dataclasses.dataclass(frozen=True)
class Piece:
    """Rows that are stored.

    Attributes:
        name: of its file; None while it is being written.
        rows: how many it has.
        nbytes: of them in memory, about.
        bits: which of them are not obsolete, as a bitmap; None for all.
    """

    name: str | None
    rows: int
    nbytes: int
    bits: npt.NDArray[np.uint8] | None = None

    @property
    def present(self) -> npt.NDArray[np.bool_] | None:
        """Flags of the rows that have a slot; None for all."""
        return None if self.bits is None else np.unpackbits(self.bits, count=self.rows).view(bool)

    @functools.cached_property
    def slots(self) -> int:
        """The number of rows that have a slot."""
        present = self.present
        return self.rows if present is None else int(present.sum())

    def having(self, present: npt.NDArray[np.bool_]) -> Piece:
        """Gives a copy of the piece in which the flagged rows have a slot."""
        return dataclasses.replace(self, bits=None if present.all() else np.packbits(present))


class Flush(NamedTuple):
    """The pieces, new rows and numbers that the next snapshot of a table is made of.

    Attributes:
        pieces: in the order of slots; the last one may be new.
        rows: the new one's.
        numbers: of all slots, `STATUS_COLUMN` among them.
        entries_of: gives the index entries of rows.
    """

    pieces: tuple[Piece, ...]
    rows: pa.Table
    numbers: RowNumbers
    entries_of: Callable[[pa.Table], Entries] = lambda _: {}

    @property
    def nbytes(self) -> int:
        """Bytes of what is new, and of the numbers."""
        return self.rows.nbytes + sum(values.nbytes for values in self.numbers.values())


class Pieced(Protocol):
    """A table that can be stored in pieces."""

    pieces: tuple[Piece, ...]
    """Those of its rows that are stored, or being written: all up to some slot."""

    @property
    def nbytes(self) -> int:
        """Bytes of all there is."""

    def snapshot(self) -> pa.Table:
        """Rows and numbers, whole."""

    def snapshot_parts(self, most: int | None = None) -> Iterator[tuple[pa.Table, RowNumbers]]:
        """Gives the rows and numbers of `snapshot`, ``most`` rows at a time; None for all at once."""

    def entries_of(self, rows: pa.Table) -> Entries:
        """The index entries that a piece has beside its rows."""

    def flush(self) -> Flush:
        """Gives the parts of a snapshot, which never change; new rows among them count as a piece from here."""


Storable: TypeAlias = pa.Table | Pieced
"""What an operator keeps under a name."""


def whole(kept: Mapping[str, Storable]) -> dict[str, pa.Table]:
    """All of it as tables."""
    return {name: table if isinstance(table, pa.Table) else table.snapshot() for name, table in kept.items()}


def renumbered(pieces: Sequence[Piece], alive: npt.NDArray[np.bool_]) -> tuple[Piece, ...]:
    """Pieces after a compaction.

    Args:
        pieces: before it.
        alive: of each slot whether it stays; there may be more than those of pieces.
    """
    found, first = [], 0
    for piece in pieces:
        present = piece.present
        left = alive[first : first + piece.slots]
        first += left.size
        if not left.all():
            if present is None:
                present = left
            else:
                present[np.flatnonzero(present)] = left
            piece = piece.having(present)  # noqa: PLW2901 - the same one
        found.append(piece)
    return tuple(found)


class WrittenTable(NamedTuple):
    """A table's part of a snapshot.

    Attributes:
        numbers: of all rows of its pieces, in their order.
        pieces: their names and numbers of rows.
        columns: of a piece's rows.
        groups: of which of the flush's pieces each is made.
    """

    numbers: pa.Table
    pieces: tuple[tuple[str, int], ...]
    columns: tuple[str, ...]
    groups: tuple[range, ...]

    def installed(self, flushed: Sequence[Piece], now: Sequence[Piece]) -> tuple[Piece, ...]:
        """The pieces that a table has, now that this is written.

        Args:
            flushed: those that this was made of.
            now: the same, of which a compaction may have dropped rows since.
        """
        found = []
        for (name, rows), group in zip(self.pieces, self.groups, strict=True):
            first = now[group.start]
            if len(group) == 1 and first.name == name:
                found.append(first)
                continue
            present, nbytes = [], 0
            for before, after in zip(flushed[group.start : group.stop], now[group.start : group.stop], strict=True):
                left = np.ones(after.rows, bool) if after.present is None else after.present
                present.append(left if before.present is None else left[before.present])
                nbytes += before.nbytes * before.slots // max(1, before.rows)
            found.append(Piece(name, rows, nbytes).having(np.concatenate(present)))
        return tuple(found)


def merges(pieces: Sequence[Piece], most: int) -> tuple[range, ...]:
    """Chooses the pieces to merge, in order: ranges of small neighbours; a range of one for each of the others.

    Args:
        pieces: the last of them may be new, without a name.
        most: bytes of a piece that others are merged into.
    """
    groups = [range(number, number + 1) for number, piece in enumerate(pieces) if piece.slots]
    if not groups or pieces[-1].name is not None:
        return tuple(groups)
    last, size, nbytes = groups.pop(), pieces[-1].rows, pieces[-1].nbytes
    while len(before := [pieces[group.start] for group in groups[-_FANOUT:]]) == _FANOUT:
        nbytes += sum(piece.nbytes for piece in before)
        if nbytes > most or any(piece.slots > (_FANOUT + 1) * size for piece in before):
            break
        size += sum(piece.slots for piece in before)
        last = range(groups[-_FANOUT].start, last.stop)
        del groups[-_FANOUT:]
    return (*groups, last)


def write(
    flush: Flush, read: Callable[[str], Content], store: Callable[[Content], str], most: int = PIECE_BYTES
) -> WrittenTable:
    """Stores what is new of a table, and gives what names all of it.

    Args:
        flush: of the table.
        read: gives what is in a piece.
        store: stores a new piece, and gives its name.
        most: bytes of a piece that others are merged into.
    """
    found, beside, first = [], [], 0
    groups = merges(flush.pieces, most)
    for group in groups:
        own = flush.pieces[group.start : group.stop]
        slots = sum(piece.slots for piece in own)
        numbers = {name: values[first : first + slots] for name, values in flush.numbers.items()}
        first += slots
        (piece, *more), present = own, own[0].present
        if not more and piece.name is not None and 2 * slots >= piece.rows:
            found.append((piece.name, piece.rows))
            if present is not None:
                numbers = {name: _spread(values, present) for name, values in numbers.items()}
        else:
            parts = [Content(flush.rows, {}) if part.name is None else read(part.name).of(part.present) for part in own]
            found.append((store(_merged(parts, flush.entries_of, most // (_FANOUT + 1))), slots))
        beside.append(pa.table(numbers))
    empty = pa.table({name: pa.array(values[:0]) for name, values in flush.numbers.items()})
    return WrittenTable(pa.concat_tables([empty, *beside]), tuple(found), tuple(flush.rows.column_names), groups)


def _merged(parts: Sequence[Content], entries_of: Callable[[pa.Table], Entries], least: int) -> Content:
    """Parts one behind the other; of ``least`` bytes or more with entries, which are made for parts that have none."""
    rows = pa.concat_tables([part.rows for part in parts]).combine_chunks()
    if rows.nbytes < least:
        return Content(rows, {})
    if len(parts) == 1:
        return Content(rows, parts[0].entries or entries_of(parts[0].rows))
    found, first = [], 0
    for part in parts:
        own = part.entries or entries_of(part.rows)
        found.append({label: entries + np.uint64(first) for label, entries in own.items()})
        first += len(part.rows)
    labels = set.intersection(*map(set, found))
    together = {label: np.concatenate([own[label] for own in found]) for label in sorted(labels)}
    for entries in together.values():
        entries.sort(kind="stable")  # timsort, which merges what is ascending
    return Content(rows, together)


def _spread(values: npt.NDArray[Any], present: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
    """Numbers of those that have a slot as numbers of all, the others' 0."""
    found = np.zeros(present.size, values.dtype)
    found[present] = values
    return found


class LiveRows(NamedTuple):
    """Rows of a stored table that are there, with their numbers and index entries; and their piece, if any."""

    rows: pa.Table
    numbers: RowNumbers
    entries: Entries
    piece: Piece | None


@dataclasses.dataclass(frozen=True)
class StoredTable:
    """A table as a snapshot has it in pieces.

    Attributes:
        numbers: gives them as `WrittenTable` has them, some at a time.
        pieces: as `WrittenTable` has them.
        columns: of a piece's rows.
        read: gives what is in a piece.
    """

    numbers: Callable[[], pa.RecordBatchReader]
    pieces: tuple[tuple[str, int], ...]
    columns: tuple[str, ...]
    read: Callable[[str], Content]

    @property
    def column_names(self) -> list[str]:
        """The columns of rows, and behind them the numbers."""
        return [*self.columns, *self.numbers().schema.names]

    def parts(self) -> Iterator[LiveRows]:
        """The rows, piece by piece; the next one is read while one is taken in."""
        coming = list[Future[LiveRows]]()
        with ThreadPoolExecutor(1, thread_name_prefix="piece") as pool:
            for (name, _), numbers in zip(self.pieces, self._numbers(), strict=True):
                coming.append(pool.submit(self._part, name, numbers))
                if len(coming) > 1:
                    seen_to_move()
                    yield coming.pop(0).result()
            if coming:
                yield coming[0].result()

    def _numbers(self) -> Iterator[pa.Table]:
        """Gives the numbers of each piece's rows, a table a piece."""
        batches, left = self.numbers(), list[pa.RecordBatch]()
        for name, rows in self.pieces:
            while sum(map(len, left)) < rows:
                if (batch := next(batches, None)) is None:
                    raise StateError(f"the snapshot has numbers of fewer rows than piece {name}")
                left.append(batch)
            table = pa.Table.from_batches(left, batches.schema)
            yield table.slice(0, rows)
            left = table.slice(rows).to_batches()

    def _part(self, name: str, beside: pa.Table) -> LiveRows:
        content, numbers = self.read(name), {column: beside.column(column).to_numpy() for column in beside.column_names}
        present = numbers[STATUS_COLUMN] != 0
        piece = Piece(name, len(beside), content.rows.nbytes).having(present)
        if piece.bits is not None:
            content = content.of(present)
            numbers = {column: values[present] for column, values in numbers.items()}
        return LiveRows(content.rows, numbers, content.entries, piece)


FromSnapshot: TypeAlias = pa.Table | StoredTable
"""What a snapshot has under a name."""
