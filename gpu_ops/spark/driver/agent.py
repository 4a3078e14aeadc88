"""The Spark task on each executor of a cluster that starts state servers as the driver's directory asks for them.

It offers itself to the directory, then asks for commands again and again; each time the directory waits a while for
one. So either end notices within seconds that the other is gone. The servers end with the task: with its directory, its
process, or its executor.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final
from urllib.parse import urlsplit

import pyarrow as pa

from gpu_ops.errors import GpuJoinError, StateError
from gpu_ops.fields import decoded, encoded
from gpu_ops.spark.driver.machine import find_gpus
from gpu_ops.spark.driver.pools import Death, Server
from gpu_ops.spark.driver.process import START_S, Launcher, ServerProcess
from gpu_ops.spark.wire.connection import Address
from gpu_ops.spark.wire.exchange import ask

NONE_GIVEN: Final = "Spark gave the executors no GPU: spark.executor.resource.gpu.amount"


@dataclasses.dataclass(frozen=True)
class Offer:
    """A task offers to run servers.

    Attributes:
        job: the number of its job, for the directory.
        group: which servers.
        task: Spark's id of the attempt.
        stage: Spark's id of its stage.
        executor: the same for all tasks of an executor.
        host: the address that servers listen on.
        cores: of the machine, as far as they are for this process.
        gpus: of those that Spark gave the task, the ones that CUDA finds.
        gpu_note: these GPUs in words, or why there are none.
    """

    job: int
    group: int
    task: int
    stage: int
    executor: str
    host: str
    cores: int
    gpus: tuple[str, ...]
    gpu_note: str


@dataclasses.dataclass(frozen=True)
class Ended:
    """Message of an agent: a server has ended with an exit code; `death` says by what it was killed, if it was."""

    pid: int
    name: str
    code: int | None
    death: Death | None


@dataclasses.dataclass(frozen=True)
class Waiting:
    """Message of an agent that asks for commands, with the servers that have ended since it last asked."""

    agent: str
    ended: tuple[Ended, ...] = ()


@dataclasses.dataclass(frozen=True)
class Command:
    """Message to an agent: ``start`` a server of a kind under a name, ``kill`` one, or ``leave``.

    The number is that of the server in its group: which of the GPUs it has.
    """

    do: str
    id: int = 0
    kind: str = ""
    name: str = ""
    number: int = 0
    pid: int = 0


@dataclasses.dataclass(frozen=True)
class Done:
    """Message of an agent with the result of a command: a server that listens, a server's death, or an error."""

    agent: str
    id: int
    pid: int | None = None
    location: str | None = None
    on_cpu: str | None = None
    death: Death | None = None
    error: str | None = None


class Agent:
    """Function for ``mapPartitions`` that runs state servers in a Spark task; its elements are numbers of groups.

    Args:
        directory: its address.
        job: the number of the job, for the directory.
        arguments: for each kind of server more words for the command line.
    """

    def __init__(self, directory: Address, job: int, arguments: Mapping[str, Sequence[str]]) -> None:
        self._directory, self._job, self._arguments = directory, job, dict(arguments)

    def __call__(self, groups: Iterator[int]) -> Iterator[int]:
        """Runs the servers of each group, and yields its number when the directory no longer needs them here."""
        for group in groups:
            self._serve(group)
            yield group

    def _serve(self, group: int) -> None:
        from pyspark import TaskContext  # noqa: PLC0415 - only in a Spark task

        context = TaskContext.get()
        assert context is not None
        resource = context.resources().get("gpu")
        gpus, gpu_note = find_gpus([str(x) for x in resource.addresses]) if resource is not None else ([], NONE_GIVEN)
        host, task, stage = own_address(self._directory), context.taskAttemptId(), context.stageId()
        # All Python workers of an executor have one parent, and no other executor's has its working folder.
        executor = f"{socket.gethostname()}:{os.getppid()}:{os.getcwd()}"
        cores = len(os.sched_getaffinity(0))
        offer = Offer(self._job, group, task, stage, executor, host, cores, tuple(gpus), gpu_note)
        agent = ask(self._directory, "offer", encoded(offer))["agent"]
        ServerGroup(self._directory, agent, host, gpus, self._arguments).run()


def own_address(directory: Address) -> str:
    """The address of this machine on the network interface that reaches the directory.

    Raises:
        StateError: it is not reached.
    """
    location = urlsplit(directory.location)
    try:
        with socket.create_connection((location.hostname, location.port), timeout=SILENT_S) as connection:
            return str(connection.getsockname()[0])
    except OSError as error:
        raise StateError(f"the driver's directory of state servers does not answer: {error}") from error


