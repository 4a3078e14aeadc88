"""The state of a join: tables of live rows, their indexes, and their durable versions."""
