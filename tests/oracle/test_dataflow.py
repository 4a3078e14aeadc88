"""Dataflows of up to six operators: as engines chained by hand, as DuckDB, at any split of the trace."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_ops.descriptions.dataflow import NUMBER, Dataflow
from gpu_ops.descriptions.kinds import from_json
from gpu_ops.descriptions.projection import Projection, column_of
from gpu_ops.operators.core.projection import project
from gpu_ops.spark.wire.hashes import partition_of
from oracle.dataflows import cut, dataflow, expected, sql, trace, with_outputs
from oracle.drive import ROW_KIND, Backend, Event, fold
from oracle.sql import FoldedInput


def rows_of(changelog: pa.Table) -> list[tuple[str, tuple[Any, ...]]]:
    return [(kind, tuple(row)) for kind, *row in zip(*(c.to_pylist() for c in changelog.columns), strict=True)]


def projected(known: Sequence[Any], projection: Projection | None) -> Sequence[Any]:
    """A part of the changes, in Arrow, and their positions."""
    if projection is None:
        return known
    table = known[0].append_column("#", pa.array(np.asarray(known[1], np.int64)))
    kind, place = (column_of(table.schema.field(name)) for name in (ROW_KIND, "#"))
    whole = Projection((kind, *projection.columns, place), projection.where)
    schema = pa.schema([(f"c{n}", of) for n, of in enumerate(whole.types(table.schema))])
    found = pa.Table.from_batches([project(whole, b, schema) for b in table.combine_chunks().to_batches()], schema)
    return [found.drop_columns([schema.names[-1]]), found[schema.names[-1]].to_numpy()]


class ByHand:
    """The same operators as engines of their own; what one gives is the next one's input, in Arrow."""

    def __init__(self, flow: Dataflow, backend: Backend) -> None:
        self.flow = flow
        self.engines = [backend.engine(vertex.description).thing for vertex in flow.operators]

    def process(self, inputs: Sequence[pa.Table], orders: Sequence[Any]) -> pa.Table:
        known = {source.name: own for source, *own in zip(self.flow.inputs, inputs, orders, strict=True)}
        for vertex, engine in zip(self.flow.operators, self.engines, strict=True):
            batches, by = zip(*(projected(known[name], taken) for _, name, taken in vertex.edges), strict=True)
            names = [[ROW_KIND, *source.schema.names] for source in vertex.description.inputs]
            batches = tuple(
                b if taken is None else b.rename_columns(new)
                for b, new, (_, _, taken) in zip(batches, names, vertex.edges, strict=True)
            )
            reads = zip(batches, vertex.description.inputs, strict=True)
            batches = tuple(b.drop_columns([ROW_KIND]) if s.row_kind is None else b for b, s in reads)
            made = engine.prepare(*batches, orders=list(by))
            engine.commit()
            causes = np.sort(np.concatenate([np.asarray(order, np.int64) for order in by]))
            known[vertex.name] = [made.changelog, causes[made.sequence] if causes.size else made.sequence]
        self.known = known
        return known[vertex.name][0]

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


def check(seed: int, emit: str, backend: Backend, length: int = 60) -> None:
    rng = random.Random(seed)
    flow = dataflow(rng, emit)
    inputs = flow.inputs
    assert from_json(flow.to_json()) == flow
    events, text = trace(rng, inputs, length), sql(flow)
    folded = [FoldedInput(s.schema.names, s.unique_key) for s in inputs]
    whole: list[Any] = []
    by_hand, at = ByHand(flow, backend), 0
    with backend.engine(flow) as engine:
        for number, batch in enumerate(cut(flow, events, rng, rng.choice([1, 7, length]))):
            if number % 3 == 1:
                engine.prepare(*batch["inputs"], orders=batch["orders"])
                engine.discard()
            if number % 3 == 2:
                held = engine.snapshot()
                engine = backend.engine(flow).thing  # noqa: PLW2901 - the other one is closed above
                engine.restore(held)
            changelog = engine.process(*batch["inputs"], orders=batch["orders"])
            assert rows_of(changelog) == rows_of(by_hand.process(batch["inputs"], batch["orders"]))
            whole += rows_of(changelog)
            for side, kind, row in events[at : at + sum(t.num_rows for t in batch["inputs"])]:
                folded[side].apply(kind, row)
            at += sum(t.num_rows for t in batch["inputs"])
            assert fold(whole) == expected(flow, folded, text), text
    by_hand.close()
    if emit == "per_event":
        check_each_event(flow, events, cut(flow, events, rng, 20), backend)


def check_each_event(flow: Dataflow, events: Sequence[Event], batches: Sequence[dict[str, Any]], be: Backend) -> None:
    """In a larger micro-batch, what each change causes leads to the same table as where it comes alone."""
    with be.engine(flow) as one_by_one, be.engine(flow) as engine:
        singly, table, at = cut(flow, events, random.Random(0), 1), Counter[Any](), 0
        alone = Counter[Any]()
        for batch in batches:
            found = engine.prepare(*batch["inputs"], orders=batch["orders"])
            engine.commit()
            changes, size = rows_of(found.changelog), sum(t.num_rows for t in batch["inputs"])
            assert (np.diff(found.sequence) >= 0).all()
            for place in range(size):
                single = singly[at + place]
                fold(rows_of(one_by_one.process(*single["inputs"], orders=single["orders"])), alone)
                caused = [changes[i] for i in np.flatnonzero(found.sequence == place)]
                assert fold(caused, table) == alone
            at += size


