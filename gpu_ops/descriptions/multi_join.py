"""What a user writes down for a multi-way join: many inputs, one common key, one operator.

A left-deep chain: step d joins input d to the result of the steps before it. Rules: Flink's
``StreamingMultiJoinOperator`` (FLIP-516), whose planner takes inner and left joins with a common join
key only (``JoinToMultiJoinRule``, ``AttributeBasedJoinKeyExtractor``). What it does not take is refused here,
with the chain of two-way joins that does it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, cast, get_args

import pyarrow as pa

from gpu_ops.conditions import Condition, Where, backquoted, condition_of, of_tree, parse
from gpu_ops.descriptions.description import Description, Emit, OutputColumn, condition_text, equality, line
from gpu_ops.descriptions.inputs import Input, Layout, check_equality, check_sequence
from gpu_ops.descriptions.keys import Equality, Shuffle, equal_classes, key_type, no_columns, of_chain
from gpu_ops.errors import DescriptionError
from gpu_ops.fields import ABSENT, reading

MAX_INPUTS = 64

StepType = Literal["inner", "left"]

StepKeys = str | tuple[str, str] | Sequence[str | tuple[str, str]]
"""``"k"``, ``("users.id", "user_id")``, or several of these."""

MultiOn = str | Sequence[str] | Sequence[StepKeys]
"""Columns that all inputs share (``"k"``, ``["k", "g"]``), or one `StepKeys` per step."""


@dataclasses.dataclass(frozen=True)
class JoinStep:
    """The join of one input to everything to its left.

    Attributes:
        how: ``inner`` or ``left``.
        on: its equality columns.
        where: residual condition over this input and all to its left, given as SQL text or as a tree, or None.
    """

    how: StepType
    on: tuple[Equality, ...]
    where: Where = None

    @property
    def condition(self) -> Condition | None:
        """``where``, parsed and typed by the description."""
        return cast("Condition | None", self.where)


@dataclasses.dataclass(frozen=True)
class MultiJoin(Description):
    """A join of 2 to 64 inputs that share a key.

    Attributes:
        inputs: in the order in which they are joined.
        steps: one per input but the first.
        emit: see `gpu_ops.descriptions.join.Emit`.
        suffixes: one per input, appended to column names that another input has too; or None.
        shown: the inputs' order in the output; None for their own.
        ansi: as in `gpu_ops.descriptions.join.Join`.
    """

    inputs: tuple[Input, ...]
    steps: tuple[JoinStep, ...]
    emit: Emit = "per_batch"
    suffixes: tuple[str, ...] | None = None
    shown: tuple[int, ...] | None = None
    ansi: bool = dataclasses.field(default=False, metadata=ABSENT)

    kind: ClassVar[str] = "multi_join"
    runs: ClassVar[str] = "multi"

    @classmethod
    @reading("multi-way join")
    def of(
        cls,
        inputs: Sequence[Input],
        on: MultiOn,
        how: str | Sequence[str] = "inner",
        *,
        where: Where | Sequence[Where] = None,
        emit: Emit = "per_batch",
        suffixes: Sequence[str] | None = None,
        ansi: bool = False,
        ignore_case: bool = False,
    ) -> MultiJoin:
        """A description from what a user writes.

        Args:
            inputs: two or more.
            on: columns that all inputs share, each then shown once; or one entry per step, of pairs
                ``("input.column", "column of the step's own input")``, or of columns both have.
            how: ``inner`` or ``left``, for all steps or one by one. The first step may be ``right``, which is
                the left join the other way round.
            where: residual conditions, one per step; a single text is the last step's.
            emit: see `gpu_ops.descriptions.join.Emit`.
            suffixes: one per input, for clashing column names.
            ansi: as in `gpu_ops.descriptions.join.Join`.
            ignore_case: whether ``on=`` names columns without regard to case, as Spark does.

        Raises:
            DescriptionError: not a join that this operator does.
        """
        count = len(inputs)
        if count < 2:
            raise DescriptionError(f"a multi-way join takes two or more inputs, not {count}")
        hows = [how] * (count - 1) if isinstance(how, str) else list(how)
        wheres: list[Where]
        if where is None or isinstance(where, str | Mapping | Condition):
            wheres = [*[None] * (count - 2), where]
        else:
            wheres = list(where)
        for option, values in (("how", hows), ("where", wheres)):
            if len(values) != count - 1:
                raise DescriptionError(f"{option}= has {len(values)} entries for {count - 1} steps")
        ordered, shown = list(inputs), None
        keys = _step_keys(ordered, on, ignore_case=ignore_case)
        if hows[0] == "right":
            ordered[:2] = ordered[1::-1]
            shown = (1, 0, *range(2, count))
            merged = {k.column: k.own for k in keys[0] if k.using}
            swapped = [k._replace(column=k.own, own=k.column) for k in keys[0]]
            keys = [swapped, *([_renumbered(k, merged) for k in step] for step in keys[1:])]
            hows[0] = "left"
            if suffixes is not None and len(suffixes) == count:
                suffixes = [*suffixes[1::-1], *suffixes[2:]]
        for number, name in enumerate(hows):
            if name not in get_args(StepType):
                raise DescriptionError(_no_step(name, inputs, number))
        return cls(
            inputs=tuple(ordered),
            steps=tuple(JoinStep(cast("StepType", h), tuple(k), w) for h, k, w in zip(hows, keys, wheres, strict=True)),
            emit=emit,
            suffixes=tuple(suffixes) if suffixes is not None else None,
            shown=shown,
            ansi=ansi,
        )

    def _check(self) -> None:
        count = len(self.inputs)
        if not 2 <= count <= MAX_INPUTS:
            raise DescriptionError(f"a multi-way join takes 2 to {MAX_INPUTS} inputs, not {count}")
        if len(self.steps) != count - 1:
            raise DescriptionError(f"{len(self.steps)} steps for {count} inputs; there is one per input but the first")
        self._check_emit()
        names = [i.name.lower() for i in self.inputs]
        for source in self.inputs:
            if names.count(source.name.lower()) > 1:
                raise DescriptionError(f"two inputs are called {source.name!r}; give one another name")
            source.refuse("a multi-way join does not go by time", "event_time")
        if self.suffixes is not None and len(self.suffixes) != count:
            raise DescriptionError(f"suffixes= has {len(self.suffixes)} entries for {count} inputs")
        if self.shown is not None and sorted(self.shown) != list(range(count)):
            raise DescriptionError(f"shown={self.shown!r} is no order of {count} inputs")
        for number, step in enumerate(self.steps, start=1):
            self._check_step(number, step)
        check_sequence(self.inputs)
        if not self.common_key:
            chain = ", ".join(i.name for i in self.inputs)
            raise DescriptionError(
                f"the joins of {chain} share no key: a multi-way join needs a column that = leads to in every "
                f"step. Join them two at a time: {_chain(self.inputs, [s.how for s in self.steps])}"
            )
        self._check_names("rename one, or give suffixes=")
        steps = [
            dataclasses.replace(x, where=condition_of(x.where, self._schemas(n), ansi=self.ansi))
            for n, x in enumerate(self.steps, 1)
        ]
        object.__setattr__(self, "steps", tuple(steps))
        _ = self.conditions

    def _check_step(self, number: int, step: JoinStep) -> None:
        own = self.inputs[number]
        if step.how not in get_args(StepType):
            raise DescriptionError(_no_step(step.how, self.inputs, number - 1))
        for key in step.on:
            if not 0 <= key.input < number:
                raise DescriptionError(f"step {number} joins '{own.name}' on an input that is not to its left")
            check_equality(self.inputs[key.input], key.column, own, key.own)
        _ = self.key_types

    @functools.cached_property
    def key_classes(self) -> dict[tuple[int, str], int]:
        """The columns that ``=`` makes equal, by (input, column).

        Those of one number are all equal in a row of the result in which their inputs are there.
        """
        steps = enumerate(self.steps, start=1)
        return equal_classes(
            ((k.input, k.column), (number, k.own)) for number, step in steps for k in step.on if not k.null_safe
        )

    @functools.cached_property
    def key_types(self) -> dict[tuple[int, str], pa.DataType]:
        """The type each key column is compared in, the same for all that are equal."""
        fields: dict[int, pa.Field] = {}
        for (input_index, column), number in self.key_classes.items():
            field = self.inputs[input_index].schema.field(column)
            before = fields.get(number, field)
            fields[number] = before.with_type(key_type(before, field))
        return {column: fields[number].type for column, number in self.key_classes.items()}

    @functools.cached_property
    def common_key(self) -> tuple[tuple[str, ...], ...]:
        """The common join keys: every choice of one column per input such that rows that match are equal in it.

        As Flink has it: in each step an ``=`` leads from one of them to the step's own input.
        """
        found: list[tuple[str, ...]] = []

        def follow(chosen: tuple[str, ...]) -> None:
            input_index = len(chosen)
            if input_index == len(self.inputs):
                found.append(chosen)
                return
            on = self.steps[input_index - 1].on
            ways = [k.own for k in on if not k.null_safe and k.column == chosen[k.input]]
            for own in dict.fromkeys(ways):
                follow((*chosen, own))
                if found and found[-1][0] == chosen[0]:
                    return  # one way per column of the first input is enough

        for column in self.inputs[0].schema.names:
            if (0, column) in self.key_classes:
                follow((column,))
        return tuple(found)

    @functools.cached_property
    def shuffled_by(self) -> tuple[Shuffle, ...]:
        """The columns that rows are partitioned by; empty means a single partition.

        The common keys, less those that would part the old and the new row of an upsert.
        """
        kept = [
            columns
            for columns in self.common_key
            if all(
                source.unique_key is None or source.updates == "retract" or column in source.unique_key
                for source, column in zip(self.inputs, columns, strict=True)
            )
        ]
        return tuple(Shuffle(columns, self.key_types[0, columns[0]]) for columns in kept)

    @property
    def alone(self) -> tuple[int, ...]:
        """The first input, unless rows of all inputs come together."""
        return (0,) if any(step.how == "left" for step in self.steps) else ()

    @functools.cached_property
    def conditions(self) -> tuple[Condition | None, ...]:
        """Per step: the residual condition with its null-safe equalities, over its input and all to its left."""
        return tuple(self._condition(input_index, step) for input_index, step in enumerate(self.steps, start=1))

    def _condition(self, input_index: int, step: JoinStep) -> Condition | None:
        def quoted(source: Input, column: str) -> str:
            return ".".join(map(backquoted, (source.name, column)))

        own, schemas, where = self.inputs[input_index], self._schemas(input_index), step.condition
        terms = [f"{quoted(self.inputs[k.input], k.column)} <=> {quoted(own, k.own)}" for k in step.on if k.null_safe]
        if not terms:
            return where
        equal = parse(" AND ".join(terms), schemas, ansi=self.ansi)
        if where is None:
            return equal
        matters = equal.mode_matters or where.mode_matters
        return of_tree(where.sql, [equal.root, where.root], schemas, ansi=self.ansi, mode_matters=matters)

    def _schemas(self, input_index: int) -> dict[str, pa.Schema]:
        """The schemas of the inputs that a step's condition is over, by name."""
        return {i.name: i.schema for i in self.inputs[: input_index + 1]}

    @functools.cached_property
    def references(self) -> tuple[frozenset[int], ...]:
        """Per step: the inputs to its left that it looks at."""
        found = []
        for input_index, (step, condition) in enumerate(zip(self.steps, self.conditions, strict=True), start=1):
            looked_at = {k.input for k in step.on}
            if condition is not None:
                looked_at |= {i for i in range(input_index) if condition.columns[self.inputs[i].name]}
            found.append(frozenset(looked_at))
        return tuple(found)

    @functools.cached_property
    def output(self) -> tuple[OutputColumn, ...]:
        """The changelog's columns after ``row_kind``; their ``side`` is the input's number."""
        hidden = {(p, k.own) for p, step in enumerate(self.steps, start=1) for k in step.on if k.using}
        first = [(k.input, k.column) for step in self.steps for k in step.on if k.using]
        first = [c for c in dict.fromkeys(first) if c not in hidden]
        order = self.shown or tuple(range(len(self.inputs)))
        columns = [*first]
        for input_index in order:
            own = [(input_index, name) for name in self.inputs[input_index].schema.names]
            columns += [c for c in own if c not in hidden and c not in first]
        names = [name for _, name in columns]
        made = []
        for input_index, name in columns:
            suffix = self.suffixes[input_index] if self.suffixes is not None and names.count(name) > 1 else ""
            own_type = self.inputs[input_index].schema.field(name).type
            kind = self.key_types[input_index, name] if (input_index, name) in first else own_type
            made.append(OutputColumn(name + suffix, input_index, name, None, kind))
        return tuple(made)

    @property
    def insert_only(self) -> bool:
        """Tells whether nothing that comes out is ever taken back: inner joins of inputs that are insert-only."""
        return all(step.how == "inner" for step in self.steps) and self._grows

    def own_column(self, number: int, column: OutputColumn) -> str | None:
        """The input column that fills an output column in an unmatched or late row of that input; None for none."""
        if column.side == number:
            return column.column
        step = self.steps[number - 1].on if number else ()
        return next((k.own for k in step if k.using and (k.input, k.column) == (column.side, column.column)), None)

    @property
    def rename_hint(self) -> str:
        """Suggests what helps besides a new name where two output columns have one."""
        return f", or give suffixes={tuple(f'_{source.name}' for source in self.inputs)!r}"

    @property
    def equal_columns(self) -> list[tuple[str, ...]]:
        """The common join keys."""
        return list(self.common_key)

    @property
    def compared_columns(self) -> list[tuple[int, str]]:
        """The key columns of all steps, each with its input."""
        return [c for n, step in enumerate(self.steps, 1) for k in step.on for c in ((k.input, k.column), (n, k.own))]

    def _unique_key(self) -> tuple[str, ...] | None:
        lefts, on = tuple(step.how == "left" for step in self.steps), tuple(step.on for step in self.steps)
        return of_chain(self._chain_of(range(len(self.inputs)), lefts, on))

    @property
    def title(self) -> str:
        """The join in one line, for people."""
        steps = []
        for source, step in zip(self.inputs[1:], self.steps, strict=True):
            equal = [
                (f"{self.inputs[k.input].name}.{k.column}", k.null_safe, f"{source.name}.{k.own}") for k in step.on
            ]
            steps.append(f"{step.how} join {source.name} on {condition_text(equal, step.condition)}")
        return f"multi-way join of {self.inputs[0].name}, {', '.join(steps)}"

    def equalities(self, step: int, written: Callable[[str], str] = str) -> list[str]:
        """The equal columns of a step, in words; ``written``: gives a column's name as it is to be written."""
        keys = [
            ((self.inputs[k.input], k.column), (self.inputs[step], k.own), k.null_safe) for k in self.steps[step - 1].on
        ]
        return [equality(one, other, null_safe=safe, written=written) for one, other, safe in keys]

    def lines(self) -> list[str]:
        """The plan as Flink prints it, then what it means."""
        inputs = self.inputs
        unique = [f"({', '.join(i.unique_key)})" if i.unique_key is not None else "noUniqueKey" for i in inputs]
        conditions, steps = [], []
        for number, step in enumerate(self.steps, start=1):
            equal = self.equalities(number)
            conditions.append(" AND ".join([*equal, *([f"({step.where})"] if step.where is not None else [])]))
            where = "" if step.where is None else f"  where {step.where}"
            steps.append(
                line(f"step {number}", f"{step.how} join {inputs[number].name} on {' AND '.join(equal)}{where}")
            )
        parts = {
            "commonJoinKey": [f"{inputs[0].name}.{columns[0]}" for columns in self.common_key],
            "joinTypes": [step.how.upper() for step in self.steps],
            "inputUniqueKeys": unique,
            "joinConditions": conditions,
        }
        common = [" = ".join(f"{i.name}.{c}" for i, c in zip(inputs, key, strict=True)) for key in self.common_key]
        shown = ", ".join(what + "=[" + ", ".join(values) + "]" for what, values in parts.items())
        return [
            f"multi-way join: {', '.join(i.name for i in inputs)}",
            line("plan", f"MultiJoin({shown})"),
            line("common key", " AND ".join(common)),
            *steps,
        ]

    def layout(self, input_index: int) -> Layout:
        """The state layout of one input (Flink: ``MultiJoinStateViews``)."""
        unique = self.inputs[input_index].unique_key
        if unique is None:
            return "multiset"
        own = {k.own for k in self.steps[input_index - 1].on} if input_index else set()
        return "join_key_contains_unique_key" if input_index and set(unique) <= own else "unique_key"


