"""Flink's interval joins, one event at a time, in plain Python: an expectation for every single event.

Transcribed from ``TimeIntervalJoin`` (SQL) and ``IntervalJoinOperator`` (DataStream) of 2.3.0, with their
timers: one sweep per key and side, set by the first row and not by the earliest, and a sweep on the way
of every lookup. So a pad may come later than its row's time. Slow, and meant to be.

Flink's SQL operator starts its clock at the epoch and forgets what it keeps from before it; `Terms.epoch`
says whether to do so too. The contract does not.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from gpu_ops.descriptions.join import Join
from oracle.drive import Change, Row, canonical
from oracle.rules import OPERATORS, Residual, ordered

END = (1 << 63) - 1
"""The watermark of an input that has ended."""
START = -(1 << 63)
"""The watermark of an input that has said none."""

WATERMARK = "W"
LATE = "late"

TimedEvent = tuple[int, str, Any]
"""Side, ``+I`` and values, or side, ``W`` and a watermark (epoch ms)."""

_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


@dataclasses.dataclass(frozen=True)
class Terms:
    """An interval join by positions. Times and bounds are in one unit, the finer one's.

    Attributes:
        how: inner, left, right, full, semi or anti. These two are what a left join shows of its left rows: semi
            each once, with its first pair; anti those that it pads.
        keys: pairs of equality columns, and whether null equals null.
        times: the event-time column of each side.
        scale: what each side's time is multiplied with to be in that unit.
        widths: columns of each side.
        lower: the least right time - left time that matches.
        upper: the greatest.
        residual: further conditions.
        min_cleanup: as Flink's ``table.exec.interval-join.min-cleanup-interval``.
        late: join, drop or tag.
        keyed: the DataStream operator's rules.
        stamped: rows end in the later of both times, in that unit.
        per_ms: units in a millisecond.
        epoch: SQL: the clock starts at 0, and rows from before it are forgotten.
    """

    how: str
    keys: tuple[tuple[int, int, bool], ...]
    times: tuple[int, int]
    widths: tuple[int, int]
    lower: int
    upper: int
    residual: tuple[tuple[int, str, int], ...] = ()
    scale: tuple[int, int] = (1, 1)
    min_cleanup: int = 0
    late: str = "join"
    keyed: bool = False
    stamped: bool = False
    per_ms: int = 1
    epoch: bool = False

    @classmethod
    def of(cls, join: Join, residual: Sequence[Residual] = ()) -> Terms:
        """The terms of a description."""
        told = join.interval
        assert told is not None
        names = [source.schema.names for source in join.inputs]
        rates = [_per_second(source.schema.field(str(source.event_time)).type) for source in join.inputs]
        finest = max(1000, *rates)
        per_ms = finest // 1000
        return cls(
            how=join.how,
            keys=tuple((names[0].index(k.left), names[1].index(k.right), k.null_safe) for k in join.keys),
            times=(names[0].index(str(join.left.event_time)), names[1].index(str(join.right.event_time))),
            widths=(len(names[0]), len(names[1])),
            lower=told.lower_ms * per_ms + (0 if told.lower_inclusive else 1),
            upper=told.upper_ms * per_ms - (0 if told.upper_inclusive else 1),
            residual=tuple((names[0].index(a), op, names[1].index(b)) for a, op, b in residual),
            scale=(finest // rates[0], finest // rates[1]),
            min_cleanup=told.min_cleanup_ms * per_ms,
            late=told.late,
            keyed=told.keyed,
            stamped=told.timestamp is not None,
            per_ms=per_ms,
        )

    def rules(self) -> IntervalRules:
        """An operator of these terms."""
        if self.keyed:
            return StreamRules(self)
        return SqlRules(self) if self.late == "join" else StrictRules(self)


def _per_second(kind: pa.DataType) -> int:
    return _PER_SECOND[kind.unit] if pa.types.is_timestamp(kind) else 1000


class Clock:
    """The watermark of an operator with two inputs: the smaller one of theirs; neither goes back."""

    def __init__(self) -> None:
        self.inputs = [START, START]
        self.now = START

    def update(self, side: int, watermark: int) -> bool:
        """Take one input's watermark; whether the operator's has moved."""
        self.inputs[side] = max(self.inputs[side], watermark)
        before, self.now = self.now, min(self.inputs)
        return self.now > before

    @property
    def pair(self) -> tuple[int | None, int | None]:
        """As an engine takes it."""
        left, right = (None if w == START else w for w in self.inputs)
        return left, right


class Timers:
    """Timers of one kind: a key is told of a time once, however often it asked for it."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Any]] = []
        self._known: set[tuple[int, Any]] = set()
        self._number = itertools.count()  # keys themselves cannot be ordered: some are null

    def register(self, time: int, key: Any) -> None:
        """Ask to be told when the watermark is at or above ``time``."""
        if (time, key) not in self._known:
            self._known.add((time, key))
            heapq.heappush(self._heap, (time, next(self._number), key))

    def due(self, watermark: int) -> Iterator[tuple[int, Any]]:
        """The timers up to a watermark, in order, those set meanwhile included."""
        while self._heap and self._heap[0][0] <= watermark:
            time, _, key = heapq.heappop(self._heap)
            self._known.discard((time, key))
            yield time, key


