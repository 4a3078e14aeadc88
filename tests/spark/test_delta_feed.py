"""The change feed of a Delta table, whose commits Arrow reads: joined commit by commit, and from a version on."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pytest
from conftest import slow_but

import gpu_ops
from gpu_ops import stream
from spark.support import Sink, Source, drain, in_memory, slow_join

pytestmark = [pytest.mark.spark, pytest.mark.thorough]

SCHEMA = "_change_type string, id long, shop string, price double"
FEED = {"delta.enableChangeDataFeed": "true"}


def change(path: str, choice: random.Random) -> None:
    """One commit: rows that come, or a merge; now and then rows that change, or go, or nothing but their files."""
    table = deltalake.DeltaTable(path)
    some = sorted(choice.sample(range(30), 6))
    rows = pa.table({"id": some, "shop": [choice.choice("ab") for _ in some], "price": [choice.random() for _ in some]})
    match choice.randrange(5):
        case 0:
            table.update(predicate=f"id % 3 = {choice.randrange(3)}", updates={"price": "price + 1"})
        case 1:
            table.delete(f"id % 4 = {choice.randrange(4)}")
        case 2:
            table.optimize.compact()
        case _:
            merge = table.merge(rows, "t.id = s.id", source_alias="s", target_alias="t")
            merge.when_matched_update_all().when_not_matched_insert_all().execute()


@pytest.mark.parametrize("key", slow_but(["id", None], "id"))
def test_a_table_is_followed_commit_by_commit(spark: Any, tmp_path: Path, key: str | None) -> None:
    path, choice, sink = str(tmp_path / "prices"), random.Random(5), Sink()
    first = pa.table({"id": [1, 2], "shop": ["a", "b"], "price": [0.5, 1.5]})
    deltalake.write_deltalake(path, first, configuration=FEED, partition_by=["shop"])
    items = Source(spark, tmp_path / "items", "id long, name string")
    items.add(*({"id": n, "name": f"n{n}"} for n in range(20)))
    for _ in range(3):
        for _ in range(4):
            change(path, choice)
        prices = gpu_ops.read_files(spark, path, "delta", SCHEMA, maxFilesPerTrigger=1)
        keyed: Any = {"unique_key": key, "updates": "retract"} if key else {}
        right = stream(prices, name="prices", row_kind="_change_type", **keyed)
        joined = gpu_ops.join(items.df, right, on="id", how="left", state=str(tmp_path / "state"))
        assert "files of" in gpu_ops.explain(joined)
        drain(joined, sink, tmp_path / "checkpoint")
        table = deltalake.DeltaTable(path).to_pyarrow_table().to_pylist()
        rows = [(row["id"], row["shop"], row["price"]) for row in table]
        assert sink.table == slow_join("left", items.table(["id", "name"], None), rows, 3)
    versions = deltalake.DeltaTable(path).version()
    from_then = {"startingVersion": versions - 2, "maxFilesPerTrigger": 1}
    feed = gpu_ops.read_files(spark, path, "delta", f"{SCHEMA}, _commit_version long", **from_then)
    later = Sink()
    drain(feed, later, tmp_path / "later")
    assert {row[-1] for row in later.changes} <= {versions - 2, versions - 1, versions}
    assert [row[-1] for row in later.changes] == sorted(row[-1] for row in later.changes)
    assert later.changes


def test_a_table_without_a_feed_is_refused(spark: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "prices")
    deltalake.write_deltalake(path, pa.table({"id": [1], "shop": ["a"], "price": [0.5]}))
    prices = stream(gpu_ops.read_files(spark, path, "delta", SCHEMA), name="prices", row_kind="_change_type")
    items = Source(spark, tmp_path / "items", "id long, name string")
    items.add({"id": 1, "name": "x"})
    joined = in_memory(gpu_ops.join, items.df, prices, on="id")
    with pytest.raises(Exception, match=r"version 0 change data was not recorded.*enableChangeDataFeed has to be set"):
        drain(joined, Sink(), tmp_path / "checkpoint")
    with pytest.raises(gpu_ops.DescriptionError, match="startingVersion='new' is a number"):
        gpu_ops.read_files(spark, path, "delta", SCHEMA, startingVersion="new")


def appended(path: str, *ids: int) -> None:
    for number in ids:
        row = pa.table({"id": [number], "shop": ["a"], "price": [0.5]})
        deltalake.write_deltalake(path, row, mode="append", configuration=FEED)


def cleaned(path: str, *versions: int) -> None:
    """What log cleanup leaves: a checkpoint, and no commits before it."""
    deltalake.DeltaTable(path).create_checkpoint()
    for version in versions:
        (Path(path) / "_delta_log" / f"{version:020}.json").unlink()


@pytest.mark.slow
def test_commits_that_log_cleanup_has_removed_are_missed(spark: Any, tmp_path: Path) -> None:
    """On resuming and at the start their rows were left out without a word."""
    path, sink = str(tmp_path / "prices"), Sink()
    appended(path, 0, 1, 2)

    def run(checkpoint: str, into: Sink, **options: Any) -> list[Any]:
        drain(gpu_ops.read_files(spark, path, "delta", SCHEMA, **options), into, tmp_path / checkpoint)
        return [row[1] for row in into.changes]

    assert run("checkpoint", sink) == [0, 1, 2]
    appended(path, 3, 4, 5)
    cleaned(path, 0, 1, 2)
    assert run("checkpoint", sink, maxFilesPerTrigger=1) == [0, 1, 2, 3, 4, 5]  # what was read may go
    for version, options in ((0, {}), (2, {"startingVersion": 2})):
        with pytest.raises(Exception, match=rf"version {version} of the Delta table.*earliest one after it is 3"):
            run(f"new{version}", Sink(), **options)
    assert run("from3", Sink(), startingVersion=3) == [3, 4, 5]
    appended(path, 6, 7, 8)
    cleaned(path, 3, 4, 5, 6)
    with pytest.raises(Exception, match=r"version 6 of the Delta table.*earliest one after it is 7.*failOnDataLoss"):
        run("checkpoint", sink)
    assert run("checkpoint", sink, failOnDataLoss=False) == [0, 1, 2, 3, 4, 5, 7, 8]
