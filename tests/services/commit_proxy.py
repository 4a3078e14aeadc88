"""A proxy in front of Postgres that loses, holds back or answers by a kill what the server says to a COMMIT."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import threading
import time
from pathlib import Path

POSTGRES = ("localhost", 15432)
HELD_S = 20.0


class CommitProxy:
    """Forwards connections; one COMMIT of each chosen kind has its answer lost.

    Attributes:
        url: of the database `postgres` through it, without ``jdbc:``.
        faults: how often an answer was lost so far.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server(("localhost", 0))
        self.url = f"postgresql://localhost:{self._listener.getsockname()[1]}/postgres"
        self.faults = 0
        self._wanted: tuple[str, bytes] | None = None
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def lose(self, how: str, sql: str) -> None:
        """The next COMMIT on a connection that has sent some SQL is done, and its answer is lost.

        Args:
            how: ``drop`` closes the connection, ``hold`` answers after `HELD_S`, ``kill`` ends the process that waits.
            sql: how a statement of it begins.
        """
        with self._lock:
            self._wanted = (how, sql.encode())

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            threading.Thread(target=self._forward, args=(client,), daemon=True).start()

    def _forward(self, client: socket.socket) -> None:
        server = socket.create_connection(POSTGRES)
        lost = threading.Event()
        threading.Thread(target=self._answer, args=(client, server, lost), daemon=True).start()
        sent = b""
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                sent += data
                how = None
                with self._lock:
                    if self._wanted is not None and _commits(data, sent) and self._wanted[1] in sent:
                        how, self._wanted = self._wanted[0], None
                        lost.set()
                server.sendall(data)
                if how is not None:
                    self._lose(how, client, lost)
        for end in (client, server):
            end.close()

    def _lose(self, how: str, client: socket.socket, lost: threading.Event) -> None:
        self.faults += 1
        time.sleep(1.0)  # the server has done it
        if how == "hold":
            time.sleep(HELD_S)
            lost.clear()
            return
        if how == "kill":
            os.kill(process_of(client.getpeername()[1]), signal.SIGKILL)
        client.shutdown(socket.SHUT_RDWR)

    @staticmethod
    def _answer(client: socket.socket, server: socket.socket, lost: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 16):
                while lost.is_set():
                    time.sleep(0.05)
                    client.getpeername()  # raises once it is closed
                client.sendall(data)


def _commits(data: bytes, sent: bytes) -> bool:
    """Whether a client has sent a COMMIT, by its text or by the name that an earlier one was given."""
    named = re.search(rb"(S_\d+)\0COMMIT\0", sent)
    return b"COMMIT" in data or (named is not None and b"\0" + named[1] + b"\0" in data)


def process_of(port: int) -> int:
    """The process on this machine whose end of a connection has a port."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if int(fields[1].rpartition(":")[2], 16) != port or fields[9] == "0":
                continue
            for path in Path("/proc").glob("[0-9]*/fd/*"):
                with contextlib.suppress(OSError):
                    if os.readlink(path) == f"socket:[{fields[9]}]" and path.parts[2] != str(os.getpid()):
                        return int(path.parts[2])
    raise ProcessLookupError(port)
