"""What a Spark task does: one exchange with its partition's state server."""
