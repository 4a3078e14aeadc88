"""Aggregates as users write them down: one row per group, kept up to date, or when the input has ended.

Flink's ``GroupAggFunction``; at the end of input it is the one over a global window with the end-of-stream trigger
(FLIP-331). Retractions count: it is the folded input that is grouped. Functions of one's own work on Arrow.
"""

from __future__ import annotations

import abc
import copy
import dataclasses
import functools
import importlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, Literal, NamedTuple, Self, cast, get_args

import pyarrow as pa

from gpu_ops.descriptions.description import Emit, OutputColumn, line
from gpu_ops.descriptions.groups import Grouped
from gpu_ops.descriptions.inputs import Input, check_columns, check_key_types, nearest
from gpu_ops.descriptions.times import LATES, time_type
from gpu_ops.errors import DescriptionError
from gpu_ops.fields import ABSENT, reading


class AggregateFunction(abc.ABC):
    """An aggregate function: a state per group, and how rows are added to and retracted from many states at once.

    A subclass defines a group's state, and works on the states of many groups and many rows in one call; there is
    no call per row. It is given Arrow of the host's memory, with a GPU as well. State servers import its module by
    name, as no code travels: it stands in a module that they find, not in ``__main__``.

    What comes and goes within a micro-batch is added before anything is retracted, in any other order: the result must
    not depend on it.

    Args:
        columns: of the input, whose values it is given, in this order.
        parameters: what else it goes by: what JSON holds.

    Attributes:
        state: the columns of a group's state.
        result_type: the type of what `result` gives.

    Example:
        >>> class Bits(AggregateFunction):
        ...     state = pa.schema([("bits", pa.int64())])
        ...     result_type = pa.int64()
        ...
        ...     def add(self, state, groups, values):
        ...         bits = state["bits"].fill_null(0).to_numpy().copy()
        ...         np.bitwise_or.at(bits, groups.to_numpy(), values[0].to_numpy())
        ...         return pa.table({"bits": bits})
        ...
        ...     def result(self, state):
        ...         return state["bits"]
        >>> gpu_ops.aggregate(events, by="user", aggregates={"flags": Bits("flag")})
    """

    state: pa.Schema
    result_type: pa.DataType

    def __init__(self, *columns: str, **parameters: Any) -> None:
        self.columns, self.parameters = columns, parameters

    def empty(self, groups: int) -> pa.Table:
        """The states of so many groups without rows; by default all null."""
        return pa.table([pa.nulls(groups, field.type) for field in self.state], schema=self.state)

    @abc.abstractmethod
    def add(self, state: pa.Table, groups: pa.Array, values: pa.Table) -> pa.Table:
        """States after n rows have come.

        Args:
            state: the states of g groups, a row each.
            groups: of each of n rows the number of its group, from 0 (int64).
            values: their values, a column for each of ``columns``, nulls among them.

        Returns:
            G rows, of the columns of ``state``.
        """

    def retract(self, state: pa.Table, groups: pa.Array, values: pa.Table) -> pa.Table:
        """States after n rows were retracted; as `add`. Without it the input has to be insert-only."""
        raise NotImplementedError

    @abc.abstractmethod
    def result(self, state: pa.Table) -> pa.Array | pa.ChunkedArray:
        """The results of g groups."""

    @property
    def retracts(self) -> bool:
        """Tells whether the function can take rows back."""
        return type(self).retract is not AggregateFunction.retract

    def of(self, columns: tuple[str, ...]) -> AggregateFunction:
        """Gives a copy of the function over other columns."""
        made = copy.copy(self)
        made.columns = columns
        return made

    def __str__(self) -> str:
        given = [*self.columns, *(f"{name}={value!r}" for name, value in self.parameters.items())]
        return f"{type(self).__name__}({', '.join(given)})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash((type(self), self.columns))

    # --- as JSON -----------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Gives the function's import name and parameters for JSON.

        Raises:
            DescriptionError: it cannot be imported by name, or a parameter is not JSON.
        """
        kind = type(self)
        where = f"{kind.__module__}:{kind.__qualname__}"
        if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
            raise DescriptionError(
                f"{self}: state servers import an aggregate function by its name, and {where} has none: put the class "
                "into a module of its own, beside the program or on PYTHONPATH"
            )
        try:
            json.dumps(self.parameters)
        except (TypeError, ValueError) as error:
            raise DescriptionError(f"{self}: parameters are what JSON holds: {error}") from error
        return {"class": where, "columns": list(self.columns), "parameters": self.parameters}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> AggregateFunction:
        """From what `to_dict` gave.

        Raises:
            DescriptionError: there is no such class here.
        """
        module, _, name = str(data["class"]).partition(":")
        try:
            found: Any = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError) as error:
            raise DescriptionError(
                f"the aggregate function {data['class']} cannot be imported here: {error}"
            ) from error
        if not (isinstance(found, type) and issubclass(found, AggregateFunction)):
            raise DescriptionError(f"{data['class']} is no gpu_ops.AggregateFunction")
        try:
            made: AggregateFunction = found(*data["columns"], **data["parameters"])
        except TypeError as error:
            raise DescriptionError(f"{data['class']} is made of columns and parameters: {error}") from error
        return made


def check_function(function: AggregateFunction, name: str) -> None:
    """Refuses one whose state or result is not declared.

    Raises:
        DescriptionError: says what is missing.
    """
    if not hasattr(function, "columns"):
        kind = type(function).__name__
        raise DescriptionError(f"{name}: {kind}.__init__() does not call that of gpu_ops.AggregateFunction")
    if not isinstance(getattr(function, "state", None), pa.Schema) or not len(function.state):
        raise DescriptionError(f"{name} = {function}: state is a pyarrow schema with a column at least")
    if not isinstance(getattr(function, "result_type", None), pa.DataType):
        raise DescriptionError(f"{name} = {function}: result_type is a pyarrow type")
    if not all(isinstance(column, str) for column in function.columns):
        raise DescriptionError(f"{name} = {function}: columns are names")


Function = Literal[
    "sum", "count", "min", "max", "avg", "count_distinct", "first", "last", "stddev_samp", "stddev_pop", "var_samp",
    "var_pop", "covar_samp", "covar_pop", "corr", "collect_list", "collect_set", "string_agg",
]  # fmt: skip

TWO_COLUMNS: Final = ("covar_samp", "covar_pop", "corr")
"""The functions of two columns."""
MOMENTS: Final = ("stddev_samp", "stddev_pop", "var_samp", "var_pop", *TWO_COLUMNS)
"""The functions of double numbers that are made of sums of values and of products."""
COLLECTS: Final = ("collect_list", "collect_set", "string_agg")
"""The functions whose result has all values of a group."""

AggregateSpec = str | tuple[str, str] | tuple[str, str, str] | AggregateFunction
"""What a user writes for an aggregate."""

_SPELLINGS: Final = {
    "first_value": "first", "last_value": "last", "std": "stddev_samp", "stddev": "stddev_samp", "variance": "var_samp",
    "array_agg": "collect_list", "listagg": "string_agg", "approx_count_distinct": "count_distinct",
}  # fmt: skip

_DISTINCT: Final = {"count": "count_distinct", "collect_list": "collect_set", "collect_set": "collect_set"}
_BETWEEN: Final = re.compile(r"(.+?)\s*,\s*'([^']*)'", re.DOTALL)
"""The arguments of ``string_agg``."""

_CALL: Final = re.compile(r"\s*(\w+)\s*\(\s*(distinct\s+)?([^()]*?)\s*\)\s*", re.IGNORECASE)


class Measure(NamedTuple):
    """One aggregate: its name in the output, its function and its column.

    Types and nulls are Spark's: nulls are left out, a sum or average of none is null; integers add up as bigint and
    wrap around, decimals of precision p as decimal(p + 10), and their average has four digits more; durations
    stay what they are; NaN is greater than any other number.

    Attributes:
        column: None for ``count(*)``, and for a function of one's own.
        second: the other column of a function of two; of ``string_agg`` the text between values, none by default.
    """

    name: str
    function: Function | Literal["own"]
    column: str | None
    own: AggregateFunction | None = None
    second: str | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """The input's columns that it looks at."""
        if self.own is not None:
            return self.own.columns
        if self.column is None:
            return ()
        return (self.column,) if self.second is None or self.function not in TWO_COLUMNS else (self.column, self.second)

    def __str__(self) -> str:
        if self.own is not None:
            return f"{self.name} = {self.own}"
        distinct = self.function == "count_distinct"
        function = "count" if distinct else self.function
        second = "" if self.second is None else f", {self.second}"
        if self.function == "string_agg" and self.second is not None:
            second = f", '{self.second}'"
        return f"{self.name} = {function}({'DISTINCT ' if distinct else ''}{self.column or '*'}{second})"


