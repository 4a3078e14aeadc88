"""The figures of README and docs/measured.md, from the committed results: `python -m benchmarks.report` writes them.

And docs/measured.md as one file of HTML, build/measured.html.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import LEAST_RUNS, between
from benchmarks.peers import page
from benchmarks.standalone import standalone

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


Row = tuple[str, str, str]


def sections() -> dict[str, list[Row]]:
    """The measurements beside peers, by title: rows, their unit, and the benchmark."""
    return {
        "Beside Flink": [
            *flink_rows(),
            *multi_rows(),
            *temporal_rows(),
            *kafka_rows(),
            *tpch_rows(),
            *disk_rows("flink"),
        ],
        "Beside Spark's own joins and writer": [*spark_rows(), *nexmark_rows(), *sink_rows(), *disk_rows("spark")],
        "Beside one batch join by polars": [*polars_rows(), *asof_rows(), *aggregate_rows(), *at_end_rows()],
        "Beside itself, and beside a pipeline that does nothing": [
            *limit_rows(),
            *growth_rows(),
            *state_rows(),
            *change_rows(),
        ],
    }


def table(rows: Sequence[Row]) -> str:
    """Rows as a Markdown table."""
    lines = ["| what | ratio of medians (range) | benchmark |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {what} | {figure} | `{name}` |" for what, figure, name in rows)])


def report() -> str:
    """All figures, as Markdown with a table for each section."""
    parts = [f"## {title}\n\n{table(rows)}" for title, rows in sections().items()]
    record = load("peers")
    return "\n\n".join([f"{page.section(record)}\n\n{where(record)}", *parts, f"## On a GPU\n\n{on_a_card()}"])


def card() -> dict[str, Any]:
    """The newest results of a card."""
    return load(max(RESULTS.glob("gpu-*.json"), key=lambda file: file.stem[-10:]).stem)


def on_a_card() -> str:
    """The rates measured on a card, as Markdown."""
    record = card()
    found, device = record["results"], record["results"]["device"]
    lines = ["| what, from Arrow to Arrow | changes a second | the join alone |", "|---|---|---|"]
    for one in (*found["regular"], *found["probes"], *found["sweep"]):
        if "plain" in one:
            what = f"left join, `{one['emit']}`, {one['rows']:,} state rows, {one['changes']:,} changes a micro-batch"
            way = f', `probe="{one["probe"]}"`' if one in found["probes"] else ""
            lines.append(_rates(what + way, one))
    for name, part in (("interval join", "interval"), ("left join of three inputs", "multi_way")):
        lines += [_rates(f"{name}, `{one['emit']}`, growing from nothing", one) for one in found[part]]
    lines += [_rates(f"left join on the CPU, one core, {one['rows']:,} state rows", one) for one in found["cpu"][:2]]
    end = found["at_end"]
    whole = f"{end['changes_per_second'] / 1e6:.1f}M"
    lines.append(f"| left join at the end of input, {end['rows_per_input']:,} rows each | {whole} | |")
    ways = ["| keys looked up | in rows | by search, ms | by a hash join, ms |", "|---|---|---|---|"]
    for one in found["probe"]["sizes"]:
        times = (f"{one[way]['ms']['median']:.2f}" for way in ("search", "search_by_join"))
        ways.append(f"| {one['needles']:,} | {one['rows']:,} | {' | '.join(times)} |")
    names = ("python", "pylibcudf", "cupy", "pyarrow", "numpy")
    used = ", ".join(f"{name} {record['versions'][name]}" for name in names)
    host = f"{device['name']}, driver {device['driver']}, a host of {record['machine']['cores']} cores; {used}"
    text = "The engine alone, in one process without Spark. Runs of one case are up to a quarter apart on that machine."
    when = f"{host}; {record['time'][:10]}. `python -m benchmarks.gpu.bench`"
    return "\n".join([text, "", *lines, "", *ways, "", when])


def _rates(what: str, one: dict[str, Any]) -> str:
    whole, alone = one["plain"]["changes_per_second"], one["watched"]["changes_per_second_join_alone"]
    cold = " (one cold micro-batch, to be measured again)" if len(one["plain"]["ms"]["values"]) < LEAST_RUNS else ""
    return f"| {what}{cold} | {whole / 1e6:.1f}M | {alone / 1e6:.1f}M |"


def card_sentence() -> str:
    """The figure of a card that stands for the others."""
    record = card()
    found = record["results"]
    large = max((one for one in found["regular"] if "plain" in one), key=lambda one: (one["rows"], -len(one["emit"])))
    (cpu,) = (one for one in found["cpu"] if (one["rows"], one["emit"]) == (large["rows"], large["emit"]))
    rate, over = (one["plain"]["changes_per_second"] for one in (large, cpu))
    return (
        f"On one {found['device']['name']} the engine takes {rate / 1e6:.0f}M changes a second from Arrow to Arrow: "
        f"a left join of {large['rows'] // 10**6}M rows of state in GPU memory, {large['changes'] // 10**6}M changes a "
        f"micro-batch, {rate / over:.0f} times the CPU engine on one core of the host "
        f"({record['time'][:10]}; without Spark)."
    )


def summary() -> str:
    """The six figures that stand for the others, and where they come from, as Markdown."""
    flink, multi, spark = load("vs_flink"), load("vs_flink_multi")["results"], load("vs_spark")
    peers = load("peers")
    inserts, changes = (peers["results"][query]["ours_over"] for query in ("inserts", "changes"))
    version, peer_version = (record["versions"]["pyspark"] for record in (spark, peers))
    files = "CSV files read by `read_files`"
    rows = [
        (f"left join, {files}", "Flink 2.3.0", flink["results"]["flink_sql"]["per_batch_arrow"]),
        (f"left join of three inputs, {files}", "Flink 2.3.0", multi["flink_sql"]["per_batch_arrow"]),
        (f"temporal join, {files}", "Flink 2.3.0", load("vs_flink_temporal")["results"]["over_flink"]["ours_arrow"]),
        ("interval join, inner", f"Spark {version}'s own", spark["results"]["inner"]["times_default"]),
        ("inner join, files in, files out", f"Spark {peer_version}'s own", inserts["spark"]),
        ("left join of changes, files in, files out", "Pathway 0.33", changes["pathway"]),
    ]
    lines = ["| rate of a query with durable state, on two cores | over | times (range) |", "|---|---|---|"]
    lines += [f"| {what} | {peer} | {spread(found, 1)} |" for what, peer, found in rows]
    by_origin: dict[str, list[str]] = {}
    for what, record in (("Beside Flink", flink), ("Interval join", spark), ("the last two rows", peers)):
        by_origin.setdefault(where(record), []).append(what)
    lines += ["", *(f"{' and '.join(whose)}: {origin}" for origin, whose in by_origin.items())]
    return "\n".join([*lines, "", card_sentence()])


def where(record: dict[str, Any]) -> str:
    """The machine and the versions of a result, in a line."""
    machine, versions = record["machine"], record["versions"]
    names = ("python", "pyspark", "pyarrow", "numpy", "pandas")
    used = ", ".join(f"{name} {versions[name]}" for name in names if name in versions)
    cores = f"{machine['cores']} cores, {machine['memory_gib']:.0f} GiB"
    return f"{machine['processor'].strip()}, {cores}; {used}; {record['time'][:10]}."


def polars_rows() -> list[Row]:
    """The lines about the engine alone."""
    found = load("engine")["results"]["engine"]
    what = "left join, engine alone, time over one polars join of the same rows at once"
    return [(f"{what}, `{emit}`", spread(found[emit]["times_polars"]), "engine") for emit in ("per_batch", "per_event")]


def growth_rows() -> list[Row]:
    """The lines about what a state costs as it grows and as time passes."""
    engine, interval, asof = load("engine")["results"], load("interval")["results"], load("asof")["results"]["hot_key"]
    growth, hot, soak = engine["state_growth"], interval["hot_key"], interval["soak"]
    temporal = load("by_time")["results"]["temporal join"]
    bytes_over = engine["engine"]["state_memory"]["over_arrow_size"]
    with_hot = "time of a micro-batch with a key of {:,} {} over the same without"
    over = "memory in the last quarter of {} micro-batches over the second"
    return [
        (
            f"100k changes at {growth['large_state_rows'] // 10**6}M state rows over the same at 100k",
            spread(growth["times"]),
            "engine",
        ),
        (
            "state, bytes per row over its Arrow size",
            f"{bytes_over:.0f}",
            "engine",
        ),
        (f"interval join, {with_hot.format(hot['hot_key_rows'], 'rows')}", spread(hot["times"]), "interval"),
        (f"ASOF join, {with_hot.format(asof['versions'], 'versions')}", f"{asof['times_without']:.2f}", "asof"),
        (
            f"interval join, {over.format(soak.get('batches', 200))}",
            f"{soak['last_quarter_over_second']['resident_bytes']:.2f}",
            "interval",
        ),
        (
            f"temporal join, {over.format(temporal['batches'])}",
            f"{temporal['last_quarter_over_second']['resident_bytes']:.2f}",
            "by_time",
        ),
    ]


def state_rows() -> list[Row]:
    """The lines about a state that is larger than memory, and about what keeps it."""
    large, found = load("large_state"), load("restarts")
    names = {"join": "left join", "aggregate": "count and sum"}
    keys = {"uniform": "any key as likely as another", "recent": "nine in ten keys among the newest tenth"}
    of = f"time of a micro-batch of {large['settings']['batch']:,} rows over the same in memory"
    command = f"large_state --rows {large['settings']['rows']}"
    rows = []
    for operator, name in names.items():
        for kind, how in keys.items():
            what = f"{name}, {large['settings']['times']} times as much state as memory, {how}: {of}"
            rows.append((what, spread(large["results"][f"{operator}-{kind}"]["times"], 1), command))
    results, settings = found["results"], found["settings"]
    million = round((settings["rows"] + 1.25 * settings["batch"] * settings["batches"]) / 1e6)
    join = f"left join, {million}M rows of state, {settings['batches']} micro-batches of {settings['batch']:,}"
    written = f"{results['log_and_snapshots_over_changes']:.2f}"
    start = "from the new session to the end of the first micro-batch over that of an application without state"
    return [
        *rows,
        (
            f"{join}: time of those that wrote to a snapshot over the others",
            spread(results["with_snapshot_over_without"]),
            "restarts",
        ),
        ("the same: bytes of the log and of snapshots over those of the changes in Arrow", written, "restarts"),
        (f"the same, killed: time {start}", spread(results["start_over_that_without_state"]), "restarts"),
    ]


def change_rows() -> list[Row]:
    """The lines about what a change of a query costs."""
    found = load("change")
    rows = f"an aggregate put above a join with {found['settings']['rows'] // 10**6}M rows of state on either side"
    return [
        (f"{rows}: time of the change and the first micro-batch over that of the aggregate alone in an engine",
         spread(found["results"]["change_over_aggregate"], 0), "change"),
        ("the same: over that of the new query begun anew over the same local files",
         spread(found["results"]["change_over_anew"]), "change"),
    ]  # fmt: skip


def disk_rows(system: str) -> list[Row]:
    """The lines about a state that is larger than memory, ours beside RocksDB's."""
    found = load("large_state_peers")
    settings, spark = found["settings"], f"Spark {found['versions']['pyspark']}'s own"
    flink = f"Flink SQL {settings['flink']} on RocksDB"
    names = {
        "flink": f"{flink}, no checkpoints",
        "flink_checkpoints": f"{flink}, incremental checkpoints",
        "spark_left": f"{spark} left interval join on RocksDB",
        "spark_inner": f"{spark} inner join on RocksDB, without a watermark",
    }
    of = f"left join, {settings['times']} times as many bytes of orders as memory for state"
    kinds = {"uniform": "any key as likely as another", "recent": "nine in ten keys among the newest tenth"}
    command, rows = f"large_state_peers --rows {settings['rows']}", []
    for name, over in found["results"]["seconds_over_ours"].items():
        if name.startswith(system):
            rows += [
                (f"{of}, {how}: rate over {names[name]}", spread(over[kind], 1), command) for kind, how in kinds.items()
            ]
            rows.append((f"the same, loading the orders: rate over {names[name]}", f"{over['load']:.1f}", rows[-1][2]))
    return rows


