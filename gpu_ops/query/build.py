"""From relations and chosen operators to plan nodes: names, projections, descriptions for the engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import pyarrow as pa

from gpu_ops.conditions import Condition
from gpu_ops.descriptions.aggregate import Aggregate, Function, Measure
from gpu_ops.descriptions.changelog import ROW_KIND_COLUMN
from gpu_ops.descriptions.description import Emit
from gpu_ops.descriptions.groups import MAX_ROWS, Latest, Top, without_upserts
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.keys import Equality, Key
from gpu_ops.descriptions.multi_join import MultiJoin, Step
from gpu_ops.errors import DescriptionError
from gpu_ops.query.choose import Chooser, Residual, condition
from gpu_ops.query.errors import SqlError, in_sql
from gpu_ops.query.expressions import Column, Expr
from gpu_ops.query.groups.relations import AggregateOf, LatestOf, LocalAggregateOf, TopOf
from gpu_ops.query.nodes import Calc, JoinNode, LocalAggregate, Node, Source
from gpu_ops.query.relations import Compute, Expand, Filter, JoinOf, Relation, RowByRow, Scan, origin
from gpu_ops.query.runs import Run, run_of, segments, spine
from gpu_ops.query.same import Same
from gpu_ops.query.stages import Namer, Stage, input_names


class Builder:
    """Makes the plan of one query."""

    def __init__(
        self, chooser: Chooser, name: Namer, *, emit: Emit, multi_way: bool, same: Mapping[Relation, Same]
    ) -> None:
        """Args: the query's operators; its names; what joins emit; whether joins may be multi-way; what it repeats."""
        self.chooser, self.name, self.emit, self.multi_way, self.same = chooser, name, emit, multi_way, same
        self._in_a_row: dict[JoinOf, int] = {}
        self._last: Relation | None = None
        self._needed: dict[Relation, frozenset[Column]] = {first: frozenset() for first, _ in same.values()}
        self._built: dict[Relation, Stage] | None = None

    def root(self, relation: Relation, outputs: Sequence[tuple[str, Column]]) -> Calc:
        """The whole plan."""
        self._last = origin(relation)
        needed = frozenset(column for _, column in outputs)
        if self.same:
            self.build(relation, needed)  # tells what all need of what they share
            self._built = {}
        return self.build(relation, needed).calc(outputs, None)

    def build(self, relation: Relation, needed: frozenset[Column]) -> Stage:
        """A relation of which these columns are needed."""
        same = self.same.get(relation)
        if same is not None:
            return self.again(same, needed)
        if relation not in self._needed:
            return self.made(relation, needed)
        if self._built is None:
            self._needed[relation] |= needed
            return self.made(relation, needed)
        if relation not in self._built:
            wanted = self._needed[relation]
            self._built[relation] = self.made(relation, wanted).closed(wanted)
        return self._built[relation]

    def again(self, same: Same, needed: frozenset[Column]) -> Stage:
        """What the query has already, under other names."""
        stage = self.build(same.first, frozenset(own for c, own in same.columns.items() if c in needed))
        has = {c: stage.has[own] for c, own in same.columns.items() if own in stage.has}
        return dataclasses.replace(stage, has=has)

    def made(self, relation: Relation, needed: frozenset[Column]) -> Stage:
        """A relation that is not there yet."""
        if isinstance(relation, Scan):
            return self.scan(relation)
        if isinstance(relation, Filter):
            stage = self.build(relation.below, needed | _columns(relation.conditions))
            stage = self.filtered(stage, relation.conditions, needed)
            if isinstance(relation.below, JoinOf):
                stage = dataclasses.replace(stage, why="; ".join(_stayed(relation.conditions, relation.scans)))
            return stage
        if isinstance(relation, Compute):
            computed = {c: e for c, e in relation.computed.items() if c in needed}
            inside = frozenset(c for e in computed.values() for c in e.columns)
            stage = self.build(relation.below, (needed - frozenset(relation.computed)) | inside)
            return self.computed(stage, computed, needed)
        if isinstance(relation, Expand):
            return self.expanded(relation, needed)
        if isinstance(relation, LocalAggregateOf):
            return self.local_aggregate(relation)
        if isinstance(relation, AggregateOf):
            return self.aggregate(relation, needed)
        if isinstance(relation, LatestOf):
            return self.latest(relation, needed)
        if isinstance(relation, TopOf):
            return self.top(relation, needed)
        assert isinstance(relation, JoinOf)
        return self.join(relation, needed)

    def emit_of(self, relation: Relation) -> Emit:
        """When an operator has output: the last one waits for the end alone, what is below keeps its result for it."""
        return "per_batch" if self.emit == "at_end" and relation is not self._last else self.emit

    def latest(self, relation: LatestOf, needed: frozenset[Column]) -> Stage:
        """An input whose upserts come with the rows that they replace."""
        if self.chooser.final:
            why = self.chooser.taken_back(relation)
            self.chooser.fail(f"with emit='at_watermark' inputs only grow, and {why}", relation.java)
        (name,) = input_names([relation])
        node, source = self.side(relation.below, {}, needed, name)
        try:
            description = Latest(source, self.emit_of(relation))
        except DescriptionError as error:
            self.chooser.fail(str(error), relation.java)
        why = f"{relation.below.alias} brings upserts: each takes the row back that it replaces, below a filter"
        return self.after(JoinNode("latest", description, (node,), why), [relation], (), needed)

    def top(self, relation: TopOf, needed: frozenset[Column]) -> Stage:
        """The first rows of each group."""
        assert relation.n is not None
        if not 1 <= relation.n <= MAX_ROWS:
            self.chooser.fail(f"the first {relation.n} rows: they are between 1 and {MAX_ROWS} a group", relation.java)
        (name,) = input_names([relation])
        own = (needed & relation.below.columns) | relation.used
        node, source = self.side(relation.below, {}, own, name)
        try:
            order = tuple(how._replace(column=self.name(column)) for column, how in relation.order)
            number = self.name(relation.number) if relation.number in needed else None
            by = tuple(self.name(column) for column in relation.by)
            description = Top(source, by, order, relation.n, self.emit_of(relation), number)
        except DescriptionError as error:
            self.chooser.fail(in_sql(error), relation.java)
        why = f"the first {relation.n} by ROW_NUMBER()"
        if relation.identity is None:
            why = f"the first {relation.n} by ORDER BY ... LIMIT, in one partition"
        return self.after(JoinNode("top", description, (node,), why), [relation], (), needed)

    def aggregate(self, relation: AggregateOf, needed: frozenset[Column]) -> Stage:
        """One row per group."""
        (name,) = input_names([relation])
        times = self.times(relation) if self.emit == "at_watermark" else []
        node, source = self.side(relation.below, {}, relation.used | frozenset(times), name, next(iter(times), None))
        end = next((self.name(column) for column in relation.ends), None) if self.emit == "at_watermark" else None
        try:
            by = tuple(self.name(column) for column in relation.by)
            calls = tuple(
                Measure(
                    self.name(call.column),
                    cast("Function", call.function),
                    None if call.of is None else self.name(call.of),
                )
                for call in relation.calls
            )
            emit = self.emit_of(relation)
            always = not by and emit != "at_end" and source.ttl_ms is None
            description = Aggregate(source, by, calls, emit, end, always=always)
        except DescriptionError as error:
            self.chooser.fail(in_sql(error), relation.java)
        why = "GROUP BY" if relation.by else "no GROUP BY: one row, in one partition"
        return self.after(JoinNode("aggregate", description, (node,), why), [relation], (), needed)

    def local_aggregate(self, relation: LocalAggregateOf) -> Stage:
        """Rows grouped by slices of time before they are shuffled."""
        below = self.build(relation.below, relation.used).closed(relation.used)
        made = (*relation.by, *(call.column for call in relation.calls))
        schema = pa.schema([pa.field(self.name(column), column.type) for column in made])
        calls = tuple(
            (self.name(x.column), x.function, None if x.of is None else self.name(x.of)) for x in relation.calls
        )
        by = tuple((self.name(column), relation.places.get(column)) for column in relation.by)
        node = LocalAggregate(below.node, self.name(relation.time), relation.window, by, calls, schema)
        return Stage(node, {column: self.name(column) for column in made}, self.name, None)

    def times(self, relation: AggregateOf) -> list[Column]:
        """The event time that a watermark goes by: what the windows are made of, or a column that is grouped by."""
        known = [c for c in relation.below.columns if c.event_time]
        below, wanted = relation.below, frozenset(relation.ends) or frozenset(relation.by)
        while isinstance(below, RowByRow):
            if isinstance(below, Expand):
                self.chooser.fail(
                    "sliding windows are not closed by a watermark: emit 'at_watermark' is for others",
                    below.java,
                )
            if isinstance(below, Compute):
                wanted |= frozenset(c for made, e in below.computed.items() if made in wanted for c in e.columns)
            below = below.below
        return [c for c in known if c in wanted] or known[:1]

    def expanded(self, relation: Expand, needed: frozenset[Column]) -> Stage:
        """Each row several times; what identified one before does so no more."""
        inside = frozenset(relation.value.columns)
        own = needed - {relation.column}
        stage = self.build(relation.below, own | inside)
        if inside & frozenset(stage.made):
            stage = stage.closed(own | inside)
        made = {**stage.made, relation.column: relation.value}
        return dataclasses.replace(stage, made=made, scan=_scan_of(relation), key=None).closed(own | {relation.column})

    def scan(self, scan: Scan) -> Stage:
        """An input as it is."""
        table = scan.table
        node = Source(table.name, scan.alias, table.schema, table.row_kind, table.changes, table.unique_key)
        return Stage(node, {c: c.label for c in scan.ids.values()}, self.name, scan)

    def filtered(self, stage: Stage, conditions: Sequence[Expr], needed: frozenset[Column]) -> Stage:
        """Rows for which these conditions are true."""
        if _columns(conditions) & frozenset(stage.made):
            stage = stage.closed(needed | _columns(conditions))
        return dataclasses.replace(stage, where=[*stage.where, *conditions])

    def computed(self, stage: Stage, made: dict[Column, Expr], needed: frozenset[Column]) -> Stage:
        """More columns."""
        made = {c: e for c, e in made.items() if c not in stage.columns}
        inside = frozenset(c for e in made.values() for c in e.columns)
        if inside & frozenset(stage.made):
            stage = stage.closed(needed | inside)
        return dataclasses.replace(stage, made={**stage.made, **made})

    # --- joins ----------------------------------------------------------------------------------

    def join(self, top: JoinOf, needed: frozenset[Column]) -> Stage:
        """A join, with those on its left that become one with it."""
        _, steps = spine(top)
        for step in steps:
            self._in_a_row.setdefault(step, len(steps))
        runs: dict[tuple[int, int], Run | str] = {}

        def possible(i: int, j: int) -> bool:
            runs[i, j] = self.possible(steps[i:j])
            return isinstance(runs[i, j], Run)

        cuts = segments(len(steps), possible) if self.multi_way else [(n, n + 1) for n in range(len(steps))]
        first, stop = cuts[-1]
        refused = next((run for run in runs.values() if isinstance(run, str)), "")
        if not self.multi_way and len(steps) > 1:
            refused = "multi_way='never'"
        run = runs.get((first, stop))
        if isinstance(run, Run):
            return self.multi(run, needed, self._in_a_row[top], refused)
        return self.two_way(top, needed, refused if len(steps) > 1 else "")

    def possible(self, steps: Sequence[JoinOf]) -> Run | str:
        """Joins as one multi-way join, or why they are none."""
        run = run_of(steps, self.chooser)
        if isinstance(run, str):
            return run
        used = frozenset(c for links in run.links for link in links for c in (link.key.left, link.key.right))
        used |= _columns([c for conditions in run.residual for c in conditions])
        inputs = []
        for relation, made, name in zip(run.inputs, run.computed, input_names(run.inputs), strict=True):
            scan = _scan_of(relation)
            own = [c for c in used if c in relation.columns or c in made]
            own += [c for c in (scan.kept if scan else ()) if c not in own]
            schema = pa.schema([pa.field(self.name(c), c.type) for c in own])
            inputs.append(self.described(name, schema, relation, None if scan else ROW_KIND_COLUMN))
        try:
            description = self.multi_join(run, inputs)
        except SqlError:
            raise
        except DescriptionError as error:
            return str(error).split(":", 1)[0].split(". ", 1)[0]
        if not description.shuffled_by:
            return "an input brings upserts whose unique key does not have the common key in it"
        return run

    def multi(self, run: Run, needed: frozenset[Column], total: int, refused: str) -> Stage:
        """A multi-way join."""
        wanted = needed | _columns([*run.above, *(c for conditions in run.residual for c in conditions)])
        wanted |= frozenset(c for links in run.links for link in links for c in (link.key.left, link.key.right))
        nodes, inputs = self.sides(run.inputs, run.computed, wanted)
        description = self.multi_join(run, inputs)
        shown = {name: self.column_text(c, run.computed) for c, name in self.name.items()}
        common = [" = ".join(dict.fromkeys(shown[column] for column in key)) for key in description.common_key]
        count = len(run.steps)
        which = f"all {count} joins share" if count == total else f"{count} of {total} joins share"
        remarks = [f"the other joins are apart: {refused}"] if count < total and refused else []
        remarks += self.remarks(run.inputs, run.residual, run.above)
        why = f"multi-way: {which} {', and '.join(common)}"
        node = JoinNode("multi-way", description, nodes, why, tuple(remarks))
        return self.after(node, run.inputs, run.above, wanted)

    def column_text(self, column: Column, computed: Sequence[dict[Column, Expr]]) -> str:
        """A column as the query calls it."""
        found = next((made[column].text() for made in computed if column in made), None)
        return str(column) if found is None else f"({found})"

    def multi_join(self, run: Run, inputs: Sequence[Input]) -> MultiJoin:
        """The description of a run."""
        steps = []
        for index, (how, links, residual) in enumerate(zip(run.hows, run.links, run.residual, strict=True), start=1):
            on = tuple(Equality(x.input, self.name(x.key.left), self.name(x.key.right), x.key.null_safe) for x in links)
            where = self.where(residual, run.inputs[: index + 1], run.computed[: index + 1], inputs[: index + 1])
            steps.append(Step(how, on, where))  # type: ignore[arg-type]
        return MultiJoin(tuple(inputs), tuple(steps), emit=self.emit_of(run.steps[-1]), ansi=self.chooser.ansi)

    def two_way(self, join: JoinOf, needed: frozenset[Column], refused: str) -> Stage:
        """A join of two inputs."""
        choice = self.chooser.choice(join)
        wanted = needed | _columns([*choice.residual, *choice.above])
        wanted |= frozenset(c for key in choice.keys for c in (key.left, key.right))
        wanted |= frozenset(choice.rule.times or ())
        sides = (join.left, join.right)
        nodes, inputs = self.sides(sides, choice.computed, wanted, choice.rule.times or (None, None))
        where = self.where(choice.residual, sides, choice.computed, inputs)
        try:
            rule, emit = choice.rule, self.emit_of(join)
            if emit == "at_end" and rule.emit is not None:
                self.chooser.fail(f"a {rule.kind} join goes by time: there is none with emit 'at_end'", join.java)
            if emit == "at_watermark" and rule.kind != "asof":
                emit = "per_batch"
            description = rule.describe(
                how=join.how,
                left=inputs[0],
                right=inputs[1],
                keys=tuple(Key(self.name(k.left), self.name(k.right), k.null_safe) for k in choice.keys),
                where=where,
                emit=rule.emit or emit,
                null_aware=join.member is not None,
                ansi=self.chooser.ansi,
            )
        except DescriptionError as error:
            self.chooser.fail(in_sql(error), join.java)
        remarks = self.remarks(sides, [] if rule.kind == "temporal" else [choice.residual], choice.above)
        if not choice.keys:
            remarks.insert(0, "no equality: every pair of rows is a candidate, in one partition")
        why = rule.why + (f"; {refused}" if refused and choice.kind == "regular" else "")
        node = JoinNode(choice.kind, description, nodes, why, tuple(remarks))
        return self.after(node, sides if join.how not in ("semi", "anti") else sides[:1], choice.above, wanted)

    def sides(
        self,
        relations: Sequence[Relation],
        computed: Sequence[dict[Column, Expr]],
        wanted: frozenset[Column],
        times: Sequence[Column | None] | None = None,
    ) -> tuple[tuple[Node, ...], list[Input]]:
        """The inputs of a join: their nodes and their descriptions."""
        names = input_names(relations)
        each = zip(relations, computed, names, times or [None] * len(names), strict=True)
        made = [self.side(relation, more, wanted, name, time) for relation, more, name, time in each]
        return tuple(node for node, _ in made), [source for _, source in made]

    def side(
        self,
        relation: Relation,
        made: dict[Column, Expr],
        wanted: frozenset[Column],
        name: str,
        time: Column | None = None,
    ) -> tuple[Node, Input]:
        """One input of a join: its node and its description."""
        inside = frozenset(c for expr in made.values() for c in expr.columns)
        own = (wanted & relation.columns) | frozenset(made)
        stage = self.computed(self.build(relation, own | inside), made, own)
        stage = stage.closed(own)
        inserts = time is None and stage.scan is None and stage.node.insert_only
        if inserts and stage.row_kind is not None:
            stage = stage.without_row_kind()
        source = self.described(name, stage.schema, relation, stage.row_kind)
        if time is not None:
            source = dataclasses.replace(source, event_time=self.name(time))
        if stage.scan is None and stage.key is not None:
            source = dataclasses.replace(source, unique_key=stage.key, updates="retract")
        below = origin(relation)
        if isinstance(below, LatestOf):
            source = dataclasses.replace(source, ttl_ms=below.below.table.ttl_ms)
        return stage.node, source

    def described(self, name: str, schema: pa.Schema, relation: Relation, row_kind: str | None = None) -> Input:
        """The description of a join's input."""
        scan = _scan_of(relation)
        if scan is None:
            return Input(name, schema, row_kind=row_kind)
        table = scan.table
        unique = tuple(self.name(scan.own(key)) for key in table.unique_key) if table.unique_key else None
        order = self.name(scan.own(table.sequence_by)) if table.sequence_by else None
        return Input(name, schema, unique, row_kind, order, table.ttl_ms, updates=table.updates)

    def after(
        self, node: JoinNode, sides: Sequence[Relation], above: Sequence[Expr], wanted: frozenset[Column]
    ) -> Stage:
        """What comes out of a join."""
        known = set(node.schema.names)
        columns = {c: name for c, name in self.name.items() if name in known}
        retracting = without_upserts(node.description)  # what will run
        key = (node.description if retracting is None else retracting[0]).unique_key
        wanted |= {c for c, name in columns.items() if name in (key or ())}  # a key computed for a join further down
        columns = {c: name for c, name in columns.items() if c in wanted or any(c in side.columns for side in sides)}
        return Stage(node, columns, self.name, None, where=list(above), key=key)

    # --- conditions -----------------------------------------------------------------------------

    def where(
        self,
        conditions: Sequence[Residual],
        sides: Sequence[Relation],
        computed: Sequence[dict[Column, Expr]],
        inputs: Sequence[Input],
    ) -> Condition | None:
        """Conditions as the operator's."""
        owner = {
            c: i.name for side, made, i in zip(sides, computed, inputs, strict=True) for c in (*side.columns, *made)
        }
        schemas = {source.name: source.schema for source in inputs}
        return condition(conditions, lambda c: (owner[c], self.name(c)), schemas, ansi=self.chooser.ansi)

    def remarks(
        self, sides: Sequence[Relation], residual: Sequence[Sequence[Residual]], above: Sequence[Expr]
    ) -> list[str]:
        """What is worth saying about conditions that stayed where they are."""
        found = [f"{c.text()!r} is evaluated in Spark, above the join" for c in above]
        scans = [scan for side in sides if (scan := _scan_of(side)) is not None]
        return found + _stayed([c.expr for step in residual for c in step], scans)


def _stayed(conditions: Iterable[Expr], scans: Sequence[Scan]) -> list[str]:
    """Why filters on one input are not below its join."""
    return [
        f"{c.text()!r} is not below the join: {scan.alias} brings upserts, and a row it lets through would stay "
        "when it is replaced by one that it does not"
        for c in conditions
        for scan in scans
        if scan.table.upserts and c.columns and c.columns.keys() <= scan.columns
    ]


def _columns(conditions: Iterable[Expr | Residual]) -> frozenset[Column]:
    return frozenset(c for condition in conditions for c in condition.columns)


def _scan_of(relation: Relation) -> Scan | None:
    """The input that a relation is; without its unique key where a row of it may be there several times."""
    expanded = False
    while isinstance(relation, RowByRow):
        expanded |= isinstance(relation, Expand)
        relation = relation.below
    if not isinstance(relation, Scan):
        return None
    return (
        Scan(dataclasses.replace(relation.table, unique_key=None), relation.alias, relation.ids)
        if expanded
        else relation
    )
