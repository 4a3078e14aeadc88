"""Final windows over a UNION ALL of streams with a watermark each, in SQL: micro-batch by micro-batch by the law."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import gpu_ops
from gpu_ops import stream
from oracle.union_windows import Line, UnionWindows
from spark.support import Sink, Source, drain, in_memory
from spark.test_aggregate_at_watermark import at, late

pytestmark = pytest.mark.spark

SCHEMA = "op string, k string, t timestamp, x int"
SECONDS = "unix_timestamp({}.start) AS s, unix_timestamp({}.end) AS e"
KINDS: dict[str, tuple[str, int, int | None]] = {
    "tumbling": ("window(t, '10 seconds')", 10, 10),
    "sliding": ("window(t, '10 seconds', '5 seconds')", 10, 5),
    "sessions": ("session_window(t, '4 seconds')", 4, None),
}
UNIONS: dict[str, tuple[str, tuple[int, ...]]] = {
    "of two": ("SELECT k, t, x FROM a UNION ALL SELECT k, t, x FROM b WHERE x > 1", (5, 20)),
    "of three, one in another": (
        "SELECT k, t, x FROM (SELECT t, x, k FROM a UNION ALL SELECT t, x, k FROM b WHERE x > 1) "
        "UNION ALL SELECT k, t AS other, x FROM c",
        (5, 20, 0),
    ),
}


def query(union: str, window: str) -> str:
    """Rows with 7 are left out above the union."""
    return (
        f"SELECT k, unix_timestamp(w.start) AS s, unix_timestamp(w.end) AS e, n, x FROM (SELECT k, {window} AS w, "
        f"count(*) AS n, sum(x) AS x FROM ({union}) u WHERE x <> 7 GROUP BY k, {window})"
    )


START = 1_767_243_600
"""2026-01-01 in New York, seconds since 1970."""


def some(choice: random.Random, number: int, part: int) -> list[dict[str, Any]]:
    """Rows of one file of a part: out of order, behind others by some seconds or so many that they are late."""
    found = []
    for _ in range(choice.choice([0, 3, 6])):
        back = choice.choice([0, 0, 1, 4, 4, 30, 60])
        second = max(0, number * 12 + choice.randrange(12) - part * 8 - back)
        found.append({"op": "+I", "k": choice.choice(["a", "b", None]), "t": at(second), "x": choice.randrange(9)})
    return found


def second_of(row: dict[str, Any]) -> int:
    return 60 * int(row["t"][-5:-3]) + int(row["t"][-2:])


def lines(files: list[list[dict[str, Any]]], static: bool = False) -> list[Line]:
    """What the union has of a file of each part."""
    return [
        (row["op"], part, row["k"], second_of(row), row["x"])
        for part, file in enumerate(files)
        for row in file
        if row["x"] != 7 and (part != 1 or row["x"] > 1)
    ]


def check(spark: Any, folder: Path, seed: int, kind: str, union: str, batches: int) -> UnionWindows:
    """Over a restart in the middle, in two partitions."""
    choice = random.Random(seed)
    (window, size, slide), (text, delays) = KINDS[kind], UNIONS[union]
    sources = [Source(spark, folder / name, SCHEMA) for name in "abc"[: len(delays)]]
    law, sink, expected, dropped = UnionWindows(delays, size, slide), Sink(), list[Counter[Any]](), 0
    for run in range(2):
        for number in range(run * batches, (run + 1) * batches):
            for part, source in enumerate(sources):
                source.add(*some(choice, number, part))
            expected.append(law.take(lines([source.files[-1] for source in sources])))
        named = {}
        for name, source, delay in zip("abc", sources, delays, strict=False):
            df = source.df.drop("op")
            named[name] = df.withWatermark("t", f"{delay} seconds") if choice.random() < 0.5 else stream(
                df, event_time="t", delay=f"{delay} seconds"
            )  # fmt: skip
        made = gpu_ops.sql(
            query(text, window), **named, emit="at_watermark", state=str(folder / "state"), name="q", partitions=2
        )
        ended = drain(made, sink, folder / "checkpoint")
        dropped += late(ended, "q", "_".join(named))
    for number, wanted in enumerate(expected):
        found = Counter(
            (k, start - START, end - START, n, x) for _, k, start, end, n, x in sink.batches.get(number, [])
        )
        assert found == wanted, (seed, number, law.watermark)
    assert dropped == law.late
    return law


@pytest.mark.slow
@pytest.mark.parametrize("union", UNIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_by_the_law(spark: Any, tmp_path: Path, kind: str, union: str) -> None:
    law = check(spark, tmp_path, 1, kind, union, 6)
    assert law.late > 3
