"""Which micro-batch may follow, and that its answer is the same however often and wherever it is given."""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from conftest import slow_but
from oracle.drive import Backend

from gpu_ops.descriptions.inputs import Input
from gpu_ops.errors import BadInputError, DescriptionError, StateError
from gpu_ops.join_engine import JoinEngine
from gpu_ops.spark.server import recovery
from gpu_ops.spark.server.partition import AbandonedError, Applied
from gpu_ops.spark.wire.command import ApplyCommand, Wire
from gpu_ops.state.durable import PartitionLog
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import Manifest
from gpu_ops.state.pieces import whole
from state.support import (
    PRICES,
    WIRE,
    WIRE_SCHEMA,
    PartitionState,
    expected,
    make_command,
    make_join,
    wire_batches,
    with_bytes,
)

BATCHES = wire_batches(12)
ANSWERS = expected(BATCHES)
SNAPSHOTS = [{}, {"snapshot_every": 1}, {"snapshot_every": 3}]


def opened(state: object = None, **changes: Any) -> PartitionState:
    return PartitionState(make_command(state=None if state is None else str(state), **changes))


def apply(partition: PartitionState, batch: int, **options: Any) -> Applied:
    return partition.apply(batch, BATCHES[batch], WIRE, **options)


def record_file(folder: Path, batch: int, partition: int = 0) -> Path:
    return folder / "p" / str(partition) / f"{batch:020d}.arrow"


def gone_after(calls: int) -> Any:
    """A caller that is there for so many questions."""
    left = [calls]

    def alive() -> bool:
        left[0] -= 1
        return left[0] >= 0

    return alive


# --- the same answers --------------------------------------------------------------------------


@pytest.mark.parametrize("options", [*SNAPSHOTS, {"tiny": True, "snapshot_every": 2}])
@pytest.mark.parametrize("kept", ["folder", "memory"])
def test_answers_are_those_of_an_engine(tmp_path: Path, options: dict[str, Any], kept: str) -> None:
    partition = opened(tmp_path if kept == "folder" else None, options=options)
    for batch, answer in enumerate(ANSWERS):
        found = apply(partition, batch)
        assert found.changelog.equals(answer)
        assert found.backend == "cpu"
        assert {"commit_ms", "batch_id", "partition", "rows_out_insert"} <= found.metrics.keys()
        assert found.metrics["batch_id"] == batch


@pytest.mark.parametrize("seed", range(4))
def test_a_log_has_row_kinds_as_bytes_or_as_text(tmp_path: Path, seed: int) -> None:
    """Some records of each, as behind an upgrade: restarted, repeated, and of a micro-batch that comes again."""
    rng, partition = np.random.default_rng(seed), opened(tmp_path)
    log = PartitionLog(Files.at(str(tmp_path)), partition._manifest, 0)
    kinds = set()
    for batch, answer in enumerate(ANSWERS):
        if rng.random() < 0.5:
            partition.close()
            partition = opened(tmp_path, options={"snapshot_every": 1000})
        for _ in range(1 + (rng.random() < 0.3)):
            rows = with_bytes(partition.description, WIRE, BATCHES[batch]) if rng.random() < 0.5 else BATCHES[batch]
            assert partition.apply(batch, rows, WIRE).changelog.equals(answer)
        assert log.read_record(batch).table.schema == rows.schema
        kinds.add(rows.schema.field("c3").type)
    assert kinds == {pa.string(), pa.uint8()}


@pytest.mark.parametrize("options", SNAPSHOTS)
@pytest.mark.parametrize("kept", ["folder", "memory"])
def test_repetitions_answer_alike(tmp_path: Path, options: dict[str, Any], kept: str) -> None:
    partition = opened(tmp_path if kept == "folder" else None, options=options)
    for batch, answer in enumerate(ANSWERS):
        for _ in range(1 + batch % 3):
            assert apply(partition, batch).changelog.equals(answer)


@pytest.mark.parametrize("kept", ["folder", "memory"])
def test_a_shared_answer_is_given_again(tmp_path: Path, kept: str) -> None:
    """To whoever asks in the same run with as many rows; the state goes on as if it had been asked for once."""
    partition = opened(tmp_path if kept == "folder" else None)
    for batch, answer in enumerate(ANSWERS):
        first = apply(partition, batch, shared_in="run")
        assert first.changelog.equals(answer)
        assert apply(partition, batch, shared_in="run").metrics is first.metrics
        if batch % 3 == 1:
            again = apply(partition, batch, shared_in="another run")
            assert again.metrics is not first.metrics
            assert again.changelog.equals(answer)
        elif batch % 3 == 2:
            assert apply(partition, batch).metrics is not first.metrics
            shorter = partition.apply(batch, BATCHES[batch].slice(1), WIRE, shared_in="run")
            assert shorter.metrics is not first.metrics
            assert apply(partition, batch, shared_in="run").changelog.equals(answer)


