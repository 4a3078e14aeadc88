"""One exchange with a state server, repeated where the server is gone; and the directory that is asked."""

from __future__ import annotations

import contextlib
import functools
import json
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import pyarrow as pa
from pyarrow import flight

from gpu_ops import errors
from gpu_ops.spark.exchange.connection import Address, translate
from gpu_ops.spark.exchange.patience import UnreachableError, Watch

_ATTEMPTS: Final = 6
_PAUSE_S: Final = 0.2
_KEPT_S: Final = 30.0
"""A connection that was silent for longer may be dead, and a call over it would wait in vain: there is a new one."""

_directories: dict[Address, tuple[float, flight.FlightClient]] = {}
"""By directory when it was asked last, and over which connection: to make one takes five times as long as to ask."""


def ask(directory: Address, action: str, request: Mapping[str, object]) -> dict[str, Any]:
    """Asks the directory.

    Raises:
        GpuJoinError: the directory's own refusal.
        StateError: there is no directory; the driver is gone.
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


def _ask(directory: Address, action: str, request: Mapping[str, object]) -> dict[str, Any]:
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


@functools.lru_cache(maxsize=32)
def _client(server: Address) -> flight.FlightClient:
    # Spark uses a worker process again for many tasks; so is its connection.
    return server.connect()


class Exchange:
    """One exchange that may be begun again: input is kept, output that was handed on is skipped.

    Args:
        locate: asks the directory; takes the location that failed, or None, gives the server's address and what is to
            be added to the command.
        command: of the exchange.
        schema: of the input.
    """

    def __init__(
        self,
        locate: Callable[[str | None], tuple[Address, Mapping[str, Any]]],
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
            StateError: no server answers, or the file system of the state folder does not.
        """
        coming, given, failed = iter(batches), 0, None
        while True:
            server, moment = self._locate(failed)
            try:
                skip = given
                for batch in self._once(server, {**self._command, **moment}, coming):
                    rows = batch.slice(skip) if skip < batch.num_rows else None
                    skip = max(0, skip - batch.num_rows)
                    if rows is not None and rows.num_rows:
                        given += rows.num_rows
                        yield rows
            except UnreachableError as error:
                failed = server.location
                _client.cache_clear()  # a connection may be dead, and its server not
                self.retries += 1
                if self.retries >= _ATTEMPTS:
                    raise errors.StateError(
                        f"state server {failed} was asked {_ATTEMPTS} times and never answered: {error}"
                    ) from error
                time.sleep(_PAUSE_S * (self.retries - 1))
            else:
                return

    def _once(
        self, server: Address, command: Mapping[str, Any], coming: Iterator[pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        call = uuid.uuid4().hex
        client = _client(server)  # held for as long as the call lasts
        with Watch(server, call) as watch:
            with _guard(watch):
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
        coming: Iterator[pa.RecordBatch],
    ) -> Iterator[pa.RecordBatch]:
        # Input comes from Spark: its own errors are none of the server's.
        try:
            with _guard(watch):
                writer.begin(self._schema)
            for batch in self._all(coming):
                with _guard(watch):
                    writer.write_batch(batch)
        except UnreachableError:
            # A server that refuses stops reading first; its reason comes on the other way.
            with _guard(watch):
                reader.read_chunk()
            raise
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
                    if self.answer:
                        return
                    raise UnreachableError("the reply ended before its last message") from None
            if chunk.app_metadata is not None:
                self.answer = json.loads(chunk.app_metadata.to_pybytes())
            if chunk.data is not None:
                yield chunk.data

    def _all(self, coming: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """What was sent to a server before, then what comes, which is kept for the next one."""
        yield from tuple(self._kept)
        for batch in coming:
            self._kept.append(batch)
            yield batch


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
    with contextlib.suppress(pa.ArrowException, OSError):  # an error at the end has been reported already
        writer.close()
