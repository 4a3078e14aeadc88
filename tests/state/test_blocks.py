"""Rows that lie in files of one machine: not copied on their way, kept by the log; and where they are gone."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import flight

from gpu_ops.errors import DescriptionError, GpuJoinError, StateError
from gpu_ops.operator_engine import OperatorEngine
from gpu_ops.spark.server import server as server_module
from gpu_ops.spark.wire.command import ApplyCommand
from gpu_ops.spark.wire.connection import Address
from gpu_ops.spark.wire.exchange import Exchange
from gpu_ops.state import blocks, durable
from gpu_ops.state import files as files_module
from gpu_ops.state.blocks import BlockFiles, FilePart, Mapped
from gpu_ops.state.durable import PartitionLog, Record
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import Manifest
from state.support import (
    TOKEN,
    WIRE,
    WIRE_SCHEMA,
    PartitionState,
    Server,
    call_options,
    expected,
    make_command,
    make_join,
    wire_batches,
)

COLUMNS = [
    [column[:-1].index(None) != number if None in column[:-1] else True for column in WIRE.union_columns]
    for number in (0, 1)
]
PLACES = [tuple(place for place, has in enumerate(own) if has) for own in COLUMNS]


def in_order(table: pa.Table) -> pa.Table:
    """A micro-batch as the task of a join has it: input by input, rows numbered."""
    table = table.sort_by([("__side", "ascending"), ("__order", "ascending")])
    return table.set_column(1, WIRE_SCHEMA.field(1), pa.array(range(table.num_rows)))


def left(folder: Path, table: pa.Table, *, inline: tuple[int, ...] = ()) -> list[pa.RecordBatch | FilePart]:
    """Its rows in files, a message for each run of rows of one input, some five; but for a few of them."""
    files, made, at = BlockFiles(folder, 1), list[pa.RecordBatch | FilePart](), 0
    sides = table["__side"].to_pylist()
    while at < table.num_rows:
        end = next((i for i in range(at, table.num_rows) if sides[i] != sides[at] or i - at == 12), table.num_rows)
        (rows,) = table.slice(at, end - at).combine_chunks().to_batches()
        if len(made) in inline:
            made.append(rows)
        else:
            own = rows.select([place + 2 for place in PLACES[sides[at]]])
            block = files.put(0, own.serialize(), own.num_rows)
            made.append(FilePart(sides[at], PLACES[sides[at]], at, block))
        at = end
    return made


BATCHES = [in_order(batch) for batch in wire_batches(6)]
ANSWERS = expected(BATCHES)


def record(folder: Path, batch: int = 0, **changes: Any) -> Record:
    parts = tuple(x for x in left(folder / "run" / str(batch), BATCHES[batch], **changes) if isinstance(x, FilePart))
    return Record(BATCHES[batch], 5, WIRE.to_json(), parts=parts)


def log(root: Path, **changes: Any) -> PartitionLog:
    manifest = dataclasses.replace(Manifest(make_join().to_json(), 2, "query-1"), **changes)
    return PartitionLog(Files.at(str(root / "s")), manifest, 0)


def kept(root: Path) -> list[Path]:
    return sorted((root / "s" / "p" / "0").glob("*.block"))


def test_messages_in_files_are_looked_at_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two check sums at a time, at least: else the first would wait for the second in vain."""
    both, turn, honest = threading.Barrier(2, timeout=20), itertools.count(), zlib.crc32

    def sum_of(content: Any, *rest: Any) -> int:
        if next(turn) < 2:
            both.wait()
        return honest(content, *rest)

    parts = left(tmp_path / "run" / "0", BATCHES[0])
    assert len(parts) > 2
    monkeypatch.setattr(blocks.zlib, "crc32", sum_of)
    served = server_module.StateServer(TOKEN, blocks=str(tmp_path))
    try:
        address = Address(f"grpc://127.0.0.1:{served.port}", TOKEN)
        command = {**json.loads(make_command(0, str(tmp_path / "s")).to_json()), "counted": True}
        found = pa.Table.from_batches(Exchange(lambda _: (address, {}), command, WIRE_SCHEMA).run(parts))
    finally:
        served.shutdown()
    assert found.equals(ANSWERS[0])
    assert next(turn) > len(parts)


