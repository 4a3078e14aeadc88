"""Interval joins in streaming queries: watermarks over partitions and restarts, late rows, the end of input."""

from __future__ import annotations

import datetime as dt
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import slow_but

import gpu_ops
from gpu_ops import stream
from gpu_ops.spark.plan import build as building
from gpu_ops.spark.server.rescale import rescale
from spark.support import Sink, Source, drain, in_memory, start

pytestmark = pytest.mark.spark

BASE_MS = 1_767_225_600_000  # 2026-01-01


def at(second: float) -> str:
    return (dt.datetime(2026, 1, 1) + dt.timedelta(seconds=second)).isoformat() + "Z"


def seconds(ms: int | None) -> float | None:
    return None if ms is None else (ms - BASE_MS) / 1000


@pytest.fixture
def orders(spark: Any, tmp_path: Path) -> Source:
    return Source(spark, tmp_path / "orders", "k long, t timestamp, a string")


@pytest.fixture
def shipments(spark: Any, tmp_path: Path) -> Source:
    return Source(spark, tmp_path / "shipments", "k long, u timestamp, b string")


def order(k: int, second: float, a: str = "") -> dict[str, Any]:
    return {"k": k, "t": at(second), "a": a}


def shipment(k: int, second: float, b: str = "") -> dict[str, Any]:
    return {"k": k, "u": at(second), "b": b}


def joined(orders: Source, shipments: Source, **options: Any) -> Any:
    given = {"on": "k", "how": "left", "lower": "-5 seconds", "upper": "5 seconds", "name": "iv", **options}
    left = orders.df.withWatermark("t", "10 seconds")
    right = stream(shipments.df, event_time="u", delay="10 seconds")
    return in_memory(gpu_ops.interval_join, left, right, **given)


def said(sink: Sink) -> dict[int, list[tuple[Any, ...]]]:
    """Kind, key and both texts of each row, by micro-batch."""
    return {n: sorted((r[0], r[1], r[3], r[5]) for r in rows) for n, rows in sink.batches.items()}


def metrics(query: Any, name: str = "iv") -> dict[int, dict[str, Any]]:
    progress = [p for p in query.recentProgress if name in p["observedMetrics"]]
    return {p["batchId"]: p["observedMetrics"][name]["metrics"] for p in progress}


def test_restarts_repetitions_and_the_end(spark: Any, orders: Source, shipments: Source, tmp_path: Path) -> None:
    """Rows of one partition move the watermark of all; a restart and a repetition change nothing."""
    state, checkpoint, sink, marks = str(tmp_path / "state"), tmp_path / "checkpoint", Sink(), {}

    def run() -> None:
        marks.update(metrics(drain(joined(orders, shipments, state=state), sink, checkpoint)))

    orders.add(*(order(k, 1, "old") for k in range(8)))
    shipments.add(shipment(3, 2, "s"))
    orders.add(order(100, 40, "new"))
    shipments.add(shipment(100, 41, "s"))
    run()
    orders.add(order(0, 20, "late"), order(100, 90, "newer"))
    shipments.add(shipment(100, 36, "t"), shipment(100, 70, "far"))
    run()
    assert said(sink) == {
        0: [("+I", 3, "old", "s")],
        1: [("+I", 100, "new", "s")],
        2: sorted(
            [("+I", k, "old", None) for k in range(8) if k != 3]
            + [("+I", 100, "new", "t"), ("+I", 0, "late", None)]
        ),
    }  # fmt: skip
    assert [seconds(marks[n]["watermark_ms"]) for n in range(3)] == [None, -9, 30]
    assert [seconds(marks[n]["output_watermark_ms"]) for n in range(3)] == [None, -14, 25]
    assert marks[2]["watermark_lag_ms"] > 0
    assert [marks[n]["left_late"] for n in range(3)] == [0, 0, 1]
    assert sum(marks[2][f"{side}_evicted"] for side in ("left", "right")) == 9

    # the last micro-batch again, as if the sink had failed; then one more
    before = dict(sink.batches)
    (checkpoint / "commits" / "2").unlink()
    orders.add(order(7, 91, "x"))
    run()
    assert sorted(sink.batches[2]) == sorted(before[2])
    assert seconds(marks[2]["watermark_ms"]) == 30
    assert seconds(marks[3]["watermark_ms"]) == 60
    assert said(sink)[3] == []  # 90 and 91 wait; 40 was matched

    left = gpu_ops.finish(spark, state=state)
    rows = sorted((r["row_kind"], r["k"], r["a"], r["b"]) for r in left.collect())
    assert rows == [("+I", 7, "x", None), ("+I", 100, "newer", None)]
    assert left.columns == joined_columns()
    assert sorted(gpu_ops.finish(spark, state=state).collect()) == sorted(left.collect())
    with pytest.raises(gpu_ops.StateError, match=r"is finished.*gpu_ops.reopen\(\)"):
        joined(orders, shipments, state=state)
    gpu_ops.reopen(state=state)
    shipments.add(shipment(7, 91, "late luck"))
    run()
    assert said(sink)[4] == [("+I", 7, "x", "late luck")]


