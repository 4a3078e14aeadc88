"""The queries that one streaming query runs, as its state folder names them, and where the state of each operator lies.

A job has several where it has views or more than one INSERT, each with a folder below the job's; else it is one, in the
folder itself. Operators of all of them may be in one engine, whose state is in the folder of the last one.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple, Self

from pyspark.sql import DataFrame

from gpu_ops.descriptions.dataflow import Dataflow
from gpu_ops.spark.driver.queries import JoinPlan, plans_of
from gpu_ops.spark.driver.stream_sources import StreamSource
from gpu_ops.state.address import StateAddress
from gpu_ops.state.files import Files

STATEMENTS: Final = "statements.json"
"""The file in the state folder, which is written when the query is started."""


class StoredStatement(NamedTuple):
    """A query of several that run together.

    Attributes:
        name: of its view or sink; empty for a query that was given none.
        folder: of its state, below the state folder; empty for that one itself.
        is_output: whether its changelog goes to a sink.
    """

    name: str
    folder: str
    is_output: bool


class StoredSource(NamedTuple):
    """A source of a query, in the order in which its checkpoint counts them.

    Attributes:
        table: the query's table that it belongs to; None for one that this package made.
        source: the source.
    """

    table: str | None
    source: StreamSource


class StatePlace(NamedTuple):
    """The place of an operator's state.

    Attributes:
        folder: of the engine that has it, below the state folder.
        vertex: the operator's name in that engine's dataflow; empty where it is alone.
    """

    folder: str
    vertex: str


@dataclasses.dataclass(frozen=True)
class StoredStatements:
    """The queries that run together, as a state folder has them.

    Attributes:
        statements: the queries, each behind the views that it reads.
        sources: of their checkpoint; empty where that is not known.
        places: of each operator's state, by the name of the folder that is its own where it is alone.
    """

    statements: tuple[StoredStatement, ...]
    sources: tuple[StoredSource, ...]
    places: Mapping[str, StatePlace]

    @classmethod
    def read(cls, files: Files) -> Self | None:
        """Reads the file of a state folder; None where there is none."""
        content = files.read(STATEMENTS)
        if content is None:
            return None
        given = json.loads(content.to_pybytes())
        return cls(
            tuple(StoredStatement(*one) for one in given["statements"]),
            tuple(StoredSource(table, StreamSource.from_dict(source)) for table, source in given["sources"]),
            {own: StatePlace(*place) for own, place in given["places"].items()},
        )

    def write(self, files: Files) -> None:
        """Writes it into a state folder, in the place of what is there."""
        content = {
            "statements": self.statements,
            "sources": [[one.table, one.source.to_dict()] for one in self.sources],
            "places": self.places,
        }
        text = json.dumps(content, sort_keys=True).encode()
        files.write(STATEMENTS, lambda file: file.write(text))


class EngineState(NamedTuple):
    """An engine of a query that has a state folder.

    Attributes:
        folder: the folder's name below the query's state folder.
        plan: of the engine's last operator.
        operators: by the name of the folder that is each operator's own, its name in the engine; empty for one alone.
    """

    folder: str
    plan: JoinPlan
    operators: Mapping[str, str]


def engines_of(changes: DataFrame, state: StateAddress) -> list[EngineState]:
    """The engines of a query as it will run.

    Args:
        changes: its changelog, or its outputs.
        state: its state folder; operators that have theirs elsewhere are left out.
    """
    plans, found, together = plans_of(changes), list[EngineState](), set[str]()
    for plan in plans:
        own = name_below(plan.state_identity, state)
        if plan.dataflow is not None and own is not None:
            names = [name_below(one.state_identity, state) for one in plan.in_task]
            assert isinstance(plan.dataflow, Dataflow)
            vertices = zip(names, plan.dataflow.operators, strict=True)
            operators = {name: vertex.name for name, vertex in vertices if name is not None}
            found.append(EngineState(own, plan, operators))
            together |= {one.plan_id for one in plan.in_task}
    for plan in plans:
        own = name_below(plan.state_identity, state)
        if plan.plan_id not in together and own is not None:
            found.append(EngineState(own, plan, {own: ""}))
    return found


def places_of(engines: Sequence[EngineState]) -> dict[str, StatePlace]:
    """The place of each operator's state, by the folder that is its own."""
    return dict(_places(engines))


def _places(engines: Sequence[EngineState]) -> Iterator[tuple[str, StatePlace]]:
    for engine in engines:
        for own, vertex in engine.operators.items():
            yield own, StatePlace(engine.folder, vertex)


def name_below(identity: str | None, state: StateAddress) -> str | None:
    """The name of a folder below another one, which is empty for that one itself; None for a folder elsewhere.

    Args:
        identity: of the folder, as `StateAddress.identity`.
        state: the other one.
    """
    (own, at), (above, there) = ((x or "").partition(" at ")[::2] for x in (identity, state.identity))
    if at != there or not (own == above or own.startswith(f"{above}/")):
        return None
    return own[len(above) + 1 :]


def folder_at(state: StateAddress, name: str) -> StateAddress:
    """The folder of a name below another one."""
    for part in filter(None, name.split("/")):
        state = state.below(part)
    return state
