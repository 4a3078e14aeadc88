"""What NumPy is told of the processor."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_ops.spark.processor import numpy_environment
from gpu_ops.spark.servers import process
from gpu_ops.spark.servers.process import Launcher

ZEN_4 = "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\nflags\t\t: fpu avx2 avx512f\n\n"


@pytest.mark.parametrize(
    ("cpuinfo", "known"),
    [
        (ZEN_4 * 2, True),
        (ZEN_4.replace("avx512f", ""), False),  # Zen 3
        (ZEN_4.replace(": 25", ": 26"), False),  # Zen 5
        (ZEN_4.replace("AuthenticAMD", "GenuineIntel"), False),
        ("processor\t: 0\nBogoMIPS\t: 2100.00\n", False),  # ARM
    ],
)
def test_avx_512_is_left_out_where_it_sorts_slowly(tmp_path: Path, cpuinfo: str, known: bool) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(cpuinfo)
    assert bool(numpy_environment(path)) == known


def test_without_a_description_of_the_processor_nothing_is_left_out(tmp_path: Path) -> None:
    assert numpy_environment(tmp_path / "none") == {}


def test_numpy_knows_what_it_is_told_to_leave_out(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(ZEN_4)
    environment = {**os.environ, **numpy_environment(path)}
    command = [sys.executable, "-W", "always::ImportWarning", "-c", "import numpy"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "not part of the dispatched" not in done.stderr


def test_a_state_server_has_it_and_what_a_user_says_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "numpy_environment", lambda: {"NPY_DISABLE_CPU_FEATURES": "X86_V4"})
    seen: list[dict[str, str]] = []

    def spawned(*_: object, env: dict[str, str], **__: object) -> None:
        seen.append(env)
        raise OSError("enough")

    monkeypatch.setattr(subprocess, "Popen", spawned)
    launcher = Launcher("token")
    for given in (None, "AVX512_ICL"):
        monkeypatch.delenv("NPY_DISABLE_CPU_FEATURES", raising=False)
        if given is not None:
            monkeypatch.setenv("NPY_DISABLE_CPU_FEATURES", given)
        with pytest.raises(OSError, match="enough"):
            launcher.start("cpu", "cpu-0")
    launcher.close()
    assert [env["NPY_DISABLE_CPU_FEATURES"] for env in seen] == ["X86_V4", "AVX512_ICL"]