@pytest.mark.thorough
def test_rows_with_and_without_a_match(spark: Any, orders: Source, shipments: Source, tmp_path: Path) -> None:
    """Anti through the function, semi through SQL, side by side: each left row in one of the two, over a restart."""
    sinks = {"anti": Sink(), "semi": Sink()}
    sql = "SELECT * FROM o WHERE EXISTS (SELECT 1 FROM s WHERE o.k = s.k AND u BETWEEN t - INTERVAL 5 SECONDS AND t)"

    def run() -> dict[int, dict[str, Any]]:
        anti = joined(orders, shipments, how="anti", late="tag", upper=0, state=str(tmp_path / "anti"))
        assert anti.columns == ["row_kind", "k", "t", "a"]
        left = orders.df.withWatermark("t", "10 seconds")
        right = stream(shipments.df, event_time="u", delay="10 seconds")
        semi = gpu_ops.sql(sql, o=left, s=right, state=str(tmp_path / "semi"))
        assert "interval join, semi: o, s" in gpu_ops.explain(semi)
        drain(semi, sinks["semi"], tmp_path / "semi_checkpoint")
        return metrics(drain(anti, sinks["anti"], tmp_path / "anti_checkpoint"))

    def found(how: str) -> list[tuple[Any, ...]]:
        return sorted((n, row[0], row[1], row[3]) for n, rows in sinks[how].batches.items() for row in rows)

    orders.add(order(1, 10, "sent"), order(2, 10, "lost"), order(3, 40, "late"), order(4, 100, "open"))
    shipments.add(shipment(1, 8), shipment(1, 9), shipment(2, 11), shipment(3, 3))
    shipments.add(shipment(3, 38), shipment(3, 39), shipment(9, 100))
    run()
    assert found("semi") == [(0, "+I", 1, "sent"), (1, "+I", 3, "late")]
    assert found("anti") == []
    orders.add(order(5, 20, "too late"))
    shipments.add(shipment(5, 20), shipment(4, 98))
    marks = run()
    assert found("semi")[2:] == [(2, "+I", 4, "open")]
    assert found("anti") == [(2, "+I", 2, "lost"), (2, "late", 5, "too late")]
    assert (marks[2]["left_late"], marks[2]["right_late"]) == (1, 1)
    assert gpu_ops.finish(spark, state=str(tmp_path / "anti")).count() == 0


def joined_columns() -> list[str]:
    return ["row_kind", "k", "t", "a", "u", "b"]


