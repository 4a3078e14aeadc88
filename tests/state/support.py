"""A join with updates and deletes, random micro-batches of it on the wire, and a server to send them to."""

from __future__ import annotations

import dataclasses
import json
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import flight

from gpu_ops.descriptions.changelog import places_of, readable_changes
from gpu_ops.descriptions.description import Description
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.join import Join
from gpu_ops.descriptions.keys import Key
from gpu_ops.join_engine import JoinEngine
from gpu_ops.spark.server import partition
from gpu_ops.spark.wire.command import ApplyCommand, Wire
from gpu_ops.state.address import StateAddress

ORDERS = pa.schema([("id", pa.int64()), ("item", pa.string()), ("amount", pa.float64())])
PRICES = pa.schema([("item", pa.string()), ("price", pa.float64()), ("since", pa.timestamp("us"))])
TOKEN = "0123456789abcdef-token"
WIRE = Wire(
    "__side",
    "__order",
    (
        ("item", "item", "c0"),
        ("amount", "price", "c1"),
        ("id", None, "c2"),
        ("op", None, "c3"),
        (None, "since", "c4"),
    ),
)
WIRE_SCHEMA = pa.schema(
    [
        ("__side", pa.int8()),
        ("__order", pa.int64()),
        ("c0", pa.string()),
        ("c1", pa.float64()),
        ("c2", pa.int64()),
        ("c3", pa.string()),
        ("c4", pa.timestamp("us")),
    ]
)


def make_join(**changes: Any) -> Join:
    left = Input("orders", ORDERS, unique_key=("id",), row_kind="op", updates="retract")
    given = {
        "how": "full",
        "left": left,
        "right": Input("prices", PRICES),
        "keys": (Key("item", "item", using=True),),
    }
    return Join(**{**given, **changes})


def make_command(batch_id: int = 0, state: str | None = None, **changes: Any) -> ApplyCommand:
    address = None if state is None else StateAddress.of(state)
    given = ApplyCommand("j", address, make_join().to_json(), "query-1", batch_id, 0, 2, "cpu", WIRE, {})
    return dataclasses.replace(given, **changes)


def wire_batches(count: int, *, rows: int = 40, seed: int = 0) -> list[pa.Table]:
    """Micro-batches of orders that come, change and go, and of prices that come."""
    rng = np.random.default_rng(seed)
    live: dict[int, tuple[str, float]] = {}
    batches, order = [], 0
    for batch in range(count):
        lines: list[dict[str, Any]] = []
        for i in range(rows):
            order += 1
            line: dict[str, Any] = {
                "__side": 0,
                "__order": order,
                "c0": f"i{rng.integers(12)}",
                "c1": float(i),
            }
            if rng.random() < 0.3:
                line |= {"__side": 1, "c4": 1_000_000 * order}
            elif live and rng.random() < 0.4:
                key = list(live)[rng.integers(len(live))]
                item, amount = live.pop(key)
                line |= {"c0": item, "c1": amount, "c2": key, "c3": "-D"}
            else:
                line |= {"c2": batch * rows + i, "c3": "+I"}
                live[batch * rows + i] = (line["c0"], line["c1"])
            lines.append(line)
        shuffled = [lines[k] for k in rng.permutation(rows)]  # as blocks of a shuffle arrive
        batches.append(pa.Table.from_pylist(shuffled, schema=WIRE_SCHEMA))
    return batches


def expected(batches: list[pa.Table], join: Join | None = None, clock_ms: int | None = None) -> list[pa.Table]:
    """What an engine that never stops says to each micro-batch."""
    engine = JoinEngine(join or make_join(), "cpu")
    answers = []
    for batch in batches:
        rows = WIRE.split(engine.description, batch)
        answers.append(engine.process(*rows.tables, orders=rows.sequences, clock_ms=clock_ms))
    engine.close()
    return answers


class PartitionState(partition.PartitionState):
    """A partition whose answers have row kinds as the task that asks for them has: as text."""

    def apply(self, *arguments: Any, **options: Any) -> partition.Applied:
        found = super().apply(*arguments, **options)
        assert found.files is not None or found.changelog.schema.field(0).type == pa.uint8()
        return dataclasses.replace(found, changelog=with_text(found.changelog))


def with_text(changes: pa.Table) -> pa.Table:
    """The changes that a server gives, with row kinds as text."""
    schema = readable_changes(pa.RecordBatch.from_pylist([], changes.schema)).schema
    return pa.Table.from_batches(map(readable_changes, changes.to_batches()), schema)


def with_bytes(description: Description, wire: Wire, rows: pa.Table) -> pa.Table:
    """Rows on the wire with row kinds as bytes, as tasks bring them; in tables here and in older logs they are text."""
    for number, source in enumerate(description.inputs):
        if source.row_kind is not None:
            at = rows.schema.get_field_index(wire.union_column(number, source.row_kind))
            name = rows.column_names[at]
            if rows.schema.field(at).type == pa.string():
                places = places_of(rows[name], input_name=source.name, column_name=name, strict=False)
                nothing = rows[name].is_null().to_numpy()
                rows = rows.set_column(at, name, pa.array(places, mask=nothing))
    return rows


