"""The executors of a Spark application as its driver sees them, and the jobs that run agents on them.

**Why a job per executor.** One barrier stage over all executors would end every task when one executor is lost, and all
state would be reloaded. One ordinary stage runs only the lost task again, but speculation copies its tasks as soon as
one of them has ended well (or after ``spark.speculation.task.duration.threshold``), and a copy would hold a slot for
good. So each executor has a job of its own, with a barrier stage of one task: that is never copied, and what is lost is
lost alone. Spark does not run such a stage again, the driver does with a new job, which can choose the executor. With
dynamic allocation, which knows no barriers, the stage is an ordinary one.

The task prefers its executor by id, as tasks on cached blocks do (``executor_<host>_<id>``); on ``local-cluster`` each
went where it should. One that does not is dealt with in `gpu_ops.spark.driver.cluster`.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import re
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final

from pyspark.sql import SparkSession

from gpu_ops.errors import StateError
from gpu_ops.query.catalyst import items
from gpu_ops.spark.driver.process import PACKAGE_ROOT
from gpu_ops.spark.settings import SERVER_EXECUTORS, START_TIMEOUT, Settings
from gpu_ops.spark.tasks import NEEDED
from gpu_ops.spark.tasks.arrow import importing
from gpu_ops.state.address import StateAddress

_log = logging.getLogger(__name__)

JOB_GROUP: Final = "gpu_ops state servers"
DESCRIPTION: Final = "state servers of gpu_ops; they run as long as the application"
POOL: Final = "gpu_ops"
"""The pool in Spark's fair scheduler, where that is on: a query's backlog must not hold up a restarted server."""

#: Properties of the query in whose thread servers are started; the job belongs to none of its micro-batches.
_OF_A_QUERY: Final = ("sql.streaming.queryId", "streaming.sql.batchId", "spark.sql.execution.id")

_LOOK_S: Final = 0.25
_STEADY_S: Final = 2.0
_ATTEMPTS: Final = 8  # of a stage; spark.stage.maxConsecutiveAttempts is 4


def on_cluster(context: Any) -> bool:
    """True if an application has executors besides its driver."""
    master = str(context.master)
    return master != "local" and not master.startswith("local[")


def one_machine(context: Any) -> bool:
    """True if an application's executors, if it has any, are all on the driver's machine."""
    return not on_cluster(context) or str(context.master).startswith("local-cluster[")


class Executors:
    """The executors of one Spark application, and jobs on them.

    Args:
        context: its SparkContext.
        settings: the settings of the application.
    """

    def __init__(self, context: Any, settings: Settings) -> None:
        self._context, self._settings = context, settings
        self._conf = context.getConf()

    @property
    def stopped(self) -> bool:
        """True if the application is over or ending."""
        try:
            return self._context._jsc is None or bool(self._context._jsc.sc().isStopped())
        except Exception:  # no JVM to ask
            return True

    def ids(self) -> list[str]:
        """Spark's ids of the registered executors."""
        return [str(name) for name in items(self._context._jsc.sc().getExecutorIds())]

    def wait(self, deadline: float) -> int:
        """Waits for the executors that the application is to have, and returns how many have registered.

        Args:
            deadline: until when, by `time.monotonic`.

        Raises:
            StateError: none came.
        """
        wanted, why = self._executor_count()
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
        """The number of cores that one executor has.

        Args:
            count: the number of executors.

        Raises:
            StateError: the servers' tasks would take all the room there is for tasks.
        """
        spark = self._context._jsc.sc()
        slots = int(spark.maxNumConcurrentTasks(spark.resourceProfileManager().defaultResourceProfile()))
        if slots <= count:
            raise StateError(
                f"{count} executor{_s(count)} with room for {slots} task{_s(slots)} at a time: state servers take one "
                "task on each for as long as the application runs, nothing would be left. Give each executor room for "
                "two tasks or more: spark.executor.cores=2 or more, spark.task.cpus=1, and where tasks take a part "
                f"of a GPU spark.task.resource.gpu.amount=0.25 or less; or have servers on fewer: {SERVER_EXECUTORS}"
            )
        if self._conf.contains("spark.executor.pyspark.memory"):
            _log.warning(
                "spark.executor.pyspark.memory limits the address space of state servers, which CUDA does not bear: "
                "leave it unset, and raise spark.executor.memoryOverhead by what the servers take"
            )
        per_task = int(str(self._conf.get("spark.task.cpus", "1")))
        return max(1, math.ceil(slots * per_task / max(count, len(self.ids()))))

    def executor_of(self, stage: int, task: int) -> str | None:
        """The id of the executor that runs a task attempt; None if Spark does not say (yet)."""
        try:
            for attempt in range(_ATTEMPTS):
                attempts = self._context._jsc.sc().statusStore().taskList(stage, attempt, 1000)
                for running in items(attempts):
                    if running.taskId() == task:
                        return str(running.executorId())
        except Exception as error:  # an interface of Spark's own; or the stage is not known yet
            _log.debug("task %d of stage %d: %s", task, stage, error)
        return None

    def run(self, agent: Callable[[Iterator[int]], Iterator[int]], group: int, executor: str | None) -> None:
        """Runs the job of a group of servers; returns when its task has left.

        Args:
            agent: the function that the task runs.
            group: its number, the task's input.
            executor: the id of the executor that it should run on, if any.
        """
        context = self._context
        for name in _OF_A_QUERY:
            context.setLocalProperty(name, None)
        context.setJobGroup(JOB_GROUP, DESCRIPTION, False)
        context.setLocalProperty("spark.scheduler.pool", POOL)
        task = self._task(group, executor)
        if not self._dynamic:  # for a profile Spark would then start executors of its own
            try:
                task = task.withResources(self._profile())
            except Exception as error:  # this master, or this version, has none
                _log.info("state servers without a resource profile of their own: %s", error)
            task = task.barrier()
        task.mapPartitions(agent).count()

    def _task(self, group: int, executor: str | None) -> Any:
        """An RDD of one partition that prefers a given executor."""
        from pyspark.rdd import RDD  # noqa: PLC0415 - only with a cluster
        from pyspark.serializers import CPickleSerializer  # noqa: PLC0415

        context = self._context
        try:
            jvm, spark = context._jvm, context._jsc.sc()
            known = items(spark.statusStore().executorList(True))
            ports = [str(x.hostPort()) for x in known if str(x.id()) == executor]
            preferred = [f"executor_{port.rpartition(':')[0]}_{executor}" for port in ports]
            to_seq = jvm.org.apache.spark.api.python.PythonUtils.toSeq
            pair = jvm.scala.Tuple2(bytearray(CPickleSerializer().dumps(group)), to_seq(preferred))
            tag = jvm.scala.reflect.ClassTag.apply(jvm.java.lang.Class.forName("[B"))
            rdd = jvm.org.apache.spark.api.java.JavaRDD.fromRDD(spark.makeRDD(to_seq([pair]), tag), tag)
            return RDD(rdd, context, CPickleSerializer())
        except Exception as error:  # interfaces of Spark's own
            _log.warning("state servers go where Spark places them: %s", error)
            return context.parallelize([group], 1)

    @property
    def _dynamic(self) -> bool:
        return str(self._conf.get("spark.dynamicAllocation.enabled", "false")).lower() == "true"

    def _profile(self) -> Any:
        """A resource profile of one core and a small part of a GPU, for running executors."""
        from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests  # noqa: PLC0415

        requests = TaskResourceRequests().cpus(1)
        if float(str(self._conf.get("spark.executor.resource.gpu.amount", "0"))) > 0:
            requests = requests.resource("gpu", self._settings.server_gpu)
        return ResourceProfileBuilder().require(requests).build

    def _executor_count(self) -> tuple[int | None, str]:
        """The number of executors that the application is to have (None if unknown), and the setting that says so."""
        if self._settings.executors is not None:
            return self._settings.executors, SERVER_EXECUTORS
        local = re.match(r"local-cluster\[\s*(\d+)", str(self._context.master))
        if local is not None:
            return int(local[1]), "master"
        names = ["spark.dynamicAllocation.initialExecutors", "spark.dynamicAllocation.minExecutors"]
        for name in names if self._dynamic else ["spark.executor.instances"]:
            value = int(str(self._conf.get(name, "0")))
            if value:
                return value, name
        return None, "no setting says how many there will be"