def test_late_rows_go_to_a_sink_of_their_own(orders: Source, shipments: Source, tmp_path: Path) -> None:
    orders.add(order(1, 0), order(2, 50))
    shipments.add(shipment(2, 50))
    orders.add(order(1, 8, "too late"), order(3, 60))
    shipments.add(shipment(9, 7, "late, too"))
    found: dict[str, list[Any]] = {"left": [], "shipments": [], "rest": []}

    def sink(df: Any, batch: int) -> None:
        df.persist()
        for side in ("left", "shipments"):
            found[side] += [(batch, *r) for r in gpu_ops.late(df, side).collect()]
        found["rest"] += df.where("row_kind <> 'late'").collect()
        df.unpersist()

    left = orders.df.withWatermark("t", "10 seconds")
    right = stream(shipments.df.withWatermark("u", "30 seconds"), name="shipments", delay="10 seconds")
    changes = in_memory(
        gpu_ops.interval_join, left, right, on="k", lower=0, upper=dt.timedelta(seconds=5), keyed=True,
        late="tag", timestamp="ts", name="keyed",
    )  # fmt: skip
    query = drain(changes, sink, tmp_path / "checkpoint")
    assert [(r[0], r[1], r[3]) for r in found["left"]] == [(1, 1, "too late")]
    assert [(r[0], r[1], r[3]) for r in found["shipments"]] == [(1, 9, "late, too")]
    assert [(r["k"], r["ts"]) for r in found["rest"]] == [(2, dt.datetime(2026, 1, 1, 0, 0, 50))]
    assert metrics(query, "keyed")[1]["left_late"] == metrics(query, "keyed")[1]["right_late"] == 1
    assert gpu_ops.late(changes, "right").columns == ["k", "u", "b"]
    with pytest.raises(
        gpu_ops.DescriptionError, match=r"no side output 'nope_late'; .* left_late \(left\), right_late \(shipments\)"
    ):
        gpu_ops.late(changes, "nope")
    for frame in (orders.df, changes.drop("row_kind"), changes.drop("t")):
        with pytest.raises(gpu_ops.DescriptionError, match=r"late\(\)"):
            gpu_ops.late(frame, "left")


@pytest.mark.thorough
@pytest.mark.parametrize("engines", ["one", "each its own"])
def test_a_chain_goes_by_the_watermark_of_the_join_before_it(
    orders: Source, shipments: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engines: str
) -> None:
    """The first join's pads are far behind its latest rows, and not late in the second."""
    spark = orders.df.sparkSession
    if engines != "one":
        monkeypatch.setattr(building, "one_engine", lambda *_: None)
    returns = Source(spark, tmp_path / "returns", "k long, v timestamp, c string")
    first = joined(orders, shipments, name="first", state=str(tmp_path / "first"))
    second = gpu_ops.interval_join(
        stream(first.where("row_kind = '+I'"), event_time="t", name="shipped"),
        stream(returns.df, event_time="v", delay=0, name="returns"),
        on="k", how="left", lower="-20 seconds", upper="20 seconds", name="second", state=str(tmp_path / "second"),
    )  # fmt: skip
    text = gpu_ops.explain(second)
    assert ("in the same engine" in text) == (engines == "one")
    assert "shipped: row kinds in 'row_kind'; 5 columns watermark from the join 'first'" in " ".join(text.split())
    for second_ in (1, 500, 2000):
        orders.add(order(1, second_, f"o{second_}"))
        shipments.add(shipment(2, second_))
        returns.add({"k": 1, "v": at(second_), "c": f"r{second_}"})
    orders.add(order(1, 2001, "end"))
    sink = Sink()
    query = drain(second, sink, tmp_path / "checkpoint")
    ones, twos = metrics(query, "first"), metrics(query, "second")
    assert [seconds(ones[n]["watermark_ms"]) for n in range(4)] == [None, -9, 490, 1990]
    assert [seconds(twos[n]["watermark_ms"]) for n in range(4)] == [None, None, -14, 485]
    assert [twos[n]["left_late"] for n in range(4)] == [0] * 4
    # o1 is padded by the first join in batch 2, when returns of 2000 s have come, and still meets its return
    rows = {n: [(r[3], r[-1]) for r in sorted(rows)] for n, rows in sink.batches.items()}
    assert rows[2] == [("o1", "r1")]
    assert rows[3] == [("o500", "r500")]


