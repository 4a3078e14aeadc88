"""The plan of rows that are aggregated by slices of time before they are shuffled: mapInArrow above them."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import types as st

from gpu_ops.query.nodes import LocalAggregate
from gpu_ops.spark.datatypes import arrow_schema, spark_type
from gpu_ops.spark.sources import files
from gpu_ops.spark.sources.readings import source_of
from gpu_ops.spark.tasks.made_of import OfRows
from gpu_ops.spark.tasks.slice import Slices
from gpu_ops.spark.workers import make_importable


def sliced(node: LocalAggregate, rows: DataFrame) -> DataFrame:
    """Rows aggregated; those of files as they are read.

    Args:
        node: how.
        rows: of the node below.
    """
    window, calls = node.window, tuple((function, of) for _, function, of in node.calls)
    schema = arrow_schema(rows.schema, node.time)
    slices = Slices(node.time, window.size, window.slide, window.offset, node.by, calls, schema, node.schema)
    own = {field.name: field.dataType for field in rows.schema}
    made = st.StructType([st.StructField(x.name, spark_type(x.type, own.get(x.name))) for x in node.schema])
    reading = source_of(rows)
    make_importable(rows.sparkSession)
    if reading is not None and isinstance(reading.source, files.Source):
        return reading.source.aggregated(slices, reading.taken, made)
    return rows.mapInArrow(OfRows("gpu_slices", slices), made)