def _s(count: int) -> str:
    return "" if count == 1 else "s"


_HADOOP: Final = {"s3": "s3a", "gcs": "gs"}


def as_hadoop_has_it(folder: StateAddress) -> str:
    """A folder's URI for Spark (Hadoop) to read and write; a local folder is made, readable by its owner alone."""
    if folder.path is not None:
        os.makedirs(folder.path, mode=0o700, exist_ok=True)
        return f"file://{os.path.abspath(folder.path)}"
    scheme, _, rest = folder.secret_uri.partition("://")
    host, _, path = rest.partition("/")
    return f"{_HADOOP.get(scheme, scheme)}://{host.rpartition('@')[2]}/{path.partition('?')[0]}"


class LocalStateWarning(UserWarning):
    """Warning: the state folder may be on one machine only, and the cluster has several."""


def warn_of_local_folder(context: Any, state: StateAddress, *, stacklevel: int) -> None:
    """Warns of a plain local path on a cluster; ``file:///...`` says that it is a mount all machines share.

    Args:
        context: the SparkContext.
        state: the state folder.
        stacklevel: of the warning, seen from here.
    """
    if one_machine(context) or not state.plain:
        return
    warnings.warn(
        f"state='{state}' is a local path, and executors are on other machines (master {context.master}): "
        "the driver and all executors must see the same folder there. Give a URI (hdfs://, s3://, gs://), or "
        f"'file://{state}' if it is on a mount that all of them share",
        LocalStateWarning,
        stacklevel=stacklevel + 1,
    )


