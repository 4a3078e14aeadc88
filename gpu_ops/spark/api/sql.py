"""``gpu_ops.sql``, which runs a query over streaming DataFrames, and ``gpu_ops.union`` of changelogs.

In a UNION ALL a row occurs as often as in all of its parts together, so the result has no unique key.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Mapping, Sequence, Set
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame
from pyspark.sql import functions as f
from pyspark.sql import types as st

from gpu_ops.backends import Backend
from gpu_ops.descriptions.changelog import ROW_KIND_COLUMN, SHORT_STRINGS, SPELLINGS, codes_of
from gpu_ops.descriptions.description import Emit
from gpu_ops.descriptions.inputs import Input, UnionParts
from gpu_ops.errors import DescriptionError, GpuJoinError
from gpu_ops.query.errors import Origin, errors_at, place_of
from gpu_ops.query.nodes import Calc, JoinNode, LocalAggregate, Plan, PlanNode, Union, show, walk
from gpu_ops.query.plan import MultiWay, plan
from gpu_ops.query.relations import Scan, Table
from gpu_ops.spark.api.apply import MemoryOnlyStateWarning, apply_operator, settled
from gpu_ops.spark.api.by_time import timed, timed_input
from gpu_ops.spark.api.column_order import as_stored
from gpu_ops.spark.api.finish import calculated, check_runs, remember
from gpu_ops.spark.api.static import as_streams, beside_streams, has_result
from gpu_ops.spark.api.streams import Stream, as_input, as_stream
from gpu_ops.spark.datatypes import named_column
from gpu_ops.spark.driver.queries import plans_of
from gpu_ops.spark.failures import data_frame, message_in
from gpu_ops.spark.plan.changes import observed_once, sliced
from gpu_ops.spark.plan.column_metadata import CHANGELOG, delays, is_changelog
from gpu_ops.state.address import Location, StateAddress
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import Manifest


def sql(
    query: str,
    /,
    *,
    tables: Mapping[str, DataFrame | Stream] | None = None,
    state: Location | None = None,
    emit: Emit = "per_batch",
    backend: Backend = "auto",
    partitions: int | None = None,
    name: str | None = None,
    multi_way: MultiWay = "auto",
    backlog: bool = False,
    **inputs: DataFrame | Stream,
) -> DataFrame:
    """Joins streaming DataFrames by a query in SQL; the result is the changelog of what it selects.

    Args:
        query: a SELECT in Spark's dialect: joins of every kind, [NOT] EXISTS, [NOT] IN, sub-queries in FROM, WITH,
            WHERE, GROUP BY, DISTINCT, ORDER BY with LIMIT, UNION [ALL]. The error for anything else (OVER and so on)
            says where it is, and what to do instead.
        tables: inputs whose names cannot be arguments.
        state: a folder of its own for the state; where the query becomes several joins, each has its own in it:
            ``1``, ``2`` and so on. Without it the state lives in memory only.
        emit: the output of every operator. ``"per_batch"``: the net changes of each micro-batch. ``"per_event"``: the
            changes as Flink emits them. ``"at_watermark"``, where all are joins by time: final rows, also of ASOF
            joins. ``"at_end"``: nothing; `finish` returns the query's result.
        backend: ``"auto"``: GPUs where there are any. ``"cpu"``: the CPU. ``"gpu"``: GPUs, or an error.
        partitions: the number of partitions of every join, as in `join`.
        name: the name of the join, as in `join`; several are called ``name_1``, ``name_2`` and so on.
        multi_way: ``"auto"``: joins that share a key become one multi-way join. ``"never"``: they are a chain of
            two-way joins.
        backlog: whether every operator may begin with a backlog, as in `join`.
        inputs: streaming DataFrames, or streams made by `stream`, by their names in the query.

    Returns:
        A streaming DataFrame; first column ``row_kind``, then what the query selects. `explain` shows its plan.

    Raises:
        SqlError: streaming joins cannot do the query; with line and column.
        DescriptionError: inputs or options are invalid.
        NotBuiltError: Spark Connect, or ``emit="at_end"`` above an operator that waits for time to pass.
        StateError: the state folder belongs to something else.

    Example:
        >>> orders = spark.createDataFrame([(1, "x"), (2, "y")], "id INT, item STRING")
        >>> prices = spark.createDataFrame([("x", 5)], "item STRING, price INT")
        >>> query = "SELECT o.id, p.price FROM orders o LEFT JOIN prices p ON o.item = p.item"
        >>> gpu_ops.sql(query, orders=orders, prices=prices).orderBy("id").show()
        +--------+---+-----+
        |row_kind| id|price|
        +--------+---+-----+
        |      +I|  1|    5|
        |      +I|  2| NULL|
        +--------+---+-----+
    """
    if not isinstance(query, str):
        raise DescriptionError(f"sql() takes the text of a query, not {type(query).__name__}")
    run: dict[str, Any] = {"state": state, "backend": backend, "partitions": partitions, "name": name}
    try:
        return _planned({**(tables or {}), **inputs}, query, emit, multi_way, {**run, "backlog": backlog})
    except GpuJoinError as error:
        with errors_at(_origin_in(query, str(error))):
            raise


def _origin_in(query: str, message: str) -> Origin:
    """The place where a query names the input that a message is about, or its beginning."""
    about = re.search(r"\binput '([^']+)'", message)
    name = about and re.search(rf"(?<![\w.]){re.escape(about.group(1))}(?!\w)", query, re.IGNORECASE)
    start = name.start() if name else len(query) - len(query.lstrip())
    return Origin(query, *place_of(query, start))


def _planned(
    given_tables: Mapping[str, DataFrame | Stream], query: str, emit: Emit, multi_way: MultiWay, options: dict[str, Any]
) -> DataFrame:
    """The changelog of a query over tables; ``options``: those of its operators."""
    state, name, backlog = options["state"], options["name"], options["backlog"]
    streams = _streams(given_tables)
    if not streams:
        raise DescriptionError("sql() needs the tables of its query, by the names that it calls them")
    given, state = streams, None if state is None else StateAddress.of(state)
    sides, _ = settled(tuple(given.values()), {"state": state})
    streams = dict(zip(given, sides, strict=True))
    session = next(iter(streams.values())).df.sparkSession

    def planned_over(streams: Mapping[str, Stream]) -> tuple[Plan, dict[str, Table], dict[str, st.StructType]]:
        described = {label: _table(label, side) for label, side in streams.items()}
        schemas = {label: _schema(side.df, described[label]) for label, side in streams.items()}
        made = plan(query, described, session, schemas=schemas, emit=emit, multi_way=multi_way)
        return made, described, schemas

    planned, described, schemas = planned_over(streams)
    moved = {} if state is None else as_stored(planned, streams, state)
    if moved:
        given, streams = {**given, **moved}, {**streams, **moved}
        planned, described, schemas = planned_over(streams)
    used = {scan.table.name for part in planned.parts for scan in _scans(part.root)}
    _check_inputs(used, streams)
    if backlog:
        _check_backlog(planned)
    options["state"] = state
    with warnings.catch_warnings():
        if state is None:
            warnings.simplefilter("ignore", MemoryOnlyStateWarning)
        if planned.others:  # each SELECT has its operators' state in a folder of its own
            frames = []
            for number, part in enumerate(planned.parts, 1):
                below = state and state.below("union").below(str(number))
                own = options | {"state": below, "name": name and f"{name}_{number}"}
                sides, _ = settled(tuple(given.values()), {"state": below})
                frames.append(_Runner(part, dict(zip(given, sides, strict=True)), own, given).result())
            changes = union(*as_streams(frames, state and state.below("union")), name=name or "union")
        else:
            changes = _Runner(planned, streams, options, given).result()
    if state is None and changes.isStreaming and planned.joins:
        warnings.warn(
            "sql() has no state= folder: its state lives in memory only, and a restart on an old checkpoint will be "
            "refused",
            MemoryOnlyStateWarning,
            stacklevel=3,
        )
    if emit == "at_end" and state is not None:
        has_result(changes, state)
        remember(Files.at(state), {label: described[label] for label in used}, schemas, planned, multi_way)
    return changes


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


def _check_backlog(planned: Plan) -> None:
    """Refuses a backlog where one of the operators cannot begin with it."""
    for node in planned.joins:
        why = node.description.why_no_backlog()
        with errors_at(node.origin):
            if why is not None:
                raise DescriptionError(
                    f"no backlog here: {node.description.title} ({node.kind}): {why}. All operators of a query "
                    "begin with it. These can, of inputs without ttl=: regular, semi, anti, multi-way joins, "
                    "aggregates, top-N"
                )


def _scans(node: PlanNode) -> list[Scan]:
    return [scan for scan in walk(node) if isinstance(scan, Scan)]


def _begun(state: StateAddress | None) -> bool:
    """True if a folder has the state of an operator."""
    return state is not None and Manifest.read(Files.at(state)) is not None


class _Runner:
    """Makes the DataFrames of a query plan's nodes.

    Operators over static inputs alone run at once, in Spark's tasks, and their result is a static input of the operator
    above, unless a state folder says that they run live. Aggregates without group columns always run live: in a query
    over streams they have no row while their input has none.

    Args:
        planned: the plan.
        streams: the inputs by name.
        options: the options of `gpu_ops.spark.api.streams.RunOptions`, and ``backlog``.
        given: the inputs as they were before static ones were loaded; None where all are static.
    """

    def __init__(
        self,
        planned: Plan,
        streams: Mapping[str, Stream],
        options: Mapping[str, Any],
        given: Mapping[str, Stream] | None = None,
    ) -> None:
        self.planned, self.streams, self.options = planned, streams, dict(options)
        self._made: dict[int, DataFrame] = {}
        static = {
            label: dataclasses.replace(side, df=given[label].df.select(side.df.columns), load=None)
            for label, side in streams.items()
            if given is not None
            and side.load is not None
            and not given[label].df.isStreaming
            and side.refresh_ms is None
        }
        self.ended = _Runner(planned, static, {**options, "state": None, "backlog": False}) if static else None

    def frame(self, node: PlanNode) -> DataFrame:
        """The rows of a node."""
        if isinstance(node, Scan):
            return self.streams[node.table.name].df
        if isinstance(node, Calc):
            rows = self.frame(node.input)
            check_runs(node, rows, self.planned.sql)
            return calculated(node, rows)
        if isinstance(node, LocalAggregate):
            return sliced(node, self.frame(node.input))
        if id(node) not in self._made:
            with errors_at(node.origin):
                self._made[id(node)] = self.united(node) if isinstance(node, Union) else self.joined(node)
        return self._made[id(node)]

    def result(self) -> DataFrame:
        """The rows of the root, with row kinds as Flink spells them."""
        self._spell(self.planned.root)
        rows, stream = self.frame(self.planned.root), self.bare(self.planned.root)
        if stream is None:
            return rows
        if ROW_KIND_COLUMN in rows.columns and not is_changelog(stream.df):
            rows = _spelled(rows, stream)
        columns = [column for column in rows.columns if column != ROW_KIND_COLUMN]
        return _part(rows, columns, self.options["name"] or "query", 1)

    def _spell(self, node: PlanNode) -> None:
        """Makes the unions above all operators, with row kinds as Flink spells them."""
        while isinstance(node, Calc):
            node = node.input
        if isinstance(node, Union):
            for part in node.inputs:
                self._spell(part)
            with errors_at(node.origin):
                self._made[id(node)] = self.united(node, spelled=True)

    def united(self, node: Union, *, spelled: bool = False) -> DataFrame:
        """The rows of a union: static for static inputs alone, else static rows come with the first micro-batch.

        Args:
            node: the union.
            spelled: whether row kinds of inputs are respelled as Flink's.
        """
        if self.ended is not None and all(scan.table.name in self.ended.streams for scan in _scans(node)):
            return self.ended.united(node, spelled=spelled)
        frames = []
        for part in node.inputs:
            rows, stream = self.frame(part), self.bare(part)
            if stream is not None and stream.load is not None and self.ended is not None:
                stream.load()
            if spelled and stream is not None and part.row_kind is not None and not is_changelog(stream.df):
                rows = _spelled(rows, stream)
            frames.append(rows)
        return union(*as_streams(frames, self.options["state"]))

    def bare(self, node: PlanNode) -> Stream | None:
        """The input stream that a node filters and projects; None if there is an operator between."""
        while isinstance(node, Calc | LocalAggregate):
            node = node.input
        return self.streams[node.table.name] if isinstance(node, Scan) else None

    def side(self, node: PlanNode, source: Input) -> Stream:
        """The input of an operator that a node makes."""
        frame = self.frame(node)
        given = self.bare(node) or Stream(df=frame)
        if source.event_time is None:
            given = dataclasses.replace(given, delay_ms=None, idle_timeout_ms=None)
        planned = ("name", "unique_key", "row_kind", "sequence_by", "ttl_ms", "updates", "event_time")
        return dataclasses.replace(given, df=frame, **{name: getattr(source, name) for name in planned})

    def delay_ms(self, table: str, column: str) -> int | None:
        """The delay of a part of a union; None of a static one, whose rows come before there is a watermark."""
        given = self.streams[table]
        if given.load is not None:
            return None
        (side, _), known = timed_input(given, column), delays(given.df).get(column)
        of_operator = given.delay_ms is None and known is not None and known.plan_id is not None
        wrong = {
            f"has no watermark of {column!r}: withWatermark, or delay= of its stream": side.delay_ms is None,
            f"has {column!r} from an operator by time: give it a delay of its own, delay= of its stream": of_operator,
            "has idle_timeout=, and a part without rows holds the watermark back": side.idle_timeout_ms is not None,
        }
        for why in (why for why, is_so in wrong.items() if is_so):
            raise DescriptionError(f"input '{table}', a part of a UNION ALL whose windows are final, {why}")
        return side.delay_ms

    def takes(self, node: JoinNode) -> bool:
        """True if an operator is over these inputs alone, and has a result at their end."""
        if any(scan.table.name not in self.streams for scan in _scans(node)):
            return False
        try:
            for operator in walk(node):
                if isinstance(operator, JoinNode):
                    operator.description.with_inputs(operator.description.inputs, "at_end")
        except DescriptionError:
            return False
        return True

    def joined(self, node: JoinNode) -> DataFrame:
        """The rows of an operator over its inputs."""
        count, options = len(self.planned.joins), dict(self.options)
        number = next(n for n, one in enumerate(self.planned.joins, 1) if one is node)
        if count > 1 and options["state"] is not None:
            options["state"] = options["state"].below(str(number))
        if count > 1 and options["name"] is not None:
            options["name"] += f"_{number}"
        state = options["state"]
        if self.ended is not None and self.ended.takes(node) and not _begun(state):
            return self.ended.frame(node)
        sides: Sequence[Stream]
        sides = [self.side(below, source) for below, source in zip(node.inputs, node.description.inputs, strict=True)]
        if self.ended is not None:
            sides = beside_streams(sides, state)
        description = node.description
        upstream: tuple[str | None, str | None] = (None, None)
        if node.parts is not None and sides[0].df.isStreaming:
            parts = UnionParts(node.parts.column, tuple(self.delay_ms(*one) for one in node.parts.times))
            sides = [dataclasses.replace(sides[0], parts=parts)]
        elif description.by_event_time and len(sides) == 1:
            side, above = timed_input(sides[0])
            sides, upstream = [side], (above, None)
        elif description.by_event_time:
            sides, upstream = timed(sides)
        # the changelog of a join by time never takes a row back
        inputs = [as_input(side, derive=not description.by_time) for side in sides]
        joined = description.with_inputs(inputs, node.description.emit if sides[0].df.isStreaming else "at_end")
        query = show(self.planned) if number == count else None
        return apply_operator(joined, sides, options, upstream=upstream, query=query)


def _spelled(rows: DataFrame, stream: Stream) -> DataFrame:
    """Respells the row kinds of an input's changes as Flink's.

    An unknown kind, and an update without its old row, end the query, as they do in an operator.
    """
    keyed = stream.unique_key is not None
    kind, known = named_column(ROW_KIND_COLUMN), [word for word in SPELLINGS if word != "u" or keyed]
    codes = codes_of(np.array([SPELLINGS.index(word) for word in known]), has_unique_key=keyed)
    assert codes is not None
    flinks = [
        part for word, code in zip(known, codes, strict=True) for part in (f.lit(word), f.lit(SHORT_STRINGS[code]))
    ]
    label = f"input '{stream.name}', column '{stream.row_kind}': unknown row kind, or an update without its old row: "
    wrong = f.raise_error(f.concat(f.lit(label), f.coalesce(kind, f.lit("null"))))
    return rows.withColumn(ROW_KIND_COLUMN, f.coalesce(f.create_map(*flinks)[kind], wrong))


_UNION: Final = "gpu_ops.union"
"""Metadata key of every column, which replaces the metadata of the first changelog's columns."""


