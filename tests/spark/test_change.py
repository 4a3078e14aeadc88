"""A query that is changed: its result is that of the new query from scratch, right after the change and later on."""

from __future__ import annotations

import dataclasses
import io
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import deltalake
import duckdb
import pyarrow as pa
import pytest
from conftest import slow_but
from rich.console import Console

import gpu_ops
from gpu_ops import stream
from gpu_ops.errors import DescriptionError, NotBuiltError, StateError
from gpu_ops.jobs import changed, runner
from gpu_ops.jobs.job import load
from spark.support import Source

pytestmark = [pytest.mark.spark, pytest.mark.thorough]

SCHEMAS = {
    "orders": "op STRING, id INT, item STRING, amount INT",
    "prices": "item STRING, price INT",
    "refunds": "id INT, refund INT",
}
ITEMS = ["x", "y", "z", None]


class Inputs:
    """Random histories of three tables: orders that change, prices and refunds that only come."""

    def __init__(self, spark: Any, folder: Path, rng: random.Random) -> None:
        self.sources = {name: Source(spark, folder / name, schema) for name, schema in SCHEMAS.items()}
        self._rng, self._orders, self._next = rng, dict[int, dict[str, Any]](), 0

    def add(self) -> None:
        rng, changes = self._rng, list[dict[str, Any]]()
        for _ in range(rng.randint(1, 5)):
            if self._orders and rng.random() < 0.4:
                row = self._orders.pop(rng.choice(list(self._orders)))
                changes.append({**row, "op": "-D"})
                if rng.random() < 0.5:
                    continue
                row = {**row, "amount": rng.randint(0, 9)}
            else:
                self._next += 1
                row = {"id": self._next, "item": rng.choice(ITEMS), "amount": rng.randint(0, 9)}
            self._orders[row["id"]] = row
            changes.append({**row, "op": "+I"})
        self.sources["orders"].add(*changes)
        first = not self.sources["prices"].files
        if first or rng.random() < 0.7:
            self.sources["prices"].add(*({"item": rng.choice(ITEMS), "price": rng.randint(1, 4)} for _ in range(2)))
        if first or rng.random() < 0.7:
            self.sources["refunds"].add({"id": rng.randint(1, self._next + 1), "refund": rng.randint(1, 3)})

    def tables(self, query: str) -> dict[str, Any]:
        made = {name: source.df for name, source in self.sources.items() if name in query}
        if "orders" in made:
            made["orders"] = stream(made["orders"], row_kind="op", unique_key="id")
        return made

    def result(self, query: str) -> Counter[Any]:
        with duckdb.connect() as db:
            for name, source in self.sources.items():
                columns = [word.split()[0] for word in SCHEMAS[name].split(", ") if not word.startswith("op ")]
                types = [pa.string() if c == "item" else pa.int32() for c in columns]
                rows = source.table(columns)
                data = [pa.array([row[n] for row in rows], kind) for n, kind in enumerate(types)]
                db.register(name, pa.table(data, names=columns))
            rows = db.sql(query)
            return Counter(_row(dict(zip(rows.columns, row, strict=True))) for row in rows.fetchall())


