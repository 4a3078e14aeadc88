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
    change/inputs/<id>/<n>        rows of the old state, see `gpu_ops.spark.tasks.state`, as one attempt wrote them
    change/taken                  names the attempt that did so to its end, and has written the states of operators
                                  that stay and share no engine with others
    change/checkpoint             of the query that fills the state of operators that are built
    change/result/batch=<n>       its changelog, or outputs
    change/filled                 once it is done: its sources
    assembled.json                the manifests of all states, once these are written
    change/difference/<n>         what each sink gets
"""

from __future__ import annotations

import dataclasses
import functools
import json
import uuid
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as f
from pyspark.sql import types as st

from gpu_ops.errors import NotBuiltError, StateError
from gpu_ops.query.nodes import walk
from gpu_ops.query.relations import Scan
from gpu_ops.spark.api.outputs import outputs
from gpu_ops.spark.api.query import CHANGING
from gpu_ops.spark.api.statements import Statement, StatementSet, as_it_is
from gpu_ops.spark.change.difference import as_changelog, net_changes, write_to_sink
from gpu_ops.spark.change.new_states import NewStates
from gpu_ops.spark.change.old_query import OldInput, OldOperator, OldStatement, as_table, present_rows
from gpu_ops.spark.change.planner import ChangePlanner
from gpu_ops.spark.change.undo import note_other
from gpu_ops.spark.driver.checkpoint import Checkpoint, begin_checkpoint, write_checkpoint
from gpu_ops.spark.driver.directory import Directory
from gpu_ops.spark.driver.executors import as_hadoop_has_it, make_importable
from gpu_ops.spark.driver.queries import plans_of
from gpu_ops.spark.driver.stream_sources import StreamSource, sources_of
from gpu_ops.spark.plan.stored_statements import StoredStatements, engines_of, folder_at
from gpu_ops.spark.server.present import StoredOperator
from gpu_ops.spark.sinks.changes import View
from gpu_ops.spark.sources.files import rows_of_files
from gpu_ops.spark.sources.topics import topics_beside
from gpu_ops.spark.tasks.engine import ForEachNumber
from gpu_ops.spark.tasks.state import TakenFiles, TakenState, take
from gpu_ops.state.address import StateAddress
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import MANIFEST, Manifest

_FOLDER: Final = "change"
_DIFFERENCE: Final = "difference"
_INPUTS: Final = f"{_FOLDER}/inputs"
_TAKEN: Final = f"{_FOLDER}/taken"
_FILLED: Final = f"{_FOLDER}/filled"
_ASSEMBLED: Final = "assembled.json"
_OUTPUT: Final = "output_"
"""What the outputs of the run are called, behind it their number; no view's name has such a column."""

_FILES_AT_ONCE: Final = 8
"""Files of rows in one micro-batch that fills the state."""


