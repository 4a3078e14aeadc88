"""The end of input: what a join over a state folder still has to say when nothing more will come."""

from __future__ import annotations

import datetime as dt
import json

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as st

from gpu_ops.errors import StateError
from gpu_ops.spark.command import parse_join
from gpu_ops.spark.datatypes import spark_type
from gpu_ops.spark.directory import Directory
from gpu_ops.spark.left_over import LeftOver
from gpu_ops.spark.marks import marked
from gpu_ops.spark.plan import make_importable
from gpu_ops.spark.watermarks import timed
from gpu_ops.state.durable import PartitionLog
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import FINISHED, MANIFEST, Manifest


def finish(spark: SparkSession, *, state: str) -> DataFrame:
    """What is left to be said once the input of a join has ended: the pads of rows that still waited.

    Call it when the query has stopped of its own accord, as after ``trigger(availableNow=True)``. It says
    what a watermark beyond every time would end. Afterwards the folder is finished: to call it again gives
    the same rows, and to start the query again is refused, unless `reopen` takes that back.

    Args:
        spark: a Spark session.
        state: the join's state folder.

    Returns:
        A static DataFrame with the changelog's columns; without rows for a join that never waits.

    Raises:
        StateError: no state folder, one that a running query uses, or one whose last micro-batch was
            not done by all partitions.
    """
    files = Files.at(state)
    manifest = Manifest.read(files)
    if manifest is None:
        raise StateError(f"{files.location} is no state folder: there is no {files.name(MANIFEST)}")
    user = Directory.of(spark).state_in_use(state)
    if user is not None:
        raise StateError(f"state folder {files.location} is in use by the running query {user}; stop it first")
    join = parse_join(manifest.description)
    schema = st.StructType([st.StructField(x.name, spark_type(x.type)) for x in join.output_schema])
    version = _version(files, manifest)
    if timed(join) is None or version == 0:
        rows = spark.createDataFrame([], schema)
    else:
        make_importable(spark)
        content = {"version": version, "finished": dt.datetime.now(dt.UTC).isoformat(timespec="seconds")}
        files.create(FINISHED, json.dumps(content).encode())
        numbers = spark.range(0, manifest.partitions, 1, manifest.partitions)
        rows = numbers.mapInArrow(LeftOver(state, manifest, version), schema)
    return rows.select(*marked(join, "finish", ""))


def reopen(*, state: str) -> None:
    """Lets a finished state folder take more input.

    What `finish` handed out stays handed out: rows that come now may match rows whose pads are out.

    Args:
        state: the state folder; one that is not finished stays as it is.
    """
    Files.at(state).delete([FINISHED])


def _version(files: Files, manifest: Manifest) -> int:
    """How many micro-batches the state holds, 0 for none.

    Raises:
        StateError: not the same number in all partitions.
    """
    versions = []
    for partition in range(manifest.partitions):
        stored = PartitionLog(files, partition).stored(clean=False)
        versions.append(max([0, *(batch + 1 for batch in stored.records), *stored.snapshots]))
    if len(set(versions)) > 1:
        raise StateError(
            f"state folder {files.location} stopped in the middle of batch {max(versions) - 1}: not all partitions "
            "have done it. Start the query again, let it come to an end, and finish it then"
        )
    return versions[0]
