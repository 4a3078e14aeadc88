"""The commits of a Delta table as a stream; Spark remembers the last version, and no later one is skipped.

A Python data source, for Spark 4.2 and newer. An offset is ``{"version": n, "table": id}``: the last commit that was
read, and the table's id; offsets before the table's first commit, and in older checkpoints, have no id.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as st
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxFiles, SupportsTriggerAvailableNow

from gpu_ops.errors import BadInputError
from gpu_ops.files.delta_log import LOG, Log
from gpu_ops.query.catalyst import java_class

_COLUMNS: Final = st.StructType([st.StructField("path", st.StringType()), st.StructField("time", st.LongType())])

Offset = dict[str, Any]


def commits(spark: SparkSession, table: str, options: Mapping[str, str]) -> DataFrame:
    """Streams one row for each commit of a Delta table: the file in the table's log, and the version.

    Args:
        spark: the session.
        table: the table's folder.
        options: ``startingVersion``, ``failOnDataLoss`` and ``maxFilesPerTrigger``, as far as they are set.
    """
    path = java_class(spark, "org.apache.hadoop.fs.Path")(table)
    conf = spark._jsparkSession.sessionState().newHadoopConf()
    settings = {
        "table": str(path.getFileSystem(conf).makeQualified(path).toString()),
        "first": int(options.get("startingVersion", "0")),
        "most": int(options["maxFilesPerTrigger"]) if "maxFilesPerTrigger" in options else None,
        "lost": options.get("failOnDataLoss", "true") == "false",
    }
    spark.dataSource.register(DeltaCommits)
    return spark.readStream.format(DeltaCommits.name()).option("given", json.dumps(settings)).load()


class DeltaCommits(DataSource):
    """Spark data source of the commits of a Delta table; the module says what its offsets are."""

    @classmethod
    def name(cls) -> str:
        """The name of the format in Spark."""
        return "gpu_ops_delta_commits"

    def schema(self) -> st.StructType:
        """The columns of a row: the commit's file, and the version, by which files are ordered."""
        return _COLUMNS

    def streamReader(self, schema: st.StructType) -> Commits:
        """Makes the reader that plans micro-batches and reads commits."""
        return Commits(**json.loads(self.options["given"]))


class Commits(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans micro-batches of a table's commits, in a Python process beside the driver.

    Args:
        table: the table's folder, as Hadoop writes it.
        first: the version that a new query begins with.
        most: the most commits of a micro-batch; None for all.
        lost: whether the stream goes on where commits are gone before they were read.
    """

    def __init__(self, table: str, first: int, most: int | None, *, lost: bool) -> None:
        self._table, self._first, self._most, self._lost = table, first, most, lost
        self._target: int | None = None

    def initialOffset(self) -> Offset:
        """The offset before the first commit, where a new query begins.

        Raises:
            BadInputError: ``startingVersion`` is beyond the latest version.
        """
        latest = self._versions()[1]
        if self._first > max(latest, 0):
            problem = f"startingVersion={self._first} is beyond the latest version of the Delta table, {latest}"
            raise BadInputError(self._table, None, problem)
        return {"version": self._first - 1}

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        """The offset of the last commit of the next micro-batch.

        Raises:
            BadInputError: a commit before it is gone, or the table is another one.
        """
        if "version" not in start:
            problem = (
                "the checkpoint is of an older gpu-join, which did not note the last version: begin with another one"
            )
            raise BadInputError(self._table, None, problem)
        existing, latest = self._versions()
        if latest < 0:
            return start
        table = self._same_table(latest, start)
        begin, end = start["version"] + 1, latest if self._target is None else self._target
        if latest < start["version"] and start["version"] >= self._first and not self._lost:
            raise self._gone(start["version"], f"its latest version is {latest} now: was it made anew?")
        if isinstance(limit, ReadMaxFiles):
            end = min(end, begin + limit.max_files - 1)
        missing = next((version for version in range(begin, end + 1) if version not in existing), None)
        if missing is not None and not self._lost:
            later = min((version for version in existing if version > missing), default=None)
            raise self._gone(missing, f"the earliest one after it is {later}" if later else "nothing is after it")
        return {"version": max(end, start["version"]), "table": table}

    def getDefaultReadLimit(self) -> ReadLimit:
        """The limit of a micro-batch that ``maxFilesPerTrigger`` sets."""
        return ReadAllAvailable() if self._most is None else ReadMaxFiles(self._most)

    def prepareForTriggerAvailableNow(self) -> None:
        """Leaves commits that come later to the next run."""
        self._target = self._versions()[1]

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """One input partition for each commit between two offsets.

        Raises:
            BadInputError: the table is another one.
        """
        existing, latest = self._versions()
        self._same_table(latest, start, end)
        versions = range(start["version"] + 1, end["version"] + 1)
        # what was removed after it was planned is an error of the task that reads it
        return [
            InputPartition((f"{self._table}/{LOG}/{x:020}.json", x))
            for x in versions
            if x in existing or not self._lost
        ]

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        """Yields a commit's file and version as a row."""
        yield partition.value

    def _versions(self) -> tuple[set[int], int]:
        """The versions whose commits exist, and the latest version that anything in the log names; -1 for none."""
        try:
            return Log(self._table, self._table).versions()
        except OSError as error:
            raise BadInputError(self._table, None, f"it is no Delta table: {error}") from error

    def _same_table(self, latest: int, *offsets: Offset) -> str:
        """Returns the table's id, and checks that the offsets have the same one."""
        try:
            table = Log(self._table, self._table).state(latest).table_id
        except (OSError, ValueError) as error:
            raise BadInputError(self._table, None, f"its log cannot be read: {error}") from error
        other = next((x["table"] for x in offsets if x.get("table", table) != table), None)
        if other is not None:
            raise BadInputError(
                self._table,
                None,
                f"the Delta table has another id now, {table}, and {other} when it was last read: it was dropped and "
                "made anew, and rows that came from the first one are not taken back by the second. Begin anew, with "
                "another checkpointLocation and state",
            )
        return table

    def _gone(self, version: int, how: str) -> BadInputError:
        return BadInputError(
            self._table,
            None,
            f"version {version} of the Delta table was to be read and is not in {LOG} any more; {how}. Commits may "
            "have been deleted by log cleanup, and their rows would be missing: begin anew, with another "
            "checkpointLocation and a startingVersion that is there, and raise delta.logRetentionDuration. With the "
            "option failOnDataLoss=false the query goes on with what is there",
        )
