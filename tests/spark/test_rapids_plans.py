"""What NVIDIA's plugin makes of our plans: that it can plan each of them, and what of it would run on the GPU.

Needs the plugin's jar, but no card: ``make rapids-plans JAR=rapids-4-spark_2.13-26.08.1-cuda13.jar``.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from spark.rapids_app import MARK
from spark.test_cluster import run

JAR = os.environ.get("GPU_JOIN_RAPIDS_JAR") or None

pytestmark = [
    pytest.mark.spark,
    pytest.mark.skipif(JAR is None, reason="GPU_JOIN_RAPIDS_JAR names no jar; `make rapids-plans` does"),
    pytest.mark.thorough,
]

PADDED = [["+I", 1, "book", 1.5], ["+I", 2, "pen", 2.5], ["+I", 3, "ink", None]]
PAIRS = [[1, "book"], [2, "pen"]]
EXPECTED = {
    **dict.fromkeys(("inserts", "changes", "decimals", "read_files", "static"), PADDED),
    "per_event": sorted(
        [*PADDED, *([kind, *row, None] for row in ([1, "book"], [2, "pen"]) for kind in ("+I", "-D"))], key=repr
    ),
    "semi": [["+I", *row] for row in PAIRS],
    "multi": [[*row, row[-1]] for row in PADDED],
    "chain": [[*row, row[-1]] for row in PADDED],
    "interval": [["+I", 1, "book", 1.5], ["+I", 2, "pen", 2.5]],
    "sql": [["+I", 1, 1.5]],
    "job": [["+I", 1, 1.5], ["+I", 2, 2.5], ["+I", 3, None]],
}

ON_THE_CPU: dict[str, set[str]] = {
    case: {"MapInArrowExec", "ShuffleExchangeExec"} | ({"EventTimeWatermarkExec"} if case == "interval" else set())
    for case in ("inserts", "semi", "multi", "sql", "job", "changes", "per_event", "chain", "interval", "decimals")
}
"""What of a plan the plugin leaves to Spark: it takes no binary columns through Arrow, of which the shuffle has one."""

_LINE = re.compile(r"^\s*([*!@])\s?(?:Exec|Expression|Partitioning)? ?<(\w+)>.* (will|cannot) ", re.MULTILINE)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What ``rapids_app.py`` saw, and under ``plans`` what the plugin said, by case."""
    folder = tmp_path_factory.mktemp("rapids")
    done = run(str(Path(__file__).with_name("rapids_app.py")), str(folder), str(JAR))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    said = dict(part.split("\n", 1) for part in done.stderr.split(MARK)[1:])
    return {**json.loads((folder / "seen.json").read_text()), "plans": said}


@pytest.mark.parametrize("case", EXPECTED)
def test_it_plans_every_operator(seen: dict[str, Any], case: str) -> None:
    assert seen[case]["rows"] == EXPECTED[case]
    assert "Encountered an exception" not in seen["plans"][case]


@pytest.mark.parametrize("case", ON_THE_CPU)
def test_what_it_leaves_to_spark(seen: dict[str, Any], case: str) -> None:
    found = {kind: set[str]() for kind in ("will", "cannot")}
    for _, node, kind in _LINE.findall(seen["plans"][case]):
        found[kind].add(node)
    assert found["cannot"] == ON_THE_CPU[case]
    everywhere = {"FileSourceScanExec", "ShuffleExchangeExec", "HashPartitioning", "MapInArrowExec"}
    assert found["will"] >= everywhere - ON_THE_CPU[case]


def test_metrics_come_without_observe(seen: dict[str, Any]) -> None:
    assert all(seen[case]["observed"] == [] for case in EXPECTED if "observed" in seen[case])
    counted = [m for case in ("inserts", "changes", "read_files") for m in seen[case]["metrics"].values()]
    expected = {"left_rows_in": 3, "right_rows_in": 2, "rows_out_insert": 3, "partitions": 2}
    assert [{name: m[name] for name in expected} for m in counted] == [expected] * 3
    assert len(seen["chain"]["metrics"]) == 2
    assert "metrics     reported to the driver" in seen["inserts"]["explained"]
    assert (seen["job"]["in"], seen["job"]["out"]) == (5, 3)
