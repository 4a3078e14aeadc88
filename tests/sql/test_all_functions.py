"""Each of Spark's functions where an expression stands: as Spark's batch over the same rows, or refused at its place.

The calls are in functions.json: ``rows`` those of a row, ``groups`` those of many, made of the examples in Spark's own
documentation. Many stand in one query, each on a line of its own, and what is refused is left out by its line.
"""

from __future__ import annotations

import datetime as dt
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

import gpu_ops
from gpu_ops.query.errors import SqlError
from gpu_ops.query.plan import plan
from gpu_ops.spark.api.query import _schema, _table
from gpu_ops.spark.api.streams import as_stream
from sql.tables import check_names

pytestmark = [pytest.mark.spark, pytest.mark.thorough]

CALLS: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("functions.json").read_text())
T = "k int, i int, d double, s string, y binary, ts timestamp"
ROWS = [
    (0, 1, 0.5, "Spark", None, dt.datetime(2024, 3, 10, 1, 30)),
    (1, 2, -1.5, "b,a", None, dt.datetime(2024, 11, 3, 1, 30)),
    (1, None, 2.0, None, None, dt.datetime(1970, 1, 1)),
    (-1, 7, None, "12", None, None),
]
WINDOWS = ("session_window", "window")
"""Of each there is one at most in a query."""
CONTEXTS = {
    "select": ("SELECT t.k", ",\n{} AS e{}", "\nFROM t JOIN u ON t.k = u.k"),
    "where": ("SELECT t.k, t.i FROM t JOIN u ON t.k = u.k WHERE t.k < 9", " AND\n(({}) IS NULL OR t.k > {} - 999)", ""),
    "on": ("SELECT t.k, u.w FROM t LEFT JOIN u ON t.k = u.k", " AND\n(({}) IS NOT NULL OR t.k > {} - 999)", ""),
    "group by": ("SELECT count(*) AS n FROM t GROUP BY t.k", ",\n{}", ""),
    "having": ("SELECT t.k, count(*) AS n FROM t GROUP BY t.k HAVING t.k < 9",
               " AND\n(({}) IS NOT NULL OR t.k > {} - 999)", ""),
    "aggregate": ("SELECT t.k", ",\n{} AS e{}", "\nFROM t GROUP BY t.k"),
    "aggregate in having": ("SELECT t.k, count(*) AS n FROM t GROUP BY t.k HAVING t.k < 9",
                            " AND\n(({}) IS NOT NULL OR t.k > {} - 999)", ""),
}  # fmt: skip


MOST = {"aggregate": 15, "aggregate in having": 15}
"""How many calls are taken at least."""


PIECE = 150
"""How many calls stand in one streaming query."""
FAILING = 12
"""How many calls at most Spark's own batch fails with."""
SLOW = tuple(CONTEXTS)
"""All of them, as each takes a minute on a machine that does other things besides."""


