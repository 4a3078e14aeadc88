"""What every benchmark shares: machine and versions on record, interleaved runs, results as JSON.

Timings of one case vary with what else the machine does, and drift as it warms up. So cases that are compared
run in turns, each round in the other direction, and are reported as a median with its spread.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

RESULTS = Path(__file__).parent / "results"
LEAST_RUNS = 3
"""Runs, after those that warm up, that a rate on a card stands on at least."""
PACKAGES = ("pyspark", "pyarrow", "pandas", "numpy", "duckdb", "pylibcudf", "cupy", "rmm")

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Summary:
    """Repeated measurements of one case; all values in the unit of the measurement (seconds, rows/s, ...).

    Attributes:
        median: the middle of `values`.
        low: the smallest value.
        high: the largest value.
        spread: (high - low) / median, without unit; 0 for a single value.
        values: as measured, in order.
    """

    median: float
    low: float
    high: float
    spread: float
    values: tuple[float, ...]


def summarise(values: Iterable[float]) -> Summary:
    """Median and spread of at least one value.

    Raises:
        ValueError: no value.
    """
    measured = tuple(float(value) for value in values)
    if not measured:
        raise ValueError("nothing was measured")
    median, low, high = statistics.median(measured), min(measured), max(measured)
    return Summary(median, low, high, (high - low) / median if median else 0.0, measured)


def interleave(cases: Mapping[str, Callable[[], Result]], rounds: int, warmup: int = 0) -> dict[str, list[Result]]:
    """Run all cases in turns: A B C, C B A, A B C ...

    Args:
        cases: name to a function that runs the case once and returns what it measured.
        rounds: runs of each case that are kept.
        warmup: runs of each case before those, thrown away.

    Returns:
        Per case, in the order of `cases`, its results in the order of the runs.
    """
    results: dict[str, list[Result]] = {name: [] for name in cases}
    for turn in range(-warmup, rounds):
        order: Sequence[str] = list(cases)
        if turn % 2:
            order = order[::-1]
        for name in order:
            result = cases[name]()
            if turn >= 0:
                results[name].append(result)
    return results


def ratio(ours: Summary, theirs: Summary) -> dict[str, float]:
    """Ours over theirs by medians, with the least and the greatest ratio that the measured ranges allow."""
    return {
        "median": ours.median / theirs.median,
        "low": ours.low / theirs.high,
        "high": ours.high / theirs.low,
    }


def again(case: Callable[[], Result]) -> Callable[[], Result]:
    """A case that is run twice and measured the second time.

    For queries of Spark's beside anything that takes minutes: Spark ends Python workers that had no task for a minute,
    and the first micro-batch would wait for new ones.
    """
    return lambda: [case() for _ in range(2)][-1]


def as_state_servers_run() -> None:
    """Begin this process anew with what state servers are told in their environment, unless it has that already.

    For engines that are measured in the benchmark's own process: NumPy sorts and memory is kept as in a server.
    """
    from gpu_ops.spark.driver.machine import KEPT_MEMORY, numpy_environment

    told = {**numpy_environment(), **KEPT_MEMORY}
    if told.keys() - os.environ.keys():
        environment = {**told, **os.environ}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)  # noqa: S606 - this program again


def busy_seconds() -> float:
    """Seconds that all processors of this machine have worked since it started (Linux)."""
    user, nice, system, _, _, interrupts, soft = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + interrupts + soft) / os.sysconf("SC_CLK_TCK")


def machine() -> dict[str, Any]:
    """Processor, cores this process may use, memory, system, GPUs and the load at this moment."""
    return {
        "processor": _first(r"model name\s*:\s*(.+)", "/proc/cpuinfo") or platform.processor(),
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "gpus": _lines("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"),
        "load_1_minute": round(os.getloadavg()[0], 2),
    }


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Versions of Python, Java, this repository's commit and the installed ones of `packages`."""
    found = {"python": platform.python_version()}
    java = _lines("java", "-version")
    if java:
        found["java"] = java[0]
    root = str(Path(__file__).resolve().parent)
    commit = _lines("git", "-C", root, "rev-parse", "--short=12", "HEAD")
    if commit:
        changed = _lines("git", "-C", root, "status", "--porcelain", "--untracked-files=no")
        found["commit"] = commit[0] + (" with changes" if changed else "")
    for package in packages:
        # CUDA wheels carry the CUDA version in their name.
        for name in (
            package,
            f"{package}-cu12",
            f"{package}-cu13",
            f"{package}-cuda12x",
            f"{package}-cuda13x",
        ):
            try:
                found[package] = metadata.version(name)
                break
            except metadata.PackageNotFoundError:
                continue
    return found