def _step_keys(inputs: Sequence[Input], on: MultiOn, *, ignore_case: bool) -> list[list[Equality]]:
    """The equalities that ``on=`` names, per step, as the columns are spelled; what there is none of stays as it is."""
    if not isinstance(on, str | Sequence):
        raise no_columns(on)
    items = [on] if isinstance(on, str) else list(on)
    if items and all(isinstance(item, str) for item in items):
        entries: list[Any] = [items] * (len(inputs) - 1)
    elif len(items) == len(inputs) - 1:
        entries = items
    else:
        raise DescriptionError(
            f"on= has {len(items)} entries for {len(inputs) - 1} steps; it is columns that all inputs share, "
            "or one entry per step"
        )

    def spelled(number: int, column: str) -> str | None:
        names = inputs[number].schema.names
        if column in names:
            return column
        return next((name for name in names if ignore_case and name.lower() == column.lower()), None)

    def resolved(numbers: range, text: str) -> tuple[int, str]:
        """The input and column that ``"input.column"`` or ``"column"`` names."""
        head, dot, rest = text.partition(".")
        for number in numbers:
            column = spelled(number, rest) if dot and head.lower() == inputs[number].name.lower() else None
            if column is not None:
                return number, column
        having = [(number, column) for number in numbers if (column := spelled(number, text)) is not None]
        if len(having) > 1:
            names = " and ".join(f"{inputs[number].name}.{column}" for number, column in having)
            raise DescriptionError(f"on= names {text!r}, which can be {names}")
        if not having:
            there = ", ".join(f"{inputs[number].name}.{c}" for number in numbers for c in inputs[number].schema.names)
            raise DescriptionError(f"on= names {text!r}; there are {there}")
        return having[0]

    def equality_of(number: int, item: Any) -> Equality:
        if isinstance(item, Equality):
            return item
        if isinstance(item, str):  # shared with an input to its left, and shown once
            owner = next((n for n in range(number) if spelled(n, item) is not None), 0)
            return Equality(owner, spelled(owner, item) or item, spelled(number, item) or item, using=True)
        if not _is_pair(item):
            raise DescriptionError(f"on= takes columns and pairs of columns, not {item!r}")
        left, column = resolved(range(number), item[0])
        return Equality(left, column, resolved(range(number, number + 1), item[1])[1])

    steps = []
    for number, entry in enumerate(entries, start=1):
        if not isinstance(entry, str | Sequence):
            raise DescriptionError(f"on= takes columns and pairs of columns, not {entry!r}")
        of_step = [entry] if isinstance(entry, str) or _is_pair(entry) else entry
        steps.append([equality_of(number, item) for item in of_step])
    return steps


