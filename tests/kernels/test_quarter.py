"""The quarter of an hour on a card: time is kept, what was found is kept, and a rehearsal takes the same calls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import quarter
from benchmarks.gpu.card import Clock
from benchmarks.gpu.files import FileSizes, cases
from benchmarks.gpu.passed import ROOT
from benchmarks.gpu.quarter import ITEMS, TINY, Item, measure
from kernels.card import NAME

pytestmark = pytest.mark.thorough
ABOUT = {"device": {"name": NAME}}


def test_items_are_left_out_in_time_and_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, bool]] = []

    def run(name: str, seconds: float, said: Path) -> str:
        ran.append((name, seconds <= ITEMS[name].most))
        said.write_text(json.dumps({"of": name}))
        return "failed: it ended with 1" if name == "at_end" and len(ran) < 4 else "done"

    out = tmp_path / "quarter.json"
    names = ("smoke", "at_end", "memcheck")
    first = measure(out, names, Clock(ITEMS["smoke"].least + 5), resume=True, run=run, about=ABOUT)["items"]
    assert ran == [("smoke", True), ("at_end", True)]
    assert first["smoke"]["status"] == "done"
    assert first["smoke"]["found"] == {"of": "smoke"}
    assert first["memcheck"]["status"].startswith("left out: time: 90 s needed")
    assert json.loads(out.read_text())["results"]["items"] == first
    # what was found stays where there is no time to find more; what is done is not done again, what failed is
    none = measure(out, ("at_end",), Clock(0), resume=True, run=run, about=ABOUT)["items"]
    assert none["at_end"] == first["at_end"]
    second = measure(out, names, Clock(), resume=True, run=run, about=ABOUT)["items"]
    assert [name for name, _ in ran] == ["smoke", "at_end", "at_end", "memcheck"]
    assert {item["status"] for item in second.values()} == {"done", "failed: it ended with 1"}
    monkeypatch.setattr(quarter, "digest", lambda: "another code")
    measure(out, ("smoke",), Clock(), resume=True, run=run, about=ABOUT)
    assert ran[-1] == ("smoke", True)


def test_an_item_that_takes_too_long_is_ended_and_what_it_said_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_item.py").write_text(
        "import pathlib, sys, time\nout = sys.argv[sys.argv.index('--out') + 1]\n"
        "pathlib.Path(out).write_text('so far')\ntime.sleep(60 * ('memcheck' in sys.argv))\nsys.exit(3)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run, said = quarter._in_a_process("slow_item", True), tmp_path / "said"
    assert run("memcheck", 1.5, said) == "ended after 2 s"
    assert said.read_text() == "so far"
    assert run("smoke", 30, said) == "failed: it ended with 3"


def test_cases_of_files() -> None:
    of = cases(FileSizes(), 16)
    assert list(of) == [16, 1]
    every = [case for those in of.values() for case in those]
    assert len(set(every)) == len(every) == 40
    assert (of[16][0].changes, of[16][0].backend, of[16][0].sink) == (4_000_000, "gpu", "write_files")
    assert {(case.backend, case.partitions, case.tasks) for case in every} == {
        ("gpu", 1, 16), ("cpu", 16, 16), ("cpu", 8, 1), ("gpu", 1, 1),
    }  # fmt: skip
    assert {case.query for case in every} == {"left", "parquet", "three", "sums"}


def test_items_are_those_that_are_told() -> None:
    for name in ITEMS:
        assert f"- `{name}`: " in (quarter.__doc__ or "")
        assert f"`{name}`" in (ROOT / "benchmarks" / "gpu" / "README.md").read_text()
    assert all(isinstance(item, Item) and item.least < item.most for item in ITEMS.values())
    assert TINY.files.changes[0] < 1000


@pytest.mark.slow
def test_a_rehearsal(tmp_path: Path) -> None:
    """All items, by the same script, on one core; Spark's with state servers that have stand-ins."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    home = tmp_path / "home"
    home.mkdir()
    environment = {
        **os.environ, "PYTHONPATH": path, "OUT": str(tmp_path), "QUARTER": "kernels.rehearsal", "PYTHON": sys.executable,
        "GPU_SITE": str(tmp_path / "none"), "HOME": str(home),
    }  # fmt: skip
    core = str(min(os.sched_getaffinity(0)))
    command = ["taskset", "-c", core, "bash", "benchmarks/gpu/session.sh", "quarter", "--tiny", "--budget-s", "1200"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (file,) = tmp_path.glob("quarter-*.json")
    items: dict[str, Any] = json.loads(file.read_text())["results"]["items"]
    assert {name: item["status"] for name, item in items.items()} == dict.fromkeys(ITEMS, "done")
    found = items["files"]["found"]["cases"]
    assert len(found) == 40
    assert all(case["folded_rows"] > 0 for case in found)
    assert all(stage["tasks"] > 0 for case in found for stage in case["stages"])
    assert all(case["stages"] for case in found)
    read = [case for case in found if case["query"] == "parquet" and "copies" in case]
    assert {case["backend"]: case["copies"] > 0 for case in read} == {"gpu": True, "cpu": False}
