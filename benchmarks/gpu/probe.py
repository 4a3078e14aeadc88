"""Changes looked up in a state of 1M to 1B rows, in ways that must find the same pairs.

- `sorted_run`: what the engine does: hashes, `gpu_ops.state.index.HashIndex.probe`, and a comparison of the keys of
  the candidates, since hashes may collide. Its innermost part, `gpu_ops.kernels.Kernels.search` alone, goes each of the
  ways that `gpu_ops.cudf_backend.probe` chooses from: `search`, `search_by_join` and, where the installed
  pylibcudf has `HashJoin`, `search_by_table` in a table that is kept, which `build_table` makes. ``by_model`` has the
  milliseconds that it counts on.
- `inner_join`: libcudf's hash join of the two key columns, which builds on the needles and passes over the state.
- `mixed_inner_join`: the same with a condition beside the keys (here one that is always true).

The joins' pairs come in no order, and what sorting them would cost is left out of their times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.gpu.card import INPUTS, SECTOR, Plan, device_frame, free_bytes, lacks_memory
from gpu_ops import layouts
from gpu_ops.arrays import Array
from gpu_ops.kernels import Kernels, as_slots
from gpu_ops.state.index import HashIndex

Pairs = tuple[Array, Array]
_BYTES_PER_ROW = 80
"""Of the card's memory while an index is built: keys, hashes, entries, what sorting needs, the directory."""
_NANOSECONDS_PER_ROW = 25.0
"""To build and to search, guessed, for the time budget."""


class State:
    """Rows of one int64 key column, each with a key of its own, and the index over it.

    Args:
        kernels: the GPU backend.
        rows: how many; row i has the key i.
    """

    def __init__(self, kernels: Kernels, rows: int) -> None:
        self.kernels, self.rows = kernels, rows
        self.keys = kernels.xp.arange(rows, dtype=np.int64)
        self.frame = _frame(self.keys)
        self.index = HashIndex(kernels)
        self.index.stage(self.hashes(self.frame), as_slots(kernels, 0, rows))
        self.index.commit()

    def hashes(self, frame: Any) -> Array:
        """The hashes of a frame's keys."""
        return self.kernels.hash_rows(frame, ["k"], [pa.int64()])

    def sorted_run(self, keys: Array) -> Pairs:
        """Needles and rows with equal keys, by needle."""
        kernels, frame = self.kernels, _frame(keys)
        at, slots = self.index.probe(self.hashes(frame), staged=False)
        own, found = kernels.take(frame, at, ["k"]), kernels.take(self.frame, slots, ["k"])
        kept = kernels.xp.flatnonzero(kernels.equal_rows(own, ["k"], found, ["k"], [pa.int64()]))
        return at[kept], slots[kept]

    def search(self, needles: Array) -> Array:
        """Candidates of ascending entries in the one run there is, as pairs in any order."""
        from gpu_ops.cudf_backend.search import search_runs

        return search_runs(self.index.runs, needles, None, by_candidate=False)

    def joined(self, needles: Array, *, kept: bool) -> Array:
        """Finds the pairs by hash joins, with a new or a kept hash table."""
        from gpu_ops.cudf_backend.probe import ProbeWays, by_hash

        ways = ProbeWays([0], [], []) if kept else ProbeWays([], [0], [])
        (found,) = by_hash(self.index.runs, ways, needles, None, by_candidate=False)
        return found

    def table(self) -> object:
        """A table of the run, made anew."""
        from gpu_ops.cudf_backend.probe import KeptTable

        return KeptTable(self.index.runs[0].entries)


def _frame(keys: Array) -> Any:
    return device_frame({"k": keys}, {"k": pa.int64()})


def inner_join(state: Array, needles: Array) -> tuple[Any, Any]:
    """Gather maps of libcudf's join, in any order."""
    import pylibcudf as plc

    from gpu_ops.cudf_backend.frame import from_values

    left, right = (plc.Table([from_values(keys)]) for keys in (needles, state))
    found: tuple[Any, Any] = plc.join.inner_join(left, right, plc.types.NullEquality.UNEQUAL)
    return found


def mixed_join(keys: tuple[Array, Array], conditional: tuple[Sequence[Array], Sequence[Array]], both: bool) -> Any:
    """Gather maps of rows with equal keys within bounds, in any order.

    Args:
        keys: those of the needles and those of the state.
        conditional: of the needles the least value and, with ``both``, the greatest; of the state the value.
        both: whether there is a greatest.
    """
    import pylibcudf as plc
    from pylibcudf.expressions import ASTOperator, ColumnReference, Operation, TableReference

    from gpu_ops.cudf_backend.frame import from_values

    value = ColumnReference(0, TableReference.RIGHT)
    condition = Operation(ASTOperator.GREATER_EQUAL, value, ColumnReference(0, TableReference.LEFT))
    if both:
        late = Operation(ASTOperator.LESS_EQUAL, value, ColumnReference(1, TableReference.LEFT))
        condition = Operation(ASTOperator.LOGICAL_AND, condition, late)
    tables = [plc.Table([from_values(key)]) for key in keys]
    tables += [plc.Table([from_values(column) for column in columns]) for columns in conditional]
    return plc.join.mixed_inner_join(*tables, condition, plc.types.NullEquality.UNEQUAL)


