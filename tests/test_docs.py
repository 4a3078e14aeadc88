"""README and docs: every Python block runs, in order; it prints what the text block after it says; links lead on."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "examples" / "README.md"])


def blocks(path: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(path.read_text())


def run_blocks(path: Path) -> None:
    """Run a file's Python blocks in one namespace, comparing their output."""
    found = blocks(path)
    names: dict[str, object] = {"__name__": "__main__"}
    for number, (language, code) in enumerate(found):
        if language != "python":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, f"{path.name} block {number}", "exec"), names)
        after = found[number + 1] if number + 1 < len(found) else ("", "")
        if after[0] == "text":
            assert printed.getvalue() == after[1]


@pytest.mark.spark
@pytest.mark.parametrize("path", [p for p in FILES if any(b[0] == "python" for b in blocks(p))], ids=lambda p: p.name)
def test_blocks(path, tmp_path):
    # a process of its own: the blocks start a session as a user would
    code = f"import sys, pathlib; sys.path.insert(0, {str(ROOT)!r})\n"
    code += f"from tests.test_docs import run_blocks; run_blocks(pathlib.Path({str(path)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links(path):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", path.read_text()):
        assert (path.parent / target).exists(), target


def test_make_targets():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"`?make ([a-z-]+)`?", (ROOT / "README.md").read_text())):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_figures_are_the_committed_ones():
    from benchmarks.report import report

    assert report() in (ROOT / "README.md").read_text(), "run `python -m benchmarks.report` and paste what it says"
