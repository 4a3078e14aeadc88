"""The GPU backend's parts and the whole engine, timed on a card.

Answers:
- `search`: candidates of 10k to 1M changes in a sorted run of 1M to 100M rows, both ways of
  `gpu_ops.cudf_backend.kernels.SEARCH`; where does which win?
- `append`, `take`, `scatter_add`: what a state table does for each micro-batch.
- `engine`: changes per second of a left join, per_batch and per_event, and of the CPU engine beside it.
- `multi_way`, `at_end`: the same of three inputs in one operator, and at the input's end (`benchmarks.gpu.others`).
- `interval`: the same of an interval join, and both ways to search by key and time (`benchmarks.gpu.interval`).

Times are CUDA events around work on the default stream, the median of some rounds after a warm-up; the engine's are
wall clock, from Arrow to Arrow.

    python -m benchmarks.gpu.bench --out FILE [--quick]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.common import Summary, summarise, write_results
from benchmarks.gpu import interval, others
from gpu_ops.backends import gpu_available, make_kernels
from gpu_ops.engine import JoinEngine
from gpu_ops.joins import Emit, Input, Join, normalize_on
from gpu_ops.kernels import Kernels, as_slots
from gpu_ops.state.index import HashIndex

LEFT = pa.schema([("k", pa.int64()), ("a", pa.int64())])
RIGHT = pa.schema([("k", pa.int64()), ("b", pa.float64())])


def device_ms(work: Callable[[], object], rounds: int) -> Summary:
    """Milliseconds of the card's work, per round."""
    import cupy as cp

    work()
    found = []
    for _ in range(rounds):
        start, end = cp.cuda.Event(), cp.cuda.Event()
        start.record()
        work()
        end.record()
        end.synchronize()
        found.append(cp.cuda.get_elapsed_time(start, end))
    return summarise(found)


def device() -> dict[str, Any]:
    """The card, its driver and CUDA's versions."""
    import cupy as cp

    runtime = cp.cuda.runtime
    properties = runtime.getDeviceProperties(cp.cuda.Device().id)
    return {
        "name": properties["name"].decode(),
        "compute_capability": f"{properties['major']}.{properties['minor']}",
        "memory_gib": round(properties["totalGlobalMem"] / 2**30, 1),
        "driver_cuda": runtime.driverGetVersion(),
        "runtime_cuda": runtime.runtimeGetVersion(),
    }


def search(kernels: Kernels, runs: list[int], needles: list[int], rounds: int) -> list[dict[str, Any]]:
    """Both ways, on a run whose every row has a key of its own; half of the needles are in it."""
    from gpu_ops.cudf_backend.kernels import search_by_directory, search_by_join

    xp, results = kernels.xp, []
    for rows in runs:
        keys = kernels.frame(pa.table({"k": np.arange(rows)}))
        hashes = kernels.hash_rows(keys, ["k"], [pa.int64()])
        index = HashIndex(kernels)
        index.stage(hashes, as_slots(kernels, 0, rows))
        index.commit()
        (run,) = index.runs
        for count in needles:
            some = kernels.asarray(np.random.default_rng(count).integers(0, 2 * rows, count))
            table = pa.table({"k": kernels.asnumpy(some)})
            upper = kernels.hash_rows(kernels.frame(table), ["k"], [pa.int64()]) >> np.uint64(32)
            ways = {
                "directory": lambda: search_by_directory(run.entries, run.directory, run.shift, upper),  # noqa: B023
                "join": lambda: search_by_join(run.entries, upper),  # noqa: B023
            }
            ours, theirs = (way() for way in ways.values())
            if not all(bool(xp.array_equal(a, b)) for a, b in zip(ours, theirs, strict=True)):
                raise AssertionError(f"the two ways differ: {count} needles, {rows} rows")
            timed = {f"{name}_ms": device_ms(way, rounds) for name, way in ways.items()}
            results.append({"rows": rows, "needles": count, "candidates": int(ours[0].size), **timed})
            print(rows, count, {name: round(value.median, 3) for name, value in timed.items()}, flush=True)
    return results


