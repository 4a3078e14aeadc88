"""Columns of a Delta table: their types, what they are called in data files, and values that the log has as text.

A table's schema is JSON (PROTOCOL.md, "Schema Serialization Format"). `declared_columns` takes from it what a reader
declares, field by field at any depth, as Arrow's types with the declared names; each field's metadata say how data
files have it (column mapping).
"""

from __future__ import annotations

import datetime as dt
import decimal
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from gpu_ops.files.binary_files import arrow_leaf
from gpu_ops.files.columns import ColumnPart, Conversion, WrongError, kind_of
from gpu_ops.values import cast_plain, of_elements

DeltaField = Mapping[str, Any]

_TYPES: Final = {
    "string": pa.string(), "long": pa.int64(), "integer": pa.int32(), "short": pa.int16(), "byte": pa.int8(),
    "float": pa.float32(), "double": pa.float64(), "boolean": pa.bool_(), "binary": pa.binary(), "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"), "timestamp_ntz": pa.timestamp("us"), "decimal": pa.decimal128(10, 0),
    "void": pa.null(),
}  # fmt: skip

_PHYSICAL: Final = "delta.columnMapping.physicalName"
_ID: Final = "delta.columnMapping.id"
_ID_IN_FILES: Final = b"PARQUET:field_id"
PARTITION: Final = b"gpu_ops.partition"
"""Key of a column's metadata: its value is the log's, by its physical name."""

_ESCAPES: Final = r"(?:\\u00[0-9A-Fa-f]{2})+"


def declared_columns(
    declared: pa.Schema, fields: Sequence[DeltaField], partitioned_by: frozenset[str], later: Sequence[DeltaField]
) -> pa.Schema:
    """Gives the declared columns of a table in the table's types.

    Args:
        declared: the columns; names may differ from the table's in upper case, as in Spark.
        fields: the table's at the version that is read.
        partitioned_by: the table's columns whose values are in the log.
        later: the table's columns now: what is new there had no values before, be it of a name that was there.

    Returns:
        A schema with the declared names. What was added later is null.

    Raises:
        WrongError: a column or field that is not there, or has another name there, or is another one now.
    """
    found = []
    for column in declared:
        field = _stored_field(column, fields, later, "")
        of_table = _named(column.name, fields)
        if of_table is not None and of_table["name"] in partitioned_by:
            field = field.with_metadata({**field.metadata, PARTITION: b""})
        found.append(field)
    return pa.schema(found)


def _stored_field(
    declared: pa.Field, fields: Sequence[DeltaField], later: Sequence[DeltaField], within: str
) -> pa.Field:
    field, newer = (_named(declared.name, some) for some in (fields, later))
    path = f"{within}{declared.name}"
    if field is not None:
        if newer is not None and _physical(newer).lower() != _physical(field).lower():
            raise WrongError(
                f"in data files it is {_physical(field)!r}, and {_physical(newer)!r} in the latest version: it was "
                "renamed or dropped later, and another one of its name was added",
                path,
            )
        kind = _part(declared.type, field["type"], (newer or {}).get("type"), f"{path}.")
        metadata = {_PHYSICAL: _physical(field)}
        if _ID in field.get("metadata", {}):
            metadata[_ID] = str(field["metadata"][_ID])
        return pa.field(declared.name, kind, metadata=metadata)
    names = ", ".join(f["name"] for f in fields)
    if newer is None:
        raise WrongError(f"it is not among its columns {names}", path)
    before = next((f["name"] for f in fields if _physical(f) == _physical(newer)), None)
    if before is not None:
        raise WrongError(f"it is not among its columns {names}: it was renamed later, from {before!r}", path)
    return pa.field(declared.name, pa.null())


def names_of(fields: Sequence[DeltaField]) -> dict[str, Any]:
    """The names of a table's columns, and of the fields within each: None where there are none."""
    found = {}
    for field in fields:
        kind = field["type"]
        while not isinstance(kind, str) and kind["type"] == "array":
            kind = kind["elementType"]
        is_struct = not isinstance(kind, str) and kind["type"] == "struct"
        found[field["name"]] = names_of(kind["fields"]) if is_struct else None
    return found


