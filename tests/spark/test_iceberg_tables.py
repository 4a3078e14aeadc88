"""Views in Iceberg tables, which `pyiceberg` writes and reads; the catalog is a file of SQLite."""

from __future__ import annotations

import datetime as dt
import decimal
import functools
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import types as spark_types
from rich.console import Console

from gpu_ops import sinks
from gpu_ops.errors import BadInputError, DatabaseError, DescriptionError
from gpu_ops.jobs import runner
from gpu_ops.jobs.job import load
from gpu_ops.spark.sinks import delta
from gpu_ops.spark.sinks.changes import COUNT
from gpu_ops.spark.sinks.delta_tables import InterferenceError
from gpu_ops.spark.sinks.iceberg import _IcebergTable
from gpu_ops.spark.sources.iceberg import read_iceberg
from spark.support import Sink, drain
from spark.test_delta_tables import (
    COLUMNS,
    DAYS,
    EXAMPLES,
    ITEM,
    NESTED,
    PRICES,
    UTC,
    VALUES,
    array,
    changed,
    schema_of,
    struct,
)  # fmt: skip
from spark.views import COLUMNS as OF_SHOP
from spark.views import Checked, Shop

pyiceberg = pytest.importorskip("pyiceberg")
pytest.importorskip("pyiceberg.catalog.sql")
partitioning = pytest.importorskip("pyiceberg.partitioning")
transforms = pytest.importorskip("pyiceberg.transforms")
types = pytest.importorskip("pyiceberg.types")
pytestmark = pytest.mark.spark


def loaded(catalog: Catalog) -> Any:
    """The catalog by its own package."""
    return pyiceberg.catalog.load_catalog(**{"name": "default", **catalog.properties})


