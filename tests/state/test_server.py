"""The state server as a process of its own, called by a plain Flight client, ill-treated and killed."""

from __future__ import annotations

import json
import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import flight

from gpu_ops.descriptions.inputs import Input
from gpu_ops.spark.server.server import ROWS_PER_MESSAGE
from gpu_ops.spark.wire.command import ApplyCommand
from gpu_ops.spark.wire.connection import encode_error
from state.support import (
    PRICES,
    TOKEN,
    WIRE_SCHEMA,
    Server,
    call_options,
    expected,
    flight_messages,
    ipc_stream,
    make_command,
    make_join,
    raw_exchange,
    wire_batches,
    with_text,
)

pytestmark = pytest.mark.thorough

BATCHES = wire_batches(8)
ANSWERS = expected(BATCHES)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "server.log"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("shared") / "log") as running:
        yield running


@pytest.fixture
def server(shared: Server) -> Server:
    """A server that holds nothing; it must outlive the test."""
    for join_id in ("j", "other"):
        shared.action("release", {"join_id": join_id})
    shared.mark()
    return shared


@pytest.fixture
def own_server(log: Path) -> Iterator[Server]:
    """A server that may end with the test."""
    with Server(log) as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "state")


def refused(kind: type[flight.FlightError], call: Any) -> dict[str, Any]:
    """The error of a call, as a client reads it."""
    with pytest.raises(kind) as caught:
        call()
    content, _ = json.JSONDecoder().raw_decode(str(caught.value))
    return dict(content)


def started(server: Server, command: ApplyCommand) -> tuple[Any, Any]:
    descriptor = flight.FlightDescriptor.for_command(command.to_json().encode())
    return server.client.do_exchange(descriptor, call_options())


def await_log(server: Server, text: str, times: int = 1) -> None:
    deadline = time.monotonic() + 60
    while server.said().count(text) < times:
        assert time.monotonic() < deadline, server.said()
        time.sleep(0.02)


def test_micro_batches_and_what_is_said_with_them(server: Server, folder: str) -> None:
    assert server.greeting == {"port": server.greeting["port"], "pid": server.process.pid}
    assert server.action("ping") == {"pid": server.process.pid, "backend": "cpu", "partitions": 0}
    for batch, answer in enumerate(ANSWERS):
        for _ in range(2):
            table, facts = server.apply(make_command(batch, folder), BATCHES[batch])
            assert table.equals(answer)
        assert facts["backend"] == "cpu"
        assert facts["backend_reason"]
        assert facts["metrics"]["batch_id"] == batch
        assert facts["metrics"]["rows_out_insert"] == answer["row_kind"].to_pylist().count("+I")
    assert server.action("ping")["partitions"] == 1
    (status,) = server.action("metrics")["partitions"]
    assert (status["join_id"], status["query_id"], status["version"], status["pending"]) == (
        "j",
        "query-1",
        7,
        7,
    )
    assert status["metrics"] == facts["metrics"]


def test_nothing_to_say(server: Server, folder: str) -> None:
    table, facts = server.apply(make_command(0, folder), WIRE_SCHEMA.empty_table())
    assert table.num_rows == 0
    assert table.schema == make_join().output_schema
    assert facts["metrics"]["left_rows_in"] == 0


def test_answers_come_in_pieces(server: Server) -> None:
    rows = 3 * ROWS_PER_MESSAGE
    table = pa.table(
        {
            "__side": pa.array([0] * rows, pa.int8()),
            "__order": pa.array(range(rows)),
            "c0": pa.array(["x"] * rows),
            "c1": pa.array([1.5] * rows),
            "c2": pa.array(range(rows)),
            "c3": pa.array(["+I"] * rows),
            "c4": pa.nulls(rows, pa.timestamp("us")),
        }
    )
    answer, _ = server.apply(make_command(), table, chunk=10_000)
    assert answer["id"].to_pylist() == list(range(rows))
    assert [len(chunk) for chunk in answer["id"].chunks] == [ROWS_PER_MESSAGE] * 3


# --- calls that are wrong ----------------------------------------------------------------------


