"""Feeding engines: backends under test, events as Arrow micro-batches, changelogs as plain rows."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gpu_ops.descriptions.description import Description
from gpu_ops.descriptions.multi_join import MultiJoin
from gpu_ops.join_engine import JoinEngine
from gpu_ops.state import pieces

BACKENDS = ("cpu", "cpu-tiny", "cpu-disk", "gpu", "gpu-tiny")
ROW_KIND = "row_kind"
ADDS = ("+I", "+U")

Row = tuple[Any, ...]
Event = tuple[int, str, Row]
"""Input (0 is the left or the first), row kind, values."""
Change = tuple[str, Row]


@functools.cache
def gpu_status() -> tuple[bool, str]:
    """Whether a card answers, and why not."""
    from gpu_ops.backends import gpu_available

    return gpu_available()


@dataclasses.dataclass(frozen=True)
class Backend:
    """A backend to test on; ``-tiny`` is the same with the smallest segments."""

    name: str
    probe: str = "auto"

    @property
    def gpu(self) -> bool:
        return self.name.startswith("gpu")

    def engine(self, join: Description, **options: Any) -> Any:
        """A fresh engine as a context manager that closes it."""
        kind = "gpu" if self.gpu else "cpu"
        tiny = self.name.endswith(("-tiny", "-disk"))
        if self.name.endswith("-disk"):
            options = {"memory_limit": all_on_disk(), **options}
        return contextlib.closing(JoinEngine(join, backend=kind, tiny=tiny, probe=self.probe, **options))

    def engine_within(self, join: Description, host_bytes: int) -> Any:
        """A fresh engine whose state has so many bytes of host memory, and none on a GPU."""
        from gpu_ops.memory import Budget

        made = self.engine(join, memory_limit=Budget(host=host_bytes, disk=0))
        if self.gpu:
            made.thing.memory.budget.gpu = 1
        return made


def all_on_disk() -> Any:
    """A budget by which all that can lie on disk does. What stands for a disk is memory: none is waited for."""
    from gpu_ops.memory import Budget

    class Nothing(Budget):
        def host_excess(self, owner: object, host: int) -> int:
            del owner
            return host

        def check_host(self, owner: object, host: int) -> None:
            del owner, host

    memory = Path("/dev/shm")
    return Nothing(folder=str(memory) if memory.is_dir() else None)


@dataclasses.dataclass(frozen=True)
class Cut:
    """One micro-batch: events ``start`` to ``stop`` of a trace."""

    start: int
    stop: int
    inputs: Mapping[str, Any]
    """Arguments of ``JoinEngine.process`` by name."""
    batches: tuple[pa.Table | None, ...] = ()
    """Its arguments by position: a multi-way join's inputs."""


def tables(join: Description, events: Sequence[Event]) -> list[tuple[pa.Table, np.ndarray]]:
    """Per side: the events as an Arrow table, and the position of each in the sequence."""
    found = []
    for side, source in enumerate(join.inputs):
        own = [(i, kind, row) for i, (s, kind, row) in enumerate(events) if s == side]
        names, arrays = list(source.schema.names), []
        for c, field in enumerate(source.schema):
            arrays.append(pa.array([row[c] for _, _, row in own], field.type))
        if source.row_kind is not None:
            names.append(source.row_kind)
            arrays.append(pa.array([kind for _, kind, _ in own], pa.string()))
        found.append((pa.table(arrays, names=names), np.array([i for i, _, _ in own], np.int64)))
    return found


def rows_between(
    sides: Sequence[tuple[pa.Table, np.ndarray]],
    start: int,
    stop: int,
    rng: np.random.Generator | None,
    *,
    keep_empty: bool,
) -> dict[str, Any]:
    """The rows at positions ``start`` to ``stop`` as arguments of ``JoinEngine.prepare``.

    Args:
        sides: as `tables` gives them.
        start: of the first row.
        stop: after the last.
        rng: mixes the rows of a side; None keeps them in order.
        keep_empty: a side without rows may be left out or be an empty table: both have to work.
    """
    inputs: dict[str, Any] = {}
    for name, (part, order) in zip(("left", "right"), parts_between(sides, start, stop, rng), strict=True):
        if len(order) or keep_empty:
            inputs[name], inputs[f"{name}_order"] = part, order
    return inputs


