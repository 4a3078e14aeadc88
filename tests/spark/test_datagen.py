"""Generated rows: what they are by definition, the same again after a restart and a crash, and on the screen."""

from __future__ import annotations

import collections
import datetime as dt
import io
import json
import math
import os
import signal
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gpu_ops.jobs import runner
from gpu_ops.jobs.datagen import rows
from gpu_ops.jobs.job import build, load
from gpu_ops.jobs.screen import Screen
from gpu_ops.jobs.sql_file import read_sql
from gpu_ops.jobs.sql_text import JobError, Text
from spark.support import fold

pytestmark = pytest.mark.spark

START = dt.datetime(2026, 3, 1, tzinfo=dt.UTC)
TYPES = """
CREATE TABLE t (
  yes BOOLEAN, tiny TINYINT, small SMALLINT, i INT, big BIGINT, positive BIGINT, f FLOAT, d DOUBLE, part DOUBLE,
  price DECIMAL(6, 2), huge DECIMAL(38, 4), s STRING, short VARCHAR, b BINARY, day DATE, at TIMESTAMP,
  ntz TIMESTAMP_NTZ, one_of STRING, maybe INT, numbers ARRAY<INT>, by_name MAP<STRING, INT>,
  who ROW<name STRING, age INT>, seq INT, text_seq STRING
) WITH ('connector' = 'datagen', 'start-time' = '2026-03-01', 'rows-per-second' = '10', 'seed' = '{seed}',
  'fields.i.min' = '-3', 'fields.i.max' = '3', 'fields.positive.min' = '0', 'fields.part.min' = '-0.5',
  'fields.part.max' = '0.5', 'fields.price.min' = '1', 'fields.price.max' = '9.99', 'fields.short.length' = '20',
  'fields.short.var-len' = 'true', 'fields.b.length' = '9', 'fields.at.max-past' = '1 second',
  'fields.one_of.values' = 'book, pen', 'fields.maybe.null-rate' = '0.25', 'fields.numbers.length' = '4',
  'fields.numbers.element.max' = '0', 'fields.by_name.key.length' = '1', 'fields.who.name.length' = '3',
  'fields.who.age.min' = '1', 'fields.who.age.max' = '99', 'fields.seq.kind' = 'sequence',
  'fields.seq.start' = '7', 'fields.text_seq.kind' = 'sequence');
CREATE TABLE changes WITH ('connector' = 'console');
INSERT INTO changes SELECT * FROM t
"""
JOB = """
CREATE TABLE orders (id BIGINT, item INT, quantity INT, PRIMARY KEY (id) NOT ENFORCED) WITH ('connector' = 'datagen',
  'rows-per-second' = '100', 'number-of-rows' = '{rows}', 'share-of-updates' = '0.3', 'share-of-deletes' = '0.2',
  'fields.id.kind' = 'sequence', 'fields.item.min' = '1', 'fields.item.max' = '9');
CREATE TABLE prices (item INT, price DECIMAL(4, 2), PRIMARY KEY (item) NOT ENFORCED) WITH ('connector' = 'datagen',
  'rows-per-second' = '100', 'number-of-rows' = '{rows}', 'fields.item.min' = '1', 'fields.item.max' = '12');
CREATE TABLE changes (kind STRING, id BIGINT, quantity INT, price DECIMAL(4, 2))
WITH ('connector' = 'json', 'path' = 'changes', 'row_kind' = 'kind');
SET state = 'state'; SET checkpoint = 'checkpoint'; SET partitions = 2; SET trigger = '0.2 seconds';
INSERT INTO changes SELECT o.id, o.quantity, p.price FROM orders o LEFT JOIN prices p ON o.item = p.item;
"""


def made(spark: Any, text: str, many: int, table: int = 0) -> list[dict[str, Any]]:
    source = build(read_sql(Text(Path("/jobs/job.sql"), text))).sources[table]
    assert source.generated is not None
    numbers = spark.range(0, many, 1, 3).toDF("value")
    return [row.asDict(recursive=True) for row in rows(numbers, source.generated).collect()]


def console(**options: Any) -> Console:
    return Console(record=True, width=200, file=io.StringIO(), **options)


