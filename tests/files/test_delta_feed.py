"""The change feed of Delta tables: as deltalake writes them, as Spark did, and commits by hand, without Spark."""

from __future__ import annotations

import base64
import datetime as dt
import decimal
import json
import os
import random
import struct
import uuid
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
import pyroaring
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_ops.errors import BadInputError
from gpu_ops.files.deletion_vectors import deleted_rows
from gpu_ops.files.formats import FileFormat

FEED = {"delta.enableChangeDataFeed": "true"}
INT, TEXT, UTC = pa.int64(), pa.string(), pa.timestamp("us", "UTC")
PAIR = pa.schema([("_change_type", TEXT), ("id", INT)])
Z85 = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
B85 = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"


def field(name: str, kind: Any, **metadata: Any) -> dict[str, Any]:
    return {"name": name, "type": kind, "nullable": True, "metadata": metadata}


def mapped(name: str, kind: Any, physical: str, number: int) -> dict[str, Any]:
    return field(name, kind, **{"delta.columnMapping.physicalName": physical, "delta.columnMapping.id": number})


def array(of: Any) -> dict[str, Any]:
    return {"type": "array", "elementType": of, "containsNull": True}


def struct_of(*fields: dict[str, Any]) -> dict[str, Any]:
    return {"type": "struct", "fields": list(fields)}


class Table:
    """A table whose commits are written action by action."""

    def __init__(self, path: Path, *fields: dict[str, Any], by: tuple[str, ...] = (), **protocol: Any) -> None:
        self.path, self.versions = path, 0
        (path / "_delta_log").mkdir(parents=True)
        protocol = {"minReaderVersion": 1, "minWriterVersion": 4} | protocol
        self.header = [{"protocol": protocol}, self.metadata(*fields, by=by)]

    def metadata(self, *fields: dict[str, Any], by: tuple[str, ...] = (), **configuration: str) -> dict[str, Any]:
        given = FEED | {name.replace("_", "."): setting for name, setting in configuration.items()}
        return {"metaData": {"id": "5d7a2f0e-0000-4000-8000-000000000001", "format": {"provider": "parquet"},
                             "schemaString": json.dumps(struct_of(*fields)), "partitionColumns": list(by),
                             "configuration": given}}  # fmt: skip

    def commit(self, *actions: dict[str, Any], header: bool = True) -> int:
        all_of_it = [*(self.header if header and not self.versions else ()), *actions]
        self.log(self.versions).write_text("\n".join(map(json.dumps, all_of_it)))
        self.versions += 1
        return self.versions - 1

    def log(self, version: int) -> Path:
        return self.path / "_delta_log" / f"{version:020}.json"

    def file(self, name: str, rows: pa.Table, action: str = "add", **more: Any) -> dict[str, Any]:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(rows, path, **more.pop("parquet", {}))
        return act(action, name, **more)

    def rows(self, version: int, schema: pa.Schema = PAIR, **options: str) -> list[tuple[Any, ...]]:
        read = FileFormat("delta", schema, tuple(options.items()))
        batches = read.read(f"file:{self.log(version)}", schema.names, "feed")
        return [tuple(row.values()) for batch in batches for row in batch.to_pylist()]

    def refusal(self, version: int, schema: pa.Schema = PAIR) -> str:
        with pytest.raises(BadInputError) as caught:
            self.rows(version, schema)
        return str(caught.value)


def act(action: str, path: str, **more: Any) -> dict[str, Any]:
    return {action: {"path": path, "partitionValues": {}, "size": 1, "dataChange": action != "cdc"} | more}


def numbers(*ids: int) -> pa.Table:
    return pa.table({"id": pa.array(ids, INT)})


def bitmap(*rows: int) -> bytes:
    return struct.pack("<i", 1681511377) + pyroaring.BitMap64(rows).serialize()


def inline(*rows: int) -> dict[str, Any]:
    data = bitmap(*rows)
    padded = data + bytes(-len(data) % 4)
    text = base64.b85encode(padded).translate(bytes.maketrans(B85, Z85)).decode()
    return {"storageType": "i", "pathOrInlineDv": text, "sizeInBytes": len(data), "cardinality": len(rows)}


