"""A source of several inputs of a query is read once; a query that began with one for each goes on so."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import gpu_ops
from gpu_ops.spark.plan import build, changes
from spark.support import Source

SCHEMA = "k int, v int, t string"
QUERY = (
    "SELECT b.k, b.v, b.t, m.top FROM b JOIN (SELECT k, max(v) AS top FROM b WHERE v < 40 GROUP BY k) m "
    "ON b.k = m.k AND b.v = m.top WHERE b.v > 10"
)


class Query:
    """The query over files that come, what it has put out, and how many sources its checkpoint has."""

    def __init__(self, spark: Any, folder: Path, partitions: int, query: str = QUERY) -> None:
        self.spark, self.folder, self.partitions, self.query = spark, folder, partitions, query
        self.files = Source(spark, folder / "in", SCHEMA)
        self.rows: Counter[tuple[Any, ...]] = Counter()
        self._number = 0
        self.changes: Any = None

    def more(self, files: int) -> None:
        for _ in range(files):
            self._number += 1
            rows = [(n * 7 % 5, (n * 31 + self._number * 17) % 53, f"t{n % 3}") for n in range(60)]
            self.files.add(*({"k": k, "v": v, "t": t} for k, v, t in rows))

    def run(self) -> int:
        """One run over what has come; the number of sources."""
        table = gpu_ops.read_files(self.spark, str(self.folder / "in"), "json", SCHEMA, maxFilesPerTrigger=1)
        self.changes = found = gpu_ops.sql(
            self.query, tables={"b": table}, state=str(self.folder / "state"), partitions=self.partitions
        )

        def fold(batch: Any, _: int) -> None:
            for kind, *row in batch.collect():
                self.rows[tuple(row)] += 1 if kind in ("+I", "+U") else -1

        writer = found.writeStream.foreachBatch(fold).option("checkpointLocation", str(self.folder / "checkpoint"))
        writer.trigger(availableNow=True).start().awaitTermination()
        self.spark.read.schema(SCHEMA).json(str(self.folder / "in")).createOrReplaceTempView("b")
        assert +self.rows == Counter(map(tuple, self.spark.sql(self.query).collect()))
        assert not -self.rows
        last = max((self.folder / "checkpoint" / "offsets").glob("[0-9]*"), key=lambda path: int(path.name))
        return len(last.read_text().splitlines()) - 2


@pytest.mark.parametrize("partitions", [1, 2])
def test_one_source_over_restarts(spark: Any, tmp_path: Path, partitions: int) -> None:
    query = Query(spark, tmp_path, partitions)
    query.more(2)
    assert query.run() == 1
    said = gpu_ops.explain(query.changes)
    assert said.count(", read once for 2 inputs") == 2, said
    query.more(2)
    assert query.run() == 1


@pytest.mark.parametrize("partitions", [1, 2])
def test_a_query_that_began_with_a_source_for_each_goes_on_with_these(
    spark: Any, tmp_path: Path, partitions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = Query(spark, tmp_path, partitions)
    query.more(2)
    with monkeypatch.context() as earlier:
        earlier.setattr(build, "reads_once", lambda states: False)
        assert query.run() == 2
    manifests = list((tmp_path / "state").rglob("manifest.json"))
    assert manifests
    assert not any("reads_once" in json.loads(path.read_text()) for path in manifests)
    query.more(2)
    assert query.run() == 2
    assert changes.reads_once([None])


THREE = f"SELECT q.k, q.top, a.n FROM ({QUERY}) q JOIN (SELECT v, count(*) AS n FROM b GROUP BY v) a ON q.top = a.v"


def test_operators_of_many_partitions_have_a_source_each(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where those below the last one share a task, as a checkpoint may be older than that."""
    query = Query(spark, tmp_path, 2, THREE)
    found = list[int]()
    monkeypatch.setattr(changes, "MOST_IN_ONE_TASK", 0)
    for most_below in (0, changes.MOST_BELOW, 0):
        monkeypatch.setattr(changes, "MOST_BELOW", most_below)
        query.more(2)
        found.append(query.run())
        assert gpu_ops.explain(query.changes).count("in the same Spark task") == (1 if most_below else 0)
    assert found == [3, 3, 3]
