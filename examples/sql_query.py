"""A join in SQL: Spark reads the query, and explain shows which joins of this pack were put into it, and why."""

from feed import arrive, folder, show, stream_of

import gpu_ops

orders = stream_of("orders", "id INT, item STRING, quantity INT")
prices = gpu_ops.stream(stream_of("prices", "op STRING, item STRING, price DOUBLE"), row_kind="op", unique_key="item")
changes = gpu_ops.sql(
    """
    SELECT o.id, upper(o.item) AS item, o.quantity * p.price AS total
    FROM orders o LEFT JOIN prices p ON o.item = p.item
    """,
    orders=orders,
    prices=prices,
    state=str(folder / "state"),
)
print(gpu_ops.explain(changes).split("\n\n")[0])

query = changes.writeStream.foreachBatch(show).option("checkpointLocation", str(folder / "checkpoint")).start()
arrive("orders", {"id": 1, "item": "book", "quantity": 2}, {"id": 2, "item": "pen", "quantity": 10})
query.processAllAvailable()
arrive("prices", {"op": "+I", "item": "book", "price": 9.5})
query.processAllAvailable()
arrive("prices", {"op": "+U", "item": "book", "price": 8.0})
query.processAllAvailable()
query.stop()
