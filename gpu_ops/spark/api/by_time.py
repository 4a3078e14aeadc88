"""Joins by time as functions from DataFrames to their changelog: interval, ASOF and temporal joins.

A function over an interval join's pairs (``process=``) is Flink's ``ProcessJoinFunction``, by the record batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal, NamedTuple, Unpack

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql import types as st

from gpu_ops.descriptions.arguments import check_options
from gpu_ops.descriptions.by_time import Asof, AsofJoin, Direction, IntervalJoin, TemporalJoin
from gpu_ops.descriptions.changelog import LATE_ROW_KIND, ROW_KIND_COLUMN
from gpu_ops.descriptions.description import LATER, Emit
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.interval import Interval
from gpu_ops.descriptions.keys import On
from gpu_ops.descriptions.times import Duration, Late, parse_bound
from gpu_ops.errors import DescriptionError
from gpu_ops.spark.api.apply import apply_operator, settled, two_sided
from gpu_ops.spark.api.streams import (
    ChangelogOptions,
    IntervalJoinOptions,
    JoinTypeName,
    KeyOptions,
    Stream,
    TwoSidedOptions,
    resolve,
    two_streams,
    with_options,
)
from gpu_ops.spark.plan.column_metadata import (
    LATE_SIDES,
    SIDE,
    Delay,
    delays,
    has_watermarks_of_parts,
    inputs_metadata,
    late_struct,
    lost_row_time,
    made_by,
)
from gpu_ops.spark.tasks.functions import ProcessPairs, applied_schema
from gpu_ops.spark_types import is_window, named_column

ProcessFunction = Callable[[pa.RecordBatch], pa.RecordBatch | tuple[pa.RecordBatch, Mapping[str, pa.RecordBatch]]]
"""Takes joined pairs, and returns rows, alone or with those of side outputs by name."""

_CONTEXT: Final = ("left_timestamp", "right_timestamp", "timestamp")


class Described(NamedTuple):
    """A user's function over pairs, with the schemas of its result and of each side output."""

    function: ProcessFunction
    schema: st.StructType
    outputs: dict[str, st.StructType]


EventTimeColumns = tuple[str, str] | Literal["processing"] | None
"""The event-time columns of left and right, ``"processing"``, or None where the inputs name them."""


