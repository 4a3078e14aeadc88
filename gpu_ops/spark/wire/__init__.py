"""What travels between a Spark task, the driver's directory and a state server, and how: rows, requests, answers."""
