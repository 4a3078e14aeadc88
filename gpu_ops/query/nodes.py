"""The plan of a query: its operators, the rows between them that Spark makes, and what columns are called.

A plan is made of few things: scans of the query's relations, operators with their descriptions, and between these
`Calc`, which stands for all filters and projections in a row; Catalyst's own expressions are what Spark runs of them.
`show` prints it: one operator a line, inputs below it, and why it was taken.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, cast

import pyarrow as pa

from gpu_ops.descriptions.by_time import AsofJoin, TemporalJoin
from gpu_ops.descriptions.changelog import ROW_KIND_COLUMN
from gpu_ops.descriptions.description import as_written
from gpu_ops.descriptions.groups import without_upserts
from gpu_ops.descriptions.inputs import Layout
from gpu_ops.descriptions.join import Join, LookupJoin
from gpu_ops.descriptions.multi_join import MultiJoin
from gpu_ops.descriptions.sessions import SessionAggregate
from gpu_ops.descriptions.times import show_ms
from gpu_ops.query.choose import Chooser
from gpu_ops.query.errors import Origin
from gpu_ops.query.expressions import Expr, QueryColumn, TimeWindow, quoted
from gpu_ops.query.relations import Grouping, JoinOf, Relation, Scan, UnionOf, origin


class Named(NamedTuple):
    """A column of the node below, or an expression over them, and the name it gets."""

    name: str
    text: str
    expr: Expr | None
    column: str | None


@dataclasses.dataclass(frozen=True)
class Calc:
    """Rows filtered, then projected, with their row kind: all filters and projections in a row.

    Attributes:
        input: the node below.
        has: its columns, and what it calls them.
        scan: the input whose rows they are, or None.
        conditions: all are true of the rows that stay.
        computed: columns to compute.
        left: the columns that are left, by their names above; empty as long as that is open.
        row_kind: what the row-kind column is called above, or None where there is none.
        key: columns that identify a row of an operator's changelog, as the node below calls them, or None.
        why: a remark, or empty.
    """

    input: PlanNode
    has: Mapping[QueryColumn, str]
    scan: Scan | None = None
    conditions: tuple[Expr, ...] = ()
    computed: Mapping[QueryColumn, Expr] = dataclasses.field(default_factory=dict)
    left: tuple[tuple[str, QueryColumn], ...] = ()
    row_kind: str | None = None
    key: tuple[str, ...] | None = None
    why: str = ""

    @property
    def inputs(self) -> tuple[PlanNode]:
        """An only input: the node below."""
        return (self.input,)

    @property
    def insert_only(self) -> bool:
        """True if no row is ever taken back."""
        return self.input.insert_only

    @property
    def columns(self) -> frozenset[QueryColumn]:
        """All that may be left."""
        return frozenset(self.has) | frozenset(self.computed)

    @property
    def schema(self) -> pa.Schema:
        """The schema of the columns that are left."""
        return pa.schema([pa.field(name, column.type) for name, column in self.left])

    @property
    def where(self) -> list[str]:
        """The conditions as text, over the columns of the node below."""
        return [expr.text(self._call) for expr in self.conditions]

    @property
    def select(self) -> list[Named]:
        """The columns that are left, with their text."""
        return [
            Named(name, expr.text(self._call), expr, None)
            if (expr := self.computed.get(column)) is not None
            else Named(name, self._call(column), None, self.has[column])
            for name, column in self.left
        ]

    @property
    def known(self) -> dict[int, str]:
        """By the id of an attribute in an expression, the column of the node below that it is."""
        computed = (self.computed[column] for _, column in self.left if column in self.computed)
        return {number: self.has[c] for expr in (*self.conditions, *computed) for number, c in expr.ids.items()}

    def _call(self, column: QueryColumn) -> str:
        return quoted(self.has[column])


@dataclasses.dataclass(frozen=True)
class LocalAggregate:
    """Rows of a task grouped before they are shuffled, by slices of time among others; it keeps nothing.

    Attributes:
        input: the node below; its rows are insertions.
        time: the column that windows are of.
        window: the windows; slices are as long as these slide.
        by: group columns, and for one that is made of a window which end of it: 0 for its start, 1 for its end.
        calls: columns, the functions that make them, and of what; None for ``count(*)``.
        schema: of the group columns and these.
    """

    input: PlanNode
    time: str
    window: TimeWindow
    by: tuple[tuple[str, int | None], ...]
    calls: tuple[tuple[str, str, str | None], ...]
    schema: pa.Schema

    row_kind = None
    insert_only = True

    @property
    def inputs(self) -> tuple[PlanNode]:
        """An only input: the node below."""
        return (self.input,)


class PartTimes(NamedTuple):
    """The parts of a union of inputs of the query.

    Attributes:
        column: the column of the union with the number of a row's part.
        times: of each part the name of the input and its event time there.
    """

    column: str
    times: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class JoinNode:
    """A join of any kind; or, of one input, an aggregate, the first rows of each group, the latest row of each key.

    Attributes:
        kind: which of them.
        description: for the engine.
        inputs: as many as it has.
        why: this operator was taken.
        remarks: more about it.
        origin: where in the query it comes from.
        parts: of an input that is a union of streams with a watermark each, which these are.
    """

    kind: Literal[
        "regular",
        "semi",
        "anti",
        "interval",
        "asof",
        "temporal",
        "lookup",
        "multi-way",
        "aggregate",
        "top",
        "latest",
        "over",
    ]
    description: Join | MultiJoin | Grouping
    inputs: tuple[PlanNode, ...]
    why: str
    remarks: tuple[str, ...] = ()
    origin: Origin = dataclasses.field(default=Origin(""), compare=False, repr=False)
    parts: PartTimes | None = None

    row_kind = "row_kind"

    @property
    def insert_only(self) -> bool:
        """True if no row is ever taken back."""
        return self.description.insert_only

    @property
    def schema(self) -> pa.Schema:
        """Its columns, the row kind left out."""
        return pa.schema([pa.field(c.name, c.type) for c in self.description.output])


@dataclasses.dataclass(frozen=True)
class Union:
    """All rows of several nodes, whose row kinds have one name; those of a node without are insertions.

    Attributes:
        inputs: the nodes.
        schema: their columns.
        origin: where in the query it comes from.
    """

    inputs: tuple[Calc, ...]
    schema: pa.Schema
    origin: Origin = dataclasses.field(default=Origin(""), compare=False, repr=False)

    row_kind = ROW_KIND_COLUMN

    @property
    def insert_only(self) -> bool:
        """True if no row is ever taken back."""
        return all(node.insert_only for node in self.inputs)


PlanNode = Scan | Calc | LocalAggregate | JoinNode | Union


@dataclasses.dataclass(frozen=True)
class Plan:
    """A planned query; the root's columns are the query's.

    Attributes:
        sql: its text.
        root: what it gives; of a UNION ALL at the top what its first SELECT does.
        others: those of a UNION ALL after the first.
    """

    sql: str
    root: Calc
    others: tuple[Plan, ...] = ()

    @property
    def parts(self) -> tuple[Plan, ...]:
        """The queries that it is the UNION ALL of; itself alone where it is none."""
        return (dataclasses.replace(self, others=()), *self.others)

    @property
    def joins(self) -> tuple[JoinNode, ...]:
        """In the order in which they are built: those below first."""
        return tuple(node for node in walk(*(part.root for part in self.parts)) if isinstance(node, JoinNode))


def walk(*nodes: PlanNode, views: bool = False, seen: set[int] | None = None) -> Iterator[PlanNode]:
    """The nodes below, and these last, each once: one may be the input of several.

    Args:
        nodes: the nodes.
        views: whether the plans of the views that they read are below them, too.
        seen: nodes that were there before.
    """
    seen = set() if seen is None else seen
    for node in nodes:
        if id(node) not in seen:
            seen.add(id(node))
            yield from walk(*(made_of(node) if views else node.inputs), views=views, seen=seen)
            yield node


def made_of(node: PlanNode) -> tuple[PlanNode, ...]:
    """The nodes whose rows a node takes; of a view that it reads the roots of the plan that makes it."""
    return cast("tuple[PlanNode, ...]", node.table.made_by) if isinstance(node, Scan) else node.inputs


# --- names ------------------------------------------------------------------------------------------


class Namer:
    """Names of columns below and between the joins: by their own name, or ``alias__column`` if that clashes."""

    def __init__(self, relation: Relation, outputs: Iterable[QueryColumn], chooser: Chooser) -> None:
        """Args: the query's tree; its result; the operators of its joins."""
        used: dict[QueryColumn, None] = dict.fromkeys(outputs)
        for node in relation.walk():
            used |= dict.fromkeys(node.named)
            if isinstance(node, JoinOf):
                choice = chooser.choice(node)
                used |= dict.fromkeys(choice.rule.times or ())
                for computed in choice.computed:
                    used |= dict.fromkeys(computed)
            elif isinstance(node, Scan):
                used |= dict.fromkeys(node.kept or ([] if node.columns & used.keys() else list(node.ids.values())[:1]))
        labels = [column.label.lower() for column in used]
        self._names: dict[QueryColumn, str] = {}
        self._taken = {ROW_KIND_COLUMN}
        for column in used:
            self._add(column, unique=labels.count(column.label.lower()) == 1)

    def _add(self, column: QueryColumn, *, unique: bool = True) -> str:
        name = column.label
        if not unique or name.lower() in self._taken:
            name = _unused(f"{column.owner}__{column.label}" if column.owner else column.label, self._taken)
        self._taken.add(name.lower())
        self._names[column] = name
        return name

    def __call__(self, column: QueryColumn) -> str:
        """The name of a column; one that is new gets one."""
        return self._names.get(column) or self._add(column)

    def __contains__(self, column: QueryColumn) -> bool:
        return column in self._names

    def items(self) -> Iterable[tuple[QueryColumn, str]]:
        """Every column that is used, and its name."""
        return self._names.items()

    def in_words(self, message: str, inputs: Mapping[str, Relation] | None = None) -> str:
        """A message about what is below or between the operators in the user's own words.

        Args:
            message: it names columns as this does, and inputs as `input_names` does.
            inputs: the inputs of the operator that it is about, by these names.
        """
        for name, relation in (inputs or {}).items():
            if [scan.alias for scan in relation.scans] != [name]:
                message = re.sub(rf"(?:the )?input '{re.escape(name)}'", _said(relation), message)
                message = re.sub(rf"\b{re.escape(name)}\.(?=[\w`])", "", message)
                message = re.sub(rf"'?\b{re.escape(name)}\b'?", _aliases_of(relation), message)
        words_of = {name: str(column) for column, name in self._names.items() if column.words or name != column.label}
        if not words_of:
            return message
        any_name = "|".join(re.escape(name) for name in sorted(words_of, key=len, reverse=True))

        def said(match: re.Match[str]) -> str:
            words = words_of[match["name"]]
            return words if "'" in words or not match["quote"] else f"'{words}'"

        return re.sub(rf"(?P<quote>['`]?)(?<!\w)(?P<name>{any_name})(?!\w)(?P=quote)", said, message)


