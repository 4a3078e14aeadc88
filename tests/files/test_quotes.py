"""Quotes of CSV files, judged a block at a time, held against readers that go from one character to the next."""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import slow_but
from hypothesis import given
from hypothesis import strategies as hs

from gpu_ops.errors import BadInputError
from gpu_ops.files import csv_files, formats
from gpu_ops.files.columns import WrongError
from gpu_ops.files.csv_files import Quotes
from gpu_ops.files.formats import FileFormat

pytestmark = pytest.mark.thorough

PAIR = pa.schema([("id", pa.int64()), ("s", pa.string())])


def parsed(text: str, *, escape: str, block: int, multi_line: bool = True) -> list[list[str]] | None:
    """The rows of what `Quotes` makes of a text, None where it refuses it."""

    def again() -> pa.NativeFile:
        return pa.BufferReader(text.encode())

    quotes = Quotes(again, block, ",", '"', escape, multi_line=multi_line, drop_blanks=False)
    try:
        made = [bytes(quotes.rows(block)).decode() for block in quotes.blocks()]
    except WrongError:
        return None
    # each block has whole rows
    return [row for part in made for row in csv.reader(io.StringIO(part, newline=""), strict=True) if row]


def doubled(text: str) -> list[list[str]] | None:
    try:
        return [row for row in csv.reader(io.StringIO(text, newline=""), strict=True) if row]
    except csv.Error:
        return None


def escaped(text: str) -> list[list[str]] | None:
    """A reader of Spark's spelling, a character at a time."""
    rows, row, at = [], [""], 0
    while at < len(text):
        begins = not row[-1] and (at == 0 or text[at - 1] in ",\n")
        if text[at] == '"' and begins:
            at += 1
            while True:
                if at == len(text):
                    return None
                if text[at] == "\\" and text[at + 1 : at + 2] in ('"', "\\"):
                    at += 1
                elif text[at] == '"':
                    break
                row[-1] += text[at]
                at += 1
            at += 1
            if at < len(text) and text[at] not in ",\n":
                return None
        elif text[at] in ",\n":
            if text[at] == ",":
                row.append("")
            else:
                rows, row = [*rows, row], [""]
            at += 1
        else:
            row[-1] += text[at]
            at += 1
    return [*rows, row]


@pytest.mark.parametrize(("escape", "reader"), slow_but([("", doubled), ("\\", escaped)], ("", doubled)))
def test_every_short_text(escape: str, reader: Callable[[str], list[list[str]] | None]) -> None:
    """`"a"b` was `ab`, and an escape outside quotes was one."""
    refused = 0
    for length in range(7 if escape else 8):
        for letters in itertools.product('",x\n' + escape, repeat=length):
            text = "".join(letters)
            expected, found = reader(text), parsed(text, escape=escape, block=64)
            if found is not None and expected is not None:
                # an empty line is no row, and a quoted empty field is one: csv does not tell a row of one from it
                found, expected = ([row for row in rows if row != [""]] for rows in (found, expected))
            assert found == expected, repr(text)
            refused += found is None
    assert refused > 100


@given(
    fields=hs.lists(hs.text(hs.sampled_from('",x\n\\ü'), max_size=5), min_size=1, max_size=60),
    block=hs.integers(16, 90),
    escape=hs.sampled_from(["", "\\"]),
)
def test_blocks_of_any_size(fields: list[str], block: int, escape: str) -> None:
    quote = {ord('"'): f'{escape or chr(34)}"'} | ({ord(escape): escape * 2} if escape else {})
    plain = [x for x in fields if not x.startswith('"') and not set(x) & set(",\n")]
    text = "".join(f'"{x.translate(quote)}","{n}"\n' for n, x in enumerate(fields)) + "".join(f"{x},y\n" for x in plain)
    expected = [[x, str(n)] for n, x in enumerate(fields)] + [[x, "y"] for x in plain]
    assert parsed(text, escape=escape, block=block + 16) == expected


