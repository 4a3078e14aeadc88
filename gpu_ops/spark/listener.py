"""What listens for the directory: one line of JSON in, one out, to callers with the application's token."""

from __future__ import annotations

import hmac
import json
import logging
import socketserver
import ssl
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from gpu_ops.errors import GpuJoinError, StateError
from gpu_ops.spark.channel import Channel
from gpu_ops.spark.tls import Tls

_log = logging.getLogger(__name__)

_LONGEST_REQUEST: Final = 1 << 16

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
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise StateError(f"the directory of state servers cannot listen on {host}:{port}: {error}") from error
        threading.Thread(target=self.serve_forever, name="gpu-join-directory", daemon=True).start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return cast("tuple[str, int]", self.server_address)[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says that a call broke off: by a stranger's doing, when connections are encrypted."""
        del request
        _log.warning("a call from %s broke off: %s", client_address[0], sys.exc_info()[1])

    def shutdown_request(self, request: Any) -> None:
        """Ends a connection; one that was encrypted has been taken out of this one."""
        if request.fileno() >= 0:
            super().shutdown_request(request)


class _Handler(socketserver.StreamRequestHandler):
    timeout = 10

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
