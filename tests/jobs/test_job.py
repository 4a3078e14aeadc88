"""What a job may say: connectors, options, values; and what the command line puts in its place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from gpu_ops.errors import DescriptionError
from gpu_ops.jobs.job import amended, load
from gpu_ops.jobs.runner import check_folders
from gpu_ops.jobs.sql_file import JobError
from gpu_ops.spark.failures import message_in, package
from jobs.support import INSERT, ORDERS, SINK, source, sql, wrong


def table(options: str, columns: str = " (id BIGINT, at TIMESTAMP)") -> str:
    return f"CREATE TABLE t{columns} WITH ({options});\n"


def job(options: str, columns: str = " (id BIGINT, at TIMESTAMP)", sink: str = SINK, settings: str = "") -> str:
    return table(options, columns) + sink + settings + INSERT.replace("orders", "t")


def view(connector: str, key: str, options: str = "") -> str:
    options += "'bootstrap_servers' = 'b', 'topic' = 't'"
    return f"CREATE TABLE changes (id INT, PRIMARY KEY ({key})) WITH ('connector' = '{connector}', {options});\n"


PARQUET = "'connector' = 'parquet', 'path' = 'p'"


@pytest.mark.parametrize(
    ("text", "message", "place"),
    [
        (job("'path' = 'p'"), "'t' has no connector; there are parquet, json, csv, delta, kafka, jdbc, iceberg", "t ("),
        (job("'connector' = 'parqet'"), "there is no connector 'parqet'; there are parquet, ", "'parqet'"),
        (job("'connector' = 'filesystem'"), "there is no connector 'filesystem'; name the format instead", "'filesy"),
        (job("'connector' = 'console'"), "console is no source; there are", "'console'"),
        (job("'connector' = 'parquet'"), "parquet needs the option 'path'", "'parquet'"),
        (
            job(PARQUET + ", 'max_file_per_trigger' = '1'"),
            "parquet has no option 'max_file_per_trigger'; there are max_files_per_trigger, ",
            "'max_file_per",
        ),
        (job(PARQUET + ", 'row-kind' = 'a', 'row_kind' = 'b'"), "'row_kind' is set twice", "'row_kind'"),
        (
            job(PARQUET + ", 'max_files_per_trigger' = 'one'"),
            "max_files_per_trigger is a whole number above zero, not 'one'",
            "'one'",
        ),
        (job(PARQUET + ", 'max_files_per_trigger' = '0'"), "max_files_per_trigger is a whole number", "'0'"),
        (job(PARQUET + ", 'recursive' = 'yes'"), "recursive is true or false, not 'yes'", "'yes'"),
        (job(PARQUET + ", 'updates' = 'append'"), "updates is one of upsert, retract, not 'append'", "'append'"),
        (job(PARQUET + ", 'bad_rows' = 'skip'"), "bad_rows is one of fail, drop, not 'skip'", "'skip'"),
        (job(PARQUET + ", 'ttl' = '7 dais'"), "no duration: '7 dais'", "'7 dais'"),
        (job(PARQUET + ", 'idle_timeout' = '1 minute'"), "idle_timeout needs a watermark", "'1 minute'"),
        (job(PARQUET + ", 'sequence_by' = 'lsn'"), "there is no column 'lsn'; there are id, at", "'lsn'"),
        (job(PARQUET, " (id INT, PRIMARY KEY (idd) NOT ENFORCED)"), "there is no column 'idd'; there are id", "idd"),
        (
            job(PARQUET, " (id INT, WATERMARK FOR ad AS ad - INTERVAL '1' SECOND)"),
            "there is no column 'ad'; there are id",
            "ad AS",
        ),
        (job(PARQUET, " (id INT, ID INT)"), "a second column 'ID'", "ID"),
        (
            job(PARQUET + ", 'row_kind' = 'id'", " (id STRING, PRIMARY KEY (id) NOT ENFORCED)"),
            "the column of row kinds, 'id', is no part of the primary key",
            "'id'",
        ),
        (job("'connector' = 'rate'"), "rate has its own columns, timestamp and value", "id"),
        (
            job("'connector' = 'kafka', 'bootstrap_servers' = 'b', 'topic' = 't'", ""),
            "a Kafka topic has no columns of its own: name those of its values",
            "t WITH",
        ),
        (job("'connector' = 'kafka', 'topic' = 't'"), "kafka needs the option 'bootstrap_servers'", "'kafka'"),
        (
            job("'connector' = 'kafka', 'bootstrap_servers' = 'b', 'topic' = 't', 'unavailable' = 'keep'"),
            "the value from before is that of the row of the same key: give the PRIMARY KEY",
            "'keep'",
        ),
        (
            job("'connector' = 'kafka', 'bootstrap_servers' = 'b', 'topic' = 't', 'format' = 'orc'"),
            "format is one of json, debezium-json, avro, debezium-avro, not 'orc'",
            "'orc'",
        ),
        (
            job(PARQUET, sink="CREATE TABLE changes WITH ('connector' = 'rate');\n"),
            "rate is no sink; there are parquet",
            "'rate'",
        ),
        (
            job(PARQUET, sink="CREATE TABLE changes WITH ('connector' = 'print');\n"),
            "there is no connector 'print'; it is called console here",
            "'print'",
        ),
        (
            job(PARQUET, sink="CREATE TABLE changes (id INT PRIMARY KEY) WITH ('connector' = 'console');\n"),
            "console takes the changelog as it is: leave the PRIMARY KEY out. With one there are delta, iceberg, ",
            "id INT",
        ),
        (
            job(PARQUET, sink=view("upsert-kafka", "idd")),
            "there is no column 'idd'; there are id",
            "idd",
        ),
        (
            job(PARQUET, sink=view("kafka", "id", "'format' = 'debezium-json', 'key' = 'id', ")),
            "a view has no option 'key'",
            "'id'",
        ),
        (
            job(PARQUET, sink="CREATE TABLE changes WITH ('connector' = 'memory');\n"),
            "memory needs the option 'table'",
            "'memory'",
        ),
        (
            job(PARQUET, settings="SET 'emmit' = 'per_event';"),
            "a job has no option 'emmit'; there are emit, ",
            "'emmit",
        ),
        (
            job(PARQUET, settings="SET emit = 'always';"),
            "emit is one of per_event, per_batch, at_watermark, at_end",
            "'always'",
        ),
        (job(PARQUET, settings="SET partitions = many;"), "partitions is a whole number above zero", "many"),
        (job(PARQUET, settings="SET 'trigger' = 'often';"), "no duration: 'often'", "'often'"),
        (job(PARQUET, settings="SET state = 'a'; SET 'state' = 'b';"), "'state' is set twice", "'state' = 'b'"),
    ],
)
def test_errors(text, message, place):
    said, there = wrong(text)
    assert said.startswith(message)
    assert there.startswith(place)


def test_options_of_kafka():
    text = table(
        "'connector' = 'kafka', 'bootstrap_servers' = 'a:1,b:2', 'topic' = 'x', 'format' = 'debezium-json', "
        "'max_offsets_per_trigger' = '10', 'kafka.security.protocol' = 'SSL'"
    )
    found = source(text)
    assert found.format == "debezium-json"
    assert found.options == {
        "kafka.bootstrap.servers": "a:1,b:2",
        "subscribe": "x",
        "maxOffsetsPerTrigger": "10",
        "kafka.security.protocol": "SSL",
    }
    sink = sql(
        ORDERS + "CREATE TABLE changes WITH ('connector' = 'kafka', 'bootstrap_servers' = 'a:1', 'topic' = 'x', "
        "'key' = 'id, item');" + INSERT
    ).sink
    assert (sink.key, sink.options) == (("id", "item"), {"kafka.bootstrap.servers": "a:1", "topic": "x"})


def test_packages():
    assert package("kafka", "4.2.0") == "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0"
    assert package("upsert-kafka", "3.5.9") == "org.apache.spark:spark-sql-kafka-0-10_2.12:3.5.7"
    assert package("delta", "4.2.0") == "io.delta:delta-spark_4.2_2.13:4.4.0"
    assert package("delta", "3.5.9") == "io.delta:delta-spark_2.12:3.3.2"
    assert package("delta", "4.3.0") is None  # it named one that does not exist
    assert package("kafka", "4.3.0") is None
    assert package("parquet", "4.2.0") is None


def test_what_the_command_line_says_goes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = ORDERS + SINK + "SET state = 'a'; SET checkpoint = 'b'; SET spark.packages = 'x:y:1';" + INSERT
    said = {"state": "here", "checkpoint": "s3://b/c", "backend": "cpu", "trigger": "2 seconds"}
    found = amended(sql(text), said, "p:q:2", ["spark.a=b=c"])
    assert (str(found.state), found.checkpoint) == (str(tmp_path / "here"), "s3://b/c")
    assert (found.backend, found.trigger) == ("cpu", 2000)
    assert found.spark == {"spark.jars.packages": "x:y:1,p:q:2", "spark.a": "b=c"}
    assert amended(sql(text), {}, None, []) == sql(text)
    with pytest.raises(DescriptionError, match="a Spark setting is written"):
        amended(sql(text), {}, None, ["a=b"])
    with pytest.raises(DescriptionError, match="no duration"):
        amended(sql(text), {"trigger": "soon"}, None, [])


@pytest.mark.parametrize(
    ("sink", "settings", "message"),
    [
        ("'connector' = 'console'", "", None),
        ("'connector' = 'json', 'path' = 'x'", "SET state = 'a'; SET checkpoint = 'b';", None),
        ("'connector' = 'json', 'path' = 'x'", "", "json keeps what it is given"),
        ("'connector' = 'console'", "SET state = 'a';", "a folder for the state, but none for the checkpoint"),
        ("'connector' = 'console'", "SET checkpoint = 'a';", "a folder for the checkpoint, but none for the state"),
    ],
)
def test_folders_belong_together(sink, settings, message):
    found = sql(f"{ORDERS}CREATE TABLE changes WITH ({sink});{settings}{INSERT}")
    if message is None:
        check_folders(found)
        return
    with pytest.raises(JobError, match=message):
        check_folders(found)


def test_load(tmp_path):
    path = tmp_path / "shop.sql"
    path.write_text(ORDERS + SINK + INSERT)
    assert load(path).name == "shop"
    assert load(path).sources[0].options == {"path": str(tmp_path / "orders")}
    with pytest.raises(DescriptionError, match=r"a job is a file called \.sql"):
        load(tmp_path / "shop.txt")
    with pytest.raises(DescriptionError, match=r"a job is written in SQL now"):
        load(tmp_path / "shop.yaml")
    with pytest.raises(DescriptionError, match=r"no\.sql: cannot be read"):
        load(tmp_path / "no.sql")
    (tmp_path / "b.sql").write_bytes(b"\xff")
    with pytest.raises(DescriptionError, match=r"b\.sql: cannot be read"):
        load(tmp_path / "b.sql")
    path.write_text("SELEC 1")
    with pytest.raises(JobError, match=re.escape(f"{path}:1:1: 'SELEC' begins no statement")):
        load(path)


def test_the_reason_of_a_failure():
    text = (
        "Job aborted.\nTraceback\n  gpu_ops.errors.BadInputError: input 'o', column 'id': is null\n\tat x.y(Z.java:1)"
    )
    assert message_in(text) == "input 'o', column 'id': is null"
    assert message_in("Disk full\n\tat x.y(Z.java:1)") == "Disk full"


def test_the_error_in_the_docs(tmp_path):
    """docs/jobs.md shows one; that it is the one."""
    text = (Path(__file__).parents[2] / "docs" / "jobs.md").read_text()
    shown = re.search(r"^```text\nshop\.sql:(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert shown is not None
    job = "-- totals\n\nCREATE TABLE orders (\n  id BIGINT, amount BIGNIT, item STRING,\n"
    (tmp_path / "shop.sql").write_text(job)
    with pytest.raises(JobError) as raised:
        load(tmp_path / "shop.sql")
    assert str(raised.value) == f"{tmp_path / 'shop.sql'}:{shown[1].rstrip()}"
