"""From output rows (kinds and slots) to the changelog in Arrow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpu_ops.arrays import Array, Slots
from gpu_ops.descriptions.changelog import encode_row_kinds
from gpu_ops.descriptions.description import Description
from gpu_ops.descriptions.intervals import as_integers, from_integers, too_far
from gpu_ops.descriptions.join import Join
from gpu_ops.descriptions.multi_join import MultiJoin
from gpu_ops.kernels import Frame, Kernels, Store
from gpu_ops.operators.core.emission import Rows


class HasStore(Protocol):
    """A state table, as far as rows are gathered from it."""

    @property
    def store(self) -> Store:
        """Its rows."""


def changelog_table(
    join: Join,
    kernels: Kernels,
    tables: tuple[HasStore, HasStore],
    rows: Rows,
    times: tuple[Array, Array] | None = None,
) -> tuple[pa.Table, Frame]:
    """Gather the rows' columns, one gather per column.

    Args:
        join: its description.
        kernels: the backend.
        tables: left and right state.
        rows: what is said.
        times: left and right event times by slot, for an interval join.

    Returns:
        The changelog, and the frame of its columns without the row kind.
    """
    needed: tuple[dict[str, None], dict[str, None]] = ({}, {})
    gathered = [c for c in join.output if c.side != 3]
    for column in gathered:
        if column.side == 2:
            assert column.other is not None
            needed[0][column.column] = needed[1][column.other] = None
        else:
            needed[column.side][column.column] = None
    slots = rows.left, rows.right
    frames = [tables[s].store.take(slots[s], list(needed[s])) if needed[s] else None for s in (0, 1)]
    parts = []
    for column in gathered:
        if column.side == 2:
            assert column.other is not None
            both = kernels.coalesce(frames[0], column.column, frames[1], column.other)
            parts.append((column.name, both, column.column))
        else:
            parts.append((column.name, frames[column.side], column.column))
    frame = kernels.combine(parts)
    schema = join.output_schema
    data = kernels.to_arrow(frame, pa.schema(list(schema)[1 : 1 + len(gathered)])).columns
    if len(gathered) < len(join.output):
        assert times is not None
        later = kernels.asnumpy(_later(kernels.xp, slots, times))
        data = [*data, from_integers(later, join.output[-1].type)]
    kinds = encode_row_kinds(kernels.asnumpy(rows.kinds))
    return pa.Table.from_arrays([kinds, *data], schema=schema), frame


def _later(xp: Any, slots: tuple[Array, Array], times: tuple[Array, Array]) -> Array:
    """The later time of each row's two parts, of those that are there."""
    never = np.iinfo(np.int64).min
    found = []
    for slot, time in zip(slots, times, strict=True):
        known = time[xp.maximum(slot, 0)] if time.size else xp.zeros(slot.size, np.int64)
        found.append(xp.where(slot >= 0, known, never))
    return xp.maximum(*found)


def multi_changelog_table(
    join: MultiJoin, kernels: Kernels, tables: Sequence[HasStore], kinds: Array, slots: Sequence[Slots]
) -> tuple[pa.Table, Frame]:
    """As `changelog_table`, of a multi-way join.

    Args:
        join: its description.
        kernels: the backend.
        tables: one per input.
        kinds: n row kinds.
        slots: per input n slots, -1 for a row of nulls.
    """
    frames: list[Frame] = []
    for place, table in enumerate(tables):
        needed = list(dict.fromkeys(c.column for c in join.output if c.side == place))
        frames.append(table.store.take(slots[place], needed) if needed else None)
    frame = kernels.combine([(c.name, frames[c.side], c.column) for c in join.output])
    data = kernels.to_arrow(frame, pa.schema(list(join.output_schema)[1:])).columns
    return pa.Table.from_arrays([encode_row_kinds(kernels.asnumpy(kinds)), *data], schema=join.output_schema), frame


def append_rows(join: Description, side: int, output: pa.Table, rows: pa.Table | None, kind: str) -> pa.Table:
    """The changelog with rows of one input handed out after it, the other side's columns null.

    Args:
        join: its description.
        side: whose rows they are.
        output: the changelog.
        rows: of the input's schema, or None.
        kind: their row kind, ``bad`` or ``late``.
    """
    if rows is None or rows.num_rows == 0:
        return output
    columns = [pa.array([kind] * rows.num_rows, pa.string())]
    for column in join.output:
        name = join.own_column(side, column)
        if name is None:
            columns.append(pa.nulls(rows.num_rows, column.type))
        elif rows[name].type == column.type:
            columns.append(rows[name])
        elif pa.types.is_timestamp(column.type):
            columns.append(_times(rows[name], column.type))
        else:
            columns.append(rows[name].cast(column.type))
    return pa.concat_tables([output, pa.Table.from_arrays(columns, schema=output.schema)])


def _times(column: pa.ChunkedArray, kind: pa.DataType) -> pa.Array:
    """Event times or timestamps in a finer unit; null where that does not reach, as a bad row may be bad for that."""
    known, far = column.is_valid().to_numpy(), too_far(column, kind)
    if far is not None:
        known &= ~far
    there = pa.array(known)
    values = pc.if_else(there, column, pa.scalar(0, pa.int64()).cast(column.type))
    return pc.if_else(there, from_integers(as_integers(values, kind), kind), pa.scalar(None, kind))
