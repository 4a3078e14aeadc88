"""What works group by group over one input: aggregates, the first rows of a key, the latest one."""
