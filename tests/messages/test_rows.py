"""Messages read by Arrow, many at once, beside a reader that takes them one by one."""

from __future__ import annotations

import base64
import datetime as dt
import itertools
import json
import re
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_ops.errors import DescriptionError
from gpu_ops.messages import rows as of_messages
from gpu_ops.messages.encodings import from_base64
from gpu_ops.messages.rows import MessageFormat, MessageRows

pytestmark = pytest.mark.thorough

SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("name", pa.string()),
        ("price", pa.float64()),
        ("part", pa.struct([("n", pa.int32()), ("tags", pa.list_(pa.string()))])),
        ("data", pa.binary()),
    ]
)
JSON = MessageFormat("json", SCHEMA, required=("id",))
KEYED = MessageFormat("json", SCHEMA, row_kind="row_kind", key=("id",))
DEBEZIUM = MessageFormat("debezium-json", SCHEMA, required=("id",), row_kind="row_kind")


class WrongError(Exception):
    """No such message."""


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise WrongError
    return dict(pairs)


def slow(message: bytes | None, form: MessageFormat) -> list[tuple[Any, ...]] | None:
    """The rows of a message, a row kind and a value per column; None for one that cannot be read."""
    if message is None:
        return []
    try:
        said = json.loads(message.decode(), object_pairs_hook=once)
        json.dumps(said, ensure_ascii=False).encode()  # half of a pair of surrogates is no text
        if not isinstance(said, dict):
            return None
        if sorted(said) == ["payload", "schema"]:
            if not isinstance(said["schema"], dict | None):
                return None
            said = said["payload"]
            if said is None:
                return []
        if form.name == "json":
            kind = "u" if form.key else ""
            return [(kind, *row(said, SCHEMA, form.required))]
        return envelope(said)
    except (WrongError, ValueError):
        return None


def envelope(said: Any) -> list[tuple[Any, ...]]:
    op, before, after = (as_dict(said).get(name) for name in ("op", "before", "after"))
    old = None if before is None else row(before, SCHEMA)
    new = None if after is None else row(after, SCHEMA)
    if op == "m":
        return []
    if op in ("c", "r") and new is not None:
        return [("+I", *row(after, SCHEMA, ("id",)))]
    if op == "u" and new is not None:
        new = row(after, SCHEMA, ("id",))
        return [("u", *new)] if old is None else [("-U", *old), ("+U", *new)]
    if op == "d" and old is not None:
        return [("-D", *old)]
    raise WrongError


def as_dict(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise WrongError
    return value


def row(value: Any, schema: Any, required: tuple[str, ...] = ()) -> tuple[Any, ...]:
    found = tuple(cast(as_dict(value).get(field.name), field.type) for field in schema)
    if any(one is None and field.name in required for one, field in zip(found, schema, strict=True)):
        raise WrongError
    return found


def cast(value: Any, kind: pa.DataType) -> Any:
    if value is None:
        return None
    if pa.types.is_struct(kind):
        return dict(zip([field.name for field in kind], row(value, kind), strict=True))
    if pa.types.is_list(kind) and isinstance(value, list):
        return [cast(one, kind.value_type) for one in value]
    if pa.types.is_string(kind) and isinstance(value, str):
        return value
    if pa.types.is_binary(kind) and isinstance(value, str):
        if re.fullmatch("([0-9a-f]{2})+", value):
            raise WrongError  # or is it hex?
        return base64.b64decode(value.encode(), validate=True)
    if pa.types.is_floating(kind) and (type(value) in (int, float) or value in ("NaN", "Infinity", "-Infinity")):
        return float(value)
    if not pa.types.is_integer(kind) or type(value) is not int:
        raise WrongError
    if not -(2 ** (kind.bit_width - 1)) <= value < 2 ** (kind.bit_width - 1):
        raise WrongError
    return value


def told(found: MessageRows, form: MessageFormat) -> list[list[tuple[Any, ...]] | None]:
    """What was found, by message, as `slow` has it."""
    found.rows.validate(full=True)
    assert list(found.at) == sorted(found.at)
    names = form.output.names
    made: dict[int, list[tuple[Any, ...]] | None] = {}
    for at, one in zip(found.at, found.rows.to_pylist(), strict=True):
        values = tuple(one[name] for name in names)
        made.setdefault(int(at), []).append(values if form.with_kinds else ("", *values))
    for one in found.bad:
        assert one.at not in made
        made[one.at] = None
    return made


texts = st.text(max_size=6) | st.sampled_from(['}null"', "}\n{", "\\", "NaN", '"payload":', "é", "\U0001f600", "\x00"])
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(-1e9, 1e9) | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)


