"""Checks of Spark's own stateful operators in a join's input, which may emit a row again without retracting the old.

In output mode ``update`` a streaming aggregate emits each group that has changed, in ``complete`` all of them, and in
``append`` each once, when the watermark has closed it. The mode is known only when the query runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence, Set
from typing import Any, Final, NamedTuple

from pyspark.sql import DataFrame

from gpu_ops.descriptions.changelog import ROW_KIND_COLUMN
from gpu_ops.errors import DescriptionError
from gpu_ops.query.catalyst import id_of, items
from gpu_ops.spark.driver.queries import MAPS, JoinPlan, analyzed, children_of, plans_in
from gpu_ops.spark.plan.column_metadata import ROW_BY_ROW

_AGGREGATES: Final = {"Aggregate", "Distinct"}
_WITH_STATE: Final = "WithState"
"""Part of the names of ``flatMapGroupsWithState``, ``applyInPandasWithState``, ``transformWithState`` and its kin."""

_SHUFFLES: Final = {"Repartition", "RepartitionByExpression", "RebalancePartitions"}
_WATERMARK: Final = re.compile(r"#\d+-T\d+ms")
"""Matches a column with a watermark in Spark's text of a plan."""


class _Found(NamedTuple):
    """A stateful operator below an input.

    Attributes:
        node: the operator's node in Spark's logical plan.
        above: the nodes between it and the input, the nearest to the input first.
    """

    node: Any
    above: tuple[Any, ...]


def final_only(df: DataFrame, name: str, unique_key: Sequence[str] | None, row_kind: str | None) -> bool:
    """True if an input's rows are insertions only where its query runs in output mode ``append``.

    Args:
        df: the input, a streaming DataFrame.
        name: the input's name in errors.
        unique_key: the unique key that the user declared.
        row_kind: the row-kind column that the user declared.

    Raises:
        DescriptionError: its rows come again, and no unique key says which one each replaces.
    """
    plan = analyzed(df)
    text = str(plan.toString())
    if not any(word in text for word in (*_AGGREGATES, _WITH_STATE)):
        return False
    needs_append = False
    for found in _stateful(plan, ()):
        if _WITH_STATE in str(found.node.nodeName()):
            _check_with_state(found, name, unique_key, row_kind)
        elif unique_key is not None:
            _check_key(found, plan, name, unique_key)
        elif _WATERMARK.search(str(_grouping(found.node).toString())) and row_kind is None:
            needs_append = True
        else:
            raise DescriptionError(
                f"input '{name}' is a streaming aggregate, which gives the row of a group again when it changes: say "
                f"what identifies its rows, stream(..., unique_key={_shown_group(found)}), and run the query with "
                "outputMode('update')"
            )
        _check_changelog(found.node, name)
    return needs_append


def _stateful(node: Any, above: tuple[Any, ...]) -> Iterator[_Found]:
    """Yields the stateful operators nearest to an input; those below a join of this package were checked with it."""
    name = str(node.nodeName())
    if not node.isStreaming() or (name in MAPS and JoinPlan.of(node) is not None):
        return
    if name in _AGGREGATES or _WITH_STATE in name:
        yield _Found(node, above)
        return
    for child in children_of(node):
        yield from _stateful(child, (*above, node))


def _check_with_state(found: _Found, name: str, unique_key: Sequence[str] | None, row_kind: str | None) -> None:
    """Checks an operator with a user's function, whose output mode says that it may emit rows again."""
    if unique_key is None and row_kind is None and str(found.node.outputMode().toString()).lower() != "append":
        raise DescriptionError(
            f"input '{name}' is made by a function with state in output mode 'update', which may give a row again: say "
            "what identifies its rows, stream(..., unique_key=...), or let it give row kinds, stream(..., row_kind=...)"
        )
    if unique_key is not None:
        for node in found.above:
            if str(node.nodeName()) not in (ROW_BY_ROW | _SHUFFLES) - {"Filter"}:
                _refuse_between(node, name)


def _check_key(found: _Found, plan: Any, name: str, unique_key: Sequence[str]) -> None:
    """Checks that an aggregate's unique key is its group columns, and that no filter drops a row that replaces one."""
    attributes = items(plan.output())
    wanted = {id_of(a) for a in attributes if str(a.name()) in unique_key}
    for number, node in enumerate(found.above):
        kind = str(node.nodeName())
        if kind not in ROW_BY_ROW | _SHUFFLES:
            _refuse_between(node, name)
        if kind == "Filter" and _groups(found.above[number:], _ids(node.references()), found.node) is None:
            raise DescriptionError(
                f"input '{name}' filters a streaming aggregate: a row that it drops would leave the one it replaces. "
                "Filter what the join gives (WHERE of sql()), or by the columns of the group"
            )
    key = _groups(found.above, wanted, found.node)
    if key is None or key != set(range(_grouping(found.node).length())):
        raise DescriptionError(
            f"input '{name}' is a streaming aggregate, and unique_key={', '.join(unique_key)} is not what it groups "
            f"by: {_shown_group(found)}. Its unique key is all columns of the group, as they come out of it"
        )


