"""The latest row of each key as a user writes it down: upserts and deletes in, retractions out.

After Flink's ``StreamExecChangelogNormalize`` (``ProcTimeDeduplicateKeepLastRowFunction``), which its planner puts
above an upsert source for the same reason: what comes after needs the old row, and may be distributed by any column.
Its first row, and that which is first or last by a column, are Flink's ``StreamExecDeduplicate``, for insertions only.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal, Self, TypeAlias

import pyarrow as pa

from gpu_ops.descriptions.changelog import ROW_KIND_COLUMN
from gpu_ops.descriptions.description import Description, Emit, OutputColumn, line
from gpu_ops.descriptions.groups.grouped import OneInput
from gpu_ops.descriptions.inputs import Input, check_key_type, input_from_dict, input_to_dict
from gpu_ops.errors import DescriptionError
from gpu_ops.fields import check_fields

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
    order_by: str | None = None
    keep: Keep = "last"
    unavailable: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        self._check_emit()
        if self.keep not in ("first", "last"):
            raise DescriptionError(f"keep={self.keep!r}; it is first or last")
        if self.chooses and self.source.row_kind is not None:
            raise DescriptionError(
                f"input '{self.source.name}' has row kinds: order_by and keep='first' are for insertions only, as a "
                "row that was passed over is not kept, and could not come back where the chosen one is deleted"
            )
        if self.order_by is not None:
            self._check_order(self.order_by)
        if self.unavailable is not None:
            self._check_unavailable(self.unavailable)
        if self.source.unique_key is None:
            raise DescriptionError(f"input '{self.source.name}': the latest row of what? Give key=")
        for column in self.source.unique_key:
            check_key_type(self.source, column)
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

    def _check_order(self, column: str) -> None:
        if column not in self.source.schema.names:
            names = ", ".join(self.source.schema.names)
            raise DescriptionError(f"input '{self.source.name}': no column {column!r} for order_by; there are {names}")
        kind = self.source.schema.field(column).type
        if pa.types.is_nested(kind) or pa.types.is_null(kind):
            raise DescriptionError(f"input '{self.source.name}': order_by {column!r} of type {kind} has no order")

    @property
    def chooses(self) -> bool:
        """Whether a row may be passed over because of one that came before it."""
        return self.order_by is not None or self.keep == "first"

    @property
    def chosen_by(self) -> str | None:
        """What says which row is later."""
        return self.order_by

    @property
    def operator(self) -> str:
        """The module of `gpu_ops.operators` that runs it."""
        return "at_end" if self.emit == "at_end" else "groups.latest"

    @property
    def by(self) -> tuple[str, ...]:
        """The unique key's columns."""
        assert self.source.unique_key is not None
        return self.source.unique_key

    @functools.cached_property
    def output(self) -> tuple[OutputColumn, ...]:
        """The input's columns."""
        fields = [field for field in self.source.schema if field.name != self.unavailable]
        return tuple(OutputColumn(field.name, 0, field.name, None, field.type) for field in fields)

    def own_column(self, number: int, column: OutputColumn) -> str | None:
        """Each shows itself."""
        del number
        return column.column

    @property
    def compared_columns(self) -> list[tuple[int, str]]:
        """The unique key's."""
        return [(0, column) for column in self.by]

    def _unique_key(self) -> tuple[str, ...] | None:
        return self.by

    @property
    def title(self) -> str:
        """It in one line, for people."""
        return f"{self._which} row of {self.source.name} by {', '.join(self.by)}"

    @property
    def _which(self) -> str:
        return "latest" if self.keep == "last" else "first"

    def lines(self) -> list[str]:
        """Of what, by what."""
        ordered = [] if self.order_by is None else [line("order", self.order_by)]
        if self.unavailable is not None:
            ordered.append(line("unavailable", f"columns named in {self.unavailable} keep the value from before"))
        return [f"{self._which} row of each key: {self.source.name}", line("key", ", ".join(self.by)), *ordered]

    def to_dict(self) -> dict[str, Any]:
        """What JSON has of it."""
        chosen = {"order_by": self.order_by, "keep": self.keep} if self.chooses else {}  # earlier folders have neither
        kept = {} if self.unavailable is None else {"unavailable": self.unavailable}
        return {"kind": "latest", "emit": self.emit, "inputs": [input_to_dict(self.source)], **chosen, **kept}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """From what `to_dict` gave."""
        source = input_from_dict(data["inputs"][0])
        return cls(source, data["emit"], data.get("order_by"), data.get("keep", "last"), data.get("unavailable"))


def without_upserts(description: Description) -> tuple[Description, tuple[int, ...]] | None:
    """The same over retractions, distributed by its own columns, where upserts would keep it in one partition.

    The old and the new row of an upsert have to meet, and no column that it is distributed by need be the same in both.
    The changelog's unique key is then another one: it has these columns in it, as rows with different values in them
    come from different partitions, in any order.

    Returns:
        The description, and the numbers of the inputs that become their `Latest`; None where it is fine as it is.
    """
    made = getattr(description, "with_inputs", None)
    if made is None or description.emit == "at_end" or description.by_time:
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
    found: Description = made(inputs, description.emit)
    return (found, upserts) if found.shuffled_by else None
