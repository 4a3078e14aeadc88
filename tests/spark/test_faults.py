"""State servers that die, and an exchange that breaks off in every place."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from conftest import slow_but
from pyarrow import flight
from state.test_partition import opened

import gpu_ops
from gpu_ops.errors import StateError
from gpu_ops.spark.driver import pools
from gpu_ops.spark.driver.pools import Death
from gpu_ops.spark.driver.process import EmbeddedServers, Launcher, tail_of
from gpu_ops.spark.driver.registry import JoinState
from gpu_ops.spark.server.server import StateServer
from gpu_ops.spark.wire.command import LocateRequest, ReportRequest
from gpu_ops.spark.wire.connection import Address, translate
from gpu_ops.spark.wire.exchange import Exchange, ask
from gpu_ops.state import files
from spark.support import Sink, Source, slow_join, start

SCHEMA = pa.schema([("x", pa.int64())])


def batch(*values: int) -> pa.RecordBatch:
    return pa.record_batch([pa.array(values, pa.int64())], schema=SCHEMA)


class StandIn(flight.FlightServerBase):
    """Answers each row twice over; dies as often as told, after so many batches in or out."""

    def __init__(self, faults: list[tuple[str, int]]) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self.faults, self.calls = faults, 0

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        self.calls += 1
        where, after = self.faults.pop(0) if self.faults else ("", -1)
        got, promised = [], None
        for number, chunk in enumerate(reader):
            if (where, after) == ("in", number):
                raise flight.FlightUnavailableError("gone while reading")
            if chunk.data is not None:
                got.append(chunk.data)
            if chunk.app_metadata is not None:
                promised = json.loads(chunk.app_metadata.to_pybytes())["rows"]
        table = pa.Table.from_batches(got, SCHEMA)
        assert promised == table.num_rows
        if where == "refuse":
            message = {"type": "StateError", "message": "not this one"}
            raise flight.FlightServerError(json.dumps(message))
        writer.begin(SCHEMA)
        values = table["x"].to_pylist()
        for number in range(4):
            if (where, after) == ("out", number):
                raise flight.FlightUnavailableError("gone while writing")
            writer.write_batch(batch(*(v * 10 + number for v in values)))
        if where == "silent":
            return
        writer.write_metadata(json.dumps({"metrics": {}, "backend": "cpu"}).encode())


def run(faults: list[tuple[str, int]]) -> tuple[list[int], Exchange, StandIn]:
    with StandIn(list(faults)) as server:
        address = Address(f"grpc://127.0.0.1:{server.port}", "t")
        exchange = Exchange(lambda failed: (address, {}), {"op": "apply"}, SCHEMA)

        def coming() -> Iterator[pa.RecordBatch]:
            yield batch(1, 2)
            yield batch(3)

        out = [v for b in exchange.run(coming()) for v in b.column(0).to_pylist()]
        return out, exchange, server


EXPECTED = [v * 10 + n for n in range(4) for v in (1, 2, 3)]


@pytest.mark.parametrize(
    "faults",
    [[], [("in", 0)], [("in", 1)], [("in", 2)], [("out", 0)], [("out", 1)], [("out", 3)], [("silent", 0)],
     [("out", 3), ("in", 1), ("out", 2)]],
)  # fmt: skip
def test_a_broken_exchange_is_repeated_and_no_row_given_twice(faults: list[tuple[str, int]]) -> None:
    out, exchange, server = run(faults)
    assert out == EXPECTED
    assert exchange.retries == len(faults)
    assert server.calls == len(faults) + 1


def test_a_refusal_is_not_repeated() -> None:
    with pytest.raises(gpu_ops.StateError, match=r"^not this one$"):
        run([("refuse", 0)])


@pytest.mark.thorough
def test_a_server_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_ops.spark.wire.exchange._PAUSE_S", 0.0)
    with pytest.raises(gpu_ops.StateError, match="never answered"):
        run([("in", 0)] * 6)


def test_refusals_come_back_as_their_class() -> None:
    fields = ["orders", "op", "unknown row kind", "x"]
    text = json.dumps({"type": "BadInputError", "message": "m", "fields": fields})
    error = translate(RuntimeError(f"{text}. Detail: Failed. gRPC client debug context: ..."))
    assert isinstance(error, gpu_ops.BadInputError)
    assert (error.input_name, error.column, error.sample) == ("orders", "op", "x")
    other = translate(RuntimeError('{"type": "ValueError", "message": "oops"}'))
    assert type(other) is gpu_ops.GpuJoinError
    assert str(other) == "ValueError: oops"
    assert translate(RuntimeError("Socket closed")) is None
    assert translate(RuntimeError('{"type": "AbandonedError", "message": "m"}')) is None


@pytest.mark.thorough
def test_servers_come_up_before_they_are_asked_for_and_not_once_all_is_over() -> None:
    servers = EmbeddedServers(2)
    pool, until = servers.pool("cpu"), time.monotonic() + 60
    servers.begin("cpu", 1)
    while not pool.running and time.monotonic() < until:
        time.sleep(0.05)
    (server,) = pool.running
    servers.begin("cpu", 1)
    assert pool.location(0) == server.location
    servers.begin("cpu", 5)  # the other is coming up
    servers.close()
    assert pool.running == []
    with pytest.raises(StateError, match="has ended"):
        pool.location(0)


def test_a_server_that_the_kernel_killed_says_so() -> None:
    servers = EmbeddedServers(1)
    try:
        pool = servers.pool("cpu")
        first = pool.location(0)
        os.kill(pool.running[0].pid, signal.SIGKILL)
        second = pool.location(0, failed=first)
        assert second != first
        text = str(pool.deaths[first])
        for part in (
            "server cpu-0",
            "signal 9",
            "spark.gpu_ops.memory.host",
            "spark.executor.memoryOverhead",
            "memory for state",
        ):
            assert part in text, text
        os.kill(pool.running[0].pid, signal.SIGTERM)  # as an operator would: nothing to say of memory
        while pool.running:
            time.sleep(0.05)
        pool.location(0, failed=second)
        assert second not in pool.deaths
    finally:
        servers.close()


@contextlib.contextmanager
def killing(launcher: Launcher, times: int, after: Callable[[], float], sent: int = signal.SIGKILL) -> Iterator[None]:
    """Servers are killed while they start, so many of them, each so many seconds after its process has begun."""
    over = threading.Event()

    def kill() -> None:
        killed = set[int]()
        while len(killed) < times and not over.is_set():
            for popen in list(launcher._starting):
                if popen.pid not in killed:
                    killed.add(popen.pid)
                    time.sleep(after())
                    popen.send_signal(sent)
            time.sleep(0.002)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield
    finally:
        over.set()
        killer.join()


@pytest.mark.parametrize("sent", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.thorough)])
def test_a_server_that_is_killed_while_it_starts_is_started_again(sent: int) -> None:
    """The query ended with that, at once."""
    launcher = Launcher("t" * 32)
    try:
        with killing(launcher, 2, lambda: 0.0, sent):
            server = launcher.start("cpu", "cpu-0")
        assert server.address.call("ping")["pid"] == server.pid
        server.stop()
    finally:
        launcher.close()


def test_a_server_that_is_killed_each_time_it_starts_says_so() -> None:
    launcher = Launcher("t" * 32)
    try:
        wanted = r"(?s)server cpu-0 did not start .*exit code -9, 3 times.*ended by signal 9.*memory\.host"
        with killing(launcher, 9, lambda: 0.0), pytest.raises(StateError, match=wanted):
            launcher.start("cpu", "cpu-0")
    finally:
        launcher.close()


@pytest.mark.thorough
@pytest.mark.parametrize("seed", slow_but(range(3), 2))
def test_servers_are_killed_at_any_moment_of_their_start(seed: int) -> None:
    """Two of them: whoever asked has a server; where it was up by then, the next one who asks has another."""
    choice, servers = random.Random(seed), EmbeddedServers(1)
    try:
        pool, failed = servers.pool("cpu"), None
        for _ in range(4):
            with killing(servers._launcher, 2, lambda: choice.random() * 0.5):
                location = pool.location(0, failed=failed)
            for _ in range(3):
                with contextlib.suppress(flight.FlightError):
                    Address(location, servers.token).call("ping")
                    break
                location = pool.location(0, failed=location)
            else:
                pytest.fail(f"no server answers, seed {seed}")
            os.kill(pool.running[0].pid, signal.SIGKILL)
            failed = location
    finally:
        servers.close()


def test_a_server_starts_where_the_folder_of_its_log_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cleaner of temporary files had removed it, and no server was started any more."""
    monkeypatch.setattr(files.tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    launcher = Launcher("t" * 32)
    try:
        shutil.rmtree(tmp_path / "temporary")
        server = launcher.start("cpu", "cpu-0")
        until = time.monotonic() + 30
        while "listening" not in launcher.tail("cpu-0"):
            assert time.monotonic() < until
            time.sleep(0.01)
        os.kill(server.pid, signal.SIGKILL)
        while server.running:
            time.sleep(0.01)
        assert "listening" in str(server.death)
        shutil.rmtree(launcher.logs)
        assert "signal 9" in str(server.death)  # without its log
        server.stop()
    finally:
        launcher.close()
    assert list((tmp_path / "temporary").iterdir()) == []


def test_only_the_end_of_a_log_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        file.truncate(1 << 40)
        file.seek(1 << 40)
        file.write("the end, in ä text".encode())
    assert tail_of(log).endswith("the end, in ä text")


def test_where_no_process_can_be_made_the_server_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    launcher = Launcher("t" * 32)
    monkeypatch.setattr("gpu_ops.spark.driver.process.subprocess.Popen", refused)
    with pytest.raises(StateError, match=r"server cpu-0 cannot be started: .*temporarily unavailable"):
        launcher.start("cpu", "cpu-0")
    launcher.close()
    with pytest.raises(StateError, match="has ended"):
        launcher.start("cpu", "cpu-0")


def test_a_partition_whose_servers_are_killed_again_and_again_is_given_up() -> None:
    known = JoinState("q", "r", None, None)

    def located(batch: int, failed: str | None, death: Death | None) -> None:
        request = LocateRequest("j", "q", "r", batch, None, "cpu", 1, 2, 7, "e", failed)
        known.begin(request)
        known.note_death(request, death)

    death = Death("cpu-1", 5, "the end")
    located(0, "a", death)
    located(0, "a", death)  # the same one, told twice
    located(0, "b", None)  # it did not answer, and was not killed
    located(0, "c", death)
    with pytest.raises(
        StateError, match=r"(?s)partition 1 of 2, micro-batch 0: .* killed 3 times.*cpu-1.*signal 9.*the end"
    ):
        located(0, "d", death)
    with pytest.raises(StateError, match="killed 3 times"):
        located(0, None, None)  # Spark runs the task once more
    known.asked = {0, 1}
    located(1, None, None)
    located(1, "e", death)
    located(1, "f", death)
    known.take(ReportRequest("j", "r", 1, 1, 2, [], observed=True))
    located(1, "g", death)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no room"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("cudaErrorMemoryAllocation: out of memory"),
    ],
)
def test_a_server_without_memory_says_which_it_is_and_what_helps(error: Exception, tmp_path: Path) -> None:
    partition = opened(tmp_path, partition=1)
    server = StateServer("t" * 32, name="cpu-3")
    try:
        wanted = r"state server cpu-3 .*micro-batch 4 of the join of .*, partition 1 of .*spark\.gpu_ops\.memory\.host"
        with pytest.raises(StateError, match=wanted), server._out_of_memory(partition, 4):
            raise error
        with pytest.raises(OSError, match="other"), server._out_of_memory(partition, 4):
            raise OSError(errno.EIO, "other")
    finally:
        server.end()


