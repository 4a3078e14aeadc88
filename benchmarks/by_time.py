"""Soak of the joins by time whose output is final, on the CPU engine: memory and rows of state after each micro-batch.

An ASOF join (``emit="at_watermark"``) keeps the rows above the watermark and a last one of each key; so does a temporal
join, but that versions which had come before their key's timer fired wait for the next time it does, as in Flink
(`gpu_ops.operators.by_time.temporal`): a fifth more is allowed for them.

    python -m benchmarks.by_time [--batches 200] [--quick]
"""

from __future__ import annotations

import json
import sys

import pyarrow as pa

from benchmarks.common import arguments, plot_path, write_results
from benchmarks.interval import LEFT, RIGHT, plot, soak
from gpu_ops.descriptions.by_time import Asof, AsofJoin, TemporalJoin
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.keys import normalize_on
from gpu_ops.join_engine import JoinEngine

KEYS = 100_000
DELAY_MS = 5_000


def main() -> None:
    """Run both, print and record them."""
    parser = arguments(__doc__, "by_time")
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    options = parser.parse_args()
    pa.set_cpu_count(1)
    changes = 10_000 if options.quick else 100_000
    left = Input("left", LEFT, event_time="lt", delay_ms=DELAY_MS)
    right = Input("right", RIGHT, event_time="rt", delay_ms=DELAY_MS)
    joins = {
        "temporal join": TemporalJoin("left", left, right, normalize_on("k")),
        "ASOF join at the watermark": AsofJoin(
            "left", left, right, normalize_on("k"), emit="at_watermark", asof=Asof("backward")
        ),
    }
    results = {}
    for title, join in joins.items():
        engine = JoinEngine(join, "cpu")
        over_bound = 1.2 if isinstance(join, TemporalJoin) else 1.0
        results[title] = soak(engine, options.batches, changes, kept_ms=DELAY_MS, more=KEYS, over_bound=over_bound)
        engine.close()
    write_results(options.out, "by_time", results, settings={"batches": options.batches, "threads": 1})
    plot(results, plot_path(options.out), "above the watermark, one a key, one micro-batch")
    shown = {title: result["last_quarter_over_second"] for title, result in results.items()}
    json.dump(shown, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
