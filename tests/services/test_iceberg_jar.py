"""Iceberg tables that `pyiceberg` and Iceberg's own jar for Spark both write and read: random tables, equal rows."""

from __future__ import annotations

import datetime as dt
import functools
import os
import random
import threading
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import types as st
from spark.support import drain
from spark.test_delta_tables import VALUES, array, changed, schema_of, struct
from spark.test_iceberg_tables import DEEP, FLAT, Catalog, loaded

from gpu_ops.errors import DescriptionError
from gpu_ops.files.iceberg import plain_schema
from gpu_ops.spark.sinks import delta
from gpu_ops.spark.sources.iceberg import read_iceberg
from gpu_ops.spark_types import arrow_schema
from services.iceberg_jar import JarSession, texts
from services.test_delta_feed import LEAVES, value

pytestmark = [pytest.mark.spark, pytest.mark.services]

SEED = int(os.environ.get("GPU_JOIN_SEED", "7"))
ROUNDS = int(os.environ.get("GPU_JOIN_ROUNDS", "1"))

LIVE = "lake.shop.live"
# one of a column's times, as `pyiceberg` takes no more
FIELDS = ["bucket(3, id)", "truncate(2, x)", "x", "m", "o", "b", "y", "hours(t)", "years(n)", "day"]

NESTED = schema_of(
    s=struct(a="integer", b=array("integer")), l=array("integer"),
    p={"type": "map", "keyType": "string", "valueType": "integer", "valueContainsNull": True},
)  # fmt: skip
SHOP = st.StructType([*schema_of(id="long", day="date"), *FLAT, *NESTED])
PAYLOAD = [*VALUES[2:], DEEP["s"], DEEP["l"], DEEP["m"]]
KEYS = [(number, day) for number in (None, 1, 2, 3) for day in (None, dt.date(1900, 1, 1), dt.date(2026, 1, 1))]
# no day before 1582-10-15: the jar's compaction puts it into the partition of another calendar's day, which it reads


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JarSession]:
    services = Path(os.environ.get("GPU_JOIN_SERVICES", "")).absolute()
    if "GPU_JOIN_SERVICES" not in os.environ or not (services / "spark-4.1" / ".complete").exists():
        pytest.skip("neither Iceberg's jar nor a Spark that it runs on: `make services` fetches them")
    made = JarSession(services, tmp_path_factory.mktemp("jar") / "log")
    yield made
    made.close()


class Lake(Catalog):
    """A catalog in SQLite that the jar knows, too: `lake` in statements, by a name of its own as Spark keeps them."""

    def __init__(self, session: JarSession, folder: Path) -> None:
        super().__init__(folder)
        self.session, name = session, f"lake_{uuid.uuid4().hex[:8]}"
        self.properties["name"], self._name = name, name
        settings = {
            "": "org.apache.iceberg.spark.SparkCatalog",
            ".type": "jdbc",
            ".uri": self.properties["uri"].replace("sqlite:///", "jdbc:sqlite:"),
            ".jdbc.schema-version": "V1",
            ".warehouse": self.properties["warehouse"],
            ".cache-enabled": "false",
        }
        loaded(self)  # makes the database's tables
        session.set({f"spark.sql.catalog.{name}{key}": setting for key, setting in settings.items()})

    def sql(self, statement: str, **tables: pa.Table) -> pa.Table:
        return self.session.sql(statement.replace("lake.", f"{self._name}."), **tables)

    def by_jar(self, at: str = "") -> list[str]:
        return texts(self.sql(f"SELECT * FROM {LIVE}{at}"))

    def by_package(self) -> list[str]:
        return texts(self.table.scan().to_arrow())


