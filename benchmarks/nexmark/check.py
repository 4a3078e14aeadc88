"""Is a changelog right? DuckDB folds it, runs the same query over the same files, and compares them as multisets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import duckdb

from benchmarks.nexmark.queries import Query

_DIFFERENCE = """
CREATE TEMP TABLE difference AS
SELECT * EXCLUDE (n), sum(n)::BIGINT AS surplus FROM (
    SELECT * EXCLUDE (row_kind), CASE WHEN row_kind IN ('+I', '+U') THEN 1 ELSE -1 END AS n FROM changelog
    UNION ALL SELECT *, -1 AS n FROM expected
) GROUP BY ALL HAVING surplus <> 0
"""


@dataclass(frozen=True)
class Check:
    """What the comparison found.

    Attributes:
        changes: in the changelog.
        rows: of DuckDB's result.
        missing: rows that the folded changelog lacks.
        surplus: rows that it has and should not.
    """

    changes: int
    rows: int
    missing: int
    surplus: int

    @property
    def equal(self) -> bool:
        """Whether they are the same."""
        return not (self.missing or self.surplus)


def check(query: Query, data: Path, changelog: list[Path]) -> Check:
    """Compares the changelog of a query with DuckDB's result.

    Args:
        query: the query.
        data: the folder of `benchmarks.nexmark.generator.write`.
        changelog: Parquet files, all together the changelog.
    """
    with duckdb.connect() as db:
        for side in query.sides:
            db.read_parquet(str(data / side.table / "*.parquet")).create_view(side.table)
        db.read_parquet([str(path) for path in changelog]).create_view("changelog")
        db.execute(f"CREATE TEMP TABLE expected AS {query.text}")
        db.execute(_DIFFERENCE)
        found = db.execute(
            "SELECT (SELECT count(*) FROM changelog), (SELECT count(*) FROM expected), "
            "(SELECT coalesce(-sum(surplus), 0) FROM difference WHERE surplus < 0), "
            "(SELECT coalesce(sum(surplus), 0) FROM difference WHERE surplus > 0)"
        ).fetchone()
    assert found is not None, "a query of one row has one"
    return Check(*map(int, found))
