"""The state servers of an application as its directory sees them: pools of slots, each with a server or none."""

from __future__ import annotations

import abc
import json
import logging
import threading
import time
from typing import Final

import pyarrow as pa
from pyarrow import flight

from gpu_ops.errors import StateError
from gpu_ops.spark.cluster.tls import Tls

_log = logging.getLogger(__name__)

PROBE_S: Final = 10.0
"""How long a server may take to answer the directory."""


class Server(abc.ABC):
    """A state server that was started.

    Args:
        pid: its process id, on the machine it runs on.
        location: where it listens, as Flight writes it.
    """

    def __init__(self, pid: int, location: str) -> None:
        self.pid, self.location = pid, location

    @property
    @abc.abstractmethod
    def running(self) -> bool:
        """Whether the process is there."""

    @abc.abstractmethod
    def stop(self, *, wait: bool = True) -> None:
        """Ends it."""

    @abc.abstractmethod
    def kill(self) -> None:
        """Ends one that no longer answers."""

    def action(self, name: str, body: bytes, token: str, tls: Tls | None = None) -> bytes:
        """Runs a Flight action.

        Raises:
            FlightError: it did not answer in time, or refused.
        """
        headers = [(b"authorization", f"Bearer {token}".encode())]
        with flight.FlightClient(self.location, **(tls.flight_client if tls is not None else {})) as client:
            options = flight.FlightCallOptions(timeout=PROBE_S, headers=headers)
            results = list(client.do_action(flight.Action(name, body), options))
        return bytes(results[0].body.to_pybytes()) if results else b""


class Servers(abc.ABC):
    """All state servers of an application.

    Args:
        token: what every call must bring.
        patience_s: how long a server that is gone may take to come back.
    """

    def __init__(self, token: str, patience_s: float) -> None:
        self.token, self.patience_s = token, patience_s
        self.no_gpu = ""
        self.tls: Tls | None = None

    @abc.abstractmethod
    def prepare(self) -> None:
        """Sees to it that servers can be started.

        Raises:
            StateError: they cannot.
        """

    @property
    def tasks(self) -> int:
        """How many of the application's tasks they are; asks for them to be prepared.

        Raises:
            StateError: they cannot.
        """
        return 0

    @abc.abstractmethod
    def pool(self, backend: str) -> Pool:
        """The servers for a backend: the GPUs' for ``"auto"`` and ``"gpu"``, where there are any."""

    @abc.abstractmethod
    def start(self, kind: str, index: int, deadline: float) -> Server:
        """Starts the server of a slot and waits until it listens.

        Args:
            kind: the pool's.
            index: the slot's.
            deadline: until when a place for it is waited for, by `time.monotonic`.

        Raises:
            StateError: it does not start.
        """

    @abc.abstractmethod
    def where(self) -> str:
        """In words, where they run."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends all servers."""


class Pool:
    """Servers of one kind; slot i is started when first needed, and again when it is gone.

    Args:
        servers: starts them.
        kind: ``"cpu"`` or ``"gpu"``.
        size: how many slots.
    """

    def __init__(self, servers: Servers, kind: str, size: int) -> None:
        self.kind, self._servers = kind, servers
        self._slots: list[Server | None] = [None] * size
        self._locks = [threading.Lock() for _ in range(size)]

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def running(self) -> list[Server]:
        """The servers that are there."""
        return [s for s in self._slots if s is not None and s.running]

    def location(self, index: int, *, failed: str | None = None) -> str:
        """Where slot ``index`` listens.

        Args:
            index: which slot.
            failed: a location that did not answer; if that is still this slot's, it is looked at.

        Raises:
            StateError: the server does not start.
        """
        deadline = time.monotonic() + self._servers.patience_s
        # Whoever waits behind another for the same slot has waited as long when that one gives up.
        if not self._locks[index].acquire(timeout=max(0.0, deadline - time.monotonic()) + 1):
            raise StateError(f"state server {self.kind}-{index} is not back within {self._servers.patience_s:.0f} s")
        try:
            server = self._slots[index]
            if server is not None and server.running and failed == server.location:
                try:
                    server.action("ping", b"", self._servers.token, self._servers.tls)
                except (pa.ArrowException, OSError) as error:
                    _log.warning("state server %d does not answer; it is replaced: %s", server.pid, error)
                    server.kill()
                    server = None  # also where a file system keeps the process from ending
            if server is not None and not server.running:
                _log.warning("state server %d is gone; it is started anew", server.pid)
                server.stop()
                server = None
            if server is None:
                server = self._slots[index] = self._servers.start(self.kind, index, deadline)
            return server.location
        finally:
            self._locks[index].release()

    def release(self, index: int, join_id: str) -> None:
        """Lets a slot's server drop a join from memory, if it runs."""
        server = self._slots[index]
        if server is None or not server.running:
            return
        try:
            body = json.dumps({"join_id": join_id}).encode()
            server.action("release", body, self._servers.token, self._servers.tls)
        except (pa.ArrowException, OSError) as error:
            _log.warning("state server %d did not release join %s: %s", server.pid, join_id, error)

    def close(self) -> None:
        """Ends all of them, side by side."""
        for server in self.running:
            server.stop(wait=False)
        for started in self._slots:
            if started is not None:
                started.stop()
