"""Streaming joins for PySpark with Flink's semantics, on Arrow and numpy, or on a GPU by libcudf and cupy.

``import gpu_ops`` needs neither Spark nor Java nor cuDF; the names in ``__init__.pyi`` are imported when first used.
"""

from gpu_ops.lazy import attach

__version__ = "0.1.0"

_GONE = {
    "write_kafka": "gpu_ops.sinks.json_messages(changes, key=...).writeStream.format('kafka') sends the same messages "
    "by Spark's own sink (docs/kafka.md)"
}

__getattr__, __dir__, __all__ = attach(__name__, __file__, _GONE)
