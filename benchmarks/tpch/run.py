"""TPC-H's Q3, Q4, Q5, Q10, Q12, Q13, Q18 and Nexmark's q4, q5, q7, q9 on two cores: ours on Spark against Flink SQL.

    python -m benchmarks.tpch [--scale 1] [--files 8] [--events 3000000] [--queries q3,nexmark_q5] [--partitions 1 2]
    python -m benchmarks.tpch --queries nexmark_q5 --events 12000000 --scale 3 --out benchmarks/results/tpch_large.json

Both read the same CSV files of insertions, with the columns that a query reads, and write to a sink that drops the
rows. Ours takes them in `--files` micro-batches, through `gpu_ops.read_files`, and writes its state durably; Flink
has its state on the heap and no checkpoints. Of `--parallelism` tasks of Flink's the best count, and so does the best
of our `--partitions`: with one, the operators of a query are one engine, and the tasks that read have all cores all the
same; with two, operators whose keys agree are an engine on each core. Times are from the
start of the first micro-batch to the end of the last, and of Flink's INSERT. Each has run before in its JVM; of Flink's
runs behind the first, `--warmup` of them, the fastest counts. Ours does without the JVM's second compiler
(`recommended_conf(arrow_rows=True)`), Flink's JVM is as it comes.
`with_planning` is ours with the building of the query. The text is the same for both, but for Nexmark's windows: ours
keeps them up to date, Flink's `TUMBLE` and `HOP` say each once, when the watermark has passed it. Before, our folded
changelog is compared with DuckDB's answer. Rows are those of the tables that a query reads.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv
from pyspark.sql import DataFrame, SparkSession

import gpu_ops
from benchmarks.common import again, interleave, machine, ratio, summarise, write_results
from benchmarks.flink.run import FLINK_VERSION, run_sql
from benchmarks.nexmark import generator, whole
from benchmarks.nexmark.pipelines import run
from benchmarks.nexmark.run import earlier
from benchmarks.spark_queries import local_session
from gpu_ops.demo import tpch
from gpu_ops.demo.tpch import difference
from gpu_ops.spark.api.session import FIRST_COMPILER
from gpu_ops.spark_types import spark_type

TIMES: Final = "dateTime"
"""Nexmark's event time."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A query and its tables.

    Attributes:
        name: of the query.
        ours: its text.
        flink: its text for Flink.
        answer: its text for DuckDB.
        tables: the columns that it reads, by table.
    """

    name: str
    ours: str
    flink: str
    answer: str
    tables: Mapping[str, pa.Table]


def main() -> None:
    """Run, check, print, record."""
    known = (*tpch.NAMES, *(f"nexmark_{name}" for name in whole.NAMES))
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--scale", type=float, default=1, help="TPC-H's scale factor")
    parser.add_argument("--events", type=int, default=3_000_000, help="of Nexmark")
    parser.add_argument("--files", type=int, default=8, help="micro-batches")
    parser.add_argument("--queries", default=",".join(known), help="comma-separated")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=2, help="runs of each before")
    parser.add_argument("--parallelism", type=int, nargs="+", default=[2], help="of Flink")
    parser.add_argument("--partitions", type=int, nargs="+", default=[1, 2], help="of ours")
    parser.add_argument("--no-flink", action="store_true", help="ours alone")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "tpch.json")
    options = parser.parse_args()
    names = [name.strip() for name in options.queries.split(",")]
    for name in names:
        if name not in known:
            raise SystemExit(f"no query {name!r}; there are {', '.join(known)}")
    settings = {k: getattr(options, k) for k in ("scale", "events", "files", "parallelism")}
    settings |= {"master": "local[2]", "flink": FLINK_VERSION, "jvm": FIRST_COMPILER}
    results = earlier(options.out, settings)
    with tempfile.TemporaryDirectory(prefix="gpu-join-data-") as folder:
        cases = [_case(name, Path(folder), options) for name in names]
        spark = local_session(arrow_rows=True, **{"spark.sql.session.timeZone": "UTC"})
        for case in cases:
            results[case.name] = measure(spark, case, Path(folder), options)
            if not options.no_flink:  # what is measured is kept if a later query fails
                results = {name: results[name] for name in known if name in results}
                record = write_results(options.out, "tpch", results, settings=settings)
        spark.stop()
    if options.no_flink:
        return
    shown = {name: {k: v for k, v in found.items() if k != "runs"} for name, found in record["results"].items()}
    json.dump(shown, sys.stdout, indent=2)
    print()


# --- data ------------------------------------------------------------------------------------------


def _case(name: str, folder: Path, options: argparse.Namespace) -> Case:
    """A query, its tables made."""
    if name.startswith("nexmark_"):
        own = name.removeprefix("nexmark_")
        made = generator.generate(options.events)
        tables = {table: _milliseconds(made[table].rows) for table in whole.TABLES[own]}
        words = set(re.findall(r"\w+", whole.text(own)))
        if own != "q9":
            tables = {t: rows.select([c for c in rows.column_names if c in words]) for t, rows in tables.items()}
        return Case(name, whole.text(own), whole.flink(own), whole.duckdb_text(own), tables)
    one = tpch.query(name)
    if not (folder / "tables").is_dir():
        tpch.tpch_tables(folder / "tables", options.scale, tpch.columns_of([tpch.query(n) for n in tpch.NAMES]))
    tables = {}
    for table, columns in one.columns.items():
        rows = pq.read_table(folder / "tables" / f"{table}.parquet", columns=list(columns))
        tables[table] = rows.cast(pa.schema([pa.field(f.name, _plain(f.type)) for f in rows.schema]))
    return Case(name, one.text, one.text, one.text, tables)


def _plain(kind: pa.DataType) -> pa.DataType:
    """Casts a table to types that Spark knows."""
    return kind if pa.types.is_integer(kind) or pa.types.is_decimal(kind) or pa.types.is_date(kind) else pa.string()


def _milliseconds(rows: pa.Table) -> pa.Table:
    """Times as CSV has them, without a zone."""
    kinds = [pa.timestamp("ms") if pa.types.is_timestamp(field.type) else field.type for field in rows.schema]
    return rows.cast(pa.schema(list(zip(rows.column_names, kinds, strict=True))))


def _write(case: Case, data: Path, files: int) -> int:
    """The tables as CSV files; how many rows they have."""
    plain = csv.WriteOptions(include_header=False, quoting_style="needed")
    for table, rows in case.tables.items():
        (data / table).mkdir(parents=True)
        edges = [rows.num_rows * number // files for number in range(files + 1)]
        for number, (begin, end) in enumerate(itertools.pairwise(edges)):
            path = data / table / f"part-{number:04d}.csv"
            csv.write_csv(rows.slice(begin, end - begin), path, plain)
            os.utime(path, (1_600_000_000 + number,) * 2)
    return sum(rows.num_rows for rows in case.tables.values())


# --- ours ------------------------------------------------------------------------------------------


def changelog(spark: SparkSession, case: Case, data: Path, work: Path, partitions: int) -> DataFrame:
    """The query over the files, one of each table in a micro-batch."""
    tables = {}
    for table, rows in case.tables.items():
        ddl = ", ".join(f"{f.name} {spark_type(f.type).simpleString()}" for f in rows.schema)
        ddl = ddl.replace("timestamp_ntz", "timestamp")
        tables[table] = gpu_ops.read_files(spark, str(data / table), "csv", ddl, maxFilesPerTrigger=1)
    return gpu_ops.sql(case.ours, tables=tables, state=str(work / "state"), partitions=partitions)


def ours(spark: SparkSession, case: Case, data: Path, partitions: int) -> dict[str, Any]:
    """One run of ours, in a new folder."""
    work = Path(tempfile.mkdtemp(prefix="gpu-join-bench-"))
    try:
        before = time.perf_counter()
        measured = run(changelog(spark, case, data, work, partitions), work)
        return measured | {"with_planning": time.perf_counter() - before}
    finally:
        shutil.rmtree(work, ignore_errors=True)


def check(spark: SparkSession, case: Case, data: Path, partitions: int) -> int:
    """Compares our folded changelog with DuckDB's answer; how many rows that has.

    Raises:
        SystemExit: they differ.
    """
    said: list[pa.Table] = []
    # a state server may still be writing a snapshot when its query has ended
    with tempfile.TemporaryDirectory(prefix="gpu-join-bench-", ignore_cleanup_errors=True) as work:
        changes = changelog(spark, case, data, Path(work), partitions)
        writer = changes.writeStream.foreachBatch(lambda rows, _: said.append(rows.toArrow()))
        writer = writer.option("checkpointLocation", f"{work}/checkpoint").trigger(availableNow=True)
        writer.start().awaitTermination()
    with duckdb.connect() as db:
        db.execute("SET TimeZone = 'UTC'")
        for table, rows in case.tables.items():
            db.register(table, rows)
        answer = db.sql(case.answer).to_arrow_table()
        db.register("answer", answer)
        db.register("changelog_changes", pa.concat_tables(said))
        wrong = difference(db, "FROM answer")
    if wrong:
        raise SystemExit(f"{case.name}: {len(wrong)} rows are not DuckDB's, such as {wrong[0]}")
    return int(answer.num_rows)


# --- Flink's ---------------------------------------------------------------------------------------

_KEYS: Final = {**tpch.KEYS, "auction": ("id",)}


def script(case: Case, data: Path) -> str:
    """The statements for Flink."""
    statements = []
    for table, rows in case.tables.items():
        columns = [f"`{field.name}` {_flink_type(field.type)}" for field in rows.schema]
        if TIMES in rows.column_names:
            columns.append(f"WATERMARK FOR `{TIMES}` AS `{TIMES}`")
        if table in _KEYS:
            columns.append(f"PRIMARY KEY ({', '.join(_KEYS[table])}) NOT ENFORCED")
        statements.append(
            f"CREATE TABLE {table} ({', '.join(columns)}) WITH ('connector' = 'filesystem', 'format' = 'csv', "
            f"'path' = '{data / table}')"
        )
    query = case.flink.strip()
    statements.append(f"CREATE TABLE answer WITH ('connector' = 'blackhole') AS {query}")
    return "\n\n".join(statements)


def _flink_type(kind: pa.DataType) -> str:
    if pa.types.is_timestamp(kind):
        return "TIMESTAMP(3)"
    return {"int64": "BIGINT", "int32": "INT", "date32[day]": "DATE", "string": "STRING"}.get(
        str(kind), f"DECIMAL({getattr(kind, 'precision', 0)}, {getattr(kind, 'scale', 0)})"
    )


def _best(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The fastest: in one JVM they differ by half, as the garbage of those before falls into one or another."""
    return min(runs, key=lambda found: float(found["seconds"]))


