"""The state server, a process that owns the state of some partitions, and the content of state folders."""
