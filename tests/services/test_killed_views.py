"""SIGKILL of the driver (Python and JVM) while a view writes, or between its write and Spark's commit.

A run goes on from the checkpoint, so it repeats the micro-batch that was killed, and is killed again one or two
micro-batches later. The view equals DuckDB's answer whenever it comes back. Most runs read a join's changelog from
files, one per micro-batch, as the join is not what is tested; a few run the join, too.

`GPU_JOIN_KILLS` says how many kills each view has to live through (two if it is not set).
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
from spark.views import Shop

from services.conftest import listens

pytestmark = [pytest.mark.spark, pytest.mark.services]

ROOT = Path(__file__).resolve().parents[2]
KILLS = int(os.environ.get("GPU_JOIN_KILLS", "2"))
SERVICE = {"postgres": "postgres", "kafka_upsert": "kafka", "kafka_debezium": "kafka"}


def prepared(spark: Any, folder: Path, sink: str, key: Any, *, join: bool, batches: int) -> None:
    """Writes the inputs and, unless the join is to run, its changelog, with the view's rows after each micro-batch."""
    shop = Shop(spark, folder / "shop", "full", keyed=key is not None)
    for _ in range(batches):
        shop.more(8)
    job = {
        "sink": sink, "key": key, "how": "full", "join": join, "name": f"v{uuid.uuid4().hex[:8]}",
        "jars": str(Path(os.environ["GPU_JOIN_SERVICES"], "jars").absolute()),
        "expected": [sorted(map(repr, shop.expected(n + 1))) for n in range(batches)],
    }  # fmt: skip
    (folder / "job.json").write_text(json.dumps(job))
    if join:
        return
    (folder / "changes").mkdir()

    def keep(batch: Any, batch_id: int) -> None:
        lines = [json.dumps(row.asDict()) for row in batch.collect()]
        (folder / "changes" / f"{batch_id:04d}.json").write_text("\n".join(lines))

    shop.run(keep)


def run_killing(folder: Path, kills: int) -> dict[str, int]:
    """Runs the job to its end, killed so often; how often at which moment."""
    choice = random.Random(7)
    done = {"written": 0, "within": 0}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    seconds = folder / "seconds"
    while True:
        at, moment = 0, "written"
        if sum(done.values()) < kills:
            at = choice.choice((1, 1, 2))
            if choice.random() < 0.6 and seconds.exists():
                usual = statistics.median(map(float, seconds.read_text().split()))
                moment = str(choice.random() * usual)
        ended = subprocess.run(
            [sys.executable, "-m", "services.view_job", str(folder), str(at), moment],
            cwd=ROOT, env=environment, capture_output=True, text=True, check=False, start_new_session=True,
        )  # fmt: skip
        if ended.returncode == 0 and "DONE" in ended.stdout:
            return done
        assert ended.returncode == -9, ended.stderr[-6000:]
        done["written" if moment == "written" else "within"] += 1


@pytest.mark.parametrize(
    ("sink", "key", "join"),
    [
        ("delta", ["id", "item"], False),
        ("delta", None, True),
        ("postgres", ["id", "item"], False),
        ("postgres", None, True),
        ("kafka_upsert", ["id", "item"], False),
        ("kafka_debezium", ["id", "item"], False),
        ("kafka_debezium", None, True),
    ],
    ids=lambda given: (
        {True: "join", False: "changelog", None: "no key"}.get(given, str(given))
        if not isinstance(given, list)
        else "key"
    ),
)
def test_a_view_lives_through_kills(spark: Any, tmp_path: Path, sink: str, key: Any, join: bool) -> None:
    if sink in SERVICE and not listens(SERVICE[sink]):
        pytest.skip(f"no {SERVICE[sink]} on its port")
    kills = max(1, KILLS // 10) if join else KILLS
    # a killed run commits at most one micro-batch
    batches = kills + 2
    prepared(spark, tmp_path, sink, key, join=join, batches=batches)
    done = run_killing(tmp_path, kills)
    print(f"{sink}: {done}")
    assert sum(done.values()) == kills, "the inputs ended before"
    right = {int(line) for line in (tmp_path / "right").read_text().split()}
    assert right == set(range(batches))
