"""Which messages are Kafka Connect's wrapper: those that its own converter would take for one."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pyarrow as pa
import pytest

from gpu_ops.messages.rows import MessageFormat

pytestmark = pytest.mark.thorough

PAIR = pa.schema([("id", pa.int64()), ("s", pa.string())])
ROW = {"id": 1, "s": "a"}
STRUCT = {"type": "struct", "fields": [{"field": "id", "type": "int64"}, {"field": "s", "type": "string"}]}


def read(schema: pa.Schema, *messages: Any, **options: Any) -> list[Any]:
    """Of each message its row, None for one that says nothing, or "bad"."""
    texts = [one if isinstance(one, bytes) else json.dumps(one).encode() for one in messages]
    found = MessageFormat("json", schema, **options).read(pa.array(texts, pa.binary()))
    said = {int(at): tuple(row.values()) for at, row in zip(found.at, found.rows.to_pylist(), strict=True)}
    said |= {one.at: "bad" for one in found.bad}
    return [said.get(at) for at in range(len(texts))]


def converter(message: dict[str, Any]) -> Any:
    """What ``JsonConverter`` takes; a message that it does not take is a row, as with ``schemas.enable=false``."""
    if message.keys() == {"schema", "payload"}:
        if not isinstance(message["schema"], dict | None):
            return "bad"
        message = message["payload"]
        if not isinstance(message, dict | None):
            return "bad"
    return None if message is None else (message.get("id"), message.get("s"))


def test_a_wrapper_has_a_schema_and_a_payload_and_nothing_else() -> None:
    """Every message of few members, in every order, in one batch and alone."""
    values = {
        "schema": (None, STRUCT, {}, "public", 5),
        "payload": (None, ROW, {}, {"k": 1}, 7),
        "id": (3,),
        "s": ("b",),
    }
    messages = [
        dict(zip(names, chosen, strict=True))
        for size in (1, 2, 3)
        for names in itertools.permutations(values, size)
        for chosen in itertools.product(*(values[name] for name in names))
    ]
    wanted = [converter(one) for one in messages]
    assert read(PAIR, *messages) == wanted
    for message, one in zip(messages, wanted, strict=True):
        for text in (json.dumps(message), json.dumps(message, separators=(",", ":")), json.dumps(message, indent=1)):
            assert read(PAIR, text.encode()) == [one]


@pytest.mark.parametrize(
    ("message", "row"),
    [
        (
            b'{"schema":{"type":"struct","doc":"\\"payload\\":"},"payload":{"id":1,"s":"\\"payload\\":"}}',
            (1, '"payload":'),
        ),
        (b'{"schema" : null , "payload" : {"id":1,"s":"a"} }', (1, "a")),
        (b'{"payload":{"id":1.0e0,"s":"a"},"schema":null}', "bad"),
        (b'{"schema":null,"payload":{"id":1,"s":"a"},}', "bad"),
        (b'{"schema":null,"payload":{"id":1,"s":"a"},{"id":2}}', "bad"),
        (b'{"schema":null,"payload":}', "bad"),
        (b'{"schema":null,"payload":{"id":1}],"x":[{}}', "bad"),
        (b'{"schema":null,"payload":{"id":1,"s":"a"},"payload":{"id":2}}', "bad"),
        (b'{"payload":{"id":1},"payload":{"id":1},"id":2}', "bad"),
        (b'{"schema":null,"schema":null,"payload":{"id":1}}', "bad"),
        (b'{"schema":null,"payload":null ] , "x":[{}}', "bad"),
        (b'{"schema":null,"payload":7],"x":[{}}', "bad"),
        (b'{"schema":null,"payload":{"id":1}]}\n{"payload":[{"id":2}}', "bad"),
        (b'{"schema":null,"payload":{"id":1,"s":"a","x":[{"y":[{}],"z":[]}],"w":[{}]}}', (1, "a")),
    ],
)
def test_texts_that_look_like_one(message: bytes, row: Any) -> None:
    before, after = {"id": 5, "s": "x"}, {"schema": STRUCT, "payload": ROW}
    assert read(PAIR, before, message, after) == [(5, "x"), row, (1, "a")]


def test_columns_called_schema_and_payload() -> None:
    """They are the row's own, unless the message brings a schema of the columns."""
    both = pa.schema([("schema", pa.string()), ("payload", pa.string())])
    plain = {"schema": "a", "payload": "b"}
    fields = [{"field": "schema", "type": "string"}, {"field": "payload", "type": "string"}]
    wrapped = {"schema": {"type": "struct", "fields": fields}, "payload": plain}
    assert read(both, plain, wrapped, {"payload": "b", "schema": "a"}, {"schema": None, "payload": "b"}) == [
        ("a", "b"), ("a", "b"), ("a", "b"), (None, "b"),
    ]  # fmt: skip
    inner = pa.schema([("payload", pa.struct([("id", pa.int64())]))])
    assert read(inner, {"schema": STRUCT, "payload": ROW}, {"payload": ROW}) == [({"id": 1},), ({"id": 1},)]
    one = pa.schema([("schema", pa.string()), ("id", pa.int64())])
    named = {"type": "struct", "fields": [{"field": "schema", "type": "string"}, {"field": "id", "type": "int64"}]}
    assert read(one, {"schema": "public", "id": 1}, {"schema": named, "payload": {"schema": "x", "id": 2}}) == [
        ("public", 1), ("x", 2),
    ]  # fmt: skip


