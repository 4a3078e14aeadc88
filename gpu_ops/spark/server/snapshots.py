"""Snapshots of a partition: when one is due, and its writing, beside the micro-batches that follow.

What is written is copied to host memory first, while nothing changes it: the state of a version that nobody asks for
again. Only the writing of a large one has a thread; until it is durable everything before it stays.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import pyarrow as pa

from gpu_ops.errors import StateError
from gpu_ops.spark.server import recovery
from gpu_ops.state.durable import PartitionLog, Stored, Times

_log = logging.getLogger(__name__)

_AT_ONCE: Final = 1 << 20
"""Bytes, at most, that are written before the micro-batch goes on: a thread would take as long."""


@dataclasses.dataclass(frozen=True)
class Held:
    """The state of a version, as a snapshot has it."""

    tables: dict[str, pa.Table]
    clock_ms: int
    times: Times
    backlog: bool


class Snapshots:
    """Those of one partition, for its owner.

    Args:
        who: the partition, for messages.
        log: its files.
        stored: what they are.
        partition: its number.
        every: so many records apart; None for when the log has grown as large as the last one.

    Attributes:
        stored: what the files are now.
    """

    def __init__(self, who: str, log: PartitionLog, stored: Stored, partition: int, every: int | None) -> None:
        self._who, self._log, self.stored = who, log, stored
        self._partition, self._every = partition, every
        self._writing: tuple[int, Future[int]] | None = None
        self._not_before = 0

    def take(self, version: int, held: Callable[[], Held]) -> None:
        """Have a snapshot written when one is due; delete what one replaces that is written by now.

        Args:
            version: that the state is at.
            held: copies the state; called only when a snapshot is due.
        """
        if self._writing is not None and not self._writing[1].done():
            return
        self.finish()
        if version < self._not_before:
            return
        if not recovery.snapshot_due(version, self._partition, self.stored, self._every):
            return
        state = held()
        write = functools.partial(
            self._log.write_snapshot, version, state.tables, state.clock_ms, state.times, backlog=state.backlog
        )
        if sum(table.nbytes for table in state.tables.values()) <= _AT_ONCE:
            self._settle(version, write)
        else:
            thread = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
            self._writing = version, thread.submit(write)
            thread.shutdown(wait=False)

    def finish(self) -> None:
        """Wait for what is being written, and delete what it replaces."""
        if self._writing is not None:
            version, writing = self._writing
            self._settle(version, writing.result)

    def _settle(self, version: int, written: Callable[[], int]) -> None:
        self._writing = None
        try:
            self.stored.snapshots[version] = written()
            self.stored = self._log.prune(version, self.stored)
        except (StateError, OSError) as error:
            # The log alone is enough to go on.
            _log.warning("%s: no snapshot of version %d: %s", self._who, version, error)
            self._not_before = version + recovery.MIN_RECORDS
