"""Parquet files that a state server's card reads, whose copies are kept by the log, and what Arrow makes of them."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from kernels.emulation import emulated
from kernels.test_parquet import _table

from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.join import Join
from gpu_ops.descriptions.keys import Key
from gpu_ops.errors import BadInputError, GpuJoinError, StateError
from gpu_ops.spark.server.partition import stored_state
from gpu_ops.spark.server.present import AssembledState, StoredOperator
from gpu_ops.spark.server.rescale import rescale
from gpu_ops.spark.server.server import StateServer
from gpu_ops.spark.tasks.engine import left_over
from gpu_ops.spark.wire.command import Wire
from gpu_ops.spark.wire.connection import Address
from gpu_ops.spark.wire.exchange import Exchange
from gpu_ops.state import files as files_module
from gpu_ops.state.address import StateAddress
from gpu_ops.state.blocks import BlockFiles, FilePart
from gpu_ops.state.durable import PartitionLog
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import FORMAT, GOES_ON, OF_CARD, Manifest
from state.support import TOKEN, WIRE, WIRE_SCHEMA, PartitionState, expected, make_command, make_join, with_bytes
from state.test_blocks import ANSWERS, BATCHES, PLACES

pytestmark = pytest.mark.thorough


def given(
    root: Path, batch: int, seed: int = 0, *, only: bool = False, as_bytes: bool = False
) -> list[pa.RecordBatch | FilePart]:
    """The rows of a micro-batch, some in copies of Parquet files, others in messages and as they are.

    Args:
        root: its folder.
        batch: which.
        seed: of the choice.
        only: all of them in Parquet files.
        as_bytes: whether the row kinds of others are bytes.
    """
    choice, table, at = random.Random(seed), BATCHES[batch], 0
    folder, sources = root / "run" / f"{batch}", root / "in"
    files, made, sides = BlockFiles(folder, 0), list[pa.RecordBatch | FilePart](), table["__side"].to_pylist()
    sources.mkdir(exist_ok=True)
    while at < table.num_rows:
        side, most = sides[at], choice.randrange(1, 15)
        end = next((i for i in range(at, table.num_rows) if sides[i] != side or i - at == most), table.num_rows)
        (rows,) = table.slice(at, end - at).combine_chunks().to_batches()
        if as_bytes:
            (sent,) = with_bytes(make_join(), WIRE, table.slice(at, end - at)).combine_chunks().to_batches()
        else:
            sent = rows
        own, way = rows.select([place + 2 for place in PLACES[side]]), choice.randrange(5)
        if way == 0 and not only:
            made.append(sent)
        elif way == 1 and not only:
            message = sent.select([place + 2 for place in PLACES[side]]).serialize()
            made.append(FilePart(side, PLACES[side], at, files.put(0, message, own.num_rows)))
        else:
            names = [f"of {name}" for name in own.schema.names]
            source = sources / f"{batch}-{at}-{seed}.parquet"
            file = pa.table([*own.columns, pa.array(range(len(own)))], [*names, "more"])
            pq.write_table(file, source, row_group_size=5)
            block = files.copy(str(source))
            assert block is not None
            block = block._replace(rows=len(own))
            made.append(FilePart(side, PLACES[side], at, block, tuple(names), str(source)))
            source.write_bytes(b"written over")
        at = end
    return made


class Life:
    """A partition's server, and how often its card has read a file.

    Args:
        root: the folder of all.
        backend: of the server.
    """

    def __init__(self, root: Path, backend: str, *, keeps_copies: bool = True) -> None:
        self.root, self.backend, self.state, self._keeps = root, backend, root / "s", keeps_copies
        self.read, self.wire = 0, WIRE_SCHEMA
        self._server = StateServer(TOKEN, blocks=str(root))
        if backend == "gpu":
            reader: Any = sys.modules["gpu_ops.cudf_backend.parquet"] if _loaded() else None
            assert reader is not None
            honest = reader.CudfFiles.read_parquet

            def counted(*arguments: Any) -> Any:
                self.read += 1
                return honest(*arguments)

            reader.CudfFiles.read_parquet = counted

    def ask(self, batch: int, parts: list[pa.RecordBatch | FilePart], **changes: Any) -> pa.Table:
        """The changes of a micro-batch."""
        command = make_command(batch, str(self.state), backend=self.backend, keeps_copies=self._keeps, **changes)
        address = Address(f"grpc://127.0.0.1:{self._server.port}", TOKEN)
        told = {**json.loads(command.to_json()), "counted": True}
        asked = Exchange(lambda _: (address, {}), told, self.wire)
        return pa.Table.from_batches(asked.run(parts), ANSWERS[0].schema)

    def close(self) -> None:
        self._server.shutdown()

    @property
    def log(self) -> PartitionLog:
        files = Files.at(str(self.state))
        return PartitionLog(files, Manifest.of(files), 0)

    @property
    def kept(self) -> list[Path]:
        return sorted((self.state / "p" / "0").glob("*.block"))


def _loaded() -> bool:
    import gpu_ops.cudf_backend.kernels  # noqa: F401 - on the stand-ins

    return True


@pytest.fixture
def card() -> Iterator[None]:
    with emulated():
        yield


PER_EVENT = make_join(emit="per_event")


@pytest.mark.parametrize("seed", range(6))
def test_rows_that_the_card_reads_are_those_that_came_by_the_host(tmp_path: Path, card: None, seed: int) -> None:
    """Answers and records, in order; restarted at random, with a card and without; a third reader finds as many.

    In messages row kinds are bytes or text, as behind an upgrade; in files they are text.
    """
    choice, as_bytes = random.Random(seed), seed >= 2
    life = Life(tmp_path, "gpu")
    files, answers, join = 0, ANSWERS, make_join()
    if seed % 2:  # whose order is that of the changes
        join = PER_EVENT
        answers = expected(BATCHES, join)
    for batch, answer in enumerate(answers):
        parts, came = given(tmp_path, batch, seed, as_bytes=as_bytes), BATCHES[batch]
        came = with_bytes(join, WIRE, came) if as_bytes else came
        life.wire = came.schema
        named = [part for part in parts if isinstance(part, FilePart) and part.columns]
        assert life.ask(batch, parts, description=join.to_json()).equals(answer), batch
        if life.backend == "gpu":
            files += len(named)
            links = {path.name.split(".")[1]: path for path in life.kept}
            for part in named:
                ((count,),) = duckdb.sql(f"SELECT count(*) FROM read_parquet('{part.block.file}')").fetchall()
                assert count == part.block.rows
                assert os.path.samefile(links[os.path.basename(part.block.file)], part.block.file)
        assert life.log.read_record(batch).table.equals(came)
        shutil.rmtree(tmp_path / "run")
        if choice.random() < 0.5:
            read = life.read
            life.close()
            life = Life(tmp_path, choice.choice(["gpu", "cpu"]))
            life.read = read
    life.close()
    assert life.read == files
    assert Manifest.of(Files.at(str(life.state))).format == OF_CARD


def test_a_folder_that_was_begun_without_gets_rows(tmp_path: Path, card: None) -> None:
    life = Life(tmp_path, "gpu", keeps_copies=False)
    assert life.ask(0, given(tmp_path, 0, only=True)).equals(ANSWERS[0])
    life.close()
    assert (life.read, life.kept) == (0, [])
    assert Manifest.of(Files.at(str(life.state))).format == FORMAT
    assert life.log.read_record(0).table.equals(BATCHES[0])


def test_state_in_memory_has_rows(tmp_path: Path, card: None) -> None:
    partition = PartitionState(make_command(0, backend="gpu", keeps_copies=True))
    for batch in (0, 0, 1, 2, 2):
        parts = given(tmp_path, batch, only=True)
        answer = partition.apply(batch, WIRE_SCHEMA.empty_table(), make_command().wire, parts=tuple(parts))  # type: ignore[arg-type]
        assert answer.changelog.equals(ANSWERS[batch])
    partition.close()


@pytest.mark.parametrize("way", ["no link", "a lock"])
def test_where_a_copy_cannot_be_kept_its_rows_are_written(
    tmp_path: Path, card: None, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    life = Life(tmp_path, "gpu")
    assert life.ask(0, given(tmp_path, 0, 1)).equals(ANSWERS[0])
    kept = life.kept
    if way == "no link":

        def refuses(*_: Any) -> None:
            raise OSError(18, "Invalid cross-device link")

        monkeypatch.setattr(files_module.os, "link", refuses)
        assert life.ask(1, given(tmp_path, 1, 1)).equals(ANSWERS[1])
    else:
        with Files.at(str(life.state)).locked("p/0", alone=True):
            assert life.ask(1, given(tmp_path, 1, 1)).equals(ANSWERS[1])
    assert life.read > len(kept) > 0
    assert life.kept == kept
    shutil.rmtree(tmp_path / "run")
    life.close()
    assert life.log.read_record(1).table.equals(BATCHES[1])


def test_copies_go_with_their_records(tmp_path: Path, card: None) -> None:
    life = Life(tmp_path, "gpu")
    for batch, answer in enumerate(ANSWERS):
        assert life.ask(batch, given(tmp_path, batch, only=True), options={"snapshot_every": 2}).equals(answer)
        assert life.kept
    life.close()
    assert {int(path.name[:20]) for path in life.kept} == set(life.log.stored().records) < set(range(len(ANSWERS)))


def test_a_repeated_micro_batch_has_its_new_copies_alone(tmp_path: Path, card: None) -> None:
    life = Life(tmp_path, "gpu")
    life.ask(0, given(tmp_path, 0, 1))
    before = life.kept
    again = given(tmp_path, 0, 2)
    assert life.ask(0, again).equals(ANSWERS[0])
    life.close()
    named = {part.block.file.rpartition("/")[2] for part in again if isinstance(part, FilePart)}
    assert {path.name.split(".")[1] for path in life.kept} == named
    assert not set(before) & set(life.kept)


@pytest.mark.parametrize("way", ["a byte", "gone"])
def test_a_damaged_copy_is_refused_before_and_after(tmp_path: Path, card: None, way: str) -> None:
    life = Life(tmp_path, "gpu")

    def damage(path: Path) -> None:
        content = path.read_bytes()
        path.unlink()
        if way == "a byte":
            path.write_bytes(content[:50] + bytes([content[50] ^ 1]) + content[51:])

    parts = given(tmp_path, 0, only=True)
    assert isinstance(parts[0], FilePart)
    damage(Path(parts[0].block.file))
    with pytest.raises(StateError, match=r"cannot be read there: .*(its checksum does not fit|No such file)"):
        life.ask(0, parts)
    assert life.ask(0, given(tmp_path, 0, only=True)).equals(ANSWERS[0])
    life.close()
    shutil.rmtree(tmp_path / "run")
    damage(life.kept[0])
    for backend in ("gpu", "cpu"):
        other = Life(tmp_path, backend)
        with pytest.raises(StateError, match=rf"{life.kept[-1].name[:20]}\..*block is (damaged|missing)"):
            other.ask(1, given(tmp_path, 1))
        other.close()


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDF failure: decompression"), MemoryError("out_of_memory"), OSError("kvikio")]
)
def test_where_the_card_cannot_read_arrow_does(
    tmp_path: Path, card: None, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    life = Life(tmp_path, "gpu")
    files: Any = sys.modules["gpu_ops.cudf_backend.parquet"].CudfFiles
    honest = files.read_parquet

    def fails(*_: Any) -> None:
        raise error

    files.read_parquet = fails
    if isinstance(error, MemoryError):  # nothing is there that could make room
        with pytest.raises(GpuJoinError, match="reading files needs more GPU memory than there is"):
            life.ask(0, given(tmp_path, 0))
    else:
        assert life.ask(0, given(tmp_path, 0)).equals(ANSWERS[0])
        assert "Arrow reads the files of this micro-batch" in caplog.text
    files.read_parquet = honest
    for batch in (0, 1):
        assert life.ask(batch, given(tmp_path, batch)).equals(ANSWERS[batch])
    life.close()


def test_text_that_is_none_is_named_with_its_file(tmp_path: Path, card: None) -> None:
    """And nothing has changed: what comes instead is taken."""
    life, errors = Life(tmp_path, "gpu"), []
    parts = given(tmp_path, 0, only=True)
    bad = next(n for n, part in enumerate(parts) if isinstance(part, FilePart) and part.number == 1)
    part = parts[bad]
    assert isinstance(part, FilePart)
    table = pq.read_table(part.block.file)
    item = table.column_names.index("of c0")
    data = [b"good"] * (table.num_rows - 1) + [b"b\xff\xfed"]
    text = pa.array(data, pa.binary()).view(pa.string())
    pq.write_table(table.set_column(item, table.column_names[item], text), tmp_path / "bad.parquet")
    block = BlockFiles(tmp_path / "run" / "0", 0).copy(str(tmp_path / "bad.parquet"))
    assert block is not None
    parts[bad] = part._replace(block=block._replace(rows=table.num_rows), source="bad.parquet")
    for one in ("gpu", "cpu"):
        other = life if one == "gpu" else Life(tmp_path, "cpu")
        with pytest.raises(BadInputError, match=r"input 'prices', column 'item': .*not valid UTF-8.*xff") as said:
            other.ask(0, parts)
        errors.append(str(said.value))
        if other is not life:
            other.close()
    assert errors[0] == errors[1]
    assert ", in bad.parquet" in errors[0]
    assert life.ask(0, given(tmp_path, 0, only=True)).equals(ANSWERS[0])
    life.close()


@pytest.mark.parametrize("then", ["gpu", "cpu", "cut anew"])
@pytest.mark.parametrize("way", ["links", "copies"])
def test_a_changed_query_goes_on_with_files_that_records_of_the_old_one_name(
    tmp_path: Path, card: None, monkeypatch: pytest.MonkeyPatch, way: str, then: str
) -> None:
    """Whatever becomes of the old folder, and wherever the new one is put."""
    life, began = Life(tmp_path, "gpu"), 3
    for batch in range(began):
        life.ask(batch, given(tmp_path, batch), partitions=1)
    life.close()
    shutil.rmtree(tmp_path / "run")
    place, wanted = str(life.state), _left_over(str(life.state), began)
    old, new, was = StateAddress.of(place), StateAddress.of(str(tmp_path / "new")), Manifest.of(Files.at(place))
    assert was.format == OF_CARD
    manifest = dataclasses.replace(was, format=GOES_ON)
    if way == "copies":
        monkeypatch.setattr(files_module.os, "link", lambda *_: (_ for _ in ()).throw(OSError(18, "cross-device")))
    state = AssembledState(new, manifest, began, {"": StoredOperator(old, began, "", was)})
    assert state.goes_on
    state.write(0)
    monkeypatch.undo()
    shutil.rmtree(life.state)
    (tmp_path / "new" / "manifest.json").write_text(manifest.to_json())
    shutil.move(tmp_path / "new", life.state)
    assert _left_over(place, began) == wanted
    if then == "cut anew":
        rescale(place, 2)
        assert _left_over(place, began) == wanted
        return
    life = Life(tmp_path, then)
    for batch in range(began, len(BATCHES)):
        changes = life.ask(batch, given(tmp_path, batch), partitions=1, options={"snapshot_every": 2})
        assert changes.equals(ANSWERS[batch])
    life.close()
    assert not list(life.state.rglob("*.origin"))


def _left_over(place: str, version: int) -> list[str]:
    manifest = Manifest.of(Files.at(place))
    parts = (left_over(place, manifest, n, version) for n in range(manifest.partitions))
    return sorted(repr(row) for part in parts for row in _rows(part))


def test_a_folder_is_copied_cut_anew_and_read(tmp_path: Path, card: None) -> None:
    life = Life(tmp_path, "gpu")
    for batch in range(3):
        life.ask(batch, given(tmp_path, batch), partitions=1)
    life.close()
    shutil.rmtree(tmp_path / "run")
    shutil.copytree(life.state, tmp_path / "copy")
    shutil.rmtree(life.state)
    place = str(tmp_path / "copy")
    files = Files.at(place)
    manifest = Manifest.of(files)
    engine = stored_state(files, manifest, 0)
    assert engine.rows_at(3) == stored_state(files, manifest, 0).rows_at(3)
    wanted = _left_over(place, 3)
    live = engine.rows_at(3)
    rescale(place, 2)
    cut = Manifest.of(files)
    assert (cut.format, cut.partitions) == (OF_CARD, 2)
    assert [sum(x) for x in zip(*(stored_state(files, cut, n).rows_at(3) for n in range(2)), strict=True)] == list(live)
    assert _left_over(place, 3) == wanted


def _rows(tables: Iterator[pa.Table]) -> list[Any]:
    return [row for table in tables for row in table.to_pylist()]


def test_orders_of_types_and_nulls(tmp_path: Path, card: None) -> None:
    """Columns of every type that both read, as an input has them, through a server that goes on without a card."""

    table = _table(nulls=True).slice(0, 3000).combine_chunks()
    schemas = [pa.schema([pa.field(f"{side}{x.name}", x.type) for x in table.schema]) for side in "ab"]
    wire, wire_schema = Wire.of(schemas)
    join = Join("inner", Input("a", schemas[0]), Input("b", schemas[1]), (Key("aint16", "bint16"),))
    by_input = [tuple(x[n] for x in wire.union_columns) for n in (0, 1)]
    answers = []
    for backend in ("gpu", "cpu"):
        root = tmp_path / backend
        root.mkdir()
        parts = list[FilePart]()
        for number, own in enumerate(by_input):
            path = root / f"{number}.parquet"
            pq.write_table(table.slice(number * 7, 200), path, row_group_size=64)
            block = BlockFiles(root / "run" / "0", 0).copy(str(path))
            assert block is not None
            places = tuple(own.index(name) for name in schemas[number].names)
            block = block._replace(rows=200)
            parts.append(FilePart(number, places, number * 200, block, tuple(table.column_names), str(path)))
        changes = {"description": join.to_json(), "backend": backend, "keeps_copies": True}
        partition = PartitionState(dataclasses.replace(make_command(0, str(root / "s")), **changes))  # type: ignore[arg-type]
        answers.append(partition.apply(0, wire_schema.empty_table(), wire, parts=tuple(parts)).changelog)
        partition.close()
        again = PartitionState(dataclasses.replace(make_command(0, str(root / "s")), **{**changes, "backend": "cpu"}))  # type: ignore[arg-type]
        assert again.apply(1, wire_schema.empty_table(), wire).changelog.num_rows == 0
        answers.append(next(iter(left_over(str(root / "s"), Manifest.of(Files.at(str(root / "s"))), 0, 2)), None))
        again.close()
    assert answers[0].num_rows > 100
    assert answers[0].equals(answers[2])
