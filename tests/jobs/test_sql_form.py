"""The SQL form: what is read, and where it says that something is wrong."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest

from gpu_ops.jobs.job import build
from gpu_ops.jobs.sql_file import read_sql, tables_named
from gpu_ops.jobs.sql_text import JobError, Text
from jobs.support import INSERT, ORDERS, SINK, source, sql, wrong


def test_a_whole_job():
    job = sql("""
        -- a comment; with a semicolon
        CREATE TEMPORARY TABLE IF NOT EXISTS orders (
            id BIGINT NOT NULL COMMENT 'it''s the key',
            `an item` VARCHAR(20),
            at TIMESTAMP(3),
            CONSTRAINT pk PRIMARY KEY (id) NOT ENFORCED,
            WATERMARK FOR at AS at - INTERVAL '5' SECOND
        ) COMMENT 'x' WITH (
            'connector' = 'parquet', 'path' = 'orders', 'max-files-per-trigger' = '1', 'row_kind' = 'op',
            'updates' = 'retract', 'ttl' = '7 days', 'bad_rows' = 'drop', 'idle_timeout' = '1 minute',
            'option.mergeSchema' = 'true'
        );
        create table prices (id bigint primary key not enforced, price decimal(10, 2))
            with ('connector' = 'csv', 'path' = 's3://bucket/prices', 'header' = 'TRUE', 'delimiter' = ';');
        CREATE TABLE changes (op STRING, id BIGINT) WITH ('connector' = 'json', 'path' = '/out', 'row_kind' = 'op');
        SET 'state' = 'state'; SET checkpoint = 'there';
        SET 'emit' = 'per_event'; SET partitions = 3; SET spark.sql.shuffle.partitions = 2;
        SET spark.packages = 'a:b:1';
        INSERT INTO changes
        SELECT o.id, ';' AS x -- ;
        FROM orders o, prices;
    """)
    orders, prices = job.sources
    assert orders.columns == (("id", "BIGINT"), ("an item", "STRING"), ("at", "TIMESTAMP"))
    assert orders.options == {"path": "/jobs/orders", "maxFilesPerTrigger": "1", "mergeSchema": "true"}
    assert (orders.name, orders.connector, orders.unique_key, orders.row_kind) == ("orders", "parquet", ("id",), "op")
    assert (orders.updates, orders.ttl_ms, orders.bad_rows) == ("retract", 7 * 86_400_000, "drop")
    assert (orders.event_time, orders.delay_ms, orders.idle_timeout_ms) == ("at", 5000, 60_000)
    assert prices.options == {"path": "s3://bucket/prices", "header": "true", "sep": ";"}
    assert prices.columns == (("id", "BIGINT"), ("price", "DECIMAL(10, 2)"))
    assert prices.unique_key == ("id",)
    assert job.sink.columns == (("op", "STRING"), ("id", "BIGINT"))
    assert (job.sink.connector, job.sink.options, job.sink.row_kind) == ("json", {"path": "/out"}, "op")
    assert (str(job.state), job.checkpoint, job.emit, job.partitions) == ("/jobs/state", "/jobs/there", "per_event", 3)
    assert job.spark == {"spark.sql.shuffle.partitions": "2", "spark.jars.packages": "a:b:1"}
    assert job.query.text == "SELECT o.id, ';' AS x -- ;\nFROM orders o, prices"
    assert (job.name, job.backend, job.trigger, job.master) == ("job", "auto", None, None)


def test_places_in_the_query():
    job = sql(ORDERS + SINK + "\nINSERT INTO changes SELECT *\n  FROM orders")
    assert job.query.position(job.file, 1, 1) == (4, 21)
    assert job.query.position(job.file, 2, 8) == (5, 8)


def test_types():
    types = {
        "INTEGER": "INT", "double precision": "DOUBLE", "REAL": "FLOAT", "BYTES": "BINARY", "VARBINARY(9)": "BINARY",
        "DECIMAL": "DECIMAL(10, 0)", "NUMERIC(5)": "DECIMAL(5)", "TIMESTAMP_LTZ(6)": "TIMESTAMP",
        "TIMESTAMP(3) WITHOUT TIME ZONE": "TIMESTAMP_NTZ", "TIMESTAMP WITH LOCAL TIME ZONE": "TIMESTAMP",
        "TIMESTAMP_NTZ(3)": "TIMESTAMP_NTZ", "CHAR(3)": "STRING",
        "ARRAY<MAP<STRING, INT>>": "ARRAY<MAP<STRING, INT>>",
        "ROW<a INT, `b c` ARRAY<DATE>>": "STRUCT<`a`: INT, `b c`: ARRAY<DATE>>",
        "STRUCT<a: BOOLEAN>": "STRUCT<`a`: BOOLEAN>",
    }  # fmt: skip
    columns = ", ".join(f"c{i} {kind}" for i, kind in enumerate(types))
    found = source(f"CREATE TABLE t ({columns}) WITH ('connector' = 'parquet', 'path' = 'p');")
    assert [kind for _, kind in found.columns] == list(types.values())


def test_columns_may_be_left_to_the_data():
    assert source("CREATE TABLE t WITH ('connector' = 'parquet', 'path' = 'p');").columns is None
    only_key = "CREATE TABLE t (PRIMARY KEY (id) NOT ENFORCED) WITH ('connector' = 'parquet', 'path' = 'p');"
    assert (source(only_key).columns, source(only_key).unique_key) == (None, ("id",))


SEVERAL = """CREATE TEMPORARY VIEW large AS SELECT id FROM orders WHERE id > 1;
CREATE MATERIALIZED VIEW counted WITH ('connector' = 'parquet', 'path' = 'counted') AS SELECT count(*) AS n FROM large;
SET 'state' = 'state'; SET 'checkpoint' = 'checkpoint';
"""


@pytest.mark.parametrize("around", ["{}", "EXECUTE STATEMENT SET BEGIN {} END", "BEGIN STATEMENT SET; {} END;"])
def test_views_and_several_sinks(around):
    job = build(read_sql(Text(Path("/jobs/job.sql"), ORDERS + SINK + SEVERAL + around.format(f"{INSERT};"))))
    assert [one.name for one in job.views] == ["large", "counted"]
    assert [(one.name, one.sink.connector) for one in job.inserts] == [("counted", "parquet"), ("changes", "console")]
    assert job.inserts[0].query is job.views[1].query
    assert [source.name for source in job.sources] == ["orders"]


def test_the_tables_that_a_query_names():
    query = "WITH c AS (SELECT * FROM Orders) SELECT prices, (SELECT max(x) FROM `s t`) FROM c JOIN v ON c.k = v.k"
    assert tables_named(query) == {"orders", "s t", "v"}
    assert {"clicks", "views"} <= tables_named("SELECT * FROM clicks ASOF JOIN views ON clicks.at >= views.at AND")


WORDS = """SELECT FROM WITH NOT NULL KEY PRIMARY ENFORCED CONSTRAINT UNIQUE AS LIKE GENERATED VIRTUAL METADATA COMMENT
    PARTITIONED DISTRIBUTED IF EXISTS TEMPORARY TABLE INTO OVERWRITE INSERT CREATE SET INTERVAL SECOND FOR WATERMARK foo
    `bar` 'str' 7 1.5 ( ) , . ; = - + < > : * /*+h*/ # $ PRECISION ZONE"""


