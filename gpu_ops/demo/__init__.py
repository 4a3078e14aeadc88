"""The demonstration behind ``gpu-join demo``: a join one can read, and TPC-H as a stream of changes."""
