"""Row kinds: what they mean, and the three encodings in which inputs bring them.

A changelog is a sequence of changes; folding it (``+I``, ``+U`` add a row, ``-U``, ``-D`` remove it)
gives the current table. Inside the pack a row kind is an int8 code in Flink's order
(``org.apache.flink.types.RowKind``): 0 ``+I``, 1 ``-U``, 2 ``+U``, 3 ``-D``. Rows handed out beside the
changelog, ``bad`` and ``late`` ones, have no code.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gpu_ops.errors import BadInputError
from gpu_ops.values import carried, sample

INSERT: Final = 0
UPDATE_BEFORE: Final = 1
UPDATE_AFTER: Final = 2
DELETE: Final = 3

ROW_KIND_COLUMN: Final = "row_kind"
ROW_KIND_NAMES: Final = (ROW_KIND_COLUMN, "op", "__op", "_change_type", "change_type", "kind", "rowkind")
"""What changelogs of other systems call theirs: Debezium, Delta, Flink."""
SHORT_STRINGS: Final = ("+I", "-U", "+U", "-D")
LONG_STRINGS: Final = ("insert", "update_before", "update_after", "delete")
"""What metrics call them."""

BAD_ROW_KIND: Final = "bad"
"""The row kind of a row handed out because it could not be joined (``bad_rows="tag"``)."""
FOLDED: Final = "changelog, folded"
"""What a snapshot calls the rows that changelogs have added up to; no input has such a name."""
LATE_ROW_KIND: Final = "late"
"""The row kind of a row handed out because it came too late (``late="tag"``)."""

#: Every spelling understood, with its code. Debezium's ``u`` and ``r`` carry the new row alone, so
#: an update needs a unique key to find the old one; that is what UPSERT marks.
FLINK: Final = {"+I": INSERT, "-U": UPDATE_BEFORE, "+U": UPDATE_AFTER, "-D": DELETE}
DELTA: Final = {"insert": INSERT, "update_preimage": UPDATE_BEFORE, "update_postimage": UPDATE_AFTER, "delete": DELETE}
DEBEZIUM: Final = {"c": INSERT, "r": INSERT, "u": UPDATE_AFTER, "d": DELETE}

_SHORT: Final = np.frombuffer("".join(SHORT_STRINGS).encode(), "u2")
_KEPT_OFFSETS: Final = 1 << 22
"""Offsets of texts of one width, at most, that are kept: they are the same for every changelog."""
_SPELLINGS: Final = {**FLINK, **DELTA, **DEBEZIUM}
SPELLINGS: Final = tuple(_SPELLINGS)
"""All of them; what stands where among them is what `codes_of` takes."""
_CODES: Final = np.array(list(_SPELLINGS.values()), np.int8)
RETRACTIONS: Final = tuple(text for text, code in _SPELLINGS.items() if code in (UPDATE_BEFORE, DELETE))
"""Spellings of row kinds that take a row back."""

_DEBEZIUM_UPDATE: Final = SPELLINGS.index("u")


def decode_row_kinds(
    column: pa.Array | pa.ChunkedArray, *, input_name: str, column_name: str, has_unique_key: bool
) -> npt.NDArray[np.int8]:
    """Row-kind codes of a column of strings in any of the three encodings.

    Args:
        column: n strings: Flink's short strings, Delta's ``_change_type`` or Debezium's ``op``.
        input_name: for the error.
        column_name: for the error.
        has_unique_key: whether the input has one; Debezium's ``u`` cannot do without.

    Returns:
        n codes.

    Raises:
        BadInputError: a null, an unknown spelling, or an update that names no old row.
    """
    column = _strings(column, input_name, column_name)
    quick = _decode_short(column, has_unique_key=has_unique_key)
    if quick is not None:
        return quick
    position = pc.index_in(column, _strings_of(SPELLINGS).cast(column.type))
    if position.null_count:
        bad = sample(column.filter(pc.is_null(position)))
        known = "+I -U +U -D, insert update_preimage update_postimage delete, or c u d r"
        raise BadInputError(input_name, column_name, f"unknown row kind; known are {known}", str(bad))
    codes = codes_of(position.to_numpy(zero_copy_only=False), has_unique_key=has_unique_key)
    if codes is None:
        raise BadInputError(
            input_name, column_name, "an update without its old row needs unique_key= on the input", "u"
        )
    return codes


def codes_of(index: npt.NDArray[Any], *, has_unique_key: bool) -> npt.NDArray[np.int8] | None:
    """Row-kind codes of n places among `SPELLINGS`; None if one is an update that names no old row."""
    if not has_unique_key and bool((index == _DEBEZIUM_UPDATE).any()):
        return None
    codes: npt.NDArray[np.int8] = _CODES[index]
    return codes


def adds(codes: npt.NDArray[np.int8]) -> npt.NDArray[np.bool_]:
    """Mask of the row kinds that bring a row."""
    mask: npt.NDArray[np.bool_] = (codes == INSERT) | (codes == UPDATE_AFTER)
    return mask


def known_row_kinds(column: pa.Array | pa.ChunkedArray, *, input_name: str, column_name: str) -> pa.Array:
    """Mask of the values that `decode_row_kinds` knows; other arguments and errors as there."""
    column = _strings(column, input_name, column_name)
    return pc.is_in(column, _strings_of(SPELLINGS).cast(column.type))


def _strings(column: pa.Array | pa.ChunkedArray, input_name: str, column_name: str) -> pa.Array:
    """A row-kind column in one piece, dictionaries decoded."""
    plain = carried(column.type)
    if plain not in (pa.string(), pa.large_string()):
        raise BadInputError(
            input_name, column_name, f"row kinds are strings, this column is {column.type}", sample(column)
        )
    column = column if column.type == plain else column.cast(plain)
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _decode_short(column: pa.Array, *, has_unique_key: bool) -> npt.NDArray[np.int8] | None:
    """Codes of a column without nulls whose spellings all have one length, 1 or 2; None where it is another.

    The bytes are looked up as numbers: a quarter of the time of looking up strings.
    """
    rows = len(column)
    if column.null_count or not rows:
        return None
    wide = pa.types.is_large_string(column.type)
    offsets = np.frombuffer(column.buffers()[1], np.int64 if wide else np.int32)[column.offset :][: rows + 1]
    width, rest = divmod(int(offsets[-1] - offsets[0]), rows)
    if rest or width not in (1, 2):
        return None
    simple = width == 2 and not wide and pa.py_buffer(offsets).equals(_short_offsets(rows))  # compared as bytes
    if not simple and bool((np.diff(offsets) != width).any()):
        return None
    spelled = np.frombuffer(column.buffers()[2], f"u{width}", rows, int(offsets[0]))
    codes: npt.NDArray[np.int8]
    if width == 2:  # Flink's, of which each is compared with all: a third of the time of looking them up
        codes = (spelled == _SHORT[UPDATE_BEFORE]).view(np.int8)
        codes += 2 * (spelled == _SHORT[UPDATE_AFTER]).view(np.int8)
        codes += 3 * (spelled == _SHORT[DELETE]).view(np.int8)
        return codes if bool(((codes != INSERT) | (spelled == _SHORT[INSERT])).all()) else None
    codes = _codes_of_letters(has_unique_key).take(spelled)
    return codes if bool((codes >= 0).all()) else None


@functools.cache
def _codes_of_letters(has_unique_key: bool) -> npt.NDArray[np.int8]:
    """By the number that a letter is: its code, or -1 for those that are not simply known."""
    codes = np.full(256, -1, np.int8)
    for text, code in DEBEZIUM.items():
        if text != "u" or has_unique_key:
            codes[ord(text)] = code
    return codes


def encode_row_kinds(codes: npt.NDArray[np.int8]) -> pa.Array:
    """The short strings of n row-kind codes."""
    even = codes.size - codes.size % 2
    texts = np.empty(codes.size, "u2")
    texts[even:] = _SHORT.take(codes[even:])
    # two at a time: half as many are looked up
    texts[:even].view("u4")[:] = _pairs_of_texts().take(np.ascontiguousarray(codes[:even]).view("u2"))
    return pa.Array.from_buffers(pa.string(), codes.size, [None, _short_offsets(codes.size), pa.py_buffer(texts)], 0)


@functools.cache
def _pairs_of_texts() -> npt.NDArray[np.uint32]:
    """By two row-kind codes side by side, as one number: their two short strings, as one."""
    codes = np.arange(len(SHORT_STRINGS), dtype=np.int8)
    both = np.stack([np.tile(codes, codes.size), np.repeat(codes, codes.size)], axis=1)
    numbers = both.view("u2").ravel()
    texts = np.zeros(int(numbers.max()) + 1, np.uint32)
    texts[numbers] = _SHORT.take(both).view("u4").ravel()
    return texts


def _short_offsets(rows: int) -> pa.Buffer:
    """The offsets of n texts of two bytes."""
    made = _kept_offsets if rows < _KEPT_OFFSETS else _made_offsets
    return made(1 << rows.bit_length()).slice(0, 4 * (rows + 1))


def _made_offsets(count: int) -> pa.Buffer:
    return pa.py_buffer(np.arange(0, 2 * count, 2, dtype=np.int32))


_kept_offsets = functools.cache(_made_offsets)


@functools.cache
def _strings_of(values: tuple[str, ...]) -> pa.Array:
    # On first use, not on import: making an array from a list imports pandas, which Spark's Python
    # workers, who only pass rows on, can do without.
    return pa.array(values, pa.string())
