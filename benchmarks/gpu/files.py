"""From files to files, or to nowhere, through Spark: the same queries on the card and on all cores beside it.

Micro-batches of CSV files (`benchmarks.changes`, `gpu_ops.read_files`) through a left join, also from Parquet files,
which the card reads itself, a left join of three inputs and sums over a left join, into Spark's no-op sink or into
Parquet by `gpu_ops.write_files`. The CPU has 8 or 16 partitions, the card one, with one of Spark's tasks around it or
with as many as there are cores. Cases of as many tasks share a session. The first micro-batch of each warms it up; the
others are counted, and what each took of Spark's phases, of its stages (from Spark's event log) and of the state
servers stands beside. Every way of a query has as many rows, and in the files of the size in the middle, whoever has
written them, DuckDB finds the same table.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from pyarrow import csv

from benchmarks import changes
from benchmarks.common import LEAST_RUNS, summarise
from benchmarks.gpu.card import Clock

MICRO_BATCHES = 1 + LEAST_RUNS
_APART = 1 << 40
"""Keys of one part of the data are so far from those of the next."""
_INPUTS = ("orders", "prices", "stocks")
_FIRST = 1_700_000_000


@dataclasses.dataclass(frozen=True)
class FileSizes:
    """The amount of data.

    Attributes:
        changes: of a micro-batch of two inputs, each a multiple of the first.
        files: of each input in a micro-batch of the first size.
        partitions: of the CPU.
        seconds: that a case takes at most, to tell whether there is time for it.
    """

    changes: tuple[int, ...] = (1_000_000, 4_000_000, 10_000_000)
    files: int = 4
    partitions: tuple[int, ...] = (8, 16)
    seconds: float = 12.0


@dataclasses.dataclass(frozen=True)
class FilesCase:
    """One query, one way.

    Attributes:
        query: of `QUERIES`.
        changes: of a micro-batch.
        sink: of `benchmarks.spark_queries.Sink`.
        backend: ``"cpu"`` or ``"gpu"``.
        partitions: of the operator's state.
        tasks: Spark's, at least.
    """

    query: str
    changes: int
    sink: str
    backend: str
    partitions: int
    tasks: int


def cases(sizes: FileSizes, cores: int) -> dict[int, list[FilesCase]]:
    """All cases by Spark's tasks, the ones that tell most first: those of the size in the middle, then the others."""
    few, many = sizes.partitions
    ways = {cores: (("gpu", 1), ("cpu", many)), 1: (("cpu", few), ("gpu", 1))}
    middle = _middle(sizes)
    work = [("left", middle, sink) for sink in ("write_files", "noop")]
    work += [(query, middle, "write_files") for query in ("parquet", "three", "sums")]
    work.append(("parquet", sizes.changes[-1], "write_files"))
    others = [size for size in sizes.changes if size != middle]
    work += [("left", size, sink) for size, sink in itertools.product(others, ("write_files", "noop"))]
    return {tasks: [FilesCase(*one, *way, tasks) for one in work for way in of] for tasks, of in ways.items()}


