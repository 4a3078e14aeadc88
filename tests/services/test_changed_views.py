"""Queries that are changed: their views in a real Postgres and in Delta tables, and histories of a real Kafka."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from spark.test_change import PAIRS, Inputs, Table, _row, change, columns_of, run, run_tables

import gpu_ops
from gpu_ops import sinks
from gpu_ops.errors import DescriptionError
from services.postgres import view_of
from services.test_kafka_topics import Topic

pytestmark = [pytest.mark.spark, pytest.mark.services]

COUNT = "gpu_ops_count"
PAIR = PAIRS["another kind of join, and a filter"]
WIDER = PAIRS["a join with a new table"]


class KilledError(Exception):
    """A fault of the test's own."""


class Interrupted:
    """A view that fails once it has written the micro-batch of a change, and then does not."""

    def __init__(self, view: Any) -> None:
        self._view, self.calls = view, 0

    def __call__(self, rows: Any, number: int) -> None:
        self._view(rows, number)
        self.calls += 1
        if self.calls == 1:
            raise KilledError


def counted(rows: list[dict[str, Any]]) -> Counter[Any]:
    found: Counter[Any] = Counter()
    for row in rows:
        copies = int(row.pop(COUNT))
        found[_row(row)] += copies
    return found


@pytest.mark.parametrize("pair", [PAIR, WIDER], ids=["a filter", "a column"])
def test_a_view_in_postgres(spark: Any, postgres: Any, tmp_path: Path, pair: tuple[str, str]) -> None:
    old, new = pair
    inputs, view = Inputs(spark, tmp_path, random.Random(1)), view_of(postgres, "v", None)

    def rows(query: str) -> Counter[Any]:
        columns = [*columns_of(query), COUNT]
        of = postgres.rows(f"SELECT {', '.join(columns)} FROM v")
        return counted([dict(zip(columns, row, strict=True)) for row in of])

    for _ in range(3):
        inputs.add()
    run(inputs, old, tmp_path / "old", view)
    assert rows(old) == inputs.result(old)
    were, are = columns_of(old), columns_of(new)
    postgres.run(*(f"ALTER TABLE v DROP COLUMN {name}" for name in were if name not in are))
    postgres.run(*(f"ALTER TABLE v ADD COLUMN {name} INT" for name in are if name not in were))
    interrupted = Interrupted(view)
    with pytest.raises(KilledError):
        changed(inputs, new, tmp_path, interrupted)
    changed(inputs, new, tmp_path, interrupted)
    assert interrupted.calls == 2
    assert rows(new) == inputs.result(new)
    for _ in range(2):
        inputs.add()
        run(inputs, new, tmp_path / "new", view)
        assert rows(new) == inputs.result(new)


def changed(inputs: Inputs, query: str, folder: Path, view: Any) -> None:
    """Changes a query; the columns of its view have been altered before."""
    view.alter = lambda _: None
    change(inputs, query, folder / "old", folder / "new", view)


@pytest.mark.parametrize("jar", [True, False])
def test_a_view_in_a_delta_table(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jar: bool) -> None:
    import deltalake

    if not jar:
        monkeypatch.setattr("gpu_ops.spark.sinks.delta.has_delta", lambda _: False)
    old, new = PAIR
    path = str(tmp_path / "table")
    inputs, view = Inputs(spark, tmp_path, random.Random(2)), sinks.delta_view(path)

    def rows() -> Counter[Any]:
        return counted(deltalake.DeltaTable(path).to_pyarrow_table().to_pylist())

    for _ in range(3):
        inputs.add()
    run(inputs, old, tmp_path / "old", view)
    assert rows() == inputs.result(old)
    interrupted = Interrupted(view)
    with pytest.raises(KilledError):
        changed(inputs, new, tmp_path, interrupted)
    changed(inputs, new, tmp_path, interrupted)
    assert rows() == inputs.result(new)
    inputs.add()
    run(inputs, new, tmp_path / "new", view)
    assert rows() == inputs.result(new)


def test_histories_of_kafka_and_delta_are_read_again(spark: Any, tmp_path: Path) -> None:
    """A column that the old query did not use: of a topic first, then of a Delta table; nothing else is read again."""
    import deltalake

    topic, prices, table = Topic(), str(tmp_path / "prices"), Table()
    topic.create(2)
    said: dict[str, list[tuple[Any, ...]]] = {"o": [], "p": []}

    def more() -> None:
        first = len(said["o"])
        for number in range(first, first + 20):
            row = number, f"i{number % 5}", number * 3
            said["o"].append(row)
            topic.send(dict(zip(("id", "item", "amount"), row, strict=True)), partition=number % 2)
        new = [(f"i{first // 20}", first, first * 7), (f"i{1 + first // 20}", first + 1, None)]
        said["p"] += new
        columns = dict(zip(("item", "price", "kind"), map(list, zip(*new, strict=True)), strict=True))
        types = pa.schema([("item", pa.string()), ("price", pa.int64()), ("kind", pa.int64())])
        deltalake.write_deltalake(prices, pa.table(columns, schema=types), mode="append")

    def tables() -> dict[str, Any]:
        orders = topic.rows(spark, "id INT, item STRING, amount INT")
        return {"o": orders, "p": spark.readStream.format("delta").load(prices)}

    def expected(*columns: str) -> Counter[Any]:
        named = [("id", "item", "amount"), ("item", "price", "kind")]
        pairs = [
            dict(zip(named[0], o, strict=True)) | dict(zip(named[1], p, strict=True))
            for o in said["o"] for p in said["p"] if o[1] == p[0]
        ]  # fmt: skip
        return Counter(_row({name: pair[name] for name in columns}) for pair in pairs)

    more()
    known, old = ["id", "price"], tmp_path / "0"
    run_tables(tables(), "SELECT o.id, p.price FROM o JOIN p ON o.item = p.item", old, table)
    assert table.rows == expected(*known)
    try:
        for number, (name, column) in enumerate((("o", "amount"), ("p", "kind")), 1):
            more()
            known.append(column)
            query = (
                f"SELECT o.id, p.price, {', '.join(['o.amount', 'p.kind'][:number])} FROM o JOIN p ON o.item = p.item"
            )
            new = tmp_path / str(number)
            given: dict[str, Any] = {
                "tables": tables(), "state": str(new / "state"), "checkpoint": str(new / "checkpoint"), "write": table,
                "old_state": str(old / "state"), "old_checkpoint": str(old / "checkpoint"),
            }  # fmt: skip
            with pytest.raises(DescriptionError, match=f"'{column}' is not in the state.*read_again"):
                gpu_ops.change(query, **given)
            table.alter(known)
            gpu_ops.change(query, **given, read_again=[name])
            for _ in range(2):
                run_tables(tables(), query, new, table)
                assert table.rows == expected(*known)
                more()
            run_tables(tables(), query, new, table)
            assert table.rows == expected(*known)
            old = new
    finally:
        topic.delete()
