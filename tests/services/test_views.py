"""Views in real parts, with faults within a write and between a write and Spark's commit: each time they equal
DuckDB's answer over the folded inputs.

`GPU_JOIN_KILLS` says how many faults each view has to live through.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from spark.support import Row, drain
from spark.views import Shop

import gpu_ops
from gpu_ops import sinks
from gpu_ops.spark.database import Connection
from gpu_ops.spark.sinks import changes, delta
from services.views import made

pytestmark = [pytest.mark.spark, pytest.mark.services]

KILLS = int(os.environ.get("GPU_JOIN_KILLS", "4"))


class KilledError(Exception):
    """A fault of the test's own."""


class Faults:
    """Makes a view fail at random: before it has committed, or when it has and Spark has not.

    Args:
        shop: the join.
        view: what is tested.
        read: gives its rows, which have to be right whenever the view has come back.
    """

    def __init__(self, shop: Shop, view: Callable[[Any, int], None], read: Callable[[], list[Row]]) -> None:
        self._shop, self._view, self._read, self._random = shop, view, read, random.Random(3)
        self.kills = 0
        self.within = False

    def __call__(self, batch: Any, batch_id: int) -> None:
        self.within = self.kills < KILLS and self._random.random() < 0.3
        self._view(batch, batch_id)
        assert sorted(self._read(), key=repr) == self._shop.expected(batch_id + 1), f"after batch {batch_id}"
        if self.kills < KILLS and self._random.random() < 0.4:
            self.killed()

    def killed(self) -> None:
        self.kills += 1
        raise KilledError

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Faults within a write: a transaction not committed, a MERGE not run, messages sent in part."""
        changed, merge, send = Connection.changed, delta.merge, changes._send

        def executed(connection: Any, sql: str) -> int:
            rows = changed(connection, sql)
            if self.within and "DELETE FROM" in sql:
                self.killed()
            return rows

        def merged(*given: Any) -> str:
            if self.within:
                self.killed()
            return merge(*given)

        def sent(rows: Any, *given: Any) -> None:
            send(rows.limit(3) if self.within else rows, *given)
            if self.within:
                self.killed()

        monkeypatch.setattr(Connection, "changed", executed)
        monkeypatch.setattr(delta, "merge", merged)
        monkeypatch.setattr(changes, "_send", sent)


@pytest.mark.parametrize(
    "given",
    [
        ("delta", "left", "id"),
        ("delta", "full", None),
        ("postgres", "full", ["id", "item"]),
        ("postgres", "left", None),
        ("kafka_upsert", "left", "id"),
        ("kafka_debezium", "full", ["id", "item"]),
        ("kafka_debezium", "left", None),
    ],
    ids=lambda given: f"{given[0]}-{given[1]}-{'key' if given[2] else 'no key'}",
)
def test_a_view_lives_through_faults(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: tuple[str, str, Any]
) -> None:
    sink, how, key = given
    shop = Shop(spark, tmp_path, how, keyed=key is not None, emit="per_event" if how == "full" else "per_batch")
    view, read = made(sink, spark, tmp_path, key)
    faults = Faults(shop, view, read)
    faults.patch(monkeypatch)
    for _ in range(max(4, KILLS)):
        shop.more(10 if "kafka" in sink else 8)  # of 8 the first micro-batch without a key is empty
    while True:
        try:
            shop.run(faults)
            break
        except Exception as error:
            if "KilledError" not in str(error):
                raise
    assert faults.kills > KILLS // 2
    assert sorted(read(), key=repr) == shop.expected()


def test_views_of_one_query_live_through_faults(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Delta, Postgres and Kafka behind each other in each micro-batch: what those before a fault have, they skip."""
    shop = Shop(spark, tmp_path, "left")
    views = {sink: Faults(shop, *made(sink, spark, tmp_path, "id")) for sink in ("delta", "postgres", "kafka_debezium")}
    for faults in views.values():
        faults.patch(monkeypatch)
    for _ in range(max(4, KILLS)):
        shop.more(8)
    both = gpu_ops.outputs(**dict.fromkeys(views, shop.changes))
    failed: set[str] = set()
    while True:
        try:
            drain(both, sinks.each(**views), tmp_path / "checkpoint")
            break
        except Exception as error:
            found = re.fullmatch(r"output '(\w+)': KilledError: ", f"{gpu_ops.why(error)} ")
            if found is None:
                raise
            failed.add(found[1])
    assert failed == set(views)
    assert all(sorted(faults._read(), key=repr) == shop.expected() for faults in views.values())