def state(kernels: Kernels, rows: int, rounds: int) -> dict[str, Any]:
    """Appends up to that many rows, random gathers, and a scatter-add."""
    rng = np.random.default_rng(1)
    schema = pa.schema([("k", pa.int64()), ("s", pa.string()), ("x", pa.float64())])
    batch, store = 100_000, kernels.store(schema)
    words = pa.array([f"value {i}" for i in range(1000)])
    frame = kernels.frame(
        pa.table(
            {
                "k": rng.integers(0, rows, batch),
                "s": words.take(pa.array(rng.integers(0, 1000, batch))),
                "x": rng.random(batch),
            }
        )
    )
    appends = []
    for _ in range(rows // batch):
        before = time.perf_counter()
        store.append(frame)
        kernels.xp.cuda.Device().synchronize()
        appends.append(1e3 * (time.perf_counter() - before))
    slots = kernels.asarray(rng.integers(0, rows, min(1_000_000, rows)))
    counts, index = kernels.xp.zeros(rows, np.int32), kernels.asarray(rng.integers(0, rows, rows))
    ones = kernels.xp.ones(rows, np.int32)
    return {
        "rows": rows,
        "append_100k_rows_ms": summarise(appends),
        "bytes_per_row": store.nbytes / rows,
        "take_rows": int(slots.size),
        "take_ms": device_ms(lambda: store.take(slots, schema.names), rounds),
        "scatter_add_values": rows,
        "scatter_add_ms": device_ms(lambda: kernels.scatter_add(counts, index, ones), rounds),
    }


def engine(backend: Any, emit: Emit, rows: int, changes: int) -> dict[str, Any]:
    """A left join on an int64 key, every key once on each side, half of each micro-batch from either input."""
    rng = np.random.default_rng(2)
    left = pa.table({"k": rng.permutation(rows), "a": rng.integers(0, 1000, rows)}, schema=LEFT)
    right = pa.table({"k": rng.permutation(rows), "b": rng.random(rows)}, schema=RIGHT)
    join = Join("left", Input("left", LEFT), Input("right", RIGHT), normalize_on("k"), emit=emit)
    made, half, batches, out = JoinEngine(join, backend), changes // 2, [], 0
    for start in range(0, rows, half):
        before = time.perf_counter()
        out += made.process(left.slice(start, half), right.slice(start, half)).num_rows
        batches.append(time.perf_counter() - before)
    size = made.state_size()
    made.close()
    return {
        "rows_per_input": rows,
        "changes_per_micro_batch": 2 * half,
        "changes_per_second": 2 * rows / sum(batches),
        "rows_out": out,
        "micro_batch_seconds": summarise(batches[1:] or batches),
        "state_bytes_per_row": (size["left_bytes"] + size["right_bytes"]) / (2 * rows),
    }


def measure(*, quick: bool, cpu: bool) -> dict[str, Any]:
    """All of it."""
    kernels, why = make_kernels("gpu")
    print(why, flush=True)
    rounds = 3 if quick else 9
    runs = [1_000_000] if quick else [1_000_000, 10_000_000, 100_000_000]
    needles = [10_000, 1_000_000] if quick else [10_000, 100_000, 1_000_000]
    results: dict[str, Any] = {"device": device(), "search": search(kernels, runs, needles, rounds)}
    results["state"] = state(kernels, 1_000_000 if quick else 20_000_000, rounds)
    results["interval"] = {"ways": interval.ways(kernels, runs, 100_000, rounds, device_ms)}
    kernels.close()
    rows = 500_000 if quick else 5_000_000
    results["engine"] = {}
    emits: tuple[Emit, ...] = ("per_batch", "per_event")
    for emit in emits:
        for changes in (100_000, 1_000_000):
            for backend in ("gpu", *(("cpu",) if cpu and changes == 100_000 else ())):
                found = engine(backend, emit, rows, changes)
                results["engine"][f"{backend} {emit} {changes}"] = found
                print(backend, emit, changes, round(found["changes_per_second"]), "changes/s", flush=True)
    for changes in (100_000, 1_000_000):
        for backend in ("gpu", *(("cpu",) if cpu else ())):
            found = interval.engine(backend, rows, changes)
            results["interval"][f"{backend} {changes}"] = found
            print("interval", backend, changes, round(found["changes_per_second"]), "changes/s", flush=True)
    for name, case in (("multi_way", others.multi_way), ("at_end", others.at_end)):
        for backend in ("gpu", *(("cpu",) if cpu else ())):
            found = case(backend, rows, 1_000_000)
            results.setdefault(name, {})[backend] = found
            print(name, backend, round(found["changes_per_second"]), "changes/s", flush=True)
    return results


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", required=True, help="the JSON file that is written")
    parser.add_argument("--quick", action="store_true", help="small sizes, for trying it out")
    parser.add_argument("--no-cpu", action="store_true", help="without the CPU engine beside it")
    options = parser.parse_args()
    found, why = gpu_available()
    if not found:
        raise SystemExit(f"no GPU answers: {why}")
    results = measure(quick=options.quick, cpu=not options.no_cpu)
    write_results(options.out, "gpu", results, settings={"quick": options.quick})
    print(json.dumps({"written": options.out}))


if __name__ == "__main__":
    main()
