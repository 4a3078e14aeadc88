"""State servers on the executors of a cluster."""
