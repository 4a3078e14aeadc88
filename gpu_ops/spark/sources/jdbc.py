"""Reads a database table as a static DataFrame, with exactly the values that the database has.

From Postgres days, times and decimals are read as text, which Spark casts: JDBC's Java types have the Julian calendar
before 1582 and the time zone of the JVM, and turn infinite times into days of the years 1 and 9999.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql import types as st

from gpu_ops.conditions import backquoted
from gpu_ops.errors import DescriptionError
from gpu_ops.spark.database import POSTGRES, Connection, with_driver
from gpu_ops.spark.metrics.metrics import free_name
from gpu_ops.spark_types import named_column

_INSTANT: Final = (
    "CASE WHEN {0} >= '0001-12-31 00:00:00+00 BC' AND {0} < '0001-01-01 00:00:00+00' "
    "THEN '0000-12-31' || to_char({0} AT TIME ZONE 'UTC', ' HH24:MI:SS.USZ') "
    "WHEN isfinite({0}) THEN ({0} AT TIME ZONE 'UTC')::text || 'Z' ELSE {0}::text END"
)
"""An instant's text in UTC; Spark calls the year before 1, in which a zone's year 1 may begin, 0."""

_TEXTS: Final = {
    "date": "{}::text",
    "timestamp": "{}::text",
    "timestamptz": _INSTANT,
    "numeric": "CASE WHEN {0} = trunc({0}) THEN trunc({0})::text ELSE {0}::text END",
    "_date": "{}::text[]",
    "_timestamp": "{}::text[]",
    "_numeric": "{}::text[]",
    "_timestamptz": "CASE WHEN {0} IS NULL OR array_ndims({0}) > 1 THEN {0}::text[] ELSE ARRAY(SELECT "  # noqa: S608
    + _INSTANT.replace("{0}", "one")
    + " FROM unnest({0}) WITH ORDINALITY AS of_one(one, place) ORDER BY place) END",
}
"""The SQL by which Postgres turns a column into text, by the column's type."""

_TYPES: Final[Mapping[str, st.DataType]] = {
    "date": st.DateType(),
    "timestamp": st.TimestampNTZType(),
    "timestamptz": st.TimestampType(),
}
"""The Spark type that such a text is cast to."""


def read_table(spark: SparkSession, options: Mapping[str, str], columns: Sequence[tuple[str, str]] | None) -> DataFrame:
    """Reads the rows of a database table.

    Args:
        spark: a session that has the database's driver.
        options: the options of Spark's JDBC reader: ``url``, ``dbtable``, ``user``...
        columns: names and types to read, or None for all columns and Spark's types for them.

    Raises:
        DatabaseError: the database cannot be reached, or has no such table.
        DescriptionError: a column `numeric` is read as something that is neither a number nor text.
    """
    reader, options = spark.read.format("jdbc"), with_driver(spark, options["url"], options)
    if not options["url"].startswith(POSTGRES):
        df = reader.options(**options).load()
        return df if columns is None else df.select(*(named_column(x).cast(kind).alias(x) for x, kind in columns))
    table = options["dbtable"]
    connection = Connection(spark, options["url"], options, f"table {table}")
    try:
        types = connection.types(table)
        names = {x: free_name(f"text_{n}", list(types)) for n, x in enumerate(types) if types[x] in _TEXTS}
        texts = [
            f", {_TEXTS[types[x]].format(connection.quoted(x))} AS {connection.quoted(text)}"
            for x, text in names.items()
        ]
    finally:
        connection.close()
    query = f"(SELECT *{''.join(texts)} FROM {table}) gpu_ops_rows"  # noqa: S608 - the user's own
    df = reader.options(**{**options, "dbtable": query}).load()
    read = [x.name for x in df.schema if x.name not in names.values()]
    declared = columns or [(x, df.schema[x].dataType.simpleString()) for x in read]
    values = []
    for name, kind in declared:
        alike = [x for x in read if x.lower() == name.lower()]
        column = alike[0] if len(alike) == 1 else name
        value = named_column(column)
        if column in names:
            (field,) = st.StructType.fromDDL(f"x {kind}")
            value = f.expr(
                _value(backquoted(names[column]), types[column], field.dataType, f"table {table}, column {column}")
            )
        values.append(value.cast(kind).alias(name))
    return df.select(*values)


def _value(text: str, kind: str, to: st.DataType, where: str) -> str:
    """Builds the Spark SQL that parses a text from Postgres, or raises an error naming the place.

    A decimal with a fraction is refused as a whole number.

    Args:
        text: the text, an expression.
        kind: the type in Postgres.
        to: the type that the value is cast to afterwards.
        where: the place, for errors.

    Raises:
        DescriptionError: decimals are read as something that is neither a number nor text.
    """
    if kind.startswith("_"):
        element = to.elementType if isinstance(to, st.ArrayType) else st.StringType()
        return f"transform({text}, x -> {_value('x', kind[1:], element, where)})"
    is_other, whole = "false", None
    if kind in _TYPES:
        to, is_other = _TYPES[kind], f"{text} LIKE '% BC%'"  # what stands behind a day Spark does not look at
        if isinstance(to, st.TimestampType):
            is_other += f" OR year(try_cast({text} AS TIMESTAMP_LTZ)) < 1"
    elif isinstance(to, st.IntegralType):
        to, whole = st.DecimalType(38, 0), to  # texts of elements of lists have zeros after the point
    elif isinstance(to, (st.CharType, st.VarcharType)):
        to = st.StringType()
    elif not isinstance(to, (st.DecimalType, st.DoubleType, st.FloatType, st.StringType)):
        raise DescriptionError(f"{where}: it is numeric, of which no {to.simpleString().upper()} is made")
    name = "TIMESTAMP_LTZ" if isinstance(to, st.TimestampType) else to.simpleString().upper()
    if isinstance(to, st.DecimalType):
        is_other = f"length(regexp_extract({text}, '[.]([0-9]*[1-9])0*$', 1)) > {to.scale}"
    value = f"try_cast({text} AS {name})"
    if whole is not None:
        name = whole.simpleString().upper()
        value = f"try_cast({value} AS {name})"
    quoted = where.replace("\\", "\\\\").replace("'", "\\'")
    problem = f"raise_error(concat('{quoted}: ', {text}, ' is no {name}'))"
    cast = f"coalesce({value}, {problem})"
    return f"CASE WHEN {text} IS NULL THEN CAST(NULL AS {name}) WHEN {is_other} THEN {problem} ELSE {cast} END"
