"""Conditions that filter the rows of files while Arrow reads them: SQL's three values, on columns and constants."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

COMPARISONS: Final[dict[str, Callable[[pa.Array, pa.Scalar], pa.Array]]] = {
    "=": pc.equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}


class Compared(NamedTuple):
    """A column beside a constant that is not null: ``op`` is one of `COMPARISONS`."""

    op: str
    column: int
    value: pa.Scalar


class OneOf(NamedTuple):
    """A column among constants, none of which is null."""

    column: int
    values: pa.Array


class Missing(NamedTuple):
    """Whether a column is null."""

    column: int


class Flag(NamedTuple):
    """A column that is a condition itself."""

    column: int


class Not(NamedTuple):
    """The other way round; unknown stays unknown."""

    part: Condition


class Both(NamedTuple):
    """AND."""

    left: Condition
    right: Condition


class Either(NamedTuple):
    """OR."""

    left: Condition
    right: Condition


Condition: TypeAlias = Compared | OneOf | Missing | Flag | Not | Both | Either
"""Columns are numbers, of a batch or of what a plan looks up."""


class Taken(NamedTuple):
    """Which rows and columns of batches are taken.

    Attributes:
        columns: by their numbers.
        tested: those that the conditions go by; theirs are places in it.
        conditions: all true for each row that is taken.
    """

    columns: tuple[int, ...]
    tested: tuple[int, ...] = ()
    conditions: tuple[Condition, ...] = ()

    def of(self, batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
        """What is taken of a batch, in a schema of as many columns and of their types."""
        if self.conditions:
            true = truth(self.conditions, batch.select(list(self.tested)))
            batch = batch.filter(true, null_selection_behavior="drop")
        return pa.RecordBatch.from_arrays([batch.column(n) for n in self.columns], schema=schema)


def truth(conditions: Sequence[Condition], batch: pa.RecordBatch) -> pa.Array:
    """For each row whether all conditions are true, null for unknown.

    Args:
        conditions: one or more.
        batch: the columns that they number.
    """
    return _truth(functools.reduce(Both, conditions), batch)


def _truth(condition: Condition, batch: pa.RecordBatch) -> pa.Array:
    match condition:
        case Compared(op, column, value):
            return COMPARISONS[op](batch.column(column), value)
        case OneOf(column, values):
            own = batch.column(column)
            own = own if own.type == values.type else own.cast(values.type)
            return pc.if_else(pc.is_valid(own), pc.is_in(own, value_set=values), pa.scalar(None, pa.bool_()))
        case Missing(column):
            return pc.is_null(batch.column(column))
        case Flag(column):
            return batch.column(column)
        case Not(part):
            return pc.invert(_truth(part, batch))
        case Both(left, right):
            return pc.and_kleene(_truth(left, batch), _truth(right, batch))
        case Either(left, right):
            return pc.or_kleene(_truth(left, batch), _truth(right, batch))
