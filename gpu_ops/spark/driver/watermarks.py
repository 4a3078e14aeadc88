"""The watermarks of a task's operators by time, one each for all partitions, micro-batch by micro-batch.

Every partition reports the latest event times it has seen; when all have, the watermark of the next
micro-batch follows. Each partition stores the one it worked under with its record, so a driver that starts
anew finds it: for a micro-batch that some partition has done already, the very same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from gpu_ops.descriptions.dataflow import Dataflow
from gpu_ops.descriptions.description import Description
from gpu_ops.descriptions.times import BEFORE_ALL, WatermarkMs
from gpu_ops.errors import StateError
from gpu_ops.spark.server import recovery
from gpu_ops.spark.wire.command import EventTimes
from gpu_ops.state.address import StateAddress
from gpu_ops.state.durable import NO_TIMES, PartitionLog, Times, later
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import Manifest, ensure

Upstream = Callable[[int], int | None]
"""Returns the output watermark of the operator that makes an input, in the micro-batch before this one."""


class Moment(NamedTuple):
    """The watermark and the clock of one micro-batch, for all partitions, in milliseconds since the epoch.

    Attributes:
        watermark: None while there is none, and by processing time; of a dataflow those of its operators.
        clock_ms: the time at which the micro-batch began.
    """

    watermark: WatermarkMs
    clock_ms: int


class _Timed(NamedTuple):
    """An operator by event time.

    Attributes:
        name: in its dataflow; empty if it is alone.
        description: the operator.
        upstream: for each of its inputs that is the changelog of another operator by event time, that one's output
            watermark; None where the times of rows say it.
        sides: where its inputs are among those of all.
    """

    name: str
    description: Description
    upstream: Sequence[Upstream | None]
    sides: range


_NONE_ABOVE: Final[Mapping[str, Sequence[Upstream | None]]] = {"": (None, None)}


class Watermarks:
    """The watermarks of one operator by time of one query, or of those in one engine.

    Args:
        description: the description of the operator, or of the dataflow.
        manifest: the manifest that its state folder must have; it also says the number of partitions.
        state: the state folder, or None.
        upstream: of each operator by event time, by its name in a dataflow, for each input that is the changelog of an
            operator by time in another task of the query, its output watermark.
    """

    def __init__(
        self,
        description: Description,
        manifest: Manifest,
        state: StateAddress | None,
        upstream: Mapping[str, Sequence[Upstream | None]] = _NONE_ABOVE,
    ) -> None:
        self._description, self._manifest, self._state = description, manifest, state
        self._timed = list(self._operators(description, upstream))
        self._lock = threading.Lock()
        self._batch = -1
        self._moment, self._last = Moment(None, 0), Moment(None, 0)
        self._before = NO_TIMES  # of all partitions, after the micro-batch before this one
        self._rows_at = [0] * sum(len(one.sides) for one in self._timed)
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
            watermark = self._advance(batch_id, clock_ms) if self._timed else None
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
        last = self._description.last if isinstance(self._description, Dataflow) else self._description
        with self._lock:
            one = self._timed[-1] if self._timed and batch_id == self._batch else None
            return None if one is None or one.description is not last else self._output_watermark(one.name)

    # --- inside ------------------------------------------------------------------------------

    def _operators(
        self, description: Description, upstream: Mapping[str, Sequence[Upstream | None]]
    ) -> Iterator[_Timed]:
        sides = 0
        for name, one in description.timed.items():
            above = upstream[name]
            if isinstance(description, Dataflow):
                followed = zip(description.followed(name), above, strict=False)
                above = [outside if within is None else self._asks(within) for within, outside in followed]
            yield _Timed(name, one, above, range(sides, sides + len(one.sides)))
            sides += len(one.sides)

    def _asks(self, name: str) -> Upstream:
        return lambda _: self._output_watermark(name)

    def _output_watermark(self, name: str) -> int | None:
        """The output watermark of an operator by event time, after the micro-batch before this one."""
        watermark, behind = self._times_before(name).watermark, self._description.timed[name].behind_ms
        return None if not isinstance(watermark, int) or behind is None else watermark - behind

    def _times_before(self, name: str) -> Times:
        """The times that an operator by event time knows after the micro-batch before this one."""
        return self._before.of(self._description, name)

    def _advance(self, batch_id: int, clock_ms: int) -> WatermarkMs:
        if batch_id == self._batch + 1 and self._batch >= 0 and len(self._reports) == self._manifest.partitions:
            for report in self._reports.values():
                self._before = self._before.later(Times(self._moment.watermark, report.latest))
                for side, came in enumerate(report.rows):
                    self._rows_at[side] = self._moment.clock_ms if came else self._rows_at[side]
        else:
            # How long an input has been idle counts from the restart: it may have waited for us.
            self._rows_at = [clock_ms] * len(self._rows_at)
            self._before, done = self._stored(batch_id)
            if done is not None:
                return done.watermark
        found = {}
        for one in self._timed:
            before = self._times_before(one.name)
            silent = tuple(clock_ms - self._rows_at[number] for number in one.sides)
            marks = tuple(
                source.watermark_ms(before.latest[number:]) if above is None else above(batch_id)
                for number, (source, above) in enumerate(zip(one.description.inputs, one.upstream, strict=False))
            )
            assert not isinstance(before.watermark, Mapping)
            found[one.name] = operator_watermark(one.description, marks, silent, before.watermark)
        return found.get("", found)

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
