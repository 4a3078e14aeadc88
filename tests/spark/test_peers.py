"""Each peer of `benchmarks.peers` that is here gives the rows that the generator and DuckDB expect."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import data, engines

PYTHON = str(Path(sys.prefix, "peers", "bin", "python"))
SOME = [("ours", "changes"), ("spark", "inserts")]
CASES = [
    pytest.param(name, query, marks=[] if (name, query) in SOME else pytest.mark.slow)
    for name, peer in engines.peers(None, PYTHON, 0).items()
    for query in peer.queries
]
Given = tuple[Path, dict[str, data.Folded]]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Given:
    folder = tmp_path_factory.mktemp("peers")
    return folder, data.write(folder, 1000, 2)


@pytest.mark.thorough
@pytest.mark.spark
@pytest.mark.parametrize(("name", "query"), CASES)
def test_same_rows(spark: Any, given: Given, name: str, query: str) -> None:
    if name.startswith("pathway") and not Path(PYTHON).exists():
        pytest.skip(f"there is no {PYTHON}; `make bench` makes it")
    if name == "flink":  # downloads 330 MB where it is not there
        missing = engines.absent(PYTHON).get("flink")
        if missing:
            pytest.skip(missing)
    folder, expected = given
    assert engines.once(engines.peers(spark, PYTHON, 0)[name], query, folder, expected[query]) > 0


def test_a_wrong_result_is_refused(given: Given) -> None:
    folder, expected = given
    rows, hashes = expected["inserts"]
    polars = engines.peers(None, PYTHON, 0)["polars"]
    with pytest.raises(RuntimeError, match="folds to"):
        engines.once(polars, "inserts", folder, (rows, hashes + 1))
