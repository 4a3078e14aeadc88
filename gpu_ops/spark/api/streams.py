"""What a user declares of streaming DataFrames: the inputs of a join that they become, its options, its ``where=``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, TypedDict

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import types as st

from gpu_ops.backends import Backend
from gpu_ops.conditions import Condition, backquoted
from gpu_ops.descriptions.changelog import ROW_KIND_COLUMN
from gpu_ops.descriptions.description import Emit
from gpu_ops.descriptions.inputs import BadRows, Input, Updates, nearest
from gpu_ops.descriptions.keys import Key, On, normalize_on
from gpu_ops.descriptions.times import Duration, parse_bound, parse_duration
from gpu_ops.errors import ConditionError, DescriptionError
from gpu_ops.query.by_time import QueryText
from gpu_ops.query.catalyst import Catalyst, calc
from gpu_ops.query.choose import Chooser, condition
from gpu_ops.query.errors import SqlError
from gpu_ops.query.expressions import Expr, NotOursError, QueryColumn
from gpu_ops.query.places import position
from gpu_ops.query.read import PlanReader
from gpu_ops.query.relations import Table
from gpu_ops.spark.datatypes import arrow_schema, spelling
from gpu_ops.spark.failures import data_frame
from gpu_ops.spark.plan.column_metadata import derived_key, is_changelog, never_retracts
from gpu_ops.state.address import Location


@dataclasses.dataclass(frozen=True)
class Stream(Input):
    """An `Input` that is bound to its DataFrame; `stream` makes it, and `as_input` checks it.

    Attributes:
        df: its rows, whose columns are its schema; an empty name is one that the function it is given to chooses.
        refresh_ms: how often a static DataFrame is read again, milliseconds, or None.
        table: what gives that DataFrame, or None.
        load: to be called before the first micro-batch, of a static DataFrame beside a stream; else None.
    """

    name: str = ""
    schema: pa.Schema = dataclasses.field(init=False, repr=False, compare=False)
    df: DataFrame = dataclasses.field(kw_only=True)
    refresh_ms: int | None = dataclasses.field(default=None, kw_only=True)
    table: Callable[[], DataFrame] | None = dataclasses.field(default=None, kw_only=True)
    load: Callable[[], None] | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Nothing is asked of its schema yet: an error of it names the stream as the function does that takes it."""

    def __getattr__(self, name: str) -> Any:
        if name != "schema":
            raise AttributeError(name)
        made = arrow_schema(self.df.schema, self.label, without=self.row_kind)
        object.__setattr__(self, "schema", made)
        return made

    @property
    def label(self) -> str:
        """What it is called in errors."""
        return self.name or "stream"


