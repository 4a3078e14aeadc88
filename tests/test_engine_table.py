"""`table()` of an engine is part of the commit: the rows of the last committed state, whatever failed on the way."""

from __future__ import annotations

import datetime as dt
import gc
import logging
import os
import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from test_exact_casts import any_array, any_type, values_of

import gpu_ops
from gpu_ops import Input, JoinEngine
from gpu_ops.errors import StateError
from gpu_ops.memory import Budget
from gpu_ops.output import Fold, folded
from gpu_ops.values import equal_codes

LEFT = pa.schema([("op", pa.string()), ("k", pa.int64()), ("v", pa.list_(pa.float64()))])
RIGHT = pa.schema([("op", pa.string()), ("k", pa.int64()), ("w", pa.struct([("a", pa.int64()), ("b", pa.string())]))])
ROWS = pa.schema([("op", pa.string()), ("k", pa.int64()), ("x", pa.int64())])
TIMED = pa.schema([("k", pa.int64()), ("t", pa.int64()), ("x", pa.int64())])


def engine_of(kind: str, **more: Any) -> Any:
    if kind == "aggregate":
        source = Input.of(ROWS, row_kind="op")
        return gpu_ops.engine(l=source, by="k", aggregates={"n": "count(*)", "s": "sum(x)"}, **more)
    if kind == "interval":
        times = {"time": ("t", "t"), "lower": -5, "upper": 5, "suffixes": ("", "_r")}
        return gpu_ops.engine(l=TIMED, r=TIMED, on="k", how="full", **times, **more)
    sides = {"l": Input.of(LEFT, row_kind="op"), "r": Input.of(RIGHT, row_kind="op")}
    return gpu_ops.engine(**sides, on="k", how=kind, **more)


def batch_of(kind: str, rng: random.Random) -> dict[str, pa.Table]:
    def some(schema: pa.Schema, value: Any) -> pa.Table:
        ops = ("+I", "+I", "+I", "-D")
        made = [{"op": rng.choice(ops), "k": rng.randrange(4), **value()} for _ in range(rng.randrange(6))]
        return pa.Table.from_pylist(made, schema)

    if kind == "aggregate":
        return {"l": some(ROWS, lambda: {"x": rng.randrange(3)})}
    if kind == "interval":
        return {name: some(TIMED, lambda: {"t": rng.randrange(100), "x": rng.randrange(2)}) for name in "lr"}
    lists = ([], [0.0], [-0.0], [float("nan"), None], None)
    left = some(LEFT, lambda: {"v": rng.choice(lists)})
    return {"l": left, "r": some(RIGHT, lambda: {"w": rng.choice(({"a": 1, "b": None}, {"a": 1, "b": "x"}, None))})}


class ByHand:
    """The rows that changelogs add up to, by a loop."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def take(self, changelog: pa.Table) -> None:
        for kind, row in zip(
            changelog["row_kind"].to_pylist(), rows_of(changelog.drop_columns("row_kind")), strict=True
        ):
            if kind in ("+I", "+U"):
                self.rows.append(row)
            else:
                self.rows.remove(row)


def rows_of(table: pa.Table) -> list[Any]:
    """Rows whose parts are equal as operators have it."""
    return [repr(row) for row in zip(*([flat(v) for v in column.to_pylist()] for column in table.columns), strict=True)]


def flat(value: Any) -> Any:
    return [flat(v) for v in value] if isinstance(value, list) else value + 0.0 if isinstance(value, float) else value


@pytest.fixture(autouse=True)
def small_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_ops.output.FOLD_ROWS", 4)


KINDS = ("aggregate", "interval", "left", "full", "semi")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_the_rows_are_those_of_the_last_commit(kind: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_commits(kind, seed, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(int(os.environ.get("GPU_JOIN_TABLES", "100"))))
@pytest.mark.parametrize("kind", KINDS)
def test_any_commits(kind: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_commits(kind, 100 + seed, monkeypatch)


def check_commits(kind: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches that are discarded, whose commit fails, whose fold finds no memory; restarts."""
    rng, hand = random.Random(f"{kind}-{seed}"), ByHand()
    engine = engine_of(kind)
    kept = engine.snapshot()
    for _ in range(25):
        own = batch_of(kind, rng)
        what = rng.choice(("commit", "commit", "commit", "discard", "fails", "memory", "restart", "settle"))
        with monkeypatch.context() as patch:
            if what == "discard":
                engine.prepare(**own)
                engine.discard()
            elif what == "fails":
                before = engine.snapshot()
                patch.setattr(engine._operator, "commit", failing(MemoryError))
                with pytest.raises(MemoryError):
                    engine.process(**own)
                assert sorted(rows_of(engine.table())) == sorted(hand.rows)
                with pytest.raises(StateError, match="half done"):
                    engine.process(**own)
                patch.undo()
                engine.restore(before)
            else:
                if what == "memory":
                    patch.setattr("gpu_ops.output.folded", failing(MemoryError))
                if what == "settle":
                    patch.setattr(engine.memory, "settle", failing(OSError))
                hand.take(engine.process(**own))
        if what == "restart":
            kept = engine.snapshot()
            engine = engine_of(kind)
            engine.restore(kept)
        if rng.random() < 0.5:
            assert sorted(rows_of(engine.table())) == sorted(hand.rows), what
    hand.take(engine.finish())
    assert sorted(rows_of(engine.table())) == sorted(hand.rows)


