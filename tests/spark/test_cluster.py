"""Joins on a cluster: state servers on its executors, which are lost one after the other."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from spark.conftest import _missing

TESTS = Path(__file__).parent.parent

pytestmark = [
    pytest.mark.spark,
    pytest.mark.xdist_group("cluster"),  # the application runs once
    pytest.mark.skipif(importlib.util.find_spec("pyspark") is None or _missing() is not None, reason="no Spark"),
]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What ``cluster_app.py`` saw."""
    folder = tmp_path_factory.mktemp("cluster")
    done = run(str(Path(__file__).with_name("cluster_app.py")), str(folder))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return dict(json.loads((folder / "seen.json").read_text()))


def test_a_left_join_with_retractions_is_exact(seen: dict[str, Any]) -> None:
    assert seen["batch"] is True
    assert seen["retractions"] is True


def test_servers_are_children_of_both_executors_and_listen_on_their_address(seen: dict[str, Any]) -> None:
    assert len(set(seen["executors"])) == 2
    driver = seen["hosts"][0]
    scheme = "grpc+tls" if seen["encrypted"] else "grpc"
    assert all(
        where.startswith(f"{scheme}://{driver}:") for where in seen["locations"]
    )  # executors are on this machine
    assert "2 state servers on 2 executors" in seen["explained"]
    assert "2 running" in seen["explained"]


def test_a_server_has_the_gpu_that_spark_gave_its_task(seen: dict[str, Any]) -> None:
    assert seen["gpus"] == [["7"], ["7"]]


def test_servers_have_the_memory_of_the_settings(seen: dict[str, Any]) -> None:
    for command in seen["commands"]:
        assert command[command.index("--host-memory") + 1] == "1g"
        assert command[command.index("--gpu-memory") + 1] == "0.4"


def test_calls_without_the_token_are_refused(seen: dict[str, Any]) -> None:
    assert len(seen["strangers"]) == 3
    assert all("with a wrong token" in answer for answer in seen["strangers"])


def test_by_default_partitions_are_as_many_as_there_is_room_for_beside_servers(seen: dict[str, Any]) -> None:
    assert seen["partitions"].startswith("2 (one per core beside state servers")


def test_connections_are_encrypted(seen: dict[str, Any]) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    assert seen["encrypted"] is True
    assert all("--tls-certificate" in command for command in seen["commands"])


def test_a_server_is_lost(seen: dict[str, Any]) -> None:
    assert seen["server_lost"] is True


def test_an_executor_is_lost_and_its_servers_come_up_on_the_next(seen: dict[str, Any]) -> None:
    exact, still_there, executors = seen["executor_lost"]
    assert exact is True
    assert still_there is False
    assert executors == 2


def test_speculation_copies_no_task(seen: dict[str, Any]) -> None:
    assert seen["running"] == [[1, 1], [1, 1]]  # each the one task of its stage, long after the threshold


def test_the_job_comes_again_when_it_is_cancelled(seen: dict[str, Any]) -> None:
    exact, same_servers = seen["cancelled"]
    assert exact is True
    assert same_servers is False


def test_a_query_goes_on_from_its_checkpoint(seen: dict[str, Any]) -> None:
    assert seen["restarted"] is True


def test_state_in_memory_only_that_is_lost_is_refused(seen: dict[str, Any]) -> None:
    assert seen["cpu_servers"] == [4, 2]  # one per core of each executor
    (said,) = seen["in_memory"]
    assert "state= was not given" in said


def test_the_end_of_input_and_static_inputs_need_no_servers(seen: dict[str, Any]) -> None:
    assert seen["at_end"] is True


def test_nothing_is_left_after_the_session(seen: dict[str, Any]) -> None:
    assert seen["left"] == []


ONE_SLOT = """
import shutil, warnings
from pathlib import Path
import pyspark, gpu_ops
from gpu_ops.spark import session

quiet = {"spark.log.level": "OFF", "spark.ui.showConsoleProgress": "false"}
spark = session(master="local-cluster[1,1,1024]", config=quiet)
work = Path(pyspark.__file__).parent / "work" / spark.sparkContext.applicationId
rate = spark.readStream.format("rate").load().selectExpr("value AS k", "timestamp")
try:
    gpu_ops.join(rate, rate, on="k", suffixes=("_l", "_r"), state="unused")
except gpu_ops.StateError as error:
    print("refused:", error)
spark.stop()
shutil.rmtree(work, ignore_errors=True)
"""


def test_a_cluster_without_room_for_queries_is_refused() -> None:
    done = run("-c", ONE_SLOT)
    found = re.search("^refused: (.*)$", done.stdout, re.MULTILINE)
    assert found is not None, done.stdout + done.stderr[-6000:]
    assert "1 executor with room for 1 task at a time" in found[1]
    assert "spark.executor.cores=2" in found[1]
