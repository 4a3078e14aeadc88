"""Kafka Connect's messages in JSON with their schema around them: ``{"schema": ..., "payload": ...}``.

A message is one if it has these two members and no other (``JsonConverter.toConnectData``). A schema says how times and
decimals are written. It is cut off before the message is read: it is most of the text, and the same in nearly all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gpu_ops.arrays import Ints
from gpu_ops.messages.encodings import Encodings, ValueSchema, scale_of

_BLANK: Final = " \t\r\n"
_AROUND: Final = r'^\{[ \t\r\n]*"(schema|payload)"[ \t\r\n]*:'
_PAYLOAD: Final = b'"payload":'
_CLOSES: Final = (
    r'\}[ \t\r\n]*\][ \t\r\n]*,[ \t\r\n]*"'
    r'|"payload":\[[ \t\r\n]*(null[ \t\r\n]*\][ \t\r\n]*,|[^ \t\r\n{n])'
)

_MEMBERS: Final = {"schema", "payload"}
_KINDS: Final = {
    "int8": "int", "int16": "int", "int32": "int", "int64": "long", "float": "float", "double": "double",
    "boolean": "boolean", "string": "string", "bytes": "bytes", "array": "array", "map": "map", "struct": "struct",
}  # fmt: skip
"""By Kafka Connect's types, Avro's."""

SchemaReading = Callable[[Any], Encodings | str | None]
"""How values of a schema are written, or why none are read; None where such a message is no wrapper."""


class Group(NamedTuple):
    """Messages that are read alike.

    Attributes:
        at: their positions.
        values: their texts; of wrapped ones an object with the payload alone, in a list: what stands behind it in the
            message would be no JSON there.
        encodings: as their schema has them; none where they have no schema.
        whole: the messages of the wrapped ones as they came; else None.
        avro: their schema where they are in Avro; None where they are JSON.
        bare: whether it is one message, to be read with `gpu_ops.messages.json_texts.bare_floats`.
    """

    at: Ints
    values: pa.BinaryArray
    encodings: Encodings
    whole: pa.BinaryArray | None = None
    avro: Any = None
    bare: bool = False

    def part(self, start: int, end: int) -> Group:
        """Takes the messages from one position to another."""
        size = end - start
        whole = None if self.whole is None else self.whole.slice(start, size)
        return self._replace(at=self.at[start:end], values=self.values.slice(start, size), whole=whole)


def groups(values: pa.BinaryArray, at: Ints, reading: SchemaReading) -> Iterator[Group | tuple[Ints, str]]:
    """Messages with and without a schema, those with different schemas apart; and positions of others, and why.

    Args:
        values: n JSON objects.
        at: n positions.
        reading: see there.
    """
    maybe = pc.match_substring_regex(values, _AROUND).to_numpy(zero_copy_only=False)
    if not maybe.all():
        yield Group(at[~maybe], values.filter(pa.array(~maybe)), {})
    if not maybe.any():
        return
    at, values = at[maybe], values.filter(pa.array(maybe))
    schemas, payloads, plain = _parted(values)
    if plain.any():
        yield Group(at[plain], values.filter(pa.array(plain)), {})
    texts = schemas.dictionary_encode()
    number = texts.indices.to_numpy(zero_copy_only=False)
    found = [None if text is None else reading(json.loads(text)) for text in texts.dictionary.to_pylist()]
    for place, one in enumerate(found):
        if one in found[:place]:
            continue
        mine = ~plain & np.isin(number, [n for n, other in enumerate(found) if other == one])
        if isinstance(one, str):
            # what stands behind the payload is not known yet
            wrong = mine.copy()
            wrong[mine] = [is_wrapper(text) for text in values.filter(pa.array(mine)).to_pylist()]
            others = mine & ~wrong
            yield at[wrong], one
            yield Group(at[others], values.filter(pa.array(others)), {})
            continue
        whole = values.filter(pa.array(mine))
        bare = payloads.filter(pa.array(mine))
        yield Group(at[mine], whole, {}) if one is None else Group(at[mine], bare, one, whole)


def _parted(values: pa.BinaryArray) -> tuple[pa.BinaryArray, pa.BinaryArray, npt.NDArray[np.bool_]]:
    """The schemas of messages, the payloads as `Group` has them, and which messages have no such members alone."""
    parts = pc.split_pattern(values, _PAYLOAD, max_splits=1)
    first = pc.list_element(parts, 0)
    cut = pc.list_value_length(parts).to_numpy() == 2
    heads = first.dictionary_encode()
    # of what stands before a payload, if that is an object with the schema alone, cut where the next member begins
    before = (_members(text + _PAYLOAD + b"null}") for text in heads.dictionary.to_pylist())
    schemas = [None if found is None else found["schema"] for found in before]
    heads_fit = np.array([one is not None for one in schemas])
    cut &= heads_fit[heads.indices.to_numpy(zero_copy_only=False)]
    rest = pc.binary_join(pc.list_slice(parts, 1, 2), b"")  # of what is not cut nothing
    begin, nothing = (pa.scalar(text, pa.binary()) for text in (b"{" + _PAYLOAD + b"[", b""))
    payloads = pc.binary_join_element_wise(begin, pc.binary_replace_slice(rest, -1, 1 << 30, b"]}"), nothing)
    known = pa.array(schemas, pa.binary()).take(heads.indices)
    plain = np.zeros(len(values), bool)
    if not cut.all():
        # the payload first, or blanks where the converter writes none: one by one
        known, payloads = known.to_pylist(), payloads.to_pylist()
        for place in np.flatnonzero(~cut):
            members = _members(values[int(place)].as_py())
            if members is None:
                plain[place], known[place] = True, None
            else:
                known[place], payloads[place] = members["schema"], b'{"payload":[' + members["payload"] + b"]}"
        known, payloads = pa.array(known, pa.binary()), pa.array(payloads, pa.binary())
    return known, payloads, plain


def balanced(values: pa.BinaryArray) -> bool:
    """Tells that no payload closes the list that `Group` puts it in, so that what follows would be JSON there.

    It would take a ``]`` behind it; where there may be one the whole message has to be looked at, too.
    """
    return not pc.any(pc.match_substring_regex(values, _CLOSES)).as_py()


def is_wrapper(message: bytes) -> bool:
    """Tells whether a JSON object has a schema and a payload, and nothing else."""
    return _members(message) is not None


def _members(message: bytes) -> dict[str, bytes] | None:
    """The texts of a wrapper's members; None of what is none, and a schema that is none where one of them is twice."""
    decoder, found, end, others = json.JSONDecoder(), dict[str, bytes](), 0, False
    try:
        text = message.decode()
        while text[end] != "}":
            name, end = decoder.raw_decode(text, _behind(text, end + 1))
            end = _behind(text, end)
            if not isinstance(name, str) or text[end] != ":":
                return None
            start = _behind(text, end + 1)
            _, end = decoder.raw_decode(text, start)
            if name in found:
                return {"schema": b'"twice"', "payload": b"null"}
            if name in _MEMBERS:
                found[name] = text[start:end].encode()
            others |= name not in _MEMBERS
            end = _behind(text, end)
            if text[end] not in ",}":
                return None
        if text[end + 1 :].strip(_BLANK):
            return None
    except (ValueError, IndexError, RecursionError):
        return None
    return found if found.keys() == _MEMBERS and not others else None


