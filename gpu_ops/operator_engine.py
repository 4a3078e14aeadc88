"""OperatorEngine: one partition of one operator, a micro-batch in, a changelog out. No Spark here."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gpu_ops import operators
from gpu_ops.backends import Backend, make_kernels
from gpu_ops.descriptions.changelog import BAD_ROW_KIND, LONG_STRINGS
from gpu_ops.descriptions.description import Description
from gpu_ops.errors import DescriptionError, StateError
from gpu_ops.fields import reading, whole_number
from gpu_ops.ingest import ArrowStream, Ingested, ingest, repeatable
from gpu_ops.kernels import Frame, Probe
from gpu_ops.memory import Budget, Memory, Result
from gpu_ops.operators.backlog import Backlog
from gpu_ops.operators.operator import Operator
from gpu_ops.output import Beside, Changelog, Output, changelog, together
from gpu_ops.state.pieces import FromSnapshot, Storable, whole

InputBatch: TypeAlias = "ArrowStream | None"
Watermark: TypeAlias = "int | tuple[int | None, int | None] | Mapping[str, int | None] | None"
"""The operator's, or that of each input, in milliseconds since the epoch."""

_log = logging.getLogger("gpu_ops")

_SET_BACK_MS: Final = 1000
"""By so much more a clock is said to have been set back."""


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """The output of a micro-batch.

    Attributes:
        changelog: rows of the join's ``output_schema``: an Arrow table, or a ``cudf.DataFrame`` if the engine's
            ``output`` is ``"cudf"``.
        sequence: for each of them, the sequence (place in the micro-batch's total order) of the change that caused
            it; 0 throughout in ``per_batch``, but for an interval join; -1 for what the watermark ended.
        metrics: counts, bytes and milliseconds, by name.
    """

    changelog: Changelog
    sequence: npt.NDArray[np.int64]
    metrics: dict[str, int | float]


