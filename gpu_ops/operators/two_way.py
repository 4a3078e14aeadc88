"""Regular, semi and anti joins over one partition: state, lifetimes, pairs and what comes of them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping

import numpy as np
import pyarrow as pa

from gpu_ops.descriptions.changelog import DELETE, INSERT
from gpu_ops.descriptions.description import Description
from gpu_ops.descriptions.join import Join
from gpu_ops.descriptions.keys import Key
from gpu_ops.ingest import Ingested
from gpu_ops.kernels import Kernels
from gpu_ops.operators import regular, semi_anti
from gpu_ops.operators.core.changes import apply_changes
from gpu_ops.operators.core.emission import fold
from gpu_ops.operators.core.lifetimes import Lifetimes
from gpu_ops.operators.core.pairs import net_pairs, timed_pairs
from gpu_ops.operators.operator import SIDES, Operator, Output, TooMuch
from gpu_ops.output import changelog_table
from gpu_ops.state.keyed_table import COUNT_COLUMN, KeyedTable, KeySet


def make(described: Description, kernels: Kernels, too_much: TooMuch) -> TwoWayJoin:
    """See `gpu_ops.operators.operator.Make`."""
    del too_much
    assert isinstance(described, Join)
    return TwoWayJoin(described, kernels)


class TwoWayJoin(Operator):
    """A regular, semi or anti join; see `gpu_ops.operators.operator.Operator`.

    Args:
        join: its description.
        kernels: the backend.
    """

    def __init__(self, join: Join, kernels: Kernels) -> None:
        self.kernels, self.join = kernels, join
        # NOT IN with more than one column or a residual condition has no key to look rows up by. With a TTL every match
        # is counted, those by null too: what they hid stays hidden when they expire, and is never taken back.
        expires = any(source.ttl_ms is not None for source in join.inputs)
        rewritten = join.null_aware and (len(join.keys) > 1 or join.where is not None or expires)
        self._run = null_aware_as_condition(join) if rewritten else join
        self._condition = self._run.condition
        self._tables = self._make_tables()

    @property
    def tables(self) -> tuple[KeyedTable, KeyedTable]:
        """The state of each input."""
        return self._tables

    def _make_tables(self) -> tuple[KeyedTable, KeyedTable]:
        join, kernels = self._run, self.kernels
        counted = (True, False) if join.how in ("semi", "anti") else join.outer

        def table(side: int) -> KeyedTable:
            return KeyedTable(
                kernels,
                join.inputs[side],
                [KeySet(join.key_columns(side), join.key_types, join.key_columns(side, strict=True))],
                counts=[COUNT_COLUMN] if counted[side] else [],
                findable=not join.inputs[side].insert_only or join.inputs[side].ttl_ms is not None,
                track_null_keys=join.null_aware and side == 1,
            )

        return table(0), table(1)

    def prepare(self, changes: tuple[Ingested, ...], clock_ms: int, watermark_ms: int | None) -> Output:
        """Compute one micro-batch; no watermark matters."""
        del watermark_ms
        return self._prepare(self._run, changes, clock_ms)

    def prepare_net(self, changes: tuple[Ingested, ...], clock_ms: int) -> Output:
        """As `prepare`, but only the net change is said, whatever the join's ``emit``."""
        return self._prepare(dataclasses.replace(self._run, emit="per_batch"), changes, clock_ms)

    def _prepare(self, join: Join, changes: tuple[Ingested, ...], clock_ms: int) -> Output:
        started = time.perf_counter()
        kernels, xp = self.kernels, self.kernels.xp
        net = join.emit == "per_batch"
        total = sum(c.kinds.size for c in changes)
        expired = [t.expire(clock_ms) for t in self.tables]
        event_kinds = None if net else xp.zeros(2 * total + 2, np.int8)
        sides: list[Lifetimes] = []
        for table, change in zip(self.tables, changes, strict=True):
            frame = kernels.frame(change.table)
            sides.append(apply_changes(table, frame, change, event_kinds, net=net))
        both = sides[0], sides[1]
        updated = time.perf_counter()
        find = net_pairs if net else timed_pairs
        pairs = find(self.tables, both, self._condition, (join.left.name, join.right.name))
        probed = time.perf_counter()
        operator = semi_anti if join.how in ("semi", "anti") else regular
        rows = operator.emit(join, self.tables, both, pairs, event_kinds)
        output, frames = changelog_table(self.join, kernels, self.tables, rows)
        if net and operator is regular and regular.may_cancel(join, self.tables, both, rows):
            columns = tuple(c.name for c in self.join.output)
            types = tuple(c.type for c in self.join.output)
            left_over = fold(kernels, frames, rows.kinds == DELETE, columns, types)
            if left_over.size < rows.size:
                rows = rows.pick(left_over)
                output, _ = changelog_table(self.join, kernels, self.tables, rows)
        metrics: dict[str, int | float] = {}
        for side, name in enumerate(SIDES):
            metrics[f"{name}_unknown_retractions"] = int(sides[side].unknown)
            metrics[f"{name}_expired"] = expired[side]
        metrics |= {
            "update_ms": (updated - started) * 1e3,
            "probe_ms": (probed - updated) * 1e3,
            "emit_ms": (time.perf_counter() - probed) * 1e3,
        }
        if rows.removed is None:
            kinds = kernels.asnumpy(rows.kinds)
        else:
            kinds = np.full(rows.size, INSERT, np.int8)
            kinds[: rows.removed] = DELETE
        sequence = np.zeros(kinds.size, np.int64) if net else kernels.asnumpy(rows.instants) >> 1
        return Output(output, sequence, kinds, metrics)

    def restore(self, state: Mapping[str, pa.Table], settle: Callable[[], None]) -> None:
        """Take over a snapshot.

        Raises:
            StateError: it lacks a column.
        """
        for name, table in zip(SIDES, self.tables, strict=True):
            table.restore(state[name], settle)


def null_aware_as_condition(join: Join) -> Join:
    """``NOT IN`` written out: no key, but a condition that is not false where it is unknown.

    It compares every pair, which a lookup by key avoids; needed only for several columns, a residual condition
    or a TTL (Flink plans it so always: ``OR(IS NULL(k), IS NULL(k0), =(k, k0))``). What is compared null-safely
    is never unknown.
    """
    left, right = join.left.name, join.right.name

    def not_false(key: Key) -> str:
        a, b = f"{name(left)}.{name(key.left)}", f"{name(right)}.{name(key.right)}"
        return f"({a} <=> {b})" if key.null_safe else f"({a} IS NULL OR {b} IS NULL OR {a} = {b})"

    def name(text: str) -> str:
        return "`" + text.replace("`", "``") + "`"

    terms = [not_false(k) for k in join.keys]
    if join.where is not None:
        terms.append(f"({join.where})")
    return dataclasses.replace(join, keys=(), null_aware=False, where=" AND ".join(terms))