def test_rows_that_arrive_in_another_order_answer_alike(tmp_path: Path) -> None:
    partition = opened(tmp_path)
    rng = np.random.default_rng(3)
    for batch, answer in enumerate(ANSWERS):
        for _ in range(2):
            table = BATCHES[batch].take(pa.array(rng.permutation(BATCHES[batch].num_rows)))
            assert partition.apply(batch, table, WIRE).changelog.equals(answer)


@pytest.mark.parametrize("options", SNAPSHOTS)
def test_a_restart_at_any_point_answers_alike(tmp_path: Path, options: dict[str, Any]) -> None:
    for batch, answer in enumerate(ANSWERS):
        assert apply(opened(tmp_path, options=options), batch).changelog.equals(answer)
        assert apply(opened(tmp_path, options=options), batch).changelog.equals(answer)
    assert bool(list((tmp_path / "p" / "0").glob("*.snapshot"))) == bool(options)


@pytest.mark.parametrize("seed", slow_but(range(12), *range(4)))
def test_servers_that_take_turns_answer_alike(tmp_path: Path, seed: int) -> None:
    """Three servers, some with stale state, some just started; batches repeated at will."""
    rng = np.random.default_rng(seed)
    options = SNAPSHOTS[seed % len(SNAPSHOTS)]
    servers = [opened(tmp_path, options=options) for _ in range(3)]
    batch = 0
    while batch < len(BATCHES):
        which = int(rng.integers(3))
        if rng.random() < 0.2:
            servers[which] = opened(tmp_path, options=options)
        if batch > 1 and rng.random() < 0.2:  # a task that nobody waits for any more
            with pytest.raises(StateError):
                apply(opened(tmp_path, options=options), batch - 2)
        if rng.random() < 0.2:
            with pytest.raises(AbandonedError):
                apply(servers[which], batch, alive=gone_after(int(rng.integers(2))))
        assert apply(servers[which], batch).changelog.equals(ANSWERS[batch])
        batch += int(rng.random() < 0.7)


def test_state_passes_between_backends(tmp_path: Path, backend: Backend) -> None:
    kinds = ("gpu" if backend.gpu else "cpu", "cpu")
    options = {"snapshot_every": 2, "tiny": backend.name.endswith("-tiny")}
    for batch, answer in enumerate(ANSWERS):
        partition = opened(tmp_path, backend=kinds[batch % 2], options=options)
        assert apply(partition, batch).changelog.equals(answer)
        partition.close()


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("options", [*SNAPSHOTS, {"tiny": True}])
def test_a_snapshot_is_left_of_what_spark_is_done_with(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *, ahead: bool
) -> None:
    def snapshots() -> list[int]:
        return sorted(int(file.stem) for file in tmp_path.glob("p/0/*.snapshot"))

    monkeypatch.setattr(recovery, "WORTH_SECONDS", 0.0)
    partition = opened(tmp_path, options=options)
    for batch in range(4):
        assert apply(partition, batch).changelog.equals(ANSWERS[batch])
    if ahead:
        assert partition.prepare_ahead(4, BATCHES[4], WIRE, ()) or "snapshot_every" in options
    before = snapshots()
    partition.close(5 if ahead else 3)  # not what it has
    assert snapshots() == before
    for batch in range(3, 6):  # the last one again, from the folder
        assert apply(partition, batch).changelog.equals(ANSWERS[batch])
    if ahead:
        assert partition.prepare_ahead(6, BATCHES[6], WIRE, ()) or "snapshot_every" in options
    partition.close(6)
    assert snapshots() == [6]
    assert not list(tmp_path.glob("p/0/*.arrow"))
    partition.close(6)  # it has nothing
    for batch in range(6, len(ANSWERS)):
        assert apply(partition, batch).changelog.equals(ANSWERS[batch])