def _row(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple((name, None if value is None else int(value) if name != "item" else value)
                 for name, value in sorted(row.items()))  # fmt: skip


class Table:
    """A table that a query keeps up to date; its columns change as those of a view in a database would."""

    def __init__(self) -> None:
        self.rows: Counter[Any] = Counter()
        self.micro_batches: list[int] = []

    def __call__(self, rows: Any, number: int) -> None:
        self.micro_batches.append(number)
        for row in rows.collect():
            content = row.asDict()
            kind = content.pop("row_kind")
            self.rows[_row(content)] += 1 if kind in ("+I", "+U") else -1
        self.rows = Counter({row: count for row, count in self.rows.items() if count})

    def alter(self, columns: Sequence[str]) -> None:
        altered: Counter[Any] = Counter()
        for row, count in self.rows.items():
            known = dict(row)
            altered[tuple((name, known.get(name)) for name in sorted(columns))] += count
        self.rows = altered


def run(inputs: Inputs, query: str, folder: Path, table: Table, **options: Any) -> None:
    changes = gpu_ops.sql(query, tables=inputs.tables(query), state=str(folder / "state"), **options)
    writer = changes.writeStream.foreachBatch(table).option("checkpointLocation", str(folder / "checkpoint"))
    writer.trigger(availableNow=True).start().awaitTermination()


def columns_of(query: str) -> list[str]:
    with duckdb.connect() as db:
        for name, schema in SCHEMAS.items():
            db.sql(f"CREATE TABLE {name} ({schema})")
        return db.sql(query).columns


def change(inputs: Inputs, query: str, old: Path, new: Path, table: Table | None, **options: Any) -> Any:
    if table is not None:
        table.alter(columns_of(query))
    return gpu_ops.change(
        query, tables=inputs.tables(query), state=str(new / "state"), checkpoint=str(new / "checkpoint"),
        old_state=str(old / "state"), old_checkpoint=str(old / "checkpoint"), write=table, **options,
    )  # fmt: skip


JOINED = "FROM orders o JOIN prices p ON o.item = p.item"
LEFT = "FROM orders o LEFT JOIN prices p ON o.item = p.item"
WIDE = f"SELECT o.id, o.item, o.amount, p.price {LEFT}"
GROUPED = "SELECT item, count(*) AS n, sum(price) AS price FROM prices GROUP BY item"
PAIRS = {
    "an aggregate above a join": (
        f"SELECT o.id, o.item, o.amount, p.price {JOINED}",
        f"SELECT o.item, sum(o.amount * p.price) AS paid, count(*) AS n {JOINED} GROUP BY o.item",
    ),
    "another kind of join, and a filter": (
        f"SELECT o.id, o.item, o.amount, p.price {JOINED}",
        f"{WIDE} WHERE o.amount > 3",
    ),
    "a join with a new table": (
        WIDE,
        f"SELECT o.id, o.amount, p.price, r.refund {LEFT} LEFT JOIN refunds r ON o.id = r.id",
    ),
    "a join that falls away": (
        f"SELECT o.id, o.item, o.amount, p.price, r.refund {LEFT} LEFT JOIN refunds r ON o.id = r.id",
        WIDE,
    ),
    "a filter of groups, and a column renamed": (
        "SELECT item, count(*) AS n FROM orders GROUP BY item",
        "SELECT item, count(*) AS orders_of_it FROM orders GROUP BY item HAVING count(*) > 1",
    ),
    "a filter of groups of what only comes": (
        GROUPED,
        f"SELECT item, price FROM ({GROUPED}) WHERE n > 1",
    ),
    "a join above groups of what only comes": (
        GROUPED,
        f"SELECT r.id, g.n FROM refunds r JOIN ({GROUPED}) g ON r.refund = g.n",
    ),
    "a window function over a join": (
        WIDE,
        f"SELECT o.id, p.price, sum(o.amount) OVER (PARTITION BY o.item) AS together {LEFT}",
    ),
    "a union": (
        WIDE,
        f"SELECT o.id, o.amount {JOINED} UNION ALL SELECT count(*) AS id, amount FROM orders GROUP BY amount",
    ),
}


@pytest.mark.parametrize("what", slow_but(PAIRS, "an aggregate above a join"))
def test_a_query_that_changes_keeps_its_state(spark: Any, tmp_path: Path, what: str) -> None:
    old, new = PAIRS[what]
    inputs, table = Inputs(spark, tmp_path, random.Random(what)), Table()
    inputs.add()
    inputs.add()
    run(inputs, old, tmp_path / "old", table, partitions=2)
    assert table.rows == inputs.result(old)
    inputs.add()  # the old query has not seen it
    changed = change(inputs, new, tmp_path / "old", tmp_path / "new", table, partitions=2)
    assert {one.name for one in changed.tables if one.origin == "source"} <= {"refunds"}
    for _ in range(2):
        run(inputs, new, tmp_path / "new", table, partitions=2)
        assert table.rows == inputs.result(new)
        inputs.add()


def random_query(rng: random.Random) -> str:
    """A query over the three tables."""
    if rng.random() < 0.3:
        groups = f"SELECT item, count(*) AS n, {rng.choice(['sum', 'max'])}(price) AS price FROM prices GROUP BY item"
        return rng.choice([
            groups,
            f"{groups} HAVING count(*) > 1",
            f"SELECT price, n FROM ({groups}) WHERE n < 5",
            f"SELECT o.id, g.n FROM orders o {rng.choice(['JOIN', 'LEFT JOIN'])} ({groups}) g ON o.item = g.item",
            f"SELECT n, count(*) AS items FROM ({groups}) GROUP BY n",
            f"SELECT id, n FROM refunds r JOIN ({groups}) g ON r.refund = g.n",
        ])  # fmt: skip
    where = " AND ".join(
        rng.sample(["o.amount > 2", "o.amount < 8", "o.item IS NOT NULL", "o.id > 1"], rng.randint(0, 2))
    )
    kind = rng.choice(["JOIN", "LEFT JOIN", "FULL JOIN"])
    source = rng.choice([
        "orders o",
        f"orders o {kind} prices p ON o.item = p.item",
        f"orders o {kind} prices p ON o.item = p.item LEFT JOIN refunds r ON o.id = r.id",
        "orders o LEFT JOIN refunds r ON o.id = r.id",
    ])  # fmt: skip
    rest = f"FROM {source}{' WHERE ' * bool(where)}{where}"
    columns = ["o.id", "o.item", "o.amount", *["p.price"] * ("prices" in source), *["r.refund"] * ("refunds" in source)]
    shape = rng.choice(["rows", "groups", "window", "union", "distinct"])
    if shape == "groups" or source == "orders o":
        measures = [
            "count(*) AS n", "sum(o.amount) AS amount", "min(o.id) AS first", "max(o.amount) AS most",
            *["sum(p.price) AS price"] * ("prices" in source),
        ]  # fmt: skip
        chosen = ", ".join(rng.sample(measures, rng.randint(1, 3)))
        having = rng.choice(["", " HAVING count(*) > 1"])
        return f"SELECT o.item, {chosen} {rest} GROUP BY o.item{having}"
    chosen = ", ".join(rng.sample(columns, rng.randint(1, len(columns))))
    if shape == "window":
        return f"SELECT {chosen}, count(*) OVER (PARTITION BY o.item) AS n {rest}"
    if shape == "union":
        return f"SELECT o.id, o.amount {rest} UNION ALL SELECT min(id) AS id, amount FROM orders GROUP BY amount"
    return f"SELECT {'DISTINCT ' * (shape == 'distinct')}{chosen} {rest}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_random_changes(spark: Any, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    inputs, table = Inputs(spark, tmp_path, rng), Table()
    for _ in range(rng.randint(1, 3)):
        inputs.add()
    query, folder, emit = random_query(rng), tmp_path / "0", rng.choice(["per_batch", "per_event"])
    run(inputs, query, folder, table, partitions=rng.randint(1, 2), emit=emit)
    assert table.rows == inputs.result(query), query
    for number in range(1, 3):
        new, before = random_query(rng), folder
        if rng.random() < 0.5:
            inputs.add()
        folder, options = tmp_path / str(number), {"partitions": rng.randint(1, 2), "emit": emit}
        try:
            change(inputs, new, before, folder, table, **options)
        except DescriptionError:  # the state lacks something; the sources have everything
            assert not (folder / "state").exists()
            names = [name for name in SCHEMAS if name in new]
            change(inputs, new, before, folder, table, read_again=names, **options)
        for _ in range(2):
            run(inputs, new, folder, table, **options)
            assert table.rows == inputs.result(new), (seed, query, new)
            inputs.add()
        run(inputs, new, folder, table, **options)
        query = new


def test_what_a_change_does_is_told_before(spark: Any, tmp_path: Path) -> None:
    inputs, table = Inputs(spark, tmp_path, random.Random(7)), Table()
    inputs.add()
    old = f"SELECT o.id, o.item, p.price {JOINED} WHERE p.price > 1"
    run(inputs, old, tmp_path / "old", table)
    state, before = str(tmp_path / "old" / "state"), sorted(map(str, tmp_path.rglob("*")))

    def told(query: str, **options: Any) -> Any:
        return gpu_ops.plan_change(query, old_state=state, tables=inputs.tables(query), **options)

    said = told(f"SELECT o.item, count(*) AS n {JOINED} WHERE p.price > 1 GROUP BY o.item")
    assert [(one.name, one.becomes) for one in said.operators] == [
        ("regular join of o and p", "changed"), ("aggregate over it", "new"),
    ]  # fmt: skip
    assert [(one.name, one.origin) for one in said.tables] == [("orders", "state"), ("prices", "state")]
    assert "its source goes on where it stood" in str(said)
    with pytest.raises(DescriptionError, match="'prices': rows that are not price > 1 are not in the state"):
        told(f"SELECT o.id, p.price {JOINED}")
    wider = told(f"SELECT o.id, p.price {JOINED}", read_again=["prices"])
    assert wider.reads_sources == ("prices",)
    with pytest.raises(DescriptionError, match=r"read_again=\['nothing'\]|'nothing': the query has no such table"):
        told(old, read_again=["nothing"])
    with pytest.raises(DescriptionError, match="missing='no'"):
        told(old, missing="no")
    with pytest.raises(NotBuiltError, match="final"):
        told(f"SELECT o.item, count(*) AS n {LEFT} GROUP BY o.item", emit="at_end")
    with pytest.raises(StateError, match="does not say which query"):
        gpu_ops.plan_change(old, old_state=str(tmp_path / "nothing"), tables=inputs.tables(old))
    assert sorted(map(str, tmp_path.rglob("*"))) == before, "nothing was changed"


@pytest.mark.slow
def test_columns_that_are_missing_may_be_null(spark: Any, tmp_path: Path) -> None:
    inputs, table = Inputs(spark, tmp_path, random.Random(8)), Table()
    for _ in range(3):
        inputs.add()
    run(inputs, f"SELECT o.id, p.price {JOINED}", tmp_path / "old", table)
    new = f"SELECT o.id, o.amount, p.price {JOINED}"
    with pytest.raises(DescriptionError, match="column 'amount' is not in the state"):
        change(inputs, new, tmp_path / "old", tmp_path / "new", None)
    before = len(inputs.sources["orders"].files)
    change(inputs, new, tmp_path / "old", tmp_path / "new", table, missing="null")
    known = inputs.result(f"SELECT o.id, NULL AS amount, p.price {JOINED}")
    assert table.rows == known, before


def test_a_folder_says_what_it_is_of(spark: Any, tmp_path: Path) -> None:
    inputs, table = Inputs(spark, tmp_path, random.Random(9)), Table()
    inputs.add()
    old, new = f"SELECT o.id, p.price {LEFT}", f"SELECT o.id {LEFT}"
    folder = tmp_path / "old"
    run(inputs, old, folder, table)
    with pytest.raises(StateError, match="SELECT is id, and was id, price"):
        run(inputs, new, folder, table)
    run(inputs, f"SELECT  o.id,p.price {LEFT}", folder, table)  # the same one, written otherwise
    begun = gpu_ops.sql(old, tables=inputs.tables(old), state=str(folder / "state")).writeStream.foreachBatch(table)
    begun = begun.option("checkpointLocation", str(folder / "checkpoint")).start()
    try:
        with pytest.raises(StateError, match="is in use by the running query"):
            change(inputs, new, folder, tmp_path / "new", None)
    finally:
        begun.stop()
    with pytest.raises(StateError, match="there is no checkpoint"):
        gpu_ops.change(
            new, tables=inputs.tables(new), state=str(tmp_path / "x"), checkpoint=str(tmp_path / "y"), write=None,
            old_state=str(folder / "state"), old_checkpoint=str(tmp_path / "nothing"),
        )  # fmt: skip
    change(inputs, new, folder, tmp_path / "new", table)
    assert table.rows == inputs.result(new)
    with pytest.raises(StateError, match=r"was changed into another one.*new/state"):
        run(inputs, old, folder, table)
    inputs.add()
    run(inputs, new, tmp_path / "new", table)
    assert table.rows == inputs.result(new)
    table.alter(columns_of(old))
    gpu_ops.undo_change(old, tables=inputs.tables(old), state=str(folder / "state"), write=table)
    run(inputs, old, folder, table)
    assert table.rows == inputs.result(old)
    with pytest.raises(StateError, match=r"was changed into another one.*old/state"):
        run(inputs, new, tmp_path / "new", table)
    with pytest.raises(StateError, match="there is nothing to undo"):
        gpu_ops.undo_change(old, tables=inputs.tables(old), state=str(folder / "state"), write=table)


@pytest.mark.slow
def test_the_old_result_may_be_unknown(spark: Any, tmp_path: Path) -> None:
    inputs, table = Inputs(spark, tmp_path, random.Random(10)), Table()
    inputs.add()
    query = f"SELECT o.id, p.price {JOINED}"
    tables = inputs.tables(query) | {"prices": stream(inputs.sources["prices"].df, ttl="1 day")}
    folder = tmp_path / "old"
    changes = gpu_ops.sql(query, tables=tables, state=str(folder / "state")).writeStream.foreachBatch(table)
    changes = changes.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True)
    changes.start().awaitTermination()
    with pytest.raises(NotBuiltError, match="empty_sink=True"):
        change(inputs, query, folder, tmp_path / "new", table, read_again=["prices", "orders"])
    fresh = Table()
    said = change(inputs, query, folder, tmp_path / "new", fresh, read_again=["prices", "orders"], empty_sink=True)
    assert "a ttl=" in said.unknown
    assert fresh.rows == inputs.result(query)


