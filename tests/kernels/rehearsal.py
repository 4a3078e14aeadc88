"""`benchmarks.gpu.quarter` on stand-ins for a card and its libraries, at tiny sizes: the same calls, for no figures.

    PYTHONPATH=tests:. python -m kernels.rehearsal --out FOLDER --tiny

State servers have the stand-ins, too. What is left out: that memory has a limit, and the tests that need a card.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

from benchmarks.gpu import quarter, smoke
from benchmarks.gpu.suites import SUITES, Result
from gpu_ops.spark.driver import process
from gpu_ops.state import blocks
from kernels.card import emulated_card


def _no_tests(suites: Any, arguments: list[str], **options: Any) -> Result:
    """Stands for `benchmarks.gpu.suites.run_tests`, of which `kernels.test_verify` is the test."""
    assert suites in SUITES.values()
    assert arguments[-2:] == list(quarter.TINY.tests)
    assert options.keys() == {"limit", "keep", "resume"}
    return Result("passed", tests=0)


def main() -> None:
    """Everything but the stand-ins is the quarter's own."""
    with emulated_card(), tempfile.TemporaryDirectory() as folder:
        smoke.STEPS = tuple(step for step in smoke.STEPS if step is not smoke.memory)
        quarter.run_tests = _no_tests  # type: ignore[attr-defined]
        blocks.LEAST_BYTES = 1  # type: ignore[misc]  # tiny files are copied, too
        process._MODULE = "kernels.emulated_server"
        process.find_gpus = lambda: (["GPU-x"], "1 GPU: Emulated Card")
        os.environ["CARD_FAULT"] = os.path.join(folder, "none")
        quarter.main("kernels.rehearsal")


if __name__ == "__main__":
    main()
