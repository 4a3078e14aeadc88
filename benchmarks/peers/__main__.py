"""Three queries, each on this pack and on its peers, in turns, every result checked.

    python -m benchmarks.peers [--rows 2000000] [--batch 500000] [--rounds 3] [--warmup 2] [--queries changes totals]

Pathway runs in an interpreter of its own, `.venv/peers` where `make bench` has made it; without it, it is left out, as
Flink is where there is no JDK.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("POLARS_MAX_THREADS", "2")

from benchmarks.common import interleave, ratio, summarise, write_results
from benchmarks.peers import data, engines
from benchmarks.spark_queries import local_session


def main() -> None:
    """Run, check, print, record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rows", type=int, default=2_000_000, help="of both inputs of a query")
    parser.add_argument("--batch", type=int, default=500_000, help="rows in a micro-batch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=2, help="runs in a process before the one that counts")
    parser.add_argument("--queries", nargs="+", default=list(data.QUERIES), choices=list(data.QUERIES))
    parser.add_argument("--peers", nargs="+", help="only these")
    parser.add_argument("--pathway", default=str(Path(sys.prefix, "peers", "bin", "python")), help="its interpreter")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "peers.json")
    options = parser.parse_args()
    spark = local_session()
    peers = engines.peers(spark, options.pathway, options.warmup)
    for name, why in engines.absent(options.pathway).items():
        print(f"LEFT OUT: {name}: {why}", file=sys.stderr)
        del peers[name]
    chosen = {name: peer for name, peer in peers.items() if name in (options.peers or peers)}
    with tempfile.TemporaryDirectory(prefix="gpu-join-data-") as folder:
        expected = data.write(Path(folder), options.rows, max(1, round(options.rows / options.batch)))
        results = {}
        for query in options.queries:
            results[query] = compare(query, Path(folder), expected[query], chosen, options)
    spark.stop()
    settings = {k: v for k, v in vars(options).items() if k not in ("out", "pathway")} | {"master": "local[2]"}
    settings["peers"] = {name: {"title": peer.title, "unequal": peer.unequal} for name, peer in chosen.items()}
    record = write_results(options.out, "peers", results, settings=settings)
    shown = {query: {k: v for k, v in found.items() if k != "seconds"} for query, found in record["results"].items()}
    json.dump(shown, sys.stdout, indent=2)
    print()


def compare(
    query: str,
    folder: Path,
    expected: data.Folded,
    peers: dict[str, engines.Peer],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """One query by all who can run it: seconds, and our rate over each."""
    able = {name: peer for name, peer in peers.items() if query in peer.queries}
    cases = {name: lambda peer=peer: engines.once(peer, query, folder, expected) for name, peer in able.items()}
    for _ in range(options.warmup):
        for name, case in cases.items():
            if name not in engines.OWN_PROCESS:
                case()
    seconds = {name: summarise(found) for name, found in interleave(cases, options.rounds).items()}
    result: dict[str, Any] = {"rows_out": expected[0], "seconds": seconds}
    if "ours" in seconds:
        result["ours_over"] = {name: ratio(took, seconds["ours"]) for name, took in seconds.items() if name != "ours"}
    return result


if __name__ == "__main__":
    main()
