"""Random traces of inputs that fall silent and come back: the watermark, and what the join says under it.

The watermarks of the driver and the partitions of the state servers, without Spark: restarted and repeated at
random, over a state folder. What the watermark has to be is worked out from all that ever came, each time anew.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest
from state.support import PartitionState

from gpu_ops.descriptions.join import Join
from gpu_ops.spark.driver.watermarks import Watermarks
from gpu_ops.spark.wire.command import ApplyCommand, EventTimes, Wire
from gpu_ops.state.manifest import Manifest
from oracle.drive import Change, changes, difference
from oracle.interval_rules import IntervalRules
from oracle.interval_traces import BOUNDS, HOWS, IntervalShape

PARTITIONS = 2
COLUMNS = ("k", "t", "x", "v")
WIRE = Wire("__side", "__order", tuple((f"a_{c}", f"b_{c}", c) for c in COLUMNS))
WIRE_SCHEMA = pa.schema(
    [
        ("__side", pa.int8()),
        ("__order", pa.int64()),
        ("k", pa.int64()),
        ("t", pa.timestamp("ms")),
        ("x", pa.int32()),
        ("v", pa.string()),
    ]
)
Line = tuple[int, int, int, int, str]
"""Side, key, time, x and v."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """What came in a micro-batch, and its time, ms."""

    clock: int
    lines: tuple[Line, ...]

    def times(self, side: int) -> list[int]:
        return [line[2] for line in self.lines if line[0] == side]


def drawn(number: int) -> tuple[IntervalShape, Join, list[Batch]]:
    """A join with idle timeouts, and micro-batches in which one input or the other is silent for a while."""
    rng = random.Random(f"idle-{number}")
    shape = IntervalShape(
        HOWS[number % len(HOWS)], *rng.choice(BOUNDS), late=("join", "drop", "tag")[number // len(HOWS) % 3]
    )
    join = shape.join("per_batch")
    timeouts = rng.choice(((None, 100), (60, None), (100, 100), (40, 150)))
    left, right = (
        dataclasses.replace(source, delay_ms=rng.choice((0, 3, 12)), idle_timeout_ms=timeout)
        for source, timeout in zip(join.inputs, timeouts, strict=True)
    )
    clock, now, silent, batches = 5000, 1000, [0, 0], []
    for place in range(40):
        clock += rng.choice((0, 10, 30, 30, 60, 99, 100, 101))
        now += rng.choice((0, 3, 10, 40))
        lines: list[Line] = []
        for side in (0, 1):
            silent[side] -= 1
            if silent[side] < -4 and rng.random() < 0.25:
                silent[side] = rng.randrange(2, 7)
            for row in range(0 if silent[side] > 0 else rng.choice((0, 1, 2, 4))):
                # one that comes back may be far behind
                time = now - rng.choice((0, 1, 5, 15, 15, 100 if silent[side] > -2 else 20))
                lines.append((side, rng.randrange(5), time, 0, f"{'ab'[side]}{place}.{row}"))
        rng.shuffle(lines)
        batches.append(Batch(clock, tuple(lines)))
    return shape, dataclasses.replace(join, left=left, right=right), batches


@dataclasses.dataclass
class History:
    """All that ever came, and what the watermark has to be by that.

    Attributes:
        join: says delays and timeouts.
        batches: the micro-batches so far.
        unseen: how many of them the driver had not seen when it was started.
        begun: when that was.
        watermark: the one of the last micro-batch.
    """

    join: Join
    begun: int
    batches: list[Batch] = dataclasses.field(default_factory=list)
    unseen: int = 0
    watermark: int | None = None

    def restarted(self, begun: int, unseen: int) -> None:
        self.begun, self.unseen = begun, unseen

    def advance(self, clock: int) -> bool:
        """A micro-batch begins; whether the watermark moves."""
        own = []
        for side, source in enumerate(self.join.inputs):
            heard = max([self.begun, *(batch.clock for batch in self.batches[self.unseen :] if batch.times(side))])
            if source.idle_timeout_ms is not None and clock - heard >= source.idle_timeout_ms:
                continue
            seen = [time for batch in self.batches for time in batch.times(side)]
            own.append(max(seen) - (source.delay_ms or 0) if seen else None)
        known, before = [w for w in own if w is not None], self.watermark
        if known and len(known) == len(own):
            self.watermark = min(known) if before is None else max(before, min(known))
        return self.watermark != before


class Servers:
    """The partitions, and the driver that keeps their watermark."""

    def __init__(self, join: Join, state: Path) -> None:
        self.join, self.state = join, str(state)
        self.restart()

    def restart(self) -> None:
        """All processes anew."""
        self.marks = Watermarks(self.join, Manifest(self.join.to_json(), PARTITIONS, "q"), self.state)
        command = ApplyCommand(
            "j", self.state, self.join.to_json(), "q", 0, 0, PARTITIONS, "cpu", WIRE, {"snapshot_every": 3}
        )
        self.parts = [PartitionState(dataclasses.replace(command, partition=n)) for n in range(PARTITIONS)]

    def apply(self, batch_id: int, batch: Batch, partition: int, clock: int) -> list[Change]:
        """One partition's part of a micro-batch, as its task has it done."""
        moment = self.marks.begin(batch_id, clock)
        own = [(n, line) for n, line in enumerate(batch.lines) if line[1] % PARTITIONS == partition]
        rows = [dict(zip(WIRE_SCHEMA.names, (line[0], n, *line[1:]), strict=True)) for n, line in own]
        done = self.parts[partition].apply(
            batch_id,
            pa.Table.from_pylist(rows, WIRE_SCHEMA),
            WIRE,
            watermark=moment.watermark,
            clock_ms=moment.clock_ms,
        )
        sides = ("left", "right")
        latest = done.latest
        came = tuple(bool(done.metrics[f"{side}_rows_in"]) for side in sides)
        self.marks.report(batch_id, partition, EventTimes(latest, came))  # type: ignore[arg-type]
        return changes(done.changelog)


