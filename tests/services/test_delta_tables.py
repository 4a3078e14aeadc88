"""Views in Delta tables that `deltalake` merges, held against those of Delta's jar, and beside it in one table.

`GPU_JOIN_DELTA_VIEWS` is a range of seeds, "0:6" by default.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpu_ops import sinks
from gpu_ops.errors import DescriptionError
from gpu_ops.spark.sinks import delta

deltalake = pytest.importorskip("deltalake")
pytestmark = [pytest.mark.spark, pytest.mark.services]

SEEDS = range(*map(int, os.environ.get("GPU_JOIN_DELTA_VIEWS", "0:6").split(":")))
View = Callable[[Any, int], None]
COLUMNS = {
    "id": ("INT", ["1", "2", "3", "NULL"]),
    "Day": ("DATE", ["date'0001-01-01'", "date'1600-02-29'", "date'9999-12-31'", "NULL"]),
    "x.`y": ("DOUBLE", ["0D", "-0D", "double('nan')", "double('inf')", "1.5D", "NULL"]),
    "f": ("FLOAT", ["0F", "-0F", "float('nan')", "NULL"]),
    "t": ("TIMESTAMP", ["timestamp'0001-01-02 00:00:00'", "timestamp'9999-12-31 23:59:59.999999'",
                        "timestamp'2026-11-01 01:30:00'", "NULL"]),
    "n": ("TIMESTAMP_NTZ", ["timestamp_ntz'1582-10-10 00:00:00.000001'", "NULL"]),
    "m": ("DECIMAL(38,18)", ["99999999999999999999.999999999999999999BD", "-0.5BD", "NULL"]),
    "s": ("STRUCT<a: INT, b: ARRAY<STRING>>", ["named_struct('a', 1, 'b', array('x', NULL))",
                                               "named_struct('a', NULL, 'b', array())", "NULL"]),
    "b": ("BINARY", ["X''", "X'FF00'", "NULL"]),
    "c": ("STRING", ["''", "'é🙂'", "'a%b/c=d e'", "repeat('x', 50)", "NULL"]),
    "o": ("BOOLEAN", ["true", "NULL"]),
    "y": ("TINYINT", ["127Y", "-128Y", "NULL"]),
}  # fmt: skip


def by_deltalake(view: View, monkeypatch: pytest.MonkeyPatch) -> View:
    """A view that does as if the session had no jar."""

    def write(batch: Any, number: int) -> None:
        with monkeypatch.context() as without:
            without.setattr(delta, "_delta_of", lambda _: "")
            view(batch, number)

    return write


def quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


class Changelog:
    """Random changes of rows with some of the columns, as SQL expressions."""

    def __init__(self, spark: Any, choice: random.Random, key: list[str] | None) -> None:
        self.spark, self.choice, self.key = spark, choice, key
        others = [name for name in COLUMNS if name not in (key or ())]
        self.names = [*(key or ()), *choice.sample(others, choice.randint(1, 5))]
        self.table: dict[tuple[str, ...], tuple[str, ...]] = {}
        self.rows: list[tuple[str, ...]] = []

    def ddl(self, *more: str) -> str:
        return ", ".join([*(f"{quoted(name)} {COLUMNS[name][0]}" for name in self.names), *more])

    def row(self) -> tuple[str, ...]:
        return tuple(self.choice.choice(COLUMNS[name][1]) for name in self.names)

    def batch(self) -> Any:
        changes: list[tuple[str, tuple[str, ...]]] = []
        for _ in range(self.choice.randrange(1, 10)):
            row = self.row()
            if self.key is None:
                if self.rows and self.choice.random() < 0.4:
                    changes.append(("-D", self.rows.pop(self.choice.randrange(len(self.rows)))))
                else:
                    self.rows.append(row)
                    changes.append(("+I", row))
                continue
            at = tuple("0D" if value == "-0D" else value for value in row[: len(self.key)])  # they are one key
            before = self.table.pop(at, None)
            if before is not None:
                changes.append(("-U", before))
            if before is None or self.choice.random() < 0.6:
                self.table[at] = row
                changes.append(("+U", row))
        select = []
        for kind, row in changes:
            cast = [f"CAST({x} AS {COLUMNS[name][0]}) {quoted(name)}" for name, x in zip(self.names, row, strict=True)]
            select.append(f"SELECT '{kind}' row_kind, " + ", ".join(cast))
        return self.spark.sql(" UNION ALL ".join(select))


def rows_of(spark: Any, path: str) -> list[str]:
    columns = spark.read.format("delta").load(path).columns
    shown = ", ".join(f"to_json(struct({quoted(name)})) || string({quoted(name)})" for name in columns)
    return sorted(map(repr, map(tuple, spark.sql(f"SELECT {shown} FROM delta.`{path}`").collect())))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("key", [["id", "Day"], ["c", "x.`y"], None], ids=["ids", "texts", "no key"])
def test_a_view_is_that_of_the_jar(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: list[str] | None, seed: int
) -> None:
    """The same random changes, into new tables and existing ones with partitions and more columns, in turns, twice."""
    choice = random.Random(f"{seed} {key}")
    changelog = Changelog(spark, choice, key)
    paths = {way: str(tmp_path / way) for way in ("jar", "package", "turns")}
    existing = choice.random() < 0.7
    # the jar itself fails to write the changes of a column with a backtick in its name
    has_feed = str(existing and "x.`y" not in changelog.names).lower()
    if existing:
        # not by texts: of an empty one the jar makes null, and the package refuses it
        parts = [name for name in changelog.names if name in ("Day", "id", "o", "y")]
        by = f"PARTITIONED BY ({quoted(choice.choice(parts))})" if parts and choice.random() < 0.5 else ""
        count = ["gpu_ops_count LONG"] if key is None else ["more STRING"]
        spark.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
        for path in paths.values():
            feed = f"TBLPROPERTIES ('delta.enableChangeDataFeed' = '{has_feed}')"
            spark.sql(f"CREATE TABLE delta.`{path}` ({changelog.ddl(*count)}) USING delta {by} {feed}")
    spark.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
    views = {way: sinks.delta_view(path, key) for way, path in paths.items()}
    package = {way: by_deltalake(view, monkeypatch) for way, view in views.items()}
    try:
        before = list[str]()
        for number in range(4):
            batch = changelog.batch().cache()
            for again in range(2):
                views["jar"](batch, number)
                package["package"](batch, number)
                (views if (number + again) % 2 else package)["turns"](batch, number)
            expected = rows_of(spark, paths["jar"])
            for way, path in paths.items():
                assert rows_of(spark, path) == expected, (way, number, changelog.names)
                # where nothing is left of the changes the package commits nothing
                assert expected == before or deltalake.DeltaTable(path).transaction_version("none") == number
            before = expected
            batch.unpersist()
        if has_feed == "true":  # the feed of the table's changes, as Spark reads it, is the table
            for way, path in paths.items():
                feed = f"table_changes_{way}"
                reader = spark.read.format("delta").option("readChangeFeed", "true").option("startingVersion", 0)
                reader.load(path).createOrReplaceTempView(feed)
                names = ", ".join(f"to_json(struct({quoted(name)}))" for name in changelog.names)
                sign = "CASE WHEN _change_type IN ('delete', 'update_preimage') THEN -1 ELSE 1 END"
                folded = spark.sql(
                    f"SELECT {names}, sum({sign}) net_count FROM {feed} GROUP BY ALL HAVING net_count <> 0"
                )
                now = spark.sql(f"SELECT {names}, count(*) net_count FROM delta.`{path}` GROUP BY ALL")
                assert sorted(map(repr, folded.collect())) == sorted(map(repr, now.collect())), way
    finally:
        spark.conf.unset("spark.sql.parquet.outputTimestampType")


ITEM = "id LONG, item STRING"


def changes(spark: Any, *rows: tuple[Any, ...]) -> Any:
    return spark.createDataFrame(list(rows), f"row_kind STRING, {ITEM}")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("TBLPROPERTIES ('delta.enableDeletionVectors' = 'true')", "deletionVectors"),
        ("TBLPROPERTIES ('delta.columnMapping.mode' = 'name')", "columnMapping|column mapping"),
        ("TBLPROPERTIES ('delta.enableRowTracking' = 'true')", "domainMetadata"),
        ("TBLPROPERTIES ('delta.enableInCommitTimestamps' = 'true')", "inCommitTimestamp"),
        ("TBLPROPERTIES ('delta.checkpointPolicy' = 'v2')", "v2Checkpoint"),
        ("TBLPROPERTIES ('delta.enableTypeWidening' = 'true')", "typeWidening"),
        ("CLUSTER BY (id)", "clustering"),
    ],
)
def test_features_that_deltalake_does_not_write_are_refused(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, words: str
) -> None:
    path = str(tmp_path / "t")
    spark.sql(f"CREATE TABLE delta.`{path}` ({ITEM}) USING delta {how}")
    spark.sql(f"INSERT INTO delta.`{path}` SELECT /*+ COALESCE(1) */ id, 'x' FROM range(2, 9)")
    spark.sql(f"DELETE FROM delta.`{path}` WHERE id = 5")
    before = rows_of(spark, path), len(list(Path(path).rglob("*")))
    with pytest.raises(DescriptionError, match=f"(?s)({words}).*start the session with Delta's jar"):
        by_deltalake(sinks.delta_view(path, "id"), monkeypatch)(changes(spark, ("+I", 1, "one")), 0)
    assert before == (rows_of(spark, path), len(list(Path(path).rglob("*"))))
    sinks.delta_view(path, "id")(changes(spark, ("+I", 1, "one")), 0)
    assert len(rows_of(spark, path)) == 7


@pytest.mark.parametrize("ddl", ["t TIMESTAMP", "t STRUCT<x: ARRAY<TIMESTAMP>>"])
def test_files_whose_times_deltalake_misreads_are_refused(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ddl: str
) -> None:
    """A row that no change touched went from 1582 to 2167, in a file of Spark's that was merged."""
    path, value = str(tmp_path / "t"), "timestamp'1582-10-10 01:00:00'"
    value = value if "STRUCT" not in ddl else f"named_struct('x', array({value}))"
    spark.sql(f"CREATE TABLE delta.`{path}` (id LONG, item STRING, {ddl}) USING delta")
    view = by_deltalake(sinks.delta_view(path, "id"), monkeypatch)
    view(changes(spark, ("+I", 1, "one")), 0)
    spark.sql(f"INSERT INTO delta.`{path}` SELECT 2, 'two', {value}")
    before = rows_of(spark, path)
    with pytest.raises(DescriptionError, match=r"has timestamps of 12 bytes \(INT96\), as Spark writes them"):
        view(changes(spark, ("+U", 2, "TWO")), 1)
    assert rows_of(spark, path) == before
    spark.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
    try:
        spark.read.format("delta").load(path).write.format("delta").mode("overwrite").save(path)
    finally:
        spark.conf.unset("spark.sql.parquet.outputTimestampType")
    view(changes(spark, ("-U", 2, "two"), ("+U", 2, "TWO")), 1)
    assert rows_of(spark, path) == sorted(row.replace("two", "TWO") for row in before)


