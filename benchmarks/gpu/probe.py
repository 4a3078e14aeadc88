"""A million changes looked up in a state of 1M to 1B rows, three ways that must find the same pairs.

- `sorted_run`: what the engine does: hashes, `gpu_ops.state.index.HashIndex.probe`, and a comparison of the keys of
  the candidates, since hashes may collide. `search` is its innermost part, `gpu_ops.kernels.Kernels.search` alone.
- `inner_join`: libcudf's hash join of the two key columns, which builds on the needles and passes over the state.
- `mixed_inner_join`: the same with a condition beside the keys (here one that is always true).

The joins' pairs come in no order, and what sorting them would cost is left out of their times.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.gpu.card import INPUTS, SECTOR, Plan, device_frame, free_bytes, lacks_memory
from gpu_ops.kernels import Array, Kernels, as_slots
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
        """Of a frame's keys."""
        return self.kernels.hash_rows(frame, ["k"], [pa.int64()])

    def sorted_run(self, keys: Array) -> Pairs:
        """Needles and rows with equal keys, by needle."""
        kernels, frame = self.kernels, _frame(keys)
        at, slots = self.index.probe(self.hashes(frame), staged=False)
        own, found = kernels.take(frame, at, ["k"]), kernels.take(self.frame, slots, ["k"])
        kept = kernels.xp.flatnonzero(kernels.equal_rows(own, ["k"], found, ["k"], [pa.int64()]))
        return at[kept], slots[kept]

    def search(self, needles: Array) -> Pairs:
        """Candidates of ascending half hashes in the one run there is."""
        (run,) = self.index.runs
        return self.kernels.search(run.entries, run.directory, run.shift, needles)


def _frame(keys: Array) -> Any:
    return device_frame({"k": keys}, {"k": pa.int64()})


def inner_join(needles: Array, state: Array) -> tuple[Any, Any]:
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
    first, second = (values(column, np.int32).astype(np.int64) for column in maps)
    packed = xp.sort((first << 32) | second)
    return packed >> 32, packed & 0xFFFFFFFF


def equal_pairs(kernels: Kernels, found: dict[str, Pairs], where: str) -> None:
    """All ways found the same pairs.

    Raises:
        AssertionError: they did not.
    """
    (name, wanted), *others = found.items()
    for other, pairs in others:
        if not all(bool(kernels.xp.array_equal(a, b)) for a, b in zip(pairs, wanted, strict=True)):
            raise AssertionError(f"{other} differs from {name}: {where}")


def probe(kernels: Kernels, sizes: Sequence[int], needles: int, plan: Plan) -> dict[str, Any]:
    """All ways at each size of the state; half of the needles are in it.

    Returns:
        ``sizes``, one entry per size that fits, and ``left_out``, why the others are missing.
    """
    free = free_bytes()
    measured: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    for rows in sizes:
        why = lacks_memory(_BYTES_PER_ROW * rows, free) or plan.clock.lacks(5 + _NANOSECONDS_PER_ROW * rows / 1e9)
        if why is None:
            try:
                measured.append(_at(kernels, rows, needles, plan))
                continue
            except MemoryError as error:
                why = f"memory: {error}"
        left_out[str(rows)] = why
        print("probe", rows, "left out:", why, flush=True)
    return {"needles": needles, "sizes": measured, "left_out": left_out}


def _at(kernels: Kernels, rows: int, needles: int, plan: Plan) -> dict[str, Any]:
    xp, state, rng = kernels.xp, State(kernels, rows), np.random.default_rng(rows)
    sets = [kernels.asarray(rng.integers(0, 2 * rows, needles)) for _ in range(INPUTS)]
    halves = [xp.sort(state.hashes(_frame(keys)) >> np.uint64(32)) for keys in sets]
    least = xp.zeros(needles, np.int32)
    place = xp.arange(rows, dtype=np.int32)

    def mixed(keys: Array) -> Any:
        return mixed_join((keys, state.keys), ([least], [place]), both=False)

    found = {
        "sorted_run": state.sorted_run(sets[0]),
        "inner_join": sorted_pairs(kernels, inner_join(sets[0], state.keys)),
        "mixed_inner_join": sorted_pairs(kernels, mixed(sets[0])),
    }
    equal_pairs(kernels, found, f"{needles} needles, {rows} rows")
    matches, candidates = int(found["sorted_run"][0].size), int(state.search(halves[0])[0].size)
    del found
    pass_over = 8 * (rows + needles) + 8 * matches
    looked_at = (8 + 2 * SECTOR) * needles + 16 * candidates
    ways = {
        "search": ([partial(state.search, half) for half in halves], looked_at),
        "sorted_run": ([partial(state.sorted_run, keys) for keys in sets], looked_at + (SECTOR + 24) * candidates),
        "inner_join": ([partial(inner_join, keys, state.keys) for keys in sets], pass_over),
        "mixed_inner_join": ([partial(mixed, keys) for keys in sets], pass_over + 4 * (rows + needles)),
    }
    figures = {name: plan.figure(works, moved) for name, (works, moved) in ways.items()}
    print("probe", rows, {name: round(f["ms"].median, 3) for name, f in figures.items()}, flush=True)
    return {"rows": rows, "candidates": candidates, "matches": matches, **figures}
