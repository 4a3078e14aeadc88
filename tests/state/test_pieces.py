"""Snapshots in pieces: what is put together from them is the state, and each row is written a few times at most."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from concurrent.futures import wait
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from conftest import combined

from gpu_ops.backends import make_kernels
from gpu_ops.descriptions.inputs import Input
from gpu_ops.errors import StateError
from gpu_ops.join_engine import JoinEngine
from gpu_ops.operators.core.key_table import KeyTable
from gpu_ops.spark.server import recovery
from gpu_ops.state import pieces
from gpu_ops.state import table as table_module
from gpu_ops.state.durable import PartitionLog
from gpu_ops.state.files import Files
from gpu_ops.state.index import HashIndex
from gpu_ops.state.keyed_table import KeyedTable
from gpu_ops.state.manifest import Manifest
from gpu_ops.state.pieces import Content, Flush, Piece, StoredTable, merges, renumbered, write
from gpu_ops.state.table import ENTRIES_FORMAT, LIVE, KeySet, StateTable
from state.support import WIRE, PartitionState, expected, make_command, wire_batches
from state.test_rescale import CASES, Partitions, counted

BATCHES = wire_batches(12, seed=4)
ANSWERS = expected(BATCHES)


PINNED = [
    1984110229064502274, 11358274383384434530, 9199898441389587767, 1787982378754665873, 14938078201742323113,
    1787982378754665873, 617671955979563087, 15876563766119949059, 1780977407286985090,
]  # fmt: skip
"""Sums of hashes, see `test_hashes_are_those_of_stored_entries`."""


def opened(folder: Path, **options: Any) -> PartitionState:
    return PartitionState(make_command(state=str(folder), options={"tiny": True, "snapshot_every": 2, **options}))


def files_of(folder: Path, suffix: str) -> list[Path]:
    return sorted((folder / "p" / "0").glob(f"*.{suffix}"))


# --- which pieces there are ----------------------------------------------------------------------


def piece(rows: int, *, name: str | None = "x", left: int | None = None) -> Piece:
    """Each row has a byte."""
    found = Piece(name, rows, rows)
    return found if left is None else found.having(np.arange(rows) < left)


def test_small_pieces_are_merged_and_large_ones_stay() -> None:
    """A worked example: seven at a time, of 1,000 bytes at most, none of them eight times as large."""
    new = piece(10, name=None)
    assert merges([], 1000) == ()
    assert merges([piece(50), piece(5)], 1000) == (range(1), range(1, 2))  # nothing is new
    assert merges([*[piece(9)] * 6, new], 1000) == (*(range(n, n + 1) for n in range(7)),)
    assert merges([*[piece(9)] * 7, new], 1000) == (range(8),)
    assert merges([piece(200), *[piece(9)] * 7, new], 1000) == (range(1), range(1, 9))
    assert merges([piece(81), *[piece(9)] * 6, new], 1000) == (*(range(n, n + 1) for n in range(8)),)
    assert merges([*[piece(70)] * 7, *[piece(9)] * 7, new], 1000) == (range(15),)
    assert merges([*[piece(70)] * 7, *[piece(9)] * 7, new], 500) == (
        *(range(n, n + 1) for n in range(7)),
        range(7, 15),
    )
    assert merges([piece(10, left=0), *[piece(9)] * 7, new], 1000) == (range(1, 9),)


def test_obsolete_rows_are_left_out_of_what_is_written_again() -> None:
    """Of a piece that has lost less than half only the numbers are; they stand where its rows do."""
    files = {"a": Content(pa.table({"v": range(4)}), {}), "b": Content(pa.table({"v": range(4, 8)}), {})}
    present_a, present_b = np.array([1, 0, 1, 1], bool), np.array([0, 0, 1, 0], bool)
    flush = Flush(
        (Piece("a", 4, 4).having(present_a), Piece("b", 4, 4).having(present_b), Piece(None, 1, 1)),
        pa.table({"v": [8]}),
        {pieces.STATUS_COLUMN: np.array([1, 0, 1, 1, 1], np.int8), "n": np.array([10, 12, 13, 16, 18])},
    )

    def store(content: Content) -> str:
        name = f"new {len(files)}"
        files[name] = content
        return name

    written = write(flush, files.__getitem__, store, most=0)
    assert written.pieces == (("a", 4), ("new 2", 1), ("new 3", 1))
    assert files["new 2"].rows["v"].to_pylist() == [6]
    assert written.numbers["n"].to_pylist() == [10, 0, 12, 13, 16, 18]
    stored = StoredTable(written.numbers.to_reader, written.pieces, written.columns, files.__getitem__)
    parts = list(stored.parts())
    assert [row for part in parts for row in part.rows["v"].to_pylist()] == [0, 3, 6, 8]
    assert [n for part in parts for n in part.numbers["n"].tolist()] == [10, 13, 16, 18]
    # a compaction beside the writing drops slot 1 (the row 2), which no longer counted, and slot 3 (the row 6)
    now = renumbered(flush.pieces, np.array([1, 0, 1, 0, 1], bool))
    assert [p.slots for p in written.installed(flush.pieces, now)] == [2, 0, 1]


@pytest.mark.parametrize("seed", range(20))
def test_compactions_at_any_moment_lose_no_row(seed: int) -> None:
    """Rows come and go, pieces are written, and compactions come before, between and after; all is there in the end."""
    rng, files = np.random.default_rng(seed), dict[str, Content]()
    table: list[int] = []  # by slot, negative where it is dead
    own: tuple[Piece, ...] = ()

    def store(content: Content) -> str:
        files[name := str(len(files))] = content
        return name

    def compact() -> None:
        nonlocal table, own
        own = renumbered(own, np.array([row > 0 for row in table], bool))
        table = [row for row in table if row > 0]

    for number in range(40):
        table += range(100 * number + 1, 100 * number + 1 + int(rng.integers(0, 30)))
        for slot in rng.choice(len(table), int(rng.integers(0, len(table) // 3 + 1)), replace=False):
            table[slot] = -abs(table[slot])
        if rng.random() < 0.3:
            compact()
        first = sum(p.slots for p in own)
        rows = pa.table({"v": pa.array(map(abs, table[first:]), pa.int64())})
        own = (*own, Piece(None, len(rows), rows.nbytes)) if len(rows) else own
        status = np.array([row > 0 for row in table], np.int8)
        flush = Flush(own, rows, {pieces.STATUS_COLUMN: status})
        written = write(flush, files.__getitem__, store, int(rng.integers(0, 400)))
        stored = StoredTable(written.numbers.to_reader, written.pieces, written.columns, files.__getitem__)
        assert [v for part in stored.parts() for v in part.rows["v"].to_pylist()] == [row for row in table if row > 0]
        assert all(2 * p.slots >= p.rows for p in written.installed(flush.pieces, own))
        if rng.random() < 0.3:
            compact()
        own = written.installed(flush.pieces, own)
        assert sum(p.slots for p in own) == len(table)


# --- index entries -------------------------------------------------------------------------------


def entries_of(table: StateTable) -> dict[str, list[int]]:
    """Of each index all entries, in order."""
    found = {}
    for name, index in table.indexes.items():
        assert isinstance(index, HashIndex)
        assert all((run.entries[1:] > run.entries[:-1]).all() for run in index.runs)
        found[name] = np.sort(np.concatenate([np.empty(0, np.uint64), *(run.entries for run in index.runs)])).tolist()
    return found


class Rows:
    """Tables of one input that rows come into and go from, and how they are restored."""

    def __init__(self, kind: str) -> None:
        self.kernels, _ = make_kernels("cpu", tiny_segments=True)
        self.schema = pa.schema([("k", pa.int32()), ("s", pa.string()), ("id", pa.int64())])
        self.kind, self.next = kind, 0
        self.table = self.empty()

    def empty(self) -> Any:
        if self.kind == "keys":
            return KeyTable(self.kernels, self.schema, {}, "keys", by_first=True)
        sets = [KeySet(("k",), (pa.int64(),), ("k",)), KeySet(("s", "k"), (pa.string(), pa.int32()), ("s",))]
        source = Input("left", self.schema, unique_key=("id",), row_kind="op", updates="retract")
        return KeyedTable(self.kernels, source, sets, counts=["__count"], findable=True)

    def change(self, rng: np.random.Generator) -> None:
        table, size = self.table, int(rng.integers(1, 30))
        ids = range(self.next, self.next + size)
        keys = [None if n % 5 == 0 else n % 11 for n in ids]
        rows = pa.table([keys, [None if n % 7 == 0 else str(n % 3) for n in ids], list(ids)], schema=self.schema)
        self.next += size
        frame, killed = self.kernels.frame(rows), np.flatnonzero(table.status.values == LIVE)
        killed = killed[rng.random(killed.size) < 0.2]
        if self.kind == "keys":
            table.locate(frame)
            table.end(killed)
        else:
            table.prepare(frame, table.hash_identity(frame), killed)
        table.commit(0)


@pytest.mark.parametrize(("kind", "seed"), combined(["rows", "keys"], range(6)))
def test_a_restart_from_stored_index_entries_equals_a_computed_one(kind: str, seed: int) -> None:
    """After flushes, merges, compactions and pieces that are half obsolete; an earlier version wrote some."""
    rng, files, rows = np.random.default_rng(seed), dict[str, Content](), Rows(kind)
    table, stored_some = rows.table, 0

    def store(content: Content) -> str:
        for label, entries in content.entries.items():
            assert entries.tolist() == table.entries_of(content.rows)[label].tolist()
        files[name := str(len(files))] = content if rng.random() < 0.8 else Content(content.rows, {})
        return name

    for _ in range(40):
        for _ in range(int(rng.integers(1, 4))):
            rows.change(rng)
        flush = table.flush()
        written = write(flush, files.__getitem__, store, int(rng.integers(0, 4000)))
        if rng.random() < 0.3:
            table.compact()
        table.pieces = written.installed(flush.pieces, table.pieces)
        stored = StoredTable(written.numbers.to_reader, written.pieces, written.columns, files.__getitem__)
        computed = dataclasses.replace(stored, read=lambda name: Content(files[name].rows, {}))
        found, expected = rows.empty(), rows.empty()
        found.restore(stored, lambda: None)
        expected.restore(computed, lambda: None)
        assert all(len(index.runs) <= 1 for index in found.indexes.values())
        assert entries_of(found) == entries_of(expected)
        assert found.snapshot().equals(expected.snapshot())
        stored_some += any(files[name].entries for name, _ in written.pieces)
        if rng.random() < 0.2:
            rows.table = table = found
    assert stored_some > 10


def test_entries_of_another_format_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, files = Rows("rows"), dict[str, Content]()
    rows.change(np.random.default_rng(0))

    def store(content: Content) -> str:
        files["a"] = Content(content.rows, {label: entries[:0] for label, entries in content.entries.items()})
        return "a"

    written = write(rows.table.flush(), files.__getitem__, store, 0)
    stored = StoredTable(written.numbers.to_reader, written.pieces, written.columns, files.__getitem__)
    taken, computed = rows.empty(), rows.empty()
    taken.restore(stored, lambda: None)
    assert not any(entries_of(taken).values())  # it does go by what is stored
    monkeypatch.setattr(table_module, "ENTRIES_FORMAT", ENTRIES_FORMAT + 1)
    computed.restore(stored, lambda: None)
    assert entries_of(computed) == entries_of(rows.table)


def test_hashes_are_those_of_stored_entries() -> None:
    """Where this fails the CPU's hashes have changed: raise `gpu_ops.state.table.ENTRIES_FORMAT`, then the numbers."""
    kernels, _ = make_kernels("cpu")
    columns: dict[str, pa.Array] = {
        "int": pa.array([1, -1, None], pa.int32()),
        "float": pa.array([0.5, -0.0, float("nan")]),
        "text": pa.array(["a", "", None]),
        "time": pa.array([0, 1, None], pa.timestamp("us", "UTC")),
        "decimal": pa.array([Decimal("1.50"), Decimal("-7.25"), None], pa.decimal128(9, 2)),
        "bool": pa.array([True, False, None]),
        "list": pa.array([[1, 2], [], None], pa.list_(pa.int64())),
        "struct": pa.array([{"x": 1}, {"x": None}, None], pa.struct([("x", pa.int64())])),
    }
    frame = kernels.frame(pa.table(columns))
    kinds = [column.type for column in columns.values()]
    hashes = [kernels.hash_rows(frame, [name], [kind]) for name, kind in zip(columns, kinds, strict=True)]
    hashes.append(kernels.hash_rows(frame, list(columns), kinds))
    assert ENTRIES_FORMAT == 1
    assert [int(own.sum()) for own in hashes] == PINNED


