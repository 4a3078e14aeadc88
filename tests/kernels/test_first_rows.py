"""Where only the first rows of a key are looked up, the same comes out as where all of them are: order and state, too.

Few groups with many rows, few values and equal rows, retractions of the best one, and micro-batches from one row on.
What is right where all are looked up is held against DuckDB, Flink and the rules elsewhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pytest
from oracle.drive import Backend

from gpu_ops import Aggregate, Input, Join, JoinEngine, Key, MultiJoin, Order, Top
from gpu_ops.descriptions.description import Description, Emit
from gpu_ops.operators.core import changes
from gpu_ops.operators.core.first_rows import FirstRows
from gpu_ops.operators.groups import top
from gpu_ops.operators.groups.aggregate import extremes
from kernels.conftest import EMULATED, only_on

COLUMNS = {
    "id": pa.int64(), "g": pa.string(), "v": pa.int64(), "f": pa.float64(), "s": pa.string(),
    "n": pa.struct([("a", pa.int64())]),
}  # fmt: skip
FEW: dict[str, Callable[[random.Random], Any]] = {
    "id": lambda rng: rng.randrange(3),
    "g": lambda rng: rng.choice("ab"),
    "v": lambda rng: rng.choice([None, 0, 1, 2]),
    "f": lambda rng: rng.choice([0.0, -0.0, float("nan"), None, 1.5]),
    "s": lambda rng: rng.choice(["", "x", "https://example.com/a", "https://example.com/b", None]),
    "n": lambda rng: rng.choice([None, {"a": 1}, {"a": None}]),
}
MANY = {**FEW, "id": lambda rng: rng.randrange(300), "v": lambda rng: rng.randrange(100)}
Batch = tuple[list[list[tuple[str, tuple[Any, ...]]]], int, bool]
"""The changes of each input, the clock, and whether the micro-batch is discarded once."""


def source(rng: random.Random, name: str, *, ttl: bool = True) -> Input:
    options: dict[str, Any] = {}
    if rng.random() < 0.3:
        options["sequence_by"] = f"{name}v"
    if rng.random() < 0.3:
        options["unique_key"] = (f"{name}id",)
    if ttl and rng.random() < 0.2:
        options["ttl_ms"] = 50
    return Input(f"t{name}", pa.schema([(name + c, kind) for c, kind in COLUMNS.items()]), row_kind="op", **options)


def described(rng: random.Random) -> Description:
    """Some operator that takes rows back."""
    emit: Emit = rng.choice(["per_event", "per_batch"])
    kind = rng.choice(["aggregate", "aggregate", "top", "join", "semi", "multi"])
    if kind == "aggregate":
        calls: dict[str, Any] = {"rows": "count(*)"}
        for number in range(rng.randrange(5)):
            function = rng.choice(["min", "max", "first", "last", "count(distinct"])
            column = rng.choice(["v", "f", "s", *(["n"] if function in ("first", "last") else [])])
            text = f"{function} {column})" if "(" in function else f"{function}({column})"
            calls[f"c{number}"] = (function, column) if function in ("first", "last") else text
        return Aggregate.of(source(rng, ""), rng.choice([(), ("g",), ("f",)]), calls, emit)
    if kind == "top":
        order = tuple(Order(c, descending=rng.random() < 0.5) for c in rng.sample("vfs", rng.randrange(1, 3)))
        number = rng.choice([None, "number"])
        return Top(source(rng, ""), rng.choice([(), ("g",)]), order, rng.randrange(1, 4), emit, number=number)
    if kind == "multi":
        inputs = [source(rng, name, ttl=False) for name in "abc"]
        return MultiJoin.of(inputs, [("ag", "bg"), ("ag", "cg")], "inner", emit=emit)
    hows = {"join": ["inner", "left", "full"], "semi": ["semi", "anti"]}
    return Join(rng.choice(hows[kind]), source(rng, "l"), source(rng, "r"), (Key("lg", "rg"),), emit=emit)


def trace(rng: random.Random, inputs: int) -> list[Batch]:
    """Changes, half of which take rows: often the oldest, the newest or the least; a few of rows that are not there."""
    live: list[list[tuple[Any, ...]]] = [[] for _ in range(inputs)]
    values, found, clock = rng.choice([FEW, FEW, MANY]), list[Batch](), 0
    for _ in range(rng.randrange(4, 12)):
        clock += rng.choice([0, 10, 60])
        given = []
        for rows in live:
            own: list[tuple[str, tuple[Any, ...]]] = []
            for _ in range(rng.choice([1, 1, 3, 10, 40])):
                row = tuple(value(rng) for value in values.values())
                if rows and rng.random() < 0.5:
                    least = min(range(len(rows)), key=lambda at: rows[at][2] or 0)
                    gone = rng.choice([0, -1, least, rng.randrange(len(rows))])
                    own.append((rng.choice(["-D", "-U"]), rows.pop(gone)))
                elif rng.random() < 0.05:
                    own.append(("-D", row))
                else:
                    own.append((rng.choice(["+I", "+U"]), row))
                    rows.append(row)
            given.append(own)
        found.append((given, clock, rng.random() < 0.3))
    return found


def run(join: Description, batches: Sequence[Batch], backend: Backend, *, restarts: bool) -> list[Any]:
    """All that comes out, change by change, and the state in the end."""
    found: list[Any] = []
    engine: JoinEngine = backend.engine(join).thing
    for given, clock, discarded in batches:
        tables = []
        for own, changed in zip(join.inputs, given, strict=True):
            columns = [pa.array([row[n] for _, row in changed], f.type) for n, f in enumerate(own.schema)]
            words = pa.array([word for word, _ in changed], pa.string())
            tables.append(pa.table([*columns, words], names=[*own.schema.names, "op"]))
        if discarded:
            engine.prepare(*tables, clock_ms=clock)
            engine.discard()
        batch = engine.prepare(*tables, clock_ms=clock)
        engine.commit()
        found.append((repr(batch.changelog.to_pylist()), batch.sequence.tolist()))
        if restarts and discarded:
            state = engine.snapshot()
            engine.close()
            engine = backend.engine(join).thing
            engine.restore(state)
    found.append({name: repr(table.to_pylist()) for name, table in engine.snapshot().items()})
    engine.close()
    return found


def check(seed: int, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many lookups of first rows there were."""
    rng = random.Random(seed)
    join = described(rng)
    batches, restarts, found, lookups = trace(rng, len(join.inputs)), rng.random() < 0.5, [], 0
    search = FirstRows.search

    def counted(*args: Any) -> Any:
        nonlocal lookups
        lookups += 1
        return search(*args)

    monkeypatch.setattr(FirstRows, "search", counted)
    for most, on in ((1 << 40, Backend("cpu")), (0, backend)):
        for module in (changes, extremes, top):
            monkeypatch.setattr(module, "most_candidates", lambda _table, _keys, most=most: most)
        lookups = 0
        found.append(run(join, batches, on, restarts=restarts))
    for number, (every, first) in enumerate(zip(*found, strict=True)):
        assert every == first, f"seed {seed}, micro-batch {number} of {join}"
    return lookups


@only_on("cpu-tiny", "cpu-disk", "gpu", "gpu-tiny", *EMULATED)
@pytest.mark.parametrize("first", range(0, 12, 4))
def test_first_rows_are_those_of_all(first: int, engines: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sum(check(seed, engines, monkeypatch) for seed in range(first, first + 4)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 2100, 10))
def test_random_first_rows(first: int, engines: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(first, first + 10):
        check(seed, engines, monkeypatch)
