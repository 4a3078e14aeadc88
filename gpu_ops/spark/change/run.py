"""A query that changes keeps its state: the new query's state is built from the rows that the old one's holds.

What a query has put out so far, folded, follows from the rows of its inputs that are still there, and most operators
keep these rows. So the new query is run once over them, silently: that fills its state, and gives its result. What the
sink gets is the difference between the old result and the new one, in one micro-batch. The sources go on in a new
checkpoint where the old query's stood. A table of which the state does not hold what the new query needs is read from
its source's beginning instead, and nothing else is.

The old state folder and checkpoint are only read. The new ones are of no use before all is done; a change that was
interrupted is run again, and goes on where it was. In the new state folder::

    changing.json                 names the old one, until the change is done
    change/inputs/<n>             rows of the old state, as Parquet
    change/checkpoint             of the query that fills the state
    change/result/batch=<n>       its changelog
    change/difference             what the sink gets
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from gpu_ops.descriptions.changelog import ROW_KIND_COLUMN
from gpu_ops.errors import StateError
from gpu_ops.spark.api.query import CHANGED, CHANGING, stored_sources, table_of
from gpu_ops.spark.change.old_query import OldInput
from gpu_ops.spark.change.planner import ChangePlanner
from gpu_ops.spark.datatypes import named_column
from gpu_ops.spark.driver.checkpoint import Checkpoint, write_checkpoint
from gpu_ops.spark.driver.directory import Directory
from gpu_ops.spark.driver.executors import as_hadoop_has_it
from gpu_ops.spark.driver.queries import plans_of
from gpu_ops.spark.driver.stream_sources import sources_of
from gpu_ops.spark.plan.stored_query import StoredQuery
from gpu_ops.spark.sinks.changes import COUNT, View, net
from gpu_ops.state.address import StateAddress
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import Manifest

_FOLDER: Final = "change"

Origin = Literal["state", "source"]


class ChangeRun:
    """The steps of a change, each of which is done once, whatever interrupts them.

    Args:
        changing: what is to be done.
        options: of the new query's operators.
        checkpoint: the new one.
        old: the old one.
    """

    def __init__(self, changing: ChangePlanner, options: Mapping[str, Any], checkpoint: str, old: Checkpoint) -> None:
        self._changing, self._options, self._checkpoint, self._old = changing, options, checkpoint, old
        self._planned, self._session = changing.planned, changing.session
        self._state: StateAddress = options["state"]
        self._files = Files.at(self._state)
        self._below = as_hadoop_has_it(self._state.below(_FOLDER))

    def run(self, write: View | None, *, empty_sink: bool) -> None:
        """Does all that is left to do."""
        self._check()
        self._begin()
        build = self._built()
        difference = self._difference(build, empty_sink=empty_sink)
        if write is not None:
            self._written(write, difference, build)
        self._finish(build)

    def _check(self) -> None:
        """Refuses what is not as it has to be, before anything is changed."""
        old, version = self._changing.old, self._old.version
        for one in old.operators.values():
            user = Directory.of(self._session).state_in_use(one.stored.state)
            if user is not None:
                raise StateError(f"state folder {one.stored.state} is in use by the running query {user}; stop that")
        if old.version != version:
            raise StateError(
                f"state folder {old.state} holds {old.version} micro-batches, and the checkpoint {version}: they are "
                "not of one query, or the query has one to finish: start it once more, and stop it"
            )
        for one in old.operators.values():
            query = Manifest.of(Files.at(one.stored.state)).query_id
            if query != self._old.query_id:
                raise StateError(
                    f"state folder {one.stored.state} belongs to query {query}, and the checkpoint to "
                    f"{self._old.query_id}: give those of one query"
                )
        by_name = {name.lower(): name for name in self._planned.streams}
        for number, source in enumerate(old.stored.sources):
            name = by_name.get((source.table or "").lower())
            if name is None or self._changing.tables[name].origin != "state":
                continue
            now = [one.description for one in sources_of(self._planned.streams[name].df)]
            if source.source.description not in now:
                raise StateError(
                    f"table {name!r} is read from another source than before, which was {source.source.label}: give it "
                    "another name, and it is read from its beginning"
                )
            if self._old.offsets[number] != self._old.offsets[self._source_of(name)]:
                raise StateError(
                    f"the query read table {name!r} twice, and one of them further than the other: start it once more "
                    "with trigger(availableNow=True), and then change it"
                )

    def _source_of(self, table: str) -> int:
        """The number of a table's source in the old checkpoint."""
        sources = self._changing.old.stored.sources
        return next(n for n, x in enumerate(sources) if (x.table or "").lower() == table.lower())

    def _begin(self) -> None:
        """Marks the new folder as one that is being filled, if it is new or was marked so."""
        content = {"other": str(self._changing.old.state), "query": self._planned.stored.text}
        found = self._files.read(CHANGING)
        if found is not None and json.loads(found.to_pybytes()) != content:
            raise StateError(
                f"state folder {self._state} is being filled by another change: give state= and checkpoint= new folders"
            )
        if found is None:
            if StoredQuery.read(self._files) is not None or Manifest.read(self._files) is not None:
                raise StateError(f"state folder {self._state} has a query's state: give state= a new folder")
            self._files.create(CHANGING, json.dumps(content).encode())

    def _part(self, name: str, rows: Callable[[], DataFrame]) -> str:
        """Writes rows as Parquet below the folder unless they are there already; returns where."""
        location = f"{self._below}/{name}"
        jvm: Any = self._session._jvm
        path = jvm.org.apache.hadoop.fs.Path(f"{location}/_SUCCESS")
        if not path.getFileSystem(self._session._jsparkSession.sessionState().newHadoopConf()).exists(path):
            rows().write.mode("overwrite").parquet(location)
        return location

    def _built(self) -> Checkpoint:
        """Fills the new state, and keeps the changelog that comes out; returns the checkpoint of that."""
        numbers = {reading: number for number, reading in enumerate(self._changing.readings)}

        def rows(reading: OldInput) -> DataFrame:
            frame = reading.rows(self._session)
            location = self._part(f"inputs/{numbers[reading]}", lambda: frame)
            return self._session.readStream.schema(frame.schema).parquet(location)

        changes = self._planned.changelog(self._options, self._changing.stand_ins(rows))
        below = self._below

        def keep(batch: DataFrame, number: int) -> None:
            batch.write.mode("overwrite").parquet(f"{below}/result/batch={number}")

        writer = changes.writeStream.foreachBatch(keep).option("checkpointLocation", f"{below}/checkpoint")
        names = ", ".join(plan.name for plan in plans_of(changes))
        writer.queryName(f"{names}: change").trigger(availableNow=True).start().awaitTermination()
        self._sources = sources_of(changes)
        return Checkpoint.read(self._session, f"{below}/checkpoint", self._sources)

    @functools.cached_property
    def _changes(self) -> DataFrame:
        """The changelog of the new query, as it will run."""
        return self._planned.changelog(self._options)

    def _difference(self, build: Checkpoint, *, empty_sink: bool) -> DataFrame:
        """What the sink gets: rows that are no more, and rows that are new."""
        schema = self._changes.schema

        def rows() -> DataFrame:
            new = self._session.read.schema(schema).parquet(f"{self._below}/result/*")
            if empty_sink:
                return _counted(new)
            old = self._changing.old.result(self._session)
            there = {name.lower(): name for name in old.columns}
            kept: list[Column] = []
            for field in schema:
                own = there.get(field.name.lower())
                value = f.lit(None) if own is None else named_column(own)
                kept.append(value.cast(field.dataType).alias(field.name))
            kept[0] = f.lit("-D").alias(ROW_KIND_COLUMN)
            return _counted(old.select(*kept).unionAll(new.select(*map(named_column, schema.names))))

        location = self._part("difference", rows)
        known = [named_column(x.name).alias(x.name, metadata=x.metadata) for x in schema]
        return self._session.read.schema(schema).parquet(location).select(*known)

    def _written(self, write: View, difference: DataFrame, build: Checkpoint) -> None:
        """Gives the sink the difference, as the last micro-batch of the query that filled the state."""
        context = self._session.sparkContext
        name = "sql.streaming.queryId"
        before = context.getLocalProperty(name)
        context.setLocalProperty(name, build.query_id)
        try:
            write(difference, build.version - 1)
        finally:
            context.setLocalProperty(name, before)

    def _finish(self, build: Checkpoint) -> None:
        """Writes the new checkpoint, and opens the new folder in place of the old one."""
        of_table = {name: sources_of(side.df) for name, side in self._planned.streams.items() if side.df.isStreaming}
        built = {one.description: number for number, one in enumerate(self._sources)}
        parts: list[tuple[Checkpoint, int]] = []
        sources = sources_of(self._changes)
        for source in sources:
            table = table_of(source, of_table)
            if table is not None and self._changing.tables[table].origin == "state":
                parts.append((self._old, self._source_of(table)))
            else:
                parts.append((build, built[source.description]))
        write_checkpoint(
            self._session, self._checkpoint, build.query_id, build.version - 1, parts, build=build, sources=sources
        )
        stored = dataclasses.replace(self._planned.stored, sources=stored_sources(self._changes, self._planned.streams))
        stored.write(self._files)
        content = json.dumps({"other": str(self._state)}).encode()
        Files.at(self._changing.old.state).write(CHANGED, lambda file: file.write(content))
        self._files.delete([CHANGING])


def _counted(changes: DataFrame) -> DataFrame:
    """The net rows of a changelog, those that go first."""
    rows = net(changes, exact=True)
    names = [x for x in rows.columns if x != COUNT]
    kind = f.when(f.col(COUNT) < 0, "-D").otherwise("+I").alias(ROW_KIND_COLUMN)
    copies = f.explode(f.sequence(f.lit(1), f.abs(f.col(COUNT)))).alias(COUNT)
    return (
        rows.select(kind, *map(named_column, names), copies).drop(COUNT).sortWithinPartitions(f.desc(ROW_KIND_COLUMN))
    )
