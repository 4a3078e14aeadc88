"""From output rows (kinds and slots) to the changelog, in Arrow or as a frame of the backend."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gpu_ops.arrays import Array, Slots
from gpu_ops.descriptions.changelog import (
    INSERT,
    KIND_BYTES,
    ROW_KIND_COLUMN,
    SHORT_STRINGS,
    WORDS,
    encode_row_kinds,
)
from gpu_ops.descriptions.description import EITHER, Description
from gpu_ops.descriptions.times import as_integers, from_integers, too_far
from gpu_ops.errors import StateError
from gpu_ops.kernels import Frame, Kernels, Store
from gpu_ops.values import equal_codes, one_array, with_types

_log = logging.getLogger("gpu_ops")

FOLD_ROWS: Final = 1 << 16
"""Changes that wait, at least, before a `Fold` adds them up."""

Changelog: TypeAlias = Any
"""Rows of a join's ``output_schema``: an Arrow table; where the backend ``gives_frames`` also one of its frames."""


class Beside(NamedTuple):
    """Rows of one input that come out behind the changelog, as they came in.

    Attributes:
        side: the number of the input.
        rows: of the input's schema.
        kind: their row kind, ``bad`` or ``late``.
    """

    side: int
    rows: pa.Table
    kind: str


@dataclasses.dataclass(frozen=True)
class Output:
    """The rows that an operator emits in one micro-batch, with its metrics.

    Attributes:
        values: n rows of the changelog, without their row kinds: a frame, an Arrow table of the schema's types, or
            the rows that they are made of.
        kinds: their row-kind codes.
        sequence: for each of them, and then for each row beside them, the sequence of the change that caused it; -1
            for what a watermark ended.
        metrics: counts, milliseconds and times, by name.
        later: of an interval join with a timestamp column, which the values then lack: n times.
        beside: rows that come out behind the changelog.
    """

    values: Frame | pa.Table | SlotRows
    kinds: npt.NDArray[np.int8]
    sequence: npt.NDArray[np.int64]
    metrics: dict[str, int | float]
    later: Array | None = None
    beside: tuple[Beside, ...] = ()


def no_output(description: Description, metrics: dict[str, int | float]) -> Output:
    """The output of a micro-batch without any rows."""
    return Output(description.values_schema.empty_table(), np.empty(0, np.int8), np.empty(0, np.int64), metrics)


def changelog(description: Description, kernels: Kernels, output: Output) -> Changelog:
    """The changelog of a micro-batch, and the rows beside it."""
    made = changelog_table(description, kernels, output.values, output.kinds, output.later)
    beside = [_shown_beside(description, kernels, rows) for rows in output.beside if rows.rows.num_rows]
    return together(description.output_schema, kernels, [made, *beside]) if beside else made


class HasStore(Protocol):
    """A state table, as far as rows are gathered from it."""

    @property
    def store(self) -> Store:
        """The store of its rows."""


def gathered(
    description: Description,
    kernels: Kernels,
    tables: Sequence[HasStore],
    slots: Sequence[Slots],
    null_sides: Sequence[bool] | None = None,
    *,
    names: Collection[str] | None = None,
    missing: Sequence[int] | None = None,
) -> Frame:
    """The values of n rows of the changelog, one gather per column; that of later times is left out.

    Args:
        description: its description.
        kernels: the backend.
        tables: of each input.
        slots: per input n slots, -1 for a row of nulls.
        null_sides: per input, whether there are such; None for all.
        names: the columns to gather; None for all.
        missing: per input how many rows of nulls there are, where that is known.
    """
    columns = [c for c in description.output if c.other is None or c.side == EITHER]
    columns = [c for c in columns if names is None or c.name in names]
    needed: list[dict[str, None]] = [{} for _ in tables]
    for column in columns:
        needed[0 if column.other else column.side][column.column] = None
        if column.other is not None:
            needed[1][column.other] = None
    may = null_sides or [True] * len(tables)
    parts_of = zip(tables, slots, needed, may, missing or (None,) * len(tables), strict=True)
    frames = [
        table.store.take(own, list(names_of), present=not null_side, nulls=nulls) if names_of else None
        for table, own, names_of, null_side, nulls in parts_of
    ]
    parts = []
    for column in columns:
        if column.other is None:
            parts.append((column.name, frames[column.side], column.column))
        else:
            either = kernels.coalesce(frames[0], column.column, frames[1], column.other)
            parts.append((column.name, either, column.column))
    return kernels.combine(parts)


