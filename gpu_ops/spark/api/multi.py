"""The multi-way join as a function from streaming DataFrames to their changelog."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

from pyspark.sql import DataFrame

from gpu_ops.descriptions.inputs import nearest
from gpu_ops.descriptions.keys import Equality, no_columns
from gpu_ops.descriptions.multi_join import MultiJoin, MultiOn, StepKeys
from gpu_ops.errors import DescriptionError
from gpu_ops.query.catalyst import ansi_mode
from gpu_ops.spark.api.checks import run, settled, spelled
from gpu_ops.spark.api.options import ChangelogOptions, How, check_options
from gpu_ops.spark.api.streams import Stream, as_input, as_stream, spelling
from gpu_ops.spark.api.where import engine_condition


def multi_join(
    inputs: Sequence[DataFrame | Stream],
    on: MultiOn,
    how: How | Sequence[How] = "inner",
    *,
    where: str | Sequence[str | None] | None = None,
    suffixes: Sequence[str] | None = None,
    **options: Unpack[ChangelogOptions],
) -> DataFrame:
    """Joins streaming DataFrames that share a key, all in one operator; the result is their changelog.

    Static ones are joined at once, into a static DataFrame of insertions.

    Input by input from left to right, as the chain of two-way joins would, but without state for what is
    joined in between. Example::

        gpu_ops.multi_join([users, orders, payments], on="user_id", how=["left", "inner"], state=...)

    Args:
        inputs: two or more. What `stream` gave no ``name=`` is called ``input_1``, ``input_2`` and so on.
        on: columns that all inputs share, each then shown once: ``"k"``, ``["k", "g"]``; or one entry per input
            but the first, of pairs ``("input.column", "column of this input")`` or of columns that it shares with
            one to its left.
        how: ``inner`` or ``left``, for all inputs but the first, or one by one. The first may be ``right``,
            which is the left join the other way round.
        where: residual conditions, one per input but the first, SQL text over it and all to its left; a
            single text is the last one's.
        suffixes: one per input, for column names that another input has too.
        options: ``emit, state, backend, partitions, name, backlog``, as in `join`.

    Returns:
        A streaming DataFrame, or a static one; first column ``row_kind``, then the columns of the join.

    Raises:
        TypeError: no such option.
        DescriptionError: a join that cannot be, or that needs a chain of two-way joins.
        NotBuiltError: Spark Connect.
        StateError: the state folder belongs to something else.
    """
    check_options("multi_join", options, ChangelogOptions)
    if isinstance(inputs, str) or not isinstance(inputs, Sequence):
        raise DescriptionError(f"multi_join() takes a list of inputs, not {type(inputs).__name__}")
    if len(inputs) < 2:
        raise DescriptionError(f"a multi-way join takes two or more inputs, not {len(inputs)}")
    given = tuple(as_stream(each, f"input {number}", f"input_{number}") for number, each in enumerate(inputs, start=1))
    found, static = settled(given, options.get("state"))
    streams, names = list(found), [side.label for side in found]
    hows = spelled(how) if isinstance(how, str) else [spelled(each) for each in how]
    first = hows if isinstance(hows, str) else next(iter(hows), "")
    steps = [hows] * len(streams) if isinstance(hows, str) else list(hows)
    wheres: list[Any] = [*[None] * (len(inputs) - 2), where] if where is None or isinstance(where, str) else list(where)
    for number, condition in enumerate(wheres[: len(streams) - 1], start=1):
        stop = number + 1
        padded = [first == "right" and number > 1, *(step == "left" for step in steps[: number - 1]), False]
        wheres[number - 1], streams[:stop], _ = engine_condition(condition, streams[:stop], padded)
    join = MultiJoin.of(
        [as_input(side) for side in streams],
        _resolved(on, streams, names, turned=first == "right"),
        hows,
        where=wheres,
        emit="at_end" if static else options.get("emit", "per_batch"),
        suffixes=suffixes,
        ansi=ansi_mode(streams[0].df.sparkSession),
    )
    by_name = dict(zip(names, streams, strict=True))
    sides = [by_name[source.name] for source in join.inputs]  # a right join has turned them round
    return run(join, sides, options)


def _resolved(on: MultiOn, streams: Sequence[Stream], names: Sequence[str], *, turned: bool) -> Any:
    """``on=`` in the columns' own spelling, one entry per step; what fits no step is left for `MultiJoin.of`.

    Args:
        on: as the user gave it.
        streams: the inputs.
        names: what they are called.
        turned: whether the first two inputs will change places: a column that all share is then shown by the
            second.
    """
    if not isinstance(on, str | Sequence):
        raise no_columns(on)
    items: list[Any] = [on] if isinstance(on, str) else list(on)
    if items and all(isinstance(item, str) for item in items):
        return [
            [_shared(streams, names, number, column, 1 if turned and number > 1 else 0) for column in items]
            for number in range(1, len(streams))
        ]
    if len(items) != len(streams) - 1:
        return on
    return [_of_step(streams, names, number, item) for number, item in enumerate(items, start=1)]


def _of_step(streams: Sequence[Stream], names: Sequence[str], number: int, entry: StepKeys) -> list[Any]:
    items: list[Any] = [entry] if isinstance(entry, str) or _is_pair(entry) else list(entry)
    found: list[Any] = []
    for item in items:
        if isinstance(item, str):
            owners = [n for n in range(number) if spelling(streams[n].df, item) is not None]
            found.append(_shared(streams, names, number, item, owners[0] if owners else 0))
        elif _is_pair(item):
            at, column = _column(streams[:number], names[:number], item[0])
            _, own = _column(streams[number : number + 1], names[number : number + 1], item[1])
            found.append(Equality(at, column, own))
        else:
            found.append(item)
    return found


def _shared(streams: Sequence[Stream], names: Sequence[str], number: int, column: str, owner: int) -> Equality:
    """A column that a step's input shares with one to its left, shown once."""
    own = [spelling(streams[n].df, column) for n in (owner, number)]
    for at, found in zip((owner, number), own, strict=True):
        if found is None:
            there = nearest(column, streams[at].df.columns)
            raise DescriptionError(f"input '{names[at]}' has no column {column!r} to join on; {there}")
    return Equality(owner, str(own[0]), str(own[1]), using=True)


def _column(streams: Sequence[Stream], names: Sequence[str], text: str) -> tuple[int, str]:
    """The input, by its place, and the column that ``"input.column"`` or ``"column"`` names."""
    head, dot, rest = text.partition(".")
    for at, (side, name) in enumerate(zip(streams, names, strict=True)):
        column = spelling(side.df, rest) if dot and head.lower() == name.lower() else None
        if column is not None:
            return at, column
    columns = [spelling(side.df, text) for side in streams]
    found = [(at, column) for at, column in enumerate(columns) if column is not None]
    if len(found) == 1:
        return found[0]
    if found:
        can_be = " and ".join(f"{names[at]}.{column}" for at, column in found)
        raise DescriptionError(f"on= names {text!r}, which can be {can_be}")
    there = ", ".join(f"{name}.{c}" for name, side in zip(names, streams, strict=True) for c in side.df.columns)
    raise DescriptionError(f"on= names {text!r}; there are {there}")


def _is_pair(item: object) -> bool:
    return isinstance(item, tuple) and len(item) == 2 and all(isinstance(part, str) for part in item)
