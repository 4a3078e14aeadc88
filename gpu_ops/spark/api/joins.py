"""DataFrames in, a DataFrame out: the joins as functions from streaming DataFrames to their changelog."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack, cast

from pyspark.sql import DataFrame

from gpu_ops.descriptions.join import Join, JoinType
from gpu_ops.descriptions.keys import On, normalize_on
from gpu_ops.errors import DescriptionError
from gpu_ops.query.catalyst import ansi_mode
from gpu_ops.spark.api.checks import check_frames, run, spelled
from gpu_ops.spark.api.options import How, JoinOptions, SemiJoinOptions, check_options
from gpu_ops.spark.api.streams import Stream, as_input, as_stream, resolve_key
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
        NotBuiltError: a streaming and a static DataFrame, Spark Connect.
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


def _join(
    left: DataFrame | Stream,
    right: DataFrame | Stream,
    on: On,
    how: str,
    options: Mapping[str, Any],
    *,
    null_aware: bool = False,
) -> DataFrame:
    sides = as_stream(left, "the left input"), as_stream(right, "the right input")
    static = check_frames([side.df for side in sides], ["the left input", "the right input"])
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
