"""JoinEngine: one partition of one join, Arrow in, Arrow changelog out. No Spark here."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gpu_ops.backends import Backend, make_kernels
from gpu_ops.changelog import DELETE, INSERT, UPDATE_AFTER, UPDATE_BEFORE
from gpu_ops.errors import StateError
from gpu_ops.ingest import Ingested, ingest
from gpu_ops.joins import Join, Key, key_type
from gpu_ops.operators import regular, semi_anti
from gpu_ops.operators.changes import Lifetimes, apply_changes
from gpu_ops.operators.emission import fold
from gpu_ops.operators.pairs import find_pairs
from gpu_ops.output import changelog_table
from gpu_ops.state.table import COUNT_COLUMN, StateTable

Batch: TypeAlias = "pa.Table | pa.RecordBatch | None"
_SIDES = ("left", "right")


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """What a micro-batch says.

    Attributes:
        changelog: rows of the join's ``output_schema``.
        sequence: for each of them, the place in the micro-batch's total order of the change that
            caused it; 0 throughout in ``per_batch``.
        metrics: counts, bytes and milliseconds, by name.
    """

    changelog: pa.Table
    sequence: npt.NDArray[np.int64]
    metrics: dict[str, int | float]


class JoinEngine:
    """A streaming join over one partition.

    Args:
        join: its description.
        backend: ``"auto"``, ``"cpu"`` or ``"gpu"``.
        memory_limit: bytes of state at most, or None.
        tiny: test setting: the smallest possible segments.

    Example:
        >>> engine = JoinEngine(join)
        >>> engine.process(left=orders, right=prices)
    """

    def __init__(
        self, join: Join, backend: Backend = "auto", *, memory_limit: int | None = None, tiny: bool = False
    ) -> None:
        self.join = join
        self.kernels, self.backend_reason = make_kernels(backend, tiny_segments=tiny, memory_limit=memory_limit)
        self.backend = self.kernels.name
        self.memory_limit = memory_limit
        self._clock_ms = 0
        self._prepared = False
        # NOT IN with more than one column or a residual condition has no key to look rows up by
        rewritten = join.null_aware and (len(join.keys) > 1 or join.where is not None)
        self._run = null_aware_as_condition(join) if rewritten else join
        self._condition = self._run.condition
        self._tables = self._make_tables()

    def _make_tables(self) -> tuple[StateTable, StateTable]:
        join, kernels = self._run, self.kernels
        schemas = join.left.schema, join.right.schema
        types = tuple(key_type(schemas[0].field(k.left), schemas[1].field(k.right)) for k in join.keys)
        counted = (True, False) if join.how in ("semi", "anti") else join.outer

        def table(side: int) -> StateTable:
            return StateTable(
                kernels,
                join.inputs[side],
                tuple(k.column(side) for k in join.keys),
                types,
                tuple(k.column(side) for k in join.keys if not k.null_safe),
                counted=counted[side],
                findable=not join.inputs[side].insert_only or join.inputs[side].ttl_ms is not None,
                track_null_keys=join.null_aware and side == 1,
            )

        return table(0), table(1)

    # --- micro-batches -----------------------------------------------------------------------

    def process(
        self,
        left: Batch = None,
        right: Batch = None,
        *,
        left_order: npt.ArrayLike | None = None,
        right_order: npt.ArrayLike | None = None,
        clock_ms: int | None = None,
    ) -> pa.Table:
        """Apply one micro-batch and return its changelog; arguments as `prepare`."""
        result = self.prepare(left, right, left_order=left_order, right_order=right_order, clock_ms=clock_ms)
        self.commit()
        return result.changelog

    def prepare(
        self,
        left: Batch = None,
        right: Batch = None,
        *,
        left_order: npt.ArrayLike | None = None,
        right_order: npt.ArrayLike | None = None,
        clock_ms: int | None = None,
    ) -> MicroBatch:
        """Compute one micro-batch without changing the committed state.

        Args:
            left: n changes of the left input: its columns and its row-kind column, or None.
            right: m changes of the right input, likewise.
            left_order: n integers that, with right_order, put the changes of both inputs in a total
                order; without them the left's rows come first, then the right's. An input's
                ``sequence_by`` orders its own changes, and if both inputs have one, all of them.
            right_order: m integers.
            clock_ms: the time state TTL goes by, ms since the epoch; default now. Never goes back.

        Returns:
            The changelog, to be followed by `commit` or `discard`.

        Raises:
            BadInputError: a change that cannot be joined; nothing has changed.
            StateError: more state than ``memory_limit``; nothing has changed.
        """
        if self._prepared:
            raise StateError("the last micro-batch was neither committed nor discarded")
        started = time.perf_counter()
        changes = ingest(self.join, (left, right), (left_order, right_order))
        now = int(time.time() * 1000) if clock_ms is None else int(clock_ms)
        self._clock_ms = max(self._clock_ms, now)
        self._prepared = True
        try:
            return self._prepare(changes, started)
        except BaseException:
            self.discard()
            raise

    def _prepare(self, changes: tuple[Ingested, Ingested], started: float) -> MicroBatch:
        kernels, xp, join = self.kernels, self.kernels.xp, self._run
        net = join.emit == "per_batch"
        total = sum(c.kinds.size for c in changes)
        expired = [t.expire(self._clock_ms) for t in self._tables]
        event_kinds = xp.zeros(2 * total + 2, np.int8)
        sides: list[Lifetimes] = []
        for table, change in zip(self._tables, changes, strict=True):
            kinds, sequence = kernels.asarray(change.kinds), kernels.asarray(change.sequence)
            frame = kernels.frame(change.table)
            sides.append(apply_changes(table, frame, kinds, sequence, event_kinds, net=net))
        if net:
            event_kinds[0], event_kinds[1] = DELETE, INSERT
        both = sides[0], sides[1]
        updated = time.perf_counter()
        names = join.left.name, join.right.name
        pairs = find_pairs(self._tables, both, self._condition, names)
        probed = time.perf_counter()
        operator = semi_anti if join.how in ("semi", "anti") else regular
        rows = operator.emit(join, self._tables, both, pairs, event_kinds)
        output, frames = changelog_table(self.join, kernels, self._tables, rows)
        if net and operator is regular and regular.may_cancel(join, self._tables, both, rows):
            columns = tuple(c.name for c in self.join.output)
            types = tuple(c.type for c in self.join.output)
            left_over = fold(kernels, frames, rows.kinds == DELETE, columns, types)
            if left_over.size < rows.size:
                rows = rows.pick(left_over)
                output, _ = changelog_table(self.join, kernels, self._tables, rows)
        for side, change in enumerate(changes):
            output = change.append_tagged(self.join, side, output)
        emitted = time.perf_counter()
        self._check_memory()
        kinds = kernels.asnumpy(rows.kinds)
        sequence = kernels.asnumpy(rows.instants) >> 1
        tagged = output.num_rows - rows.size
        metrics: dict[str, int | float] = {}
        for side, name in enumerate(_SIDES):
            table = self._tables[side]
            metrics |= {
                f"{name}_rows_in": changes[side].rows_in,
                f"{name}_bad_rows": changes[side].bad_rows,
                f"{name}_unknown_retractions": sides[side].unknown,
                f"{name}_expired": expired[side],
                f"{name}_state_rows": table.live_after(),
                f"{name}_state_bytes": table.nbytes,
            }
        counted = np.bincount(kinds, minlength=4)
        for kind, name in (
            (INSERT, "insert"),
            (UPDATE_BEFORE, "update_before"),
            (UPDATE_AFTER, "update_after"),
            (DELETE, "delete"),
        ):
            metrics[f"rows_out_{name}"] = int(counted[kind])
        metrics |= {
            "update_ms": (updated - started) * 1e3,
            "probe_ms": (probed - updated) * 1e3,
            "emit_ms": (emitted - probed) * 1e3,
        }
        if tagged:
            sequence = np.concatenate([sequence, np.zeros(tagged, np.int64)])
        return MicroBatch(output, sequence, metrics)

    def commit(self) -> None:
        """Make the prepared micro-batch final."""
        if not self._prepared:
            raise StateError("no micro-batch is prepared")
        self._prepared = False
        for table in self._tables:
            table.commit(self._clock_ms)

    def discard(self) -> None:
        """Forget the prepared micro-batch; without one, nothing happens."""
        self._prepared = False
        for table in self._tables:
            table.discard()

    # --- state -------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, pa.Table]:
        """The committed state, whichever backend holds it.

        Returns:
            For ``"left"`` and ``"right"`` the live rows, with the association count as ``__count``
            where one is kept and the last write as ``__written`` (ms) where a TTL asks for it.
        """
        if self._prepared:
            raise StateError("commit or discard the prepared micro-batch before a snapshot")
        return {name: table.snapshot() for name, table in zip(_SIDES, self._tables, strict=True)}

    def restore(self, state: Mapping[str, pa.Table]) -> None:
        """Take over a snapshot, of whichever backend, into an engine that has seen nothing yet."""
        if any(len(t) for t in self._tables):
            raise StateError("restore needs a fresh engine")
        for name, table in zip(_SIDES, self._tables, strict=True):
            missing = {*table.source.schema.names, *([COUNT_COLUMN] if table.count is not None else [])}
            missing -= set(state[name].column_names)
            if missing:
                raise StateError(f"the snapshot of input '{name}' lacks {', '.join(sorted(missing))}")
            table.restore(state[name])

    def state_size(self) -> dict[str, int]:
        """Live rows and bytes of both inputs."""
        sizes = {}
        for name, table in zip(_SIDES, self._tables, strict=True):
            sizes[f"{name}_rows"], sizes[f"{name}_bytes"] = table.live, table.nbytes
        return sizes

    def close(self) -> None:
        """Give back memory; the engine is of no use afterwards."""
        self._tables = self._make_tables()
        self.kernels.close()

    def _check_memory(self) -> None:
        used = sum(t.nbytes for t in self._tables)
        if self.memory_limit is not None and used > self.memory_limit:
            raise StateError(
                f"the state would take {used} bytes, memory_limit is {self.memory_limit}; "
                "give it more, use more partitions, or let old rows go with ttl="
            )


def null_aware_as_condition(join: Join) -> Join:
    """``NOT IN`` written out: no key, but a condition that is not false where it is unknown.

    It compares every pair, which a lookup by key avoids; needed only for several columns or a
    residual condition (Flink plans it so always: ``OR(IS NULL(k), IS NULL(k0), =(k, k0))``).
    """
    left, right = join.left.name, join.right.name

    def known(key: Key) -> str:
        a, b = f"`{left}`.`{key.left}`", f"`{right}`.`{key.right}`"
        return f"({a} IS NULL OR {b} IS NULL OR {a} = {b})"

    terms = [known(k) for k in join.keys]
    if join.where is not None:
        terms.append(f"({join.where})")
    return dataclasses.replace(join, keys=(), null_aware=False, where=" AND ".join(terms))
