"""How the cost of a change grows with what is there: size doubled four times, by operator and shape of its input.

Of each operator and shape a state of n rows is made, and one change and a micro-batch of n changes are prepared and
discarded: process time, the least of some, the peak of NumPy's memory, and how many rows were gathered and candidates
looked at in the last turn. Growth is the exponent of n: 0 is constant, 1 is linear. What is expected is beside it: a
change may cost as much as its result has rows, no more. Where rows go, a change is the deletion of an equal row, or of
the least and the greatest of a group, a half of which has gone before.

    python -m benchmarks.growth [--rows 1000] [--rounds 3] [--quick]
"""

from __future__ import annotations

import contextlib
import math
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple
from unittest import mock

import numpy as np
import pyarrow as pa

from benchmarks.common import arguments, plot_path, record
from cpu_fallback.kernels import CpuKernels
from cpu_fallback.store import CpuStore
from gpu_ops import (
    Aggregate,
    Asof,
    AsofJoin,
    Input,
    Interval,
    IntervalJoin,
    Join,
    JoinEngine,
    Key,
    Latest,
    LookupJoin,
    MultiJoin,
    Order,
    TemporalJoin,
    Top,
)
from gpu_ops.state.runs import Runs

DOUBLED: Final = 4
"""How often the size is doubled."""
COLUMNS: Final = {"id": pa.int64(), "k": pa.int64(), "t": pa.int64(), "s": pa.string()}


