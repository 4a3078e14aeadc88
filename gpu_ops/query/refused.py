"""What a query may not say, and what to do instead."""

from __future__ import annotations

from typing import Final

_AFTER: Final = (
    "the changelog that sql() returns can be aggregated in foreachBatch, where it is a plain DataFrame, or by the "
    "table it is merged into"
)
_LIMIT: Final = "LIMIT is not understood: a stream has no end; limit the table the changelog is merged into"

DISTINCT: Final = (
    "DISTINCT is not understood: it would have to count rows; dropDuplicates() on an insert-only input "
    "before the join, or keep one row per key in the table the changelog is merged into. After IN it is not needed: "
    "leave it out"
)
NODES: Final[dict[str, str]] = {
    "Aggregate": f"aggregates and GROUP BY are not understood: join first; {_AFTER}",
    "Window": f"window functions are not understood: join first; {_AFTER}",
    "Distinct": DISTINCT,
    "Deduplicate": DISTINCT,
    "Sort": "ORDER BY is not understood: a changelog has its own order; sort the table it is merged into",
    "RepartitionByExpression": "rows are distributed by the join's key; see partitions=",
    "GlobalLimit": _LIMIT,
    "LocalLimit": _LIMIT,
    "LimitAll": _LIMIT,
    "Offset": "OFFSET is not understood: a stream has no end",
    "Union": "UNION is not understood: call sql() once for each and union what comes out (a.unionByName(b))",
    "Except": "EXCEPT is not understood: write NOT EXISTS (SELECT ...) or LEFT ANTI JOIN",
    "Intersect": "INTERSECT is not understood: write EXISTS (SELECT ...) or LEFT SEMI JOIN",
    "Sample": "TABLESAMPLE is not understood: sample the DataFrame, df.sample(...)",
    "Pivot": f"PIVOT is not understood: {_AFTER}",
    "Expand": f"UNPIVOT and grouping sets are not understood: {_AFTER}",
    "Generate": "what makes many rows of one is not understood: explode in Spark first, and join what that gives",
    "LateralJoin": "LATERAL is not understood: explode in Spark first, and join what that gives",
    "ResolvedHint": "hints are not understood: there is one way to run each join; see multi_way=",
    "OneRowRelation": "no FROM: it joins nothing",
    "UnionLoop": "WITH RECURSIVE is not understood",
    "CTERelationRef": "WITH RECURSIVE is not understood",
    "Command": "sql() takes a SELECT: it gives the changelog as a DataFrame, to be written with writeStream",
}
"""By the name of a node of Catalyst's plan."""

RELATION: Final = "this is not among the inputs: each is an argument, sql(query, name=df)"
JOINS_NOTHING: Final = "the query joins nothing: filter and project one stream in Spark, df.where(...).select(...)"
SUBQUERY: Final = (
    "a sub-query can stand in FROM, and in WHERE as [NOT] EXISTS or [NOT] IN that is joined to the rest by AND"
)
CHANGING: Final = (
    "{} gives another value each time, so a row could not be taken back: compute it in Spark before the join, as a "
    "column of an input that is stored with the row, or in foreachBatch"
)
SUBQUERIES: Final = {"ScalarSubquery", "ListQuery", "Exists", "InSubquery", "LateralSubquery"}
NOW: Final = {"CurrentTimestamp", "CurrentDate", "CurrentTime", "Now", "LocalTimestamp", "CurrentBatchTimestamp"}
"""Constant within a micro-batch, and another one in the next."""

NOT_BELOW_FULL: Final = (
    "this filter would have to stand below a full join, on an input that brings upserts: its row before would "
    "stay. Give the input's old rows too (stream(..., updates='retract')), or filter above the join"
)
