"""Schemas from a registry: who may read, what is asked again, references; messages of Confluent's serializer."""

from __future__ import annotations

import datetime as dt
import io
import json
import pickle
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_ops.errors import BackendError, DescriptionError
from gpu_ops.messages import avro
from gpu_ops.messages.avro import SchemaRegistry
from gpu_ops.messages.rows import MessageFormat, MessageRows
from messages.registry import FakeRegistry
from messages.test_schemas import Kind, kinds, without_absent

ROW = {"type": "record", "name": "R", "fields": [{"name": "id", "type": "long"}]}
COLUMNS = pa.schema([("id", pa.int64())])
SECRET = "pa:ss/w rd"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRegistry]:
    monkeypatch.setattr(avro, "_PAUSE_S", 0.0)
    with FakeRegistry() as fake:
        fake.add(ROW)
        yield fake


def framed(number: int, schema: Any, value: Any, others: tuple[Any, ...] = ()) -> bytes:
    known: dict[str, Any] = {}
    for other in others:
        fastavro.parse_schema(other, known)
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema, known), value)
    return b"\0" + number.to_bytes(4, "big") + out.getvalue()


def of_union(place: int, message: bytes) -> bytes:
    """A message of one of a union's types: its place is in front of the value."""
    return message[:5] + bytes([2 * place]) + message[5:]


def read(registry: str | dict[str, str], *messages: bytes, columns: pa.Schema = COLUMNS) -> MessageRows:
    return MessageFormat("avro", columns, registry=SchemaRegistry.of(registry)).read(pa.array(messages, pa.binary()))


@pytest.mark.parametrize("how", ["property", "address", "token"])
def test_a_registry_that_asks_who_reads(fake: FakeRegistry, how: str) -> None:
    fake.authorization = "Bearer abc.def" if how == "token" else "Basic bWU6cGE6c3MvdyByZA=="  # me:pa:ss/w rd
    registry: str | dict[str, str] = {
        "property": {"url": fake.url + "/", "basic.auth.user.info": f"me:{SECRET}"},
        "address": fake.url.replace("://", "://me:pa%3Ass%2Fw%20rd@"),
        "token": {"url": fake.url, "bearer.auth.token": "abc.def"},
    }[how]
    assert read(registry, framed(1, ROW, {"id": 5})).rows.to_pylist() == [{"id": 5}]
    form = MessageFormat("avro", COLUMNS, registry=pickle.loads(pickle.dumps(SchemaRegistry.of(registry))))
    assert "pa:ss" not in repr(form)
    assert "abc.def" not in repr(form)
    fake.authorization = "Basic else"
    with pytest.raises(BackendError, match=r"schemas/ids/9: .*401.*takes basic.auth.user.info") as caught:
        form.read(pa.array([framed(9, ROW, {"id": 5})]))
    assert "pa:ss" not in str(caught.value)
    assert "abc.def" not in str(caught.value)
    assert fake.asked == ["/schemas/ids/1", "/schemas/ids/9"]  # who may not read is not asked again


