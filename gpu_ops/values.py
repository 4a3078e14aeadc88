"""Arrow columns as the pack takes them in: which types it carries, casts, damage, text that is none or too long.

Arrow does not look at the bytes of its text, and Spark's ``cast(value AS STRING)`` leaves bytes as they are that are no
UTF-8: what comes as text may be any bytes. Columns come in pieces, and leave in pieces; between, a backend has them in
one, and where the text of a column is more than 2 GiB, Arrow's ordinary offsets of 32 bits do not reach.

Times of CSV, JSON and ORC files are written as text, or without the zone that they are of (`cast_plain`).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gpu_ops.arrays import Mask
from gpu_ops.zones import in_zone

_DEEPEST: Final = 64
"""Types within types; beyond, walking them would end Python's stack."""

_VIEWS: Final = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}
_BYTES: Final = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}
_CARRIED: Final = (
    pa.types.is_boolean, pa.types.is_integer, pa.types.is_float32, pa.types.is_float64, pa.types.is_decimal128,
    pa.types.is_temporal, pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary,
    pa.types.is_null, pa.types.is_list, pa.types.is_large_list, pa.types.is_map,
)  # fmt: skip

# A character in UTF-8 (RFC 3629): neither overlong, nor half of a surrogate pair, nor beyond U+10FFFF.
_CHARACTER: Final = (
    r"(?:[\x00-\x7f]|[\xc2-\xdf][\x80-\xbf]|\xe0[\xa0-\xbf][\x80-\xbf]|[\xe1-\xec\xee\xef][\x80-\xbf]{2}"
    r"|\xed[\x80-\x9f][\x80-\xbf]|\xf0[\x90-\xbf][\x80-\xbf]{2}|[\xf1-\xf3][\x80-\xbf]{3}|\xf4[\x80-\x8f][\x80-\xbf]{2})"
)

_SHOWN: Final = 60
"""Bytes of text that an error shows."""

MOST_TEXT = (1 << 31) - 1
"""Bytes of text that an array with offsets of 32 bits holds."""

_WIDE: Final = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}
_ZONED: Final = r"(Z|[+-]\d{2}(:?\d{2})?)$"
_CLOCK: Final = r":\d{2}"
_BELOW_MICROSECONDS: Final = r"(\.\d{6})\d+"
_WITH_MICROSECONDS: Final = len("2026-01-01T00:00:00.000000")

_NARROW: Final = {wide: narrow for narrow, wide in _WIDE.items()}


def rebuilt(
    kind: pa.DataType, change: Callable[[pa.DataType], pa.DataType], *, bare: bool = False, depth: int = 0
) -> pa.DataType:
    """A type changed, and all types within it, from the outside in.

    Args:
        kind: the type.
        change: gives one type for another; what is within is not its business.
        bare: leave out what no value depends on: whether lists are large, nullability, names of lists' items.
        depth: how deep it is within another.

    Raises:
        ArrowInvalid: types within types within types, too deep to be walked.
    """
    if depth > _DEEPEST:
        raise pa.ArrowInvalid(f"a type within more than {_DEEPEST} others")
    t, kind = pa.types, change(kind)

    def field(part: pa.Field) -> pa.Field:
        inner = rebuilt(part.type, change, bare=bare, depth=depth + 1)
        name = part.name if t.is_struct(kind) or t.is_map(kind) else "item"
        return pa.field(name, inner) if bare else part.with_type(inner)

    if t.is_struct(kind):
        return pa.struct([field(part) for part in kind])
    if t.is_map(kind):
        return pa.map_(
            field(kind.key_field).with_nullable(False), field(kind.item_field), kind.keys_sorted and not bare
        )
    if t.is_list(kind) or t.is_large_list(kind):
        return (pa.list_ if bare or t.is_list(kind) else pa.large_list)(field(kind.value_field))
    return pa.list_(field(kind.value_field), kind.list_size) if t.is_fixed_size_list(kind) else kind


def carried(kind: pa.DataType) -> pa.DataType | None:
    """The type in which a column of some type is carried: its own, but without dictionaries and views.

    Returns:
        None for a type that is not carried: extension, union, run-end encoded, list view, interval, half float, a
        decimal other than decimal128, a dictionary of nested values, and what has no bytes (``binary(0)``).
    """
    try:
        return rebuilt(kind, _carried)
    except pa.ArrowInvalid:
        return None


