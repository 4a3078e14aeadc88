"""The change feed of tables that Spark writes, with every feature of Delta's, against Spark's own reader of it."""

from __future__ import annotations

import collections
import datetime as dt
import decimal
import os
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from gpu_ops.errors import BadInputError
from gpu_ops.files.formats import FileFormat
from gpu_ops.values import rebuilt

pytestmark = [pytest.mark.spark, pytest.mark.services]

SEEDS = range(*map(int, os.environ.get("GPU_JOIN_DELTA_SEEDS", "0:6").split(":")))
CDC = "spark.databricks.delta.changeDataFeed"
LEAVES = ["STRING", "BIGINT", "INT", "SMALLINT", "TINYINT", "FLOAT", "DOUBLE", "BOOLEAN", "BINARY", "DATE", "TIMESTAMP",
          "TIMESTAMP_NTZ", "DECIMAL(38,10)", "DECIMAL(9,2)"]  # fmt: skip
WIDER = {"TINYINT": ["SMALLINT", "INT", "BIGINT", "DOUBLE", "DECIMAL(12,2)"], "SMALLINT": ["INT", "BIGINT", "DOUBLE"],
         "INT": ["BIGINT", "DOUBLE", "DECIMAL(12,2)"], "FLOAT": ["DOUBLE"], "DATE": ["TIMESTAMP_NTZ"],
         "BIGINT": ["DECIMAL(22,1)"], "DECIMAL(9,2)": ["DECIMAL(12,4)"]}  # fmt: skip
TEXTS = [
    "x:y",
    "x/y",
    "50%",
    "a b",
    "a+b",
    "é",
    "",
    "%41",
    'a"b\\c',
    "日本 ",
    "__HIVE_DEFAULT_PARTITION__",
    "p=1",
    "🙂",
    "'",
]
INSTANTS = [dt.datetime(9999, 12, 31, 23, 59, 59, 999999), dt.datetime(1, 1, 2), dt.datetime(1582, 10, 10, 1),
            dt.datetime(1899, 12, 31, 23, 59), dt.datetime(1970, 1, 1), dt.datetime(2026, 3, 8, 7, 30),
            dt.datetime(2262, 4, 12), dt.datetime(1677, 9, 20, 1, 2, 3, 4)]  # fmt: skip


def value(kind: pa.DataType, choice: random.Random, *, plain: bool = False) -> Any:
    """A value, most often an extreme one; a plain one can be a partition's."""
    t = pa.types
    if choice.random() < 0.15:
        return None
    if t.is_struct(kind):
        return {field.name: value(field.type, choice) for field in kind}
    if t.is_list(kind):
        return [value(kind.value_type, choice) for _ in range(choice.randrange(3))]
    if t.is_map(kind):
        keys = {value(kind.key_type, choice) for _ in range(choice.randrange(3))} - {None}
        return [(key, value(kind.item_type, choice)) for key in sorted(keys)]
    if t.is_string(kind):
        return choice.choice(TEXTS)
    if t.is_binary(kind):
        return choice.choice([b"abc", "é".encode(), b"\x01\x02"] if plain else [b"", b"\xff\x00", b"abc"])
    if t.is_boolean(kind):
        return choice.random() < 0.5
    if t.is_integer(kind):
        return choice.choice([0, 1, (1 << kind.bit_width - 1) - 1, -1 << kind.bit_width - 1])
    if t.is_floating(kind):
        return choice.choice([0.5, -0.0, float("nan"), float("inf"), -1e-7, 3.4028234663852886e38])
    if t.is_decimal(kind):
        return decimal.Decimal(f"{choice.choice([0, 1, -(10**kind.precision) + 1])}E-{kind.scale}")
    if t.is_date(kind):
        return choice.choice(INSTANTS).date()
    return choice.choice(INSTANTS)


