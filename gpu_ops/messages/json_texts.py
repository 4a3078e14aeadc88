"""JSON by Arrow: messages that are objects, read all at once, and which of them are none; rows written as objects.

What is written of rows is what Spark's ``to_json`` writes of them with ``ignoreNullFields`` set to false: times in ISO
8601 with all their digits, instants in UTC; NaN and the infinities as texts, bytes as base64.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gpu_ops.files.formats import read_objects
from gpu_ops.messages.encodings import NOT_FINITE, to_base64
from gpu_ops.values import Mask, wrong_text

_SUSPECTS: Final = (r"\}[ \t\r\n]*null", r"\x00")
"""What Arrow would end the process at, or take for the end of its text, where it stands between objects."""

_BLANK: Final = " \t\r\n"

_ESCAPED: Final = r'["\\\x00-\x1f]'
"""What a JSON text cannot have as it is (RFC 8259)."""

_LAST_YEAR: Final = 9999

_CONTROLS: Final = tuple(chr(code) for code in range(0x20))


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
