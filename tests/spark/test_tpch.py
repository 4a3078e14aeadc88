"""TPC-H's queries through ``gpu_ops.sql`` over streams of changes, against DuckDB after every micro-batch."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

pytest.importorskip("duckdb")

from gpu_ops.demo import tpch
from gpu_ops.demo.tpch import NAMES, Answers, Query, changelog, columns_of, query
from gpu_ops.descriptions.changelog import ROW_KIND_COLUMN

pytestmark = [pytest.mark.spark, pytest.mark.thorough]

FILES = 3
SMALL = {"q18": ("> 300", "> 250"), "q3": ("LIMIT 10", "LIMIT 7")}
"""So that small data has rows to choose from."""


def asked(name: str) -> Query:
    one = query(name)
    old, new = SMALL.get(name, ("", ""))
    assert old in one.text
    return dataclasses.replace(one, text=one.text.replace(old, new))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tpch.ChangeStream]:
    folder, columns = tmp_path_factory.mktemp("tpch"), columns_of([query(name) for name in NAMES])
    try:
        made = tpch.streams(folder, columns, scale=0.004, files=FILES)
    except tpch.DataError as error:
        pytest.skip(str(error))
    changing = [table for table, changes in made.items() if changes.updates and changes.deletes]
    assert sorted(changing) == ["customer", "lineitem", "orders", "supplier"]
    return made


def run(spark: Any, one: Query, inputs: dict[str, tpch.ChangeStream], folder: Path, said: dict[int, pa.Table]) -> None:
    df = changelog(spark, one, inputs, state=str(folder / "state"), partitions=2)
    writer = df.writeStream.foreachBatch(lambda rows, batch: said.__setitem__(batch, rows.toArrow()))
    writer.option("checkpointLocation", str(folder / "checkpoint")).trigger(
        availableNow=True
    ).start().awaitTermination()


def check(one: Query, inputs: dict[str, tpch.ChangeStream], said: dict[int, pa.Table], *, least: int) -> None:
    answers = Answers(one, inputs)
    assert sorted(said) == list(range(FILES))
    for batch in said:
        changes = pa.concat_tables([said[n] for n in range(batch + 1)])
        assert not answers.differences(changes, batch + 1), f"after micro-batch {batch}"
    assert answers.after(FILES).num_rows >= least
    assert "-D" in changes[ROW_KIND_COLUMN].to_pylist()


@pytest.mark.parametrize(
    ("name", "least"),
    [("q4", 5)]
    + [
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (("q5", 4), ("q10", 20), ("q12", 2), ("q13", 20), ("q18", 5))
    ],
)
def test_the_answer_is_duckdbs(
    spark: Any, inputs: dict[str, tpch.ChangeStream], tmp_path: Path, name: str, least: int
) -> None:
    said: dict[int, pa.Table] = {}
    run(spark, asked(name), inputs, tmp_path, said)
    check(asked(name), inputs, said, least=least)


@pytest.mark.slow
def test_a_chain_goes_on_where_it_stopped(spark: Any, inputs: dict[str, tpch.ChangeStream], tmp_path: Path) -> None:
    """Two joins, an aggregate and a top-N, with their state in one folder."""
    said: dict[int, pa.Table] = {}
    there = {}
    for table in asked("q3").columns:
        there[table] = dataclasses.replace(inputs[table], folder=tmp_path / table)
        there[table].folder.mkdir()
    for number in range(FILES):
        for table, changes in there.items():
            path = inputs[table].folder / f"{number:05d}.parquet"
            shutil.copy2(path, changes.folder)
        if number:
            run(spark, asked("q3"), there, tmp_path, said)
    assert {path.name for path in (tmp_path / "state").iterdir()} >= {"1", "2", "3", "4"}
    check(asked("q3"), there, said, least=7)