def test_a_row_is_copied_once_into_its_file_and_once_out_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the task that cut it to the engine: the server's table and the log's record are that file."""
    seen: list[tuple[pa.Table, FilePart]] = []
    applied = server_module.PartitionState._apply

    def apply(self: server_module.PartitionState, batch_id: int, arrived: Any, *rest: Any) -> Any:
        table, parts = arrived
        seen.extend((table, part) for part in parts)
        return applied(self, batch_id, arrived, *rest)

    monkeypatch.setattr(server_module.PartitionState, "_apply", apply)
    mapped: dict[str, pa.Buffer] = {}
    own = blocks.mapped
    monkeypatch.setattr(blocks, "mapped", lambda path: mapped.setdefault(path, own(path)))
    parts = left(tmp_path / "run" / "0", BATCHES[0])
    state = str(tmp_path / "s")
    served = server_module.StateServer(TOKEN, blocks=str(tmp_path))
    try:
        address = Address(f"grpc://127.0.0.1:{served.port}", TOKEN)
        command = {**json.loads(make_command(0, state).to_json()), "counted": True}
        found = pa.Table.from_batches(Exchange(lambda _: (address, {}), command, WIRE_SCHEMA).run(parts))
    finally:
        served.shutdown()
    assert found.equals(ANSWERS[0])
    assert len(seen) == len(parts) > 2
    for table, part in seen:
        assert isinstance(part, FilePart)
        file = mapped[part.block.file]
        for column in part.union_columns:
            rows = table.column(column + 2).slice(part.sequence, part.block.rows)
            (chunk,) = rows.chunks  # as it is in the file: what puts chunks together is the second copy
            for buffer in chunk.buffers():
                assert buffer is None or file.address <= buffer.address <= file.address + file.size
    (name,) = {part.block.file for part in parts if isinstance(part, FilePart)}
    (link,) = kept(tmp_path)
    assert os.path.samefile(name, link)
    (head,) = (tmp_path / "s" / "p" / "0").glob("*.arrow")
    with pa.ipc.open_stream(str(head)) as reader:
        assert reader.read_all().num_rows == 0


@pytest.mark.parametrize("inline", [(), (0,), (1, 2), (0, 1, 2, 3, 4, 5, 6, 7)])
def test_a_record_of_files_comes_back(tmp_path: Path, inline: tuple[int, ...]) -> None:
    stamp, size = log(tmp_path).write_record(0, record(tmp_path, inline=inline))
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    found = log(tmp_path)
    assert found.read_record(0).table.equals(BATCHES[0])
    assert found.record_stamp(0) == stamp
    assert found.stored().records == {0: size}
    assert size == stamp[0] + sum(path.stat().st_size for path in kept(tmp_path))


@pytest.mark.slow
def test_every_damaged_byte_of_a_file_is_found(tmp_path: Path) -> None:
    log(tmp_path).write_record(0, record(tmp_path))
    (path,) = kept(tmp_path)
    content = path.read_bytes()
    for position in range(len(content)):
        path.unlink()
        path.write_bytes(content[:position] + bytes([content[position] ^ 0x10]) + content[position + 1 :])
        with pytest.raises(StateError, match=r"\.block is damaged"):
            log(tmp_path).read_record(0)
    for length in (0, 1, len(content) - 1):
        path.unlink()
        path.write_bytes(content[:length])
        with pytest.raises(StateError, match=r"\.block is damaged"):
            log(tmp_path).read_record(0)
    path.unlink()
    with pytest.raises(StateError, match=r"\.block is missing"):
        log(tmp_path).read_record(0)


def test_files_of_a_record_are_durable_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    sync, replace = os.fsync, os.replace

    def fsync(handle: int) -> None:
        done.append(os.path.basename(os.readlink(f"/proc/self/fd/{handle}")).rpartition(".")[2])
        sync(handle)

    def renamed(source: str, target: str) -> None:
        done.append("renamed")
        replace(source, target)

    (tmp_path / "s" / "p" / "0").mkdir(parents=True)
    monkeypatch.setattr(files_module.os, "fsync", fsync)
    monkeypatch.setattr(files_module.os, "replace", renamed)
    log(tmp_path).write_record(0, record(tmp_path))
    assert done == ["block", "0", "tmp", "renamed", "0"]  # "0" is the folder


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    log(tmp_path).write_record(0, record(tmp_path))

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files_module.os, fails, no_space)
    with pytest.raises(StateError, match=r"cannot write .*No space left"):
        log(tmp_path).write_record(0, Record(BATCHES[1], 6, "{}", parts=record(tmp_path, 1).parts))
    monkeypatch.undo()
    assert log(tmp_path).read_record(0).table.equals(BATCHES[0])


@pytest.mark.parametrize("why", ["another file system", "an earlier folder"])
def test_where_a_file_cannot_be_kept_its_rows_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    def refused(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    if why == "another file system":
        monkeypatch.setattr(files_module.os, "link", refused)
    own = log(tmp_path, format=3 if why == "an earlier folder" else 4)
    own.write_record(0, record(tmp_path))
    assert kept(tmp_path) == []
    assert own.read_record(0).table.equals(BATCHES[0])


def test_files_go_with_their_records(tmp_path: Path) -> None:
    own = log(tmp_path)
    for batch in range(4):
        own.write_record(batch, record(tmp_path, batch))
    own.write_record(1, record(tmp_path, 1))  # of a repetition that Spark has packed anew
    own.write_snapshot(3, {"left": BATCHES[0]}, 1)
    assert len(kept(tmp_path)) == 4
    own.prune(3, own.stored())
    (last,) = kept(tmp_path)
    assert last.name.startswith(f"{3:020d}.")
    assert own.read_record(3).table.equals(BATCHES[3])


def test_a_partition_goes_on_from_files(tmp_path: Path) -> None:
    """Loaded anew before each micro-batch, of which each comes twice."""
    state = str(tmp_path / "s")
    for batch, rows in enumerate(BATCHES):
        for attempt in range(2):
            parts = tuple(left(tmp_path / f"run{attempt}" / str(batch), rows))
            partition = PartitionState(make_command(batch, state))
            answer = partition.apply(batch, rows, WIRE, parts=parts)  # type: ignore[arg-type]
            partition.close()
            assert answer.changelog.equals(ANSWERS[batch])
        for other in (tmp_path / f"run{attempt}" / str(batch) for attempt in range(2)):
            other.rename(tmp_path / f"{other.parent.name}-{batch}")
    assert len(kept(tmp_path)) == len(BATCHES)


def size_of(root: Path) -> int:
    return sum(path.stat().st_size for path in (root / "s").rglob("*") if path.is_file())


def test_a_micro_batch_that_is_repeated_leaves_its_rows_once(tmp_path: Path) -> None:
    """Twelve repetitions were twelve times the rows, until there was a snapshot."""
    partition, sizes = PartitionState(make_command(0, str(tmp_path / "s"))), []
    for attempt in range(12):
        parts = tuple(x for x in left(tmp_path / f"run{attempt}" / "0", BATCHES[0]) if isinstance(x, FilePart))
        assert partition.apply(0, BATCHES[0], WIRE, parts=parts).changelog.equals(ANSWERS[0])
        sizes.append(size_of(tmp_path))
    assert max(sizes) <= 1.01 * sizes[0]
    assert len(kept(tmp_path)) == 1
    assert partition.apply(1, BATCHES[1], WIRE).changelog.equals(ANSWERS[1])
    partition.close()
    assert log(tmp_path).read_record(0).table.equals(BATCHES[0])


@pytest.mark.parametrize("dies", ["with its record", "before its record"])
def test_a_crash_loop_leaves_no_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: str) -> None:
    """A server that ends in each attempt never makes a snapshot."""

    def gone(*_: object) -> None:
        raise ConnectionResetError("gone")

    sizes = []
    for attempt in range(6):
        partition = PartitionState(make_command(0, str(tmp_path / "s")))
        parts = tuple(x for x in left(tmp_path / f"run{attempt}" / "0", BATCHES[0]) if isinstance(x, FilePart))
        if dies == "before its record" and attempt < 5:
            monkeypatch.setattr(PartitionLog, "try_to_clean", lambda *_: None)  # it is no more
            monkeypatch.setattr(durable, "_write", gone)
            with pytest.raises(ConnectionResetError, match="gone"):
                partition.apply(0, BATCHES[0], WIRE, parts=parts)
            monkeypatch.undo()
        else:
            partition.apply(0, BATCHES[0], WIRE, parts=parts)
        sizes.append(size_of(tmp_path))
    assert len(kept(tmp_path)) == 1
    assert max(sizes) <= 2 * sizes[-1]
    assert log(tmp_path).read_record(0).table.equals(BATCHES[0])


def test_a_record_that_cannot_be_written_leaves_no_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = log(tmp_path)
    own.write_record(0, record(tmp_path))
    before = kept(tmp_path)

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for attempt in range(3):
        monkeypatch.setattr(files_module.os, "replace", no_space)
        for batch in (0, 1):
            with pytest.raises(StateError, match="No space left"):
                own.write_record(batch, record(tmp_path / str(attempt), batch))
        monkeypatch.undo()
        assert kept(tmp_path) == before
    assert own.read_record(0).table.equals(BATCHES[0])


def test_a_server_that_writes_loses_no_rows_to_one_that_removes_leftovers(tmp_path: Path) -> None:
    """Two servers have a partition, one of them stopped while it writes a record or removes leftovers."""
    slow, other = log(tmp_path), log(tmp_path)
    with slow.writing() as held:
        assert held
        (named,) = {part.block.file for part in slow._keep(0, record(tmp_path).parts)}
        assert other.stored().records == {}  # the other one loads the partition
        other.write_record(0, record(tmp_path / "again"))
        other.write_record(0, record(tmp_path / "and again"))
        assert named in {path.name for path in kept(tmp_path)}
        assert len(kept(tmp_path)) == 3
    other.write_record(1, record(tmp_path, 1))
    assert len(kept(tmp_path)) == 2, "the next record makes up for it"
    with slow._files.locked(slow._folder, alone=True) as alone:
        assert alone
        other.write_record(2, record(tmp_path, 2))
    assert len(kept(tmp_path)) == 2, "its rows are in the record itself"
    assert other.read_record(2).table.equals(BATCHES[2])


def test_what_is_damaged_is_no_leftover(tmp_path: Path) -> None:
    """The files of a record that cannot be read stay for whoever restores it."""
    log(tmp_path).write_record(0, record(tmp_path))
    (head,) = (tmp_path / "s" / "p" / "0").glob("*.arrow")
    content = head.read_bytes()
    for damaged_content in (
        content[:-1],
        content[:100],
        bytes([content[200] ^ 1]).join([content[:200], content[201:]]),
    ):
        head.write_bytes(damaged_content)
        log(tmp_path).stored()
        assert len(kept(tmp_path)) == 1
    head.write_bytes(content)
    assert log(tmp_path).read_record(0).table.equals(BATCHES[0])


def random_life(root: Path, seed: int) -> None:
    """Repetitions, failures and restarts of two servers of a partition: all is read, and nothing is left over."""
    choice = random.Random(seed)
    state, attempts = str(root / "s"), itertools.count()
    servers = [PartitionState(make_command(0, state)) for _ in range(2)]
    sync = os.fsync

    def sometimes(handle: int) -> None:
        if choice.random() < 0.05:
            raise OSError(28, "No space left on device")
        sync(handle)

    for batch, rows in enumerate(BATCHES):
        done = False
        while not done or choice.random() < 0.5:
            at = choice.randrange(2)
            if choice.random() < 0.2:
                servers[at] = PartitionState(make_command(0, state))  # the other one was killed
            kept_at = root / f"run{next(attempts)}" / str(batch)
            parts = tuple(x for x in left(kept_at, rows, inline=(choice.randrange(5),)) if isinstance(x, FilePart))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(files_module.os, "fsync", sometimes)
                try:
                    answer = servers[at].apply(batch, rows, WIRE, parts=parts if choice.random() < 0.8 else ())
                except StateError as error:
                    if "No space" not in str(error):
                        raise
                    continue
            assert answer.changelog.equals(ANSWERS[batch]), (seed, batch)
            done = True
    last = log(root)
    stored = last.stored()
    for batch in stored.records:
        assert last.read_record(batch).table.equals(BATCHES[batch]), (seed, batch)
    named = set.union(set(), *(last._named(batch, set()) for batch in stored.records))
    assert {path.name for path in kept(root)} == named, seed


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(n, marks=pytest.mark.thorough) for n in range(2, 24))])
def test_random_lives_of_a_partition_leave_nothing_over(tmp_path: Path, seed: int) -> None:
    random_life(tmp_path, seed)


@pytest.mark.slow
def test_many_random_lives_of_a_partition(tmp_path: Path) -> None:
    first = int(os.environ.get("GPU_JOIN_SEED", "1000"))
    for seed in range(first, first + int(os.environ.get("GPU_JOIN_TRACES", "200"))):
        random_life(tmp_path / str(seed), seed)
        shutil.rmtree(tmp_path / str(seed))


def test_a_damaged_message_never_comes_into_the_log(server: Server, tmp_path: Path) -> None:
    """Its checksum was looked at when the log was read, weeks later."""
    folder = tmp_path / "run" / "0"
    parts = left(folder, BATCHES[0])
    (file,) = folder.iterdir()
    content = bytearray(file.read_bytes())
    for at in (len(content) // 2, len(content) - 9):  # within values, which any bytes can be
        content[at] ^= 1
        file.write_bytes(content)
        with pytest.raises(StateError, match=r"rows of this micro-batch lie in .* its checksum does not fit"):
            exchanged(server, make_command(0, str(tmp_path / "s")), parts)
        content[at] ^= 1
    assert kept(tmp_path) == []
    file.write_bytes(content)
    assert exchanged(server, make_command(0, str(tmp_path / "s")), parts).equals(ANSWERS[0])


def strange_paths(root: Path) -> dict[str, str]:
    """Where a request could have a server make, remove or read what is not its application's."""
    (root / "link").symlink_to(root.parent)
    (root / "linked").mkdir()
    (root / "linked" / "7").symlink_to(root / "elsewhere")
    return {
        "elsewhere": "/tmp/run/7", "up": f"{root}/run/../7", "up, as a run": f"{root}/../7", "relative": "run/7",
        "itself": str(root), "a run": f"{root}/run", "deeper": f"{root}/run/7/8/9", "no number": f"{root}/run/x",
        "a name that begins so": f"{root}x/run/7", "twice": f"{root}//run/7", "a slash more": f"{root}/run/7/",
        "a link": f"{root}/link/7", "a linked number": f"{root}/linked/7", "empty": "", "NUL": f"{root}/run/7\0",
        "a line": f"{root}/run/7\n", "long": f"{root}/{'x' * 5000}/7", "digits of others": f"{root}/run/\u0667",
    }  # fmt: skip


