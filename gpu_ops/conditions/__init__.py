"""Residual join conditions: SQL text, in Spark's dialect, to a typed expression tree.

The language is small: comparisons, three-valued logic, arithmetic, IS NULL, IN, BETWEEN, COALESCE, CASE WHEN, CAST to a
wider number. What else a condition needs is computed below the join, a column of its input; `gpu_ops.query` lets Spark
do that for SQL and ``where=``.

Semantics are Spark's: NaN equals NaN and is greater than any other number; -0.0 equals 0.0. With
``spark.sql.ansi.enabled=false`` a division or remainder by zero is null and integer arithmetic wraps around on
overflow, so no row can make a condition fail; in ANSI mode each of these is an `EvaluationError`. Decimal arithmetic is
exact or refused. What each operation does is in `gpu_ops.conditions.expressions.Op`; the backends' ``conditions.py``
evaluate it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

import pyarrow as pa

from gpu_ops.conditions.builder import Builder, nodes_of
from gpu_ops.conditions.expressions import Call, Column, Node, Op, TypeProblemError, column_type
from gpu_ops.conditions.grammar import backquoted, read
from gpu_ops.errors import EvaluationError

__all__ = ["Condition", "Expression", "backquoted", "nodes_of", "parse"]


@dataclass(frozen=True)
class Expression:
    """Something computed of rows.

    Attributes:
        sql: its text.
        root: the expression tree.
        columns: per input the columns the tree needs, in order of first use.
        fails: in ANSI mode, where Spark would raise an error instead: a tree of type boolean, or None for nowhere.
    """

    sql: str
    root: Node
    columns: dict[str, tuple[str, ...]]
    fails: Node | None = None

    def __hash__(self) -> int:
        return hash(self.sql)

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
    names, builder = _Names(inputs), Builder(ansi=ansi)
    root = read(sql, names.resolve, builder)
    fails = builder.failing(root)
    columns = {name: tuple(used) for name, used in names.used.items()}
    return Condition(sql, root, columns, fails, builder.mode_matters or fails is not None)


class _Names:
    """Finds columns by name, as Spark does: without regard to case, ambiguity an error."""

    def __init__(self, inputs: Mapping[str, pa.Schema]) -> None:
        self.inputs = inputs
        self.used: dict[str, dict[str, None]] = {name: {} for name in inputs}

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
        self.used[name][field.name] = None
        return Column(name, field.name, column_type(field.type))


def _closest(wanted: str, names: Iterable[str]) -> str:
    """The names, those most like the wanted one first; after the first 20 only how many more."""

    def likeness(name: str) -> float:
        return SequenceMatcher(None, wanted.lower(), name.rpartition(".")[2].lower()).ratio()

    first = sorted(names, key=likeness, reverse=True)
    return ", ".join(first[:20]) + (f" and {len(first) - 20} more" if len(first) > 20 else "")
