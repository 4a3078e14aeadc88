"""The Maven packages that errors name exist, where the registry answers."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from gpu_ops.spark.failures import PACKAGES

pytestmark = [pytest.mark.services, pytest.mark.slow]  # Maven starts nine times

NAMED = [name for lines in PACKAGES.values() for name in lines.values()]


def answer(artifact: str) -> str | None:
    """What Maven says of an artifact, whose description alone it fetches; None if it is there."""
    fetch = ["mvn", "-q", "-B", "dependency:get", "-Dtransitive=false", f"-Dartifact={artifact}:pom"]
    done = subprocess.run(fetch, capture_output=True, text=True, timeout=300, check=False)
    return None if done.returncode == 0 else done.stdout + done.stderr


@pytest.fixture(scope="module", autouse=True)
def registry() -> None:
    if shutil.which("mvn") is None:
        pytest.skip("no mvn")
    said = answer("io.delta:delta-spark_4.3_2.13:0.0.0")
    if said is None or "Could not find artifact" not in said:
        pytest.skip("no registry answers")


@pytest.mark.parametrize("artifact", NAMED)
def test_a_package_that_an_error_names_exists(artifact: str) -> None:
    said = answer(artifact)
    assert said is None, said
