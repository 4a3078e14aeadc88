"""How columns of every Arrow type lie in GPU memory: the few types that libcudf holds, and the way back.

libcudf knows no time zones, no decimal precision, no binary and no map, and reads fewer types from Arrow
than Arrow has. So a column is stored as the plainest type with the same bits (dates, times and timestamps
as integers, decimals as decimal128, everything made of bytes as string, which libcudf does not validate),
and its Arrow type stays with the frame. All of this happens on the host and copies next to nothing.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpu_ops.errors import BackendError
from gpu_ops.values import of_elements

DECIMAL = pa.decimal128(38, 0)
"""Every decimal's stored type: the scale is part of the Arrow type, not of the stored value."""


def is_bytes(kind: pa.DataType) -> bool:
    """Types stored as strings, compared byte by byte."""
    t = pa.types
    return bool(
        t.is_string(kind)
        or t.is_large_string(kind)
        or t.is_string_view(kind)
        or t.is_binary(kind)
        or t.is_large_binary(kind)
        or t.is_binary_view(kind)
        or t.is_fixed_size_binary(kind)
        or t.is_decimal256(kind)
        or kind == pa.month_day_nano_interval()
    )


def is_decimal(kind: pa.DataType) -> bool:
    """Types stored as decimal128."""
    return bool(pa.types.is_decimal(kind) and not pa.types.is_decimal256(kind))


def is_list(kind: pa.DataType) -> bool:
    """Types stored as lists, maps among them."""
    t = pa.types
    return bool(t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind) or t.is_map(kind))


def element_type(kind: pa.DataType) -> pa.DataType:
    """The type of a list's elements; a map's are structs of key and value."""
    return pa.struct([kind.key_field, kind.item_field]) if pa.types.is_map(kind) else kind.value_type


def decoded(kind: pa.DataType) -> pa.DataType:
    """The type without dictionary, run-end encoding or extension."""
    while True:
        if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
            kind = kind.value_type
        elif isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
        else:
            return kind


def storage_type(kind: pa.DataType) -> pa.DataType:
    """The Arrow type of the stored column.

    Raises:
        BackendError: a type that libcudf cannot hold in any form.
    """
    kind = decoded(kind)
    t = pa.types
    if t.is_boolean(kind) or t.is_integer(kind) or kind in (pa.float32(), pa.float64()):
        return kind
    if t.is_null(kind):
        return pa.bool_()
    if t.is_float16(kind):
        return pa.float32()
    if is_decimal(kind):
        return DECIMAL
    if is_bytes(kind):
        return pa.string()
    if is_list(kind):
        return pa.list_(storage_type(element_type(kind)))
    if t.is_struct(kind) and kind.num_fields:
        return pa.struct([pa.field(f"f{i}", storage_type(kind.field(i).type)) for i in range(kind.num_fields)])
    if t.is_temporal(kind):
        return pa.int32() if kind.bit_width == 32 else pa.int64()
    raise BackendError(f"the GPU backend cannot hold columns of type {kind}; CAST them, or use backend='cpu'")


def has_offsets(kind: pa.DataType) -> bool:
    """Tells whether a type's stored column has lists or text in it, whose elements and bytes are counted in 32 bits.

    By libcudf those of lists; by Arrow those of text too, on its way back.
    """
    stored = storage_type(kind)
    t = pa.types
    return bool(
        t.is_list(stored)
        or t.is_string(stored)
        or (t.is_struct(stored) and any(has_offsets(field.type) for field in stored))
    )


def to_storage(array: pa.Array) -> pa.Array:
    """An Arrow array as it is stored; strings of more than 2 GiB as large_string."""
    kind, stored = array.type, storage_type(array.type)
    if kind != decoded(kind):
        return to_storage(_decode(array))
    if not len(array):
        # of a list column libcudf reads the first offset even then, which others than Arrow's own builders leave out
        return pa.array([], stored)
    if (kind == stored and not pa.types.is_nested(kind)) or pa.types.is_large_string(kind):
        return array
    if pa.types.is_null(kind):
        return pa.nulls(len(array), stored)
    if pa.types.is_float16(kind):
        return array.cast(stored)
    if is_decimal(kind):
        wide = pa.decimal128(38, kind.scale)
        return _relabel(array if pa.types.is_decimal128(kind) else array.cast(wide), DECIMAL)
    if is_bytes(kind):
        return _text(array)
    if is_list(kind):
        if pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
            array = array.cast(pa.list_(kind.value_type))
        elements = _entries(array) if pa.types.is_map(kind) else array.values
        return of_elements(array, stored, _plain(to_storage(elements)))
    if pa.types.is_struct(kind):
        children = [_plain(to_storage(array.field(i))) for i in range(kind.num_fields)]
        return pa.StructArray.from_arrays(children, fields=list(stored), mask=array.is_null())
    return _relabel(array, stored)


