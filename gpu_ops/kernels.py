"""The contract between operators and backends: everything operators know of pandas, cuDF or cupy.

A backend gives columns of any type as opaque *frames* (row-aligned, named columns) and does on them
what needs to know types: hash, compare, gather, filter by a condition. Everything else is done by
operators on one-dimensional arrays with the backend's array module ``xp`` (numpy or cupy).

Conventions: a *slot* is a row's position in a `Store`, int64, -1 for "no row" (gathers as nulls).
Masks are bool arrays. Arrays returned are owned by the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import IO, Any, Final, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gpu_ops.arrays import Array, Hashes, Mask, Positions, Slots, value_changes
from gpu_ops.conditions import Expression
from gpu_ops.files.disk import Disk

Frame = Any
"""Named columns of equal length, in the backend's own form. Immutable."""


Probe = Literal["auto", "hash_join", "index"]
"""How the GPU finds candidates: by libcudf's hash join, or by a search of the sorted index.

``"auto"`` is whichever costs less, which is nearly always the search. Rows and their
order are the same. A host has the search only.
"""

LOOKUPS: Final = ("hash_join", "kept_table", "index")
"""Ways of a lookup, of one probe row in one run of an index; a kept table is one that a hash join has built."""


class HeldRows(Protocol):
    """Rows that the backend has, in memory of its own. Arrays are the host's."""

    @property
    def frame(self) -> Frame:
        """The columns of the rows, in the backend's form."""

    def __len__(self) -> int:
        """The number of rows."""

    def take(self, order: npt.NDArray[np.int64]) -> HeldRows:
        """The rows at n positions."""

    def table(self) -> pa.Table:
        """All columns, copied out."""

    def column(self, name: str) -> pa.ChunkedArray:
        """One column, copied out."""

    def columns(self, names: Collection[str]) -> Frame:
        """Gives some columns, and perhaps others, in the backend's form."""

    def called(self, shown: Mapping[str, str], schema: pa.Schema) -> HeldRows:
        """Renames the columns, given by their new names, and leaves out the others; a schema has the new types."""


class DeviceRows(HeldRows, Protocol):
    """Rows that came in a DataFrame of the backend's memory, or were read into it, and stay there."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Gives all columns by Arrow's C data interface, with the one beside them."""

    def take(self, order: npt.NDArray[np.int64]) -> DeviceRows:
        """The rows at n positions."""

    def nulls(self, name: str) -> Mask | None:
        """Flags the null values of a column; None if there is none."""

    def beyond(self, name: str, limit: int) -> Mask | None:
        """Flags integers, or times, that are not between ``-limit`` and ``limit``; None if there is none."""

    def invalid_text(self, name: str) -> Mask | None:
        """Flags text of a column that is not valid UTF-8; None if there is none, or the column has no text."""

    def words(self, known: Sequence[str]) -> npt.NDArray[np.int8]:
        """Gives the number of the known word in the column beside each row (see `DataFrames.rows`); -1 for none."""


class DataFrames(Protocol):
    """DataFrames of another library in the backend's memory, taken and given without the host."""

    def lacks(self, schema: pa.Schema) -> str | None:
        """Why DataFrames of this schema cannot be given; None where they can."""

    def rows(self, given: object, schema: pa.Schema, beside: str | None) -> DeviceRows | None:
        """A DataFrame's rows, in memory of their own: what becomes of it later does not matter.

        Args:
            given: it may be anything.
            schema: the columns to be taken, in this order.
            beside: a further column, of text.

        Returns:
            None for what is no such DataFrame, has no rows, other columns, or some that do not go without the host.
        """

    def numbers(self, name: str, values: Array, kind: pa.DataType) -> Frame:
        """A frame of one column over an array's memory: int64, of a type that is a count of something."""

    def together(self, parts: Sequence[pa.Table | Frame], schema: pa.Schema) -> Frame:
        """Rows one after the other, by position and in the schema's types."""

    def as_rows(self, frame: Frame, schema: pa.Schema, beside: str | None = None) -> DeviceRows:
        """A frame's columns, by position and in the schema's types, as rows that an operator takes in.

        Args:
            frame: its memory becomes that of the rows.
            schema: the columns.
            beside: a further column, of text, as of `rows`; the frame's last one.
        """

    def as_dataframe(self, frame: Frame, schema: pa.Schema) -> Any:
        """A DataFrame of a frame's columns, by position and in the schema's types; its memory is nobody else's."""


