"""Messages with their schema, as Kafka Connect's JSON converter writes them: ``{"schema": ..., "payload": ...}``.

A schema says how times and decimals are written. It is cut off before the message is read: it is most of the text,
and the same in nearly all.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Encodings = Mapping[str, str]
"""By column, one of `gpu_ops.messages.encodings.ENCODINGS`; or what is wrong with it."""

_AROUND: Final = r'^\{[ \t\r\n]*"(schema|payload)"[ \t\r\n]*:'
_PAYLOAD: Final = b'"payload":'

ENCODING_OF: Final = {
    "io.debezium.time.Timestamp": "ms",
    "io.debezium.time.MicroTimestamp": "us",
    "io.debezium.time.NanoTimestamp": "ns",
    "io.debezium.time.Date": "days",
    "org.apache.kafka.connect.data.Timestamp": "ms",
    "org.apache.kafka.connect.data.Date": "days",
    "io.debezium.data.VariableScaleDecimal": (
        "is a decimal whose scale is each value's own; set decimal.handling.mode or the column's scale at its source"
    ),
}
"""By a schema's name, one of `gpu_ops.messages.encodings.ENCODINGS`, or what is wrong with it."""

_DECIMAL: Final = "org.apache.kafka.connect.data.Decimal"


class Group(NamedTuple):
    """Messages that are read alike.

    Attributes:
        at: their positions.
        values: their texts.
        wrapped: whether the row or envelope is the ``payload``.
        encodings: as their schema has them; none where they have no schema.
        avro: their schema where they are in Avro; None where they are JSON.
    """

    at: npt.NDArray[np.int64]
    values: pa.BinaryArray
    wrapped: bool
    encodings: Encodings
    avro: Any = None


def groups(values: pa.BinaryArray, at: npt.NDArray[np.int64]) -> Iterator[Group]:
    """Messages with and without a schema, those with different schemas apart.

    Args:
        values: n JSON objects.
        at: n positions.
    """
    wrapped = pc.match_substring_regex(values, _AROUND).to_numpy(zero_copy_only=False)
    if not wrapped.any():
        yield Group(at, values, wrapped=False, encodings={})
        return
    if not wrapped.all():
        yield Group(at[~wrapped], values.filter(pa.array(~wrapped)), wrapped=False, encodings={})
    at, values = at[wrapped], values.filter(pa.array(wrapped))
    parts = pc.split_pattern(values, _PAYLOAD, max_splits=1)
    cut = (pc.list_value_length(parts).to_numpy() == 2) & _begins_with_schema(values)
    if not cut.all():
        yield Group(at[~cut], values.filter(pa.array(~cut)), wrapped=True, encodings={})
    halves = parts.filter(pa.array(cut)).flatten()
    at, values = at[cut], values.filter(pa.array(cut))
    schemas = halves.take(pa.array(np.arange(0, len(halves), 2))).dictionary_encode()
    rest = halves.take(pa.array(np.arange(1, len(halves), 2)))
    bare = pc.binary_join_element_wise(pa.scalar(b"{" + _PAYLOAD, pa.binary()), rest, pa.scalar(b"", pa.binary()))
    number = schemas.indices.to_numpy()
    found = [_encodings(text) for text in schemas.dictionary.to_pylist()]
    for distinct in _distinct(found):
        mine = np.isin(number, [n for n, one in enumerate(found) if one == distinct])
        # a schema that does not end where it seems to: the whole message is read, and refused if it is no JSON
        texts = values if distinct is None else bare
        yield Group(at[mine], texts.filter(pa.array(mine)), wrapped=True, encodings=distinct or {})


def _begins_with_schema(values: pa.BinaryArray) -> npt.NDArray[np.bool_]:
    begins: npt.NDArray[np.bool_] = pc.match_substring_regex(values, r'^\{[ \t\r\n]*"schema"').to_numpy(False)
    return begins


def _encodings(before: bytes) -> Encodings | None:
    """What the schema in front of a payload says; None if that is no JSON object cut where a member begins."""
    try:
        found = json.loads(before + _PAYLOAD + b"null}")
    except (ValueError, RecursionError):
        return None
    return encodings_of(found.get("schema"))


def encodings_of(schema: Any) -> Encodings:
    """How the columns of a row are written, by Kafka Connect's schema of it or of an envelope."""
    fields = _fields(schema)
    rows = [field for field in fields if field.get("field") in ("before", "after") and field.get("type") == "struct"]
    return by_column((str(field.get("field")), _within(field)) for row in rows or [schema] for field in _fields(row))


def by_column(columns: Iterable[tuple[str, Iterable[str]]]) -> Encodings:
    """How columns are written, of all ways found within each; in several at once they are not read."""
    made: dict[str, str] = {}
    for name, found in columns:
        ways = sorted(set(found))
        if ways:
            made[name] = ways[0] if len(ways) == 1 else f"is written in ways {', '.join(ways)}"
    return made


def _within(field: Any) -> Iterator[str]:
    """How a value and those within it are written, where that is not by default."""
    if not isinstance(field, dict):
        return
    name = field.get("name")
    if name == _DECIMAL:
        yield f"base64:{int((field.get('parameters') or {}).get('scale', 0))}"
    elif name in ENCODING_OF:
        yield ENCODING_OF[name]
    else:
        for part in (*_fields(field), field.get("items")):
            yield from _within(part)


def _fields(schema: Any) -> list[Any]:
    found = schema.get("fields") if isinstance(schema, dict) else None
    return [field for field in found if isinstance(field, dict)] if isinstance(found, list) else []


def _distinct(found: list[Encodings | None]) -> list[Encodings | None]:
    made: list[Encodings | None] = []
    for one in found:
        if one not in made:
            made.append(one)
    return made
