"""A driver on a cluster of two executors with made-up GPUs; writes what it saw, step by step, as a JSON file.

``test_cluster.py`` runs ``python cluster_app.py FOLDER``: a process of its own, as the other tests' session is local.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyspark
from pyarrow import flight

import gpu_ops
from gpu_ops import stream
from gpu_ops.spark import session
from gpu_ops.spark.driver.directory import Directory
from gpu_ops.spark.driver.executors import JOB_GROUP
from spark.support import Sink, Source, certificate, drain, fold, slow_join, start

GPU = "7"
SCRIPT = f"""#!/bin/sh
echo '{{"name": "gpu", "addresses": ["{GPU}"]}}'
"""


def settings(folder: Path) -> dict[str, str]:
    script = folder / "gpus.sh"
    script.write_text(SCRIPT)
    script.chmod(0o755)
    made = certificate(folder, "gpu-join-test")
    tls = {} if made is None else {
        "spark.gpu_ops.tls.certificate": made[0],
        "spark.gpu_ops.tls.key": made[1],
        "spark.gpu_ops.tls.authority": made[0],
        "spark.gpu_ops.tls.name": "gpu-join-test",
    }  # fmt: skip
    return {
        **tls,
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.log.level": "ERROR",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
        "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1",
        "spark.worker.resource.gpu.amount": "1",
        "spark.worker.resource.gpu.discoveryScript": str(script),
        "spark.executor.resource.gpu.amount": "1",
        "spark.task.resource.gpu.amount": "0.25",
        "spark.speculation": "true",
        "spark.speculation.task.duration.threshold": "3s",
        "spark.gpu_ops.memory.host": "1g",
        "spark.gpu_ops.memory.gpu": "0.4",
        "spark.gpu_ops.server.startTimeout": "90s",
    }


def status(pid: int, what: str) -> str:
    return Path(f"/proc/{pid}/{what}").read_text().replace("\0", "\n").strip()


def parents(pid: int) -> list[int]:
    """A process, its parent, and so on."""
    found = []
    while pid > 1:
        found.append(pid)
        pid = int(status(pid, "stat").rpartition(")")[2].split()[1])
    return found


def visible(pid: int) -> list[str]:
    """The GPUs a process may see."""
    known = dict(line.partition("=")[::2] for line in status(pid, "environ").splitlines())
    return known["CUDA_VISIBLE_DEVICES"].split(",")


def executor(pid: int) -> int:
    """The Java process that a state server descends from."""
    return next(p for p in parents(pid) if "CoarseGrainedExecutorBackend" in status(p, "cmdline"))


class App:
    """The session, its sources, and what was seen."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: dict[str, Any] = {}
        self.spark = session("gpu-join cluster", master="local-cluster[2,2,1024]", config=settings(folder))
        self.context = self.spark.sparkContext
        self.left = Source(self.spark, folder / "left", "k long, a string, op string")
        self.left.read_by_arrow = True  # on executors; the other input brings Spark's rows
        self.right = Source(self.spark, folder / "right", "k long, b double, op string")
        self.sink = Sink()
        self.pids: set[int] = set()

    def join(self, name: str, state: str | None, **options: Any) -> Any:
        inputs = stream(self.left.df, row_kind="op"), stream(self.right.df, row_kind="op")
        where = None if state is None else str(self.folder / state)
        return gpu_ops.join(*inputs, on="k", how="left", state=where, name=name, **options)

    def exact(self) -> bool:
        expected = slow_join("left", self.left.table(["k", "a"]), self.right.table(["k", "b"]), 2)
        return bool(expected) and self.sink.table == expected

    def run(self, kind: str = "gpu") -> list[Any]:
        """The servers that are there, of which none is to be there at the end."""
        found = self.directory.servers.pool(kind if kind == "cpu" else "auto").running
        for server in found:
            above = parents(server.pid)
            self.pids |= set(above[: above.index(executor(server.pid)) + 1])
        return found

    def step(self, name: str, work: Callable[[], Any]) -> None:
        began = time.monotonic()
        self.seen[name] = work()
        print(f"{time.monotonic() - began:6.1f} s  {name}: {self.seen[name]}", flush=True)
        (self.folder / "seen.json").write_text(json.dumps(self.seen))

    # --- steps -------------------------------------------------------------------------------

    def begin(self) -> None:
        self.left.add(*({"k": k, "a": "x", "op": "+I"} for k in range(40)))
        self.right.add({"k": 1, "b": 0.5, "op": "+I"}, {"k": 2, "b": 0.5, "op": "+I"})
        self.changes = self.join("on_cluster", "state")
        self.directory = Directory.of(self.spark)
        self.query = start(self.changes, self.sink, self.folder / "checkpoint")
        self.step("batch", self.next)
        self.right.add({"k": 1, "b": 0.5, "op": "-D"}, {"k": 3, "b": 1.5, "op": "+I"})
        self.left.add({"k": 2, "a": "x", "op": "-D"}, {"k": 40, "a": "y", "op": "+I"})
        self.step("retractions", self.next)

    def next(self) -> bool:
        self.query.processAllAvailable()
        return self.exact()

    def look(self) -> None:
        servers = self.run()
        self.step("locations", lambda: [s.location for s in servers])
        self.step("encrypted", lambda: self.directory.address.tls is not None)
        self.step("hosts", lambda: [self.context.getConf().get("spark.driver.host"), socket.gethostname()])
        self.step("executors", lambda: [executor(s.pid) for s in servers])
        self.step("gpus", lambda: [visible(s.pid) for s in servers])
        self.step("commands", lambda: [status(s.pid, "cmdline").split("\n") for s in servers])
        self.step("explained", lambda: gpu_ops.explain(self.changes))

    def running(self) -> list[tuple[int, int]]:
        """Of each of the servers' jobs that run the tasks, and how many of them run; Spark tells it with a delay."""
        tracker, until = self.context.statusTracker(), time.monotonic() + 10
        while True:
            jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(JOB_GROUP)]
            stages = [tracker.getStageInfo(s) for job in jobs if job.status == "RUNNING" for s in job.stageIds]
            found = [(stage.numTasks, stage.numActiveTasks) for stage in stages if stage is not None]
            if all(active for _, active in found) or time.monotonic() > until:
                return found
            time.sleep(0.1)

    def strangers(self) -> list[str]:
        """What calls with a wrong token get."""
        found = []
        directory, server = self.directory.address, self.run()[0].address
        for address, action in ((directory, "locate"), (directory, "offer"), (server, "ping")):
            try:
                found.append(repr(address._replace(token="0" * 64).call(action, {"group": 0, "job": 1})))
            except flight.FlightUnauthenticatedError as error:
                found.append(str(error))
        return found

    def lose_a_server(self) -> bool:
        os.kill(self.run()[0].pid, signal.SIGKILL)
        self.right.add(*({"k": k, "b": 2.5, "op": "+I"} for k in range(0, 40, 2)))
        return self.next()

    def lose_an_executor(self) -> list[Any]:
        servers = self.run()
        lost = executor(servers[0].pid)
        os.kill(lost, signal.SIGKILL)
        self.right.add(*({"k": k, "b": 2.5, "op": "-D"} for k in range(0, 40, 4)))
        exact = self.next()
        now = {executor(s.pid) for s in self.run()}
        return [exact, lost in now, len(now)]

    def cancel(self) -> list[Any]:
        """Somebody cancels the servers' jobs: they come up again."""
        before = {s.pid for s in self.run()}
        self.context.cancelJobGroup(JOB_GROUP)
        deadline = time.monotonic() + 60
        while any(Path(f"/proc/{pid}").exists() for pid in before) and time.monotonic() < deadline:
            time.sleep(0.1)
        self.left.add({"k": 50, "a": "z", "op": "+I"})
        exact = self.next()
        return [exact, bool(before & {s.pid for s in self.run()})]

    def restart(self) -> bool:
        self.query.stop()
        self.right.add({"k": 50, "b": 3.5, "op": "+I"})
        self.query = start(self.join("restarted", "state"), self.sink, self.folder / "checkpoint")
        exact = self.next()
        self.query.stop()
        return exact

    def in_memory(self) -> list[str]:
        """A join without a state folder whose server is lost."""
        sink = Sink()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", gpu_ops.MemoryOnlyStateWarning)
            changes = self.join("in_memory", None, backend="cpu", partitions=4)
            shuffled = self.spark.conf.get("spark.sql.shuffle.partitions")
            self.spark.conf.set("spark.sql.shuffle.partitions", "20")
            self.seen["partitions"] = gpu_ops.explain(self.join("many", None)).split("partitions  ")[1].split("\n")[0]
            self.spark.conf.set("spark.sql.shuffle.partitions", shuffled)
        query = start(changes, sink, self.folder / "checkpoint_in_memory")
        query.processAllAvailable()
        servers = self.run("cpu")
        self.seen["cpu_servers"] = [len(servers), len({executor(s.pid) for s in servers})]
        for server in servers:
            os.kill(server.pid, signal.SIGKILL)
        self.left.add({"k": 60, "a": "z", "op": "+I"})
        try:
            query.processAllAvailable()
        except Exception as error:
            return [str(error)]
        return []

    def at_end(self) -> bool:
        """The end of input, and static inputs, without servers."""
        drain(self.join("ending", "ending", emit="at_end", partitions=2), Sink(), self.folder / "checkpoint_ending")
        said = fold(tuple(r) for r in gpu_ops.finish(self.spark, state=str(self.folder / "ending")).collect())
        read = [self.spark.read.schema(s._schema).json(str(s._folder)) for s in (self.left, self.right)]
        both = gpu_ops.join(*(stream(df, row_kind="op", sequence_by=None) for df in read), on="k", how="inner")
        expected = slow_join("left", self.left.table(["k", "a"]), self.right.table(["k", "b"]), 2)
        static = fold(tuple(r) for r in both.collect())
        return said == expected and static == [row for row in expected if row[2] is not None]

    def end(self) -> list[int]:
        """The processes of executors that are there after the session."""
        for kind in ("gpu", "cpu"):
            self.run(kind)
        work = Path(pyspark.__file__).parent / "work" / self.context.applicationId
        self.spark.stop()
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            left = sorted(pid for pid in self.pids if Path(f"/proc/{pid}").exists())
            if not left:
                break
            time.sleep(0.2)
        shutil.rmtree(work, ignore_errors=True)
        return left


def main(folder: Path) -> None:
    began = time.monotonic()
    app = App(folder)
    print(f"{time.monotonic() - began:6.1f} s  session", flush=True)
    app.begin()
    app.look()
    app.step("strangers", app.strangers)
    app.step("server_lost", app.lose_a_server)
    app.step("executor_lost", app.lose_an_executor)
    app.step("running", app.running)
    app.step("cancelled", app.cancel)
    app.step("restarted", app.restart)
    app.step("in_memory", app.in_memory)
    app.step("at_end", app.at_end)
    app.step("left", app.end)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
