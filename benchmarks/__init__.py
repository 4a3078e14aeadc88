"""Benchmarks: generated changes, the peers they are measured against, and how results are written down."""