def parts_between(
    sides: Sequence[tuple[pa.Table, np.ndarray]], start: int, stop: int, rng: np.random.Generator | None
) -> Iterator[tuple[pa.Table, np.ndarray]]:
    """Per side, the rows at positions ``start`` to ``stop``, and those positions."""
    for table, position in sides:
        low, high = np.searchsorted(position, [start, stop])
        part, order = table.slice(low, high - low), position[low:high]
        if rng is not None and len(order):
            mixed = rng.permutation(len(order))
            part, order = part.take(mixed), order[mixed]
        yield part, order


def cuts(
    join: Description, events: Sequence[Event], split: int | Sequence[int], *, shuffle: int | None = None
) -> Iterator[Cut]:
    """The events as micro-batches.

    Args:
        join: for the schemas.
        events: in total order.
        split: events per micro-batch, or the size of each (repeated as often as needed).
        shuffle: a seed: rows come in any order, and only the order arrays tell the right one.
    """
    sides = tables(join, events)
    rng = None if shuffle is None else np.random.default_rng(shuffle)
    sizes = [split] if isinstance(split, int) else list(split)
    start = number = 0
    while start < len(events):
        stop = min(len(events), start + max(1, sizes[number % len(sizes)]))
        empty = bool(number % 2)
        if isinstance(join, MultiJoin):
            parts = list(parts_between(sides, start, stop, rng))
            batches = tuple(part if len(order) or empty else None for part, order in parts)
            yield Cut(start, stop, {"orders": [order for _, order in parts]}, batches)
        else:
            yield Cut(start, stop, rows_between(sides, start, stop, rng, keep_empty=empty))
        start, number = stop, number + 1


def canonical(value: Any) -> Any:
    """A value that compares as the engine does: NaN equals NaN, -0.0 equals 0.0."""
    if isinstance(value, float):
        return ("NaN",) if math.isnan(value) else value + 0.0
    if isinstance(value, list | tuple):
        return tuple(canonical(v) for v in value)
    if isinstance(value, dict):
        return tuple((k, canonical(v)) for k, v in value.items())
    return value


def rows(table: pa.Table) -> list[Row]:
    """A table's rows as canonical tuples; timestamps as integers of their unit."""
    columns = []
    for given in table.columns:
        column = given.cast(pa.int64()) if pa.types.is_timestamp(given.type) else given
        values = column.to_pylist()
        plain = pa.types.is_integer(column.type) or pa.types.is_string(column.type)
        columns.append(values if plain else [canonical(v) for v in values])
    return list(zip(*columns, strict=True)) if columns else []


def changes(changelog: pa.Table) -> list[Change]:
    """A changelog as ``(kind, values)``."""
    if not changelog.num_rows:
        return []
    kinds = changelog.column(ROW_KIND).to_pylist()
    return list(zip(kinds, rows(changelog.drop_columns([ROW_KIND])), strict=True))


def fold(found: Sequence[Change], into: Counter[Row] | None = None) -> Counter[Row]:
    """The table that a changelog makes, as counts per row; rows with count 0 are left out."""
    total: Counter[Row] = Counter() if into is None else into
    for kind, row in found:
        total[row] += 1 if kind in ADDS else -1
        if not total[row]:
            del total[row]
    return total


def signed(found: Sequence[Change]) -> Counter[Change]:
    """A multiset of changes in which ``+U`` counts as ``+I`` and ``-U`` as ``-D``."""
    return Counter(("+" if kind in ADDS else "-", row) for kind, row in found)


def run(engine: Any, cut: Cut, **options: Any) -> tuple[list[Change], np.ndarray, Any]:
    """Process one micro-batch: its changes, the event each belongs to, and the `MicroBatch`."""
    batch = engine.prepare(*cut.batches, **cut.inputs, **options)
    engine.commit()
    assert batch.changelog.schema.equals(engine.description.output_schema)
    found = changes(batch.changelog)
    assert len(batch.sequence) == len(found)
    return found, np.asarray(batch.sequence) + cut.start, batch


def run_all(
    backend: Backend, join: Description, events: Sequence[Event], split: int | Sequence[int], **options: Any
) -> tuple[list[Change], list[int]]:
    """A whole trace through a fresh engine: all changes in order, and the event of each."""
    found: list[Change] = []
    event: list[int] = []
    with backend.engine(join) as engine:
        for cut in cuts(join, events, split, **options):
            got, position, _ = run(engine, cut)
            found += got
            event += [int(p) for p in position]
    return found, event


def by_event(found: Sequence[Change], event: Sequence[int]) -> dict[int, Counter[Change]]:
    """The multiset of changes of each event that caused any."""
    groups: dict[int, Counter[Change]] = {}
    for change, e in zip(found, event, strict=True):
        groups.setdefault(int(e), Counter())[change] += 1
    return groups


