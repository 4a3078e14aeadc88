"""Random traces of final windows over a union of streams with a watermark each, without Spark.

The driver's watermarks and the partitions of the state servers, killed, repeated and cut anew at random, over a state
folder; what comes out is worked out from scratch (`oracle.union_windows`).
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from state.support import PartitionState

from gpu_ops import JoinEngine
from gpu_ops.descriptions.aggregate import Aggregate
from gpu_ops.descriptions.by_time import IntervalJoin
from gpu_ops.descriptions.description import Description
from gpu_ops.descriptions.inputs import Input, UnionParts
from gpu_ops.descriptions.interval import Interval
from gpu_ops.descriptions.keys import Key
from gpu_ops.descriptions.kinds import from_json
from gpu_ops.descriptions.sessions import SessionAggregate
from gpu_ops.errors import BadInputError, DescriptionError
from gpu_ops.spark.driver.watermarks import Watermarks
from gpu_ops.spark.server import rescale
from gpu_ops.spark.wire.command import ApplyCommand, EventTimes, Wire
from gpu_ops.spark.wire.hashes import partition_of
from gpu_ops.state.address import StateAddress
from gpu_ops.state.durable import Times
from gpu_ops.state.manifest import Manifest
from oracle.union_windows import Line, Out, UnionWindows

TIME = pa.timestamp("ms")
SCHEMA = pa.schema([("k", pa.string()), ("t", TIME), ("x", pa.int64()), ("part", pa.int32())])
WINDOWS = pa.schema([*SCHEMA, ("start", TIME), ("end", TIME)])
ZERO = dt.datetime(1970, 1, 1)
CALLS = {"n": "count(*)", "s": "sum(x)"}


def described(delays: tuple[int | None, ...], size: int, slide: int | None, *, changes: bool) -> Description:
    schema = SCHEMA if slide is None else WINDOWS
    source = Input("u", schema, event_time="t", parts=UnionParts("part", delays), row_kind="op" if changes else None)
    if slide is None:
        return SessionAggregate.of_gap(source, ("k",), size, CALLS, "at_watermark", start="start", end="end")
    return Aggregate.of(source, ("k", "start", "end"), CALLS, "at_watermark", "end")


def rows_of(description: Description, lines: list[Line], slide: int | None) -> pa.Table:
    """The union's rows with their windows, as SQL makes them below the operator; the order in which they came last."""
    rows = []
    for place, (kind, part, key, time, value) in enumerate(lines):
        start = 0 if slide is None else time // slide * slide
        row = {"op": kind, "k": key, "t": time, "x": value, "part": part, "start": start, "end": start + (slide or 0)}
        rows.append({**row, "__side": 0, "__order": place})
    source = description.inputs[0]
    kinds = [] if source.row_kind is None else [pa.field("op", pa.string())]
    numbers = [pa.field("__side", pa.int8()), pa.field("__order", pa.int64())]
    return pa.Table.from_pylist(rows, pa.schema([*source.schema, *kinds, *numbers]))


def told(changelog: pa.Table) -> Counter[Out]:
    found = Counter[Out]()
    for row in changelog.to_pylist():
        assert row["row_kind"] == "+I"
        start, end = (
            (row[name] - dt.datetime(1970, 1, 1)) // dt.timedelta(milliseconds=1) for name in ("start", "end")
        )
        found[row["k"], start, end, row["n"], row["s"]] += 1
    return found