class Catalog:
    """A catalog of its own in a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.properties = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}"}

    def view(self, schema: spark_types.StructType = ITEM, *, keyed: bool = True) -> _IcebergTable:
        table = _IcebergTable("shop.live", self.properties)
        table.create(schema if keyed else spark_types.StructType([*schema, *schema_of(**{COUNT: "long"})]))
        return table

    @property
    def table(self) -> Any:
        return loaded(self).load_table("shop.live")

    def partition(self, *fields: Any) -> None:
        """Makes the table anew, with partitions."""
        catalog = loaded(self)
        schema = self.table.schema()
        catalog.drop_table("shop.live")
        catalog.create_table("shop.live", schema, partition_spec=partitioning.PartitionSpec(*fields))

    def rows(self) -> list[tuple[Any, ...]]:
        rows = self.table.scan().to_arrow().to_pylist()
        return [tuple(x.replace(tzinfo=UTC) if getattr(x, "tzinfo", None) else x for x in row.values()) for row in rows]


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("partitioned", [False, True])
def test_a_view_with_a_key_is_the_folded_table(tmp_path_factory: Any, partitioned: bool, examples: int) -> None:
    """Nulls in the key, -0.0, NaN, partitions by a null, each micro-batch given twice; each snapshot is right."""
    settings(max_examples=examples, deadline=None)(given(data=st.data())(keyed_changes))(tmp_path_factory, partitioned)


def keyed_changes(tmp_path_factory: Any, partitioned: bool, data: Any) -> None:
    catalog = Catalog(tmp_path_factory.mktemp("view"))
    view, table = catalog.view(COLUMNS), dict[Any, Any]()
    if partitioned:
        fields = (
            partitioning.PartitionField(2, 1000, transforms.IdentityTransform(), "day"),
            partitioning.PartitionField(2, 1001, transforms.YearTransform(), "year"),
        )
        catalog.partition(fields[data.draw(st.integers(0, 1))])
    then = list[list[str]]()
    for number in range(data.draw(st.integers(1, 5))):
        keys = st.tuples(st.sampled_from(DAYS), st.sampled_from([None, 1, 2, 3]))
        rows = []
        for changed_key in data.draw(st.lists(keys, unique=True, max_size=8)):
            day, number_of = changed_key
            if changed_key in table and data.draw(st.booleans()):
                rows.append((number_of, day, table.pop(changed_key), -1))
            else:
                price = data.draw(st.sampled_from(PRICES))
                rows.append((number_of, day, price, 2 if changed_key in table else 1))
                table[changed_key] = price
        for _ in range(2):
            view.merge(*changed(rows, number, ("day", "the`id.x"), COLUMNS))
        found = [(day, number_of, price) for number_of, day, price in catalog.rows()]
        then.append(sorted(repr((*at, price)) for at, price in table.items()))
        assert sorted(map(repr, found)) == then[-1]
    snapshots = catalog.table.snapshots()
    assert [snapshot.summary.additional_properties["gpu_ops.batch"] for snapshot in snapshots] == [
        str(number) for number in range(len(then))
    ]
    for snapshot, expected in zip(snapshots, then, strict=True):
        rows = catalog.table.scan(snapshot_id=snapshot.snapshot_id).to_arrow().to_pylist()
        assert sorted(repr((r["day"], r["the`id.x"], r['%"S'])) for r in rows) == expected


FLAT = spark_types.StructType([field for field in NESTED if field.name not in ("s", "l")])


@pytest.mark.parametrize("examples", EXAMPLES)
def test_a_view_without_a_key_counts_its_rows(tmp_path_factory: Any, examples: int) -> None:
    """Rows are found by all their columns, of all types that are compared."""
    settings(max_examples=examples, deadline=None)(given(data=st.data())(counted_changes))(tmp_path_factory)


def counted_changes(tmp_path_factory: Any, data: Any) -> None:
    catalog = Catalog(tmp_path_factory.mktemp("view"))
    view, table = catalog.view(FLAT, keyed=False), Counter[str]()
    rows_drawn = data.draw(st.lists(st.tuples(*map(st.sampled_from, VALUES[2:])), min_size=1, max_size=6))
    of = {repr(tuple(row)): row for row in rows_drawn}
    for number in range(4):
        counts = {text: data.draw(st.integers(-table[text], 2)) for text in of}
        table.update(counts)
        changes, arrow = changed([(*of[x], n) for x, n in counts.items() if n], number, None, FLAT)
        view.merge(changes, arrow)
        view.merge(changes, arrow)
        assert {repr(row[:-1]): row[-1] for row in catalog.rows()} == {text: n for text, n in table.items() if n}


DEEP: dict[str, list[Any]] = {
    "s": [None, {"a": 1, "b": None}, {"a": None, "b": [1, None]}, {"a": None, "b": []}],
    "l": [None, [], [None], [1, None, 2]],
    "ll": [None, [], [None], [[], None, [1]]],
    "m": [None, [], [("a", 1), ("b", None)]],
    "ml": [None, [], [("a", None), ("b", []), ("c", [None, "x"])]],
}


def test_nested_values_come_back_as_they_were(tmp_path: Path) -> None:
    """Through two rewrites of their file by updates of other rows; null is not empty, at any depth."""
    catalog = Catalog(tmp_path)
    pairs = {"type": "map", "keyType": "string", "valueType": "integer", "valueContainsNull": True}
    schema = schema_of(
        id="long", s=struct(a="integer", b=array("integer")), l=array("integer"), ll=array(array("integer")), m=pairs,
        ml={**pairs, "valueType": array("string")},
    )  # fmt: skip
    rows = [(n, *(values[n % len(values)] for values in DEEP.values())) for n in range(12)]
    view = catalog.view(schema)
    view.merge(*changed([(*row, 1) for row in rows], 0, ("id",), schema))
    for number in (1, 2):
        view.merge(*changed([(99, None, None, None, None, None, number)], number, ("id",), schema))
        view.merge(*changed([(0, *rows[number][1:], 2)], 2 + number, ("id",), schema))
    expected = [(0, *rows[2][1:]), *rows[1:], (99, None, None, None, None, None)]
    assert [repr(row) for row in sorted(catalog.rows(), key=lambda row: row[0])] == [repr(row) for row in expected]


def test_only_files_that_hold_a_changed_row_are_written_anew(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    view = catalog.view()
    for number in range(4):
        view.merge(*changed([(10 * number + n, "a", 1) for n in range(5)], number, ("id",)))
    before = {task.file.file_path for task in catalog.table.scan().plan_files()}
    view.merge(*changed([(12, "b", 2), (33, "a", -1), (99, "c", -1)], 4, ("id",)))
    after = {task.file.file_path for task in catalog.table.scan().plan_files()}
    assert len(before & after) == 2
    assert len(after - before) == 1
    kept = [(10 * number + n, "a") for number in range(4) for n in range(5)]
    assert sorted(catalog.rows()) == sorted([*(row for row in kept if row[0] not in (12, 33)), (12, "b")])


def test_columns_that_the_changelog_lacks_are_left_alone(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    view = catalog.view(schema_of(ID="long", note="string", item="string"))
    catalog.table.append(pa.table({"ID": [1, 2], "note": ["kept", "gone"], "item": ["a", "b"]}))
    view.merge(*changed([(1, "c", 2), (2, "b", -1), (3, "d", 1)], 0, ("id",)))
    assert sorted(catalog.rows()) == [(1, "kept", "c"), (3, None, "d")]


def test_beside_another_writer_and_another_run_of_the_query(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What came between is repeated upon what is there then; a micro-batch of the same query is there once."""
    monkeypatch.setattr(delta, "_PAUSE_S", 0.001)
    catalog, seen = Catalog(tmp_path), list[Exception]()
    views = [catalog.view() for _ in range(3)]
    was_between = delta._came_between
    monkeypatch.setattr(delta, "_came_between", lambda error: seen.append(error) or was_between(error))
    monkeypatch.setattr(delta, "_TRIES", 100)

    def write(view: _IcebergTable, query: str, begin: int) -> None:
        for number in range(6):
            rows = [(begin + number, query, 1), *([(begin + number - 1, query, -1)] if number else [])]
            delta.repeated(functools.partial(view.merge, *changed(rows, number, ("id",), query=query)))

    def append() -> None:
        for number in range(3):
            delta.repeated(functools.partial(appended, number))

    def appended(number: int) -> None:
        try:
            catalog.table.append(pa.table({"id": [1000 + number], "item": ["other"]}))
        except pyiceberg.exceptions.CommitFailedException as error:
            raise InterferenceError(str(error)) from error

    threads = [
        threading.Thread(target=write, args=(view, query, begin))
        for view, query, begin in zip(views, ("a", "a", "b"), (0, 0, 100), strict=True)
    ]
    for thread in (*threads, threading.Thread(target=append)):
        thread.start()
        threads = [*threads, thread]
    for thread in threads:
        thread.join()
    others = [(1000 + number, "other") for number in range(3)]
    assert sorted(catalog.rows()) == [(5, "a"), (105, "b"), *others]
    assert seen
    assert all(isinstance(error, InterferenceError) for error in seen)