# --- in a state folder ---------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "seed"), combined(list(CASES), range(3)))
def test_a_partition_that_is_opened_again_and_again(name: str, seed: int, tmp_path: Path) -> None:
    case, rng = CASES[name], np.random.default_rng(seed)
    engine, partitions = JoinEngine(case.join, "cpu"), Partitions(case, tmp_path, 1, tiny=True)
    for batch, table in enumerate(case.batches):
        rows, under = case.wire.split(case.join, table), case.under(batch)
        if under.get("watermark", 0) is None:
            under = {"watermark": (None, None)}
        said = engine.process(*rows.tables, orders=rows.sequences, clock_ms=case.clocks[batch], **under)
        assert counted(partitions.apply(batch)) == counted([said]), batch
        if rng.random() < 0.4:
            partitions.open()
    assert files_of(tmp_path, "piece")


def named_pieces(partition: PartitionState) -> set[str]:
    """The pieces that the newest snapshot of a partition names."""
    assert partition._log is not None
    newest = max(partition._log.stored(clean=False).snapshots, default=0)
    tables = partition._log.read_snapshot(newest)[0] if newest else {}
    return {name for table in tables.values() if isinstance(table, StoredTable) for name, _ in table.pieces}


def test_pieces_that_nothing_names_go_with_the_next_snapshot(tmp_path: Path) -> None:
    partition = opened(tmp_path)
    for batch, answer in enumerate(ANSWERS):
        assert partition.apply(batch, BATCHES[batch], WIRE).changelog.equals(answer)
        (snapshot, *more) = files_of(tmp_path, "snapshot") or [None]
        assert not more
        if snapshot is not None:
            assert len(files_of(tmp_path, "piece")) <= 14
    named = named_pieces(partition)
    assert named
    assert named <= {path.name.removesuffix(".piece") for path in files_of(tmp_path, "piece")}