def _named(name: str, fields: Sequence[DeltaField]) -> DeltaField | None:
    return next((field for field in fields if field["name"].lower() == name.lower()), None)


def _physical(field: DeltaField) -> str:
    return str(field.get("metadata", {}).get(_PHYSICAL, field["name"]))


def _part(declared: pa.DataType, kind: Any, later: Any, within: str) -> pa.DataType:
    """Gives as much of a table's type as is declared; all of it where it is of another kind."""
    t, nested = pa.types, None if isinstance(kind, str) else kind["type"]
    latest = later if isinstance(later, Mapping) and later["type"] == nested else {}

    def inner(of: pa.DataType, key: str) -> pa.DataType:
        return _part(of, kind[key], latest.get(key), within)

    if t.is_struct(declared) and nested == "struct":
        fields = [_stored_field(field, kind["fields"], latest.get("fields", ()), within) for field in declared]
        if all(t.is_null(field.type) for field in fields):
            raise WrongError("none of the declared fields has values in this version of the table", within[:-1])
        return pa.struct(fields)
    if t.is_list(declared) and nested == "array":
        return pa.list_(inner(declared.value_type, "elementType"))
    if t.is_map(declared) and nested == "map":
        return pa.map_(inner(declared.key_type, "keyType"), inner(declared.item_type, "valueType"))
    return arrow_type(kind)


def arrow_type(kind: Any) -> pa.DataType:
    """The Arrow type of a type of Delta's.

    Args:
        kind: a name, or the mapping that a nested type is.

    Raises:
        ValueError: there is none.
    """
    if isinstance(kind, str):
        digits = re.fullmatch(r"decimal\((\d+),\s*(-?\d+)\)", kind)
        if digits is not None:
            return pa.decimal128(int(digits.group(1)), int(digits.group(2)))
        if kind in _TYPES:
            return _TYPES[kind]
    elif kind["type"] == "struct":
        return pa.struct([pa.field(field["name"], arrow_type(field["type"])) for field in kind["fields"]])
    elif kind["type"] == "array":
        return pa.list_(arrow_type(kind["elementType"]))
    elif kind["type"] == "map":
        return pa.map_(arrow_type(kind["keyType"]), arrow_type(kind["valueType"]))
    raise ValueError(f"the table has a column of type {kind!r}, which is not read here")


def delta_leaf(part: ColumnPart, kind: pa.DataType) -> Conversion | None:
    """Converts a table's values like an Arrow file's, but takes no time without a zone for an instant."""
    guessed = kind_of(part.type) == "local" and kind_of(kind) == "instant"
    return None if guessed else arrow_leaf(part, kind)


def physical_name(field: pa.Field) -> str:
    """The name of a column in the log and in data files."""
    return str(field.metadata[_PHYSICAL.encode()].decode())


