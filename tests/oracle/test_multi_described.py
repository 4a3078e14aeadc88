"""Multi-way joins as users write them, against SQL as users write it: nothing of the description is in the SQL."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from decimal import Decimal
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from gpu_ops.descriptions.description import Emit
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.keys import Equality
from gpu_ops.descriptions.multi_join import MultiJoin
from oracle.drive import Backend, Event, Row, changes, cuts, difference, fold, rows
from oracle.sql import FoldedInput

Column = tuple[str, pa.DataType, tuple[Any, ...]]

K, G, X = (
    ("k", pa.int64(), (None, 1, 2, 3, 4)),
    ("g", pa.string(), (None, "x", "y")),
    ("x", pa.int32(), (None, 0, 1, 2)),
)
DAY = 86_400_000_000


def source(name: str, *columns: Column, unique: tuple[str, ...] = (), **options: Any) -> tuple[Input, list[Column]]:
    """An input, and what its columns hold."""
    fields = [pa.field(n, kind) for n, kind, _ in columns]
    return Input(name, pa.schema(fields), unique_key=unique or None, row_kind="row_kind", **options), list(columns)


@dataclasses.dataclass(frozen=True)
class Written:
    """A join in both ways.

    Attributes:
        inputs: as `source` makes them, in the order in which they are written.
        sql: over tables called as the inputs are, its columns in the changelog's order.
        on: as `MultiJoin.of` takes it.
        how: likewise.
        options: likewise.
    """

    inputs: tuple[tuple[Input, list[Column]], ...]
    sql: str
    on: Any
    how: Any = "inner"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def join(self, emit: Emit) -> MultiJoin:
        return MultiJoin.of([i for i, _ in self.inputs], self.on, self.how, emit=emit, **self.options)


A, B, C, D = (source(n, K, G, (n.lower(), *X[1:])) for n in "ABCD")
ID = ("id", pa.int64(), tuple(range(12)))
CASES: dict[str, Written] = {
    "USING one": Written(
        (A, B, C),
        "SELECT A.k, A.g AS g_1, a, B.g AS g_2, b, C.g AS g_3, c FROM A LEFT JOIN B ON A.k = B.k JOIN C ON A.k = C.k",
        "k", ["left", "inner"], {"suffixes": ["_1", "_2", "_3"]},
    ),
    "USING two": Written(
        (A, B, C, D),
        "SELECT A.k, A.g, a, b, c, d FROM A LEFT JOIN B ON A.k = B.k AND A.g = B.g JOIN C ON A.k = C.k AND A.g = C.g "
        "LEFT JOIN D ON A.k = D.k AND A.g = D.g",
        ["k", "g"], ["left", "inner", "left"],
    ),
    "right first": Written(
        (A, B),
        "SELECT A.k, A.g, a, B.k, B.g, b FROM A RIGHT JOIN B ON A.k = B.k AND A.g = B.g",
        [[("A.k", "k"), ("A.g", "g")]], "right", {"suffixes": ["_1", "_2"]},
    ),
    "right, then left": Written(
        (A, B, C),
        "SELECT A.*, B.*, C.* FROM A RIGHT JOIN B ON A.k = B.k LEFT JOIN C ON B.k = C.k AND A.g = C.g",
        [("A.k", "k"), [("B.k", "k"), ("A.g", "g")]], ["right", "left"], {"suffixes": ["_1", "_2", "_3"]},
    ),
    "right, USING": Written(
        (A, B, C),
        "SELECT k, g, a, b, c FROM A RIGHT JOIN B USING (k, g) LEFT JOIN C USING (k, g)",
        ["k", "g"], ["right", "left"],
    ),
    "right with conditions": Written(
        (A, B, C),
        "SELECT A.*, B.*, C.* FROM A RIGHT JOIN B ON A.k = B.k AND a < b JOIN C ON C.k = B.k AND (a IS NULL OR a <> c)",
        [("k", "k"), ("B.k", "k")], ["right", "inner"],
        {"suffixes": ["_1", "_2", "_3"], "where": ["a < b", "a IS NULL OR a <> c"]},
    ),
    "null-safe": Written(
        (A, B, C),
        "SELECT A.*, B.*, C.* FROM A LEFT JOIN B ON A.k = B.k AND A.g IS NOT DISTINCT FROM B.g "
        "LEFT JOIN C ON A.k = C.k AND B.g IS NOT DISTINCT FROM C.g",
        [
            [("k", "k"), Equality(0, "g", "g", null_safe=True)],
            [("A.k", "k"), Equality(1, "g", "g", null_safe=True)],
        ],
        "left", {"suffixes": ["_1", "_2", "_3"]},
    ),
    "conditions over three": Written(
        (A, B, C),
        "SELECT A.*, B.*, C.* FROM A LEFT JOIN B ON A.k = B.k AND A.a >= B.b "
        "LEFT JOIN C ON A.k = C.k AND (A.a + B.b > C.c OR B.b IS NULL AND C.g > 'x')",
        [("k", "k"), ("A.k", "k")], "left",
        {"suffixes": ["_1", "_2", "_3"], "where": ["A.a >= B.b", "A.a + B.b > C.c OR B.b IS NULL AND C.g > 'x'"]},
    ),
    "a condition on the left only": Written(
        (A, B, C),
        "SELECT A.*, B.*, C.* FROM A LEFT JOIN B ON A.k = B.k AND a > 0 LEFT JOIN C ON A.k = C.k AND b > 0 AND c < 2",
        [("k", "k"), ("A.k", "k")], "left",
        {"suffixes": ["_1", "_2", "_3"], "where": ["a > 0", "b > 0 AND c < 2"]},
    ),
    "keys of many widths": Written(
        (
            source("A", ("k", pa.int8(), (None, -1, 1, 2)), ("a", *X[1:])),
            source("B", ("bk", pa.int64(), (None, -1, 1, 2, 2**40)), ("b", *X[1:])),
            source("C", ("k", pa.int32(), (None, -1, 1, 2)), ("ck", pa.int16(), (1, 2)), ("c", *X[1:])),
        ),
        "SELECT A.*, B.*, C.* FROM A JOIN B ON A.k = B.bk LEFT JOIN C ON B.bk = C.k",
        [("k", "bk"), [("bk", "k")]], ["inner", "left"], {"suffixes": ["_1", "_2", "_3"]},
    ),
    "two columns equal to one": Written(
        (A, B, source("C", ("p", *K[1:]), ("q", *K[1:]), ("c", *X[1:]))),
        "SELECT A.*, B.*, C.* FROM A JOIN B ON A.k = B.k LEFT JOIN C ON B.k = C.p AND A.k = C.q",
        [("k", "k"), [("B.k", "p"), ("A.k", "q")]], ["inner", "left"], {"suffixes": ["_1", "_2", "_3"]},
    ),
    "two columns that one is equal to": Written(
        (source("A", ("p", *K[1:]), ("q", *K[1:]), ("a", *X[1:])), B, C),
        "SELECT A.*, B.*, C.* FROM A LEFT JOIN B ON A.p = B.k AND A.q = B.k JOIN C ON A.p = C.k",
        [[("p", "k"), ("q", "k")], ("p", "k")], ["left", "inner"], {"suffixes": ["_1", "_2", "_3"]},
    ),
    "doubles": Written(
        tuple(
            source(n, ("k", kind, (None, 0.0, -0.0, float("nan"), 1.5)), (n.lower(), *X[1:]))
            for n, kind in (("A", pa.float64()), ("B", pa.float32()), ("C", pa.float64()))
        ),
        "SELECT A.k, a, b, c FROM A LEFT JOIN B ON A.k = B.k LEFT JOIN C ON A.k = C.k",
        "k", "left",
    ),
    "decimals": Written(
        tuple(
            source(n, ("k", pa.decimal128(*kind), (None, Decimal("1.5"), Decimal(-1), Decimal(0))), (n.lower(), *X[1:]))
            for n, kind in (("A", (10, 2)), ("B", (20, 5)), ("C", (12, 1)))
        ),
        "SELECT A.*, B.*, C.* FROM A LEFT JOIN B ON A.k = B.k JOIN C ON B.k = C.k",
        [("k", "k"), ("B.k", "k")], ["left", "inner"], {"suffixes": ["_1", "_2", "_3"]},
    ),
    "timestamps": Written(
        tuple(
            source(n, ("k", pa.timestamp(unit), (None, 0, DAY // per, -DAY // per)), (n.lower(), *X[1:]))
            for n, unit, per in (("A", "ms", 1000), ("B", "us", 1), ("C", "s", 1_000_000))
        ),
        "SELECT epoch_us(A.k::TIMESTAMP), a, b, c FROM A LEFT JOIN B ON A.k = B.k LEFT JOIN C ON B.k = C.k",
        [["k"], [Equality(1, "k", "k", using=True)]], "left",
    ),
    "strings": Written(
        tuple(
            source(n, ("k", kind, (None, "", "a", "A", "\u00e4")), (n.lower(), *X[1:]))
            for n, kind in (("A", pa.string()), ("B", pa.large_string()), ("C", pa.string()))
        ),
        "SELECT A.k, a, b, c FROM A JOIN B ON A.k = B.k LEFT JOIN C ON A.k = C.k",
        "k", ["inner", "left"],
    ),
    "upserts": Written(
        (
            source("A", ID, K, unique=("id",)),
            source("B", K, X, unique=("k",), updates="upsert"),
            source("C", ID, K, X, unique=("id", "k"), updates="upsert"),
        ),
        "SELECT A.*, B.*, C.* FROM A LEFT JOIN B ON A.k = B.k LEFT JOIN C ON B.k = C.k AND B.x < C.x",
        [("k", "k"), ("B.k", "k")], "left", {"suffixes": ["_1", "_2", "_3"], "where": [None, "B.x < C.x"]},
    ),
    "a name with a dot and a blank": Written(
        (
            source("left", ("my k", pa.int64(), (None, 1, 2)), ("a.b", *X[1:])),
            source("t.1", ("K", pa.int64(), (None, 1, 2)), ("select", *X[1:])),
        ),
        'SELECT * FROM "left" LEFT JOIN "t.1" ON "my k" = "K" AND "a.b" <= "t.1"."select"',
        [("my k", "K")], "left", {"where": "`a.b` <= `t.1`.`select`"},
    ),
}  # fmt: skip


def random_events(written: Written, count: int, seed: int) -> list[Event]:
    """Changes of any kind for inputs as they are written; some take what is not there."""
    rng, live, found = random.Random(seed), [[] for _ in written.inputs], list[Event]()
    for _ in range(count):
        side = rng.randrange(len(live))
        told, columns = written.inputs[side]
        if live[side] and rng.random() < 0.35:
            rows_ = live[side]
            gone = rows_.pop(rng.randrange(len(rows_)))
            found.append((side, rng.choice(("-D", "-U")), gone))
            continue
        unique = told.unique_key or ()
        row: Row = tuple(
            rng.choice([v for v in values if v is not None or n not in unique]) for n, _, values in columns
        )
        live[side].append(row)
        found.append((side, rng.choice(("+I", "+U")), row))
    return found


@pytest.mark.one_in(8, all=4)
@pytest.mark.parametrize("emit", ["per_event", "per_batch"])
@pytest.mark.parametrize("name", list(CASES))
def test_as_written(name: str, emit: Emit, backend: Backend) -> None:
    """After every micro-batch, the folded changelog is what the SQL says of the folded inputs."""
    written = CASES[name]
    join = written.join(emit)
    # The engine's inputs may come in another order than the user's.
    place = [join.sides.index(i.name) for i, _ in written.inputs]
    events = random_events(written, 160, seed=len(name))
    own = [(place[side], kind, row) for side, kind, row in events]
    inputs = [FoldedInput(i.schema.names, i.unique_key) for i, _ in written.inputs]
    folded: Counter[Row] = Counter()
    largest = 0
    with duckdb.connect(":memory:", config={"threads": "1"}) as database, backend.engine(join) as engine:
        for cut in cuts(join, own, (40, 1, 25), shuffle=3):
            for side, kind, row in events[cut.start : cut.stop]:
                inputs[side].apply(kind, row)
            for (told, _), table in zip(written.inputs, inputs, strict=True):
                columns = list(zip(*table.rows(), strict=True)) or [()] * len(told.schema)
                arrays = [pa.array(list(c), f.type) for c, f in zip(columns, told.schema, strict=True)]
                database.register(told.name, pa.table(arrays, names=told.schema.names))
            batch = engine.prepare(*cut.batches, **cut.inputs)
            engine.commit()
            fold(changes(batch.changelog), folded)
            wanted = Counter(rows(database.sql(written.sql).to_arrow_table()))
            wrong = difference(wanted, folded)
            assert not wrong, f"after events {cut.start} to {cut.stop - 1}:\n{wrong}"
            largest = max(largest, wanted.total())
    assert largest > 3
