"""The stored form of a table in pieces: rows that are written once, and the numbers beside them, which change.

A snapshot of a table names pieces, and holds the numbers of all their rows. Rows that have come since the last one are
a new piece. When there are several as small before it, it takes them along, up to `PIECE_BYTES`; and a piece of which
less than half is left is written again without what has gone. So each row is written a few times at most, and what a
snapshot costs follows the changes since the last one, but for the numbers, which are a few bytes a row.

A row of a piece has a slot of the table, in the same order, until a compaction drops it. Those that have one are
*kept*; the others' numbers are 0, and a status of 0 says that a row is no more.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gpu_ops.state.files import seen_to_move

STATUS_COLUMN: Final = "__status"
PIECE_BYTES: Final = 64 << 20
"""Pieces are taken along by later ones up to this size."""
WHOLE_BYTES: Final = 1 << 20
"""A smaller table is stored whole: pieces would cost more files than they spare bytes."""
_TOGETHER: Final = 7
"""So many pieces are taken along by a later one, when none is much larger: each time a row is written again it is in a
piece eight times as large."""

Numbers = dict[str, npt.NDArray[Any]]
"""Numbers of rows, by name."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """Rows that are stored.

    Attributes:
        name: of its file; None while it is being written.
        rows: how many it has.
        nbytes: of them in memory, about.
        bits: which of them have a slot, as a bitmap; None for all.
    """

    name: str | None
    rows: int
    nbytes: int
    bits: npt.NDArray[np.uint8] | None = None

    @property
    def kept(self) -> npt.NDArray[np.bool_] | None:
        """Which rows have a slot; None for all."""
        return None if self.bits is None else np.unpackbits(self.bits, count=self.rows).view(bool)

    @functools.cached_property
    def slots(self) -> int:
        """How many have one."""
        kept = self.kept
        return self.rows if kept is None else int(kept.sum())

    def keeping(self, kept: npt.NDArray[np.bool_]) -> Piece:
        """The same piece, of which these rows have a slot."""
        return dataclasses.replace(self, bits=None if kept.all() else np.packbits(kept))


class Taken(NamedTuple):
    """What a snapshot of a table is made of.

    Attributes:
        pieces: in the order of slots; the last one may be new.
        fresh: the new one's rows.
        numbers: of all slots, `STATUS_COLUMN` among them.
    """

    pieces: tuple[Piece, ...]
    fresh: pa.Table
    numbers: Numbers

    @property
    def nbytes(self) -> int:
        """Bytes of what is new, and of the numbers."""
        return self.fresh.nbytes + sum(values.nbytes for values in self.numbers.values())


class Pieced(Protocol):
    """A table that can be stored in pieces."""

    pieces: tuple[Piece, ...]
    """Those of its rows that are stored, or being written: all up to some slot."""

    @property
    def nbytes(self) -> int:
        """Bytes of all there is."""

    def snapshot(self) -> pa.Table:
        """Rows and numbers, whole."""

    def take(self) -> Taken:
        """What a snapshot is made of; nothing that changes later. What is new among it counts as a piece from here."""


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
        kept = piece.kept
        left = alive[first : first + piece.slots]
        first += left.size
        if not left.all():
            if kept is None:
                kept = left
            else:
                kept[np.flatnonzero(kept)] = left
            piece = piece.keeping(kept)  # noqa: PLW2901 - the same one
        found.append(piece)
    return tuple(found)


class Written(NamedTuple):
    """A table's part of a snapshot.

    Attributes:
        numbers: of all rows of its pieces, in their order.
        pieces: their names and numbers of rows.
        columns: of a piece's rows.
        groups: of which of the pieces that were taken each is made.
    """

    numbers: pa.Table
    pieces: tuple[tuple[str, int], ...]
    columns: tuple[str, ...]
    groups: tuple[range, ...]

    def settled(self, taken: Sequence[Piece], now: Sequence[Piece]) -> tuple[Piece, ...]:
        """The pieces that a table has, now that this is written.

        Args:
            taken: those that this was made of.
            now: the same, of which a compaction may have dropped rows since.
        """
        found = []
        for (name, rows), group in zip(self.pieces, self.groups, strict=True):
            first = now[group.start]
            if len(group) == 1 and first.name == name:
                found.append(first)
                continue
            kept = []
            for number in group:
                before, after = taken[number].kept, now[number].kept
                left = np.ones(now[number].rows, bool) if after is None else after
                kept.append(left if before is None else left[before])
            nbytes = sum(taken[number].nbytes * taken[number].slots // max(1, taken[number].rows) for number in group)
            found.append(Piece(name, rows, nbytes).keeping(np.concatenate(kept)))
        return tuple(found)


def grouped(pieces: Sequence[Piece], most: int) -> tuple[range, ...]:
    """Which pieces become one, in order: small ones side by side, and one by itself of which less than half is left.

    Args:
        pieces: the last of them may be new, without a name.
        most: bytes of a piece that takes others along.
    """
    groups = [range(number, number + 1) for number, piece in enumerate(pieces) if piece.slots]
    if not groups or pieces[-1].name is not None:
        return tuple(groups)
    last, size, nbytes = groups.pop(), pieces[-1].rows, pieces[-1].nbytes
    while len(before := [pieces[group.start] for group in groups[-_TOGETHER:]]) == _TOGETHER:
        nbytes += sum(piece.nbytes for piece in before)
        if nbytes > most or any(piece.slots > (_TOGETHER + 1) * size for piece in before):
            break
        size += sum(piece.slots for piece in before)
        last = range(groups[-_TOGETHER].start, last.stop)
        del groups[-_TOGETHER:]
    return (*groups, last)


def write(
    taken: Taken, read: Callable[[str], pa.Table], store: Callable[[pa.Table], str], most: int = PIECE_BYTES
) -> Written:
    """Stores what is new of a table, and gives what names all of it.

    Args:
        taken: the table.
        read: gives the rows of a piece.
        store: stores rows as a new piece, and gives its name.
        most: bytes of a piece that takes others along.
    """
    found, behind, first = [], [], 0
    groups = grouped(taken.pieces, most)
    for group in groups:
        own = [taken.pieces[place] for place in group]
        slots = sum(piece.slots for piece in own)
        numbers = {name: values[first : first + slots] for name, values in taken.numbers.items()}
        first += slots
        (piece, *more), kept = own, own[0].kept
        if not more and piece.name is not None and 2 * slots >= piece.rows:
            found.append((piece.name, piece.rows))
            if kept is not None:
                numbers = {name: _spread(values, kept) for name, values in numbers.items()}
        else:
            parts = [taken.fresh if part.name is None else _of(read(part.name), part.kept) for part in own]
            found.append((store(pa.concat_tables(parts)), slots))
        behind.append(pa.table(numbers))
    empty = pa.table({name: pa.array(values[:0]) for name, values in taken.numbers.items()})
    return Written(pa.concat_tables([empty, *behind]), tuple(found), tuple(taken.fresh.column_names), groups)


def _spread(values: npt.NDArray[Any], kept: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
    """Numbers of those that have a slot as numbers of all, the others' 0."""
    found = np.zeros(kept.size, values.dtype)
    found[kept] = values
    return found


