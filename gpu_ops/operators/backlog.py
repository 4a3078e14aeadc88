"""A join that begins with a backlog, after Flink's FLIP-327 (``RecordAttributes.isBacklog``).

No Flink 2.3 operator acts on it yet (FLINK-33398): a long history is taken in silently, its net result comes out, then
the join is live. While the backlog lasts its changes are only kept; when the first live micro-batch comes they are one
micro-batch of net changes to the streaming operator, whose state is then what it would be without a backlog.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa

from gpu_ops import operators
from gpu_ops.descriptions.description import Description
from gpu_ops.ingest import Ingested
from gpu_ops.kernels import Kernels
from gpu_ops.operators.kept_input import KIND_COLUMN, KeptInput, in_turn, keep
from gpu_ops.operators.operator import InputTable, Operator, Room
from gpu_ops.output import (
    Changelog,
    Output,
    changelog,
    values_table,
)
from gpu_ops.state.pieces import FromSnapshot, Storable


class Backlog(Operator):
    """A join with a backlog before it; see `gpu_ops.operators.operator.Operator`.

    Args:
        description: its description.
        kernels: the backend.
        room: that memory has; what of the backlog is too much goes to disk meanwhile.
    """

    def __init__(self, description: Description, kernels: Kernels, room: Room) -> None:
        self.description, self.kernels = description, kernels
        self.room = room
        self._kept = self._empty()
        self._live: Operator | None = None
        self._switching = False
        self.backlog = False
        """Whether the next micro-batch is backlog, as its source has it; without effect once a live one has come."""

    def _make(self) -> Operator:
        return operators.make(self.description, self.kernels, self.room)

    def _empty(self) -> tuple[KeptInput, ...]:
        # in one part: a row's changes may have several keys, and are taken in together, in their order
        return tuple(KeptInput(self.kernels, s, ()) for s in self.description.inputs)

    @property
    def tables(self) -> Sequence[InputTable]:  # type: ignore[override]
        """The backlog, or the state of each input."""
        return self._kept if self._live is None else self._live.tables

    @property
    def live(self) -> bool:
        """Tells whether a live micro-batch has come."""
        return self._live is not None

    def prepare(self, changes: tuple[Ingested, ...], clock_ms: int, watermark_ms: int | None) -> Output:
        """Keep a micro-batch of the backlog, or join a live one; the backlog's result comes with the first of these."""
        if self._live is not None:
            return self._live.prepare(changes, clock_ms, watermark_ms)
        if self.backlog:
            return keep(self.description, self._kept, changes)
        self._switching = True
        self._live = self._make()
        if not any(len(k) for k in self._kept):
            return self._live.prepare(changes, clock_ms, watermark_ms)
        first = self._live.prepare_net(self._all(), clock_ms)
        self._live.commit(clock_ms)
        then = self._live.prepare(changes, clock_ms, watermark_ms)
        metrics = dict(then.metrics)
        for name, value in first.metrics.items():
            metrics[name] = metrics.get(name, 0) + value
        values = [values_table(self.description, self.kernels, made.values) for made in (first, then)]
        before = np.full(first.sequence.size, -1, np.int64)
        sequences, beside = [then.sequence[: then.kinds.size]], [then.sequence[then.kinds.size :]]
        return Output(
            pa.concat_tables(values),
            np.concatenate([first.kinds, then.kinds]),
            np.concatenate([before[: first.kinds.size], *sequences, before[first.kinds.size :], *beside]),
            metrics,
            beside=(*first.beside, *then.beside),
        )

    def _all(self) -> tuple[Ingested, ...]:
        return in_turn(self.description, (kept.snapshot() for kept in self._kept))

    def commit(self, clock_ms: int) -> None:
        """Make the prepared micro-batch final."""
        (super().commit if self._live is None else self._live.commit)(clock_ms)
        if self._switching:
            self._switching = False
            self.close()
            self._kept = self._empty()

    def discard(self) -> None:
        """Forget the prepared micro-batch; the first live one leaves the backlog as it was."""
        for kept in self._kept:
            kept.discard()
        if self._switching:
            self._live, self._switching = None, False
        elif self._live is not None:
            self._live.discard()

    def kept(self) -> dict[str, Storable]:
        """The backlog's changes, or the state."""
        return super().kept() if self._live is None else self._live.kept()

    def restore(self, state: Mapping[str, FromSnapshot], settle: Callable[[], None]) -> None:
        """Take over a snapshot."""
        inputs = zip(self.description.sides, self.description.inputs, strict=True)
        if not all(KIND_COLUMN in state[name].column_names[len(source.schema) :] for name, source in inputs):
            self._live = self._make()
        (super().restore if self._live is None else self._live.restore)(state, settle)

    def finish(self) -> Iterator[Changelog]:
        """The backlog's net result, if no live micro-batch has come; nothing is changed."""
        if self._live is None:
            yield changelog(self.description, self.kernels, self._make().prepare_net(self._all(), 0))

    def close(self) -> None:
        """Delete what was moved to disk."""
        for kept in self._kept:
            kept.close()
