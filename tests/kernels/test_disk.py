"""State on local disk: row for row the same answers, and nothing lost where there is no room (`gpu_ops.files.disk`)."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from conftest import slow_but
from oracle.drive import Backend, all_on_disk
from oracle.interval_traces import IntervalShape
from oracle.multi_traces import SHAPES as MULTI
from oracle.multi_traces import MultiShape
from oracle.traces import HOWS, LAYOUTS, Shape

from cpu_fallback import CpuKernels
from cpu_fallback.rows_on_disk import RowsOnDisk, can_lie_on_disk
from gpu_ops.descriptions.aggregate import Aggregate
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.join import Join
from gpu_ops.descriptions.keys import Key
from gpu_ops.errors import DescriptionError, StateError
from gpu_ops.files import disk
from gpu_ops.files.disk import Disk, NoRoomError, local_folders
from gpu_ops.memory import Budget, disk_size
from gpu_ops.state.index import HashIndex
from gpu_ops.state.numbers import Growing, cool, copied, fetch, retained
from gpu_ops.state.time_index import TimeIndex
from kernels.conftest import only_on
from kernels.engines import CPU, alike, run
from kernels.support import TYPES, everything, same
from kernels.test_cold import EMITS, Squeeze
from kernels.test_engine import INTERVAL, batches_of

ON_DISK = Backend("cpu-disk")
NAMES = [("l_k", "l_v"), ("r_k", "r_v")]


@pytest.fixture
def place(tmp_path: Path) -> Disk:
    return Disk([tmp_path])


def wide_join(**of_input: Any) -> Join:
    schemas = [pa.schema([(k, pa.int64()), (v, pa.string())]) for k, v in NAMES]
    inputs = [Input(side, schema, **of_input) for side, schema in zip("LR", schemas, strict=True)]
    return Join("full", *inputs, keys=(Key("l_k", "r_k"),), emit="per_batch")


def rows(side: int, first: int, count: int, text: str = "x" * 100) -> pa.Table:
    keys = np.arange(first, first + count)
    return pa.table(dict(zip(NAMES[side], (keys, [f"{key} {text}" for key in keys]), strict=True)))


# --- rows ------------------------------------------------------------------------------------


@pytest.mark.parametrize("tiny", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_a_store_that_goes_to_disk(seed: int, place: Disk, monkeypatch: pytest.MonkeyPatch, tiny: bool) -> None:
    """Appends, truncations of what is not committed, moves, takes and retains at random, beside an Arrow table."""
    rng = np.random.default_rng(seed)
    if not tiny:
        for module in ("gpu_ops.files.disk", "cpu_fallback.store"):
            monkeypatch.setattr(f"{module}.LEAST", 300)
        monkeypatch.setattr("cpu_fallback.store._STEP", 1000)
        monkeypatch.setattr("cpu_fallback.rows_on_disk._STEP", 700)
        monkeypatch.setattr(disk, "_STEP", 333)
    monkeypatch.setattr("cpu_fallback.store._MANY", 1 if seed % 2 else 1 << 12)
    if seed // 2 % 2:
        monkeypatch.setattr("cpu_fallback.store._MAPPED", 64)
    kernels = CpuKernels(tiny_segments=tiny)
    schema, moved = everything(1, rng).schema, 0
    store, model = kernels.store(schema), everything(0, rng)
    for _ in range(30):
        match rng.integers(0, 6):
            case 0 | 1:
                added = everything(int(rng.choice([0, 1, 3, 17, 100])), rng)
                store.append(kernels.frame(added))
                model = pa.concat_tables([model, added])
            case 2:
                length = int(rng.integers(store._first, model.num_rows + 1))
                store.truncate(length)
                model = model.slice(0, length)
            case 3:
                kept = np.flatnonzero(rng.random(model.num_rows) < rng.choice([0.0, 0.5, 0.9, 1.0]))
                store, on_disk = store.retained(kept), store.disk_bytes
                assert bool(store.disk_bytes) <= bool(on_disk)
                model = model.take(pa.array(kept))
            case _:
                before, committed = store.nbytes, int(rng.integers(0, model.num_rows + 1))
                freed = store.cool(int(rng.integers(1, 2000)), place, committed)
                moved += freed
                assert store._first <= max(committed, store._first)
                assert bool(freed) <= bool(before)
        assert len(store) == model.num_rows
        assert store.nbytes == store.host_bytes + store.disk_bytes
        assert place.used == store.disk_bytes
        slots = rng.integers(-1, max(model.num_rows, 0), int(rng.integers(0, 60)))
        names = [str(n) for n in rng.permutation(list(TYPES))[: rng.integers(0, len(TYPES))]]
        taken = store.take(slots, names)
        wanted = model.take(pa.array(slots, mask=slots < 0)).select(names)
        if names:
            same(kernels.to_arrow(taken, wanted.schema), wanted)
        first, last = np.sort(rng.integers(0, model.num_rows + 1, 2)).tolist()
        beside = store.take(np.arange(first, last), schema.names, present=True)
        same(kernels.to_arrow(beside, schema), model.slice(first, last - first))
        for name in schema.names:
            assert store.may_be_null(name) or not model[name].null_count
    same(kernels.to_arrow(store.take(np.arange(model.num_rows), schema.names), schema), model.combine_chunks())
    assert moved > 0
    del store
    assert not place.used


def test_lists_and_structs_stay_in_memory() -> None:
    stay = {name for name, (kind, _) in TYPES.items() if not can_lie_on_disk(kind)}
    assert stay == {"array", "array_of_doubles", "struct", "map", "deep"}


def test_long_texts_and_many_of_them(place: Disk) -> None:
    """Sixteen rows of more than 64 KiB are told apart, before and behind those that are short."""
    kernels, rng = CpuKernels(tiny_segments=True), np.random.default_rng(3)
    parts = [pa.table({"t": ["ab" * int(n) for n in rng.integers(0, most, 50)]}) for most in (5, 100_000, 5)]
    model = pa.concat_tables(parts)
    store = kernels.store(model.schema)
    for part in parts:
        store.append(kernels.frame(part))
        store.cool(1 << 40, place)
    assert store._first == 150
    slots = rng.permutation(150)
    same(kernels.to_arrow(store.take(slots, ["t"]), model.schema), model.take(slots).combine_chunks())


def test_a_row_is_read_once_while_it_is_kept(place: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows whose keys are compared come out afterwards, and not all of them were compared in one go."""
    kernels, model = CpuKernels(tiny_segments=True), rows(0, 0, 90)
    store, read = kernels.store(model.schema), list[list[int]]()
    store.append(kernels.frame(model))
    store.cool(1 << 30, place)
    of_file = RowsOnDisk._read
    monkeypatch.setattr(RowsOnDisk, "_read", lambda self, slots: (read.append(slots.tolist()), of_file(self, slots))[1])
    for slots in ([7, 3, 5], [60, 5, 4], [3, 4, 5, 7, 60, 3], [1, 89, 60]):
        taken = store.take(np.array(slots), model.schema.names)
        same(kernels.to_arrow(taken, model.schema), model.take(pa.array(slots)))
    assert read == [[3, 5, 7], [4, 60], [1, 89]]
    monkeypatch.setattr("cpu_fallback.rows_on_disk._KEPT", 1500)
    for slots in ([20, 1], [1, 20], [30, 31, 20]):  # a row has more than 100 bytes, and ten are kept at most
        taken = store.take(np.array(slots), model.schema.names)
        same(kernels.to_arrow(taken, model.schema), model.take(pa.array(slots)))
    assert read[3:] == [[20], [30, 31]]
    place.micro_batch += 1
    store.take(np.array([31, 1]), model.schema.names)
    assert read[-1] == [1, 31]