def plot_path(results: Path) -> Path:
    """The path of the plot of a result file: in the docs for a committed one, else beside it."""
    folder = RESULTS.parents[1] / "docs" / "pictures" if results.parent.resolve() == RESULTS else results.parent
    return folder / f"{results.stem}.svg"


def write_results(
    path: str | os.PathLike[str],
    benchmark: str,
    results: object,
    *,
    settings: Mapping[str, object] | None = None,
) -> dict[str, Any]:
    """Write one benchmark's results, with machine, versions and time (UTC), as JSON; return what was written.

    Args:
        path: the file; its folder is created.
        benchmark: name of the benchmark.
        results: anything JSON can hold; `Summary` may stand anywhere in dicts and lists.
        settings: what was measured: sizes, seeds, flags.
    """
    record = {
        "benchmark": benchmark,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "settings": dict(settings or {}),
        "results": results,
    }
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    text = as_json(record)
    target.write_text(text)
    written: dict[str, Any] = json.loads(text)
    return written


def as_json(value: object) -> str:
    """A value as JSON; `Summary` may stand anywhere in it."""
    return json.dumps(value, indent=2, default=_plain) + "\n"


def arguments(doc: str | None, name: str, *, rounds: int | None = None) -> argparse.ArgumentParser:
    """A benchmark's command line, with ``--out`` and, if there are any, ``--rounds``.

    Args:
        doc: the module's; its first line describes the benchmark.
        name: of the file of results.
        rounds: how many by default.
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.json")
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds)
    return parser


def record(
    options: argparse.Namespace, benchmark: str, results: Mapping[str, object], *leave: str, **settings: object
) -> dict[str, Any]:
    """Write results to ``--out``, print all but the single runs, and return what was written.

    Args:
        options: of the command line; they are the settings.
        benchmark: name of the benchmark.
        results: as for `write_results`.
        leave: options that are no settings, besides ``--out``.
        settings: further ones.
    """
    known = {name: value for name, value in vars(options).items() if name not in ("out", *leave)}
    written = write_results(options.out, benchmark, results, settings=known | settings)
    print(json.dumps({name: value for name, value in written["results"].items() if name != "runs"}, indent=2))
    return written


def between(marks: tuple[str, str], text: str, new: str) -> str:
    """A page's text with something new between two marks."""
    before, rest = text.split(marks[0])
    return before + marks[0] + new + marks[1] + rest.split(marks[1])[1]


def _plain(value: object) -> dict[str, object]:
    if isinstance(value, Summary):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} does not go into JSON results: {value!r}")


def _first(pattern: str, path: str) -> str | None:
    try:
        match = re.search(pattern, Path(path).read_text())
    except OSError:
        return None
    return match[1].strip() if match else None


def _lines(*command: str) -> list[str]:
    """Output lines of a command; none where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return (done.stdout or done.stderr).strip().splitlines()


def next_event(process: subprocess.Popen[str], name: str) -> dict[str, Any]:
    """The next event of a name that a process writes, each a line of JSON; other lines are passed over."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            found: dict[str, Any] = json.loads(line)
            if found["event"] == name:
                return found
    raise SystemExit(f"the process ended with {process.wait()}")