class FileNames:
    """The names of a data file's fields, found by physical names or by ids.

    Args:
        there: the file's columns, where fields are found by ids; None for physical names.
    """

    def __init__(self, there: pa.Schema | None) -> None:
        self._there = None if there is None else pa.struct(list(there))
        if self._there is not None and not any(_id_of(field) for field in self._there):
            raise ValueError("the table's columns are mapped by id, and the file has no ids")

    def schema(self, columns: Sequence[pa.Field]) -> pa.Schema:
        """Columns as the file has them, in the table's types, without those that it lacks."""
        return pa.schema(list(self._in_file(pa.struct(columns), self._there)))

    def renamed(self, batch: pa.RecordBatch, column: pa.Field) -> pa.Array:
        """A column of the table, from a batch with the columns that `schema` names."""
        return self._column(batch, column, self._there)

    def _in_file(self, kind: pa.DataType, there: pa.DataType | None) -> pa.DataType:
        t = pa.types
        if t.is_struct(kind):
            named = [(self._name(field, there), field) for field in kind]
            return pa.struct(
                [(name, self._in_file(f.type, _child(there, name))) for name, f in named if name is not None]
            )
        if t.is_list(kind):
            return pa.list_(self._in_file(kind.value_type, _items(there, "value_type")))
        if t.is_map(kind):
            key, item = (self._in_file(getattr(kind, x), _items(there, x)) for x in ("key_type", "item_type"))
            return pa.map_(key, item)
        return kind

    def _name(self, field: pa.Field, there: pa.DataType | None) -> str | None:
        if pa.types.is_null(field.type):
            return None
        if there is None:
            return physical_name(field)
        number = field.metadata.get(_ID.encode())
        return next((f.name for f in there if number is not None and _id_of(f) == number), None)

    def _column(self, parent: pa.RecordBatch | pa.StructArray, field: pa.Field, there: pa.DataType | None) -> pa.Array:
        name = self._name(field, there)
        if name is None:
            return pa.nulls(len(parent), field.type)
        values = parent.column(name) if isinstance(parent, pa.RecordBatch) else parent.field(name)
        return self._values(values, field.type, _child(there, name))

    def _values(self, values: pa.Array, kind: pa.DataType, there: pa.DataType | None) -> pa.Array:
        t = pa.types
        if not t.is_nested(kind):
            return values
        if t.is_struct(kind):
            parts = [self._column(values, field, there) for field in kind]
            return pa.StructArray.from_arrays(parts, fields=list(kind), mask=values.is_null())
        if t.is_list(kind):
            return of_elements(values, kind, self._values(values.values, kind.value_type, _items(there, "value_type")))
        sides = [(values.keys, "key_type"), (values.items, "item_type")]
        keys, items = (self._values(part, getattr(kind, x), _items(there, x)) for part, x in sides)
        pairs = pa.StructArray.from_arrays([keys, items], fields=[kind.key_field, kind.item_field])
        return of_elements(values, kind, pairs)


def _id_of(field: pa.Field) -> bytes | None:
    return (field.metadata or {}).get(_ID_IN_FILES)


def _child(there: pa.DataType | None, name: str | None) -> pa.DataType | None:
    return None if there is None or name is None else there.field(name).type


def _items(there: pa.DataType | None, which: str) -> pa.DataType | None:
    return None if there is None else getattr(there, which)


def partition_value(text: str | None, kind: pa.DataType, zone: str) -> pa.Scalar:
    r"""A partition's value (PROTOCOL.md, "Partition Value Serialization").

    Bytes are what Spark writes, text in UTF-8, or escapes as delta-rs writes them, ``\u00FF\u0000``.

    Args:
        text: as the log has it; an empty one is null.
        kind: the column's type.
        zone: of times that name none and are instants.

    Raises:
        WrongError: it is no value of the type.
    """
    if text is None or text == "":
        return pa.scalar(None, kind)
    t = pa.types
    try:
        value: Any = text
        if t.is_binary(kind):
            value = _bytes(text)
        elif t.is_integer(kind):
            value = int(text)
        elif t.is_floating(kind):
            value = float(text)
        elif t.is_decimal(kind):
            value = decimal.Decimal(text)
        elif t.is_boolean(kind):
            value = {"true": True, "false": False}[text.lower()]
        elif t.is_date(kind):
            value = dt.date.fromisoformat(text)
        elif t.is_timestamp(kind):
            return cast_plain(pa.array([text], pa.string()), kind, zone)[0]
        return pa.array([value], kind)[0]
    except (ValueError, KeyError, ArithmeticError) as error:
        raise WrongError(f"a partition's value is no {kind}", sample=text) from error


def _bytes(text: str) -> bytes:
    if re.fullmatch(_ESCAPES, text) is not None:
        return bytes.fromhex(text.replace("\\u00", ""))
    if "\ufffd" in text:
        raise ValueError("bytes that are no UTF-8 were lost when they were written")
    return text.encode()
