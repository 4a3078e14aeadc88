"""Aggregates as a user writes them down: one row per group, kept up to date, or when the input has ended.

Flink's ``GroupAggFunction``; at the end of input it is the one over a global window with the end-of-stream trigger
(FLIP-331). Retractions count: it is the folded input that is grouped.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Final, Literal, NamedTuple, Self, cast, get_args

import pyarrow as pa

from gpu_ops.descriptions.description import Emit, OutputColumn, line
from gpu_ops.descriptions.grouped import Grouped
from gpu_ops.descriptions.inputs import Input, check_key_type, input_from_dict, input_to_dict
from gpu_ops.errors import DescriptionError, NotBuiltError
from gpu_ops.fields import check_fields, reading

Function = Literal["sum", "count", "min", "max", "avg", "count_distinct", "first", "last"]

_SPELLINGS: Final = {"first_value": "first", "last_value": "last"}

_CALL: Final = re.compile(r"\s*(\w+)\s*\(\s*(distinct\s+)?([^()]*?)\s*\)\s*", re.IGNORECASE)


class Measure(NamedTuple):
    """One aggregate.

    Types and nulls are Spark's: nulls are left out, a sum or average of none is null; integers add up as bigint and
    wrap around, decimals of precision p as decimal(p + 10); NaN is greater than any other number.
    """

    name: str
    function: Function
    column: str | None
    """None for ``count(*)``."""

    def __str__(self) -> str:
        distinct = self.function == "count_distinct"
        function = "count" if distinct else self.function
        return f"{self.name} = {function}({'DISTINCT ' if distinct else ''}{self.column or '*'})"


@dataclasses.dataclass(frozen=True)
class Aggregate(Grouped):
    """One row per group of an input's rows.

    Attributes:
        source: the input.
        by: the columns that make a group (null is a value of its own); none for one row in all.
        measures: the aggregates. ``first`` and ``last`` go by the input's ``sequence_by``, else by arrival.
        emit: ``per_batch`` and ``per_event`` keep the result up to date; ``at_end`` gives it when the input has ended.
    """

    source: Input
    by: tuple[str, ...]
    measures: tuple[Measure, ...]
    emit: Emit = "at_end"

    @classmethod
    @reading("aggregate")
    def of(
        cls,
        source: Input,
        by: tuple[str, ...],
        aggregates: Mapping[str, str | tuple[str, str]],
        emit: Emit = "at_end",
    ) -> Aggregate:
        """A description from what a user writes.

        Args:
            source: the input.
            by: its group columns.
            aggregates: result column to ``"sum(amount)"``, ``"count(*)"``, ``"count(distinct user)"``, or to a pair
                like ``("sum", "amount")``.
            emit: see `Aggregate`.
        """
        return cls(source, by, tuple(parse_measure(name, text) for name, text in aggregates.items()), emit)

    def __post_init__(self) -> None:
        check_fields(self)
        self._check_emit()
        names = self.source.schema.names
        if not self.measures:
            raise DescriptionError("an aggregate needs at least one of " + ", ".join(get_args(Function)))
        wanted = [*(("by", c) for c in self.by), *((m.name, m.column) for m in self.measures if m.column is not None)]
        for what, column in wanted:
            if column not in names:
                raise DescriptionError(
                    f"input '{self.source.name}': {what} names {column!r}; there are {', '.join(names)}"
                )
        for column in self.by:
            check_key_type(self.source, column)
        self._check_names("name an aggregate otherwise")
        if self.emit != "at_end":
            self._check_continuous()

    def _check_continuous(self) -> None:
        if self.source.ttl_ms is not None:
            raise DescriptionError(
                f"input '{self.source.name}': an aggregate counts every row until it is taken back, ttl= has no place"
            )
        for measure in self.measures:
            kind = None if measure.column is None else self.source.schema.field(measure.column).type
            if kind is not None and pa.types.is_decimal256(kind) and measure.function in ("sum", "avg"):
                raise DescriptionError(
                    f"input '{self.source.name}': {measure} of type {kind} is not kept up to date; CAST it to 38 digits"
                )

    _noun: ClassVar[str] = "result"

    @property
    def operator(self) -> str:
        """The module of `gpu_ops.operators` that runs it."""
        return "grouped" if self.emit == "at_end" else "aggregate.continuous"

    @functools.cached_property
    def output(self) -> tuple[OutputColumn, ...]:
        """The result's columns after ``row_kind``."""
        schema = self.source.schema
        groups = [OutputColumn(c, 0, c, None, schema.field(c).type) for c in self.by]
        return (*groups, *(OutputColumn(m.name, 0, m.column or "", None, self._type(m)) for m in self.measures))

    def _type(self, measure: Measure) -> pa.DataType:
        if measure.function not in get_args(Function):
            raise DescriptionError(f"no aggregate {measure.function!r}; there are {', '.join(get_args(Function))}")
        if measure.column is None:
            if measure.function != "count":
                raise DescriptionError(f"{measure.function}(*): only count takes *")
            return pa.int64()
        kind = self.source.schema.field(measure.column).type
        t = pa.types
        text = f"input '{self.source.name}': {measure.function}({measure.column}) of type {kind}"
        if measure.function == "count_distinct" and (t.is_nested(kind) or t.is_null(kind)):
            raise DescriptionError(f"{text}: distinct values of this type are not counted")
        if measure.function in ("count", "count_distinct"):
            return pa.int64()
        if measure.function in ("first", "last"):
            if self.emit == "at_end":
                raise DescriptionError(f"{text} is not there at the end of input; take emit='per_batch' or 'per_event'")
            return kind
        if measure.function in ("min", "max"):
            if t.is_nested(kind):
                raise DescriptionError(f"{text}: there is no order")
            return kind
        if t.is_decimal(kind) and measure.function == "sum":
            return pa.decimal128(min(38, kind.precision + 10), kind.scale)
        if t.is_decimal(kind):
            raise DescriptionError(f"{text} is not exact: take sum and count, or CAST it to double first")
        if t.is_floating(kind) or (t.is_integer(kind) and measure.function == "avg"):
            return pa.float64()
        if t.is_integer(kind):
            return pa.int64()
        raise DescriptionError(f"{text} cannot be added up")

    def own_column(self, number: int, column: OutputColumn) -> str | None:
        """Which column of its input an output column shows in a row of the input; None for an aggregate."""
        del number
        return column.column if column.name in self.by else None

    @property
    def compared_columns(self) -> list[tuple[int, str]]:
        """The group's columns, and what is compared by an aggregate."""
        by_value = ("min", "max", "count_distinct")
        compared = [m.column for m in self.measures if m.function in by_value]
        return [(0, column) for column in (*self.by, *compared) if column is not None]

    def _unique_key(self) -> tuple[str, ...] | None:
        return self.by if self.by and self.group_never_null else None

    def order_matters(self, number: int) -> bool:
        """Whether the output of a micro-batch depends on the order of its rows."""
        return super().order_matters(number) or any(m.function in ("first", "last") for m in self.measures)

    @property
    def result_without_rows(self) -> bool:
        """Whether it has a result though no row has come."""
        return not self.by and self.emit == "at_end"

    @property
    def title(self) -> str:
        """It in one line, for people."""
        return f"aggregate of {self.source.name} by {', '.join(self.by) or 'nothing'}"

    def lines(self) -> list[str]:
        """What is grouped, by what."""
        return [
            f"aggregate: {self.source.name}",
            line("group by", ", ".join(self.by) or "nothing: one row in all"),
            line("aggregates", ", ".join(map(str, self.measures))),
        ]

    @property
    def kept_at_end(self) -> str:
        """What of it keeps a stream until it ends."""
        return "an aggregate with emit='at_end'"

    def to_dict(self) -> dict[str, Any]:
        """What JSON has of it."""
        return {
            "kind": "aggregate",
            "by": list(self.by),
            "measures": [list(m) for m in self.measures],
            "inputs": [input_to_dict(self.source)],
            **({} if self.emit == "at_end" else {"emit": self.emit}),  # earlier folders have none
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """From what `to_dict` gave."""
        measures = tuple(Measure(*m) for m in data["measures"])
        return cls(input_from_dict(data["inputs"][0]), tuple(data["by"]), measures, data.get("emit", "at_end"))


def parse_measure(name: str, text: str | tuple[str, str]) -> Measure:
    """An aggregate from what a user writes, see `Aggregate.of`.

    Raises:
        DescriptionError: it is none.
        NotBuiltError: it is a function.
    """
    if not isinstance(text, str | tuple):
        raise NotBuiltError(
            f"{name}={type(text).__name__}: aggregates are text, as 'sum(amount)'; functions of one's own are not "
            "built, as no code travels to where the groups are. There are " + ", ".join(get_args(Function))
        )
    if isinstance(text, tuple):
        function, column = text
        distinct = False
    else:
        call = _CALL.fullmatch(text)
        if call is None:
            raise DescriptionError(f"{name}={text!r} is no aggregate; write for example 'sum(amount)'")
        function, distinct, column = call.group(1), call.group(2) is not None, call.group(3).strip("`")
    function = _SPELLINGS.get(function.lower(), function.lower())
    if distinct:
        if function != "count":
            raise DescriptionError(f"{name}={text!r}: DISTINCT goes with count only")
        function = "count_distinct"
    return Measure(name, cast("Function", function), None if column == "*" else column)