@pytest.mark.slow
def test_a_job_is_changed_and_changed_back(spark: Any, tmp_path: Path) -> None:
    inputs, console = Inputs(spark, tmp_path, random.Random(11)), Console(file=io.StringIO())
    for _ in range(2):
        inputs.add()
    tables = f"""
    CREATE TABLE prices (item STRING, price INT) WITH ('connector' = 'json', 'path' = '{tmp_path}/prices');
    CREATE TABLE refunds (id INT, refund INT) WITH ('connector' = 'json', 'path' = '{tmp_path}/refunds');
    CREATE TABLE view (item STRING, n BIGINT, PRIMARY KEY (item) NOT ENFORCED)
    WITH ('connector' = 'delta', 'path' = '{tmp_path}/view');
    """
    query = "SELECT item, count(*) AS n FROM prices p JOIN refunds r ON p.price = r.refund GROUP BY item"
    jobs = {}
    for name, where in (("old", ""), ("new", " HAVING count(*) > 1")):
        file = tmp_path / f"{name}.sql"
        file.write_text(f"{tables}SET 'state' = '{tmp_path}/{name}/s'; SET 'checkpoint' = '{tmp_path}/{name}/c';"
                        f"INSERT INTO view {query}{where};")  # fmt: skip
        jobs[name] = load(file)

    def checked(having: str) -> None:
        rows = deltalake.DeltaTable(str(tmp_path / "view")).to_pyarrow_table().to_pylist()
        assert Counter(map(_row, rows)) == inputs.result(query + having)

    folders = f"{tmp_path}/old/s", f"{tmp_path}/old/c"
    runner.run(jobs["old"], console, once=True)
    checked("")
    assert "its rows are in the state" in str(
        changed.plan(jobs["new"], console, folders[0], read_again=(), missing="refuse")
    )
    changed.change(jobs["new"], console, *folders, read_again=(), missing="refuse", empty_sink=False)
    checked(" HAVING count(*) > 1")
    for _ in range(3):
        inputs.add()
    runner.run(jobs["new"], console, once=True)
    checked(" HAVING count(*) > 1")
    changed.undo(jobs["old"], console)
    runner.run(jobs["old"], console, once=True)
    checked("")
    several = load(tmp_path / "old.sql")
    with pytest.raises(NotBuiltError, match="one INSERT INTO without views"):
        changed.undo(dataclasses.replace(several, inserts=several.inserts * 2), console)