@dataclasses.dataclass(frozen=True)
class SlotRows:
    """Rows of a changelog as the rows of inputs that they are made of: a column is gathered once it is asked for.

    What the next operator filters out, or does not look at, is never copied (Abadi et al., Materialization Strategies
    in a Column-Oriented DBMS, ICDE 2007). They are there until the micro-batch is final or discarded.

    Attributes:
        description: of the changelog.
        kernels: the backend.
        tables: of each input.
        slots: per input n slots, -1 for a row of nulls.
        null_sides: per input, whether there are such; None for all.
        shown: by their names here, the changelog's columns that they have; None for all.
    """

    description: Description
    kernels: Kernels
    tables: Sequence[HasStore]
    slots: tuple[Slots, ...]
    null_sides: Sequence[bool] | None
    shown: Mapping[str, str] | None = None

    def __len__(self) -> int:
        return int(self.slots[0].size)

    def take(self, order: npt.NDArray[np.int64]) -> SlotRows:
        """The rows at n positions."""
        places = self.kernels.asarray(order)
        return dataclasses.replace(self, slots=tuple(slots[places] for slots in self.slots))

    def called(self, shown: Mapping[str, str], schema: pa.Schema) -> SlotRows:
        """Renames the columns, given by their new names, and leaves out the others; types stay as they are."""
        del schema
        return dataclasses.replace(self, shown={new: self._own(name) for new, name in shown.items()})

    def columns(self, names: Iterable[str]) -> Frame:
        """Gathers some columns in the backend's form."""
        schema = self._schema(names)
        found, frames = self._gathered(schema.names), self.kernels.dataframes
        if frames is None:
            return self.kernels.frame(self.kernels.to_arrow(found, schema))
        return frames.as_rows(found, schema).frame

    @property
    def frame(self) -> Frame:
        """All columns in the backend's form."""
        return self.columns(self._names)

    def table(self) -> pa.Table:
        """All columns in Arrow."""
        schema = self._schema(self._names)
        return self.kernels.to_arrow(self._gathered(schema.names), schema)

    def column(self, name: str) -> pa.ChunkedArray:
        """One column in Arrow."""
        schema = self._schema([name])
        return self.kernels.to_arrow(self._gathered([name]), schema)[0]

    @property
    def _names(self) -> Collection[str]:
        return self.description.values_schema.names if self.shown is None else self.shown

    def _own(self, name: str) -> str:
        return name if self.shown is None else self.shown[name]

    def _schema(self, names: Iterable[str]) -> pa.Schema:
        own = self.description.values_schema
        return pa.schema([own.field(self._own(name)).with_name(name) for name in names])

    def _gathered(self, names: Sequence[str]) -> Frame:
        own = [self._own(name) for name in names]
        rows = gathered(self.description, self.kernels, self.tables, self.slots, self.null_sides, names=own)
        return self.kernels.combine([(name, rows, of) for name, of in zip(names, own, strict=True)])


def changelog_table(
    description: Description,
    kernels: Kernels,
    values: Frame | pa.Table | SlotRows,
    kinds: npt.NDArray[np.int8],
    later: Array | None = None,
) -> Changelog:
    """The changelog; arguments as the fields of `Output`.

    Args:
        description: its description.
        kernels: the backend.
        values: of n rows.
        kinds: their n row kinds.
        later: for an interval join with a timestamp column, the later time of each row's two parts.
    """
    if isinstance(values, SlotRows):
        values = values.frame if kernels.gives_frames else values.table()
    if kernels.gives_frames and not isinstance(values, pa.Table):
        return _framed(description, kernels, values, kinds, later)
    data = values_table(description, kernels, values, later)
    kind_column = pa.array(kinds.view(np.uint8)) if kernels.gives_bytes else encode_row_kinds(kinds)
    return pa.Table.from_arrays([kind_column, *data.columns], schema=_schema_in_arrow(description, kernels))


