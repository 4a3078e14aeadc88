"""Residual join conditions: typed expression trees, made of SQL text in Spark's dialect or by Spark's analyser.

The language is small: comparisons, three-valued logic, arithmetic, IS NULL, IN, BETWEEN, COALESCE, CASE WHEN, CAST to a
wider number. What else a condition needs is computed below the join, a column of its input; `gpu_ops.query` lets Spark
do that for SQL and ``where=``.

Semantics are Spark's: NaN equals NaN and is greater than any other number; -0.0 equals 0.0. With
``spark.sql.ansi.enabled=false`` a division or remainder by zero is null and integer arithmetic wraps around on
overflow, so no row can make a condition fail; in ANSI mode each of these is an `EvaluationError`. Decimal arithmetic is
exact or refused. What each operation does is in `gpu_ops.conditions.expressions.Op`; the backends' ``conditions.py``
evaluate it. Descriptions have the tree as JSON, with the user's text beside it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, ClassVar

import pyarrow as pa

from gpu_ops.conditions.expressions import (
    BOOL,
    Builder,
    Call,
    ColumnRef,
    Literal,
    Node,
    Op,
    column_type,
    failing,
    kind,
    logic,
    nodes_of,
)
from gpu_ops.errors import DescriptionError, EvaluationError

__all__ = [
    "Condition", "Expression", "Where", "backquoted", "condition_of", "nodes_of", "of_tree", "parse",
]  # fmt: skip


@dataclass(frozen=True)
class Expression:
    """Something computed of rows.

    Attributes:
        sql: its text.
        root: the expression tree.
        columns: per input the columns the tree needs, in its order.
        fails: in ANSI mode, where Spark would raise an error instead: a tree of type boolean, or None for nowhere.
        checked: the fields have their types, as far as `gpu_ops.fields` is concerned.
    """

    sql: str
    root: Node
    columns: dict[str, tuple[str, ...]]
    fails: Node | None = None

    checked: ClassVar = True

    def __hash__(self) -> int:
        return hash(self.sql)

    def __str__(self) -> str:
        return self.sql

    def failure(self, sample: Mapping[str, object]) -> EvaluationError:
        """The error for rows of which ``fails`` is true; ``sample``: columns of one and their values."""
        shown = ", ".join(f"{name} = {value!r}" for name, value in sample.items()) or "any row"
        return EvaluationError(
            f"{self.sql!r} fails in ANSI mode (spark.sql.ansi.enabled): a number overflows, or a divisor "
            f"is zero, for {shown}. CAST to a wider type first, or leave such rows out by CASE WHEN"
        )


@dataclass(frozen=True)
class Condition(Expression):
    """A parsed residual condition, of type boolean; its columns are those of each input that `parse` was given.

    Attributes:
        mode_matters: whether it means something else in the other mode than the one it was parsed in.
    """

    mode_matters: bool = field(default=False, compare=False)

    __hash__ = Expression.__hash__

    @property
    def compared(self) -> dict[str, tuple[str, ...]]:
        """The `columns` of which more is asked than whether they are null."""
        used = {
            (arg.input, arg.name)
            for node in nodes_of(self.root)
            if isinstance(node, Call) and node.op is not Op.IS_NULL
            for arg in node.args
            if isinstance(arg, ColumnRef)
        }
        if isinstance(self.root, ColumnRef):
            used.add((self.root.input, self.root.name))
        return {name: tuple(c for c in columns if (name, c) in used) for name, columns in self.columns.items()}

    def to_dict(self) -> dict[str, Any]:
        """The text, and the tree: a list in which operands stand before what they are of.

        An item is a column's input and name, a constant's value and type, or an operation, the places of its operands
        and the type of what it gives.
        """
        return {"text": self.sql, "tree": tree_of(self.root)}


def tree_of(root: Node) -> list[Any]:
    """An expression tree for JSON, as `Condition.to_dict` says; equal trees give equal lists."""
    items: dict[str, list[Any]] = {}
    places: dict[int, int] = {}
    order: dict[str, int] = {}
    for node in nodes_of(root):
        if isinstance(node, ColumnRef):
            item: list[Any] = [node.input, node.name]
        elif isinstance(node, Literal):
            value = str(node.value) if isinstance(node.value, Decimal) else node.value
            item = [{"value": value, "type": str(node.type)}]
        else:
            item = [node.op, [places[id(arg)] for arg in node.args], str(node.type)]
        items.setdefault(repr(item), item)
        places[id(node)] = order.setdefault(repr(item), len(order))
    return list(items.values())


def read_tree(tree: Sequence[Any], inputs: Mapping[str, pa.Schema]) -> Node:
    """The tree that `tree_of` has written, over columns of the inputs."""
    nodes: list[Node] = []
    for item in tree:
        if len(item) == 1:
            type_ = _type_of(item[0]["type"])
            value = item[0]["value"]
            nodes.append(Literal(Decimal(value) if kind(type_) == "decimal" and value is not None else value, type_))
        elif len(item) == 2:
            name, column = item
            nodes.append(ColumnRef(name, column, column_type(inputs[name].field(column).type)))
        else:
            op, args, name = item
            nodes.append(Call(Op(op), tuple(nodes[place] for place in args), _type_of(name)))
    return nodes[-1]


Where = str | Mapping[str, Any] | Condition | None
"""A description's ``where``: text of a user; what Spark's analyser has read, or its JSON."""


def condition_of(where: Where, inputs: Mapping[str, pa.Schema], *, ansi: bool) -> Condition | None:
    """A description's residual condition.

    Args:
        where: as the description was given it.
        inputs: as of `parse`.
        ansi: likewise.

    Raises:
        ConditionError: as `parse`.
        DescriptionError: a tree that is not over these inputs.
    """
    if where is None:
        return None
    if isinstance(where, str):
        return parse(where, inputs, ansi=ansi)
    if isinstance(where, Condition):
        return of_tree(where.sql, [where.root], inputs, ansi=ansi, mode_matters=where.mode_matters)
    if not isinstance(where, Mapping) or not where.keys() >= {"text", "tree"}:
        raise DescriptionError(f"where={where!r}; it is a condition's text, such as 'left.x > right.y'")
    return of_tree(where["text"], [read_tree(where["tree"], inputs)], inputs, ansi=ansi, mode_matters=ansi)


def _type_of(text: str) -> pa.DataType:
    """The type of a constant or of what is computed, by Arrow's text of it."""
    if text.startswith("decimal128"):
        return pa.decimal128(*map(int, re.findall(r"\d+", text)[1:]))
    name, zone, _ = text.partition(", tz=")
    return pa.timestamp(name.removeprefix("timestamp["), "UTC") if zone else pa.type_for_alias(text)


