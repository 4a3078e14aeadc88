"""A query that changes keeps its state: the new query's state is built from the rows that the old one's holds.

What a query has put out so far, folded, follows from the rows of its inputs that are still there, and most operators
keep these rows. Operators that compute the same rows as before take their state over. Others are run once, silently,
over these rows and the present results of those: that fills their state, and gives the new result. What a sink gets is
the difference between the old result and the new one, in one micro-batch. The sources go on in a new
checkpoint where the old query's stood. A table of which the state does not hold what the new query needs is read from
its source's beginning instead, and nothing else is.

The old state folder and checkpoint are only read. The new ones are of no use before all is done; a change that was
interrupted is run again, and goes on where it was. In the new state folder::

    changing.json                 names the old one, until the change is done
    change/inputs/<n>             rows of the old state, as Parquet
    change/checkpoint             of the query that fills the state of operators that are built
    change/result/batch=<n>       its changelog, or outputs
    change/filled                 once it is done
    assembled.json                the manifests of all states, once these are written
    change/difference/<n>         what each sink gets
"""

from __future__ import annotations

import dataclasses
import functools
import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any, Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as f
from pyspark.sql import types as st

from gpu_ops.descriptions.changelog import ROW_KIND_COLUMN
from gpu_ops.errors import NotBuiltError, StateError
from gpu_ops.query.catalyst import java_class
from gpu_ops.query.nodes import walk
from gpu_ops.query.relations import Scan
from gpu_ops.spark.api.outputs import outputs
from gpu_ops.spark.api.query import CHANGED, CHANGING
from gpu_ops.spark.api.statements import Statement, StatementSet, as_it_is
from gpu_ops.spark.change.old_query import (
    OldInput,
    OldOperator,
    OldStatements,
    as_table,
    grounds,
    operator_at,
    present_rows,
)
from gpu_ops.spark.change.planner import ChangePlanner
from gpu_ops.spark.driver.checkpoint import Checkpoint, write_checkpoint
from gpu_ops.spark.driver.executors import as_hadoop_has_it, make_importable
from gpu_ops.spark.driver.queries import plans_of
from gpu_ops.spark.driver.stream_sources import StreamSource, sources_of
from gpu_ops.spark.plan.stored_query import folders_of
from gpu_ops.spark.plan.stored_statements import (
    EngineState,
    StatePlace,
    StoredStatements,
    engines_of,
    folder_at,
    name_below,
    places_of,
)
from gpu_ops.spark.server.present import AssembledState, StoredOperator, why_no_result
from gpu_ops.spark.sinks.changes import COUNT, View, net
from gpu_ops.spark.sources.topics import topics_beside
from gpu_ops.spark.tasks.state import AssembleState
from gpu_ops.spark_types import named_column
from gpu_ops.state.address import StateAddress
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import LATEST, MANIFEST, Manifest

_FOLDER: Final = "change"
_DIFFERENCE: Final = "difference"
_FILLED: Final = "filled"
_ASSEMBLED: Final = "assembled.json"
_OUTPUT: Final = "output_"
"""What the outputs of the run are called, behind it their number; no view's name has such a column."""

_ROWS_IN_A_FILE: Final = 1_000_000
_FILES_AT_ONCE: Final = 4
"""Files of rows in one micro-batch that fills the state."""


