"""A Spark session with the jars of Kafka, Delta and Postgres; `start.sh` fetches them and starts the rest."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PORTS = {"kafka": 19092, "postgres": 15432}


def listens(service: str) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("localhost", PORTS[service])) == 0


def spark_session(jars: Path, warehouse: Path) -> Any:
    """With Spark's sinks for Kafka, Delta and Postgres."""
    from gpu_ops.spark import session

    return session(
        "gpu-join services",
        master="local[2]",
        config={
            "spark.jars": ",".join(map(str, sorted(jars.glob("*.jar")))),
            "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
            "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
            "spark.databricks.delta.snapshotPartitions": "2",
            "spark.sql.shuffle.partitions": "2",
            "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
            "spark.sql.warehouse.dir": str(warehouse),
            "spark.log.level": "OFF",
            "spark.python.authenticate.socketTimeout": "120s",
        },
    )


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = Path(os.environ.get("GPU_JOIN_SERVICES", ""), "jars").absolute()
    if "GPU_JOIN_SERVICES" not in os.environ or not (folder / ".complete").exists():
        pytest.skip("no services: `make services` starts them, `make test-services` runs these tests")
    from gpu_ops.spark.driver.directory import Directory

    made = spark_session(folder, tmp_path_factory.mktemp("warehouse"))
    yield made
    directory = Directory.of(made)
    made.stop()
    directory.close()