@pytest.mark.slow
@pytest.mark.spark
def test_a_query_whose_servers_are_killed_three_times_ends_with_that(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It went on for 43 servers, and then said that one did not answer."""
    left = Source(spark, tmp_path / "left", "k long, a string")
    right = Source(spark, tmp_path / "right", "k long, b double")
    joined = gpu_ops.join(left.df, right.df, on="k", state=str(tmp_path / "state"), name="deaths")
    left.add({"k": 1, "a": "x"})
    right.add({"k": 1, "b": 0.5})
    query = start(joined, Sink(), tmp_path / "checkpoint")
    killed, location = list[int](), pools.Pool.location

    def killed_at_once(self: pools.Pool, index: int, *, failed: str | None = None) -> str:
        found = location(self, index, failed=failed)
        server = self._slots[index]
        assert server is not None
        os.kill(server.pid, signal.SIGKILL)
        killed.append(server.pid)
        return found

    try:
        query.processAllAvailable()
        monkeypatch.setattr(pools.Pool, "location", killed_at_once)
        left.add({"k": 2, "a": "x"})
        with pytest.raises(Exception, match=r"(?s)its state server was killed 3 times.*signal 9.*memory\.host"):
            query.processAllAvailable()
    finally:
        query.stop()
    assert "killed 3 times" in (gpu_ops.why(query) or "")
    assert 4 <= len(killed) <= 16


@pytest.mark.spark
def test_servers_are_killed_between_and_during_batches(spark: Any, tmp_path: Path) -> None:
    from gpu_ops.spark.driver.directory import Directory

    left = Source(spark, tmp_path / "left", "k long, a string")
    right = Source(spark, tmp_path / "right", "k long, b double")
    joined = gpu_ops.join(left.df, right.df, on="k", how="left", state=str(tmp_path / "state"), name="killed")
    sink = Sink()
    left.add(*({"k": k, "a": "x"} for k in range(50)))
    right.add({"k": 1, "b": 0.5})
    query = start(joined, sink, tmp_path / "checkpoint")
    try:
        query.processAllAvailable()
        pool = Directory.of(spark).servers.pool("cpu")
        for process in pool.running:
            os.kill(process.pid, signal.SIGKILL)
        right.add(*({"k": k, "b": 1.5} for k in range(0, 50, 2)))
        query.processAllAvailable()
        assert sink.table == slow_join("left", left.table(["k", "a"], None), right.table(["k", "b"], None), 2)
        done = threading.Event()

        def kill_often() -> None:
            while not done.wait(1.5):
                for process in pool.running[:1]:
                    os.kill(process.pid, signal.SIGKILL)
                done.wait(8)

        killer = threading.Thread(target=kill_often)
        killer.start()
        try:
            for number in range(4):
                left.add({"k": number, "a": "y"}, {"k": 100 + number, "a": "z"})
                right.add({"k": 100 + number, "b": float(number)})
                query.processAllAvailable()
        finally:
            done.set()
            killer.join()
    finally:
        query.stop()
    assert sink.table == slow_join("left", left.table(["k", "a"], None), right.table(["k", "b"], None), 2)


@pytest.mark.slow
@pytest.mark.spark
def test_a_server_that_stops_within_a_micro_batch_is_replaced(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was waited for without end, and without a word."""
    from gpu_ops.spark.driver.directory import Directory

    directory = Directory.of(spark)
    monkeypatch.setattr(directory, "_address", directory.address._replace(patience_s=2.0))
    monkeypatch.setattr(pools, "PROBE_S", 2.0)
    left = Source(spark, tmp_path / "left", "k long, a string")
    right = Source(spark, tmp_path / "right", "k long, b double")
    joined = gpu_ops.join(left.df, right.df, on="k", how="left", state=str(tmp_path / "state"), name="stopped")
    sink = Sink()
    left.add(*({"k": k, "a": "x"} for k in range(50)))
    right.add({"k": 1, "b": 0.5})
    query = start(joined, sink, tmp_path / "checkpoint")
    stopped: list[int] = []

    def stop_one_at_work() -> None:
        pool, until = directory.servers.pool("cpu"), time.monotonic() + 30
        while time.monotonic() < until:
            for server in pool.running:
                if server.address.call("metrics")["calls"]:
                    os.kill(server.pid, signal.SIGSTOP)
                    stopped.append(server.pid)
                    return

    try:
        query.processAllAvailable()
        stopper = threading.Thread(target=stop_one_at_work)
        stopper.start()
        for number in range(10):
            keys = range(1000 * number + 2, 1000 * number + 1000)
            right.add(*({"k": k, "b": 1.5} for k in keys))
            left.add(*({"k": k, "a": "y"} for k in keys))
            query.processAllAvailable()
            if stopped:
                break
        stopper.join()
        left.add({"k": 7, "a": "z"})
        query.processAllAvailable()
    finally:
        query.stop()
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):  # it was replaced
                os.kill(pid, signal.SIGCONT)
    assert stopped
    assert not {server.pid for server in directory.servers.pool("cpu").running} & set(stopped)
    assert sink.table == slow_join("left", left.table(["k", "a"], None), right.table(["k", "b"], None), 2)


