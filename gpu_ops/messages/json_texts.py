"""JSON by Arrow: messages that are objects, read all at once, and which of them are none; rows written as objects.

What is written of rows is what Spark's ``to_json`` writes of them with ``ignoreNullFields`` set to false: times in ISO
8601 with all their digits, instants in UTC; NaN and the infinities as texts, bytes as base64.

**With their schema** messages are as Kafka Connect's JSON converter writes them: ``{"schema": ..., "payload": ...}``. A
message is one if it has these two members and no other (``JsonConverter.toConnectData``). A schema says how times and
decimals are written. It is cut off before the message is read: it is most of the text, and the same in nearly all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gpu_ops.files.json_files import read_objects
from gpu_ops.messages.encodings import NOT_FINITE, Encodings, Written, to_base64
from gpu_ops.values import Mask, wrong_text

_SUSPECTS: Final = (r"\}[ \t\r\n]*null", r"\x00")
"""What Arrow would end the process at, or take for the end of its text, where it stands between objects."""

_BLANK: Final = " \t\r\n"
_ESCAPED: Final = r'["\\\x00-\x1f]'
"""What a JSON text cannot have as it is (RFC 8259)."""

_LAST_YEAR: Final = 9999
_CONTROLS: Final = tuple(chr(code) for code in range(0x20))
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

Positions = npt.NDArray[np.int64]
Reading = Callable[[Any], Encodings | str | None]
"""How values of a schema are written, or why none are read; None where such a message is no wrapper."""


def objects(values: pa.BinaryArray) -> tuple[pa.BinaryArray, Mask]:
    """Messages without the blanks around them, and which of them may be JSON objects.

    All others are none. Of those, joined by line breaks, each object lies in one message: a line break is no part of
    a JSON text, so the one between two messages stands behind a ``}`` and before a ``{``, which no object has within.
    As many objects as messages are therefore one in each.

    Args:
        values: n messages, none of them null.
    """
    texts = values.view(pa.string())
    begins = np.ones(len(values), bool) if not len(values) else _shaped(values)
    if not begins.all():
        texts = pc.ascii_trim(texts, _BLANK)
        values = texts.view(pa.binary())
        begins = _shaped(values)
    wrong = wrong_text(pa.chunked_array([texts]))
    if wrong is not None:
        begins &= ~wrong[0]
    data = memoryview(values.buffers()[2] or b"")
    for suspect in _SUSPECTS:
        if re.search(suspect.encode(), data) is not None:
            for at in np.flatnonzero(pc.match_substring_regex(values, suspect).to_numpy(zero_copy_only=False)):
                begins[at] = begins[at] and is_object(values[int(at)].as_py())
    return values, begins


def read_texts(values: pa.BinaryArray, schema: pa.Schema) -> pa.RecordBatch:
    """One row per message.

    Args:
        values: n messages, all of which `objects` has found fit.
        schema: what is read of them, in types that Arrow reads from JSON.

    Raises:
        ArrowException: one of them is none, or does not have such values.
    """
    block = pc.binary_join(pa.ListArray.from_arrays([0, len(values)], values), b"\n")[0].as_buffer()
    table = read_objects(block, schema)
    if table.num_rows != len(values):
        raise pa.ArrowInvalid("more than one JSON object")
    return table.combine_chunks().select(schema.names).to_batches()[0]


def is_object(message: bytes) -> bool:
    """Whether it is one JSON object in UTF-8, by Python's own reader."""
    try:
        return isinstance(json.loads(message.decode()), dict)
    except (ValueError, RecursionError):
        return False


def _shaped(values: pa.BinaryArray) -> npt.NDArray[np.bool_]:
    shaped: Mask = pc.and_(pc.starts_with(values, "{"), pc.ends_with(values, "}")).to_numpy(zero_copy_only=False)
    return shaped.copy()


def writes(kind: pa.DataType) -> bool:
    """Whether there is a JSON text of a type's values."""
    t = pa.types
    if t.is_nested(kind):
        known = t.is_struct(kind) or t.is_list(kind) or t.is_large_list(kind) or t.is_map(kind)
        return known and all(writes(kind.field(part).type) for part in range(kind.num_fields))
    return not (t.is_duration(kind) or t.is_interval(kind) or t.is_union(kind))


def json_objects(names: Iterable[str], columns: Iterable[pa.Array], rows: int) -> pa.StringArray:
    """An object per row.

    Args:
        names: of the columns.
        columns: of types that `writes` knows.
        rows: how many there are.
    """
    parts: list[Any] = []
    for name, column in zip(names, columns, strict=True):
        parts += [pa.scalar(f"{',' if parts else '{'}{json.dumps(name, ensure_ascii=False)}:"), json_values(column)]
    return pc.binary_join_element_wise(*parts, "}", "") if parts else pa.repeat("{}", rows)


def json_values(values: pa.Array) -> pa.StringArray:
    """A value per row, ``null`` for null."""
    made = _written(values)
    return pc.if_else(values.is_valid(), made, "null") if values.null_count else made


def bare_texts(values: pa.Array) -> pa.StringArray:
    """The same without the quotes of texts, times and bytes; null for null."""
    if _is_text(values.type):
        return values.cast(pa.string())
    made = pc.utf8_trim(_written(values), '"')
    return pc.if_else(values.is_valid(), made, None) if values.null_count else made


def _written(values: pa.Array) -> pa.Array:
    """Texts of values that are not null."""
    t, kind = pa.types, values.type
    if t.is_struct(kind):
        return json_objects([field.name for field in kind], values.flatten(), len(values))
    if t.is_list(kind) or t.is_large_list(kind):
        return _joined("[", values, json_values(values.flatten()), "]")
    if t.is_map(kind):
        entries = values.cast(pa.list_(pa.struct([("key", kind.key_type), ("value", kind.item_type)])))
        keys, items = entries.flatten().flatten()
        names = _within('"', _escaped(bare_texts(keys)), '":')
        return _joined("{", entries, pc.binary_join_element_wise(names, json_values(items), ""), "}")
    if _is_text(kind):
        return _within('"', _escaped(values.cast(pa.string())), '"')
    if t.is_binary(kind) or t.is_large_binary(kind):
        return _within('"', to_base64(values.cast(pa.binary())), '"')
    if t.is_timestamp(kind):
        texts = pc.replace_substring(_times(values), " ", "T")
        return _within('"', texts, 'Z"' if kind.tz else '"')
    texts = values.cast(pa.string())
    if t.is_date(kind) or t.is_time(kind):
        return _within('"', texts, '"')
    if t.is_floating(kind) and not pc.all(pc.is_finite(values)).as_py():
        for wrong, right in zip(("nan", "inf", "-inf"), NOT_FINITE, strict=True):
            texts = pc.if_else(pc.equal(texts, wrong), f'"{right}"', texts)
    return texts


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _times(values: pa.Array) -> pa.Array:
    """Texts of times, in UTC."""
    plain = values.cast(pa.timestamp(values.type.unit, "UTC")).cast(pa.timestamp(values.type.unit))
    years = pc.min_max(pc.year(plain)).as_py()
    if years["min"] is None or (years["min"] >= 0 and years["max"] <= _LAST_YEAR):
        return plain.cast(pa.string())
    # Arrow writes far years only of instants, and them ten times slower
    return pc.utf8_trim(plain.cast(pa.timestamp(values.type.unit, "UTC")).cast(pa.string()), "Z")


def _joined(before: str, lists: pa.Array, elements: pa.Array, after: str) -> pa.Array:
    """The texts of lists' elements, put together."""
    ends = np.cumsum(pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False))
    offsets = pa.array(np.concatenate([[0], ends]), pa.int32())
    return _within(before, pc.binary_join(pa.ListArray.from_arrays(offsets, elements), ","), after)


