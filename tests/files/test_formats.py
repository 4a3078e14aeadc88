"""Files of every format: written tables come back, columns and paths are found, what is wrong is named."""

from __future__ import annotations

import datetime as dt
import gzip
import json
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.orc as porc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as hs

from gpu_ops.errors import BadInputError, DescriptionError
from gpu_ops.files import binary_files, formats
from gpu_ops.files.formats import FORMATS, FileFormat

UTC = pa.timestamp("us", "UTC")
LOCAL = pa.timestamp("us")
BINARY = ("parquet", "orc", "arrow")
PLAIN = tuple(name for name in FORMATS if name != "delta")  # whose file is a commit, and has its own test
FULL = pa.schema(
    [
        ("b", pa.int8()), ("s", pa.int16()), ("i", pa.int32()), ("l", pa.int64()), ("f", pa.float32()),
        ("d", pa.float64()), ("dec", pa.decimal128(38, 10)), ("t", pa.string()), ("y", pa.bool_()),
        ("day", pa.date32()), ("at", UTC), ("local", LOCAL),
    ]
)  # fmt: skip
NESTED = pa.schema(
    [
        ("arr", pa.list_(pa.int32())),
        ("m", pa.map_(pa.string(), UTC)),
        ("st", pa.struct([("p", LOCAL), ("q", pa.list_(pa.struct([("r", UTC), ("day", pa.date32())])))])),
        ("bin", pa.binary()),
    ]
)
INF, NAN = float("inf"), float("nan")
ROWS: list[dict[str, Any]] = [
    {
        "b": -128, "s": 32767, "i": -(2**31), "l": 2**63 - 1, "f": 0.10000000149011612, "d": NAN,
        "dec": Decimal("1234567890123456789012345678.0123456789"), "t": 'ü "x", \\ \'', "y": True,
        "day": dt.date(2024, 2, 29), "at": dt.datetime(2024, 3, 10, 7, 30, 0, 1, dt.UTC),
        "local": dt.datetime(1969, 12, 31, 23, 59, 59, 999999),
        "arr": [1, None, -1], "m": [("k", dt.datetime(2024, 1, 1, tzinfo=dt.UTC)), ("", None)], "bin": b"\x00\xff",
        "st": {"p": dt.datetime(2024, 1, 1), "q": [{"r": dt.datetime(2024, 1, 1, tzinfo=dt.UTC), "day": None}, None]},
    },
    {},
    {
        "d": -INF, "f": INF, "dec": Decimal("-0.0000000001"), "t": "", "y": False, "day": dt.date(1970, 1, 1),
        "arr": [], "m": [], "bin": b"", "st": {"p": None, "q": []},
    },
    {"d": -0.0, "t": "\U0001f600", "st": {"p": None, "q": None}},
]  # fmt: skip


def table(schema: pa.Schema, rows: Sequence[dict[str, Any]] = ROWS) -> pa.Table:
    return pa.Table.from_pylist([{name: row.get(name) for name in schema.names} for row in rows], schema)


def write(path: Path, name: str, rows: pa.Table) -> Path:
    if name == "parquet":
        pq.write_table(rows, path)
    elif name == "orc":
        porc.write_table(rows, path)
    elif name == "arrow":
        with pa.ipc.new_file(str(path), rows.schema) as writer:
            writer.write_table(rows)
    elif name == "csv":
        pcsv.write_csv(rows, path, pcsv.WriteOptions(include_header=False))
    else:
        path.write_text("".join(f"{as_json(row)}\n" for row in rows.to_pylist()))
    return path


