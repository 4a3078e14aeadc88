"""Flink's event-time temporal join, one event at a time, in plain Python: an expectation for every single event.

Transcribed from ``TemporalRowTimeJoinOperator`` of 2.3.0, with its timers: a key has one, the smallest time that was
asked for since it last fired; left rows up to the watermark come out when it fires, and only then old versions go.
"""

from __future__ import annotations

import bisect
import dataclasses
import random
from collections.abc import Sequence
from typing import Any

from gpu_ops.descriptions.by_time import TemporalJoin
from oracle.drive import Change, Row
from oracle.interval_rules import LATE, START, WATERMARK, Clock, Terms, TimedEvent
from oracle.interval_traces import IntervalShape
from oracle.rules import OPERATORS


def temporal_join(shape: IntervalShape, *, upserts: bool = False, ttl: int | None = None) -> TemporalJoin:
    """The temporal join of an interval join's inputs; its bounds mean nothing.

    Args:
        shape: of the interval join.
        upserts: the right input has a unique key and no row kinds.
        ttl: its state TTL, ms.
    """
    join = shape.join("per_event")
    keys = tuple(key.right for key in join.keys)
    more: dict[str, Any] = {"unique_key": keys} if upserts else {"row_kind": "row_kind"}
    return TemporalJoin(
        shape.how,
        join.left,
        dataclasses.replace(join.right, **more),
        join.keys,
        join.where,
        suffixes=join.suffixes,
        late=shape.late,
        ttl_ms=ttl,
    )


KINDS = ("+I", "+I", "+U", "+U", "-D", "-U")


def with_kinds(
    events: Sequence[TimedEvent], seed: int, *, kinds: Sequence[str] = KINDS, null_keys: bool = True
) -> list[TimedEvent]:
    """A trace of insertions, whose right rows get one of these row kinds; those without a key may be left out."""
    rng = random.Random(seed)
    found: list[TimedEvent] = []
    for side, kind, value in events:
        if side == 0 or kind == WATERMARK:
            found.append((side, kind, value))
        elif null_keys or None not in value[:2]:
            found.append((side, rng.choice(kinds), value))
    return found


class Key:
    """The state of one key."""

    def __init__(self) -> None:
        self.left: list[Row] = []
        self.right: dict[int, tuple[bool, Row]] = {}
        """By time: whether there is a version, and it."""
        self.timer: int | None = None
        """The one that the operator knows of."""
        self.timers: set[int] = set()
        """Those that are registered."""
        self.cleanup: int | None = None

    def register(self, time: int) -> None:
        """Register the timer, if none is registered that is earlier."""
        if self.timer is not None and self.timer <= time:
            return
        self.timers.discard(time if self.timer is None else self.timer)
        self.timer = time
        self.timers.add(time)


class TemporalRules:
    """The operator.

    Args:
        terms: of an interval join of the same inputs.
        ttl: the state TTL, ms.
        flink: timers of keys that were cleaned up stay registered, as in Flink.

    Attributes:
        now: the clock, ms.
    """

    def __init__(self, terms: Terms, ttl: int | None = None, *, flink: bool = False) -> None:
        self.terms, self.ttl, self.flink, self.now = terms, ttl, flink, 0
        self.clock, self.keys, self.late = Clock(), dict[Row, Key](), [0, 0]

    def tick(self, now: int) -> None:
        """The clock moves on."""
        self.now = now
        for key in self.keys.values():
            if key.cleanup is not None and key.cleanup <= now:
                key.left, key.right, key.timer, key.cleanup = [], {}, None, None
                if not self.flink:
                    key.timers = set()

    def process(self, event: TimedEvent) -> list[Change]:
        """What this event makes the operator emit."""
        side, kind, value = event
        if kind == WATERMARK:
            return self._advance() if self.clock.update(side, value) else []
        terms = self.terms
        time = value[terms.times[side]] * terms.scale[side]
        late = self.clock.now > START and time < self.clock.now * terms.per_ms
        self.late[side] += late
        if side == 0 and late and terms.late != "join":
            return [(LATE, (*value, *(None,) * terms.widths[1]))] if terms.late == "tag" else []
        if kind == "-U":
            return []
        columns = tuple(value[key[side]] for key in terms.keys)
        if any(v is None and not key[2] for v, key in zip(columns, terms.keys, strict=True)) and side == 1:
            return []  # a key that nothing equals
        key = self.keys.setdefault(columns, Key())
        if side == 0:
            key.left.append(value)
        else:
            key.right[time] = kind != "-D", value
        key.register(time)
        self._touch(key)
        return []

    def _touch(self, key: Key) -> None:
        if self.ttl is None:
            return
        latest = self.now + self.ttl * 3 // 2  # beyond it is what a clock has set that was ahead
        if key.cleanup is None or self.now + self.ttl > key.cleanup or key.cleanup > latest:
            key.cleanup = latest

    def _advance(self) -> list[Change]:
        now, found = self.clock.now * self.terms.per_ms, list[Change]()
        for key in self.keys.values():
            while key.timers and min(key.timers) <= now:
                key.timers.remove(min(key.timers))
                found += self._fire(key, now)
        return found

    def _fire(self, key: Key, now: int) -> list[Change]:
        terms, found = self.terms, list[Change]()
        times = sorted(key.right)
        waiting = [row for row in key.left if self._time(row) > now]
        for row in key.left:
            if self._time(row) > now:
                continue
            at = bisect.bisect_right(times, self._time(row)) - 1
            there, version = key.right[times[at]] if at >= 0 else (False, ())
            if there and all(
                row[a] is not None and version[b] is not None and OPERATORS[op](row[a], version[b])
                for a, op, b in terms.residual
            ):
                found.append(("+I", (*row, *version)))
            elif terms.how == "left":
                found.append(("+I", (*row, *(None,) * terms.widths[1])))
        kept = max(bisect.bisect_right(times, now) - 1, 0)
        for time in times[:kept]:
            del key.right[time]
        key.left, key.timer = waiting, min((self._time(row) for row in waiting), default=None)
        key.timers |= set() if key.timer is None else {key.timer}
        if key.left or key.right:
            self._touch(key)
        else:
            key.cleanup = None
        return found

    def _time(self, row: Row) -> int:
        return int(row[self.terms.times[0]]) * self.terms.scale[0]