def union(*changelogs: DataFrame, name: str = "union") -> DataFrame:
    """Puts all rows of several changelogs into one, as UNION ALL does.

    Args:
        changelogs: changelogs of this package, perhaps filtered or projected; a DataFrame without ``row_kind`` is
            insert-only. Columns are matched by position and have the names of the first changelog's.
        name: the name of the result, for errors.

    Returns:
        A DataFrame; first column ``row_kind``. It has no unique key, so a view of it counts equal rows.

    Raises:
        DescriptionError: fewer than two, columns do not fit, some are static and some stream, or two joins have one
            name.

    Example:
        >>> orders = spark.createDataFrame([(1, 10), (2, 20)], "id INT, amount INT")
        >>> payments = spark.createDataFrame([(1, 4)], "id INT, paid INT")
        >>> paid = gpu_ops.semi_join(orders, payments, on="id")
        >>> unpaid = gpu_ops.anti_join(orders, payments, on="id")
        >>> gpu_ops.union(paid, unpaid).orderBy("id").show()
        +--------+---+------+
        |row_kind| id|amount|
        +--------+---+------+
        |      +I|  1|    10|
        |      +I|  2|    20|
        +--------+---+------+
    """
    if len(changelogs) < 2:
        raise DescriptionError("union() takes two changelogs or more")
    frames = [data_frame(df, f"changelog {number}") for number, df in enumerate(changelogs, 1)]
    if len({df.isStreaming for df in frames}) > 1:
        raise DescriptionError("union(): some of them are static and some stream, which Spark does not union")
    _check_names(frames)
    names = [column for column in frames[0].columns if column != ROW_KIND_COLUMN]
    parts = [_part(df, names, name, number) for number, df in enumerate(frames, 1)]
    first, *others = observed_once(parts)
    try:
        for other in others:
            first = first.unionAll(other)
    except AnalysisException as error:
        raise DescriptionError(f"union(): the columns do not fit: {message_in(str(error))}") from error
    return first


def _part(df: DataFrame, names: list[str], name: str, number: int) -> DataFrame:
    own = [column for column in df.columns if column != ROW_KIND_COLUMN]
    if len(own) != len(names):
        raise DescriptionError(
            f"union(): the first changelog has {len(names)} columns, number {number} {len(own)}: {', '.join(own)}"
        )
    kind = named_column(ROW_KIND_COLUMN) if ROW_KIND_COLUMN in df.columns else f.lit("+I")
    columns = [named_column(column).alias(new, metadata={_UNION: True}) for column, new in zip(own, names, strict=True)]
    return df.select(kind.alias(ROW_KIND_COLUMN, metadata={CHANGELOG: name}), *columns)


def _check_names(frames: list[DataFrame]) -> None:
    """Refuses two joins of one name, as Spark's progress has the metrics of each under its name."""
    joins: dict[str, str] = {}
    for df in frames:
        for one in plans_of(df):
            if joins.setdefault(one.name, one.plan_id) != one.plan_id:
                raise DescriptionError(
                    f"union(): two joins are called {one.name!r}, and Spark's progress has the metrics of each under "
                    "its name: give them other name= arguments, or none"
                )
