"""What a query may not say, and what to do instead."""

from __future__ import annotations

from typing import Final

_AFTER: Final = (
    "the changelog that sql() returns can be aggregated in foreachBatch, where it is a plain DataFrame, or by the "
    "table it is merged into"
)
_SET: Final = "call sql() once for each and union what comes out (changes1.unionByName(changes2))"

CLAUSES: Final[dict[str, tuple[str, str]]] = {
    "GROUP": ("BY", f"GROUP BY is not understood: join first; {_AFTER}"),
    "HAVING": ("", f"HAVING is not understood: join first; {_AFTER}"),
    "ORDER": (
        "BY",
        "ORDER BY is not understood: a changelog has its own order; sort the table it is merged into",
    ),
    "SORT": ("BY", "SORT BY is not understood: a changelog has an order of its own"),
    "CLUSTER": ("BY", "CLUSTER BY is not understood: rows are distributed by the join's key; see partitions="),
    "DISTRIBUTE": ("BY", "DISTRIBUTE BY is not understood: rows are distributed by the join's key; see partitions="),
    "LIMIT": ("", "LIMIT is not understood: a stream has no end; limit the table the changelog is merged into"),
    "OFFSET": ("", "OFFSET is not understood: a stream has no end"),
    "UNION": ("", f"UNION is not understood: {_SET}"),
    "EXCEPT": ("", "EXCEPT is not understood: write NOT EXISTS (SELECT ...) or LEFT ANTI JOIN"),
    "MINUS": ("", "MINUS is not understood: write NOT EXISTS (SELECT ...) or LEFT ANTI JOIN"),
    "INTERSECT": ("", "INTERSECT is not understood: write EXISTS (SELECT ...) or LEFT SEMI JOIN"),
    "WINDOW": ("", f"window functions are not understood: {_AFTER}"),
    "QUALIFY": ("", f"QUALIFY is not understood: {_AFTER}"),
    "TABLESAMPLE": ("(", "TABLESAMPLE is not understood: sample the DataFrame, df.sample(...)"),
    "PIVOT": ("(", f"PIVOT is not understood: {_AFTER}"),
    "UNPIVOT": ("(", "UNPIVOT is not understood: unpivot the DataFrame first, df.unpivot(...)"),
    "MATCH_RECOGNIZE": ("(", "MATCH_RECOGNIZE is not understood"),
}
"""First word of a clause, the word that must follow it (or none), and why it is refused."""

JOIN_WORDS: Final = {
    "ALL", "ANY", "APPLY", "ARRAY", "ASOF", "BROADCAST", "EXCLUSION", "GLOBAL", "HASH", "INTERVAL", "LATERAL", "LOCAL",
    "LOOKUP", "LOOP", "MERGE", "OUTER", "PASTE", "POSITIONAL", "REMOTE", "STRAIGHT", "TEMPORAL",
}  # fmt: skip
"""What other dialects say before JOIN, and Spark's takes for another name of the table before it."""

TABLE_WORDS: Final = JOIN_WORDS | {
    "CHANGES", "EMIT", "FETCH", "FINAL", "FORCE", "FORMAT", "IGNORE", "INTO", "MATCH_RECOGNIZE", "NOLOCK", "ONLY",
    "OPTION", "PARTITION", "PREWHERE", "RETURNING", "ROWS", "SAMPLE", "SETTINGS", "STREAM", "UNNEST", "USE", "VERSION",
}  # fmt: skip
"""Those, and what other dialects say behind a table."""

STATEMENTS: Final[dict[str, str]] = {
    "INSERT": "sql() gives the changelog as a DataFrame; write it with writeStream",
    "CREATE": "sql() gives the changelog as a DataFrame; write it with writeStream",
    "MERGE": "sql() gives the changelog as a DataFrame; MERGE it in foreachBatch",
    "SET": "options are arguments of sql()",
    "EXPLAIN": "print(gpu_ops.explain(changes)) explains what sql() returned",
}

DISTINCT: Final = (
    "SELECT DISTINCT is not understood: it would have to count rows; dropDuplicates() on an insert-only input "
    "before the join, or keep one row per key in the table the changelog is merged into"
)
DISTINCT_INSIDE: Final = "DISTINCT is not needed in a sub-query after IN or EXISTS: leave it out"
AGGREGATE: Final = f"the aggregate {{}} is not understood: join first; {_AFTER}"
WINDOW: Final = f"a window function is not understood: join first; {_AFTER}"
GENERATOR: Final = "{} makes many rows of one: call it in Spark first, and join what that gives"
CHANGING: Final = (
    "{} gives another value each time, so a row could not be taken back: compute it in Spark before the join, as a "
    "column of an input that is stored with the row, or in foreachBatch"
)
SUBQUERY: Final = (
    "a sub-query can stand in FROM, and in WHERE as [NOT] EXISTS or [NOT] IN that is joined to the rest by AND"
)

AGGREGATES: Final = {
    "any", "some", "every", "bool_and", "bool_or", "collect_list", "collect_set", "listagg", "string_agg",
    "count_if", "first_value", "last_value", "nth_value", "percentile", "percentile_approx", "mode",
    "histogram_numeric",
    "bit_and", "bit_or", "bit_xor", "regr_count", "regr_slope", "try_sum", "try_avg", "approx_top_k", "any_value",
    "count_min_sketch", "grouping", "grouping_id", "schema_of_json_agg", "hll_sketch_agg", "max_by", "min_by",
}  # fmt: skip
WINDOWS: Final = {"row_number", "rank", "dense_rank", "ntile", "lag", "lead", "cume_dist", "percent_rank"}
GENERATORS: Final = {
    "explode", "explode_outer", "posexplode", "posexplode_outer", "inline", "inline_outer", "stack", "json_tuple",
}  # fmt: skip
UNSTABLE: Final = {
    "rand", "randn", "random", "randstr", "uniform", "uuid", "shuffle", "now", "current_timestamp", "current_date",
    "curdate", "current_time", "localtimestamp", "monotonically_increasing_id", "spark_partition_id",
    "input_file_name", "input_file_block_start", "input_file_block_length",
}  # fmt: skip
"""Functions whose value is another one when the row is taken back."""


def clause(word: str, following: str) -> str | None:
    """Why a clause that begins with these two words is refused; None if they begin none."""
    needs, why = CLAUSES.get(word, ("", None))
    return why if not needs or needs == following else None