def test_what_a_commit_takes_comes_before_what_it_brings_in_the_order_of_log_and_files(tmp_path: Path) -> None:
    table = Table(tmp_path, field("id", "long"))
    table.commit(table.file("b", numbers(3, 1, 2)), table.file("a", numbers(9, 0)))
    assert table.rows(0) == [("insert", x) for x in (3, 1, 2, 9, 0)]
    table.commit(table.file("c", numbers(5)), act("remove", "b"), act("remove", "a"))
    assert table.rows(1) == [*(("delete", x) for x in (3, 1, 2, 9, 0)), ("insert", 5)]
    kinds = ["insert", "delete", "update_postimage", "update_preimage"]
    changed = numbers(1, 2, 3, 4).append_column("_change_type", [kinds])
    other = numbers(5, 6).append_column("_change_type", [kinds[:2]])
    # what else the commit has is no change, if it has change data
    table.commit(table.file("x", changed, "cdc"), table.file("y", other, "cdc"), act("add", "z"), act("remove", "c"))
    taken, brought = [("delete", 2), ("update_preimage", 4), ("delete", 6)], [(1, "insert"), (3, "update_postimage")]
    assert table.rows(2) == [*taken, *((kind, x) for x, kind in brought), ("insert", 5)]
    assert table.rows(2, PAIR.remove(0)) == [(2,), (4,), (6,), (1,), (3,), (5,)]
    none = FileFormat("delta", PAIR).read(f"file:{table.log(2)}", [], "feed")
    assert sum(batch.num_rows for batch in none) == 6


def test_files_rewritten_without_a_change_of_rows_are_no_changes(tmp_path: Path) -> None:
    table = Table(tmp_path, field("id", "long"))
    table.commit(table.file("a", numbers(1)))
    table.commit(act("remove", "a", dataChange=False), table.file("b", numbers(1), dataChange=False))
    names = ("numTargetRowsInserted", "numTargetRowsUpdated", "numTargetRowsDeleted")
    for count, rows in (("0", []), ("1", [("delete", 1), ("insert", 1)])):
        info = {"operation": "MERGE", "operationMetrics": dict.fromkeys(names, count)}
        version = table.commit({"commitInfo": info}, act("remove", "b"), table.file("c", numbers(1)))
        assert table.rows(version) == rows
    assert table.rows(1) == []


