"""Aggregates of sessions, on any backend: after every micro-batch as SQL has them over the folded input, from scratch."""

from __future__ import annotations

import datetime as dt
import random
from collections import Counter
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from conftest import combined
from oracle.drive import Backend

from gpu_ops import JoinEngine
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.kinds import from_json
from gpu_ops.descriptions.sessions import SessionAggregate
from gpu_ops.errors import BadInputError, DescriptionError
from kernels.conftest import EMULATED, only_on
from kernels.engines import CPU, alike, restarting, run
from kernels.own_functions import Bits

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        ("g", pa.string()),
        ("t", pa.timestamp("us")),
        ("v", pa.int64()),
        ("f", pa.float64()),
    ]
)
CALLS = {"n": "count(*)", "total": "sum(v)", "most": "max(v)", "kinds": "count(distinct v)", "mean": "avg(f)"}
KINDS: dict[str, dict[str, Any]] = {
    "insert only": {},
    "retractions": {"row_kind": "op"},
    "upserts": {"row_kind": "op", "unique_key": ("id",)},
}
SECOND, GAP, DELAY = 1_000_000, 3, 6
DUCKDB = duckdb.connect(config={"threads": 1})
Row = tuple[Any, ...]
Event = tuple[str, Row]


def described(kind: str, by: tuple[str, ...] = ("g",), emit: Any = "per_batch", **more: Any) -> SessionAggregate:
    source = Input("x", SCHEMA, event_time="t", delay_ms=1000 * DELAY, **KINDS[kind])
    return SessionAggregate.of_gap(source, by, f"{GAP} seconds", CALLS, emit, **more)


def some_events(kind: str, seed: int, count: int, *, goes_on: float = 0.0, width: int = 40) -> list[Event]:
    """Random changes, out of order, with ties and pauses of just the gap, some of rows that are not there."""
    choice, found = random.Random(seed), list[Event]()
    for number in range(count):
        second = int(number * goes_on) + choice.randrange(width)
        row = (choice.randrange(25), choice.choice(["a", "b", None]), second * SECOND, choice.choice([1, 2, None]), 0.1)
        word = "+I" if kind == "insert only" else choice.choice(["+I", "+I", "+U", "-D"])
        if word == "-D" and found and choice.random() < 0.9:
            row = choice.choice(found[-60:])[1]
        found.append((word, row))
    return found


def table_of(kind: str, events: list[Event]) -> pa.Table:
    columns = {field.name: pa.array([row[n] for _, row in events], field.type) for n, field in enumerate(SCHEMA)}
    if kind != "insert only":
        columns["op"] = pa.array([word for word, _ in events], pa.string())
    return pa.table(columns)


def fold(kind: str, rows: list[Row], events: list[Event]) -> None:
    for word, row in events:
        if kind == "upserts":
            rows[:] = [old for old in rows if old[0] != row[0]]
        elif word == "-D" and row in rows:
            rows.remove(row)
        if word != "-D":
            rows.append(row)


def by_sql(rows: list[Row], by: tuple[str, ...]) -> Counter[Row]:
    """The sessions of some rows: a row begins one where none of its group is within the gap before it."""
    columns = [pa.array([row[n] for row in rows], field.type) for n, field in enumerate(SCHEMA)]
    DUCKDB.register("rows", pa.table([*columns, pa.array(range(len(rows)))], names=[*SCHEMA.names, "place"]))
    partition = f"PARTITION BY {', '.join(by)} " if by else ""
    groups = "".join(f"{column}, " for column in by)
    found = DUCKDB.sql(
        f"""
        WITH marked AS (
            SELECT *, coalesce(t - lag(t) OVER ({partition}ORDER BY t, place) > INTERVAL {GAP} SECONDS, true) AS opens
            FROM rows
        ), numbered AS (SELECT *, sum(opens::INT) OVER ({partition}ORDER BY t, place) AS session FROM marked)
        SELECT {groups}min(t), max(t) + INTERVAL {GAP} SECONDS, count(*), sum(v)::BIGINT, max(v), count(DISTINCT v),
            round(avg(f), 9) FROM numbered GROUP BY {groups}session
        """
    )
    return Counter(found.fetchall())


