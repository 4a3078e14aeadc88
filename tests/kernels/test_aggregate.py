"""Aggregates kept up to date, on any backend: after every micro-batch as DuckDB has them over the folded input."""

from __future__ import annotations

import dataclasses
import decimal
import functools
import math
import random
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from conftest import combined
from oracle.drive import Backend, by_event, canonical, changes, fold

from gpu_ops.descriptions.aggregate import Aggregate
from gpu_ops.descriptions.description import Emit
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.kinds import from_json
from gpu_ops.errors import DescriptionError
from gpu_ops.operators.core.order import decimal_halves
from gpu_ops.operators.groups.aggregate.sums import as_decimals, carried, divided, nearest, parts_of, with_parts
from kernels.conftest import EMULATED, only_on
from kernels.engines import CPU, alike, restarting, run

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        ("g", pa.string()),
        ("f", pa.float64()),
        ("i", pa.int64()),
        ("d", pa.decimal128(30, 2)),
        ("e", pa.decimal128(12, 3)),
        ("t", pa.timestamp("us")),
        ("b", pa.bool_()),
        ("u", pa.uint64()),
        ("s", pa.float32()),
    ]
)
VALUES: dict[str, list[Any]] = {
    "g": ["a", "b", "", None],
    "f": [0.0, -0.0, math.nan, 1.5, -2.25, math.inf, -math.inf, None],
    "i": [1, 2, -3, 2**62, -(2**62), None],
    "d": [decimal.Decimal("99999999999999999999.25"), decimal.Decimal("-7.25"), decimal.Decimal("-0.01"), None],
    "e": [decimal.Decimal("1.125"), decimal.Decimal("-123456789.001"), None],
    "t": [1, 2_000_000, -5, None],
    "b": [True, False, None],
    "u": [0, 7, 2**64 - 1, None],
    "s": [0.5, -1.25, math.nan, None],
}
CALLS = {
    "n": "count(*)", "n_f": "count(f)", "sum_i": "sum(i)", "avg_i": "avg(i)", "sum_f": "sum(f)", "avg_f": "avg(f)",
    "sum_d": "sum(d)", "sum_e": "sum(e)", "sum_s": "sum(s)", "avg_u": "avg(u)",
    "mean_d": "avg(d)", "mean_e": "avg(e)",
    "min_f": "min(f)", "max_f": "max(f)", "min_g": "min(g)", "max_d": "max(d)", "min_t": "min(t)", "max_u": "max(u)",
    "max_b": "max(b)", "min_s": "min(s)", "different_f": "count(distinct f)", "different_g": "count(distinct g)",
    "first_g": "first(g)", "last_d": "last_value(d)",
}  # fmt: skip
DUCKDB = duckdb.connect(config={"threads": 1})
WIDE = decimal.Context(prec=60)
Event = tuple[str, tuple[Any, ...]]
KINDS = {
    "insert only": {},
    "retractions": {"row_kind": "row_kind"},
    "upserts": {"row_kind": "row_kind", "unique_key": ("id",)},
}


def described(
    kind: str, by: tuple[str, ...], emit: Emit, calls: dict[str, str] = CALLS, sequence_by: str | None = None
) -> Aggregate:
    source = Input("t", SCHEMA, sequence_by=sequence_by, **KINDS[kind])  # type: ignore[arg-type]
    return Aggregate.of(source, by, {name: call for name, call in calls.items() if name not in by}, emit)


def some_events(kind: str, seed: int, count: int) -> list[Event]:
    """Random changes, some of rows that are not there."""
    choice = random.Random(seed)
    found: list[Event] = []
    for _ in range(count):
        row = (choice.randrange(6), *(choice.choice(values) for values in VALUES.values()))
        word = "+I" if kind == "insert only" else choice.choice(["+I", "+I", "+U", "-D", "-U"])
        if word in ("-D", "-U") and found and choice.random() < 0.9:
            row = choice.choice(found)[1]
        found.append((word, row))
    return found


def table_of(kind: str, events: list[Event], schema: pa.Schema = SCHEMA) -> pa.Table:
    columns = [pa.array([row[n] for _, row in events], field.type) for n, field in enumerate(schema)]
    table = pa.table(columns, schema=schema)
    if kind == "insert only":
        return table
    return table.append_column("row_kind", pa.array([word for word, _ in events], pa.string()))