@pytest.mark.parametrize("least", [64, 1 << 20])
def test_what_was_seen_stays(place: Disk, monkeypatch: pytest.MonkeyPatch, least: int) -> None:
    """Arrow buffers that somebody holds are the same after the store has grown, moved, and gone: large ones, too.

    So are rows that are taken as they lie, for a snapshot.
    """
    monkeypatch.setattr("cpu_fallback.store._MAPPED", least)
    monkeypatch.setattr("cpu_fallback.store._MANY", 8)
    kernels = CpuKernels(tiny_segments=True)
    schema = rows(0, 0, 1).schema
    store = kernels.store(schema)
    held = []
    for first in range(0, 500, 50):
        store.append(kernels.frame(rows(0, first, 50)))
        slots, begin = np.arange(first + 50), store._first
        lying = store.take(slots[begin:], schema.names, present=True)
        held.append((store.take(slots, schema.names), lying, store.columns["l_v"].view(), begin))
        store.append(kernels.frame(rows(0, first + 1000, 30)))  # and these are taken back
        store.truncate(first + 50)
        store.cool(2000, place)
    del store
    assert any(begin for *_, begin in held)
    for number, (frame, lying, view, begin) in enumerate(held):
        end = 50 * (number + 1)
        whole = rows(0, 0, end)
        same(kernels.to_arrow(frame, schema), whole)
        same(kernels.to_arrow(lying, schema), whole.slice(begin).combine_chunks())
        if least == 64:  # smaller arrays may move
            assert view.cast(pa.string()).equals(whole["l_v"].combine_chunks().slice(begin))


