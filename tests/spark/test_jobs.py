"""Jobs from end to end: every file format, resumed; messages of Kafka without a broker; how a job fails and stops."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from conftest import slow_but
from rich.console import Console

from gpu_ops.errors import GpuJoinError
from gpu_ops.jobs import runner
from gpu_ops.jobs.job import JobSource, build, load
from gpu_ops.jobs.runner import JobFailedError
from gpu_ops.jobs.sql_file import read_sql
from gpu_ops.jobs.sql_text import JobError, Text
from gpu_ops.jobs.tables import decode, open_source, shaped
from gpu_ops.spark.failures import package
from gpu_ops.spark.plan import changes as of_changes
from gpu_ops.spark.plan.selection import selection_of_join
from gpu_ops.spark.sinks.changes import json_messages
from spark.support import fold

pytestmark = pytest.mark.spark

ORDERS = [("id", "BIGINT"), ("item", "STRING"), ("qty", "INT")]
PRICES = [("op", "STRING"), ("id", "BIGINT"), ("price", "DOUBLE")]
JOB = """
CREATE TABLE orders (id BIGINT, item STRING, qty INT, PRIMARY KEY (id) NOT ENFORCED)
WITH ('connector' = '{format}', 'path' = 'orders', 'max_files_per_trigger' = '1');
CREATE TABLE prices (op STRING, id BIGINT, price DOUBLE)
WITH ('connector' = '{format}', 'path' = 'prices', 'row_kind' = 'op', 'max_files_per_trigger' = '1');
CREATE TABLE changes (kind STRING, id BIGINT, item STRING, total DOUBLE)
WITH ('connector' = '{format}', 'path' = 'changes', 'row_kind' = 'kind');
SET state = 'state'; SET checkpoint = 'checkpoint'; SET partitions = 2;
INSERT INTO changes
SELECT o.id, o.item, o.qty * p.price FROM orders o LEFT JOIN prices p ON o.id = p.id;
"""


def write(folder: Path, form: str, columns: list[tuple[str, str]], *rows: tuple[Any, ...]) -> None:
    """One file, that the stream sees all at once."""
    folder.mkdir(exist_ok=True)
    number = len(list(folder.iterdir()))
    path, hidden = folder / f"{number:03d}.{form}", folder / f".{number:03d}.{form}"
    if form == "parquet":
        kinds = {"BIGINT": pa.int64(), "STRING": pa.string(), "INT": pa.int32(), "DOUBLE": pa.float64()}
        arrays = [pa.array([row[i] for row in rows], kinds[kind]) for i, (_, kind) in enumerate(columns)]
        pq.write_table(pa.table(arrays, [name for name, _ in columns]), hidden)
    elif form == "csv":
        with hidden.open("w", newline="") as file:
            csv.writer(file).writerows(rows)
    else:
        names = [name for name, _ in columns]
        hidden.write_text("\n".join(json.dumps(dict(zip(names, row, strict=True))) for row in rows))
    hidden.rename(path)
    time.sleep(0.01)  # Spark takes files by their time


def console() -> Console:
    return Console(record=True, width=200, file=io.StringIO())


def result(spark: Any, folder: Path, form: str) -> list[tuple[Any, ...]]:
    """The folded changelog; files are read in any order."""
    schema = "kind STRING, id BIGINT, item STRING, total DOUBLE"
    changes = spark.read.schema(schema).format(form).load(str(folder / "changes")).collect()
    return fold(sorted((tuple(row) for row in changes), key=lambda row: row[0] == "-D"))


@pytest.mark.parametrize(
    ("form", "reader"),
    [
        ("json", "spark"),
        pytest.param("csv", "arrow", marks=pytest.mark.thorough),
        pytest.param("parquet", "arrow", marks=pytest.mark.slow),
    ],
)
def test_once_and_once_more(spark: Any, tmp_path: Path, form: str, reader: str) -> None:
    path = tmp_path / "shop.sql"
    path.write_text(JOB.format(format=form).replace("'max_files", f"'reader' = '{reader}', 'max_files"))
    write(tmp_path / "orders", form, ORDERS, (1, "book", 2), (2, "pen", 1))
    write(tmp_path / "orders", form, ORDERS, (2, "pencil", 3))
    write(tmp_path / "prices", form, PRICES, ("+I", 1, 9.5))
    screen = console()
    first = runner.run(load(path), screen, once=True)
    assert (first.batches, first.rows_in, first.interrupted) == (2, 4, False)
    assert result(spark, tmp_path, form) == [(1, "book", 19.0), (2, "pencil", None)]
    lines = screen.export_text().splitlines()
    assert lines[0].startswith("micro-batch 0: 3 rows in, 2 changes out (2 +I); ")
    assert "state 3 rows, " in lines[0]
    assert lines[0].endswith("; cpu")
    assert lines[1].startswith("micro-batch 1: 1 rows in, ")

    again = runner.run(load(path), console(), once=True)
    assert again.batches == 0
    write(tmp_path / "prices", form, PRICES, ("-D", 1, 9.5), ("+I", 2, 0.5))
    third = runner.run(load(path), console(), once=True)
    assert (third.batches, third.rows_in) == (1, 2)
    assert result(spark, tmp_path, form) == [(1, "book", None), (2, "pencil", 1.5)]


SEVERAL = """
CREATE TABLE orders (id BIGINT, item STRING, qty INT, PRIMARY KEY (id) NOT ENFORCED)
WITH ('connector' = 'json', 'path' = 'orders');
CREATE TABLE prices (op STRING, id BIGINT, price DOUBLE)
WITH ('connector' = 'json', 'path' = 'prices', 'row_kind' = 'op');
CREATE VIEW large AS SELECT id, item, qty FROM orders WHERE qty > 1;
CREATE VIEW priced AS SELECT o.item, o.qty * p.price AS total FROM large o LEFT JOIN prices p ON o.id = p.id;
CREATE MATERIALIZED VIEW totals WITH ('connector' = 'parquet', 'path' = 'totals')
AS SELECT item, count(*) AS n, sum(total) AS total FROM priced GROUP BY item;
CREATE TABLE changes WITH ('connector' = 'arrow', 'path' = 'changes', 'row_kind' = 'kind');
CREATE TABLE seen WITH ('connector' = 'blackhole');
SET state = 'state'; SET checkpoint = 'checkpoint';
EXECUTE STATEMENT SET BEGIN
INSERT INTO changes SELECT item, total FROM priced WHERE total IS NOT NULL;
INSERT INTO seen SELECT count(*) AS n, sum(n) AS s FROM totals;
END;
"""


@pytest.mark.thorough
def test_views_and_several_sinks_are_one_query(spark: Any, tmp_path: Path) -> None:
    """What its queries share runs once; each sink has what its query alone has, after each run."""
    path = tmp_path / "shop.sql"
    path.write_text(SEVERAL)
    write(tmp_path / "orders", "json", ORDERS, (1, "book", 2), (2, "pen", 5), (3, "pen", 1))
    write(tmp_path / "prices", "json", PRICES, ("+I", 1, 9.5))
    screen = console()
    first = runner.run(load(path), screen, once=True)
    assert (first.batches, first.rows_in, first.rows_out) == (1, 4, 2 + 1 + 1), screen.export_text()

    def sinks() -> tuple[Any, ...]:
        totals = pq.read_table(tmp_path / "totals").to_pylist()
        files = sorted((tmp_path / "changes").glob("*.arrow"))
        changes = pa.concat_tables([pa.ipc.open_file(file).read_all() for file in files]).to_pylist()
        return tuple(
            fold(sorted((tuple(row.values()) for row in rows), key=lambda row: row[0] == "-D"))
            for rows in (totals, changes)
        )

    assert sinks() == ([("book", 1, 19.0), ("pen", 1, None)], [("book", 19.0)])
    write(tmp_path / "prices", "json", PRICES, ("-D", 1, 9.5), ("+I", 2, 2.0))
    write(tmp_path / "orders", "json", ORDERS, (3, "pen", 4), (1, "book", 1))
    runner.run(load(path), console(), once=True)
    assert sinks() == ([("pen", 2, 10.0)], [("pen", 10.0)])
    assert {folder.name for folder in (tmp_path / "state" / "queries").iterdir()} == {
        "large",
        "priced",
        "totals",
        "seen",
        "changes",
    }
    screen = console()
    runner.run(load(path), screen, once=True, show=True, views=["large", "TOTALS"])
    lines = screen.export_text().splitlines()
    assert "  large +I 3 pen 4" in lines
    assert any(line.startswith("  totals +I pen 2 10.00") for line in lines)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("old", "new", "message"),
    slow_but(
        [
            ("'arrow', 'path' = 'changes'", "'json', 'path' = 'changes'", "json sink has a query of its own"),
            ("FROM large o LEFT", "FROM totals o LEFT", "view 'priced' reads 'totals', which stands behind it"),
            ("SET state = 'state'", "SET emit = at_end; SET state = 'state'", "has one INSERT INTO and no views"),
            ("o.qty * p.price", "o.qty * p.cost", "cost"),
        ],
        ("FROM large o LEFT", "FROM totals o LEFT", "view 'priced' reads 'totals', which stands behind it"),
    ),
)
def test_what_is_wrong_with_several_queries(spark: Any, tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "shop.sql"
    path.write_text(SEVERAL.replace(old, new, 1))
    for folder in ("orders", "prices"):
        (tmp_path / folder).mkdir()
    with pytest.raises(JobError, match=message):
        runner.run(load(path), console(), once=True)


@pytest.mark.thorough
@pytest.mark.parametrize("form", slow_but(["parquet", "delta", "arrow"], "delta"))
def test_files_that_the_tasks_write(spark: Any, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Arrow has them, without Spark's rows; a second run goes on, a repeated one adds nothing."""
    ways: list[Any] = []
    monkeypatch.setattr(of_changes, "selection_of_join", lambda df: ways.append(selection_of_join(df)) or ways[-1])
    options = f"'connector' = '{form}', 'path' = 'changes', 'compression' = 'zstd', 'partition_by' = 'item'"
    options += "" if form == "arrow" else ", 'writer' = 'arrow'"
    text = JOB.format(format="json").replace("'connector' = 'json', 'path' = 'changes'", options)
    path = tmp_path / "shop.sql"
    path.write_text(text.replace("o.qty * p.price", "p.price"))
    write(tmp_path / "orders", "json", ORDERS, (1, "book", 2), (2, "pen", 1))
    write(tmp_path / "prices", "json", PRICES, ("+I", 1, 9.5))
    assert runner.run(load(path), console(), once=True).rows_out == 2
    assert runner.run(load(path), console(), once=True).batches == 0
    write(tmp_path / "prices", "json", PRICES, ("-D", 1, 9.5), ("+I", 2, 0.5))
    assert runner.run(load(path), console(), once=True).rows_out == 4
    assert not any(isinstance(way, str) for way in ways)
    folder = str(tmp_path / "changes")
    if form == "delta":
        found = deltalake.DeltaTable(folder).to_pyarrow_table()
    else:
        files = ds.dataset(folder, format=form, partitioning="hive", exclude_invalid_files=True)
        found = files.to_table()
    rows = [tuple(row[name] for name in ("kind", "id", "item", "total")) for row in found.to_pylist()]
    assert fold(sorted(rows, key=lambda row: row[0] == "-D")) == [(1, "book", None), (2, "pen", 0.5)]
    if form == "delta":
        path.write_text(text.replace("'changes'", "'others'").replace(", 'writer' = 'arrow'", ""))
        with pytest.raises(JobError, match="partition_by is for files that Arrow writes: set 'writer' = 'arrow'"):
            load(path)
        path.write_text(text.replace("'compression' = 'zstd'", "'merge_schema' = 'true'"))
        with pytest.raises(JobError, match="files written by Arrow have no option 'merge_schema'"):
            load(path)


