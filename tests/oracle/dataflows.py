"""Random dataflows of up to six operators, random traces for them, and what they are in SQL.

Operators are drawn over random inputs; several may read one changelog, and one may read it twice.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from gpu_ops.conditions import Expression, parse
from gpu_ops.conditions.expressions import BOOL, Call, ColumnRef, Literal, Op
from gpu_ops.descriptions.aggregate import Aggregate
from gpu_ops.descriptions.dataflow import Dataflow, Vertex
from gpu_ops.descriptions.description import Description
from gpu_ops.descriptions.groups import Order, Top
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.join import Join
from gpu_ops.descriptions.keys import Key
from gpu_ops.descriptions.over import Over, WindowCall, WindowFrame
from gpu_ops.descriptions.projection import ROWS, Projection, column_of
from oracle.drive import ROW_KIND, Event, tables
from oracle.sql import FoldedInput

COLUMNS = 3


def sources(rng: random.Random) -> tuple[Input, ...]:
    """Two to four inputs of changes; some have a unique key."""
    found = []
    for number in range(rng.randint(2, 4)):
        schema = pa.schema([(f"{name}{number}", pa.int64()) for name in "kvw"])
        keyed = rng.random() < 0.4
        key = (f"w{number}",) if keyed else None
        found.append(Input(f"s{number}", schema, key, ROW_KIND, updates="retract" if keyed else "upsert"))
    return tuple(found)


def with_outputs(flow: Dataflow, rng: random.Random) -> Dataflow:
    """The same dataflow with the last operator and some others as outputs, in any order."""
    *others, last = (vertex.name for vertex in flow.operators)
    names = [*rng.sample(others, rng.randint(0, len(others))), last]
    rng.shuffle(names)
    return dataclasses.replace(flow, outputs=tuple(names))


def operators(rng: random.Random, inputs: Sequence[Input], emit: str, *, alike: bool = False) -> tuple[Vertex, ...]:
    """Operators of which each reads what is there; what nobody has read yet goes first.

    Where they are to be ``alike``, they go by the columns that are called k, mostly.
    """
    made: list[Vertex] = []
    known: dict[str, Input | Description] = {source.name: source for source in inputs}
    unread = [source.name for source in inputs]
    for number in range(6):
        if len(unread) == 1 and made and (number >= 5 or rng.random() < 0.4):
            break
        join = len(unread) > 1 or rng.random() < 0.3
        names = [unread.pop(0)]
        if join:
            names.append(unread.pop(0) if unread else rng.choice(sorted(known)))
        edges = [_edge(rng, known[name], f"{'lr'[place]}{number}") for place, name in enumerate(names)]
        reads, projections = zip(*edges, strict=True)
        description = (
            _join(rng, reads, number, emit, alike=alike) if join else _group(rng, reads[0], number, emit, alike=alike)
        )
        made.append(Vertex(f"o{number}", description, tuple(names), projections))
        known[f"o{number}"] = description
        unread.append(f"o{number}")
    while len(unread) > 1:  # what is left is joined
        number = len(made)
        names = [unread.pop(0), unread.pop(0)]
        reads = tuple(_as_input(known[name], f"{'lr'[place]}{number}") for place, name in enumerate(names))
        made.append(Vertex(f"o{number}", _join(rng, reads, number, emit, alike=alike), tuple(names)))
        known[f"o{number}"] = made[-1].description
        unread.append(f"o{number}")
    return tuple(made)


def _edge(rng: random.Random, one: Input | Description, name: str) -> tuple[Input, Projection | None]:
    """What an operator reads; of another one's changes perhaps a part, with a filter and a computed column."""
    source = _as_input(one, name)
    if isinstance(one, Input) or rng.random() < 0.5:
        return source, None
    columns = rng.sample(source.schema.names, rng.randint(1, len(source.schema)))
    taken = [column_of(source.schema.field(column)) for column in columns]
    names = [f"{column}_{name}" for column in columns]
    numbers = [column for column in source.schema.names if source.schema.field(column).type == pa.int64()]
    if numbers and rng.random() < 0.5:
        column = rng.choice(numbers)
        more = Call(Op.ADD, (ColumnRef(ROWS, column, pa.int64()), Literal(1, pa.int64())), pa.int64())
        taken.append(Expression(f"{column} + 1", more, {ROWS: (column,)}))
        names.append(f"more_{name}")
    texts = [f"{column} >= {rng.randint(0, 2)}" for column in numbers if rng.random() < 0.4]
    where = [parse(text, {ROWS: source.schema}) for text in texts]
    where = [Expression(x.sql, x.root, {ROWS: x.columns[ROWS]}) for x in where]
    for column in numbers if rng.random() < 0.2 else ():
        value, members = ColumnRef(ROWS, column, pa.int64()), [Literal(n, pa.int64()) for n in (0, 1, 3, 4)]
        where.append(Expression(f"{column} IN (0, 1, 3, 4)", Call(Op.IN, (value, *members), BOOL), {ROWS: (column,)}))
    projection = Projection(tuple(taken), tuple(where))
    schema = pa.schema(list(zip(names, projection.types(source.schema), strict=True)))
    return Input(name, schema, None, source.row_kind, updates="retract"), projection


