"""What columns and inputs are called below, in and between the joins of a plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpu_ops.descriptions.changelog import ROW_KIND_COLUMN
from gpu_ops.query.choose import Chooser
from gpu_ops.query.expressions import Column
from gpu_ops.query.relations import Compute, Filter, JoinOf, Relation, Scan


class Namer:
    """What columns are called below and between the joins: by their own name, or ``alias__column`` if that clashes."""

    def __init__(self, relation: Relation, outputs: Iterable[Column], chooser: Chooser) -> None:
        """Args: the query's tree; its result; the operators of its joins."""
        used: dict[Column, None] = dict.fromkeys(outputs)
        for node in _nodes(relation):
            if isinstance(node, Filter):
                for condition in node.conditions:
                    used |= condition.columns
            elif isinstance(node, Compute):
                for column, expr in node.computed.items():
                    used |= {column: None, **expr.columns}
            elif isinstance(node, JoinOf):
                choice = chooser.choice(node)
                for condition in (*node.on, *([node.member] if node.member is not None else [])):
                    used |= condition.columns
                for made in choice.computed:
                    used |= dict.fromkeys(made)
            else:
                used |= dict.fromkeys(
                    kept_of(node) or ([] if node.columns & used.keys() else list(node.ids.values())[:1])
                )
        labels = [column.label.lower() for column in used]
        self._names: dict[Column, str] = {}
        self._taken = {ROW_KIND_COLUMN}
        for column in used:
            self._add(column, unique=labels.count(column.label.lower()) == 1)

    def _add(self, column: Column, *, unique: bool = True) -> str:
        name, number = column.label, 2
        if not unique or name.lower() in self._taken:
            name = f"{column.owner}__{column.label}"
        while name.lower() in self._taken:
            name, number = f"{column.owner}__{column.label}_{number}", number + 1
        self._taken.add(name.lower())
        self._names[column] = name
        return name

    def __call__(self, column: Column) -> str:
        """The name of a column; one that is new gets one."""
        return self._names.get(column) or self._add(column)

    def __contains__(self, column: Column) -> bool:
        return column in self._names

    def items(self) -> Iterable[tuple[Column, str]]:
        """Every column that is used, and its name."""
        return self._names.items()


def kept_of(scan: Scan) -> list[Column]:
    """Columns of an input that a join needs whether the query does or not."""
    table = scan.table
    names = [*(table.unique_key or ()), *([table.sequence_by] if table.sequence_by else ())]
    return [scan.own(name) for name in names]


def _nodes(relation: Relation) -> Iterable[Relation]:
    yield relation
    if isinstance(relation, Filter | Compute):
        yield from _nodes(relation.below)
    elif isinstance(relation, JoinOf):
        yield from _nodes(relation.left)
        yield from _nodes(relation.right)


def shown(relation: Relation) -> list[Scan]:
    """The inputs whose columns a relation has."""
    if isinstance(relation, Scan):
        return [relation]
    if isinstance(relation, Filter | Compute):
        return shown(relation.below)
    return shown(relation.left) + (shown(relation.right) if relation.how not in ("semi", "anti") else [])


def input_names(sides: Sequence[Relation]) -> list[str]:
    """What a join calls its inputs: by their aliases."""
    found: list[str] = []
    for side in sides:
        scans = [scan.alias for scan in shown(side)]
        name = base = "_".join(dict.fromkeys(scans))
        number = 2
        while name.lower() in [other.lower() for other in found]:
            name, number = f"{base}_{number}", number + 1
        found.append(name)
    return found
