"""Staging tasks that Spark runs twice, each of which commits its rows: a view has them once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpu_ops import sinks
from gpu_ops.errors import DatabaseError
from services.commit_proxy import CommitProxy
from services.postgres import Postgres, changelog
from services.repeated_task_job import BATCHES, OPTIONS

pytestmark = [pytest.mark.spark, pytest.mark.services]

TESTS = Path(__file__).resolve().parents[1]


def rows_of(count: int = 3) -> dict[int, str]:
    """The view after so many micro-batches."""
    rows: dict[int, str] = {}
    for kind, number, item in [change for batch in BATCHES[:count] for change in batch]:
        if kind[0] == "+":
            rows[number] = item
        elif rows.get(number) == item:
            del rows[number]
    return rows


@pytest.mark.parametrize("how", ["drop", "hold", "kill"])
def test_rows_of_a_task_that_is_run_again_count_once(
    request: pytest.FixtureRequest, postgres: Postgres, how: str
) -> None:
    """After answers that are lost, beside a speculative attempt, and with executors that are killed."""
    master = "local[2,4]" if how == "drop" else request.getfixturevalue("standalone")
    (schema,) = postgres.rows("SELECT current_schema()")[0]
    jars = ",".join(map(str, Path(os.environ["GPU_JOIN_SERVICES"], "jars").absolute().glob("*.jar")))
    ended = subprocess.run(
        [sys.executable, "-m", "services.repeated_task_job", jars, schema, master, how],
        cwd=TESTS, capture_output=True, text=True, check=False, timeout=500,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert json.loads(ended.stdout.splitlines()[-1])["faults"] == (2 * len(BATCHES) if how == "drop" else 2)
    expected = sorted(((str(x), item) for x, item in rows_of().items()), key=repr)
    assert postgres.rows("SELECT id, item FROM keyed") == expected
    assert postgres.rows("SELECT * FROM counted") == [(*row, "1") for row in expected]
    twice = "SELECT COUNT(*) > COUNT(DISTINCT (id, item)) FROM {}_staged"
    assert {postgres.rows(twice.format(x))[0][0] for x in ("keyed", "counted")} == {"t"}, "no task was run twice"


@pytest.mark.parametrize("key", ["id", None])
def test_a_commit_whose_answer_is_lost_says_so_and_is_not_done_twice(spark: Any, postgres: Postgres, key: Any) -> None:
    """That of the staging, after which nothing is in the view; and that of the merge, which is in it."""
    (schema,) = postgres.rows("SELECT current_schema()")[0]
    proxy, count = CommitProxy(), "" if key else ", gpu_ops_count"
    view = sinks.postgres_view(proxy.url, f"{schema}.t", key, options=OPTIONS)
    for number, rows in enumerate(BATCHES):
        batch = changelog(spark, "id LONG, item STRING", *rows)
        before = sorted(((str(x), item, *["1"] * (key is None)) for x, item in rows_of(number).items()), key=repr)
        proxy.lose("drop", f"INSERT INTO {schema}.t_staged")
        with pytest.raises(DatabaseError, match=rf"view {schema}\.t: rows were not staged: .*I/O error"):
            view(batch, number)
        assert postgres.rows(f"SELECT id, item{count} FROM t") == before
        proxy.lose("drop", f"UPDATE {schema}.t_batches")
        with pytest.raises(DatabaseError, match=rf"view {schema}\.t: .*I/O error.*: EOFException"):
            view(batch, number)
        view(batch, number)
        after = sorted(((str(x), item, *["1"] * (key is None)) for x, item in rows_of(number + 1).items()), key=repr)
        assert postgres.rows(f"SELECT id, item{count} FROM t") == after
    assert proxy.faults == 2 * len(BATCHES)
