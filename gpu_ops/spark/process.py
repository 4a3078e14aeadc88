"""State servers as child processes of the driver."""

from __future__ import annotations

import concurrent.futures
import importlib.util
import json
import logging
import os
import secrets
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, Final

import pyarrow as pa
from pyarrow import flight

from gpu_ops.errors import StateError

_log = logging.getLogger(__name__)

_START_S: Final = 90.0
_PING_S: Final = 5.0
_STOP_S: Final = 5.0

#: With a server per core each does with one thread; Arrow, OpenBLAS and MKL listen to these.
_ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

PACKAGE_ROOT: Final = str(Path(__file__).resolve().parent.parent.parent)
"""The folder to import the pack from; on a source tree nothing else says so to a child."""


class Process:
    """One running state server.

    Args:
        popen: the child; its standard input stays open as long as it should live.
        port: where it listens on loopback.
    """

    def __init__(self, popen: subprocess.Popen[bytes], port: int) -> None:
        self._popen, self.location = popen, f"grpc://127.0.0.1:{port}"

    @property
    def pid(self) -> int:
        """The process id."""
        return self._popen.pid

    @property
    def running(self) -> bool:
        """Whether the process is there."""
        return self._popen.poll() is None

    def action(self, name: str, body: bytes, token: str) -> bytes:
        """Runs a Flight action.

        Raises:
            FlightError: it did not answer in time, or refused.
        """
        headers = [(b"authorization", f"Bearer {token}".encode())]
        with flight.FlightClient(self.location) as client:
            options = flight.FlightCallOptions(timeout=_PING_S, headers=headers)
            results = list(client.do_action(flight.Action(name, body), options))
        return bytes(results[0].body.to_pybytes()) if results else b""

    def stop(self, *, wait: bool = True) -> None:
        """Ends the process: the end of its standard input first, signals if that does not help."""
        if self._popen.stdin is not None:
            try:
                self._popen.stdin.close()
            except OSError as error:
                _log.debug("state server %d: %s", self.pid, error)
        for signal in (None, self._popen.terminate, self._popen.kill) if wait else ():
            if signal is not None:
                signal()
            try:
                self._popen.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                continue
            break
        if self._popen.stdout is not None:
            self._popen.stdout.close()

    def kill(self) -> None:
        """Ends a process that no longer answers."""
        self._popen.kill()
        self.stop()


class Pool:
    """Servers of one kind; slot i is started when first needed, and again when it is gone.

    Args:
        servers: token and folder for logs.
        kind: ``"cpu"`` or ``"gpu"``.
        environments: what each slot's process finds in its environment.
    """

    def __init__(self, servers: Servers, kind: str, environments: list[dict[str, str]]) -> None:
        self.kind, self._servers, self._environments = kind, servers, environments
        self._slots: list[Process | None] = [None] * len(environments)
        self._locks = [threading.Lock() for _ in environments]

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def running(self) -> list[Process]:
        """The processes that are there."""
        return [p for p in self._slots if p is not None and p.running]

    def location(self, index: int, *, failed: str | None = None) -> str:
        """Where slot ``index`` listens.

        Args:
            index: which slot.
            failed: a location that did not answer; if that is still this slot's, it is looked at.

        Raises:
            StateError: the server does not start.
        """
        with self._locks[index]:
            process = self._slots[index]
            if process is not None and process.running and failed == process.location:
                try:
                    process.action("ping", b"", self._servers.token)
                except (pa.ArrowException, OSError) as error:
                    _log.warning("state server %d does not answer: %s", process.pid, error)
                    process.kill()
            if process is not None and not process.running:
                _log.warning("state server %d is gone; it is started anew", process.pid)
                process.stop()
                process = None
            if process is None:
                name = f"{self.kind}-{index}"
                process = self._slots[index] = self._servers.start(name, self._environments[index])
            return process.location

    def release(self, index: int, join_id: str) -> None:
        """Lets a slot's server drop a join from memory, if it runs."""
        process = self._slots[index]
        if process is None or not process.running:
            return
        try:
            process.action("release", json.dumps({"join_id": join_id}).encode(), self._servers.token)
        except (pa.ArrowException, OSError) as error:
            _log.warning("state server %d did not release join %s: %s", process.pid, join_id, error)

    def close(self) -> None:
        """Ends all of them, side by side."""
        for process in self.running:
            process.stop(wait=False)
        for started in self._slots:
            if started is not None:
                started.stop()