VIEW = """(id BIGINT, item STRING, total DOUBLE, PRIMARY KEY (id) NOT ENFORCED)
WITH ('connector' = 'jdbc', 'url' = '{url}', 'table' = 'totals');
SET"""


@pytest.mark.slow
def test_a_view_in_a_database(spark: Any, tmp_path: Path) -> None:
    url = f"jdbc:derby:memory:{tmp_path.name};create=true"
    path = tmp_path / "shop.sql"
    sink = re.compile(r"\(kind .*?SET", re.DOTALL)
    path.write_text(sink.sub(VIEW.format(url=url), JOB.format(format="json"), count=1))
    write(tmp_path / "orders", "json", ORDERS, (1, "book", 2), (2, "pen", 1))
    write(tmp_path / "prices", "json", PRICES, ("+I", 1, 9.5), ("+I", 2, 0.5))
    runner.run(load(path), console(), once=True)
    write(tmp_path / "prices", "json", PRICES, ("-D", 1, 9.5))
    screen = console()
    runner.run(load(path), screen, once=True)
    assert screen.export_text().startswith("micro-batch 1: 1 rows in, 2 changes out (1 +I, 1 -D); ")
    found = spark.read.format("jdbc").options(url=url, dbtable="totals").load().collect()
    assert sorted(tuple(row) for row in found) == [(1, "book", None), (2, "pen", 0.5)]