class ServerGroup:
    """The state servers of one group, which are child processes of this task.

    Args:
        directory: its address.
        agent: what the directory calls this agent.
        host: the address they listen on.
        gpus: of those that Spark gave the task, the ones that answer, as CUDA_VISIBLE_DEVICES takes them.
        arguments: for each kind of server more words for the command line.
    """

    def __init__(
        self, directory: Address, agent: str, host: str, gpus: Sequence[str], arguments: Mapping[str, Sequence[str]]
    ) -> None:
        self._directory, self._agent = directory, agent
        self._launcher = Launcher(directory.token, host=host, tls=directory.tls, gpus=gpus, arguments=arguments)
        self._children: dict[int, tuple[str, ServerProcess]] = {}
        self._unannounced: set[int | None] = set()  # the directory has to hear that one is there before it has ended
        self._closed = False
        self._lock = threading.Lock()

    def run(self) -> None:
        """Carries out the directory's commands until one says ``leave``.

        Raises:
            StateError: the directory or the executor is gone.
        """
        parent = os.getppid()
        try:
            with self._directory.connect() as client:
                while os.getppid() == parent:
                    request = encoded(Waiting(self._agent, self._ended()))
                    try:
                        answer = self._directory.call("commands", request, timeout_s=SILENT_S, client=client)
                    except (pa.ArrowException, OSError, GpuJoinError) as error:
                        raise StateError(f"the driver's directory of state servers is gone: {error}") from error
                    for command in decoded(tuple[Command, ...], answer["commands"]):
                        if command.do == "leave":
                            return
                        threading.Thread(target=self._obey, args=(command,), daemon=True).start()
            raise StateError("the executor is gone")
        finally:
            self._close()

    def _obey(self, command: Command) -> None:
        done = Done(self._agent, command.id)
        try:
            if command.do == "start":
                process = self._start(command)
                done = dataclasses.replace(done, pid=process.pid, location=process.location, on_cpu=process.on_cpu)
            else:
                done = dataclasses.replace(done, pid=command.pid, death=self._kill(command.pid))
        except Exception as error:  # whatever it is, the directory waits for an answer
            done = dataclasses.replace(done, error=str(error) or repr(error))
        try:
            ask(self._directory, "done", encoded(done))
        except GpuJoinError as error:
            print(f"the directory does not take an answer: {error}", flush=True)  # noqa: T201 - the executor's log
        self._unannounced.discard(done.pid)

    def _start(self, command: Command) -> ServerProcess:
        process = self._launcher.start(command.kind, command.name, command.number)
        with self._lock:
            if not self._closed:
                self._unannounced.add(process.pid)
                self._children[process.pid] = command.name, process
                return process
        process.stop()
        raise StateError("the agent has ended")

    def _kill(self, pid: int) -> Death | None:
        with self._lock:
            _, process = self._children.pop(pid, (None, None))
        if process is None:
            return None
        process.kill()
        return process.death

    def _ended(self) -> tuple[Ended, ...]:
        """The servers that have ended since this was last asked."""
        with self._lock:
            known = [(pid, *child) for pid, child in self._children.items() if pid not in self._unannounced]
            ended = [(pid, name, process) for pid, name, process in known if not process.running]
            for pid, _, _ in ended:
                del self._children[pid]
        ended_servers = []
        for pid, name, process in ended:
            tail = self._launcher.tail(name)
            print(f"state server {name}, process {pid}, has ended ({process.code}):\n{tail}", flush=True)  # noqa: T201
            ended_servers.append(Ended(pid, name, process.code, process.death))
            process.stop()
        return tuple(ended_servers)

    def _close(self) -> None:
        with self._lock:
            children = [process for _, process in self._children.values()]
            self._children, self._closed = {}, True
        for process in children:
            process.stop(wait=False)
        for process in children:
            process.stop()
        self._launcher.close()


_log = logging.getLogger(__name__)

SILENT_S: Final = 30.0
"""How long the other end may be silent: an agent asks for commands every second, and is answered."""

_HOLD_S: Final = 1.0
_LOOK_S: Final = 0.25
_MORE_S: Final = 10.0
"""How much longer than a server's start its answer may take."""


class LostError(Exception):
    """Raised where an agent is gone, and its servers with it."""


