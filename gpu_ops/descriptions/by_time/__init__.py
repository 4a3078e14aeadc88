"""Joins by time, as users write them down."""