def _schema_in_arrow(description: Description, kernels: Kernels) -> pa.Schema:
    """The schema of a changelog in Arrow."""
    schema = description.output_schema
    return schema.set(0, schema.field(0).with_type(KIND_BYTES)) if kernels.gives_bytes else schema


def values_table(
    description: Description, kernels: Kernels, values: Frame | pa.Table | SlotRows, later: Array | None = None
) -> pa.Table:
    """The values of n rows in Arrow; arguments as the fields of `Output`."""
    schema = description.values_schema
    if isinstance(values, pa.Table):
        return values
    if isinstance(values, SlotRows):
        return values.table()
    if later is None:
        return kernels.to_arrow(values, schema)
    last = len(schema) - 1
    times = from_integers(kernels.asnumpy(later), schema.field(last).type)
    return kernels.to_arrow(values, schema.remove(last)).append_column(schema.field(last), times)


def _framed(
    description: Description, kernels: Kernels, frame: Frame, kinds: npt.NDArray[np.int8], later: Array | None
) -> Frame:
    """The changelog as a frame: a row kind's text is one of four rows."""
    texts = kernels.frame(pa.table({ROW_KIND_COLUMN: pa.array(SHORT_STRINGS, pa.string())}))
    kind_column = kernels.take(texts, kernels.asarray(kinds).astype(np.int64), [ROW_KIND_COLUMN], present=True)
    parts = [(ROW_KIND_COLUMN, kind_column, ROW_KIND_COLUMN)]
    own = description.output if later is None else description.output[:-1]
    parts += [(column.name, frame, column.name) for column in own]
    if later is not None:
        assert kernels.dataframes is not None
        last = description.output[-1]
        parts.append((last.name, kernels.dataframes.numbers(last.name, later, last.type), last.name))
    return kernels.combine(parts)


def together(schema: pa.Schema, kernels: Kernels, parts: Sequence[Changelog]) -> Changelog:
    """Parts of a changelog, all of one schema, as one."""
    if not kernels.gives_frames:
        return pa.concat_tables(parts)
    assert kernels.dataframes is not None
    return parts[0] if len(parts) == 1 else kernels.dataframes.together(parts, schema)


def later_times(xp: Any, slots: Sequence[Slots], times: Sequence[Array]) -> Array:
    """The later time of each row's two parts, of those that are there.

    Args:
        xp: numpy or cupy.
        slots: left and right slots of n rows, -1 for none.
        times: left and right times by slot.
    """
    never = np.iinfo(np.int64).min
    found = []
    for slot, time in zip(slots, times, strict=True):
        known = time[xp.maximum(slot, 0)] if time.size else xp.zeros(slot.size, np.int64)
        found.append(xp.where(slot >= 0, known, never))
    return xp.maximum(*found)


def _shown_beside(description: Description, kernels: Kernels, beside: Beside) -> pa.Table:
    """Rows that come out behind the changelog, in its columns; those of the other inputs are null."""
    side, rows, kind = beside
    own: object = WORDS.index(kind) if kernels.gives_bytes else kind
    columns = [pa.repeat(pa.scalar(own, KIND_BYTES if kernels.gives_bytes else pa.string()), rows.num_rows)]
    for column in description.output:
        name = description.own_column(side, column)
        if name is None:
            columns.append(pa.nulls(rows.num_rows, column.type))
        elif rows[name].type == column.type:
            columns.append(rows[name])
        elif pa.types.is_timestamp(column.type):
            columns.append(_times(rows[name], column.type))
        else:
            columns.append(rows[name].cast(column.type))
    return pa.Table.from_arrays(columns, schema=_schema_in_arrow(description, kernels))