def sorted_pairs(kernels: Kernels, maps: tuple[Any, Any]) -> Pairs:
    """Gather maps as arrays (int64), by needle, then by row."""
    from gpu_ops.cudf_backend.frame import values

    xp = kernels.xp
    if not maps[0].size():
        return xp.empty(0, np.int64), xp.empty(0, np.int64)
    return _in_order(kernels, layouts.pairs(*(values(column, np.int32).astype(np.int64) for column in maps)))


def _in_order(kernels: Kernels, pairs: Array) -> Pairs:
    return layouts.unpaired(kernels.xp.sort(pairs))


def equal_pairs(kernels: Kernels, found: dict[str, Pairs], where: str) -> None:
    """All ways found the same pairs.

    Raises:
        AssertionError: they did not.
    """
    (name, wanted), *others = found.items()
    for other, pairs in others:
        if not all(bool(kernels.xp.array_equal(a, b)) for a, b in zip(pairs, wanted, strict=True)):
            raise AssertionError(f"{other} differs from {name}: {where}")


def probe(kernels: Kernels, sizes: Sequence[int], needles: Sequence[int], plan: Plan) -> dict[str, Any]:
    """All ways at each size of the state and number of needles, half of which are in it.

    Returns:
        ``sizes``, one entry per size that fits and number of needles; in it a way that ran out of memory is
        ``left_out``. And ``left_out``, why whole sizes are missing; ``tables``, whether any can be kept.
    """
    from gpu_ops.cudf_backend.probe import table_class

    free = free_bytes()
    measured: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    for rows in sizes:
        why = lacks_memory(_BYTES_PER_ROW * rows, free) or plan.clock.lacks(5 + _NANOSECONDS_PER_ROW * rows / 1e9)
        if why is None:
            try:
                state = State(kernels, rows)
                measured += [_at(state, count, plan) for count in needles]
                del state
                continue
            except MemoryError as error:
                why = f"memory: {error}"
        left_out[str(rows)] = why
        print("probe", rows, "left out:", why, flush=True)
    return {"sizes": measured, "left_out": left_out, "tables": table_class() is not None}


def _at(state: State, needles: int, plan: Plan) -> dict[str, Any]:
    from gpu_ops.cudf_backend import probe as model

    kernels, xp, rows = state.kernels, state.kernels.xp, state.rows
    rng = np.random.default_rng([rows, needles])
    sets = [kernels.asarray(rng.integers(0, 2 * rows, needles)) for _ in range(INPUTS)]
    numbers = as_slots(kernels, 0, needles)
    entries = [xp.sort(layouts.entries(state.hashes(_frame(keys)), numbers)) for keys in sets]
    least, place = xp.zeros(needles, np.int32), xp.arange(rows, dtype=np.int32)

    def mixed(keys: Array) -> Any:
        return mixed_join((keys, state.keys), ([least], [place]), both=False)

    wanted, candidates = state.sorted_run(sets[0]), _in_order(kernels, state.search(entries[0]))
    matches, near = int(wanted[0].size), int(candidates[0].size)
    pass_over, looked_at = 8 * (rows + needles) + 8 * matches, (8 + 2 * SECTOR) * needles + 16 * near
    # a way, its inputs, the bytes it must move, and a check of the pairs it found for the first input
    ways: dict[str, tuple[Callable[[Array], Any], list[Array], int, Callable[[Any], Pairs], Pairs]] = {
        "search": (state.search, entries, looked_at, partial(_in_order, kernels), candidates),
        "search_by_join": (
            partial(state.joined, kept=False),
            entries,
            8 * (rows + needles) + 16 * near,
            partial(_in_order, kernels),
            candidates,
        ),
        "sorted_run": (state.sorted_run, sets, looked_at + (SECTOR + 24) * near, tuple, wanted),
        "inner_join": (partial(inner_join, state.keys), sets, pass_over, partial(sorted_pairs, kernels), wanted),
        "mixed_inner_join": (mixed, sets, pass_over + 4 * (rows + needles), partial(sorted_pairs, kernels), wanted),
    }
    by_model = {
        "search": model.search_seconds(1, needles),
        "search_by_join": model.join_seconds(rows, needles),
    }
    figures: dict[str, Any] = {}
    if model.table_class() is not None:
        by_table, held = partial(state.joined, kept=True), 2 * SECTOR * needles + 16 * near
        ways["search_by_table"] = (by_table, entries, held, partial(_in_order, kernels), candidates)
        by_model["search_by_table"] = model.PROBED_SECONDS * needles + model.JOIN_SECONDS
        by_model["build_table"] = model.BUILT_SECONDS * rows
        try:
            figures["build_table"] = plan.figure([state.table], (8 + model.KEPT_BYTES) * rows)
        except MemoryError as error:
            figures["build_table"] = {"left_out": f"memory: {error}"}
    for name, (way, inputs, moved, pairs, right) in ways.items():
        try:
            equal_pairs(kernels, {"sorted_run": right, name: pairs(way(inputs[0]))}, f"{needles} needles, {rows} rows")
            figures[name] = plan.figure([partial(way, given) for given in inputs], moved)
        except MemoryError as error:
            figures[name] = {"left_out": f"memory: {error}"}
    said = {name: round(f["ms"].median, 3) if "ms" in f else f["left_out"] for name, f in figures.items()}
    print("probe", rows, "rows", needles, "needles", said, "ms", flush=True)
    counts = {"rows": rows, "needles": needles, "candidates": near, "matches": matches}
    return {**counts, "by_model": {name: 1e3 * seconds for name, seconds in by_model.items()}, **figures}
