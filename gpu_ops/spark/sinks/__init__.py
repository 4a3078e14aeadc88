"""Views: a changelog as a table or a topic, for `foreachBatch`. Users see them as `gpu_ops.sinks`."""
