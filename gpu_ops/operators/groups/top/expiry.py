"""State TTL of a top-N: groups that nothing has changed for so long."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from gpu_ops.kernels import Frame
from gpu_ops.operators.core.key_table import KeyTable, forget_rows
from gpu_ops.state.columns import DEAD, LIVE
from gpu_ops.state.keyed_table import KeyedTable

_ALL = "all"


class Expiry:
    """When groups were last changed.

    Args:
        table: the rows.
        by: the columns that make a group.
        ttl_ms: how long after that one is forgotten.

    Attributes:
        groups: the groups, each once.
    """

    def __init__(self, table: KeyedTable, by: tuple[str, ...], ttl_ms: int) -> None:
        self._table, self._by, self._clock = table, by, 0
        schema = pa.schema([table.source.schema.field(column) for column in by] or [(_ALL, pa.int8())])
        self.groups = KeyTable(table.kernels, schema, {}, table.source.name, ttl_ms=ttl_ms)

    def begin(self, clock_ms: int) -> int:
        """Prepare a micro-batch: groups that have expired go with their rows; how many rows."""
        self._clock, groups = clock_ms, self.groups
        gone = groups.expired(clock_ms)
        if not gone.size:
            return 0
        groups.move(gone, LIVE, DEAD)
        return forget_rows(self._table, groups.store.take(gone, groups.source.schema.names, present=True))

    def touch(self, frame: Frame) -> None:
        """Groups that the micro-batch changes; ``frame`` has a row of each."""
        kernels = self._table.kernels
        if not self._by:
            frame = kernels.frame(pa.table({_ALL: pa.array(np.zeros(kernels.num_rows(frame), np.int8))}))
        self.groups.touch(self.groups.locate(frame).slots, self._clock)
