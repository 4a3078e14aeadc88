"""Wrong answers that Spark's own stream-stream join once gave, replayed by their names."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from gpu_ops.descriptions.by_time import IntervalJoin
from gpu_ops.descriptions.description import Emit
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.interval import Interval
from gpu_ops.descriptions.join import JoinType
from gpu_ops.descriptions.keys import Key
from gpu_ops.join_engine import JoinEngine

Rows = list[tuple[str, int]]
"""Key and time, ms."""


@pytest.fixture(params=[("drop", False), ("drop", True), ("join", False), ("join", True)], ids=str)
def engine(request: pytest.FixtureRequest) -> Any:
    """Makes engines, with late rows dropped or joined, in usual and in the smallest segments."""
    late, tiny = request.param

    def make(how: JoinType, lower: int, upper: int, emit: Emit = "per_batch", delay: int | None = None) -> JoinEngine:
        inputs = [
            Input(name, pa.schema([(f"{name}k", pa.string()), (f"{name}t", pa.int64())]), event_time=f"{name}t",
                  delay_ms=delay)
            for name in "lr"
        ]  # fmt: skip
        join = IntervalJoin(how, *inputs, (Key("lk", "rk"),), emit=emit, interval=Interval(lower, upper, late=late))
        return JoinEngine(join, "cpu", tiny=tiny)

    return make


def step(engine: JoinEngine, left: Rows, right: Rows, **watermark: Any) -> list[tuple[int | None, int | None]]:
    """One micro-batch: the times of the pairs and pads it says, sorted."""
    batches = [
        pa.table([[k for k, _ in rows], pa.array([t for _, t in rows], pa.int64())], names=source.schema.names).cast(
            source.schema
        )
        for rows, source in zip((left, right), engine.description.inputs, strict=True)
    ]
    said = engine.process(*batches, **watermark)
    return sorted(zip(said["lt"].to_pylist(), said["rt"].to_pylist(), strict=True), key=str)


def test_spark_26154_a_matched_row_is_not_padded_when_its_partner_went_first(engine: Any) -> None:
    """The right row's time is over long before the left's; the left row is remembered as matched."""
    join = engine("left", 0, 20)
    assert step(join, [("a", 1)], [("a", 5)], watermark=0) == [(1, 5)]
    assert step(join, [], [], watermark=10) == []
    assert join.state_size()["right_rows"] == 0
    assert join.state_size()["left_rows"] == 1
    assert step(join, [], [], watermark=30) == []
    assert join.state_size()["left_rows"] == 0


def test_spark_38684_what_ends_and_what_comes_for_one_key_in_one_micro_batch(engine: Any) -> None:
    """A row of the key ends while others of it come: each is said once, and none is lost."""
    join = engine("full", -5, 5)
    assert step(join, [("a", 1), ("a", 100)], [("a", 103)], watermark=0) == [(100, 103)]
    said = step(join, [("a", 101)], [("a", 105)], watermark=50)
    assert said == [(1, None), (100, 105), (101, 103), (101, 105)]
    assert step(join, [("a", 300)], [], watermark=200) == []
    assert step(join, [], [], watermark=400) == [(300, None)]
    assert join.state_size()["left_rows"] + join.state_size()["right_rows"] == 0


def test_spark_46350_a_watermark_on_one_input_only(engine: Any) -> None:
    """Rows may go only when neither input can bring a match: one watermark alone ends nothing."""
    join = engine("left", 0, 10)
    assert step(join, [("a", 1)], [("a", 50)], watermark=(None, 1000)) == []
    assert step(join, [("a", 45)], [("a", 8)], watermark=(None, 2000)) == [(1, 8), (45, 50)]
    assert join.state_size()["left_rows"] == 2
    assert step(join, [("b", 2000)], [], watermark=(1990, 2000)) == []
    sizes = join.state_size()
    assert (sizes["left_rows"], sizes["right_rows"]) == (1, 0)


def test_spark_49829_a_row_meets_its_own_micro_batch_before_the_watermark_that_it_moves(engine: Any) -> None:
    """A micro-batch moves the watermark far beyond its own first rows; they join, and stay, all the same."""
    join = engine("left", -10, 10, delay=0)
    assert step(join, [("a", 10), ("b", 10), ("z", 1000)], [("a", 12), ("z", 1000)]) == [(10, 12), (1000, 1000)]
    assert join.state_size()["left_rows"] == 3
    assert step(join, [], []) == [(10, None)]
    sizes = join.state_size()
    assert (sizes["left_rows"], sizes["right_rows"]) == (1, 1)


def test_spark_58904_equal_times_wait_for_the_other_inputs_watermark(engine: Any) -> None:
    """With ``left time = right time`` a left row ends by the right's watermark, not by its own."""
    join = engine("left", 0, 0)
    assert step(join, [("a", 10), ("b", 11)], [], watermark=(0, 0)) == []
    assert step(join, [("a", 500)], [("a", 10)], watermark=(400, 5)) == [(10, 10)]
    assert step(join, [], [], watermark=(450, 200)) == [(11, None)]
    assert step(join, [], [("a", 500)], watermark=(450, 300)) == [(500, 500)]


@pytest.mark.parametrize("emit", ["per_event", "per_batch"])
def test_both_ways_of_output_say_the_same(engine: Any, emit: Emit) -> None:
    join = engine("full", -5, 5, emit)
    assert step(join, [("a", 1)], [("a", 3), ("b", 2)], watermark=0) == [(1, 3)]
    late = join.description.interval.late
    assert step(join, [("b", 9)], [], watermark=20) == [*([(9, None)] if late == "join" else []), (None, 2)]