def test_another_writers_row_of_the_same_key_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes between the reading of the table and the commit, where pyiceberg's own repetition would keep both."""
    catalog = Catalog(tmp_path)
    view = catalog.view()
    view.merge(*changed([(1, "a", 1)], 0, ("id",)))
    written, came = view._written, list[int]()

    def between(table: Any, rows: pa.Table) -> Any:
        files = list(written(table, rows))
        if not came:
            came.append(1)
            catalog.table.append(pa.table({"id": [2], "item": ["other"]}))
        return files

    monkeypatch.setattr(view, "_written", between)
    delta.repeated(functools.partial(view.merge, *changed([(2, "b", 1)], 1, ("id",))))
    assert sorted(catalog.rows()) == [(1, "a"), (2, "b")]


def test_files_of_many_partitions_are_found_by_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They share what pyiceberg chooses manifests by, and looked at each other's partitions: files were missed."""
    visitors = pytest.importorskip("pyiceberg.expressions.visitors")
    catalog = Catalog(tmp_path)
    catalog.view()
    catalog.partition(partitioning.PartitionField(1, 1000, transforms.IdentityTransform(), "id"))
    view = catalog.view()
    for number in range(8):
        view.merge(*changed([(number, "a", 1)], number, ("id",)))
    visit = visitors.visit

    def slow(expression: Any, visitor: Any) -> Any:
        if isinstance(visitor, visitors._ManifestEvalVisitor):
            time.sleep(0.01)
        return visit(expression, visitor)

    monkeypatch.setattr(visitors, "visit", slow)
    view.merge(*changed([(7, "b", 2)], 8, ("id",)))
    assert sorted(catalog.rows()) == [*((number, "a") for number in range(7)), (7, "b")]


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DescriptionError, match=r"name begins with its namespace: shop\.live"):
        _IcebergTable("live", Catalog(tmp_path).properties)
    with pytest.raises(DatabaseError, match=r"view a\.b: .*NOWHERE"):
        _IcebergTable("a.b", "nowhere")
    catalog = Catalog(tmp_path)
    for schema, words in (
        (schema_of(i="interval day"), "Iceberg tables do not hold interval day: CAST it"),
        (schema_of(v=array("variant")), "do not hold array<variant>"),
        (schema_of(v=array(struct(x="integer"))), "pyiceberg takes a null list or map of structs for an empty one"),
    ):
        with pytest.raises(DescriptionError, match=words):
            catalog.view(schema)
    view = catalog.view()
    before = catalog.table.metadata
    for schema, key, words in (
        (schema_of(id="integer", item="string"), ("id",), "column 'id' is int64, the changelog's is int32: cast it"),
        (schema_of(id="long", more="integer"), ("id",), r"view shop\.live has no column 'more'"),
        (ITEM, None, "was made with a key, and the changelog has no key"),
    ):
        with pytest.raises(DescriptionError, match=words):
            view.merge(*changed([], 0, key, schema))
    other = Catalog(tmp_path / "nested")
    deep = schema_of(id=array("long"))
    with pytest.raises(DescriptionError, match="rows are found by column 'id', which is array<bigint>"):
        other.view(deep).merge(*changed([], 0, ("id",), deep))
    assert catalog.table.metadata == before
    loaded(catalog).drop_table("shop.live")
    with pytest.raises(DescriptionError, match=r"view shop\.live: its table is gone"):
        view.merge(*changed([(1, "a", 1)], 1, ("id",)))


