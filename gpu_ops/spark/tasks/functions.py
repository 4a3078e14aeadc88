"""User functions over joined or grouped rows, which ``mapInArrow`` runs in the Spark task."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import SparkContext
from pyspark.sql import types as st

from gpu_ops.descriptions.changelog import INSERT, LATE_ROW_KIND, ROW_KIND_COLUMN, SHORT_STRINGS
from gpu_ops.descriptions.join import CoGroup
from gpu_ops.errors import DescriptionError
from gpu_ops.spark.failures import refuse_gone
from gpu_ops.spark.tasks.arrow import ArrowTask
from gpu_ops.spark_types import arrow_type


class ProcessPairs(ArrowTask):
    """Calls a user's function with joined rows, a record batch at a time, and checks the result.

    With side outputs, rows have a row kind as first column and a struct column for each side output at the end.

    Args:
        function: takes a record batch; returns a record batch, or one and a dict of further ones by names of side
            outputs. It may have ``open()`` and ``close()``.
        schema: the schema of its result.
        outputs: the schemas of its side outputs.
        passed: side outputs that exist before the function: rows of another kind than ``+I`` go past it, to the columns
            of these names.
    """

    def __init__(
        self,
        function: Callable[[pa.RecordBatch], object],
        schema: st.StructType,
        outputs: Mapping[str, st.StructType],
        passed: Mapping[str, st.DataType],
    ) -> None:
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self._function = function
        self._wanted: dict[str | None, pa.Schema] = {None: _fields(schema)}
        self._wanted |= {name: _fields(fields) for name, fields in outputs.items()}
        self._passed = tuple(passed)
        self.schema = schema
        self._kinds = bool(outputs or passed)
        if self._kinds:
            kinds = {**outputs, **passed}
            self.schema = st.StructType([
                st.StructField(ROW_KIND_COLUMN, st.StringType(), False),
                *(st.StructField(x.name, x.dataType, True) for x in schema.fields),
                *(st.StructField(name, kind, True) for name, kind in kinds.items()),
            ])  # fmt: skip
        self._shown = _fields(self.schema)

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the function's results for the rows of a Spark task.

        Raises:
            DescriptionError: a result is no record batch with the columns of its schema, or of an undeclared side
                output.
        """
        opened = False
        try:
            for batch in batches:
                if not batch.num_rows:
                    continue
                rows, beside = self._parted(batch)
                parts = []
                if rows.num_rows:
                    if not opened:
                        getattr(self._function, "open", _nothing)()
                        opened = True
                    parts = self._call(rows)
                yield self._shown_together([*parts, *beside])
        finally:
            if opened:
                getattr(self._function, "close", _nothing)()

    def _parted(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, list[_Part]]:
        """Splits rows into those for the function and those that go past it."""
        if not self._passed:
            return batch, []
        joined = pc.equal(batch[ROW_KIND_COLUMN], SHORT_STRINGS[INSERT])
        rest, parts = batch.filter(pc.invert(joined)), []
        for name in self._passed:
            rows = rest.filter(pc.is_valid(rest[name]))
            parts.append(_Part(LATE_ROW_KIND, rows.num_rows, {name: rows[name].cast(self._shown.field(name).type)}))
        return batch.filter(joined).drop_columns([ROW_KIND_COLUMN, *self._passed]), parts

    def _call(self, rows: pa.RecordBatch) -> list[_Part]:
        """Calls the function with rows, and checks its results."""
        who, made = f"process= function {self.__name__}", self._function(rows)
        main, beside = made if isinstance(made, tuple) and len(made) == 2 else (made, {})
        if not isinstance(beside, Mapping):
            raise DescriptionError(f"{who} gives its side outputs as a dict by name, not {type(beside).__name__}")
        parts = []
        for name, part in {None: main, **beside}.items():
            if name not in self._wanted:
                known = ", ".join(x for x in self._wanted if x is not None) or "none"
                raise DescriptionError(f"{who} gives a side output {name!r}; side_outputs= says there are {known}")
            whose = who if name is None else f"{who}, side output {name!r},"
            if not isinstance(part, pa.RecordBatch):
                raise DescriptionError(f"{whose} gives a record batch, not {type(part).__name__}")
            wanted = self._wanted[name]
            columns = as_declared(whose, part, wanted)
            if name is None:
                parts.append(_Part(SHORT_STRINGS[INSERT], part.num_rows, dict(zip(wanted.names, columns, strict=True))))
            else:
                struct = pa.StructArray.from_arrays(columns, fields=list(self._shown.field(name).type))
                parts.append(_Part(name, part.num_rows, {name: struct}))
        return parts

    def _shown_together(self, parts: list[_Part]) -> pa.RecordBatch:
        """Puts the rows of all outputs one behind the other; columns that an output lacks are null."""
        columns = []
        for field in self._shown:
            if self._kinds and field.name == ROW_KIND_COLUMN:
                arrays = [pa.repeat(pa.scalar(part.kind, field.type), part.rows) for part in parts]
            else:
                arrays = [part.columns.get(field.name, pa.nulls(part.rows, field.type)) for part in parts]
            columns.append(pa.concat_arrays(arrays))
        return pa.RecordBatch.from_arrays(columns, schema=self._shown)


