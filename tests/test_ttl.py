"""State TTL per input, by the micro-batch's clock, with Flink's rules (``StateTtlConfig``).

A row is gone once ``last write + ttl <= now``. Created, written again, or (a row whose association
count is kept) matched from the other side: it is fresh. Expiry says nothing and pads nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from oracle.drive import Backend, Change, changes

from gpu_ops.descriptions.aggregate import Aggregate
from gpu_ops.descriptions.groups import Order, Top
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.join import Join
from gpu_ops.descriptions.keys import Key
from gpu_ops.descriptions.times import parse_duration

LEFT = pa.schema([("k", pa.int64()), ("a", pa.string())])
RIGHT = pa.schema([("r", pa.int64()), ("b", pa.string())])


class Bench:
    """An engine that is fed single changes at given times."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.metrics: dict[str, Any] = {}
        self.expired = [0, 0]

    def __call__(self, at: int, *steps: tuple[str, str, int, str]) -> list[Change]:
        """Steps ``("l" or "r", kind, key, value)`` in one micro-batch at ``at`` ms; what it says."""
        inputs: dict[str, Any] = {}
        for side, name, schema in (("l", "left", LEFT), ("r", "right", RIGHT)):
            own = [(i, s) for i, s in enumerate(steps) if s[0] == side]
            if own:
                arrays = [
                    pa.array([s[2] for _, s in own], pa.int64()),
                    pa.array([s[3] for _, s in own], pa.string()),
                    pa.array([s[1] for _, s in own], pa.string()),
                ]
                inputs[name] = pa.table(arrays, names=[*schema.names, "op"])
                inputs[f"{name}_order"] = [i for i, _ in own]
        batch = self.engine.prepare(**inputs, clock_ms=at)
        self.engine.commit()
        self.metrics = batch.metrics
        self.expired[0] += batch.metrics["left_expired"]
        self.expired[1] += batch.metrics["right_expired"]
        return changes(batch.changelog)

    def live(self, side: str) -> list[str]:
        """The payloads in a snapshot, sorted."""
        table = self.engine.snapshot()[side]
        return sorted(table.column("a" if side == "left" else "b").to_pylist())


def described(
    how: Any,
    left_ttl: int | None,
    right_ttl: int | None,
    *,
    unique: bool = False,
    emit: Any = "per_event",
) -> Join:
    return Join(
        how,
        Input("A", LEFT, unique_key=("k",) if unique else None, row_kind="op", ttl_ms=left_ttl),
        Input("B", RIGHT, unique_key=("r",) if unique else None, row_kind="op", ttl_ms=right_ttl),
        (Key("k", "r"),),
        emit=emit,
    )


@pytest.fixture
def bench(request: pytest.FixtureRequest, backend: Backend) -> Iterator[Bench]:
    """A `Bench` over the join that the test's ``bench`` parameter describes."""
    with backend.engine(described(*request.param[0], **request.param[1])) as engine:
        yield Bench(engine)


def over(how: str, left_ttl: int | None, right_ttl: int | None, **options: Any) -> Any:
    return pytest.mark.parametrize(
        "bench", [((how, left_ttl, right_ttl), options)], indirect=True, ids=[f"{how}-{left_ttl}-{right_ttl}"]
    )


@over("inner", 4000, 1000)
def test_each_input_by_its_own(bench: Bench) -> None:
    assert bench(0, ("l", "+I", 1, "a1"), ("r", "+I", 2, "b2")) == []
    assert bench(999, ("l", "+I", 2, "a2")) == [("+I", (2, "a2", 2, "b2"))]
    assert bench(1000, ("l", "+I", 2, "a3")) == []
    assert bench.expired == [0, 1]
    assert bench(3999, ("r", "+I", 1, "b1")) == [("+I", (1, "a1", 1, "b1"))]
    assert bench(4000, ("r", "+I", 1, "b9")) == []
    assert bench.expired == [1, 1]
    assert bench.live("left") == ["a2", "a3"]


@over("inner", 4000, 4000)
def test_alive_until_just_before(bench: Bench) -> None:
    """Flink's ``testInnerJoinWithSameStateRetentionTime``: there at 7999, gone at 8000."""
    bench(4000, ("l", "+I", 1, "a"))
    assert bench(7999, ("r", "+I", 1, "b")) == [("+I", (1, "a", 1, "b"))]
    assert bench(8000, ("r", "+I", 1, "c")) == []


@over("inner", None, 1000)
def test_no_ttl_is_for_ever(bench: Bench) -> None:
    bench(0, ("l", "+I", 1, "a"), ("r", "+I", 1, "b"))
    assert bench(10**12, ("r", "+I", 1, "c")) == [("+I", (1, "a", 1, "c"))]
    assert bench(10**12 + 1, ("l", "+I", 1, "d")) == [("+I", (1, "d", 1, "c"))]


