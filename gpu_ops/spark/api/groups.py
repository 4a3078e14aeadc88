"""Aggregates, the first rows of groups and the latest row of each key, as users call them.

A column of Spark's ``window()`` that rows are grouped by is two times to the engine, its start and its end.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, Unpack

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from gpu_ops.conditions import backquoted
from gpu_ops.descriptions.aggregate import TWO_COLUMNS, Aggregate, AggregateSpec, Measure, parse_measure
from gpu_ops.descriptions.arguments import check_options
from gpu_ops.descriptions.changelog import ROW_KIND_COLUMN
from gpu_ops.descriptions.description import Emit
from gpu_ops.descriptions.groups import Keep, Latest, Top, parse_order
from gpu_ops.descriptions.sessions import END, START, SessionAggregate
from gpu_ops.descriptions.times import Duration, parse_duration
from gpu_ops.errors import DescriptionError
from gpu_ops.query.catalyst import items, message_of
from gpu_ops.query.errors import NOW
from gpu_ops.spark.api.apply import apply_operator, check_frames
from gpu_ops.spark.api.by_time import heartbeat_ms, timed_input
from gpu_ops.spark.api.streams import ChangelogOptions, Stream, as_input, as_stream, resolve, resolve_all, with_options
from gpu_ops.spark.metrics.metrics import free_name
from gpu_ops.spark.plan.column_metadata import OWN_COLUMN, is_changelog
from gpu_ops.spark_types import is_window, named_column, spelling

_FILTER: Final = re.compile(r"(.*\))\s*filter\s*\(\s*where\s+(.+)\)\s*", re.IGNORECASE | re.DOTALL)


@with_options(ChangelogOptions)
def aggregate(
    input: DataFrame | Stream,  # noqa: A002 - what it is called everywhere else in this pack
    by: str | Sequence[str] = (),
    aggregates: Mapping[str, AggregateSpec] | None = None,
    *,
    window_end: str | None = None,
    session_gap: Duration | None = None,
    late: Literal["drop", "tag"] = "drop",
    heartbeat: Duration | None = None,
    **options: Unpack[ChangelogOptions],
) -> DataFrame:
    """Aggregates a stream: one row per group, kept up to date, also by retractions, which Spark's ``groupBy`` ignores.

    The result is a changelog like that of a join: it can be joined, viewed and aggregated again. Types and nulls are as
    in Spark. With ``emit="at_end"`` a stream has no output: run the query to its end, and `finish` returns the result.
    With ``emit="at_watermark"`` a group is emitted once, when the watermark of the input (``withWatermark``, or
    ``stream(event_time=, delay=)``) reaches the end of its window, and is forgotten; rows that come later are late.

    Args:
        input: a DataFrame or a `stream`.
        by: the columns of a group, null being a value of its own; none for one row in all, which exists while any input
            row does. A column of Spark's ``window()`` may be among them.
        aggregates: result column to ``"sum(amount)"``, ``"count(*)"``, ``"count(distinct user)"``, or to a pair like
            ``("sum", "amount")``; there are sum, count, min, max, avg, stddev, variance (and ``_pop``, ``_samp``),
            ``"corr(x, y)"``, covar_pop, covar_samp, collect_list, collect_set, ``"string_agg(name, ', ')"``, first and
            last. The last two go by the stream's ``sequence_by``, else by arrival; what is collected is in ascending
            order, and all leave nulls out. ``"sum(amount) FILTER (WHERE paid)"`` takes rows for
            which a condition of Spark's is true. A function of one's own is a `gpu_ops.AggregateFunction`.
        window_end: with ``emit="at_watermark"`` the column of ``by`` that is the end of a group's window; by default a
            window's own, or the event time if that is in ``by``.
        session_gap: group by sessions of the input's event time as well: rows of which each comes no later than so long
            after the one before it. The result has a column ``session_window`` behind the group's, from the first
            row's time to the last one's plus the gap, as Spark's ``session_window()`` has it. Not with
            ``emit="per_event"``, ``first`` and ``last``.
        late: with ``emit="at_watermark"`` the treatment of late rows. ``"drop"``: they are dropped and counted.
            ``"tag"``: they are emitted with the row kind ``late``, in columns behind the aggregates, see `side`; only
            for an insert-only input.
        heartbeat: with ``emit="at_watermark"`` the longest time between two micro-batches, so that groups are emitted
            when no rows arrive.
        options: further options, which `gpu_ops.spark.api.streams.ChangelogOptions` lists.

    Returns:
        ``row_kind``, the group columns and the aggregates: a static DataFrame for a static input, else a streaming one.
        The group is its unique key where none of its columns may be null.

    Raises:
        TypeError: there is no such option.
        DescriptionError: there is no such column or aggregate, a stream has a TTL, or ``emit="at_end"`` lacks
            ``state=``.
        NotBuiltError: Spark Connect.
        StateError: the state folder belongs to something else.

    Example:
        >>> sales = spark.createDataFrame([("a", 2), ("a", 3), ("b", 5)], "user STRING, amount INT")
        >>> measures = {"total": "sum(amount)", "sales": "count(*)"}
        >>> gpu_ops.aggregate(sales, by="user", aggregates=measures).orderBy("user").show()
        +--------+----+-----+-----+
        |row_kind|user|total|sales|
        +--------+----+-----+-----+
        |      +I|   a|    5|    2|
        |      +I|   b|    5|    1|
        +--------+----+-----+-----+
    """
    check_options(aggregate, options, ChangelogOptions)
    source, emit = _one_input(input, options)
    static, label = not source.df.isStreaming, source.label
    groups = resolve_all(source, by, "by")
    end = None if window_end is None else resolve(source.df, window_end, label, "window_end")
    source, groups, windows = flattened(source, groups)
    there = source.df.columns
    source, measures = _measures(source, aggregates or {}, label)
    upstream: str | None = None
    period = heartbeat_ms(heartbeat, emit)
    if period is not None and emit != "at_watermark":
        raise DescriptionError("heartbeat= goes with emit='at_watermark' only")
    if emit == "at_watermark" or session_gap is not None:
        source, above = timed_input(source, goes_by_watermark=emit == "at_watermark")
        upstream = above if emit == "at_watermark" else None
    late = "drop" if static else late
    described: Aggregate
    if session_gap is None:
        if emit == "at_watermark":
            end = end or (windows[0].end if windows else None)
        described = Aggregate(as_input(source), groups, measures, emit, None if static else end, late)
    else:
        if end is not None:
            raise DescriptionError("a session is a window of its own: window_end= has no place beside session_gap=")
        taken = [*source.df.columns, *(measure.name for measure in measures), *(window.name for window in windows)]
        session = Window(*(free_name(name, taken) for name in ("session_window", START, END)))
        described = SessionAggregate(
            as_input(source),
            groups,
            measures,
            emit,
            late=late,
            gap_ms=parse_duration(session_gap),  # type: ignore[arg-type]
            start=session.start,
            end=session.end,
        )
        windows = (*windows, session)
    if described.emit != "at_end" and described.late == "drop":
        described, source = _narrowed(described, source)
    made = apply_operator(described, [source], options, upstream=(upstream, None), heartbeat_ms=period)
    if described.late == "tag":
        made = made.drop(*(column for column in source.df.columns if column not in there))
    return rebuilt(made, windows)


def _one_input(given: DataFrame | Stream, options: Mapping[str, Any]) -> tuple[Stream, Emit]:
    source = as_stream(given, "the input", "input")
    return source, "at_end" if check_frames([source.df]) else options.get("emit", "per_batch")


def _narrowed(described: Aggregate, source: Stream) -> tuple[Aggregate, Stream]:
    """Removes the columns that an aggregate does not read, so that they are neither sent nor kept."""
    given = described.source
    looked_at: set[str | None] = {*described.by, *(given.unique_key or ()), given.sequence_by, given.event_time}
    looked_at.update(column for measure in described.measures for column in measure.columns)
    names = [name for name in given.schema.names if name in looked_at] or given.schema.names[:1]
    if len(names) == len(given.schema.names):
        return described, source
    columns = [*([] if given.row_kind is None else [given.row_kind]), *names]
    narrow = dataclasses.replace(source, df=source.df.select([named_column(column) for column in columns]))
    fields = pa.schema([given.schema.field(name) for name in names])
    return dataclasses.replace(described, source=dataclasses.replace(given, schema=fields)), narrow


def _measures(
    source: Stream, aggregates: Mapping[str, AggregateSpec], label: str
) -> tuple[Stream, tuple[Measure, ...]]:
    """Parses the aggregates, with columns as the DataFrame spells them.

    For ``FILTER (WHERE ...)`` the input gets a further column, null where the condition is not true: no aggregate
    counts nulls.
    """
    found = []
    for name, text in aggregates.items():
        parts = _FILTER.fullmatch(text) if isinstance(text, str) else None
        measure = parse_measure(name, text if parts is None else parts.group(1))
        if measure.own is not None:
            own = measure.own.of(tuple(spelling(source.df, column) or column for column in measure.columns))
            measure = measure._replace(own=own)
        if measure.column is not None:
            measure = measure._replace(column=spelling(source.df, measure.column) or measure.column)
        if measure.function in TWO_COLUMNS and measure.second is not None:
            measure = measure._replace(second=spelling(source.df, measure.second) or measure.second)
        if parts is not None:
            source, column = _filtered(source, measure, parts.group(2), label)
            measure = measure._replace(column=column)
        found.append(measure)
    return source, tuple(found)


def _filtered(source: Stream, measure: Measure, condition: str, label: str) -> tuple[Stream, str]:
    """Adds a column with the values of an aggregate for which a condition is true; returns the input and its name."""
    value = "1" if measure.column is None else backquoted(measure.column)
    column = free_name(f"{measure.name}_filtered", [*source.df.columns, measure.name])
    expression = f.expr(f"CASE WHEN {condition} THEN {value} END")
    row_kind = ROW_KIND_COLUMN if source.row_kind is None and is_changelog(source.df) else source.row_kind
    text = f"input '{label}': {measure} FILTER (WHERE {condition})"
    own = source.df if row_kind is None else source.df.drop(row_kind)
    try:
        # a change and what takes it back have to be alike
        plan = own.select(expression.alias(column))._jdf.queryExecution().analyzed()
    except PySparkException as error:
        raise DescriptionError(f"{text}: {message_of(error)}") from error
    (made,) = items(plan.expressions())
    if not made.deterministic() or any(f'.{kind}"' in made.toJSON() for kind in NOW):
        raise DescriptionError(f"{text} has another value when a row is taken back")
    return dataclasses.replace(source, df=source.df.withColumn(column, expression)), column


class Window(NamedTuple):
    """A column of windows, and the columns of their starts and ends."""

    name: str
    start: str
    end: str


def flattened(source: Stream, by: Sequence[str]) -> tuple[Stream, tuple[str, ...], tuple[Window, ...]]:
    """Replaces each window among the group columns by two columns, its start and its end.

    Returns:
        The input, the group columns, and the windows.

    Raises:
        DescriptionError: a window is of ``session_window``, whose rows are those of single events.
    """
    df = source.df
    for name in by:
        if "spark.sessionWindow" in (df.schema[name].metadata or {}):
            raise DescriptionError(
                f"by={name!r} is a session_window, whose rows are those of single events: give the gap, as "
                "session_gap='10 minutes'"
            )
    names = [name for name in by if is_window(df.schema[name].dataType)]
    if not names:
        return source, tuple(by), ()
    windows: dict[str, Window] = {}
    taken = list(df.columns)
    for name in names:
        for part in ("start", "end"):
            taken.append(free_name(f"{name}_{part}", taken))
        windows[name] = Window(name, *taken[-2:])
    columns = []
    for name in df.columns:
        parts = zip(("start", "end"), windows[name][1:], strict=True) if name in windows else ()
        found = [named_column(name).getField(part).alias(alias) for part, alias in parts]
        columns += found or [named_column(name)]
    groups = [part for name in by for part in (windows[name][1:] if name in windows else (name,))]
    return dataclasses.replace(source, df=df.select(columns)), tuple(groups), tuple(windows.values())


def rebuilt(changes: DataFrame, windows: Sequence[Window]) -> DataFrame:
    """Puts the two columns of each window in a result together again."""
    if not windows:
        return changes
    starts, ends = {window.start: window for window in windows}, {window.end for window in windows}
    columns = []
    for name in changes.columns:
        window = starts.get(name)
        if window is not None:
            parts = named_column(window.start).alias("start"), named_column(window.end).alias("end")
            shown = OWN_COLUMN[0] in (changes.schema[window.start].metadata or {})
            columns.append(f.struct(*parts).alias(window.name, metadata={OWN_COLUMN[0]: window.name} if shown else {}))
        elif name not in ends:
            columns.append(named_column(name))
    return changes.select(columns)


@with_options(ChangelogOptions)
def top(
    input: DataFrame | Stream,  # noqa: A002 - what it is called everywhere else in this pack
    by: str | Sequence[str] = (),
    *,
    order_by: str | Sequence[str],
    n: int = 1,
    number: str | None = None,
    **options: Unpack[ChangelogOptions],
) -> DataFrame:
    """Keeps the first n rows of each group of a stream, as a changelog (top-N).

    It is ``ROW_NUMBER() OVER (PARTITION BY region ORDER BY amount DESC) <= 3`` over an input that changes.

    Args:
        input: a DataFrame or a `stream`; also the changelog of a join.
        by: the columns of a group (null is a value of its own); none for one group in all.
        order_by: ``"amount DESC, id"``, or a list of such terms; nulls as in Spark: first if ascending, last if
            descending, unless ``NULLS FIRST`` or ``NULLS LAST`` is given. Of equal rows the one that arrived earlier
            comes first.
        n: the number of rows of each group.
        number: the name of a further column with the number of a row in its group, from 1. Then a row in front that
            comes or goes changes all rows behind it.
        options: further options, which `gpu_ops.spark.api.streams.ChangelogOptions` lists.

    Returns:
        ``row_kind``, then the input's columns: a static DataFrame for a static input, else a streaming one. The unique
        key is the input's.

    Raises:
        TypeError: there is no such option.
        DescriptionError: there is no such column, no order, or a TTL.
        NotBuiltError: Spark Connect.
        StateError: the state folder belongs to something else.

    Example:
        >>> orders = spark.createDataFrame([("n", 5), ("n", 9), ("s", 4)], "region STRING, amount INT")
        >>> gpu_ops.top(orders, by="region", order_by="amount DESC").orderBy("region").show()
        +--------+------+------+
        |row_kind|region|amount|
        +--------+------+------+
        |      +I|     n|     9|
        |      +I|     s|     4|
        +--------+------+------+
    """
    check_options(top, options, ChangelogOptions)
    source, emit = _one_input(input, options)
    named, order = resolve_all(source, by, "by"), parse_order(order_by)
    columns = resolve_all(source, [one.column for one in order], "order_by")
    order = tuple(one._replace(column=column) for one, column in zip(order, columns, strict=True))
    described = Top(as_input(source), named, order, n, emit, number)
    return apply_operator(described, [source], options, stacklevel=2)


@with_options(ChangelogOptions)
def latest(
    input: DataFrame | Stream,  # noqa: A002 - what it is called everywhere else in this pack
    key: str | Sequence[str] | None = None,
    *,
    order_by: str | None = None,
    keep: Keep = "last",
    unavailable: str | None = None,
    **options: Unpack[ChangelogOptions],
) -> DataFrame:
    """Keeps the latest row of each key of a stream of upserts and deletes, as a changelog with retractions.

    A join distributes an upsert input by its unique key, as the old and the new row of a key have to meet; where the
    join has another key, all its rows are in one partition. This function adds the old row to the new one, so that the
    join is distributed by its own key. It has no ``emit="at_end"``.

    Args:
        input: a streaming DataFrame or a `stream`; its ``row_kind`` tells deletes. Within a micro-batch
            ``sequence_by`` tells which change is the last, between micro-batches the later one is.
        key: the columns that identify a row; by default the stream's ``unique_key``.
        order_by: the column by which one row is later than another, whenever they arrive; of equal ones the row that
            arrives later is later. By default the order of arrival.
        keep: the row that is kept of each key. ``"last"``: the latest one. ``"first"``: the first one, which later ones
            do not replace (with ``order_by`` an earlier one does). ``"first"`` and ``order_by`` are for insertions
            only, without ``row_kind``.
        unavailable: a column with lists of columns' names, as `read_kafka` makes it with ``unavailable=``: a change
            lacks the values of these columns, and the row keeps those that it had. The result does not have that
            column. A change without an earlier row is a bad row.
        options: further options, which `gpu_ops.spark.api.streams.ChangelogOptions` lists.

    Returns:
        A streaming DataFrame: ``row_kind``, then the input's columns; its unique key is ``key``.

    Raises:
        TypeError: there is no such option.
        DescriptionError: there is no such column, no key, a static DataFrame, or row kinds with ``order_by`` or
            ``"first"``.
        NotBuiltError: Spark Connect.
        StateError: the state folder belongs to something else.

    Example:
        >>> orders = spark.readStream.schema("id INT, item STRING").json(folder)
        >>> gpu_ops.latest(orders, key="id", state=folder + "/state").columns
        ['row_kind', 'id', 'item']
    """
    check_options(latest, options, ChangelogOptions)
    source, emit = _one_input(input, options)
    label = source.label
    if not source.df.isStreaming:
        raise DescriptionError(f"input '{label}': latest() takes a stream; a static DataFrame has no later rows")
    if key is not None:
        source = dataclasses.replace(source, unique_key=resolve_all(source, key, "key"))
    if emit == "at_end":
        raise DescriptionError("emit='at_end' has no place here: a join of the same input with it folds upserts, too")
    by = None if order_by is None else resolve(source.df, order_by, label, "order_by")
    told = None if unavailable is None else resolve(source.df, unavailable, label, "unavailable")
    described = Latest(as_input(source, derive=False), emit, by, keep, told)
    return apply_operator(described, [source], options, stacklevel=2)
