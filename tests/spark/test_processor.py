"""What NumPy is told of the processor."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_ops.errors import StateError
from gpu_ops.spark.driver import process
from gpu_ops.spark.driver.machine import KEPT_MEMORY, numpy_environment
from gpu_ops.spark.driver.process import Launcher

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
    ours = {"NPY_DISABLE_CPU_FEATURES": "X86_V4", **KEPT_MEMORY}
    for name in ours:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(StateError, match="enough"):
        launcher.start("cpu", "cpu-0")
    for name in ours:
        monkeypatch.setenv(name, "7")
    with pytest.raises(StateError, match="enough"):
        launcher.start("cpu", "cpu-0")
    launcher.close()
    assert [{name: env[name] for name in ours} for env in seen] == [ours, dict.fromkeys(ours, "7")]


_MICRO_BATCHES = """
import ctypes, resource, threading
import numpy as np

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() >> 20

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def micro_batch():
    arrays = [np.ones(1 << 17) for _ in range(64)]  # 64 MiB in pieces of 1 MiB, all freed at its end

def call():
    with turn:
        micro_batch()
        before = faults()
        for _ in range(10):
            micro_batch()
        made.append(faults() - before)
    all_there.wait()

began, made, turn, all_there = resident(), [], threading.Lock(), threading.Barrier(4)
threads = [threading.Thread(target=call) for _ in range(4)]  # as a server's calls
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
kept = resident() - began
ctypes.CDLL(None).malloc_trim(0)
print(sum(made), kept, resident() - began)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="settings of glibc")
def test_memory_is_kept_once_between_micro_batches_and_given_back_by_a_trim() -> None:
    inherited = {name: value for name, value in os.environ.items() if name not in KEPT_MEMORY}
    command = [sys.executable, "-c", _MICRO_BATCHES]
    found = []
    for settings in ({}, KEPT_MEMORY):
        done = subprocess.run(command, env={**inherited, **settings}, capture_output=True, text=True, check=True)
        found.append([int(word) for word in done.stdout.split()])
    (without, *_), (kept, kept_mib, left_mib) = found
    assert kept < without / 2
    assert kept_mib < 128
    assert left_mib < 16
