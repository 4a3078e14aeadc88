"""A state folder cut into another number of partitions: the query goes on as if it had always had them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import gpu_ops
from gpu_ops import stream
from gpu_ops.errors import DescriptionError, StateError
from gpu_ops.spark.server.rescale import rescale
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import Manifest
from spark.feeds import Feed, sql_join
from spark.support import Sink, drain

pytestmark = pytest.mark.spark

COLUMNS: dict[str, dict[str, Any]] = {
    "l": {"k": ("int", [1, 2, 3, 4, 5, 6, 7, None]), "a": ("string", ["x", "y"]), "id": ("long", None)},
    "r": {"k": ("long", [1, 2, 3, 4, 5, 8, None]), "b": ("double", [0.5, -1.5])},
}
SQL = "SELECT l.k, a, id, r.k, b FROM l LEFT JOIN r ON l.k = r.k"


class Query:
    """A left join of two feeds, that can be stopped and gone on with."""

    def __init__(self, spark: Any, folder: Path, *, read_by_arrow: bool) -> None:
        self.feeds = [Feed(spark, folder, name, columns) for name, columns in COLUMNS.items()]
        for feed in self.feeds:
            feed.read_by_arrow = read_by_arrow
        self.state, self.checkpoint, self.sink = str(folder / "state"), folder / "checkpoint", Sink()

    def more(self) -> None:
        for feed in self.feeds:
            feed.more(40)

    def run(self, **options: Any) -> None:
        left, right = (stream(feed.df, row_kind="op", name=feed.name) for feed in self.feeds)
        drain(
            gpu_ops.join(left, right, [("k", "k")], "left", state=self.state, suffixes=("", "_r"), **options),
            self.sink,
            self.checkpoint,
        )
        assert self.sink.table == sql_join(SQL, self.feeds, len(self.feeds[0].files))

    def repeat_the_last_micro_batch(self) -> None:
        """What Spark does when it was stopped before it noted that one is done."""
        done = max(int(path.name) for path in (self.checkpoint / "commits").iterdir() if path.name.isdecimal())
        (self.checkpoint / "commits" / str(done)).unlink()


@pytest.mark.parametrize("read_by_arrow", [pytest.param(False, marks=pytest.mark.slow), True], ids=["spark", "arrow"])
def test_a_query_goes_on_with_more_and_with_fewer_partitions(
    spark: Any, tmp_path: Path, *, read_by_arrow: bool
) -> None:
    query = Query(spark, tmp_path, read_by_arrow=read_by_arrow)
    query.more()
    query.more()
    query.run(partitions=2)
    done = rescale(query.state, 5)
    assert (done.before, done.after, done.version, len(done.rows)) == (2, 5, 2, 5)
    assert sum(count > 0 for count in done.rows) > 2
    query.more()
    query.run()  # it asks the state folder how many there are
    rescale(query.state, 1)
    query.repeat_the_last_micro_batch()
    query.more()
    query.run()
    assert Manifest.read(Files.at(query.state)).partitions == 1  # type: ignore[union-attr]
    assert {path.name for path in Path(query.state).iterdir()} == {"manifest.json", "g2"}


@pytest.mark.slow
def test_upserts_by_a_foreign_key_go_on_with_other_partitions(spark: Any, tmp_path: Path) -> None:
    """Their order in Spark's union, by which the checkpoint counts sources, stays as it was."""
    left, right = (Feed(spark, tmp_path, name, COLUMNS[name]) for name in "lr")
    sink = Sink()
    for number, partitions in enumerate((2, 1, 3)):
        if number:
            rescale(str(tmp_path / "state"), partitions)
        left.more(40)
        right.more(40)
        more = {"partitions": partitions} if not number else {}
        upserts = stream(left.df, row_kind="op", name="l", unique_key="id")
        changes = gpu_ops.join(
            upserts, stream(right.df, row_kind="op", name="r"), [("k", "k")], "left", state=str(tmp_path / "state"),
            suffixes=("", "_r"), **more,
        )  # fmt: skip
        drain(changes, sink, tmp_path / "checkpoint")
        assert sink.table == sql_join(SQL, [left, right], number + 1)
    assert (tmp_path / "state" / "latest" / "0" / "manifest.json").exists()


def test_what_is_refused(spark: Any, tmp_path: Path) -> None:
    with pytest.raises(StateError, match="is no state folder"):
        rescale(str(tmp_path / "nothing"), 2)
    query = Query(spark, tmp_path, read_by_arrow=False)
    query.more()
    query.run(partitions=2)
    with pytest.raises(DescriptionError, match="partitions=0"):
        rescale(query.state, 0)
    query.more()
    with pytest.raises(Exception, match=r"cut into 2 partitions, the query asks for 3.*gpu-join rescale"):
        query.run(partitions=3)
    half = tmp_path / "half"
    shutil.copytree(query.state, half)
    max((half / "p" / "1").iterdir()).unlink()
    with pytest.raises(StateError, match="is in the middle of batch 0"):
        rescale(str(half), 3)
    rescale(query.state, 3)
    query.run(partitions=3)
    manifest = Path(query.state, "manifest.json")  # as an earlier version wrote it
    manifest.write_text(manifest.read_text().replace('"distribution": "arrow"', '"distribution": "spark"'))
    query.more()
    with pytest.raises(StateError, match=r"by another hash. Run gpu-join rescale .* --partitions 3"):
        query.run()
    rescale(query.state, 3)
    query.run()
    gpu_ops.finish(spark, state=query.state)
