"""The Spark session of tests/spark, whose analyser reads the queries."""

from __future__ import annotations

from typing import Any

import pytest
from spark.conftest import spark

__all__ = ["spark"]


@pytest.fixture(autouse=True)
def session(spark: Any) -> Any:
    """Active, as `sql.tables.planned` needs it."""
    return spark
