"""``spark.readStream.changes("t")`` as an input without options, on the catalog that Spark itself tests it with.

It passes on PySpark 4.3.0, too (2026-11-28), in an environment of its own and with the catalog of 4.2, as Maven has
none of 4.3 yet.
"""

from __future__ import annotations

import datetime as dt
import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from spark.support import Sink, drain, fold

import gpu_ops
from gpu_ops import stream
from gpu_ops.errors import DescriptionError

pytestmark = pytest.mark.spark

SEED = int(os.environ.get("GPU_JOIN_SEED", "7"))
ROUNDS = int(os.environ.get("GPU_JOIN_ROUNDS", "1"))

CATALOG = "org.apache.spark.sql.connector.catalog.InMemoryChangelogCatalog"
COLUMNS = "id BIGINT, v STRING, x DOUBLE"
FEED = f"{COLUMNS}, _change_type STRING, _commit_version BIGINT, _commit_timestamp TIMESTAMP"

Row = tuple[int | None, str | None, float | None]
Change = tuple[Row, str, int]


class Table:
    """A table of the in-memory catalog, whose changes are what a test says they are."""

    def __init__(self, spark: Any, name: str) -> None:
        self._spark, self.name = spark, f"cdc.db.{name}"
        spark.sql(f"CREATE TABLE {self.name} ({COLUMNS})")
        gateway = spark.sparkContext._gateway
        place = gateway.new_array(gateway.jvm.java.lang.String, 1)
        place[0] = "db"
        self._catalog = spark._jsparkSession.sessionState().catalogManager().catalog("cdc")
        self._identifier = gateway.jvm.org.apache.spark.sql.connector.catalog.Identifier.of(place, name)
        self._version, self.rows = 0, list[Row]()

    @property
    def df(self) -> Any:
        return self._spark.readStream.changes(self.name)

    def add(self, changes: Sequence[Change]) -> None:
        """Adds changes to the feed, in this order."""
        rows = [(*row, kind, at, dt.datetime(2026, 1, 1) + dt.timedelta(seconds=at)) for row, kind, at in changes]
        made = self._spark.createDataFrame(rows, FEED).coalesce(1)
        internal = made._jdf.queryExecution().executedPlan().executeCollect()
        sequence = self._spark._jvm.scala.collection.immutable.ArraySeq.unsafeWrapArray(internal)
        self._catalog.addChangeRows(self._identifier, sequence)

    def commit(self, rng: random.Random) -> list[Change]:
        """A commit as a connector may write it: updates as images or as pairs, files rewritten, in any order."""
        self._version += 1
        changes = list[tuple[Row, str]]()
        for row in list(self.rows):
            what = rng.random()
            if what < 0.2:
                self.rows.remove(row)
                changes.append((row, "delete"))
            elif what < 0.4:
                new = (row[0], rng.choice("abc"), row[2])
                self.rows.remove(row)
                self.rows.append(new)
                images = ("update_preimage", "update_postimage") if rng.random() < 0.5 else ("delete", "insert")
                changes += [(row, images[0]), (new, images[1])]
            elif what < 0.6:  # a row that stays, in a file that is written again
                changes += [(row, "insert"), (row, "delete")]
        for _ in range(rng.randrange(4)):
            new = (rng.choice([1, 2, 3, None]), rng.choice(["a", "b", None]), rng.choice([0.5, float("inf"), None]))
            self.rows.append(new)
            changes.append((new, "insert"))
        rng.shuffle(changes)
        return [(row, kind, self._version) for row, kind in changes]


@pytest.fixture(scope="module")
def catalog(spark: Any) -> Iterator[Any]:
    """The session with the catalog."""
    spark.conf.set("spark.sql.catalog.cdc", CATALOG)
    yield spark
    spark.conf.unset("spark.sql.catalog.cdc")


def test_changes_in_any_order_are_taken_in_that_of_their_commits(catalog: Any, tmp_path: Path) -> None:
    """A micro-batch with several commits, whose rows come in any order, and rows that were written again."""
    rng = random.Random(SEED)
    for number in range(3 * ROUNDS):
        table, other = Table(catalog, f"any_{SEED}_{number}"), Table(catalog, f"other_{SEED}_{number}")
        sink, batches = Sink(), 4
        for _ in range(batches):
            for one in (table, other):
                changes = [change for _ in range(rng.randrange(1, 4)) for change in one.commit(rng)]
                rng.shuffle(changes)
                one.add(changes)
            options = {"state": str(tmp_path / str(number)), "partitions": 2, "suffixes": ("", "_r")}
            joined = gpu_ops.join(table.df, other.df, "id", "full", **options)
            drain(joined, sink, tmp_path / f"{number}_checkpoint")
            assert sink.table == expected(table.rows, other.rows), (SEED, number)


def expected(left: Sequence[Row], right: Sequence[Row]) -> list[Any]:
    """A full join by id."""
    pairs = [(a, b) for a in left for b in right if a[0] is not None and a[0] == b[0]]
    met = Counter(a for a, _ in pairs), Counter(b for _, b in pairs)
    rows = [(a[0], *a[1:], *b[1:]) for a, b in pairs]
    rows += [(a[0], *a[1:], None, None) for a in left if not met[0][a]]
    rows += [(b[0], None, None, *b[1:]) for b in right if not met[1][b]]
    return sorted(rows, key=repr)


def test_with_a_key_in_sql_and_in_a_static_read(catalog: Any, tmp_path: Path) -> None:
    table = Table(catalog, f"keyed_{SEED}")
    one, other = (1, "a", None), (1, "b", None)
    table.add(
        [(other, "update_postimage", 2), (one, "update_preimage", 2), (one, "insert", 1), ((2, "x", 1.5), "insert", 2)]
    )
    sink = Sink()
    query = "SELECT v, count(*) AS n FROM t GROUP BY v"
    changes = gpu_ops.sql(query, t=stream(table.df, unique_key="id"), state=str(tmp_path / "state"))
    drain(changes, sink, tmp_path / "checkpoint")
    assert sink.table == [("b", 1), ("x", 1)]
    static = gpu_ops.sql(query, t=catalog.read.option("startingVersion", "1").changes(table.name))
    assert fold(tuple(row) for row in static.collect()) == [("b", 1), ("x", 1)]


def test_what_is_left_of_it(catalog: Any, tmp_path: Path) -> None:
    table = Table(catalog, f"parts_{SEED}")
    with pytest.raises(DescriptionError, match=r"_change_type and no _commit_version.*leave the column in"):
        gpu_ops.latest(table.df.drop("_commit_version"), "id")
    state = str(tmp_path / "state")
    inserted = table.df.where("_change_type = 'insert'").select("id", "v")
    assert gpu_ops.latest(inserted, "id", state=state).columns == ["row_kind", "id", "v"]
    some = table.df.where("id > 1").select("id", "_change_type", "_commit_version")
    assert gpu_ops.aggregate(some, "id", {"n": "count(*)"}, state=state).columns == ["row_kind", "id", "n"]
