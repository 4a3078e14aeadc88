"""Groups and order of rows that are all there, by Arrow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


def aggregate(table: pa.Table, by: Sequence[str], calls: Sequence[tuple[Any, str]]) -> pa.Table:
    """As `gpu_ops.kernels.Kernels.aggregate`."""
    return pa.TableGroupBy(table, list(by), use_threads=False).aggregate(list(calls))


def sorted_order(keys: pa.Table) -> pa.Array:
    """As `gpu_ops.kernels.Kernels.sorted_order`."""
    first = keys.column(0)
    if keys.num_columns == 1 and pa.types.is_integer(first.type) and not first.null_count:
        # numpy sorts integers several times as fast as Arrow, but equal ones stay in order only by its slow way
        values = first.to_numpy()
        order = np.argsort(values)
        found = values[order]
        if not bool((found[1:] == found[:-1]).any()):
            return pa.array(order)
    return pc.sort_indices(keys, sort_keys=[(c, "ascending") for c in keys.column_names])
