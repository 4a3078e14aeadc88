"""How long a process that has just begun takes to its first micro-batches: with nothing compiled, and with all of it.

cupy compiles a kernel when it is first used and keeps it on disk. So the first process of a host pays for all of them;
every later one loads them.

    python -m benchmarks.gpu.first --backend gpu --changes 1000
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.passed import ROOT

MICRO_BATCHES = 3


def first(backend: str, changes: int) -> dict[str, Any]:
    """Seconds of importing, of making an engine with some state, and of each of its first micro-batches.

    Args:
        backend: ``"cpu"`` or ``"gpu"``.
        changes: of a micro-batch; the state is four times as large.
    """
    began = time.perf_counter()
    from benchmarks.gpu.feed import Feed, description
    from gpu_ops.join_engine import JoinEngine

    imported = time.perf_counter()
    with contextlib.closing(JoinEngine(description("per_batch", unique=True), backend)) as engine:  # type: ignore[arg-type]
        feed = Feed(2 * changes, changes)
        engine.restore(feed.start())
        made, took = time.perf_counter(), []
        for pair in feed.batches(MICRO_BATCHES):
            before = time.perf_counter()
            engine.process(*pair)
            took.append(time.perf_counter() - before)
    return {"import_s": imported - began, "engine_s": made - imported, "micro_batches_s": took}


def processes(backend: str, changes: int, timeout: float) -> dict[str, Any]:
    """`first` in two processes that share an empty folder for compiled kernels.

    Returns:
        ``cold`` and ``warm``, each as `first` says, with ``process_s`` of the whole; or ``left_out``, why not.
    """
    found: dict[str, Any] = {}
    command = [sys.executable, "-m", "benchmarks.gpu.first", "--backend", backend, "--changes", str(changes)]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "CUPY_CACHE_DIR": folder}
        for name in ("cold", "warm"):
            began = time.perf_counter()
            out = Path(folder) / "said.json"
            try:
                subprocess.run(
                    [*command, "--out", str(out)], cwd=ROOT, env=environment, check=True, timeout=min(timeout, 1e6)
                )
            except subprocess.TimeoutExpired:
                return {**found, "left_out": f"time: not done after {timeout:.0f} s"}
            found[name] = {**json.loads(out.read_text()), "process_s": time.perf_counter() - began}
    return found


def main() -> None:
    """Runs the first checks from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--backend", choices=("cpu", "gpu"), default="gpu")
    parser.add_argument("--changes", type=int, default=1000)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.write_text(json.dumps(first(options.backend, options.changes)))


if __name__ == "__main__":
    main()
