"""Translation between Spark's types and Arrow's, and columns by name; needs pyspark."""

from __future__ import annotations

from typing import Final

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql import types as st
from pyspark.sql.pandas.types import from_arrow_type, to_arrow_type

from gpu_ops.conditions import backquoted
from gpu_ops.errors import DescriptionError

ZONE: Final = "UTC"
"""The zone that timestamps carry between a task and a state server; the instants are the same in any."""

_REFUSED: Final = {"NullType", "VariantType", "CalendarIntervalType", "GeometryType", "GeographyType"}


def named_column(name: str) -> Column:
    """A column by its exact name, dots and all."""
    return f.col(backquoted(name))


def nullable(kind: st.DataType) -> st.DataType:
    """A type with every nested field nullable, as the unmatched rows of an outer join need it."""
    if isinstance(kind, st.ArrayType):
        return st.ArrayType(nullable(kind.elementType), True)
    if isinstance(kind, st.MapType):
        return st.MapType(nullable(kind.keyType), nullable(kind.valueType), True)
    if isinstance(kind, st.StructType):
        return st.StructType([st.StructField(f.name, nullable(f.dataType), True) for f in kind.fields])
    return kind


def arrow_type(kind: st.DataType) -> pa.DataType:
    """The Arrow type of a Spark type, every nested field nullable, timestamps in `ZONE`.

    Raises:
        DescriptionError: the type has none.
    """
    for part in spark_types_within(kind):
        if type(part).__name__ in _REFUSED or isinstance(part, st.UserDefinedType):
            raise DescriptionError(f"columns of type {kind.simpleString()} are not carried; CAST it first")
    kind = nullable(kind)
    try:
        try:
            return to_arrow_type(kind, timezone=ZONE)
        except TypeError as error:
            if "timezone" not in str(error):
                raise
            return to_arrow_type(kind)  # before Spark 4.1 the zone is always UTC
    except Exception as error:  # pyspark's error classes differ between versions
        raise DescriptionError(
            f"columns of type {kind.simpleString()} are not carried ({error}); CAST it first"
        ) from error


def arrow_schema(schema: st.StructType, input_name: str, *, without: str | None = None) -> pa.Schema:
    """The Arrow schema of a DataFrame's columns, all nullable.

    Args:
        schema: the DataFrame's schema.
        input_name: the input's name, for errors.
        without: a column to leave out.

    Raises:
        DescriptionError: a column of a type that Arrow and Spark do not share.
    """
    fields = []
    for field in schema.fields:
        if field.name == without:
            continue
        try:
            fields.append(pa.field(field.name, arrow_type(field.dataType)))
        except DescriptionError as error:
            raise DescriptionError(f"input '{input_name}', column {field.name!r}: {error}") from error
    return pa.schema(fields)


def arrow_rows(df: DataFrame) -> pa.Table:
    """The rows of a DataFrame, in the driver; Spark 3.5 has no public name for that."""
    if hasattr(df, "toArrow"):
        return df.toArrow()
    batches = df._collect_as_arrow()
    return pa.Table.from_batches(batches) if batches else arrow_schema(df.schema, "rows").empty_table()


def spark_type(arrow: pa.DataType, *candidates: st.DataType | None) -> st.DataType:
    """The Spark type of an Arrow type: a candidate that has it, or the plain translation."""
    for kind in candidates:
        if kind is not None and arrow_type(kind) == arrow:
            return nullable(kind)
    return from_arrow_type(arrow)


def is_window(kind: st.DataType) -> bool:
    """True for the type of Spark's ``window()``: a struct of a start and an end."""
    if not isinstance(kind, st.StructType) or kind.names != ["start", "end"]:
        return False
    return all(isinstance(field.dataType, st.TimestampType | st.TimestampNTZType) for field in kind.fields)


def is_binary_collated(kind: st.DataType) -> bool:
    """True if equal strings of a type are equal bytes; in Spark 4 a collation may make others equal."""
    return getattr(kind, "collation", "UTF8_BINARY") == "UTF8_BINARY"


def unlike_bytes(field: st.StructField) -> str | None:
    """The reason why Spark compares a column's text otherwise than by its bytes: a collation or CHAR; else None."""
    if not is_binary_collated(field.dataType):
        return f"the collation {getattr(field.dataType, 'collation', '')}"
    declared = str((field.metadata or {}).get("__CHAR_VARCHAR_TYPE_STRING", field.dataType.simpleString()))
    return f"the type {declared}, which Spark pads with spaces" if declared.startswith("char(") else None


def spark_types_within(kind: st.DataType) -> list[st.DataType]:
    """A Spark type and all types within it, from the outside in."""
    if isinstance(kind, st.ArrayType):
        return [kind, *spark_types_within(kind.elementType)]
    if isinstance(kind, st.MapType):
        return [kind, *spark_types_within(kind.keyType), *spark_types_within(kind.valueType)]
    if isinstance(kind, st.StructType):
        return [kind, *(part for f in kind.fields for part in spark_types_within(f.dataType))]
    return [kind]


def ignores_case(session: SparkSession) -> bool:
    """True if Spark ignores case in names of columns, as it does unless configured otherwise."""
    return str(session.conf.get("spark.sql.caseSensitive")).lower() != "true"


def spelling(df: DataFrame, column: str) -> str | None:
    """A column's name as the DataFrame spells it; None if there is no such column."""
    if column in df.columns:
        return column
    if not ignores_case(df.sparkSession):
        return None
    return next((c for c in df.columns if c.lower() == str(column).lower()), None)