@over("left", 10_000, 1000)
def test_expiry_says_nothing_and_pads_nothing(bench: Bench) -> None:
    """An expired inner row leaves the count of the outer row as it was; a new outer row counts live ones."""
    bench(0, ("l", "+I", 1, "a"), ("r", "+I", 1, "b"))
    assert bench(2000) == []
    assert bench.expired == [0, 1]
    assert bench(2001, ("l", "+I", 1, "new")) == [("+I", (1, "new", None, None))]
    # a's count still includes b, so there is no pad to take back; new's has none.
    assert sorted(bench(2002, ("r", "+I", 1, "c"))) == sorted(
        [
            ("+I", (1, "a", 1, "c")),
            ("-D", (1, "new", None, None)),
            ("+I", (1, "new", 1, "c")),
        ]
    )
    assert sorted(bench(2003, ("r", "-D", 1, "c"))) == sorted(
        [
            ("-D", (1, "a", 1, "c")),
            ("-D", (1, "new", 1, "c")),
            ("+I", (1, "new", None, None)),
        ]
    )


@over("left", 1000, 10_000)
def test_an_expired_outer_row_is_forgotten(bench: Bench) -> None:
    """What was said of it is never taken back, and later matches say nothing for it."""
    assert bench(0, ("l", "+I", 1, "a")) == [("+I", (1, "a", None, None))]
    assert bench(1000, ("r", "+I", 1, "b")) == []
    assert bench(1001, ("l", "-D", 1, "a")) == []
    assert bench.metrics["left_unknown_retractions"] == 1


@over("left", 1000, 10_000)
def test_a_match_refreshes_an_outer_row(bench: Bench) -> None:
    bench(0, ("l", "+I", 1, "a"))
    assert len(bench(900, ("r", "+I", 1, "b"))) == 2
    assert bench(1800, ("r", "+I", 1, "c")) == [("+I", (1, "a", 1, "c"))]
    assert bench(2700, ("r", "-D", 1, "c")) == [("-D", (1, "a", 1, "c"))]
    assert bench(3699, ("r", "-D", 1, "b")) == [("-D", (1, "a", 1, "b")), ("+I", (1, "a", None, None))]
    assert bench(4699, ("r", "+I", 1, "d")) == []
    assert bench.expired == [1, 0]


@over("inner", 1000, 10_000)
def test_a_match_does_not_refresh_an_inner_row(bench: Bench) -> None:
    bench(0, ("l", "+I", 1, "a"))
    assert bench(900, ("r", "+I", 1, "b")) == [("+I", (1, "a", 1, "b"))]
    assert bench(1000, ("r", "+I", 1, "c")) == []


@over("right", 1000, 1000)
def test_only_the_outer_side_is_refreshed(bench: Bench) -> None:
    bench(0, ("l", "+I", 1, "a"), ("r", "+I", 1, "b"))
    # left is the inner side of a right join: a is gone at 1000, b was written by a's match at 0
    assert bench(500, ("l", "+I", 1, "a2")) == [("+I", (1, "a2", 1, "b"))]
    assert bench(1200, ("l", "+I", 1, "a3")) == [("+I", (1, "a3", 1, "b"))]
    assert bench.live("left") == ["a2", "a3"]
    assert bench.live("right") == ["b"]


@pytest.mark.parametrize("how", ["semi", "anti"])
def test_the_left_row_of_semi_and_anti_is_refreshed(how: str, backend: Backend) -> None:
    with backend.engine(described(how, 1000, 10_000)) as engine:
        bench = Bench(engine)
        bench(0, ("l", "+I", 1, "a"))
        bench(900, ("r", "+I", 1, "b"))
        taken = bench(1800, ("r", "-D", 1, "b"))
        assert taken == [("-D" if how == "semi" else "+I", (1, "a"))]
        assert bench(2800, ("r", "+I", 1, "c")) == []
        assert bench.expired == [1, 0]


@over("inner", 1000, 1000, unique=True)
def test_a_write_refreshes(bench: Bench) -> None:
    bench(0, ("l", "+I", 1, "a"))
    bench(900, ("l", "+U", 1, "a2"))
    assert bench(1800, ("r", "+I", 1, "b")) == [("+I", (1, "a2", 1, "b"))]
    assert bench(1900, ("r", "+U", 1, "b2")) == []
    assert bench.expired == [1, 0]


