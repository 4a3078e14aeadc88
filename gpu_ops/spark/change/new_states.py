"""The states that the engines of changed queries begin with, put together of those of their operators.

An operator that stays has its state in the old folder, one that was built in the new one, where the run that built it
has left it. Either may share an engine there, and another one, or none, in the new queries. So the state of an engine
is made of the states of its operators, wherever they are; where some of these have other partitions, each operator gets
a folder of its own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, Final

from pyspark.sql import DataFrame

from gpu_ops.errors import NotBuiltError
from gpu_ops.spark.change.old_query import operator_at
from gpu_ops.spark.change.planner import ChangePlanner
from gpu_ops.spark.driver.executors import make_importable
from gpu_ops.spark.plan.stored_query import folders_of
from gpu_ops.spark.plan.stored_statements import EngineState, StatePlace, engines_of, folder_at, name_below, places_of
from gpu_ops.spark.server.present import AssembledState, StoredOperator
from gpu_ops.spark.tasks.engine import ForEachNumber
from gpu_ops.state.address import StateAddress
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import GOES_ON, LATEST, Manifest

_FIRST: Final = 1
"""The version of states that are taken before it is known how many micro-batches fill the others."""


class NewStates:
    """The states of the engines of new queries.

    Args:
        changing: what is to be done.
    """

    def __init__(self, changing: ChangePlanner) -> None:
        assert changing.new.state is not None
        self._changing, self._new = changing, changing.new
        self._state: StateAddress = changing.new.state

    def taken(self, query_id: str, *, built: bool) -> Iterator[AssembledState]:
        """Yields the states that are taken when rows are: of engines all of whose operators stay.

        Args:
            query_id: of the new query.
            built: whether other operators are built, and it is not known yet in how many micro-batches.
        """
        version = _FIRST if built else self._changing.old.version
        for engine in engines_of(self._new.changes, self._state):
            if engine.operators.keys() <= self._kept_names.keys():
                for _, state in self._states(engine, query_id, version, {}):
                    if self._is_taken(engine, state):
                        yield state

    def assemble(self, filling: DataFrame | None, query_id: str, version: int) -> dict[str, Any]:
        """Writes the states of all engines that are not there yet.

        Args:
            filling: the changelog of the run that has built operators; None where all stay.
            query_id: of the new query.
            version: the number of micro-batches that the states are to stand for.

        Returns:
            The manifests that they get, by folder, folders that fall away, and whether the new queries are planned as
            they were once these are there.
        """
        filled = {} if filling is None else {one.folder: one for one in engines_of(filling, self._state)}
        session, there = self._changing.session, places_of(list(filled.values()))
        manifests, as_planned = dict[str, str](), all(side.load is None for _, side in self._new.tables())
        for engine in engines_of(self._new.changes, self._state):
            for part, state in self._states(engine, query_id, version, there):
                as_planned &= part is engine
                wanted, present = state.manifest, Manifest.read(Files.at(state.state))
                # the run that built all of its operators has left them there, together
                as_it_is = present is not None and all(
                    there.get(own) == StatePlace(part.folder, name) and own not in self._kept_names
                    for own, name in part.operators.items()
                )
                if self._is_taken(engine, state):  # it was written with the rows, and the others are versions ahead
                    if filling is not None:
                        state.catch_up(_FIRST)
                elif as_it_is and present is not None and present.digest == wanted.digest:
                    wanted = dataclasses.replace(present, join_number=None, union_order=wanted.union_order)
                else:
                    wanted = dataclasses.replace(wanted, generation=0 if present is None else present.generation + 1)
                    make_importable(session)
                    numbers = session.range(0, wanted.partitions, 1, wanted.partitions)
                    assemble = ForEachNumber("gpu_join_assemble", dataclasses.replace(state, manifest=wanted).write)
                    numbers.mapInArrow(assemble, numbers.schema).collect()
                manifests[part.folder] = wanted.to_json()
        dropped = [folder for folder in filled if folder not in manifests]
        return {"manifests": manifests, "drop": dropped, "as_planned": as_planned}

    def _states(
        self, engine: EngineState, query_id: str, version: int, there: Mapping[str, StatePlace]
    ) -> Iterator[tuple[EngineState, AssembledState]]:
        """Yields the states that an engine of the new query begins with: one, or those of its operators.

        Args:
            engine: the engine.
            query_id: of the new query.
            version: the number of micro-batches that they are to stand for.
            there: the places of operators that were built.

        Raises:
            NotBuiltError: an operator cannot go on with its state.
        """
        states = {own: x for own in engine.operators if (x := self._state_of(own, version, there)) is not None}
        if not states:
            return  # it is over static inputs alone
        partitions = {x.manifest.partitions for x in states.values()}
        together = states.keys() == engine.operators.keys() and partitions == {engine.plan.partitions}
        for part in [engine] if together else [*self._apart(engine)]:
            its = {name: states[own] for own, name in part.operators.items() if own in states}
            if not its:
                continue
            (cut,) = {x.manifest.partitions for x in its.values()}
            manifest = dataclasses.replace(part.plan.manifest(query_id, None), partitions=cut)
            state = AssembledState(folder_at(self._state, part.folder), manifest, version, its)
            why = state.why_not()
            if why is not None:
                raise NotBuiltError(f"the state of an operator cannot be taken over: {why}: begin anew")
            if self._is_taken(engine, state) and state.goes_on:
                manifest = dataclasses.replace(manifest, format=max(manifest.format, GOES_ON))
                state = dataclasses.replace(state, manifest=manifest)
            yield part, state

    def _is_taken(self, engine: EngineState, state: AssembledState) -> bool:
        """True if a state is taken with the rows: all operators of its engine stay, and its own are in one folder."""
        stay = engine.operators.keys() <= self._kept_names.keys()
        return stay and len({x.state.identity for x in state.operators.values()}) == 1

    @staticmethod
    def _apart(engine: EngineState) -> Iterator[EngineState]:
        """The operators of an engine as engines of their own."""
        for own, plan in zip(engine.operators, engine.plan.in_task, strict=True):
            alone = dataclasses.replace(plan, dataflow=None, chained=(), union_order=None)
            yield EngineState(own, alone, {own: ""})

    def _state_of(self, own: str, version: int, there: Mapping[str, StatePlace]) -> StoredOperator | None:
        """The state of a new operator by the name of the folder that is its own; None where it has none."""
        if own in self._kept_names:
            return self._changing.old.place_of(self._kept_names[own])
        return operator_at(self._state, there.get(own), version)

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