def failing(error: type[BaseException]) -> Any:
    def fail(*_: Any, **__: Any) -> None:
        raise error("as a test has it")

    return fail


def test_an_end_of_input_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("interval")
    row = pa.table({"k": [1], "t": [1], "x": [1]})
    engine.process(l=row)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_as_output", failing(MemoryError))
        with pytest.raises(MemoryError):
            engine.finish()
    assert engine.table().num_rows == 0
    assert engine.finish().num_rows == engine.table().num_rows == 1
    ends = gpu_ops.engine(l=ROWS.remove(0), r=ROWS.remove(0), on="k", suffixes=("", "_r"), emit="at_end")
    both = pa.table({"k": [1], "x": [1]})
    ends.process(both, both)
    parts = ends.finish_parts()
    next(parts)
    parts.close()  # whoever reads them has had enough
    assert ends.table().num_rows == 0
    assert [part.num_rows for part in ends.finish_parts()] == [1]
    assert ends.table().num_rows == 1
    with pytest.raises(StateError, match="the input has ended"):
        ends.process(both, both)


def test_a_snapshot_without_the_table_leaves_it_unknown() -> None:
    engine = engine_of("aggregate")
    engine.process(l=pa.table({"op": ["+I"], "k": [1], "x": [1]}))
    bare = JoinEngine(engine.description)
    bare.restore(engine.snapshot())  # which has no use for it
    other = engine_of("aggregate")
    other.restore(bare.snapshot())
    assert "table" not in other._repr_html_()
    with pytest.raises(StateError, match="the table is not known"):
        other.table()
    assert other.process(l=pa.table({"op": ["+I"], "k": [1], "x": [1]})).num_rows == 2
    again = engine_of("aggregate")
    again.restore(other.snapshot())
    with pytest.raises(StateError, match="not known"):
        again.table()
    wrong = {**engine.snapshot(), **{name: t for name, t in engine_of("left").snapshot().items() if "folded" in name}}
    with pytest.raises(StateError, match="table of another engine"):
        engine_of("aggregate").restore(wrong)


def test_what_fails_after_a_commit_is_said_and_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of("aggregate")
    monkeypatch.setattr(engine.memory, "settle", failing(OSError))
    with caplog.at_level(logging.WARNING, "gpu_ops"):
        assert engine.process(l=pa.table({"op": ["+I"], "k": [1], "x": [1]})).num_rows == 1
    assert "the micro-batch is final" in caplog.text
    assert engine.table().num_rows == 1


def test_a_fold_that_finds_no_memory_waits(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    fold, calls = Fold(pa.schema([("row_kind", pa.string()), ("k", pa.int64())])), []

    def no_memory(parts: Any) -> None:
        calls.append(sum(part.num_rows for part in parts))
        raise MemoryError("none")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "gpu_ops"):
        patch.setattr("gpu_ops.output.folded", no_memory)
        for number in range(64):
            fold.prepare(pa.table({"row_kind": ["+I"], "k": [number]}))
            fold.commit()
            fold.settle()
    assert 3 <= len(calls) <= 6  # not with each micro-batch
    assert fold.rows()["k"].to_pylist() == list(range(64))


def test_rows_of_any_type_are_added_up() -> None:
    """What comes and what goes, of random types at any depth: a row goes where an equal one has come."""
    for number in range(60):
        rng = random.Random(f"fold-{number}")
        schema = pa.schema([("row_kind", pa.string()), ("a", any_type(rng)), ("b", any_type(rng))])
        columns = [any_array(rng, kind) for kind in schema.types[1:]]
        size = min(map(len, columns))
        rows = pa.Table.from_arrays([pa.nulls(size, pa.string()), *(c.slice(0, size) for c in columns)], schema=schema)
        taken = [rng.randrange(size) for _ in range(rng.randrange(10))] if size else []
        gone = rng.sample(taken, rng.randrange(len(taken) + 1))

        def changes(places: list[int], kind: str, rows: pa.Table = rows) -> pa.Table:
            return rows.take(pa.array(places, pa.int64())).set_column(
                0, rows.schema.field(0), pa.array([kind] * len(places), pa.string())
            )

        found = folded([changes(taken, "+I"), changes(gone, "-D")])
        left = list(taken)
        for place in gone:
            left.remove(place)

        def shown(table: pa.Table) -> list[str]:
            return sorted(map(str, zip(*(values_of(c) for c in table.columns[1:]), strict=True)))

        assert shown(found) == shown(changes(left, "+I")), number


