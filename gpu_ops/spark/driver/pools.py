"""The state servers of an application as its directory sees them: pools of slots, each with a server or none."""

from __future__ import annotations

import abc
import logging
import secrets
import signal
import threading
import time
from collections.abc import Mapping
from typing import Final, NamedTuple

import pyarrow as pa

from gpu_ops.errors import BackendError, GpuJoinError, StateError
from gpu_ops.spark.settings import LOST_GPU, MEMORY_HOST
from gpu_ops.spark.wire.connection import Address, Handler

_log = logging.getLogger(__name__)

PROBE_S: Final = 10.0
"""How long a server may take to answer the directory."""


_SNAPSHOT_S: Final = 600.0
"""How long it may take to write a snapshot; without it the log is replayed, and that is all."""

_DEATHS_KEPT: Final = 64

OVERHEAD: Final = "spark.executor.memoryOverhead"


class Death(NamedTuple):
    """The end of a state server that was killed, not by this application, or that has lost its GPU.

    Attributes:
        name: the server's name.
        pid: its process id, on the machine it ran on.
        tail: the end of its log.
        code: its exit code.
    """

    name: str
    pid: int
    tail: str
    code: int = -signal.SIGKILL

    @classmethod
    def of(cls, name: str, pid: int, code: int | None, tail: str) -> Death | None:
        """A death by a process's exit code (negative for a signal); None for a process that ended otherwise."""
        return cls(name, pid, tail, code) if code in (-signal.SIGKILL, LOST_GPU) else None

    def __str__(self) -> str:
        if self.code == LOST_GPU:
            return (
                f"State server {self.name}, process {self.pid}, ended because its GPU answered it no more: dmesg (Xid) "
                f"and nvidia-smi tell what is wrong with that. The end of the server's log:\n{self.tail.strip()}"
            )
        return (
            f"State server {self.name}, process {self.pid}, ended by signal 9: so the kernel ends a process when "
            f"memory runs out (dmesg tells). Give servers more room (on a cluster {OVERHEAD}), or have them need less: "
            f"more partitions, smaller micro-batches (maxFilesPerTrigger, maxOffsetsPerTrigger). With {MEMORY_HOST} a "
            f"micro-batch that needs more is refused before it is begun. The end of the server's log:\n"
            f"{self.tail.strip() or '(nothing)'}"
        )


class Server(abc.ABC):
    """A state server that was started, here or on another machine.

    Args:
        pid: its process id, on the machine it runs on.
        address: the server's address.

    Attributes:
        on_cpu: why a server that was given a GPU computes on the CPU; None where it does not.
    """

    def __init__(self, pid: int, address: Address) -> None:
        self.pid, self.address = pid, address
        self.on_cpu: str | None = None

    @property
    def location(self) -> str:
        """The URI that the server listens on, as Flight writes it."""
        return self.address.location

    @property
    @abc.abstractmethod
    def running(self) -> bool:
        """True if the server's process runs."""

    @property
    @abc.abstractmethod
    def death(self) -> Death | None:
        """The server's death; None while it runs, or if it ended otherwise than by being killed."""

    @abc.abstractmethod
    def stop(self, *, wait: bool = True) -> None:
        """Ends the server; with ``wait``, returns when it has ended."""

    @abc.abstractmethod
    def kill(self) -> None:
        """Ends a server that no longer answers."""


class Servers(abc.ABC):
    """All state servers of a Spark application.

    Args:
        patience_s: how long a server that is gone may take to come back.

    Attributes:
        token: the secret that every call must bring.
        gpus: which GPUs servers have, or why they have none.
    """

    def __init__(self, patience_s: float) -> None:
        self.token, self.patience_s, self.gpus = secrets.token_hex(32), patience_s, ""
        self._pools: dict[str, Pool] = {}

    def prepare(self) -> None:  # noqa: B027 - there may be nothing to do
        """Makes sure that servers can be started.

        Raises:
            StateError: they cannot.
        """

    def begin(self, backend: str, partitions: int) -> None:
        """Starts the servers of a join in the background, while Spark plans its query, or leaves them for later.

        Args:
            backend: the join's backend.
            partitions: the number of the join's partitions.

        Raises:
            BackendError: as `pool`.
        """
        del partitions
        self.pool(backend)

    @property
    def tasks(self) -> int:
        """The number of Spark tasks that run state servers; prepares them.

        Raises:
            StateError: they cannot.
        """
        return 0

    @property
    def actions(self) -> Mapping[str, Handler]:
        """The directory's actions, by name, besides those that locate a server and report to it."""
        return {}

    def pool(self, backend: str) -> Pool:
        """The pool of servers for a backend: the GPU pool for ``"auto"`` and ``"gpu"``, where there are GPUs.

        Raises:
            BackendError: ``"gpu"`` was asked for, and there are none.
            StateError: as `prepare`.
        """
        self.prepare()
        if backend == "gpu" and "gpu" not in self._pools:
            raise BackendError(f"backend='gpu' was asked for, but no GPU answers: {self.gpus}")
        return self._pools["cpu"] if backend == "cpu" else self._pools.get("gpu", self._pools["cpu"])

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
        """The place where the servers run, in words."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends all servers of the application."""


