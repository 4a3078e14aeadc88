"""The calls that the GPU backend makes have arguments that the installed pylibcudf takes, as far as it says without a card.

Skipped where pylibcudf, rmm or a C compiler is not installed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kernels.replay import DRIVER

pytestmark = pytest.mark.thorough

HERE = Path(__file__).parent
RECORDED = ("test_frames.py", "test_groups.py", "test_equality.py", "test_state.py", "test_conditions.py")
CALLS = {
    "GroupBy.aggregate",
    "Column.from_arrow",
    "Column.to_arrow",
    "Column.__new__",
    "Table.copy",
    "Column.with_mask",
    "binaryop.binary_operation",
    "concatenate.concatenate",
    "copying.gather",
    "copying.slice",
    "hashing.xxhash_64",
    "join.inner_join",
    "reduce.scan",
    "sorting.stable_sorted_order",
    "transform.bools_to_mask",
    "unary.is_valid",
}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    missing = [name for name in ("pylibcudf", "rmm") if importlib.util.find_spec(name) is None]
    compiler = shutil.which("cc") or shutil.which("gcc")
    if missing or compiler is None:
        pytest.skip(f"{missing[0]} is not installed" if missing else "no C compiler")
    folder = tmp_path_factory.mktemp("driver")
    source, result = folder / "driver.c", folder / "result.json"
    source.write_text(DRIVER)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "libcuda.so.1", source], check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder), "PYTHONPATH": str(HERE.parent)}
    tests = [str(HERE / name) for name in RECORDED]
    command = [sys.executable, "-m", "kernels.replay", str(result), "-k", "emulated", *tests]
    subprocess.run(command, check=True, env=environment, cwd=HERE.parents[1])
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def test_calls_are_taken(played: dict[str, Any]) -> None:
    assert played["status"] == 0, "what was to be recorded failed"
    assert not played["wrong"]


def test_calls_are_played(played: dict[str, Any]) -> None:
    got = {name for name, outcome, _ in played["outcomes"] if outcome in ("done", "no card")}
    assert got >= CALLS
    assert sum(number for _, _, number in played["outcomes"]) > 1000
    assert {name for name, outcome, _ in played["outcomes"] if outcome == "not made: a scalar"} <= {
        "binaryop.binary_operation"
    }


def test_mistakes_are_found(played: dict[str, Any]) -> None:
    unnoticed = {what: outcome for what, outcome in played["mistakes"].items() if outcome in ("done", "no card")}
    assert not unnoticed
    assert len(played["mistakes"]) > 5
