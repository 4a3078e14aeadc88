"""What a thread that owns a partition is doing, for others to look at: no lock, as it may be stuck."""

from __future__ import annotations

import contextlib
import contextvars
import time
from collections.abc import Iterator
from typing import Any, Final


class Activity:
    """What is being done, to which file, and since when nothing of it has moved."""

    def __init__(self) -> None:
        self._now: tuple[str, str | None, float] = ("nothing", None, time.monotonic())

    def begin(self, doing: str, file: str | None = None) -> None:
        """From now on this is done.

        Args:
            doing: in words, such as "joining".
            file: the file or folder that the file system is asked for.
        """
        self._now = doing, file, time.monotonic()

    def move(self) -> None:
        """What is being done makes progress."""
        self.begin(*self._now[:2])

    def tell(self) -> dict[str, Any]:
        """``doing``, ``file`` or None, and for how many ``seconds`` nothing has moved."""
        doing, file, since = self._now
        return {"doing": doing, "file": file, "seconds": time.monotonic() - since}

    @contextlib.contextmanager
    def during(self, doing: str, file: str | None = None) -> Iterator[None]:
        """Does something, and then goes on with what was being done."""
        before = self._now
        self.begin(doing, file)
        try:
            yield
        finally:
            self.begin(*before[:2])


READING: Final = "reading rows"
"""What a server does that waits for the rows of a micro-batch."""

CURRENT: Final[contextvars.ContextVar[Activity]] = contextvars.ContextVar("activity")
"""The activity of this thread, where somebody looks at it."""


def during(doing: str, file: str) -> contextlib.AbstractContextManager[None]:
    """As `Activity.during`, of this thread's."""
    current = CURRENT.get(None)
    return contextlib.nullcontext() if current is None else current.during(doing, file)


def move() -> None:
    """As `Activity.move`, of this thread's."""
    current = CURRENT.get(None)
    if current is not None:
        current.move()
