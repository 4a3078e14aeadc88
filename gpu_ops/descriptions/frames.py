"""DataFrames as people have them: their rows as Arrow tables, and their columns in the types that were declared.

A frame's types change with its values: pandas has a column of Nones without a type and whole numbers beside nulls as
doubles, a decimal has as many digits as its longest value, a struct's fields are in the order of the first row. The
declared schema says what comes. A column of another type is taken where each of its values is one of the declared
type, too (`taken`), and refused, with the first value that is not, where something would be lost or guessed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gpu_ops.values import fitted, is_bytes

_VIEWS: Final = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}
_PANDAS: Final = b"pandas"
"""Where a schema's metadata says what of the columns was a pandas index."""


class UnfitError(ValueError):
    """A column that cannot be taken as it was declared.

    Attributes:
        at: the row of the first value that cannot, or None where it is the column's type.
    """

    def __init__(self, problem: str, at: int | None = None) -> None:
        super().__init__(problem)
        self.at = at


def as_table(frame: Any, declared: Sequence[str] = ()) -> pa.Table:
    """The rows of a DataFrame of pandas, polars, cuDF or another library, or of an Arrow table.

    An index of pandas with a name is a column of that name. One without a name is left out, as is each of cuDF's.

    Args:
        frame: what has ``__arrow_c_stream__``.
        declared: names of columns, which are none of an index without a name.

    Raises:
        TypeError: a column of Python objects.
        ValueError: no such table.
        ArrowException: likewise.
    """
    if isinstance(frame, pa.Table):
        table = frame
    elif hasattr(frame, "to_pylibcudf"):
        # a DataFrame of cuDF's says its index as a column otherwise, where rows were picked from another
        table = frame.to_arrow(preserve_index=False)
    else:
        _refuse_objects(frame)
        table = pa.table(frame)
    for index in _indexes(table.schema):
        if isinstance(index, dict):  # a range, of which the metadata has all there is
            if index["name"] is not None and str(index["name"]) not in table.column_names:
                numbers = np.arange(index["start"], index["stop"], index["step"], dtype=np.int64)
                if numbers.size == table.num_rows:  # else rows were picked from it
                    table = table.append_column(str(index["name"]), pa.array(numbers))
        elif index.startswith("__index_level_") and index in table.column_names and index not in declared:
            table = table.drop_columns([index])
    return table


def index_names(table: pa.Table) -> list[str]:
    """The columns of a table that were indexes of a pandas DataFrame."""
    return [str(index["name"]) if isinstance(index, dict) else index for index in _indexes(table.schema)]


def _indexes(schema: pa.Schema) -> list[Any]:
    stored = (schema.metadata or {}).get(_PANDAS)
    return [] if stored is None else json.loads(stored).get("index_columns", [])


def _refuse_objects(frame: Any) -> None:
    """Refuses a column of Python objects of polars, which gives Arrow their addresses."""
    if type(frame).__module__.partition(".")[0] != "polars":
        return
    for name, kind in frame.schema.items():
        if str(kind) == "Object":
            raise TypeError(f"column {name!r} holds Python objects (polars' Object), which are no values")


