"""A function given to ``foreachBatch`` that leaves out a part of a micro-batch: noticed at the next one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from state.support import WIRE
from state.test_partition import BATCHES, apply, opened

import gpu_ops
from gpu_ops.errors import StateError
from gpu_ops.spark.driver.registry import JoinState
from gpu_ops.spark.server.recovery import check_all_did
from gpu_ops.spark.wire.command import LocateRequest
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import Manifest
from spark.support import Sink, Source, drain, in_memory

pytestmark = pytest.mark.thorough

WHOLE = r"foreachBatch\(\) has to read each micro-batch, all of it"


class Query:
    """An inner join in three partitions, of micro-batches whose rows fall into all of them."""

    def __init__(self, spark: Any, folder: Path, *, stored: bool) -> None:
        self.folder, self.state = folder, str(folder / "state") if stored else None
        self.left, self.right = (Source(spark, folder / name, f"k int, {name} int") for name in "lr")

    def run(self, batches: int, use: Callable[[Any, int], object]) -> None:
        for _ in range(batches):
            for source, name in ((self.left, "l"), (self.right, "r")):
                source.add(*({"k": k, name: k} for k in range(30)))
        joined = in_memory(gpu_ops.join, self.left.df, self.right.df, on="k", state=self.state, partitions=3)
        drain(joined, use, self.folder / "checkpoint")


@pytest.mark.spark
def test_a_function_that_reads_a_part_is_told_at_the_next_micro_batch(spark: Any, tmp_path: Path) -> None:
    """Partitions 1 and 2 were left behind without a word for as long as only ``head(1)`` was read."""
    seen = []

    def look(df: Any, batch: int) -> None:
        seen.append((batch, len(df.head(1))))

    query = Query(spark, tmp_path / "memory", stored=False)
    with pytest.raises(Exception, match=rf"done with micro-batch 0, but partitions 1, 2 of 3 never.*{WHOLE}"):
        query.run(2, look)
    assert seen == [(0, 1)]
    # also where each micro-batch has a run of its own, so that no driver sees two
    query = Query(spark, tmp_path / "runs", stored=True)
    query.run(1, look)
    with pytest.raises(Exception, match=rf"state folder .*micro-batch 0, but partitions 1, 2 of 3 never.*{WHOLE}"):
        query.run(1, look)


@pytest.mark.slow
@pytest.mark.spark
def test_a_function_that_reads_in_its_own_way_is_let_alone(spark: Any, tmp_path: Path) -> None:
    sink, query = Sink(), Query(spark, tmp_path, stored=True)

    def use(df: Any, batch: int) -> None:
        if batch == 1:
            df.persist()
        if not df.isEmpty():
            assert df.head(1)
            assert df.limit(2).count() == 2
            sink(df, batch)

    query.run(3, use)
    assert len(sink.table) == 30 * 9

    def skip(df: Any, batch: int) -> None:
        if batch != 4:
            df.collect()

    with pytest.raises(Exception, match=rf"micro-batch 4, but partitions 0, 1, 2 of 3 never.*{WHOLE}"):
        query.run(3, skip)


def follow(known: JoinState, batch: int, *partitions: int, of: int = 3) -> None:
    for partition in partitions:
        known.begin(LocateRequest("j", "q", "r", batch, None, "cpu", partition, of, partition, "e"))


def test_what_the_directory_takes_for_left_behind() -> None:
    known = JoinState("q", "r", None, None)
    follow(known, 7, 0, 1, 1, 2, 0)  # a query that goes on, tasks that are run twice
    follow(known, 8, 2)
    follow(known, 7, 1)  # a task that nobody waits for any more
    follow(known, 8, 0, 1)
    follow(known, 9, 0, 2)
    for _ in range(2):
        with pytest.raises(StateError, match=r"done with micro-batch 9, but partition 1 of 3 never"):
            follow(known, 10, 0)
    follow(known, 9, 1)
    with pytest.raises(StateError, match=r"done with micro-batch 10, but partitions 0, 1, 2 of 3 never"):
        follow(known, 11, 0)
    known = JoinState("q", "r", None, None)
    follow(known, 0, 0, of=100)
    with pytest.raises(StateError, match=r"partitions 1, 2, 3, 4, 5, 6, 7, 8 and 91 more of 100 never"):
        follow(known, 1, 0, of=100)


def test_partitions_that_were_left_behind_are_found_in_the_folder(tmp_path: Path) -> None:
    files = Files.at(str(tmp_path))
    for partition, batches in ((0, 3), (1, 2)):
        server = opened(tmp_path, partition=partition, options={"snapshot_every": 1})
        for batch in range(batches):
            apply(server, batch)
    manifest = Manifest.of(files)
    check_all_did(files, manifest, 1)  # in the middle of batch 2, as a crash leaves it
    with pytest.raises(StateError, match=r"done with micro-batch 2, but partition 1 of 2 never computed it"):
        check_all_did(files, manifest, 2)
    check_all_did(files, manifest, 3)  # that the folder is older than the checkpoint is another's to say


@pytest.mark.parametrize("stored", [False, True])
def test_a_partition_that_missed_a_micro_batch_says_what_may_have_happened(tmp_path: Path, *, stored: bool) -> None:
    """Batch 1 for a partition that never saw batch 0 was called a restart, or a folder that is gone."""
    where = tmp_path if stored else None
    with pytest.raises(StateError, match=WHOLE):
        apply(opened(where), 1)
    opened(tmp_path, partition=1).apply(0, BATCHES[0], WIRE)  # a folder, but nothing of this partition
    with pytest.raises(StateError, match=WHOLE):
        apply(opened(where), 1)
    server = opened(where)
    apply(server, 0)
    with pytest.raises(StateError, match=WHOLE):
        apply(server, 2)
