"""One exchange with a state server, repeated where the server is gone; and the directory that is asked."""

from __future__ import annotations

import contextlib
import functools
import json
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import pyarrow as pa
from pyarrow import flight

from gpu_ops import errors
from gpu_ops.spark.tls import Tls

_ATTEMPTS: Final = 6
_PAUSE_S: Final = 0.2


class Address(NamedTuple):
    """Where the directory listens, the application's token, how long an answer may take, and what encrypts it."""

    host: str
    port: int
    token: str
    patience_s: float = 120.0
    tls: Tls | None = None

    def connect(self) -> socket.socket:
        """A connection to it.

        Raises:
            OSError: there is none.
        """
        connection = socket.create_connection((self.host, self.port), timeout=self.patience_s)
        if self.tls is None:
            return connection
        try:
            return self.tls.connect(connection, self.host)
        except BaseException:
            connection.close()
            raise


class UnreachableError(Exception):
    """The state server is gone or the connection broke."""


def ask(address: Address, request: Mapping[str, object]) -> dict[str, Any]:
    """Asks the directory: one line of JSON there, one back.

    Raises:
        GpuJoinError: the directory's own refusal.
        StateError: there is no directory; the driver is gone.
    """
    line = json.dumps({**request, "token": address.token}).encode() + b"\n"
    try:
        with address.connect() as connection:
            connection.sendall(line)
            with connection.makefile("rb") as reader:
                answer = json.loads(reader.readline() or b"{}")
    except OSError as error:
        raise errors.StateError(f"the driver's directory of state servers does not answer: {error}") from error
    if "error" in answer:
        raise refusal(answer["error"])
    if not answer:
        raise errors.StateError("the directory of state servers in the driver refused the call")
    return dict(answer)


def refusal(content: Mapping[str, Any]) -> errors.GpuJoinError:
    """The error class a server's ``{"type": ..., "message": ...}`` names, with its message."""
    fields = content.get("fields")
    if content.get("type") == "BadInputError" and isinstance(fields, list) and len(fields) == 4:
        return errors.BadInputError(*fields)
    kind = getattr(errors, str(content.get("type")), None)
    known = isinstance(kind, type) and issubclass(kind, errors.GpuJoinError)
    cls = kind if known and kind is not None else errors.GpuJoinError
    message = str(content.get("message")) if known else f"{content.get('type')}: {content.get('message')}"
    error: errors.GpuJoinError = cls.__new__(cls)
    Exception.__init__(error, message)  # the classes' own constructors compose a message that is here already
    return error


def translate(error: BaseException) -> errors.GpuJoinError | None:
    """The refusal in a Flight error's text; None when there is none, or only that the stream broke off."""
    text = str(error)
    start = text.find('{"type"')
    if start < 0:
        return None
    try:
        content, _ = json.JSONDecoder().raw_decode(text, start)
    except ValueError:
        return None
    return None if content.get("type") == "AbandonedError" else refusal(content)


@functools.lru_cache(maxsize=32)
def _client(location: str, tls: Tls | None) -> flight.FlightClient:
    # Spark uses a worker process again for many tasks; so is its connection.
    return flight.FlightClient(location, **(tls.flight_client if tls is not None else {}))


class Exchange:
    """One exchange that may be begun again: input is kept, output that was handed on is skipped.

    Args:
        locate: asks the directory; takes the location that failed, or None, gives location and token,
            under ``moment`` what is to be added to the command, and under ``tls`` a `Tls`.
        command: of the exchange.
        schema: of the input.
    """

    def __init__(
        self,
        locate: Callable[[str | None], Mapping[str, Any]],
        command: Mapping[str, object],
        schema: pa.Schema,
    ) -> None:
        self._locate, self._schema, self._command = locate, schema, dict(command)
        self._kept: list[pa.RecordBatch] = []
        self.retries = 0
        self.answer: dict[str, Any] = {}

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Sends the batches as they come, gives the reply's; `answer` has its metrics afterwards.

        Raises:
            GpuJoinError: the server's refusal.
            StateError: no server answers.
        """
        coming, given, failed = iter(batches), 0, None
        while True:
            where = self._locate(failed)
            try:
                skip = given
                for batch in self._once(where, coming):
                    rows = batch.slice(skip) if skip < batch.num_rows else None
                    skip = max(0, skip - batch.num_rows)
                    if rows is not None and rows.num_rows:
                        given += rows.num_rows
                        yield rows
            except UnreachableError as error:
                failed = where["location"]
                self.retries += 1
                if self.retries >= _ATTEMPTS:
                    raise errors.StateError(
                        f"state server {failed} was asked {_ATTEMPTS} times and never answered: {error}"
                    ) from error
                time.sleep(_PAUSE_S * (self.retries - 1))
            else:
                return

    def _once(self, where: Mapping[str, Any], coming: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        headers = [(b"authorization", f"Bearer {where['token']}".encode())]
        command = {**self._command, **where.get("moment", {})}
        with _guard():
            options = flight.FlightCallOptions(headers=headers)
            descriptor = flight.FlightDescriptor.for_command(json.dumps(command).encode())
            tls = Tls(*where["tls"]) if where.get("tls") else None
            writer, reader = _client(where["location"], tls).do_exchange(descriptor, options)
        # Input comes from Spark: its own errors are none of the server's.
        broken: Exception | None = None
        try:
            with _guard():
                writer.begin(self._schema)
                for batch in self._kept:
                    writer.write_batch(batch)
        except UnreachableError as error:
            broken = error
        for batch in coming if broken is None else ():
            self._kept.append(batch)
            try:
                with _guard():
                    writer.write_batch(batch)
            except UnreachableError as error:
                broken = error
                break
        try:
            if broken is not None:
                # A server that refuses stops reading first; its reason comes on the other way.
                with _guard():
                    reader.read_chunk()
                raise broken
            with _guard():
                # A stream that breaks off looks like a whole one to the server; the count tells.
                rows = sum(batch.num_rows for batch in self._kept)
                writer.write_metadata(json.dumps({"rows": rows}).encode())
                writer.done_writing()
            while True:
                with _guard():
                    try:
                        chunk = reader.read_chunk()
                    except StopIteration:
                        return self._check_complete()
                if chunk.app_metadata is not None:
                    self.answer = json.loads(chunk.app_metadata.to_pybytes())
                if chunk.data is not None:
                    yield chunk.data
        finally:
            _close(writer)

    def _check_complete(self) -> None:
        if not self.answer:
            raise UnreachableError("the reply ended before its last message")


class _guard:  # noqa: N801 - a context manager that reads like a function
    """Turns Flight's errors into a refusal or `UnreachableError`."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
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
    with contextlib.suppress(pa.ArrowException, OSError):  # what it would say has been said
        writer.close()
