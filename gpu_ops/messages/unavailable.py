"""Values that a change does not carry: large ones that did not change, for which Debezium has a placeholder.

What stands for them is that of Debezium's connector for Postgres (``UnchangedToastedPlaceholder``): the text itself,
its bytes, a map of it to itself; in arrays one element of it, or its bytes as that many numbers; of a UUID the one that
Java makes of its bytes. Geometries have points that nobody has.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gpu_ops.errors import DescriptionError

PLACEHOLDER: Final = "__debezium_unavailable_value"
"""The default of Debezium's ``unavailable.value.placeholder``."""

_SHAPES: Final = tuple(
    bytes.fromhex(text)
    for text in (
        "0101000020e6100000000000fc83d797c1000000fc83d797c1",
        "0101000020e61000000c21e7fdff7f66401842cefbff7f5640",
        "0101000000000000fc83d797c1000000fc83d797c1",
    )
)

_HEX: Final = "hex:"


def text_of(placeholder: str) -> str:
    """A placeholder as it is in messages: Debezium takes its bytes in hex, too.

    Raises:
        DescriptionError: none, or bytes that are no text.
    """
    try:
        text = bytes.fromhex(placeholder.removeprefix(_HEX)).decode() if placeholder.startswith(_HEX) else placeholder
    except ValueError:
        text = ""
    if not text:
        raise DescriptionError(
            f"unavailable_value={placeholder!r} is no text, nor hex: and a text's bytes, as Debezium's "
            "unavailable.value.placeholder is"
        )
    return text


Lost = npt.NDArray[np.bool_]


def unavailable(before: pa.Array, values: pa.Array, placeholder: str) -> Lost | None:
    """Which values are not there; None if all are.

    Args:
        before: n values before they were decoded: of a struct with a member more, which a map of the placeholder has.
        values: the same, decoded.
        placeholder: Debezium's.
    """
    lost = _lost(values, placeholder)
    if pa.types.is_struct(before.type):
        member = before.type.get_field_index(placeholder)
        if member >= 0 and pa.types.is_struct(values.type):
            lost |= pc.and_(before.is_valid(), before.field(member).is_valid()).to_numpy(zero_copy_only=False)
    return lost if lost.any() else None


def _lost(values: pa.Array, placeholder: str) -> Lost:
    t, kind = pa.types, values.type
    if t.is_string(kind):
        made = uuid.UUID(bytes=hashlib.md5(placeholder.encode(), usedforsecurity=False).digest(), version=3)
        map_text = json.dumps({placeholder: placeholder}, separators=(",", ":"), ensure_ascii=False)
        return _among(values, [placeholder, map_text, str(made)])
    if t.is_binary(kind) or t.is_large_binary(kind):
        return _among(values, [placeholder.encode(), *_SHAPES])
    found = np.zeros(len(values), bool)
    if t.is_struct(kind):
        for part in values.flatten():
            found |= _lost(part, placeholder)
    if t.is_list(kind):
        sizes = pc.fill_null(pc.list_value_length(values), 0).to_numpy()
        element, own = kind.value_type, placeholder.encode()
        number = t.is_integer(element) or t.is_floating(element) or t.is_decimal(element) or t.is_boolean(element)
        maybe = np.flatnonzero(sizes == (len(own) if number else 1))
        if maybe.size:
            parts = values.take(pa.array(maybe)).flatten()
            found[maybe] = _are_bytes(parts, own) if number else _lost(parts, placeholder)
    return found


def _are_bytes(numbers: pa.Array, own: bytes) -> Lost:
    """Of lists of as many numbers as there are bytes, those that are the bytes; of decimals, in their units."""
    wanted = np.frombuffer(own, np.int8)
    if pa.types.is_boolean(numbers.type):
        return np.asarray(_floats(numbers).reshape(-1, wanted.size).all(axis=1))
    rows = _floats(numbers).reshape(-1, wanted.size)
    unit = rows[:, :1] / wanted[0]
    powers = 10.0 ** -np.arange(39 if pa.types.is_decimal(numbers.type) else 1)
    scaled = np.isclose(unit, powers, rtol=1e-9, atol=0).any(axis=1)
    return np.asarray(scaled & np.isclose(rows, wanted * unit, rtol=1e-9, atol=0).all(axis=1))


def _floats(numbers: pa.Array) -> npt.NDArray[np.float64]:
    plain = numbers.cast(pa.int8()) if pa.types.is_boolean(numbers.type) else numbers
    return np.asarray(pc.fill_null(plain.cast(pa.float64(), safe=False), np.nan).to_numpy(zero_copy_only=False))


def _among(values: pa.Array, known: list[str] | list[bytes]) -> Lost:
    found: Lost = pc.is_in(values, pa.array(known, values.type)).to_numpy(zero_copy_only=False)
    return found.copy()
