"""The ASOF join on each backend: event by event as by hand, and the folded result as by DuckDB and polars."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from conftest import slow_but
from oracle.asof_rules import LAYOUTS, LEFT, RIGHT, ByHand, described, trace
from oracle.drive import Backend, Change, Event, Row, by_event, canonical, changes, cuts, difference, fold, run

from gpu_ops.descriptions.by_time import Asof, AsofJoin
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.keys import Key
from gpu_ops.descriptions.kinds import from_json
from gpu_ops.errors import DescriptionError
from kernels.conftest import EMULATED, only_on
from kernels.engines import CPU, alike
from kernels.engines import run as run_engine

ALL = 1000
ASOFS = [
    Asof(direction, tolerance, exact)  # type: ignore[arg-type]
    for direction in ("backward", "forward", "nearest")
    for tolerance, exact in ((None, True), (3, True), (None, False), (4, False))
]
HOWS = ("left", "inner")
EMITS = ("per_event", "per_batch")


def _shapes() -> Iterator[tuple[str, Asof, tuple[str, str]]]:
    """Every direction and tolerance, and every pair of layouts, but not each with each."""
    pairs = itertools.cycle(itertools.product(LAYOUTS, LAYOUTS))
    for number, asof in enumerate(ASOFS):
        yield HOWS[number % 2], asof, next(pairs)
    yield from (("left", Asof(), pair) for pair in itertools.product(LAYOUTS, LAYOUTS))


SHAPES = list(_shapes())


@functools.cache
def by_hand(number: int) -> tuple[list[Event], list[list[Change]], list[Counter[Row]]]:
    """A trace of the shape of this number, what each event puts out, and the result after it."""
    join = joined(number, "per_event")
    events, hand = trace(join, 70, number), ByHand(join)
    outs, results = [], []
    for event in events:
        outs.append(hand.apply(event))
        results.append(hand.result())
    return events, outs, results


def joined(number: int, emit: str) -> AsofJoin:
    how, asof, layouts = SHAPES[number]
    return described(how, asof, emit, layouts, null_safe=number % 5 == 4, keyless=number % 7 == 6)


def check(backend: Backend, number: int, emit: str, split: int) -> None:
    """After every micro-batch what came out is what comes out by hand, and nothing is taken back that is not there."""
    join, held = joined(number, emit), Counter[Row]()
    events, outs, results = by_hand(number)
    with backend.engine(join) as engine:
        for cut in cuts(join, events, split):
            found, position, _ = run(engine, cut)
            if emit == "per_event":
                got = by_event(found, position)
                for at in range(cut.start, cut.stop):
                    wrong = difference(Counter(outs[at]), got.pop(at, Counter()))
                    assert not wrong, f"event {at} {events[at]}:\n{wrong}"
                assert not got
                assert list(position) == sorted(position)
            else:
                added = {row for kind, row in found if kind == "+I"}
                assert not [row for kind, row in found if kind == "-D" and row in added]
            for kind, row in found:
                held[row] += 1 if kind in ("+I", "+U") else -1
                assert held[row] >= 0, f"{kind} {row} of a row that is not there"
            wanted = results[cut.stop - 1]
            assert +held == wanted, difference(wanted, +held)


@pytest.mark.one_in(6, all=3)
@only_on("cpu", "cpu-tiny", "gpu", "gpu-tiny")
@pytest.mark.parametrize("split", [1, 7, ALL])
@pytest.mark.parametrize("emit", EMITS)
def test_as_by_hand(engines: Backend, emit: str, split: int) -> None:
    for number in range(len(SHAPES)):
        if split > 1 or engines.name == ("cpu", "cpu-tiny")[number % 2] or engines.gpu:
            check(engines, number, emit, split)


def given(number: int, emit: str) -> tuple[AsofJoin, list[Any]]:
    join = joined(number, emit)
    return join, [cut.inputs for cut in cuts(join, by_hand(number)[0], (30, 1, 12), shuffle=number)]


@only_on("gpu", "gpu-tiny", *EMULATED)
@pytest.mark.parametrize("emit", EMITS)
@pytest.mark.parametrize("number", [0, 9, 10, 16])
def test_same_as_the_cpu(engines: Backend, number: int, emit: str) -> None:
    join, batches = given(number, emit)
    alike(run_engine(engines, join, batches), run_engine(CPU, join, batches))


@pytest.mark.parametrize("distinct", [1, 3])
def test_collisions_of_hashes_change_nothing(engines: Backend, distinct: int, one_hash: Any) -> None:
    made = [given(number, emit) for number in (3, 8, 20) for emit in EMITS]
    wanted = [run_engine(engines, join, batches) for join, batches in made]
    one_hash(distinct)
    for (join, batches), its in zip(made, wanted, strict=True):
        alike(run_engine(engines, join, batches), its)


def test_state_resumes_on_the_other_backend(engines: Backend) -> None:
    for number, emit in ((10, "per_event"), (16, "per_batch")):
        join, batches = given(number, emit)
        half = len(batches) // 2
        whole = run_engine(CPU, join, batches)
        for first, second in ((engines, CPU), (CPU, engines)):
            state = run_engine(first, join, batches[:half])[2]
            tables = run_engine(second, join, batches[half:], state)[0]
            for ours, theirs in zip(tables, whole[0][half:], strict=True):
                assert Counter(changes(ours)) == Counter(changes(theirs))


def tied(choice: random.Random) -> list[Event]:
    """Rows of a few times and keys; of the right's a third are taken back, by the number that orders them."""
    events: list[Event] = []
    live: list[Row] = []
    for number in range(90):
        key, time = choice.choice((1.0, 1.0, 2.0)), choice.randrange(4)
        if number % 3 == 0:
            events.append((0, "+I", (key, time, number)))
        elif number % 5 == 4 and live:
            events.append((1, "-D", live.pop(choice.randrange(len(live)))))
        else:
            live.append((key, time, choice.randrange(6) * 100))
            events.append((1, "+I", live[-1]))
    return events