def mostly(good: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.integers(0, 19).flatmap(lambda n: anything if n == 0 else st.none() if n == 1 else good)


values = st.fixed_dictionaries(
    {"id": mostly(st.integers(-(2**63), 2**63 - 1))},
    optional={
        "name": mostly(texts),
        "price": mostly(st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from(["NaN", "-Infinity", 7])),
        "part": mostly(st.fixed_dictionaries({}, optional={"n": mostly(st.integers(-9, 9)), "tags": st.lists(texts)})),
        "data": mostly(st.binary(max_size=7).map(lambda data: base64.b64encode(data).decode())),
        "more": anything,
    },
)
envelopes = st.fixed_dictionaries(
    {"before": st.none() | values, "after": st.none() | values, "op": st.sampled_from([*"cruudmtx", None, 1])},
    optional={"source": anything, "ts_ms": st.integers()},
)


@st.composite
def messages(draw: Any, body: st.SearchStrategy[Any]) -> bytes | None:
    said = draw(body)
    form = draw(st.integers(0, 9))
    if form == 0:
        return None
    if form < 4:
        schema = draw(st.none() | st.just({"type": "struct", "fields": []}) | anything)
        said = {"schema": schema, "payload": said} if form > 1 else {"payload": said, "schema": schema}
        said |= draw(st.sampled_from([{}, {}, {"id": 5}, {"more": None}]))
    elif form == 4 and isinstance(said, dict):
        said = {draw(st.sampled_from(["schema", "payload"])): draw(anything), **said}
    lines, plain = draw(st.booleans()), draw(st.booleans())
    separators = None if draw(st.booleans()) else (",", ":")
    text = json.dumps(said, indent=1 if lines else None, separators=separators, ensure_ascii=plain).encode()
    match draw(st.integers(0, 14)):
        case 0:  # broken off
            return text[: draw(st.integers(0, len(text)))]
        case 1:  # something in its midst
            at = draw(st.integers(0, len(text)))
            more = st.sampled_from([b"{", b"}", b"]", b",", b"null", b"\n", b" ", b"\x00", b"\xff", b"}\n{", b'"'])
            return text[:at] + draw(more) + text[at:]
        case 2:
            return text + draw(st.sampled_from([text, b"null", b"{}", b" ", b"\n\n", b"1", b"\x00" + text]))
        case 3:
            return draw(st.binary(max_size=8))
        case _:
            return text


def check(form: MessageFormat, given: list[bytes | None], cuts: list[int]) -> None:
    expected = {at: said for at, one in enumerate(given) if (said := slow(one, form)) != []}
    ends = sorted({0, len(given), *(cut for cut in cuts if cut < len(given))})
    found: dict[int, Any] = {}
    whole = pa.array(given, pa.binary())
    for start, end in itertools.pairwise(ends):
        part = told(form.read(whole.slice(start, end - start)), form)
        found |= {start + at: said for at, said in part.items()}
    assert {at: repr(said) for at, said in found.items()} == {at: repr(said) for at, said in expected.items()}


@given(st.lists(messages(values), max_size=12), st.lists(st.integers(1, 11)), st.booleans())
def test_json_is_what_a_slow_reader_reads(given: list[bytes | None], cuts: list[int], small: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if small:
            patch.setattr(of_messages, "_BLOCK_BYTES", 64)
        check(JSON, given, cuts)


@given(st.lists(messages(envelopes), max_size=12), st.lists(st.integers(1, 11)), st.booleans())
def test_envelopes_are_what_a_slow_reader_reads(given: list[bytes | None], cuts: list[int], small: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if small:
            patch.setattr(of_messages, "_BLOCK_BYTES", 64)
        check(DEBEZIUM, given, cuts)


@pytest.mark.parametrize(
    "pair",
    [
        (b'{"id":1}{"id":2}', b""),
        (b'{"id":1}\n{"id":2}', b"null"),
        (b'{"id":1', b',"name":"x"}'),
        (b'{"id":1}{"id":2}', b'{"id":3}\x00{"id":4}'),
        (b'{"name":"x}', b'{y"}'),
        (b'{"id":1}', b"\x00{}"),
        (b"{\x00}\x00", b'{"id":1}{}'),
    ],
)
def test_no_message_ends_in_another(pair: tuple[bytes, bytes]) -> None:
    """As many objects as messages, as it may seem."""
    check(JSON, [b'{"id":7}', *pair, b'{"id":8}'], [])


def test_tombstones_delete_by_key() -> None:
    def keyed(*pairs: tuple[Any, Any]) -> MessageRows:
        sides = [[None if x is None else x if isinstance(x, bytes) else json.dumps(x).encode() for x in side]
                 for side in zip(*pairs, strict=True)]  # fmt: skip
        return KEYED.read(pa.array(sides[1], pa.binary()), pa.array(sides[0], pa.binary()))

    wrapped = {"schema": {"type": "struct"}, "payload": {"id": 3}}
    found = keyed(
        ({"id": 1}, {"id": 1, "name": "a"}), ({"id": 1}, None), (wrapped, None), (None, None), (b"x", None), ({}, {}),
        ({"id": 4}, {"schema": None, "payload": None}),
    )  # fmt: skip
    rows = found.rows.select(["row_kind", "id", "name"]).to_pylist()
    assert [(at, *one.values()) for at, one in zip(found.at, rows, strict=True)] == [
        (0, "u", 1, "a"), (1, "-D", 1, None), (2, "-D", 3, None),
    ]  # fmt: skip
    assert found.bad[:2] == [(3, "a message with neither key nor value"), (4, "its key is no JSON object")]
    assert [(at, problem[:30]) for at, problem in found.bad[2:]] == [
        (5, "column 'id' is null or missing"), (6, "has a payload of null; what de"),
    ]  # fmt: skip


CONNECT = {
    "type": "struct",
    "fields": [
        {
            "type": "struct",
            "field": member,
            "fields": [
                {"type": "int64", "field": "at", "name": "io.debezium.time.MicroTimestamp"},
                {"type": "int32", "field": "day", "name": "io.debezium.time.Date"},
                {"type": "bytes", "field": "price", "name": "org.apache.kafka.connect.data.Decimal",
                 "parameters": {"scale": "3"}},
                {"type": "string", "field": "zoned", "name": "io.debezium.time.ZonedTimestamp"},
            ],
        }
        for member in ("before", "after")
    ],
}  # fmt: skip
TIMES = pa.schema(
    [("at", pa.timestamp("us")), ("day", pa.date32()), ("price", pa.decimal128(10, 2)),
     ("zoned", pa.timestamp("us", "UTC"))]
)  # fmt: skip


def test_a_schema_in_the_message_says_how_values_are_written() -> None:
    encoded = base64.b64encode((-12340).to_bytes(2, "big", signed=True)).decode()
    numbers = {"at": 1_700_000_000_123_456, "day": 19000, "price": encoded, "zoned": "2026-01-01T00:00:00+02:00"}
    plain = {"at": "2023-11-14T22:13:20.123456", "day": "2022-01-08", "price": "-12.34", "zoned": "2025-12-31T17:00:00"}
    ms = json.loads(json.dumps(CONNECT).replace("MicroTimestamp", "Timestamp"))
    said = [
        {"schema": CONNECT, "payload": {"op": "c", "after": numbers}},
        {"op": "c", "after": plain},
        {"schema": ms, "payload": {"op": "u", "before": {"at": 1_700_000_000_123}, "after": numbers | {"at": None}}},
        {"schema": {}, "payload": {"op": "d", "before": plain}},
    ]
    form = MessageFormat("debezium-json", TIMES, row_kind="k", zone="America/New_York")
    found = form.read(pa.array([json.dumps(one).encode() for one in said]))
    at = dt.datetime(2023, 11, 14, 22, 13, 20, 123456)
    rest = (dt.date(2022, 1, 8), Decimal("-12.34"), dt.datetime(2025, 12, 31, 22, tzinfo=dt.UTC))
    assert [tuple(one.values()) for one in found.rows.to_pylist()] == [
        ("+I", at, *rest), ("+I", at, *rest), ("-U", at.replace(microsecond=123000), None, None, None),
        ("+U", None, *rest), ("-D", at, *rest),
    ]  # fmt: skip
    assert found.bad == []
    declared = MessageFormat("json", TIMES, encoded=(("at", "us"), ("day", "days"), ("price", "base64")))
    found = declared.read(pa.array([json.dumps(one).encode() for one in (numbers | {"price": "BNI="}, plain)]))
    assert found.rows.to_pylist() == [
        {"at": at, "day": rest[0], "price": Decimal("12.34"), "zoned": dt.datetime(2025, 12, 31, 22, tzinfo=dt.UTC)}
    ]
    assert [one.at for one in found.bad] == [1]


@given(st.lists(st.none() | st.decimals(-(10**7), 10**7, places=2) | st.integers(-9, 9).map(Decimal), max_size=9))
def test_decimals_with_scales_of_their_own(numbers: list[Decimal | None]) -> None:
    """Debezium's of a NUMERIC without a scale; one with more digits than the column has is refused."""
    fields = [{"field": "price", "type": "struct", "name": "io.debezium.data.VariableScaleDecimal"}]
    said = []
    for number in [*numbers, Decimal("0.001")]:
        scale = 0 if number is None else max(0, -int(number.as_tuple().exponent))
        data = b"" if number is None else int(number.scaleb(scale)).to_bytes(6, "big", signed=True)
        value = None if number is None else {"scale": scale, "value": base64.b64encode(data).decode()}
        said.append(json.dumps({"schema": {"type": "struct", "fields": fields}, "payload": {"price": value}}).encode())
    found = MessageFormat("json", TIMES).read(pa.array(said))
    assert found.rows["price"].to_pylist() == numbers
    assert [one.at for one in found.bad] == [len(numbers)]


@given(st.lists(st.none() | st.binary(max_size=20)), st.integers(0, 3))
def test_base64(data: list[bytes | None], start: int) -> None:
    written = pa.array([None if one is None else base64.b64encode(one).decode() for one in data], pa.string())
    assert from_base64(written.slice(start)).to_pylist() == data[start:]


@pytest.mark.parametrize("wrong", ["a", "=", "====", "ab=c", "a===", "ab==ab==", "a b=", "é=", "YQ", "YQ==="])
def test_no_base64(wrong: str) -> None:
    with pytest.raises(pa.ArrowInvalid, match="no base64"):
        from_base64(pa.array(["YQ==", None, wrong, "", "YWJj"]))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"name": "xml"}, "format='xml'; there are json, debezium-json, avro, debezium-avro"),
        ({"row_kind": "ID"}, "the row-kind column 'ID' is among the columns"),
        ({"name": "debezium-json", "key": ("id",)}, "key= is for formats json and avro"),
        ({"key": ("x",)}, "key= names 'x'; there are id, name"),
        ({"encoded": (("id", "ms"),)}, "encoded= has 'ms' for 'id', which is int64"),
        ({"encoded": (("id", "week"),)}, "encoded= has 'week' for 'id'; there are ms"),
        ({"schema": pa.schema([("m", pa.map_(pa.string(), pa.int32()))])}, "column 'm' is map<string, int32>"),
    ],
)
def test_what_cannot_be_read_is_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(DescriptionError, match=problem):
        MessageFormat(**{"name": "json", "schema": SCHEMA, "row_kind": "k"} | options)