class Folded:
    """The rows that are there, in the order in which they came."""

    def __init__(self, kind: str) -> None:
        self.keyed = kind == "upserts"
        self.keys: list[Any] = []
        self.rows: list[tuple[Any, ...]] = []

    def take(self, events: list[Event]) -> None:
        for word, row in events:
            key = row[0] if self.keyed else canonical(row)
            if (word in ("-D", "-U") or self.keyed) and key in self.keys:
                place = self.keys.index(key)
                del self.keys[place], self.rows[place]
            if word in ("+I", "+U"):
                self.keys.append(key)
                self.rows.append(row)

    def drop(self, gone: Callable[[tuple[Any, ...]], bool]) -> list[tuple[Any, ...]]:
        """Rows that are forgotten."""
        found = [row for row in self.rows if gone(row)]
        self.keys = [key for key, row in zip(self.keys, self.rows, strict=True) if not gone(row)]
        self.rows = [row for row in self.rows if not gone(row)]
        return found


def by_duckdb(aggregate: Aggregate, rows: list[tuple[Any, ...]], calls: dict[str, str]) -> Counter[tuple[Any, ...]]:
    """The aggregates over some rows; a group has a row while it has one."""
    schema = aggregate.source.schema
    columns = [pa.array([row[n] for row in rows], field.type) for n, field in enumerate(schema)]
    table = pa.table(columns, schema=schema).append_column("arrived", pa.array(range(len(rows)), pa.int64()))
    for n, name in enumerate(schema.names):
        if pa.types.is_floating(schema.field(n).type):  # zero is one value
            one = [None if x is None else x + 0.0 for x in table[name].to_pylist()]
            table = table.set_column(n, name, pa.array(one, schema.field(n).type))
    shown = []
    order = ", ".join([*([aggregate.source.sequence_by] if aggregate.source.sequence_by else []), "arrived"])
    for measure in aggregate.measures:
        call = calls[measure.name]
        column = measure.column
        if measure.function in ("first", "last"):
            call = f"{measure.function}({column} ORDER BY {order.replace(',', ' NULLS FIRST,', 1)}) FILTER ({column} IS NOT NULL)"
        elif measure.function == "sum" and schema.field(column).type == pa.int64():
            call = f"sum({column}::HUGEINT)"
        elif measure.function == "sum" and pa.types.is_floating(schema.field(column).type):
            # DuckDB's own refuses a sum that is infinite
            c = f"{column}::DOUBLE"
            call = (
                f"CASE WHEN bool_or(isnan({c})) OR (bool_or({c} = 'inf'::DOUBLE) AND bool_or({c} = '-inf'::DOUBLE)) "
                f"THEN 'nan'::DOUBLE WHEN bool_or({c} = 'inf'::DOUBLE) THEN 'inf'::DOUBLE "
                f"WHEN bool_or({c} = '-inf'::DOUBLE) THEN '-inf'::DOUBLE "
                f"ELSE sum(CASE WHEN isfinite({c}) THEN {c} END) END"
            )
        elif measure.function == "avg" and pa.types.is_decimal(schema.field(column).type):
            call = f"list({column})"
        elif measure.function == "avg" and pa.types.is_floating(schema.field(column).type):
            call = "NULL"
        shown.append(f"{call} AS {measure.name}")
    listed = ", ".join([*aggregate.by, *shown])
    DUCKDB.register("rows", table)
    grouping = "GROUP BY ALL" if aggregate.by else "HAVING count(*) > 0"
    found = DUCKDB.sql(f"SELECT {listed} FROM rows {grouping}").to_arrow_table()
    names = [*aggregate.by, *(m.name for m in aggregate.measures)]
    made: Counter[tuple[Any, ...]] = Counter()
    for row in found.to_pylist():
        wrapped = {m.name for m in aggregate.measures if m.function == "sum" and calls[m.name] == "sum(i)"}
        for column in aggregate.output:
            if column.name.startswith("mean"):
                row[column.name] = mean(row[column.name], column.type)
        made[tuple(_shown(name, _wrap(row[name]) if name in wrapped else row[name]) for name in names)] += 1
    return made


def mean(values: list[decimal.Decimal | None], kind: pa.DataType) -> decimal.Decimal | None:
    """As Spark has it: null where sum or average has more than 38 digits."""
    known = [value for value in values if value is not None]
    with decimal.localcontext(prec=200, rounding=decimal.ROUND_HALF_UP):
        total = sum(known, decimal.Decimal(0))
        if not known or abs(total).scaleb(kind.scale - 4) >= 10**38:
            return None
        found = (total / len(known)).quantize(decimal.Decimal(1).scaleb(-kind.scale))
        return None if abs(found).scaleb(kind.scale) >= 10**38 else found