def test_the_schema_is_heard_where_it_comes_last() -> None:
    times = pa.schema([("at", pa.timestamp("us"))])
    schema = {"type": "struct", "fields": [{"field": "at", "type": "int64", "name": "io.debezium.time.Timestamp"}]}
    message = {"payload": {"at": 1000}, "schema": schema}
    assert str(read(times, message)[0][0]) == "1970-01-01 00:00:01"


def test_decimals_that_the_converter_was_told_to_write_as_numbers() -> None:
    """``decimal.format=NUMERIC``, beside the default."""
    price = pa.schema([("price", pa.decimal128(9, 2)), ("rate", pa.float64())])
    named = {"type": "bytes", "name": "org.apache.kafka.connect.data.Decimal", "parameters": {"scale": "2"}}
    schema = {"type": "struct", "fields": [{"field": "price", **named}, {"field": "rate", "type": "double"}]}
    said = [
        {"price": 1.25, "rate": 1},
        {"price": -3, "rate": "NaN"},
        {"price": "fQ==", "rate": 2},
        {"price": "x", "rate": 2},
    ]
    found = read(price, *({"schema": schema, "payload": one} for one in said))
    assert [one if one == "bad" else (str(one[0]), str(one[1])) for one in found] == [
        ("1.25", "1.0"), ("-3.00", "nan"), ("1.25", "2.0"), "bad",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "encoding", "value"),
    [
        ("deadbeef", None, "bad"), ("3q2+7w==", None, b"\xde\xad\xbe\xef"), ("", None, b""),
        ("deadbeef", "hex", b"\xde\xad\xbe\xef"), ("DEADBEEF", "hex", b"\xde\xad\xbe\xef"), ("deadbee", "hex", "bad"),
        ("deadbeef", "base64", b"u\xe6\x9dm\xe7\x9f"), ("3q2-7w==", "base64", "bad"), ("3q2-7w==", None, "bad"),
        ("3q2-7w==", "base64-url-safe", b"\xde\xad\xbe\xef"), ("3q2+7w==", "base64-url-safe", "bad"),
        ("xy", "hex", "bad"),
    ],
)  # fmt: skip
def test_bytes_are_what_the_schema_or_the_user_says(text: str, encoding: str | None, value: Any) -> None:
    """``deadbeef`` is hex as well as base64: nobody guesses."""
    column = pa.schema([("x", pa.binary())])
    how = {"encoded": (("x", encoding),)} if encoding else {}
    fields = {x: {"type": "struct", "fields": [{"field": "x", "type": x}]} for x in ("bytes", "string")}
    plain, of_bytes, of_text = read(
        column, {"x": text}, *({"schema": schema, "payload": {"x": text}} for schema in fields.values()), **how
    )
    assert plain == (value if value == "bad" else (value,))
    assert of_text == ("bad" if encoding is None else plain)
    if encoding is None:
        assert of_bytes == ((b"u\xe6\x9dm\xe7\x9f",) if text == "deadbeef" else plain)