def test_a_view_by_deltalake_is_right_beside_a_writer_with_the_jar(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, choice, done = str(tmp_path / "table"), random.Random(3), threading.Event()
    view, other, added = by_deltalake(sinks.delta_view(path, "id"), monkeypatch), spark.newSession(), 0
    seen: list[Exception] = []
    was_between = delta._came_between
    view(changes(spark, ("+I", 0, "a")), 0)

    def beside() -> None:
        nonlocal added
        while not done.is_set() and not seen:
            try:
                other.sql(
                    f"MERGE INTO delta.`{path}` t USING (SELECT {100 + added}L id, 'other' item) s ON t.id = s.id "
                    "WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *"
                )
                added += 1
            except Exception as error:
                if not was_between(error):
                    raise
            done.wait(choice.random() * 0.2)

    monkeypatch.setattr(delta, "_came_between", lambda error: seen.append(error) or was_between(error))
    writer = threading.Thread(target=beside)
    writer.start()
    number = 0
    try:
        while number < 3 or (not seen and number < 60):
            number += 1
            view(changes(spark, ("-D", number - 1, "a"), ("+I", number, "a")), number)
    finally:
        done.set()
        writer.join()
    rows = [tuple(row) for row in spark.read.format("delta").load(path).select("id", "item").collect()]
    assert sorted(rows) == [(number, "a"), *((100 + n, "other") for n in range(added))]