@with_options(IntervalJoinOptions)
def interval_join(
    left: DataFrame | Stream,
    right: DataFrame | Stream,
    on: On = None,
    how: JoinTypeName = "inner",
    *,
    lower: Duration,
    upper: Duration,
    time: EventTimeColumns = None,
    lower_inclusive: bool = True,
    upper_inclusive: bool = True,
    keyed: bool = False,
    late: Late | None = None,
    min_cleanup: Duration = 0,
    timestamp: str | None = None,
    process: ProcessFunction | None = None,
    process_schema: st.StructType | str | None = None,
    side_outputs: Mapping[str, st.StructType | str] | None = None,
    heartbeat: Duration | None = None,
    **options: Unpack[IntervalJoinOptions],
) -> DataFrame:
    """Joins rows of two streaming DataFrames whose times are no further apart than the bounds allow.

    A pair matches when ``lower <= right time - left time <= upper``, besides its keys and condition. Rules:
    Flink's SQL interval join, or with ``keyed`` its DataStream one. Durations are ``"-5 minutes"``,
    milliseconds, or timedeltas. Two static DataFrames are joined at once, into a static DataFrame of insertions.

    Args:
        left: the left input; its event time is a column of it, and ``withWatermark`` or `stream` says how late rows may
            come.
        right: the right input, likewise.
        on: the key: ``"k"``, ``["k", ("left_k", "right_k")]``, or None for no equality column.
        how: the join type. ``"inner"``: pairs. ``"left"``, ``"right"``, ``"full"``: also unmatched rows of that input
            or of both, emitted when the watermark passes the time until which they could have matched. ``"semi"``: each
            left row once, at its first match. ``"anti"``: the left rows that ``"left"`` would emit as unmatched. The
            last two have the left's columns only.
        lower: the least difference of the right row's time and the left row's.
        upper: the greatest difference.
        time: the event-time columns of left and right, or ``"processing"`` to go by the clock; may be left out where
            the inputs name them.
        lower_inclusive: whether the lower bound itself matches.
        upper_inclusive: whether the upper bound itself matches.
        keyed: whether Flink's DataStream rules hold.
        late: the treatment of late rows. ``"join"``: they join the rows still in state (SQL's default). ``"drop"``:
            they are dropped and counted (default with ``keyed``). ``"tag"``: they are emitted with the row kind
            ``late``, see `side`; late rows on the right of a semi or anti join, which has no columns for them, are
            dropped and counted.
        min_cleanup: the time for which expired rows are kept at least, to be joined by late ones.
        timestamp: the name of a further output column with the later of both times.
        process: a function that takes record batches of joined rows and returns others, of any number of rows, in the
            Spark task. They have the join's columns, ``left_timestamp``, ``right_timestamp`` and ``timestamp``, the
            later
            of both: Flink's ProcessJoinFunction and its context, by the batch. An object may have ``open()`` and
            ``close()``, as Flink's rich functions: each Spark task (a partition in a micro-batch) has a copy of its
            own, opened before the task's first pairs, and closed when the task has ended or failed; not where its
            process is killed. A task without pairs opens nothing. Late rows go past it.
        process_schema: the schema of its result, or its DDL text.
        side_outputs: schemas of further outputs, by name. The function then returns a tuple: its record batch, and a
            dict of record batches by name (Flink: ``Context.output``). See `side`.
        heartbeat: the longest time between two micro-batches, so that unmatched rows are emitted without new rows.
        options: further options, which `gpu_ops.spark.api.streams.IntervalJoinOptions` lists.

    Returns:
        A streaming DataFrame, or a static one: ``row_kind`` and the columns of the join; with ``process`` the columns
        of that function. With side outputs or ``late="tag"`` as well, ``row_kind`` is the first column, ``+I`` for the
        function's rows, and the last ones are a struct for each side output, which `side` takes apart.

    Raises:
        TypeError: there is no such option.
        DescriptionError: the join is not possible.
        NotBuiltError: Spark Connect.
        StateError: the state folder belongs to something else.

    Example:
        >>> orders = spark.createDataFrame([("a", 1_000), ("b", 2_000)], "id STRING, ordered BIGINT")
        >>> payments = spark.createDataFrame([("a", 1_500), ("b", 9_000)], "id STRING, paid BIGINT")
        >>> times = ("ordered", "paid")
        >>> gpu_ops.interval_join(orders, payments, "id", time=times, lower=0, upper="1 second").show()
        +--------+---+-------+----+
        |row_kind| id|ordered|paid|
        +--------+---+-------+----+
        |      +I|  a|   1000|1500|
        +--------+---+-------+----+
    """
    check_options(interval_join, options, IntervalJoinOptions)
    sides, emit = settled(two_streams(left, right), options)
    interval = Interval.of(
        lower, upper, lower_inclusive=lower_inclusive, upper_inclusive=upper_inclusive, keyed=keyed, late=late,
        min_cleanup=min_cleanup, timestamp=timestamp, time="processing" if time == "processing" else "event",
    )  # fmt: skip
    period = heartbeat_ms(heartbeat, emit)
    if process is not None and emit == "at_end" and sides[0].df.isStreaming:
        raise DescriptionError(
            "process= is given the output of the query, and with emit='at_end' there is none: apply the function "
            "with mapInArrow to what gpu_ops.finish() gives"
        )
    upstream: tuple[str | None, str | None] = (None, None)
    if interval.time == "event":
        sides, upstream = timed(sides, time)
    description, sides, hidden = two_sided(
        IntervalJoin, how, on, sides, options, derive=False, emit=emit, interval=interval
    )
    if hidden and process is not None:
        raise DescriptionError(
            "process= takes the join's columns alone: call the functions in where= in the inputs first"
        )
    function = described(description, process, process_schema, side_outputs)
    changes = apply_operator(description, sides, options, upstream=upstream, heartbeat_ms=period)
    return changes if function is None else processed(changes, description, function)


def heartbeat_ms(heartbeat: Duration | None, emit: Emit) -> int | None:
    """Checks a heartbeat, and returns the longest time between two micro-batches in milliseconds.

    Args:
        heartbeat: the duration that the user gave.
        emit: the operator's ``emit``.

    Raises:
        DescriptionError: it is no such duration, or has no place here.
    """
    period = None if heartbeat is None else parse_bound(heartbeat)
    if period is not None and period < 1:
        raise DescriptionError(f"heartbeat={heartbeat!r}; it is at least a millisecond")
    if period is not None and emit == "at_end":
        raise DescriptionError("heartbeat= is for rows that time brings; at the end of input all come at once")
    return period