WHERE = " WHERE p.price IS NULL OR o.item <> 'book'"


@pytest.mark.thorough
@pytest.mark.parametrize("reported", slow_but([False, True], True))
@pytest.mark.parametrize("where", slow_but(["", WHERE], WHERE))
def test_changes_are_counted_where_they_can_be(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, *, reported: bool
) -> None:
    for module in ("gpu_ops.spark.plan.build", "gpu_ops.jobs.tables"):
        monkeypatch.setattr(f"{module}.metrics_reported", lambda session: reported)
    (tmp_path / "shop.sql").write_text(JOB.format(format="json").replace("p.id;", f"p.id{where};"))
    write(tmp_path / "orders", "json", ORDERS, (1, "book", 2), (2, "pen", 1))
    write(tmp_path / "prices", "json", PRICES, ("+I", 1, 9.5))
    screen = console()
    runner.run(load(tmp_path / "shop.sql"), screen, once=True)
    found = [(2, "pen", None)] if where else [(1, "book", 19.0), (2, "pen", None)]
    assert result(spark, tmp_path, "json") == found
    batch, done, _ = screen.export_text().splitlines()
    # a filter behind the join has to be counted by Spark, which it cannot beside the plugin
    unknown = bool(where) and reported
    out = "" if unknown else f", {len(found)} changes out"
    kinds = "" if unknown else rf" \({len(found)} \+I\)"
    assert re.fullmatch(rf"micro-batch 0: 3 rows in{out}{kinds}; .* state 3 rows, .*; cpu", batch)
    assert re.fullmatch(rf"done: 1 micro-batch, 3 rows in{out}, .* s in all", done)