def with_common_keys(seed: int, emit: str) -> tuple[random.Random, Dataflow]:
    """A dataflow of several operators that may have several partitions."""
    for number in itertools.count():
        rng = random.Random(f"{seed} {number}")
        flow = dataflow(rng, emit, alike=True)
        if flow.shuffled_by and len(flow.operators) > 1:
            return rng, flow
    raise AssertionError


def divided(flow: Dataflow, batch: dict[str, Any], partitions: int) -> list[dict[str, Any]]:
    """A micro-batch's rows of each partition."""
    parts: list[dict[str, Any]] = [{"inputs": [], "orders": []} for _ in range(partitions)]
    for number, (table, order) in enumerate(zip(batch["inputs"], batch["orders"], strict=True)):
        columns = [table[by.columns[number]].cast(by.type).combine_chunks() for by in flow.shuffled_by]
        target = partition_of(columns, table.num_rows, partitions)
        for partition, part in enumerate(parts):
            mine = np.flatnonzero(target == partition)
            part["inputs"].append(table.take(pa.array(mine)))
            part["orders"].append(np.asarray(order)[mine])
    return parts


def check_partitions(seed: int, emit: str, backend: Backend) -> None:
    rng, flow = with_common_keys(seed, emit)
    events, text = trace(rng, flow.inputs, 60), sql(flow)
    folded = [FoldedInput(s.schema.names, s.unique_key) for s in flow.inputs]
    engines = [backend.engine(flow).thing for _ in range(3)]
    whole: list[Any] = []
    at = 0
    for batch in cut(flow, events, rng, rng.choice([1, 7, 60])):
        for engine, part in zip(engines, divided(flow, batch, 3), strict=True):
            whole += rows_of(engine.process(*part["inputs"], orders=part["orders"]))
        size = sum(t.num_rows for t in batch["inputs"])
        for side, kind, row in events[at : at + size]:
            folded[side].apply(kind, row)
        at += size
        assert fold(whole) == expected(flow, folded, text), text
    for engine in engines:
        engine.close()


def output_of(flow: Dataflow, changelog: pa.Table, number: int) -> pa.Table:
    """One of several outputs, with its own columns."""
    places = [
        next(n for n, (its, _) in enumerate(flow.shared) if its.get(number) == name) for name in names_of(flow, number)
    ]
    own = changelog.filter(pc.equal(changelog[NUMBER], number))
    return own.select([ROW_KIND, *(f"c{place}" for place in places)])


def names_of(flow: Dataflow, number: int) -> list[str]:
    description = next(v.description for v in flow.operators if v.name == flow.outputs[number])
    return list(description.values_schema.names)


def check_outputs(seed: int, emit: str, backend: Backend) -> None:
    """Several outputs are the changelogs that engines of their own give, also after a discard and a restore."""
    rng = random.Random(seed)
    plain = dataflow(rng, emit)
    flow = with_outputs(plain, rng)
    assert from_json(flow.to_json()) == flow
    assert "outputs" not in plain.to_json()
    by_hand, engine = ByHand(plain, backend), backend.engine(flow).thing
    for count, batch in enumerate(cut(flow, trace(rng, flow.inputs, 60), rng, 20)):
        if count % 2:
            engine.prepare(*batch["inputs"], orders=batch["orders"])
            engine.discard()
            held = engine.snapshot()
            engine.close()
            engine = backend.engine(flow).thing
            engine.restore(held)
        changelog = engine.process(*batch["inputs"], orders=batch["orders"])
        by_hand.process(batch["inputs"], batch["orders"])
        for number, name in enumerate(flow.outputs):
            assert rows_of(output_of(flow, changelog, number)) == rows_of(by_hand.known[name][0])
    engine.close()
    by_hand.close()


@pytest.mark.parametrize("seed", range(3))
def test_several_outputs_of_a_dataflow(seed: int) -> None:
    check_outputs(seed, ("per_event", "per_batch")[seed % 2], Backend("cpu"))


@pytest.mark.slow
@given(seed=st.integers(3, 1 << 40), emit=st.sampled_from(["per_event", "per_batch"]))
def test_fresh_outputs(seed: int, emit: str) -> None:
    check_outputs(seed, emit, Backend("cpu-tiny" if seed % 2 else "cpu"))


@pytest.mark.parametrize("seed", range(4))
def test_partitions_of_a_dataflow_have_what_belongs_together(seed: int) -> None:
    check_partitions(seed, ("per_event", "per_batch")[seed % 2], Backend("cpu"))


@pytest.mark.slow
@given(seed=st.integers(8, 1 << 40), emit=st.sampled_from(["per_event", "per_batch"]))
def test_fresh_partitions(seed: int, emit: str) -> None:
    check_partitions(seed, emit, Backend("cpu-tiny" if seed % 2 else "cpu"))


@pytest.mark.one_in(32, all=8)
@pytest.mark.parametrize("emit", ["per_event", "per_batch"])
@pytest.mark.parametrize("seed", range(12))
def test_random_dataflows(seed: int, emit: str, backend: Backend) -> None:
    check(seed, emit, backend)


@pytest.mark.slow
@given(seed=st.integers(12, 1 << 40), emit=st.sampled_from(["per_event", "per_batch"]))
def test_fresh_dataflows(seed: int, emit: str) -> None:
    check(seed, emit, Backend("cpu-tiny" if seed % 2 else "cpu"), 40)
