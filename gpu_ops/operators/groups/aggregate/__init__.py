"""Aggregates that are kept up to date; those at the end of input stand in `gpu_ops.operators.groups.at_end`."""
