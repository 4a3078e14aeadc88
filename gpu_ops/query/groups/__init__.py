"""GROUP BY, and the first rows of a group."""
