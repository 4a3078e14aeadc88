"""The commits of a Delta table as a stream: Spark remembers the last version, and none is left out behind it.

A data source in Python, of Spark 4.2 on. An offset is ``{"version": n, "table": id}``: the last commit that was read,
and whose; those before the table's first commit, and of older checkpoints, have no id.
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
    """A row a commit: the file in the table's log, and the version.

    Args:
        spark: the session.
        table: the folder.
        options: ``startingVersion``, ``failOnDataLoss`` and ``maxFilesPerTrigger``, as far as they are given.
    """
    path = java_class(spark, "org.apache.hadoop.fs.Path")(table)
    conf = spark._jsparkSession.sessionState().newHadoopConf()
    given = {
        "table": str(path.getFileSystem(conf).makeQualified(path).toString()),
        "first": int(options.get("startingVersion", "0")),
        "most": int(options["maxFilesPerTrigger"]) if "maxFilesPerTrigger" in options else None,
        "lost": options.get("failOnDataLoss", "true") == "false",
    }
    spark.dataSource.register(DeltaCommits)
    return spark.readStream.format(DeltaCommits.name()).option("given", json.dumps(given)).load()


class DeltaCommits(DataSource):
    """See the module."""

    @classmethod
    def name(cls) -> str:
        """How Spark calls it."""
        return "gpu_ops_delta_commits"

    def schema(self) -> st.StructType:
        """The file, and the version as what orders files."""
        return _COLUMNS

    def streamReader(self, schema: st.StructType) -> Commits:
        """What plans micro-batches."""
        return Commits(**json.loads(self.options["given"]))


class Commits(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Says which commits there are, in a process of its own beside the driver.

    Args:
        table: the folder, as Hadoop writes it.
        first: the version that a new query begins with.
        most: commits of a micro-batch; None for all.
        lost: whether commits may be gone before they were read.
    """

    def __init__(self, table: str, first: int, most: int | None, *, lost: bool) -> None:
        self._table, self._first, self._most, self._lost = table, first, most, lost
        self._target: int | None = None

    def initialOffset(self) -> Offset:
        """Before the first commit.

        Raises:
            BadInputError: ``startingVersion`` is beyond the latest version.
        """
        latest = self._versions()[1]
        if self._first > max(latest, 0):
            problem = f"startingVersion={self._first} is beyond the latest version of the Delta table, {latest}"
            raise BadInputError(self._table, None, problem)
        return {"version": self._first - 1}

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        """The last commit of the next micro-batch.

        Raises:
            BadInputError: a commit before it is not there any more, or another table is.
        """
        if "version" not in start:
            problem = (
                "the checkpoint is of an older gpu-join, which did not note the last version: begin with another one"
            )
            raise BadInputError(self._table, None, problem)
        there, latest = self._versions()
        if latest < 0:
            return start
        table = self._same_table(latest, start)
        begin, end = start["version"] + 1, latest if self._target is None else self._target
        if latest < start["version"] and start["version"] >= self._first and not self._lost:
            raise self._gone(start["version"], f"its latest version is {latest} now: was it made anew?")
        if isinstance(limit, ReadMaxFiles):
            end = min(end, begin + limit.max_files - 1)
        missing = next((version for version in range(begin, end + 1) if version not in there), None)
        if missing is not None and not self._lost:
            later = min((version for version in there if version > missing), default=None)
            raise self._gone(missing, f"the earliest one after it is {later}" if later else "nothing is after it")
        return {"version": max(end, start["version"]), "table": table}

    def getDefaultReadLimit(self) -> ReadLimit:
        """``maxFilesPerTrigger``."""
        return ReadAllAvailable() if self._most is None else ReadMaxFiles(self._most)

    def prepareForTriggerAvailableNow(self) -> None:
        """What comes later is for the next run."""
        self._target = self._versions()[1]

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """One a commit.

        Raises:
            BadInputError: another table is there.
        """
        there, latest = self._versions()
        self._same_table(latest, start, end)
        versions = range(start["version"] + 1, end["version"] + 1)
        # what was removed after it was planned is an error of the task that reads it
        return [
            InputPartition((f"{self._table}/{LOG}/{x:020}.json", x)) for x in versions if x in there or not self._lost
        ]

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        """The commit itself, as a row."""
        yield partition.value

    def _versions(self) -> tuple[set[int], int]:
        """Those whose commits are there, and the latest that anything says of; -1 for none."""
        try:
            return Log(self._table, self._table).versions()
        except OSError as error:
            raise BadInputError(self._table, None, f"it is no Delta table: {error}") from error

    def _same_table(self, latest: int, *offsets: Offset) -> str:
        """The table's id, which has to be that of the offsets."""
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
