"""How values of declared types are written in JSON messages: numbers for times, base64 for bytes and exact numbers.

The rules are those of Kafka Connect's JSON converter and Debezium's "Data types" (``time.precision.mode``,
``decimal.handling.mode``, ``binary.handling.mode=bytes``), and of Spark's ``to_json``.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gpu_ops.files.casts import cast, cast_plain

TIMES: Final = ("ms", "us", "ns")
"""Times as numbers since 1970, in UTC, or in no zone where the type has none."""

ENCODINGS: Final = (*TIMES, "days", "base64", "text")
"""Besides: dates as days since 1970; decimals as base64 of their unscaled bytes, ``base64:2`` with that scale where it
is not the declared one; and what is the default, ISO 8601 or a number or text."""

NOT_FINITE: Final = ("NaN", "Infinity", "-Infinity")
"""How the floating-point numbers are written that JSON has none for: as texts."""

_ALPHABET: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_DECIMAL_BYTES: Final = 16


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
    return bool(t.is_timestamp(kind) if encoding in TIMES else t.is_decimal(kind))


def written(kind: pa.DataType, encoding: str, path: str, texts: Set[str]) -> pa.DataType:
    """The type in which Arrow reads values from JSON.

    Args:
        kind: the declared one.
        encoding: how they are written.
        path: their name, behind those of what they are in, as Arrow's errors have it.
        texts: of the paths of floating-point numbers those that are texts.
    """
    t = pa.types
    if t.is_struct(kind):
        return pa.struct([pa.field(x.name, written(x.type, encoding, f"{path}/{x.name}", texts)) for x in kind])
    if t.is_list(kind):
        return pa.list_(written(kind.value_type, encoding, f"{path}/[]", texts))
    if t.is_timestamp(kind):
        return pa.int64() if encoding in TIMES else pa.string()
    if t.is_date(kind):
        return kind if encoding == "days" else pa.string()
    if t.is_decimal(kind):
        return pa.string() if encoding.startswith("base64") else kind
    if t.is_binary(kind) or t.is_large_binary(kind) or (t.is_floating(kind) and path in texts):
        return pa.string()
    return kind


def decoded(values: pa.Array, kind: pa.DataType, encoding: str, zone: str) -> pa.Array:
    """Values as they were declared.

    Args:
        values: n of them, of the type that `written` says.
        kind: the declared one.
        encoding: how they are written.
        zone: of texts of times that name none, where they are to be instants.

    Raises:
        ArrowInvalid: one that is not written so, or that the type cannot hold.
    """

    def leaf(part: pa.Array, wanted: pa.DataType, within: str) -> pa.Array:
        t = pa.types
        if t.is_timestamp(wanted) and t.is_integer(part.type):
            return part.cast(pa.timestamp(encoding, wanted.tz)).cast(wanted, safe=encoding != "ns")
        if t.is_binary(wanted) or t.is_large_binary(wanted):
            return from_base64(part).cast(wanted)
        if t.is_decimal(wanted) and t.is_string(part.type):
            _, _, scale = encoding.partition(":")
            return unscaled(from_base64(part), int(scale) if scale else wanted.scale).cast(wanted)
        if t.is_floating(wanted) and t.is_string(part.type):
            texts = part.filter(pc.invert(pc.is_in(part, pa.array((*NOT_FINITE, None), pa.string()))))
            if len(texts):
                raise pa.ArrowInvalid(f"a text where a number is expected: {texts[0]}")
        return cast_plain(part, wanted, within)

    if "decimal" in str(values.type):
        values.validate(full=True)  # Arrow's reader lets some through that have a digit too many
    return cast(values, kind, zone, leaf)


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
    decimals = pa.Array.from_buffers(pa.decimal128(38, scale), len(values), buffers)
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