class RemoteAgent:
    """The directory's side of a Spark task that has offered to run state servers.

    Args:
        directory: the address that agents call; what calls to their servers bring is the same.
        offer: what it has offered.
    """

    def __init__(self, directory: Address, offer: Offer) -> None:
        self._directory, self.id, self.offer = directory, uuid.uuid4().hex, offer
        self.executor_id: str | None = None
        self.alive = True
        self._heard = time.monotonic()
        self._pids: set[int] = set()
        self.deaths: dict[int, Death] = {}
        self._numbers = itertools.count(1)
        self._commands: list[Command] = []
        self._waiting: dict[int, Future[Done]] = {}
        self._changed = threading.Condition()

    @property
    def silent(self) -> bool:
        """True if the agent has not asked for commands for `SILENT_S` seconds."""
        return time.monotonic() - self._heard > SILENT_S

    def commands(self, waiting: Waiting, is_there: Callable[[], bool]) -> tuple[Command, ...]:
        """Returns the agent's next commands, waiting up to a second for one; marks the agent lost when it has gone.

        Args:
            waiting: the servers that have ended.
            is_there: whether the agent still waits.
        """
        for server in waiting.ended:
            self._note(server.pid, server.death)
            _log.warning("%s: state server %s has ended (%s)", self, server.name, server.code)
        until = time.monotonic() + _HOLD_S
        with self._changed:
            while not self._commands and self.alive and is_there() and time.monotonic() < until:
                self._changed.wait(_LOOK_S)
            self._heard = time.monotonic()
            commands, self._commands = self._commands, []
        if not is_there() or any(command.do == "leave" for command in commands):
            self.lose()
        return tuple(commands)

    def done(self, done: Done) -> dict[str, Any]:
        """Hands an agent's result to the thread that waits for it."""
        if done.location is not None and done.pid is not None:
            self._pids.add(done.pid)
            self.deaths.pop(done.pid, None)  # of another one, long ago, with the same id
        with self._changed:
            waits = self._waiting.pop(done.id, None)
        if waits is not None:
            waits.set_result(done)
        return {}

    def start(self, kind: str, name: str, number: int) -> RemoteServer:
        """Starts a server and waits until it listens.

        Args:
            kind: ``"cpu"`` or ``"gpu"``.
            name: the name of its log.
            number: of the server in its group: which of the GPUs it has.

        Raises:
            StateError: it does not start.
            LostError: the agent is gone.
        """
        done = self._ask(Command("start", next(self._numbers), kind, name, number), START_S + _MORE_S)
        if done.pid is None or done.location is None:
            raise StateError(f"{self}: {done.error}")
        _log.info("state server %s: process %d on %s", name, done.pid, self.offer.host)
        server = RemoteServer(self, done.pid, self._directory._replace(location=done.location))
        server.on_cpu = done.on_cpu
        return server

    def kill(self, pid: int) -> None:
        """Ends one server of this agent."""
        self._pids.discard(pid)
        try:
            self._note(pid, self._ask(Command("kill", next(self._numbers), pid=pid), _MORE_S).death)
        except LostError as error:
            _log.debug("%s", error)

    def leave(self) -> None:
        """Ends the agent's task, which Spark sees as finished successfully."""
        self._command(Command("leave"))

    def lose(self) -> None:
        """Marks the agent lost: calls that wait for it fail, and if it asks again it is refused and ends."""
        with self._changed:
            self.alive = False
            waiting, self._waiting = list(self._waiting.values()), {}
            self._changed.notify_all()
        for waits in waiting:
            waits.set_exception(LostError(f"{self} is gone"))

    def _note(self, pid: int, death: Death | None) -> None:
        self._pids.discard(pid)
        if death is not None:
            self.deaths[pid] = death

    def runs(self, pid: int) -> bool:
        """True if a server of this agent runs, as far as the directory has heard."""
        return self.alive and pid in self._pids

    def _command(self, command: Command) -> None:
        with self._changed:
            self._commands.append(command)
            self._changed.notify_all()

    def _ask(self, command: Command, patience_s: float) -> Done:
        waits: Future[Done] = Future()
        with self._changed:
            if not self.alive:
                raise LostError(f"{self} is gone")
            self._waiting[command.id] = waits
        self._command(command)
        try:
            return waits.result(patience_s)
        except TimeoutError as error:
            self.lose()
            raise LostError(f"{self} does not answer") from error

    def __str__(self) -> str:
        executor = f", executor {self.executor_id}" if self.executor_id else ""
        return f"the state servers on {self.offer.host}{executor}"


class RemoteServer(Server):
    """A state server on an executor.

    Args:
        agent: whose child it is.
        pid: its process id there.
        address: the server's address.
    """

    def __init__(self, agent: RemoteAgent, pid: int, address: Address) -> None:
        super().__init__(pid, address)
        self.agent = agent

    @property
    def running(self) -> bool:
        """True if the process runs, as far as its agent has reported."""
        return self.agent.runs(self.pid)

    @property
    def death(self) -> Death | None:
        """The server's death as its agent has reported it; None where it was not killed."""
        return self.agent.deaths.get(self.pid)

    def stop(self, *, wait: bool = True) -> None:
        """Ends the server, through its agent."""
        del wait
        if self.running:
            self.agent.kill(self.pid)

    def kill(self) -> None:
        """Ends a server that no longer answers."""
        self.agent.kill(self.pid)
