"""Random traces through streaming queries that are stopped, started again, made to repeat and cut anew on the way."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from oracle.drive import Change, difference, fold
from oracle.interval_rules import END, LATE
from oracle.multi_rules import clauses
from oracle.multi_traces import LETTERS, multi_recipe, multi_trace, random_shape
from oracle.test_idle_timeout import History, drawn

import gpu_ops
from gpu_ops import stream
from gpu_ops.spark.server.rescale import rescale
from spark.support import Sink, Source, drain, start

pytestmark = [pytest.mark.spark, pytest.mark.thorough]

EPOCH = dt.datetime(1970, 1, 1)
MS = dt.timedelta(milliseconds=1)


class Query:
    """A query over files, one of each source per micro-batch, that is interrupted on the way.

    Args:
        sources: its inputs.
        changelog: describes it anew, given the state folder.
        folder: for its state and checkpoint.
        seed: of what happens to it.
    """

    def __init__(
        self, sources: Sequence[Source], changelog: Callable[[str], Any], folder: Path, seed: object, *, cuts: int
    ) -> None:
        self.sources, self.changelog, self.cuts = sources, changelog, cuts
        self.state, self.checkpoint, self.sink = str(folder / "state"), folder / "checkpoint", Sink()
        self.rng, self.way = random.Random(f"way-{seed}"), []  # type: ignore[var-annotated]

    def run(self, files: Sequence[Sequence[Sequence[dict[str, Any]]]]) -> None:
        """Takes in the files, some more each time: per micro-batch, for each source, its lines."""
        rng, done = self.rng, 0
        while done < len(files):
            count = rng.choice((1, 2, 2, 3))
            for lines in files[done : done + count]:
                for source, own in zip(self.sources, lines, strict=True):
                    source.add(*own)
            done = min(done + count, len(files))
            if rng.random() < 0.3:
                self._stop_somewhere()
            drain(self.changelog(self.state), self.sink, self.checkpoint)
            self.way.append(f"batch {max(self.sink.batches)}")
            for step in rng.sample((self._cut, self._repeat), 2):
                if rng.random() < 0.5:
                    step()

    def _stop_somewhere(self) -> None:
        """Stop the query wherever it is."""
        query = start(self.changelog(self.state), self.sink, self.checkpoint)
        deadline = time.monotonic() + self.rng.random() * 4
        while time.monotonic() < deadline and query.isActive:
            time.sleep(0.02)
        assert query.exception() is None
        with contextlib.suppress(Exception):  # what a task says that was interrupted
            query.stop()
        # What sources have noted for a micro-batch that was not begun: Spark would put more files into that one.
        begun = max((int(path.name) for path in (self.checkpoint / "offsets").glob("[0-9]*")), default=-1)
        for path in (self.checkpoint / "sources").glob("*/[0-9]*"):
            if int(path.name.removesuffix(".compact")) > begun:
                path.unlink()
        self.way.append("stopped")

    def _cut(self) -> None:
        partitions = self.rng.randrange(1, self.cuts + 1)
        rescale(self.state, partitions)
        self.way.append(f"cut into {partitions}")

    def _repeat(self) -> None:
        """What Spark does when it was stopped before it noted that a micro-batch is done."""
        last = max(int(path.name) for path in (self.checkpoint / "commits").iterdir() if path.name.isdecimal())
        (self.checkpoint / "commits" / str(last)).unlink()
        self.way.append(f"repeat {last}")


def check_interval(spark: Any, number: int, folder: Path, count: int) -> None:
    """Every micro-batch says what Flink's rules say under the watermark that follows from those before it."""
    shape, join, batches = drawn(number)
    inputs = [dataclasses.replace(source, idle_timeout_ms=None) for source in join.inputs]
    history = History(dataclasses.replace(join, left=inputs[0], right=inputs[1]), 0)
    rules = shape.terms().rules()
    if shape.late == "join":  # in which order both sides' rows come makes a difference to late ones
        rng = random.Random(number)
        sides = [rng.randrange(2) for _ in batches]
        pick = zip(batches, sides, strict=True)
        batches = [dataclasses.replace(b, lines=tuple(x for x in b.lines if x[0] == side)) for b, side in pick]
    batches = [batch for batch in batches if batch.lines][:count]
    sources = [Source(spark, folder / p, f"{p}_k long, {p}_t timestamp, {p}_v string") for p in "ab"]

    def changelog(state: str) -> Any:
        left, right = (
            stream(source.df, name=p.upper(), event_time=f"{p}_t", delay=described.delay_ms)
            for p, source, described in zip("ab", sources, inputs, strict=True)
        )
        return gpu_ops.interval_join(
            left, right, on=[("a_k", "b_k")], how=shape.how, lower=shape.lower, upper=shape.upper,  # type: ignore[arg-type]
            late=shape.late, state=state, emit="per_batch",
        )  # fmt: skip

    def line(p: str, key: int, at: int, value: str) -> dict[str, Any]:
        return {f"{p}_k": key, f"{p}_t": (EPOCH + at * MS).isoformat() + "Z", f"{p}_v": value}

    files = [[[line(p, x[1], x[2], x[4]) for x in b.lines if x[0] == side] for side, p in enumerate("ab")]
             for b in batches]  # fmt: skip
    # Rows that are late join what their partition still has, whatever that is after a cut.
    query = Query(sources, changelog, folder, number, cuts=1 if shape.late == "join" else 4)
    if shape.late == "join":
        spark.conf.set("spark.sql.shuffle.partitions", 1)
    try:
        query.run(files)
        left = gpu_ops.finish(spark, state=query.state).collect()
    finally:
        spark.conf.set("spark.sql.shuffle.partitions", 2)
    told = f"{number} {shape}, {query.way}"
    assert sorted(query.sink.batches) == list(range(len(batches))), told
    said = 0
    for place, batch in enumerate(batches):
        history.advance(0)
        now = history.watermark
        want = Counter(rules.advance(now, now) if now is not None else [])
        for side, *values in batch.lines:
            want += Counter(rules.process((side, "+I", tuple(values))))
        history.batches.append(batch)
        wrong = difference(Counter(map(without_x, want.elements())), Counter(map(plain, query.sink.batches[place])))
        assert not wrong, f"{told}: micro-batch {place} {batch}, watermark {now}:\n{wrong}"
        said += want.total()
    ended = Counter(map(without_x, rules.advance(END, END)))
    assert not difference(ended, Counter(map(plain, left))), told
    assert said > 2, told


