"""State cut anew at random moments: partitions together answer as one engine that was never cut."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from conftest import combined

from gpu_ops.descriptions.description import Description
from gpu_ops.errors import GpuJoinError, StateError
from gpu_ops.join_engine import JoinEngine
from gpu_ops.memory import Budget
from gpu_ops.spark.server import rescale as module
from gpu_ops.spark.server.partition import stored_state
from gpu_ops.spark.server.recovery import RecoveredState
from gpu_ops.spark.server.rescale import rescale
from gpu_ops.spark.tasks.engine import left_over
from gpu_ops.spark.wire.command import ApplyCommand, Wire
from gpu_ops.spark.wire.hashes import partition_of
from gpu_ops.state.address import StateAddress
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import FINISHED, MANIFEST, SPARK, Manifest
from gpu_ops.state.table import StateTable
from state import test_interval_partition as interval
from state import test_multi_partition as multi
from state.support import WIRE, PartitionState, make_join, wire_batches, with_bytes


@dataclasses.dataclass(frozen=True)
class Case:
    """A join, its micro-batches, and the union column of its key."""

    join: Description
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
    """The partitions of a state folder, and the shuffle before them.

    Args:
        case: what is joined.
        state: the folder.
        partitions: how many.
        tiny: whether state is stored in the smallest pieces.
        earlier: whether an earlier version has distributed the rows, by another hash, until the folder is cut anew.
    """

    def __init__(self, case: Case, state: Path, partitions: int, *, earlier: bool = False, tiny: bool = False) -> None:
        self.case, self.state, self.partitions, self.earlier = case, str(state), partitions, earlier
        self.tiny, self.as_bytes = tiny, False
        self.open()

    def open(self) -> None:
        command = ApplyCommand(
            "j", StateAddress.of(self.state), self.case.join.to_json(), "q", 0, 0, self.partitions, "cpu",
            self.case.wire, {"snapshot_every": 3, "tiny": self.tiny},
        )  # fmt: skip
        numbers = range(self.partitions)
        self.servers = [PartitionState(dataclasses.replace(command, partition=number)) for number in numbers]

    def apply(self, batch: int) -> list[pa.Table]:
        rows = self.case.batches[batch]
        key = rows[self.case.key].combine_chunks()
        goes_to = partition_of([key], len(rows), 1000 if self.earlier else self.partitions)
        if self.earlier:
            goes_to = goes_to // 7 % self.partitions
        said = []
        for number, server in enumerate(self.servers):
            part = rows.take(pa.array(np.flatnonzero(goes_to == number)))
            under = {"clock_ms": self.case.clocks[batch], **self.case.under(batch)}
            part = with_bytes(self.case.join, self.case.wire, part) if self.as_bytes else part
            said.append(server.apply(batch, part, self.case.wire, **under).changelog)
        return said

    def rescale(self, partitions: int) -> None:
        if self.earlier:
            manifest = Path(self.state, MANIFEST)
            manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "distribution": SPARK}))
            self.open()
            if self.partitions > 1:
                with pytest.raises(
                    StateError, match=rf"by another hash. Run gpu-join rescale .* --partitions {self.partitions}"
                ):
                    self.apply(0)
            self.earlier = False
        done = rescale(self.state, partitions)
        assert (done.before, done.after) == (self.partitions, partitions)
        self.partitions = partitions
        self.open()


def counted(tables: list[pa.Table]) -> Counter[str]:
    return Counter(repr(sorted(row.items())) for table in tables for row in table.to_pylist())


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("name", "earlier", "seed"), combined(list(CASES), [False, True], range(3)))
def test_partitions_that_are_cut_anew_answer_as_one_engine(
    name: str, earlier: bool, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, rng = CASES[name], np.random.default_rng(seed)
    for limit in ("_WAITING", "_LEAST"):  # rows that wait for others, or are written as they come, or none of both
        monkeypatch.setattr(module, limit, [getattr(module, limit), 1, 2000][seed])
    engine = JoinEngine(case.join, "cpu")
    partitions = Partitions(case, tmp_path / "state", int(rng.integers(1, 4)), earlier=earlier, tiny=seed > 0)
    partitions.as_bytes = seed == 1
    said = 0
    for batch, table in enumerate(case.batches):
        rows = case.wire.split(case.join, table)
        under = case.under(batch)
        if under.get("watermark", 0) is None:
            under = {"watermark": (None, None)}
        expected = engine.process(*rows.tables, orders=rows.sequences, clock_ms=case.clocks[batch], **under)
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


def test_rows_that_lie_on_disk_are_cut_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, read = Case(make_join(), WIRE, wire_batches(6, rows=600, seed=4), "c0"), list[int]()
    engine = JoinEngine(case.join, "cpu")
    partitions = Partitions(case, tmp_path / "state", 2)
    for batch in range(4):
        partitions.apply(batch)
    take = module._CutState.take

    def seen(state: Any, held: RecoveredState) -> None:
        read.append(sum(table.disk_bytes for table in held.tables.values() if isinstance(table, StateTable)))
        take(state, held)

    def tiny(*given: Any) -> PartitionState:
        found = stored_state(*given)
        found._options["tiny"] = True
        return found

    monkeypatch.setattr(module._CutState, "take", seen)
    monkeypatch.setattr(module, "stored_state", tiny)
    budget = Budget(host=10_000, folder=str(tmp_path))
    rescale(partitions.state, 3, budget=budget)
    assert any(read)
    assert not any(budget.used)
    partitions.partitions = 3
    partitions.open()
    for batch, table in enumerate(case.batches):
        rows = case.wire.split(case.join, table)
        expected = engine.process(*rows.tables, orders=rows.sequences, clock_ms=case.clocks[batch])
        if batch >= 3:
            assert counted(partitions.apply(batch)) == counted([expected])


@pytest.mark.parametrize("moment", ["_cut_changes", "Files.write"])
def test_one_that_is_interrupted_leaves_the_folder_as_it_was(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES["full"]
    partitions = Partitions(case, tmp_path, 2)
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


def test_it_says_how_far_it_is(tmp_path: Path) -> None:
    partitions, said = Partitions(CASES["full"], tmp_path, 3), list[str]()
    partitions.apply(0)
    partitions.apply(1)
    rescale(str(tmp_path), 2, said.append)
    assert len(said) == 3
    for number, text in enumerate(said, start=1):
        assert re.fullmatch(rf"{tmp_path}: cut partition {number} of 3, about \d+ s are left", text)


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    case = CASES["full"]
    partitions = Partitions(case, tmp_path, 2)
    partitions.apply(0)
    (tmp_path / FINISHED).write_text("{}")
    with pytest.raises(StateError, match="is finished"):
        rescale(str(tmp_path), 3)
    (tmp_path / FINISHED).unlink()
    alone = dataclasses.replace(case.join, keys=(), where="amount > price", suffixes=("", "_price"))
    one = Partitions(dataclasses.replace(case, join=alone), tmp_path / "one", 1)
    one.apply(0)
    with pytest.raises(GpuJoinError, match="this join has one partition"):
        rescale(str(tmp_path / "one"), 2)


# --- beside a running query ----------------------------------------------------------------------


class Turns:
    """Two threads that take turns at their operations on files, by lot."""

    def __init__(self, seed: int, patch: pytest.MonkeyPatch) -> None:
        self._rng, self._ready = np.random.default_rng(seed), threading.Condition()
        self._turn, self._running, self._often = 0, [True, True], (0.4, 0.05, 0.02)[seed % 3]
        for name in ("write", "read", "stamp", "sizes", "delete", "delete_folder", "create"):
            patch.setattr(Files, name, self._waiting(getattr(Files, name)))

    def _waiting(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def wait_and_do(*args: Any, **options: Any) -> Any:
            self._wait()
            return operation(*args, **options)

        return wait_and_do

    def _wait(self) -> None:
        me = int(threading.current_thread().name)
        with self._ready:
            if self._running[1 - me]:
                self._turn = 1 - me if self._rng.random() < self._often else me
                self._ready.notify_all()
                assert self._ready.wait_for(lambda: self._turn == me or not self._running[1 - me], 60)

    def run(self, *works: Callable[[], None]) -> None:
        def begin(number: int) -> None:
            try:
                works[number]()
            finally:
                with self._ready:
                    self._running[number], self._turn = False, 1 - number
                    self._ready.notify_all()

        with ThreadPoolExecutor(2) as pool:

            def named(number: int) -> None:
                threading.current_thread().name = str(number)
                begin(number)

            for done in [pool.submit(named, number) for number in (0, 1)]:
                done.result(120)


def beside(seed: int, folder: Path) -> Counter[str]:
    """A query and cuts beside it; checks every answer, and counts what happened."""
    case, rng = CASES["full" if seed % 2 else "interval"], np.random.default_rng(seed)
    engine, happened = JoinEngine(case.join, "cpu"), Counter[str]()
    expected = []
    for batch, table in enumerate(case.batches):
        rows, under = case.wire.split(case.join, table), case.under(batch)
        if under.get("watermark", 0) is None:
            under = {"watermark": (None, None)}
        said = engine.process(*rows.tables, orders=rows.sequences, clock_ms=case.clocks[batch], **under)
        expected.append(counted([said]))
    partitions = Partitions(case, folder, 2)
    partitions.apply(0)
    found = {0: expected[0]}

    def query() -> None:
        batch = 1
        while batch < len(case.batches):
            try:
                found[batch] = counted(partitions.apply(batch))
            except StateError as error:  # Spark starts it again, and repeats the micro-batch
                if not re.search(r"cut anew|cut into \d partitions, the query asks", str(error)):
                    raise
                happened["query refused"] += 1
                partitions.partitions = Manifest.of(Files.at(partitions.state)).partitions
                partitions.open()
            else:
                batch += 1

    def cuts() -> None:
        for _ in range(6):
            try:
                rescale(partitions.state, int(rng.integers(1, 4)))
                happened["cut"] += 1
            except StateError as error:
                if not re.search(r"is running|in the middle of batch", str(error)):
                    raise
                happened["cut refused"] += 1

    with pytest.MonkeyPatch.context() as patch:
        Turns(seed, patch).run(query, cuts)
    assert [found[batch] for batch in range(len(expected))] == expected, seed
    manifest = Manifest.of(Files.at(partitions.state))
    assert manifest.sealed is None
    over = [left_over(partitions.state, manifest, n, len(expected)) for n in range(manifest.partitions)]
    assert counted([table for part in over for table in part]) == counted([engine.finish()])
    return happened


def test_a_folder_that_is_cut_anew_beside_its_running_query_loses_nothing(tmp_path: Path) -> None:
    """``gpu-join rescale`` destroyed what the query needed."""
    wanted, happened = {"query refused", "cut", "cut refused"}, Counter[str]()
    for seed in range(2, 60):  # what happens to whom also depends on the machine
        happened += beside(seed, tmp_path / str(seed))
        if seed >= 10 and wanted <= happened.keys():
            break
    assert wanted <= happened.keys(), happened


@pytest.mark.slow
def test_many_folders_that_are_cut_anew_beside_their_running_queries_lose_nothing(tmp_path: Path) -> None:
    for seed in range(11, 200):
        beside(seed, tmp_path / str(seed))


def test_a_query_that_runs_is_told_that_its_folder_was_cut_anew(tmp_path: Path) -> None:
    partitions = Partitions(CASES["full"], tmp_path, 2)
    for batch in range(3):
        expected = counted(partitions.apply(batch))
    rescale(str(tmp_path), 2)  # as many as before, so that nothing else gives it away
    with pytest.raises(StateError, match=r"was cut anew by gpu-join rescale while its query ran.*start the query"):
        partitions.apply(3)
    partitions.open()
    assert counted(partitions.apply(2)) == expected
    partitions.apply(3)


def test_what_was_before_a_cut_stays_until_a_micro_batch_after_it_is_final(tmp_path: Path) -> None:
    partitions = Partitions(CASES["full"], tmp_path, 2)
    partitions.apply(0)
    partitions.apply(1)
    partitions.rescale(3)
    before = sorted(path.name for path in (tmp_path / "p").rglob("*.arrow"))
    assert before
    partitions.apply(1)  # repeated
    assert sorted(path.name for path in (tmp_path / "p").rglob("*.arrow")) == before
    partitions.apply(2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["g1", "manifest.json"]
    partitions.rescale(1)
    partitions.rescale(2)
    partitions.apply(3)
    partitions.apply(4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["g3", "manifest.json"]


def test_one_that_is_killed_while_the_folder_is_sealed_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partitions = Partitions(CASES["full"], tmp_path, 2)
    partitions.apply(0)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_moved", lambda *_: os._exit(3))
        pid = os.fork()
        if not pid:
            rescale(str(tmp_path), 3)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    partitions.open()
    with pytest.raises(StateError, match=r"is being cut anew by gpu-join rescale.*run it again first"):
        partitions.apply(1)
    partitions.rescale(3)
    partitions.apply(1)


def test_a_query_that_stopped_between_a_snapshot_and_its_next_record_can_be_cut_anew(tmp_path: Path) -> None:
    """Its last micro-batch is final and its record gone: the folder was called damaged."""
    case = CASES["full"]
    partitions, engine = Partitions(case, tmp_path, 2), JoinEngine(case.join, "cpu")
    for batch in range(3):
        partitions.apply(batch)
    with pytest.raises(GpuJoinError, match="is gone"):
        partitions.servers[0].apply(3, case.batches[3].slice(0, 0), case.wire, alive=iter([True, False]).__next__)
    assert not list((tmp_path / "p/0").glob("*.arrow"))
    partitions.rescale(3)
    for batch, table in enumerate(case.batches):
        rows = case.wire.split(case.join, table)
        expected = engine.process(*rows.tables, orders=rows.sequences, clock_ms=case.clocks[batch])
        if batch >= 3:
            assert counted(partitions.apply(batch)) == counted([expected])
