"""Aggregates of sessions as users write them down: rows of a group that follow one another without a long pause.

A session is made of the rows of a group each of which comes no later than a *gap* after the one before it, a row just
the gap later is in it as well; its window is from its first row's event time to the last one's plus the gap. So do
Spark's ``session_window`` (``MergingSessionsIterator``) and Flink's session windows (``TimeWindow.intersects``).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import pyarrow as pa

from gpu_ops.descriptions.aggregate import Aggregate, AggregateSpec, Measure, parse_measure
from gpu_ops.descriptions.description import Emit, OutputColumn, line
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.times import LATES, MAX_BOUND, Duration, parse_duration, show_ms, time_type, units_per_ms
from gpu_ops.errors import DescriptionError

START, END = "session_start", "session_end"


@dataclasses.dataclass(frozen=True)
class SessionAggregate(Aggregate):
    """One row per group and session of an input's rows; the input says what its event time is.

    Attributes:
        gap_ms: how many milliseconds apart two rows of a session are at most that follow one another.
        start: what the column with a session's first event time is called; it stands behind those of the group.
        end: likewise of the last event time plus the gap.
        emit: ``per_batch`` keeps the result up to date as sessions grow, merge and part; ``at_watermark`` gives a
            session once, when the watermark reaches its end, and forgets it; ``at_end`` when the input has ended.
    """

    gap_ms: int = 0
    start: str = START
    end: str = END

    kind: ClassVar[str] = "session_aggregate"
    runs: ClassVar[str] = "groups.sessions"
    runs_at_end: ClassVar[str] = "at_end"
    emits: ClassVar[tuple[Emit, ...]] = ("per_batch", "at_watermark", "at_end")

    @classmethod
    def of_gap(
        cls,
        source: Input,
        by: tuple[str, ...],
        gap: Duration,
        aggregates: Mapping[str, AggregateSpec],
        emit: Emit = "per_batch",
        *,
        late: Literal["drop", "tag"] = "drop",
        **more: Any,
    ) -> Self:
        """A description from what a user writes.

        Args:
            source: the input, with its event time.
            by: its group columns, besides the session.
            gap: a duration, such as ``"10 minutes"``.
            aggregates: as of `Aggregate.of`.
            emit: see above.
            late: see `Aggregate`.
            more: what the columns of the start and the end are called.
        """
        measures = tuple(parse_measure(name, text) for name, text in aggregates.items())
        return cls(source, by, measures, emit, late=late, gap_ms=parse_duration(gap), **more)  # type: ignore[arg-type]

    def _check(self) -> None:
        name, event_time = self.source.name, self.source.event_time
        if self.emit == "per_event":
            raise DescriptionError(
                "emit='per_event': a row may move all rows of its session to another one; sessions emit per_batch, "
                "at_watermark or at_end"
            )
        if event_time is None:
            raise DescriptionError(f"input '{name}': sessions go by its event time, and it names none")
        if self.gap_ms <= 0:
            raise DescriptionError(f"the gap between two sessions is positive, this one is {self.gap_ms} ms")
        kind, times = self.source.schema.field(event_time).type, self.time_type
        if self.gap_ms * units_per_ms(times) >= MAX_BOUND or (kind != times and self.gap_ms % 1000):
            raise DescriptionError(f"a gap of {show_ms(self.gap_ms)} is no whole number of event times of type {kind}")
        if self.start in self.source.schema.names:
            raise DescriptionError(
                f"input '{name}' has a column {self.start!r} itself: call that of sessions otherwise"
            )
        if event_time in self.by:
            raise DescriptionError(f"input '{name}': by the event time {event_time!r} each time is a group of its own")
        self.source.refuse("sessions end as time passes", "ttl_ms")
        for measure in self.measures:
            if measure.function in ("first", "last"):
                raise DescriptionError(
                    f"input '{name}': {measure}: the rows of a session are in no order of arrival, as sessions become "
                    "one and part; take min or max"
                )
            retracts = measure.own is None or measure.own.retracts
            if not retracts and self.emit != "at_watermark":
                raise DescriptionError(
                    f"input '{name}': {measure} has no retract(), and rows go from one session to another"
                )
        if self.window_end is not None or self.always:
            raise DescriptionError("a session is a window of its own: window_end and always have no place here")
        super()._check()

    @property
    def _has_groups(self) -> bool:
        return True

    def _check_window(self) -> None:
        """A session has its own end."""

    @property
    def gap(self) -> int:
        """The gap in the unit of `time_type`."""
        return self.gap_ms * units_per_ms(self.time_type)

    @property
    def time_type(self) -> pa.DataType:
        """The type times are compared in."""
        assert self.source.event_time is not None
        kind = self.source.schema.field(self.source.event_time).type
        return time_type(kind, kind)

    @property
    def closes(self) -> str | None:
        """The column of the result that a watermark has to reach."""
        return self.end if self.emit == "at_watermark" else None

    @property
    def behind_ms(self) -> int | None:
        """A session that a retraction leaves may have ended before the watermark, by less than the gap."""
        return super().behind_ms if self.source.insert_only else self.gap_ms

    def times_of(self, source: Input) -> tuple[str, ...]:
        """The event time alone is compared with a watermark."""
        return () if source.event_time is None else (source.event_time,)

    def kept(self, number: int) -> str:
        """Tells in words how long rows of its input stay."""
        return f"rows are kept until the watermark reaches the end of their session; {LATES[self.late]}"

    @functools.cached_property
    def output(self) -> tuple[OutputColumn, ...]:
        """The group, the session's start and end, the aggregates, and what late rows alone have."""
        assert self.source.event_time is not None
        kind, groups = self.source.schema.field(self.source.event_time).type, len(self.by)
        ends = (OutputColumn(name, 0, "", None, kind) for name in (self.start, self.end))
        columns = super().output
        return (*columns[:groups], *ends, *columns[groups:])

    @property
    def compared_columns(self) -> list[tuple[int, str]]:
        """The columns that other aggregates compare, and the event time."""
        return [*super().compared_columns, (0, str(self.source.event_time))]

    def _unique_key(self) -> tuple[str, ...] | None:
        return (*self.by, self.start) if self.group_never_null and self.late == "drop" else None

    @property
    def goes_row_by_row(self) -> bool:
        """No backend's ``groupby`` knows sessions."""
        return True

    @property
    def result_without_rows(self) -> bool:
        """Without rows there is no session."""
        return False

    @property
    def title(self) -> str:
        """The aggregate in one line, for people."""
        return f"aggregate of {self.source.name} by {', '.join((*self.by, 'sessions'))}"

    def lines(self) -> list[str]:
        """The sessions in some lines, for people."""
        label, *more = super().lines()
        gap = f"{show_ms(self.gap_ms)} without a row by {self.source.event_time}"
        sessions = line("sessions", f"end after {gap}: from {self.start} to {self.end}")
        return [label, line("group by", ", ".join(self.by) or "sessions alone"), sessions, *more[1:]]

    def of_rows(self, source: Input) -> Aggregate:
        """The aggregate of rows that have the start of their session.

        Args:
            source: these rows; what it calls them is the columns' names here, and `start`.
        """
        last = Measure(self.end, "max", self.source.event_time)
        return Aggregate(source, (*self.by, self.start), (last, *self.measures), "per_batch")

    kept_at_end = "an aggregate of sessions with emit='at_end'"
