"""Mistakes of a first hour: each gets an error of this pack whose first line says what is wrong and what to do."""

from __future__ import annotations

import dataclasses
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from oracle.drive import gpu_status
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import functions as f

import gpu_ops
from gpu_ops import stream
from spark.support import in_memory

pytestmark = [pytest.mark.spark, pytest.mark.filterwarnings("ignore::gpu_ops.MemoryOnlyStateWarning")]


@dataclasses.dataclass
class Given:
    """Two streams, a static table, and folders."""

    spark: Any
    inputs: Path
    folder: Path

    @property
    def orders(self) -> Any:
        return self.spark.readStream.schema("id INT, item STRING, at TIMESTAMP").json(str(self.inputs / "orders"))

    @property
    def prices(self) -> Any:
        schema = "op STRING, id INT, price DOUBLE, at TIMESTAMP"
        return self.spark.readStream.schema(schema).json(str(self.inputs / "prices"))

    @property
    def table(self) -> Any:
        return self.spark.createDataFrame([(1, "book")], "id INT, title STRING")

    def join(self, **options: Any) -> Any:
        """A join that is right, but for what is given."""
        right = options.pop("right", stream(self.prices.drop("at"), row_kind="op"))
        left = options.pop("left", self.orders.drop("at"))
        return gpu_ops.join(left, right, **{"on": "id", "how": "left", "state": self.folder / "state", **options})

    def start(self, changes: Any, **options: Any) -> Any:
        """A query, which is stopped when it has taken what there is."""
        query = changes.writeStream.format("noop")
        query = query.option("checkpointLocation", str(self.folder / options.pop("checkpoint", "checkpoint")))
        for name, value in options.items():
            query = getattr(query, name)(value)
        running = query.trigger(availableNow=True).start()
        running.awaitTermination()
        return running


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mistakes")
    for name, rows in (("orders", '{"id": 1, "item": "book"}'), ("prices", '{"op": "+I", "id": 1, "price": 2.0}')):
        (folder / name).mkdir()
        (folder / name / "1.json").write_text(rows)
    return folder


@pytest.fixture
def given(spark, inputs, folder) -> Given:
    return Given(spark, inputs, folder)


D, S, N, B = gpu_ops.DescriptionError, gpu_ops.StateError, gpu_ops.NotBuiltError, gpu_ops.BackendError

Mistake = tuple[Callable[[Given], object], type[Exception], str]

