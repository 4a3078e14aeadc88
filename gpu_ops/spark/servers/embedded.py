"""State servers in local mode: child processes of the driver, on loopback."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from gpu_ops.errors import BackendError
from gpu_ops.spark.servers.pools import Pool, Servers
from gpu_ops.spark.servers.process import START_S, Launcher, Process, find_gpus


class EmbeddedServers(Servers):
    """All state servers of an application in local mode: one per core, or per GPU where there are any.

    Args:
        cores: of the Spark application.
        arguments: for each kind of server more words for the command line.
    """

    def __init__(self, cores: int, arguments: Mapping[str, Sequence[str]] | None = None) -> None:
        super().__init__(START_S)
        gpus, self.no_gpu = find_gpus()
        self._launcher = Launcher(self.token, gpus=gpus, arguments=arguments)
        self._pools["cpu"] = Pool(self, "cpu", max(1, min(cores, os.cpu_count() or 1)))
        if gpus:
            self._pools["gpu"] = Pool(self, "gpu", len(gpus))

    def begin(self, backend: str, partitions: int) -> None:
        """Starts the servers of a join, in the background.

        Raises:
            BackendError: it is to run on a GPU, and there is none.
        """
        if backend == "gpu" and "gpu" not in self._pools:
            raise BackendError(f"backend='gpu' was asked for, but no GPU answers: {self.no_gpu}")
        self.pool(backend).begin(partitions)

    def start(self, kind: str, index: int, deadline: float) -> Process:
        """Starts the server of a slot and waits until it listens.

        Raises:
            StateError: it does not; with the end of its log.
        """
        del deadline  # there is always a place for it
        return self._launcher.start(kind, f"{kind}-{index}", index)

    def where(self) -> str:
        """In words, where they run."""
        return "on this machine"

    def close(self) -> None:
        """Ends all servers."""
        self._launcher.refuse()
        for pool in self._pools.values():
            pool.close()
        self._launcher.close()
