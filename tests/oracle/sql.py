"""The correct view: a from-scratch SQL join, in DuckDB, of the folded inputs."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Sequence

import duckdb
import pyarrow as pa

from gpu_ops.descriptions.description import Description
from gpu_ops.descriptions.keys import Key
from gpu_ops.descriptions.multi_join import MultiJoin
from oracle.drive import ADDS, ROW_KIND, Change, Event, Row, canonical, changes, difference, fold


class FoldedInput:
    """The current table of one input.

    With a unique key, an added row replaces the one of the same key. A retraction of a row that is
    not there does nothing.
    """

    def __init__(self, columns: Sequence[str], unique_key: Sequence[str] | None) -> None:
        self._identity = [columns.index(c) for c in unique_key or columns]
        self._unique = unique_key is not None
        self._rows: dict[Row, list[Row]] = {}
        self.unknown = 0

    def apply(self, kind: str, row: Row) -> None:
        """One change."""
        identity = tuple(canonical(row[i]) for i in self._identity)
        if kind in ADDS:
            if self._unique:
                self._rows[identity] = [row]
            else:
                self._rows.setdefault(identity, []).append(row)
        elif identity in self._rows:
            self._rows[identity].pop()
            if not self._rows[identity]:
                del self._rows[identity]
        else:
            self.unknown += 1

    def rows(self) -> list[Row]:
        """The live rows."""
        return [row for copies in self._rows.values() for row in copies]


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def join_sql(join: Description) -> str:
    """The join as a SELECT over tables called as the inputs are."""
    if isinstance(join, MultiJoin):
        return multi_join_sql(join)
    a, b = (quoted(s.name) for s in join.inputs)

    def equal(key: Key) -> str:
        return f"{a}.{quoted(key.left)} {'IS NOT DISTINCT FROM' if key.null_safe else '='} {b}.{quoted(key.right)}"

    residual = [f"({join.where})"] if join.where else []
    if join.null_aware:
        if len(join.keys) == 1 and not residual and not join.keys[0].null_safe:
            return f"SELECT * FROM {a} WHERE {quoted(join.keys[0].left)} NOT IN (SELECT {quoted(join.keys[0].right)} FROM {b})"  # noqa: E501
        same = [f"coalesce({equal(k)}, true)" for k in join.keys]
        return f"SELECT * FROM {a} WHERE NOT EXISTS (SELECT 1 FROM {b} WHERE {' AND '.join(same + residual)})"
    on = " AND ".join([equal(k) for k in join.keys] + residual) or "true"
    if join.how in ("semi", "anti"):
        word = "" if join.how == "semi" else "NOT "
        return f"SELECT * FROM {a} WHERE {word}EXISTS (SELECT 1 FROM {b} WHERE {on})"
    names = [f.name for f in join.output_schema][1:]
    columns = [f"{table}.{quoted(f.name)}" for table, s in ((a, join.left), (b, join.right)) for f in s.schema]
    listed = ", ".join(f"{c} AS {quoted(n)}" for c, n in zip(columns, names, strict=True))
    return f"SELECT {listed} FROM {a} {join.how.upper()} JOIN {b} ON {on}"


def multi_join_sql(join: MultiJoin) -> str:
    """The same of a multi-way join: its steps, one after the other; timestamps as integers of their unit."""
    names = [quoted(s.name) for s in join.inputs]
    text = names[0]
    for name, step in zip(names[1:], join.steps, strict=True):
        on = [
            f"{names[k.input]}.{quoted(k.column)} {'IS NOT DISTINCT FROM' if k.null_safe else '='} "
            f"{name}.{quoted(k.own)}"
            for k in step.on
        ]
        on += [f"({step.where})"] if step.where else []
        text += f" {step.how.upper()} JOIN {name} ON {' AND '.join(on)}"
    columns = []
    for column in join.output:
        shown = f"{names[column.side]}.{quoted(column.column)}"
        if pa.types.is_timestamp(column.type):
            shown = f"epoch_{column.type.unit}({shown})"
        columns.append(f"{shown} AS {quoted(column.name)}")
    return f"SELECT {', '.join(columns)} FROM {text}"


@functools.cache
def _connection() -> duckdb.DuckDBPyConnection:
    return duckdb.connect(":memory:", config={"threads": "1"})


class _Reference:
    """The folded inputs as tables, and what both ways of comparing share."""

    def __init__(self, join: Description) -> None:
        self.join = join
        self.inputs = [FoldedInput(s.schema.names, s.unique_key) for s in join.inputs]
        self.connection = _connection().cursor()
        self._stale = [True] * len(join.inputs)

    def close(self) -> None:
        """Forget the tables."""
        self.connection.close()

    def change(self, events: Iterable[Event]) -> None:
        """Fold changes into the inputs."""
        for side, kind, row in events:
            self.inputs[side].apply(kind, row)
            self._stale[side] = True

    def _register(self) -> None:
        for side, source in enumerate(self.join.inputs):
            if self._stale[side]:
                live = self.inputs[side].rows()
                columns = zip(*live, strict=True) if live else [[] for _ in source.schema]
                arrays = [pa.array(list(c), f.type) for c, f in zip(columns, source.schema, strict=True)]
                self.connection.register(source.name, pa.table(arrays, names=source.schema.names))
                self._stale[side] = False


class SmallReference(_Reference):
    """Folds a changelog row by row in Python, and compares it with the join of the folded inputs."""

    def __init__(self, join: Description) -> None:
        super().__init__(join)
        self._folded: Counter[Row] = Counter()
        self._last: list[Change] = []

    def fold(self, changelog: pa.Table) -> None:
        """Fold a changelog into the result."""
        self._last = changes(changelog)
        fold(self._last, self._folded)

    def differences(self) -> str:
        """What the folded changelog lacks, or has too much of; empty when it is the join."""
        return difference(self.joined(), self._folded)

    def joined(self) -> Counter[Row]:
        """The join of the folded inputs."""
        self._register()
        joined = self.connection.execute(join_sql(self.join)).fetchall()
        return Counter(tuple(map(canonical, row)) for row in joined)

    def size(self) -> int:
        """Rows of the folded result."""
        return self._folded.total()

    def both_ways(self) -> list[Row]:
        """Values that the last changelog both added and removed."""
        added = {row for kind, row in self._last if kind in ADDS}
        return [row for kind, row in self._last if kind not in ADDS and row in added][:8]


class LargeReference(_Reference):
    """The same within DuckDB, for many rows."""

    def __init__(self, join: Description) -> None:
        super().__init__(join)
        fields = list(join.output_schema)[1:]
        # x + 0.0 makes 0.0 of -0.0, which GROUP BY might keep apart.
        self._columns = ", ".join(
            f"{quoted(f.name)} + 0.0 AS {quoted(f.name)}" if pa.types.is_floating(f.type) else quoted(f.name)
            for f in fields
        )
        self._names = ", ".join(quoted(f.name) for f in fields)
        empty = pa.table([pa.array([], f.type) for f in fields], names=[f.name for f in fields])
        self.connection.register("__empty", empty)
        self.connection.execute("CREATE TEMP TABLE __folded AS SELECT *, 0::BIGINT AS __n FROM __empty")
        self._last = join.output_schema.empty_table()

    def close(self) -> None:
        """Drop the tables."""
        self.connection.execute("DROP TABLE __folded")
        super().close()

    def fold(self, changelog: pa.Table) -> None:
        """Fold a changelog into the result."""
        self._last = changelog
        if not changelog.num_rows:
            return
        self.connection.register("__changes", changelog)
        self.connection.execute(
            f"CREATE OR REPLACE TEMP TABLE __folded AS SELECT {self._names}, sum(__n)::BIGINT AS __n FROM ("
            f" SELECT {self._names}, __n FROM __folded UNION ALL"
            f" SELECT {self._columns}, CASE WHEN {ROW_KIND} IN ('+I', '+U') THEN 1 ELSE -1 END FROM __changes"
            f") GROUP BY {self._names} HAVING sum(__n) <> 0"
        )

    def differences(self) -> str:
        """Rows of which the folded changelog has more, or less, than the join."""
        self._register()
        found = self.connection.execute(
            f"SELECT {self._names}, sum(__n) AS __n FROM ("
            f" SELECT {self._names}, __n FROM __folded UNION ALL"
            f" SELECT {self._columns}, -1 FROM ({join_sql(self.join)})"
            f") GROUP BY {self._names} HAVING sum(__n) <> 0 LIMIT 8"
        ).fetchall()
        return "\n".join(f"  x{row[-1]}: {row[:-1]}" for row in found)

    def size(self) -> int:
        """Rows of the folded result."""
        ((total,),) = self.connection.execute("SELECT coalesce(sum(__n), 0)::BIGINT FROM __folded").fetchall()
        return int(total)

    def both_ways(self) -> list[Row]:
        """Values that the last changelog both added and removed."""
        if not self._last.num_rows:
            return []
        found: list[Row] = self.connection.execute(
            f"SELECT {self._names}, count(*) FROM (SELECT {self._columns}, {ROW_KIND} IN ('+I', '+U') AS adds"
            f" FROM __changes) GROUP BY {self._names} HAVING count(DISTINCT adds) > 1 LIMIT 8"
        ).fetchall()
        return found


def reference(join: Description, *, large: bool = False) -> SmallReference | LargeReference:
    """Whichever is faster."""
    return LargeReference(join) if large else SmallReference(join)
