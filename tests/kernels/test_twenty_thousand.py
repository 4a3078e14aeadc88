"""20,000 changes through what has its result when they have ended, and through lookups that wait: as DuckDB has it.

However they are cut into micro-batches, over a restart, on any backend. What is late: `test_aggregate_at_watermark`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from oracle.drive import Backend, fold

from gpu_ops.descriptions.aggregate import Aggregate
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.join import Join, LookupJoin
from gpu_ops.descriptions.keys import Key
from kernels import test_aggregate, test_own_aggregates, test_top
from kernels.conftest import only_on
from kernels.test_aggregate import CALLS, KINDS, finished, told

EVENTS = 20_000
Row = tuple[Any, ...]
DUCKDB = duckdb.connect(config={"threads": 1})

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def in_time(request: pytest.FixtureRequest) -> None:
    """What is emulated takes milliseconds for each micro-batch."""
    if "emulated" in request.node.name and not request.node.name.endswith(f"-{EVENTS}]"):
        pytest.skip("20,000 changes at once, or on a card")


sizes = pytest.mark.parametrize("size", [1, 7, EVENTS])
backends = only_on("cpu-tiny", "gpu", "emulated-tiny")


def changes(kind: str, seed: int, values: Callable[[random.Random], Row]) -> tuple[list[tuple[str, Row]], list[Row]]:
    """Changes of rows that begin with a number of their own, some of rows that are not there; the rows that are left."""
    choice, live, numbers = random.Random(seed), dict[int, Row](), list[int]()
    found: list[tuple[str, Row]] = []
    while len(found) < EVENTS:
        draw = 0.0 if kind == "insert only" else choice.random()
        if draw > 0.55 and numbers:
            place = choice.randrange(len(numbers))
            numbers[place], numbers[-1] = numbers[-1], numbers[place]
            found.append((choice.choice(["-D", "-U"]), live.pop(numbers.pop())))
        elif draw > 0.54:
            found.append(("-D", (-1, *values(choice))))
        elif draw > 0.4 and numbers and kind == "upserts":
            number = choice.choice(numbers)
            live.pop(number)
            live[number] = (number, *values(choice))
            found.append(("+U", live[number]))
        else:
            number = len(found)
            numbers.append(number)
            live[number] = (number, *values(choice))
            found.append(("+I", live[number]))
    return found, list(live.values())


def cut(table: pa.Table, size: int) -> list[pa.Table]:
    return [table.slice(start, size) for start in range(0, table.num_rows, size)]


@backends
@sizes
@pytest.mark.parametrize("kind", KINDS)
def test_first_and_last_among_all_aggregates(engines: Backend, kind: str, size: int) -> None:
    values = list(test_aggregate.VALUES.values())
    events, left = changes(kind, size, lambda choice: tuple(choice.choice(some) for some in values))
    aggregate = test_aggregate.described(kind, ("g", "b"), "at_end")
    said = finished(engines, aggregate, cut(test_aggregate.table_of(kind, events), size))
    assert fold(told(said)) == test_aggregate.by_duckdb(aggregate, left, CALLS)


@backends
@sizes
@pytest.mark.parametrize("kind", KINDS)
def test_own_functions(engines: Backend, kind: str, size: int) -> None:
    def values(choice: random.Random) -> Row:
        return choice.choice(["a", "b", None]), choice.choice([0, 1, 4, 130, None]), choice.choice([1, 2, None])

    events, left = changes(kind, size, values)
    aggregate = test_own_aggregates.described(kind, "at_end")
    said = finished(engines, aggregate, cut(test_own_aggregates.table_of(kind, events), size))
    wanted = test_own_aggregates.by_duckdb(aggregate, left)
    of_id = 3  # of which the function has 8 bits
    assert fold(told(said)) == Counter((*row[:of_id], row[of_id] & 255, *row[of_id + 1 :]) for row in wanted.elements())


@backends
@sizes
@pytest.mark.parametrize("kind", KINDS)
def test_top_rows(engines: Backend, kind: str, size: int) -> None:
    inserted = kind == "insert only"
    given = {"row_kind": None} if inserted else {"unique_key": ("id",)} if kind == "upserts" else {}
    top = test_top.described("text DESC NULLS FIRST, real", 40, "at_end", "number", **given)
    events, left = changes(kind, size, lambda choice: tuple(choice.choice(some) for some in test_top.VALUES))
    table = test_top.table([(word, *row) for word, row in events], op=not inserted)
    view = test_top.View()
    said = finished(engines, top, cut(table, size))  # type: ignore[arg-type]
    assert all(row[0] == "+I" for row in view.take(said))
    assert view.sorted() == test_top.by_duckdb(left, top)


ORDERS = pa.schema([pa.field("id", pa.int64(), nullable=False), ("k", pa.int64()), ("a", pa.int64())])
PRICES = pa.schema([pa.field("id", pa.int64(), nullable=False), ("k", pa.int64()), ("b", pa.string())])


def typed(schema: pa.Schema, rows: list[Row]) -> pa.Table:
    return pa.table([pa.array([row[n] for row in rows], f.type) for n, f in enumerate(schema)], schema=schema)


def with_kinds(schema: pa.Schema, events: list[tuple[str, Row]]) -> pa.Table:
    rows = typed(schema, [row for _, row in events])
    return rows.append_column("op", pa.array([word for word, _ in events], pa.string()))


@backends
@sizes
@pytest.mark.parametrize("how", ["inner", "left"])
def test_a_chain(engines: Backend, how: Any, size: int) -> None:
    """A join that is kept up to date, and above it groups that come at the end, half of the changes from each side."""
    left = Input("o", ORDERS, row_kind="op", unique_key=("id",), updates="upsert")
    right = Input("p", PRICES, row_kind="op")
    join = Join(how, left, right, (Key("k", "k"),), suffixes=("", "_p"))
    given, rows = [], []
    for schema, kind in ((ORDERS, "upserts"), (PRICES, "retractions")):
        last = (1, 2, 3, None) if schema is ORDERS else ("x", "y", None)
        events, live = changes(
            kind, size, lambda choice, last=last: (choice.choice([*range(3000), None]), choice.choice(last))
        )
        given.append(cut(with_kinds(schema, events), size))
        rows.append(typed(schema, live))
    schema = pa.schema([f for f in join.output_schema if f.name != "row_kind"])
    calls = {"n": "count(*)", "total": "sum(a)", "most": "max(a)", "different": "count(distinct id)"}
    above = Aggregate.of(Input("j", schema, row_kind="row_kind"), ("b",), calls, "at_end")
    with engines.engine(join) as below:
        said = finished(engines, above, [below.process(*tables) for tables in zip(*given, strict=True)])
    for name, table in zip("op", rows, strict=True):
        DUCKDB.register(name, table)
    wanted = DUCKDB.sql(
        f"SELECT b, count(*), sum(a), max(a), count(DISTINCT o.id) FROM o {how} JOIN p USING (k) GROUP BY b"
    )
    assert fold(told(said)) == Counter(wanted.fetchall())


CLICKS = pa.schema([("n", pa.int64()), ("k", pa.float64())])
VALUES = (0.0, -0.0, float("nan"), None, *(x / 2 for x in range(1, 900)))


@backends
@sizes
@pytest.mark.parametrize("kind", ["retractions", "upserts"])
def test_lookups_wait_for_the_table(engines: Backend, kind: str, size: int) -> None:
    """18,000 changes of history are taken in silently; then each row comes out, those that waited with the first."""
    right = pa.schema([pa.field("id", pa.int64(), nullable=False), ("k", pa.float64()), ("v", pa.string())])
    keyed = {"unique_key": ("id",)} if kind == "upserts" else {}
    join = LookupJoin("left", Input("l", CLICKS), Input("r", right, row_kind="op", **keyed), (Key("k", "k"),),
                      suffixes=("", "_r"))  # fmt: skip
    events, _ = changes(kind, size, lambda choice: (choice.choice(VALUES), choice.choice("ab")))
    choice, half = random.Random(size), EVENTS // 2
    clicks = typed(CLICKS, [(n, choice.choice(VALUES)) for n in range(half)])
    history, live, waited, state = 9000, dict[int, Row](), [], None
    table = with_kinds(right, events[:half])

    def part(start: int, stop: int) -> Iterator[tuple[pa.Table, pa.Table, list[tuple[str, Row]]]]:
        for at in range(start, stop, size):
            end = min(at + size, stop)
            yield clicks.slice(at, end - at), table.slice(at, end - at), events[at:end]

    def take(some: list[tuple[str, Row]]) -> None:
        for word, row in some:
            if word in ("+I", "+U"):
                live[row[0]] = row
            elif kind == "upserts" or row == live.get(row[0], row):
                live.pop(row[0], None)

    def expected(rows: pa.Table) -> Counter[str]:
        DUCKDB.register("l", rows)
        DUCKDB.register("r", typed(right, list(live.values())))
        return Counter(map(repr, DUCKDB.sql("SELECT l.n, l.k, r.* FROM l LEFT JOIN r ON l.k = r.k").fetchall()))

    def rows_of(said: pa.Table) -> Counter[str]:
        assert set(said["row_kind"].to_pylist()) <= {"+I"}
        columns = said.drop_columns(["row_kind"]).to_pydict().values()
        return Counter(map(repr, zip(*columns, strict=True)))

    for start, stop in ((0, history // 2), (history // 2, history)):  # a restart between
        with engines.engine(join, backlog=True) as engine:
            if state is not None:
                engine.restore(state)
            for rows, changed, some in part(start, stop):
                assert not engine.process(rows, changed, backlog=True).num_rows
                waited.append(rows)
                take(some)
            state = engine.snapshot()
            assert rows_of(engine.finish()) == expected(pa.concat_tables(waited))
    with engines.engine(join, backlog=True) as engine:
        engine.restore(state)
        for rows, changed, some in part(history, half):
            if waited:
                first = expected(pa.concat_tables(waited))
                waited = []
            else:
                first = Counter()
            take(some)
            assert rows_of(engine.process(rows, changed)) == first + expected(rows)