def as_json(value: Any) -> str:
    """A value as JSON; a map's pairs come as a list of tuples."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}.get(repr(value), repr(value))
    if isinstance(value, int):
        return str(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{as_json(k)}:{as_json(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(as_json, value)) + "]"
    if isinstance(value, Decimal):
        return format(value, "f")
    return json.dumps(value.isoformat() if isinstance(value, dt.date) else str(value))


def read(
    path: Path | str, name: str, schema: pa.Schema, columns: Sequence[str] | None = None, **options: str
) -> pa.Table:
    columns = schema.names if columns is None else columns
    wanted = pa.schema([schema.field(column) for column in columns])
    batches = list(FileFormat(name, schema, tuple(options.items())).read(str(path), columns, "orders"))
    assert all(batch.schema.equals(wanted) for batch in batches)
    made = pa.Table.from_batches(batches, wanted)
    made.validate(full=True)
    return made


def same(left: pa.Table, right: pa.Table) -> None:
    assert repr(left.to_pylist()) == repr(right.to_pylist())  # repr: NaN is equal to itself, zeros are not


def refused(path: Path, name: str, schema: pa.Schema, **options: str) -> BadInputError:
    with pytest.raises(BadInputError) as caught:
        read(path, name, schema, **options)
    assert caught.value.input_name == "orders"
    assert str(path) in str(caught.value)
    return caught.value


@pytest.mark.parametrize("name", BINARY)
def test_nested_values(name: str, tmp_path: Path) -> None:
    there = table(NESTED)
    same(read(write(tmp_path / "f", name, there), name, NESTED), there)


_NUMBERS = {
    pa.int8(): hs.integers(-128, 127),
    pa.int64(): hs.integers(-(2**63), 2**63 - 1),
    pa.float32(): hs.floats(width=32),
    pa.float64(): hs.floats(),
    pa.decimal128(12, 3): hs.decimals(-(10**8), 10**8, places=3),
    pa.bool_(): hs.booleans(),
    pa.date32(): hs.dates(dt.date(1583, 1, 1)),
    UTC: hs.datetimes(dt.datetime(1700, 1, 2), dt.datetime(2260, 1, 1), timezones=hs.just(dt.UTC)),
    LOCAL: hs.datetimes(dt.datetime(1700, 1, 2), dt.datetime(2260, 1, 1)),
    # a line break is for CSV's multiLine, a null character in no file of text
    pa.string(): hs.text(hs.characters(exclude_categories=["Cs", "Cc"])),
}


@hs.composite
def tables(draw: hs.DrawFn) -> pa.Table:
    kinds = draw(hs.lists(hs.sampled_from(list(_NUMBERS)), min_size=1, max_size=5))
    size = draw(hs.integers(0, 12))
    columns = [pa.array(draw(hs.lists(hs.none() | _NUMBERS[k], min_size=size, max_size=size)), k) for k in kinds]
    return pa.table([pa.array(range(size), pa.int64()), *columns], names=[f"c{n}" for n in range(len(kinds) + 1)])


@pytest.mark.parametrize("name", PLAIN)
@given(there=tables(), block=hs.sampled_from([1 << 9, 8 << 20]))
def test_what_is_written_is_read(
    name: str, there: pa.Table, block: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = write(tmp_path_factory.mktemp("f") / "f", name, there)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "_BLOCK_BYTES", block)
        patch.setattr(binary_files, "ROWS", 5)
        same(read(path, name, there.schema), there)


@pytest.mark.parametrize("name", PLAIN)
def test_values_of_every_type_in_any_order(name: str, tmp_path: Path) -> None:
    there = table(FULL)
    path = write(tmp_path / "f", name, there)
    same(read(path, name, FULL), there)
    for columns in (["t", "b"], ["local"], list(reversed(FULL.names))):
        same(read(path, name, FULL, columns), there.select(columns))


@pytest.mark.parametrize("name", ["csv", *BINARY])
def test_a_column_that_is_missing(name: str, tmp_path: Path) -> None:
    there = pa.table({"x": ["1"], "more": ["2"]})
    path = tmp_path / "f"
    options = {"header": "true"} if name == "csv" else {}
    if name == "csv":
        path.write_text("x,more\n1,2\n")
    else:
        write(path, name, there)
    schema = pa.schema([("t", pa.int32()), ("x", pa.string())])
    error = refused(path, name, schema, **options)
    assert error.column == "t"
    assert read(path, name, schema, missingColumns="null", **options).to_pylist() == [{"t": None, "x": "1"}]
    # all of them: the rows are there
    assert read(path, name, schema, ["t"], missingColumns="null", **options).to_pylist() == [{"t": None}]


@pytest.mark.parametrize("name", ["a b.x", "a%20b.x", "a+b.x", "ä€.x", "a#b?c.x", "a:b.x", "a'b.x", "a\nb.x"])
@pytest.mark.parametrize("spelling", ["{}", "file:{}", "file://{}", "file://localhost{}"])
def test_names_of_files(name: str, spelling: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("1\n")
    rows = read(spelling.format(tmp_path / name), "csv", pa.schema([("x", pa.int8())]))
    assert rows["x"].to_pylist() == [1]


@pytest.mark.parametrize("name", ["csv", "json"])
@pytest.mark.parametrize("codec", ["gz", "zst", "bz2"])
def test_compressed_text(name: str, codec: str, tmp_path: Path) -> None:
    there = table(FULL)
    plain = write(tmp_path / "plain", name, there).read_bytes()
    path = tmp_path / f"f.{codec}"
    with pa.CompressedOutputStream(str(path), {"gz": "gzip", "zst": "zstd"}.get(codec, codec)) as stream:
        stream.write(plain)
    same(read(path, name, FULL), there)


@pytest.mark.parametrize("name", ["csv", "json"])
@pytest.mark.parametrize("content", [b"", b"\n", b"\r\n \n" * 3, b"\n" * 2000])
def test_a_file_without_rows(name: str, content: bytes, tmp_path: Path) -> None:
    if name == "csv":
        content = content.replace(b" ", b"")  # there a value
    path = tmp_path / "f"
    path.write_bytes(content)
    assert read(path, name, FULL).num_rows == 0
    packed = tmp_path / "f.gz"
    packed.write_bytes(gzip.compress(content))
    assert read(packed, name, FULL).num_rows == 0


@pytest.mark.parametrize("name", BINARY)
def test_a_table_without_rows(name: str, tmp_path: Path) -> None:
    assert read(write(tmp_path / "f", name, table(FULL, [])), name, FULL).num_rows == 0


@pytest.mark.parametrize("name", PLAIN)
def test_a_file_that_is_not_there(name: str, tmp_path: Path) -> None:
    assert refused(tmp_path / "none", name, FULL).column is None
    refused(tmp_path, name, FULL)


def test_a_file_system_that_arrow_does_not_know() -> None:
    with pytest.raises(BadInputError, match=r"orders.*foo://host/a.*spark\.readStream"):
        read("foo://host/a", "csv", FULL)


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize("damage", ["empty", "text", "cut", "turned"])
def test_damaged_files(name: str, damage: str, tmp_path: Path) -> None:
    path = write(tmp_path / "f", name, table(FULL))
    whole = path.read_bytes()
    cut = whole[: len(whole) // 2]
    made = {"empty": b"", "text": b"no such file\n" * 20, "cut": cut, "turned": cut[::-1] + whole[len(cut) :]}
    path.write_bytes(made[damage])
    refused(path, name, FULL)


@pytest.mark.parametrize("name", ["csv", "json"])
def test_damaged_compression(name: str, tmp_path: Path) -> None:
    path = tmp_path / "f.gz"
    path.write_bytes(gzip.compress(write(tmp_path / "f", name, table(FULL)).read_bytes())[:-20])
    refused(path, name, FULL)


@pytest.mark.parametrize(
    ("name", "kind", "options", "said"),
    [
        ("avro", pa.int8(), {}, "there are csv"),
        ("csv", pa.int8(), {"delimiter": ";"}, "delimiter"),
        ("json", pa.int8(), {"missingColumns": "null"}, "missingColumns"),
        ("csv", pa.int8(), {"header": "yes"}, "true or false"),
        ("csv", pa.int8(), {"sep": "||"}, "one character"),
        ("csv", pa.int8(), {"quote": "“"}, "one character"),
        ("csv", pa.int8(), {"encoding": "utf-9"}, "utf-9"),
        ("csv", pa.int8(), {"timeZone": "America/Nowhere"}, "America/Nowhere"),
        ("orc", pa.int8(), {"missingColumns": "maybe"}, "fail or null"),
        ("csv", pa.list_(pa.int8()), {}, "column 'x' is list"),
        ("csv", pa.duration("us"), {}, "column 'x' is duration"),
        ("json", pa.binary(), {}, "column 'x' is binary"),
        ("json", pa.list_(pa.struct([("y", pa.binary())])), {}, "column 'x' is list"),
        ("json", pa.map_(pa.string(), pa.int8()), {}, "column 'x' is map"),
    ],
)
def test_what_cannot_be_described(name: str, kind: pa.DataType, options: dict[str, str], said: str) -> None:
    with pytest.raises(DescriptionError, match=said):
        FileFormat(name, pa.schema([("x", kind)]), tuple(options.items()))
