"""State servers in local mode: child processes of the driver, on loopback."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpu_ops.spark.servers.pools import Pool, Servers
from gpu_ops.spark.servers.process import ONE_THREAD, START_S, Launcher, Process, find_gpus


class EmbeddedServers(Servers):
    """All state servers of an application in local mode.

    Args:
        token: what every call must bring.
        cores: how many servers without a GPU.
        gpus: the ids of the GPUs, as CUDA_VISIBLE_DEVICES takes them.
        no_gpu: why there are none.
        arguments: for each kind of server more words for the command line.
    """

    def __init__(
        self,
        token: str,
        cores: int,
        gpus: Sequence[str],
        no_gpu: str = "",
        *,
        arguments: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        super().__init__(token, START_S)
        self.no_gpu = no_gpu
        self._launcher, self._arguments = Launcher(token), dict(arguments or {})
        self._environments = {"cpu": [ONE_THREAD] * max(1, cores)}
        if gpus:
            self._environments["gpu"] = [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus]
        self._pools = {kind: Pool(self, kind, len(found)) for kind, found in self._environments.items()}

    @classmethod
    def for_cores(cls, cores: int, arguments: Mapping[str, Sequence[str]] | None = None) -> EmbeddedServers:
        """One server per core, or per GPU where there are any; a token of its own.

        Args:
            cores: of the Spark application.
            arguments: for each kind of server more words for the command line.
        """
        return cls(secrets.token_hex(32), min(cores, os.cpu_count() or 1), *find_gpus(), arguments=arguments)

    def prepare(self) -> None:
        """They are started when needed."""

    def pool(self, backend: str) -> Pool:
        """The servers for a backend: the GPUs' for ``"auto"`` and ``"gpu"``, where there are any."""
        return self._pools["cpu"] if backend == "cpu" else self._pools.get("gpu", self._pools["cpu"])

    @property
    def logs(self) -> Path:
        """The folder with the servers' logs."""
        return self._launcher.logs

    def start(self, kind: str, index: int, deadline: float) -> Process:
        """Starts the server of a slot and waits until it listens.

        Raises:
            StateError: it does not; with the end of its log.
        """
        del deadline  # there is always a place for it
        return self._launcher.start(f"{kind}-{index}", self._environments[kind][index], self._arguments.get(kind, ()))

    def where(self) -> str:
        """In words, where they run."""
        return "on this machine"

    def close(self) -> None:
        """Ends all servers."""
        for pool in self._pools.values():
            pool.close()
        self._launcher.close()
