"""Functions for joins of two inputs, lookups, multi-way joins and co-groups of DataFrames."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Unpack

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as f
from pyspark.sql import types as st

from gpu_ops.descriptions.arguments import check_options
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.join import CoGroup, Join, LookupJoin, join_type
from gpu_ops.descriptions.keys import Key, On, normalize_on
from gpu_ops.descriptions.multi_join import MultiJoin, MultiOn
from gpu_ops.descriptions.times import Duration, parse_bound
from gpu_ops.errors import DescriptionError
from gpu_ops.query.catalyst import ansi_mode
from gpu_ops.spark.api.apply import apply_operator, check_frames, settled, two_sided
from gpu_ops.spark.api.streams import (
    ChangelogOptions,
    JoinOptions,
    JoinTypeName,
    KeyOptions,
    SemiJoinOptions,
    Stream,
    TwoSidedOptions,
    as_input,
    as_stream,
    engine_condition,
    resolve_keys,
    two_streams,
    with_options,
)
from gpu_ops.spark.driver.executors import make_importable
from gpu_ops.spark.plan.build import output_type
from gpu_ops.spark.plan.column_metadata import changelog_columns
from gpu_ops.spark.tasks.engine import LookupFunction, Lookups, LookupTask
from gpu_ops.spark.tasks.functions import CoGroupTask, applied_schema
from gpu_ops.spark_types import arrow_schema, ignores_case, spelling


@with_options(JoinOptions)
def join(
    left: DataFrame | Stream,
    right: DataFrame | Stream,
    on: On = None,
    how: JoinTypeName = "inner",
    **options: Unpack[JoinOptions],
) -> DataFrame:
    """Joins two streaming DataFrames; the result is their changelog, a streaming DataFrame.

    Two static ones are joined at once, into a static DataFrame of insertions.

    Args:
        left: the left input.
        right: the right input.
        on: the key: ``"k"``, ``["k", ("left_k", "right_k")]``, or None for no equality column.
        how: the join type. ``"inner"``: pairs. ``"left"``, ``"right"``, ``"full"``: also unmatched rows of that input
            or of both, with nulls. ``"semi"``: the left rows with a match. ``"anti"``: the left rows without one.
        options: further options, which `gpu_ops.spark.api.streams.JoinOptions` lists.

    Returns:
        A streaming DataFrame, or a static one; first column ``row_kind``, then the columns of the join.

    Raises:
        TypeError: there is no such option.
        DescriptionError: the join is not possible.
        NotBuiltError: Spark Connect.
        StateError: the state folder belongs to something else.

    Example:
        >>> orders = spark.createDataFrame([(1, 10), (2, 20)], "id INT, amount INT")
        >>> payments = spark.createDataFrame([(1, 4), (1, 6)], "id INT, paid INT")
        >>> gpu_ops.join(orders, payments, on="id", how="left").orderBy("id", "paid").show()
        +--------+---+------+----+
        |row_kind| id|amount|paid|
        +--------+---+------+----+
        |      +I|  1|    10|   4|
        |      +I|  1|    10|   6|
        |      +I|  2|    20|NULL|
        +--------+---+------+----+
    """
    check_options(join, options, JoinOptions)
    return _join(left, right, on, how, options)


@with_options(SemiJoinOptions)
def semi_join(
    left: DataFrame | Stream, right: DataFrame | Stream, on: On = None, **options: Unpack[SemiJoinOptions]
) -> DataFrame:
    """Keeps the rows of the left input with at least one match (``EXISTS``, ``IN``).

    Args:
        left: the left input.
        right: the right input.
        on: the key, as in `join`.
        options: further options, which `gpu_ops.spark.api.streams.SemiJoinOptions` lists.

    Example:
        >>> orders = spark.createDataFrame([(1, 10), (2, 20)], "id INT, amount INT")
        >>> payments = spark.createDataFrame([(1, 4), (1, 6)], "id INT, paid INT")
        >>> gpu_ops.semi_join(orders, payments, on="id").show()
        +--------+---+------+
        |row_kind| id|amount|
        +--------+---+------+
        |      +I|  1|    10|
        +--------+---+------+
    """
    check_options(semi_join, options, SemiJoinOptions)
    return _join(left, right, on, "semi", options)


@with_options(SemiJoinOptions)
def anti_join(
    left: DataFrame | Stream,
    right: DataFrame | Stream,
    on: On = None,
    *,
    null_aware: bool = False,
    **options: Unpack[SemiJoinOptions],
) -> DataFrame:
    """Keeps the rows of the left input without a match (``NOT EXISTS``).

    Args:
        left: the left input.
        right: the right input.
        on: the key, as in `join`.
        null_aware: whether it is ``NOT IN`` instead: a null on the right suppresses every row.
        options: further options, which `gpu_ops.spark.api.streams.SemiJoinOptions` lists.

    Example:
        >>> orders = spark.createDataFrame([(1, 10), (2, 20)], "id INT, amount INT")
        >>> payments = spark.createDataFrame([(1, 4), (1, 6)], "id INT, paid INT")
        >>> gpu_ops.anti_join(orders, payments, on="id").show()
        +--------+---+------+
        |row_kind| id|amount|
        +--------+---+------+
        |      +I|  2|    20|
        +--------+---+------+
    """
    check_options(anti_join, options, SemiJoinOptions)
    return _join(left, right, on, "anti", options, null_aware=null_aware)


class LookupJoinOptions(TwoSidedOptions, total=False):
    """The options that a lookup join shares with other operators.

    Attributes:
        backlog: whether left rows wait while runs with ``trigger(availableNow=True)`` take in the table's history.
        wait_for_table: the same for a table that is a stream; a static one is complete before the first left row
            anyway.
    """

    backlog: bool
    wait_for_table: bool


@with_options(LookupJoinOptions)
def lookup_join(
    left: DataFrame | Stream,
    table: DataFrame | Stream,
    on: On,
    *,
    how: Literal["inner", "left"] = "inner",
    **options: Unpack[LookupJoinOptions],
) -> DataFrame:
    """Enriches each left row with the rows of a table as it is when the row comes; the result is append-only.

    It is ``left JOIN table FOR SYSTEM_TIME AS OF PROCTIME()``, after Flink's processing-time temporal join: a left row
    is emitted once, with the rows that the table has after its changes of the same micro-batch, and later changes of
    the table do not affect it. The left input is not kept.

    Args:
        left: the left input; its rows are insertions.
        table: a static DataFrame; with `stream` (``refresh="1 hour"``) one that is read again; or a changelog. Unlike
            Flink's it may have several rows of a key, each of which makes a row. `lookup` asks a function instead.
        on: the key, as in `join`; at least one column.
        how: the join type. ``"inner"``: left rows without a match are left out. ``"left"``: they come with nulls.
        options: further options, which `gpu_ops.spark.api.joins.LookupJoinOptions` lists.

    Returns:
        A streaming DataFrame: ``row_kind``, always ``+I``, and the columns of the join. Two static DataFrames are
        joined at once.

    Raises:
        TypeError: there is no such option.
        DescriptionError: the join is not possible.
        NotBuiltError: Spark Connect.
        StateError: the state folder belongs to something else.

    Example:
        >>> orders = spark.createDataFrame([(1, "ann"), (2, "bob")], "id INT, customer STRING")
        >>> customers = spark.createDataFrame([("ann", "DE")], "customer STRING, country STRING")
        >>> gpu_ops.lookup_join(orders, customers, on="customer", how="left").orderBy("id").show()
        +--------+--------+---+-------+
        |row_kind|customer| id|country|
        +--------+--------+---+-------+
        |      +I|     ann|  1|     DE|
        |      +I|     bob|  2|   NULL|
        +--------+--------+---+-------+
    """
    check_options(lookup_join, options, LookupJoinOptions)
    if options.get("wait_for_table") and as_stream(table, "the table", "right").df.isStreaming:
        options["backlog"] = True
    return _join(left, table, on, how, options, kind=LookupJoin)


def lookup(
    left: DataFrame | Stream,
    function: LookupFunction,
    on: On,
    *,
    schema: st.StructType | str,
    how: Literal["inner", "left"] = "inner",
    suffixes: tuple[str, str] | None = None,
    cache: Duration | None = None,
    cache_keys: int = 100_000,
    retries: int = 3,
) -> DataFrame:
    """Enriches each left row by a function that looks keys up: in a database, a feature store, a service.

    Args:
        left: the left input; its rows are insertions.
        function: takes an Arrow table of keys, distinct and without nulls, under the names that they have in
            ``schema``, and returns the rows that have one of them. It is called in Spark's tasks, once per micro-batch
            and partition, with the keys whose answers are not cached.
        on: the key, as in `join`; the right columns are of ``schema``, in the types of the left ones.
        schema: the schema of the function's result, or its DDL text.
        how: the join type. ``"inner"``: left rows without a match are left out. ``"left"``: they come with nulls.
        suffixes: two suffixes for column names that both have.
        cache: the time for which an answer is good: ``"10 minutes"``; by default each micro-batch asks anew.
        cache_keys: the number of keys whose answers a Python worker keeps, the newest.
        retries: the number of times that a failing call is repeated, after 0.1 s and then twice as long each time.

    Returns:
        A DataFrame, streaming if ``left`` is: ``row_kind``, always ``+I``, and the columns of the join.

    Raises:
        DescriptionError: the join is not possible.

    Example:
        >>> def countries(keys):
        ...     return keys.append_column("country", pa.array(["DE"] * len(keys)))
        >>> orders = spark.createDataFrame([(1, "ann")], "id INT, customer STRING")
        >>> gpu_ops.lookup(orders, countries, "customer", schema="customer STRING, country STRING").show()
        +--------+--------+---+-------+
        |row_kind|customer| id|country|
        +--------+--------+---+-------+
        |      +I|     ann|  1|     DE|
        +--------+--------+---+-------+
    """
    side = as_stream(left, "the left input", "left")
    check_frames([side.df])
    if not callable(function):
        raise DescriptionError(f"lookup() takes a function of an Arrow table, not {type(function).__name__}")
    keys = normalize_on(on)
    table = applied_schema(schema, "schema")
    described = LookupJoin(
        how=join_type(how),
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
    sides, emit = settled(two_streams(left, right), options)
    description, sides, _ = two_sided(kind, how, on, sides, options, emit=emit, null_aware=null_aware)
    return apply_operator(description, sides, options, stacklevel=3)


@with_options(KeyOptions)
def co_group(
    left: DataFrame | Stream,
    right: DataFrame | Stream,
    on: On,
    apply: Callable[[pa.Table, pa.Table], pa.Table],
    schema: st.StructType | str,
    **options: Unpack[KeyOptions],
) -> DataFrame:
    """Calls a function with both inputs' rows of the same keys, once the inputs have ended; retractions are honoured.

    The function runs in Spark's tasks, once for many keys: it takes all rows of these keys, sorted by key, equal keys
    in the order they came; rows with a null key are in no group, unless ``null_safe`` says so. Streams need ``state``
    and
    have no output: run the query to its end, and `finish` returns the result.

    Args:
        left: the left input.
        right: the right input.
        on: the key, as in `join`; at least one column.
        apply: takes the left's and the right's rows as Arrow tables (either may be empty), returns a table.
        schema: the schema of its result, or its DDL text.
        options: further options, which `gpu_ops.spark.api.streams.KeyOptions` lists.

    Returns:
        The function's results: a static DataFrame for static inputs; for streams a streaming one that never has a row,
        to be written to the sink ``noop``.

    Raises:
        TypeError: there is no such option.
        DescriptionError: there are no such columns, no function, or streams without ``state=``.
        NotBuiltError: Spark Connect.
        StateError: the state folder belongs to something else.

    Example:
        >>> def sizes(left, right):
        ...     return pa.table({"left": [len(left)], "right": [len(right)]})
        >>> orders = spark.createDataFrame([(1, 10)], "id INT, amount INT")
        >>> payments = spark.createDataFrame([(1, 4), (1, 6)], "id INT, paid INT")
        >>> gpu_ops.co_group(orders, payments, "id", sizes, "left BIGINT, right BIGINT").show()
        +----+-----+
        |left|right|
        +----+-----+
        |   1|    2|
        +----+-----+
    """
    check_options(co_group, options, KeyOptions)
    given = two_streams(left, right)
    function = CoGroupTask.of(apply, schema)
    sides, _ = settled(given, options)
    for side in sides:
        if side.bad_rows == "tag":
            raise DescriptionError(f"input '{side.name}': bad_rows='tag' has no place in a function's result")
    described = CoGroup(as_input(sides[0]), as_input(sides[1]), resolve_keys(on, sides, options))
    result = apply_operator(described, sides, options, function=function)
    if not result.isStreaming:
        return result
    # without a row ever, so that any column will do
    return result.select(*(f.lit(None).cast(x.dataType).alias(x.name) for x in function.schema.fields))


@with_options(ChangelogOptions)
def multi_join(
    inputs: Sequence[DataFrame | Stream],
    on: MultiOn,
    how: JoinTypeName | Sequence[JoinTypeName] = "inner",
    *,
    where: str | Sequence[str | None] | None = None,
    suffixes: Sequence[str] | None = None,
    **options: Unpack[ChangelogOptions],
) -> DataFrame:
    """Joins streaming DataFrames that share a key, all in one operator; the result is their changelog.

    Static ones are joined at once, into a static DataFrame of insertions.

    They are joined from left to right, as a chain of two-way joins would, but without state for intermediate results.

    Args:
        inputs: two or more. An input without a ``name=`` of `stream` is called ``input_1``, ``input_2`` and so on.
        on: columns that all inputs share, each then shown once: ``"k"``, ``["k", "g"]``; or one entry per input
            but the first, of pairs ``("input.column", "column of this input")`` or of columns that it shares with
            one to its left.
        how: the join type of all inputs but the first, or of each. ``"inner"``: pairs. ``"left"``: also unmatched rows
            of the inputs to the left. ``"right"``, for the first only: the left join the other way round.
        where: residual conditions, one per input but the first, SQL text over it and all to its left; a
            single text is the last one's.
        suffixes: one suffix per input, for column names that another input has too.
        options: further options, which `gpu_ops.spark.api.streams.ChangelogOptions` lists.

    Returns:
        A streaming DataFrame, or a static one; first column ``row_kind``, then the columns of the join.

    Raises:
        TypeError: there is no such option.
        DescriptionError: the join is not possible, or needs a chain of two-way joins.
        NotBuiltError: Spark Connect.
        StateError: the state folder belongs to something else.

    Example:
        >>> users = spark.createDataFrame([(1, "ann"), (2, "bob")], "id INT, name STRING")
        >>> orders = spark.createDataFrame([(1, 10)], "id INT, amount INT")
        >>> payments = spark.createDataFrame([(1, 4)], "id INT, paid INT")
        >>> gpu_ops.multi_join([users, orders, payments], on="id", how="left").orderBy("id").show()
        +--------+---+----+------+----+
        |row_kind| id|name|amount|paid|
        +--------+---+----+------+----+
        |      +I|  1| ann|    10|   4|
        |      +I|  2| bob|  NULL|NULL|
        +--------+---+----+------+----+
    """
    check_options(multi_join, options, ChangelogOptions)
    if isinstance(inputs, str) or not isinstance(inputs, Sequence):
        raise DescriptionError(f"multi_join() takes a list of inputs, not {type(inputs).__name__}")
    if len(inputs) < 2:
        raise DescriptionError(f"a multi-way join takes two or more inputs, not {len(inputs)}")
    given = tuple(as_stream(each, f"input {number}", f"input_{number}") for number, each in enumerate(inputs, start=1))
    found, emit = settled(given, options)
    streams, names = list(found), [side.label for side in found]
    hows = [join_type(how)] * (len(inputs) - 1) if isinstance(how, str) else [join_type(each) for each in how]
    wheres: list[Any] = [*[None] * (len(inputs) - 2), where] if where is None or isinstance(where, str) else list(where)
    for number, condition in enumerate(wheres[: len(streams) - 1], start=1):
        stop = number + 1
        padded = [hows[:1] == ["right"] and number > 1, *(step == "left" for step in hows[: number - 1]), False]
        wheres[number - 1], streams[:stop], _ = engine_condition(condition, streams[:stop], padded)
    join = MultiJoin.of(
        [as_input(side) for side in streams],
        on,
        hows,
        where=wheres,
        emit=emit,
        suffixes=suffixes,
        ansi=ansi_mode(streams[0].df.sparkSession),
        ignore_case=ignores_case(streams[0].df.sparkSession),
    )
    by_name = dict(zip(names, streams, strict=True))
    sides = [by_name[source.name] for source in join.inputs]  # a right join has turned them round
    return apply_operator(join, sides, options)
