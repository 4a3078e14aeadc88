"""State servers as child processes: of the driver in local mode, of a Spark task on an executor."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import logging
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

from gpu_ops.errors import StateError
from gpu_ops.spark.driver.machine import BY_BUS, KEPT_MEMORY, ONE_THREAD, find_gpus, numpy_environment
from gpu_ops.spark.driver.pools import Death, Pool, Server, Servers
from gpu_ops.spark.wire.connection import Address, Tls, format_location
from gpu_ops.state import files

_log = logging.getLogger(__name__)

START_S: Final = 90.0
"""How long a state server may take to listen."""

_MOST_KILLED: Final = 3
"""So often may a state server be killed while it starts: what killed it twice does so again."""

_STOP_S: Final = 5.0
_ENDING_S: Final = 0.5
_TAIL: Final = 2000
_MODULE: Final = "gpu_ops.spark.server.server"

PACKAGE_ROOT: Final = str(Path(__file__).resolve().parents[3])
"""The folder to import the pack from; on a source tree nothing else says so to a child."""


class ServerProcess(Server):
    """A state server that is a child of this process.

    Args:
        popen: the child; its standard input stays open as long as it should live.
        address: the server's address.
        log: its log file, which is named after the server.
    """

    def __init__(self, popen: subprocess.Popen[bytes], address: Address, log: Path) -> None:
        super().__init__(popen.pid, address)
        self._popen, self._log, self._given_up = popen, log, False

    @property
    def running(self) -> bool:
        """True if the process runs."""
        return self._popen.poll() is None

    @property
    def code(self) -> int | None:
        """The exit code of a process that has ended, negative for a signal; None while it runs."""
        return self._popen.poll()

    @property
    def death(self) -> Death | None:
        """The server's death, if something other than `kill` has killed it."""
        return None if self._given_up else Death.of(self._log.stem, self.pid, self.code, tail_of(self._log))

    def stop(self, *, wait: bool = True) -> None:
        """Ends the process: closes its standard input first, sends signals if that does not help."""
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
        token: the secret that every call must bring.
        host: the address they listen on.
        tls: encrypts connections, if given.
        gpus: the ids of the GPUs, as CUDA_VISIBLE_DEVICES takes them; without any a ``"gpu"`` server has the CPU.
        arguments: for each kind of server, further arguments of its command line.
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

    def start(self, kind: str, name: str, number: int = 0) -> ServerProcess:
        """Starts a server and waits until it listens.

        Args:
            kind: ``"cpu"`` or ``"gpu"``.
            name: the name of its log.
            number: the number of the GPU it has.

        Raises:
            StateError: it does not; with the end of its log.
        """
        backend = "auto" if kind == "gpu" else "cpu"  # one per core; they would share the first card
        arguments = ["--backend", backend, *self._arguments.get(kind, ())]
        until, killed = time.monotonic() + START_S, 0
        while True:
            if self._closed:
                raise StateError("the Spark application has ended, and its state servers with it")
            began = time.monotonic()
            try:
                popen = self._starter.submit(self._spawn, name, self._environment(kind, number), arguments).result()
            except (OSError, RuntimeError) as error:  # no room for a process or its log; it is closed meanwhile
                raise StateError(f"state server {name} cannot be started: {error}") from error
            try:
                greeting = _handshake(popen, until)
                port = int(greeting["port"])
                break
            except (ValueError, KeyError, TypeError, EOFError, OSError) as error:
                by_others, code = _ended(popen)
                killed += by_others
                if by_others and killed < _MOST_KILLED and time.monotonic() < until and not self._closed:
                    _log.warning("state server %s was killed while it started (%d); it is started anew", name, code)
                    continue
                often = f", {killed} times" if killed > 1 else ""
                why = f"{error}; exit code {code}{often}"
                death = Death.of(name, popen.pid, code, self.tail(name)) if by_others else None
                told = f"({why}):\n{self.tail(name)}" if death is None else f"({why}). {death}"
                raise StateError(f"state server {name} did not start {told}") from error
            finally:
                self._starting.discard(popen)
        _log.info("state server %s: process %d, %.1f s", name, popen.pid, time.monotonic() - began)
        location = format_location(self._host, port, encrypted=self._tls is not None)
        server = ServerProcess(popen, Address(location, self._token, self._tls), self._log_of(name))
        server.on_cpu = greeting.get("on_cpu")
        return server

    def _environment(self, kind: str, number: int) -> dict[str, str]:
        """The environment variables of a server's process."""
        defaults, settled = {**numpy_environment(), **KEPT_MEMORY}, ONE_THREAD
        if kind == "gpu":
            defaults |= BY_BUS
            settled = {"CUDA_VISIBLE_DEVICES": self._gpus[number % len(self._gpus)] if self._gpus else ""}
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYSPARK_", "SPARK_"))}
        # what this process can import: modules with a user's aggregate functions, too
        paths = [PACKAGE_ROOT, *filter(None, [os.environ.get("PYTHONPATH"), *sys.path])]
        return {**defaults, **inherited, "PYTHONPATH": os.pathsep.join(paths), **settled}

    def tail(self, name: str) -> str:
        """The last lines of a server's log."""
        return tail_of(self._log_of(name))

    def _log_of(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def refuse(self) -> None:
        """Refuses further starts, and ends servers that do not listen yet."""
        self._closed = True
        for popen in list(self._starting):
            popen.kill()

    def close(self) -> None:
        """Refuses further starts, and removes the logs."""
        self.refuse()
        self._starter.shutdown()
        files.remove_temporary(self.logs)

    def _spawn(self, name: str, environment: Mapping[str, str], arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        encryption = [] if self._tls is None else ["--tls-certificate", self._tls.certificate, self._tls.key]
        command = [sys.executable, "-m", _MODULE, "--name", name, "--host", self._host]
        if not self.logs.is_dir():  # a cleaner of temporary files has removed it
            files.remove_temporary(self.logs)
            self.logs = files.temporary_folder()
        with self._log_of(name).open("ab") as stderr:
            popen = subprocess.Popen(  # noqa: S603 - our own module, by our own interpreter
                [*command, *encryption, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=environment,
                close_fds=True,  # Spark's sockets and other servers' pipes stay with this process
                start_new_session=True,  # an interrupt in a notebook is not meant for a server
            )
        self._starting.add(popen)
        _write_token(popen.stdin, self._token)
        if self._closed:
            popen.kill()  # its handshake fails
        return popen


def tail_of(log: Path) -> str:
    """The last 2,000 bytes of a log file; empty where the file is gone."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _write_token(stdin: IO[bytes] | None, token: str) -> None:
    assert stdin is not None
    try:
        stdin.write(json.dumps({"token": token}).encode() + b"\n")
        stdin.flush()
    except BrokenPipeError as error:
        _log.debug("a state server ended at once: %s", error)  # its handshake fails and says why


def _handshake(popen: subprocess.Popen[bytes], deadline: float) -> dict[str, Any]:
    assert popen.stdout is not None
    poll = select.poll()  # select() takes no descriptor above 1023
    poll.register(popen.stdout, select.POLLIN)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1e3):
        raise TimeoutError(f"silent for {START_S:.0f} s")
    line = popen.stdout.readline()
    if not line:
        raise EOFError("it ended before it listened")
    return dict(json.loads(line))


def _ended(popen: subprocess.Popen[bytes]) -> tuple[bool, int]:
    """Ends a process that has not come up; returns True if somebody else has killed it, and its exit code."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        popen.wait(_ENDING_S)  # its connections end a moment before it does
    by_others = (popen.poll() or 0) < 0
    popen.kill()
    code = popen.wait()
    for pipe in filter(None, (popen.stdin, popen.stdout)):
        with contextlib.suppress(OSError):
            pipe.close()
    return by_others, code


class EmbeddedServers(Servers):
    """All state servers of an application in local mode: one per core, or per GPU where there are any.

    Args:
        cores: the number of cores of the Spark application.
        arguments: for each kind of server, further arguments of its command line.
    """

    def __init__(self, cores: int, arguments: Mapping[str, Sequence[str]] | None = None) -> None:
        super().__init__(START_S)
        gpus, self.gpus = find_gpus()
        self._launcher = Launcher(self.token, gpus=gpus, arguments=arguments)
        self._pools["cpu"] = Pool(self, "cpu", max(1, min(cores, os.cpu_count() or 1)))
        if gpus:
            self._pools["gpu"] = Pool(self, "gpu", len(gpus))

    def begin(self, backend: str, partitions: int) -> None:
        """Starts the servers of a join, in the background.

        Raises:
            BackendError: as `pool`.
        """
        self.pool(backend).begin(partitions)

    def start(self, kind: str, index: int, deadline: float) -> ServerProcess:
        """Starts the server of a slot and waits until it listens.

        Raises:
            StateError: it does not; with the end of its log.
        """
        del deadline  # there is always a place for it
        return self._launcher.start(kind, f"{kind}-{index}", index)

    def where(self) -> str:
        """The place where the servers run, in words."""
        return "on this machine"

    def close(self) -> None:
        """Ends all servers of the application."""
        self._launcher.refuse()
        for pool in self._pools.values():
            pool.close()
        self._launcher.close()
