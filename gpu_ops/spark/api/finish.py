"""The end of input: the result that a state folder still holds when no more rows will come."""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
import json
import re
from collections.abc import Callable
from typing import Final

import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as st

from gpu_ops.descriptions.dataflow import Dataflow
from gpu_ops.descriptions.description import Description
from gpu_ops.errors import DescriptionError, StateError
from gpu_ops.query.by_time import read
from gpu_ops.query.catalyst import calc, check_plan, like, message_of
from gpu_ops.query.errors import SqlError
from gpu_ops.query.expressions import QueryColumn
from gpu_ops.query.nodes import Calc, PlanNode
from gpu_ops.query.places import position
from gpu_ops.spark.api.streams import without_hidden
from gpu_ops.spark.driver.directory import Directory
from gpu_ops.spark.driver.executors import as_hadoop_has_it, make_importable
from gpu_ops.spark.driver.queries import plans_of
from gpu_ops.spark.failures import refuse_connect, refuse_gone
from gpu_ops.spark.plan.column_metadata import changelog_columns
from gpu_ops.spark.plan.stored_query import StoredQuery, of_last
from gpu_ops.spark.server.recovery import stored_version
from gpu_ops.spark.tasks.engine import ForEachNumber, result_left
from gpu_ops.spark.tasks.functions import CoGroupTask
from gpu_ops.spark.wire.command import parse_join
from gpu_ops.spark_types import spark_type
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
    """Returns the remaining output of an operator once its input has ended.

    With ``emit="at_end"`` that is the whole result, as for a co-group; for a join that has seen nothing but backlog its
    net result; for an interval join the unmatched rows that still waited.

    Call it when the query has stopped of its own accord, as after ``trigger(availableNow=True)``. Afterwards the
    folder is finished: to call it again gives the same rows, and to start the query again is refused until
    `reopen` reopens it. Spark's tasks compute the result partition by partition.

    Args:
        spark: a Spark session.
        state: the state folder.
        apply: the function of a co-group that was not described in this session.
        schema: the schema of that function's result.

    Returns:
        A static DataFrame with the changelog's columns, or those that a query of `gpu_ops.sql` selects, or those of a
        co-group's function; without rows for a join that never waits.

    Raises:
        StateError: there is no state folder, a running query uses it, or its last micro-batch was not done by all
            partitions.
        DescriptionError: a co-group's function is not known, or one is given for another operator.

    Example:
        >>> arrive(folder + "/in", {"user": "a", "amount": 2}, {"user": "a", "amount": 3})
        >>> sales = spark.readStream.schema("user STRING, amount INT").json(folder + "/in")
        >>> totals = gpu_ops.aggregate(
        ...     sales, by="user", aggregates={"total": "sum(amount)"}, emit="at_end", state=folder + "/state"
        ... )
        >>> writer = totals.writeStream.format("noop").option("checkpointLocation", folder + "/checkpoint")
        >>> writer.trigger(availableNow=True).start().awaitTermination()
        >>> gpu_ops.finish(spark, state=folder + "/state").show()
        +--------+----+-----+
        |row_kind|user|total|
        +--------+----+-----+
        |      +I|   a|    5|
        +--------+----+-----+
    """
    refuse_connect(spark)
    refuse_gone(spark.sparkContext)
    return _left(spark, Files.at(state), apply, schema, finished=True)


def result_of(df: DataFrame, state: StateAddress) -> DataFrame:
    """Runs the query of a stream to the end of its present input, and returns the result.

    The state folder is not marked as finished: the caller keeps the rows, and does not ask again.

    Args:
        df: the stream, which has a result at its end.
        state: the state folder of its operator.
    """
    checkpoint = as_hadoop_has_it(state.below(_RUN))
    name = ", ".join(plan.name for plan in plans_of(df))
    writer = df.writeStream.format("noop").option("checkpointLocation", checkpoint)
    writer.queryName(f"{name}: run to its end").trigger(availableNow=True).start().awaitTermination()
    return _left(df.sparkSession, Files.at(state), None, None, finished=False)


_RUN: Final = "run"
"""The folder, in a state folder, of the checkpoint of a query that was run for the operator above."""


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
    description = parse_join(manifest.description)
    function = _function(spark, description, files.address, apply, schema)
    output = st.StructType([st.StructField(x.name, spark_type(x.type)) for x in description.output_schema])
    if function is not None:
        output = function.schema
    version = stored_version(files, manifest)
    if not _has_output(description, files, manifest, version):
        rows = spark.createDataFrame([], output)
    else:
        make_importable(spark)
        content = {"version": version, "finished": dt.datetime.now(dt.UTC).isoformat(timespec="seconds")}
        if finished:
            files.create(FINISHED, json.dumps(content).encode())
        numbers = spark.range(0, manifest.partitions, 1, manifest.partitions)
        left = functools.partial(result_left, files.address, manifest, version, function)
        rows = numbers.mapInArrow(ForEachNumber("gpu_join_left_over", left), output)
    if function is not None:
        return rows
    last = description.last if isinstance(description, Dataflow) and not description.outputs else description
    return shown(query, description, without_hidden(rows.select(*changelog_columns(last, "finish", ""))))


