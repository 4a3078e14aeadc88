"""Spark Connect is refused by every public function that is given its DataFrame or session, in one way."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("pyspark")

import gpu_ops
from gpu_ops import sinks
from gpu_ops.spark.failures import refuse_connect

Remote = type("DataFrame", (), {"__module__": "pyspark.sql.connect.dataframe", "isStreaming": True})
"""What is known of one of Connect's without its packages: where its class lives, and that it has a session."""
Remote.sparkSession = type("SparkSession", (), {"__module__": "pyspark.sql.connect.session"})()  # type: ignore[attr-defined]

DF: Any = Remote()
CALLS: dict[str, Callable[[], object]] = {
    "stream": lambda: gpu_ops.stream(DF),
    "join": lambda: gpu_ops.join(DF, DF, "k"),
    "semi_join": lambda: gpu_ops.semi_join(DF, DF, "k"),
    "anti_join": lambda: gpu_ops.anti_join(DF, DF, "k"),
    "multi_join": lambda: gpu_ops.multi_join([DF, DF], "k"),
    "interval_join": lambda: gpu_ops.interval_join(DF, DF, "k", lower=0, upper=1),
    "temporal_join": lambda: gpu_ops.temporal_join(DF, DF, "k"),
    "asof_join": lambda: gpu_ops.asof_join(DF, DF, "k"),
    "lookup_join": lambda: gpu_ops.lookup_join(DF, DF, "k"),
    "lookup": lambda: gpu_ops.lookup(DF, lambda keys: keys, "k", schema="k INT"),
    "latest": lambda: gpu_ops.latest(DF, "k"),
    "top": lambda: gpu_ops.top(DF, "k", order_by="k"),
    "aggregate": lambda: gpu_ops.aggregate(DF, "k", {"n": "count(*)"}),
    "co_group": lambda: gpu_ops.co_group(DF, DF, "k", lambda one, other: one, "k INT"),
    "sql": lambda: gpu_ops.sql("SELECT * FROM a", a=DF),
    "union": lambda: gpu_ops.union(DF, DF),
    "explain": lambda: gpu_ops.explain(DF),
    "finish": lambda: gpu_ops.finish(DF.sparkSession, state="state"),
    "late": lambda: gpu_ops.late(DF, "left"),
    "side": lambda: gpu_ops.side(DF, "left_late"),
    "write_files": lambda: gpu_ops.write_files(DF, "out"),
    "read_files": lambda: gpu_ops.read_files(DF.sparkSession, "in", "json", "k INT"),
    "read_iceberg": lambda: gpu_ops.read_iceberg(DF.sparkSession, "a.t"),
    "read_state": lambda: gpu_ops.read_state(DF.sparkSession, "state"),
    "plan_change": lambda: gpu_ops.plan_change("SELECT * FROM a", old_state="old", a=DF),
    "change": lambda: gpu_ops.change(
        "SELECT * FROM a", state="s", checkpoint="c", old_state="old", old_checkpoint="d", write=None, a=DF
    ),
    "undo_change": lambda: gpu_ops.undo_change("SELECT * FROM a", state="old", write=None, a=DF),
    "read_kafka": lambda: gpu_ops.read_kafka(DF.sparkSession, "h:9092", "t", "json", "k INT"),
    "debezium": lambda: gpu_ops.debezium(DF, "k INT"),
    "outputs": lambda: gpu_ops.outputs(a=DF),
    "each": lambda: sinks.each(a=sinks.memory_view("t"))(DF, 0),
    "changelog_files": lambda: sinks.changelog_files("out")(DF, 0),
    "delta_view": lambda: sinks.delta_view("t")(DF, 0),
    "iceberg_view": lambda: sinks.iceberg_view("a.t", catalog={"type": "in-memory"})(DF, 0),
    "jdbc_view": lambda: sinks.jdbc_view("jdbc:x", "t")(DF, 0),
    "postgres_view": lambda: sinks.postgres_view("postgresql://h/d", "t")(DF, 0),
    "kafka_upsert": lambda: sinks.kafka_upsert("h:9092", "t", "k")(DF, 0),
    "kafka_debezium": lambda: sinks.kafka_debezium("h:9092", "t", "k")(DF, 0),
    "json_messages": lambda: sinks.json_messages(DF),
    "memory_view": lambda: sinks.memory_view("t"),
}
OTHERS = {"why", "reopen", "show", "progress", "engine"}
"""Functions that take neither, or nothing of it that needs the JVM."""


@pytest.mark.parametrize("name", CALLS)
def test_connect_is_refused(name, monkeypatch):
    monkeypatch.setattr("pyspark.sql.SparkSession.active", lambda: DF.sparkSession)
    monkeypatch.setattr("pyspark.sql.SparkSession.getActiveSession", lambda: None)  # who has Connect's has no other
    with pytest.raises(gpu_ops.NotBuiltError, match=r"Spark Connect.*Use a classic session, .*without \.remote\(\)"):
        CALLS[name]()


def test_every_function_is_asked():
    public = {name: getattr(module, name) for module in (gpu_ops, sinks) for name in module.__all__}
    functions = {name for name, value in public.items() if inspect.isfunction(value)}
    assert functions == CALLS.keys() | OTHERS


def test_where_its_classes_are():
    """With Connect's packages there: the real classes are known by the same sign."""
    pytest.importorskip("grpc", reason="Spark Connect's packages are not here: pip install 'pyspark[connect]'")
    for module, name in (("dataframe", "DataFrame"), ("session", "SparkSession")):
        kind = getattr(importlib.import_module(f"pyspark.sql.connect.{module}"), name)
        with pytest.raises(gpu_ops.NotBuiltError):
            refuse_connect(object.__new__(kind))