@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN + "x", TOKEN[:-1], TOKEN.upper()])
def test_no_call_without_the_token(server: Server, folder: str, token: str | None) -> None:
    server.apply(make_command(0, folder), BATCHES[0])
    for call in (
        lambda: server.apply(make_command(1, folder), BATCHES[1], token=token),
        lambda: server.action("shutdown", token=token),
        lambda: server.action("release", {"join_id": "j"}, token=token),
        lambda: list(server.client.list_flights(options=call_options(token))),
    ):
        with pytest.raises(flight.FlightUnauthenticatedError):
            call()
    assert server.said().count("refused a call") == 4
    assert TOKEN not in server.said()
    assert server.apply(make_command(1, folder), BATCHES[1])[0].equals(ANSWERS[1])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe\x00",
        b"null",
        b"[]",
        b"{",
        b"[" * 100_000,
        b'{"op": "drop everything"}',
        make_command().to_json().replace('"apply"', '"shutdown"').encode(),
        make_command().to_json().replace('"batch_id": 0', '"batch_id": -1').encode(),
        make_command().to_json().replace('"batch_id": 0', '"batch_id": "0"').encode(),
        make_command(partition=2).to_json().encode(),
        make_command().to_json().replace('"c0"', "0").encode(),
        make_command(description="{}").to_json().encode(),
        make_command(description=make_join().to_json().replace('"full"', '"sideways"')).to_json().encode(),
        make_command(description=make_join().to_json().replace('"schema": "', '"schema": "AAAA')).to_json().encode(),
    ],
)
def test_garbage_commands(server: Server, folder: str, content: bytes) -> None:
    error = refused(flight.FlightServerError, lambda: server.apply(content, BATCHES[0]))
    assert error["type"] == "DescriptionError"
    assert "apply refused: DescriptionError" in server.said()
    assert server.apply(make_command(0, folder), BATCHES[0])[0].equals(ANSWERS[0])


def test_schema_mismatch(server: Server, folder: str) -> None:
    server.apply(make_command(0, folder), BATCHES[0])
    place = WIRE_SCHEMA.get_field_index
    rows = BATCHES[1]
    for wrong, column in (
        (rows.drop_columns(["c4"]), None),
        (rows.append_column("c5", rows["c0"]), None),
        (rows.set_column(place("__side"), "__side", rows["__side"].cast("int32")), "__side"),
        (rows.set_column(place("c1"), "c1", rows["c1"].cast("string")), "amount"),
        (rows.set_column(place("c4"), "c4", rows["c4"].cast("int64")), "since"),
    ):
        error = refused(flight.FlightServerError, lambda wrong=wrong: server.apply(make_command(1, folder), wrong))
        assert error["type"] == "BadInputError"
        assert error["fields"][1] == column
    other = make_join(right=Input("prices", PRICES.remove(2))).to_json()
    error = refused(flight.FlightServerError, lambda: server.apply(make_command(1, folder, description=other), rows))
    assert error["type"] == "DescriptionError"
    assert server.apply(make_command(1, folder), rows)[0].equals(ANSWERS[1])


def test_unknown_actions_and_calls(server: Server) -> None:
    assert refused(flight.FlightServerError, lambda: server.action("nope"))["type"] == "DescriptionError"
    assert refused(flight.FlightServerError, lambda: server.action("release"))["type"] == "DescriptionError"
    with pytest.raises(pa.ArrowNotImplementedError):
        list(server.client.list_flights(options=call_options()))
    assert server.action("ping")["pid"] == server.process.pid


def test_long_errors_in_any_script_arrive(server: Server) -> None:
    kind = "ключ\n" * 5000
    rows = BATCHES[0].set_column(WIRE_SCHEMA.get_field_index("c3"), "c3", pa.array([kind] * BATCHES[0].num_rows))
    error = refused(flight.FlightServerError, lambda: server.apply(make_command(), rows))
    assert error["type"] == "BadInputError"
    assert error["fields"][:2] == ["orders", "op"]
    assert error["fields"][3].startswith("ключ")
    error = refused(flight.FlightServerError, lambda: server.action("ж" * 50_000))
    assert error["message"].startswith("no action 'ж")
    assert len(encode_error(ValueError("€" * 100_000))) < 7000


# --- bodies that are damaged -------------------------------------------------------------------


