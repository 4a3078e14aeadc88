"""The joins that run: each with its state folder, its current micro-batch, and what its partitions report of that.

Also the checks when a query starts, or goes on in a new run: of state folder, plan, trigger and output mode.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from gpu_ops.errors import DescriptionError, StateError
from gpu_ops.spark.driver.pools import Death
from gpu_ops.spark.driver.queries import (
    JoinPlan,
    next_batch,
    numbered_plans,
    output_mode,
    running_plan,
    takes_what_is_there,
)
from gpu_ops.spark.driver.watermarks import Upstream, Watermarks
from gpu_ops.spark.metrics.metrics import Packed
from gpu_ops.spark.server.recovery import check_all_did, check_stored, left_behind
from gpu_ops.spark.wire.command import LocateRequest, ReportRequest
from gpu_ops.state.address import StateAddress
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import Manifest, check_open

MOST_KILLS: Final = 3
"""So often may the server of a partition be killed in one micro-batch: what killed it once does so again."""


@dataclasses.dataclass
class JoinState:
    """A join in one run of its query, as the directory keeps account of it."""

    query_id: str
    run_id: str
    state: StateAddress | None
    number: int | None
    """The join's number in its query; None, like the plan, where this version of Spark shows no plan."""
    plan: JoinPlan | None = None
    shared: bool = False
    """True if it is the input of several other joins."""
    claimed: bool = False
    """True if a partition of it was located; False where its state folder was refused."""
    seen: float = 0.0
    batch_id: int = -1
    evaluations: dict[int, str] = dataclasses.field(default_factory=dict)
    """The evaluation of each task attempt of the last micro-batch."""
    asked: set[int] = dataclasses.field(default_factory=set)
    """The partitions that have computed that micro-batch, or begun to."""
    counted: dict[int, Packed] = dataclasses.field(default_factory=dict)
    """The metrics of each partition that has computed it."""
    killed: dict[int, dict[str, Death]] = dataclasses.field(default_factory=dict)
    """For each partition that has not, its servers that were killed meanwhile, by location."""
    servers: set[tuple[str, int]] = dataclasses.field(default_factory=set)
    watermarks: Watermarks | None = None
    """The watermarks of a join by time; None for any other."""
    backlog: bool | None = None
    """True if the run's micro-batches are backlog; None until that is asked."""
    appends: bool = False
    """True if the run's output mode is known to be ``append``."""

    def begin(self, request: LocateRequest) -> None:
        """Records that a partition computes a micro-batch; when Spark goes on to another, it is done with the last.

        Raises:
            StateError: not all partitions have computed the last one.
            DescriptionError: one task runs several partitions.
        """
        batch_id, partitions = request.batch_id, request.partitions
        if batch_id > self.batch_id:
            who = f"query {self.query_id}"
            if self.batch_id >= 0 and len(self.asked) < partitions:
                raise left_behind(who, self.batch_id, self.asked, partitions)
            if 0 <= self.batch_id < batch_id - 1:
                raise left_behind(who, self.batch_id + 1, (), partitions)
            self.batch_id = batch_id
            self.evaluations, self.asked, self.counted, self.killed = {}, set(), {}, {}
        if batch_id == self.batch_id:  # else a task that nobody waits for any more
            self.asked.add(request.partition)
        # a coalesced task cannot tell which of its partitions it is in when one has no rows
        if self.evaluations.setdefault(request.attempt, request.evaluation) != request.evaluation:
            raise DescriptionError(
                "one task computes several partitions of the join: use repartition() instead of coalesce() "
                "on a changelog; in a union of what is made of one changelog set spark.sql.unionOutputPartitioning to "
                "false, as gpu_ops.spark.recommended_conf() does"
            )

    def note_death(self, request: LocateRequest, death: Death | None) -> None:
        """Records that a partition's server was killed.

        Args:
            request: the request of a task that may have noticed it.
            death: the death of the server that failed the task, if the kernel killed it.

        Raises:
            StateError: the server was killed `MOST_KILLS` times in this micro-batch; the query ends with that.
        """
        if request.batch_id != self.batch_id:
            return
        deaths = self.killed.setdefault(request.partition, {})
        if death is not None and request.failed is not None:
            deaths[request.failed] = death
        if len(deaths) >= MOST_KILLS:
            *_, last = deaths.values()
            inputs = (
                "" if self.plan is None else f" of join of {', '.join(x.name for x in self.plan.description.inputs)}"
            )
            raise StateError(
                f"partition {request.partition} of {request.partitions}{inputs}, micro-batch {request.batch_id}: "
                f"its state server was killed {len(deaths)} times. {last}"
            )

    def take(self, request: ReportRequest) -> Sequence[Packed] | None:
        """Records a partition's metrics; returns those of all partitions once they are complete."""
        if request.batch_id != self.batch_id:  # of a task that nobody waits for any more
            return None
        self.killed.pop(request.partition, None)
        self.counted[request.partition] = request.numbers
        return list(self.counted.values()) if len(self.counted) == request.partitions else None


