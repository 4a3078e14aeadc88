"""A query of `gpu_ops.sql` over its tables: its plan, and the state folder that it goes on with."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Set
from typing import Any, Final, Self

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as st

from gpu_ops.descriptions.changelog import ROW_KIND_COLUMN
from gpu_ops.descriptions.description import Emit
from gpu_ops.errors import DescriptionError, StateError
from gpu_ops.query.nodes import Plan
from gpu_ops.query.plan import MultiWay, plan
from gpu_ops.query.relations import Table
from gpu_ops.spark.api.apply import settled
from gpu_ops.spark.api.column_order import as_stored
from gpu_ops.spark.api.query_frames import QueryRunner, has_begun, scans_of, union
from gpu_ops.spark.api.static import as_streams
from gpu_ops.spark.api.streams import Stream, as_input, as_stream
from gpu_ops.spark.plan.column_metadata import delays
from gpu_ops.spark.plan.stored_query import StoredQuery, folders_of, of_name, said_differences, state_of_part
from gpu_ops.spark_types import named_column
from gpu_ops.state.address import StateAddress
from gpu_ops.state.files import Files


@dataclasses.dataclass(frozen=True)
class PlannedQuery:
    """A query over tables, and the plan of its operators.

    Attributes:
        given: the tables as they were given.
        streams: the tables, static ones as streams whose rows are loaded once.
        stored: what a state folder keeps of the query.
        plan: its plan.
    """

    given: Mapping[str, Stream]
    streams: Mapping[str, Stream]
    stored: StoredQuery
    plan: Plan

    @property
    def session(self) -> SparkSession:
        """The session of the tables."""
        return next(iter(self.streams.values())).df.sparkSession

    @classmethod
    def of(
        cls,
        tables: Mapping[str, DataFrame | Stream],
        query: str,
        emit: Emit,
        multi_way: MultiWay,
        state: StateAddress | None,
        *,
        views: Mapping[str, tuple[object, ...]] | None = None,
    ) -> Self:
        """Plans a query; arguments as of `sql`, and the roots of the plans of tables that other queries make."""
        given = _streams(tables)
        if not given:
            raise DescriptionError("sql() needs the tables of its query, by the names that it calls them")
        sides, _ = settled(tuple(given.values()), {"state": state})
        streams = dict(zip(given, sides, strict=True))
        planned = cls._over(given, streams, query, emit, multi_way, views=views)
        moved = {} if state is None else as_stored(planned.plan, streams, state)
        if moved:
            planned = cls._over({**given, **moved}, {**streams, **moved}, query, emit, multi_way, views=views)
        _check_inputs(set(planned.stored.tables), streams)
        return planned

    @classmethod
    def _over(
        cls,
        given: Mapping[str, Stream],
        streams: Mapping[str, Stream],
        query: str,
        emit: Emit,
        multi_way: MultiWay,
        *,
        views: Mapping[str, tuple[object, ...]] | None,
    ) -> Self:
        """Plans a query over tables whose columns are in the order that counts."""
        session = next(iter(streams.values())).df.sparkSession
        described = {
            label: dataclasses.replace(_table(label, side), made_by=of_name(views or {}, label))
            for label, side in streams.items()
        }
        schemas = {label: _schema(side.df, described[label]) for label, side in streams.items()}
        planned = plan(query, described, session, schemas=schemas, emit=emit, multi_way=multi_way)
        used = {scan.table.name for part in planned.parts for scan in scans_of(part.root)}
        stored = StoredQuery(
            planned.sql, {label: described[label] for label in used}, {label: schemas[label] for label in used},
            multi_way, emit, len(planned.joins),
        )  # fmt: skip
        return cls(given, streams, stored, planned)

    def changelog(
        self,
        options: Mapping[str, Any],
        stand_ins: Mapping[int, DataFrame] | None = None,
        views: Mapping[str, DataFrame] | None = None,
    ) -> DataFrame:
        """The changelog of the query.

        Args:
            options: those of its operators.
            stand_ins: rows that are taken in the place of those of a node of the plan, by the node's id.
            views: changelogs that are taken in the place of those of tables that other queries make.
        """
        if views:
            given, streams = ({**sides, **_replaced(sides, views)} for sides in (self.given, self.streams))
            return dataclasses.replace(self, given=given, streams=streams).changelog(options, stand_ins)
        state, name = options["state"], options["name"]
        if not self.plan.others:
            return QueryRunner(self.plan, self.streams, options, self.given, stand_ins).result()
        frames = []
        for number, part in enumerate(self.plan.parts, 1):  # each SELECT has its operators' state in a folder
            below = state and state_of_part(state, number)
            own = {**options, "state": below, "name": name and f"{name}_{number}"}
            sides, _ = settled(tuple(self.given.values()), {"state": below})
            streams = dict(zip(self.given, sides, strict=True))
            frames.append(QueryRunner(part, streams, own, self.given, stand_ins).result())
        return union(*as_streams(frames, state and state.below("union")), name=name or "union")


def _replaced(sides: Mapping[str, Stream], views: Mapping[str, DataFrame]) -> dict[str, Stream]:
    by_name = {name.lower(): df for name, df in views.items()}
    return {
        name: dataclasses.replace(side, df=by_name[name.lower()].select(*map(named_column, side.df.columns)))
        for name, side in sides.items()
        if name.lower() in by_name
    }


def check_query(state: StateAddress, planned: PlannedQuery) -> None:
    """Refuses a query other than that of its state folder, be its operators the same.

    Raises:
        StateError: what differs, or that the folder's query has been changed into another one.
    """
    files = Files.at(state)
    stored = StoredQuery.read(files)
    check_not_changed(state)
    emit = planned.stored.emit
    if stored is None or "at_end" in (stored.emit, emit) or stored.same_text(planned.stored):
        return
    was = stored.plan(planned.session, {name: table.made_by for name, table in planned.stored.tables.items()})
    if not any(has_begun(folder) for _, folder in folders_of(was, state)):
        return
    pairs = zip(was.parts, planned.plan.parts, strict=False)
    different = next((text for old, new in pairs for text in said_differences(old.root, new.root)), None)
    if different is None and len(was.parts) != len(planned.plan.parts):
        different = f"it has {len(planned.plan.parts)} SELECTs in its UNION ALL, and had {len(was.parts)}"
    if different is not None:
        raise StateError(
            f"state folder {state} belongs to another query: {different}. Go on with the query as it was, let "
            "gpu_ops.change() (gpu-join change) bring its rows into the new query's state, or give state= a new "
            "folder (and the query a new checkpoint)"
        )


def check_not_changed(state: StateAddress) -> None:
    """Refuses a state folder whose query has been changed into another one, or is being made of another one.

    Raises:
        StateError: which.
    """
    for name, what in ((CHANGING, _CHANGING), (CHANGED, _CHANGED)):
        content = Files.at(state).read(name)
        if content is not None:
            raise StateError(what.format(state=state, other=json.loads(content.to_pybytes())["other"]))


CHANGING: Final = "changing.json"
"""In the state folder of a new query while `gpu_ops.change` fills it."""

CHANGED: Final = "changed.json"
"""In the state folder of an old query once a new one has taken its place."""

_CHANGING: Final = (
    "state folder {state} is being filled from {other}, and that was not done to its end: run gpu_ops.change() "
    "(gpu-join change) again, which goes on from there"
)
_CHANGED: Final = (
    "the query of state folder {state} was changed into another one, whose state is in {other}: run that. To go back "
    "to this one, gpu_ops.undo_change() (gpu-join change --undo)"
)


# --- inputs -------------------------------------------------------------------------------------------


def _streams(given: Mapping[str, DataFrame | Stream]) -> dict[str, Stream]:
    streams: dict[str, Stream] = {}
    for label, side in given.items():
        if label.lower() in [other.lower() for other in streams]:
            raise DescriptionError(f"two inputs are called {label!r}: names are told apart without regard to case")
        streams[label] = as_stream(side, f"input '{label}'", label)
    return streams


def _table(label: str, side: Stream) -> Table:
    """Describes an input as a table of the query."""
    source = as_input(dataclasses.replace(side, name=label))
    nullable = {x.name: x.nullable for x in side.df.schema.fields}
    found = delays(side.df)
    times = (side.event_time,) if side.event_time is not None else tuple(found)
    schema = pa.schema([x.with_nullable(nullable[x.name]) for x in source.schema])
    grows = source.row_kind == ROW_KIND_COLUMN and any(x.plan_id is not None for x in found.values())
    return Table(**{**vars(source), "schema": schema}, event_times=times, grows=grows)


def _schema(df: DataFrame, table: Table) -> st.StructType:
    """The Spark schema of an input's columns, without the row kind."""
    return st.StructType([x for x in df.schema.fields if x.name in table.schema.names])


def _check_inputs(used: Set[str], streams: Mapping[str, Stream]) -> None:
    unused = [label for label in streams if label not in used]
    if unused:
        raise DescriptionError(f"the query does not name the input {unused[0]!r}")
    tagged = [label for label, side in streams.items() if side.bad_rows == "tag"]
    if tagged:
        raise DescriptionError(
            f"input {tagged[0]!r}: bad_rows='tag' hands rows out beside the changelog, which a query would filter and "
            "project as if they were its own; use 'drop' or 'fail'"
        )