@pytest.mark.thorough
def test_columns_from_the_data(spark: Any, tmp_path: Path) -> None:
    write(tmp_path / "orders", "parquet", ORDERS, (1, "book", 2))
    text = """
        CREATE TABLE orders WITH ('connector' = 'parquet', 'path' = 'orders');
        CREATE TABLE again WITH ('connector' = 'parquet', 'path' = 'orders');
        CREATE TABLE out WITH ('connector' = 'memory', 'table' = 'inferred');
        INSERT INTO out SELECT a.id, b.item FROM orders a JOIN again b ON a.id = b.id
    """
    (tmp_path / "a.sql").write_text(text)
    screen = console()
    assert runner.run(load(tmp_path / "a.sql"), screen, once=True).rows_out == 1
    assert [tuple(row) for row in spark.table("inferred").collect()] == [("+I", 1, "book")]
    assert "its state lives in memory only" in screen.export_text()
    explained = runner.explain(load(tmp_path / "a.sql"), console())
    assert "Join(joinType=[InnerJoin]" in explained
    assert "regular join, inner: a, b" in explained


@pytest.mark.thorough
def test_a_job_that_groups(spark: Any, tmp_path: Path) -> None:
    write(tmp_path / "orders", "parquet", ORDERS, (1, "book", 2), (2, "book", 3), (3, "pen", 1))
    text = """
        CREATE TABLE orders WITH ('connector' = 'parquet', 'path' = 'orders');
        CREATE TABLE out WITH ('connector' = 'memory', 'table' = 'grouped');
        INSERT INTO out SELECT item, sum(qty) AS n FROM orders GROUP BY item HAVING count(*) > 1
    """
    (tmp_path / "a.sql").write_text(text)
    runner.run(load(tmp_path / "a.sql"), console(), once=True)
    assert [tuple(row) for row in spark.table("grouped").collect()] == [("+I", "book", 5)]
    assert "GroupAggregate(groupBy=[item]" in runner.explain(load(tmp_path / "a.sql"), console())


