"""The YAML form: the same job as in SQL, and where it says that something is wrong."""

from __future__ import annotations

import dataclasses

import pytest

from gpu_ops.jobs.text import SaidQuery
from jobs.support import sql, wrong, yaml

JOB = """\
sources:
  orders:
    connector: parquet
    path: orders
    columns: {id: BIGINT, item: VARCHAR(20), price: "DECIMAL(10, 2)", at: TIMESTAMP(3)}
    primary_key: [id]
    watermark: {column: at, delay: 5 seconds}
    row_kind: op
    ttl: 7 days
  prices:
    connector: csv
    path: prices
    columns: >
      op STRING, id BIGINT,
      sizes ROW<a INT, b ARRAY<INT>>
    primary_key: id
    header: yes
    row_kind: op
sink:
  connector: json
  path: changes
query: |

  SELECT o.id
    FROM orders o
options:
  state: state
  checkpoint: there
  emit: per_event
  partitions: 3
  spark.sql.shuffle.partitions: 2
"""

SAME = """
CREATE TABLE orders (id BIGINT, item STRING, price DECIMAL(10, 2), at TIMESTAMP, PRIMARY KEY (id) NOT ENFORCED,
    WATERMARK FOR at AS at - INTERVAL '5' SECONDS)
WITH ('connector' = 'parquet', 'path' = 'orders', 'row_kind' = 'op', 'ttl' = '7 days');
CREATE TABLE prices (op STRING, id BIGINT PRIMARY KEY NOT ENFORCED, sizes ROW<a INT, b ARRAY<INT>>)
WITH ('connector' = 'csv', 'path' = 'prices', 'header' = 'true', 'row_kind' = 'op');
CREATE TABLE sink WITH ('connector' = 'json', 'path' = 'changes');
SET state = 'state'; SET checkpoint = 'there'; SET emit = per_event; SET partitions = 3;
SET spark.sql.shuffle.partitions = 2;
INSERT INTO sink SELECT o.id FROM orders o
"""


def test_the_same_job_in_both_forms():
    text = JOB.replace("header: yes", "header: true")

    def bare(job):
        """Without places."""
        tables = tuple(dataclasses.replace(source, at=0) for source in job.sources)
        query = SaidQuery(" ".join(job.query.text.split()), 0)
        return dataclasses.replace(
            job, file=None, sources=tables, sink=dataclasses.replace(job.sink, at=0), query=query
        )

    assert bare(yaml(text)) == bare(sql(SAME))


@pytest.mark.parametrize(
    ("query", "first", "second"),
    [
        ("|\n  SELECT a\n    FROM b", (3, 3), (4, 5)),
        ("|-\n\n      SELECT a\n        FROM b", (4, 7), (5, 9)),
        ("'SELECT a FROM b'", (2, 9), None),
        ("SELECT a\n  FROM b", (2, 8), (2, 8)),
        (">\n  SELECT a\n  FROM b", (2, 8), (2, 8)),
    ],
)
def test_places_in_the_query(query, first, second):
    rest = "\nsources: {b: {connector: json, path: b, columns: {a: INT}}}\nsink: {connector: console}\n"
    job = yaml("options: {}\nquery: " + query + rest)
    assert job.query.place(job.file, 1, 1) == first
    if second is not None:
        assert job.query.place(job.file, 2, 3) == second


@pytest.mark.parametrize(
    ("before", "after", "message", "place"),
    [
        ("sources:", "sorces:", "a job has no section 'sorces'; there are sources, sink, query, options", "sorces"),
        ("query: |", "options: |", "'options' is there twice", "options:"),
        ("path: orders", "path: [a, b]", "option 'path' is one value, not a list", "[a, b]"),
        ("path: orders", "path: a\n    path: b", "'path' is there twice", "path: b"),
        ("path: orders", "pth: orders", "parquet needs the option 'path'", "parquet"),
        ("item: VARCHAR(20)", "item: VARCHR", "there is no type VARCHR; the nearest are VARCHAR", "VARCHR"),
        ("{id: BIGINT", "{id: INT x", "expected nothing more, found 'x'", "x, item"),
        ("sizes ROW<a INT", "sizes ROW<a INR", "there is no type INR", "INR"),
        ("delay: 5 seconds", "delay: 5 sconds", "no duration: '5 sconds'", "5 sconds"),
        ("{column: at, delay", "{column: at, dealy", "a watermark has no 'dealy'; there are delay", "dealy"),
        ("{column: at, delay: 5 seconds}", "at", "a watermark is a mapping", "at"),
        ("{column: at, delay: 5 seconds}", "{column: at}", "a watermark has a delay", "{column"),
        ("header: yes", "header: yes", "header is true or false, not 'yes'", "yes"),
        ("  orders:\n", "  orders: x\n  other:\n", "'orders' is a mapping", "x"),
        ("sink:\n", "sink: {\n", "this is no YAML", None),
    ],
)
def test_errors(before, after, message, place):
    assert before in JOB
    said, there = wrong(yaml, JOB.replace(before, after, 1))
    assert said.startswith(message)
    assert place is None or there.startswith(place)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a job is a mapping"),
        ("[1]", "a job is a mapping"),
        ("sources: {}\nsink: {}", "the section 'query' is missing"),
        ("sources: {}\nsink: {connector: console}\nquery: x", "there is no source"),
    ],
)
def test_what_is_missing(text, message):
    assert wrong(yaml, text)[0].startswith(message)