def same_by_event(
    expected: Mapping[int, Mapping[Any, int]],
    found: Mapping[int, Mapping[Any, int]],
    events: Sequence[Any],
    case: str = "",
) -> None:
    """Assert that each event gives the same multiset of changes, and nothing is of an event that there is not."""
    for number, event in enumerate(events):
        wrong = difference(expected.get(number, {}), found.get(number, {}))
        assert not wrong, f"{case} event {number} {event}:\n{wrong}"
    assert set(found) <= set(range(len(events))), f"{case} changes of events that do not exist"


def difference(expected: Mapping[Any, int], found: Mapping[Any, int], limit: int = 8) -> str:
    """What is missing and what is too much, for an assertion's message; empty when equal."""
    lines = []
    for key in list({**expected, **found}):
        n = found.get(key, 0) - expected.get(key, 0)
        if n:
            lines.append(f"  {'too much' if n > 0 else 'missing '} x{abs(n)}: {key}")
    return "\n".join(lines[:limit] + ([f"  ... {len(lines) - limit} more"] if len(lines) > limit else []))


def identical(first: pa.Table, second: pa.Table) -> bool:
    """The same rows in the same order, NaN being equal to itself (to Arrow it is not)."""
    return first.schema == second.schema and str(first.to_pylist()) == str(second.to_pylist())


def as_multiset(table: pa.Table) -> Counter[str]:
    """Rows in any order; ``repr`` makes NaN equal to itself."""
    return Counter(map(repr, table.to_pylist()))


def same_after_restarts(
    backend: Backend, join: Description, parts: Sequence[Any], run: Callable[..., Any] = run, *, every: int = 2
) -> None:
    """A snapshot, whole or in pieces, restored into a fresh engine goes on with the same rows, whoever wrote it."""
    cpu, current, folder = Backend("cpu"), Backend("cpu"), InPieces()
    with contextlib.ExitStack() as stack:
        whole, other = (stack.enter_context(one.engine(join)) for one in (cpu, backend))
        for number, cut in enumerate(parts):
            expected, got = run(whole, cut), run(other, cut)
            assert by_event(*got[:2]) == by_event(*expected[:2]), f"{join}, events {cut.start} to {cut.stop - 1}"
            stored = folder.stored(other)
            if number % every == 1:
                state = other.snapshot()
                other.close()
                other = stack.enter_context(current.engine(join))
                current = cpu if current == backend else backend
                other.restore(stored if number % (2 * every) == 1 else state)
                same_state(other, state)


class InPieces:
    """Snapshots in pieces of a few rows, in a dictionary in place of files."""

    def __init__(self) -> None:
        self.files: dict[str, pieces.Content] = {}

    def stored(self, engine: JoinEngine) -> dict[str, pieces.FromSnapshot]:
        """A snapshot of an engine, as a state folder would have it."""
        found: dict[str, pieces.FromSnapshot] = {}
        for name, kept in engine.kept().items():
            if isinstance(kept, pa.Table):
                found[name] = kept
                continue
            kept.pieces = kept.pieces if all(piece.name in self.files for piece in kept.pieces) else ()
            flush = kept.flush()
            written = pieces.write(flush, self.files.__getitem__, self._store, 200)
            kept.pieces = written.installed(flush.pieces, kept.pieces)
            read = self.files.__getitem__
            found[name] = pieces.StoredTable(written.numbers.to_reader, written.pieces, written.columns, read)
        return found

    def _store(self, content: pieces.Content) -> str:
        self.files[name := str(len(self.files))] = content
        return name


def same_after_discards(
    backend: Backend, join: Description, parts: Sequence[Any], run: Callable[..., Any] = run, *, step: int = 1
) -> None:
    """Another micro-batch, ``step`` behind, prepared and discarded first makes no difference; nor does the same one."""
    with backend.engine(join) as plain, backend.engine(join) as retried:
        for number, cut in enumerate(parts):
            before = retried.snapshot()
            for first in (parts[(number + step) % len(parts)], cut):
                retried.prepare(*getattr(first, "batches", ()), **first.inputs)
                retried.discard()
                same_state(retried, before)
            one, other = run(plain, cut), run(retried, cut)
            assert identical(one[2].changelog, other[2].changelog)
            assert list(one[1]) == list(other[1])


def same_state(engine: Any, expected: Mapping[str, pa.Table]) -> None:
    """An engine's state is that of a snapshot, in whichever order."""
    for name, table in engine.snapshot().items():
        assert as_multiset(table) == as_multiset(expected[name]), name