def check(number: int, state: Path) -> Counter[str]:
    """Every micro-batch has the watermark that it should, and says what the rules say under it; what all happened."""
    shape, join, batches = drawn(number)
    rng = random.Random(number)
    rules: list[IntervalRules] = [shape.terms().rules() for _ in range(PARTITIONS)]
    servers, met, history = Servers(join, state), Counter[str](), History(join, batches[0].clock)
    for place, given in enumerate(batches):
        before = history.batches[-1].clock if place else given.clock
        batch, last = dataclasses.replace(given, clock=max(given.clock, before)), place - 1  # it is not set back
        if place and rng.random() < 0.15:  # and with the micro-batch before this one to be repeated
            servers.restart()
            for partition in range(PARTITIONS):
                assert servers.marks.begin(last, batch.clock).watermark == history.watermark, f"{number}: {last} again"
                servers.apply(last, history.batches[last], partition, batch.clock)
            history.batches[last] = dataclasses.replace(history.batches[last], clock=batch.clock)
            history.restarted(batch.clock, last)
            met["repeated"] += 1
        elif rng.random() < 0.15:
            servers.restart()
            history.restarted(batch.clock, place)
            met["restarted"] += 1
        met["moved"] += history.advance(batch.clock)
        now = history.watermark
        for _ in range(rng.choice((1, 1, 2))):
            assert servers.marks.begin(place, batch.clock).watermark == now, f"{number}: {place} after {history}"
        answers: dict[int, list[Change]] = {}
        for partition in rng.sample(range(PARTITIONS), PARTITIONS):
            answers[partition] = servers.apply(place, batch, partition, batch.clock)
            if rng.random() < 0.08:  # some partitions have done it, others have not: it goes by the same watermark
                servers.restart()
                batch = dataclasses.replace(batch, clock=batch.clock + 7)
                history.restarted(batch.clock, place)
                met["halfway"] += 1
                for again, said in answers.items():
                    assert servers.apply(place, batch, again, batch.clock) == said
        history.batches.append(batch)
        for partition, rule in enumerate(rules):
            want = Counter(rule.advance(now, now) if now is not None else [])
            for side, *values in batch.lines:
                if values[0] % PARTITIONS == partition:
                    want += Counter(rule.process((side, "+I", tuple(values))))
            wrong = difference(want, Counter(answers[partition]))
            assert not wrong, f"{number}: partition {partition}, micro-batch {place}, watermark {now}:\n{wrong}"
            met["said"] += want.total()
    met["late"] = sum(sum(rule.late) for rule in rules)
    return met


@pytest.mark.one_in(4, all=2)
@pytest.mark.parametrize("number", range(6))
def test_inputs_that_fall_silent_and_come_back(number: int, tmp_path: Path) -> None:
    assert check(number, tmp_path)["moved"] > 3


@pytest.mark.slow
def test_many_inputs_that_fall_silent(tmp_path: Path) -> None:
    met: Counter[str] = Counter()
    for number in range(12, 500):
        met += check(number, tmp_path / str(number))
    assert min(met[what] for what in ("repeated", "restarted", "halfway", "late", "said", "moved")) > 100