def _aliases_of(relation: Relation) -> str:
    """The inputs that a relation is made of, as the query calls them."""
    *most, last = dict.fromkeys(scan.alias for scan in relation.scans)
    return f"{', '.join(most)} and {last}" if most else last


def _said(relation: Relation) -> str:
    """An input of an operator that is no table of the query's, in words."""
    below = origin(relation)
    kind = "union" if isinstance(below, UnionOf) else "join" if isinstance(below, JoinOf) else "result"
    aliases = _aliases_of(relation)
    return f"the {kind} of {aliases}" if " and " in aliases else f"input '{aliases}'"


def input_names(sides: Sequence[Relation]) -> list[str]:
    """The names of a join's inputs, made of their aliases."""
    names: list[str] = []
    for side in sides:
        name = "_".join(dict.fromkeys(scan.alias for scan in side.scans))
        names.append(_unused(name, [other.lower() for other in names]))
    return names


def _unused(name: str, taken: Collection[str]) -> str:
    """A name, with a number behind it where it is taken, in whatever case."""
    names = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
    return next(one for one in names if one.lower() not in taken)


# --- as text, in Flink's manner ---------------------------------------------------------------------

_TYPES: Final = {
    "inner": "InnerJoin", "left": "LeftOuterJoin", "right": "RightOuterJoin", "full": "FullOuterJoin",
    "semi": "LeftSemiJoin", "anti": "LeftAntiJoin",
}  # fmt: skip
_SPECS: Final[dict[Layout, str]] = {
    "join_key_contains_unique_key": "JoinKeyContainsUniqueKey",
    "unique_key": "HasUniqueKey",
    "multiset": "NoUniqueKey",
}


