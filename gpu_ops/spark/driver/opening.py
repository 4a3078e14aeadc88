"""What is looked at when a query starts, or goes on in a new run: its state folder, plan, trigger, output mode."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

from gpu_ops.errors import DescriptionError, StateError
from gpu_ops.spark.driver.queries import next_batch, numbered_plans, output_mode, running_plan, takes_what_is_there
from gpu_ops.spark.driver.registry import JoinState, Registry
from gpu_ops.spark.server.recovery import check_all_did, check_stored
from gpu_ops.spark.wire.command import LocateRequest
from gpu_ops.state.address import StateAddress
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import Manifest, check_open

_NO_PLAN: Final = (None, None, False)


class Opening:
    """Opens the joins of an application.

    Args:
        registry: the joins that run.
        queries: gives the running streaming queries of all its sessions.
    """

    def __init__(self, registry: Registry, queries: Callable[[], Sequence[Any]]) -> None:
        self._registry, self._queries = registry, queries
        self._one_at_a_time = threading.Lock()

    def check_started(self, query: Any) -> None:
        """Refuses a query that has just been started with a state folder that does not fit.

        Raises:
            StateError: which, and why.
        """
        for plan, number, _ in numbered_plans(query):
            started = self._registry.started.get(plan.plan_id)
            if started is not None:
                query_id = str(query.id)
                check_stored(Files.at(started.state), plan.manifest(query_id, number), lambda: next_batch(query))
                started.query_id, started.run_id = query_id, str(query.runId)

    def open(self, request: LocateRequest) -> JoinState:
        """A join as the plan of its query's run has it.

        Raises:
            StateError: the folder is finished, though a server may hold its state still; some partitions have not done
                the micro-batch before; the run is over.
        """
        join_id, run_id = request.join_id, request.run_id
        found = self._registry.of_run(join_id, run_id)
        if found is not None:
            return found
        with self._one_at_a_time:  # one task finds out, the others wait for it
            found = self._registry.of_run(join_id, run_id)
            if found is not None:
                return found
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
            return self._registry.put(join_id, JoinState(request.query_id, run_id, state, number, plan, shared))

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
        """Whether a run takes in a backlog: it goes by its trigger.

        Raises:
            StateError: the query is gone, or this version of Spark does not tell.
        """
        if known.backlog is None:
            known.backlog = takes_what_is_there(self._queries(), known.run_id)
        return known.backlog
