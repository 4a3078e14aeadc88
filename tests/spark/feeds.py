"""Sources with random changes, and what DuckDB makes of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from spark.support import Row, Sink, Source, fold

TYPES = {"long": pa.int64(), "int": pa.int32(), "string": pa.string(), "double": pa.float64()}


class Feed(Source):
    """A source with random rows that come, change and go.

    Args:
        spark: the session.
        folder: where its files are.
        name: of the table in SQL.
        columns: of its rows and the values they may have; None makes an id that no other row has.
        changing: whether rows ever change or go.
        seed: of the rows, with the name.
    """

    def __init__(
        self, spark: Any, folder: Path, name: str, columns: dict[str, tuple[str, Sequence[Any] | None]], *,
        changing: bool = True, seed: int = 0,
    ) -> None:  # fmt: skip
        self.name, self.columns, self._changing = name, columns, changing
        schema = ", ".join(f"{column} {kind}" for column, (kind, _) in columns.items())
        super().__init__(spark, folder / name, f"op string, {schema}" if changing else schema)
        self._live: list[dict[str, Any]] = []
        self._random = random.Random(f"{name}{seed or ''}")
        self._last = 0

    def more(self, rows: int) -> None:
        """One file of so many changes."""
        lines: list[dict[str, Any]] = []
        for _ in range(rows):
            draw = self._random.random() if self._changing and self._live else 0.0
            if draw < 0.6:
                self._live.append(self._row())
                lines.append({**({"op": "+I"} if self._changing else {}), **self._live[-1]})
                continue
            old = self._live.pop(self._random.randrange(len(self._live)))
            if draw < 0.8:
                lines.append({"op": "-D", **old})
                continue
            ids = {column: old[column] for column, (_, values) in self.columns.items() if values is None}
            self._live.append({**self._row(), **ids})
            lines += [{"op": "-U", **old}, {"op": "+U", **self._live[-1]}]
        self.add(*lines)

    def _row(self) -> dict[str, Any]:
        row = {}
        for column, (_, values) in self.columns.items():
            if values is None:
                self._last += 1
            row[column] = self._last if values is None else self._random.choice(values)
        return row

    def arrow(self, files: int) -> pa.Table:
        """The folded first files."""
        rows = self.table(list(self.columns), "op" if self._changing else None, files)
        arrays = [pa.array([r[n] for r in rows], TYPES[kind]) for n, (kind, _) in enumerate(self.columns.values())]
        return pa.table(arrays, names=list(self.columns))


def sql_join(sql: str, feeds: Sequence[Feed], files: int) -> list[Row]:
    """What DuckDB makes of the folded first files, sorted."""
    with duckdb.connect() as connection:
        for feed in feeds:
            connection.register(feed.name, feed.arrow(files))
        return sorted((tuple(row) for row in connection.sql(sql).fetchall()), key=repr)


def check(sink: Sink, sql: str, feeds: Sequence[Feed], *, least: int = 5) -> None:
    """Every micro-batch has taken one file of each source, and is right after it.

    Args:
        sink: what came out.
        sql: the join.
        feeds: its sources.
        least: rows that must have come out, so that it says something.
    """
    changes: list[Row] = []
    assert sorted(sink.batches) == list(range(len(feeds[0].files)))
    for batch in sorted(sink.batches):
        changes += sink.batches[batch]
        assert fold(changes) == sql_join(sql, feeds, batch + 1), f"after batch {batch}"
    assert len(sink.changes) >= least
