"""The functions that users call with DataFrames, and the checks before a plan is built."""
