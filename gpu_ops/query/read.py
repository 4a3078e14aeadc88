"""Catalyst's plan to relations; what a streaming join cannot do is errors."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from gpu_ops.descriptions.changelog import ROW_KIND_COLUMN
from gpu_ops.descriptions.join import JoinType
from gpu_ops.errors import closest
from gpu_ops.query import by_time, errors, groups, windows
from gpu_ops.query.by_time import ByTime, QueryText, set_apart
from gpu_ops.query.catalyst import INPUT, Catalyst, arrow_type_of, class_of, id_of, items
from gpu_ops.query.errors import SqlError
from gpu_ops.query.expressions import Expr, QueryColumn, Tree, number_of, tree
from gpu_ops.query.places import words_of
from gpu_ops.query.relations import Compute, Filter, JoinOf, Relation, Scan, Table, UnionOf, filtered, spine
from gpu_ops.query.rewrite import lifted
from gpu_ops.query.scope import Scope

_HOWS: Final[dict[str, JoinType]] = {
    "Inner": "inner", "Cross": "inner", "LeftOuter": "left", "RightOuter": "right", "FullOuter": "full",
    "LeftSemi": "semi", "LeftAnti": "anti", "LeftSingle": "left",
}  # fmt: skip


Outputs = list[tuple[str, QueryColumn]]
"""A query's columns by their names, in its order."""


_CHANGING: Final = re.compile(
    rf'\.(?:{"|".join(sorted(errors.NOW | errors.RANDOM))})"|"value":"{errors.TODAY}', re.IGNORECASE
)
"""What the JSON of a plan has where there may be another value each time, though Catalyst has it for deterministic."""
_TYPED_TODAY: Final = re.compile(rf"\b(?:DATE|TIMESTAMP(?:_NTZ|_LTZ)?)\s*(['\"]){errors.TODAY}.*?\1", re.IGNORECASE)


_GENERATED: Final = re.compile(r"_w\d+|_we\d+|_gen_alias_\d+|_groupingexpression|_aggregateexpression|_common_expr_\d+")
"""The names that Spark's analyser and optimizer give to what they compute on the way."""


def changes_each_time(plan: Any) -> bool:
    """True for an analysed plan of Catalyst's that may give another value each time it is run."""
    return not plan.deterministic() or _CHANGING.search(plan.toJSON()) is not None


def _is_today(cast: Any, catalyst: Catalyst) -> bool:
    """True for a cast of a constant text that Spark takes for the time of today, as ``DATE 'now'``."""
    text = cast.child()
    if str(cast.dataType().simpleString()) not in ("date", "timestamp", "timestamp_ntz") or not text.foldable():
        return False
    return re.match(errors.TODAY, str(catalyst.constant(text)), re.IGNORECASE) is not None


def _is_random(call: Any, catalyst: Catalyst) -> bool:
    """True for a call that draws random numbers, of ``aes_encrypt`` its vector (Spark's ``ExpressionImplUtils``)."""
    if str(call.nodeName()) != "AesEncrypt":
        return True
    _, _, mode, _, vector, *_ = items(call.children())
    # an empty vector is drawn, and a column may be empty
    return str(catalyst.constant(mode)).upper() != "ECB" and not catalyst.constant(vector)