def show(plan: Plan) -> str:
    """The plan's tree; lines that begin with ``--`` give the reason for the operator above them."""
    text = "\n\n".join("\n".join(_tree(part.root, set())) for part in plan.parts)
    scans = (node for node in walk(*(part.root for part in plan.parts)) if isinstance(node, Scan))
    return as_written(text, (scan.alias for scan in scans))


def _tree(node: PlanNode, shown: set[int]) -> list[str]:
    """A node and what is below; of an operator that was shown before, the first line alone."""
    if id(node) in shown:
        return [f"Reused({_text(node)})"]
    if isinstance(node, JoinNode):
        shown.add(id(node))
    below = [_below(node, number, shown) for number in range(len(node.inputs))]
    mark = ":" if len(below) > 1 else "|"
    lines = [_text(node)]
    if isinstance(node, JoinNode):
        lines += [f"{mark}  -- {remark}" for remark in (node.why, *node.remarks)]
    if isinstance(node, Calc) and node.why:
        lines.append(f"{mark}  -- {node.why}")
    for number, parts in enumerate(below, start=1):
        first, rest = (":- ", ":  ") if number < len(below) else ("+- ", "   ")
        lines += [first + parts[0], *(rest + part for part in parts[1:])]
    return lines


def _below(node: PlanNode, number: int, shown: set[int]) -> list[str]:
    """One input of a node, and the shuffle between them; upserts that become retractions first are shuffled twice."""
    lines = _tree(cast("PlanNode", node.inputs[number]), shown)
    if not isinstance(node, JoinNode):
        return lines
    runs, retracted = without_upserts(node.description) or (node.description, ())
    if number in retracted:
        key = node.description.inputs[number].unique_key or ()
        lines = [_normalize(key), *_shuffled(key, lines, "+- ")]
    return _shuffled([key.columns[number] for key in runs.shuffled_by], lines)


