"""Dataflows on any backend: as on the CPU, and on a card no changelog between two operators comes to the host."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest
from oracle.dataflows import cut, dataflow, trace
from oracle.drive import Backend

import gpu_ops
from gpu_ops.operators import dataflow as running
from kernels.conftest import EMULATED, only_on
from kernels.engines import CPU, alike, run


@pytest.mark.one_in(32, all=8)
@only_on("gpu", "gpu-tiny", *EMULATED)
@pytest.mark.parametrize("emit", ["per_event", "per_batch"])
@pytest.mark.parametrize("seed", range(12))
def test_same_as_the_cpu(engines: Backend, seed: int, emit: str) -> None:
    rng = random.Random(seed)
    flow = dataflow(rng, emit)
    parts = cut(flow, trace(rng, flow.inputs, 120), rng, 60)
    batches = [(x["inputs"], {"orders": x["orders"], "clock_ms": number}) for number, x in enumerate(parts)]
    alike(run(engines, flow, batches), run(CPU, flow, batches))


@only_on("gpu", *EMULATED)
def test_a_changelog_between_joins_stays_on_the_card(engines: Backend, monkeypatch: Any) -> None:
    read = running._read
    changelogs = []

    def noted(*args: Any) -> Any:
        changelogs.append(read(*args))
        return changelogs[-1]

    monkeypatch.setattr(running, "_read", noted)
    a, b, c = (pa.table({"k": [1, 2], name: ["x", "y"]}) for name in "abc")
    below = gpu_ops.engine(a=a, b=b, on="k", backend="cpu")
    flow = gpu_ops.engine(below=below, c=c, on="k", how="left", backend="cpu").description
    with engines.engine(flow) as engine:
        engine.process(a=a, b=b)
        assert not isinstance(changelogs[0].rows, pa.Table)
        assert engine.process(c=c).num_rows == 4
