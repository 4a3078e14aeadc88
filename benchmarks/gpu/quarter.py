"""What fifteen minutes on a card should run: item by item, each with a clock of its own, the ones that tell most first.

Items, in the order in which they run:
- `smoke`: is anything wrong at all, and cupy compiles what the others need (`benchmarks.gpu.smoke`).
- `files`: from files to files through Spark, on the card and on the cores beside it (`benchmarks.gpu.files`).
- `locked`: a left join of 10M changes a micro-batch, whose results leave through page-locked memory.
- `at_end`: 10M rows joined with 10M at the end of input.
- `operators`: ASOF and temporal joins, aggregates and others, 1M changes a micro-batch (`benchmarks.gpu.operators`).
- `partitions`: the left join as 1, 2 and 8 partitions on the one card (`benchmarks.gpu.partitions`).
- `contract`: the backend contract, in no order, as far as time goes.
- `traces`: random traces likewise.
- `memcheck`: the smoke step under compute-sanitizer.

Each item runs in a process of its own, which is ended when its time is over: what it had said until then is kept.
Results are written after each. One for which there is too little time left is left out, and the file says so; with
``--resume`` what is done is not done again, so two calls of ten minutes go through all of it.

    python -m benchmarks.gpu.quarter --out FOLDER [--budget-s 540] [--resume] [--item NAME ...] [--tiny]
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import LEAST_RUNS, as_json, write_results
from benchmarks.gpu.card import Clock, Plan
from benchmarks.gpu.files import FileSizes, files_to_files
from benchmarks.gpu.passed import ROOT, digest
from benchmarks.gpu.suites import SUITES, run_tests, workers

Keep = Callable[[dict[str, Any]], None]
_GRACE_S = 5.0
"""Before its process is ended an item's own clock does."""


@dataclasses.dataclass(frozen=True)
class QuarterSizes:
    """The size of each item; rows unless it says otherwise."""

    smoke: int = 100_000
    files: FileSizes = dataclasses.field(default_factory=FileSizes)
    locked: tuple[int, int] = (60_000_000, 10_000_000)
    at_end: tuple[int, int] = (10_000_000, 4_000_000)
    operators: int = 1_000_000
    partitions: tuple[int, int] = (10_000_000, 1_000_000)
    tests: tuple[str, ...] = ()


TINY = QuarterSizes(
    smoke=600, files=FileSizes((80, 160, 240), 2, (1, 2)), locked=(4000, 200), at_end=(200, 80), operators=200,
    partitions=(2400, 160), tests=("-k", "test_argsort"),
)  # fmt: skip
CHOSEN = (
    "ASOF join, per_batch", "ASOF join, per_event", "ASOF join, at_watermark", "temporal join", "aggregate, per_batch",
    "aggregate of many groups, per_batch", "aggregate, per_event", "top 2, per_batch", "latest, per_batch",
)  # fmt: skip


def _smoke(sizes: QuarterSizes, _clock: Clock, keep: Keep) -> None:
    from benchmarks.gpu import smoke

    began = time.perf_counter()
    smoke.run(sizes.smoke)
    keep({"seconds": time.perf_counter() - began})


def _files(sizes: QuarterSizes, clock: Clock, keep: Keep) -> None:
    files_to_files(sizes.files, clock, keep)


def _locked(sizes: QuarterSizes, clock: Clock, keep: Keep) -> None:
    from benchmarks.gpu.steady import Case, steady

    rows, changes = sizes.locked
    keep(steady("gpu", Case(rows, changes=changes, batches=LEAST_RUNS, warmup=3), Plan(clock=clock)))


def _at_end(sizes: QuarterSizes, _clock: Clock, keep: Keep) -> None:
    from benchmarks.gpu.others import at_end

    found = []
    for _ in range(1 + LEAST_RUNS):  # the first one warms up
        found.append(at_end("gpu", *sizes.at_end))
        keep({"runs": found})


def _operators(sizes: QuarterSizes, clock: Clock, keep: Keep) -> None:
    from benchmarks.gpu.operators import operator

    found: list[dict[str, Any]] = []
    for name in CHOSEN:
        why = clock.lacks(8)
        found.append({"operator": name, "left_out": why} if why else operator("gpu", name, sizes.operators, Plan()))
        keep({"operators": found})


def _partitions(sizes: QuarterSizes, clock: Clock, keep: Keep) -> None:
    from benchmarks.gpu.partitions import partitions
    from benchmarks.gpu.steady import Case

    rows, changes = sizes.partitions
    case, found = Case(rows, changes=changes, batches=LEAST_RUNS, warmup=2), []
    for count in (1, 2, 8):
        why = clock.lacks(8)
        found.append(
            {"partitions": count, "left_out": why} if why else partitions("gpu", count, case, Plan(clock=clock))
        )
        keep({"partitions": found})


