"""Does the GPU backend do on this card what the tests ask, and how fast?

Runs every test marked ``gpu`` (kernel contract, row-for-row comparison with the CPU backend, golden cases,
folds against SQL), fails if one of them failed or was skipped, or if there were none, then runs the benchmark.
Needs pylibcudf, cupy, rmm, numpy, pandas, pyarrow, sqlglot and pytest; the folds against SQL run where duckdb
is there too.

    python -m benchmarks.gpu.verify [--tests-only | --bench-only] [--quick] [PYTEST ARGUMENTS]
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.util
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("pylibcudf", "cupy", "rmm", "numpy", "pandas", "pyarrow", "sqlglot", "pytest")
SUITES = {
    "tests/kernels": None,
    "tests/conformance": "duckdb",
    "tests/oracle": "duckdb",
    "tests/test_bounded.py": "duckdb",
}
"""Tests, and what they need beyond `NEEDED`."""


def missing(names: tuple[str, ...]) -> list[str]:
    """Those that are not installed."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def suites() -> list[str]:
    """The folders of tests that can run here."""
    return [folder for folder, extra in SUITES.items() if extra is None or not missing((extra,))]


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


def run_tests(arguments: list[str]) -> list[str]:
    """Run them; what is wrong, empty when all passed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu and not slow", "--backends", "gpu,gpu-tiny"]
        command += [f"--junitxml={report}", "-p", "no:cacheprovider", *suites(), *arguments]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        found = problems(report.read_text()) if report.exists() else []
    return found or ([f"pytest ended with {status}"] if status else [])


def result_path() -> Path:
    """benchmarks/results/gpu-<device>-<date>.json."""
    from benchmarks.gpu.bench import device

    name = re.sub(r"[^a-z0-9]+", "-", device()["name"].lower()).strip("-")
    return ROOT / "benchmarks" / "results" / f"gpu-{name}-{dt.datetime.now(dt.UTC):%Y-%m-%d}.json"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tests-only", action="store_true")
    parser.add_argument("--bench-only", action="store_true")
    parser.add_argument("--quick", action="store_true", help="the benchmark at small sizes")
    options, arguments = parser.parse_known_args()
    if missing(NEEDED):
        raise SystemExit(f"not installed: {', '.join(missing(NEEDED))}")
    from gpu_ops.backends import gpu_available

    found, why = gpu_available()
    if not found:
        raise SystemExit(f"no GPU answers: {why}")
    print(why, flush=True)
    if not options.bench_only:
        print("suites:", *suites(), flush=True)
        wrong = run_tests(arguments)
        if wrong:
            raise SystemExit("\n".join([f"{len(wrong)} GPU tests did not pass:", *wrong[:50]]))
    if not options.tests_only:
        command = [sys.executable, "-m", "benchmarks.gpu.bench", "--out", str(result_path())]
        command += ["--quick"] if options.quick else []
        subprocess.run(command, cwd=ROOT, check=True)
    print("OK")


if __name__ == "__main__":
    main()
