"""Lanes: how the columns of both inputs travel in one stream of rows.

A lane is one physical column that carries a left column in left rows and a right column in right rows,
so a union of the two needs no padding. Keys share a lane first: then the shuffle hashes a plain column.
"""

from __future__ import annotations

from typing import NamedTuple

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql import types as st

from gpu_ops.joins import Join, key_type
from gpu_ops.spark.client import PARTITION_BITS
from gpu_ops.spark.datatypes import arrow_type, is_binary_collated, nullable, spark_type

ORIGIN = "__origin"
"""Which partition of its source a row came from: p for left rows, -1-p for right ones; see `shuffle`."""

STAMP = "__stamp"
"""Where the shuffle does not keep rows in order: a number that rises within a source partition."""


class Lane(NamedTuple):
    """One physical column."""

    left: str | None
    right: str | None
    name: str
    type: st.DataType


def quoted(name: str) -> Column:
    """A column by its exact name, dots and all."""
    return f.col("`" + name.replace("`", "``") + "`")


def assign_lanes(join: Join, left: st.StructType, right: st.StructType) -> list[Lane]:
    """A lane for every column of both inputs, row kinds included.

    Args:
        join: its keys share a lane where their types are equal.
        left: the left DataFrame's schema.
        right: the right DataFrame's schema.
    """
    types = [{x.name: nullable(x.dataType) for x in schema.fields} for schema in (left, right)]
    pairs: list[tuple[str, str]] = []

    def pair(a: str, b: str) -> None:
        taken = any(a == x or b == y for x, y in pairs)
        if not taken and types[0][a] == types[1][b]:
            pairs.append((a, b))

    for key in join.keys:
        pair(key.left, key.right)
    if join.left.row_kind is not None and join.right.row_kind is not None:
        pair(join.left.row_kind, join.right.row_kind)
    free = [[n for n in types[s] if n not in {p[s] for p in pairs}] for s in (0, 1)]
    for a in list(free[0]):
        match = next((b for b in free[1] if types[1][b] == types[0][a]), None)
        if match is not None:
            pairs.append((a, match))
            free[0].remove(a)
            free[1].remove(match)
    alone: list[tuple[str | None, str | None]] = [(a, None) for a in free[0]]
    mapping = [*pairs, *alone, *((None, b) for b in free[1])]
    lanes = []
    for place, (a_, b_) in enumerate(mapping):
        kind = types[0][a_] if a_ is not None else types[1][str(b_)]
        lanes.append(Lane(a_, b_, f"c{place}", kind))
    return lanes


def to_lanes(df: DataFrame, side: int, lanes: list[Lane], *, stamped: bool) -> DataFrame:
    """One input's rows as they travel: origin, lanes, and a stamp where asked for.

    Spark refuses ``monotonically_increasing_id`` in a stream. Its shuffle keeps the rows of one source
    partition in order, so the partition's number is enough; the receiving task counts the rest.
    """
    part = f.spark_partition_id()
    columns = [(part if side == 0 else -1 - part).alias(ORIGIN)]
    for lane in lanes:
        own = lane[side]
        value = f.lit(None) if own is None else quoted(str(own))
        columns.append(value.cast(lane.type).alias(lane.name) if own is None else value.alias(lane.name))
    if stamped:
        clock = f.expr("java_method('java.lang.System', 'nanoTime')").cast("bigint")
        columns.append(clock.alias(STAMP))
    return df.select(*columns)


def kept(df: DataFrame) -> DataFrame:
    """The same rows, in a plan that Spark does not take for empty when its sources have nothing new.

    PropagateEmptyRelation would take the shuffle away, the join with it, and its partitions would miss
    a micro-batch. The rule knows most nodes that cost nothing; a generator other than explode it leaves.
    """
    names = df.columns
    return df.select("*", f.expr("stack(1, true)").alias("__kept")).select(*names)


def shuffle(rows: DataFrame, join: Join, lanes: list[Lane], partitions: int) -> DataFrame:
    """Rows by partition; their origin is joined by the number of the partition they are sent to.

    A task needs that number, and its own is no help: where a stage computes a union, Spark counts its
    tasks through. To add it after the shuffle would be simpler, but then the optimizer takes the join
    away where the shuffle turns out empty (AQEPropagateEmptyRelation). This is Spark's HashPartitioning.
    """
    by = distribution(join, lanes)
    goes_to = f.pmod(f.hash(*by), f.lit(partitions)) if by else f.lit(0)
    both = f.col(ORIGIN).cast("bigint") * (1 << PARTITION_BITS) + goes_to
    numbered = rows.select(both.alias(ORIGIN), *(f.col(c) for c in rows.columns if c != ORIGIN))
    return numbered.repartition(partitions, *by)


def distribution(join: Join, lanes: list[Lane]) -> list[Column]:
    """The expressions by which rows are partitioned; none for a single partition.

    Rows that are equal in the join are equal here: both sides in the type they are compared in, one
    zero, one NaN.
    """
    expressions = []
    for position in join.distribution:
        key = join.keys[position]
        own = next(x for x in lanes if x.left == key.left)
        other = next(x for x in lanes if x.right == key.right)
        wanted = key_type(join.left.schema.field(key.left), join.right.schema.field(key.right))
        kind = spark_type(wanted, own.type, other.type)
        columns = [f.col(x.name) for x in (own, other)]
        types = [arrow_type(x.type) for x in (own, other)]
        a, b = (c if t == wanted else c.cast(kind) for c, t in zip(columns, types, strict=True))
        value = a if own.name == other.name else f.when(f.col(ORIGIN) >= 0, a).otherwise(b)
        if isinstance(kind, (st.FloatType, st.DoubleType)):
            nan = f.lit(float("nan")).cast(kind)
            value = f.when(f.isnan(value), nan).when(value == 0, f.lit(0.0).cast(kind)).otherwise(value)
        expressions.append(value)
    return expressions


def collated_key(join: Join, left: st.StructType, right: st.StructType) -> str | None:
    """A key column whose collation makes different bytes equal, or None."""
    for schema, names in ((left, [k.left for k in join.keys]), (right, [k.right for k in join.keys])):
        for name in names:
            if not is_binary_collated(schema[name].dataType):
                return name
    return None