@pytest.mark.parametrize("seed", range(SEED, SEED + 2 * ROUNDS))
def test_a_view_beside_the_jar(session: JarSession, tmp_path: Path, seed: int) -> None:
    """The jar changes rows, partitions and files between micro-batches; both read what is right then."""
    choice, lake = random.Random(seed), Lake(session, tmp_path)
    view, rows = lake.view(SHOP), dict[Any, tuple[Any, ...]]()
    mode = ["copy-on-write", "merge-on-read"][seed % 2]
    modes = ", ".join(f"'write.{what}.mode' = '{mode}'" for what in ("delete", "update", "merge"))
    lake.sql(f"ALTER TABLE {LIVE} SET TBLPROPERTIES ({modes}, 'commit.manifest.min-count-to-merge' = '3')")
    lake.sql(f"ALTER TABLE {LIVE} ADD COLUMN note STRING")
    other, done = OtherWriter(lake, choice, rows), list[str]()
    for number in range(8):
        changes = []
        for key in choice.sample(KEYS, choice.randrange(8)):
            if key in rows and choice.random() < 0.4:
                changes.append((*rows.pop(key)[:-1], -1))
                continue
            new = (*key, *map(choice.choice, PAYLOAD))
            changes.append((*new, 2 if key in rows else 1))
            rows[key] = (*new, rows[key][-1] if key in rows else None)
        for _ in range(2):
            view.merge(*changed(changes, number, ("id", "day"), SHOP))
        assert lake.by_jar() == lake.by_package() == other.expected, (seed, number, done)
        step = choice.choice([other.insert, other.update, other.delete, other.merge, other.rewrite, other.partition])
        step()
        done.append(step.__name__)
        assert lake.by_jar() == lake.by_package() == other.expected, (seed, number, done)


class OtherWriter:
    """Another writer of a view's table, by the jar.

    Args:
        lake: where the table is.
        choice: of its rows.
        rows: those of the table by their keys, which it keeps.
    """

    def __init__(self, lake: Lake, choice: random.Random, rows: dict[Any, tuple[Any, ...]]) -> None:
        self._lake, self._choice, self._rows = lake, choice, rows
        self._number, self._fields = 1000, list(FIELDS)

    @property
    def expected(self) -> list[str]:
        return texts(self._table(self._rows.values()))

    def insert(self) -> None:
        self._lake.sql(f"INSERT INTO {LIVE} SELECT * FROM more", more=self._table([self._new()]))

    def merge(self) -> None:
        """A new row, one of those that are there changed, another one deleted."""
        some = self._choice.sample(list(self._rows), min(2, len(self._rows)))
        source = [self._new(), *((*key, *map(self._choice.choice, PAYLOAD), "merged") for key in some)]
        if len(some) > 1:
            source[-1] = (*source[-1][:-1], "gone")
        self._rows |= {row[:2]: row for row in source[1:]}
        for key in some[1:]:
            del self._rows[key]
        self._lake.sql(
            f"MERGE INTO {LIVE} t USING more s ON t.id <=> s.id AND t.day <=> s.day WHEN MATCHED AND s.note = 'gone' "
            "THEN DELETE WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *",
            more=self._table(source),
        )

    def update(self) -> None:
        number = self._choice.choice([1, 2, 3])
        self._lake.sql(f"UPDATE {LIVE} SET note = 'updated' WHERE id = {number}")
        self._rows |= {key: (*row[:-1], "updated") for key, row in self._rows.items() if key[0] == number}

    def delete(self) -> None:
        number = self._choice.choice([1, 2, 3])
        self._lake.sql(f"DELETE FROM {LIVE} WHERE id = {number} AND day IS NULL")
        self._rows.pop((number, None), None)

    def rewrite(self) -> None:
        """Puts the same rows into other files, and drops old snapshots."""
        options = "options => map('rewrite-all', 'true')"
        self._lake.sql(f"CALL lake.system.rewrite_data_files(table => 'shop.live', {options})")
        self._lake.sql(f"CALL lake.system.rewrite_position_delete_files(table => 'shop.live', {options})")
        self._lake.sql("CALL lake.system.rewrite_manifests('shop.live')")
        until = f"{dt.datetime.now(dt.UTC):%F %T}"
        self._lake.sql(f"CALL lake.system.expire_snapshots('shop.live', TIMESTAMP '{until}')")

    def partition(self) -> None:
        field = self._choice.choice(self._fields)
        self._fields.remove(field)
        self._lake.sql(f"ALTER TABLE {LIVE} ADD PARTITION FIELD {field}")

    def _new(self) -> tuple[Any, ...]:
        """A row, whose key the view may have later."""
        free = [key for key in KEYS if key not in self._rows]
        key = self._choice.choice(free) if free and self._choice.random() < 0.5 else (self._number, None)
        self._number += 1
        self._rows[key] = (*key, *map(self._choice.choice, PAYLOAD), "inserted")
        return self._rows[key]

    def _table(self, rows: Iterable[tuple[Any, ...]]) -> pa.Table:
        """Rows as the table has them, small integers as 32 bits."""
        schema = plain_schema(arrow_schema(SHOP, "more").append(pa.field("note", pa.string())))
        columns = list(zip(*rows, strict=True)) or [()] * len(schema)
        return pa.table([pa.array(x, field.type) for x, field in zip(columns, schema, strict=True)], schema=schema)