def measure(spark: SparkSession, case: Case, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One query: checked, then ours and Flink's in turns."""
    data = folder / case.name
    rows = _write(case, data, options.files)
    answers = {check(spark, case, data, count) for count in options.partitions}
    cases: dict[str, Any] = {
        f"ours_{count}": again(lambda count=count: ours(spark, case, data, count)) for count in options.partitions
    }
    for parallelism in [] if options.no_flink else options.parallelism:
        text = [script(case, data)] * (options.warmup + 1)
        cases[f"flink_{parallelism}"] = lambda text=text, tasks=parallelism: _best(run_sql(text, tasks)[1:])
    for _ in range(options.warmup // 2):  # the check was one, and each has one of its own
        for count in options.partitions:
            cases[f"ours_{count}"]()
    runs = interleave(cases, options.rounds)
    shutil.rmtree(data)
    rates = {name: summarise(rows / found["seconds"] for found in measured) for name, measured in runs.items()}
    own = max((name for name in rates if name.startswith("ours")), key=lambda name: rates[name].median)
    rates["ours_with_planning"] = summarise(rows / found["with_planning"] for found in runs[own])
    medians, batches = {n: round(r.median) for n, r in rates.items()}, [r["batch_seconds"] for r in runs[own]]
    print(case.name, medians, batches, file=sys.stderr, flush=True)
    if options.no_flink:
        return {}
    best = max((name for name in rates if name.startswith("flink")), key=lambda name: rates[name].median)
    return {
        "rows": rows,
        "answer_rows": answers.pop(),
        "partitions": options.partitions,
        "warmup": options.warmup,
        "processor": machine()["processor"],
        "measured": time.strftime("%Y-%m-%d"),
        "rows_per_second": rates,
        "ours_best": own,
        "flink_best": best,
        "over_flink": ratio(rates[own], rates[best]),
        "with_planning_over_flink": ratio(rates["ours_with_planning"], rates[best]),
        "rounds": options.rounds,
        "load_1_minute": round(os.getloadavg()[0], 2),
        "runs": runs,
    }


if __name__ == "__main__":
    main()
