"""The metrics of joins, and their ways to the driver, to Spark's progress and to Prometheus."""
