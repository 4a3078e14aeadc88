"""What descriptions over the groups of one input have in common: aggregates and the first rows of each group."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from gpu_ops.descriptions.description import Description, Emit
from gpu_ops.descriptions.inputs import Input, Layout
from gpu_ops.descriptions.keys import Shuffle


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
            """Columns of it."""

    @property
    def inputs(self) -> tuple[Input]:
        """Its one input."""
        return (self.source,)

    def with_inputs(self, inputs: Sequence[Input], emit: Emit) -> Self:
        """The same of another input."""
        return dataclasses.replace(self, source=inputs[0], emit=emit)  # type: ignore[type-var]

    @property
    def rename_hint(self) -> str:
        """Nothing else than a new name helps where two output columns have one."""
        return ""

    @property
    def equal_columns(self) -> list[tuple[str, ...]]:
        """The columns."""
        return [(column,) for column in self.by]

    @property
    def shuffled_by(self) -> tuple[Shuffle, ...]:
        """What rows are partitioned by: the columns, less what would part an upsert's old and new row."""
        unique = self.source.unique_key if self.source.updates == "upsert" else None
        columns = [c for c in self.by if unique is None or c in unique]
        return tuple(Shuffle((column,), self.source.schema.field(column).type) for column in columns)

    def layout(self, number: int) -> Layout:
        """The state layout of its input."""
        del number
        return "multiset" if self.source.unique_key is None else "unique_key"


class Grouped(OneInput):
    """Groups of one input's rows."""

    @property
    def group_never_null(self) -> bool:
        """Whether no column of the group may be null: null is a group, and no part of a key."""
        unique = self.source.unique_key or ()
        return all(c in unique or not self.source.schema.field(c).nullable for c in self.by)
