"""A left join on Spark whose changelog is folded into a table, a view of the join as it stands, in foreachBatch."""

from collections import Counter

from feed import arrive, folder, stream_of
from pyspark.sql import DataFrame

import gpu_ops

orders = stream_of("orders", "id INT, item STRING")
prices = stream_of("prices", "op STRING, id INT, price DOUBLE")
changes = gpu_ops.join(
    gpu_ops.stream(orders, unique_key="id"),
    gpu_ops.stream(prices, row_kind="op", unique_key="id"),
    on="id",
    how="left",
    state=str(folder / "state"),
)
view: Counter[tuple] = Counter()


def fold(batch: DataFrame, number: int) -> None:
    """Applies a micro-batch to the view: +I and +U add a row, -U and -D remove one.

    Spark may repeat its last micro-batch after a failure, and this would count it twice: gpu_ops.sinks has views that
    do not.
    """
    for kind, *row in batch.collect():
        view[tuple(row)] += 1 if kind in ("+I", "+U") else -1
    print(f"after micro-batch {number}:", *sorted(view.elements(), key=str))


query = changes.writeStream.foreachBatch(fold).option("checkpointLocation", str(folder / "checkpoint")).start()
arrive("orders", {"id": 1, "item": "book"}, {"id": 2, "item": "pen"})
query.processAllAvailable()
arrive("prices", {"op": "+I", "id": 1, "price": 9.5}, {"op": "+I", "id": 2, "price": 1.5})
query.processAllAvailable()
arrive("prices", {"op": "+U", "id": 1, "price": 8.0}, {"op": "-D", "id": 2, "price": 1.5})
query.processAllAvailable()
arrive("orders", {"id": 2, "item": "pencil"})
query.processAllAvailable()
query.stop()
