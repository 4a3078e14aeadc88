"""The executors of a Spark application as its driver sees them, and the job that runs agents on them.

**Why no barrier stage.** In a barrier stage Spark starts all tasks or none, but when one executor is lost it ends
and restarts all of them, and all state is reloaded. In an ordinary stage it runs the lost task again and leaves the
others alone. What a barrier would be good for is had otherwise: each task prefers one executor by its id
(``executor_<host>_<id>``, as tasks on cached blocks do), and a task that lands beside another one is sent
away; on ``local-cluster`` tasks went where they should, and without a preference too, as Spark deals tasks out in
turn to executors that are free.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from gpu_ops.errors import StateError
from gpu_ops.spark.settings import SERVER_EXECUTORS, START_TIMEOUT, Settings

_log = logging.getLogger(__name__)

JOB_GROUP: Final = "gpu_ops state servers"
DESCRIPTION: Final = "state servers of gpu_ops; they run as long as the application"
POOL: Final = "gpu_ops"
"""Of Spark's fair scheduler, where that is on: a query's backlog is not to hold up a lost task."""

#: Of a query in whose thread the servers are asked for; the job is none of its micro-batch.
_OF_A_QUERY: Final = ("sql.streaming.queryId", "streaming.sql.batchId", "spark.sql.execution.id")

_LOOK_S: Final = 0.25
_STEADY_S: Final = 2.0


def on_cluster(context: Any) -> bool:
    """Whether an application has executors beside its driver."""
    master = str(context.master)
    return master != "local" and not master.startswith("local[")


class Executors:
    """The executors of an application.

    Args:
        context: its SparkContext.
        settings: of the application.
    """

    def __init__(self, context: Any, settings: Settings) -> None:
        self._context, self._settings = context, settings
        self._conf = context.getConf()

    @property
    def stopped(self) -> bool:
        """Whether the application is over."""
        return self._context._jsc is None

    def ids(self) -> list[str]:
        """Spark's ids of the executors that are there."""
        return _sequence(self._context._jsc.sc().getExecutorIds())

    def wait(self, deadline: float) -> int:
        """Waits for the executors the application is to have; gives how many are there then.

        Args:
            deadline: until when, by `time.monotonic`.

        Raises:
            StateError: none came.
        """
        wanted, why = self._wanted()
        count, since = 0, time.monotonic()
        while time.monotonic() < deadline and not self.stopped:
            now = len(self.ids())
            if now != count:
                count, since = now, time.monotonic()
            if wanted is not None and count >= wanted:
                return wanted
            if wanted is None and count and time.monotonic() - since > _STEADY_S:
                return count
            time.sleep(_LOOK_S)
        if not count or (wanted is not None and self._settings.executors is not None):
            raise StateError(
                f"{count} of {wanted or 'any'} executors have registered within {self._settings.start_timeout_s:.0f} "
                f"s ({why}), and state servers run on executors; {START_TIMEOUT} sets how long they are waited for"
            )
        _log.warning("%d executors have registered, not %s (%s): state servers run on those", count, wanted, why)
        return count

    def cores(self, count: int) -> int:
        """The cores of an executor.

        Args:
            count: of executors.

        Raises:
            StateError: the servers' tasks would take all the room there is for tasks.
        """
        spark = self._context._jsc.sc()
        slots = int(spark.maxNumConcurrentTasks(spark.resourceProfileManager().defaultResourceProfile()))
        if slots <= count:
            raise StateError(
                f"{count} executors have room for {slots} tasks at a time, and state servers take a task on each for "
                "as long as the application runs: nothing would be left for queries. Give each executor room for "
                "two tasks or more: spark.executor.cores=2 or more, spark.task.cpus=1, and where tasks take a part "
                f"of a GPU spark.task.resource.gpu.amount=0.25 or less; or have servers on fewer: {SERVER_EXECUTORS}"
            )
        per_task = int(str(self._conf.get("spark.task.cpus", "1")))
        return max(1, math.ceil(slots * per_task / max(count, len(self.ids()))))

    def executor_of(self, stage: int, task: int) -> str | None:
        """The id of the executor that runs a task attempt; None if Spark does not say (yet)."""
        try:
            found = self._context._jsc.sc().statusStore().taskList(stage, 0, 100_000)
            return next((str(x.executorId()) for x in _objects(found) if x.taskId() == task), None)
        except Exception as error:  # an interface of Spark's own; or the stage is not known yet
            _log.debug("task %d of stage %d: %s", task, stage, error)
            return None

    def run(self, agent: Callable[[Iterator[int]], Iterator[int]], places: Sequence[tuple[int, str | None]]) -> None:
        """Runs a job with a task for each group of servers; returns when all tasks have left.

        Args:
            agent: what a task does.
            places: numbers of groups, and the executor each should go to, if any.
        """
        context = self._context
        for name in _OF_A_QUERY:
            context.setLocalProperty(name, None)
        context.setJobGroup(JOB_GROUP, DESCRIPTION, False)
        context.setLocalProperty("spark.scheduler.pool", POOL)
        tasks = self._tasks(places)
        profile = self._profile()
        if profile is not None:
            try:
                tasks = tasks.withResources(profile)
            except Exception as error:  # this master, or this version, has none
                _log.info("state servers without a resource profile of their own: %s", error)
        tasks.mapPartitions(agent).count()

    def _tasks(self, places: Sequence[tuple[int, str | None]]) -> Any:
        """An RDD with one partition per group, which prefers an executor."""
        from pyspark.rdd import RDD  # noqa: PLC0415 - only with a cluster
        from pyspark.serializers import CPickleSerializer  # noqa: PLC0415

        context = self._context
        try:
            jvm, spark = context._jvm, context._jsc.sc()
            hosts = {str(x.id()): str(x.hostPort()) for x in _objects(spark.statusStore().executorList(True))}
            to_seq = jvm.org.apache.spark.api.python.PythonUtils.toSeq
            pairs = []
            for group, executor in places:
                host = hosts[executor].rpartition(":")[0] if executor in hosts else None
                preferred = [] if host is None else [f"executor_{host}_{executor}"]
                pairs.append(jvm.scala.Tuple2(bytearray(CPickleSerializer().dumps(group)), to_seq(preferred)))
            tag = jvm.scala.reflect.ClassTag.apply(jvm.java.lang.Class.forName("[B"))
            made = jvm.org.apache.spark.api.java.JavaRDD.fromRDD(spark.makeRDD(to_seq(pairs), tag), tag)
            return RDD(made, context, CPickleSerializer())
        except Exception as error:  # interfaces of Spark's own
            _log.warning("state servers go where Spark places them: %s", error)
            return context.parallelize([group for group, _ in places], len(places))

    def _profile(self) -> Any:
        """One core and a small part of a GPU, of executors that are there; None where that cannot be."""
        if str(self._conf.get("spark.dynamicAllocation.enabled", "false")).lower() == "true":
            return None  # for a profile Spark would then start executors of its own
        from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests  # noqa: PLC0415

        requests = TaskResourceRequests().cpus(1)
        if float(str(self._conf.get("spark.executor.resource.gpu.amount", "0"))) > 0:
            requests = requests.resource("gpu", self._settings.server_gpu)
        return ResourceProfileBuilder().require(requests).build

    def _wanted(self) -> tuple[int | None, str]:
        """How many executors the application is to have, None if that is not known; and how that is known."""
        if self._settings.executors is not None:
            return self._settings.executors, SERVER_EXECUTORS
        local = re.match(r"local-cluster\[\s*(\d+)", str(self._context.master))
        if local is not None:
            return int(local[1]), "master"
        dynamic = str(self._conf.get("spark.dynamicAllocation.enabled", "false")).lower() == "true"
        names = ["spark.dynamicAllocation.initialExecutors", "spark.dynamicAllocation.minExecutors"]
        for name in names if dynamic else ["spark.executor.instances"]:
            value = int(str(self._conf.get(name, "0")))
            if value:
                return value, name
        return None, "no setting says how many there will be"


def _objects(sequence: Any) -> list[Any]:
    return [sequence.apply(i) for i in range(sequence.size())]


def _sequence(sequence: Any) -> list[str]:
    return [str(x) for x in _objects(sequence)]