class Table:
    """A table with random columns, properties and features."""

    def __init__(self, spark: Any, path: Path, choice: random.Random) -> None:
        self.spark, self.path, self.choice = spark, path, choice
        self.name, self.made, self.renamed = f"delta.`{path}`", 0, False
        self.mapping = choice.choice(["none", "name", "id"])
        self.widening = choice.random() < 0.5
        kinds = [choice.choice(LEAVES) for _ in range(3)]
        inner = choice.choice(LEAVES)
        odd = " ,;=é" if self.mapping != "none" else "é.%"
        columns = {"id": "BIGINT", "p": choice.choice(LEAVES), f"c{odd}": kinds[0],
                   "S": f"STRUCT<X: {kinds[1]}, y: INT>", "l": f"ARRAY<STRUCT<z: {inner}>>",
                   "m": f"MAP<STRING, {kinds[2]}>"}  # fmt: skip
        columns |= {"w": choice.choice(list(WIDER))}
        layout = choice.choice(["", "PARTITIONED BY (p)", "CLUSTER BY (id)"])
        self.partitioned = layout.startswith("P")
        flags = {"enableDeletionVectors": 0.6, "enableRowTracking": 0.3, "enableInCommitTimestamps": 0.3}
        properties = {f"delta.{name}": str(choice.random() < share).lower() for name, share in flags.items()}
        properties |= {"delta.enableChangeDataFeed": "true", "delta.columnMapping.mode": self.mapping,
                       "delta.checkpointInterval": "3", "delta.enableTypeWidening": str(self.widening).lower(),
                       "delta.checkpointPolicy": choice.choice(["classic", "v2"])}  # fmt: skip
        self.columns = columns
        listed = ", ".join(f"`{name}` {kind}" for name, kind in columns.items())
        given = ", ".join(f"'{name}'='{setting}'" for name, setting in properties.items())
        spark.sql(f"CREATE TABLE {self.name} ({listed}) USING delta {layout} TBLPROPERTIES ({given})")

    def rows(self, low: int, high: int) -> Any:
        from gpu_ops.spark_types import arrow_schema

        schema = arrow_schema(self.spark.read.format("delta").load(str(self.path)).schema, "table")
        some = self.choice.sample(range(low, high), 5)
        arrays = [
            pa.array(
                some if x.name == "id" else [value(x.type, self.choice, plain=x.name == "p") for _ in some], x.type
            )
            for x in schema
        ]
        return self.spark.createDataFrame(pa.Table.from_arrays(arrays, schema=schema)).coalesce(
            self.choice.choice([1, 2])
        )

    def change(self) -> None:
        """One commit, or several, or none."""
        choice, table = self.choice, self.name
        self.made += 1
        write = lambda rows: rows.write.format("delta")  # noqa: E731
        match choice.randrange(14):
            case 0 | 1:
                write(self.rows(0, 40)).mode("append").save(str(self.path))
            case 2 | 3:
                column = choice.choice([name for name in self.columns if name != "id"])
                self.spark.sql(f"UPDATE {table} SET `{column}` = NULL WHERE id % 3 = {choice.randrange(3)}")
            case 4 | 5:
                self.spark.sql(f"DELETE FROM {table} WHERE id % 4 = {choice.randrange(4)}")
            case 6 | 7:
                self.rows(0, 40).createOrReplaceTempView("more")
                self.spark.sql(
                    f"MERGE INTO {table} t USING more s ON t.id = s.id WHEN MATCHED AND t.id % 3 = 0 THEN DELETE "
                    "WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *"
                )
            case 8:
                write(self.rows(10, 20)).mode("overwrite").option("replaceWhere", "id >= 10 AND id < 20").save(
                    str(self.path)
                )
            case 9:
                mode = "dynamic" if self.partitioned else "static"
                write(self.rows(0, 40)).mode("overwrite").option("partitionOverwriteMode", mode).save(str(self.path))
            case 10:
                self.spark.sql(f"RESTORE {table} TO VERSION AS OF {choice.randrange(1, self.made + 1)}")
            case 11:
                self.spark.sql(f"OPTIMIZE {table}")
            case 12:
                self.alter()
            case _:
                setting = choice.choice(["true", "false"])
                self.spark.sql(f"ALTER TABLE {table} SET TBLPROPERTIES ('delta.enableDeletionVectors'='{setting}')")

    def alter(self) -> None:
        choice, table = self.choice, f"ALTER TABLE {self.name}"
        which = choice.randrange(4)
        if which == 0:
            self.spark.sql(f"{table} ADD COLUMNS (S.n{self.made} {choice.choice(LEAVES)}, n{self.made} ARRAY<DATE>)")
        elif which == 1 and self.mapping != "none":
            self.spark.sql(f"{table} RENAME COLUMN S.{choice.choice('Xy')} TO r{self.made}")
            self.renamed = True
        elif which == 2 and self.mapping != "none":
            self.spark.sql(f"{table} DROP COLUMN m")
            del self.columns["m"]
            self.renamed = True
        elif self.widening and self.columns["w"] in WIDER:
            wider = choice.choice(WIDER[self.columns["w"]])
            self.spark.sql(f"{table} ALTER COLUMN w TYPE {wider}")
            self.columns["w"] = wider


def comparable(table: pa.Table) -> collections.Counter[str]:
    """The rows, with numbers for times: Python has no such ones near its ends in all zones."""
    number = lambda kind: pa.int64() if pa.types.is_timestamp(kind) else kind  # noqa: E731
    plain = table.cast(pa.schema([field.with_type(rebuilt(field.type, number)) for field in table.schema]))
    return collections.Counter(repr(tuple(row.values())) for row in plain.to_pylist())


def feeds(spark: Any, path: Path, first: int, last: int, zone: str) -> tuple[pa.Table, pa.Table]:
    """Spark's feed of some versions, and ours of the same columns."""
    from gpu_ops.spark_types import arrow_schema

    reader = spark.read.format("delta").option("readChangeFeed", "true")
    frame = reader.option("startingVersion", first).option("endingVersion", last).load(str(path))
    schema = arrow_schema(frame.schema, "feed")
    read = FileFormat("delta", schema, (("timeZone", zone),))
    commits = [f"file:{path}/_delta_log/{version:020}.json" for version in range(first, last + 1)]
    ours = [batch for commit in commits for batch in read.read(commit, schema.names, "feed")]
    return frame.toArrow(), pa.Table.from_batches(ours, schema)


