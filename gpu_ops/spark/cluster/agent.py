"""What runs on an executor of a cluster: a Spark task that starts state servers as the directory asks for them.

It offers itself to the directory, then asks for commands again and again; each time the directory waits a while for
one. So either end notices within seconds that the other is gone. The servers end with the task: with its directory, its
process, or its executor.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa

from gpu_ops.errors import GpuJoinError, StateError
from gpu_ops.spark.cluster.remote import SILENT_S
from gpu_ops.spark.exchange.connection import Address
from gpu_ops.spark.exchange.exchange import ask
from gpu_ops.spark.servers.process import Launcher, Process


class Agent:
    """The function of ``mapPartitions`` in a group's job; the element is the number of a group of servers.

    Args:
        directory: its address.
        job: the number of the job, for the directory.
        arguments: for each kind of server more words for the command line.
    """

    def __init__(self, directory: Address, job: int, arguments: Mapping[str, Sequence[str]]) -> None:
        self._directory, self._job, self._arguments = directory, job, dict(arguments)

    def __call__(self, groups: Iterator[int]) -> Iterator[int]:
        """Gives each group's number back when the directory needs its servers here no more."""
        for group in groups:
            self._serve(group)
            yield group

    def _serve(self, group: int) -> None:
        from pyspark import TaskContext  # noqa: PLC0415 - only in a Spark task

        context = TaskContext.get()
        assert context is not None
        given = context.resources().get("gpu")
        gpus = [str(address) for address in given.addresses] if given is not None else []
        host = own_address(self._directory)
        offer = {
            "job": self._job,
            "group": group,
            "task": context.taskAttemptId(),
            "stage": context.stageId(),
            # All Python workers of an executor have one parent, and no other executor's has its working folder.
            "executor": f"{socket.gethostname()}:{os.getppid()}:{os.getcwd()}",
            "host": host,
            "cores": len(os.sched_getaffinity(0)),
            "gpus": gpus,
        }
        agent = ask(self._directory, "offer", offer)["agent"]
        ServerGroup(self._directory, agent, host, gpus, self._arguments).run()


def own_address(directory: Address) -> str:
    """The address of this machine that the directory is reached from; no setting could know it better.

    Raises:
        StateError: it is not reached.
    """
    found = urlsplit(directory.location)
    try:
        with socket.create_connection((found.hostname, found.port), timeout=SILENT_S) as connection:
            return str(connection.getsockname()[0])
    except OSError as error:
        raise StateError(f"the driver's directory of state servers does not answer: {error}") from error


class ServerGroup:
    """The servers of one group, children of this process.

    Args:
        directory: its address.
        agent: what the directory calls this agent.
        host: the address they listen on.
        gpus: as Spark names them to the task.
        arguments: for each kind of server more words for the command line.
    """

    def __init__(
        self,
        directory: Address,
        agent: str,
        host: str,
        gpus: Sequence[str],
        arguments: Mapping[str, Sequence[str]],
    ) -> None:
        self._directory, self._agent = directory, agent
        self._launcher = Launcher(directory.token, host=host, tls=directory.tls, gpus=gpus, arguments=arguments)
        self._children: dict[int, tuple[str, Process]] = {}
        self._unannounced: set[int | None] = set()  # the directory has to hear that one is there before it has ended
        self._closed = False
        self._lock = threading.Lock()

    def run(self) -> None:
        """Does what the directory asks for until it says that nothing more is needed.

        Raises:
            StateError: the directory or the executor is gone.
        """
        parent = os.getppid()
        try:
            with self._directory.connect() as client:
                while os.getppid() == parent:
                    request = {"agent": self._agent, "ended": self._ended()}
                    try:
                        answer = self._directory.call("commands", request, timeout_s=SILENT_S, client=client)
                    except (pa.ArrowException, OSError, GpuJoinError) as error:
                        raise StateError(f"the driver's directory of state servers is gone: {error}") from error
                    for command in answer["commands"]:
                        if command["do"] == "leave":
                            return
                        threading.Thread(target=self._obey, args=(command,), daemon=True).start()
            raise StateError("the executor is gone")
        finally:
            self._close()

    def _obey(self, command: Mapping[str, Any]) -> None:
        pid = None
        try:
            if command["do"] == "start":
                process = self._start(str(command["name"]), command)
                pid, result = process.pid, {"pid": process.pid, "location": process.location}
            else:
                result = self._kill(int(command["pid"]))
        except Exception as error:  # whatever it is, the directory waits for an answer
            result = {"error": str(error) or repr(error)}
        try:
            ask(self._directory, "done", {"agent": self._agent, "id": command["id"], **result})
        except GpuJoinError as error:
            print(f"the directory does not take an answer: {error}", flush=True)  # noqa: T201 - the executor's log
        self._unannounced.discard(pid)

    def _start(self, name: str, command: Mapping[str, Any]) -> Process:
        process = self._launcher.start(str(command["kind"]), name, int(command["number"]))
        with self._lock:
            if not self._closed:
                self._unannounced.add(process.pid)
                self._children[process.pid] = name, process
                return process
        process.stop()
        raise StateError("the agent has ended")

    def _kill(self, pid: int) -> dict[str, Any]:
        with self._lock:
            found = self._children.pop(pid, None)
        if found is not None:
            found[1].kill()
        return {"pid": pid}

    def _ended(self) -> list[dict[str, Any]]:
        """The servers that have ended since this was last asked."""
        with self._lock:
            known = [(pid, *child) for pid, child in self._children.items() if pid not in self._unannounced]
            ended = [(pid, name, process) for pid, name, process in known if not process.running]
            for pid, _, _ in ended:
                del self._children[pid]
        for pid, name, process in ended:
            tail = self._launcher.tail(name)
            print(f"state server {name}, process {pid}, has ended ({process.code}):\n{tail}", flush=True)  # noqa: T201
            process.stop()
        return [{"pid": pid, "name": name, "code": process.code} for pid, name, process in ended]

    def _close(self) -> None:
        with self._lock:
            children = [process for _, process in self._children.values()]
            self._children, self._closed = {}, True
        for process in children:
            process.stop(wait=False)
        for process in children:
            process.stop()
        self._launcher.close()
