"""What every operator can do, and what it gives an engine for one micro-batch."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gpu_ops.errors import NotBuiltError
from gpu_ops.ingest import Ingested
from gpu_ops.kernels import Kernels
from gpu_ops.output import Changelog
from gpu_ops.state.table import Coolable

SIDES = ("left", "right")

Targets = npt.NDArray[np.int64]
Parts = Sequence[Mapping[str, pa.Table]]
Cut = list[dict[str, pa.Table]]


class Room(Protocol):
    """What memory has room for."""

    def check_output(self, rows: int, row_bytes: float) -> None:
        """Refuse an output of so many rows, of about so many bytes each, before it is made.

        Raises:
            StateError: it would not fit.
        """


@dataclasses.dataclass(frozen=True)
class Output:
    """The output of one micro-batch.

    Attributes:
        table: rows of the join's ``output_schema``: the changelog, then rows handed out beside it.
        sequence: for each of them, the position of the change that caused it; -1 for what a watermark ended.
        kinds: the row-kind codes of the changelog's rows.
        metrics: counts, milliseconds and times, by name.
    """

    table: Changelog
    sequence: npt.NDArray[np.int64]
    kinds: npt.NDArray[np.int8]
    metrics: dict[str, int | float]


class InputTable(Coolable, Protocol):
    """The state of one input, seen from outside."""

    live: int

    def __len__(self) -> int:
        """Slots in use, those of dead rows included."""

    def live_after(self) -> int:
        """Live rows once the prepared micro-batch is committed."""

    def commit(self, clock_ms: int) -> None:
        """Make the prepared micro-batch final."""

    def discard(self) -> None:
        """Forget the prepared micro-batch; without one, nothing happens."""

    def snapshot(self) -> pa.Table:
        """The committed state."""


class Operator(abc.ABC):
    """What a description does over one partition.

    Attributes:
        join: the description.
        kernels: the backend.
        tables: the state of each input.
    """

    join: Any  # each operator's own kind of description
    kernels: Kernels
    room: Room
    """What output is too much; `gpu_ops.operators.make` sets it."""
    tables: Sequence[InputTable]

    @abc.abstractmethod
    def prepare(self, changes: tuple[Ingested, ...], clock_ms: int, watermark_ms: int | None) -> Output:
        """Compute one micro-batch, to be followed by `commit` or `discard`.

        Args:
            changes: of each input, checked and in order.
            clock_ms: the time the micro-batch is applied at, ms since the epoch.
            watermark_ms: the watermark in force for it, or None if none is known.
        """

    def prepare_net(self, changes: tuple[Ingested, ...], clock_ms: int) -> Output:
        """As `prepare`, but only the net change comes out, whatever ``emit`` is: of what can begin with a backlog."""
        raise NotBuiltError(f"{type(self).__name__} takes in no backlog")

    def commit(self, clock_ms: int) -> None:
        """Make the prepared micro-batch final."""
        for table in self.tables:
            table.commit(clock_ms)

    def discard(self) -> None:
        """Forget the prepared micro-batch; without one, nothing happens."""
        for table in self.tables:
            table.discard()

    # --- time and the end --------------------------------------------------------------------

    def watermark_ms(self, clock_ms: int) -> int | None:
        """The watermark of a micro-batch for which none is given, ms; None if none is known or none means anything."""
        del clock_ms
        return None

    @property
    def last_watermark_ms(self) -> int | None:
        """A watermark after all times, which ends what waits for one; None where nothing does."""
        return None

    def finish(self) -> Iterator[Changelog]:
        """What comes out at the end of input beside that, part by part."""
        yield from ()

    # --- state -------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, pa.Table]:
        """The committed state of each input."""
        return {name: table.snapshot() for name, table in zip(self.join.sides, self.tables, strict=True)}

    def cut(self, parts: Parts, targets: Sequence[Targets], to: Callable[[pa.Table], Targets], count: int) -> Cut:
        """What snapshots of some partitions have beside the rows of inputs, as those of another number of partitions.

        Args:
            parts: of each partition, its tables.
            targets: for each input the new partition of each of its rows, of the partitions one after the other.
            to: gives the new partition of each row of a table with the columns that rows are distributed by.
            count: how many there are to be.

        Raises:
            NotBuiltError: there is something, and how to cut it is not known.
        """
        del targets, to
        found = ((name, table) for part in parts for name, table in part.items() if name not in self.join.sides)
        more = sorted({name for name, table in found if len(table)})
        if more:
            raise NotBuiltError(
                f"the {self.join.title} keeps {', '.join(more)} beside its input, which is not cut anew yet: begin a "
                "new query with another state folder and checkpoint"
            )
        return [{} for _ in range(count)]

    @abc.abstractmethod
    def restore(self, state: Mapping[str, pa.Table], settle: Callable[[], None]) -> None:
        """Take over a snapshot, into an operator that has seen nothing yet.

        Args:
            state: as `snapshot` gives it.
            settle: called now and then; it may move state to the host's memory.

        Raises:
            StateError: it lacks something.
        """

    def close(self) -> None:  # noqa: B027 - most have nothing to give back
        """Give back what is not memory."""


Make = Callable[[Any, Kernels], Operator]
"""What a module of an operator has as ``make``: takes a description and a backend."""
