"""Each example prints what is kept under its name in examples/expected; all with Spark share a session."""

from __future__ import annotations

import io
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import slow_but
from rich.console import Console
from spark.conftest import spark

from gpu_ops.jobs import runner
from gpu_ops.jobs.job import load

pytestmark = pytest.mark.thorough

__all__ = ["spark"]

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
PROGRAMS = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != "feed")
WITH_SPARK = [name for name in PROGRAMS if "feed" in (EXAMPLES / f"{name}.py").read_text()]
_SETTINGS = ("spark.sql.shuffle.partitions", "spark.sql.session.timeZone")


def expected(name: str) -> str:
    return (EXAMPLES / "expected" / f"{name}.txt").read_text()


@pytest.fixture
def session(spark: Any) -> Any:
    """The tests' session, which the examples take for their own; it has its settings again afterwards."""
    before = {name: spark.conf.get(name) for name in _SETTINGS}
    yield spark
    for name, value in before.items():
        spark.conf.set(name, value)


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in WITH_SPARK])
def test_without_spark(name):
    done = subprocess.run([sys.executable, EXAMPLES / f"{name}.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected(name)


@pytest.mark.spark
@pytest.mark.parametrize("name", slow_but(WITH_SPARK, "left_join_view", "multi_way_join", "semi_anti_join"))
def test_on_spark(name, session, monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.delitem(sys.modules, "feed", raising=False)  # a folder of its own for each
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert capsys.readouterr().out == expected(name)


@pytest.mark.spark
def test_job(session):
    printed = Console(record=True, width=200, file=io.StringIO())
    runner.run(load(EXAMPLES / "job.sql"), printed, once=True)
    lines = [re.split(r"; |, [\d.]+ s in all", line)[0] for line in printed.export_text().splitlines()]
    assert "\n".join(lines) + "\n" == expected("job")


def test_examples_are_short_and_listed():
    listed = (EXAMPLES / "README.md").read_text()
    for path in [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.sql")]:
        assert len(path.read_text().splitlines()) <= 50, path.name
        assert path.name in listed, path.name