def test_a_file_with_another_deletion_vector_has_changed_by_the_difference(tmp_path: Path) -> None:
    features = {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": ["deletionVectors"]}
    table = Table(tmp_path, field("id", "long"), **features)
    table.commit(table.file("a", numbers(*range(6)), deletionVector=inline(5)))
    assert table.rows(0) == [("insert", x) for x in range(5)]
    table.commit(act("remove", "a", deletionVector=inline(5)), act("add", "a", deletionVector=inline(0, 3)))
    assert table.rows(1) == [("delete", 0), ("delete", 3), ("insert", 5)]
    table.commit(act("add", "a"), act("remove", "a", deletionVector=inline(0, 3)))
    assert table.rows(2) == [("insert", 0), ("insert", 3)]
    table.commit(act("remove", "a", deletionVector=inline(1, 2)))
    assert table.rows(3) == [("delete", x) for x in (0, 3, 4, 5)]
    data = bitmap(1, 4)
    name = uuid.uuid4()
    framed = b"\1" + b"?" * 7 + struct.pack(">i", len(data)) + data + struct.pack(">I", zlib.crc32(data))
    where = tmp_path / "x" / f"deletion_vector_{name}.bin"
    where.parent.mkdir()
    where.write_bytes(framed)
    text = base64.b85encode(name.bytes).translate(bytes.maketrans(B85, Z85)).decode()
    stored = {"offset": 8, "sizeInBytes": len(data), "cardinality": 2}
    for kind, at in (("u", f"x{text}"), ("p", where.as_uri())):
        version = table.commit(act("add", "a", deletionVector=stored | {"storageType": kind, "pathOrInlineDv": at}))
        assert table.rows(version) == [("insert", x) for x in (0, 2, 3, 5)]
    for text in ("#0000" * 10, "abc", "ab_de" * 10):
        damaged = inline(1) | {"pathOrInlineDv": text}
        assert "is not base 85" in table.refusal(table.commit(act("add", "a", deletionVector=damaged)))
    where.write_bytes(framed[:-1] + bytes([framed[-1] ^ 1]))
    assert "deletion vector at byte 8 of" in table.refusal(version)
    where.unlink()
    assert "deletion_vector_" in table.refusal(version)


@given(st.sets(st.integers(0, 1 << 40), max_size=50), st.integers(0, 200000), st.integers(0, 1 << 17))
def test_deletion_vectors_of_any_rows(some: set[int], begin: int, count: int) -> None:
    rows = pyroaring.BitMap64(some | set(range(begin, begin + count)))
    data = struct.pack("<i", 1681511377) + rows.serialize()
    text = base64.b85encode(data + bytes(-len(data) % 4)).translate(bytes.maketrans(B85, Z85)).decode()
    vector = {"storageType": "i", "pathOrInlineDv": text, "sizeInBytes": len(data), "cardinality": len(rows)}
    assert deleted_rows(vector, "", lambda *_: b"").tolist() == sorted(rows)
    # delta-rs' own way of bytes that are no multiple of four
    tail = data[len(data) // 4 * 4 :]
    if tail:
        digits = [int.from_bytes(tail, "big") // 85**n % 85 for n in range(len(tail), -1, -1)]
        end = "#" * (4 - len(tail)) + "".join(chr(Z85[digit]) for digit in digits)
        assert deleted_rows(vector | {"pathOrInlineDv": text[:-5] + end}, "", lambda *_: b"").tolist() == sorted(rows)
    with pytest.raises(ValueError, match="its action says"):
        deleted_rows(vector | {"cardinality": len(rows) + 1}, "", lambda *_: b"")


@pytest.mark.parametrize("mode", ["name", "id"])
def test_mapped_columns_are_found_at_any_depth(tmp_path: Path, mode: str) -> None:
    inner = struct_of(mapped("X", "date", "col-4", 4), mapped("y", "integer", "col-5", 5))
    fields = [mapped("id", "long", "col-1", 1), mapped("a b", inner, "col-2", 2), mapped("l", array(inner), "col-3", 3)]
    protocol = {"minReaderVersion": 2, "minWriterVersion": 5}
    table = Table(tmp_path, **protocol)
    table.header[1] = table.metadata(
        *fields, mapped("p", "string", "col-6", 6), by=("p",), delta_columnMapping_mode=mode
    )
    # by id a file's names are its own
    names = [f"col-{n}" if mode == "name" else f"other{n}" for n in range(6)]
    ids = [{b"PARQUET:field_id": str(n).encode()} for n in range(6)]
    made = pa.struct(
        [pa.field(names[5], pa.int32(), metadata=ids[5]), pa.field(names[4], pa.date32(), metadata=ids[4])]
    )
    kinds = {1: INT, 2: made, 3: pa.list_(made)}
    columns = {
        1: [7, 8],
        2: [{names[4]: dt.date(9999, 12, 31), names[5]: 1}, None],
        3: [[{names[4]: dt.date(1, 1, 1)}], []],
    }
    schema = pa.schema([pa.field(names[n], kind, metadata=ids[n]) for n, kind in kinds.items()])
    rows = pa.Table.from_arrays([pa.array(columns[n], kind) for n, kind in kinds.items()], schema=schema)
    table.commit(table.file("a", rows, partitionValues={"col-6": "50%"}))
    declared = pa.struct([("x", pa.date32()), ("Y", INT)])  # names differ in case, and a type is wider
    wanted = pa.schema([("p", TEXT), ("ID", INT), ("a b", declared), ("l", pa.list_(declared))])
    first = {"x": dt.date(9999, 12, 31), "Y": 1}
    assert table.rows(0, wanted) == [
        ("50%", 7, first, [{"x": dt.date(1, 1, 1), "Y": None}]),
        ("50%", 8, None, []),
    ]
    if mode == "id":
        plain = table.file("b", numbers(1))
        table.commit(plain)
        assert "the file has no ids" in table.refusal(1)


@pytest.mark.parametrize(("reader", "mode"), [(1, "name"), (1, "id"), (2, "none"), (2, None)])
def test_physical_names_are_no_matter_where_columns_are_not_mapped(
    tmp_path: Path, reader: int, mode: str | None
) -> None:
    """PROTOCOL.md, "Reader Requirements for Column Mapping": display names, of partitions as well."""
    table = Table(tmp_path, minReaderVersion=reader, minWriterVersion=5)
    columns = [("id", "long"), ("s", struct_of(mapped("x", "long", "c9", 9))), ("p", "string")]
    fields = [mapped(name, kind, f"c{n}", n) for n, (name, kind) in enumerate(columns)]
    table.header[1] = table.metadata(*fields, by=("p",), **({"delta_columnMapping_mode": mode} if mode else {}))
    rows = pa.table({"id": [1], "s": [{"x": 2, "c9": 8}], "c0": [7]})
    table.commit(table.file("a", rows, partitionValues={"p": "here", "c2": "no"}))
    wanted = pa.schema([("id", INT), ("s", pa.struct([("x", INT)])), ("p", TEXT)])
    assert table.rows(0, wanted) == [(1, {"x": 2}, "here")]


def test_the_schema_is_that_of_the_commit(tmp_path: Path) -> None:
    table = Table(tmp_path, minReaderVersion=2, minWriterVersion=5)
    mode = {"delta_columnMapping_mode": "name"}
    inner = struct_of(field("x", "long"))
    table.header[1] = table.metadata(field("id", "long"), field("s", inner), field("old", "long"))
    rows = pa.table({"id": [1], "s": [{"x": 1}], "old": [2]})
    table.commit(table.file("a", rows))
    now = struct_of(mapped("x", "long", "x", 3), mapped("y", "date", "c7", 7))
    later = [mapped("id", "long", "id", 1), mapped("s", now, "s", 2), mapped("new", "long", "c8", 8),
             mapped("renamed", "long", "old", 4)]  # fmt: skip
    table.commit(table.metadata(*later, **mode))
    one = {"id": 3, "s": {"x": 1, "c7": dt.date(2026, 1, 1)}, "c8": 5, "old": 6}
    table.commit(table.file("b", pa.Table.from_pylist([one])))
    inner_kind = pa.struct([("x", INT), ("y", pa.date32())])
    wanted = pa.schema([("id", INT), ("s", inner_kind), ("new", INT)])
    assert table.rows(0, wanted) == [(1, {"x": 1, "y": None}, None)]
    assert table.rows(2, wanted) == [(3, {"x": 1, "y": dt.date(2026, 1, 1)}, 5)]
    assert "renamed later, from 'old'" in table.refusal(0, pa.schema([("renamed", INT)]))
    assert table.rows(2, pa.schema([("renamed", INT)])) == [(6,)]
    for name, version in (("old", 2), ("never", 0)):
        message = table.refusal(version, pa.schema([(name, INT)]))
        assert f"column '{name}'" in message
        assert "it is not among its columns id, s" in message
    nested = pa.schema([("s", pa.struct([("z", INT)]))])
    assert "column 's.z'" in table.refusal(2, nested)
    assert "not double" in table.refusal(2, pa.schema([("s", pa.struct([("x", INT), ("y", pa.float64())]))]))


@pytest.mark.parametrize("upgraded", [False, True])
def test_a_column_dropped_and_another_added_by_its_name_is_not_taken_for_it(tmp_path: Path, upgraded: bool) -> None:
    """Such a commit would bring (1, 5), and a later one take (1, null). Upgraded: mapped only when it was dropped."""
    table, mode = Table(tmp_path, minReaderVersion=2, minWriterVersion=5), {"delta_columnMapping_mode": "name"}
    wanted = pa.schema([("id", INT), ("s", pa.struct([("x", INT), ("c", INT)])), ("C", INT)])
    some = "c" if upgraded else "col-3"

    def columns(outer: str, inner: str) -> list[dict[str, Any]]:
        within = struct_of(mapped("x", "long", "x", 5), mapped("c", "long", inner, 4))
        return [mapped("id", "long", "id", 1), mapped("s", within, "s", 2), mapped("c", "long", outer, 3)]

    table.header[1] = table.metadata(*columns(some, some), **({} if upgraded else mode))
    first = pa.Table.from_pylist([{"id": 1, "s": {"x": 2, some: 3}, some: 5}])
    table.commit(table.file("a", first))
    assert table.rows(0, wanted) == [(1, {"x": 2, "c": 3}, 5)]
    table.commit(table.metadata(*columns(some, some), **mode))
    assert table.rows(0, wanted) == [(1, {"x": 2, "c": 3}, 5)]
    version = table.commit(table.metadata(*columns("col-8", "col-9"), **mode), act("remove", "a"))
    message = table.refusal(0, wanted)
    assert "column 's.c'" in message
    assert f"in data files it is '{some}', and 'col-9' in the latest version: it was renamed or dropped" in message
    message = table.refusal(0, wanted.remove(1))
    assert "column 'C'" in message
    assert f"in data files it is '{some}', and 'col-8'" in message
    inner = pa.schema([("id", INT), ("s", pa.struct([("x", INT)]))])
    assert table.rows(0, inner) == table.rows(version, inner) == [(1, {"x": 2})]


WIDER = [("byte", pa.int8(), 7, "double", pa.float64(), 7.0), ("integer", pa.int32(), -1, "long", INT, -1),
         ("float", pa.float32(), 0.5, "double", pa.float64(), 0.5),
         ("date", pa.date32(), dt.date(9999, 12, 31), "timestamp_ntz", pa.timestamp("us"), dt.datetime(9999, 12, 31)),
         ("short", pa.int16(), 5, "decimal(12,2)", pa.decimal128(12, 2), decimal.Decimal(5)),
         ("decimal(6,2)", pa.decimal128(6, 2), decimal.Decimal("-9999.99"), "decimal(12,4)", pa.decimal128(12, 4),
          decimal.Decimal("-9999.99"))]  # fmt: skip


@pytest.mark.parametrize(("before", "kind", "value", "after", "wide", "expected"), WIDER)
def test_types_that_were_widened(  # noqa: PLR0917
    tmp_path: Path, before: str, kind: pa.DataType, value: Any, after: str, wide: pa.DataType, expected: Any
) -> None:
    features = {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": ["typeWidening", "timestampNtz"]}
    table = Table(tmp_path, field("v", before), field("p", before), by=("p",), **features)
    table.commit(table.file("a", pa.table({"v": pa.array([value, None], kind)}), partitionValues={"p": str(value)}))
    table.commit(
        table.metadata(field("v", after), field("p", after), by=("p",)),
        act("remove", "a", partitionValues={"p": str(value)}),
    )
    both = pa.schema([("v", wide), ("p", wide)])
    assert table.rows(0, pa.schema([("v", kind), ("p", kind)])) == [(value, value), (None, value)]
    assert table.rows(0, both) == table.rows(1, both) == [(expected, expected), (None, expected)]


VALUES = [
    ("timestamp", UTC, "2026-01-01 12:30:00", dt.datetime(2026, 1, 1, 17, 30, tzinfo=dt.UTC)),
    ("timestamp", UTC, "9999-12-31T23:59:59.999999Z", dt.datetime(9999, 12, 31, 23, 59, 59, 999999, dt.UTC)),
    ("timestamp", UTC, "0001-01-01T00:00:00.000000Z", dt.datetime(1, 1, 1, tzinfo=dt.UTC)),
    ("timestamp_ntz", pa.timestamp("us"), "2026-01-01 12:30:00.5", dt.datetime(2026, 1, 1, 12, 30, 0, 500000)),
    ("date", pa.date32(), "0001-01-01", dt.date(1, 1, 1)),
    ("boolean", pa.bool_(), "true", True),
    ("double", pa.float64(), "-Infinity", float("-inf")),
    ("float", pa.float32(), "3.4028235E38", 3.4028234663852886e38),
    ("long", INT, "-9223372036854775808", -(1 << 63)),
    ("decimal(38,10)", pa.decimal128(38, 10), "1E-10", decimal.Decimal("1E-10")),
    ("binary", pa.binary(), "\x01\u00e9", b"\x01\xc3\xa9"),
    ("binary", pa.binary(), r"\u00FF\u0000", b"\xff\x00"),
    ("string", TEXT, r"\u00FF", r"\u00FF"),
]


@pytest.mark.parametrize(("kind", "arrow", "text", "value"), VALUES)
def test_partition_values_are_what_the_protocol_says(
    tmp_path: Path, kind: str, arrow: pa.DataType, text: str, value: Any
) -> None:
    table = Table(tmp_path, field("id", "long"), field("p", kind), by=("p",))
    texts = (text, "", None)
    table.commit(*(table.file(f"{n}", numbers(n), partitionValues={"p": x}) for n, x in enumerate(texts)))
    schema = pa.schema([("p", arrow), ("id", INT)])
    assert table.rows(0, schema, timeZone="America/New_York") == [(value, 0), (None, 1), (None, 2)]
    assert table.rows(0, pa.schema([("p", arrow)]), timeZone="America/New_York") == [(value,), (None,), (None,)]


def test_partition_values_that_are_none_are_refused(tmp_path: Path) -> None:
    for n, (kind, arrow, text) in enumerate(
        [
            ("long", INT, "1.5"),
            ("date", pa.date32(), "soon"),
            ("binary", pa.binary(), "\ufffd"),
            ("byte", pa.int8(), "200"),
        ]
    ):
        table = Table(tmp_path / str(n), field("id", "long"), field("p", kind), by=("p",))
        table.commit(table.file("a", numbers(1), partitionValues={"p": text}))
        message = table.refusal(0, pa.schema([("p", arrow)]))
        assert "column 'p'" in message
        assert repr(text) in message
    table.commit({"remove": {"path": "a", "dataChange": True}})
    assert "does not say its partition" in table.refusal(1, pa.schema([("p", arrow)]))


@given(value=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=30))
def test_partitions_of_any_text(tmp_path_factory: pytest.TempPathFactory, value: str) -> None:
    path = tmp_path_factory.mktemp("table") / "a b é"
    deltalake.write_deltalake(path, pa.table({"id": [1], "p": [value]}), partition_by=["p"], configuration=FEED)
    deltalake.DeltaTable(path).delete()
    read = FileFormat("delta", pa.schema([("_change_type", TEXT), ("p", TEXT), ("id", INT)]))
    commits = sorted((path / "_delta_log").glob("*.json"))
    rows = [
        row
        for x in commits
        for batch in read.read(f"file:{x}", ["p", "_change_type"], "in")
        for row in batch.to_pylist()
    ]
    assert [tuple(row.values()) for row in rows] == [(value, "insert"), (value, "delete")]


def test_timestamps_of_96_bits_keep_their_century(tmp_path: Path) -> None:
    """9999-12-31, the usual "valid to", became 1816-03-29."""
    table = Table(tmp_path, field("t", "timestamp"), field("s", struct_of(field("u", "timestamp"))))
    times = [dt.datetime(9999, 12, 31), dt.datetime(1, 1, 1), dt.datetime(1677, 9, 20), dt.datetime(2262, 4, 12), None]
    kind = pa.timestamp("us")
    rows = pa.table({"t": pa.array(times, kind), "s": pa.array([{"u": x} for x in times], pa.struct([("u", kind)]))})
    as_spark = {"use_deprecated_int96_timestamps": True, "store_schema": False}
    table.commit(table.file("a", rows, parquet=as_spark))
    instants = [None if x is None else x.replace(tzinfo=dt.UTC) for x in times]
    schema = pa.schema([("t", UTC), ("s", pa.struct([("u", UTC)]))])
    assert table.rows(0, schema) == [(x, {"u": x}) for x in instants]


def test_paths_are_those_of_uris(tmp_path: Path) -> None:
    table = Table(tmp_path / "a b%", field("id", "long"))
    for name in ("p=x%3Ay/a b+c", "50%/é", "%2541"):
        table.file(name, numbers(1))
    pq.write_table(numbers(2), tmp_path / "out side")
    encoded = ["p=x%253Ay/a%20b+c", "50%25/é", "%252541", f"file:{tmp_path}/out%20side", f"{tmp_path}/out%20side"]
    table.commit(*(act("add", path) for path in encoded))
    assert [x for _, x in table.rows(0)] == [1, 1, 1, 2, 2]
    table.commit(act("add", "gone%20file"))
    assert "version 1 of the table names" in table.refusal(1)
    assert "gone file, which is gone: VACUUM" in table.refusal(1)


@pytest.mark.parametrize("kind", ["classic", "parts", "uuid.json", "uuid.parquet"])
def test_the_schema_is_found_in_checkpoints_of_any_kind(tmp_path: Path, kind: str) -> None:
    table = Table(tmp_path, field("id", "long"))
    for n in range(4):
        table.commit(table.file(f"{n}", numbers(n)))
    log, named = tmp_path / "_delta_log", uuid.uuid4()
    protocol, metadata = table.header
    metadata = json.loads(json.dumps(metadata))
    rows = [protocol, metadata, {"add": {"path": "0"}}]
    pairs = pa.map_(TEXT, TEXT)
    kinds = {"schemaString": TEXT, "id": TEXT, "partitionColumns": pa.list_(TEXT), "configuration": pairs}
    columns = {"protocol": {"minReaderVersion": pa.int32()}, "metaData": kinds, "add": {"path": TEXT}}
    schema = pa.schema([(name, pa.struct(list(parts.items()))) for name, parts in columns.items()])
    metadata["metaData"]["configuration"] = list(metadata["metaData"]["configuration"].items())
    made = pa.Table.from_pylist(rows, schema)
    if kind == "parts":
        for part in (1, 2):
            pq.write_table(made.slice(part - 1, part), log / f"{1:020}.checkpoint.{part:010}.{2:010}.parquet")
        pq.write_table(
            made.slice(2), log / f"{2:020}.checkpoint.{1:010}.{2:010}.parquet"
        )  # its second part is not there
    elif kind == "uuid.json":
        lines = "\n".join(map(json.dumps, table.header))
        (log / f"{1:020}.checkpoint.{named}.json").write_text(lines)
    else:
        pq.write_table(made, log / f"{1:020}.checkpoint{'' if kind == 'classic' else f'.{named}'}.parquet")
    for version in (0, 1):
        table.log(version).unlink()
    assert table.rows(3) == [("insert", 3)]
    assert table.rows(2) == [("insert", 2)]
    table.commit(table.metadata(field("id", "long"), field("x", "long")), table.file("y", numbers(8)))
    table.commit(table.file("x", pa.table({"id": [9], "x": [1]})))
    assert table.rows(5, pa.schema([("x", INT), ("id", INT)])) == [(1, 9)]
    for checkpoint in log.glob("*.checkpoint.*"):
        checkpoint.unlink()
    # a reader that goes on from the version before still knows
    os.utime(table.log(2), ns=(1, 1))
    assert "does not have the schema of version 2 any more" in table.refusal(2)


def test_a_checkpoint_after_the_commit_has_its_schema_if_nothing_changed_between(tmp_path: Path) -> None:
    """So log cleanup of some writers leaves it, and so it was read by the schema of the latest version."""
    path = str(tmp_path)
    for number in range(4):
        deltalake.write_deltalake(path, numbers(number), mode="append", configuration=FEED)
    deltalake.DeltaTable(path).create_checkpoint()
    log = tmp_path / "_delta_log" / f"{0:020}.json"
    log.unlink()
    read = FileFormat("delta", PAIR)
    commit = f"file:{tmp_path}/_delta_log/{1:020}.json"
    assert [row for batch in read.read(commit, ["id"], "in") for row in batch.to_pylist()] == [{"id": 1}]


@pytest.mark.parametrize(
    ("protocol", "words"),
    [
        ({"minReaderVersion": 3, "readerFeatures": ["deletionVectors", "variantType"]}, "reader feature 'variantType'"),
        ({"minReaderVersion": 3, "readerFeatures": ["catalogManaged"]}, "reader feature 'catalogManaged'"),
        ({"minReaderVersion": 4}, "minReaderVersion is 4"),
    ],
)
def test_what_a_protocol_asks_and_is_not_done_is_refused_by_name(tmp_path: Path, protocol: Any, words: str) -> None:
    table = Table(tmp_path, field("id", "long"), **protocol)
    table.commit(table.file("a", numbers(1)))
    assert words in table.refusal(0)


def test_features_that_only_writers_need_are_no_matter(tmp_path: Path) -> None:
    features = ["appendOnly", "rowTracking", "clustering", "inCommitTimestamp", "somethingNew"]
    table = Table(tmp_path, field("id", "long"), minWriterVersion=7, writerFeatures=features)
    table.commit(table.file("a", numbers(1), baseRowId=0, defaultRowCommitVersion=0, clusteringProvider="liquid"))
    assert table.rows(0) == [("insert", 1)]


def test_commits_without_a_feed_are_refused(tmp_path: Path) -> None:
    table = Table(tmp_path, field("id", "long"))
    table.header[1]["metaData"]["configuration"] = {}
    table.commit(table.file("a", numbers(1)))
    table.commit(table.metadata(field("id", "long")), table.file("b", numbers(2)))
    assert "in version 0 change data was not recorded (delta.enableChangeDataFeed has to be set" in table.refusal(0)
    assert table.rows(1) == [("insert", 2)]


def test_the_time_of_a_commit_is_its_own_or_its_files_in_order(tmp_path: Path) -> None:
    table = Table(tmp_path, field("id", "long"))
    for n, at in enumerate((5000, 4000, 9000)):
        table.commit(table.file(f"{n}", numbers(n)))
        os.utime(table.log(n), ns=(at * 1000000, at * 1000000 + 999))
    table.commit({"commitInfo": {"inCommitTimestamp": 7000}}, table.file("3", numbers(3)))
    schema = pa.schema([("_commit_timestamp", UTC), ("_commit_version", INT)])
    expected = [(5000, 0), (5001, 1), (9000, 2), (7000, 3)]
    epoch = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
    assert [table.rows(n, schema) for n in range(4)] == [
        [(epoch + dt.timedelta(milliseconds=x), n)] for x, n in expected
    ]


@pytest.mark.parametrize("seed", range(3))
def test_the_feed_of_deltalakes_tables_folds_to_the_table(tmp_path: Path, seed: int) -> None:
    """deltalake itself says what the table is at each version."""
    path, choice = str(tmp_path / "t"), random.Random(seed)
    by = choice.choice([[], ["p"]])
    columns = pa.schema([("id", INT), ("p", TEXT), ("v", pa.float64())])

    def some(low: int) -> pa.Table:
        pairs = [(choice.choice(["x:y", "50%", "a b", None]), choice.choice([0.5, None, 2.0])) for _ in range(6)]
        return pa.table([range(low, low + 6), *map(list, zip(*pairs, strict=True))], schema=columns)

    deltalake.write_deltalake(path, some(0), partition_by=by, configuration=FEED)
    for _ in range(8):
        table, low = deltalake.DeltaTable(path), choice.randrange(20)
        match choice.randrange(5):
            case 0:
                table.update(predicate=f"id % 3 = {choice.randrange(3)}", updates={"v": "id / 2.0"})
            case 1:
                table.delete(f"id % 4 = {choice.randrange(4)}")
            case 2:
                table.optimize.compact()
            case 3:
                deltalake.write_deltalake(path, some(low), mode=choice.choice(["append", "overwrite"]))
            case _:
                merge = table.merge(some(low), "t.id = s.id", source_alias="s", target_alias="t")
                merge.when_matched_update_all().when_not_matched_insert_all().execute()
    schema = columns.insert(0, pa.field("_change_type", TEXT))
    folded: Counter[Any] = Counter()
    for version in range(deltalake.DeltaTable(path).version() + 1):
        commit = f"file:{path}/_delta_log/{version:020}.json"
        for batch in FileFormat("delta", schema).read(commit, schema.names, "in"):
            for kind, *row in (tuple(row.values()) for row in batch.to_pylist()):
                folded[tuple(row)] += -1 if kind in ("delete", "update_preimage") else 1
                assert folded[tuple(row)] >= 0
        there = deltalake.DeltaTable(path, version=version).to_pyarrow_table().select(["id", "p", "v"])
        assert +folded == Counter(tuple(row.values()) for row in there.to_pylist())


REPORTED = [("department", "R&D"), ("x%20x", "1"), ("x", "A/A"), ("x", "B B"), ("Exchange_Code", "ID$"), ("p", "x%3Ay"),
            ("product", "product 1 (beta)"), ("G_CA", "[*]?{a}"), ("p", "a\\b"), ("p", "#1")]  # fmt: skip


@pytest.mark.parametrize(("column", "value"), REPORTED)
def test_partitions_of_public_reports(tmp_path: Path, column: str, value: str) -> None:
    """delta-rs 433, 495, 1228, 1299, 1591, delta 2280, ClickHouse 111758: a file not found, or a null."""
    rows = pa.table({"id": [1], column: [value]})
    deltalake.write_deltalake(tmp_path, rows, partition_by=[column], configuration=FEED)
    deltalake.DeltaTable(tmp_path).update(updates={"id": "2"})
    read = FileFormat("delta", pa.schema([("id", INT), (column, TEXT)]))
    commits = sorted((tmp_path / "_delta_log").glob("*.json"))
    parts = [part for x in commits for part in read.read(f"file:{x}", ["id", column], "in")]
    found = [tuple(row.values()) for part in parts for row in part.to_pylist()]
    assert found == [(1, value), (1, value), (2, value)]


def test_a_deletion_vector_of_more_than_64_kib(tmp_path: Path) -> None:
    """Spark's own feed cannot be read then (delta 5662)."""
    features = {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": ["deletionVectors"]}
    table, count = Table(tmp_path, field("id", "long"), **features), 700_000
    gone = random.Random(1).sample(range(count), count // 2)
    table.commit(table.file("a", numbers(*range(count))))
    vector = inline(*gone)
    assert vector["sizeInBytes"] > 65536
    table.commit(act("remove", "a", deletionVector=inline(*gone[:5])), act("add", "a", deletionVector=vector))
    read = FileFormat("delta", PAIR).read(f"file:{table.log(1)}", PAIR.names, "feed")
    made = pa.Table.from_batches(read)
    assert made["id"].to_pylist() == sorted(gone[5:])
    assert set(made["_change_type"].to_pylist()) == {"delete"}


def test_a_table_that_spark_wrote() -> None:
    """Column mapping, row tracking, in-commit timestamps and INT96 by Spark 4.2 with delta-spark 4.4.

    Eight rows are inserted, ``valid to`` a day less each and ``s.x`` a day more; 0 and 3 are deleted, by a deletion
    vector; ``s`` of 5 becomes null; then ``RESTORE TO VERSION AS OF 1``, which has no change data.
    """

    def row(number: int, *, null: bool = False) -> tuple[Any, ...]:
        valid_to = dt.datetime(9999, 12, 31, 5, tzinfo=dt.UTC) - dt.timedelta(number)  # midnight in New York
        inner = {"x": dt.date(1, 1, 1) + dt.timedelta(number), "n": number}
        return (number, "x:y" if number % 4 == 0 else "50% é", valid_to, None if null else inner)

    inner = pa.struct([("x", pa.date32()), ("n", INT)])
    schema = pa.schema([("_change_type", TEXT), ("id", INT), ("p", TEXT), ("valid to", UTC), ("s", inner)])
    read = FileFormat("delta", schema)
    feed = []
    for version in range(5):
        commit = f"file:{Path(__file__).parent}/delta_by_spark/_delta_log/{version:020}.json"
        batches = read.read(commit, schema.names, "feed")
        feed.append([tuple(row.values()) for batch in batches for row in batch.to_pylist()])
    inserted, deleted = ([(kind, *row(x)) for x in some] for kind, some in (("insert", range(8)), ("delete", (3, 0))))
    assert feed[0] == []
    assert sorted(feed[1], key=repr) == sorted(inserted, key=repr)
    assert feed[2] == deleted
    assert feed[3] == [("update_preimage", *row(5)), ("update_postimage", *row(5, null=True))]
    assert feed[4] == [("delete", *row(5, null=True)), *(("insert", *row(x)) for x in (3, 5, 0))]
