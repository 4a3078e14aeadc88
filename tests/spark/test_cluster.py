"""Joins on a cluster: state servers on its executors, which are lost one after the other."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spark.conftest import _missing
from spark.made_up_cards import identity, made_up_cards

TESTS = Path(__file__).parent.parent

pytestmark = [
    pytest.mark.spark,
    pytest.mark.skipif(importlib.util.find_spec("pyspark") is None or _missing() is not None, reason="no Spark"),
    pytest.mark.thorough,
]


@pytest.fixture(autouse=True)
def one_at_a_time(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Local clusters that start in the same second give their applications one id, and so one folder to work in."""
    with (tmp_path_factory.getbasetemp().parent / "cluster.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    own = variables.pop("PYTHONPATH", None)
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS), *filter(None, [own, os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **variables, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


def found_by(script: str, folder: Path) -> dict[str, Any]:
    """What a program beside this file leaves in ``found.json`` of the folder that it is given."""
    done = run(str(Path(__file__).with_name(script)), str(folder))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    result: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return result


def a_left_join_with_retractions_is_exact(seen: dict[str, Any]) -> None:
    assert seen["batch"] is True
    assert seen["retractions"] is True


def servers_are_children_of_both_executors_and_listen_on_their_address(seen: dict[str, Any]) -> None:
    assert len(set(seen["executors"])) == 2
    driver = seen["hosts"][0]
    scheme = "grpc+tls" if seen["encrypted"] else "grpc"
    assert all(
        where.startswith(f"{scheme}://{driver}:") for where in seen["locations"]
    )  # executors are on this machine
    assert "2 state servers on 2 executors" in seen["explained"]
    assert "2 running" in seen["explained"]


def a_server_has_the_gpu_that_spark_gave_its_task(seen: dict[str, Any]) -> None:
    assert seen["gpus"] == [[identity(7)], [identity(7)]]
    assert "gpu (1 GPU: Card 7, 23.0 GiB); 2 state servers" in seen["explained"]


def servers_whose_gpu_cannot_be_used_say_so(seen: dict[str, Any]) -> None:
    assert seen["explained"].count("WARNING: one computes on the CPU: ImportError: made up") == 2


def servers_have_the_memory_of_the_settings(seen: dict[str, Any]) -> None:
    for command in seen["commands"]:
        assert command[command.index("--host-memory") + 1] == "1g"
        assert command[command.index("--gpu-memory") + 1] == "0.4"


def calls_without_the_token_are_refused(seen: dict[str, Any]) -> None:
    assert len(seen["strangers"]) == 3
    assert all("with a wrong token" in answer for answer in seen["strangers"])


def by_default_partitions_are_as_many_as_there_is_room_for_beside_servers(seen: dict[str, Any]) -> None:
    assert seen["partitions"].startswith("2 (one per core beside state servers")


def connections_are_encrypted(seen: dict[str, Any]) -> None:
    if shutil.which("openssl") is None:
        return  # nothing to make a certificate with
    assert seen["encrypted"] is True
    assert all("--tls-certificate" in command for command in seen["commands"])


def a_server_is_lost(seen: dict[str, Any]) -> None:
    assert seen["server_lost"] is True


def an_executor_is_lost_and_its_servers_come_up_on_the_next(seen: dict[str, Any]) -> None:
    exact, still_there, executors = seen["executor_lost"]
    assert exact is True
    assert still_there is False
    assert executors == 2


def speculation_copies_no_task(seen: dict[str, Any]) -> None:
    assert seen["running"] == [[1, 1], [1, 1]]  # each the one task of its stage, long after the threshold


def the_job_comes_again_when_it_is_cancelled(seen: dict[str, Any]) -> None:
    exact, same_servers = seen["cancelled"]
    assert exact is True
    assert same_servers is False


def a_query_goes_on_from_its_checkpoint(seen: dict[str, Any]) -> None:
    assert seen["restarted"] is True


def state_in_memory_only_that_is_lost_is_refused(seen: dict[str, Any]) -> None:
    assert seen["cpu_servers"] == [4, 2]  # one per core of each executor
    (said,) = seen["in_memory"]
    assert "state= was not given" in said


def the_end_of_input_and_static_inputs_need_no_servers(seen: dict[str, Any]) -> None:
    assert seen["at_end"] is True


def nothing_is_left_after_the_session(seen: dict[str, Any]) -> None:
    assert seen["left"] == []


@pytest.mark.slow
def test_an_application_on_two_executors(tmp_path: Path) -> None:
    """One application for all that is asked of it: it takes a minute, and would come up once in each worker process."""
    done = run(str(Path(__file__).with_name("cluster_app.py")), str(tmp_path), **made_up_cards(tmp_path))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    seen = dict(json.loads((tmp_path / "seen.json").read_text()))
    for check in (
        a_left_join_with_retractions_is_exact,
        servers_are_children_of_both_executors_and_listen_on_their_address,
        a_server_has_the_gpu_that_spark_gave_its_task,
        servers_whose_gpu_cannot_be_used_say_so,
        servers_have_the_memory_of_the_settings,
        calls_without_the_token_are_refused,
        by_default_partitions_are_as_many_as_there_is_room_for_beside_servers,
        connections_are_encrypted,
        a_server_is_lost,
        an_executor_is_lost_and_its_servers_come_up_on_the_next,
        speculation_copies_no_task,
        the_job_comes_again_when_it_is_cancelled,
        a_query_goes_on_from_its_checkpoint,
        state_in_memory_only_that_is_lost_is_refused,
        the_end_of_input_and_static_inputs_need_no_servers,
        nothing_is_left_after_the_session,
    ):
        check(seen)


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
