"""State folders: what is read back is what was written, or an error that names the file."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.fs as pafs
import pytest

from gpu_ops.descriptions.inputs import Input
from gpu_ops.errors import StateError
from gpu_ops.state import files as files_module
from gpu_ops.state.durable import PartitionLog, Record, Stored, stored_partitions
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import FORMAT, GOES_ON, Manifest, ensure
from state.support import ORDERS, PRICES, make_join, wire_batches

TABLE = wire_batches(1, rows=200)[0]
MIXED = pa.table(
    {
        "n": pa.array([None, [1, 2], []], pa.list_(pa.int32())),
        "d": pa.array(["a", "b", "a"]).dictionary_encode(),
        "t": pa.array([1, None, 3], pa.timestamp("ns", "UTC")),
        "x": pa.array([None, None, None], pa.decimal128(20, 4)),
    }
)


@pytest.fixture(params=["local", "uri", "object store"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Files:
    if request.param == "local":
        return Files.at(str(tmp_path / "s"))
    if request.param == "uri":
        return Files.at((tmp_path / "with space").as_uri())
    return Files(pafs._MockFileSystem(), "bucket/s", "s3://bucket/s")


def manifest(**changes: object) -> Manifest:
    return dataclasses.replace(Manifest(make_join().to_json(), 4, "query-1"), **changes)


def damage(path: Path, content: bytes) -> None:
    path.unlink()  # what is mapped into memory stays as it is
    path.write_bytes(content)


# --- records and snapshots ---------------------------------------------------------------------


@pytest.mark.parametrize("table", [TABLE, TABLE.slice(0, 0), MIXED], ids=["rows", "no rows", "types"])
def test_record_comes_back(files: Files, table: pa.Table) -> None:
    log = PartitionLog(files, manifest(), 3)
    log.write_record(17, Record(table, 1234, '{"é": 1}'))
    found = PartitionLog(files, manifest(), 3).read_record(17)
    assert found.table.equals(table)
    assert (found.clock_ms, found.wire) == (1234, '{"é": 1}')
    assert PartitionLog(files, manifest(), 2).stored() == Stored({}, {})
    stored = log.stored()
    assert list(stored.records) == [17]
    assert stored.records[17] == log.record_stamp(17)[0]
    assert stored_partitions(files) == [3]


def test_record_is_replaced(files: Files) -> None:
    log = PartitionLog(files, manifest(), 0)
    log.write_record(1, Record(TABLE, 1, "a"))
    log.write_record(1, Record(TABLE.slice(5), 2, "b"))
    assert log.read_record(1).table.equals(TABLE.slice(5))
    assert log.read_record(1).clock_ms == 2


def test_snapshot_comes_back(files: Files) -> None:
    log = PartitionLog(files, manifest(), 0)
    size = log.write_snapshot(9, {"left": TABLE, "right": MIXED}, 77)
    tables, clock = log.read_snapshot(9)
    assert tables.keys() == {"left", "right"}
    assert tables["left"].equals(TABLE)
    assert tables["right"].equals(MIXED)
    assert clock == 77
    assert log.stored() == Stored({}, {9: size})


def test_any_arrow_reader_opens_a_record(tmp_path: Path) -> None:
    PartitionLog(Files.at(str(tmp_path)), manifest(), 0).write_record(1, Record(TABLE, 1, ""))
    with pa.ipc.open_stream(str(tmp_path / "p" / "0" / f"{1:020d}.arrow")) as reader:
        assert reader.read_all().equals(TABLE)


def test_prune_keeps_what_a_version_needs(files: Files) -> None:
    log = PartitionLog(files, manifest(), 0)
    for batch in range(6):
        log.write_record(batch, Record(TABLE, 1, ""))
    for version in (2, 4):
        log.write_snapshot(version, {"left": TABLE}, 1)
    left = log.stored().since(4)
    log.prune(4, log.stored())
    assert left == log.stored()
    assert sorted(left.records) == [4, 5]
    assert sorted(left.snapshots) == [4]


def test_every_damaged_byte_is_found(tmp_path: Path) -> None:
    log = PartitionLog(Files.at(str(tmp_path)), manifest(), 0)
    log.write_record(1, Record(TABLE.slice(0, 3), 1, ""))
    path = tmp_path / "p" / "0" / f"{1:020d}.arrow"
    content = path.read_bytes()
    for position in range(len(content)):
        damage(path, content[:position] + bytes([content[position] ^ 0x10]) + content[position + 1 :])
        with pytest.raises(StateError, match=rf"{1:020d}\.arrow"):
            log.read_record(1)


def test_every_cut_is_found(tmp_path: Path) -> None:
    log = PartitionLog(Files.at(str(tmp_path)), manifest(), 0)
    log.write_snapshot(1, {"left": TABLE.slice(0, 2), "right": TABLE.slice(0, 1)}, 1)
    path = tmp_path / "p" / "0" / f"{1:020d}.snapshot"
    content = path.read_bytes()
    for length in range(len(content)):
        damage(path, content[:length])
        with pytest.raises(StateError, match=rf"{1:020d}\.snapshot is cut short"):
            log.read_snapshot(1)


def test_missing_and_mistaken_files_are_named(tmp_path: Path) -> None:
    log = PartitionLog(Files.at(str(tmp_path)), manifest(), 0)
    with pytest.raises(StateError, match=rf"{tmp_path}/p/0/{5:020d}\.arrow is missing"):
        log.read_record(5)
    log.write_record(5, Record(TABLE, 1, ""))
    (tmp_path / "p" / "0" / f"{5:020d}.arrow").rename(tmp_path / "p" / "0" / f"{6:020d}.arrow")
    with pytest.raises(StateError, match=r"should be the record of batch 6 and is the record of batch 5"):
        log.read_record(6)


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_failed_write_leaves_the_old_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    log = PartitionLog(Files.at(str(tmp_path)), manifest(), 0)
    log.write_record(1, Record(TABLE, 1, "old"))

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files_module.os, fails, no_space)
    with pytest.raises(StateError, match=rf"cannot write .*{1:020d}\.arrow.*No space left"):
        log.write_record(1, Record(TABLE, 2, "new"))
    monkeypatch.undo()
    assert log.read_record(1).wire == "old"
    assert os.listdir(tmp_path / "p" / "0") == [f"{1:020d}.arrow"]


def test_leftovers_of_a_crash_are_no_records(tmp_path: Path) -> None:
    log = PartitionLog(Files.at(str(tmp_path)), manifest(), 0)
    log.write_record(1, Record(TABLE, 1, ""))
    content = (tmp_path / "p" / "0" / f"{1:020d}.arrow").read_bytes()
    (tmp_path / "p" / "0" / f"{2:020d}.arrow.abc.tmp").write_bytes(content[:100])
    (tmp_path / "p" / "0" / "notes.txt").write_text("mine")
    assert list(log.stored().records) == [1]
    assert sorted(os.listdir(tmp_path / "p" / "0")) == [f"{1:020d}.arrow", "notes.txt"]


# --- the manifest ------------------------------------------------------------------------------


def test_manifest_is_written_once_and_readable(files: Files) -> None:
    assert ensure(files, manifest(), create=False) is None
    assert ensure(files, manifest(), create=True) is not None
    first = files.read("manifest.json").to_pybytes()
    assert ensure(files, manifest(), create=True) is not None
    assert files.read("manifest.json").to_pybytes() == first
    data = json.loads(first)
    assert data["format"] == FORMAT
    assert data["schemas"]["orders"] == {"id": "int64", "item": "string", "amount": "double"}
    assert (data["partitions"], data["query_id"], data["join"]["how"]) == (4, "query-1", "full")
    assert data["created"]


def test_concurrent_creation_has_one_winner(tmp_path: Path) -> None:
    contents, errors = set(), []
    start = threading.Barrier(16)

    def create(number: int) -> None:
        files = Files.at(str(tmp_path / "s"))
        start.wait()
        try:
            files.create("manifest.json", f"{number}".encode() * 1000)
            contents.add(files.read("manifest.json").to_pybytes())
        except StateError as error:
            errors.append(error)

    threads = [threading.Thread(target=create, args=(n,)) for n in range(10, 26)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(contents) == 1
    assert os.listdir(tmp_path / "s") == ["manifest.json"]


def _with_price(kind: pa.DataType) -> str:
    schema = PRICES.set(1, pa.field("price", kind))
    return make_join(right=Input("prices", schema)).to_json()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_id": "query-2"}, r"belongs to query query-1, this is query query-2.*delete this one"),
        ({"partitions": 8}, r"cut into 4 partitions, the query asks for 8.*rescale"),
        ({"description": make_join(how="left").to_json()}, r"another join: it had how='full', now 'left'"),
        (
            {"description": make_join(where="orders.amount > 3").to_json()},
            r"where=None, now 'orders.amount > 3'",
        ),
        (
            {"description": _with_price(pa.decimal128(10, 2))},
            r"input 'prices': column 'price' was double, now decimal128\(10, 2\)",
        ),
        (
            {"description": make_join(right=Input("prices", PRICES.append(pa.field("vat", pa.int8())))).to_json()},
            r"input 'prices' has a column 'vat' \(int8\) that it had not",
        ),
        (
            {"description": make_join(right=Input("prices", PRICES.remove(2))).to_json()},
            r"input 'prices' had a column 'since' \(timestamp\[us\]\), now it has none",
        ),
        (
            {"description": make_join(left=Input("orders", ORDERS, row_kind="op")).to_json()},
            r"input 'orders' had unique_key=\['id'\], now None",
        ),
        (
            {"description": make_join(right=Input("rates", PRICES)).to_json()},
            r"was called 'prices', now 'rates'",
        ),
        ({"join_number": 2}, r"belongs to join 1 of query query-1 .*this is join 2.*changed folders.*the same one"),
    ],
)
def test_a_folder_of_something_else_is_refused(files: Files, changes: dict[str, object], message: str) -> None:
    mine = manifest(join_number=1)
    ensure(files, mine, create=True)
    for create in (True, False):
        with pytest.raises(StateError, match=message):
            ensure(files, dataclasses.replace(mine, **changes), create=create)
    assert ensure(files, mine, create=False) is not None


def test_a_folder_without_the_number_of_its_join_is_taken(files: Files) -> None:
    ensure(files, manifest(), create=True)
    for number in (None, 1, 2):
        assert ensure(files, manifest(join_number=number), create=False) is not None


def test_newer_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({"format": GOES_ON + 1, "all": "else differs"}))
    with pytest.raises(StateError, match=rf"format {GOES_ON + 1}.*upgrade gpu-join"):
        ensure(Files.at(str(tmp_path)), manifest(), create=True)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"format": 1}'])
def test_damaged_manifest_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(StateError, match=r"manifest\.json is damaged"):
        ensure(Files.at(str(tmp_path)), manifest(), create=True)


def test_lost_manifest_is_not_replaced(files: Files) -> None:
    PartitionLog(files, manifest(), 0).write_record(0, Record(TABLE, 1, ""))
    with pytest.raises(StateError, match=r"manifest\.json is missing beside stored state"):
        ensure(files, manifest(), create=True)


@pytest.mark.parametrize("location", ["nope://bucket/x", "s3:///", "://"])
def test_unknown_places_are_refused(location: str) -> None:
    with pytest.raises(StateError, match=r"cannot be opened.*A state folder is"):
        Files.at(location)


def test_unwritable_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("a file")
    with pytest.raises(StateError, match=r"cannot"):
        ensure(Files.at(str(tmp_path / "s")), manifest(), create=True)