def test_empty_micro_batches(tmp_path: Path) -> None:
    none = WIRE_SCHEMA.empty_table()
    partition = opened(tmp_path)
    for batch in range(3):
        answer = partition.apply(batch, none, WIRE)
        assert answer.changelog.num_rows == 0
        assert answer.changelog.schema == make_join().output_schema
    assert opened(tmp_path).apply(3, BATCHES[0], WIRE).changelog.equals(ANSWERS[0])


def test_time_of_a_repetition_is_that_of_the_first(tmp_path: Path) -> None:
    join = make_join(how="left", right=Input("prices", PRICES, ttl_ms=1000))
    now = [10_000]
    commands = make_command(state=str(tmp_path), description=join.to_json())

    def start() -> PartitionState:
        return PartitionState(commands, clock=lambda: now[0])

    def lines(side: int, order: int) -> pa.Table:
        own = {"c2": order, "c3": "+I"} if side == 0 else {"c4": order}
        line = {"__side": side, "__order": order, "c0": "x", "c1": 2.5, **own}
        return pa.Table.from_pylist([line], schema=WIRE_SCHEMA)

    partition = start()
    partition.apply(0, lines(1, 1), WIRE)
    now[0] += 500
    first = partition.apply(1, lines(0, 2), WIRE).changelog
    assert first["price"].to_pylist() == [2.5]
    now[0] += 5000
    assert partition.apply(1, lines(0, 2), WIRE).changelog.equals(first)
    partition = start()
    assert partition.apply(1, lines(0, 2), WIRE).changelog.equals(first)
    assert partition.apply(2, lines(0, 3), WIRE).changelog["price"].to_pylist()[-1] is None
    files = Files.at(str(tmp_path))
    log = PartitionLog(files, Manifest.of(files), 0)
    now[0] = 0  # a clock that was set back
    assert partition.apply(3, lines(0, 4), WIRE).changelog["price"].to_pylist() == [None]
    assert [log.read_record(batch).clock_ms for batch in range(4)] == [10_000, 10_500, 15_500, 0]


@pytest.mark.parametrize("every", [1, 2, 50])
def test_a_clock_that_jumps_gives_the_same_rows_after_restarts_and_repetitions(tmp_path: Path, every: int) -> None:
    """The clock of a micro-batch is in its record; what was the greatest so far matters nowhere, nor to a snapshot."""
    join = make_join(how="left", right=Input("prices", PRICES, ttl_ms=1000))
    clocks = [10_000, 10_400, 3_610_000, 10_800, 11_200, 11_600, 9_000, 12_700, 12_800]
    batches, rng = wire_batches(len(clocks), seed=7), random.Random(every)
    engine = JoinEngine(join, "cpu")
    command = make_command(state=str(tmp_path), description=join.to_json(), options={"snapshot_every": every})
    partition = PartitionState(command)
    for batch, (clock, rows) in enumerate(zip(clocks, batches, strict=True)):
        own = WIRE.split(join, rows)
        expected = engine.process(*own.tables, orders=own.sequences, clock_ms=clock)
        for later in (0, 7_000_000)[: rng.choice((1, 1, 2))]:  # a repetition goes by the first one's
            assert partition.apply(batch, rows, WIRE, clock_ms=clock + later).changelog.equals(expected)
        if rng.random() < 0.4:
            partition = PartitionState(command)


# --- refusals ----------------------------------------------------------------------------------


def test_batches_that_do_not_follow_are_refused(tmp_path: Path) -> None:
    partition = opened(tmp_path, options={"snapshot_every": 2})
    for batch in range(6):
        apply(partition, batch)
    for server in (partition, opened(tmp_path)):
        with pytest.raises(StateError, match=r"ends with batch 5, Spark asks for batch 8.*older than the checkpoint"):
            apply(server, 8)
        with pytest.raises(StateError, match=r"is at batch 5, Spark asks for batch 3.*older than the state"):
            apply(server, 3)
        with pytest.raises(StateError, match=r"is at batch 5, Spark asks for batch 0"):
            apply(server, 0)
        assert apply(server, 5).changelog.equals(ANSWERS[5])
    assert apply(partition, 6).changelog.equals(ANSWERS[6])


def test_nothing_stored(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"nothing is stored in .*asks for batch 4"):
        apply(opened(tmp_path / "s"), 4)
    assert not (tmp_path / "s").exists()
    apply(opened(tmp_path / "s"), 0)
    with pytest.raises(StateError, match=r"nothing is stored in .*/s/p/1, .*asks for batch 4"):
        apply(opened(tmp_path / "s", partition=1), 4)


