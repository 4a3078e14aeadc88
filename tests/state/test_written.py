"""A state server with a card writes the changes of a micro-batch into files, and tells a task where they are."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from kernels.emulation import emulated

from gpu_ops.conditions import parse
from gpu_ops.descriptions.projection import ROWS, Projection
from gpu_ops.errors import GpuJoinError
from gpu_ops.spark.server.partition import PartitionState
from gpu_ops.spark.server.server import StateServer
from gpu_ops.spark.tasks.arrow import TaskIdentity
from gpu_ops.spark.tasks.file import FileWriter, WrittenFile
from gpu_ops.spark.wire.connection import Address
from gpu_ops.spark.wire.exchange import Exchange
from gpu_ops.state.address import StateAddress
from state.support import TOKEN, WIRE_SCHEMA, expected, make_command, wire_batches

pytestmark = pytest.mark.thorough
BATCHES = wire_batches(3)
ANSWERS = expected(BATCHES)
SCHEMA = ANSWERS[0].schema
SHARES = 3


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The micro-batches that were computed."""
    seen: list[int] = []
    apply = PartitionState._apply

    def counted(self: PartitionState, batch_id: int, *rest: Any) -> Any:
        seen.append(batch_id)
        return apply(self, batch_id, *rest)

    monkeypatch.setattr(PartitionState, "_apply", counted)
    return seen


class Tasks:
    """The Spark tasks of one partition.

    Args:
        folder: of the state and the files.
        backend: of the server.
        staged: see `FileWriter`.
    """

    def __init__(self, folder: Path, backend: str, *, staged: bool = True) -> None:
        self.folder, self.backend = folder, backend
        self.out = folder / "out"
        self.writer = FileWriter(StateAddress.of(self.out), "parquet", SCHEMA, (), staged, 1 << 20, "snappy", True)
        self.projection = Projection.all(SCHEMA)
        self._server = StateServer(TOKEN, blocks=str(folder))

    def ask(self, batch: int, share: int, shares: int = SHARES) -> tuple[pa.Table, list[WrittenFile] | None]:
        """The changes that a task is given, and the files."""
        rows, task = BATCHES[batch], TaskIdentity("query-1", "run", batch, 7, 0)
        of = {"share": share, "shares": shares, "rows": rows.num_rows, "shared_in": "run" if shares > 1 else None}
        files = vars(self.writer.request(self.projection, task))
        command = json.loads(make_command(batch, str(self.folder / "s"), backend=self.backend).to_json())
        address = Address(f"grpc://127.0.0.1:{self._server.port}", TOKEN)
        asked = Exchange(lambda _: (address, {}), {**command, **of, "counted": True, "files": files}, WIRE_SCHEMA)
        found = pa.Table.from_batches(asked.run(rows.to_batches(max_chunksize=7)), SCHEMA)
        if "files" not in asked.answer:
            return found, None
        named = self.writer.placed(asked.answer["files"])["file"].to_pylist()
        return found, [WrittenFile(**json.loads(text)) for text in named]

    def rows(self, files: list[WrittenFile] | None) -> list[Any]:
        """What DuckDB finds in files."""
        assert files
        assert all(file.size == (self.out / file.lies).stat().st_size for file in files)
        return duckdb.sql(f"FROM read_parquet({[str(self.out / file.lies) for file in files]})").fetchall()

    def restarted(self) -> None:
        """Another server in place of this one."""
        self.close()
        self._server = StateServer(TOKEN, blocks=str(self.folder))

    def close(self) -> None:
        self._server.shutdown()


@pytest.fixture
def tasks(tmp_path: Path) -> Iterator[Tasks]:
    with emulated():
        made = Tasks(tmp_path, "gpu")
        yield made
        made.close()


def tuples(table: pa.Table) -> list[Any]:
    return [tuple(row.values()) for row in table.to_pylist()]


def test_the_first_task_has_the_files_and_the_others_nothing(tasks: Tasks, applied: list[int]) -> None:
    for batch, answer in enumerate(ANSWERS):
        found = {share: tasks.ask(batch, share) for share in (1, 0, 2)}
        assert all(rows.num_rows == 0 for rows, _ in found.values())
        assert found[1][1] is None
        assert found[2][1] is None
        assert tasks.rows(found[0][1]) == tuples(answer)
        assert tasks.ask(batch, 0) == found[0], "a task that is repeated is given the same"
        assert [file.path for file in found[0][1] or ()] == [f"part-{batch:010d}-00007-0.parquet"]
    assert applied == [0, 1, 2]


