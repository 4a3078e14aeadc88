"""Views of queries that are changed, in a real Postgres and in Delta tables: once, be the change interrupted or not."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from spark.test_change import PAIRS, Inputs, _row, change, columns_of, run

from gpu_ops import sinks
from services.postgres import view_of

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
