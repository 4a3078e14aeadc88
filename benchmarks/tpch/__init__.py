"""TPC-H's and Nexmark's queries of several operators: ours on Spark against Flink SQL."""
