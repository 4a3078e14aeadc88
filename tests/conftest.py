"""Options, backends and hypothesis profiles of the whole test suite."""

from __future__ import annotations

import itertools
import os
import sys
import time
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from oracle.drive import BACKENDS, Backend, gpu_status

os.environ["TZ"] = "UTC"
time.tzset()
# Virtual machines live for seconds here: their second compiler takes more than it gives, and loading classes is half.
_ARCHIVE = Path(sys.prefix, "classes.jsa")  # `make test` has `class_archive` make it
_CLASSES = f" -XX:SharedArchiveFile={_ARCHIVE} -Xlog:cds=off -Xlog:cds+dynamic=off" if _ARCHIVE.exists() else ""
os.environ.setdefault("JDK_JAVA_OPTIONS", f"-XX:TieredStopAtLevel=1{_CLASSES}")

_QUIET = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture)
settings.register_profile("default", deadline=None, max_examples=60, suppress_health_check=_QUIET)
settings.register_profile(
    "ci", parent=settings.get_profile("default"), max_examples=20, derandomize=True, print_blob=True
)
settings.register_profile("soak", parent=settings.get_profile("default"), max_examples=3000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "default"))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpu-join")
    group.addoption(
        "--cases",
        default=str(Path(__file__).parent / "conformance" / "cases"),
        metavar="DIR",
        help="folder of golden cases (*.json) for tests/conformance",
    )
    group.addoption(
        "--backends",
        default="cpu,cpu-tiny,gpu",
        metavar="NAMES",
        help=f"comma-separated backends to test on, of {', '.join(BACKENDS)}",
    )


def backends(config: pytest.Config) -> list[Backend]:
    """The backends asked for on the command line."""
    names = [name.strip() for name in str(config.getoption("--backends")).split(",") if name.strip()]
    unknown = [name for name in names if name not in BACKENDS]
    if unknown or not names:
        raise pytest.UsageError(f"--backends: {unknown or 'none'}; there are {', '.join(BACKENDS)}")
    return [Backend(name) for name in names]