def test_a_server_on_the_cpu_gives_all_rows_to_the_first_task(tmp_path: Path) -> None:
    """As where its card was lost: the others must not have what the first one may have had in files."""
    tasks = Tasks(tmp_path, "cpu")
    found = {share: tasks.ask(0, share) for share in (1, 0, 2)}
    tasks.close()
    assert [found[share][0].num_rows for share in range(SHARES)] == [ANSWERS[0].num_rows, 0, 0]
    assert found[0] == (ANSWERS[0], None)
    assert not tasks.out.exists()


@pytest.mark.parametrize(
    ("shares", "error"),
    [
        (1, MemoryError("std::bad_alloc: out_of_memory")),
        (SHARES, OverflowError("column size")),
        (SHARES, RuntimeError("nvCOMP is disabled")),
    ],
)
def test_where_the_card_cannot_write_the_first_task_is_given_the_rows(
    tasks: Tasks, shares: int, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    tasks.ask(0, 0, shares)
    files: Any = sys.modules["gpu_ops.cudf_backend.parquet"].CudfFiles
    honest = files.write_parquet

    def fails(*_: Any, **__: Any) -> None:
        raise error

    files.write_parquet = fails
    found = [tasks.ask(1, share, shares) for share in range(shares)]
    files.write_parquet = honest
    assert found[0] == (ANSWERS[1], None)
    assert all(rows.num_rows == 0 and files is None for rows, files in found[1:])
    assert "a task writes this micro-batch" in caplog.text
    assert tasks.rows(tasks.ask(2, 0, shares)[1]) == tuples(ANSWERS[2])


def test_what_is_written_again_has_other_names(tasks: Tasks, applied: list[int]) -> None:
    first = tasks.ask(0, 0)[1]
    tasks.restarted()
    second = tasks.ask(0, 0)[1]
    assert applied == [0, 0]
    assert tasks.rows(first) == tasks.rows(second)
    assert {file.lies for file in first or ()}.isdisjoint(file.lies for file in second or ())


def test_a_folder_that_cannot_be_written_to_changes_nothing(tasks: Tasks) -> None:
    tasks.out.write_text("a file")
    with pytest.raises(GpuJoinError, match="cannot write files of the changes of join of orders, prices, partition 0"):
        tasks.ask(0, 0)
    tasks.out.unlink()
    assert tasks.rows(tasks.ask(0, 0)[1]) == tuples(ANSWERS[0])
    assert tasks.rows(tasks.ask(1, 0)[1]) == tuples(ANSWERS[1])


def test_files_have_so_many_rows_and_the_statistics_of_deltas_log(tmp_path: Path) -> None:
    with emulated():
        tasks = Tasks(tmp_path, "gpu", staged=False)
        tasks.writer = tasks.writer._replace(file_bytes=300)
        _, files = tasks.ask(0, 0)
        tasks.close()
        assert files is not None
        assert len(files) > 2
        assert tasks.rows(files) == tuples(ANSWERS[0])
        for number, file in enumerate(files):
            rows = pq.read_table(tasks.out / file.lies)
            assert file.path == file.lies
            assert file.path.endswith(f"-{number}.parquet")
            assert file.statistics["numRecords"] == rows.num_rows
            assert file.statistics["nullCount"] == {name: rows[name].null_count for name in rows.column_names}
            assert file.statistics["minValues"]["row_kind"] == min(rows["row_kind"].to_pylist())


def test_a_filter_and_renamed_columns_are_the_cards(tasks: Tasks) -> None:
    tests = [parse(text, {ROWS: SCHEMA}) for text in ("row_kind <> '-U' AND row_kind <> '-D'", "amount > 5")]
    columns = Projection.all(SCHEMA.field(name) for name in ("price", "row_kind")).columns
    tasks.projection = Projection(columns, tuple(tests))
    tasks.writer = tasks.writer._replace(schema=pa.schema([("p", pa.float64()), ("kind", pa.string())]))
    wanted = [
        (row["price"], row["row_kind"])
        for row in ANSWERS[0].to_pylist()
        if row["row_kind"] in ("+I", "+U") and row["amount"] is not None and row["amount"] > 5
    ]
    assert wanted
    files = tasks.ask(0, 0)[1]
    assert tasks.rows(files) == wanted
    tasks.projection = Projection(columns, (parse("amount < -5", {ROWS: SCHEMA}),))
    assert tasks.ask(1, 0)[1] == []
