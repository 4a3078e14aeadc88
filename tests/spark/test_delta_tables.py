"""Views in Delta tables that `deltalake` merges, for a Spark without Delta's jar.

Most tests hand the net change of a micro-batch to the table as it is, without Spark; in `tests/services` Delta's jar
folds the same changelogs.
"""

from __future__ import annotations

import datetime as dt
import decimal
import functools
import json
import re
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import types as spark_types

from gpu_ops import sinks
from gpu_ops.errors import BadInputError, DatabaseError, DescriptionError, NotBuiltError
from gpu_ops.spark.failures import package
from gpu_ops.spark.sinks import delta
from gpu_ops.spark.sinks.changes import COUNT, NetChanges
from gpu_ops.spark.sinks.delta_tables import InterferenceError, ViewTable
from gpu_ops.spark_types import arrow_schema
from gpu_ops.state.address import StateAddress
from spark.views import Checked, Shop, in_rows

deltalake = pytest.importorskip("deltalake")
pytestmark = pytest.mark.spark


def schema_of(**kinds: Any) -> spark_types.StructType:
    """Columns of types as Delta's log and Spark's JSON spell them."""
    fields = [{"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in kinds.items()]
    return spark_types.StructType.fromJson({"type": "struct", "fields": fields})


def struct(**kinds: Any) -> Any:
    return json.loads(schema_of(**kinds).json())


def array(of: Any) -> Any:
    return {"type": "array", "elementType": of, "containsNull": True}


UTC = dt.UTC
COLUMNS = schema_of(**{"the`id.x": "long", "day": "date", '%"S': "double"})
ITEM = schema_of(id="long", item="string")
DAYS = [None, dt.date(1, 1, 1), dt.date(2026, 1, 1), dt.date(9999, 12, 31)]
PRICES = [None, 0.0, -0.0, 1.5, float("nan"), float("inf")]


def changed(
    rows: list[tuple[Any, ...]],
    number: int,
    key: tuple[str, ...] | None,
    schema: spark_types.StructType = ITEM,
    query: str = "q",
) -> tuple[NetChanges, pa.Table]:
    """A micro-batch's net change, whose rows end in their count."""
    fields = arrow_schema(schema, "changes").append(pa.field(COUNT, pa.int64()))
    arrays = [pa.array([row[n] for row in rows], field.type) for n, field in enumerate(fields)]
    return NetChanges(None, schema, key, query, number, "changes", len(rows)), pa.table(arrays, schema=fields)


def view_table(path: Path, schema: spark_types.StructType = ITEM, *, keyed: bool = True) -> ViewTable:
    table = ViewTable("live", StateAddress.of(path))
    table.create(schema if keyed else spark_types.StructType([*schema, *schema_of(**{COUNT: "long"})]))
    return table


def stored(path: Path) -> list[tuple[Any, ...]]:
    rows = deltalake.DeltaTable(path).to_pyarrow_table().to_pylist()
    return [tuple(x.replace(tzinfo=UTC) if getattr(x, "tzinfo", None) else x for x in row.values()) for row in rows]


EXAMPLES = [4, pytest.param(100, marks=pytest.mark.slow)]


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("partitioned", [False, True])
def test_a_view_with_a_key_is_the_folded_table(tmp_path_factory: Any, partitioned: bool, examples: int) -> None:
    """Nulls in the key, -0.0, NaN, a null partition, each micro-batch given twice, the feed of the table's changes."""
    drawn = settings(max_examples=examples, deadline=None)(given(data=st.data())(keyed_changes))
    drawn(tmp_path_factory, partitioned)


def keyed_changes(tmp_path_factory: Any, partitioned: bool, data: Any) -> None:
    path = tmp_path_factory.mktemp("view")
    if partitioned:
        fields = deltalake.Schema.from_json(COLUMNS.json())
        feed = {"delta.enableChangeDataFeed": "true"}
        deltalake.DeltaTable.create(path, fields, partition_by="day", configuration=feed)
    view, table = view_table(path, COLUMNS), dict[Any, Any]()
    key = ("day", "the`id.x")
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
        changes, arrow = changed(rows, number, key, COLUMNS)
        for _ in range(2):
            view.merge(changes, arrow)
        found = [(day, number_of, price) for number_of, day, price in stored(path)]
        assert sorted(map(repr, found)) == sorted(repr((*at, price)) for at, price in table.items())
    if partitioned:
        folded = Counter[str]()
        for row in pa.table(deltalake.DeltaTable(path).load_cdf(1, allow_out_of_range=True)).to_pylist():
            sign = -1 if row["_change_type"] in ("delete", "update_preimage") else 1
            folded[repr((row["day"], row["the`id.x"], row['%"S']))] += sign
        assert sorted(folded.elements()) == sorted(repr((*at, price)) for at, price in table.items())
        assert min(folded.values(), default=0) >= 0


NESTED = schema_of(
    s=struct(a="integer", b="string"), l=array(struct(c="date")), f="float", d="double", t="timestamp",
    n="timestamp_ntz", m="decimal(38,18)", b="binary", y="byte", o="boolean", x="string",
)  # fmt: skip
VALUES: list[list[Any]] = [
    [None, {"a": 1, "b": None}, {"a": None, "b": "x"}],
    [None, [], [None], [{"c": None}], [{"c": dt.date(1582, 10, 10)}]],
    [None, 0.5, float("nan"), 0.0],
    [None, float("inf"), float("nan"), 0.0, -1e300],
    [None, dt.datetime(1, 1, 2, tzinfo=UTC), dt.datetime(9999, 12, 31, 23, 59, 59, 999999, UTC)],
    [None, dt.datetime(1, 1, 2), dt.datetime(9999, 12, 31, 23, 59, 59, 999999)],
    [None, decimal.Decimal("-" + "9" * 20 + "." + "9" * 18), decimal.Decimal("-0.5" + "0" * 17)],
    [None, b"", b"\xff\x00"],
    [None, 127, -128],
    [None, True, False],
    [None, "", "é🙂", "x" * 40, "a\x00"],
]


@pytest.mark.parametrize("examples", EXAMPLES)
def test_a_view_without_a_key_counts_its_rows(tmp_path_factory: Any, examples: int) -> None:
    """Rows are found by all their columns, of all types that Delta holds."""
    settings(max_examples=examples, deadline=None)(given(data=st.data())(counted_changes))(tmp_path_factory)


def counted_changes(tmp_path_factory: Any, data: Any) -> None:
    path = tmp_path_factory.mktemp("view")
    view, table = view_table(path, NESTED, keyed=False), Counter[str]()
    rows_drawn = data.draw(st.lists(st.tuples(*map(st.sampled_from, VALUES)), min_size=1, max_size=6))
    of = {repr(tuple(row)): row for row in rows_drawn}
    for number in range(4):
        counts = {text: data.draw(st.integers(-table[text], 2)) for text in of}
        table.update(counts)
        changes, arrow = changed([(*of[x], n) for x, n in counts.items() if n], number, None, NESTED)
        view.merge(changes, arrow)
        view.merge(changes, arrow)
        found = {repr(row[:-1]): row[-1] for row in stored(path)}
        assert found == {text: n for text, n in table.items() if n}


def test_zero_and_minus_zero_are_one_row_without_a_key(tmp_path: Path) -> None:
    both = schema_of(d="double", f="float")
    view = view_table(tmp_path, both, keyed=False)
    view.merge(*changed([(0.0, -0.0, 1)], 0, None, both))
    view.merge(*changed([(-0.0, 0.0, 2)], 1, None, both))
    assert stored(tmp_path) == [(0.0, 0.0, 3)]


def test_an_empty_text_is_no_partition(tmp_path: Path) -> None:
    """By Delta's protocol it is null, which the jar makes of it."""
    deltalake.DeltaTable.create(tmp_path, deltalake.Schema.from_json(ITEM.json()), partition_by="item")
    view = view_table(tmp_path)
    with pytest.raises(BadInputError, match="input 'changes', column 'item': view live has partitions by it"):
        view.merge(*changed([(1, "a", 1), (2, "", 1), (3, None, 1)], 0, ("id",)))
    view.merge(*changed([(1, "a", 1), (3, None, 1)], 0, ("id",)))
    assert sorted(stored(tmp_path)) == [(1, "a"), (3, None)]


def test_columns_that_the_changelog_lacks_are_left_alone(tmp_path: Path) -> None:
    fields = deltalake.Schema.from_json(schema_of(ID="long", note="string", item="string").json())
    deltalake.DeltaTable.create(tmp_path, fields)
    view = view_table(tmp_path)
    view.merge(*changed([(1, "a", 1), (2, "b", 1)], 0, ("id",)))
    deltalake.DeltaTable(tmp_path).update(updates={"note": "'kept'"}, predicate='"ID" = 1')
    view.merge(*changed([(1, "c", 2), (2, "b", -1), (3, "d", 1)], 1, ("id",)))
    assert sorted(stored(tmp_path)) == [(1, "kept", "c"), (3, None, "d")]


def test_beside_another_writer_and_another_run_of_the_query(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What came between is an error of the table's, repeated; a micro-batch of the same query is there once."""
    monkeypatch.setattr(delta, "_PAUSE_S", 0.001)
    views = [view_table(tmp_path) for _ in range(3)]
    seen: list[Exception] = []
    was_between = delta._came_between
    monkeypatch.setattr(delta, "_came_between", lambda error: seen.append(error) or was_between(error))

    def write(view: ViewTable, query: str, begin: int) -> None:
        for number in range(10):
            rows = [(begin + number, query, 1), *([(begin + number - 1, query, -1)] if number else [])]
            delta.repeated(functools.partial(view.merge, *changed(rows, number, ("id",), query=query)))

    threads = [
        threading.Thread(target=write, args=(view, query, begin))
        for view, query, begin in zip(views, ("a", "a", "b"), (0, 0, 100), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(stored(tmp_path)) == [(9, "a"), (109, "b")]
    assert seen
    assert all(isinstance(error, InterferenceError) for error in seen)


def altered(path: Path, **metadata: str) -> None:
    """A table whose first column has these in its metadata."""
    log = path / "_delta_log" / f"{0:020}.json"
    actions = [json.loads(line) for line in log.read_text().splitlines()]
    for action in actions:
        if "metaData" in action:
            schema = json.loads(action["metaData"]["schemaString"])
            schema["fields"][0]["metadata"] = metadata
            action["metaData"]["schemaString"] = json.dumps(schema)
    log.write_text("\n".join(map(json.dumps, actions)))


def test_what_deltalake_does_otherwise_than_spark_is_refused(tmp_path: Path) -> None:
    def refused(
        schema: spark_types.StructType,
        key: tuple[str, ...] | None = ("id",),
        made: spark_types.StructType = ITEM,
        **how: Any,
    ) -> str:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        view = view_table(path, made, keyed=key is not None)
        how.get("then", lambda _: None)(path)
        before = sorted(path.rglob("*"))
        with pytest.raises(DescriptionError) as raised:
            view.merge(*changed([], 0, key, schema))
        assert sorted(path.rglob("*")) == before
        return str(raised.value)

    assert (
        refused(schema_of(id="integer", item="string"))
        == "view live: its column 'id' is bigint, the changelog's is int: cast it"
    )
    assert "view live has no column 'more'; it has id, item" in refused(schema_of(id="long", more="integer"))
    deep = schema_of(id=struct(x=array("double")))
    assert "column 'id', which is struct<x:array<double>>, and deltalake does not compare" in refused(deep, made=deep)
    pairs = schema_of(id={"type": "map", "keyType": "string", "valueType": "integer", "valueContainsNull": True})
    assert "which is map<string,int>" in refused(pairs, None, pairs)
    for key, words in (
        ("CURRENT_DEFAULT", "column 'id' has a default, which deltalake does not do as Spark; start the session with"),
        ("delta.generationExpression", "column 'id' is generated"),
        ("__CHAR_VARCHAR_TYPE_STRING", "column 'id' is CHAR or VARCHAR"),
    ):
        assert words in refused(ITEM, then=lambda path, key=key: altered(path, **{key: "1"}))
    limit = {"positive": "id > 0"}
    said = refused(ITEM, then=lambda path: deltalake.DeltaTable(path).alter.add_constraint(limit))
    assert "the table has the constraint 'positive', which deltalake does not check as Spark" in said


def test_tables_that_cannot_be_made_or_written(tmp_path: Path) -> None:
    for schema, words in (
        (schema_of(**{"a b": "integer"}), "column 'a b': names have none of the characters"),
        (schema_of(s=struct(**{"a,b": "integer"})), "column 's': names have none"),
        (schema_of(i="interval day"), "Delta tables do not hold interval day: CAST it"),
        (schema_of(v=array("variant")), "do not hold variant"),
        (
            spark_types.StructType([*ITEM]).add("c", spark_types.StringType("UNICODE_CI")),
            "do not hold string collate UNICODE_CI",
        ),
    ):
        with pytest.raises(DescriptionError, match=re.escape(words)):
            view_table(tmp_path / "none", schema)
    assert not (tmp_path / "none").exists()
    with pytest.raises(NotBuiltError, match=r"view x: without Delta's jar delta_view\(\) writes to local folders and"):
        ViewTable("x", StateAddress.of("hdfs://h/x"))

    wider = {"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": ["typeWidening"],
                       "writerFeatures": ["typeWidening"]}}  # fmt: skip
    view = view_table(tmp_path / "wider")
    (tmp_path / "wider" / "_delta_log" / f"{1:020}.json").write_text(json.dumps(wider))
    with pytest.raises(
        DescriptionError, match="the table has the feature 'typeWidening', which is written by Delta's jar"
    ):
        view.merge(*changed([(1, "a", 1)], 0, ("id",)))

    fields = [("id", "long", False), ("item", "string", True), ("more", "string", False)]
    nonnull = [{"name": n, "type": kind, "nullable": null, "metadata": {}} for n, kind, null in fields]
    strict = tmp_path / "strict"
    text = json.dumps({"type": "struct", "fields": nonnull})
    deltalake.DeltaTable.create(strict, deltalake.Schema.from_json(text))
    with pytest.raises(DescriptionError, match="its column 'more' is NOT NULL, and the changelog has no such column"):
        view_table(strict).merge(*changed([(1, "a", 1)], 0, ("id",)))
    both = schema_of(id="long", more="string")
    with pytest.raises(DatabaseError, match=r"view live: .* 1 rows failed validation check"):
        view_table(strict).merge(*changed([(1, None, 1)], 0, ("id",), both))
    only = tmp_path / "only"
    fields = deltalake.Schema.from_json(ITEM.json())
    deltalake.DeltaTable.create(only, fields, configuration={"delta.appendOnly": "true"})
    view_table(only).merge(*changed([(1, "a", 1)], 0, ("id",)))
    with pytest.raises(DatabaseError, match=r"view live: .*append"):
        view_table(only).merge(*changed([(1, "b", 2)], 1, ("id",)))

    gone = view_table(tmp_path / "gone")
    (tmp_path / "gone" / "_delta_log" / f"{0:020}.json").unlink()
    with pytest.raises(DescriptionError, match="view live: its table is gone"):
        gone.merge(*changed([(1, "a", 1)], 1, ("id",)))


def changelog(spark: Any, *rows: tuple[Any, ...], schema: str = "id LONG, item STRING") -> Any:
    return spark.createDataFrame(list(rows), f"row_kind STRING, {schema}")


def test_a_view_without_the_jar(spark: Any, tmp_path: Path) -> None:
    """`delta_view` named a Maven artifact that does not exist; now it needs none."""
    path = str(tmp_path / "a table")
    kinds = "id LONG, t TIMESTAMP, m MAP<STRING, INT>, l ARRAY<STRUCT<x: TIMESTAMP>>"
    at = [dt.datetime(1582, 10, 10, 1), dt.datetime(9999, 12, 31, 1)]
    rows = [(1, at[0], {"a": 1}, [(at[1],)]), (2, None, None, None), (None, at[1], {}, [])]
    view = sinks.delta_view(path, "id")
    for _ in range(2):
        view(changelog(spark, *(("+I", *row) for row in rows), schema=kinds), 0)
    view(changelog(spark, ("-D", *rows[1]), ("-U", *rows[2]), ("+U", None, at[0], None, None), schema=kinds), 1)
    found = deltalake.DeltaTable(path).to_pyarrow_table()
    expected = spark.createDataFrame([rows[0], (None, at[0], None, None)], kinds).toArrow()
    named = [sorted(map(repr, table.cast(found.schema).to_pylist())) for table in (found, expected)]
    assert named[0] == named[1]
    with pytest.raises(DescriptionError, match="column 'm', which is map<string,int>, and deltalake does not compare"):
        sinks.delta_view(path + "2")(changelog(spark, schema=kinds), 0)
    with pytest.raises(DescriptionError, match=r"view .* was made with a key, and the changelog has no key"):
        sinks.delta_view(path)(changelog(spark, ("+I", *rows[1]), schema=kinds), 2)


@pytest.mark.thorough
@pytest.mark.parametrize("keyed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_join_kept_in_a_table_without_the_jar(spark: Any, tmp_path: Path, keyed: bool) -> None:
    shop, path = Shop(spark, tmp_path, "full", keyed=keyed), tmp_path / "view"
    view = sinks.delta_view(str(path), ["id", "item"] if keyed else None)

    def read() -> list[Any]:
        return in_rows(spark.createDataFrame(deltalake.DeltaTable(path).to_pyarrow_table()))

    checked = Checked(shop, view, read)
    for _ in range(3):
        shop.more(8)
    shop.run(checked)
    assert checked.batches == 3


def test_what_is_missing_is_said_when_the_view_is_made(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the first micro-batch, by 128 lines of Java's."""
    jar = (
        "Delta's jar, with which a session starts by\n  spark.jars.packages=io.delta:delta-spark_4.2_2.13:4.4.0\n"
        "  spark.sql.extensions=io.delta.sql.DeltaSparkSessionExtension\n"
        "  spark.sql.catalog.spark_catalog=org.apache.spark.sql.delta.catalog.DeltaCatalog"
    )
    monkeypatch.setattr(delta, "package", lambda name, _: package(name, "4.2.0"))
    with pytest.raises(NotBuiltError) as raised:
        sinks.delta_view("shop.live")
    said = "delta_view('shop.live'): a table is a path here, with a slash; its name takes "
    assert str(raised.value) == said + jar
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(NotBuiltError) as raised:
        sinks.delta_view("folder/table", "id")
    said = "view folder/table: without Delta's jar delta_view() needs the package deltalake: "
    said += "pip install 'gpu-join[delta]'; or "
    assert str(raised.value) == said + jar
    monkeypatch.setattr(delta, "package", lambda name, _: package(name, "4.3.0"))
    with pytest.raises(NotBuiltError, match=r"or Delta's jar: none is known for Spark .*; Spark 4.2 has one"):
        sinks.delta_view("folder/table", "id")
