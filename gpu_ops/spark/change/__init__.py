"""A query that changes keeps its state: `gpu_ops.change` and `gpu_ops.plan_change`."""
