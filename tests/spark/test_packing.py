"""Rows packed into messages and taken out again: each once, in its partition, in one order. Needs no Spark."""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given
from hypothesis import strategies as hs

from cpu_fallback.hashing import hash_columns
from gpu_ops.conditions import Expression, parse
from gpu_ops.descriptions.changelog import SPELLINGS
from gpu_ops.descriptions.keys import key_type
from gpu_ops.descriptions.projection import ROWS, Projection, column_of
from gpu_ops.errors import BadInputError
from gpu_ops.files.formats import FileFormat
from gpu_ops.spark.tasks import packing
from gpu_ops.spark.tasks.arrow import TaskIdentity
from gpu_ops.spark.tasks.packing import FileRows, Pack, Packer, PackForSeveral, files_in_order
from gpu_ops.spark.tasks.rows import Slices
from gpu_ops.spark.wire.arrivals import PACKED, Arrivals, Carried, Message
from gpu_ops.state import blocks
from gpu_ops.state.blocks import Blocks, FilePart, Mapped

SCHEMA = pa.schema([("k", pa.int64()), ("t", pa.string()), ("n", pa.int64()), ("tags", pa.list_(pa.int32()))])
COLUMNS = ("k", "n", "tags", "t")
TASK = TaskIdentity("6f1c", "a7e7ec62-2c12-4ddf-94e6-9f1ea2a2821a", 9, 0, 1)


def wire(layout: dict[str, pa.DataType]) -> pa.Schema:
    fixed = [pa.field("__side", pa.int8()), pa.field("__order", pa.int64())]
    return pa.schema([*fixed, *(pa.field(f"c{place}", kind) for place, kind in enumerate(layout.values()))])


def packer(
    number: int = 0,
    schema: pa.Schema = SCHEMA,
    by: tuple[tuple[str, pa.DataType], ...] = (("k", pa.int64()),),
    partitions: int = 3,
    *,
    most_bytes: int = 1 << 18,
    blocks: Blocks | None = None,
    shares: int = 1,
) -> Packer:
    routes = tuple(range(100, 100 + partitions * shares))
    return Packer(f"in{number}", "join", number, schema, by, routes, most_bytes, blocks=blocks, shares=shares)


def packed(packer: Packer, batches: list[pa.RecordBatch], time: int = 0, source: str = "") -> list[dict[str, Any]]:
    made = list(packer.pack([(iter(batches), time, source)]))
    assert all(batch.schema.equals(PACKED) for batch in made)
    rows = [(row, Message.of(row["about"])) for batch in made for row in batch.to_pylist()]
    return [{**about._asdict(), **about.block._asdict(), "count": about.block.rows, **row} for row, about in rows]


def unpacked(
    messages: list[dict[str, Any]], inputs: list[Carried], layout: pa.Schema, size: int = 3
) -> list[dict[str, Any]]:
    """The rows of a partition, in their order."""
    batches = [
        pa.RecordBatch.from_pylist(messages[start : start + size], PACKED) for start in range(0, len(messages), size)
    ]
    arrivals = Arrivals(layout, inputs)
    for batch in batches:
        assert {Message.of(about).target for about in batch["about"].to_pylist()} == {messages[0]["target"]}
    made = []
    for one in arrivals.to_wire(iter(batches)):
        if isinstance(one, FilePart):
            folder = Path(one.block.file).parents[2]
            made.extend(one.rows(Mapped(str(folder)).message(one.block), layout))
        else:
            made.append(one)
    for batch in made:
        assert batch.schema.equals(layout)
        batch.validate(full=True)
    rows = [row for batch in made for row in batch.to_pylist()]
    order = [row.pop("__order") for row in rows]
    assert order == sorted(set(order))  # as they come, and total
    return rows