def from_storage(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """The inverse of `to_storage`, for arrays as libcudf gives them back."""
    t = pa.types
    plain = decoded(kind)
    if plain != kind:
        return from_storage(array, plain).cast(kind)
    if t.is_null(kind):
        return pa.nulls(len(array))
    if is_bytes(kind):
        return _from_text(array, kind)
    if is_decimal(kind):
        wide = _relabel(array, pa.decimal128(kind.precision if t.is_decimal128(kind) else 38, kind.scale))
        return wide if t.is_decimal128(kind) else wide.cast(kind)
    if t.is_struct(kind):
        children = [from_storage(array.field(i), kind.field(i).type) for i in range(kind.num_fields)]
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=array.is_null())
    if is_list(kind):
        return _from_list(array, kind)
    if t.is_float16(kind):
        return array.cast(kind)
    return array if array.type == kind else _relabel(array, kind)


def _decode(array: pa.Array) -> pa.Array:
    if isinstance(array, pa.ExtensionArray):
        return array.storage
    if pa.types.is_run_end_encoded(array.type):
        return pc.run_end_decode(array)
    return array.cast(array.type.value_type)


def _relabel(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Reinterprets the bits of an array as another fixed-width type."""
    return pa.Array.from_buffers(kind, len(array), array.buffers()[:2], -1, array.offset)


def _plain(array: pa.Array) -> pa.Array:
    """An element column in 32-bit offsets, which is what a list's declared type says."""
    return array.cast(pa.string()) if pa.types.is_large_string(array.type) else array


def _text(array: pa.Array) -> pa.Array:
    kind = array.type
    if pa.types.is_decimal256(kind) or kind == pa.month_day_nano_interval():
        array = _relabel(array, pa.binary(32 if pa.types.is_decimal256(kind) else 16))
    if pa.types.is_fixed_size_binary(array.type):
        fits = len(array) * array.type.byte_width < 1 << 31
        array = array.cast(pa.binary() if fits else pa.large_binary())
    elif pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        array = array.cast(pa.large_binary())
    wide = pa.types.is_large_binary(array.type) or pa.types.is_large_string(array.type)
    target = pa.large_string() if wide else pa.string()
    return pa.Array.from_buffers(target, len(array), array.buffers(), -1, array.offset)


def _from_text(array: pa.Array, kind: pa.DataType) -> pa.Array:
    t = pa.types
    if array.type == kind:
        return array
    if t.is_string(kind) or t.is_large_string(kind) or t.is_string_view(kind):
        return array.cast(kind)
    wide = t.is_large_string(array.type)
    data = pa.Array.from_buffers(
        pa.large_binary() if wide else pa.binary(), len(array), array.buffers(), -1, array.offset
    )
    if t.is_binary(kind) or t.is_large_binary(kind) or t.is_binary_view(kind):
        return data if data.type == kind else data.cast(kind)
    if t.is_fixed_size_binary(kind):
        return data.cast(kind)
    width = 32 if t.is_decimal256(kind) else 16
    return _relabel(data.cast(pa.binary(width)), kind)


def _entries(array: pa.MapArray) -> pa.StructArray:
    return pa.StructArray.from_arrays([array.keys, array.items], fields=[array.type.key_field, array.type.item_field])


def _from_list(array: pa.ListArray, kind: pa.DataType) -> pa.Array:
    elements = from_storage(array.values, element_type(kind))
    if pa.types.is_fixed_size_list(kind):
        # null rows take no elements in a list, and list_size of them here
        size = kind.list_size
        valid = array.is_valid().to_numpy(zero_copy_only=False)
        starts = array.offsets.to_numpy()[:-1].astype(np.int64)
        places = (starts[:, None] + np.arange(size)).reshape(-1)
        missing = np.repeat(~valid, size)
        taken = elements.take(pa.array(np.where(missing, 0, places), mask=missing))
        return pa.FixedSizeListArray.from_arrays(taken, type=kind, mask=pa.array(~valid))
    if pa.types.is_large_list(kind):
        narrow = pa.list_(kind.value_field)
        return of_elements(array, narrow, elements).cast(kind)
    return of_elements(array, kind, elements)
