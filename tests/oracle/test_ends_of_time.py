"""Operators by time with times near both ends of int64, against definitions in Python's integers, which have no ends.

Every operator has numbers that stand for "before all" and "after all", and differences of times that int64 does not
hold: with times of the years 1677 and 2262 in nanoseconds, and with milliseconds that are no dates at all.
"""

from __future__ import annotations

import dataclasses
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pytest

from gpu_ops.descriptions.aggregate import Aggregate
from gpu_ops.descriptions.by_time import Asof, AsofJoin, IntervalJoin, TemporalJoin
from gpu_ops.descriptions.description import Description
from gpu_ops.descriptions.groups import Top, parse_order
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.interval import Interval
from gpu_ops.descriptions.join import Join
from gpu_ops.descriptions.keys import Key
from gpu_ops.descriptions.kinds import from_json
from gpu_ops.descriptions.times import units_per_ms
from oracle import test_asof_at_watermark, test_interval, test_temporal
from oracle.asof_rules import ByHand, described, trace
from oracle.drive import Backend, Row, by_event, changes, cuts, difference, fold, run
from oracle.interval_drive import ends
from oracle.interval_traces import ClockName, IntervalShape, TimedRecipe, timed_trace
from oracle.temporal_rules import temporal_join, with_kinds

FIRST, LAST = -(1 << 63) + 2, (1 << 63) - 2
"""The first and the last time that a row may have."""
UNITS: dict[str, pa.DataType] = {"int64": pa.int64(), "us": pa.timestamp("us"), "ns": pa.timestamp("ns")}


