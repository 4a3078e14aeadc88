"""The README's table of figures, made from the committed results: `python -m benchmarks.report`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"

#: Both with their state on the heap and without checkpoints, at their best parallelism.
PEERS = {
    "flink_sql": "Flink 2.3.0 with its own CSV connector (heap state, no checkpoints)",
    "flink_lean": "Flink 2.3.0 with a parser written for the benchmark (heap state, no checkpoints)",
}

#: Whose reader our query's files go through, by the end of the case's name.
READERS = {"": "Spark's CSV reader", "_arrow": "`read_files`"}


def load(name: str) -> dict[str, Any]:
    """One committed result file."""
    data: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return data


def spread(ratio: dict[str, float], digits: int = 2) -> str:
    """A ratio of medians with the least and the greatest that the runs allow."""
    return f"{ratio['median']:.{digits}f} ({ratio['low']:.{digits}f}–{ratio['high']:.{digits}f})"


def rate(summary: dict[str, Any]) -> str:
    """Millions a second."""
    return f"{summary['median'] / 1e6:.2f}M/s"


def report() -> str:
    """The table and where it comes from, as Markdown."""
    engine, limit, flink = load("engine"), load("pipeline_limit"), load("vs_flink")
    e, g = engine["results"]["engine"], engine["results"]["state_growth"]
    rows = [
        (
            "engine, `per_batch`, time over one polars join of the same rows at once",
            spread(e["per_batch"]["times_polars"]),
            "engine",
        ),
        ("engine, `per_event`, the same", spread(e["per_event"]["times_polars"]), "engine"),
        (
            f"100k changes at {g['large_state_rows'] // 10**6}M state rows over the same at 100k",
            spread(g["times"]),
            "engine",
        ),
        (
            "state, bytes per row over its Arrow size",
            f"{e['state_memory']['over_arrow_size']:.0f}",
            "engine",
        ),
        (
            "Spark query, rate over the same pipeline with a no-op `mapInArrow`",
            spread(limit["results"]["query_over_no_op"]),
            "pipeline_limit",
        ),
        (
            "the same with `read_files`",
            spread(limit["results"]["query_arrow_over_no_op"]),
            "pipeline_limit",
        ),
        *(
            (
                f"Spark query, durable state, `{emit}`, {reader}: rate over {peer}",
                spread(flink["results"][name][f"{emit}{suffix}"]),
                "vs_flink",
            )
            for emit in ("per_batch", "per_event")
            for suffix, reader in READERS.items()
            for name, peer in PEERS.items()
        ),
    ]
    rows += [
        *multi_rows(),
        *sink_rows(),
        *nexmark_rows(),
        *interval_rows(),
        *by_time_rows(),
        *aggregate_rows(),
        *at_end_rows(),
    ]
    lines = ["| what | ratio of medians (range) | benchmark |", "|---|---|---|"]
    lines += [f"| {what} | {figure} | `{name}` |" for what, figure, name in rows]
    machine, versions = flink["machine"], flink["versions"]
    where = f"{machine['processor'].strip()}, {machine['cores']} cores, {machine['memory_gib']:.0f} GiB"
    names = ("python", "pyspark", "pyarrow", "numpy", "pandas")
    used = ", ".join(f"{name} {versions[name]}" for name in names if name in versions)
    lines += [
        "",
        f"{where}; {used}; {flink['time'][:10]}. `make bench` runs them; all runs: `benchmarks/results`.",
    ]
    return "\n".join(lines)


def multi_rows() -> list[tuple[str, str, str]]:
    """The lines about a left join of three inputs."""
    results = load("vs_flink_multi")["results"]
    return [
        (
            f"left join of three inputs, durable state, `per_batch`, {reader}: rate over {peer}, its better plan",
            spread(results[name][f"per_batch{suffix}"]),
            "vs_flink --multi",
        )
        for suffix, reader in READERS.items()
        for name, peer in PEERS.items()
    ]


def sink_rows() -> list[tuple[str, str, str]]:
    """The lines about the way out."""
    kafka = load("vs_flink_kafka")
    connector = kafka["settings"]["connector"].removesuffix(".jar").removeprefix("flink-sql-connector-kafka-")
    what = f"Kafka JSON in and out, inner join, durable state: rate over Flink 2.3.0's connector {connector}"
    where = f"heap state, no checkpoints; {kafka['machine']['processor'].strip()}, {kafka['time'][:10]}"
    return [(f"{what} ({where})", spread(kafka["results"]["ours_over_flink"]), "flink.kafka")]


def nexmark_rows() -> list[tuple[str, str, str]]:
    """The lines about Nexmark's queries in SQL, where Spark's own join can run them; a single round says nothing."""
    found = load("nexmark")["results"]
    names = [n for n in found if "over_spark" in found[n] and len(found[n]["events_per_second"]["spark"]["values"]) > 1]
    rows = []
    for ratio, reader in (("over_spark", "Spark's Parquet reader"), ("arrow_over_spark", "`read_files`")):
        ratios = ", ".join(f"{name} {found[name][ratio]['median']:.1f}" for name in names)
        rows.append(
            (f"Nexmark in SQL, {reader}: rate over Spark's own stream-stream join, by query", ratios, "nexmark")
        )
    return rows if names else []


def at_end_rows() -> list[tuple[str, str, str]]:
    """The lines about the end of input."""
    results = load("at_end")["results"]
    rows = []
    for what, name in (("left join", "left"), ("co-group", "co_group")):
        of = f"{what} at the end of {2 * results['rows_per_input'] // 10**6}M rows of Parquet"
        text = f"{of}, time over polars reading and joining them"
        rows.append((text, spread(results[f"{name}_times_polars"]), "at_end"))
        stream = "the same join" if name == "left" else "the full join"
        rows.append((f"{of}, rate over {stream} `per_batch`", spread(results[f"{name}_times_per_batch"]), "at_end"))
    return rows


def by_time_rows() -> list[tuple[str, str, str]]:
    """The lines about temporal and ASOF joins."""
    flink, asof, soak = load("vs_flink_temporal"), load("asof"), load("by_time")["results"]["temporal join"]
    million, ratios = flink["settings"]["rows"] // 10**6, flink["results"]["over_flink"]
    peer = f"Flink SQL {flink['settings']['flink']} (heap state, no checkpoints; {flink['time'][:10]})"
    of = f"temporal join of {million}M rows of CSV, durable state"
    rows = [
        (f"{of}, `read_files`: rate over {peer}", spread(ratios["ours_arrow"]), "flink.temporal"),
        ("the same with Spark's CSV reader", spread(ratios["ours_spark"]), "flink.temporal"),
    ]
    for found in asof["results"]["beside_polars"]:
        of = f"ASOF join, `per_batch`, {found['rows'] // 10**6}M trades and as many quotes of {found['keys']:,} keys"
        rows.append((f"{of}, time over polars' `join_asof` of all rows at once", spread(found["times_polars"]), "asof"))
    hot = asof["results"]["hot_key"]
    of = f"ASOF join, time of a micro-batch with a key of {hot['versions']:,} versions over the same without"
    rows.append((of, f"{hot['times_without']:.2f}", "asof"))
    memory = soak["last_quarter_over_second"]["resident_bytes"]
    of = f"temporal join, memory in the last quarter of {soak['batches']} micro-batches over the second"
    return [*rows, (of, f"{memory:.2f}", "by_time")]


def aggregate_rows() -> list[tuple[str, str, str]]:
    """The lines about aggregates."""
    rows = []
    for found in load("aggregate")["results"]["beside_polars"]:
        if found["micro_batches"] > 1:
            taken = ", a tenth taken back" if found["retractions"] else ""
            of = f"six aggregates of {found['rows'] // 10**6}M rows by {found['products']:,} keys{taken}, `per_batch`"
            text = f"{of}, time over polars' `group_by` of all rows at once"
            rows.append((text, spread(found["times_polars"]), "aggregate"))
    return rows


def interval_rows() -> list[tuple[str, str, str]]:
    """The lines about interval joins: ours over Spark's own join, and the engine on its own."""
    spark, engine = load("vs_spark"), load("interval")
    version = spark["versions"]["pyspark"]
    peers = {"default": "default state store", "rocksdb": f"RocksDB, join state format {spark['settings']['format']}"}
    rows = []
    for how, found in spark["results"].items():
        for peer, store in peers.items():
            if f"times_{peer}" in found:
                what = f"interval join, {how}, durable state: rate over Spark {version}'s own join ({store})"
                rows.append((what, spread(found[f"times_{peer}"], 1), "vs_spark"))
    hot, soak = engine["results"]["hot_key"], engine["results"]["soak"]
    return [
        *rows,
        (
            f"interval join, time of a micro-batch with a key of {hot['hot_key_rows']:,} rows over the same without",
            spread(hot["times"]),
            "interval",
        ),
        (
            f"interval join, memory in the last quarter of {soak['batches']} micro-batches over the second",
            f"{soak['last_quarter_over_second']['resident_bytes']:.2f}",
            "interval",
        ),
    ]


if __name__ == "__main__":
    print(report())