@dataclasses.dataclass(frozen=True)
class Aggregate(Grouped):
    """One row per group of an input's rows.

    Attributes:
        source: the input; its TTL is that of groups: how long after its last change one is forgotten.
        by: the columns that make a group (null is a value of its own); none for one row in all.
        measures: the aggregates; none for the distinct values of ``by``. ``first`` and ``last`` go by the input's
            ``sequence_by``, else by arrival.
        emit: ``per_batch`` and ``per_event`` keep the result up to date; ``at_watermark`` gives a group's row once,
            when the watermark reaches the end of its window, and forgets it; ``at_end`` when the input has ended.
        window_end: with ``at_watermark`` the group column that is that end, of the event time's type; by default the
            event time itself, where it is a group column.
        late: with ``at_watermark``, whether rows of groups that have come out are left out, or come out beside the
            result with the row kind ``late``: behind the aggregates are then the input's other columns, null in rows
            of groups. Flink: ``sideOutputLateData`` of ``WindowedStream``.
        always: whether the one row that there is without ``by`` is there though the input has no row, as in SQL; in
            Flink it is not, but at the end.
    """

    source: Input
    by: tuple[str, ...]
    measures: tuple[Measure, ...]
    emit: Emit = dataclasses.field(default="at_end", metadata=ABSENT)
    window_end: str | None = dataclasses.field(default=None, metadata=ABSENT)
    late: Literal["drop", "tag"] = dataclasses.field(default="drop", metadata=ABSENT)
    always: bool = dataclasses.field(default=False, metadata=ABSENT)

    kind: ClassVar[str] = "aggregate"
    runs: ClassVar[str] = "groups.aggregate.continuous"
    runs_at_end: ClassVar[str] = "groups.at_end"
    emits: ClassVar[tuple[Emit, ...]] = ("per_event", "per_batch", "at_watermark", "at_end")

    @classmethod
    @reading("aggregate")
    def of(
        cls,
        source: Input,
        by: tuple[str, ...],
        aggregates: Mapping[str, AggregateSpec],
        emit: Emit = "at_end",
        window_end: str | None = None,
        *,
        late: Literal["drop", "tag"] = "drop",
    ) -> Aggregate:
        """A description from what a user writes.

        Args:
            source: the input.
            by: its group columns.
            aggregates: result column to ``"sum(amount)"``, ``"count(*)"``, ``"count(distinct user)"``, or to a pair
                like ``("sum", "amount")``.
            emit: see `Aggregate`.
            window_end: likewise.
            late: likewise.
        """
        measures = tuple(parse_measure(name, text) for name, text in aggregates.items())
        return cls(source, by, measures, emit, window_end, late)

    def _check(self) -> None:
        self._check_emit()
        if not self.measures and not self._has_groups:
            raise DescriptionError("an aggregate needs at least one of " + ", ".join(get_args(Function)))
        for measure in self.measures:
            if measure.own is not None:
                check_function(measure.own, measure.name)
        wanted = [*(("by", c) for c in self.by), *((m.name, c) for m in self.measures for c in m.columns)]
        check_columns(self.source, wanted)
        check_key_types(self.source, self.by)
        self._check_names("name an aggregate otherwise")
        if self.emit != "at_end" or self.goes_row_by_row:
            self._check_continuous()
        if self.emit == "at_watermark":
            self._check_window()
        elif self.window_end is not None:
            raise DescriptionError(f"window_end={self.window_end!r} goes with emit='at_watermark' only")
        if self.late == "tag" and self.emit != "at_watermark":
            raise DescriptionError("late='tag' goes with emit='at_watermark' only: else no row is late")
        if self.always and (self.by or self.source.ttl_ms is not None):
            raise DescriptionError("a row is always there only without group columns, and where no row is forgotten")
        if self.late == "tag" and not self.source.insert_only:
            raise DescriptionError(
                f"input '{self.source.name}': late='tag' is for insertions, as a late retraction would look like a row"
            )

    @property
    def _has_groups(self) -> bool:
        return bool(self.by)

    def _check_window(self) -> None:
        name, event_time, end = self.source.name, self.source.event_time, self.closes
        if event_time is None:
            raise DescriptionError(f"input '{name}': emit='at_watermark' needs its event time")
        if end is None:
            raise DescriptionError(
                f"input '{name}': with emit='at_watermark' a group closes when the watermark reaches the end of its "
                f"window, and none of {', '.join(self.by) or 'no columns'} is one: group by a window of time, or by "
                f"the event time {event_time!r}"
            )
        if end not in self.by:
            raise DescriptionError(f"input '{name}': window_end {end!r} is no group column: {', '.join(self.by)}")
        kind, wanted = (self.source.schema.field(column).type for column in (end, event_time))
        if kind != wanted:
            raise DescriptionError(
                f"input '{name}': window_end {end!r} is {kind}, its event time {event_time!r} is {wanted}; CAST one"
            )

    @property
    def closes(self) -> str | None:
        """The group column that a watermark has to reach, for a group to be final."""
        if self.emit != "at_watermark" or self.window_end is not None:
            return self.window_end
        return self.source.event_time if self.source.event_time in self.by else None

    @functools.cached_property
    def time_type(self) -> pa.DataType | None:
        """The type times are compared in; None without a watermark."""
        if not self.by_time:
            return None
        kind = self.source.schema.field(self.source.event_time).type
        return time_type(kind, kind)

    @property
    def by_time(self) -> bool:
        """Tells whether groups come out and go as the watermark passes."""
        return self.emit == "at_watermark"

    @property
    def behind_ms(self) -> int | None:
        """The distance that the output may be behind the watermark: 0, as windows end after it; None with late rows."""
        return None if self.late == "tag" else 0

    def times_of(self, source: Input) -> tuple[str, ...]:
        """The event time, and the end of the window."""
        own = super().times_of(source)
        return tuple(dict.fromkeys([*own, *([] if self.closes is None else [self.closes])]))

    def kept(self, number: int) -> str:
        """Tells in words how long rows of the input stay."""
        return f"groups are kept until the watermark reaches {self.closes}; {LATES[self.late]}"

    def _check_continuous(self) -> None:
        if self.emit == "at_watermark":
            self.source.refuse("with emit='at_watermark' groups go when their windows end", "ttl_ms")
        changes = self.emit != "at_end" and not self.source.insert_only
        for measure in self.measures:
            if measure.own is not None and not measure.own.retracts and changes:
                raise DescriptionError(
                    f"input '{self.source.name}': {measure} has no retract(), and rows of this input may be taken back"
                )

    def with_inputs(self, inputs: Sequence[Input], emit: Emit) -> Self:
        """Gives the same aggregate of another input."""
        end, late = (self.window_end, self.late) if emit == "at_watermark" else (None, "drop")
        return dataclasses.replace(self, source=inputs[0], emit=emit, window_end=end, late=late)

    _noun: ClassVar[str] = "result"

    @functools.cached_property
    def output(self) -> tuple[OutputColumn, ...]:
        """The result's columns after ``row_kind``."""
        schema = self.source.schema
        groups = [OutputColumn(c, 0, c, None, schema.field(c).type) for c in self.by]
        measured = [OutputColumn(m.name, 0, m.column or "", None, result_type(self.source, m)) for m in self.measures]
        return (*groups, *measured, *(OutputColumn(c, 0, c, None, schema.field(c).type) for c in self._of_late_rows))

    @property
    def _of_late_rows(self) -> list[str]:
        """The columns that late rows alone have."""
        return [c for c in self.source.schema.names if c not in self.by] if self.late == "tag" else []

    def own_column(self, number: int, column: OutputColumn) -> str | None:
        """The input's column that fills an output column in a late row; None for an aggregate."""
        return column.column if column.name in self.by or column.name in self._of_late_rows else None

    @property
    def compared_columns(self) -> list[tuple[int, str]]:
        """The group's columns, and what is compared by an aggregate."""
        compared = [m.column for m in self.measures if m.function in ("min", "max", "count_distinct", *COLLECTS)]
        return [*super().compared_columns, *((0, column) for column in compared if column is not None)]

    def _unique_key(self) -> tuple[str, ...] | None:
        return self.by if self.by and self.group_never_null and self.late == "drop" else None

    @property
    def goes_row_by_row(self) -> bool:
        """Tells whether a backend's ``groupby`` lacks some of the aggregates, at the end as before."""
        return self._has_first_or_last or any(m.own is not None or m.function in COLLECTS for m in self.measures)

    @property
    def order_matters_at_end(self) -> bool:
        """Tells whether the result at the end of input depends on the order in which rows came."""
        return super().order_matters_at_end or self._has_first_or_last

    @property
    def _has_first_or_last(self) -> bool:
        return any(measure.function in ("first", "last") for measure in self.measures)

    @property
    def result_without_rows(self) -> bool:
        """Tells whether there is a result though no row has come."""
        return not self.by and self.emit == "at_end"

    @property
    def title(self) -> str:
        """The aggregate in one line, for people."""
        return f"aggregate of {self.source.name} by {', '.join(self.by) or 'nothing'}"

    def lines(self) -> list[str]:
        """The aggregate in some lines, for people: its input, its groups, its functions."""
        return [
            f"aggregate: {self.source.name}",
            line("group by", ", ".join(self.by) or "nothing: one row in all"),
            line("aggregates", ", ".join(map(str, self.measures))),
        ]

    kept_at_end = "an aggregate with emit='at_end'"


