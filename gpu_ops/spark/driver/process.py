"""State servers as child processes: of the driver in local mode, of a Spark task on an executor."""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib.util
import json
import logging
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import IO, Final

from gpu_ops.errors import BackendError, StateError
from gpu_ops.spark.driver.pools import Death, Pool, Server, Servers
from gpu_ops.spark.wire.connection import Address, Tls, format_location
from gpu_ops.state import files

_log = logging.getLogger(__name__)

START_S: Final = 90.0
"""How long a state server may take to listen."""

_STOP_S: Final = 5.0
_ENDING_S: Final = 0.5
_TAIL: Final = 2000
_MODULE: Final = "gpu_ops.spark.server.server"

ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""With a server per core each does with one thread; Arrow, OpenBLAS and MKL listen to these."""

KEPT_MEMORY: Final = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # the most that glibc takes
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
    "MALLOC_TOP_PAD_": str(64 << 20),  # as much as a heap of a thread, which is else unmapped when empty
}
"""glibc keeps what a micro-batch frees for the next (`mallopt(3)`): else the system clears the same pages each time.

Half as many page faults, and as much time in the kernel; an idle server gives that memory back (`StateServer.trim`).
"""

PACKAGE_ROOT: Final = str(Path(__file__).resolve().parents[3])
"""The folder to import the pack from; on a source tree nothing else says so to a child."""


class Process(Server):
    """One running state server, a child of this process.

    Args:
        popen: the child; its standard input stays open as long as it should live.
        address: of it.
        log: the file of its log, which is called after the server.
    """

    def __init__(self, popen: subprocess.Popen[bytes], address: Address, log: Path) -> None:
        super().__init__(popen.pid, address)
        self._popen, self._log, self._given_up = popen, log, False

    @property
    def running(self) -> bool:
        """Whether the process is there."""
        return self._popen.poll() is None

    @property
    def code(self) -> int | None:
        """Its exit code, when it is gone; of a signal the negative number."""
        return self._popen.poll()

    @property
    def death(self) -> Death | None:
        """How it was killed, unless `kill` did."""
        return None if self._given_up else Death.of(self._log.stem, self.pid, self.code, tail_of(self._log))

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
        """Ends a process that no longer answers; does not wait long for one that its file system holds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(_ENDING_S)  # its connections end a moment before it does
        self._given_up = self.running
        self._popen.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(_STOP_S)
        self.stop(wait=False)


