"""What a query may not contain and what to do instead; its error, with line and column in the text."""

from __future__ import annotations

import re
from typing import Final

from gpu_ops.errors import DescriptionError, TextError


class SqlError(TextError):
    """A query that cannot be planned."""


class PlacedError(DescriptionError):
    """What is wrong with a part of a query, until somebody knows its text.

    Args:
        message: what is wrong.
        place: line and column, both from 1.
    """

    def __init__(self, message: str, place: tuple[int, int]) -> None:
        super().__init__(message)
        self.place = place


def in_sql(error: DescriptionError) -> str:
    """What a description refuses, its arguments in Python as the names of what they say."""
    text = re.sub(r"\bon=", "ON", str(error))
    return re.sub(r"\b([a-z_]+)=(?=['\d])", r"\1 ", re.sub(r"\b([a-z_]+)=(?!['\d])", r"\1", text))


_AFTER: Final = (
    "the changelog that sql() returns can be aggregated in foreachBatch, where it is a plain DataFrame, or by the "
    "table it is merged into"
)
LIMIT: Final = "which rows? A stream has no order of its own: write ORDER BY before LIMIT"
NODES: Final[dict[str, str]] = {
    "Sort": "ORDER BY is understood with LIMIT only: a changelog has its own order; sort the table it is merged into",
    "RepartitionByExpression": "rows are distributed by the join's key; see the option partitions",
    "LocalLimit": LIMIT,
    "LimitAll": LIMIT,
    "Offset": "OFFSET is not understood: take the rows before it, too, and leave them out of the table they go to",
    "Except": "EXCEPT is not understood: write NOT EXISTS (SELECT ...) or LEFT ANTI JOIN",
    "Intersect": "INTERSECT is not understood: write EXISTS (SELECT ...) or LEFT SEMI JOIN",
    "Sample": "TABLESAMPLE is not understood: sample the DataFrame, df.sample(...)",
    "Pivot": f"PIVOT is not understood: {_AFTER}",
    "Expand": f"UNPIVOT and grouping sets are not understood: {_AFTER}",
    "Generate": "what makes many rows of one is not understood: explode in Spark first, and join what that gives",
    "LateralJoin": "LATERAL is not understood: explode in Spark first, and join what that gives",
    "ResolvedHint": "hints are not understood: there is one way to run each join; see the option multi_way",
    "OneRowRelation": "no FROM: it joins nothing",
    "UnionLoop": "WITH RECURSIVE is not understood",
    "CTERelationRef": "WITH RECURSIVE is not understood",
    "Command": "sql() takes a SELECT: it gives the changelog as a DataFrame, to be written with writeStream",
}
"""By the name of a node of Catalyst's plan."""

RELATION: Final = "this is not among the inputs: each is given to sql() by the name that the query calls it"
JOINS_NOTHING: Final = (
    "the query joins and groups nothing: filter and project one stream in Spark, df.where(...).select(...)"
)
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
TODAY: Final = r"\s*(?:now|today|tomorrow|yesterday)\b"
"""What Spark takes in texts for the time at which a plan is made (``SpecialDatetimeValues``)."""


def one(noun: str) -> str:
    """A noun with its article."""
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"