def told(changelog: pa.Table) -> list[tuple[str, Row]]:
    found = []
    for row in changelog.to_pylist():
        word, row["mean"] = row.pop("row_kind"), None if row["mean"] is None else round(row["mean"], 9)
        found.append((word, tuple(row.values())))
    return found


@pytest.mark.one_in(2)
@only_on("cpu-tiny", "gpu")
@pytest.mark.parametrize(("by", "kind", "size"), combined([("g",), ()], list(KINDS), [1, 6, 45]))
def test_after_every_micro_batch(engines: Backend, by: tuple[str, ...], kind: str, size: int) -> None:
    """Sessions grow, become one and part; no row appears twice, none goes that is not there."""
    after_every_micro_batch(engines, by, kind, some_events(kind, size, 40 if size == 1 else 90), size)


@pytest.mark.slow
@only_on("cpu", "cpu-tiny", "gpu")
@pytest.mark.parametrize("seed", range(40))
def test_many_traces(engines: Backend, seed: int) -> None:
    """Of other lengths, widths and splits."""
    choice = random.Random(seed)
    kind, width = choice.choice(list(KINDS)), choice.choice([15, 60, 400])
    events = some_events(kind, seed, 300, width=width, goes_on=choice.choice([0, 0.3]))
    after_every_micro_batch(engines, choice.choice([("g",), ()]), kind, events, choice.choice([2, 17, 80]))


def after_every_micro_batch(engines: Backend, by: tuple[str, ...], kind: str, events: list[Event], size: int) -> None:
    rows, there = list[Row](), Counter[Row]()
    for start, engine in zip(range(0, len(events), size), restarting(engines, described(kind, by), 5), strict=False):
        part = events[start : start + size]
        fold(kind, rows, part)
        engine.prepare(table_of(kind, part))
        engine.discard()
        for word, row in told(engine.process(table_of(kind, part))):
            there[row] += 1 if word == "+I" else -1
            assert there[row] in (0, 1), (word, row)
        there = +there
        assert there == by_sql(rows, by), start
    assert len(there) > 1 or not by


