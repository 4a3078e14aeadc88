"""Parquet files that a state server's card reads: which a task leaves to it, and what comes of them through Spark."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
from kernels.test_parquet import _table

from gpu_ops.conditions import parse
from gpu_ops.descriptions.projection import ROWS, Projection
from gpu_ops.files.formats import FileFormat
from gpu_ops.spark.tasks import packing
from gpu_ops.spark.tasks.arrow import TaskIdentity
from gpu_ops.spark.tasks.packing import FileRows, Pack, Packer
from gpu_ops.spark.wire.arrivals import Arrivals, Carried
from gpu_ops.state.blocks import BlockFiles, Blocks, FilePart
from spark.test_cluster import found_by

pytestmark = pytest.mark.spark
TASK = TaskIdentity("q", "run", 9, 0, 0)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What ``files_read_by_card.py`` found."""
    return found_by("files_read_by_card.py", tmp_path_factory.mktemp("files_read_by_card"))


BY_CARD = "read by the card, where a file has the declared types, else by Arrow: files of"
WHY = {
    "filtered": ["rows are filtered or made of them by Arrow", None],
    "nested": [None, "column tags is list<element: string>"],
}


@pytest.mark.slow
@pytest.mark.parametrize("case", ["all", "sums", "filtered", "nested", "read", "recorded", "gone"])
def test_what_the_card_reads_gives_what_tasks_read(found: dict[str, Any], case: str) -> None:
    """Also where a server is lost, with its card or without, and the log has all that is left of the sources."""
    card = found[f"{case} gpu"]
    host = found.get(f"{case} cpu", found["all cpu"])
    assert len(card["rows"]) > 1000 or case == "sums"
    assert card["rows"] == host["rows"]
    assert (host["copies"], host["format"]) == (0, 4)
    assert card["format"] == 5
    assert card["copies"] >= (
        7 if case in ("all", "sums") else 2
    )  # of eight files one is none, and snapshots take some
    for line, why in zip(card["explain"], WHY.get(case, [None, None]), strict=True):
        assert line.startswith(BY_CARD) if why is None else line.endswith(f"; not by the card: {why}"), line
    assert not any("by the card" in line for line in host["explain"])


TABLE = _table(nulls=True).slice(0, 2000).combine_chunks()
READ = TABLE.schema


def rows_of(schema: pa.Schema = READ, names: list[str] | None = None, **options: str) -> FileRows:
    """A reader of files of a schema."""
    names = schema.names if names is None else names
    taken = pa.schema([schema.field(name) for name in names])
    return FileRows(FileFormat("parquet", schema, tuple(options.items())), "in", Projection.all(taken), taken)


def put(folder: Path, table: pa.Table = TABLE, name: str = "a.parquet", **options: Any) -> str:
    pq.write_table(table, folder / name, **options)
    return str(folder / name)


def changed(name: str, kind: pa.DataType) -> pa.Schema:
    return READ.set(READ.get_field_index(name), pa.field(name, kind))


