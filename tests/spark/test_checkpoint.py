"""A checkpoint made of parts of others: each source goes on where it stood, nothing twice, nothing missing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import slow_but
from pyspark.sql import functions as f

import gpu_ops
from gpu_ops.errors import StateError
from gpu_ops.spark.driver import checkpoint as module
from gpu_ops.spark.driver.checkpoint import Checkpoint, write_checkpoint
from gpu_ops.spark.driver.stream_sources import StreamSource, sources_of
from spark.support import Sink, drain

SCHEMA = "v INT"


class Feed:
    """A folder of files of numbers, and the numbers in them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = 0
        self.written: list[int] = []
        folder.mkdir()

    def add(self, *files: int) -> list[int]:
        """Writes files with some numbers each; gives the numbers."""
        new: list[int] = []
        for count in files:
            numbers = [len(self.written) + x for x in range(count)]
            beside = self.folder / f".{self.files}"
            beside.write_text("".join(f'{{"v": {x}}}\n' for x in numbers))
            beside.rename(self.folder / f"{self.files:05}.json")
            self.files += 1
            self.written += numbers
            new += numbers
        return new


def spark_files(spark: Any, folder: Path, per_trigger: int = 1) -> Any:
    return spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", per_trigger).json(str(folder))


def our_files(spark: Any, folder: Path, per_trigger: int = 1) -> Any:
    return gpu_ops.read_files(spark, str(folder), "json", SCHEMA, maxFilesPerTrigger=per_trigger)


def named(df: Any, name: str) -> Any:
    return df.select(f.lit(name).alias("source"), "v")


def union(*frames: Any) -> Any:
    whole, *others = frames
    for other in others:
        whole = whole.unionAll(other)
    return whole


def rows(df: Any, checkpoint: Path) -> list[tuple[str, int]]:
    """The rows of all micro-batches of a run until the sources are exhausted."""
    sink = Sink()
    drain(df, sink, checkpoint)
    return sorted(sink.changes)


def text_of(folder: Path) -> dict[str, str]:
    """The files of a checkpoint, without checksums."""
    return {str(x.relative_to(folder)): x.read_text() for x in folder.rglob("[!.]*") if x.is_file()}


@pytest.fixture(scope="module")
def changed(spark, tmp_path_factory) -> Any:
    """Two stopped queries, and what makes the checkpoint of a third one of theirs."""
    folder = tmp_path_factory.mktemp("checkpoints")
    feeds = {name: Feed(folder / name) for name in "abc"}
    for feed, files in zip(feeds.values(), ((2, 1), (2, 1), (1, 1, 1)), strict=True):
        feed.add(*files)
    a, b = spark_files(spark, folder / "a"), our_files(spark, folder / "b")
    old = union(named(a, "a"), named(b, "b"))
    assert rows(old, folder / "old") == [*(("a", x) for x in range(3)), *(("b", x) for x in range(3))]
    c = spark_files(spark, folder / "c")
    build = named(c, "c")
    assert rows(build, folder / "build") == [("c", x) for x in range(3)]
    new = union(named(c, "c"), named(b.where("v >= 0"), "b"), named(b, "b again"), named(a, "a"))
    before = Checkpoint.read(spark, str(folder / "old"), sources_of(old))
    built = Checkpoint.read(spark, str(folder / "build"), sources_of(build))

    def write(to: Path) -> None:
        sources = sources_of(new)
        parts = [(built, 0), (before, 1), (before, 0)]
        write_checkpoint(spark, str(to), built.query_id, built.version - 1, parts, build=built, sources=sources)

    vars(write).update(old=old, new=new, feeds=feeds, folder=folder, before=before, built=built)
    return write


def test_sources_dropped_added_and_reordered_go_on_where_they_stood(changed, spark):
    to = changed.folder / "new"
    changed(to)
    assert rows(changed.new, to) == []
    a, b, c = (changed.feeds[name].add(2) for name in "abc")
    expected = [*(("a", x) for x in a), *(("b", x) for x in b), *(("b again", x) for x in b), *(("c", x) for x in c)]
    assert rows(changed.new, to) == expected
    changed(to)  # the query has gone on since
    assert rows(changed.new, to) == []


def test_a_plan_has_a_source_twice_and_counts_it_once(changed, spark):
    a = spark_files(spark, changed.folder / "a")
    other = spark_files(spark, changed.folder / "a", per_trigger=7)
    sources = sources_of(union(named(a, "a"), named(a.where("v > 1"), "a"), named(other, "a")))
    assert [(source.places, source.folder) for source in sources] == [((0, 1), "0"), ((2,), "1")]
    left, right = sources_of(a.alias("l").join(a.alias("r"), "v"))
    assert left.same_load(right)
    assert not left.same_load(sources_of(other)[0])
    assert left.description == right.description == sources_of(other)[0].description
    assert StreamSource.from_dict(json.loads(json.dumps(left.to_dict()))) == left


