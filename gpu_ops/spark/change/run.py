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
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as f
from pyspark.sql import types as st

from gpu_ops.descriptions.changelog import ROW_KIND_COLUMN
from gpu_ops.errors import NotBuiltError, StateError
from gpu_ops.query.catalyst import java_class
from gpu_ops.spark.api.query import CHANGED, CHANGING, PlannedQuery, stored_sources, table_of
from gpu_ops.spark.change.old_query import OldInput, OldOperator, OldQuery
from gpu_ops.spark.change.planner import ChangePlanner
from gpu_ops.spark.datatypes import named_column
from gpu_ops.spark.driver.checkpoint import Checkpoint, write_checkpoint
from gpu_ops.spark.driver.executors import as_hadoop_has_it
from gpu_ops.spark.driver.queries import plans_of
from gpu_ops.spark.driver.stream_sources import StreamSource, sources_of
from gpu_ops.spark.plan.stored_query import StoredQuery, folders_of
from gpu_ops.spark.sinks.changes import COUNT, View, net
from gpu_ops.spark.sources.topics import topics_beside
from gpu_ops.state.address import StateAddress
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import MANIFEST, Manifest

_FOLDER: Final = "change"
_DIFFERENCE: Final = "difference"
_ROWS_IN_A_FILE: Final = 1_000_000
_FILES_AT_ONCE: Final = 4
"""Files of rows in one micro-batch that fills the state."""


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
        query_id = self._begin()
        built = dataclasses.replace(self._old, query_id=query_id) if self._changing.all_kept else self._built()
        self._copy(built)
        difference = self._difference(empty_sink=empty_sink)
        if write is not None:
            _write(write, difference, built.query_id, built.version - 1)
        self._finish(built)

    def _copy(self, built: Checkpoint) -> None:
        """Copies the state of operators that stay."""
        whole = self._changing.all_kept
        for node, folder in folders_of(self._planned.plan, self._state):
            old = self._changing.kept.get(id(node))
            if old is not None and (old.is_last or not whole):
                old.copy(self._session, folder, built.query_id, built.version, whole=whole)
            files = Files.at(folder)
            manifest = Manifest.read(files) if self._changing.kept else None
            if manifest is not None and manifest.join_number is not None:  # there were less where others stay
                _write_text(files, MANIFEST, dataclasses.replace(manifest, join_number=None).to_json())

    def _check(self) -> None:
        """Refuses what is not as it has to be, before anything is changed."""
        old, version = self._changing.old, self._old.version
        old.check_stopped(self._session)
        if old.version != version:
            raise StateError(
                f"state folder {old.state} holds {old.version} micro-batches, and the checkpoint {version}: they are "
                "not of one query, or the query has one to finish: start it once more, and stop it"
            )
        if old.query_id != self._old.query_id:
            raise StateError(
                f"state folder {old.state} belongs to query {old.query_id}, and the checkpoint to "
                f"{self._old.query_id}: give those of one query"
            )
        for name, table in self._changing.tables.items():
            if table.origin == "state" and self._planned.streams[name].df.isStreaming:
                for source in sources_of(self._planned.streams[name].df):
                    self._number_in_old(name, source)

    def _number_in_old(self, table: str, source: StreamSource) -> int:
        """The number of a table's source in the old checkpoint.

        Raises:
            StateError: the table was read from another source, or by several that may stand at different places.
        """
        its = [x.source for x in self._changing.old.stored.sources if (x.table or "").lower() == table.lower()]
        same = [one for one in its if one.description == source.description]
        if not its:
            raise StateError(
                f"it is not known which source of the old checkpoint is table {table!r}: the old query has one that is "
                "no readStream, or was last started with an earlier version"
            )
        if not same:
            raise StateError(
                f"table {table!r} is read from {source.label}, and was read from "
                f"{' and '.join(one.label for one in its)}: give it another name, and it is read from its beginning"
            )
        if len(same) > 1:
            raise StateError(
                f"the old query has {len(same)} sources of table {table!r}, which may stand at different places: begin "
                "anew, or read the table again"
            )
        return same[0].number

    def _number_in_build(self, source: StreamSource) -> int:
        """The number of a source in the checkpoint of the run that filled the state."""
        loads = [one.number for one in self._sources if one.same_load(source)]
        return loads[0] if loads else next(x.number for x in self._sources if x.description == source.description)

    def _begin(self) -> str:
        """Marks the new folder as one that is being filled, if it is new or was marked so.

        Returns:
            An id for the new query, if no query is run to fill the folder.
        """
        content = {"other": str(self._changing.old.state), "query": self._planned.stored.text}
        found = self._files.read(CHANGING)
        query_id = str(uuid.uuid4()) if found is None else json.loads(found.to_pybytes()).pop("query_id")
        content["query_id"] = query_id
        if found is not None and json.loads(found.to_pybytes()) != content:
            raise StateError(
                f"state folder {self._state} is being filled by another change: give state= and checkpoint= new folders"
            )
        if found is None:
            if StoredQuery.read(self._files) is not None or Manifest.read(self._files) is not None:
                raise StateError(f"state folder {self._state} has a query's state: give state= a new folder")
            self._files.create(CHANGING, json.dumps(content).encode())
        return query_id

    def _part(self, name: str, rows: Callable[[], DataFrame]) -> str:
        """Writes rows as Parquet below the folder unless they are there already; returns where."""
        location = f"{self._below}/{name}"
        if not self._has(name):
            rows().write.mode("overwrite").option("maxRecordsPerFile", _ROWS_IN_A_FILE).parquet(location)
        return location

    def _has(self, name: str) -> bool:
        """True if rows were written to their end."""
        path = java_class(self._session, "org.apache.hadoop.fs.Path")(f"{self._below}/{name}/_SUCCESS")
        configuration = self._session._jsparkSession.sessionState().newHadoopConf()
        return bool(path.getFileSystem(configuration).exists(path))

    def _built(self) -> Checkpoint:
        """Fills the new state, and keeps the changelog that comes out; returns the checkpoint of that."""
        numbers = {reading: number for number, reading in enumerate(self._changing.readings)}

        def rows(reading: OldInput | OldOperator) -> DataFrame:
            frame = reading.rows(self._session)
            location = self._part(f"inputs/{numbers[reading]}", lambda: frame)
            read = self._session.readStream.schema(frame.schema).option("maxFilesPerTrigger", _FILES_AT_ONCE)
            return _as_changelog(read.parquet(location), frame.schema)

        changes = self._planned.changelog(self._options, self._changing.stand_ins(rows))
        below = self._below

        def keep(batch: DataFrame, number: int) -> None:
            batch.write.mode("overwrite").parquet(f"{below}/result/batch={number}")

        if not self._has(_DIFFERENCE):  # later it would read on, past what the sink was given
            writer = changes.writeStream.foreachBatch(keep).option("checkpointLocation", f"{below}/checkpoint")
            names = ", ".join(plan.name for plan in plans_of(changes))
            writer.queryName(f"{names}: change").trigger(availableNow=True).start().awaitTermination()
        self._sources = sources_of(changes)
        return Checkpoint.read(self._session, f"{below}/checkpoint", self._sources)

    @functools.cached_property
    def _changes(self) -> DataFrame:
        """The changelog of the new query, as it will run."""
        return self._planned.changelog(self._options)

    def _difference(self, *, empty_sink: bool) -> DataFrame:
        """Gives the rows that are no more, and those that are new, which the sink gets."""
        schema = self._changes.schema

        def rows() -> DataFrame:
            old = self._changing.old
            if self._changing.all_kept:
                new = old.result(self._session, self._planned.plan)
            else:
                new = self._session.read.schema(schema).parquet(f"{self._below}/result/*")
            return _net(schema, new, None if empty_sink else old.result(self._session))

        return _as_changelog(self._session.read.schema(schema).parquet(self._part(_DIFFERENCE, rows)), schema)

    def _finish(self, build: Checkpoint) -> None:
        """Writes the new checkpoint, and opens the new folder in place of the old one."""
        of_table = {name: sources_of(side.df) for name, side in self._planned.streams.items() if side.df.isStreaming}
        parts: list[tuple[Checkpoint, int]] = []
        sources = sources_of(self._changes)
        for source in sources:
            table = table_of(source, of_table)
            if table is not None and self._changing.tables[table].origin == "state":
                parts.append((self._old, self._number_in_old(table, source)))
            else:
                parts.append((build, self._number_in_build(source)))
        write_checkpoint(
            self._session, self._checkpoint, build.query_id, build.version - 1, parts, build=build, sources=sources,
            beside=topics_beside(self._session, parts),
        )  # fmt: skip
        stored = dataclasses.replace(self._planned.stored, sources=stored_sources(self._changes, self._planned.streams))
        stored.write(self._files)
        _put(Files.at(self._changing.old.state), CHANGED, self._state)
        self._files.delete([CHANGING])


