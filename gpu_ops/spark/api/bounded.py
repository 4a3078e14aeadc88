"""Aggregates and co-groups as functions over DataFrames; co-groups only have a result once their input has ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Unpack

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as f
from pyspark.sql import types as st

from gpu_ops.descriptions.aggregate import Aggregate, Measure, parse_measure
from gpu_ops.descriptions.co_group import CoGroup
from gpu_ops.descriptions.keys import On, normalize_on
from gpu_ops.errors import DescriptionError
from gpu_ops.spark.api.checks import check_frames, run, settled
from gpu_ops.spark.api.functions import Grouped
from gpu_ops.spark.api.options import ChangelogOptions, KeyOptions, check_options
from gpu_ops.spark.api.streams import Stream, as_input, as_stream, resolve, resolve_key, spelling
from gpu_ops.spark.plan.union_layout import quoted


def aggregate(
    input: DataFrame | Stream,  # noqa: A002 - what it is called everywhere else in this pack
    by: str | Sequence[str] = (),
    aggregates: Mapping[str, str | tuple[str, str]] | None = None,
    **options: Unpack[ChangelogOptions],
) -> DataFrame:
    """One row per group, kept up to date; retractions are honoured, as Spark's own ``groupBy`` does not.

    The result is a changelog like that of a join: it can be joined, viewed and aggregated again. Types and nulls are as
    in Spark. Example::

        gpu_ops.aggregate(changes, by="user_id", aggregates={"total": "sum(amount)", "n": "count(*)"}, state=...)

    Args:
        input: a DataFrame or a `stream`.
        by: the columns that make a group, null being a value of its own; none for one row in all, which is there while
            any row is.
        aggregates: result column to ``"sum(amount)"``, ``"count(*)"``, ``"count(distinct user)"``, or to a pair like
            ``("sum", "amount")``; there are sum, count, min, max, avg, first and last. The last two go by the stream's
            ``sequence_by``, else by arrival, and leave nulls out.
        options: ``emit, state, backend, partitions, name, backlog``, as in `join`. With ``emit="at_end"`` a stream has
            no output: run the query to its end, and `finish` gives the result.

    Returns:
        ``row_kind``, the group columns and the aggregates: a static DataFrame for a static input, else a streaming one.
        The group is its unique key where none of its columns may be null.

    Raises:
        TypeError: no such option.
        DescriptionError: no such column or aggregate, a stream with a TTL, or ``emit="at_end"`` without ``state=``.
        NotBuiltError: Spark Connect.
        StateError: the state folder belongs to something else.
    """
    check_options("aggregate", options, ChangelogOptions)
    source = as_stream(input, "the input")
    static = check_frames([source.df])
    label = source.name or "input"
    _refuse_event_time(source, label)
    groups = (by,) if isinstance(by, str) else tuple(by)
    measures = [parse_measure(shown, text) for shown, text in (aggregates or {}).items()]
    described = Aggregate(
        as_input(source, "input"),
        tuple(resolve(source.df, column, label, "by") for column in groups),
        tuple(_respelled(source.df, measure) for measure in measures),
        "at_end" if static else options.get("emit", "per_batch"),
    )
    if described.emit != "at_end":
        described, source = _narrowed(described, source)
    return run(described, [source], options)


def _narrowed(described: Aggregate, source: Stream) -> tuple[Aggregate, Stream]:
    """The same without columns that are not looked at: they would travel, and perhaps be kept."""
    given = described.source
    looked_at = {*described.by, *(m.column for m in described.measures), *(given.unique_key or ()), given.sequence_by}
    names = [name for name in given.schema.names if name in looked_at] or given.schema.names[:1]
    if len(names) == len(given.schema.names):
        return described, source
    columns = [*([] if given.row_kind is None else [given.row_kind]), *names]
    narrow = dataclasses.replace(source, df=source.df.select([quoted(column) for column in columns]))
    fields = pa.schema([given.schema.field(name) for name in names])
    return dataclasses.replace(described, source=dataclasses.replace(given, schema=fields)), narrow


def co_group(
    left: DataFrame | Stream,
    right: DataFrame | Stream,
    on: On,
    apply: Callable[[pa.Table, pa.Table], pa.Table],
    schema: st.StructType | str,
    **options: Unpack[KeyOptions],
) -> DataFrame:
    """Gives a function both inputs' rows of the same keys, once they have ended; retractions are honoured.

    The function runs in Spark's tasks, once for many keys: it is given all rows of these keys, sorted by key, equal
    keys in the order they came. Streams have no output: run the query to its end, and `finish` gives the result.

    Args:
        left: the left input.
        right: the right input.
        on: as in `join`; at least one column.
        apply: takes the left's and the right's rows as Arrow tables (either may have none), gives a table.
        schema: of what it gives; a schema or its DDL text.
        options: ``state, backend, null_safe, partitions, name``, as in `join`; streams need ``state``. Rows with a
            null key are in no group, unless ``null_safe`` says so.

    Returns:
        What the function gives: a static DataFrame for static inputs; for streams a streaming one that never has a
        row, to be written to the sink ``noop``.

    Raises:
        TypeError: no such option.
        DescriptionError: no such columns, no function, or streams without ``state=``.
        NotBuiltError: Spark Connect.
        StateError: the state folder belongs to something else.
    """
    check_options("co_group", options, KeyOptions)
    function = Grouped.of(apply, schema)
    given = as_stream(left, "the left input"), as_stream(right, "the right input")
    sides, static = settled(given, ("left", "right"), options.get("state"))
    for side, which in zip(sides, ("left", "right"), strict=True):
        _refuse_event_time(side, side.name or which)
        if side.bad_rows == "tag":
            raise DescriptionError(f"input '{side.name or which}': bad_rows='tag' has no place in a function's result")
    described = CoGroup(
        as_input(sides[0], "left"),
        as_input(sides[1], "right"),
        tuple(resolve_key(key, sides) for key in normalize_on(on, null_safe=options.get("null_safe", False))),
    )
    result = run(described, sides, options, function=function)
    if static:
        return result
    # without a row ever, so that any column will do
    return result.select(*(f.lit(None).cast(x.dataType).alias(x.name) for x in function.schema.fields))


def _respelled(df: DataFrame, measure: Measure) -> Measure:
    """A measure in the column's own spelling."""
    if measure.column is None:
        return measure
    return measure._replace(column=spelling(df, measure.column) or measure.column)


def _refuse_event_time(source: Stream, label: str) -> None:
    if source.event_time is not None:
        raise DescriptionError(f"input '{label}': event_time= is for gpu_ops.interval_join()")
