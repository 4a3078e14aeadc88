"""The contract of `gpu_ops.kernels.Kernels`: stores and the search of sorted runs, against plain models."""

from __future__ import annotations

import sys
from contextlib import closing
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from cpu_fallback.store import CpuStore, Growable
from gpu_ops import layouts
from gpu_ops.arrays import Array
from gpu_ops.descriptions.by_time import Asof, AsofJoin, IntervalJoin
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.interval import Interval
from gpu_ops.descriptions.join import Join
from gpu_ops.descriptions.keys import Key
from gpu_ops.join_engine import JoinEngine
from gpu_ops.kernels import Kernels
from gpu_ops.operators.core.changes import NEVER
from gpu_ops.operators.core.emission import _come, _net, _net_of_some, _timed
from gpu_ops.operators.core.visibility import _crosses, _crosses_of_some
from gpu_ops.state.index import HashIndex
from gpu_ops.state.runs import Following
from gpu_ops.state.table import DEAD, DYING, LIVE
from kernels.conftest import EMULATED, only_on
from kernels.support import TYPES, everything, rows_of, same
from kernels.test_probe import keeping, unlike


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", range(12))
def test_store_is_a_growing_table(kernels: Kernels, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Appends, truncations, takes and retains at random, beside an Arrow table that does the same."""
    rng = np.random.default_rng(seed)
    if seed % 2:
        monkeypatch.setattr("cpu_fallback.store._MAPPED", 512)  # pages of their own, as for millions of rows
    schema = everything(1, rng).schema
    store, model = kernels.store(schema), everything(0, rng)
    for _ in range(25):
        match rng.integers(0, 6):
            case 0 | 1 | 2:
                added = everything(int(rng.choice([0, 1, 2, 3, 17, 100])), rng)
                store.append(kernels.frame(added))
                model = pa.concat_tables([model, added])
            case 3:
                length = int(rng.integers(0, model.num_rows + 1))
                store.truncate(length)
                model = model.slice(0, length)
            case 4:
                kept = np.flatnonzero(rng.random(model.num_rows) < rng.choice([0.0, 0.5, 0.9, 1.0]))
                store = store.retained(rows_of(kernels, kept))
                model = model.take(pa.array(kept))
            case 5:
                store.append(kernels.frame(everything(3, rng)))
                store.truncate(model.num_rows)
        assert len(store) == model.num_rows
        slots = rng.integers(-1, max(model.num_rows, 0), int(rng.integers(0, 60)))
        names = [str(n) for n in rng.permutation(list(TYPES))[: rng.integers(0, len(TYPES))]]
        taken = store.take(rows_of(kernels, slots), names)
        assert kernels.num_rows(taken) == slots.size
        wanted = model.take(pa.array(slots, mask=slots < 0)).select(names)
        if names:
            same(kernels.to_arrow(taken, wanted.schema), wanted)
    whole = store.take(rows_of(kernels, range(model.num_rows)), schema.names)
    same(kernels.to_arrow(whole, schema), model.combine_chunks())


def test_pages_that_are_looked_at_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """An array grows without a copy while nobody else holds it; who does keeps what it saw."""
    monkeypatch.setattr("cpu_fallback.store._MAPPED", 4096)
    values, growing, seen = np.arange(1 << 20), Growable(np.int64), []
    for end in range(1 << 16, values.size + 1, 1 << 16):
        growing.extend(values[growing.length : end])
        if end & (1 << 18):
            seen.append((growing.buffer(), end))
    assert np.array_equal(growing.data[: growing.length], values)
    for buffer, end in seen:
        assert np.array_equal(np.frombuffer(buffer, np.int64, count=end), values[:end])


def test_fused_functions(kernels: Kernels) -> None:
    """They give what they give on host arrays, of the same types."""
    rng = np.random.default_rng(2)
    counts, slots = [rng.integers(0, 3, 500, np.int32) for _ in "ab"], [rng.integers(0, 1 << 31, 500) for _ in "ab"]
    states = [rng.choice([DEAD, LIVE, DYING], 500).astype(np.int8) for _ in "ab"]
    some = [np.where(rng.random(500) < 0.2, -1, slots[0]) for _ in "a"] * 2  # no pair is of no row on either side
    given: list[tuple[Any, list[Any]]] = [
        (layouts.unpaired, [layouts.pairs(*slots)]),
        (layouts.unpaired_by_side, [np.where(slots[0] % 5 == 0, -1, layouts.pairs(*slots) | -(slots[1] % 2) << 63)]),
        (layouts.moments, [slots[0], slots[1] % (1 << layouts.LOGICAL_TIME_BITS), 4]),
        (layouts.moments, [slots[0], slots[1] % (1 << layouts.LOGICAL_TIME_BITS), rng.integers(0, 5, 500)]),
        (layouts.without_codes, [rng.integers(0, 1 << 62, 500)]),
        (_timed, [rng.integers(-1, 2, 500), rng.integers(NEVER - 1, NEVER + 1, 500)]),
        *(
            (function, [counts[0], after, of_one, 1 << 30, gone])
            for function, of_one in ((_crosses, slots[0]), (_crosses_of_some, some[0]))
            for after in (None, counts[1])
            for gone in (None, states[0])
        ),
        *(
            (function, [*of_both, 1 << 30, 1 << 30, *gone])
            for function, of_both in ((_net, slots), (_net_of_some, some))
            for gone in (states, [states[0], None], [None, states[1]])
        ),
        (_come, [*some, 1 << 30, 1 << 30]),
    ]
    for function, arguments in given:
        there = [kernels.asarray(a) if isinstance(a, np.ndarray) else a for a in arguments]
        ours_, theirs_ = kernels.fused(function)(*there), function(*arguments)
        parts = zip(ours_, theirs_, strict=True) if isinstance(theirs_, tuple) else [(ours_, theirs_)]
        for ours, theirs in parts:
            assert ours.dtype == theirs.dtype
            assert np.array_equal(kernels.asnumpy(ours), theirs)


@only_on("emulated")
def test_segments_are_merged_up_to_a_columns_size(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """A libcudf column has no more than 2^31 rows, all lists of one no more elements, and Arrow's text no more bytes."""
    monkeypatch.setattr(sys.modules["gpu_ops.cudf_backend.store"], "_MAX_ROWS", 1000)
    numbers = np.zeros(40, np.int8)
    struct = pa.array([{"l": [numbers[:5]]}] * 8)
    for column in (pa.array(numbers), pa.array([numbers] * 2), struct, pa.array(["a" * 20] * 2)):
        for piece in (None, 1 << 30):
            kernels.piece_bytes = piece
            store = kernels.store(pa.schema([("c", column.type)]))
            for _ in range(100):
                store.append(kernels.frame(pa.table({"c": column})))
            assert 1 < len(store.segments) < 60
            for segment in store.segments:
                lists = segment.columns()[0].array
                while pa.types.is_nested(lists.type):
                    lists = lists.flatten() if pa.types.is_list(lists.type) else lists.field(0)
                assert len(lists) <= 1000
                assert not pa.types.is_string(lists.type) or pc.sum(pc.binary_length(lists)).as_py() <= 1000


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", [n for n in TYPES if n != "null"])
def test_store_of_several_appends_without_nulls(kernels: Kernels, name: str) -> None:
    """Rows of all of them in one take, of one column and of two, with and without a null in what comes last."""
    kind, values = TYPES[name]
    rng = np.random.default_rng(3)
    schema = pa.schema([("c", kind), ("n", pa.int32())])
    store, model = kernels.store(schema), schema.empty_table()
    for size in (40, 9, 2, 1):
        chosen = pa.array([values[i] for i in rng.integers(0, len(values), size)], kind)
        added = pa.table([chosen, rng.integers(0, 99, size).astype(np.int32)], schema=schema)
        store.append(kernels.frame(added))
        model = pa.concat_tables([model, added]).combine_chunks()
        assert not store.may_be_null("c")
        for names in (["c"], ["n", "c"]):
            slots = rng.integers(0, model.num_rows, 30)
            wanted = model.select(names)
            taken = store.take(rows_of(kernels, slots), names, present=True)
            same(kernels.to_arrow(taken, wanted.schema), wanted.take(pa.array(slots)))
            slots[::3] = -1
            taken = store.take(rows_of(kernels, slots), names)
            same(kernels.to_arrow(taken, wanted.schema), wanted.take(pa.array(slots, mask=slots < 0)))
    store.append(kernels.frame(pa.table([pa.nulls(1, kind), pa.array([1], pa.int32())], schema=schema)))
    assert store.may_be_null("c")
    assert not store.may_be_null("n")
    last = store.take(rows_of(kernels, [len(store) - 1, 0]), ["n", "c"], present=True)
    found = kernels.to_arrow(last, pa.schema([schema.field("n"), schema.field("c")]))
    assert found["n"].to_pylist() == [1, model["n"][0].as_py()]
    assert found["c"].is_null().to_pylist() == [True, False]


def test_store_without_rows(kernels: Kernels) -> None:
    schema = everything(0, np.random.default_rng(0)).schema
    store = kernels.store(schema)
    assert len(store) == 0
    assert store.nbytes < 1000
    wanted = pa.table({field.name: pa.nulls(2, field.type) for field in schema})
    same(kernels.to_arrow(store.take(rows_of(kernels, [-1, -1]), schema.names), schema), wanted)
    store.truncate(0)
    store = store.retained(rows_of(kernels, []))
    assert len(store) == 0


def test_store_bytes(kernels: Kernels) -> None:
    store = kernels.store(pa.schema([("a", pa.int64()), ("s", pa.string())]))
    row = pa.table({"a": pa.array([1] * 1000), "s": pa.array(["x" * 92] * 1000)})
    for number in range(1, 6):
        store.append(kernels.frame(row))
        assert number * 100_000 <= store.nbytes < number * 110_000 + 1000
    store.truncate(1000)
    assert 100_000 <= store.nbytes < 112_000
    store = store.retained(rows_of(kernels, range(10)))
    assert 1000 <= store.nbytes < 3000


def test_appended_rows_are_not_the_frames(kernels: Kernels) -> None:
    """What a frame was made of may change afterwards: the store keeps its rows."""
    store = kernels.store(pa.schema([("a", pa.int64())]))
    mutable = np.arange(5)
    store.append(kernels.frame(pa.table({"a": pa.Array.from_buffers(pa.int64(), 5, [None, pa.py_buffer(mutable)])})))
    mutable[:] = 7
    found = kernels.to_arrow(store.take(rows_of(kernels, range(5)), ["a"]), pa.schema([("a", pa.int64())]))
    assert found["a"].to_pylist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("bits", [3, 12, 64])
def test_search(kernels: Kernels, bits: int) -> None:
    """Against every needle beside every entry; few bits make many rows of one hash."""
    search(kernels, bits)


@only_on("gpu", "gpu-tiny", *EMULATED)
@pytest.mark.parametrize("way", ["hash_join", "index", "kept_table", "auto", "some of each"])
@pytest.mark.parametrize("bits", [3, 12, 64])
def test_every_way_of_search(kernels: Any, monkeypatch: pytest.MonkeyPatch, bits: int, way: str) -> None:
    kernels.probe = {"kept_table": "hash_join", "some of each": "auto"}.get(way, way)
    wanted = {"auto": {"index"}, "some of each": {"hash_join", "index"}}.get(way, {way})
    if way == "kept_table":
        wanted = wanted if keeping(monkeypatch).table_class() is not None else {"hash_join"}
    if way == "some of each":
        unlike(monkeypatch)
    search(kernels, bits)
    assert {name for name, count in kernels.lookups.items() if count} == wanted


def search(kernels: Kernels, bits: int) -> None:
    rng = np.random.default_rng(bits)
    index = HashIndex(kernels)
    stored, total = np.empty(0, np.uint64), 0
    spread = np.uint64(64 - bits) if bits < 64 else np.uint64(0)
    for size in (1, 50, 0, 700, 3, 90, 2000):
        hashes = rng.integers(0, 1 << bits, size, np.uint64, endpoint=bits == 64) if bits < 64 else _wide(rng, size)
        hashes <<= spread
        index.stage(kernels.asarray(hashes), rows_of(kernels, range(total, total + size)))
        needles = np.concatenate([rng.choice(stored, 30) if stored.size else stored, hashes[:5], _wide(rng, 3)])
        for staged, there in ((False, stored), (True, np.concatenate([stored, hashes]))):
            found = [kernels.asnumpy(part) for part in index.probe(kernels.asarray(needles), staged=staged)]
            upper = there >> np.uint64(32)
            wanted = [(n, s) for n, h in enumerate(needles >> np.uint64(32)) for s in np.flatnonzero(upper == h)]
            assert list(zip(*(part.tolist() for part in found), strict=True)) == wanted
            assert all(part.dtype == np.int64 for part in found)
        index.commit()
        stored, total = np.concatenate([stored, hashes]), total + size


def _wide(rng: np.random.Generator, size: int) -> np.ndarray:
    return rng.integers(0, (1 << 64) - 1, size, np.uint64, endpoint=True)


def test_no_needles(kernels: Kernels) -> None:
    index = HashIndex(kernels)
    index.stage(kernels.asarray(np.array([1 << 40, 1 << 63], np.uint64)), rows_of(kernels, [0, 1]))
    found = index.probe(kernels.asarray(np.empty(0, np.uint64)), staged=True)
    assert [part.size for part in found] == [0, 0]


_ROWS = pa.schema([("k", pa.int64()), ("t", pa.int64())])
_CHANGES, _OTHER = Input("L", _ROWS, row_kind="op", event_time="t"), Input("R", _ROWS, event_time="t")
_BY: dict[str, Any] = {"keys": (Key("k", "k"),), "suffixes": ("", "_r")}
_NEAR = Interval(0, 9000, min_cleanup_ms=100)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "join",
    [
        Join("left", _CHANGES, _OTHER, **_BY),
        Join("anti", _OTHER, _CHANGES, **_BY, null_aware=True),
        AsofJoin("left", _CHANGES, _OTHER, **_BY, asof=Asof()),
        IntervalJoin("left", Input("L", _ROWS, event_time="t"), _OTHER, **_BY, interval=_NEAR),
        Join("left", Input("L", _ROWS, ttl_ms=9000), _OTHER, **_BY),
    ],
    ids=["keys", "null keys", "times", "interval", "ttl"],
)
def test_a_compaction_does_a_little_for_each_change(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    """However large the state: no micro-batch copies more rows than four times its changes, and a few thousand.

    Nor do more entries of an index or a queue follow; and what comes out is as if no row was ever dropped.
    """
    retained, follow, renumbered, done = CpuStore.retained, Following.follow, layouts.renumbered, [0]

    def copying(store: CpuStore, slots: Array, onto: CpuStore | None = None) -> CpuStore:
        done.append(slots.size)
        return retained(store, slots, onto)

    def following(part: Following[Any], *given: Any) -> Any:
        done.append(0)
        return follow(part, *given)

    def looking(entries: Array, new_slots: Array) -> tuple[Array, Array]:
        done[-1] += entries.size
        return renumbered(entries, new_slots)

    monkeypatch.setattr(CpuStore, "retained", copying)
    monkeypatch.setattr(Following, "follow", following)
    monkeypatch.setattr(layouts, "renumbered", looking)
    side = [source.name for source in join.inputs].index("L")
    kinds, rng, live = join.inputs[side].row_kind is not None, np.random.default_rng(0), np.arange(0)

    def rows(new: Array, gone: Array) -> pa.Table:
        keys = np.concatenate([gone, new])
        kind = pa.array(["-D"] * gone.size + ["+I"] * new.size)
        return pa.table({"k": keys, "t": keys} | ({"op": kind} if kinds else {}))

    with closing(JoinEngine(join, "cpu")) as engine, closing(JoinEngine(join, "cpu")) as never:
        sizes = []
        monkeypatch.setattr(never._operator.tables[side], "compact", lambda most=None: None)
        for number in range(100):
            new = np.arange(300 * number, 300 * number + 300)
            gone = rng.choice(live, 700 if kinds and number >= 50 and live.size > 1000 else 0, replace=False)
            live = np.concatenate([np.setdiff1d(live, gone), new])
            given: dict[str, Any] = {"L": rows(new, gone), "R": pa.table({"k": new[::2], "t": new[::2]})}
            given["clock_ms"] = 300 * number
            if isinstance(join, IntervalJoin):
                given["watermark"] = 300 * number
            assert engine.process(**given).equals(never.process(**given))
            sizes.append(len(engine._operator.tables[side]))
        assert min(np.diff(sizes)) < -5000  # all at once, when all is ready
    assert 5000 < max(done) <= 4096 + 4 * 1000