def _wrap(value: int | None) -> int | None:
    return None if value is None else (int(value) + 2**63) % 2**64 - 2**63


def _shown(name: str, value: Any) -> Any:
    if name == "avg_f":
        return None
    if name.startswith("avg") and value is not None:
        return f"{value:.10g}"
    if isinstance(value, float) and math.isnan(value):
        return "NaN"
    return value + 0.0 if isinstance(value, float) else value


def told(changelog: pa.Table) -> list[tuple[str, tuple[Any, ...]]]:
    return [
        (row.pop("row_kind"), tuple(_shown(name, value) for name, value in row.items()))
        for row in changelog.to_pylist()
    ]


@pytest.mark.one_in(4, all=2)
@only_on("cpu-tiny", "gpu")
@pytest.mark.parametrize(
    ("by", "kind", "emit", "size"),
    combined([("g",), ("f", "b"), ("d", "t"), ("e", "s"), ()], list(KINDS), ["per_batch", "per_event"], [1, 7, 70]),
)
def test_after_every_micro_batch(engines: Backend, by: tuple[str, ...], kind: str, emit: Emit, size: int) -> None:
    """No row appears twice, none goes that is not there, and what is there is what DuckDB has."""
    aggregate = described(kind, by, emit, sequence_by="t" if "b" in by and kind == "insert only" else None)
    events = some_events(kind, len(by) + size, 30 if size == 1 else 70)
    input_, there = Folded(kind), Counter[tuple[Any, ...]]()
    with engines.engine(aggregate) as engine:
        for start in range(0, len(events), size):
            part = events[start : start + size]
            input_.take(part)
            found = told(engine.process(table_of(kind, part)))
            for word, row in found:
                there[row] += 1 if word[0] == "+" else -1
                assert there[row] in (0, 1), (word, row)
            there = +there
            if emit == "per_batch":
                assert max(Counter(row for _, row in found).values(), default=1) == 1
            if size > 1 or start % 5 == 0:
                assert there == by_duckdb(aggregate, input_.rows, CALLS)


SPANS = [0, 1, -1, 5, 7, -86_400_000_000, 2**62, 2**63 - 1, -(2**63), None]
MORE_SPANS = {"n": "count(*)", "sum": "sum(v)", "avg": "avg(v)", "least": "min(v)"}


def of_spans(values: list[int | None]) -> tuple[Any, ...]:
    """The aggregates in whole numbers: an average is rounded half up, which is away from zero."""
    known = [value for value in values if value is not None]
    total, count = sum(known), max(1, len(known))
    over = (2 * abs(total) + count) // (2 * count)
    mean = (over if total >= 0 else -over) if known else None
    return len(values), total if known and -(2**63) <= total < 2**63 else None, mean, min(known, default=None)


@pytest.mark.one_in(9, all=3)
@only_on("cpu-tiny", "gpu", *EMULATED)
@pytest.mark.parametrize("unit", ["s", "us", "ns"])
@pytest.mark.parametrize("emit", ["per_batch", "per_event", "at_end"])
@pytest.mark.parametrize("kind", KINDS)
def test_sums_and_averages_of_durations(engines: Backend, kind: str, emit: Emit, unit: str) -> None:
    """Exact, over insertions and retractions; a sum that no 64 bits hold is null."""
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), ("g", pa.string()), ("v", pa.duration(unit))])
    aggregate = Aggregate.of(Input("t", schema, **KINDS[kind]), ("g",), MORE_SPANS, emit)  # type: ignore[arg-type]
    choice, events, input_ = random.Random(len(kind + unit)), list[Event](), Folded(kind)
    for _ in range(60):
        row = (choice.randrange(6), choice.choice(["a", "b"]), choice.choice(SPANS))
        word = "+I" if kind == "insert only" else choice.choice(["+I", "+I", "-D"])
        events.append((word, choice.choice(events)[1] if word == "-D" and events else row))
    there = Counter[tuple[Any, ...]]()

    def check(changelog: pa.Table) -> None:
        numbers = [
            column.cast(pa.int64()) if pa.types.is_duration(column.type) else column for column in changelog.columns
        ]
        for row in pa.table(numbers, changelog.column_names).to_pylist():
            word, *values = row.values()
            there[tuple(values)] += 1 if word[0] == "+" else -1
        groups = {name: [row[2] for row in input_.rows if row[1] == name] for name in ("a", "b")}
        assert +there == Counter((name, *of_spans(values)) for name, values in groups.items() if values)

    with engines.engine(aggregate) as engine:
        for start in range(0, 60, 6):
            part = events[start : start + 6]
            input_.take(part)
            made = engine.process(table_of(kind, part, schema))
            if emit != "at_end":
                check(made)
        if emit == "at_end":
            check(engine.finish())
    assert aggregate.output_schema.field("sum").type == aggregate.output_schema.field("avg").type == pa.duration(unit)


