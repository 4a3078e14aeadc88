"""A function per peer: it runs a query of `benchmarks.peers.data` from files into a folder, and says how long it took.

The time is from the start of the query to its end, with its planning and the start of its job; session, JVM and
interpreter are up, and what compiles at run time has run the query before.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.flink.run import FLINK_VERSION, FlinkUnavailableError, flink_jars, run_flink, run_sql
from benchmarks.peers.batch import duckdb_batch, polars_batch, timed
from benchmarks.peers.data import INPUTS, QUERIES, SQL, Folded, folded, sign

PARQUET = "FROM read_parquet('{out}/**/*.parquet')"
CSV = "FROM read_csv({parts}, header={header}, columns={columns}, nullstr='{null}')"

OWN_PROCESS = ("flink", "pathway", "pathway_stream")
"""Peers whose every run is a new process: they are not warmed up from here."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Who runs which queries.

    Attributes:
        title: its name and settings, for a table.
        unequal: what it does less or more than a durable streaming query, for the same table.
        queries: those it can run.
        run: runs a query, given its name, the folder of the data, and an empty folder for the result; its seconds.
        found: the folded result in that folder; None where nothing is written, or it has been checked.
    """

    title: str
    unequal: str
    queries: tuple[str, ...]
    run: Callable[[str, Path, Path], float]
    found: Callable[[str, Path], Folded | None]


def parquet(query: str, out: Path, weight: str = "1") -> Folded:
    """Folds what was written as Parquet."""
    return folded(PARQUET.format(out=out), QUERIES[query], weight)


def flink_rows(query: str, out: Path) -> Folded | None:
    """Folds what Flink's CSV format wrote; `run_flink` has checked the join of changes by its sums."""
    if query == "changes":
        return None
    names = {**({"op": "VARCHAR"} if query == "totals" else {}), **QUERIES[query]}
    parts = [str(part) for part in out.rglob("*") if part.is_file() and part.stat().st_size]
    weight = "CASE WHEN op IN ('INSERT', 'UPDATE_AFTER') THEN 1 ELSE -1 END" if query == "totals" else "1"
    return folded(CSV.format(parts=parts, header="false", columns=names, null=""), QUERIES[query], weight)


def pathway_rows(query: str, out: Path) -> Folded:
    """Folds what Pathway wrote."""
    names = {**QUERIES[query], "time": "BIGINT", "diff": "BIGINT"}
    relation = CSV.format(parts=[str(out / "changes.csv")], header="true", columns=names, null="None")
    return folded(relation, QUERIES[query], "diff")


def ours(spark: Any, query: str, data: Path, out: Path) -> float:
    """This pack on Spark: durable state, Parquet that is visible once a micro-batch has been committed."""
    import gpu_ops
    from benchmarks.spark_queries import our_join

    def run() -> None:
        work = out.with_name("work")
        if query == "changes":
            changes = our_join(spark, data / "changes", work, 1, reader="arrow", emit="per_batch")
        else:
            inputs = [
                gpu_ops.stream(
                    gpu_ops.read_files(spark, str(data / "inserts" / name), "csv", ddl(name), maxFilesPerTrigger=1),
                    name=name,
                    unique_key="order_id",
                )
                for name in INPUTS
            ]
            changes = gpu_ops.join(*inputs, on="order_id", state=str(work / "joined"), suffixes=("", "_price"))
        if query == "totals":
            changes = gpu_ops.aggregate(
                gpu_ops.stream(changes, name="joined"),
                by="customer",
                aggregates={"n": "count(*)", "total": "sum(price)"},
                state=str(work / "totals"),
            )
        started = gpu_ops.write_files(changes, str(out), checkpoint=str(work / "checkpoint"), availableNow=True)
        started.awaitTermination()

    return timed(run)


def ddl(name: str) -> str:
    """An input's columns as Spark takes them."""
    return ", ".join(f"{column} {'STRING' if kind == 'VARCHAR' else kind}" for column, kind in INPUTS[name].items())


def sparks(spark: Any, query: str, data: Path, out: Path) -> float:
    """Spark's own stream-stream join, to Parquet."""

    def run() -> None:
        stream = spark.readStream.option("multiLine", True).option("maxFilesPerTrigger", 1)
        left, right = (stream.schema(ddl(name)).csv(str(data / "inserts" / name)) for name in INPUTS)
        writer = left.join(right, "order_id").writeStream.option("compression", "snappy")
        writer = writer.option("checkpointLocation", str(out.with_name("work"))).trigger(availableNow=True)
        writer.format("parquet").start(str(out)).awaitTermination()

    return timed(run)


def nothing(spark: Any, query: str, data: Path, out: Path) -> float:
    """The pipeline around our join with a function that hands back what it gets, into Spark's no-op sink."""
    from benchmarks.spark_queries import no_op

    def run() -> None:
        df = no_op(spark, data / "changes", 1, 2)
        writer = df.writeStream.format("noop").option("checkpointLocation", str(out.with_name("work")))
        writer.trigger(availableNow=True).start().awaitTermination()

    return timed(run)


def flink_changes(warmup: int, query: str, data: Path, out: Path) -> float:
    """Flink's left join of changes with its own CSV reader, into a sink that counts; checked by `run_flink`."""
    seconds: float = run_flink(data / "changes", 2, source="sql", repeat=warmup + 1)["whole_seconds"][-1]
    return seconds


