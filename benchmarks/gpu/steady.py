"""The whole engine with a large state: micro-batches of a left join, from Arrow to Arrow, and where their time goes.

The state is loaded first, which is not timed as work. Some micro-batches later, so that the index has runs of all
sizes, timed micro-batches begin (`benchmarks.gpu.turns`).

The CPU engine runs the same in a process of its own on one core (`one_core`):

    python -m benchmarks.gpu.steady --backend cpu --rows 10000000 --out FILE
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa

from benchmarks.common import write_results
from benchmarks.gpu.card import Clock, Plan
from benchmarks.gpu.feed import KEYS, MIXES, Feed, description
from benchmarks.gpu.turns import take_turns, wait_for
from gpu_ops.backends import Backend
from gpu_ops.descriptions.description import Emit
from gpu_ops.join_engine import JoinEngine
from gpu_ops.kernels import Probe

ROOT = Path(__file__).resolve().parents[2]
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS", "ARROW_IO_THREADS")


@dataclasses.dataclass(frozen=True)
class Case:
    """The settings of a run in steady state.

    Attributes:
        rows: state rows in the beginning, both inputs together.
        changes: of a micro-batch.
        batches: timed micro-batches of either sort.
        warmup: micro-batches before them.
        emit: as of `gpu_ops.descriptions.join.Join`.
        mix: of `benchmarks.gpu.feed.MIXES`.
        unique: the key is a unique key; else the inputs are multisets.
        keys: of `benchmarks.gpu.feed.KEYS`.
        probe: as of `gpu_ops.join_engine.JoinEngine`.
    """

    rows: int
    changes: int = 1_000_000
    batches: int = 10
    warmup: int = 6
    emit: Emit = "per_batch"
    mix: str = "changes"
    unique: bool = True
    keys: str = "int64"
    probe: Probe = "auto"


def steady(backend: Backend, case: Case, plan: Plan) -> dict[str, Any]:
    """Micro-batches on a loaded state; what it says is that of `benchmarks.gpu.turns.take_turns`, and of the state."""
    feed = Feed(case.rows // 2, case.changes, case.mix, case.keys)
    join = description(case.emit, unique=case.unique, insert_only=case.mix == "inserts", keys=case.keys)
    engine = JoinEngine(join, backend, probe=case.probe)
    before = time.perf_counter()
    start = feed.start()
    made = time.perf_counter()
    engine.restore(start)
    wait_for(engine)()
    loaded = time.perf_counter()
    del start
    size = engine.state_size()
    given = list(feed.batches(min(feed.most, case.warmup + 2 * case.batches)))
    found = take_turns(engine, given, case.warmup, plan)
    ended = engine.state_size()
    engine.close()
    return {
        **dataclasses.asdict(case),
        "backend": backend,
        "state_rows_at_the_end": ended["left_rows"] + ended["right_rows"],
        "state_bytes_per_row": (size["left_bytes"] + size["right_bytes"]) / max(1, 2 * feed.rows),
        "seconds_to_make": made - before,
        "seconds_to_load": loaded - made,
        **found,
    }


def one_core(case: Case, timeout: float) -> dict[str, Any]:
    """Runs the case on the CPU engine, in a process that has one core and one thread.

    Args:
        case: what runs.
        timeout: seconds until it is given up.

    Returns:
        As `steady`, or ``left_out``, why there is nothing.
    """
    environment = {**os.environ, **dict.fromkeys(ONE_THREAD, "1")}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "cpu.json"
        command = [sys.executable, "-m", "benchmarks.gpu.steady", "--backend", "cpu", "--out", str(out)]
        for name, value in dataclasses.asdict(case).items():
            command += [f"--{name}", str(int(value) if isinstance(value, bool) else value)]
        command += ["--seconds", str(0.7 * timeout)] if timeout != float("inf") else []
        try:
            subprocess.run(
                command, cwd=ROOT, env=environment, check=True, timeout=None if timeout == float("inf") else timeout
            )
        except subprocess.TimeoutExpired:
            return {**dataclasses.asdict(case), "left_out": f"time: not done after {timeout:.0f} s"}
        except subprocess.CalledProcessError as error:
            return {**dataclasses.asdict(case), "left_out": f"ended with {error.returncode}"}
        found: dict[str, Any] = json.loads(out.read_text())["results"]
        return found


def main() -> None:
    """One case by itself, on one core if it is the CPU's."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--backend", choices=("cpu", "gpu"), default="gpu")
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--changes", type=int, default=Case.changes)
    parser.add_argument("--batches", type=int, default=Case.batches)
    parser.add_argument("--warmup", type=int, default=Case.warmup)
    parser.add_argument("--emit", choices=("per_batch", "per_event"), default=Case.emit)
    parser.add_argument("--mix", choices=tuple(MIXES), default=Case.mix)
    parser.add_argument("--unique", type=int, choices=(0, 1), default=1)
    parser.add_argument("--keys", choices=KEYS, default=Case.keys)
    parser.add_argument("--probe", choices=get_args(Probe), default=Case.probe)
    parser.add_argument("--seconds", type=float, help="after so many no further micro-batch begins")
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    cores = None
    if options.backend == "cpu":
        pa.set_cpu_count(1)
        pa.set_io_thread_count(1)
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
            cores = len(os.sched_getaffinity(0))
    values = {f.name: getattr(options, f.name) for f in dataclasses.fields(Case)}
    case = Case(**{**values, "unique": bool(options.unique)})
    write_results(
        options.out, "gpu.steady", {**steady(options.backend, case, Plan(clock=Clock(options.seconds))), "cores": cores}
    )


if __name__ == "__main__":
    main()
