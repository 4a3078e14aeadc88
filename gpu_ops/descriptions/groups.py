"""The first n rows of each group, and the latest row of each key, as users write them down.

`Top` is ``ROW_NUMBER() OVER (PARTITION BY by ORDER BY order) <= n`` of SQL, over any changelog, after Flink's
``StreamExecRank``.

`Latest` takes upserts and deletes in and gives retractions, after Flink's ``StreamExecChangelogNormalize``
(``ProcTimeDeduplicateKeepLastRowFunction``), which its planner puts above an upsert source for the same reason: what
comes after needs the old row, and may be distributed by any column. Its first row, and that which is first or last by a
column, are Flink's ``StreamExecDeduplicate``, for insertions only.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Final, Literal, NamedTuple, Self, TypeAlias

import pyarrow as pa

from gpu_ops.descriptions.changelog import ROW_KIND_COLUMN
from gpu_ops.descriptions.description import Description, Emit, OutputColumn, line
from gpu_ops.descriptions.inputs import Input, Layout, check_columns, check_key_types, check_ordered
from gpu_ops.descriptions.keys import Shuffle
from gpu_ops.errors import DescriptionError
from gpu_ops.fields import ABSENT


class OneInput(Description):
    """Something by columns of one input.

    Attributes:
        source: the input.
        by: columns of it.
    """

    if TYPE_CHECKING:
        source: Input

        @property
        def by(self) -> tuple[str, ...]:
            """The columns of a group or key."""

    @property
    def inputs(self) -> tuple[Input]:
        """The only input, in a tuple."""
        return (self.source,)

    rename_hint = ""  # nothing but a new name

    @property
    def equal_columns(self) -> list[tuple[str, ...]]:
        """The columns of a group or key, each in a tuple."""
        return [(column,) for column in self.by]

    @property
    def compared_columns(self) -> list[tuple[int, str]]:
        """The columns of a group or key, each with the number of the input."""
        return [(0, column) for column in self.by]

    def own_column(self, number: int, column: OutputColumn) -> str | None:
        """Each shows itself, but for one that is made."""
        return column.column or None

    @property
    def shuffled_by(self) -> tuple[Shuffle, ...]:
        """The columns that rows are partitioned by: less those that would part an upsert's old and new row."""
        unique = self.source.unique_key if self.source.updates == "upsert" else None
        columns = [c for c in self.by if unique is None or c in unique]
        return tuple(Shuffle((column,), self.source.schema.field(column).type) for column in columns)

    def layout(self, number: int) -> Layout:
        """The state layout of its input."""
        return "multiset" if self.source.unique_key is None else "unique_key"


class Grouped(OneInput):
    """Groups of one input's rows."""

    @property
    def group_never_null(self) -> bool:
        """Tells whether no column of the group may be null: null is a group, and no part of a key."""
        unique = self.source.unique_key or ()
        return all(c in unique or not self.source.schema.field(c).nullable for c in self.by)


MAX_ROWS: Final = 10_000
"""Rows of a group's result: with ``per_event`` as many numbers are compared at every change of a group."""

_TERM: Final = re.compile(
    r"\s*(?:`((?:[^`]|``)+)`|([^\s`,]+))(?:\s+(asc|desc))?(?:\s+nulls\s+(first|last))?\s*", re.IGNORECASE
)


class _Order(NamedTuple):
    column: str
    descending: bool
    nulls_first: bool


class Order(_Order):
    """One column to order by. Without a word about nulls they are Spark's: first if ascending, last if descending."""

    __slots__ = ()

    def __new__(cls, column: str, descending: bool = False, nulls_first: bool | None = None) -> Self:
        """The column, whether from the greatest on, and where nulls come; None for where Spark has them."""
        return super().__new__(cls, column, descending, not descending if nulls_first is None else nulls_first)

    def __str__(self) -> str:
        usual = self.nulls_first is not self.descending
        nulls = "" if usual else f" NULLS {'FIRST' if self.nulls_first else 'LAST'}"
        return f"{self.column}{' DESC' if self.descending else ''}{nulls}"


def parse_order(text: str | Sequence[str]) -> tuple[Order, ...]:
    """Parses what a user writes: ``"amount DESC, id"``, or ``["amount DESC NULLS FIRST", "id"]``.

    Raises:
        DescriptionError: it is no such text.
    """
    terms = text.split(",") if isinstance(text, str) else list(text)
    found = []
    for term in terms:
        parts = _TERM.fullmatch(term) if isinstance(term, str) else None
        if parts is None:
            raise DescriptionError(f"order_by={term!r} is no order; write for example 'amount DESC' or 'id'")
        quoted, plain, way, nulls = parts.groups()
        first = None if nulls is None else nulls.lower() == "first"
        found.append(Order(plain or quoted.replace("``", "`"), (way or "").lower() == "desc", first))
    return tuple(found)


