"""A schema registry with Confluent's interface, as far as readers and writers of messages ask it."""

from __future__ import annotations

import http.server
import json
import ssl
import threading
from collections.abc import Sequence
from typing import Any, Self


class FakeRegistry:
    """One on a local port.

    Args:
        tls: how it speaks TLS; None for not at all.

    Attributes:
        answers: by path what it says; None for an error of its own, which it cannot help.
        authorization: what the header has to say; None for nothing.
        busy: how many of the next requests it cannot serve.
        asked: paths, in their order.
    """

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.answers: dict[str, Any] = {}
        self.authorization: str | None = None
        self.busy = 0
        self.asked: list[str] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._say(*outer._answer(self.path.partition("?")[0], self.headers["Authorization"]))

            def do_POST(self) -> None:
                """A writer's schema: `confluent_kafka` asks for its number."""
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self._say(200, {"id": outer.add(json.loads(body["schema"]), body.get("references") or ()), **body})

            def _say(self, code: int, body: Any) -> None:
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("localhost", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.url = f"http{'' if tls is None else 's'}://localhost:{self._server.server_port}"

    def add(self, schema: Any, references: Sequence[Any] = (), subject: str | None = None) -> int:
        """Registers a schema, and gives its number."""
        answer = {"schema": json.dumps(schema)} | ({"references": list(references)} if references else {})
        known = (path for path, other in self.answers.items() if other == answer and path.startswith("/schemas"))
        number = int(next(known, f"/{len(self.answers) + 1}").rpartition("/")[2])
        self.answers[f"/schemas/ids/{number}"] = answer
        if subject is not None:
            self.answers[f"/subjects/{subject}/versions/1"] = {"id": number, "version": 1, "subject": subject, **answer}
        return number

    def _answer(self, path: str, authorization: str | None) -> tuple[int, Any]:
        self.asked.append(path)
        if authorization != self.authorization:
            return 401, {"error_code": 401, "message": "Unauthorized"}
        if self.busy:
            self.busy -= 1
            return 503, {}
        if path not in self.answers:
            return 404, {"error_code": 40403, "message": "Schema not found"}
        answer = self.answers[path]
        return (500, {}) if answer is None else (200, answer)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
