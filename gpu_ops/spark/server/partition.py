"""The state of one partition and the steps by which it advances: apply, repeat, commit, replay, snapshot."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

import pyarrow as pa

from gpu_ops.backends import lost_gpu
from gpu_ops.descriptions.projection import Projection
from gpu_ops.descriptions.times import WatermarkMs
from gpu_ops.errors import BadInputError, GpuJoinError, StateError
from gpu_ops.kernels import Frame, Probe
from gpu_ops.memory import Budget
from gpu_ops.operator_engine import MicroBatch, OperatorEngine
from gpu_ops.spark.server import recovery
from gpu_ops.spark.server.files_read import CardReader, in_file, with_rows
from gpu_ops.spark.server.recovery import RecoveredState, Snapshots
from gpu_ops.spark.server.written import write_changes
from gpu_ops.spark.wire.command import ApplyCommand, SideRows, Wire, parse_join
from gpu_ops.spark.wire.files_request import FilesRequest, PlacedFile
from gpu_ops.state.address import StateAddress
from gpu_ops.state.blocks import FilePart, without
from gpu_ops.state.durable import NO_TIMES, PartitionLog, Record, Times
from gpu_ops.state.files import CURRENT_ACTIVITY, Activity, Files, Stamp
from gpu_ops.state.manifest import FORMAT, OF_CARD, Manifest, check_open, ensure, remove_older
from gpu_ops.state.pieces import FromSnapshot


class Recorded(NamedTuple):
    """The clock, watermark and backlog flag of the first application of a micro-batch, which repetitions take."""

    clock_ms: int
    watermark: WatermarkMs
    backlog: bool = False


@dataclasses.dataclass(frozen=True)
class Applied:
    """The answer to one micro-batch."""

    changelog: pa.Table
    metrics: dict[str, int | float]
    backend: str
    backend_reason: str
    latest: tuple[int | None, ...] = ()
    """The latest event time (ms) that this partition has ever seen, even if the engine has forgotten it, of each input,
    or of each part of the only one."""
    files: list[PlacedFile] | None = None
    """Where the changes are, instead of in the changelog; None where they are in that."""


class Answer(NamedTuple):
    """The kept answer to a micro-batch, for a repetition in the same run.

    Attributes:
        run_id: the query's run; in another run the micro-batch may have other rows.
        rows: the number of rows that came.
        applied: the answer.
    """

    run_id: str
    rows: int
    applied: Applied


@dataclasses.dataclass
class Pending:
    """A micro-batch that was answered and may have to be repeated."""

    batch_id: int
    clock_ms: int
    stamp: Stamp | None
    """The stamp of its record, where there is a state folder."""
    record: Record | None
    """The micro-batch's input, where there is no state folder."""
    times: Times
    """The watermark and latest event times after it."""
    backlog: bool = False
    """True if it was taken in as backlog."""
    prepared: bool = True
    """True if the engine has it prepared; False after a repetition that failed."""
    final: bool = False
    """True if the engine has made it final, as the next one is prepared ahead: a repetition begins with the log."""
    answer: Answer | None = None
    """The answer, kept where several tasks ask for it."""


@dataclasses.dataclass(frozen=True)
class Ahead:
    """A micro-batch that is prepared before it is asked for."""

    batch_id: int
    wire: Wire
    table: pa.Table
    parts: tuple[FilePart, ...]
    clock_ms: int
    result: MicroBatch
    seconds: float

    def of_rows(self, batch_id: int, wire: Wire, table: pa.Table, parts: tuple[FilePart, ...]) -> bool:
        """True if it has these very rows, in the same files."""
        if (self.batch_id, self.wire, self.parts) != (batch_id, wire, parts):
            return False
        return bool(without(self.table, parts).equals(without(table, parts)))


_ONCE: Final = 2
"""Micro-batches in a row that were asked for once: some sinks ask for each several times, which is found out so."""

_MOST_MISSED: Final = 8
"""Micro-batches in a row that had other rows than those prepared ahead, behind which none is any more."""


def identity(command: ApplyCommand) -> tuple[object, ...]:
    """The fields that two commands must have in common to belong to one state."""
    options = tuple(sorted((name, repr(value)) for name, value in command.options.items()))
    return (
        command.join_id, command.query_id, command.state, command.description,
        command.partition, command.partitions, command.backend, command.join_number, options,
    )  # fmt: skip