def undo(planned: PlannedQuery, state: StateAddress, options: Mapping[str, Any], write: View | None) -> None:
    """Gives a sink the result that an old query had, and opens its state folder again; see `gpu_ops.undo_change`."""
    session, files = planned.session, Files.at(state)
    content = files.read(CHANGED)
    if content is None:
        raise StateError(
            f"the query of state folder {state} was not changed into another one: there is nothing to undo"
        )
    other = StateAddress.of(json.loads(content.to_pybytes())["other"])
    if Files.at(other).read(CHANGING) is not None:
        raise StateError(f"the change into state folder {other} was not done to its end: run it again first")
    new, old = OldQuery(other, session), OldQuery(state, session)
    for one in (new, old):
        one.check_stopped(session)
        why = one.why_no_result()
        if write is not None and why is not None:
            raise NotBuiltError(f"the change cannot be undone in the sink: {why}")
    if write is not None:
        schema = planned.changelog(options).schema
        difference = _net(schema, old.result(session), new.result(session)).localCheckpoint()
        _write(write, _as_changelog(difference, schema), new.query_id, new.version)
    _put(Files.at(other), CHANGED, state)
    files.delete([CHANGED])


def _put(files: Files, name: str, other: StateAddress) -> None:
    _write_text(files, name, json.dumps({"other": str(other)}))


