"""The first rows of groups event by event as the live Flink gave them: 100 traces, recorded from Flink 2.3.0.

The changes are those of ``aggregates/changes.tsv.gz``; where the input only grows, its ``+I`` and ``+U`` as insertions.
``top/*.tsv.gz`` has the changelogs of ``aggregates/FlinkAggregates.java``, in order, of the query `SQL`. The order of
rows within an event is left open.
"""

from __future__ import annotations

import gzip
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from conftest import slow_but
from oracle.drive import Backend

from conformance.test_aggregates import SCHEMA, changes, size
from gpu_ops.descriptions.groups import Top, parse_order
from gpu_ops.descriptions.inputs import Input

FOLDER = Path(__file__).parent / "top"
SQL = (
    "SELECT trace, k, x, d[, place] FROM (SELECT *, ROW_NUMBER() OVER (PARTITION BY trace, k ORDER BY {order}) AS "
    "place FROM c) WHERE place <= {n}"
)
CASES = {
    "retracted": ("x DESC", 2, None), "retracted_number": ("x, d DESC", 3, "place"),
    "grown": ("x DESC", 2, None), "grown_number": ("x, d DESC", 3, "place"),
}  # fmt: skip


def flink(name: str) -> list[tuple[str, ...]]:
    with gzip.open(FOLDER / f"{name}.tsv.gz", "rt") as file:
        return [tuple(line.rstrip("\n").split("\t")) for line in file]


@pytest.mark.parametrize("name", slow_but(CASES, "retracted_number", "grown"))
def test_each_event_gives_what_flink_gives(backend: Backend, name: str) -> None:
    order, n, number = CASES[name]
    grows, given = name.startswith("grown"), changes()
    if grows:
        given = given.filter(pc.is_in(given["row_kind"], pa.array(["+I", "+U"]))).drop_columns(["row_kind"])
    source = Input("c", SCHEMA, row_kind=None if grows else "row_kind")
    described = Top(source, ("trace", "k"), parse_order(order), n, "per_event", number)
    wanted, at = flink(name), 0
    with backend.engine(described) as engine:
        for start in range(0, given.num_rows, size(backend)):
            batch = engine.prepare(given.slice(start, size(backend)))
            engine.commit()
            rows = [tuple("" if v is None else str(v) for v in row.values()) for row in batch.changelog.to_pylist()]
            of_event = Counter(batch.sequence.tolist())
            done = 0
            for event in sorted(of_event):
                count = of_event[event]
                found = Counter(rows[done : done + count])
                assert found == Counter(wanted[at : at + count]), (
                    start + event,
                    given.slice(start + event, 1).to_pylist(),
                )
                done, at = done + count, at + count
    assert at == len(wanted)