def timed(
    sides: Sequence[Stream], time: str | tuple[str, str] | None = None, *, goes_by_watermark: bool = True
) -> tuple[tuple[Stream, Stream], tuple[str | None, str | None]]:
    """Finds the event times and delays of two inputs, and the plan ids of the joins that their watermarks come from.

    Args:
        sides: the left and the right input.
        time: the event-time columns, as in `asof_join`.
        goes_by_watermark: whether the operator has a watermark.

    Raises:
        DescriptionError: an input does not say what its event time is, or is a union with several watermarks.
    """
    both = (time, time) if isinstance(time, str) else time
    if both is not None and not (isinstance(both, tuple) and len(both) == 2 and all(isinstance(c, str) for c in both)):
        raise DescriptionError(f"time={time!r}; it is the event-time columns of left and right, or one name for both")
    (left, from_left), (right, from_right) = (
        timed_input(side, own, goes_by_watermark=goes_by_watermark)
        for side, own in zip(sides, both or (None, None), strict=True)
    )
    return (left, right), (from_left, from_right)


def timed_input(side: Stream, time: str | None = None, *, goes_by_watermark: bool = True) -> tuple[Stream, str | None]:
    """Finds the event time and delay of an input, and the plan id of the join by time that its watermark comes from.

    Args:
        side: the input.
        time: its event-time column; None where the input names it.
        goes_by_watermark: whether the operator has a watermark.

    Raises:
        DescriptionError: it does not say what its event time is, or is a union with several watermarks.
    """
    label = side.label
    found = {name: known for name, known in delays(side.df).items() if not is_window(side.df.schema[name].dataType)}
    column = side.event_time
    if time is not None:
        named = resolve(side.df, time, label, "time")
        if column not in (None, named):
            raise DescriptionError(f"input '{label}': time= names {named!r} and stream() event time {column!r}")
        column = named
    if column is None:
        if len(found) != 1:
            which = f"{len(found)} columns with a watermark ({', '.join(found)})" if found else "no watermark"
            lost = None if found else lost_row_time(side.df)
            if lost is not None:
                which += f": {lost}. Join by time first, or"
            raise DescriptionError(
                f"input '{label}' has {which}{'' if lost else ':'} say which column is its event time, with time=, "
                "withWatermark() or stream(..., event_time=)"
            )
        (column,) = found
    known = found.get(column, Delay(0, None)) if side.delay_ms is None else Delay(side.delay_ms, None)
    given = side.delay_ms is not None or column in found
    of_spark = goes_by_watermark and given and side.delay_ms is None and known.plan_id is None
    if of_spark and has_watermarks_of_parts(side.df):
        raise DescriptionError(
            f"input '{label}' is a union of streams with a watermark each, of which the smallest would be its own: "
            f"give it one for all of its rows instead, withWatermark({column!r}, ...) behind the union"
        )
    side = dataclasses.replace(side, event_time=column, delay_ms=known.ms if given else None)
    # The join that made a row knows how old its next ones may be; a column on its own only guesses.
    made = None if known.plan_id is None else made_by(side.df)
    return side, known.plan_id if made is not None and made.plan_id == known.plan_id else None


class AsofJoinOptions(KeyOptions, ChangelogOptions, total=False):
    """The options that an ASOF join shares with other operators.

    Attributes:
        suffixes: two suffixes for column names that both inputs have.
    """

    suffixes: tuple[str, str] | None


