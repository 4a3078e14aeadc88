"""Joins of random changes into a view, compared with DuckDB's answer after every micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_ops
from gpu_ops import stream
from spark.feeds import Feed, sql_join
from spark.support import Row, drain

COLUMNS = ["item", "id", "quantity", "price"]


class Shop:
    """Orders joined with prices: by the items alone, or with unique keys, so that the changelog has one.

    Args:
        spark: the session.
        folder: for files, state and checkpoint.
        how: of the join.
        keyed: whether orders and prices have unique keys.
        emit: of the join.
        state: the state folder, if several queries of one join share the files.
        seed: of the rows.
    """

    def __init__(
        self, spark: Any, folder: Path, how: str = "left", *, keyed: bool = True, emit: str = "per_batch",
        state: Path | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        self.folder, self.keyed = folder, keyed
        items, ids = (1, 2, 3, 4, None), None if keyed else range(6)
        orders = {"id": ("long", ids), "item": ("int", items), "quantity": ("int", (1, 2, None))}
        self.feeds = [
            Feed(spark, folder, "orders", orders, seed=seed),
            Feed(spark, folder, "prices", {"item": ("int", items), "price": ("double", (1.5, 2.5, None))}, seed=seed),
        ]
        if keyed:  # one price for each item
            self.feeds[1].columns = {"item": ("int", None), "price": ("double", (1.5, 2.5, None))}
        join = "FULL JOIN" if how == "full" else f"{how.upper()} JOIN"
        self.sql = f"SELECT {', '.join(COLUMNS)} FROM orders {join} prices USING (item)"
        left = stream(
            self.feeds[0].df, name="orders", row_kind="op", updates="retract", unique_key="id" if keyed else None
        )
        right = stream(
            self.feeds[1].df, name="prices", row_kind="op", updates="retract", unique_key="item" if keyed else None
        )
        changes = gpu_ops.join(
            left, right, on="item", how=how, emit=emit, state=str(state or folder / "state"), name="shop"
        )
        self.changes = changes.select("row_kind", *COLUMNS)

    def more(self, rows: int = 12) -> None:
        for feed in self.feeds:
            feed.more(rows)

    def run(self, view: Callable[[Any, int], None]) -> Any:
        return drain(self.changes, view, self.folder / "checkpoint")

    def expected(self, files: int | None = None) -> list[Row]:
        return sql_join(self.sql, self.feeds, len(self.feeds[0].files) if files is None else files)


class Checked:
    """A view that is compared with DuckDB after every micro-batch, each of which it is given twice.

    Args:
        shop: the join.
        view: what is tested.
        read: gives the view's rows.
    """

    def __init__(self, shop: Shop, view: Callable[[Any, int], None], read: Callable[[], list[Row]]) -> None:
        self._shop, self._view, self._read = shop, view, read
        self.batches = 0

    def __call__(self, batch: Any, batch_id: int) -> None:
        for _ in range(2):
            self._view(batch, batch_id)
            assert sorted(self._read(), key=repr) == self._shop.expected(batch_id + 1), f"after batch {batch_id}"
        self.batches += 1


def in_rows(df: Any) -> list[Row]:
    """A view as rows; one without a key has each row as often as its count."""
    rows = [row.asDict() for row in df.collect()]
    return [tuple(row[name] for name in COLUMNS) for row in rows for _ in range(row.get("gpu_ops_count", 1))]
