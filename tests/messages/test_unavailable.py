"""Large values that did not change, for which Debezium's messages have a placeholder."""

from __future__ import annotations

import base64
import io
import json
from decimal import Decimal
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_ops.errors import DescriptionError
from gpu_ops.messages.rows import MessageFormat, MessageRows

pytestmark = pytest.mark.thorough

P = "__debezium_unavailable_value"
UUID = "0f5a9dd4-7b55-3a1b-9e8e-000000000000"
NUMBERS = list(P.encode())
COLUMNS: dict[str, tuple[pa.DataType, Any, Any, list[Any]]] = {
    # the declared type, Avro's, the placeholder, and values that are none
    "text": (pa.string(), "string", P, ["", "x", P + " ", "null"]),
    "map": (pa.string(), "string", json.dumps({P: P}, separators=(",", ":")), ['{"a":"b"}']),
    "data": (pa.binary(), "bytes", P.encode(), [b"", b"\x00", P.encode()[1:]]),
    "texts": (pa.list_(pa.string()), {"type": "array", "items": "string"}, [P], [[], ["x"], [P, P], [None]]),
    "datas": (pa.list_(pa.binary()), {"type": "array", "items": "bytes"}, [P.encode()], [[], [b""]]),
    "ints": (pa.list_(pa.int32()), {"type": "array", "items": "int"}, NUMBERS, [[], NUMBERS[1:], NUMBERS[::-1]]),
    "longs": (pa.list_(pa.int64()), {"type": "array", "items": "long"}, NUMBERS, [[1], [None] * len(NUMBERS)]),
    "floats": (pa.list_(pa.float64()), {"type": "array", "items": "double"}, NUMBERS, [[], [x / 10 for x in NUMBERS]]),
    "part": (
        pa.struct([("a", pa.string()), ("n", pa.int32())]),
        {"type": "record", "name": "Part", "fields": [{"name": "a", "type": "string"}, {"name": "n", "type": "int"}]},
        {"a": P, "n": 1}, [{"a": "x", "n": 1}, {"a": "", "n": 0}],
    ),
}  # fmt: skip
SCHEMA = pa.schema([("id", pa.int64()), *((name, of[0]) for name, of in COLUMNS.items())])


def avro_schema() -> dict[str, Any]:
    def nullable(kind: Any) -> Any:
        if isinstance(kind, dict) and kind["type"] == "array":
            kind = {**kind, "items": ["null", kind["items"]]}
        return ["null", kind]

    fields = [{"name": "id", "type": "long"}, *({"name": n, "type": nullable(of[1])} for n, of in COLUMNS.items())]
    row = {"type": "record", "name": "Row", "fields": fields}
    members = [{"name": "before", "type": ["null", row]}, {"name": "after", "type": ["null", "Row"]}]
    return {"type": "record", "name": "Envelope", "fields": [*members, {"name": "op", "type": "string"}]}


