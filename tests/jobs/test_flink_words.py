"""Flink's words in a job: options, settings, hints, columns and queries become ours, or are refused."""

from __future__ import annotations

import re

import pytest

from gpu_ops.jobs.flink_query import ProcessingTimes, translated
from gpu_ops.query.errors import SqlError
from gpu_ops.zones import seconds_from_utc
from jobs.support import SINK, source, sql, wrong

KAFKA = "'connector' = 'kafka', 'topic' = 't', 'properties.bootstrap.servers' = 'b:1'"


def kafka(options: str = "", columns: str = "id BIGINT") -> str:
    return f"CREATE TABLE t ({columns}) WITH ({KAFKA}{options and f', {options}'});\n"


@pytest.mark.parametrize(
    ("options", "spark"),
    [
        ("'scan.startup.mode' = 'earliest-offset'", {"startingOffsets": "earliest"}),
        ("'scan.startup.mode' = 'latest-offset'", {"startingOffsets": "latest"}),
        (
            "'scan.startup.mode' = 'group-offsets', 'properties.auto.offset.reset' = 'earliest'",
            {"startingOffsets": "earliest"},
        ),
        (
            "'scan.startup.mode' = 'timestamp', 'scan.startup.timestamp-millis' = '17'",
            {"startingTimestamp": "17", "startingOffsetsByTimestampStrategy": "latest"},
        ),
        (
            "'scan.startup.mode' = 'specific-offsets', 'scan.startup.specific-offsets' = "  # noqa: ISC004
            "'partition:0,offset:42;partition:1,offset:300'",
            {"startingOffsets": '{"t": {"0": 42, "1": 300}}'},
        ),
        ("'properties.security.protocol' = 'SSL'", {"kafka.security.protocol": "SSL"}),
        ("'properties.group.id' = 'g', 'scan.parallelism' = '2'", {}),
    ],
)
def test_options_of_kafka(options, spark):
    found = source(kafka(options))
    assert found.options == {"kafka.bootstrap.servers": "b:1", "subscribe": "t", **spark}


def test_formats_and_errors_of_messages():
    found = source(kafka("'value.format' = 'debezium-json', 'debezium-json.ignore-parse-errors' = 'true'"))
    assert (found.format, found.bad_rows) == ("debezium-json", "drop")
    avro = "'format' = 'debezium-avro-confluent', 'debezium-avro-confluent.url' = 'http://r'"
    assert (source(kafka(avro)).format, source(kafka(avro)).schema_registry) == ("debezium-avro", "http://r")
    topics = kafka().replace("'topic' = 't'", "'topic' = 'a;b'")
    assert source(topics).options["subscribe"] == "a,b"


def test_upserts_of_a_topic():
    upserts = kafka("'key.format' = 'raw', 'value.format' = 'json'", "id STRING, n INT, PRIMARY KEY (id) NOT ENFORCED")
    found = source(upserts.replace("'kafka'", "'upsert-kafka'"))
    assert (found.connector, found.by_key, found.key_format, found.unique_key) == ("kafka", True, "raw", ("id",))
    assert found.options["startingOffsets"] == "earliest"


def test_files_databases_and_sinks():
    files = source("CREATE TABLE t (a INT) WITH ('connector' = 'filesystem', 'path' = 'p', 'format' = 'csv', "
                   "'csv.field-delimiter' = ';', 'source.monitor-interval' = '1s');")  # fmt: skip
    assert (files.connector, files.options) == ("csv", {"path": "/jobs/p", "sep": ";", "mode": "FAILFAST"})
    ignoring = source("CREATE TABLE t (a INT) WITH ('connector' = 'filesystem', 'path' = 'p', 'format' = 'json', "
                      "'json.ignore-parse-errors' = 'true');")  # fmt: skip
    assert ignoring.options["mode"] == "PERMISSIVE"
    table = source("CREATE TABLE t (a INT) WITH ('connector' = 'jdbc', 'url' = 'jdbc:x', 'table-name' = 'p', "
                   "'username' = 'u', 'lookup.cache.ttl' = '10 s');")  # fmt: skip
    assert (table.scan, table.refresh_ms, table.options["user"], table.options["dbtable"]) == ("once", 10_000, "u", "p")
    job = sql(kafka() + "CREATE TABLE p (a INT) WITH ('connector' = 'print', 'print-identifier' = 'x');"
              "INSERT INTO p SELECT id FROM t")  # fmt: skip
    assert job.sink.connector == "console"
    assert [note.text for note in job.notes] == ["print-identifier has no effect here: rows are printed as a table"]


