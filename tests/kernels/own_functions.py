"""Aggregate functions as a user writes them, for tests; state servers import them, too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from gpu_ops import AggregateFunction


class Bits(AggregateFunction):
    """OR of 8 bits of integers; null where there is none. The state counts rows by bit, so that they can go again."""

    state = pa.schema([("counts", pa.list_(pa.int32(), 9))])
    result_type = pa.int64()

    def _moved(self, state: pa.Table, groups: pa.Array, values: pa.Table, by: int) -> pa.Table:
        counts = _matrix(state)
        known = values[0].is_valid().to_numpy(zero_copy_only=False)
        numbers = values[0].fill_null(0).to_numpy()
        places = groups.to_numpy()
        for bit in range(8):
            np.add.at(counts[:, bit], places, by * ((numbers >> bit) & 1))
        np.add.at(counts[:, 8], places, by * known)
        assert counts.min(initial=0) >= 0
        return pa.table({"counts": pa.FixedSizeListArray.from_arrays(pa.array(counts.reshape(-1)), 9)})

    def add(self, state: pa.Table, groups: pa.Array, values: pa.Table) -> pa.Table:
        return self._moved(state, groups, values, 1)

    def retract(self, state: pa.Table, groups: pa.Array, values: pa.Table) -> pa.Table:
        return self._moved(state, groups, values, -1)

    def result(self, state: pa.Table) -> pa.Array:
        counts = _matrix(state)
        found = ((counts[:, :8] > 0) * (1 << np.arange(8))).sum(axis=1)
        return pa.array(found, pa.int64(), mask=counts[:, 8] == 0)


def _matrix(state: pa.Table) -> np.ndarray[Any, np.dtype[np.int32]]:
    values = state["counts"].combine_chunks()
    if isinstance(values, pa.ChunkedArray):
        values = values.chunk(0) if values.num_chunks else pa.array([], state.schema.field(0).type)
    rows = np.zeros((len(values), 9), np.int32)
    known = values.is_valid().to_numpy(zero_copy_only=False)
    rows[known] = values.drop_null().flatten().to_numpy().reshape(-1, 9)
    return rows


class WeightedMean(AggregateFunction):
    """Of a value by a weight, both integers, times ``scale``; grows only."""

    state = pa.schema([("worth", pa.int64()), ("weight", pa.int64())])
    result_type = pa.float64()

    def empty(self, groups: int) -> pa.Table:
        return pa.table([pa.array(np.zeros(groups, np.int64))] * 2, schema=self.state)

    def add(self, state: pa.Table, groups: pa.Array, values: pa.Table) -> pa.Table:
        found = []
        value, weight = (column.fill_null(0).to_numpy() for column in values.columns)
        for column, more in zip(state.columns, (value * weight, weight), strict=True):
            sums = column.to_numpy().copy()
            np.add.at(sums, groups.to_numpy(), more)
            found.append(pa.array(sums))
        return pa.table(found, schema=self.state)

    def result(self, state: pa.Table) -> pa.Array:
        worth, weight = (column.to_numpy() for column in state.columns)
        scale = self.parameters.get("scale", 1)
        return pa.array(scale * worth / np.where(weight == 0, 1, weight), mask=weight == 0)


class Wrong(Bits):
    """Goes wrong in a method that it is told."""

    def add(self, state: pa.Table, groups: pa.Array, values: pa.Table) -> pa.Table:
        how = self.parameters["how"]
        if how == "fails":
            raise ValueError("no such luck")
        found = super().add(state, groups, values)
        return {"short": found.slice(1), "none": None, "other": found.rename_columns(["x"])}[how]


class Strict(Bits):
    """Takes one column and nothing else."""

    def __init__(self, column: str) -> None:
        super().__init__(column)
