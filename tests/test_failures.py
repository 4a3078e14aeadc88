# ruff: noqa: E501 - texts as they are
"""What `gpu_ops.why` takes of the texts of exceptions, as Spark 4.2, Delta and drivers of databases write them."""

from __future__ import annotations

import pytest

from gpu_ops.spark.failures import message_in

JAVA = "\tat org.postgresql.core.v3.QueryExecutorImpl.execute(QueryExecutorImpl.java:372)\n" * 2
FRAMES = '  File "/app/job.py", line 5, in write\n    table.insert(rows)\n    ^^^^^^^^^^^^^^^^^^\n'
FAILED = "[STREAM_FAILED] Query [id = 1-a, runId = 2-b] terminated with exception: "
FUNCTION = (
    f"{FAILED}[FOREACH_BATCH_USER_FUNCTION_ERROR] An error occurred in the user provided function in foreach batch "
)
FUNCTION += "sink. Reason: Traceback (most recent call last):\n" + FRAMES
STATES = " SQLSTATE: 39000 SQLSTATE: XXKST\n"
QUERY = "=== Streaming Query ===\nIdentifier: [id = 1-a, runId = 2-b]\n\nLogical Plan:\n+- x\n"
PY4J = "An error occurred while calling o268.execute.\n: "
POSTGRES = 'org.postgresql.util.PSQLException: ERROR: duplicate key value violates unique constraint "t_key"\n'
POSTGRES += "  Detail: Key (id)=(1) already exists."
BATCH = (
    "java.sql.BatchUpdateException: Batch entry 0 INSERT INTO t (\"x\") VALUES (('a')) was aborted: ERROR: out of range"
)
STAGE = "org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 1.0 failed 4 times, "
STAGE += "most recent failure: Lost task 0.3 in stage 1.0 (TID 1) (10.0.0.7 executor 3): "
DELTA = (
    "io.delta.exceptions.ConcurrentAppendException: [DELTA_CONCURRENT_APPEND.WITHOUT_HINT] A transaction conflict.\n"
)
DELTA += 'Conflicting commit: {"version":12}\n\nRefer to https://docs.delta.io/concurrency-control.html'
OURS = "no such column (line 2, column 5)\n  AND c\n      ^\n\n  at the end of the text"
MULTI = "first line\nsecond line\n\n  fourth, indented\nat the end"
PLAN = "[UNRESOLVED_COLUMN] A column with name `nope` cannot be resolved."
WORKER = "pyspark.errors.exceptions.captured.PythonException: An exception was thrown from the Python worker:\n"

TABLE = {
    "Py4J": (PY4J + POSTGRES + "\n" + JAVA, POSTGRES),
    "Py4J, with causes": (
        PY4J + POSTGRES + "\n" + JAVA + "Caused by: java.io.IOException: x\n\t... 5 more\n",
        POSTGRES,
    ),
    "Py4J, its text in a function's traceback": (
        f"{FUNCTION}py4j.protocol.Py4JJavaError: {PY4J}{POSTGRES}\n{JAVA}\n{STATES}{QUERY}",
        POSTGRES,
    ),
    "Py4J, its text in a proxy's": (
        (
            "An exception was raised by the Python Proxy. Return Message: Traceback (most recent call last):\n"
            f"{FRAMES}py4j.protocol.Py4JJavaError: {PY4J}{DELTA}\n{JAVA}\n\n{QUERY}"
        ),
        DELTA,
    ),
    "a task's, in a stage's": (
        f"{PY4J}{STAGE}{BATCH}\n  Where: $1\n{JAVA}Caused by: {POSTGRES}\n\t... 1 more\n\nDriver stacktrace:\n{JAVA}",
        f"{BATCH}\n  Where: $1",
    ),
    "a write's": (
        (
            f"{PY4J}org.apache.spark.SparkException: Job aborted.\n{JAVA}Caused by: org.apache.spark.SparkException: "
            f"[TASK_WRITE_FAILED] Task failed while writing rows to s3://x.\n{JAVA}Caused by: {DELTA}\n{JAVA}"
        ),
        DELTA,
    ),
    "Delta's": (f"{FAILED}{DELTA} SQLSTATE: 2D521 SQLSTATE: XXKST\n{QUERY}", DELTA),
    "a user's, of several lines": (f"{FUNCTION}ValueError: {MULTI}\n{STATES}{QUERY}", f"ValueError: {MULTI}"),
    "a user's, with another before": (
        (
            f"{FUNCTION}KeyError: 'x'\n\nThe above exception was the direct cause of the following exception:\n\n"
            f"Traceback (most recent call last):\n{FRAMES}RuntimeError: two\nlines\n{STATES}{QUERY}"
        ),
        "RuntimeError: two\nlines",
    ),
    "a user's, with a note": (f"{FUNCTION}ValueError: noted\na note\n{STATES}{QUERY}", "ValueError: noted\na note"),
    "a user's, without words": (f"{FUNCTION}AssertionError\n{STATES}{QUERY}", "AssertionError"),
    "a worker's": (
        f"{FUNCTION}{WORKER}Traceback (most recent call last):\n{FRAMES}ValueError: {MULTI}\n{STATES}{QUERY}",
        f"ValueError: {MULTI}",
    ),
    "ours": (f"{FUNCTION}gpu_ops.errors.ConditionError: {OURS}\n{STATES}{QUERY}", OURS),
    "ours, of a worker": (
        (
            f"{FAILED}{STAGE}{WORKER}Traceback (most recent call last):\n{FRAMES}gpu_ops.errors.BadInputError: {OURS}\n\n"
            f"\tat org.apache.spark.api.python.BasePythonRunner.handle(PythonRunner.scala:1)\n{QUERY}"
        ),
        OURS,
    ),
    "ours, of a database's": (
        (
            f"{FUNCTION}py4j.protocol.Py4JJavaError: {PY4J}{POSTGRES}\n{JAVA}\n\nThe above exception was the direct cause "
            f"of the following exception:\n\nTraceback (most recent call last):\n{FRAMES}gpu_ops.errors.DescriptionError: {OURS}\n"
            f"{STATES}{QUERY}"
        ),
        OURS,
    ),
    "an analysis, its plan left out": (
        (
            f"{FUNCTION}pyspark.errors.exceptions.captured.AnalysisException: {PLAN} SQLSTATE: 42703;\n'Project ['nope]\n"
            f"+- LogicalRDD [value#71L], false\n\n{STATES}{QUERY}"
        ),
        f"pyspark.errors.exceptions.captured.AnalysisException: {PLAN}",
    ),
    "Spark's own, of several lines": (
        f"{FAILED}[USER_RAISED] boom\nagain SQLSTATE: P0001{STATES}{QUERY}",
        "[USER_RAISED] boom\nagain",
    ),
    "a group of exceptions": (
        (
            '  + Exception Group Traceback (most recent call last):\n  |   File "x.py", line 1, in f\n  |     g()\n'
            f"  | ExceptionGroup: several (2 sub-exceptions)\n  +-+------ 1 ------\n    | KeyError: 'y'\n{QUERY}"
        ),
        "ExceptionGroup: several (2 sub-exceptions)\n  +-+------ 1 ------\n    | KeyError: 'y'",
    ),
}


@pytest.mark.parametrize("what", TABLE)
def test_the_message_has_all_lines_of_the_cause_and_no_more(what: str) -> None:
    text, message = TABLE[what]
    assert message_in(text) == message