@pytest.mark.thorough
@pytest.mark.parametrize("partitions", slow_but([1, 2], 2))
def test_operators_by_time_in_one_engine_say_what_they_say_alone(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partitions: int
) -> None:
    """In every micro-batch, over restarts, a repetition, other partitions: three operators, two go by a watermark."""
    choice, said = random.Random(partitions), {}
    names = ("orders", "shipments", "rates")
    sources = {
        name: Source(spark, tmp_path / name, f"k long, {when} timestamp, {name} int")
        for name, when in zip(names, "tuv", strict=True)
    }

    def changes(folder: Path, partitions: int) -> Any:
        options = {"partitions": partitions, "name": None}
        shipped = gpu_ops.interval_join(
            stream(sources["orders"].df, event_time="t", delay="4 seconds"),
            stream(sources["shipments"].df, event_time="u", delay="4 seconds"),
            on="k", lower="-5 seconds", upper="5 seconds", state=str(folder / "shipped"), **options,
        )  # fmt: skip
        priced = gpu_ops.asof_join(
            stream(shipped.where("row_kind = '+I'"), event_time="t", name="shipped"),
            stream(sources["rates"].df, event_time="v", delay="2 seconds"),
            on="k", how="left", emit="at_watermark", state=str(folder / "priced"), **options,
        )  # fmt: skip
        return gpu_ops.aggregate(
            priced.select("row_kind", "k", "rates"), by="k", aggregates={"n": "count(*)", "sum": "sum(rates)"},
            state=str(folder / "sums"), **options,
        )  # fmt: skip

    def add(number: int) -> None:
        for (name, source), when in zip(sources.items(), "tuv", strict=True):
            rows = [(choice.randrange(5), number * 6 + choice.choice([0, 1, 3, 5, -9])) for _ in range(9)]
            source.add(*({"k": k, when: at(second), name: choice.randrange(9)} for k, second in rows))

    sinks = {engines: Sink() for engines in ("one", "each its own")}
    for run in range(3):
        for number in range(run * 3, run * 3 + 3):
            add(number)
        for engines, sink in sinks.items():
            with monkeypatch.context() as patch:
                if engines != "one":
                    patch.setattr(building, "one_engine", lambda *_: None)
                more = int(engines == "one" and run > 1 < partitions)
                if more:
                    rescale(str(tmp_path / engines / "sums"), partitions + more)
                made = changes(tmp_path / engines, partitions + more)
                assert ("in the same engine" in gpu_ops.explain(made)) == (engines == "one")
                checkpoint = tmp_path / engines / "checkpoint"
                if run == 2:  # the last micro-batch again
                    (checkpoint / "commits" / "5").unlink()
                query = drain(made, sink, checkpoint)
                found = {x.name: x.metrics for x in gpu_ops.spark.join_progress(query.lastProgress)}
                marks = {(name, what): n for name, its in found.items() for what, n in its.items() if "mark_ms" in what}
                said[engines] = [n for _, n in sorted(marks.items())]
    assert said["one"] == said["each its own"]
    one, own = ({n: Counter(rows) for n, rows in sink.batches.items()} for sink in sinks.values())
    assert one == own
    assert len(one) == 9
    assert sum(n for *_, n, _ in sinks["one"].table) > 20


def until(condition: Callable[[], object], query: Any) -> None:
    for _ in range(600):
        if condition():
            return
        assert query.isActive, query.exception()
        time.sleep(0.1)
    raise AssertionError(query.lastProgress)


@pytest.mark.thorough
def test_pads_come_without_further_input(orders: Source, shipments: Source, tmp_path: Path) -> None:
    """The right never has a row: after its idle timeout the left alone moves the watermark, at a heartbeat."""
    orders.add(order(1, 0, "alone"), order(2, 100, "last"))
    changes = in_memory(
        gpu_ops.interval_join, orders.df.withWatermark("t", "1 second"),
        stream(shipments.df, event_time="u", delay=0, idle_timeout="1 second"),
        on="k", how="full", lower=-1000, upper=1000, heartbeat="300 milliseconds", name="beating",
    )  # fmt: skip
    assert "heartbeat   a micro-batch every 300 milliseconds" in gpu_ops.explain(changes)
    assert "idle after 1 second" in gpu_ops.explain(changes)
    sink = Sink()
    query = start(changes, sink, tmp_path / "checkpoint")
    try:
        until(lambda: sink.changes, query)
        assert [(r[0], r[3]) for r in sink.changes] == [("+I", "alone")]
        assert max(sink.batches) >= 1  # not in the micro-batch that brought the row
    finally:
        query.stop()