def backend_param(
    backend: Backend, *values: object, name: str = "", marks: Sequence[pytest.MarkDecorator] = ()
) -> object:
    """A parameter set for one backend: ``values`` first, marked (and skipped) where it needs a card."""
    marks = list(marks)
    if backend.gpu:
        there, why = gpu_status()
        marks += [pytest.mark.gpu, pytest.mark.skipif(not there, reason=f"no GPU: {why}")]
    return pytest.param(*values, backend, id=name or backend.name, marks=marks)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every test that takes ``backend`` on each of them; ``other_backend`` leaves the plain CPU out."""
    if "other_backend" in metafunc.fixturenames:
        others = [b for b in backends(metafunc.config) if b.name != "cpu"]
        metafunc.parametrize("other_backend", [backend_param(b) for b in others])
    if "backend" in metafunc.fixturenames and "case" not in metafunc.fixturenames:
        metafunc.parametrize("backend", [backend_param(b) for b in backends(metafunc.config)])


def combined(*axes: Sequence[Any]) -> list[Any]:
    """Parameters of all combinations. The short run has each one of all axes but the last, with one value of that.

    Which value goes on from one combination to the next, so that each value of the last axis meets each of another one
    that has as many.
    """
    found = []
    for places in itertools.product(*(range(len(axis)) for axis in axes)):
        marks = [pytest.mark.slow] if sum(places) % len(axes[-1]) else []
        found.append(pytest.param(*(axis[place] for axis, place in zip(axes, places, strict=True)), marks=marks))
    return found


def slow_but(values: Iterable[Any], *kept: Any) -> list[Any]:
    """Parameters of a test, of which a run of every change has those that are kept; `make soak` has the others."""
    values = list(values)
    assert all(value in values for value in kept), kept
    return [
        value
        if value in kept
        else pytest.param(*(value if isinstance(value, tuple) else [value]), marks=pytest.mark.slow)
        for value in values
    ]


NOTEBOOKS = ("01_first_join",)
"""Those that `make test-all` runs."""


LONG = (
    "test_a_backlog_that_fails_goes_on_and_goes_live",
    "test_a_chain_begins_with_a_backlog",
    "test_a_chain_goes_on_in_stages_and_in_one_task",
    "test_a_delta_table",
    "test_a_finished_chain_is_opened_again",
    "test_a_folder_says_what_it_is_of",
    "test_a_micro_batch_that_breaks_every_card_is_given_up",
    "test_a_result_at_the_end_beside_a_stream",
    "test_a_run_that_takes_what_is_there_is_given_one_refresh",
    "test_a_table_is_followed_commit_by_commit",
    "test_a_value_of_several_rows_is_sparks_error",
    "test_an_aggregate_of_all_rows_counts_0_in_an_empty_table",
    "test_as_spark_has_it",
    "test_calendars_of_other_writers",
    "test_every_change_once_through_restarts_and_repeated_micro_batches",
    "test_every_type_by_its_definition",
    "test_except_and_intersect_are_sparks_own",
    "test_functions_of_ones_own_are_imported_by_state_servers",
    "test_groups_that_nothing_changes_are_forgotten",
    "test_in_sql_in_a_multi_way_join_and_of_files_that_arrow_reads",
    "test_late_rows_come_out_as_they_are",
    "test_late_rows_come_out_beside_the_windows",
    "test_of_changing_rows_over_restarts",
    "test_of_static_rows_and_what_is_refused",
    "test_operators_over_tables_alone_are_done_before_the_stream",
    "test_operators_whose_keys_agree_share_an_engine_in_each_partition",
    "test_rows_that_expire_on_disk",
    "test_static_ones_and_a_changelog_of_this_pack",
    "test_strings_of_a_collation_are_joined_by_it",
    "test_sub_queries_are_sparks_own",
    "test_the_end_gives_what_the_query_selects",
    "test_the_end_of_input_gives_the_same_bits",
    "test_types_declared_as_others",
    "test_unions_are_sparks_own",
    "test_upserts_are_distributed_by_the_group",
    "test_variances_and_correlations",
    "test_what_is_taken_back_in_time_does_not_count",
    "test_what_snapshots_write_follows_the_changes",
)
"""Tests of five seconds and more, which the soak has: others that CI has come by the same code."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Which tests are `make test`'s, which are left to `make test-all` (``thorough``) and to `make soak` (``slow``).

    Of those marked ``one_in(n, all=m)`` `make test` has every n-th by name, `make test-all` every m-th besides (none
    without ``all``), the soak all. So has it all notebooks, `make test-all` one. Those of `LONG` are the soak's.

    Without a card the tests that need one are left out, and counted.
    """
    for item in items:
        if item.name.partition("[")[0] in LONG:
            item.add_marker("slow")
        mark = item.get_closest_marker("one_in")
        number = zlib.crc32(item.nodeid.encode())
        if mark is not None and not item.get_closest_marker("gpu") and number % mark.args[0]:
            item.add_marker("slow" if number % mark.kwargs.get("all", mark.args[0]) else "thorough")
        if item.path.suffix == ".ipynb":
            item.add_marker("thorough" if item.path.stem in NOTEBOOKS else "slow")
    left_out = [] if gpu_status()[0] else [item for item in items if item.get_closest_marker("gpu")]
    if left_out:
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=left_out)
    config.stash[NEED_A_GPU] = len(left_out)


NEED_A_GPU = pytest.StashKey[int]()
"""How many tests were left out for want of a card."""


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of pytest-xdist tells the process that prints."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["need_a_gpu"] = session.config.stash.get(NEED_A_GPU, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """All workers collect the same tests: the last one says how many it left out."""
    node.config.stash[NEED_A_GPU] = getattr(node, "workeroutput", {}).get("need_a_gpu", 0)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    number = config.stash.get(NEED_A_GPU, 0)
    if number:
        terminalreporter.write_line(f"{number:,} tests need a GPU ({gpu_status()[1]}): make gpu-verify runs them")