class Entry:
    """A row in a cache, and whether it was ever joined."""

    __slots__ = ("joined", "row")

    def __init__(self, row: Row, joined: bool) -> None:
        self.row, self.joined = row, joined


Buckets = dict[int, list[Entry]]
"""Rows of one key by time."""


class IntervalRules:
    """What the operators share."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.clock = Clock()
        self.caches: tuple[dict[Row, Buckets], dict[Row, Buckets]] = ({}, {})
        self.late = [0, 0]
        self.outer = (terms.how in ("left", "full", "anti"), terms.how in ("right", "full"))
        # a left row at t meets right rows up to t + upper; a right one at t left rows up to t - lower
        self.reach = (terms.upper, -terms.lower)

    def process(self, event: TimedEvent) -> list[Change]:
        """What this event makes the operator say."""
        side, kind, value = event
        if kind == WATERMARK:
            return self.advance(value, None) if side == 0 else self.advance(None, value)
        assert kind == "+I", kind
        row = tuple(canonical(v) for v in value)
        time = row[self.terms.times[side]] * self.terms.scale[side]
        if self.clock.now != START and time < self.now:
            self.late[side] += 1
            if self.terms.late != "join":
                shown = self.terms.late == "tag" and (side == 0 or self.terms.how not in ("semi", "anti"))
                return [(LATE, self._output(side, row, None))] if shown else []
        key = tuple(row[pair[side]] for pair in self.terms.keys)
        return list(self._row(side, row, time, key))

    def advance(self, left: int | None, right: int | None) -> list[Change]:
        """What watermarks of both inputs at once (or of one, the other None) make the operator say."""
        moved = [self.clock.update(side, w) for side, w in enumerate((left, right)) if w is not None]
        return list(self._advance()) if any(moved) else []

    @property
    def now(self) -> int:
        """The watermark in the unit of the times."""
        return START if self.clock.now == START else self.clock.now * self.terms.per_ms

    @property
    def output_watermark(self) -> int | None:
        """What the operator lets through of its watermark; None while it has none."""
        return None if self.clock.now == START else self.clock.now

    def kept(self) -> tuple[int, int]:
        """Rows in the caches."""
        left, right = (sum(len(b) for k in c.values() for b in k.values()) for c in self.caches)
        return left, right

    def _advance(self) -> Iterator[Change]:
        raise NotImplementedError

    def _row(self, side: int, row: Row, time: int, key: Row) -> Iterator[Change]:
        raise NotImplementedError

    def _keep(self, side: int, own: Entry, time: int, key: Row) -> None:
        self.caches[side].setdefault(key, {}).setdefault(time, []).append(own)

    def _buckets(self, side: int, key: Row) -> Buckets:
        return self.caches[side].get(key, {})

    def _join(self, side: int, own: Entry, bucket: list[Entry]) -> Iterator[Change]:
        """The pairs of a row with the rows of a bucket of the other side; both remember it."""
        for entry in bucket:
            if self._match(side, own.row, entry.row):
                left = own if side == 0 else entry
                if self.terms.how not in ("semi", "anti"):
                    yield "+I", self._output(side, own.row, entry.row)
                elif self.terms.how == "semi" and not left.joined:
                    yield "+I", left.row
                entry.joined = own.joined = True

    def _pads(self, side: int, bucket: list[Entry]) -> Iterator[Change]:
        for entry in bucket:
            if self.outer[side] and not entry.joined:
                yield "+I", self._output(side, entry.row, None)

    def _output(self, side: int, own: Row, other: Row | None) -> Row:
        if self.terms.how in ("semi", "anti"):
            return own
        parts = [own, other] if side == 0 else [other, own]
        filled = [p if p is not None else (None,) * w for p, w in zip(parts, self.terms.widths, strict=True)]
        row = filled[0] + filled[1]
        if not self.terms.stamped:
            return row
        times = zip(filled, self.terms.times, self.terms.scale, strict=True)
        return (*row, max(p[t] * s for p, t, s in times if p[t] is not None))

    def _match(self, side: int, own: Row, other: Row) -> bool:
        left, right = (own, other) if side == 0 else (other, own)
        # the caches are by key, in which null equals null; to = it equals nothing
        if any(left[a] != right[b] or (left[a] is None and not safe) for a, b, safe in self.terms.keys):
            return False
        for a, op, b in self.terms.residual:
            x, y = left[a], right[b]
            if x is None or y is None or not OPERATORS[op](ordered(x), ordered(y)):
                return False
        return True


class SqlRules(IntervalRules):
    """``TimeIntervalJoin`` by row time. Flink's ``leftTimerState`` is about right rows; here ``timers[1]`` is."""

    def __init__(self, terms: Terms) -> None:
        super().__init__(terms)
        start = 0 if terms.epoch else START
        self.expiration = [start, start]
        self.timers = Timers()
        self.armed: tuple[dict[Row, int], dict[Row, int]] = ({}, {})

    @property
    def now(self) -> int:
        return max(super().now, 0) if self.terms.epoch else super().now

    @property
    def output_watermark(self) -> int | None:
        """Late by what is still to be joined: the operator's rows may have times so far back."""
        held = super().output_watermark
        if held is None:
            return None
        return (held * self.terms.per_ms - max(self.reach)) // self.terms.per_ms

    def _expired(self, side: int) -> int:
        """The time up to which rows of a side are over."""
        return self.now if self.now in (START, END) else self.now - self.reach[side] - 1

    def _row(self, side: int, row: Row, time: int, key: Row) -> Iterator[Change]:
        other = 1 - side
        low, high = time - self.reach[other], time + self.reach[side]
        own = Entry(row, joined=False)
        if self.expiration[other] < high:
            self.expiration[other] = self._expired(other)
            buckets = self._buckets(other, key)
            for at in list(buckets):
                if low <= at <= high:
                    yield from self._join(side, own, buckets[at])
                if at <= self.expiration[other]:
                    yield from self._pads(other, buckets.pop(at))
        if self.now < high:
            self._keep(side, own, time, key)
            if key not in self.armed[side]:
                self._arm(side, time, key)
        else:
            yield from self._pads(side, [own])

    def _arm(self, side: int, time: int, key: Row) -> None:
        at = time + self.reach[side] + self.terms.min_cleanup + 1
        self.timers.register(at, key)
        self.armed[side][key] = at

    def _advance(self) -> Iterator[Change]:
        for time, key in self.timers.due(self.now):
            for side in (1, 0):
                if self.armed[side].get(key) == time:
                    self.expiration[side] = self._expired(side)
                    yield from self._sweep(side, key)

    def _sweep(self, side: int, key: Row) -> Iterator[Change]:
        buckets = self._buckets(side, key)
        earliest: int | None = None
        for at in list(buckets):
            if at <= self.expiration[side]:
                yield from self._pads(side, buckets.pop(at))
            elif earliest is None or at < earliest or (self.terms.epoch and earliest < 0):
                earliest = at
        if earliest is not None and (earliest > 0 or not self.terms.epoch):
            self._arm(side, earliest, key)
        else:
            del self.armed[side][key]
            buckets.clear()


