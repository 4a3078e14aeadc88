"""Joins by time as functions from DataFrames to their changelog."""
