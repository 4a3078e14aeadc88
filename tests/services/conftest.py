"""A Spark session with the jars of Kafka, Delta and Postgres; `start.sh` fetches them and starts the rest."""

from __future__ import annotations

import os
import socket
import subprocess
import time
import uuid
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


@pytest.fixture
def postgres(spark: Any) -> Iterator[Any]:
    """A schema of the test's own in Postgres."""
    from services.postgres import Postgres

    if not listens("postgres"):
        pytest.skip("no Postgres on port 15432")
    schema = f"t{uuid.uuid4().hex[:8]}"
    database = Postgres(spark, schema)
    database.run(f"CREATE SCHEMA {schema}")
    yield database
    database.run(f"DROP SCHEMA {schema} CASCADE")


@pytest.fixture(scope="session")
def standalone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a standalone master with two workers."""
    if "GPU_JOIN_SERVICES" not in os.environ:
        pytest.skip("`make test-services` runs these tests")
    import pyspark

    home, folder = Path(pyspark.__file__).parent, tmp_path_factory.mktemp("standalone")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"spark://127.0.0.1:{port}"
    java = [str(home / "bin" / "spark-class")]
    package = "org.apache.spark.deploy"
    commands = [[*java, f"{package}.master.Master", "--host", "127.0.0.1", "--port", str(port), "--webui-port", "0"]]
    worker = [*java, f"{package}.worker.Worker", "--webui-port", "0", "-c", "2", "-m", "2g"]
    # two hosts, as Spark runs no second attempt of a task on the first one's
    commands += [[*worker, "--host", f"127.0.0.{n}", "-d", str(folder / str(n)), url] for n in (1, 2)]
    with (folder / "log").open("w") as log:
        environment = {**os.environ, "SPARK_HOME": str(home), "SPARK_DAEMON_MEMORY": "300m"}
        running = [subprocess.Popen(command, stdout=log, stderr=log, env=environment) for command in commands]
        deadline = time.monotonic() + 60
        while (folder / "log").read_text().count("Successfully registered with master") < 2:
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.2)
        yield url
        for process in running[::-1]:
            process.terminate()
            process.wait()
