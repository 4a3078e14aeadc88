"""Jobs from texts, without files, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from gpu_ops.jobs.job import Job, JobSource, build
from gpu_ops.jobs.sql_file import read_sql
from gpu_ops.jobs.sql_text import JobError, Text

ORDERS = "CREATE TABLE orders (id BIGINT, item STRING) WITH ('connector' = 'json', 'path' = 'orders');\n"
SINK = "CREATE TABLE changes WITH ('connector' = 'console');\n"
INSERT = "INSERT INTO changes SELECT * FROM orders"


def sql(text: str) -> Job:
    return build(read_sql(Text(Path("/jobs/job.sql"), dedent(text))))


def source(table: str) -> JobSource:
    """The one source of a job whose first statement is the table."""
    return sql(table + SINK + INSERT.replace("orders", "t")).sources[0]


def wrong(text: str) -> tuple[str, str]:
    """The error that a job brings: its message, and the text in the file from its place on."""
    text = dedent(text)
    with pytest.raises(JobError) as raised:
        sql(text)
    error = raised.value
    line = text.split("\n")[error.line - 1]
    assert str(error).split("\n") == [
        f"{error.path}:{error.line}:{error.column}: {error.message}",
        f"  {line}",
        "  " + " " * (error.column - 1) + "^",
    ]
    return error.message, line[error.column - 1 :]
