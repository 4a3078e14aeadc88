"""DataFrames in, a DataFrame out: the joins as functions from streaming DataFrames to their changelog."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from typing import Final, cast

from pyspark.sql import DataFrame

from gpu_ops.backends import Backend
from gpu_ops.errors import DescriptionError, NotBuiltError, StateError
from gpu_ops.joins import Emit, Join, JoinType, On, normalize_on
from gpu_ops.spark.directory import Directory, folder
from gpu_ops.spark.lanes import collated_key
from gpu_ops.spark.plan import build, plans_of
from gpu_ops.spark.streams import Stream, as_input, as_stream, resolve_key, stream
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import Manifest

_SPELLINGS: Final = {
    "outer": "full", "fullouter": "full", "leftouter": "left", "rightouter": "right",
    "leftsemi": "semi", "leftanti": "anti",
}  # fmt: skip
"""What Spark also calls them, underscores left out."""

__all__ = ["MemoryOnlyStateWarning", "Stream", "anti_join", "join", "semi_join", "stream"]

_numbers = itertools.count(1)


class MemoryOnlyStateWarning(UserWarning):
    """A join without ``state=``: it cannot resume from a checkpoint."""


def join(
    left: DataFrame | Stream,
    right: DataFrame | Stream,
    on: On = None,
    how: str = "inner",
    *,
    where: str | None = None,
    emit: Emit = "per_batch",
    state: str | None = None,
    backend: Backend = "auto",
    null_safe: bool | Sequence[bool] = False,
    suffixes: tuple[str, str] | None = None,
    partitions: int | None = None,
    name: str | None = None,
) -> DataFrame:
    """Joins two streaming DataFrames; the result is their changelog, a streaming DataFrame.

    Args:
        left: the left input.
        right: the right input.
        on: ``"k"``, ``["k", ("left_k", "right_k")]``, or None for no equality column.
        how: ``inner``, ``left``, ``right``, ``full``, ``semi`` or ``anti``.
        where: residual condition, SQL text over both inputs' columns.
        emit: ``"per_batch"`` (net changes) or ``"per_event"`` (as Flink emits them).
        state: a folder of its own for the state; without it the state lives in memory only.
        backend: ``"auto"``, ``"cpu"`` or ``"gpu"``.
        null_safe: whether null keys match (``IS NOT DISTINCT FROM``), for all keys or one by one.
        suffixes: for column names that both inputs have.
        partitions: how many; by default `spark.sql.shuffle.partitions`, but not more than the
            application has cores, or what an existing state folder is cut into.
        name: of the metrics in ``query.lastProgress["observedMetrics"]``; by default ``join_1`` and so on.

    Returns:
        A streaming DataFrame; first column ``row_kind``, then the columns of the join.

    Raises:
        DescriptionError: a join that cannot be.
        NotBuiltError: static DataFrames, Spark Connect, a cluster.
        StateError: the state folder belongs to something else.
    """
    return _join(
        left, right, on, how, where=where, emit=emit, state=state, backend=backend, null_safe=null_safe,
        suffixes=suffixes, partitions=partitions, name=name,
    )  # fmt: skip


def semi_join(
    left: DataFrame | Stream,
    right: DataFrame | Stream,
    on: On = None,
    *,
    where: str | None = None,
    emit: Emit = "per_batch",
    state: str | None = None,
    backend: Backend = "auto",
    null_safe: bool | Sequence[bool] = False,
    partitions: int | None = None,
    name: str | None = None,
) -> DataFrame:
    """The rows of the left input with at least one match (``EXISTS``, ``IN``); arguments as in `join`."""
    return _join(
        left, right, on, "semi", where=where, emit=emit, state=state, backend=backend, null_safe=null_safe,
        partitions=partitions, name=name,
    )  # fmt: skip


def anti_join(
    left: DataFrame | Stream,
    right: DataFrame | Stream,
    on: On = None,
    *,
    null_aware: bool = False,
    where: str | None = None,
    emit: Emit = "per_batch",
    state: str | None = None,
    backend: Backend = "auto",
    null_safe: bool | Sequence[bool] = False,
    partitions: int | None = None,
    name: str | None = None,
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
    """
    return _join(
        left, right, on, "anti", null_aware=null_aware, where=where, emit=emit, state=state, backend=backend,
        null_safe=null_safe, partitions=partitions, name=name,
    )  # fmt: skip


