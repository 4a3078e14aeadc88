"""Aggregate functions of one's own, on any backend: after every micro-batch what DuckDB has over the folded input."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest
from conftest import combined
from oracle.drive import Backend

from gpu_ops import AggregateFunction
from gpu_ops.descriptions.aggregate import Aggregate
from gpu_ops.descriptions.description import Emit
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.kinds import from_json
from gpu_ops.errors import DescriptionError
from kernels.conftest import EMULATED, only_on
from kernels.engines import CPU, alike, run
from kernels.own_functions import Bits, WeightedMean, Wrong
from kernels.test_aggregate import DUCKDB, KINDS, Event, Folded, finished, told

SCHEMA = pa.schema(
    [pa.field("id", pa.int64(), nullable=False), ("g", pa.string()), ("x", pa.int64()), ("w", pa.int64())]
)


def described(kind: str, emit: Emit, by: tuple[str, ...] = ("g",)) -> Aggregate:
    calls: dict[str, Any] = {"bits": Bits("x"), "n": "count(*)", "of_id": Bits("id")}
    if kind == "insert only" or emit == "at_end":
        calls |= {"mean": WeightedMean("x", "w", scale=2)}
    return Aggregate.of(Input("t", SCHEMA, **KINDS[kind]), by, calls, emit)  # type: ignore[arg-type]


def some_events(kind: str, seed: int, count: int) -> list[Event]:
    choice, found = random.Random(seed), list[Event]()
    for _ in range(count):
        row = (
            choice.randrange(6),
            choice.choice(["a", "b", None]),
            choice.choice([0, 1, 4, 130, None]),
            choice.choice([1, 2, None]),
        )
        word = "+I" if kind == "insert only" else choice.choice(["+I", "+I", "+U", "-D", "-U"])
        if word in ("-D", "-U") and found and choice.random() < 0.9:
            row = choice.choice(found)[1]
        found.append((word, row))
    return found


def table_of(kind: str, events: list[Event]) -> pa.Table:
    columns = [pa.array([row[n] for _, row in events], field.type) for n, field in enumerate(SCHEMA)]
    table = pa.table(columns, schema=SCHEMA)
    words = pa.array([word for word, _ in events], pa.string())
    return table if kind == "insert only" else table.append_column("row_kind", words)


def by_duckdb(aggregate: Aggregate, rows: list[tuple[Any, ...]]) -> Counter[tuple[Any, ...]]:
    columns = [pa.array([row[n] for row in rows], field.type) for n, field in enumerate(SCHEMA)]
    DUCKDB.register("own_rows", pa.table(columns, schema=SCHEMA))
    mean = ", 2 * sum(coalesce(x, 0) * coalesce(w, 0)) / nullif(sum(coalesce(w, 0)), 0)"
    shown = f"bit_or(x), count(*), bit_or(id){mean if len(aggregate.measures) > 3 else ''}"
    group = "GROUP BY ALL" if aggregate.by else "HAVING count(*) > 0"
    return Counter(DUCKDB.sql(f"SELECT {', '.join([*aggregate.by, shown])} FROM own_rows {group}").fetchall())


@pytest.mark.one_in(6, all=3)
@pytest.mark.parametrize(
    ("by", "emit", "kind", "size"), combined([("g",), ()], ["per_batch", "per_event"], list(KINDS), [1, 7, 90])
)
def test_after_every_micro_batch(backend: Backend, by: tuple[str, ...], kind: str, emit: Emit, size: int) -> None:
    aggregate, events = described(kind, emit, by), some_events(kind, size, 40 if size == 1 else 180)
    input_, there, state = Folded(kind), Counter[tuple[Any, ...]](), None
    for half in (events[: len(events) // 2], events[len(events) // 2 :]):  # a restart between
        with backend.engine(from_json(aggregate.to_json())) as engine:
            if state is not None:
                engine.restore(state)
            for start in range(0, len(half), size):
                part = half[start : start + size]
                input_.take(part)
                for word, row in told(engine.process(table_of(kind, part))):
                    there[row] += 1 if word[0] == "+" else -1
                    assert there[row] in (0, 1), (word, row)
                there = +there
                assert there == by_duckdb(aggregate, input_.rows)
            state = engine.snapshot()
            assert len(state["states 0 of t"]) == len(there)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by", [("g",), ()], ids=["g", "all"])
def test_at_the_end(engines: Backend, by: tuple[str, ...], kind: str) -> None:
    """With a restart on the way; of rows that are left a function need not take any back."""
    aggregate, events = described(kind, "at_end", by), some_events(kind, 11, 150)
    input_ = Folded(kind)
    input_.take(events)
    rows = told(finished(engines, aggregate, [table_of(kind, events[at : at + 7]) for at in range(0, len(events), 7)]))
    assert {word for word, _ in rows} == {"+I"}
    assert Counter(row for _, row in rows) == by_duckdb(aggregate, input_.rows)


def test_of_nothing_there_is_a_row_at_the_end(engines: Backend) -> None:
    calls: dict[str, Any] = {"bits": Bits("x"), "n": "count(*)", "least": "min(x)", "mean": WeightedMean("x", "w")}
    for by, wanted in (((), [("+I", (None, 0, None, None))]), (("g",), [])):
        with engines.engine(Aggregate.of(Input("t", SCHEMA, row_kind="row_kind"), by, calls)) as engine:
            rows = table_of("retractions", [("+I", (1, "a", 1, 1)), ("-D", (1, "a", 1, 1))])
            engine.process(rows)
            assert told(engine.finish()) == wanted


@only_on("cpu-tiny", "gpu", "gpu-tiny", *EMULATED)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("emit", ["per_event", "per_batch"])
def test_same_as_the_cpu(engines: Backend, emit: Emit, kind: str) -> None:
    """Output, order and state; every other micro-batch is discarded once."""
    batches = [([table_of(kind, some_events(kind, seed, 40))], {}) for seed in range(4)]
    alike(run(engines, described(kind, emit), batches), run(CPU, described(kind, emit), batches))


def test_groups_that_are_forgotten_have_no_state_left(engines: Backend) -> None:
    """By a TTL, and at the watermark."""
    calls = {"bits": Bits("x")}
    by_ttl = Aggregate.of(Input("t", SCHEMA, row_kind="op", ttl_ms=10), ("g",), calls, "per_batch")
    row = pa.table([[1], ["a"], [1], [1]], schema=SCHEMA)
    change = row.append_column("op", pa.array(["+I"]))
    with engines.engine(by_ttl) as engine:
        engine.process(change, clock_ms=0)
        assert told(engine.process(change.set_column(2, "x", pa.array([2])), clock_ms=10)) == [("+I", ("a", 2))]
        assert len(engine.snapshot()["states 0 of t"]) == 1
    windows = Aggregate.of(Input("t", SCHEMA, event_time="id", delay_ms=0), ("id",), calls, "at_watermark")
    with engines.engine(windows) as engine:
        assert not engine.process(row).num_rows
        assert told(engine.process(row.set_column(0, SCHEMA.field(0), pa.array([9])))) == [("+I", (1, 1))]
        assert len(engine.snapshot()["states 0 of t"]) == 1


def test_what_goes_wrong_says_so() -> None:
    def of(function: Any, **given: Any) -> Aggregate:
        return Aggregate.of(Input("t", SCHEMA, **given), ("g",), {"b": function}, "per_batch")

    row = pa.table([[1], ["a"], [1], [1]], schema=SCHEMA)
    for how, message in [
        ("fails", r"b = Wrong\(x, how='fails'\): add\(\) failed: ValueError: no such luck"),
        ("short", r"add\(\) gave 0 rows for 1 groups"),
        ("none", r"add\(\) gave NoneType, it is a table"),
        ("other", r"add\(\) gave something else than was declared"),
    ]:
        with CPU.engine(of(Wrong("x", how=how))) as engine:
            with pytest.raises(DescriptionError, match=message):
                engine.process(row)
            assert engine.state_size()["t_rows"] == 0

    class Here(Bits):
        pass

    class Nothing(Bits):
        state = pa.schema([])

    with pytest.raises(DescriptionError, match="state servers import an aggregate function by its name"):
        of(Here("x")).to_json()

    class Silent(Bits):
        def __init__(self) -> None:
            pass

    with pytest.raises(DescriptionError, match=r"Silent.__init__\(\) does not call that of gpu_ops.AggregateFunction"):
        of(Silent())
    with pytest.raises(DescriptionError, match="state is a pyarrow schema with a column at least"):
        of(Nothing("x"))
    with pytest.raises(DescriptionError, match="parameters are what JSON holds"):
        of(Bits("x", how=object())).to_json()
    with pytest.raises(DescriptionError, match="b names 'y'; there are"):
        of(Bits("y"))
    with pytest.raises(DescriptionError, match=r"WeightedMean\(x, w\) has no retract\(\)"):
        of(WeightedMean("x", "w"), row_kind="op")
    data = {"class": "kernels.own_functions:Bats", "columns": ["x"], "parameters": {}}
    with pytest.raises(DescriptionError, match="Bats cannot be imported here"):
        AggregateFunction.from_dict(data)
    with pytest.raises(DescriptionError, match=r"Strict is made of columns and parameters: .*depth"):
        AggregateFunction.from_dict({**data, "class": "kernels.own_functions:Strict", "parameters": {"depth": 1}})
    with pytest.raises(DescriptionError, match=r"is no gpu_ops.AggregateFunction"):
        AggregateFunction.from_dict({**data, "class": "json:JSONDecoder"})