def damaged_columns() -> dict[str, tuple[str, pa.Array]]:
    """Columns whose buffers do not hold what they say, as a client with the token can send them, by what is wrong."""
    rows = BATCHES[1].num_rows
    far, falling = (np.arange(rows + 1, dtype=np.int32) for _ in range(2))
    far[rows // 2] = 1 << 30
    falling[7] = -(1 << 30)
    text, bits, numbers = (pa.py_buffer(content) for content in (b"x" * rows, b"\x55" * 8, b"\0" * 8 * rows))

    def strings(offsets: Any) -> pa.Array:
        return pa.Array.from_buffers(pa.string(), rows, [None, pa.py_buffer(offsets.tobytes()), text])

    return {
        "an offset beyond the end": ("c0", strings(far)),
        "a negative offset": ("c3", strings(falling)),
        "a false number of nulls": ("c1", pa.Array.from_buffers(pa.float64(), rows, [bits, numbers], 1)),
    }


@pytest.mark.parametrize("damage", damaged_columns())
def test_damaged_arrays_are_refused_before_anything_computes_with_them(
    server: Server, folder: str, damage: str
) -> None:
    name, column = damaged_columns()[damage]
    server.apply(make_command(0, folder), BATCHES[0])
    damaged = BATCHES[1].set_column(WIRE_SCHEMA.get_field_index(name), name, column)
    error = refused(
        flight.FlightServerError, lambda: server.apply(make_command(1, folder), damaged, chunk=damaged.num_rows)
    )
    assert error["type"] == "BadInputError"
    assert error["fields"][:2] == ["orders', 'prices", name]
    assert "came damaged" in error["fields"][2]
    assert server.apply(make_command(1, folder), BATCHES[1])[0].equals(ANSWERS[1])


@pytest.mark.parametrize("times", [200, pytest.param(5000, marks=pytest.mark.slow)])
def test_mutated_bodies_do_not_kill_a_server(own_server: Server, folder: str, times: int) -> None:
    """21 of 166 did: Arrow reads them, and what it then computed with ended the process."""
    own_server.apply(make_command(0, folder), BATCHES[0])
    chance = random.Random(5)
    for number in range(times):
        body = ipc_stream(BATCHES[0], chance.choice((None, None, "lz4", "zstd")))
        whole = flight_messages(BATCHES[0], make_command(join_id="other", counted=True).to_json().encode(), body)
        for _ in range(chance.randint(1, 6)):
            part = whole[chance.choice((0, 1, 1, 1))]
            at = chance.randrange(len(part))
            part[at] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))
        raw_exchange(own_server.greeting["port"], whole)
        assert own_server.process.poll() is None, f"body {number} ended the server: {own_server.said()[-2000:]}"
    assert own_server.apply(make_command(1, folder), BATCHES[1])[0].equals(ANSWERS[1])


def test_a_false_size_before_compressed_rows_takes_no_memory(own_server: Server) -> None:
    """Compressed buffers say how long they are: a few bytes may say 2^46."""
    stream = ipc_stream(BATCHES[0], "zstd")
    length = struct.pack("<q", BATCHES[0].num_rows * 8)
    assert stream.count(length + b"\x28\xb5\x2f\xfd") >= 2
    stream = stream.replace(length + b"\x28", struct.pack("<q", 1 << 46) + b"\x28")
    messages = flight_messages(BATCHES[0], make_command().to_json().encode(), stream)
    raw_exchange(own_server.greeting["port"], messages)
    assert "apply refused: AbandonedError" in own_server.said()
    assert own_server.process.poll() is None
    assert own_server.apply(make_command(), BATCHES[0])[0].equals(ANSWERS[0])


@pytest.mark.parametrize("token", [None, "wrong"])
def test_without_a_token_no_body_is_read(server: Server, token: str | None) -> None:
    """The call ends although its body does not, and what there is of it is not even looked at."""
    messages = [b"\xff" * 1000]
    raw_exchange(server.greeting["port"], messages, token, whole=False)
    assert "refused a call" in server.said()
    assert "apply" not in server.said()


# --- streams that end early --------------------------------------------------------------------


@pytest.mark.parametrize("kept", ["folder", "memory"])
def test_cancelled_repetition(server: Server, folder: str, kept: str) -> None:
    state = folder if kept == "folder" else None
    server.apply(make_command(0, state), BATCHES[0])
    server.apply(make_command(1, state), BATCHES[1])
    for times in range(1, 6):
        writer, reader = started(server, make_command(1, state))
        writer.begin(WIRE_SCHEMA)
        writer.write_batch(BATCHES[1].to_batches()[0].slice(0, 7))
        time.sleep(0.2)  # a call that is cancelled at once may never be sent
        reader.cancel()
        await_log(server, "apply refused: AbandonedError", times)
    assert server.apply(make_command(2, state), BATCHES[2])[0].equals(ANSWERS[2])


SENDER = """
import os, sys, time
from pyarrow import flight
sys.path[:0] = [{tests!r}]
from state.support import WIRE_SCHEMA, call_options, wire_batches
client = flight.FlightClient({address!r})
descriptor = flight.FlightDescriptor.for_command({command!r})
writer, reader = client.do_exchange(descriptor, call_options())
writer.begin(WIRE_SCHEMA)
writer.write_batch(wire_batches(2)[1].to_batches()[0].slice(0, 7))
time.sleep(0.2)
os.write(1, b"sent")
os.read(0, 1)
"""


