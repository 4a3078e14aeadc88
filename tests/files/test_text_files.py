"""CSV and JSON files: every option, the times without a zone, and what is wrong named with column and sample."""

from __future__ import annotations

import datetime as dt
import threading
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from gpu_ops.errors import BadInputError
from gpu_ops.files import formats
from gpu_ops.files.formats import FileFormat

UTC = pa.timestamp("us", "UTC")
LOCAL = pa.timestamp("us")
NEW_YORK = "America/New_York"
TWO = pa.schema([("a", pa.int32()), ("b", pa.string())])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "f"


def rows(file: Path, name: str, schema: pa.Schema, text: str | bytes, **options: str) -> list[tuple[Any, ...]]:
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    found = FileFormat(name, schema, tuple(options.items())).read(str(file), schema.names, "orders")
    return [tuple(row.values()) for batch in found for row in batch.to_pylist()]


def values(file: Path, name: str, kind: pa.DataType, *texts: str, **options: str) -> list[Any]:
    """Of a column, each text in a row with a key."""
    line = '{{"k":1,"x":{}}}\n' if name == "json" else "1,{}\n"
    schema = pa.schema([("k", pa.int8()), ("x", kind)])
    return [row[1] for row in rows(file, name, schema, "".join(map(line.format, texts)), **options)]


def error(file: Path, name: str, schema: pa.Schema, text: str | bytes, **options: str) -> BadInputError:
    with pytest.raises(BadInputError) as caught:
        rows(file, name, schema, text, **options)
    assert caught.value.input_name == "orders"
    assert str(file) in caught.value.problem
    return caught.value


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ('1,x\n2,\n3,""\n4," "', {}, [(1, "x"), (2, None), (3, ""), (4, " ")]),
        ("1,x\r\n\r\n2,y\r\n\r\n", {}, [(1, "x"), (2, "y")]),
        ("\ufeff1,x\n", {}, [(1, "x")]),
        (',\n,"a,""b"""\n', {}, [(None, None), (None, 'a,"b"')]),
        ("1,it's \\n #1\n", {}, [(1, "it's \\n #1")]),
        ("b,c,a\nx,?,1\ny,,\n", {"header": "true"}, [(1, "x"), (None, "y")]),
        ('"a","b"\r\n"1","x"\r\n', {"header": "true"}, [(1, "x")]),
        ("a,b\n", {"header": "true"}, []),
        ("1;x,y\n2;'a;''b'", {"sep": ";", "quote": "'"}, [(1, "x,y"), (2, "a;'b")]),
        ('1\t"x"\n', {"sep": "\t"}, [(1, "x")]),
        ('1,"a\\"b"\n2,\\"\n3,"\\\\"\n', {"escape": "\\"}, [(1, 'a"b'), (2, '\\"'), (3, "\\")]),
        ('1,"a""b"\n2,"x"\n3,\n', {"escape": '"'}, [(1, 'a"b'), (2, "x"), (3, None)]),
        ('1,NA\n2,"NA"\nNA,x\n,\n', {"nullValue": "NA"}, [(1, None), (2, None), (None, "x"), (None, None)]),
        ('1,"x\ny"\n2,"z\r\nw"\n', {"multiLine": "true"}, [(1, "x\ny"), (2, "z\r\nw")]),
        ("1,ü\n".encode("latin1"), {"encoding": "ISO-8859-1"}, [(1, "ü")]),
        ("1,ü\n2,€".encode("utf-16"), {"encoding": "UTF-16"}, [(1, "ü"), (2, "€")]),
    ],
)
def test_options_of_csv(
    file: Path, text: str | bytes, options: dict[str, str], expected: list[tuple[Any, ...]]
) -> None:
    assert rows(file, "csv", TWO, text, **options) == expected


def test_a_single_column_has_no_null_in_csv(file: Path) -> None:
    assert rows(file, "csv", pa.schema([("x", pa.string())]), 'x\n\n""\n') == [("x",), ("",)]