def limit_rows() -> list[Row]:
    """The lines about the pipeline around a join."""
    found, what = (
        load("pipeline_limit")["results"],
        "Spark query, rate over the same pipeline with a no-op `mapInArrow`",
    )
    return [
        (what, spread(found["query_over_no_op"]), "pipeline_limit"),
        ("the same with `read_files`", spread(found["query_arrow_over_no_op"]), "pipeline_limit"),
        *_small_rows(),
    ]


def _small_rows() -> list[Row]:
    """The lines about small micro-batches."""
    found = load("small_batches")
    of = f"micro-batches of {found['settings']['batch']:,} rows: time of {{}} over Spark's scan of them alone"
    names = {"query": "a query", "query_arrow": "one with `read_files`", "no_op": "a no-op `mapInArrow`"}
    return [
        (of.format(what), spread(found["results"][f"{name}_times_scan"]), "pipeline_limit --batch 2000")
        for name, what in names.items()
    ]


def flink_rows() -> list[Row]:
    """The lines about a left join of two inputs."""
    found, written = load("vs_flink")["results"], load("vs_flink_files")["results"]["flink_sql"]["write_files"]
    what = "left join, `per_batch`, 6M changes, `read_files` to Parquet by `write_files`"
    return [
        (
            f"{what}: rate over {PEERS['flink_sql']}, which writes nothing",
            spread(written),
            "vs_flink --cases write_files flink_sql_1 flink_sql_2",
        ),
    ] + [
        (f"left join, `{emit}`, {reader}: rate over {peer}", spread(found[name][f"{emit}{suffix}"]), "vs_flink")
        for emit in ("per_batch", "per_event")
        for suffix, reader in READERS.items()
        for name, peer in PEERS.items()
    ]


