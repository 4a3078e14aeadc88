"""The first n rows of each group as a user writes them down.

``ROW_NUMBER() OVER (PARTITION BY by ORDER BY order) <= n`` of SQL, over any changelog,
after Flink's ``StreamExecRank``.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple, Self

import pyarrow as pa

from gpu_ops.descriptions.description import Emit, OutputColumn, line
from gpu_ops.descriptions.groups.grouped import Grouped
from gpu_ops.descriptions.inputs import Input, check_key_type, input_from_dict, input_to_dict
from gpu_ops.errors import DescriptionError
from gpu_ops.fields import check_fields

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
    """What a user writes: ``"amount DESC, id"``, or ``["amount DESC NULLS FIRST", "id"]``.

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


@dataclasses.dataclass(frozen=True)
class Top(Grouped):
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

    emits: ClassVar[tuple[Emit, ...]] = ("per_batch", "per_event", "at_end")

    def __post_init__(self) -> None:
        check_fields(self)
        self._check_emit()
        first = {order.column: order for order in reversed(self.order)}
        object.__setattr__(self, "order", tuple(order for order in self.order if first[order.column] is order))
        name, names = self.source.name, self.source.schema.names
        if not 1 <= self.n <= MAX_ROWS:
            raise DescriptionError(f"n={self.n}; it is between 1 and {MAX_ROWS}")
        if not self.order:
            raise DescriptionError(f"input '{name}': the first rows in what order? Give order_by=")
        wanted = [*(("by", column) for column in self.by), *(("order_by", order.column) for order in self.order)]
        for what, column in wanted:
            if column not in names:
                raise DescriptionError(f"input '{name}': {what} names {column!r}; there are {', '.join(names)}")
        for column in self.by:
            check_key_type(self.source, column)
        for order in self.order:
            kind = self.source.schema.field(order.column).type
            if pa.types.is_nested(kind) or pa.types.is_null(kind):
                raise DescriptionError(f"input '{name}': column {order.column!r} of type {kind} has no order")
        self._check_names("rename it")

    @property
    def operator(self) -> str:
        """The module of `gpu_ops.operators` that runs it."""
        return "at_end" if self.emit == "at_end" else "groups.top"

    @functools.cached_property
    def output(self) -> tuple[OutputColumn, ...]:
        """The input's columns, then the row's number."""
        own = tuple(OutputColumn(field.name, 0, field.name, None, field.type) for field in self.source.schema)
        return own if self.number is None else (*own, OutputColumn(self.number, 0, "", None, pa.int32()))

    def own_column(self, number: int, column: OutputColumn) -> str | None:
        """Each shows itself, but for the number."""
        del number
        return column.column or None

    @property
    def compared_columns(self) -> list[tuple[int, str]]:
        """The group's, and those of the order."""
        return [(0, column) for column in (*self.by, *(order.column for order in self.order))]

    def order_matters(self, number: int) -> bool:
        """Always: of rows that are equal in the order the earliest comes first."""
        del number
        return True

    @property
    def order_matters_at_end(self) -> bool:
        """Likewise."""
        return True

    def _unique_key(self) -> tuple[str, ...] | None:
        if not self.group_never_null:
            return None
        if self.source.unique_key is None:
            return (*self.by, self.number) if self.number is not None else None
        # rows of one key in different groups come from different partitions, in any order
        return (*self.source.unique_key, *(c for c in self.by if c not in self.source.unique_key))

    @property
    def title(self) -> str:
        """It in one line, for people."""
        return f"first {self.n} of {self.source.name} by {', '.join(self.by) or 'nothing'}"

    def lines(self) -> list[str]:
        """Of what, by what, in what order."""
        kept = "the first rows only" if self.source.insert_only else "all rows, as those in front may be retracted"
        return [
            f"first {self.n} row{'s' * (self.n > 1)} of each group: {self.source.name}",
            line("group by", ", ".join(self.by) or "nothing: one group in all"),
            line("order", ", ".join(map(str, self.order)) + ", then arrival"),
            line("kept", kept),
        ]

    def to_dict(self) -> dict[str, Any]:
        """What JSON has of it."""
        return {
            "kind": "top",
            "by": list(self.by),
            "order": [list(order) for order in self.order],
            "n": self.n,
            "emit": self.emit,
            "number": self.number,
            "inputs": [input_to_dict(self.source)],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """From what `to_dict` gave."""
        order = tuple(Order(*one) for one in data["order"])
        source = input_from_dict(data["inputs"][0])
        return cls(source, tuple(data["by"]), order, data["n"], data["emit"], data["number"])