@pytest.mark.parametrize("block", [16, 8 << 20])
def test_blocks_of_csv(file: Path, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_BLOCK_BYTES", block)
    expected = [(n, f"x\n{n}") for n in range(100)]
    assert rows(file, "csv", TWO, "".join(f'{n},"{b}"\n' for n, b in expected), multiLine="true") == expected


@pytest.mark.parametrize("name", ["csv", "json"])
def test_blocks_are_read_side_by_side_and_come_in_order(file: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_BLOCK_BYTES", 100)
    line = '{{"a":{0},"b":"x{0}"}}\n' if name == "json" else '{0},"x{0}"\n'
    text = "".join(map(line.format, range(1000)))
    assert rows(file, name, TWO, text) == [(n, f"x{n}") for n in range(1000)]
    wrong = text + line.format("1.5") + text + "no row\n"
    assert error(file, name, TWO, wrong).sample == "1.5"  # the first one that is wrong in the file
    if name == "csv":
        assert "Row #1001" in error(file, name, TWO, wrong).problem
    file.write_text(text)
    some = FileFormat(name, TWO, ()).read(str(file), TWO.names, "orders")
    assert next(iter(some)).num_rows
    some.close()  # type: ignore[attr-defined]
    assert not [one for one in threading.enumerate() if one.name.startswith("read_")]


def test_a_row_of_csv_that_is_too_long(file: Path) -> None:
    assert "block" in error(file, "csv", TWO, "1,x\n2," + "y" * (20 << 20) + "\n3,z\n").problem


@pytest.mark.parametrize(
    ("text", "options", "column", "sample"),
    [
        ("1,x\nq,y\n", {}, "a", "q"),
        ("1,x\n2147483648,y\n", {}, "a", "2147483648"),
        ("1,x\n1.0,y\n", {}, "a", "1.0"),
        ("b,more,a\nx,2,1\ny,2,q\n", {"header": "true"}, "a", "q"),
        ("1,x\n2\n", {}, None, None),
        ("1,x\n2,y,z\n", {}, None, None),
        (b"1,x\n2,\xff\n", {}, "b", None),
        ('1,"x\n2,y\n3,z\n', {}, None, '1,"x'),
        ('1,"x\ny"\n', {}, None, '1,"x'),
    ],
)
def test_what_is_wrong_in_csv(
    file: Path, text: str | bytes, options: dict[str, str], column: str | None, sample: str | None
) -> None:
    said = error(file, "csv", TWO, text, **options)
    assert (said.column, said.sample) == (column, sample)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a":1,"b":"x"}\r\n{"b":null}\n\n  \n', [(1, "x"), (None, None)]),
        ('\n {"b":"x","c":{"d":[1]},"a":1}', [(1, "x")]),
        ('\ufeff{"a":1}\n', [(1, None)]),
        ('{}\n{"c":1}\n', [(None, None)] * 2),
        ('{"b":"\\u00fc\\n\\"\\\\\\ud83d\\ude00 ü"}\n{"b":""}', [(None, 'ü\n"\\\U0001f600 ü'), (None, "")]),
    ],
)
@pytest.mark.parametrize("block", [1, 8 << 20])
def test_lines_of_json(file: Path, block: int, text: str, expected: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_BLOCK_BYTES", block if "ufeff" not in repr(text) else 8)
    assert rows(file, "json", TWO, text) == expected


def test_a_line_of_json_may_be_long(file: Path) -> None:
    long = "y" * (20 << 20)
    assert rows(file, "json", TWO, f'{{"a":1}}\n{{"b":"{long}"}}\n{{"a":3}}') == [(1, None), (None, long), (3, None)]


@pytest.mark.parametrize(
    ("text", "column", "sample"),
    [
        ('{"a":1}\n{"a":"q"}\n', "a", '{"a":"q"}'),
        ('{"a":1}\n\n{"b":5}', "b", '{"b":5}'),
        ('{"a":1,"b":"x"}\n{"a":1.5}\n', "a", "1.5"),
        ('{"a":2147483648}\n', "a", "2147483648"),
        ('{"a":1,"a":2}\n', "a", '{"a":1,"a":2}'),
        ('{"a":1}\n{"a":2\n', None, '{"a":2'),
        ('[{"a":1}]\n', None, '[{"a":1}]'),
        ('{"a":1}\n[{"a":1}]\n', None, '[{"a":1}]'),
        ("x\n", None, "x"),
        # Arrow would end the process
        ("null\n", None, "null"),
        ('{"a":1}\nnull\nnull\n{"a":1}', None, "null"),
        (b'{"a":1,"b":"\xff"}\n', None, None),
    ],
)
def test_what_is_wrong_in_json(
    file: Path, text: str | bytes, column: str | None, sample: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for block in (8 << 20, 12):
        monkeypatch.setattr(formats, "_BLOCK_BYTES", block)
        said = error(file, "json", TWO, text)
        assert (said.column, said.sample) == (column, sample)


@pytest.mark.parametrize("name", ["csv", "json"])
@pytest.mark.parametrize(
    ("kind", "texts", "expected"),
    [
        (pa.int8(), ["-128", "127"], [-128, 127]),
        (pa.int64(), ["-9223372036854775808"], [-(2**63)]),
        (pa.float64(), ["1", "-0.0", "1e5", "0.5"], [1.0, -0.0, 1e5, 0.5]),
        (pa.decimal128(10, 2), ["1", "1.5", "-0.01", "1e2"], [Decimal(x) for x in ("1.00", "1.50", "-0.01", "100.00")]),
        (pa.decimal128(38, 0), ["-" + "9" * 38], [Decimal("-" + "9" * 38)]),
        (pa.bool_(), ["true", "false"], [True, False]),
    ],
)
def test_numbers(file: Path, name: str, kind: pa.DataType, texts: list[str], expected: list[Any]) -> None:
    assert repr(values(file, name, kind, *texts)) == repr(expected)


def test_numbers_that_are_none(file: Path) -> None:
    assert repr(values(file, "csv", pa.float64(), "NaN", "Inf", "-Inf", "Infinity")) == "[nan, inf, -inf, inf]"
    assert repr(values(file, "json", pa.float64(), "NaN", "Infinity", "-Infinity")) == "[nan, inf, -inf]"


@pytest.mark.parametrize("name", ["csv", "json"])
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (pa.int8(), "128"),
        (pa.decimal128(10, 2), "1.555"),
        (pa.decimal128(10, 2), "123456789.5"),
        (pa.date32(), "2024-02-30"),
        (pa.date32(), "2024-01-02 00:00:00"),
        (UTC, "2024-01-02 25:00:00"),
        (LOCAL, "2024-01-02T03:04:05Z"),
        (LOCAL, "2024-01-02 03:04:05+02:00"),
        (pa.bool_(), "yes"),
    ],
)
def test_values_of_no_such_type(file: Path, name: str, kind: pa.DataType, text: str) -> None:
    quoted = f'"{text}"' if name == "json" and not pa.types.is_decimal(kind) and not pa.types.is_integer(kind) else text
    with pytest.raises(BadInputError, match=r"'orders', column 'x': cannot read") as caught:
        values(file, name, kind, quoted)
    assert text in str(caught.value) or "data loss" in str(caught.value) or text.replace(".", "") in str(caught.value)