@pytest.mark.parametrize("escape", ["", "\\"])
def test_in_a_file_as_it_should_be_quotes_are_counted(monkeypatch: pytest.MonkeyPatch, escape: str) -> None:
    """Two thirds of the time that such a file took went into what only others need."""
    judged: list[int] = []
    honest = csv_files._judged
    monkeypatch.setattr(csv_files, "_judged", lambda *by: (judged.append(len(by[0])), honest(*by))[1])
    quoted = f'1,"a,{escape or chr(34)}""\n"2",""\n3,"b"\n'
    expected = [["1", 'a,"'], ["2", ""], ["3", "b"]]
    assert parsed(quoted, escape=escape, block=64, multi_line=False) == expected
    assert not judged
    beside = quoted + '4,5" wide\n'
    assert parsed(beside, escape=escape, block=64, multi_line=False) == [*expected, ["4", '5" wide']]
    assert len(judged) == 1


def rows(path: Path, name: str, schema: pa.Schema, data: bytes, columns: Sequence[str], **options: str) -> Any:
    path.write_bytes(data)
    try:
        found = list(FileFormat(name, schema, tuple(options.items())).read(str(path), columns, "in"))
    except BadInputError as error:
        return str(error)
    return [row for batch in found for row in batch.to_pylist()]


WRONG: list[tuple[str, bytes, dict[str, str], str]] = [
    ("csv", b'1,"20 inch\n2,plain\n3,"x\n4,end\n', {}, "line 1: a quoted value has a line break"),
    ("csv", b'1,y\r\n2,"20 inch\r\n3,plain"\r\n', {}, "line 2: a quoted value has a line break"),
    ("csv", b'1,y\n2,"a\rb"\n', {}, "line 2: a quoted value has a line break"),
    ("csv", b'id,s\n1,"20 inch\n2,x\n', {"header": "true", "multiLine": "true"}, "line 2: a quoted value has no end"),
    ("csv", b'1,y\n2,"a"b\n', {}, "line 2: a quote stands within a value or behind its end"),
    ("csv", b'1,y\n2,"a\\"b"\n', {}, "line 2: a quote stands within a value or behind its end.*escape="),
    ("csv", b'1,y\n2,"a""b"\n', {"escape": "\\"}, "line 2: a quote stands within a value"),
    ("csv", b"1,y\n2,\xff\n", {}, "column 's'"),
    ("csv", b"1,y\n2,z,w\n", {}, "Row #2: Expected 2 columns, got 3"),
    ("csv", gzip.compress(b"1,y\n" * 99, mtime=0), {}, r"it is compressed \(gzip\), and its name does not say so"),
    ("json", gzip.compress(b'{"id":1}\n', mtime=0), {}, r"it is compressed \(gzip\), and its name does not say so"),
    ("json", b'{"id":1,"s":5}\n', {}, "changed from string to number"),
    ("json", b'{"id":1}\n null\n', {}, "a line is no object"),
    ("json", b'{"id":1}\n\0\n{"id":2}\n', {}, "a line is no object"),
    ("json", b'{"id":1}{"id":2}\n', {}, "a line has several objects"),
    ("json", b'{"id":\n1}\n', {}, "a line is no object"),
]


@pytest.mark.parametrize(("name", "data", "options", "said"), WRONG)
def test_what_is_wrong_does_not_depend_on_the_columns_read(
    name: str, data: bytes, options: dict[str, str], said: str, tmp_path: Path
) -> None:
    """With a stray quote in a column that was not read, the rows behind it vanished."""
    found = [rows(tmp_path / "f", name, PAIR, data, columns, **options) for columns in (["id"], ["s"], [], ["s", "id"])]
    assert len(set(found)) == 1
    assert re.search(said, found[0]) is not None, found[0]


