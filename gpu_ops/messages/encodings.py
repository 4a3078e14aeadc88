"""How values of declared types are written in JSON messages: numbers for times, base64 for bytes and exact numbers.

The rules are those of Kafka Connect's JSON converter and Debezium's "Data types" (``time.precision.mode``,
``decimal.handling.mode``, ``binary.handling.mode``), and of Spark's ``to_json``.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gpu_ops.files.casts import cast_plain
from gpu_ops.messages.semantics import ELEMENT, SCALED, UUID, Place

TIMES: Final = ("ms", "us", "ns")
"""Times as numbers since 1970, in UTC, or in no zone where the type has none."""

ENCODINGS: Final = (*TIMES, "days", "base64", "base64-url-safe", "hex", "text")
"""Besides: dates as days since 1970; bytes as base64 or hex; decimals as base64 of their unscaled bytes, ``base64:2``
with that scale where it is not the declared one; and what is the default, ISO 8601 or a number or text."""

NOT_FINITE: Final = ("NaN", "Infinity", "-Infinity")
"""How the floating-point numbers are written that JSON has none for: as texts."""

_ALPHABET: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_DECIMAL_BYTES: Final = 16
_DIGITS: Final = 38


def holds(kind: pa.DataType) -> bool:
    """Whether messages have values of a type."""
    t = pa.types
    if t.is_list(kind) or t.is_struct(kind):
        return all(holds(kind.field(part).type) for part in range(kind.num_fields))
    return not (t.is_nested(kind) or t.is_duration(kind) or t.is_time(kind) or t.is_null(kind))


def fits(encoding: str, kind: pa.DataType) -> bool:
    """Whether values of a type, or of one within it, may be written so."""
    t = pa.types
    if t.is_list(kind) or t.is_struct(kind):
        return any(fits(encoding, kind.field(part).type) for part in range(kind.num_fields))
    if encoding == "text":
        return True
    if encoding == "days":
        return bool(t.is_date(kind))
    if encoding in TIMES:
        return bool(t.is_timestamp(kind))
    return _is_bytes(kind) or (encoding == "base64" and bool(t.is_decimal(kind)))


Ways = Callable[[Place], str]
"""How a value in some place is written."""


def written(kind: pa.DataType, place: Place, ways: Ways, path: str, texts: Set[str], *, json: bool) -> pa.DataType:
    """The type in which Arrow has values before they are decoded.

    Args:
        kind: the declared one.
        place: where they are.
        ways: how they are written.
        path: their name, behind those of what they are in, as Arrow's errors have it.
        texts: paths of floating-point numbers that are texts, and of decimals in base64 that are numbers.
        json: whether Arrow reads them from JSON, and not from Python's own values.
    """
    t, encoding = pa.types, ways(place)
    if t.is_struct(kind):
        return pa.struct(
            [
                pa.field(x.name, written(x.type, (*place, x.name), ways, f"{path}/{x.name}", texts, json=json))
                for x in kind
            ]
        )
    if t.is_list(kind):
        return pa.list_(written(kind.value_type, (*place, ELEMENT), ways, f"{path}/[]", texts, json=json))
    data = pa.string() if json else pa.binary()
    if encoding == SCALED:
        return pa.struct([("scale", pa.int32()), ("value", data)])
    if encoding == UUID:
        return data
    if t.is_timestamp(kind):
        return pa.int64() if encoding in TIMES else pa.string()
    if t.is_date(kind):
        return pa.int32() if encoding == "days" else pa.string()
    if t.is_decimal(kind) and encoding.startswith("base64"):
        return kind if path in texts else data
    if _is_bytes(kind):
        return data
    return pa.string() if t.is_floating(kind) and path in texts else kind


class How(NamedTuple):
    """How values are decoded.

    Attributes:
        ways: how they are written.
        zone: of texts of times that name none, where they are to be instants.
        unavailable: the text that stands for bytes which a message does not carry, whatever bytes are written as.
    """

    ways: Ways
    zone: str
    unavailable: str


def decoded(values: pa.Array, kind: pa.DataType, place: Place, how: How) -> pa.Array:
    """Values as they were declared.

    Args:
        values: n of them, of the type that `written` says.
        kind: the declared one.
        place: where they are.
        how: see there.

    Raises:
        ArrowInvalid: one that is not written so, or that the type cannot hold.
    """
    t, encoding, unavailable = pa.types, how.ways(place), how.unavailable
    if t.is_nested(kind):
        if values.offset:
            values = values.take(pa.array(np.arange(len(values))))  # its parts would not begin where it does
        if t.is_list(kind):
            items = decoded(values.values, kind.value_type, (*place, ELEMENT), how)
            return pa.ListArray.from_arrays(values.offsets, items, type=kind, mask=values.is_null())
        below = dict(zip(values.type.names, values.flatten(), strict=True))  # null where the struct is
        parts = [decoded(below[x.name], x.type, (*place, x.name), how) for x in kind]
        return pa.StructArray.from_arrays(parts, fields=list(kind), mask=values.is_null())
    if encoding == SCALED:
        return _scaled(values, kind)
    if t.is_timestamp(kind) and t.is_integer(values.type):
        return _instants(values, encoding, kind)
    if t.is_date(kind) and t.is_integer(values.type):
        return values.cast(pa.date32()).cast(kind)
    if t.is_decimal(kind) and (t.is_string(values.type) or t.is_binary(values.type)) and encoding.startswith("base64"):
        _, _, scale = encoding.partition(":")
        return unscaled(_bytes_of(values), int(scale) if scale else kind.scale).cast(kind)
    if encoding == UUID:
        return _uuids(values)
    if _is_bytes(kind) and t.is_string(values.type):
        missing = pc.fill_null(pc.equal(values, unavailable), fill_value=False)
        known = from_text(pc.if_else(missing, pa.scalar(None, pa.string()), values), encoding)
        return pc.if_else(missing, pa.scalar(unavailable.encode(), pa.binary()), known).cast(kind)
    if t.is_floating(kind) and t.is_string(values.type):
        texts = values.filter(pc.invert(pc.is_in(values, pa.array((*NOT_FINITE, None), pa.string()))))
        if len(texts):
            raise pa.ArrowInvalid(f"a text where a number is expected: {texts[0]}")
    if t.is_decimal(values.type):
        values.validate(full=True)  # Arrow's reader lets some through that have a digit too many
    return values if values.type == kind else cast_plain(values, kind, how.zone)


def _instants(values: pa.Array, unit: str, kind: pa.DataType) -> pa.Array:
    """Times of numbers since 1970; of nanoseconds the microsecond that they are in, before 1970, too."""
    if unit == "ns" and kind.unit == "us":
        floor = np.floor_divide(pc.fill_null(values, 0).to_numpy(), 1000)
        values, unit = pa.array(floor, mask=values.is_null().to_numpy(zero_copy_only=False)), "us"
    return values.cast(pa.timestamp(unit, kind.tz)).cast(kind)


def _scaled(values: pa.StructArray, kind: pa.DataType) -> pa.Array:
    """Decimals of n scales and unscaled bytes; of each scale together."""
    scales, data = values.flatten()
    if pc.any(pc.and_(values.is_valid(), pc.or_(scales.is_null(), data.is_null()))).as_py():
        raise pa.ArrowInvalid("a decimal without its scale or its bytes")
    found, places = [pa.nulls(1, kind)], np.zeros(len(values), np.int64)
    for scale in pc.unique(scales.drop_null()).to_pylist():
        mine = np.flatnonzero(pc.fill_null(pc.equal(scales, scale), fill_value=False).to_numpy(zero_copy_only=False))
        if not 0 <= scale <= _DIGITS:
            raise pa.ArrowInvalid(f"a decimal with the scale {scale}")
        places[mine] = sum(map(len, found)) + np.arange(mine.size)
        found.append(unscaled(_bytes_of(data.take(pa.array(mine))), scale).cast(kind))
    return pa.concat_arrays(found).take(pa.array(places))


def _uuids(values: pa.BinaryArray) -> pa.StringArray:
    """UUIDs of n times 16 bytes, as RFC 9562 writes them."""
    texts = to_hex(values)
    cuts = ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32))
    return pc.binary_join_element_wise(*(pc.utf8_slice_codeunits(texts, *cut) for cut in cuts), "-")


def _bytes_of(values: pa.Array) -> pa.BinaryArray:
    return from_base64(values) if pa.types.is_string(values.type) else values


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def from_text(texts: pa.StringArray, encoding: str) -> pa.BinaryArray:
    """Bytes of n texts.

    Args:
        texts: n of them.
        encoding: ``hex``, ``base64`` or ``base64-url-safe``; else base64 where that is sure, as a text such as
            ``deadbeef`` may as well be hex (Debezium's ``binary.handling.mode``).

    Raises:
        ArrowInvalid: a text that is none, or may be either.
    """
    if encoding == "hex":
        return from_hex(texts)
    if encoding == "base64-url-safe":
        wrong = texts.filter(pc.match_substring_regex(texts, "[+/]"))
        if len(wrong):
            raise pa.ArrowInvalid(f"no base64-url-safe: {wrong[0]}")
        texts = pc.replace_substring(pc.replace_substring(texts, "-", "+"), "_", "/")
    elif encoding != "base64":
        either = texts.filter(pc.match_substring_regex(texts, "^([0-9a-f]{2})+$"))
        if len(either):
            raise pa.ArrowInvalid(f"hex or base64? Say by encoded= which it is: {either[0]}")
    return from_base64(texts)


def from_hex(texts: pa.StringArray) -> pa.BinaryArray:
    """Bytes of n texts of two digits a byte.

    Raises:
        ArrowInvalid: a text that is none.
    """
    wrong = texts.filter(pc.invert(pc.match_substring_regex(texts, "^([0-9a-fA-F]{2})*$")))
    if len(wrong):
        raise pa.ArrowInvalid(f"no hex: {wrong[0]}")
    valid = texts.is_valid()
    full = texts.filter(valid)
    return _scattered(np.frombuffer(bytes.fromhex(_data(full).decode()), np.uint8), _lengths(full) // 2, valid)


def to_hex(values: pa.BinaryArray) -> pa.StringArray:
    """Texts of two digits a byte."""
    valid = values.is_valid()
    full = values.filter(valid)
    digits = np.frombuffer(_data(full).hex().encode(), np.uint8)
    return _scattered(digits, 2 * _lengths(full), valid).view(pa.string())


def _lengths(values: pa.Array) -> npt.NDArray[np.int64]:
    lengths: npt.NDArray[np.int64] = pc.binary_length(values).to_numpy().astype(np.int64)
    return lengths


def from_base64(texts: pa.StringArray) -> pa.BinaryArray:
    """Bytes of n texts in base64 (RFC 4648, padded).

    Raises:
        ArrowInvalid: a text that is no base64.
    """
    valid = texts.is_valid()
    full = texts.filter(valid)
    lengths = pc.binary_length(full).to_numpy()
    digits = np.frombuffer(_data(full), np.uint8)
    sixes = _digits()[digits]
    ends = np.cumsum(lengths)
    some = lengths > 0
    padded = np.zeros(len(full), np.int64)
    if digits.size and not (lengths % 4).any():
        last = ends[some] - 1
        padded[some] = (digits[last] == ord("=")).astype(np.int64) + (digits[last - 1] == ord("="))
    allowed = np.repeat(padded, lengths) >= np.repeat(ends, lengths) - np.arange(digits.size)
    if (lengths % 4).any() or ((sixes < 0) & ~((digits == ord("=")) & allowed)).any():
        wrong = next(text for text in full.to_pylist() if not _is_base64(text))
        raise pa.ArrowInvalid(f"no base64: {wrong}")
    quads = np.where(sixes < 0, 0, sixes).reshape(-1, 4)
    number = quads[:, 0] << 18 | quads[:, 1] << 12 | quads[:, 2] << 6 | quads[:, 3]
    three = np.stack([number >> 16, number >> 8 & 255, number & 255], axis=1).astype(np.uint8).reshape(-1)
    sizes = lengths // 4 * 3
    kept = np.repeat(padded, sizes) < np.repeat(np.cumsum(sizes), sizes) - np.arange(three.size)
    return _scattered(three[kept], sizes - padded, valid)


def to_base64(values: pa.BinaryArray) -> pa.StringArray:
    """Texts in base64 (RFC 4648, padded) of n values of bytes."""
    sizes = pc.fill_null(pc.binary_length(values), 0).to_numpy().astype(np.int64)
    data, groups = np.frombuffer(_data(pc.fill_null(values, b"")), np.uint8), -(-sizes // 3)
    three = np.zeros(3 * int(groups.sum()), np.uint8)
    three[np.arange(data.size) + np.repeat(3 * (np.cumsum(groups) - groups) - np.cumsum(sizes) + sizes, sizes)] = data
    parts = three.reshape(-1, 3).astype(np.int64)
    number = parts[:, 0] << 16 | parts[:, 1] << 8 | parts[:, 2]
    digits = np.frombuffer(_ALPHABET, np.uint8)[np.stack([number >> at & 63 for at in (18, 12, 6, 0)], axis=1)].reshape(
        -1
    )
    ends, missing = 4 * np.cumsum(groups), 3 * groups - sizes
    digits[ends[missing > 0] - 1] = ord("=")
    digits[ends[missing > 1] - 2] = ord("=")
    there = values.is_valid()
    return _scattered(digits, 4 * groups[there.to_numpy(zero_copy_only=False)], there).view(pa.string())


def unscaled(values: pa.BinaryArray, scale: int) -> pa.Array:
    """Decimals of n numbers in big-endian two's complement, as Java's ``BigInteger`` has them.

    Raises:
        ArrowInvalid: one of no bytes, or of more than 38 digits.
    """
    lengths = pc.binary_length(values).fill_null(1).to_numpy()
    if ((lengths < 1) | (lengths > _DECIMAL_BYTES)).any():
        raise pa.ArrowInvalid("a decimal of no bytes, or of more than 16")
    full = pc.fill_null(values, b"\0")
    data = np.frombuffer(_data(full), np.uint8)
    starts = np.cumsum(lengths) - lengths
    sign = np.where(data[starts] >= 0x80, 255, 0).astype(np.uint8) if len(full) else np.zeros(0, np.uint8)
    made = np.repeat(sign[:, None], _DECIMAL_BYTES, axis=1)
    for place in range(int(lengths.max(initial=0))):
        rows = np.flatnonzero(lengths > place)
        made[rows, place] = data[starts[rows] + lengths[rows] - 1 - place]
    mask = pa.array(values.is_valid().to_numpy(zero_copy_only=False)).buffers()[1]
    buffers = [mask, pa.py_buffer(np.ascontiguousarray(made))]
    decimals = pa.Array.from_buffers(pa.decimal128(_DIGITS, scale), len(values), buffers)
    decimals.validate(full=True)
    return decimals


def _digits() -> npt.NDArray[np.int64]:
    table = np.full(256, -1, np.int64)
    table[np.frombuffer(_ALPHABET, np.uint8)] = np.arange(64)
    return table


def _is_base64(text: str) -> bool:
    bare = text.rstrip("=")
    return len(text) % 4 == 0 and len(text) - len(bare) <= 2 and all(x.encode() in _ALPHABET for x in bare)


def _data(values: pa.Array) -> bytes:
    """The bytes of n texts, one behind the other."""
    joined = pc.binary_join(pa.ListArray.from_arrays([0, len(values)], values.view(pa.binary())), b"")
    return bytes(joined[0].as_py())


def _scattered(data: npt.NDArray[np.uint8], sizes: npt.NDArray[np.int64], valid: pa.BooleanArray) -> pa.BinaryArray:
    """Bytes cut into pieces, which are the values of the valid rows, in order."""
    there = valid.to_numpy(zero_copy_only=False)
    all_sizes = np.zeros(len(valid), np.int64)
    all_sizes[there] = sizes
    offsets = np.concatenate([[0], np.cumsum(all_sizes)]).astype(np.int32)
    buffers = [pa.array(there).buffers()[1], pa.py_buffer(offsets), pa.py_buffer(data.tobytes())]
    return pa.Array.from_buffers(pa.binary(), len(valid), buffers)
