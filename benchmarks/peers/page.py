"""What `python -m benchmarks.peers` found, as a table and a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TITLES = {
    "changes": "left join of changes",
    "inserts": "inner join of rows that only come",
    "totals": "count and sum by customer over that join",
}

HEAD = (
    "Our rate over theirs, medians of {rounds} rounds in turns (range); above 1 ours is the faster. CSV files in, files"
    " out; {rows:,} rows, in micro-batches of {batch:,} where there are any. The clock runs from a query's start to"
    " its end, in a process that has run it before where code is compiled as it runs. Each result is folded and"
    " compared: the number of its rows, and a hash of them."
)


def section(record: dict[str, Any]) -> str:
    """A table in Markdown: our rate over each peer's, and what is not equal."""
    results, named, settings = record["results"], record["settings"]["peers"], record["settings"]
    queries = [query for query in TITLES if query in results]
    lines = [
        "## Beside six others, in one run",
        "",
        HEAD.format(**settings),
        "",
        "![Our rate over theirs, for each query](pictures/peers.svg)",
        "",
        f"| peer | {' | '.join(TITLES[query] for query in queries)} | what is not equal |",
        f"|---|{'---|' * len(queries)}---|",
    ]
    for name, peer in named.items():
        cells = ["1" if name == "ours" else _cell(results[query]["ours_over"].get(name)) for query in queries]
        lines.append(f"| {peer['title']} | {' | '.join(cells)} | {peer['unequal']} |")
    return "\n".join(lines)


def _cell(ratio: dict[str, float] | None) -> str:
    if ratio is None:
        return "–"
    median, low, high = (
        f"{ratio[name]:.0f}" if ratio[name] >= 10 else f"{ratio[name]:.2g}" for name in ("median", "low", "high")
    )
    return f"{median} ({low}–{high})"


def plot(record: dict[str, Any], target: Path) -> None:
    """Our rates over theirs with their ranges, a panel per query."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "peers"  # the same names in each drawing
    from matplotlib import pyplot as plt

    results, named = record["results"], record["settings"]["peers"]
    queries = [query for query in TITLES if query in results]
    names = [name for name in named if any(name in results[query]["ours_over"] for query in queries)][::-1]
    figure, axes = plt.subplots(
        1, len(queries), figsize=(12, 3.6), squeeze=False, sharex=True, sharey=True, layout="constrained"
    )
    for query, axis in zip(queries, axes[0], strict=True):
        there = [(place, results[query]["ours_over"].get(name)) for place, name in enumerate(names)]
        places, found = zip(*((place, ratio) for place, ratio in there if ratio is not None), strict=True)
        rates = [ratio["median"] for ratio in found]
        below = [ratio["median"] - ratio["low"] for ratio in found]
        above = [ratio["high"] - ratio["median"] for ratio in found]
        axis.set_xscale("log")
        axis.axvline(1, color="C1")
        axis.errorbar(rates, places, xerr=[below, above], fmt="o", capsize=3)
        axis.set_xticks(_TICKS, labels=[f"{tick:g}" for tick in _TICKS])
        axis.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
        axis.set_yticks(range(len(names)), labels=[_short(named[name]["title"]) for name in names])
        axis.grid(axis="x", color="0.9")
        axis.margins(x=0.08, y=0.1)
        axis.set_title(TITLES[query], fontsize=10)
    figure.supxlabel("gpu-join's rate over theirs; right of the line gpu-join is the faster", fontsize=10)
    figure.savefig(target, metadata={"Date": None})
    plt.close(figure)


_TICKS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5)


def _short(title: str) -> str:
    """A peer's title up to its first comma, and what tells it from another."""
    name, *more = title.split(", ")
    kind = next((part for part in more if part in ("`static`", "Python connector")), "")
    return f"{name}, {kind.strip('`')}" if kind else name
