"""Nothing is written before the input ends: emit="at_end" keeps the input, and finish gives the result."""

from feed import arrive, folder, show, spark, stream_of

import gpu_ops

state = str(folder / "state")
orders = gpu_ops.stream(stream_of("orders", "op STRING, id INT, item STRING"), row_kind="op", unique_key="id")
prices = stream_of("prices", "item STRING, price DOUBLE")
joined = gpu_ops.join(orders, prices, on="item", how="left", emit="at_end", state=state)

arrive("orders", {"op": "c", "id": 1, "item": "book"}, {"op": "c", "id": 2, "item": "pen"})
arrive("orders", {"op": "u", "id": 1, "item": "map"}, {"op": "c", "id": 3, "item": "ink"})
arrive("prices", {"item": "map", "price": 4.0}, {"item": "pen", "price": 1.5})

written = []
query = (
    joined.writeStream.foreachBatch(lambda batch, _: written.extend(batch.collect()))
    .option("checkpointLocation", str(folder / "checkpoint"))
    .trigger(availableNow=True)
    .start()
)
query.awaitTermination()
print("rows written while the query ran:", len(written))

result = gpu_ops.finish(spark, state=state)  # a static DataFrame, computed from the state folder
print("the result:")
show(result.orderBy("id"))
