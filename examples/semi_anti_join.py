"""Customers with an open order (semi join), and customers without one (anti join), as orders open and close."""

from feed import arrive, folder, show, stream_of

import gpu_ops

customers = gpu_ops.stream(stream_of("customers", "customer INT, name STRING"), unique_key="customer")
orders = gpu_ops.stream(stream_of("orders", "op STRING, customer INT, id INT"), row_kind="op", unique_key="id")
joins = {
    "with an open order": gpu_ops.semi_join(customers, orders, on="customer", state=str(folder / "semi_state")),
    "without one": gpu_ops.anti_join(customers, orders, on="customer", state=str(folder / "anti_state")),
}


def run(what: str) -> None:
    """Both queries, as far as there is input; each goes on where it stopped."""
    print(what)
    for name, changes in joins.items():
        print(" ", name)
        writer = changes.writeStream.foreachBatch(lambda batch, _: show(batch))
        writer = writer.option("checkpointLocation", str(folder / name)).trigger(availableNow=True)
        writer.start().awaitTermination()


arrive("customers", {"customer": 1, "name": "ann"}, {"customer": 2, "name": "bob"})
arrive("orders", {"op": "+I", "customer": 1, "id": 10}, {"op": "+I", "customer": 1, "id": 11})
run("ann has two orders")
arrive("orders", {"op": "-D", "customer": 1, "id": 10}, {"op": "+I", "customer": 2, "id": 12})
run("one of them is closed, and bob has his first")
arrive("orders", {"op": "-D", "customer": 1, "id": 11})
run("the other is closed, too")
