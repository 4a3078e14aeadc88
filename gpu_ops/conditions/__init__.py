"""Residual join conditions: SQL text, in Spark's dialect, to a typed expression tree.

Semantics are Spark's: three-valued logic; NaN equals NaN and is greater than any other number; -0.0 equals 0.0.
With ``spark.sql.ansi.enabled=false`` a division or remainder by zero is null, integer arithmetic wraps around on
overflow, and a CAST of text that does not fit is null, so no row can make a condition fail; in ANSI mode each of these
is an `EvaluationError`. Decimal arithmetic is exact or refused. What each operation does is in
`gpu_ops.conditions.expressions.Op`; the backends' ``conditions.py`` evaluate it.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from gpu_ops.conditions import checks
from gpu_ops.conditions.expressions import Call, Column, Literal, Node, Op, TypeProblemError, column_type
from gpu_ops.conditions.grammar import read
from gpu_ops.conditions.literals import zone_name
from gpu_ops.errors import ConditionError, DescriptionError, EvaluationError


@dataclass(frozen=True)
class Condition:
    """A parsed residual condition.

    Attributes:
        sql: the text as given.
        root: the expression tree, of type boolean.
        columns: per input (each that `parse` was given) the columns the tree needs, in order of first use.
        fails: in ANSI mode, where Spark would raise an error instead: a tree of type boolean, or None for nowhere.
    """

    sql: str
    root: Node
    columns: dict[str, tuple[str, ...]]
    fails: Node | None = None

    def __hash__(self) -> int:
        return hash(self.sql)

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

    def failure(self, sample: Mapping[str, object]) -> EvaluationError:
        """The error for rows of which ``fails`` is true; ``sample``: columns of one and their values."""
        shown = ", ".join(f"{name} = {value!r}" for name, value in sample.items()) or "any row"
        return EvaluationError(
            f"the condition {self.sql!r} fails in ANSI mode (spark.sql.ansi.enabled): a number overflows, a divisor is "
            f"zero, or a text is cast that is no such value, for {shown}. TRY_CAST and NULLIF make null of these"
        )


def nodes_of(*roots: Node | None) -> list[Node]:
    """The nodes of trees, each once, operands first."""
    found: dict[int, Node] = {}
    stack = [root for root in roots[::-1] if root is not None]
    while stack:
        node = stack[-1]
        waiting = [arg for arg in (node.args if isinstance(node, Call) else ()) if id(arg) not in found]
        stack += waiting[::-1]
        if not waiting:
            found.setdefault(id(stack.pop()), node)
    return list(found.values())


def session_matters(
    sql: str, inputs: Mapping[str, pa.Schema], *, time_zone: str | None, ansi: bool
) -> tuple[str | None, bool]:
    """The time zone and the ANSI mode of a text, each only where it would mean something else without.

    Raises:
        ConditionError: as `parse`.
    """
    own = _shape(parse(sql, inputs, time_zone=time_zone, ansi=ansi))

    def differs(zone: str | None, *, mode: bool) -> bool:
        try:
            return _shape(parse(sql, inputs, time_zone=zone, ansi=mode)) != own
        except ConditionError:
            return True

    zone = zone_name(time_zone) if time_zone is not None and differs(None, mode=ansi) else None
    return zone, ansi and differs(time_zone, mode=False)


def _shape(condition: Condition) -> list[tuple[object, ...]]:
    """What a condition computes, to be compared: zones only where something goes from one to the wall clock or back."""
    nodes = nodes_of(condition.root, condition.fails)
    number = {id(node): place for place, node in enumerate(nodes)}
    found: list[tuple[object, ...]] = []
    for node in nodes:
        zones = {getattr(n.type, "tz", None) for n in (node, *(node.args if isinstance(node, Call) else ()))}
        kept = zones if isinstance(node, Call) and node.op is Op.CAST and None in zones else None
        plain = pa.timestamp(node.type.unit, "UTC") if getattr(node.type, "tz", None) else node.type
        match node:
            case Call():
                found.append((node.op, tuple(number[id(arg)] for arg in node.args), plain, kept))
            case Literal():
                found.append((repr(node.value), plain))
            case Column():
                found.append((node.input, node.name, plain))
    roots = condition.root, condition.fails
    return [*found, tuple(number[id(root)] for root in roots if root is not None)]


def parse(sql: str, inputs: Mapping[str, pa.Schema], *, time_zone: str | None = None, ansi: bool = False) -> Condition:
    """Read a condition.

    Args:
        sql: a boolean expression. Columns are written ``input.column``, or ``column`` where only one
            input has it; case does not matter, backticks quote.
        inputs: input name to the schema of its columns.
        time_zone: the session's zone: of literals that name none, and wherever an instant meets a date, a wall-clock
            time or an interval of days; by default that of the first zoned column, else UTC.
        ansi: whether as with ``spark.sql.ansi.enabled``.

    Raises:
        ConditionError: with the position, for a syntax error, an unknown or ambiguous column, types that do
            not fit, or SQL outside the subset (sub-queries, aggregates, window and other functions).
        DescriptionError: no such time zone.
    """
    zones = (getattr(field.type, "tz", None) for schema in inputs.values() for field in schema)
    try:
        zone = zone_name(time_zone or next((zone for zone in zones if zone), "UTC"))
    except ValueError as error:
        raise DescriptionError(str(error)) from None
    names = _Names(inputs, zone)
    with checks.reading(ansi=ansi):
        root = read(sql, names.resolve, zone)
        fails = checks.failing(root)
    return Condition(sql, root, {name: tuple(used) for name, used in names.used.items()}, fails)


class _Names:
    """Finds columns by name, as Spark does: without regard to case, ambiguity an error."""

    def __init__(self, inputs: Mapping[str, pa.Schema], zone: str) -> None:
        self.inputs, self.zone = inputs, zone
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
        type_ = column_type(field.type)
        if getattr(type_, "tz", None):
            type_ = pa.timestamp(type_.unit, self.zone)  # the same instants, seen from the session
        return Column(name, field.name, type_)

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