class PlanReader(Scope):
    """Reads the plan of one query."""

    def __init__(self, text: QueryText, tables: Mapping[str, Table], catalyst: Catalyst) -> None:
        """Args: the query's text; its inputs by name; the analyser, which has views of them."""
        super().__init__(text.sql, catalyst)
        self.text, self.tables = text, tables
        self._by_time: Mapping[frozenset[str], ByTime] = {}
        self._owners: dict[int, str] = {}
        self._aliases: dict[int, str] = {}
        self._join_types: dict[frozenset[str], JoinType] = {}

    def read(self, parsed: Any) -> tuple[Relation, Outputs]:
        """The relation of a parsed query, and the result's columns by their names."""
        written = _TYPED_TODAY.search(self.sql)
        if written is not None:
            before = self.sql[: written.start()]
            place = before.count("\n") + 1, written.start() - (before.rfind("\n") + 1) + 1
            raise SqlError(errors.CHANGING.format(written.group()), self.sql, *place)
        analysed = self.analysed(parsed)
        names = [str(name) for name in analysed.schema().fieldNames()]
        relation = self.plan(analysed)
        seen: set[str] = set()
        for index, name in enumerate(names):
            node = analysed.expressions().apply(index) if str(analysed.nodeName()) == "Project" else analysed
            if name.lower() == ROW_KIND_COLUMN:
                self.fail(f"{name!r} is the first column of every result: give this one another name", node)
            if name.lower() in seen:
                problem = (
                    f"the result would have two columns {name!r}: give one another name with AS, or write JOIN ... "
                )
                self.fail(f"{problem}USING where they are the key", node)
            seen.add(name.lower())
        return relation, list(zip(names, relation.shown.values(), strict=True))

    def analysed(self, parsed: Any) -> Any:
        """The plan of a parsed query as Spark's analyser has it."""
        try:
            return self.catalyst.analysed(self.sql, parsed)
        except SqlError as error:
            message = error.message
            missing = re.search(r"table or view `([^`]+)` cannot be found", message)
            if missing is not None:
                message += (
                    f"; the inputs are {closest(missing.group(1), (table.name for table in self.tables.values()))}"
                )
            named = re.search(r"with name `(?:[^`]*`\.`)?([^`]+)` cannot be resolved", message)
            column = named.group(1).lower() if named else None
            for table in reversed(list(self.tables.values())):
                if (table.row_kind or "").lower() == column and table.name.lower() in self.sql.lower():
                    message = f"{column!r} is the row kind of {table.name}, not data: it is the result's row_kind"
            raise SqlError(message, self.sql, error.line, error.column) from error.__cause__

    def plan(self, analysed: Any) -> Relation:
        """An analysed plan, of the query or of a sub-query."""
        text = analysed.toJSON()
        self._aliases |= _aliases(json.loads(text))
        joined = self.catalyst.joined(analysed)
        before = self._tree(joined)
        written = [tree(json.loads(x.toJSON()), lambda x=x: x) for x in (analysed, *items(analysed.subqueriesAll()))]  # type: ignore[misc]
        for part in written:
            self._check_inputs(part)
        if _CHANGING.search(text) or not joined.deterministic():
            for part in (*written, before):  # first where each call is as it was written
                self._check(part)
        for node in before.walk():
            if node.kind == "Join":
                self._join_types[_leaves(node)] = self._how(node)
        joined, self._by_time = set_apart(self.catalyst, joined, self.text)
        pushed = self.catalyst.pushed(joined)
        after = self._tree(pushed)
        self._take_leaves(pushed)
        relation, left_over = lifted(windows.without_bound(self._relation(after)))
        return filtered(relation, left_over)

    def condition(self) -> tuple[list[Scan], list[Expr]]:
        """The inputs and the condition of a query that joins them and does nothing else."""
        analysed = self.analysed(self.catalyst.parsed(self.sql))
        text = analysed.toJSON()
        if any(f'.{kind}"' in text for kind in errors.SUBQUERIES):
            raise SqlError("sub-queries are no part of a condition over both inputs", self.sql, 2, 1)
        joined = self.catalyst.joined(analysed)
        plan = self._tree(joined)
        if _CHANGING.search(text) or not joined.deterministic():
            self._check(tree(json.loads(text), lambda: analysed))
        self._take_leaves(joined)
        relation = self._relation(plan)
        while not isinstance(relation, JoinOf):
            assert isinstance(relation, Compute | Filter)
            relation = relation.below
        first, steps = spine(relation)
        scans = [scan for scan in (first, *(step.right for step in steps)) if isinstance(scan, Scan)]
        return scans, list(relation.on)

    # --- what is refused ------------------------------------------------------------------------

    def _check_inputs(self, plan: Tree) -> None:
        """Refuses the session's own tables and views, which Spark knows by their names, too."""
        for node in plan.walk():
            if node.kind != "SubqueryAlias" or not (node.args[0].kind == "View" or not node.args[0].args):
                continue
            for leaf in node.walk():
                if not leaf.args and not _is_input(leaf):
                    words = words_of(node.java)
                    names = closest(words.strip("`"), (table.name for table in self.tables.values()))
                    self.fail(errors.NO_INPUT.format(words, names), node.java)

    def _check(self, plan: Tree) -> None:
        """Refuses what has another value when a row is taken back."""
        for node in plan.walk():
            for expr in items(node.java.expressions()):
                self._check_expression(expr)

    def _check_expression(self, java: Any) -> None:
        for below in items(java.children()):
            self._check_expression(below)
        name = str(java.nodeName())
        if name in errors.NOW or (name == "Cast" and _is_today(java, self.catalyst)) or not java.deterministic():
            self.fail(errors.CHANGING.format(words_of(java)), java)
        if name in errors.RANDOM and _is_random(java, self.catalyst):
            hint = errors.VECTOR if name == "AesEncrypt" else ""
            self.fail(errors.CHANGING.format(words_of(java)) + hint, java)

    # --- nodes ----------------------------------------------------------------------------------

    def _tree(self, plan: Any) -> Tree:
        text = plan.toJSON()
        for number, qualifier in re.findall(r'"exprId":\{[^}]*?"id":(\d+)[^}]*\},"qualifier":"?\[([^"\]]+)\]', text):
            self._owners[int(number)] = qualifier.split(", ")[-1]
        return tree(json.loads(text), lambda: plan)

    def _take_leaves(self, plan: Any) -> None:
        self._leaves = iter(items(plan.collectLeaves()))

    def _relation(self, node: Tree) -> Relation:
        match node.kind:
            case "Project":
                return self._project(node, self._relation(node.args[0]))
            case "Filter":
                below = self._relation(node.args[0])
                condition = tree(node.fields["condition"], node.java.condition)
                return self._filter(below, Expr(condition, self.columns))
            case "Join":
                return self._join(node)
            case "Sort" if _window_above(node) is not None:
                return self._relation(node.args[0])
            case "Window":
                order = node.java.orderSpec()
                for inner in node.walk():  # that of a LIMIT in a sub-query, which Catalyst makes a window function
                    if inner.kind == "Sort" and _window_above(inner) is node and not order.length():
                        order = inner.java.order()
                return windows.windows_of(self, node.java, order, self._relation(node.args[0]))
            case "Aggregate":
                return groups.aggregate_of(self, node.java, self._relation(node.args[0]))
            case "Distinct":
                return groups.distinct_of(self, node.java, self._relation(node.args[0]))
            case "GlobalLimit" if node.args[0].kind == "LocalLimit":
                return self._limit(node, node.args[0].args[0])
            case "Expand":
                return groups.expanded(self, node.java, self._relation(node.args[0]))
            case "Generate" if class_of(node.java.generator()) == "ReplicateRows":
                return groups.repeated_rows(self, node.java, self._relation(node.args[0]))
            case "LocalRelation":
                return self._scan(node)
            case "Union":
                return self._union(node)
            case by_time.APART:
                return self._join_by_time(node)
            case _:
                why = errors.NODES.get("Command" if node.kind.endswith("Command") else node.kind)
                if why is None and not node.args:
                    why = errors.RELATION
                self.fail(why or "this is not understood in a streaming join", node.java)
        return None

    def _scan(self, node: Tree) -> Scan:
        output = next(self._leaves).output()
        first = output.apply(0).metadata() if output.length() else None
        if first is None or not first.contains(INPUT):
            self.fail(errors.RELATION, node.java)
        table = self.tables[str(first.getString(INPUT))]
        numbers = [int(part[0]["exprId"]["id"]) for part in node.fields["output"]]
        alias = next(
            (x[number] for x in (self._aliases, self._owners) for number in numbers if number in x), table.name
        )
        for number, field in zip(numbers, table.schema, strict=True):
            self.columns[number] = QueryColumn(
                field.name,
                alias,
                lambda field=field: field.type,  # type: ignore[misc]
                nullable=field.nullable and field.name not in (table.unique_key or ()),
                event_time=field.name in table.event_times,
            )
        return Scan(table, alias, {number: self.columns[number] for number in numbers})

    def _union(self, node: Tree) -> Relation:
        """The rows of several relations; its columns have the ids of the first one's in Catalyst."""
        parts = [(self._relation(arg), items(arg.java.output())) for arg in node.args]
        columns: dict[QueryColumn, tuple[QueryColumn, ...]] = {}
        ids: dict[int, QueryColumn] = {}
        for place, attribute in enumerate(items(node.java.output())):
            number = id_of(attribute)
            column = self.computed(attribute, str(attribute.name()), self._owners.get(number, ""))
            columns[column] = tuple(relation.shown[id_of(output[place])] for relation, output in parts)
            ids[number] = column
        self.columns = {**self.columns, **ids}  # what is below goes on meaning its own
        return UnionOf(tuple(relation for relation, _ in parts), columns, ids, node.java)

    def _project(self, node: Tree, below: Relation) -> Relation:
        computed: dict[QueryColumn, Expr] = {}
        ids: dict[int, QueryColumn] = {}
        for index, part in enumerate(node.fields["projectList"]):
            expr = self._expr(part, lambda index=index: node.java.projectList().apply(index))  # type: ignore[misc]
            number, value = number_of(expr.tree), expr.args[0] if expr.kind == "Alias" else expr
            column = value.column
            if column is None:
                name, owner = str(expr.tree.fields["name"]), self._owners.get(number, "")
                named = self.nameless if _GENERATED.fullmatch(name) else self.computed
                column = named(value.java, name, owner=owner)
                computed[column] = value
            self.columns[number] = ids[number] = column
        return Compute(below, computed, ids)

    def _limit(self, limit: Tree, node: Tree) -> Relation:
        """``ORDER BY ... LIMIT n``, and the projections between."""
        if node.kind == "Project":
            return self._project(node, self._limit(limit, node.args[0]))
        if node.kind != "Sort":
            self.fail(errors.NODES.get(node.kind, errors.LIMIT), limit.java)
        return windows.limit_of(self, limit.java, node.java, self._relation(node.args[0]))

    def _filter(self, below: Relation, condition: Expr) -> Relation:
        conditions: list[Expr] = []
        for part in condition.conjuncts():
            inner = part.args[0] if part.kind == "Not" else part
            if inner.kind == "Exists":  # one that correlates with nothing: Catalyst would run it on its own
                right = PlanReader(self.text, self.tables, self.catalyst).plan(inner.java.plan())
                how: JoinType = "anti" if inner is not part else "semi"
                below = JoinOf(how, below, right, (), inner.java, "EXISTS")
            elif not _is_true(part):
                conditions.append(part)
        left: list[Expr] = []
        for part in conditions:
            self._check_sub_queries(part.tree)
            first = windows.bounded(below, part)
            below = below if first is None else first
            if first is None or not windows.decides(part):
                left.append(part)
        return filtered(below, left)

    def _join(self, node: Tree) -> JoinOf:
        first, second = node.args
        while self._how(node) in ("semi", "anti") and second.kind == "Distinct":  # one match is as good as two
            second = second.args[0]
        left, right = self._relation(first), self._relation(second)
        how, before = self._how(node), self._join_types.get(_leaves(node))
        sql_name = f"{(before or how).upper()} JOIN"
        if before not in (None, how) and "inner" not in (before,):
            sql_name += ", less the unmatched rows that a condition above it turns away"
        condition_json = node.fields.get("condition")
        condition = self._expr(condition_json, lambda: node.java.condition().get()) if condition_json else None
        on: list[Expr] = []
        members: list[tuple[Expr, Expr]] = []
        sides = (node.args[0], left), (node.args[1], right)
        for part in condition.conjuncts() if condition is not None else []:
            member = _member(part) if how == "anti" else None
            if member is None:
                on.append(part)
            elif all(_never_null(arg, sides) for arg in member.args):
                on.append(member)
            else:
                members.append((member, part))
        # one is what rows are looked up by, of the others a null is a match, too
        looked_up = next((member for member, _ in members if _of_each_side(member, left, right)), None)
        on += [part for member, part in members if member is not looked_up]
        return JoinOf(how, left, right, tuple(on), node.java, sql_name, looked_up)

    def _join_by_time(self, node: Tree) -> JoinOf:
        leaves = _leaves(node)
        how, said, join = self._join_types[leaves], self._by_time[leaves], self._join(node.args[0])
        on = tuple(map(self.expr, said.on))
        for condition in on:
            self._check_sub_queries(condition.tree)
        return dataclasses.replace(join, how=how, on=on, by_time=said, sql_name=f"{how.upper()} JOIN")

    def _how(self, node: Tree) -> JoinType:
        join_type = node.fields["joinType"]
        name = str(join_type.get("object") or join_type.get("product-class")).rsplit(".", 1)[-1].rstrip("$")
        if name not in _HOWS:
            self.fail(errors.SUBQUERY, node.java)
        return _HOWS[name]

    def _expr(self, part: Sequence[Mapping[str, Any]], java: Callable[[], Any]) -> Expr:
        expression = tree(part, java)
        self._check_sub_queries(expression)
        return Expr(expression, self.columns)

    def _check_sub_queries(self, expression: Tree) -> None:
        """Refuses what would be run over the stand-ins."""
        for node in expression.walk():
            if node.kind in errors.SUBQUERIES:
                self.fail(errors.SUBQUERY, node.java)


