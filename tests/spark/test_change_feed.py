"""The order of Spark's change feed; tests/services/test_change_feed.py reads one."""

from __future__ import annotations

import itertools
import random

import pyarrow as pa
import pytest

pytest.importorskip("pyspark")

from gpu_ops.spark.sources.change_feed import _OrderCommits

KINDS = ["delete", "update_preimage", "insert", "update_postimage"]


@pytest.mark.parametrize("version", [int, "{:04d}".format], ids=["bigint", "text"])
def test_changes_of_a_task_are_put_in_the_order_of_their_commits(version: type) -> None:
    """By commit, what goes before what comes, else as they were, over whatever batches they come in."""
    rng = random.Random(7)
    changes = [
        {"id": n, "_change_type": rng.choice(KINDS), "_commit_version": version(rng.randrange(20))} for n in range(300)
    ]
    cuts = [0, *sorted(rng.randrange(300) for _ in range(5)), 300]
    schema = pa.Table.from_pylist(changes).schema
    batches = [pa.RecordBatch.from_pylist(changes[a:b], schema) for a, b in itertools.pairwise(cuts)]
    found = pa.Table.from_batches(_OrderCommits(["id", "_change_type"]).run(iter(batches)))
    ordered = sorted(changes, key=lambda x: (x["_commit_version"], KINDS.index(x["_change_type"]) > 1))
    assert found.column_names == ["id", "_change_type"]
    assert found["id"].to_pylist() == [x["id"] for x in ordered]
    assert not list(_OrderCommits(["id"]).run(iter(())))