def stream(
    df: DataFrame | Callable[[], DataFrame],
    *,
    unique_key: str | Sequence[str] | None = None,
    row_kind: str | None = None,
    sequence_by: str | None = None,
    ttl: str | int | None = None,
    name: str | None = None,
    updates: Updates = "upsert",
    bad_rows: BadRows = "fail",
    event_time: str | None = None,
    delay: Duration | None = None,
    idle_timeout: Duration | None = None,
    refresh: str | int | None = None,
) -> Stream:
    """Says about a streaming DataFrame what its schema does not; or about a static one that stands beside a stream.

    Args:
        df: a streaming DataFrame; or a static one; or, with ``refresh``, a function that gives the static one as it is
            now.
        unique_key: columns that identify a row among the live ones. The changelog of a join has the one that
            follows from the join, where one does.
        row_kind: a string column with row kinds (Flink's ``+I -U +U -D``, Debezium's ``op``, Delta's
            ``_change_type``); without one the input is insert-only, a changelog of this pack excepted.
        sequence_by: a column that orders the changes of a micro-batch; by default the order within each
            source partition is kept.
        ttl: how long after its last write a row is kept: ``"7 days"``, or milliseconds.
        name: how SQL text and errors call it; by default ``left`` or ``right``, in a multi-way join ``input_1``
            and so on.
        updates: ``"upsert"`` or ``"retract"``: whether an update's old row may be missing.
        bad_rows: ``"fail"``, ``"drop"`` or ``"tag"``.
        event_time: for an interval join, the column with the time of a row: a timestamp, or a
            bigint with milliseconds since the epoch. ``withWatermark`` names it, too.
        delay: how late rows may come: ``"10 seconds"``, milliseconds or a timedelta. The watermark is the
            latest event time less this. It overrides the one of ``withWatermark``.
        idle_timeout: after this long without rows the input no longer holds the watermark back.
        refresh: how often a static DataFrame is read again while the query runs: ``"1 hour"``, or milliseconds. What
            differs comes as changes: by ``unique_key`` where it is given, else row by row.

    Raises:
        DescriptionError: no such column, or no such option.
    """
    table = df if callable(df) and not hasattr(df, "sparkSession") else None
    if table is not None:
        df = table()
    df = data_frame(df, "what stream() takes" if table is None else "what the function of stream() gives")
    if (table is not None or refresh is not None) and df.isStreaming:
        raise DescriptionError(f"input '{name or 'stream'}': refresh= is for a static DataFrame, this one streams")
    if table is not None and refresh is None:
        raise DescriptionError(f"input '{name or 'stream'}': a function that gives a table takes refresh=")
    if not (unique_key is None or isinstance(unique_key, Sequence)):
        raise DescriptionError(f"unique_key={unique_key!r}; it is a column's name, or several")
    bare = Stream(df=df, name=name or "")

    def own(column: str | None, what: str) -> str | None:
        return None if column is None else resolve(df, column, bare.label, what)

    made = dataclasses.replace(
        bare,
        unique_key=None if unique_key is None else resolve_all(bare, unique_key, "unique_key"),
        row_kind=own(row_kind, "row_kind"),
        sequence_by=own(sequence_by, "sequence_by"),
        ttl_ms=None if ttl is None else parse_duration(ttl),
        updates=updates,
        bad_rows=bad_rows,
        event_time=own(event_time, "event_time"),
        delay_ms=None if delay is None else parse_bound(delay),
        idle_timeout_ms=None if idle_timeout is None else parse_bound(idle_timeout),
        refresh_ms=None if refresh is None else parse_duration(refresh),
        table=table,
    )
    _check(made)
    return made


def _check(side: Stream) -> None:
    """Refuses at once what no join would take."""
    for option, ms in (("delay", side.delay_ms), ("idle_timeout", side.idle_timeout_ms)):
        if ms is not None and ms < 0:
            raise DescriptionError(f"input '{side.label}': {option} is not negative, this one is {ms} ms")
    if side.event_time is None:  # interval_join(time=) may still name it
        side = dataclasses.replace(side, delay_ms=None, idle_timeout_ms=None)
    as_input(side, derive=False)


def as_stream(side: DataFrame | Stream, which: str, name: str) -> Stream:
    """A join's argument as a `Stream` that has a name; of an insert-only changelog without the row kinds, all alike.

    Args:
        side: the argument.
        which: what it is called in an error, such as "the left input".
        name: its name if it was given none.

    Raises:
        DescriptionError: it is no DataFrame.
        NotBuiltError: it is one of Spark Connect.
    """
    given = side if isinstance(side, Stream) else Stream(df=data_frame(side, which))
    if given.row_kind is None and given.unique_key is None and is_changelog(given.df) and never_retracts(given.df):
        given = dataclasses.replace(given, df=given.df.drop(ROW_KIND_COLUMN))
    return given if given.name else dataclasses.replace(given, name=name)


def two_streams(left: DataFrame | Stream, right: DataFrame | Stream) -> tuple[Stream, Stream]:
    """The arguments of a join of two inputs; errors as `as_stream`."""
    return as_stream(left, "the left input", "left"), as_stream(right, "the right input", "right")