@with_options(AsofJoinOptions)
def asof_join(
    left: DataFrame | Stream,
    right: DataFrame | Stream,
    on: On = None,
    *,
    time: str | tuple[str, str] | None = None,
    direction: Direction = "backward",
    tolerance: Duration | None = None,
    allow_exact_matches: bool = True,
    how: Literal["left", "inner"] = "left",
    **options: Unpack[AsofJoinOptions],
) -> DataFrame:
    """Joins each left row with the right row of its key that is nearest in time; the result is a changelog.

    ``direction``, ``tolerance`` and ``allow_exact_matches`` are those of pandas' ``merge_asof``; but ``on`` is
    the key, which pandas and polars call ``by``, and ``time`` the times, which they call ``on``. A match comes at once,
    and is retracted and replaced when a better one comes, or when the matched row is deleted or changed. With
    ``emit="at_watermark"`` each row comes once, when the watermark has passed all other rows that it could match; both
    inputs are insert-only then. Two static DataFrames are joined at once, into a static DataFrame of insertions.

    Args:
        left: the left input; it may be a changelog.
        right: the right input, likewise. Of its rows of one time the one with the greatest ``sequence_by`` counts, else
            the one that came last.
        on: the key: ``"k"``, ``["k", ("left_k", "right_k")]``; None for one group of all rows.
        time: the event-time columns of left and right, or one name for both; may be left out where ``withWatermark`` or
            `stream` names them. Timestamps, or bigints with milliseconds since the epoch. A row without a time matches
            nothing. If both columns have one name the left's is shown, unless there are suffixes.
        direction: the right row that is looked for. ``"backward"``: the last one at or before the left row's time.
            ``"forward"``: the first one at or after it. ``"nearest"``: the nearer of these two, the earlier one if both
            are as near.
        tolerance: the greatest difference of the times, inclusive: ``"1 second"``, milliseconds or a timedelta.
        allow_exact_matches: whether a right row of just the left row's time matches.
        how: the join type. ``"left"``: left rows without a match come with nulls. ``"inner"``: they are left out.
        options: further options, which `gpu_ops.spark.api.by_time.AsofJoinOptions` lists.

    Returns:
        A streaming DataFrame, or a static one; first column ``row_kind``, then the columns of the join.

    Raises:
        TypeError: there is no such option.
        DescriptionError: the join is not possible.
        NotBuiltError: Spark Connect.
        StateError: the state folder belongs to something else.

    Example:
        >>> trades = spark.createDataFrame([("x", 1_000), ("x", 3_000)], "symbol STRING, at BIGINT")
        >>> quotes = spark.createDataFrame([("x", 900, 10), ("x", 2_900, 11)], "symbol STRING, since BIGINT, bid INT")
        >>> gpu_ops.asof_join(trades, quotes, "symbol", time=("at", "since")).show()
        +--------+------+----+-----+---+
        |row_kind|symbol|  at|since|bid|
        +--------+------+----+-----+---+
        |      +I|     x|1000|  900| 10|
        |      +I|     x|3000| 2900| 11|
        +--------+------+----+-----+---+
    """
    check_options(asof_join, options, AsofJoinOptions)
    sides, emit = settled(two_streams(left, right), options)
    sides, upstream = timed(sides, time, goes_by_watermark=emit == "at_watermark")
    description, sides, _ = two_sided(
        AsofJoin,
        how,
        on,
        sides,
        options,
        emit=emit,
        asof=Asof.of(direction, tolerance, allow_exact_matches=allow_exact_matches),
    )
    return apply_operator(description, sides, options, upstream=upstream if description.by_event_time else (None, None))


