"""Windows in two phases: what is grouped before the shuffle, in which queries, and that the result is Spark's."""

from __future__ import annotations

import datetime as dt
import os
import random
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gpu_ops
from gpu_ops.query.nodes import LocalAggregate, walk
from gpu_ops.query.plan import plan
from gpu_ops.query.relations import Table
from gpu_ops.spark.tasks import rows as slice_tasks
from gpu_ops.spark.tasks.rows import Slices

pytestmark = pytest.mark.thorough

ROWS = pa.schema([("k", pa.string()), ("v", pa.int32()), ("d", pa.decimal128(9, 2)), ("t", pa.timestamp("us", "UTC"))])
EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


def made(seed: int, size: int) -> pa.Table:
    """Rows around the epoch, so some before it, with nulls everywhere."""
    rng = random.Random(seed)

    def some(value: Any) -> Any:
        return None if rng.random() < 0.1 else value

    columns = [
        [some(rng.choice("abc")) for _ in range(size)],
        [some(rng.randrange(-(2**31), 2**31)) for _ in range(size)],
        [some(Decimal(rng.randrange(-90_000, 90_000)) / 100) for _ in range(size)],
        [some(EPOCH + dt.timedelta(microseconds=rng.randrange(-60_000_000, 60_000_000))) for _ in range(size)],
    ]
    return pa.table([pa.array(c, f.type) for c, f in zip(columns, ROWS, strict=True)], schema=ROWS)


