"""The operators; what they share stands in `core`."""