def test_an_answer_is_left_in_the_application_s_own_folder_or_refused(tmp_path: Path) -> None:
    """Any folder could be named: what has a lesser number beside it was removed."""
    root = tmp_path / "shared"
    (root / "run" / "3").mkdir(parents=True)
    (root / "elsewhere").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with Server(tmp_path / "log", "--blocks", str(root)) as running, Server(tmp_path / "log2") as alone:
        for name, path in strange_paths(root).items():
            with pytest.raises(DescriptionError, match=r"is no path below|leads elsewhere"):
                exchanged(running, make_command(0, str(tmp_path / "s"), answers=path), BATCHES[0].to_batches())
            assert not (tmp_path / "s").exists(), name
        own = str(root / "run" / "7")
        with pytest.raises(DescriptionError, match="is no path below a folder that this server has of its callers"):
            exchanged(alone, make_command(0, str(tmp_path / "s"), answers=own), BATCHES[0].to_batches())
        assert {*before} - {*tmp_path.rglob("*")} == set(), "removed"
        command = make_command(0, str(tmp_path / "s"), answers=own)
        assert exchanged(running, command, BATCHES[0].to_batches()).equals(ANSWERS[0])


def test_rows_are_read_in_the_application_s_own_folder_or_refused(tmp_path: Path) -> None:
    root = tmp_path / "shared"
    parts = left(root / "run" / "0", BATCHES[0])
    (file,) = (root / "run" / "0").iterdir()
    (root / "run" / "0" / "linked").symlink_to(file)
    shutil.copy(file, tmp_path / "copy")
    os.mkfifo(root / "run" / "0" / "pipe")
    with Server(tmp_path / "log", "--blocks", str(root)) as running:
        strange = [*strange_paths(root).values(), str(tmp_path / "copy"), f"{root}/run/0/../0/{file.name}"]
        strange += [f"{root}/run/0/linked", f"{root}/run/0/pipe", f"{root}/run/0/none"]
        for path in strange:
            moved = [x._replace(block=x.block._replace(file=path)) for x in parts if isinstance(x, FilePart)]
            with pytest.raises(GpuJoinError, match=r"is no path below|leads elsewhere|is no file|No such file"):
                exchanged(running, make_command(0, str(tmp_path / "s")), moved)
        assert not kept(tmp_path)
        assert exchanged(running, make_command(0, str(tmp_path / "s")), parts).equals(ANSWERS[0])