def test_settings():
    job = sql(
        "SET 'table.exec.state.ttl' = '36 h'; SET table.local-time-zone = 'UTC'; SET parallelism.default = 3;"
        "SET 'pipeline.name' = 'n'; SET execution.checkpointing.interval = 60sec; SET 'sql-client.verbose' = 'true';"
        "SET 'table.exec.mini-batch.enabled' = 'false'; SET table.exec.source.idle-timeout = 5 s;"
        + kafka(columns="id BIGINT, at TIMESTAMP(3), WATERMARK FOR at AS at") + "SELECT id FROM t"
    )  # fmt: skip
    assert (job.sources[0].ttl_ms, job.sources[0].idle_timeout_ms) == (36 * 3_600_000, 5000)
    assert (job.spark, job.partitions, job.name) == ({"spark.sql.session.timeZone": "UTC"}, 3, "n")
    assert job.emit == "per_event"
    assert [note.text.partition(" has")[0] for note in job.notes] == [
        "execution.checkpointing.interval", "sql-client.verbose",
    ]  # fmt: skip
    assert sql("SET 'table.exec.state.ttl' = '0 ms';" + kafka() + "SELECT id FROM t").sources[0].ttl_ms is None


def test_hints():
    job = sql(kafka() + "SELECT /*+ STATE_TTL('x' = '1 d'), BROADCAST(x) */ id "
              "FROM t /*+ OPTIONS('scan.startup.mode' = 'earliest-offset') */ AS x")  # fmt: skip
    assert job.sources[0].options["startingOffsets"] == "earliest"
    assert job.sources[0].ttl_ms == 86_400_000
    assert job.notes[0].text.startswith("BROADCAST has no effect here")
    job = sql(kafka() + SINK + "INSERT INTO changes /*+ OPTIONS('rows' = '3') */ SELECT id FROM t")
    assert job.sink.options == {"numRows": "3"}


def test_tables_like_others():
    text = kafka("'format' = 'json'", "id BIGINT, at TIMESTAMP(3), day AS date(at), WATERMARK FOR at AS at")
    like = "CREATE TABLE u (more INT, late AS at - INTERVAL '1' DAY) WITH ('topic' = 'other') LIKE t;"
    job = sql(text + like + "SELECT id FROM u")
    (found,) = job.sources
    assert [name for name, _ in found.columns] == ["id", "at", "more"]
    assert [(column.name.text, column.place) for column in found.derived] == [("day", 2), ("late", 3)]
    assert (found.event_time, found.options["subscribe"]) == ("at", "other")
    job = sql(text + "CREATE TABLE g WITH ('connector' = 'datagen') LIKE t (EXCLUDING OPTIONS EXCLUDING WATERMARKS);"
              "SELECT id FROM g")  # fmt: skip
    assert (job.sources[0].connector, job.sources[0].event_time) == ("datagen", None)
    assert [note.text for note in job.notes] == ["no query names the table 't'"]


def test_statements_that_ask_for_nothing_and_tables_of_selects():
    job = sql("USE CATALOG default_catalog; DROP TABLE IF EXISTS t; SHOW TABLES;" + kafka() +
              "CREATE TABLE kept WITH ('connector' = 'parquet', 'path' = 'p') AS SELECT id FROM t;"
              "SET 'state' = 's'; SET 'checkpoint' = 'c'; SELECT count(*) AS n FROM default_database.kept")  # fmt: skip
    assert [view.name for view in job.views] == ["kept"]
    assert [(one.name, one.sink.connector) for one in job.inserts] == [("kept", "parquet"), ("result", "console")]


