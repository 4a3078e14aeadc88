"""Views for Spark's ``foreachBatch``: a changelog becomes a table or a topic that is right after every micro-batch.

``docs/sinks.md`` has what each promises when a micro-batch is repeated.
"""

from __future__ import annotations

from gpu_ops.sinks.delta import delta_view
from gpu_ops.sinks.jdbc import jdbc_view, postgres_view
from gpu_ops.sinks.kafka import kafka_debezium, kafka_upsert
from gpu_ops.sinks.memory import MemoryView, memory_view

__all__ = [
    "MemoryView",
    "delta_view",
    "jdbc_view",
    "kafka_debezium",
    "kafka_upsert",
    "memory_view",
    "postgres_view",
]