def assert_equal(theirs: pa.Table, ours: pa.Table) -> None:
    wanted, found = comparable(theirs), comparable(ours)
    assert found == wanted, (
        f"only Spark's: {list((wanted - found).items())[:3]}, only ours: {list((found - wanted).items())[:3]}"
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_the_feed_of_a_random_table_is_sparks(spark: Any, tmp_path: Path, seed: int) -> None:
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    choice = random.Random(seed)
    zone = choice.choice(["UTC", "America/New_York", "Asia/Shanghai"])
    conf = {
        "spark.sql.session.timeZone": zone,
        "spark.sql.parquet.outputTimestampType": choice.choice(["INT96", "TIMESTAMP_MICROS"]),
        "spark.databricks.delta.write.utcTimestampPartitionValues": choice.choice(["true", "false"]),
        "spark.sql.datetime.java8API.enabled": "true",  # else a nested 1582-10-10 becomes the 15th on its way out
        f"{CDC}.unsafeBatchReadOnIncompatibleSchemaChanges.enabled": "true",
    }
    session = spark.newSession()
    for name, setting in conf.items():
        session.conf.set(name, setting)
    table = Table(session, tmp_path / "some table", choice)
    refused = []
    for _ in range(10):
        try:
            table.change()
        except (PySparkException, Py4JJavaError) as error:  # Delta's own are not all Spark's
            refused.append(str(error)[:100])
    last = max(int(x.name[:20]) for x in (table.path / "_delta_log").glob("0*.json"))
    if last < 3 and seed >= 6:
        pytest.skip(f"Delta itself refused most changes of this table: {refused}")
    assert last >= 3, refused
    # where columns were renamed or dropped Spark reads each version with its own schema
    spans = [(version, version) for version in range(last + 1)] if table.renamed else [(0, last)]
    rows = 0
    for first, end in spans:
        theirs, ours = feeds(session, table.path, first, end, zone)
        assert_equal(theirs, ours)
        rows += theirs.num_rows
    assert rows


def test_what_vacuum_removed_is_named(spark: Any, tmp_path: Path) -> None:
    session, path = spark.newSession(), tmp_path / "t"
    session.conf.set("spark.databricks.delta.retentionDurationCheck.enabled", "false")
    session.sql(f"CREATE TABLE delta.`{path}` (id BIGINT) USING delta TBLPROPERTIES (delta.enableChangeDataFeed=true)")
    for statement in (f"INSERT INTO delta.`{path}` VALUES (1), (2)", f"UPDATE delta.`{path}` SET id = 3 WHERE id = 1",
                      f"INSERT INTO delta.`{path}` VALUES (4)", f"VACUUM delta.`{path}` RETAIN 0 HOURS"):  # fmt: skip
        session.sql(statement)
    read = FileFormat("delta", pa.schema([("_change_type", pa.string()), ("id", pa.int64())]))
    versions = [f"file:{path}/_delta_log/{version:020}.json" for version in range(4)]
    with pytest.raises(BadInputError, match=r"version 2 of the table names .*_change_data/.*which is gone: VACUUM"):
        list(read.read(versions[2], ["id"], "feed"))
    assert [row["id"] for batch in read.read(versions[3], ["id"], "feed") for row in batch.to_pylist()] == [4]
    with pytest.raises(Exception, match=r"(?i)failed_read|not.exist|not.found"):
        session.read.format("delta").option("readChangeFeed", "true").option("startingVersion", 2).load(
            str(path)
        ).count()


def test_a_shallow_clone_is_read_where_its_files_are(spark: Any, tmp_path: Path) -> None:
    source, clone = tmp_path / "a b%", tmp_path / "clone"
    given = "TBLPROPERTIES (delta.enableChangeDataFeed=true, delta.enableDeletionVectors=true)"
    for statement in (
        f"CREATE TABLE delta.`{source}` (id BIGINT, p STRING) USING delta PARTITIONED BY (p) {given}",
        f"INSERT INTO delta.`{source}` SELECT id, 'x:' || id % 2 FROM range(20)",
        f"DELETE FROM delta.`{source}` WHERE id = 3",
        f"CREATE TABLE delta.`{clone}` SHALLOW CLONE delta.`{source}`",
        f"DELETE FROM delta.`{clone}` WHERE id IN (4, 5)",
        f"UPDATE delta.`{clone}` SET p = 'new' WHERE id = 6",
        f"OPTIMIZE delta.`{clone}`",
    ):
        spark.sql(statement)
    theirs, ours = feeds(spark, clone, 0, 2, "UTC")
    assert_equal(theirs, ours)
    assert ours.num_rows == 19 + 2 + 2