def test_killed_client(server: Server, folder: str) -> None:
    server.apply(make_command(0, folder), BATCHES[0])
    server.apply(make_command(1, folder), BATCHES[1])
    text = SENDER.format(
        tests=str(Path(__file__).parents[1]),
        address=server.address,
        command=make_command(1, folder).to_json().encode(),
    )
    with subprocess.Popen([sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        assert client.stdout.read(4) == b"sent"
        client.kill()
    await_log(server, "apply refused: AbandonedError")
    assert server.apply(make_command(2, folder), BATCHES[2])[0].equals(ANSWERS[2])


def test_closed_half_way(server: Server, folder: str) -> None:
    """A client that closes its stream after some rows: only their number tells."""
    server.apply(make_command(0, folder), BATCHES[0])
    for marker in (None, {"rows": 40}, {"rows": 8}, {"lines": 7}, []):
        writer, reader = started(server, make_command(1, folder, counted=True))
        writer.begin(WIRE_SCHEMA)
        writer.write_batch(BATCHES[1].to_batches()[0].slice(0, 7))
        if marker is not None:
            writer.write_metadata(json.dumps(marker).encode())
        writer.done_writing()
        error = refused(flight.FlightServerError, reader.read_all)
        assert error["type"] == ("DescriptionError" if marker in ({"lines": 7}, []) else "AbandonedError")
        with pytest.raises(flight.FlightServerError):
            writer.close()
    writer, reader = started(server, make_command(1, folder, counted=True))
    with writer:
        writer.begin(WIRE_SCHEMA)
        writer.write_table(BATCHES[1])
        writer.write_metadata(b'{"rows": 40}')
        writer.done_writing()
        assert with_text(reader.read_all()).equals(ANSWERS[1])


def test_no_rows_at_all(server: Server, folder: str) -> None:
    writer, reader = started(server, make_command(0, folder))
    writer.done_writing()
    assert refused(flight.FlightServerError, reader.read_all)["type"] == "AbandonedError"
    with pytest.raises(flight.FlightServerError):
        writer.close()
    assert server.apply(make_command(0, folder), BATCHES[0])[0].equals(ANSWERS[0])


# --- the server's own end ----------------------------------------------------------------------


def test_killed_server_is_replaced(folder: str, log: Path) -> None:
    options = {"snapshot_every": 2}
    for batches in ((0, 1, 2), (2, 3, 4), (5, 6)):
        with Server(log) as server:  # leaving it is a SIGKILL
            for batch in batches:
                found, _ = server.apply(make_command(batch, folder, options=options), BATCHES[batch])
                assert found.equals(ANSWERS[batch])
            if batches[0] == 0:
                assert server.apply(make_command(0), BATCHES[0])[0].equals(ANSWERS[0])
            else:
                error = refused(flight.FlightServerError, lambda: server.apply(make_command(1), BATCHES[1]))
                assert error["type"] == "StateError"
                assert "state= was not given" in error["message"]


@pytest.mark.slow
def test_kill_at_any_moment(folder: str, log: Path) -> None:
    """Big micro-batches, a SIGKILL somewhere inside: a task's retries find their way to the same answers."""
    chance = random.Random(7)
    batches = wire_batches(6, rows=3000, seed=3)
    answers = expected(batches)
    kills = 0
    for batch, table in enumerate(batches):
        command = make_command(batch, folder, options={"snapshot_every": 2})
        for patience in range(1, 100):  # seconds; a slow machine needs more of it
            with Server(log) as server:
                killer = threading.Timer(chance.uniform(0.05, patience), server.process.kill)
                killer.start()
                try:
                    found, _ = server.apply(command, table, chunk=500)
                except (flight.FlightError, pa.ArrowException, AssertionError):
                    kills += 1
                    continue
                finally:
                    killer.cancel()
                    killer.join()
            assert found.equals(answers[batch])
            break
        else:
            pytest.fail("never got through")
    assert kills


def test_skipped_and_old_batches(server: Server, folder: str) -> None:
    for batch in range(3):
        server.apply(make_command(batch, folder), BATCHES[batch])
    for batch, message in ((4, "ends with batch 2"), (9, "ends with batch 2"), (1, "is at batch 2")):
        error = refused(flight.FlightServerError, lambda b=batch: server.apply(make_command(b, folder), BATCHES[b % 8]))
        assert error["type"] == "StateError"
        assert message in error["message"]
    error = refused(flight.FlightServerError, lambda: server.apply(make_command(3, folder, query_id="q2"), BATCHES[3]))
    assert "belongs to query query-1" in error["message"]
    assert server.apply(make_command(3, folder), BATCHES[3])[0].equals(ANSWERS[3])


def test_release(server: Server, folder: str) -> None:
    for partition in (0, 1):
        server.apply(make_command(0, folder, partition=partition), BATCHES[0])
    server.apply(make_command(0, join_id="other"), BATCHES[0])
    assert server.action("release", {"join_id": "j", "version": 1}) == {"released": 2}
    assert server.action("ping")["partitions"] == 1
    assert server.apply(make_command(1, folder), BATCHES[1])[0].equals(ANSWERS[1])  # from the folder
    assert server.apply(make_command(1, join_id="other"), BATCHES[1])[0].equals(ANSWERS[1])


def test_queries_of_one_join_do_not_meet(server: Server) -> None:
    for batch in range(3):
        for query in ("a", "b"):
            command = make_command(batch, query_id=query)
            assert server.apply(command, BATCHES[batch])[0].equals(ANSWERS[batch])


def test_partitions_at_the_same_time(server: Server, folder: str) -> None:
    failures: list[BaseException] = []

    def run(partition: int) -> None:
        try:
            for batch, answer in enumerate(ANSWERS):
                command = make_command(batch, folder, partition=partition, partitions=6)
                assert server.apply(command, BATCHES[batch])[0].equals(answer)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert [p["version"] for p in server.action("metrics")["partitions"]] == [7] * 6


def test_attempts_of_one_task_at_the_same_time(server: Server, folder: str) -> None:
    for batch, answer in enumerate(ANSWERS):
        found: list[pa.Table] = []

        def run(batch: int = batch, found: list[pa.Table] = found) -> None:
            found.append(server.apply(make_command(batch, folder), BATCHES[batch])[0])

        threads = [threading.Thread(target=run) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [table.equals(answer) for table in found] == [True] * 3


def test_it_ends_with_its_standard_input(own_server: Server) -> None:
    assert own_server.process.stdin is not None
    own_server.process.stdin.close()
    assert own_server.process.wait(10) == 0
    assert "standard input has ended" in own_server.said()


def test_it_ends_when_asked_to(own_server: Server) -> None:
    own_server.action("shutdown")
    assert own_server.process.wait(10) == 0


def test_interrupts_of_the_terminal_do_not_end_it(server: Server, folder: str) -> None:
    server.process.send_signal(signal.SIGINT)
    assert server.apply(make_command(0, folder), BATCHES[0])[0].equals(ANSWERS[0])


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    """Even when something else keeps its standard input open."""
    reading, writing = os.pipe()
    launch = (
        "import subprocess, sys, time; "
        "p = subprocess.Popen([sys.executable, '-m', 'gpu_ops.spark.server.server', '--backend', 'cpu'], "
        f"stdin={reading}, stdout=subprocess.PIPE); "
        "print(p.stdout.readline().decode(), flush=True); time.sleep(60)"
    )
    errors = tmp_path / "errors"
    with (
        errors.open("wb") as stream,
        subprocess.Popen(
            [sys.executable, "-c", launch], stdout=subprocess.PIPE, stderr=stream, pass_fds=[reading]
        ) as parent,
    ):
        os.write(writing, json.dumps({"token": TOKEN}).encode() + b"\n")
        assert parent.stdout is not None
        pid = json.loads(parent.stdout.readline())["pid"]
        parent.kill()
    deadline = time.monotonic() + 15
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.close(reading)
    os.close(writing)
    assert not _runs(pid)
    assert "the parent process is gone" in errors.read_text()


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_it_listens_on_loopback_only(server: Server) -> None:
    port = f"{server.greeting['port']:04X}"
    listening = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            address, state = line.split()[1], line.split()[3]
            if address.endswith(f":{port}") and state == "0A":
                listening.append(address.split(":")[0])
    assert set(listening) <= {"0100007F", "0000000000000000FFFF00000100007F"}
    assert listening


def test_calls_without_the_token_do_not_fill_the_log(server: Server) -> None:
    """Each added a line, for as long as anybody called."""
    server.mark()
    for token in (None, "wrong"):
        for number in range(500):
            with pytest.raises(flight.FlightUnauthenticatedError):
                server.action(("ping", "metrics", "no such")[number % 3], token=token)
    assert 5 < server.said().count("\n") <= 40
    assert "(512 such calls so far)" in server.said()


@pytest.mark.parametrize("line", [b"", b'{"token": ""}\n'])
def test_without_a_token_it_does_not_start(line: bytes) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "gpu_ops.spark.server.server", "--backend", "cpu"],
        input=line,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2
    assert ended.stdout == b""
    assert b"token" in ended.stderr
