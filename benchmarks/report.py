"""The README's table of figures, made from the committed results: `python -m benchmarks.report`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


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
            "Spark query, durable state, `per_batch`: rate over Flink 2.3.0 (heap state, no checkpoints)",
            spread(flink["results"]["per_batch_over_flink"]),
            "vs_flink",
        ),
        ("the same, `per_event`", spread(flink["results"]["per_event_over_flink"]), "vs_flink"),
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


if __name__ == "__main__":
    print(report())