def _middle(sizes: FileSizes) -> int:
    """The size of which most is told."""
    return sizes.changes[len(sizes.changes) // 2]


def write_data(folder: Path, sizes: FileSizes, workers: int) -> None:
    """Files for the largest micro-batches, written by several processes; smaller ones take some of them."""
    parts = MICRO_BATCHES * sizes.changes[-1] // sizes.changes[0]
    each = sizes.changes[0] // 2 // sizes.files
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        list(pool.map(_write_part, *zip(*((folder, part, sizes.files, each) for part in range(parts)), strict=True)))


def _write_part(folder: Path, part: int, files: int, each: int) -> None:
    made = changes.generate(len(_INPUTS) * files * each, inputs=len(_INPUTS), seed=part)
    own = folder / f"part-{part}"
    changes.write(made, own, files, first_key=part * _APART)
    for name, number in itertools.product(_INPUTS, range(files)):
        target = folder / "all" / name
        target.mkdir(parents=True, exist_ok=True)
        at = part * files + number
        to = target / f"part-{at:05d}.csv"
        (own / name / f"part-{number:05d}.csv").rename(to)
        rows = folder / "all" / "parquet" / name / f"part-{at:05d}.parquet"
        rows.parent.mkdir(parents=True, exist_ok=True)
        schema = made.inputs[name].schema
        convert = csv.ConvertOptions(column_types=schema, strings_can_be_null=True)
        pq.write_table(csv.read_csv(to, csv.ReadOptions(column_names=schema.names), convert_options=convert), rows)
        for file in (to, rows):
            os.utime(file, (_FIRST + at, _FIRST + at))
    if not part:  # what it says of unique keys is true of all
        (own / changes.COUNTS_FILE).rename(folder / changes.COUNTS_FILE)
    shutil.rmtree(own)


def linked(folder: Path, sizes: FileSizes, size: int) -> tuple[Path, int]:
    """A folder with files for micro-batches of a size, and how many of an input one has."""
    times = size // sizes.changes[0]
    own = folder / f"{size}"
    for name in [*_INPUTS, *(f"parquet/{name}" for name in _INPUTS)] if not own.exists() else ():
        (own / name).mkdir(parents=True)
        for file in sorted((folder / "all" / name).iterdir())[: MICRO_BATCHES * times * sizes.files]:
            os.link(file, own / name / file.name)
    for counts in (own / changes.COUNTS_FILE, own / "parquet" / changes.COUNTS_FILE):
        if not counts.exists():
            os.link(folder / changes.COUNTS_FILE, counts)
    return own, times * sizes.files


def files_to_files(sizes: FileSizes, clock: Clock, keep: Callable[[dict[str, Any]], None]) -> None:
    """Runs the cases in their order while there is time for one more.

    Args:
        sizes: how much data.
        clock: when to stop.
        keep: told everything there is, after each case.
    """
    from benchmarks.spark_queries import local_session

    cores = max(2, len(os.sched_getaffinity(0)))  # with fewer both numbers of tasks would be one
    with tempfile.TemporaryDirectory(prefix="gpu-join-files-") as name:
        folder = Path(name)
        write_data(folder, sizes, cores)
        found: list[dict[str, Any]] = []
        rows: dict[tuple[str, int], float] = {}
        written: dict[str, Any] = {}
        for tasks, those in cases(sizes, cores).items():
            log = folder / f"events-{tasks}"
            log.mkdir()
            events = {"enabled": "true", "compress": "false", "rolling.enabled": "false", "dir": log.as_uri()}
            told = {f"spark.eventLog.{key}": value for key, value in events.items()}
            spark, read = local_session(cores, **told, **{"spark.gpu_ops.tasks": str(tasks)}), _Stages(log)
            try:
                for case in those:
                    why = clock.lacks(sizes.seconds)
                    one = {"left_out": why} if why else _measured(spark, folder, sizes, case)
                    found.append({**dataclasses.asdict(case), **one, "stages": list(read.more())})
                    keep({"cores": cores, "cases": found})
                    if why is None:
                        print("files", case, f"{one['changes_per_second'] / 1e6:.2f}M changes/s", flush=True)
                        query = "left" if case.query == "parquet" else case.query
                        wanted = rows.setdefault((query, case.changes), one["folded_rows"])
                        if one["folded_rows"] != wanted:
                            raise AssertionError(f"{case}: {one['folded_rows']} rows, another way had {wanted}")
                        there = one.get("in_files")
                        if there is not None and there != written.setdefault(query, there):
                            raise AssertionError(f"{case}: {there} in files, another way had {written[query]}")
            finally:
                spark.stop()


def _measured(spark: Any, folder: Path, sizes: FileSizes, case: FilesCase) -> dict[str, Any]:
    from benchmarks.spark_queries import fresh

    data, files = linked(folder, sizes, case.changes)
    options = {"backend": case.backend, "partitions": case.partitions}
    look = _in_files if case.sink == "write_files" and case.changes == _middle(sizes) else None
    said = fresh(lambda work: QUERIES[case.query](spark, data, work, files, options), case.sink, look)  # type: ignore[arg-type]
    seconds = said.pop("batch_seconds")
    counted = seconds[1:]
    if len(counted) < LEAST_RUNS:
        raise ValueError(f"{len(seconds)} micro-batches are no measurement: one warms up, {LEAST_RUNS} are counted")
    changed = files * len(_READ[case.query]) * (sizes.changes[0] // 2 // sizes.files)
    median = summarise(counted)
    rate = changed / median.median
    return {**said, "seconds": median, "first_seconds": seconds[0], "changes_per_second": rate, "changed": changed}


def _in_files(work: Path) -> dict[str, Any]:
    """What DuckDB finds in the files of a changelog: how many rows they add up to, and a sum over their values.

    Beside it how many Parquet files the log still keeps that the card has read.
    """
    import duckdb

    rows = f"read_parquet('{work}/out/part-*.parquet')"
    columns = ", ".join(f'"{name}"' for name in duckdb.sql(f"FROM {rows} LIMIT 0").columns if name != "row_kind")
    added = "CASE WHEN row_kind IN ('+I', '+U') THEN 1 ELSE -1 END"
    found = f"sum({added}), sum((hash({columns}) >> 1)::BIGINT::HUGEINT * {added})"
    ((count, total),) = duckdb.sql(f"FROM {rows} SELECT {found}").fetchall()
    told = f"parquet_file_metadata('{work}/out/part-*.parquet')"
    writers = [name for (name,) in duckdb.sql(f"FROM {told} SELECT DISTINCT created_by ORDER BY 1").fetchall()]
    copies = [path for path in (work / "state").rglob("*.block") if path.read_bytes().startswith(b"PAR1")]
    return {"in_files": {"rows": int(count), "sum": str(total)}, "written_by": writers, "copies": len(copies)}


def _left(spark: Any, data: Path, work: Path, files: int, options: Mapping[str, Any]) -> Any:
    from benchmarks.spark_queries import our_join

    return our_join(spark, data, work, files, reader="arrow", **options)


def _parquet(spark: Any, data: Path, work: Path, files: int, options: Mapping[str, Any]) -> Any:
    from benchmarks.spark_queries import our_join

    return our_join(spark, data / "parquet", work, files, reader="parquet", **options)


def _three(spark: Any, data: Path, work: Path, files: int, options: Mapping[str, Any]) -> Any:
    from benchmarks.spark_queries import our_multi_join

    return our_multi_join(spark, data, work, files, reader="arrow", **options)


def _sums(spark: Any, data: Path, work: Path, files: int, options: Mapping[str, Any]) -> Any:
    import gpu_ops

    joined = _left(spark, data, work, files, options)
    called = {"n": "count(*)", "amount": "sum(amount)"}
    return gpu_ops.aggregate(joined, by=["customer"], aggregates=called, state=str(work / "sums"), **options)


QUERIES: dict[str, Callable[[Any, Path, Path, int, Mapping[str, Any]], Any]] = {
    "left": _left,
    "parquet": _parquet,
    "three": _three,
    "sums": _sums,
}
_READ = {"left": _INPUTS[:2], "parquet": _INPUTS[:2], "three": _INPUTS, "sums": _INPUTS[:2]}


class _Stages:
    """Stages that Spark's event log tells of, each once.

    Args:
        folder: of the log.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._read = folder, 0

    def more(self) -> Iterator[dict[str, Any]]:
        """Those that have ended since the last look: name, tasks, milliseconds in all and of the executors."""
        (log,) = self._folder.iterdir()
        with log.open("rb") as file:
            file.seek(self._read)
            lines = file.read().splitlines(keepends=True)
        for line in lines:
            if not line.endswith(b"\n"):
                break
            self._read += len(line)
            if b"SparkListenerStageCompleted" in line:
                yield _stage(json.loads(line)["Stage Info"])


def _stage(told: Mapping[str, Any]) -> dict[str, Any]:
    values = {one.get("Name"): one.get("Value") for one in told["Accumulables"]}
    return {
        "name": told["Stage Name"].partition(" at ")[0],
        "tasks": told["Number of Tasks"],
        "ms": told["Completion Time"] - told["Submission Time"],
        "run_ms": int(np.int64(values.get("internal.metrics.executorRunTime") or 0)),
    }