def test_bytes_in_csv(file: Path) -> None:
    schema = pa.schema([("k", pa.int8()), ("x", pa.binary())])
    assert rows(file, "csv", schema, b'1,\xff\n2,""\n3,\n') == [(1, b"\xff"), (2, b""), (3, None)]


def at(text: str) -> dt.datetime:
    return dt.datetime.fromisoformat(text).replace(tzinfo=dt.UTC)


INSTANTS = {
    "2024-01-02": "2024-01-02T05:00",
    "2024-01-02T03": "2024-01-02T08:00",
    "2024-01-02 03:04": "2024-01-02T08:04",
    "2024-01-02T03:04:05": "2024-01-02T08:04:05",
    "2024-01-02 03:04:05.1": "2024-01-02T08:04:05.1",
    "2024-01-02 03:04:05.123456": "2024-01-02T08:04:05.123456",
    "2024-01-02 03:04:05.123456789": "2024-01-02T08:04:05.123456",
    "2024-01-02T03:04:05.1234567Z": "2024-01-02T03:04:05.123456",
    "2024-01-02T03:04:05Z": "2024-01-02T03:04:05",
    "2024-01-02 03:04:05+02:00": "2024-01-02T01:04:05",
    "2024-01-02T03:04:05.5-0530": "2024-01-02T08:34:05.5",
    "2024-01-02 03:04+02": "2024-01-02T01:04",
    # clocks skip an hour: as Java has it, by the offset before
    "2024-03-10 01:59:59.999999": "2024-03-10T06:59:59.999999",
    "2024-03-10 02:00:00": "2024-03-10T07:00",
    "2024-03-10 02:30:00": "2024-03-10T07:30",
    "2024-03-10 03:00:00": "2024-03-10T07:00",
    # and repeat one: the first
    "2024-11-03 00:59:59": "2024-11-03T04:59:59",
    "2024-11-03 01:00:00": "2024-11-03T05:00",
    "2024-11-03 01:30:00": "2024-11-03T05:30",
    "2024-11-03 02:00:00": "2024-11-03T07:00",
    "0001-01-01 00:00:00": "0001-01-01T04:56:02",
}


