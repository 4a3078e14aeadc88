"""What sinks write as JSON, the reader of messages reads as what it was, to the bit: random types, all years."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_ops.messages.json_texts import json_objects, json_values
from gpu_ops.messages.rows import MessageFormat

ZONES = ("UTC", "Asia/Shanghai", "America/New_York", "Africa/Monrovia", "Europe/Amsterdam", "Pacific/Apia", "+05:45")
EDGES_US = (
    -(2**63), 2**63 - 1, -62135596800000000, 253402300799999999, 253402300800000000, -62167219200000000,
    -62167219200000001, -2208988800000001, -1, 0, 253402318799999999,
)  # fmt: skip
EDGES_DAYS = (-(2**31), 2**31 - 1, -719162, -719528, -719529, 2932896, 2932897, -1, 0, -141428)
FLOATS = (0.0, -0.0, math.nan, math.inf, -math.inf, 5e-324, 1.7976931348623157e308, 1e22, -1e-7)
FLOATS32 = (0.0, -0.0, math.nan, math.inf, -math.inf, 1.401298464324817e-45, 3.4028234663852886e38)


class Kind(NamedTuple):
    type: pa.DataType
    values: st.SearchStrategy[Any]


def decimals(precision: int, scale: int) -> Kind:
    most = 10**precision - 1
    numbers = st.integers(-most, most) | st.sampled_from([most, -most, 0, 1, -1])
    digits = numbers.map(lambda n: Decimal((int(n < 0), tuple(map(int, str(abs(n)))), -scale)))
    return Kind(pa.decimal128(precision, scale), digits)


def whole(bits: int) -> st.SearchStrategy[int]:
    most = 2 ** (bits - 1)
    return st.integers(-most, most - 1) | st.sampled_from([-most, most - 1])


SIMPLE = [
    *(Kind(kind, whole(kind.bit_width)) for kind in (pa.int8(), pa.int16(), pa.int32(), pa.int64())),
    Kind(pa.bool_(), st.booleans()),
    Kind(pa.float64(), st.floats() | st.sampled_from(FLOATS)),
    Kind(pa.float32(), st.floats(width=32) | st.sampled_from(FLOATS32)),
    Kind(pa.string(), st.text(max_size=5) | st.sampled_from(["NaN", "null", '"', "\x00\x1f\x7f", "}\n{", "-0", ""])),
    Kind(pa.binary(), st.binary(max_size=5)),
    decimals(10, 2), decimals(38, 0), decimals(38, 38), decimals(20, 9), decimals(1, 0), decimals(5, 5),
    Kind(pa.timestamp("us", "UTC"), whole(64) | st.integers(-(10**17), 3 * 10**17) | st.sampled_from(EDGES_US)),
    Kind(pa.timestamp("us"), whole(64) | st.integers(-(10**17), 3 * 10**17) | st.sampled_from(EDGES_US)),
    Kind(pa.date32(), whole(32) | st.integers(-800_000, 3_000_000) | st.sampled_from(EDGES_DAYS)),
]  # fmt: skip


@st.composite
def kinds(draw: Any, depth: int = 2) -> Kind:
    way = draw(st.integers(0, 8 if depth else 5))
    if way <= 5:
        return draw(st.sampled_from(SIMPLE))
    if way == 6:
        parts = {f"f{n}": draw(kinds(depth - 1)) for n in range(draw(st.integers(1, 3)))}
        rows = st.fixed_dictionaries({name: st.none() | part.values for name, part in parts.items()})
        return Kind(pa.struct([(name, part.type) for name, part in parts.items()]), rows)
    inner = draw(kinds(depth - 1))
    return Kind(pa.list_(inner.type), st.lists(st.none() | inner.values, max_size=3))


def made(values: list[Any], kind: pa.DataType) -> pa.Array:
    """Times and dates are given as numbers: Python has none beyond the year 9999."""
    t, nulls = pa.types, np.array([value is None for value in values], bool)
    if t.is_struct(kind):
        parts = [made([None if row is None else row[x.name] for row in values], x.type) for x in kind]
        return pa.StructArray.from_arrays(parts, fields=list(kind), mask=pa.array(nulls))
    if t.is_list(kind):
        flat = [x for row in values if row is not None for x in row]
        ends = np.cumsum([0, *(0 if row is None else len(row) for row in values)])
        offsets = pa.array(ends, pa.int32())
        return pa.ListArray.from_arrays(offsets, made(flat, kind.value_type), type=kind, mask=pa.array(nulls))
    if t.is_timestamp(kind):
        return pa.array(values, pa.int64()).cast(kind)
    return pa.array(values, pa.int32()).cast(kind) if t.is_date(kind) else pa.array(values, kind)


def bits(values: pa.Array) -> Any:
    """Values as they compare to the bit: every NaN with itself, 0.0 not with -0.0, no time out of Python's range."""
    t, kind = pa.types, values.type
    if t.is_struct(kind):
        parts = [bits(part) for part in values.flatten()]
        return [row if valid else None for row, valid in zip(zip(*parts, strict=True), values.is_valid(), strict=True)]
    if t.is_list(kind):
        items, found, at = bits(values.flatten()), [], 0
        for size in values.value_lengths().to_pylist():
            found.append(None if size is None else items[at : at + size])
            at += size or 0
        return found
    if t.is_floating(kind):
        return [None if x is None else repr(x) for x in values.to_pylist()]
    if t.is_timestamp(kind) or t.is_date(kind):
        values = values.cast(pa.int64() if t.is_timestamp(kind) else pa.int32())
    return values.to_pylist()


