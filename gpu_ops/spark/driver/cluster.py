"""State servers on the executors of a cluster: which executor runs which, and how a lost one is replaced.

On each executor a Spark task runs an agent, which starts servers as the directory asks for them
(`gpu_ops.spark.driver.agent`, `gpu_ops.spark.driver.executors`). The servers of one agent are a *group*. Groups and
their slots are fixed once all agents have come, so that partitions stay where they are. An agent that is lost is
replaced by the one that a new job, or Spark itself, starts in its place; the state of its partitions is reloaded from
the state folder.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar, cast

from gpu_ops.errors import StateError
from gpu_ops.fields import decoded, encoded, fits, reading
from gpu_ops.spark.driver.agent import (
    NONE_GIVEN,
    SILENT_S,
    Agent,
    Command,
    Done,
    LostError,
    Offer,
    RemoteAgent,
    RemoteServer,
    Waiting,
)
from gpu_ops.spark.driver.executors import Executors
from gpu_ops.spark.driver.pools import Pool, Servers
from gpu_ops.spark.settings import START_TIMEOUT, Settings
from gpu_ops.spark.wire.connection import Address, Handler

_log = logging.getLogger(__name__)

_Message = TypeVar("_Message", Offer, Waiting, Done)

_LOOK_S: Final = 0.5
_FOR_ANOTHER_S: Final = 30.0
"""How long a lost executor's successor is waited for, at most."""
_LONGEST_PAUSE_S: Final = 30.0


@dataclasses.dataclass(eq=False)
class _Group:
    """The state servers of one executor, as the driver keeps account of them.

    Attributes:
        number: the group's number.
        agent: the task that runs them, if one is there.
        waiting: tasks that could run them: copies of that task, or tasks on an executor that has a group already.
        jobs: the jobs with a task for this group that has not left.
        lost: the lost agent in words, until that is logged.
        since: when the group lost its agent, by `time.monotonic`.
    """

    number: int
    agent: RemoteAgent | None = None
    waiting: list[RemoteAgent] = dataclasses.field(default_factory=list)
    jobs: set[int] = dataclasses.field(default_factory=set)
    lost: str | None = None
    since: float = dataclasses.field(default_factory=time.monotonic)