@pytest.mark.slow  # CI writes tables in the job below
@pytest.mark.parametrize("keyed", [True, False])
def test_through_spark_with_restarts(spark: Any, tmp_path: Path, keyed: bool) -> None:
    """A join's changelog with and without a key, the last micro-batch repeated; the days of two calendars."""
    catalog = Catalog(tmp_path / "shop")
    shop = Shop(spark, tmp_path / "files", "full", keyed=keyed, seed=3)

    def read(catalog: Catalog = catalog) -> list[Any]:
        rows = catalog.table.scan().to_arrow().to_pylist()
        return [tuple(row[x] for x in OF_SHOP) for row in rows for _ in range(row.get(COUNT, 1))]

    for _ in range(2):
        checked = Checked(shop, sinks.iceberg_view("shop.live", catalog=catalog.properties), read)
        shop.more()
        shop.more()
        shop.run(checked)
        assert checked.batches
    catalog = Catalog(tmp_path / "lake")
    at = [dt.datetime(1582, 10, 10, 1), dt.datetime(9999, 12, 31, 1)]
    rows = [("+I", 1, at[0], {"a": 1}), ("+I", 2, None, None), ("+I", None, at[1], {})]
    changes = spark.createDataFrame(rows, "row_kind STRING, id LONG, t TIMESTAMP, m MAP<STRING, INT>")
    view = sinks.iceberg_view("shop.live", "id", catalog=catalog.properties)
    for _ in range(2):
        view(changes, 0)
    view(changes.where("id = 2").selectExpr("'-D' AS row_kind", "id", "t", "m"), 1)
    found = {row["id"]: row for row in catalog.table.scan().to_arrow().to_pylist()}
    assert {x: (row["t"].replace(tzinfo=None), dict(row["m"])) for x, row in found.items()} == {
        1: (at[0], {"a": 1}),
        None: (at[1], {}),
    }
    twice = spark.createDataFrame([("+I", 7, None, None), ("+I", 7, at[0], None)], changes.schema)
    with pytest.raises(BadInputError, match="the view's key is not unique"):
        view(twice, 2)


