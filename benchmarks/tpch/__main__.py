"""`python -m benchmarks.tpch`."""

from benchmarks.tpch.run import main

main()
