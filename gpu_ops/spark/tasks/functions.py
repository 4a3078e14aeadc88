"""A user's function over joined or grouped rows, as ``mapInArrow`` runs it in the Spark task."""

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
from gpu_ops.spark.datatypes import arrow_type
from gpu_ops.spark.failures import refuse_gone
from gpu_ops.spark.tasks.arrow import ArrowTask


class Applied(ArrowTask):
    """Gives joined rows to a function, a record batch at a time, and checks what comes back.

    Where there are side outputs, rows have a row kind before them and a struct column for each side output behind them.

    Args:
        function: record batch in; a record batch out, or one and a dict of further ones by names of side outputs. It
            may have ``open()`` and ``close()``.
        schema: what it gives.
        outputs: of each of its side outputs.
        passed: side outputs that are there before it: rows of another kind than ``+I`` go past it, to the columns of
            these names.
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
        """Gives what the function makes of the rows of a Spark task.

        Raises:
            DescriptionError: something else than record batches with the columns of their schemas, or a side output
                that there is none of.
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
                    parts = self._made(rows)
                yield self._shown_together([*parts, *beside])
        finally:
            if opened:
                getattr(self._function, "close", _nothing)()

    def _parted(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, list[_Part]]:
        """The rows for the function, and those that go past it."""
        if not self._passed:
            return batch, []
        joined = pc.equal(batch[ROW_KIND_COLUMN], SHORT_STRINGS[INSERT])
        rest, parts = batch.filter(pc.invert(joined)), []
        for name in self._passed:
            rows = rest.filter(pc.is_valid(rest[name]))
            parts.append(_Part(LATE_ROW_KIND, rows.num_rows, {name: rows[name].cast(self._shown.field(name).type)}))
        return batch.filter(joined).drop_columns([ROW_KIND_COLUMN, *self._passed]), parts

    def _made(self, rows: pa.RecordBatch) -> list[_Part]:
        """What the function makes of rows."""
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
        """Rows of all outputs, one behind the other; what one does not have is null."""
        columns = []
        for field in self._shown:
            if self._kinds and field.name == ROW_KIND_COLUMN:
                arrays = [pa.repeat(pa.scalar(part.kind, field.type), part.rows) for part in parts]
            else:
                arrays = [part.columns.get(field.name, pa.nulls(part.rows, field.type)) for part in parts]
            columns.append(pa.concat_arrays(arrays))
        return pa.RecordBatch.from_arrays(columns, schema=self._shown)


class _Part(NamedTuple):
    """Rows of one output."""

    kind: str
    rows: int
    columns: dict[str, pa.Array]


class Grouped:
    """Gives both sides' rows of whole keys to a co-group's function, and checks what comes back.

    Args:
        function: left and right table in, one table out.
        schema: what it gives.
    """

    def __init__(self, function: Callable[[pa.Table, pa.Table], pa.Table], schema: st.StructType) -> None:
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self._function, self.schema = function, schema
        self._wanted = _fields(schema)

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
        return pa.Table.from_arrays(as_declared(who, made, self._wanted), schema=self._wanted)


def as_declared(who: str, made: pa.Table | pa.RecordBatch, wanted: pa.Schema) -> list[Any]:
    """What a function gave, in the columns and types of its schema.

    Args:
        who: the function, for errors.
        made: what it gave.
        wanted: its schema.

    Raises:
        DescriptionError: other columns, types that do not go into these without loss, or nulls where there are none.
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
    """A schema as the user gave it.

    Args:
        schema: a schema or its DDL text.
        option: what the user calls it.

    Raises:
        DescriptionError: it is none.
        StateError: there is no Spark session to ask.
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
