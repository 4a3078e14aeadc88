"""Functions over windows of ordered rows, as users write them down: ``OVER (PARTITION BY ... ORDER BY ...)`` of SQL.

Over any changelog, so that a row that comes or goes corrects what the rows around it show, as in a batch over the rows
that are there. Flink's ``StreamExecOverAggregate`` takes insertions in the order of time only.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar, Final, Literal, NamedTuple, get_args

import pyarrow as pa

from gpu_ops.descriptions.aggregate import TWO_COLUMNS, Measure, result_type
from gpu_ops.descriptions.description import Emit, OutputColumn, line
from gpu_ops.descriptions.groups import Order, OrderedGroups
from gpu_ops.descriptions.inputs import Input, nearest
from gpu_ops.errors import DescriptionError

WindowFunction = Literal[
    "row_number", "rank", "dense_rank", "percent_rank", "cume_dist", "ntile", "lag", "first", "last", "nth", "count",
    "sum", "avg", "min", "max", "stddev_samp", "stddev_pop", "var_samp", "var_pop", "covar_samp", "covar_pop", "corr",
]  # fmt: skip
NUMBERING: Final = ("row_number", "rank", "dense_rank", "percent_rank", "cume_dist", "ntile")
"""The functions that go by a row's place alone."""
OF_ONE_ROW: Final = ("lag", "first", "last", "nth", "min", "max")
"""The functions that show the value of one row."""
_NUMBERED: Final = ("ntile", "lag", "nth")
_PLACES: Final = ("first", "last", "nth", "lag")


class WindowFrame(NamedTuple):
    """The rows around a row that a function looks at.

    Attributes:
        unit: whether ends are counted in ``rows``, or are those of the rows that order alike (``range``).
        first: where it begins, so many rows behind the row (negative: before it); None for the partition's first row.
        last: where it ends, likewise; None for the last row. With ``range`` both are None or 0.
    """

    unit: Literal["rows", "range"]
    first: int | None
    last: int | None

    def __str__(self) -> str:
        ends = [_end_in_words(self.first, "PRECEDING"), _end_in_words(self.last, "FOLLOWING")]
        return f"{self.unit.upper()} BETWEEN {ends[0]} AND {ends[1]}"


def _end_in_words(rows: int | None, unbounded: str) -> str:
    if rows is None:
        return f"UNBOUNDED {unbounded}"
    return "CURRENT ROW" if rows == 0 else f"{abs(rows)} {'PRECEDING' if rows < 0 else 'FOLLOWING'}"


class WindowCall(NamedTuple):
    """One function over a window: its name in the output, and what it looks at.

    Types and nulls are Spark's, see `gpu_ops.descriptions.aggregate.Measure`.

    Attributes:
        column: the input's column; None for ``count(*)`` and the functions of `NUMBERING`.
        frame: the rows it looks at; None for all of the partition.
        number: of ``lag`` how many rows before the row, negative for ``lead``; of ``nth`` which row of the frame, from
            1; of ``ntile`` how many parts.
        ignore_nulls: whether ``lag``, ``first``, ``last`` and ``nth`` pass over nulls.
        second: the other column of a function of two.
    """

    name: str
    function: WindowFunction
    column: str | None = None
    frame: WindowFrame | None = None
    number: int | None = None
    ignore_nulls: bool = False
    second: str | None = None

    @property
    def measure(self) -> Measure:
        """The aggregate that it is over the rows of its frame."""
        return Measure(self.name, self.function, self.column, None, self.second)  # type: ignore[arg-type]

    @property
    def columns(self) -> tuple[str, ...]:
        """The input's columns that it looks at."""
        return tuple(column for column in (self.column, self.second) if column is not None)

    def __str__(self) -> str:
        number, name = self.number, self.function
        if name == "lag" and number is not None and number < 0:
            number, name = -number, "lead"  # type: ignore[assignment]
        given = [*self.columns, *([] if number is None else [str(number)])]
        star = "*" if name == "count" and self.column is None else ""
        nulls = " IGNORE NULLS" if self.ignore_nulls else ""
        frame = "" if self.frame is None else f" {self.frame}"
        return f"{self.name} = {name}({', '.join(given) or star}){nulls}{frame}"


