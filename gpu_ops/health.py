"""`python -m gpu_ops.health [--backend gpu]`: does the engine answer here? One micro-batch, exit status 0 or 1.

For a container's health check, and for a first look at a new host.
"""

from __future__ import annotations

import argparse
import sys
from typing import cast, get_args

import pyarrow as pa

from gpu_ops.backends import Backend
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.join import Join
from gpu_ops.descriptions.keys import normalize_on
from gpu_ops.engine import JoinEngine
from gpu_ops.errors import GpuJoinError


def check(backend: Backend) -> str:
    """Join one micro-batch.

    Returns:
        The backend that answered, and why it was taken.

    Raises:
        GpuJoinError: it cannot run here, or its answer is wrong.
    """
    schema = pa.schema([("k", pa.int64())])
    engine = JoinEngine(Join("left", Input("left", schema), Input("right", schema), normalize_on("k")), backend)
    rows = engine.process(pa.table({"k": [1, 2]}), pa.table({"k": [2, 3]}))
    if sorted(rows["k"].to_pylist()) != [1, 2]:
        raise GpuJoinError(f"wrong answer: {rows.to_pylist()}")
    return f"{engine.backend}: {engine.backend_reason}"


def main(arguments: list[str] | None = None) -> int:
    """Run the check and say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--backend", choices=get_args(Backend), default="auto")
    backend = cast("Backend", parser.parse_args(arguments).backend)
    try:
        sys.stdout.write(check(backend) + "\n")
    except GpuJoinError as problem:
        sys.stderr.write(f"{problem}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