def cast_exactly(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """A column as one of another type, where each of its values is one of that type.

    Args:
        column: n values.
        kind: one that is carried (`gpu_ops.values.carried`).

    Raises:
        UnfitError: values would be others, or are of another kind.
    """
    if column.type == kind:
        return column
    if column.null_count == len(column):
        return pa.chunked_array([pa.nulls(len(column), kind)], kind)
    pieces: list[pa.Array] = []
    before = 0
    for chunk in column.chunks:
        try:
            pieces += _pieces(chunk, kind)
        except UnfitError:
            raise UnfitError(f"has type {column.type}, {kind} is expected") from None
        except pa.ArrowException as error:
            raise UnfitError(str(error), before + _first_unfit(chunk, kind)) from None
        before += len(chunk)
    return pa.chunked_array(pieces, kind)


def _first_unfit(array: pa.Array, kind: pa.DataType) -> int:
    """The first value that is none of a type; there is one."""
    first, last = 0, len(array)
    while last - first > 1:
        middle = (first + last) // 2
        try:
            _cast_array(array.slice(first, middle - first), kind)
            first = middle
        except pa.ArrowException:
            last = middle
    return first


def _pieces(array: pa.Array, kind: pa.DataType) -> list[pa.Array]:
    """Converts an array like `_taken`; text to several pieces, where the offsets of its type do not reach."""
    t = pa.types
    texts = t.is_string(kind) and t.is_large_string(array.type), t.is_binary(kind) and t.is_large_binary(array.type)
    return fitted(array, kind) if any(texts) else [_cast_array(array, kind)]


def _cast_array(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """An array as one of another type.

    Raises:
        UnfitError: it is of another kind.
        ArrowException: a value is not one of that type.
    """
    t, there = pa.types, array.type
    if there == kind:
        return array
    if t.is_dictionary(there):
        return _cast_array(_decoded(array), kind)
    if t.is_run_end_encoded(there):
        return _cast_array(pc.run_end_decode(array), kind)
    if there in _VIEWS:
        return _cast_array(array.cast(_VIEWS[there]), kind)
    if array.null_count == len(array):
        return pa.nulls(len(array), kind)
    if t.is_struct(kind) and t.is_struct(there):
        return _struct(array, kind)
    if t.is_map(kind) and t.is_map(there):
        return _map(array, kind)
    if _is_list(kind) and _is_list(there):
        return _list(array, kind)
    casts: Callable[[pa.Array, pa.DataType], pa.Array] | None = None
    for is_one, way in _FAMILIES:
        if casts is None and is_one(kind) and is_one(there):
            casts = way
    if casts is None:
        raise UnfitError("values of another kind")
    return casts(array, kind)


def _decoded(array: pa.DictionaryArray) -> pa.Array:
    """The values of a dictionary array; Arrow looks up no views."""
    plain = _VIEWS.get(array.type.value_type)
    if plain is not None:
        array = pa.DictionaryArray.from_arrays(array.indices, array.dictionary.cast(plain))
    return array.dictionary_decode()


def _struct(array: pa.StructArray, kind: pa.StructType) -> pa.Array:
    """Structs with their fields in another order, each of another type."""
    names = [field.name for field in array.type]
    if sorted(names) != sorted(field.name for field in kind):
        raise UnfitError("structs of other fields")
    parts, valid, children = array.flatten(), array.is_valid(), []
    for field in kind:
        child = _cast_array(parts[names.index(field.name)], field.type)
        if not field.nullable and child.null_count and child.filter(valid).null_count:
            raise pa.ArrowInvalid(f"field {field.name!r} is declared NOT NULL and holds nulls")
        children.append(child)
    return pa.StructArray.from_arrays(children, fields=list(kind), mask=array.is_null())


def _lengths(array: pa.Array) -> npt.NDArray[np.int64]:
    found: npt.NDArray[np.int64] = pc.list_value_length(array).fill_null(0).to_numpy().astype(np.int64)
    return found


def _offsets(lengths: npt.NDArray[np.int64], *, large: bool) -> pa.Array:
    ends = np.concatenate([[0], np.cumsum(lengths)])
    return pa.array(ends, pa.int64() if large else pa.int32())


def _map(array: pa.MapArray, kind: pa.MapType) -> pa.Array:
    offsets = array.offsets
    first, last = offsets[0].as_py(), offsets[-1].as_py()
    parts = [part.slice(first, last - first) for part in (array.keys, array.items)]
    keys, items = (_cast_array(part, own) for part, own in zip(parts, (kind.key_type, kind.item_type), strict=True))
    moved = pa.array(offsets.to_numpy() - first, pa.int32())
    return pa.MapArray.from_arrays(moved, keys, items, type=kind, mask=array.is_null())


def _list(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Lists of any layout in another one, with items of another type."""
    if pa.types.is_list_view(array.type) or pa.types.is_large_list_view(array.type):
        array = array.cast(pa.large_list(array.type.value_field))
    items, lengths = _cast_array(array.flatten(), kind.value_type), _lengths(array)
    if not pa.types.is_fixed_size_list(kind):
        large = pa.types.is_large_list(kind)
        offsets = _offsets(lengths, large=large)
        return (pa.LargeListArray if large else pa.ListArray).from_arrays(
            offsets, items, type=kind, mask=array.is_null()
        )
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    if (lengths[valid] != kind.list_size).any():
        raise pa.ArrowInvalid(f"a list that has not {kind.list_size} items")
    places = np.full((len(array), kind.list_size), -1, np.int64)
    places[valid] = np.arange(len(items)).reshape(-1, kind.list_size)
    flat = places.reshape(-1)
    filled = items.take(pa.array(flat, mask=flat < 0))
    return pa.FixedSizeListArray.from_arrays(filled, type=kind, mask=array.is_null())


def _is_list(kind: pa.DataType) -> bool:
    t = pa.types
    return bool(
        t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind)
        or t.is_list_view(kind) or t.is_large_list_view(kind)
    )  # fmt: skip


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _is_whole(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_decimal(kind))


def _is_text(kind: pa.DataType) -> bool:
    t = pa.types
    return bool(t.is_string(kind) or t.is_large_string(kind) or t.is_string_view(kind))


def _are_bytes(kind: pa.DataType) -> bool:
    return is_bytes(kind) or bool(pa.types.is_binary_view(kind))


def _cast(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """By Arrow, whose casts of these refuse what they would change; the way back says so of all others."""
    made = array.cast(kind)
    if not made.cast(array.type, safe=False).equals(array):
        raise pa.ArrowInvalid(f"a value that {kind} has no place for")
    return made


def _number(array: pa.Array, kind: pa.DataType) -> pa.Array:
    t, there = pa.types, array.type
    if t.is_float16(there):  # which Arrow does not compare
        array, there = array.cast(pa.float32()), pa.float32()
    made = array.cast(kind, safe=not t.is_floating(kind))
    if t.is_floating(there) or t.is_floating(kind):
        changed = pc.not_equal(made.cast(there, safe=False), array)
        if t.is_floating(there):
            changed = pc.and_(changed, pc.invert(pc.is_nan(array)))
        # beyond the ends of an integer type the way there and back may give the same number
        ends = (array, kind) if t.is_integer(kind) else (made, there)
        if pc.any(changed).as_py() or (t.is_integer(ends[1]) and _beyond(*ends)):
            raise pa.ArrowInvalid(f"a number that {kind} has no place for")
    return made


def _beyond(array: pa.Array, kind: pa.DataType) -> bool:
    """Tells whether a float is beyond the ends of an integer type."""
    limits = np.iinfo(kind.to_pandas_dtype())
    values = array.cast(pa.float64())
    found = pc.or_(pc.greater_equal(values, float(limits.max) + 1), pc.less(values, float(limits.min)))
    return bool(pc.any(found).as_py())


def _decimal(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Whole numbers and decimals with other digits; Arrow's cast refuses what would lose some."""
    if pa.types.is_integer(array.type):
        array = array.cast(pa.decimal128(20, 0))
    if pa.types.is_integer(kind):
        return array.cast(pa.decimal128(38, 0)).cast(kind)
    return array.cast(kind)


def _same_clock(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Timestamps in another unit, or instants of another zone; a time without a zone is no instant."""
    if (array.type.tz is None) != (kind.tz is None):
        raise UnfitError("times with a zone and times without")
    return _cast(array, kind)


def _byte_strings(array: pa.Array, kind: pa.DataType) -> pa.Array:
    if pa.types.is_fixed_size_binary(kind):
        if pc.any(pc.not_equal(pc.binary_length(array), kind.byte_width)).as_py():
            raise pa.ArrowInvalid(f"a value that has not {kind.byte_width} bytes")
        return array.cast(pa.binary()).cast(kind)
    return array.cast(kind)


_FAMILIES: Final[Sequence[tuple[Callable[[pa.DataType], bool], Callable[[pa.Array, pa.DataType], pa.Array]]]] = (
    (_is_number, _number),
    (_is_whole, _decimal),
    (_is_text, lambda array, kind: array.cast(kind)),
    (_are_bytes, _byte_strings),
    (pa.types.is_timestamp, _same_clock),
    (pa.types.is_date, _cast),
    (pa.types.is_time, _cast),
    (pa.types.is_duration, _cast),
)
"""Kinds of values, and how those of one type become those of another; the first that both are of."""