def test_each_word_of_a_statement_is_understood_or_refused():
    """A word more in a job is an error, or the job is another one; only of these words none is needed."""
    text = """CREATE TABLE orders (id BIGINT, `an item` VARCHAR(20), at TIMESTAMP(3), n ARRAY<INT>, PRIMARY KEY (id),
        WATERMARK FOR at AS at - INTERVAL '5' SECOND) WITH ('connector' = 'parquet', 'path' = 'orders');
        CREATE TABLE changes WITH ('connector' = 'console'); SET 'state' = 'state'; INSERT INTO changes """
    query = "SELECT id FROM orders"

    def shape(job):
        return re.sub(r"(at|indent|start_mark)=\d+|file=Text\(.*?\), (?=sources)", "", repr(job))

    def read(changed):
        return shape(read_sql(Text(Path("job.sql"), changed + query)))

    places = [0, *(match.end() for match in re.finditer(r"\w+|'[^']*'|`[^`]*`|[^\w\s]", text))]
    wanted, idle = read(text), set()
    for place in places:
        for word in WORDS.split():
            with contextlib.suppress(JobError):
                if read(f"{text[:place]} {word} {text[place:]}") == wanted:
                    idle.add(word)
    assert idle == {"NULL", "TEMPORARY", "TABLE", ";"}