def _times(column: pa.ChunkedArray, kind: pa.DataType) -> pa.Array:
    """Event times or timestamps in a finer unit; null where that does not reach, as a bad row may be bad for that."""
    known, far = column.is_valid().to_numpy(), too_far(column, kind)
    if far is not None:
        known &= ~far
    there = pa.array(known)
    values = pc.if_else(there, column, pa.scalar(0, pa.int64()).cast(column.type))
    return pc.if_else(there, from_integers(as_integers(values, kind), kind), pa.scalar(None, kind))


class Fold:
    """The folded changelogs of an engine: the rows of its last committed state.

    Args:
        schema: of the changelogs.

    Attributes:
        known: whether that is known: not after a restore from a snapshot that did not have it.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._parts = [schema.empty_table()]
        self._prepared: list[pa.Table] = []
        self._fold_at = FOLD_ROWS
        self.known = True

    def prepare(self, changelog: pa.Table) -> None:
        """Take in a changelog, for `commit`."""
        self._prepared.append(with_types(changelog, self._schema))

    def discard(self) -> None:
        """Forget what was prepared."""
        self._prepared = []

    def commit(self) -> None:
        """Make what was prepared part of the rows."""
        self._parts += [part for part in self._prepared if part.num_rows and self.known]
        self._prepared = []

    def settle(self) -> None:
        """Add up what waits, if that is much, so that memory goes by the rows; where that fails it waits for longer."""
        waiting = sum(part.num_rows for part in self._parts[1:])
        if waiting <= max(self._fold_at, self._parts[0].num_rows):
            return
        try:
            self._add_up()
            self._fold_at = FOLD_ROWS
        except Exception as error:
            self._fold_at = 2 * waiting
            _log.warning("what changelogs add up to waits, as adding up %d changes failed: %s", waiting, error)

    def _add_up(self) -> None:
        if self.known and len(self._parts) > 1:
            self._parts = [folded(self._parts)]

    def rows(self) -> pa.Table:
        """The rows, without row kinds.

        Raises:
            StateError: they are not known.
        """
        if not self.known:
            raise StateError(
                "the table is not known: the snapshot that this engine was restored from does not have it. Restore one "
                "that snapshot() of an engine of gpu_ops.engine() gave, or add up the changelogs from here on"
            )
        self._add_up()
        return self._parts[0].drop_columns([ROW_KIND_COLUMN])

    def restored(self, rows: pa.Table | None) -> Fold:
        """Another one, of rows as `rows` gives them, or None where they are not known.

        Raises:
            StateError: they are of another engine.
        """
        made = Fold(self._schema)
        made.known = rows is not None
        if rows is not None:
            kinds = encode_row_kinds(np.full(rows.num_rows, INSERT, np.int8))
            table = rows.add_column(0, self._schema.field(0), kinds)
            if table.column_names != self._schema.names:
                raise StateError(f"the snapshot has the table of another engine, of {', '.join(rows.column_names)}")
            made._parts = [with_types(table, self._schema)]
        return made


def folded(parts: Sequence[pa.Table]) -> pa.Table:
    """Folds changelogs, one after the other: the rows that are there, as insertions, in the order they came.

    Rows are the same as operators have it: null is null, NaN is NaN, and -0.0 is 0.0.
    """
    changes = pa.concat_tables(parts)
    columns = [one_array(column) for column in changes.columns]
    kinds, rows = columns[0], columns[1:]
    added, taken = (pc.is_in(kinds, pa.array(those)).to_numpy(False) for those in (["+I", "+U"], ["-U", "-D"]))
    codes = equal_codes(pa.StructArray.from_arrays(rows, names=[str(number) for number in range(len(rows))]))
    live = np.bincount(codes, added.astype(np.int64) - taken.astype(np.int64)).astype(np.int64)
    # of equal rows the first ones
    places = np.flatnonzero(added)
    places = places[np.argsort(codes[places], kind="stable")]
    group = codes[places]
    turn = np.arange(places.size) - np.searchsorted(group, group)
    there = np.zeros(codes.size, bool)
    there[places[turn < live[group]]] = True
    places = np.flatnonzero(there)
    kind = encode_row_kinds(np.full(places.size, INSERT, np.int8))
    return pa.Table.from_arrays([kind, *(column.take(pa.array(places)) for column in rows)], schema=changes.schema)
