"""Applies a filter and projection to rows in Arrow."""

from __future__ import annotations

import pyarrow as pa

from gpu_ops.conditions.expressions import ColumnRef
from gpu_ops.descriptions.projection import ROWS, Projection, columns_in
from gpu_ops.values import typed


def project(projection: Projection, batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Filters and projects a batch.

    Args:
        projection: what is taken of the rows.
        batch: n rows.
        schema: of the result, which has as many columns as the projection.

    Raises:
        EvaluationError: an expression fails for a row, in ANSI mode.
    """
    if projection.where or projection.computed:  # else without an import of pandas, which takes an executor a while
        from cpu_fallback.conditions import values  # noqa: PLC0415
    for number, test in enumerate(projection.where):
        (true,) = values([test], {ROWS: batch}, batch.num_rows)
        later = dict.fromkeys((*columns_in(projection.columns), *columns_in(projection.where[number + 1 :])))
        batch = batch.select(list(later)).filter(true, null_selection_behavior="drop")
    computed = projection.computed
    arrays = iter(values(computed, {ROWS: batch}, batch.num_rows) if computed else ())
    columns = [batch.column(x.root.name) if isinstance(x.root, ColumnRef) else next(arrays) for x in projection.columns]
    return typed(columns, schema)