NAMES = TABLE.column_names
TWICE = pa.table([*TABLE.columns, TABLE["text"]], [*NAMES, "Text"])
LEGACY = {"org.apache.spark.version": "3.5.0", "org.apache.spark.legacyDateTime": ""}
FILTER = Projection.all(READ)._replace(where=(parse("int32 > 0", {ROWS: READ}),))
AS_TEXT = rows_of(changed("bool", pa.string()))
LEFT: dict[str, tuple[pa.Table, dict[str, Any], FileRows]] = {
    "another type": (TABLE, {}, rows_of(changed("int32", pa.int64()))),
    "text for bytes": (TABLE, {}, rows_of(changed("text", pa.binary()))),
    "another zone": (TABLE, {}, rows_of(changed("at in a zone", pa.timestamp("us", "UTC")))),
    "not asked for": (TABLE, {}, rows_of(changed("at ns", pa.timestamp("us", "UTC")), ["text", "int32"])),
    "another codec": (TABLE, {"compression": "brotli"}, rows_of()),
    "INT96": (TABLE, {"use_deprecated_int96_timestamps": True}, rows_of()),
    "other letters": (TABLE.rename_columns(["Bool", *NAMES[1:]]), {}, rows_of()),
    "a name twice": (TWICE, {}, rows_of()),
    "a column less": (TABLE.drop_columns(["text"]), {}, rows_of(missingColumns="null")),
    "categories": (TABLE.set_column(0, "bool", TABLE["text"].dictionary_encode()), {}, AS_TEXT),
    "large text": (TABLE.set_column(0, "bool", TABLE["text"].cast(pa.large_string())), {}, AS_TEXT),
    "no rows": (TABLE.slice(0, 0), {}, rows_of()),
    "few columns": (TABLE, {}, rows_of(names=["bool"])),
    "a dot": (
        TABLE.rename_columns(["a.b", *NAMES[1:]]),
        {},
        rows_of(pa.schema([("a.b", pa.bool_()), *list(READ)[1:]])),
    ),
    "a calendar": (TABLE.replace_schema_metadata(LEGACY), {}, rows_of()),
    "a filter": (TABLE, {}, rows_of()._replace(projection=FILTER)),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_is_not_left_to_the_card(tmp_path: Path, case: str) -> None:
    table, options, reader = LEFT[case]
    files = BlockFiles(tmp_path / "run" / "9", 0)
    assert rows_of().copied(put(tmp_path), files) is not None
    assert reader.copied(put(tmp_path, table, "b.parquet", **options), files) is None


def test_what_is_no_such_file_is_read_and_refused_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = BlockFiles(tmp_path / "run" / "9", 0)
    (tmp_path / "no.parquet").write_bytes(b"PAR1 but no more")
    for uri in (str(tmp_path / "no.parquet"), str(tmp_path / "none"), str(tmp_path)):
        assert rows_of().copied(uri, files) is None
    assert rows_of().copied(put(tmp_path), BlockFiles(tmp_path / "run" / "9", 1 << 20)) is None, "it is too small"
    elsewhere = pafs.SubTreeFileSystem(str(tmp_path), pafs.LocalFileSystem())
    with monkeypatch.context() as patch:
        patch.setattr(packing, "file_system_of", lambda *_: (elsewhere, "a.parquet"))
        assert rows_of().copied("s3a://bucket/a.parquet", files) is None
    full = BlockFiles(tmp_path / "a.parquet" / "run" / "9", 0)  # no folder can be there
    assert rows_of().copied(str(tmp_path / "a.parquet"), full) is None


def test_a_file_that_is_changed_while_it_is_copied_is_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the copy has is what counts: it is read, or the task reads what is there now."""
    path, copy = put(tmp_path), BlockFiles.copy

    def written_over(self: BlockFiles, source: str) -> Any:
        put(tmp_path, other)
        return copy(self, source)

    monkeypatch.setattr(BlockFiles, "copy", written_over)
    files = BlockFiles(tmp_path / "run" / "9", 0)
    other = TABLE.set_column(1, "int8", TABLE["int16"])
    assert rows_of().copied(path, files) is None
    put(tmp_path)
    other = TABLE.slice(0, 900)
    left = rows_of().copied(path, files)
    assert left is not None
    assert left.block.rows == 900
    put(tmp_path)
    assert pq.read_table(left.block.file).equals(other)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("shares", [1, 3])
def test_rows_in_copies_are_the_rows_that_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, shares: int
) -> None:
    """Random columns in a random order, renamed, of random files, of which some are not what was declared."""
    monkeypatch.setattr(packing, "streaming_task", lambda: TASK)
    choice = random.Random(seed)
    names = choice.sample(
        TABLE.column_names, choice.randrange(len(TABLE.column_names) // 2, len(TABLE.column_names) + 1)
    )
    shown = pa.schema([(f"c{number}", READ.field(name).type) for number, name in enumerate(names)])
    paths = []
    for number in range(5):
        rows = TABLE.slice(choice.randrange(1000), choice.randrange(1, 900))
        if choice.random() < 0.3:
            at = rows.column_names.index(names[0])
            rows = rows.set_column(at, names[0], rows[names[0]].dictionary_encode())
        kept = [name for name in TABLE.column_names if name in names or choice.random() < 0.3]
        paths.append(
            put(tmp_path, rows.select(choice.sample(kept, len(kept))), f"{number}.parquet", row_group_size=100)
        )
    declared = pa.schema([READ.field(name) for name in names])
    reader = FileRows(FileFormat("parquet", declared), "in", Projection.all(declared), shown)
    blocks = Blocks(str(tmp_path / "blocks"), 1)
    packer = Packer("in", "join", 0, shown, (), tuple(range(shares)), 1 << 18, blocks=blocks, shares=shares)
    layout = pa.schema([("__side", pa.int8()), ("__order", pa.int64()), *shown])
    arrivals = Arrivals(layout, [Carried(shown, tuple(shown.names))])
    listed = pa.table({"path": paths, "time": [choice.randrange(3) for _ in paths]}).to_batches()
    given, copies = [], 0
    for by_card in (False, True):
        pack = Pack(packer, reader, Projection.all(shown))
        packed = list(pack.read_by_card(by_card=by_card).run(iter(listed)))
        of_share = [[json.loads(about)[0] for about in batch["about"].to_pylist()] for batch in packed]
        assert {target for targets in of_share for target in targets} == set(range(shares))
        mine = (
            batch.filter(pa.array([target == 0 for target in its])) for batch, its in zip(packed, of_share, strict=True)
        )
        pieces = list[pa.RecordBatch]()
        for part in arrivals.to_wire(mine):
            if isinstance(part, FilePart):
                copies += bool(part.columns)
                message = pa.memory_map(part.block.file).read_buffer()[part.block.start :][: part.block.size]
                pieces += part.rows(message, layout)
            else:
                pieces.append(part)
        given.append(pa.Table.from_batches(pieces, layout))
    assert given[0].num_rows > 0
    assert given[0].equals(given[1])
    assert copies > 0


def test_a_file_that_two_tasks_have_read_is_there_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark may list it twice; and of the tasks one has no room for a copy."""
    monkeypatch.setattr(packing, "streaming_task", lambda: TASK)
    path, packer = (
        put(tmp_path),
        Packer("in", "join", 0, READ, (), (0,), 1 << 18, blocks=Blocks(str(tmp_path / "b"), 1)),
    )
    pack, listed = Pack(packer, rows_of(), Projection.all(READ)), pa.table({"path": [path], "time": [1]}).to_batches()
    both = [list(pack.read_by_card(by_card=by_card).run(iter(listed))) for by_card in (False, True)]
    layout = pa.schema([("__side", pa.int8()), ("__order", pa.int64()), *READ])
    arrivals = Arrivals(layout, [Carried(READ, tuple(READ.names))])
    for batches in ([*both[0], *both[1]], [*both[1], *both[0], *both[1]]):
        (part,) = arrivals.to_wire(iter(batches))
        assert isinstance(part, FilePart)
        assert (part.block.rows, part.columns, part.source) == (TABLE.num_rows, tuple(READ.names), path)
