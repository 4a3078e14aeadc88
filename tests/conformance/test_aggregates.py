"""Aggregates event by event as the live Flink gave them: 100 traces of 40 changes, recorded from Flink 2.3.0.

``aggregates/changes.tsv.gz`` has trace, row kind, k, x and d (nothing for null); ``flink.tsv.gz`` the changelog of
``aggregates/FlinkAggregates.java`` over them, in order, of the query `SQL`.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from oracle.drive import Backend

from gpu_ops.descriptions.aggregate import Aggregate
from gpu_ops.descriptions.inputs import Input

FOLDER = Path(__file__).parent / "aggregates"
SQL = (
    "SELECT trace, k, COUNT(*) AS n, COUNT(x) AS nx, SUM(x) AS sx, MIN(x) AS lo, MAX(d) AS hi, "
    "COUNT(DISTINCT x) AS dx, SUM(d) AS sd, AVG(d) AS ad FROM c GROUP BY trace, k"
)
CALLS = {
    "n": "count(*)", "nx": "count(x)", "sx": "sum(x)", "lo": "min(x)", "hi": "max(d)", "dx": "count(distinct x)",
    "sd": "sum(d)", "ad": "avg(d)",
}  # fmt: skip
SCHEMA = pa.schema([("trace", pa.int32()), ("k", pa.string()), ("x", pa.int64()), ("d", pa.float64())])


def lines(name: str) -> Iterator[list[str]]:
    with gzip.open(FOLDER / name, "rt") as file:
        for line in file:
            yield line.rstrip("\n").split("\t")


def changes() -> pa.Table:
    traces, kinds, *rest = zip(*lines("changes.tsv.gz"), strict=True)
    k, x, d = ([value or None for value in column] for column in rest)
    columns: list[Any] = [
        pa.array(map(int, traces), pa.int32()), pa.array(k, pa.string()),
        pa.array([None if v is None else int(v) for v in x], pa.int64()),
        pa.array([None if v is None else float(v) for v in d], pa.float64()),
    ]  # fmt: skip
    return pa.table(columns, schema=SCHEMA).append_column("row_kind", pa.array(kinds, pa.string()))


def size(backend: Backend) -> int:
    """Changes in a micro-batch: few where segments are tiny, all where they are not."""
    return 7 if backend.name.endswith("-tiny") else 4000


def test_each_event_gives_what_flink_gives(backend: Backend) -> None:
    described = Aggregate.of(Input("c", SCHEMA, row_kind="row_kind"), ("trace", "k"), CALLS, "per_event")
    given, found = changes(), []
    with backend.engine(described) as engine:
        for start in range(0, given.num_rows, size(backend)):
            for row in engine.process(given.slice(start, size(backend))).to_pylist():
                found.append(["" if value is None else str(value) for value in row.values()])
    assert found == list(lines("flink.tsv.gz"))
