"""SQL by Iceberg's jar for Spark, in a process with a Spark of its own: there is no jar for the one the tests run on.

`start.sh` fetches both, the newest Spark that has a jar. Statements and tables go to the process by its standard input,
results and errors come by its standard output, pickled.
"""

from __future__ import annotations

import datetime as dt
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa


class JarSession:
    """A session of Spark with the jar.

    Args:
        services: the folder that `start.sh` filled.
        log: a file for what the process says.
    """

    def __init__(self, services: Path, log: Path) -> None:
        jars = ",".join(map(str, sorted((services / "iceberg").glob("*.jar"))))
        environment = {**os.environ, "PYTHONPATH": str(services / "spark-4.1")}
        environment.pop("SPARK_HOME", None)
        with log.open("wb") as said:
            self._process = subprocess.Popen(
                [sys.executable, __file__, jars], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said,
                env=environment,
            )  # fmt: skip
        self._log = log

    def sql(self, statement: str, **tables: pa.Table) -> pa.Table:
        """Runs a statement, in which tables are temporary views.

        Raises:
            RuntimeError: Spark's error.
        """
        return self._ask((statement, tables))

    def set(self, settings: Mapping[str, str]) -> None:
        """Sets what catalogs and writers are configured by."""
        self._ask(dict(settings))

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate(timeout=60)

    def _ask(self, what: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump(what, self._process.stdin)
        self._process.stdin.flush()
        try:
            found = pickle.load(self._process.stdout)
        except EOFError:
            raise RuntimeError(self._log.read_text()[-3000:]) from None
        if isinstance(found, str):
            raise RuntimeError(found)  # noqa: TRY004 - an error's text
        return found


def texts(table: pa.Table) -> list[str]:
    """The rows of a table, as sorted texts, whatever zone its instants name."""
    return sorted(repr(tuple(map(_plain, row.values()))) for row in table.to_pylist())


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(field) for name, field in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(x) for x in value]
    return value.astimezone(dt.UTC).replace(tzinfo=None) if getattr(value, "tzinfo", None) else value


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # Spark may print
    from pyspark.sql import SparkSession

    settings = {
        "spark.jars": sys.argv[1],
        "spark.sql.extensions": "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
        "spark.ui.enabled": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
        "spark.log.level": "ERROR",
    }
    builder = SparkSession.builder.master("local[2]").appName("Iceberg's jar")
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    while True:
        try:
            asked = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answer: Any = None
        try:
            if isinstance(asked, dict):
                for name, value in asked.items():
                    spark.conf.set(name, value)
            else:
                statement, tables = asked
                for name, table in tables.items():
                    spark.createDataFrame(table).createOrReplaceTempView(name)
                answer = spark.sql(statement).toArrow()
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    _serve()