def _write_text(files: Files, name: str, text: str) -> None:
    files.write(name, lambda file: file.write(text.encode()))


def _write(write: View, difference: DataFrame, query_id: str, number: int) -> None:
    """Gives a sink rows as a micro-batch of a query."""
    context, name = difference.sparkSession.sparkContext, "sql.streaming.queryId"
    before = context.getLocalProperty(name)
    context.setLocalProperty(name, query_id)
    try:
        write(difference, number)
    finally:
        context.setLocalProperty(name, before)


def _net(schema: st.StructType, new: DataFrame, old: DataFrame | None) -> DataFrame:
    """The difference between two results as a changelog, what goes first.

    Args:
        schema: of the changelog.
        new: a changelog, or a result with row kind ``+I``.
        old: a result; columns that it lacks are null. None for no rows.
    """
    rows = new.select(*(named_column(x.name).cast(x.dataType).alias(x.name) for x in schema))
    if old is not None:
        there = {name.lower(): name for name in old.columns}
        kept = [f.lit("-D").alias(ROW_KIND_COLUMN)]
        for field in schema.fields[1:]:
            name = there.get(field.name.lower())
            value = f.lit(None) if name is None else named_column(name)
            kept.append(value.cast(field.dataType).alias(field.name))
        rows = rows.unionAll(old.select(*kept))
    counted = net(rows, exact=True)
    names = [x for x in counted.columns if x != COUNT]
    kind = f.when(f.col(COUNT) < 0, "-D").otherwise("+I").alias(ROW_KIND_COLUMN)
    copies = f.explode(f.sequence(f.lit(1), f.abs(f.col(COUNT)))).alias(COUNT)
    changes = counted.select(kind, *map(named_column, names), copies).drop(COUNT)
    return changes.sortWithinPartitions(f.desc(ROW_KIND_COLUMN))


def _as_changelog(rows: DataFrame, schema: st.StructType) -> DataFrame:
    """Rows with what is known of a changelog's columns."""
    return rows.select(*(named_column(x.name).alias(x.name, metadata=x.metadata) for x in schema))