@pytest.mark.parametrize("name", ["csv", "json"])
def test_times_without_a_zone_and_with_one(file: Path, name: str) -> None:
    quote = '"{}"'.format if name == "json" else "{}".format
    for text, instant in INSTANTS.items():  # alone, as another may take another way
        assert values(file, name, UTC, quote(text), timeZone=NEW_YORK) == [at(instant)], text
    null = "null" if name == "json" else ""
    found = values(file, name, UTC, *map(quote, INSTANTS), null, timeZone=NEW_YORK)
    assert found == [*map(at, INSTANTS.values()), None]
    zoned = [text for text in INSTANTS if text.endswith("Z") or "+" in text]
    found = values(file, name, UTC, *map(quote, zoned), null, timeZone=NEW_YORK)
    assert found == [*(at(INSTANTS[text]) for text in zoned), None]
    assert values(file, name, UTC, null) == [None]


def test_times_that_are_to_have_no_zone(file: Path) -> None:
    texts = ["2024-03-10", "2024-03-10 02:30", "2024-03-10T02:30:00.123456789", "0001-01-01 00:00:00"]
    expected = [dt.datetime.fromisoformat(text[:26]) for text in texts]
    assert values(file, "csv", LOCAL, *texts, timeZone=NEW_YORK) == expected
    assert values(file, "json", LOCAL, *(f'"{text}"' for text in texts), timeZone=NEW_YORK) == expected


@pytest.mark.parametrize(
    ("zone", "hour"), [("UTC", 3), ("Z", 3), ("GMT+2", 1), ("UTC-03:30", 6), ("+02:00", 1), ("Asia/Tokyo", 18)]
)
def test_zones_as_spark_spells_them(file: Path, zone: str, hour: int) -> None:
    assert values(file, "csv", UTC, "2024-01-02 03:00:00", timeZone=zone)[0].hour == hour


def test_values_within_values_of_json(file: Path) -> None:
    kind = pa.struct(
        [
            ("p", pa.struct([("at", UTC), ("day", pa.date32()), ("n", pa.decimal128(5, 2))])),
            ("q", pa.list_(pa.struct([("at", UTC)]))),
            ("r", pa.list_(pa.list_(LOCAL))),
        ]
    )
    time = "2024-01-02 03:04:05"
    texts = [
        f'{{"p":{{"at":"{time}","day":"2024-01-02","n":1.5,"z":[1]}},"q":[{{"at":"{time}"}},null,{{}}],"r":[["{time}"],null,[]]}}',
        '{"p":null,"q":[],"r":null}',
        "null",
        "{}",
        f'{{"q":[null,{{"at":"{time}Z"}}],"r":[null,[null,"{time}"]]}}',
    ]
    here, there, local = at("2024-01-02T08:04:05"), at("2024-01-02T03:04:05"), dt.datetime(2024, 1, 2, 3, 4, 5)
    nothing = {"p": None, "q": None, "r": None}
    assert values(file, "json", kind, *texts, timeZone=NEW_YORK) == [
        {
            "p": {"at": here, "day": dt.date(2024, 1, 2), "n": Decimal("1.50")},
            "q": [{"at": here}, None, {"at": None}],
            "r": [[local], None, []],
        },
        {**nothing, "q": []},
        None,
        nothing,
        {**nothing, "q": [None, {"at": there}], "r": [None, [None, local]]},
    ]
    with pytest.raises(BadInputError, match=r"column 'x'.*2024-13-01"):
        values(file, "json", kind, '{"r":[["2024-13-01"]]}')
