"""A user's function over joined or grouped rows, as ``mapInArrow`` runs it in the Spark task."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa
from pyspark import SparkContext
from pyspark.sql import SparkSession
from pyspark.sql import types as st

from gpu_ops.descriptions.co_group import CoGroup
from gpu_ops.errors import DescriptionError
from gpu_ops.spark.datatypes import arrow_type
from gpu_ops.state.address import StateAddress

_functions: weakref.WeakKeyDictionary[SparkContext, dict[str, Grouped]] = weakref.WeakKeyDictionary()
"""Of an application's co-groups, by state folder; they go with the application."""


class Applied:
    """Gives each record batch to a function, and checks what comes back.

    Args:
        function: record batch in, record batch out.
        schema: what it gives.
    """

    def __init__(self, function: Callable[[pa.RecordBatch], pa.RecordBatch], schema: st.StructType) -> None:
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self._function, self._names = function, schema.fieldNames()

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Gives what the function makes of batches that have rows.

        Raises:
            DescriptionError: something else than a record batch with the columns of its schema.
        """
        for batch in batches:
            if not batch.num_rows:
                continue
            made = self._function(batch)
            if not isinstance(made, pa.RecordBatch):
                raise DescriptionError(
                    f"process= function {self.__name__} gives a record batch, not {type(made).__name__}"
                )
            check_columns(f"process= function {self.__name__}", made.schema.names, self._names)
            yield made.select(self._names)


class Grouped:
    """Gives both sides' rows of whole keys to a co-group's function, and checks what comes back.

    Args:
        function: left and right table in, one table out.
        schema: what it gives.
    """

    def __init__(self, function: Callable[[pa.Table, pa.Table], pa.Table], schema: st.StructType) -> None:
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self._function, self.schema = function, schema
        fields = [pa.field(x.name, arrow_type(x.dataType), x.nullable) for x in schema.fields]
        self._wanted = pa.schema(fields)

    @classmethod
    def of(cls, function: Callable[[pa.Table, pa.Table], pa.Table], schema: st.StructType | str) -> Grouped:
        """From what a user gives.

        Raises:
            DescriptionError: no function, or no schema.
        """
        if not callable(function):
            raise DescriptionError(f"apply= is a function of two Arrow tables, not {type(function).__name__}")
        return cls(function, applied_schema(schema, "schema"))

    def __call__(self, described: CoGroup, part: pa.Table) -> pa.Table:
        """What the function makes of a part, of its schema.

        Args:
            described: the co-group.
            part: rows of its ``output_schema``, of whole keys.

        Raises:
            DescriptionError: something else than a table with the columns of its schema, in types that go into
                them without loss.
        """
        made = self._function(*described.split(part))
        who = f"apply= function {self.__name__}"
        if not isinstance(made, pa.Table):
            raise DescriptionError(f"{who} gives a table, not {type(made).__name__}")
        check_columns(who, made.column_names, self._wanted.names)
        columns = []
        for field in self._wanted:
            column = made[field.name]
            try:
                columns.append(column if column.type == field.type else column.cast(field.type))
            except pa.ArrowException as error:
                raise DescriptionError(
                    f"{who} gives column {field.name!r} as {column.type}; its schema says {field.type}: {error}"
                ) from error
            if not field.nullable and column.null_count:
                raise DescriptionError(f"{who} gives nulls in column {field.name!r}, which its schema says has none")
        return pa.Table.from_arrays(columns, schema=self._wanted)


def check_columns(who: str, there: Sequence[str], wanted: Sequence[str]) -> None:
    """Refuses columns that are not those of a function's schema.

    Raises:
        DescriptionError: names both.
    """
    if sorted(there) != sorted(wanted):
        raise DescriptionError(f"{who} gives the columns {', '.join(there)}; its schema says {', '.join(wanted)}")


def applied_schema(schema: st.StructType | str, option: str = "process_schema") -> st.StructType:
    """A schema as the user gave it.

    Args:
        schema: a schema or its DDL text.
        option: what the user calls it.

    Raises:
        DescriptionError: it is none.
    """
    if isinstance(schema, st.StructType):
        return schema
    try:
        parsed = st._parse_datatype_string(schema)
    except Exception as error:  # pyspark's error classes differ between versions
        raise DescriptionError(f"{option}={schema!r} is no schema: {error}") from error
    if not isinstance(parsed, st.StructType):
        raise DescriptionError(f"{option}={schema!r} is no schema; write for example 'id bigint, gap double'")
    return parsed


def remember_function(spark: SparkSession, state: StateAddress, function: Grouped) -> None:
    """Keeps a co-group's function for `finish`; no code travels to a state server, or into its folder."""
    _functions.setdefault(spark.sparkContext, {})[state.identity] = function


def known_function(spark: SparkSession, state: StateAddress) -> Grouped | None:
    """The function that `remember_function` was given, or None."""
    return _functions.get(spark.sparkContext, {}).get(state.identity)
