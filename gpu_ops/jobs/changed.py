"""Changes the query of a job: `gpu-join plan-change`, `gpu-join change`, and back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

from pyspark.sql import DataFrame
from rich.console import Console

import gpu_ops
from gpu_ops.errors import NotBuiltError
from gpu_ops.jobs.job import Job, Sink
from gpu_ops.jobs.runner import hidden, session_of, tables_of
from gpu_ops.jobs.tables import beside_others, errors_of_spark, shaped
from gpu_ops.query.errors import SqlError
from gpu_ops.spark.change.planner import QueryChange
from gpu_ops.spark.sinks.changes import View

Missing = Literal["refuse", "null"]
T = TypeVar("T")
"""What is given back."""


def plan(job: Job, console: Console, old_state: str, *, read_again: Sequence[str], missing: Missing) -> QueryChange:
    """Tells what it takes to change the query of a state folder into that of a job; nothing is changed.

    Args:
        job: the new job.
        console: for what is worth a warning.
        old_state: the state folder of the old one.
        read_again: as of `gpu_ops.plan_change`.
        missing: likewise.

    Raises:
        JobError: the job has several queries, or one that cannot be.
    """
    with hidden(job), session_of(job, console) as spark:
        return _of_query(
            job, gpu_ops.plan_change, old_state=old_state, tables=tables_of(spark, job, console),
            read_again=read_again, missing=missing,
        )  # fmt: skip


def change(
    job: Job,
    console: Console,
    old_state: str,
    old_checkpoint: str,
    *,
    read_again: Sequence[str],
    missing: Missing,
    empty_sink: bool,
) -> QueryChange:
    """Builds a job's state and checkpoint from those of an old one, and brings its sink up to date.

    Args:
        job: the new job, whose state and checkpoint are new folders.
        console: for what is worth a warning.
        old_state: the state folder of the old job.
        old_checkpoint: its checkpoint.
        read_again: as of `gpu_ops.change`, like those that follow.
        missing: likewise.
        empty_sink: likewise.

    Raises:
        JobError: the job has several queries, or one that cannot be, or no folders.
    """
    if job.state is None or job.checkpoint is None:
        raise job.file.error("set state and checkpoint, a new folder each, in the job or as options", job.sink.at)
    with hidden(job), session_of(job, console) as spark:
        return _of_query(
            job, gpu_ops.change, state=job.state, checkpoint=job.checkpoint, old_state=old_state,
            old_checkpoint=old_checkpoint, tables=tables_of(spark, job, console), read_again=read_again,
            missing=missing, empty_sink=empty_sink, write=_sink(job), backend=job.backend, partitions=job.partitions,
            name=job.name,
        )  # fmt: skip


def undo(job: Job, console: Console) -> None:
    """Goes back to a job that was changed into another one.

    Args:
        job: the old job.
        console: for what is worth a warning.

    Raises:
        JobError: the job has several queries, or no folders.
    """
    if job.state is None:
        raise job.file.error("set state, the folder of the job as it was", job.sink.at)
    with hidden(job), session_of(job, console) as spark:
        tables = tables_of(spark, job, console)
        _of_query(job, gpu_ops.undo_change, state=job.state, tables=tables, write=_sink(job))


def _of_query(job: Job, work: Callable[..., T], **options: Any) -> T:
    """Does something with the job's only query; errors have its position."""
    if job.views or len(job.inserts) != 1 or job.is_bounded or job.emit == "at_end":
        raise NotBuiltError(
            "a job of one INSERT INTO without views is changed, whose input does not end; begin others anew"
        )
    query = job.query
    try:
        return work(query.translated.sql, emit=job.emit, multi_way=job.multi_way, **options)
    except SqlError as error:
        raise query.error(job.file, error) from error


def _sink(job: Job) -> View:
    """The function that brings a micro-batch into the job's sink."""
    return functools.partial(_written, job=job, sink=job.sink)


def _written(rows: DataFrame, number: int, *, job: Job, sink: Sink) -> None:
    with errors_of_spark(rows.sparkSession, job.file, sink.connector, sink.at), job.file.errors_at(sink.at):
        beside_others(sink, job.file)(shaped(rows, sink, job.file), number)
