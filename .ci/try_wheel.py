"""What a new user does first with the installed package: README's example, twice; the command line; a job.

Run by `.ci/wheel`, with a clean environment's Python and an empty folder to be in.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_QUIET = """
import warnings; warnings.simplefilter("error")
import gpu_ops, gpu_ops.spark
gpu_ops.spark.session(master="local[1]").range(3).count()
print(gpu_ops.__file__)
"""


def main(folder: Path) -> None:
    """Raises where something is not as it should be.

    Args:
        folder: an empty one.
    """
    found = _run(folder, sys.executable, "-I", "-c", _QUIET).strip()
    assert str(ROOT) not in found, f"the checkout was imported: {found}"
    blocks = _BLOCK.findall((ROOT / "README.md").read_text())
    number = next(n for n, (language, _) in enumerate(blocks) if language == "python")
    (folder / "first.py").write_text(blocks[number][1])
    for _ in range(2):
        printed = _run(folder, sys.executable, "-I", "first.py")
        assert printed == blocks[number + 1][1], printed
    assert "inspect" in _run(folder, BIN / "gpu-join", "--help")
    _run(folder, BIN / "gpu-join", "health")
    for name in ("job.sql", "data"):
        copy = shutil.copytree if name == "data" else shutil.copy
        copy(ROOT / "examples" / name, folder / name)
    said = _run(folder, BIN / "gpu-join", "run", "job.sql", "--once", "--master", "local[2]")
    assert "done: 1 micro-batch" in said, said


def _run(folder: Path, *command: str | Path) -> str:
    """A command's standard output; it has to succeed, also in what Python does at its end."""
    begun = time.perf_counter()
    done = subprocess.run([*map(str, command)], cwd=folder, capture_output=True, text=True, check=False)  # noqa: S603
    assert not done.returncode, f"{command}: {done.stderr}"
    assert "Traceback" not in done.stderr, f"{command}: {done.stderr}"
    sys.stdout.write(f"{time.perf_counter() - begun:5.1f} s  {' '.join(map(str, command))[-60:].splitlines()[-1]}\n")
    return done.stdout


if __name__ == "__main__":
    main(Path(sys.argv[1]))