@pytest.mark.thorough
@pytest.mark.spark
def test_the_directory_refuses_strangers_and_lets_go(spark: Any, tmp_path: Path) -> None:
    from gpu_ops.spark.driver.directory import Directory

    directory = Directory.of(spark)
    request = {"join_id": "j", "query_id": "q", "run_id": "r", "batch_id": 0, "state": None,
               "backend": "cpu", "partition": 0, "partitions": 1, "attempt": 1, "evaluation": "e"}  # fmt: skip
    with pytest.raises(gpu_ops.StateError, match="refused the call"):
        ask(directory.address._replace(token="0" * 64), "locate", {"each": [request]})
    pool = directory.servers.pool("cpu")
    for server in pool.running:
        server.kill()
        server.stop()
    answers = ask(directory.address, "locate", {"each": [{**request, "waits": False}, request]})["each"]
    assert answers[0]["location"] is None, "it is not waited for"
    answer = answers[1]
    assert answer["location"].startswith("grpc://127.0.0.1:")
    assert ask(directory.address, "locate", {"each": [{**request, "waits": False}]})["each"] == [answer]
    with pytest.raises(gpu_ops.DescriptionError, match="several partitions"):
        ask(directory.address, "locate", {"each": [request, {**request, "evaluation": "f"}]})
    with pytest.raises(gpu_ops.DescriptionError, match="each"):
        ask(directory.address, "locate", request)
    with pytest.raises(flight.FlightUnauthenticatedError):
        flight.FlightClient(answer["location"]).do_get(flight.Ticket(b""))
    deadline = time.monotonic() + 30
    while "j" in directory.registry and time.monotonic() < deadline:
        time.sleep(0.2)
    assert "j" not in directory.registry  # no such query runs
