"""Messages in Avro, one by one as fastavro reads them; their schemas from Confluent's registry, or one for all.

The wire format of a registry's messages is a zero byte, the schema's number in four bytes (big-endian), and the value.
"""

from __future__ import annotations

import functools
import io
import json
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gpu_ops.errors import BackendError, DescriptionError
from gpu_ops.messages.connect import ENCODING_OF, Encodings, Group, by_column
from gpu_ops.messages.encodings import TIMES
from gpu_ops.values import rebuilt

_HEADER: Final = 5
_SECONDS: Final = 30
_ROWS: Final = ("before", "after")

_NUMBERS: Final = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal)
_FITTING: Final[Mapping[str, Sequence[Callable[[pa.DataType], bool]]]] = {
    "boolean": (pa.types.is_boolean,),
    "int": _NUMBERS,
    "long": _NUMBERS,
    "float": (pa.types.is_floating,),
    "double": (pa.types.is_floating,),
    "string": (pa.types.is_string,),
    "enum": (pa.types.is_string,),
    "bytes": (pa.types.is_binary, pa.types.is_large_binary),
    "fixed": (pa.types.is_binary, pa.types.is_large_binary),
}
"""By Avro's types, without a logical one, the types that their values have."""


def groups(
    values: pa.BinaryArray, at: npt.NDArray[np.int64], registry: str | None, local: str | None
) -> Iterator[Group]:
    """Messages of each schema, without their headers.

    Args:
        values: n messages.
        at: n positions.
        registry: its URL; None where ``local`` is the schema of all of them, which then have no header.
        local: a schema as JSON text.

    Yields:
        None for the schema of messages without a header that should have one.

    Raises:
        GpuJoinError: the registry cannot be reached, or has no such schema.
    """
    if registry is None:
        yield _group(at, values, _parsed(local or ""))
        return
    framed = pc.and_(pc.starts_with(values, b"\0"), pc.greater_equal(pc.binary_length(values), _HEADER))
    framed = framed.to_numpy(zero_copy_only=False)
    if not framed.all():
        yield _group(at[~framed], values.filter(pa.array(~framed)), None)
    at, values = at[framed], values.filter(pa.array(framed))
    numbers = pc.binary_slice(values, 1, _HEADER).dictionary_encode()
    bare = pc.binary_replace_slice(values, 0, _HEADER, b"")
    for place, number in enumerate(numbers.dictionary.to_pylist()):
        mine = numbers.indices.to_numpy() == place
        schema = _registered(registry, int.from_bytes(number, "big"))
        yield _group(at[mine], bare.filter(pa.array(mine)), schema)


def read(values: pa.BinaryArray, schema: Any, wanted: pa.StructType) -> pa.StructArray:
    """One record per message, in which fields are null that the schema does not have.

    Args:
        values: n messages without a header.
        schema: theirs, as fastavro has parsed it.
        wanted: the fields, in the types that `in_memory` says.

    Raises:
        ArrowException: a value that its type cannot hold.
        ValueError: one that is no such record.
    """
    import fastavro  # noqa: PLC0415 - an extra

    problem = _misfit(schema, wanted, {})
    if problem is not None:
        raise ValueError(problem)
    records = []
    for value in values:
        stream = io.BytesIO(value.as_buffer())
        try:
            record = fastavro.schemaless_reader(stream, schema, None)
        except Exception as error:  # of whatever kind the bytes make it
            raise ValueError(f"is no Avro of its schema: {type(error).__name__}: {error}") from error
        if stream.read(1):
            raise ValueError("is longer than its schema says")
        if record is not None and not isinstance(record, dict):
            raise ValueError("is no record")
        records.append(record)
    return pa.array(records, wanted)


def _misfit(schema: Any, wanted: pa.DataType, named: dict[str, Any], path: str = "") -> str | None:
    """Why values of a schema are none of a type; None where they are, as far as a schema says it.

    Arrow would take a plain long for a time, and a boolean for a number.
    """
    t = pa.types
    schema = named.get(schema, schema) if isinstance(schema, str) else schema
    if isinstance(schema, list):
        return next(filter(None, (_misfit(one, wanted, named, path) for one in schema if one != "null")), None)
    definition = schema if isinstance(schema, Mapping) else {"type": schema}
    kind, logical = definition["type"], str(definition.get("logicalType", ""))
    if isinstance(kind, list | Mapping):
        return _misfit(kind, wanted, named, path)
    if "name" in definition:
        named[definition["name"]] = definition
    if kind in ("record", "error"):
        for field in _fields(definition):  # in any case: a type is defined where it comes first
            index = wanted.get_field_index(field["name"]) if t.is_struct(wanted) else -1
            inner = wanted.field(index).type if index >= 0 else pa.null()
            problem = _misfit(field["type"], inner, named, f"{path}.{field['name']}" if path else field["name"])
            if problem is not None:
                return problem
        fine = t.is_struct(wanted)
    elif kind in ("array", "map"):
        inner = wanted.value_type if t.is_list(wanted) else pa.null()
        problem = _misfit(definition.get("items", definition.get("values")), inner, named, f"{path}[]")
        if problem is not None:
            return problem
        fine = t.is_list(wanted) and kind == "array"
    elif logical.startswith("timestamp"):
        fine = t.is_timestamp(wanted)
    elif logical.startswith("local-timestamp"):
        fine = t.is_timestamp(wanted) and wanted.tz is None
    elif logical in ("date", "decimal", "uuid", "duration") or logical.startswith("time-"):
        fine = bool({"date": t.is_date, "decimal": t.is_decimal}.get(logical, t.is_time)(wanted))
    elif kind in ("int", "long") and definition.get("connect.name") in ENCODING_OF:
        is_time = t.is_date if ENCODING_OF[definition["connect.name"]] == "days" else t.is_timestamp
        fine = is_time(wanted) or t.is_integer(wanted)
    else:
        fine = any(is_one(wanted) for is_one in _FITTING.get(kind, ()))
    if fine or t.is_null(wanted):
        return None
    return f"column {path!r} is {logical or kind} in its schema, and not {wanted}"