@pytest.mark.thorough
def test_an_engine_of_several_operators_has_heartbeats(orders: Source, shipments: Source, tmp_path: Path) -> None:
    """An aggregate above the same join: both are in one engine, whose folder goes on after a restart."""
    orders.add(order(1, 0, "alone"), order(2, 100, "last"))
    joined = gpu_ops.interval_join(
        orders.df.withWatermark("t", "1 second"),
        stream(shipments.df, event_time="u", delay=0, idle_timeout="1 second"),
        on="k", how="full", lower=-1000, upper=1000, heartbeat="300 milliseconds", name="beating", partitions=1,
        state=str(tmp_path / "joined"),
    )  # fmt: skip
    sink = Sink()
    for number, expected in enumerate((("+I", "alone", 1), ("+I", "third", 1))):
        if number:
            orders.add(order(3, 200, "third"), order(4, 300, "end"))
        counted = gpu_ops.aggregate(
            joined, by="a", aggregates={"n": "count(*)"}, partitions=1, state=str(tmp_path / "counted")
        )
        assert "beating, in the same engine" in gpu_ops.explain(counted)
        query = start(counted, sink, tmp_path / "checkpoint")
        try:
            until(lambda wanted=expected: wanted in sink.changes, query)
        finally:
            query.stop()
    assert not (tmp_path / "joined").exists()


@pytest.mark.thorough
def test_by_processing_time_the_clock_ends_a_wait(orders: Source, shipments: Source, tmp_path: Path) -> None:
    orders.add(order(1, 0), order(2, 0))
    shipments.add(shipment(1, 0))
    orders.add(order(3, 0))
    sink = Sink()
    drain(joined_by_clock(orders, shipments), sink, tmp_path / "checkpoint")
    assert [[(r[1], r[4] is None) for r in sink.batches[n]] for n in (0, 1)] == [[(1, False)], [(2, True)]]


def joined_by_clock(orders: Source, shipments: Source, **options: Any) -> Any:
    given = {"on": "k", "how": "left", "time": "processing", "lower": -1, "upper": 1, **options}
    return in_memory(gpu_ops.interval_join, orders.df, shipments.df, **given)


def test_explain(orders: Source, shipments: Source) -> None:
    changes = in_memory(
        gpu_ops.interval_join,
        stream(orders.df.withWatermark("t", "10 seconds"), name="orders"),
        stream(shipments.df, name="shipments", delay="1 minute"),
        on="k", how="full", time=("T", "u"), lower="-5 minutes", upper="4 hours", upper_inclusive=False,
        late="tag", name="shipped",
    )  # fmt: skip
    lines = gpu_ops.explain(changes).splitlines()
    assert lines[:5] == [
        "interval join, full: orders, shipments  (metrics 'shipped')",
        "  key         orders.k = shipments.k",
        "  interval    -5 minutes <= shipments.u - orders.t < 4 hours",
        "  time        event time; late rows come out with the row kind 'late'",
        "  watermark   the one of the input that is behind, over all partitions; it moves between micro-batches",
    ]
    assert "              rows come up to 10 seconds late; kept until the watermark is 4 hours past its time" in lines
    assert "              rows come up to 1 minute late; kept until the watermark is 5 minutes past its time" in lines
    lines = gpu_ops.explain(joined_by_clock(orders, shipments, lower="-1 second", upper="0 seconds")).splitlines()
    assert "  time        by the clock of the micro-batch; no row is late" in lines
    assert "              kept for 1 second" in lines
    assert "              not kept beyond its micro-batch" in lines


def test_warnings(orders: Source, shipments: Source) -> None:
    with (
        pytest.warns(gpu_ops.NoWatermarkWarning, match="input 'right' has no watermark") as caught,
        pytest.warns(gpu_ops.MemoryOnlyStateWarning) as other,
    ):
        changes = gpu_ops.interval_join(
            orders.df.withWatermark("t", "1 second"), stream(shipments.df, event_time="u"), on="k", lower=0, upper=1
        )
    assert {w.filename for w in (*caught, *other)} == {__file__}
    assert "kept for ever, as right has no watermark" in gpu_ops.explain(changes)


