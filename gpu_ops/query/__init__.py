"""SQL in front of the joins: a query to a plan of operators, and a plan to DataFrames.

Named after what is written, not ``sql``: that is the function, ``gpu_ops.sql(...)``, and a package of the same
name would take its place as soon as it is imported.
"""
