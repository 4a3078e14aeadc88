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
from gpu_ops.spark.api.query import PlannedQuery, check_query
from gpu_ops.spark.api.statements import Statement, StatementSet
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
    options = {**run, "backlog": backlog, "emit": emit, "multi_way": multi_way}
    made = run_query(query, {**(tables or {}), **inputs}, options)
    if made.options["state"] is not None and emit != "at_end":
        StatementSet((made,), made.changes, made.options["state"]).remember()
    return made.changes


def run_query(
    query: str,
    tables: Mapping[str, DataFrame | Stream],
    options: Mapping[str, Any],
    *,
    statement: tuple[str, str] = ("", ""),
    views: Mapping[str, tuple[object, ...]] | None = None,
    changing: bool = False,
    stacklevel: int = 3,
) -> Statement:
    """Makes the changelog of a query, which may be one of several that run together; errors have their place in it.

    Args:
        query: its text.
        tables: what it reads.
        options: as of `sql`.
        statement: the name of its view or sink, and of the folder of its state below that of all.
        views: by name the roots of the plans of tables that others of these queries make.
        changing: whether its state folder is being made of another one, so that it is no query's yet.
        stacklevel: of warnings, seen from the caller.
    """
    run = dict(options)
    emit, multi_way = run.pop("emit"), run.pop("multi_way")
    state = run["state"] = None if run["state"] is None else StateAddress.of(run["state"])
    try:
        planned = PlannedQuery.of(tables, query, emit, multi_way, state, views=views)
        if run["backlog"]:
            _check_backlog(planned.plan)
        if state is not None and not changing:
            check_query(state, planned)
        with warnings.catch_warnings():
            if state is None:
                warnings.simplefilter("ignore", MemoryOnlyStateWarning)
            changes = planned.changelog(run)
        if state is None and changes.isStreaming and planned.plan.joins and not changing:
            warnings.warn(
                "sql() has no state= folder: its state lives in memory only, and a restart on an old checkpoint will "
                "be refused",
                MemoryOnlyStateWarning,
                stacklevel=stacklevel,
            )
        if state is not None and emit == "at_end" and not changing:
            has_result(changes, state)
            planned.stored.create(Files.at(state))
        return Statement(*statement, planned, run, changes)
    except GpuJoinError as error:
        with errors_at(_origin_in(query, str(error))):
            raise


def _origin_in(query: str, message: str) -> Origin:
    """The place where a query names the input that a message is about, or its beginning."""
    about = re.search(r"\binput '([^']+)'", message)
    name = about and re.search(rf"(?<![\w.]){re.escape(about.group(1))}(?!\w)", query, re.IGNORECASE)
    start = name.start() if name else len(query) - len(query.lstrip())
    return Origin(query, *place_of(query, start))


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
