"""What operators that go by a watermark have in common: the watermark, late rows, and how both are stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gpu_ops.descriptions.times import AFTER_ALL, BEFORE_ALL, clipped, units_per_ms
from gpu_ops.errors import StateError
from gpu_ops.ingest import Ingested
from gpu_ops.kernels import Kernels
from gpu_ops.operators.operator import SIDES, Operator
from gpu_ops.state.pieces import FromSnapshot, Storable

AT_WATERMARK = -1
"""The instant of what a watermark ends."""


@dataclasses.dataclass(frozen=True)
class Clock:
    """What an operator knows of time, in the unit of the join's ``time_type``.

    Attributes:
        watermark: the operator's.
        seen: per input, the latest event time, or None.
    """

    watermark: int = BEFORE_ALL
    seen: tuple[int | None, ...] = (None, None)


C = TypeVar("C", bound=Clock)


class TimedOperator(Operator, Generic[C]):
    """An operator by event time, of two inputs or one.

    Args:
        join: its description.
        kernels: the backend.
        clock: what it knows before the first micro-batch.
    """

    stored_clock = "time"
    """What a snapshot calls it."""

    def __init__(self, join: Any, kernels: Kernels, clock: C) -> None:
        self.join, self.kernels = join, kernels
        self.per_ms = units_per_ms(join.time_type)
        self.clock = self._next = clock

    @property
    def last_watermark_ms(self) -> int:
        """A watermark after all times."""
        return -(-AFTER_ALL // self.per_ms)

    def watermark_ms(self, clock_ms: int) -> int | None:
        """The watermark that follows from what was seen in committed micro-batches, ms; None if none does."""
        del clock_ms
        found = []
        for source, seen in zip(self.join.inputs, self.clock.seen, strict=True):
            if seen is None or source.delay_ms is None:
                return None
            found.append(int(seen) // self.per_ms - int(source.delay_ms))
        return min(found)

    def _advanced(self, watermark_ms: int | None) -> int:
        """The watermark in force from here on, in the unit of times: it never goes back."""
        if watermark_ms is None:
            return self.clock.watermark
        return max(self.clock.watermark, clipped(watermark_ms * self.per_ms))

    def _see(self, side: int, times: npt.NDArray[np.int64]) -> None:
        """Note the times of rows that come."""
        if times.size:
            seen, latest = list(self._next.seen), int(times.max())
            seen[side] = latest if seen[side] is None else max(int(seen[side] or 0), latest)
            self._next = dataclasses.replace(self._next, seen=tuple(seen))

    def _late(self, change: Ingested) -> npt.NDArray[np.bool_] | None:
        """Mask of changes that are below the watermark in force, None for none."""
        if change.times is None or self._next.watermark == BEFORE_ALL:
            return None
        mask: npt.NDArray[np.bool_] = change.times < self._next.watermark
        return mask if mask.any() else None

    def _times(self, held: int | None) -> dict[str, int]:
        """The times worth knowing, ms since the epoch, as far as there are any.

        Args:
            held: how far behind the watermark rows may still come out, in the unit of times; None for any distance.
        """
        now = self._next
        seen = zip(self.join.sides, now.seen, strict=True)
        found = {f"{name}_max_time_ms": time // self.per_ms for name, time in seen if time is not None}
        if BEFORE_ALL < now.watermark < AFTER_ALL:
            found["watermark_ms"] = now.watermark // self.per_ms
            if held is not None:
                found["output_watermark_ms"] = clipped((now.watermark - held) // self.per_ms)
        return found

    def commit(self, clock_ms: int) -> None:
        """Make the prepared micro-batch final."""
        self.clock = self._next
        super().commit(clock_ms)

    def discard(self) -> None:
        """Forget the prepared micro-batch."""
        self._next = self.clock
        super().discard()

    # --- the stored form ---------------------------------------------------------------------

    def _facts(self) -> dict[str, int | None]:
        """What is stored of the clock, by name."""
        seen = zip(SIDES, self.clock.seen, strict=False)
        return {"watermark": self.clock.watermark, **{f"{side}_seen": time for side, time in seen}}

    def kept(self) -> dict[str, Storable]:
        """The state, and the clock."""
        times = pa.table({name: pa.array([value], pa.int64()) for name, value in self._facts().items()})
        return {**super().kept(), self.stored_clock: times}

    def _stored_facts(self, state: Mapping[str, FromSnapshot]) -> dict[str, Any]:
        """What a snapshot has of the clock.

        Raises:
            StateError: nothing.
        """
        stored = state.get(self.stored_clock)
        if not isinstance(stored, pa.Table):
            raise StateError("the snapshot lacks the times of an operator by time")
        facts: dict[str, Any] = stored.to_pylist()[0]
        return facts