def _of(rows: pa.Table, kept: npt.NDArray[np.bool_] | None) -> pa.Table:
    return rows if kept is None else rows.filter(pa.array(kept))


class Part(NamedTuple):
    """Rows of a stored table that are there, and their numbers; and the piece that they are of, if any."""

    rows: pa.Table
    numbers: Numbers
    piece: Piece | None


@dataclasses.dataclass(frozen=True)
class StoredTable:
    """A table as a snapshot has it in pieces.

    Attributes:
        numbers: as `Written` has them.
        pieces: likewise.
        columns: of a piece's rows.
        read: gives the rows of a piece.
    """

    numbers: pa.Table
    pieces: tuple[tuple[str, int], ...]
    columns: tuple[str, ...]
    read: Callable[[str], pa.Table]

    @property
    def column_names(self) -> list[str]:
        """The columns of rows, and behind them the numbers."""
        return [*self.columns, *self.numbers.column_names]

    def parts(self) -> Iterator[Part]:
        """The rows, piece by piece; the next one is read while one is taken in."""
        first = 0
        with ThreadPoolExecutor(1, thread_name_prefix="piece") as pool:
            coming = [pool.submit(self.read, name) for name, _ in self.pieces[:1]]
            for number, (name, rows) in enumerate(self.pieces):
                coming += [pool.submit(self.read, after) for after, _ in self.pieces[number + 1 : number + 2]]
                table = coming.pop(0).result()
                part = self.numbers.slice(first, rows)
                numbers = {column: part.column(column).to_numpy() for column in part.column_names}
                kept = numbers[STATUS_COLUMN] != 0
                first += rows
                seen_to_move()
                piece = Piece(name, rows, table.nbytes).keeping(kept)
                if piece.bits is not None:
                    table, numbers = _of(table, kept), {column: values[kept] for column, values in numbers.items()}
                yield Part(table, numbers, piece)


FromSnapshot: TypeAlias = pa.Table | StoredTable
"""What a snapshot has under a name."""