@hs.composite
def inputs(draw: hs.DrawFn) -> list[tuple[int, str, list[pa.RecordBatch]]]:
    """Batches of some sources, each with its time; rows are numbered in the order that they are to have."""
    made = []
    sources = draw(hs.lists(hs.tuples(hs.integers(0, 3), hs.sampled_from("abc")), max_size=4, unique=True))
    count = 0
    for time, source in sorted(sources):
        batches = []
        for size in draw(hs.lists(hs.integers(0, 9), max_size=3)):
            keys = draw(hs.lists(hs.none() | hs.integers(-3, 3), min_size=size, max_size=size))
            texts = draw(hs.lists(hs.none() | hs.text(max_size=20), min_size=size, max_size=size))
            tags = [None if k is None else [k] * abs(k) for k in keys]
            whole = pa.RecordBatch.from_pydict(
                {"k": [9, *keys], "t": ["", *texts], "n": [-1, *range(count, count + size)], "tags": [[], *tags]},
                SCHEMA,
            )
            batches.append(whole.slice(1))  # a batch may be part of another
            count += size
        made.append((time, source, batches))
    return made


@given(
    both=hs.tuples(inputs(), inputs()),
    sizes=hs.tuples(hs.integers(1, 7), hs.integers(1, 2000)),
    by=hs.sampled_from([("k",), ("t", "k"), ()]),
    how=hs.tuples(hs.integers(0, 99), hs.booleans(), hs.integers(1, 3)),
)
def test_every_row_once_and_in_order(
    both: tuple[list[Any], list[Any]],
    sizes: tuple[int, int],
    by: tuple[str, ...],
    how: tuple[int, bool, int],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """In each of the tasks that take a share of a partition's changes, too."""
    (partitions, most_bytes), (seed, in_files, shares) = sizes, how
    keys = tuple((name, SCHEMA.field(name).type) for name in by)
    own = Blocks(str(tmp_path_factory.getbasetemp() / "blocks"), 400) if in_files else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "streaming_task", lambda: TASK)
        more: dict[str, Any] = {"most_bytes": most_bytes, "blocks": own, "shares": shares}
        packers = [packer(n, SCHEMA, keys, partitions, **more) for n in range(2)]
        messages = [
            message
            for one, sources in zip(packers, both, strict=True)
            for time, source, batches in sources
            for message in packed(one, batches, time, source)
        ]
    random.Random(seed).shuffle(messages)
    expected: dict[int, list[dict[str, Any]]] = {}
    for number, sources in enumerate(both):
        for _, _, batches in sources:
            for batch in batches:
                hashes = hash_columns([batch[name] for name in by], batch.num_rows)
                goes_to = (hashes % np.uint64(partitions)).tolist() if by else [0] * batch.num_rows
                for partition, row in zip(goes_to, batch.to_pylist(), strict=True):
                    values = {f"c{place}": row[name] for place, name in enumerate(COLUMNS)}
                    expected.setdefault(partition, []).append({"__side": number, **values})
    layout = wire({name: SCHEMA.field(name).type for name in COLUMNS})
    carried = [Carried(SCHEMA, COLUMNS)] * 2
    found = {}
    for target in {message["target"] for message in messages}:
        mine = [message for message in messages if message["target"] == target]
        assert {message["route"] for message in mine} == {100 + target}
        found[target] = unpacked(mine, carried, layout)
    for share in range(shares):
        of_share = {target // shares: rows for target, rows in found.items() if target % shares == share}
        assert {partition: rows for partition, rows in of_share.items() if rows} == expected
    assert not messages or set(found) == set(range(partitions * shares))  # a partition without rows is named, too


def test_files_of_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = pa.RecordBatch.from_pydict({"k": range(9999), "t": ["x"] * 9999, "n": range(9999), "tags": [[]] * 9999})
    batch, small = batch.cast(SCHEMA), batch.slice(0, 9).cast(SCHEMA)
    root = tmp_path / "blocks"
    of_run = root / TASK.run_id

    def messages(task: TaskIdentity | None, rows: pa.RecordBatch = batch) -> list[dict[str, Any]]:
        monkeypatch.setattr(packing, "streaming_task", lambda: task)
        return packed(packer(blocks=Blocks(str(root), 1 << 16)), [rows])

    assert not any(message["file"] for message in messages(TASK, small))
    assert not root.exists()
    for unknown in (None, TASK._replace(run_id=""), TASK._replace(run_id="../a")):  # a job group may have any name
        assert not any(message["file"] for message in messages(unknown))
    first = messages(TASK)
    files = {message["target"]: message["file"] for message in first}
    assert len(files) == len(set(files.values())) == 3  # one for each partition
    assert not any(message["rows"] for message in first)
    for partition, file in files.items():
        own = [message for message in first if message["target"] == partition]
        assert {message["file"] for message in own} == {file}
        assert sum(message["size"] for message in own) == Path(file).stat().st_size
        for message in own:
            content = Path(file).read_bytes()[message["start"] :][: message["size"]]
            assert zlib.crc32(content) == message["crc"]
    assert sum(message["count"] for message in first) == 9999
    assert [path.stat().st_mode & 0o77 for path in (root, of_run, of_run / "9", *map(Path, files.values()))] == [0] * 6
    assert not {message["file"] for message in messages(TASK)} & set(files.values())  # another task's
    assert len(list((of_run / "9").iterdir())) == 6
    messages(TASK._replace(batch_id=10), small)
    assert len(list((of_run / "9").iterdir())) == 6
    messages(TASK._replace(batch_id=10))
    assert [path.name for path in of_run.iterdir()] == ["10"]
    Blocks(str(root), 1 << 16).forget("")
    Blocks(str(root), 1 << 16).forget(TASK.run_id)
    assert not list(root.iterdir())


def test_where_a_disk_is_full_rows_go_through_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = pa.RecordBatch.from_pydict({"k": range(9999), "t": ["x"] * 9999, "n": range(9999), "tags": [[]] * 9999})
    batch = batch.cast(SCHEMA)
    monkeypatch.setattr(packing, "streaming_task", lambda: TASK)
    written = blocks._write

    def full(file: Any, message: pa.Buffer) -> None:
        if file.name.endswith("-1"):  # half of the second partition's
            os.write(file.fileno(), memoryview(message)[:100])
            raise OSError(28, "No space left on device")
        written(file, message)

    monkeypatch.setattr(blocks, "_write", full)
    made = packed(packer(blocks=Blocks(str(tmp_path / "blocks"), 1 << 16)), [batch, batch])
    assert [bool(message["file"]) for message in made] == [True, False, False, False, False, False]
    layout = wire({name: SCHEMA.field(name).type for name in COLUMNS})
    found = [
        row["c1"]
        for partition in range(3)
        for row in unpacked([m for m in made if m["target"] == partition], [Carried(SCHEMA, COLUMNS)], layout)
    ]
    assert sorted(found) == sorted([*range(9999)] * 2)


@pytest.mark.parametrize("words", [SPELLINGS, ("+I", "-U", "+U", "-D"), ("c", "r", "u", "d")])
@pytest.mark.parametrize("strict", [True, False])
def test_messages_have_row_kinds_as_bytes(words: Sequence[str], strict: bool) -> None:
    rng, schema = np.random.default_rng(len(words)), pa.schema([("op", pa.string()), ("k", pa.int64())])
    known = [None if not strict and rng.random() < 0.1 else str(rng.choice(words)) for _ in range(500)]
    rows = pa.record_batch({"op": known, "k": range(500)}, schema)
    own = packer(schema=schema)._replace(row_kind="op", strict=strict)
    made = packed(own, [rows.slice(0, 200), rows.slice(200), rows.slice(0, 0)])
    carried = [Carried(own.message_schema, ("op", "k"))]
    found = {}
    for target in range(3):
        mine = [message for message in made if message["target"] == target]
        for row in unpacked(mine, carried, wire({"op": pa.uint8(), "k": pa.int64()})):
            found[row["c1"]] = row["c0"]
    assert [found[number] for number in range(500)] == [255 if x is None else SPELLINGS.index(x) for x in known]
    wrong = pa.record_batch({"op": ["+I", "+X"], "k": [1, 2]}, schema)
    if strict:
        with pytest.raises(BadInputError, match=r"input 'in0', column 'op'.*unknown row kind.*\+X"):
            packed(own, [wrong])
    assert packed(own, [rows.slice(0, 0)])  # a partition without rows is named


def test_messages_are_about_as_large_as_said() -> None:
    batch = pa.RecordBatch.from_pydict(
        {"k": range(4000), "t": ["x" * 80] * 4000, "n": range(4000), "tags": [[1, 2]] * 4000}, SCHEMA
    )
    sizes = [len(m["rows"]) for m in packed(packer(most_bytes=16_000), [batch])]
    assert len(sizes) > 20
    assert max(sizes) < 2 * 16_000
    assert len(packed(packer(most_bytes=1), [batch.slice(0, 50)])) == 50
    one = packed(packer(partitions=1, most_bytes=1 << 30), [batch])
    assert [message["target"] for message in one] == [0]


def test_numbers_of_a_source_go_on() -> None:
    batches = [
        pa.RecordBatch.from_pydict({"k": [1, 2, 3], "t": [""] * 3, "n": [n] * 3, "tags": [[]] * 3}, SCHEMA)
        for n in range(3)
    ]
    numbers = [message["number"] for message in packed(packer(most_bytes=1), batches, 5, "file:/a")]
    assert numbers == list(range(9))


NAN = float("nan")
EQUAL: list[tuple[pa.Array, pa.Array]] = [
    (pa.array([-1, 7, None], pa.int8()), pa.array([-1, 7, None], pa.int64())),
    (pa.array([2**31 - 1, -(2**31)], pa.int32()), pa.array([2**31 - 1, -(2**31)], pa.int64())),
    (pa.array([0.0, -0.0, NAN, 1.5, None]), pa.array([-0.0, 0.0, -NAN, 1.5, None])),
    (pa.array([0.0, -0.0, NAN, 1.5, None], pa.float32()), pa.array([-0.0, 0.0, NAN, 1.5, None], pa.float64())),
    (
        pa.array([Decimal("1.5"), Decimal("-0.1"), None], pa.decimal128(5, 1)),
        pa.array([Decimal("1.500"), Decimal("-0.100"), None], pa.decimal128(38, 3)),
    ),
    (pa.array([0, -1, None], pa.timestamp("s")), pa.array([0, -1000, None], pa.timestamp("ms"))),
    (pa.array([0, -1], pa.timestamp("ms", "UTC")), pa.array([0, -1000], pa.timestamp("us", "Asia/Tokyo"))),
    (pa.array(["", "ü", None]), pa.array(["", "ü", None], pa.large_string())),
    (pa.array([b"", b"\xff", None]), pa.array([b"", b"\xff", None], pa.large_binary())),
    (pa.array([True, False, None]), pa.array([True, False, None])),
    (pa.array([1, None], pa.date32()), pa.array([1, None], pa.date32())),
]


@pytest.mark.parametrize(("left", "right"), EQUAL, ids=[f"{a.type}-{b.type}" for a, b in EQUAL])
@pytest.mark.parametrize("partitions", [2, 3, 7, 64])
def test_equal_keys_meet(left: pa.Array, right: pa.Array, partitions: int) -> None:
    kind = key_type(pa.field("k", left.type), pa.field("k", right.type))
    goes_to: list[dict[int, int]] = []
    for number, keys in enumerate((left, right)):
        schema = pa.schema([("k", keys.type), ("n", pa.int64())])
        batch = pa.RecordBatch.from_arrays([keys, pa.array(range(len(keys)), pa.int64())], schema=schema)
        layout = wire({"n": pa.int64(), "k": keys.type})
        own = packer(number, schema, (("k", kind),), partitions)
        messages = packed(own, [batch])
        found = {}
        for partition in {message["target"] for message in messages}:
            mine = [message for message in messages if message["target"] == partition]
            carried = [Carried(schema, ("n", "k"))] * 2
            found |= {row["c0"]: partition for row in unpacked(mine, carried, layout)}
        assert len(found) == len(keys)
        goes_to.append(found)
    assert goes_to[0] == goes_to[1]


@given(keys=hs.lists(hs.tuples(hs.integers(-(2**31), 2**31 - 1), hs.text(max_size=3)), min_size=200, max_size=200))
def test_partitions_share(keys: list[tuple[int, str]]) -> None:
    assume(len(set(keys)) > 150)
    numbers, texts = zip(*keys, strict=True)
    batch = pa.RecordBatch.from_pydict({"k": numbers, "t": texts, "n": range(200), "tags": [[]] * 200}, SCHEMA)
    both = packer(by=(("k", pa.int64()), ("t", pa.string())), partitions=4)
    assert {message["target"] for message in packed(both, [batch])} == {0, 1, 2, 3}


def test_columns_in_union_columns_of_other_inputs() -> None:
    left = pa.schema([("k", pa.int64()), ("a", pa.string())])
    right = pa.schema([("b", pa.float64()), ("k", pa.int64())])
    layout = wire({"k": pa.int64(), "a": pa.string(), "b": pa.float64()})
    carried = [Carried(left, ("k", "a", None)), Carried(right, ("k", None, "b"))]
    messages = packed(packer(1, right, partitions=1), [pa.RecordBatch.from_pydict({"b": [2.5], "k": [1]}, right)])
    messages += packed(packer(0, left, partitions=1), [pa.RecordBatch.from_pydict({"k": [1], "a": ["x"]}, left)])
    assert unpacked(messages, carried, layout) == [
        {"__side": 0, "c0": 1, "c1": "x", "c2": None},
        {"__side": 1, "c0": 1, "c1": None, "c2": 2.5},
    ]


def test_nothing_to_pack() -> None:
    for nothing in ([], [pa.RecordBatch.from_pylist([], SCHEMA)]):
        messages = packed(packer(), nothing)
        assert [message["target"] for message in messages] == [0, 1, 2]
        carried = Carried(SCHEMA, COLUMNS)
        layout = wire({name: SCHEMA.field(name).type for name in COLUMNS})
        assert [unpacked([message], [carried], layout) for message in messages] == [[], [], []]
    assert list(Arrivals(wire({"k": pa.int64()}), []).to_wire(iter([]))) == []
    assert files_in_order(iter([])) == []


def test_files_are_in_the_order_of_their_times_and_names() -> None:
    files = pa.schema([("path", pa.string()), ("time", pa.int64())])
    batches = [
        pa.RecordBatch.from_pydict({"path": ["b", "a"], "time": [2, 2]}, files),
        pa.RecordBatch.from_pydict({"path": ["c"], "time": [1]}, files),
    ]
    assert files_in_order(iter(batches)) == [("c", 1), ("a", 2), ("b", 2)]


@given(
    sizes=hs.lists(hs.integers(0, 400), min_size=1, max_size=4),
    cuts=hs.lists(hs.sampled_from([None, 50]), min_size=2, max_size=3),
    seed=hs.integers(0, 1 << 30),
)
def test_a_file_that_is_read_once_gives_each_input_what_it_would_read(
    tmp_path_factory: Any, sizes: list[int], cuts: list[int | None], seed: int
) -> None:
    folder, rng = tmp_path_factory.mktemp("read"), np.random.default_rng(seed)
    whole = pa.schema([("k", pa.int64()), ("n", pa.int64()), ("at", pa.timestamp("us", "UTC"))])
    files = []
    for number, size in enumerate(sizes):
        columns = [rng.integers(0, 9, size), rng.integers(0, 99, size), rng.integers(0, 10**9, size)]
        rows = pa.table([pa.array(x).cast(f.type) for x, f in zip(columns, whole, strict=True)], schema=whole)
        pq.write_table(rows, folder / f"{number}.parquet", row_group_size=64)
        files.append((f"{folder}/{number}.parquet", number))
    listed = pa.record_batch([pa.array([f for f, _ in files]), pa.array([n for _, n in files])], ["path", "time"])
    format_of, packs = FileFormat("parquet", whole), []
    for number, cut in enumerate(cuts):
        names = ("k", "n") if number % 2 else ("n", "at")
        schema = pa.schema([whole.field(name) for name in names])
        tests = () if cut is None else (parse(f"n < {cut}", {ROWS: whole}),)
        where = tuple(Expression(x.sql, x.root, {ROWS: ("n",)}) for x in tests)
        projection = Projection(tuple(column_of(field) for field in schema), where)
        reader = FileRows(format_of, f"in{number}", projection, schema)
        if number == 1:  # grouped as it is read
            out = pa.schema([("k", pa.int64()), ("most", pa.int64())])
            columns = Projection.all(whole)
            slices = Slices("at", 10**6, 10**6, 0, (("k", None),), (("max", "n"),), whole, out)
            reader, schema = FileRows(format_of, f"in{number}", columns, whole, slices), out
        own = packer(number, schema, ((schema.names[0], pa.int64()),))
        packs.append(Pack(own, reader, Projection.all(schema)))
    assert all(pack.reads_as(packs[0]) for pack in packs)
    together = [row for batch in PackForSeveral(packs).run(iter([listed])) for row in batch.to_pylist()]
    for number, pack in enumerate(packs):
        alone = [row for batch in pack.run(iter([listed])) for row in batch.to_pylist()]
        assert [row for row in together if Message.of(row["about"]).input == number] == alone
