"""Rows are copied to a card while the host looks at them; what is wrong with them is said as before."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from gpu_ops import ingest
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.join import Join
from gpu_ops.descriptions.keys import normalize_on
from gpu_ops.errors import BadInputError
from gpu_ops.join_engine import JoinEngine
from kernels.emulation import emulated

pytestmark = pytest.mark.thorough

SCHEMAS = [pa.schema([("k", pa.int64()), (name, pa.string())]) for name in "ab"]


def join(**more: Any) -> Join:
    sides = [Input(n, s, row_kind="op", unique_key=("k",), **more) for n, s in zip("lr", SCHEMAS, strict=True)]
    return Join("left", *sides, normalize_on("k"), emit="per_event")


def rows(side: int, text: str | bytes = "x", *, size: int = 40) -> pa.Table:
    texts = [b"w"] * (size - 1) + [text if isinstance(text, bytes) else text.encode()]
    column = pa.Array.from_buffers(pa.string(), size, pa.array(texts, pa.binary()).buffers())
    numbers = np.random.default_rng(side).permutation(size)
    return pa.table([numbers, column], schema=SCHEMAS[side]).append_column("op", pa.array(["+I"] * size))


@pytest.mark.parametrize("least", [0, 1 << 40])
def test_rows_are_copied_once_and_looked_at_beside(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest, "_LEAST_AHEAD", least)
    looked_by: set[int] = set()
    look = ingest._bad_rows
    monkeypatch.setattr(ingest, "_bad_rows", lambda *args: looked_by.add(threading.get_ident()) or look(*args))
    wanted = []
    for backend in ("cpu", "gpu"):
        copied: list[int] = []
        with emulated(), contextlib.closing(JoinEngine(join(), backend)) as engine:
            frame = engine.kernels.frame
            monkeypatch.setattr(
                engine.kernels, "frame", lambda table, frame=frame, to=copied: to.append(1) or frame(table)
            )
            looked_by.clear()
            wanted.append([engine.process(rows(0), rows(1, size=30)).to_pylist() for _ in range(2)])
            beside = backend == "gpu" and not least
            assert (threading.get_ident() not in looked_by) == beside
            assert len(copied) == 4
            # changes that are put in another order are copied in that order
            orders = [np.arange(40)[::-1], np.arange(40, 70)]
            wanted[-1].append(engine.process_batches([rows(0), rows(1, size=30)], orders).to_pylist())
            with pytest.raises(BadInputError, match="holds text that is not valid UTF-8"):
                engine.process(rows(0, b"\xff"), rows(1))
            assert engine.state_size()["left_rows"] == 40
    assert wanted[0] == wanted[1]


def test_where_bad_rows_may_go_they_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest, "_LEAST_AHEAD", 0)
    with emulated(), contextlib.closing(JoinEngine(join(bad_rows="drop"), "gpu")) as engine:
        assert engine.process(rows(0, b"\xff"), rows(1)).num_rows > 0
        assert engine.state_size()["left_rows"] == 39


def test_without_memory_for_them_the_error_of_the_rows_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest, "_LEAST_AHEAD", 0)
    with emulated(), contextlib.closing(JoinEngine(join(), "gpu")) as engine:

        def full(_: pa.Table) -> Any:
            raise MemoryError("std::bad_alloc: out_of_memory: RMM failure")

        monkeypatch.setattr(engine.kernels, "frame", full)
        with pytest.raises(BadInputError, match="not valid UTF-8"):
            engine.process(rows(0, b"\xff"), rows(1))
