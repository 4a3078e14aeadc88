"""Scripts in Flink's form: each in docs/contributing/tried.md is planned or refused, and what runs has Flink's rows."""

from __future__ import annotations

import datetime as dt
import io
import itertools
import json
import random
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import slow_but
from rich.console import Console

from gpu_ops.errors import GpuJoinError
from gpu_ops.jobs import runner, tables
from gpu_ops.jobs.job import JobSource, load
from gpu_ops.jobs.sql_text import JobError
from gpu_ops.spark_types import arrow_schema
from spark.support import fold

pytestmark = pytest.mark.spark

SCRIPTS = Path(__file__).parents[1] / "jobs" / "scripts"
PAGE = Path(__file__).parents[2] / "docs" / "contributing" / "tried.md"
TRIED = dict(
    re.findall(
        r"^\| (\d\d) \| [^|]* \| [^|]* \| ([^|]*) \|$", PAGE.read_text().partition("\n## Reports")[0], re.MULTILINE
    )
)
MESSAGES = (
    "key BINARY, value BINARY, topic STRING, partition INT, offset LONG, timestamp TIMESTAMP, timestampType INT, "
    "headers ARRAY<STRUCT<key STRING, value BINARY>>"
)


def console() -> Console:
    return Console(record=True, width=300, file=io.StringIO())


def messages_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark's Kafka reader finds the messages of a topic in a folder of that name."""

    def read(spark: Any, source: JobSource) -> Any:
        path = folder / source.options["subscribe"]
        path.mkdir(exist_ok=True)
        return spark.readStream.schema(MESSAGES).parquet(str(path))

    monkeypatch.setattr(tables, "_load", read)


def test_each_script_has_its_line() -> None:
    assert list(TRIED) == [path.name[:2] for path in sorted(SCRIPTS.glob("*.sql"))]
    assert len(TRIED) >= 20


