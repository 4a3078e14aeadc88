"""Users, their orders and their payments in one operator: no result of the first join is kept for the second."""

from feed import arrive, folder, show, stream_of

import gpu_ops

users = gpu_ops.stream(stream_of("users", "user INT, name STRING"), unique_key="user", name="users")
orders = gpu_ops.stream(stream_of("orders", "user INT, item STRING"), name="orders")
payments = gpu_ops.stream(stream_of("payments", "op STRING, user INT, paid INT"), row_kind="op", name="payments")
changes = gpu_ops.multi_join(
    [users, orders, payments], on="user", how=["inner", "left"], state=str(folder / "state"), name="shop"
)
print(gpu_ops.explain(changes).splitlines()[0])

arrive("users", {"user": 1, "name": "ann"}, {"user": 2, "name": "bob"})
arrive("orders", {"user": 1, "item": "book"}, {"user": 1, "item": "pen"})
query = changes.writeStream.foreachBatch(show).option("checkpointLocation", str(folder / "checkpoint")).start()
query.processAllAvailable()
arrive("payments", {"op": "+I", "user": 1, "paid": 10})
query.processAllAvailable()
arrive("payments", {"op": "-D", "user": 1, "paid": 10})
query.processAllAvailable()
arrive("users", {"user": 1, "name": "anna"})
query.processAllAvailable()
query.stop()
