"""The first n rows of each group, as users call it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from pyspark.sql import DataFrame

from gpu_ops.descriptions.groups import Top, parse_order
from gpu_ops.spark.api.checks import check_frames, run
from gpu_ops.spark.api.options import ChangelogOptions, check_options
from gpu_ops.spark.api.streams import Stream, as_input, as_stream, refuse_event_time, resolve_all


def top(
    input: DataFrame | Stream,  # noqa: A002 - what it is called everywhere else in this pack
    by: str | Sequence[str] = (),
    *,
    order_by: str | Sequence[str],
    n: int = 1,
    number: str | None = None,
    **options: Unpack[ChangelogOptions],
) -> DataFrame:
    """The first n rows of each group of a stream, as a changelog: a top-N.

    ``ROW_NUMBER() OVER (PARTITION BY region ORDER BY amount DESC) <= 3`` over whatever changes::

        gpu_ops.top(orders, by="region", order_by="amount DESC", n=3, state=...)

    Args:
        input: a DataFrame or a `stream`; also the changelog of a join.
        by: the columns that make a group (null is a value of its own); none for one group in all.
        order_by: ``"amount DESC, id"``, or a list of such terms; nulls as in Spark: first if ascending, last if
            descending, unless ``NULLS FIRST`` or ``NULLS LAST`` is said. Of equal rows the one that arrived earlier
            comes first.
        n: how many rows of each group.
        number: the name of a further column with the number of a row in its group, from 1. Then a row in front that
            comes or goes changes all rows behind it.
        options: ``emit, state, backend, partitions, name, backlog``, as in `join`.

    Returns:
        ``row_kind``, then the input's columns: a static DataFrame for a static input, else a streaming one. The unique
        key is the input's.

    Raises:
        TypeError: no such option.
        DescriptionError: no such column, no order, or a TTL.
        NotBuiltError: Spark Connect.
        StateError: the state folder belongs to something else.
    """
    check_options("top", options, ChangelogOptions)
    source = as_stream(input, "the input", "input")
    emit = "at_end" if check_frames([source.df]) else options.get("emit", "per_batch")
    refuse_event_time(source)
    named, order = resolve_all(source, by, "by"), parse_order(order_by)
    columns = resolve_all(source, [one.column for one in order], "order_by")
    order = tuple(one._replace(column=column) for one, column in zip(order, columns, strict=True))
    described = Top(as_input(source), named, order, n, emit, number)
    return run(described, [source], options, stacklevel=2)
