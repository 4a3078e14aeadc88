"""Runs a plan without Spark: joins on JoinEngines, filters and projections in DuckDB; and the query itself, there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import duckdb
import pyarrow as pa
import sqlglot
from oracle.drive import ADDS, Row, canonical
from oracle.sql import FoldedInput

from gpu_ops.join_engine import JoinEngine
from gpu_ops.query.nodes import Calc, Plan, PlanNode, Union
from gpu_ops.query.relations import Scan, Table

Changes = Mapping[str, list[tuple[str, Row]]]
"""Per table: row kinds and rows."""


class PlanRunner:
    """A plan with its engines; of static inputs (``at_end``) each says all when they have ended."""

    def __init__(self, plan: Plan, *, at_end: bool = False) -> None:
        self.plan = plan
        self.duck = duckdb.connect(":memory:", config={"threads": "1"})
        self.duck.execute("CREATE MACRO raise_error(kind, words) AS error(kind)")
        of = {id(node): node.description for node in plan.joins}
        if at_end:
            of = {number: d.with_inputs(d.inputs, "at_end") for number, d in of.items()}  # type: ignore[union-attr]
        self.engines = {number: JoinEngine(d, backend="cpu", tiny=True) for number, d in of.items()}
        self.folded: Counter[Row] = Counter()
        self._said: dict[int, pa.Table] = {}

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()
        self.duck.close()

    def process(self, tables: Mapping[str, Table], changes: Changes, *, finish: bool = False) -> list[tuple[str, Row]]:
        """One micro-batch, perhaps the last; its changes."""
        batches = {name: batch(tables[name], rows) for name, rows in changes.items()}
        return self._fold(batches, finish=finish)

    def finish(self) -> list[tuple[str, Row]]:
        """The end of all inputs, for interval joins."""
        return self._fold({}, finish=True)

    def _fold(self, batches: Mapping[str, pa.Table], *, finish: bool) -> list[tuple[str, Row]]:
        self._said.clear()
        rows = []
        for part in self.plan.parts:
            made = self._run(part.root, batches, finish=finish)
            if part.root.row_kind is None:
                made = made.add_column(0, "row_kind", pa.array(["+I"] * made.num_rows, pa.string()))
            columns = [column.to_pylist() for column in made.columns]
            rows += [(str(kind), tuple(map(canonical, row))) for kind, *row in zip(*columns, strict=True)]
        for kind, row in rows:
            self.folded[row] += 1 if kind in ADDS else -1
            assert self.folded[row] >= 0, f"{kind} of a row that is not there: {row}"
        return rows

    def _run(self, node: PlanNode, batches: Mapping[str, pa.Table], *, finish: bool) -> pa.Table:
        """What a node gives; an operator that several nodes take it from runs once."""
        if id(node) not in self._said:
            self._said[id(node)] = self._made(node, batches, finish=finish)
        return self._said[id(node)]

    def _made(self, node: PlanNode, batches: Mapping[str, pa.Table], *, finish: bool) -> pa.Table:
        if isinstance(node, Scan):
            own = batches.get(node.table.name)
            kind = [pa.field(node.row_kind, pa.string())] if node.row_kind else []
            return own if own is not None else pa.schema([*kind, *node.schema]).empty_table()
        if isinstance(node, Union):
            tables = [self._run(part, batches, finish=finish) for part in node.inputs]
            inserts = [pa.array(["+I"] * table.num_rows, pa.string()) for table in tables]
            named = [
                table if part.row_kind else table.add_column(0, node.row_kind, kinds)
                for part, table, kinds in zip(node.inputs, tables, inserts, strict=True)
            ]
            return pa.concat_tables(named)
        if isinstance(node, Calc):
            return self._calc(node, self._run(node.input, batches, finish=finish))
        inputs = [self._run(below, batches, finish=finish) for below in node.inputs]
        engine = self.engines[id(node)]
        said = engine.process(*inputs)
        return pa.concat_tables([said, engine.finish()]) if finish else said

    def _calc(self, node: Calc, table: pa.Table) -> pa.Table:
        below = node.input.row_kind
        if below and node.row_kind is None:  # left out, as all are the same
            assert set(table[below].to_pylist()) <= {"+I"}
        kind = [f'"{below}" AS "{node.row_kind}"'] if below and node.row_kind else []
        listed = ", ".join([*kind, *(f'{duck_sql(x.text)} AS "{x.name}"' for x in node.select)])
        where = " AND ".join(f"({duck_sql(x)})" for x in node.where) or "true"
        self.duck.register("__rows", table)
        found = self.duck.sql(f"SELECT {listed} FROM __rows WHERE {where}").to_arrow_table()
        if any(node is part.root for part in self.plan.parts):
            return found
        fields = ([pa.field(node.row_kind, pa.string())] if node.row_kind else []) + list(node.schema)
        return found.cast(pa.schema(fields))


def batch(table: Table, rows: Iterable[tuple[str, Row]]) -> pa.Table:
    """Changes as an input's micro-batch."""
    rows = list(rows)
    arrays = [pa.array([row[n] for _, row in rows], f.type) for n, f in enumerate(table.schema)]
    names = table.schema.names
    if table.row_kind is not None:
        arrays, names = [pa.array([kind for kind, _ in rows], pa.string()), *arrays], [table.row_kind, *names]
    return pa.table(arrays, names=names)


def duck_sql(text: str) -> str:
    """An expression of Spark's as DuckDB writes it."""
    return sqlglot.transpile(f"SELECT {text}", read="spark", write="duckdb")[0].removeprefix("SELECT ")


class Reference:
    """The folded inputs, and the query over them in DuckDB."""

    def __init__(self, sql: str, tables: Mapping[str, Table]) -> None:
        self.sql = sqlglot.transpile(sql, read="spark", write="duckdb")[0]
        self.tables = tables
        self.inputs = {name: FoldedInput(t.schema.names, t.unique_key) for name, t in tables.items()}
        self.duck = duckdb.connect(":memory:", config={"threads": "1"})

    def close(self) -> None:
        self.duck.close()

    def apply(self, changes: Changes) -> None:
        for name, rows in changes.items():
            for kind, row in rows:
                self.inputs[name].apply(kind, row)

    def rows(self) -> Counter[Row]:
        """What the query gives now."""
        for name, table in self.tables.items():
            live = self.inputs[name].rows()
            arrays = [pa.array([row[n] for row in live], f.type) for n, f in enumerate(table.schema)]
            self.duck.register(name, pa.table(arrays, names=table.schema.names))
        return Counter(tuple(map(canonical, row)) for row in self.duck.execute(self.sql).fetchall())
