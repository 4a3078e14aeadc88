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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from difflib import SequenceMatcher
from typing import Any, ClassVar

import pyarrow as pa

from gpu_ops.conditions.expressions import (
    BOOL,
    Builder,
    Call,
    Column,
    Literal,
    Node,
    Op,
    TypeProblemError,
    column_type,
    failing,
    kind,
    logic,
    nodes_of,
)
from gpu_ops.conditions.grammar import backquoted, read
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
    """

    sql: str
    root: Node
    columns: dict[str, tuple[str, ...]]
    fails: Node | None = None

    checked: ClassVar = True
    """The fields have their types, as far as `gpu_ops.fields` is concerned."""

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

    mode_matters: bool = False

    __hash__ = Expression.__hash__

    @property
    def compared(self) -> dict[str, tuple[str, ...]]:
        """Of `columns` those whose values count: more is asked of them than whether they are null."""
        used = {
            (arg.input, arg.name)
            for node in nodes_of(self.root)
            if isinstance(node, Call) and node.op is not Op.IS_NULL
            for arg in node.args
            if isinstance(arg, Column)
        }
        if isinstance(self.root, Column):
            used.add((self.root.input, self.root.name))
        return {name: tuple(c for c in columns if (name, c) in used) for name, columns in self.columns.items()}

    def to_dict(self) -> dict[str, Any]:
        """The text, and the tree: a list in which operands stand before what they are of.

        An item is a column's input and name, a constant's value and type, or an operation, the places of its operands
        and the type of what it gives.
        """
        items: dict[str, list[Any]] = {}
        places: dict[int, int] = {}
        order: dict[str, int] = {}
        for node in nodes_of(self.root):
            if isinstance(node, Column):
                item: list[Any] = [node.input, node.name]
            elif isinstance(node, Literal):
                value = str(node.value) if isinstance(node.value, Decimal) else node.value
                item = [{"value": value, "type": str(node.type)}]
            else:
                item = [node.op, [places[id(arg)] for arg in node.args], str(node.type)]
            items.setdefault(repr(item), item)  # so that equal trees are equal lists
            places[id(node)] = order.setdefault(repr(item), len(order))
        return {"text": self.sql, "tree": list(items.values())}


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
    nodes: list[Node] = []
    for item in where["tree"]:
        if len(item) == 1:
            type_ = _type_of(item[0]["type"])
            value = item[0]["value"]
            nodes.append(Literal(Decimal(value) if kind(type_) == "decimal" and value is not None else value, type_))
        elif len(item) == 2:
            name, column = item
            nodes.append(Column(name, column, column_type(inputs[name].field(column).type)))
        else:
            op, args, name = item
            nodes.append(Call(Op(op), tuple(nodes[place] for place in args), _type_of(name)))
    return of_tree(where["text"], nodes[-1:], inputs, ansi=ansi, mode_matters=ansi)


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
        if isinstance(node, Column):
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
    """Read a condition.

    Args:
        sql: a boolean expression. Columns are written ``input.column``, or ``column`` where only one
            input has it; case does not matter, backticks quote.
        inputs: input name to the schema of its columns.
        ansi: whether as with ``spark.sql.ansi.enabled``.

    Raises:
        ConditionError: with the position, for a syntax error, an unknown or ambiguous column, types that do
            not fit, or SQL outside the language.
    """
    builder = Builder(ansi=ansi)
    root = read(sql, _Names(inputs).resolve, builder)
    return of_tree(sql, [root], inputs, ansi=ansi, mode_matters=builder.mode_matters)


class _Names:
    """Finds columns by name, as Spark does: without regard to case, ambiguity an error."""

    def __init__(self, inputs: Mapping[str, pa.Schema]) -> None:
        self.inputs = inputs

    def resolve(self, parts: Sequence[str]) -> Node:
        """The column of ``[column]`` or ``[input, column]``; TypeProblemError says what there is instead."""
        *inputs, column = parts
        shown = ".".join(parts)
        if len(inputs) > 1:
            raise TypeProblemError(f"{shown!r} has too many parts: write input.column (no fields of structs)")
        among = [name for name in self.inputs if not inputs or name.lower() == inputs[0].lower()]
        if not among:
            raise TypeProblemError(f"there is no input {inputs[0]!r}; there are {_closest(inputs[0], self.inputs)}")
        found = [(name, field) for name in among for field in self.inputs[name] if field.name.lower() == column.lower()]
        if not found:
            every = [f"{name}.{field}" for name in among for field in self.inputs[name].names]
            raise TypeProblemError(f"there is no column {shown!r}; there are {_closest(column, every)}")
        if len(found) > 1:
            names = " and ".join(f"{name}.{field.name}" for name, field in found)
            raise TypeProblemError(f"{shown!r} is ambiguous: it can be {names}")
        ((name, field),) = found
        return Column(name, field.name, column_type(field.type))


def _closest(wanted: str, names: Iterable[str]) -> str:
    """The names, those most like the wanted one first; after the first 20 only how many more."""

    def likeness(name: str) -> float:
        return SequenceMatcher(None, wanted.lower(), name.rpartition(".")[2].lower()).ratio()

    first = sorted(names, key=likeness, reverse=True)
    return ", ".join(first[:20]) + (f" and {len(first) - 20} more" if len(first) > 20 else "")
