"""Groups and order of rows that are all there, by libcudf, where it says exactly what the CPU does.

Sums of floats stay on the CPU: the card adds them up in whatever order, so their last bits would differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cupy as cp
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pylibcudf as plc

from gpu_ops.cudf_backend.frame import Frame, from_values, to_arrow, values


def _is_number(kind: pa.DataType) -> bool:
    t = pa.types
    return bool(
        t.is_integer(kind) or t.is_date32(kind) or t.is_timestamp(kind) or t.is_float32(kind) or t.is_float64(kind)
    )


def _is_key(kind: pa.DataType) -> bool:
    t = pa.types
    text = t.is_string(kind) or t.is_large_string(kind)
    return bool(_is_number(kind) or text or t.is_boolean(kind) or t.is_decimal128(kind))


def countable(table: pa.Table, by: Sequence[str], calls: Sequence[tuple[Any, str]]) -> bool:
    """Whether `aggregate` gives what the CPU does."""
    if not table.num_rows or not by or not all(_is_key(table.schema.field(name).type) for name in by):
        return False
    allowed = {"count": _is_key, "sum": pa.types.is_signed_integer, "min": _is_number, "max": _is_number}
    kinds = [(table.schema.field(column).type, function) for column, function in calls if function != "count_all"]
    return all(function in allowed and allowed[function](kind) for kind, function in kinds)


def aggregate(
    frame: Frame, by: Sequence[str], calls: Sequence[tuple[Any, str]]
) -> tuple[npt.NDArray[np.int32], dict[str, pa.Array]]:
    """Groups in the order of their first rows.

    Args:
        frame: n rows, one at least.
        by: columns whose values make a group.
        calls: a column and a function each, `countable` ones.

    Returns:
        The position of each group's first row, and what each call gave, named ``column_function``.
    """
    policy, kinds, request = plc.types.NullPolicy, plc.aggregation, plc.groupby.GroupByRequest
    places = from_values(cp.arange(frame.length, dtype=np.int32))
    requests, types = [request(places, [kinds.min()])], {}
    for column, function in calls:
        if function == "count_all":
            types[function] = pa.int32()
            requests.append(request(places, [kinds.count(policy.INCLUDE)]))
            continue
        made = {"sum": kinds.sum, "min": kinds.min, "max": kinds.max}
        wanted = kinds.count(policy.EXCLUDE) if function == "count" else made[function]()
        given = {"count": pa.int32(), "sum": pa.int64()}
        types[f"{column}_{function}"] = given.get(function, frame.types.get(column))
        requests.append(request(frame.columns[column], [wanted]))
    keys = plc.Table([frame.columns[name] for name in by])
    first, *found = plc.groupby.GroupBy(keys, policy.INCLUDE).aggregate(requests)[1]
    begins = cp.asnumpy(values(first.columns()[0], np.int32))
    order = np.argsort(begins)
    said = {}
    for (name, kind), result in zip(types.items(), found, strict=True):
        rows = to_arrow(result.columns()[0], kind).take(pa.array(order))
        said[name] = (
            rows.cast(pa.int64()) if name.endswith(("_count", "count_all")) else rows
        )  # libcudf counts in int32
    return begins[order], said


def sortable(keys: pa.Table) -> bool:
    """Whether `sorted_order` gives what the CPU does."""
    return bool(keys.num_rows and all(_is_key(kind) for kind in keys.schema.types))


def sorted_order(frame: Frame) -> npt.NDArray[np.int32]:
    """Positions of rows in ascending order, column by column, NaN behind numbers and nulls last; a stable sort."""
    columns = list(frame.columns.values())
    order = [plc.types.Order.ASCENDING] * len(columns)
    nulls = [plc.types.NullOrder.AFTER] * len(columns)
    found = plc.sorting.stable_sorted_order(plc.Table(columns), order, nulls)
    host: npt.NDArray[np.int32] = cp.asnumpy(values(found, np.int32))
    return host