class AtWatermark:
    """What comes out at the watermark, from scratch."""

    def __init__(self, kind: str, by: tuple[str, ...]) -> None:
        self.kind, self.by, self.rows = kind, by, list[Row]()
        self.watermark = self.latest = -(2**60)
        self.late = list[Event]()

    def take(self, events: list[Event]) -> Counter[Row]:
        closed = self.upto(self.latest - DELAY * SECOND)
        late = [event for event in events if event[1][2] + GAP * SECOND <= self.watermark]
        self.late += late
        fold(self.kind, self.rows, [event for event in events if event not in late])
        self.latest = max([self.latest, *(row[2] for _, row in events)])
        return closed + self.upto(self.watermark)

    def upto(self, watermark: int) -> Counter[Row]:
        """The sessions that end by then; their rows are gone."""
        self.watermark = max(watermark, self.watermark)
        zero, count = dt.datetime(1970, 1, 1), len(self.by)
        out = Counter[Row]()
        for row, times in by_sql(self.rows, self.by).items() if self.rows else ():
            first, end = ((row[count + n] - zero) // dt.timedelta(microseconds=1) for n in (0, 1))
            if end <= self.watermark:
                out[row] += times
                own = [r for r in self.rows if first <= r[2] < end and (not self.by or r[1] == row[0])]
                assert len(own) == row[count + 2]
                self.rows = [r for r in self.rows if r not in own]
        return out


@pytest.mark.one_in(2)
@only_on("cpu-tiny", "gpu")
@pytest.mark.parametrize(("by", "kind", "size"), combined([("g",), ()], list(KINDS), [1, 6, 45]))
def test_final_at_the_watermark(engines: Backend, by: tuple[str, ...], kind: str, size: int) -> None:
    """Each session once, with what was not late; what retractions leave behind the watermark at once; at the end all."""
    final_at_the_watermark(
        engines, by, kind, some_events(kind, size, 60 if size == 1 else 200, goes_on=0.25, width=12), size
    )


@pytest.mark.slow
@only_on("cpu", "cpu-tiny", "gpu")
@pytest.mark.parametrize("seed", range(40))
def test_many_traces_at_the_watermark(engines: Backend, seed: int) -> None:
    choice = random.Random(seed)
    kind = choice.choice(list(KINDS))
    events = some_events(kind, seed, 400, width=choice.choice([10, 30]), goes_on=choice.choice([0.2, 1]))
    final_at_the_watermark(engines, choice.choice([("g",), ()]), kind, events, choice.choice([3, 17, 80]))


def final_at_the_watermark(engines: Backend, by: tuple[str, ...], kind: str, events: list[Event], size: int) -> None:
    expected, late = AtWatermark(kind, by), 0
    sessions = restarting(engines, described(kind, by, "at_watermark"), 4)
    for start, engine in zip(range(0, len(events), size), sessions, strict=False):
        part = events[start : start + size]
        engine.prepare(table_of(kind, part))
        engine.discard()
        batch = engine.prepare(table_of(kind, part))
        engine.commit()
        found = told(batch.changelog)
        assert {word for word, _ in found} <= {"+I"}
        assert Counter(row for _, row in found) == expected.take(part), start
        assert batch.sequence.tolist() == [-1] * len(found)
        late += batch.metrics["x_late"]
        assert engine.state_size()["x_rows"] == len(expected.rows)
    assert late == len(expected.late)
    assert Counter(row for _, row in told(engine.finish())) == expected.upto(2**62)
    assert engine.state_size()["x_rows"] == 0


@only_on("cpu-tiny", "gpu")
def test_late_rows_come_out_as_they_are(engines: Backend) -> None:
    kind, aggregate = "insert only", described("insert only", emit="at_watermark", late="tag")
    events, expected = some_events(kind, 3, 120, goes_on=0.5, width=20), AtWatermark("insert only", ("g",))
    with engines.engine(from_json(aggregate.to_json())) as engine:
        for start in range(0, len(events), 8):
            before, found = len(expected.late), engine.process(table_of(kind, events[start : start + 8])).to_pylist()
            closed, late = expected.take(events[start : start + 8]), expected.late[before:]
            assert len([row for row in found if row["row_kind"] == "+I"]) == closed.total()
            tagged = [row for row in found if row["row_kind"] == "late"]
            assert [(row["id"], row["v"]) for row in tagged] == [(row[0], row[3]) for _, row in late]
            assert all(row["session_start"] is row["n"] is None for row in tagged)
    assert expected.late


@pytest.mark.parametrize("kind", KINDS)
def test_at_the_end(engines: Backend, kind: str) -> None:
    """Once, of the rows that are left."""
    events, rows = some_events(kind, 11, 150), list[Row]()
    fold(kind, rows, events)
    with engines.engine(described(kind, emit="at_end")) as engine:
        for start in range(0, len(events), 50):
            assert not engine.process(table_of(kind, events[start : start + 50])).num_rows
        assert Counter(row for _, row in told(engine.finish())) == by_sql(rows, ("g",))


@only_on("cpu-tiny", "gpu", "gpu-tiny", *EMULATED)
@pytest.mark.parametrize("emit", ["per_batch", "at_watermark"])
@pytest.mark.parametrize("kind", KINDS)
def test_same_as_the_cpu(engines: Backend, kind: str, emit: str) -> None:
    """Output, order and state; every other micro-batch is discarded once."""
    events = some_events(kind, 5, 160, goes_on=0.2, width=20)
    batches = [([table_of(kind, events[start : start + 40])], {}) for start in range(0, 160, 40)]
    aggregate = described(kind, emit=emit)
    alike(run(engines, aggregate, batches), run(CPU, aggregate, batches))


@only_on("cpu-tiny", "gpu", "gpu-tiny", *EMULATED)
def test_collisions_of_hashes_change_nothing(engines: Backend, one_hash: Any) -> None:
    kind = "retractions"
    batches = [([table_of(kind, some_events(kind, seed, 40))], {}) for seed in range(3)]
    wanted = run(engines, described(kind), batches)
    one_hash(1)
    alike(run(engines, described(kind), batches), wanted)


def test_flinks_merging_windows(backend: Backend) -> None:
    """Flink's "Session Windows": two of one key become one by an element between them, touching ones are one."""
    schema = pa.schema([("user", pa.string()), ("at", pa.int64())])
    source = Input("x", schema, event_time="at")
    aggregate = SessionAggregate.of_gap(source, ("user",), 10, {"n": "count(*)"}, "per_batch")
    with backend.engine(aggregate) as engine:

        def after(*rows: tuple[str, int]) -> list[tuple[Any, ...]]:
            users, times = zip(*rows, strict=True)
            found = engine.process(pa.table({"user": users, "at": pa.array(times, pa.int64())}, schema=schema))
            return sorted(tuple(row.values()) for row in found.to_pylist())

        assert after(("u1", 0), ("u1", 21)) == [("+I", "u1", 0, 10, 1), ("+I", "u1", 21, 31, 1)]
        assert after(("u2", 12)) == [("+I", "u2", 12, 22, 1)]
        # [0, 10) and [10, 20) touch, as do [10, 20) and [20, 30)
        assert after(("u1", 10)) == [
            ("+I", "u1", 0, 20, 2),
            ("-D", "u1", 0, 10, 1),
        ]
        assert after(("u1", 11)) == [
            ("+I", "u1", 0, 31, 4),
            ("-D", "u1", 0, 20, 2),
            ("-D", "u1", 21, 31, 1),
        ]


def test_a_row_at_the_end_of_a_session_moves_no_other(backend: Backend) -> None:
    """Of a session of 20,000 rows; one that joins it with another moves the later one's rows."""
    schema = pa.schema([("at", pa.int64())])
    aggregate = SessionAggregate.of_gap(Input("x", schema, event_time="at"), (), 10, {"n": "count(*)"})
    with backend.engine(aggregate) as engine:
        moved = []
        for times in (range(20_000), range(20_020, 20_030), [20_000], [20_015, 20_011], [-5]):
            batch = engine.prepare(pa.table({"at": pa.array(times, pa.int64())}))
            engine.commit()
            moved.append(batch.metrics["x_moved"])
    assert moved == [0, 0, 0, 10, 20_001]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"emit": "per_event"}, "sessions emit per_batch, at_watermark or at_end"),
        ({"gap": -5}, "a duration is positive"),
        ({"gap": 0}, "a duration is positive"),
        ({"by": ("t",)}, "by the event time 't' each time is a group of its own"),
        ({"start": "g"}, "has a column 'g' itself"),
        ({"aggregates": {"x": "first(v)"}}, r"x = first\(v\): the rows of a session are in no order of arrival"),
        ({"aggregates": {"x": Bits("v")}}, None),
        ({"source": Input("x", SCHEMA)}, "input 'x': sessions go by its event time, and it names none"),
        ({"source": Input("x", SCHEMA, event_time="t", ttl_ms=5)}, "ttl= has no place here"),
    ],
)
def test_what_it_takes(given: dict[str, Any], message: str | None) -> None:
    arguments: dict[str, Any] = {"source": Input("x", SCHEMA, event_time="t"), "by": ("g",), "gap": "1 second"}
    arguments |= {"aggregates": {"n": "count(*)"}, **given}
    if message is None:
        assert SessionAggregate.of_gap(**arguments).unique_key is None
        return
    with pytest.raises(DescriptionError, match=message):
        SessionAggregate.of_gap(**arguments)


def test_a_row_without_an_event_time_is_refused() -> None:
    engine = JoinEngine(described("retractions"), "cpu")
    with pytest.raises(BadInputError, match="input 'x', column 't': is the event time and holds nulls"):
        engine.process(table_of("retractions", [("+I", (1, "a", None, 1, 0.5))]))
    assert engine.process(table_of("retractions", [("+I", (1, "a", 5, 1, 0.5))])).num_rows == 1