def _as_input(one: Input | Description, name: str) -> Input:
    return dataclasses.replace(one, name=name) if isinstance(one, Input) else one.as_input(name)


def _key_column(rng: random.Random, source: Input, *, alike: bool) -> str:
    keys = [name for name in source.schema.names if name.startswith("k")]
    return rng.choice(keys if alike and keys and rng.random() < 0.9 else source.schema.names)


def _join(rng: random.Random, reads: Sequence[Input], number: int, emit: str, *, alike: bool) -> Join:
    left, right = reads
    own, its = (_key_column(rng, one, alike=alike) for one in reads)
    key = Key(own, its, null_safe=rng.random() < 0.2)
    how: Any = rng.choice(["inner", "inner", "left", "left", "right", "full", "semi", "anti"])
    return Join(how, left, right, (key,), suffixes=(f"_{number}", f"_{number}r"), emit=emit)  # type: ignore[arg-type]


def _group(rng: random.Random, source: Input, number: int, emit: str, *, alike: bool) -> Description:
    names = source.schema.names
    by: tuple[str, ...] = (_key_column(rng, source, alike=alike),)
    if alike and rng.random() < 0.5:
        by = tuple(dict.fromkeys((rng.choice(names), *by)))
    if rng.random() < 0.25:
        order = tuple(Order(name, rng.random() < 0.5) for name in names)  # all columns: equal rows are equal
        return Top(source, by, order, rng.randint(1, 3), emit)  # type: ignore[arg-type]
    if rng.random() < 0.25:
        every = tuple(Order(name, rng.random() < 0.5) for name in names)
        frame = WindowFrame("rows", rng.choice([None, -2, -1]), rng.choice([None, -1, 0, 1]))
        counted = WindowCall(f"n{number}", "count", rng.choice([None, *names]), frame)
        before = WindowCall(f"lag{number}", "lag", rng.choice(names), None, 1)
        return Over(source, by, every, (counted, before), emit)  # type: ignore[arg-type]
    measures = {f"n{number}": "count(*)", f"x{number}": f"{rng.choice(['min', 'max'])}({rng.choice(names)})"}
    return Aggregate.of(source, by, measures, emit)  # type: ignore[arg-type]


def trace(rng: random.Random, inputs: Sequence[Input], length: int) -> list[Event]:
    """Changes with retractions of rows that are there, and a few of rows that are not."""
    events: list[Event] = []
    live: list[list[tuple[Any, ...]]] = [[] for _ in inputs]
    for _ in range(length):
        side = rng.randrange(len(inputs))
        source, rows = inputs[side], live[side]
        if rows and rng.random() < 0.4:
            events.append((side, "-D", rows.pop(rng.randrange(len(rows)))))
            continue
        row: tuple[Any, ...] = tuple(rng.choice([0, 1, 2, 3, None]) for _ in range(COLUMNS))
        if source.unique_key is not None:
            free = sorted(set(range(9)) - {old[2] for old in rows})
            if not free:
                continue
            row = (*row[:2], rng.choice(free))
        elif rng.random() < 0.05:
            events.append((side, "-D", (7, 7, 7)))
        rows.append(row)
        events.append((side, "+I", row))
    return events


