"""Changes a query into another one that keeps its state: what users call."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from pyspark.sql import DataFrame

from gpu_ops.backends import Backend
from gpu_ops.descriptions.description import Emit
from gpu_ops.query.plan import MultiWay
from gpu_ops.spark.api.sql import run_query
from gpu_ops.spark.api.statements import StatementSet
from gpu_ops.spark.api.streams import Stream
from gpu_ops.spark.change.planner import ChangePlanner, QueryChange, refuse_final
from gpu_ops.spark.change.run import ChangeRun
from gpu_ops.spark.change.undo import undo
from gpu_ops.spark.driver.checkpoint import Checkpoint
from gpu_ops.spark.sinks.changes import View
from gpu_ops.state.address import Location, StateAddress
from gpu_ops.state.files import Files


def plan_change(
    query: str,
    /,
    *,
    old_state: Location,
    tables: Mapping[str, DataFrame | Stream] | None = None,
    read_again: Sequence[str] = (),
    missing: Literal["refuse", "null"] = "refuse",
    emit: Emit = "per_batch",
    multi_way: MultiWay = "auto",
    **inputs: DataFrame | Stream,
) -> QueryChange:
    """Tells what it would take to change a running query into another one; nothing is changed.

    Args:
        query: the new query, as of `sql`.
        old_state: the state folder of the old one.
        tables: inputs whose names cannot be arguments.
        read_again: tables whose source may be read from its beginning, as it still has everything.
        missing: as of `change`.
        emit: as of `sql`.
        multi_way: likewise.
        inputs: the new query's inputs by name; a table of the old query's name is the same table.

    Returns:
        What becomes of each operator, and where the rows of each table come from; ``print`` it.

    Raises:
        DescriptionError: the change needs rows that the state does not hold; which, and what to do.
        NotBuiltError: the old query has no result that follows from its state.
        StateError: there is no state, or the query that it belongs to is not known.
        SqlError: streaming joins cannot do the new query.

    Example:
        >>> arrive(folder + "/orders", {"id": 1, "item": "x", "amount": 3})
        >>> arrive(folder + "/prices", {"item": "x", "price": 5})
        >>> orders = spark.readStream.schema("id INT, item STRING, amount INT").json(folder + "/orders")
        >>> prices = spark.readStream.schema("item STRING, price INT").json(folder + "/prices")
        >>> old = "SELECT o.id, o.item, o.amount, p.price FROM orders o JOIN prices p ON o.item = p.item"
        >>> changes = gpu_ops.sql(old, orders=orders, prices=prices, state=folder + "/state")
        >>> writer = changes.writeStream.format("noop").option("checkpointLocation", folder + "/checkpoint")
        >>> writer.trigger(availableNow=True).start().awaitTermination()
        >>> joined = "FROM orders o JOIN prices p ON o.item = p.item"
        >>> new = f"SELECT o.item, sum(o.amount * p.price) AS paid {joined} GROUP BY o.item"
        >>> print(gpu_ops.plan_change(new, old_state=folder + "/state", orders=orders, prices=prices))
        operators
          regular join of o and p: changed, input 'o' had a column 'id' (int32), now it has none
          aggregate over it: new
          result: SELECT is o.item AS item, sum_1 AS paid, and was id, o.item AS item, amount, price
        tables
          orders: its rows are in the state (1 rows); its source goes on where it stood
          prices: its rows are in the state (1 rows); its source goes on where it stood
        time: about 1 s for 2 rows of the state
    """
    options = {"state": None, "backend": "auto", "partitions": None, "name": None, "backlog": False}
    new = _alone(query, {**(tables or {}), **inputs}, {**options, "emit": emit, "multi_way": multi_way})
    return plan_statements(new, old_state=old_state, read_again=read_again, missing=missing)


def plan_statements(
    new: StatementSet, *, old_state: Location, read_again: Sequence[str], missing: Literal["refuse", "null"]
) -> QueryChange:
    """Tells what it would take to change queries that run together into others; see `plan_change`.

    Args:
        new: the new queries, without a state folder.
        old_state: as of `plan_change`, like those that follow.
        read_again: likewise.
        missing: likewise.
    """
    return ChangePlanner(new, StateAddress.of(old_state), read_again, missing).described(count=True)


def _alone(query: str, tables: Mapping[str, DataFrame | Stream], options: Mapping[str, Any]) -> StatementSet:
    """A query that runs alone."""
    refuse_final(options["emit"])
    made = run_query(query, tables, options, changing=True)
    return StatementSet((made,), made.changes, made.options["state"])


def change(
    query: str,
    /,
    *,
    state: Location,
    checkpoint: str,
    old_state: Location,
    old_checkpoint: str,
    write: View | None,
    empty_sink: bool = False,
    tables: Mapping[str, DataFrame | Stream] | None = None,
    read_again: Sequence[str] = (),
    missing: Literal["refuse", "null"] = "refuse",
    emit: Emit = "per_batch",
    backend: Backend = "auto",
    partitions: int | None = None,
    name: str | None = None,
    multi_way: MultiWay = "auto",
    **inputs: DataFrame | Stream,
) -> QueryChange:
    """Builds the state and the checkpoint of a new query from those of an old one, and brings its sink up to date.

    Stop the old query first. Then call this, and start the new query as any other: with the same text, ``state=`` and
    inputs, on the new checkpoint, into the same sink. It goes on where the old one stopped. Interrupted, call it again.

    Args:
        query: the new query, as of `sql`.
        state: a new folder for its state.
        checkpoint: a new folder for its checkpoint.
        old_state: the state folder of the old query; it is only read.
        old_checkpoint: the checkpoint of the old query; likewise.
        write: brings a micro-batch into the sink, as for ``foreachBatch``: one of `gpu_ops.sinks`, or a function of
            your own. It is given the difference between the old result and the new one. None: nothing is written.
        empty_sink: the sink is a new one, and is given the whole result.
        tables: inputs whose names cannot be arguments.
        read_again: tables whose source may be read from its beginning, as it still has everything, where the state
            does not hold the rows that the new query needs.
        missing: ``"refuse"``: a column that the state does not hold makes a table one that has to be read again.
            ``"null"``: it is null in the rows that are there.
        emit: as of `sql`, like those that follow.
        backend: likewise.
        partitions: likewise.
        name: likewise.
        multi_way: likewise.
        inputs: the new query's inputs by name; a table of the old query's name is the same table.

    Returns:
        What has become of each operator, and where the rows of each table came from.

    Raises:
        DescriptionError: the change needs rows that the state does not hold; nothing has been changed.
        NotBuiltError: the old query has no result that follows from its state; likewise.
        StateError: the old query runs, or has a micro-batch to finish, or a folder belongs to something else.
        SqlError: streaming joins cannot do the new query.

    Example:
        >>> arrive(folder + "/orders", {"id": 1, "amount": 3}, {"id": 2, "amount": 30})
        >>> arrive(folder + "/payments", {"order": 1}, {"order": 2})
        >>> orders = spark.readStream.schema("id INT, amount INT").json(folder + "/orders")
        >>> payments = spark.readStream.schema("order INT").json(folder + "/payments")
        >>> tables = {"orders": orders, "payments": payments}
        >>> query = "SELECT o.id, o.amount FROM orders o JOIN payments p ON o.id = p.order"
        >>> changes = gpu_ops.sql(query, tables=tables, state=folder + "/state")
        >>> writer = changes.writeStream.format("noop").option("checkpointLocation", folder + "/checkpoint")
        >>> writer.trigger(availableNow=True).start().awaitTermination()
        >>> changed = gpu_ops.change(
        ...     query + " WHERE o.amount > 5", tables=tables, state=folder + "/state_2",
        ...     checkpoint=folder + "/checkpoint_2", old_state=folder + "/state",
        ...     old_checkpoint=folder + "/checkpoint", write=lambda rows, _: rows.show(),
        ... )
        +--------+---+------+
        |row_kind| id|amount|
        +--------+---+------+
        |      -D|  1|     3|
        +--------+---+------+
    """
    options = {
        "state": StateAddress.of(state), "backend": backend, "partitions": partitions, "name": name, "backlog": False,
        "emit": emit, "multi_way": multi_way,
    }  # fmt: skip
    new = functools.partial(_alone, query, {**(tables or {}), **inputs}, options)
    views = {} if write is None else {"": write}
    return change_statements(
        new, views, state=state, checkpoint=checkpoint, old_state=old_state, old_checkpoint=old_checkpoint,
        empty_sink=empty_sink, read_again=read_again, missing=missing, partitions=partitions,
    )  # fmt: skip


def change_statements(
    new: Callable[[], StatementSet],
    views: Mapping[str, View],
    *,
    state: Location,
    checkpoint: str,
    old_state: Location,
    old_checkpoint: str,
    empty_sink: bool,
    read_again: Sequence[str],
    missing: Literal["refuse", "null"],
    partitions: int | None,
) -> QueryChange:
    """Changes queries that run together into others; see `change`.

    Args:
        new: makes the new queries.
        views: by the names of those that have a sink, what brings a micro-batch into it; none: nothing is written.
        state: as of `change`, like those that follow.
        checkpoint: likewise.
        old_state: likewise.
        old_checkpoint: likewise.
        empty_sink: likewise; all of them are new.
        read_again: likewise.
        missing: likewise.
        partitions: likewise.
    """
    with _nothing_left(Files.at(state)):
        changing = ChangePlanner(new(), StateAddress.of(old_state), read_again, missing, partitions)
        described = changing.described(count=False)
        sources = [one.source for one in changing.old.stored.sources]
        old = Checkpoint.read(changing.session, old_checkpoint, sources)
        work = ChangeRun(changing, checkpoint, old, new, empty_sink=empty_sink or not views)
        work.check()
    work.run(views)
    return described


@contextlib.contextmanager
def _nothing_left(files: Files) -> Iterator[None]:
    """Context manager that takes out of a new folder what a change that is refused has put there: static tables."""
    new = not (files.folders("") or files.sizes(""))
    try:
        yield
    except BaseException:
        if new:
            files.delete_folder("")
        raise


def undo_change(
    query: str,
    /,
    *,
    state: Location,
    write: View | None,
    tables: Mapping[str, DataFrame | Stream] | None = None,
    emit: Emit = "per_batch",
    multi_way: MultiWay = "auto",
    **inputs: DataFrame | Stream,
) -> None:
    """Goes back to a query that `change` has changed into another one: its sink gets the result that it had then.

    Stop the new query first. Then start the old one as before, on its own checkpoint: it reads on from where it was
    stopped. The state and checkpoint of the new one stay as they are, and are of no use any more.

    Args:
        query: the old query, as of `sql`.
        state: its state folder.
        write: brings a micro-batch into the sink, as of `change`.
        tables: inputs whose names cannot be arguments.
        emit: as of `sql`.
        multi_way: likewise.
        inputs: the old query's inputs by name.

    Raises:
        StateError: the query was not changed, or a query runs on either state folder.
        NotBuiltError: a result does not follow from its state.

    Example:
        >>> gpu_ops.undo_change(query, orders=orders, state="/data/state", write=view)  # doctest: +SKIP
    """
    options = {"state": StateAddress.of(state), "backend": "auto", "partitions": None, "name": None, "backlog": False}
    old = _alone(query, {**(tables or {}), **inputs}, {**options, "emit": emit, "multi_way": multi_way})
    undo(old, {} if write is None else {"": write})