@pytest.mark.parametrize("emit", ["per_event", "per_batch"])
def test_writing_the_same_row_again_refreshes(emit: str, backend: Backend) -> None:
    """A write is a write, also where it changes nothing (a heartbeat), and in ``per_batch`` too."""
    with backend.engine(described("inner", 1000, 10_000, unique=True, emit=emit)) as engine:
        bench = Bench(engine)
        bench(0, ("l", "+I", 1, "a"))
        bench(900, ("l", "+U", 1, "a"))
        assert bench(1500, ("r", "+I", 1, "b")) == [("+I", (1, "a", 1, "b"))]
        assert bench.expired == [0, 0]


@pytest.mark.parametrize("emit", ["per_event", "per_batch"])
def test_taking_and_giving_back_refreshes(emit: str, backend: Backend) -> None:
    with backend.engine(described("inner", 1000, 10_000, emit=emit)) as engine:
        bench = Bench(engine)
        bench(0, ("l", "+I", 1, "a"))
        bench(900, ("l", "-U", 1, "a"), ("l", "+U", 1, "a"))
        assert bench(1500, ("r", "+I", 1, "b")) == [("+I", (1, "a", 1, "b"))]


@over("inner", 1000, 10_000)
def test_copies_of_a_row_share_its_last_write(bench: Bench) -> None:
    """Flink keeps one state entry for equal rows, so a further copy refreshes all of them."""
    bench(0, ("l", "+I", 1, "a"))
    bench(600, ("l", "+I", 1, "a"))
    assert bench(1200, ("r", "+I", 1, "b")) == [("+I", (1, "a", 1, "b"))] * 2
    assert bench(1600, ("r", "+I", 1, "c")) == []


@over("inner", 1000, 10_000)
def test_taking_one_copy_refreshes_the_others(bench: Bench) -> None:
    bench(0, ("l", "+I", 1, "a"), ("l", "+I", 1, "a"))
    bench(600, ("l", "-D", 1, "a"))
    assert bench(1200, ("r", "+I", 1, "b")) == [("+I", (1, "a", 1, "b"))]
    assert bench(1600, ("r", "+I", 1, "c")) == []


@over("full", 1000, 1000, unique=True)
def test_after_expiry_an_upsert_is_an_insert(bench: Bench) -> None:
    bench(0, ("l", "+I", 1, "a"))
    assert bench(1000, ("l", "+U", 1, "a2")) == [("+I", (1, "a2", None, None))]
    assert bench.live("left") == ["a2"]


@over("left", 1000, 1000, emit="per_batch")
def test_per_batch(bench: Bench) -> None:
    assert bench(0, ("l", "+I", 1, "a"), ("r", "+I", 1, "b")) == [("+I", (1, "a", 1, "b"))]
    assert bench(1000, ("l", "+I", 1, "c")) == [("+I", (1, "c", None, None))]
    assert bench.expired == [1, 1]


@over("anti", 10_000, 1000)
def test_an_expired_right_row_brings_nothing_back(bench: Bench) -> None:
    bench(0, ("r", "+I", 1, "b"))
    assert bench(1, ("l", "+I", 1, "a")) == []
    assert bench(1000, ("l", "+I", 1, "late")) == [("+I", (1, "late"))]
    assert bench(1001, ("r", "-D", 1, "b")) == []
    assert bench.metrics["right_unknown_retractions"] == 1


@pytest.mark.parametrize("emit", ["per_event", "per_batch"])
def test_not_in_never_takes_back_a_row_that_an_expired_null_hid(emit: Any, backend: Backend) -> None:
    """A null on the right hid it, so it was never said; nor is it when the null has expired."""
    join = Join(
        "anti",
        Input("A", LEFT, row_kind="op"),
        Input("B", RIGHT, row_kind="op", ttl_ms=100),
        (Key("k", "r"),),
        emit=emit,
        null_aware=True,
    )
    with backend.engine(join) as engine:
        bench = Bench(engine)
        nothing: Any = None
        assert bench(0, ("r", "+I", nothing, "null")) == []
        assert bench(10, ("l", "+I", 1, "hidden"), ("l", "+I", nothing, "hidden, too")) == []
        assert bench(200, ("l", "+I", 2, "new")) == [("+I", (2, "new"))]
        assert bench.expired == [0, 1]
        assert bench(210, ("r", "+I", 1, "b"), ("r", "+I", 7, "c")) == []
        assert bench(220, ("l", "-D", 1, "hidden"), ("l", "-D", nothing, "hidden, too")) == []
        assert bench(230, ("r", "+I", nothing, "null")) == [("-D", (2, "new"))]
        assert bench.metrics["left_unknown_retractions"] == 0


