"""Encrypted connections on a cluster: what both ends of them need."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path
from typing import Any, NamedTuple

from gpu_ops.errors import DescriptionError


class Tls(NamedTuple):
    """Files in PEM, under the same paths on the driver and all executors, and the name in the certificates.

    Attributes:
        certificate: the chain that this machine shows.
        key: its private key, without a passphrase.
        authority: who signed the certificates of all machines.
        name: what the certificates are for; None for each machine's own address.
    """

    certificate: str
    key: str
    authority: str
    name: str | None = None

    def accept(self, connection: socket.socket) -> socket.socket:
        """The server's end of a connection, encrypted.

        Raises:
            OSError: the other side does not want that.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self.key)
        return context.wrap_socket(connection, server_side=True)

    def connect(self, connection: socket.socket, host: str) -> socket.socket:
        """The client's end of a connection, encrypted; the other side is whom its certificate says.

        Raises:
            OSError: it is somebody else.
        """
        context = ssl.create_default_context(cafile=self.authority)
        return context.wrap_socket(connection, server_hostname=self.name or host)

    def check(self) -> None:
        """Reads the files here.

        Raises:
            DescriptionError: they cannot be used.
        """
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, self.key)
            ssl.create_default_context(cafile=self.authority)
        except OSError as error:
            raise DescriptionError(
                f"spark.gpu_ops.tls.*: {self.certificate}, {self.key}, {self.authority}: {error}"
            ) from error

    @property
    def flight_client(self) -> dict[str, Any]:
        """What a Flight client takes."""
        named = {} if self.name is None else {"override_hostname": self.name}
        return {"tls_root_certs": Path(self.authority).read_bytes(), **named}
