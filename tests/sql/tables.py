"""Inputs that the tests of plans share."""

from __future__ import annotations

import re

import pyarrow as pa
from pyspark.sql import SparkSession

from gpu_ops.query.nodes import Plan
from gpu_ops.query.plan import plan
from gpu_ops.query.relations import Table

LONG, DOUBLE, STRING, TIME = pa.int64(), pa.float64(), pa.string(), pa.timestamp("us", "UTC")

TABLES = {
    table.name: table
    for table in [
        Table(
            "orders", pa.schema([("id", LONG), ("uid", LONG), ("amount", DOUBLE), ("note", STRING)]), row_kind="op"
        ),
        Table("prices", pa.schema([("id", LONG), ("price", DOUBLE)]), row_kind="op", unique_key=("id",)),
        Table("users", pa.schema([("uid", LONG), ("name", STRING), ("tags", pa.list_(STRING))])),
        Table("payments", pa.schema([("uid", LONG), ("paid", DOUBLE), ("at", TIME)])),
        Table("clicks", pa.schema([("uid", LONG), ("ts", TIME), ("x", LONG)]), event_times=("ts",)),
        Table("views", pa.schema([("uid", LONG), ("ts", TIME), ("y", LONG)]), event_times=("ts",)),
        Table("ms", pa.schema([("uid", LONG), ("t", LONG)]), event_times=("t",)),
        Table("edits", pa.schema([("uid", LONG), ("ts", TIME)]), row_kind="op", event_times=("ts",)),
        Table(
            "stock", pa.schema([pa.field("sku", STRING, nullable=False), ("left", LONG)]), row_kind="op",
            unique_key=("sku",), updates="retract",
        ),
    ]
}  # fmt: skip


def planned(sql: str, **options: object) -> Plan:
    """A query over `TABLES`, or over those given."""
    session = SparkSession.getActiveSession()
    assert session is not None
    return plan(sql, options.pop("tables", TABLES), session, **options)  # type: ignore[arg-type]


GENERATED = re.compile(
    r"__auto_generated|_gen_alias|#\d+L?\b|\b_w?e?\d+\b|\b[A-Za-z]\w*__\w+"
    r"|\b(?:value|key|group|part|text|order|local|sum|count|avg|min|max|first|last)_\d+\w*"
    r"|\b(?:union|aggregate|join|top|latest)\(\): "
    r"|\b(?:window_(?:start|end)|session_(?:start|end|time)|row_number)\b"
)
"""Names that no query of the tests has: those of our plan, of Spark's and of our functions in Python."""


def check_names(message: str) -> None:
    """An error says nothing that is not the user's own."""
    assert not GENERATED.search(message), message
