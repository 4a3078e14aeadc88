"""The generated changelogs of the benchmarks are well formed, and their counts are right."""

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest
from pyarrow import csv

from benchmarks import changes as bench

pytestmark = pytest.mark.thorough

VARIANTS = [
    pytest.param({"unique_key": True}, id="unique"),
    pytest.param({"unique_key": False}, id="multiset"),
    pytest.param({"unique_key": True, "share": 2 / 3, "match": 0.3, "seed": 5}, id="two-thirds"),
    pytest.param({"unique_key": False, "share": 0.5, "rows_per_key": 30.0, "seed": 6}, id="hot"),
    pytest.param({"unique_key": True, "share": 0.0}, id="inserts"),
]


def replay(table: pa.Table) -> Counter:
    """Applies the changes one by one; a retraction of a row that is not there fails."""
    state: Counter = Counter()
    before = None
    for op, *row in zip(*(column.to_pylist() for column in table.columns), strict=True):
        assert (op == "+U") == (before is not None), "-U and +U are neighbours"
        if before is not None:
            assert row[0] == before, "an update keeps its key"
        before = row[0] if op == "-U" else None
        state[tuple(row)] += 1 if op in ("+I", "+U") else -1
        assert state[tuple(row)] >= 0, f"{op} of {row}, which is not there"
    assert before is None
    return +state


@pytest.mark.parametrize("variant", VARIANTS)
def test_well_formed_and_counted(variant):
    changes = bench.generate(6001, **variant)
    counts = bench.count(changes)
    live = {"orders": replay(changes.orders), "prices": replay(changes.prices)}
    assert counts.live == {name: rows.total() for name, rows in live.items()}
    assert counts.changes == {"orders": 3001, "prices": 3000}
    for name, table in (("orders", changes.orders), ("prices", changes.prices)):
        assert counts.kinds[name] == dict(Counter(table["op"].to_pylist()))

    def rows(name: str, schema: pa.Schema) -> pa.Table:
        columns = list(zip(*live[name].elements(), strict=True)) or [[]] * (len(schema) - 1)
        return pa.table(columns, schema=pa.schema(list(schema)[1:]))

    orders, prices = rows("orders", bench.ORDERS), rows("prices", bench.PRICES)
    with duckdb.connect() as con:
        con.register("orders", orders)
        con.register("prices", prices)
        expected = con.execute(
            "SELECT count(*), count(*) FILTER (prices.order_id IS NULL), coalesce(sum(amount), 0)::BIGINT,"
            " coalesce(sum(price), 0)"
            " FROM orders LEFT JOIN prices ON orders.order_id = prices.order_id"
        ).fetchone()
    assert (counts.rows, counts.pads, counts.amount, counts.price) == expected


@pytest.mark.parametrize("unique_key", [True, False])
def test_shares_and_keys(unique_key):
    changes = bench.generate(40_000, 0.2, unique_key=unique_key)
    for table in (changes.orders, changes.prices):
        kinds = Counter(table["op"].to_pylist())
        assert kinds == {"+I": 16_000, "-U": 1000, "+U": 1000, "-D": 2000}
    inserted = Counter(key for op, key in zip(*columns(changes.orders), strict=True) if op == "+I")
    if unique_key:  # present at most once at any time, and some keys come back after a delete
        present: set[int] = set()
        for op, key in zip(*columns(changes.orders), strict=True):
            if op in ("+I", "+U"):
                assert key not in present
                present.add(key)
            else:
                present.remove(key)
        assert max(inserted.values()) == 2
        other = set(changes.prices["order_id"].to_pylist())
        assert len(inserted.keys() & other) / len(inserted) == pytest.approx(0.8, abs=0.02)
    else:
        assert max(inserted.values()) > 2


def columns(table: pa.Table) -> list[list]:
    return [table["op"].to_pylist(), table["order_id"].to_pylist()]


def test_same_seed_same_tables():
    first, again, other = (bench.generate(2000, seed=seed) for seed in (1, 1, 2))
    assert first.orders.equals(again.orders)
    assert first.prices.equals(again.prices)
    assert not first.orders.equals(other.orders)


@pytest.mark.parametrize("total", range(12))
@pytest.mark.parametrize("unique_key", [True, False])
def test_tiny(total, unique_key):
    changes = bench.generate(total, 0.6, unique_key=unique_key)
    counts = bench.count(changes)
    assert sum(counts.changes.values()) == total
    assert counts.live["orders"] == replay(changes.orders).total()


def test_bad_arguments():
    with pytest.raises(ValueError, match="share"):
        bench.generate(100, 0.7)
    with pytest.raises(ValueError, match="match"):
        bench.generate(100, match=0)
    with pytest.raises(ValueError, match="files"):
        bench.write(bench.generate(100), "unused", files=0)


@pytest.mark.parametrize("files", [1, 7, 40])
def test_files_hold_the_same_rows(tmp_path: Path, files: int):
    changes = bench.generate(3000, 0.6, seed=3)
    bench.write(changes, tmp_path, 41)  # must leave nothing behind
    counts = bench.write(changes, tmp_path, files)
    assert bench.read_counts(tmp_path) == counts
    assert json.loads(json.dumps(asdict(counts))) == asdict(counts)
    for name, table in (("orders", changes.orders), ("prices", changes.prices)):
        paths = sorted((tmp_path / name).iterdir())
        assert len(paths) == files
        assert sorted(paths, key=lambda path: path.stat().st_mtime) == paths
        parts = [
            csv.read_csv(
                path,
                read_options=csv.ReadOptions(column_names=table.schema.names),
                convert_options=csv.ConvertOptions(column_types=table.schema),
            )
            for path in paths
        ]
        assert pa.concat_tables(parts).combine_chunks().equals(table.combine_chunks())
        for part in parts:
            kinds = part["op"].to_pylist()
            assert kinds[0] != "+U", "a pair is not split"
            assert kinds[-1] != "-U", "a pair is not split"
