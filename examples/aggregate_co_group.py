"""Aggregates and co-groups over static DataFrames: retracted rows do not count."""

import pyarrow as pa
import pyarrow.compute as pc
from feed import show, spark

import gpu_ops

rows = [("+I", 1, "ann", 20), ("+I", 2, "bob", 5), ("-U", 1, "ann", 20), ("+U", 1, "ann", 30), ("+I", 3, "ann", 1)]
orders = gpu_ops.stream(
    spark.createDataFrame(rows, "op STRING, id INT, name STRING, amount INT").coalesce(1),  # in this order
    row_kind="op",
    name="orders",
)
users = spark.createDataFrame([("ann", 25), ("bob", 10), ("cat", 10)], "name STRING, credit INT")

print("what each user ordered")
totals = gpu_ops.aggregate(orders, by="name", aggregates={"total": "sum(amount)", "orders": "count(*)"})
show(totals.orderBy("name"))


def beyond_credit(orders: pa.Table, users: pa.Table) -> pa.Table:
    """Users who ordered for more than their credit; called with all rows of many keys at once."""
    spent = orders.group_by("name").aggregate([("amount", "sum")])
    both = users.join(spent, "name", join_type="inner")
    over = both.filter(pc.greater(both["amount_sum"], both["credit"]))
    return pa.table({"name": over["name"], "over": pc.subtract(over["amount_sum"], over["credit"])})


print("who ordered beyond the credit, and by how much")
show(gpu_ops.co_group(orders, users, on="name", apply=beyond_credit, schema="name STRING, over BIGINT"))
