"""The temporal join as a function from streaming DataFrames to their changelog."""

from __future__ import annotations

from typing import Literal, Unpack

from pyspark.sql import DataFrame

from gpu_ops.descriptions.by_time import TemporalJoin
from gpu_ops.descriptions.keys import On
from gpu_ops.descriptions.times import Duration, Late, parse_bound
from gpu_ops.errors import DescriptionError
from gpu_ops.spark.api.by_time.interval import timed
from gpu_ops.spark.api.checks import run, settled, two_sided
from gpu_ops.spark.api.options import TwoSidedOptions, check_options
from gpu_ops.spark.api.streams import Stream, two_streams


def temporal_join(
    left: DataFrame | Stream,
    right: DataFrame | Stream,
    on: On,
    *,
    time: tuple[str, str] | None = None,
    how: Literal["inner", "left"] = "inner",
    late: Late = "join",
    ttl: Duration | None = None,
    heartbeat: Duration | None = None,
    **options: Unpack[TwoSidedOptions],
) -> DataFrame:
    """Joins each left row with the version of the right input that was valid at the row's time.

    ``left JOIN right FOR SYSTEM_TIME AS OF left.time``, after Flink's event-time temporal join. The right input is a
    versioned table: each of its rows is valid for its key from its own time until that of the next one, a
    deletion (``-D``) ends what was valid, and ``-U`` means nothing. A left row comes out once, when the
    watermark passes its time, and nothing changes it any more. Two static DataFrames are joined at once.

    Args:
        left: the left input; its rows are insertions.
        right: the versioned table: a changelog, upserts, or insertions.
        on: as in `join`: columns that identify a row of the versioned table.
        time: the event-time columns of left and right; may be left out where ``withWatermark`` or `stream` say them.
        how: ``"inner"``, or ``"left"`` to keep rows without a valid version, with nulls.
        late: what happens to left rows below the watermark: ``"join"`` as in Flink (they meet what is still kept, at
            the next watermark), ``"drop"``, or ``"tag"``: they come out with the row kind ``late``. Late versions are
            always taken: they count for rows that wait.
        ttl: Flink's ``table.exec.state.ttl``: a key for which nothing comes so long, by the clock, is forgotten with
            all its versions, and with left rows that wait, which then never come out; half as much later at the latest.
        heartbeat: begin a micro-batch at least so often, so that rows come out when none come in.
        options: ``where, state, backend, null_safe, suffixes, partitions, name``, as in `join`.

    Returns:
        A streaming DataFrame, or a static one: ``row_kind``, always ``+I``, and the columns of the join.

    Raises:
        TypeError: no such option.
        DescriptionError: a join that cannot be.
        NotBuiltError: Spark Connect.
        StateError: the state folder belongs to something else.
    """
    check_options("temporal_join", options, TwoSidedOptions)
    sides, static = settled(two_streams(left, right), options.get("state"))
    period = None if heartbeat is None else parse_bound(heartbeat)
    if period is not None and (static or period < 1):
        raise DescriptionError(f"heartbeat={heartbeat!r}; it is at least a millisecond, and for streams")
    sides, upstream = timed(sides, time)
    description, sides, _ = two_sided(
        TemporalJoin,
        how,
        on,
        sides,
        options,
        derive=False,
        emit="at_end" if static else "at_watermark",
        late=late,
        ttl_ms=None if ttl is None else parse_bound(ttl),
    )
    return run(description, sides, options, upstream=upstream, heartbeat_ms=period)
