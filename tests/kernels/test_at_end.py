"""At the end of input: a GPU joins at once what its memory has room for, the CPU what its caches have."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from oracle.drive import changes

from gpu_ops import Aggregate, Input, Join, JoinEngine, Key
from gpu_ops.descriptions.description import Description
from gpu_ops.operators import at_end
from gpu_ops.state import table
from kernels.counting import counting
from kernels.emulation import emulated

LEFT, RIGHT = (pa.schema([(f"{side}k", pa.int64()), (f"{side}v", pa.int64())]) for side in "lr")
ROWS = 4000


def joined(how: Any = "left", **more: Any) -> Join:
    return Join(how, Input("l", LEFT, **more), Input("r", RIGHT, **more), (Key("lk", "rk"),), emit="at_end")


def parts(description: Description, backend: Any, limit: int | None = None) -> list[list[Any]]:
    """The rows of each part of the result."""
    rng = np.random.default_rng(7)
    with contextlib.closing(JoinEngine(description, backend)) as engine:
        if limit is not None:
            engine.kernels.memory_limit = limit
        for _ in range(4):
            tables = []
            for source in description.inputs:
                columns = [pa.array(rng.integers(0, ROWS, ROWS // 4)), pa.array(rng.integers(0, 9, ROWS // 4))]
                tables.append(pa.table(columns, schema=source.schema))
            engine.process(*tables)
        return [changes(part) for part in engine.finish_parts()]


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(at_end, "_ROWS_AT_ONCE", 500)


@pytest.mark.parametrize("how", ["left", "semi", "full"])
def test_a_gpu_joins_at_once_what_its_memory_has_room_for(how: Any) -> None:
    with emulated():
        whole, some = parts(joined(how), "gpu"), parts(joined(how), "gpu", limit=2_000_000)
    pieces = parts(joined(how), "cpu")
    assert len(whole) == 1
    assert 1 < len(some) < len(pieces)
    assert len(pieces) >= 2 * ROWS // 500
    wanted = Counter(row for part in pieces for row in part)
    assert Counter(whole[0]) == Counter(row for part in some for row in part) == wanted


def test_so_do_aggregates() -> None:
    groups = Aggregate.of(Input("l", LEFT), ("lk",), {"n": "count(*)", "least": "min(lv)"}, "at_end")
    with emulated():
        whole = parts(groups, "gpu")
    pieces = parts(groups, "cpu")
    assert len(whole) == 1 < len(pieces)
    assert Counter(whole[0]) == Counter(row for part in pieces for row in part)


def test_calls_at_the_end_do_not_grow_with_rows() -> None:
    """One part, one hash join: where it was a round of as many calls for each 400,000 rows."""

    def calls(limit: int | None) -> tuple[int, int]:
        with emulated(), counting() as found:
            count = len(parts(joined(), "gpu", limit))
        return count, sum(number for (_, name), number in found.calls.items() if name == "plc.inner_join")

    assert calls(None) == (1, 1)
    rounds, joins = calls(500_000)
    assert rounds == joins > 5


def test_what_the_memory_has_no_room_for_is_joined_in_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it has."""
    honest, tried = at_end.merge_join, list[int]()

    def scarce(join: Any, kernels: Any, given: Any, room: Any) -> Any:
        tried.append(sum(change.kinds.size for change in given))
        if tried[-1] > 2 * ROWS // 3:
            raise MemoryError
        return honest(join, kernels, given, room)

    pieces = parts(joined(), "cpu")
    monkeypatch.setattr(at_end, "merge_join", scarce)
    with emulated():
        found = parts(joined(), "gpu")
    assert tried[0] == 2 * ROWS
    assert 3 <= len(found) < len(tried) < 9
    assert Counter(row for part in found for row in part) == Counter(row for part in pieces for row in part)
    monkeypatch.setattr(at_end, "_ROWS_AT_ONCE", 2 * ROWS)
    with pytest.raises(MemoryError):
        parts(joined(), "cpu")


def test_what_is_loaded_comes_in_pieces_as_large_as_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of rows that are there already: each piece makes the same calls."""
    monkeypatch.setattr(table, "_LEAST_AT_ONCE", 100)
    rows = pa.table([np.arange(ROWS), np.arange(ROWS)], schema=LEFT)

    def calls(piece_bytes: int) -> tuple[int, int]:
        with (
            emulated(),
            counting() as found,
            contextlib.closing(JoinEngine(dataclasses.replace(joined(), emit="per_batch"), "gpu")) as engine,
        ):
            engine.kernels.piece_bytes = piece_bytes
            found.on = False
            none = pa.array(np.zeros(ROWS, np.int64))
            state = {"left": rows.append_column("__count", none), "right": RIGHT.empty_table()}
            found.on = True
            engine.restore(state)
            found.on = False
            assert engine.state_size()["left_rows"] == ROWS
            assert not any(engine.kernels.lookups.values())  # which is what a hash join would be for
            return sum(found.calls.values())

    assert calls(1 << 30) < calls(1) / 8


def test_a_backlog_searches_what_state_has_sorted_anyway() -> None:
    """All of it in one micro-batch, whose rows become the state's runs: a join of as many costs more than a search."""
    live = dataclasses.replace(joined(), emit="per_batch")

    def result(backend: Any) -> tuple[Counter[Any], dict[str, int]]:
        rng = np.random.default_rng(7)
        with contextlib.closing(JoinEngine(live, backend, backlog=True)) as engine:
            for _ in range(4):
                columns = [[rng.integers(0, ROWS, ROWS // 4), rng.integers(0, 9, ROWS // 4)] for _ in range(2)]
                tables = [pa.table(own, schema=x.schema) for own, x in zip(columns, live.inputs, strict=True)]
                assert not engine.process(*tables, backlog=True).num_rows
            found = Counter(changes(engine.process(LEFT.empty_table(), RIGHT.empty_table())))
            return found, dict(engine.kernels.lookups)

    with emulated():
        found, lookups = result("gpu")
        probe: Any = importlib.import_module("gpu_ops.cudf_backend.probe")
        for rows in (10**4, 10**6, 10**7, 10**8, 10**9):
            assert probe.search_seconds(1, rows) < probe.join_seconds(rows, rows)
            assert probe.choose("auto", [rows], rows) == ([], [], [0])
    assert found == result("cpu")[0]
    assert lookups["index"] >= ROWS
    assert not lookups["hash_join"]