def _group(at: npt.NDArray[np.int64], values: pa.BinaryArray, schema: Any) -> Group:
    return Group(at, values, wrapped=False, encodings={} if schema is None else encodings_of(schema), avro=schema)


def in_memory(kind: pa.DataType, encoding: str) -> pa.DataType:
    """The type of values as fastavro gives them, of a declared type.

    Args:
        kind: the declared one.
        encoding: as `encodings_of` has it.
    """
    if encoding not in TIMES:
        return kind
    return rebuilt(kind, lambda part: pa.int64() if pa.types.is_timestamp(part) else part)


def encodings_of(schema: Any) -> Encodings:
    """How columns are written, by the ``connect.name`` of their fields: Debezium's times are plain longs."""
    rows = [part for field in _fields(schema) if field["name"] in _ROWS for part in _records(field["type"])]
    return by_column((field["name"], _within(field["type"])) for row in rows or [schema] for field in _fields(row))


def _within(kind: Any) -> Iterator[str]:
    if isinstance(kind, list):
        for part in kind:
            yield from _within(part)
    elif isinstance(kind, Mapping):
        name = kind.get("connect.name")
        if "logicalType" not in kind and name in ENCODING_OF:
            yield ENCODING_OF[name]
            return
        for field in _fields(kind):
            yield from _within(field["type"])
        yield from _within(kind.get("items"))
        if isinstance(kind.get("type"), Mapping | list):
            yield from _within(kind["type"])


def _records(kind: Any) -> list[Any]:
    """The records among the types of a field."""
    kinds = kind if isinstance(kind, list) else [kind]
    return [one for one in kinds if isinstance(one, Mapping) and one.get("type") == "record"]


def _fields(schema: Any) -> Sequence[Any]:
    found = schema.get("fields", ()) if isinstance(schema, Mapping) else ()
    return [field for field in found if isinstance(field, Mapping)]


@functools.lru_cache(maxsize=1024)
def _registered(registry: str, number: int) -> Any:
    """A schema of the registry's; it never changes.

    Raises:
        BackendError: the registry does not give it.
    """
    url = f"{registry.rstrip('/')}/schemas/ids/{number}"
    try:
        with urllib.request.urlopen(url, timeout=_SECONDS) as answer:  # noqa: S310 - `checked` has seen the URL
            found = json.load(answer)
    except (OSError, ValueError) as error:
        raise BackendError(f"the schema registry does not give schema {number}: {url}: {error}") from error
    kind = found.get("schemaType", "AVRO")
    if kind != "AVRO" or found.get("references"):
        what = f"is of type {kind}" if kind != "AVRO" else "refers to others, which is not built"
        raise BackendError(f"schema {number} of the registry {what}: {url}")
    return _parsed(found["schema"])


@functools.lru_cache(maxsize=1024)
def _parsed(schema: str) -> Any:
    """A schema as fastavro has it.

    Raises:
        DescriptionError: it is none, or there is no fastavro.
    """
    try:
        import fastavro  # noqa: PLC0415
    except ImportError as error:
        raise DescriptionError("messages in Avro need fastavro: pip install fastavro") from error
    try:
        return fastavro.parse_schema(json.loads(schema))
    except Exception as error:  # fastavro's errors have no common class
        raise DescriptionError(f"no schema of Avro: {type(error).__name__}: {error}") from error


def checked(registry: str | None, local: str | None) -> None:
    """Refuses what no messages could be read with.

    Raises:
        DescriptionError: neither or both of them, an address that is none, no schema.
    """
    if (registry is None) == (local is None):
        raise DescriptionError("Avro needs schema_registry=, or avro_schema= for messages without a registry's header")
    if local is not None:
        _parsed(local)
        return
    parts = urllib.parse.urlsplit(str(registry))
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise DescriptionError(f"schema_registry={registry!r} is no address such as http://registry:8081")
    if parts.username is not None:
        raise DescriptionError("schema_registry with a password is not built: it would show in plans")
