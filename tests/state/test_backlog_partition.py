"""A partition that begins with a backlog: restarts, repetitions and snapshots before, at and after its end."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from gpu_ops.join_engine import JoinEngine
from gpu_ops.spark.tasks.engine import left_over
from gpu_ops.spark.wire.command import ApplyCommand
from gpu_ops.state.durable import PartitionLog, Record
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import Manifest
from state.support import WIRE, PartitionState, expected, make_command, make_join, wire_batches

BATCHES = wire_batches(9)
LIVE = 6
"""The first micro-batch that is not backlog."""


def rows(tables: list[pa.Table]) -> Counter[str]:
    counted: Counter[str] = Counter()
    for line in pa.concat_tables(tables).to_pylist():
        kind = line.pop("row_kind", "+I")
        counted[str(line)] += 1 if kind in ("+I", "+U") else -1
    return +counted


def answers() -> list[pa.Table]:
    engine = JoinEngine(make_join(), "cpu", backlog=True)
    found = []
    for number, batch in enumerate(BATCHES):
        sides = WIRE.split(engine.description, batch)
        table = engine.process(*sides.tables, orders=sides.sequences, clock_ms=number, backlog=number < LIVE)
        found.append(table)
    return found


ANSWERS = answers()
OPTIONS: list[dict[str, Any]] = [{"backlog": True}, {"backlog": True, "snapshot_every": 2}]


def opened(tmp_path: Path | None, **options: Any) -> PartitionState:
    return PartitionState(make_command(state=None if tmp_path is None else str(tmp_path), options=options))


def apply(partition: PartitionState, batch: int, *, backlog: bool) -> None:
    """A micro-batch, and what it has to say, whatever it is told now."""
    found = partition.apply(batch, BATCHES[batch], WIRE, clock_ms=batch, backlog=backlog)
    assert found.changelog.equals(ANSWERS[batch]), batch


def test_the_answers_say_something() -> None:
    assert not any(table.num_rows for table in ANSWERS[:LIVE])
    assert rows(ANSWERS) == rows(expected(BATCHES))
    assert ANSWERS[LIVE].num_rows > 50


@pytest.mark.parametrize(
    "options", [{"backlog": True}, {"backlog": True, "snapshot_every": 2}], ids=["log", "snapshots"]
)
@pytest.mark.parametrize("restart", [False, True])
def test_a_repetition_goes_by_what_the_micro_batch_was(tmp_path: Path, options: dict[str, Any], restart: bool) -> None:
    partition = opened(tmp_path, **options)
    for batch in range(len(BATCHES)):
        apply(partition, batch, backlog=batch < LIVE)
        if restart:
            partition.close()
            partition = opened(tmp_path, **options)
        # now the query has another trigger
        apply(partition, batch, backlog=batch >= LIVE)


def test_in_memory_only() -> None:
    partition = opened(None, backlog=True)
    for batch in range(len(BATCHES)):
        for backlog in (batch < LIVE, batch >= LIVE):
            apply(partition, batch, backlog=backlog)


def test_a_live_partition_stays_live_and_the_option_may_go(tmp_path: Path) -> None:
    partition = opened(tmp_path, backlog=True)
    for batch in range(LIVE):
        apply(partition, batch, backlog=True)
    partition.close()
    partition = opened(tmp_path)
    apply(partition, LIVE, backlog=False)
    for batch in range(LIVE + 1, len(BATCHES)):
        apply(partition, batch, backlog=True)


@pytest.mark.parametrize(
    "options", [{"backlog": True}, {"backlog": True, "snapshot_every": 2}], ids=["log", "snapshots"]
)
def test_the_end_of_a_backlog(tmp_path: Path, options: dict[str, Any]) -> None:
    partition, manifest = opened(tmp_path, **options), Manifest(make_join().to_json(), 2, "query-1")
    log = PartitionLog(Files.at(str(tmp_path)), manifest, 0)
    for batch in range(len(BATCHES)):
        apply(partition, batch, backlog=batch < LIVE)
        assert log.in_backlog(batch + 1) == (batch < LIVE)
        found = list(left_over(str(tmp_path), manifest, 0, batch + 1))
        said = rows(found)
        assert said == (rows(expected(BATCHES[: batch + 1])) if batch < LIVE else Counter())


def test_folders_and_commands_from_before_there_were_backlogs(tmp_path: Path) -> None:
    text = make_command().to_json()
    data = {name: value for name, value in json.loads(text).items() if name != "backlog"}
    assert ApplyCommand.parse(json.dumps(data).encode()) == make_command()
    log = PartitionLog(Files.at(str(tmp_path)), Manifest(make_join().to_json(), 2, "query-1"), 0)
    for backlog in (False, True):
        record = Record(BATCHES[0], 3, WIRE.to_json(), backlog=backlog)
        log.write_record(0, record)
        assert b"backlog" not in (tmp_path / "p/0" / f"{0:020d}.arrow").read_bytes() or backlog
        assert dataclasses.replace(log.read_record(0), table=BATCHES[0]) == record
        assert log.in_backlog(1) == backlog
