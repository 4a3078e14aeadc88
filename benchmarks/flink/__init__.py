"""The peer `vs_flink`: the same join on Apache Flink, from its PyPI wheel."""