KILLED = """
import json, random, sys
from pathlib import Path
from gpu_ops.spark import session
sys.path.insert(0, "tests")
from spark import test_change as of
import gpu_ops
folder = Path(sys.argv[1])
spark = session("killed", master="local[2]", config={"spark.log.level": "OFF", "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2"})
inputs = of.Inputs.__new__(of.Inputs)
inputs.sources = {name: of.Source(spark, folder / name, schema) for name, schema in of.SCHEMAS.items()}
print("begins", flush=True)
of.change(inputs, sys.argv[2], folder / "old", folder / "new", None, partitions=2)
print("done", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(int(os.environ.get("GPU_JOIN_KILLS", "3"))))
def test_a_change_that_is_killed_goes_on(spark: Any, tmp_path: Path, seed: int) -> None:
    """Killed again and again at any point: the old query goes on as it was, or the new one, and never a mixture."""
    rng = random.Random(seed)
    old, new = PAIRS[rng.choice(list(PAIRS))]
    inputs, table = Inputs(spark, tmp_path, rng), Table()
    for _ in range(3):
        inputs.add()
    run(inputs, old, tmp_path / "old", table, partitions=2)
    kills = 0
    while True:
        command = [sys.executable, "-c", KILLED, str(tmp_path), new]
        root = Path(__file__).resolve().parents[2]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root, start_new_session=True)
        assert child.stdout is not None
        assert child.stdout.readline() == "begins\n"
        if kills == 4:
            assert child.communicate()[0] == "done\n"
            break
        time.sleep(rng.uniform(0, 12))
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        kills += 1
        done = (tmp_path / "old" / "state" / "changed.json").exists()
        if done and not (tmp_path / "new" / "state" / "changing.json").exists():
            break
        if not done:
            run(inputs, old, tmp_path / "old", table, partitions=2)  # without new rows: it is as it was
            assert table.rows == inputs.result(old)
    whole, folder = Table(), tmp_path / "new"
    whole(spark.read.parquet(str(folder / "state" / "change" / "difference")), 0)  # of an empty sink: all rows
    assert whole.rows == inputs.result(new)
    inputs.add()
    run(inputs, new, folder, whole, partitions=2)
    assert whole.rows == inputs.result(new)