class Shape(NamedTuple):
    """The shape of an input's rows and changes.

    Attributes:
        keys: of n rows, how many keys there are.
        text: how many characters each of n rows has.
        wide: further columns.
        ties: whether all have one time.
        deletes: whether as many again came and went.
        goes: whether the changes take rows: the first and the last that there are.
        equal: whether all rows are equal.
    """

    keys: Callable[[int], int] = lambda n: n
    text: Callable[[int], int] = lambda _: 4
    wide: int = 0
    ties: bool = False
    deletes: bool = False
    goes: bool = False
    equal: bool = False

    def gone(self, n: int) -> list[int]:
        """Numbers of rows that have gone before."""
        return [*range(n // 4), *range(n - n // 4, n)] if self.goes else []

    def changed(self, n: int) -> dict[str, Any]:
        """Numbers of rows that one change is about, or two where rows go, and a micro-batch of many."""
        if not self.goes:
            return {"change": range(n, n + 1), "micro-batch": range(n, 2 * n)}
        return {"change": [n // 4, n - n // 4 - 1], "micro-batch": range(n // 4, n - n // 4)}


SHAPES: Final = {
    "hot key": Shape(lambda _: 1),
    "ties": Shape(lambda _: 1, ties=True),
    "many keys": Shape(),
    "wide rows": Shape(wide=30),
    "long text": Shape(text=lambda n: n // 20),
    "deletes": Shape(lambda _: 1, deletes=True),
    "best goes": Shape(lambda _: 1, goes=True),
    "equal goes": Shape(lambda _: 1, goes=True, equal=True),
}
"""By name. In joins by time and ``latest`` a hot key is one with many versions."""


class Curve(NamedTuple):
    """An operator, and how what one change costs may grow.

    Attributes:
        made: the description, of a function that gives an input by its number.
        filled: inputs that have n rows; the change is one of each of the others, or of each where all are filled.
        linear: shapes in which the result of one change has as many rows as there are; of no other is it more than
            constant, and a micro-batch of n changes is linear.
        timed: whether it takes insertions only.
    """

    made: Callable[[Callable[..., Input]], Any]
    filled: tuple[int, ...] = (0,)
    linear: tuple[str, ...] = ()
    timed: bool = False


KEYS: Final = (Key("k0", "k1"),)
ALL_MATCH: Final = ("hot key", "ties", "deletes")


def _join(how: Any) -> Callable[[Callable[..., Input]], Any]:
    return lambda given: Join(how, given(0), given(1), KEYS)


def _aggregate(**calls: str) -> Callable[[Callable[..., Input]], Any]:
    return lambda given: Aggregate.of(given(0), ("k0",), calls, "per_batch")


def _multi(given: Callable[..., Input]) -> MultiJoin:
    return MultiJoin.of([given(0), given(1), given(2)], [("k0", "k1"), ("i0.k0", "k2")], "inner")


def _interval(given: Callable[..., Input]) -> IntervalJoin:
    sides = given(0, event_time="t0"), given(1, event_time="t1")
    return IntervalJoin("inner", *sides, KEYS, interval=Interval(0, 0))


def _temporal(given: Callable[..., Input]) -> TemporalJoin:
    return TemporalJoin("left", given(0, event_time="t0"), given(1, event_time="t1", unique_key=("k1",)), KEYS)


def _asof(given: Callable[..., Input]) -> AsofJoin:
    sides = given(0, event_time="t0"), given(1, event_time="t1", sequence_by="id1")
    return AsofJoin("left", *sides, KEYS, asof=Asof("backward"))


CURVES: Final = {
    "join inner": Curve(_join("inner"), linear=ALL_MATCH),
    "join left": Curve(_join("left"), linear=ALL_MATCH),
    "join semi": Curve(_join("semi"), (0, 1)),
    "join anti": Curve(_join("anti"), (0, 1)),
    "multi-way join": Curve(_multi, linear=ALL_MATCH),  # of its first two inputs
    "interval join": Curve(_interval, linear=("ties",), timed=True),
    "temporal join": Curve(_temporal, (1,), timed=True),
    "ASOF join": Curve(_asof, (1,), timed=True),
    "lookup join": Curve(lambda given: LookupJoin("left", given(0), given(1), KEYS), (1,), ALL_MATCH),
    "count, sum, avg": Curve(_aggregate(n="count(*)", s="sum(t0)", a="avg(t0)")),
    "min, max": Curve(_aggregate(a="min(t0)", b="max(s0)")),
    "first, last": Curve(_aggregate(a="first(t0)", b="last(s0)")),
    "count distinct": Curve(_aggregate(d="count(distinct t0)")),
    "distinct": Curve(_aggregate()),
    "top": Curve(lambda given: Top(given(0), ("k0",), (Order("t0"), Order("id0")), 3)),
    "latest": Curve(lambda given: Latest(given(0, unique_key=("k0",)), order_by="t0"), timed=True),
}


def cases() -> Iterator[tuple[str, str]]:
    """Yields all combinations of operators and shapes that are measured."""
    for name, curve in CURVES.items():
        taken = (shape for shape, given in SHAPES.items() if not (curve.timed and (given.deletes or given.goes)))
        yield from ((name, shape) for shape in taken)


def schema_of(number: int, shape: Shape) -> pa.Schema:
    """The columns of an input."""
    fields = [(f"{name}{number}", kind) for name, kind in COLUMNS.items()]
    return pa.schema([*fields, *((f"w{place}_{number}", pa.int64()) for place in range(shape.wide))])


def rows_of(number: int, shape: Shape, size: int, ids: Any, *, timed: bool, kind: str = "+I") -> pa.Table:
    """Rows with some numbers; their times ascend with them."""
    ids = np.asarray(ids, np.int64) * (not shape.equal)
    times = np.full(ids.size, 5) if shape.ties else ids
    text = pa.array([f"{own:04d}".ljust(shape.text(size), "x") for own in ids.tolist()], pa.string())
    columns = [ids, ids % shape.keys(size), times, text, *[ids] * shape.wide]
    table = pa.Table.from_arrays([pa.array(c) for c in columns], schema=schema_of(number, shape))
    return table if timed else table.append_column("op", pa.array([kind] * ids.size))


@contextlib.contextmanager
def looked_at() -> Iterator[list[int]]:
    """Counts the rows that CPU stores gather, and the candidates of their indexes, while it is open."""
    counts: list[int] = []

    def counting(call: Any, size: Callable[[Any, Any], int]) -> Any:
        def counted(self: Any, first: Any, *args: Any, **options: Any) -> Any:
            found = call(self, first, *args, **options)
            counts.append(size(first, found))
            return found

        return counted

    with contextlib.ExitStack() as patched:
        for kind, name, size in (
            (CpuStore, "take", lambda slots, _: int(slots.size)),
            (CpuKernels, "search", lambda _, pairs: int(pairs.size)),
            (Runs, "entries_at", lambda _, entries: int(entries.size)),
        ):
            patched.enter_context(mock.patch.object(kind, name, counting(getattr(kind, name), size)))
        yield counts


WHATS: Final = ("change", "micro-batch")


def cost(case: tuple[str, str], size: int, repeats: int, whats: Sequence[str] = WHATS) -> dict[str, float]:
    """Seconds of process time, bytes of NumPy's memory and rows, of one change and of a micro-batch of n changes."""
    curve, shape = CURVES[case[0]], SHAPES[case[1]]

    def given(number: int, **more: Any) -> Input:
        kinds = {} if curve.timed else {"row_kind": "op"}
        return Input(f"i{number}", schema_of(number, shape), **kinds, **more)

    description, found = curve.made(given), {}
    count = len(description.inputs)
    engine = JoinEngine(description, "cpu")

    def only(number: int, table: pa.Table) -> list[pa.Table | None]:
        return [table if place == number else None for place in range(count)]

    for number in curve.filled:
        if shape.deletes:
            for kind in ("+I", "-D"):
                gone = rows_of(number, shape, size, range(size, 2 * size), timed=False, kind=kind)
                engine.process(*only(number, gone))
        engine.process(*only(number, rows_of(number, shape, size, range(size), timed=curve.timed)))
        if gone := shape.gone(size):
            engine.process(*only(number, rows_of(number, shape, size, gone, timed=False, kind="-D")))
    others: Sequence[int] = [number for number in range(count) if number not in curve.filled] or range(count)
    if shape.goes:
        others = curve.filled
    what = {name: ids for name, ids in shape.changed(size).items() if name in whats}
    if case[1] in curve.linear:
        what.pop("micro-batch", None)
    for name, ids in what.items():
        for number in others:
            kind = "-D" if shape.goes else "+I"
            table, times = rows_of(number, shape, size, ids, timed=curve.timed, kind=kind), []
            for _ in range(repeats):
                start = time.process_time()
                engine.prepare(*only(number, table))
                times.append(time.process_time() - start)
                engine.discard()
            tracemalloc.start()
            with looked_at() as looks:
                engine.prepare(*only(number, table))
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            engine.discard()
            for unit, value in (("seconds", min(times)), ("bytes", float(peak)), ("rows", float(sum(looks)))):
                found[f"{name} {unit}"] = max(value, found.get(f"{name} {unit}", 0.0))
    engine.close()
    return found


def growth(costs: list[float], least: float) -> float:
    """The exponent of n, by the sizes doubled `DOUBLED` times; what is below ``least`` counts as that."""
    first, last = max(costs[0], least), max(costs[-1], least)
    return math.log2(last / first) / (len(costs) - 1)


LEAST: Final = {"seconds": 1e-3, "bytes": 2.0**17, "rows": 2.0**11}
"""What any change costs: so many candidates are looked at one by one."""


def expected(case: tuple[str, str], what: str) -> float:
    """The exponent that a cost may have at most."""
    linear = case[1] in CURVES[case[0]].linear or what.startswith("micro-batch")
    long = case[1] == "long text"  # rows are longer with n, too
    return float(linear) + float(long)


def measured(case: tuple[str, str], rows: int, repeats: int) -> dict[str, list[float]]:
    """All costs of an operator and shape, by size."""
    found: dict[str, list[float]] = {}
    for double in range(DOUBLED + 1):
        for what, value in cost(case, rows << double, repeats).items():
            found.setdefault(what, []).append(value)
    return found


def plot(results: dict[str, dict[str, list[float]]], sizes: list[int], target: Any) -> None:
    """Process time and memory of a change and of a micro-batch by size: a line an operator, a column a shape."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    whats = [f"{name} {unit}" for name in WHATS for unit in LEAST]
    figure, axes = plt.subplots(
        len(whats), len(SHAPES), figsize=(21, 16), sharex=True, sharey="row", layout="constrained"
    )
    for row, what in zip(axes, whats, strict=True):
        row[0].set_ylabel(what)
        for axis, shape in zip(row, SHAPES, strict=True):
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            for number, name in enumerate(CURVES):
                values = results.get(f"{name}, {shape}", {}).get(what)
                if values:
                    axis.plot(sizes, values, label=name, color=f"C{number % 10}", ls="-" if number < 10 else "--")
    for axis, shape in zip(axes[0], SHAPES, strict=True):
        axis.set_title(shape)
    for axis in axes[-1]:
        axis.set_xlabel("rows there")
    figure.legend(*axes[0][2].get_legend_handles_labels(), loc="outside lower center", ncols=7)
    figure.savefig(target, metadata={"Date": None})


def main() -> None:
    """Run all, print and record them, with a plot."""
    parser = arguments(__doc__, "growth", rounds=3)
    parser.add_argument("--rows", type=int, default=1000, help="of the smallest state")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    options = parser.parse_args()
    pa.set_cpu_count(1)
    rows = 50 if options.quick else options.rows
    results, exponents = {}, {}
    for case in cases():
        name = ", ".join(case)
        results[name] = measured(case, rows, options.rounds)
        exponents[name] = {
            what: {"exponent": round(growth(costs, LEAST[what.split()[-1]]), 2), "expected": expected(case, what)}
            for what, costs in results[name].items()
        }
    sizes = [rows << double for double in range(DOUBLED + 1)]
    record(options, "growth", {"growth": exponents, "runs": results}, sizes=sizes)
    plot(results, sizes, plot_path(options.out))


if __name__ == "__main__":
    main()