def test_refusals(spark: Any, orders: Source, shipments: Source, tmp_path: Path) -> None:
    left, right = orders.df.withWatermark("t", "1 second"), shipments.df.withWatermark("u", "1 second")

    def refused(match: str, a: Any = left, b: Any = right, **options: Any) -> None:
        with pytest.raises((gpu_ops.DescriptionError, gpu_ops.NotBuiltError), match=match):
            in_memory(gpu_ops.interval_join, a, b, **{"on": "k", "lower": 0, "upper": 1000, **options})

    refused("the interval is empty", lower=5, upper=4)
    refused("no duration: 'soon'", lower="soon")
    refused("input 'right' has no watermark: say which column", b=shipments.df)
    # what a regular join gives has no row time: the join is named
    plain = in_memory(gpu_ops.join, left, stream(shipments.df, name="s"), on="k", how="left", name="plain")
    assert "  row time    left.t: not in what comes out, which may be of any age" in gpu_ops.explain(plain).splitlines()
    lost = r"the join 'plain' below it \(left join on k = k\) does not pass on the event time of its inputs, left.t, as"
    refused(rf"input 'left' has no watermark: {lost} .*\. Join by time first, or say which column", a=plain)
    for make in (gpu_ops.temporal_join, gpu_ops.asof_join):
        more = {"emit": "at_watermark"} if make is gpu_ops.asof_join else {}
        with pytest.raises(gpu_ops.DescriptionError, match=lost):
            in_memory(make, plain.select("k", "t"), right, on="k", **more)
    with pytest.warns(gpu_ops.NoWatermarkWarning, match=rf"input 'left' has no watermark \({lost}"):
        in_memory(gpu_ops.interval_join, plain.select("k", "t"), right, on="k", lower=0, upper=1, time=("t", "u"))
    again = plain.select("k", "t").withWatermark("t", "1 second")
    assert "row time" in gpu_ops.explain(in_memory(gpu_ops.interval_join, again, right, on="k", lower=0, upper=1))
    refused("input 'left': time names 'nope'", time=("nope", "u"))
    refused("input 'left': time names 'nope'", time="nope")
    refused("event time 'a' is string", time=("a", "u"))
    refused("time= names 'a' and stream\\(\\) event time 't'", a=stream(left, event_time="t"), time=("a", "u"))
    with pytest.raises(gpu_ops.DescriptionError, match="delay is not negative"):
        stream(left, delay=-1)
    refused("timestamp='ts' is the later of a pair's times, and how='anti' has no pairs", how="anti", timestamp="ts")
    refused("'cross'", how="cross")
    refused("how='left'; a keyed interval join is one of inner", how="left_outer", keyed=True)
    refused("late='join'|late='drop' or late='tag'", keyed=True, late="join")
    refused("event_time= has no place", a=stream(orders.df, event_time="t"), time="processing")
    refused("ttl", a=stream(left, ttl="1 day"))
    refused("heartbeat=0", heartbeat=0)
    refused("go together", process=print)
    refused("pairs of an inner join", process=print, process_schema="k long", how="left")
    refused("there is none", side_outputs={"far": "k long"})
    given = {"process": print, "process_schema": "k long, far long"}
    for name in ("far", "right_late", "row_kind"):
        refused(f"process= would give two columns '{name}'", side_outputs={name: "k long"}, **given)
    for name in ("a.b", "late"):
        refused(f"side_outputs= has '{name}'; a name is of letters", side_outputs={name: "k long"}, **given)
    refused("side_outputs\\['x'\\]='nonsense' is no schema", side_outputs={"x": "nonsense"}, **given)
    refused("no schema", process=print, process_schema="k nonsense")
    refused(
        "rename the join's", process=print, process_schema="k long", time=("timestamp", "u"),
        a=orders.df.withColumnRenamed("t", "timestamp"),
    )  # fmt: skip
    with pytest.raises(gpu_ops.DescriptionError, match=r"event_time= is for gpu_ops\.interval_join"):
        in_memory(gpu_ops.join, stream(left, event_time="t"), right, on="k")
    with pytest.raises(gpu_ops.StateError, match="is no state folder"):
        gpu_ops.finish(spark, state=str(tmp_path / "nothing"))


@pytest.mark.thorough
def test_finish_of_a_join_that_never_waits(spark: Any, orders: Source, shipments: Source, tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    orders.add(order(1, 0))
    shipments.add(shipment(1, 0))
    query = start(gpu_ops.join(orders.df, shipments.df, on="k", state=state), Sink(), tmp_path / "checkpoint")
    try:
        query.processAllAvailable()
        with pytest.raises(gpu_ops.StateError, match="in use by the running query"):
            gpu_ops.finish(spark, state=state)
    finally:
        query.stop()
    nothing = gpu_ops.finish(spark, state=state)
    assert nothing.collect() == []
    assert nothing.columns == joined_columns()
    gpu_ops.join(orders.df, shipments.df, on="k", state=state)  # and may go on