@only_on("cpu-tiny", "gpu")
@pytest.mark.parametrize("emit", ["per_batch", "per_event"])
@pytest.mark.parametrize("kind", KINDS)
def test_distinct_values(engines: Backend, kind: str, emit: Emit) -> None:
    """Without aggregates a group comes with its first row and goes with its last; in between nothing is said."""
    aggregate, events = described(kind, ("g", "f"), emit, {}), some_events(kind, 11, 90)
    input_, there = Folded(kind), Counter[tuple[Any, ...]]()
    with engines.engine(aggregate) as engine:
        for start in range(0, len(events), 7):
            input_.take(events[start : start + 7])
            for word, row in told(engine.process(table_of(kind, events[start : start + 7]))):
                assert word in ("+I", "-D")
                there[row] += 1 if word == "+I" else -1
                assert there[row] in (0, 1), (word, row)
            there = +there
            assert there == by_duckdb(aggregate, input_.rows, {})
    assert there


@only_on("cpu-tiny", "gpu", *EMULATED)
@pytest.mark.parametrize("emit", ["per_batch", "per_event"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_one_row_of_sql_is_always_there(engines: Backend, kind: str, emit: Emit) -> None:
    """Before the first row and behind the last as well, over restarts and micro-batches that are discarded."""
    calls = {name: call for name, call in CALLS.items() if name != "avg_f"}
    aggregate = dataclasses.replace(described(kind, (), emit, calls), always=True)
    events, input_, there = some_events(kind, 5, 60), Folded(kind), Counter[tuple[Any, ...]]()
    parts = [[], [], *(events[start : start + 9] for start in range(0, 60, 9)), []]
    for number, (part, engine) in enumerate(zip(parts, restarting(engines, aggregate), strict=False)):
        if number == len(parts) - 1 and kind != "insert only":
            part = [("-D", row) for row in input_.rows]  # noqa: PLW2901
        input_.take(part)
        engine.prepare(table_of(kind, part))
        engine.discard()
        for word, row in told(engine.process(table_of(kind, part))):
            there[row] += 1 if word[0] == "+" else -1
            assert there[row] in (0, 1), (word, row)
        there = +there
        wanted = by_duckdb(aggregate, input_.rows, calls)
        if not input_.rows:
            of_nothing = tuple(0 if m.function.startswith("count") else None for m in aggregate.measures)
            wanted = Counter({of_nothing: 1})
        assert there == wanted, number
    assert kind == "insert only" or not input_.rows
    with pytest.raises(DescriptionError, match="only without group columns"):
        dataclasses.replace(aggregate, by=("g",))


@only_on("cpu-tiny")
def test_the_one_row_of_sql_after_a_backlog(engines: Backend) -> None:
    """One that had no rows, or none that is left."""
    aggregate = dataclasses.replace(described("retractions", (), "per_batch", {"n": "count(*)"}), always=True)
    row = some_events("retractions", 1, 1)[0][1]
    for kept in ([], [("+I", row), ("-D", row)]):
        with engines.engine(aggregate, backlog=True) as engine:
            assert not engine.process(table_of("retractions", kept), backlog=True).num_rows
            assert told(engine.process(table_of("retractions", []))) == [("+I", (0,))]
            assert told(engine.process(table_of("retractions", []))) == []


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by", [("g",), ()], ids="-".join)
def test_each_event_gives_what_a_micro_batch_of_its_own_does(backend: Backend, by: tuple[str, ...], kind: str) -> None:
    events = some_events(kind, 3, 90)
    with backend.engine(described(kind, by, "per_event")) as engine:
        found, caused = [], []
        for start in (0, 30):
            batch = engine.prepare(table_of(kind, events[start : start + 30 if start == 0 else None]))
            engine.commit()
            found += changes(batch.changelog)
            caused += [int(n) + start for n in batch.sequence]
    per_event = by_event(found, caused)
    for number, wanted in enumerate(one_by_one(kind, by)):
        own = fold([c for c, times in per_event.get(number, Counter()).items() for _ in range(times)])
        assert own == wanted, (number, events[number])


@functools.cache
def one_by_one(kind: str, by: tuple[str, ...]) -> list[Counter[tuple[Any, ...]]]:
    """What each event of a trace gives in a micro-batch of its own, ``per_batch``."""
    with CPU.engine(described(kind, by, "per_batch")) as engine:
        return [fold(changes(engine.process(table_of(kind, [event])))) for event in some_events(kind, 3, 90)]


@only_on("cpu-tiny", "gpu", "gpu-tiny", *EMULATED)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("emit", ["per_event", "per_batch"])
def test_same_as_the_cpu(engines: Backend, emit: Emit, kind: str) -> None:
    """Output, order and state; every other micro-batch is discarded once."""
    batches = [([table_of(kind, some_events(kind, seed, 40))], {}) for seed in range(4)]
    aggregate = described(kind, ("g", "b"), emit)
    alike(run(engines, aggregate, batches), run(CPU, aggregate, batches))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("emit", ["per_event", "per_batch"])
def test_goes_on_from_a_snapshot(engines: Backend, emit: Emit, kind: str) -> None:
    """After a restart, on the other backend as well, what follows is the same."""
    batches = [table_of(kind, some_events(kind, seed, 30)) for seed in range(8)]
    aggregate = described(kind, ("g",), emit)
    with CPU.engine(aggregate) as engine:
        for batch in batches[:4]:
            engine.process(batch)
        state = engine.snapshot()
        wanted = [told(engine.process(batch)) for batch in batches[4:]]
    with engines.engine(from_json(aggregate.to_json())) as engine:
        engine.restore(state)
        found = [told(engine.process(batch)) for batch in batches[4:]]
    assert [Counter(part) for part in found] == [Counter(part) for part in wanted]


@only_on("cpu-tiny", "gpu", "gpu-tiny", *EMULATED)
@pytest.mark.parametrize("kind", KINDS)
def test_collisions_of_hashes_change_nothing(engines: Backend, kind: str, one_hash: Any) -> None:
    batches = [([table_of(kind, some_events(kind, seed, 40))], {}) for seed in range(3)]
    aggregate = described(kind, ("g", "i"), "per_event")
    wanted = run(engines, aggregate, batches)
    for distinct in (3, 1):  # of what there are, and then all
        one_hash(distinct)
        alike(run(engines, aggregate, batches), wanted)


@pytest.mark.slow
@only_on("cpu", "cpu-tiny", "gpu")
@pytest.mark.parametrize("emit", ["per_batch", "per_event"])
def test_many_events(engines: Backend, emit: Emit) -> None:
    """20,000 changes, some of rows that are not there."""
    choice, live, there = random.Random(5), list[tuple[Any, ...]](), Counter[tuple[Any, ...]]()
    aggregate = described("retractions", ("g", "b"), emit)
    with engines.engine(aggregate) as engine:
        for _ in range(20):
            events: list[Event] = []
            for _ in range(1000):
                if live and choice.random() < 0.48:
                    place = choice.randrange(len(live))
                    live[place], live[-1] = live[-1], live[place]
                    events.append((choice.choice(["-D", "-U"]), live.pop()))
                elif choice.random() < 0.02:
                    events.append(("-D", (-1, *(choice.choice(values) for values in VALUES.values()))))
                else:
                    live.append((choice.randrange(10**9), *(choice.choice(values) for values in VALUES.values())))
                    events.append(("+I", live[-1]))
            for word, row in told(engine.process(table_of("retractions", events))):
                there[row] += 1 if word[0] == "+" else -1
                assert there[row] in (0, 1), (word, row)
            there = +there
            ordered = sorted(live, key=lambda row: row[0])
            wanted = by_duckdb(aggregate, ordered, CALLS)
            assert _without_order(aggregate, there) == _without_order(aggregate, wanted)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("sequence_by", [None, "i"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by", [("g",), ()], ids=["g", "all"])
def test_first_and_last_at_the_end(engines: Backend, by: tuple[str, ...], kind: str, sequence_by: str | None) -> None:
    """With all other aggregates, and a restart on the way."""
    if sequence_by is not None and kind != "insert only":
        pytest.skip("what is taken back has no place in another order than that of arrival")
    aggregate, events = described(kind, by, "at_end", CALLS, sequence_by), some_events(kind, 3, 120)
    input_ = Folded(kind)
    input_.take(events)
    tables = [table_of(kind, events[start : start + 7]) for start in range(0, len(events), 7)]
    assert fold(told(finished(engines, aggregate, tables))) == by_duckdb(aggregate, input_.rows, CALLS)


def finished(engines: Backend, aggregate: Aggregate, tables: list[pa.Table]) -> pa.Table:
    """What an engine says at the end of its input, and nothing before; halfway it is another one, from a snapshot."""
    half, state = len(tables) // 2, None
    for part in (tables[:half], tables[half:]):
        with engines.engine(from_json(aggregate.to_json())) as engine:
            if state is not None:
                engine.restore(state)
            for table in part:
                assert not engine.process(table).num_rows
            state = engine.snapshot()
            said = engine.finish()
    return said


def _without_order(aggregate: Aggregate, rows: Counter[tuple[Any, ...]]) -> Counter[tuple[Any, ...]]:
    """Rows without what depends on the order in which the input came."""
    kept = [n for n, c in enumerate(aggregate.output) if not c.name.startswith(("first", "last"))]
    return Counter(tuple(row[n] for n in kept) for row in rows.elements())


@pytest.mark.parametrize("kind", KINDS)
def test_a_backlog_comes_first(engines: Backend, kind: str) -> None:
    """A backlog's net result, as insertions, and from then on as if there had been none."""
    parts = [some_events(kind, seed, 30) for seed in range(3)]
    aggregate, input_ = described(kind, ("g",), "per_event"), Folded(kind)
    with engines.engine(aggregate, backlog=True) as engine:
        assert not engine.process(table_of(kind, parts[0]), backlog=True).num_rows
        input_.take(parts[0])
        first = fold(told(engine.process(table_of(kind, []))))
        assert first == by_duckdb(aggregate, input_.rows, CALLS)
        for part in parts[1:]:
            input_.take(part)
            first = fold(told(engine.process(table_of(kind, part))), first)
        assert first == by_duckdb(aggregate, input_.rows, CALLS)


@pytest.mark.one_in(3)
@only_on("cpu-tiny", "gpu", *EMULATED)
@pytest.mark.parametrize("emit", ["per_batch", "per_event"])
@pytest.mark.parametrize("kind", KINDS)
def test_groups_that_nothing_changes_are_forgotten(engines: Backend, kind: str, emit: Emit) -> None:
    """After the TTL, with their rows, values and best rows; the next row of one begins it anew, over restarts, too."""
    ttl, choice = 100, random.Random(kind + emit)
    source = Input("t", SCHEMA, ttl_ms=ttl, **KINDS[kind])  # type: ignore[arg-type]
    aggregate = Aggregate.of(source, ("g",), CALLS, emit)
    place, clock, input_, known = SCHEMA.get_field_index("g"), 0, Folded(kind), dict[Any, tuple[Any, ...]]()
    written: dict[Any, int] = {}
    events, expired = some_events(kind, 17, 120), 0
    for start, engine in zip(range(0, len(events), 4), restarting(engines, aggregate), strict=False):
        clock += choice.choice([0, 10, 60, 99, 100, 130])
        gone = {group for group, when in written.items() if when + ttl <= clock}
        input_.drop(lambda row: row[place] in gone)  # noqa: B023
        for group in gone:
            known.pop(group, None)
        part = events[start : start + 4]
        batch = engine.prepare(table_of(kind, part), clock_ms=clock)
        engine.commit()
        expired += batch.metrics["t_expired"]
        for group in gone:
            written.pop(group)
        for event in part:  # a retraction of no row writes nothing
            before = list(input_.rows)
            input_.take([event])
            for row in {*map(canonical, before)} ^ {*map(canonical, input_.rows)} | (
                {canonical(event[1])} if event[0] in ("+I", "+U") else set()
            ):
                written[row[place]] = clock
        for word, row in told(batch.changelog):
            if word[0] == "-":
                assert known.pop(row[0]) == row
            else:
                assert row[0] not in known
                known[row[0]] = row
        assert Counter(known.values()) == by_duckdb(aggregate, input_.rows, CALLS)
    assert expired > 5


def test_a_ttl_says_every_change_event_by_event(engines: Backend) -> None:
    """As Flink does, so that what is below does not forget a group that stays as it is."""
    schema = pa.schema([("g", pa.int64()), ("x", pa.int64())])
    most = Aggregate.of(Input("t", schema, ttl_ms=9), ("g",), {"m": "max(x)"}, "per_event")
    with engines.engine(most) as engine:
        rows = pa.table({"g": [1, 1], "x": [5, 3]})
        assert [word for word, _ in told(engine.process(rows, clock_ms=0))] == ["+I", "-U", "+U"]
        assert [word for word, _ in told(engine.process(rows, clock_ms=9))] == ["+I", "-U", "+U"]


def test_what_is_taken_back_leaves_the_sum_of_the_others(engines: Backend) -> None:
    """What is taken back leaves what was there, however large it was; NaN and infinities, too."""
    schema = pa.schema([("g", pa.int64()), ("x", pa.float64())])
    aggregate = Aggregate.of(Input("t", schema, row_kind="op"), ("g",), {"s": "sum(x)", "a": "avg(x)"}, "per_event")

    def one(word: str, values: list[float]) -> pa.Table:
        return pa.table({"g": [1] * len(values), "x": values, "op": [word] * len(values)})

    with engines.engine(aggregate) as engine:
        engine.process(one("+I", [0.1] * 10))
        engine.process(one("+I", [1e300, math.nan, math.inf, -math.inf]))
        back = engine.process(one("-D", [math.inf, math.nan, 1e300, -math.inf])).to_pylist()
        assert [row["s"] for row in back if row["row_kind"] == "+U"] == [-math.inf, math.fsum([0.1] * 10)]
        many = [math.pi * n for n in range(1000)]
        engine.process(one("+I", many))
        left = engine.process(one("-D", many)).to_pylist()[-1]
        assert left["s"] == math.fsum([0.1] * 10)
        gone = engine.process(one("-D", [0.1] * 10)).to_pylist()
        assert gone[-1]["row_kind"] == "-D"
        assert engine.process(one("+I", [5e-324])).to_pylist() == [{"row_kind": "+I", "g": 1, "s": 5e-324, "a": 5e-324}]


@pytest.mark.parametrize("most", [9, 2**31, 2**62])
def test_averages_of_decimals_are_rounded_half_up(most: int) -> None:
    """Of sums of any size, by counts of any size; halves away from zero."""
    choice = random.Random(most)
    sums = [choice.randrange(-(10**d), 10**d + 1) for d in range(39) for _ in range(20)] + [10**38 - 1, 1 - 10**38]
    counts = [choice.randrange(1, most + 1) for _ in sums]
    halves = [choice.randrange(1, 99, 2) for _ in range(50)]
    sums += [half * 5 for half in halves]
    counts += [10**5] * len(halves)
    column = pa.array([decimal.Decimal(x) for x in sums], pa.decimal128(38, 0))
    kind = pa.decimal128(38, 4)
    found = as_decimals(*divided(np, *decimal_halves(column), np.array(counts), 4), kind)
    for number, (total, count) in enumerate(zip(sums, counts, strict=True)):
        whole = (2 * abs(total) * 10**4 + count) // (2 * count)
        wanted = None if whole >= 10**38 else decimal.Decimal(whole if total >= 0 else -whole).scaleb(-4, WIDE)
        assert found[number].as_py() == wanted, (total, count)


def exactly(values: list[float]) -> float:
    """The double number nearest to a sum."""
    total = sum(map(Fraction, values), Fraction(0))
    try:
        return float(total)
    except OverflowError:
        return math.inf if total > 0 else -math.inf


def far_apart(choice: random.Random) -> list[float]:
    """Double numbers, of which some add up to little, to subnormal numbers, to a tie or to more than there is room for."""
    most, half = math.nextafter(math.inf, 0), 2.0**970
    count = choice.randrange(1, 8)
    kinds: list[Callable[[], float]] = [
        lambda: choice.uniform(-1, 1),
        lambda: math.ldexp(choice.uniform(-1, 1), choice.randrange(-1074, 1025)),
        lambda: choice.randrange(-9, 9) * 5e-324 * choice.choice([1, 2**51, 2**52]),
        lambda: choice.choice([most, -most, half, -half, half / 2, 5e-324, -5e-324, 1e308]),
        lambda: float(choice.randrange(-(2**60), 2**60)),
        lambda: choice.choice([2.0**53, 1.0, -1.0, 2.0**-60, -(2.0**-60), 2.0**54]),
    ]
    made = choice.choice(kinds)
    values = [made() for _ in range(count)]
    return values + [-value for value in values[:-1]] if choice.random() < 0.3 else values


def test_double_numbers_add_up_exactly(engines: Backend) -> None:
    """However far apart they are: the nearest double number to their sum, of two the even one."""
    choice = random.Random(3)
    groups = [[], [-1.0], [0.0], [5e-324], *(far_apart(choice) for _ in range(1500))]
    with engines.engine(described("insert only", ("g",), "per_batch", {"n": "count(*)"})) as engine:
        xp, asarray = engine.kernels.xp, engine.kernels.asarray
        for some in [groups, *([values] for values in groups)]:
            of, values = np.repeat(np.arange(len(some)), [*map(len, some)]), [x for values in some for x in values]
            parts = dict(parts_of(xp, asarray(np.array(values, float))))
            low = min(parts, default=0)
            totals = np.zeros((max(parts, default=0) + 2 - low, len(some)), np.int64)
            for place, part in parts.items():
                np.add.at(totals[place - low], of, engine.kernels.asnumpy(part))
            found = engine.kernels.asnumpy(nearest(xp, carried([asarray(total) for total in totals]), low))
            assert found.tolist() == [*map(exactly, some)]


def test_sums_of_double_numbers_in_earlier_folders_are_taken_over() -> None:
    """There they were two double numbers each; the group's own columns may be called as ours are."""
    pairs = [(0.1, 2.0**-58), (1e300, 1.0), (0.0, 0.0), (math.inf, 0.0)]
    bits = [pa.array(np.array(column).view(np.int64)) for column in zip(*pairs, strict=True)]
    groups = pa.Table.from_arrays([pa.array([1, 2, 3, 4]), *bits], names=["short_0", "sum_3", "short_3"])
    found = with_parts(groups, 1)
    assert found.column_names[:2] == ["short_0", "sum_3"]
    places = {int(name.split("_at_")[1]): name for name in found.column_names[2:]}
    for row, pair in enumerate(pairs[:3]):
        whole = sum(Fraction(2) ** (32 * place) * found[name][row].as_py() for place, name in places.items())
        assert whole == Fraction(pair[0]) + Fraction(pair[1])


def test_an_average_that_stays_is_not_said_again(engines: Backend) -> None:
    """Whatever its sum and its count are."""
    schema = pa.schema([("g", pa.int64()), ("i", pa.int64()), ("e", pa.decimal128(9, 2))])
    means = Aggregate.of(Input("t", schema, row_kind="op"), ("g",), {"i": "avg(i)", "e": "avg(e)"}, "per_batch")
    with engines.engine(means) as engine:
        row = {"op": ["+I"], "g": [1], "i": [2], "e": pa.array([decimal.Decimal("2.00")], pa.decimal128(9, 2))}
        assert engine.process(pa.table(row)).num_rows == 1
        assert engine.process(pa.table(row)).num_rows == 0


def test_great_integers_have_exact_averages(engines: Backend) -> None:
    """Of small ones in one micro-batch, of which a sum fits in 64 bits, and great ones in the next; all goes again."""
    schema = pa.schema([("g", pa.int64()), ("i", pa.int64())])
    described = Aggregate.of(Input("t", schema, row_kind="op"), ("g",), {"s": "sum(i)", "a": "avg(i)"}, "per_batch")
    rng = np.random.default_rng(7)
    batches = [rng.integers(-(2**bits), 2**bits, 40).tolist() for bits in (20, 62, 33, 61)]
    with engines.engine(described) as engine:
        alive: list[int] = []
        for values in batches:
            taken, alive = alive[:30], alive[30:] + values
            kinds = ["+I"] * len(values) + ["-D"] * len(taken)
            found = engine.process(pa.table({"op": kinds, "g": [1] * len(kinds), "i": [*values, *taken]}))
            last = found.slice(len(found) - 1).to_pylist()[0]
            total = sum(alive)
            assert last["s"] == (total + 2**63) % 2**64 - 2**63
            assert last["a"] == pytest.approx(total / len(alive), rel=1e-15)
        found = engine.process(pa.table({"op": ["-D"] * len(alive), "g": [1] * len(alive), "i": alive}))
        assert found.column("row_kind").to_pylist() == ["-D"]


def test_what_it_says() -> None:
    aggregate = described("upserts", ("id",), "per_batch", {"n": "count(*)"})
    assert aggregate.unique_key == ("id",)
    assert described("retractions", ("g",), "per_batch").unique_key is None
    assert described("insert only", ("id",), "per_batch").unique_key == ("id",)
    assert aggregate.attributes.switches_from_backlog
    assert from_json(aggregate.to_json()) == aggregate
    with pytest.raises(DescriptionError, match="ttl= has no place"):
        Aggregate.of(Input("t", SCHEMA, ttl_ms=5), ("g",), {"n": "count(*)"}, "at_end")
    assert Aggregate.of(Input("t", SCHEMA, ttl_ms=5), ("id",), {"n": "count(*)"}, "per_batch").unique_key is None
    with pytest.raises(DescriptionError, match=r"or a gpu_ops\.AggregateFunction"):
        Aggregate.of(Input("t", SCHEMA), ("g",), {"n": object()}, "per_batch")  # type: ignore[dict-item]
    with pytest.raises(DescriptionError, match="needs its event time"):
        Aggregate.of(Input("t", SCHEMA), ("g",), {"n": "count(*)"}, "at_watermark")
