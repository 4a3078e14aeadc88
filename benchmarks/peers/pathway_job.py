"""A query on Pathway; run by an interpreter that has it and nothing of this pack.

    python pathway_job.py QUERY MODE DATA OUT

Writes a CSV file of changes, and prints the seconds as JSON. Pathway's readers of files know no changelog. In the mode
`static`, the fastest, they take all files in one commit, and of changes the last of each key is picked, by a number
that the files have for this. In the mode `stream` its Python connector is told of each row that comes or goes, with a
commit after each file.
"""

import json
import sys
import time
from pathlib import Path

import pathway as pw
from pyarrow import csv


class Order(pw.Schema):
    """A row of the left input."""

    order_id: int = pw.column_definition(primary_key=True)
    customer: int
    amount: int
    note: str


class Price(pw.Schema):
    """A row of the right input."""

    order_id: int = pw.column_definition(primary_key=True)
    price: float
    source: str


class OrderChange(pw.Schema):
    """A change of the left input; `seq` numbers them."""

    seq: int = pw.column_definition(primary_key=True)
    op: str
    order_id: int
    customer: int
    amount: int
    note: str


class PriceChange(pw.Schema):
    """A change of the right input."""

    seq: int = pw.column_definition(primary_key=True)
    op: str
    order_id: int
    price: float
    source: str


SCHEMAS = {"orders": (Order, OrderChange), "prices": (Price, PriceChange)}


class Changes(pw.io.python.ConnectorSubject):
    """The changes of an input, file by file: a row replaces that of its key, or takes it away."""

    def __init__(self, folder: Path, columns: list[str]) -> None:
        super().__init__(session_type="upsert")
        self.folder, self.columns = folder, columns

    def run(self) -> None:
        """Feeds the rows to Pathway, which calls this in a thread of its own."""
        options = csv.ReadOptions(column_names=["op", *self.columns])
        for path in sorted(self.folder.glob("*.csv")):
            columns = csv.read_csv(path, options).to_pydict()
            for kind, *values in zip(*columns.values(), strict=True):
                row = dict(zip(self.columns, values, strict=True))
                if kind == "-D":
                    self.delete(**row)
                elif kind != "-U":  # the +U after it replaces the row
                    self.next(**row)
            self.commit()


def read(data: Path, query: str, mode: str, name: str) -> pw.Table:
    """An input as a table."""
    rows, changes = SCHEMAS[name]
    if query != "changes":
        return pw.io.csv.read(str(data / "inserts_headed" / name), schema=rows, mode="static")
    if mode == "stream":
        subject = Changes(data / "changes" / name, rows.column_names())
        return pw.io.python.read(subject, schema=rows, autocommit_duration_ms=None)
    given = pw.io.csv.read(str(data / "changes_headed" / name), schema=changes, mode="static")
    given = given.filter(given.op != "-U")  # the +U after it has a larger number
    last = given.ix(given.groupby(given.order_id).reduce(row=pw.reducers.argmax(given.seq)).row)
    return last.filter(last.op != "-D")


def run(query: str, mode: str, data: Path, out: Path) -> float:
    """Run a query once; the seconds that it took."""
    begun = time.perf_counter()
    orders, prices = (read(data, query, mode, name) for name in SCHEMAS)
    join = orders.join_left if query == "changes" else orders.join
    left, right = pw.left, pw.right
    joined = join(prices, orders.order_id == prices.order_id).select(
        left.order_id, left.customer, left.amount, left.note, right.price, right.source
    )
    if query == "totals":
        joined = joined.groupby(joined.customer).reduce(
            joined.customer, n=pw.reducers.count(), total=pw.reducers.sum(joined.price)
        )
    pw.io.csv.write(joined, str(out / "changes.csv"))
    pw.run(monitoring_level=pw.MonitoringLevel.NONE)
    return time.perf_counter() - begun


if __name__ == "__main__":
    print(json.dumps({"seconds": run(sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))}))