class OrderedGroups(Grouped):
    """Groups of one input's rows, within which these have an order.

    Attributes:
        order: by what they are ordered; equal ones by their arrival, the earliest first. Of a column that is there
            twice the first place decides, and the others are left out.
        number: the column with the number of a row in its group; None for none.
    """

    if TYPE_CHECKING:
        order: tuple[Order, ...]

        @property
        def number(self) -> str | None:
            """The column with the number of a row in its group."""

    order_matters_at_end = True

    def _check_order(self, asked: Sequence[tuple[str, str]] = ()) -> None:
        """Leaves out what is ordered by twice, and checks columns; ``asked``: others, each with what asks for it."""
        first = {order.column: order for order in reversed(self.order)}
        object.__setattr__(self, "order", tuple(order for order in self.order if first[order.column] is order))
        ordered = [("order_by", order.column) for order in self.order]
        check_columns(self.source, [*(("by", column) for column in self.by), *ordered, *asked])
        check_key_types(self.source, self.by)
        for order in self.order:
            check_ordered(self.source, "column", order.column)

    @property
    def compared_columns(self) -> list[tuple[int, str]]:
        """The group's, and those of the order."""
        return [*super().compared_columns, *((0, order.column) for order in self.order)]

    def _unique_key(self) -> tuple[str, ...] | None:
        if not self.group_never_null:
            return None
        if self.source.unique_key is None:
            return None if self.number is None else (*self.by, self.number)
        # rows of one key in different groups come from different partitions, in any order
        return (*self.source.unique_key, *(c for c in self.by if c not in self.source.unique_key))


@dataclasses.dataclass(frozen=True)
class Top(OrderedGroups):
    """The first rows of each group.

    Attributes:
        source: the input; its TTL is that of groups: how long after its last change one is forgotten.
        by: the columns that make a group (null is a value of its own); none for one group in all.
        order: by what rows of a group are ordered; equal ones by their arrival, the earliest first. Of a column that
            is there twice the first place decides, and the others are left out.
        n: how many rows of each group, at most `MAX_ROWS`.
        emit: ``per_batch`` or ``per_event`` keep the result up to date; ``at_end`` gives it when the input has ended.
        number: the name of a column for the number of a row in its group, from 1; None for none.
    """

    source: Input
    by: tuple[str, ...]
    order: tuple[Order, ...]
    n: int
    emit: Emit = "per_batch"
    number: str | None = None

    kind: ClassVar[str] = "top"
    runs: ClassVar[str] = "groups.top"
    emits: ClassVar[tuple[Emit, ...]] = ("per_batch", "per_event", "at_end")

    def _check(self) -> None:
        self._check_emit()
        if not 1 <= self.n <= MAX_ROWS:
            raise DescriptionError(f"n={self.n}; it is between 1 and {MAX_ROWS}")
        if not self.order:
            raise DescriptionError(f"input '{self.source.name}': the first rows in what order? Give order_by=")
        self._check_order()
        self._check_names("rename it")

    @functools.cached_property
    def output(self) -> tuple[OutputColumn, ...]:
        """The input's columns, then the row's number."""
        own = tuple(OutputColumn(field.name, 0, field.name, None, field.type) for field in self.source.schema)
        return own if self.number is None else (*own, OutputColumn(self.number, 0, "", None, pa.int32()))

    @property
    def title(self) -> str:
        """The operator in one line, for people."""
        return f"first {self.n} of {self.source.name} by {', '.join(self.by) or 'nothing'}"

    def lines(self) -> list[str]:
        """The operator in some lines, for people: its input, its groups, their order."""
        kept = "the first rows only" if self.source.insert_only else "all rows, as those in front may be retracted"
        return [
            f"first {self.n} row{'s' * (self.n > 1)} of each group: {self.source.name}",
            line("group by", ", ".join(self.by) or "nothing: one group in all"),
            line("order", ", ".join(map(str, self.order)) + ", then arrival"),
            line("kept", kept),
        ]


Keep: TypeAlias = Literal["first", "last"]


