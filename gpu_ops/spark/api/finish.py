"""The end of input: the output that a state folder still holds when nothing more will come."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as st

from gpu_ops.descriptions.description import Description
from gpu_ops.errors import DescriptionError, StateError
from gpu_ops.fields import decoded, encoded
from gpu_ops.query.by_time import read
from gpu_ops.query.catalyst import calc, check_plan, like, message_of
from gpu_ops.query.errors import SqlError
from gpu_ops.query.expressions import QueryColumn
from gpu_ops.query.nodes import Calc, Plan, PlanNode
from gpu_ops.query.places import position
from gpu_ops.query.plan import MultiWay, plan
from gpu_ops.query.relations import Table
from gpu_ops.spark.api.streams import without_hidden
from gpu_ops.spark.datatypes import spark_type
from gpu_ops.spark.driver.directory import Directory
from gpu_ops.spark.driver.executors import as_hadoop_has_it, make_importable
from gpu_ops.spark.driver.queries import plans_of
from gpu_ops.spark.failures import refuse_connect, refuse_gone
from gpu_ops.spark.plan.column_metadata import changelog_columns
from gpu_ops.spark.server.recovery import stored_version
from gpu_ops.spark.tasks.engine import LeftOver
from gpu_ops.spark.tasks.functions import Grouped
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
    backlog its net result; of an interval join the unmatched rows that still waited.

    Call it when the query has stopped of its own accord, as after ``trigger(availableNow=True)``. Afterwards the
    folder is finished: to call it again gives the same rows, and to start the query again is refused until
    `reopen` reopens it. Spark's tasks compute the result partition by partition.

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
    refuse_gone(spark.sparkContext)
    return _left(spark, Files.at(state), apply, schema, finished=True)


def result_of(df: DataFrame, state: StateAddress) -> DataFrame:
    """The result of a stream that has one at its end: its query is run to the end of what there is.

    The folder is not finished by that: whoever asked keeps the rows, and does not ask again.

    Args:
        df: the stream.
        state: its operator's state folder.
    """
    checkpoint = as_hadoop_has_it(state.below(_RUN))
    name = ", ".join(plan.name for plan in plans_of(df))
    writer = df.writeStream.format("noop").option("checkpointLocation", checkpoint)
    writer.queryName(f"{name}: run to its end").trigger(availableNow=True).start().awaitTermination()
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
        rows = numbers.mapInArrow(LeftOver(files.address, manifest, version, function), output)
    if function is not None:
        return rows
    return shown(query, description, without_hidden(rows.select(*changelog_columns(description, "finish", ""))))


def reopen(*, state: Location) -> None:
    """Lets a finished state folder take more input.

    What `finish` returned is not retracted: new rows may match rows that it returned as unmatched, and a later
    `finish` gives the result of all input anew, as does a backlog that goes live.

    Args:
        state: the state folder; one that is not finished stays as it is.
    """
    of_last(Files.at(state)).delete([FINISHED])


def _function(
    spark: SparkSession,
    description: Description,
    state: StateAddress,
    apply: Callable[[pa.Table, pa.Table], pa.Table] | None,
    schema: st.StructType | str | None,
) -> Grouped | None:
    """The function of a co-group, None of anything else."""
    if (apply is None) != (schema is None):
        raise DescriptionError("apply= and schema= go together")
    if not description.takes_function:
        if apply is not None:
            raise DescriptionError(f"apply= is for a co-group; the state folder {state} is none's")
        return None
    if apply is not None and schema is not None:
        return Grouped.of(apply, schema)
    found = Directory.of(spark).functions.get(state.identity)
    if found is None:
        raise DescriptionError(
            f"state folder {state} is a co-group's, and its function is not kept there: give it again, "
            "finish(spark, state=..., apply=, schema=), or call co_group() in this application first"
        )
    return found


def _has_output(description: Description, files: Files, manifest: Manifest, version: int) -> bool:
    """Whether the end of input gives any output."""
    if description.emit == "at_end":
        return True
    if version == 0 or description.by_time:
        return version > 0
    logs = (PartitionLog(files, manifest, partition) for partition in range(manifest.partitions))
    return description.why_no_backlog() is None and any(log.in_backlog(version) for log in logs)


QUERY: Final = "query.json"
"""In the state folder of a query with an operator that waits for the end of its input: beside that one's manifest, or
above the folders of several operators."""


OF_TABLE: Final = (
    "name", "schema", "row_kind", "unique_key", "updates", "event_times", "sequence_by", "ttl_ms", "grows",
)  # fmt: skip
"""What the file has of a table."""


def calculated(node: Calc, rows: DataFrame) -> DataFrame:
    """Rows filtered and projected."""
    below = node.input.row_kind
    kind = (below, node.row_kind) if below is not None and node.row_kind is not None else None
    select = [(x.name, x.expr.java if x.expr is not None else x.column) for x in node.select]
    return calc(rows, node.known, [x.java for x in node.conditions], select, kind)


def check_runs(node: Calc, rows: DataFrame, sql: str) -> None:
    """That Spark can run what `calculated` makes: the physical plan is made over rows like these, with its code.

    Args:
        node: filters and projections.
        rows: what they are of.
        sql: the query.

    Raises:
        SqlError: it cannot.
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
                    node, conditions=(), made={made: part}, left=(("part", made),), row_kind=None
                )
                check_plan(calculated(alone, stand_in))
            except (PySparkException, Py4JJavaError):
                at = position(part.java.origin())
                break
        named = re.search(r"\[[A-Z_.]+\]", message_of(error))
        why = f" {named.group()}" if named else ""
        raise text.error(SqlError(f"Spark understands this, and cannot run it{why}", text.sql, *at)) from error