@pytest.mark.parametrize(
    ("text", "message", "place"),
    [
        (kafka("'scan.startup.mode' = 'group-offsets'"), "offsets are in the checkpoint, not in a group", "'group"),
        (kafka("'scan.startup.mode' = 'timestamp'"), "timestamp needs the option 'scan.startup", "'timestamp'"),
        (kafka("'scan.startup.mode' = 'soon'"), "scan.startup.mode is one of earliest-offset, ", "'soon'"),
        (kafka("'format' = 'csv'"), "format: 'csv' is not understood: there are json, ", "'csv'"),
        (kafka("'value.fields-include' = 'EXCEPT_KEY'"), "value.fields-include: 'EXCEPT_KEY' is not", "'EXCEPT"),
        (kafka("'key.fields-prefix' = 'k_'"), "key.fields-prefix is not understood: the columns of the key", "'key."),
        (kafka("'scan.bounded.mode' = 'latest-offset'"), "scan.bounded.mode: 'latest-offset' is not", "'latest"),
        (kafka("'json.fail-on-missing-field' = 'true'"), "json.fail-on-missing-field: 'true' is not", "'true'"),
        (kafka(columns="id INT, x STRING METADATA FROM 'key'"), "there is no metadata 'key'; there are", "'key'"),
        (
            kafka("'format' = 'debezium-json'", "id INT, o BIGINT METADATA FROM 'offset'"),
            "a row that is taken back came in another message",
            "o BIGINT",
        ),
        ("CREATE TABLE t (a INT) WITH ('connector' = 'filesystem', 'path' = 'p', 'format' = 'orc');",
         "files are csv, json, parquet, not 'orc'", "'orc'"),
        ("SET 'table.exec.state.ttl' = 'long';" + kafka(), "table.exec.state.ttl: 'long' is no duration", "'long'"),
        ("SET 'table.exec.unheard-of' = '1';" + kafka(), "a job has no option 'table.exec.unheard-of'", "'table"),
        ("USE CATALOG hive;" + kafka(), "USE is not understood: a job's tables have plain names", "USE"),
        ("CREATE DATABASE d;" + kafka(), "CREATE DATABASE is not understood", "CREATE"),
        ("ADD JAR 'x';" + kafka(), "ADD JAR is not understood: jars come with --packages", "ADD"),
        (kafka() + "DROP TABLE IF EXISTS t;", "t is created above", "DROP"),
    ],
)  # fmt: skip
def test_what_is_refused(text, message, place):
    said, there = wrong(text + "SELECT * FROM t")
    assert said.startswith(message)
    assert there.startswith(place)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("SELECT 1 FROM t /*+ OPTIONS('a' = 'b') */, u", None),
        ("SELECT 1 FROM t /*+ OPTIONS('topic' = 'a') */ UNION ALL SELECT 2 FROM t /*+ OPTIONS('topic' = 'b') */",
         "t has other OPTIONS elsewhere"),
        ("SELECT /*+ MAGIC(t) */ 1 FROM t", "the hint MAGIC is not understood"),
        ("SELECT 1 FROM t; INSERT INTO t SELECT 1 FROM t", "t is written by an INSERT of this job"),
        ("SELECT * FROM t MATCH_RECOGNIZE (PARTITION BY id)", "MATCH_RECOGNIZE is not understood"),
        ("SELECT x FROM t CROSS JOIN UNNEST(t.xs) AS u (x)", "UNNEST is not understood"),
        ("SELECT FLOOR(at TO DAY) FROM t", "FLOOR to a unit of time is date_trunc('DAY', at) here"),
        ("SELECT PROCTIME() FROM t", "PROCTIME() is the clock"),
        ("SELECT 1 FROM TABLE(TUMBLE(TABLE t, DESCRIPTOR(at)))", "TUMBLE takes DATA, TIMECOL, SIZE; SIZE is missing"),
        ("SELECT 1 FROM TABLE(HOP(TABLE t, DESCRIPTOR(at), INTERVAL '3' SECOND, INTERVAL '10' SECOND))",
         "the size of HOP is a multiple of slide"),
        ("SELECT 1 FROM TABLE(TUMBLE(TABLE t, DESCRIPTOR(at), INTERVAL '1' MONTH))", "a window's lengths are"),
        ("SELECT 1 FROM TABLE(TUMBLE(TABLE t, DESCRIPTOR(at), INTERVAL '0' HOUR))", "this interval is empty"),
        ("SELECT 1 FROM TABLE(SESSION(TABLE t, DESCRIPTOR(at), INTERVAL '1' HOUR))", "SESSION in FROM is not"),
        ("SELECT 1 FROM TABLE(TUMBLE(TABLE t, at, INTERVAL '1' HOUR))", "the column of the time is written DESCRIPTOR"),
        ("SELECT SPLIT_INDEX(x, y, 1) FROM t", "SPLIT_INDEX takes a constant text"),
        ("SELECT 1 FROM t WHERE x SIMILAR TO '^a'", "SIMILAR TO takes a constant pattern"),
    ],
)  # fmt: skip
def test_queries_that_are_refused(query, message):
    if message is not None:
        said, there = wrong(kafka() + query)
        assert said.startswith(message)
        assert there


def test_places_behind_what_was_rewritten():
    query = "SELECT a FROM TABLE(\n  TUMBLE(TABLE t, DESCRIPTOR(at), INTERVAL '1' HOUR)) w,\n  u WHERE "
    query += "CAST(wrong AS VARCHAR) = 1"
    text = translated(query)
    at = text.sql.index("wrong")
    before = text.sql[:at]
    assert text.place(before.count("\n") + 1, at - before.rfind("\n")) == (3, 16)
    assert "CAST(wrong AS STRING)" in text.sql


def test_columns_of_the_clock_are_the_clock_where_they_are_looked_up():
    query = "SELECT v.id, p.name FROM (SELECT *, PROCTIME() AS now FROM v) v "
    query += "JOIN p FOR SYSTEM_TIME AS OF v.now ON v.id = p.id"
    times = ProcessingTimes.of([], [query])
    assert times == (frozenset({"now"}), frozenset({"now"}))
    assert re.sub(r"\s+", " ", translated(query, times).sql) == (
        "SELECT v.id, p.name FROM (SELECT * FROM v) v JOIN p FOR SYSTEM_TIME AS OF PROCTIME() ON v.id = p.id"
    )
    with pytest.raises(SqlError, match="is the clock"):
        translated(query)


def test_offsets_of_zones():
    assert seconds_from_utc("UTC") == [0]
    assert seconds_from_utc("-03:30") == [-12_600]
    assert seconds_from_utc("Asia/Kolkata") == [19_800]
    assert seconds_from_utc("America/New_York") == [-18_000, -14_400]