@pytest.mark.thorough
def test_every_type_by_its_definition(spark: Any) -> None:
    many = 4000
    found = made(spark, TYPES.format(seed=1), many)
    by = {name: [row[name] for row in found] for name in found[0]}
    assert len(found) == many

    def even(values: list[int], bins: int) -> bool:
        """Whether counts are those of an even distribution, within five standard deviations."""
        mean = len(values) / bins
        counts = collections.Counter(values)
        return set(counts) == set(range(bins)) and all(
            abs(count - mean) < 5 * math.sqrt(mean) for count in counts.values()
        )

    assert even(list(map(int, by["yes"])), 2)
    assert even([x + 3 for x in by["i"]], 7)
    for name, bits in (("tiny", 8), ("small", 16), ("big", 64)):
        assert even([(x + 2 ** (bits - 1)) * 16 // 2**bits for x in by[name]], 16), name
    assert even([x * 16 // 2**63 for x in by["positive"]], 16)
    assert len({x % 4096 for x in by["positive"]}) > 2000  # the low bits are there as well
    assert even([int((x + 0.5) * 16) for x in by["part"]], 16)
    assert even([int(x / 1.7976931348623157e308 * 16) for x in by["d"]], 16)
    assert all(0 <= x < 3.41e38 for x in by["f"])
    assert even([int((x - 1) / Decimal("0.9")) for x in by["price"] if x < Decimal("9.99")], 10)
    assert max(by["price"]) <= Decimal("9.99")
    assert min(by["price"]) >= 1
    assert all(0 <= x < Decimal(10) ** 34 for x in by["huge"])
    assert all(len(x) == 100 and set(x) <= set("0123456789abcdef") for x in by["s"])
    assert even([int(x[57], 16) for x in by["s"]], 16)
    assert even([len(x) - 1 for x in by["short"]], 20)
    assert all(len(x) == 9 for x in by["b"])
    assert even([x[8] // 16 for x in by["b"]], 16)
    assert {x[0] - x[1] for x in zip([START + dt.timedelta(seconds=n / 10) for n in range(many)],
                                     [x.astimezone(dt.UTC) for x in by["at"]], strict=True)} <= {
        dt.timedelta(microseconds=n) for n in range(1_000_001)
    }  # fmt: skip
    assert by["ntz"] == [(START + dt.timedelta(seconds=n / 10)).replace(tzinfo=None) for n in range(many)]
    assert set(by["day"]) == {dt.date(2026, 3, 1)}
    assert even([("book", "pen").index(x) for x in by["one_of"]], 2)
    assert abs(by["maybe"].count(None) - many / 4) < 5 * math.sqrt(many / 4)
    assert all(len(x) == 4 and max(x) <= 0 for x in by["numbers"])
    assert all(1 <= len(x) <= 3 and all(len(key) == 1 for key in x) for x in by["by_name"])
    assert all(len(x["name"]) == 3 and 1 <= x["age"] <= 99 for x in by["who"])
    assert by["seq"] == list(range(7, many + 7))
    assert by["text_seq"] == [str(n + 1) for n in range(many)]
    both = [x["age"] + y for x, y in zip(by["who"], by["i"], strict=True)]
    assert len(set(both)) > 99  # columns do not go by each other
    assert made(spark, TYPES.format(seed=1), 50) == found[:50]
    other = made(spark, TYPES.format(seed=2), 50)
    assert all(x["big"] != y["big"] for x, y in zip(other, found[:50], strict=True))


@pytest.mark.parametrize(("updates", "deletes"), [(30, 20), (0, 50), (100, 0), (70, 15), (1, 1)])
def test_updates_and_deletes_are_of_rows_that_are_there(spark: Any, updates: int, deletes: int) -> None:
    text = JOB.format(rows=5000).replace("'0.3'", f"'{updates / 100}'").replace("'0.2'", f"'{deletes / 100}'")
    live: set[int] = set()
    kinds = []
    found = made(spark, text, 5000)
    for row in found:
        kinds.append(row["__row_kind"])
        assert (row["id"] in live) == (kinds[-1] != "+I")
        (live.discard if kinds[-1] == "-D" else live.add)(row["id"])
    first = deletes + 10
    assert set(kinds[:first]) == {"+I"}
    for n in range(first, 4900, 100):
        counts = collections.Counter(kinds[n : n + 100])
        assert (counts["+U"], counts["-D"]) == (updates, deletes)
    assert live


def sunk(spark: Any, folder: Path) -> list[tuple[Any, ...]]:
    schema = "kind STRING, id BIGINT, quantity INT, price DECIMAL(4, 2)"
    read = spark.read.schema(schema).json(str(folder / "changes")).collect()
    return fold(sorted((tuple(row) for row in read), key=lambda row: row[0] == "-D"))


class Interrupting(Console):
    """Presses Ctrl-C when so many micro-batches have been reported."""

    left = 2

    def print(self, *objects: Any, **options: Any) -> None:
        if str(objects[0]).startswith("micro-batch"):
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGINT)
        super().print(*objects, **options)


def test_a_job_ends_with_its_rows_and_goes_on_after_a_crash(spark: Any, tmp_path: Path) -> None:
    path = tmp_path / "job.sql"
    path.write_text(JOB.format(rows=120))
    for interrupted in (True, True, False):
        shown: Any = Interrupting if interrupted else Console
        assert runner.run(load(path), shown(file=io.StringIO(), width=200)).interrupted is interrupted
        if interrupted:  # and Spark has forgotten that it committed the last micro-batch
            begun, done = (
                max((tmp_path / "checkpoint" / log).glob("[0-9]*"), key=lambda p: int(p.name))
                for log in ("offsets", "commits")
            )
            if begun.name == done.name:  # else one was cut short as it is
                done.unlink()
                (done.parent / f".{done.name}.crc").unlink(missing_ok=True)
    orders: dict[int, Any] = {}
    for row in made(spark, JOB.format(rows=120), 120):
        if row["__row_kind"] == "-D":
            del orders[row["id"]]
        else:
            orders[row["id"]] = row
    prices = {row["item"]: row["price"] for row in made(spark, JOB.format(rows=120), 120, table=1)}
    wanted = [(row["id"], row["quantity"], prices.get(row["item"])) for row in orders.values()]
    assert sunk(spark, tmp_path) == sorted(wanted, key=repr)


@pytest.mark.slow
def test_all_rows_at_once_and_at_the_end(spark: Any, tmp_path: Path) -> None:
    text = JOB.format(rows=120).replace("SET trigger", "SET emit = at_end; SET trigger")
    path = tmp_path / "job.sql"
    path.write_text(text)
    with pytest.raises(JobError, match="--show has nothing to show"):
        runner.run(load(path), console(), show=True)
    done = runner.run(load(path), console())  # without --once: its inputs end
    assert (done.rows_in, done.batches) == (240, 1)
    found = [json.loads(x) for part in (tmp_path / "changes").glob("*.json") for x in part.read_text().splitlines()]
    assert {row["kind"] for row in found} == {"+I"}
    assert done.rows_out == len(found)
    text = text.replace("SET emit = at_end;", "").replace(
        "'number-of-rows' = '120'", "'scan' = 'once', 'number-of-rows' = '50'", 1
    )
    path = tmp_path / "static.sql"
    path.write_text(
        text.replace("changes'", "more'").replace("'state'", "'state2'").replace("'checkpoint'", "'checkpoint2'")
    )
    assert runner.run(load(path), console(), once=True).rows_in == 170


@pytest.mark.slow
def test_show_without_a_terminal_is_lines_and_keeps_nothing(spark: Any, tmp_path: Path) -> None:
    path = tmp_path / "job.sql"
    path.write_text(JOB.format(rows=60))
    for _ in range(2):  # it begins anew
        shown = console()
        done = runner.run(load(path), shown, show=True)
        text = shown.export_text()
        lines = text.splitlines()
        assert done.rows_in == 120
        assert lines[-1].startswith(f"done: {done.batches} micro-batches, 120 rows in, {done.rows_out} changes out")
        assert sum(line.startswith("micro-batch ") for line in lines) == done.batches
        assert any(line.startswith("  +I ") for line in lines)
        assert "warning" not in text  # of a state in memory only: nothing is to be kept
    assert [x.name for x in tmp_path.iterdir()] == ["job.sql"]


def test_the_screen_is_the_folded_changelog(spark: Any) -> None:
    screen = Screen(console(height=40), ["totals"])
    schema = "row_kind STRING, id BIGINT, tags ARRAY<INT>, total DOUBLE"

    def take(number: int, *changes: tuple[Any, ...]) -> str:
        screen.views[0](spark.createDataFrame(list(changes), schema), number)
        drawn = console(height=40)
        drawn.print(screen.drawn())
        return drawn.export_text()

    first = take(0, ("+I", 1, [1], 9.5), ("+I", 2, [2], None), ("+I", 2, [2], None), ("+I", 30, None, 1234.0))
    assert "4 rows; 4 changes (4 +I)" in first
    assert first.index("9.50") < first.index("null") < first.index("1,234.00")
    second = take(1, ("-U", 1, [1], 9.5), ("+U", 1, [1], 8.0), ("-D", 2, [2], None), ("+I", 3, [], 0.5))
    again = take(1, ("+I", 7, [], 0.5))  # repeated: not taken again
    assert all("4 rows; 8 changes (5 +I, 1 -U, 1 +U, 1 -D)" in drawn for drawn in (second, again))
    assert "9.50" not in second
    assert second.count("[2]") == 1
    many = take(2, *(("+I", n, [], 0.5) for n in range(100, 1100)))
    assert "1,004 rows, 20 of them shown; 1,008 changes" in many
