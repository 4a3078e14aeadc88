"""What NVIDIA's plugin for Spark, where it is on, changes in the plan of a join; read and tried with 26.08.1."""

from __future__ import annotations

from typing import Any, Final

from gpu_ops.errors import DescriptionError
from gpu_ops.spark.settings import MEMORY_GPU, Settings

PLUGIN: Final = "com.nvidia.spark.SQLPlugin"


def plugin_on(session: Any) -> bool:
    """Whether the RAPIDS plugin rewrites this session's plans."""
    plugins = session.conf.get("spark.plugins", "") or ""
    enabled = session.conf.get("spark.rapids.sql.enabled", "true")
    return PLUGIN in plugins and str(enabled).lower() != "false"


def metrics_reported(session: Any) -> bool:
    """Whether tasks report a join's metrics to the driver, because Spark's progress cannot have them.

    The plugin fails on every aggregate in ``DataFrame.observe`` (NVIDIA/cudf-spark#14152).
    """
    asked = Settings.of_application(session.sparkContext).metrics
    return plugin_on(session) if asked is None else asked == "reported"


RAPIDS_VERSION: Final = "26.08.1"
RAPIDS_COORDINATES: Final = f"com.nvidia:rapids-4-spark_2.13:{RAPIDS_VERSION}"
"""Of the plugin's jar, built with CUDA 12; its classifier ``cuda13`` is the one built with CUDA 13."""

RAPIDS_SPARK_VERSIONS: Final = (
    *(f"3.5.{patch}" for patch in range(10)),
    *(f"4.0.{patch}" for patch in range(5)),
    "4.1.1", "4.1.2", "4.1.3", "4.2.0",
)  # fmt: skip
"""What that jar has shims for, read from the jar itself; with any other version the plugin refuses to start."""

RESERVE: Final = "1536m"
"""Of a card's memory, for what the two processes on it need beside their pools: contexts, and CUDA's modules as they
are first used. However large the card is, that is no more."""


def rapids_conf(
    *,
    state_share: float = 0.4,
    jar: str | None = None,
    executor_cores: int | None = None,
    discovery_script: str | None = None,
) -> dict[str, str]:
    """What a session builder is given so that the plugin and the state servers fit on one card.

    ::

        builder = SparkSession.builder
        for key, value in gpu_ops.spark.rapids_conf(jar="rapids-4-spark_2.13-26.08.1-cuda13.jar").items():
            builder = builder.config(key, value)

    By default the plugin takes the whole card when it starts, and a state server then finds nothing left. On a
    cluster give ``executor_cores``, too: an executor then has one card, which is what the plugin asks for, and each
    of its tasks so small a part of it that the task with the state servers fits beside as many as there are cores.

    Args:
        state_share: of the card's memory, for the state servers; from 0.05 to 0.8.
        jar: path of the plugin's jar; None if it is on the class path already. ``spark.jars.packages`` cannot fetch it:
            its parent's POM is not on Maven Central.
        executor_cores: of each executor of a cluster, 2 or more; None in local mode.
        discovery_script: with that, the path on the executors of the script that names their GPUs, such as
            ``./getGpusResources.sh``; YARN and Kubernetes need one, a standalone cluster's workers have theirs.

    Returns:
        Names and values of Spark settings; static ones, for a session that is yet to start.

    Raises:
        DescriptionError: a share that leaves one of them too little; an executor without room for two tasks.
    """
    if not 0.05 <= state_share <= 0.8:
        raise DescriptionError(f"state_share={state_share}; it is between 0.05 and 0.8")
    if executor_cores is None and discovery_script is not None:
        raise DescriptionError("discovery_script= is for executors: give executor_cores=, too")
    if executor_cores is not None and executor_cores < 2:
        raise DescriptionError(f"executor_cores={executor_cores}; one is for the state servers, so it is 2 or more")
    plugin = f"{1 - state_share:.2f}"
    conf = {
        "spark.plugins": PLUGIN,
        # The pool is made at once, so it has to leave room, and it must not grow later.
        "spark.rapids.memory.gpu.allocFraction": plugin,
        "spark.rapids.memory.gpu.maxAllocFraction": plugin,
        "spark.rapids.memory.gpu.minAllocFraction": "0.05",
        # Taken off the plugin's part.
        "spark.rapids.memory.gpu.reserve": RESERVE,
        # Our tasks send rows to a state server and wait; they use no card of their own.
        "spark.rapids.sql.python.gpu.enabled": "false",
        # A task holds the card while it scans and shuffles, not while it waits for its state server.
        "spark.rapids.sql.concurrentGpuTasks": "2",
        # The servers' own limit: what is more moves to host memory, instead of taking what the plugin needs.
        MEMORY_GPU: f"{state_share:.2f}",
    }
    if executor_cores is not None:
        conf["spark.executor.cores"] = str(executor_cores)
        conf["spark.executor.resource.gpu.amount"] = "1"
        part = (1 - Settings.server_gpu) / executor_cores
        conf["spark.task.resource.gpu.amount"] = f"{int(part * 1000) / 1000:.3f}"
    if discovery_script is not None:
        conf["spark.executor.resource.gpu.discoveryScript"] = discovery_script
    if jar is not None:
        conf["spark.jars"] = jar
    return conf
