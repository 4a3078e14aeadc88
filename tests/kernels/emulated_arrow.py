"""What `emulated_libcudf` does with Arrow arrays as libcudf does it, on their way in and out."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_RANDOM = np.random.default_rng(20)


def holds(kind: pa.DataType) -> bool:
    """Types that the backend may give to libcudf."""
    t = pa.types
    if t.is_list(kind):
        return holds(kind.value_type)
    if t.is_struct(kind):
        return kind.num_fields > 0 and all(holds(field.type) for field in kind)
    simple = t.is_integer(kind) or t.is_boolean(kind) or t.is_decimal128(kind)
    return simple or kind in (pa.float32(), pa.float64(), pa.string(), pa.large_string())


def has_offsets(array: pa.Array) -> bool:
    """``from_arrow_host.cu``, ``copy_offsets_column``; strings of no rows are left alone there."""
    if pa.types.is_struct(array.type):
        return all(has_offsets(array.field(i)) for i in range(array.type.num_fields))
    if not pa.types.is_list(array.type):
        return True
    offsets = array.buffers()[1]
    return offsets is not None and offsets.size > 0 and has_offsets(array.values)


def told(array: pa.Array) -> pa.Array:
    """As ``to_arrow_schema`` says it: fields have no names, and are nullable only if there are nulls."""
    kind = array.type
    if not pa.types.is_nested(kind):
        return array
    below = [array.values] if pa.types.is_list(kind) else [array.field(i) for i in range(kind.num_fields)]
    children = [told(child) for child in below]
    fields = [pa.field("", child.type, child.null_count > 0) for child in children]
    nested = pa.list_(fields[0]) if pa.types.is_list(kind) else pa.struct(fields)
    buffers = array.buffers()[: 1 + pa.types.is_list(kind)]
    return pa.Array.from_buffers(nested, len(array), buffers, -1, array.offset, children)


def copied(array: pa.Array) -> pa.Array:
    """The array at offset 0, text in the smaller offsets, nulls above nested values put below too, as libcudf does."""
    return pa.concat_arrays([array, array.slice(0, 0)]) if len(array) else array.slice(0, 0)


def owned(array: pa.Array) -> pa.Array:
    """An array at offset 0 with values of its own, which may be written to; under a null they are anything."""
    kind, buffers = array.type, array.buffers()
    if pa.types.is_struct(kind):
        below = [owned(array.field(i)) for i in range(kind.num_fields)]
        return pa.Array.from_buffers(kind, len(array), buffers[:1], array.null_count, 0, below)
    if pa.types.is_list(kind):
        return pa.Array.from_buffers(kind, len(array), buffers[:2], array.null_count, 0, [owned(array.values)])
    if not (pa.types.is_primitive(kind) or pa.types.is_decimal(kind)) or pa.types.is_boolean(kind):
        return array
    width = kind.bit_width // 8
    data = np.zeros((len(array), width), np.uint8)
    if buffers[1] is not None:
        start = array.offset * width
        data.reshape(-1)[:] = np.frombuffer(buffers[1], np.uint8)[start : start + data.size]
    if array.null_count:
        missing = ~valid(array)
        data[missing] = _RANDOM.integers(0, 256, (int(missing.sum()), width), np.uint8)
    mask = None if not array.null_count else pa.py_buffer(np.packbits(valid(array), bitorder="little"))
    return pa.Array.from_buffers(kind, len(array), [mask, pa.py_buffer(data)], array.null_count)


def booleans(array: pa.Array) -> np.ndarray:
    """A byte for each, as libcudf has them; 1 for a null."""
    return pc.fill_null(array, True).to_numpy(zero_copy_only=False).astype(np.uint8)


def valid(array: pa.Array) -> np.ndarray:
    """Mask of what is not null."""
    return array.is_valid().to_numpy(zero_copy_only=False)