def _join(
    left: DataFrame | Stream,
    right: DataFrame | Stream,
    on: On,
    how: str,
    *,
    where: str | None,
    emit: Emit,
    state: str | None,
    backend: Backend,
    null_safe: bool | Sequence[bool],
    partitions: int | None,
    name: str | None,
    null_aware: bool = False,
    suffixes: tuple[str, str] | None = None,
) -> DataFrame:
    sides = as_stream(left, "left"), as_stream(right, "right")
    _check_frames(sides[0].df, sides[1].df)
    inputs = [as_input(side, default) for side, default in zip(sides, ("left", "right"), strict=True)]
    spelling = how.lower().replace("_", "")
    description = Join(
        how=cast("JoinType", _SPELLINGS.get(spelling, spelling)),
        left=inputs[0],
        right=inputs[1],
        keys=tuple(resolve_key(key, sides) for key in normalize_on(on, null_safe=null_safe)),
        where=where,
        emit=emit,
        null_aware=null_aware,
        suffixes=suffixes,
    )
    if backend not in ("auto", "cpu", "gpu"):
        raise DescriptionError(f"backend={backend!r}; it is one of auto, cpu, gpu")
    collated = collated_key(description, sides[0].df.schema, sides[1].df.schema)
    if collated is not None:
        raise NotBuiltError(
            f"key {collated!r} has a collation; keys are compared by their bytes. "
            f"Join on COLLATE(LOWER({collated}), 'UTF8_BINARY') or the like"
        )
    _check_output(description, sides[0].df)
    chosen = name or f"join_{next(_numbers)}"
    _check_lineage(sides, chosen, state)
    count, reason = _choose_partitions(description, partitions, state, sides[0].df)
    if state is None:
        warnings.warn(
            f"join '{chosen}' has no state= folder: its state lives in memory only, and a restart on an "
            "old checkpoint will be refused",
            MemoryOnlyStateWarning,
            stacklevel=3,
        )
    return build(
        description,
        sides[0].df,
        sides[1].df,
        name=chosen,
        state=state,
        backend=backend,
        partitions=count,
        partitions_reason=reason,
    )


def _check_frames(left: DataFrame, right: DataFrame) -> None:
    streaming = left.isStreaming, right.isStreaming
    if streaming == (False, False):
        raise NotBuiltError("two static DataFrames: a join over bounded input is not built yet; use readStream")
    if not all(streaming):
        static = "left" if not streaming[0] else "right"
        raise NotBuiltError(
            f"the {static} input is a static DataFrame and the other one is streaming; "
            "that mixture is not built: read both with readStream"
        )
    if left.sparkSession.sparkContext is not right.sparkSession.sparkContext:
        raise DescriptionError("the inputs belong to different Spark applications")


def _check_output(description: Join, df: DataFrame) -> None:
    if str(df.sparkSession.conf.get("spark.sql.caseSensitive")).lower() == "true":
        return
    names = [c.name.lower() for c in description.output]
    for column in description.output:
        if names.count(column.name.lower()) > 1:
            raise DescriptionError(
                f"the changelog would have {column.name!r} twice (Spark does not tell case apart): "
                "rename one, or give suffixes=('_l', '_r')"
            )


def _check_lineage(sides: tuple[Stream, Stream], name: str, state: str | None) -> None:
    for plan in [p for side in sides for p in plans_of(side.df)]:
        if plan.name == name:
            raise DescriptionError(f"two joins of one query are called {name!r}; give each its own name=")
        if state is not None and plan.state is not None and folder(plan.state) == folder(state):
            raise StateError(f"state folder {state} is in use by join '{plan.name}'; give each join its own")
    if state is not None:
        user = Directory.of(sides[0].df.sparkSession).state_in_use(state)
        if user is not None:
            raise StateError(
                f"state folder {state} is in use by the running query {user}; stop it first, or give another folder"
            )


def _choose_partitions(description: Join, asked: int | None, state: str | None, df: DataFrame) -> tuple[int, str]:
    if not description.distribution:
        return 1, "one partition: no equality column that rows could be distributed by"
    if asked is not None:
        if asked < 1:
            raise DescriptionError(f"partitions={asked}; there is at least one")
        return asked, "asked for"
    manifest = None if state is None else Manifest.read(Files.at(state))
    if manifest is not None:
        return manifest.partitions, "as the state folder is cut"
    session = df.sparkSession
    shuffle = int(str(session.conf.get("spark.sql.shuffle.partitions")))
    cores = session.sparkContext.defaultParallelism
    if shuffle <= cores:
        return shuffle, "spark.sql.shuffle.partitions"
    return cores, f"one per core; spark.sql.shuffle.partitions is {shuffle}"
