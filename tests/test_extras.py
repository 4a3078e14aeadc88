"""Sets of packages that users have together, as pip resolves them; skipped where no index of packages answers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
SOURCES = {"pyspark"}
"""Packages without a wheel: pip would fetch all 400 MB to see what they need, which is py4j."""


def resolved(*requirements: str, only_names: bool = False) -> dict[str, str] | str:
    """The versions that pip would install, by name; or what it says instead."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    command += ["--disable-pip-version-check", "--only-binary", ":all:", *(["--no-deps"] if only_names else [])]
    done = subprocess.run([*command, *requirements], capture_output=True, text=True, timeout=400, check=False)
    if done.returncode:
        return done.stderr
    found = (entry["metadata"] for entry in json.loads(done.stdout)["install"])
    return {entry["name"].lower(): entry["version"] for entry in found}


def requirements(*extras: str) -> list[str]:
    """Of this project with some extras."""
    given = [*PROJECT["dependencies"], *(x for extra in extras for x in PROJECT["optional-dependencies"][extra])]
    return [one for one in given if re.split(r"[^\w-]", one)[0] not in SOURCES]


@pytest.mark.slow
@pytest.mark.parametrize("cuda", ["cu13", "cu12"])
def test_spark_and_cudf_go_into_one_environment(cuda: str) -> None:
    """What users of RAPIDS have in a notebook: cuDF wants pandas 3, which the extra for Spark forbade."""
    if isinstance(resolved("packaging", only_names=True), str):
        pytest.skip("no index of packages answers")
    found = resolved(*requirements("spark", f"gpu-{cuda}"), f"cudf-{cuda}==26.10.*")
    assert isinstance(found, dict), found
    assert found["pandas"].startswith("3.")
    assert found[f"cudf-{cuda}"].startswith("26.10.")
    assert found[f"pylibcudf-{cuda}"] == found[f"cudf-{cuda}"]
