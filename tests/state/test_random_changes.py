"""Random dataflows that are changed into others without Spark: rows of inputs out of a state into new engines."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from oracle.dataflows import expected, operators, sources, sql, trace
from oracle.drive import ROW_KIND, Event, fold, tables
from oracle.sql import FoldedInput

from gpu_ops.descriptions.dataflow import Dataflow
from gpu_ops.descriptions.inputs import Input
from gpu_ops.spark.server.inspection import read_partition
from gpu_ops.spark.server.present import AssembledState, StateRows, StoredOperator, why_no_result, why_no_rows
from gpu_ops.spark.server.stored_rows import TableAtVersion
from gpu_ops.spark.tasks.state import TakenFiles, TakenState
from gpu_ops.spark.wire.command import ApplyCommand, Wire
from gpu_ops.spark.wire.hashes import partition_of
from gpu_ops.state.address import StateAddress
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import GOES_ON, Manifest
from state.support import PartitionState

EMITS = ["per_event", "per_batch"]


@pytest.fixture(autouse=True)
def few_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are read, joined and written some at a time."""
    monkeypatch.setattr("gpu_ops.spark.server.present._AT_ONCE", 5)
    monkeypatch.setattr("gpu_ops.spark.tasks.state._FILE_BYTES", 300)


def wire_of(inputs: Sequence[Input]) -> tuple[Wire, pa.Schema]:
    """Each column of each input in a column of its own."""
    columns, fields = [], [pa.field("__side", pa.int8()), pa.field("__order", pa.int64())]
    for number, source in enumerate(inputs):
        kinds = [] if source.row_kind is None else [pa.field(source.row_kind, pa.string())]
        for field in (*source.schema, *kinds):
            fields.append(pa.field(f"c{len(columns)}", field.type))
            columns.append((*(field.name if n == number else None for n in range(len(inputs))), fields[-1].name))
    return Wire("__side", "__order", tuple(columns)), pa.schema(fields)


def packed(wire: Wire, schema: pa.Schema, batch: dict[str, Any]) -> pa.Table:
    parts = []
    for side, (table, order) in enumerate(zip(batch["inputs"], batch["orders"], strict=True)):
        own = {column[-1]: table[column[side]] for column in wire.union_columns if column[side] is not None}
        own |= {"__side": pa.array([side] * len(table), pa.int8()), "__order": pa.array(order, pa.int64())}
        parts.append(pa.table([own.get(x.name, pa.nulls(len(table), x.type)) for x in schema], schema=schema))
    return pa.concat_tables(parts)


def divided(flow: Dataflow, batch: dict[str, Any], partitions: int) -> list[dict[str, Any]]:
    """A micro-batch's rows of each partition."""
    parts: list[dict[str, Any]] = [{"inputs": [], "orders": []} for _ in range(partitions)]
    for number, (table, order) in enumerate(zip(batch["inputs"], batch["orders"], strict=True)):
        columns = [table[by.columns[number]].cast(by.type).combine_chunks() for by in flow.shuffled_by]
        target = partition_of(columns, table.num_rows, partitions) if columns else np.zeros(table.num_rows, np.int64)
        for partition, part in enumerate(parts):
            mine = np.flatnonzero(target == partition)
            part["inputs"].append(table.take(pa.array(mine)))
            part["orders"].append(np.asarray(order)[mine])
    return parts


