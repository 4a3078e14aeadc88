"""The directory in the driver, which knows the state server of each partition and starts and restarts servers.

One per Spark application. In local mode a server is a child process on this machine, on a cluster one of a
task on an executor: one per GPU where GPUs are, one per core otherwise. It is gone with the application.
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, Final

import pyarrow as pa

from gpu_ops.errors import GpuJoinError, StateError
from gpu_ops.spark.driver.cluster import ClusterServers
from gpu_ops.spark.driver.executors import Executors, on_cluster
from gpu_ops.spark.driver.pools import PROBE_S, Pool, Servers
from gpu_ops.spark.driver.process import START_S, EmbeddedServers
from gpu_ops.spark.driver.registry import ONE_JOIN, JoinState, Registry, Started
from gpu_ops.spark.metrics.metrics import TASK_METRICS, JoinRun, metric_names, of_operators
from gpu_ops.spark.metrics.progress import ProgressListener, serve
from gpu_ops.spark.settings import Settings
from gpu_ops.spark.tasks.functions import CoGroupTask
from gpu_ops.spark.wire.command import BatchContext, LocateReply, LocateRequest, ReportReply, ReportRequest, answering
from gpu_ops.spark.wire.connection import Address, FlightServer, Handler, format_location
from gpu_ops.state import blocks, files
from gpu_ops.state.address import StateAddress

_log = logging.getLogger(__name__)

_SWEEP_S: Final = 5.0
_MORE_S: Final = 20.0
_LOOPBACK: Final = "127.0.0.1"


class Directory:
    """Service in the driver that answers "who owns partition p of join j?" to callers with the token.

    It listens on loopback, on a cluster on the driver's address.

    Args:
        context: the SparkContext.

    Attributes:
        functions: of the application's co-groups, by state folder, for `gpu_ops.finish`; no code travels to a state
            server, or into its folder.

    Raises:
        DescriptionError: a setting is invalid.
        StateError: the address cannot be listened on.
    """

    _of_application: ClassVar[dict[str, Directory]] = {}
    _guard: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, context: Any) -> None:
        self.registry = Registry(self._queries)
        self.functions: dict[str, CoGroupTask] = {}
        self._sessions: weakref.WeakSet[Any] = weakref.WeakSet()
        self._closing = threading.Event()
        self._context = context
        conf = context.getConf()
        settings = Settings.of_application(context)
        host = bind = _LOOPBACK
        self.servers: Servers
        self.blocks: blocks.Blocks | None
        if on_cluster(context):
            if settings.tls is not None:
                settings.tls.check()
            host = str(conf.get("spark.driver.host"))
            bind = str(conf.get("spark.driver.bindAddress", host))
            self.servers = ClusterServers(Executors(context, settings), settings, lambda: self._address)
            self.blocks = None
        else:
            # where Spark has its own files; its folder of the application stays where that is killed
            folder = files.temporary_folder(Path(context._temp_dir).parents[1])
            self.blocks = blocks.Blocks(str(folder), blocks.LEAST_BYTES)
            settings = dataclasses.replace(settings, tls=None)  # nothing leaves this machine
            if "SPARK_LOCAL_DIRS" not in os.environ:
                local = settings.disk_folder or conf.get("spark.local.dir")
                settings = dataclasses.replace(settings, disk_folder=local)
            arguments = {kind: [*x, "--blocks", str(folder)] for kind, x in settings.server_arguments().items()}
            self.servers = EmbeddedServers(int(context.defaultParallelism), arguments)
        token, tls = self.servers.token, settings.tls
        actions: dict[str, Handler] = {
            "locate": answering(LocateRequest, lambda request: self.locate(request)),  # noqa: PLW0108 - tests replace it
            "report": answering(ReportRequest, lambda request: self.report(request)),  # noqa: PLW0108 - likewise
            **self.servers.actions,
        }
        try:
            self._server = FlightServer(
                token, host=bind, port=settings.driver_port, certificate=tls and tls[:2], actions=actions
            )
        except (pa.ArrowException, OSError) as error:
            self.servers.close()
            raise StateError(
                f"the directory of state servers cannot listen on {bind}:{settings.driver_port}: {error}"
            ) from error
        self._metrics: Any = None
        self._listener: ProgressListener | None = None
        if settings.prometheus is not None:
            own, port = settings.prometheus
            try:
                self._metrics = serve((own or bind, port))
            except GpuJoinError:
                self.servers.close()
                self._server.end()
                raise
            self._listener = ProgressListener(prometheus=True, keep=1)
        # A task waits for a server to be probed and ended, for a place for another, and for that one to start.
        patience = PROBE_S + self.servers.patience_s + START_S + _MORE_S
        location = format_location(host, self._server.port, encrypted=tls is not None)
        self._address = Address(location, token, tls, patience, settings.patience_s)
        threading.Thread(target=self._sweep, name="gpu-join-sweep", daemon=True).start()
        atexit.register(self.close)

    @classmethod
    def of(cls, session: Any) -> Directory:
        """Returns the directory of a session's application, and makes it at the first call.

        Raises:
            DescriptionError: a setting is invalid.
            StateError: the address cannot be listened on.
        """
        context = session.sparkContext
        with cls._guard:
            for application, old in list(cls._of_application.items()):
                if application != context.applicationId and old.stopped:
                    del cls._of_application[application]
                    old.close()
            directory = cls._of_application.get(context.applicationId)
            if directory is None:
                directory = cls._of_application[context.applicationId] = cls(context)
            if directory._listener is not None and session not in directory._sessions:
                session.streams.addListener(directory._listener)
            directory._sessions.add(session)
            return directory

    @property
    def address(self) -> Address:
        """The address by which tasks reach the directory; on a cluster servers are placed first.

        Raises:
            StateError: servers cannot be placed.
        """
        self.servers.prepare()
        return self._address

    @property
    def stopped(self) -> bool:
        """True if the Spark application is over."""
        return self._context._jsc is None

    def state_in_use(self, state: StateAddress) -> str | None:
        """The id of the running query that uses a state folder, even before its first micro-batch; else None."""
        active = self._active_runs()
        return next((query_id for query_id, run_id in self.registry.users(state) if run_id in active), None)

    def check_at_start(self, plan_id: str, state: StateAddress | None, *, has_state: bool = True) -> None:
        """Registers an operator's state folder, to be checked when its query is started; see `check_started`.

        Args:
            plan_id: of the operator.
            state: the folder, or None.
            has_state: see `gpu_ops.spark.driver.registry.Started`.
        """
        if state is not None:
            self.registry.started[plan_id] = Started(state, has_state)

    def when_started(self, plan_id: str, begin: Callable[[], None]) -> None:
        """Has a function called when the query of an operator with a state folder is started, and the folder fits."""
        self.registry.started[plan_id].begin = begin

    @classmethod
    def check_started(cls, query: Any) -> None:
        """Refuses a query that has just been started with a state folder that does not fit.

        Raises:
            StateError: which, and why.
        """
        with cls._guard:
            directories = [found for found in cls._of_application.values() if found.registry.started]
        for directory in directories:
            directory.registry.check_started(query)

    def locate(self, request: LocateRequest) -> LocateReply:
        """Returns the server of a partition, if it runs or is waited for, and what all go by in the micro-batch.

        Raises:
            StateError: another join uses the state folder, no server can be started or the kernel kills each, the
                micro-batch does not follow, or some partitions have not done the one before.
            DescriptionError: one task runs several partitions, or an input needs another output mode.
        """
        if self._closing.is_set():
            raise StateError("the Spark application has ended, and its state servers with it")
        pool = self.servers.pool(request.backend)
        index = request.partition % len(pool)
        known = self._claim(request, pool, index)
        self.registry.check_output_mode(known)
        context = BatchContext(join_number=known.number, shared_in=known.run_id if known.shared else None)
        if known.watermarks is not None:
            watermark, clock_ms = known.watermarks.begin(request.batch_id, time.time_ns() // 1_000_000)
            context = dataclasses.replace(context, watermark=watermark, clock_ms=clock_ms)
        if request.backlog:
            context = dataclasses.replace(context, backlog=self.registry.in_backlog(known))
        location = pool.location(index, failed=request.failed) if request.waits else pool.running_at(index)
        with self.registry.lock:
            known.note_death(request, pool.deaths.get(request.failed or ""))
        return LocateReply(location, context)

    def report(self, request: ReportRequest) -> ReportReply:
        """Records the event times and metrics that one partition reports after a micro-batch."""
        known = self.registry.joins.get(request.join_id)
        if known is None or not known.claimed:
            return ReportReply()
        if known.watermarks is not None and request.times is not None:
            known.watermarks.report(request.batch_id, request.partition, request.times)
        if request.run_id != known.run_id:
            return ReportReply()
        with self.registry.lock:
            numbers = known.take(request)
        if request.observed:
            return ReportReply(numbers)
        if known.plan is not None:
            plans = list(known.plan.in_engine.values())
            names = [metric_names(one.description.sides, by_time=one.description.by_time) for one in plans]
            for one, its, (own,) in zip(plans, names, of_operators(names, [request.numbers]), strict=True):
                run = JoinRun(known.query_id, known.run_id, one.name)
                TASK_METRICS.take(run, request.batch_id, request.partition, its, own)
        return ReportReply()

    def close(self) -> None:
        """Ends the servers and stops answering."""
        if self._closing.is_set():
            return
        self._closing.set()
        atexit.unregister(self.close)
        if self._metrics is not None:
            self._metrics.shutdown()
        self.servers.close()
        self._server.end()
        if self.blocks is not None:
            files.remove_temporary(Path(self.blocks.folder))

    def _claim(self, request: LocateRequest, pool: Pool, index: int) -> JoinState:
        opened = self.registry.open(request)
        other = self.registry.claim(opened, request, (pool.kind, index))
        if other is None:
            return opened
        user = self.registry.joins.get(other)
        if user is not None and user.run_id in (request.run_id, *self._active_runs()):
            raise StateError(
                f"state folder {opened.state} is in use by another join of query {user.query_id}; {ONE_JOIN}"
            )
        self._release(other)
        return self._claim(request, pool, index)

    def _active_runs(self) -> set[str]:
        return {str(query.runId) for query in self._queries()}

    def _queries(self) -> list[Any]:
        """The running streaming queries of all sessions."""
        return [query for session in list(self._sessions) for query in session.streams.active]

    def leave_snapshots(self, states: Iterable[StateAddress], version: int) -> None:
        """Has the servers write snapshots of the state of joins whose query is over, and drop it.

        Args:
            states: their folders.
            version: the number of micro-batches that Spark is done with.
        """
        its = {state.identity for state in states}
        joins = list(self.registry.joins.items())
        for join_id in [own for own, known in joins if known.state is not None and known.state.identity in its]:
            self._release(join_id, version)

    def _release(self, join_id: str, version: int | None = None) -> None:
        """Has the servers drop the state of a join whose query is over; ``version``: as of `Pool.release`."""
        known = self.registry.pop(join_id)
        if known is None or not known.claimed:
            return
        TASK_METRICS.over(known.query_id)
        if self.blocks is not None:
            self.blocks.forget(known.run_id)
        with ThreadPoolExecutor(len(known.servers) or 1) as threads:
            list(threads.map(lambda one: self.servers.pool(one[0]).release(one[1], join_id, version), known.servers))

    def _sweep(self) -> None:
        """Forgets the joins of queries that are over, and closes the directory when the application ends (a thread)."""
        while not self._closing.wait(_SWEEP_S):
            if self.stopped:
                self.close()
                return
            idle = self.registry.idle(_SWEEP_S)
            if not idle:
                continue
            try:
                active = self._active_runs()
                for join_id, run_id in idle.items():
                    if run_id not in active:
                        self._release(join_id)
            except Exception as error:  # the JVM may be going away at any moment
                _log.debug("sweep: %s", error)
