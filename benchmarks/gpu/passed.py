"""A plugin of pytest's: tests that have passed already are not run again, so that a run cut short is gone on with.

Names of tests that passed stand in the file that the environment's ``GPU_VERIFY_PASSED`` names, one a line, below a
digest of the code they passed with: of other code they say nothing. Beside it, in a file that ends in ``.counted``,
stands how many tests there are and how many of them had passed before. Tests run in no order, so that a
short run has some of every kind.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest  # where it is not installed, `benchmarks.gpu.verify` says so

ROOT = Path(__file__).resolve().parents[2]
VARIABLE = "GPU_VERIFY_PASSED"
CODE = ("gpu_ops", "cpu_fallback", "tests", "benchmarks")


def digest(root: Path = ROOT) -> str:
    """The first 16 digits of a hash of all Python code that tests and benchmarks run, also without git."""
    found = hashlib.sha256()
    for path in sorted(path for folder in CODE for path in (root / folder).rglob("*.py")):
        found.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]


def passed(path: Path) -> set[str]:
    """Tests that passed with the code as it is."""
    code, *names = path.read_text().splitlines() if path.exists() else [""]
    return set(names) if code == digest() else set()


def begin(path: Path, *, afresh: bool) -> None:
    """Make the file ready to be added to: empty if it is to be, or if the code was another."""
    if afresh or not passed(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{digest()}\n")
    counted(path).write_text("0 0")


def counted(path: Path) -> Path:
    """The file beside it."""
    return path.with_name(f"{path.name}.counted")


class Keeper:
    """Adds the names of tests that pass, each when its last part is over.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._good = path, set[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Records a test as passed once it and its teardown have passed."""
        if report.when == "call" and report.passed:
            self._good.add(report.nodeid)
        elif report.when == "teardown" and report.passed and report.nodeid in self._good:
            with self._path.open("a") as file:
                file.write(f"{report.nodeid}\n")


def pytest_configure(config: pytest.Config) -> None:
    """Tests that have passed are left out, after all others that are; the process that hears of all keeps them."""
    import pytest

    if VARIABLE not in os.environ:
        return
    path = Path(os.environ[VARIABLE])

    class Leaver:
        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
            known = passed(path)
            gone = [item for item in items if item.nodeid in known]
            counted(path).write_text(f"{len(items)} {len(gone)}")
            # in no order, the same one each time: a run that is cut short has some of all
            left = [item for item in items if item.nodeid not in known]
            items[:] = sorted(left, key=lambda item: zlib.crc32(item.nodeid.encode()))
            config.hook.pytest_deselected(items=gone)

    config.pluginmanager.register(Leaver())
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Keeper(path))