@pytest.mark.parametrize("most", [1, 1 << 20])
def test_slices_of_rows(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Each row is counted once in each of its windows, however many rows are grouped together."""
    monkeypatch.setattr(slice_tasks, "_MOST_ROWS", most)
    size, slide, offset = 10, 2, 1
    calls = (("count", None), ("count", "v"), ("sum", "v"), ("min", "v"), ("max", "d"))
    types = [
        pa.string(),
        ROWS.field("t").type,
        ROWS.field("t").type,
        *[pa.int64()] * 3,
        pa.int32(),
        pa.decimal128(9, 2),
    ]
    schema = pa.schema([pa.field(f"c{n}", kind) for n, kind in enumerate(types)])
    by = (("k", None), ("start", 0), ("end", 1))
    slices = Slices("t", size * 10**6, slide * 10**6, offset * 10**6, by, calls, ROWS, schema)
    rows = made(1, 500)
    found = pa.Table.from_batches(slices.of(rows.to_batches(max_chunksize=50)), schema)
    merged = found.group_by(["c0", "c1", "c2"]).aggregate(
        [("c3", "sum"), ("c4", "sum"), ("c5", "sum"), ("c6", "min"), ("c7", "max")]
    )
    wanted: dict[Any, list[Any]] = {}
    for row in rows.to_pylist():
        for start in range(-80 + offset, 80, slide) if row["t"] is not None else [None]:
            first = None if start is None else EPOCH + dt.timedelta(seconds=start)
            end = None if first is None else first + dt.timedelta(seconds=size)
            if first is None or first <= row["t"] < end:
                wanted.setdefault((row["k"], first, end), []).append(row)
    nulls = size // slide  # a row without a time is in as many windows without ends
    assert merged.num_rows == len(wanted) > 200
    assert found.num_rows > merged.num_rows or most > 1
    for key_and_values in zip(*(column.to_pylist() for column in merged.columns), strict=True):
        *key, count, some, total, least, most_ = key_and_values
        group = wanted[tuple(key)]
        times = nulls if key[1] is None else 1
        values = [row["v"] for row in group if row["v"] is not None]
        decimals = [row["d"] for row in group if row["d"] is not None]
        assert (count, some) == (len(group) * times, len(values) * times)
        assert (total, least) == ((sum(values) * times, min(values)) if values else (None, None))
        assert most_ == (max(decimals) if decimals else None)


SLIDING, TUMBLING = "window(t, '10 seconds', '2 seconds')", "window(t, '10 seconds')"
QUERIES = {
    f"SELECT k, window.start AS s, count(*) AS n FROM x GROUP BY k, {SLIDING}": 1,
    f"SELECT window.end AS e, sum(v + 1) AS n, max(t) AS m FROM x GROUP BY t, {TUMBLING}": 1,
    f"SELECT upper(k) AS u, window.end AS e, sum(v + 1) AS n, max(d) AS m FROM x GROUP BY upper(k), {TUMBLING}": 1,
    f"SELECT count(v) FILTER (WHERE k = 'a') AS n, window.start AS s FROM x WHERE v > 3 GROUP BY {SLIDING}": 1,
    f"SELECT window.start AS s, avg(v) AS a FROM x GROUP BY {TUMBLING}": 0,
    f"SELECT window.start AS s, count(DISTINCT v) AS a FROM x GROUP BY {TUMBLING}": 0,
    f"SELECT window.start AS s, sum(d) AS a FROM x GROUP BY {TUMBLING}": 0,
    f"SELECT window.start AS s, min(k) AS a FROM x GROUP BY {TUMBLING}": 0,
    "SELECT window.start AS s, count(*) AS n FROM x GROUP BY window(t, '10 seconds', '3 seconds')": 0,
    f"SELECT s, count(*) AS n FROM (SELECT window.start AS s FROM x GROUP BY k, {SLIDING}) GROUP BY s": 1,
    f"""SELECT a.s, a.n, b.m FROM (SELECT window.start AS s, count(*) AS n FROM x GROUP BY {SLIDING}) AS a
        JOIN (SELECT window.start AS s, max(v) AS m FROM x GROUP BY {SLIDING}) AS b ON a.s = b.s""": 2,
    "SELECT k, count(*) AS n FROM x GROUP BY k": 0,
}


@pytest.mark.spark
@pytest.mark.slow
def test_which_windows_are_in_two_phases(spark: Any) -> None:
    plain = Table("x", ROWS)
    for query, count in QUERIES.items():
        found = [n for n in walk(plan(query, {"x": plain}, spark).root) if isinstance(n, LocalAggregate)]
        assert len(found) == count, query
    sliding = next(iter(QUERIES))
    for other in (
        Table("x", ROWS, row_kind="op"),
        Table("x", ROWS, unique_key=("k",)),
        Table("x", ROWS, ttl_ms=1000),
        Table("x", ROWS, sequence_by="v"),
        Table("x", ROWS, row_kind="op", grows=True),
    ):
        if other.upserts:
            continue  # no sliding windows over those
        assert not any(isinstance(n, LocalAggregate) for n in walk(plan(sliding, {"x": other}, spark).root))
    closed = Table("x", ROWS, event_times=("t",))
    tumbling = f"SELECT window.start AS s, window.end AS e, count(*) AS n FROM x GROUP BY {TUMBLING}"
    for emit, count in (("per_batch", 1), ("per_event", 0), ("at_watermark", 0), ("at_end", 0)):
        made = plan(tumbling, {"x": closed}, spark, emit=emit).root  # type: ignore[arg-type]
        assert sum(isinstance(n, LocalAggregate) for n in walk(made)) == count, emit


PLAIN = {"upper(k)": "k", "v % 100": "v", "d > -500 OR d IS NULL": "v > -2000000000 OR v IS NULL"}
"""Without what only Spark computes: then files are aggregated as Arrow reads them."""


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.parametrize(
    ("reader", "files"),
    [
        ("arrow", 5),
        pytest.param("spark", 1, marks=pytest.mark.slow),
        pytest.param("watermark", 5, marks=pytest.mark.slow),
    ],
)
def test_windows_as_spark_has_them(spark: Any, tmp_path: Path, reader: str, files: int) -> None:
    """After every micro-batch; an offset, groups and values that are computed, a filter below and one above."""
    rows, data = made(files, 400), tmp_path / "data"
    data.mkdir()
    for number in range(files):
        pq.write_table(rows.slice(number * 400 // files, 400 // files), data / f"{number}.parquet")
        os.utime(data / f"{number}.parquet", (1_600_000_000 + number,) * 2)
    ddl = "k STRING, v INT, d DECIMAL(9, 2), t TIMESTAMP"
    query = """SELECT upper(k) AS u, window.start AS s, window.end AS e, count(*) AS n, count(v) AS c,
        sum(v % 100) AS t, max(d) AS m, max(t) AS l, min(v) AS p FROM x WHERE d > -500 OR d IS NULL
        GROUP BY upper(k), window(t, '20 seconds', '5 seconds', '1 second') HAVING count(*) > 2"""
    if reader == "arrow":
        df = gpu_ops.read_files(spark, str(data), "parquet", ddl, maxFilesPerTrigger=1)
    else:
        df = spark.readStream.schema(ddl).option("maxFilesPerTrigger", 1).parquet(str(data))
    if reader == "watermark":
        df = df.withWatermark("t", "1 hour")
    for computed, plain in PLAIN.items() if reader == "arrow" else ():
        query = query.replace(computed, plain)
    changes = gpu_ops.sql(query, x=df, state=str(tmp_path / "state"), partitions=2)
    text = gpu_ops.explain(changes)
    key = "k" if reader == "arrow" else "group_1"
    assert f"LocalWindowAggregate(groupBy=[{key}], window=[window(t, 20 s, 5 s) AS window_start, window_end]" in text
    assert "its groups are kept, of its rows what they need, for ever" in text
    assert ("read by Arrow" in text) == (reader == "arrow")
    said: list[list[Any]] = []
    writer = changes.writeStream.foreachBatch(lambda batch, _: said.append(batch.collect()))
    writer.option("checkpointLocation", str(tmp_path / "c")).trigger(availableNow=True).start().awaitTermination()
    assert len(said) == files
    folded: Counter[Any] = Counter()
    names = sorted(map(str, data.glob("*.parquet")))
    for number, batch in enumerate(said):
        for kind, *row in batch:
            folded[tuple(row)] += 1 if kind in ("+I", "+U") else -1
        so_far = spark.read.schema(ddl).parquet(*names[: number + 1])
        assert +folded == Counter(map(tuple, spark.sql(query.replace("FROM x", "FROM {x}"), x=so_far).collect()))
        assert min(folded.values()) >= 0
    assert len(+folded) > 30
