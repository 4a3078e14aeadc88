"""A state server that stops in the middle of an exchange, one that is slow, and one whose file system is stuck."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import flight

from gpu_ops.errors import StateError
from gpu_ops.spark.server.partition import PartitionState
from gpu_ops.spark.server.server import StateServer
from gpu_ops.spark.wire import exchange as patience
from gpu_ops.spark.wire.connection import Address
from gpu_ops.spark.wire.exchange import Exchange
from gpu_ops.state import durable, files
from state.support import TOKEN, WIRE_SCHEMA, Server, expected, make_command, wire_batches

pytestmark = pytest.mark.thorough

BATCHES = wire_batches(5)
ANSWERS = expected(BATCHES)


def exchange(folder: str | None, batch: int, locate: Callable[[str | None], str], patience_s: float) -> Exchange:
    """An exchange with the server that listens where ``locate`` says."""
    command = json.loads(make_command(batch, folder, counted=True).to_json())
    return Exchange(lambda failed: (Address(locate(failed), TOKEN, patience_s=patience_s), {}), command, WIRE_SCHEMA)


def table(found: Iterator[pa.RecordBatch], batch: int) -> pa.Table:
    return pa.Table.from_batches(list(found), ANSWERS[batch].schema)


def stopping(server: Server, rows: pa.Table, for_s: float | None = None) -> Iterator[pa.RecordBatch]:
    """The rows; the server is stopped when it has had some of them, for a while or for good."""
    first, *others = rows.to_batches(max_chunksize=10)
    yield first
    time.sleep(0.3)
    os.kill(server.process.pid, signal.SIGSTOP)
    if for_s is not None:
        threading.Timer(for_s, os.kill, (server.process.pid, signal.SIGCONT)).start()
    yield from others


def test_a_server_that_stops_in_the_middle_is_replaced_and_fenced_when_it_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = str(tmp_path / "state")
    rows = [batch.to_batches(max_chunksize=10) for batch in BATCHES]
    with Server(tmp_path / "first.log") as first, Server(tmp_path / "second.log") as second:
        asked: list[str | None] = []

        def locate(failed: str | None) -> str:
            asked.append(failed)
            return first.address if failed is None else second.address

        def to(server: Server, batch: int) -> pa.Table:
            return table(exchange(folder, batch, lambda failed: server.address, 20).run(rows[batch]), batch)

        for batch in (0, 1):
            assert to(first, batch).equals(ANSWERS[batch])
        began = time.monotonic()
        stopped = exchange(folder, 2, locate, 3.0)
        found = table(stopped.run(stopping(first, BATCHES[2])), 2)
        assert 3 < time.monotonic() - began < 120
        assert found.equals(ANSWERS[2])
        assert (asked, stopped.retries) == ([None, first.address], 1)
        assert "does not answer" in caplog.text
        assert "no sign of life for 3 s" in caplog.text
        os.kill(first.process.pid, signal.SIGCONT)
        assert to(second, 3).equals(ANSWERS[3])
        assert to(first, 4).equals(ANSWERS[4])  # it notices that others went on, and reads what they did
        assert to(second, 4).equals(ANSWERS[4])


def test_a_server_that_stops_and_soon_goes_on_is_kept(tmp_path: Path) -> None:
    with Server(tmp_path / "log") as server:
        waiting = exchange(str(tmp_path / "state"), 0, lambda failed: server.address, 30)
        assert table(waiting.run(stopping(server, BATCHES[0], 2.0)), 0).equals(ANSWERS[0])
        assert waiting.retries == 0


class Flock:
    """State servers over one folder, of which those that are called are stopped or killed at random moments.

    One that was stopped goes on later, and may be called again: it must notice what others did meanwhile.
    """

    def __init__(self, folder: Path, chance: random.Random, ending: contextlib.ExitStack) -> None:
        self._folder, self._chance, self._ending = folder, chance, ending
        self._servers: dict[str, Server] = {}
        self._asleep: set[str] = set()
        self._called = ""
        self.faults: collections.Counter[str] = collections.Counter()

    def locate(self, failed: str | None) -> str:
        """One that is there, often another one than before; or a new one."""
        there = [
            address
            for address, server in self._servers.items()
            if server.process.poll() is None and address not in (*self._asleep, failed)
        ]
        if not there or (len(there) < 3 and self._chance.random() < 0.1):
            made = self._ending.enter_context(Server(self._folder / f"{len(self._servers)}.log"))
            self._servers[made.address] = made
            there = [made.address]
        self._called = self._chance.choice(there)
        return self._called

    def rows(self, table: pa.Table) -> Iterator[pa.RecordBatch]:
        """The rows of a micro-batch, with something that happens while they come, or soon after."""
        batches = table.to_batches(max_chunksize=20)
        moment = self._chance.randrange(2 * len(batches))
        for number, batch in enumerate(batches):
            if number == moment:
                self.strike()
            yield batch
        if moment >= len(batches):
            threading.Timer(self._chance.random() * 0.2, self.strike).start()

    def strike(self) -> None:
        """Something happens to the server that is called, or to one that was."""
        address = self._called
        kind = self._chance.choice(("nothing", "killed", "stopped", "stopped"))
        if kind == "nothing" or address in self._asleep:
            return
        self.faults[kind] += 1
        # By the process, not its number: it may have ended by itself meanwhile.
        self._servers[address].process.send_signal(signal.SIGKILL if kind == "killed" else signal.SIGSTOP)
        if kind == "stopped":
            self._asleep.add(address)
            threading.Timer(self._chance.random() * 8, self._wake, (address,)).start()

    def _wake(self, address: str) -> None:
        self._servers[address].process.send_signal(signal.SIGCONT)
        self._asleep.discard(address)


@pytest.mark.slow
@pytest.mark.parametrize("count", [8, pytest.param(150, marks=pytest.mark.slow)])
def test_servers_that_stop_and_die_at_any_moment_change_no_row(tmp_path: Path, count: int) -> None:
    batches = wire_batches(count, rows=100, seed=count)
    answers = expected(batches)
    with contextlib.ExitStack() as ending:
        flock = Flock(tmp_path, random.Random(count), ending)
        for number, batch in enumerate(batches):
            command = make_command(number, str(tmp_path / "state"), counted=True, options={"snapshot_every": 7})
            waiting = Exchange(
                lambda failed: (Address(flock.locate(failed), TOKEN, patience_s=2), {}),
                json.loads(command.to_json()),
                WIRE_SCHEMA,
            )
            found = list(waiting.run(flock.rows(batch)))
            assert pa.Table.from_batches(found, answers[number].schema).equals(answers[number]), number
        assert min(flock.faults[kind] for kind in ("killed", "stopped")), flock.faults
        print(f"{count} micro-batches: {dict(flock.faults)}")


@pytest.fixture
def within() -> Iterator[str]:
    """The address of a state server in this process."""
    with StateServer(TOKEN, backend="cpu") as server:
        yield f"grpc://127.0.0.1:{server.port}"


def test_a_slow_server_that_lives_is_not_shot(
    within: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    apply = PartitionState.apply

    def slowly(self: PartitionState, *args: Any, **kwargs: Any) -> Any:
        with self.activity.during("joining"):
            time.sleep(3)
            return apply(self, *args, **kwargs)

    monkeypatch.setattr(PartitionState, "apply", slowly)
    waiting = exchange(None, 0, lambda failed: within, 1.0)
    assert table(waiting.run(BATCHES[0].to_batches()), 0).equals(ANSWERS[0])
    assert waiting.retries == 0
    said = [message for message in caplog.messages if "which lives and is joining" in message]
    assert 1 <= len(said) <= 3  # now and then, not all the time


def test_a_stuck_file_system_is_named(
    within: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free, fsync = threading.Event(), os.fsync
    folder = str(tmp_path / "state")
    table(exchange(folder, 0, lambda failed: within, 5).run(BATCHES[0].to_batches()), 0)

    def stuck(handle: int) -> None:
        free.wait(60)
        fsync(handle)

    monkeypatch.setattr(files.os, "fsync", stuck)
    monkeypatch.setattr(patience, "FILES", 2)
    try:
        waiting = exchange(folder, 1, lambda failed: within, 1.0)
        with pytest.raises(StateError, match=rf"writing {folder}/p/0/.*arrow for \d+ s.*state folder does not answer"):
            table(waiting.run(BATCHES[1].to_batches()), 1)
        assert waiting.retries == 0
        assert [text for text in caplog.messages if f"writing {folder}/p/0" in text and "has waited" in text]
        # Another attempt waits for the partition, and is told the same.
        with pytest.raises(StateError, match=rf"writing {folder}/p/0/.*state folder does not answer"):
            table(exchange(folder, 1, lambda failed: within, 1.0).run(BATCHES[1].to_batches()), 1)
    finally:
        free.set()
    again = exchange(folder, 1, lambda failed: within, 20)
    assert table(again.run(BATCHES[1].to_batches()), 1).equals(ANSWERS[1])


def test_a_slow_file_system_that_moves_is_waited_for(
    within: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = durable._Summed.write

    def slowly(self: Any, data: bytes | memoryview) -> int:
        time.sleep(0.1)
        return write(self, data)

    monkeypatch.setattr(durable._Summed, "write", slowly)
    monkeypatch.setattr(durable, "_AT_ONCE", 64)
    monkeypatch.setattr(patience, "FILES", 1)
    waiting = exchange(str(tmp_path / "state"), 0, lambda failed: within, 1.0)
    began = time.monotonic()
    assert table(waiting.run(BATCHES[0].to_batches()), 0).equals(ANSWERS[0])
    assert time.monotonic() - began > 1.5
    assert waiting.retries == 0


class Forgetful(flight.FlightServerBase):
    """Lives, and has lost the call."""

    def __init__(self, said: object) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self.said, self.over = said, threading.Event()

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        self.over.wait(30)

    def do_action(self, context: Any, action: Any) -> Any:
        return iter([json.dumps({"pid": 1, "call": self.said}).encode()])


@pytest.mark.parametrize("said", [None, {"doing": "reading rows", "file": None, "seconds": 100.0}])
def test_a_call_that_got_lost_is_repeated(within: str, said: object) -> None:
    with Forgetful(said) as server:
        forgetful = f"grpc://127.0.0.1:{server.port}"
        waiting = exchange(None, 0, lambda failed: within if failed else forgetful, 1.0)
        try:
            assert table(waiting.run(BATCHES[0].to_batches()), 0).equals(ANSWERS[0])
        finally:
            server.over.set()
        assert waiting.retries == 1


def test_a_task_that_was_stopped_itself_blames_no_server() -> None:
    """Time went by, but the server was not asked meanwhile."""
    asked = patience._Asked(time.monotonic() - 1000, "grpc://here:1", 60)
    assert asked.take(None) is None
    assert asked.take({"pid": 1, "call": {"doing": "joining", "file": None, "seconds": 1000.0}}) is None
    assert asked.take(None) is None


def test_a_folder_that_is_made_while_it_is_listed_is_listed(tmp_path, monkeypatch):
    """Arrow looks for a folder that it could not list, and says that it cannot where it has come in between."""
    folder, calls = files.Files.at(tmp_path), []

    class Late:
        def get_file_info(self, selector):
            calls.append(selector)
            if len(calls) == 1:
                (tmp_path / "p").mkdir()
                raise FileNotFoundError(2, "Cannot list directory")
            return files_there.get_file_info(selector)

    files_there = folder.filesystem
    monkeypatch.setattr(folder, "filesystem", Late())
    assert folder.sizes("p") == {}
    assert len(calls) == 2