@pytest.mark.parametrize(
    "run", ["a-1", "Größe", "a_b", "../x", "", "x" * 300, "a\n", "5dd0c6b2-5f3b-4d3e-9c5e-0d6f3a1b2c4d"]
)
def test_what_tasks_are_told_of_a_run_is_taken_by_servers(tmp_path: Path, run: str) -> None:
    folder = blocks.Blocks(str(tmp_path), 1).of(run, 7)
    if folder is not None:
        assert blocks.checked(str(folder), str(tmp_path), file=False) == folder
        assert left(folder, BATCHES[0])
        (file,) = folder.iterdir()
        assert blocks.checked(str(file), str(tmp_path), file=True) == file
    assert (folder is not None) == (run in ("a-1", "5dd0c6b2-5f3b-4d3e-9c5e-0d6f3a1b2c4d"))


def test_strange_names_beside_those_of_micro_batches_are_no_error(tmp_path: Path) -> None:
    for name in ("lost+found", ".nfs0001", "x", "-1"):
        (tmp_path / "run" / name).mkdir(parents=True)
    assert left(tmp_path / "run" / "3", BATCHES[0])
    assert (tmp_path / "run" / "lost+found").exists()


def test_files_are_on_their_way_to_the_disk_while_their_rows_are_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    prepare = OperatorEngine.prepare_batches

    class Library:
        def sync_file_range(self, handle: int, *rest: Any) -> None:
            begin, end, flags = rest
            asked.append((os.readlink(f"/proc/self/fd/{handle}"), begin.value, end.value, flags))

    def prepared(*args: Any, **options: Any) -> Any:
        asked.append("joined")
        return prepare(*args, **options)

    monkeypatch.setattr(files_module.ctypes, "CDLL", lambda _: Library())
    monkeypatch.setattr(OperatorEngine, "prepare_batches", prepared)
    parts = tuple(x for x in left(tmp_path / "run" / "0", BATCHES[0]) if isinstance(x, FilePart))
    partition = PartitionState(make_command(0, str(tmp_path / "s")))
    partition.apply(0, BATCHES[0], WIRE, parts=parts)
    assert asked == [(parts[0].block.file, 0, 0, 2), "joined"]


