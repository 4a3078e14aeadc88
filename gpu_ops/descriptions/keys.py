"""Equality columns: what rows are joined by, in which type they are compared, by what they are shuffled.

And the unique key that a join's changelog has, from the unique keys of its inputs. A row of the changelog is one of the
first input's, at most one of each further input. So the inputs' keys together are one, and an input that has at most
one row per join key adds nothing to it. What could be null is never part of a key: not the columns of an input that may
be padded.

A key is of use only if the changes of one row reach the next join in their order. The partitions of a join
give theirs side by side, so what rows are distributed by is made part of the key: then all changes
of a key come from one partition.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import pyarrow as pa

from gpu_ops.errors import DescriptionError


class Key(NamedTuple):
    """One pair of equality columns.

    Attributes:
        null_safe: ``IS NOT DISTINCT FROM`` instead of ``=``.
        using: one output column for both, as Spark's ``on="k"``.
    """

    left: str
    right: str
    null_safe: bool = False
    using: bool = False

    def column(self, side: int) -> str:
        """The column of one side."""
        return self.right if side else self.left


class Shuffle(NamedTuple):
    """One value that rows are partitioned by: rows that may match have the same.

    Attributes:
        columns: its column in each input.
        type: the type it is compared in.
    """

    columns: tuple[str, ...]
    type: pa.DataType


class Equality(NamedTuple):
    """``inputs[input].column = own``, where own is a column of the step's own input.

    Attributes:
        null_safe: ``IS NOT DISTINCT FROM`` instead of ``=``; never part of the common key.
        using: the step's own column is not shown.
    """

    input: int
    column: str
    own: str
    null_safe: bool = False
    using: bool = False


InputColumn = tuple[int, str]
"""An input's number and one of its columns."""


def equal_classes(pairs: Iterable[tuple[InputColumn, InputColumn]]) -> dict[InputColumn, int]:
    """The columns that pairs of equal ones make equal: those of one number.

    Of ``a = b``, ``c = d`` and ``b = c`` all four get 0.
    """
    number: dict[InputColumn, int] = {}
    for a, b in pairs:
        one, other = number.setdefault(a, len(number)), number.setdefault(b, len(number))
        number = {column: one if its == other else its for column, its in number.items()}
    return number


On = str | Sequence[str | tuple[str, str] | Key] | None
"""``"k"``, ``["k", ("a", "b")]``, or `Key` objects; None for no equality columns."""


def normalize_on(on: On, *, null_safe: bool | Sequence[bool] = False) -> tuple[Key, ...]:
    """The keys that ``on=`` names.

    Raises:
        DescriptionError: something that is neither a column nor a pair of columns.
    """
    items: Any = () if on is None else (on,) if isinstance(on, str) else on
    if not isinstance(items, list | tuple):
        raise no_columns(on)
    if not isinstance(null_safe, bool | list | tuple):
        raise DescriptionError(f"null_safe= is one truth, or one per key, not {null_safe!r}")
    if null_safe is True and not items:
        raise DescriptionError("null_safe= is of the keys, and on= names none")
    safe = [null_safe] * len(items) if isinstance(null_safe, bool) else list(null_safe)
    if len(safe) != len(items):
        raise DescriptionError(f"null_safe has {len(safe)} entries for {len(items)} keys")
    keys = []
    for item, is_safe in zip(items, safe, strict=True):
        if isinstance(item, Key):
            keys.append(item)
        elif isinstance(item, str):
            keys.append(Key(item, item, is_safe, using=True))
        elif isinstance(item, tuple) and len(item) == 2 and all(isinstance(c, str) for c in item):
            keys.append(Key(item[0], item[1], is_safe))
        else:
            raise no_columns(item)
    return tuple(keys)


def no_columns(given: object) -> DescriptionError:
    """The error for something in ``on=`` that names no columns; of Spark's ``a.k == b.k`` it says what to write."""
    shown = str(given)
    equal = re.fullmatch(r"Column<'(?:=\((\w+), (\w+)\)|\((\w+) = (\w+)\)|(\w+) == (\w+))'>", shown)
    if equal is not None:
        left, right = (name for name in equal.groups() if name is not None)
        instead = f"write on={left!r}" if left == right else f"write on=[({left!r}, {right!r})]"
    else:
        instead = "such as on='k' or on=[('left_k', 'right_k')]; any other condition is where='SQL text'"
    return DescriptionError(f"on= takes names of columns and pairs of them, not {shown}: {instead}")