@dataclasses.dataclass(frozen=True)
class Latest(OneInput):
    """The latest row of each unique key.

    Attributes:
        source: the input, with a unique key.
        emit: ``per_batch`` or ``per_event``; of a static input, which `gpu_ops.sql` may have, ``at_end``.
        order_by: the column by which a row is later than another; None for the order in which they arrive.
        keep: the ``last`` or the ``first`` row of each key.
        unavailable: a column of lists of columns' names: of those a change does not bring the value, which stays that
            of the row before. It is no column of the result.
    """

    source: Input
    emit: Emit = "per_batch"
    order_by: str | None = dataclasses.field(default=None, metadata=ABSENT)
    keep: Keep = dataclasses.field(default="last", metadata=ABSENT)
    unavailable: str | None = dataclasses.field(default=None, metadata=ABSENT)

    kind: ClassVar[str] = "latest"
    runs: ClassVar[str] = "groups.latest"

    def _check(self) -> None:
        self._check_emit()
        if self.chooses and self.source.row_kind is not None:
            raise DescriptionError(
                f"input '{self.source.name}' has row kinds: order_by and keep='first' are for insertions only, as a "
                "row that was passed over is not kept, and could not come back where the chosen one is deleted"
            )
        if self.order_by is not None:
            check_columns(self.source, [("order_by", self.order_by)])
            check_ordered(self.source, "order_by", self.order_by)
        if self.unavailable is not None:
            self._check_unavailable(self.unavailable)
        if self.source.unique_key is None:
            raise DescriptionError(f"input '{self.source.name}': the latest row of what? Give key=")
        check_key_types(self.source, self.source.unique_key)
        self._check_names("rename it")

    def _check_unavailable(self, column: str) -> None:
        label, schema = f"input '{self.source.name}': unavailable={column!r}", self.source.schema
        if column not in schema.names:
            raise DescriptionError(f"{label} is no column; there are {', '.join(schema.names)}")
        kind = schema.field(column).type
        if not (pa.types.is_list(kind) and pa.types.is_string(kind.value_type)):
            raise DescriptionError(f"{label} is {kind}; it is a list of the names of columns")
        if self.chooses or self.emit == "at_end":
            raise DescriptionError(
                f"{label} goes by the row that came before: not with order_by, keep='first' or at_end"
            )

    def _unwritten(self) -> set[str]:
        return super()._unwritten() - ({"order_by", "keep"} if self.chooses else set())

    @property
    def chooses(self) -> bool:
        """Tells whether a row may be passed over because of one that came before it."""
        return self.order_by is not None or self.keep == "first"

    @property
    def chosen_by(self) -> str | None:
        """The column that says which row is later; None for arrival."""
        return self.order_by

    @property
    def by(self) -> tuple[str, ...]:
        """The unique key's columns."""
        assert self.source.unique_key is not None
        return self.source.unique_key

    @functools.cached_property
    def output(self) -> tuple[OutputColumn, ...]:
        """The columns of the input, but for the one that names unavailable values."""
        fields = [field for field in self.source.schema if field.name != self.unavailable]
        return tuple(OutputColumn(field.name, 0, field.name, None, field.type) for field in fields)

    def _unique_key(self) -> tuple[str, ...] | None:
        return self.by

    @property
    def title(self) -> str:
        """The operator in one line, for people."""
        return f"{self._which} row of {self.source.name} by {', '.join(self.by)}"

    @property
    def _which(self) -> str:
        return "latest" if self.keep == "last" else "first"

    def lines(self) -> list[str]:
        """The operator in some lines, for people: its input, its key, its order."""
        ordered = [] if self.order_by is None else [line("order", self.order_by)]
        if self.unavailable is not None:
            ordered.append(line("unavailable", f"columns named in {self.unavailable} keep the value from before"))
        return [f"{self._which} row of each key: {self.source.name}", line("key", ", ".join(self.by)), *ordered]


def without_upserts(description: Description) -> tuple[Description, tuple[int, ...]] | None:
    """Replaces upsert inputs by `Latest`, to distribute an operator that upserts would keep in one partition.

    The old and the new row of an upsert have to meet, and no column that it is distributed by need be the same in both.
    The changelog's unique key is then another one: it has these columns in it, as rows with different values in them
    come from different partitions, in any order.

    Returns:
        The description, and the numbers of the inputs that become their `Latest`; None where it is fine as it is.
    """
    if description.emit == "at_end" or description.by_time:
        return None
    if description.shuffled_by or not description.equal_columns:
        return None
    upserts = tuple(
        number
        for number, source in enumerate(description.inputs)
        if source.unique_key is not None and source.updates == "upsert"
        and not {columns[number] for columns in description.equal_columns} <= set(source.unique_key)
    )  # fmt: skip
    given = [description.inputs[number] for number in upserts]
    if any(x.bad_rows == "tag" or x.sequence_by or ROW_KIND_COLUMN in x.schema.names for x in given):
        return None
    inputs = [
        dataclasses.replace(source, row_kind=ROW_KIND_COLUMN, updates="retract") if number in upserts else source
        for number, source in enumerate(description.inputs)
    ]
    found = description.with_inputs(inputs, description.emit)
    return (found, upserts) if found.shuffled_by else None
