"""What every operator can do, and what it gives an engine for one micro-batch.

What those that go by a watermark have in common: the watermark, late rows, and how both are stored.
"""

from __future__ import annotations

import abc
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gpu_ops.arrays import Array
from gpu_ops.descriptions.changelog import LATE_ROW_KIND
from gpu_ops.descriptions.times import AFTER_ALL, BEFORE_ALL, clipped, places, units_per_ms
from gpu_ops.errors import NotBuiltError, StateError
from gpu_ops.ingest import Ingested
from gpu_ops.kernels import Kernels
from gpu_ops.operators.core.emission import OutputRows
from gpu_ops.output import Beside, Changelog, Output, gathered
from gpu_ops.state.pieces import FromSnapshot, Pieced, Storable
from gpu_ops.state.table import Coolable

SIDES = ("left", "right")
Targets = npt.NDArray[np.int64]
Parts = Sequence[Mapping[str, pa.Table]]
Cut = list[dict[str, pa.Table]]
AT_WATERMARK = -1
"""The logical time of what a watermark ends."""


class Room(Protocol):
    """A guard of memory: it refuses outputs that are too large."""

    def check_output(self, rows: int, row_bytes: float) -> None:
        """Refuse an output of so many rows, of about so many bytes each, before it is made.

        Raises:
            StateError: it would not fit.
        """


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


class Operator(abc.ABC):
    """The work of a description over one partition.

    Attributes:
        description: the description.
        kernels: the backend.
        tables: the state of each input.
        room: what output is too much; `gpu_ops.operators.make` sets it.
    """

    description: Any  # each operator's own kind of description
    kernels: Kernels
    room: Room
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
        """Computes one micro-batch like `prepare`, but only its net change, whatever ``emit`` is.

        Operators that can begin with a backlog have it.
        """
        raise NotBuiltError(f"{type(self).__name__} takes in no backlog")

    def present_result(self) -> Output:
        """The result as it is now, as insertions; operators that keep groups, and not the rows of these, have it."""
        raise NotBuiltError(f"{type(self).__name__} makes its result of the rows that it keeps")

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
        return None

    def under(self, watermarks: Mapping[str, int | None]) -> int | None:
        """Takes the watermarks of all operators within this one, for the next micro-batch; returns its own."""
        return watermarks[""]

    @property
    def last_watermark_ms(self) -> int | None:
        """A watermark after all times, which ends what waits for one; None where nothing does."""
        return None

    half_ended = False
    """Whether `finish` has made a part of its changes final, and not all."""

    def finish(self) -> Iterator[Changelog]:
        """Yields what comes out at the end of input besides `prepare`'s changelogs, part by part."""
        yield from ()

    # --- state -------------------------------------------------------------------------------

    def kept(self) -> dict[str, Storable]:
        """The committed state by name, that of each input and what else there is; it may change later."""
        tables = cast("Sequence[Pieced]", self.tables)
        return dict(zip(self.description.sides, tables, strict=True))

    def cut(
        self, parts: Parts, targets: Sequence[Sequence[Targets]], to: Callable[[pa.Table], Targets], count: int
    ) -> Cut:
        """Distributes what snapshots keep beside the rows of inputs over another number of partitions.

        Args:
            parts: of each partition, these tables.
            targets: for each input and each of the partitions, the new partition of each row.
            to: gives the new partition of each row of a table with the columns that rows are distributed by.
            count: how many there are to be.

        Raises:
            NotBuiltError: there is something, and how to cut it is not known.
        """
        more = sorted({name for part in parts for name, table in part.items() if len(table)})
        if more:
            raise NotBuiltError(
                f"the {self.description.title} keeps {', '.join(more)} beside its input, which is not cut anew yet: "
                "begin a new query with another state folder and checkpoint"
            )
        return [{} for _ in range(count)]

    def restore(self, state: Mapping[str, FromSnapshot], settle: Callable[[], None]) -> None:
        """Take over a snapshot, into an operator that has seen nothing yet.

        Args:
            state: what `kept` gives, as a snapshot has it.
            settle: called now and then; it may move state to the host's memory.

        Raises:
            StateError: it lacks something.
        """
        for name, table in zip(self.description.sides, cast("Sequence[Any]", self.tables), strict=True):
            table.restore(state[name], settle)

    def close(self) -> None:  # noqa: B027 - most have nothing to give back
        """Give back what is not memory."""


Make = Callable[[Any, Kernels], Operator]
"""What a module of an operator has as ``make``: takes a description and a backend."""


@dataclasses.dataclass(frozen=True)
class Clock:
    """The watermark and the latest event times of an operator, in the unit of the description's ``time_type``.

    Attributes:
        watermark: the operator's.
        seen: the latest event time, or None, of each input, or of each part of the only one.
    """

    watermark: int = BEFORE_ALL
    seen: tuple[int | None, ...] = (None, None)


C = TypeVar("C", bound=Clock)