def key_type(left: pa.Field, right: pa.Field, *, what: str = "key") -> pa.DataType:
    """The type in which two key columns, or others, are compared.

    Raises:
        DescriptionError: types that have none without a CAST.
    """
    a, b = left.type, right.type
    if a == b:
        return a
    t = pa.types
    if t.is_signed_integer(a) and t.is_signed_integer(b):
        return max(a, b, key=lambda x: cast("int", x.bit_width))
    if t.is_floating(a) and t.is_floating(b):
        return pa.float64()
    for family in ((t.is_string, t.is_large_string), (t.is_binary, t.is_large_binary)):
        if any(f(a) for f in family) and any(f(b) for f in family):
            return a
    # nanoseconds reach only from 1677 to 2262: not every other timestamp has a place there
    zones_fit = t.is_timestamp(a) and t.is_timestamp(b) and (a.tz is None) == (b.tz is None)
    if zones_fit and "ns" not in (a.unit, b.unit):
        return pa.timestamp("us", a.tz)
    if t.is_decimal(a) and t.is_decimal(b):
        scale = max(a.scale, b.scale)
        whole = max(a.precision - a.scale, b.precision - b.scale)
        if whole + scale <= 38:
            return pa.decimal128(whole + scale, scale)
    raise DescriptionError(
        f"cannot compare {what} {left.name!r} ({a}) with {right.name!r} ({b}); CAST one of them first"
    )


class Chain(NamedTuple):
    """A join as a chain of steps, each of which joins one more input.

    Attributes:
        keys: the unique key of each input.
        lefts: of each step: whether it is a left join.
        on: of each step.
        single: of each input: whether it has at most one row per join key.
        shuffled: what rows are distributed by: of each value, its column in every input.
        shown: columns of the changelog by what they show.
    """

    keys: tuple[tuple[str, ...] | None, ...]
    lefts: tuple[bool, ...]
    on: tuple[tuple[Equality, ...], ...]
    single: tuple[bool, ...]
    shuffled: tuple[tuple[str, ...], ...]
    shown: dict[InputColumn, str]


def of_chain(chain: Chain) -> tuple[str, ...] | None:
    """The unique key of a chain's changelog, by the names of its columns; None where none is known."""
    key = _identity(chain)
    if key is None:
        return None
    # what a left step compares is equal only where it has found a match
    equal = equal_classes(
        ((k.input, k.column), (number, k.own))
        for number, (left, on) in enumerate(zip(chain.lefts, chain.on, strict=True), start=1)
        for k in on
        if not left and not k.null_safe
    )
    padded = {number for number, left in enumerate(chain.lefts, start=1) if left}
    for columns in chain.shuffled:
        # A step that is an inner join leaves no row whose common key is null.
        never_null = columns[0] in (chain.keys[0] or ()) or any(
            not left and _strict(chain.on[step], columns, step + 1) for step, left in enumerate(chain.lefts)
        )
        if not never_null:
            return None
        key.append((0, columns[0]))
    names: list[str] = []
    taken: set[int | InputColumn] = set()
    for column in key:
        its = equal.get(column, column)
        if its in taken:
            continue
        taken.add(its)
        candidates = [column, *sorted(c for c, number in equal.items() if number == its and c[0] not in padded)]
        name = next((chain.shown[c] for c in candidates if c in chain.shown), None)
        if name is None:
            return None
        names.append(name)
    return tuple(dict.fromkeys(names))


def _identity(chain: Chain) -> list[InputColumn] | None:
    """Columns that identify a row of a chain, none of an input that may be padded."""
    key = None if chain.keys[0] is None else [(0, c) for c in chain.keys[0]]
    for number, (left, on) in enumerate(zip(chain.lefts, chain.on, strict=True), start=1):
        own = None if chain.keys[number] is None else [(number, c) for c in chain.keys[number] or ()]
        led_to = {(k.input, k.column) for k in on}
        if chain.single[number] and key is not None:
            continue
        if left:
            return None
        if own is not None and key is not None and set(key) <= led_to:
            key = own  # at most one row before it per row of this input
        else:
            key = None if own is None or key is None else [*key, *own]
    return key


def _strict(on: Sequence[Equality], columns: tuple[str, ...], number: int) -> bool:
    """Tells whether a step compares its own column of a common key by ``=``."""
    return any(not k.null_safe and k.own == columns[number] and k.column == columns[k.input] for k in on)
