"""Requests with values that nobody sends: each is answered, or refused by an error of ours, and the server lives on."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import flight

from gpu_ops import errors
from gpu_ops.errors import GpuJoinError
from gpu_ops.spark.driver.agent import Offer
from gpu_ops.spark.driver.cluster import ClusterServers
from gpu_ops.spark.driver.executors import Executors
from gpu_ops.spark.settings import Settings
from gpu_ops.spark.wire.command import LocateRequest, ReportRequest, answering, read
from gpu_ops.spark.wire.connection import Address, FlightServer, as_json, format_location
from state.support import TOKEN, WIRE_SCHEMA, Server, call_options, make_command, wire_batches

ROWS = wire_batches(1)[0]
ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 127, 128, 1 << 31, 1 << 63, -(1 << 63), (1 << 63) - 1, 1 << 64, 10**30, 0.0, 1.5,
    -0.0, float("nan"), float("inf"), 1e300, "", "x", "0", "\0", "a\0b", "\ud800", "a/../b", "/proc/self/mem", "~",
    "/dev/zero/x", "/etc/passwd/x", "file:x", "s3://", "s3://b/../x", "grpc://127.0.0.1:1", "{}", "null", "é",
    "x" * 9999,
    [], [[]], [None], [1, "x"], ["x"] * 3, {}, {"": None}, {"a": {"b": []}}, [0, [0], 0, ["f", 0, 0, 0, 0]],
    {"tiny": 1}, {"snapshot_every": 0}, {"snapshot_every": "x"}, {"memory_limit": -1}, {"memory_limit": 1},
    {"backlog": 0},
)  # fmt: skip
"""Values of all types of JSON, at their ends, and such as mean something somewhere."""


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value within a JSON value, itself too."""
    yield at
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for name, part in inner:
        yield from places(part, (*at, name))


def changed(value: Any, choice: random.Random, times: int) -> Any:
    """A JSON value with some odd value in some places, some without a value, and some with one more."""
    value = json.loads(json.dumps(value))
    for _ in range(times):
        if not (ways := list(places(value))[1:]):
            break
        *way, last = choice.choice(ways)
        inner = value
        for name in way:
            inner = inner[name]
        how = choice.random()
        if how < 0.1:
            del inner[last]
        elif how < 0.15 and isinstance(inner, dict):
            inner[choice.choice(["more", "", "op", "batch_id"])] = copy.deepcopy(choice.choice(ODD))
        else:
            inner[last] = copy.deepcopy(choice.choice(ODD))
    return choice.choice(ODD) if choice.random() < 0.02 else value


def outcome(call: Callable[[], object]) -> str | None:
    """The kind of error that an answer is; None for another answer."""
    try:
        call()
    except flight.FlightError as error:
        content, _ = json.JSONDecoder().raw_decode(str(error), max(0, str(error).find('{"type"')))
        return str(content["type"])
    except GpuJoinError as error:
        return type(error).__name__
    return None


def ours(kind: str | None) -> bool:
    """Whether an error is one that is raised on purpose."""
    found = getattr(errors, kind or "", None)
    return kind in (None, "AbandonedError") or (isinstance(found, type) and issubclass(found, GpuJoinError))


# --- a state server ------------------------------------------------------------------------------


def exchange(server: Server, command: Any, messages: list[Any]) -> None:
    """A micro-batch with messages beside its rows."""
    content = json.dumps(command).encode("utf-8", "surrogatepass")
    writer, reader = server.client.do_exchange(flight.FlightDescriptor.for_command(content), call_options())
    try:
        writer.begin(WIRE_SCHEMA)
        for batch in ROWS.to_batches():
            writer.write_batch(batch)
        for message in messages:
            writer.write_metadata(json.dumps(message).encode("utf-8", "surrogatepass"))
        writer.done_writing()
        for _ in reader:
            pass
    except (pa.ArrowException, OSError):
        reader.read_all()  # why the server has ended the call
        raise
    finally:
        try:
            writer.close()
        except (pa.ArrowException, OSError):
            writer = None  # what it says was raised above


def odd_exchanges(server: Server, folder: Path, seed: int, times: int) -> dict[str | None, int]:
    """How often what came of it."""
    choice, counted = random.Random(seed), dict[str | None, int]()
    block = [str(folder / "run" / "0" / "file"), 0, 10, 1, 5]
    for number in range(times):
        command = json.loads(make_command(0, str(folder / f"s{number}"), counted=True).to_json())
        command |= {"answers": str(folder / "run" / "0"), "least_bytes": 1, "watermark": 5, "clock_ms": 7, "call": "c"}
        messages = [{"part": [0, [0, 1, 2, 3], ROWS.num_rows, block]}, {"rows": ROWS.num_rows}]
        if choice.random() < 0.3:
            description = json.dumps(changed(json.loads(command["description"]), choice, choice.randrange(1, 3)))
            command, messages = {**command, "description": description}, messages[1:]
        elif choice.random() < 0.6:
            command, messages = changed(command, choice, choice.randrange(1, 4)), messages[1:]
        else:
            messages = changed(messages, choice, choice.randrange(1, 4))
            messages = messages if isinstance(messages, list) else [messages]
        said: list[Any] = [command, messages]
        kind = outcome(lambda said=said: exchange(server, *said))  # type: ignore[misc]
        assert ours(kind), (seed, number, kind, said, server.said()[-3000:])
        counted[kind] = counted.get(kind, 0) + 1
    assert server.process.poll() is None, (seed, server.said()[-3000:])
    return counted


