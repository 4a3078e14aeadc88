"""`make gpu-verify` does not take a skipped test for a passed one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from oracle.drive import gpu_status

from benchmarks.gpu.verify import ROOT, SUITES, problems

_TEST = """
import pytest
def test_passes(): pass
@pytest.mark.skip(reason="no card")
def test_skips(): pass
def test_fails(): assert 1 == 2, "numbers"
"""


def report(tmp_path: Path, keyword: str) -> str:
    (tmp_path / "test_some.py").write_text(_TEST)
    out = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={out}", "-k", keyword]
    subprocess.run([*command, "--rootdir", str(tmp_path), str(tmp_path)], check=False, capture_output=True)
    return out.read_text()


def test_a_report(tmp_path: Path) -> None:
    assert problems(report(tmp_path, "passes")) == []
    skipped, failed = sorted(problems(report(tmp_path, "passes or skips or fails")), reverse=True)
    assert skipped.startswith("skipped: ")
    assert skipped.endswith("test_skips: no card")
    assert "numbers" in failed
    assert problems(report(tmp_path, "nothing")) == ["no test ran"]


def test_suites_are_there() -> None:
    assert all((ROOT / suite).exists() for suite in SUITES)


def test_says_no_without_a_card() -> None:
    if gpu_status()[0]:
        pytest.skip("there is a card")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.verify"], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "not installed" in done.stderr or "no GPU answers" in done.stderr
