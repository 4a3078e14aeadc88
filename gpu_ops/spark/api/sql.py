"""``gpu_ops.sql``, which runs a query over streaming DataFrames."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any

from pyspark.sql import DataFrame

from gpu_ops.backends import Backend
from gpu_ops.descriptions.description import Emit
from gpu_ops.errors import DescriptionError, GpuJoinError
from gpu_ops.query.errors import Origin, errors_at, place_of
from gpu_ops.query.nodes import Plan
from gpu_ops.query.plan import MultiWay
from gpu_ops.spark.api.apply import MemoryOnlyStateWarning
from gpu_ops.spark.api.query import PlannedQuery, check_query, remember
from gpu_ops.spark.api.static import has_result
from gpu_ops.spark.api.streams import Stream
from gpu_ops.state.address import Location, StateAddress
from gpu_ops.state.files import Files


def sql(
    query: str,
    /,
    *,
    tables: Mapping[str, DataFrame | Stream] | None = None,
    state: Location | None = None,
    emit: Emit = "per_batch",
    backend: Backend = "auto",
    partitions: int | None = None,
    name: str | None = None,
    multi_way: MultiWay = "auto",
    backlog: bool = False,
    **inputs: DataFrame | Stream,
) -> DataFrame:
    """Joins streaming DataFrames by a query in SQL; the result is the changelog of what it selects.

    Args:
        query: a SELECT in Spark's dialect: joins of every kind, [NOT] EXISTS, [NOT] IN, sub-queries in FROM, WITH,
            WHERE, GROUP BY, DISTINCT, ORDER BY with LIMIT, UNION [ALL]. The error for anything else (OVER and so on)
            says where it is, and what to do instead.
        tables: inputs whose names cannot be arguments.
        state: a folder of its own for the state; where the query becomes several joins, each has its own in it:
            ``1``, ``2`` and so on. Without it the state lives in memory only.
        emit: the output of every operator. ``"per_batch"``: the net changes of each micro-batch. ``"per_event"``: the
            changes as Flink emits them. ``"at_watermark"``, where all are joins by time: final rows, also of ASOF
            joins. ``"at_end"``: nothing; `finish` returns the query's result.
        backend: ``"auto"``: GPUs where there are any. ``"cpu"``: the CPU. ``"gpu"``: GPUs, or an error.
        partitions: the number of partitions of every join, as in `join`.
        name: the name of the join, as in `join`; several are called ``name_1``, ``name_2`` and so on.
        multi_way: ``"auto"``: joins that share a key become one multi-way join. ``"never"``: they are a chain of
            two-way joins.
        backlog: whether every operator may begin with a backlog, as in `join`.
        inputs: streaming DataFrames, or streams made by `stream`, by their names in the query.

    Returns:
        A streaming DataFrame; first column ``row_kind``, then what the query selects. `explain` shows its plan.

    Raises:
        SqlError: streaming joins cannot do the query; with line and column.
        DescriptionError: inputs or options are invalid.
        NotBuiltError: Spark Connect, or ``emit="at_end"`` above an operator that waits for time to pass.
        StateError: the state folder belongs to something else.

    Example:
        >>> orders = spark.createDataFrame([(1, "x"), (2, "y")], "id INT, item STRING")
        >>> prices = spark.createDataFrame([("x", 5)], "item STRING, price INT")
        >>> query = "SELECT o.id, p.price FROM orders o LEFT JOIN prices p ON o.item = p.item"
        >>> gpu_ops.sql(query, orders=orders, prices=prices).orderBy("id").show()
        +--------+---+-----+
        |row_kind| id|price|
        +--------+---+-----+
        |      +I|  1|    5|
        |      +I|  2| NULL|
        +--------+---+-----+
    """
    if not isinstance(query, str):
        raise DescriptionError(f"sql() takes the text of a query, not {type(query).__name__}")
    run: dict[str, Any] = {"state": state, "backend": backend, "partitions": partitions, "name": name}
    try:
        return _planned({**(tables or {}), **inputs}, query, emit, multi_way, {**run, "backlog": backlog})
    except GpuJoinError as error:
        with errors_at(_origin_in(query, str(error))):
            raise


def _origin_in(query: str, message: str) -> Origin:
    """The place where a query names the input that a message is about, or its beginning."""
    about = re.search(r"\binput '([^']+)'", message)
    name = about and re.search(rf"(?<![\w.]){re.escape(about.group(1))}(?!\w)", query, re.IGNORECASE)
    start = name.start() if name else len(query) - len(query.lstrip())
    return Origin(query, *place_of(query, start))


def _planned(
    given_tables: Mapping[str, DataFrame | Stream], query: str, emit: Emit, multi_way: MultiWay, options: dict[str, Any]
) -> DataFrame:
    """The changelog of a query over tables; ``options``: those of its operators."""
    state = options["state"] = None if options["state"] is None else StateAddress.of(options["state"])
    planned = PlannedQuery.of(given_tables, query, emit, multi_way, state)
    if options["backlog"]:
        _check_backlog(planned.plan)
    if state is not None:
        check_query(state, planned)
    with warnings.catch_warnings():
        if state is None:
            warnings.simplefilter("ignore", MemoryOnlyStateWarning)
        changes = planned.changelog(options)
    if state is None and changes.isStreaming and planned.plan.joins:
        warnings.warn(
            "sql() has no state= folder: its state lives in memory only, and a restart on an old checkpoint will be "
            "refused",
            MemoryOnlyStateWarning,
            stacklevel=4,
        )
    if state is not None and emit == "at_end":
        has_result(changes, state)
        planned.stored.create(Files.at(state))
    elif state is not None:
        remember(changes, planned, state)
    return changes


def _check_backlog(planned: Plan) -> None:
    """Refuses a backlog where one of the operators cannot begin with it."""
    for node in planned.joins:
        why = node.description.why_no_backlog()
        with errors_at(node.origin):
            if why is not None:
                raise DescriptionError(
                    f"no backlog here: {node.description.title} ({node.kind}): {why}. All operators of a query "
                    "begin with it. These can, of inputs without ttl=: regular, semi, anti, multi-way joins, "
                    "aggregates, top-N"
                )