def test_a_password_goes_to_no_other_host(fake: FakeRegistry) -> None:
    import http.server
    import threading

    class Elsewhere(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(302)
            self.send_header("Location", fake.url + self.path)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.HTTPServer(("localhost", 0), Elsewhere)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:  # the fake registry takes none
        found = read(f"http://me:secret@localhost:{server.server_port}", framed(1, ROW, {"id": 5}))
        assert found.rows.to_pylist() == [{"id": 5}]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_registry_behind_tls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It shows a certificate, and wants one of its readers."""
    from spark.support import certificate

    monkeypatch.setattr(avro, "_PAUSE_S", 0.0)
    its, own = certificate(tmp_path, "localhost"), certificate(tmp_path, "reader")
    if its is None or own is None:
        pytest.skip("no openssl to make a certificate with")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=own[0])
    context.load_cert_chain(*its)
    context.verify_mode = ssl.CERT_REQUIRED
    with FakeRegistry(context) as fake:
        fake.add(ROW)
        files = {"ssl.ca.location": its[0], "ssl.certificate.location": own[0], "ssl.key.location": own[1]}
        registry = {"url": fake.url, **files}
        assert read(registry, framed(1, ROW, {"id": 5})).rows.to_pylist() == [{"id": 5}]
        for missing in ("ssl.ca.location", "ssl.certificate.location"):
            without = {name: value for name, value in registry.items() if name != missing}
            with pytest.raises(BackendError, match="the schema registry gives no schema: https://localhost"):
                read(without, framed(1, ROW, {"id": 5}))
    assert fake.asked == ["/schemas/ids/1"]


def test_a_registry_that_is_busy_is_asked_again(fake: FakeRegistry) -> None:
    fake.busy = 3
    assert read(fake.url, framed(1, ROW, {"id": 5}), framed(1, ROW, {"id": 6})).rows.num_rows == 2
    assert len(fake.asked) == 4
    fake.busy = 4
    with pytest.raises(BackendError, match=r"schemas/ids/2: .*503"):
        read(fake.url, framed(2, ROW, {"id": 5}))
    found = read(fake.url, framed(1, ROW, {"id": 5}), framed(3, ROW, {"id": 5}))
    assert found.rows.num_rows == 1
    assert [one.at for one in found.bad] == [1]
    assert "has schema 3, which the schema registry does not know: http://localhost" in found.bad[0].problem


def test_what_is_no_registry(fake: FakeRegistry) -> None:
    for given_, problem in (
        ("registry:8081", "schema_registry='registry:8081' is no address such as http"),
        ("me:secret@registry:8081", "schema_registry is no address"),
        ({"basic.auth.user.info": "me:secret"}, "schema_registry='' is no address"),
        ({"url": fake.url, "basic.auth.user": "secret"}, "no property 'basic.auth.user'; there are url, basic"),
        ({"url": "http://me:secret@x", "bearer.auth.token": "secret"}, "a user and a token; it takes one of them"),
        ({"url": fake.url, "bearer.auth.token": "secret\n"}, "bearer.auth.token with a line break"),
    ):
        with pytest.raises(DescriptionError, match=problem) as caught:
            SchemaRegistry.of(given_)
        assert "secret" not in str(caught.value)
    fake.answers["/schemas/ids/8"] = {"message": "hello"}
    with pytest.raises(BackendError, match="does not answer as a schema registry does: schema 8"):
        read(fake.url, framed(8, ROW, {"id": 5}))


def test_schemas_that_refer_to_others(fake: FakeRegistry) -> None:
    """Directly, by way of another, and several times; each is asked for once."""

    def record(name: str, **fields: Any) -> Any:
        return {"type": "record", "name": f"n.{name}", "fields": [{"name": x, "type": y} for x, y in fields.items()]}

    def to(name: str) -> Any:
        return {"name": f"n.{name}", "subject": name, "version": 1}

    day = record("Day", at={"type": "int", "logicalType": "date"})
    part = record("Part", day="n.Day", next=["null", "n.Part"])
    order = record("Order", id="long", day="n.Day", parts={"type": "array", "items": "n.Part"})
    bill = record("Bill", id="long", day="n.Day")
    fake.add(day, (), "Day")
    fake.add(part, [to("Day")], "Part")
    number = fake.add(order, [to("Part"), to("Day")], "Order")
    fake.add(bill, [to("Day")], "Bill")
    either = fake.add(["n.Order", "n.Bill"], [to("Order"), to("Bill")])
    columns = pa.schema(
        [
            ("id", pa.int64()), ("day", pa.struct([("at", pa.date32())])),
            ("parts", pa.list_(pa.struct([("day", pa.struct([("at", pa.date32())]))]))),
        ]
    )  # fmt: skip
    today = {"at": 20000}
    sent = {"id": 1, "day": today, "parts": [{"day": today, "next": {"day": today, "next": None}}]}
    found = read(
        fake.url,
        framed(number, order, sent, (day, part)),
        of_union(0, framed(either, order, sent, (day, part))),
        of_union(1, framed(either, bill, {"id": 2, "day": today}, (day,))),
        columns=columns,
    )
    assert found.bad == []
    day_read = {"at": dt.date(2024, 10, 4)}
    order_read = {"id": 1, "day": day_read, "parts": [{"day": day_read}]}
    assert found.rows.to_pylist() == [order_read, order_read, {"id": 2, "day": day_read, "parts": None}]
    assert len(fake.asked) == len(set(fake.asked)) + 2  # what Order refers to, of the second schema once more
    fake.add(record("Lost", x="n.Gone"), [to("Gone")])
    lost = read(fake.url, framed(max(_numbers(fake)), ROW, {"id": 1})).bad[0].problem
    assert "which the schema registry does not know: " in lost
    assert "/subjects/Gone/versions/1" in lost


def _numbers(fake: FakeRegistry) -> list[int]:
    return [int(path.rpartition("/")[2]) for path in fake.answers if path.startswith("/schemas")]


def test_messages_of_confluents_serializer() -> None:
    """Of random schemas, some of whose records are registered by themselves and referred to."""
    library = pytest.importorskip("confluent_kafka.schema_registry")
    from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
    from confluent_kafka.serialization import MessageField, SerializationContext

    context = SerializationContext("t", MessageField.VALUE)

    @settings(max_examples=30, deadline=None)
    @given(st.data())
    def check(data: Any) -> None:
        columns: list[Kind] = data.draw(st.lists(kinds(), min_size=1, max_size=3))
        references, fields = [], []
        for number, column in enumerate(columns):
            schema = column.schema
            if isinstance(schema, dict) and schema["type"] == "record" and data.draw(st.booleans()):
                fake.add(schema, (), schema["name"])
                references.append({"name": schema["name"], "subject": schema["name"], "version": 1})
                schema = schema["name"]
            fields.append({"name": f"c{number}", "type": schema})
        text = json.dumps({"type": "record", "name": "Row", "fields": fields})
        client = library.SchemaRegistryClient({"url": fake.url})
        own = [library.SchemaReference(**one) for one in references]
        serialize = AvroSerializer(client, library.Schema(text, "AVRO", own))
        deserialize = AvroDeserializer(client)
        messages, wanted = [], []
        for row in data.draw(st.lists(st.tuples(*(column.values for column in columns)), min_size=1, max_size=4)):
            messages.append(serialize({f"c{n}": value for n, value in enumerate(row)}, context))
            back = deserialize(messages[-1], context)
            wanted.append([column.told(back[f"c{n}"]) for n, column in enumerate(columns)])
        declared = pa.schema([(f"c{n}", column.declared) for n, column in enumerate(columns)])
        found = read(fake.url, *messages, columns=declared)
        assert found.bad == []
        assert [without_absent(list(row.values())) for row in found.rows.to_pylist()] == wanted

    with FakeRegistry() as fake:
        check()
