"""Interval joins as a user writes them down: a join with bounds on the difference of two times."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Self, get_args

import pyarrow as pa

from gpu_ops.descriptions.by_time.intervals import LATES, Interval, time_type
from gpu_ops.descriptions.description import LATER, OutputColumn, line
from gpu_ops.descriptions.join import Join, JoinType
from gpu_ops.errors import DescriptionError
from gpu_ops.fields import check_fields

_OUTPUTS = {
    "semi": "a left row once, at its first match",
    "anti": "a left row whose time is over without a match",
}


@dataclasses.dataclass(frozen=True)
class IntervalJoin(Join):
    """A join of two insert-only inputs whose rows match within a span of time.

    Attributes:
        interval: the bounds, whose time counts, and what happens to late rows.
    """

    interval: Interval = dataclasses.field(kw_only=True)

    sorts_itself: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_fields(self)
        interval = self.interval
        if self.emit == "at_end" and interval.time == "processing":
            raise DescriptionError("emit='at_end' has no arrival times to go by: use event time")
        hows = ("inner",) if interval.keyed else get_args(JoinType)
        if self.how not in hows:
            kind = "a keyed interval join" if interval.keyed else "an interval join"
            raise DescriptionError(f"how={self.how!r}; {kind} is one of {', '.join(hows)}")
        if self.one_sided and interval.timestamp is not None:
            raise DescriptionError(
                f"timestamp={interval.timestamp!r} is the later of a pair's times, and how={self.how!r} has no pairs"
            )
        if self.null_aware:
            raise DescriptionError("null_aware=True is NOT IN, which has no bounds in time; how='anti' is NOT EXISTS")
        for source in self.inputs:
            if source.unique_key is not None:
                raise DescriptionError(
                    f"input '{source.name}': an interval join takes insert-only input, unique_key= has no place here"
                )
            if source.ttl_ms is not None:
                raise DescriptionError(f"input '{source.name}': an interval join keeps rows by their time, not by ttl=")
            if interval.time == "event" and source.event_time is None:
                raise DescriptionError(f"input '{source.name}': an interval join needs its event time")
            if interval.time == "processing" and source.event_time is not None:
                raise DescriptionError(f"input '{source.name}': by processing time, event time has no place")
        interval.units(self.time_type)
        super().__post_init__()

    @property
    def operator(self) -> str:
        """The module of `gpu_ops.operators` that runs it."""
        return "at_end" if self.emit == "at_end" else "by_time.interval"

    @property
    def one_sided(self) -> bool:
        """Whether only left rows come out: semi and anti."""
        return self.how in ("semi", "anti")

    @property
    def outer(self) -> tuple[bool, bool]:
        """Whether left and right rows without a match come out when their time is over: padded, for anti alone."""
        return (True, False) if self.how == "anti" else super().outer

    @functools.cached_property
    def time_type(self) -> pa.DataType:
        """The type times are compared in."""
        kinds = [s.schema.field(s.event_time).type for s in self.inputs if s.event_time is not None]
        return time_type(kinds[0], kinds[1]) if len(kinds) == 2 else pa.timestamp("ms", "UTC")

    @functools.cached_property
    def output(self) -> tuple[OutputColumn, ...]:
        """The changelog's columns after ``row_kind``."""
        columns = super().output
        if self.interval.timestamp is None:
            return columns
        times = str(self.left.event_time), str(self.right.event_time)
        return (*columns, OutputColumn(self.interval.timestamp, LATER, *times, self.time_type))

    def _unique_key(self) -> tuple[str, ...] | None:
        return None

    def order_matters(self, number: int) -> bool:
        """Whether the output depends on the order of rows: which of two comes first may be late."""
        del number
        return True

    @property
    def _kind(self) -> str:
        return "keyed interval join" if self.interval.keyed else "interval join"

    def _more_lines(self) -> list[str]:
        interval = self.interval
        if interval.time == "processing":
            times = [f"{source.name}'s arrival" for source in self.inputs]
            lines = [line("time", "by the clock of the micro-batch; no row is late")]
        else:
            times = [f"{source.name}.{source.event_time}" for source in self.inputs]
            behind = "the one of the input that is behind, over all partitions; it moves between micro-batches"
            late = LATES[interval.late]
            if self.one_sided and interval.late == "tag":
                late = "late rows of the left come out with the row kind 'late', the right's are dropped"
            lines = [line("time", f"event time; {late}"), line("watermark", behind)]
        bounds = str(interval).replace("right - left", f"{times[1]} - {times[0]}")
        rule = [line("output", _OUTPUTS[self.how])] if self.how in _OUTPUTS else []
        return [line("interval", bounds), *rule, *lines]

    def to_dict(self) -> dict[str, Any]:
        """What JSON has of it: a join with an interval, as state folders have had it from the first."""
        return {**super().to_dict(), "interval": self.interval.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], **more: Any) -> Self:
        """From what `to_dict` gave."""
        return super().from_dict(data, interval=Interval(**data["interval"]), **more)