def test_values_are_the_same_at_any_depth() -> None:
    for number in range(100):
        rng = random.Random(f"codes-{number}")
        array = any_array(rng, any_type(rng))
        codes, values = equal_codes(array), [str(value) for value in values_of(array)]
        assert len(set(codes)) == len(set(values)) == len(set(zip(codes, values, strict=True))), number


@pytest.mark.parametrize("kind", [pa.int8(), pa.uint8(), pa.int32(), pa.int64(), pa.uint64()], ids=str)
@pytest.mark.parametrize("nulls", [0, 1, 400])
def test_integers_are_the_same_wherever_they_lie(kind: pa.DataType, nulls: int) -> None:
    limits = np.iinfo(kind.to_pandas_dtype())
    rng = np.random.default_rng(nulls)
    for least in (limits.min, limits.max - 200, max(limits.min, -100)):
        integers = [least + int(x) for x in rng.integers(0, 200, 400)]
        values = [None if number < nulls else x for number, x in enumerate(integers)]
        codes = equal_codes(pa.array([{"x": x} for x in values], pa.struct([("x", kind)])))
        assert len(set(codes)) == len(set(values)) == len(set(zip(codes, values, strict=True)))


def test_all_bits_of_nan_are_one_value() -> None:
    negative = np.frombuffer(np.uint64(0xFFF8 << 48).tobytes(), np.float64)
    values = pa.array(np.concatenate([np.array([np.nan]), negative, -negative]))
    assert set(equal_codes(values)) == {0}
    assert set(equal_codes(pa.array([[x] for x in values.to_pylist()]))) == {0}


@pytest.mark.parametrize("emit", ["per_event", "per_batch"])
def test_first_and_last_of_equal_nested_values_say_nothing(emit: Any) -> None:
    """The first of equal lists goes, the next one is the same: nothing is emitted; one that differs is."""
    kinds: dict[pa.DataType, tuple[Any, Any]] = {
        pa.list_(pa.float64()): ([1.0, None], [2.0]),
        pa.struct([("a", pa.int64()), ("b", pa.list_(pa.string()))]): ({"a": 1, "b": ["x"]}, {"a": 1, "b": ["y"]}),
        pa.map_(pa.string(), pa.int64()): ([("x", 1)], [("x", 2)]),
    }
    for kind, (one, other) in kinds.items():
        schema = pa.schema([("op", pa.string()), ("id", pa.int64()), ("g", pa.int64()), ("v", kind)])

        def rows(*changes: tuple[str, int, Any], schema: pa.Schema = schema) -> pa.Table:
            return pa.Table.from_pylist([{"op": op, "id": number, "g": 1, "v": v} for op, number, v in changes], schema)

        engine = gpu_ops.engine(
            rows=Input.of(schema, row_kind="op"),
            by="g",
            aggregates={"f": ("first", "v"), "l": ("last", "v")},
            emit=emit,
        )
        engine.process(rows=rows(("+I", 1, one), ("+I", 2, one), ("+I", 3, one), ("+I", 4, one)))
        assert engine.process(rows=rows(("-D", 1, one))).num_rows == 0
        assert engine.process(rows=rows(("-D", 4, one), ("+I", 5, one))).num_rows == 0
        assert engine.process(rows=rows(("+I", 6, other))).num_rows == 2
        assert engine.process(rows=rows(("-D", 6, other), ("+I", 7, other), ("-D", 2, one))).num_rows <= 4
        assert engine.table().to_pylist() == [{"g": 1, "f": one, "l": other}]


def test_engines_that_are_gone_take_nothing_of_a_shared_budget() -> None:
    budget, rows = Budget(host=1_200_000, disk=0), pa.table({"k": range(20_000), "x": ["t" * 10] * 20_000})
    other = pa.table({"k": [1], "y": [1]})
    for _ in range(6):  # also where nobody has collected garbage
        gpu_ops.engine(a=rows, c=other, on="k", memory_limit=budget).process(a=rows)
    gc.collect()
    assert budget.used.host == 0
    first = gpu_ops.engine(a=rows, c=other, on="k", memory_limit=budget)
    first.process(a=rows)
    second = gpu_ops.engine(a=rows, c=other, on="k", memory_limit=budget)
    told = (
        r"the state of this engine would take .* of host memory, that of the engines that share its budget takes "
        r".*, and memory_limit is 1.1 MiB for all of it together; give it more"
    )
    with pytest.raises(StateError, match=told):
        second.process(a=rows)
    first.close()
    second.process(a=rows)


def test_a_clock_that_is_set_back_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of("aggregate")
    now = int(dt.datetime(2027, 1, 1, tzinfo=dt.UTC).timestamp() * 1000)
    with caplog.at_level(logging.WARNING, "gpu_ops"):
        for clock in (now, now + 3_600_000, now + 5, now + 10, now, now + 7_200_000, now):
            engine.process(l=ROWS.empty_table(), clock_ms=clock)
    assert caplog.text.count("the clock was set back by 3600.0 s") == 1
    assert caplog.text.count("set back") == 1
