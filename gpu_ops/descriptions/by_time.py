"""Joins by time as users write them down: interval, ASOF and temporal joins.

A pair of an interval join matches when ``lower <= right time - left time <= upper``, besides its keys and condition.
Rules: Flink's SQL interval join (``TimeIntervalJoin``) and, for ``keyed``, its DataStream one
(``IntervalJoinOperator``).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar, Final, Literal, get_args

import pyarrow as pa

from gpu_ops.descriptions.description import LATER, Description, Emit, OutputColumn, line
from gpu_ops.descriptions.interval import Interval
from gpu_ops.descriptions.join import Join, JoinType
from gpu_ops.descriptions.keys import Chain
from gpu_ops.descriptions.times import (
    LATES,
    MAX_BOUND,
    Duration,
    Late,
    parse_bound,
    show_ms,
    time_type,
    units_per_ms,
)
from gpu_ops.errors import DescriptionError
from gpu_ops.fields import ABSENT, check_fields

_WATERMARK: Final = line(
    "watermark", "the one of the input that is behind, over all partitions; it moves between micro-batches"
)
_OUTPUTS = {"semi": "a left row once, at its first match", "anti": "a left row whose time is over without a match"}


class JoinByTime(Join):
    """A join whose rows are compared by their event times."""

    sorts_itself: ClassVar[bool] = False

    def _check_times(self, what: str, no_ttl: str) -> None:
        """Refuses inputs without an event time, or with a TTL."""
        for source in self.inputs:
            if source.event_time is None and (self.interval is None or self.interval.time == "event"):
                raise DescriptionError(f"input '{source.name}': {what} needs its event time")
            source.refuse(f"{what} {no_ttl}", "ttl_ms")

    @functools.cached_property
    def time_type(self) -> pa.DataType:
        """The type times are compared in."""
        kinds = [s.schema.field(s.event_time).type for s in self.inputs if s.event_time is not None]
        return time_type(*kinds) if len(kinds) == 2 else pa.timestamp("ms", "UTC")


@dataclasses.dataclass(frozen=True)
class IntervalJoin(JoinByTime):
    """A join of two insert-only inputs whose rows match within a span of time.

    Attributes:
        interval: the bounds, whose time counts, and what happens to late rows.
    """

    interval: Interval = dataclasses.field(kw_only=True)

    runs: ClassVar[str] = "by_time.interval"

    def _check(self) -> None:
        interval = self.interval
        if self.emit == "at_end" and interval.time == "processing":
            raise DescriptionError("emit='at_end' has no arrival times to go by: use event time")
        if interval.keyed:
            self._check_how("a keyed interval join", "inner")
        else:
            self._check_how("an interval join", *get_args(JoinType))
        if self.one_sided and interval.timestamp is not None:
            raise DescriptionError(
                f"timestamp={interval.timestamp!r} is the later of a pair's times, and how={self.how!r} has no pairs"
            )
        if self.null_aware:
            raise DescriptionError("null_aware=True is NOT IN, which has no bounds in time; how='anti' is NOT EXISTS")
        for source in self.inputs:
            source.refuse("an interval join takes insert-only input", "unique_key")
            if interval.time == "processing":
                source.refuse("by processing time no row is asked for its own", "event_time")
        self._check_times("an interval join", "keeps rows by their time")
        interval.units(self.time_type)
        super()._check()

    @property
    def one_sided(self) -> bool:
        """Tells whether only left rows come out: semi and anti."""
        return self.how in ("semi", "anti")

    @property
    def outer(self) -> tuple[bool, bool]:
        """Tells for each side whether rows without a match come out when their time is over."""
        return (True, False) if self.how == "anti" else super().outer

    @functools.cached_property
    def output(self) -> tuple[OutputColumn, ...]:
        """The changelog's columns after ``row_kind``."""
        columns = super().output
        if self.interval.timestamp is None:
            return columns
        times = str(self.left.event_time), str(self.right.event_time)
        return (*columns, OutputColumn(self.interval.timestamp, LATER, *times, self.time_type))

    insertions_only = (0, 1)

    _unique_key = Description._unique_key

    @property
    def _kind(self) -> str:
        return "keyed interval join" if self.interval.keyed else "interval join"

    def _more_lines(self) -> list[str]:
        interval = self.interval
        if interval.time == "processing":
            times = [f"{source.name}'s arrival" for source in self.inputs]
            lines = [line("time", "by the clock of the micro-batch; no row is late")]
        else:
            times = [f"{source.name}.{source.event_time}" for source in self.inputs]
            late = LATES[interval.late]
            if self.one_sided and interval.late == "tag":
                late = "late rows of the left come out with the row kind 'late', the right's are dropped"
            lines = [line("time", f"event time; {late}"), _WATERMARK]
        bounds = str(interval).replace("right - left", f"{times[1]} - {times[0]}")
        rule = [line("output", _OUTPUTS[self.how])] if self.how in _OUTPUTS else []
        return [line("interval", bounds), *rule, *lines]


