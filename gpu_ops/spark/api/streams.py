"""Inputs of operators: `stream` and its checks, the options that operators share, and ``where=`` conditions."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, TypedDict, TypeVar

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
from gpu_ops.spark.failures import data_frame
from gpu_ops.spark.plan.column_metadata import derived_key, is_changelog, never_retracts
from gpu_ops.spark.sources.change_feed import CHANGE_TYPE, in_order_of_commits, is_change_feed
from gpu_ops.spark_types import arrow_schema, spelling
from gpu_ops.state.address import Location

Taking = TypeVar("Taking", bound=Callable[..., DataFrame])
"""A function that takes options and returns a DataFrame."""


@dataclasses.dataclass(frozen=True)
class Stream(Input):
    """An `Input` that is bound to its DataFrame; `stream` makes it, and `as_input` checks it.

    Attributes:
        df: its rows, whose columns are its schema; an empty name is chosen by the function that takes the stream.
        refresh_ms: the milliseconds after which a static DataFrame is read again, or None.
        table: the function that returns that DataFrame, or None.
        load: to be called before the first micro-batch, of a static DataFrame beside a stream; else None.
    """

    name: str = ""
    schema: pa.Schema = dataclasses.field(init=False, repr=False, compare=False)
    df: DataFrame = dataclasses.field(kw_only=True)
    refresh_ms: int | None = dataclasses.field(default=None, kw_only=True)
    table: Callable[[], DataFrame] | None = dataclasses.field(default=None, kw_only=True)
    load: Callable[[], None] | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Leaves the schema unchecked, so that an error names the stream as the function does that takes it."""

    def __getattr__(self, name: str) -> Any:
        if name != "schema":
            raise AttributeError(name)
        made = arrow_schema(self.df.schema, self.label, without=self.row_kind)
        object.__setattr__(self, "schema", made)
        return made

    @property
    def label(self) -> str:
        """The stream's name in errors."""
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
    """Declares properties of a streaming DataFrame, or of a static one beside streams, that its schema does not have.

    Args:
        df: a streaming DataFrame; or a static one; or, with ``refresh``, a function that returns the static one as it
            is now.
        unique_key: columns that identify a row among the live ones. The changelog of a join has the key that follows
            from the join, where one does.
        row_kind: a string column with row kinds (Flink's ``+I -U +U -D``, Debezium's ``op``, Delta's
            ``_change_type``); without one the input is insert-only, except for a changelog of this package, and for
            what ``spark.readStream.changes("t")`` gives (Spark 4.2): that is known by its columns, its changes are
            taken in the order of the commits, and the columns of the commit are left out.
        sequence_by: a column that orders the changes of a micro-batch; by default the order within each
            source partition is kept.
        ttl: the time after its last write for which a row is kept: ``"7 days"``, or milliseconds.
        name: the name in SQL text and errors; by default ``left`` or ``right``, in a multi-way join ``input_1``
            and so on.
        updates: the form of updates. ``"upsert"``: the new row alone, which replaces the row of its unique key.
            ``"retract"``: the old row always comes before the new one.
        bad_rows: the treatment of rows that cannot be joined. ``"fail"``: an error. ``"drop"``: they are dropped and
            counted. ``"tag"``: they are emitted with the row kind ``bad``.
        event_time: for a join by time, the column with the time of a row: a timestamp, or a
            bigint with milliseconds since the epoch. ``withWatermark`` names it, too.
        delay: the time by which rows may be late: ``"10 seconds"``, milliseconds or a timedelta. The watermark is the
            latest event time less this. It overrides the delay of ``withWatermark``.
        idle_timeout: the time without rows after which the input no longer holds the watermark back.
        refresh: the time after which a static DataFrame is read again while the query runs: ``"1 hour"``, or
            milliseconds. The difference comes as changes: by ``unique_key`` where it is given, else row by row.

    Raises:
        DescriptionError: there is no such column, or no such option.

    Example:
        >>> changes = [("+I", 1, 10), ("-D", 1, 10), ("+I", 2, 20)]
        >>> orders = spark.createDataFrame(changes, "kind STRING, id INT, amount INT")
        >>> payments = spark.createDataFrame([(1, 4), (2, 6)], "id INT, paid INT")
        >>> gpu_ops.join(gpu_ops.stream(orders, row_kind="kind"), payments, on="id").show()
        +--------+---+------+----+
        |row_kind| id|amount|paid|
        +--------+---+------+----+
        |      +I|  2|    20|   6|
        +--------+---+------+----+
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

    def resolved(column: str | None, what: str) -> str | None:
        return None if column is None else resolve(df, column, bare.label, what)

    made = dataclasses.replace(
        bare,
        unique_key=None if unique_key is None else resolve_all(bare, unique_key, "unique_key"),
        row_kind=resolved(row_kind, "row_kind"),
        sequence_by=resolved(sequence_by, "sequence_by"),
        ttl_ms=None if ttl is None else parse_duration(ttl),
        updates=updates,
        bad_rows=bad_rows,
        event_time=resolved(event_time, "event_time"),
        delay_ms=None if delay is None else parse_bound(delay),
        idle_timeout_ms=None if idle_timeout is None else parse_bound(idle_timeout),
        refresh_ms=None if refresh is None else parse_duration(refresh),
        table=table,
    )
    _check(made)
    return made


def _check(side: Stream) -> None:
    """Refuses a stream that no join would take."""
    for option, ms in (("delay", side.delay_ms), ("idle_timeout", side.idle_timeout_ms)):
        if ms is not None and ms < 0:
            raise DescriptionError(f"input '{side.label}': {option} is not negative, this one is {ms} ms")
    if side.event_time is None:  # interval_join(time=) may still name it
        side = dataclasses.replace(side, delay_ms=None, idle_timeout_ms=None)
    as_input(side, derive=False)


def as_stream(side: DataFrame | Stream, which: str, name: str) -> Stream:
    """Makes a named `Stream` of a join's argument.

    The row kinds of an insert-only changelog, all ``+I``, are dropped; Spark's change feed of a table is put in order.

    Args:
        side: the argument.
        which: its name in an error, such as "the left input".
        name: the stream's name if the argument has none.

    Raises:
        DescriptionError: it is no DataFrame.
        NotBuiltError: it is one of Spark Connect.
    """
    given = side if isinstance(side, Stream) else Stream(df=data_frame(side, which))
    if given.row_kind is None and is_change_feed(given.df):
        rows = in_order_of_commits(given.df, given.unique_key, given.event_time)
        given = dataclasses.replace(given, df=rows, row_kind=CHANGE_TYPE, updates="retract", sequence_by=None)
    if given.row_kind is None and given.unique_key is None and is_changelog(given.df) and never_retracts(given.df):
        given = dataclasses.replace(given, df=given.df.drop(ROW_KIND_COLUMN))
    return given if given.name else dataclasses.replace(given, name=name)


def two_streams(left: DataFrame | Stream, right: DataFrame | Stream) -> tuple[Stream, Stream]:
    """Makes named streams of the arguments of a join of two inputs; raises as `as_stream` does."""
    return as_stream(left, "the left input", "left"), as_stream(right, "the right input", "right")


def as_input(side: Stream, *, derive: bool = True) -> Input:
    """Makes the description of an input.

    Args:
        side: the stream.
        derive: whether the changelog of a join gets the unique key that follows from it, if the user gave none.

    Raises:
        DescriptionError: a column or option is invalid.
    """
    given = {field.name: getattr(side, field.name) for field in dataclasses.fields(Input)}
    if side.row_kind is None and is_changelog(side.df):
        given["row_kind"] = ROW_KIND_COLUMN
    row_kind = given["row_kind"]
    if derive and side.unique_key is None and row_kind == ROW_KIND_COLUMN and is_changelog(side.df):
        given["unique_key"] = derived_key(side.df)
        given["updates"] = side.updates if given["unique_key"] is None else "retract"
    if row_kind is not None and not isinstance(side.df.schema[row_kind].dataType, st.StringType):
        kind_type = side.df.schema[row_kind].dataType.simpleString()
        raise DescriptionError(f"input '{side.label}': row kinds are strings, column {row_kind!r} is {kind_type}")
    if side.load is not None and side.event_time is not None and side.idle_timeout_ms is None:
        given["idle_timeout_ms"] = 0  # it has ended, and holds no watermark back
    schema = pa.schema([column for column in side.schema if column.name != row_kind])
    return Input(**{**given, "name": side.label, "schema": schema})


def refuse_event_time(source: Stream) -> None:
    """Refuses an event time where no operator by time takes the stream."""
    if source.event_time is not None:
        raise DescriptionError(f"input '{source.label}': event_time= is for gpu_ops.interval_join()")


def resolve_all(source: Stream, columns: str | Sequence[str], what: str) -> tuple[str, ...]:
    """Finds one or several columns, and returns their names as the DataFrame spells them; see `resolve`."""
    named = (columns,) if isinstance(columns, str) else columns
    return tuple(resolve(source.df, column, source.label, what) for column in named)


def resolve(df: DataFrame, column: str, name: str, what: str) -> str:
    """Finds a column, and returns its name as the DataFrame spells it; Spark ignores case unless told otherwise."""
    spelled = spelling(df, column)
    if spelled is None:
        raise DescriptionError(f"input '{name}': {what} names {column!r}; {nearest(column, df.columns)}")
    return spelled


def resolve_keys(on: On, sides: tuple[Stream, Stream], options: Mapping[str, Any]) -> tuple[Key, ...]:
    """Parses the keys of a join of two inputs, with columns as the DataFrames spell them."""
    left, right = (side.df for side in sides)
    return tuple(
        Key(spelling(left, key.left) or key.left, spelling(right, key.right) or key.right, key.null_safe, key.using)
        for key in normalize_on(on, null_safe=options.get("null_safe", False))
    )


JoinTypeName = Literal[
    "inner", "left", "right", "full", "semi", "anti",
    "outer", "fullouter", "full_outer", "leftouter", "left_outer", "rightouter", "right_outer",
    "leftsemi", "left_semi", "leftanti", "left_anti",
]  # fmt: skip
"""The names of join types, also as Spark spells them."""


class RunOptions(TypedDict, total=False):
    """The options of every operator: state folder, backend, partitions and name.

    Attributes:
        state: a folder of its own for the state; without it the state lives in memory only.
        backend: the processor that computes. ``"auto"``: GPUs where there are any. ``"cpu"``: the CPU. ``"gpu"``: GPUs,
            or an error.
        partitions: the number of partitions; by default that of an existing state folder, or else
            ``spark.sql.shuffle.partitions``, but not more than the application has cores, or with GPUs one for each, on
            a cluster two.
        name: the operator's name, in ``query.lastProgress["observedMetrics"]``, too; by default ``join_1`` and so on.
    """

    state: Location | None
    backend: Backend
    partitions: int | None
    name: str | None


class KeyOptions(RunOptions, total=False):
    """The options of an operator with keys.

    Attributes:
        null_safe: whether null keys match (``IS NOT DISTINCT FROM``), for all keys or one by one.
    """

    null_safe: bool | Sequence[bool]


class ChangelogOptions(RunOptions, total=False):
    """The options of an operator without bounds in time.

    Attributes:
        emit: the output. ``"per_batch"``: the net changes of each micro-batch. ``"per_event"``: the changes as Flink
            emits them, one by one. ``"at_end"``: nothing, until `finish` returns the result. ``"at_watermark"``, for an
            aggregate and an ASOF join: each row once, when the watermark says that it is final.
        backlog: whether a run with ``trigger(availableNow=True)`` takes its input in silently; the first micro-batch of
            a run with another trigger emits the net result, and the operator is live from then on.
    """

    emit: Emit
    backlog: bool


class SemiJoinOptions(KeyOptions, ChangelogOptions, total=False):
    """The options of a semi or anti join.

    Attributes:
        where: a residual condition, SQL text over both inputs' columns.
    """

    where: str | None


class TwoSidedOptions(KeyOptions, total=False):
    """The options of a join with the columns of both inputs.

    Attributes:
        where: a residual condition, SQL text over both inputs' columns.
        suffixes: two suffixes for column names that both inputs have.
    """

    where: str | None
    suffixes: tuple[str, str] | None


class JoinOptions(TwoSidedOptions, ChangelogOptions, total=False):
    """The options of a regular join."""


class IntervalJoinOptions(TwoSidedOptions, total=False):
    """The options that an interval join shares with other operators.

    Attributes:
        emit: the output. ``"per_batch"``: the net changes of each micro-batch. ``"per_event"``: the changes as Flink
            emits them, one by one. ``"at_end"``: nothing, until `finish` returns the result.
    """

    emit: Emit


_DEFAULTS: Final[Mapping[str, object]] = {"backend": "auto", "null_safe": False, "emit": "per_batch", "backlog": False}
"""The defaults of options; that of any other is None, or False for a bool."""

# of docstrings without their indentation, which Python 3.13 leaves out
_ENTRY: Final = re.compile(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)
_LISTED: Final = re.compile(r"^ {4}options: .*(?:\n {8}.*)*", re.MULTILINE)


def with_options(options: type) -> Callable[[Taking], Taking]:
    """Shows the options of a function as keyword arguments, in its signature and in its docstring.

    A TypedDict declares options once, for type checkers (``**options: Unpack[JoinOptions]``) and for `check_options`;
    with this decorator ``help()`` and editors list them, too.

    Args:
        options: the TypedDict; its docstring explains the options that are not its bases'.
    """
    classes = (RunOptions, KeyOptions, ChangelogOptions, TwoSidedOptions, options)
    explained = {name: text for each in classes for name, text in _ENTRY.findall(inspect.cleandoc(each.__doc__ or ""))}

    def shown(function: Taking) -> Taking:
        named = inspect.signature(function)
        own = [x for x in named.parameters.values() if x.kind is not x.VAR_KEYWORD]
        more = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, annotation=getattr(kind, "__forward_arg__", kind),
                default=_DEFAULTS.get(name, False if getattr(kind, "__forward_arg__", kind) == "bool" else None),
            )
            for name, kind in options.__annotations__.items()
        ]  # fmt: skip
        entries = "\n".join(f"    {name}: {explained[name]}" for name in options.__annotations__)
        vars(function)["__signature__"] = named.replace(parameters=[*own, *more])
        function.__doc__ = _LISTED.sub(lambda _: entries, inspect.cleandoc(function.__doc__ or ""), count=1)
        return function

    return shown


HIDDEN: Final = "__where_"
"""The beginning of the names of columns that are added for a condition."""


def engine_condition(
    where: str | None, sides: Sequence[Stream], padded: Sequence[bool] = ()
) -> tuple[Condition | str | None, list[Stream], list[str]]:
    """Reads a ``where=`` condition with Spark's analyser.

    Args:
        where: the user's condition over the columns of the inputs, or None.
        sides: the inputs.
        padded: for each input whether its row may be missing; by default no row may.

    Returns:
        The condition; the inputs, with further columns for expressions that only Spark computes; their names.

    Raises:
        DescriptionError: it is no text.
        ConditionError: Spark does not understand it, or an expression that only Spark evaluates is over several inputs.
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
    """Removes the columns that were added for a condition from a join's result."""
    hidden = [column for column in df.columns if column.startswith(HIDDEN)]
    return df.drop(*hidden) if hidden else df


def _wider(df: DataFrame, more: dict[QueryColumn, Expr], called: dict[QueryColumn, str]) -> DataFrame:
    known = {number: column.label for expr in more.values() for number, column in expr.ids.items()}
    select = [*((c, c) for c in df.columns), *((called[column], expr.java) for column, expr in more.items())]
    return calc(df, known, [], select, None)
