"""A connection that carries lines of JSON both ways, and notices when the other machine is gone."""

from __future__ import annotations

import json
import select
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from typing import Any, Final

_LONGEST: Final = 1 << 20
_SEND_S: Final = 30.0

#: Seconds of silence before the other side is asked whether it is there, between two such questions, and how many.
_KEEPALIVE: Final = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))


class Channel:
    """Sends from any thread, receives in one.

    Args:
        connection: a connected socket; closed with the channel.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._rest = b""
        self._sending = threading.Lock()
        # An encrypted connection is one object for both ways, and not safe for two threads.
        self._using = threading.Lock()
        connection.settimeout(0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE:
            if hasattr(socket, name) and connection.family != socket.AF_UNIX:
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, message: Mapping[str, object]) -> None:
        """Sends one message.

        Raises:
            OSError: the other side is gone.
        """
        left = memoryview(json.dumps(message).encode() + b"\n")
        deadline = time.monotonic() + _SEND_S
        with self._sending:
            while left:
                with self._using:
                    try:
                        left = left[self._connection.send(left) :]
                        continue
                    except (ssl.SSLWantWriteError, ssl.SSLWantReadError, BlockingIOError):
                        pass
                if time.monotonic() > deadline:
                    raise TimeoutError(f"nothing was taken for {_SEND_S:.0f} s")
                try:
                    self._poll(select.POLLOUT, 100)
                except ValueError as error:  # closed by another thread
                    raise ConnectionError("the connection is closed") from error

    def receive(self, timeout: float | None = None) -> dict[str, Any] | None:
        """The next message.

        Args:
            timeout: seconds; None for as long as it takes.

        Returns:
            None if none came in time.

        Raises:
            EOFError: the other side has closed the connection, or is gone, or sends something else.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while b"\n" not in self._rest:
            left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1e3
            try:
                if not self._pending() and not self._poll(select.POLLIN, left):
                    return None
                more = self._take()
                if more is None:
                    continue
            except (OSError, ValueError) as error:  # ValueError: closed by another thread
                raise EOFError(str(error)) from error
            if not more or len(self._rest) > _LONGEST:
                raise EOFError("the other side has ended" if not more else "a message is too long")
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        try:
            return dict(json.loads(line))
        except (ValueError, TypeError) as error:
            raise EOFError("a message is no JSON") from error

    def _take(self) -> bytes | None:
        """The bytes that are there; None where they were the encryption's own."""
        with self._using:
            try:
                return self._connection.recv(1 << 16)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
                return None

    def _pending(self) -> bool:
        """Whether bytes are there that have been deciphered already."""
        return isinstance(self._connection, ssl.SSLSocket) and self._connection.pending() > 0

    def _poll(self, what: int, ms: float | None) -> bool:
        poll = select.poll()  # select() takes no descriptor above 1023, and a driver may have many
        poll.register(self._connection, what)
        return bool(poll.poll(ms))

    def close(self) -> None:
        """Ends the connection; who waits in `receive` gets its end."""
        try:
            with self._using:
                self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it is gone
        finally:
            self._connection.close()