def test_no_memory_to_begin_behind_what_moved(place: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that cannot leave memory leave the disk again."""
    kernels = CpuKernels(tiny_segments=True)
    for model in (rows(0, 0, 90), rows(0, 0, 90).drop_columns(["l_v"])):
        store = kernels.store(model.schema)
        store.append(kernels.frame(model))
        store.cool(200, place)
        first, size = store._first, store.disk_bytes
        with monkeypatch.context() as patch:
            patch.setattr("cpu_fallback.store.Growable.can_drop", lambda _: False)
            patch.setattr("cpu_fallback.store.GrowingColumn.part", lambda *_: bytes(1 << 62))
            with pytest.raises(MemoryError):
                store.cool(200, place)
        assert (store._first, store.disk_bytes, place.used) == (first, size, size)
        store.cool(1 << 30, place)
        taken = store.take(np.arange(90), model.schema.names)
        same(kernels.to_arrow(taken, model.schema), model.combine_chunks())


@pytest.mark.parametrize("way", ["disk", "cache", "map"])
def test_stretches_of_a_file(place: Disk, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """From the disk, from the system's cache, and where there are no asynchronous reads: short ones and long ones."""
    rng, page = np.random.default_rng(5), disk._PAGE
    for name, value in {"_MOST": 4 * page, "_BUFFER": 16 * page}.items():
        monkeypatch.setattr(disk, name, value)
    if way == "map":
        monkeypatch.setattr(disk, "_CALLS", {})
        monkeypatch.setattr(disk, "_idle", [])
    else:
        monkeypatch.setattr(disk.File, "_in_cache", lambda *_: way == "cache")
    file, data = place.file(), rng.integers(0, 256, 600 * page + 17, np.uint8)
    file.append(data)
    for lengths in (rng.integers(0, 200, 700), rng.integers(0, 20 * page, 40), np.array([1, 100 * page, 3]), [17]):
        free = rng.random(len(lengths))
        begin = np.cumsum(free / free.sum() * (data.size - np.sum(lengths))).astype(np.int64)
        begin += np.cumsum(lengths) - lengths
        begin[-1] = data.size - lengths[-1]
        found, bounds = file.gather(begin, begin + lengths)
        assert np.array_equal(np.diff(bounds), lengths)
        wanted = [data[first : first + length] for first, length in zip(begin, lengths, strict=True)]
        assert np.array_equal(found, np.concatenate(wanted))
    assert (place.pages_read > 0) == (way == "disk")


def test_a_disk_that_does_not_answer(place: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk.File, "_in_cache", lambda *_: False)
    file = place.file()
    file.append(np.zeros(9 * disk._PAGE, np.uint8))
    os.ftruncate(file._number, disk._PAGE)
    with pytest.raises(StateError, match="shorter"):
        file.gather(np.array([10, 3 * disk._PAGE]), np.array([20, 3 * disk._PAGE + 9]))
    os.close(file._direct or 0)
    file._direct = os.open(place.folders, os.O_RDONLY)
    assert file.gather(np.array([10]), np.array([20]))[0].tolist() == [0] * 10  # by the cache, as others are refused
    assert file._by_cache
    os.close(file._direct)
    file._direct = os.open(place.folders, os.O_RDONLY)
    with pytest.raises(StateError, match="cannot be read: Invalid argument"):
        file.gather(np.array([10]), np.array([20]))


# --- numbers beside rows ----------------------------------------------------------------------


@pytest.mark.parametrize("dtypes", [[np.int64], [np.int32], [np.int8, np.int64, np.int64], [np.int32, np.int8]])
@pytest.mark.parametrize("seed", slow_but(range(4), 0))
def test_numbers_that_go_to_disk(seed: int, dtypes: list[Any], place: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """They grow, change, are dropped and copied as those in memory do; a full disk refuses more and has lost none."""
    monkeypatch.setattr(disk, "_STEP", 4096)
    monkeypatch.setattr("gpu_ops.state.numbers._AT_ONCE", 300)
    kernels, rng, copies = CpuKernels(), np.random.default_rng(seed), []
    columns = {str(number): Growing(np, dtype) for number, dtype in enumerate(dtypes)}
    model = {name: np.empty(0, column.dtype) for name, column in columns.items()}
    for turn in range(40):
        count, size = int(rng.choice([0, 1, 70, 2000])), model["0"].size
        with monkeypatch.context() as patch:
            on_disk = columns["0"].disk_bytes > 0
            room = turn % 4 or not on_disk
            if not room:
                full(patch, int(rng.integers(0, 8192)))
            try:
                for column in columns.values():
                    column.extend(count, turn)
                model = {name: np.append(own, np.full(count, turn, own.dtype)) for name, own in model.items()}
            except NoRoomError:
                assert not room
                for column in columns.values():
                    column.length = size  # as `StateTable.discard` does
            copies.append((copied(kernels, columns), {name: own.copy() for name, own in model.items()}))
        if turn == 5:
            assert cool([*columns.values()], place) == sum(own.nbytes for own in model.values())
            assert cool([*columns.values()], place) == 0
        slots = rng.permutation(model["0"].size)[:500]
        fetch(columns, slots)
        for name, column in columns.items():
            column.values[slots] = model[name][slots] = rng.integers(0, 100, slots.size)
        if turn % 10 == 9:
            kept = np.flatnonzero(rng.random(model["0"].size) < 0.7)
            columns, model = retained(columns, kept), {name: own[kept] for name, own in model.items()}
        assert all(np.array_equal(columns[name].values, own) for name, own in model.items())
        on_disk = sum(column.disk_bytes for column in columns.values())
        assert on_disk == (sum(own.nbytes for own in model.values()) if turn >= 5 else 0)
        assert place.used >= on_disk
        assert len({column.records for column in columns.values()}) == 1  # side by side
    assert all(np.array_equal(found[name], own[name]) for found, own in copies for name in own)
    columns, column = retained(columns, np.empty(0, np.int64)), Growing(np, np.int8)
    assert [(len(kept), kept.disk_bytes) for kept in columns.values()] == [(0, 0)] * len(dtypes)
    assert place.used == 0


def test_pages_are_asked_for_once_and_together(place: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    page, asked = disk._PAGE, list[list[int]]()
    file = place.file()
    begin = file.changeable(10 * page).ctypes.data
    monkeypatch.setattr(disk, "_ask_for", lambda stretches: asked.extend(stretches.tolist()))
    positions = np.arange(0, 10 * page, page)
    assert file.has(positions)  # they have just been written
    file.fetch(positions)
    assert not asked
    monkeypatch.setattr(disk, "_in_memory", lambda addresses: not addresses.size)
    file.fetch(np.array([5 * page, 0, page - 1, 6 * page, 2 * page, 10 * page]))  # the last one is behind the end
    assert [[(first - begin) // page, size // page] for first, size in asked] == [[0, 1], [2, 1], [5, 2], [9, 1]]


# --- indexes ---------------------------------------------------------------------------------


def test_runs_go_to_disk_and_merge_there(place: Disk) -> None:
    kernels, rng = CpuKernels(tiny_segments=True), np.random.default_rng(1)
    hashed, timed = HashIndex(kernels), TimeIndex(kernels)
    keys = rng.integers(0, 40, 400).astype(np.uint64) << np.uint64(58)
    times = rng.integers(0, 100, 400)
    for first in range(0, 400, 25):
        part, slots = keys[first : first + 25], np.arange(first, first + 25)
        hashed.stage(part, slots)
        timed.stage(part, slots, times[first : first + 25])
        for index in (hashed, timed):
            index.commit()
            while first % 50 and index.cool(1, place):
                pass
    hashed.probe(keys[:1], staged=False)  # makes directories
    for index in (hashed, timed):
        assert 0 < index.disk_bytes < index.nbytes == index.disk_bytes + index.host_bytes
        assert len(index.runs) < 8
    assert place.used == hashed.disk_bytes + timed.disk_bytes
    found = zip(*hashed.probe(keys[:7], staged=False), strict=True)
    assert set(found) == {(n, s) for n in range(7) for s in range(400) if keys[n] == keys[s]}
    found = zip(*timed.probe(keys[:7], times[:7] - 9, times[:7]), strict=True)
    wanted = {(n, s) for n in range(7) for s in range(400) if keys[n] == keys[s] and -9 <= times[s] - times[n] <= 0}
    assert set(found) == wanted
    half = np.where(np.arange(400) % 2, np.arange(400) // 2, -1)
    assert sum(run.entries.size for run in hashed.renumbered(half).runs) == 200


def test_rows_leave_before_indexes(tmp_path: Path) -> None:
    """A lookup reads the indexes always, rows only where it matches; numbers beside rows go last, and few never."""
    budget = Budget(host=1 << 30, folder=str(tmp_path))
    with CPU.engine(wide_join(), memory_limit=budget) as engine:
        for first in range(0, 200_000, 50_000):
            engine.process(rows(0, first, 50_000), rows(1, first, 50_000))
        tables = engine._operator.tables
        indexes = [index for table in tables for index in table.indexes.values()]
        host = engine.memory.bytes(tables).host
        budget.host = host // 2
        engine.memory.settle(tables)
        assert host // 4 < budget.used.host <= host // 2
        assert not any(index.disk_bytes for index in indexes)
        budget.host = 1 << 20
        engine.memory.settle(tables)
        assert all(index.disk_bytes for index in indexes)
        numbers = sum(c.nbytes for t in tables for c in (t.status, *t.beside.values()))
        assert budget.used.host >= numbers > 0
        assert budget.used.disk == engine.memory.disk.used
        budget.host = 1 << 30
        known = engine.process(rows(0, 100, 3)).sort_by("l_k")
        assert known["r_v"].to_pylist() == rows(1, 100, 3)["r_v"].to_pylist()


# --- engines ---------------------------------------------------------------------------------


@pytest.mark.parametrize("emit", EMITS)
@pytest.mark.parametrize("how", HOWS)
def test_two_inputs(how: str, emit: Any) -> None:
    at = HOWS.index(how)
    shape = Shape(how, LAYOUTS[at % 3], LAYOUTS[(at + 1) % 3], keys="string" if at % 2 else "composite")
    join = shape.join(emit)
    batches = batches_of(shape, join, seed=at)
    alike(run(ON_DISK, join, batches), run(CPU, join, batches))


@pytest.mark.parametrize("shape", INTERVAL[:6], ids=str)
def test_intervals(shape: IntervalShape) -> None:
    join = shape.join("per_event")
    batches = batches_of(shape, join, seed=5)
    alike(run(ON_DISK, join, batches), run(CPU, join, batches))


@pytest.mark.parametrize("made", [MULTI[n] for n in (5, 9)], ids=str)
def test_many_inputs(made: MultiShape) -> None:
    join = made.join("per_event")
    batches = batches_of(made, join, seed=5)
    alike(run(ON_DISK, join, batches), run(CPU, join, batches))


@only_on("emulated-tiny")
@pytest.mark.thorough
@pytest.mark.parametrize("how", HOWS)
def test_three_places(engines: Backend, how: str) -> None:
    """From GPU memory to the host's, to disk, and back."""
    shape = Shape(how, LAYOUTS[0], LAYOUTS[2], keys="string")
    join = shape.join("per_batch")
    batches = batches_of(shape, join, seed=3)
    seen = []

    def squeeze(engine: Any, number: int) -> None:
        engine.kernels.piece_bytes = 600
        tables = engine._operator.tables
        total = sum(engine.memory.bytes(tables))
        engine.memory.budget.gpu = 1 + int(total * Squeeze().shares[number % 4])
        engine.memory.settle(tables)
        seen.append(engine.memory.bytes(tables))

    alike(run(engines, join, batches, before=squeeze, memory_limit=all_on_disk()), run(CPU, join, batches))
    assert max(place.disk for place in seen) > 0 == min(place.disk for place in seen)
    assert max(place.gpu for place in seen) > 0


def test_a_snapshot_comes_from_disk_and_goes_there() -> None:
    shape = Shape("full", "multiset", "unique_key")
    join = shape.join("per_event")
    batches = batches_of(shape, join, seed=2)
    half = len(batches) // 2
    first, wanted = run(ON_DISK, join, batches[:half]), run(CPU, join, batches[:half])
    alike(first, wanted)
    alike(run(ON_DISK, join, batches[half:], first[2]), run(CPU, join, batches[half:], wanted[2]))


@pytest.mark.thorough
def test_rows_that_expire_on_disk(tmp_path: Path) -> None:
    """Dead rows are dropped there, and those that live stay there: in memory are no more of them than before."""
    join = wide_join(ttl_ms=1000)
    budget = Budget(host=16 << 20, folder=str(tmp_path))
    with CPU.engine(join, memory_limit=budget) as engine, CPU.engine(join) as other:
        most = 0
        for number in range(12):
            given = {"left": rows(0, number * 20_000, 20_000), "right": rows(1, number * 20_000 + 9000, 20_000)}
            ours, theirs = (e.process(**given, clock_ms=400 * number) for e in (engine, other))
            same(ours, theirs)
            most = max(most, budget.used.disk)
            assert budget.used.host <= 16 << 20
        assert 0 < budget.used.disk < most
        for name, table in other.snapshot().items():
            same(engine.snapshot()[name], table)


def test_an_aggregate_on_disk(tmp_path: Path) -> None:
    source = Input("L", rows(0, 0, 1).schema)
    aggregate = Aggregate.of(source, ("l_v",), {"n": "count(*)", "top": "max(l_k)"}, "per_batch")
    budget = Budget(host=3 << 20, folder=str(tmp_path))
    with CPU.engine(aggregate, memory_limit=budget) as engine, CPU.engine(aggregate) as other:
        for number in range(8):
            given = rows(0, number * 3000, 6000)
            same(engine.process(given), other.process(given))
        assert budget.used.disk > 0


@pytest.mark.parametrize("lost", [False, True])
def test_numbers_of_groups_on_disk(lost: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When neither rows nor indexes are left to go, the numbers of groups do; row for row the same, and stored alike."""
    for module in ("gpu_ops.state.table", "gpu_ops.state.runs", "cpu_fallback.store"):
        monkeypatch.setattr(f"{module}.LEAST", 1 << 12)
    if lost:  # where the system cannot be asked for pages
        monkeypatch.setattr(disk, "_PROCESS_MADVISE", -1)
    schema = pa.schema([("k", pa.int64()), ("v", pa.int64())])
    aggregate = Aggregate.of(
        Input("L", schema, row_kind="op"), ("k",), {"n": "count(*)", "total": "sum(v)"}, "per_batch"
    )
    budget, rng = Budget(host=1 << 19, folder=str(tmp_path)), np.random.default_rng(0)
    with CPU.engine(aggregate, memory_limit=budget) as engine, CPU.engine(aggregate) as other:
        for number in range(12):
            keys = rng.integers(0, 4000 * (number + 1), 8000)
            kinds = rng.choice(["+I", "-D"], 8000, p=[0.8, 0.2])
            given = pa.table({"k": keys, "v": keys * number, "op": kinds})
            same(engine.process(given), other.process(given))
        groups = engine._operator.tables[0].attached[0]
        assert groups.beside["rows"].disk_bytes == 8 * len(groups)
        for name, table in other.snapshot().items():
            same(engine.snapshot()[name], table)
    assert budget.used.disk == 0


def test_metrics_tell(tmp_path: Path) -> None:
    budget = Budget(host=2 << 20, folder=str(tmp_path))
    with CPU.engine(wide_join(), memory_limit=budget) as engine:
        assert engine.prepare(rows(0, 0, 10_000)).metrics["left_disk_bytes"] == 0
        engine.commit()
        for first in (10_000, 20_000):
            metrics = engine.prepare(rows(0, first, 10_000)).metrics
            engine.commit()
        assert 0 < metrics["disk_written_bytes"] <= metrics["left_disk_bytes"] < metrics["left_state_bytes"]
        assert metrics["right_disk_bytes"] == metrics["disk_pages_read"] == 0


# --- no room ---------------------------------------------------------------------------------


def full(monkeypatch: pytest.MonkeyPatch, after: int) -> list[int]:
    """From now on the disk takes so many bytes more."""
    left, write = [after], os.write

    def failing(number: int, data: Any) -> int:
        if left[0] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = write(number, data[: left[0]])
        left[0] -= done
        return done

    monkeypatch.setattr(disk.os, "write", failing)
    return left


@pytest.mark.parametrize("after", [0, 100, 700_000, 1_500_000])
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """A micro-batch is refused by name, the state is as it was, and with room again all goes on."""
    join = wide_join()
    budget = Budget(host=2 << 20, folder=str(tmp_path))
    with CPU.engine(join, memory_limit=budget) as engine, CPU.engine(join) as other:
        with monkeypatch.context() as patch:
            full(patch, after)
            refused, number = None, 0
            while refused is None:
                given = {"left": rows(0, number * 3000, 3000), "right": rows(1, number * 3000, 3000)}
                try:
                    found = engine.process(**given)
                except StateError as error:
                    refused = error
                else:
                    same(found, other.process(**given))
                    number += 1
            assert isinstance(refused, NoRoomError)
            for words in (str(tmp_path), "spark.gpu_ops.disk.folder", "Nothing is lost", "No space left"):
                assert words in str(refused)
            for name, table in other.snapshot().items():
                same(engine.snapshot()[name], table)
        for _ in range(3):
            given = {"left": rows(0, number * 3000, 3000), "right": rows(1, number * 3000, 3000)}
            same(engine.process(**given), other.process(**given))
            number += 1


def test_a_limit_of_disk(tmp_path: Path) -> None:
    budget = Budget(host=2 << 20, disk=1 << 20, folder=str(tmp_path))
    with CPU.engine(wide_join(), memory_limit=budget) as engine:
        with pytest.raises(StateError, match="1048576 may be"):  # noqa: PT012 - at one of them
            for number in range(100):
                engine.process(rows(0, number * 3000, 3000))
        assert budget.used.disk <= 1 << 20
    assert budget.used.disk == 0


def test_without_a_disk_it_is_refused_as_ever(tmp_path: Path) -> None:
    budget = Budget(host=1 << 20, disk=0, folder=str(tmp_path))
    with CPU.engine(wide_join(), memory_limit=budget) as engine, pytest.raises(StateError, match="memory_limit is"):  # noqa: PT012
        for number in range(100):
            engine.process(rows(0, number * 3000, 3000))
    with pytest.raises(DescriptionError, match="disk"):
        Budget(disk=-1)


def test_compaction_waits_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What only saves room later is left out where there is none."""
    join = wide_join(ttl_ms=100)
    budget = Budget(host=64 << 20, folder=str(tmp_path))
    with CPU.engine(join, memory_limit=budget) as engine:
        engine.process(rows(0, 0, 30_000), rows(1, 0, 30_000), clock_ms=0)
        budget.host = 2 << 20
        engine.memory.settle(engine._operator.tables)
        assert budget.used.disk > 0
        budget.host = 64 << 20
        engine.process(None, rows(1, 0, 5000), clock_ms=90)  # a match is a write
        with monkeypatch.context() as patch:
            full(patch, 0)
            engine.process(rows(0, 40_000, 10), clock_ms=150)
            assert len(engine._operator.tables[0]) == 30_010
        for number in range(1, 16):  # some rows at a time, then some entries
            assert len(engine._operator.tables[0]) == 30_000 + 10 * number
            engine.process(rows(0, 50_000 + 10 * number, 10), clock_ms=160)
        assert len(engine._operator.tables[0]) == 5000 + 160


# --- folders ---------------------------------------------------------------------------------


def test_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_DIRS", "SPARK_EXECUTOR_DIRS", "SPARK_LOCAL_DIRS"):
        monkeypatch.delenv(name, raising=False)
    assert len(local_folders()) == 1
    monkeypatch.setenv("SPARK_LOCAL_DIRS", "/c, /d")
    assert local_folders() == (Path("/c"), Path("/d"))
    monkeypatch.setenv("SPARK_EXECUTOR_DIRS", "/e:/f")
    assert local_folders() == (Path("/e"), Path("/f"))
    monkeypatch.setenv("LOCAL_DIRS", "/a,/b")
    assert local_folders() == (Path("/a"), Path("/b"))
    assert local_folders("/g,/h") == (Path("/g"), Path("/h"))


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NoRoomError, match="nowhere"):
        Disk([tmp_path / "nowhere"]).file()


@pytest.mark.skipif(not Path("/proc/self/mountinfo").exists() or not Path("/dev/shm").is_dir(), reason="Linux only")
def test_a_folder_in_memory_is_warned_of(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_looked_at", set())
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            Disk([Path("/dev/shm")]).file()
    assert [record.getMessage().split(",")[0] for record in caplog.records] == ["/dev/shm is memory (tmpfs)"]


@pytest.mark.parametrize(("text", "size"), [("0", 0), ("10g", 10 << 30)])
def test_amounts_of_disk(text: str, size: int) -> None:
    assert disk_size(text) == size
    with pytest.raises(DescriptionError, match="amount of"):
        disk_size("0.5")


_KILLED = """
import os, sys, time
import pyarrow as pa
from kernels.test_disk import rows, wide_join
from gpu_ops.join_engine import JoinEngine
from gpu_ops.memory import Budget
budget = Budget(host=2 << 20, folder=sys.argv[1])
engine = JoinEngine(wide_join(), "cpu", memory_limit=budget)
for number in range(6):
    engine.process(rows(0, number * 5000, 5000))
print(budget.used.disk, flush=True)
time.sleep(60)
"""


def test_a_process_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    paths = [str(Path(__file__).parents[1]), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", _KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) > 0
        assert not list(tmp_path.iterdir())
        process.send_signal(signal.SIGKILL)
    assert not list(tmp_path.iterdir())
