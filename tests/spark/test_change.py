"""A query that is changed: its result is that of the new query from scratch, right after the change and later on."""

from __future__ import annotations

import contextlib
import io
import os
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
from gpu_ops.jobs.job import Sink, load
from gpu_ops.spark.driver.pools import Pool
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

    @contextlib.contextmanager
    def more(self) -> Iterator[None]:
        """Context manager in which there are more rows."""
        files = {name: len(source.files) for name, source in self.sources.items()}
        orders, number = dict(self._orders), self._next
        self.add()
        yield
        self._orders, self._next = orders, number
        for name, count in files.items():
            self.sources[name].cut(count)

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
    return tuple((name, None if value is None else value if name == "item" else int(value))
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
    run_tables(inputs.tables(query), query, folder, table, **options)


def run_tables(tables: Mapping[str, Any], query: str, folder: Path, table: Table, **options: Any) -> None:
    changes = gpu_ops.sql(query, tables=tables, state=str(folder / "state"), **options)
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
    "a join above groups of which a name clashes": (
        GROUPED,
        f"SELECT o.id, g.item, g.n FROM orders o JOIN ({GROUPED}) g ON o.item = g.item AND o.amount <> g.price",
    ),
    "groups of which a name clashed": (
        f"SELECT o.id, g.n, g.price FROM orders o LEFT JOIN ({GROUPED}) g ON o.item = g.item",
        f"SELECT item, price FROM ({GROUPED}) WHERE n > 1",
    ),
    "two operators above groups of what only comes": (
        GROUPED,
        f"SELECT n, count(*) AS c FROM (SELECT g.n FROM refunds r JOIN ({GROUPED}) g ON r.refund = g.n) GROUP BY n",
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


def begun(spark: Any, folder: Path, what: str, partitions: int) -> tuple[Inputs, Table]:
    """The inputs of a pair of queries, and the table of the old one, which has run."""
    inputs, table = Inputs(spark, folder, random.Random(what)), Table()
    inputs.add()
    inputs.add()
    run(inputs, PAIRS[what][0], folder / "old", table, partitions=partitions)
    return inputs, table


@pytest.mark.parametrize("what", slow_but(PAIRS, "an aggregate above a join"))
def test_a_query_that_changes_keeps_its_state(
    spark: Any, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, release = list[int | None](), Pool.release

    def told(self: Pool, index: int, join_id: str, done: int | None = None) -> None:
        released.append(done)
        release(self, index, join_id, done)

    monkeypatch.setattr(Pool, "release", told)
    old, new = PAIRS[what]
    inputs, table = begun(spark, tmp_path, what, partitions=2)
    assert table.rows == inputs.result(old)
    inputs.add()  # the old query has not seen it
    changed = change(inputs, new, tmp_path / "old", tmp_path / "new", table, partitions=2)
    assert set(changed.reads_sources) == {name for name in SCHEMAS if name in new and name not in old}
    assert what != "an aggregate above a join" or {done for done in released if done is not None} == {1}
    for _ in range(2):
        run(inputs, new, tmp_path / "new", table, partitions=2)
        assert table.rows == inputs.result(new)
        inputs.add()


@pytest.mark.parametrize("what", slow_but(PAIRS, "two operators above groups of what only comes"))
def test_a_change_whose_sink_fails_goes_on(spark: Any, tmp_path: Path, what: str) -> None:
    """All states are there by then, and the queries are planned over them; sources go on where the first run stood."""
    new = PAIRS[what][1]
    inputs, table = begun(spark, tmp_path, what, partitions=2)

    class BrokenTable(Table):
        def __call__(self, rows: Any, number: int) -> None:
            raise RuntimeError("the sink is not there")

    with pytest.raises(RuntimeError, match="the sink is not there"):
        change(inputs, new, tmp_path / "old", tmp_path / "new", BrokenTable(), partitions=2)
    change(inputs, new, tmp_path / "old", tmp_path / "new", table, partitions=2)
    for _ in range(2):
        inputs.add()
        run(inputs, new, tmp_path / "new", table, partitions=2)
        assert table.rows == inputs.result(new)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["an aggregate above a join", "two operators above groups of what only comes"])
def test_an_operator_that_stays_keeps_its_partitions(spark: Any, tmp_path: Path, what: str) -> None:
    """Where none are asked for, operators beside it have as many as ever, and go on so after a restart."""
    old, new = PAIRS[what]
    inputs, table = begun(spark, tmp_path, what, partitions=1)
    change(inputs, new, tmp_path / "old", tmp_path / "new", table)
    for _ in range(3):
        run(inputs, new, tmp_path / "new", table)
        assert table.rows == inputs.result(new)
        inputs.add()
    if old == GROUPED:
        with pytest.raises(DescriptionError, match=r"partitions=3: an operator is taken over as it is, in 1 part"):
            change(inputs, f"{GROUPED} HAVING count(*) > 1", tmp_path / "new", tmp_path / "more", None, partitions=3)


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


def query_of_all(rng: random.Random) -> str:
    """A random query in which no join is left out, as it is where only distinct rows of an outer join's side count."""
    while True:
        query = random_query(rng)
        if "JOIN" not in query or ("DISTINCT" not in query and ("GROUP" not in query or re.search("count|sum", query))):
            return query


@pytest.fixture
def files_at_once(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """States are filled in one micro-batch, or in several, while those of operators that stay are there already."""
    monkeypatch.setattr("gpu_ops.spark.change.run._FILES_AT_ONCE", 1 + seed % 3)


@pytest.mark.slow
@pytest.mark.usefixtures("files_at_once")
@pytest.mark.parametrize("seed", range(100))
def test_random_changes(spark: Any, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    inputs, table = Inputs(spark, tmp_path, rng), Table()
    for _ in range(rng.randint(1, 3)):
        inputs.add()
    query, folder, emit = query_of_all(rng), tmp_path / "0", rng.choice(["per_batch", "per_event"])
    run(inputs, query, folder, table, partitions=rng.randint(1, 2), emit=emit)
    assert table.rows == inputs.result(query), query
    for number in range(1, 3):
        new, before = query_of_all(rng), folder
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
    refusal = r"price > 1 are not in the state\. So.*\(--read-again prices\)\. Else begin"
    with pytest.raises(DescriptionError, match=refusal):
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
    refusal = r"not in the state \(missing=\"null\", --missing null.*Else begin.*micro-batches to read again: 3"
    with pytest.raises(DescriptionError, match=refusal):
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
def test_a_change_that_is_refused_leaves_nothing(spark: Any, tmp_path: Path) -> None:
    """A static table is loaded when the new query is planned; refused, its new folder is as it was."""
    inputs, table = Inputs(spark, tmp_path, random.Random(14)), Table()
    inputs.add()
    prices = spark.createDataFrame([("x", 1), ("y", 2)], SCHEMAS["prices"])

    def tables(query: str) -> dict[str, Any]:
        return {**inputs.tables(query), "prices": prices}

    run_tables(tables(JOINED), f"SELECT o.id, p.price {JOINED}", tmp_path / "old", table)
    state = tmp_path / "new" / "state"
    options: dict[str, Any] = {
        "state": str(state), "checkpoint": str(tmp_path / "new" / "checkpoint"), "write": table,
        "old_state": str(tmp_path / "old" / "state"), "old_checkpoint": str(tmp_path / "old" / "checkpoint"),
    }  # fmt: skip
    query = f"SELECT o.id, o.amount, p.price {JOINED}"
    with pytest.raises(DescriptionError, match="column 'amount' is not in the state"):
        gpu_ops.change(query, tables=tables(query), **options)
    assert not state.exists()
    with pytest.raises(StateError, match="there is no checkpoint"):
        gpu_ops.change(query, tables=tables(query), read_again=["orders"], **{**options, "old_checkpoint": "nothing"})
    assert not state.exists()
    gpu_ops.change(query, tables=tables(query), read_again=["orders"], empty_sink=True, **options)
    assert (state / "static").exists()


@pytest.mark.slow
@pytest.mark.parametrize("write", [None, "table"])
def test_a_new_sink_gets_all_rows_of_what_is_as_it_was(spark: Any, tmp_path: Path, write: str | None) -> None:
    inputs, table = Inputs(spark, tmp_path, random.Random(15)), Table()
    inputs.add()
    run(inputs, WIDE, tmp_path / "old", table)
    fresh = Table()
    change(inputs, WIDE, tmp_path / "old", tmp_path / "new", fresh if write else None, empty_sink=True)
    assert fresh.rows == (inputs.result(WIDE) if write else Counter())
    whole = spark.read.parquet(str(tmp_path / "new" / "state" / "change" / "difference" / "0"))
    assert whole.count() == sum(table.rows.values())
    inputs.add()
    run(inputs, WIDE, tmp_path / "new", table)
    assert table.rows == inputs.result(WIDE)


@pytest.mark.slow
def test_the_old_result_may_be_unknown(spark: Any, tmp_path: Path) -> None:
    inputs, table = Inputs(spark, tmp_path, random.Random(10)), Table()
    inputs.add()
    query = f"SELECT o.id, p.price {JOINED}"
    folder, tables = tmp_path / "old", inputs.tables(query)
    tables["prices"] = stream(tables["prices"], ttl="1 day")
    run_tables(tables, query, folder, table)
    narrower = f"{query} WHERE o.id > 1"
    with pytest.raises(NotBuiltError, match="empty_sink=True"):
        change(inputs, narrower, folder, tmp_path / "new", table, read_again=["prices", "orders"])
    fresh = Table()
    said = change(inputs, narrower, folder, tmp_path / "new", fresh, read_again=["prices", "orders"], empty_sink=True)
    assert "a ttl=" in said.unknown
    assert fresh.rows == inputs.result(narrower)


@pytest.mark.slow
@pytest.mark.parametrize("was", [None, "1 day"])
@pytest.mark.parametrize("now", [None, "1 day", "1 hour"])
def test_a_ttl_and_when_changes_are_told_may_change(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, was: str | None, now: str | None
) -> None:
    """The state goes on as it is, and the sink gets nothing, whatever has been forgotten; then the new TTL counts."""
    inputs, table = Inputs(spark, tmp_path, random.Random(12)), Table()
    query = f"SELECT o.id, o.amount, p.price {LEFT}"

    def tables(ttl: str | None) -> dict[str, Any]:
        made = inputs.tables(query)
        return {**made, "prices": stream(made["prices"], ttl=ttl)} if ttl else made

    for _ in range(3):
        inputs.add()
    run_tables(tables(was), query, tmp_path / "old", table, emit="per_batch")
    before = Counter(table.rows)
    said = gpu_ops.change(
        query, tables=tables(now), state=str(tmp_path / "new" / "state"), checkpoint=str(tmp_path / "new/checkpoint"),
        old_state=str(tmp_path / "old" / "state"), old_checkpoint=str(tmp_path / "old" / "checkpoint"), write=table,
        emit="per_event",
    )  # fmt: skip
    assert [(one.becomes, one.why) for one in said.operators] == [("as it was", "its state is taken over")]
    assert [one.becomes for one in said.outputs] == ["as it was"]
    assert table.rows == before
    inputs.add()
    run_tables(tables(now), query, tmp_path / "new", table, emit="per_event")
    assert table.rows == inputs.result(query)
    with pytest.raises(StateError, match="it had emit"):
        run_tables(tables(now), query, tmp_path / "new", table, emit="per_batch")
    rows = gpu_ops.read_state(spark, str(tmp_path / "new" / "state"), input="p")
    assert ("_written" in rows.columns) == (now is not None)


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


JOB_TABLES = """
CREATE TABLE prices (item STRING, price INT) WITH ('connector' = 'json', 'path' = '{folder}/prices');
CREATE TABLE refunds (id INT, refund INT) WITH ('connector' = 'json', 'path' = '{folder}/refunds');
CREATE TABLE orders (op STRING, id INT, item STRING, amount INT, PRIMARY KEY (id) NOT ENFORCED)
WITH ('connector' = 'json', 'path' = '{folder}/orders', 'row_kind' = 'op', 'max_files_per_trigger' = '1');
"""


class Jobs:
    """Jobs of several views and INSERTs over the random inputs, and what their sinks have."""

    def __init__(self, spark: Any, folder: Path, seed: int | str) -> None:
        self.inputs, self.folder = Inputs(spark, folder, random.Random(seed)), folder
        self.console, self.sinks = Console(file=io.StringIO()), dict[str, Table]()

    def load(self, name: str, views: Mapping[str, str], inserts: Mapping[str, str], **settings: Any) -> Any:
        """A job; its sinks are made by ``CREATE TABLE ... 'delta'``, and taken by `Table` of the same name."""
        below = self.folder / name
        lines = [f"SET 'state' = '{below}/s'; SET 'checkpoint' = '{below}/c';"]
        lines += [f"SET '{key}' = '{value}';" for key, value in settings.items()]
        read = " ".join([*views.values(), *inserts.values()])
        tables = [x for x in JOB_TABLES.format(folder=self.folder).split(";") if x.strip()]
        lines += [f"{x};" for x in tables if f"{x.split()[2]} " in f"{read} " or f"{x.split()[2]})" in read]
        lines += [f"CREATE TABLE {sink} WITH ('connector' = 'blackhole');" for sink in inserts]
        lines += [f"CREATE VIEW {view} AS {query};" for view, query in views.items()]
        lines += [f"INSERT INTO {sink} {query};" for sink, query in inserts.items()]
        file = self.folder / f"{name}.sql"
        file.write_text("\n".join(lines))
        for sink in inserts:
            self.sinks.setdefault(sink, Table())
        return load(file)

    def check(self, views: Mapping[str, str], inserts: Mapping[str, str]) -> None:
        ctes = ", ".join(f"{view} AS ({query})" for view, query in views.items())
        for sink, query in inserts.items():
            text = f"WITH {ctes} {query}" if ctes else query
            assert self.sinks[sink].rows == self.inputs.result(text), (sink, text)

    def alter(self, views: Mapping[str, str], inserts: Mapping[str, str]) -> None:
        ctes = ", ".join(f"{view} AS ({query})" for view, query in views.items())
        for sink, query in inserts.items():
            self.sinks[sink].alter(columns_of(f"WITH {ctes} {query}" if ctes else query))


@pytest.fixture
def into_tables(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sinks of jobs are `Table`s, by the places in their files."""
    known = dict[int, Table]()

    def bound(jobs: Jobs, job: Any) -> Any:
        known.update({id(one.sink): jobs.sinks[one.name] for one in job.inserts})
        return job

    monkeypatch.setattr(Sink, "is_view", property(lambda _: True))
    monkeypatch.setattr("gpu_ops.jobs.tables.view", lambda sink: known[id(sink)])
    return bound


INNER = f"SELECT o.id, o.item, o.amount, p.price {JOINED}"
REFUNDED = "SELECT o.id, r.refund FROM orders o JOIN refunds r ON o.id = r.id"
BY_ITEM = "SELECT item, count(*) AS n FROM v GROUP BY item"
OVER_GROUPS = "SELECT r.id, g.n FROM refunds r JOIN g ON r.refund = g.n"
SUMS = {"a": "SELECT item, sum(price) AS price FROM v GROUP BY item", "b": "SELECT id, price FROM v"}
MORE = "SELECT id, refund, refund * 2 AS twice FROM refunds WHERE id > 0"
OF_VIEW = "FROM orders o JOIN v ON o.id = v.id"
JOB_PAIRS = {
    "a query added, and one dropped": (
        ({}, {"a": INNER, "b": REFUNDED}),
        ({}, {"a": INNER, "c": f"SELECT p.item, count(*) AS n {JOINED} GROUP BY p.item"}),
    ),
    "a view changed that two read": (
        ({"v": WIDE}, {"a": BY_ITEM, "b": "SELECT id, price FROM v"}),
        ({"v": INNER}, {"a": BY_ITEM, "b": "SELECT id, price FROM v WHERE amount > 3"}),
    ),
    "other queries over another view without operators": (
        ({"v": MORE}, {"a": f"SELECT o.id, o.amount, v.refund {OF_VIEW}", "b": f"SELECT o.item, v.id {OF_VIEW}"}),
        (
            {"v": f"{MORE} AND refund > 1"},
            {
                "a": f"SELECT o.id, v.twice {OF_VIEW} WHERE v.twice < 6",
                "c": f"SELECT v.twice, count(*) AS n {OF_VIEW} GROUP BY v.twice",
            },
        ),
    ),
    "another query over groups of what only comes": (
        ({"g": GROUPED}, {"a": "SELECT item, n FROM g", "b": OVER_GROUPS}),
        (
            {"g": GROUPED},
            {
                "a": "SELECT item, n FROM g WHERE n > 1",
                "c": "SELECT n, count(*) AS items FROM g GROUP BY n",
                "b": OVER_GROUPS,
            },
        ),
    ),
    "one query becomes two over a view": (
        ({}, {"a": f"SELECT o.item, sum(p.price) AS price {JOINED} GROUP BY o.item"}),
        ({"v": f"SELECT o.id, o.item, p.price {JOINED}"}, SUMS),
    ),
    "two queries become one": (({"v": INNER}, SUMS), ({}, {"b": f"SELECT o.id, p.price {JOINED}"})),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", JOB_PAIRS)
@pytest.mark.parametrize("partitions", [1, 2])
def test_a_job_of_several_queries_is_changed(
    spark: Any, tmp_path: Path, into_tables: Any, what: str, partitions: int
) -> None:
    """Each sink gets its own difference, and is right after each later micro-batch; undone, it has what it had."""
    old, new = JOB_PAIRS[what]
    jobs = Jobs(spark, tmp_path, what)
    jobs.inputs.add()
    jobs.inputs.add()
    before = into_tables(jobs, jobs.load("old", *old, partitions=partitions))
    runner.run(before, jobs.console, once=True)
    jobs.check(*old)
    jobs.inputs.add()
    after = into_tables(jobs, jobs.load("new", *new, partitions=partitions))
    folders = f"{tmp_path}/old/s", f"{tmp_path}/old/c"
    plan = changed.plan(after, jobs.console, folders[0], read_again=(), missing="refuse")
    assert not plan.reads_sources, plan
    jobs.alter(*new)
    changed.change(after, jobs.console, *folders, read_again=(), missing="refuse", empty_sink=False)
    for _ in range(2):
        runner.run(after, jobs.console, once=True)
        jobs.check(*new)
        jobs.inputs.add()
    again = {sink: query for sink, query in old[1].items() if sink in new[1]}
    jobs.alter(old[0], again)
    changed.undo(before, jobs.console)
    runner.run(before, jobs.console, once=True)
    jobs.check(*old)


@pytest.mark.slow
def test_a_filter_is_compared_by_what_it_computes(spark: Any, tmp_path: Path, into_tables: Any) -> None:
    """The same condition over a view's column that is computed otherwise leaves other rows."""
    jobs, view = Jobs(spark, tmp_path, 17), "SELECT id, refund, refund * {} AS more FROM refunds"
    inserts = {"a": f"SELECT o.id, v.refund, v.more {OF_VIEW} WHERE v.more > 3"}
    jobs.inputs.add()
    runner.run(into_tables(jobs, jobs.load("old", {"v": view.format(2)}, inserts)), jobs.console, once=True)

    def planned(name: str, views: Mapping[str, str], inserts: Mapping[str, str]) -> Any:
        job = into_tables(jobs, jobs.load(name, views, inserts))
        return changed.plan(job, jobs.console, f"{tmp_path}/old/s", read_again=(), missing="refuse")

    with pytest.raises(DescriptionError, match=r"rows that are not \(refund \* 2\) > 3 are not in the state"):
        planned("other", {"v": view.format(3)}, inserts)
    same = {"v": view.format(2).replace("more", "double")}
    plan = planned("same", same, {"a": inserts["a"].replace("v.more", "v.double") + " AND v.double < 6"})
    assert not plan.reads_sources


def test_a_view_is_read_by_an_operator_and_by_what_only_spark_computes(
    spark: Any, tmp_path: Path, into_tables: Any
) -> None:
    """From 4.1 on Spark may give one task the partitions of all parts of a union, and with them an operator twice."""
    jobs = Jobs(spark, tmp_path, 13)
    queries = {
        "a": "SELECT id, sha2(item, 256) AS item FROM v UNION ALL SELECT id, 'all' AS item FROM v",
        "b": "SELECT v.id, v.price, r.refund FROM v LEFT JOIN refunds r ON v.id = r.id",
    }
    job = into_tables(jobs, jobs.load("job", {"v": WIDE}, queries, partitions=2))
    jobs.inputs.add()
    runner.run(job, jobs.console, once=True)
    jobs.check({"v": WIDE}, {"b": queries["b"]})
    ids = Counter(dict(row)["id"] for row in jobs.inputs.result(WIDE).elements())
    assert Counter(dict(row)["id"] for row in jobs.sinks["a"].rows.elements()) == ids + ids


def random_job(rng: random.Random, before: Any = None) -> tuple[dict[str, str], dict[str, str]]:
    """Views and INSERTs; of a job before, some stay as they were."""
    of_orders = "SELECT o.id, w.refund, w.twice FROM orders o {} w ON o.id = w.id"
    over = {
        "v": [
            BY_ITEM,
            "SELECT id, price FROM v",
            "SELECT item, max(amount) AS most FROM v WHERE amount < 8 GROUP BY item",
            "SELECT v.id, v.price, r.refund FROM v LEFT JOIN refunds r ON v.id = r.id",
        ],
        "w": [
            of_orders.format("JOIN"),
            f"{of_orders.format('LEFT JOIN')} AND w.twice < 5",
            "SELECT o.item, count(*) AS n, sum(w.refund) AS refund FROM orders o JOIN w ON o.id = w.id GROUP BY o.item",
        ],
    }
    views = {}
    if rng.random() < 0.6:
        views["v"] = rng.choice([WIDE, INNER, f"{WIDE} WHERE o.amount > 2"])
    if rng.random() < 0.4:
        views["w"] = rng.choice([MORE, f"{MORE} AND refund > 1", "SELECT id, refund, refund + 1 AS twice FROM refunds"])
    if before is not None:
        views |= {name: view for name, view in before[0].items() if rng.random() < 0.6}
    inserts = {}
    for name in sorted(rng.sample("abcd", rng.randint(1, 3))):
        was = None if before is None else before[1].get(name)
        if was is not None and _views_in(was) <= views.keys() and rng.random() < 0.5:
            inserts[name] = was
        else:
            inserts[name] = (
                rng.choice(over[rng.choice(list(views))]) if views and rng.random() < 0.6 else query_of_all(rng)
            )
    read = set().union(*map(_views_in, inserts.values()))
    return {name: view for name, view in views.items() if name in read}, inserts


def _views_in(query: str) -> set[str]:
    return set(re.findall(r"(?:FROM|JOIN) ([vw])\b", query))


@pytest.mark.slow
@pytest.mark.usefixtures("files_at_once")
@pytest.mark.parametrize("seed", range(int(os.environ.get("GPU_JOIN_JOBS", "10"))))
def test_random_changes_of_jobs(spark: Any, tmp_path: Path, into_tables: Any, seed: int) -> None:
    rng = random.Random(f"jobs {seed}")
    jobs = Jobs(spark, tmp_path, seed)
    settings = {"emit": rng.choice(["per_batch", "per_event"])}
    before = random_job(rng)
    for _ in range(rng.randint(1, 3)):
        jobs.inputs.add()
    job = into_tables(jobs, jobs.load("0", *before, partitions=rng.randint(1, 2), **settings))
    runner.run(job, jobs.console, once=True)
    jobs.check(*before)
    for number in range(1, 3):
        now, folders = random_job(rng, before), (f"{tmp_path}/{number - 1}/s", f"{tmp_path}/{number - 1}/c")
        if rng.random() < 0.5:
            jobs.inputs.add()
        alone = len(now[1]) == len(before[1]) == 1  # then it is the same sink, whatever it is called
        stay = zip(now[1], before[1], strict=True) if alone else ((name, name) for name in now[1].keys() & before[1])
        jobs.sinks = {name: jobs.sinks[was] for name, was in stay}
        job = into_tables(jobs, jobs.load(str(number), *now, partitions=rng.randint(1, 2), **settings))
        jobs.alter(*now)
        for again in ((), [name for name in SCHEMAS if any(source.name == name for source in job.sources)]):
            try:
                changed.change(job, jobs.console, *folders, read_again=again, missing="refuse", empty_sink=False)
                break
            except DescriptionError:  # the state lacks something; the sources have everything
                assert not again
        for _ in range(2):
            runner.run(job, jobs.console, once=True)
            jobs.check(*now)
            jobs.inputs.add()
        runner.run(job, jobs.console, once=True)
        before = now


@pytest.mark.slow
@pytest.mark.parametrize("above", ["", "JOIN names n ON n.id = o.id"], ids=["alone", "in one engine"])
def test_a_join_by_time_goes_on_as_it_is(spark: Any, tmp_path: Path, above: str) -> None:
    """A change of how changes are told takes over its watermark, too: rows that wait for their time get it."""
    sources = {name: Source(spark, tmp_path / name, f"id INT, {name} TIMESTAMP") for name in ("ordered", "paid")}
    names = Source(spark, tmp_path / "names", "id INT, name STRING")
    names.add(*({"id": number, "name": f"n{number}"} for number in range(40)))
    query = f"""SELECT o.id, o.ordered, p.paid FROM orders o LEFT JOIN payments p
        ON o.id = p.id AND p.paid BETWEEN o.ordered AND o.ordered + INTERVAL 10 MINUTES {above}"""

    def tables() -> dict[str, Any]:
        return ({"names": names.df} if above else {}) | {
            "orders": stream(sources["ordered"].df, event_time="ordered", delay="1 minute"),
            "payments": stream(sources["paid"].df, event_time="paid", delay="1 minute"),
        }

    def add(number: int) -> None:
        sources["ordered"].add({"id": number, "ordered": f"2026-01-01T00:{number:02}:00Z"})
        paid = {"id": number if number % 2 else -number, "paid": f"2026-01-01T00:{number:02}:30Z"}
        sources["paid"].add(paid)

    tables_seen = {name: list[Any]() for name in ("changed", "whole")}

    def into(name: str) -> Any:
        return lambda rows, _: tables_seen[name].extend(sorted(map(str, rows.collect())))

    def run_into(name: str, folder: Path, emit: str) -> None:
        changes = gpu_ops.sql(query, tables=tables(), state=str(folder / "state"), emit=emit)
        writer = changes.writeStream.foreachBatch(into(name)).option("checkpointLocation", str(folder / "checkpoint"))
        writer.trigger(availableNow=True).start().awaitTermination()

    for number in range(1, 5):
        add(number)
        run_into("changed", tmp_path / "old", "per_batch")
        run_into("whole", tmp_path / "whole", "per_batch")
    if above:
        assert sorted(x.name for x in (tmp_path / "old/state").iterdir() if x.name.isdigit()) == ["2"]
    said = gpu_ops.change(
        query, tables=tables(), state=str(tmp_path / "new/state"), checkpoint=str(tmp_path / "new/checkpoint"),
        old_state=str(tmp_path / "old/state"), old_checkpoint=str(tmp_path / "old/checkpoint"),
        write=into("changed"), emit="per_event",
    )  # fmt: skip
    assert [one.becomes for one in said.outputs] == ["as it was"]
    for number in range(5, 30, 4):
        add(number)
        run_into("changed", tmp_path / "new", "per_event")
        run_into("whole", tmp_path / "whole", "per_batch")
    assert tables_seen["changed"] == tables_seen["whole"]
    assert any("paid=None" in row for row in tables_seen["whole"])


@pytest.mark.slow
def test_a_table_that_an_operator_makes_is_read_again(spark: Any, tmp_path: Path) -> None:
    """As a job's with ``'unavailable' = 'keep'`` is: the operator has a state of its own, below that of the query."""
    inputs, table = Inputs(spark, tmp_path, random.Random(16)), Table()
    inputs.add()
    inputs.add()

    def tables(folder: Path) -> dict[str, Any]:
        made = inputs.tables(JOINED)
        kept = gpu_ops.latest(made["orders"], state=str(folder / "state" / "latest"))
        return {**made, "orders": stream(kept, unique_key="id")}

    old, new = (tmp_path / name for name in ("old", "new"))
    run_tables(tables(old), INNER, old, table)
    assert table.rows == inputs.result(INNER)
    inputs.add()
    options: dict[str, Any] = {
        "state": str(new / "state"), "checkpoint": str(new / "checkpoint"), "old_state": str(old / "state"),
        "old_checkpoint": str(old / "checkpoint"), "write": table,
    }  # fmt: skip
    query = f"{INNER} WHERE o.amount > 2"
    with pytest.raises(DescriptionError, match=r"'orders': an operator outside of the query.*read_again=\['orders'\]"):
        gpu_ops.change(query, tables=tables(new), **options)
    gpu_ops.change(query, tables=tables(new), read_again=["orders"], **options)
    for _ in range(2):
        run_tables(tables(new), query, new, table)
        assert table.rows == inputs.result(query)
        inputs.add()
