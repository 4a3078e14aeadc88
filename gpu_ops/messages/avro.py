"""Messages in Avro, one by one as fastavro reads them; their schemas from Confluent's registry, or one for all.

The wire format of a registry's messages is a zero byte, the schema's number in four bytes (big-endian), and the value.
fastavro is given schemas without their logical types: it has numbers and bytes then, which become values of the
declared types as those of JSON do, all at once, and with digits that Python's times do not have.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import http.client
import io
import json
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gpu_ops.errors import BackendError, DescriptionError, optional_module
from gpu_ops.messages.encodings import CONNECT_DECIMAL, ValueSchema, scale_of

_HEADER: Final = 5
_SECONDS: Final = 30
_TRIES: Final = 4
_PAUSE_S: Final = 0.5
_NOT_FOUND: Final = 404
_REFUSED: Final = (401, 403)
_BUSY: Final = (408, 429)

_PROPERTIES: Final = (
    "url", "basic.auth.user.info", "bearer.auth.token",
    "ssl.ca.location", "ssl.certificate.location", "ssl.key.location", "ssl.key.password",
)  # fmt: skip

_MEANING: Final = "meaning"
"""What logical types are called where fastavro is not to see them."""

_KINDS_OF: Final = {
    "decimal": ("bytes", "fixed"), "big-decimal": ("bytes",), "uuid": ("string", "fixed"), "duration": ("fixed",),
    "date": ("int",), "time-millis": ("int",), "time-micros": ("long",),
    "timestamp-millis": ("long",), "timestamp-micros": ("long",), "timestamp-nanos": ("long",),
    "local-timestamp-millis": ("long",), "local-timestamp-micros": ("long",), "local-timestamp-nanos": ("long",),
}  # fmt: skip
"""By logical type, what it may stand at; elsewhere it says nothing, as Avro has it."""

_NAMELESS: Final = ("null", "boolean", "int", "long", "float", "double", "bytes", "string", "array", "map")
_SIZES: Final = {"uuid": 16, "duration": 12}

_NOTHING: Final = "gpu-ops-nothing"
"""A logical type of ours, of values that take no bytes: `_one_more` counts them."""

_MOST_OF_NOTHING: Final = 1000
"""So many of them a message may have, and besides as many as it has bytes: an array of 2 ** 36 takes nine."""

_left = threading.local()
_SAFE: Final = 1000
"""Bytes within which no nesting is too deep for fastavro's compiled reader, which would end the process."""


@dataclasses.dataclass(frozen=True)
class SchemaRegistry:
    """A schema registry with Confluent's interface, and what it asks of its readers, which nothing shows.

    Attributes:
        url: its address.
        properties: by their names in Confluent's own clients: ``basic.auth.user.info`` (``user:password``),
            ``bearer.auth.token``, and for TLS ``ssl.ca.location``, ``ssl.certificate.location``, ``ssl.key.location``
            and ``ssl.key.password``. Files are those of the tasks.
    """

    url: str
    properties: tuple[tuple[str, str], ...] = dataclasses.field(default=(), repr=False)

    @classmethod
    def of(cls, given: str | Mapping[str, str]) -> SchemaRegistry:
        """A registry by its address, or by properties with its ``url``; either may have ``user:password@``.

        Raises:
            DescriptionError: no address, or no such property.
        """
        properties = {"url": given} if isinstance(given, str) else dict(given)
        other = next((name for name in properties if name not in _PROPERTIES), None)
        if other is not None:
            raise DescriptionError(f"schema_registry has no property {other!r}; there are {', '.join(_PROPERTIES)}")
        parts = urllib.parse.urlsplit(str(properties.pop("url", "")))
        user, _, host = parts.netloc.rpartition("@")
        url = parts._replace(netloc=host).geturl()
        if parts.scheme not in ("http", "https") or not parts.hostname:
            shown = "" if "@" in url else f"={url!r}"
            raise DescriptionError(f"schema_registry{shown} is no address such as http://registry:8081")
        if user:
            properties.setdefault("basic.auth.user.info", urllib.parse.unquote(user))
        if {"basic.auth.user.info", "bearer.auth.token"} <= properties.keys():
            raise DescriptionError("schema_registry has a user and a token; it takes one of them")
        wrong = next((name for name, value in properties.items() if not value.isprintable()), None)
        if wrong is not None:  # errors of the HTTP client would show it
            raise DescriptionError(f"schema_registry has a {wrong} with a line break or the like")
        return cls(url.rstrip("/"), tuple(sorted(properties.items())))

    def get(self, path: str) -> Any:
        """Asks the registry; asked again where it is busy or cannot be reached.

        Raises:
            NoSchemaError: it does not know that.
            BackendError: it cannot be asked.
        """
        url, given = f"{self.url}/{path}", dict(self.properties)
        request = urllib.request.Request(url, headers={"Accept": "application/json"})  # noqa: S310 - `of` has seen it
        if "basic.auth.user.info" in given:
            user = base64.b64encode(given["basic.auth.user.info"].encode()).decode()
            request.add_unredirected_header("Authorization", f"Basic {user}")  # nobody else is told
        if "bearer.auth.token" in given:
            request.add_unredirected_header("Authorization", f"Bearer {given['bearer.auth.token']}")
        for tried in range(_TRIES):
            if tried:
                time.sleep(_PAUSE_S * 2 ** (tried - 1))
            try:
                with urllib.request.urlopen(request, timeout=_SECONDS, context=self._tls()) as answer:  # noqa: S310
                    return json.load(answer)
            except urllib.error.HTTPError as error:
                if error.code == _NOT_FOUND:
                    raise NoSchemaError(f"which the schema registry does not know: {url}") from None
                problem, again = str(error), error.code in _BUSY or error.code >= 500
                if error.code in _REFUSED:
                    problem += ": schema_registry= takes basic.auth.user.info or bearer.auth.token beside the url"
            except (OSError, http.client.HTTPException) as error:
                problem, again = str(error), True
            except ValueError as error:
                problem, again = str(error), False
            if not again:
                break
        raise BackendError(f"the schema registry gives no schema: {url}: {problem}")

    def _tls(self) -> ssl.SSLContext | None:
        given = dict(self.properties)
        if not self.url.startswith("https:"):
            return None
        context = ssl.create_default_context(cafile=given.get("ssl.ca.location"))
        if "ssl.certificate.location" in given:
            context.load_cert_chain(
                given["ssl.certificate.location"], given.get("ssl.key.location"), given.get("ssl.key.password", "")
            )
        return context