def as_input(side: Stream, *, derive: bool = True) -> Input:
    """The description of an input.

    Args:
        side: the stream.
        derive: give the changelog of a join the unique key that follows from it, if the user gave none.

    Raises:
        DescriptionError: a column or option that cannot be.
    """
    given = {field.name: getattr(side, field.name) for field in dataclasses.fields(Input)}
    if side.row_kind is None and is_changelog(side.df):
        given["row_kind"] = ROW_KIND_COLUMN
    row_kind = given["row_kind"]
    if derive and side.unique_key is None and row_kind == ROW_KIND_COLUMN and is_changelog(side.df):
        given["unique_key"] = derived_key(side.df)
        given["updates"] = side.updates if given["unique_key"] is None else "retract"
    if row_kind is not None and not isinstance(side.df.schema[row_kind].dataType, st.StringType):
        found = side.df.schema[row_kind].dataType.simpleString()
        raise DescriptionError(f"input '{side.label}': row kinds are strings, column {row_kind!r} is {found}")
    if side.load is not None and side.event_time is not None and side.idle_timeout_ms is None:
        given["idle_timeout_ms"] = 0  # it has ended, and holds no watermark back
    schema = pa.schema([column for column in side.schema if column.name != row_kind])
    return Input(**{**given, "name": side.label, "schema": schema})


def refuse_event_time(source: Stream) -> None:
    """Refuses an event time where nothing goes by it."""
    if source.event_time is not None:
        raise DescriptionError(f"input '{source.label}': event_time= is for gpu_ops.interval_join()")


def resolve_all(source: Stream, columns: str | Sequence[str], what: str) -> tuple[str, ...]:
    """One column's own spelling, or that of several; see `resolve`."""
    named = (columns,) if isinstance(columns, str) else columns
    return tuple(resolve(source.df, column, source.label, what) for column in named)


def resolve(df: DataFrame, column: str, name: str, what: str) -> str:
    """A column's own spelling; Spark ignores case unless configured otherwise."""
    found = spelling(df, column)
    if found is None:
        raise DescriptionError(f"input '{name}': {what} names {column!r}; {nearest(column, df.columns)}")
    return found


def resolve_keys(on: On, sides: tuple[Stream, Stream], options: Mapping[str, Any]) -> tuple[Key, ...]:
    """The keys of a join of two inputs in the columns' own spelling; ``null_safe`` is among the options."""
    left, right = (side.df for side in sides)
    return tuple(
        Key(spelling(left, key.left) or key.left, spelling(right, key.right) or key.right, key.null_safe, key.using)
        for key in normalize_on(on, null_safe=options.get("null_safe", False))
    )


How = Literal[
    "inner", "left", "right", "full", "semi", "anti",
    "outer", "fullouter", "full_outer", "leftouter", "left_outer", "rightouter", "right_outer",
    "leftsemi", "left_semi", "leftanti", "left_anti",
]  # fmt: skip
"""A join type, also as Spark spells it."""


class RunOptions(TypedDict, total=False):
    """Where an operator runs and keeps its state.

    Attributes:
        state: a folder of its own for the state; without it the state lives in memory only.
        backend: ``"auto"``, ``"cpu"`` or ``"gpu"``.
        partitions: how many; by default what an existing state folder is cut into, or else
            ``spark.sql.shuffle.partitions``, but not more than the application has cores, or with GPUs two for each.
        name: of the operator, in ``query.lastProgress["observedMetrics"]``, too; by default ``join_1`` and so on.
    """

    state: Location | None
    backend: Backend
    partitions: int | None
    name: str | None


class KeyOptions(RunOptions, total=False):
    """Those of an operator with keys.

    Attributes:
        null_safe: whether null keys match (``IS NOT DISTINCT FROM``), for all keys or one by one.
    """

    null_safe: bool | Sequence[bool]


class ChangelogOptions(RunOptions, total=False):
    """Those of a join without bounds in time.

    Attributes:
        emit: ``"per_batch"`` (net changes), ``"per_event"`` (as Flink emits them), or ``"at_end"``: nothing, until
            `finish` gives the result.
        backlog: a run with ``trigger(availableNow=True)`` takes its input in silently; the first micro-batch of a run
            with another trigger gives the net result, and the join is live from then on.
    """

    emit: Emit
    backlog: bool


class SemiJoinOptions(KeyOptions, ChangelogOptions, total=False):
    """Those of a semi or anti join.

    Attributes:
        where: residual condition, SQL text over both inputs' columns.
    """

    where: str | None