@over("inner", 1000, 1000)
def test_many_rows_expire_batch_by_batch(bench: Bench) -> None:
    """Counted once each, whatever their segment; state and metrics agree."""
    for at in range(0, 5000, 100):
        bench(at, *[("l", "+I", key, f"{at}-{key}") for key in range(10)])
        alive = min(at // 100 + 1, 10) * 10
        assert bench.metrics["left_state_rows"] == alive
        assert bench.engine.state_size()["left_rows"] == alive
        assert len(bench.live("left")) == alive
    assert bench.expired[0] == 50 * 10 - 100
    assert len(bench(5000, ("r", "+I", 3, "b"))) == 9


@over("inner", 1000, 1000)
def test_a_clock_that_goes_back_brings_nothing_back(bench: Bench) -> None:
    bench(0, ("l", "+I", 1, "a"))
    assert bench(1000) == []
    assert bench(10, ("r", "+I", 1, "b")) == []


def test_a_restart_keeps_the_times(backend: Backend) -> None:
    join = described("left", 1000, 500)
    with backend.engine(join) as engine:
        bench = Bench(engine)
        bench(0, ("l", "+I", 1, "a"), ("r", "+I", 2, "b"))
        bench(400, ("l", "+I", 2, "c"))
        state = engine.snapshot()
    assert state["left"].column("__written").to_pylist() == [0, 400]
    with backend.engine(join) as engine:
        engine.restore(state)
        bench = Bench(engine)
        assert bench(500, ("l", "+I", 2, "d")) == [("+I", (2, "d", None, None))]
        assert bench.expired == [0, 1]
        assert bench(1000, ("r", "+I", 1, "e")) == []
        assert bench.expired == [1, 1]
        assert bench.live("left") == ["c", "d"]


@over("left", 1000, 1000)
def test_a_discarded_micro_batch_expires_nothing(bench: Bench) -> None:
    """Preparing does not change the committed state, time passing in it included."""
    bench(0, ("l", "+I", 1, "a"), ("r", "+I", 1, "b"))
    before = bench.engine.snapshot()
    bench.engine.prepare(clock_ms=5000)
    bench.engine.discard()
    after = bench.engine.snapshot()
    assert all(after[side].equals(before[side]) for side in ("left", "right"))
    assert bench.engine.state_size()["left_rows"] == 1
    assert bench(5000) == []
    assert bench.expired == [1, 1]


def test_durations() -> None:
    assert [parse_duration(d) for d in ("7 days", "90 seconds", "1.5 hours", 250, "1 millisecond")] == [
        604_800_000,
        90_000,
        5_400_000,
        250,
        1,
    ]


@pytest.mark.parametrize("seed", range(4))
def test_groups_are_forgotten_by_the_clock_that_wrote_them_wherever_it_goes(seed: int, backend: Backend) -> None:
    """Counts of groups and their greatest rows under a clock that jumps, with restarts in between."""
    rng, ttl = random.Random(seed), 100
    source = Input("A", LEFT, ttl_ms=ttl)
    counts = Aggregate.of(source, ("k",), {"n": "count(*)"}, "per_batch")
    tops = Top(source, ("k",), (Order("a", descending=True),), 1)
    engines = [backend.engine(join).__enter__() for join in (counts, tops)]
    groups: dict[int, tuple[int, str, int]] = {}  # how many rows, the greatest, when it was last written
    clock = 10_000
    for number in range(60):
        clock += rng.choice((0, 1, 30, 60, 99, 100))
        now = clock + (rng.choice((-5_000, -101, -40, 40, 101, 3_000_000)) if rng.random() < 0.25 else 0)
        rows = [(rng.randrange(5), f"{rng.randrange(9)}{number}") for _ in range(rng.randrange(4))]
        groups = {key: group for key, group in groups.items() if group[2] + ttl > now}
        before = dict(groups)
        for key, value in rows:
            count, greatest, _ = groups.get(key, (0, "", 0))
            groups[key] = count + 1, max(greatest, value), now
        table = pa.Table.from_pylist([{"k": key, "a": value} for key, value in rows], LEFT)
        counted, topped = (changes(engine.process(table, clock_ms=now)) for engine in engines)
        touched = {key for key, _ in rows}
        gone = [("-D", (key, before[key][0])) for key in touched & before.keys()]
        assert sorted(counted) == sorted([*gone, *(("+I", (key, groups[key][0])) for key in touched)]), (number, now)
        other = [key for key in touched if key not in before or before[key][1] != groups[key][1]]
        gone = [("-D", (key, before[key][1])) for key in other if key in before]
        assert sorted(topped) == sorted([*gone, *(("+I", (key, groups[key][1])) for key in other)]), (number, now)
        if rng.random() < 0.2:
            for place, engine in enumerate(engines):
                state = engine.snapshot()
                engine.close()
                engines[place] = backend.engine((counts, tops)[place]).__enter__()
                engines[place].restore(state)
    for engine in engines:
        engine.close()