def _groups(path: Sequence[Any], wanted: Set[int], aggregate: Any) -> set[int] | None:
    """The numbers of the group columns of an aggregate that some columns are; None if one is no group column.

    Args:
        path: the nodes down to the aggregate.
        wanted: the ids of the columns, above these nodes.
        aggregate: the node.
    """
    ids = set(wanted)
    for node in path:
        if str(node.nodeName()) != "Project":
            continue
        listed = items(node.projectList())
        renamed = {id_of(x): id_of(x.child()) for x in listed if _is_alias(x) and _is_column(x.child())}
        kept = {id_of(x) for x in listed if _is_column(x)}
        if not ids <= renamed.keys() | kept:
            return None
        ids = {renamed.get(x, x) for x in ids}
    if str(aggregate.nodeName()) == "Distinct":
        numbers = {id_of(x): n for n, x in enumerate(items(aggregate.output()))}
        return {numbers[x] for x in ids}
    groups = items(aggregate.groupingExpressions())
    found = set()
    for shown in items(aggregate.aggregateExpressions()):
        if id_of(shown) in ids:
            value = shown.child() if _is_alias(shown) else shown
            number = next((n for n, group in enumerate(groups) if value.semanticEquals(group)), None)
            if number is None:
                return None
            found.add(number)
            ids.discard(id_of(shown))
    return found if not ids else None


def _check_changelog(aggregate: Any, name: str) -> None:
    """Refuses an aggregate of Spark's over a changelog that ignores its row kinds."""
    of = _without_row_kinds(aggregate)
    if of is not None:
        raise DescriptionError(
            f"input '{name}' aggregates the changelog of '{of}' without its {ROW_KIND_COLUMN}, so "
            "that a row that was taken back counts twice. gpu_ops.aggregate() heeds row kinds; or count with a sign, "
            f"as in sum(IF({ROW_KIND_COLUMN} IN ('+I', '+U'), 1, -1))"
        )


def counted_twice(df: DataFrame) -> str | None:
    """A warning about Spark's aggregates in a DataFrame that ignore the row kinds of a changelog; None without any."""
    found = _stateful(analyzed(df), ())
    of = next((of for of in (_without_row_kinds(x.node) for x in found) if of is not None), None)
    if of is None:
        return None
    return (
        f"Spark aggregates the changelog of '{of}' without its {ROW_KIND_COLUMN}: a row that is taken back counts "
        "twice. Take gpu_ops.aggregate()"
    )


def _without_row_kinds(aggregate: Any) -> str | None:
    """The name of the join whose changelog an aggregate reads without its row kinds; None for any other."""
    if str(aggregate.nodeName()) != "Aggregate":
        return None
    if ROW_KIND_COLUMN in {str(x.name()) for x in items(aggregate.references().toSeq())}:
        return None
    plan = next(plans_in(aggregate), None)
    return None if plan is None or plan.description.by_time else plan.name


def _refuse_between(node: Any, name: str) -> None:
    raise DescriptionError(
        f"input '{name}': {node.nodeName()} stands above a streaming aggregate, so that it cannot be told which row "
        "one that comes again replaces. Join the aggregate itself, projected at most"
    )


def _grouping(node: Any) -> Any:
    return node.groupingExpressions() if str(node.nodeName()) == "Aggregate" else node.output()


def _shown_group(found: _Found) -> str:
    """The columns that an aggregate groups by, as a list of names."""
    node = found.node
    if str(node.nodeName()) == "Distinct":
        return str([str(x.name()) for x in items(node.output())])
    shown = items(node.aggregateExpressions())
    names = []
    for group in items(node.groupingExpressions()):
        values = ((x, x.child() if _is_alias(x) else x) for x in shown)
        names.append(next((str(x.name()) for x, value in values if value.semanticEquals(group)), str(group.sql())))
    return str(names)


def _ids(attributes: Any) -> set[int]:
    return {id_of(x) for x in items(attributes.toSeq())}


def _is_alias(expression: Any) -> bool:
    return str(expression.nodeName()) == "Alias"


def _is_column(expression: Any) -> bool:
    return str(expression.nodeName()) == "AttributeReference"
