"""The final result of an interval join: a SQL join with the bounds as a condition, in DuckDB."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import duckdb
import pyarrow as pa

from gpu_ops.descriptions.join import Join
from oracle.drive import Event, Row, rows, tables
from oracle.interval_rules import WATERMARK, TimedEvent
from oracle.sql import quoted


def bounds_sql(join: Join) -> str:
    """The interval as a condition."""
    told = join.interval
    assert told is not None
    (a, own), (b, other) = ((quoted(s.name), quoted(str(s.event_time))) for s in join.inputs)
    whole = pa.types.is_integer(join.left.schema.field(str(join.left.event_time)).type)

    def bound(ms: int) -> str:
        return f"{a}.{own} + ({ms})" if whole else f"{a}.{own} + INTERVAL ({ms}) MILLISECOND"

    if told.lower_inclusive and told.upper_inclusive:
        return f"{b}.{other} BETWEEN {bound(told.lower_ms)} AND {bound(told.upper_ms)}"
    low, high = (">" + "=" * told.lower_inclusive, "<" + "=" * told.upper_inclusive)
    return f"{b}.{other} {low} {bound(told.lower_ms)} AND {b}.{other} {high} {bound(told.upper_ms)}"


def sql_join(join: Join, events: Sequence[TimedEvent]) -> Counter[Row]:
    """The join of all rows of a trace, as a multiset of the changelog's rows without a timestamp column."""
    own: list[Event] = [e for e in events if e[1] != WATERMARK]
    a, b = (quoted(s.name) for s in join.inputs)
    on = [
        f"{a}.{quoted(k.left)} {'IS NOT DISTINCT FROM' if k.null_safe else '='} {b}.{quoted(k.right)}"
        for k in join.keys
    ]
    on += [bounds_sql(join), *([f"({join.where})"] if join.where else [])]
    with duckdb.connect(":memory:", config={"threads": "1"}) as connection:
        for source, (table, _) in zip(join.inputs, tables(join, own), strict=True):
            connection.register(source.name, table)
        shown = f"{a}.*" if join.how in ("semi", "anti") else f"{a}.*, {b}.*"
        text = f"SELECT {shown} FROM {a} {join.how.upper()} JOIN {b} ON {' AND '.join(on)}"
        return Counter(rows(connection.sql(text).to_arrow_table()))
