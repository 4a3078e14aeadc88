"""Connections within an application: Arrow Flight with the application's token and, on a cluster, TLS.

State servers, and the driver's directory that tasks and agents call, are `FlightServer`s. A call brings the token in
its ``authorization`` header. Actions take and give a JSON object; an error travels as JSON in the call's status.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import json
import logging
import os
import resource
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from pyarrow import flight

from gpu_ops import errors
from gpu_ops.errors import BadInputError, ConditionError, DescriptionError, GpuJoinError

_log = logging.getLogger(__name__)

DEFAULT_PATIENCE_S: Final = 60.0
"""Seconds without a sign of life after which a state server is given up."""

_LONGEST: Final = 3000  # gRPC carries an error twice, in headers of 8 KiB at most
_END_S: Final = 5.0
_TOLD: Final = 32
"""Number of calls without the token that are logged one by one; after that only each that doubles it."""
_DESCRIPTORS: Final = 1 << 17  # more than another machine has ports to connect from

Handler = Callable[[dict[str, Any], Callable[[], bool]], object]
"""Takes the request and a function that is true while the caller waits; returns a mapping or a dataclass."""


def as_json(value: object) -> str:
    """A value as JSON, with dataclasses in it as objects; `dataclasses.asdict` would copy all of it first."""
    return json.dumps(value, default=vars)


class Tls(NamedTuple):
    """Files in PEM, under the same paths on the driver and all executors, and the name in the certificates.

    Attributes:
        certificate: the chain of certificates that this machine presents.
        key: its private key, without a passphrase.
        authority: the certificate of the authority that signed those of all machines.
        name: the name that the certificates are for; None for each machine's own address.
    """

    certificate: str
    key: str
    authority: str
    name: str | None = None

    def check(self) -> None:
        """Checks that the files can be read on this machine.

        Raises:
            DescriptionError: they cannot be used.
        """
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, self.key)
            ssl.create_default_context(cafile=self.authority)
        except OSError as error:
            raise DescriptionError(
                f"spark.gpu_ops.tls.*: {self.certificate}, {self.key}, {self.authority}: {error}"
            ) from error


class Address(NamedTuple):
    """The location of a Flight server, and the token and options of calls to it.

    Attributes:
        location: as Flight writes it, ``grpc://host:port`` or ``grpc+tls://host:port``.
        token: the application's token.
        tls: the files for an encrypted connection, or None.
        timeout_s: how long an action may take.
        patience_s: in the directory's address: how long a state server may give no sign of life, see
            `gpu_ops.spark.wire.exchange`.
    """

    location: str
    token: str
    tls: Tls | None = None
    timeout_s: float = 10.0
    patience_s: float = DEFAULT_PATIENCE_S

    def connect(self) -> flight.FlightClient:
        """Opens a client with a connection of its own, straight to the server."""
        # gRPC would share a connection among all clients of a process, and go through an HTTP proxy of the environment.
        options: dict[str, Any] = {
            "generic_options": [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
        }
        if self.tls is not None:
            options["tls_root_certs"] = Path(self.tls.authority).read_bytes()
            if self.tls.name is not None:
                options["override_hostname"] = self.tls.name
        return flight.FlightClient(self.location, **options)

    def options(self, timeout_s: float | None = None) -> flight.FlightCallOptions:
        """The options of a call: the token, and how many seconds it may take (None: no limit)."""
        return flight.FlightCallOptions(
            timeout=timeout_s, headers=[(b"authorization", f"Bearer {self.token}".encode())]
        )

    def call(
        self,
        action: str,
        request: object = None,
        *,
        timeout_s: float | None = None,
        client: flight.FlightClient | None = None,
    ) -> dict[str, Any]:
        """Runs an action on the server and returns its answer.

        Args:
            action: the action's name.
            request: a mapping or a dataclass.
            timeout_s: instead of the address's.
            client: by default a connection is made for this call, so none can have gone stale.

        Raises:
            GpuJoinError: the server's own refusal.
            ArrowException, OSError: it did not answer, or refused the token.
        """
        with contextlib.ExitStack() as ending:
            used = client or ending.enter_context(self.connect())
            body = as_json(request or {}).encode()
            try:
                (answer,) = used.do_action(flight.Action(action, body), self.options(timeout_s or self.timeout_s))
            except flight.FlightError as error:
                refused = translate(error)
                if refused is None:
                    raise
                raise refused from None
            return dict(json.loads(answer.body.to_pybytes()))


def format_location(host: str, port: int, *, encrypted: bool = False) -> str:
    """A location as Flight writes it."""
    return f"grpc{'+tls' if encrypted else ''}://{f'[{host}]' if ':' in host else host}:{port}"


class FlightServer(flight.FlightServerBase):  # type: ignore[misc]
    """A server that answers calls with the right token, each in a thread of gRPC's.

    Args:
        token: the secret that every call must bring.
        host: the address to listen on.
        port: the port to listen on; 0 for any.
        certificate: files with the certificate chain and its key; without them connections are plain.
        actions: the actions by name.

    Raises:
        ArrowException: the address cannot be listened on.
    """

    def __init__(
        self,
        token: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        certificate: tuple[str, str] | None = None,
        actions: Mapping[str, Handler],
    ) -> None:
        self._actions = dict(actions)
        _raise_descriptor_limit()
        chain_and_key = None if certificate is None else [tuple(Path(file).read_bytes() for file in certificate)]
        if chain_and_key is not None:  # gRPC has a line for each handshake that fails, whoever has called
            os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        super().__init__(
            format_location(host, port, encrypted=chain_and_key is not None),
            middleware={"token": _TokenCheck(token)},
            tls_certificates=chain_and_key,
        )

    def do_action(self, context: flight.ServerCallContext, action: flight.Action) -> Iterator[bytes]:
        """Runs one of the actions with a JSON object, and returns its answer as JSON."""
        with self.errors_as_status(f"action {action.type!r}"):
            known = self._actions.get(action.type)
            if known is None:
                raise DescriptionError(f"no action {action.type!r}; there are {', '.join(sorted(self._actions))}")
            content = action.body.to_pybytes() if action.body is not None else b""
            try:
                request = dict(json.loads(content or b"{}"))
            except (ValueError, TypeError, RecursionError) as error:
                raise DescriptionError(f"action {action.type!r} takes a JSON object: {error}") from error
            answer = known(request, lambda: not context.is_cancelled())
        return iter([as_json(answer).encode()])

    @contextlib.contextmanager
    def errors_as_status(self, what: str) -> Iterator[None]:
        """Logs errors and encodes them as a status, which `translate` decodes."""
        try:
            yield
        except GpuJoinError as error:
            _log.warning("%s refused: %s: %s", what, type(error).__name__, error)
            raise flight.FlightServerError(encode_error(error)) from None
        except Exception as error:
            _log.exception("%s failed", what)
            raise flight.FlightInternalError(encode_error(error)) from None

    def end(self) -> None:
        """Stops listening, and waits a few seconds at most for calls in progress."""
        closing = threading.Thread(target=self.shutdown, daemon=True)
        try:
            closing.start()
        except RuntimeError:  # the interpreter ends, when Python 3.12 starts no thread any more; this ends with it
            return
        closing.join(_END_S)


def _raise_descriptor_limit() -> None:
    """Raises the limit of open files, for connections without a token: gRPC closes a silent one only after a minute."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    raised = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < raised:
        with contextlib.suppress(ValueError, OSError):  # the system has a limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))


