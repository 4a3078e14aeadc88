"""State folders that an earlier version wrote are taken over: the answers are those of a run of today's from the start.

`earlier_version` was written by the version before descriptions and operators moved to folders of their own (format 1
of `gpu_ops.state.manifest`): five micro-batches each, a snapshot of the first three and records of the others. Rows
went to partitions by another hash then: folders of one partition are taken over as they are, others are cut anew first.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from gpu_ops.descriptions.inputs import Input
from gpu_ops.errors import StateError
from gpu_ops.join_engine import JoinEngine
from gpu_ops.spark.server.rescale import rescale
from gpu_ops.spark.wire.command import ApplyCommand
from gpu_ops.state.address import StateAddress
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import ARROW, GOES_ON, MANIFEST, SPARK, Manifest
from state import test_interval_partition, test_multi_partition, test_partition
from state.support import PRICES, WIRE, PartitionState, make_command, make_join
from state.test_rescale import counted

FOLDERS = Path(__file__).parent / "earlier_version"
APPLIED = 5
EXPIRING = make_join(how="left", right=Input("prices", PRICES, ttl_ms=2))
Answer = Callable[[Path, int], pa.Table]


def regular(folder: Path, batch: int) -> pa.Table:
    return test_partition.apply(test_partition.opened(folder, partitions=1), batch).changelog


def expiring(folder: Path, batch: int) -> pa.Table:
    command = make_command(state=str(folder), description=EXPIRING.to_json(), partitions=1)
    return test_partition.apply(PartitionState(command, clock=lambda: 1001 + batch), batch).changelog


def interval(folder: Path, batch: int) -> pa.Table:
    given = test_interval_partition
    command = ApplyCommand("j", StateAddress.of(folder), given.JOIN.to_json(), "q", 0, 0, 1, "cpu", given.WIRE, {})
    return given.apply(PartitionState(command), batch).changelog


def multi_way(folder: Path, batch: int) -> pa.Table:
    given = test_multi_partition
    opened = PartitionState(dataclasses.replace(given.command(folder), partitions=1))
    return opened.apply(batch, given.BATCHES[batch], given.WIRE).changelog


def expiring_answers() -> list[pa.Table]:
    engine, answers = JoinEngine(EXPIRING, "cpu"), []
    for number, batch in enumerate(test_partition.BATCHES):
        rows = WIRE.split(EXPIRING, batch)
        answers.append(engine.process(*rows.tables, orders=rows.sequences, clock_ms=1001 + number))
    return answers


CASES: dict[str, tuple[Answer, Callable[[], list[pa.Table]]]] = {
    "regular": (regular, lambda: test_partition.ANSWERS),
    "expiring": (expiring, expiring_answers),
    "interval": (interval, lambda: test_interval_partition.ANSWERS),
    "multi_way": (multi_way, lambda: test_multi_partition.ANSWERS),
}


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    made = Path(shutil.copytree(FOLDERS / request.node.callspec.params["name"], tmp_path / "state"))
    manifest = made / MANIFEST
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "partitions": 1}))  # the first of two is there
    return made


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


@pytest.mark.parametrize("name", CASES)
def test_cut_anew_it_goes_on_where_it_stopped(folder: Path, name: str) -> None:
    assert Manifest.of(Files.at(folder)).distribution == SPARK
    assert rescale(str(folder), 1).version == APPLIED
    assert Manifest.of(Files.at(folder)).distribution == ARROW
    answer, answers = CASES[name]
    expected = answers()
    for batch in range(APPLIED - 1, len(expected)):  # the last micro-batch may come again
        assert counted([answer(folder, batch)]) == counted([expected[batch]])


@pytest.mark.parametrize("name", ["regular"])
def test_of_several_partitions_it_is_refused_with_how_to_go_on(name: str) -> None:
    with pytest.raises(StateError, match=r"partitions by another hash. Run gpu-join rescale .* --partitions 2, which"):
        test_partition.opened(FOLDERS / name).apply(APPLIED, test_partition.BATCHES[APPLIED], WIRE)


@pytest.mark.parametrize("name", ["regular"])
def test_a_folder_of_a_later_format_is_refused(folder: Path, name: str) -> None:
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": GOES_ON + 1}))
    with pytest.raises(StateError, match=rf"has format {GOES_ON + 1}, .* reads up to {GOES_ON}: upgrade gpu-join"):
        Manifest.of(Files.at(folder))
    with pytest.raises(StateError, match="upgrade gpu-join"):
        regular(folder, APPLIED)