Direction = Literal["backward", "forward", "nearest"]
"""Which right row a left row meets, of those with its key.

* *backward*: the last one at or before its time.
* *forward*: the first one at or after it.
* *nearest*: whichever of both is nearer; where they are as near, the earlier one.
"""

_FINDS: Final = {
    "backward": ("the last", "at or before", "before"),
    "forward": ("the first", "at or after", "after"),
    "nearest": ("the nearest", "to", "to"),
}


@dataclasses.dataclass(frozen=True)
class Asof:
    """The time part of an ASOF join.

    Attributes:
        direction: see `Direction`.
        tolerance_ms: how far apart in time two rows may be, milliseconds, inclusive; None for any distance.
        exact: whether rows of just the same time match.
    """

    direction: Direction = "backward"
    tolerance_ms: int | None = None
    exact: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        if self.tolerance_ms is not None and self.tolerance_ms < 0:
            raise DescriptionError(f"tolerance is not negative, this one is {self.tolerance_ms} ms")

    @classmethod
    def of(cls, direction: Direction, tolerance: Duration | None, *, allow_exact_matches: bool = True) -> Asof:
        """Makes the time part of what a user writes; ``tolerance``: a duration, such as ``"1 second"``."""
        return cls(direction, None if tolerance is None else parse_bound(tolerance), allow_exact_matches)

    def tolerance(self, kind: pa.DataType) -> int | None:
        """The tolerance in the unit of a time type; see `gpu_ops.descriptions.times.time_type`.

        Raises:
            DescriptionError: centuries of nanoseconds, which int64 does not hold.
        """
        if self.tolerance_ms is None:
            return None
        found = self.tolerance_ms * units_per_ms(kind)
        if found >= MAX_BOUND:
            raise DescriptionError(f"tolerance is too long for event times of type {kind}")
        return found


@dataclasses.dataclass(frozen=True)
class AsofJoin(JoinByTime):
    """A join of each left row with at most one right row: of those of its key the one that is nearest in time.

    Among right rows of one time it is the one with the greatest ``sequence_by``, else the one that came last. Rows
    without a time match nothing. Both inputs may be changelogs.

    Attributes:
        asof: direction, tolerance, and whether equal times match.
    """

    asof: Asof = dataclasses.field(kw_only=True)

    kind: ClassVar[str] = "asof_join"
    runs: ClassVar[str] = "by_time.asof"
    emits: ClassVar[tuple[Emit, ...]] = ("per_event", "per_batch", "at_watermark", "at_end")

    def _check(self) -> None:
        self._check_how("an ASOF join", "inner", "left")
        if self.where is not None:
            raise DescriptionError("where= has no place in an ASOF join: filter its inputs, or what comes out")
        for source in self.inputs if self.emit == "at_watermark" else ():
            source.refuse("with emit='at_watermark' inputs are insert-only", "unique_key")
        self._check_times("an ASOF join", "keeps every row")
        ties = self.ties_by(1)
        if ties is not None:
            kind = self.right.schema.field(ties).type
            if not (pa.types.is_signed_integer(kind) or pa.types.is_timestamp(kind)):
                raise DescriptionError(
                    f"input '{self.right.name}': sequence_by {ties!r} orders right rows of one time, so it is an "
                    f"integer or a timestamp, this one is {kind}"
                )
        self.asof.tolerance(self.time_type)
        super()._check()

    @property
    def operator(self) -> str:
        """The module of `gpu_ops.operators` that runs it."""
        return "by_time.asof_at_watermark" if self.emit == "at_watermark" else super().operator

    late: ClassVar[Late] = "join"  # what happens to left rows below the watermark

    insert_only = False  # a row that comes later may be a better match

    @property
    def by_time(self) -> bool:
        """Tells whether rows come out and go as time passes."""
        return self.emit == "at_watermark"

    @property
    def behind_ms(self) -> int | None:
        """Milliseconds that what comes out may be behind the watermark; None for any distance."""
        return 0 if self.asof.direction == "backward" else self.asof.tolerance_ms

    @property
    def insertions_only(self) -> tuple[int, ...]:
        """The inputs whose rows may only be insertions."""
        return (0, 1) if self.by_time else ()

    def kept(self, number: int) -> str:
        """Tells in words how long rows of an input stay."""
        if number == 0:
            best = "its time" if self.asof.direction == "backward" else "the last time of a better match"
            return f"kept until the watermark passes {best}"
        passes = "it" if self.asof.direction == "forward" else "the next row of its key"
        return f"kept until the watermark passes {passes}"

    @property
    def times_may_be_null(self) -> bool:
        """Tells whether rows without an event time are taken: they match nothing, and no watermark passes them."""
        return self.emit != "at_watermark"

    def ties_by(self, number: int) -> str | None:
        """The column by which right rows of one time are ordered."""
        return self.right.sequence_by if number == 1 else None

    @functools.cached_property
    def output(self) -> tuple[OutputColumn, ...]:
        """The changelog's columns after ``row_kind``; of times of one name the left's, unless there are suffixes."""
        columns = super().output
        if self.left.event_time != self.right.event_time or self.suffixes is not None:
            return columns
        return tuple(c for c in columns if (c.side, c.column) != (1, self.right.event_time))

    def _chain(self) -> Chain:
        return super()._chain()._replace(single=(False, True))

    order_matters_at_end = True

    @property
    def title(self) -> str:
        """The join in one line, for people."""
        return f"{super().title}, {self.asof.direction}"

    _before, _kind = "ASOF ", "ASOF join"

    def _more_lines(self) -> list[str]:
        asof, (left, right) = self.asof, self.inputs
        which, at, beside = _FINDS[asof.direction]
        text = f"{which} {right.name}.{right.event_time} {at if asof.exact else beside} {left.name}.{left.event_time}"
        if not asof.exact and asof.direction == "nearest":
            text += ", not the same time"
        if asof.tolerance_ms is not None:
            text += f", at most {show_ms(asof.tolerance_ms)} apart"
        last = "the one that came last" if right.sequence_by is None else f"the greatest {right.sequence_by}"
        return [line("time", text), line("ties", f"of {right.name} of one time {last}")]