def multi_rows() -> list[Row]:
    """The lines about a left join of three inputs."""
    results = load("vs_flink_multi")["results"]
    return [
        (
            f"left join of three inputs, `per_batch`, {reader}: rate over {peer}, its better plan",
            spread(results[name][f"per_batch{suffix}"]),
            "vs_flink --multi",
        )
        for suffix, reader in READERS.items()
        for name, peer in PEERS.items()
    ]


def sink_rows() -> list[Row]:
    """The line about `write_files`."""
    found = load("pipeline_limit")["results"]["write_files_over_spark_parquet"]
    return [("left join to Parquet by `write_files`: rate over Spark's writer", spread(found), "pipeline_limit")]


def kafka_rows() -> list[Row]:
    """The lines about Kafka in and out."""
    found = load("vs_flink_kafka")
    connector = found["settings"]["connector"].removesuffix(".jar").removeprefix("flink-sql-connector-kafka-")
    date = f"heap state, no checkpoints; {found['machine']['processor'].strip()}, {found['time'][:10]}"
    cases = {
        "ours": "by Spark's reader and sink, the same messages", "ours_with_headers": "ours with the header `sequence`"
    }  # fmt: skip
    what = f"Kafka JSON in and out, inner join: rate over Flink 2.3.0's connector {connector}"
    return [
        (f"{what}, {how} ({date})", spread(found["results"][f"{case}_over_flink"]), "flink.kafka")
        for case, how in cases.items()
        if f"{case}_over_flink" in found["results"]
    ]