def planned(spark: Any, path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    messages_in(folder, monkeypatch)
    screen = console()
    job = load(path)
    changes = runner.changelog(spark, job, screen, show=True)
    for one in job.inserts if len(job.inserts) == 1 else ():
        assert one.sink is not None
        tables.shaped(changes, one.sink, job.file)
    return screen.export_text()


@pytest.mark.parametrize(
    "number",
    slow_but(
        [number for number, outcome in TRIED.items() if outcome.startswith("runs")],
        "28",
    ),
)  # fmt: skip
@pytest.mark.thorough
def test_scripts_that_run(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    (path,) = SCRIPTS.glob(f"{number}_*.sql")
    printed = planned(spark, path, monkeypatch, tmp_path)
    for words in re.findall(r"`(.*?)`", TRIED[number]):
        assert words in printed


@pytest.mark.parametrize("number", [number for number, outcome in TRIED.items() if outcome.startswith("refused")])
def test_scripts_that_are_refused(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: str
) -> None:
    """The message has the words of the table, and all but one comes before Spark starts."""
    (path,) = SCRIPTS.glob(f"{number}_*.sql")
    (words,) = re.findall(r"`(.*?)`", TRIED[number])
    spark = request.getfixturevalue("spark") if number == "20" else None
    with pytest.raises(JobError, match=re.escape(words)):
        planned(spark, path, monkeypatch, tmp_path)


WINDOWS = """
CREATE TABLE t (id INT, `at` TIMESTAMP_NTZ(3), v INT, twice AS v * 2) WITH ('connector' = 'filesystem', 'path' = 'in',
    'format' = 'json');
SET 'state' = 'state'; SET 'checkpoint' = 'checkpoint'; SET 'table.exec.mini-batch.enabled' = '{batch}';
CREATE TABLE tumbled (a TIMESTAMP_NTZ, b TIMESTAMP_NTZ, n BIGINT) WITH ('connector' = 'parquet', 'path' = 'tumbled');
CREATE TABLE hopped (a TIMESTAMP_NTZ, b TIMESTAMP_NTZ, n BIGINT) WITH ('connector' = 'parquet', 'path' = 'hopped');
CREATE TABLE cumulated WITH ('connector' = 'parquet', 'path' = 'cumulated') LIKE hopped;
CREATE TABLE grouped (a TIMESTAMP_NTZ, b TIMESTAMP_NTZ, n BIGINT) WITH ('connector' = 'parquet', 'path' = 'grouped');
EXECUTE STATEMENT SET BEGIN
INSERT INTO tumbled SELECT window_start, window_time, SUM(twice) FROM TABLE(
    TUMBLE(DATA => TABLE t, TIMECOL => DESCRIPTOR(`at`), SIZE => INTERVAL '10' SECONDS, OFFSET => INTERVAL '3' SECONDS))
GROUP BY window_start, window_end, window_time;
INSERT INTO hopped SELECT window_start, window_end, SUM(twice)
FROM HOP(TABLE t, DESCRIPTOR(`at`), INTERVAL '5' SECOND, INTERVAL '20' SECOND) GROUP BY window_start, window_end;
INSERT INTO cumulated SELECT window_start, window_end, SUM(twice)
FROM TABLE(CUMULATE(TABLE t, DESCRIPTOR(`at`), INTERVAL '10' SECOND, INTERVAL '1' MINUTE))
GROUP BY window_start, window_end;
INSERT INTO grouped SELECT HOP_START(`at`, INTERVAL '5' SECOND, INTERVAL '20' SECOND),
    HOP_END(`at`, INTERVAL '5' SECOND, INTERVAL '20' SECOND), SUM(twice)
FROM t GROUP BY HOP(`at`, INTERVAL '5' SECOND, INTERVAL '20' SECOND);
END;
"""
EPOCH = dt.datetime(1970, 1, 1)


def windows(size: int, slide: int, offset: int, ms: int) -> list[tuple[int, int]]:
    """Flink's TimeWindow.getWindowStartWithOffset, and SlidingEventTimeWindows above it."""
    last = ms - (ms - offset) % slide
    return [(begin, begin + size) for begin in range(last, ms - size, -slide)]


def cumulated(size: int, step: int, ms: int) -> list[tuple[int, int]]:
    begin = ms - ms % size
    return [(begin, end) for end in range(ms - ms % step + step, begin + size + 1, step)]


@pytest.mark.slow
@pytest.mark.parametrize("batch", ["true", "false"])
def test_rows_of_windows(spark: Any, tmp_path: Path, batch: str) -> None:
    """The three functions of windows, and the older form, against Flink's own rules, before 1970 too."""
    random_ = random.Random(7)
    folder = tmp_path / "in"
    folder.mkdir()
    rows = []
    for number in range(2):
        some = [(random_.randrange(-200_000, 200_000), random_.randrange(9)) for _ in range(40)]
        some += [(at * 10_000, 1) for at in range(-3, 4)]
        rows += some
        at = [(EPOCH + dt.timedelta(milliseconds=ms)).isoformat(sep=" ", timespec="milliseconds") for ms, _ in some]
        lines = [json.dumps({"id": 1, "at": at, "v": v}) for at, (_, v) in zip(at, some, strict=True)]
        (folder / f"{number}.json").write_text("\n".join(lines))
    path = tmp_path / "job.sql"
    path.write_text(WINDOWS.format(batch=batch))
    runner.run(load(path), console(), once=True)
    models = {
        "tumbled": lambda ms: [(begin, end - 1) for begin, end in windows(10_000, 10_000, 3000, ms)],
        "hopped": lambda ms: windows(20_000, 5000, 0, ms),
        "grouped": lambda ms: windows(20_000, 5000, 0, ms),
        "cumulated": lambda ms: cumulated(60_000, 10_000, ms),
    }
    for name, model in models.items():
        sums: Counter[tuple[int, int]] = Counter()
        for ms, v in rows:
            sums.update(dict.fromkeys(model(ms), 2 * v))
        found = spark.read.parquet(str(tmp_path / name)).collect()
        kept = fold(sorted((tuple(row) for row in found), key=lambda row: row[0].startswith("-")))
        ms = [tuple((at - EPOCH) // dt.timedelta(milliseconds=1) for at in row[:2]) for row in kept]
        assert dict(zip(ms, (row[2] for row in kept), strict=True)) == dict(sums), name


MESSAGES_JOB = """
CREATE TABLE clicks (
    at TIMESTAMP(3) METADATA FROM 'timestamp', person BIGINT, p INT METADATA FROM 'partition' VIRTUAL,
    `offset` STRING METADATA, timestamp STRING, tags MAP<STRING, BYTES> METADATA FROM 'headers',
    kind STRING METADATA FROM 'timestamp-type', tag AS CAST(person AS VARCHAR) || '-' || SPLIT_INDEX(timestamp, '/', 1)
) WITH ('connector' = 'kafka', 'topic' = 'clicks', 'properties.bootstrap.servers' = 'b:1', 'format' = 'json',
        'json.ignore-parse-errors' = 'true');
CREATE TABLE people (id STRING, name STRING, PRIMARY KEY (id) NOT ENFORCED)
WITH ('connector' = 'upsert-kafka', 'topic' = 'people', 'properties.bootstrap.servers' = 'b:1', 'key.format' = 'raw',
      'value.format' = 'json');
SET 'state' = 'state'; SET 'checkpoint' = 'checkpoint';
CREATE TABLE seen WITH ('connector' = 'parquet', 'path' = 'seen')
AS SELECT at, person, p, `offset`, timestamp, decode(tags['a'], 'utf-8') AS a, size(tags) AS n, kind, tag FROM clicks;
CREATE TABLE named (id BIGINT, id_again STRING, name STRING) WITH ('connector' = 'parquet', 'path' = 'named');
INSERT INTO named SELECT c.person AS id, p.id, p.name FROM clicks c JOIN people p ON CAST(c.person AS STRING) = p.id;
"""


@pytest.mark.thorough
def test_rows_of_messages(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metadata and computed columns stand where they are declared; a raw key without a value deletes its row."""
    messages_in(tmp_path, monkeypatch)
    schema = arrow_schema(spark.createDataFrame([], MESSAGES).schema, "messages")
    at = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    headers = [{"key": "a", "value": b"old"}, {"key": "b", "value": b"x"}, {"key": "a", "value": b"new"}]
    values = [b'{"person": 1, "timestamp": "x/y"}', b'{"person": 2, "timestamp": "x"}', b"{", b'{"person": 3}']

    def put(topic: str, number: int, *messages: tuple[bytes | None, bytes | None]) -> None:
        (tmp_path / topic).mkdir(exist_ok=True)
        offsets = itertools.count(10 * number)
        rows = [
            {"key": key, "value": value, "topic": topic, "partition": 4, "offset": next(offsets), "timestamp": at,
             "timestampType": 1, "headers": headers}
            for key, value in messages
        ]  # fmt: skip
        pq.write_table(pa.Table.from_pylist(rows, schema), tmp_path / topic / f"{number}.parquet")

    path = tmp_path / "job.sql"
    path.write_text(MESSAGES_JOB)
    put("clicks", 0, *((None, value) for value in values))
    put("people", 0, (b"1", b'{"id": "1", "name": "Ann"}'), (b"2", b'{"id": "2", "name": "Bob"}'))
    runner.run(load(path), console(), once=True)
    put("people", 1, (b"2", None), (b"1", b'{"id": "1", "name": "Anna"}'))
    screen = console()
    runner.run(load(path), screen, once=True)
    assert "note: 7:9: json.ignore-parse-errors: a message with a value that cannot be read is left out" in (
        screen.export_text()
    )
    seen = sorted((tuple(row)[1:] for row in spark.read.parquet(str(tmp_path / "seen")).collect()), key=lambda r: r[1])
    local = at.replace(tzinfo=None)
    assert seen == [
        (local, 1, 4, "0", "x/y", "new", 2, "LogAppendTime", "1-y"),
        (local, 2, 4, "1", "x", "new", 2, "LogAppendTime", None),
        (local, 3, 4, "3", None, "new", 2, "LogAppendTime", None),
    ]
    named = [tuple(row) for row in spark.read.parquet(str(tmp_path / "named")).collect()]
    assert fold(sorted(named, key=lambda row: row[0].startswith("-"))) == [(1, "1", "Anna")]


@pytest.mark.slow
def test_parts_and_patterns_of_texts(spark: Any) -> None:
    """SPLIT_INDEX and SIMILAR TO against what Flink's functions do, written here once more."""
    from gpu_ops.jobs.flink_query import translated

    random_ = random.Random(3)
    texts = [
        "",
        "/",
        "a/b",
        "//",
        None,
        *("".join(random_.choices("ab4/.\n", k=random_.randrange(9))) for _ in range(200)),
    ]
    df = spark.createDataFrame([(text,) for text in texts], "x STRING")
    df.createOrReplaceTempView("texts")
    for separator, number in itertools.product(["/", "ab", "."], [-1, 0, 1, 2]):
        query = translated(f"SELECT x, SPLIT_INDEX(x, '{separator}', {number}) FROM texts").sql
        for text, part in spark.sql(query).collect():
            parts = text.split(separator) if text else []
            assert part == (parts[number] if 0 <= number < len(parts) else None), (text, separator, number)
    for pattern, regex in {"4[0-9]%": "4[0-9](?s:.*)", "a|b": "a|b", "_(a|/)": ".(a|/)", "%4": "(?s:.*)4"}.items():
        query = translated(f"SELECT x, x SIMILAR TO '{pattern}', x NOT SIMILAR TO '{pattern}' FROM texts").sql
        for text, matches, does_not in spark.sql(query).collect():
            expected = None if text is None else re.fullmatch(regex, text) is not None
            assert (matches, does_not) == (expected, None if expected is None else not expected), (text, pattern)


def test_a_computed_column_does_not_change_by_itself(spark: Any, tmp_path: Path) -> None:
    text = "CREATE TABLE t (a INT, b AS {}) WITH ('connector' = 'datagen'); SELECT a, b FROM t"
    path = tmp_path / "job.sql"
    for expression, words in {
        "rand()": "rand() gives another value each time",
        "CURRENT_TIMESTAMP": "CURRENT_TIMESTAMP gives another value each time",
        "missing + 1": "A column, variable, or function parameter with name `missing` cannot be resolved",
    }.items():
        path.write_text(text.format(expression))
        with pytest.raises(GpuJoinError) as raised:
            runner.changelog(spark, load(path), console(), show=True)
        assert words in str(raised.value)
        assert ":1:29: " in str(raised.value)


@pytest.mark.parametrize(("size", "kind", "refused"), [
    ("'1' DAY", "TIMESTAMP(3)", True), ("'1' DAY", "AS TO_TIMESTAMP_LTZ(id, 3)", True),
    ("'1' DAY", "TIMESTAMP_NTZ", False), ("'1' HOUR", "TIMESTAMP(3)", False),
])  # fmt: skip
def test_windows_begin_by_the_clock_that_flink_goes_by(
    spark: Any, tmp_path: Path, size: str, kind: str, refused: bool
) -> None:
    """Spark's windows of a day begin at midnight of UTC, whatever the session's zone is."""
    path = tmp_path / "job.sql"
    path.write_text(
        f"CREATE TABLE t (id INT, at {kind}) WITH ('connector' = 'datagen');\n"
        f"SELECT window_start FROM TABLE(TUMBLE(TABLE t, DESCRIPTOR(at), INTERVAL {size})) GROUP BY window_start"
    )
    if not refused:
        runner.changelog(spark, load(path), console(), show=True)
        return
    with pytest.raises(JobError, match=r":2:32: these windows begin by the clock of UTC here, .* America/New_York"):
        runner.changelog(spark, load(path), console(), show=True)


FINAL = """
CREATE TABLE t (`at` TIMESTAMP_NTZ(3), v INT, WATERMARK FOR `at` AS `at` - INTERVAL '1' SECOND)
WITH ('connector' = 'json', 'path' = 'in', 'reader' = 'arrow', 'max_files_per_trigger' = '1');
SET 'state' = 'state'; SET 'checkpoint' = 'checkpoint'; SET 'emit' = 'at_watermark';
CREATE TABLE sums (a TIMESTAMP_NTZ, b TIMESTAMP_NTZ, n BIGINT) WITH ('connector' = 'parquet', 'path' = 'sums');
INSERT INTO sums SELECT window_start, window_end, SUM(v) FROM TABLE({}) GROUP BY window_start, window_end;
"""


@pytest.mark.parametrize(
    ("windows_of", "model"),
    slow_but(
        [
            ("TUMBLE(TABLE t, DESCRIPTOR(`at`), INTERVAL '10' SECOND)", lambda ms: windows(10_000, 10_000, 0, ms)),
            (
                "HOP(TABLE t, DESCRIPTOR(`at`), INTERVAL '5' SECOND, INTERVAL '10' SECOND)",
                lambda ms: windows(10_000, 5000, 0, ms),
            ),
            (
                "CUMULATE(TABLE t, DESCRIPTOR(`at`), INTERVAL '5' SECOND, INTERVAL '20' SECOND)",
                lambda ms: cumulated(20_000, 5000, ms),
            ),
        ],
    ),
)
def test_windows_in_from_are_final_at_the_watermark(spark: Any, tmp_path: Path, windows_of: str, model: Any) -> None:
    """Each window comes once, with all its rows, when the watermark has reached its end; it was refused."""
    random_ = random.Random(11)
    folder = tmp_path / "in"
    folder.mkdir()
    rows = [(random_.randrange(60_000), random_.randrange(1, 9)) for _ in range(60)]
    for number, some in enumerate([sorted(rows), [(100_000, 1)], [(100_001, 1)]]):
        at = [(EPOCH + dt.timedelta(milliseconds=ms)).isoformat(timespec="milliseconds") for ms, _ in some]
        lines = [json.dumps({"at": at, "v": v}) for at, (_, v) in zip(at, some, strict=True)]
        (folder / f"{number}.json").write_text("\n".join(lines))
        time.sleep(0.02)  # files are taken by their time
    path = tmp_path / "job.sql"
    path.write_text(FINAL.format(windows_of))
    runner.run(load(path), console(), once=True)
    sums: Counter[tuple[int, int]] = Counter()
    for ms, v in rows:
        sums.update(dict.fromkeys(model(ms), v))
    found = [tuple(row) for row in spark.read.parquet(str(tmp_path / "sums")).collect()]
    assert {row[0] for row in found} == {"+I"}
    ms = [tuple((at - EPOCH) // dt.timedelta(milliseconds=1) for at in row[1:3]) for row in found]
    assert sorted(zip(ms, (row[3] for row in found), strict=True)) == sorted(sums.items())
