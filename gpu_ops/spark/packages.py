"""What a Spark session needs for a format that is not Spark's own."""

from __future__ import annotations

from typing import Final

DELTA_SETTINGS: Final = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}
"""What Delta asks a Spark session for."""

_DELTA: Final = {"3.5": "io.delta:delta-spark_2.12:3.3.2", "4.0": "io.delta:delta-spark_2.13:4.0.1"}


def package(connector: str, spark: str) -> str | None:
    """The Maven package that a connector needs.

    Args:
        connector: its name.
        spark: Spark's version.

    Returns:
        Its coordinates, or None for one that Spark brings itself.
    """
    line = ".".join(spark.split(".")[:2])
    if "kafka" in connector:
        return f"org.apache.spark:spark-sql-kafka-0-10_{'2.12' if line < '4' else '2.13'}:{spark}"
    if connector == "delta":
        return _DELTA.get(line, f"io.delta:delta-spark_{line}_2.13:4.4.0")
    return None