def in_json(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return [in_json(x) for x in value] if isinstance(value, list) else value


def envelopes(said: list[dict[str, Any]], form: MessageFormat) -> MessageRows:
    texts = []
    for one in said:
        if form.is_avro:
            out = io.BytesIO()
            fastavro.schemaless_writer(out, fastavro.parse_schema(avro_schema()), one)
            texts.append(out.getvalue())
        else:
            rows = {x: one[x] and {n: in_json(v) for n, v in one[x].items()} for x in ("before", "after")}
            texts.append(json.dumps({**one, **rows}).encode())
    return form.read(pa.array(texts, pa.binary()))


def forms(**options: Any) -> list[MessageFormat]:
    encoded = (("data", "base64"), ("datas", "base64"))
    return [
        MessageFormat("debezium-json", SCHEMA, (), "k", encoded=encoded, **options),
        MessageFormat("debezium-avro", SCHEMA, (), "k", avro_schema=json.dumps(avro_schema()), **options),
    ]


@st.composite
def changes(draw: Any) -> tuple[dict[str, Any], tuple[list[str], list[str]]]:
    """An envelope, and which columns its rows lack."""

    def row() -> tuple[dict[str, Any], list[str]]:
        made, lost = {"id": draw(st.integers(0, 9))}, []
        for name, (_, _, placeholder, others) in COLUMNS.items():
            if draw(st.integers(0, 7)) == 0:
                made[name] = placeholder
                lost.append(name)
            else:
                made[name] = draw(st.sampled_from([None, *others]))
        return made, lost

    op = draw(st.sampled_from("cud"))
    before, after = row() if op == "d" or draw(st.booleans()) else None, None if op == "d" else row()
    said = {"op": op, "before": before and before[0], "after": after and after[0]}
    return said, (before[1] if before and op != "c" else [], after[1] if after else [])


@given(st.lists(changes(), max_size=4))
def test_values_that_are_not_there(made: list[tuple[dict[str, Any], tuple[list[str], list[str]]]]) -> None:
    """By default the message is bad, and the error says which column; with ``unavailable=`` they are named."""
    said = [one for one, _ in made]
    for form in forms():
        found = envelopes(said, form)
        assert [at for at, _ in found.bad] == [at for at, (_, lost) in enumerate(made) if any(lost)]
        for at, problem in found.bad:
            names = [name for lost in made[at][1] for name in lost]
            assert any(problem.startswith(f"column {name!r} is not in the message") for name in names)
            assert "REPLICA IDENTITY FULL" in problem
    for form in forms(unavailable="gone"):
        found = envelopes(said, form)
        assert found.bad == []
        wanted = []
        for one, (old, new) in made:
            sides = [("before", old)] * (one["op"] != "c" and one["before"] is not None)
            for side, lost in [*sides, *([("after", new)] if one["after"] else [])]:
                row = {name: None if name in lost else value for name, value in one[side].items()}
                wanted.append({**row, "gone": sorted(lost) or None})
        rows = [
            {**row, "gone": row["gone"] and sorted(row["gone"])} for row in found.rows.drop_columns(["k"]).to_pylist()
        ]
        assert rows == wanted


def one(kind: pa.DataType, value: Any, name: str = "debezium-json", **options: Any) -> str:
    """Whether a value is there, not there, or the message bad for another reason."""
    form = MessageFormat(name, pa.schema([("x", kind)]), (), "k" if name.startswith("deb") else None, **options)
    row = {"x": value}
    said = {"op": "u", "before": None, "after": row} if form.is_debezium else row
    found = form.read(pa.array([json.dumps(said).encode()]))
    problem = found.bad[0].problem if found.bad else ""
    return "lost" if "is not in the message" in problem else "bad" if problem else "there"


HEX, BASE64 = P.encode().hex(), base64.b64encode(P.encode()).decode()
TEXT, DATA = pa.string(), pa.binary()


@pytest.mark.parametrize(
    ("kind", "value", "options", "outcome"),
    [
        (DATA, P, {}, "lost"), (DATA, BASE64, {}, "lost"), (DATA, HEX, {"encoded": (("x", "hex"),)}, "lost"),
        (DATA, P, {"encoded": (("x", "hex"),)}, "lost"), (DATA, P, {"encoded": (("x", "base64-url-safe"),)}, "lost"),
        (TEXT, BASE64, {}, "there"), (TEXT, HEX, {}, "there"), (TEXT, P, {"name": "json"}, "lost"),
        (TEXT, "gone", {"unavailable_value": "gone"}, "lost"), (TEXT, P, {"unavailable_value": "gone"}, "there"),
        (TEXT, "gone", {"unavailable_value": "hex:676f6e65"}, "lost"),
        (DATA, "Z29uZQ==", {"unavailable_value": "gone"}, "lost"),
        (pa.struct([("a", TEXT)]), {P: P}, {}, "lost"), (pa.struct([("a", TEXT)]), {"a": P}, {}, "lost"),
        (pa.struct([("a", TEXT)]), {"b": P}, {}, "there"), (pa.list_(TEXT), [UUID], {}, "there"),
        (pa.list_(pa.struct([("a", TEXT)])), [{"a": P}], {}, "lost"), (pa.list_(pa.list_(TEXT)), [[P]], {}, "lost"),
        (pa.list_(pa.decimal128(9, 2)), [x / 100 for x in NUMBERS], {}, "lost"),
        (pa.list_(pa.decimal128(9, 2)), NUMBERS, {}, "lost"), (pa.list_(pa.float64()), [1.5] * len(P), {}, "there"),
        (pa.list_(pa.bool_()), [True] * len(P), {}, "lost"), (pa.list_(pa.bool_()), [True] * 5, {}, "there"),
        (pa.struct([("wkb", DATA), ("srid", pa.int32())]),
         {"wkb": "AQEAACDmEAAAAAAA/IPXl8EAAAD8g9eXwQ==", "srid": 4326}, {}, "lost"),
        (pa.timestamp("us"), P, {}, "bad"), (pa.int64(), P, {}, "bad"),
    ],
)  # fmt: skip
def test_how_debezium_writes_the_placeholder(
    kind: pa.DataType, value: Any, options: dict[str, Any], outcome: str
) -> None:
    assert one(kind, value, **options) == outcome


def test_the_uuid_of_the_placeholder_is_javas() -> None:
    """``UUID.nameUUIDFromBytes``: a name without a namespace."""
    assert one(pa.list_(TEXT), ["d8b6c5a1-0000-3000-8000-000000000000"]) == "there"
    made = MessageFormat("json", pa.schema([("x", TEXT)]), unavailable_value="hello", unavailable="gone")
    found = made.read(pa.array([b'{"x":"5d41402a-bc4b-3a76-b971-9d911017c592"}']))
    assert found.rows.to_pylist() == [{"x": None, "gone": ["x"]}]


def test_a_column_that_may_not_be_null() -> None:
    """What is kept is no null; one that is null is."""
    schema = pa.schema([("x", TEXT), ("y", pa.decimal128(3, 1))])
    made = MessageFormat("json", schema, ("x",), unavailable="gone")
    found = made.read(pa.array([json.dumps({"x": P, "y": 1.5}).encode(), b'{"y":1}']))
    assert found.rows.to_pylist() == [{"x": None, "y": Decimal("1.5"), "gone": ["x"]}]
    assert found.bad[0].problem == "column 'x' is null or missing"


def test_what_cannot_be() -> None:
    for options, problem in (
        ({"unavailable": "TEXT"}, "unavailable='TEXT' is among the columns; name another"),
        ({"unavailable": "K"}, "unavailable='K' is among the columns"),
        ({"unavailable_value": ""}, "unavailable_value='' is no text"),
        ({"unavailable_value": "hex:ff"}, "unavailable_value='hex:ff' is no text, nor hex: and a text's bytes"),
        ({"unavailable_value": "hex:x"}, "is no text"),
    ):
        with pytest.raises(DescriptionError, match=problem):
            forms(**options)