def in_sequence(events: list[Event]) -> list[Event]:
    """A micro-batch in the order of its changes: the right's by the number, in the places that they hold."""
    right = iter(sorted((event for event in events if event[0] == 1), key=lambda event: event[2][2]))  # type: ignore[arg-type,return-value]
    return [next(right) if event[0] == 1 else event for event in events]


@only_on("cpu-tiny", "gpu", *EMULATED)
@pytest.mark.parametrize(
    ("emit", "split"),
    slow_but(
        [("per_event", 1), ("per_event", 7), ("per_batch", 7), ("per_batch", ALL)], ("per_event", 7), ("per_batch", 7)
    ),
)
def test_rows_of_one_time_by_their_sequence(engines: Backend, emit: str, split: int) -> None:
    """Not the row that came last, but the one with the greatest number, of equal ones the last; also of one batch."""
    choice = random.Random(4)
    for asof in (Asof(), Asof("forward"), Asof("nearest", 5), Asof("backward", 2, exact=False)):
        join = described("left", asof, emit, ("insert_only", "multiset"), ties="v")
        events, held, hand = tied(choice), Counter[Row](), ByHand(join)
        with engines.engine(join) as engine:
            for cut in cuts(join, events, split):
                found, position, _ = run(engine, cut)
                fold(found, held)
                got = by_event(found, position)
                for at, event in enumerate(in_sequence(events[cut.start : cut.stop]), cut.start):
                    wanted = Counter(hand.apply(event))
                    if emit == "per_event":
                        wrong = difference(wanted, got.get(at, Counter()))
                        assert not wrong, f"{asof}, event {at} {event}:\n{wrong}"
                assert held == hand.result()


