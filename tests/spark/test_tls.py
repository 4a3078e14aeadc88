"""Encrypted connections: to the directory, to agents and to state servers."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pyarrow import flight
from state.support import TOKEN, expected, make_command, wire_batches

from gpu_ops.errors import DescriptionError, StateError
from gpu_ops.spark.cluster.tls import Tls
from gpu_ops.spark.exchange.exchange import Address, Exchange, ask
from gpu_ops.spark.servers.channel import Channel
from gpu_ops.spark.servers.listener import Listener
from gpu_ops.spark.servers.process import Launcher
from gpu_ops.spark.settings import Settings
from spark.support import certificate


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    made = certificate(tmp_path_factory.mktemp("tls"), "ours")
    if made is None:
        pytest.skip("no openssl to make a certificate with")
    return Tls(*made, made[0], "ours")


@pytest.fixture
def address(tls: Tls) -> Iterator[Address]:
    """A directory that echoes, and whose agents get back what they send, twice."""

    def attach(channel: Channel, hello: Mapping[str, Any]) -> None:
        try:
            while (message := channel.receive()) is not None:
                channel.send(message)
                channel.send({**hello, **message})
        except EOFError:
            channel.close()

    listener = Listener("127.0.0.1", 0, TOKEN, answer=dict, attach=attach, tls=tls)
    yield Address("127.0.0.1", listener.port, TOKEN, 10, tls)
    listener.shutdown()
    listener.server_close()


def test_the_directory_answers_whom_it_knows(address: Address) -> None:
    assert ask(address, {"x": 1}) == {"x": 1, "token": TOKEN}
    with pytest.raises(StateError, match="refused the call"):
        ask(address._replace(token="0" * 32), {"x": 1})


def test_plain_connections_and_strangers_get_nothing(address: Address, tmp_path: Path) -> None:
    with pytest.raises(StateError):
        ask(address._replace(tls=None), {"x": 1})
    other = certificate(tmp_path, "ours")
    assert other is not None
    assert address.tls is not None
    for wrong in (address.tls._replace(authority=other[0]), address.tls._replace(name="theirs")):
        with pytest.raises(StateError, match="certificate verify failed"):
            ask(address._replace(tls=wrong), {"x": 1})
    assert ask(address, {"x": 2})["x"] == 2


def test_one_that_says_nothing_holds_up_nobody(address: Address) -> None:
    with socket.create_connection((address.host, address.port)):
        assert ask(address, {"x": 1})["x"] == 1


def test_a_channel_carries_messages_both_ways_at_once(address: Address) -> None:
    channel = Channel(address.connect())
    channel.send({"op": "offer", "token": TOKEN})
    began = time.monotonic()
    assert channel.receive(0.3) is None
    assert 0.25 < time.monotonic() - began < 5
    long = "x" * 50_000  # more than one record of TLS

    def send() -> None:
        for number in range(100):
            channel.send({"n": number, "long": long})

    sender = threading.Thread(target=send)
    sender.start()
    got = [channel.receive(20) for _ in range(200)]
    sender.join()
    assert [message["n"] for message in got if message is not None] == [n for n in range(100) for _ in range(2)]
    assert all(message is not None and message["long"] == long for message in got)
    channel.close()
    with pytest.raises(EOFError):
        channel.receive(5)


def test_a_state_server_takes_encrypted_calls_only(tls: Tls) -> None:
    launcher = Launcher(TOKEN)
    arguments = Settings(tls=tls).server_arguments()["cpu"]
    process = launcher.start("tls", {}, arguments)
    try:
        assert process.location.startswith("grpc+tls://")
        assert process.action("ping", b"", TOKEN, tls)
        plain = process.location.replace("grpc+tls", "grpc")
        with flight.FlightClient(plain) as client, pytest.raises(flight.FlightError):
            list(client.do_action(flight.Action("ping", b""), flight.FlightCallOptions(timeout=5)))
        with pytest.raises(flight.FlightError):
            process.action("ping", b"", TOKEN, tls._replace(name="theirs"))
        rows = wire_batches(1)[0]
        where = {"location": process.location, "token": TOKEN, "tls": [*tls]}
        exchange = Exchange(lambda failed: where, json.loads(make_command(0).to_json()), rows.schema)
        out = [row for batch in exchange.run(rows.to_batches()) for row in batch.to_pylist()]
        assert out == expected([rows])[0].to_pylist()
    finally:
        process.stop()
        launcher.close()


def test_settings(tls: Tls, tmp_path: Path) -> None:
    given = {f"spark.gpu_ops.tls.{name}": value for name, value in tls._asdict().items()}
    assert Settings.of(given.items()).tls == tls
    with pytest.raises(DescriptionError, match="go together"):
        Settings.of([("spark.gpu_ops.tls.key", tls.key)])
    tls.check()
    with pytest.raises(DescriptionError, match=r"missing\.pem"):
        tls._replace(certificate=str(tmp_path / "missing.pem")).check()