def reopen(*, state: Location) -> None:
    """Lets a finished state folder take more input.

    What `finish` returned is not retracted: new rows may match rows that it returned as unmatched, and a later
    `finish` gives the result of all input anew, as does a backlog that goes live.

    Args:
        state: the state folder; one that is not finished is left unchanged.

    Example:
        >>> gpu_ops.reopen(state="/data/state/orders")  # doctest: +SKIP
    """
    of_last(Files.at(state)).delete([FINISHED])


def _function(
    spark: SparkSession,
    description: Description,
    state: StateAddress,
    apply: Callable[[pa.Table, pa.Table], pa.Table] | None,
    schema: st.StructType | str | None,
) -> CoGroupTask | None:
    """The function of a co-group; None for any other operator."""
    if (apply is None) != (schema is None):
        raise DescriptionError("apply= and schema= go together")
    if not description.takes_function:
        if apply is not None:
            raise DescriptionError(f"apply= is for a co-group; the state folder {state} is none's")
        return None
    if apply is not None and schema is not None:
        return CoGroupTask.of(apply, schema)
    found = Directory.of(spark).functions.get(state.identity)
    if found is None:
        raise DescriptionError(
            f"state folder {state} is a co-group's, and its function is not kept there: give it again, "
            "finish(spark, state=..., apply=, schema=), or call co_group() in this application first"
        )
    return found


def _has_output(description: Description, files: Files, manifest: Manifest, version: int) -> bool:
    """True if the end of input has any output."""
    if description.emit == "at_end":
        return True
    if version == 0 or description.by_time:
        return version > 0
    logs = (PartitionLog(files, manifest, partition) for partition in range(manifest.partitions))
    return description.why_no_backlog() is None and any(log.in_backlog(version) for log in logs)


def calculated(node: Calc, rows: DataFrame) -> DataFrame:
    """Filters and projects rows as a node of a query says."""
    below = node.input.row_kind
    kind = (below, node.row_kind) if below is not None and node.row_kind is not None else None
    select = [(x.name, x.expr.java if x.expr is not None else x.column) for x in node.select]
    return calc(rows, node.known, [x.java for x in node.conditions], select, kind)


def check_runs(node: Calc, rows: DataFrame, sql: str) -> None:
    """Checks that Spark can run the result of `calculated`: makes the physical plan over such rows, and its code.

    Args:
        node: the filters and projections.
        rows: the rows to filter.
        sql: the query.

    Raises:
        SqlError: Spark cannot run it.
    """
    parts = [*node.conditions, *(x.expr for x in node.select if x.expr is not None)]
    if not parts:
        return
    stand_in = like(rows)
    try:
        check_plan(calculated(node, stand_in))
    except (PySparkException, Py4JJavaError) as error:
        text, at = read(sql), (1, 1)
        for part in parts:
            try:
                made = QueryColumn("part", "", pa.null)
                alone = dataclasses.replace(
                    node, conditions=(), computed={made: part}, left=(("part", made),), row_kind=None
                )
                check_plan(calculated(alone, stand_in))
            except (PySparkException, Py4JJavaError):
                at = position(part.java.origin())
                break
        named = re.search(r"\[[A-Z_.]+\]", message_of(error))
        why = f" {named.group()}" if named else ""
        raise text.error(SqlError(f"Spark understands this, and cannot run it{why}", text.sql, *at)) from error


def shown(files: Files, description: Description, rows: DataFrame) -> DataFrame:
    """Applies the SELECT of a state folder's query to the operator's rows; returns them unchanged without a query.

    Args:
        files: the state folder.
        description: the description of its last operator.
        rows: the rows of that operator.

    Raises:
        StateError: the query means another operator in this session.
    """
    stored = StoredQuery.read(files)
    if stored is None or stored.emit != "at_end":
        return rows
    planned = stored.plan(rows.sparkSession)
    means = planned.joins[-1].description.output
    if [(c.name, c.type) for c in means] != [(c.name, c.type) for c in description.output]:
        raise StateError(
            f"state folder {files.location}: its query means another operator in this session than when it began; "
            "finish it with the settings and the version of that session"
        )

    def frame(node: PlanNode) -> DataFrame:
        return calculated(node, frame(node.input)) if isinstance(node, Calc) else rows

    return frame(planned.root)