DESCRIBED: dict[str, Mistake] = {
    # keys
    "on is a comparison": (lambda g: g.join(on=g.orders.id == g.prices.id), D, r"write on='id'"),
    "on is a list of comparisons": (
        lambda g: g.join(on=[g.orders.id == g.prices.price]), D, r"write on=\[\('id', 'price'\)\]"),
    "on is another condition": (lambda g: g.join(on=g.orders.id > g.prices.id), D, r"names of columns.*where="),
    "on names no column": (lambda g: g.join(on="order_id"), D, r"'left'.*order_id.*there are id, item"),
    "on names a column of one input": (lambda g: g.join(on="item"), D, r"'right'.*item.*there are id, price"),
    "keys of two types": (
        lambda g: g.join(on=[("item", "id")]), D, r"cannot compare.*'item' \(string\).*'id' \(int32\).*CAST"),
    "on is a number": (lambda g: g.join(on=1), D, r"on= takes names of columns"),
    # how
    "how is misspelled": (lambda g: g.join(how="lefft"), D, r"how='lefft'.*did you mean 'left'"),
    "how is cross": (lambda g: g.join(how="cross"), D, r"how='cross'.*on=None"),
    "how and on have changed places": (lambda g: g.join(on="left", how="id"), D, r"how='id'.*inner, left"),
    # where
    "where is a Column": (lambda g: g.join(where=g.prices.price > 1), D, r"where= is SQL text"),
    "where does not parse": (lambda g: g.join(where="price >"), gpu_ops.ConditionError, r"line 1, column"),
    "where names no column": (lambda g: g.join(where="cost > 1"), gpu_ops.ConditionError, r"cost.*line 1"),
    "where is ambiguous": (lambda g: g.join(where="id > 1"), gpu_ops.ConditionError, r"ambiguous.*left.*right"),
    # inputs
    "a pandas frame": (
        lambda g: g.join(left=pd.DataFrame({"id": [1]})), D, r"pandas.*createDataFrame.*JoinEngine"),
    "an Arrow table": (lambda g: g.join(left=pa.table({"id": [1]})), D, r"pyarrow.*createDataFrame.*JoinEngine"),
    "a path": (lambda g: g.join(left="orders/"), D, r"not str.*read_files"),
    "a pandas frame in stream()": (lambda g: stream(pd.DataFrame({"id": [1]})), D, r"pandas.*createDataFrame"),
    "a pandas frame in multi_join()": (
        lambda g: gpu_ops.multi_join([g.orders, pd.DataFrame({"id": [1]})], on="id"), D, r"pandas.*createDataFrame"),
    "a pandas frame in sql()": (
        lambda g: gpu_ops.sql("SELECT * FROM a", a=pd.DataFrame({"id": [1]})), D, r"pandas.*createDataFrame"),
    "a pandas frame in aggregate()": (
        lambda g: gpu_ops.aggregate(pd.DataFrame({"id": [1]}), "id", {"n": "count(*)"}), D, r"pandas.*createDataFrame"),
    "a streaming aggregate": (
        lambda g: g.join(left=g.orders.groupBy("id").count()), D, r"streaming aggregate.*unique_key=\['id'\]"),
    "row kinds that are numbers": (
        lambda g: stream(g.prices, row_kind="id"), D, r"row kinds are strings, column 'id' is int"),
    "row kinds that are not there": (lambda g: stream(g.prices, row_kind="kind"), D, r"'kind'; did you mean 'id'"),
    "a unique key that is not there": (lambda g: stream(g.prices, unique_key="key"), D, r"'key'; there are op, id"),
    "a unique key that is a number": (lambda g: stream(g.prices, unique_key=5), D, r"a column's name"),
    "a TTL in words": (lambda g: stream(g.orders, ttl="a week"), D, r"a week.*7 days"),
    "updates=append": (lambda g: stream(g.orders, updates="append"), D, r"append.*upsert.*retract"),
    "bad_rows=ignore": (lambda g: stream(g.orders, bad_rows="ignore"), D, r"ignore.*fail.*drop.*tag"),
    "refresh of a stream": (lambda g: stream(g.orders, refresh="1 hour"), D, r"refresh= is for a static DataFrame"),
    "two inputs with a name": (
        lambda g: g.join(left=stream(g.orders, name="a"), right=stream(g.prices, name="a")), D,
        r"both inputs are called 'a'"),
    # options
    "an option that is not there": (lambda g: g.join(stat="x"), TypeError, r"did you mean state="),
    "emit=append": (lambda g: g.join(emit="append"), D, r"append.*per_event, per_batch, at_end"),
    "backend=cuda": (lambda g: g.join(backend="cuda"), D, r"'cuda'.*auto, cpu, gpu"),
    "partitions=0": (lambda g: g.join(partitions=0), D, r"partitions=0; there is at least one"),
    "partitions is text": (lambda g: g.join(partitions="4"), D, r"partitions='4'.*whole number"),
    "columns of one name": (
        lambda g: g.join(left=g.orders, right=g.prices.withColumnRenamed("op", "item")), D, r"item.*suffixes="),
    "suffixes that are one": (
        lambda g: g.join(left=g.orders, right=g.prices, suffixes=("_x", "_x")), D, r"suffixes"),
    "state in a static join": (
        lambda g: gpu_ops.join(g.table, g.table, "id", state=g.folder, suffixes=("", "_2")), D,
        r"needs no state folder"),
    "at_end without a state": (lambda g: in_memory(g.join, emit="at_end", state=None), D, r"give it a state= folder"),
    # state
    "state on s3a": (lambda g: g.join(state="s3a://bucket/x"), S, r"write s3:// instead"),
    "state is a number": (lambda g: g.join(state=1), S, r"a path or a URI"),
    "one state for two joins": (
        lambda g: gpu_ops.join(g.join(), g.orders.drop("at"), "id", state=g.folder / "state", suffixes=("", "_2")),
        S, r"in use by join.*give each join its own"),
    "finish without a state": (lambda g: gpu_ops.finish(g.spark, state=g.folder / "no"), S, r"is no state folder"),
    # joins by time
    "an interval join without time": (
        lambda g: gpu_ops.interval_join(g.orders, g.prices.drop("op"), "id", lower=0, upper="1 hour"), D,
        r"event_time=|withWatermark"),
    "an interval turned round": (
        lambda g: gpu_ops.interval_join(
            g.orders, g.prices.drop("op"), "id", time=("at", "at"), lower="1 hour", upper="0 seconds"), D,
        r"lower.*upper"),
    "a duration in words": (
        lambda g: gpu_ops.interval_join(
            g.orders, g.prices.drop("op"), "id", time=("at", "at"), lower="soon", upper="1 hour"), D,
        r"soon.*write for example"),
    "a time that is text": (
        lambda g: gpu_ops.interval_join(
            g.orders, g.prices.drop("op"), "id", time=("item", "at"), lower=0, upper="1 hour"), D,
        r"'item'.*(timestamp|bigint)"),
    # others
    "one input": (lambda g: gpu_ops.multi_join([g.orders], on="id"), D, r"2 to 64|two"),
    "top of no rows": (lambda g: gpu_ops.top(g.orders, "item", order_by="id", n=0), D, r"n=0"),
    "an aggregate that is not there": (
        lambda g: gpu_ops.aggregate(g.orders, "item", {"m": "median(id)"}), D, r"median.*(count|sum)"),
    "an aggregate of no column": (
        lambda g: gpu_ops.aggregate(g.orders, "item", {"m": "sum(cost)"}), D, r"cost.*id, item"),
    "a side output of a plain stream": (lambda g: gpu_ops.side(g.orders, "left_late"), D, r"changelog of an interval"),
    "explain of a plain stream": (lambda g: gpu_ops.explain(g.orders), D, r"join"),
    "latest without a key": (lambda g: gpu_ops.latest(g.orders), D, r"key="),
    # SQL
    "SQL: no such table": (
        lambda g: gpu_ops.sql("SELECT * FROM orders", o=g.orders), D, r"`orders` cannot be found.*the inputs are o"),
    "SQL: no such column": (lambda g: gpu_ops.sql("SELECT cost FROM o", o=g.orders), D, r"cost.*line 1"),
    "SQL: does not parse": (lambda g: gpu_ops.sql("SELEC * FROM o", o=g.orders), D, r"SELEC"),
    "SQL: no inputs": (lambda g: gpu_ops.sql("SELECT 1"), D, r"input|FROM|table"),
    "SQL: ORDER BY": (lambda g: gpu_ops.sql("SELECT * FROM o ORDER BY id", o=g.orders), D, r"ORDER BY"),
    # files
    "files of no format": (
        lambda g: gpu_ops.read_files(g.spark, str(g.inputs), "xml", "id INT"), D, r"xml.*csv.*json.*parquet"),
    "files of no schema": (
        lambda g: gpu_ops.read_files(g.spark, str(g.inputs), "json", "id INTT"), D, r"schema='id INTT'"),
    "files of no folder": (
        lambda g: gpu_ops.read_files(g.spark, str(g.folder / "no"), "json", "id INT"), AnalysisException,
        r"not exist: .*/no"),
    "Kafka without its package": (
        lambda g: gpu_ops.read_kafka(g.spark, "h:9092", "t", "json", "id INT"), D,
        r"Kafka package is not in this session.*spark.jars.packages.*spark-sql-kafka-0-10"),
    "an option of no reader": (
        lambda g: gpu_ops.read_files(g.spark, str(g.inputs), "csv", "id INT", seperator=";"), D, r"seperator.*sep"),
}  # fmt: skip


