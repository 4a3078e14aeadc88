"""Temporal joins as a user writes them down: each left row meets the version of its key that was valid at its time."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Self, get_args

import pyarrow as pa

from gpu_ops.descriptions.by_time.intervals import LATES, Late, show_ms, time_type
from gpu_ops.descriptions.description import Emit, line
from gpu_ops.descriptions.join import Join
from gpu_ops.errors import DescriptionError
from gpu_ops.fields import check_fields


@dataclasses.dataclass(frozen=True)
class TemporalJoin(Join):
    """A join of each left row with the version of a table that was valid at the row's time (``FOR SYSTEM_TIME AS OF``).

    The left input only grows. Each row of the right input is a version of its key, valid from its time until that of
    the next one; a retraction ends the validity of what was before it. Flink: ``TemporalRowTimeJoinOperator``.

    Attributes:
        late: what happens to left rows below the watermark; see `Late`.
        ttl_ms: milliseconds of the clock after which a key that nothing comes for is forgotten, half as much later at
            the latest; None for never.
    """

    emit: Emit = "at_watermark"
    late: Late = dataclasses.field(default="join", kw_only=True)
    ttl_ms: int | None = dataclasses.field(default=None, kw_only=True)

    sorts_itself: ClassVar[bool] = False
    emits: ClassVar[tuple[Emit, ...]] = ("at_watermark", "at_end")

    def __post_init__(self) -> None:
        check_fields(self)
        if self.how not in ("inner", "left"):
            raise DescriptionError(f"how={self.how!r}; a temporal join is one of inner, left")
        if self.late not in get_args(Late):
            raise DescriptionError(f"late={self.late!r}; it is one of {', '.join(get_args(Late))}")
        if self.ttl_ms is not None and self.ttl_ms < 2:
            raise DescriptionError(f"ttl is at least two milliseconds, this one is {self.ttl_ms} ms")
        if self.ttl_ms is not None and self.emit == "at_end":
            raise DescriptionError("with emit='at_end' no row is forgotten, ttl= has no place")
        if not self.keys:
            raise DescriptionError(
                f"a temporal join needs on=: columns that identify a row of the versioned table '{self.right.name}'"
            )
        if self.left.unique_key is not None:
            raise DescriptionError(
                f"input '{self.left.name}': the left input of a temporal join is insert-only, unique_key= has no place "
                "here"
            )
        for source in self.inputs:
            if source.event_time is None:
                raise DescriptionError(f"input '{source.name}': a temporal join needs its event time")
            if source.ttl_ms is not None:
                raise DescriptionError(f"input '{source.name}': a temporal join has one ttl= for both inputs, its own")
        own = set(self.key_columns(1))
        beyond = [column for column in self.right.unique_key or () if column not in own]
        if beyond:
            raise DescriptionError(
                f"input '{self.right.name}': the unique key's column {beyond[0]!r} is not among the columns of on=, "
                f"{', '.join(self.key_columns(1))}: one left row would meet several valid versions"
            )
        super().__post_init__()

    @property
    def operator(self) -> str:
        """The module of `gpu_ops.operators` that runs it."""
        return "at_end" if self.emit == "at_end" else "by_time.temporal"

    @functools.cached_property
    def time_type(self) -> pa.DataType:
        """The type times are compared in."""
        left, right = (source.schema.field(source.event_time).type for source in self.inputs)
        return time_type(left, right)

    @property
    def by_time(self) -> bool:
        """Whether rows come out and go as time passes."""
        return True

    def insertions_only(self, number: int) -> bool:
        """Whether an input's rows may only be insertions: the left's."""
        return number == 0

    def _unique_key(self) -> tuple[str, ...] | None:
        return None

    def order_matters(self, number: int) -> bool:
        """Whether the output depends on the order of an input's rows: of versions of one time the last counts."""
        return number == 1

    @property
    def order_matters_at_end(self) -> bool:
        """Whether the result at the end of input depends on the order in which rows came."""
        return True

    @property
    def title(self) -> str:
        """It in one line, for people."""
        return f"temporal {super().title}"

    @property
    def _kind(self) -> str:
        return "temporal join"

    def _more_lines(self) -> list[str]:
        left, right = self.inputs
        version = (
            f"the version of {right.name} valid at {left.name}.{left.event_time}, by {right.name}.{right.event_time}"
        )
        ttl = []
        if self.ttl_ms is not None:
            text = f"{show_ms(self.ttl_ms)} to {show_ms(3 * self.ttl_ms // 2)} after anything came for it"
            ttl = [line("TTL", f"a key is forgotten, with the rows that wait, {text}")]
        return [
            *ttl,
            line("version", version),
            line("time", f"event time; {LATES[self.late]}"),
            line(
                "watermark", "the one of the input that is behind, over all partitions; it moves between micro-batches"
            ),
        ]

    def kept(self, number: int) -> str:
        """How long rows of an input are kept, in words."""
        if number == 0:
            return "kept until the watermark reaches its time"
        return "kept until the watermark passes the next version of its key"

    def to_dict(self) -> dict[str, Any]:
        """What JSON has of it."""
        ttl = {} if self.ttl_ms is None else {"ttl_ms": self.ttl_ms}
        return {**super().to_dict(), "kind": "temporal_join", "late": self.late, **ttl}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], **more: Any) -> Self:
        """From what `to_dict` gave."""
        return super().from_dict(data, late=data["late"], ttl_ms=data.get("ttl_ms"), **more)