def of_tree(
    sql: str, roots: Sequence[Node], inputs: Mapping[str, pa.Schema], *, ansi: bool, mode_matters: bool
) -> Condition:
    """The condition that all of some trees are true.

    Args:
        sql: its text.
        roots: of type boolean, over columns of the inputs.
        inputs: as of `parse`.
        ansi: likewise.
        mode_matters: whether another mode would have made other trees.

    Raises:
        DescriptionError: a column that is not there or is of another type, a tree of another type.
    """
    root = logic(Op.AND, *roots)
    used: dict[str, dict[str, None]] = {name: {} for name in inputs}
    for node in nodes_of(root):
        if isinstance(node, ColumnRef):
            has = node.input in used and node.name in inputs[node.input].names
            if not has or column_type(inputs[node.input].field(node.name).type) != node.type:
                raise DescriptionError(f"the condition {sql!r} needs {node.input}.{node.name} of type {node.type}")
            used[node.input][node.name] = None
    if root.type != BOOL:
        raise DescriptionError(f"the condition {sql!r} is of type {root.type}")
    fails = failing(root) if ansi else None
    columns = {name: tuple(names) for name, names in used.items()}
    return Condition(sql, root, columns, fails, mode_matters or fails is not None)


def parse(sql: str, inputs: Mapping[str, pa.Schema], *, ansi: bool = False) -> Condition:
    """Reads a condition from its text.

    Args:
        sql: a boolean expression. Columns are written ``input.column``, or ``column`` where only one
            input has it; case does not matter, backticks quote.
        inputs: input name to the schema of its columns.
        ansi: whether as with ``spark.sql.ansi.enabled``.

    Raises:
        ConditionError: with the position, for a syntax error, an unknown or ambiguous column, types that do
            not fit, or SQL outside the language.
    """
    from gpu_ops.conditions.text import parsed  # noqa: PLC0415 - sqlglot takes a tenth of a second to load

    builder = Builder(ansi=ansi)
    root = parsed(sql, inputs, builder)
    return of_tree(sql, [root], inputs, ansi=ansi, mode_matters=builder.mode_matters)


def backquoted(name: str) -> str:
    """A name as SQL text, whatever is in it."""
    return "`" + name.replace("`", "``") + "`"
