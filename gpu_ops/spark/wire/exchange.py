"""An exchange of a micro-batch with a state server, repeated where the server is gone, and calls to the directory."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import pyarrow as pa
from pyarrow import flight

from gpu_ops import errors
from gpu_ops.descriptions.changelog import readable_changes
from gpu_ops.errors import GpuJoinError, StateError
from gpu_ops.spark.wire.connection import Address, translate
from gpu_ops.state.blocks import FilePart, take
from gpu_ops.state.files import READING

_ATTEMPTS: Final = 6
_PAUSE_S: Final = 0.2
_KEPT_S: Final = 30.0
"""A connection that was silent for longer may be dead, and a call over it would wait in vain: it is replaced."""

_directories: dict[Address, tuple[float, flight.FlightClient]] = {}
"""For each directory the time of the last call and its connection: opening one takes five times as long as a call."""


def ask(directory: Address, action: str, request: object) -> dict[str, Any]:
    """Calls an action of the driver's directory, over a connection that is kept for the next call.

    Raises:
        GpuJoinError: the directory's own refusal.
        StateError: the directory does not answer; the driver is gone.
    """
    try:
        return _ask(directory, action, request)
    except flight.FlightUnauthenticatedError as error:
        raise errors.StateError(f"the directory of state servers in the driver refused the call: {error}") from error
    except flight.FlightTimedOutError as error:
        raise errors.StateError(
            f"the driver's directory of state servers has not answered for {directory.timeout_s:.0f} s: the driver is "
            "too busy, or the file system of the state folder hangs there"
        ) from error
    except (pa.ArrowException, OSError) as error:
        raise errors.StateError(f"the driver's directory of state servers does not answer: {error}") from error


def _ask(directory: Address, action: str, request: object) -> dict[str, Any]:
    at, client = _directories.pop(directory, (0.0, None))
    if client is not None and time.monotonic() - at < _KEPT_S:
        try:
            answer = directory.call(action, request, client=client)
        except flight.FlightUnavailableError:
            pass  # the connection is gone; whether the directory is, a new one tells
        else:
            _directories[directory] = time.monotonic(), client
            return answer
    client = directory.connect()
    answer = directory.call(action, request, client=client)
    _directories[directory] = time.monotonic(), client
    return answer


_servers: dict[Address, tuple[float, flight.FlightClient]] = {}
"""For each state server the time when a call last began and its connection: Spark uses a worker again, for many tasks.

Those of servers that are gone have to go as well: each has threads of its own.
"""


def _client(server: Address) -> flight.FlightClient:
    """The connection to a state server; others that have been silent for long are given up."""
    now = time.monotonic()
    for known, (at, _) in list(_servers.items()):
        if now - at > _KEPT_S:
            _servers.pop(known, None)  # a call that lasts has it still
    _, client = _servers.get(server, (now, None))
    client = client or server.connect()
    _servers[server] = now, client
    return client


class Exchange:
    """One exchange that can be repeated with another server: input is kept, output already handed on is skipped.

    Args:
        locate: asks the directory; takes the location that failed, or None, and returns the server's address and what
            is to be added to the command.
        command: the command of the exchange.
        schema: the schema of the input.
    """

    def __init__(
        self,
        locate: Callable[[str | None], tuple[Address, Mapping[str, Any]]],
        command: Mapping[str, object],
        schema: pa.Schema,
    ) -> None:
        self._locate, self._schema, self._command = locate, schema, dict(command)
        self._kept: list[pa.RecordBatch | FilePart] = []
        self.retries = 0
        self.answer: dict[str, Any] = {}

    def run(self, batches: Iterable[pa.RecordBatch | FilePart]) -> Iterator[pa.RecordBatch]:
        """Sends batches, or the places where they lie, and yields the reply's; `answer` has the metrics afterwards.

        Row kinds, which come as bytes, are text from here on.

        Raises:
            GpuJoinError: the server's refusal.
            StateError: no server answers, or the file system of the state folder does not.
        """
        coming, rows_handed_on, failed = iter(batches), 0, None
        while True:
            server, moment = self._locate(failed)
            try:
                skip = rows_handed_on
                for batch in self._once(server, {**self._command, **moment}, coming):
                    rows = batch.slice(skip) if skip < batch.num_rows else None
                    skip = max(0, skip - batch.num_rows)
                    if rows is not None and rows.num_rows:
                        rows_handed_on += rows.num_rows
                        yield readable_changes(rows)
            except UnreachableError as error:
                failed = server.location
                _servers.clear()  # a connection may be dead, and its server not
                self.retries += 1
                if self.retries >= _ATTEMPTS:
                    raise errors.StateError(
                        f"state server {failed} was asked {_ATTEMPTS} times and never answered: {error}"
                    ) from error
                time.sleep(_PAUSE_S * (self.retries - 1))
            else:
                return

    def _once(
        self, server: Address, command: Mapping[str, Any], coming: Iterator[pa.RecordBatch | FilePart]
    ) -> Iterator[pa.RecordBatch]:
        call = uuid.uuid4().hex
        client = _client(server)  # held for as long as the call lasts
        with Watch(server, call) as watch:
            with _Guard(watch):
                descriptor = flight.FlightDescriptor.for_command(json.dumps({**command, "call": call}).encode())
                writer, reader = client.do_exchange(descriptor, server.options())
                watch.cancel = reader.cancel
            try:
                yield from self._talk(writer, reader, watch, coming)
            finally:
                watch.begin()
                _close(writer)

    def _talk(
        self,
        writer: flight.FlightStreamWriter,
        reader: flight.FlightStreamReader,
        watch: Watch,
        coming: Iterator[pa.RecordBatch | FilePart],
    ) -> Iterator[pa.RecordBatch]:
        self.answer = {}
        # Input comes from Spark: its own errors are none of the server's.
        try:
            with _Guard(watch):
                writer.begin(self._schema)
            for batch in self._all(coming):
                with _Guard(watch):
                    if isinstance(batch, FilePart):
                        writer.write_metadata(json.dumps({"part": batch}).encode())
                    else:
                        writer.write_batch(batch)
        except UnreachableError:
            # A server that refuses stops reading first; its reason comes on the other way.
            with _Guard(watch):
                reader.read_chunk()
            raise
        with _Guard(watch):
            # A stream that breaks off looks like a whole one to the server; the count tells.
            rows = sum(x.block.rows if isinstance(x, FilePart) else x.num_rows for x in self._kept)
            writer.write_metadata(json.dumps({"rows": rows}).encode())
            writer.done_writing()
        while True:
            with _Guard(watch):
                try:
                    chunk = reader.read_chunk()
                except StopIteration:
                    if self.answer:
                        break
                    raise UnreachableError("the reply ended before its last message") from None
            if chunk.app_metadata is not None:
                self.answer = json.loads(chunk.app_metadata.to_pybytes())
            if chunk.data is not None:
                yield chunk.data
        if "left" in self.answer:
            try:
                batches = take(self.answer["left"])
            except (pa.ArrowException, OSError) as error:
                raise UnreachableError(f"the answer that the server has left is gone: {error}") from error
            yield from batches

    def _all(self, coming: Iterator[pa.RecordBatch | FilePart]) -> Iterator[pa.RecordBatch | FilePart]:
        """Yields the batches that an earlier server was sent, then new ones, which are kept for a later server."""
        yield from tuple(self._kept)
        for batch in coming:
            self._kept.append(batch)
            yield batch


class _Guard:
    """Context manager around a call that may wait for the server; translates Flight's errors into ours."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def __enter__(self) -> None:
        self._watch.begin()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._watch.end()
        if isinstance(error, (pa.ArrowException, OSError)) and self._watch.verdict is not None:
            raise self._watch.verdict from None
        if error is None or isinstance(error, (StopIteration, UnreachableError, errors.GpuJoinError)):
            return
        if isinstance(error, flight.FlightUnauthenticatedError):
            raise errors.StateError(f"the state server refused this application's token: {error}") from error
        if isinstance(error, (pa.ArrowException, OSError)):
            refused = translate(error)
            if refused is not None:
                raise refused from None
            raise UnreachableError(f"{type(error).__name__}: {error}") from error


