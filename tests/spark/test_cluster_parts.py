"""What places state servers on executors, without Spark: settings, agents, and who takes the place of the lost."""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from state.support import TOKEN, Server, make_command, wire_batches

from gpu_ops.errors import DescriptionError, StateError
from gpu_ops.spark.cluster.agent import Keeper
from gpu_ops.spark.cluster.remote import LostError, RemoteAgent
from gpu_ops.spark.cluster.servers import ClusterServers
from gpu_ops.spark.exchange.exchange import Address
from gpu_ops.spark.servers.channel import Channel
from gpu_ops.spark.servers.folders import LocalStateWarning, warn_of_local_folder
from gpu_ops.spark.servers.memory import server_budget
from gpu_ops.spark.settings import Settings
from gpu_ops.state.address import StateAddress

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
        "spark.gpu_ops.driver.port": "40123",
        "spark.gpu_ops.server.gpu": "0.25",
        "spark.gpu_ops.server.executors": "3",
        "spark.gpu_ops.server.startTimeout": "2min",
        "spark.gpu_ops.metrics": "reported",
        "spark.gpu_ops.server.patience": "1min",
    }
    settings = Settings.of(given.items())
    assert settings == Settings("0.4", "20g", 40123, 0.25, 3, 120.0, 60.0, metrics="reported")
    assert settings.server_arguments() == {
        "cpu": ["--host-memory", "20g"],
        "gpu": ["--gpu-memory", "0.4", "--host-memory", "20g"],
    }
    assert Settings.of([]) == Settings()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("memory.gpuu", "1g"), ("memory.gpu", "lots"), ("memory.host", "-1"), ("driver.port", "x"),
        ("driver.port", "70000"), ("server.gpu", "0.6"), ("server.gpu", "0"), ("server.executors", "0"),
        ("server.executors", "1.5"), ("server.startTimeout", "0s"), ("server.startTimeout", "soon"),
        ("server.patience", "4s"), ("server.patience", "2h"),
        ("metrics", "shown"),
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
    with Server(tmp_path / "log", "--host-memory", str(limit)) as server:
        server.apply(make_command(0, str(tmp_path / "state"), partition=0), BATCH)
        with pytest.raises(Exception, match=f"memory_limit is {limit}"):
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


@pytest.fixture
def ends() -> Iterator[tuple[RemoteAgent, threading.Thread]]:
    """The directory's end of an agent that runs in a thread here, and that thread."""
    here, there = socket.socketpair()
    hello = {"group": 0, "job": 1, "stage": 1, "task": 1, "executor": "e", "host": "h", "cores": 2, "gpus": ["3", "5"]}
    remote = RemoteAgent(Channel(here), hello)
    failures: queue.Queue[BaseException] = queue.Queue()

    def keep() -> None:
        try:
            Keeper(Channel(there), TOKEN, "127.0.0.1", ["3", "5"], {"cpu": ["--host-memory", "1g"]}).run()
        except StateError as error:
            failures.put(error)
        finally:
            there.close()

    listener = threading.Thread(target=remote.listen)
    keeper = threading.Thread(target=keep)
    keeper.failures = failures  # type: ignore[attr-defined]
    listener.start()
    keeper.start()
    yield remote, keeper
    remote.close()
    keeper.join(30)
    listener.join(30)
    assert not keeper.is_alive()
    assert not listener.is_alive()


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_an_agent_starts_servers_tells_of_their_end_and_leaves(ends: tuple[RemoteAgent, threading.Thread]) -> None:
    remote, keeper = ends
    first, second = remote.start("cpu", "cpu-0", 0), remote.start("gpu", "gpu-1", 1)
    assert "CUDA_VISIBLE_DEVICES=5" in Path(f"/proc/{second.pid}/environ").read_text().split("\0")
    assert "--host-memory" in Path(f"/proc/{first.pid}/cmdline").read_text().split("\0")
    assert first.action("ping", b"", TOKEN)
    assert first.running
    os.kill(first.pid, signal.SIGKILL)
    until(lambda: not first.running)
    assert second.running
    second.kill()
    assert not second.running
    assert gone(second.pid)
    third = remote.start("cpu", "cpu-0", 0)
    remote.leave()
    keeper.join(30)
    assert gone(third.pid)
    assert keeper.failures.empty()  # type: ignore[attr-defined]
    with pytest.raises(LostError):
        remote.start("cpu", "cpu-0", 0)


def test_an_agent_whose_directory_is_gone_ends_its_servers(ends: tuple[RemoteAgent, threading.Thread]) -> None:
    remote, keeper = ends
    server = remote.start("cpu", "cpu-0", 0)
    remote.close()
    keeper.join(30)
    until(lambda: gone(server.pid))
    assert "is gone" in str(keeper.failures.get(timeout=1))  # type: ignore[attr-defined]


# --- who goes where ----------------------------------------------------------------------------


class Cluster:
    """Stands in for Spark: runs agents, in threads, where a test wants them to go."""

    def __init__(self, *names: str) -> None:
        self.names = list(names)
        self.land: Callable[[int, str | None], str | None] = lambda group, wanted: wanted
        self.failure: str | None = None
        self.jobs: list[tuple[int, str | None]] = []
        self.stopped = False
        self._tasks: dict[int, str] = {}
        self._agents: dict[str, list[Channel]] = {}
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
        here, there = socket.socketpair()
        task = len(self._tasks)
        self._tasks[task] = executor
        hello = {"group": group, "job": job, "stage": job, "task": task, "executor": executor, "host": executor,
                 "cores": 8, "gpus": []}  # fmt: skip
        threading.Thread(target=self.servers.attach, args=(Channel(here), hello), daemon=True).start()
        channel = Channel(there)
        self._agents.setdefault(executor, []).append(channel)
        try:
            while (message := channel.receive()) is not None and message["do"] != "leave":
                channel.send({"id": message["id"], "pid": 1, "location": f"{executor}/{message['number']}"})
        except EOFError:
            raise RuntimeError("ExecutorLostFailure") from None
        finally:
            channel.close()

    def lose(self, executor: str) -> None:
        self.names.remove(executor)
        for channel in self._agents.pop(executor):
            channel.close()


@pytest.fixture
def made() -> Iterator[Callable[..., Cluster]]:
    clusters = []

    def make(*names: str, timeout: float = 20) -> Cluster:
        cluster = Cluster(*names)
        address = Address("127.0.0.1", 1, TOKEN)
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
    job = group.agent.job  # type: ignore[union-attr]
    cluster.names.append("c")
    copy = threading.Thread(target=cluster.task, args=(job, 0, "c"), daemon=True)
    copy.start()
    until(lambda: group.waiting)
    assert places(cluster)[0] == "a/0"
    cluster.lose("a")
    until(lambda: group.agent is not None and group.agent.executor == "c")
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