def _behind(text: str, at: int) -> int:
    """The next place without a blank."""
    while text[at] in _BLANK:
        at += 1
    return at


def rows_of(schema: Any, *, envelopes: bool) -> list[Any]:
    """The schemas of the rows that a message of a schema has."""
    if not envelopes:
        return [schema]
    return [field for field in _fields(schema) if field["field"] in ("before", "after")]


def look(schema: Any) -> list[ValueSchema]:
    """Reads a part of Kafka Connect's schemas, which may be none. See `gpu_ops.messages.encodings.Look`."""
    kind = _KINDS.get(str(schema.get("type", "struct"))) if isinstance(schema, dict) else None
    if kind is None:
        return []
    if kind == "map" and look(schema.get("keys"))[:1] != [ValueSchema("string")]:
        kind = "list of pairs"
    parameters = schema.get("parameters")
    scale = scale_of(parameters.get("scale")) if isinstance(parameters, dict) else None
    fields = {field["field"]: field for field in _fields(schema)}
    item = schema.get("items", schema.get("values"))
    return [ValueSchema(kind, str(schema.get("name") or ""), scale, fields, item)]


def _fields(schema: Any) -> list[Any]:
    found = schema.get("fields") if isinstance(schema, Mapping) else None
    fields = found if isinstance(found, list) else []
    return [field for field in fields if isinstance(field, dict) and isinstance(field.get("field"), str)]
