"""The wire between a Spark task, the driver's directory and a state server: rows, requests and replies."""
