"""Joins by time that Spark's parser does not know: rewritten for it, and found again in its plan."""
