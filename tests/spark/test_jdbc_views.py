"""Views in a database, Derby: rows that a task has staged twice, columns of others, and the text of statements."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from conftest import slow_but

from gpu_ops import sinks
from gpu_ops.errors import BadInputError, DatabaseError
from gpu_ops.spark.database import Connection
from gpu_ops.spark.sinks.jdbc import _Database
from gpu_ops.spark.sinks.merging import Merge
from gpu_ops.spark.tasks.marks import Marks
from spark.test_sinks import DERBY, changelog

pytestmark = pytest.mark.spark


def rows(spark: Any, url: str) -> list[tuple[Any, ...]]:
    return sorted(map(tuple, spark.read.format("jdbc").options(url=url, dbtable="v").load().collect()), key=repr)


@pytest.mark.parametrize("key", ["id", pytest.param(None, marks=pytest.mark.slow)])
def test_rows_of_an_attempt_that_does_not_count_are_left_out(
    spark: Any, monkeypatch: pytest.MonkeyPatch, key: Any
) -> None:
    """Each task of the staging is run twice, as where an answer is lost; the next micro-batch finds none of it."""
    url = f"jdbc:derby:memory:attempts{key};create=true"
    view = sinks.jdbc_view(url, "v", key, options=DERBY)
    stage = _Database.stage

    def twice(database: _Database, marks: Marks) -> None:
        stage(database, marks)
        stage(database, marks)

    monkeypatch.setattr(_Database, "stage", twice)
    view(changelog(spark, ("+I", 1, "a"), ("+I", 2, "b"), ("+I", None, "n")), 0)
    view(changelog(spark, ("-U", 1, "a"), ("+U", 1, "c"), ("-D", None, "n"), ("+I", 3, "d")), 1)
    count = () if key else (1,)
    assert rows(spark, url) == [(1, "c", *count), (2, "b", *count), (3, "d", *count)]


@pytest.mark.thorough
def test_staged_rows_that_are_not_all_there_are_an_error(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    url = "jdbc:derby:memory:fewer;create=true"
    view = sinks.jdbc_view(url, "v", "id", options=DERBY)
    view(changelog(spark, ("+I", 1, "a")), 0)
    counted = Marks.counted
    monkeypatch.setattr(Marks, "counted", lambda marks: {mark: n + 1 for mark, n in counted(marks).items()})
    with pytest.raises(DatabaseError, match=r"view v: 2 rows were written into v_staged, and 1 are there"):
        view(changelog(spark, ("+I", 2, "b")), 1)
    assert rows(spark, url) == [(1, "a")]


@pytest.mark.slow
def test_attempts_that_the_driver_was_not_told_of_are_an_error(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark only logs an accumulator's update that fails: of one task, or of all."""
    url = "jdbc:derby:memory:untold;create=true"
    view, counted = sinks.jdbc_view(url, "v", "id", options=DERBY), Marks.counted
    view(changelog(spark, ("+I", 1, "a")), 0)
    batch = changelog(spark, *(("+I", n, "b") for n in range(2, 12)))
    for kept in (0, -1):
        monkeypatch.setattr(Marks, "counted", lambda marks, kept=kept: dict([*counted(marks).items()][:kept]))
        with pytest.raises(DatabaseError, match=r"view v: 10 rows change, and the driver was told of \d "):
            view(batch, 1)
        assert rows(spark, url) == [(1, "a")]
    monkeypatch.undo()
    view(batch, 1)
    assert len(rows(spark, url)) == 11


@pytest.mark.thorough
def test_columns_of_others_stay_and_rows_of_others_are_noticed(spark: Any) -> None:
    url = "jdbc:derby:memory:columns;create=true"
    database = Connection(spark, url, {}, "table v")
    database.execute('CREATE TABLE v ("id" BIGINT, "item" VARCHAR(20), note VARCHAR(20) DEFAULT \'new\')')
    view = sinks.jdbc_view(url, "v", "id", options=DERBY)
    view(changelog(spark), 0)  # may have no row
    view(changelog(spark, ("+I", 1, "a"), ("+I", None, "b")), 1)
    database.execute("UPDATE v SET note = 'by hand'")
    view(changelog(spark, ("-U", 1, "a"), ("+U", 1, "c"), ("-U", None, "b"), ("+U", None, "d"), ("+I", 2, "e")), 2)
    assert rows(spark, url) == [(1, "c", "by hand"), (2, "e", "new"), (None, "d", "by hand")]
    database.execute('DELETE FROM v WHERE "id" = 2')
    with pytest.raises(DatabaseError, match=r"view v: 1 rows were to be changed, and 0 were .*no row of the key 2\)"):
        view(changelog(spark, ("-U", 2, "e"), ("+U", 2, "f"), ("-D", 1, "c")), 3)
    assert rows(spark, url) == [(1, "c", "by hand"), (None, "d", "by hand")]
    database.close()