def drawn(number: int) -> tuple[UnionWindows, bool, list[list[Line]]]:
    """A query, whether its parts bring changes, and micro-batches in which parts are behind others, or silent."""
    rng = random.Random(f"union-{number}")
    delays = [rng.choice((0, 3, 12, 40)) for _ in range(rng.choice((2, 2, 3, 4)))]
    size = rng.choice((5, 10))
    static = rng.random() < 0.3
    law = UnionWindows([None if static and not part else delay for part, delay in enumerate(delays)], size, None)
    law.slide = rng.choice((None, size))
    changes, behind = rng.random() < 0.4, [rng.choice((0, 0, 10, 30)) for _ in delays]
    batches, live = list[list[Line]](), list[Line]()
    for place in range(24):
        lines = list[Line]()
        for part in range(len(delays)):
            if (static and not part and place) or rng.random() < 0.2:
                continue
            for _ in range(rng.choice((1, 3, 5))):
                if changes and live and rng.random() < 0.2:
                    _, *old = live.pop(rng.randrange(len(live)))
                    lines.append(("-D", *old))
                    continue
                time = max(0, place * 8 + rng.randrange(8) - behind[part] - rng.choice((0, 0, 0, 2, 9, 60)))
                lines.append(("+I", part, rng.choice(("a", "b", "c", None)), time, rng.randrange(9)))
        live += [line for line in lines if line[0] == "+I"]
        batches.append(lines)
    return law, changes, batches


@pytest.mark.parametrize("number", range(4))
def test_an_engine_goes_by_them_itself(number: int) -> None:
    """Without a driver that knows all partitions; over snapshots, and micro-batches that are discarded."""
    law, changes, batches = drawn(number)
    description, state = described(tuple(law.delays), law.size, law.slide, changes=changes), None
    for start in range(0, len(batches), 5):
        engine = JoinEngine(from_json(description.to_json()), "cpu", tiny=True)
        if state is not None:
            engine.restore(state)
        for lines in batches[start : start + 5]:
            rows = rows_of(description, lines, law.slide).drop_columns(["__side", "__order"])
            engine.prepare(rows)
            engine.discard()
            assert told(engine.process(rows)) == law.take(lines)
        state = engine.snapshot()
        engine.close()
    assert law.watermark is not None


def test_what_is_refused() -> None:
    source = described((1, 2), 5, None, changes=False).inputs[0]
    assert source.delay_ms == 2
    for changed, message in (
        ({"parts": UnionParts("n", (1, 2))}, "parts names 'n'"),
        ({"parts": UnionParts("k", (1, 2))}, "are no numbers of parts"),
        ({"parts": UnionParts("part", (1, -2))}, "are no numbers of parts"),
        ({"parts": UnionParts("part", (None, None))}, "no part of it has a watermark"),
        ({"event_time": None}, "no part of it has a watermark|delay needs event_time"),
        ({"idle_timeout_ms": 5}, "a part without rows holds the watermark back, idle_timeout= has no place here"),
    ):
        with pytest.raises(DescriptionError, match=message):
            dataclasses.replace(source, **changed)
    plain = Input("r", SCHEMA, event_time="t", delay_ms=1)
    with pytest.raises(DescriptionError, match="input 'u': a union of streams with a watermark each is the only input"):
        IntervalJoin("inner", source, plain, (Key("k", "k"),), suffixes=("", "_r"), interval=Interval(0, 5))
    engine = JoinEngine(described((1, 2), 5, None, changes=False), "cpu")
    for number in (2, -1, None):
        rows = pa.Table.from_pylist([{"k": "a", "t": 1, "x": 1, "part": number}], SCHEMA)
        with pytest.raises(BadInputError, match=r"input 'u', column 'part'.*is the number of a part, below 2"):
            engine.process(rows)
    engine.close()


def test_times_of_two_are_stored_as_ever_and_of_more_beside_them() -> None:
    assert Times(7, (1, 2)).to_facts() == {"watermark_ms": "7", "left_latest_ms": "1", "right_latest_ms": "2"}
    four = Times(7, (1, None, None, 4))
    assert four.to_facts() == {"watermark_ms": "7", "left_latest_ms": "1", "part_3_latest_ms": "4"}
    assert Times.from_facts({**four.to_facts(), "clock_ms": "9"}) == four
    assert four.later(Times(None, (None, 3))) == Times(7, (1, 3, None, 4))


