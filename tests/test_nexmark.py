"""Nexmark's streams: proportions, who refers to whom, time; and the check of a query's result."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

pytest.importorskip("duckdb")

import duckdb

from benchmarks.nexmark import generator
from benchmarks.nexmark.queries import NAMES, compared, query

pytestmark = pytest.mark.thorough

EVENTS = 100_000


@pytest.fixture(scope="module")
def tables():
    return generator.generate(EVENTS, seed=7)


def column(tables, table, name):
    return np.asarray(tables[table].rows[name].to_numpy())


def test_proportions(tables):
    assert [tables[t].rows.num_rows for t in generator.TABLES] == [2_000, 6_000, 92_000]
    together = np.sort(np.concatenate([tables[t].number for t in generator.TABLES]))
    assert np.array_equal(together, np.arange(EVENTS))


def test_ids_count_up(tables):
    for table in ("person", "auction"):
        ids = column(tables, table, "id")
        assert np.array_equal(ids, generator.FIRST_ID + np.arange(len(ids)))


def test_who_refers_to_whom(tables):
    """To what is there already, or comes next: ids lead by at most ten."""
    people = [(t, c) for t, c in (("auction", "seller"), ("bid", "bidder"))]
    for table, name in people:
        ahead = column(tables, table, name) - generator.FIRST_ID - generator.last_person(tables[table].number)
        assert ahead.max() == generator.LEAD
        assert ahead.min() >= -generator.ACTIVE_PEOPLE
    auction = column(tables, "bid", "auction") - generator.FIRST_ID
    last = generator.last_auction(tables["bid"].number)
    assert (auction - last).max() == generator.LEAD
    assert (auction - last).min() == -generator.IN_FLIGHT_AUCTIONS
    assert auction.min() >= 0


def test_last_auction_before_each_event():
    last = generator.last_auction(np.arange(55))
    assert last[:6].tolist() == [-1, 0, 1, 2, 2, 2]
    assert last[49:54].tolist() == [2, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("table", "name", "last", "hot"),
    [
        ("auction", "seller", (generator.last_person, 0), 3 / 4),
        ("bid", "bidder", (generator.last_person, 1), 3 / 4),
        ("bid", "auction", (generator.last_auction, 0), 1 / 2),
    ],
)
def test_hot_ids(tables, table, name, last, hot):
    number = tables[table].number
    last, place = last
    expected = generator.FIRST_ID + last(number) // generator.BATCH * generator.BATCH + place
    share = np.mean(column(tables, table, name) == expected)
    assert hot <= share < hot + 0.03  # some are drawn from all and hit it by chance


def test_time_rises_with_the_events(tables):
    for table in generator.TABLES:
        ms = column(tables, table, "dateTime").astype("datetime64[us]").astype(np.int64) // 1000
        assert np.array_equal(ms - ms[0], tables[table].number // 10 - tables[table].number[0] // 10)
    length = pc.milliseconds_between(*(tables["auction"].rows[c] for c in ("dateTime", "expires"))).to_numpy()
    assert length.min() >= 1
    assert length.max() <= 334
    assert 150 < length.mean() < 184  # as long as 100 auctions take on average, 167 ms


def test_sizes_and_values(tables):
    for table, wanted in (("person", 200), ("auction", 500), ("bid", 100)):
        rows = tables[table].rows
        texts = [c for c in rows.column_names if pa.types.is_string(rows[c].type) and c not in ("channel", "url")]
        numbers = {"person": 8, "auction": 48, "bid": 32}[table]
        mean = numbers + sum(pc.mean(pc.utf8_length(rows[c])).as_py() for c in texts)
        assert abs(mean / wanted - 1) < 0.02
    assert set(column(tables, "auction", "category")) == set(range(10, 15))
    assert set(column(tables, "person", "state")) == set(generator.STATES)
    price = column(tables, "bid", "price")
    assert price.min() >= 100
    assert price.max() <= 100_000_000
    assert abs(np.log10(price).mean() - 5) < 0.05
    hot = np.isin(column(tables, "bid", "channel"), generator.CHANNELS)
    assert abs(hot.mean() - 0.5) < 0.01


def test_the_same_seed_makes_the_same_rows(tables):
    again, other = generator.generate(EVENTS, seed=7), generator.generate(EVENTS, seed=8)
    for table in generator.TABLES:
        assert again[table].rows.equals(tables[table].rows)
        assert not other[table].rows.equals(tables[table].rows)


def test_files_are_cut_at_the_same_events(tmp_path):
    rows = generator.write(tmp_path, events=10_000, files=3, seed=7)
    whole = generator.generate(10_000, seed=7)
    ends = []
    for table in generator.TABLES:
        files = sorted((tmp_path / table).iterdir(), key=lambda p: p.stat().st_mtime)
        assert [f.name for f in files] == ["0000.parquet", "0001.parquet", "0002.parquet"]
        parts = [pq.read_table(f) for f in files]
        assert pa.concat_tables(parts).equals(whole[table].rows)
        assert rows[table] == whole[table].rows.num_rows
        ends.append([p["dateTime"][-1].as_py() for p in parts])
    assert all(max(e[i] for e in ends) < min(e[i + 1] for e in ends) for i in range(2))


# --- queries and their check -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nexmark")
    generator.write(folder, events=5_000, files=2, seed=7)
    return folder


def result(data, name):
    with duckdb.connect() as db:
        for table in generator.TABLES:
            db.read_parquet(str(data / table / "*.parquet")).create_view(table)
        return db.sql(query(name).text).to_arrow_table()


def test_what_queries_read():
    q3, q23 = query("q3"), query("q23")
    assert [(s.table, s.key, s.where) for s in q3.sides] == [
        ("auction", "seller", "(category = 10)"),
        ("person", "id", "(state = 'OR' OR state = 'ID' OR state = 'CA')"),
    ]
    assert q3.sides[0].columns == ("category", "id", "seller")
    assert [(s.table, s.key, s.where) for s in q23.sides] == [
        ("bid", "bidder", None),
        ("person", "id", None),
        ("auction", "seller", None),
    ]
    with pytest.raises(SystemExit, match="no query 'q5'; there are q3"):
        query("q5")


@pytest.mark.parametrize("name", NAMES)
def test_check_of_a_changelog(data, tmp_path, name):
    rows = result(data, name)
    assert rows.num_rows > 5

    def compare(kinds, table):
        path = tmp_path / "changelog.parquet"
        pq.write_table(table.add_column(0, "row_kind", [kinds]), path)
        changes, found, different = compared(query(name), data, [path])
        assert (changes, found) == (table.num_rows, n)
        return [int(row.rpartition(",")[2].strip(" )")) for row in different]  # how often too much

    n = rows.num_rows
    assert compare(["+I"] * n, rows) == []
    # a row taken back is one that is missing, one said twice is one too many
    twice = pa.concat_tables([rows, rows.slice(0, 1)])
    assert compare(["+I"] * n + ["-D"], twice) == [-1]
    assert compare(["+I"] * n + ["+I"], twice) == [1]
    again = pa.concat_tables([twice, rows.slice(0, 1)])
    assert compare(["+I"] * n + ["-U", "+U"], again) == []
