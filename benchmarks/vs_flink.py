"""Left join with 20 % updates and deletes: our query on Spark `local[2]` against Flink 2.3.0, same CSV files.

Both read the files, join, and write to a sink that only counts, and both do so twice. Ours reads them by Spark's own
CSV reader, and by Arrow's (`gpu_ops.read_files`: the cases that end in `_arrow`, and `write_files`, which does not
count but writes Parquet by `gpu_ops.write_files`); `flink_sql` by Flink's file connector and CSV format, `flink_lean`
by a parser of the benchmark that makes Flink's internal rows out of bytes, which no user has. Start-up is left out on
both sides: Flink is measured from the first row read to the last row written, ours from the start of the first micro-
batch to the end of the last; each in a JVM that has read the same changes `--warmup` times before. Flink runs without
checkpoints and with its state on the heap; ours writes its state durably. Both folded results are checked against the
counts the generator knows.

With `--multi` it is the left join of three inputs on one key, 500k changes each by default: our multi-way join and our
chain of two joins, against Flink's multi-way join (FLIP-516) and its binary chain, both at parallelism 2. What both
keep is reported side by side: our state bytes, and the Flink JVM's live objects when nearly all rows are out.

    python -m benchmarks.vs_flink [--multi] [--rows 2000000] [--batch 500000] [--rounds 3] [--warmup 2]
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from benchmarks import changes
from benchmarks.common import again, arguments, interleave, ratio, record, summarise
from benchmarks.flink.run import run_flink
from benchmarks.spark_queries import Reader, Sink, fresh, local_session, no_op, our_chain, our_join, our_multi_join

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Query = Callable[..., "DataFrame"]
Source = Literal["sql", "lean"]
SOURCES: Final[tuple[Source, ...]] = ("sql", "lean")
EMITS: Final = ("per_batch", "per_event")
OURS: Final[dict[str, tuple[str, Reader]]] = {
    f"{emit}{suffix}": (emit, reader) for emit in EMITS for suffix, reader in (("", "spark"), ("_arrow", "arrow"))
}
"""Our queries by name: what they emit, and whose reader the files go through."""


def main() -> None:
    """Run, check, print, record."""
    parser = arguments(__doc__, "vs_flink", rounds=3)
    parser.add_argument("--multi", action="store_true", help="three inputs, one operator")
    parser.add_argument("--rows", type=int, help="changes, all inputs together; 2M, with --multi 1.5M")
    parser.add_argument("--batch", type=int, default=500_000, help="changes in one of our micro-batches")
    parser.add_argument("--warmup", type=int, default=2, help="runs in a JVM before the one that counts")
    parser.add_argument("--cases", nargs="+", help="only these of the two-way join, such as write_files flink_sql_2")
    options = parser.parse_args()
    name = "vs_flink_multi" if options.multi else "vs_flink"
    if options.out.stem == "vs_flink":
        options.out = options.out.with_stem(name)
    options.rows = options.rows or (1_500_000 if options.multi else 2_000_000)
    with tempfile.TemporaryDirectory(prefix="gpu-join-data-") as folder:
        data = Path(folder)
        generated = changes.generate(options.rows, inputs=3 if options.multi else 2)
        counts = changes.write(generated, data, files=round(options.rows / options.batch))
        results = (multi if options.multi else two_way)(data, counts, options)
    record(options, name, results, master="local[2]")


def checked(query: Callable[[Path], DataFrame], counts: changes.Counts, sink: Sink = "noop") -> dict[str, Any]:
    """One of our queries in a new folder, its result right."""
    result = fresh(query, sink)
    if result["folded_rows"] != counts.rows:
        raise SystemExit(f"wrong result: {result['folded_rows']} rows, {counts.rows} expected")
    return result


def flink(data: Path, warmup: int, source: Source, parallelism: int, **modes: bool) -> dict[str, Any]:
    """The last of several runs in one JVM of Flink."""
    result = run_flink(data, parallelism, source=source, repeat=warmup + 1, **modes)
    kept = {k: result[k] for k in ("rows_in", "rows_out", "folded")}
    return {"seconds": result["seconds"][-1], "cpu_seconds": result["cpu_seconds"][-1], **kept}


def two_way(data: Path, counts: changes.Counts, options: argparse.Namespace) -> dict[str, Any]:
    """Measures one left join."""
    arrow_rows = bool(options.cases) and all(re.match("flink|write_files|.*_arrow", name) for name in options.cases)
    spark = local_session(arrow_rows=arrow_rows)
    cases: dict[str, Callable[[], dict[str, Any]]] = {}
    for name, way in OURS.items():
        cases[name] = partial(checked, partial(_ours, our_join, spark, data, *way), counts)
    files = partial(_ours, our_join, spark, data, "per_batch", "arrow")
    cases["write_files"] = partial(checked, files, counts, "write_files")
    for source in SOURCES:
        run = partial(flink, data, options.warmup, source)
        cases[f"flink_{source}_1"] = partial(run, 1)
        cases[f"flink_{source}_2"] = partial(run, 2)
        cases[f"flink_{source}_2_mini_batch"] = partial(run, 2, mini_batch=True)
    cases = {name: case for name, case in cases.items() if name in (options.cases or cases)}
    ours = [name for name in cases if not name.startswith("flink")]
    for _ in range(options.warmup):
        for name in ours:
            cases[name]()
    runs = interleave({name: again(case) if name in ours else case for name, case in cases.items()}, options.rounds)
    spark.stop()
    rates = {name: summarise(r["rows_in"] / r["seconds"] for r in rs) for name, rs in runs.items()}
    results: dict[str, Any] = {"changes_per_second": rates}
    for source in SOURCES:
        # Flink's best parallelism and mode
        theirs = [name for name in rates if name.startswith(f"flink_{source}")]
        if theirs:
            best = max(theirs, key=lambda name: rates[name].median)
            results[f"flink_{source}"] = {"best": best} | {name: ratio(rates[name], rates[best]) for name in ours}
    return {**results, "runs": runs}


def multi(data: Path, counts: changes.Counts, options: argparse.Namespace) -> dict[str, Any]:
    """Two left joins on one key, in one operator or one after the other."""
    spark = local_session()
    ours: dict[str, Callable[[], dict[str, Any]]] = {}
    for name, way in OURS.items():
        ours[name] = partial(checked, partial(_ours, our_multi_join, spark, data, *way), counts)
    ours["chain"] = partial(checked, lambda work: our_chain(spark, data, work, 1, emit="per_batch"), counts)
    ours["no_op"] = partial(fresh, lambda work: no_op(spark, data, 1, 2))
    cases = dict(ours)
    for source in SOURCES:
        for mode in (True, False):
            name = f"flink_{source}_{'multi_join' if mode else 'chain'}"
            cases[name] = partial(flink, data, options.warmup, source, 2, multi_join=mode)
    for _ in range(options.warmup):
        for case in ours.values():
            case()
    runs = interleave({name: again(case) if name in ours else case for name, case in cases.items()}, options.rounds)
    spark.stop()
    rates = {name: summarise(r["rows_in"] / r["seconds"] for r in rs) for name, rs in runs.items()}
    results: dict[str, Any] = {"changes_per_second": rates}
    for source in SOURCES:
        best = max((name for name in rates if name.startswith(f"flink_{source}")), key=lambda name: rates[name].median)
        results[f"flink_{source}"] = {"best": best} | {case: ratio(rates[case], rates[best]) for case in ours}
    return {**results, "kept": _kept(data, runs), "runs": runs}


def _kept(data: Path, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """State, side by side: an intermediate result is what a chain keeps besides its inputs."""
    kept: dict[str, Any] = {f"ours_{name}": runs[name][-1]["state_bytes"] for name in ("per_batch", "chain")}
    for mode in (True, False):
        rows = runs[f"flink_sql_{'multi_join' if mode else 'chain'}"][-1]["rows_out"]
        heaps = [
            run_flink(data, 2, multi_join=mode, heap_at_row=at)["heap_bytes"] for at in (1, rows - rows // 100)
        ]  # the heap when nothing is kept yet is taken off
        kept[f"flink_{'multi_join' if mode else 'chain'}_heap"] = heaps[1] - heaps[0]
    return kept


def _ours(query: Query, spark: SparkSession, data: Path, emit: str, reader: Reader, work: Path) -> DataFrame:  # noqa: PLR0917
    return query(spark, data, work, 1, emit=emit, reader=reader)


if __name__ == "__main__":
    main()
