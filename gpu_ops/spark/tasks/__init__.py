"""The functions of ``mapInArrow``: what Spark tasks do with the rows of a partition."""
