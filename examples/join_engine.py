"""A left join without Spark: Arrow tables in, a changelog out, with the retractions that an outer join needs."""

import pyarrow as pa

from gpu_ops import Input, Join, JoinEngine, Key

orders = Input("orders", pa.schema([("id", pa.int64()), ("item", pa.string())]), row_kind="op")
prices = Input("prices", pa.schema([("id", pa.int64()), ("price", pa.float64())]), unique_key=("id",), row_kind="op")
engine = JoinEngine(Join("left", orders, prices, keys=(Key("id", "id", using=True),), emit="per_event"))


def changes(source: Input, *rows: tuple) -> pa.Table:
    """Rows, each behind its row kind, as an Arrow table."""
    kinds, *columns = zip(*rows, strict=True)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, source.schema, strict=True)]
    return pa.table([pa.array(kinds), *arrays], names=["op", *source.schema.names])


def show(what: str, changelog: pa.Table) -> None:
    """Prints a micro-batch's changelog."""
    print(what)
    for row in changelog.to_pylist():
        print("   ", *("null" if value is None else value for value in row.values()))


show(
    "two orders, and no price yet: both are padded with null",
    engine.process(left=changes(orders, ("+I", 1, "book"), ("+I", 2, "pen"))),
)
show(
    "a price: the unmatched row is retracted before the joined row comes",
    engine.process(right=changes(prices, ("+I", 1, 9.5))),
)
show(
    "the price changes: its unique key finds the row that it replaces",
    engine.process(right=changes(prices, ("+U", 1, 8.0))),
)
show(
    "the price is deleted, and the second order too",
    engine.process(left=changes(orders, ("-D", 2, "pen")), right=changes(prices, ("-D", 1, 8.0))),
)