class Schema(NamedTuple):
    """A schema as fastavro has parsed it, with `_MEANING` in place of logical types.

    Attributes:
        parsed: the schema.
        named: its named types.
        nests: whether one of them holds itself.
        field: where it is a union or a name: that of the record it was put into, which is written alike; else None.
    """

    parsed: Any
    named: Mapping[str, Any]
    nests: bool
    field: str | None = None

    @property
    def message(self) -> Any:
        """The part of the schema that a message has."""
        return self.parsed if self.field is None else self.parsed["fields"][0]["type"]

    def look(self, schema: Any) -> list[ValueSchema]:
        """Reads a part of the schema; see `gpu_ops.messages.encodings.Look`."""
        if isinstance(schema, list):
            return [one for part in schema for one in self.look(part)]
        if isinstance(schema, str):
            return self.look(self.named[schema]) if schema in self.named else [ValueSchema(schema)] * (schema != "null")
        kind, name = schema["type"], str(schema.get(_MEANING, ""))
        if kind == "null":
            return []
        fits = kind in _KINDS_OF.get(name, ()) and (
            kind != "fixed" or schema["size"] == _SIZES.get(name, schema["size"])
        )
        fits = fits and (name != "decimal" or _scale(schema) is not None)
        name = name if fits else str(schema.get("connect.name", schema.get("name", "")))
        if kind in ("record", "error"):
            return [ValueSchema("struct", name, fields={field["name"]: field["type"] for field in schema["fields"]})]
        return [ValueSchema(kind, name, _scale(schema), item=schema.get("items", schema.get("values")))]


def _scale(schema: Mapping[str, Any]) -> int | None:
    """That of decimals; None where it is none, as Avro has none below zero or above the precision, but Connect has."""
    if schema.get("connect.name") == CONNECT_DECIMAL:
        parameters = schema.get("connect.parameters")
        other = parameters.get("scale") if isinstance(parameters, Mapping) else None
        return scale_of(schema.get("scale", other))
    scale, precision = scale_of(schema.get("scale", 0)), schema.get("precision")
    digits = precision if isinstance(precision, int) else scale
    return scale if scale is not None and 0 <= scale <= (digits or 0) else None


def names(schema: Schema, parts: Sequence[Any], depth: int = 8) -> dict[str, Any]:
    """The names of the fields in parts of a schema, and those within each; a type may hold itself, so not for ever."""
    found = dict[str, Any]()
    for one in (one for part in parts for one in schema.look(part)):
        if one.kind == "array" and depth:
            found |= names(schema, [one.item], depth - 1)
        found |= {name: names(schema, [part], depth - 1) if depth else None for name, part in one.fields.items()}
    return found