def remember(
    files: Files, tables: Mapping[str, Table], schemas: Mapping[str, st.StructType], planned: Plan, multi_way: MultiWay
) -> None:
    """Writes a query into its state folder.

    Raises:
        StateError: another one stands there.
    """
    given = {
        name: {**{name: encoded(getattr(table, name)) for name in OF_TABLE}, "spark": schemas[name].json()}
        for name, table in tables.items()
    }
    content: dict[str, Any] = {"query": planned.sql, "multi_way": multi_way, "tables": given}
    if len(planned.joins) > 1:
        content["operators"] = len(planned.joins)
    text = json.dumps(content, sort_keys=True)
    if not files.create(QUERY, text.encode()) and _content(files) != json.loads(text):
        raise StateError(
            f"state folder {files.location} belongs to another query, or to this one over other tables; "
            "gpu_ops.finish() would not know which result to give. Give state= a new folder"
        )


def of_last(files: Files) -> Files:
    """The state folder of the operator that waits for the end: a query's last one, else the folder itself."""
    operators = _content(files).get("operators", 1)
    return files if operators == 1 else Files.at(files.address.below(str(operators)))


def query_in(files: Files) -> str | None:
    """The query whose state folder this is; None where it is none's, or not known."""
    return _content(files).get("query")


def shown(files: Files, description: Description, rows: DataFrame) -> DataFrame:
    """What the query of a state folder selects of its operator's rows; these rows where it has none.

    Args:
        files: the state folder.
        description: of its last operator.
        rows: what that gives.

    Raises:
        StateError: the query means another operator in this session.
    """
    content = _content(files)
    if not content:
        return rows
    tables: dict[str, Table] = {}
    schemas: dict[str, st.StructType] = {}
    for name, given in content["tables"].items():
        schemas[name] = st.StructType.fromJson(json.loads(given.pop("spark")))
        tables[name] = decoded(Table, given)
    planned = plan(
        content["query"], tables, rows.sparkSession, schemas=schemas, emit="at_end", multi_way=content["multi_way"]
    )
    means = planned.joins[-1].description.output
    if [(c.name, c.type) for c in means] != [(c.name, c.type) for c in description.output]:
        raise StateError(
            f"state folder {files.location}: its query means another operator in this session than when it began; "
            "finish it with the settings and the version of that session"
        )

    def frame(node: PlanNode) -> DataFrame:
        return calculated(node, frame(node.input)) if isinstance(node, Calc) else rows

    return frame(planned.root)


def _content(files: Files) -> dict[str, Any]:
    """Of the query's file; nothing where there is none."""
    content = files.read(QUERY)
    return {} if content is None else dict(json.loads(content.to_pybytes()))
