"""Which commits of a Delta table a micro-batch has: offsets know their table, and what is gone is missed. No JVM."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pytest

from gpu_ops.errors import BadInputError

datasource = pytest.importorskip("pyspark.sql.streaming.datasource", reason="data sources in Python are of Spark 4.2")

FEED = {"delta.enableChangeDataFeed": "true"}


def write(table: Path, *ids: int, **more: Any) -> None:
    for number in ids:
        given = {"mode": "append"} | more
        deltalake.write_deltalake(str(table), pa.table({"id": [number]}), configuration=FEED, **given)


def commits(table: Path, first: int = 0, *, lost: bool = False) -> Any:
    from gpu_ops.spark.sources.commits import Commits

    return Commits(f"file:{table}", first, None, lost=lost)


def latest(table: Path, start: Any) -> Any:
    return commits(table).latestOffset(start, datasource.ReadAllAvailable())


def planned(table: Path, start: Any, end: Any) -> list[int]:
    return [part.value[1] for part in commits(table).partitions(start, end)]


def test_a_table_made_anew_under_a_checkpoint_is_another(tmp_path: Path) -> None:
    """It was read from its middle (StarRocks 51353, delta's DELTA_DIFFERENT_DELTA_TABLE_READ_BY_STREAMING_SOURCE)."""
    table = tmp_path / "t"
    write(table, 1, 2)
    start = latest(table, commits(table).initialOffset())
    assert start == {"version": 1, "table": deltalake.DeltaTable(str(table)).metadata().id}
    write(table, 3)
    write(table, 4, mode="overwrite", schema_mode="overwrite")  # is the same table
    end = latest(table, start)
    assert planned(table, start, end) == [2, 3]
    shutil.rmtree(table)
    write(table, *range(11, 16))
    for asked in (lambda: latest(table, start), lambda: planned(table, {"version": -1}, end)):
        with pytest.raises(BadInputError, match=r"has another id now.*made anew"):
            asked()


def test_an_offset_of_before_ids_goes_on(tmp_path: Path) -> None:
    table = tmp_path / "t"
    write(table, 1, 2)
    assert latest(table, {"version": 0})["version"] == 1
    assert planned(table, {"version": 0}, {"version": 1}) == [1]


def test_a_first_version_beyond_the_latest_is_refused(tmp_path: Path) -> None:
    """Such a query began with whatever came, without a word."""
    write(tmp_path / "t", 1, 2)
    assert commits(tmp_path / "t", 1).initialOffset() == {"version": 0}
    with pytest.raises(BadInputError, match=r"startingVersion=2 is beyond the latest version of the Delta table, 1"):
        commits(tmp_path / "t", 2).initialOffset()