class NoSchemaError(ValueError):
    """There is no schema that a message could be read by."""


def groups(
    values: pa.BinaryArray, at: npt.NDArray[np.int64], registry: SchemaRegistry | None, local: str | None
) -> Iterator[tuple[npt.NDArray[np.int64], pa.BinaryArray, Schema | str]]:
    """Messages of each schema, without their headers: positions, messages, and the schema or why there is none.

    Args:
        values: n messages.
        at: n positions.
        registry: it; None where ``local`` is the schema of all of them, which then have no header.
        local: a schema as JSON text.

    Raises:
        BackendError: the registry cannot be reached.
    """
    if registry is None:
        yield at, values, parsed(local or "")
        return
    framed = pc.and_(pc.starts_with(values, b"\0"), pc.greater_equal(pc.binary_length(values), _HEADER))
    framed = framed.to_numpy(zero_copy_only=False)
    if not framed.all():
        yield at[~framed], values.filter(pa.array(~framed)), "has no header of a schema registry"
    at, values = at[framed], values.filter(pa.array(framed))
    numbers = pc.binary_slice(values, 1, _HEADER).dictionary_encode()
    bare = pc.binary_replace_slice(values, 0, _HEADER, b"")
    for place, number in enumerate(numbers.dictionary.to_pylist()):
        mine = numbers.indices.to_numpy() == place
        try:
            schema: Schema | str = _registered(registry, int.from_bytes(number, "big"))
        except NoSchemaError as error:
            schema = str(error)
        yield at[mine], bare.filter(pa.array(mine)), schema


def read(values: pa.BinaryArray, schema: Schema, wanted: pa.StructType) -> pa.StructArray:
    """One record per message, in which fields are null that the schema does not have.

    Args:
        values: n messages without a header.
        schema: theirs.
        wanted: the fields, in the types that `gpu_ops.messages.encodings.written` says.

    Raises:
        ArrowException: a value that its type cannot hold.
        ValueError: one that is no such record.
    """
    fastavro = _package()
    from fastavro._read_py import schemaless_reader as careful_reader  # noqa: PLC0415 - it knows when to stop

    records = []
    for value in values:
        stream = io.BytesIO(value.as_buffer())
        _left.count = _MOST_OF_NOTHING + len(value.as_buffer())
        deep = schema.nests and len(value.as_buffer()) > _SAFE
        try:
            record: Any = (careful_reader if deep else fastavro.schemaless_reader)(stream, schema.parsed, None)
        except Exception as error:  # of whatever kind the bytes make it
            raise ValueError(f"is no Avro of its schema: {type(error).__name__}: {error}") from error
        if stream.read(1):
            raise ValueError("is longer than its schema says")
        record = record if schema.field is None else record[schema.field]
        if record is not None and not isinstance(record, dict):
            raise ValueError("is no record")
        records.append(record)
    return pa.array(records, wanted)


