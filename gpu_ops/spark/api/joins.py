"""DataFrames in, a DataFrame out: the joins as functions from streaming DataFrames to their changelog."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from pyspark.sql import DataFrame

from gpu_ops.backends import Backend
from gpu_ops.descriptions.description import Emit
from gpu_ops.descriptions.join import Join, JoinType
from gpu_ops.descriptions.keys import On, normalize_on
from gpu_ops.errors import DescriptionError
from gpu_ops.query.where import engine_condition, without_hidden
from gpu_ops.spark.api.checks import MemoryOnlyStateWarning, check_frames, condition_session, place, spelled
from gpu_ops.spark.api.streams import Stream, as_input, as_stream, resolve_key, stream
from gpu_ops.spark.plan.bounded import build_bounded
from gpu_ops.spark.plan.build import build
from gpu_ops.state.address import Location

__all__ = ["MemoryOnlyStateWarning", "Stream", "anti_join", "join", "semi_join", "stream"]


def join(
    left: DataFrame | Stream,
    right: DataFrame | Stream,
    on: On = None,
    how: str = "inner",
    *,
    where: str | None = None,
    emit: Emit = "per_batch",
    state: Location | None = None,
    backend: Backend = "auto",
    null_safe: bool | Sequence[bool] = False,
    suffixes: tuple[str, str] | None = None,
    partitions: int | None = None,
    name: str | None = None,
    backlog: bool = False,
) -> DataFrame:
    """Joins two streaming DataFrames; the result is their changelog, a streaming DataFrame.

    Two static ones are joined at once, into a static DataFrame of insertions.

    Args:
        left: the left input.
        right: the right input.
        on: ``"k"``, ``["k", ("left_k", "right_k")]``, or None for no equality column.
        how: ``inner``, ``left``, ``right``, ``full``, ``semi`` or ``anti``.
        where: residual condition, SQL text over both inputs' columns.
        emit: ``"per_batch"`` (net changes), ``"per_event"`` (as Flink emits them), or ``"at_end"``: nothing, until
            `finish` gives the result.
        state: a folder of its own for the state; without it the state lives in memory only.
        backend: ``"auto"``, ``"cpu"`` or ``"gpu"``.
        null_safe: whether null keys match (``IS NOT DISTINCT FROM``), for all keys or one by one.
        suffixes: for column names that both inputs have.
        partitions: how many; by default `spark.sql.shuffle.partitions`, but not more than the
            application has cores, or what an existing state folder is cut into.
        name: of the join, in ``query.lastProgress["observedMetrics"]``, too; by default ``join_1`` and so on.
        backlog: a run with ``trigger(availableNow=True)`` takes its input in silently; the first micro-batch of a
            run with another trigger says the net result, and the join is live from then on.

    Returns:
        A streaming DataFrame, or a static one; first column ``row_kind``, then the columns of the join.

    Raises:
        DescriptionError: a join that cannot be.
        NotBuiltError: a streaming and a static DataFrame, Spark Connect.
        StateError: the state folder belongs to something else.
    """
    return _join(
        left, right, on, how, where=where, emit=emit, state=state, backend=backend, null_safe=null_safe,
        suffixes=suffixes, partitions=partitions, name=name, backlog=backlog,
    )  # fmt: skip


def semi_join(
    left: DataFrame | Stream,
    right: DataFrame | Stream,
    on: On = None,
    *,
    where: str | None = None,
    emit: Emit = "per_batch",
    state: Location | None = None,
    backend: Backend = "auto",
    null_safe: bool | Sequence[bool] = False,
    partitions: int | None = None,
    name: str | None = None,
    backlog: bool = False,
) -> DataFrame:
    """The rows of the left input with at least one match (``EXISTS``, ``IN``); arguments as in `join`."""
    return _join(
        left, right, on, "semi", where=where, emit=emit, state=state, backend=backend, null_safe=null_safe,
        partitions=partitions, name=name, backlog=backlog,
    )  # fmt: skip


def anti_join(
    left: DataFrame | Stream,
    right: DataFrame | Stream,
    on: On = None,
    *,
    null_aware: bool = False,
    where: str | None = None,
    emit: Emit = "per_batch",
    state: Location | None = None,
    backend: Backend = "auto",
    null_safe: bool | Sequence[bool] = False,
    partitions: int | None = None,
    name: str | None = None,
    backlog: bool = False,
) -> DataFrame:
    """The rows of the left input without a match (``NOT EXISTS``); arguments as in `join`.

    Args:
        left: the left input.
        right: the right input.
        on: as in `join`.
        null_aware: ``NOT IN`` instead: a null on the right suppresses every row.
        where: as in `join`.
        emit: as in `join`.
        state: as in `join`.
        backend: as in `join`.
        null_safe: as in `join`.
        partitions: as in `join`.
        name: as in `join`.
        backlog: as in `join`.
    """
    return _join(
        left, right, on, "anti", null_aware=null_aware, where=where, emit=emit, state=state, backend=backend,
        null_safe=null_safe, partitions=partitions, name=name, backlog=backlog,
    )  # fmt: skip


def _join(
    left: DataFrame | Stream,
    right: DataFrame | Stream,
    on: On,
    how: str,
    *,
    where: str | None,
    emit: Emit,
    state: Location | None,
    backend: Backend,
    null_safe: bool | Sequence[bool],
    partitions: int | None,
    name: str | None,
    backlog: bool,
    null_aware: bool = False,
    suffixes: tuple[str, str] | None = None,
) -> DataFrame:
    sides = as_stream(left, "the left input"), as_stream(right, "the right input")
    static = check_frames([side.df for side in sides], ["the left input", "the right input"])
    for which, side in zip(("left", "right"), sides, strict=True):
        if side.event_time is not None:
            raise DescriptionError(f"input '{side.name or which}': event_time= is for gpu_ops.interval_join()")
    names = [side.name or default for side, default in zip(sides, ("left", "right"), strict=True)]
    where, (first, second), _ = engine_condition(where, sides, names)
    sides = first, second
    inputs = [as_input(side, default) for side, default in zip(sides, ("left", "right"), strict=True)]
    description = Join(
        how=cast("JoinType", spelled(how)),
        left=inputs[0],
        right=inputs[1],
        keys=tuple(resolve_key(key, sides) for key in normalize_on(on, null_safe=null_safe)),
        where=where,
        emit="at_end" if static else emit,
        null_aware=null_aware,
        suffixes=suffixes,
        **condition_session(sides[0].df.sparkSession),
    )
    placed = place(
        description, sides, name=name, state=state, backend=backend, partitions=partitions, backlog=backlog,
        stacklevel=3,
    )  # fmt: skip
    return without_hidden((build_bounded if static else build)(description, [side.df for side in sides], placed))
