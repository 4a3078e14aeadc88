"""The DataFrames of a query's plan: of each operator, of what lies between operators, and unions of changelogs.

In a UNION ALL a row occurs as often as in all of its parts together, so the result has no unique key.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from gpu_ops.descriptions.changelog import ROW_KIND_COLUMN, SHORT_STRINGS, SPELLINGS, codes_of
from gpu_ops.descriptions.inputs import Input, UnionParts
from gpu_ops.errors import DescriptionError
from gpu_ops.query.errors import errors_at
from gpu_ops.query.nodes import Calc, JoinNode, LocalAggregate, Plan, PlanNode, Union, show, walk
from gpu_ops.query.relations import Scan
from gpu_ops.spark.api.apply import apply_operator
from gpu_ops.spark.api.by_time import timed, timed_input
from gpu_ops.spark.api.finish import calculated, check_runs
from gpu_ops.spark.api.static import as_streams, beside_streams
from gpu_ops.spark.api.streams import Stream, as_input
from gpu_ops.spark.driver.queries import plans_of
from gpu_ops.spark.failures import data_frame, message_in
from gpu_ops.spark.plan.changes import observed_once, sliced
from gpu_ops.spark.plan.column_metadata import CHANGELOG, delays, is_changelog
from gpu_ops.spark_types import named_column
from gpu_ops.state.address import StateAddress
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import Manifest


def scans_of(node: PlanNode) -> list[Scan]:
    """The inputs whose rows a node is made of, each as often as it is named."""
    return [scan for scan in walk(node) if isinstance(scan, Scan)]


def has_begun(state: StateAddress | None) -> bool:
    """True if a folder has the state of an operator."""
    return state is not None and Manifest.read(Files.at(state)) is not None


class QueryRunner:
    """Makes the DataFrames of a query plan's nodes.

    Operators over static inputs alone run at once, in Spark's tasks, and their result is a static input of the operator
    above, unless a state folder says that they run live. Aggregates without group columns always run live: in a query
    over streams they have no row while their input has none.

    Args:
        planned: the plan.
        streams: the inputs by name.
        options: the options of `gpu_ops.spark.api.streams.RunOptions`, and ``backlog``.
        given: the inputs as they were before static ones were loaded; None where all are static.
        stand_ins: rows that are taken in the place of those of a node, by the node's id.
    """

    def __init__(
        self,
        planned: Plan,
        streams: Mapping[str, Stream],
        options: Mapping[str, Any],
        given: Mapping[str, Stream] | None = None,
        stand_ins: Mapping[int, DataFrame] | None = None,
    ) -> None:
        self.planned, self.streams, self.options = planned, streams, dict(options)
        self._made: dict[int, DataFrame] = {}
        self._stand_ins = stand_ins or {}
        static = {
            label: dataclasses.replace(side, df=given[label].df.select(side.df.columns), load=None)
            for label, side in streams.items()
            if given is not None
            and side.load is not None
            and not given[label].df.isStreaming
            and side.refresh_ms is None
        }
        self.ended = QueryRunner(planned, static, {**options, "state": None, "backlog": False}) if static else None

    def frame(self, node: PlanNode) -> DataFrame:
        """The rows of a node."""
        if id(node) in self._stand_ins:
            return self._stand_ins[id(node)]
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
        if self.ended is not None and all(scan.table.name in self.ended.streams for scan in scans_of(node)):
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
        if any(scan.table.name not in self.streams for scan in scans_of(node)):
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
        if self.ended is not None and self.ended.takes(node) and not has_begun(state):
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


def runner_of(planned: Plan, stand_ins: Mapping[int, DataFrame], streams: Mapping[str, Stream]) -> QueryRunner:
    """The runner of a plan whose operators all have rows that stand in for theirs."""
    return QueryRunner(planned, streams, {"state": None, "name": None, "backlog": False}, None, stand_ins)


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


# --- unions -------------------------------------------------------------------------------------------

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
