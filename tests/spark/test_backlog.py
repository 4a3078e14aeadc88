"""Backlogs through Spark: the trigger decides, runs that fail go on, and a live join is as if there had been none."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from state.support import PartitionState

import gpu_ops
from gpu_ops import stream
from gpu_ops.spark.driver.queries import takes_what_is_there
from gpu_ops.spark.metrics.metrics import metric_names
from gpu_ops.spark.metrics.progress import JoinProgress
from gpu_ops.spark.wire.command import ApplyCommand, Wire
from gpu_ops.state.address import StateAddress
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import Manifest
from spark.feeds import Feed, sql_join
from spark.support import Row, Sink, drain, fold, start

pytestmark = [pytest.mark.spark, pytest.mark.thorough]

SQL = "SELECT orders.k, id, a, b FROM orders LEFT JOIN prices ON orders.k = prices.k"


@pytest.fixture
def feeds(spark: Any, tmp_path: Path) -> list[Feed]:
    keys = (1, 2, 3, None)
    made = [
        Feed(spark, tmp_path, "orders", {"id": ("long", None), "k": ("int", keys), "a": ("double", (1.5, 2.5))}),
        Feed(spark, tmp_path, "prices", {"k": ("long", keys), "b": ("string", ("x", "y", None))}),
    ]
    for _ in range(3):
        more(made, 12)
    return made


def more(feeds: list[Feed], rows: int) -> None:
    for feed in feeds:
        feed.more(rows)


def joined(feeds: list[Feed], state: Path, *, backlog: bool = True) -> Any:
    orders = stream(feeds[0].df, name="orders", row_kind="op", unique_key="id", updates="retract")
    prices = stream(feeds[1].df, name="prices", row_kind="op")
    return gpu_ops.join(orders, prices, on="k", how="left", state=str(state), name="joined", backlog=backlog)


def go_live(df: Any, sink: Sink, checkpoint: Path) -> None:
    query = start(df, sink, checkpoint, processingTime="0 seconds")
    try:
        query.processAllAvailable()
    finally:
        query.stop()


def state_of(state: Path, version: int) -> Counter[str]:
    """The rows that the partitions of a folder hold, with their association counts."""
    manifest = Manifest.read(Files.at(str(state)))
    assert manifest is not None
    held: Counter[str] = Counter()
    for number in range(manifest.partitions):
        partition = PartitionState(
            ApplyCommand(
                "look", StateAddress.of(state), manifest.description, manifest.query_id, version, number,
                manifest.partitions, "cpu", Wire("", "", ()), {},
            )
        )  # fmt: skip
        partition._load(version, over=True)
        assert partition._engine is not None
        for side, table in partition._engine.snapshot().items():
            assert "__kind" not in table.column_names
            held.update(f"{number} {side} {row}" for row in table.to_pylist())
    return held


def test_a_backlog_that_fails_goes_on_and_goes_live(spark: Any, feeds: list[Feed], tmp_path: Path) -> None:
    state, checkpoint, sink = tmp_path / "state", tmp_path / "checkpoint", Sink()
    failed = False

    def failing(df: Any, batch: int) -> None:
        nonlocal failed
        sink(df, batch)
        if batch == 1 and not failed:
            failed = True
            raise RuntimeError("the sink is full")

    with pytest.raises(Exception, match="the sink is full"):
        drain(joined(feeds, state), failing, checkpoint)
    query = drain(joined(feeds, state), failing, checkpoint)
    assert failed
    assert sorted(sink.batches) == [0, 1, 2]
    assert not sink.changes
    metrics = query.lastProgress["observedMetrics"]["joined"]["metrics"]
    assert metrics["left_state_rows"] == len(feeds[0].table(list(feeds[0].columns)))

    # Spark forgets that it has committed the last one; the run that repeats it is a live one
    for file in (checkpoint / "commits").glob("*2*"):
        file.unlink()
    more(feeds, 3)
    go_live(joined(feeds, state), sink, checkpoint)
    assert sink.batches[2] == []
    assert fold(sink.batches[3]) == sql_join(SQL, feeds, 4)
    kinds = Counter(row[0] for row in sink.batches[3])
    assert kinds["+I"] >= len(sql_join(SQL, feeds, 3))

    more(feeds, 6)
    drain(joined(feeds, state), sink, checkpoint)  # once live it stays so
    assert len(sink.batches[4]) > 0
    assert sink.table == sql_join(SQL, feeds, 5)
    assert gpu_ops.finish(spark, state=str(state)).collect() == []

    without, other = Sink(), tmp_path / "other"
    drain(joined(feeds, other, backlog=False), without, tmp_path / "checkpoint2")
    assert without.table == sink.table
    assert state_of(other, 5) == state_of(state, 5)
    # the history itself was not said change by change
    assert sum(len(without.batches[n]) for n in range(4)) > len(sink.batches[3])


def test_the_end_of_a_backlog_is_its_net_result(spark: Any, feeds: list[Feed], tmp_path: Path) -> None:
    state, checkpoint, sink = tmp_path / "state", tmp_path / "checkpoint", Sink()
    drain(joined(feeds, state), sink, checkpoint)
    for _ in range(2):
        found: list[Row] = [tuple(row) for row in gpu_ops.finish(spark, state=str(state)).collect()]
        assert {row[0] for row in found} == {"+I"}
        assert fold(found) == sql_join(SQL, feeds, 3)
    with pytest.raises(gpu_ops.StateError, match="is finished"):
        joined(feeds, state)
    gpu_ops.reopen(state=str(state))
    more(feeds, 4)
    go_live(joined(feeds, state, backlog=False), sink, checkpoint)  # also without the option
    assert sink.table == sql_join(SQL, feeds, 4)


def test_a_trigger_that_cannot_be_read() -> None:
    with pytest.raises(gpu_ops.StateError, match=r"which this version of Spark does not tell .*: leave backlog= out"):
        takes_what_is_there([SimpleNamespace(runId="r")], "r")
    with pytest.raises(gpu_ops.StateError, match="the run r of the query is over"):
        takes_what_is_there([], "r")


def test_a_progress_bar() -> None:
    event = type("Event", (), {"id": "q", "exception": None})()
    shown = io.StringIO()
    bar = gpu_ops.BacklogProgress(400, console=Console(file=shown, force_terminal=True, width=100))
    numbers = dict.fromkeys(metric_names(("left", "right")), 50)
    for run in range(2):
        bar.onQueryStarted(event)
        for batch in range(3):
            bar.add(JoinProgress("history", "q", None, batch, "", numbers))
            bar.add(JoinProgress("another", "q", None, batch, "", numbers))
        assert bar.rows == 300
        assert 0 < bar.rows_per_second < 1e9
        bar.onQueryTerminated(event)
        assert shown.getvalue().count("300 rows") > run
    text = shown.getvalue()
    assert "history" in text
    assert "another" not in text
    assert "75%" in text