@with_options(TwoSidedOptions)
def temporal_join(
    left: DataFrame | Stream,
    right: DataFrame | Stream,
    on: On,
    *,
    time: tuple[str, str] | None = None,
    how: Literal["inner", "left"] = "inner",
    late: Late = "join",
    ttl: Duration | None = None,
    heartbeat: Duration | None = None,
    **options: Unpack[TwoSidedOptions],
) -> DataFrame:
    """Joins each left row with the version of the right input that was valid at the row's time.

    ``left JOIN right FOR SYSTEM_TIME AS OF left.time``, after Flink's event-time temporal join. The right input is a
    versioned table: each of its rows is valid for its key from its own time until that of the next one, a
    deletion (``-D``) ends what was valid, and ``-U`` means nothing. A left row is emitted once, when the
    watermark passes its time, and nothing changes it any more. Two static DataFrames are joined at once.

    Args:
        left: the left input; its rows are insertions.
        right: the versioned table: a changelog, upserts, or insertions.
        on: the key, as in `join`: columns that identify a row of the versioned table.
        time: the event-time columns of left and right; may be left out where ``withWatermark`` or `stream` names them.
        how: the join type. ``"inner"``: left rows without a valid version are left out. ``"left"``: they come with
            nulls.
        late: the treatment of left rows below the watermark. ``"join"``: as in Flink, they are joined with the versions
            still in state, at the next watermark. ``"drop"``: they are dropped and counted. ``"tag"``: they are emitted
            with the row kind ``late``. Late versions are always used for rows that wait.
        ttl: Flink's ``table.exec.state.ttl``: a key for which nothing comes so long, by the clock, is forgotten with
            all its versions, and with left rows that wait, which are then never emitted; half as much later at
            the latest.
        heartbeat: the longest time between two micro-batches, so that rows are emitted without new ones.
        options: further options, which `gpu_ops.spark.api.streams.TwoSidedOptions` lists.

    Returns:
        A streaming DataFrame, or a static one: ``row_kind``, always ``+I``, and the columns of the join.

    Raises:
        TypeError: there is no such option.
        DescriptionError: the join is not possible.
        NotBuiltError: Spark Connect.
        StateError: the state folder belongs to something else.

    Example:
        >>> orders = spark.createDataFrame([("EUR", 1_000), ("EUR", 3_000)], "currency STRING, at BIGINT")
        >>> columns = "currency STRING, since BIGINT, rate DOUBLE"
        >>> rates = spark.createDataFrame([("EUR", 500, 1.1), ("EUR", 2_000, 1.2)], columns)
        >>> gpu_ops.temporal_join(orders, rates, "currency", time=("at", "since")).show()
        +--------+--------+----+-----+----+
        |row_kind|currency|  at|since|rate|
        +--------+--------+----+-----+----+
        |      +I|     EUR|1000|  500| 1.1|
        |      +I|     EUR|3000| 2000| 1.2|
        +--------+--------+----+-----+----+
    """
    check_options(temporal_join, options, TwoSidedOptions)
    sides, emit = settled(two_streams(left, right), {"emit": "at_watermark", **options})
    period = heartbeat_ms(heartbeat, emit)
    sides, upstream = timed(sides, time)
    description, sides, _ = two_sided(
        TemporalJoin,
        how,
        on,
        sides,
        options,
        derive=False,
        emit=emit,
        late=late,
        ttl_ms=None if ttl is None else parse_bound(ttl),
    )
    return apply_operator(description, sides, options, upstream=upstream, heartbeat_ms=period)


def described(
    join: IntervalJoin,
    process: ProcessFunction | None,
    schema: st.StructType | str | None,
    side_outputs: Mapping[str, st.StructType | str] | None,
) -> Described | None:
    """Checks a user's function over pairs; None without one.

    Args:
        join: the join whose pairs the function takes.
        process: the function.
        schema: the schema of its result.
        side_outputs: the schemas of its side outputs, by name.

    Raises:
        DescriptionError: an argument has no place here, or a name occurs twice.
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
    """Refuses names that would be two columns' of the result, and row kinds as names of side outputs."""
    there = [ROW_KIND_COLUMN, *LATE_SIDES]
    for name in names:
        if name.lower() in there:
            raise DescriptionError(f"process= would give two columns {name!r}; there are {', '.join(there)}")
        there.append(name.lower())
    for name in outputs:
        if not name.isidentifier() or name.lower() == LATE_ROW_KIND:
            raise DescriptionError(f"side_outputs= has {name!r}; a name is of letters, digits and _, and not 'late'")


def processed(changes: DataFrame, join: IntervalJoin, process: Described) -> DataFrame:
    """Applies a user's function to the pairs of a join, and adds the join's late rows to the result.

    Args:
        changes: the join's changelog.
        join: the description of the join.
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
    applied = ProcessPairs(process.function, process.schema, process.outputs, late)
    made = rows.mapInArrow(applied, applied.schema)
    if not late and not process.outputs:
        return made
    kind = f.col(ROW_KIND_COLUMN).alias(ROW_KIND_COLUMN, metadata=inputs_metadata(changes))
    sides = {name: f.col(name).alias(name, metadata={SIDE: name}) for name in (*process.outputs, *late)}
    return made.select(kind, *(sides.get(x, named_column(x)) for x in made.columns[1:]))


def _as_timestamp(time: Column, join: IntervalJoin, source: Input) -> Column:
    """An event time in the type in which the event times of both inputs are compared."""
    if pa.types.is_timestamp(join.time_type) and source.schema.field(source.event_time).type == pa.int64():
        if join.time_type.tz is not None:
            return f.timestamp_millis(time)
        seconds = time.cast("decimal(22,3)") / 1000
        return f.lit("1970-01-01").cast("timestamp_ntz") + f.make_dt_interval(secs=seconds.cast("decimal(18,6)"))
    return time