def _normalize(key: Sequence[str]) -> str:
    return f"ChangelogNormalize(key=[{', '.join(map(quoted, key))}])"


def _shuffled(by: Sequence[str], lines: list[str], mark: str = "") -> list[str]:
    """A plan below a shuffle by columns, or to a single partition without any."""
    columns = ", ".join(map(quoted, by))
    exchange = f"{mark}Exchange(distribution=[{f'hash[{columns}]' if columns else 'single'}])"
    space = " " * len(mark)
    return [exchange, f"{space}+- {lines[0]}", *(f"{space}   {line}" for line in lines[1:])]


def _text(node: PlanNode) -> str:
    if isinstance(node, Scan):
        table = node.table
        more = [f"alias=[{node.alias}]"] if node.alias.lower() != table.name.lower() else []
        more.append(f"changes=[{table.changes}]")
        if table.unique_key is not None:
            more.append(f"uniqueKey=[{', '.join(table.unique_key)}]")
        return f"Source(table=[{table.name}], {', '.join(more)})"
    if isinstance(node, Calc):
        terms = [_term(text, len(node.conditions)) for text in node.where]
        where = f", where=[{' AND '.join(terms)}]" if terms else ""
        return f"Calc(select=[{', '.join(_named(x) for x in node.select)}]{where})"
    if isinstance(node, Union):
        return "Union(all=[true])"
    if isinstance(node, LocalAggregate):
        groups = ", ".join(quoted(name) for name, place in node.by if place is None)
        ends = ", ".join(quoted(name) for name, place in node.by if place is not None)
        results = ", ".join(f"{name} = {function}({of or '*'})" for name, function, of in node.calls)
        window = f"{node.window.text(lambda _: quoted(node.time))} AS {ends}"
        return f"LocalWindowAggregate(groupBy=[{groups}], window=[{window}], select=[{results}])"
    join: Any = node.description
    if node.kind == "aggregate":
        by, calls = ", ".join(map(quoted, join.by)), ", ".join(map(str, join.measures))
        if isinstance(join, SessionAggregate):
            window = f"session_window({quoted(str(join.source.event_time))}, {show_ms(join.gap_ms)})"
            return f"SessionAggregate(groupBy=[{by}], window=[{window}]{f', select=[{calls}]' if calls else ''})"
        return f"GroupAggregate(groupBy=[{by}]{f', select=[{calls}]' if calls else ''})"
    if node.kind == "latest":
        return _normalize(join.by)
    if node.kind == "top":
        by, order = ", ".join(map(quoted, join.by)), ", ".join(map(str, join.order))
        if not by and join.number is None:
            return f"SortLimit(orderBy=[{order}], fetch=[{join.n}])"
        return f"Rank(partitionBy=[{by}], orderBy=[{order}], rankRange=[1..{join.n}])"
    if node.kind == "over":
        by, order = ", ".join(map(quoted, join.by)), ", ".join(map(str, join.order))
        return f"OverAggregate(partitionBy=[{by}], orderBy=[{order}], select=[{', '.join(map(str, join.calls))}])"
    return _multi_way(join) if node.kind == "multi-way" else _two_way(join)


