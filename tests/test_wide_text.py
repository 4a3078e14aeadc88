"""Text that offsets of 32 bits do not reach, at a limit of some hundred bytes in place of 2 GiB."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.join import Join
from gpu_ops.descriptions.keys import Key
from gpu_ops.join_engine import JoinEngine
from gpu_ops.values import beyond_offsets, fitted, narrow, one_array

pytestmark = pytest.mark.thorough

WORDS = ["", "a", None, "bcd", "äöü", None, "efghij", "k", ""]


@pytest.mark.parametrize("most", [6, 7, 100])
@pytest.mark.parametrize(("start", "length"), [(0, 9), (1, 7), (2, 1), (9, 0)])
@pytest.mark.parametrize("kind", [pa.string(), pa.binary()])
def test_pieces(kind: pa.DataType, start: int, length: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_ops.values.MOST_TEXT", most)
    wide = pa.large_string() if kind == pa.string() else pa.large_binary()
    part = pa.array(WORDS, pa.string()).cast(wide).slice(start, length)
    pieces = narrow(part)
    assert pa.chunked_array(pieces, kind).to_pylist() == part.to_pylist()
    for piece in pieces:
        piece.validate(full=True)
        assert sum(len(value.as_buffer()) for value in piece if value.is_valid) <= most
    assert beyond_offsets(part) == (len(pieces) > 1)
    assert pa.chunked_array(fitted(part, kind), kind).to_pylist() == part.to_pylist()
    assert len(fitted(part, wide)) == 1


def test_columns_come_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    column = pa.chunked_array([["abc"], ["d", None], []], pa.string())
    assert one_array(column).type == pa.string()
    monkeypatch.setattr("gpu_ops.values.MOST_TEXT", 3)
    assert one_array(column).type == pa.large_string()
    assert one_array(column).to_pylist() == column.to_pylist()
    assert one_array(pa.chunked_array([], pa.string())).to_pylist() == []


@pytest.mark.parametrize("how", ["left", "full"])
@pytest.mark.parametrize("emit", ["per_batch", "per_event"])
def test_a_join_says_the_same(how: Any, emit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """State, merged, compacted, stored and restored, and what is said: far beyond the limit, but for the keys."""
    left = Input("a", pa.schema([("k", pa.int64()), ("note", pa.string()), ("raw", pa.binary())]), row_kind="op")
    right = Input("b", pa.schema([("k", pa.int64()), ("more", pa.large_string())]), row_kind="op")
    join = Join(how, left, right, keys=(Key("k", "k", using=True),), emit=emit)

    def run() -> list[list[Any]]:
        rng, said, live = np.random.default_rng(5), [], []
        engine = JoinEngine(join, "cpu", tiny=True)
        for turn in range(12):
            rows = []
            for _ in range(40):
                if live and rng.random() < 0.45:
                    rows.append(("-D", *live.pop(int(rng.integers(len(live))))))
                else:
                    note = None if rng.random() < 0.1 else "n" * int(rng.integers(60))
                    live.append((int(rng.integers(8)), note, b"r" * int(rng.integers(30))))
                    rows.append(("+I", *live[-1]))
            table = pa.table(dict(zip(("op", "k", "note", "raw"), zip(*rows, strict=True), strict=True)))
            table = table.cast(pa.schema([("op", pa.string()), *left.schema]))
            table = pa.concat_tables([table.slice(0, 25), table.slice(25)])
            other = pa.table({"op": ["+I"] * 3, "k": rng.integers(8, size=3), "more": ["m" * turn] * 3})
            said.append(engine.process(table, other.cast(pa.schema([("op", pa.string()), *right.schema]))).to_pylist())
            if turn == 6:
                state = engine.snapshot()
                engine.close()
                engine = JoinEngine(join, "cpu", tiny=True)
                engine.restore(state)
        with contextlib.closing(engine):
            return said

    expected = run()
    monkeypatch.setattr("gpu_ops.values.MOST_TEXT", 200)
    assert run() == expected
