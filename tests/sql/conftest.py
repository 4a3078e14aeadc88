"""The Spark session of tests/spark, for the queries that run there."""

from __future__ import annotations

from spark.conftest import spark

__all__ = ["spark"]
