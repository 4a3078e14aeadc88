"""Co-groups as a function over DataFrames: they only have a result once their input has ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as f
from pyspark.sql import types as st

from gpu_ops.descriptions.co_group import CoGroup
from gpu_ops.descriptions.keys import On
from gpu_ops.errors import DescriptionError
from gpu_ops.spark.api.checks import run, settled
from gpu_ops.spark.api.options import KeyOptions, check_options
from gpu_ops.spark.api.streams import Stream, as_input, refuse_event_time, resolve_keys, two_streams
from gpu_ops.spark.tasks.functions import Grouped


def co_group(
    left: DataFrame | Stream,
    right: DataFrame | Stream,
    on: On,
    apply: Callable[[pa.Table, pa.Table], pa.Table],
    schema: st.StructType | str,
    **options: Unpack[KeyOptions],
) -> DataFrame:
    """Gives a function both inputs' rows of the same keys, once they have ended; retractions are honoured.

    The function runs in Spark's tasks, once for many keys: it is given all rows of these keys, sorted by key, equal
    keys in the order they came. Streams have no output: run the query to its end, and `finish` gives the result.

    Args:
        left: the left input.
        right: the right input.
        on: as in `join`; at least one column.
        apply: takes the left's and the right's rows as Arrow tables (either may have none), gives a table.
        schema: of what it gives; a schema or its DDL text.
        options: ``state, backend, null_safe, partitions, name``, as in `join`; streams need ``state``. Rows with a
            null key are in no group, unless ``null_safe`` says so.

    Returns:
        What the function gives: a static DataFrame for static inputs; for streams a streaming one that never has a
        row, to be written to the sink ``noop``.

    Raises:
        TypeError: no such option.
        DescriptionError: no such columns, no function, or streams without ``state=``.
        NotBuiltError: Spark Connect.
        StateError: the state folder belongs to something else.
    """
    check_options("co_group", options, KeyOptions)
    given = two_streams(left, right)
    function = Grouped.of(apply, schema)
    sides, static = settled(given, options.get("state"))
    for side in sides:
        refuse_event_time(side)
        if side.bad_rows == "tag":
            raise DescriptionError(f"input '{side.name}': bad_rows='tag' has no place in a function's result")
    described = CoGroup(as_input(sides[0]), as_input(sides[1]), resolve_keys(on, sides, options))
    result = run(described, sides, options, function=function)
    if static:
        return result
    # without a row ever, so that any column will do
    return result.select(*(f.lit(None).cast(x.dataType).alias(x.name) for x in function.schema.fields))