class ChangeRun:
    """The steps of a change, each of which is done once, whatever interrupts them.

    Args:
        changing: what is to be done.
        checkpoint: the new one.
        old: the old one.
        again: makes the new queries once more.
        empty_sink: whether the sinks get all rows.
    """

    def __init__(
        self,
        changing: ChangePlanner,
        checkpoint: str,
        old: Checkpoint,
        again: Callable[[], StatementSet],
        *,
        empty_sink: bool,
    ) -> None:
        self._empty_sink = empty_sink
        self._attempt = uuid.uuid4().hex  # tasks of an attempt that was killed may still be writing
        self._filled_sources: Sequence[StreamSource] = ()
        self._changing, self._checkpoint, self._old, self._again = changing, checkpoint, old, again
        self._new, self._session, self._states = changing.new, changing.session, NewStates(changing)
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

    def run(self, views: Mapping[str, View]) -> None:
        """Does all that is left to do, behind `check`.

        Args:
            views: by the names of outputs, what brings a micro-batch into their sinks; nothing is written without.
        """
        query_id = self._begin()
        if self._built:
            query_id = begin_checkpoint(self._session, f"{self._below}/checkpoint", query_id)
        self._take(query_id)
        build = self._fill() if self._built else dataclasses.replace(self._old, query_id=query_id)
        new = self._assemble(build)
        for output in self._new.outputs:
            difference = self._difference(output)
            if views:
                write_to_sink(views[output.name], difference, build.query_id, build.version - 1)
        self._finish(build, new)

    def check(self) -> None:
        """Refuses what is not as it has to be, before anything is changed.

        Raises:
            StateError: the old query runs, or the folders are not of one query.
            NotBuiltError: an old result that is needed is not known.
        """
        old, version = self._changing.old, self._old.version
        unknown = next((why for of in self._olds if (why := old.why_no_result(of))), None)
        if unknown is not None:
            new = "" if self._empty_sink else ": with empty_sink=True a new one gets all rows"
            raise NotBuiltError(f"{unknown}, so what the sink gets is not known{new}")
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
        loads = [one.number for one in self._filled_sources if one.same_load(source)]
        same = (one.number for one in self._filled_sources if one.description == source.description)
        return loads[0] if loads else next(same)

    def _begin(self) -> str:
        """Marks the new folder as one that is being filled, if it is new or was marked so.

        Returns:
            An id for the new query, if no query is run to fill the folder.
        """
        content = {
            "other": str(self._changing.old.state),
            "query": [one.planned.stored.text for one in self._new.statements],
            "origins": {name: table.origin for name, table in self._changing.tables.items()},
            "empty_sink": self._empty_sink,
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
        if self._files.stamp(f"{_FOLDER}/{name}/_SUCCESS") is None:
            rows().write.mode("overwrite").parquet(location)
        return location

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
        return self._taken_rows(reading, at_once=False)

    def _static(self, reading: OldInput | OldOperator) -> DataFrame:
        """Rows of the old state at once."""
        return self._taken_rows(reading, at_once=True)

    def _taken_rows(self, reading: OldInput | OldOperator, *, at_once: bool) -> DataFrame:
        schema, own = reading.rows(self._session).schema, reading.taken.schema
        declared = st.StructType([x for x in schema if x.name in own.names])
        read = TakenFiles("arrow", own, (("caseSensitive", "true"),), folder=self._folder_of(reading))
        # and nothing that a task has left half written
        options = {"maxFilesPerTrigger": str(_FILES_AT_ONCE), "pathGlobFilter": "*.arrow"}
        at = as_hadoop_has_it(read.folder)
        rows = rows_of_files(self._session, at, read, declared, options, at_once=at_once)
        return as_changelog(rows, schema)

    def _folder_of(self, reading: OldInput | OldOperator) -> StateAddress:
        """The folder of rows that are taken from the old state."""
        return folder_at(self._state, f"{_INPUTS}/{self._attempt}/{self._readings.index(reading)}")

    @functools.cached_property
    def _readings(self) -> list[OldInput | OldOperator]:
        """The rows that are taken from the old state; behind them those of which only an old result is made."""
        every = [*self._changing.readings, *(x for of in self._olds for x in self._changing.old.operators_of(of))]
        return list(dict.fromkeys(every))

    @functools.cached_property
    def _olds(self) -> list[OldStatement]:
        """The old queries whose results are needed: for a difference, or for all rows of a result that is as it was."""
        outputs = [output for output in self._new.outputs if self._changing.as_it_was(output) == self._empty_sink]
        return [of for output in outputs if (of := self._changing.old_of(output)) is not None]

    def _take(self, query_id: str) -> None:
        """Takes rows out of the old state, and the states of operators that stay in engines without others."""
        done = self._files.read(_TAKEN)
        if done is not None:
            self._attempt = done.to_pybytes().decode()
            return
        taken = dict[str, TakenState]()

        def of(stored: StoredOperator) -> TakenState:
            return taken.setdefault(stored.state.identity, TakenState(stored, {}, []))

        for reading in self._readings:
            of(reading.taken.operator).rows[self._folder_of(reading)] = reading.taken
        for state in self._states.taken(query_id, built=bool(self._built)):
            of(next(iter(state.operators.values()))).states.append(state)
        units = [(one, partition) for one in taken.values() for partition in range(one.of.manifest.partitions)]
        if units:
            make_importable(self._session)
            numbers = self._session.range(0, len(units), 1, len(units))
            taking = ForEachNumber("gpu_join_take", functools.partial(take, units))
            numbers.mapInArrow(taking, numbers.schema).collect()
        _write_text(self._files, _TAKEN, self._attempt)

    def _fill(self) -> Checkpoint:
        """Fills the new state, and keeps the changelog that comes out; returns the checkpoint of that."""
        below, done = self._below, self._files.read(_FILLED)
        if done is not None:  # later it would read on, past what the sink was given
            # planned again, over states that are all there, its sources may stand in another order
            self._filled_sources = [StreamSource.from_dict(x) for x in json.loads(done.to_pybytes())]
            return Checkpoint.read(self._session, f"{below}/checkpoint", self._filled_sources)
        changes = self._filling

        def keep(batch: DataFrame, number: int) -> None:
            batch.write.mode("overwrite").parquet(f"{below}/result/batch={number}")

        writer = changes.writeStream.foreachBatch(keep).option("checkpointLocation", f"{below}/checkpoint")
        names = ", ".join(plan.name for plan in plans_of(changes))
        writer.queryName(f"{names}: change").trigger(availableNow=True).start().awaitTermination()
        self._filled_sources = sources_of(changes)
        build = Checkpoint.read(self._session, f"{below}/checkpoint", self._filled_sources)
        states = [folder_at(self._state, one.folder) for one in engines_of(changes, self._state)]
        Directory.of(self._session).leave_snapshots(states, build.version)
        _write_text(self._files, _FILLED, json.dumps([source.to_dict() for source in self._filled_sources]))
        return build

    def _assemble(self, build: Checkpoint) -> StatementSet:
        """Gives the engines of the new query the states of operators that stay, and of those that were built.

        Returns:
            The new queries as they are planned when they are started: states decide which operators go together.
        """
        content = self._files.read(_ASSEMBLED)
        if content is None:
            filling = self._filling if self._built else None
            made: dict[str, Any] = self._states.assemble(filling, build.query_id, build.version)
            _write_text(self._files, _ASSEMBLED, json.dumps(made))
        else:
            made = json.loads(content.to_pybytes())
        for folder, text in made["manifests"].items():
            _write_text(Files.at(folder_at(self._state, folder)), MANIFEST, text)
        for folder in made["drop"]:
            files = Files.at(folder_at(self._state, folder))
            files.delete([MANIFEST])
            files.delete_folder("p")
        return self._new if made.get("as_planned") else self._again()

    def _difference(self, output: Statement) -> DataFrame:
        """Gives the rows that are no more, and those that are new, which a sink gets."""
        schema, changing = output.changes.schema, self._changing

        def rows() -> DataFrame:
            if changing.as_it_was(output) and not self._empty_sink:
                return self._session.createDataFrame([], schema)
            old = changing.old_of(output)
            before = None if self._empty_sink or old is None else changing.old.result(old, self._static)
            return net_changes(schema, self._result(output), before)

        name = f"{_DIFFERENCE}/{self._new.outputs.index(output)}"
        return as_changelog(self._session.read.schema(schema).parquet(self._part(name, rows)), schema)

    def _result(self, output: Statement) -> DataFrame:
        """The result of a new query: as the run has put it out, as the old one was, or that of operators that stay."""
        if output in self._built:
            schema, number = self._filling.schema, self._built.index(output)
            kept = self._session.read.schema(schema).parquet(f"{self._below}/result/*")
            if len(self._built) == 1:
                return kept
            name = f"{_OUTPUT}{number}"
            return kept.where(f.col(name).isNotNull()).select(f"{name}.*")
        if self._changing.as_it_was(output):
            old = self._changing.old_of(output)
            assert old is not None
            return self._changing.old.result(old, self._static)
        stand_ins = self._changing.stand_ins(self._static)

        def of_view(scan: Scan) -> DataFrame:
            view = next(one for one in self._new.used if one.name.lower() == scan.table.name.lower())
            rows = present_rows(view.plan, lambda node: stand_ins[id(node)], of_view, view.planned.streams)
            return as_table(rows, scan)

        return present_rows(output.plan, lambda node: stand_ins[id(node)], of_view, output.planned.streams)

    def _finish(self, build: Checkpoint, new: StatementSet) -> None:
        """Writes the new checkpoint, and opens the new folder in place of the old one."""
        parts: list[tuple[Checkpoint, int]] = []
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
        note_other(Files.at(self._changing.old.state), self._state)
        self._files.delete([CHANGING])


def _write_text(files: Files, name: str, text: str) -> None:
    files.write(name, lambda file: file.write(text.encode()))
