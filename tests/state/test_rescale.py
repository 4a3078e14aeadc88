"""State cut anew at random moments: partitions together answer as one engine that was never cut."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from gpu_ops.engine import JoinEngine
from gpu_ops.errors import GpuJoinError, StateError
from gpu_ops.multi import AnyJoin
from gpu_ops.spark import rescale as module
from gpu_ops.spark.command import ApplyCommand, Wire
from gpu_ops.spark.left_over import left_over
from gpu_ops.spark.murmur import spark_hash
from gpu_ops.spark.packing import DISTRIBUTION, partition_of
from gpu_ops.spark.partition import PartitionState
from gpu_ops.spark.rescale import rescale
from gpu_ops.state.address import StateAddress
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import FINISHED, SPARK, Manifest
from state import test_interval_partition as interval
from state import test_multi_partition as multi
from state.support import WIRE, make_join, wire_batches


@dataclasses.dataclass(frozen=True)
class Case:
    """A join, its micro-batches, and the lane of its key."""

    join: AnyJoin
    wire: Wire
    batches: list[pa.Table]
    key: str
    watermarks: list[int | None] | None = None
    clocks: tuple[int, ...] = (1_000,) * 20

    def under(self, batch: int) -> dict[str, Any]:
        return {} if self.watermarks is None else {"watermark": self.watermarks[batch]}


CASES = {
    "full": Case(make_join(), WIRE, wire_batches(9), "c0"),
    "per_event": Case(make_join(how="left", emit="per_event"), WIRE, wire_batches(9, seed=1), "c0"),
    "ttl": Case(
        make_join(left=dataclasses.replace(make_join().left, ttl_ms=2_000), how="left"),
        WIRE, wire_batches(9, seed=2), "c0", clocks=tuple(1_000 * batch for batch in range(20)),
    ),
    "at_end": Case(make_join(emit="at_end"), WIRE, wire_batches(9, seed=3), "c0"),
    "multi": Case(multi.JOIN, multi.WIRE, multi.batches(9), "c0"),
    "interval": Case(interval.JOIN, interval.WIRE, interval.BATCHES, "c0", interval.WATERMARKS),
    "late_rows_dropped": Case(
        dataclasses.replace(interval.JOIN, interval=dataclasses.replace(interval.JOIN.interval, late="drop")),
        interval.WIRE, interval.BATCHES, "c0", interval.WATERMARKS,
    ),
}  # fmt: skip


class Partitions:
    """The partitions of a state folder, and the shuffle before them."""

    def __init__(self, case: Case, state: Path, distribution: str, partitions: int) -> None:
        self.case, self.state, self.distribution, self.partitions = case, str(state), distribution, partitions
        self.open()

    def open(self) -> None:
        command = ApplyCommand(
            "j", StateAddress.of(self.state), self.case.join.to_json(), "q", 0, 0, self.partitions, "cpu",
            self.case.wire, {"snapshot_every": 3}, distribution=self.distribution,
        )  # fmt: skip
        numbers = range(self.partitions)
        self.servers = [PartitionState(dataclasses.replace(command, partition=number)) for number in numbers]

    def apply(self, batch: int) -> list[pa.Table]:
        rows = self.case.batches[batch]
        key = rows[self.case.key].combine_chunks()
        if self.distribution == SPARK:
            goes_to = spark_hash([key], len(rows)) % self.partitions
        else:
            goes_to = partition_of([key], len(rows), self.partitions)
        said = []
        for number, server in enumerate(self.servers):
            part = rows.take(pa.array(np.flatnonzero(goes_to == number)))
            under = {"clock_ms": self.case.clocks[batch], **self.case.under(batch)}
            said.append(server.apply(batch, part, self.case.wire, **under).changelog)
        return said

    def rescale(self, partitions: int) -> None:
        done = rescale(self.state, partitions)
        assert (done.before, done.after) == (self.partitions, partitions)
        self.partitions = partitions
        self.open()


def counted(tables: list[pa.Table]) -> Counter[str]:
    return Counter(repr(sorted(row.items())) for table in tables for row in table.to_pylist())


@pytest.mark.parametrize("distribution", [SPARK, DISTRIBUTION])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_partitions_that_are_cut_anew_answer_as_one_engine(
    name: str, distribution: str, seed: int, tmp_path: Path
) -> None:
    case, rng = CASES[name], np.random.default_rng(seed)
    engine = JoinEngine(case.join, "cpu")
    partitions = Partitions(case, tmp_path / "state", distribution, int(rng.integers(1, 4)))
    said = 0
    for batch, table in enumerate(case.batches):
        rows = case.wire.split(case.join, table)
        under = case.under(batch)
        if under.get("watermark", 0) is None:
            under = {"watermark": (None, None)}
        expected = engine.process(*rows.tables, orders=rows.orders, clock_ms=case.clocks[batch], **under)
        found = partitions.apply(batch)
        assert counted(found) == counted([expected]), f"batch {batch}"
        said += expected.num_rows
        if rng.random() < 0.5:
            partitions.rescale(int(rng.integers(1, 6)))
            if rng.random() < 0.5:  # Spark may repeat the last micro-batch, and gets the same changes
                assert counted(partitions.apply(batch)) == counted([expected])
    assert said or case.join.emit == "at_end"
    manifest = Manifest.read(Files.at(partitions.state))
    assert manifest is not None
    over = [
        part
        for number in range(partitions.partitions)
        for part in left_over(partitions.state, manifest, number, len(case.batches))
    ]
    assert counted(over) == counted([engine.finish()])


@pytest.mark.parametrize("moment", ["_cut_changes", "Files.write"])
def test_one_that_is_interrupted_leaves_the_folder_as_it_was(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES["full"]
    partitions = Partitions(case, tmp_path, SPARK, 2)
    partitions.apply(0)
    partitions.apply(1)

    def fails(*_: Any, **__: Any) -> None:
        raise OSError("power failure")

    with monkeypatch.context() as patch:
        patch.setattr(Files if moment == "Files.write" else module, moment.rpartition(".")[2], fails)
        with pytest.raises(OSError, match="power failure"):
            rescale(str(tmp_path), 3)
    partitions.open()
    partitions.apply(2)
    partitions.rescale(3)
    partitions.apply(3)


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    case = CASES["full"]
    partitions = Partitions(case, tmp_path, SPARK, 2)
    partitions.apply(0)
    (tmp_path / FINISHED).write_text("{}")
    with pytest.raises(StateError, match="is finished"):
        rescale(str(tmp_path), 3)
    (tmp_path / FINISHED).unlink()
    alone = dataclasses.replace(case.join, keys=(), where="amount > price", suffixes=("", "_price"))
    one = Partitions(dataclasses.replace(case, join=alone), tmp_path / "one", SPARK, 1)
    one.apply(0)
    with pytest.raises(GpuJoinError, match="this join has one partition"):
        rescale(str(tmp_path / "one"), 2)
