"""DataFrames in, a DataFrame out: the joins as functions from streaming DataFrames to their changelog."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Unpack, cast

from pyspark.sql import DataFrame

from gpu_ops.descriptions.join import Join, JoinType
from gpu_ops.descriptions.keys import On, normalize_on
from gpu_ops.descriptions.latest import Keep, Latest
from gpu_ops.errors import DescriptionError
from gpu_ops.query.catalyst import ansi_mode
from gpu_ops.spark.api.checks import check_frames, run, settled, spelled
from gpu_ops.spark.api.options import ChangelogOptions, How, JoinOptions, SemiJoinOptions, check_options
from gpu_ops.spark.api.streams import Stream, as_input, as_stream, resolve, resolve_key
from gpu_ops.spark.api.where import engine_condition


def join(
    left: DataFrame | Stream,
    right: DataFrame | Stream,
    on: On = None,
    how: How = "inner",
    **options: Unpack[JoinOptions],
) -> DataFrame:
    """Joins two streaming DataFrames; the result is their changelog, a streaming DataFrame.

    Two static ones are joined at once, into a static DataFrame of insertions.

    Args:
        left: the left input.
        right: the right input.
        on: ``"k"``, ``["k", ("left_k", "right_k")]``, or None for no equality column.
        how: ``inner``, ``left``, ``right``, ``full``, ``semi`` or ``anti``.
        options: ``where, emit, state, backend, null_safe, suffixes, partitions, name, backlog``; see
            `gpu_ops.spark.api.options.JoinOptions` and what it is made of.

    Returns:
        A streaming DataFrame, or a static one; first column ``row_kind``, then the columns of the join.

    Raises:
        TypeError: no such option.
        DescriptionError: a join that cannot be.
        NotBuiltError: Spark Connect.
        StateError: the state folder belongs to something else.
    """
    check_options("join", options, JoinOptions)
    return _join(left, right, on, how, options)


def semi_join(
    left: DataFrame | Stream, right: DataFrame | Stream, on: On = None, **options: Unpack[SemiJoinOptions]
) -> DataFrame:
    """The rows of the left input with at least one match (``EXISTS``, ``IN``); arguments as in `join`."""
    check_options("semi_join", options, SemiJoinOptions)
    return _join(left, right, on, "semi", options)


def anti_join(
    left: DataFrame | Stream,
    right: DataFrame | Stream,
    on: On = None,
    *,
    null_aware: bool = False,
    **options: Unpack[SemiJoinOptions],
) -> DataFrame:
    """The rows of the left input without a match (``NOT EXISTS``); arguments as in `join`.

    Args:
        left: the left input.
        right: the right input.
        on: as in `join`.
        null_aware: ``NOT IN`` instead: a null on the right suppresses every row.
        options: as in `join`, without ``suffixes``.
    """
    check_options("anti_join", options, SemiJoinOptions)
    return _join(left, right, on, "anti", options, null_aware=null_aware)


def latest(
    input: DataFrame | Stream,  # noqa: A002 - what it is called everywhere else in this pack
    key: str | Sequence[str] | None = None,
    *,
    order_by: str | None = None,
    keep: Keep = "last",
    **options: Unpack[ChangelogOptions],
) -> DataFrame:
    """The latest row of each key of a stream of upserts (and deletes), as a changelog with retractions.

    A join distributes an upsert input by its unique key, as the old and the new row of a key have to meet; where the
    join goes by other columns, all its rows are in one partition. This gives the old row with the new one, so that
    the join is distributed by its own columns::

        orders = gpu_ops.latest(orders, key="id", state=...)
        gpu_ops.join(orders, prices, on="item", state=...)

    Args:
        input: a streaming DataFrame or a `stream`; its ``row_kind`` tells deletes. Within a micro-batch
            ``sequence_by`` tells which change is the last, between micro-batches the later one is.
        key: the columns that identify a row; by default the stream's ``unique_key``.
        order_by: the column by which one row is later than another, whenever they arrive; of equal ones the row that
            arrives later is. By default the order in which they arrive.
        keep: ``last``, or ``first`` for the first row of each key, which later ones do not replace (with ``order_by``
            an earlier one does). This and ``order_by`` are for insertions only, without ``row_kind``.
        options: ``emit, state, backend, partitions, name, backlog``, as in `join`; no ``emit="at_end"``.

    Returns:
        A streaming DataFrame: ``row_kind``, then the input's columns; its unique key is ``key``.

    Raises:
        TypeError: no such option.
        DescriptionError: no such column, no key, a static DataFrame, or row kinds with ``order_by`` or ``first``.
        NotBuiltError: Spark Connect.
        StateError: the state folder belongs to something else.
    """
    check_options("latest", options, ChangelogOptions)
    source = as_stream(input, "the input")
    label = source.name or "input"
    if check_frames([source.df]):
        raise DescriptionError(f"input '{label}': latest() takes a stream; a static DataFrame has no later rows")
    if source.event_time is not None:
        raise DescriptionError(f"input '{label}': event_time= is for gpu_ops.interval_join()")
    if key is not None:
        columns = (key,) if isinstance(key, str) else tuple(key)
        unique = tuple(resolve(source.df, column, label, "key") for column in columns)
        source = dataclasses.replace(source, unique_key=unique)
    by = None if order_by is None else resolve(source.df, order_by, label, "order_by")
    described = Latest(as_input(source, "input", derive=False), options.get("emit", "per_batch"), by, keep)
    return run(described, [source], options, stacklevel=2)


def _join(
    left: DataFrame | Stream,
    right: DataFrame | Stream,
    on: On,
    how: str,
    options: Mapping[str, Any],
    *,
    null_aware: bool = False,
) -> DataFrame:
    given = as_stream(left, "the left input"), as_stream(right, "the right input")
    sides, static = settled(given, ("left", "right"), options.get("state"))
    names = [side.name or default for side, default in zip(sides, ("left", "right"), strict=True)]
    for name, side in zip(names, sides, strict=True):
        if side.event_time is not None:
            raise DescriptionError(f"input '{name}': event_time= is for gpu_ops.interval_join()")
    where, (first, second), _ = engine_condition(options.get("where"), sides, names)
    sides = first, second
    description = Join(
        how=cast("JoinType", spelled(how)),
        left=as_input(first, "left"),
        right=as_input(second, "right"),
        keys=tuple(resolve_key(key, sides) for key in normalize_on(on, null_safe=options.get("null_safe", False))),
        where=where,
        emit="at_end" if static else options.get("emit", "per_batch"),
        null_aware=null_aware,
        suffixes=options.get("suffixes"),
        ansi=ansi_mode(first.df.sparkSession),
    )
    return run(description, sides, options, stacklevel=3)