class Servers:
    """All state servers of an application.

    Args:
        token: what every call must bring.
        cores: how many servers without a GPU.
        gpus: the ids of the GPUs, as CUDA_VISIBLE_DEVICES takes them.
        no_gpu: why there are none.
        module: what a child runs.
    """

    def __init__(
        self,
        token: str,
        cores: int,
        gpus: list[str],
        no_gpu: str = "",
        *,
        module: str = "gpu_ops.spark.server",
    ) -> None:
        self.token, self.no_gpu, self._module = token, no_gpu, module
        self._logs = Path(tempfile.mkdtemp(prefix="gpu-join-"))
        self._closed = False
        # The kernel may tie a child's life to the thread that started it; handlers' threads end.
        self._starter = concurrent.futures.ThreadPoolExecutor(1, "gpu-join-starter")
        self._pools = {"cpu": Pool(self, "cpu", [_ONE_THREAD] * max(1, cores))}
        if gpus:
            self._pools["gpu"] = Pool(self, "gpu", [{"CUDA_VISIBLE_DEVICES": g} for g in gpus])

    @classmethod
    def for_cores(cls, cores: int) -> Servers:
        """One server per core, or per GPU where there are any; a token of its own.

        Args:
            cores: of the Spark application.
        """
        return cls(secrets.token_hex(32), min(cores, os.cpu_count() or 1), *find_gpus())

    def pool(self, backend: str) -> Pool:
        """The servers for a backend: the GPUs' for ``"auto"`` and ``"gpu"``, where there are any."""
        return self._pools["cpu"] if backend == "cpu" else self._pools.get("gpu", self._pools["cpu"])

    @property
    def logs(self) -> Path:
        """The folder with the servers' logs."""
        return self._logs

    def start(self, name: str, environment: dict[str, str]) -> Process:
        """Starts a server and waits until it listens.

        Raises:
            StateError: it does not; with the end of its log.
        """
        if self._closed:
            raise StateError("the Spark application has ended, and its state servers with it")
        began = time.monotonic()
        log = self._logs / f"{name}.log"
        popen = self._starter.submit(self._spawn, log, environment).result()
        try:
            port = _handshake(popen, began + _START_S)
        except (ValueError, KeyError, TypeError, EOFError, OSError) as error:
            popen.kill()
            code = popen.wait()
            tail = log.read_text(errors="replace")[-2000:]
            why = f"{error}; exit code {code}"
            raise StateError(f"state server {name} did not start ({why}):\n{tail}") from error
        _log.info("state server %s: process %d, %.1f s", name, popen.pid, time.monotonic() - began)
        return Process(popen, port)

    def close(self) -> None:
        """Ends all servers."""
        self._closed = True
        for pool in self._pools.values():
            pool.close()
        self._starter.shutdown()
        shutil.rmtree(self._logs, ignore_errors=True)

    def _spawn(self, log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        paths = [PACKAGE_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYSPARK_", "SPARK_"))}
        with log.open("ab") as stderr:
            popen = subprocess.Popen(  # noqa: S603 - our own module, by our own interpreter
                [sys.executable, "-m", self._module, "--backend", "auto"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**inherited, "PYTHONPATH": os.pathsep.join(paths), **environment},
                close_fds=True,  # Spark's sockets and other servers' pipes stay with the driver
                start_new_session=True,  # an interrupt in a notebook is not meant for a server
            )
        _write_token(popen.stdin, self.token)
        return popen


def find_gpus() -> tuple[list[str], str]:
    """The GPUs that a server could use, as CUDA_VISIBLE_DEVICES names them, and why there are none."""
    for module in ("cupy", "pylibcudf", "rmm"):
        if importlib.util.find_spec(module) is None:
            return [], f"{module} is not installed"
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        gpus = [g.strip() for g in listed.split(",") if g.strip() and g.strip() != "-1"]
        return gpus, f"CUDA_VISIBLE_DEVICES is {listed!r}"
    devices = [p.name.removeprefix("nvidia") for p in Path("/dev").glob("nvidia[0-9]*")]
    return sorted((d for d in devices if d.isdigit()), key=int), "there is no /dev/nvidia0"


def _write_token(stdin: IO[bytes] | None, token: str) -> None:
    assert stdin is not None
    try:
        stdin.write(json.dumps({"token": token}).encode() + b"\n")
        stdin.flush()
    except BrokenPipeError as error:
        _log.debug("a state server ended at once: %s", error)  # its handshake fails and says why


def _handshake(popen: subprocess.Popen[bytes], deadline: float) -> int:
    assert popen.stdout is not None
    ready, _, _ = select.select([popen.stdout], [], [], max(0.0, deadline - time.monotonic()))
    if not ready:
        raise TimeoutError(f"silent for {_START_S:.0f} s")
    line = popen.stdout.readline()
    if not line:
        raise EOFError("it ended before it listened")
    return int(json.loads(line)["port"])