# --- Python workers ----------------------------------------------------------------------------

_OF_WORKERS: Final = "Python workers of gpu_ops start while the query is planned"
"""The job's description in Spark's UI."""

BEGINNING: Final = "gpu-join-workers"
"""The name of the thread that starts Python workers."""

_begun: Final[weakref.WeakSet[Any]] = weakref.WeakSet()
"""The Spark contexts whose workers have been started."""


def make_importable(session: SparkSession) -> None:
    """Lets Spark's Python workers run this interpreter and import this package, as far as a late change can.

    On one machine the first call begins them as well, and does not wait: Spark's daemon and each worker take half a
    second to import what they need, which otherwise the first micro-batch waits for.
    """
    context = session.sparkContext
    if not one_machine(context):
        return  # another machine has its own interpreter and packages
    if not os.environ.get("PYSPARK_PYTHON") and not session.conf.get("spark.pyspark.python", None):
        context.pythonExec = sys.executable
    if "site-packages" not in PACKAGE_ROOT:
        known = [*context.environment.get("PYTHONPATH", "").split(os.pathsep)]
        if PACKAGE_ROOT not in known:
            path = os.pathsep.join([PACKAGE_ROOT, *filter(None, known)])
            # another one, as a query on another thread may be reading this one
            context.environment = {**context.environment, "PYTHONPATH": path}
    if context not in _begun:
        _begun.add(context)
        threading.Thread(target=_begin, args=(session,), name=BEGINNING, daemon=True).start()


def _begin(session: SparkSession) -> None:
    try:
        partitions = int(str(session.conf.get("spark.sql.shuffle.partitions")))
        tasks = min(session.sparkContext.defaultParallelism, partitions)
        rows = session.range(0, tasks, 1, tasks).mapInArrow(functools.partial(importing, NEEDED), "id BIGINT")
        session.sparkContext.setJobDescription(_OF_WORKERS)
        rows.write.format("noop").mode("overwrite").save()
    except Exception as error:
        _log.debug("Python workers were not begun: %s", error)  # a query's own tasks begin them, and say what is wrong