@pytest.mark.thorough
def test_watermarks_make_an_interval_join(spark: Any, tmp_path: Path) -> None:
    for name in ("ordered", "shipped"):
        (tmp_path / name).mkdir()
        rows = [{"id": n, "at": f"2026-01-01T10:0{n}:00Z"} for n in range(3)]
        (tmp_path / name / "0.json").write_text("\n".join(map(json.dumps, rows)))
        time.sleep(0.01)
        (tmp_path / name / "1.json").write_text(json.dumps({"id": 9, "at": "2026-01-01T12:00:00Z"}))
    declared = """
        CREATE TABLE {0} (id INT, at TIMESTAMP(3), WATERMARK FOR at AS at - INTERVAL '1' MINUTE)
        WITH ('connector' = 'json', 'path' = '{0}', 'max_files_per_trigger' = '1', 'idle_timeout' = '1 hour'{1});
    """
    text = f"""
        {declared.format("ordered", "")} {declared.format("shipped", ", 'reader' = 'arrow'")}
        CREATE TABLE out WITH ('connector' = 'memory', 'table' = 'timed');
        INSERT INTO out SELECT o.id, s.id AS shipped FROM ordered o LEFT JOIN shipped s
        ON o.id = s.id AND s.at BETWEEN o.at AND o.at + INTERVAL '10' MINUTES
    """
    (tmp_path / "a.sql").write_text(text)
    screen = console()
    runner.run(load(tmp_path / "a.sql"), screen, once=True)
    assert sorted(row.id for row in spark.table("timed").collect()) == [0, 1, 2, 9]
    assert "watermark 2026-01-01 10:01:00 UTC" in screen.export_text()


# --- what is wrong ---------------------------------------------------------------------------------