class StrictRules(SqlRules):
    """SQL, but late rows are left out, and a row goes exactly when the watermark has passed its last partner."""

    def _row(self, side: int, row: Row, time: int, key: Row) -> Iterator[Change]:
        other = 1 - side
        low, high = time - self.reach[other], time + self.reach[side]
        own = Entry(row, joined=False)
        for at, bucket in self._buckets(other, key).items():
            if low <= at <= high:
                yield from self._join(side, own, bucket)
        if self.now <= high:
            self._keep(side, own, time, key)
        else:
            yield from self._pads(side, [own])

    def _advance(self) -> Iterator[Change]:
        for side in (0, 1):
            until = self._expired(side)
            for buckets in self.caches[side].values():
                for at in [at for at in buckets if at <= until]:
                    yield from self._pads(side, buckets.pop(at))


class StreamRules(IntervalRules):
    """``IntervalJoinOperator``: late rows never join; a bucket goes when the watermark reaches its end."""

    def __init__(self, terms: Terms) -> None:
        super().__init__(terms)
        self.timers = Timers(), Timers()

    def _row(self, side: int, row: Row, time: int, key: Row) -> Iterator[Change]:
        other = 1 - side
        own = Entry(row, joined=False)
        self._keep(side, own, time, key)
        for at, bucket in self._buckets(other, key).items():
            if time - self.reach[other] <= at <= time + self.reach[side]:
                yield from self._join(side, own, bucket)
        self.timers[side].register(time + max(self.reach[side], 0), key)

    def _advance(self) -> Iterator[Change]:
        for side in (0, 1):
            for time, key in self.timers[side].due(self.now):
                self._buckets(side, key).pop(time - max(self.reach[side], 0), None)
        yield from ()
