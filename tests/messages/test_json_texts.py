"""Rows as JSON texts: Python's reader finds in them what was in the rows."""

from __future__ import annotations

import base64
import datetime as dt
import json
import math
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_ops.messages.encodings import from_base64, to_base64
from gpu_ops.messages.json_texts import bare_texts, json_objects, json_values, writes

pytestmark = pytest.mark.thorough

TIMES = st.datetimes(dt.datetime(1, 1, 1), dt.datetime(9999, 12, 31))
NUMBERS = st.floats(width=64)
TEXTS = st.text(max_size=6) | st.sampled_from(['"', "\\", "\n", "\x00\x1f", "}\n{", "\u2028\ud7ff", ""])
INTS = st.integers(-(2**63), 2**63 - 1)


def written(value: Any) -> Any:
    """What a reader finds of a value."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, dt.datetime):
        text = value.replace(tzinfo=None).isoformat(timespec="microseconds")
        return text if value.tzinfo is None else f"{text}Z"
    if isinstance(value, dt.date):
        return value.isoformat()
    if isinstance(value, dt.time):
        return value.isoformat(timespec="microseconds")
    if isinstance(value, list):
        return [written(x) for x in value]
    if isinstance(value, dict):
        return {name: written(x) for name, x in value.items()}
    return value


def optional(values: Any) -> Any:
    return st.none() | values


ROWS: dict[str, tuple[pa.DataType, Any]] = {
    "whole": (pa.int64(), INTS),
    "small": (pa.int8(), st.integers(-128, 127)),
    "flag": (pa.bool_(), st.booleans()),
    "number": (pa.float64(), NUMBERS),
    "price": (pa.decimal128(20, 9), st.decimals(-(10**10), 10**10, places=9)),
    'te"xt\n': (pa.string(), TEXTS),
    "long": (pa.large_string(), TEXTS),
    "data": (pa.binary(), st.binary(max_size=5)),
    "at": (pa.timestamp("us", "Europe/Berlin"), TIMES.map(lambda x: x.replace(tzinfo=dt.UTC))),
    "local": (pa.timestamp("us"), TIMES),
    "day": (pa.date32(), st.dates()),
    "time": (pa.time64("us"), st.times()),
    "tags": (pa.list_(pa.string()), st.lists(optional(TEXTS), max_size=3)),
    "part": (
        pa.struct([("n", pa.int32()), ("parts", pa.list_(pa.struct([("x", pa.float64())])))]),
        st.fixed_dictionaries(
            {
                "n": optional(st.integers(0, 9)),
                "parts": optional(st.lists(optional(st.fixed_dictionaries({"x": optional(NUMBERS)})), max_size=2)),
            }
        ),
    ),
}
SCHEMA = pa.schema([(name, kind) for name, (kind, _) in ROWS.items()])
TABLES = st.lists(st.fixed_dictionaries({name: optional(values) for name, (_, values) in ROWS.items()}), max_size=6)


@given(TABLES, st.integers(0, 6))
def test_what_is_written_is_read(rows: list[dict[str, Any]], start: int) -> None:
    columns = pa.Table.from_pylist(rows, SCHEMA).combine_chunks().slice(start)
    arrays = [column.combine_chunks() for column in columns.columns]
    texts = json_objects(SCHEMA.names, arrays, columns.num_rows).to_pylist()
    found = [json.loads(text, parse_float=Decimal) for text in texts]
    for row, own in zip(rows[start:], found, strict=True):
        assert list(own) == SCHEMA.names
        for name, value in row.items():
            if name in ("number", "price"):
                if isinstance(own[name], str) or value is None:
                    assert own[name] == written(value)
                else:
                    assert (float(own[name]) if name == "number" else own[name]) == value
            else:
                assert plain(own[name]) == written(value)


def plain(value: Any) -> Any:
    """Numbers as doubles again."""
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, list):
        return [plain(x) for x in value]
    return {name: plain(x) for name, x in value.items()} if isinstance(value, dict) else value


@given(st.lists(optional(st.dictionaries(TEXTS, optional(INTS), max_size=3)), max_size=4))
def test_maps(rows: list[dict[str, Any] | None]) -> None:
    values = pa.array([None if row is None else list(row.items()) for row in rows], pa.map_(pa.string(), pa.int64()))
    assert [json.loads(text) for text in json_values(values).to_pylist()] == rows


@given(st.lists(optional(st.binary(max_size=7)), max_size=9), st.integers(0, 9))
def test_base64(rows: list[bytes | None], start: int) -> None:
    values = pa.array(rows, pa.binary()).slice(start)
    texts = to_base64(values)
    assert texts.to_pylist() == [None if x is None else base64.b64encode(x).decode() for x in rows[start:]]
    assert from_base64(texts).equals(values)


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        (pa.array(['a"', None]), ['a"', None]),
        (pa.array([1, None]), ["1", None]),
        (pa.array([dt.date(2026, 1, 2), None]), ["2026-01-02", None]),
        (pa.array([b"ab", None]), ["YWI=", None]),
        (pa.array([["a"], None]), ['["a"]', None]),
    ],
)
def test_bare_texts(values: pa.Array, texts: list[str | None]) -> None:
    assert bare_texts(values).to_pylist() == texts


def test_what_has_no_text() -> None:
    assert writes(SCHEMA.field("part").type)
    assert not writes(pa.duration("us"))
    assert not writes(pa.list_(pa.struct([("x", pa.duration("us"))])))
