"""Deletion vectors of a Delta table: which rows of a data file are deleted, without another file in its place.

The format is that of Delta's PROTOCOL.md, "Deletion Vector Format": a 64-bit roaring bitmap behind a magic number, in
the log itself (Z85) or in a file with a checksum. The package pyroaring reads bitmaps.
"""

from __future__ import annotations

import struct
import urllib.parse
import uuid
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from gpu_ops.arrays import Ints
from gpu_ops.errors import optional_module

_MAGIC: Final = 1681511377
_FILE_VERSION: Final = 1
_UUID_LENGTH: Final = 20

_Z85: Final = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_DIGITS: Final = np.full(256, -1, np.int64)
_DIGITS[np.frombuffer(_Z85, np.uint8)] = np.arange(len(_Z85))
_PLACES: Final = 85 ** np.arange(4, -1, -1, dtype=np.int64)


def deleted_rows(vector: Mapping[str, Any] | None, table: str, read: Callable[[str, int, int], bytes]) -> Ints:
    """The deleted rows of a data file, ascending, counted from 0.

    Args:
        vector: ``deletionVector`` of an action; None for no deleted rows.
        table: the folder, as Hadoop writes it.
        read: gives so many bytes of a file from an offset on.

    Raises:
        NotBuiltError: the package pyroaring is not installed.
        ValueError: it is damaged, or of another kind.
    """
    if vector is None:
        return np.zeros(0, np.int64)
    kind, text, size = vector["storageType"], vector["pathOrInlineDv"], int(vector["sizeInBytes"])
    if kind == "i":
        data = _decoded(text)[:size]
    elif kind in ("u", "p"):
        uri = urllib.parse.unquote(text) if kind == "p" else f"{table}/{_file_of(text)}"
        data = _of_file(uri, int(vector.get("offset") or 0), size, read)
    else:
        raise ValueError(f"a deletion vector of storage type {kind!r}")
    rows = _rows(data)
    if len(rows) != vector["cardinality"]:
        raise ValueError(f"a deletion vector has {len(rows)} rows, and its action says {vector['cardinality']}")
    return rows


def _file_of(text: str) -> str:
    prefix, name = text[:-_UUID_LENGTH], text[-_UUID_LENGTH:]
    file = f"deletion_vector_{uuid.UUID(bytes=_decoded(name))}.bin"
    return f"{prefix}/{file}" if prefix else file


def _decoded(text: str) -> bytes:
    """The bytes of a text in ZeroMQ's base 85.

    No four bytes begin with ``#``. So the package z85 of Rust, of delta-rs, writes less than four at the end: with a
    ``#`` for each that there is not.
    """
    end = text[-5:]
    lacking = len(end) - len(end.lstrip("#"))
    digits = _DIGITS[np.frombuffer((text[:-5] + end.replace("#" * lacking, "0" * lacking, 1)).encode(), np.uint8)]
    if len(digits) % 5 == 0 and (digits >= 0).all():
        numbers = digits.reshape(-1, 5) @ _PLACES
        if not (numbers >> 32).any():
            data = bytes(numbers.astype(">u4").tobytes())
            return data[:-4] + data[-4:][lacking:]
    raise ValueError(f"a deletion vector's text is not base 85: {text[:40]!r}")


def _of_file(uri: str, offset: int, size: int, read: Callable[[str, int, int], bytes]) -> bytes:
    version = read(uri, 0, 1)
    if version != bytes([_FILE_VERSION]):
        raise ValueError(f"{uri} is of version {version!r}, and no file of deletion vectors that is known")
    framed = read(uri, offset, size + 8)
    if len(framed) != size + 8:
        raise ValueError(f"{uri} ends within the deletion vector at byte {offset}")
    data = framed[4:-4]
    if struct.unpack(">i", framed[:4]) != (size,) or struct.unpack(">I", framed[-4:]) != (zlib.crc32(data),):
        raise ValueError(f"the deletion vector at byte {offset} of {uri} is damaged: its size or checksum is wrong")
    return data


def _rows(data: bytes) -> Ints:
    pyroaring = optional_module("pyroaring", "deletion vectors need pyroaring: pip install 'gpu-join[delta]'")
    if data[:4] != struct.pack("<i", _MAGIC):
        raise ValueError(f"a deletion vector begins with {data[:4]!r}, of a format that is not known")
    return np.array(pyroaring.BitMap64.deserialize(data[4:]).to_array(), np.int64)