class StoredFlow:
    """A dataflow whose partitions keep their state in a folder."""

    def __init__(self, flow: Dataflow, folder: Path, partitions: int, rng: random.Random) -> None:
        self.flow, self.address, self.version = flow, StateAddress.of(str(folder)), 0
        self.wire, self._schema = wire_of(flow.inputs)
        options = rng.choice([{}, {"snapshot_every": 1}, {"snapshot_every": 3}])
        self._partitions = [
            PartitionState(
                ApplyCommand(
                    "j", self.address, flow.to_json(), "q", 0, number, partitions, "cpu", self.wire, options,
                )
            )
            for number in range(partitions)
        ]  # fmt: skip
        self.changes: list[Any] = []

    def process(self, batch: dict[str, Any]) -> None:
        parts = divided(self.flow, batch, len(self._partitions))
        for partition, part in zip(self._partitions, parts, strict=True):
            applied = partition.apply(self.version, packed(self.wire, self._schema, part), self.wire)
            self.changes += rows_of(applied.changelog)
        self.version += 1

    def close(self) -> None:
        for partition in self._partitions:
            partition.close()

    def rows(self, source: Input, rng: random.Random) -> pa.Table:
        """The rows of an input, of any operator that reads it from outside."""
        readers = [
            (vertex, side)
            for vertex in self.flow.operators
            for side, name in enumerate(vertex.sources)
            if name == source.name and why_no_rows(vertex.description, side) is None
        ]
        vertex, side = rng.choice(readers)
        table = TableAtVersion.of(self.address, f"{vertex.name}.{vertex.description.sides[side]}", self.version)
        schema = source.schema
        batches = [batch for n in range(len(self._partitions)) for batch in table.read(n)]
        found = pa.Table.from_batches(batches, table.schema)
        found = pa.Table.from_arrays(found.columns[: len(schema)], schema=schema)
        return found if source.row_kind is None else found.append_column(ROW_KIND, pa.array(["+I"] * len(found)))

    def result(self) -> Counter[Any]:
        """The present result of the last operator."""
        return self.result_of(self.stored(self.flow.operators[-1].name))

    def stored(self, name: str) -> StoredOperator:
        return StoredOperator(self.address, self.version, name, Manifest.of(Files.at(self.address)))

    def result_of(self, stored: StoredOperator) -> Counter[Any]:
        return fold([row for n in range(len(self._partitions)) for table in stored.result(n) for row in rows_of(table)])

    def taken(self, folder: Path) -> tuple[Counter[Any], Counter[Any]]:
        """The result as it is read of files, and that of a copy of the state some micro-batches later."""
        last, kept, rows = self.stored(self.flow.operators[-1].name), folder / "kept", StateAddress.of(folder / "rows")
        operators = {vertex.name: self.stored(vertex.name) for vertex in self.flow.operators}
        copy = AssembledState(StateAddress.of(kept), last.manifest, 1, operators)
        twice = dataclasses.replace(copy, state=StateAddress.of(folder / "twice"))
        taken = TakenState(last, {rows: StateRows(last, None)}, [twice, copy])
        for partition in [*range(len(self._partitions)), 0]:  # again, it writes the same
            taken.take(partition)
        dataclasses.replace(copy, version=4).catch_up(1)
        (kept / "manifest.json").write_text(last.manifest.to_json())
        files = TakenFiles("arrow", taken.rows[rows].schema, folder=rows)
        names = [str(file) for file in sorted((folder / "rows").iterdir())]
        read = [batch for name in names for batch in files.read(name, files.schema.names, "taken")]
        found = pa.Table.from_batches(read, files.schema)
        found = found.add_column(0, "row_kind", pa.array(["+I"] * len(found), pa.string()))
        return fold(rows_of(found)), self.result_of(dataclasses.replace(last, state=copy.state, version=4))


def rows_of(changelog: pa.Table) -> list[tuple[str, tuple[Any, ...]]]:
    return [(kind, tuple(row)) for kind, *row in zip(*(c.to_pylist() for c in changelog.columns), strict=True)]


def has_rows(flow: Dataflow, source: Input) -> bool:
    """Whether an operator that reads an input keeps its rows."""
    return any(
        name == source.name and why_no_rows(vertex.description, side) is None
        for vertex in flow.operators
        for side, name in enumerate(vertex.sources)
    )


def flow_of(rng: random.Random, inputs: Sequence[Input], emit: str) -> Dataflow:
    return Dataflow(tuple(inputs), operators(rng, inputs, emit, alike=rng.random() < 0.5))