def _aliases(items: Sequence[Any]) -> dict[int, str]:
    """By the id of a column what the table right around it is called, sub-queries' tables, too."""
    aliases: dict[int, str] = {}
    alias: str | None = None
    for item in items:
        if isinstance(item, list):
            aliases |= _aliases(item)
            continue
        kind = str(item.get("class", "")).rsplit(".", 1)[-1] if isinstance(item, dict) else ""
        if kind == "SubqueryAlias":
            alias = alias or str(item["identifier"]["name"])
        elif kind == "LocalRelation" and alias is not None:
            aliases |= {int(part[0]["exprId"]["id"]): alias for part in item["output"]}
        if kind not in ("SubqueryAlias", "View"):
            alias = None
        if isinstance(item, dict):
            aliases |= _aliases([value for value in item.values() if isinstance(value, list)])
    return aliases


def _is_input(leaf: Tree) -> bool:
    """True for a leaf of a plan that stands for an input."""
    output = leaf.java.output()
    return bool(output.length()) and bool(output.apply(0).metadata().contains(INPUT))


def _leaves(node: Tree) -> frozenset[str]:
    """The ids of the leaves below a node, which tell joins apart."""
    return frozenset(
        str(part[0]["exprId"]["id"])
        for leaf in node.walk()
        if leaf.kind == "LocalRelation"
        for part in leaf.fields["output"][:1]
    )


