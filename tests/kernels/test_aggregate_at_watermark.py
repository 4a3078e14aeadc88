"""Aggregates of windows at the watermark, on any backend: what comes out is what DuckDB has over what was not late."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest
from conftest import combined
from oracle.drive import Backend

from gpu_ops.descriptions.aggregate import Aggregate
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.kinds import from_json
from gpu_ops.errors import BadInputError, DescriptionError
from kernels.conftest import EMULATED, only_on
from kernels.engines import CPU, alike, run
from kernels.test_aggregate import CALLS, KINDS, SCHEMA, VALUES, Event, Folded, by_duckdb, table_of, told

TIMED = pa.schema([*(f for f in SCHEMA if f.name != "t"), ("t", pa.timestamp("us")), ("w", pa.timestamp("us"))])
OTHERS = [VALUES[name] for name in TIMED.names if name not in ("id", "t", "w")]
SECOND, SIZE = 1_000_000, 10


def described(kind: str, by: tuple[str, ...] = ("w", "g"), **given: Any) -> Aggregate:
    source = Input("t", TIMED, event_time="t", delay_ms=7000, **KINDS[kind])  # type: ignore[arg-type]
    calls = {name: call for name, call in CALLS.items() if name not in by}
    return Aggregate.of(source, by, calls, "at_watermark", **{"window_end": "w", **given})


def some_events(kind: str, seed: int, count: int) -> list[Event]:
    """Random changes whose times go on, some late, some of rows that are not there or long gone."""
    choice, found = random.Random(seed), list[Event]()
    for number in range(count):
        second = max(0, number // 2 + choice.randrange(-24, 6))
        end = (second // SIZE + 1) * SIZE * SECOND
        row = (choice.randrange(6), *(choice.choice(values) for values in OTHERS), second * SECOND, end)
        word = "+I" if kind == "insert only" else choice.choice(["+I", "+I", "+U", "-D", "-U"])
        if word in ("-D", "-U") and found and choice.random() < 0.9:
            row = choice.choice(found[-30:])[1]
        found.append((word, row))
    return found


class Expected:
    """What an aggregate has to give, micro-batch by micro-batch."""

    def __init__(self, aggregate: Aggregate, kind: str) -> None:
        self.aggregate, self.input = aggregate, Folded(kind)
        self.place = TIMED.get_field_index(str(aggregate.closes))
        self.watermark = self.latest = -(2**60)
        self.late = 0

    def take(self, events: list[Event]) -> Counter[tuple[Any, ...]]:
        closed = self.upto(self.latest - 7 * SECOND)
        kept = [event for event in events if event[1][self.place] > self.watermark]
        self.late += len(events) - len(kept)
        self.input.take(kept)
        self.latest = max([self.latest, *(row[TIMED.get_field_index("t")] for _, row in events)])
        return closed

    def upto(self, watermark: int) -> Counter[tuple[Any, ...]]:
        """The groups whose windows end by then; their rows are gone."""
        self.watermark = max(watermark, self.watermark)
        rows = self.input.drop(lambda row: row[self.place] <= self.watermark)
        return by_duckdb(self.aggregate, rows, CALLS) if rows else Counter()


@pytest.mark.one_in(2)
@only_on("cpu-tiny", "gpu")
@pytest.mark.parametrize(
    ("by", "kind", "size"), combined([("w", "g"), ("f", "w", "b"), ("d", "t", "e")], list(KINDS), [1, 7, 60])
)
def test_groups_come_out_once(engines: Backend, by: tuple[str, ...], kind: str, size: int) -> None:
    """In the micro-batch whose watermark reaches the end of their window, with what was not late; at the end the rest."""
    aggregate = described(kind, by, window_end="w" if "w" in by else None)
    events, expected = some_events(kind, len(by) + size, 60 if size == 1 else 180), Expected(aggregate, kind)
    late = 0
    with engines.engine(aggregate) as engine:
        for start in range(0, len(events), size):
            part = events[start : start + size]
            batch = engine.prepare(table_of(kind, part, TIMED))
            engine.commit()
            wanted, found = expected.take(part), told(batch.changelog)
            assert {word for word, _ in found} <= {"+I"}
            assert Counter(row for _, row in found) == wanted
            assert batch.sequence.tolist() == [-1] * len(found)
            late += batch.metrics["t_late"]
            open_ = {row[expected.place] for row in expected.input.rows}
            assert all(end > expected.watermark for end in open_)
        assert late == expected.late > 0
        assert engine.state_size()["t_rows"] <= len(events) // 2
        assert Counter(row for _, row in told(engine.finish())) == expected.upto(2**62)
        assert engine.state_size()["t_rows"] == 0


@only_on("cpu-tiny", "gpu", *EMULATED)
@pytest.mark.parametrize(("by", "size"), [(("w", "g"), 1), (("d", "t", "e"), 7), (("w", "g"), 60)])
def test_late_rows_come_out_as_they_are(engines: Backend, by: tuple[str, ...], size: int) -> None:
    """Behind the groups, which are those that there are without them; every other micro-batch is discarded once."""
    with_late_rows(engines, by, size, 60 if size == 1 else 180)


@pytest.mark.slow
@only_on("cpu-tiny", "gpu")
@pytest.mark.parametrize("size", [1, 7, 20_000])
def test_many_late_rows(engines: Backend, size: int) -> None:
    """20,000 rows; in one micro-batch none is late."""
    with_late_rows(engines, ("w", "g"), size, 20_000)


def with_late_rows(engines: Backend, by: tuple[str, ...], size: int, length: int) -> None:
    kind = "insert only"
    given: dict[str, Any] = {"window_end": "w" if "w" in by else None}
    aggregate, tagged = described(kind, by, **given), described(kind, by, late="tag", **given)
    events, expected = some_events(kind, len(by) + size, length), Expected(aggregate, kind)
    width, others = len(aggregate.output), [name for name in TIMED.names if name not in by]
    assert [column.name for column in tagged.output][width:] == others
    count = 0
    with engines.engine(from_json(tagged.to_json())) as engine:
        for start in range(0, len(events), size):
            part = events[start : start + size]
            if start % (2 * size):
                engine.prepare(table_of(kind, part, TIMED))
                engine.discard()
            batch = engine.prepare(table_of(kind, part, TIMED))
            engine.commit()
            wanted, found = expected.take(part), batch.changelog.to_pylist()
            groups = [row for row in told(batch.changelog) if row[0] == "+I"]
            assert Counter(row[:width] for _, row in groups) == wanted
            assert all(value is None for _, row in groups for value in row[width:])
            late = [n for n, (_, row) in enumerate(part) if row[expected.place] <= expected.watermark]
            assert batch.sequence.tolist() == [-1] * len(groups) + late
            rows = table_of(kind, [part[n] for n in late], TIMED).to_pylist()
            assert [row["row_kind"] for row in found[len(groups) :]] == ["late"] * len(late)
            assert repr([{name: row[name] for name in TIMED.names} for row in found[len(groups) :]]) == repr(rows)
            assert all(row[m.name] is None for row in found[len(groups) :] for m in aggregate.measures)
            count += len(late)
    assert count == expected.late
    assert (count > 0) == (size < length)


@pytest.mark.one_in(2)
@only_on("cpu-tiny", "gpu", "gpu-tiny", *EMULATED)
@pytest.mark.parametrize("kind", KINDS)
def test_same_as_the_cpu(engines: Backend, kind: str) -> None:
    """Output, order and state; every other micro-batch is discarded once."""
    events = some_events(kind, 5, 240)
    batches = [([table_of(kind, events[start : start + 30], TIMED)], {}) for start in range(0, 240, 30)]
    alike(run(engines, described(kind), batches), run(CPU, described(kind), batches))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", KINDS)
def test_goes_on_from_a_snapshot(engines: Backend, kind: str) -> None:
    """After a restart, on the other backend as well, what follows is the same."""
    events, aggregate = some_events(kind, 8, 240), described(kind)
    batches = [table_of(kind, events[start : start + 24], TIMED) for start in range(0, 240, 24)]
    with CPU.engine(aggregate) as engine:
        for batch in batches[:4]:
            engine.process(batch)
        state = engine.snapshot()
        wanted = [told(engine.process(batch)) for batch in batches[4:]] + [told(engine.finish())]
    with engines.engine(from_json(aggregate.to_json())) as engine:
        engine.restore(state)
        found = [told(engine.process(batch)) for batch in batches[4:]] + [told(engine.finish())]
    assert [Counter(part) for part in found] == [Counter(part) for part in wanted]
    assert sum(map(len, wanted[:-1]))


@pytest.mark.slow
@only_on("cpu", "cpu-tiny", "gpu")
def test_many_events(engines: Backend) -> None:
    """20,000 changes."""
    aggregate, kind = described("retractions"), "retractions"
    events, expected = some_events(kind, 9, 20_000), Expected(aggregate, "retractions")
    with engines.engine(aggregate) as engine:
        for start in range(0, len(events), 1000):
            part = events[start : start + 1000]
            found = Counter(row for _, row in told(engine.process(table_of(kind, part, TIMED))))
            assert found == expected.take(part)
        assert Counter(row for _, row in told(engine.finish())) == expected.upto(2**62)


def test_late_rows_are_tagged_where_there_are_some() -> None:
    calls = {"n": "count(*)"}
    with pytest.raises(DescriptionError, match="input 't': late='tag' is for insertions"):
        described("retractions", late="tag")
    with pytest.raises(DescriptionError, match="late='tag' goes with emit='at_watermark' only"):
        Aggregate.of(Input("t", TIMED), ("w",), calls, "per_batch", late="tag")
    source = Input("t", TIMED, event_time="t", delay_ms=7000)
    with pytest.raises(DescriptionError, match="would have two columns 'i': name an aggregate otherwise"):
        Aggregate.of(source, ("w",), {"i": "sum(i)"}, "at_watermark", "w", late="tag")


def test_what_it_takes(engines: Backend) -> None:
    aggregate = described("retractions")
    assert aggregate.by_event_time
    assert not aggregate.attributes.switches_from_backlog
    assert from_json(aggregate.to_json()) == aggregate
    with (
        pytest.raises(BadInputError, match="column 'w': is the end of a window and holds nulls"),
        engines.engine(aggregate) as engine,
    ):
        engine.process(table_of("retractions", [("+I", (1, *(values[0] for values in OTHERS), 5, None))], TIMED))
    for given, message in [
        ({"window_end": None}, "none of w, g is one: group by a window of time, or by the event time 't'"),
        ({"window_end": "g"}, "window_end 'g' is string, its event time 't' is timestamp"),
        ({"window_end": "t"}, "window_end 't' is no group column: w, g"),
    ]:
        with pytest.raises(DescriptionError, match=message):
            described("retractions", **given)
    with pytest.raises(DescriptionError, match="needs its event time"):
        Aggregate.of(Input("t", TIMED), ("w",), {"n": "count(*)"}, "at_watermark", "w")
    with pytest.raises(DescriptionError, match="goes with emit='at_watermark' only"):
        Aggregate.of(Input("t", TIMED), ("w",), {"n": "count(*)"}, "per_batch", "w")
