"""Aggregates and the first rows of groups, as users call them."""