def _close(writer: flight.FlightStreamWriter) -> None:
    with contextlib.suppress(pa.ArrowException, OSError):  # an error at the end has been reported already
        writer.close()


_log = logging.getLogger(__name__)

FILES: Final = 10
"""Factor by which a file operation may exceed the patience: all that is written is made durable at its end."""

_LEAST_ASKED: Final = 3
_TICK_S: Final = 1.0


class UnreachableError(Exception):
    """Raised where the state server is gone or the connection broke."""


class Watch:
    """Context manager that watches one exchange, and ends it when the server is dead.

    One thread of the process looks at all of them; one that waits for long gets a thread, which asks its server.

    Args:
        server: the server, asked over connections other than the exchange's.
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
        self._asks = False

    def __enter__(self) -> Watch:
        with _starting:
            if not any(thread.is_alive() for thread in _looking):  # it is the first, or this process was forked
                _looking[:] = [threading.Thread(target=_look, name="gpu-join-watch", daemon=True)]
                _looking[0].start()
        _watches[self] = None
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        del _watches[self]

    @property
    def tick(self) -> float:
        """The number of seconds between two looks at the exchange."""
        return min(_TICK_S, self._quiet_s)

    def look(self) -> None:
        """Begins to ask the server if the exchange has waited for long."""
        since = self._since
        if since is not None and time.monotonic() - since >= self._quiet_s and not self._asks:
            self._asks = True
            threading.Thread(target=self._run, name="gpu-join-patience", daemon=True).start()

    def begin(self) -> None:
        """Notes that a call begins that may wait for the server."""
        self._since = time.monotonic()

    def end(self) -> None:
        """Notes that the call has ended."""
        self._since = None

    def _run(self) -> None:
        asked: _Asked | None = None
        pause = 0.0
        while not self._over.wait(pause):
            since, pause = self._since, self.tick
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
        """Asks the server about the exchange; None if it does not answer."""
        try:
            return self._server.call("ping", {"call": self._call}, timeout_s=self._quiet_s)
        except (pa.ArrowException, OSError, ValueError, GpuJoinError) as error:
            _log.debug("state server %s: %s", self._server.location, error)
            return None


_watches: Final[dict[Watch, None]] = {}
"""The exchanges of this process that last."""

_looking: Final[list[threading.Thread]] = []
"""The thread that looks at them: to start one for each takes a sixth of an exchange's time."""

_starting: Final = threading.Lock()


def _look() -> None:
    while True:
        time.sleep(min((watch.tick for watch in list(_watches)), default=_TICK_S))
        for watch in list(_watches):
            watch.look()


class _Asked:
    """The reports of a server while one call waits for it, and the verdict on them.

    Args:
        since: when the call began, by `time.monotonic`.
        location: the server's location.
        patience_s: how long it may give no sign of life.
    """

    def __init__(self, since: float, location: str, patience_s: float) -> None:
        self.since, self._location, self._patience_s = since, location, patience_s
        self._alive = self._known = since
        self._unanswered = 0
        self._next_word = patience_s

    def take(self, answer: Mapping[str, Any] | None) -> Exception | None:
        """Records an answer, or that none came; returns the reason to end the call, or None while it may go on."""
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