def _tests(step: str) -> Callable[[QuarterSizes, Clock, Keep], None]:
    def run(sizes: QuarterSizes, clock: Clock, keep: Keep) -> None:
        kept = Path(os.environ.get("OUT", tempfile.gettempdir())) / f"quarter.{step}.passed"
        limit = max(1.0, clock.left() - 2 * _GRACE_S)
        found = run_tests(SUITES[step], [*workers(), *sizes.tests], limit=limit, keep=kept, resume=True)
        keep(dataclasses.asdict(found))
        if found.status == "failed":
            raise AssertionError("; ".join(found.problems[:5]))

    return run


def _memcheck(_sizes: QuarterSizes, _clock: Clock, keep: Keep) -> None:
    from benchmarks.gpu.verify import run_sanitizer, sanitizer

    found = run_sanitizer(sanitizer())
    keep(dataclasses.asdict(found))
    if found.status == "failed":
        raise AssertionError("; ".join(found.problems[:5]))


@dataclasses.dataclass(frozen=True)
class Item:
    """One item.

    Attributes:
        work: does it, and hands out what there is so far.
        least: seconds under which it is not begun.
        most: seconds after which it is ended.
    """

    work: Callable[[QuarterSizes, Clock, Keep], None]
    least: float
    most: float


ITEMS: dict[str, Item] = {
    "smoke": Item(_smoke, 15, 120),
    "files": Item(_files, 60, 300),
    "locked": Item(_locked, 25, 60),
    "at_end": Item(_at_end, 15, 40),
    "operators": Item(_operators, 30, 90),
    "partitions": Item(_partitions, 20, 45),
    "contract": Item(_tests("contract"), 40, 150),
    "traces": Item(_tests("traces"), 40, 90),
    "memcheck": Item(_memcheck, 90, 300),
}


def measure(
    out: Path,
    names: Sequence[str],
    clock: Clock,
    *,
    resume: bool,
    run: Callable[[str, float, Path], str],
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """Runs items as time goes, and writes the results after each.

    Args:
        out: the file; what it has of other items is kept.
        names: of `ITEMS`, in their order.
        clock: the time for all.
        resume: leave out what is done with the code as it is.
        run: runs an item for so many seconds; what it says goes into a file; gives what became of it.
        about: the card, for the results.

    Returns:
        The results, as written.
    """
    results: dict[str, Any] = {**about, "items": {}}
    if out.exists():
        results["items"] = json.loads(out.read_text())["results"]["items"]
    for name in names:
        item, before = ITEMS[name], results["items"].get(name, {})
        if resume and before.get("status") == "done" and before.get("code") == digest():
            continue
        why = clock.lacks(item.least)
        began = time.monotonic()
        when = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
        one: dict[str, Any] = {"time": when, "code": digest()}
        if why is not None:
            one["status"] = f"left out: {why}"
        else:
            with tempfile.TemporaryDirectory() as folder:
                said = Path(folder) / "said.json"
                one["status"] = run(name, min(item.most, clock.left()), said)
                one["seconds"] = round(time.monotonic() - began, 1)
                one["found"] = json.loads(said.read_text()) if said.exists() else None
        print("---", name, one["status"], one.get("seconds", ""), flush=True)
        if why is None or not before:  # what an earlier call found is better than nothing
            results["items"][name] = one
        write_results(out, "gpu.quarter", results)
    return results


def _in_a_process(module: str, tiny: bool) -> Callable[[str, float, Path], str]:
    def run(name: str, seconds: float, said: Path) -> str:
        command = [sys.executable, "-m", module, "--run", name, "--seconds", str(max(1.0, seconds - _GRACE_S))]
        command += ["--out", str(said), *(["--tiny"] if tiny else [])]
        with subprocess.Popen(command, cwd=ROOT, start_new_session=True) as process:
            try:
                status = process.wait(seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)  # with what it has started: state servers, Java
                return f"ended after {seconds:.0f} s"
        return "done" if status == 0 else f"failed: it ended with {status}"

    return run


def run_item(name: str, sizes: QuarterSizes, seconds: float, said: Path) -> None:
    """Runs one item in this process; what it says is in the file at any time, as a whole."""

    def keep(found: dict[str, Any]) -> None:
        part = said.with_suffix(".part")
        part.write_text(as_json(found))
        part.replace(said)

    ITEMS[name].work(sizes, Clock(seconds), keep)


def main(module: str = "benchmarks.gpu.quarter") -> None:
    """From the command line; ``module``: what the process of an item is started by."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--budget-s", type=float, default=540.0)
    parser.add_argument("--resume", action="store_true", help="leave out what is done, of the code as it is")
    parser.add_argument("--item", action="append", choices=tuple(ITEMS), help="only this one; as often as needed")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes: a rehearsal")
    parser.add_argument("--run", choices=tuple(ITEMS), help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run is not None:
        run_item(options.run, TINY if options.tiny else QuarterSizes(), options.seconds, options.out)
        return
    clock = Clock(options.budget_s)
    from benchmarks.gpu.bench import device, result_path

    out = result_path(options.out, "quarter")
    results = measure(
        out,
        options.item or tuple(ITEMS),
        clock,
        resume=options.resume,
        run=_in_a_process(module, options.tiny),
        about={"device": device()},
    )
    print(f"written: {out}")
    failed = [name for name, item in results["items"].items() if item["status"].startswith("failed")]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