# --- between processes ---------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path) -> Any:
    with Server(tmp_path / "log", "--blocks", str(tmp_path)) as running:
        yield running


def exchanged(server: Server, command: ApplyCommand, rows: list[Any], location: str | None = None) -> pa.Table:
    first = [location] if location is not None else []

    def locate(_: str | None) -> tuple[Address, dict[str, Any]]:
        return Address(first.pop() if first else server.address, TOKEN), {}

    exchange = Exchange(locate, json.loads(dataclasses.replace(command, counted=True).to_json()), WIRE_SCHEMA)
    return pa.Table.from_batches(exchange.run(iter(rows)), make_join().output_schema)


def test_an_answer_is_left_and_taken(server: Server, tmp_path: Path) -> None:
    state = str(tmp_path / "s")
    for batch, rows in enumerate(BATCHES):
        folder = tmp_path / "run" / str(batch)
        command = make_command(batch, state, answers=str(folder))
        parts = left(folder, rows, inline=(1,))
        for _ in range(2):  # the second is an attempt that Spark makes as the first is slow
            assert exchanged(server, command, parts).equals(ANSWERS[batch])
        assert not [path for path in folder.iterdir() if "-" not in path.name], "nobody has taken the answer"
        assert [path.name for path in folder.parent.iterdir()] == [str(batch)], "an earlier micro-batch is there still"


