# ruff: noqa: E501 - tables of cases
"""What may be said of generated rows, and how what is wrong is said."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest

pytest.importorskip("pyspark")

from gpu_ops.jobs import datagen
from gpu_ops.jobs.datagen import Generated
from jobs.support import INSERT, SINK, source, sql, wrong

COLUMNS = "id BIGINT, item STRING, price DECIMAL(6, 2), at TIMESTAMP, tags ARRAY<INT>, who ROW<name STRING>"
KEY = ", PRIMARY KEY (id) NOT ENFORCED"
SEQUENCE = "'fields.id.kind' = 'sequence'"


def table(options: str = "", columns: str = COLUMNS) -> str:
    return f"CREATE TABLE t ({columns}) WITH ('connector' = 'datagen'{options and ', '}{options});\n"


def generated(options: str = "", columns: str = COLUMNS) -> Generated:
    made = source(table(options, columns)).generated
    assert made is not None
    return made


@pytest.mark.parametrize(
    ("options", "message", "place"),
    [
        ("'fields.itm.length' = '3'", "fields.itm.length: there is no column 'itm'; there are item, id, ", "'fields.itm"),
        ("'fields.who.nme.length' = '3'", "column 'who' has no part 'nme'", "'fields.who.nme"),
        ("'fields.price.mx' = '3'", "fields.price has no option 'mx'; there are max, ", "'fields.price.mx'"),
        ("'fields.at.min' = '3'", "fields.at has no option 'min'; there are ", "'fields.at.min'"),
        ("'fields.kind' = 'random'", "'fields.kind': an option of a column is written 'fields.kind.kind'", "'fields.kind"),
        ("'fields.price.max' = 'much'", "fields.price.max: 'much' is no number", "'much'"),
        ("'fields.price.max' = '1e9'", "fields.price.max: 1e9 is no DECIMAL(6, 2)", "'1e9'"),
        ("'fields.id.min' = '1.5'", "fields.id.min: '1.5' is no whole number", "'1.5'"),
        ("'fields.price.min' = '3', 'fields.price.max' = '2'", "fields.price: min 3 is above max 2", "'fields.price.max'"),
        (SEQUENCE + ", 'fields.id.start' = '3', 'fields.id.end' = '2'", "fields.id: start 3 is above end 2", "'fields"),
        ("'fields.id.start' = '3'", "fields.id.start is of a sequence: set 'fields.id.kind'", "'fields.id.start'"),
        (SEQUENCE + ", 'fields.id.max' = '3'", "fields.id.max is of random values, and this is a sequence", "'fields.id.max"),
        ("'fields.at.kind' = 'sequence'", "fields.at: TIMESTAMP has no sequence", "'fields.at.kind'"),
        ("'fields.id.kind' = 'serial'", "fields.id.kind is one of random, sequence, not 'serial'", "'serial'"),
        ("'fields.item.null-rate' = '2'", "fields.item.null-rate is a number from 0 to 1, not '2'", "'2'"),
        ("'fields.item.length' = '0'", "fields.item.length is a whole number from 1 to 1000000, not '0'", "'0'"),
        ("'fields.item.var-len' = 'yes'", "fields.item.var-len is true or false, not 'yes'", "'yes'"),
        ("'fields.at.max-past' = '3 dais'", "no duration: '3 dais'", "'3 dais'"),
        ("'rows-per-secnd' = '3'", "datagen has no option 'rows-per-secnd'; there are rows_per_second, ", "'rows-per-secnd'"),
        ("'number-of-rows' = '0'", "number_of_rows is a whole number above zero, not '0'", "'0'"),
        ("'start-time' = 'noon'", "start_time is a time like '2026-01-31 12:00:00', not 'noon'", "'noon'"),
        ("'share-of-updates' = '0.125'", "share_of_updates is a number from 0 to 1 in steps of 0.01", "'0.125'"),
        ("'share-of-updates' = '0.1'", "updates and deletes are of rows with a key: give the PRIMARY KEY", "'0.1'"),
        ("'scan' = 'once'", "a table that is read once has an end: set 'number-of-rows'", "t ("),
    ],
)  # fmt: skip
def test_an_option_that_cannot_be(options: str, message: str, place: str) -> None:
    said, there = wrong(table(options) + SINK + INSERT.replace("orders", "t"))
    assert said.startswith(message)
    assert there.startswith(place)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("'share-of-deletes' = '0.1'", "updates and deletes are of rows that are told apart: set 'fields.id.kind' = 'sequence'"),
        (SEQUENCE + ", 'share-of-updates' = '0.2', 'share-of-deletes' = '0.5'", "more rows would be deleted than inserted"),
        (SEQUENCE + ", 'share-of-updates' = '0.2', 'updates' = 'retract'", "datagen's updates have the new row alone"),
        ("'fields.id.null-rate' = '0.2'", "fields.id: a key is never null"),
    ],
)  # fmt: skip
def test_changes_that_cannot_be(options: str, message: str) -> None:
    said, _ = wrong(table(options, COLUMNS + KEY) + SINK + INSERT.replace("orders", "t"))
    assert said.startswith(message)


def test_columns_that_cannot_be() -> None:
    assert wrong("CREATE TABLE t WITH ('connector' = 'datagen');\n" + SINK + INSERT.replace("orders", "t"))[0] == (
        "datagen makes rows of the columns that a table names: name some"
    )


def test_what_is_not_said() -> None:
    made = generated()
    assert (made.rows_per_second, made.number_of_rows, made.seed, made.row_kind) == (10_000, None, 1, None)
    assert made.start_time == dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    assert (made.share_of_updates, made.share_of_deletes, made.inserts) == (0, 0, 100)


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ("'number-of-rows' = '70'", 70),
        (SEQUENCE + ", 'fields.id.end' = '50', 'number-of-rows' = '70'", 50),
        (SEQUENCE + ", 'fields.id.start' = '11', 'fields.id.end' = '30'", 20),
        (SEQUENCE, None),
        (SEQUENCE + ", 'share-of-updates' = '0.3', 'share-of-deletes' = '0.3'", None),
        (SEQUENCE + ", 'fields.id.end' = '9', 'share-of-updates' = '0.5'", 9),
        (SEQUENCE + ", 'fields.id.end' = '60', 'share-of-updates' = '0.5'", 110),  # 10, and 50 in the next hundred
        (SEQUENCE + ", 'fields.id.end' = '60', 'share-of-updates' = '1'", None),
    ],
)
def test_how_many_rows_there_are(options: str, rows: int | None) -> None:
    assert generated(options, COLUMNS + KEY).number_of_rows == rows


def test_a_job_ends_with_its_tables() -> None:
    ends = table("'number-of-rows' = '3'")
    assert sql(ends + SINK + INSERT.replace("orders", "t")).ends
    for more, has_end in ((", 'scan' = 'once'", True), (", 'scan' = 'once', 'refresh' = '1 hour'", False), ("", False)):
        other = f"CREATE TABLE u (id INT) WITH ('connector' = 'json', 'path' = 'p'{more});\n"
        both = "INSERT INTO changes SELECT t.id FROM t JOIN u ON t.id = u.id"
        assert sql(ends + other + SINK + both).ends is has_end
    job = sql(table() + SINK + INSERT.replace("orders", "t"))
    assert not job.ends
    assert (job.trigger, job.every_ms) == (None, 1000)
    job = sql(table() + SINK + "SET trigger = '3 seconds';" + INSERT.replace("orders", "t"))
    assert job.every_ms == 3000


def progress(*sources: tuple[int | None, Any, Any, int]) -> dict[str, Any]:
    """Spark's of a micro-batch; of a source there are: its end, the offsets, and the rows that Spark counts."""
    kinds = [
        "KafkaV2[t]" if end is None else f"RatePerMicroBatchStream[rowsPerBatch=9, startTimestamp={end}, x=0]"
        for end, *_ in sources
    ]
    return {
        "sources": [
            {"description": kind, "startOffset": start, "endOffset": last, "numInputRows": rows}
            for kind, (_, start, last, rows) in zip(kinds, sources, strict=True)
        ]
    }


def test_what_is_counted_beyond_the_end() -> None:
    def offset(number: int) -> Any:
        return {"offset": number, "timestamp": 0}

    text = '{"offset":20,"timestamp":0}'  # as Spark 3.5 has it
    assert datagen.beyond_end(progress((25, text, offset(30), 10), (None, "a", "b", 7))) == 5
    assert datagen.beyond_end(progress((25, offset(20), offset(30), 20))) == 10  # read twice
    assert datagen.beyond_end(progress((25, offset(30), offset(40), 10), (0, offset(30), offset(40), 10))) == 10
    assert not datagen.have_ended(progress((25, offset(20), offset(30), 10)))
    assert datagen.have_ended(progress((25, offset(30), offset(40), 10), (9, offset(9), offset(9), 0)))
    assert not datagen.have_ended(progress((25, None, offset(30), 10)))
    assert not datagen.have_ended(progress((25, offset(30), offset(40), 10), (0, offset(30), offset(40), 10)))
    assert datagen.have_ended(progress((25, offset(30), offset(40), 10), (None, "a", "b", 7)))  # a table, see Job.ends
    assert not datagen.have_ended(progress((None, "a", "b", 7)))
