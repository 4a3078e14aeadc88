"""The same queries on this pack and on its peers, from CSV files to files: `python -m benchmarks.peers`."""