def test_a_value_of_another_type_in_a_column_that_is_not_read(tmp_path: Path) -> None:
    for name, data in (("csv", b"1,a\nq,b\n"), ("json", b'{"id":1}\n{"id":"q","s":"b"}\n')):
        assert re.search("column 'id'|Column\\(/id\\)", rows(tmp_path / "f", name, PAIR, data, ["s"]))
    out = io.BytesIO()
    pq.write_table(pa.table({"id": [1, 2**40], "s": ["a", "b"]}), out)
    narrow = pa.schema([("id", pa.int32()), ("s", pa.string())])
    assert "column 'id'" in rows(tmp_path / "f", "parquet", narrow, out.getvalue(), ["s"])
    missing = pa.schema([*PAIR, ("t", pa.string())])
    assert "column 't'" in rows(tmp_path / "f", "parquet", missing, out.getvalue(), ["s"])


@pytest.mark.parametrize("seed", range(8))
def test_random_bytes_whatever_columns_are_read(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choice, judge = random.Random(seed), Quotes.rows
    monkeypatch.setattr(formats, "_BLOCK_BYTES", choice.choice([40, 1 << 20]))
    for _ in range(60):
        name = choice.choice(["csv", "json"])
        pieces = ["1", '"', ",", "x", "\n", "1,x\n", '2,"y"\n', "\\", "\r\n", '3,"a""b"\n', " "]
        if name == "json":
            pieces = [
                '{"id":1,"s":"x"}\n',
                '{"id":2}',
                "\n",
                " ",
                '{"s":"NaN"}\n',
                "null",
                "{",
                '{"id":"x"}\n',
                "\\",
                "é",
            ]
        data = "".join(choice.choices(pieces, k=choice.randrange(9))).encode()
        options = choice.choice([{}, {"multiLine": "true"}, {"escape": "\\"}]) if name == "csv" else {}
        whole = rows(tmp_path / "f", name, PAIR, data, PAIR.names, **options)
        for columns in (["id"], ["s"], []):
            part = rows(tmp_path / "f", name, PAIR, data, columns, **options)
            kept = whole if isinstance(whole, str) else [{x: row[x] for x in columns} for row in whole]
            assert part == kept, data
        with monkeypatch.context() as exactly:  # not only where there are fewer rows than lines
            exactly.setattr(Quotes, "rows", lambda quotes, block, **_: judge(quotes, block))
            assert rows(tmp_path / "f", name, PAIR, data, PAIR.names, **options) == whole, data


def test_nan_and_infinities_as_spark_writes_them(tmp_path: Path) -> None:
    schema = pa.schema(
        [
            ("x", pa.float64()), ("s", pa.string()), ("l", pa.list_(pa.float32())),
            ("n", pa.struct([("s", pa.string()), ("x", pa.float64()), ("deep", pa.list_(pa.list_(pa.float64())))])),
        ]
    )  # fmt: skip
    lines = [
        '{"x":"NaN","s":"NaN","l":["NaN",1.5,"-Infinity",null,"INF"],"n":{"s":"NaN","x":"+INF","deep":[[],["NaN"]]}}',
        '{"x" : 2.5,"s":"\\"x\\":\\"NaN\\"","n":{"s":"Infinity"},"more":{"x":"NaN"}}',
        '{"x":"-INF","s":"x","l":[]}',
    ]
    found = rows(tmp_path / "f", "json", schema, "\n".join(lines).encode(), schema.names)
    nan, inf = float("nan"), float("inf")
    expected = [
        {"x": nan, "s": "NaN", "l": [nan, 1.5, -inf, None, inf], "n": {"s": "NaN", "x": inf, "deep": [[], [nan]]}},
        {"x": 2.5, "s": '"x":"NaN"', "l": None, "n": {"s": "Infinity", "x": None, "deep": None}},
        {"x": -inf, "s": "x", "l": [], "n": None},
    ]
    assert repr(found) == repr(expected)
    assert json.loads(lines[1])["s"] == expected[1]["s"]
    assert "changed from number to string" in rows(tmp_path / "f", "json", schema, b'{"x":"1.5"}', ["x"])
