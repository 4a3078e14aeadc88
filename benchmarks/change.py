"""What a change of a query costs, by the rows in its state: an aggregate is put above a join.

The time ends with the first micro-batch of the new query, a thousand new rows of each input, as states are loaded then.
The old query has run for a while: its state has been written as a snapshot. In one case it has not, and all rows are in
the log. Beside it stand the old query started once more as it was, up to the end of its next micro-batch, the aggregate
alone over as many rows in one engine, and the new query begun anew over the same files (which may be gone, or be many
times as many as the rows that are still there), a tenth of them in each micro-batch.

    python -m benchmarks.change [--rows 10000000] [--rounds 3] [--quick]
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame

import gpu_ops
from benchmarks.common import arguments, interleave, ratio, record, summarise
from benchmarks.spark_queries import local_session

FILES = 4
"""With most rows of an input."""
BESIDE = 9
"""Files behind each of these that are small: the micro-batches in which they come make snapshots due."""
NEW_ROWS = 1000
"""In a small file; one of each input the old query has not read."""
JOINED = "FROM l JOIN r ON l.k = r.k"
OLD = f"SELECT l.k, l.c, r.v {JOINED}"
NEW = f"SELECT l.c, count(*) AS n, sum(r.v) AS v {JOINED} GROUP BY l.c"


def write(folder: Path, rows: int) -> None:
    """Writes the files of both inputs, each key once on either side."""
    rng = np.random.default_rng(0)
    made = {"l": ("c", rng.integers(0, 5000, rows)), "r": ("v", rng.integers(0, 100, rows))}
    for name, (column, values) in made.items():
        table = pa.table({"k": rng.permutation(rows), column: values})
        (folder / name).mkdir()
        for number in range(FILES):
            put(table.slice(number * rows // FILES, rows // FILES), folder / name, number * (1 + BESIDE))
    for number in range(FILES * (1 + BESIDE)):
        if number % (1 + BESIDE):
            write_more(folder, rows, number)


def write_more(folder: Path, rows: int, number: int) -> None:
    """Writes a file of new keys for both inputs."""
    keys = np.arange(rows, rows + NEW_ROWS) + number * NEW_ROWS
    for name, column in (("l", "c"), ("r", "v")):
        put(pa.table({"k": keys, column: keys % 7}), folder / name, number)


def put(rows: pa.Table, folder: Path, number: int) -> None:
    """Writes a file that is read behind those of lower numbers."""
    file = folder / f"{number:03d}.parquet"
    pq.write_table(rows, file)
    os.utime(file, (1e9 + number, 1e9 + number))


def tables(folder: Path, at_once: int) -> dict[str, DataFrame]:
    """Both inputs as streams, of which a micro-batch has so many files."""
    spark = local_session(2)
    schemas = {"l": "k BIGINT, c BIGINT", "r": "k BIGINT, v BIGINT"}
    return {
        name: gpu_ops.read_files(spark, str(folder / name), "parquet", schema, maxFilesPerTrigger=at_once)
        for name, schema in schemas.items()
    }


def run(folder: Path, query: str, work: Path, at_once: int, emit: str = "per_batch") -> float:
    """Runs a query over all files; seconds."""
    begin = time.perf_counter()
    inputs, state = tables(folder, at_once), str(work / "state")
    changes = gpu_ops.sql(query, tables=inputs, state=state, partitions=2, emit=emit)
    writer = changes.writeStream.format("noop").option("checkpointLocation", str(work / "checkpoint"))
    writer.trigger(availableNow=True).start().awaitTermination()
    return time.perf_counter() - begin


def restart(folder: Path, old: Path) -> float:
    """Starts the old query again as it was, and runs it over what is new; seconds."""
    work = Path(tempfile.mkdtemp(prefix="gpu-join-bench-"))
    shutil.copytree(old, work, copy_function=os.link, dirs_exist_ok=True)  # no file is written over in place
    (work / "state" / "changed.json").unlink(missing_ok=True)
    seconds = run(folder, OLD, work, 1)
    shutil.rmtree(work, ignore_errors=True)
    return seconds


def change(folder: Path, old: Path, query: str = NEW, emit: str = "per_batch") -> float:
    """Changes the query, and runs it over what is new; seconds."""
    work = Path(tempfile.mkdtemp(prefix="gpu-join-bench-"))
    (old / "state" / "changed.json").unlink(missing_ok=True)
    begin = time.perf_counter()
    gpu_ops.change(
        query, tables=tables(folder, 1), emit=emit, partitions=2,
        state=str(work / "state"), checkpoint=str(work / "checkpoint"),
        old_state=str(old / "state"), old_checkpoint=str(old / "checkpoint"), empty_sink=query == NEW,
        write=lambda rows, _: rows.write.format("noop").mode("overwrite").save(),
    )  # fmt: skip
    run(folder, query, work, 1, emit)
    seconds = time.perf_counter() - begin
    shutil.rmtree(work, ignore_errors=True)
    return seconds


def anew(folder: Path) -> float:
    """Begins the new query anew; seconds."""
    work = Path(tempfile.mkdtemp(prefix="gpu-join-bench-"))
    seconds = run(folder, NEW, work, 1 + BESIDE)
    shutil.rmtree(work, ignore_errors=True)
    return seconds


def aggregate(rows: int) -> float:
    """The aggregate alone over as many rows, in one engine; seconds."""
    rng = np.random.default_rng(0)
    table = pa.table({"c": rng.integers(0, 5000, rows), "v": rng.integers(0, 100, rows)})
    engine = gpu_ops.engine(rows=table.slice(0, 0), by="c", aggregates={"n": "count(*)", "v": "sum(v)"}, backend="cpu")
    begin = time.perf_counter()
    for start in range(0, rows, 1_000_000):
        engine.process(table.slice(start, 1_000_000))
    seconds = time.perf_counter() - begin
    engine.close()
    return seconds


def main() -> None:
    """Measure, and write the results."""
    parser = arguments(__doc__, "change", rounds=3)
    parser.add_argument("--rows", type=int, default=10_000_000, help="rows of each input")
    parser.add_argument("--quick", action="store_true", help="few rows: that it runs")
    options = parser.parse_args()
    rows = 20_000 if options.quick else options.rows
    with tempfile.TemporaryDirectory(prefix="gpu-join-data-") as made:
        folder = Path(made)
        write(folder, rows)
        run(folder, OLD, folder / "old", 1)
        run(folder, OLD, folder / "log", 1 + BESIDE)
        write_more(folder, rows, FILES * (1 + BESIDE))
        cases = {
            "change": partial(change, folder, folder / "old"),
            "change of what is in the log alone": partial(change, folder, folder / "log"),
            "change of emit= alone": partial(change, folder, folder / "old", OLD, "per_event"),
            "restart": partial(restart, folder, folder / "old"),
            "anew": partial(anew, folder),
            "aggregate in an engine": partial(aggregate, rows),
        }
        found = {name: summarise(x) for name, x in interleave(cases, options.rounds, warmup=1).items()}
    results = {
        "seconds": found,
        "change_over_aggregate": ratio(found["change"], found["aggregate in an engine"]),
        "change_over_anew": ratio(found["change"], found["anew"]),
        "change_over_restart": ratio(found["change"], found["restart"]),
    }
    record(options, "change", results, rows=rows)


if __name__ == "__main__":
    main()
