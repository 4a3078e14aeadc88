"""A micro-batch that is prepared before it is asked for: whatever is guessed, the answers are as without."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from kernels.emulation import emulated

from gpu_ops.errors import BadInputError, StateError
from gpu_ops.join_engine import JoinEngine
from gpu_ops.operator_engine import OperatorEngine
from gpu_ops.spark.server.server import StateServer
from gpu_ops.spark.wire.connection import Address
from gpu_ops.spark.wire.exchange import Exchange
from gpu_ops.state.blocks import Block, FilePart
from state.support import TOKEN, PartitionState
from state.test_multi_partition import JOIN, WIRE, WIRE_SCHEMA, batches, command, opened

BATCHES = batches(24, rows=12)


def answers() -> list[pa.Table]:
    engine = JoinEngine(JOIN, "cpu")
    rows = [WIRE.split(JOIN, batch) for batch in BATCHES]
    return [engine.process(*r.tables, orders=r.sequences, clock_ms=1) for r in rows]


ANSWERS = answers()


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many changes each engine was given, in turn."""
    seen: list[int] = []
    original = OperatorEngine.prepare_batches

    def counted(self: OperatorEngine, rows: Any, *rest: Any, **options: Any) -> Any:
        seen.append(sum(len(table) for table in rows))
        return original(self, rows, *rest, **options)

    monkeypatch.setattr(OperatorEngine, "prepare_batches", counted)
    return seen


def guess(partition: PartitionState, batch: int, rows: pa.Table | None = None) -> bool:
    return partition.prepare_ahead(batch, BATCHES[batch] if rows is None else rows, WIRE, ())


def apply(partition: PartitionState, batch: int) -> None:
    assert partition.apply(batch, BATCHES[batch], WIRE).changelog.equals(ANSWERS[batch]), batch


def test_what_is_guessed_right_is_computed_once(tmp_path: Path, prepared: list[int]) -> None:
    partition = opened(tmp_path)
    apply(partition, 0)
    for batch in range(1, 6):
        assert guess(partition, batch)
        assert not guess(partition, batch)  # there is one already
        assert not guess(partition, batch + 1)
        apply(partition, batch)
    assert prepared == [12] * 6
    assert partition.status()["came_true"] == 5


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("every", [None, 1, 4])
def test_the_same_answers_as_without(tmp_path: Path, seed: int, every: int | None) -> None:
    """Guesses are right or wrong, micro-batches repeated with these rows or first come with others, servers killed."""
    rng = np.random.default_rng(seed)
    options = {} if every is None else {"snapshot_every": every}
    partition, came_true, guesses = opened(tmp_path, **options), 0, 0
    for batch in range(len(BATCHES)):
        if rng.random() < 0.15:
            partition.apply(batch, BATCHES[batch].slice(int(rng.integers(12))), WIRE)
            if rng.random() < 0.5 and batch + 1 < len(BATCHES):
                guess(partition, batch + 1)
        for _ in range(rng.choice([1, 1, 1, 2])):
            if rng.random() < 0.1:
                partition = opened(tmp_path, **options)
            apply(partition, batch)
            if batch + 1 == len(BATCHES):
                break
            what = rng.choice(["right", "right", "right", "wrong", "bad", "nothing"])
            following = BATCHES[batch + 1]
            if what == "right":
                guesses += guess(partition, batch + 1)
            elif what == "wrong":
                guess(partition, batch + 1, following.slice(1))
            elif what == "bad":
                bad = pa.chunked_array([pa.array(["?"] * len(following))])
                with contextlib.suppress(BadInputError):  # and is refused where it could be one
                    guess(partition, batch + 1, following.set_column(3, "c1", bad))
        came_true = max(came_true, partition.status()["came_true"])
    assert guesses
    assert came_true
    plain = opened(tmp_path / "plain")
    for batch in range(len(BATCHES)):
        apply(plain, batch)
    assert partition.rows_at(len(BATCHES)) == plain.rows_at(len(BATCHES))


def test_it_needs_what_a_repetition_loads(tmp_path: Path) -> None:
    """Not where the state is in memory alone, or each micro-batch is asked for twice."""
    memory, twice = opened(None), opened(tmp_path / "twice")
    for batch in range(5):
        for partition in (memory, twice, twice):
            apply(partition, batch)
        assert not guess(memory, batch + 1)
        assert guess(twice, batch + 1) == (batch == 0)  # what is loaded again in place of the first one is nothing