def test_the_jar_writes_at_the_same_time(session: JarSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inserts and updates of other rows in the same files; what was faster is merged upon."""
    monkeypatch.setattr(delta, "_TRIES", 100)
    lake, schema, ready, failed = Lake(session, tmp_path), schema_of(id="long", item="string"), threading.Event(), []
    view = lake.view(schema)
    view.merge(*changed([(1, "a", 1)], 0, ("id",), schema))
    lake.sql(f"ALTER TABLE {LIVE} SET TBLPROPERTIES ('commit.retry.num-retries' = '100')")

    def write() -> None:
        ready.set()
        for number in range(12):
            lake.sql(f"INSERT INTO {LIVE} VALUES ({1000 + number}, 'other')")
            try:
                lake.sql(f"UPDATE {LIVE} SET item = concat(item, '!') WHERE id = 1000")
            except RuntimeError as error:
                failed.append(str(error))

    writer = threading.Thread(target=write)
    writer.start()
    ready.wait()
    number = 0
    while writer.is_alive():
        number += 1
        rows = [(number + 1, "new", 1), (number, "gone", -1)]
        delta.repeated(functools.partial(view.merge, *changed(rows, number, ("id",), schema)))
    writer.join()
    # an update that a micro-batch was faster than is the jar's error; its inserts are repeated by itself
    assert all("conflict" in error for error in failed), failed
    assert lake.by_jar() == lake.by_package()
    items = {row["id"]: row["item"] for row in lake.table.scan().to_arrow().to_pylist()}
    assert items.pop(1000).startswith("other!")
    assert items == {number + 1: "new", **{1000 + n: "other" for n in range(1, 12)}}


@pytest.mark.parametrize("seed", range(SEED, SEED + 2 * ROUNDS))
def test_rows_that_the_jar_appends(spark: Any, session: JarSession, tmp_path: Path, seed: int) -> None:
    """A table of random types and partitions that was changed before, read anew and from snapshot to snapshot."""
    choice, lake = random.Random(seed), Lake(session, tmp_path / "lake")
    stored_as = choice.choice(["parquet", "parquet", "orc"])
    # Arrow reads times in ORC from 1677 to 2262 only: the test below
    leaves = LEAVES if stored_as == "parquet" else [x for x in LEAVES if not x.startswith("TIMESTAMP")]
    kinds = {f"c{n}": choice.choice(leaves) for n in range(5)}
    leaf = choice.choice(leaves)
    kinds |= {"s": f"STRUCT<x: {leaf}, l: ARRAY<{leaf}>>", "l": f"ARRAY<{leaf}>", "m": f"MAP<STRING, {leaf}>"}
    columns = ", ".join(f"{name} {kind}" for name, kind in {"id": "BIGINT", **kinds}.items())
    transform = choice.choice(["", f"PARTITIONED BY ({choice.choice(['c0', 'bucket(3, id)', 'truncate(10, id)'])})"])
    if kinds["c0"] in ("TIMESTAMP", "TIMESTAMP_NTZ", "DATE") and choice.random() < 0.5:
        transform = f"PARTITIONED BY ({choice.choice(['days', 'months', 'years'])}(c0))"
    settings = {
        "format-version": (version := choice.choice("123")),
        "write.delete.mode": "copy-on-write" if version == "1" else choice.choice(["copy-on-write", "merge-on-read"]),
        "write.format.default": stored_as,
        "commit.manifest.min-count-to-merge": "2",
    }
    listed = ", ".join(f"'{name}' = '{setting}'" for name, setting in settings.items())
    lake.sql("CREATE NAMESPACE IF NOT EXISTS lake.shop")
    lake.sql(f"CREATE TABLE {LIVE} ({columns}) USING iceberg {transform} TBLPROPERTIES ({listed})")
    schema, found, about = (
        plain_schema(lake.table.schema().as_arrow()),
        Appended(),
        (seed, columns, transform, settings),
    )

    def append() -> None:
        rows = [[value(field.type, choice) for field in schema] for _ in range(choice.randrange(1, 8))]
        columns = [pa.array(x, field.type) for x, field in zip(zip(*rows, strict=True), schema, strict=True)]
        lake.sql(f"INSERT INTO {LIVE} SELECT * FROM more", more=pa.table(columns, schema=schema))

    for _ in range(3):
        append()
    lake.sql(f"DELETE FROM {LIVE} WHERE id = 1")
    for number in range(2):
        changes = read_iceberg(spark, "shop.live", catalog=lake.properties, max_snapshots_per_trigger=2)
        drain(changes, found, tmp_path / "checkpoint")
        assert found.rows == lake.by_jar(), (about, number)
        append()
        if choice.random() < 0.5:
            lake.sql("CALL lake.system.rewrite_data_files(table => 'shop.live', options => map('rewrite-all', 'true'))")
        if choice.random() < 0.5:
            lake.sql("CALL lake.system.rewrite_manifests('shop.live')")
        append()
    drain(changes, found, tmp_path / "checkpoint")
    lake.sql(f"INSERT INTO {LIVE} (id) VALUES (-7)")
    lake.sql(f"DELETE FROM {LIVE} WHERE id = -7")
    with pytest.raises(Exception, match=r"stream of appended rows, and snapshot [0-9]+ changes or deletes some"):
        drain(changes, found, tmp_path / "checkpoint")


class Appended:
    """A sink of rows, by the micro-batch."""

    def __init__(self) -> None:
        self._batches: dict[int, list[str]] = {}

    def __call__(self, df: Any, batch_id: int) -> None:
        self._batches[batch_id] = texts(df.toArrow())

    @property
    def rows(self) -> list[str]:
        return sorted(row for batch in self._batches.values() for row in batch)


@pytest.mark.parametrize(("stored_as", "words"), [("orc", "out of range for nanosecond"), ("avro", "avro")])
def test_files_that_are_not_read(spark: Any, session: JarSession, tmp_path: Path, stored_as: str, words: str) -> None:
    """An error that names the file, and no other row."""
    lake = Lake(session, tmp_path / "lake")
    lake.sql("CREATE NAMESPACE IF NOT EXISTS lake.shop")
    lake.sql(f"CREATE TABLE {LIVE} (t TIMESTAMP) USING iceberg TBLPROPERTIES ('write.format.default' = '{stored_as}')")
    lake.sql(f"INSERT INTO {LIVE} VALUES (TIMESTAMP '0001-01-02')")
    with pytest.raises(Exception, match=f"{stored_as} cannot be read by pyiceberg: .*(?i:{words})"):
        drain(read_iceberg(spark, "shop.live", catalog=lake.properties), Appended(), tmp_path / "checkpoint")


def test_a_view_in_a_table_that_pyiceberg_does_not_write(session: JarSession, tmp_path: Path) -> None:
    lake = Lake(session, tmp_path)
    lake.sql("CREATE NAMESPACE IF NOT EXISTS lake.shop")
    lake.sql(f"CREATE TABLE {LIVE} (id BIGINT, item STRING) USING iceberg TBLPROPERTIES ('format-version' = '3')")
    schema = schema_of(id="long", item="string")
    view = lake.view(schema)
    with pytest.raises(DescriptionError, match=r"view shop\.live: .*version 3"):
        view.merge(*changed([(1, "a", 1)], 0, ("id",), schema))
    assert not list(tmp_path.rglob("*.parquet"))
