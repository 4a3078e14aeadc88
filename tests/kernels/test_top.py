"""The first rows of each group on any backend: against DuckDB after every micro-batch, and change by change by hand."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from conftest import combined
from oracle.drive import Backend

from gpu_ops.descriptions.description import Emit
from gpu_ops.descriptions.groups import Order, Top, parse_order
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.kinds import from_json
from gpu_ops.errors import DescriptionError
from kernels.conftest import EMULATED, only_on
from kernels.engines import CPU, alike, restarting, run

NAN, DUCKDB = float("nan"), duckdb.connect(config={"threads": "1"})
SCHEMA = pa.schema(
    [
        ("id", pa.int32()),
        ("g", pa.string()),
        ("whole", pa.int64()),
        ("real", pa.float64()),
        ("text", pa.string()),
        ("short", pa.decimal128(9, 2)),
        ("long", pa.decimal128(30, 4)),
        ("unsigned", pa.uint64()),
    ]
)
VALUES: tuple[Sequence[Any], ...] = (
    ("x", "y", None),
    (3, -3, None, (1 << 63) - 1, -(1 << 63), (1 << 63) - 2, 7),
    (0.0, -0.0, NAN, None, float("inf"), -1.5, float("-inf")),
    ("prefix, the same", "prefix, the same, longer", "", None, "q", "prefix, the sama", "é"),
    (Decimal("1.50"), Decimal("-7.25"), None),
    (Decimal("1.0001"), Decimal("12345678901234567890.0001"), Decimal("12345678901234567890.0002"), None),
    (0, (1 << 64) - 1, None, 1 << 63),
)
ORDERS = ["whole", "real DESC", "text", "text DESC NULLS FIRST", "short NULLS LAST", "long DESC", "unsigned",
          "whole DESC NULLS FIRST, text DESC, real", "unsigned DESC",
          "whole, text DESC, whole DESC, text", "real DESC NULLS FIRST, real, real NULLS LAST"]  # fmt: skip
Change = tuple[Any, ...]


def described(order: str, n: int = 2, emit: Emit = "per_batch", number: str | None = None, **options: Any) -> Top:
    given = {"row_kind": "op", **options}
    return Top(Input("rows", SCHEMA, **given), ("g",), parse_order(order), n, emit, number)


def trace(seed: int, events: int, *, keyed: bool, kinds: str = "+-") -> list[Change]:
    """Changes; retractions are mostly of rows that are there, by value."""
    choice, there, changes = random.Random(seed), list[tuple[Any, ...]](), list[Change]()
    for number in range(events):
        if there and choice.choice(kinds) == "-" and choice.random() < 0.9:
            row = choice.choice(there) if choice.random() < 0.9 else (99, *there[0][1:])
            changes.append((choice.choice(["-D", "-U"]), *row))
            there = [x for x in there if x[0] != row[0]] if keyed else without(there, row)
            continue
        row = (choice.randrange(9) if keyed else number // 2 % 7, *(choice.choice(values) for values in VALUES))
        there = [x for x in there if x[0] != row[0]] if keyed else there
        there.append(row)
        changes.append((choice.choice(["+I", "+U"]), *row))
    return changes


def without(rows: list[tuple[Any, ...]], row: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    at = next((i for i, x in enumerate(rows) if shown(x) == shown(row)), None)
    return rows if at is None else rows[:at] + rows[at + 1 :]


def shown(row: Sequence[Any]) -> tuple[str, ...]:
    """Values as text, so that NaN equals itself, and zeros each other."""
    return tuple("0.0" if value == 0 and isinstance(value, float) else str(value) for value in row)


def table(changes: Sequence[Change], op: bool = True) -> pa.Table:
    schema = pa.schema([("op", pa.string()), *SCHEMA]) if op else SCHEMA
    columns = list(zip(*changes, strict=True)) if changes else [()] * 9
    columns = columns if op else columns[1:]
    return pa.Table.from_arrays(
        [pa.array(list(values), field.type) for values, field in zip(columns, schema, strict=True)], schema=schema
    )


def folded(changes: Sequence[Change], *, keyed: bool) -> list[tuple[Any, ...]]:
    """The rows there are, in the order in which they arrived."""
    rows: list[tuple[Any, ...]] = []
    for kind, *row in changes:
        if keyed:
            rows = [x for x in rows if x[0] != row[0]]
        if kind in ("+I", "+U"):
            rows.append(tuple(row))
        elif not keyed:
            rows = without(rows, tuple(row))
    return rows


def by_duckdb(rows: list[tuple[Any, ...]], top: Top) -> list[tuple[str, ...]]:
    terms = [f"{o.column} {'DESC' if o.descending else 'ASC'} NULLS {'FIRST' if o.nulls_first else 'LAST'}"
             for o in top.order]  # fmt: skip
    given = table([("+I", *row) for row in rows], op=False).append_column("arrival", pa.array(range(len(rows))))
    DUCKDB.register("given", given)
    over = f"OVER ({'PARTITION BY g' if top.by else ''} ORDER BY {', '.join(terms)}, arrival)"
    number = f", row_number() {over} AS number" if top.number else ""
    found = DUCKDB.sql(f"SELECT * EXCLUDE (arrival){number} FROM given QUALIFY row_number() {over} <= {top.n}")
    return sorted(map(shown, found.fetchall()))


class View:
    """What a changelog adds up to; a row is taken only where there is one."""

    def __init__(self) -> None:
        self.rows = Counter[tuple[str, ...]]()

    def take(self, changelog: pa.Table) -> list[tuple[str, ...]]:
        told = [shown(row.values()) for row in changelog.to_pylist()]
        for kind, *row in told:
            self.rows[tuple(row)] += 1 if kind[0] == "+" else -1
            assert self.rows[tuple(row)] >= 0, f"{kind} of a row that is not there: {row}"
        return told

    def sorted(self) -> list[tuple[str, ...]]:
        return sorted(self.rows.elements())


@only_on("cpu-tiny", "gpu", *EMULATED)
@pytest.mark.parametrize(
    ("kind", "emit", "by"),
    combined(["insert only", "retractions", "upserts"], ["per_event", "per_batch"], [("g",), ()]),
)
def test_groups_that_nothing_changes_are_forgotten(
    engines: Backend, kind: str, emit: Emit, by: tuple[str, ...]
) -> None:
    """After the TTL, all rows of them at once and without a word, over restarts, too; then they begin anew."""
    keyed, ttl, choice = kind == "upserts", 100, random.Random(kind + emit)
    changes = trace(5, 100, keyed=keyed, kinds="++" if kind == "insert only" else "+-")
    options = {"row_kind": None} if kind == "insert only" else {"unique_key": ("id",) if keyed else None}
    top = dataclasses.replace(described("whole DESC", 2, emit, ttl_ms=ttl, **options), by=by)
    view, rows, clock, expired = View(), list[tuple[Any, ...]](), 0, 0
    written: dict[Any, int] = {}

    def group(row: Sequence[Any]) -> Any:
        return row[1] if by else None

    for start, engine in zip(range(0, len(changes), 5), restarting(engines, top), strict=False):
        clock, part = clock + choice.choice([0, 40, 99, 100, 150]), changes[start : start + 5]
        gone = {key for key, when in written.items() if when + ttl <= clock}
        written = {key: when for key, when in written.items() if key not in gone}
        rows = [row for row in rows if group(row) not in gone]
        for row in list(view.rows):
            if (row[1] if by else None) in {str(key) if by else None for key in gone}:
                del view.rows[row]
        for change in part:
            before = rows
            rows = folded([*(("+I", *row) for row in rows), change], keyed=keyed)
            touched = [row for row in before if row not in rows] + ([change[1:]] if change[0] in ("+I", "+U") else [])
            touched += [change[1:]] if len(before) > len(rows) else []
            for row in touched if not keyed else [*touched, *(x for x in before if x[0] == change[1])]:
                written[group(row)] = clock
        given = table(part, op=kind != "insert only")
        engine.prepare(given, clock_ms=clock)
        engine.discard()
        batch = engine.prepare(given, clock_ms=clock)
        engine.commit()
        expired += batch.metrics["rows_expired"]
        view.take(batch.changelog)
        assert view.sorted() == by_duckdb(rows, top)
    assert expired > 5


@pytest.mark.one_in(6, all=3)
@pytest.mark.parametrize("emit", ["per_event", "per_batch"])
@pytest.mark.parametrize("order", ORDERS)
def test_after_every_micro_batch(other_backend: Backend, order: str, emit: Emit) -> None:
    for seed, (size, n, number) in enumerate([(1, 1, None), (7, 3, "number"), (40, 2, None), (13, 2, "number")]):
        keyed = (seed + ORDERS.index(order)) % 2 == 0
        changes, view = trace(seed, 40 if size == 1 else 120, keyed=keyed), View()
        top = described(order, n, emit, number, unique_key=("id",) if keyed else None)
        state = None
        for half in (changes[:60], changes[60:]):
            with other_backend.engine(top) as engine:
                if state is not None:
                    engine.restore(state)
                done = 60 if state is not None else 0
                for start in range(0, len(half), size):
                    part = half[start : start + size]
                    engine.prepare(table(part[::-1]))
                    engine.discard()
                    told = view.take(engine.process(table(part)))
                    rows = folded(changes[: done + start + len(part)], keyed=keyed)
                    assert view.sorted() == by_duckdb(rows, top), (seed, start)
                    if emit == "per_batch":
                        came, went = ({tuple(row) for kind, *row in told if kind == k} for k in ("+I", "-D"))
                        assert not came & went
                state = engine.snapshot()


def by_hand(changes: Sequence[Change], n: int, number: bool, *, keyed: bool) -> list[Counter[tuple[str, ...]]]:
    """Of each change what it says, as `gpu_ops.operators.groups.top` has it; ordered by ``whole DESC``."""

    def result(rows: list[tuple[Any, ...]], group: Any) -> list[tuple[str, ...]]:
        own = [row for row in rows if row[1] == group]
        own.sort(key=lambda row: (row[2] is None, -(row[2] or 0)))  # a stable sort: else by arrival
        return [shown(row) + ((str(at),) if number else ()) for at, row in enumerate(own[:n], 1)]

    found = []
    for end in range(1, len(changes) + 1):
        before, after = folded(changes[: end - 1], keyed=keyed), folded(changes[:end], keyed=keyed)
        said = Counter[tuple[str, ...]]()
        for group in VALUES[0]:
            old, new = result(before, group), result(after, group)
            for at in range(n) if number else ():
                was, now = old[at : at + 1], new[at : at + 1]
                if was != now:
                    said.update(("-U" if now else "-D", *row) for row in was)
                    said.update(("+U" if was else "+I", *row) for row in now)
            if not number:
                gone, come = Counter(old) - Counter(new), Counter(new) - Counter(old)
                said.update(("-D", *row) for row in gone.elements())
                said.update(("+I", *row) for row in come.elements())
        found.append(said)
    return found


@pytest.mark.one_in(3)
@pytest.mark.parametrize("keyed", [True, False])
@pytest.mark.parametrize("number", ["number", None])
@pytest.mark.parametrize("size", [1, 7, 90])
def test_change_by_change(backend: Backend, size: int, number: str | None, keyed: bool) -> None:
    changes = trace(5, 90, keyed=keyed)
    wanted = by_hand(changes, 2, number is not None, keyed=keyed)
    top = described("whole DESC", 2, "per_event", number, unique_key=("id",) if keyed else None)
    with backend.engine(top) as engine:
        for start in range(0, len(changes), size):
            batch = engine.prepare(table(changes[start : start + size]))
            engine.commit()
            said = [Counter[tuple[str, ...]]() for _ in changes[start : start + size]]
            for at, row in zip(batch.sequence, batch.changelog.to_pylist(), strict=True):
                said[at][shown(row.values())] += 1
            for at, (ours, theirs) in enumerate(zip(said, wanted[start:], strict=False)):
                assert equal_by_value(ours) == equal_by_value(theirs), changes[start + at]


def equal_by_value(said: Counter[tuple[str, ...]]) -> Counter[tuple[str, ...]]:
    """Without a row that goes and comes, equal by value: it is another one, that arrived later."""
    left = Counter[tuple[str, ...]](said)
    for kind, *row in said:
        if kind == "-D":
            both = min(said[("-D", *row)], said[("+I", *row)])
            left[("-D", *row)] -= both
            left[("+I", *row)] -= both
    return +left


@only_on("cpu-tiny", "gpu", "gpu-tiny", *EMULATED)
@pytest.mark.parametrize("emit", ["per_event", "per_batch"])
@pytest.mark.parametrize("order", ["whole", "real DESC, text"])
def test_same_as_the_cpu(engines: Backend, emit: Emit, order: str) -> None:
    changes = trace(8, 90, keyed=False)
    batches = [([table(changes[at : at + 23])], {}) for at in range(0, 90, 23)]
    top = described(order, 2, emit, "number")
    alike(run(engines, top, batches), run(CPU, top, batches))


@pytest.mark.usefixtures("one_hash")
@only_on("cpu", "cpu-tiny", "emulated-tiny")
def test_groups_with_one_hash(engines: Backend) -> None:
    changes, view, top = trace(3, 120, keyed=False), View(), described("whole", 2)
    with engines.engine(top) as engine:
        for start in range(0, 120, 17):
            view.take(engine.process(table(changes[start : start + 17])))
            assert view.sorted() == by_duckdb(folded(changes[: start + 17], keyed=False), top)


def test_of_insertions_only_the_first_rows_are_kept(backend: Backend) -> None:
    for emit in ("per_event", "per_batch"):
        top, view = described("real DESC", 2, emit, None, row_kind=None), View()
        with backend.engine(top) as engine:
            for seed in range(6):
                changes = trace(seed, 40, keyed=False, kinds="+")
                view.take(engine.process(table(changes, op=False)))
                assert len(engine.snapshot()["rows"]) == 6
                kept = by_duckdb(
                    [tuple(row.values()) for row in engine.snapshot()["rows"].select(SCHEMA.names).to_pylist()], top
                )
                assert view.sorted() == kept
            every = [row[1:] for seed in range(6) for row in trace(seed, 40, keyed=False, kinds="+")]
            assert view.sorted() == by_duckdb(every, top)


def test_rows_in_front_that_go_again_and_again() -> None:
    plain = pa.schema([("id", pa.int64()), ("kind", pa.string())])
    top = Top(Input("tasks", plain, row_kind="op"), (), (Order("id"),), 1)
    with CPU.engine(top) as engine:
        first = pa.table({"op": ["+I"] * 20_000, "id": range(20_000), "kind": ["a"] * 20_000})
        assert engine.process(first).to_pylist() == [{"row_kind": "+I", "id": 0, "kind": "a"}]
        for at in range(0, 19_000, 500):
            gone = pa.table({"op": ["-D"] * 500, "id": range(at, at + 500), "kind": ["a"] * 500})
            assert engine.process(gone)["id"].to_pylist() == [at, at + 500]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("by", [("g",), ()], ids=["g", "all"])
@pytest.mark.parametrize("kind", ["insert only", "retractions", "upserts"])
@pytest.mark.parametrize("order", ORDERS[:9:4])
def test_at_the_end(engines: Backend, order: str, kind: str, by: tuple[str, ...]) -> None:
    """Nothing before it; with a restart and discarded micro-batches."""
    inserted, keyed = kind == "insert only", kind == "upserts"
    given = {"row_kind": None} if inserted else {"unique_key": ("id",)} if keyed else {}
    top = dataclasses.replace(described(order, 3, "at_end", "number", **given), by=by)
    changes, view, state = trace(5, 90, keyed=keyed, kinds="+" if inserted else "+-"), View(), None
    for half, last in ((changes[:50], False), (changes[50:], True)):
        with engines.engine(from_json(top.to_json())) as engine:
            if state is not None:
                engine.restore(state)
            engine.prepare(table(half, op=not inserted))
            engine.discard()
            assert not engine.process(table(half, op=not inserted)).num_rows
            state = engine.snapshot()
            if last:
                assert all(row[0] == "+I" for row in view.take(engine.finish()))
    assert view.sorted() == by_duckdb(folded(changes, keyed=keyed), top)


def test_nulls_without_a_word_about_them_come_where_spark_has_them() -> None:
    """First if ascending, last if descending: in an `Order`, in ``order_by=``, and in a description as it is stored."""
    schema = pa.schema([("id", pa.int64()), ("amount", pa.int64())])
    rows = pa.table([[1, 2, 3], [5, None, 7]], schema=schema)
    for order, text, wanted in (
        (Order("amount"), "amount", [None, 5, 7]),
        (Order("amount", descending=True), "amount DESC", [7, 5, None]),
        (Order("amount", nulls_first=False), "amount NULLS LAST", [5, 7, None]),
        (Order("amount", True, True), "amount DESC NULLS FIRST", [None, 7, 5]),
    ):
        assert parse_order(text) == (order,)
        assert str(order) == text
        for emit in ("per_batch", "at_end"):
            top = Top(Input("t", schema), (), (order,), 3, emit, "place")  # type: ignore[arg-type]
            with CPU.engine(from_json(top.to_json())) as engine:
                assert engine.description == top
                found = engine.process(rows)
                found = engine.finish() if emit == "at_end" else found
                by_place = sorted(found.to_pylist(), key=lambda row: row["place"])
                assert [row["amount"] for row in by_place] == wanted


def test_what_it_says_of_itself() -> None:
    top = described("whole DESC, `text` NULLS LAST", 3, "per_event", "number")
    assert from_json(top.to_json()) == top
    assert top.order == (Order("whole", True, False), Order("text", False, False))
    assert top.lines()[2] == "  order       whole DESC, text NULLS LAST, then arrival"
    assert (top.unique_key, described("id", unique_key=("id",)).unique_key) == (None, None)  # a group may be null
    keyed = described("id", unique_key=("id", "g"), number="number")
    assert (keyed.unique_key, dataclasses.replace(keyed, by=("id",)).unique_key) == (("id", "g"), ("id", "g"))
    upserts = described("id", unique_key=("id",))
    assert (len(top.shuffled_by), upserts.shuffled_by) == (1, ())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"order": ""}, "order_by='' is no order"),
        ({"order": "whole UP"}, "order_by='whole UP' is no order"),
        ({"order": "nothing"}, "input 'rows': order_by names 'nothing'; there are id, g"),
        ({"order": "id", "n": 0}, "n=0; it is between 1 and 10000"),
        ({"order": "id", "number": "g"}, "would have two columns 'g'"),
        ({"order": "id", "emit": "at_watermark"}, "emit='at_watermark'; it is one of per_batch, per_event, at_end"),
    ],
)
def test_what_cannot_be(given: dict[str, Any], message: str) -> None:
    with pytest.raises(DescriptionError, match=message.replace("[", r"\[").replace("(", r"\(")):
        described(**given)
