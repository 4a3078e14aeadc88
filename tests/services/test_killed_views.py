"""SIGKILL of the driver (Python and JVM) while views write, or between their write and Spark's commit.

All views of a run are queries of one driver, or fed by one query, so a kill hits each of them. The next run goes on
from the checkpoints, so
it repeats the micro-batches that were killed, and is killed again one or two micro-batches later. A view equals
DuckDB's answer whenever it comes back. Most runs read a join's changelog from files, one per micro-batch, as the join
is not what is tested; a few run the joins, too.

`GPU_JOIN_KILLS` says how many kills the views have to live through (two if it is not set), `GPU_JOIN_SEED` which ones.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from spark.views import Shop

from services.conftest import listens

pytestmark = [pytest.mark.spark, pytest.mark.services]

ROOT = Path(__file__).resolve().parents[2]
KILLS = int(os.environ.get("GPU_JOIN_KILLS", "2"))
SEED = int(os.environ.get("GPU_JOIN_SEED", "7"))
SERVICE = {"postgres": "postgres", "kafka_upsert": "kafka", "kafka_debezium": "kafka"}


def prepared(spark: Any, folder: Path, sinks: list[str], key: Any, *, join: bool, together: bool, batches: int) -> None:
    """Writes the inputs and, unless the join is to run, its changelog, with the views' rows after each micro-batch."""
    shop = Shop(spark, folder / "shop", "full", keyed=key is not None, seed=SEED)
    for _ in range(batches):
        shop.more(8)
    job = {
        "sinks": sinks, "key": key, "how": "full", "join": join, "together": together,
        "name": f"v{uuid.uuid4().hex[:8]}",
        "jars": str(Path(os.environ["GPU_JOIN_SERVICES"], "jars").absolute()),
        "expected": [sorted(map(repr, shop.expected(n + 1))) for n in range(batches)],
    }  # fmt: skip
    (folder / "job.json").write_text(json.dumps({**job, "killer": 0}))
    if join or together:
        return
    (folder / "changes").mkdir()

    def keep(batch: Any, batch_id: int) -> None:
        lines = [json.dumps(row.asDict()) for row in batch.collect()]
        (folder / "changes" / f"{batch_id:04d}.json").write_text("\n".join(lines))

    shop.run(keep)


def words(path: Path) -> list[str]:
    """What a job noted, if anything."""
    return path.read_text().split() if path.exists() else []


def run_killing(folder: Path, sinks: list[str], kills: int) -> dict[str, Counter[str]]:
    """Runs the job to its end, killed so often before.

    Returns:
        Per view how often it had been ``written`` when the driver was killed, how often it was ``within`` its call, and
        how often it was neither. After the first two the next run is given the same micro-batch again.
    """
    choice = random.Random(SEED)
    done = {sink: Counter[str]() for sink in sinks}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    killed: dict[str, str] = {}
    moment, before = "written", dict.fromkeys(sinks, 0)
    for left in range(kills, -1, -1):
        took = [statistics.median(map(float, found)) for sink in sinks if (found := words(folder / sink / "seconds"))]
        at, within = choice.choice((1, 1, 2)) if left else 0, choice.random() < 0.3 and took
        job = json.loads((folder / "job.json").read_text())
        (folder / "job.json").write_text(json.dumps({**job, "killer": choice.randrange(len(sinks))}))
        last, moment = moment, str(choice.random() * max(took)) if within else "written"
        ended = subprocess.run(
            [sys.executable, "-m", "services.view_job", str(folder), str(at), moment],
            cwd=ROOT, env=environment, capture_output=True, text=True, check=False, start_new_session=True,
        )  # fmt: skip
        assert ended.returncode == (-9 if left else 0), f"{ended.returncode}: {ended.stderr[-6000:]}"
        begun = {sink: words(folder / sink / "begun") for sink in sinks}
        for sink, batch in killed.items():
            again = begun[sink][before[sink] : before[sink] + 1] == [batch]
            assert again or last != "written" or job["together"], (
                f"{sink}: micro-batch {batch} was written, and not repeated"
            )
            done[sink][("written" if last == "written" else "within") if again else "neither"] += 1
        killed = {sink: begun[sink][-1] for sink in sinks if len(begun[sink]) > before[sink]}
        before = {sink: len(found) for sink, found in begun.items()}
    return done


@pytest.mark.parametrize(
    ("sinks", "key", "how"),
    [
        (["delta", "postgres", "kafka_upsert", "kafka_debezium", "iceberg"], ["id", "item"], "changelogs"),
        (["delta", "postgres", "kafka_debezium"], None, "joins"),
        (["iceberg", "postgres"], ["id", "item"], "one query"),
    ],
    ids=["changelogs with a key", "joins without a key", "one query"],
)
def test_views_live_through_kills(spark: Any, tmp_path: Path, sinks: list[str], key: Any, how: str) -> None:
    there = [sink for sink in sinks if sink not in SERVICE or listens(SERVICE[sink])]
    kills = max(1, KILLS // 10) if how == "joins" else KILLS
    # a killed run commits at most one micro-batch of each view
    batches = kills + 2
    prepared(spark, tmp_path, there, key, join=how == "joins", together=how == "one query", batches=batches)
    done = run_killing(tmp_path, there, kills)
    print(f"{kills} kills, seed {SEED}: { ({sink: dict(found) for sink, found in done.items()}) }")
    for sink in there:
        right = set(words(tmp_path / sink / "right"))
        assert right == set(map(str, range(batches))), f"{sink}: {right}"
    if there != sinks:
        pytest.skip(f"no {', '.join({SERVICE[sink] for sink in sinks if sink not in there})}; right were {there}")
