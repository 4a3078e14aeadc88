"""The bounds in time of an interval join, as users write them down."""

from __future__ import annotations

import dataclasses
from typing import Any

import pyarrow as pa

from gpu_ops.descriptions.times import (
    MAX_BOUND,
    Duration,
    Late,
    Time,
    parse_bound,
    show_ms,
    units_per_ms,
)
from gpu_ops.errors import DescriptionError
from gpu_ops.fields import check_fields


@dataclasses.dataclass(frozen=True)
class Interval:
    """The time part of an interval join.

    Attributes:
        lower_ms: milliseconds; a right row matches from the left row's time plus this.
        upper_ms: up to the left row's time plus this.
        lower_inclusive: whether that very time matches.
        upper_inclusive: likewise.
        time: see `Time`.
        late: see `Late`.
        keyed: Flink's DataStream rules: inner only, late rows never join, and a row is gone as soon as the
            watermark reaches the end of its time (SQL: passes it).
        min_cleanup_ms: Flink's ``table.exec.interval-join.min-cleanup-interval``: how long expired rows are
            kept at least, to be joined by late ones.
        timestamp: name of a further output column with the later of both times, or None.
    """

    lower_ms: int
    upper_ms: int
    lower_inclusive: bool = True
    upper_inclusive: bool = True
    time: Time = "event"
    late: Late = "join"
    keyed: bool = False
    min_cleanup_ms: int = 0
    timestamp: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        empty = self.lower_ms == self.upper_ms and not (self.lower_inclusive and self.upper_inclusive)
        if self.lower_ms > self.upper_ms or empty:
            raise DescriptionError(
                f"the interval is empty: lower is {self.lower_ms} ms, upper {self.upper_ms} ms"
                f"{', and a bound is exclusive' if empty else ''}"
            )
        if self.min_cleanup_ms < 0:
            raise DescriptionError(f"min_cleanup is not negative, this one is {self.min_cleanup_ms} ms")
        if self.min_cleanup_ms and (self.late != "join" or self.time == "processing"):
            raise DescriptionError("min_cleanup keeps rows for late ones: it needs event time and late='join'")
        if self.keyed and self.late == "join":
            raise DescriptionError("a keyed interval join has late='drop' or late='tag': its late rows never join")
        if self.time == "processing" and (self.keyed or self.late == "tag" or self.timestamp is not None):
            raise DescriptionError("by processing time no row is late or has a timestamp: it takes SQL's rules only")

    @classmethod
    def of(
        cls,
        lower: Duration,
        upper: Duration,
        *,
        late: Late | None = None,
        keyed: bool = False,
        min_cleanup: Duration = 0,
        **more: Any,
    ) -> Interval:
        """Makes an interval of what a user writes.

        Args:
            lower: a duration, such as ``"-5 minutes"``.
            upper: likewise.
            late: None for ``"drop"`` with ``keyed``, else ``"join"``.
            keyed: as above.
            min_cleanup: a duration.
            more: as above.
        """
        bounds, late = (parse_bound(lower), parse_bound(upper)), late or ("drop" if keyed else "join")
        return cls(*bounds, late=late, keyed=keyed, min_cleanup_ms=parse_bound(min_cleanup), **more)

    @property
    def kept_ms(self) -> tuple[int, int]:
        """Milliseconds after its own time for which a left and a right row is kept; 0 where it never waits."""
        return max(self.upper_ms, 0) + self.min_cleanup_ms, max(-self.lower_ms, 0) + self.min_cleanup_ms

    @property
    def keep_ms(self) -> int:
        """Milliseconds that the join's output may be behind its watermark."""
        return max(self.kept_ms)

    def units(self, kind: pa.DataType) -> tuple[int, int]:
        """Lower and upper bound, inclusive, in the unit of a `time_type`.

        Raises:
            DescriptionError: centuries of nanoseconds, which int64 does not hold.
        """
        per_ms = units_per_ms(kind)
        lower, upper = self.lower_ms * per_ms, self.upper_ms * per_ms
        if max(abs(lower), abs(upper), self.min_cleanup_ms * per_ms) >= MAX_BOUND:
            raise DescriptionError(f"the bounds of the interval are too far apart for event times of type {kind}")
        return lower + (not self.lower_inclusive), upper - (not self.upper_inclusive)

    def __str__(self) -> str:
        lower, upper = ("<=" if inclusive else "<" for inclusive in (self.lower_inclusive, self.upper_inclusive))
        return f"{show_ms(self.lower_ms)} {lower} right - left {upper} {show_ms(self.upper_ms)}"
