"""The result of a job whose inputs end, as a stream: each sink then takes it as it takes changes, and once.

It is computed when the inputs have ended, written into the folder ``result`` below the state, and comes from there in
the one micro-batch of a query of its own, whose checkpoint is ``result`` below the job's. A job that is killed on the
way goes on where it was: at its inputs, at the result, or at the sink.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Final

import gpu_ops
from gpu_ops.descriptions.changelog import ROW_KIND_COLUMN
from gpu_ops.jobs.connectors import UNRESUMED
from gpu_ops.jobs.job import Job, Sink
from gpu_ops.jobs.sinks import start
from gpu_ops.spark.api.finish import QUERY, of_last, query_in
from gpu_ops.spark.api.static import beside_streams
from gpu_ops.spark.api.streams import Stream
from gpu_ops.spark.sinks.changes import View
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import FINISHED, Manifest

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

_RESULT: Final = "result"


def is_bounded(job: Job) -> bool:
    """Whether all its sources are tables that are read once: the job is done without a stream."""
    return all(source.scan == "once" and source.refresh is None for source in job.sources)


def taking_in(job: Job) -> Job:
    """The job while its inputs last: nothing goes to its sink."""
    return dataclasses.replace(job, sink=Sink("blackhole", None, {}, job.sink.at))


def has_ended(job: Job) -> bool:
    """Whether its inputs have ended in a run before, which may not have come to its sink.

    Raises:
        JobError: the state folder has another query, or a result and then more input.
    """
    if job.state is None:
        return False
    files = Files.at(job.state)
    if query_in(files) not in (None, job.query.text):
        raise job.file.error(
            f"state folder {job.state} belongs to another query: set another state and checkpoint", job.query.at
        )
    ended = query_in(files) is not None and of_last(files).stamp(FINISHED) is not None
    if not ended and not is_bounded(job) and _RESULT in files.folders(""):
        raise job.file.error(
            f"state folder {job.state} was opened again, and its result has been handed to the sink: for a result of "
            "more input set another state and checkpoint, and insert into another table",
            job.query.at,
        )
    return ended


def result(spark: SparkSession, job: Job) -> DataFrame | None:
    """What the query selects now that its inputs have ended; None where there never was a micro-batch."""
    assert job.state is not None
    if Manifest.read(of_last(Files.at(job.state))) is None:
        return None
    return gpu_ops.finish(spark, state=job.state)


def write(rows: DataFrame, job: Job, screen: View | None = None) -> StreamingQuery:
    """Starts the query that brings a result into the job's sink, unless one has done so.

    Args:
        rows: a static DataFrame, row kinds first.
        job: the job. A sink that keeps nothing is given the result each time.
        screen: takes it in place of the sink.

    Raises:
        JobError: the sink cannot take it.
    """
    if job.state is not None and is_bounded(job):
        Files.at(job.state).create(QUERY, json.dumps({"query": job.query.text}).encode())
    state = None if job.state is None else job.state.below(_RESULT)
    [ended] = beside_streams([Stream(_RESULT, row_kind=ROW_KIND_COLUMN, df=rows)], state)
    assert ended.load is not None
    ended.load()
    checkpoint = None
    if job.checkpoint is not None and job.sink.connector not in UNRESUMED:
        checkpoint = f"{job.checkpoint.rstrip('/')}/{_RESULT}"
    return start(ended.df, dataclasses.replace(job, checkpoint=checkpoint), once=True, last_join=None, screen=screen)
