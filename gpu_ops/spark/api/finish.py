"""The end of input: the output that a state folder still holds when nothing more will come."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable
from typing import Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as st

from gpu_ops.descriptions.description import Description
from gpu_ops.errors import DescriptionError, StateError
from gpu_ops.spark.api.query_file import of_last, shown
from gpu_ops.spark.api.streams import without_hidden
from gpu_ops.spark.datatypes import spark_type
from gpu_ops.spark.driver.directory import Directory
from gpu_ops.spark.driver.executors import as_hadoop_has_it
from gpu_ops.spark.driver.workers import make_importable
from gpu_ops.spark.given import refuse_connect
from gpu_ops.spark.plan.column_metadata import changelog_columns
from gpu_ops.spark.server.recovery import stored_version
from gpu_ops.spark.tasks.bounded import LeftOver
from gpu_ops.spark.tasks.functions import Grouped, known_function
from gpu_ops.spark.wire.command import parse_join
from gpu_ops.state.address import Location, StateAddress
from gpu_ops.state.durable import PartitionLog
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import FINISHED, Manifest


def finish(
    spark: SparkSession,
    *,
    state: Location,
    apply: Callable[[pa.Table, pa.Table], pa.Table] | None = None,
    schema: st.StructType | str | None = None,
) -> DataFrame:
    """The output that is left once the input has ended.

    With ``emit="at_end"``, of an aggregate and of a co-group that is the result; of a join that has seen nothing but
    backlog its net result; of an interval join the pads of rows that still waited.

    Call it when the query has stopped of its own accord, as after ``trigger(availableNow=True)``. Afterwards the
    folder is finished: to call it again gives the same rows, and to start the query again is refused, unless
    `reopen` takes that back. Spark's tasks compute the result partition by partition.

    Args:
        spark: a Spark session.
        state: the state folder.
        apply: the function of a co-group that was not described in this session.
        schema: of what it gives.

    Returns:
        A static DataFrame with the changelog's columns, or those that a query of `gpu_ops.sql` selects, or those of a
        co-group's function; without rows for a join that never waits.

    Raises:
        StateError: no state folder, one that a running query uses, or one whose last micro-batch was
            not done by all partitions.
        DescriptionError: a co-group's function is not known, or one is given for something else.
    """
    refuse_connect(spark)
    return _left(spark, Files.at(state), apply, schema, finished=True)


def result_of(df: DataFrame, state: StateAddress) -> DataFrame:
    """The result of a stream that has one at its end: its query is run to the end of what there is.

    The folder is not finished by that: whoever asked keeps the rows, and does not ask again.

    Args:
        df: the stream.
        state: its operator's state folder.
    """
    checkpoint = as_hadoop_has_it(state.below(_RUN))
    writer = df.writeStream.format("noop").option("checkpointLocation", checkpoint)
    writer.trigger(availableNow=True).start().awaitTermination()
    return _left(df.sparkSession, Files.at(state), None, None, finished=False)


_RUN: Final = "run"
"""In a state folder: the checkpoint of the query that was run for the operator above."""


def _left(
    spark: SparkSession,
    query: Files,
    apply: Callable[[pa.Table, pa.Table], pa.Table] | None,
    schema: st.StructType | str | None,
    *,
    finished: bool,
) -> DataFrame:
    files = of_last(query)
    manifest = Manifest.of(files)
    manifest.check_cut(files.location)
    user = Directory.of(spark).state_in_use(files.address)
    if user is not None:
        raise StateError(f"state folder {files.location} is in use by the running query {user}; stop it first")
    join = parse_join(manifest.description)
    function = _function(spark, join, files.address, apply, schema)
    output = st.StructType([st.StructField(x.name, spark_type(x.type)) for x in join.output_schema])
    if function is not None:
        output = function.schema
    version = stored_version(files, manifest)
    if not _has_output(join, files, manifest, version):
        rows = spark.createDataFrame([], output)
    else:
        make_importable(spark)
        content = {"version": version, "finished": dt.datetime.now(dt.UTC).isoformat(timespec="seconds")}
        if finished:
            files.create(FINISHED, json.dumps(content).encode())
        numbers = spark.range(0, manifest.partitions, 1, manifest.partitions)
        rows = numbers.mapInArrow(LeftOver(files.address, manifest, version, function), output)
    if function is not None:
        return rows
    return shown(query, join, without_hidden(rows.select(*changelog_columns(join, "finish", ""))))


def reopen(*, state: Location) -> None:
    """Lets a finished state folder take more input.

    What `finish` handed out stays handed out: rows that come now may match rows whose pads are out, and a later
    `finish` gives the result of all input anew, as does a backlog that goes live.

    Args:
        state: the state folder; one that is not finished stays as it is.
    """
    of_last(Files.at(state)).delete([FINISHED])


def _function(
    spark: SparkSession,
    join: Description,
    state: StateAddress,
    apply: Callable[[pa.Table, pa.Table], pa.Table] | None,
    schema: st.StructType | str | None,
) -> Grouped | None:
    """The function of a co-group, None of anything else."""
    if (apply is None) != (schema is None):
        raise DescriptionError("apply= and schema= go together")
    if not join.takes_function:
        if apply is not None:
            raise DescriptionError(f"apply= is for a co-group; the state folder {state} is none's")
        return None
    if apply is not None and schema is not None:
        return Grouped.of(apply, schema)
    found = known_function(spark, state)
    if found is None:
        raise DescriptionError(
            f"state folder {state} is a co-group's, and its function is not kept there: give it again, "
            "finish(spark, state=..., apply=, schema=), or call co_group() in this application first"
        )
    return found


def _has_output(join: Description, files: Files, manifest: Manifest, version: int) -> bool:
    """Whether the end of input gives any output."""
    if join.emit == "at_end":
        return True
    if version == 0 or join.by_time:
        return version > 0
    logs = (PartitionLog(files, manifest, partition) for partition in range(manifest.partitions))
    return join.why_no_backlog() is None and any(log.in_backlog(version) for log in logs)
