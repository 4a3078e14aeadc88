"""The plan of a join whose inputs are packed: files or messages -> mapInArrow(pack) -> repartition by route."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from pyspark.sql import DataFrame
from pyspark.sql import types as st

from gpu_ops.descriptions.description import Description
from gpu_ops.spark.cluster.executors import on_cluster
from gpu_ops.spark.datatypes import arrow_schema, spark_type
from gpu_ops.spark.exchange.arrivals import PACKED, Carried, Packed
from gpu_ops.spark.exchange.blocks import local_blocks
from gpu_ops.spark.plan.recognition import JoinPlan
from gpu_ops.spark.plan.union_layout import Travel, UnionColumn, wire_schema
from gpu_ops.spark.sources.murmur import int_hash
from gpu_ops.spark.sources.packing import Packer
from gpu_ops.spark.sources.readings import Changes, Reading
from gpu_ops.spark.tasks.first import FirstRows
from gpu_ops.spark.tasks.made_of import OfRows

_PACKED_TYPE: Final = st.StructType([st.StructField(x.name, spark_type(x.type), False) for x in PACKED])

MESSAGE_BYTES: Final = 1 << 18
"""About as much goes into one of Spark's rows."""


def packed_rows(
    join: Description,
    inputs: Sequence[DataFrame],
    readings: Sequence[Reading | None],
    layout: Sequence[UnionColumn],
    plan: JoinPlan,
) -> Travel:
    """Many rows in one, each made for a partition.

    Args:
        join: the description.
        inputs: in its order.
        readings: `gpu_ops.spark.sources.readings.source_of` each.
        layout: of their columns.
        plan: what is known of the join besides.
    """
    partitions = plan.partitions
    schemas = [arrow_schema(df.schema, source.name) for df, source in zip(inputs, join.inputs, strict=True)]
    roads, context = routes(partitions), inputs[0].sparkSession.sparkContext
    blocks = None if on_cluster(context) else local_blocks(context)
    sides = []
    for number, (df, reading) in enumerate(zip(inputs, readings, strict=True)):
        by = tuple((by.columns[number], by.type) for by in join.shuffled_by)
        # of changes, which have been checked: of other rows a bad one has to be found
        first = FirstRows.wanted(join) if reading is not None and isinstance(reading.source, Changes) else None
        packer = Packer(join.inputs[number].name, number, schemas[number], by, roads, MESSAGE_BYTES, first, blocks)
        sides.append(_packed(df, reading, packer))
    carried = [Carried(schema, tuple(x.columns[number] for x in layout)) for number, schema in enumerate(schemas)]
    arrivals = Packed(wire_schema(layout), carried, first=plan.loaded)
    return Travel(sides, lambda union: union.repartition(partitions, "route"), arrivals)


def _packed(df: DataFrame, reading: Reading | None, packer: Packer) -> DataFrame:
    if reading is None:
        return df.mapInArrow(OfRows("gpu_join_pack", packer), _PACKED_TYPE)
    return reading.source.packed(packer, reading.taken, _PACKED_TYPE)


def routes(partitions: int) -> tuple[int, ...]:
    """For each partition the least number that Spark's HashPartitioning sends there.

    That is its hash modulo the partitions.
    """
    size = 16 * partitions
    while True:
        places = int_hash(np.arange(size, dtype=np.int32)) % partitions
        found, least = np.unique(places, return_index=True)
        if found.size == partitions:
            return tuple(least.tolist())
        size *= 2