class _TokenCheck(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Refuses every call without the application's token; of n such calls the log has about log2(n) lines."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()
        self._refused = itertools.count(1)

    def start_call(self, info: flight.CallInfo, headers: Mapping[str, list[str | bytes]]) -> None:
        tokens = [v for name, values in headers.items() if name.lower() == "authorization" for v in values]
        for value in tokens:
            if hmac.compare_digest(value if isinstance(value, bytes) else value.encode(), self._expected):
                return
        why = "a wrong" if tokens else "no"
        number = next(self._refused)
        if number <= _TOLD or number & (number - 1) == 0:
            _log.warning("refused a call of %s: it came with %s token (%d such calls so far)", info.method, why, number)
        raise flight.FlightUnauthenticatedError(f"this server was called with {why} token")


def encode_error(error: BaseException) -> str:
    """Encodes an error as JSON with ``type``, ``message`` and for a `BadInputError` its ``fields``."""
    kind = DescriptionError if isinstance(error, ConditionError) else type(error)
    if not isinstance(error, BadInputError):
        return json.dumps({"type": kind.__name__, "message": _cut(str(error), _LONGEST)})
    sample = None if error.sample is None else _cut(str(error.sample), _LONGEST // 4)
    fields = [error.input_name, error.column, _cut(error.problem, _LONGEST // 2), sample]
    return json.dumps({"type": kind.__name__, "message": _cut(str(error), _LONGEST // 4), "fields": fields})


def _cut(text: str, most: int) -> str:
    """The beginning of a text, such that it takes about ``most`` bytes as ASCII JSON."""
    if len(json.dumps(text)) <= most:
        return text
    return text[: most if text.isascii() else most // 12] + " ..."


def translate(error: BaseException) -> GpuJoinError | None:
    """Decodes our own error from a Flight error's text; None if it has none, or only says that the stream broke off."""
    text = str(error)
    start = text.find('{"type"')
    if start < 0:
        return None
    try:
        content, _ = json.JSONDecoder().raw_decode(text, start)
    except ValueError:
        return None
    return None if content.get("type") == "AbandonedError" else _refusal(content)


def _refusal(content: Mapping[str, Any]) -> GpuJoinError:
    """Makes the error that ``{"type": ..., "message": ...}`` describes."""
    fields = content.get("fields")
    if content.get("type") == "BadInputError" and isinstance(fields, list) and len(fields) == 4:
        return BadInputError(*fields)
    kind = getattr(errors, str(content.get("type")), None)
    known = isinstance(kind, type) and issubclass(kind, GpuJoinError)
    cls = kind if known and kind is not None else GpuJoinError
    message = str(content.get("message")) if known else f"{content.get('type')}: {content.get('message')}"
    error: GpuJoinError = cls.__new__(cls)
    Exception.__init__(error, message)  # the classes' own constructors compose a message that is here already
    return error
