"""A plan as text, in Flink's manner: one operator a line, inputs below it, and why it was taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from gpu_ops.descriptions.by_time import AsofJoin, TemporalJoin
from gpu_ops.descriptions.groups import without_upserts
from gpu_ops.descriptions.inputs import Layout
from gpu_ops.descriptions.join import Join, LookupJoin
from gpu_ops.descriptions.multi_join import MultiJoin
from gpu_ops.descriptions.times import show_ms
from gpu_ops.query.nodes import Calc, JoinNode, LocalAggregate, Named, Node, Plan, Source, quoted

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
    return "\n".join(_tree(plan.root, set()))


def _tree(node: Node, shown: set[int]) -> list[str]:
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


def _below(node: Node, number: int, shown: set[int]) -> list[str]:
    """One input of a node, and the shuffle between them; upserts that become retractions first are shuffled twice."""
    lines = _tree(node.inputs[number], shown)
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


def _text(node: Node) -> str:
    if isinstance(node, Source):
        more = [f"alias=[{node.alias}]"] if node.alias.lower() != node.table.lower() else []
        more.append(f"changes=[{node.changes}]")
        if node.unique_key is not None:
            more.append(f"uniqueKey=[{', '.join(node.unique_key)}]")
        return f"Source(table=[{node.table}], {', '.join(more)})"
    if isinstance(node, Calc):
        where = f", where=[{' AND '.join(_term(x.text, len(node.where)) for x in node.where)}]" if node.where else ""
        return f"Calc(select=[{', '.join(_named(x) for x in node.select)}]{where})"
    if isinstance(node, LocalAggregate):
        groups = ", ".join(quoted(name) for name, place in node.by if place is None)
        ends = ", ".join(quoted(name) for name, place in node.by if place is not None)
        made = ", ".join(f"{name} = {function}({of or '*'})" for name, function, of in node.calls)
        window = f"{node.window.text(lambda _: quoted(node.time))} AS {ends}"
        return f"LocalWindowAggregate(groupBy=[{groups}], window=[{window}], select=[{made}])"
    join: Any = node.description
    if node.kind == "aggregate":
        by, calls = ", ".join(map(quoted, join.by)), ", ".join(map(str, join.measures))
        return f"GroupAggregate(groupBy=[{by}]{f', select=[{calls}]' if calls else ''})"
    if node.kind == "latest":
        return _normalize(join.by)
    if node.kind == "top":
        by, order = ", ".join(map(quoted, join.by)), ", ".join(map(str, join.order))
        if not by and join.number is None:
            return f"SortLimit(orderBy=[{order}], fetch=[{join.n}])"
        return f"Rank(partitionBy=[{by}], orderBy=[{order}], rankRange=[1..{join.n}])"
    return _multi_way(join) if node.kind == "multi-way" else _two_way(join)


def _named(entry: Named) -> str:
    text = " ".join(entry.text.split())
    return text if text == quoted(entry.name) else f"{text} AS {quoted(entry.name)}"


def _term(text: str, count: int) -> str:
    text = " ".join(text.split())
    return f"({text})" if count > 1 and " or " in text.lower() else text


def _two_way(join: Join) -> str:
    left, right = join.left, join.right
    equal = [
        f"{left.name}.{quoted(k.left)} {'IS NOT DISTINCT FROM' if k.null_safe else '='} {right.name}.{quoted(k.right)}"
        for k in join.keys
    ]
    where = " AND ".join([*equal, *([_term(str(join.where), 2 if equal else 1)] if join.where else [])]) or "true"
    kind = f"joinType=[{_TYPES[join.how]}]"
    if join.interval is not None:
        low, high = join.interval.lower_inclusive, join.interval.upper_inclusive
        times = f"{right.name}.{quoted(str(right.event_time))} - {left.name}.{quoted(str(left.event_time))}"
        bounds = f"{show_ms(join.interval.lower_ms)} {'<=' if low else '<'} {times}"
        bounds += f" {'<=' if high else '<'} {show_ms(join.interval.upper_ms)}"
        return f"IntervalJoin({kind}, windowBounds=[{bounds}], where=[{where}])"
    if isinstance(join, AsofJoin):
        sign = (">" if join.asof.direction == "backward" else "<") + "=" * join.asof.exact
        times = f"{left.name}.{quoted(str(left.event_time))} {sign} {right.name}.{quoted(str(right.event_time))}"
        apart = join.asof.tolerance_ms
        tolerance = "" if apart is None else f", tolerance=[{show_ms(apart)}]"
        return f"AsofJoin({kind}, matchCondition=[{times}]{tolerance}, where=[{where}])"
    if isinstance(join, LookupJoin):
        return f"LookupJoin({kind}, table=[{right.name}], where=[{where}])"
    if isinstance(join, TemporalJoin):
        versions = f"{right.name}.{quoted(str(right.event_time))}"
        times = f"{left.name}.{quoted(str(left.event_time))}], versionsBy=[{versions}"
        return f"TemporalJoin({kind}, asOf=[{times}], where=[{where}])"
    aware = ", nullAware=[true]" if join.null_aware else ""
    specs = ", ".join(f"{s}InputSpec=[{_SPECS[join.layout(n)]}]" for n, s in enumerate(("left", "right")))
    return f"Join({kind}{aware}, where=[{where}], {specs})"


def _multi_way(join: MultiJoin) -> str:
    common = ", ".join(quoted(columns[0]) for columns in join.common_key)
    hows = ", ".join(step.how.upper() for step in join.steps)
    unique = ", ".join(f"({', '.join(s.unique_key)})" if s.unique_key else "noUniqueKey" for s in join.inputs)
    terms = []
    for index, step in enumerate(join.steps, start=1):
        own = join.inputs[index].name
        equal = [
            f"{join.inputs[k.input].name}.{quoted(k.column)} {'IS NOT DISTINCT FROM' if k.null_safe else '='} "
            f"{own}.{quoted(k.own)}"
            for k in step.on
        ]
        terms.append(" AND ".join([*equal, *([_term(str(step.where), 2)] if step.where else [])]))
    return (
        f"MultiJoin(commonJoinKey=[{common}], joinTypes=[{hows}], inputUniqueKeys=[{unique}], "
        f"joinConditions=[{', '.join(terms)}])"
    )
