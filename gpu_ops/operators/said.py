"""What an operator gives an engine for one micro-batch, and what every operator can do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gpu_ops.ingest import Ingested
from gpu_ops.state.cold import Coolable

SIDES = ("left", "right")


@dataclasses.dataclass(frozen=True)
class Said:
    """The output of one micro-batch.

    Attributes:
        output: rows of the join's ``output_schema``: the changelog, then rows handed out beside it.
        sequence: for each of them, the place of the change that caused it; -1 for what a watermark ended.
        kinds: the row-kind codes of the changelog's rows.
        metrics: counts, milliseconds and times, by name.
    """

    output: pa.Table
    sequence: npt.NDArray[np.int64]
    kinds: npt.NDArray[np.int8]
    metrics: dict[str, int | float]


class Rows(Coolable, Protocol):
    """A state table, seen from outside."""

    live: int

    def __len__(self) -> int:
        """Slots in use, those of dead rows included."""

    def live_after(self) -> int:
        """Live rows once the prepared micro-batch is committed."""


class Operator(Protocol):
    """A join over one partition."""

    @property
    def tables(self) -> Sequence[Rows]:
        """The state of each input."""

    def prepare(self, changes: tuple[Ingested, ...], clock_ms: int, watermark_ms: int | None) -> Said:
        """Compute one micro-batch, to be followed by `commit` or `discard`.

        Args:
            changes: of each input, checked and in order.
            clock_ms: the time the micro-batch is applied at, ms since the epoch.
            watermark_ms: the watermark in force for it, or None if none is known.
        """

    def commit(self, clock_ms: int) -> None:
        """Make the prepared micro-batch final."""

    def discard(self) -> None:
        """Forget the prepared micro-batch; without one, nothing happens."""

    def snapshot(self) -> dict[str, pa.Table]:
        """The committed state."""

    def restore(self, state: Mapping[str, pa.Table], settle: Callable[[], None]) -> None:
        """Take over a snapshot, into an operator that has seen nothing yet.

        Args:
            state: as `snapshot` gives it.
            settle: called now and then; it may move state to the host's memory.
        """