BY_TIME = """
CREATE TABLE trades (k BIGINT, at TIMESTAMP, id BIGINT, WATERMARK FOR at AS at - INTERVAL '1' MINUTE)
WITH ('connector' = 'json', 'path' = 'trades', 'max_files_per_trigger' = '1');
CREATE TABLE quotes (op STRING, k BIGINT, at TIMESTAMP, price BIGINT, WATERMARK FOR at AS at - INTERVAL '1' MINUTE)
WITH ('connector' = 'json', 'path' = 'quotes', 'row_kind' = 'op', 'max_files_per_trigger' = '1');
CREATE TABLE said (kind STRING, id BIGINT, price BIGINT)
WITH ('connector' = 'json', 'path' = 'said', 'row_kind' = 'kind');
SET state = 'state'; SET checkpoint = 'checkpoint'; SET partitions = 2; {set}
INSERT INTO said
SELECT t.id, q.price FROM trades t {join};
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("settings", "join", "price"),
    [
        ("", "LEFT JOIN quotes FOR SYSTEM_TIME AS OF t.at AS q ON t.k = q.k", None),
        (
            "SET emit = at_watermark;",
            "ASOF LEFT JOIN quotes q ON t.k = q.k AND t.at >= q.at AND t.at - q.at <= INTERVAL 1 HOUR",
            7,
        ),
        pytest.param(
            "", "ASOF LEFT JOIN quotes q MATCH_CONDITION (t.at >= q.at) ON t.k = q.k", 7, marks=pytest.mark.slow
        ),
    ],
    ids=["temporal", "final", "asof"],
)
def test_joins_by_time(spark: Any, tmp_path: Path, settings: str, join: str, price: int | None) -> None:
    """A deletion ends what was valid; to an ASOF join it is a retraction. Over a restart, each row once if final."""
    trades = [("k", "BIGINT"), ("at", "STRING"), ("id", "BIGINT")]
    quotes = [("op", "STRING"), ("k", "BIGINT"), ("at", "STRING"), ("price", "BIGINT")]
    text = BY_TIME.format(set=settings, join=join)
    path = tmp_path / "trades.sql"
    path.write_text(text if "FOR" in join else text.replace("op STRING, ", "").replace("'row_kind' = 'op', ", ""))

    def seen(*rows: tuple[Any, ...]) -> None:
        rows = tuple(row if "FOR" in join else row[1:] for row in rows if "FOR" in join or row[0] != "-D")
        write(tmp_path / "quotes", "json", quotes if "FOR" in join else quotes[1:], *rows)

    write(tmp_path / "trades", "json", trades, (1, "2024-03-10T05:00:00Z", 10), (2, "2024-03-10T05:00:00Z", 20))
    write(tmp_path / "trades", "json", trades, (1, "2024-03-10T05:30:00Z", 11), (3, "2024-03-10T05:30:00Z", 12))
    seen(("+I", 1, "2024-03-10T04:30:00Z", 5), ("+I", 3, "2024-03-10T05:00:00Z", 7))
    seen(("+I", 1, "2024-03-10T05:10:00Z", 6), ("-D", 3, "2024-03-10T05:20:00Z", 7))
    runner.run(load(path), console(), once=True)
    write(tmp_path / "trades", "json", trades, (9, "2024-03-10T09:00:00Z", 99))
    seen(("+I", 9, "2024-03-10T08:59:00Z", 8))
    runner.run(load(path), console(), once=True)
    write(tmp_path / "trades", "json", trades, (9, "2024-03-10T09:30:00Z", 100))
    runner.run(load(path), console(), once=True)
    changes = spark.read.schema("kind STRING, id BIGINT, price BIGINT").json(str(tmp_path / "said")).collect()
    table = fold(sorted((tuple(row) for row in changes), key=lambda row: row[0] == "-D"))
    assert [row for row in table if row[0] < 99] == [(10, 5), (11, 6), (12, price), (20, None)]
    if "MATCH" not in join:
        assert {row["kind"] for row in changes} == {"+I"}


def failing(folder: Path, text: str) -> JobError:
    (folder / "a.sql").write_text(text)
    with pytest.raises(JobError) as raised:
        runner.run(load(folder / "a.sql"), console(), once=True)
    return raised.value


def test_errors_in_the_query(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "orders").mkdir()
    (tmp_path / "prices").mkdir()
    text = JOB.format(format="json").replace("o.qty * p.price", "o.qty *\n    p.prize")
    error = failing(tmp_path, text)
    assert (error.line, error.column) == (11, 5)
    assert "prize" in error.message
    error = failing(tmp_path, JOB.format(format="json").replace("LEFT JOIN", "NATURAL JOIN"))
    assert error.line == 10


def test_errors_in_a_table(spark: Any, tmp_path: Path) -> None:
    text = JOB.format(format="json")
    error = failing(tmp_path, text)
    assert (error.line, error.column) == (2, 14)
    assert "Path does not exist" in error.message
    for folder in ("orders", "prices"):
        (tmp_path / folder).mkdir()
    error = failing(tmp_path, text.replace("kind STRING, id BIGINT, item", "kind STRING, item"))
    assert error.message.startswith("the sink has 2 columns, the query 3: id, item, ")
    assert error.line == 6
    error = failing(tmp_path, text.replace("op STRING, id", "id").replace("json", "csv"))
    assert error.message == "CSV goes by position: name 'op' among the columns, where it stands"
    error = failing(tmp_path, text.replace(" (id BIGINT, item STRING, qty INT, PRIMARY KEY (id) NOT ENFORCED)", ""))
    assert error.message == "there are no files yet to take the columns from: name them"
    assert error.line == 2


@pytest.mark.thorough
def test_what_arrow_does_not_know_of_files(spark: Any, tmp_path: Path) -> None:
    text = JOB.format(format="csv").replace("'max_files", "'reader' = 'arrow', 'mode' = 'PERMISSIVE', 'max_files", 1)
    error = failing(tmp_path, text)
    assert "read_files() has no option 'mode' for csv" in str(error)
    assert "a.sql:2:14: " in str(error)


@pytest.mark.thorough
@pytest.mark.parametrize("driver", ["", ", 'driver' = 'org.nowhere.Driver'"])
def test_a_missing_driver_is_told_in_a_line(spark: Any, tmp_path: Path, driver: str) -> None:
    """Of a job that is explained, too: it was Java's stack, of 157 lines."""
    path = tmp_path / "job.sql"
    path.write_text(
        "CREATE TABLE a (k BIGINT) WITH ('connector' = 'jdbc', 'url' = 'jdbc:nowhere://h/x', 'table' = 't',\n"
        f"  'scan' = 'once'{driver});\nCREATE TABLE s (k BIGINT) WITH ('connector' = 'console');\n"
        "INSERT INTO s SELECT k FROM a;\n"
    )
    with pytest.raises(GpuJoinError, match=r"no JDBC driver for this url .*--packages") as caught:
        runner.explain(load(path), Console(quiet=True))
    assert str(caught.value).count("\n") == 2