def test_pieces_that_nothing_names_go_where_servers_live_for_one_snapshot_each(tmp_path: Path) -> None:
    """Each is killed before its second one, which would delete what the first has left."""
    batches, unnamed = wire_batches(40, seed=4), []
    for number, batch in enumerate(batches):
        partition = opened(tmp_path)
        partition.apply(number, batch, WIRE)
        assert partition._snapshots is not None
        partition._snapshots.finish()
        there = {path.name.removesuffix(".piece") for path in files_of(tmp_path, "piece")}
        unnamed.append(len(there - named_pieces(partition)))
    assert 0 < max(unnamed) <= 8, unnamed


@pytest.mark.parametrize("harm", ["gone", "cut short", "damaged", "damaged index", "another's"])
def test_a_piece_that_is_not_what_it_was_is_named(harm: str, tmp_path: Path) -> None:
    partition = opened(tmp_path)
    for batch in range(5):
        partition.apply(batch, BATCHES[batch], WIRE)
    log = partition._log
    partition.close()
    found = files_of(tmp_path, "piece")
    assert log is not None
    indexed = [path for path in found if log.read_piece(path.stem).entries]
    path = indexed[-1]
    (entries, *_), content = log.read_piece(path.stem).entries.values(), path.read_bytes()
    path.unlink()
    if harm == "cut short":
        path.write_bytes(content[:-1])
    elif harm == "damaged":
        path.write_bytes(content[:-200] + bytes([content[-200] ^ 1]) + content[-199:])
    elif harm == "damaged index":
        place = content.index(entries.tobytes())
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    elif harm == "another's":
        path.write_bytes(next(other for other in found if other != path).read_bytes())
    said = {"gone": "is missing", "another's": "should be the piece"}.get(harm, "cut short|damaged")
    with pytest.raises(StateError, match=rf"{path.name}.*({said})"):
        opened(tmp_path).apply(5, BATCHES[5], WIRE)


