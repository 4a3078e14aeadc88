"""How long a task waits for a state server: as long as that one lives, and its file system moves.

A call that was sent cannot tell whether its server thinks, or has been stopped, or its machine is gone: no byte comes
either way. A limit on the whole call would end a slow server that lives, and gRPC's own keepalive is of no use: a
server made by pyarrow closes connections that ask more than once in five minutes. So while a call waits, the server is
asked over a connection of its own what it does.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import pyarrow as pa

from gpu_ops.errors import GpuJoinError, StateError
from gpu_ops.spark.exchange.connection import Address
from gpu_ops.state.files import READING

_log = logging.getLogger(__name__)

FILES: Final = 10
"""So many times as long may a file take that does not move: what is written is made durable in one go at the end."""

_LEAST_ASKED: Final = 3
_TICK_S: Final = 1.0


class UnreachableError(Exception):
    """The state server is gone or the connection broke."""


class Watch:
    """Looks after one exchange, in a thread of its own; a context manager.

    Args:
        server: asked over connections other than the exchange's.
        call: the exchange's name.

    Attributes:
        cancel: ends the exchange's call; None while there is none.
        verdict: why it was ended: an `UnreachableError`, or a `StateError` where the file system does not answer.
    """

    def __init__(self, server: Address, call: str) -> None:
        self._server, self._call = server, call
        self._quiet_s = server.patience_s / 4
        self.cancel: Callable[[], object] | None = None
        self.verdict: Exception | None = None
        self._since: float | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-join-patience", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def begin(self) -> None:
        """A call begins that may wait for the server."""
        self._since = time.monotonic()

    def end(self) -> None:
        """It has ended."""
        self._since = None

    def _run(self) -> None:
        asked: _Asked | None = None
        pause = tick = min(_TICK_S, self._quiet_s)
        while not self._over.wait(pause):
            since, pause = self._since, tick
            if since is None or time.monotonic() - since < self._quiet_s:
                asked = None
                continue
            if asked is None or asked.since != since:
                asked = _Asked(since, self._server.location, self._server.patience_s)
            answer = self._ask()
            if answer is not None:
                pause = self._quiet_s
            verdict = asked.take(answer)
            if verdict is not None and self.cancel is not None and self._since == since:
                _log.warning("%s", verdict)
                self.verdict = verdict
                self.cancel()
                return

    def _ask(self) -> Mapping[str, Any] | None:
        """What the server reports of the exchange; None if it does not answer."""
        try:
            return self._server.call("ping", {"call": self._call}, timeout_s=self._quiet_s)
        except (pa.ArrowException, OSError, ValueError, GpuJoinError) as error:
            _log.debug("state server %s: %s", self._server.location, error)
            return None


class _Asked:
    """A server's reports, one after another, while one call waits for it.

    Args:
        since: when the call began, by `time.monotonic`.
        location: of the server.
        patience_s: how long it may give no sign of life.
    """

    def __init__(self, since: float, location: str, patience_s: float) -> None:
        self.since, self._location, self._patience_s = since, location, patience_s
        self._alive = self._known = since
        self._unanswered = 0
        self._next_word = patience_s

    def take(self, answer: Mapping[str, Any] | None) -> Exception | None:
        """Takes in an answer or that there was none; gives why the call is to end, or None while it may go on."""
        now, patience = time.monotonic(), self._patience_s
        waited = now - self.since
        if answer is None:
            self._unanswered += 1
            if self._unanswered == 1:
                _log.warning("state server %s does not answer; a call waits for %.0f s", self._location, waited)
            # This process may have been stopped itself: that time went by is not enough.
            if now - self._alive >= patience and self._unanswered >= _LEAST_ASKED:
                return UnreachableError(f"state server {self._location} gave no sign of life for {patience:.0f} s")
            return None
        self._alive, self._unanswered = now, 0
        call = answer.get("call")
        if call is not None and not (call["doing"] == READING and min(call["seconds"], waited) > patience):
            self._known = now
        if now - self._known > patience:
            return UnreachableError(
                f"state server {self._location} lives, and knows nothing of a call of {waited:.0f} s"
            )
        return self._look_at(call, waited) if call is not None else None

    def _look_at(self, call: Mapping[str, Any], waited: float) -> Exception | None:
        doing = call["doing"] if call["file"] is None else f"{call['doing']} {call['file']}"
        if call["file"] is not None and call["seconds"] > FILES * self._patience_s:
            return StateError(
                f"state server {self._location} has been {doing} for {call['seconds']:.0f} s, and nothing moves: "
                "the file system of this state folder does not answer"
            )
        if waited > self._next_word:
            self._next_word = 2 * waited
            _log.warning(
                "a call has waited %.0f s for state server %s, which lives and is %s; that has not moved for %.1f s",
                waited, self._location, doing, call["seconds"],
            )  # fmt: skip
        return None
