"""Jobs whose inputs end: the sink has the result, once, however often the job was cut short on the way to it."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deltalake
import pytest
from conftest import slow_but
from rich.console import Console

import gpu_ops
from gpu_ops.jobs import runner
from gpu_ops.jobs.job import load
from gpu_ops.jobs.runner import JobFailedError, Outcome
from gpu_ops.jobs.sql_text import JobError
from gpu_ops.spark.api import static
from gpu_ops.spark.sinks import changes

pytestmark = [pytest.mark.spark, pytest.mark.thorough]

JOB = """
CREATE TABLE orders (id BIGINT, item STRING, qty BIGINT, op STRING, PRIMARY KEY (id) NOT ENFORCED)
WITH ('connector' = 'json', 'path' = 'orders', 'row_kind' = 'op', 'max_files_per_trigger' = '1'{scan});
CREATE TABLE totals {columns}
WITH ({sink});
SET emit = at_end; SET state = 'state'; SET checkpoint = 'checkpoint'; SET partitions = 2;
INSERT INTO totals SELECT item, sum(qty) AS qty FROM orders GROUP BY item HAVING count(*) > 1;
"""
FILES = "'connector' = '{}', 'path' = 'totals'"
TOTALS = [("book", 9), ("pen", 4)]


def orders(folder: Path) -> None:
    """Two files, each a micro-batch; what is left of them comes to `TOTALS`."""
    arrive(folder, *((number, item, 3, "+I") for number, item in enumerate(["book"] * 3 + ["pen", "pen", "cup"])))
    arrive(folder, (3, "pen", 1, "+U"), (6, "cap", 1, "+I"), (6, "cap", 1, "-D"))


def arrive(folder: Path, *rows: tuple[Any, ...]) -> None:
    made = folder / "orders"
    made.mkdir(exist_ok=True)
    names = ("id", "item", "qty", "op")
    lines = (json.dumps(dict(zip(names, row, strict=True))) for row in rows)
    (made / f"{len(list(made.iterdir()))}.json").write_text("\n".join(lines))
    time.sleep(0.01)  # Spark takes files by their time


def job(folder: Path, sink: str, *, columns: str = "", scan: str = "") -> Callable[[], Outcome]:
    """What runs the job."""
    path = folder / "totals.sql"
    path.write_text(JOB.format(sink=sink, columns=columns, scan=scan))
    return lambda: runner.run(load(path), screen(), once=True)


def screen() -> Console:
    return Console(record=True, width=200, file=io.StringIO())


def table(df: Any) -> list[tuple[Any, ...]]:
    """The rows, which are insertions where the sink has row kinds."""
    assert "row_kind" not in df.columns or {row["row_kind"] for row in df.collect()} <= {"+I"}
    return sorted(tuple(row) for row in df.select("item", "qty").collect())


def written(spark: Any, folder: Path, form: str) -> list[tuple[Any, ...]]:
    if form == "delta":
        rows = deltalake.DeltaTable(str(folder / "totals")).to_pyarrow_table().to_pylist()
        assert {row["row_kind"] for row in rows} == {"+I"}
        return sorted((row["item"], row["qty"]) for row in rows)
    return table(spark.read.format(form).load(str(folder / "totals")))


@pytest.mark.parametrize(
    "form", slow_but(["json", "parquet", "parquet, arrow", "delta, arrow"], "json", "delta, arrow")
)
def test_the_result_is_in_the_files(spark: Any, tmp_path: Path, form: str) -> None:
    form, _, by_tasks = form.partition(", ")
    run = job(tmp_path, FILES.format(form) + (", 'writer' = 'arrow'" if by_tasks else ""))
    orders(tmp_path)
    first = run()
    assert (first.batches, first.rows_in, first.rows_out) == (2, 9, 2)
    assert written(spark, tmp_path, form) == TOTALS
    again = run()
    assert (again.batches, again.rows_out, again.interrupted) == (0, 0, False)
    assert written(spark, tmp_path, form) == TOTALS


class CutError(Exception):
    """What ends a job in the middle, as a kill does."""


@pytest.mark.slow
def test_a_job_that_is_cut_short_on_the_way_to_its_sink(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its inputs, before and after the result is kept, in the sink, and between the sink and Spark's commit."""
    url = f"jdbc:derby:memory:{tmp_path.name};create=true"
    types = "'option.createTableColumnTypes' = 'item VARCHAR(9)'"
    sink = f"'connector' = 'jdbc', 'url' = '{url}', 'table' = 'totals', {types}"
    run = job(tmp_path, sink, columns="(item STRING, qty BIGINT, PRIMARY KEY (item) NOT ENFORCED)")
    orders(tmp_path)

    def cut(*_: Any, **__: Any) -> Any:
        raise CutError

    for target, name in ((runner, "result"), (static._Folder, "begin"), (static._Folder, "_put"), (runner, "start")):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, cut)
            with pytest.raises(CutError):
                run()
    view = runner.start.__globals__["view"]
    for before in (True, False):

        def failing(sink: Any, *, before: bool = before) -> Any:
            def write(batch: Any, number: int) -> None:
                if not before:
                    view(sink)(batch, number)
                raise CutError

            return write

        with monkeypatch.context() as patch:
            patch.setitem(runner.start.__globals__, "view", failing)
            with pytest.raises(JobFailedError):
                run()
    arrive(tmp_path, (9, "late", 9, "+I"))  # the end was before
    assert run().rows_out == 2
    assert table(spark.read.format("jdbc").options(url=url, dbtable="totals").load()) == TOTALS
    assert run().rows_out == 0
    assert table(spark.read.format("jdbc").options(url=url, dbtable="totals").load()) == TOTALS