class Pool:
    """Slots for servers of one kind; the server of slot i is started when first needed, and again when it is gone.

    Args:
        servers: starts the servers.
        kind: ``"cpu"`` or ``"gpu"``.
        size: the number of slots.

    Attributes:
        deaths: by location, the servers that were killed.
    """

    def __init__(self, servers: Servers, kind: str, size: int) -> None:
        self.kind, self._servers = kind, servers
        self._slots: list[Server | None] = [None] * size
        self._locks = [threading.Lock() for _ in range(size)]
        self.deaths: dict[str, Death] = {}

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def running(self) -> list[Server]:
        """The servers of this pool that run."""
        return [s for s in self._slots if s is not None and s.running]

    def running_at(self, index: int) -> str | None:
        """The location of slot ``index``'s server; None where none runs."""
        server = self._slots[index]
        return server.location if server is not None and server.running else None

    def location(self, index: int, *, failed: str | None = None) -> str:
        """Returns the location of slot ``index``'s server, and starts or replaces the server if necessary.

        Args:
            index: the slot's number.
            failed: a location that did not answer; if it is still this slot's, its server is probed.

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
                    server.address.call("ping", timeout_s=PROBE_S)
                except (pa.ArrowException, OSError, GpuJoinError) as error:
                    _log.warning("state server %d does not answer; it is replaced: %s", server.pid, error)
                    server.kill()
                    self._bury(server)
                    server = None  # also where a file system keeps the process from ending
            if server is not None and not server.running:
                _log.warning("state server %d is gone; it is started anew", server.pid)
                self._bury(server)
                server.stop()
                server = None
            if server is None:
                server = self._slots[index] = self._servers.start(self.kind, index, deadline)
                if server.on_cpu is not None:
                    _log.warning(
                        "state server %s-%d was given a GPU and computes on the CPU, all its partitions in one process "
                        "(backend='cpu' has a server per core): %s",
                        self.kind, index, server.on_cpu,
                    )  # fmt: skip
            return server.location
        finally:
            self._locks[index].release()

    def _bury(self, server: Server) -> None:
        death = server.death
        if death is not None:
            _log.warning("%s", death)
            self.deaths[server.location] = death
            for location in list(self.deaths)[:-_DEATHS_KEPT]:
                del self.deaths[location]

    def begin(self, size: int) -> None:
        """Starts the servers of the first slots side by side, without waiting for them."""
        for index, server in enumerate(self._slots[:size]):
            if server is None:
                threading.Thread(target=self._begin, args=(index,), name="gpu-join-start", daemon=True).start()

    def _begin(self, index: int) -> None:
        try:
            self.location(index)
        except (StateError, RuntimeError) as error:  # the latter where Python is at its end
            _log.debug("state server %s-%d: %s", self.kind, index, error)  # whoever needs it tries again, and is told

    def release(self, index: int, join_id: str, version: int | None = None) -> None:
        """Has a slot's server drop a join's state from memory, if the server runs.

        Args:
            index: the slot.
            join_id: the join.
            version: the last one of a query that is over, if it is to be left as a snapshot.
        """
        server = self._slots[index]
        if server is None or not server.running:
            return
        try:
            request, patience = {"join_id": join_id, "version": version}, PROBE_S if version is None else _SNAPSHOT_S
            server.address.call("release", request, timeout_s=patience)
        except (pa.ArrowException, OSError, GpuJoinError) as error:
            _log.warning("state server %d did not release join %s: %s", server.pid, join_id, error)

    def close(self) -> None:
        """Ends all servers of the pool, side by side."""
        for server in self.running:
            server.stop(wait=False)
        for index, lock in enumerate(self._locks):
            with lock:  # one that is coming up is there by then, or refused
                started = self._slots[index]
            if started is not None:
                started.stop()