def flink_sql(warmup: int, query: str, data: Path, out: Path) -> float:
    """Flink SQL from CSV to CSV; of an aggregate the changes with their kind."""
    tables = []
    for name, columns in INPUTS.items():
        # one file per input, as for the changes: Flink reads it in one task
        whole = data / "inserts" / f"{name}.csv"
        if not whole.exists():
            parts = sorted((data / "inserts" / name).glob("*.csv"))
            whole.write_bytes(b"".join(part.read_bytes() for part in parts))
        tables.append(_table(name, columns, whole))
    if query == "totals":
        tables.append(f"CREATE VIEW summed AS {SQL[query]}")
    scripts = []
    for number in range(warmup + 1):
        target = out / str(number)
        columns = {**({"op": "STRING"} if query == "totals" else {}), **QUERIES[query]}
        rows = "SELECT * FROM TO_CHANGELOG(TABLE summed)" if query == "totals" else SQL[query]
        scripts.append("\n\n".join([*tables, _table("out", columns, target), f"INSERT INTO `out` {rows}"]))
    seconds = run_sql(scripts, 2)[-1]["seconds"]
    for number in range(warmup):
        shutil.rmtree(out / str(number))
    return seconds


def _table(name: str, columns: dict[str, str], path: Path) -> str:
    typed = ", ".join(f"`{column}` {'STRING' if kind == 'VARCHAR' else kind}" for column, kind in columns.items())
    if name in INPUTS:  # the planner takes its cheapest state
        typed += ", PRIMARY KEY (order_id) NOT ENFORCED"
    return f"CREATE TABLE `{name}` ({typed}) WITH ('connector' = 'filesystem', 'format' = 'csv', 'path' = '{path}')"


def pathway(python: str, mode: str, query: str, data: Path, out: Path) -> float:
    """Pathway with two workers, to a CSV file of changes; it compiles nothing, so the first run of a process counts."""
    script = Path(__file__).with_name("pathway_job.py")
    command = [python, str(script), query, mode, str(data), str(out)]
    environment = {**os.environ, "PATHWAY_THREADS": "2"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=out)
    if done.returncode:
        raise RuntimeError(f"Pathway failed with status {done.returncode}:\n{done.stderr[-4000:]}")
    seconds: float = json.loads(done.stdout.splitlines()[-1])["seconds"]
    return seconds


def peers(spark: Any, python: str, warmup: int) -> dict[str, Peer]:
    """All of them, ours first, whether or not they are here.

    Args:
        spark: a session.
        python: an interpreter with Pathway.
        warmup: runs in a process of Flink before the one that counts.
    """
    every = tuple(QUERIES)
    changes, inserts = every[:2]
    batch = "one batch of all rows; no state is kept"
    return {
        "ours": Peer(
            "gpu-join: `read_files`, `write_files`",
            "state and a checkpoint on disk after each micro-batch; a changelog in Parquet",
            every,
            partial(ours, spark),
            lambda query, out: parquet(query, out, sign("row_kind")),
        ),
        "flink": Peer(
            f"Flink SQL {FLINK_VERSION}, parallelism 2, its CSV connector",
            "state on the heap, no checkpoints; its local cluster starts inside the clock (not so in `vs_flink`); the"
            " left join's changes are counted and summed, not written; the other two queries write CSV",
            every,
            lambda query, *paths: (flink_changes if query == changes else flink_sql)(warmup, query, *paths),
            flink_rows,
        ),
        "spark": Peer(
            "Spark's own join, its CSV reader, its Parquet sink",
            "takes no changes, and allows no aggregate of unbounded groups behind a join; state on disk",
            (inserts,),
            partial(sparks, spark),
            parquet,
        ),
        "pathway": Peer(
            "Pathway 0.33, two workers, `static`, CSV in and out",
            "all files in one commit, so final rows alone; it reads no changelog from files: the last change of a key"
            " is picked by a number that its files have besides; nothing is persisted",
            every,
            partial(pathway, python, "static"),
            pathway_rows,
        ),
        "pathway_stream": Peer(
            "Pathway 0.33, two workers, Python connector, CSV out",
            "a commit per file and input, and a changelog; each row goes through Python; nothing is persisted",
            (changes,),
            partial(pathway, python, "stream"),
            pathway_rows,
        ),
        "duckdb": Peer(f"DuckDB {version('duckdb')}, two threads", f"{batch}; Parquet", every, duckdb_batch, parquet),
        "polars": Peer(f"polars {version('polars')}, two threads", f"{batch}; Parquet", every, polars_batch, parquet),
        "no_op": Peer(
            "a Spark pipeline that does nothing",
            "Spark's CSV reader, shuffle, `mapInArrow`, no-op sink: no join and no result",
            (changes,),
            partial(nothing, spark),
            lambda query, out: None,
        ),
    }


def absent(python: str) -> dict[str, str]:
    """Peers that are not here, and why."""
    missing = {}
    if not Path(python).exists():
        missing |= dict.fromkeys(("pathway", "pathway_stream"), f"there is no {python}; `make bench` makes it")
    try:
        flink_jars()
    except FlinkUnavailableError as error:
        missing["flink"] = str(error)
    return missing


def once(peer: Peer, query: str, data: Path, expected: Folded) -> float:
    """Run a query in a new folder and check what it says.

    Raises:
        RuntimeError: the result is another.
    """
    folder = Path(tempfile.mkdtemp(prefix="gpu-join-bench-"))
    try:
        out = folder / "out"
        out.mkdir()
        seconds = peer.run(query, data, out)
        found = peer.found(query, out)
        if found not in (None, expected):
            raise RuntimeError(f"{peer.title}, {query}: folds to {found}, not to {expected}")
        print(f"{query} {peer.title}: {seconds:.2f} s", file=sys.stderr, flush=True)
        return seconds
    finally:
        shutil.rmtree(folder, ignore_errors=True)