def some_times(rng: random.Random, count: int) -> list[int]:
    """Different times in ascending order: at both ends, around 1970, and anywhere."""
    found: set[int] = set()
    while len(found) < count:
        near = rng.choice((FIRST, FIRST, LAST, LAST, 0, -1, rng.randint(FIRST, LAST), FIRST // 2, LAST // 2 + 1))
        found.add(min(max(near + rng.choice((-2, -1, 0, 1, 2, rng.randint(-3000, 3000))), FIRST), LAST))
    return sorted(found)


# --- traces in the usual generators, moved to the ends -----------------------------------------


@pytest.mark.one_in(6)
@pytest.mark.parametrize("end", [0, 1], ids=["first", "last"])
@pytest.mark.parametrize("clock", UNITS)
def test_rows_and_late_rows_by_the_rules_near_either_end(clock: ClockName, end: int, backend: Backend) -> None:
    """Interval joins, temporal joins and ASOF joins at the watermark, event by event as everywhere else."""
    per_ms = units_per_ms(UNITS[clock])
    start = (-((1 << 63) // per_ms) + 1500, (1 << 63) // per_ms - 2000)[end]
    split = (20, 60)

    def events(shape: IntervalShape, seed: int) -> Any:
        return timed_trace(shape, TimedRecipe(90, seed, start=start, late=0.2))

    for shape in (
        IntervalShape("full", clock=clock),
        IntervalShape("semi", late="drop", clock=clock),
        IntervalShape("anti", late="tag", clock=clock),
        IntervalShape("inner", -9, 9, keyed=True, late="tag", clock=clock, stamped=True),
        IntervalShape("left", -9, 9, min_cleanup=30, clock=clock),
    ):
        test_interval.check(shape, ends(events(shape, 1)), split, backend, "per_event")
    for late in ("join", "drop", "tag"):
        shape = IntervalShape("left", late=late, clock=clock)
        test_temporal.check(shape, temporal_join(shape), ends(with_kinds(events(shape, 2), 2)), split, backend)
    for direction, tolerance, exact in (("nearest", None, False), ("nearest", 5, True), ("forward", 7, True)):
        shape, asof = IntervalShape("left", clock=clock), Asof(direction, tolerance, exact)  # type: ignore[arg-type]
        seen = ends(list(dict.fromkeys(e for e in events(shape, 3) if e[1] != "W" or e[2] > start - 1000)))
        test_asof_at_watermark.check_shape(asof, shape, seen, split, backend)


# --- times anywhere, none late, against definitions --------------------------------------------


@dataclasses.dataclass(frozen=True)
class Trace:
    """Rows (key, time, number) of two inputs and watermarks, no row before or at the watermark in force."""

    unit: str
    batches: list[tuple[int | None, list[Row], list[Row]]]

    @property
    def rows(self) -> tuple[list[Row], list[Row]]:
        """All rows of either input, as they come."""
        left, right = ([row for batch in self.batches for row in batch[side]] for side in (1, 2))
        return left, right

    def source(self, side: int, **more: Any) -> Input:
        """An input of these rows."""
        p = "lr"[side]
        columns = [(f"{p}k", pa.int64()), (f"{p}t", UNITS[self.unit]), (f"{p}n", pa.int64())]
        return Input(p, pa.schema(columns), event_time=f"{p}t", **more)

    def through(self, join: Description, backend: Backend, kinds: Callable[[Row], str] | None = None) -> list[Any]:
        """What an engine makes of them, in micro-batches, to the end of input; a restart and a discard on the way."""
        found, state = [], None
        for at, (watermark, *sides) in enumerate(self.batches):
            given = []
            for source, rows in zip(join.inputs, sides, strict=False):
                columns = list(zip(*rows, strict=True)) or [()] * 3
                arrays = [pa.array(c, pa.int64()).cast(f.type) for c, f in zip(columns, source.schema, strict=True)]
                table = pa.table(arrays, schema=source.schema)
                if source.row_kind is not None and kinds is not None:
                    table = table.append_column(source.row_kind, pa.array(list(map(kinds, rows)), pa.string()))
                given.append(table)
            with backend.engine(from_json(join.to_json())) as engine:
                if state is not None:
                    engine.restore(state)
                engine.prepare(*given, watermark=watermark)
                engine.discard()
                found += changes(engine.process(*given, watermark=watermark))
                if at == len(self.batches) - 1:
                    found += changes(engine.finish())
                state = engine.snapshot()
        return found


def some_trace(seed: int, unit: str) -> Trace:
    """A random one, with ties, of few keys."""
    rng, per_ms = random.Random(seed), units_per_ms(UNITS[unit])
    times = some_times(rng, 16)
    marks = [None, *sorted(time // per_ms for time in rng.sample(times, 4))]
    batches, number = [], 0
    for mark in marks:
        left = [time for time in times if mark is None or time > mark * per_ms]
        sides: tuple[list[Row], list[Row]] = ([], [])
        for _ in range(rng.randrange(14) if left else 0):
            number += 1
            sides[rng.randrange(2)].append((rng.randrange(2), rng.choice(left), number))
        usable = None if mark is None or mark <= FIRST else mark
        batches.append((usable, *sides))
    return Trace(unit, batches)


SEEDS = int(os.environ.get("GPU_JOIN_ENDS_SEED", "0")), int(os.environ.get("GPU_JOIN_ENDS_TRACES", "2"))
"""The first seed, and how many traces of each unit."""


def traces() -> Iterator[Trace]:
    """A few of each unit."""
    return (some_trace(seed, unit) for seed in range(SEEDS[0], sum(SEEDS)) for unit in UNITS)


def nearest(asof: Asof, per_ms: int, left: Row, rights: Sequence[Row]) -> Row | None:
    """The right row that a left row meets: of one time the one that came last."""
    best: tuple[Any, ...] | None = None
    for at, right in enumerate(rights):
        apart = left[1] - right[1]
        fits = right[0] == left[0] and (asof.exact or apart != 0)
        fits &= asof.direction == "nearest" or apart == 0 or (apart > 0) == (asof.direction == "backward")
        fits &= asof.tolerance_ms is None or abs(apart) <= asof.tolerance_ms * per_ms
        rank = (-abs(apart), apart > 0, at, right)
        if fits and (best is None or rank > best):
            best = rank
    return None if best is None else best[3]


def beside(left: Row, right: Row | None) -> Row:
    return (*left, *(right or (None,) * 3))


@pytest.mark.one_in(8, all=4)
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "not exact"])
@pytest.mark.parametrize("direction", ["backward", "forward", "nearest"])
def test_asof_at_the_watermark_is_what_the_definition_says(direction: Any, exact: bool, backend: Backend) -> None:
    for number, made in enumerate(traces()):
        per_ms = units_per_ms(UNITS[made.unit])
        asof = Asof(direction, (None, 3, (1 << 60) // per_ms - 1)[number % 3], exact)
        left, right = made.rows
        wanted = Counter(beside(row, nearest(asof, per_ms, row, right)) for row in left)
        join = AsofJoin("left", made.source(0), made.source(1), KEYS, emit="at_watermark", asof=asof)
        assert fold(made.through(join, backend)) == wanted, (made, asof)


@pytest.mark.one_in(8, all=4)
@pytest.mark.parametrize("late", ["join", "drop"])
@pytest.mark.parametrize("how", ["full", "semi", "anti"])
def test_interval_joins_are_what_the_definition_says(how: Any, late: Any, backend: Backend) -> None:
    for number, made in enumerate(traces()):
        per_ms, (left, right) = units_per_ms(UNITS[made.unit]), made.rows
        far = (1 << 60) // per_ms - 1
        lower, upper = ((-2, 3), (0, far), (-far, far), (-far, -1), (1, 2000))[number % 5]
        pairs = [
            (a, b) for a in left for b in right if a[0] == b[0] and lower * per_ms <= b[1] - a[1] <= upper * per_ms
        ]
        met = {a for a, _ in pairs}, {b for _, b in pairs}
        alone = [row for row in left if row not in met[0]]
        if how == "full":
            wanted = [beside(a, b) for a, b in pairs] + [beside(a, None) for a in alone]
            wanted += [(None, None, None, *b) for b in right if b not in met[1]]
        else:
            wanted = alone if how == "anti" else [row for row in left if row in met[0]]
        join = IntervalJoin(
            how, made.source(0), made.source(1), KEYS, interval=Interval(lower, upper, late=late), emit="per_event"
        )
        assert fold(made.through(join, backend)) == Counter(wanted), (made, lower, upper)


@pytest.mark.parametrize("mark", [-(1 << 62), 1 << 62])
def test_a_watermark_of_just_that_time_is_known_after_a_restart(mark: int, backend: Backend) -> None:
    """An earlier version has this number for a time before or after all; state of today says that it is a time."""
    made = Trace("int64", [(None, [], []), (mark, [(0, mark + 5, 1)], []), (mark + 1, [], [(0, mark + 5, 2)])])
    join = IntervalJoin("full", made.source(0), made.source(1), KEYS, interval=Interval(-1, 1), emit="per_event")
    assert fold(made.through(join, backend)) == Counter([(0, mark + 5, 1, 0, mark + 5, 2)])


def test_temporal_joins_are_what_the_definition_says(backend: Backend) -> None:
    for made in traces():
        left, right = made.rows

        def kind(row: Row) -> str:
            return "-D" if row[2] % 4 == 0 else "+I"

        wanted: Counter[Row] = Counter()
        for row in left:
            known = [(b[1], at, b) for at, b in enumerate(right) if b[0] == row[0] and b[1] <= row[1]]
            valid = max(known)[2] if known else None
            wanted[beside(row, valid if valid is not None and kind(valid) == "+I" else None)] += 1
        join = TemporalJoin("left", made.source(0), made.source(1, row_kind="op"), KEYS)
        assert fold(made.through(join, backend, kind)) == wanted, made


def test_windows_close_when_the_watermark_reaches_their_ends(backend: Backend) -> None:
    for made in traces():
        wanted = Counter((time, key) for batch in made.batches for key, time, _ in batch[1])
        by = Aggregate.of(made.source(0), ("lt", "lk"), {"n": "count(*)", "t": "max(ln)"}, "at_watermark", "lt")
        found = [row[:3] for _, row in made.through(by, backend)]
        assert sorted(found) == sorted((time, key, n) for (time, key), n in wanted.items()), made


KEYS = (Key("lk", "rk"),)


@pytest.mark.one_in(8, all=4)
@pytest.mark.parametrize("emit", ["per_event", "per_batch", "at_end"])
@pytest.mark.parametrize("direction", ["backward", "forward", "nearest"])
def test_asof_joins_of_changelogs_are_what_the_definition_says(direction: Any, emit: str, backend: Backend) -> None:
    """Event by event by hand, as elsewhere, with the 24 times of a trace moved anywhere."""
    for seed in range(SEEDS[0], sum(SEEDS)):
        times = some_times(random.Random(seed), 24)
        asof = Asof(direction, (None, 4, 1 << 59)[seed % 3], exact=bool(seed % 2))
        join = described("left", asof, emit, ties="v" if seed % 2 else None)
        events = [
            (side, kind, (row[0], None if row[1] is None else times[row[1]], row[2]))
            for side, kind, row in trace(join, 60, seed)
        ]
        if join.right.sequence_by:  # a micro-batch's changes come in its order
            events = [event for event in events if event[0] == 0 or event[1] == "+I"]
        hand, held = ByHand(join), Counter[Row]()
        with backend.engine(join) as engine:
            for cut in cuts(join, events, 1 if join.right.sequence_by else (1, 9, 30)):
                found, position, _ = run(engine, cut)
                fold(found, held)
                got = by_event(found, position)
                for at in range(cut.start, cut.stop):
                    wanted = Counter(hand.apply(events[at]))
                    if emit == "per_event":
                        wrong = difference(wanted, got.get(at, Counter()))
                        assert not wrong, f"{asof}, event {at} {events[at]}:\n{wrong}"
                assert emit == "at_end" or held == hand.result()
            if emit == "at_end":
                fold(changes(engine.finish()), held)
                assert held == hand.result()


@pytest.mark.parametrize("order", ["t", "t DESC", "t NULLS LAST", "t DESC NULLS FIRST"])
def test_top_by_numbers_and_times_at_the_ends(order: str, backend: Backend) -> None:
    descending, usual = "DESC" in order, "NULLS" not in order
    first = not descending if usual else "FIRST" in order
    for seed, kind in enumerate((pa.int64(), pa.timestamp("ns"), pa.timestamp("us"), pa.uint64())):
        rng = random.Random(f"{order}-{seed}")
        low, high = (0, 1 << 64) if kind == pa.uint64() else (-(1 << 63), 1 << 63)
        edge = [low, low + 1, low + 2, low + 3, high - 3, high - 2, high - 1]
        values = [rng.choice([*edge, *edge, 0, 5, None]) for _ in range(60)]
        schema = pa.schema([("g", pa.int64()), ("t", kind), ("n", pa.int64())])
        held: list[tuple[int, int | None, int]] = []
        with backend.engine(Top(Input("rows", schema, row_kind="op"), ("g",), parse_order(order), 3)) as engine:
            shown: Counter[Row] = Counter()
            for start in range(0, 60, 12):
                ops = []
                for number in range(start, start + 12):
                    if held and rng.random() < 0.3:
                        ops.append(("-D", held.pop(rng.randrange(len(held)))))
                    held.append((number % 2, values[number], number))
                    ops.append(("+I", held[-1]))
                g, t, n = zip(*(row for _, row in ops), strict=True)
                whole = pa.array(t, kind if kind == pa.uint64() else pa.int64())
                table = pa.table([pa.array(g), whole.cast(kind), pa.array(n)], schema=schema)
                fold(changes(engine.process(table.append_column("op", pa.array([op for op, _ in ops])))), shown)

                def place(row: tuple[int, int | None, int]) -> tuple[bool, int, int]:
                    value = row[1]
                    return (value is None) is not first, 0 if value is None else -value if descending else value, row[2]

                groups = ([row for row in held if row[0] == group] for group in (0, 1))
                assert shown == Counter(row for own in groups for row in sorted(own, key=place)[:3]), order


@pytest.mark.parametrize("start", [0, (1 << 63) - 60])
def test_state_expires_by_a_clock_near_its_end(start: int, backend: Backend) -> None:
    """A row is gone once its last write and the TTL are no later than the clock, which may be as late as it can be."""
    schemas = [pa.schema([(f"{p}k", pa.int64()), (f"{p}n", pa.int64())]) for p in "lr"]
    left, right = (Input(s.names[0][0], s, ttl_ms=10) for s in schemas)
    groups = Aggregate.of(dataclasses.replace(left, ttl_ms=10), ("lk",), {"n": "count(*)"}, "per_batch")
    top = Top(left, ("lk",), parse_order("ln"), 5, number="place")
    timed = [dataclasses.replace(s, ttl_ms=None, event_time=s.schema.names[1]) for s in (left, right)]
    versions = TemporalJoin("inner", timed[0], timed[1], KEYS, ttl_ms=10)
    one = [pa.table([[1], [5]], schema=schema) for schema in schemas]
    for clocks, kept in (((start, start + 9), True), ((start, start + 10), False), ((start, start + 59), False)):
        with backend.engine(Join("inner", left, right, KEYS)) as engine:
            engine.process(one[0], None, clock_ms=clocks[0])
            assert engine.process(None, one[1], clock_ms=clocks[1]).num_rows == kept
        for grouped, name in ((groups, "n"), (top, "place")):
            with backend.engine(grouped) as engine:
                engine.process(one[0], clock_ms=clocks[0])
                found = engine.process(one[0], clock_ms=clocks[1]).to_pylist()
                assert found[-1][name] == 1 + kept
        for more in (0, 6):  # its clean-up time is 1.5 TTL away
            with backend.engine(versions) as engine:
                engine.process(None, one[1], clock_ms=clocks[0], watermark=0)
                engine.process(one[0], None, clock_ms=min(clocks[1] + more, (1 << 63) - 1), watermark=1)
                rows = engine.process(None, None, clock_ms=min(clocks[1] + more, (1 << 63) - 1), watermark=9).num_rows
                assert rows == (clocks[1] + more - clocks[0] < 15)