class _Part(NamedTuple):
    """The rows of one output, with their row kind."""

    kind: str
    rows: int
    columns: dict[str, pa.Array]


class CoGroupTask:
    """Calls a co-group's function with both sides' rows of whole keys, and checks the result.

    Args:
        function: takes the left and the right table, returns one table.
        schema: the schema of its result.
    """

    def __init__(self, function: Callable[[pa.Table, pa.Table], pa.Table], schema: st.StructType) -> None:
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self._function, self.schema = function, schema
        self._wanted = _fields(schema)

    @classmethod
    def of(cls, function: Callable[[pa.Table, pa.Table], pa.Table], schema: st.StructType | str) -> CoGroupTask:
        """Checks a user's function and schema.

        Raises:
            DescriptionError: one is no function, or no schema.
        """
        if not callable(function):
            raise DescriptionError(f"apply= is a function of two Arrow tables, not {type(function).__name__}")
        return cls(function, applied_schema(schema, "schema"))

    def __call__(self, described: CoGroup, part: pa.Table) -> pa.Table:
        """Calls the function with a part of the rows, and returns its result in the declared types.

        Args:
            described: the description of the co-group.
            part: rows of its ``output_schema``, of whole keys.

        Raises:
            DescriptionError: the result is no table with the columns of the schema, in types that can be cast without
                loss.
        """
        made = self._function(*described.split(part))
        who = f"apply= function {self.__name__}"
        if not isinstance(made, pa.Table):
            raise DescriptionError(f"{who} gives a table, not {type(made).__name__}")
        return pa.Table.from_arrays(as_declared(who, made, self._wanted), schema=self._wanted)


def as_declared(who: str, made: pa.Table | pa.RecordBatch, wanted: pa.Schema) -> list[Any]:
    """Casts the result of a function to the columns and types of its schema.

    Args:
        who: the function, for errors.
        made: its result.
        wanted: its schema.

    Raises:
        DescriptionError: the columns are others, a cast would lose values, or nulls are where the schema has none.
    """
    if sorted(made.schema.names) != sorted(wanted.names):
        there, names = ", ".join(made.schema.names), ", ".join(wanted.names)
        raise DescriptionError(f"{who} gives the columns {there}; its schema says {names}")
    columns = []
    for field in wanted:
        column = made[field.name]
        try:
            columns.append(column if column.type == field.type else column.cast(field.type))
        except pa.ArrowException as error:
            raise DescriptionError(
                f"{who} gives column {field.name!r} as {column.type}; its schema says {field.type}: {error}"
            ) from error
        if not field.nullable and column.null_count:
            raise DescriptionError(f"{who} gives nulls in column {field.name!r}, which its schema says has none")
    return columns


def _fields(schema: st.StructType) -> pa.Schema:
    return pa.schema([pa.field(x.name, arrow_type(x.dataType), x.nullable) for x in schema.fields])


def _nothing() -> None:
    pass


def applied_schema(schema: st.StructType | str, option: str = "process_schema") -> st.StructType:
    """Reads a schema that the user gave as a type or as DDL text.

    Args:
        schema: a schema or its DDL text.
        option: the option's name, for errors.

    Raises:
        DescriptionError: it is no schema.
        StateError: there is no Spark session to parse it.
    """
    if isinstance(schema, st.StructType):
        return schema
    try:
        parsed = st._parse_datatype_string(schema)
    except Exception as error:  # pyspark's error classes differ between versions
        refuse_gone(SparkContext._active_spark_context)
        raise DescriptionError(f"{option}={schema!r} is no schema: {error}") from error
    if not isinstance(parsed, st.StructType):
        raise DescriptionError(f"{option}={schema!r} is no schema; write for example 'id bigint, gap double'")
    return parsed
