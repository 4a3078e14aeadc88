"""Random traces of rows and watermarks, and the interval joins they are for."""

from __future__ import annotations

import dataclasses
import functools
import random
from typing import Any, Literal

import pyarrow as pa

from gpu_ops.descriptions.by_time import IntervalJoin
from gpu_ops.descriptions.description import Emit
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.interval import Interval
from gpu_ops.descriptions.join import Join
from gpu_ops.descriptions.keys import Key
from oracle.interval_rules import WATERMARK, Clock, Terms, TimedEvent
from oracle.rules import Residual, where

HOWS = ("inner", "left", "right", "full")
KeyStyle = Literal["int", "string", "composite", "mixed_width", "none"]
ClockName = Literal["ms", "us", "mixed", "utc", "int64", "ns", "ms and ns"]
_CLOCKS: dict[ClockName, tuple[pa.DataType, pa.DataType]] = {
    "ms": (pa.timestamp("ms"), pa.timestamp("ms")),
    "us": (pa.timestamp("us"), pa.timestamp("us")),
    "mixed": (pa.timestamp("ms"), pa.timestamp("us")),
    "utc": (pa.timestamp("ms", "UTC"), pa.timestamp("ms", "UTC")),
    "int64": (pa.int64(), pa.int64()),
    "ns": (pa.timestamp("ns"), pa.timestamp("ns")),
    "ms and ns": (pa.timestamp("ms"), pa.timestamp("ns")),
}
BOUNDS = ((-20, 10), (0, 0), (-12, -3), (4, 15), (-30, 0), (0, 25), (-1, 1), (-5, -5), (6, 6))
"""Of either sign, symmetric or not, and points."""


@dataclasses.dataclass(frozen=True)
class IntervalShape:
    """An interval join and the inputs it is over.

    Attributes:
        how: one of `HOWS`, semi or anti.
        lower: milliseconds, least right time - left time.
        upper: milliseconds, greatest.
        inclusive: whether each of these matches.
        late: join, drop or tag.
        keyed: DataStream rules; with ``late="join"``, which they lack, tag.
        min_cleanup: milliseconds.
        keys: what kind of equality columns.
        null_safe: ``IS NOT DISTINCT FROM`` on the (last) key.
        residual: further conditions.
        clock: what kind of event times.
        stamped: with the later of both times as a further column.
    """

    how: str = "inner"
    lower: int = -20
    upper: int = 10
    inclusive: tuple[bool, bool] = (True, True)
    late: str = "join"
    keyed: bool = False
    min_cleanup: int = 0
    keys: KeyStyle = "int"
    null_safe: bool = False
    residual: tuple[Residual, ...] = ()
    clock: ClockName = "ms"
    stamped: bool = False

    def __str__(self) -> str:
        brackets = "[" if self.inclusive[0] else "(", "]" if self.inclusive[1] else ")"
        parts = ["keyed"] if self.keyed else []
        parts += [self.how, f"{brackets[0]}{self.lower},{self.upper}{brackets[1]}", self.late]
        parts += [f"cleanup{self.min_cleanup}"] if self.min_cleanup else []
        parts += [self.keys] if self.keys != "int" else []
        parts += ["null_safe"] if self.null_safe else []
        parts += ["residual"] if self.residual else []
        parts += [self.clock] if self.clock != "ms" else []
        return "-".join(parts + (["stamped"] if self.stamped else []))

    @property
    def pairs(self) -> tuple[str, ...]:
        """The equality columns, without the side's letter."""
        return {"composite": ("k", "g"), "none": ()}.get(self.keys, ("k",))

    def join(self, emit: Emit = "per_event", **options: Any) -> Join:
        """The description."""
        return IntervalJoin(
            how=self.how,  # type: ignore[arg-type]
            left=self._input(0),
            right=self._input(1),
            keys=tuple(Key(f"a_{c}", f"b_{c}", null_safe=self.null_safe and c == self.pairs[-1]) for c in self.pairs),
            where=where(self.residual, "A", "B"),
            emit=emit,
            interval=Interval(
                self.lower,
                self.upper,
                lower_inclusive=self.inclusive[0],
                upper_inclusive=self.inclusive[1],
                late=self.late,  # type: ignore[arg-type]
                keyed=self.keyed,
                min_cleanup_ms=self.min_cleanup,
                timestamp="t_out" if self.stamped else None,
            ),
            **options,
        )

    def terms(self) -> Terms:
        """The same for the transcription."""
        return Terms.of(self.join(), self.residual)

    def _input(self, side: int) -> Input:
        p = "ab"[side]
        kind = {"string": pa.string(), "composite": pa.int32(), "mixed_width": (pa.int32(), pa.int64())[side]}
        columns = [(f"{p}_k", kind.get(self.keys, pa.int64()))]
        columns += [(f"{p}_g", pa.string())] if self.keys == "composite" else []
        columns += [(f"{p}_t", _CLOCKS[self.clock][side]), (f"{p}_x", pa.int32()), (f"{p}_v", pa.string())]
        return Input("AB"[side], pa.schema(columns), event_time=f"{p}_t")


