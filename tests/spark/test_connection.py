"""Strangers at the driver's directory: slow ones, silent ones, and many of them; and tasks, which come all at once."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from pyarrow import flight
from state.support import TOKEN, raw_exchange

from gpu_ops.errors import DescriptionError, GpuJoinError, StateError
from gpu_ops.spark.wire import exchange
from gpu_ops.spark.wire.connection import Address, FlightServer, format_location
from gpu_ops.spark.wire.exchange import ask

pytestmark = pytest.mark.thorough

CALLED: list[Any] = []


def slowly(request: dict[str, Any], _: object) -> dict[str, Any]:
    time.sleep(request["seconds"])
    return {"slept": request["seconds"]}


def refuse(request: dict[str, Any], _: object) -> dict[str, Any]:
    if "x" in request:
        raise StateError("not this one")
    return {"x": request["x"]}


def echo(request: dict[str, Any], _: object) -> dict[str, Any]:
    CALLED.append(request)
    return request


@pytest.fixture
def address() -> Iterator[Address]:
    """A server that echoes."""
    CALLED.clear()
    server = FlightServer(TOKEN, actions={"echo": echo, "slowly": slowly, "refuse": refuse})
    yield Address(format_location("127.0.0.1", server.port), TOKEN)
    server.end()


def port(address: Address) -> int:
    return int(address.location.rpartition(":")[2])


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("token", ["", "0" * 32, TOKEN + "x", TOKEN[:-1]])
def test_a_call_without_the_token_is_refused_and_learns_nothing(
    address: Address, token: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(StateError, match="refused the call") as caught:
        ask(address._replace(token=token), "echo", {"x": 1})
    assert TOKEN not in str(caught.value)
    for action in ("echo", "no such action"):
        with pytest.raises(flight.FlightUnauthenticatedError) as refused:
            list(flight.FlightClient(address.location).do_action(flight.Action(action, b"{}")))
        assert "echo" not in str(refused.value)
    assert CALLED == []
    assert caplog.text.count("refused a call") == 3
    assert TOKEN not in caplog.text
    assert ask(address, "echo", {"x": 1}) == {"x": 1}


def test_a_stream_of_a_stranger_ends_before_it_is_read(address: Address) -> None:
    """Its body never ends; nothing of it is looked at."""
    began = time.monotonic()
    raw_exchange(port(address), [b"\xff" * 1000], "wrong", whole=False)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("sent", [b"", b"{", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"])
def test_many_strangers_take_neither_threads_nor_the_place_of_tasks(address: Address, sent: bytes) -> None:
    ask(address, "echo", {"x": 0})
    before = threads()
    with contextlib.ExitStack() as strangers:
        for _ in range(200):
            connection = socket.create_connection(("127.0.0.1", port(address)), timeout=5)
            strangers.enter_context(connection).sendall(sent)
        assert ask(address, "echo", {"x": 1})["x"] == 1
        assert threads() <= before + 10
        assert ask(address, "echo", {"x": 2})["x"] == 2


def test_what_is_no_http_is_ended_at_once(address: Address) -> None:
    with socket.create_connection(("127.0.0.1", port(address)), timeout=5) as connection:
        connection.sendall(b"{" * 100)
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(1000):
                pass
    assert ask(address, "echo", {"x": 1})["x"] == 1


def test_tasks_that_come_all_at_once_are_all_answered(address: Address) -> None:
    with concurrent.futures.ThreadPoolExecutor(50) as tasks:
        answers = tasks.map(lambda number: ask(address, "echo", {"x": number})["x"], range(200))
        assert list(answers) == list(range(200))


def test_a_call_may_take_its_time_but_not_for_ever(address: Address) -> None:
    assert ask(address, "slowly", {"seconds": 1.5}) == {"slept": 1.5}
    began = time.monotonic()
    with pytest.raises(StateError, match="has not answered for 1 s"):
        ask(address._replace(timeout_s=1.0), "slowly", {"seconds": 3})
    assert time.monotonic() - began < 2.5


def test_a_directory_that_is_gone_is_told_of_at_once() -> None:
    server = FlightServer(TOKEN, actions={"slowly": slowly})
    address = Address(format_location("127.0.0.1", server.port), TOKEN)
    failures: list[str] = []

    def call() -> None:
        try:
            ask(address, "slowly", {"seconds": 60})
        except StateError as error:
            failures.append(str(error))

    server.end()
    began = time.monotonic()
    caller = threading.Thread(target=call)
    caller.start()
    caller.join(10)
    assert time.monotonic() - began < 5
    assert "does not answer" in failures[0]


def test_a_directory_is_asked_over_one_connection_and_another_once_that_is_gone_or_old(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Address] = []
    connect = Address.connect
    monkeypatch.setattr(Address, "connect", lambda self: made.append(self) or connect(self))
    server = FlightServer(TOKEN, actions={"echo": echo})
    address = Address(format_location("127.0.0.1", server.port), TOKEN)
    assert [ask(address, "echo", {"x": n})["x"] for n in range(3)] == [0, 1, 2]
    assert len(made) == 1
    server.end()
    with pytest.raises(StateError, match="does not answer"):
        ask(address, "echo", {"x": 3})
    server = FlightServer(TOKEN, port=port(address), actions={"echo": echo})
    assert ask(address, "echo", {"x": 4})["x"] == 4
    server.end()
    server = FlightServer(TOKEN, port=port(address), actions={"echo": echo})  # the connection died unnoticed
    assert ask(address, "echo", {"x": 5})["x"] == 5
    known = len(made)
    monkeypatch.setattr(exchange, "_KEPT_S", 0.0)
    assert ask(address, "echo", {"x": 6})["x"] == 6
    assert len(made) == known + 1
    server.end()


def test_errors_come_back_as_what_they_were(address: Address) -> None:
    with pytest.raises(StateError, match=r"^not this one$"):
        ask(address, "refuse", {"x": 1})
    with pytest.raises(GpuJoinError, match="KeyError"):
        ask(address, "refuse", {})
    with pytest.raises(DescriptionError, match=r"no action 'offer'; there are echo, refuse, slowly"):
        ask(address, "offer", {})
    with pytest.raises(flight.FlightServerError, match="takes a JSON object"):
        list(flight.FlightClient(address.location).do_action(flight.Action("echo", b"[["), address.options(5)))


def test_a_port_that_is_taken_is_refused(address: Address) -> None:
    with pytest.raises(Exception, match="did not start"):
        FlightServer(TOKEN, port=port(address), actions={})


def test_an_http_proxy_of_the_environment_is_passed_by(address: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    assert ask(address, "echo", {"x": 1}) == {"x": 1}


def test_connections_to_servers_that_are_gone_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that meets one server after the other has as many threads as with the first."""
    monkeypatch.setattr(exchange, "_KEPT_S", 0.2)
    kept, counts = [], []
    for _ in range(8):
        server = FlightServer(TOKEN, actions={"echo": echo})
        address = Address(format_location("127.0.0.1", server.port), TOKEN)
        client = exchange._client(address)
        assert address.call("echo", {"x": 1}, client=client) == {"x": 1}
        assert exchange._client(address) is client
        kept.append(weakref.ref(client))
        del client
        server.end()
        del server
        time.sleep(0.3)
        counts.append(threads())
    assert [ref() is not None for ref in kept] == [False] * 7 + [True]
    assert counts[-1] <= counts[1] + 2
    exchange._servers.clear()
