"""Several tasks of one partition: all bring its rows, one has them computed, each takes a share of the changes."""

from __future__ import annotations

import dataclasses
import functools
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import flight

from gpu_ops.errors import DescriptionError, GpuJoinError
from gpu_ops.spark.server import server as server_module
from gpu_ops.spark.server.partition import PartitionState
from gpu_ops.spark.wire.command import ApplyCommand
from gpu_ops.spark.wire.connection import Address
from gpu_ops.spark.wire.exchange import Exchange
from state.support import TOKEN, WIRE_SCHEMA, expected, make_command, wire_batches

BATCHES = wire_batches(4)
ANSWERS = expected(BATCHES)


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The micro-batches that were computed."""
    seen: list[int] = []
    apply = PartitionState._apply

    def counted(self: PartitionState, batch_id: int, *rest: Any) -> Any:
        seen.append(batch_id)
        return apply(self, batch_id, *rest)

    monkeypatch.setattr(PartitionState, "_apply", counted)
    return seen


@pytest.fixture
def address(tmp_path: Path) -> Iterator[Address]:
    served = server_module.StateServer(TOKEN, blocks=str(tmp_path))
    yield Address(f"grpc://127.0.0.1:{served.port}", TOKEN)
    served.shutdown()


def share(address: Address, folder: Path, batch: int, number: int, shares: int, **changes: Any) -> pa.Table:
    """What one of several tasks gets."""
    rows = BATCHES[batch]
    answers = {"answers": str(folder / "run" / str(batch)), "least_bytes": 1}
    of = {"share": number, "shares": shares, "rows": rows.num_rows, "shared_in": "run", "counted": True}
    command = {**json.loads(make_command(batch, str(folder / "s")).to_json()), **answers, **of, **changes}
    found = Exchange(lambda _: (address, {}), command, WIRE_SCHEMA).run(rows.to_batches(max_chunksize=7))
    return pa.Table.from_batches(found, ANSWERS[batch].schema)


@pytest.mark.parametrize("answers", ["in files", "over the connection"])
@pytest.mark.parametrize("shares", [2, 5, 64])
def test_one_computes_and_each_takes_its_share(
    address: Address, tmp_path: Path, applied: list[int], shares: int, answers: str
) -> None:
    """In any order and at once, by files and over the connection; a task that is repeated gets the same share."""
    for batch, answer in enumerate(ANSWERS):
        with ThreadPoolExecutor(shares) as threads:
            asked = [*reversed(range(shares)), 0, shares - 1]
            how: dict[str, Any] = {} if answers == "in files" else {"answers": None}
            found = list(threads.map(functools.partial(share, address, tmp_path, batch, shares=shares, **how), asked))
        by_share = dict(zip(asked[:shares], found, strict=False))
        assert pa.concat_tables(by_share[number] for number in range(shares)).equals(answer)
        assert found[-2:] == [by_share[0], by_share[shares - 1]]
        sizes = [rows.num_rows for rows in by_share.values()]
        assert max(sizes) - min(sizes) <= 1
    assert applied == [0, 1, 2, 3]


def test_a_small_answer_is_the_first_tasks(address: Address, tmp_path: Path, applied: list[int]) -> None:
    found = [share(address, tmp_path, 0, number, 3, least_bytes=1 << 20) for number in (1, 0, 2)]
    assert found[1].equals(ANSWERS[0])
    assert [rows.num_rows for rows in found] == [0, ANSWERS[0].num_rows, 0]
    assert applied == [0]


def test_a_run_of_the_query_that_repeats_the_micro_batch_computes_it_again(
    address: Address, tmp_path: Path, applied: list[int]
) -> None:
    for run in ("run", "other", "run"):
        found = [share(address, tmp_path, 0, number, 2, shared_in=run) for number in (1, 0)]
        assert pa.concat_tables(reversed(found)).equals(ANSWERS[0])
    assert applied == [0, 0, 0]


def test_when_the_first_to_come_is_gone_the_next_one_has_its_rows_computed(
    address: Address, tmp_path: Path, applied: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was killed while it sent, and another one waited for what it would get."""
    begun, go_on = threading.Event(), threading.Event()
    receive = server_module._receive

    def breaks_off(*arguments: Any) -> Any:
        if begun.is_set():
            return receive(*arguments)
        begun.set()
        go_on.wait(30)
        raise flight.FlightCancelledError("the task is gone")

    monkeypatch.setattr(server_module, "_receive", breaks_off)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(share, address, tmp_path, 0, 0, 2)
        begun.wait(30)
        second = threads.submit(share, address, tmp_path, 0, 1, 2)
        go_on.set()
        found = [first.result(), second.result()]  # the first asks again
    assert pa.concat_tables(found).equals(ANSWERS[0])
    assert applied == [0]


def test_a_refusal_is_every_tasks(address: Address, tmp_path: Path) -> None:
    """A micro-batch that does not follow: each of the tasks is told."""
    for number in range(2):
        with pytest.raises(GpuJoinError, match="nothing is stored"):
            share(address, tmp_path, 3, number, 2)


@pytest.mark.parametrize("bad", [{"share": 2}, {"share": -1}, {"shares": 0}, {"rows": -1}, {"share": "0"}])
def test_shares_that_there_are_not(bad: dict[str, Any]) -> None:
    given = json.loads(dataclasses.replace(make_command(), shares=2).to_json())
    ApplyCommand.parse(json.dumps(given).encode())
    with pytest.raises(DescriptionError):
        ApplyCommand.parse(json.dumps({**given, **bad}).encode())
