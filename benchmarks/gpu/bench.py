"""The GPU backend's parts and the whole engine, timed on a card.

Parts, in the order in which they run:
- `copy`: the bandwidth of a copy within the card; figures give their share of it.
- `first`: the first micro-batches of a new process, with nothing compiled and with all of it (`benchmarks.gpu.first`).
- `regular`: a left join with up to 100M state rows, inserts, updates and deletes (`benchmarks.gpu.steady`).
- `sweep`: the same with 100k and 10M changes a micro-batch.
- `probes`: the same with each way of probing.
- `keys`: the same with text keys, and with a key that a tenth of the left's rows have.
- `partitions`: the same as 1, 2 and 8 partitions on the one card (`benchmarks.gpu.partitions`).
- `probe`: a million changes looked up in 1M to 1B rows, each way there is (`benchmarks.gpu.probe`).
- `state`: appends, merges, gathers, scatter-adds (`benchmarks.gpu.state`).
- `transfer`: between host and card, plain and Arrow (`benchmarks.gpu.transfer`).
- `interval`, `multi_way`: whole engines, per_batch and per_event (`benchmarks.gpu.interval`, `benchmarks.gpu.others`).
- `ways`: two ways to search by key and time (`benchmarks.gpu.interval`).
- `at_end`: a join at the end of its input (`benchmarks.gpu.others`).
- `snapshot`: how long a snapshot holds up its partition (`benchmarks.gpu.snapshot`).
- `peers`: libcudf's own join, cudf.merge, cudf-polars; polars and DuckDB on all cores (`benchmarks.gpu.peers`).
- `cpu`: the left join on the CPU engine, on one core of the same host.

Results are written after each part, and parts of earlier runs on the same card are kept: what one run has no time for,
another with ``--part`` adds. `targets` says what is reached (`benchmarks.gpu.targets`).

    python -m benchmarks.gpu.bench [--out PATH] [--part NAME ...] [--budget-s SECONDS] [--quick] [--resume]
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import gc
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from benchmarks.common import write_results
from benchmarks.gpu import first, interval, others, partitions, peers, probe, snapshot, state, transfer
from benchmarks.gpu.card import Clock, Plan, copy_bandwidth, device, free_bytes, lacks_memory
from benchmarks.gpu.passed import ROOT, digest
from benchmarks.gpu.steady import Case, one_core, steady
from benchmarks.gpu.targets import targets
from gpu_ops.backends import gpu_available, make_kernels
from gpu_ops.descriptions.description import Emit
from gpu_ops.kernels import Kernels, Probe

_BYTES_PER_STATE_ROW = 250
"""Of the card's memory while a state is loaded: rows, two indexes, what hashing and sorting need."""
_LEAST_CPU_SECONDS = 20.0


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The size of each part of the benchmark, in rows unless it says otherwise."""

    copied_bytes: int = 4 << 30
    changes: int = 1_000_000
    sweep: tuple[int, ...] = (100_000, 10_000_000)
    partitions: tuple[int, ...] = (1, 2, 8)
    batches: int = 10
    warmup: int = 6
    first: int = 10_000
    state: tuple[int, ...] = (100_000_000, 10_000_000, 1_000_000)
    probe: tuple[int, ...] = (1_000_000, 10_000_000, 100_000_000, 1_000_000_000)
    needles: tuple[int, ...] = (1_000_000, 10_000)
    appended: int = 20_000_000
    append_batch: int = 100_000
    counted: int = 100_000_000
    merged: tuple[tuple[int, int], ...] = ((1_000_000, 100_000), (10_000_000, 1_000_000), (50_000_000, 5_000_000))
    grown: int = 50_000_000
    interval_batches: int = 24
    multi_way: int = 8_000_000
    at_end: int = 5_000_000
    ways: tuple[int, ...] = (1_000_000, 10_000_000, 100_000_000)
    ways_needles: int = 100_000
    snapshot: int = 10_000_000
    peers: int = 10_000_000
    cpu: tuple[int, ...] = (10_000_000, 100_000_000)
    rounds: int = 9


QUICK = Sizes(
    copied_bytes=1 << 28, changes=100_000, sweep=(10_000,), batches=3, warmup=2, first=1000,
    state=(1_000_000, 500_000), probe=(1_000_000,), needles=(100_000,), appended=1_000_000, counted=1_000_000,
    merged=((1_000_000, 100_000),), grown=1_000_000, interval_batches=10, multi_way=500_000, at_end=500_000,
    ways=(1_000_000,), snapshot=100_000, peers=100_000, cpu=(1_000_000,), rounds=3,
)  # fmt: skip
EMITS: tuple[Emit, ...] = ("per_batch", "per_event")


def _regular(sizes: Sizes, plan: Plan) -> list[dict[str, Any]]:
    largest = sizes.state[0]
    cases = [_case(sizes, largest), _case(sizes, largest, emit="per_event")]
    cases += [_case(sizes, largest, mix="inserts", unique=False), *(_case(sizes, rows) for rows in sizes.state[1:])]
    return _steady("regular", cases, plan)


def _sweep(sizes: Sizes, plan: Plan) -> list[dict[str, Any]]:
    cases = []
    for changes in sizes.sweep:
        batches, warmup = (sizes.batches, sizes.warmup) if changes <= sizes.changes else (3, 2)
        cases.append(dataclasses.replace(_case(sizes, sizes.state[0]), changes=changes, batches=batches, warmup=warmup))
    return _steady("sweep", cases, plan)


def _probes(sizes: Sizes, plan: Plan) -> list[dict[str, Any]]:
    return _steady("probes", [_case(sizes, sizes.state[0], probe=way) for way in get_args(Probe)], plan)


def _keys(sizes: Sizes, plan: Plan) -> list[dict[str, Any]]:
    return _steady("keys", [_case(sizes, sizes.state[1], keys=keys) for keys in ("text", "skewed")], plan)


def _partitions(sizes: Sizes, plan: Plan) -> list[dict[str, Any]]:
    case, found = _case(sizes, sizes.state[1]), []
    for count in sizes.partitions:
        why = plan.clock.lacks(10 + 1e-6 * case.rows)
        one = {"partitions": count, "left_out": why} if why else partitions.partitions("gpu", count, case, plan)
        print(
            "partitions", count, one.get("left_out") or f"{one['changes_per_second'] / 1e6:.2f}M changes/s", flush=True
        )
        found.append(one)
        gc.collect()
    return found


def _steady(part: str, cases: Sequence[Case], plan: Plan) -> list[dict[str, Any]]:
    found = []
    for case in cases:
        why = lacks_memory(_BYTES_PER_STATE_ROW * case.rows, free_bytes()) or plan.clock.lacks(5 + 1e-7 * case.rows)
        one = {**dataclasses.asdict(case), "left_out": why} if why else steady("gpu", case, plan)
        _say(part, case.rows, case.changes, case.emit, case.mix, case.keys, case.probe, one)
        found.append(one)
        gc.collect()
    return found


def _case(sizes: Sizes, rows: int, **other: Any) -> Case:
    # a row is touched once, and has to last for all micro-batches
    return Case(rows=rows, changes=min(sizes.changes, rows // 10), batches=sizes.batches, warmup=sizes.warmup, **other)


def _cpu(sizes: Sizes, plan: Plan) -> list[dict[str, Any]]:
    cases = [_case(sizes, rows) for rows in sizes.cpu] + [_case(sizes, sizes.cpu[0], emit="per_event")]
    found = []
    for case in cases:
        case = dataclasses.replace(case, batches=min(case.batches, 5), warmup=min(case.warmup, 2))  # noqa: PLW2901
        why = plan.clock.lacks(_LEAST_CPU_SECONDS)
        one = {**dataclasses.asdict(case), "left_out": why} if why else one_core(case, plan.clock.left())
        _say("cpu", case.rows, case.emit, case.mix, one)
        found.append(one)
    return found


def _state(kernels: Kernels, sizes: Sizes, plan: Plan) -> dict[str, Any]:
    return {
        **state.rows_and_gathers(kernels, sizes.appended, sizes.append_batch, plan),
        "scatter_add": state.scatter_add(kernels, sizes.counted, sizes.changes, plan),
        "merges": state.merges(kernels, list(sizes.merged), plan),
        "growth": state.growth(kernels, sizes.grown, sizes.changes // 2),
    }


def _with_kernels(work: Callable[[Kernels, Sizes, Plan], Any]) -> Callable[[Sizes, Plan], Any]:
    def run(sizes: Sizes, plan: Plan) -> Any:
        kernels, _ = make_kernels("gpu")
        try:
            return work(kernels, sizes, plan)
        finally:
            kernels.close()

    return run


def _engines(work: Callable[[Emit, Sizes, Plan], dict[str, Any]]) -> Callable[[Sizes, Plan], list[dict[str, Any]]]:
    def run(sizes: Sizes, plan: Plan) -> list[dict[str, Any]]:
        found = []
        for emit in EMITS:
            why = plan.clock.lacks(5)
            one = {"emit": emit, "left_out": why} if why else work(emit, sizes, plan)
            _say("engine", emit, one)
            found.append(one)
            gc.collect()
        return found

    return run


PARTS: dict[str, Callable[[Sizes, Plan], Any]] = {
    "copy": _with_kernels(lambda kernels, sizes, plan: copy_bandwidth(kernels, sizes.copied_bytes, plan.rounds)),
    "first": lambda sizes, plan: first.processes("gpu", sizes.first, plan.clock.left()),
    "regular": _regular,
    "sweep": _sweep,
    "probes": _probes,
    "keys": _keys,
    "partitions": _partitions,
    "probe": _with_kernels(lambda kernels, sizes, plan: probe.probe(kernels, sizes.probe, sizes.needles, plan)),
    "state": _with_kernels(_state),
    "transfer": _with_kernels(lambda kernels, sizes, plan: transfer.transfer(kernels, sizes.changes, plan.rounds)),
    "interval": _engines(
        lambda emit, sizes, plan: interval.engine("gpu", sizes.changes, sizes.interval_batches, emit, plan)
    ),
    "multi_way": _engines(
        lambda emit, sizes, plan: others.multi_way("gpu", sizes.multi_way, sizes.changes, emit, plan)
    ),
    "ways": _with_kernels(lambda kernels, sizes, plan: interval.ways(kernels, sizes.ways, sizes.ways_needles, plan)),
    "at_end": lambda sizes, _plan: others.at_end("gpu", sizes.at_end, sizes.changes),
    "snapshot": lambda sizes, plan: snapshot.stall("gpu", sizes.snapshot, sizes.changes // 10, plan.rounds),
    "peers": lambda sizes, plan: peers.peers("gpu", sizes.peers, sizes.changes, plan),
    "cpu": _cpu,
}


def _say(*words: Any) -> None:
    *names, found = words
    if "left_out" in found:
        print(*names, "left out:", found["left_out"], flush=True)
        return
    rates = found["plain"]["changes_per_second"], found["watched"]["changes_per_second_without_transfer"]
    print(*names, *(f"{rate / 1e6:.2f}M" for rate in rates), "changes/s, all and without transfer", flush=True)


def result_path(out: Path | None, what: str = "gpu") -> Path:
    """The file given; else gpu-<device>-<date>.json in the folder given, or in ``benchmarks/results``."""
    if out is not None and not out.is_dir():
        return out
    name = re.sub(r"[^a-z0-9]+", "-", device()["name"].lower()).strip("-")
    return (out or ROOT / "benchmarks" / "results") / f"{what}-{name}-{dt.datetime.now(dt.UTC):%Y-%m-%d}.json"


def measure(out: Path, parts: Sequence[str], sizes: Sizes, clock: Clock, *, resume: bool = False) -> dict[str, Any]:
    """Run parts, and write what is known after each.

    Args:
        out: the JSON file; results of the same card that it holds are kept, but for these parts.
        parts: of `PARTS`; `copy` comes first where it is not known yet.
        sizes: how large.
        clock: when it ends no further part begins.
        resume: leave out parts that are done, with the code and the sizes as they are.

    Returns:
        What was written last. ``parts`` says of each whether it is done, left out or failed, and how long it took.
    """
    card = device()
    results: dict[str, Any] = {"device": card, "parts": {}}
    before: dict[str, Any] = {}
    if out.exists():
        before = json.loads(out.read_text())
        earlier = before["results"]
        if earlier.get("device", {}).get("name") == card["name"]:
            results = {**earlier, "device": card}
    settings = dataclasses.asdict(sizes)
    wanted = [name for name in PARTS if name in parts or (name == "copy" and "copy" not in results)]
    if resume and json.loads(json.dumps(settings)) == before.get("settings"):
        wanted = [name for name in wanted if not _complete(results, name)]
    written = _write(out, results, settings)
    for name in wanted:
        known = results.get("copy", {}).get("bytes_per_second")
        done = _run(name, sizes, Plan(sizes.rounds, known, clock), results)
        results["parts"][name] = {**done, "code": digest()}
        written = _write(out, results, settings)
        gc.collect()
    return written


def _write(out: Path, results: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """With what follows from them."""
    plain = write_results(out, "gpu", results, settings=settings)["results"]
    return write_results(out, "gpu", {**results, "targets": targets(plain)}, settings=settings)


def _complete(results: Mapping[str, Any], name: str) -> bool:
    """True if a part was measured with the present code, and nothing of it left out for lack of time."""
    said = results["parts"].get(name, {})
    return (
        said.get("status") == "done" and said.get("code") == digest() and '"time: ' not in json.dumps(results.get(name))
    )


def _run(name: str, sizes: Sizes, plan: Plan, results: dict[str, Any]) -> dict[str, Any]:
    """Run one part into the results; its state. One that fails leaves the others alone."""
    began = time.perf_counter()
    why = plan.clock.lacks(5)
    if why is not None and name != "copy":
        status = f"left out: {why}"
    else:
        try:
            results[name] = PARTS[name](sizes, plan)
            status = "done"
        except (Exception, MemoryError) as error:
            status = f"failed: {type(error).__name__}: {error}"
    print(name, status, flush=True)
    when = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    return {"status": status, "seconds": round(time.perf_counter() - began, 2), "time": when}


def main() -> None:
    """Runs the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="JSON file, or its folder; by default benchmarks/results")
    parser.add_argument("--part", action="append", choices=tuple(PARTS), help="only this one; as often as needed")
    parser.add_argument("--budget-s", type=float, help="seconds after which nothing further begins")
    parser.add_argument("--quick", action="store_true", help="small sizes, for trying it out")
    parser.add_argument("--resume", action="store_true", help="leave out parts that are done")
    options = parser.parse_args()
    clock = Clock(options.budget_s)
    found, why = gpu_available()
    if not found:
        raise SystemExit(f"no GPU answers: {why}")
    print(why, flush=True)
    out = result_path(options.out)
    written = measure(
        out, options.part or tuple(PARTS), QUICK if options.quick else Sizes(), clock, resume=options.resume
    )
    for target in written["results"]["targets"]:
        print(json.dumps(target))
    print(f"written: {out}")
    failed = [name for name, part in written["results"]["parts"].items() if part["status"].startswith("failed")]
    if failed:
        raise SystemExit(f"parts that failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
