"""Metrics that Spark is not asked to add up, as they can have one value only, have it."""

from __future__ import annotations

import dataclasses
from typing import get_args

import pytest

from gpu_ops.joins import Emit, Join
from gpu_ops.spark.metrics import known_metrics
from oracle.drive import Backend, cuts
from oracle.traces import HOWS, LAYOUTS, Shape, recipe, trace

PLACES = {"partitions": 3, "gpu_partitions": 0}
"""Known of what runs it, not of the engine."""


@pytest.mark.parametrize("emit", [emit for emit in get_args(Emit) if emit != "at_end"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("how", HOWS)
def test_known_metrics_are_what_the_engine_counts(how: str, layout: str, emit: Emit) -> None:
    shape = Shape(how, layout, layout)  # type: ignore[arg-type]
    check(
        shape.join(emit), shape, {"rows_out_update_before", "rows_out_update_after"} if emit == "per_batch" else set()
    )


def test_of_inputs_without_retractions() -> None:
    shape = Shape("left")
    join = shape.join("per_batch")
    inputs = [dataclasses.replace(source, row_kind=None) for source in join.inputs]
    join = dataclasses.replace(join, left=inputs[0], right=inputs[1])
    check(join, shape, {"left_unknown_retractions", "right_unknown_retractions"})


def check(join: Join, shape: Shape, expected: set[str]) -> None:
    known = known_metrics(join, 3, on_cpu=True)
    assert known.keys() >= expected | {"left_expired", "right_bad_rows", "left_cold_bytes"}
    assert {name: known.pop(name) for name in PLACES} == PLACES
    events = trace(shape, recipe(shape, 300, 1, live=20, malformed=True))
    if join.left.row_kind is None:
        events = tuple((side, "+I", row) for side, _, row in events)
    counted = 0
    with Backend("cpu").engine(join) as engine:
        for cut in cuts(join, events, (50,)):
            metrics = engine.prepare(**cut.inputs).metrics
            engine.commit()
            assert {name: metrics[name] for name in known} == known
            counted += metrics["rows_out_insert"]
    assert counted