def test_an_upsert_topic(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, str]] = []
    monkeypatch.setattr(changes, "_send", lambda rows, *_: sent.extend((row.key, row.value) for row in rows.collect()))
    broker = "'connector' = 'upsert-kafka', 'bootstrap_servers' = 'x:1', 'topic' = 't'"
    run = job(tmp_path, broker, columns="(item STRING, qty BIGINT, PRIMARY KEY (item) NOT ENFORCED)")
    orders(tmp_path)
    for _ in range(2):
        run()
        assert sorted(sent) == [
            ('{"item":"book"}', '{"item":"book","qty":9}'), ('{"item":"pen"}', '{"item":"pen","qty":4}')
        ]  # fmt: skip


def test_a_table_of_the_session_is_made_each_time(spark: Any, tmp_path: Path) -> None:
    run = job(tmp_path, "'connector' = 'memory', 'table' = 'the_totals'")
    orders(tmp_path)
    for _ in range(2):
        assert run().rows_out == 2
        assert table(spark.table("the_totals")) == TOTALS


def test_tables_alone(spark: Any, tmp_path: Path) -> None:
    """Sources that are read once, every one of them: there is no stream, and no state but the result."""
    run = job(tmp_path, FILES.format("json"), scan=", 'scan' = 'once'")
    text = (tmp_path / "totals.sql").read_text().replace(", 'max_files_per_trigger' = '1'", "")
    (tmp_path / "totals.sql").write_text(text.replace("SET emit = at_end;", ""))
    orders(tmp_path)
    for rows_out in (2, 0):
        assert run().rows_out == rows_out
        assert written(spark, tmp_path, "json") == TOTALS
    (tmp_path / "totals.sql").write_text(text.replace("sum(qty)", "max(qty)"))
    with pytest.raises(JobError, match="belongs to another query"):
        run()


def test_no_input_yet(spark: Any, tmp_path: Path) -> None:
    run = job(tmp_path, FILES.format("json"))
    (tmp_path / "orders").mkdir()
    shown = screen()
    runner.run(load(tmp_path / "totals.sql"), shown, once=True)
    assert "there has been no input yet, so there is no result" in shown.export_text()
    orders(tmp_path)
    run()
    assert written(spark, tmp_path, "json") == TOTALS


def test_what_cannot_be(spark: Any, tmp_path: Path) -> None:
    run = job(tmp_path, FILES.format("json"))
    orders(tmp_path)
    path = tmp_path / "totals.sql"
    text = path.read_text()
    with pytest.raises(JobError, match="gives its result when the input has ended: run the job with --once"):
        runner.run(load(path), screen())
    path.write_text(text.replace("SET state = 'state'; SET checkpoint = 'checkpoint';", ""))
    with pytest.raises(JobError, match="keeps the input until it ends: set state and checkpoint"):
        run()
    path.write_text(text)
    run()
    path.write_text(text.replace("sum(qty)", "max(qty)"))
    with pytest.raises(JobError, match="belongs to another query: set another state and checkpoint"):
        run()
    path.write_text(text)
    gpu_ops.reopen(state=str(tmp_path / "state"))
    with pytest.raises(JobError, match="was opened again, and its result has been handed to the sink"):
        run()