@dataclasses.dataclass(frozen=True)
class Over(OrderedGroups):
    """The rows of an input, each with what functions give over the window around it.

    Attributes:
        source: the input.
        by: the columns that make a partition (null is a value of its own); none for one partition in all.
        order: by what the rows of a partition are ordered, or nothing; equal ones by their arrival, the earliest first.
            Of a column that is there twice the first place decides, and the others are left out.
        calls: the functions.
        emit: ``per_batch`` or ``per_event`` keep the result up to date; ``at_end`` gives it when the input has ended.
    """

    source: Input
    by: tuple[str, ...]
    order: tuple[Order, ...]
    calls: tuple[WindowCall, ...]
    emit: Emit = "per_batch"

    kind: ClassVar[str] = "over"
    runs: ClassVar[str] = "groups.over"
    emits: ClassVar[tuple[Emit, ...]] = ("per_event", "per_batch", "at_end")

    def _check(self) -> None:
        self._check_emit()
        self.source.refuse("rows that others in a window show are not forgotten one by one", "ttl_ms")
        if not self.calls:
            raise DescriptionError(f"input '{self.source.name}': windows of what? There are no functions")
        self._check_order([(call.name, column) for call in self.calls for column in call.columns])
        for call in self.calls:
            self._check_call(call)
        self._check_names("name a function otherwise")

    def _check_call(self, call: WindowCall) -> None:
        name, text = call.function, f"input '{self.source.name}': {call}"
        if name not in get_args(WindowFunction):
            raise DescriptionError(f"no window function {name!r}; {nearest(name, get_args(WindowFunction))}")
        if name in NUMBERING and call.column is not None:
            raise DescriptionError(f"{text}: it takes no column")
        if name not in (*NUMBERING, "count") and call.column is None:
            raise DescriptionError(f"{text}: of which column?")
        if (call.second is None) == (name in TWO_COLUMNS):
            raise DescriptionError(f"{text}: it takes {'two columns' if name in TWO_COLUMNS else 'one column'}")
        if (call.number is None) == (name in _NUMBERED):
            raise DescriptionError(f"{text}: it takes {'a' if name in _NUMBERED else 'no'} number")
        if call.number is not None and call.number < 1 and name != "lag":
            raise DescriptionError(f"{text}: the number is 1 or more")
        if call.ignore_nulls and (name not in _PLACES or call.number == 0):
            raise DescriptionError(f"{text}: IGNORE NULLS is for lag and lead by a row or more, first, last and nth")
        if call.frame is not None:
            if name in (*NUMBERING, "lag"):
                raise DescriptionError(f"{text}: it goes by the whole partition, not by a frame")
            ends = {call.frame.first, call.frame.last}
            if call.frame.unit not in ("rows", "range") or (call.frame.unit == "range" and not ends <= {None, 0}):
                raise DescriptionError(f"{text}: a frame has ROWS, or a RANGE of all rows or those that order alike")
        self.type_of(call)

    def type_of(self, call: WindowCall) -> pa.DataType:
        """The type of what a function gives.

        Raises:
            DescriptionError: it takes no such column.
        """
        if call.function in ("percent_rank", "cume_dist"):
            return pa.float64()
        if call.function in NUMBERING:
            return pa.int32()
        if call.function in _PLACES and call.column is not None:
            return self.source.schema.field(call.column).type
        return result_type(self.source, call.measure)

    @functools.cached_property
    def output(self) -> tuple[OutputColumn, ...]:
        """The input's columns, then those of the functions."""
        own = [OutputColumn(field.name, 0, field.name, None, field.type) for field in self.source.schema]
        return (*own, *(OutputColumn(call.name, 0, "", None, self.type_of(call)) for call in self.calls))

    @property
    def compared_columns(self) -> list[tuple[int, str]]:
        """The partition's, those of the order, and what is compared by a function."""
        compared = [call.column for call in self.calls if call.function in ("min", "max") and call.column is not None]
        return [*super().compared_columns, *((0, column) for column in compared)]

    @property
    def number(self) -> str | None:
        """The column with the number of a row in its partition."""
        return next((call.name for call in self.calls if call.function == "row_number"), None)

    @property
    def title(self) -> str:
        """The operator in one line, for people."""
        return f"windows over {self.source.name} by {', '.join(self.by) or 'nothing'}"

    def lines(self) -> list[str]:
        """The operator in some lines, for people: its input, its partitions, their order, the functions."""
        return [
            f"window functions: {self.source.name}",
            line("partition", ", ".join(self.by) or "nothing: one partition in all"),
            line("order", ", ".join([*map(str, self.order), "arrival"])),
            *(line("function" if number == 0 else "", str(call)) for number, call in enumerate(self.calls)),
        ]
