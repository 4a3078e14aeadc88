from gpu_ops.spark.sinks.changes import MemoryView as MemoryView
from gpu_ops.spark.sinks.changes import json_messages as json_messages
from gpu_ops.spark.sinks.changes import kafka_debezium as kafka_debezium
from gpu_ops.spark.sinks.changes import kafka_upsert as kafka_upsert
from gpu_ops.spark.sinks.changes import memory_view as memory_view
from gpu_ops.spark.sinks.delta import delta_view as delta_view
from gpu_ops.spark.sinks.jdbc import jdbc_view as jdbc_view
from gpu_ops.spark.sinks.jdbc import postgres_view as postgres_view
