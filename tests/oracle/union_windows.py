"""Final windows over a union of streams with a watermark each, from scratch: what comes out in each micro-batch.

The watermark of a micro-batch is the smallest of its parts': of each the latest time that it had brought before, less
its own delay; as long as a part has brought nothing there is none. A row whose window ends by it is late.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence

Line = tuple[str, int, str | None, int, int]
"""A row: its kind, the number of its part, key, time, and a number."""
Out = tuple[str | None, int, int, int, int]
"""A row of the result: key, start and end of its window, how many rows, the sum of their numbers."""


@dataclasses.dataclass
class UnionWindows:
    """A query, and all that it has taken.

    Attributes:
        delays: of each part; None of one that holds no watermark back.
        size: of windows, or the gap of sessions.
        slide: of windows; None for sessions.
    """

    delays: Sequence[int | None]
    size: int
    slide: int | None
    watermark: int | None = None
    late: int = 0
    rows: Counter[Out] = dataclasses.field(default_factory=Counter)
    latest: dict[int, int] = dataclasses.field(default_factory=dict)

    def take(self, lines: Iterable[Line]) -> Counter[Out]:
        """One micro-batch; gives the windows that are final."""
        marks = [
            self.latest[part] - delay if part in self.latest else None
            for part, delay in enumerate(self.delays)
            if delay is not None
        ]
        known = [mark for mark in marks if mark is not None]
        if known and len(known) == len(marks):
            self.watermark = min(known) if self.watermark is None else max(self.watermark, min(known))
        out = self._closed()
        for kind, part, key, time, value in lines:
            for start, end in self._windows(time):
                row = (key, start, end, time, value)
                if self._is_over(end):
                    self.late += 1
                elif kind == "+I":
                    self.rows[row] += 1
                else:
                    self.rows[row] -= 1
            self.latest[part] = max(time, self.latest.get(part, time))
        assert all(count >= 0 for count in self.rows.values())
        return out + self._closed()  # what retractions leave behind the watermark

    def _is_over(self, end: int) -> bool:
        return self.watermark is not None and end <= self.watermark

    def _windows(self, time: int) -> list[tuple[int, int]]:
        """Those that a row is in; of a session what it is with this row alone."""
        if self.slide is None:
            return [(time, time + self.size)]
        last = time // self.slide * self.slide
        return [(start, start + self.size) for start in range(last, time - self.size, -self.slide)]

    def _closed(self) -> Counter[Out]:
        """The windows that are over, whose rows go."""
        groups: list[list[Out]] = []
        by_group = sorted(self.rows.elements(), key=lambda row: (str(row[0]), row[1]))
        for row in by_group:
            last = groups[-1][-1] if groups else None
            same = last is not None and last[0] == row[0]
            follows = last is not None and (row[1] <= last[2] if self.slide is None else row[1] == last[1])
            if same and follows:
                groups[-1].append(row)
            else:
                groups.append([row])
        out = Counter[Out]()
        for group in groups:
            key, start, end = group[0][0], group[0][1], group[-1][2]
            if self._is_over(end):
                out[key, start, end, len(group), sum(row[4] for row in group)] += 1
                self.rows -= Counter(group)
        return out
