"""A partition of an interval join: under the watermark it was given first, however often and wherever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from gpu_ops.descriptions.by_time import IntervalJoin
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.interval import Interval
from gpu_ops.descriptions.keys import Key
from gpu_ops.errors import StateError
from gpu_ops.join_engine import JoinEngine
from gpu_ops.spark.server.partition import Applied
from gpu_ops.spark.tasks.engine import left_over
from gpu_ops.spark.wire.command import ApplyCommand, Wire
from gpu_ops.state.address import StateAddress
from gpu_ops.state.durable import PartitionLog, Times
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import FINISHED, Manifest
from state.support import PartitionState

TIME = pa.timestamp("us", "UTC")
LEFT = pa.schema([("k", pa.int64()), ("t", TIME), ("a", pa.int64())])
RIGHT = pa.schema([("k", pa.int64()), ("u", TIME)])
JOIN = IntervalJoin(
    "full",
    Input("orders", LEFT, event_time="t", delay_ms=3000),
    Input("shipments", RIGHT, event_time="u", delay_ms=3000),
    (Key("k", "k", using=True),),
    interval=Interval(-2000, 4000, late="tag"),
)
WIRE = Wire("__side", "__order", (("k", "k", "c0"), ("t", "u", "c1"), ("a", None, "c2")))
WIRE_SCHEMA = pa.schema(
    [("__side", pa.int8()), ("__order", pa.int64()), ("c0", pa.int64()), ("c1", TIME), ("c2", pa.int64())]
)
MANIFEST = Manifest(JOIN.to_json(), 2, "q")


def batches(count: int, rows: int = 20) -> list[pa.Table]:
    """Times that advance by a second per row, some far behind."""
    rng = np.random.default_rng(7)
    tables = []
    for batch in range(count):
        place = np.arange(batch * rows, (batch + 1) * rows)
        seconds = np.maximum(place - rng.integers(0, 8, rows), 0)
        columns = [rng.integers(0, 2, rows).astype(np.int8), place, rng.integers(0, 3, rows)]
        tables.append(pa.table([*columns, pa.array(seconds * 1_000_000, TIME), place], schema=WIRE_SCHEMA))
    return tables


BATCHES = batches(10)
WATERMARKS = [None, None, 44_000, 66_000, 66_000, 103_000, 126_000, 144_500, 163_000, 185_000]


def expected() -> tuple[list[pa.Table], pa.Table]:
    """What an engine that never stops says, and what it says at the end."""
    engine, answers = JoinEngine(JOIN, "cpu"), []
    for batch, watermark in zip(BATCHES, WATERMARKS, strict=True):
        rows = WIRE.split(JOIN, batch)
        result = engine.prepare(
            *rows.tables, orders=rows.sequences, clock_ms=1,
            watermark=(None, None) if watermark is None else watermark,
        )  # fmt: skip
        engine.commit()
        answers.append(result.changelog)
    return answers, engine.finish()


ANSWERS, LEFT_OVER = expected()


def opened(state: Path | None, **options: Any) -> PartitionState:
    folder = None if state is None else StateAddress.of(state)
    return PartitionState(ApplyCommand("j", folder, JOIN.to_json(), "q", 0, 0, 2, "cpu", WIRE, options))


def apply(partition: PartitionState, batch: int, *, wrong: bool = False) -> Applied:
    """``wrong``: as a repetition under another watermark would be."""
    watermark = WATERMARKS[batch]
    return partition.apply(batch, BATCHES[batch], WIRE, watermark=10**6 if wrong else watermark, clock_ms=5 + batch)


def test_the_trace_has_what_it_is_to_test() -> None:
    kinds = pa.concat_tables(ANSWERS)["row_kind"].value_counts().to_pylist()
    assert {k["values"]: k["counts"] > 10 for k in kinds} == {"+I": True, "late": True}
    assert any(a["t"].null_count and a["u"].null_count for a in ANSWERS)
    assert LEFT_OVER.num_rows > 1


@pytest.mark.one_in(4, all=2)
@pytest.mark.parametrize("options", [{}, {"snapshot_every": 1}, {"snapshot_every": 3}])
@pytest.mark.parametrize("seed", range(4))
def test_restarts_and_repetitions_answer_alike(tmp_path: Path, options: dict[str, Any], seed: int) -> None:
    rng = np.random.default_rng(seed)
    servers = [opened(tmp_path, **options) for _ in range(2)]
    latest: list[int | None] = [None, None]
    for batch, answer in enumerate(ANSWERS):
        if rng.random() < 0.3:
            servers[0] = opened(tmp_path, **options)
        which, other = rng.integers(0, 2, 2)
        first = apply(servers[which], batch)
        again = apply(servers[other] if which != other else opened(tmp_path, **options), batch, wrong=which == other)
        rows = WIRE.split(JOIN, BATCHES[batch])
        for side, column in enumerate((rows.tables[0]["t"], rows.tables[1]["u"])):
            latest[side] = max(latest[side] or 0, max(column.cast(pa.int64()).to_pylist()) // 1000)
        for found in (first, again):
            assert found.changelog.equals(answer)
            assert found.metrics.get("watermark_ms") == WATERMARKS[batch]
            assert list(found.latest) == latest
            assert found.metrics["clock_ms"] == 5 + batch
    files = Files.at(str(tmp_path))
    log = PartitionLog(files, Manifest.of(files), 0)
    assert log.record_times(9) == Times(185_000, (latest[0], latest[1]))
    if options:
        assert log.snapshot_times(9) is not None


def test_in_memory_only_it_repeats_under_the_first_watermark() -> None:
    partition = opened(None)
    for batch, answer in enumerate(ANSWERS):
        for wrong in (False, True):
            assert apply(partition, batch, wrong=wrong).changelog.equals(answer)


def test_without_rows_the_watermark_still_ends_waits() -> None:
    partition = opened(None)
    apply(partition, 0)
    none = WIRE_SCHEMA.empty_table()
    found = partition.apply(1, none, WIRE, watermark=10**6, clock_ms=6)
    assert found.changelog.num_rows > 0
    assert found.metrics["left_state_rows"] == found.metrics["right_state_rows"] == 0
    assert (found.latest[0] or 0) > 0


@pytest.mark.parametrize("options", [{}, {"snapshot_every": 3}])
def test_what_is_left_over(tmp_path: Path, options: dict[str, Any]) -> None:
    partition = opened(tmp_path, **options)
    for batch in range(len(BATCHES)):
        apply(partition, batch)
    before = sorted(p.name for p in (tmp_path / "p" / "0").iterdir())
    for _ in range(2):
        found = pa.concat_tables(left_over(str(tmp_path), MANIFEST, 0, len(BATCHES)))
        assert found.equals(LEFT_OVER)
    assert sorted(p.name for p in (tmp_path / "p" / "0").iterdir()) == before
    with pytest.raises(StateError, match="ends with batch 9, Spark asks for batch 11"):
        list(left_over(str(tmp_path), MANIFEST, 0, 11))
    Files.at(str(tmp_path)).create(FINISHED, b"{}")
    with pytest.raises(StateError, match="is finished"):
        apply(opened(tmp_path), 9)
    assert pa.concat_tables(left_over(str(tmp_path), MANIFEST, 0, len(BATCHES))).equals(LEFT_OVER)