@functools.lru_cache(maxsize=1024)
def _registered(registry: SchemaRegistry, number: int) -> Schema:
    """A schema of the registry's; it never changes.

    Raises:
        NoSchemaError: the registry does not know it, or has another kind of schema.
        BackendError: the registry cannot be reached.
    """
    try:
        found = registry.get(f"schemas/ids/{number}")
        kind, others = found.get("schemaType", "AVRO"), dict[tuple[str, int], str]()
        if kind == "AVRO":
            _referred(registry, found, others)
            return parsed(str(found["schema"]), tuple(others.values()))
    except NoSchemaError as error:
        raise NoSchemaError(f"has schema {number}, {error}") from None
    except DescriptionError as error:
        raise NoSchemaError(f"has schema {number} of the registry, which is {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise BackendError(f"{registry.url} does not answer as a schema registry does: schema {number}") from error
    raise NoSchemaError(f"has schema {number} of the registry, which is of type {kind}: {registry.url}")


def _referred(registry: SchemaRegistry, found: Mapping[str, Any], others: dict[tuple[str, int], str]) -> None:
    """Adds the schemas that one refers to, those that they refer to before them; each once."""
    for one in found.get("references") or ():
        place = str(one["subject"]), int(one["version"])
        if place not in others:
            subject = urllib.parse.quote(place[0], safe="")
            other = registry.get(f"subjects/{subject}/versions/{place[1]}?deleted=true")
            _referred(registry, other, others)
            others[place] = str(other["schema"])


@functools.lru_cache(maxsize=1024)
def parsed(schema: str, others: tuple[str, ...] = ()) -> Schema:
    """Parses the JSON text of a schema.

    Args:
        schema: as JSON text.
        others: whose types it names; each names types of those before it.

    Raises:
        DescriptionError: it is none.
        NotBuiltError: there is no fastavro.
    """
    fastavro = _package()
    named: dict[str, Any] = {}
    try:
        for text in others:
            fastavro.parse_schema(_counted(_without_logical_types(json.loads(text))), named)
        own, field = _counted(_without_logical_types(json.loads(schema))), None
        if others and not isinstance(own, dict):  # fastavro takes the types it has parsed to records alone
            field = "value"
            own = {"type": "record", "name": "gpu_ops.Message", "fields": [{"name": field, "type": own}]}
        found = fastavro.parse_schema(own, named)
    except Exception as error:  # fastavro's errors have no common class
        raise DescriptionError(f"no schema of Avro: {type(error).__name__}: {error}") from error
    if _nests(found, named, frozenset(), set(), always=True):
        raise DescriptionError("no schema of Avro: a record in it that always holds itself has no end")
    return Schema(found, named, _nests(found, named, frozenset(), set()), field)


def _package() -> Any:
    needed = "messages in Avro need fastavro, here and where tasks run: pip install fastavro"
    fastavro = optional_module("fastavro", needed)
    for kind in ("null", "fixed", "record", "error"):
        fastavro.read.LOGICAL_READERS[f"{kind}-{_NOTHING}"] = _one_more
    return fastavro


def _without_logical_types(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_logical_types(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "name" not in schema and "type" in schema and schema["type"] not in _NAMELESS:
        return _without_logical_types(schema["type"])  # {"type": {"type": ...}}, which fastavro does not take
    return {_MEANING if x == "logicalType" else x: _without_logical_types(part) for x, part in schema.items()}


def _counted(schema: Any) -> Any:
    """A schema in which all that may take no bytes says so: nulls in arrays, bytes of length 0, records of such."""
    if isinstance(schema, list):
        return [_counted(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: _counted(part) if name in ("type", "items", "values") else part for name, part in schema.items()}
    if "fields" in made:
        made["fields"] = [_counted(field) if isinstance(field, dict) else field for field in made["fields"]]
    items = made.get("items")
    if items == "null" or (isinstance(items, dict) and items.get("type") == "null"):
        made["items"] = {"type": "null", "logicalType": _NOTHING}
    nothing = made.get("type") == "fixed" and made.get("size") == 0
    if made.get("type") in ("record", "error"):
        nothing = not any(_takes_bytes(field.get("type")) for field in made["fields"])
    return made | ({"logicalType": _NOTHING} if nothing else {})


def _takes_bytes(schema: Any) -> bool:
    """Tells whether a value of a part of a schema surely takes a byte; one of a type by its name may take none."""
    name = schema.get("type") if isinstance(schema, dict) else schema
    if name == "fixed":
        return bool(schema.get("size"))
    if name in ("record", "error"):
        return any(_takes_bytes(field.get("type")) for field in schema["fields"])
    return isinstance(schema, list) or name == "enum" or (name in _NAMELESS and name != "null")


def _one_more(value: Any, _: Any, __: Any) -> Any:
    """A value that took no bytes; fastavro calls this for each.

    Raises:
        ValueError: there are more of them than a message of its size may have.
    """
    _left.count -= 1
    if _left.count < 0:
        raise ValueError("more values without bytes than a message of this size has")
    return value


def _nests(
    schema: Any, named: Mapping[str, Any], above: frozenset[str], seen: set[str], *, always: bool = False
) -> bool:
    """Tells whether a type that a schema names holds itself.

    Args:
        schema: it, or a part of it.
        named: the types by their names.
        above: the names of those that it stands in.
        seen: the names of those that were looked at; it gets more.
        always: whether each of its values does, as no union, list or map stands between.
    """
    if isinstance(schema, str):
        known = schema in named and schema not in seen
        return schema in above or (known and _nests(named[schema], named, above, seen, always=always))
    parts = [] if always else schema
    if isinstance(schema, Mapping):
        if "name" in schema:
            seen.add(schema["name"])
            above |= {schema["name"]}
        parts = [field["type"] for field in schema.get("fields", ())]
        parts += [] if always else [schema.get("items"), schema.get("values")]
    return any(_nests(part, named, above, seen, always=always) for part in parts if part is not None)


def checked(registry: SchemaRegistry | None, local: str | None) -> None:
    """Refuses what no messages could be read with.

    Raises:
        DescriptionError: neither or both of them, or no schema.
    """
    if (registry is None) == (local is None):
        raise DescriptionError("Avro needs schema_registry=, or avro_schema= for messages without a registry's header")
    if local is not None:
        parsed(local)
