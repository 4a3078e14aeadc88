"""The directory in the driver: which state server owns which partition; it starts and restarts them.

One per Spark application. In local mode a server is a child process on this machine, on a cluster one of a
task on an executor: one per GPU where GPUs are, one per core otherwise. It is gone with the application.
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any, ClassVar, Final, NamedTuple

import pyarrow as pa

from gpu_ops.errors import DescriptionError, GpuJoinError, StateError
from gpu_ops.spark.driver.cluster import ClusterServers
from gpu_ops.spark.driver.executors import Executors, on_cluster
from gpu_ops.spark.driver.pools import PROBE_S, Pool, Servers
from gpu_ops.spark.driver.process import START_S, EmbeddedServers
from gpu_ops.spark.driver.queries import (
    JoinPlan,
    next_batch,
    numbered_plans,
    output_mode,
    running_plan,
    several_times,
    takes_what_is_there,
)
from gpu_ops.spark.driver.watermarks import Report, Upstream, Watermarks
from gpu_ops.spark.metrics.metrics import TASK_METRICS, Packed, Run, metric_names
from gpu_ops.spark.metrics.progress import ProgressListener
from gpu_ops.spark.metrics.prometheus import serve
from gpu_ops.spark.server.recovery import check_all_did, check_stored, left_behind
from gpu_ops.spark.settings import Settings
from gpu_ops.spark.wire.arrivals import local_blocks
from gpu_ops.spark.wire.connection import Action, Address, FlightServer, format_location
from gpu_ops.state.address import StateAddress
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import Manifest, check_open

_log = logging.getLogger(__name__)

_SWEEP_S: Final = 5.0
_MORE_S: Final = 20.0
_LOOPBACK: Final = "127.0.0.1"


@dataclasses.dataclass
class _Known:
    """A join that some query runs."""

    query_id: str
    run_id: str
    state: StateAddress | None
    seen: float
    number: int | None
    """Which join of the query."""
    plan: JoinPlan | None = None
    evaluations: dict[int, str] = dataclasses.field(default_factory=dict)
    """By task attempt, of the last micro-batch."""
    batch_id: int = -1
    asked: set[int] = dataclasses.field(default_factory=set)
    """Partitions that have computed that micro-batch, or begun to."""
    counted: dict[int, Packed] = dataclasses.field(default_factory=dict)
    """By partition that has computed it, its metrics."""
    servers: set[tuple[str, int]] = dataclasses.field(default_factory=set)
    watermarks: Watermarks | None = None
    """Of a join by time."""
    backlog: tuple[str, bool] | None = None
    """A run, and whether its micro-batches are backlog."""
    appends: str | None = None
    """A run of which the output mode is known to be ``append``."""


class _Opened(NamedTuple):
    """A run of a join.

    Attributes:
        run_id: of its query.
        plan: the join as the query's plan has it; None where nobody can tell.
        number: which join of the query, likewise.
    """

    run_id: str
    plan: JoinPlan | None
    number: int | None


class Directory:
    """Answers "who owns partition p of join j?" to callers with the token.

    It listens on loopback, on a cluster on the driver's address.

    Args:
        context: the SparkContext.

    Raises:
        DescriptionError: a setting that cannot be.
        StateError: there is nothing to listen on.
    """

    _of_application: ClassVar[dict[str, Directory]] = {}
    _guard: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, context: Any) -> None:
        self._joins: dict[str, _Known] = {}
        self._folders: dict[str, StateAddress] = {}
        self._started: dict[str, tuple[str, str]] = {}  # by plan, the query and the run that began with it last
        self._opening = threading.Lock()
        self._opened: dict[str, _Opened] = {}
        self._lock = threading.Lock()
        self._sessions: weakref.WeakSet[Any] = weakref.WeakSet()
        self._closing = threading.Event()
        self._context = context
        conf = context.getConf()
        settings = Settings.of_application(context)
        host = bind = _LOOPBACK
        self.servers: Servers
        if on_cluster(context):
            if settings.tls is not None:
                settings.tls.check()
            host = str(conf.get("spark.driver.host"))
            bind = str(conf.get("spark.driver.bindAddress", host))
            self.servers = ClusterServers(Executors(context, settings), settings, lambda: self._address)
        else:
            settings = dataclasses.replace(settings, tls=None)  # nothing leaves this machine
            self.servers = EmbeddedServers(int(context.defaultParallelism), settings.server_arguments())
        token, tls = self.servers.token, settings.tls
        actions: dict[str, Action] = {
            "locate": lambda request, _: self.locate(request),
            "report": lambda request, _: self.report(request),
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
        """The directory of a session's application; made when first asked for.

        Raises:
            DescriptionError: a setting that cannot be.
            StateError: there is nothing to listen on.
        """
        context = session.sparkContext
        with cls._guard:
            for application, old in list(cls._of_application.items()):
                if application != context.applicationId and old.stopped:
                    del cls._of_application[application]
                    old.close()
            found = cls._of_application.get(context.applicationId)
            if found is None:
                found = cls._of_application[context.applicationId] = cls(context)
            if found._listener is not None and session not in found._sessions:
                session.streams.addListener(found._listener)
            found._sessions.add(session)
            return found

    @property
    def address(self) -> Address:
        """What a task needs to ask; it travels with the plan. On a cluster servers have found a place by then.

        Raises:
            StateError: there is no place for servers.
        """
        self.servers.prepare()
        return self._address

    @property
    def stopped(self) -> bool:
        """Whether the application is over."""
        return self._context._jsc is None

    def state_in_use(self, state: StateAddress) -> str | None:
        """The id of the running query that uses a state folder, or None; it need not have had a micro-batch yet."""
        wanted, active = state.identity, self._active_runs()
        with self._lock:
            joins = [k for k in self._joins.values() if k.state is not None and k.state.identity == wanted]
        users = [(known.query_id, known.run_id) for known in joins]
        users += [run for plan_id, run in list(self._started.items()) if self._folders[plan_id].identity == wanted]
        return next((query_id for query_id, run_id in users if run_id in active), None)

    def expect(self, plan: JoinPlan, state: StateAddress | None) -> None:
        """Has the state folder of a join looked at when its query is started, see `check_started`."""
        if state is not None:
            self._folders[plan.plan_id] = state

    @classmethod
    def check_started(cls, query: Any) -> None:
        """Refuses a query that has just been started with a state folder that does not fit.

        Raises:
            StateError: which, and why.
        """
        with cls._guard:
            of_plan = {plan_id: found for found in cls._of_application.values() for plan_id in found._folders}
        if not of_plan:
            return
        query_id, run_id = str(query.id), str(query.runId)
        for plan, number in numbered_plans(query):
            directory = of_plan.get(plan.plan_id)
            if directory is not None:
                description, state = plan.join.to_json(), directory._folders[plan.plan_id]
                manifest = Manifest(description, plan.partitions, query_id, join_number=number)
                check_stored(Files.at(state), manifest, lambda: next_batch(query))
                directory._started[plan.plan_id] = query_id, run_id

    def locate(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The server of a partition.

        Args:
            request: join_id, query_id, run_id, batch_id, state, backend, partition, partitions; attempt: of the
                task; evaluation: anew each time it runs the join; failed: the location that did not
                answer, or None; backlog: whether the join may begin with one.

        Returns:
            location; ``moment``, which goes with the command: join_number, for a join by time watermark and clock_ms
            of the micro-batch, where there may be a backlog whether it is part of it, of a join that feeds several
            shared_in.

        Raises:
            StateError: another join uses the state folder, no server can be started, the micro-batch
                does not follow, or some partitions have not done the one before.
            DescriptionError: one task runs several partitions, or an input needs another output mode.
        """
        if self._closing.is_set():
            raise StateError("the Spark application has ended, and its state servers with it")
        pool = self.servers.pool(str(request["backend"]))
        index = int(request["partition"]) % len(pool)
        opened = self._open(request)
        known = self._claim(request, opened, pool, index)
        self._check_output_mode(known, str(request["run_id"]))
        moment: dict[str, Any] = {"join_number": known.number}
        if known.watermarks is not None:
            now = time.time_ns() // 1_000_000
            moment |= known.watermarks.begin(int(request["batch_id"]), now)._asdict()
        if known.plan is not None and several_times(known.plan.plan_id):
            moment["shared_in"] = known.run_id
        if request.get("backlog"):
            moment["backlog"] = self._in_backlog(known, str(request["run_id"]))
        return {"location": pool.location(index, failed=request.get("failed")), "moment": moment}

    def report(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Takes in what one partition says after a micro-batch.

        Args:
            request: join_id, run_id, batch_id, partition, partitions; of a join by time ``latest`` and ``rows`` as
                `Report` has them; ``numbers``, the metrics as packed; observed: whether Spark's progress has them.

        Returns:
            all: where they are observed and all partitions have said theirs, the metrics of each; else None.
        """
        batch_id, partition = int(request["batch_id"]), int(request["partition"])
        with self._lock:
            known = self._joins.get(str(request["join_id"]))
        if known is not None and known.watermarks is not None and "latest" in request:
            (left, right), rows = request["latest"], request["rows"]
            said = Report((left, right), tuple(map(bool, rows)))
            known.watermarks.report(batch_id, partition, said)
        if known is None or request["run_id"] != known.run_id:
            return {"all": None}
        if request["observed"]:
            with self._lock:
                if batch_id == known.batch_id:  # else of a task that nobody waits for any more
                    known.counted[partition] = request["numbers"]
                    if len(known.counted) == int(request["partitions"]):
                        return {"all": list(known.counted.values())}
        elif known.plan is not None:
            join, run = known.plan.join, Run(known.query_id, known.run_id, known.plan.name)
            names = metric_names(join.sides, by_time=join.by_time)
            TASK_METRICS.take(run, batch_id, partition, names, request["numbers"])
        return {"all": None}

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

    def _open(self, request: Mapping[str, Any]) -> _Opened:
        """What its query's plan says of a join.

        Raises:
            StateError: the folder is finished, though a server may hold its state still; the run is over.
        """
        join_id, run_id = str(request["join_id"]), str(request["run_id"])
        opened = self._opened.get(join_id)
        if opened is not None and opened.run_id == run_id:
            return opened
        with self._opening:  # one task finds out, the others wait for it
            opened = self._opened.get(join_id)
            if opened is not None and opened.run_id == run_id:
                return opened
            if request["state"] is not None:
                files, batch_id = Files.at(str(request["state"])), int(request["batch_id"])
                check_open(files)
                manifest = Manifest.read(files) if batch_id else None
                if manifest is not None:
                    check_all_did(files, manifest, batch_id - 1)
            plan, number = running_plan(self._queries(), run_id, join_id.partition("-")[0]) or (None, None)
            if plan is None and request.get("timed"):
                raise StateError(
                    f"a join by time needs the plan of its query, and the run {run_id} is over or this version of "
                    "Spark does not show it"
                )
            opened = self._opened[join_id] = _Opened(run_id, plan, number)
            return opened

    def _claim(self, request: Mapping[str, Any], opened: _Opened, pool: Pool, index: int) -> _Known:
        join_id, run_id = str(request["join_id"]), str(request["run_id"])
        state = None if request["state"] is None else StateAddress.of(str(request["state"]))
        with self._lock:
            known = self._joins.get(join_id)
            other = None
            if known is None and state is not None:
                # Two joins over one folder would take turns in overwriting each other's records.
                others = {k.state.identity: j for j, k in self._joins.items() if k.state is not None}
                other = others.get(state.identity)
            if known is None and other is None:
                known = _Known(str(request["query_id"]), run_id, state, 0.0, opened.number, opened.plan)
                self._joins[join_id] = known
                known.watermarks = self._make_watermarks(known)
            if known is not None:
                if known.run_id != run_id:  # another run begins with whatever micro-batch its checkpoint says
                    known.batch_id = -1
                known.run_id, known.seen, known.number = run_id, time.monotonic(), opened.number
                known.plan = opened.plan
                known.servers.add((pool.kind, index))
                self._check_follows(known, request)
                self._check_evaluation(known, request)
                return known
            user = self._joins[str(other)]
        if user.run_id in (run_id, *self._active_runs()):
            raise StateError(
                f"state folder {state} is in use by another join of query {user.query_id}; "
                "a state folder belongs to one join: give each its own"
            )
        self._release(str(other))
        return self._claim(request, opened, pool, index)

    def _make_watermarks(self, known: _Known) -> Watermarks | None:
        plan = known.plan
        if plan is None or not plan.join.by_time:
            return None
        left, right = (self._upstream(upstream, known.query_id) for upstream in plan.upstream)
        manifest = Manifest(plan.join.to_json(), plan.partitions, known.query_id, join_number=known.number)
        return Watermarks(plan.join, manifest, known.state, (left, right))

    def _upstream(self, plan_id: str | None, query_id: str) -> Upstream | None:
        """How to ask a join in the same query for its output watermark."""
        if plan_id is None:
            return None

        def ask_it(batch_id: int) -> int | None:
            with self._lock:
                known = self._joins.get(f"{plan_id}-{query_id}")
            return None if known is None or known.watermarks is None else known.watermarks.output_before(batch_id)

        return ask_it

    @staticmethod
    def _check_follows(known: _Known, request: Mapping[str, Any]) -> None:
        """Notes that a partition computes a micro-batch. When Spark goes on to another, it is done with the last.

        Raises:
            StateError: not all partitions have computed that.
        """
        batch_id, partitions = int(request["batch_id"]), int(request["partitions"])
        if batch_id < known.batch_id:
            return  # a task that nobody waits for any more
        if batch_id > known.batch_id:
            who = f"query {known.query_id}"
            if known.batch_id >= 0 and len(known.asked) < partitions:
                raise left_behind(who, known.batch_id, known.asked, partitions)
            if 0 <= known.batch_id < batch_id - 1:
                raise left_behind(who, known.batch_id + 1, (), partitions)
            known.batch_id, known.evaluations, known.asked, known.counted = batch_id, {}, set(), {}
        known.asked.add(int(request["partition"]))

    @staticmethod
    def _check_evaluation(known: _Known, request: Mapping[str, Any]) -> None:
        """A coalesced task cannot tell which of its partitions it is in when one has no rows."""
        first = known.evaluations.setdefault(int(request["attempt"]), str(request["evaluation"]))
        if first != request["evaluation"]:
            raise DescriptionError(
                "one task computes several partitions of the join: use repartition() instead of coalesce() "
                "on a changelog"
            )

    def _check_output_mode(self, known: _Known, run_id: str) -> None:
        inputs = known.plan.final_only if known.plan is not None else ()
        if not inputs or known.appends == run_id:
            return
        mode = output_mode(self._queries(), run_id)
        if mode != "append":
            raise DescriptionError(
                f"input '{inputs[0]}' is a streaming aggregate, which in output mode {mode!r} gives the row of a group "
                "again when it changes: run the query with outputMode('append'), or say what identifies its rows, "
                "stream(..., unique_key=...)"
            )
        known.appends = run_id

    def _in_backlog(self, known: _Known, run_id: str) -> bool:
        """Whether a run takes in a backlog: it goes by its trigger.

        Raises:
            StateError: the query is gone, or this version of Spark does not tell.
        """
        if known.backlog is None or known.backlog[0] != run_id:
            known.backlog = run_id, takes_what_is_there(self._queries(), run_id)
        return known.backlog[1]

    def _active_runs(self) -> set[str]:
        return {str(query.runId) for query in self._queries()}

    def _queries(self) -> list[Any]:
        """The running streaming queries of all sessions."""
        return [query for session in list(self._sessions) for query in session.streams.active]

    def _release(self, join_id: str) -> None:
        """Lets the servers drop what they hold of a join whose query is over."""
        with self._lock:
            known = self._joins.pop(join_id, None)
            self._opened.pop(join_id, None)
        if known is not None:
            TASK_METRICS.over(known.query_id)
            local_blocks(self._context).forget(known.run_id)
        for kind, index in sorted(known.servers) if known is not None else ():
            self.servers.pool(kind).release(index, join_id)

    def _sweep(self) -> None:
        """Ends with the application; meanwhile forgets the joins of queries that are over."""
        while not self._closing.wait(_SWEEP_S):
            if self.stopped:
                self.close()
                return
            now = time.monotonic()
            with self._lock:
                idle = {j: k.run_id for j, k in self._joins.items() if now - k.seen > _SWEEP_S}
                # and those that were refused after their folder was looked at
                idle |= {j: opened.run_id for j, opened in list(self._opened.items()) if j not in self._joins}
            if not idle:
                continue
            try:
                active = self._active_runs()
                for join_id, run_id in idle.items():
                    if run_id not in active:
                        self._release(join_id)
            except Exception as error:  # the JVM may be going away at any moment
                _log.debug("sweep: %s", error)