def _member(part: Expr) -> Expr | None:
    """The equality of NOT IN, which counts as met where it is null."""
    if part.kind != "Or" or part.args[1].kind != "IsNull":
        return None
    equality = part.args[0]
    same = equality.kind == "EqualTo" and bool(part.args[1].args[0].java.semanticEquals(equality.java))
    return equality if same else None


def _is_true(part: Expr) -> bool:
    """True for the constant that joins a value to each row."""
    return part.kind == "Literal" and str(part.tree.fields["value"]).lower() == "true"


def _window_above(sort: Tree) -> Tree | None:
    """The window function that stands above an ORDER BY, with projections between at most."""
    above = sort.above
    while above is not None and above.kind == "Project":
        above = above.above
    return above if above is not None and above.kind == "Window" else None


def _of_each_side(member: Expr, left: Relation, right: Relation) -> bool:
    """True for an equality between an expression of each side, which can be looked up."""
    one, other = (arg.columns.keys() for arg in member.args)
    turned = one <= right.columns and other <= left.columns
    return (turned or (one <= left.columns and other <= right.columns)) and not pa.types.is_nested(
        arrow_type_of(member.args[0].java)
    )


def _never_null(arg: Expr, sides: Sequence[tuple[Tree, Relation]]) -> bool:
    """True if an operand of NOT IN is never null in the rows of its side, after the filters there."""
    if not arg.java.nullable():
        return True
    for side, relation in sides:
        if arg.ids and set(arg.ids.values()) <= relation.columns:
            tests = [x for x in items(side.java.constraints().toSeq()) if str(x.nodeName()) == "IsNotNull"]
            return arg.column in relation.never_null or any(x.child().semanticEquals(arg.java) for x in tests)
    return False  # made of columns of both sides, or a constant