@only_on("cpu", "cpu-tiny", *EMULATED)
@pytest.mark.parametrize("emit", EMITS)
def test_after_a_backlog_all_is_as_without_one(engines: Backend, emit: str) -> None:
    """The first live micro-batch gives the net result before its own changes; what follows is as by hand."""
    for number in (0, 5, 10, 13, 16):
        join, held = joined(number, emit), Counter[Row]()
        events, outs, results = by_hand(number)
        with engines.engine(join, backlog=True) as engine:
            for place, cut in enumerate(cuts(join, events, 9)):
                found, position, _ = run(engine, cut, backlog=place < 4)
                fold(found, held)
                if place < 4:
                    assert not found
                    continue
                assert held == results[cut.stop - 1]
                if place == 4:
                    net = sum((results[cut.start - 1]).values())
                    assert [kind for kind, _ in found[:net]] == ["+I"] * net
                elif emit == "per_event":
                    got = by_event(found, position)
                    for at in range(cut.start, cut.stop):
                        assert not difference(Counter(outs[at]), got.get(at, Counter()))


def test_no_backlog_at_the_watermark() -> None:
    join = described("left", Asof(), "at_watermark", ("insert_only", "insert_only"))
    with pytest.raises(DescriptionError, match="no backlog here: a join by time goes by its watermark"):
        CPU.engine(join, backlog=True)


@pytest.mark.parametrize("emit", ["per_batch", "at_end"])
def test_as_duckdb_and_polars(emit: str) -> None:
    """The folded result of all rows: DuckDB's ``ASOF JOIN``, and polars' ``join_asof``, by their own SQL and code."""
    choice, left, right = random.Random(7), [], []
    keys = [1.0, 2.0, float("nan"), None]
    for number in range(300):
        left.append((choice.choice(keys), choice.choice([None, *range(1, 400, 2), *range(0, 400, 4)]), number))
    for number, time in enumerate(choice.sample(range(0, 400, 4), 80)):
        right.append((choice.choice(keys), time, number))
    tables = [
        pa.table(list(zip(*rows, strict=True)), schema=schema)  # type: ignore[arg-type]
        for rows, schema in ((left, LEFT), (right, RIGHT))
    ]
    for asof in ASOFS:
        how = "inner" if asof.tolerance_ms == 3 else "left"
        join = described(how, asof, emit, ("insert_only", "insert_only"))
        own = tables[0]
        if asof.direction == "nearest":  # of two rows as near polars takes the later one: none are
            own = own.filter(pc.equal(pc.bit_wise_and(own["t"], 1), 1))
        with CPU.engine(join) as engine:
            found = Counter(row for _, row in changes(engine.process(own, tables[1])))
            if emit == "at_end":
                found += Counter(row for _, row in changes(engine.finish()))
        for reference in (in_duckdb(asof, how, own, tables[1]), in_polars(asof, how, own, tables[1])):
            if reference is not None:
                assert found == reference, difference(reference, found)


def in_duckdb(asof: Asof, how: str, left: pa.Table, right: pa.Table) -> Counter[Row] | None:
    """DuckDB has neither ``nearest`` nor a tolerance."""
    import duckdb

    if asof.direction == "nearest" or asof.tolerance_ms is not None:
        return None
    sign = (">" if asof.direction == "backward" else "<") + ("=" if asof.exact else "")
    with duckdb.connect() as connection:
        connection.register("l", left)
        connection.register("r", right)
        query = f"SELECT * FROM l ASOF {how} JOIN r ON l.k = r.rk AND l.t {sign} r.s"
        return Counter(tuple(map(canonical, row)) for row in connection.sql(query).fetchall())


