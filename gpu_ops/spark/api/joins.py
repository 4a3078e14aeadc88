"""DataFrames in, a DataFrame out: the joins as functions from streaming DataFrames to their changelog."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Unpack

from pyspark.sql import DataFrame
from pyspark.sql import types as st

from gpu_ops.descriptions.by_time.intervals import Duration, parse_bound
from gpu_ops.descriptions.groups.latest import Keep, Latest
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.join import Join
from gpu_ops.descriptions.keys import Key, On, normalize_on
from gpu_ops.descriptions.lookup_join import LookupJoin
from gpu_ops.errors import DescriptionError
from gpu_ops.spark.api.checks import check_frames, run, settled, two_sided
from gpu_ops.spark.api.options import (
    ChangelogOptions,
    How,
    JoinOptions,
    SemiJoinOptions,
    TwoSidedOptions,
    check_options,
)
from gpu_ops.spark.api.streams import Stream, as_input, as_stream, refuse_event_time, resolve, resolve_all, two_streams
from gpu_ops.spark.datatypes import arrow_schema, spelling
from gpu_ops.spark.driver.workers import make_importable
from gpu_ops.spark.plan.build import output_type
from gpu_ops.spark.plan.column_metadata import changelog_columns
from gpu_ops.spark.tasks.functions import applied_schema
from gpu_ops.spark.tasks.lookup import Function, Lookups, LookupTask


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
    unavailable: str | None = None,
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
        unavailable: a column with lists of columns' names, as `read_kafka` has it with ``unavailable=``: of these
            columns a change does not bring the value, and the row keeps the one that it had. The result does not have
            that column. A change without a row from before is a bad row.
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
    source = as_stream(input, "the input", "input")
    label = source.label
    if check_frames([source.df]):
        raise DescriptionError(f"input '{label}': latest() takes a stream; a static DataFrame has no later rows")
    refuse_event_time(source)
    if key is not None:
        source = dataclasses.replace(source, unique_key=resolve_all(source, key, "key"))
    if options.get("emit") == "at_end":
        raise DescriptionError("emit='at_end' has no place here: a join of the same input with it folds upserts, too")
    by = None if order_by is None else resolve(source.df, order_by, label, "order_by")
    told = None if unavailable is None else resolve(source.df, unavailable, label, "unavailable")
    described = Latest(as_input(source, derive=False), options.get("emit", "per_batch"), by, keep, told)
    return run(described, [source], options, stacklevel=2)


class LookupJoinOptions(TwoSidedOptions, total=False):
    """Those that a lookup join shares with others.

    Attributes:
        backlog: as in `ChangelogOptions`: left rows wait until the table's history is there.
        wait_for_table: the same, of a table that is a stream; a static one is there before the first left row anyway.
    """

    backlog: bool
    wait_for_table: bool


def lookup_join(
    left: DataFrame | Stream,
    table: DataFrame | Stream,
    on: On,
    *,
    how: Literal["inner", "left"] = "inner",
    **options: Unpack[LookupJoinOptions],
) -> DataFrame:
    """Enriches each left row with the rows of a table as it is when the row comes; the result is append-only.

    ``left JOIN table FOR SYSTEM_TIME AS OF PROCTIME()``, after Flink's processing-time temporal join: a left row comes
    out once, with the rows that the table has after its changes of the same micro-batch, and later changes of the table
    touch nothing that came out. The left input is not kept::

        gpu_ops.lookup_join(orders, spark.read.parquet("customers"), on="customer_id", how="left", state=...)

    Args:
        left: the left input; its rows are insertions.
        table: a static DataFrame; with `stream` (``refresh="1 hour"``) one that is read again; or a changelog. Unlike
            Flink's it may have several rows of a key: each gives one. `lookup` asks a function instead.
        on: as in `join`; at least one column.
        how: ``"inner"``, or ``"left"`` to keep rows that find nothing, with nulls.
        options: ``where, state, backend, null_safe, suffixes, partitions, name``, as in `join`, and ``backlog``, or
            ``wait_for_table``: left rows wait while runs with ``trigger(availableNow=True)`` take the history of a
            table that is a stream in.

    Returns:
        A streaming DataFrame: ``row_kind``, always ``+I``, and the columns of the join. Two static DataFrames are
        joined at once.

    Raises:
        TypeError: no such option.
        DescriptionError: a join that cannot be.
        NotBuiltError: Spark Connect.
        StateError: the state folder belongs to something else.
    """
    check_options("lookup_join", options, LookupJoinOptions)
    if options.get("wait_for_table") and as_stream(table, "the table", "right").df.isStreaming:
        options["backlog"] = True
    return _join(left, table, on, how, options, kind=LookupJoin)


def lookup(
    left: DataFrame | Stream,
    function: Function,
    on: On,
    *,
    schema: st.StructType | str,
    how: Literal["inner", "left"] = "inner",
    suffixes: tuple[str, str] | None = None,
    cache: Duration | None = None,
    cache_keys: int = 100_000,
    retries: int = 3,
) -> DataFrame:
    """A lookup join with a table that a function knows: a database, a feature store, a service.

    Args:
        left: the left input; its rows are insertions.
        function: takes an Arrow table of keys, distinct and without nulls, under the names that they have in
            ``schema``, and gives the rows that have one of them. It is called in Spark's tasks, once per micro-batch
            and partition, with the keys whose answers are not cached.
        on: as in `join`; the right ones are columns of ``schema``, of the types of the left ones.
        schema: of what it gives; a schema or its DDL text.
        how: as in `lookup_join`.
        suffixes: for column names that both have.
        cache: how long an answer is good: ``"10 minutes"``; by default each micro-batch asks anew.
        cache_keys: how many keys' answers a Python worker keeps, the newest.
        retries: how often a call that fails is repeated, after 0.1 s and then twice as long each time.

    Returns:
        A DataFrame, streaming if ``left`` is: ``row_kind``, always ``+I``, and the columns of the join.

    Raises:
        DescriptionError: a join that cannot be.
    """
    side = as_stream(left, "the left input", "left")
    check_frames([side.df])
    if not callable(function):
        raise DescriptionError(f"lookup() takes a function of an Arrow table, not {type(function).__name__}")
    keys = normalize_on(on)
    table = applied_schema(schema, "schema")
    described = LookupJoin(
        how=how,
        left=as_input(side),
        right=Input("right", arrow_schema(table, "right")),
        keys=tuple(Key(spelling(side.df, key.left) or key.left, key.right, key.null_safe, key.using) for key in keys),
        suffixes=suffixes,
    )
    name = described.left.name
    if described.left.row_kind is not None:
        raise DescriptionError(f"input '{name}' has row kinds: the left input of lookup() is insert-only")
    for key in described.keys:
        kinds = described.left.schema.field(key.left).type, described.right.schema.field(key.right).type
        if kinds[0] != kinds[1] or key.null_safe:
            raise DescriptionError(
                f"lookup() takes keys of one type, and nulls find nothing: {name}.{key.left} is {kinds[0]}, "
                f"{key.right!r} of schema= {kinds[1]}"
            )
    if retries < 0 or cache_keys < 1:
        raise DescriptionError(f"retries={retries}, cache_keys={cache_keys}: not below 0, and at least 1")
    make_importable(side.df.sparkSession)
    lookups = Lookups(function, 0.0 if cache is None else parse_bound(cache) / 1e3, cache_keys, retries)
    token = uuid.uuid4().hex
    found = side.df.mapInArrow(
        LookupTask(described.to_json(), lookups, token), output_type(described, [side.df.schema, table])
    )
    return found.select(*changelog_columns(described, "lookup", token[:12]))


def _join(
    left: DataFrame | Stream,
    right: DataFrame | Stream,
    on: On,
    how: str,
    options: Mapping[str, Any],
    *,
    null_aware: bool = False,
    kind: type[Join] = Join,
) -> DataFrame:
    sides, static = settled(two_streams(left, right), options.get("state"))
    for side in sides:
        refuse_event_time(side)
    emit = "at_end" if static else options.get("emit", "per_batch")
    description, sides, _ = two_sided(kind, how, on, sides, options, emit=emit, null_aware=null_aware)
    return run(description, sides, options, stacklevel=3)
