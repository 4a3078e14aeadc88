"""What a partition knows of event time after a micro-batch; the part of a watermark that is stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

Pair = tuple[int | None, int | None]
"""Of left and right; None where there is nothing yet."""

_NAMES: Final = ("watermark_ms", "left_latest_ms", "right_latest_ms")


@dataclasses.dataclass(frozen=True)
class Times:
    """Milliseconds since the epoch.

    Attributes:
        watermark: the one in force in the micro-batch, None while there is none.
        latest: per input, the latest event time seen so far.
    """

    watermark: int | None = None
    latest: Pair = (None, None)

    def later(self, other: Times) -> Times:
        """The later of each: what two partitions, or two micro-batches, know together."""
        left, right = (later(a, b) for a, b in zip(self.latest, other.latest, strict=True))
        return Times(later(self.watermark, other.watermark), (left, right))

    def to_facts(self) -> dict[str, str]:
        """As metadata of a file; what there is none of is left out."""
        values = zip(_NAMES, (self.watermark, *self.latest), strict=True)
        return {name: str(value) for name, value in values if value is not None}

    @classmethod
    def from_facts(cls, facts: Mapping[str, str]) -> Times:
        """The inverse of `to_facts`; other facts are left alone."""
        watermark, left, right = (int(facts[name]) if name in facts else None for name in _NAMES)
        return cls(watermark, (left, right))


def later(a: int | None, b: int | None) -> int | None:
    """The greater of two numbers, or the one that is there."""
    if a is None or b is None:
        return b if a is None else a
    return max(a, b)


NO_TIMES: Final = Times()