def check(seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes a dataflow twice, each time at any version, and looks at each micro-batch before and after."""
    rng = random.Random(seed)
    monkeypatch.setattr("gpu_ops.spark.server.recovery.WHOLE_BYTES", [0, 600, 1 << 20][seed % 3])  # stored in pieces
    every = [
        dataclasses.replace(x, row_kind=None, unique_key=None, updates="retract") if rng.random() < 0.3 else x
        for x in sources(rng)
    ]
    events: list[Event] = [
        (side, kind, row)
        for side, kind, row in trace(rng, every, rng.choice([0, 20, 60]))
        if kind == "+I" or every[side].row_kind is not None
    ]
    folded = [FoldedInput(s.schema.names, s.unique_key) for s in every]
    places = rng.sample(range(len(every)), rng.randint(1, len(every)))
    flow = flow_of(rng, [every[n] for n in places], rng.choice(EMITS))
    at, sink, was = 0, Counter[Any](), None
    for number in range(3):
        with contextlib.ExitStack() as stack:
            partitions = rng.randint(1, 3) if flow.shuffled_by else 1
            stored = StoredFlow(flow, folder / str(number), partitions, rng)
            stack.callback(stored.close)
            if was is not None:
                fill(stored, was, places, events[:at], rng)
                sink = fold(stored.changes)  # what is put in place of the old result
                assert sink == expected(flow, [folded[n] for n in places], sql(flow)), "right after the change"
            until = at + rng.randint(0, len(events) - at)
            for batch, changes in later(flow, places, events[at:until], rng):
                stored.process(batch)
                for side, kind, row in changes:
                    folded[side].apply(kind, row)
                now = expected(flow, [folded[n] for n in places], sql(flow))
                assert fold(stored.changes) == now
            at = until
            if stored.version and why_no_result(flow.operators[-1].description) is None:
                assert stored.result() == fold(stored.changes), "the old result"
                for what in stored.taken(folder / f"taken {number}"):
                    assert what == fold(stored.changes), "what a change takes of the old state"
            was = stored
        places = rng.sample(range(len(every)), rng.randint(1, len(every)))
        flow = flow_of(rng, [every[n] for n in places], rng.choice(EMITS))


def later(
    flow: Dataflow, places: Sequence[int], events: Sequence[Event], rng: random.Random
) -> list[tuple[dict[str, Any], list[Event]]]:
    """The events of a dataflow's inputs in micro-batches, and with each all events of its time."""
    own = {place: number for number, place in enumerate(places)}
    found, start = [], 0
    while start < len(events):
        stop = min(len(events), start + rng.choice([1, 7, 30]))
        changes = list(events[start:stop])
        its = tables(flow, [(own[side], kind, row) for side, kind, row in changes if side in own])
        found.append(({"inputs": [table for table, _ in its], "orders": [order for _, order in its]}, changes))
        start = stop
    return found


def fill(new: StoredFlow, old: StoredFlow, places: Sequence[int], events: Sequence[Event], rng: random.Random) -> None:
    """Fills a new dataflow with the rows in an old one's state, and with the history of what is not there."""
    known = {source.name for source in old.flow.inputs if old.version and has_rows(old.flow, source)}
    own = {place: number for number, place in enumerate(places)}
    history = tables(new.flow, [(own[side], kind, row) for side, kind, row in events if side in own])
    brought = [
        old.rows(source, rng) if source.name in known else table
        for source, (table, _) in zip(new.flow.inputs, history, strict=True)
    ]
    size = max(1, *map(len, brought))
    step = rng.randint(1, size)
    for start in range(0, size, step):
        parts = [table.slice(start, step) for table in brought]
        counts = np.cumsum([0, *map(len, parts)])
        orders = [np.arange(first, first + len(part)) for first, part in zip(counts, parts, strict=False)]
        new.process({"inputs": parts, "orders": orders})


def one_operator(rng: random.Random, flow: Dataflow) -> tuple[Any, list[str]]:
    """An operator of a dataflow that reads inputs alone, each once, and these; the dataflow where there is none."""
    names = {x.name for x in flow.inputs}
    found = [v for v in flow.operators if set(v.sources) <= names and len(set(v.sources)) == len(v.sources)]
    if not found:
        return flow, [x.name for x in flow.inputs]
    chosen = rng.choice(found)
    return chosen.description, list(chosen.sources)


def files_of(stored: StoredFlow) -> set[tuple[Path, int]]:
    return {(x, x.stat().st_size) for x in Path(stored.address.path or "").rglob("*") if x.is_file()}


def check_goes_on(seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder begins with the files of another one, and a third with its own: all give the same from there on."""
    rng = random.Random(seed)
    monkeypatch.setattr("gpu_ops.spark.server.recovery.WHOLE_BYTES", [0, 600, 1 << 20][seed % 3])  # stored in pieces
    stores_from = [3, 3, 0, 1][seed % 4]  # from this folder on they are as in an object store
    if seed % 4 == 0:
        monkeypatch.setattr("os.link", lambda *_: (_ for _ in ()).throw(OSError))  # a file system without
    every, grows = sources(rng), rng.random() < 0.7
    every = [dataclasses.replace(x, row_kind=None, unique_key=None) if grows else x for x in every]
    events = [(side, kind, row) for side, kind, row in trace(rng, every, 60) if kind == "+I" or not grows]
    made = flow_of(rng, every, rng.choice(EMITS))
    flow, read = (made, [x.name for x in every]) if rng.random() < 0.3 else one_operator(rng, made)
    names = [vertex.name for vertex in flow.operators] if isinstance(flow, Dataflow) else [""]
    places = [[x.name for x in every].index(name) for name in read]
    batches = [batch for batch, _ in later(flow, places, events, rng)]
    partitions = rng.randint(1, 3) if flow.shuffled_by else 1
    made_at = Files.__init__

    def at(self: Files, filesystem: Any, root: str, *rest: Any, **options: Any) -> None:
        made_at(self, filesystem, root, *rest, **options)
        self.local &= not any(f"{folder / str(n)}/" in f"{root}/" for n in range(stores_from, 3))

    monkeypatch.setattr(Files, "__init__", at)
    with contextlib.ExitStack() as stack:
        was, sink = StoredFlow(flow, folder / "0", partitions, rng), list[Any]()
        stack.callback(was.close)
        for batch in batches[: rng.randint(1, len(batches))]:
            was.process(batch)
        for number in (1, 2):
            was.close()
            sink, before = sink + was.changes, files_of(was)
            stored = {name: was.stored(name) for name in names}
            last = stored[names[-1]]
            manifest = dataclasses.replace(last.manifest, format=GOES_ON)
            state = AssembledState(StateAddress.of(folder / str(number)), manifest, 1, stored)
            assert state.goes_on
            for partition in [*range(partitions), 0]:  # again, as a task that was given up
                state.write(partition)
            assert files_of(was) == before
            taken = (folder / str(number)).glob("p/*/*.origin/*")
            assert seed % 4 != 1 or all(x.stat().st_nlink > 1 or x.name == "manifest.json" for x in taken)
            dataclasses.replace(state, version=was.version).catch_up(1)
            (folder / str(number) / "manifest.json").write_text(manifest.to_json())
            now = StoredFlow(flow, folder / str(number), partitions, rng)
            stack.callback(now.close)
            now.version = was.version
            inspected = [
                [read_partition(Files.at(x.address), manifest, n, rows=True) for n in range(partitions)]
                for x in (was, now)
            ]
            assert [x.rows for x in inspected[0]] == [x.rows for x in inspected[1]]
            assert {x.version for x in inspected[1]} == {was.version}
            if why_no_result(last.description) is None:
                assert was.result_of(last) == now.result_of(now.stored(names[-1])) == fold(sink)
            if last.only_grows:
                check_rows_as_they_came(last)
                check_rows_as_they_came(now.stored(""))
            done = len(was.changes)
            for batch in batches[now.version : now.version + rng.randint(0, 4)]:
                now.process(batch)
                was.process(batch)
                assert fold(sink + now.changes) == fold(sink + was.changes[done:])
            check_what_was_taken_goes(folder / str(number))
            was = now


def check_what_was_taken_goes(folder: Path) -> None:
    """Files of another folder go once a later snapshot is there."""
    for partition in (folder / "p").iterdir():
        newest = max(int(x.stem) for x in partition.glob("*.snapshot"))
        assert {int(x.name.partition(".")[0]) for x in partition.glob("*.origin")} <= {newest}


def check_rows_as_they_came(stored: StoredOperator) -> None:
    """What is read of the log is what the state comes to."""
    for side in [*range(len(stored.description.inputs)), None]:
        rows = StateRows(stored, side)
        for partition in range(stored.manifest.partitions):
            with stored.held(partition) as held:
                parts = stored.result_of(held) if side is None else stored.rows_of(held, side)
                of_state = [x.select(rows.schema.names).to_pylist() for x in parts]
                of_log = [x.to_pylist() for x in rows.of(partition, lambda: held)]
            assert Counter(map(str, itertools.chain(*of_log))) == Counter(map(str, itertools.chain(*of_state)))


@pytest.mark.parametrize("seed", range(12))
def test_a_folder_goes_on_with_the_files_of_another(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_goes_on(seed, tmp_path, monkeypatch)


@pytest.mark.parametrize("seed", range(5))
def test_a_change_goes_on_with_the_rows_in_state(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(seed, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1000 + int(os.environ.get("GPU_JOIN_CHANGES", "1000")), 50))
def test_fresh_changes(first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(first, first + 50):
        check(seed, tmp_path / str(seed), monkeypatch)
        with monkeypatch.context() as patched:
            check_goes_on(seed, tmp_path / f"{seed} goes on", patched)