@dataclasses.dataclass(frozen=True)
class TimedRecipe:
    """How a trace is made.

    Attributes:
        events: length.
        seed: of all choices.
        start: the time it starts at, ms.
        keys: how many different ones.
        skew: share of rows with the hottest key.
        null_keys: share of null join keys.
        disorder: ms that rows come out of order by.
        late: share of rows from before the watermark.
        edges: share of rows whose time ends at the watermark, or just before or after it.
        watermarks: share of events that are watermarks.
        in_time: every row is above the watermark (in Flink a row at it may be too late for some).
    """

    events: int = 300
    seed: int = 0
    start: int = 1000
    keys: int = 5
    skew: float = 0.25
    null_keys: float = 0.06
    disorder: int = 15
    late: float = 0.1
    edges: float = 0.0
    watermarks: float = 0.15
    in_time: bool = False


class _Maker:
    """The state of one trace in the making."""

    def __init__(self, shape: IntervalShape, recipe: TimedRecipe) -> None:
        self.shape, self.recipe = shape, recipe
        self.rng = random.Random(f"{recipe.seed}-{shape.lower}-{shape.upper}-{shape.keys}-{shape.clock}")
        self.names = [s.schema.names for s in shape.join().inputs]
        self.now = recipe.start
        self.clock = Clock()
        self.times: tuple[list[int], list[int]] = ([], [])
        self.rows: tuple[list[Any], list[Any]] = ([], [])

    def make(self) -> list[TimedEvent]:
        events: list[TimedEvent] = []
        for _ in range(self.recipe.events):
            side = self.rng.randrange(2)
            if self.rng.random() < self.recipe.watermarks:
                events.append((side, WATERMARK, self._watermark(side)))
                self.clock.update(side, events[-1][2])
            else:
                self.now += self.rng.choice((0, 0, 1, 1, 2, 5)) if self.rng.random() < 0.99 else 150
                events.append((side, "+I", self._row(side, len(events))))
        return events

    def _watermark(self, side: int) -> int:
        """Mostly behind the rows by their disorder; now and then one that ends a row's time, or goes back."""
        rng = self.rng
        if self.times[side] and rng.random() < 0.3:
            reach = (self.shape.upper, -self.shape.lower)[side]
            ends = rng.choice(self.times[side][-12:]) + reach + rng.choice((0, 1, self.shape.min_cleanup + 1))
            if ends <= self.now:
                return ends
        if rng.random() < 0.05:
            return self.now - rng.randrange(200)
        return self.now - rng.choice((self.recipe.disorder, rng.randrange(self.recipe.disorder + 1)))

    def _row(self, side: int, number: int) -> tuple[Any, ...]:
        rng = self.rng
        if self.rows[side] and rng.random() < 0.05 and not self.recipe.in_time:
            return rng.choice(self.rows[side][-20:])  # the very same once more
        time = self._time(side)
        self.times[side].append(time)
        row = tuple(self._value(side, name[2:], time, number) for name in self.names[side])
        self.rows[side].append(row)
        return row

    def _time(self, side: int) -> int:
        rng, watermark = self.rng, self.clock.now
        known = watermark > self.recipe.start - 1000
        time = self.now - rng.randrange(self.recipe.disorder + 1)
        if known and self.recipe.edges and rng.random() < self.recipe.edges:
            return watermark - (self.shape.upper, -self.shape.lower)[side] + rng.choice((-1, 0, 0, 1))
        if known and not self.recipe.in_time and rng.random() < self.recipe.late:
            return watermark - rng.choice((0, 1, rng.randrange(60)))
        if self.times[1 - side] and rng.random() < 0.3:
            # at the very edge of another row's interval
            edge = rng.choice((self.shape.lower, self.shape.upper)) * (1 if side else -1)
            time = rng.choice(self.times[1 - side][-8:]) + edge + rng.choice((0, 0, -1, 1))
        return max(time, watermark + 1) if known and self.recipe.in_time else time

    def _value(self, side: int, column: str, time: int, number: int) -> Any:
        rng = self.rng
        if column == "t":
            kind = _CLOCKS[self.shape.clock][side]
            fine = {"us": 1000, "ns": 1_000_000}.get(kind.unit, 1) if pa.types.is_timestamp(kind) else 1
            return time * fine + rng.choice((0, 0, 1, fine - 1)) if fine > 1 else time
        if column == "v":
            return f"{'ab'[side]}{number}"
        if column in ("k", "g") and rng.random() < self.recipe.null_keys:
            return None
        if column == "k":
            n = 0 if rng.random() < self.recipe.skew else rng.randrange(self.recipe.keys)
            return f"k{n}" if self.shape.keys == "string" else n - 1
        if column == "g":
            return rng.choice("xy")
        return None if rng.random() < 0.1 else rng.randrange(-2, 5)


@functools.lru_cache(maxsize=64)
def _trace(shape: IntervalShape, recipe: TimedRecipe) -> tuple[TimedEvent, ...]:
    return tuple(_Maker(shape, recipe).make())


def timed_trace(shape: IntervalShape, recipe: TimedRecipe) -> tuple[TimedEvent, ...]:
    """A random trace; the same for all join types, late rows' fates and conditions."""
    plain = IntervalShape("inner", shape.lower, shape.upper, keys=shape.keys, clock=shape.clock)
    return _trace(dataclasses.replace(plain, min_cleanup=shape.min_cleanup), recipe)
