"""Metrics that tasks tell the driver themselves: added up, repeated tasks once, old ones forgotten."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from gpu_ops.spark.api.explain import _lookups
from gpu_ops.spark.metrics.metrics import (
    METRICS_COLUMN,
    JoinRun,
    TaskMetrics,
    added_up,
    metric_names,
    observed,
    pack,
    total,
)
from gpu_ops.spark.settings import PLUGIN, PREFIX, metrics_reported

pytestmark = pytest.mark.thorough

RUN = JoinRun("query", "run", "join")
NAMES = metric_names(("left", "right"), by_time=True)


def packed(**metrics: float | None) -> list[int | None]:
    said = {name: 0 for name in NAMES if "watermark" not in name} | metrics
    return pack(NAMES, said, backend="cpu", retries=0)


PARTITIONS = [
    packed(left_rows_in=3, probe_ms=1.5, commit_ms=0.25, watermark_ms=-5, clock_ms=10),
    packed(left_rows_in=4, rows_out_delete=2, probe_ms=0.125, watermark_ms=-7, clock_ms=10),
    packed(right_late=1),
]


def test_sparks_progress_has_what_was_added_up(spark: Any) -> None:
    text = total(NAMES, PARTITIONS)
    frame = spark.createDataFrame([(None,), (text,), (None,), (text,)], f"{METRICS_COLUMN} string")
    (row,) = frame.agg(observed(NAMES, METRICS_COLUMN)).collect()
    added = added_up(NAMES, PARTITIONS)
    assert added == row["metrics"].asDict()
    kinds = {name: type(value) for name, value in row["metrics"].asDict().items() if value is not None}
    times = {"probe_ms", "update_ms", "emit_ms", "commit_ms", "replay_ms", "snapshot_age_ms"}
    assert kinds == {name: float if name in times else int for name in kinds}
    (row,) = frame.limit(1).agg(observed(NAMES, METRICS_COLUMN)).collect()
    assert row["metrics"] is None
    assert added | {"left_rows_in": 7, "rows_out_delete": 2, "probe_ms": 1.5, "watermark_ms": -5} == added
    assert added_up(NAMES, PARTITIONS[2:])["watermark_ms"] is None


def summed(*partitions: int) -> dict[str, Any]:
    return added_up(NAMES, [PARTITIONS[n] for n in partitions])


def test_a_task_that_is_repeated_counts_once() -> None:
    kept = TaskMetrics()
    for partition in (0, 1, 0):
        kept.take(RUN, 4, partition, NAMES, json.loads(json.dumps(PARTITIONS[partition])))
    assert kept.of("query", 4) == {"join": summed(0, 1)}
    assert kept.of("query", 3) == kept.of("other", 4) == {}


def test_a_micro_batch_that_is_over_takes_no_more() -> None:
    kept, other = TaskMetrics(), RUN._replace(join="b")
    kept.take(RUN, 0, 0, NAMES, PARTITIONS[0])
    kept.take(other, 0, 0, NAMES, PARTITIONS[1])
    kept.take(RUN, 1, 0, NAMES, PARTITIONS[2])
    kept.take(RUN, 0, 1, NAMES, PARTITIONS[1])
    assert kept.of("query", 0) == {"join": summed(0), "b": summed(1)}
    assert kept.of("query", 1) == {"join": summed(2)}


def test_a_new_run_counts_anew() -> None:
    kept, again = TaskMetrics(), RUN._replace(run_id="again")
    for batch_id, partition in ((0, 0), (1, 0), (1, 1)):
        kept.take(RUN, batch_id, partition, NAMES, PARTITIONS[partition])
    kept.over("other")
    kept.over("query")
    assert kept.of("query", 1) == {"join": summed(0, 1)}
    kept.take(again, 0, 0, NAMES, PARTITIONS[2])
    assert kept.of("query", 0) == {"join": summed(2)}
    kept.take(again, 1, 0, NAMES, PARTITIONS[2])
    assert kept.of("query", 1) == {"join": summed(2)}
    assert kept.of("query", 0) == {"join": summed(2)}


def test_the_oldest_are_forgotten() -> None:
    kept = TaskMetrics(kept=2)
    for batch_id in range(5):
        kept.take(RUN, batch_id, 0, NAMES, PARTITIONS[0])
    assert [bool(kept.of("query", n)) for n in range(5)] == [False, False, True, True, True]
    kept.over("query")
    assert [bool(kept.of("query", n)) for n in range(5)] == [False, False, False, True, True]


class _Conf(dict[str, str]):
    """A session's context and configuration at once, as far as they are asked."""

    @property
    def conf(self) -> _Conf:
        return self

    @property
    def sparkContext(self) -> _Conf:  # noqa: N802 - Spark's name
        return self

    @property
    def _jsc(self) -> Any:
        found = [(n, v) for n, v in self.items() if n.startswith(PREFIX)]
        pairs = [Mock(**{"_1.return_value": n.removeprefix(PREFIX), "_2.return_value": v}) for n, v in found]
        return Mock(**{"sc.return_value.getConf.return_value.getAllWithPrefix.return_value": pairs})


@pytest.mark.parametrize(
    ("conf", "reported"),
    [
        ({}, False),
        ({"spark.plugins": PLUGIN}, True),
        ({"spark.plugins": f"other, {PLUGIN}"}, True),
        ({"spark.plugins": PLUGIN, "spark.rapids.sql.enabled": "false"}, False),
        ({"spark.plugins": PLUGIN, "spark.gpu_ops.metrics": "observed"}, False),
        ({"spark.gpu_ops.metrics": "reported"}, True),
    ],
)
def test_what_the_plugin_changes(conf: dict[str, str], reported: bool) -> None:
    assert metrics_reported(_Conf(conf)) == reported


def test_explain_says_which_way_lookups_went() -> None:
    """Of running queries, where the join runs on a GPU."""

    def reported(join: str, gpu: int, **lookups: int) -> dict[str, Any]:
        metrics = {**dict.fromkeys(NAMES, 0), "gpu_partitions": gpu, "partitions": 2}
        metrics |= {f"lookups_{way}": count for way, count in lookups.items()}
        return {
            "id": "id-1", "name": "q", "batchId": 0, "timestamp": "2026-11-26T00:00:00.000Z", "durationMs": {},
            "observedMetrics": {join: {"metrics": metrics}},
        }  # fmt: skip

    frame = Mock()
    query = Mock(id="id-1")
    query.name, frame.sparkSession.streams.active = "q", [query]
    query.recentProgress = [
        reported("a", 2, hash_join=1000, index=3), reported("b", 2, index=9), reported("a", 1, kept_table=20),
    ]  # fmt: skip
    plan: Any = SimpleNamespace(name="a")
    (said,) = _lookups(plan, frame)
    assert said == "  lookups     1,000 by hash join, 20 by kept table, 3 by index, in the last 2 micro-batches of q"
    query.recentProgress = [reported("a", 0, index=7)]
    assert _lookups(plan, frame) == []