@pytest.mark.thorough
def test_delta_without_the_jar(spark: Any, tmp_path: Path) -> None:
    """A change feed in, a view out, resumed; both by the package."""
    feed, kept = tmp_path / "orders", tmp_path / "live"
    rows = pa.table({"id": [1, 2], "item": ["book", "pen"]})
    deltalake.write_deltalake(feed, rows, configuration={"delta.enableChangeDataFeed": "true"})
    job = tmp_path / "shop.sql"
    job.write_text(
        "CREATE TABLE orders (PRIMARY KEY (id) NOT ENFORCED) WITH ('connector' = 'delta', 'path' = 'orders');\n"
        "CREATE TABLE live (name STRING, sold BIGINT, PRIMARY KEY (name) NOT ENFORCED)\n"
        "WITH ('connector' = 'delta', 'path' = 'live');\n"
        "SET state = 'state'; SET checkpoint = 'checkpoint';\n"
        "INSERT INTO live SELECT item, count(*) FROM orders GROUP BY item;"
    )

    def result() -> list[tuple[Any, ...]]:
        runner.run(load(job), Console(quiet=True), once=True)
        return sorted(tuple(row.values()) for row in deltalake.DeltaTable(kept).to_pyarrow_table().to_pylist())

    assert result() == [("book", 1), ("pen", 1)]
    deltalake.DeltaTable(feed).update(updates={"item": "'book'"}, predicate="id = 2")
    assert result() == [("book", 2)]
    for old, new, words in (
        ("'path' = 'orders'", "'path' = 'nowhere'", r"there is no Delta table at .*nowhere"),
        ("'path' = 'orders'", "'path' = 'orders', 'change_feed' = 'false'", r"Spark has no delta here.*; without it a"),
    ):
        text = job.read_text().replace(old, new)
        assert re.search(words, failing(tmp_path, text).message)


@pytest.mark.thorough
def test_a_missing_jar(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "prices").mkdir()
    text = JOB.format(format="json").replace(
        "'connector' = 'json', 'path' = 'orders', 'max_files_per_trigger' = '1'",
        "'connector' = 'kafka', 'bootstrap_servers' = 'x:1', 'topic' = 't'",
    )
    error = failing(tmp_path, text)
    assert (error.line, error.column) == (2, 14)
    known = package("kafka", spark.version)
    assert (f"--packages {known}" if known else "no package of it is known for Spark") in error.message


def test_a_row_that_cannot_be(spark: Any, tmp_path: Path) -> None:
    path = tmp_path / "shop.sql"
    path.write_text(JOB.format(format="json"))
    write(tmp_path / "orders", "json", ORDERS, (None, "book", 2))
    (tmp_path / "prices").mkdir()
    with pytest.raises(JobFailedError, match=r"input 'o.*', column 'id': .* holds nulls"):
        runner.run(load(path), console(), once=True)


# --- messages --------------------------------------------------------------------------------------


def topic(spark: Any, *values: Any) -> Any:
    texts = [(v if isinstance(v, str | None) else json.dumps(v),) for v in values]
    return spark.createDataFrame(texts, "value STRING").selectExpr("CAST(value AS BINARY) AS value")


def kafka(form: str, **more: Any) -> JobSource:
    columns = ("id", "BIGINT"), ("name", "STRING")
    return JobSource("t", connector="kafka", columns=columns, options={}, at=0, format=form, **more)


def rows(df: Any) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in df.collect()]


@pytest.mark.thorough
def test_json_messages(spark: Any) -> None:
    messages = topic(spark, {"id": 1, "name": "a", "op": "+I"}, None, {"id": 2})
    source, df = decode(messages, kafka("json"))
    assert (source.row_kind, rows(df)) == (None, [(1, "a"), (2, None)])
    source, df = decode(messages, kafka("json", row_kind="op"))
    assert (source.row_kind, rows(df)) == ("op", [(1, "a", "+I"), (2, None, None)])
    broken = topic(spark, {"id": 1}, "{no", {"id": "x"})
    assert rows(decode(broken, kafka("json", bad_rows="drop"))[1]) == [(1, None)]
    with pytest.raises(Exception, match="input 't': a message: is no JSON object"):
        rows(decode(broken, kafka("json"))[1])


@pytest.mark.thorough
@pytest.mark.parametrize("wrapped", slow_but([False, True], True))
def test_debezium_messages(spark: Any, wrapped: bool) -> None:
    a, b = {"id": 1, "name": "a"}, {"id": 1, "name": "b"}
    said = [
        {"op": "r", "before": None, "after": a},
        {"op": "u", "before": a, "after": b},
        {"op": "u", "before": None, "after": a},
        {"op": "d", "before": b, "after": None},
    ]
    values = [{"schema": {}, "payload": one} if wrapped else one for one in said]
    source, df = decode(topic(spark, *values), kafka("debezium-json"))
    assert df.columns == [source.row_kind, "id", "name"]
    assert rows(df) == [("+I", 1, "a"), ("-U", 1, "a"), ("+U", 1, "b"), ("u", 1, "a"), ("-D", 1, "b")]
    with pytest.raises(Exception, match=r"a truncate \(op t\) empties its table"):
        rows(decode(topic(spark, {"op": "t"}), kafka("debezium-json"))[1])


