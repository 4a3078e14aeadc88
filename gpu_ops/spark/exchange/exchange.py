"""One exchange with a state server, repeated where the server is gone; and the directory that is asked."""

from __future__ import annotations

import contextlib
import functools
import json
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import pyarrow as pa
from pyarrow import flight

from gpu_ops import errors
from gpu_ops.spark.cluster.tls import Tls
from gpu_ops.spark.exchange.patience import DEFAULT_S, UnreachableError, Watch

_ATTEMPTS: Final = 6
_PAUSE_S: Final = 0.2


class Address(NamedTuple):
    """Where the directory listens, the application's token, and what encrypts connections.

    Attributes:
        host: of the directory.
        port: of the directory.
        token: what every call must bring.
        patience_s: how long its answer may take.
        tls: encrypts connections, if given.
        server_patience_s: how long a state server may give no sign of life, see `gpu_ops.spark.exchange.patience`.
    """

    host: str
    port: int
    token: str
    patience_s: float = 120.0
    tls: Tls | None = None
    server_patience_s: float = DEFAULT_S

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
    except TimeoutError as error:
        raise errors.StateError(
            f"the driver's directory of state servers has not answered for {address.patience_s:.0f} s: the driver is "
            "too busy, or the file system of the state folder hangs there"
        ) from error
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
    return _connected(location, tls)


def _connected(location: str, tls: Tls | None) -> flight.FlightClient:
    """A client with a connection of its own; gRPC would share one among all of a process to the same place."""
    own = [("grpc.use_local_subchannel_pool", 1)]
    return flight.FlightClient(location, generic_options=own, **(tls.flight_client if tls is not None else {}))


class Exchange:
    """One exchange that may be begun again: input is kept, output that was handed on is skipped.

    Args:
        locate: asks the directory; takes the location that failed, or None, gives location and token,
            under ``moment`` what is to be added to the command, and under ``tls`` a `Tls`.
        command: of the exchange.
        schema: of the input.
        patience_s: how long a server may give no sign of life.
    """

    def __init__(
        self,
        locate: Callable[[str | None], Mapping[str, Any]],
        command: Mapping[str, object],
        schema: pa.Schema,
        *,
        patience_s: float = DEFAULT_S,
    ) -> None:
        self._patience_s = patience_s
        self._locate, self._schema, self._command = locate, schema, dict(command)
        self._kept: list[pa.RecordBatch] = []
        self.retries = 0
        self.answer: dict[str, Any] = {}

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Sends the batches as they come, gives the reply's; `answer` has its metrics afterwards.

        Raises:
            GpuJoinError: the server's refusal.
            StateError: no server answers, or the file system of the state folder does not.
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
                _client.cache_clear()  # a connection may be dead, and its server not
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
        command = {**self._command, **where.get("moment", {}), "call": uuid.uuid4().hex}
        location, tls = where["location"], Tls(*where["tls"]) if where.get("tls") else None
        client = _client(location, tls)  # held for as long as the call lasts
        with Watch(location, lambda: _connected(location, tls), headers, command["call"], self._patience_s) as watch:
            with _guard(watch):
                options = flight.FlightCallOptions(headers=headers)
                descriptor = flight.FlightDescriptor.for_command(json.dumps(command).encode())
                writer, reader = client.do_exchange(descriptor, options)
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
        coming: Iterator[pa.RecordBatch],
    ) -> Iterator[pa.RecordBatch]:
        # Input comes from Spark: its own errors are none of the server's.
        broken: Exception | None = None
        try:
            with _guard(watch):
                writer.begin(self._schema)
            for batch in self._kept:
                with _guard(watch):
                    writer.write_batch(batch)
        except UnreachableError as error:
            broken = error
        for batch in coming if broken is None else ():
            self._kept.append(batch)
            try:
                with _guard(watch):
                    writer.write_batch(batch)
            except UnreachableError as error:
                broken = error
                break
        if broken is not None:
            # A server that refuses stops reading first; its reason comes on the other way.
            with _guard(watch):
                reader.read_chunk()
            raise broken
        with _guard(watch):
            # A stream that breaks off looks like a whole one to the server; the count tells.
            rows = sum(batch.num_rows for batch in self._kept)
            writer.write_metadata(json.dumps({"rows": rows}).encode())
            writer.done_writing()
        while True:
            with _guard(watch):
                try:
                    chunk = reader.read_chunk()
                except StopIteration:
                    return self._check_complete()
            if chunk.app_metadata is not None:
                self.answer = json.loads(chunk.app_metadata.to_pybytes())
            if chunk.data is not None:
                yield chunk.data

    def _check_complete(self) -> None:
        if not self.answer:
            raise UnreachableError("the reply ended before its last message")


class _guard:  # noqa: N801 - a context manager that reads like a function
    """Around a call that may wait for the server; turns Flight's errors into a refusal or `UnreachableError`."""

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
    with contextlib.suppress(pa.ArrowException, OSError):  # what it would say has been said
        writer.close()