@pytest.mark.parametrize(
    ("text", "message", "place"),
    [
        ("SELECT 1", "there is no source", "SELECT"),
        ("VACUUM t", "'VACUUM' begins no statement that is understood", "VACUUM"),
        (ORDERS + SINK, "there is no INSERT INTO", ""),
        (ORDERS + INSERT, "there is no table 'changes' to insert into", "changes"),
        (SINK + INSERT, "there is no source", "SELECT"),
        (ORDERS + ORDERS + SINK + INSERT, "there are two tables or views 'orders'", "orders"),
        (ORDERS + SINK + INSERT + ";\n" + INSERT, "a second INSERT INTO changes", "changes"),
        (ORDERS + SINK + "CREATE VIEW v SELECT 1", "expected AS and the view's SELECT", "SELECT 1"),
        (ORDERS + SINK + "CREATE VIEW v (a) AS SELECT 1", "a view's columns are named in its SELECT", "(a)"),
        (
            ORDERS + SINK + "CREATE VIEW orders AS SELECT 1; " + INSERT,
            "there are two tables or views 'orders'",
            "orders",
        ),
        (ORDERS + "CREATE MATERIALIZED VIEW v AS SELECT 1", "a materialized view is kept in a sink", "AS SELECT"),
        (ORDERS + SINK + "BEGIN STATEMENT SET; " + INSERT, "this statement set has no END", "BEGIN"),
        (ORDERS + SINK + INSERT + "; END", "'END' begins no statement", "END"),
        (ORDERS + SINK + "INSERT OVERWRITE changes SELECT 1", "INSERT OVERWRITE is not understood", "INSERT OVERWRITE"),
        (
            ORDERS + SINK + "INSERT INTO changes (a) SELECT 1",
            "the columns of INSERT INTO are those of the table",
            "(a)",
        ),
        (ORDERS + SINK + "INSERT INTO changes SELECT 'x", "a quote or comment is opened here", "'x"),
        (ORDERS + "-- 'fine\n/* a */ " + SINK + "/* b", "a quote or comment is opened here", "/* b"),
        (ORDERS + SINK + "/*+ a */" + INSERT, "a hint stands behind SELECT, or behind the name of a table", "/*+ a"),
        ("CREATE TABLE a.b (x INT) WITH ('a'='b')", "catalogs and databases are not understood", ".b"),
        ("CREATE TABLE a (x INT)", "expected WITH and the table's options, found the end", ""),
        ("CREATE TABLE a (x INT) LIKE b", "there is no table 'b' before this one", "b"),
        ("CREATE TABLE a (x AS y + 1; ) WITH ('a'='b')", "expected , or ) behind the expression, found ';'", ";"),
        ("CREATE TABLE a (x AS) WITH ('a'='b')", "expected an expression, found ')'", ")"),
        ("CREATE TABLE a (x INT METADATA FROM t) WITH ('a'='b')", "expected what it is of a message in single", "t)"),
        ("CREATE TABLE a (x BIGNIT) WITH ('a'='b')", "there is no type BIGNIT; the nearest are BIGINT", "BIGNIT"),
        ("CREATE TABLE a (x ARRAY(INT)) WITH ('a'='b')", "expected < behind ARRAY, found '('", "(INT)"),
        ("CREATE TABLE a (x DECIMAL(p)) WITH ('a'='b')", "expected a number, found 'p'", "p)"),
        ("CREATE TABLE a (x INT y INT) WITH ('a'='b')", "expected ) or a comma, found 'y'", "y INT"),
        ("CREATE TABLE a (x INT) WITH ('a' 'b')", "expected =, found the string 'b'", "'b'"),
        ("CREATE TABLE a (x INT) WITH (a = 'b')", "expected an option's name in single quotes, found 'a'", "a ="),
        (
            "CREATE TABLE a (x INT PRIMARY KEY, PRIMARY KEY (x)) WITH ('a'='b')",
            "a second primary key",
            "PRIMARY KEY (x",
        ),
        (
            "CREATE TABLE a (t TIMESTAMP, WATERMARK FOR t AS u - INTERVAL '5' SECOND) WITH ('a'='b')",
            "a watermark is t - INTERVAL '...' ..., nothing else is understood",
            "u -",
        ),
        (ORDERS.replace("WITH", "/*+ OPTIONS('a'='b') */ WITH") + SINK, "a hint stands behind SELECT", "/*+"),
        ("CREATE TABLE a (x INT NOT ENFORCED) WITH ('a'='b')", "expected ) or a comma, found 'NOT'", "NOT"),
        ("SET 'a' = ", "expected the setting's value in single quotes, found the end of the text", ""),
        (ORDERS.replace(";", "") + SINK, "expected ; behind the statement, found 'CREATE'", "CREATE TABLE changes"),
    ],
)
def test_errors(text, message, place):
    said, there = wrong(text)
    assert said.startswith(message)
    assert there.startswith(place)
    assert there or not place
