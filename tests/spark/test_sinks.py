"""Views: the net change of a micro-batch, memory and JDBC (Derby, which Spark brings), keys, replays, errors."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gpu_ops import sinks
from gpu_ops.conditions import backquoted
from gpu_ops.errors import BadInputError, DescriptionError, StateError
from gpu_ops.spark.sinks.changes import key_of, net
from gpu_ops.spark.sinks.jdbc import _beside
from spark.support import fold
from spark.views import COLUMNS, Checked, Shop, in_rows

pytestmark = pytest.mark.spark

DERBY = {"createTableColumnTypes": "item VARCHAR(20)"}


def changelog(spark: Any, *rows: tuple[Any, ...], schema: str = "id long, item string") -> Any:
    return spark.createDataFrame(list(rows), f"row_kind string, {schema}")


def derby(spark: Any, url: str, table: str = "shop") -> list[tuple[Any, ...]]:
    return in_rows(spark.read.format("jdbc").options(url=url, dbtable=table).load())


def test_net_is_a_difference_of_multisets_in_whatever_order(spark: Any) -> None:
    choice = random.Random(7)
    kinds = ("+I", "-U", "+U", "-D", "bad", "late")
    values = (0.0, -0.0, float("nan"), 1.5, None)
    rows = [(choice.choice(kinds), choice.randrange(3), choice.choice(values)) for _ in range(300)]
    expected: Counter[tuple[int, str]] = Counter()
    for kind, key, value in rows:
        sign = {"+": 1, "-": -1}.get(kind[0], 0)
        expected[key, "0.0" if value == 0 else str(value)] += sign
    found = net(changelog(spark, *rows, schema="id int, `a.b` double")).collect()
    assert {(key, str(value)): count for key, value, count in found} == {x: n for x, n in expected.items() if n}


@pytest.mark.parametrize(
    ("how", "emit"), [("left", "per_batch"), pytest.param("full", "per_event", marks=pytest.mark.slow)]
)
def test_a_view_in_memory_is_right_after_every_micro_batch(spark: Any, tmp_path: Path, how: str, emit: str) -> None:
    shop = Shop(spark, tmp_path, how, keyed=how == "left", emit=emit)
    view = sinks.memory_view("shop_view")
    checked = Checked(shop, view, lambda: in_rows(view.table))
    for _ in range(2):  # the query ends and goes on
        for _ in range(2):
            shop.more()
        shop.run(checked)
    assert checked.batches == 4
    assert sorted(in_rows(spark.table("shop_view")), key=repr) == shop.expected()


@pytest.mark.thorough
def test_a_view_in_memory_does_not_begin_in_the_middle(spark: Any) -> None:
    with pytest.raises(StateError, match="would begin at micro-batch 3"):
        sinks.memory_view("middle")(changelog(spark, ("+I", 1, "a")), 3)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("how", "keyed", "key"),
    [
        pytest.param("inner", True, None, marks=pytest.mark.slow),
        ("full", True, ["id", "item"]),
        pytest.param("full", False, None, marks=pytest.mark.slow),
    ],
)
def test_a_view_in_a_database_is_right_after_every_micro_batch(
    spark: Any, tmp_path: Path, how: str, keyed: bool, key: Any
) -> None:
    url = f"jdbc:derby:memory:{tmp_path.name};create=true"
    shop = Shop(spark, tmp_path, how, keyed=keyed, emit="per_batch" if how == "inner" else "per_event")
    checked = Checked(shop, sinks.jdbc_view(url, "shop", key), lambda: derby(spark, url))
    for _ in range(3):
        shop.more()
    shop.run(checked)
    assert checked.batches == 3
    columns = spark.read.format("jdbc").options(url=url, dbtable="shop").load().columns
    assert columns == (COLUMNS if keyed else [*COLUMNS, "gpu_ops_count"])


@pytest.mark.thorough
def test_the_key_is_that_of_the_changelog_or_what_is_declared(spark: Any, tmp_path: Path) -> None:
    shop = Shop(spark, tmp_path, "inner")
    assert key_of(shop.changes, None) == ("id", "item")
    assert key_of(shop.changes.drop("id"), None) is None
    assert key_of(shop.changes, ["ID", "price"]) == ("id", "price")
    with pytest.raises(DescriptionError, match="key='of' is no column of the changelog; there are row_kind, item"):
        key_of(shop.changes, "of")


@pytest.mark.thorough
def test_a_key_that_is_not_unique_is_an_error_before_anything_is_written(spark: Any) -> None:
    url = "jdbc:derby:memory:unique;create=true"
    view = sinks.jdbc_view(url, "shop", key="id", options=DERBY)
    schema = "item string, id long, quantity int, price double"
    view(changelog(spark, ("+I", "a", 1, 2, 1.5), schema=schema), 0)
    twice = changelog(spark, ("-D", "a", 1, 2, 1.5), ("+I", "b", 1, 2, 1.5), ("+I", "c", 1, 3, 1.5), schema=schema)
    with pytest.raises(BadInputError, match=r"column 'id': the view's key is not unique \(for example .*1, "):
        view(twice, 1)
    assert derby(spark, url) == [("a", 1, 2, 1.5)]


def test_a_repeated_micro_batch_is_written_once(spark: Any) -> None:
    url = "jdbc:derby:memory:again;create=true"
    schema = "item string, id long, quantity int, price double"
    first = changelog(spark, ("+I", "a", 1, 2, 1.5), ("+I", "a", 1, 2, 1.5), schema=schema)
    for _ in range(2):
        view = sinks.jdbc_view(url, "shop", options=DERBY)  # as after a restart
        view(first, 0)
        assert derby(spark, url) == [("a", 1, 2, 1.5)] * 2
    view(first, 1)
    assert derby(spark, url) == [("a", 1, 2, 1.5)] * 4


@pytest.mark.thorough
def test_a_view_with_other_columns_is_refused(spark: Any) -> None:
    url = "jdbc:derby:memory:other;create=true"
    sinks.jdbc_view(url, "v", key="id", options=DERBY)(changelog(spark, ("+I", 1, "a")), 0)
    wider = changelog(spark, ("+I", 1, "a", 2), schema="id long, item string, quantity int")
    with pytest.raises(DescriptionError, match="view v has no column 'quantity'; it has id, item"):
        sinks.jdbc_view(url, "v", key="id", options=DERBY)(wider, 1)
    with pytest.raises(DescriptionError, match="view v was made with a key, and the changelog has no key"):
        sinks.jdbc_view(url, "v", options=DERBY)(changelog(spark, ("+I", 1, "a")), 1)


def test_what_is_no_changelog_is_refused(spark: Any) -> None:
    with pytest.raises(DescriptionError, match="takes a changelog with its column 'row_kind'; got id"):
        net(spark.range(1))
    with pytest.raises(DescriptionError, match="rename the changelog's"):
        net(changelog(spark, ("+I", 1), schema="gpu_ops_count long"))
    with pytest.raises(DescriptionError, match="an upsert topic needs a key; none is known of this changelog"):
        sinks.kafka_upsert("localhost:1", "topic")(changelog(spark, ("+I", 1, "a")), 0)


@pytest.mark.thorough
def test_columns_that_differ_by_upper_case(spark: Any) -> None:
    """Right where Spark tells them apart, refused where it does not; the key is the one that was named."""
    schema = "s long, S string, gpu int"
    rows = [("+I", 1, "a", 1), ("+I", 1, "b", 2)]
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        both = changelog(spark, *rows, schema=schema)
        assert key_of(both, ["s"]) == ("s",)
        assert key_of(both, ["S"]) == ("S",)
        with pytest.raises(DescriptionError, match="key='GPU' is no column"):
            key_of(both, ["GPU"])
        view = sinks.memory_view("cases")
        view(both, 0)
        assert sorted(map(tuple, view.table.collect())) == [(1, "a", 1), (1, "b", 2)]
    finally:
        spark.conf.unset("spark.sql.caseSensitive")
    with pytest.raises(DescriptionError, match="one column of a name; the changelog has 's' and 'S'"):
        net(both)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["a.b", "ü `q` %", "Upper", "with space"])
def test_a_view_in_memory_has_any_name(spark: Any, name: str) -> None:
    view = sinks.memory_view(name)
    view(changelog(spark, ("+I", 1, "a")), 0)
    assert [tuple(row) for row in view.table.collect()] == [(1, "a")]
    assert spark.table(backquoted(name)).count() == 1


@pytest.mark.parametrize(
    ("table", "kept"),
    [
        ("shop", "shop_staged"), ("a.shop", "a.shop_staged"),
        ('"a.b"', '"a.b_staged"'), ('"a"."b""c"', '"a"."b""c_staged"'),
        ("[a b]", "[a b_staged]"), ("`a``b`", "`a``b_staged`"), ("x" * 56, "x" * 56 + "_staged"),
    ],
)  # fmt: skip
def test_names_of_tables_beside_a_view(table: str, kept: str) -> None:
    assert _beside(table, "_staged", 63)[0] == kept


def test_long_names_of_tables_beside_a_view_fit_and_differ() -> None:
    choice, found = random.Random(5), {}
    for _ in range(3000):
        plain = "".join(choice.choices('aä€𝄞 ".%`[]X', k=choice.randint(1, 60)))
        for suffix in ("_staged", "_batches", "_key"):
            _, name = _beside('"' + plain.replace('"', '""') + '"', suffix, 63)
            inside = name[1:-1]
            assert inside.count('"') == 2 * inside.count('""') or '"""' in inside
            assert len(inside.replace('""', '"').encode()) <= 63
            assert found.setdefault(name, (plain, suffix)) == (plain, suffix)


@pytest.mark.thorough
def test_columns_of_every_type_that_can_be_grouped(spark: Any) -> None:
    schema = "s struct<a: int, b: array<string>>, d decimal(38, 2), b binary, m map<string, int>"
    view = sinks.memory_view("types")
    row = ({"a": 1, "b": ["x", None]}, None, b"\0", {"x": 1})
    try:
        view(changelog(spark, ("+I", *row), ("+I", *row), ("-D", *row), schema=schema), 0)
    except DescriptionError as error:
        assert "Spark cannot group these" in str(error)  # noqa: PT017
    else:
        assert fold(("+I", *map(str, r)) for r in view.table.collect()) == [
            ("Row(a=1, b=['x', None])", "None", str(view.table.first()[2]), "{'x': 1}")
        ]