class Launcher:
    """Starts state servers as children of this process.

    Args:
        token: what every call must bring.
        host: the address they listen on.
        tls: encrypts connections, if given.
        gpus: the ids of the GPUs, as CUDA_VISIBLE_DEVICES takes them.
        arguments: for each kind of server more words for the command line.
    """

    def __init__(
        self,
        token: str,
        *,
        host: str = "127.0.0.1",
        tls: Tls | None = None,
        gpus: Sequence[str] = (),
        arguments: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self._token, self._host, self._tls, self._gpus = token, host, tls, gpus
        self._arguments = dict(arguments or {})
        self.logs = files.temporary_folder()
        self._closed = False
        self._starting: set[subprocess.Popen[bytes]] = set()
        # The kernel may tie a child's life to the thread that started it; handlers' threads end.
        self._starter = concurrent.futures.ThreadPoolExecutor(1, "gpu-join-starter")

    def start(self, kind: str, name: str, number: int = 0) -> Process:
        """Starts a server and waits until it listens.

        Args:
            kind: ``"cpu"`` or ``"gpu"``.
            name: of its log.
            number: which of the GPUs it has.

        Raises:
            StateError: it does not; with the end of its log.
        """
        if self._closed:
            raise StateError("the Spark application has ended, and its state servers with it")
        began = time.monotonic()
        gpu = {"CUDA_VISIBLE_DEVICES": self._gpus[number % len(self._gpus)]} if kind == "gpu" else ONE_THREAD
        popen = self._starter.submit(self._spawn, name, gpu, self._arguments.get(kind, ())).result()
        try:
            port = _handshake(popen, began + START_S)
        except (ValueError, KeyError, TypeError, EOFError, OSError) as error:
            popen.kill()
            why = f"{error}; exit code {popen.wait()}"
            for pipe in filter(None, (popen.stdin, popen.stdout)):
                with contextlib.suppress(OSError):
                    pipe.close()
            raise StateError(f"state server {name} did not start ({why}):\n{self.tail(name)}") from error
        finally:
            self._starting.discard(popen)
        _log.info("state server %s: process %d, %.1f s", name, popen.pid, time.monotonic() - began)
        location = format_location(self._host, port, encrypted=self._tls is not None)
        return Process(popen, Address(location, self._token, self._tls), self._log_of(name))

    def tail(self, name: str) -> str:
        """The end of a server's log."""
        return tail_of(self._log_of(name))

    def _log_of(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def refuse(self) -> None:
        """Starts no more servers, and ends those that do not listen yet."""
        self._closed = True
        for popen in list(self._starting):
            popen.kill()

    def close(self) -> None:
        """Starts no more of them, and forgets their logs."""
        self.refuse()
        self._starter.shutdown()
        files.remove_temporary(self.logs)

    def _spawn(self, name: str, environment: Mapping[str, str], arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        # what this process can import: modules with a user's aggregate functions, too
        paths = [PACKAGE_ROOT, *filter(None, [os.environ.get("PYTHONPATH"), *sys.path])]
        shown = [] if self._tls is None else ["--tls-certificate", self._tls.certificate, self._tls.key]
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYSPARK_", "SPARK_"))}
        with self._log_of(name).open("ab") as stderr:
            popen = subprocess.Popen(  # noqa: S603 - our own module, by our own interpreter
                [
                    sys.executable,
                    "-m",
                    _MODULE,
                    "--name",
                    name,
                    "--backend",
                    "auto",
                    "--host",
                    self._host,
                    *shown,
                    *arguments,
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={
                    **numpy_environment(),
                    **KEPT_MEMORY,
                    **inherited,
                    "PYTHONPATH": os.pathsep.join(paths),
                    **environment,
                },
                close_fds=True,  # Spark's sockets and other servers' pipes stay with this process
                start_new_session=True,  # an interrupt in a notebook is not meant for a server
            )
        self._starting.add(popen)
        _write_token(popen.stdin, self._token)
        if self._closed:
            popen.kill()  # its handshake fails
        return popen


def tail_of(log: Path) -> str:
    """The end of a log."""
    return log.read_text(errors="replace")[-_TAIL:] if log.exists() else ""


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
    poll = select.poll()  # select() takes no descriptor above 1023
    poll.register(popen.stdout, select.POLLIN)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1e3):
        raise TimeoutError(f"silent for {START_S:.0f} s")
    line = popen.stdout.readline()
    if not line:
        raise EOFError("it ended before it listened")
    return int(json.loads(line)["port"])


_ZEN_4: Final = {"vendor_id": "AuthenticAMD", "cpu family": "25"}
"""The processors of that family with AVX-512."""


def numpy_environment(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """Variables of the environment with which NumPy sorts fast.

    NumPy sorts 64-bit numbers with AVX-512 where there is any. On AMD's Zen 4 an instruction of it, a compressing store
    to memory, is microcode, and AVX2 sorts four times as fast (github.com/numpy/x86-simd-sort/issues/6; the JDK chooses
    by the same family, JDK-8317976).

    Args:
        cpuinfo: the file in which Linux describes the processor.
    """
    try:
        described = cpuinfo.read_text().split("\n\n", maxsplit=1)[0]
    except OSError:
        return {}  # no Linux
    parts = (line.split(":", maxsplit=1) for line in described.splitlines() if ":" in line)
    facts = {name.strip(): value.strip() for name, value in parts}
    if any(facts.get(name) != value for name, value in _ZEN_4.items()) or "avx512f" not in facts.get("flags", ""):
        return {}
    # a name that this NumPy does not have is warned of
    older = tuple(map(int, metadata.version("numpy").split(".")[:2])) < (2, 4)
    return {"NPY_DISABLE_CPU_FEATURES": f"{'AVX512_SKX' if older else 'X86_V4'} AVX512_ICL"}


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
