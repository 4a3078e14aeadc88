"""Encrypted connections: to the directory and to state servers."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyarrow import flight
from state.support import TOKEN, expected, make_command, wire_batches

from gpu_ops.errors import DescriptionError, StateError
from gpu_ops.spark.driver.process import Launcher
from gpu_ops.spark.settings import Settings
from gpu_ops.spark.wire.connection import Address, FlightServer, Tls, format_location
from gpu_ops.spark.wire.exchange import Exchange, ask
from spark.support import certificate

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    made = certificate(tmp_path_factory.mktemp("tls"), "ours")
    if made is None:
        pytest.skip("no openssl to make a certificate with")
    return Tls(*made, made[0], "ours")


@pytest.fixture
def address(tls: Tls) -> Iterator[Address]:
    """A server that echoes."""
    server = FlightServer(TOKEN, certificate=tls[:2], actions={"echo": lambda request, _: request})
    yield Address(format_location("127.0.0.1", server.port, encrypted=True), TOKEN, tls)
    server.end()


def test_the_directory_answers_whom_it_knows(address: Address) -> None:
    assert ask(address, "echo", {"x": 1}) == {"x": 1}
    with pytest.raises(StateError, match="refused the call"):
        ask(address._replace(token="0" * 32), "echo", {"x": 1})


def test_plain_connections_and_strangers_get_nothing(address: Address, tmp_path: Path) -> None:
    with pytest.raises(StateError, match="does not answer"):
        ask(Address(address.location.replace("grpc+tls", "grpc"), TOKEN, timeout_s=5), "echo", {"x": 1})
    other = certificate(tmp_path, "ours")
    assert other is not None
    assert address.tls is not None
    with pytest.raises(StateError, match="certificate verify failed"):
        ask(address._replace(tls=address.tls._replace(authority=other[0])), "echo", {"x": 1})
    with pytest.raises(StateError, match=r"does not answer.*theirs"):
        ask(address._replace(tls=address.tls._replace(name="theirs")), "echo", {"x": 1})
    assert ask(address, "echo", {"x": 2})["x"] == 2


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x40\x00"])  # a handshake of 16 KiB begins
def test_one_that_says_nothing_holds_up_nobody(address: Address, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", int(address.location.rpartition(":")[2]))) as connection:
        connection.sendall(sent)
        assert ask(address, "echo", {"x": 1})["x"] == 1


def test_a_state_server_takes_encrypted_calls_only(tls: Tls) -> None:
    launcher = Launcher(TOKEN, tls=tls)
    process = launcher.start("cpu", "tls")
    try:
        assert process.location.startswith("grpc+tls://")
        assert process.address.call("ping")["pid"] == process.pid
        plain = process.location.replace("grpc+tls", "grpc")
        with flight.FlightClient(plain) as client, pytest.raises(flight.FlightError):
            list(client.do_action(flight.Action("ping", b""), flight.FlightCallOptions(timeout=5)))
        with pytest.raises(flight.FlightError):
            process.address._replace(tls=tls._replace(name="theirs")).call("ping")
        rows = wire_batches(1)[0]
        exchange = Exchange(lambda failed: (process.address, {}), json.loads(make_command(0).to_json()), rows.schema)
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


def test_strangers_do_not_fill_the_log(tls: Tls) -> None:
    """gRPC itself has a line for each handshake that fails."""
    launcher = Launcher(TOKEN, tls=tls)
    process = launcher.start("cpu", "tls")
    try:
        for said in (b"GET / HTTP/1.1\r\n\r\n", bytes(100), b"\x16\x03\x01\x40\x00"):
            for _ in range(20):
                with socket.create_connection(("127.0.0.1", int(process.location.rpartition(":")[2]))) as connection:
                    connection.sendall(said)
        assert process.address.call("ping")["pid"] == process.pid
        assert launcher.tail("tls").count("\n") <= 2, launcher.tail("tls")
    finally:
        process.stop()
        launcher.close()