def _is_pair(item: object) -> bool:
    return isinstance(item, tuple) and len(item) == 2 and all(isinstance(part, str) for part in item)


def _renumbered(key: Equality, merged: Mapping[str, str]) -> Equality:
    """A later step's equality, with the first two inputs swapped; a column shown once is the new first's."""
    if key.using and key.input == 0 and key.column in merged:
        return key._replace(column=merged[key.column])
    return key._replace(input=1 - key.input) if key.input < 2 else key


def _no_step(how: str, inputs: Sequence[Input], number: int) -> str:
    why = {
        "right": "a right join is a left join the other way round, which only the first step can be",
        "full": "a full join must remember which rows of both sides were matched",
        "semi": "a semi join's rows have no part of its right input",
        "anti": "an anti join's rows have no part of its right input",
    }.get(how)
    if why is None:
        return f"how={how!r}; a step of a multi-way join is inner or left"
    hows = ["inner"] * (len(inputs) - 1)
    hows[number] = how
    return f"how={how!r}: {why}. Join them two at a time: {_chain(inputs, hows)}"


def _chain(inputs: Sequence[Input], hows: Sequence[str]) -> str:
    text = inputs[0].name
    for source, how in zip(inputs[1:], hows, strict=True):
        text = f"gpu_ops.join({text}, {source.name}, on=..., how={how!r})"
    return text