def in_polars(asof: Asof, how: str, left: pa.Table, right: pa.Table) -> Counter[Row]:
    """NaN is no key of polars', so keys are text."""
    import polars as pl

    frames = [
        pl.DataFrame(table).with_columns(pl.col(key).cast(pl.String)) for table, key in ((left, "k"), (right, "rk"))
    ]
    own, other = (
        frames[0].sort("t", nulls_last=True),
        frames[1].sort("s").with_columns(key=pl.col("rk"), at=pl.col("s")),
    )
    joined = own.join_asof(
        other, left_on="t", right_on="s", by_left="k", by_right="rk", strategy=asof.direction,
        tolerance=asof.tolerance_ms, allow_exact_matches=asof.exact, coalesce=False, check_sortedness=False,
    )  # fmt: skip
    rows = []
    for row in joined.select("k", "t", "id", "key", "at", "v").iter_rows():
        key, its = (None if text is None else float(text) for text in (row[0], row[3]))
        if row[5] is not None or how == "left":
            rows.append(tuple(map(canonical, (key, row[1], row[2], its, *row[4:]))))
    return Counter(rows)


def test_rows_that_show_the_same_are_no_change() -> None:
    """A time that both inputs have is shown once, so a later quote of the same price changes nothing that is seen."""
    schemas = [pa.schema([("k", pa.int64()), ("at", pa.int64()), (name, pa.int64())]) for name in ("n", "price")]
    inputs = [Input(name, schema, event_time="at") for name, schema in zip("lr", schemas, strict=True)]
    for emit in EMITS:
        join = AsofJoin("left", *inputs, keys=(Key("k", "k", using=True),), emit=emit, asof=Asof())  # type: ignore[arg-type]
        assert join.output_schema.names == ["row_kind", "k", "at", "n", "price"]
        with CPU.engine(join) as engine:

            def quoted(at: int, price: int | None, engine: Any = engine) -> int:
                return int(engine.process(right=pa.table([[1], [at], [price]], schema=schemas[1])).num_rows)

            engine.process(left=pa.table([[1], [9], [1]], schema=schemas[0]))
            assert [quoted(1, None), quoted(2, None), quoted(3, 7), quoted(4, 7), quoted(5, 8)] == [0, 0, 2, 0, 2]


def test_what_it_says() -> None:
    join = described("left", Asof("nearest", 90_000, exact=False), layouts=("unique_key", "multiset"))
    assert from_json(join.to_json()) == join
    assert join.title == "ASOF left join on k = rk, nearest"
    assert join.lines()[2:] == [
        "  time        the nearest r.s to l.t, not the same time, at most 90 seconds apart",
        "  ties        of r of one time the one that came last",
    ]
    assert join.unique_key == ("id",)
    assert dataclasses.replace(join, left=dataclasses.replace(join.left, unique_key=None)).unique_key is None


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"how": "full"}, "how='full'; an ASOF join is one of inner, left"),
        ({"where": "l.t > r.s"}, "where= has no place in an ASOF join"),
        ({"emit": "hourly"}, "emit='hourly'; it is one of per_event, per_batch, at_watermark, at_end"),
        ({"left": Input("l", LEFT)}, "input 'l': an ASOF join needs its event time"),
        ({"right": Input("r", RIGHT, event_time="s", ttl_ms=5)}, "input 'r': an ASOF join keeps every row"),
        ({"right": Input("r", RIGHT, event_time="s", sequence_by="rk")}, "sequence_by 'rk' orders right rows of one"),
    ],
)
def test_what_cannot_be(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(DescriptionError, match=problem):
        dataclasses.replace(described("left", Asof()), **change)


def test_directions_and_tolerances_that_cannot_be() -> None:
    with pytest.raises(DescriptionError, match="direction='back'; it is one of backward, forward, nearest"):
        Asof("back")  # type: ignore[arg-type]
    with pytest.raises(DescriptionError, match="tolerance is not negative, this one is -1 ms"):
        Asof(tolerance_ms=-1)
    with pytest.raises(DescriptionError, match="tolerance is too long"):
        Asof(tolerance_ms=1 << 41).tolerance(pa.timestamp("ns"))
