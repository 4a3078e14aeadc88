"""Applies a filter and projection to rows, in Arrow or in the backend's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pyarrow as pa

from gpu_ops.conditions.expressions import ColumnRef
from gpu_ops.descriptions.projection import ROWS, Projection, columns_in
from gpu_ops.kernels import Frame, Kernels
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


def project_frame(kernels: Kernels, projection: Projection, frame: Frame, names: Sequence[str]) -> Frame:
    """Filters and projects a frame; see `Projection.needs_host`.

    Args:
        kernels: the backend.
        projection: what is taken of the rows.
        frame: n rows.
        names: of the result's columns.

    Raises:
        EvaluationError: a filter fails for a row, in ANSI mode.
    """
    for number, test in enumerate(projection.where):
        true = kernels.evaluate(test, {ROWS: frame}, kernels.num_rows(frame))
        later = dict.fromkeys((*columns_in(projection.columns), *columns_in(projection.where[number + 1 :])))
        frame = kernels.take(frame, kernels.xp.flatnonzero(true), list(later), present=True)
    columns = [cast("ColumnRef", column.root).name for column in projection.columns]
    return kernels.combine([(name, frame, of) for name, of in zip(names, columns, strict=True)])
