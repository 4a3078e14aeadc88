"""A user's function of joined pairs: Flink's ``ProcessJoinFunction``, by the record batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql import types as st

from gpu_ops.descriptions.by_time.interval_join import IntervalJoin
from gpu_ops.descriptions.changelog import LATE_ROW_KIND, ROW_KIND_COLUMN
from gpu_ops.descriptions.description import LATER
from gpu_ops.descriptions.inputs import Input
from gpu_ops.errors import DescriptionError
from gpu_ops.spark.datatypes import named_column
from gpu_ops.spark.plan.column_metadata import LATE_SIDES, SIDE, inputs_metadata, late_struct
from gpu_ops.spark.tasks.functions import Applied, applied_schema

Process = Callable[[pa.RecordBatch], pa.RecordBatch | tuple[pa.RecordBatch, Mapping[str, pa.RecordBatch]]]
"""Pairs in; rows out, alone or with those of side outputs by name."""

_CONTEXT: Final = ("left_timestamp", "right_timestamp", "timestamp")


class Described(NamedTuple):
    """A function, what it gives, and what it gives to each side output."""

    function: Process
    schema: st.StructType
    outputs: dict[str, st.StructType]


def described(
    join: IntervalJoin,
    process: Process | None,
    schema: st.StructType | str | None,
    side_outputs: Mapping[str, st.StructType | str] | None,
) -> Described | None:
    """A function as the user gave it, checked; None for none.

    Args:
        join: whose pairs it is given.
        process: the function.
        schema: of what it gives.
        side_outputs: of what it gives beside that, by name.

    Raises:
        DescriptionError: something of this has no place here, or a name is there twice.
    """
    if (process is None) != (schema is None):
        raise DescriptionError("process= and process_schema= go together")
    if process is None or schema is None:
        if side_outputs:
            raise DescriptionError("side_outputs= are those of process=, and there is none")
        return None
    if not callable(process):
        raise DescriptionError(f"process= is a function of record batches, not {type(process).__name__}")
    for method in ("open", "close"):
        if not callable(getattr(process, method, print)):
            raise DescriptionError(f"process= has {method}, which is no method")
    if join.how != "inner" or join.interval.time == "processing":
        raise DescriptionError("process= takes the pairs of an inner join by event time")
    taken = [c.name for c in join.output if c.name.lower() in _CONTEXT]
    if taken:
        raise DescriptionError(f"process= is given a column {taken[0]!r} of its own: rename the join's")
    made = applied_schema(schema)
    outputs = {name: applied_schema(x, f"side_outputs[{name!r}]") for name, x in (side_outputs or {}).items()}
    if outputs or join.interval.late == "tag":
        _check_names([*made.fieldNames(), *outputs], list(outputs))
    return Described(process, made, outputs)


def _check_names(names: list[str], outputs: list[str]) -> None:
    """Refuses names that would stand twice beside each other, and row kinds as names of side outputs."""
    there = [ROW_KIND_COLUMN, *LATE_SIDES]
    for name in names:
        if name.lower() in there:
            raise DescriptionError(f"process= would give two columns {name!r}; there are {', '.join(there)}")
        there.append(name.lower())
    for name in outputs:
        if not name.isidentifier() or name.lower() == LATE_ROW_KIND:
            raise DescriptionError(f"side_outputs= has {name!r}; a name is of letters, digits and _, and not 'late'")


def processed(changes: DataFrame, join: IntervalJoin, process: Described) -> DataFrame:
    """What a function makes of the pairs, and the late rows beside it.

    Args:
        changes: the join's changelog.
        join: its description.
        process: the function.
    """
    times = []
    for side, source in enumerate(join.inputs):
        shown = (c.name for c in join.output if c.side != LATER and join.own_column(side, c) == source.event_time)
        times.append(_as_timestamp(named_column(next(shown)), join, source))
    context = [c.alias(n) for c, n in zip((*times, f.greatest(*times)), _CONTEXT, strict=True)]
    if join.interval.late != "tag":
        rows, late = changes.drop(ROW_KIND_COLUMN).select("*", *context), {}
    else:
        rows = changes.select(
            "*", *context, *(late_struct(changes, side, name) for side, name in enumerate(LATE_SIDES))
        )
        late = {name: rows.schema[name].dataType for name in LATE_SIDES}
    applied = Applied(process.function, process.schema, process.outputs, late)
    made = rows.mapInArrow(applied, applied.schema)
    if not late and not process.outputs:
        return made
    kind = f.col(ROW_KIND_COLUMN).alias(ROW_KIND_COLUMN, metadata=inputs_metadata(changes))
    sides = {name: f.col(name).alias(name, metadata={SIDE: name}) for name in (*process.outputs, *late)}
    return made.select(kind, *(sides.get(x, named_column(x)) for x in made.columns[1:]))


def _as_timestamp(time: Column, join: IntervalJoin, source: Input) -> Column:
    """An event time in the type that both inputs' are compared in."""
    if pa.types.is_timestamp(join.time_type) and source.schema.field(source.event_time).type == pa.int64():
        if join.time_type.tz is not None:
            return f.timestamp_millis(time)
        seconds = time.cast("decimal(22,3)") / 1000
        return f.lit("1970-01-01").cast("timestamp_ntz") + f.make_dt_interval(secs=seconds.cast("decimal(18,6)"))
    return time
