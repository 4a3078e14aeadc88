"""Lookup joins as a user writes them down: each left row meets the table as it is when the row comes."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from gpu_ops.descriptions.description import Emit, line
from gpu_ops.descriptions.join import Join
from gpu_ops.errors import DescriptionError
from gpu_ops.fields import check_fields


@dataclasses.dataclass(frozen=True)
class LookupJoin(Join):
    """A join of each left row with the rows that a table has in the row's micro-batch (``AS OF PROCTIME()``).

    The left input only grows, and is not kept. The right input is the table: static, or changing. Its changes
    touch nothing that came out before. After Flink's processing-time temporal join
    (``TemporalProcessTimeJoinOperator``); here the table may have several rows of a key.
    """

    emits: ClassVar[tuple[Emit, ...]] = ("per_batch", "at_end")

    def __post_init__(self) -> None:
        check_fields(self)
        if self.how not in ("inner", "left"):
            raise DescriptionError(f"how={self.how!r}; a lookup join is one of inner, left")
        if not self.keys:
            raise DescriptionError("a lookup join needs on=: the columns that the table is looked up by")
        if self.left.unique_key is not None or self.left.ttl_ms is not None:
            option = "unique_key=" if self.left.unique_key is not None else "ttl="
            raise DescriptionError(
                f"input '{self.left.name}': the left input of a lookup join is insert-only and not kept, {option} has "
                "no place here"
            )
        super().__post_init__()

    @property
    def operator(self) -> str:
        """The module of `gpu_ops.operators` that runs it."""
        return "at_end" if self.emit == "at_end" else "lookup"

    @property
    def insert_only(self) -> bool:
        """Whether its changelog is insert-only: what came out is never touched."""
        return all(source.bad_rows != "tag" for source in self.inputs)

    def insertions_only(self, number: int) -> bool:
        """Whether an input's rows may only be insertions: the left's."""
        return number == 0

    def not_kept(self, number: int) -> bool:
        """Whether rows of an input are forgotten with their micro-batch: the left's."""
        return number == 0

    def _unique_key(self) -> tuple[str, ...] | None:
        return None

    @property
    def title(self) -> str:
        """It in one line, for people."""
        return f"lookup {super().title}"

    @property
    def _kind(self) -> str:
        return "lookup join"

    def _more_lines(self) -> list[str]:
        return [line("table", f"{self.right.name}, as it is after its changes of the row's micro-batch")]

    def to_dict(self) -> dict[str, Any]:
        """What JSON has of it."""
        return {**super().to_dict(), "kind": "lookup_join"}