def _within(before: str, texts: pa.Array, after: str) -> pa.Array:
    return pc.binary_join_element_wise(before, texts, after, "")


def _escaped(texts: pa.StringArray) -> pa.StringArray:
    if not pc.any(pc.match_substring_regex(texts, _ESCAPED)).as_py():
        return texts
    texts = pc.replace_substring(pc.replace_substring(texts, "\\", "\\\\"), '"', '\\"')
    for control in _CONTROLS:
        texts = pc.replace_substring(texts, control, json.dumps(control)[1:-1])
    return texts


class Group(NamedTuple):
    """Messages that are read alike.

    Attributes:
        at: their positions.
        values: their texts; of wrapped ones an object with the payload alone, in a list: what stands behind it in the
            message would be no JSON there.
        encodings: as their schema has them; none where they have no schema.
        whole: the messages of the wrapped ones as they came; else None.
        avro: their schema where they are in Avro; None where they are JSON.
    """

    at: Positions
    values: pa.BinaryArray
    encodings: Encodings
    whole: pa.BinaryArray | None = None
    avro: Any = None

    def part(self, start: int, end: int) -> Group:
        """Some of them."""
        size = end - start
        whole = None if self.whole is None else self.whole.slice(start, size)
        return self._replace(at=self.at[start:end], values=self.values.slice(start, size), whole=whole)


def groups(values: pa.BinaryArray, at: Positions, reading: Reading) -> Iterator[Group | tuple[Positions, str]]:
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
    """Whether no payload closes the list that `Group` puts it in, so that what follows would be JSON there.

    It would take a ``]`` behind it; where there may be one the whole message has to be looked at, too.
    """
    return not pc.any(pc.match_substring_regex(values, _CLOSES)).as_py()


def is_wrapper(message: bytes) -> bool:
    """Whether a JSON object has a schema and a payload, and nothing else."""
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


def look(schema: Any) -> list[Written]:
    """What a part of Kafka Connect's schemas says; nothing if it is none. See `gpu_ops.messages.encodings.Look`."""
    kind = _KINDS.get(str(schema.get("type", "struct"))) if isinstance(schema, dict) else None
    if kind is None:
        return []
    if kind == "map" and look(schema.get("keys"))[:1] != [Written("string")]:
        kind = "list of pairs"
    parameters = schema.get("parameters")
    scale = parameters.get("scale", 0) if isinstance(parameters, dict) else 0
    fields = {field["field"]: field for field in _fields(schema)}
    item = schema.get("items", schema.get("values"))
    return [Written(kind, str(schema.get("name") or ""), int(scale) if str(scale).isdecimal() else 0, fields, item)]


def _fields(schema: Any) -> list[Any]:
    found = schema.get("fields") if isinstance(schema, Mapping) else None
    fields = found if isinstance(found, list) else []
    return [field for field in fields if isinstance(field, dict) and isinstance(field.get("field"), str)]
