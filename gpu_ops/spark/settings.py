"""The settings of this pack in a Spark application's configuration; ``docs/cluster.md`` has the table."""

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
    METRICS,
    PROMETHEUS,
    *TLS,
)

_METRICS: Final = ("observed", "reported")

_SECONDS: Final = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600}


def given_at_start(context: Any) -> dict[str, str]:
    """The names under ``spark.gpu_ops.`` in the configuration that an application started with, and their values."""
    return {PREFIX + str(pair._1()): str(pair._2()) for pair in context._jsc.sc().getConf().getAllWithPrefix(PREFIX)}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the application sets.

    Attributes:
        memory_gpu: of each state server, as `gpu_ops.memory.memory_size` reads it; None for no limit.
        memory_host: likewise, host memory.
        driver_port: where the directory listens; 0 for any.
        server_gpu: the part of a GPU that Spark is told a task with state servers takes.
        executors: how many executors have state servers; None for those that are there.
        start_timeout_s: how long executors, and state servers that are gone, are waited for.
        patience_s: how long a state server may give no sign of life, see `gpu_ops.spark.wire.exchange`.
        tls: of connections on a cluster; None for plain ones.
        metrics: how they come to the driver: "observed" in Spark's progress, "reported" by the tasks, or None for
            the former unless the RAPIDS plugin is on.
        prometheus: host and port where the driver serves metrics, or None; the host is None for the driver's own.
        gpu_probe: how GPUs find matching rows, see `gpu_ops.kernels.Probe`.
        disk_limit: bytes of local disk for state, of each state server; None for what there is, "0" for none.
        disk_folder: where, see `gpu_ops.memory.Budget`; None for Spark's own local folders.
    """

    memory_gpu: str | None = None
    memory_host: str | None = None
    driver_port: int = 0
    server_gpu: float = 0.1
    executors: int | None = None
    start_timeout_s: float = 60.0
    patience_s: float = DEFAULT_PATIENCE_S
    tls: Tls | None = None
    metrics: str | None = None
    gpu_probe: Probe = "auto"
    prometheus: tuple[str | None, int] | None = None
    disk_limit: str | None = None
    disk_folder: str | None = None

    @classmethod
    def of(cls, conf: Iterable[tuple[str, Any]]) -> Settings:
        """From names and values of an application's configuration, those of others among them.

        Raises:
            DescriptionError: an unknown name under ``spark.gpu_ops.``, or a value that cannot be.
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
        executors = _number(given, SERVER_EXECUTORS, 0) if SERVER_EXECUTORS in given else None
        if port != int(port) or not 0 <= port <= 65535:
            raise DescriptionError(f"{DRIVER_PORT}={given[DRIVER_PORT]}; it is a port, or 0 for any")
        if not 0 < share <= 0.5:
            # Above a half Spark hands out whole cards only.
            raise DescriptionError(f"{SERVER_GPU}={given[SERVER_GPU]}; it is above 0 and at most 0.5")
        if executors is not None and (executors != int(executors) or executors < 1):
            raise DescriptionError(f"{SERVER_EXECUTORS}={given[SERVER_EXECUTORS]}; there is at least one")
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
            tls=_tls(given),
            metrics=given.get(METRICS),
            gpu_probe=cast("Probe", probe),
            prometheus=_host_and_port(given[PROMETHEUS]) if PROMETHEUS in given else None,
            disk_limit=given.get(DISK_LIMIT),
            disk_folder=given.get(DISK_FOLDER) or None,
        )

    @classmethod
    def of_application(cls, context: Any) -> Settings:
        """Those that an application started with; `of` says what it raises.

        Args:
            context: its SparkContext. Its ``getConf()`` costs a call into the JVM per setting, a tenth of a second.
        """
        return cls.of(given_at_start(context).items())

    @classmethod
    def check_session(cls, session: Mapping[str, str], application: Mapping[str, str]) -> None:
        """Refuses what was set in a running session, where it would do nothing.

        Args:
            session: the configuration of the session.
            application: that of its application.

        Raises:
            DescriptionError: an unknown name under ``spark.gpu_ops.``, a value that cannot be, or another one than
                the application's.
        """
        cls.of(session.items())
        for name in NAMES:
            now, started = session.get(name), application.get(name)
            if now != started:
                found = f"{name} was unset" if now is None else f"{name}={now!r} was set"
                runs = "without it" if started is None else f"with {started!r}"
                raise DescriptionError(
                    f"{found} in a session whose application runs {runs}, where it would change nothing: it is a "
                    "setting of the application, given before that starts (SparkSession.builder.config(...), "
                    "spark-submit --conf)"
                )

    def server_arguments(self) -> dict[str, list[str]]:
        """What state servers are started with: by kind, words of a command line."""
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
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|)", text.lower())
    seconds = float(found[1]) * _SECONDS[found[2]] if found is not None else 0.0
    if not least <= seconds <= 3600:
        raise DescriptionError(f"{name}={text!r}; it is a time from {least}s to 1h, such as '60s' or '2min'")
    return seconds
