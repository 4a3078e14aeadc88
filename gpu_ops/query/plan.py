"""A query and what is known of its inputs, to a plan of operators: names, projections, descriptions for the engine."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql import types as st

from gpu_ops.descriptions.changelog import ROW_KIND_COLUMN
from gpu_ops.descriptions.description import Emit
from gpu_ops.descriptions.groups import MAX_ROWS, without_upserts
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.multi_join import MultiJoin
from gpu_ops.errors import DescriptionError, NotBuiltError
from gpu_ops.query import relations
from gpu_ops.query.by_time import QueryText, check_all_found, read
from gpu_ops.query.catalyst import Catalyst
from gpu_ops.query.choose import Choice, Chooser, columns_of
from gpu_ops.query.errors import JOINS_NOTHING, Origin, PlacedError, SqlError, errors_at, said_in_sql
from gpu_ops.query.expressions import Expr, QueryColumn
from gpu_ops.query.nodes import Calc, JoinNode, LocalAggregate, Namer, PartTimes, Plan, PlanNode, Union, input_names
from gpu_ops.query.places import position_of
from gpu_ops.query.read import Outputs, PlanReader
from gpu_ops.query.rewrite import Same, in_two_phases, normalized, repeated, upserted, with_ends, with_numbers
from gpu_ops.query.runs import MultiWayRun, run_of, segments
from gpu_ops.spark_types import spark_type

MultiWay = Literal["auto", "never"]
"""Whether joins that share a key become one multi-way join."""


def plan(
    sql: str,
    tables: Mapping[str, relations.Table],
    session: SparkSession,
    *,
    schemas: Mapping[str, st.StructType] | None = None,
    emit: Emit = "per_batch",
    multi_way: MultiWay = "auto",
) -> Plan:
    """The operators of a query.

    Args:
        sql: SELECT ... FROM ... JOIN ..., in Spark's dialect.
        tables: its inputs by name.
        session: whose analyser, functions and settings count.
        schemas: by input the columns as Spark has them; by default what their Arrow types become.
        emit: of every operator; with ``"at_watermark"`` all of them are joins by time. ``"at_end"`` is the last one's,
            and those below it are ``"per_batch"``.
        multi_way: ``"never"`` makes a chain of two-way joins.

    Raises:
        SqlError: a query that streaming joins cannot do, with its line and column, and what to do instead.
        DescriptionError: an option that there is not.
        NotBuiltError: with ``"at_end"`` an operator below the last one that waits for time to pass.
    """
    for option, value, values in (("multi_way", multi_way, MultiWay), ("emit", emit, Emit)):
        if value not in get_args(values):
            raise DescriptionError(f"{option}={value!r}; it is one of {', '.join(get_args(values))}")
    text = read(sql)
    try:
        return _plan(text, tables, session, schemas or {}, emit=emit, multi_way=multi_way)
    except SqlError as error:
        raise text.error(error) from error.__cause__
    except PlacedError as error:
        raise text.error(SqlError(said_in_sql(str(error)), text.sql, *error.place)) from error


def _plan(
    text: QueryText,
    tables: Mapping[str, relations.Table],
    session: SparkSession,
    schemas: Mapping[str, st.StructType],
    *,
    emit: Emit,
    multi_way: MultiWay,
) -> Plan:
    """Plans a query; places of errors are those in the text as Catalyst reads it."""
    with errors_at(Origin(text.written)):
        catalyst = Catalyst(session)
        for name, table in tables.items():
            if "`" in name or name.lower() in text.sql.lower():
                catalyst.view(name, schemas.get(name) or _schema(table))
        whole = catalyst.parsed(text.sql)
        parts = catalyst.parts(whole)
        if len(parts) > 1:  # that their columns fit, which no part tells
            PlanReader(text, tables, catalyst).analysed(whole)
        queries = [PlanReader(text, tables, catalyst).read(part) for part in parts]
        if len(queries) > 1 and any(_without_operator(relation) for relation, _ in queries):
            queries = [PlanReader(text, tables, catalyst).read(whole)]  # one query, as not each part is one
        if upserted(queries[0][0]):
            queries = [(normalized(relation, whole), outputs) for relation, outputs in queries]
        joins = [x for relation, _ in queries for x in relation.walk() if isinstance(x, relations.JoinOf)]
        check_all_found(text, (join.by_time for join in joins if join.by_time is not None))
        roots = [_root(text, catalyst, query, emit, multi_way) for query in queries]
        first, *others = (Plan(text.written, root) for root in roots)
        if emit == "at_end":
            if others or isinstance(relations.origin(queries[0][0]), relations.UnionOf):
                raise NotBuiltError(
                    "emit='at_end' of a UNION ALL: ask for each SELECT, and union what gpu_ops.finish() gives"
                )
            _check_below_the_last(first)
        return dataclasses.replace(first, others=tuple(others))


def _check_below_the_last(whole: Plan) -> None:
    """Refuses what would still hold rows, or have forgotten some, when the last operator's input ends."""
    for node in whole.joins[:-1]:
        with errors_at(node.origin):
            for source in node.description.inputs:
                source.refuse("with emit='at_end' no row is forgotten", "ttl_ms")
            if node.description.by_time:
                raise NotBuiltError(
                    f"emit='at_end': {node.description.title} ({node.kind}) holds rows until its watermark passes "
                    "them, which the end of input does not do for an operator above it. Let the query end with it, "
                    "and ask another one over what gpu_ops.finish() gives"
                )


