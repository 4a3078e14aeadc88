"""Files read by Arrow: rows of CSV and Parquet reach the join without becoming Spark's rows on the way."""

import pyarrow as pa
import pyarrow.parquet as pq
from feed import folder, show, spark

import gpu_ops

for name in ("orders", "prices"):
    (folder / name).mkdir()
(folder / "orders" / "1.csv").write_text("1,book\n2,pen\n3,ink\n")
prices_file = pa.table({"op": ["+I", "+I", "-D"], "id": pa.array([1, 2, 2], pa.int32()), "price": [9.5, 1.5, 1.5]})
pq.write_table(prices_file, folder / "prices" / "1.parquet")

orders = gpu_ops.read_files(spark, str(folder / "orders"), "csv", "id INT, item STRING")
prices = gpu_ops.read_files(spark, str(folder / "prices"), "parquet", "op STRING, id INT, price DOUBLE")
changes = gpu_ops.join(
    orders.where("item <> 'ink'"),  # Arrow applies this filter, too
    gpu_ops.stream(prices, row_kind="op"),
    on="id",
    how="left",
    state=str(folder / "state"),
)

query = changes.writeStream.foreachBatch(show).option("checkpointLocation", str(folder / "checkpoint"))
query.trigger(availableNow=True).start().awaitTermination()