@pytest.mark.parametrize("case", slow_but(["key", "others", "no key"], "key"))
def test_a_text_that_the_database_holds_for_another_is_an_error(spark: Any, case: str) -> None:
    """By a collation that ignores case, or as blanks at the end do not count; the row of the other key stays."""
    name = case.replace(" ", "")
    url = f"jdbc:derby:memory:folds{name};create=true;territory=en_US;collation=TERRITORY_BASED:SECONDARY"
    key, count = (None, (1,)) if case == "no key" else ("item", ())
    if case == "others":
        database = Connection(spark, url, {}, "table v")
        database.execute('CREATE TABLE v ("id" BIGINT, "item" VARCHAR(20), note VARCHAR(20))')
        database.close()
        count = (None,)
    view = sinks.jdbc_view(url, "v", key, options=DERBY)
    view(changelog(spark, ("+I", 1, "A"), ("+I", 2, "b")), 0)
    for text in ("a", "A "):
        with pytest.raises(BadInputError, match=rf"column '.*item': .*equal to 'A', which view v has .*'{text}'"):
            view(changelog(spark, ("+I", 1, text), ("+I", 3, "c")), 1)
        assert rows(spark, url) == [(1, "A", *count), (2, "b", *count)]
    view(changelog(spark, ("-D", 1, "A"), ("+I", 1, "d")), 1)
    assert rows(spark, url) == [(1, "d", *count), (2, "b", *count)]
    view = sinks.jdbc_view(url, "v", key, options=DERBY)  # a row of the same key that is there is no error
    if key:
        view(changelog(spark, ("+I", 7, "d")), 2)
        assert rows(spark, url) == [(2, "b", *count), (7, "d", *count)]


def merge(**changes: Any) -> Merge:
    names = {x: x for x in "abcd"}
    given: dict[str, Any] = {
        "table": "v", "rows": "(SELECT 1)", "staged": names, "kept": names, "key": tuple("abcd"), "count": "n",
        "total": "t", "postgres": True, "others": False, "nulls": ["0000"], "texts": [], **changes,
    }  # fmt: skip
    return Merge(**given)


def test_nulls_are_compared_so_that_an_index_or_a_hash_can_answer() -> None:
    plain, half = merge(nulls=["0000", "0011"], staged={x: f"s{x}" for x in "abcd"}).matches()
    assert plain == " AND ".join(f"v.{x} = gpu_ops_staged.s{x}" for x in "abcd")
    null = "v.{0} IS NULL AND gpu_ops_staged.s{0} IS NULL"
    assert half == " AND ".join([*plain.split(" AND ")[:2], *map(null.format, "cd")])
    many = ["".join(x) for x in itertools.product("01", "01", "01", "01")][:9]  # a is null in the last
    arrays = "ARRAY[v.{0}] = ARRAY[gpu_ops_staged.{0}] AND (v.{0} IS NULL) = (gpu_ops_staged.{0} IS NULL)"
    assert merge(nulls=many).matches() == [" AND ".join(map(arrays.format, "abcd"))]
    assert merge(key=None, nulls=["0010"]).matches() == [
        f"v.a = gpu_ops_staged.a AND v.b = gpu_ops_staged.b AND {arrays.format('c')} AND v.d = gpu_ops_staged.d"
    ]
    either = "(v.c = gpu_ops_staged.c OR (v.c IS NULL AND gpu_ops_staged.c IS NULL))"
    assert either in merge(key=None, nulls=["0010"], postgres=False).matches()[0]