def without_x(change: Change) -> Change:
    """A change by the rules, without the column that the query has not."""
    kind, row = change
    return kind, row[:2] + row[3:6] + row[7:8]


def plain(row: Sequence[Any]) -> Change:
    """A row of the query, with times in ms."""
    kind, *values = row
    assert kind in ("+I", LATE)
    return kind, tuple((v - EPOCH) // MS if isinstance(v, dt.datetime) else v for v in values)


def check_multi(spark: Any, number: int, folder: Path, count: int) -> None:
    """After every micro-batch the changelog folds to what Flink's operator has said by then, folded."""
    rng = random.Random(f"multi-{number}")
    shape = random_shape(rng, rng.choice((2, 3, 3, 4)), plain=True)
    events = multi_trace(shape, multi_recipe(shape, count * 14, number, special=False))
    ends = [len(events) * n // count for n in range(count + 1)]
    parts = [events[a:b] for a, b in itertools.pairwise(ends)]
    letters = LETTERS[: len(shape.unique)]
    kinds = {
        "id": "long",
        "k": "string" if shape.keys == "string" else "long",
        "g": "string",
        "x": "int",
        "d": "double",
    }
    names = [[f"{p}_{c}" for c in shape.letters(place)] for place, p in enumerate(letters)]
    sources = [
        Source(spark, folder / p, ", ".join(["op string", *(f"{n} {kinds[n[2:]]}" for n in own)]))
        for p, own in zip(letters, names, strict=True)
    ]

    def changelog(state: str) -> Any:
        return gpu_ops.multi_join(
            [
                stream(source.df, name=p.upper(), row_kind="op", updates="retract",
                       unique_key=[f"{p}_{c}" for c in unique] or None)
                for p, source, unique in zip(letters, sources, shape.unique, strict=True)
            ],
            on=[[(f"{letters[i]}_{c}", f"{letters[place]}_{own}") for i, c, own, _ in step.on]
                for place, step in enumerate(shape.steps, start=1)],
            how=[step.how for step in shape.steps],
            where=[clauses(step.residual) for step in shape.steps],
            emit=("per_batch", "per_event")[number % 2],
            state=state,
        )  # fmt: skip

    files = [
        [[{"op": kind, **dict(zip(own, row, strict=True))} for s, kind, row in part if s == side]
         for side, own in enumerate(names)]
        for part in parts
    ]  # fmt: skip
    query = Query(sources, changelog, folder, number, cuts=4)
    query.run(files)
    told = f"{number} {shape}, {query.way}"
    assert sorted(query.sink.batches) == list(range(count)), told
    rules, want, got = shape.rules(), Counter[Any](), Counter[Any]()
    for place, part in enumerate(parts):
        fold([change for event in part for change in rules.process(event)], want)
        fold([(row[0], tuple(row[1:])) for row in query.sink.batches[place]], got)
        assert got == want, f"{told}: after micro-batch {place}\n{difference(want, got)}"
    assert want, told


@pytest.mark.slow
def test_interval_joins_interrupted_and_cut_anew(spark: Any, tmp_path: Path) -> None:
    check_interval(spark, 7, tmp_path, 6)


@pytest.mark.slow
def test_multi_way_joins_interrupted_and_cut_anew(spark: Any, tmp_path: Path) -> None:
    check_multi(spark, 1, tmp_path, 6)


@pytest.mark.slow
@pytest.mark.parametrize("number", [*range(100, 120), *range(121, 124)])  # nothing ever matches in the trace of 120
def test_many_interval_joins_interrupted(spark: Any, tmp_path: Path, number: int) -> None:
    check_interval(spark, number, tmp_path, 20)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(100, 112))
def test_many_multi_way_joins_interrupted(spark: Any, tmp_path: Path, number: int) -> None:
    check_multi(spark, number, tmp_path, 16)
