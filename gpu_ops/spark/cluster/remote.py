"""The directory's end of an agent: the state servers of one executor, from afar."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Mapping
from typing import Any, Final

from gpu_ops.errors import StateError
from gpu_ops.spark.servers.channel import Channel
from gpu_ops.spark.servers.pools import Server
from gpu_ops.spark.servers.process import START_S

_log = logging.getLogger(__name__)

_MORE_S: Final = 10.0
"""How much longer than a server's start its answer may take."""


class LostError(Exception):
    """The agent is gone, and its servers with it."""


class RemoteAgent:
    """A task that has offered to run state servers.

    Args:
        channel: to it.
        hello: what it said first; see `gpu_ops.spark.cluster.agent`.
    """

    def __init__(self, channel: Channel, hello: Mapping[str, Any]) -> None:
        self._channel = channel
        self.group, self.job = int(hello["group"]), int(hello["job"])
        self.stage, self.task = int(hello["stage"]), int(hello["task"])
        self.executor, self.host = str(hello["executor"]), str(hello["host"])
        self.cores, self.gpus = int(hello["cores"]), [str(gpu) for gpu in hello["gpus"]]
        self.executor_id: str | None = None
        self.alive = True
        self._pids: set[int] = set()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, queue.Queue[dict[str, Any] | None]] = {}
        self._lock = threading.Lock()

    def listen(self) -> None:
        """Takes in what the agent says; returns when it is gone."""
        try:
            while True:
                message = self._channel.receive()
                if message is None:
                    continue
                if "gone" in message:
                    self._pids.discard(int(message["gone"]))
                    _log.warning("%s: state server %s has ended (%s)", self, message["name"], message["code"])
                    continue
                if "location" in message:
                    self._pids.add(int(message["pid"]))
                with self._lock:
                    waits = self._waiting.pop(int(message["id"]), None)
                if waits is not None:
                    waits.put(message)
        except (EOFError, OSError, ValueError, KeyError, TypeError) as error:
            _log.info("%s is gone: %s", self, error)
        finally:
            with self._lock:
                self.alive = False
                waiting, self._waiting = list(self._waiting.values()), {}
            for waits in waiting:
                waits.put(None)
            self._channel.close()

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
        return RemoteServer(self, pid, str(answer["location"]))

    def kill(self, pid: int) -> None:
        """Ends a server."""
        self._pids.discard(pid)
        try:
            self._ask({"do": "kill", "pid": pid}, _MORE_S)
        except LostError as error:
            _log.debug("%s", error)

    def leave(self) -> None:
        """Ends the task, and says it did what it was for."""
        try:
            self._channel.send({"do": "leave"})
        except OSError as error:
            _log.debug("%s: %s", self, error)

    def close(self) -> None:
        """Ends the connection, and with it the task's servers."""
        self._channel.close()

    def runs(self, pid: int) -> bool:
        """Whether a server is there."""
        return self.alive and pid in self._pids

    def _ask(self, message: Mapping[str, Any], patience_s: float) -> dict[str, Any]:
        number = next(self._numbers)
        waits: queue.Queue[dict[str, Any] | None] = queue.Queue(1)
        with self._lock:
            if not self.alive:
                raise LostError(f"{self} is gone")
            self._waiting[number] = waits
        try:
            self._channel.send({"id": number, **message})
            answer = waits.get(timeout=patience_s)
        except (OSError, queue.Empty) as error:
            self.close()
            raise LostError(f"{self} does not answer") from error
        if answer is None:
            raise LostError(f"{self} is gone")
        return answer

    def __str__(self) -> str:
        return f"the state servers on {self.host}" + (f", executor {self.executor_id}" if self.executor_id else "")


class RemoteServer(Server):
    """A state server on an executor.

    Args:
        agent: whose child it is.
        pid: its process id there.
        location: where it listens.
    """

    def __init__(self, agent: RemoteAgent, pid: int, location: str) -> None:
        super().__init__(pid, location)
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
