"""README and docs: every Python block runs, in order; it prints what the text block after it says; links lead on."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

import pytest

import gpu_ops
from gpu_ops.spark.testing import arrive

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "examples" / "README.md"])


def blocks(path: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(path.read_text())


def run_blocks(path: Path, again: bool = False) -> None:
    """Run a file's Python blocks in one namespace, comparing their output.

    Args:
        path: the file.
        again: whether they ran before, in this folder: then each says at once what the last one said.
    """
    found = blocks(path)
    texts = [text for language, text in found if language == "text"]
    said = []
    names: dict[str, object] = {"__name__": "__main__"}
    for number, (language, code) in enumerate(found):
        if language != "python":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, f"{path.name} block {number}", "exec"), names)
        after = found[number + 1] if number + 1 < len(found) else ("", "")
        if after[0] == "text":
            said.append(printed.getvalue())
            assert again or said[-1] == after[1]
    assert not again or said == [texts[0], texts[-1], texts[-1]]


def run_pages(pages: Iterable[str], answers: TextIO) -> None:
    """Run pages, each in a session of its own that it starts itself, and in the working folder, emptied before.

    Args:
        pages: their paths, a line each; one after "again " runs once more, in the folder as it left it.
        answers: a line for each: JSON of what went wrong, or of nothing.
    """
    from pyspark.sql import SparkSession  # not everyone who tests has it

    for page in pages:
        path = page.strip().removeprefix("again ")
        again = path != page.strip()
        for left in [] if again else list(Path().iterdir()):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        wrong = ""
        try:
            run_blocks(Path(path), again)
        except BaseException:  # whatever it is, it is the page's
            wrong = traceback.format_exc()
        session = SparkSession.getActiveSession()
        if session is not None:
            session.stop()
        print(json.dumps(wrong), file=answers, flush=True)


@pytest.fixture(scope="session")
def page_runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """A process like a user's; one for all pages, whose JVM has done most of its compiling after the first."""
    code = f"""import os, sys; sys.path.insert(0, {str(ROOT)!r})
from tests.test_docs import run_pages
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
run_pages(sys.stdin, answers)"""
    folder, pipe = tmp_path_factory.mktemp("pages"), subprocess.PIPE
    with (
        (folder.parent / "pages.log").open("w") as log,
        subprocess.Popen(
            [sys.executable, "-c", code], cwd=folder, stdin=pipe, stdout=pipe, stderr=log, text=True
        ) as process,
    ):
        yield process
        assert process.stdin is not None
        process.stdin.close()


THOROUGH = ("sql", "sinks", "files", "kafka", "from_spark")
"""Pages of docs/ that `make test-all` runs."""


def page(path: Path) -> object:
    """A page as a parameter; `make test` runs the first one that one reads."""
    mark = pytest.mark.thorough if path.stem in THOROUGH else pytest.mark.slow
    return pytest.param(path, id=path.name, marks=[] if path == ROOT / "README.md" else mark)


@pytest.mark.spark
@pytest.mark.parametrize("path", [page(p) for p in FILES if any(b[0] == "python" for b in blocks(p))])
def test_blocks(path, page_runner):
    check_page(page_runner, path)


def check_page(runner, path, before=""):
    print(f"{before}{path}", file=runner.stdin, flush=True)
    answer = runner.stdout.readline()
    assert answer, "the process has ended"
    assert not json.loads(answer), json.loads(answer)


@pytest.mark.thorough
@pytest.mark.spark
def test_the_first_page_goes_on_where_it_stopped(page_runner):
    """Its blocks run, and say what it says; then once more over what they left, in a session of its own."""
    check_page(page_runner, ROOT / "docs" / "index.md")
    check_page(page_runner, ROOT / "docs" / "index.md", before="again ")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links(path):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", path.read_text()):
        assert (path.parent / target).exists(), target


def test_make_targets():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"`?make ([a-z-]+)`?", (ROOT / "README.md").read_text())):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_make_says_which_python_it_needs(tmp_path):
    """Before it makes an environment: pip's words for that are forty lines below."""
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.10.12\nexit 1\n')
    old.chmod(0o755)
    command = ["make", "--no-print-directory", f"VENV={tmp_path}/venv", f"PYTHON={old}", f"{tmp_path}/venv/.ready"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    said = f"gpu-join needs Python 3.11 to 3.13, and {old} is Python 3.10.12: say PYTHON=python3.11"
    assert done.stdout.splitlines() == [said]
    assert not (tmp_path / "venv").exists()


PROOF = [
    "conformance/test_*.py",
    "test_bad_input.py",
    "test_multi_input.py",
    "test_interval_input.py",
    "oracle/test_differential.py",
    "state/test_durable.py",
    "state/test_partition.py",
    "state/test_earlier_version.py",
]
"""What `make test` has the whole of."""
WIRING = [
    "join",
    "multi",
    "interval",
    "temporal",
    "asof",
    "lookup",
    "aggregate",
    "top",
    "latest",
    "end_of_input",
    "chains",
    "faults",
    "sinks",
    "jobs",
]
"""Files of tests/spark of which it has some tests."""


def test_make_runs_each_test_once():
    """`make test`, `make test-all` and `make soak` share the tests; the first has what proves the product."""
    makefile = (ROOT / "Makefile").read_text()
    recipes = [re.search(rf"^{name}:.*\n\t(.*)", makefile, re.MULTILINE)[1] for name in ("test", "test-all", "soak")]
    shares = [shlex.split(recipe.rpartition(" -m ")[2])[0] for recipe in recipes]
    for slow, thorough in itertools.product([False, True], repeat=2):
        assert sum(eval(share, {"slow": slow, "thorough": thorough}) for share in shares) == 1, shares
    for file in itertools.chain.from_iterable((ROOT / "tests").glob(pattern) for pattern in PROOF):
        assert "mark.thorough" not in file.read_text(), file
    for name in WIRING:
        text = (ROOT / "tests" / "spark" / f"test_{name}.py").read_text()
        assert not re.search(r"^pytestmark = .*thorough", text, re.MULTILINE), name


@pytest.mark.thorough
def test_site(tmp_path):
    """Every page is in the contents, every link and anchor leads on, every name of the reference is there."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    reference = (tmp_path / "api" / "index.html").read_text()
    for name in gpu_ops.__all__:
        assert name in ("sinks", "spark", "__version__") or f'id="gpu_ops.{name}"' in reference, name


def test_arrive_writes_the_next_file_of_a_folder(tmp_path):
    arrive(tmp_path / "in", {"id": 1, "item": "book"}, {"id": 2, "item": None})
    arrive(tmp_path / "in", "3,pen")
    texts = [file.read_text() for file in sorted((tmp_path / "in").iterdir())]
    assert texts == ['{"id": 1, "item": "book"}\n{"id": 2, "item": null}', "3,pen"]


def test_support_is_what_the_descriptions_say():
    written = runpy.run_path(str(ROOT / "docs" / "draw_support.py"))["with_support"]
    text = (ROOT / "README.md").read_text()
    assert written(text) == text, "run `python docs/draw_support.py`"


def test_figures_are_the_committed_ones():
    from benchmarks.report import PAGES, with_figures

    for page in PAGES:
        text = (ROOT / page).read_text()
        assert with_figures(page, text) == text, "run `python -m benchmarks.report`"
