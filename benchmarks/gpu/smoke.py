"""Is anything wrong at all? The first two minutes on a card, in the order in which things would break.

- `kernels`: the backend's own CUDA kernels, each against numpy: merges, directories, searches, gathers over segments.
- `joins`: libcudf's hash join finds what the search finds.
- `scatter_add`: positions that come many times, in every type that is counted in.
- `memory`: an allocation beyond the limit is refused, and what comes after it works.
- `engine`: micro-batches through an engine, row for row as on the CPU, each way of probing.
- `kinds`: the same of other operators, and of keys of other types.
- `files`: Parquet written by the card is what pyarrow writes, as DuckDB reads it, and is read as pyarrow reads it.

It compiles most kernels that the tests need, and cupy keeps them on disk: tests that run beside each other find them
there, and do not compile them once each.

    python -m benchmarks.gpu.smoke [--rows N] [--no-pool]
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pyarrow as pa

from benchmarks.gpu.feed import Feed, description
from cpu_fallback import CpuKernels
from gpu_ops.backends import Backend, gpu_available, make_kernels
from gpu_ops.descriptions.by_time import IntervalJoin
from gpu_ops.descriptions.description import Description
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.interval import Interval
from gpu_ops.descriptions.join import Join, JoinType
from gpu_ops.descriptions.keys import normalize_on
from gpu_ops.descriptions.multi_join import MultiJoin
from gpu_ops.join_engine import JoinEngine
from gpu_ops.kernels import Kernels, Probe, as_slots
from gpu_ops.state.index import HashIndex
from gpu_ops.state.time_index import TimeIndex


def kernels(gpu: Kernels, rows: int) -> None:
    """Each CUDA kernel against numpy."""
    rng = np.random.default_rng(1)
    hashes = rng.integers(0, rows, rows).astype(np.uint64) << np.uint64(40)
    times = rng.integers(-rows, rows, rows)
    needles, low = rng.permutation(hashes)[: rows // 4], rng.integers(-rows, rows, rows // 4)
    found = []
    for on in (gpu, CpuKernels()):
        index, timed = HashIndex(on), TimeIndex(on)
        for start in range(0, rows, rows // 3 + 1):  # runs that are merged
            part = slice(start, start + rows // 3 + 1)
            slots = as_slots(on, start, hashes[part].size)
            for made, more in ((index, ()), (timed, (on.asarray(times[part]),))):
                made.stage(on.asarray(hashes[part]), slots, *more)
                made.commit()
        given = on.asarray(needles), on.asarray(low), on.asarray(low + rows // 8)
        pairs = [*index.probe(given[0], staged=False), *timed.probe(*given)]
        run = index.runs[-1]
        found.append([on.asnumpy(array) for array in (*pairs, run.entries, on.directory(run.entries, 24))])
    assert found[0][0].size > needles.size, "a search that finds too little"
    _same(found)
    schema = pa.schema([("a", pa.int64()), ("b", pa.int8()), ("c", pa.decimal128(30, 2)), ("d", pa.string())])
    taken = []
    for on in (gpu, CpuKernels()):
        store = on.store(schema)
        for start, size in ((0, rows), (7, rows // 50), (3, 2)):  # segments that stay apart
            numbers = np.arange(start, start + size) % 100
            store.append(on.frame(pa.table([pa.array(numbers).cast(field.type) for field in schema], schema=schema)))
        slots = np.random.default_rng(2).integers(-1, len(store), rows // 2)
        taken.append(on.to_arrow(store.take(on.asarray(slots), schema.names), schema))
    assert taken[0].equals(taken[1]), "gathers over segments"


def joins(gpu: Any, rows: int) -> None:
    """Both ways of probing, and a join at once."""
    rng, found = np.random.default_rng(3), []
    hashes, others = (rng.integers(0, rows, rows).astype(np.uint64) << np.uint64(40) for _ in range(2))
    index = HashIndex(gpu)
    index.stage(gpu.asarray(hashes), as_slots(gpu, 0, rows))
    chosen = gpu.probe
    for way in ("hash_join", "index"):
        gpu.probe = way
        found.append([gpu.asnumpy(array) for array in index.probe(gpu.asarray(others), staged=True)])
    gpu.probe = chosen
    _same(found)


def scatter_add(gpu: Kernels, rows: int) -> None:
    """Checks scatter-adds in which positions repeat many times."""
    rng = np.random.default_rng(4)
    index, values = rng.integers(0, 100, rows), rng.integers(-5, 9, rows)
    for kind in (np.int32, np.int64):
        target = gpu.xp.zeros(100, kind)
        gpu.scatter_add(target, gpu.asarray(index), gpu.asarray(values))
        wanted = np.bincount(index, values, 100).astype(kind)
        assert np.array_equal(gpu.asnumpy(target), wanted), f"scatter-adds of {kind.__name__}"


def memory(gpu: Kernels, rows: int) -> None:
    """More than the limit is refused."""
    assert gpu.memory_limit is not None
    with contextlib.suppress(MemoryError):
        gpu.xp.empty(gpu.memory_limit + (1 << 20), np.int8)
        raise AssertionError("an allocation beyond the limit was not refused")
    scatter_add(gpu, rows)


def engine(gpu: Kernels, rows: int) -> None:
    """Engines row for row."""
    del gpu
    feed = Feed(4 * rows, rows)

    def said(backend: Backend, emit: Any, probe: Probe) -> list[pa.Table]:
        with contextlib.closing(JoinEngine(description(emit, unique=True), backend, probe=probe)) as made:
            made.restore(feed.start())
            return [made.process(*pair) for pair in feed.batches(3)]

    for emit in ("per_batch", "per_event"):
        wanted = said("cpu", emit, "auto")
        for probe in get_args(Probe):
            assert said("gpu", emit, probe) == wanted, f"{emit}, probe={probe!r}: other rows than on the CPU"


def kinds(gpu: Kernels, rows: int) -> None:
    """Engines row for row: changes of few keys, so that pads come and go."""
    del gpu
    types = (pa.int32(), pa.float64(), pa.string(), pa.decimal128(20, 2), pa.date32())
    semi: tuple[JoinType, ...] = ("semi", "anti")
    joins = [Join("full", *_inputs(kind), normalize_on("k"), emit="per_event") for kind in types]
    joins += [Join("full", *_inputs(pa.int64()), normalize_on("k"), emit=emit) for emit in ("per_batch", "at_end")]
    joins += [Join(kind, *_inputs(pa.int64()), normalize_on("k")) for kind in semi]
    every: list[Description] = [*joins, MultiJoin.of(_inputs(pa.int64(), 3), "k", "left")]
    within = Interval(-5, 5, late="drop")
    every.append(IntervalJoin("full", *_inputs(pa.int64(), event_time="t"), normalize_on("k"), interval=within))

    def said(join: Description, backend: Backend) -> list[pa.Table]:
        rng = np.random.default_rng(5)
        with contextlib.closing(JoinEngine(join, backend)) as made:
            given = [[_changes(source, rng, rows // 20) for source in join.inputs] for _ in range(3)]
            found = [*(made.process(*tables, clock_ms=0) for tables in given), made.finish()]
        if join.emit != "at_end":
            return found
        # its parts, by hashes, come in another order
        return [table.sort_by([(name, "ascending") for name in table.schema.names]) for table in found]

    for join in every:
        assert said(join, "gpu") == said(join, "cpu"), f"{join.title}: other rows than on the CPU"


_FRAGMENT = 5000
"""Rows of what libcudf makes row groups of."""
_ASKED = (
    """SELECT name, type, repetition_type, converted_type, scale, precision, logical_type
    FROM parquet_schema('{}') OFFSET 1""",
    """SELECT path_in_schema, row_group_id, row_group_num_rows, stats_null_count, stats_min_value, stats_max_value
    FROM parquet_metadata('{}') ORDER BY ALL""",
    "FROM read_parquet('{}')",
)


def files(gpu: Kernels, rows: int) -> None:
    """Parquet by libcudf and by pyarrow, as DuckDB reads types, bounds and rows of both, and each reads the other's."""
    import duckdb
    import pyarrow.parquet as pq

    assert gpu.files is not None
    rng = np.random.default_rng(6)
    numbers, missing = rng.integers(-99, 99, rows), rng.random(rows) < 0.1
    types = [getattr(pa, f"int{bits}")() for bits in (8, 16, 32, 64)]
    types += [pa.float32(), pa.float64(), pa.decimal128(9, 2), pa.decimal128(38, 4), pa.string(), pa.bool_()]
    columns = [pa.array(numbers.astype(np.int8), mask=missing).cast(kind) for kind in types]
    columns += [pa.array(numbers.astype(np.int32), mask=missing).cast(pa.date32()), columns[8].cast(pa.binary())]
    columns += [columns[3].cast(kind) for kind in (pa.timestamp("us", "UTC"), pa.duration("us"))]
    table = pa.table(columns, [f"c{number}" for number in range(len(columns))])
    frame, group = gpu.frame(table), max(1, rows // 3 // _FRAGMENT) * _FRAGMENT
    with tempfile.TemporaryDirectory() as folder:
        for compression in ("snappy", "zstd", "lz4", None):
            card, host = (f"{folder}/{name}.parquet" for name in ("card", "host"))
            gpu.files.write_parquet(
                frame, table.schema, range(rows), card, compression=compression, rows_per_group=group
            )
            pq.write_table(table, host, compression=compression or "none", row_group_size=group)
            for asked in _ASKED:
                found = [duckdb.sql(asked.format(path)).fetchall() for path in (card, host)]
                assert found[0] == found[1], f"{compression}: other than pyarrow's by {asked}"
            assert pq.read_table(card).equals(table), f"{compression}: other rows or types than were written"
            if compression != "lz4":  # of which there are two
                for path in (card, host):
                    read = gpu.to_arrow(gpu.files.read_parquet(path, table.schema), table.schema)
                    assert read.equals(table), f"{compression}: other rows of {path} than pyarrow's"


def _inputs(key: pa.DataType, count: int = 2, event_time: str | None = None) -> list[Input]:
    names = "abc"[:count]
    schemas = [pa.schema([("k", key), (f"{n}t", pa.timestamp("us")), (f"{n}s", pa.string())]) for n in names]
    if event_time is not None:
        return [Input(n, s, event_time=f"{n}{event_time}", delay_ms=5) for n, s in zip(names, schemas, strict=True)]
    return [Input(n, schema, row_kind="op") for n, schema in zip(names, schemas, strict=True)]


def _changes(source: Input, rng: np.random.Generator, rows: int) -> pa.Table:
    """Random rows, some of them taken back at once; a tenth of the keys are null."""
    key, time, text = (field.type for field in source.schema)
    numbers = rng.integers(0, max(2, rows // 4), rows, np.int32)
    columns = [
        pa.array(numbers, mask=rng.random(rows) < 0.1).cast(key),
        pa.array(rng.integers(0, 20_000, rows)).cast(time),
        pa.array(numbers % 7).cast(text),
    ]
    table = pa.table(columns, schema=source.schema)
    if source.row_kind is None:
        return table
    gone = table.filter(pa.array(rng.random(rows) < 0.2))
    kinds = pa.array(["+I"] * rows + ["-D"] * gone.num_rows)
    return pa.concat_tables([table, gone]).append_column(source.row_kind, kinds)


def _same(found: list[list[np.ndarray]]) -> None:
    for number, (one, other) in enumerate(zip(*found, strict=True)):
        assert np.array_equal(one, other), f"array {number} differs"


STEPS: tuple[Callable[[Kernels, int], None], ...] = (kernels, joins, scatter_add, memory, engine, kinds, files)


def run(rows: int) -> None:
    """All steps; raises what the first that fails does."""
    gpu, why = make_kernels("gpu")
    print(why, flush=True)
    try:
        for step in STEPS:
            began = time.perf_counter()
            step(gpu, rows)
            print(f"smoke: {step.__name__}: {time.perf_counter() - began:.1f} s", flush=True)
    finally:
        gpu.close()


def main() -> None:
    """Runs the checks from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--no-pool", action="store_true", help="every array in memory of its own, for a sanitizer")
    options = parser.parse_args()
    found, why = gpu_available()
    if not found:
        raise SystemExit(f"no GPU answers: {why}")
    if options.no_pool:
        from gpu_ops.cudf_backend import device

        device.SMALL = 0
    run(options.rows)


if __name__ == "__main__":
    main()