def _told(raised: BaseException, error: type[Exception], says: str) -> None:
    """Asserts that an error is of this pack, or one that says enough by itself, and what its first line says."""
    assert type(raised).__module__.startswith("gpu_ops.") or error in (TypeError, AnalysisException), raised
    first = str(raised).splitlines()[0]
    assert re.search(says, first), first


@pytest.mark.parametrize("what", DESCRIBED)
def test_when_it_is_described(given, what):
    make, error, says = DESCRIBED[what]
    with pytest.raises(error) as raised:
        make(given)
    _told(raised.value, error, says)


ANSWERED: dict[str, Mistake] = {
    "another type of join": (lambda g: g.start(g.join(how="full")), S, r"had how='left', now 'full'.*as it was"),
    "another schema": (
        lambda g: g.start(g.join(left=g.orders)), S, r"'left' has a column 'at' \(timestamp.*that it had not"),
    "another number of partitions": (
        lambda g: g.start(g.join(partitions=3)), S, r"cut into 2 partitions.*gpu-join rescale .* --partitions 3"),
    "another checkpoint": (
        lambda g: g.start(g.join(), checkpoint="other"), S,
        r"belongs to query .*restart that query from its checkpoint"),
    "a state that is gone": (
        lambda g: (shutil.rmtree(g.folder / "state"), g.start(g.join())), S,
        r"nothing is stored in .*Spark asks for batch 1"),
    "partitions that are gone": (
        lambda g: ([shutil.rmtree(x) for x in (g.folder / "state").glob("p*")], g.start(g.join())), S,
        r"nothing is stored"),
    "another state": (
        lambda g: g.start(g.join(state=g.folder / "other")), S, r"nothing is stored in .*other.*give that folder"),
    "a finished state": (
        lambda g: ((g.folder / "state" / "finished.json").write_text("{}"), g.start(g.join())), S,
        r"is finished.*gpu_ops.reopen"),
    "outputMode('complete')": (
        lambda g: g.start(g.join(), outputMode="complete"), D, r"outputMode\('append'\).*gpu_ops.sinks"),
}  # fmt: skip