class FrameFiles(Protocol):
    """Files of rows that are in the backend's memory, or come to it, which do not pass the host."""

    def read_parquet(self, path: str, schema: pa.Schema) -> Frame:
        """Reads columns of a local Parquet file, in its order.

        Args:
            path: the file.
            schema: the columns, of types that it has and `gpu_ops.spark.wire.files_request.in_both` lets through.

        Raises:
            RuntimeError, OSError, ValueError: it cannot be read, or has others.
        """

    def nbytes(self, frame: Frame) -> int:
        """The bytes of a frame's columns."""

    def write_parquet(
        self,
        frame: Frame,
        schema: pa.Schema,
        rows: range,
        sink: str | IO[bytes],
        *,
        compression: str | None,
        rows_per_group: int,
    ) -> None:
        """Writes rows as a Parquet file, which says of itself what pyarrow's of a schema does.

        Args:
            frame: the columns, by position; what they are compared as may be narrower than the schema's types.
            schema: of the file, of types that `gpu_ops.spark.wire.files_request.why_not_by_card` lets through.
            rows: which of them, one behind the other.
            sink: the path of a local file, or what takes bytes.
            compression: as pyarrow calls it.
            rows_per_group: of a row group, at most.
        """


class SearchedRun(Protocol):
    """Entries of an index in ascending order: by hash, then by time where there are times, then by slot."""

    @property
    def entries(self) -> Array:
        """N uint64, see `gpu_ops.layouts.entries`."""

    @property
    def times(self) -> Array | None:
        """N int64, ascending within a hash; None where entries have no times."""

    @property
    def directory(self) -> Array:
        """int32: where each hash prefix begins among the entries, and at the end their number."""

    @property
    def shift(self) -> int:
        """The upper half of a hash shifted by it is its prefix."""


class Store(Protocol):
    """The rows of one input: appended, gathered by slot, never changed in place."""

    @property
    def nbytes(self) -> int:
        """Bytes of the rows, buffers' spare room left out."""

    @property
    def host_bytes(self) -> int:
        """Bytes of the rows in host memory."""

    @property
    def disk_bytes(self) -> int:
        """Bytes of the rows on local disk."""

    def __len__(self) -> int:
        """Number of slots, dead ones included."""

    def append(self, frame: Frame) -> None:
        """Add the frame's rows at the end; row i gets slot ``len(store) + i``."""

    def truncate(self, length: int) -> None:
        """Drop all slots from ``length`` on."""

    def take(self, slots: Slots, columns: Sequence[str], *, present: bool = False, nulls: int | None = None) -> Frame:
        """Gathers rows by slot.

        Args:
            slots: n int64, -1 for a row of nulls.
            columns: by name.
            present: none is -1.
            nulls: how many are, where that is known: it spares a look.
        """

    def may_be_null(self, column: str) -> bool:
        """Tells whether any row may have a null in a column."""

    def retained(self, slots: Slots, onto: Store | None = None) -> Store:
        """Another store with only these slots (ascending), renumbered, each where it lies in this one.

        Args:
            slots: of the rows.
            onto: on the host, what rows of lower slots have gone to: these follow them there.
        """

    def cool(self, wanted: int, disk: Disk | None = None, committed: int | None = None) -> int:
        """Move the oldest rows one place further: from GPU memory to the host's, or from there to disk.

        From GPU memory not between `append` and what could `truncate` it again.

        Args:
            wanted: bytes to be freed; it may be more, or less.
            disk: move rows in host memory there; None to move rows in GPU memory.
            committed: how many rows cannot be truncated; None for all.

        Returns:
            The bytes freed, 0 if nothing is there to be moved.

        Raises:
            NoRoomError: the disk has no room for more; what has not moved stays.
        """

    def warm(self) -> None:
        """Move all rows back to GPU memory."""


