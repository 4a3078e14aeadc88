"""Residual join conditions: SQL text, in Spark's dialect, to a typed expression tree.

Semantics are Spark's with ``spark.sql.ansi.enabled=false``: three-valued logic; NaN equals NaN and is greater
than any other number; -0.0 equals 0.0; a division or remainder by zero is null; integer arithmetic wraps
around on overflow; a CAST of text that does not fit is null. So no row can make a condition fail. Decimal
arithmetic is exact or refused. What each operation does is in `gpu_ops.conditions.expressions.Op`; the backends'
``conditions.py`` evaluate it.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from gpu_ops.conditions.expressions import Column, Node, TypeProblemError, column_type
from gpu_ops.conditions.grammar import read


@dataclass(frozen=True)
class Condition:
    """A parsed residual condition.

    Attributes:
        sql: the text as given.
        root: the expression tree, of type boolean.
        columns: per input (each that `parse` was given) the columns the tree needs, in order of first use.
    """

    sql: str
    root: Node
    columns: dict[str, tuple[str, ...]]

    def __hash__(self) -> int:
        return hash(self.sql)


def parse(sql: str, inputs: Mapping[str, pa.Schema], *, time_zone: str | None = None) -> Condition:
    """Read a condition.

    Args:
        sql: a boolean expression. Columns are written ``input.column``, or ``column`` where only one
            input has it; case does not matter, backticks quote.
        inputs: input name to the schema of its columns.
        time_zone: the session's zone, for literals with a zone and for CAST AS TIMESTAMP; by default
            that of the first zoned column (Spark writes its session's zone there), else UTC. A timestamp
            column without zone beside one with a zone is taken in the latter's.

    Raises:
        ConditionError: with the position, for a syntax error, an unknown or ambiguous column, types that do
            not fit, or SQL outside the subset (sub-queries, aggregates, window and other functions).
    """
    zones = (getattr(field.type, "tz", None) for schema in inputs.values() for field in schema)
    zone = time_zone or next((zone for zone in zones if zone), "UTC")
    names = _Names(inputs)
    root = read(sql, names.resolve, zone)
    return Condition(sql, root, {name: tuple(used) for name, used in names.used.items()})


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
        among = self._input(inputs[0], column) if inputs else list(self.inputs)
        found = [(name, field) for name in among for field in self.inputs[name] if field.name.lower() == column.lower()]
        if not found:
            raise TypeProblemError(self._no_column(column, among))
        if len(found) > 1:
            names = " and ".join(f"{name}.{field.name}" for name, field in found)
            raise TypeProblemError(f"{shown!r} is ambiguous: it can be {names}")
        ((name, field),) = found
        self.used[name][field.name] = None
        return Column(name, field.name, column_type(field.type))

    def _input(self, wanted: str, column: str) -> list[str]:
        found = [name for name in self.inputs if name.lower() == wanted.lower()]
        if len(found) > 1:
            raise TypeProblemError(f"the input {wanted!r} is ambiguous: it can be {' and '.join(found)}")
        if not found:
            raise TypeProblemError(
                f"there is no input {wanted!r}; there are {', '.join(_closest(wanted, self.inputs))}"
            )
        return found

    def _no_column(self, column: str, among: Sequence[str]) -> str:
        if len(among) == 1:
            columns = _closest(column, self.inputs[among[0]].names)
            return f"input {among[0]!r} has no column {column!r}; it has {', '.join(columns) or 'none'}"
        every = {f"{name}.{field}": field for name in among for field in self.inputs[name].names}
        close = _closest(column, dict.fromkeys(every.values()))
        columns = sorted(every, key=lambda name: close.index(every[name]))
        return f"there is no column {column!r}; there are {', '.join(columns) or 'none'}"


def _closest(wanted: str, names: Mapping[str, object] | Sequence[str]) -> list[str]:
    """The names, those most like the wanted one first."""
    lowered = {name: name.lower() for name in names}
    close = difflib.get_close_matches(wanted.lower(), list(lowered.values()), n=3)
    return sorted(lowered, key=lambda name: close.index(lowered[name]) if lowered[name] in close else len(close))
