"""State folders that an earlier version wrote are taken over: the answers are those of a run of today's from the start.

`earlier_version` was written by the version before descriptions and operators moved to folders of their own (format 1
of `gpu_ops.state.manifest`): five micro-batches each, a snapshot of the first three and records of the others.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from gpu_ops.descriptions.inputs import Input
from gpu_ops.errors import StateError
from gpu_ops.join_engine import JoinEngine
from gpu_ops.spark.server.partition import PartitionState
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import MANIFEST, Manifest
from state import test_interval_partition, test_multi_partition, test_partition
from state.support import PRICES, WIRE, make_command, make_join

FOLDERS = Path(__file__).parent / "earlier_version"
APPLIED = 5
EXPIRING = make_join(how="left", right=Input("prices", PRICES, ttl_ms=2))
Answer = Callable[[Path, int], pa.Table]


def regular(folder: Path, batch: int) -> pa.Table:
    return test_partition.apply(test_partition.opened(folder), batch).changelog


def expiring(folder: Path, batch: int) -> pa.Table:
    command = make_command(state=str(folder), description=EXPIRING.to_json())
    return test_partition.apply(PartitionState(command, clock=lambda: 1001 + batch), batch).changelog


def interval(folder: Path, batch: int) -> pa.Table:
    return test_interval_partition.apply(test_interval_partition.opened(folder), batch).changelog


def multi_way(folder: Path, batch: int) -> pa.Table:
    given = test_multi_partition
    return given.opened(folder).apply(batch, given.BATCHES[batch], given.WIRE).changelog


def expiring_answers() -> list[pa.Table]:
    engine, answers = JoinEngine(EXPIRING, "cpu"), []
    for number, batch in enumerate(test_partition.BATCHES):
        rows = WIRE.split(EXPIRING, batch)
        answers.append(engine.process(*rows.tables, orders=rows.orders, clock_ms=1001 + number))
    return answers


CASES: dict[str, tuple[Answer, Callable[[], list[pa.Table]]]] = {
    "regular": (regular, lambda: test_partition.ANSWERS),
    "expiring": (expiring, expiring_answers),
    "interval": (interval, lambda: test_interval_partition.ANSWERS),
    "multi_way": (multi_way, lambda: test_multi_partition.ANSWERS),
}


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return Path(shutil.copytree(FOLDERS / request.node.callspec.params["name"], tmp_path / "state"))


@pytest.mark.parametrize("name", CASES)
def test_it_goes_on_where_it_stopped(folder: Path, name: str) -> None:
    answer, answers = CASES[name]
    expected = answers()
    for batch in range(APPLIED, len(expected)):
        assert answer(folder, batch).equals(expected[batch])
        assert expected[batch].num_rows


@pytest.mark.parametrize("name", CASES)
def test_its_last_answer_is_given_again(folder: Path, name: str) -> None:
    answer, answers = CASES[name]
    for _ in range(2):
        assert answer(folder, APPLIED - 1).equals(answers()[APPLIED - 1])


@pytest.mark.parametrize("name", ["regular"])
def test_a_folder_of_a_later_format_is_refused(folder: Path, name: str) -> None:
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 4}))
    with pytest.raises(StateError, match=r"has format 4, .* reads up to 3: upgrade gpu-join"):
        Manifest.of(Files.at(folder))
    with pytest.raises(StateError, match="upgrade gpu-join"):
        regular(folder, APPLIED)