class ChangeRun:
    """The steps of a change, each of which is done once, whatever interrupts them.

    Args:
        changing: what is to be done.
        checkpoint: the new one.
        old: the old one.
        again: makes the new queries once more.
    """

    def __init__(
        self, changing: ChangePlanner, checkpoint: str, old: Checkpoint, again: Callable[[], StatementSet]
    ) -> None:
        self._changing, self._checkpoint, self._old, self._again = changing, checkpoint, old, again
        self._new, self._session = changing.new, changing.session
        assert self._new.state is not None
        self._state: StateAddress = self._new.state
        self._files = Files.at(self._state)
        self._below = as_hadoop_has_it(self._state.below(_FOLDER))
        built = {id(node) for node in changing.operators if id(node) not in changing.kept}
        self._built = [one for one in self._new.outputs if self._is_built(one, built)]
        """The outputs that a run over old rows makes: others have no operator that is built."""

    def _is_built(self, output: Statement, built: Set[int]) -> bool:
        below = walk(*output.roots, views=True)
        again = {name for name, table in self._changing.tables.items() if table.origin == "source"}
        return any(id(node) in built or (isinstance(node, Scan) and node.table.name in again) for node in below)

    def run(self, views: Mapping[str, View], *, empty_sink: bool) -> None:
        """Does all that is left to do.

        Args:
            views: by the names of outputs, what brings a micro-batch into their sinks; nothing is written without.
            empty_sink: whether the sinks get all rows.
        """
        self._check()
        query_id = self._begin()
        build = self._fill() if self._built else dataclasses.replace(self._old, query_id=query_id)
        self._assemble(build)
        for output in self._new.outputs:
            difference = self._difference(output, empty_sink=empty_sink or not views)
            if views:
                _write(views[output.name], difference, build.query_id, build.version - 1)
        self._finish(build)

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
        for name, side in self._new.tables():
            if self._changing.tables[name].origin == "state" and side.df.isStreaming:
                for source in sources_of(side.df):
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
        sources = sources_of(self._filling)
        loads = [one.number for one in sources if one.same_load(source)]
        return loads[0] if loads else next(x.number for x in sources if x.description == source.description)

    def _begin(self) -> str:
        """Marks the new folder as one that is being filled, if it is new or was marked so.

        Returns:
            An id for the new query, if no query is run to fill the folder.
        """
        content = {
            "other": str(self._changing.old.state),
            "query": [one.planned.stored.text for one in self._new.statements],
        }
        found = self._files.read(CHANGING)
        query_id = str(uuid.uuid4()) if found is None else json.loads(found.to_pybytes()).pop("query_id")
        content["query_id"] = query_id
        if found is not None and json.loads(found.to_pybytes()) != content:
            raise StateError(
                f"state folder {self._state} is being filled by another change: give state= and checkpoint= new folders"
            )
        if found is None:
            if StoredStatements.read(self._files) is not None or Manifest.read(self._files) is not None:
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

    @functools.cached_property
    def _filling(self) -> DataFrame:
        """The changelog, or the outputs, of the new queries over the rows of the old state."""
        stand_ins = self._changing.stand_ins(self._streamed)
        made = dict[str, DataFrame]()
        for one in self._new.used:
            roots = {id(root) for output in self._built for root in walk(*output.roots, views=True)}
            if id(one.roots[0]) not in roots:
                continue
            rows = one.planned.changelog(one.options, stand_ins, made)
            if one in self._built:
                made[f"{_OUTPUT}{self._built.index(one)}"] = rows
            if not (one.is_output and one.as_view is as_it_is):
                made[one.name] = one.as_view(rows)
        frames = {name: made[name] for name in (f"{_OUTPUT}{number}" for number in range(len(self._built)))}
        return outputs(**frames) if len(frames) > 1 else next(iter(frames.values()))

    def _streamed(self, reading: OldInput | OldOperator) -> DataFrame:
        """Rows of the old state as a stream."""
        frame = self._frames[reading]
        read = self._session.readStream.schema(frame.schema).option("maxFilesPerTrigger", _FILES_AT_ONCE)
        return _as_changelog(read.parquet(self._input(reading)), frame.schema)

    def _static(self, reading: OldInput | OldOperator) -> DataFrame:
        """Rows of the old state at once."""
        schema = self._frames[reading].schema
        return _as_changelog(self._session.read.schema(schema).parquet(self._input(reading)), schema)

    def _input(self, reading: OldInput | OldOperator) -> str:
        """The place of rows of the old state, which are read from it once."""
        return self._part(f"inputs/{list(self._frames).index(reading)}", lambda: self._frames[reading])

    @functools.cached_property
    def _frames(self) -> dict[OldInput | OldOperator, DataFrame]:
        """The rows that are taken from the old state; behind them those of which only an old result is made."""
        old = self._changing.old
        nodes = [
            node for one in old.statements if one.of.is_output for part in one.plan.parts for node in grounds(part.root)
        ]
        of_results = [old.operators[id(node)] for node in nodes if id(node) in old.operators]
        every = dict.fromkeys([*self._changing.readings, *of_results])
        known = (one for one in every if isinstance(one, OldInput) or why_no_result(one.description) is None)
        return {one: one.rows(self._session) for one in known}

    def _fill(self) -> Checkpoint:
        """Fills the new state, and keeps the changelog that comes out; returns the checkpoint of that."""
        changes, below = self._filling, self._below

        def keep(batch: DataFrame, number: int) -> None:
            batch.write.mode("overwrite").parquet(f"{below}/result/batch={number}")

        if not self._has(_FILLED):  # later it would read on, past what the sink was given
            writer = changes.writeStream.foreachBatch(keep).option("checkpointLocation", f"{below}/checkpoint")
            names = ", ".join(plan.name for plan in plans_of(changes))
            writer.queryName(f"{names}: change").trigger(availableNow=True).start().awaitTermination()
            self._part(_FILLED, lambda: self._session.range(0))
        return Checkpoint.read(self._session, f"{below}/checkpoint", sources_of(changes))

    def _assemble(self, build: Checkpoint) -> None:
        """Gives the engines of the new query the states of operators that stay, and of those that were built."""
        content = self._files.read(_ASSEMBLED)
        if content is None:
            made: dict[str, Any] = self._assembled(build)
            _write_text(self._files, _ASSEMBLED, json.dumps(made))
        else:
            made = json.loads(content.to_pybytes())
        for folder, text in made["manifests"].items():
            _write_text(Files.at(folder_at(self._state, folder)), MANIFEST, text)
        for folder in made["drop"]:
            files = Files.at(folder_at(self._state, folder))
            files.delete([MANIFEST])
            files.delete_folder("p")

    def _assembled(self, build: Checkpoint) -> dict[str, Any]:
        """Writes the states of all engines.

        Returns:
            The manifests that they get, by folder, and folders that fall away.
        """
        filled = {one.folder: one for one in engines_of(self._filling, self._state)} if self._built else {}
        there = places_of(list(filled.values()))
        manifests = dict[str, str]()
        for engine in engines_of(self._new.changes, self._state):
            states = {
                own: state for own in engine.operators if (state := self._state_of(own, build, there)) is not None
            }
            if not states:
                continue  # it is over static inputs alone
            partitions = {state.manifest.partitions for state in states.values()}
            together = states.keys() == engine.operators.keys() and partitions == {engine.plan.partitions}
            parts = [engine] if together else [*self._apart(engine)]
            for part in parts:
                its = {name: states[own] for own, name in part.operators.items() if own in states}
                if not its:
                    continue
                (cut,) = {state.manifest.partitions for state in its.values()}
                wanted = dataclasses.replace(part.plan.manifest(build.query_id, None), partitions=cut)
                present = Manifest.read(Files.at(folder_at(self._state, part.folder)))
                as_it_is = present is not None and all(
                    there.get(own) == StatePlace(part.folder, name) and own not in self._kept_names
                    for own, name in part.operators.items()
                )
                if as_it_is and present is not None and present.digest == wanted.digest:
                    wanted = dataclasses.replace(present, join_number=None, union_order=wanted.union_order)
                else:
                    wanted = dataclasses.replace(wanted, generation=0 if present is None else present.generation + 1)
                    self._write_state(AssembledState(folder_at(self._state, part.folder), wanted, build.version, its))
                manifests[part.folder] = wanted.to_json()
        return {"manifests": manifests, "drop": [folder for folder in filled if folder not in manifests]}

    def _write_state(self, state: AssembledState) -> None:
        why = state.why_not()
        if why is not None:
            raise NotBuiltError(f"the state of an operator cannot be taken over: {why}: begin anew")
        make_importable(self._session)
        numbers = self._session.range(0, state.manifest.partitions, 1, state.manifest.partitions)
        numbers.mapInArrow(AssembleState(state), numbers.schema).collect()

    @staticmethod
    def _apart(engine: EngineState) -> Iterator[EngineState]:
        """The operators of an engine as engines of their own."""
        for own, plan in zip(engine.operators, engine.plan.in_task, strict=True):
            alone = dataclasses.replace(plan, dataflow=None, chained=(), union_order=None)
            yield EngineState(own, alone, {own: ""})

    def _state_of(self, own: str, build: Checkpoint, there: Mapping[str, StatePlace]) -> StoredOperator | None:
        """The state of a new operator by the name of the folder that is its own; None where it has none."""
        if own in self._kept_names:
            return self._changing.old.place_of(self._kept_names[own])
        return operator_at(self._state, there.get(own), build.version)

    @functools.cached_property
    def _kept_names(self) -> dict[str, str]:
        """By the names of the folders that are new operators' own, the old one's, of operators that stay."""
        found = dict[str, str]()
        for one in self._new.used:
            for node, address in folders_of(one.plan, folder_at(self._state, one.folder)):
                old, own = self._changing.kept.get(id(node)), name_below(address.identity, self._state)
                if old is not None and own is not None:
                    found[own] = old.own
                    for side in range(len(node.inputs)):  # of inputs that are made retractions first
                        latest = [f"{name}/{LATEST}/{side}".lstrip("/") for name in (own, old.own)]
                        found[latest[0]] = latest[1]
        return found

    def _difference(self, output: Statement, *, empty_sink: bool) -> DataFrame:
        """Gives the rows that are no more, and those that are new, which a sink gets."""
        schema, changing = output.changes.schema, self._changing

        def rows() -> DataFrame:
            if changing.as_it_was(output) and not empty_sink:
                return self._session.createDataFrame([], schema)
            old = changing.old_of(output)
            before = None if empty_sink or old is None else changing.old.result(old, self._static)
            return _net(schema, self._result(output), before)

        name = f"{_DIFFERENCE}/{self._new.outputs.index(output)}"
        return _as_changelog(self._session.read.schema(schema).parquet(self._part(name, rows)), schema)

    def _result(self, output: Statement) -> DataFrame:
        """The result of a new query."""
        if output in self._built:
            schema, number = self._filling.schema, self._built.index(output)
            kept = self._session.read.schema(schema).parquet(f"{self._below}/result/*")
            if len(self._built) == 1:
                return kept
            name = f"{_OUTPUT}{number}"
            return kept.where(f.col(name).isNotNull()).select(f"{name}.*")
        stand_ins = self._changing.stand_ins(self._static)

        def of_view(scan: Scan) -> DataFrame:
            view = next(one for one in self._new.used if one.name.lower() == scan.table.name.lower())
            rows = present_rows(view.plan, lambda node: stand_ins[id(node)], of_view, view.planned.streams)
            return as_table(rows, scan)

        return present_rows(output.plan, lambda node: stand_ins[id(node)], of_view, output.planned.streams)

    def _finish(self, build: Checkpoint) -> None:
        """Writes the new checkpoint, and opens the new folder in place of the old one."""
        parts: list[tuple[Checkpoint, int]] = []
        new = self._again()  # as it is made when it starts: states that are there decide which operators go together
        sources = sources_of(new.changes)
        for source in sources:
            table = new.table_of(source)
            if table is not None and self._changing.tables[table].origin == "state":
                parts.append((self._old, self._number_in_old(table, source)))
            else:
                parts.append((build, self._number_in_build(source)))
        write_checkpoint(
            self._session, self._checkpoint, build.query_id, build.version - 1, parts, build=build, sources=sources,
            beside=topics_beside(self._session, parts),
        )  # fmt: skip
        new.write()
        _put(Files.at(self._changing.old.state), CHANGED, self._state)
        self._files.delete([CHANGING])