@pytest.mark.thorough
def test_a_job_from_iceberg_to_iceberg(spark: Any, tmp_path: Path) -> None:
    """Two runs of a file; the catalog's properties are in it."""
    catalog, job = Catalog(tmp_path / "lake"), tmp_path / "shop.sql"
    named = ", ".join(f"'catalog.{name}' = '{value}'" for name, value in catalog.properties.items())
    sold = pa.table({"id": [1, 2], "item": ["pen", "book"]})
    orders = loaded(catalog).create_namespace("shop") or loaded(catalog).create_table("shop.orders", sold.schema)
    job.write_text(
        f"CREATE TABLE orders (item STRING) WITH ('connector' = 'iceberg', 'table' = 'shop.orders', {named});\n"
        f"CREATE TABLE live (item STRING, sold BIGINT, PRIMARY KEY (item) NOT ENFORCED) "
        f"WITH ('connector' = 'iceberg', 'table' = 'shop.live', {named});\n"
        "SET state = 'state'; SET checkpoint = 'checkpoint';\n"
        "INSERT INTO live SELECT item, count(*) FROM orders GROUP BY item;"
    )
    orders.append(sold)
    runner.run(load(job), Console(quiet=True), once=True)
    assert sorted(catalog.rows()) == [("book", 1), ("pen", 1)]
    orders.append(sold.slice(1))
    runner.run(load(job), Console(quiet=True), once=True)
    assert sorted(catalog.rows()) == [("book", 2), ("pen", 1)]
    job.write_text(job.read_text().replace("'table' = 'shop.live'", "'tables' = 'shop.live'"))
    with pytest.raises(DescriptionError, match=r"iceberg has no option 'tables'.*catalog\.NAME for the catalog's own"):
        load(job)


@pytest.mark.slow  # CI reads appends in the job above
def test_rows_appended_are_a_stream(spark: Any, tmp_path: Path) -> None:
    """What is there at first, then each append, over restarts; rows in other files are passed over."""
    catalog = Catalog(tmp_path / "lake")
    catalog.view(schema_of(id="long", at="timestamp", t="timestamp_ntz", m="decimal(38,2)", l=array("string")))
    at, when = dt.datetime(1, 1, 2, tzinfo=UTC), dt.datetime(9999, 12, 31)
    sink, appended = Sink(), list[tuple[Any, ...]]()

    def append(*ids: int) -> None:
        rows = [(n, at, when, decimal.Decimal(n), [None, "x"] if n % 2 else None) for n in ids]
        columns = [list(column) for column in zip(*rows, strict=True)]
        schema = catalog.table.schema().as_arrow()
        arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
        catalog.table.append(pa.Table.from_arrays(arrays, schema=schema))
        appended.extend(rows)

    def read() -> None:
        orders = read_iceberg(spark, "shop.live", catalog=catalog.properties, max_snapshots_per_trigger=1)
        drain(orders, sink, tmp_path / "checkpoint")
        found = [(n, t.astimezone(UTC), w, m, v) for n, t, w, m, v in sink.changes]
        assert sorted(found) == sorted(appended)

    read()
    append(1, 2)
    append(3)
    read()
    batches = len(sink.batches)
    append(4)
    append(5, 6)
    read()
    assert len(sink.batches) == batches + 2
    read()
    with pytest.raises(DescriptionError, match=r"there is no Iceberg table shop\.none"):
        read_iceberg(spark, "shop.none", catalog=catalog.properties)
    orders = read_iceberg(spark, "shop.live", catalog=catalog.properties).select("m", "id")
    with catalog.table.update_schema() as change:
        change.add_column("vat", types.DoubleType())
    schema = catalog.table.schema().as_arrow()
    catalog.table.append(pa.Table.from_pylist([{"id": 7, "m": decimal.Decimal(7), "vat": 0.5}], schema=schema))
    for number, again in enumerate((orders, read_iceberg(spark, "shop.live", catalog=catalog.properties))):
        found = Sink()  # the table got a column when the first one was there already
        drain(again.select("m", "id"), found, tmp_path / f"wider{number}")
        assert sorted(found.changes)[-1] == (decimal.Decimal(7), 7)
        assert len(found.changes) == len(appended) + 1
    with catalog.table.update_schema(allow_incompatible_changes=True) as change:
        change.delete_column("m")
    with pytest.raises(Exception, match=r"column 'm': it was dropped or renamed while the query runs"):
        drain(orders, Sink(), tmp_path / "dropped")
    catalog.table.delete("id = 1")
    with pytest.raises(Exception, match=r"stream of appended rows, and snapshot [0-9]+ changes or deletes some"):
        read()
