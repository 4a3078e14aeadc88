"""Queries that one streaming query runs together: views, and those whose changelogs go to sinks; often a single one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pyspark.sql import DataFrame

from gpu_ops.errors import StateError
from gpu_ops.query.nodes import Plan, PlanNode, walk
from gpu_ops.query.relations import Scan
from gpu_ops.spark.api.query import PlannedQuery
from gpu_ops.spark.api.streams import Stream
from gpu_ops.spark.driver.directory import Directory
from gpu_ops.spark.driver.queries import plans_of
from gpu_ops.spark.driver.stream_sources import StreamSource, sources_of
from gpu_ops.spark.plan.stored_query import StoredQuery
from gpu_ops.spark.plan.stored_statements import (
    StoredSource,
    StoredStatement,
    StoredStatements,
    engines_of,
    folder_at,
    places_of,
)
from gpu_ops.state.address import StateAddress
from gpu_ops.state.files import Files


def as_it_is(changes: DataFrame) -> DataFrame:
    """A changelog as it is, where nothing is to be made of it."""
    return changes


@dataclasses.dataclass(frozen=True, eq=False)
class Statement:
    """A query of several that run together.

    Attributes:
        name: of its view or sink; empty for a query that was given none.
        folder: of its state, below that of all; empty for that one itself.
        planned: its plan over its tables.
        options: of its operators.
        changes: its changelog.
        is_output: whether that goes to a sink.
        as_view: makes of the changelog what other queries read.
    """

    name: str
    folder: str
    planned: PlannedQuery
    options: Mapping[str, Any]
    changes: DataFrame
    is_output: bool = True
    as_view: Callable[[DataFrame], DataFrame] = as_it_is

    @property
    def plan(self) -> Plan:
        """The plan of the query."""
        return self.planned.plan

    @property
    def roots(self) -> tuple[PlanNode, ...]:
        """The roots of its plan."""
        return tuple(part.root for part in self.plan.parts)


@dataclasses.dataclass(frozen=True, eq=False)
class StatementSet:
    """The queries that one streaming query runs (Flink: ``StatementSet``), each behind the views that it reads.

    Attributes:
        statements: the queries.
        changes: the changelog of the only one that has a sink, else all of them as `gpu_ops.outputs`.
        state: the state folder; None where there is none.
    """

    statements: tuple[Statement, ...]
    changes: DataFrame
    state: StateAddress | None

    @property
    def outputs(self) -> tuple[Statement, ...]:
        """The queries that have a sink."""
        return tuple(one for one in self.statements if one.is_output)

    @functools.cached_property
    def used(self) -> tuple[Statement, ...]:
        """The queries that a sink is made of: a view that nobody reads is not computed."""
        read = {
            scan.table.name.lower()
            for scan in walk(*(root for one in self.outputs for root in one.roots), views=True)
            if isinstance(scan, Scan) and scan.table.made_by
        }
        return tuple(one for one in self.statements if one.is_output or one.name.lower() in read)

    def tables(self) -> Iterator[tuple[str, Stream]]:
        """Yields the tables that no view makes, once for each query that reads them."""
        for one in self.used:
            for name, side in one.planned.streams.items():
                if not one.planned.stored.tables[name].made_by:
                    yield name, side

    def table_of(self, source: StreamSource) -> str | None:
        """The table that a source is of; None where it is of none."""
        return next((name for name, its in self._sources if any(map(source.same_load, its))), None)

    @functools.cached_property
    def _sources(self) -> list[tuple[str, tuple[StreamSource, ...]]]:
        return [(name, sources_of(side.df)) for name, side in self.tables() if side.df.isStreaming]

    def _stored(self) -> StoredStatements:
        assert self.state is not None
        try:
            sources = tuple(StoredSource(self.table_of(one), one) for one in sources_of(self.changes))
        except StateError:
            sources = ()
        statements = tuple(StoredStatement(one.name, one.folder, one.is_output) for one in self.statements)
        return StoredStatements(statements, sources, places_of(engines_of(self.changes, self.state)))

    def write(self) -> None:
        """Writes into the state folder what the queries are, where it says something else."""
        assert self.state is not None
        for one in self.statements:
            files = Files.at(folder_at(self.state, one.folder))
            if StoredQuery.read(files) != one.planned.stored:
                one.planned.stored.write(files)
        files, stored = Files.at(self.state), self._stored()
        if StoredStatements.read(files) != stored:
            stored.write(files)

    def remember(self) -> None:
        """Has the queries written into the state folder when they are started."""
        plans: Sequence[Any] = plans_of(self.changes) if self.state is not None else ()
        if plans:
            Directory.of(self.changes.sparkSession).when_started(plans[-1].plan_id, self.write)