@pytest.fixture(scope="module")
def tables(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Streams of files, and the same rows as views; what cannot be cast is null."""
    ansi = spark.conf.get("spark.sql.ansi.enabled")
    spark.conf.set("spark.sql.ansi.enabled", "false")
    found = {}
    for name, schema, rows in (("t", T, ROWS), ("u", "k int, w bigint", [(0, 1), (1, 2), (1, 3), (-1, 4)])):
        folder = str(tmp_path_factory.mktemp(name) / "rows")
        spark.createDataFrame(rows, schema).coalesce(1).write.parquet(folder)
        spark.read.schema(schema).parquet(folder).createOrReplaceTempView(name)
        found[name] = spark.readStream.schema(schema).parquet(folder)
    yield found
    spark.conf.set("spark.sql.ansi.enabled", ansi)


class Walk:
    """Plans queries of many calls over the tables."""

    def __init__(self, spark: Any, tables: dict[str, Any]) -> None:
        self.spark = spark
        streams = {name: as_stream(df, name, name) for name, df in tables.items()}
        self.tables = {name: _table(name, side) for name, side in streams.items()}
        self.schemas = {name: _schema(side.df, self.tables[name]) for name, side in streams.items()}

    def query(self, context: str, calls: dict[str, str]) -> str:
        before, each, after = CONTEXTS[context]
        return before + "".join(each.format(call, n) for n, call in enumerate(calls.values())) + after

    def taken(self, context: str, calls: dict[str, str], most: int = 40) -> dict[str, str]:
        """The calls that are not refused; those that are, each at its own line."""
        calls, found = dict(calls), {}
        while calls:
            some = dict(list(calls.items())[:most])
            error = self.error(self.query(context, some))
            if error is None:
                found |= some
                refused = list(some)
            elif len(some) > 1 and error.line == 1:  # where Spark says no place
                assert "Spark does not take this" in error.message, error
                for name, call in some.items():
                    found |= self.taken(context, {name: call}, 1)
                refused = list(some)
            else:
                refused = [list(some)[0 if len(some) == 1 else error.line - 2]]
            calls = {name: call for name, call in calls.items() if name not in refused}
        return found

    def runnable(self, context: str, calls: dict[str, str], most: int = 40) -> dict[str, str]:
        """The calls that Spark's own batch does not fail with over these rows."""
        found: dict[str, str] = {}
        for start in range(0, len(calls), most):
            some = dict(list(calls.items())[start : start + most])
            try:
                self.spark.sql(self.query(context, some)).collect()
                found |= some
            except (PySparkException, Py4JJavaError):
                found |= self.runnable(context, some, len(some) // 2) if len(some) > 1 else {}
        return found

    def error(self, query: str) -> SqlError | None:
        """Why it is refused."""
        try:
            plan(query, self.tables, self.spark, schemas=self.schemas)
        except SqlError as error:
            check_names(error.message)
            return error
        return None


def test_all_of_them_are_here(spark: Any) -> None:
    if not spark.version.startswith("4.2"):
        pytest.skip("other versions of Spark have other functions")
    there = {row[0] for row in spark.sql("SHOW SYSTEM FUNCTIONS").collect()}
    assert there == CALLS["rows"].keys() | CALLS["groups"].keys()


Rows = Counter[tuple[str, ...]]
"""How often there is a row, its values as text."""


def streamed(spark: Any, changes: Any, folder: Path, name: str) -> Rows:
    query = changes.writeStream.format("memory").queryName(name).option("checkpointLocation", str(folder / name))
    query.trigger(availableNow=True).start().awaitTermination()
    rows = Rows()
    for kind, *row in spark.table(name).collect():
        rows[tuple(map(repr, row))] += 1 if kind in ("+I", "+U") else -1
    spark.catalog.dropTempView(name)
    return +rows


def differing(names: list[str], got: Rows, wanted: Rows) -> dict[str, Any]:
    """By the name of a column what is in it and what is not in it."""
    found = {}
    for number, name in enumerate(names):
        one, other = (Counter(row[number] for row in rows.elements()) for rows in (got, wanted))
        if one != other:
            found[name] = sorted((one - other).elements()), sorted((other - one).elements())
    return found


@pytest.mark.parametrize("context", [pytest.param(x, marks=[pytest.mark.slow] if x in SLOW else []) for x in CONTEXTS])
def test_right_or_refused_at_its_place(spark: Any, tables: dict[str, Any], tmp_path: Path, context: str) -> None:
    walk = Walk(spark, tables)
    given = {n: c for n, c in CALLS["groups" if context.startswith("agg") else "rows"].items() if n not in WINDOWS}
    if context == "having":
        given = {n: c for n, c in given.items() if not any(f"t.{column}" in c for column in ("i", "d", "s", "y", "ts"))}
    taken = walk.taken(context, given)
    calls = walk.runnable(context, taken)
    assert len(taken) - len(calls) <= FAILING, taken.keys() - calls.keys()
    assert len(calls) >= MOST.get(context, 250)
    # what stands beside a window is a column below it, and a variant is no column
    beside = [name for name in calls if "OVER (" in calls[name]]
    parts = [[name for name in calls if name not in beside], beside]
    pieces = [part[start : start + PIECE] for part in parts for start in range(0, len(part), PIECE)]
    for start, names_of_piece in enumerate(pieces):
        piece = {name: calls[name] for name in names_of_piece}
        query = walk.query(context, piece)
        wanted = Rows(tuple(map(repr, row)) for row in spark.sql(query).collect())
        named = {name: df for name, df in tables.items() if f" {name} " in query.replace("\n", " ") + " "}
        changes = gpu_ops.sql(query, state=str(tmp_path / f"state_{start}"), **named)
        got = streamed(spark, changes, tmp_path, f"of_{context.replace(' ', '_')}_{start}")
        columns = [column for column in changes.columns if column != "row_kind"]
        names = [*columns[: len(columns) - len(piece)], *piece] if "e0" in columns else columns
        assert got == wanted, differing(names, got, wanted)
