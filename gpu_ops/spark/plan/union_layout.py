"""The union layout: how the columns of all inputs travel in one stream of rows.

A column of the union carries a column of one input in that input's rows and of another in the other's, so the union
needs no padding. Keys share a column first: then the shuffle hashes a plain column.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql import types as st

from gpu_ops.descriptions.description import Description
from gpu_ops.descriptions.keys import Shuffle
from gpu_ops.spark.datatypes import arrow_schema, arrow_type, is_binary_collated, named_column, nullable, spark_type
from gpu_ops.spark.driver.queries import JoinPlan
from gpu_ops.spark.plan.changes import Changes, Reading
from gpu_ops.spark.tasks.packing import Packer
from gpu_ops.spark.tasks.rows import FirstRows, OfRows
from gpu_ops.spark.wire.arrivals import PACKED, Arrivals, Carried
from gpu_ops.spark.wire.command import Wire
from gpu_ops.spark.wire.hashes import routes
from gpu_ops.state.blocks import Blocks

INPUT: Final = "__input"
"""The number of the input that a row is of."""


class UnionColumn(NamedTuple):
    """One physical column: the column of each input that it carries, or None."""

    columns: tuple[str | None, ...]
    name: str
    type: st.DataType


def union_columns(join: Description, schemas: Sequence[st.StructType]) -> list[UnionColumn]:
    """The columns of the union, row kinds included; those that carry a column of several inputs come first.

    Args:
        join: its keys share a column where their types are equal.
        schemas: of the DataFrames.
    """
    types = [{x.name: nullable(x.dataType) for x in schema.fields} for schema in schemas]
    made: list[tuple[dict[int, str], st.DataType]] = []  # of each column of the union those of the inputs, and its type
    taken: list[set[str]] = [set() for _ in types]

    def share(columns: Sequence[str | None]) -> None:
        """Columns of equal types in one, as far as they have none yet."""
        free = {n: c for n, c in enumerate(columns) if c is not None and c not in taken[n]}
        while free:
            kind = next(types[n][c] for n, c in free.items())
            alike = {n: c for n, c in free.items() if types[n][c] == kind}
            free = {n: c for n, c in free.items() if n not in alike}
            if len(alike) > 1:
                made.append((alike, kind))
                for n, column in alike.items():
                    taken[n].add(column)

    for columns in join.equal_columns:
        share(columns)
    share([source.row_kind for source in join.inputs])
    for number, own in enumerate(types):
        for column, kind in own.items():
            if column in taken[number]:
                continue
            free = next((x for x, its in made if its == kind and number not in x), None)
            if free is None:
                made.append(({number: column}, kind))
            else:
                free[number] = column
    made.sort(key=lambda column: len(column[0]) == 1)
    return [
        UnionColumn(tuple(carried.get(n) for n in range(len(types))), f"c{number}", kind)
        for number, (carried, kind) in enumerate(made)
    ]


def wire(layout: Sequence[UnionColumn]) -> Wire:
    """How the inputs' columns are those of the union."""
    return Wire("__side", "__order", tuple((*x.columns, x.name) for x in layout))


def wire_schema(layout: Sequence[UnionColumn]) -> pa.Schema:
    """The schema in which rows travel: side, order and the columns of the union."""
    fixed = [pa.field("__side", pa.int8()), pa.field("__order", pa.int64())]
    return pa.schema([*fixed, *(pa.field(x.name, arrow_type(x.type)) for x in layout)])


def in_union(df: DataFrame, number: int, layout: Sequence[UnionColumn]) -> DataFrame:
    """One input's rows as Spark's: the number of the input and the columns of the union."""
    columns = [f.lit(number).cast("tinyint").alias(INPUT)]
    for column in layout:
        own = column.columns[number]
        value = f.lit(None).cast(column.type) if own is None else named_column(own)
        columns.append(value.alias(column.name))
    return df.select(*columns)