def read(form: MessageFormat, texts: pa.StringArray, keys: pa.StringArray | None = None) -> pa.RecordBatch:
    found = form.read(texts.cast(pa.binary()), None if keys is None else keys.cast(pa.binary()))
    assert found.bad == []
    found.rows.validate(full=True)
    return found.rows


def base64_of(schema: pa.Schema) -> tuple[tuple[str, str], ...]:
    def has_bytes(kind: pa.DataType) -> bool:
        nested = pa.types.is_nested(kind) and any(has_bytes(kind.field(n).type) for n in range(kind.num_fields))
        return bool(nested or pa.types.is_binary(kind))

    return tuple((field.name, "base64") for field in schema if has_bytes(field.type))


@given(st.data())
def test_random_rows_are_read_as_they_were_written(data: Any) -> None:
    columns = data.draw(st.lists(kinds(), min_size=1, max_size=3))
    size = data.draw(st.integers(1, 4))
    arrays = [
        made(data.draw(st.lists(st.none() | column.values, min_size=size, max_size=size)), column.type)
        for column in columns
    ]
    schema = pa.schema([(f"c{n}", column.type) for n, column in enumerate(columns)])
    zone, start = data.draw(st.sampled_from(ZONES)), data.draw(st.integers(0, size - 1))
    arrays = [array.slice(start) for array in arrays]
    rows = json_objects(schema.names, arrays, size - start)
    encoded = base64_of(schema)
    found = read(MessageFormat("json", schema, encoded=encoded, zone=zone), rows)
    assert [bits(column) for column in found.columns] == [bits(array) for array in arrays]
    envelopes = json_objects(
        ["before", "after", "op"], [pa.nulls(len(rows)), struct(schema, arrays), repeated("c", rows)], len(rows)
    )
    found = read(MessageFormat("debezium-json", schema, (), "row_kind", encoded=encoded, zone=zone), envelopes)
    assert [bits(column) for column in found.columns[1:]] == [bits(array) for array in arrays]


def struct(schema: pa.Schema, arrays: list[pa.Array]) -> pa.StructArray:
    return pa.StructArray.from_arrays(arrays, fields=list(schema))


def repeated(text: str, rows: Any) -> pa.Array:
    return pa.array([text] * len(rows))


@pytest.mark.parametrize("zone", ZONES)
def test_times_at_the_ends(zone: str) -> None:
    """Where a zone's offset has seconds, and beyond the years of four digits: ISO 8601, in UTC, with a sign."""
    kind = pa.timestamp("us", zone)
    texts = json_values(made(list(EDGES_US), pa.int64()).cast(kind)).to_pylist()
    assert texts == [
        '"-290308-12-21T19:59:05.224192Z"', '"+294247-01-10T04:00:54.775807Z"', '"0001-01-01T00:00:00.000000Z"',
        '"9999-12-31T23:59:59.999999Z"', '"+10000-01-01T00:00:00.000000Z"', '"0000-01-01T00:00:00.000000Z"',
        '"-0001-12-31T23:59:59.999999Z"', '"1899-12-31T23:59:59.999999Z"', '"1969-12-31T23:59:59.999999Z"',
        '"1970-01-01T00:00:00.000000Z"', '"+10000-01-01T04:59:59.999999Z"',
    ]  # fmt: skip
    assert json_values(made([2932897, -719529, 2**31 - 1, -(2**31)], pa.date32())).to_pylist() == [
        '"+10000-01-01"', '"-0001-12-31"', '"+5881580-07-11"', '"-5877641-06-23"',
    ]  # fmt: skip


def test_a_zero_below_zero_stays_one() -> None:
    """As ``-0`` it would be a whole number to most readers of JSON, and 0."""
    assert json_values(pa.array([-0.0, 0.0, 8.0])).to_pylist() == ["-0.0", "0", "8"]
    assert json_values(pa.array([-0.0, 0.0], pa.float32())).to_pylist() == ["-0.0", "0"]