def test_a_snapshot_is_of_the_state_before_what_is_prepared(tmp_path: Path) -> None:
    """It is written when its last micro-batch is final: a repetition of that one finds what is before it."""
    partition = opened(tmp_path, snapshot_every=1)

    def written() -> list[int]:
        return sorted(int(path.stem) for path in tmp_path.rglob("*.snapshot"))

    apply(partition, 0)
    for batch in range(1, 6):
        assert guess(partition, batch)
        assert written() == ([batch - 1] if batch > 1 else [])
        apply(partition, batch)
        assert written() == [batch]
    assert guess(partition, 6)
    apply(partition, 5)
    apply(opened(tmp_path), 6)


def test_not_where_the_clock_matters(tmp_path: Path) -> None:
    inputs = [dataclasses.replace(source, ttl_ms=1000) for source in JOIN.inputs]
    join = dataclasses.replace(JOIN, inputs=tuple(inputs))
    partition = PartitionState(command(tmp_path, description=join.to_json()))
    for batch in range(4):
        partition.apply(batch, BATCHES[batch], WIRE)
        assert not guess(partition, batch + 1)


def test_guesses_end_where_none_comes_true(tmp_path: Path) -> None:
    partition = opened(tmp_path)
    made = 0
    for batch in range(20):
        apply(partition, batch)
        made += guess(partition, batch + 1, BATCHES[batch + 1].slice(1))
    assert made == 8
    assert partition.status()["came_true"] == 0


def test_rows_of_other_files_are_others(tmp_path: Path, prepared: list[int]) -> None:
    """Rows that lie in files are known by these; the same number of rows is not enough."""
    partition = opened(tmp_path)
    apply(partition, 0)
    rows = BATCHES[1].filter(pa.compute.field("__side") == 1)
    part = FilePart(1, (0, 1, 2), 0, Block("/a", 0, 8, len(rows), 1))
    assert partition.prepare_ahead(1, rows, WIRE, (part,))
    other = part._replace(block=part.block._replace(crc=2))
    partition.apply(1, rows, WIRE, parts=(other,))
    assert prepared == [12, len(rows), len(rows)]


def test_a_server_looks_only_at_rows_that_it_prepares(tmp_path: Path) -> None:
    server = StateServer(TOKEN, blocks=str(tmp_path / "blocks"))
    gone = FilePart(1, (0, 1, 2), 0, Block(str(tmp_path / "blocks" / "run" / "1" / "gone"), 0, 8, 1, 1))

    def send(batch: int, rows: list[Any], *, ahead: bool) -> tuple[list[pa.RecordBatch], dict[str, Any]]:
        def locate(failed: str | None) -> Any:
            if failed is not None:
                raise StateError(failed)
            return Address(f"grpc://127.0.0.1:{server.port}", TOKEN), {}

        whole = {**json.loads(command(tmp_path / "state", batch_id=batch).to_json()), "ahead": ahead}
        exchange = Exchange(locate, whole, WIRE_SCHEMA)
        return list(exchange.run(rows)), exchange.answer

    try:
        assert send(1, [gone], ahead=True) == ([], {"prepared": False})
        for batch in range(3):
            found, _ = send(batch, BATCHES[batch].to_batches(), ahead=False)
            assert pa.Table.from_batches(found, ANSWERS[batch].schema).equals(ANSWERS[batch])
            assert send(batch, [gone], ahead=True) == ([], {"prepared": False})
            with pytest.raises(StateError):
                send(batch + 1, [gone], ahead=True)
            assert send(batch + 1, BATCHES[batch + 1].to_batches(), ahead=True) == ([], {"prepared": True})
    finally:
        server.shutdown()


def test_rows_go_to_a_card_before_they_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is prepared ahead is in page-locked memory, and on the card, by then: nothing is staged any more."""
    with emulated():
        frame: Any = importlib.import_module("gpu_ops.cudf_backend.frame")
        staged, copied = list[int](), frame._copy_by_threads

        def counted(pieces: Any) -> None:
            staged.append(sum(to.nbytes for to, _, _ in pieces))
            copied(pieces)

        monkeypatch.setattr(frame, "_LEAST_STAGED", 1)
        monkeypatch.setattr(frame, "_copy_by_threads", counted)
        partition, ahead = PartitionState(command(tmp_path, backend="gpu")), 0
        for batch in range(len(BATCHES) - 1):
            before = len(staged)
            apply(partition, batch)
            assert (len(staged) == before) == (ahead == batch > 0)
            before = len(staged)
            if guess(partition, batch + 1):
                ahead = batch + 1
                assert len(staged) > before
        partition.close()
    assert ahead > len(BATCHES) // 2