def call_options(token: str | None = TOKEN) -> flight.FlightCallOptions:
    headers = [] if token is None else [(b"authorization", f"Bearer {token}".encode())]
    return flight.FlightCallOptions(headers=headers, timeout=60)


class Server:
    """A state server process; a context manager."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self.log = log
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gpu_ops.spark.server.server", "--backend", "cpu", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"token": TOKEN}).encode() + b"\n")
        self.process.stdin.flush()
        self.greeting = json.loads(self.process.stdout.readline())
        self.address = f"grpc://127.0.0.1:{self.greeting['port']}"
        self.client = flight.FlightClient(self.address)
        self._mark = 0

    def mark(self) -> None:
        """From here on `said` counts."""
        self._mark = self.log.stat().st_size

    def said(self) -> str:
        """What it logged since the mark."""
        return self.log.read_bytes()[self._mark :].decode()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.process.kill()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()
        self.process.wait(20)

    def apply(
        self, command: ApplyCommand | bytes, rows: pa.Table, *, token: str | None = TOKEN, chunk: int = 16
    ) -> tuple[pa.Table, dict[str, Any]]:
        """One micro-batch, as a Spark task sends it: the changelog and the facts at the end."""
        content = command if isinstance(command, bytes) else command.to_json().encode()
        writer, reader = self.client.do_exchange(flight.FlightDescriptor.for_command(content), call_options(token))
        with writer:
            writer.begin(rows.schema)
            for batch in rows.to_batches(max_chunksize=chunk):
                writer.write_batch(batch)
            writer.done_writing()
            batches, facts = [], None
            for chunk_read in reader:
                if chunk_read.data is not None:
                    batches.append(chunk_read.data)
                if chunk_read.app_metadata is not None:
                    facts = json.loads(chunk_read.app_metadata.to_pybytes())
            assert facts is not None
            return with_text(pa.Table.from_batches(batches, reader.schema)), facts

    def action(self, name: str, body: object = None, token: str | None = TOKEN) -> Any:
        action = flight.Action(name, b"" if body is None else json.dumps(body).encode())
        (result,) = self.client.do_action(action, call_options(token))
        return json.loads(result.body.to_pybytes())


def ipc_stream(table: pa.Table, compression: str | None = None) -> bytes:
    """The schema and all rows, as one IPC message each."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table.combine_chunks())
    return bytes(sink.getvalue())


def flight_messages(table: pa.Table, command: bytes, stream: bytes | None = None) -> list[bytearray]:
    """A micro-batch as the body of a DoExchange has it: one FlightData each for the schema, the rows and their number.

    Args:
        table: the rows.
        command: of the exchange.
        stream: the schema and the rows as IPC messages, where they are not to be as Flight sends them.
    """
    source = pa.BufferReader(ipc_stream(table) if stream is None else stream)
    schema, rows = pa.ipc.read_message(source), pa.ipc.read_message(source)
    descriptor = _field(1, b"\x08\x02" + _field(2, command))
    count = json.dumps({"rows": table.num_rows}).encode()
    return [
        bytearray(descriptor + _field(2, schema.metadata.to_pybytes())),
        bytearray(_field(2, rows.metadata.to_pybytes()) + _field(1000, rows.body.to_pybytes())),
        bytearray(_field(3, count)),
    ]


def raw_exchange(port: int, messages: Sequence[bytes], token: str | None = TOKEN, *, whole: bool = True) -> None:
    """Sends the body of a DoExchange byte for byte, over plain HTTP/2; returns when the server has ended the call.

    Args:
        port: of the server.
        messages: of the body, together less than a window (64 KiB).
        token: if any.
        whole: whether the body ends; else its end never comes.
    """
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": "/arrow.flight.protocol.FlightService/DoExchange",
        ":authority": "localhost",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    if token is not None:
        headers["authorization"] = f"Bearer {token}"
    packed = b"".join(b"\0" + bytes([len(n)]) + n.encode() + bytes([len(v)]) + v.encode() for n, v in headers.items())
    body = b"".join(b"\0" + struct.pack(">I", len(message)) + message for message in messages)
    pieces = [body[at : at + 16_000] for at in range(0, len(body), 16_000)]
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0) + _frame(1, 4, 1, packed))
        for number, piece in enumerate(pieces, 1):
            connection.sendall(_frame(0, whole and number == len(pieces), 1, piece))
        with connection.makefile("rb") as reader:
            while head := reader.read(9):
                reader.read(int.from_bytes(head[:3], "big"))
                if (head[3] == 1 and head[4] & 1) or head[3] in (3, 7):  # trailers, RST_STREAM, GOAWAY
                    return


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _field(number: int, content: bytes) -> bytes:
    """A field of bytes, as protobuf has it."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
