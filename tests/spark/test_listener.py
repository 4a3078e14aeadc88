"""Strangers at the driver's directory: slow ones, silent ones, and many of them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from state.support import TOKEN

from gpu_ops.spark.cluster.tls import Tls
from gpu_ops.spark.exchange.exchange import Address, ask
from gpu_ops.spark.servers import listener
from gpu_ops.spark.servers.listener import Listener
from spark.support import certificate

Make = Callable[[Tls | None], Address]


@pytest.fixture
def listen() -> Iterator[Make]:
    """Makes directories that echo."""
    with contextlib.ExitStack() as made:

        def make(tls: Tls | None) -> Address:
            found = Listener("127.0.0.1", 0, TOKEN, answer=dict, attach=lambda channel, _: channel.close(), tls=tls)
            made.callback(found.server_close)
            made.callback(found.shutdown)
            return Address("127.0.0.1", found.port, TOKEN, 10, tls)

        yield make


def seconds_until_ended(connection: socket.socket) -> float:
    """A byte every 50 ms: each comes long before a wait for one would be over."""
    began = time.monotonic()
    with contextlib.suppress(OSError):
        while time.monotonic() - began < 20:
            connection.sendall(b"{")
            connection.settimeout(0.05)
            with contextlib.suppress(TimeoutError):
                if not connection.recv(1):
                    break
    return time.monotonic() - began


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_request_that_trickles_in_is_ended(
    listen: Make, encrypted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is of the whole request, an encrypted connection's handshake included, not of one byte."""
    monkeypatch.setattr(listener, "_REQUEST_S", 1.0)
    files = certificate(tmp_path, "ours") if encrypted else None
    if encrypted and files is None:
        pytest.skip("no openssl to make a certificate with")
    address = listen(Tls(*files, files[0], "ours") if files is not None else None)
    with socket.create_connection((address.host, address.port)) as plain:
        if encrypted:
            plain.sendall(b"\x16\x03\x01\x40\x00")  # a handshake of 16 KiB begins
        assert 0.5 < seconds_until_ended(plain) < 5
    if address.tls is not None:
        with address.connect() as connection:
            assert 0.5 < seconds_until_ended(connection) < 5
    assert ask(address, {"x": 1})["x"] == 1


def test_many_strangers_take_neither_threads_nor_the_place_of_tasks(
    listen: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "_STRANGERS", 10)
    monkeypatch.setattr(listener, "_WAY_S", 0.1)
    address = listen(None)
    before = threading.active_count()
    with contextlib.ExitStack() as strangers:
        silent = [
            strangers.enter_context(socket.create_connection((address.host, address.port), timeout=5))
            for _ in range(100)
        ]
        assert ask(address, {"x": 1})["x"] == 1
        assert silent[0].recv(1) == b""  # the first ones have been ended
        deadline = time.monotonic() + 10
        while threading.active_count() > before + 10 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert threading.active_count() <= before + 10
        assert ask(address, {"x": 2})["x"] == 2


def test_tasks_that_come_all_at_once_are_all_answered(listen: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "_STRANGERS", 3)
    address = listen(None)
    with concurrent.futures.ThreadPoolExecutor(50) as tasks:
        answers = tasks.map(lambda number: ask(address, {"x": number})["x"], range(200))
        assert list(answers) == list(range(200))


def test_a_call_with_the_token_may_take_its_time(listen: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "_REQUEST_S", 0.2)

    def slowly(request: object) -> dict[str, int]:
        time.sleep(1.5)
        return {"x": 1}

    found = Listener("127.0.0.1", 0, TOKEN, answer=slowly, attach=lambda channel, _: channel.close())
    try:
        assert ask(Address("127.0.0.1", found.port, TOKEN, 10), {}) == {"x": 1}
    finally:
        found.shutdown()
        found.server_close()
