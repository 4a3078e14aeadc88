"""JSON by Arrow: messages that are objects, read all at once, and which of them are none; rows written as objects.

What is written of rows is what Spark's ``to_json`` writes of them with ``ignoreNullFields`` set to false: times in ISO
8601 with all their digits, instants in UTC; NaN and the infinities as texts, bytes as base64. All sinks write JSON in
this one way, values and keys, and `gpu_ops.messages.rows` reads it as what it was.
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

from gpu_ops.arrays import Mask
from gpu_ops.files.json_files import read_objects
from gpu_ops.messages.encodings import NOT_FINITE, to_base64
from gpu_ops.messages.times import date_texts, time_texts
from gpu_ops.values import wrong_text

_SUSPECTS: Final = (r"\}[ \t\r\n]*null", r"\x00")
"""What Arrow would end the process at, or take for the end of its text, where it stands between objects."""

_INFINITY: Final = b"Infinity"
_BEYOND: Final = "a number that is too large for its type, FLOAT or DOUBLE"
_BLANK: Final = " \t\r\n"
_ESCAPED: Final = r'["\\\x00-\x1f]'
"""What a JSON text cannot have as it is (RFC 8259)."""

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
    rows = table.combine_chunks().select(schema.names).to_batches()[0]
    _refuse_beyond(values, rows)
    return rows


def _refuse_beyond(values: pa.BinaryArray, rows: pa.RecordBatch) -> None:
    """Refuses numbers too large for their type, which Arrow reads as infinities, as it does a bare ``Infinity``."""
    infinite = np.zeros(len(values), bool)
    for column in rows.columns:
        infinite |= _infinite(column)
    if not infinite.any():
        return
    for text in values.filter(pa.array(infinite)).to_pylist():
        if _INFINITY not in text:
            raise pa.ArrowInvalid(_BEYOND)
        bare_floats(text, pa.struct(list(rows.schema)))  # it looks at each number


def _infinite(values: pa.Array) -> Mask:
    """Flags the values that are an infinity, or hold one."""
    t, kind = pa.types, values.type
    found = np.zeros(len(values), bool)
    if t.is_floating(kind):
        found |= pc.fill_null(pc.is_inf(values), fill_value=False).to_numpy(zero_copy_only=False)
    elif t.is_struct(kind):
        for part in values.flatten():
            found |= _infinite(part)
    elif t.is_list(kind):
        parents = pc.list_parent_indices(values).to_numpy(zero_copy_only=False)
        found[parents[_infinite(values.flatten())]] = True
    return found


class _Number(str):
    """A number as its text has it."""


def bare_floats(message: bytes, kind: pa.StructType) -> bytes:
    """A message with NaN and the infinities as Arrow reads them beside numbers, without quotes.

    Args:
        message: one JSON object.
        kind: what is read of it; the rest is left out.

    Raises:
        ValueError: no JSON, a member that is there twice, or a number too large for its type.
    """
    found = json.loads(message, parse_int=_Number, parse_float=_Number, parse_constant=_Number, object_pairs_hook=_once)
    return _bare(found, kind).encode()


def _once(members: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(members)
    if len(found) < len(members):
        raise ValueError("a member that is there twice")
    return found


def _bare(value: Any, kind: pa.DataType) -> str:
    t = pa.types
    if t.is_floating(kind) and isinstance(value, _Number) and value not in NOT_FINITE:
        with np.errstate(over="ignore"):
            beyond = np.isinf((np.float32 if t.is_float32(kind) else np.float64)(value))
        if beyond:
            raise ValueError(_BEYOND)
    if isinstance(value, _Number) or (t.is_floating(kind) and value in NOT_FINITE):
        return str(value)
    if t.is_struct(kind) and isinstance(value, dict):
        parts = (f"{json.dumps(x.name)}:{_bare(value[x.name], x.type)}" for x in kind if x.name in value)
        return f"{{{','.join(parts)}}}"
    if t.is_list(kind) and isinstance(value, list):
        return f"[{','.join(_bare(x, kind.value_type) for x in value)}]"
    return json.dumps(value)


def is_object(message: bytes) -> bool:
    """Tells whether a message is one JSON object in UTF-8, by Python's own reader."""
    try:
        return isinstance(json.loads(message.decode()), dict)
    except (ValueError, RecursionError):
        return False


def _shaped(values: pa.BinaryArray) -> npt.NDArray[np.bool_]:
    shaped: Mask = pc.and_(pc.starts_with(values, "{"), pc.ends_with(values, "}")).to_numpy(zero_copy_only=False)
    return shaped.copy()


def writes(kind: pa.DataType) -> bool:
    """Tells whether values of a type can be written as JSON."""
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
    """Writes values as JSON without the quotes of texts, times and bytes; null for null."""
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
        return _within('"', time_texts(values), 'Z"' if kind.tz else '"')
    if t.is_date(kind):
        return _within('"', date_texts(values), '"')
    texts = values.cast(pa.string())
    if t.is_time(kind):
        return _within('"', texts, '"')
    if t.is_floating(kind):
        if not pc.all(pc.is_finite(values)).as_py():
            for wrong, right in zip(("nan", "inf", "-inf"), NOT_FINITE, strict=True):
                texts = pc.if_else(pc.equal(texts, wrong), f'"{right}"', texts)
        zeros = pc.equal(texts, "-0")  # a whole number to most readers, which have no such one
        texts = pc.if_else(zeros, "-0.0", texts) if pc.any(zeros).as_py() else texts
    return texts


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


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
