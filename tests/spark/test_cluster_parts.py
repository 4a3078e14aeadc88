"""What places state servers on executors, without Spark: settings, agents, and who takes the place of the lost."""

from __future__ import annotations

import dataclasses
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from state.support import TOKEN, Server, make_command, wire_batches

from gpu_ops.errors import BackendError, DescriptionError, StateError
from gpu_ops.fields import decoded, encoded
from gpu_ops.spark.driver.agent import (
    NONE_GIVEN,
    Done,
    LostError,
    Offer,
    RemoteAgent,
    ServerGroup,
    Waiting,
    own_address,
)
from gpu_ops.spark.driver.cluster import ClusterServers
from gpu_ops.spark.driver.executors import LocalStateWarning, warn_of_local_folder
from gpu_ops.spark.server.server import server_budget
from gpu_ops.spark.settings import Settings
from gpu_ops.spark.wire.connection import Address, FlightServer, format_location
from gpu_ops.state.address import StateAddress

pytestmark = pytest.mark.thorough

BATCH = wire_batches(1)[0]


def until(what: Callable[[], Any], seconds: float = 20) -> Any:
    """Waits for something to be true."""
    deadline = time.monotonic() + seconds
    while not (found := what()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert found
    return found


# --- settings ----------------------------------------------------------------------------------


def test_settings() -> None:
    given = {
        "spark.app.name": "other",
        "spark.gpu_ops.memory.gpu": "0.4",
        "spark.gpu_ops.memory.host": "20g",
        "spark.gpu_ops.disk.limit": "100g",
        "spark.gpu_ops.disk.folder": "/nvme0,/nvme1",
        "spark.gpu_ops.driver.port": "40123",
        "spark.gpu_ops.server.gpu": "0.25",
        "spark.gpu_ops.server.executors": "3",
        "spark.gpu_ops.server.startTimeout": "2min",
        "spark.gpu_ops.metrics": "reported",
        "spark.gpu_ops.server.patience": "1min",
        "spark.gpu_ops.gpu.probe": "hash_join",
    }
    settings = Settings.of(given.items())
    assert settings == Settings(
        "0.4", "20g", 40123, 0.25, 3, 120.0, 60.0, metrics="reported", gpu_probe="hash_join",
        disk_limit="100g", disk_folder="/nvme0,/nvme1",
    )  # fmt: skip
    host = ["--host-memory", "20g", "--disk-limit", "100g", "--disk-folder", "/nvme0,/nvme1"]
    assert settings.server_arguments() == {
        "cpu": host,
        "gpu": ["--gpu-memory", "0.4", "--gpu-probe", "hash_join", *host],
    }
    assert Settings.of([]) == Settings()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("memory.gpuu", "1g"), ("gpu.probe", "sorted"), ("memory.gpu", "lots"), ("memory.host", "-1"),
        ("disk.limit", "0.5"), ("disk.limit", "much"),
        ("driver.port", "x"),
        ("driver.port", "70000"), ("server.gpu", "0.6"), ("server.gpu", "0"), ("server.executors", "0"),
        ("server.executors", "1.5"), ("server.startTimeout", "0s"), ("server.startTimeout", "soon"),
        ("server.patience", "4s"), ("server.patience", "2h"),
        ("tasks", "0"), ("tasks", "1.5"), ("metrics", "shown"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be(name: str, value: str) -> None:
    with pytest.raises(DescriptionError, match=rf"spark\.gpu_ops\.{name.replace('.', '[.]')}"):
        Settings.of([(f"spark.gpu_ops.{name}", value)])


def test_a_share_of_memory_is_of_the_machine() -> None:
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    budget = server_budget(None, "0.5")
    assert budget.gpu is None
    assert budget.host == physical // 2
    assert server_budget("2g", "1g").gpu == 2 << 30


def test_all_partitions_of_a_server_share_its_memory(tmp_path: Path) -> None:
    """Each would fit alone."""
    alone = []
    with Server(tmp_path / "log") as server:
        for partition in range(2):
            command = make_command(0, str(tmp_path / "free"), partition=partition)
            alone.append(server.apply(command, BATCH)[1]["metrics"])
    sizes = [m["left_state_bytes"] + m["right_state_bytes"] for m in alone]
    limit = int(sizes[0] * 1.5)
    with Server(tmp_path / "log", "--host-memory", str(limit), "--disk-limit", "0") as server:
        server.apply(make_command(0, str(tmp_path / "state"), partition=0), BATCH)
        with pytest.raises(Exception, match=r"memory_limit is .* for all of it together"):
            server.apply(make_command(0, str(tmp_path / "state"), partition=1), BATCH)


class Context:
    def __init__(self, master: str) -> None:
        self.master = master


@pytest.mark.parametrize("state", ["/data/state", "state"])
def test_a_local_state_folder_on_a_cluster_is_warned_of(state: str) -> None:
    with pytest.warns(LocalStateWarning, match="must see the same folder"):
        warn_of_local_folder(Context("spark://host:7077"), StateAddress.of(state), stacklevel=1)


@pytest.mark.parametrize(
    ("master", "state"),
    [
        ("yarn", "hdfs://host/state"),
        ("yarn", "file:///mnt/state"),
        ("local[2]", "state"),
        ("local-cluster[2,2,1024]", "s"),
    ],
)
def test_other_state_folders_are_not(master: str, state: str) -> None:
    warn_of_local_folder(Context(master), StateAddress.of(state), stacklevel=1)  # a warning would be an error


# --- an agent and its servers ------------------------------------------------------------------


OFFER = Offer(group=0, job=1, stage=1, task=1, executor="e", host="h", cores=2, gpus=("3", "5"), gpu_note="2 GPUs")


class Ends:
    """The directory's end of an agent that runs in a thread here."""

    def __init__(self) -> None:
        self.server = FlightServer(TOKEN, actions={"commands": self._commands, "done": self._done})
        address = Address(format_location("127.0.0.1", self.server.port), TOKEN)
        self.remote = RemoteAgent(address, OFFER)
        self.group = ServerGroup(address, self.remote.id, "127.0.0.1", ["3", "5"], {"cpu": ["--host-memory", "1g"]})
        self.failures: queue.Queue[BaseException] = queue.Queue()
        self.agent = threading.Thread(target=self._run)
        self.agent.start()

    def _commands(self, request: dict[str, Any], is_there: Callable[[], bool]) -> dict[str, Any]:
        return {"commands": encoded(self.remote.commands(decoded(Waiting, request), is_there))}

    def _done(self, request: dict[str, Any], _: object) -> dict[str, Any]:
        return self.remote.done(decoded(Done, request))

    def _run(self) -> None:
        try:
            self.group.run()
        except StateError as error:
            self.failures.put(error)


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.remote.leave()
    made.agent.join(30)
    made.server.end()
    assert not made.agent.is_alive()


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_an_agent_starts_servers_tells_of_their_end_and_leaves(ends: Ends) -> None:
    remote = ends.remote
    first, second = remote.start("cpu", "cpu-0", 0), remote.start("gpu", "gpu-1", 1)
    assert "CUDA_VISIBLE_DEVICES=5" in Path(f"/proc/{second.pid}/environ").read_text().split("\0")
    assert "--host-memory" in Path(f"/proc/{first.pid}/cmdline").read_text().split("\0")
    assert first.address.call("ping")["pid"] == first.pid
    assert first.running
    os.kill(first.pid, signal.SIGKILL)
    until(lambda: not first.running)
    assert second.running
    second.kill()
    assert not second.running
    assert gone(second.pid)
    third = remote.start("cpu", "cpu-0", 0)
    remote.leave()
    ends.agent.join(30)
    assert gone(third.pid)
    assert ends.failures.empty()
    with pytest.raises(LostError):
        remote.start("cpu", "cpu-0", 0)


def test_an_agent_whose_directory_is_gone_ends_its_servers(ends: Ends) -> None:
    server = ends.remote.start("cpu", "cpu-0", 0)
    began = time.monotonic()
    ends.server.end()
    ends.agent.join(30)
    assert time.monotonic() - began < 10
    until(lambda: gone(server.pid))
    assert "is gone" in str(ends.failures.get(timeout=1))


def test_an_agent_that_is_given_up_ends_its_servers(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    server = ends.remote.start("cpu", "cpu-0", 0)

    def refuse(*_: object) -> dict[str, Any]:
        raise StateError("given up")

    monkeypatch.setattr(ends.remote, "commands", refuse)
    ends.agent.join(30)
    until(lambda: gone(server.pid))
    assert "given up" in str(ends.failures.get(timeout=1))


AGENT = """
import os, sys
sys.path[:0] = [{tests!r}]
from gpu_ops.spark.driver.agent import ServerGroup
from gpu_ops.spark.wire.connection import Address
ServerGroup(Address({location!r}, {token!r}), {agent!r}, "127.0.0.1", [], {{}}).run()
"""


@pytest.mark.parametrize(("number", "silent"), [(signal.SIGKILL, 30.0), (signal.SIGSTOP, 3.0)])
def test_an_agent_that_dies_or_stops_is_lost_within_seconds(
    number: signal.Signals, silent: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed closes its connection; one that stops, or whose machine is gone, asks no more."""
    cluster = Cluster("a")
    with FlightServer(TOKEN, actions={}) as server:
        address = Address(format_location("127.0.0.1", server.port), TOKEN)
        servers = ClusterServers(cluster, Settings(start_timeout_s=20), lambda: address)  # type: ignore[arg-type]
        server._actions = servers.actions
        cluster.servers = servers
        cluster.land = lambda group, wanted: None
        preparing = threading.Thread(target=servers.prepare)
        preparing.start()
        until(lambda: servers._groups)
        agent = servers.offer(dataclasses.replace(OFFER, executor="a", host="a"))
        preparing.join(20)
        text = AGENT.format(tests=str(Path(__file__).parents[1]), location=address.location, token=TOKEN, agent=agent)
        with subprocess.Popen([sys.executable, "-c", text]) as process:
            started = servers.start("cpu", 0, time.monotonic() + 20)
            assert started.running
            remote = servers._agents[agent]
            heard = remote._heard
            until(lambda: remote._heard != heard)
            time.sleep(0.3)  # its next call is held: between two calls a death is noticed by silence only
            monkeypatch.setattr("gpu_ops.spark.driver.agent.SILENT_S", silent)
            began = time.monotonic()
            process.send_signal(number)
            until(lambda: not started.running)
            assert time.monotonic() - began < 15
            process.kill()
        cluster.stopped = True
        servers.close()
        until(lambda: gone(started.pid))


@pytest.mark.parametrize(("host", "own"), [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("::1", "::1")])
def test_an_agent_finds_its_own_address(host: str, own: str) -> None:
    with FlightServer(TOKEN, host=own, actions={"x": lambda request, _: request}) as server:
        address = Address(format_location(host, server.port), TOKEN)
        assert own_address(address) == own
        assert address.call("x", {"x": 1}) == {"x": 1}
    with pytest.raises(StateError, match="does not answer"):
        own_address(address)


# --- who goes where ----------------------------------------------------------------------------


class Cluster:
    """Stands in for Spark: runs agents, in threads, where a test wants them to go."""

    def __init__(self, *names: str) -> None:
        self.names = list(names)
        self.land: Callable[[int, str | None], str | None] = lambda group, wanted: wanted
        self.failure: str | None = None
        self.cards: dict[str, tuple[list[str], str]] = {}
        self.jobs: list[tuple[int, str | None]] = []
        self.stopped = False
        self._tasks: dict[int, str] = {}
        self._lost: set[str] = set()
        self.servers: ClusterServers

    def ids(self) -> list[str]:
        return list(self.names)

    def wait(self, deadline: float) -> int:
        return len(self.names)

    def cores(self, count: int) -> int:
        return 2

    def executor_of(self, stage: int, task: int) -> str | None:
        return self._tasks[task]

    def run(self, agent: Any, group: int, executor: str | None) -> None:
        self.jobs.append((group, executor))
        if self.failure is not None:
            raise RuntimeError(self.failure)
        if (landed := self.land(group, executor)) is not None:
            self.task(agent._job, group, landed)

    def task(self, job: int, group: int, executor: str) -> None:
        """A task, until it leaves or its executor is lost."""
        number = len(self._tasks)
        self._tasks[number] = executor
        gpus, found = self.cards.get(executor, ([], NONE_GIVEN))
        offer = Offer(job, group, number, job, executor, executor, cores=8, gpus=tuple(gpus), gpu_note=found)
        agent = self.servers.offer(offer)
        while True:
            commands = self.servers.commands(Waiting(agent), lambda: executor not in self._lost)
            if executor in self._lost:
                raise RuntimeError("ExecutorLostFailure")
            for command in commands:
                if command.do == "leave":
                    return
                done = Done(agent, command.id, pid=1, location=f"{executor}/{command.number}")
                self.servers.actions["done"](encoded(done), lambda: True)

    def lose(self, executor: str) -> None:
        self.names.remove(executor)
        self._lost.add(executor)


@pytest.fixture
def made() -> Iterator[Callable[..., Cluster]]:
    clusters = []

    def make(*names: str, timeout: float = 20) -> Cluster:
        cluster = Cluster(*names)
        address = Address("grpc://127.0.0.1:1", TOKEN)
        cluster.servers = ClusterServers(cluster, Settings(start_timeout_s=timeout), lambda: address)  # type: ignore[arg-type]
        clusters.append(cluster)
        return cluster

    yield make
    for cluster in clusters:
        cluster.stopped = True
        cluster.servers.close()


def places(cluster: Cluster) -> list[str]:
    pool = cluster.servers.pool("auto")
    return [pool.location(index) for index in range(len(pool))]


def test_slots_are_dealt_out_to_all_executors_in_turn(made: Callable[..., Cluster]) -> None:
    cluster = made("a", "b", "c")
    assert places(cluster) == ["a/0", "b/0", "c/0", "a/1", "b/1", "c/1"]
    assert cluster.servers.where() == "on 3 executors (a, b, c)"
    assert sorted(cluster.jobs) == [(0, "a"), (1, "b"), (2, "c")]


def test_a_lost_executors_servers_go_to_its_successor(made: Callable[..., Cluster]) -> None:
    cluster = made("a", "b")
    places(cluster)
    cluster.lose("a")
    until(lambda: "1 lost" in cluster.servers.where())
    time.sleep(1.2)
    assert len(cluster.jobs) == 2  # nobody is free: it does not go beside the other one at once
    cluster.names.append("c")
    assert places(cluster) == ["c/0", "b/0", "c/1", "b/1"]


def test_without_a_successor_they_go_beside_others(made: Callable[..., Cluster]) -> None:
    cluster = made("a", "b", timeout=4)
    cluster.land = lambda group, wanted: wanted or "b"
    places(cluster)
    cluster.lose("a")
    until(lambda: "1 lost" in cluster.servers.where())
    assert places(cluster) == ["b/0", "b/0", "b/1", "b/1"]
    assert cluster.servers.where() == "on 1 executor (b)"


def test_a_task_beside_another_is_sent_away_while_an_executor_is_free(made: Callable[..., Cluster]) -> None:
    cluster = made("a", "b")
    tries = iter(["a", "a"])
    cluster.land = lambda group, wanted: next(tries, wanted)
    assert sorted(places(cluster)) == ["a/0", "a/1", "b/0", "b/1"]
    assert len(cluster.jobs) == 3
    assert cluster.servers.where() == "on 2 executors (a, b)"


def test_a_copy_of_a_task_stands_by_and_takes_over(made: Callable[..., Cluster]) -> None:
    """As Spark makes one by speculation, where there are no barriers."""
    cluster = made("a", "b")
    places(cluster)
    group = cluster.servers._groups[0]
    job = group.agent.offer.job  # type: ignore[union-attr]
    cluster.names.append("c")
    copy = threading.Thread(target=cluster.task, args=(job, 0, "c"), daemon=True)
    copy.start()
    until(lambda: group.waiting)
    assert places(cluster)[0] == "a/0"
    cluster.lose("a")
    until(lambda: group.agent is not None and group.agent.offer.executor == "c")
    assert copy.is_alive()
    assert places(cluster) == ["c/0", "b/0", "c/1", "b/1"]


def test_a_job_that_fails_is_told_of_and_tried_again_by_the_next(made: Callable[..., Cluster]) -> None:
    cluster = made("a")
    cluster.failure = "ModuleNotFoundError: No module named 'gpu_ops'"
    with pytest.raises(StateError, match=r"on 0 of 1 executors .*No module named 'gpu_ops'.*startTimeout"):
        cluster.servers.prepare()
    cluster.failure = None
    assert places(cluster) == ["a/0", "a/1"]


def test_waiting_for_a_place_has_an_end(made: Callable[..., Cluster]) -> None:
    cluster = made("a", timeout=1)
    cluster.land = lambda group, wanted: None
    with pytest.raises(StateError, match="other jobs may have taken all room"):
        cluster.servers.prepare()
    cluster.land = lambda group, wanted: wanted
    assert places(cluster) == ["a/0", "a/1"]
    cluster.land = lambda group, wanted: None
    cluster.lose("a")
    until(lambda: "1 lost" in cluster.servers.where())
    began = time.monotonic()
    with pytest.raises(StateError, match="no other one has taken its place in 1 s"):
        places(cluster)
    assert time.monotonic() - began < 10


# --- executors and their GPUs ------------------------------------------------------------------


def test_gpus_are_those_that_answer_on_every_executor(
    made: Callable[..., Cluster], caplog: pytest.LogCaptureFixture
) -> None:
    cluster = made("a", "b")
    cluster.cards = {"a": (["GPU-1"], "1 GPU: Card"), "b": (["GPU-2"], "1 GPU: Card")}
    assert (cluster.servers.pool("auto").kind, len(cluster.servers.pool("gpu"))) == ("gpu", 2)
    assert cluster.servers.gpus == "1 GPU: Card"
    assert not caplog.records


def test_an_executor_whose_gpu_does_not_answer_is_named(
    made: Callable[..., Cluster], caplog: pytest.LogCaptureFixture
) -> None:
    cluster = made("a", "b")
    cluster.cards = {"a": (["GPU-1"], "1 GPU: Card"), "b": ([], "cuInit says 100 (CUDA_VISIBLE_DEVICES is '3')")}
    assert cluster.servers.pool("auto").kind == "cpu"
    assert "although Spark gave GPUs to executors: cuInit says 100" in caplog.text
    with pytest.raises(BackendError, match="no GPU answers: cuInit says 100"):
        cluster.servers.begin("gpu", 2)


def test_a_gpu_that_spark_was_not_asked_for_is_not_used(made: Callable[..., Cluster]) -> None:
    cluster = made("a")
    with pytest.raises(BackendError, match=r"spark\.executor\.resource\.gpu\.amount"):
        cluster.servers.begin("gpu", 2)
