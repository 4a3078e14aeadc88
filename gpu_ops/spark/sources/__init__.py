"""Streams of files that Arrow reads, and how their rows travel."""