def test_missing_record(tmp_path: Path) -> None:
    partition = opened(tmp_path)
    for batch in range(5):
        apply(partition, batch)
    record_file(tmp_path, 2).unlink()
    with pytest.raises(StateError, match=rf"{record_file(tmp_path, 2)} is missing"):
        apply(opened(tmp_path), 5)
    assert apply(partition, 5).changelog.equals(ANSWERS[5])  # a server that still holds the state goes on


@pytest.mark.parametrize("kind", ["arrow", "snapshot"])
def test_corrupt_file(tmp_path: Path, kind: str) -> None:
    partition = opened(tmp_path, options={"snapshot_every": 3} if kind == "snapshot" else {})
    for batch in range(5):
        apply(partition, batch)
    path = tmp_path / "p" / "0" / f"{3:020d}.{kind}"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    server = opened(tmp_path)
    for _ in range(2):
        with pytest.raises(StateError, match=rf"{path} is damaged"):
            apply(server, 5)


def test_the_record_of_the_repeated_batch_is_not_needed(tmp_path: Path) -> None:
    partition = opened(tmp_path)
    for batch in range(3):
        apply(partition, batch)
    record_file(tmp_path, 2).write_bytes(b"half a record")
    assert apply(opened(tmp_path), 2).changelog.equals(ANSWERS[2])
    assert apply(opened(tmp_path), 3).changelog.equals(ANSWERS[3])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_id": "query-2"}, "belongs to query query-1"),
        ({"partitions": 3}, "cut into 2 partitions"),
        ({"description": make_join(how="left").to_json()}, "how='full', now 'left'"),
        (
            {"description": make_join(right=Input("prices", PRICES.set(1, pa.field("price", pa.int64())))).to_json()},
            "column 'price' was double, now int64",
        ),
    ],
)
def test_other_owners(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    apply(opened(tmp_path), 0)
    for batch in (0, 1):
        with pytest.raises(StateError, match=message):
            apply(opened(tmp_path, **changes), batch)
    assert apply(opened(tmp_path), 1).changelog.equals(ANSWERS[1])


def test_in_memory_only() -> None:
    partition = opened()
    apply(partition, 0)
    apply(partition, 1)
    for batch in (0, 3, 4):
        with pytest.raises(StateError, match=r"state= was not given.*holds the state after batch 1; batch"):
            apply(partition, batch)
    assert apply(partition, 1).changelog.equals(ANSWERS[1])
    assert apply(partition, 2).changelog.equals(ANSWERS[2])
    with pytest.raises(StateError, match=r"holds nothing; batch 3 does not follow. A restart is refused"):
        apply(opened(), 3)


# --- failures half-way -------------------------------------------------------------------------


@pytest.mark.parametrize("kept", ["folder", "memory"])
@pytest.mark.parametrize("calls", [0, 1])
def test_an_abandoned_repetition_changes_nothing(tmp_path: Path, kept: str, calls: int) -> None:
    """As when Spark kills the slower of two attempts: its rows end early, the other's answer counts."""
    partition = opened(tmp_path if kept == "folder" else None)
    apply(partition, 0)
    apply(partition, 1)
    with pytest.raises(AbandonedError):
        partition.apply(1, BATCHES[1].slice(0, 7), WIRE, alive=gone_after(calls))
    for batch in (2, 3):
        assert apply(partition, batch).changelog.equals(ANSWERS[batch])
    if kept == "folder":
        assert apply(opened(tmp_path), 4).changelog.equals(ANSWERS[4])


@pytest.mark.parametrize("kept", ["folder", "memory"])
def test_bad_rows_change_nothing(tmp_path: Path, kept: str) -> None:
    partition = opened(tmp_path if kept == "folder" else None)
    apply(partition, 0)
    apply(partition, 1)
    kinds = pa.array(["?"] * BATCHES[2].num_rows)
    bad = BATCHES[2].set_column(WIRE_SCHEMA.get_field_index("c3"), "c3", kinds)
    for batch in (1, 2):
        with pytest.raises(BadInputError, match="unknown row kind"):
            partition.apply(batch, bad, WIRE)
    assert apply(partition, 2).changelog.equals(ANSWERS[2])
    assert apply(partition, 3).changelog.equals(ANSWERS[3])


def test_a_record_that_cannot_be_written_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partition = opened(tmp_path)
    apply(partition, 0)

    def full(*_: object) -> None:
        raise StateError("no space left")

    monkeypatch.setattr(PartitionLog, "write_record", full)
    for _ in range(2):
        with pytest.raises(StateError, match="no space"):
            apply(partition, 1)
    monkeypatch.undo()
    assert apply(partition, 1).changelog.equals(ANSWERS[1])
    assert apply(opened(tmp_path), 2).changelog.equals(ANSWERS[2])


def test_a_snapshot_that_cannot_be_written_is_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def full(_: PartitionLog, version: int, *rest: object, **facts: object) -> int:
        tries.append(version)
        raise StateError("no space left")

    monkeypatch.setattr(PartitionLog, "write_snapshot", full)
    partition = opened(tmp_path, options={"snapshot_every": 2})
    for batch, answer in enumerate(ANSWERS):
        assert apply(partition, batch).changelog.equals(answer)
    assert tries == [2]  # and again only after a while


def test_a_defect_makes_it_reload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partition = opened(tmp_path)
    apply(partition, 0)
    apply(partition, 1)

    def broken(*_: object, **__: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("gpu_ops.operator_engine.OperatorEngine.prepare_batches", broken)
        with pytest.raises(MemoryError):
            apply(partition, 2)
    assert partition.status()["version"] is None
    assert apply(partition, 2).changelog.equals(ANSWERS[2])


def test_a_batch_that_another_server_repeated_is_taken_from_the_folder(tmp_path: Path) -> None:
    """The log decides, even when a repetition brought other rows than the first attempt."""
    slow, quick = opened(tmp_path), opened(tmp_path)
    apply(slow, 0)
    slow.apply(1, BATCHES[1].slice(0, 3), WIRE)
    assert apply(quick, 1).changelog.equals(ANSWERS[1])
    assert apply(slow, 2).changelog.equals(ANSWERS[2])


# --- snapshots ---------------------------------------------------------------------------------


@pytest.fixture
def large_snapshots(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, list[int]]]:
    """Every snapshot counts as large: it is written once the event is set; and which versions were begun."""
    go, begun = threading.Event(), []
    write = PartitionLog.write_snapshot

    def waits(log: PartitionLog, version: int, *rest: Any, **facts: Any) -> int:
        begun.append(version)
        assert go.wait(60)
        return write(log, version, *rest, **facts)

    monkeypatch.setattr(PartitionLog, "write_snapshot", waits)
    monkeypatch.setattr("gpu_ops.spark.server.recovery._WRITTEN_AT_ONCE", -1)
    yield go, begun
    go.set()


def test_micro_batches_go_on_while_a_snapshot_is_written(
    tmp_path: Path, large_snapshots: tuple[threading.Event, list[int]]
) -> None:
    """It holds the version that it was begun at, and nothing is deleted before it is there."""
    go, begun = large_snapshots
    partition = opened(tmp_path, options={"snapshot_every": 2})
    for batch, answer in enumerate(ANSWERS):
        assert apply(partition, batch).changelog.equals(answer)
    assert begun == [2]
    folder = tmp_path / "p" / "0"
    assert not list(folder.glob("*.snapshot"))
    assert len(list(folder.glob("*.arrow"))) == len(ANSWERS)
    # a server that stops without waiting leaves a folder that says the same
    assert apply(opened(tmp_path), len(ANSWERS) - 1).changelog.equals(ANSWERS[-1])
    go.set()
    partition.close()
    assert len(list(folder.glob("*.snapshot"))) == 1
    assert len(list(folder.glob("*.arrow"))) == len(ANSWERS) - 2
    assert apply(opened(tmp_path), len(ANSWERS) - 1).changelog.equals(ANSWERS[-1])
    for record in folder.glob("*.arrow"):
        record.unlink()
    plain = opened(tmp_path / "plain")
    for batch in range(2):
        apply(plain, batch)
    with opened(tmp_path).held_at(2) as held, opened(tmp_path / "plain").held_at(2) as expected:
        assert whole(held.tables) == whole(expected.tables)


def test_a_snapshot_that_fails_beside_micro_batches_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What a folder may refuse is a warning, as the log is enough; anything else is the next micro-batch's error."""
    monkeypatch.setattr("gpu_ops.spark.server.recovery._WRITTEN_AT_ONCE", -1)
    failures: list[Exception] = [StateError("no space left"), MemoryError("none left")]
    for failure in failures:
        folder = tmp_path / type(failure).__name__

        def fails(*_: object, failure: Exception = failure, **__: object) -> int:
            raise failure

        monkeypatch.setattr(PartitionLog, "write_snapshot", fails)
        partition = opened(folder, options={"snapshot_every": 2})
        for batch in range(3):
            apply(partition, batch)
        if isinstance(failure, StateError):
            partition.close()
            assert "no snapshot of version 2: no space left" in caplog.text
        else:
            with pytest.raises(MemoryError, match="none left"):
                partition.close()
        assert apply(opened(folder), 3).changelog.equals(ANSWERS[3])


def test_snapshots_cost_no_more_than_the_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "RECORD_COST", 0)
    monkeypatch.setattr(recovery, "MIN_RECORDS", 2)
    sizes = []
    write = PartitionLog.write_snapshot

    def counted(log: PartitionLog, *rest: Any, **facts: Any) -> int:
        sizes.append(write(log, *rest, **facts))
        return sizes[-1]

    monkeypatch.setattr(PartitionLog, "write_snapshot", counted)
    batches = wire_batches(80, seed=5)
    partition = opened(tmp_path)
    logged, most = 0, 0
    for batch, table in enumerate(batches):
        partition.apply(batch, table, WIRE)
        logged += record_file(tmp_path, batch).stat().st_size
        most = max(most, len(list((tmp_path / "p" / "0").iterdir())))
    assert 3 <= len(sizes) <= 40
    assert sum(sizes[:-1]) <= logged
    assert most < 40
    assert len(list((tmp_path / "p" / "0").glob("*.snapshot"))) == 1
    assert opened(tmp_path).apply(79, batches[79], WIRE).changelog.equals(expected(batches)[79])