ONE_JOIN: Final = "a state folder belongs to one join: give each its own"

_NO_PLAN: Final = (None, None, False)


@dataclasses.dataclass
class Started:
    """A plan that was built with a state folder, and the query and run that last started with it.

    Attributes:
        state: the folder.
        has_state: False where the state is in the folder of another operator, whose engine has both.
        begin: called when its query is started, and the folder fits.
        query_id: of the query.
        run_id: of its run.
    """

    state: StateAddress
    has_state: bool = True
    begin: Callable[[], None] | None = None
    query_id: str | None = None
    run_id: str | None = None


class Registry:
    """The running joins of an application, by join id (``<plan id>-<query id>``).

    Args:
        queries: returns the running streaming queries of all its sessions.
    """

    def __init__(self, queries: Callable[[], Sequence[Any]]) -> None:
        self._queries = queries
        self._one_at_a_time = threading.Lock()
        self.joins: dict[str, JoinState] = {}
        self.started: dict[str, Started] = {}
        self.lock = threading.Lock()

    def __contains__(self, join_id: str) -> bool:
        return join_id in self.joins

    def of_run(self, join_id: str, run_id: str) -> JoinState | None:
        """Returns a join if it is known in this run of its query, else None."""
        known = self.joins.get(join_id)
        return known if known is not None and known.run_id == run_id else None

    def claim(self, opened: JoinState, request: LocateRequest, server: tuple[str, int]) -> str | None:
        """Records that a server has a partition; returns the id of another join if that one has the state folder.

        Args:
            opened: the join.
            request: the request for the partition.
            server: the kind of the server, and its number.

        Raises:
            StateError, DescriptionError: as of `JoinState.begin`.
        """
        with self.lock:
            known = self.joins.setdefault(request.join_id, opened)
            if not known.claimed:
                if known.state is not None:
                    # Two joins over one folder would take turns in overwriting each other's records.
                    for join_id, other in self.joins.items():
                        if other.claimed and other.state is not None and other.state.identity == known.state.identity:
                            return join_id
                known.claimed, known.watermarks = True, self._watermarks(known)
            known.seen = time.monotonic()
            known.servers.add(server)
            known.begin(request)
            return None

    def users(self, state: StateAddress) -> list[tuple[str | None, str | None]]:
        """The queries and runs that use a state folder or have used it, even before their first micro-batch."""
        with self.lock:
            claimed = [known for known in self.joins.values() if known.claimed]
            users: list[JoinState | Started] = [*claimed, *self.started.values()]
        return [(x.query_id, x.run_id) for x in users if x.state is not None and x.state.identity == state.identity]

    def pop(self, join_id: str) -> JoinState | None:
        """Forgets a join and returns it; None if it is not known."""
        with self.lock:
            return self.joins.pop(join_id, None)

    def idle(self, seconds: float) -> dict[str, str]:
        """The run of each join that was refused, or that nobody has asked for in so many seconds."""
        now = time.monotonic()
        with self.lock:
            return {j: k.run_id for j, k in self.joins.items() if not k.claimed or now - k.seen > seconds}

    def _watermarks(self, known: JoinState) -> Watermarks | None:
        plan = known.plan
        if plan is None or not (plan.dataflow or plan.description).by_time:
            return None
        within = {one.plan_id for one in plan.in_engine.values()}
        upstream = {
            name: [self._upstream(None if it in within else it, known.query_id) for it in one.upstream]
            for name, one in plan.in_engine.items()
        }
        manifest = plan.manifest(known.query_id, known.number)
        return Watermarks(plan.dataflow or plan.description, manifest, known.state, upstream)

    def _upstream(self, plan_id: str | None, query_id: str) -> Upstream | None:
        """A function that asks a join of the same query for its output watermark; None without a join."""
        if plan_id is None:
            return None

        def ask_it(batch_id: int) -> int | None:
            with self.lock:
                known = self.joins.get(f"{plan_id}-{query_id}")
            return None if known is None or known.watermarks is None else known.watermarks.output_before(batch_id)

        return ask_it

    # --- when a query starts, or goes on in a new run ----------------------------------------

    def check_started(self, query: Any) -> None:
        """Refuses a query that has just been started with a state folder that does not fit.

        Raises:
            StateError: which, and why.
        """
        query_id, run_id, users = str(query.id), str(query.runId), dict[str, JoinPlan]()
        for plan, number, _ in numbered_plans(query):
            started = self.started.get(plan.plan_id)
            if started is None:
                continue
            other = users.setdefault(started.state.identity, plan)
            if other is not plan:
                names = [" and ".join(f"'{x.name}'" for x in one.description.inputs) for one in (other, plan)]
                raise StateError(
                    f"state folder {started.state} is in use by another join of query {query_id}: that of {names[0]}, "
                    f"and this one is of {names[1]}; {ONE_JOIN}"
                )
            self._take_folder(started, query_id, run_id)
            if started.has_state:
                check_stored(Files.at(started.state), plan.manifest(query_id, number), lambda: next_batch(query))
            if started.begin is not None:
                started.begin()

    def _take_folder(self, started: Started, query_id: str, run_id: str) -> None:
        """Records which run has a state folder.

        Raises:
            StateError: another run has it that is not over.
        """
        active = {str(query.runId): str(query.id) for query in self._queries()}
        with self.lock:
            users: list[JoinState | Started] = [x for x in self.joins.values() if x.claimed]
            for user in (*users, *self.started.values()):
                same = user.state is not None and user.state.identity == started.state.identity
                if same and user.run_id != run_id and user.run_id in active:
                    raise StateError(
                        f"state folder {started.state} is in use by another join of query {user.query_id}; {ONE_JOIN}"
                    )
            started.query_id, started.run_id = query_id, run_id

    def open(self, request: LocateRequest) -> JoinState:
        """Returns a join of a query's run, looked up in the run's plan at the first call.

        Raises:
            StateError: the folder is finished, though a server may hold its state still; some partitions have not done
                the micro-batch before; the run is over.
        """
        join_id, run_id = request.join_id, request.run_id
        known = self.of_run(join_id, run_id)
        if known is not None:
            return known
        with self._one_at_a_time:  # one task finds out, the others wait for it
            known = self.of_run(join_id, run_id)
            if known is not None:
                return known
            if request.state is not None:
                files, batch_id = Files.at(request.state), request.batch_id
                check_open(files)
                manifest = Manifest.read(files) if batch_id else None
                if manifest is not None:
                    check_all_did(files, manifest, batch_id - 1)
            plan, number, shared = running_plan(self._queries(), run_id, join_id.partition("-")[0]) or _NO_PLAN
            if plan is None and request.timed:
                raise StateError(
                    f"a join by time needs the plan of its query, and the run {run_id} is over or this version of "
                    "Spark does not show it"
                )
            state = None if request.state is None else StateAddress.of(request.state)
            opened = JoinState(request.query_id, run_id, state, number, plan, shared)
            with self.lock:
                before = self.joins.get(join_id)
                if before is not None:  # what holds in all runs stays
                    opened.claimed, opened.seen = before.claimed, before.seen
                    opened.servers, opened.watermarks = before.servers, before.watermarks
                self.joins[join_id] = opened
            return opened

    def check_output_mode(self, known: JoinState) -> None:
        """Refuses a run whose output mode makes other rows of an input than insertions.

        Raises:
            DescriptionError: which input.
        """
        inputs = known.plan.final_only if known.plan is not None else ()
        if not inputs or known.appends:
            return
        mode = output_mode(self._queries(), known.run_id)
        if mode != "append":
            raise DescriptionError(
                f"input '{inputs[0]}' is a streaming aggregate, which in output mode {mode!r} gives the row of a group "
                "again when it changes: run the query with outputMode('append'), or say what identifies its rows, "
                "stream(..., unique_key=...)"
            )
        known.appends = True

    def in_backlog(self, known: JoinState) -> bool:
        """True if a run takes in a backlog, as its trigger says.

        Raises:
            StateError: the query is gone, or this version of Spark does not tell.
        """
        if known.backlog is None:
            known.backlog = takes_what_is_there(self._queries(), known.run_id)
        return known.backlog