class TwoSidedOptions(KeyOptions, total=False):
    """Those of a join with the columns of both inputs.

    Attributes:
        where: residual condition, SQL text over both inputs' columns.
        suffixes: for column names that both inputs have.
    """

    where: str | None
    suffixes: tuple[str, str] | None


class JoinOptions(TwoSidedOptions, ChangelogOptions, total=False):
    """Those of a regular join."""


class IntervalJoinOptions(TwoSidedOptions, total=False):
    """Those that an interval join shares with others.

    Attributes:
        emit: as in `ChangelogOptions`.
    """

    emit: Emit


HIDDEN: Final = "__where_"
"""The names of columns that are there for a condition begin so."""


def engine_condition(
    where: str | None, sides: Sequence[Stream], padded: Sequence[bool] = ()
) -> tuple[Condition | str | None, list[Stream], list[str]]:
    """A condition as Spark's analyser reads it.

    Args:
        where: a user's, over the columns of the inputs, or None.
        sides: the inputs.
        padded: of each input whether its row may be missing; of none if left out.

    Returns:
        The condition; the inputs, with columns more for what only Spark computes; the names of these columns.

    Raises:
        DescriptionError: it is no text.
        ConditionError: what Spark does not take, or what only Spark evaluates and is over several inputs.
    """
    names = [side.label for side in sides]
    if where is not None and not isinstance(where, str):
        raise DescriptionError(f"where= is SQL text, such as '{names[0]}.a > {names[-1]}.b', not {where}")
    twice = len({name.lower() for name in names}) < len(names)  # which the description refuses
    if where is None or twice:
        return where, list(sides), []
    tables = {side.label: Table(side.label, as_input(side, derive=False).schema) for side in sides}
    catalyst = Catalyst(sides[0].df.sparkSession)
    for name, side in zip(names, sides, strict=True):
        own = tables[name].schema.names
        catalyst.view(name, st.StructType([x for x in side.df.schema.fields if x.name in own]))
    first, *others = map(backquoted, names)
    tables_of = " CROSS JOIN ".join([first, *others[:-1]])
    sql = f"SELECT 1 FROM {tables_of} JOIN {others[-1]} ON\n{where}\n"  # noqa: S608 - parsed as one expression
    try:
        catalyst.check_expression(where)
        scans, conditions = PlanReader(QueryText(sql, sql), tables, catalyst).condition()
        chooser = Chooser(sql, catalyst)
        made: list[dict[QueryColumn, Expr]] = [{} for _ in sides]
        residual = [chooser.residual(each, scans, made, padded) for each in conditions]
    except SqlError as error:
        line, place = (error.line - 1, error.column) if error.line > 1 else (1, 1)
        raise ConditionError(error.message, where, line, place) from error
    except NotOursError as error:
        line, place = position(error.expr.java.origin())
        hint = "filter what the join gives, or compute it in the inputs first"
        raise ConditionError(f"{error}; {hint}", where, max(line - 1, 1), place) from error
    called = {column: f"{HIDDEN}{column.label}" for more in made for column in more}
    owner = {c: name for scan, more, name in zip(scans, made, names, strict=True) for c in (*scan.columns, *more)}
    wider = [
        dataclasses.replace(side, df=_wider(side.df, more, called)) if more else side
        for side, more in zip(sides, made, strict=True)
    ]
    schemas = {side.label: as_input(side, derive=False).schema for side in wider}
    read = condition(residual, lambda c: (owner[c], called.get(c, c.label)), schemas, text=where, ansi=chooser.ansi)
    return read or "true", wider, list(called.values())


def without_hidden(df: DataFrame) -> DataFrame:
    """A join's result without the columns that are there for its condition."""
    hidden = [column for column in df.columns if column.startswith(HIDDEN)]
    return df.drop(*hidden) if hidden else df


def _wider(df: DataFrame, more: dict[QueryColumn, Expr], called: dict[QueryColumn, str]) -> DataFrame:
    known = {number: column.label for expr in more.values() for number, column in expr.ids.items()}
    select = [*((c, c) for c in df.columns), *((called[column], expr.java) for column, expr in more.items())]
    return calc(df, known, [], select, None)