def test_small_records_do_not_pile_up(tmp_path: Path) -> None:
    partition = opened(tmp_path)
    for batch in range(3 * recovery.MIN_RECORDS):
        partition.apply(batch, BATCHES[0].slice(0, 1), WIRE)
    assert len(list((tmp_path / "p" / "0").iterdir())) <= recovery.MIN_RECORDS + 2


# --- the wire ----------------------------------------------------------------------------------


def test_split_takes_sides_apart() -> None:
    join = make_join()
    table = pa.Table.from_batches(BATCHES[0].to_batches(max_chunksize=7))
    for rows in (
        table,
        table.sort_by("__side"),
        table.filter(pa.compute.field("__side") == 1),
        table.slice(0, 0),
    ):
        sides = WIRE.split(join, rows)
        for number, (side, order) in enumerate(zip(sides.tables, sides.sequences, strict=True)):
            own = [line for line in rows.to_pylist() if line["__side"] == number]
            union_columns = {column[number]: column[2] for column in WIRE.union_columns if column[number] is not None}
            assert side.column_names == (["id", "item", "amount", "op"] if number == 0 else PRICES.names)
            assert side.to_pylist() == [{name: line[union_columns[name]] for name in side.column_names} for line in own]
            assert order.tolist() == [line["__order"] for line in own]


