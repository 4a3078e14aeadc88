"""A micro-batch's way from Spark tasks to state servers: how rows arrive, one exchange with a partition's server."""