class ClusterServers(Servers):
    """All state servers of an application on a cluster.

    Args:
        executors: the executors of the application.
        settings: the settings of the application.
        address: gives the directory's address.
    """

    def __init__(self, executors: Executors, settings: Settings, address: Callable[[], Address]) -> None:
        super().__init__(settings.start_timeout_s)
        self._executors, self._settings, self._address = executors, settings, address
        self._agents: dict[str, RemoteAgent] = {}
        self._groups: list[_Group] = []
        self._changed = threading.Condition()
        self._preparing = threading.Lock()
        self._closed = False
        self._failure: str | None = None
        self._failures = 0
        self._not_before = 0.0
        self._serial = itertools.count(1)
        self._cores = 1
        self._supervisor: threading.Thread | None = None

    # --- Servers -----------------------------------------------------------------------------

    def prepare(self) -> None:
        """Starts an agent on every executor and waits for all of them.

        The room for them is taken before a query can take it all and then wait for its servers.

        Raises:
            StateError: no executor, no room for tasks, or agents that do not come.
        """
        with self._preparing:
            if self._pools:
                return
            deadline = time.monotonic() + self.patience_s
            if self._supervisor is None or self._failure is not None:
                self._begin(deadline)
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closed or self._failure or all(g.agent for g in self._groups),
                    max(1.0, deadline - time.monotonic()),
                )
                agents = [group.agent for group in self._groups if group.agent is not None]
                if self._closed or self._failure or len(agents) < len(self._groups):
                    why = self._failure or "other jobs may have taken all room for tasks"
                    raise StateError(
                        f"state servers came up on {len(agents)} of {len(self._groups)} executors within "
                        f"{self.patience_s:.0f} s ({why}); {START_TIMEOUT} sets how long they are waited for"
                    )
                self._make_pools(agents)

    @property
    def tasks(self) -> int:
        """The number of Spark tasks that run state servers: one for each group.

        Raises:
            StateError: as `prepare`.
        """
        self.prepare()
        return len(self._groups)

    def _begin(self, deadline: float) -> None:
        """Makes one group for each registered executor, and starts the thread that places them."""
        count = self._executors.wait(deadline)
        self._cores = self._executors.cores(count)
        with self._changed:
            before = [agent for g in self._groups for agent in (g.agent, *g.waiting) if agent is not None]
            self._failure, self._failures, self._not_before = None, 0, 0.0
            self._groups = [_Group(number) for number in range(count)]
            self._supervisor = threading.Thread(target=self._supervise, name="gpu-join-placement", daemon=True)
            self._supervisor.start()
        for agent in before:
            agent.leave()

    def start(self, kind: str, index: int, deadline: float) -> RemoteServer:
        """Starts the server of a slot and waits until it listens.

        Slots are dealt out in turn, so that a join of few partitions uses all executors.

        Raises:
            StateError: it does not start, or no task runs its group before the deadline.
        """
        group, number = self._groups[index % len(self._groups)], index // len(self._groups)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or group.agent, max(0.0, deadline - time.monotonic()))
                agent = group.agent
            if self._closed:
                raise StateError("the Spark application has ended, and its state servers with it")
            if agent is None:
                raise StateError(
                    f"the executor with state server {kind}-{index} is lost, and no other one has taken its place in "
                    f"{self.patience_s:.0f} s{f' ({self._failure})' if self._failure else ''}; {START_TIMEOUT} sets "
                    "how long that may take"
                )
            try:
                return agent.start(kind, f"{kind}-{index}", number)
            except LostError as error:
                _log.warning("state server %s-%d: %s; waiting for another executor", kind, index, error)
                self._drop(agent)

    def where(self) -> str:
        """The hosts of the servers, in words."""
        with self._changed:
            agents = [group.agent for group in self._groups if group.agent is not None]
        executors = len({agent.offer.executor for agent in agents})
        hosts = ", ".join(sorted({agent.offer.host for agent in agents}))
        lost = len(self._groups) - len(agents)
        note = f"; {lost} lost and not replaced yet" if lost else ""
        return f"on {executors} executor{'' if executors == 1 else 's'} ({hosts or 'none'}){note}"

    def close(self) -> None:
        """Ends all agents, and with them their servers."""
        with self._changed:
            self._closed = True
            agents = [agent for g in self._groups for agent in (g.agent, *g.waiting) if agent is not None]
            self._changed.notify_all()
        for agent in agents:
            agent.leave()

    def _make_pools(self, agents: Sequence[RemoteAgent]) -> None:
        per_executor = min(self._cores, *(agent.offer.cores for agent in agents))
        self._pools["cpu"] = Pool(self, "cpu", len(agents) * per_executor)
        gpus = min(len(agent.offer.gpus) for agent in agents)
        hosts = {agent.offer.gpu_note: agent.offer.host for agent in agents if gpus or not agent.offer.gpus}
        self.gpus = "; ".join(what if len(hosts) == 1 else f"{what} ({host})" for what, host in hosts.items())
        if gpus:
            self._pools["gpu"] = Pool(self, "gpu", len(agents) * gpus)
        elif self.gpus != NONE_GIVEN:
            _log.warning("state servers compute on the CPU, although Spark gave GPUs to executors: %s", self.gpus)

    # --- agents ------------------------------------------------------------------------------

    @property
    def actions(self) -> dict[str, Handler]:
        """The actions by which agents call the directory, by name."""
        return {
            "offer": lambda request, _: {"agent": self.offer(_read(Offer, request))},
            "commands": lambda request, there: {"commands": encoded(self.commands(_read(Waiting, request), there))},
            "done": lambda request, _: self._done(_read(Done, request)),
        }

    def offer(self, offer: Offer) -> str:
        """Registers a task that offers to run servers, and returns its id."""
        agent = RemoteAgent(self._address(), offer)
        with self._changed:
            self._agents[agent.id] = agent
            known = 0 <= offer.group < len(self._groups) and not self._closed
            if known:
                self._groups[offer.group].waiting.append(agent)
                self._assign(self._groups[offer.group])
        if not known:
            agent.leave()
        return agent.id

    def commands(self, waiting: Waiting, is_there: Callable[[], bool]) -> tuple[Command, ...]:
        """Returns an agent's next commands; see `RemoteAgent.commands`."""
        agent = self._agent(waiting.agent)
        commands = agent.commands(waiting, is_there)
        if not agent.alive:
            self._drop(agent)
        return commands

    def _done(self, done: Done) -> dict[str, Any]:
        return self._agent(done.agent).done(done)

    def _agent(self, name: str) -> RemoteAgent:
        agent = self._agents.get(name)
        if agent is None:
            raise StateError("the directory of state servers has given this agent up")
        return agent

    def _drop(self, agent: RemoteAgent) -> None:
        agent.lose()
        with self._changed:
            self._agents.pop(agent.id, None)
            for group in self._groups:
                if agent in group.waiting:
                    group.waiting.remove(agent)
                if group.agent is agent:
                    group.agent, group.lost, group.since = None, str(agent), time.monotonic()
                    self._assign(group)
            self._changed.notify_all()

    def _assign(self, group: _Group, *, beside: bool = False) -> None:
        """Gives a group one of the tasks that wait for it; ``beside``: also one on an executor that has a group."""
        if group.agent is not None:
            self._dismiss(group)
            return
        taken = {g.agent.offer.executor for g in self._groups if g.agent is not None}
        chosen = next((a for a in group.waiting if a.alive and (beside or a.offer.executor not in taken)), None)
        if chosen is None:
            return
        group.agent = chosen
        group.waiting.remove(chosen)
        self._failures = 0
        self._dismiss(group)
        if chosen.offer.executor in taken:
            _log.warning("no executor is free: %s run beside others, and share its memory", chosen)
        self._changed.notify_all()

    @staticmethod
    def _dismiss(group: _Group) -> None:
        """Sends away the tasks of other jobs that wait for a group which has one."""
        assert group.agent is not None
        for other in [a for a in group.waiting if a.offer.job != group.agent.offer.job]:
            # A copy of the same task stays: where it leaves, Spark takes the task for done and ends its other copy.
            group.waiting.remove(other)
            group.jobs.discard(other.offer.job)
            other.leave()

    # --- jobs --------------------------------------------------------------------------------

    def _supervise(self) -> None:
        """Keeps a task running for every group, as long as the application runs (a thread)."""
        while not self._closed and not self._executors.stopped and self._supervisor is threading.current_thread():
            if self._failure is not None and not self._pools:
                return  # `prepare` raises it; the next call of it begins anew
            try:
                for agent in [agent for agent in list(self._agents.values()) if agent.silent]:
                    _log.warning("%s: silent for %.0f s, given up", agent, SILENT_S)
                    self._drop(agent)
                self._place()
            except Exception as error:  # the JVM may be going away at any moment
                _log.debug("placement: %s", error)
            with self._changed:
                self._changed.wait(_LOOK_S)

    def _place(self) -> None:
        """Starts jobs for groups that have no task, or only one on an executor that has a group already."""
        with self._changed:
            agents = [group.agent for group in self._groups if group.agent is not None]
            if len(agents) == len(self._groups) or time.monotonic() < self._not_before:
                return
        free = self._free(agents)
        jobs: list[tuple[int, _Group, str | None]] = []
        with self._changed:
            for group in [g for g in self._groups if g.agent is None]:
                if group.lost is not None:
                    _log.warning("%s are lost; their partitions wait for another task", group.lost)
                    group.lost = None
                # An executor that is lost may be replaced, or not; in half of the time its partitions go on elsewhere.
                late = time.monotonic() - group.since > min(_FOR_ANOTHER_S, self.patience_s / 2)
                if late:
                    self._assign(group, beside=True)
                if group.agent is not None or group.jobs - {a.offer.job for a in group.waiting}:
                    continue
                if not free and (group.waiting or not late):
                    continue
                serial = next(self._serial)
                group.jobs.add(serial)
                jobs.append((serial, group, free.pop(0) if free else None))
        for job in jobs:
            threading.Thread(target=self._run, args=job, name="gpu-join-servers", daemon=True).start()

    def _free(self, agents: Sequence[RemoteAgent]) -> list[str | None]:
        """The ids of executors that have no agent; None for one whose id is not known."""
        ids = self._executors.ids()
        for agent in agents:
            if agent.executor_id is None:
                agent.executor_id = self._executors.executor_of(agent.offer.stage, agent.offer.task)
        known = {agent.executor_id for agent in agents}
        if None not in known:
            return [executor for executor in ids if executor not in known]
        return [None] * max(0, len(ids) - len({agent.offer.executor for agent in agents}))

    def _run(self, serial: int, group: _Group, executor: str | None) -> None:
        """Runs the job of a group until its task has left (a thread)."""
        _log.info("state servers of group %d: job %d for executor %s", group.number, serial, executor or "(any)")
        failure = None
        try:
            self._executors.run(
                Agent(self._address(), serial, self._settings.server_arguments()), group.number, executor
            )
        except Exception as error:  # any error of Spark's
            failure = _gist(error)
        with self._changed:
            group.jobs.discard(serial)
            of_now = group in self._groups
            if failure is not None and of_now and not self._closed and not self._executors.stopped:
                _log.warning("the job of state servers has failed: %s", failure)
                self._failure, self._failures = failure, self._failures + 1
                self._not_before = time.monotonic() + min(_LONGEST_PAUSE_S, 2.0**self._failures)
            self._changed.notify_all()


def _read(kind: type[_Message], request: Mapping[str, Any]) -> _Message:
    """Reads a message of an agent from JSON.

    Raises:
        DescriptionError: the JSON is no such message.
    """
    with reading(kind.__name__):
        message = decoded(kind, request)
        if not fits(message, kind):
            raise TypeError(f"{message!r}")
        return cast("_Message", message)


def _gist(error: BaseException) -> str:
    """The lines of Spark's error of a failed job that say what is wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    naming_errors = [line for line in lines if "Error" in line and not line.startswith(("at ", "File "))]
    return " / ".join((naming_errors or lines)[:3])[:1000] or repr(error)
