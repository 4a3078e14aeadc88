"""Jobs in a file: sources, a query and a sink, as SQL in Flink's form; ``gpu-join run`` runs them."""
