"""Final windows over a UNION ALL of streams with a watermark each, in SQL: micro-batch by micro-batch by the law."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from oracle.union_windows import Line, UnionWindows
from pyspark.sql import functions as f

import gpu_ops
from gpu_ops import stream
from spark.support import Sink, Source, drain
from spark.test_aggregate_at_watermark import at, late

pytestmark = pytest.mark.spark

SCHEMA = "op string, k string, t timestamp, x int"
START = 1_767_243_600
"""The beginning of 2026 in New York, seconds since 1970."""
KINDS: dict[str, tuple[str, int, int | None]] = {
    "tumbling": ("window(t, '10 seconds')", 10, 10),
    "sliding": ("window(t, '10 seconds', '5 seconds')", 10, 5),
    "sessions": ("session_window(t, '4 seconds')", 4, None),
}
A, B = "SELECT k, t, x FROM a", "SELECT k, t, x FROM b WHERE x > 1"
UNIONS: dict[str, tuple[str, tuple[int | None, ...]]] = {
    "of two": (f"{A} UNION ALL {B}", (5, 20)),
    "of three, one in another": (
        """SELECT k, t, x FROM (SELECT t, x, k FROM a UNION ALL SELECT t, x, k FROM b WHERE x > 1)
           UNION ALL SELECT k, t AS other, x FROM c""", (5, 20, 0),
    ),
    "of changes": (f"{A} UNION ALL {B}", (5, 20)),
    "with a table": (f"{A} UNION ALL {B} UNION ALL SELECT k, t, x FROM c", (5, 20, None)),
    "of one": (A, (5,)),
}  # fmt: skip


class Case(NamedTuple):
    kind: str
    union: str
    seed: int = 1

    @property
    def query(self) -> str:
        """Rows with 7 are left out above the union."""
        window = KINDS[self.kind][0]
        return (
            "SELECT k, unix_timestamp(w.start) AS s, unix_timestamp(w.end) AS e, n, x FROM (SELECT k, "
            f"{window} AS w, count(*) AS n, sum(x) AS x FROM ({UNIONS[self.union][0]}) WHERE x <> 7 "
            f"GROUP BY k, {window})"
        )


def some(choice: random.Random, number: int, part: int, live: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """A file of a part: out of order, behind the others by some seconds or so many that they are late; or empty."""
    found = []
    for _ in range(choice.choice([0, 4, 8, 8])):
        if live and choice.random() < 0.3:
            found.append({**live.pop(choice.randrange(len(live))), "op": "-D"})
            continue
        second = max(0, number * 12 + choice.randrange(12) - part * 8 - choice.choice([0, 0, 1, 4, 4, 30, 60]))
        found.append({"op": "+I", "k": choice.choice(["a", "b", None]), "t": at(second), "x": choice.randrange(9)})
        if live is not None:
            live.append(found[-1])
    return found


def lines(files: list[list[dict[str, Any]]]) -> list[Line]:
    """What the union has of a file of each part."""
    return [
        (row["op"], part, row["k"], 60 * int(row["t"][-5:-3]) + int(row["t"][-2:]), row["x"])
        for part, file in enumerate(files)
        for row in file
        if row["x"] != 7 and (part != 1 or row["x"] > 1)
    ]


def check(spark: Any, folder: Path, case: Case, batches: int) -> UnionWindows:
    """Over a restart in the middle, in two partitions."""
    choice, (_, size, slide), (_, delays) = random.Random(case.seed), KINDS[case.kind], UNIONS[case.union]
    sources = [
        Source(spark, folder / name, SCHEMA) for name, delay in zip("abc", delays, strict=False) if delay is not None
    ]
    law, sink, expected, dropped = UnionWindows(delays, size, slide), Sink(), list[Counter[Any]](), 0
    live: list[dict[str, Any]] | None = [] if case.union == "of changes" else None
    given = {"c": some(choice, 0, 2, None) + some(choice, 3, 2, None)} if None in delays else {}
    for run in range(2):
        for number in range(run * batches, (run + 1) * batches):
            for part, source in enumerate(sources):
                source.add(*some(choice, number, part, None if part else live))
            first = [] if number else list(given.values())
            expected.append(law.take(lines([*(source.files[-1] for source in sources), *first])))
        named: dict[str, Any] = {}
        for name, rows in given.items():
            table = spark.createDataFrame([tuple(row.values())[1:] for row in rows], "k string, t string, x int")
            named[name] = stream(table.withColumn("t", f.col("t").cast("timestamp")), event_time="t")
        for name, source, delay in zip("abc", sources, delays, strict=False):
            row_kind = "op" if name == "a" and live is not None else None
            df = source.df if row_kind is not None else source.df.drop("op")
            if choice.random() < 0.5:
                named[name] = stream(df.withWatermark("t", f"{delay} seconds"), row_kind=row_kind)
            else:
                named[name] = stream(df, row_kind=row_kind, event_time="t", delay=f"{delay} seconds")
        made = gpu_ops.sql(
            case.query, **named, emit="at_watermark", state=str(folder / "state"), name="q", partitions=2
        )  # fmt: skip
        dropped += late(drain(made, sink, folder / "checkpoint"), "q", "_".join("abc"[: len(delays)]))
    explained = gpu_ops.explain(made)
    assert len(delays) == 1 or "rows of its parts come up to 5 seconds, 20 seconds" in explained, explained
    for number, wanted in enumerate(expected):
        rows = sink.batches.get(number, [])
        found = Counter((k, start - START, end - START, n, x) for _, k, start, end, n, x in rows)
        assert found == wanted, (case, number, law.watermark)
    assert dropped == law.late
    return law


def test_tumbling_of_two(spark: Any, tmp_path: Path) -> None:
    assert (check(spark, tmp_path, Case("tumbling", "of two"), 2).watermark or 0) > 0


@pytest.mark.slow
@pytest.mark.parametrize("union", UNIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_by_the_law(spark: Any, tmp_path: Path, kind: str, union: str) -> None:
    for seed in (1, 2):
        assert check(spark, tmp_path / str(seed), Case(kind, union, seed), 6).late > 0