def odd_actions(server: Server, seed: int, times: int) -> None:
    choice = random.Random(seed)
    for number in range(times):
        name = choice.choice(["ping", "release", "metrics", "pin", "", "x" * 1000, "\0"])
        body = changed({"join_id": "j", "call": "c"}, choice, 2)
        kind = outcome(lambda name=name, body=body: server.action(name, body))  # type: ignore[misc]
        assert ours(kind), (seed, number, kind, name, body)
    for content in (b"\xff", b"{", b"[" * 100_000, b"3", b'"x"', b"1" * 5000, b'{"call": ' + b"9" * 5000 + b"}"):
        action = flight.Action("ping", content)
        kind = outcome(lambda action=action: list(server.client.do_action(action, call_options())))  # type: ignore[misc]
        assert kind == "DescriptionError", content[:20]
    assert server.action("ping")["pid"] == server.process.pid


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # what is made by a relative name is there
        patch.setenv("HOME", str(folder))
        running = Server(folder / "log", "--blocks", str(folder))
    with running:
        yield running


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_odd_commands_are_answered_by_errors_of_ours(server: Server, seed: int) -> None:
    counted = odd_exchanges(server, server.log.parent, seed, 120 if seed == 1 else 1000)
    assert counted.get("DescriptionError", 0) > 20, counted
    assert server.action("ping")["pid"] == server.process.pid


def test_odd_actions_are_answered_by_errors_of_ours(server: Server) -> None:
    odd_actions(server, 1, 200)


@pytest.mark.slow
def test_many_odd_requests(server: Server) -> None:
    first = int(os.environ.get("GPU_JOIN_SEED", "100"))
    for seed in range(first, first + int(os.environ.get("GPU_JOIN_TRACES", "20"))):
        odd_exchanges(server, server.log.parent, seed, 500)
        odd_actions(server, seed, 200)
        odd_directory(seed, 500)


# --- the directory -------------------------------------------------------------------------------


LOCATE = {
    "join_id": "j-q", "query_id": "q", "run_id": "r", "batch_id": 0, "state": "/nowhere/state", "backend": "cpu",
    "partition": 0, "partitions": 2, "attempt": 1, "evaluation": "e", "failed": None, "backlog": False, "timed": False,
    "waits": True,
}  # fmt: skip
REPORT = {
    "join_id": "j-q", "run_id": "r", "batch_id": 0, "partition": 0, "partitions": 2, "numbers": [1, None, 3],
    "observed": True, "times": {"latest": [1, None], "rows": [True, False]},
}  # fmt: skip
OFFER = json.loads(as_json(vars(Offer(1, 0, 5, 6, "h:1:/", "127.0.0.1", 2, (), "none"))))


def odd_directory(seed: int, times: int) -> None:
    """What tasks and agents call the directory for, as it is read there."""
    choice, given = random.Random(seed), Settings.of({})
    servers = ClusterServers(Executors.__new__(Executors), given, lambda: address)
    actions = {
        "locate": answering(LocateRequest, lambda request: request),
        "report": answering(ReportRequest, lambda request: request),
        **servers.actions,
    }
    with FlightServer(TOKEN, actions=actions) as server:
        address = Address(format_location("127.0.0.1", server.port), TOKEN)
        known = address.call("offer", OFFER)["agent"]
        ended = {"pid": 5, "name": "cpu-0", "code": -9, "death": ["cpu-0", 5, "tail", -9]}
        requests = {
            "locate": {"each": [LOCATE, LOCATE]}, "report": {"each": [REPORT, REPORT]}, "offer": OFFER,
            "commands": {"agent": known, "ended": [ended]},
            "done": {"agent": known, "id": 3, "pid": 7, "location": "grpc://h:1", "on_cpu": None, "death": None},
        }  # fmt: skip
        for name, request in requests.items():
            for _ in range(times // len(requests)):
                odd = changed(request, choice, choice.randrange(1, 4))
                odd = odd if isinstance(odd, dict) else {"x": odd}
                if name == "commands" and odd.get("agent") == known:
                    continue  # it would wait
                kind = outcome(lambda name=name, odd=odd: address.call(name, odd))  # type: ignore[misc]
                assert kind != "GpuJoinError", (seed, name, odd)
                assert ours(kind), (seed, name, odd, kind)


def test_odd_requests_of_the_directory_are_answered_by_errors_of_ours() -> None:
    odd_directory(1, 400)


@pytest.mark.parametrize(("kind", "request_"), [(LocateRequest, LOCATE), (ReportRequest, REPORT)])
def test_odd_requests_are_read_or_refused(kind: Any, request_: dict[str, Any]) -> None:
    assert isinstance(read(kind, request_), kind)
    choice, refused = random.Random(3), 0
    for _ in range(2000):
        odd = changed(request_, choice, 1)
        try:
            assert isinstance(read(kind, odd if isinstance(odd, dict) else {"x": odd}), kind)
        except errors.DescriptionError:
            refused += 1
    assert 500 < refused < 2000
