"""The settings that help: known to this Spark, set by the pack's own session, and settable in a running one."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import gpu_ops.spark
from gpu_ops.spark.driver import executors
from spark.support import Sink, Source, drain, in_memory

pytestmark = pytest.mark.thorough

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ADAPTIVE = "spark.sql.adaptive.streaming.stateless.enabled"


def test_own_session_has_the_recommended_settings(spark: SparkSession) -> None:
    recommended = gpu_ops.spark.recommended_conf()
    assert {key: spark.conf.get(key) for key in recommended} == recommended


def test_own_session_starts_without_a_name_of_the_machine_and_leaves_the_environment_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str | None] = []
    monkeypatch.delenv("SPARK_LOCAL_HOSTNAME", raising=False)
    monkeypatch.setattr(
        "pyspark.sql.SparkSession.Builder.getOrCreate", lambda _: seen.append(os.environ.get("SPARK_LOCAL_HOSTNAME"))
    )
    for name in ("_without_checksums", "_without_yarn"):
        monkeypatch.setattr(f"gpu_ops.spark.api.session.{name}", lambda _: None)
    for master in ("local[2]", "spark://host:7077"):
        gpu_ops.spark.session(master=master)
        assert "SPARK_LOCAL_HOSTNAME" not in os.environ
    assert seen == ["localhost", None]


def test_local_files_have_no_checksums_beside_them(spark: SparkSession, tmp_path: Path) -> None:
    spark.range(2).coalesce(1).write.json(str(tmp_path / "rows"))
    assert not list((tmp_path / "rows").glob(".*"))


def test_hadoops_configuration_lacks_the_defaults_of_yarn_alone(spark: SparkSession) -> None:
    configuration = spark.sparkContext._jsc.hadoopConfiguration()  # type: ignore[attr-defined]
    assert configuration.get("yarn.resourcemanager.address") is None
    assert configuration.get("fs.AbstractFileSystem.hdfs.impl") == "org.apache.hadoop.fs.Hdfs"
    assert configuration.get("mapreduce.job.ubertask.enable") == "false"


def test_jvms_that_only_plan_do_without_their_second_compiler() -> None:
    more = gpu_ops.spark.recommended_conf(arrow_rows=True)
    assert more.items() > gpu_ops.spark.recommended_conf().items()
    options = more["spark.driver.extraJavaOptions"]
    assert (
        options == more["spark.executor.extraJavaOptions"] == "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m"
    )


def test_recommended_settings_are_known_and_may_be_set_while_spark_runs(spark: SparkSession) -> None:
    for key, value in gpu_ops.spark.recommended_conf().items():
        new = key in (_ADAPTIVE, "spark.sql.unionOutputPartitioning")
        old = new and tuple(map(int, spark.version.split(".")[:2])) < (4, 2)  # has no such thing to do
        assert old or spark.conf.isModifiable(key)  # false for a name that this Spark does not know
        spark.conf.set(key, value)


def test_a_micro_batch_of_a_join_is_one_job_and_says_the_same_where_spark_plans_adaptively(
    spark: Any, tmp_path: Path
) -> None:
    left, right = (
        Source(spark, tmp_path / "left", "k long, v long"),
        Source(spark, tmp_path / "right", "k long, w long"),
    )
    left.add(*({"k": n % 7, "v": n} for n in range(30)))
    left.add(*({"k": n % 11, "v": n} for n in range(30, 50)))
    right.add(*({"k": n % 5, "w": n} for n in range(10)))
    right.add(*({"k": n % 9, "w": n} for n in range(10, 20)))
    said, jobs = [], []
    for adaptive in ("true", "false"):
        sink = Sink()
        spark.conf.set(_ADAPTIVE, adaptive)
        try:
            query = drain(in_memory(gpu_ops.join, left.df, right.df, on="k", how="left"), sink, tmp_path / adaptive)
        finally:
            spark.conf.set(_ADAPTIVE, gpu_ops.spark.recommended_conf()[_ADAPTIVE])
        said.append(sink.batches)
        jobs.append(len(spark.sparkContext.statusTracker().getJobIdsForGroup(str(query.runId))))
    assert said[0] == said[1]
    assert jobs[1] == len(said[1]) == 2


def test_what_is_handed_out_is_a_copy() -> None:
    gpu_ops.spark.recommended_conf().clear()
    assert gpu_ops.spark.recommended_conf()


def test_sparks_own_stateful_queries_run_on_rocksdb_in_our_session(spark: Any, tmp_path: Path) -> None:
    """Its state stores copy local files, for which Hadoop wants a file system of a certain class."""
    source = Source(spark, tmp_path / "rows", "k long")
    source.add(*({"k": k % 3} for k in range(9)))
    provider = "spark.sql.streaming.stateStore.providerClass"
    spark.conf.set(provider, "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider")
    try:
        counts = source.df.groupBy("k").count().writeStream.outputMode("update").format("memory").queryName("counts")
        query = counts.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True).start()
        query.awaitTermination()
    finally:
        spark.conf.unset(provider)
    assert sorted(map(tuple, spark.table("counts").collect())) == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.skipif(sys.platform != "linux", reason="the daemon is Linux's alone")
def test_workers_are_forked_with_their_imports_by_a_daemon_without_threads(spark: Any) -> None:
    assert spark.conf.get("spark.python.daemon.module") == "gpu_ops.spark.worker_daemon"

    def look(batches: Any) -> Any:
        import pyarrow as pa

        list(batches)
        daemon = Path(f"/proc/{os.getppid()}")
        command = (daemon / "cmdline").read_text().split("\0")
        threads = sorted((task / "comm").read_text().strip() for task in (daemon / "task").iterdir())
        libraries = {line.rpartition("/")[2] for line in (daemon / "maps").read_text().splitlines()}
        loaded = [name for name in ("arrow_flight", "openblas") if any(name in library for library in libraries)]
        pool = pa.default_memory_pool().backend_name
        yield pa.RecordBatch.from_pydict({"seen": [pool, *command[1:3], *loaded, *threads]})

    rows = spark.range(0, 1, 1, 1).mapInArrow(look, "seen string").collect()
    pool, module, name, *rest = (row["seen"] for row in rows)
    assert (pool, module, name) == ("system", "-m", "gpu_ops.spark.worker_daemon")
    assert rest[:2] == ["arrow_flight", "openblas"]
    assert len([name for name in rest[2:] if name != "jemalloc_bg_thd"]) == 1, f"threads besides its own: {rest[2:]}"


def test_workers_are_begun_once_as_soon_as_a_query_is_built(
    spark: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begun: list[threading.Thread] = []

    class Begun(threading.Thread):
        def start(self) -> None:
            begun.append(self)
            super().start()

    def look(batches: Any) -> Any:
        import pyarrow as pa

        list(batches)
        yield pa.RecordBatch.from_pydict({"seen": ["colorsys" in sys.modules]})

    executors._begun.discard(spark.sparkContext)
    monkeypatch.setattr("gpu_ops.spark.driver.executors.NEEDED", ("colorsys",))  # nothing else imports it
    monkeypatch.setattr("gpu_ops.spark.driver.executors.threading.Thread", Begun)
    for _ in range(2):
        gpu_ops.read_files(spark, str(tmp_path), "csv", "k long")
    monkeypatch.undo()
    mine = [thread for thread in begun if thread.name == "gpu-join-workers"]
    assert len(mine) == 1
    mine[0].join()
    # Spark gives tasks to those of its idle workers that have waited longest
    looks = (spark.range(0, 1, 1, 1).mapInArrow(look, "seen boolean").collect() for _ in range(20))
    assert any(row["seen"] for rows in looks for row in rows)
