"""Several sinks of one streaming query: each output of `gpu_ops.outputs` to a view of its own."""

from __future__ import annotations

from pyspark.sql import DataFrame

from gpu_ops.errors import DescriptionError, GpuJoinError
from gpu_ops.spark.failures import data_frame, message_in
from gpu_ops.spark.plan.column_metadata import outputs_of, side
from gpu_ops.spark.sinks.changes import View


def each(**views: View) -> View:
    """Makes a function for ``foreachBatch`` that gives each output of `gpu_ops.outputs` to a view of its own.

    A micro-batch is computed once, kept until all views have it, and given to them in the order in which they are named
    here. Where one fails, the micro-batch fails, and the views after it do not have it; Spark repeats it, and the views
    that have it treat it as any repeated one. So each promises what it does alone, and they are never more than that
    micro-batch apart.

    Args:
        views: for each output a function that takes a micro-batch of it and its number: one of `gpu_ops.sinks`, or of
            your own.

    Raises:
        DescriptionError: no view; or (from ``foreachBatch``) the query has other outputs.
        GpuJoinError: (from ``foreachBatch``) a view failed, with the name of its output.

    Example:
        >>> arrive(folder + "/in", {"row_kind": "+I", "id": 1, "customer": "ann", "amount": 10})
        >>> read = spark.readStream.schema("row_kind STRING, id INT, customer STRING, amount INT")
        >>> orders = gpu_ops.stream(read.json(folder + "/in"), row_kind="row_kind", unique_key="id")
        >>> latest = gpu_ops.latest(orders, state=folder + "/latest")
        >>> totals = gpu_ops.aggregate(latest, "customer", {"paid": ("sum", "amount")}, state=folder + "/totals")
        >>> orders_view, totals_view = gpu_ops.sinks.memory_view("orders"), gpu_ops.sinks.memory_view("totals")
        >>> writer = gpu_ops.outputs(orders=latest, totals=totals).writeStream.foreachBatch(
        ...     gpu_ops.sinks.each(orders=orders_view, totals=totals_view)
        ... )
        >>> writer = writer.option("checkpointLocation", folder + "/checkpoint").trigger(availableNow=True)
        >>> writer.start().awaitTermination()
        >>> totals_view.table.show()
        +--------+----+
        |customer|paid|
        +--------+----+
        |     ann|  10|
        +--------+----+
    """
    if not views:
        raise DescriptionError("each() takes a view for each output: each(orders=..., totals=...)")

    def write(batch: DataFrame, batch_id: int) -> None:
        known = outputs_of(data_frame(batch, "what each() takes"))
        for name in [*known, *views]:
            if name not in known or name not in views:
                has = ", ".join(known) or "none, as gpu_ops.outputs() did not make it"
                raise DescriptionError(
                    f"each() has views for {', '.join(views)}; the outputs of the query are {has}: give one for each"
                )
        batch.persist()
        try:
            for name, one in views.items():
                _write(one, side(batch, name), batch_id, name)
        finally:
            batch.unpersist()

    return write


def _write(view: View, rows: DataFrame, batch_id: int, name: str) -> None:
    """Gives a view its rows; its error names the output."""
    try:
        view(rows, batch_id)
    except GpuJoinError as error:
        error.add_note(f"in output {name!r}")
        raise
    except Exception as error:
        raise GpuJoinError(f"output {name!r}: {type(error).__name__}: {message_in(str(error))}") from error
