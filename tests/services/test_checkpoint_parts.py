"""Kafka's and Delta's own sources in a checkpoint made of parts of others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as f
from spark.support import Sink, drain

import gpu_ops
from gpu_ops.errors import StateError
from gpu_ops.spark.driver.checkpoint import Checkpoint, write_checkpoint
from gpu_ops.spark.driver.stream_sources import sources_of
from gpu_ops.spark.sources.topics import topics_beside
from services.test_kafka_topics import topic

__all__ = ["topic"]
pytestmark = [pytest.mark.spark, pytest.mark.services]


def rows(df: Any, checkpoint: Path) -> list[tuple[str, int]]:
    sink = Sink()
    drain(df, sink, checkpoint)
    return sorted(sink.changes)


def union(**frames: Any) -> Any:
    """The numbers of some streams, each with its stream's name."""
    first, *others = (df.select(f.lit(name).alias("source"), "id") for name, df in frames.items())
    for other in others:
        first = first.unionAll(other)
    return first


def write(folder: Path, new: Any, old: Any, build: Any, takes: list[tuple[str, int]]) -> None:
    """Makes the checkpoint of a query of those of an old one and of a build."""
    spark = new.sparkSession
    of = {
        name: Checkpoint.read(spark, str(folder / name), sources_of(df))
        for name, df in (("old", old), ("build", build))
    }
    parts, built = [(of[name], number) for name, number in takes], of["build"]
    write_checkpoint(
        spark, str(folder / "new"), built.query_id, built.version - 1, parts,
        build=built, sources=sources_of(new), beside=topics_beside(spark, parts),
    )  # fmt: skip


def test_topics_of_kafka_go_on_at_their_offsets(spark, topic, tmp_path):
    a, b, c = topic(2), topic(), topic()
    for one, values in ((a, [{"id": 1}, {"id": 2}]), (b, [{"id": 10}]), (c, [{"id": 100}])):
        one.send(*values)
    a.send({"id": 3}, partition=1)
    of_a, of_b, of_c = (one.rows(spark, options={"maxOffsetsPerTrigger": 2}) for one in (a, b, c))
    old, build = union(b=of_b, a=of_a), union(c=of_c)
    assert rows(old, tmp_path / "old") == [("a", 1), ("a", 2), ("a", 3), ("b", 10)]
    assert rows(build, tmp_path / "build") == [("c", 100)]
    c.send({"id": 101})
    a.send({"id": 4}, partition=1)
    new = union(again=of_a, c=of_c, a=of_a.where("id > 0"))
    write(tmp_path, new, old, build, [("old", 1), ("build", 0)])
    assert rows(new, tmp_path / "new") == [("a", 4), ("again", 4), ("c", 101)]
    a.send({"id": 5})
    assert rows(new, tmp_path / "new") == [("a", 5), ("again", 5)]


def test_a_topic_made_anew_between_the_queries_is_noticed(spark, topic, tmp_path):
    a, c = topic(), topic()
    a.send({"id": 1})
    c.send({"id": 100})
    old, build = union(a=a.rows(spark)), union(c=c.rows(spark))
    rows(old, tmp_path / "old")
    rows(build, tmp_path / "build")
    a.delete()
    a.create()
    a.send({"id": 2}, {"id": 3})
    new = union(c=c.rows(spark), a=a.rows(spark))
    write(tmp_path, new, old, build, [("build", 0), ("old", 0)])
    with pytest.raises((StateError, StreamingQueryException), match="was deleted and made anew"):
        rows(new, tmp_path / "new")


def test_delta_tables_go_on_at_their_versions(spark, tmp_path):
    def append(name: str, *ids: int) -> Any:
        spark.createDataFrame([(x,) for x in ids], "id INT").write.format("delta").mode("append").save(
            str(tmp_path / name)
        )

    properties = "TBLPROPERTIES (delta.enableChangeDataFeed = true)"
    spark.sql(f"CREATE TABLE delta.`{tmp_path / 'b'}` (id INT) USING delta {properties}")
    for name, ids in (("a", [1, 2]), ("b", [10]), ("c", [100])):
        append(name, *ids)
    a, c = (spark.readStream.format("delta").option("maxFilesPerTrigger", 1).load(str(tmp_path / x)) for x in "ac")
    b = gpu_ops.read_files(spark, str(tmp_path / "b"), "delta", "id INT")
    append("a", 3)
    append("a", 4)
    old, build = union(b=b, a=a), union(c=c)
    assert rows(old, tmp_path / "old") == [*(("a", x) for x in (1, 2, 3, 4)), ("b", 10)]
    assert rows(build, tmp_path / "build") == [("c", 100)]
    append("a", 5)
    append("b", 11)
    new = union(c=c, a=a, b=b, again=a)
    write(tmp_path, new, old, build, [("build", 0), ("old", 1), ("old", 0)])
    assert rows(new, tmp_path / "new") == [("a", 5), ("again", 5), ("b", 11)]
    append("c", 101)
    append("b", 12)
    assert rows(new, tmp_path / "new") == [("b", 12), ("c", 101)]
