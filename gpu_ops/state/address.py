"""Where a state folder is: one identity however it is written, and a text that shows no secret."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from typing import Final, NoReturn, TypeAlias
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlsplit

from gpu_ops.errors import StateError

KINDS: Final = "A state folder is a local path or a file://, hdfs://, s3:// or gs:// URI; viewfs, gcs, abfs, abfss, too"

_SCHEMES: Final = frozenset({"file", "hdfs", "viewfs", "s3", "gs", "gcs", "abfs", "abfss"})
_SAME: Final = {"gcs": "gs", "abfss": "abfs"}
_CONTAINED: Final = ("abfs", "abfss")
"""Where what stands before the @ may be a container; others have the name of a user or key there."""
_INSTEAD: Final = {
    "s3a": "write s3:// instead",
    "s3n": "write s3:// instead",
    "dbfs": "write /dbfs/... instead, where Databricks mounts it",
    "wasb": "write abfs:// instead",
    "wasbs": "write abfss:// instead",
}
_HARMLESS: Final = frozenset(
    {"endpoint_override", "scheme", "region", "allow_bucket_creation", "allow_bucket_deletion", "replication",
     "buffer_size", "enable_tls", "tls_verify_certificates", "blob_storage_scheme", "dfs_storage_scheme"}
)  # fmt: skip
"""Options of URIs whose values may be shown."""

_WORD: Final = re.compile(r"([^/\\:]*):")

Location: TypeAlias = "str | os.PathLike[str] | StateAddress"
"""What ``state=`` takes."""


@dataclasses.dataclass(frozen=True, repr=False)
class StateAddress:
    """The location of a state folder. As text it shows neither credentials nor options; made by `of`.

    Attributes:
        secret_uri: the absolute path or the URI, credentials and all: to open it, and to tell a state server.
    """

    secret_uri: str

    @classmethod
    def of(cls, location: Location, *, seen_from: str | os.PathLike[str] | None = None) -> StateAddress:
        """The address that a user writes; relative paths become absolute ones, links stay.

        Args:
            location: a local path, ``~`` in it is understood; or a URI, ``file:/p`` as Hadoop writes it among them.
            seen_from: the folder that relative paths begin in, by default the working folder.

        Raises:
            StateError: it names no folder of a file system that is known here.
        """
        if isinstance(location, StateAddress):
            return location
        text = os.fspath(location) if isinstance(location, (str, os.PathLike)) else location
        if not isinstance(text, str):
            raise StateError(f"state={type(text).__name__} object; it is a path or a URI")
        if not text.strip() or "\0" in text or _undecodable(text):
            raise StateError(f"state= is empty, or no Unicode text without NUL: it names no folder. {KINDS}")
        word = _WORD.match(text)
        scheme = word[1].lower() if word is not None else ""
        rest = text[word.end() :] if word is not None else text
        if word is None or (scheme not in (*_SCHEMES, *_INSTEAD) and rest[:1] not in ("/", "\\")):
            return cls(_absolute(os.path.join(seen_from or "", os.path.expanduser(text))))
        if scheme in _INSTEAD or scheme not in _SCHEMES:
            local = f"for a local folder of that name write ./{word[1]}:..."
            _refuse(text, _INSTEAD.get(scheme, f"there is no file system {word[1]!r} here; {local}"))
        if not rest.startswith("/"):
            _refuse(text, f"write {scheme}:// and an absolute path")
        return cls(_file(text, rest) if scheme == "file" else _remote(text, scheme))

    @property
    def path(self) -> str | None:
        """The path of a local folder, None of any other."""
        if self.plain:
            return self.secret_uri
        return unquote(self.secret_uri.removeprefix("file://")) if self.secret_uri.startswith("file:") else None

    @property
    def plain(self) -> bool:
        """Tells whether the location is a path, not a URI."""
        return self.secret_uri.startswith("/")

    @property
    def identity(self) -> str:
        """One text for all spellings of a folder: links followed, credentials and default options left out."""
        path = self.path
        if path is not None:
            return f"file://{os.path.realpath(path)}"
        parts = urlsplit(self.secret_uri)
        scheme = _SAME.get(parts.scheme, parts.scheme)
        host = _host(parts).removesuffix(":8020" if scheme == "hdfs" else "")
        endpoint = dict(parse_qsl(parts.query)).get("endpoint_override", "").lower()
        endpoint = re.sub(r"^https?://|/+$", "", endpoint)
        return f"{scheme}://{host}{unquote(parts.path)}" + (f" at {endpoint}" if endpoint else "")

    def below(self, folder: str) -> StateAddress:
        """A folder in this one.

        Args:
            folder: its name.
        """
        uri, question, options = self.secret_uri.partition("?" if self.path is None else "\0")
        return StateAddress(f"{uri.rstrip('/')}/{folder}{question}{options}")

    def without_secrets(self, text: str) -> str:
        """A text of others, such as an error of the file system, without what this address has of secrets."""
        if self.path is not None:
            return text
        parts = urlsplit(self.secret_uri)
        user, _, password = parts.netloc.rpartition("@")[0].partition(":")
        secrets = [parts.netloc.rpartition("@")[0], password, *([] if parts.scheme in _CONTAINED else [user])]
        text = text.replace(self.secret_uri, str(self))
        options = [option.partition("=") for option in parts.query.split("&")]
        secrets += [value for name, _, value in options if name not in _HARMLESS]
        plain = [unquote(secret) for secret in secrets]
        for secret in sorted(
            {*secrets, *plain, *(quote(each, safe="") for each in plain)} - {""}, key=len, reverse=True
        ):
            text = text.replace(secret, "***")
        return text

    def __str__(self) -> str:
        if self.path is not None:
            return self.secret_uri
        parts = urlsplit(self.secret_uri)
        return f"{parts.scheme}://{_host(parts)}{parts.path}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"


def _host(parts: SplitResult) -> str:
    """The host of a URI, and the container of an Azure one, without credentials."""
    user, _, host = parts.netloc.rpartition("@")
    container = user.partition(":")[0] if parts.scheme in _CONTAINED else ""
    return f"{container}@{host}" if container else host


def _undecodable(text: str) -> bool:
    """Tells whether a file name has bytes that are no UTF-8 text."""
    return re.search("[\ud800-\udfff]", text) is not None


def _absolute(path: str) -> str:
    """A path from the root on, without superfluous parts.

    Raises:
        StateError: it is relative, and there is no working folder.
    """
    try:
        begin = "/" if path.startswith("/") else os.getcwd()
    except OSError as error:
        raise StateError(f"state='{path}' is relative, and the working folder is gone: {error}") from error
    parts = [part for part in os.path.join(begin, path).split("/") if part not in ("", ".")]
    whole = "/" + "/".join(parts)
    return os.path.realpath(whole) if ".." in parts else whole  # what .. is depends on links before it


def _file(text: str, rest: str) -> str:
    """A URI of a local folder from what stands behind ``file:``."""
    host, path = "", rest
    if rest.startswith("//"):
        host, slash, path = rest[2:].partition("/")
        path = slash + path
    if host not in ("", "localhost") or not path:
        _refuse(text, "file: is of this machine, and its path begins with a slash: write file:///... or a plain path")
    if "?" in path or "#" in path or "%00" in path:
        _refuse(text, "in a file: URI ? is written %3F and # is written %23; a plain path takes them as they are")
    return "file://" + quote(_absolute(unquote(path)))


def _remote(text: str, scheme: str) -> str:
    """A URI of a folder elsewhere, such that folders that are the same read the same as far as that can be."""
    parts = None
    with contextlib.suppress(ValueError):  # whose text has what is to be hidden
        parts = urlsplit(text)
    if parts is None:
        _refuse(text, "it is no URI")
    user, at, host = parts.netloc.rpartition("@")
    of_host = scheme in ("hdfs", "viewfs")
    if not host and not of_host:
        _refuse(text, f"write {scheme}://, the name of a bucket, a slash, and a path")
    _, colon, port = host.rpartition(":")
    if "#" in text or (colon and (scheme in ("s3", "gs", "gcs") or not port.isdecimal() or "@" in parts.path)):
        # Half of a secret would be taken for a host here, and shown.
        _refuse(text, "credentials in a URI have / written as %2F, + as %2B, # as %23, ? as %3F, : as %3A, @ as %40")
    segments = [part for part in parts.path.split("/") if part not in ("", ".")]
    if ".." in map(unquote, segments):
        _refuse(text, "a URI has no .. in its path")
    host = host.lower() if scheme in (*_CONTAINED, "hdfs", "viewfs") else host
    path = "".join(f"/{part}" for part in segments)
    return f"{scheme}://{user}{at}{host}{path or ('/' if of_host else '')}" + (f"?{parts.query}" if parts.query else "")


def _refuse(text: str, why: str) -> NoReturn:
    """Raises an error that shows nothing of a text that might be a secret, however it is written."""
    scheme, colon, rest = text.partition(":")
    body = rest.lstrip("/")
    head, at, tail = body.rpartition("@")
    whole = not (at and set("?#") & set(head)) and (at or ":" not in body)
    shown = re.split(r"[?#]", tail)[0] if whole else "***"
    raise StateError(f"state='{scheme}{colon}{rest[: len(rest) - len(body)]}{shown}' cannot be opened: {why}. {KINDS}")
