"""Is the changelog right? DuckDB folds it, joins the folded inputs itself, and compares."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import duckdb
import pyarrow as pa

from gpu_ops.descriptions.changelog import ROW_KIND_COLUMN

ROW_KIND: Final = "op"
"""The row-kind column of the inputs."""

Rows: TypeAlias = "Sequence[str] | pa.Table"
"""Parquet files, or a table in memory."""

# The multiplicity of each distinct row; rows that come and go again have none.
_FOLD: Final = """
CREATE TEMP TABLE {name}_now AS
SELECT * EXCLUDE ({kind}), sum(CASE WHEN {kind} IN ('+I', '+U') THEN 1 ELSE -1 END)::BIGINT AS {name}_n
FROM {name}_changes GROUP BY ALL HAVING {name}_n <> 0
"""
_EXPECTED: Final = """
CREATE TEMP TABLE expected AS
SELECT * EXCLUDE (left_n, right_n), left_n * coalesce(right_n, 1) AS n
FROM left_now {how} JOIN right_now {condition}
"""
_DIFFERENT: Final = """
SELECT * EXCLUDE (n), sum(n)::BIGINT AS surplus FROM (
    SELECT * EXCLUDE (changelog_n), changelog_n AS n FROM changelog_now
    UNION ALL BY NAME
    SELECT * EXCLUDE (n), -n AS n FROM expected
) GROUP BY ALL HAVING surplus <> 0
"""


@dataclasses.dataclass(frozen=True)
class Check:
    """What the comparison found.

    Attributes:
        rows: rows of the folded changelog.
        expected: rows of DuckDB's join.
        pads: rows of DuckDB's join without a match, null where the right's columns would be.
        changes: changes in the changelog, by row kind.
        missing: rows that the changelog lacks.
        surplus: rows that it has and should not.
        sample: some of either, as text; empty when there are none.
    """

    rows: int
    expected: int
    pads: int
    changes: Mapping[str, int]
    missing: int
    surplus: int
    sample: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether the folded changelog is the join."""
        return not (self.missing or self.surplus)


def check(changelog: Rows, left: Rows, right: Rows, *, how: str, condition: str, pad: str) -> Check:
    """Compares a changelog with DuckDB's join of the folded inputs.

    Args:
        changelog: the join's output; its row kinds in ``row_kind``.
        left: changes of the left input; their row kinds in `ROW_KIND`.
        right: changes of the right input, likewise.
        how: the join type, SQL.
        condition: ``"USING (k)"`` or ``"ON l_k = r_k"``.
        pad: a column of the join that is null in unmatched rows only.

    Returns:
        Equal or not, and the numbers.
    """
    with duckdb.connect() as db:
        for name, rows in (("left", left), ("right", right), ("changelog", changelog)):
            if isinstance(rows, pa.Table):
                db.register(f"{name}_changes", rows)
            else:
                db.read_parquet(list(rows)).create_view(f"{name}_changes")
            fold(db, name, ROW_KIND_COLUMN if name == "changelog" else ROW_KIND)
        db.execute(_EXPECTED.format(how=how, condition=condition))
        db.execute(f"CREATE TEMP TABLE different AS {_DIFFERENT}")
        return Check(
            rows=_number(db, "SELECT sum(changelog_n) FROM changelog_now"),
            expected=_number(db, "SELECT sum(n) FROM expected"),
            pads=_number(db, f"SELECT sum(n) FROM expected WHERE {pad} IS NULL"),  # noqa: S608 (our column)
            changes=dict(db.execute("SELECT row_kind, count(*) FROM changelog_changes GROUP BY 1").fetchall()),
            missing=_number(db, "SELECT -sum(surplus) FROM different WHERE surplus < 0"),
            surplus=_number(db, "SELECT sum(surplus) FROM different WHERE surplus > 0"),
            sample=tuple(str(row) for row in db.execute("SELECT * FROM different LIMIT 5").fetchall()),
        )


def fold(db: duckdb.DuckDBPyConnection, name: str, kind: str) -> None:
    """Makes ``<name>_now`` of ``<name>_changes``: each row that is there, and in ``<name>_n`` how often."""
    db.execute(_FOLD.format(name=name, kind=kind))


def difference(db: duckdb.DuckDBPyConnection, expected: str) -> list[str]:
    """In what ``changelog_changes`` differ from a query, as text.

    Args:
        db: has a table or view of that name.
        expected: gives rows, and in ``n`` how often each.
    """
    fold(db, "changelog", ROW_KIND_COLUMN)
    db.execute(f"CREATE TEMP TABLE expected AS {expected}")
    return [str(row) for row in db.execute(_DIFFERENT).fetchall()]


def _number(db: duckdb.DuckDBPyConnection, sql: str) -> int:
    row = db.execute(sql).fetchone()
    return int(row[0] or 0) if row else 0
