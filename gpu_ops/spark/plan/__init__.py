"""The Spark plan of an operator: the union of its inputs, the shuffle, the metadata of columns."""
