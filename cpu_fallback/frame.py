"""Row-aligned named Arrow columns."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gpu_ops.arrays import Array


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """Columns of equal length; there may be none."""

    length: int
    columns: dict[str, pa.Array]

    def batch(self) -> pa.RecordBatch:
        """The columns as one record batch."""
        return pa.RecordBatch.from_arrays(list(self.columns.values()), names=list(self.columns))

    def slice(self, start: int, length: int) -> Frame:
        """Rows side by side, without a copy."""
        return Frame(length, {name: column.slice(start, length) for name, column in self.columns.items()})

    def take(self, rows: Array, columns: Sequence[str], *, present: bool = False) -> Frame:
        """Rows by position; -1 gives nulls, ``present`` if none is."""
        wanted = pa.array(rows) if present else slot_array(rows)
        return Frame(rows.size, {name: self.columns[name].take(wanted) for name in columns})


def slot_array(slots: npt.NDArray[np.int64]) -> pa.Array:
    """Slots as Arrow indices, -1 as null."""
    missing = slots < 0
    return pa.array(slots, mask=missing) if missing.any() else pa.array(slots)