def test_a_folder_of_the_version_before_index_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pieces are rows alone; what is merged or written anew from here on has entries."""
    monkeypatch.setattr(StateTable, "entries_of", lambda *_: {})
    partition = opened(tmp_path)
    for batch in range(6):
        assert partition.apply(batch, BATCHES[batch], WIRE).changelog.equals(ANSWERS[batch])
    assert partition._log is not None
    assert not any(partition._log.read_piece(path.stem).entries for path in files_of(tmp_path, "piece"))
    monkeypatch.undo()
    partition.close()
    partition = opened(tmp_path)
    for batch in range(6, len(ANSWERS)):
        assert partition.apply(batch, BATCHES[batch], WIRE).changelog.equals(ANSWERS[batch])
    assert partition._log is not None
    assert any(partition._log.read_piece(path.stem).entries for path in files_of(tmp_path, "piece"))


def test_a_snapshot_that_fails_half_way_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file that a snapshot writes fails once: the log goes on, and a later snapshot is whole."""
    for fails in range(3):
        folder, count = tmp_path / str(fails), [0]
        write_file = recovery.PartitionLog.write_pieces, PartitionLog.write_snapshot

        def sometimes(original: Any, fails: int = fails, count: list[int] = count) -> Any:
            def wrapped(*args: Any, **options: Any) -> Any:
                count[0] += 1
                if count[0] % 3 == fails:
                    raise StateError("no space left")
                return original(*args, **options)

            return wrapped

        monkeypatch.setattr(PartitionLog, "write_pieces", sometimes(write_file[0]))
        monkeypatch.setattr(PartitionLog, "write_snapshot", sometimes(write_file[1]))
        monkeypatch.setattr(recovery, "MIN_RECORDS", 1)
        partition = opened(folder)
        for batch, answer in enumerate(ANSWERS):
            assert partition.apply(batch, BATCHES[batch], WIRE).changelog.equals(answer), (fails, batch)
            if batch % 4 == 3:
                partition = opened(folder)
        monkeypatch.undo()
        assert count[0] > 6


