"""State on the real cupy, without a card; see `kernels.fake_cuda`. Skipped where that is not built."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from kernels.fake_cuda import DRIVER, HERE, WRAPPER

pytestmark = pytest.mark.thorough

TESTS = HERE.parents[1]


@pytest.mark.slow
def test_state_on_the_real_cupy() -> None:
    if importlib.util.find_spec("cupy") is None or not (DRIVER.exists() and WRAPPER.exists()):
        pytest.skip("kernels.fake_cuda is not built")
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "kernels.fake_cuda.plugin", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*command, "-k", "emulated", str(TESTS / "kernels" / "test_state.py")],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "on host memory" in run.stdout