def cut(flow: Dataflow, events: Sequence[Event], rng: random.Random, most: int) -> list[dict[str, Any]]:
    """The trace in micro-batches of up to so many changes, as arguments of ``process``."""
    sides = tables(flow, events)
    found, start = [], 0
    while start < len(events):
        stop = min(len(events), start + rng.randint(1, most))
        batches, orders = [], []
        for table, position in sides:
            own = np.flatnonzero((position >= start) & (position < stop))
            batches.append(table.take(pa.array(own)))
            orders.append(position[own])
        found.append({"inputs": batches, "orders": orders})
        start = stop
    return found


def sql(flow: Dataflow) -> str:
    """The dataflow as SELECTs over tables that are called as its inputs are."""
    parts = []
    for vertex in flow.operators:
        description: Any = vertex.description
        sources = [_read(*edge) for edge in vertex.edges]
        names = [field.name for field in description.output_schema][1:]
        if isinstance(description, Join):
            (a, b), (key,) = sources, description.keys
            equal = f"a.{key.left} {'IS NOT DISTINCT FROM' if key.null_safe else '='} b.{key.right}"
            if description.how in ("semi", "anti"):
                no = "NOT " if description.how == "anti" else ""
                text = f"SELECT * FROM {a} a WHERE {no}EXISTS (SELECT 1 FROM {b} b WHERE {equal})"
            else:
                columns = [f"{t}.{f.name}" for t, s in zip("ab", description.inputs, strict=True) for f in s.schema]
                shown = ", ".join(f"{c} AS {n}" for c, n in zip(columns, names, strict=True))
                text = f"SELECT {shown} FROM {a} a {description.how.upper()} JOIN {b} b ON {equal}"
        elif isinstance(description, Over):
            order = ", ".join(
                f"{o.column} {'DESC NULLS LAST' if o.descending else 'ASC NULLS FIRST'}" for o in description.order
            )
            over, (counted, before) = f"PARTITION BY {', '.join(description.by)} ORDER BY {order}", description.calls
            text = (
                f"SELECT *, count({counted.column or '*'}) OVER ({over} {counted.frame}) AS {counted.name}, "
                f"lag({before.column}) OVER ({over}) AS {before.name} FROM {sources[0]}"
            )
        elif isinstance(description, Top):
            order = ", ".join(
                f"{o.column} {'DESC NULLS LAST' if o.descending else 'ASC NULLS FIRST'}" for o in description.order
            )
            over = f"PARTITION BY {', '.join(description.by)} ORDER BY {order}"
            text = f"SELECT * FROM {sources[0]} QUALIFY row_number() OVER ({over}) <= {description.n}"
        else:
            by = ", ".join(description.by)
            calls = [f"{m.function}({m.column or '*'}) AS {m.name}" for m in description.measures]
            text = f"SELECT {', '.join([by, *calls])} FROM {sources[0]} GROUP BY {by}"
        parts.append(f"{vertex.name} AS ({text})")
    return f"WITH {', '.join(parts)} SELECT * FROM {flow.operators[-1].name}"


def _read(source: Input, name: str, projection: Projection | None) -> str:
    """What stands in FROM for an input of an operator."""
    if projection is None:
        return name
    shown = ", ".join(f"{x.sql} AS {new}" for x, new in zip(projection.columns, source.schema.names, strict=True))
    where = " AND ".join(["true", *(x.sql for x in projection.where)])
    return f"(SELECT {shown} FROM {name} WHERE {where})"


def expected(flow: Dataflow, folded: Sequence[FoldedInput], text: str) -> Counter[tuple[Any, ...]]:
    with duckdb.connect(":memory:", config={"threads": "1"}) as connection:
        for source, one in zip(flow.inputs, folded, strict=True):
            columns = list(zip(*one.rows(), strict=True)) or [()] * COLUMNS
            data = [pa.array(column, field.type) for column, field in zip(columns, source.schema, strict=True)]
            connection.register(source.name, pa.table(data, schema=source.schema))
        return Counter(connection.execute(text).fetchall())


def dataflow(rng: random.Random, emit: str, *, alike: bool = False) -> Dataflow:
    """A random one; ``alike``: its operators go by the same values, if they can."""
    inputs = sources(rng)
    return Dataflow(inputs, operators(rng, inputs, emit, alike=alike))
