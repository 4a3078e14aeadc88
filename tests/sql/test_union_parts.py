"""UNION ALL taken apart: the parts, where they stand, the inputs that each names; and what is refused."""

from __future__ import annotations

import pytest

pytest.importorskip("pyspark")

from gpu_ops.errors import DescriptionError
from gpu_ops.query.errors import SqlError
from gpu_ops.spark.api.sql import parts_of, union

INPUTS = {"orders": 0, "prices": 0, "X y": 0}


def test_each_part_stands_where_it_stood() -> None:
    query = (
        "WITH c AS (SELECT id FROM orders UNION SELECT 1)\nSELECT id FROM c\n  UNION ALL\nSELECT `x Y`.id FROM `x Y`"
    )
    first, second = parts_of(query, INPUTS)
    assert first.sql == query[: query.index("  UNION ALL\n")] + "  "
    assert second.sql.split("\n") == [query.split("\n", maxsplit=1)[0], " " * 16, " " * 11, query.split("\n")[3]]
    assert (first.inputs, second.inputs) == (("orders",), ("orders", "X y"))


@pytest.mark.parametrize(
    "query",
    ["SELECT 1", "SELECT * FROM (SELECT 1 UNION ALL SELECT 2) AS t", "SELECT 'UNION ALL' -- UNION ALL", "SELECT '", ""],
)
def test_what_is_none(query: str) -> None:
    assert parts_of(query, INPUTS) == []


@pytest.mark.parametrize(
    ("query", "message", "column"),
    [
        ("SELECT 1 UNION SELECT 2", "UNION takes equal rows for one", 10),
        ("SELECT 1 UNION ALL SELECT 2 UNION DISTINCT SELECT 3", "UNION takes equal rows for one", 29),
        ("SELECT 1 UNION ALL SELECT 2 ORDER BY 1", "ORDER BY would be of the whole UNION ALL", 29),
        ("SELECT 1 UNION ALL SELECT 2 limit 3", "LIMIT would be of the whole UNION ALL", 29),
    ],
)
def test_what_is_refused(query: str, message: str, column: int) -> None:
    with pytest.raises(SqlError, match=message) as raised:
        parts_of(query, INPUTS)
    assert (raised.value.line, raised.value.column) == (1, column)


def test_a_union_is_of_several() -> None:
    with pytest.raises(DescriptionError, match="two changelogs or more"):
        union()