def _named(entry: Named) -> str:
    text = " ".join(entry.text.split())
    return text if text == quoted(entry.name) else f"{text} AS {quoted(entry.name)}"


def _term(text: str, count: int) -> str:
    text = " ".join(text.split())
    return f"({text})" if count > 1 and " or " in text.lower() else text


def _all(equal: Sequence[str], where: object) -> str:
    """Equalities and a residual condition, joined by AND."""
    return " AND ".join([*equal, *([_term(str(where), 2 if equal else 1)] if where else [])])


def _two_way(join: Join) -> str:
    where, kind = _all(join.equalities(quoted), join.where) or "true", f"joinType=[{_TYPES[join.how]}]"
    left, right = (f"{source.name}.{quoted(str(source.event_time))}" for source in join.inputs)
    if join.interval is not None:
        bounds = str(join.interval).replace("right - left", f"{right} - {left}")
        return f"IntervalJoin({kind}, windowBounds=[{bounds}], where=[{where}])"
    if isinstance(join, AsofJoin):
        sign = (">" if join.asof.direction == "backward" else "<") + "=" * join.asof.exact
        apart = join.asof.tolerance_ms
        tolerance = "" if apart is None else f", tolerance=[{show_ms(apart)}]"
        return f"AsofJoin({kind}, matchCondition=[{left} {sign} {right}]{tolerance}, where=[{where}])"
    if isinstance(join, LookupJoin):
        return f"LookupJoin({kind}, table=[{join.right.name}], where=[{where}])"
    if isinstance(join, TemporalJoin):
        return f"TemporalJoin({kind}, asOf=[{left}], versionsBy=[{right}], where=[{where}])"
    aware = ", nullAware=[true]" if join.null_aware else ""
    specs = ", ".join(f"{s}InputSpec=[{_SPECS[join.layout(n)]}]" for n, s in enumerate(("left", "right")))
    return f"Join({kind}{aware}, where=[{where}], {specs})"


def _multi_way(join: MultiJoin) -> str:
    common = ", ".join(quoted(columns[0]) for columns in join.common_key)
    hows = ", ".join(step.how.upper() for step in join.steps)
    unique = ", ".join(f"({', '.join(s.unique_key)})" if s.unique_key else "noUniqueKey" for s in join.inputs)
    terms = [_all(join.equalities(number, quoted), step.where) for number, step in enumerate(join.steps, start=1)]
    return (
        f"MultiJoin(commonJoinKey=[{common}], joinTypes=[{hows}], inputUniqueKeys=[{unique}], "
        f"joinConditions=[{', '.join(terms)}])"
    )
