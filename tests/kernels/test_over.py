"""Window functions on any backend: against DuckDB after every micro-batch, and change by change one by one."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from conftest import slow_but
from oracle.drive import Backend

from gpu_ops.descriptions.description import Emit
from gpu_ops.descriptions.groups import parse_order
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.kinds import from_json
from gpu_ops.descriptions.over import Over, WindowCall, WindowFrame
from gpu_ops.errors import DescriptionError
from kernels.conftest import EMULATED, only_on
from kernels.engines import CPU, alike, restarting, run
from kernels.test_top import DUCKDB, ORDERS, SCHEMA, folded, shown, table, trace

FRAMES: list[tuple[Any, ...]] = [
    ("range", None, 0), ("range", 0, None), ("range", 0, 0), ("rows", None, 0), ("rows", -1, 1), ("rows", -2, -1),
    ("rows", 1, 3), ("rows", 0, None), ("rows", None, -2), ("rows", 2, 1), ("rows", -100, 100),
]  # fmt: skip
VALUES = ["whole", "real", "text", "short", "long", "unsigned"]
ROUGH = ("avg", "stddev_samp", "var_pop", "percent_rank", "cume_dist")
KINDS: dict[str, dict[str, Any]] = {
    "insert only": {"row_kind": None},
    "retractions": {},
    "upserts": {"unique_key": ("id",)},
}


def calls_of(seed: int, count: int = 6) -> tuple[WindowCall, ...]:
    choice, calls = random.Random(seed), list[WindowCall]()
    for number in range(count):
        name: Any = choice.choice(
            ["row_number", "rank", "dense_rank", "percent_rank", "cume_dist", "ntile", "count", "sum", "sum", "avg",
             "min", "max", "stddev_samp", "var_pop", "lag", "lag", "first", "last", "nth"]
        )  # fmt: skip
        column: str | None = choice.choice(VALUES)
        frame = choice.choice([None, *(WindowFrame(*ends) for ends in FRAMES)])
        given: int | None = None
        if name in ("row_number", "rank", "dense_rank", "percent_rank", "cume_dist", "ntile"):
            column = frame = None
        if name in ("stddev_samp", "var_pop"):
            column = "id"
        elif name in ("sum", "avg"):
            column = choice.choice(["id", "real", "short", "long"] if name == "sum" else ["id", "short"])
        elif name == "count":
            column = choice.choice([column, None])
        elif name == "ntile":
            given = choice.choice([1, 2, 3, 100])
        elif name == "lag":
            given, frame = choice.choice([1, 2, -1, -3, 0]), None
        elif name == "nth":
            given = choice.choice([1, 2, 5])
        ignores = name in ("lag", "first", "last", "nth") and given != 0 and choice.random() < 0.5
        calls.append(WindowCall(f"c{number}", name, column, frame, given, ignores))
    return tuple(calls)


def described(order: str, calls: Sequence[WindowCall], emit: Emit = "per_batch", **options: Any) -> Over:
    given = {"row_kind": "op", **options}
    return Over(Input("rows", SCHEMA, **given), ("g",), parse_order(order) if order else (), tuple(calls), emit)


def in_duckdb(call: WindowCall, over: Over) -> str:
    name, given = call.function, [*call.columns]
    if name == "lag" and (call.number or 0) < 0:
        name, given = "lead", [*given, str(-(call.number or 0))]  # type: ignore[assignment]
    elif call.number is not None:
        given = [*given, str(call.number)]
    name = {"first": "first_value", "last": "last_value", "nth": "nth_value"}.get(name, name)  # type: ignore[assignment]
    terms = [f"{o.column} {'DESC' if o.descending else 'ASC'} NULLS {'FIRST' if o.nulls_first else 'LAST'}"
             for o in over.order]  # fmt: skip
    frame = call.frame
    peers = (frame is not None and frame.unit == "range") or name in (
        "rank", "dense_rank", "percent_rank", "cume_dist",
    )  # fmt: skip
    order = ", ".join([*terms, *([] if peers and terms else ["0" if peers else "arrival"])])
    ends = "" if frame is None else str(frame)
    if frame is None and name not in ("lag", "lead", "ntile", "row_number") and not peers:
        ends = "ROWS BETWEEN UNBOUNDED PRECEDING AND UNBOUNDED FOLLOWING"
    by = "PARTITION BY g " if over.by else ""
    nulls = " IGNORE NULLS" if call.ignore_nulls else ""
    shown_call = f"{name}({', '.join(given) or ('*' if name == 'count' else '')}{nulls})"
    return f"{shown_call} OVER ({by}ORDER BY {order} {ends}) AS {call.name}"


def by_duckdb(rows: list[tuple[Any, ...]], over: Over) -> list[tuple[str, ...]]:
    given = table([("+I", *row) for row in rows], op=False).append_column("arrival", pa.array(range(len(rows))))
    DUCKDB.register("given", given)
    asked = ", ".join(in_duckdb(call, over) for call in over.calls)
    found = DUCKDB.sql(f"SELECT * EXCLUDE (arrival), {asked} FROM given").fetchall()
    return sorted(rounded(row, over) for row in found)


def rounded(row: Sequence[Any], over: Over) -> tuple[str, ...]:
    """Values as text; what is divided is rounded."""
    first = len(row) - len(over.calls)
    given = []
    for value, call in zip(row[first:], over.calls, strict=True):
        rough = call.function in ROUGH and isinstance(value, float | Decimal)
        given.append(f"{float(value):.5g}" if rough else value)
    return shown([*row[:first], *given])


class View:
    """What a changelog adds up to; a row is taken only where there is one."""

    def __init__(self, over: Over) -> None:
        self.rows, self.over = Counter[tuple[str, ...]](), over

    def take(self, changelog: pa.Table) -> list[tuple[str, tuple[str, ...]]]:
        told = [(kind, rounded(row, self.over)) for kind, *row in (r.values() for r in changelog.to_pylist())]
        for kind, row in told:
            self.rows[row] += 1 if kind[0] == "+" else -1
            assert self.rows[row] >= 0, f"{kind} of a row that is not there: {row}"
        return told

    def sorted(self) -> list[tuple[str, ...]]:
        return sorted(self.rows.elements())


def check(backend: Backend, over: Over, seed: int, size: int, events: int = 90) -> None:
    """After each micro-batch what DuckDB says, over restarts; every micro-batch is first discarded once."""
    keyed, inserted = over.source.unique_key is not None, over.source.row_kind is None
    changes, view = trace(seed, events, keyed=keyed, kinds="+" if inserted else "+-"), View(over)
    for start, engine in zip(range(0, events, size), restarting(backend, over), strict=False):
        given = table(changes[start : start + size], op=not inserted)
        engine.prepare(given)
        engine.discard()
        told = view.take(engine.process(given))
        assert view.sorted() == by_duckdb(folded(changes[: start + size], keyed=keyed), over), (over.calls, seed, start)
        if over.emit == "per_batch":
            came, went = ({row for kind, row in told if kind == k} for k in ("+I", "-D"))
            assert not came & went


@pytest.mark.parametrize("emit", ["per_event", "per_batch"])
@pytest.mark.parametrize("kind", KINDS)
def test_after_every_micro_batch(backend: Backend, kind: str, emit: Emit) -> None:
    for seed, size in enumerate([7, 31]):
        order = ORDERS[(seed + len(kind)) % len(ORDERS)]
        check(backend, described(order, calls_of(seed + len(kind)), emit, **KINDS[kind]), seed, size)


@pytest.mark.slow
@pytest.mark.parametrize("emit", ["per_event", "per_batch"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", [*ORDERS[::2], ""])
def test_many_after_every_micro_batch(engines: Backend, order: str, kind: str, emit: Emit) -> None:
    for seed, size in enumerate([1, 3, 7, 13, 40, 90]):
        made = described(order, calls_of(1000 * seed + len(kind + order + emit)), emit, **KINDS[kind])
        one = dataclasses.replace(made, by=("g",) if seed % 3 else ())
        check(engines, one, seed, size, 40 if size == 1 else 90)


@pytest.mark.parametrize("kind", ["retractions", *slow_but(["upserts", "insert only"])])
@pytest.mark.parametrize("size", [40, *slow_but([7, 90])])
def test_change_by_change(backend: Backend, size: int, kind: str) -> None:
    """What a change says is the net change of a micro-batch of it alone."""
    keyed, inserted = kind == "upserts", kind == "insert only"
    changes = trace(size, 80, keyed=keyed, kinds="+" if inserted else "+-")
    over = described("whole DESC", calls_of(size, 4), "per_event", **KINDS[kind])
    one = dataclasses.replace(over, emit="per_batch")

    def net(rows: Sequence[tuple[str, tuple[str, ...]]]) -> Counter[tuple[str, ...]]:
        found = Counter[tuple[str, ...]]()
        for word, row in rows:
            found[row] += 1 if word[0] == "+" else -1
        return Counter({row: count for row, count in found.items() if count})

    view, alone = View(over), View(one)
    with backend.engine(over) as engine, CPU.engine(one) as single:
        for start in range(0, len(changes), size):
            part = changes[start : start + size]
            batch = engine.prepare(table(part, op=not inserted))
            engine.commit()
            told = view.take(batch.changelog)
            assert list(batch.sequence) == sorted(batch.sequence)
            for at, change in enumerate(part):
                ours = [row for row, place in zip(told, batch.sequence, strict=True) if place == at]
                theirs = alone.take(single.process(table([change], op=not inserted)))
                assert net(ours) == net(theirs), change
                kinds = [word for word, _ in ours]
                assert kinds.count("-U") == kinds.count("+U")
                assert kinds == sorted(kinds, key=lambda word: word[0] == "+")  # what leaves comes first


@only_on("cpu-tiny", "gpu", "gpu-tiny", *EMULATED)
@pytest.mark.parametrize("emit", ["per_event", "per_batch"])
def test_same_as_the_cpu(engines: Backend, emit: Emit) -> None:
    changes = trace(8, 60, keyed=False)
    batches = [([table(changes[at : at + 23])], {}) for at in range(0, 60, 23)]
    over = described("real DESC, text", calls_of(8, 12), emit)
    alike(run(engines, over, batches), run(CPU, over, batches))


@pytest.mark.usefixtures("one_hash")
@only_on("cpu", "cpu-tiny", "emulated-tiny")
def test_partitions_with_one_hash(engines: Backend) -> None:
    check(engines, described("whole", calls_of(3)), 3, 17)


@pytest.mark.parametrize("kind", ["retractions", *slow_but(["upserts", "insert only"])])
def test_at_the_end(backend: Backend, kind: str) -> None:
    """Nothing before it; then the rows as they are, as insertions."""
    inserted, keyed = kind == "insert only", kind == "upserts"
    over = described("short", calls_of(4), "at_end", **KINDS[kind])
    changes, view = trace(5, 90, keyed=keyed, kinds="+" if inserted else "+-"), View(over)
    with backend.engine(from_json(over.to_json())) as engine:
        assert not engine.process(table(changes, op=not inserted)).num_rows
        assert all(kind == "+I" for kind, _ in view.take(engine.finish()))
    assert view.sorted() == by_duckdb(folded(changes, keyed=keyed), over)


def test_rows_whose_frames_have_not_changed_are_not_in_the_changelog() -> None:
    """Of a running sum those behind the new row, of a frame of three rows the ones beside it."""
    plain = pa.schema([("at", pa.int64()), ("n", pa.int64())])
    given = pa.table({"at": range(0, 2000, 2), "n": [1] * 1000})
    new = pa.table({"at": [1901], "n": [5]})
    for frame, said in ((WindowFrame("rows", None, 0), 2 * 49 + 1), (WindowFrame("rows", -1, 1), 2 * 2 + 1)):
        over = Over(Input("t", plain), (), parse_order("at"), (WindowCall("s", "sum", "n", frame),), "per_batch")
        with CPU.engine(over) as engine:
            engine.process(given)
            assert engine.process(new).num_rows == said


def test_rows_that_order_alike_stand_in_the_order_in_which_they_arrived() -> None:
    """An updated row arrives anew; RANGE and ranks take them together."""
    plain = pa.schema([("id", pa.int64()), ("at", pa.int64())])
    calls = (WindowCall("n", "row_number"), WindowCall("r", "rank"), WindowCall("before", "lag", "id", None, 1))
    calls += (WindowCall("upto", "count", None, WindowFrame("range", None, 0)),)
    over = Over(Input("t", plain, ("id",)), (), parse_order("at"), calls)
    with CPU.engine(over) as engine:
        view: dict[int, tuple[Any, ...]] = {}

        def taken(*rows: tuple[int, int]) -> dict[int, tuple[Any, ...]]:
            told = engine.process(pa.table(dict(zip(["id", "at"], zip(*rows, strict=True), strict=True))))
            for kind, id_, _, *given in (row.values() for row in told.to_pylist()):
                view.update({id_: tuple(given)} if kind == "+I" else {})
            return view

        assert taken((1, 5), (2, 5), (3, 5)) == {1: (1, 1, None, 3), 2: (2, 1, 1, 3), 3: (3, 1, 2, 3)}
        assert taken((1, 9), (4, 5)) == {2: (1, 1, None, 3), 3: (2, 1, 2, 3), 4: (3, 1, 3, 3), 1: (4, 4, 4, 4)}
        assert taken((1, 5)) == {2: (1, 1, None, 4), 3: (2, 1, 2, 4), 4: (3, 1, 3, 4), 1: (4, 1, 4, 4)}


def test_what_it_says_of_itself() -> None:
    calls = (
        WindowCall("s", "sum", "short", WindowFrame("rows", -2, 0)),
        WindowCall("l", "lag", "text", None, -1, True),
    )
    over = described("whole DESC, `text` NULLS LAST", calls, "per_event")
    assert from_json(over.to_json()) == over
    assert over.lines() == [
        "window functions: rows",
        "  partition   g",
        "  order       whole DESC, text NULLS LAST, arrival",
        "  function    s = sum(short) ROWS BETWEEN 2 PRECEDING AND CURRENT ROW",
        "              l = lead(text, 1) IGNORE NULLS",
    ]
    assert [str(column.type) for column in over.output[-2:]] == ["decimal128(19, 2)", "string"]
    keyed = described("id", calls, unique_key=("id", "g"))
    assert (over.unique_key, keyed.unique_key) == (None, ("id", "g"))  # a partition may be null
    numbered = dataclasses.replace(keyed, source=dataclasses.replace(keyed.source, unique_key=None))
    assert numbered.unique_key is None
    assert described("id", calls, unique_key=("id",)).shuffled_by == ()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (WindowCall("n", "median", "id"), "no window function 'median'; did you mean 'min'? There are row_number"),  # type: ignore[arg-type]
        (WindowCall("n", "rank", "id"), "n = rank(id): it takes no column"),
        (WindowCall("n", "sum"), "n = sum(): of which column?"),
        (WindowCall("n", "sum", "text"), "sum(text) of type string cannot be added up"),
        (WindowCall("n", "sum", "id", second="whole"), "it takes one column"),
        (WindowCall("n", "corr", "id"), "it takes two columns"),
        (WindowCall("n", "lag", "id"), "it takes a number"),
        (WindowCall("n", "first", "id", number=1), "it takes no number"),
        (WindowCall("n", "ntile", number=0), "the number is 1 or more"),
        (WindowCall("n", "sum", "id", ignore_nulls=True), "IGNORE NULLS is for lag"),
        (WindowCall("n", "lag", "id", None, 0, True), "IGNORE NULLS is for lag"),
        (WindowCall("n", "rank", frame=WindowFrame("rows", 0, 0)), "it goes by the whole partition"),
        (WindowCall("n", "sum", "id", WindowFrame("range", -1, 0)), "a frame has ROWS, or a RANGE of all rows"),
        (WindowCall("g", "rank"), "would have two columns 'g'"),
        (WindowCall("n", "sum", "nothing"), "n names 'nothing'; there are id, g"),
    ],
)
def test_what_cannot_be(call: WindowCall, message: str) -> None:
    with pytest.raises(DescriptionError) as error:
        described("id", [call])
    assert message in str(error.value)


def test_what_has_no_place() -> None:
    calls = [WindowCall("n", "row_number")]
    for options, message in (({"ttl_ms": 5}, "ttl= has no place here"), ({"emit": "at_watermark"}, "it is one of")):
        with pytest.raises(DescriptionError, match=message):
            described("id", calls, **options)
    with pytest.raises(DescriptionError, match="windows of what"):
        described("id", [])