def shuffle(rows: DataFrame, join: Description, layout: Sequence[UnionColumn], partitions: int) -> DataFrame:
    """Rows of `in_union` by partition, by Spark's own hash: nothing is stored of where they went."""
    return rows.repartition(partitions, *(_distributed(value, layout) for value in join.shuffled_by))


def _distributed(by: Shuffle, layout: Sequence[UnionColumn]) -> Column:
    """An expression by which rows are partitioned.

    Rows that are equal in the join are equal here: all inputs' in the type they are compared in, one
    zero, one NaN.
    """
    own = [next(x for x in layout if x.columns[n] == column) for n, column in enumerate(by.columns)]
    kind = spark_type(by.type, *(x.type for x in own))
    different = list(dict.fromkeys(x.name for x in own))
    value: Column | None = None
    for name in reversed(different):
        numbers = [n for n, x in enumerate(own) if x.name == name]
        plain = arrow_type(own[numbers[0]].type) == by.type
        column = f.col(name) if plain else f.col(name).cast(kind)
        value = column if value is None else f.when(f.col(INPUT).isin(*numbers), column).otherwise(value)
    assert value is not None
    if isinstance(kind, (st.FloatType, st.DoubleType)):
        nan = f.lit(float("nan")).cast(kind)
        value = f.when(f.isnan(value), nan).when(value == 0, f.lit(0.0).cast(kind)).otherwise(value)
    return value


def collated_key(join: Description, schemas: Sequence[st.StructType]) -> str | None:
    """A key column, or one that is compared, whose collation makes different bytes equal, or None."""
    return next((name for n, name in join.compared_columns if not is_binary_collated(schemas[n][name].dataType)), None)


_PACKED_TYPE: Final = st.StructType([st.StructField(x.name, spark_type(x.type), False) for x in PACKED])

MESSAGE_BYTES: Final = 1 << 18
"""About as much goes into one of Spark's rows."""


def packed_rows(
    join: Description,
    inputs: Sequence[DataFrame],
    readings: Sequence[Reading | None],
    layout: Sequence[UnionColumn],
    plan: JoinPlan,
    *,
    blocks: Blocks | None,
) -> tuple[list[DataFrame], Arrivals]:
    """Each input with many rows in one, made for a partition each, and what a task makes of those.

    What packs is a function in Python: the optimizer takes neither it away nor, where the sources have nothing new, the
    shuffle and the join behind it, whose partitions would miss a micro-batch.

    Args:
        join: the description.
        inputs: in its order.
        readings: `gpu_ops.spark.plan.changes.source_of` each.
        layout: of their columns.
        plan: what is known of the join besides.
        blocks: where tasks leave their messages, if all are on one machine.
    """
    partitions = plan.partitions
    schemas = [arrow_schema(df.schema, source.name) for df, source in zip(inputs, join.inputs, strict=True)]
    roads, sides = routes(partitions), []
    for number, (df, reading) in enumerate(zip(inputs, readings, strict=True)):
        by = tuple((by.columns[number], by.type) for by in join.shuffled_by)
        # of changes, which have been checked: of other rows a bad one has to be found
        first = FirstRows.wanted(join) if reading is not None and isinstance(reading.source, Changes) else None
        packer = Packer(join.inputs[number].name, number, schemas[number], by, roads, MESSAGE_BYTES, first, blocks)
        sides.append(_packed(df, reading, packer))
    carried = [Carried(schema, tuple(x.columns[number] for x in layout)) for number, schema in enumerate(schemas)]
    return sides, Arrivals(wire_schema(layout), carried, first=plan.loaded)


def _packed(df: DataFrame, reading: Reading | None, packer: Packer) -> DataFrame:
    if reading is None:
        return df.mapInArrow(OfRows("gpu_join_pack", packer), _PACKED_TYPE)
    return reading.source.packed(packer, reading.taken, _PACKED_TYPE)