class Columns(NamedTuple):
    """Columns that rows are compared by.

    Attributes:
        source: a frame or a `Store`.
        names: the columns, in the order of their types.
        rows: the row (position or slot) that each number stands for; None where the numbers are the rows.
    """

    source: Any
    names: Sequence[str]
    rows: Array | None = None


class TimeLimits(NamedTuple):
    """The times in which each of n probe rows looks for the nearest row.

    Attributes:
        times: n times from which it looks.
        back: for rows before them, else after them.
        exact: whether a row of just the time is one.
        farthest: n times, the last at which a row is wanted, inclusive; None for any.
    """

    times: Array
    back: bool
    exact: bool
    farthest: Array | None


class Among(NamedTuple):
    """Rows of a store that count.

    Attributes:
        states: a number (int8) by slot.
        least: the smallest one of rows that count.
        most: the greatest one.
    """

    states: Array
    least: int
    most: int


class SoleLookup(NamedTuple):
    """Rows of one side that look for their row of the other, of which each has one at most in any of some indexes.

    Attributes:
        side: which it is, 0 or 1.
        indexes: the runs of each, in the backend's memory.
        types: what the columns are compared as, one each.
        columns: the key columns of the rows that look, by slot; and of the rows that are found.
        probe_rows: n entries (uint64).
        among: the rows that are there; None for all.
    """

    side: int
    indexes: Sequence[Sequence[SearchedRun]]
    types: Sequence[pa.DataType]
    columns: tuple[Columns, Columns]
    probe_rows: Array
    among: Among | None


class Flagged(NamedTuple):
    """n rows some of which are wanted, by flags, and what is wanted of each.

    Attributes:
        flags: n flags; None for all rows.
        columns: of each column n int64; or what the first row has, of which each has one more than the row before;
            or None for -1 in all rows.
        unless: n flags of those that are not wanted after all; None for none.
        places: of which row the flags in both are, each row's once; None where they are in order.
    """

    flags: Array | None
    columns: Sequence[Array | int | None]
    unless: Array | None = None
    places: Positions | None = None


class Neighbours(NamedTuple):
    """The n rows of a frame side by side where their hashes look alike.

    Attributes:
        order: their positions, by hash and else in their own order.
        flags: of each what it was given.
        before: what the one before it that has its hash was given, 0 or 1 (int8); -1 for none, and -2 where they are
            unlike, though their hashes look alike.
        last: flags of those that are the last ones of their hashes.
    """

    order: Positions
    flags: Array
    before: Array
    last: Array


class TooMany(Exception):  # noqa: N818 - no error, an answer
    """More candidates than there may be: whoever asked finds what it wants another way, or piece by piece."""


