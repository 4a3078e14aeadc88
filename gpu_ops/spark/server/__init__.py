"""The state server: a process that owns the state of some partitions; and what its folders hold."""
