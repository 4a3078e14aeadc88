"""From output rows (kinds and slots) to the changelog in Arrow."""

from __future__ import annotations

import pyarrow as pa

from gpu_ops.changelog import encode_row_kinds
from gpu_ops.joins import Join
from gpu_ops.kernels import Frame, Kernels
from gpu_ops.operators.emission import Rows
from gpu_ops.state.table import StateTable


def changelog_table(
    join: Join, kernels: Kernels, tables: tuple[StateTable, StateTable], rows: Rows
) -> tuple[pa.Table, Frame]:
    """Gather the rows' columns, one gather per column.

    Returns:
        The changelog, and the frame of its columns without the row kind.
    """
    needed: tuple[dict[str, None], dict[str, None]] = ({}, {})
    for column in join.output:
        if column.side == 2:
            assert column.other is not None
            needed[0][column.column] = needed[1][column.other] = None
        else:
            needed[column.side][column.column] = None
    slots = rows.left, rows.right
    frames = [tables[s].store.take(slots[s], list(needed[s])) if needed[s] else None for s in (0, 1)]
    parts = []
    for column in join.output:
        if column.side == 2:
            assert column.other is not None
            both = kernels.coalesce(frames[0], column.column, frames[1], column.other)
            parts.append((column.name, both, column.column))
        else:
            parts.append((column.name, frames[column.side], column.column))
    frame = kernels.combine(parts)
    schema = join.output_schema
    data = kernels.to_arrow(frame, pa.schema(list(schema)[1:]))
    kinds = encode_row_kinds(kernels.asnumpy(rows.kinds))
    return pa.Table.from_arrays([kinds, *data.columns], schema=schema), frame