@dataclasses.dataclass(frozen=True)
class TemporalJoin(JoinByTime):
    """A join of each left row with the version of a table that was valid at the row's time (``FOR SYSTEM_TIME AS OF``).

    The left input only grows. Each row of the right input is a version of its key, valid from its time until that of
    the next one; a retraction ends the validity of what was before it. Flink: ``TemporalRowTimeJoinOperator``.

    Attributes:
        late: what happens to left rows below the watermark; see `Late`.
        ttl_ms: milliseconds of the clock after which a key that nothing comes for is forgotten, half as much later at
            the latest; None for never.
    """

    emit: Emit = "at_watermark"
    late: Late = dataclasses.field(default="join", kw_only=True)
    ttl_ms: int | None = dataclasses.field(default=None, kw_only=True, metadata=ABSENT)

    kind: ClassVar[str] = "temporal_join"
    runs: ClassVar[str] = "by_time.temporal"
    emits: ClassVar[tuple[Emit, ...]] = ("at_watermark", "at_end")

    def _check(self) -> None:
        self._check_how("a temporal join", "inner", "left")
        if self.ttl_ms is not None and self.ttl_ms < 2:
            raise DescriptionError(f"ttl is at least two milliseconds, this one is {self.ttl_ms} ms")
        if self.ttl_ms is not None and self.emit == "at_end":
            raise DescriptionError("with emit='at_end' no row is forgotten, ttl= has no place")
        if not self.keys:
            raise DescriptionError(
                f"a temporal join needs on=: columns that identify a row of the versioned table '{self.right.name}'"
            )
        self.left.refuse("the left input of a temporal join is insert-only", "unique_key")
        self._check_times("a temporal join", "has one ttl= for both inputs, its own")
        own = set(self.key_columns(1))
        beyond = [column for column in self.right.unique_key or () if column not in own]
        if beyond:
            raise DescriptionError(
                f"input '{self.right.name}': the unique key's column {beyond[0]!r} is not among the columns of on=, "
                f"{', '.join(self.key_columns(1))}: one left row would meet several valid versions"
            )
        super()._check()

    by_time = True
    insertions_only = (0,)

    order_matters_at_end = True
    _unique_key = Description._unique_key
    _before, _kind = "temporal ", "temporal join"

    def _more_lines(self) -> list[str]:
        left, right = self.inputs
        version = (
            f"the version of {right.name} valid at {left.name}.{left.event_time}, by {right.name}.{right.event_time}"
        )
        ttl = []
        if self.ttl_ms is not None:
            text = f"{show_ms(self.ttl_ms)} to {show_ms(3 * self.ttl_ms // 2)} after anything came for it"
            ttl = [line("TTL", f"a key is forgotten, with the rows that wait, {text}")]
        return [
            *ttl,
            line("version", version),
            line("time", f"event time; {LATES[self.late]}"),
            _WATERMARK,
        ]

    def kept(self, number: int) -> str:
        """Tells in words how long rows of an input stay."""
        if number == 0:
            return "kept until the watermark reaches its time"
        return "kept until the watermark passes the next version of its key"
