"""Views whose staging tasks Spark runs twice, with what each of them is then: what `test_repeated_tasks` runs.

python -m services.repeated_task_job JARS SCHEMA MASTER HOW

Prints a line of JSON: how many answers were lost.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from gpu_ops import sinks
from gpu_ops.spark import session
from services.commit_proxy import CommitProxy

OPTIONS = {"user": "postgres", "driver": "org.postgresql.Driver"}
BATCHES = [
    [("+I", n, f"a{n}") for n in range(40)],
    [(kind, n, item) for n in range(0, 40, 2) for kind, item in (("-U", f"a{n}"), ("+U", f"b{n}"))],
    [("-D", n, f"b{n}" if n % 2 == 0 else f"a{n}") for n in range(30, 40)] + [("+I", n, "c") for n in range(90, 99)],
]
"""Micro-batches of changes."""


def main(jars: str, schema: str, master: str, how: str) -> None:
    """Keeps a view with a key and one without; the answer to a COMMIT of each staging is lost, or of the last."""
    proxy = CommitProxy()
    config: dict[str, Any] = {
        "spark.jars": jars, "spark.sql.shuffle.partitions": "2", "spark.log.level": "OFF", "spark.ui.enabled": "false",
        "spark.sql.adaptive.coalescePartitions.enabled": "false", "spark.executor.memory": "512m",
        "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -Xss512k",
        "spark.speculation": str(how == "hold").lower(), "spark.speculation.quantile": "0.4",
        "spark.speculation.multiplier": "1", "spark.speculation.interval": "200ms",
        "spark.speculation.minTaskRuntime": "100ms", "spark.locality.wait": "0s", "spark.cores.max": "4",
        "spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1",
        "spark.pyspark.python": sys.executable, "spark.executorEnv.PYTHONPATH": os.environ["PYTHONPATH"],
    }  # fmt: skip
    spark = session("gpu-join repeated tasks", master=master, config=config)
    for key in ("id", None):
        table = f"{schema}.{'keyed' if key else 'counted'}"
        view = sinks.postgres_view(proxy.url, table, key, options=OPTIONS)
        for number, changes in enumerate(BATCHES):
            if how == "drop" or number == len(BATCHES) - 1:
                proxy.lose(how, f"INSERT INTO {table}_staged")
            view(spark.createDataFrame(changes, "row_kind STRING, id BIGINT, item STRING"), number)
    print(json.dumps({"faults": proxy.faults}), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