def nexmark_rows() -> list[Row]:
    """The lines about Nexmark's queries in SQL, where Spark's own join can run them; a single round says nothing."""
    rows = []
    for data in (load("nexmark"), load("nexmark_large")):
        found, size = data["results"], f"{data['settings']['events'] / 1e6:g}M events"
        names = [
            n for n in found if "over_spark" in found[n] and len(found[n]["events_per_second"]["spark"]["values"]) > 1
        ]
        for ratio, reader in (("over_spark", "Spark's Parquet reader"), ("arrow_over_spark", "`read_files`")):
            ratios = ", ".join(f"{name} {found[name][ratio]['median']:.1f}" for name in names)
            what = f"Nexmark in SQL, {size}, {reader}: rate over Spark's own stream-stream join, by query"
            rows += [(what, ratios, "nexmark")] if names else []
    return rows


def at_end_rows() -> list[Row]:
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


def temporal_rows() -> list[Row]:
    """The lines about temporal joins."""
    flink = load("vs_flink_temporal")
    million, ratios = flink["settings"]["rows"] // 10**6, flink["results"]["over_flink"]
    peer = f"Flink SQL {flink['settings']['flink']} (heap state, no checkpoints; {flink['time'][:10]})"
    return [
        (
            f"temporal join of {million}M rows of CSV, `read_files`: rate over {peer}",
            spread(ratios["ours_arrow"]),
            "flink.temporal",
        ),
        ("the same with Spark's CSV reader", spread(ratios["ours_spark"]), "flink.temporal"),
    ]