class Killed(BaseException):
    """Ends a change at one point."""


@pytest.mark.parametrize("every", slow_but([1, 7], 7))
def test_a_write_that_is_killed_anywhere_is_completed_by_the_next(changed, every, monkeypatch, tmp_path):
    changed(tmp_path / "whole")
    whole, write = text_of(tmp_path / "whole"), module._Files._write
    for point in range(every - 1, 2 * len(whole), every):
        to, left = tmp_path / str(point), [point]

        def killed(files: Any, name: str, content: Any, left: list[int] = left) -> None:
            def broken_off(stream: Any) -> None:
                content(stream)
                if left[0] == 0:
                    raise Killed
                left[0] -= 1

            write(files, name, broken_off)
            if left[0] == 0:
                raise Killed
            left[0] -= 1

        monkeypatch.setattr(module._Files, "_write", killed)
        with pytest.raises(Killed):
            changed(to)
        monkeypatch.undo()
        assert point == 2 * len(whole) - 1 or "metadata" not in text_of(to)
        changed(to)
        assert text_of(to) == whole


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("metadata", None, "there is no checkpoint of a query in .*: give the checkpointLocation"),
        ("metadata", "{}", "is damaged: it names no query: '{}'"),
        ("metadata", '{"id"', "is damaged: .* is no JSON"),
        ("commits/1", None, r"has begun micro-batch 1 and not committed it: .* trigger\(availableNow=True\)"),
        ("commits/7", "v1\n{}", "is damaged: micro-batch 7 is committed and its offsets are not there"),
        ("offsets/1", "v3\n{}\n{}", "has offsets in the layout 'v3'"),
        ("offsets/1", "v1", "is damaged: a file of offsets ends after 'v1'"),
        ("offsets/1", 'v2\n{"sourceMetadataInfo": {"0": {}}}\n0:{}', "has sourceMetadataInfo"),
        ("offsets/1", "v1\n{}\n{}\n{}\n{}", "has the offsets of sources 0, 1, 2, and the query .* has 0, 1"),
        ("offsets/1", "v2\n{}\na:{}\n1:{}", "has the offsets of sources a, 1, and the query .* has 0, 1"),
        ("state/0/0/1.delta", "", "has state of Spark's own operators"),
        (
            "commits/1",
            'v2\n{"nextBatchWatermarkMs":0,"stateUniqueIds":{"0":[[]]}}',
            "has state of Spark's own operators",
        ),
    ],
)
def test_a_checkpoint_that_cannot_go_along_says_why(changed, tmp_path, name, text, error):
    copy = tmp_path / "checkpoint"
    shutil.copytree(changed.folder / "old", copy, ignore=shutil.ignore_patterns(".*"))
    if text is None:
        (copy / name).unlink()
    else:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_text(text)
    before = text_of(copy)
    with pytest.raises(StateError, match=error):
        Checkpoint.read(changed.old.sparkSession, str(copy), sources_of(changed.old))
    assert text_of(copy) == before


def test_a_checkpoint_before_its_first_micro_batch_has_nothing_to_go_on_from(spark, tmp_path):
    (tmp_path / "metadata").write_text('{"id": "x"}')
    with pytest.raises(StateError, match="of query x has no micro-batch yet"):
        Checkpoint.read(spark, str(tmp_path))
    assert [x.name for x in tmp_path.iterdir()] == ["metadata"]


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("metadata", '{"id":"another"}', "has the checkpoint of another query, another: give a checkpoint folder"),
        ("offsets/4", "v1", "has a checkpoint of another query, offsets/4: give"),
        ("commits/1", "v1", "has a checkpoint of another query, commits/1: give"),
        ("state/0/x", "", "has a checkpoint of another query, state/0: give"),
        ("offsets/1", "v1\n{}\n{}", "has a file offsets/1 of another query or change: give"),
        ("sources/2/0", "v1", "has a file sources/2/0 of another query or change: give"),
    ],
)
def test_a_folder_of_another_query_is_not_written_to(changed, tmp_path, name, text, error):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(text)
    with pytest.raises(StateError, match=error):
        changed(tmp_path)
    assert (tmp_path / name).read_text() == text
    assert name == "metadata" or not (tmp_path / "metadata").exists()


def test_a_change_written_once_is_not_written_as_another_one(changed, spark, tmp_path):
    changed(tmp_path)
    before, built, sources = changed.before, changed.built, sources_of(changed.new)
    with pytest.raises(StateError, match=r"has been written for query .* with other offsets of micro-batch 2: give"):
        write_checkpoint(
            spark, str(tmp_path), built.query_id, 2, [(before, 0)] * len(sources), build=built, sources=sources
        )
    with pytest.raises(StateError, match="the query has 3 sources, and its checkpoint is to be made of 1"):
        write_checkpoint(spark, str(tmp_path), built.query_id, 2, [(before, 0)], build=built, sources=sources)