_log = logging.getLogger(__name__)


class AbandonedError(GpuJoinError):
    """Raised where the caller went away before its rows were complete; nothing was applied."""


class PartitionState:
    """The state of one partition of one join, and the rules by which it advances.

    Args:
        command: any command for this partition: names join, query, state folder and options.
        state: the state folder, by default the one that the command names.
        clock: returns the milliseconds since the epoch, by which state TTL is measured.
        budget: the memory budget, shared with other partitions; the option ``memory_limit`` takes precedence.
        probe: the way in which a GPU finds matching rows, see `gpu_ops.kernels.Probe`.
    """

    def __init__(
        self,
        command: ApplyCommand,
        *,
        state: StateAddress | Files | None = None,
        clock: Callable[[], int] | None = None,
        budget: Budget | None = None,
        probe: Probe = "auto",
    ) -> None:
        self._budget, self._probe = budget, probe
        self.description = parse_join(command.description)
        self.partition, self.partitions = command.partition, command.partitions
        self._identity = identity(command)
        self._location = command.state if state is None else state
        self._manifest = Manifest(
            self.description.to_json(),
            command.partitions,
            command.query_id,
            join_number=command.join_number,
            union_order=command.union_order,
            reads_once=command.reads_once or None,
            format=OF_CARD if command.keeps_copies else FORMAT,
        )
        self._backend, self._options = command.backend, dict(command.options)
        self._clock = clock or (lambda: time.time_ns() // 1_000_000)
        self._lock = threading.Lock()
        self._engine: OperatorEngine | None = None
        self._version = 0
        self._pending: Pending | None = None
        self._last_clock = 0
        self._times = NO_TIMES
        self._in_backlog = True
        self._by_event_time = self.description.by_event_time
        self._found = self._manifest
        self._older = False
        self._log: PartitionLog | None = None
        self._snapshots: Snapshots | None = None
        self._metrics: dict[str, int | float] = {}
        self._ahead: Ahead | None = None
        self._once = self._missed = self._came_true = 0
        self.activity = Activity()
        self.turn = threading.Lock()
        """Held by one of several tasks that bring the same rows, from before they are received."""

    def serves(self, command: ApplyCommand) -> bool:
        """True if a command is for this very join, folder, query and partition."""
        return self._identity == identity(command)

    def status(self) -> dict[str, Any]:
        """The version in memory and the metrics of the last micro-batch, as JSON-like values."""
        pending, ahead = self._pending, self._ahead
        return {
            "partition": self.partition,
            "partitions": self.partitions,
            "version": self._version if self._engine is not None else None,
            "pending": pending.batch_id if pending is not None else None,
            "ahead": None if ahead is None else ahead.batch_id,
            "came_true": self._came_true,
            "metrics": dict(self._metrics),
        }

    @property
    def backend(self) -> str | None:
        """The backend in use, or None without an engine."""
        engine = self._engine
        return engine.backend if engine is not None else None

    def close(self, version: int | None = None) -> None:
        """Drops the state from memory.

        Args:
            version: the last one of a query that is over; it is left as a snapshot where that is sooner loaded than the
                log.
        """
        with self._lock:
            if version is not None:
                self._leave_snapshot(version)
            self._forget()

    def _leave_snapshot(self, version: int) -> None:
        engine, pending, snapshots = self._engine, self._pending, self._snapshots
        if engine is None or snapshots is None or engine.needs_restore:
            return
        if self._ahead is not None:
            self._drop_ahead()
        if pending is not None and not pending.final and pending.batch_id == version - 1:
            self._commit(engine, pending)
        elif pending is not None and not pending.final:
            return
        if self._version == version:
            snapshots.leave(version, lambda: self._state(engine))

    def apply(
        self,
        batch_id: int,
        table: pa.Table,
        wire: Wire,
        *,
        alive: Callable[[], bool] = lambda: True,
        watermark: WatermarkMs = None,
        clock_ms: int | None = None,
        backlog: bool = False,
        shared_in: str | None = None,
        parts: tuple[FilePart, ...] = (),
        files: FilesRequest | None = None,
    ) -> Applied:
        """Applies a micro-batch, whose input is durable before this returns.

        Args:
            batch_id: Spark's number of the micro-batch.
            table: rows of all inputs, as they came, without those of Parquet files.
            wire: the layout of these rows.
            alive: whether the caller is still there; asked again before anything is made durable.
            watermark: that of an operator by event time, in ms; a repetition takes the first one's.
            clock_ms: the time, ms; by default now. A repetition takes the first one's.
            backlog: whether it is backlog; a repetition takes the first one's. Once one was not, none is.
            shared_in: a run in which a repetition with as many rows gets the first one's answer; None: in no run.
            parts: the rows that lie in files, which a record may keep; those in Parquet files are in no table.
            files: the files into which the changes are to be written, where the backend writes any.

        Raises:
            StateError: the micro-batch does not follow, or the state folder does not fit.
            BadInputError: rows cannot be joined; the state is unchanged.
            AbandonedError: the caller is gone; the state is unchanged.
        """
        with self._joining():
            now = self._clock() if clock_ms is None else clock_ms
            count = table.num_rows + sum(part.block.rows for part in parts if part.columns)
            kept = self.kept(batch_id, count, shared_in)
            if kept is not None:
                return kept
            given = Recorded(now, watermark, backlog), files
            answer = self._apply(batch_id, (table, parts), wire, alive, given)
            if shared_in is not None and self._pending is not None:
                self._pending.answer = Answer(shared_in, count, answer)
            return answer

    def prepare_ahead(self, batch_id: int, table: pa.Table, wire: Wire, parts: tuple[FilePart, ...]) -> bool:
        """Prepares what is probably the next micro-batch, while Spark ends the last one and plans it.

        The last one is made final in memory, although it may be repeated: then the state is loaded from the log.
        Nothing is written, and an error is none yet: if Spark asks for this micro-batch it comes again.

        Args:
            batch_id: Spark's number of the micro-batch.
            table: its rows, as of `apply`, likewise the next two.
            wire: their layout.
            parts: those in files.

        Returns:
            Whether it was prepared.
        """
        with self._joining():
            engine, pending = self._engine, self._pending
            if engine is None or pending is None or not self._is_next(batch_id) or any(part.columns for part in parts):
                return False
            rows, started, now = wire.split(self.description, table), time.perf_counter(), self._clock()
            self._commit(engine, pending)
            pending.final = True
            assert self._snapshots is not None
            self._snapshots.capture(batch_id, lambda: self._state(engine))
            with _giving(engine, frames=False):
                result = engine.prepare_batches(rows.tables, rows.sequences, clock_ms=now)
            self._ahead = Ahead(batch_id, wire, table, parts, now, result, time.perf_counter() - started)
            return True

    def may_prepare_ahead(self, batch_id: int) -> bool:
        """Tells whether `prepare_ahead` takes this micro-batch, so that its rows are worth looking at."""
        with self._joining():
            return self._is_next(batch_id)

    def _is_next(self, batch_id: int) -> bool:
        """True if what is stored can be loaded again, the clock does not matter, and it probably pays."""
        engine, pending = self._engine, self._pending
        if engine is None or pending is None:
            return False
        if pending.batch_id != batch_id - 1 or pending.final or not pending.prepared or engine.needs_restore:
            return False
        if self._snapshots is None or self.description.by_clock or pending.backlog:
            return False
        if self._missed >= _MOST_MISSED:
            return False
        return self._once >= _ONCE or not pending.batch_id  # what is loaded again before the first one is nothing

    @contextlib.contextmanager
    def _joining(self) -> Iterator[None]:
        """Context manager in which the caller has the state for itself, and is asked after."""
        with self._lock:
            looked_at = CURRENT_ACTIVITY.set(self.activity)
            try:
                with self.activity.during("joining"):
                    yield
            except GpuJoinError:
                raise
            except Exception:
                # Not a refusal but a defect or an exhausted machine: what memory holds is not to be
                # trusted, unless it is the only copy (then the engine's promise has to do that
                # preparing changes nothing).
                if self._location is not None:
                    self._forget()
                raise
            finally:
                CURRENT_ACTIVITY.reset(looked_at)

    def kept(self, batch_id: int, rows: int, shared_in: str | None) -> Applied | None:
        """Returns the kept answer to this micro-batch of so many rows in this run, or None."""
        pending = self._pending
        if shared_in is None or pending is None or pending.batch_id != batch_id or pending.answer is None:
            return None
        kept = pending.answer
        return kept.applied if (kept.run_id, kept.rows) == (shared_in, rows) else None

    def _apply(
        self,
        batch_id: int,
        arrived: tuple[pa.Table, tuple[FilePart, ...]],
        wire: Wire,
        alive: Callable[[], bool],
        given: tuple[Recorded, FilesRequest | None],
    ) -> Applied:
        (table, parts), (now, files) = arrived, given
        asked_ahead = self._ahead is not None and files is None and self._ahead.of_rows(batch_id, wire, table, parts)
        rows = None if asked_ahead else wire.split(self.description, table)
        _require(alive, batch_id)
        started = time.perf_counter()
        if self._ahead is not None and not asked_ahead:
            self._drop_ahead()
        recorded = self._advance(batch_id)
        spent = time.perf_counter() - started
        engine = self._engine
        assert engine is not None
        clock_ms, watermark, backlog = now if recorded is None else recorded
        self._last_clock, backlog = clock_ms, backlog and self._in_backlog
        if self._log is not None:
            self._log.begin_to_write(parts)
        started = time.perf_counter()
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            result, clock_ms, started = ahead.result, ahead.clock_ms, started - ahead.seconds
            self._missed, self._came_true = 0, self._came_true + 1
        else:
            of_files = tuple(part for part in parts if part.columns)
            rows = wire.split(self.description, table) if rows is None else rows
            by_card = self._by_card(engine, rows, wire, table.schema, of_files) if of_files else None
            if of_files and by_card is None:
                table, parts = with_rows(table, of_files), tuple(part for part in parts if not part.columns)
            rows = by_card or wire.split(self.description, table) if of_files else rows
            try:
                with _giving(engine, frames=files is not None and engine.kernels.files is not None):
                    result = engine.prepare_batches(
                        rows.tables, rows.sequences, clock_ms=clock_ms, backlog=backlog, **self._under(watermark)
                    )
            except BadInputError as error:
                raise in_file(error, self.description, of_files, table.schema) from None
        if self._snapshots is not None:
            self._snapshots.seconds += time.perf_counter() - started
        started = time.perf_counter()
        times = NO_TIMES
        if self._by_event_time:
            names = (f"{name}_max_time_ms" for name in self.description.watermarked)
            latest = tuple(cast("int | None", result.metrics.get(name)) for name in names)
            times = self._times.later(Times(watermark, latest))
        record = Record(table, clock_ms, wire.to_json(), times, backlog, parts)
        stamp = why = None
        try:
            # A half-sent repetition must not take the place of the whole one before it.
            _require(alive, batch_id)
            if self._log is not None:
                assert self._snapshots is not None
                stamp, size = self._log.write_record(batch_id, record)
                self._snapshots.stored.records[batch_id] = size
                assert isinstance(self._location, Files)
                why = self._found.why_moved(self._location)
        except BaseException:
            engine.discard()
            raise
        if why is not None:
            self._forget()
            raise why
        self._pending = Pending(batch_id, clock_ms, stamp, None if self._log is not None else record, times, backlog)
        self._once = self._once + 1 if recorded is None else 0
        spent += time.perf_counter() - started
        self._metrics = {
            **result.metrics,
            "commit_ms": spent * 1e3,
            **({} if self._snapshots is None else self._snapshots.metrics()),
            "batch_id": batch_id,
            "partition": self.partition,
            "clock_ms": clock_ms,
        }
        changelog, placed = result.changelog, None
        if not isinstance(changelog, pa.Table):
            assert files is not None
            started = time.perf_counter()
            changelog, placed = self._written(engine, changelog, files)
            self._metrics["emit_ms"] = self._metrics.get("emit_ms", 0) + (time.perf_counter() - started) * 1e3
        metrics = dict(self._metrics)
        return Applied(changelog, metrics, engine.backend, engine.backend_reason, times.latest, placed)

    def _by_card(
        self, engine: OperatorEngine, rows: SideRows, wire: Wire, schema: pa.Schema, parts: Sequence[FilePart]
    ) -> SideRows | None:
        """Reads Parquet files into the card's memory; None where they are to be read here.

        So it is without a card, where libcudf cannot, and where the record does not keep the files.
        """
        kernels = engine.kernels
        if kernels.files is None or self._log is None or not self._found.keeps_copies:
            return None
        reader = CardReader(kernels, kernels.files, wire, schema)
        try:
            return engine.with_room("reading files", lambda: reader.with_files(self.description, rows, parts))
        except (RuntimeError, MemoryError, OverflowError, ValueError, OSError) as error:
            if isinstance(error, GpuJoinError) or lost_gpu() is not None:
                raise
            _log.warning("%s: Arrow reads the files of this micro-batch, as the card could not: %r", self, error)
        return None

    def _written(
        self, engine: OperatorEngine, changes: Frame, request: FilesRequest
    ) -> tuple[pa.Table, list[PlacedFile] | None]:
        """Writes changes into files; where libcudf fails to, they are copied out, and a task writes them.

        It has only read them, so what the engine holds is as it was, unless the card is lost.

        Raises:
            StateError: the folder cannot be written to.
        """
        kernels, schema = engine.kernels, self.description.output_schema
        assert kernels.files is not None
        projection = Projection.from_dict(request.projection, schema)
        try:
            return schema.empty_table(), write_changes(kernels, kernels.files, changes, projection, request)
        except (OSError, pa.ArrowException) as error:
            raise StateError(f"cannot write files of the changes of {self}: {error}") from None
        except (RuntimeError, MemoryError, OverflowError) as error:
            if isinstance(error, GpuJoinError) or lost_gpu() is not None:
                raise
            _log.warning("%s: a task writes this micro-batch, as the card could not: %r", self, error)
        return kernels.to_arrow(changes, schema), None

    def left_over(self, version: int) -> Iterator[pa.Table]:
        """Yields the rows that the end of input emits for a version of the state, in parts; the folder is unchanged.

        Raises:
            StateError: there is no such version.
        """
        with self._at(version) as engine:
            yield from engine.finish_parts()

    @contextlib.contextmanager
    def held_at(self, version: int) -> Iterator[RecoveredState]:
        """Context manager with the state of a version; the state folder is unchanged.

        Raises:
            StateError: there is no such version.
        """
        with self._at(version) as engine:
            yield self._state(engine)

    def rows_at(self, version: int) -> tuple[int, ...]:
        """Counts the live rows of each input in the state of a version; the state folder is unchanged.

        Raises:
            StateError: there is no such version.
        """
        with self._at(version) as engine:
            sizes = engine.state_size()
            return tuple(sizes[f"{name}_rows"] for name in self.description.state_names)

    @contextlib.contextmanager
    def _at(self, version: int) -> Iterator[OperatorEngine]:
        """Context manager with an engine that has the state of a version; nothing is written."""
        with self._lock:
            self._load(version, over=True)
            assert self._engine is not None
            try:
                yield self._engine
            finally:
                self._forget()

    # --- versions ----------------------------------------------------------------------------

    def _under(self, watermark: WatermarkMs) -> dict[str, Any]:
        """The engine's argument for the watermark, so that it does not compute one from its part of the rows."""
        known = watermark if isinstance(watermark, Mapping) else {"": watermark}
        under = {name: known.get(name) for name in self.description.timed}
        return {"watermark": under} if under else {}

    def _advance(self, batch_id: int) -> Recorded | None:
        """Brings the engine to exactly version ``batch_id``, nothing prepared.

        Returns:
            The clock, watermark and backlog flag of an earlier application of the batch, None if there was none.
        """
        if self._engine is not None and self._engine.needs_restore:
            self._forget()
        engine, pending = self._engine, self._pending
        if engine is not None and pending is None and self._version == batch_id:
            return None
        if engine is not None and pending is not None and pending.batch_id == batch_id:
            if pending.final:
                self._forget()
                return self._load(batch_id)
            engine.discard()
            pending.prepared = False
            return Recorded(pending.clock_ms, pending.times.watermark, pending.backlog)
        if engine is None or pending is None or pending.batch_id != batch_id - 1:
            return self._load(batch_id)
        if self._log is not None and self._log.record_stamp(pending.batch_id) != pending.stamp:
            _log.warning("%s: another server has repeated batch %d; reloading", self, pending.batch_id)
            self._forget()
            return self._load(batch_id)
        if not pending.final:
            self._commit(engine, pending)
        self._pending = None
        self._compact(engine)
        if self._older:
            self._remove_older()
        return None

    def _drop_ahead(self) -> None:
        """Takes back what was prepared ahead, as something else is asked for."""
        assert self._engine is not None
        self._engine.discard()
        self._ahead, self._missed = None, self._missed + 1

    def _commit(self, engine: OperatorEngine, pending: Pending) -> None:
        if pending.prepared:
            try:
                engine.commit()
            except BaseException:
                self._forget()
                raise
            self._version += 1
            self._times = pending.times
            self._in_backlog = pending.backlog
        elif pending.record is not None:
            self._replay(engine, pending.record)
        else:
            assert self._log is not None
            self._replay(engine, self._log.read_record(pending.batch_id))

    def _replay(self, engine: OperatorEngine, record: Record) -> None:
        rows = Wire.from_json(record.wire).split(self.description, record.table)
        try:
            under = self._under(record.times.watermark)
            clock_ms = record.clock_ms
            engine.process_batches(rows.tables, rows.sequences, clock_ms=clock_ms, backlog=record.backlog, **under)
        except BaseException:
            self._forget()
            raise
        self._version += 1
        self._last_clock, self._times, self._in_backlog = record.clock_ms, record.times, record.backlog

    def _load(self, batch_id: int, *, over: bool = False) -> Recorded | None:
        """Brings the engine to version ``batch_id`` from the state folder; returns what `_advance` returns.

        An error leaves the state in memory unchanged. ``over``: no micro-batch will follow, and nothing is written.
        """
        location = self._location
        if location is None:
            if batch_id == 0 and self._engine is None:
                self._engine = self._fresh()
                return None
            raise recovery.memory_refused(str(self), self._held(), batch_id)
        files = self._location = location if isinstance(location, Files) else Files.at(location)
        found = ensure(files, self._manifest, create=batch_id == 0)
        if found is None:
            raise recovery.nothing_stored(str(self), files.location, batch_id)
        if not over:
            check_open(files)
            found.check_cut(files.location)
        started = time.perf_counter()
        if self._snapshots is not None:
            self._snapshots.finish()  # what it writes would look like a leftover
        log = PartitionLog(files, found, self.partition)
        stored = log.stored(clean=not over)
        if over:  # a version before the last one may be asked for
            stored = stored.until(batch_id)
        base = recovery.newest_snapshot(str(self), batch_id, log, stored)
        engine, since, unneeded, replaying = self._engine, base, frozenset[str](), 0.0
        if (
            engine is not None and base <= self._version <= batch_id
        ):  # what is held is final: a later batch is asked for
            engine.discard()
            since = self._version
        else:
            engine = None
        if engine is None:
            self._forget()
            engine = self._fresh()
            if base:
                replayed = time.perf_counter()
                tables = self._restore(engine, log, base)
                replaying = 0.0 if tables else time.perf_counter() - replayed
                unneeded = recovery.unnamed_pieces(base, tables, stored)
        self._engine, self._pending, self._ahead = engine, None, None
        self._log = log
        every, tiny = self._options.get("snapshot_every"), bool(self._options.get("tiny", False))
        self._snapshots = Snapshots(str(self), log, stored, self.partition, every, unneeded=unneeded, tiny=tiny)
        self._found, self._older = found, self.partition == 0 and found.generation > 0
        replayed = time.perf_counter()
        for batch in range(since, batch_id):
            self._replay(engine, log.read_record(batch))
        self._snapshots.seconds = replaying + time.perf_counter() - replayed
        _log.info(
            "%s: version %d from snapshot %d and %d records in %.0f ms",
            self, batch_id, base, batch_id - since, (time.perf_counter() - started) * 1e3,
        )  # fmt: skip
        if not over:
            self._compact(engine)
        if over or batch_id not in stored.records:
            return None
        try:
            record = log.read_record(batch_id)
            return Recorded(record.clock_ms, record.times.watermark, record.backlog)
        except StateError as error:
            _log.warning("%s: repeating batch %d without its record: %s", self, batch_id, error)
            return None

    def _restore(self, engine: OperatorEngine, log: PartitionLog, version: int) -> dict[str, FromSnapshot]:
        """Brings a fresh engine to the version of a snapshot; returns the tables that it has, if it has rows itself."""
        tables, origin = dict[str, FromSnapshot](), log.origin(version)
        if origin is None:
            tables, self._last_clock = log.read_snapshot(version)
            engine.restore(tables)
        else:
            other, last = origin
            base = recovery.newest_snapshot(str(self), last, other, other.stored(clean=False))
            if base:
                self._restore(engine, other, base)
            for batch in range(base, last):
                self._replay(engine, other.read_record(batch))
            for table in engine.kept().values():
                if not isinstance(table, pa.Table):
                    table.pieces = ()  # they are not where a snapshot would look for them
        self._version, self._times = version, log.snapshot_times(version) or NO_TIMES
        self._in_backlog = log.in_backlog(version)
        return tables

    # --- snapshots ---------------------------------------------------------------------------

    def _compact(self, engine: OperatorEngine) -> None:
        """Has a snapshot written when one is due, and deletes the files that it replaces."""
        if self._snapshots is not None:
            self._snapshots.take(self._version, None if self._ahead is not None else lambda: self._state(engine))

    def _state(self, engine: OperatorEngine) -> RecoveredState:
        return RecoveredState(engine.kept(), self._last_clock, self._times, self._in_backlog)

    def _remove_older(self) -> None:
        """Deletes the old partitions that `gpu_ops.rescale` left, once a micro-batch of the new ones is final."""
        assert isinstance(self._location, Files)
        self._older = False
        try:
            remove_older(self._location, self._found)
        except (StateError, OSError, pa.ArrowException) as error:
            _log.warning("%s: what the state folder was before it was cut anew is still there: %s", self, error)

    # --- memory ------------------------------------------------------------------------------

    def _fresh(self) -> OperatorEngine:
        return OperatorEngine(
            self.description,
            self._backend,  # type: ignore[arg-type]  # the engine checks it
            memory_limit=self._options.get("memory_limit", self._budget),
            tiny=bool(self._options.get("tiny", False)),
            probe=self._probe,
            # also where the user does not say so any more: a backlog that is stored goes live
            backlog=bool(self._options.get("backlog", False)) or self.description.why_no_backlog() is None,
        )

    def _forget(self) -> None:
        engine, self._engine, self._pending, self._ahead = self._engine, None, None, None
        self._version = self._last_clock = self._once = 0
        self._times, self._in_backlog = NO_TIMES, True
        snapshots, self._snapshots = self._snapshots, None
        self._log, self._older = None, False
        if engine is not None:
            engine.close()
        if snapshots is not None:
            snapshots.finish()

    def _held(self) -> str:
        if self._engine is None:
            return "nothing"
        last = self._pending.batch_id if self._pending is not None else self._version - 1
        return f"the state after batch {last}"

    def __str__(self) -> str:
        names = ", ".join(source.name for source in self.description.inputs)
        return f"join of {names}, partition {self.partition} of {self.partitions}"


@contextlib.contextmanager
def _giving(engine: OperatorEngine, *, frames: bool) -> Iterator[None]:
    """Context manager in which an engine gives a changelog as it is sent, or as a frame that is written."""
    engine.kernels.gives_frames, engine.kernels.gives_bytes = frames, not frames
    try:
        yield
    finally:
        engine.kernels.gives_frames = engine.kernels.gives_bytes = False


def _require(alive: Callable[[], bool], batch_id: int) -> None:
    if not alive():
        raise AbandonedError(f"the caller of batch {batch_id} is gone")


def stored_state(files: Files, manifest: Manifest, partition: int, budget: Budget | None = None) -> PartitionState:
    """Opens one partition of a state folder for reading, on the CPU.

    Args:
        files: the folder.
        manifest: the folder's manifest.
        partition: the partition's number.
        budget: the memory budget.
    """
    command = ApplyCommand(
        "", files.address, manifest.description, manifest.query_id, 0, partition, manifest.partitions, "cpu",
        Wire("", "", ()), {},
    )  # fmt: skip
    return PartitionState(command, state=files, budget=budget)
