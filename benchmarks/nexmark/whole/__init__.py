"""Nexmark's q4, q5, q7 and q9 with their aggregates, windows and top-N, and DuckDB's answer over the files so far.

The texts are nexmark-flink's in Spark's words: ``window(dateTime, '10 seconds', '2 seconds')`` for ``HOP``, and so on.
Windows are not closed by a watermark: their rows change as bids come. DuckDB has no windows over time, so that the
answers of q5 and q7 are asked for in other words.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import duckdb
import pyarrow as pa

from gpu_ops.demo.tpch import difference

NAMES: Final = ("q4", "q5", "q7", "q9")
TABLES: Final = {"q4": ("auction", "bid"), "q5": ("bid",), "q7": ("bid",), "q9": ("auction", "bid")}

_COUNTS = """
SELECT auction, count(*) AS num, w AS starttime, w + INTERVAL 10 SECOND AS endtime
FROM (SELECT auction, dateTime, unnest([time_bucket(INTERVAL 2 SECOND, dateTime) - INTERVAL 2 SECOND * i
    FOR i IN range(5)]) AS w FROM bid) GROUP BY auction, w
"""
_DUCKDB: Final = {
    "q5": """
WITH counts AS ({counts})
SELECT * FROM counts
WHERE num = (SELECT max(num) FROM counts AS other WHERE other.starttime = counts.starttime)
""",
    "q7": """
WITH highest AS (
    SELECT max(price) AS maxprice, time_bucket(INTERVAL 10 SECOND, dateTime) AS begins FROM bid GROUP BY begins
)
SELECT b.auction, b.price, b.bidder, b.dateTime, b.extra FROM bid b JOIN highest ON price = maxprice
WHERE b.dateTime BETWEEN begins AND begins + INTERVAL 10 SECOND
""",
}


def text(name: str) -> str:
    """A query for `gpu_ops.sql`."""
    return (Path(__file__).parent / f"{name}.sql").read_text()


def flink(name: str) -> str:
    """A query for Flink: nexmark-flink's own, where windows are said otherwise; DATETIME is a word of its parser."""
    own = Path(__file__).parent / "flink" / f"{name}.sql"
    return re.sub(r"\bdateTime\b", "`dateTime`", own.read_text() if own.is_file() else text(name))


def duckdb_text(name: str) -> str:
    """A query for DuckDB."""
    return _DUCKDB[name].format(counts=_COUNTS) if name in _DUCKDB else text(name)


def answer(name: str, data: Path, files: int) -> pa.Table:
    """DuckDB's answer over the first files of each table.

    Args:
        name: of the query.
        data: the folder of `benchmarks.nexmark.generator.write`.
        files: how many.
    """
    with duckdb.connect() as db:
        db.execute("SET TimeZone = 'UTC'")
        for table in TABLES[name]:
            paths = sorted((data / table).glob("*.parquet"))[:files]
            db.read_parquet([str(path) for path in paths]).create_view(table)
        return db.sql(duckdb_text(name)).to_arrow_table()


def differences(name: str, data: Path, changes: pa.Table, files: int) -> list[str]:
    """In what a folded changelog differs from the answer, as text; nothing where it is right."""
    with duckdb.connect() as db:
        db.register("changelog_changes", changes)
        db.register("answer", answer(name, data, files))
        return difference(db, "FROM answer")
