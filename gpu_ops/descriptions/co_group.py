"""Co-groups as a user writes them down: both inputs' rows key by key, for a function, when they have ended.

Flink's over a global window with the end-of-stream trigger (FLIP-331).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import pyarrow as pa

from gpu_ops.descriptions.description import Emit, OutputColumn, condition_text, equality, line
from gpu_ops.descriptions.inputs import Input, input_from_dict, input_to_dict
from gpu_ops.descriptions.join import Join, JoinType
from gpu_ops.descriptions.keys import Key
from gpu_ops.errors import DescriptionError
from gpu_ops.fields import check_fields


@dataclasses.dataclass(frozen=True)
class CoGroup(Join):
    """Both inputs' rows key by key, when they have ended: of the same keys, partitions and refusals as their full join.

    The function that takes them is not part of the description: no code travels to a state server.

    Attributes:
        left: the left input.
        right: the right input.
        keys: the equality columns; at least one. Rows with a null in a key compared by ``=`` are left out.
    """

    how: JoinType = dataclasses.field(default="full", init=False)
    left: Input
    right: Input
    keys: tuple[Key, ...]
    where: str | None = dataclasses.field(default=None, init=False)
    emit: Emit = dataclasses.field(default="at_end", init=False)
    null_aware: bool = dataclasses.field(default=False, init=False)
    suffixes: tuple[str, str] | None = dataclasses.field(default=None, init=False)
    ansi: bool = dataclasses.field(default=False, init=False)

    takes_function: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.keys:
            raise DescriptionError("a co-group needs the columns that rows are grouped by")
        super().__post_init__()

    @property
    def operator(self) -> str:
        """The module of `gpu_ops.operators` that runs it."""
        return "groups.at_end"

    @functools.cached_property
    def output(self) -> tuple[OutputColumn, ...]:
        """Columns of both sides' rows in one table: the side (0 or 1), then the left's columns, then the right's.

        `split` takes it apart again.
        """
        columns = [OutputColumn("side", 0, "", None, pa.int8())]
        for side, source in enumerate(self.inputs):
            columns += [
                OutputColumn(f"{'lr'[side]}{n}", side, f.name, None, f.type) for n, f in enumerate(source.schema)
            ]
        return tuple(columns)

    def own_column(self, number: int, column: OutputColumn) -> str | None:
        """Which column of one input an output column shows in a row that is of this input alone; None for none."""
        return column.column if column.side == number and column.column else None

    @property
    def order_matters_at_end(self) -> bool:
        """Whether the result depends on the order in which rows came: its function sees it."""
        return True

    @property
    def title(self) -> str:
        """It in one line, for people."""
        return f"co-group on {condition_text([(k.left, k.null_safe, k.right) for k in self.keys], None)}"

    def lines(self) -> list[str]:
        """What is grouped, by what."""
        equal = [equality(self.left, k.left, self.right, k.right, null_safe=k.null_safe) for k in self.keys]
        return [f"co-group: {self.left.name}, {self.right.name}", line("key", " AND ".join(equal))]

    @property
    def kept_at_end(self) -> str:
        """What of it keeps a stream until it ends."""
        return "a co-group"

    def split(self, table: pa.Table) -> tuple[pa.Table, pa.Table]:
        """Left and right rows out of rows of `output_schema`, in order, under their own names."""
        side = table["side"].to_numpy()
        parts = []
        for number, source in enumerate(self.inputs):
            rows = table.filter(pa.array(side == number))
            names = [f"{'lr'[number]}{n}" for n in range(len(source.schema))]
            parts.append(rows.select(names).rename_columns(source.schema.names))
        return parts[0], parts[1]

    def to_dict(self) -> dict[str, Any]:
        """What JSON has of it."""
        return {
            "kind": "co_group",
            "keys": [list(k) for k in self.keys],
            "inputs": [input_to_dict(i) for i in self.inputs],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], **_: Any) -> Self:
        """From what `to_dict` gave."""
        left, right = (input_from_dict(i) for i in data["inputs"])
        return cls(left, right, tuple(Key(*k) for k in data["keys"]))