@pytest.mark.parametrize(
    ("union_columns", "message"),
    [
        (WIRE.union_columns[:-1], "input 'prices': the union columns carry 'item', 'price'; its columns are"),
        ((*WIRE.union_columns, ("id", None, "c5")), "input 'orders': the union columns carry"),
        ((*WIRE.union_columns[:-1], (None, "until", "c4")), "input 'prices': the union columns carry"),
    ],
)
def test_union_columns_that_do_not_fit(union_columns: Any, message: str) -> None:
    with pytest.raises(DescriptionError, match=message):
        dataclasses.replace(WIRE, union_columns=union_columns).check(make_join(), WIRE_SCHEMA)


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("__side", pa.array([0, 1, 2], pa.int8()), r"is 0 \(left\) or 1 \(right\) \(for example 2\)"),
        ("__side", pa.array([0, None, 1], pa.int8()), "holds nulls"),
        ("__order", pa.array([1, None, 3], pa.int64()), "holds nulls"),
    ],
)
def test_rows_that_cannot_be_split(column: str, values: pa.Array, message: str) -> None:
    table = BATCHES[0].slice(0, 3)
    with pytest.raises(BadInputError, match=message):
        WIRE.split(make_join(), table.set_column(table.schema.get_field_index(column), column, values))


def test_command_travels() -> None:
    command = make_command(3, "s3://b/x", options={"snapshot_every": 5}, counted=True)
    assert ApplyCommand.parse(command.to_json().encode()) == command
    assert Wire.from_json(WIRE.to_json()) == WIRE