class Kernels(Protocol):
    """The interface of a backend.

    Attributes:
        name: ``"cpu"`` or ``"gpu"``.
        xp: numpy or cupy.
        bucket: entries of a run that share a hash prefix in its directory, on average: at most this many.
        tiny_segments: test setting: merge and grow at the smallest sizes.
        host: the backend of host memory, for state that the GPU's has no room for; None if this is it.
        memory_limit: bytes of GPU memory that all backends of the process may allocate together; None on the host.
        dataframes: how DataFrames in the backend's memory come and go; None on the host.
        files: how frames become files; None on the host, where tasks write them.
        gives_frames: whether changelogs are made as frames, to be given as DataFrames or written; else in Arrow.
        gives_bytes: whether row kinds in those in Arrow are bytes (`gpu_ops.descriptions.changelog.WORDS`), to be sent
            to where they are made text; else they are text.
        lookups: how many there were by each way of `LOOKUPS`, in both memories, since the backend was made.
        piece_bytes: what is merged to be larger than this many bytes could no longer be moved in parts; None for no
            limit.
    """

    name: str
    xp: Any
    bucket: int
    tiny_segments: bool
    host: Kernels | None
    memory_limit: int | None
    dataframes: DataFrames | None
    files: FrameFiles | None
    gives_frames: bool
    gives_bytes: bool
    lookups: dict[str, int]
    piece_bytes: int | None

    # --- Arrow and host memory ---------------------------------------------------------------

    def frame(self, table: pa.Table) -> Frame:
        """Makes a frame of an Arrow table's columns."""

    def to_arrow(self, frame: Frame, schema: pa.Schema) -> pa.Table:
        """Columns to Arrow, by position, in the schema's types."""

    def asarray(self, values: Array) -> Array:
        """A host array in the backend's memory."""

    def asnumpy(self, values: Array) -> npt.NDArray[Any]:
        """A backend's array on the host."""

    def on_host(self, arrays: Sequence[Array]) -> list[npt.NDArray[Any]]:
        """Several arrays of any types on the host, in one look; not to be written to."""

    # --- frames ------------------------------------------------------------------------------

    def num_rows(self, frame: Frame) -> int:
        """Rows of a frame."""

    def take(self, frame: Frame, rows: Positions, columns: Sequence[str], *, present: bool = False) -> Frame:
        """Rows of a frame by position (int64, -1 for a row of nulls; ``present`` if none is, which spares a look)."""

    def combine(self, columns: Sequence[tuple[str, Frame, str]]) -> Frame:
        """A frame of columns ``(new name, frame, column)`` from row-aligned frames."""

    def coalesce(self, first: Frame, first_column: str, second: Frame, second_column: str) -> Frame:
        """A frame with one column, named as the first: its values, the second's where it is null."""

    def valid(self, frame: Frame, columns: Sequence[str]) -> Array | None:
        """Mask of rows that have no null in these columns; None when that is all of them."""

    def hash_rows(self, frame: Frame, columns: Sequence[str], types: Sequence[pa.DataType]) -> Hashes:
        """64-bit hashes (uint64) of rows; rows that `equal_rows` calls equal have equal hashes.

        Args:
            frame: any columns, nested ones too.
            columns: those hashed, in order; none gives one constant.
            types: the types to compare in, one per column (int32 and int64 keys hash alike).
        """

    def equal_rows(
        self,
        left: Frame,
        left_columns: Sequence[str],
        right: Frame,
        right_columns: Sequence[str],
        types: Sequence[pa.DataType],
    ) -> Array:
        """Mask of rows equal in every column: null equals null, NaN equals NaN, -0.0 equals 0.0."""

    def equal_at(
        self,
        types: Sequence[pa.DataType],
        one: tuple[Columns, Array],
        other: tuple[Columns, Array],
        where: Array | None = None,
    ) -> Array:
        """Mask of n pairs of rows that are equal in every column, as `equal_rows` has it.

        Args:
            types: what the columns are compared as, one each.
            one: columns, and the n rows of each pair's first part; none is -1 where they are looked at.
            other: likewise of its second part.
            where: mask of the pairs looked at, the others count as different; None for all.
        """

    def matches(
        self,
        types: Sequence[pa.DataType],
        pairs: Array,
        columns: tuple[Columns, Columns],
        among: Among | None,
        *,
        by_candidate: bool = False,
    ) -> tuple[Array, Slots]:
        """Candidates whose row counts and is really equal to the one that looks.

        Args:
            types: what keys are compared as; none where there is no key.
            pairs: n candidates as `search` gives them, in any order; may be changed.
            columns: the key columns of the rows that look, and of those found.
            among: the rows that count; None for all.
            by_candidate: as it was given to `search`.

        Returns:
            The pairs' two parts, ordered as the pairs are.
        """

    def sole_matches(
        self,
        types: Sequence[pa.DataType],
        pairs: Array,
        columns: tuple[Columns, Columns],
        among: Among | None,
        *,
        size: int,
    ) -> Slots:
        """The slot that each of ``size`` probe rows matches, -1 for none; no probe row matches more than one.

        Other arguments as `matches`.
        """

    def sole(
        self,
        runs: Sequence[SearchedRun],
        types: Sequence[pa.DataType],
        columns: tuple[Columns, Columns],
        hashes: Hashes,
        among: Among | None,
    ) -> Slots | None:
        """The slot that each of n rows matches in an index, as `search` and `sole_matches` find it.

        Args:
            runs: of the index, in this backend's memory.
            types: what the columns are compared as, one each.
            columns: the key columns of the rows, which are those at n positions, or all; and of those that are found.
            hashes: of every row of the first.
            among: the rows that are there; None for all.

        Returns:
            -1 for none; None where the backend has no way of its own, or it does not pay.
        """

    def sole_pairs(self, lookups: Sequence[SoleLookup]) -> Array | None:
        """The row of each index that each probe row of some lookups matches.

        Returns:
            Pairs (int64, see `gpu_ops.layouts.pairs`) of the slot that is found and the probe row's, the highest bit
            set of those of side 1: of each lookup, for each index as many as probe rows or none, -1 where nothing
            matches. None where the backend has no way of its own, or it does not pay.
        """

    def neighbours(self, types: Sequence[pa.DataType], own: Columns, hashes: Hashes, flags: Array) -> Neighbours | None:
        """Rows of a frame put side by side where their hashes look alike, as `grouped` does.

        Args:
            types: what the columns are compared as, one each.
            own: the columns.
            hashes: of the n rows.
            flags: of the n rows, which the one behind each is told.

        Returns:
            None where the backend has no way of its own.
        """

    def grouped(
        self, types: Sequence[pa.DataType], own: Columns, hashes: Hashes
    ) -> tuple[Positions, Positions, Array, Positions]:
        """Rows of a frame put side by side where their hashes look alike.

        Args:
            types: what the columns are compared as, one each.
            own: the columns.
            hashes: of the n rows.

        Returns:
            n positions of rows, by hash and else in their own order; the places among them where a hash begins, and
            at the end n; for each of them the number of its hash; and the places, ascending, whose row is unlike the
            one before it, though their hashes look alike: few or none.
        """

    def evaluate(self, condition: Expression, frames: Mapping[str, Frame], length: int) -> Array:
        """Mask of rows for which the condition is true; unknown is not true."""

    # --- arrays ------------------------------------------------------------------------------

    def flagged(
        self, parts: Sequence[Flagged], numbers: Sequence[Array] = (), *, chained: bool = False
    ) -> tuple[list[list[Array]], list[int], list[int]]:
        """Rows whose flags are set, and numbers, all in one look: of a GPU each is a wait.

        Args:
            parts: one at least, each of as many columns; and of a row at least, or with no flags of either kind.
            numbers: int64 of no dimensions.
            chained: all rows are wanted one behind the other.

        Returns:
            of each part its columns, or of all together; how many rows each part has; and the numbers. A column of
            which all rows are wanted may be the one that was given.
        """

    def argsort(self, values: Array) -> Positions:
        """Stable argsort, int64 positions."""

    def sort(self, values: Array) -> Array:
        """Sorts n int64 or uint64; what was given may be what comes out, or is sorted itself."""

    def scatter_add(self, target: Array, index: Array, values: Array) -> None:
        """``target[index[i]] += values[i]`` for every i, repeated indices included; -1 may be one where it adds 0."""

    def scatter_min(self, target: Array, index: Array, values: Array) -> None:
        """``target[index[i]] = min(target[index[i]], values[i])`` for every i (uint64), repeated indices included."""

    def cumulative_min(self, values: Array) -> Array:
        """Running minimum of an int64 array."""

    def fused(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, which works on arrays element by element, in one pass over them where the backend can.

        Args:
            function: of a module; operators and ufuncs only, nothing in place. Numbers that are no arguments take the
                type of the arrays that they stand beside.
        """

    # --- rows that are all there -------------------------------------------------------------

    def aggregate(self, table: pa.Table, by: Sequence[str], calls: Sequence[tuple[Any, str]]) -> pa.Table:
        """Groups of rows, in an order that follows from them; null, and NaN, is a key like any other.

        Args:
            table: n rows; of floats in it zero is one value.
            by: the columns whose values make a group; none for one group.
            calls: columns and functions, as of `pyarrow.TableGroupBy.aggregate`.

        Returns:
            A row per group: the ``by`` columns, and a column per call, named ``column_function``.
        """

    def sorted_order(self, keys: pa.Table) -> pa.Array:
        """Positions of rows in ascending order, column by column: NaN behind numbers, nulls last; a stable sort."""

    # --- state -------------------------------------------------------------------------------

    def entries(
        self, hashes: Hashes, first: int, rows: Positions | None = None, given: tuple[Positions, Slots] | None = None
    ) -> Array:
        """Entries of an index (uint64, see `gpu_ops.layouts.entries`).

        Args:
            hashes: uint64.
            first: the slot from which on they are in a row.
            rows: which of the hashes to take; None for all.
            given: further ones in front of these, by which of the hashes they have, and their slots.
        """

    def store(self, schema: pa.Schema) -> Store:
        """An empty store for rows of this schema."""

    def directory(self, entries: Array, shift: int, others: Array | None = None) -> Array:
        """Finds the first of ascending entries with each hash prefix (int32), and at the end their number.

        Args:
            entries: n uint64.
            shift: the upper half of a hash shifted by it is its prefix.
            others: the same of other entries, which are counted with these.
        """

    def merge(self, buffer: Array, size: int, added: Array) -> Array:
        """Two ascending arrays of entries (uint64) as one.

        Args:
            buffer: an array that begins with the one, or what this method gave; the rest is room.
            size: how many entries that are; nothing is left of them.
            added: the other one.

        Returns:
            A buffer that begins with all entries, which may be the same one.
        """

    def beginning(self, buffer: Array, size: int) -> Array:
        """The first entries in what is an array, or what `merge` gave."""

    def search(
        self,
        runs: Sequence[SearchedRun],
        probe_rows: Array,
        times: tuple[Array, Array] | None = None,
        *,
        by_candidate: bool = False,
        at_most: int | None = None,
    ) -> Array:
        """Candidates of sorted runs for each probe row: entries with the same upper half of a hash.

        Args:
            runs: in this backend's memory.
            probe_rows: n entries (uint64) in any order; quickest ascending.
            times: of runs with times, n earliest and n latest times (int64, inclusive), one per probe row: only entries
                within them are candidates.
            by_candidate: give the candidate's slot first.
            at_most: how many there may be.

        Returns:
            Pairs (int64, see `gpu_ops.layouts.pairs`) of the probe row's and the candidate's slot, in any order.

        Raises:
            TooMany: there are more than there may be; they have not been written out.
        """

    def bisect(self, run: SearchedRun, probe_rows: Array, times: Array, *, after: bool) -> Array:
        """Finds the place of each probe row in a sorted run with times.

        Args:
            run: in this backend's memory.
            probe_rows: n entries (uint64) in any order.
            times: n int64, one per probe row.
            after: behind the entries of just this hash and time, not in front of them.

        Returns:
            N positions (int64), from 0 to the run's size: before each stand the entries of a lower hash (its upper
            half), or of this one and an earlier time.
        """

    def nearest(
        self,
        runs: Sequence[SearchedRun],
        types: Sequence[pa.DataType],
        columns: tuple[Columns, Columns],
        hashes: Hashes,
        *,
        among: Among,
        limits: TimeLimits,
        newer: Array | None = None,
    ) -> Slots | None:
        """The nearest row in time of each probe row's key, as `gpu_ops.operators.core.nearest.Nearest.search` has it.

        Args:
            runs: in this backend's memory, with times, in the order in which they are looked into.
            types: what keys are compared as; none where there is no key.
            columns: the key columns of n probe rows, and of the rows that are looked for.
            hashes: n hashes of keys.
            among: the rows that count.
            limits: the times that are wanted.
            newer: what orders rows of one time (int64 by slot), the greatest is taken; None for arrival.

        Returns:
            n slots, -1 for none; None where the backend has no way of its own, or it does not pay.
        """

    def bisect_ranges(
        self,
        columns: Sequence[Array],
        ranges: tuple[Positions, Positions],
        wanted: Sequence[Array],
        *,
        after: bool = False,
    ) -> Positions:
        """The first position of each of n ranges whose numbers are not less than what is wanted.

        Args:
            columns: one to three arrays (int64), ascending within each range, the first above all.
            ranges: where they begin and end.
            wanted: of each column n numbers.
            after: the first whose numbers are greater.
        """

    def least(self, begins: Positions, ends: Positions, ranks: Array, *, size: int, n: int) -> Array | None:
        """The n least ranks at each moment, as `gpu_ops.operators.core.order.least` has them.

        Returns:
            None where the backend has no way of its own, or it does not pay.
        """

    def lives(self, born: Array, died: Array) -> tuple[Array, Array]:
        """Makes trees for `last_there` of the states from and up to which n rows are there, one at least.

        Returns:
            The rows' own states in the second half of 2**k numbers, followed by those of rows that never are there, and
            before each two of a level the least first state and the greatest last one of both.
        """

    def last_there(
        self, lives: tuple[Array, Array], ranges: tuple[Positions, Positions], spans: tuple[Array, Array]
    ) -> Positions:
        """The last row of each of n ranges that is there at a state of a span; -1 for none.

        Args:
            lives: of rows, as `lives` makes them.
            ranges: rows where they begin and end.
            spans: first states of n spans, and the states after their last ones.
        """

    def join(self, left: Array, right: Array, *, at_most: int | None = None) -> Array:
        """Pairs of entries with the same upper half of a hash, of rows that are looked up once.

        Args:
            left: n entries (uint64) in any order.
            right: m.
            at_most: how many pairs there may be.

        Returns:
            Pairs (int64, see `gpu_ops.layouts.pairs`) of left and right slots, in any order.

        Raises:
            TooMany: there are more than there may be; they have not been written out.
        """

    def close(self) -> None:
        """Give back what the backend holds."""


def distinct(kernels: Kernels, values: Array) -> Array:
    """The different ones of n int64 or uint64, ascending; as of `Kernels.sort`, what was given may be sorted itself.

    numpy's ``unique`` hashes integers, which takes ten times as long.
    """
    ascending = kernels.sort(values)
    return kernels.xp.compress(value_changes(kernels.xp, ascending), ascending)


def sorted_by(kernels: Kernels, *keys: Array) -> Positions:
    """Positions of what several numbers stand beside, sorted by all of these, the first above all; a stable sort."""
    order = kernels.argsort(keys[-1])
    for key in keys[-2::-1]:
        order = order[kernels.argsort(key[order])]
    return order


def looked_at(kernels: Kernels, numbers: Sequence[Array]) -> list[int]:
    """Arrays of no dimensions and of one type as numbers, in one look: of a GPU each is a wait."""
    if kernels.host is None or len(numbers) < 2:
        return [int(number) for number in numbers]
    found: list[int] = kernels.asnumpy(kernels.xp.stack(numbers)).tolist()
    return found


def as_slots(kernels: Kernels, start: int, length: int) -> Slots:
    """``length`` slots from ``start``."""
    return kernels.xp.arange(start, start + length, dtype=np.int64)