def result_type(source: Input, measure: Measure) -> pa.DataType:
    """The type of what an aggregate gives.

    Args:
        source: its input.
        measure: the aggregate.

    Raises:
        DescriptionError: there is no such function, or it does not take its column.
    """
    if measure.own is not None:
        return measure.own.result_type
    if measure.function not in get_args(Function):
        raise DescriptionError(f"no aggregate {measure.function!r}; {nearest(measure.function, get_args(Function))}")
    if measure.column is None:
        if measure.function != "count":
            raise DescriptionError(f"{measure.function}(*): only count takes *")
        return pa.int64()
    kind = source.schema.field(measure.column).type
    t = pa.types
    text = f"input '{source.name}': {measure.function}({measure.column}) of type {kind}"
    if measure.function == "count_distinct" and (t.is_nested(kind) or t.is_null(kind)):
        raise DescriptionError(f"{text}: distinct values of this type are not counted")
    if measure.function in ("count", "count_distinct"):
        return pa.int64()
    if measure.function in MOMENTS:
        return _type_of_moments(source, measure)
    if measure.function in COLLECTS and t.is_nested(kind):
        raise DescriptionError(f"{text}: there is no order, in which values are collected")
    if measure.function == "string_agg" and not (t.is_string(kind) or t.is_large_string(kind)):
        raise DescriptionError(f"{text}: it takes text, CAST it")
    if measure.function in COLLECTS:
        return pa.string() if measure.function == "string_agg" else pa.list_(pa.field("element", kind))
    if measure.function in ("min", "max") and t.is_nested(kind):
        raise DescriptionError(f"{text}: there is no order")
    if measure.function in ("first", "last", "min", "max"):
        return kind
    if t.is_duration(kind):
        return kind
    if t.is_decimal(kind) and measure.function == "sum":
        return pa.decimal128(min(38, kind.precision + 10), kind.scale)
    if t.is_decimal(kind):
        return pa.decimal128(min(38, kind.precision + 4), min(38, kind.scale + 4))
    if t.is_floating(kind) or (t.is_integer(kind) and measure.function == "avg"):
        return pa.float64()
    if t.is_integer(kind):
        return pa.int64()
    raise DescriptionError(f"{text} cannot be added up")


