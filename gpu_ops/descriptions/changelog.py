"""Row kinds: what they mean, and the three encodings in which inputs bring them.

A changelog is a sequence of changes; folding it (``+I``, ``+U`` add a row, ``-U``, ``-D`` remove it)
gives the current table. Inside the pack a row kind is an int8 code in Flink's order
(``org.apache.flink.types.RowKind``): 0 ``+I``, 1 ``-U``, 2 ``+U``, 3 ``-D``. Rows handed out beside the
changelog, ``bad`` and ``late`` ones, have no code. Between Spark's tasks and state servers, and in the log, a row kind
that comes in is one byte, too: the place of its spelling among `SPELLINGS`, the first four of which are those codes.
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
KIND_BYTES: Final = pa.uint8()
"""The type of row kinds as bytes: places among `SPELLINGS`, or `UNKNOWN`. No column of Spark's has it."""
UNKNOWN: Final = 255
"""The place of a text that is no row kind."""
_CODES: Final = np.array(list(_SPELLINGS.values()), np.int8)
WORDS: Final = (*SPELLINGS, BAD_ROW_KIND, LATE_ROW_KIND)
"""What the bytes of a changelog stand for, those of rows beside it included."""
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
    places = places_of(column, input_name=input_name, column_name=column_name, strict=True)
    codes = codes_of(places, has_unique_key=has_unique_key)
    if codes is None:
        raise BadInputError(
            input_name, column_name, "an update without its old row needs unique_key= on the input", "u"
        )
    return codes


def places_of(
    column: pa.Array | pa.ChunkedArray, *, input_name: str, column_name: str, strict: bool
) -> npt.NDArray[np.uint8]:
    """For each of n row kinds, be they texts or bytes already, its place among `SPELLINGS`, or `UNKNOWN`.

    Args:
        column: the row kinds.
        input_name: for the error.
        column_name: for the error.
        strict: whether an unknown one is an error.

    Raises:
        BadInputError: an unknown one, or the column has none.
    """
    places: npt.NDArray[np.uint8] | None
    if column.type == KIND_BYTES:
        column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        places = column.fill_null(UNKNOWN).to_numpy(zero_copy_only=False)
    else:
        column = _strings(column, input_name, column_name)
        places = _places_of_short(column)
        if places is None:
            index = pc.index_in(column, _strings_of(SPELLINGS).cast(column.type))
            places = index.fill_null(UNKNOWN).to_numpy(zero_copy_only=False).astype(np.uint8)
    if strict and places.size and int(places.max()) >= len(SPELLINGS):
        bad = sample(column, int(np.argmax(places >= len(SPELLINGS))))
        known = "+I -U +U -D, insert update_preimage update_postimage delete, or c u d r"
        raise BadInputError(input_name, column_name, f"unknown row kind; known are {known}", str(bad))
    return places


def kinds_as_bytes(rows: pa.RecordBatch, column_name: str, *, input_name: str, strict: bool) -> pa.RecordBatch:
    """Rows whose column of row kinds, of texts, is one of bytes.

    Args:
        rows: the rows.
        column_name: the name of that column.
        input_name: for the error.
        strict: whether a text that is no row kind is an error here; else it is `UNKNOWN`.

    Raises:
        BadInputError: such a text, or the column has none.
    """
    at, column = rows.schema.get_field_index(column_name), rows[column_name]
    places = places_of(column, input_name=input_name, column_name=column_name, strict=strict)
    return rows.set_column(at, pa.field(column_name, KIND_BYTES), pa.array(places))


def kinds_as_text(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """The texts of a column of row kinds, be they bytes or texts already; null for `UNKNOWN`."""
    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if column.type != KIND_BYTES:
        return column.cast(pa.string())
    places = column.to_numpy()
    if places.size and int(places.max()) < len(SHORT_STRINGS):
        return encode_row_kinds(places.view(np.int8))
    return _strings_of(WORDS).take(pa.array(places, mask=places >= len(WORDS)))


def readable_changes(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Rows of a changelog with row kinds as texts, where they came as bytes."""
    if not rows.num_columns or rows.schema.field(0).type != KIND_BYTES:
        return rows
    return rows.set_column(0, rows.schema.field(0).with_type(pa.string()), kinds_as_text(rows.column(0)))


def codes_of(index: npt.NDArray[Any], *, has_unique_key: bool) -> npt.NDArray[np.int8] | None:
    """Row-kind codes of n places among `SPELLINGS`; None if one is an update that names no old row."""
    if index.size and index.itemsize == 1 and int(index.max()) < len(SHORT_STRINGS):  # places of Flink's are the codes
        short: npt.NDArray[np.int8] = index.view(np.int8)
        return short
    if not has_unique_key and bool((index == _DEBEZIUM_UPDATE).any()):
        return None
    codes: npt.NDArray[np.int8] = _CODES[index]
    return codes


def adds(codes: npt.NDArray[np.int8]) -> npt.NDArray[np.bool_]:
    """Mask of the row kinds that bring a row."""
    mask: npt.NDArray[np.bool_] = (codes == INSERT) | (codes == UPDATE_AFTER)
    return mask


def _strings(column: pa.Array | pa.ChunkedArray, input_name: str, column_name: str) -> pa.Array:
    """A row-kind column in one piece, dictionaries decoded."""
    plain = carried(column.type)
    if plain not in (pa.string(), pa.large_string()):
        raise BadInputError(
            input_name, column_name, f"row kinds are strings, this column is {column.type}", sample(column)
        )
    column = column if column.type == plain else column.cast(plain)
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _places_of_short(column: pa.Array) -> npt.NDArray[np.uint8] | None:
    """Places of a column without nulls whose spellings all have one length, 1 or 2; None where it is another.

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
    places: npt.NDArray[np.uint8]
    if width == 2:  # Flink's, of which each is compared with all: a third of the time of looking them up
        places = (spelled == _SHORT[UPDATE_BEFORE]).view(np.uint8)
        places += 2 * (spelled == _SHORT[UPDATE_AFTER]).view(np.uint8)
        places += 3 * (spelled == _SHORT[DELETE]).view(np.uint8)
        return places if bool(((places != INSERT) | (spelled == _SHORT[INSERT])).all()) else None
    return _places_of_letters().take(spelled)


@functools.cache
def _places_of_letters() -> npt.NDArray[np.uint8]:
    """By the number that a letter is: its place among `SPELLINGS`."""
    places = np.full(256, UNKNOWN, np.uint8)
    for text in DEBEZIUM:
        places[ord(text)] = SPELLINGS.index(text)
    return places


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
