"""What runs on an executor of a cluster: a Spark task that starts state servers as the directory asks for them.

It keeps one connection to the directory, whose messages are lines of JSON. The directory says
``{"id": n, "do": "start", "name": ..., "kind": "cpu"|"gpu", "number": m}``, ``{"id": n, "do": "kill", "pid": p}``
or ``{"do": "leave"}``; the agent answers with the same id, and says ``{"gone": pid, ...}`` of a server that has
died. The servers end with the task: with its connection, its process, or its executor.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from gpu_ops.errors import StateError
from gpu_ops.spark.exchange.exchange import Address
from gpu_ops.spark.servers.channel import Channel
from gpu_ops.spark.servers.process import ONE_THREAD, Launcher, Process

_TICK_S: Final = 0.5
_CONNECT_S: Final = 30.0


class Agent:
    """The function of ``mapPartitions`` in a group's job; the element is the number of a group of servers.

    Args:
        address: of the directory.
        job: the number of the job, for the directory.
        arguments: for each kind of server more words for the command line.
    """

    def __init__(self, address: Address, job: int, arguments: Mapping[str, Sequence[str]]) -> None:
        self._address, self._job, self._arguments = address, job, dict(arguments)

    def __call__(self, groups: Iterator[int]) -> Iterator[int]:
        """Gives each group's number back when the directory needs its servers here no more."""
        for group in groups:
            self._serve(group)
            yield group

    def _serve(self, group: int) -> None:
        from pyspark import TaskContext  # noqa: PLC0415 - as in client.py

        context = TaskContext.get()
        assert context is not None
        given = context.resources().get("gpu")
        gpus = [str(address) for address in given.addresses] if given is not None else []
        connection = self._address._replace(patience_s=_CONNECT_S).connect()
        # The way to the driver is the executor's own address; no setting could know it better.
        host = str(connection.getsockname()[0])
        channel = Channel(connection)
        try:
            channel.send(
                {
                    "op": "offer",
                    "token": self._address.token,
                    "job": self._job,
                    "group": group,
                    "task": context.taskAttemptId(),
                    "stage": context.stageId(),
                    # All Python workers of an executor have one parent, and no other executor's has its place.
                    "executor": f"{socket.gethostname()}:{os.getppid()}:{os.getcwd()}",
                    "host": host,
                    "cores": len(os.sched_getaffinity(0)),
                    "gpus": gpus,
                }
            )
            Keeper(channel, self._address.token, host, gpus, self._arguments).run()
        finally:
            channel.close()


class Keeper:
    """The servers of one group.

    Args:
        channel: to the directory.
        token: what calls to the servers must bring.
        host: the address they listen on.
        gpus: as Spark names them to the task.
        arguments: for each kind of server more words for the command line.
    """

    def __init__(
        self,
        channel: Channel,
        token: str,
        host: str,
        gpus: Sequence[str],
        arguments: Mapping[str, Sequence[str]],
    ) -> None:
        self._channel, self._gpus, self._arguments = channel, gpus, arguments
        self._launcher = Launcher(token, host=host)
        self._children: dict[int, tuple[str, Process]] = {}
        self._closed = False
        self._lock = threading.Lock()

    def run(self) -> None:
        """Does what the directory says until it says "leave".

        Raises:
            StateError: the directory or the executor is gone.
        """
        parent = os.getppid()
        try:
            while True:
                try:
                    message = self._channel.receive(_TICK_S)
                except EOFError as error:
                    raise StateError(f"the driver's directory of state servers is gone: {error}") from error
                if os.getppid() != parent:
                    raise StateError("the executor is gone")
                self._report_the_dead()
                if message is None:
                    continue
                if message.get("do") == "leave":
                    return
                threading.Thread(target=self._answer, args=(message,), daemon=True).start()
        finally:
            self._close()

    def _answer(self, message: Mapping[str, Any]) -> None:
        process = None
        name = str(message.get("name"))
        try:
            if message["do"] == "start":
                process = self._start(name, message)
                answer: dict[str, Any] = {"pid": process.pid, "location": process.location}
            else:
                answer = self._kill(int(message["pid"]))
        except Exception as error:  # whatever it is, the directory waits for an answer
            answer = {"error": str(error) or repr(error)}
        try:
            self._channel.send({"id": message["id"], **answer})
        except OSError as error:
            print(f"the directory does not take an answer: {error}", flush=True)  # noqa: T201 - the executor's log
        if process is not None:
            # After the answer: that it is gone must not be said before that it is there.
            self._keep(name, process)

    def _start(self, name: str, message: Mapping[str, Any]) -> Process:
        environment: Mapping[str, str] = ONE_THREAD
        kind = str(message["kind"])
        if kind == "gpu":
            environment = {"CUDA_VISIBLE_DEVICES": self._gpus[int(message["number"]) % len(self._gpus)]}
        return self._launcher.start(name, environment, self._arguments.get(kind, ()))

    def _keep(self, name: str, process: Process) -> None:
        with self._lock:
            if not self._closed:
                self._children[process.pid] = name, process
                return
        process.stop()

    def _kill(self, pid: int) -> dict[str, Any]:
        with self._lock:
            found = self._children.pop(pid, None)
        if found is not None:
            found[1].kill()
        return {"pid": pid}

    def _report_the_dead(self) -> None:
        with self._lock:
            dead = [(pid, name, process) for pid, (name, process) in self._children.items() if not process.running]
            for pid, _, _ in dead:
                del self._children[pid]
        for pid, name, process in dead:
            tail = self._launcher.tail(name)
            print(f"state server {name}, process {pid}, has ended ({process.code}):\n{tail}", flush=True)  # noqa: T201
            process.stop()
            try:
                self._channel.send({"gone": pid, "name": name, "code": process.code})
            except OSError:
                return  # the next look at the channel says so

    def _close(self) -> None:
        with self._lock:
            children = [process for _, process in self._children.values()]
            self._children, self._closed = {}, True
        for process in children:
            process.stop(wait=False)
        for process in children:
            process.stop()
        self._launcher.close()
