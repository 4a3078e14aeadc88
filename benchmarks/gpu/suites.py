"""Steps of tests on a card, each as many times cut short and gone on with as it takes.

A step of tests fails when one of them failed or was skipped, when there were none, or when something they need is not
installed. One that is not done in its time is cut short, as by Ctrl-C; which tests passed is kept
(`benchmarks.gpu.passed`), and with ``resume`` the next run has the others.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.passed import ROOT, VARIABLE, begin, counted, passed

SUITES = {
    "contract": (
        "tests/kernels",
        "tests/test_types.py",
        "tests/test_bad_input.py",
        "tests/test_multi_input.py",
        "tests/test_ttl.py",
    ),
    "dataframes": ("tests/test_dataframes.py",),
    "golden": ("tests/conformance",),
    "traces": ("tests/oracle", "tests/test_bounded.py"),
}
"""The tests of each step."""
SUITES_NEED = {"dataframes": ("cudf",)}
"""What a step's tests need beside what all do; where it is not installed, the step is left out."""
ELSEWHERE = ("tests/oracle/test_flink.py", "tests/oracle/test_flink_multi.py")
"""They ask a live Flink, which no host with a card has; what it answered are the golden cases."""
MOST_WORKERS = 12
_GRACE = 20.0
"""Seconds that pytest has to write its report."""
_NOTHING = 5
"""What pytest ends with when no test was left to run."""


@dataclasses.dataclass
class Result:
    """The result of one step.

    Attributes:
        status: ``"passed"``, ``"failed"``, ``"cut short"`` (nothing has failed so far) or ``"left out"``.
        seconds: how long it took.
        problems: what is wrong, or why it is left out.
        tests: how many ran; None for other steps.
        passed: how many have passed, in earlier runs too; None for other steps.
        of: how many there are; None for other steps, or where that is not known.
    """

    status: str
    seconds: float = 0.0
    problems: list[str] = dataclasses.field(default_factory=list)
    tests: int | None = None
    passed: int | None = None
    of: int | None = None


def missing(names: Sequence[str]) -> list[str]:
    """The names of modules that are not installed."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def problems(report: str) -> list[str]:
    """Why a JUnit report is no proof: failures, errors, skips, or no test at all."""
    found = []
    cases = list(ET.fromstring(report).iter("testcase"))  # noqa: S314 - our own report
    for case in cases:
        for kind in ("failure", "error", "skipped"):
            for child in case.iter(kind):
                lines = (child.get("message") or "").splitlines() or [""]
                found.append(f"{kind}: {case.get('classname')}.{case.get('name')}: {lines[0]}")
    return found if cases else ["no test ran"]


def run_tests(
    suites: Sequence[str],
    arguments: Sequence[str],
    *,
    limit: float | None = None,
    root: Path = ROOT,
    keep: Path | None = None,
    resume: bool = False,
) -> Result:
    """Run the tests marked ``gpu`` of some files and folders.

    Args:
        suites: below ``root``.
        arguments: for pytest.
        limit: seconds after which they are interrupted.
        root: the checkout.
        keep: the file for names of tests that passed; None for none.
        resume: leave out those that stand in it already.
    """
    absent = [suite for suite in suites if not (root / suite).exists()]
    if absent:
        return Result("failed", problems=[f"no such suite: {suite}" for suite in absent])
    with tempfile.TemporaryDirectory() as folder:
        report, kept = Path(folder) / "report.xml", keep or Path(folder) / "passed"
        begin(kept, afresh=not resume)
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu and not slow", "--backends", "gpu,gpu-tiny"]
        command += [f"--junitxml={report}", "-p", "no:cacheprovider", *(f"--ignore={path}" for path in ELSEWHERE)]
        command += ["-p", "benchmarks.gpu.passed", *_PLUGINS, *_QUIET]
        status = _interrupted([*command, *suites, *arguments], root, limit, kept)
        text = report.read_text() if report.exists() else ""
        there, before = map(int, counted(kept).read_text().split())
        names = passed(kept)
        counted(kept).unlink()
    tests = text.count("<testcase ")
    if status == _NOTHING and there and before == there:
        return Result("passed", tests=0, passed=before, of=there)
    found = problems(text) if text else ["pytest wrote no report"]
    short = status is None and bool(there) and found in ([], ["no test ran"], ["pytest wrote no report"])
    if status is None:
        found.append(f"not done after {limit:.0f} s: {len(names)} of {there} tests have passed; --resume goes on")
    elif status and not found:
        found.append(f"pytest ended with {status}")
    outcome = "cut short" if short else "failed" if found else "passed"
    return Result(outcome, problems=found, tests=tests, passed=len(names), of=there)


_PLUGINS = [
    option
    for module, name in (("xdist", "xdist"), ("hypothesis", "_hypothesis_pytestplugin"))
    if not missing([module])
    for option in ("-p", name)
]
"""What else a host has brings warnings and options of its own; libraries' words about their future are not ours."""
_QUIET = ["-W", "ignore::DeprecationWarning", "-W", "ignore::FutureWarning"]


def _interrupted(command: Sequence[str], root: Path, limit: float | None, kept: Path) -> int | None:
    """Run a command; its exit status, None if it was interrupted, as by Ctrl-C, so that pytest writes its report."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": path, VARIABLE: str(kept)}
    with subprocess.Popen(command, cwd=root, env=environment) as process:
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
        return None


def workers() -> list[str]:
    """Pytest's arguments to run tests beside each other, where it can: they leave the card idle most of the time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    if missing(["xdist"]) or cores < 4:
        return []
    return ["-n", str(min(MOST_WORKERS, cores // 2))]
