"""The settings ``spark.gpu_ops.*`` of a Spark application; ``docs/cluster.md`` has the table.

Also the settings under which NVIDIA's plugin for Spark and this package share a card; tried with 26.08.1.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, cast, get_args

from gpu_ops.errors import DescriptionError
from gpu_ops.kernels import Probe
from gpu_ops.memory import disk_size, memory_size
from gpu_ops.spark.wire.connection import DEFAULT_PATIENCE_S, Tls

PREFIX: Final = "spark.gpu_ops."
MEMORY_GPU: Final = PREFIX + "memory.gpu"
MEMORY_HOST: Final = PREFIX + "memory.host"
DISK_LIMIT: Final = PREFIX + "disk.limit"
DISK_FOLDER: Final = PREFIX + "disk.folder"
GPU_PROBE: Final = PREFIX + "gpu.probe"
DRIVER_PORT: Final = PREFIX + "driver.port"
SERVER_GPU: Final = PREFIX + "server.gpu"
SERVER_EXECUTORS: Final = PREFIX + "server.executors"
START_TIMEOUT: Final = PREFIX + "server.startTimeout"
PATIENCE: Final = PREFIX + "server.patience"
TASKS: Final = PREFIX + "tasks"
METRICS: Final = PREFIX + "metrics"
PROMETHEUS: Final = PREFIX + "prometheus.port"
TLS: Final = tuple(f"{PREFIX}tls.{name}" for name in ("certificate", "key", "authority", "name"))
NAMES: Final = (
    MEMORY_GPU,
    MEMORY_HOST,
    DISK_LIMIT,
    DISK_FOLDER,
    GPU_PROBE,
    DRIVER_PORT,
    SERVER_GPU,
    SERVER_EXECUTORS,
    START_TIMEOUT,
    PATIENCE,
    TASKS,
    METRICS,
    PROMETHEUS,
    *TLS,
)

LOST_GPU: Final = 76
"""The exit code of a state server whose GPU no longer answers; a new process may find that it answers again."""

_METRICS: Final = ("observed", "reported")
_SECONDS: Final = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600}
PLUGIN: Final = "com.nvidia.spark.SQLPlugin"
RAPIDS_VERSION: Final = "26.08.1"
RAPIDS_COORDINATES: Final = f"com.nvidia:rapids-4-spark_2.13:{RAPIDS_VERSION}"
"""Maven coordinates of the plugin's jar for CUDA 12; the classifier ``cuda13`` is for CUDA 13."""

RAPIDS_SPARK_VERSIONS: Final = (
    *(f"3.5.{patch}" for patch in range(10)),
    *(f"4.0.{patch}" for patch in range(5)),
    "4.1.1", "4.1.2", "4.1.3", "4.2.0",
)  # fmt: skip
"""The Spark versions that the jar has shims for, read from the jar; with any other the plugin refuses to start."""

RESERVE: Final = "1536m"
"""Memory of a card, however large, that the two processes on it need besides their pools: contexts, and CUDA's modules
as they are first used."""


