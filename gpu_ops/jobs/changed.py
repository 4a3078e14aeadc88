"""Changes the query of a job: `gpu-join plan-change`, `gpu-join change`, and back."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal

from pyspark.sql import DataFrame, SparkSession
from rich.console import Console

from gpu_ops.errors import NotBuiltError
from gpu_ops.jobs.job import Job, Sink
from gpu_ops.jobs.runner import hidden, session_of, statements_of
from gpu_ops.jobs.tables import beside_others, errors_of_spark, shaped
from gpu_ops.spark.api.statements import StatementSet
from gpu_ops.spark.change.api import change_statements, plan_statements
from gpu_ops.spark.change.planner import QueryChange, refuse_final
from gpu_ops.spark.change.undo import undo as undo_statements
from gpu_ops.spark.sinks.changes import View

Missing = Literal["refuse", "null"]


def plan(job: Job, console: Console, old_state: str, *, read_again: Sequence[str], missing: Missing) -> QueryChange:
    """Tells what it takes to change the query of a state folder into that of a job; nothing is changed.

    Args:
        job: the new job.
        console: for what is worth a warning.
        old_state: the state folder of the old one.
        read_again: as of `gpu_ops.plan_change`.
        missing: likewise.

    Raises:
        JobError: one of its queries cannot be.
    """
    with hidden(job), session_of(job, console) as spark:
        new = _statements(spark, dataclasses.replace(job, state=None), console)
        return plan_statements(new, old_state=old_state, read_again=read_again, missing=missing)


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
        JobError: one of its queries cannot be, or it has no folders.
    """
    if job.state is None or job.checkpoint is None:
        raise job.file.error("set state and checkpoint, a new folder each, in the job or as options", job.sink.at)
    with hidden(job), session_of(job, console) as spark:
        new = functools.partial(_statements, spark, job, console)
        return change_statements(
            new, _sinks(job), state=job.state, checkpoint=job.checkpoint, old_state=old_state,
            old_checkpoint=old_checkpoint, empty_sink=empty_sink, read_again=read_again, missing=missing,
            partitions=job.partitions,
        )  # fmt: skip


def undo(job: Job, console: Console) -> None:
    """Goes back to a job that was changed into another one.

    Args:
        job: the old job.
        console: for what is worth a warning.

    Raises:
        JobError: it has no folders.
    """
    if job.state is None:
        raise job.file.error("set state, the folder of the job as it was", job.sink.at)
    with hidden(job), session_of(job, console) as spark:
        undo_statements(_statements(spark, job, console), _sinks(job))


def _statements(spark: SparkSession, job: Job, console: Console) -> StatementSet:
    """The queries of a job that is changed, or was."""
    if job.is_bounded:
        raise NotBuiltError("a job whose input ends is not changed: begin anew")
    refuse_final(job.emit)
    return statements_of(spark, dataclasses.replace(job, backlog=False), console, changing=True)


def _sinks(job: Job) -> dict[str, View]:
    """By the names of a job's queries the functions that bring a micro-batch into their sinks."""
    views = {one.query: one.name for one in job.views}  # a materialized view has the view's name
    return {
        views.get(one.query, one.name): functools.partial(_written, job=job, sink=one.sink)
        for one in job.inserts
        if one.sink is not None
    }


def _written(rows: DataFrame, number: int, *, job: Job, sink: Sink) -> None:
    with errors_of_spark(rows.sparkSession, job.file, sink.connector, sink.at), job.file.errors_at(sink.at):
        beside_others(sink, job.file)(shaped(rows, sink, job.file), number)