class TimedOperator(Operator, Generic[C]):
    """An operator by event time, of two inputs or one.

    Args:
        description: its description.
        kernels: the backend.
        clock: what it knows before the first micro-batch.

    Attributes:
        stored_clock: what a snapshot calls it.
    """

    stored_clock = "time"

    def __init__(self, description: Any, kernels: Kernels, clock: C) -> None:
        self.description, self.kernels = description, kernels
        self.per_ms = units_per_ms(description.time_type)
        self.clock = self._next = clock

    @property
    def last_watermark_ms(self) -> int:
        """A watermark after all times."""
        return -(-AFTER_ALL // self.per_ms)

    def watermark_ms(self, clock_ms: int) -> int | None:
        """The watermark that follows from what was seen in committed micro-batches, ms; None if none does."""
        marks = [self.input_watermark_ms(number) for number in range(len(self.description.inputs))]
        known = [mark for mark in marks if mark is not None]
        return min(known) if len(known) == len(marks) else None

    def input_watermark_ms(self, number: int) -> int | None:
        """The watermark of one input: the latest time seen in committed micro-batches less its delay, ms."""
        latest = (None if time is None else int(time) // self.per_ms for time in self.clock.seen[number:])
        watermark: int | None = self.description.inputs[number].watermark_ms(latest)
        return watermark

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

    def _see_parts(self, change: Ingested) -> None:
        """Note the times of rows of the only input, or of each part of it."""
        assert change.times is not None
        parts = self.description.inputs[0].parts
        if parts is None:
            self._see(0, change.times)
            return
        number_of = change.column(parts.column).to_numpy()
        for number in range(len(parts.delays_ms)):
            self._see(number, change.times[number_of == number])

    def _late(self, change: Ingested) -> npt.NDArray[np.bool_] | None:
        """Mask of changes that are below the watermark in force, None for none."""
        if change.times is None or self._next.watermark == BEFORE_ALL:
            return None
        mask: npt.NDArray[np.bool_] = change.times < self._next.watermark
        return mask if mask.any() else None

    def _admitted(
        self, changes: Sequence[Ingested], refused: Sequence[int]
    ) -> tuple[tuple[Ingested, ...], list[tuple[int, Ingested]], dict[str, int | float]]:
        """The changes of both inputs without late ones of those that refuse them; these; and how many are late."""
        admitted, late, metrics = list(changes), list[tuple[int, Ingested]](), dict[str, int | float]()
        for side, (name, change) in enumerate(zip(SIDES, changes, strict=True)):
            below = self._late(change)
            metrics[f"{name}_late"] = 0 if below is None else int(below.sum())
            if below is not None and side in refused:
                late.append((side, change.pick(below)))
                admitted[side] = change.pick(~below)
        return tuple(admitted), late, metrics

    def _output(
        self,
        rows: OutputRows,
        tagged: Iterable[tuple[int, Ingested]],
        metrics: dict[str, int | float],
        evicted: Sequence[int],
        started: float,
        *,
        later: Array | None = None,
    ) -> Output:
        """The changelog of two inputs, and late rows behind it.

        Args:
            rows: of the changelog.
            tagged: late rows that come out as they are, by input.
            metrics: taken over.
            evicted: how many rows of each input went.
            started: when the micro-batch began.
            later: as of `gpu_ops.output.Output`.
        """
        joined, description, kernels = time.perf_counter(), self.description, self.kernels
        kinds, sequences = kernels.asnumpy(rows.kinds), [rows.sequence(kernels)]
        tables: Sequence[Any] = self.tables
        values, beside = gathered(description, kernels, tables, rows.slots), []
        for side, change in tagged:
            beside.append(Beside(side, change.table, LATE_ROW_KIND))
            sequences.append(change.sequence)
        metrics |= {f"{name}_evicted": number for name, number in zip(SIDES, evicted, strict=True)}
        metrics |= {"probe_ms": (joined - started) * 1e3, "emit_ms": (time.perf_counter() - joined) * 1e3}
        return Output(values, kinds, np.concatenate(sequences), metrics, later, tuple(beside))

    def _times(self, held: int | None) -> dict[str, int]:
        """The times worth knowing, ms since the epoch, as far as there are any.

        Args:
            held: how far behind the watermark rows may still come out, in the unit of times; None for any distance.
        """
        now = self._next
        seen = zip(self.description.watermarked, now.seen, strict=True)
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
        """The clock as it is stored, by name."""
        seen = zip(places(len(self.clock.seen)), self.clock.seen, strict=True)
        return {"watermark": self.clock.watermark, **{f"{place}_seen": time for place, time in seen}}

    def kept(self) -> dict[str, Storable]:
        """The state, and the clock."""
        times = pa.table({name: pa.array([value], pa.int64()) for name, value in self._facts().items()})
        return {**super().kept(), self.stored_clock: times}

    def _stored_facts(self, state: Mapping[str, FromSnapshot]) -> dict[str, Any]:
        """Reads the clock of a snapshot.

        Raises:
            StateError: nothing.
        """
        stored = state.get(self.stored_clock)
        if not isinstance(stored, pa.Table):
            raise StateError("the snapshot lacks the times of an operator by time")
        facts: dict[str, Any] = stored.to_pylist()[0]
        return facts

    def _restore_clock(self, state: Mapping[str, FromSnapshot]) -> None:
        """Take over the clock of a snapshot; raises as `_stored_facts`."""
        facts = self._stored_facts(state)
        seen = tuple(facts[f"{place}_seen"] for place in places(len(self.clock.seen)))
        self.clock = self._next = dataclasses.replace(self.clock, watermark=facts["watermark"], seen=seen)


def latest_times(parts: Parts, name: str) -> pa.Table:
    """The latest of what all partitions know of time, which a snapshot calls ``name``."""
    facts = pa.concat_tables([part[name] for part in parts])
    return pa.table({column: [pc.max(facts[column])] for column in facts.column_names}, schema=facts.schema)