def given_at_start(context: Any) -> dict[str, str]:
    """The settings under ``spark.gpu_ops.`` that an application started with, by name."""
    return {PREFIX + str(pair._1()): str(pair._2()) for pair in context._jsc.sc().getConf().getAllWithPrefix(PREFIX)}


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of an application, with their defaults.

    Attributes:
        memory_gpu: the GPU memory limit of each state server, as `gpu_ops.memory.memory_size` reads it; None for none.
        memory_host: the host memory limit of each state server, likewise.
        driver_port: the port that the directory listens on; 0 for any.
        server_gpu: the part of a GPU that Spark reserves for a task with state servers.
        executors: the number of executors with state servers; None for all registered ones.
        start_timeout_s: seconds to wait for executors, and for state servers that are gone.
        tasks: the number of Spark tasks that bring an operator's rows and take its changes, if it has fewer partitions;
            None: one for each partition, or with GPUs one for each core.
        patience_s: seconds without a sign of life after which a server is given up, see `gpu_ops.spark.wire.exchange`.
        tls: the TLS files of connections on a cluster; None for plain connections.
        metrics: the way of metrics to the driver: "observed" in Spark's progress, "reported" by the tasks; None for
            the former unless the RAPIDS plugin is on.
        prometheus: host and port where the driver serves metrics, or None; the host is None for the driver's own.
        gpu_probe: the way in which GPUs find matching rows, see `gpu_ops.kernels.Probe`.
        disk_limit: bytes of local disk for each state server's state; None for all that is free, "0" for none.
        disk_folder: the folder on local disk, see `gpu_ops.memory.Budget`; None for Spark's own local folders.
    """

    memory_gpu: str | None = None
    memory_host: str | None = None
    driver_port: int = 0
    server_gpu: float = 0.1
    executors: int | None = None
    start_timeout_s: float = 60.0
    patience_s: float = DEFAULT_PATIENCE_S
    tasks: int | None = None
    tls: Tls | None = None
    metrics: str | None = None
    gpu_probe: Probe = "auto"
    prometheus: tuple[str | None, int] | None = None
    disk_limit: str | None = None
    disk_folder: str | None = None

    @classmethod
    def of(cls, conf: Iterable[tuple[str, Any]]) -> Settings:
        """Reads the settings from an application's configuration, ignoring the settings of others.

        Raises:
            DescriptionError: a name under ``spark.gpu_ops.`` is unknown, or a value is invalid.
        """
        given = {name: str(value).strip() for name, value in conf if name.startswith(PREFIX)}
        unknown = sorted(given.keys() - set(NAMES))
        if unknown:
            raise DescriptionError(f"no setting is called {unknown[0]!r}; there are {', '.join(NAMES)}")
        for name in (MEMORY_GPU, MEMORY_HOST, DISK_LIMIT):
            if name in given:
                _amount(name, given[name])
        port = _number(given, DRIVER_PORT, 0)
        share = _number(given, SERVER_GPU, cls.server_gpu)
        executors, tasks = (_number(given, name, 0) if name in given else None for name in (SERVER_EXECUTORS, TASKS))
        if port != int(port) or not 0 <= port <= 65535:
            raise DescriptionError(f"{DRIVER_PORT}={given[DRIVER_PORT]}; it is a port, or 0 for any")
        if not 0 < share <= 0.5:
            # Above a half Spark hands out whole cards only.
            raise DescriptionError(f"{SERVER_GPU}={given[SERVER_GPU]}; it is above 0 and at most 0.5")
        for name, number in ((SERVER_EXECUTORS, executors), (TASKS, tasks)):
            if number is not None and (number != int(number) or number < 1):
                raise DescriptionError(f"{name}={given[name]}; there is at least one")
        if given.get(METRICS) not in (None, *_METRICS):
            raise DescriptionError(f"{METRICS}={given[METRICS]!r}; it is one of {', '.join(_METRICS)}")
        probe = given.get(GPU_PROBE, cls.gpu_probe)
        if probe not in get_args(Probe):
            raise DescriptionError(f"{GPU_PROBE}={probe!r}; it is one of {', '.join(get_args(Probe))}")
        return cls(
            memory_gpu=given.get(MEMORY_GPU),
            memory_host=given.get(MEMORY_HOST),
            driver_port=int(port),
            server_gpu=share,
            executors=None if executors is None else int(executors),
            start_timeout_s=_seconds(START_TIMEOUT, given.get(START_TIMEOUT, "60s"), 1),
            patience_s=_seconds(PATIENCE, given.get(PATIENCE, f"{DEFAULT_PATIENCE_S:g}s"), 5),
            tasks=None if tasks is None else int(tasks),
            tls=_tls(given),
            metrics=given.get(METRICS),
            gpu_probe=cast("Probe", probe),
            prometheus=_host_and_port(given[PROMETHEUS]) if PROMETHEUS in given else None,
            disk_limit=given.get(DISK_LIMIT),
            disk_folder=given.get(DISK_FOLDER) or None,
        )

    @classmethod
    def of_application(cls, context: Any) -> Settings:
        """Reads the settings that an application started with; raises as `of` does.

        Args:
            context: its SparkContext. Its ``getConf()`` costs a call into the JVM per setting, a tenth of a second.
        """
        return cls.of(given_at_start(context).items())

    @classmethod
    def check_session(cls, session: Mapping[str, str], application: Mapping[str, str]) -> None:
        """Refuses settings that were changed in a running session, where they would have no effect.

        Args:
            session: the configuration of the session.
            application: the configuration of its application.

        Raises:
            DescriptionError: a name under ``spark.gpu_ops.`` is unknown, or a value is invalid or not the
                application's.
        """
        cls.of(session.items())
        for name in NAMES:
            now, started = session.get(name), application.get(name)
            if now != started:
                change = f"{name} was unset" if now is None else f"{name}={now!r} was set"
                runs = "without it" if started is None else f"with {started!r}"
                raise DescriptionError(
                    f"{change} in a session whose application runs {runs}, where it would change nothing: it is a "
                    "setting of the application, given before that starts (SparkSession.builder.config(...), "
                    "spark-submit --conf)"
                )

    def server_arguments(self) -> dict[str, list[str]]:
        """The command line arguments of state servers, by kind of server."""
        host = [] if self.memory_host is None else ["--host-memory", self.memory_host]
        host += [] if self.disk_limit is None else ["--disk-limit", self.disk_limit]
        host += [] if self.disk_folder is None else ["--disk-folder", self.disk_folder]
        gpu = [] if self.memory_gpu is None else ["--gpu-memory", self.memory_gpu]
        gpu += [] if self.gpu_probe == "auto" else ["--gpu-probe", self.gpu_probe]
        return {"cpu": host, "gpu": [*gpu, *host]}


def _amount(name: str, text: str) -> None:
    try:
        (disk_size if name == DISK_LIMIT else memory_size)(text)
    except DescriptionError as error:
        raise DescriptionError(f"{name}: {error}") from None


def _tls(given: dict[str, str]) -> Tls | None:
    certificate, key, authority, name = (given.get(setting) for setting in TLS)
    if certificate is None and key is None and authority is None and name is None:
        return None
    if certificate is None or key is None or authority is None:
        raise DescriptionError(f"{', '.join(TLS[:3])} go together: set all of them, or none")
    return Tls(certificate, key, authority, name)


def _host_and_port(text: str) -> tuple[str | None, int]:
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) <= 65535:
        raise DescriptionError(f"{PROMETHEUS}={text!r}; it is a port, or host:port, such as 9095 or 0.0.0.0:9095")
    return host or None, int(port)


def _number(given: dict[str, str], name: str, default: float) -> float:
    try:
        return float(given.get(name, default))
    except ValueError:
        raise DescriptionError(f"{name}={given[name]!r} is no number") from None


def _seconds(name: str, text: str, least: int) -> float:
    duration = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|)", text.lower())
    seconds = float(duration[1]) * _SECONDS[duration[2]] if duration is not None else 0.0
    if not least <= seconds <= 3600:
        raise DescriptionError(f"{name}={text!r}; it is a time from {least}s to 1h, such as '60s' or '2min'")
    return seconds


def plugin_on(session: Any) -> bool:
    """True if the RAPIDS plugin rewrites this session's plans."""
    plugins = session.conf.get("spark.plugins", "") or ""
    enabled = session.conf.get("spark.rapids.sql.enabled", "true")
    return PLUGIN in plugins and str(enabled).lower() != "false"


