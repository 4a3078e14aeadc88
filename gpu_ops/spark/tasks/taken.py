"""What is taken of rows while they are Arrow's: which of them, and columns, as they are or computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pyarrow as pa

from gpu_ops.conditions import Expression
from gpu_ops.conditions.expressions import Column
from gpu_ops.spark.exchange.arrivals import typed

ROWS = ""
"""What expressions call the rows: there is one input."""


class Taken(NamedTuple):
    """Which rows and columns of batches are taken.

    Attributes:
        columns: the rows', or what is computed of these.
        where: of type boolean, one after the other: each is evaluated for rows of which those before are true.
    """

    columns: tuple[Expression, ...]
    where: tuple[Expression, ...] = ()

    @classmethod
    def all(cls, schema: pa.Schema) -> Taken:
        """All of a schema's columns as they are."""
        return cls(
            tuple(
                Expression(field.name, Column(ROWS, field.name, field.type), {ROWS: (field.name,)}) for field in schema
            )
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The columns that it needs."""
        return tuple(dict.fromkeys([*_named(self.columns), *self.tested]))

    @property
    def tested(self) -> tuple[str, ...]:
        """Those that rows are filtered by."""
        return _named(self.where)

    @property
    def computed(self) -> tuple[Expression, ...]:
        """The columns that are not the rows' own."""
        return tuple(column for column in self.columns if not isinstance(column.root, Column))

    def types(self, schema: pa.Schema) -> list[pa.DataType]:
        """The columns' types.

        Args:
            schema: of the rows.
        """
        own = [column.root for column in self.columns]
        return [schema.field(x.name).type if isinstance(x, Column) else x.type for x in own]

    def of(self, batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
        """What is taken of a batch, in a schema of as many columns.

        Raises:
            EvaluationError: an expression fails for a row, in ANSI mode.
        """
        if self.where or self.computed:  # else without an import of pandas, which takes an executor a while
            from cpu_fallback.conditions import values  # noqa: PLC0415
        for number, test in enumerate(self.where):
            (true,) = values([test], {ROWS: batch}, batch.num_rows)
            later = dict.fromkeys((*_named(self.columns), *_named(self.where[number + 1 :])))
            batch = batch.select(list(later)).filter(true, null_selection_behavior="drop")
        made = iter(values(self.computed, {ROWS: batch}, batch.num_rows) if self.computed else ())
        arrays = [batch.column(x.root.name) if isinstance(x.root, Column) else next(made) for x in self.columns]
        return typed(pa.RecordBatch.from_arrays(arrays, names=schema.names), schema)


def _named(expressions: Sequence[Expression]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for x in expressions for name in x.columns.get(ROWS, ())))
