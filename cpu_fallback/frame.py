"""Row-aligned named Arrow columns."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cpu_fallback.hashing import raw_values
from gpu_ops.arrays import Array

Mask = npt.NDArray[np.bool_]

# Types of the same width as a value, which numpy gathers faster than bytes.
_LANES = {width: np.dtype(name) for width, name in ((1, "u1"), (2, "u2"), (4, "u4"), (8, "u8"), (16, "c16"))}


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
        missing = None if present else rows < 0
        if missing is not None and not missing.any():
            missing = None
        wanted, taken = pa.array(rows, mask=missing), {}
        for name in columns:
            column, kind = self.columns[name], self.columns[name].type
            if pa.types.is_primitive(kind) and not pa.types.is_boolean(kind) and len(column) > column.null_count == 0:
                values = raw_values(column, np.dtype((np.void, kind.byte_width)))
                taken[name] = gathered(values, kind, rows, missing)
            else:
                taken[name] = column.take(wanted)
        return Frame(rows.size, taken)


def gathered(values: npt.NDArray[Any], kind: pa.DataType, rows: Array, missing: Mask | None) -> pa.Array:
    """Values of a fixed width by position, nulls where ``missing``: faster than Arrow's ``take``.

    Args:
        values: one at least, none of them null.
        kind: their type.
        rows: n positions, -1 for any other.
        missing: n flags; None for none.
    """
    lane = _LANES.get(values.itemsize)
    data = (values if lane is None else values.view(lane)).take(rows)
    validity = None if missing is None else pa.py_buffer(np.packbits(~missing, bitorder="little"))
    return pa.Array.from_buffers(kind, rows.size, [validity, pa.py_buffer(data)])
