"""The directory's end of an agent: the state servers of one executor, from afar."""

from __future__ import annotations

import itertools
import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Final

from gpu_ops.errors import StateError
from gpu_ops.spark.exchange.connection import Address
from gpu_ops.spark.servers.pools import Server
from gpu_ops.spark.servers.process import START_S

_log = logging.getLogger(__name__)

SILENT_S: Final = 30.0
"""How long the other end may be silent: an agent asks for commands every second, and is answered."""

_HOLD_S: Final = 1.0
_LOOK_S: Final = 0.25
_MORE_S: Final = 10.0
"""How much longer than a server's start its answer may take."""


class LostError(Exception):
    """The agent is gone, and its servers with it."""


class RemoteAgent:
    """A task that has offered to run state servers.

    Args:
        directory: the address that agents call; what calls to their servers bring is the same.
        offer: see `gpu_ops.spark.cluster.agent`.
    """

    def __init__(self, directory: Address, offer: Mapping[str, Any]) -> None:
        self._directory, self.id = directory, uuid.uuid4().hex
        self.group, self.job = int(offer["group"]), int(offer["job"])
        self.stage, self.task = int(offer["stage"]), int(offer["task"])
        self.executor, self.host = str(offer["executor"]), str(offer["host"])
        self.cores, self.gpus = int(offer["cores"]), [str(gpu) for gpu in offer["gpus"]]
        self.executor_id: str | None = None
        self.alive = True
        self._heard = time.monotonic()
        self._pids: set[int] = set()
        self._numbers = itertools.count(1)
        self._commands: list[Mapping[str, Any]] = []
        self._waiting: dict[int, Future[Mapping[str, Any]]] = {}
        self._changed = threading.Condition()

    @property
    def silent(self) -> bool:
        """Whether it has not asked for commands for a long time."""
        return time.monotonic() - self._heard > SILENT_S

    def commands(self, request: Mapping[str, Any], is_there: Callable[[], bool]) -> dict[str, Any]:
        """What the agent is to do next; waits a while for it. It is lost when it goes away meanwhile, or leaves.

        Args:
            request: ``ended``, the servers that have ended.
            is_there: whether the agent still waits.
        """
        for server in request["ended"]:
            self._pids.discard(int(server["pid"]))
            _log.warning("%s: state server %s has ended (%s)", self, server["name"], server["code"])
        until = time.monotonic() + _HOLD_S
        with self._changed:
            while not self._commands and self.alive and is_there() and time.monotonic() < until:
                self._changed.wait(_LOOK_S)
            self._heard = time.monotonic()
            commands, self._commands = self._commands, []
        if not is_there() or any(command["do"] == "leave" for command in commands):
            self.lose()
        return {"commands": commands}

    def done(self, result: Mapping[str, Any]) -> dict[str, Any]:
        """Takes in what came of a command."""
        if "location" in result:
            self._pids.add(int(result["pid"]))
        with self._changed:
            waits = self._waiting.pop(int(result["id"]), None)
        if waits is not None:
            waits.set_result(result)
        return {}

    def start(self, kind: str, name: str, number: int) -> RemoteServer:
        """Starts a server and waits until it listens.

        Args:
            kind: ``"cpu"`` or ``"gpu"``.
            name: of its log.
            number: of the server in its group: which of the GPUs it has.

        Raises:
            StateError: it does not start.
            LostError: the agent is gone.
        """
        answer = self._ask({"do": "start", "kind": kind, "name": name, "number": number}, START_S + _MORE_S)
        if "error" in answer:
            raise StateError(f"{self}: {answer['error']}")
        pid = int(answer["pid"])
        _log.info("state server %s: process %d on %s", name, pid, self.host)
        return RemoteServer(self, pid, self._directory._replace(location=str(answer["location"])))

    def kill(self, pid: int) -> None:
        """Ends a server."""
        self._pids.discard(pid)
        try:
            self._ask({"do": "kill", "pid": pid}, _MORE_S)
        except LostError as error:
            _log.debug("%s", error)

    def leave(self) -> None:
        """Ends the task, and lets Spark see that it did what it was for."""
        self._command({"do": "leave"})

    def lose(self) -> None:
        """It is gone, or is given up: should it ask for commands again, it is refused, and ends with its servers."""
        with self._changed:
            self.alive = False
            waiting, self._waiting = list(self._waiting.values()), {}
            self._changed.notify_all()
        for waits in waiting:
            waits.set_exception(LostError(f"{self} is gone"))

    def runs(self, pid: int) -> bool:
        """Whether a server is there."""
        return self.alive and pid in self._pids

    def _command(self, command: Mapping[str, Any]) -> None:
        with self._changed:
            self._commands.append(command)
            self._changed.notify_all()

    def _ask(self, command: Mapping[str, Any], patience_s: float) -> Mapping[str, Any]:
        number = next(self._numbers)
        waits: Future[Mapping[str, Any]] = Future()
        with self._changed:
            if not self.alive:
                raise LostError(f"{self} is gone")
            self._waiting[number] = waits
        self._command({"id": number, **command})
        try:
            return waits.result(patience_s)
        except TimeoutError as error:
            self.lose()
            raise LostError(f"{self} does not answer") from error

    def __str__(self) -> str:
        return f"the state servers on {self.host}" + (f", executor {self.executor_id}" if self.executor_id else "")


class RemoteServer(Server):
    """A state server on an executor.

    Args:
        agent: whose child it is.
        pid: its process id there.
        address: of it.
    """

    def __init__(self, agent: RemoteAgent, pid: int, address: Address) -> None:
        super().__init__(pid, address)
        self.agent = agent

    @property
    def running(self) -> bool:
        """Whether the process is there, as far as is known."""
        return self.agent.runs(self.pid)

    def stop(self, *, wait: bool = True) -> None:
        """Ends it."""
        del wait
        if self.running:
            self.agent.kill(self.pid)

    def kill(self) -> None:
        """Ends one that no longer answers."""
        self.agent.kill(self.pid)