def _type_of_moments(source: Input, measure: Measure) -> pa.DataType:
    """Gives the type of a function of numbers, double.

    Raises:
        DescriptionError: a column is none of numbers, or there are fewer or more than the function takes.
    """
    wanted = 2 if measure.function in TWO_COLUMNS else 1
    if len(measure.columns) != wanted or (measure.second is not None and wanted == 1):
        raise DescriptionError(f"{measure}: it takes {'two columns' if wanted == 2 else 'a column'}")
    for column in measure.columns:
        kind = source.schema.field(column).type
        if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)):
            raise DescriptionError(
                f"input '{source.name}': {measure.function}({column}) of type {kind}: it takes numbers"
            )
    return pa.float64()


def parse_measure(name: str, text: AggregateSpec) -> Measure:
    """An aggregate from what a user writes, see `Aggregate.of`.

    Raises:
        DescriptionError: it is none.
    """
    if isinstance(text, AggregateFunction):
        check_function(text, name)
        return Measure(name, "own", None, text)
    if not isinstance(text, str | tuple):
        raise DescriptionError(
            f"{name}={type(text).__name__}: an aggregate is text, as 'sum(amount)', or a gpu_ops.AggregateFunction. "
            "There are " + ", ".join(get_args(Function))
        )
    second: str | None = None
    if isinstance(text, tuple):
        function, column, *more = text
        distinct, second = False, more[0] if more else None
    else:
        call = _CALL.fullmatch(text)
        if call is None and "filter" in text.lower():
            raise DescriptionError(f"{name}={text!r}: FILTER is a matter of gpu_ops.aggregate() and sql()")
        if call is None:
            raise DescriptionError(f"{name}={text!r} is no aggregate; write for example 'sum(amount)'")
        function, distinct, column = call.group(1), call.group(2) is not None, call.group(3).strip("`")
    function = _SPELLINGS.get(function.lower(), function.lower())
    if isinstance(text, str) and function in TWO_COLUMNS and "," in column:
        column, second = (part.strip().strip("`") for part in column.split(",", 1))
    between = _BETWEEN.fullmatch(column) if isinstance(text, str) and function == "string_agg" else None
    if between is not None:
        column, second = between.group(1).strip("`"), between.group(2)
    if distinct:
        if function not in _DISTINCT:
            raise DescriptionError(f"{name}={text!r}: DISTINCT goes with count and collect_list only")
        function = _DISTINCT[function]
    return Measure(name, cast("Function", function), None if column == "*" else column, None, second or None)