def _root(
    text: QueryText, catalyst: Catalyst, query: tuple[relations.Relation, Outputs], emit: Emit, multi_way: MultiWay
) -> Calc:
    (relation, outputs), chooser = query, Chooser(text.sql, catalyst, final=emit == "at_watermark")
    united = any(isinstance(below, relations.UnionOf) for below in relation.walk())
    if emit == "at_end" and _without_operator(relation) and not united:
        raise SqlError(JOINS_NOTHING, chooser.sql, 1, 1)
    if emit == "per_batch":
        relation = in_two_phases(relation)
    elif emit == "at_watermark":
        relation = with_ends(relation)
    namer = Namer(relation, [column for _, column in outputs], chooser)
    same = {} if emit == "at_watermark" else repeated(relation)
    return PlanBuilder(chooser, namer, text, emit=emit, multi_way=multi_way == "auto", same=same).root(
        relation, outputs
    )


def _without_operator(relation: relations.Relation) -> bool:
    return all(isinstance(below, relations.RowByRow | relations.Scan | relations.UnionOf) for below in relation.walk())


def _schema(table: relations.Table) -> st.StructType:
    return st.StructType([st.StructField(x.name, spark_type(x.type), x.nullable) for x in table.schema])


class PlanBuilder:
    """Makes the plan of one query."""

    def __init__(
        self,
        chooser: Chooser,
        name: Namer,
        text: QueryText,
        *,
        emit: Emit,
        multi_way: bool,
        same: Mapping[relations.Relation, Same],
    ) -> None:
        """Keeps what the plan is made with.

        Args:
            chooser: the query's operators.
            name: its names.
            text: of the query.
            emit: what joins emit.
            multi_way: whether joins may be multi-way.
            same: what it repeats.
        """
        self.chooser, self.name, self.text, self.emit = chooser, name, text, emit
        self.multi_way, self.same = multi_way, same
        self._in_a_row: dict[relations.JoinOf, int] = {}
        self._last: relations.Relation | None = None
        self._needed: dict[relations.Relation, frozenset[QueryColumn]] = {
            first: frozenset() for first, _ in same.values()
        }
        self._built: dict[relations.Relation, Calc] | None = None

    def root(self, relation: relations.Relation, outputs: Sequence[tuple[str, QueryColumn]]) -> Calc:
        """Builds the whole plan."""
        self._last = relations.origin(relation)
        needed = frozenset(column for _, column in outputs)
        if isinstance(self._last, relations.Scan):
            if (unkept := self.unkept(relation, "a query that joins and groups nothing")) is not None:
                raise SqlError(unkept, self.chooser.sql, 1, 1)
            calc = self.done(self.build(relation, needed), tuple(outputs))
            return dataclasses.replace(calc, row_kind=calc.row_kind and ROW_KIND_COLUMN)
        if self.same:
            self.build(relation, needed)  # tells what all need of what they share
            self._built = {}
        return self.done(self.build(relation, needed), tuple(outputs))

    def build(self, relation: relations.Relation, needed: frozenset[QueryColumn]) -> Calc:
        """A relation of which these columns are needed; which of its own are left is open yet."""
        same = self.same.get(relation)
        if same is not None:  # what the query has already, under other names
            calc = self.build(same.first, frozenset(own for c, own in same.columns.items() if c in needed))
            return dataclasses.replace(
                calc, has={c: calc.has[own] for c, own in same.columns.items() if own in calc.has}
            )
        if relation not in self._needed:
            return self.translated(relation, needed)
        if self._built is None:
            self._needed[relation] |= needed
            return self.translated(relation, needed)
        if relation not in self._built:
            wanted = self._needed[relation]
            self._built[relation] = self.closed(self.translated(relation, wanted), wanted)
        return self._built[relation]

    def translated(self, relation: relations.Relation, needed: frozenset[QueryColumn]) -> Calc:
        """A relation that is not there yet."""
        if isinstance(relation, relations.Scan):
            return Calc(relation, {c: c.label for c in relation.ids.values()}, relation)
        if isinstance(relation, relations.Filter):
            return self.filtered(relation, needed)
        if isinstance(relation, relations.Compute):
            each = isinstance(relation, relations.Expand)
            computed = {c: e for c, e in relation.computed.items() if each or c in needed}
            calc = self.build(relation.below, (needed - frozenset(relation.computed)) | _inside(computed))
            calc = self.computed(calc, computed, needed - frozenset(computed) if each else needed)
            # a row is there several times then: what identified one does so no more
            expanded = dataclasses.replace(calc, scan=_scan_of(relation), key=None)
            return self.closed(expanded, needed | frozenset(computed)) if each else calc
        if isinstance(relation, relations.UnionOf):
            return self.union(relation, needed)
        if isinstance(relation, relations.LocalAggregateOf):
            return self.local_aggregate(relation)
        if isinstance(relation, relations.OfGroups):
            return self.groups(relation, needed)
        assert isinstance(relation, relations.JoinOf)
        return self.join(relation, needed)

    # --- row by row -----------------------------------------------------------------------------

    def filtered(self, relation: relations.Filter, needed: frozenset[QueryColumn]) -> Calc:
        """Rows for which conditions are true."""
        inside = columns_of(relation.conditions)
        calc = self.build(relation.below, needed | inside)
        if inside & frozenset(calc.computed):
            calc = self.closed(calc, needed | inside)
        calc = dataclasses.replace(calc, conditions=(*calc.conditions, *relation.conditions))
        if isinstance(relation.below, relations.JoinOf):
            calc = dataclasses.replace(calc, why="; ".join(_stayed(relation.conditions, relation.scans)))
        return calc

    def computed(self, calc: Calc, made: Mapping[QueryColumn, Expr], needed: frozenset[QueryColumn]) -> Calc:
        """Adds computed columns to a node."""
        made = {c: e for c, e in made.items() if c not in calc.columns}
        inside = _inside(made)
        if inside & frozenset(calc.computed):
            calc = self.closed(calc, needed | inside)
        return dataclasses.replace(calc, computed={**calc.computed, **made})

    def closed(self, calc: Calc, wanted: frozenset[QueryColumn]) -> Calc:
        """With everything done, and these columns left, or with those that the input's description needs."""
        keep = set(wanted & calc.columns) | {c for c, name in calc.has.items() if name in (calc.key or ())}
        if calc.scan is not None:
            keep |= set(calc.scan.kept)
        if not keep:
            keep.add(next((c for c in (*calc.has, *calc.computed) if c in self.name), next(iter(calc.has))))
        names_below = calc.input.schema.names
        order = [c for c in (*calc.has, *calc.computed) if c in keep]
        order.sort(key=lambda c: names_below.index(calc.has[c]) if c in calc.has else len(names_below))
        names = {c: self.name(c) for c in order}
        done = self.done(calc, tuple((names[c], c) for c in order))
        same = names_below == list(names.values()) and done.row_kind == calc.input.row_kind
        if same and not calc.conditions and not calc.computed:
            return dataclasses.replace(calc, has=names)
        key = calc.key and tuple(names[c] for name in calc.key for c in order if calc.has.get(c) == name)
        return Calc(done, names, calc.scan, key=key)

    def done(self, calc: Calc, left: tuple[tuple[str, QueryColumn], ...]) -> Calc:
        """With these columns left."""
        kind = calc.input.row_kind
        if kind is not None and any(self.name(c).lower() == kind.lower() for c in calc.columns if c in self.name):
            kind = ROW_KIND_COLUMN
        return dataclasses.replace(calc, left=left, row_kind=kind)

    def union(self, relation: relations.UnionOf, needed: frozenset[QueryColumn]) -> Calc:
        """The rows of several relations, as columns of one name."""
        columns = [column for column in relation.of_parts if column in needed] or [next(iter(relation.of_parts))]
        parts = []
        for number, part in enumerate(relation.parts):
            if (unkept := self.unkept(part, "a UNION ALL")) is not None:
                self.chooser.fail(unkept, relation.java)
            of_part = [relation.of_parts[column][number] for column in columns]
            calc = self.build(part, frozenset(of_part))
            parts.append(self.done(calc, tuple(zip(map(self.name, columns), of_part, strict=True))))
        inputs = tuple(dataclasses.replace(part, row_kind=part.row_kind and ROW_KIND_COLUMN) for part in parts)
        schema = pa.schema([pa.field(self.name(column), column.type) for column in columns])
        return Calc(
            Union(inputs, schema, self.origin(relation.java)), {column: self.name(column) for column in columns}
        )

    @staticmethod
    def unkept(part: relations.Relation, what: str) -> str | None:
        """The error for an input of which something is said that rows which no operator takes do not keep.

        Args:
            part: the rows.
            what: what they are of, in words.
        """
        below = relations.origin(part)
        scan = below.below if isinstance(below, relations.LatestOf) else below
        if not isinstance(scan, relations.Scan):
            return None
        table = scan.table
        said = {
            "ttl": table.ttl_ms is not None,
            "sequence_by": table.sequence_by is not None and scan is below,
            "bad_rows": table.bad_rows != "fail",
        }
        option = next((name for name, is_said in said.items() if is_said), None)
        return option and (
            f"input {scan.alias!r} has {option}, which the rows of {what} do not keep: aggregate or join it first, or "
            "give the input without it"
        )

    # --- of groups ------------------------------------------------------------------------------

    def groups(self, relation: relations.OfGroups, needed: frozenset[QueryColumn]) -> Calc:
        """An operator on groups of rows."""
        if self.chooser.final and isinstance(relation, relations.LatestOf):
            why = self.chooser.taken_back(relation)
            self.chooser.fail(f"with emit 'at_watermark' inputs only grow, and {why}", relation.java)
        if isinstance(relation, relations.TopOf) and not 1 <= (relation.n or 0) <= MAX_ROWS:
            self.chooser.fail(f"the first {relation.n} rows: they are between 1 and {MAX_ROWS} a group", relation.java)
        times = self.times(relation) if isinstance(relation, relations.AggregateOf) else []
        parts = self.chooser.part_times(relation.below, times[0]) if self.united(relation) and times else None
        looked_at, column = (needed & relation.below.columns) | relation.used | frozenset(times), None
        if parts is not None:
            below, column = with_numbers(self.chooser, relation.below, itertools.count())
            relation, looked_at = relation.over(below), looked_at | {column}
        (name,) = input_names([relation])
        place = self.origin(relation.java, {name: relation.below})
        with errors_at(place):
            node, source = self.side(relation.below, {}, looked_at, name, next(iter(times), None))
            description, why = relation.describe(source, self.name, self.emit_of(relation), needed)
        of_parts = None if parts is None or column is None else PartTimes(self.name(column), parts)
        made = JoinNode(relation.kind, description, (node,), why, (), place, of_parts)
        return self.after(made, [relation], (), needed)

    def united(self, relation: relations.OfGroups) -> bool:
        """True for groups that go by the watermark of a union."""
        return self.chooser.final and isinstance(relations.origin(relation.below), relations.UnionOf)

    def local_aggregate(self, relation: relations.LocalAggregateOf) -> Calc:
        """Rows grouped by slices of time before they are shuffled."""
        below = self.closed(self.build(relation.below, relation.used), relation.used).input
        columns = (*relation.by, *(call.column for call in relation.calls))
        schema = pa.schema([pa.field(self.name(column), column.type) for column in columns])
        calls = tuple((m.name, str(m.function), m.column) for m in (call.measure(self.name) for call in relation.calls))
        by = tuple((self.name(column), relation.places.get(column)) for column in relation.by)
        node = LocalAggregate(below, self.name(relation.time), relation.window, by, calls, schema)
        return Calc(node, {column: self.name(column) for column in columns})

    def times(self, relation: relations.AggregateOf) -> list[QueryColumn]:
        """The event time that a watermark goes by: what the windows are made of, or a column that is grouped by."""
        if isinstance(relation, relations.SessionsOf):
            timed = relation.time in self.chooser.event_times(relation.below)
            if self.chooser.final and not timed and self.chooser.part_times(relation.below, relation.time) is None:
                why = self.chooser.lost(relation.below, relation.time)
                why = why or f"{relation.time} is none: withWatermark, or event_time of its stream"
                self.chooser.fail(f"emit 'at_watermark' goes by an event time, and {why}", relation.java)
            return [relation.time]
        if not self.chooser.final:
            return []
        times = (c for c in relation.below.columns if c.event_time or self.chooser.part_times(relation.below, c))
        known = sorted(times, key=str)
        below, wanted = relation.below, frozenset(relation.ends) or frozenset(relation.by)
        while isinstance(below, relations.RowByRow):
            if isinstance(below, relations.Compute):
                wanted |= _inside({made: expr for made, expr in below.computed.items() if made in wanted})
            below = below.below
        lost = next(filter(None, (self.chooser.lost(below, c) for c in sorted(wanted & below.columns, key=str))), None)
        if lost is not None and not known:
            self.chooser.fail(f"emit 'at_watermark' goes by an event time, and {lost}", relation.java)
        if len(known) > 1 and self.united(relation):  # which of them windows are made of, parts may say
            return [c for c in known if c in wanted]
        return [c for c in known if c in wanted] or known[:1]

    # --- joins ----------------------------------------------------------------------------------

    def join(self, top: relations.JoinOf, needed: frozenset[QueryColumn]) -> Calc:
        """A join, with those on its left that become one with it."""
        _, steps = relations.spine(top)
        for step in steps:
            self._in_a_row.setdefault(step, len(steps))
        runs: dict[tuple[int, int], MultiWayRun | str] = {}

        def possible(i: int, j: int) -> bool:
            runs[i, j] = self.possible(steps[i:j])
            return isinstance(runs[i, j], MultiWayRun)

        cuts = segments(len(steps), possible) if self.multi_way else [(n, n + 1) for n in range(len(steps))]
        refused = next((run for run in runs.values() if isinstance(run, str)), "")
        if not self.multi_way and len(steps) > 1:
            refused = "multi_way='never'"
        run = runs.get(cuts[-1])
        chosen = run if isinstance(run, MultiWayRun) else self.chooser.choice(top)
        wanted = needed | chosen.used | columns_of(chosen.above)
        times = chosen.rule.times if isinstance(chosen, Choice) else None
        names = input_names(chosen.inputs)
        each = zip(chosen.inputs, chosen.computed, names, times or [None] * len(names), strict=True)
        place = self.origin(top.java, dict(zip(names, chosen.inputs, strict=True)))
        with errors_at(place):
            sides = [self.side(relation, made, wanted, name, time) for relation, made, name, time in each]
            inputs = [source for _, source in sides]
            description = chosen.describe(inputs, self.name, self.emit_of(top), ansi=self.chooser.ansi)
        scans = [scan for side in chosen.inputs if (scan := _scan_of(side)) is not None]
        remarks = [f"{c.text()!r} is evaluated in Spark, above the join" for c in chosen.above]
        remarks += _stayed((c.expr for c in chosen.remarked), scans)
        if isinstance(chosen, Choice):
            why = chosen.rule.why + (f"; {refused}" if refused and chosen.kind == "regular" else "")
            if not chosen.keys:
                remarks.insert(0, "no equality: every pair of rows is a candidate, in one partition")
        else:
            assert isinstance(description, MultiJoin)
            total = self._in_a_row[top]
            why = chosen.why(description, self.name, total)
            if len(chosen.steps) < total and refused:
                remarks.insert(0, f"the other joins are apart: {refused}")
        node = JoinNode(chosen.kind, description, tuple(node for node, _ in sides), why, tuple(remarks), place)
        return self.after(node, chosen.outputs, chosen.above, wanted)

    def possible(self, steps: Sequence[relations.JoinOf]) -> MultiWayRun | str:
        """Joins as one multi-way join, or why they are none."""
        run = run_of(steps, self.chooser)
        if isinstance(run, str):
            return run
        inputs = []
        for relation, made, name in zip(run.inputs, run.computed, input_names(run.inputs), strict=True):
            scan = _scan_of(relation)
            own = [c for c in run.used if c in relation.columns or c in made]
            own += [c for c in (scan.kept if scan else ()) if c not in own]
            schema = pa.schema([pa.field(self.name(c), c.type) for c in own])
            inputs.append(self.described(name, schema, scan, None if scan else ROW_KIND_COLUMN))
        try:
            description = run.describe(inputs, self.name, self.emit_of(steps[-1]), ansi=self.chooser.ansi)
        except SqlError:
            raise
        except DescriptionError as error:
            return str(error).split(":", 1)[0].split(". ", 1)[0]
        if not description.shuffled_by:
            return "an input brings upserts whose unique key does not have the common key in it"
        return run

    # --- around operators -----------------------------------------------------------------------

    def origin(self, java: Any, inputs: Mapping[str, relations.Relation] | None = None) -> Origin:
        """The place of one of Catalyst's nodes in the text; ``inputs``: the operator's inputs by their names."""
        place = self.text.place(*position_of(java))
        return Origin(self.text.written, *place, functools.partial(self.name.in_words, inputs=inputs))

    def emit_of(self, relation: relations.Relation) -> Emit:
        """When an operator has output: the last one waits for the end alone, what is below keeps its result for it."""
        return "per_batch" if self.emit == "at_end" and relation is not self._last else self.emit

    def side(
        self,
        relation: relations.Relation,
        made: Mapping[QueryColumn, Expr],
        wanted: frozenset[QueryColumn],
        name: str,
        time: QueryColumn | None = None,
    ) -> tuple[PlanNode, Input]:
        """One input of an operator: its node and its description.

        Args:
            relation: what it is.
            made: columns to compute of it.
            wanted: the columns that the operator needs, of all its inputs.
            name: what the operator calls it.
            time: its event time, if the operator goes by one.
        """
        own = (wanted & relation.columns) | frozenset(made)
        calc = self.closed(self.computed(self.build(relation, own | _inside(made)), made, own), own)
        node = calc.input
        below = relations.origin(relation)
        plain = time is None or isinstance(below, relations.UnionOf)
        if plain and calc.scan is None and node.insert_only and node.row_kind is not None:
            left = tuple((name, column) for column, name in calc.has.items())
            node = (
                dataclasses.replace(node, row_kind=None) if isinstance(node, Calc) else Calc(node, calc.has, left=left)
            )
        source = self.described(name, node.schema, calc.scan, node.row_kind)
        if time is not None:
            source = dataclasses.replace(source, event_time=self.name(time))
        if calc.scan is None and calc.key is not None:
            source = dataclasses.replace(source, unique_key=calc.key, updates="retract")
        if isinstance(below, relations.LatestOf):
            source = dataclasses.replace(source, ttl_ms=below.below.table.ttl_ms)
        return node, source

    def described(self, name: str, schema: pa.Schema, scan: relations.Scan | None, row_kind: str | None) -> Input:
        """The description of an operator's input, which may be one of the query's."""
        if scan is None:
            return Input(name, schema, row_kind=row_kind)
        table = scan.table
        unique = tuple(self.name(scan.column(key)) for key in table.unique_key) if table.unique_key else None
        order = self.name(scan.column(table.sequence_by)) if table.sequence_by else None
        return Input(name, schema, unique, row_kind, order, table.ttl_ms, updates=table.updates)

    def after(
        self, node: JoinNode, sides: Sequence[relations.Relation], above: Sequence[Expr], wanted: frozenset[QueryColumn]
    ) -> Calc:
        """Wraps an operator as rows that filters and projections can follow."""
        known = set(node.schema.names)
        retracting = without_upserts(node.description)  # what will run
        key = (node.description if retracting is None else retracting[0]).unique_key
        columns = {
            c: name
            for c, name in self.name.items()
            # a key may be computed for a join further down
            if name in known and (c in wanted or name in (key or ()) or any(c in side.columns for side in sides))
        }
        return Calc(node, columns, conditions=tuple(above), key=key)


def _stayed(conditions: Iterable[Expr], scans: Sequence[relations.Scan]) -> list[str]:
    """Why filters on one input are not below its join."""
    return [
        f"{c.text()!r} is not below the join: {scan.alias} brings upserts, and a row it lets through would stay "
        "when it is replaced by one that it does not"
        for c in conditions
        for scan in scans
        if scan.table.upserts and c.columns and c.columns.keys() <= scan.columns
    ]


def _inside(computed: Mapping[QueryColumn, Expr]) -> frozenset[QueryColumn]:
    """The columns that computed columns are made of."""
    return columns_of(computed.values())


def _scan_of(relation: relations.Relation) -> relations.Scan | None:
    """The input that a relation is; without its unique key where a row of it may be there several times."""
    expanded = False
    while isinstance(relation, relations.RowByRow):
        expanded |= isinstance(relation, relations.Expand)
        relation = relation.below
    if not isinstance(relation, relations.Scan):
        return None
    without_key = dataclasses.replace(relation.table, unique_key=None)
    return dataclasses.replace(relation, table=without_key) if expanded else relation