@pytest.mark.thorough
def test_messages_with_columns_called_like_ours(spark: Any) -> None:
    ours = dataclasses.replace(kafka("json", bad_rows="drop"), columns=(("id", "BIGINT"), ("__Bad_messages", "STRING")))
    assert rows(decode(topic(spark, {"id": 1, "__Bad_messages": "a"}, "{no"), ours)[1]) == [(1, "a")]
    ours = dataclasses.replace(kafka("debezium-json"), columns=(("id", "BIGINT"), ("__ROW_kind", "STRING")))
    message = {"op": "r", "before": None, "after": {"id": 1, "__ROW_kind": "a"}}
    source, df = decode(topic(spark, message), ours)
    assert (df.columns, rows(df)) == ([source.row_kind, "id", "__ROW_kind"], [("+I", 1, "a")])
    assert df.select(source.row_kind).collect()


@pytest.mark.thorough
def test_messages_out(spark: Any) -> None:
    def sink(options: str) -> Any:
        text = f"""CREATE TABLE t (a INT) WITH ('connector' = 'json', 'path' = 'p');
        CREATE TABLE out {options}; INSERT INTO out SELECT * FROM t"""
        return build(read_sql(Text(Path("a.sql"), text))).sink

    with_key = "WITH ('connector' = 'kafka', 'bootstrap_servers' = 'a', 'topic' = 'b', 'row_kind' = 'op', 'key' = '{}')"
    changes = spark.createDataFrame([("+I", 1, None)], "row_kind STRING, id INT, name STRING")
    file = Text(Path("a.sql"), "")

    def said(key: str) -> list[tuple[Any, ...]]:
        target = sink(with_key.format(key))
        with file.errors_at(0):
            return rows(json_messages(shaped(changes, target, file), target.key))

    value = '{"op":"+I","id":1,"name":null}'
    assert said("ID") == [("1", value)]
    assert said("id, name") == [('{"id":1,"name":null}', value)]
    bare = sink(with_key.replace(", 'key' = '{}'", ""))
    assert rows(json_messages(shaped(changes, bare, file), bare.key)) == [(value,)]
    with pytest.raises(JobError, match="key='x' is no column; there are op, id, name"):
        said("x")
    with pytest.raises(JobError, match="the query has a column 'id', too"):
        shaped(changes, sink("WITH ('connector' = 'console', 'row_kind' = 'id')"), file)


@pytest.mark.thorough
def test_rate(spark: Any) -> None:
    text = "CREATE TABLE t WITH ('connector' = 'rate', 'rows_per_second' = '5', 'sequence_by' = 'value'); "
    text += "CREATE TABLE out WITH ('connector' = 'console'); INSERT INTO out SELECT * FROM t"
    file = Text(Path("a.sql"), text)
    opened = open_source(spark, build(read_sql(file)).sources[0], file)
    assert opened.df.columns == ["timestamp", "value"]
    assert (opened.name, opened.sequence_by) == ("t", "value")


# --- the command -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_ctrl_c_and_again(spark: Any, tmp_path: Path) -> None:
    """As in a terminal, where an interrupt goes to every process of the job."""
    (tmp_path / "shop.sql").write_text(JOB.format(format="json"))
    write(tmp_path / "orders", "json", ORDERS, (1, "book", 2))
    write(tmp_path / "prices", "json", PRICES, ("+I", 1, 9.5))
    command = [sys.executable, "-m", "gpu_ops.cli", "run", str(tmp_path / "shop.sql"), "--master", "local[2]"]
    process = subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        first = process.stdout.readline()
        assert first.startswith("micro-batch 0: 2 rows in, 1 changes out (1 +I)"), first + process.stderr.read()
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, err
    assert out.startswith("stopped after 1 micro-batch, 2 rows in, 1 changes out, ")
    assert "Traceback" not in err
    write(tmp_path / "prices", "json", PRICES, ("-D", 1, 9.5))
    screen = console()
    runner.run(load(tmp_path / "shop.sql"), screen, once=True)
    assert screen.export_text().startswith("micro-batch 1: 1 rows in, 2 changes out (1 +I, 1 -D)")