def metrics_reported(session: Any) -> bool:
    """True if tasks report a join's metrics to the driver, because Spark's progress cannot have them.

    The plugin fails on every aggregate in ``DataFrame.observe`` (NVIDIA/cudf-spark#14152).
    """
    asked = Settings.of_application(session.sparkContext).metrics
    return plugin_on(session) if asked is None else asked == "reported"


def rapids_conf(
    *,
    state_share: float = 0.4,
    jar: str | None = None,
    executor_cores: int | None = None,
    discovery_script: str | None = None,
) -> dict[str, str]:
    """Settings for a session builder with which the RAPIDS plugin and the state servers share one card.

    By default the plugin takes the whole card when it starts, and a state server then finds nothing left. On a
    cluster give ``executor_cores``, too: an executor then has one card, which is what the plugin asks for, and each
    of its tasks so small a part of it that the task with the state servers fits beside as many as there are cores.

    Args:
        state_share: the share of the card's memory for the state servers, from 0.05 to 0.8.
        jar: the path of the plugin's jar; None if it is on the class path already. ``spark.jars.packages`` cannot fetch
            it: its parent's POM is not on Maven Central.
        executor_cores: the cores of each executor of a cluster, 2 or more; None in local mode.
        discovery_script: with that, the path on the executors of the script that names their GPUs, such as
            ``./getGpusResources.sh``; YARN and Kubernetes need one, a standalone cluster's workers have theirs.

    Returns:
        Names and values of Spark settings; static ones, for a session that is yet to start.

    Raises:
        DescriptionError: the share leaves one of them too little, or an executor has no room for two tasks.

    Example:
        >>> from pyspark.sql import SparkSession
        >>> builder = SparkSession.builder
        >>> for key, value in gpu_ops.spark.rapids_conf(jar="rapids-4-spark_2.13-26.08.1-cuda13.jar").items():
        ...     builder = builder.config(key, value)
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