def test_a_small_answer_comes_over_the_connection(server: Server, tmp_path: Path) -> None:
    command = make_command(0, answers=str(tmp_path / "run" / "0"), least_bytes=1 << 20)
    assert exchanged(server, command, BATCHES[0].to_batches()).equals(ANSWERS[0])
    assert not (tmp_path / "run").exists()


def test_a_small_file_is_not_kept(server: Server, tmp_path: Path) -> None:
    for batch, least in enumerate((1 << 20, 1)):
        command = make_command(batch, str(tmp_path / "s"), answers=str(tmp_path / "run" / "0"), least_bytes=least)
        assert exchanged(server, command, left(tmp_path / "run" / "0", BATCHES[batch])).equals(ANSWERS[batch])
        assert len(kept(tmp_path)) == batch


def test_an_answer_for_which_there_is_no_room_comes_over_the_connection(server: Server, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    command = make_command(0, answers=str(tmp_path / "run" / "0"))
    assert exchanged(server, command, BATCHES[0].to_batches()).equals(ANSWERS[0])
    assert "an answer goes over the connection" in server.said()


def test_an_answer_that_is_gone_is_asked_for_again(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, own = [True], blocks.take

    def take(path: str) -> Any:
        if gone.pop() if gone else False:
            Path(path).unlink()
        return own(path)

    monkeypatch.setattr("gpu_ops.spark.wire.exchange.take", take)
    folder = tmp_path / "run" / "0"
    command = make_command(0, str(tmp_path / "s"), answers=str(folder))
    assert exchanged(server, command, left(folder, BATCHES[0])).equals(ANSWERS[0])


def test_a_killed_server_s_rows_are_there_for_the_next(tmp_path: Path) -> None:
    state = str(tmp_path / "s")
    shared = "--blocks", str(tmp_path)
    with Server(tmp_path / "a", *shared) as first, Server(tmp_path / "b", *shared) as second:
        for batch, rows in enumerate(BATCHES):
            folder = tmp_path / "run" / str(batch)
            command, parts = make_command(batch, state, answers=str(folder)), left(folder, rows, inline=(2,))
            if batch == 3:
                exchanged(first, command, parts)  # nobody has heard of it
                first.process.kill()
                first.process.wait(20)
            used, failed = (first, None) if batch < 3 else (second, first.address if batch == 3 else None)
            assert exchanged(used, command, parts, failed).equals(ANSWERS[batch])


def test_rows_that_are_gone_are_an_error_that_says_so(server: Server, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "0"
    parts = left(folder, BATCHES[0])
    folder.rename(tmp_path / "gone")
    with pytest.raises(
        StateError, match=r"rows of this micro-batch lie in .*cannot be read there.*Start the query again"
    ):
        exchanged(server, make_command(0, str(tmp_path / "s")), parts)
    (tmp_path / "gone").rename(folder)
    assert exchanged(server, make_command(0, str(tmp_path / "s")), parts).equals(ANSWERS[0])


def test_what_a_killed_application_has_left_goes_with_the_next(tmp_path: Path) -> None:
    program = """
import sys, time
from pathlib import Path
from gpu_ops.state import files
made = files.temporary_folder(Path(sys.argv[1]))
(made / "run" / "3").mkdir(parents=True)
(made / "run" / "3" / "x-0").touch()
print(made, flush=True)
time.sleep(60)
"""
    owner = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    with owner.stdout:
        made = Path(owner.stdout.readline().strip())
    second = files_module.temporary_folder(tmp_path)
    assert (made / "run" / "3" / "x-0").exists(), "its owner lives"
    owner.kill()
    owner.wait(20)
    third = files_module.temporary_folder(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([second, third])
    for own in (second, third):
        files_module.remove_temporary(own)


def damaged(part: FilePart, **changes: Any) -> list[Any]:
    return json.loads(json.dumps(part._replace(**changes)))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ({"sequence": 1}, "DescriptionError"),
        ({"sequence": -1}, "DescriptionError"),
        ({"number": "x"}, "DescriptionError"),
        ({"block": ["f"]}, "DescriptionError"),
        ({"block": None}, "DescriptionError"),
        ({"union_columns": (0, 1, 2, 99)}, "StateError"),
        ({"number": 7}, "BadInputError"),
    ],
)
def test_damaged_places(server: Server, tmp_path: Path, wrong: dict[str, Any], kind: str) -> None:
    part = left(tmp_path / "run" / "0", BATCHES[0])[0]
    assert isinstance(part, FilePart)
    descriptor = flight.FlightDescriptor.for_command(make_command(0).to_json().encode())
    writer, reader = server.client.do_exchange(descriptor, call_options())
    writer.begin(WIRE_SCHEMA)
    writer.write_metadata(json.dumps({"part": damaged(part, **wrong)}).encode())
    writer.done_writing()
    with pytest.raises(flight.FlightServerError) as caught:
        reader.read_all()
    content, _ = json.JSONDecoder().raw_decode(str(caught.value))
    assert content["type"] == kind, content


def test_no_place() -> None:
    for wrong in (None, [], 3, {"a": 1}, "abcd", [0, [], 0, ["f", 0, 0, 0, True, 5]]):
        with pytest.raises(DescriptionError, match="no rows in a file"):
            FilePart.of(wrong)  # type: ignore[arg-type]


def test_a_message_is_mapped_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, own = list[str](), blocks.mapped
    monkeypatch.setattr(blocks, "mapped", lambda path: (opened.append(path), own(path))[1])
    mapped = Mapped(str(tmp_path))
    for part in left(tmp_path / "run" / "0", BATCHES[0]):
        assert isinstance(part, FilePart)
        part.rows(mapped.message(part.block), WIRE_SCHEMA)
    assert len(opened) == 1
