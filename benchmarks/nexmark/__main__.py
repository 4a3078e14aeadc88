"""`python -m benchmarks.nexmark`."""

from benchmarks.nexmark.run import main

main()
