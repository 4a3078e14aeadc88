"""The watermark of a join by time, one for all its partitions, micro-batch by micro-batch.

Every partition reports the latest event times it has seen; when all have, the watermark of the next
micro-batch follows. Each partition stores the one it worked under with its record, so a driver that starts
anew finds it: for a micro-batch that some partition has done already, the very same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gpu_ops.descriptions.description import Description
from gpu_ops.descriptions.times import BEFORE_ALL
from gpu_ops.errors import StateError
from gpu_ops.spark.server import recovery
from gpu_ops.spark.wire.command import EventTimes
from gpu_ops.state.address import StateAddress
from gpu_ops.state.durable import NO_TIMES, PartitionLog, Times, later
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import Manifest, ensure

Upstream = Callable[[int], int | None]
"""Returns the output watermark of the join by time that makes an input, in the micro-batch before this one."""


class Moment(NamedTuple):
    """The watermark and the clock of one micro-batch, for all partitions, in milliseconds since the epoch.

    Attributes:
        watermark: None while there is none, and by processing time.
        clock_ms: the time at which the micro-batch began.
    """

    watermark: int | None
    clock_ms: int


class Watermarks:
    """The watermarks of one join by time of one query.

    Args:
        description: the description of the join.
        manifest: the manifest that its state folder must have; it also says the number of partitions.
        state: the state folder, or None.
        upstream: for each input that is the changelog of a join by time in the same query, its output watermark.
    """

    def __init__(
        self,
        description: Description,
        manifest: Manifest,
        state: StateAddress | None,
        upstream: tuple[Upstream | None, Upstream | None] = (None, None),
    ) -> None:
        self._description, self._manifest, self._state, self._upstream = description, manifest, state, upstream
        self._by_event_time = description.by_event_time
        self._lock = threading.Lock()
        self._batch = -1
        self._moment, self._last = Moment(None, 0), Moment(None, 0)
        self._before = NO_TIMES  # of all partitions, after the micro-batch before this one
        self._rows_at = [0, 0]
        self._reports: dict[int, EventTimes] = {}

    def begin(self, batch_id: int, clock_ms: int) -> Moment:
        """Returns the watermark and clock of a micro-batch, the same ones however often it is asked for.

        Args:
            batch_id: the micro-batch.
            clock_ms: the time now, used at the first call.

        Raises:
            StateError: the micro-batch does not follow the last one, or the state folder does not fit.
        """
        with self._lock:
            if batch_id == self._batch:
                return self._moment
            if batch_id == self._batch - 1:
                return self._last  # a task that nobody waits for any more
            if 0 <= batch_id < self._batch:
                raise StateError(
                    f"{self}: its watermark is at batch {self._batch}, Spark asks for batch {batch_id}: "
                    "the checkpoint is older than the state"
                )
            # of a clock that was ahead: an input is not to be waited for until it is there again
            self._rows_at = [min(at, clock_ms) for at in self._rows_at]
            watermark = self._advance(batch_id, clock_ms) if self._by_event_time else None
            self._last, self._moment = self._moment, Moment(watermark, clock_ms)
            self._batch, self._reports = batch_id, {}
            return self._moment

    def report(self, batch_id: int, partition: int, report: EventTimes) -> None:
        """Records a partition's report of its event times; idempotent."""
        with self._lock:
            if batch_id == self._batch:
                self._reports[partition] = report

    def output_before(self, batch_id: int) -> int | None:
        """The output watermark of the micro-batch before the given one: no row emitted since is older.

        Rows that a watermark ends are emitted under it, so the output of micro-batch N may be as old as the
        output watermark of N - 1.
        """
        with self._lock:
            watermark = self._before.watermark if batch_id == self._batch else None
        behind = self._description.behind_ms
        return None if watermark is None or behind is None else watermark - behind

    # --- inside ------------------------------------------------------------------------------

    def _advance(self, batch_id: int, clock_ms: int) -> int | None:
        if batch_id == self._batch + 1 and self._batch >= 0 and len(self._reports) == self._manifest.partitions:
            for report in self._reports.values():
                self._before = self._before.later(Times(self._moment.watermark, report.latest))
                for side, came in enumerate(report.rows):
                    self._rows_at[side] = self._moment.clock_ms if came else self._rows_at[side]
        else:
            # How long an input has been idle counts from the restart: it may have waited for us.
            self._rows_at = [clock_ms, clock_ms]
            self._before, done = self._stored(batch_id)
            if done is not None:
                return done.watermark
        inputs = range(len(self._description.inputs))
        silent = tuple(clock_ms - self._rows_at[number] for number in inputs)
        input_watermarks = tuple(self._of_input(number, batch_id) for number in inputs)
        return operator_watermark(self._description, input_watermarks, silent, self._before.watermark)

    def _of_input(self, side: int, batch_id: int) -> int | None:
        upstream, latest = self._upstream[side], self._before.latest[side:]
        return self._description.inputs[side].watermark_ms(latest) if upstream is None else upstream(batch_id)

    def _stored(self, batch_id: int) -> tuple[Times, Times | None]:
        """The stored event times of all partitions before a micro-batch, and those of one that did it already."""
        if batch_id == 0 and self._batch < 0 and self._state is None:
            return NO_TIMES, None
        if self._state is None:
            held = f"the watermark of batch {self._batch}" if self._batch >= 0 else "nothing"
            raise recovery.memory_refused(str(self), held, batch_id)
        files = Files.at(self._state)
        manifest = ensure(files, self._manifest, create=False)
        if manifest is None:
            if batch_id == 0:
                return NO_TIMES, None
            raise recovery.nothing_stored(str(self), str(self._state), batch_id)
        before, done = NO_TIMES, None
        for partition in range(self._manifest.partitions):
            log = PartitionLog(files, manifest, partition)
            if batch_id > 0:
                before = before.later(self._partition_times(log, partition, batch_id))
            done = done or log.record_times(batch_id)
        return before, done

    def _partition_times(self, log: PartitionLog, partition: int, batch_id: int) -> Times:
        times = log.record_times(batch_id - 1)
        if times is None:
            times = log.snapshot_times(batch_id)
        if times is None:
            who = f"{self}, partition {partition} of {self._manifest.partitions}"
            recovery.newest_snapshot(who, batch_id, log, log.stored(clean=False))
            raise StateError(f"{who}: {log.record_name(batch_id - 1)} cannot be read")
        return times

    def __str__(self) -> str:
        return f"{self._description.title} of {', '.join(source.name for source in self._description.inputs)}"


def operator_watermark(
    description: Description, input_watermarks: Sequence[int | None], silent_ms: Sequence[int], before: int | None
) -> int | None:
    """The watermark of a micro-batch: that of the input which is behind, and never less than before.

    Args:
        description: the description; its inputs may have idle timeouts.
        input_watermarks: each input's watermark.
        silent_ms: for each input, the milliseconds since it last brought rows.
        before: the watermark of the micro-batch before.
    """
    timeouts = [source.idle_timeout_ms for source in description.inputs]
    counting = [
        watermark
        for watermark, silent, timeout in zip(input_watermarks, silent_ms, timeouts, strict=True)
        if timeout is None or silent < timeout
    ]
    known = [watermark for watermark in counting if watermark is not None]
    if not counting or len(known) < len(counting):
        return before
    # times may be less than a delay after the first of all times
    return later(before, max(min(known), BEFORE_ALL + 1))
