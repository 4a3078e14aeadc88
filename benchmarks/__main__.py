"""All benchmarks that need no GPU, one after the other: `python -m benchmarks [NAME ...]`."""

from __future__ import annotations

import subprocess
import sys

ALL = (
    "asof",
    "at_end",
    "at_length",
    "by_time",
    "engine",
    "growth",
    "interval",
    "large_state",
    "lookup",
    "nexmark",
    "peers",
    "pipeline_limit",
    "state_bytes",
    "upserts",
    "vs_flink",
    "vs_flink --multi",
    "vs_spark",
    "vs_spark --cold",
)


def main() -> None:
    """Run those named, or all; each in a process of its own."""
    names = sys.argv[1:] or list(ALL)
    unknown = [name for name in names if name not in ALL]
    if unknown:
        raise SystemExit(f"no benchmark {unknown[0]!r}; there are {', '.join(ALL)}")
    for name in names:
        print(f"== {name}", flush=True)
        module, *options = name.split()
        subprocess.run([sys.executable, "-m", f"benchmarks.{module}", *options], check=True)


if __name__ == "__main__":
    main()