class Servers:
    """The partitions of a state folder, and the driver that keeps their watermark."""

    def __init__(self, description: Description, state: Path, partitions: int) -> None:
        self.description, self.state, self.partitions = description, str(state), partitions
        names = [x for x in (*description.inputs[0].schema.names, description.inputs[0].row_kind) if x is not None]
        self.wire = Wire("__side", "__order", tuple((name, name) for name in names))
        self.restart()

    def restart(self) -> None:
        """All processes anew."""
        text = self.description.to_json()
        self.marks = Watermarks(self.description, Manifest(text, self.partitions, "q"), StateAddress.of(self.state))
        command = ApplyCommand(
            "j", StateAddress.of(self.state), text, "q", 0, 0, self.partitions, "cpu", self.wire, {"snapshot_every": 3}
        )
        self.parts = [PartitionState(dataclasses.replace(command, partition=n)) for n in range(self.partitions)]

    def apply(self, batch_id: int, rows: pa.Table, partition: int) -> tuple[Counter[Out], int]:
        """One partition's part of a micro-batch, as its task has it done: windows, and how many rows are late."""
        moment = self.marks.begin(batch_id, 1000 + batch_id)
        keys = [rows[by.columns[0]].combine_chunks() for by in self.description.shuffled_by]
        goes_to = partition_of(keys, len(rows), self.partitions)
        part = rows.take(pa.array(np.flatnonzero(goes_to == partition)))
        done = self.parts[partition].apply(
            batch_id, part, self.wire, watermark=moment.watermark, clock_ms=moment.clock_ms
        )
        self.marks.report(batch_id, partition, EventTimes.of(done.latest, [bool(done.metrics["u_rows_in"])]))
        return told(done.changelog), int(done.metrics["u_late"])


def check(number: int, state: Path) -> Counter[str]:
    """Every micro-batch has the watermark that it should, and the windows that are final by it; what all happened."""
    law, changes, batches = drawn(number)
    rng, met = random.Random(number), Counter[str]()
    description = described(tuple(law.delays), law.size, law.slide, changes=changes)
    servers = Servers(description, state, rng.choice((1, 2, 3)))
    for place, lines in enumerate(batches):
        rows = rows_of(description, lines, law.slide)
        if place and rng.random() < 0.2:
            servers.restart()
            met["restarted"] += 1
            if rng.random() < 0.3:
                servers.partitions = rescale.rescale(servers.state, rng.choice((1, 2, 3))).after
                servers.restart()
                met["cut"] += 1
        before, late = law.watermark, law.late
        expected = law.take(lines)
        answers: dict[int, tuple[Counter[Out], int]] = {}
        for partition in rng.sample(range(servers.partitions), servers.partitions):
            answers[partition] = servers.apply(place, rows, partition)
            if rng.random() < 0.15:  # some partitions have done it, others have not: it goes by the same watermark
                servers.restart()
                met["halfway"] += 1
                assert all(servers.apply(place, rows, again) == said for again, said in answers.items())
        assert servers.marks.begin(place, 0).watermark == law.watermark, (number, place)
        found = sum((out for out, _ in answers.values()), Counter[Out]())
        assert found == expected, (number, place, law.watermark)
        assert sum(count for _, count in answers.values()) == law.late - late, (number, place)
        met += Counter(moved=int(before != law.watermark), out=expected.total(), late=law.late - late)
    return met


@pytest.mark.parametrize("number", range(3))
def test_by_the_law(number: int, tmp_path: Path) -> None:
    assert check(number, tmp_path)["moved"] > 3


@pytest.mark.slow
def test_many_by_the_law(tmp_path: Path) -> None:
    met: Counter[str] = Counter()
    for number in range(3, 600):
        met += check(number, tmp_path / str(number))
    assert min(met[what] for what in ("restarted", "cut", "halfway", "moved", "out", "late")) > 100, met
