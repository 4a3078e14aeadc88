"""Top-N: the first rows of each group."""