class OperatorEngine:
    """The engine of a state server: one partition of one operator.

    `gpu_ops.JoinEngine` is this engine for notebooks: DataFrames, inputs by name, and a table of the result.

    Args:
        description: its description: a `Join`, `MultiJoin`, `Aggregate` or `CoGroup`.
        backend: ``"auto"``, ``"cpu"`` or ``"gpu"``.
        memory_limit: bytes that state may take, or a `Budget`, see `gpu_ops.JoinEngine`.
        tiny: test setting: the smallest possible segments.
        backlog: begin with a backlog: see `prepare_batches`.
        probe: how the GPU finds matching rows, see `gpu_ops.JoinEngine`.

    Raises:
        BackendError: the GPU was asked for and none answers.
    """

    def __init__(
        self,
        description: Description,
        backend: Backend = "auto",
        *,
        memory_limit: int | Budget | None = None,
        tiny: bool = False,
        backlog: bool = False,
        probe: Probe = "auto",
    ) -> None:
        if not isinstance(description, Description):
            raise DescriptionError(f"an engine takes the description of a join, not {type(description).__name__}")
        self.description = description
        limit = memory_limit.gpu if isinstance(memory_limit, Budget) else memory_limit
        self.kernels, self.backend_reason = make_kernels(backend, tiny_segments=tiny, memory_limit=limit, probe=probe)
        self.backend = self.kernels.name
        self.memory = Memory(self.kernels, memory_limit)
        if backlog:
            description.check_backlog()
        self._clock_ms: int | None = None
        self._clock_before: int | None = None
        self._clock_was_set_back = False
        self._prepared = False
        self._finished = False
        self._closed = False
        self.needs_restore = False
        """Whether a micro-batch could be neither made final nor taken back: what the engine holds is wrong."""
        self._begins_with_backlog = backlog
        self._backlog: Backlog | None = None
        self._operator = self._fresh_operator()

    def _fresh_operator(self) -> Operator:
        if self._begins_with_backlog:
            self._backlog = Backlog(self.description, self.kernels, self.memory)
            return self._backlog
        return operators.make(self.description, self.kernels, self.memory)

    # --- micro-batches -----------------------------------------------------------------------

    def finish(self) -> Changelog:
        """End the input: the output that is left.

        With ``emit="at_end"`` that is the whole result, as insertions; nothing may follow. So it is for a backlog that
        no live micro-batch has followed, but one still may. Otherwise it is an
        interval join's unmatched rows; rows that come after it are late.

        Raises:
            StateError: a micro-batch is prepared, or the input has ended already.
        """
        with self._ending() as ending:
            parts = [self.description.output_schema.empty_table(), *ending, *self._operator.finish()]
            return self._emitted(together(self.description.output_schema, self.kernels, parts))

    def finish_parts(self) -> Iterator[Changelog]:
        """Ends the input like `finish`, in parts: with ``emit="at_end"`` the result need not fit in memory."""
        with self._ending() as ending:
            for part in ending:
                yield self._emitted(part)
            for part in self._operator.finish():
                yield self._emitted(part)

    def present_result(self) -> Changelog:
        """The result as it is now, as insertions, of an operator that keeps groups; the engine is of no use after it.

        Raises:
            NotBuiltError: of any other operator.
        """
        self._check_there()
        return self._emitted(changelog(self.description, self.kernels, self._operator.present_result()))

    @contextlib.contextmanager
    def _ending(self) -> Iterator[list[Changelog]]:
        """The changelog of what waits for the watermark, if anything may; final, once what comes of it is there."""
        self._check_there()
        if self._prepared:
            raise StateError("commit or discard the prepared micro-batch before the input ends")
        self._check_open()
        before, last = self._clock_ms, self._operator.last_watermark_ms
        self._finished = self.description.emit == "at_end"
        try:
            if last is None:
                yield [] if self._finished else [self.description.output_schema.empty_table()]
            else:
                nothing = [None] * len(self.description.inputs)
                # by processing time the clock is what goes to the end; a TTL has not passed because the input ends
                now = self._clock if self.description.by_event_time else last
                yield [
                    self._begin(ingest(self.description, nothing, nothing), now, last, time.perf_counter()).changelog
                ]
            if self._prepared:
                self.commit()
            else:
                self._committed()
        except BaseException:
            self._finished = False
            self.needs_restore |= self._operator.half_ended
            if self._prepared:
                self.discard()
            else:
                self._discarded()
            raise
        finally:
            self._clock_ms = before

    def _check_open(self) -> None:
        self._check_there()
        if self._finished:
            raise StateError("the input has ended: with emit='at_end' nothing follows its result")

    def _check_there(self) -> None:
        if self._closed:
            raise StateError("the engine is closed")
        if self.needs_restore:
            raise StateError(
                "an error left a micro-batch half done, and it could not be taken back, so what this engine holds is "
                "wrong: restore it from a snapshot, or make a new engine"
            )

    def prepare_batches(
        self,
        batches: Sequence[InputBatch],
        sequences: Sequence[npt.ArrayLike | None],
        *,
        clock_ms: int | None = None,
        watermark: Watermark = None,
        backlog: bool = False,
    ) -> MicroBatch:
        """Compute one micro-batch without changing the committed state.

        Args:
            batches: the changes of each input, in the description's order, with their row-kind column; None for none.
            sequences: for each input one integer per change, which together put the changes of all inputs in a total
                order; None: those of the first input come first, and so on.
            clock_ms: the time of the micro-batch, see `gpu_ops.JoinEngine.prepare`; likewise the others.
            watermark: the one in force, of an operator by time; of a dataflow those of its operators by event time.
            backlog: these changes are backlog.

        Returns:
            The changelog, to be followed by `commit` or `discard`.

        Raises:
            BadInputError: a change that cannot be joined; nothing has changed.
            DescriptionError: a watermark where none has a meaning; nothing has changed.
            StateError: more state, or a larger micro-batch, than ``memory_limit`` allows; nothing has changed.
        """
        self._check_open()
        if self._prepared:
            raise StateError("the last micro-batch was neither committed nor discarded")
        if watermark is not None and not self.description.by_time:
            raise DescriptionError("a watermark has a meaning in joins by time only")
        started = time.perf_counter()
        if self._backlog is not None:
            self._backlog.backlog = backlog
        elif backlog:
            raise DescriptionError("this engine does not begin with a backlog: make it with backlog=True")
        batches = repeatable(self.description, batches)
        changes = self.memory.within(
            "taking in a micro-batch",
            self._operator,
            lambda: ingest(self.description, batches, sequences, self.kernels.dataframes, self._ahead()),
        )
        now = int(time.time() * 1000) if clock_ms is None else whole_number("clock_ms", clock_ms)
        self._check_clock(now)
        batch = self._begin(changes, now, self._checked_watermark(watermark), started)
        try:
            return dataclasses.replace(batch, changelog=self._emitted(batch.changelog))
        except BaseException:
            self.discard()
            raise

    def with_room(self, what: str, work: Callable[[], Result]) -> Result:
        """Does what can be begun again, and takes memory of the backend: state makes room for it.

        Args:
            what: it is, for errors.
            work: does it.

        Raises:
            StateError: no state is left that could.
        """
        return self.memory.within(what, self._operator, work)

    def _ahead(self) -> Callable[[pa.Table], Frame] | None:
        """Copies rows to a card while they are looked at; None where they stay on the host, or are there."""
        kept = self.description.emit == "at_end" or self._backlog is not None
        return None if self.kernels.host is None or kept else self.kernels.frame

    def process_batches(
        self, batches: Sequence[InputBatch], sequences: Sequence[npt.ArrayLike | None], **options: Any
    ) -> Changelog:
        """Apply one micro-batch and return its changelog; arguments as `prepare_batches`."""
        result = self.prepare_batches(batches, sequences, **options)
        self.commit()
        return result.changelog

    def _emitted(self, changelog: Changelog) -> Changelog:
        """A changelog as the engine gives it out."""
        return changelog

    def _committed(self) -> None:
        """Does what a subclass has to do once a micro-batch, or the end of input, is final."""

    def _discarded(self) -> None:
        """Does what a subclass has to do when a micro-batch, or the end of input, is taken back."""

    @property
    def _clock(self) -> int:
        """The clock of the micro-batch that is prepared, or was last; 0 before the first."""
        return self._clock_ms or 0

    def _check_clock(self, now: int) -> None:
        """Says, once, that the clock has been set back."""
        back = self._clock - now
        if self._clock_ms is not None and back > _SET_BACK_MS and not self._clock_was_set_back:
            self._clock_was_set_back = True
            _log.warning(
                "the clock was set back by %.1f s: rows that came before keep the times that they had, for a TTL and "
                "for processing time", back / 1e3,
            )  # fmt: skip

    def _begin(self, changes: tuple[Ingested, ...], now: int, given: Watermark, started: float) -> MicroBatch:
        self._clock_before, self._clock_ms = self._clock_ms, now
        self._prepared = True
        try:
            return self._prepare(changes, self._watermark(given), started)
        except BaseException:
            self.discard()
            raise

    def _checked_watermark(self, watermark: Watermark) -> Watermark:
        """A watermark as the caller gave it, looked at."""
        names = self.description.timed.keys()
        if isinstance(watermark, Mapping) or (watermark is not None and any(names)):
            if not isinstance(watermark, Mapping) or watermark.keys() != names:
                raise DescriptionError(f"watermark={watermark!r}: a dataflow has one of each of {', '.join(names)}")
            return {name: None if w is None else whole_number("watermark", w) for name, w in watermark.items()}
        if isinstance(watermark, tuple):
            if len(watermark) != 2:
                raise DescriptionError(f"watermark={watermark!r}: it is one number, or one per input")
            left, right = (None if w is None else whole_number("watermark", w) for w in watermark)
            return left, right
        return None if watermark is None else whole_number("watermark", watermark)

    def _watermark(self, given: Watermark) -> int | None:
        if given is None or not self.description.by_event_time:
            return self._operator.watermark_ms(self._clock)
        if isinstance(given, tuple):
            return None if given[0] is None or given[1] is None else min(given[0], given[1])
        if isinstance(given, Mapping):
            return self._operator.under(given)
        return given

    def _prepare(self, changes: tuple[Ingested, ...], watermark: int | None, started: float) -> MicroBatch:
        ingested = time.perf_counter()
        self.memory.begin()
        operator, rows = self._operator, sum(c.kinds.size for c in changes)
        looked_up = dict(self.kernels.lookups)
        bad = [Beside(n, x.tagged, BAD_ROW_KIND) for n, x in enumerate(changes) if x.tagged is not None]

        def work() -> tuple[Output, Changelog, float]:
            made = operator.prepare(changes, self._clock, watermark)
            began = time.perf_counter()
            output = changelog(self.description, self.kernels, dataclasses.replace(made, beside=(*made.beside, *bad)))
            return made, output, (time.perf_counter() - began) * 1e3

        what = f"a micro-batch of {rows} changes"
        made, output, emit_ms = self.memory.within(what, operator, work, undo=operator.discard)
        self.memory.check(self._operator.tables)
        metrics: dict[str, int | float] = {}
        for name, change in zip(self.description.sides, changes, strict=True):
            metrics |= {f"{name}_rows_in": change.rows_in, f"{name}_bad_rows": change.bad_rows}
        for name, table in zip(self.description.state_names, self._operator.tables, strict=True):
            metrics |= {
                f"{name}_state_rows": table.live_after(),
                f"{name}_state_bytes": table.nbytes,
                f"{name}_cold_bytes": 0 if self.kernels.host is None else table.host_bytes,
                f"{name}_disk_bytes": table.disk_bytes,
            }
        metrics |= self.memory.moved()
        counts = [int(np.count_nonzero(made.kinds == code)) for code in range(len(LONG_STRINGS))]
        metrics |= {f"rows_out_{name}": count for name, count in zip(LONG_STRINGS, counts, strict=True)}
        metrics |= {f"lookups_{way}": count - looked_up[way] for way, count in self.kernels.lookups.items()}
        metrics |= made.metrics
        metrics["update_ms"] = metrics.get("update_ms", 0) + (ingested - started) * 1e3
        if "emit_ms" in metrics:
            metrics["emit_ms"] += emit_ms
        of_bad = np.zeros(sum(x.rows.num_rows for x in bad), np.int64)
        return MicroBatch(output, np.concatenate([made.sequence, of_bad]), metrics)

    def commit(self) -> None:
        """Make the prepared micro-batch final."""
        self._check_there()
        if not self._prepared:
            raise StateError("no micro-batch is prepared")
        self._prepared = False
        operator = self._operator
        self._whole("making a micro-batch final", lambda: operator.commit(self._clock))
        self._committed()
        self._settle()

    def _settle(self) -> None:
        """Make room after a commit. What fails there is said, and no error: the micro-batch has been applied."""
        try:
            self.memory.settle(self._operator.tables)
        except Exception as error:
            _log.warning("the micro-batch is final, but what tidies up after it failed: %s", error, exc_info=True)

    def discard(self) -> None:
        """Forget the prepared micro-batch; without one, nothing happens.

        Raises:
            StateError: memory ran out on the way, and nothing could be moved away. From here on the engine refuses
                everything until it is restored (`needs_restore`).
            MemoryError: likewise, of the host's memory.
        """
        self._check_there()
        if self._prepared:
            self._clock_ms = self._clock_before
        self._prepared = False
        self._discarded()
        self._whole("taking back a micro-batch", self._operator.discard)
        self.memory.charge(self._operator.tables)

    def _whole(self, what: str, work: Callable[[], None]) -> None:
        """Do what leaves the state wrong if it is done in part."""
        self.needs_restore = True
        self.memory.within(what, self._operator, work)
        self.needs_restore = False

    # --- state -------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, pa.Table]:
        """The committed state, whichever backend holds it.

        Returns:
            For ``"left"`` and ``"right"``, or each of many inputs, the live rows, and behind their columns the
            association count as ``__count`` where one is kept and the last write as ``__written`` (ms) where a TTL asks
            for it; a column of the input may have such a name as well. With ``emit="at_end"`` all changes. For an
            interval join with what stands beside its rows, and under ``"time"`` its watermark.
        """
        return whole(self.kept())

    def kept(self) -> dict[str, Storable]:
        """Gives a snapshot by reference, for a state folder: what can be stored in pieces is not copied."""
        self._check_there()
        if self._prepared:
            raise StateError("commit or discard the prepared micro-batch before a snapshot")
        return self._operator.kept()

    def restore(self, state: Mapping[str, FromSnapshot]) -> None:
        """Take over a snapshot, of whichever backend, into an engine that has seen nothing yet or `needs_restore`.

        Raises:
            StateError: it is none of this join's; the engine is as fresh as it was.
        """
        if self.needs_restore and not self._closed:
            self._operator.close()
            self._operator = self._fresh_operator()
        else:
            self._check_there()
        if any(len(t) for t in self._operator.tables):
            raise StateError("restore needs a fresh engine")
        try:
            with reading("snapshot of this join", StateError):
                self._check_snapshot(state)
                self._operator.restore(state, lambda: self.memory.settle(self._operator.tables))
        except BaseException:
            self._operator = self._fresh_operator()
            raise
        self.needs_restore = False
        self._settle()

    def _check_snapshot(self, state: Mapping[str, FromSnapshot]) -> None:
        """Refuses a snapshot that lacks an input."""
        for name in self.description.state_names:
            if not isinstance(state.get(name), FromSnapshot):
                raise StateError(f"the snapshot lacks input '{name}'")

    def state_size(self) -> dict[str, int]:
        """Live rows and bytes of each input."""
        self._check_there()
        sizes = {}
        for name, table in zip(self.description.state_names, self._operator.tables, strict=True):
            sizes[f"{name}_rows"], sizes[f"{name}_bytes"] = table.live, table.nbytes
        return sizes

    def close(self) -> None:
        """Give back memory; the engine is of no use afterwards."""
        if self._closed:
            return
        self._closed = True
        self._operator.close()
        del self._operator
        self.memory.release()
        self.kernels.close()