def test_pieces_of_snapshots_that_fail_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk each attempt left what it had written until then, so the disk stayed full."""

    def full(*_: Any, **__: Any) -> int:
        raise StateError("no space left")

    monkeypatch.setattr(PartitionLog, "write_snapshot", full)
    monkeypatch.setattr(recovery, "MIN_RECORDS", 1)
    partition = opened(tmp_path)
    for batch, answer in enumerate(ANSWERS):
        assert partition.apply(batch, BATCHES[batch], WIRE).changelog.equals(answer)
        assert files_of(tmp_path, "piece") == []


def test_pieces_of_snapshots_that_a_crash_cut_short_do_not_pile_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that dies in each snapshot left another copy of the state each time."""

    def dies(*_: Any, **__: Any) -> int:
        raise KeyboardInterrupt

    for batch in range(3):
        opened(tmp_path).apply(batch, BATCHES[batch], WIRE)
    named = {path.name for path in files_of(tmp_path, "piece")}
    assert named
    most = 0
    for _ in range(4):
        partition = opened(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(PartitionLog, "write_snapshot", dies)
            patch.setattr(PartitionLog, "clean", lambda _: set())  # it is no more
            with contextlib.suppress(KeyboardInterrupt):
                for batch in (3, 4):
                    partition.apply(batch, BATCHES[batch], WIRE)
        most = max(most, len(files_of(tmp_path, "piece")))
        log = PartitionLog(Files.at(str(tmp_path)), Manifest.of(Files.at(str(tmp_path))), 0)
        log.stored()
        assert {path.name for path in files_of(tmp_path, "piece")} == named
    assert most > len(named)
    partition = opened(tmp_path)
    for batch in (4, 5):
        assert partition.apply(batch, BATCHES[batch], WIRE).changelog.equals(ANSWERS[batch])


def test_pieces_of_a_snapshot_that_is_being_written_are_no_leftovers(tmp_path: Path) -> None:
    """Another server loads the partition meanwhile."""
    for batch in range(3):
        opened(tmp_path).apply(batch, BATCHES[batch], WIRE)
    files = Files.at(str(tmp_path))
    slow, other = (PartitionLog(files, Manifest.of(files), 0) for _ in range(2))
    (first, *_) = files_of(tmp_path, "piece")
    coming = first.with_name(f"{99:020d}.{'a' * 16}.piece")
    coming.write_bytes(first.read_bytes())
    with slow.writing() as held:
        assert held
        other.stored()
        assert coming.exists()
    other.stored()
    assert not coming.exists()
    assert first.exists()


def test_two_servers_of_one_partition_take_nothing_from_each_other(tmp_path: Path) -> None:
    """One is slow, and goes on when Spark has turned to the other: what either writes can be read."""
    for seed in range(4):
        rng, folder = np.random.default_rng(seed), tmp_path / str(seed)
        servers = [opened(folder), opened(folder)]
        for batch, answer in enumerate(ANSWERS):
            for server in rng.permutation(2)[: int(rng.integers(1, 3))]:
                assert servers[server].apply(batch, BATCHES[batch], WIRE).changelog.equals(answer), (seed, batch)
        assert opened(folder).apply(len(ANSWERS) - 1, BATCHES[-1], WIRE).changelog.equals(ANSWERS[-1])


@pytest.mark.thorough
def test_what_snapshots_write_follows_the_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a state that is large against a micro-batch: records and snapshots are at most three times the records."""
    monkeypatch.setattr(recovery, "WHOLE_BYTES", 0)
    monkeypatch.setattr(recovery, "_WRITTEN_AT_ONCE", 1 << 30)
    monkeypatch.setattr(recovery, "RECORD_COST", 0)
    write_pieces, write_snapshot = PartitionLog.write_pieces, PartitionLog.write_snapshot
    snapshots: list[int] = []

    def pieces_too(*args: Any, **options: Any) -> Any:
        found = write_pieces(*args, **options)
        snapshots.append(sum(found[1].values()))
        return found

    def snapshot_too(*args: Any, **options: Any) -> int:
        snapshots.append(write_snapshot(*args, **options))
        return snapshots[-1]

    monkeypatch.setattr(PartitionLog, "write_pieces", pieces_too)
    monkeypatch.setattr(PartitionLog, "write_snapshot", snapshot_too)
    batches = [wire_batches(1, rows=20_000, seed=9)[0], *wire_batches(50, rows=400, seed=10)]
    partition, records = PartitionState(make_command(state=str(tmp_path))), 0
    for batch, table in enumerate(batches):
        if batch == 20:  # the first snapshot has all of the state
            snapshots.clear()
            records = 0
        partition.apply(batch, table, WIRE)
        records += (tmp_path / "p" / "0" / f"{batch:020d}.arrow").stat().st_size
    partition.close()
    assert len(files_of(tmp_path, "snapshot")) == 1
    assert 0 < sum(snapshots) <= 2 * records


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_snapshot_replaces_is_deleted_beside_the_micro_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: bool
) -> None:
    """A file system that deletes slowly, or not at all, keeps no micro-batch waiting."""
    prune, goes_on, asked = PartitionLog.prune, threading.Event(), threading.Event()

    def slowly(*args: Any) -> None:
        asked.set()
        assert goes_on.wait(60)
        if fails:
            raise StateError("not now")
        prune(*args)

    monkeypatch.setattr(recovery, "_WRITTEN_AT_ONCE", -1)
    monkeypatch.setattr(PartitionLog, "prune", slowly)
    partition = opened(tmp_path)
    for batch, answer in enumerate(ANSWERS):
        assert partition.apply(batch, BATCHES[batch], WIRE).changelog.equals(answer)
        if partition._snapshots is not None and (running := partition._snapshots._running) is not None:
            wait([running[1]], timeout=0.2)
    assert asked.is_set()
    before = len(list((tmp_path / "p" / "0").iterdir()))
    goes_on.set()
    partition.close()
    assert ("files that are no longer needed stay: not now" in caplog.text) == fails
    assert (len(list((tmp_path / "p" / "0").iterdir())) < before) != fails
    assert opened(tmp_path).apply(len(ANSWERS) - 1, BATCHES[-1], WIRE).changelog.equals(ANSWERS[-1])
