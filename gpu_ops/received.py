"""Arrow that came from outside: looked at before anything computes with it.

Arrow trusts its arrays: an offset or an index beyond the end, or a false number of nulls, reads foreign memory or ends
the process. Text that is no UTF-8 does neither; whether such rows are taken is for the one who takes them to say.
"""

from __future__ import annotations

import pyarrow as pa

_TEXT = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}


def check_array(array: pa.Array) -> None:
    """Refuses an array whose buffers do not hold what it says; text may be any bytes.

    Raises:
        ArrowException: what is wrong with it.
    """
    array.validate()
    if isinstance(array, pa.DictionaryArray):
        check_array(array.indices)
        check_array(array.dictionary)
        pa.DictionaryArray.from_arrays(array.indices, as_bytes(array.dictionary))  # refuses indices beyond the end
        return
    as_bytes(array).validate(full=True)


def as_bytes(array: pa.Array) -> pa.Array:
    """An array with the bytes of its text, also of text within lists, maps and structs; nothing is copied."""
    kind = _bytes_type(array.type)
    return array if kind == array.type else array.view(kind)


def _bytes_type(kind: pa.DataType) -> pa.DataType:
    """A type with binary in the place of text."""
    if kind in _TEXT:
        return _TEXT[kind]
    if pa.types.is_struct(kind):
        return pa.struct([_bytes_field(field) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(_bytes_field(kind.key_field), _bytes_field(kind.item_field), kind.keys_sorted)
    if pa.types.is_list(kind):
        return pa.list_(_bytes_field(kind.value_field))
    if pa.types.is_large_list(kind):
        return pa.large_list(_bytes_field(kind.value_field))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_bytes_field(kind.value_field), kind.list_size)
    return kind


def _bytes_field(field: pa.Field) -> pa.Field:
    return field.with_type(_bytes_type(field.type))
