"""All benchmarks that need no GPU, one after the other: `python -m benchmarks [NAME ...]`."""

from __future__ import annotations

import subprocess
import sys

_WITH = {
    "pipeline_limit small_batches": "--rows 80000 --batch 2000 --cases query query_arrow no_op scan",
    "vs_flink vs_flink_files": "--rows 6000000 --batch 1000000 --cases write_files flink_sql_1 flink_sql_2",
}
"""Options of those that write a file of results other than their own, by the name of both."""
ALL = (
    *("aggregate", "asof", "at_end", "at_length", "by_time", "chain", "engine", "flink.temporal", "growth", "interval"),
    *("large_state", "large_state_peers", "lookup", "nexmark", "peers", "pipeline_limit", "restarts", "state_bytes"),
    *("tpch", "upserts", "vs_flink", "vs_flink --multi", "vs_spark", "vs_spark --cold", *_WITH),
)
"""Kafka's (`benchmarks.flink.kafka`) is not among them: it wants services that run."""


def main() -> None:
    """Run those named, with all the options that one has here, or all; each in a process of its own."""
    known = {entry.split()[0] for entry in ALL}
    names = sys.argv[1:] or sorted(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"no benchmark {unknown[0]!r}; there are {', '.join(sorted(known))}")
    for name in ALL:
        if name.split()[0] not in names:
            continue
        print(f"== {name}", flush=True)
        module, *options = name.split()
        if name in _WITH:
            options = [*_WITH[name].split(), "--out", f"benchmarks/results/{options[0]}.json"]
        subprocess.run([sys.executable, "-m", f"benchmarks.{module}", *options], check=True)


if __name__ == "__main__":
    main()