def _carried(kind: pa.DataType) -> pa.DataType:
    t = pa.types
    coded = t.is_dictionary(kind)
    while t.is_dictionary(kind):
        kind = kind.value_type
    kind = _VIEWS.get(kind, kind)
    if t.is_struct(kind):
        fine = 0 < kind.num_fields == len({field.name for field in kind})
    elif t.is_fixed_size_list(kind):
        fine = kind.list_size > 0
    elif t.is_fixed_size_binary(kind):
        fine = kind.byte_width > 0
    else:
        fine = any(is_one(kind) for is_one in _CARRIED) and kind != pa.month_day_nano_interval()
    if not fine or (coded and t.is_nested(kind)):
        raise pa.ArrowInvalid(f"{kind} is not carried")
    return kind


def typed(columns: Sequence[pa.Array], schema: pa.Schema) -> pa.RecordBatch:
    """A record batch of the given columns, cast to the types of a schema."""
    columns = [c if c.type == kind else c.cast(kind) for c, kind in zip(columns, schema.types, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def with_types(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """A table's columns, by position, in the types of a schema: a column that has its type stays as it is.

    Arrow's own cast of a table casts those, too, and breaks nested columns of nulls on the way.
    """
    pairs = zip(table.columns, schema.types, strict=True)
    return pa.Table.from_arrays([c if c.type == kind else c.cast(kind) for c, kind in pairs], schema=schema)


def types_within(kind: pa.DataType) -> Iterator[pa.DataType]:
    """Yields a type and all types within it, from the outside in."""
    yield kind
    if pa.types.is_nested(kind):
        for number in range(kind.num_fields):
            yield from types_within(kind.field(number).type)


def has_text(kind: pa.DataType) -> bool:
    """Tells whether there is text in a type, at any depth."""
    return any(pa.types.is_string(part) or pa.types.is_large_string(part) for part in types_within(kind))


def as_bytes(array: pa.Array) -> pa.Array:
    """An array with the bytes of its text; nothing is copied. One of lists, maps or structs stays as it is."""
    kind = _BYTES.get(array.type, array.type)
    return array if kind == array.type else array.view(kind)


def check_array(array: pa.Array) -> None:
    """Refuses an array from outside whose buffers do not hold what they should; text may be any bytes.

    Arrow trusts its arrays: an offset or an index beyond the end, or a false number of nulls, reads foreign memory or
    ends the process. Text that is no UTF-8 does neither; whether such rows are taken is for the one who takes them.

    Raises:
        ArrowException: what is wrong with it.
    """
    array.validate()
    t, kind = pa.types, array.type
    if isinstance(array, pa.DictionaryArray):
        check_array(array.indices)
        check_array(array.dictionary)
        pa.DictionaryArray.from_arrays(array.indices, pa.nulls(len(array.dictionary)))  # refuses indices beyond the end
        return
    if not t.is_nested(kind):
        as_bytes(array).validate(full=True)
        return
    # Part by part: Arrow has no view of nulls behind a null struct where a field is never null, as Spark writes them,
    # and a wrong one of nulls within a map.
    if t.is_struct(kind):
        parts, bare = [array.field(number) for number in range(kind.num_fields)], pa.struct([])
    elif t.is_map(kind):
        parts, bare = [array.keys, array.items], pa.list_(pa.null())
    elif t.is_fixed_size_list(kind):
        parts, bare = [array.values], pa.list_(pa.null(), kind.list_size)
    else:
        parts, bare = [array.values], (pa.large_list if t.is_large_list(kind) else pa.list_)(pa.null())
    for part in parts:
        check_array(part)
    places, buffers = [pa.nulls(len(parts[0]))] * bare.num_fields, array.buffers()[: bare.num_buffers]
    pa.Array.from_buffers(bare, len(array), buffers, array.null_count, array.offset, places).validate(full=True)


def equal_codes(values: pa.Array) -> npt.NDArray[np.int64]:
    """Numbers from 0 on that are the same where values are, at any depth: null is null, NaN is NaN, -0.0 is 0.0."""
    t, kind = pa.types, values.type
    if t.is_null(kind):
        return np.zeros(len(values), np.int64)
    if t.is_struct(kind):
        found, count = values.is_valid().to_numpy(zero_copy_only=False).astype(np.int64), 2
        for part in values.flatten():
            codes = _codes_with_gaps(part)
            own = int(codes.max(initial=0)) + 1
            if count > (1 << 62) // own:
                found = _numbered(pa.array(found))
                count = int(found.max(initial=0)) + 1
            found, count = found * own + codes, count * own
        return _numbered(pa.array(found))
    if t.is_nested(kind):
        lists = _as_list(values) if t.is_map(kind) else values
        ends = np.cumsum(pc.list_value_length(lists).fill_null(0).to_numpy().astype(np.int64) * 8)
        # the numbers of each list's items as bytes, which Arrow tells apart
        offsets = np.concatenate([np.zeros(1, np.int64), ends])
        items = pa.py_buffer(equal_codes(lists.flatten()))
        texts = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(values), [None, pa.py_buffer(offsets), items])
        return equal_codes(pa.StructArray.from_arrays([texts], names=["items"], mask=values.is_null()))
    if t.is_floating(kind):
        values = pc.add(values, pa.scalar(0.0, kind))  # -0.0 becomes 0.0, and all NaN one
        values = pc.if_else(pc.is_nan(values), pa.scalar(np.nan, kind), values)
    return _numbered(as_bytes(values))


def _codes_with_gaps(values: pa.Array) -> npt.NDArray[np.int64]:
    """Numbers as of `equal_codes`, but integers that lie close together are their own."""
    if not pa.types.is_integer(values.type) or values.null_count == len(values):
        return equal_codes(values)
    least, most = pc.min_max(values).as_py().values()
    if most - least > 2 * len(values):
        return equal_codes(values)
    wide = np.uint64 if pa.types.is_unsigned_integer(values.type) else np.int64
    integers = values.fill_null(least).to_numpy(zero_copy_only=False).astype(wide)
    codes: npt.NDArray[np.int64] = (integers - wide(least)).astype(np.int64)
    if values.null_count:
        codes = np.where(values.is_null().to_numpy(zero_copy_only=False), most - least + 1, codes)
    return codes


def _numbered(values: pa.Array) -> npt.NDArray[np.int64]:
    found: npt.NDArray[np.int64] = values.dictionary_encode("encode").indices.to_numpy().astype(np.int64)
    return found


def one_array(column: pa.ChunkedArray) -> pa.Array:
    """A column in one piece; with large offsets where others do not reach."""
    if column.num_chunks == 1:
        return column.chunk(0)
    wide = _WIDE.get(column.type)
    if wide is not None and column.nbytes > MOST_TEXT:  # Arrow does not put together what offsets cannot reach
        column = column.cast(wide)
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # of some types, or where there is no chunk at all
        return pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    return array


def beyond_offsets(array: pa.Array) -> bool:
    """Tells whether an array has large offsets, and needs them."""
    if array.type not in _NARROW or not len(array):
        return False
    offsets = _offsets(array)
    return int(offsets[-1] - offsets[0]) > MOST_TEXT


def fitted(array: pa.Array, kind: pa.DataType) -> list[pa.Array]:
    """An array in another type; in pieces, if that one's offsets do not reach."""
    if array.type == kind:
        return [array]
    if kind not in _NARROW and beyond_offsets(array):
        return [piece if piece.type == kind else piece.cast(kind) for piece in narrow(array)]
    return [array.cast(kind)]


def narrow(array: pa.Array) -> list[pa.Array]:
    """Text with large offsets in pieces with ordinary ones; nothing but offsets is copied.

    Args:
        array: large_string or large_binary, no value of which is too long itself.
    """
    valid, _, text = array.buffers()
    offsets = _offsets(array)
    pieces, begin = [], 0
    while begin < len(array):
        end = int(np.searchsorted(offsets, offsets[begin] + MOST_TEXT, side="right")) - 1
        own = offsets[begin : end + 1] - offsets[begin]
        mask = None
        if valid is not None:
            mask = pa.array(array.slice(begin, end - begin).is_valid().to_numpy(zero_copy_only=False)).buffers()[1]
        data = pa.py_buffer(b"") if text is None else text.slice(int(offsets[begin]), int(own[-1]))
        buffers = [mask, pa.py_buffer(own.astype(np.int32)), data]
        pieces.append(pa.Array.from_buffers(_NARROW[array.type], end - begin, buffers))
        begin = end
    return pieces


def _offsets(array: pa.Array) -> npt.NDArray[np.int64]:
    return np.frombuffer(array.buffers()[1], np.int64)[array.offset : array.offset + len(array) + 1]


def sample(column: pa.Array | pa.ChunkedArray, at: int = 0) -> object:
    """A value for an error, also where Python has none for it; None where there is none at all."""
    if at >= len(column):
        return None
    value = column[at]
    try:
        return value.as_py()
    except (ValueError, OverflowError, LookupError):  # no UTF-8, nanoseconds, after the year 9999, no such time zone
        return _shown(value.as_buffer().to_pybytes()) if has_text(value.type) and hasattr(value, "as_buffer") else None


def _shown(text: bytes) -> str:
    """The beginning of text of any bytes, those that are no character spelled out."""
    return text[:_SHOWN].decode("utf-8", "backslashreplace")


def wrong_text(column: pa.ChunkedArray) -> tuple[Mask, str] | None:
    """Flags rows with text that is no UTF-8, at any depth, with the beginning of the first; None for none."""
    if not has_text(column.type):
        return None
    found = [_wrong(chunk) for chunk in column.chunks]
    first = next((f for f in found if f is not None), None)
    if first is None:
        return None
    masks = [np.zeros(len(c), bool) if f is None else f[0] for c, f in zip(column.chunks, found, strict=True)]
    return np.concatenate(masks), first[1]


def _wrong(array: pa.Array) -> tuple[Mask, str] | None:
    kind, t = array.type, pa.types
    if not has_text(kind):
        return None
    if not t.is_nested(kind):
        data = as_bytes(array)
        try:
            data.cast(kind)  # looks at every byte: a hundredth of the time of a join
        except pa.ArrowInvalid:
            mask: Mask = (
                pc.invert(pc.match_substring_regex(data, rf"\A{_CHARACTER}*\z")).fill_null(False).to_numpy(False)
            )
            return mask, _shown(data.filter(pa.array(mask))[0].as_py())
        return None
    if t.is_struct(kind):
        found = [f for f in map(_wrong, array.flatten()) if f is not None]
        return (np.logical_or.reduce([f[0] for f in found]), found[0][1]) if found else None
    if t.is_map(kind):
        array = _as_list(array)
    within = _wrong(array.flatten())
    if within is None:
        return None
    rows = np.zeros(len(array), bool)
    # Arrow's own list_parent_indices counts what stands behind nulls, which flatten leaves out
    lengths = pc.list_value_length(array).fill_null(0).to_numpy()
    rows[np.repeat(np.arange(len(array)), lengths)[within[0]]] = True
    return rows, within[1]


def readable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column with U+FFFD for every byte that is not part of a character."""
    if not has_text(column.type):
        return column
    return pa.chunked_array([_readable(chunk) for chunk in column.chunks], column.type)


def _readable(array: pa.Array) -> pa.Array:
    kind, t = array.type, pa.types
    if not has_text(kind):
        return array
    if not t.is_nested(kind):
        # A wrong byte more at the end, so that one follows every run of characters; what replaces it, three bytes, is
        # cut off again.
        data = as_bytes(array)
        ended = pc.binary_join_element_wise(data, pa.scalar(b"\xff", data.type), pa.scalar(b"", data.type))
        replaced = pc.replace_substring_regex(ended, rf"({_CHARACTER}*)[\x80-\xff]", "\\1\ufffd")
        return pc.binary_slice(replaced, 0, -3).cast(kind)
    if t.is_struct(kind):
        children = [_readable(array.field(i)) for i in range(kind.num_fields)]
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=array.is_null())
    inner = _readable(_as_list(array).values if t.is_map(kind) else array.values)
    return of_elements(array, kind, inner)


def of_elements(array: pa.Array, kind: pa.DataType, elements: pa.Array) -> pa.Array:
    """Lists or maps with other elements in the places that an array's have.

    Args:
        array: n lists, or maps.
        kind: of what is made.
        elements: as many as the array has; a map's are structs of key and value.

    Raises:
        ValueError: a map's pair or key is null.
    """
    # Arrow counts them here: before 26 it ends the process where it does not know yet that there are none
    if pa.types.is_map(kind) and (elements.null_count or elements.field(0).null_count):
        raise ValueError(f"a null among the keys of a {kind}")
    buffers = array.buffers()[: 1 if pa.types.is_fixed_size_list(kind) else 2]
    return pa.Array.from_buffers(kind, len(array), buffers, -1, array.offset, [elements])


def _as_list(array: pa.MapArray) -> Any:
    """A map as the list of pairs that it is."""
    fields = [array.type.key_field, array.type.item_field]
    pairs = pa.StructArray.from_arrays([array.keys, array.items], fields=fields)
    return of_elements(array, pa.list_(pairs.type), pairs)


def as_text(kind: pa.DataType) -> pa.DataType:
    """A type, but with text for its times and dates, and for those within its lists and structs."""
    is_time = (pa.types.is_timestamp, pa.types.is_date)
    return rebuilt(kind, lambda part: pa.string() if any(is_one(part) for is_one in is_time) else part)


def parsed(texts: pa.Array, kind: pa.TimestampType, zone: str) -> pa.Array:
    """Times written as text.

    Args:
        texts: n of them, ISO 8601. What is less than a microsecond is cut, as Spark does.
        kind: with a zone or without.
        zone: of texts that name none, where they are to be instants.

    Raises:
        ArrowInvalid: a text that is no such time, or names a zone where there is none.
    """
    longest = pc.max(pc.binary_length(texts)).as_py()
    if longest is not None and longest > _WITH_MICROSECONDS and kind.unit != "ns":
        texts = pc.replace_substring_regex(texts, _BELOW_MICROSECONDS, r"\1")
    return texts.cast(kind) if kind.tz is None else _instants(texts, kind, zone)


def arrow_zone(name: str) -> str:
    """Arrow's spelling of a zone that Spark knows: ``GMT+2`` is ``+02:00``.

    Raises:
        ArrowInvalid: no such zone.
    """
    offset = re.fullmatch(r"(?:UTC|GMT|UT)?([+-])(\d{1,2})(?::?(\d{2}))?", name)
    if offset is not None:
        name = f"{offset.group(1)}{int(offset.group(2)):02}:{offset.group(3) or '00'}"
    name = {"Z": "UTC", "UT": "UTC"}.get(name, name)
    pc.assume_timezone(pa.array([0], pa.timestamp("us")), name)
    return name


def _instants(texts: pa.Array, kind: pa.TimestampType, zone: str) -> pa.Array:
    local = pa.timestamp(kind.unit)
    # All or none name a zone, as a rule. A cast that fails words an error for each text, ten times what one takes
    # that does not.
    first = pc.first(texts).as_py()
    if first is None or re.search(_ZONED, first) is None:
        with contextlib.suppress(pa.ArrowInvalid):
            return in_zone(texts.cast(local), kind, zone)
    else:
        with contextlib.suppress(pa.ArrowInvalid):
            return texts.cast(kind)
    # some name a zone and some do not, or one is no time
    has_zone = pc.and_(pc.match_substring_regex(texts, _CLOCK), pc.match_substring_regex(texts, _ZONED))
    nothing = pa.scalar(None, pa.string())
    found = in_zone(pc.if_else(has_zone, nothing, texts).cast(local), kind, zone)
    return pc.coalesce(found, pc.if_else(has_zone, texts, nothing).cast(kind))


def cast_plain(values: pa.Array, kind: pa.DataType, zone: str) -> pa.Array:
    """Values that hold no others, or texts of times (`as_text`), in a type of the same kind.

    Args:
        values: n of them.
        kind: what they are to be.
        zone: of times that name none and are to be instants.

    Returns:
        n values.

    Raises:
        ArrowInvalid: a value that the type cannot hold, or a text that is none of its values.
    """
    t = pa.types
    if t.is_timestamp(kind):
        if t.is_string(values.type):
            return parsed(values, kind, zone)
        if t.is_timestamp(values.type) and values.type.tz is None and kind.tz is not None and zone != "UTC":
            return in_zone(values.cast(pa.timestamp(kind.unit)), kind, zone)
    return values.cast(kind)


def is_bytes(kind: pa.DataType) -> bool:
    """Tells whether values of a type are bytes."""
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind))
