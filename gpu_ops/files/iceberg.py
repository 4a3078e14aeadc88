"""Iceberg tables as ``pyiceberg`` opens them, and the types of their columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from gpu_ops.errors import DescriptionError, optional_module
from gpu_ops.files.columns import WrongError
from gpu_ops.values import rebuilt


def catalog_of(properties: str | Mapping[str, str], what: str) -> Any:
    """Opens an Iceberg catalog by its properties.

    Args:
        properties: as ``pyiceberg.catalog.load_catalog`` takes them, with the catalog's ``name`` (by default
            ``"default"``); or the name alone.
        what: what needs it, for the error.

    Raises:
        NotBuiltError: ``pyiceberg`` is not installed.
    """
    needed = f"{what} needs the package pyiceberg: pip install 'gpu-join[iceberg]'"
    named = {"name": properties} if isinstance(properties, str) else {"name": "default", **properties}
    return optional_module("pyiceberg.catalog", needed).load_catalog(**named)


def check_nulls(what: str, schema: pa.Schema) -> None:
    """Refuses columns in which ``pyiceberg`` makes an empty list or map of null, as it does around structs.

    Its ``ArrowProjectionVisitor`` builds such values anew by their offsets alone, both reading and writing.

    Raises:
        DescriptionError: names the column.
    """
    for field in schema:
        if _has_structs_in_lists(field.type):
            raise DescriptionError(
                f"{what}: column {field.name!r} is {field.type}, and pyiceberg takes a null list or map of structs for "
                "an empty one: leave it out, or CAST it to text"
            )


def _has_structs_in_lists(kind: pa.DataType, *, within: bool = False) -> bool:
    if pa.types.is_struct(kind):
        return within or any(_has_structs_in_lists(field.type) for field in kind)
    if pa.types.is_map(kind):
        return any(_has_structs_in_lists(x, within=True) for x in (kind.key_type, kind.item_type))
    return (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and _has_structs_in_lists(
        kind.value_type, within=True
    )


def in_iceberg(kind: pa.DataType) -> pa.DataType:
    """The type in which an Iceberg table has values of a type: small integers as 32 bits, as Spark writes them."""
    return rebuilt(kind, _leaf_in_iceberg, bare=True)


def _leaf_in_iceberg(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_integer(kind) and kind.bit_width < 32:
        return pa.int32()
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", None if kind.tz is None else "UTC")
    if pa.types.is_large_string(kind):
        return pa.string()
    return pa.binary() if pa.types.is_large_binary(kind) else kind


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """A schema of ``pyiceberg`` in the types of `in_iceberg`."""
    return pa.schema([pa.field(x.name, in_iceberg(x.type)) for x in schema])


def cast_columns(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Rows in the types of a schema, column by column.

    Raises:
        WrongError: a value that has no place in its column's type; names the column.
    """
    columns = []
    for column, field in zip(rows.columns, schema, strict=True):
        try:
            columns.append(column.cast(field.type))
        except pa.ArrowException as error:
            raise WrongError(f"{column.type} where {field.type} is read: {error}", field.name) from error
    return pa.Table.from_arrays(columns, schema=schema)
