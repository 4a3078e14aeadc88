"""The same left join by others: libcudf's own, ``cudf.merge``, cudf-polars; polars and DuckDB on all the host's cores.

None of them keeps state between micro-batches. So they are asked twice: to join all rows once, beside a join at the end
of its input, and to join the rows of one micro-batch with a large table that is there already, beside a micro-batch of
`benchmarks.gpu.steady`. ``alone`` begins and ends in the peer's own memory, ``arrow_to_arrow`` in Arrow's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.gpu.card import Plan, free_bytes, lacks_memory
from benchmarks.gpu.others import at_end, tables
from benchmarks.gpu.suites import missing
from benchmarks.gpu.transfer import wall_ms
from gpu_ops.backends import Backend

Join = tuple[Callable[[], Any] | None, Callable[[], pa.Table]]
"""In the peer's own memory, if that can be told apart, and from Arrow to Arrow."""
COLUMNS = ["k", "a", "b"]


def libcudf(left: pa.Table, right: pa.Table) -> Join:
    """`pylibcudf.join.left_join`, and the gathers."""
    import pylibcudf as plc

    def there(table: pa.Table) -> Any:
        return plc.Table([plc.Column.from_arrow(column.combine_chunks()) for column in table.columns])

    def join(left: Any, right: Any) -> Any:
        keys = (plc.Table([table.columns()[0]]) for table in (left, right))
        maps = plc.join.left_join(*keys, plc.types.NullEquality.UNEQUAL)
        policy = plc.copying.OutOfBoundsPolicy
        ours = plc.copying.gather(left, maps[0], policy.DONT_CHECK)
        theirs = plc.copying.gather(plc.Table([right.columns()[1]]), maps[1], policy.NULLIFY)
        return [*ours.columns(), *theirs.columns()]

    own = there(left), there(right)
    return (
        lambda: join(*own),
        lambda: pa.table([column.to_arrow() for column in join(there(left), there(right))], COLUMNS),
    )


def cudf_merge(left: pa.Table, right: pa.Table) -> Join:
    """DataFrames of cuDF's, as in pandas: null keys match each other there, and none is null here."""
    import cudf

    def there(table: pa.Table) -> Any:
        return cudf.DataFrame.from_arrow(table)

    own = there(left), there(right)
    return (
        lambda: own[0].merge(own[1], on="k", how="left"),
        lambda: there(left).merge(there(right), on="k", how="left").to_arrow(preserve_index=False).select(COLUMNS),
    )


def cudf_polars(left: pa.Table, right: pa.Table) -> Join:
    """Polars with its GPU engine, which takes its rows from the host and gives them back there."""
    import polars as pl

    engine = pl.GPUEngine(raise_on_fail=True)
    frames = [pl.from_arrow(table).lazy() for table in (left, right)]  # type: ignore[union-attr]
    return None, lambda: frames[0].join(frames[1], on="k", how="left").collect(engine=engine).to_arrow()


def polars(left: pa.Table, right: pa.Table) -> Join:
    """Makes the join in polars, on all cores."""
    import polars as pl

    def there(table: pa.Table) -> Any:
        return pl.from_arrow(table)

    own = there(left), there(right)
    return (
        lambda: own[0].join(own[1], on="k", how="left"),
        lambda: there(left).join(there(right), on="k", how="left").to_arrow(),
    )


def duckdb(left: pa.Table, right: pa.Table) -> Join:
    """Makes the join in DuckDB, on all cores."""
    import duckdb as db

    connection = db.connect()
    query = "SELECT k, a, b FROM {} AS l LEFT JOIN {} AS r USING (k)"
    for name, table in (("ours", left), ("theirs", right)):
        connection.register(f"arrow_{name}", table)
        connection.execute(f"CREATE TABLE {name} AS SELECT * FROM arrow_{name}")  # noqa: S608 - names of this file
    return (
        lambda: connection.execute(f"CREATE OR REPLACE TABLE found AS {query.format('ours', 'theirs')}"),
        lambda: connection.sql(query.format("arrow_ours", "arrow_theirs")).to_arrow_table(),
    )


PEERS: dict[str, tuple[Callable[[pa.Table, pa.Table], Join], tuple[str, ...]]] = {
    "libcudf": (libcudf, ()),
    "cudf.merge": (cudf_merge, ("cudf",)),
    "cudf-polars": (cudf_polars, ("polars", "cudf_polars")),
    "polars": (polars, ("polars",)),
    "duckdb": (duckdb, ("duckdb",)),
}
"""With what has to be installed."""


def peers(backend: Backend, rows: int, changes: int, plan: Plan) -> dict[str, Any]:
    """All peers, at both questions.

    Args:
        backend: of this pack's own join.
        rows: of each input.
        changes: of a micro-batch.
        plan: how to measure.

    Returns:
        ``all_rows`` and ``micro_batch``; in each, by peer, milliseconds ``alone`` and ``arrow_to_arrow``, or
        ``left_out``, why not. In ``all_rows`` also ``ours``, see `benchmarks.gpu.others.at_end`.

    Raises:
        AssertionError: a peer found other rows.
    """
    left, right = tables(rows, 2)
    few = left.slice(0, changes // 2)
    return {
        "rows_per_input": rows,
        "all_rows": {"ours": at_end(backend, rows, changes), **dict(_each(left, right, plan))},
        "micro_batch": {"changes": few.num_rows, **dict(_each(few, right, plan))},
    }


def _each(left: pa.Table, right: pa.Table, plan: Plan) -> Iterator[tuple[str, dict[str, Any]]]:
    lookup = np.empty(right.num_rows, np.int64)
    lookup[right["k"].to_numpy()] = right["b"].to_numpy()
    wanted = (
        left.num_rows,
        pc.sum(left["k"]).as_py(),
        pc.sum(left["a"]).as_py(),
        int(lookup[left["k"].to_numpy()].sum()),
    )
    for name, (make, needs) in PEERS.items():
        gone = missing(needs)
        why = f"not installed: {', '.join(gone)}" if gone else plan.clock.lacks(10)
        why = why or lacks_memory(200 * (left.num_rows + right.num_rows), free_bytes())
        if why is not None:
            yield name, {"left_out": why}
            continue
        try:
            alone, whole = make(left, right)
            found = whole()
            said = found.num_rows, *(pc.sum(found[column]).as_py() for column in COLUMNS)
            assert said == wanted, f"{name} found {said}, not {wanted}"
            one: dict[str, Any] = {"arrow_to_arrow": {"ms": wall_ms([whole], min(plan.rounds, 3))}}
            if alone is not None:
                one["alone"] = {"ms": wall_ms([alone], min(plan.rounds, 3))}
        except AssertionError:
            raise
        except (Exception, MemoryError) as error:  # one that fails on this host says nothing about the others
            one = {"left_out": f"failed: {type(error).__name__}: {error}"}
        alone = whole = None
        print("peer", name, left.num_rows, right.num_rows, {n: f["ms"].median for n, f in one.items() if "ms" in f})
        yield name, one