@pytest.fixture(scope="module")
def begun(spark, inputs, tmp_path_factory) -> Path:
    """The folder of a query that has run."""
    folder = tmp_path_factory.mktemp("begun")
    given = Given(spark, inputs, folder)
    given.start(given.join())
    return folder


@pytest.mark.parametrize("what", ANSWERED)
def test_when_it_is_started(spark, inputs, begun, folder, what):
    """No row has come since: it is `start` that refuses."""
    shutil.copytree(begun, folder / "query")
    make, error, says = ANSWERED[what]
    with pytest.raises(error) as raised:
        make(Given(spark, inputs, folder / "query"))
    _told(raised.value, error, says)
    assert not spark.streams.active


def test_a_query_that_goes_on_is_not_refused(spark, inputs, begun, folder):
    shutil.copytree(begun, folder / "query")
    given = Given(spark, inputs, folder / "query")
    assert given.start(given.join()).exception() is None


RUNNING: dict[str, tuple[Callable[[Given], object], str]] = {
    "row kinds of nobody": (
        lambda g: g.join(right=stream(g.prices.drop("at").withColumn("op", f.lit("zap")), row_kind="op")),
        r"input 'right', column 'op': unknown row kind.*for example 'zap'"),
    "a key that is null": (
        lambda g: g.join(right=stream(g.prices.selectExpr("CAST(NULL AS INT) AS id", "price"), unique_key="id")),
        r"input 'right', column 'id': .*null"),
    "a division by zero": (
        lambda g: g.join(where="1 / (right.id - 1) > 0"), r"a divisor is zero, for right.id = 1"),
    "a changelog in one task": (lambda g: g.join().coalesce(1), r"use repartition\(\) instead of coalesce\(\)"),
    "files of another format": (
        lambda g: g.join(left=gpu_ops.read_files(g.spark, str(g.inputs / "orders"), "parquet", "id INT")),
        r"input 'left': cannot read .*orders/1.json: .*Parquet"),
}  # fmt: skip


@pytest.mark.parametrize("what", RUNNING)
def test_when_rows_come(given, what, caplog):
    """The message is on the first line of what Spark raises, `gpu_ops.why` gives it alone, and the listener logs it."""
    make, says = RUNNING[what]
    listener = gpu_ops.ProgressListener()
    given.spark.streams.addListener(listener)
    try:
        with pytest.raises(StreamingQueryException) as raised:
            given.start(make(given))
        first = str(raised.value).splitlines()[0]
        assert re.search(says, first), first
        alone = gpu_ops.why(raised.value)
        assert alone is not None
        assert re.search(says, alone), alone
        assert "Traceback" not in alone
        assert "SQLSTATE" not in alone
        deadline = time.monotonic() + 20
        while alone not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.05)
        assert f"failed: {alone}" in caplog.text
    finally:
        given.spark.streams.removeListener(listener)


def test_why_a_query_ended_that_did_not_fail(given):
    assert gpu_ops.why(given.start(given.join())) is None


def test_why_of_others(given):
    """A user's function that fails is told by its last line; Spark's own errors by their first."""

    def broken(df: Any, batch_id: int) -> None:
        raise KeyError(f"no such thing in batch {batch_id}")

    query = given.orders.writeStream.foreachBatch(broken).start()
    with pytest.raises(StreamingQueryException):
        query.processAllAvailable()
    assert gpu_ops.why(query) == "KeyError: 'no such thing in batch 0'"


@pytest.mark.parametrize("setting", [("spark.gpu_ops.memory.hosts", "1g"), ("spark.gpu_ops.memory.host", "lots")])
def test_settings_that_do_nothing(given, setting):
    name, value = setting
    given.spark.conf.set(name, value)
    try:
        with pytest.raises(D, match=r"memory.host"):
            given.join()
    finally:
        given.spark.conf.unset(name)


def test_no_gpu(given):
    """Refused at once in local mode; it was the state server's to say, in the first micro-batch."""
    if gpu_status()[0]:
        pytest.skip("there is a GPU")
    looked_for = "is not installed|there is no driver of NVIDIA's|cuInit says"
    with pytest.raises(B, match=f"backend='gpu' was asked for, but no GPU answers: .*({looked_for})"):
        given.join(backend="gpu")