def asof_rows() -> list[Row]:
    """The lines about ASOF joins."""
    rows = []
    for found in load("asof")["results"]["beside_polars"]:
        of = f"ASOF join, `per_batch`, {found['rows'] // 10**6}M trades and as many quotes of {found['keys']:,} keys"
        rows.append((f"{of}, time over polars' `join_asof` of all rows at once", spread(found["times_polars"]), "asof"))
    return rows


def aggregate_rows() -> list[Row]:
    """The lines about aggregates."""
    rows = []
    for found in load("aggregate")["results"]["beside_polars"]:
        if found["micro_batches"] > 1:
            taken = ", a tenth of them retracted later" if found["retractions"] else ""
            of = f"six aggregates of {found['rows'] // 10**6}M rows by {found['products']:,} keys{taken}, `per_batch`"
            text = f"{of}, time over polars' `group_by` of all rows at once"
            rows.append((text, spread(found["times_polars"]), "aggregate"))
            rows.append(("the same, of the time outside the kernel", spread(found["times_polars_user"]), "aggregate"))
            if found["retractions"]:
                text = "the same, where polars is given the same changes, and groups them by all columns first"
                rows.append((text, spread(found["times_polars_of_changes"]), "aggregate"))
    return rows


def tpch_rows() -> list[Row]:
    """Queries of TPC-H and Nexmark beside Flink SQL, each from its first micro-batch to its last."""
    rows = []
    for data in (load("tpch"), load("tpch_large")):
        settings = data["settings"]
        sizes = f"scale {settings['scale']:g}", f"{settings['events'] / 1e6:g}M events"
        for name, found in data["results"].items():
            kind, query = ("Nexmark", name.removeprefix("nexmark_")) if name.startswith("nexmark_") else ("TPC-H", name)
            size = f"{sizes[kind == 'Nexmark']}, {settings['files']} micro-batches"
            where = f"{found['processor'].split('(')[0].strip()}, {found['measured']}"
            what = f"{kind} {query.upper()}, {size}, `read_files` (CSV), over Flink SQL ({where})"
            rows.append((what, spread(found["over_flink"]), "benchmarks.tpch"))
    return rows


def spark_rows() -> list[Row]:
    """The lines about interval joins: ours over Spark's own."""
    rows = []
    for name, started in (("vs_spark", ""), ("vs_spark_cold", ", 6M rows, start-up included")):
        spark = load(name)
        version = spark["versions"]["pyspark"]
        stores = {
            "default": "default state store",
            "rocksdb": f"RocksDB, join state format {spark['settings']['format']}",
        }
        readers = {"times": "", "read_files_times": ", `read_files`"}
        of = "vs_spark --cold" if started else "vs_spark"
        rows += [
            (
                f"interval join, {how}{started}{reader}: rate over Spark {version}'s own join ({store})",
                spread(ratio, 1),
                of,
            )
            for how, found in spark["results"].items()
            for peer, store in stores.items()
            for times, reader in readers.items()
            if (ratio := found.get(f"{times}_{peer}")) is not None
        ]
    return rows


#: Where the figures stand, each between two marks.
PAGES = {"README.md": summary, "docs/measured.md": report}
MARKS = ("<!-- figures: python -m benchmarks.report -->\n", "\n<!-- end of figures -->")


def with_figures(name: str, text: str) -> str:
    """The text of a page with its figures as they are in the committed results."""
    return between(MARKS, text, PAGES[name]())


def main() -> None:
    """Write the pages, the plot in one of them, and that one as HTML by itself."""
    root = Path(__file__).parents[1]
    page.plot(load("peers"), root / "docs" / "pictures" / "peers.svg")
    for name in PAGES:
        path = root / name
        path.write_text(with_figures(name, path.read_text()))
    target = root / "build" / "measured.html"
    target.parent.mkdir(exist_ok=True)
    target.write_text(standalone(root / "docs" / "measured.md", "../docs"))
    print(f"written: {', '.join(PAGES)}, docs/pictures/peers.svg, {target.relative_to(root)}")


if __name__ == "__main__":
    main()
