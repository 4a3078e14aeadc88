"""Row-aligned named Arrow columns."""

from __future__ import annotations

import dataclasses

import pyarrow as pa


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """Columns of equal length; there may be none."""

    length: int
    columns: dict[str, pa.Array]

    def batch(self) -> pa.RecordBatch:
        """The columns as one record batch."""
        return pa.RecordBatch.from_arrays(list(self.columns.values()), names=list(self.columns))
