"""ASOF joins as a user writes them down: each left row meets the right row that is nearest in time."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Final, Literal, Self, get_args

import pyarrow as pa

from gpu_ops.descriptions.by_time.intervals import MAX_BOUND, Late, show_ms, time_type, units_per_ms
from gpu_ops.descriptions.description import Emit, OutputColumn, line
from gpu_ops.descriptions.join import Join
from gpu_ops.descriptions.unique_keys import Chain
from gpu_ops.errors import DescriptionError
from gpu_ops.fields import check_fields

Direction = Literal["backward", "forward", "nearest"]
"""Which right row a left row meets, of those with its key.

* *backward*: the last one at or before its time.
* *forward*: the first one at or after it.
* *nearest*: whichever of both is nearer; where they are as near, the earlier one.
"""

_FINDS: Final = {
    "backward": ("the last", "at or before", "before"),
    "forward": ("the first", "at or after", "after"),
    "nearest": ("the nearest", "to", "to"),
}


@dataclasses.dataclass(frozen=True)
class Asof:
    """The time part of an ASOF join.

    Attributes:
        direction: see `Direction`.
        tolerance_ms: how far apart in time two rows may be, milliseconds, inclusive; None for any distance.
        exact: whether rows of just the same time match.
    """

    direction: Direction = "backward"
    tolerance_ms: int | None = None
    exact: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        if self.direction not in get_args(Direction):
            raise DescriptionError(f"direction={self.direction!r}; it is one of {', '.join(get_args(Direction))}")
        if self.tolerance_ms is not None and self.tolerance_ms < 0:
            raise DescriptionError(f"tolerance is not negative, this one is {self.tolerance_ms} ms")

    def tolerance(self, kind: pa.DataType) -> int | None:
        """The tolerance in the unit of a time type; see `gpu_ops.descriptions.by_time.intervals.time_type`.

        Raises:
            DescriptionError: centuries of nanoseconds, which int64 does not hold.
        """
        if self.tolerance_ms is None:
            return None
        found = self.tolerance_ms * units_per_ms(kind)
        if found >= MAX_BOUND:
            raise DescriptionError(f"tolerance is too long for event times of type {kind}")
        return found

    def to_dict(self) -> dict[str, object]:
        """As JSON can hold it; `Asof(**this)` is the inverse."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class AsofJoin(Join):
    """A join of each left row with at most one right row: of those of its key the one that is nearest in time.

    Among right rows of one time it is the one with the greatest ``sequence_by``, else the one that came last. Rows
    without a time match nothing. Both inputs may be changelogs.

    Attributes:
        asof: direction, tolerance, and whether equal times match.
    """

    asof: Asof = dataclasses.field(kw_only=True)

    sorts_itself: ClassVar[bool] = False
    emits: ClassVar[tuple[Emit, ...]] = ("per_event", "per_batch", "at_watermark", "at_end")

    def __post_init__(self) -> None:
        check_fields(self)
        if self.how not in ("inner", "left"):
            raise DescriptionError(f"how={self.how!r}; an ASOF join is one of inner, left")
        if self.where is not None:
            raise DescriptionError("where= has no place in an ASOF join: filter its inputs, or what comes out")
        for source in self.inputs:
            if self.emit == "at_watermark" and source.unique_key is not None:
                raise DescriptionError(
                    f"input '{source.name}': with emit='at_watermark' inputs are insert-only, unique_key= has no place"
                )
            if source.event_time is None:
                raise DescriptionError(f"input '{source.name}': an ASOF join needs its event time")
            if source.ttl_ms is not None:
                raise DescriptionError(f"input '{source.name}': an ASOF join keeps every row, ttl= has no place here")
        ties = self.ties_by(1)
        if ties is not None:
            kind = self.right.schema.field(ties).type
            if not (pa.types.is_signed_integer(kind) or pa.types.is_timestamp(kind)):
                raise DescriptionError(
                    f"input '{self.right.name}': sequence_by {ties!r} orders right rows of one time, so it is an "
                    f"integer or a timestamp, this one is {kind}"
                )
        self.asof.tolerance(self.time_type)
        super().__post_init__()

    @property
    def operator(self) -> str:
        """The module of `gpu_ops.operators` that runs it."""
        return {"at_end": "at_end", "at_watermark": "by_time.asof_at_watermark"}.get(self.emit, "by_time.asof")

    @functools.cached_property
    def time_type(self) -> pa.DataType:
        """The type times are compared in."""
        left, right = (source.schema.field(source.event_time).type for source in self.inputs)
        return time_type(left, right)

    @property
    def late(self) -> Late:
        """What happens to left rows below the watermark."""
        return "join"

    @property
    def insert_only(self) -> bool:
        """Not insert-only: a row that comes later may be a better match."""
        return False

    @property
    def by_time(self) -> bool:
        """Whether rows come out and go as time passes."""
        return self.emit == "at_watermark"

    @property
    def behind_ms(self) -> int | None:
        """How far what comes out may be behind the watermark, milliseconds; None for any distance."""
        return 0 if self.asof.direction == "backward" else self.asof.tolerance_ms

    def insertions_only(self, number: int) -> bool:
        """Whether an input's rows may only be insertions."""
        del number
        return self.by_time

    def kept(self, number: int) -> str:
        """How long time lets rows of an input stay, in words."""
        if number == 0:
            best = "its time" if self.asof.direction == "backward" else "the last time of a better match"
            return f"kept until the watermark passes {best}"
        passes = "it" if self.asof.direction == "forward" else "the next row of its key"
        return f"kept until the watermark passes {passes}"

    @property
    def times_may_be_null(self) -> bool:
        """Whether it takes rows without an event time: they match nothing. A watermark never passes them."""
        return self.emit != "at_watermark"

    def ties_by(self, number: int) -> str | None:
        """The column by which right rows of one time are ordered."""
        return self.right.sequence_by if number == 1 else None

    @functools.cached_property
    def output(self) -> tuple[OutputColumn, ...]:
        """The changelog's columns after ``row_kind``; of times of one name the left's, unless there are suffixes."""
        columns = super().output
        if self.left.event_time != self.right.event_time or self.suffixes is not None:
            return columns
        return tuple(c for c in columns if (c.side, c.column) != (1, self.right.event_time))

    def _chain(self) -> Chain:
        return super()._chain()._replace(single=(False, True))

    def order_matters(self, number: int) -> bool:
        """Whether the output depends on the order of an input's rows: right ones of one time do."""
        return number == 1 or super().order_matters(number)

    @property
    def order_matters_at_end(self) -> bool:
        """Whether the result at the end of input depends on the order in which rows came."""
        return True

    @property
    def title(self) -> str:
        """It in one line, for people."""
        return f"ASOF {super().title}, {self.asof.direction}"

    @property
    def _kind(self) -> str:
        return "ASOF join"

    def _more_lines(self) -> list[str]:
        asof, (left, right) = self.asof, self.inputs
        which, at, beside = _FINDS[asof.direction]
        text = f"{which} {right.name}.{right.event_time} {at if asof.exact else beside} {left.name}.{left.event_time}"
        if not asof.exact and asof.direction == "nearest":
            text += ", not the same time"
        if asof.tolerance_ms is not None:
            text += f", at most {show_ms(asof.tolerance_ms)} apart"
        last = "the one that came last" if right.sequence_by is None else f"the greatest {right.sequence_by}"
        return [line("time", text), line("ties", f"of {right.name} of one time {last}")]

    def to_dict(self) -> dict[str, Any]:
        """What JSON has of it."""
        return {**super().to_dict(), "kind": "asof_join", "asof": self.asof.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], **more: Any) -> Self:
        """From what `to_dict` gave."""
        return super().from_dict(data, asof=Asof(**data["asof"]), **more)
