"""The ASOF join as a function of DataFrames."""

from __future__ import annotations

from typing import Literal, Unpack

from pyspark.sql import DataFrame

from gpu_ops.descriptions.by_time import Asof, AsofJoin, Direction
from gpu_ops.descriptions.keys import On
from gpu_ops.descriptions.times import Duration, parse_bound
from gpu_ops.errors import DescriptionError
from gpu_ops.spark.api.by_time.interval import timed
from gpu_ops.spark.api.checks import run, settled, two_sided
from gpu_ops.spark.api.options import ChangelogOptions, KeyOptions, check_options
from gpu_ops.spark.api.streams import Stream, two_streams


class AsofJoinOptions(KeyOptions, ChangelogOptions, total=False):
    """Those that an ASOF join shares with others.

    Attributes:
        suffixes: for column names that both inputs have.
    """

    suffixes: tuple[str, str] | None


def asof_join(
    left: DataFrame | Stream,
    right: DataFrame | Stream,
    on: On = None,
    *,
    time: str | tuple[str, str] | None = None,
    direction: Direction = "backward",
    tolerance: Duration | None = None,
    allow_exact_matches: bool = True,
    how: Literal["left", "inner"] = "left",
    **options: Unpack[AsofJoinOptions],
) -> DataFrame:
    """Joins each left row with the right row of its key that is nearest in time; the result is a changelog.

    Names and meaning are those of pandas' ``merge_asof`` and polars' ``join_asof``. A match comes at once, and is
    retracted and replaced when a better one comes, or when the matched row is deleted or changed. Two static DataFrames
    are joined at once, into a static DataFrame of insertions.

    Args:
        left: the left input; it may be a changelog.
        right: the right input, likewise. Of its rows of one time the one with the greatest ``sequence_by`` counts, else
            the one that came last.
        on: as in `join`; None for one group of all rows.
        time: the event-time columns of left and right, or one name for both; may be left out where ``withWatermark`` or
            `stream` say them. Timestamps, or bigints with milliseconds since the epoch. A row without a time matches
            nothing. Of times of one name the left's is shown, unless there are suffixes.
        direction: ``"backward"``: the last right row at or before the left row's time; ``"forward"``: the first at or
            after it; ``"nearest"``: whichever is nearer, the earlier one if they are as near.
        tolerance: how far apart the times may be, inclusive: ``"1 second"``, milliseconds or a timedelta.
        allow_exact_matches: whether a right row of just the left row's time matches.
        how: ``"left"``, or ``"inner"`` to leave out rows without a match.
        options: ``emit, state, backend, null_safe, suffixes, partitions, name, backlog``, as in `join`; and
            ``emit="at_watermark"``: each row once, when the watermark has passed all that it could meet instead; both
            inputs only grow.

    Returns:
        A streaming DataFrame, or a static one; first column ``row_kind``, then the columns of the join.

    Raises:
        TypeError: no such option.
        DescriptionError: a join that cannot be.
        NotBuiltError: Spark Connect.
        StateError: the state folder belongs to something else.
    """
    check_options("asof_join", options, AsofJoinOptions)
    sides, static = settled(two_streams(left, right), options.get("state"))
    both = (time, time) if isinstance(time, str) else time
    if both is not None and not (isinstance(both, tuple) and len(both) == 2 and all(isinstance(c, str) for c in both)):
        raise DescriptionError(f"time={time!r}; it is the event-time columns of left and right, or one name for both")
    sides, upstream = timed(sides, both)
    description, sides, _ = two_sided(
        AsofJoin,
        how,
        on,
        sides,
        options,
        emit="at_end" if static else options.get("emit", "per_batch"),
        asof=Asof(direction, None if tolerance is None else parse_bound(tolerance), allow_exact_matches),
    )
    return run(description, sides, options, upstream=upstream if description.by_event_time else (None, None))
