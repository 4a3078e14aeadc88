"""Files that a state server with a card writes for `gpu_ops.write_files`, and what a task makes of its answers."""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from gpu_ops.descriptions.projection import Projection
from gpu_ops.errors import StateError
from gpu_ops.spark.tasks import join as join_task
from gpu_ops.spark.tasks.arrow import TaskIdentity
from gpu_ops.spark.tasks.file import FileWriter
from gpu_ops.spark.tasks.join import EncodeChanges, Encoded, Task
from gpu_ops.spark.wire.command import BatchContext, as_json
from gpu_ops.spark.wire.connection import Address
from gpu_ops.spark.wire.files_request import why_not_by_card
from gpu_ops.state.address import StateAddress
from spark.test_cluster import found_by

pytestmark = pytest.mark.spark
SCHEMA = pa.schema([("row_kind", pa.string()), ("id", pa.int64())])
ROWS = pa.RecordBatch.from_pylist([{"row_kind": "+I", "id": 1}], SCHEMA)
PLACED = [["_staging/0/a/part-0000000000-00000-0", 9]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What ``files_by_card.py`` found."""
    return found_by("files_by_card.py", tmp_path_factory.mktemp("files_by_card"))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["parquet", "delta", "filtered", "sticky", "written"])
def test_the_card_writes_what_tasks_write(found: dict[str, Any], case: str) -> None:
    card, host = found[f"{case} gpu"], found[f"{case} cpu"]
    assert (card.pop("by_card"), host.pop("by_card")) == (card["files"], 0)
    assert case not in ("sticky", "written") or card["files"] > 2
    assert card.pop("explain") == "write_files() has the card write Parquet, which Spark's tasks name and commit"
    assert host.pop("explain") is None
    assert card == host
    assert card["rows"]
    assert not card["staged"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("computed", "its filter or columns are computed by Arrow"),
        ("nested", "column tags is list<element: string>"),
        ("folders", None),
    ],
)
def test_what_the_card_does_not_write_tasks_do(found: dict[str, Any], case: str, why: str | None) -> None:
    there = found[f"{case} gpu"]
    assert not there["by_card"]
    assert there["rows"]
    assert why is None or there["explain"] == f"write_files() has Spark's tasks write: {why}"


@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        (pa.int64(), {}, None),
        (pa.decimal128(38, 38), {"compression": None}, None),
        (pa.timestamp("us"), {"compression": "lz4"}, None),
        (pa.timestamp("us", "UTC"), {}, "some timestamps have a zone and others none"),
        (pa.timestamp("s"), {}, "column c is"),
        (pa.uint8(), {}, "column c is uint8"),
        (pa.float16(), {}, "column c is"),
        (pa.time64("us"), {}, "column c is time64"),
        (pa.binary(4), {}, "column c is fixed_size_binary"),
        (pa.decimal256(40, 2), {}, "column c is decimal256"),
        (pa.struct([("a", pa.int64())]), {}, "column c is struct"),
        (pa.large_string(), {}, "column c is large_string"),
        (pa.int64(), {"compression": "gzip"}, "the card has no compression gzip"),
        (pa.int64(), {"format": "arrow"}, "the card writes Parquet, not arrow"),
        (pa.int64(), {"partition_by": ("c",)}, "partition_by has rows cut by c"),
    ],
)
def test_what_the_card_writes(kind: pa.DataType, options: dict[str, Any], why: str | None) -> None:
    local = pa.timestamp("us") if kind != pa.timestamp("us") else kind
    how = {"format": "parquet", "partition_by": (), "compression": "snappy", **options}
    said = why_not_by_card(pa.schema([("c", kind), ("at", local), ("d", pa.date32())]), **how)
    assert said is None if why is None else (said or "").startswith(why)


class Served:
    """Stands for the directory and the state servers: what they answer, and what they are asked.

    Args:
        monkeypatch: puts it in their place.
        rows: come first.
        answer: comes behind them.
        shared_in: as the directory says it.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, rows: list[pa.RecordBatch], answer: Mapping[str, Any],
        shared_in: str | None = None,
    ) -> None:  # fmt: skip
        self.commands: list[dict[str, Any]] = []
        context = json.loads(as_json(BatchContext(shared_in=shared_in)))

        class Exchange:
            def __init__(inner, locate: Callable[[Any], Any], command: dict[str, Any], _schema: Any) -> None:  # noqa: N805
                self.commands.append({**command, **locate(None)[1]})
                inner.retries, inner.answer = 0, answer

            def run(inner, _rows: Any) -> Iterator[pa.RecordBatch]:  # noqa: N805
                yield from rows

        monkeypatch.setattr(join_task, "Exchange", Exchange)
        said = {"locate": {"location": "grpc://h:1", "context": context}, "report": {"all": None}}
        monkeypatch.setattr(join_task, "ask", lambda _directory, action, _request: {"each": [said[action]]})
        monkeypatch.setattr(join_task, "task_identity", lambda: TaskIdentity("q", "r", 0, 0, 0))


def encode(folder: Path, *, by_card: bool = True) -> list[str]:
    """The files that a task of Spark's gives, or names."""
    writer = FileWriter(StateAddress.of(folder), "parquet", SCHEMA, (), True, 1 << 20, "snappy", by_card)
    command = {"join_id": "j", "state": None, "backend": "gpu", "partitions": 1, "options": {}}
    arrivals: Any = types.SimpleNamespace(to_wire=lambda batches: batches, wire=SCHEMA)
    task = Task("t", command, Address("grpc://h:1", "t"), arrivals, SCHEMA)
    function = EncodeChanges(task, Encoded("j", Projection.all(SCHEMA), writer))
    return [json.loads(text)["lies"] for batch in function.run(iter(())) for text in batch["file"].to_pylist()]


ANSWER = {"metrics": {}, "backend": "gpu", "latest": []}


def test_a_task_passes_on_the_files_that_a_server_has_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(monkeypatch, [], {**ANSWER, "files": PLACED})
    assert encode(tmp_path) == ["_staging/0/a/part-0000000000-00000-0"]
    assert served.commands[0]["files"]["path"] == "_staging/0/{attempt}/part-0000000000-00000-{i}"


def test_where_rows_come_the_task_writes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_ops.spark.tasks.file.task_identity", lambda: TaskIdentity("q", "r", 0, 0, 0))
    for by_card in (True, False):
        served = Served(monkeypatch, [ROWS], ANSWER)
        (lies,) = encode(tmp_path, by_card=by_card)
        assert pa.parquet.read_table(tmp_path / lies).to_pylist() == ROWS.to_pylist()
        assert ("files" in served.commands[0]) is by_card


def test_rows_of_one_server_and_files_of_another_are_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first was lost while it sent rows: what the second has written has those, too."""
    monkeypatch.setattr("gpu_ops.spark.tasks.file.task_identity", lambda: TaskIdentity("q", "r", 0, 0, 0))
    Served(monkeypatch, [ROWS], {**ANSWER, "files": PLACED})
    with pytest.raises(StateError, match="gave changes of 'j', and the one in its place files"):
        encode(tmp_path)


def test_changes_that_others_take_as_well_come_as_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_ops.spark.tasks.file.task_identity", lambda: TaskIdentity("q", "r", 0, 0, 0))
    served = Served(monkeypatch, [ROWS], ANSWER, shared_in="r")
    encode(tmp_path)
    assert served.commands[0]["files"] is None
