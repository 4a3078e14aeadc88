"""What listens for the directory: one line of JSON in, one out, to callers with the application's token."""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import socket
import socketserver
import ssl
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from gpu_ops.errors import GpuJoinError, StateError
from gpu_ops.spark.cluster.tls import Tls
from gpu_ops.spark.servers.channel import Channel

_log = logging.getLogger(__name__)

_LONGEST_REQUEST: Final = 1 << 16
_REQUEST_S: Final = 10.0
"""From the connection to the end of the request, the handshake of an encrypted one included."""
_STRANGERS: Final = 128
"""Connections that have not shown the token. More wait to be taken, as a stage's tasks may all come at once ..."""
_WAY_S: Final = 2.0
"""... and one that has not shown it for so long makes way."""

Answer = Callable[[Mapping[str, Any]], Mapping[str, Any]]
Attach = Callable[[Channel, Mapping[str, Any]], None]


class Listener(socketserver.ThreadingTCPServer):
    """Answers calls, each in a thread of its own.

    Args:
        host: the address it listens on.
        port: 0 for any.
        token: what a call must bring.
        answer: gives the answer to a request.
        attach: takes over the connection of a task that offers to run state servers, and returns at its end.
        tls: encrypts connections, if given.

    Raises:
        StateError: there is nothing to listen on.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(
        self, host: str, port: int, token: str, *, answer: Answer, attach: Attach, tls: Tls | None = None
    ) -> None:
        self.token, self.answer, self.attach, self.tls = token, answer, attach, tls
        self._strangers: dict[object, tuple[float, socket.socket]] = {}
        self._counting = threading.Condition()
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise StateError(f"the directory of state servers cannot listen on {host}:{port}: {error}") from error
        threading.Thread(target=self.serve_forever, name="gpu-join-directory", daemon=True).start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return cast("tuple[str, int]", self.server_address)[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begins to answer a call; until it has shown the token its time is limited."""
        # A second handle on the connection: encryption takes the first one away.
        with self._counting:
            while len(self._strangers) >= _STRANGERS:
                oldest, (deadline, _) = next(iter(self._strangers.items()))
                left = deadline - _REQUEST_S + _WAY_S - time.monotonic()
                if left > 0:
                    self._counting.wait(left)
                else:
                    self._end(oldest)
            self._strangers[client_address] = time.monotonic() + _REQUEST_S, request.dup()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answers a call; run in the call's own thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.known(client_address)

    def service_actions(self) -> None:
        """Ends the calls whose time is over; `serve_forever` comes by at least every half second."""
        now = time.monotonic()
        with self._counting:
            for caller in [c for c, (deadline, _) in self._strangers.items() if deadline < now]:
                self._end(caller)

    def known(self, client_address: Any) -> None:
        """A caller is no stranger any more: it has shown the token, or is gone."""
        with self._counting:
            _, connection = self._strangers.pop(client_address, (0.0, None))
            self._counting.notify()
        if connection is not None:
            connection.close()

    def _end(self, client_address: object) -> None:
        _, connection = self._strangers.pop(client_address)
        _log.warning("a call of %s without this application's token is ended", client_address)
        with connection, contextlib.suppress(OSError):  # it is gone
            connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says that a call broke off: by a stranger's doing, when connections are encrypted."""
        del request
        _log.warning("a call from %s broke off: %s", client_address[0], sys.exc_info()[1])

    def shutdown_request(self, request: Any) -> None:
        """Ends a connection; one that was encrypted has been taken out of this one."""
        if request.fileno() >= 0:
            super().shutdown_request(request)


class _Handler(socketserver.StreamRequestHandler):
    timeout = _REQUEST_S

    def setup(self) -> None:
        tls = cast("Listener", self.server).tls
        if tls is not None:
            self.request.settimeout(self.timeout)
            self.request = tls.accept(self.request)
        super().setup()

    def finish(self) -> None:
        super().finish()
        if isinstance(self.request, ssl.SSLSocket):
            self.request.close()

    def handle(self) -> None:
        listener = cast("Listener", self.server)
        try:
            request = json.loads(self.rfile.readline(_LONGEST_REQUEST))
            token = str(request["token"])
        except (OSError, ValueError, KeyError, TypeError):
            return
        if not hmac.compare_digest(token.encode(), listener.token.encode()):
            _log.warning("refused a call from %s without this application's token", self.client_address[0])
            return
        listener.known(self.client_address)
        if request.get("op") == "offer":
            listener.attach(Channel(self.connection), request)
            return
        try:
            answer = listener.answer(request)
        except GpuJoinError as error:
            answer = {"error": {"type": type(error).__name__, "message": str(error)}}
        except Exception as error:
            _log.exception("the directory failed")
            answer = {"error": {"type": type(error).__name__, "message": str(error)}}
        try:
            self.wfile.write(json.dumps(answer).encode() + b"\n")
        except OSError as error:
            _log.debug("a task went away: %s", error)