def undo(old_queries: StatementSet, views: Mapping[str, View]) -> None:
    """Gives sinks the results that old queries had, and opens their state folder again; see `gpu_ops.undo_change`."""
    state = old_queries.state
    assert state is not None
    session, files = old_queries.statements[0].planned.session, Files.at(state)
    content = files.read(CHANGED)
    if content is None:
        raise StateError(
            f"the query of state folder {state} was not changed into another one: there is nothing to undo"
        )
    other = StateAddress.of(json.loads(content.to_pybytes())["other"])
    if Files.at(other).read(CHANGING) is not None:
        raise StateError(f"the change into state folder {other} was not done to its end: run it again first")
    new, old = OldStatements(other, session), OldStatements(state, session)
    for one in (new, old):
        one.check_stopped(session)
    differences = []
    for output in old_queries.outputs if views else ():
        was, now = (one.output(output.name, len(old_queries.outputs)) for one in (old, new))
        if was is None or now is None:
            continue  # the other query had no such sink
        for one, of in ((new, now), (old, was)):
            why = one.why_no_result(of)
            if why is not None:
                raise NotBuiltError(f"the change cannot be undone in the sink: {why}")
        schema = output.changes.schema
        before, after = (one.result(of, lambda x: x.rows(session)) for one, of in ((old, was), (new, now)))
        differences.append((views[output.name], _as_changelog(_net(schema, before, after).localCheckpoint(), schema)))
    for view, difference in differences:
        _write(view, difference, new.query_id, new.version)
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
