"""A checkpoint made of parts of others: each source goes on where it stood, nothing twice, nothing missing."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import slow_but
from pyspark.sql import functions as f

import gpu_ops
from gpu_ops.errors import StateError
from gpu_ops.spark.driver.checkpoint import Checkpoint, begin_checkpoint, write_checkpoint
from gpu_ops.spark.driver.hadoop_files import HadoopFiles
from gpu_ops.spark.driver.stream_sources import StreamSource, _redacted, _settled, sources_of
from gpu_ops.spark.sources.topics import topics_beside
from spark.support import Sink, drain

pytestmark = [pytest.mark.spark, pytest.mark.thorough]

SCHEMA = "v INT"


class Feed:
    """A folder of files of numbers, and the numbers in them."""

    def __init__(self, folder: Path, form: str = "json") -> None:
        self.folder, self._form = folder, form
        self.files = 0
        self.written: list[int] = []
        folder.mkdir()

    def add(self, *files: int) -> list[int]:
        """Writes files with some numbers each; gives the numbers."""
        new: list[int] = []
        for count in files:
            numbers = [len(self.written) + x for x in range(count)]
            beside = self.folder / f".{self.files}"
            if self._form == "json":
                beside.write_text("".join(f'{{"v": {x}}}\n' for x in numbers))
            else:
                pq.write_table(pa.table({"v": pa.array(numbers, pa.int32())}), beside)
            beside.rename(self.folder / f"{self.files:05}.{self._form}")
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


def test_a_source_that_a_plan_has_twice_is_not_taken_for_two(changed, spark, tmp_path):
    """The second one's folder would be that of the next source."""
    a, c = (spark_files(spark, changed.folder / name) for name in "ac")
    df = union(named(a, "a"), named(a, "a"), named(c, "c"))
    rows(df, tmp_path / "c")
    with pytest.raises(StateError, match="has two equal offsets, which may be of one source"):
        Checkpoint.read(spark, str(tmp_path / "c"))
    assert Checkpoint.read(spark, str(tmp_path / "c"), sources_of(df)).folders == ("0", "1")
    assert Checkpoint.read(spark, str(changed.folder / "old")) == changed.before


class Killed(BaseException):
    """Ends a change at one point."""


@pytest.mark.parametrize("every", slow_but([1, 7], 7))
def test_a_write_that_is_killed_anywhere_is_completed_by_the_next(changed, every, monkeypatch, tmp_path):
    changed(tmp_path / "whole")
    whole, write = text_of(tmp_path / "whole"), HadoopFiles._write
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

        monkeypatch.setattr(HadoopFiles, "_write", killed)
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
        ("sources/2/0", "v1", "has a source '2', and the query .* has none of that name"),
        ("sources/a/0", "v1", "has a source 'a', and the query .* has none of that name"),
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


def test_a_kill_in_the_first_micro_batch_leaves_a_checkpoint_that_begins(spark, tmp_path):
    """Spark writes offsets beside and renames them: what is left half written is no sign of another query."""
    feed, checkpoint, query_id = Feed(tmp_path / "feed"), tmp_path / "checkpoint", str(uuid.uuid4())
    feed.add(2)
    assert begin_checkpoint(spark, str(checkpoint), query_id) == query_id
    (checkpoint / "offsets").mkdir()
    (checkpoint / "offsets" / ".0.8f1c.tmp").write_text("v1\n")
    assert begin_checkpoint(spark, str(checkpoint), str(uuid.uuid4())) == query_id
    assert rows(named(spark_files(spark, feed.folder), "a"), checkpoint) == [("a", 0), ("a", 1)]
    assert begin_checkpoint(spark, str(checkpoint), str(uuid.uuid4())) == query_id
    assert Checkpoint.read(spark, str(checkpoint)).version == 1


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


def test_ids_of_topics_go_along_with_the_offsets_of_their_topics(changed, spark, tmp_path):
    """A source that goes on where the old query stood is refused if its topic was made anew; others' topics may be."""
    old, build = tmp_path / "old", tmp_path / "build"
    offsets = '{"a":{"0":5},"b":{"0":1}}', '{"b":{"0":2}}', '{"logOffset":3}', None, "7"
    before, built = (dataclasses.replace(changed.before, location=str(x), offsets=offsets) for x in (old, build))
    parts = [(built, 0), (before, 1), (before, 2), (before, 3), (before, 4)]  # the last one is a rate source's
    assert topics_beside(spark, parts) == {}
    for folder, ids in (
        (old, '{"a":["1"],"b":["2","3"],"c":["4"],"logOffset":["5"]}'),
        (build, '{"a":["6"],"b":["3"]}'),
    ):
        folder.mkdir()
        (folder / "gpu_ops_topics.json").write_text(ids)
    (text,) = topics_beside(spark, [*parts[:2], *parts[3:]]).values()
    assert json.loads(text) == {"a": ["6"], "b": ["3"]}
    (build / "gpu_ops_topics.json").write_text('{"b":["7"]')
    assert json.loads(*topics_beside(spark, [(built, 0), (before, 1)]).values()) == {"b": ["2", "3"]}
    (build / "gpu_ops_topics.json").write_text('{"b":["7"]}')
    assert json.loads(*topics_beside(spark, [(built, 1), (before, 1)]).values()) == {"b": []}


REDACTED = "spark.sql.redaction.options.regex"


def test_names_that_spark_always_hides_are_in_descriptions(spark):
    url = {"url": "http://h/"}
    assert dict(_settled(url, _redacted(spark))) == url


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"subscribe": "b, a"}, {"subscribe": "a,b"}, True),
        ({"subscribe": "a", "kafka.sasl.jaas.config": "x"}, {"Subscribe": "a", "startingOffsets": "earliest"}, True),
        ({"subscribe": "a"}, {"subscribe": "b"}, False),
        ({"kafka.bootstrap.servers": "h:1,g:2"}, {"kafka.bootstrap.servers": "g:2,h:1"}, True),
        ({"maxFilesPerTrigger": "1", "sep": ";"}, {"sep": ";", "cleanSource": "delete"}, True),
        ({"sep": ";"}, {"sep": ","}, False),
        ({"api_key": "hunter2"}, {"api_key": "hunter2"}, True),
        ({"api_key": "hunter2"}, {"api_key": "hunter3"}, False),
        ({"url": "http://u:hunter2@h/"}, {"url": "http://u:hunter2@h/"}, True),
        ({"url": "jdbc:x?password=hunter2"}, {"url": "jdbc:x?password=hunter3"}, False),
        ({"given": '{"table":"t","most":1,"catalog":{"a":"b"}}'}, {"given": '{"catalog":{"a":"b"},"table":"t"}'}, True),
        ({"given": '{"table":"t","catalog":{"a":"b"}}'}, {"given": '{"table":"t","catalog":{"a":"c"}}'}, False),
        ({"given": '{"catalog":{"token":"hunter2"}}'}, {"given": '{"catalog":{"token":"hunter2"}}'}, True),
        ({"mark": "hunter2"}, {"mark": "hunter2"}, True),
        ({"given": '{"catalog":{"Mark":"hunter2"}}'}, {"given": '{"catalog":{"Mark":"hunter3"}}'}, False),
    ],
)
def test_a_description_tells_what_is_read_and_no_secret(one, other, same, spark):
    spark.conf.set(REDACTED, "(?i)url|^(mark)$")  # as a job sets it that has the option's value from elsewhere
    try:
        redacted = _redacted(spark)
    finally:
        spark.conf.unset(REDACTED)
    first, second = (dict(_settled({name.lower(): value for name, value in x.items()}, redacted)) for x in (one, other))
    assert (first == second) is same
    assert "hunter" not in f"{first}{second}"


class Stream:
    """A source of numbers from 0 on, and those of them that a query has had."""

    def __init__(self, spark: Any, folder: Path, choice: random.Random, kinds: Sequence[str]) -> None:
        kind = choice.choice(kinds)
        self.name, self._choice, self.files = folder.name, choice, not kind.startswith("rate")
        self.had: set[int] = set()
        self.feed = Feed(folder, "parquet" if kind == "parquet" else "json")
        each = choice.randint(1, 3)
        if kind == "json":
            df = spark_files(spark, folder, each)
        elif kind == "parquet":
            df = spark.readStream.schema(SCHEMA).option("fileNameOnly", "true").parquet(str(folder))
        elif kind == "ours":
            df = our_files(spark, folder, each)
        else:
            rate = {"rate": "rowsPerSecond", "rate-micro-batch": "rowsPerBatch"}[kind]
            df = spark.readStream.format(kind).option(rate, each).option("numPartitions", 1).load()
        self.df = df.selectExpr(f"CAST({df.columns[-1]} AS INT) AS v")

    def add(self, *counts: int) -> None:
        """Adds so many files, or one of some numbers of them."""
        if self.files:
            self.feed.add(*(self._choice.randint(1, 3) for _ in range(self._choice.choice(counts or (0, 1, 2, 5)))))

    def take(self, new: list[int], where: str) -> None:
        """Checks what a query has had of it further."""
        if self.files:
            assert sorted(new) == sorted(set(self.feed.written) - self.had), (where, self.name)
        else:
            assert sorted(new) == list(range(len(self.had), len(self.had) + len(new))), (where, self.name)
        self.had |= set(new)


class Query:
    """A query that copies streams, some of them from several places of its plan."""

    def __init__(self, checkpoint: Path, streams: Sequence[Stream], choice: random.Random) -> None:
        self.checkpoint, self.streams = checkpoint, list(streams)
        leaves = [stream for stream in streams for _ in range(choice.choice([1, 1, 1, 2]))]
        choice.shuffle(leaves)
        self._of = {f"{place} {stream.name}": stream for place, stream in enumerate(leaves)}
        self.df = union(*(named(stream.df.where("v >= 0"), name) for name, stream in self._of.items()))
        self.sources, self.order = sources_of(self.df), list(dict.fromkeys(leaves))
        assert [len(source.places) for source in self.sources] == [leaves.count(stream) for stream in self.order]
        self.batches: dict[int, dict[Stream, set[int]]] = {}

    def run(self, where: str) -> None:
        """Runs until its sources are exhausted, and checks what each of them gave."""
        sink = Sink()
        drain(self.df, sink, self.checkpoint)
        given = {name: sorted(v for n, v in sink.changes if n == name) for name in self._of}
        for stream in self.streams:
            copies = [given[name] for name, other in self._of.items() if other is stream]
            assert all(copy == copies[0] for copy in copies), (where, stream.name)
            stream.take(copies[0], where)
        for number, changes in sink.batches.items():
            self.batches[number] = {s: {v for n, v in changes if self._of[n] is s} for s in self.streams}

    def forget_last(self) -> None:
        """Leaves its last micro-batch as if it had been killed before that was begun: only sources have noted it."""
        if len(self.batches) > 1:
            last = max(self.batches)
            for file in self.checkpoint.glob(f"[oc]*/*{last}*"):
                if file.name in (str(last), f".{last}.crc"):
                    file.unlink()
            for stream, values in self.batches.pop(last).items():
                stream.had -= values

    def stands(self, spark: Any) -> Checkpoint:
        return Checkpoint.read(spark, str(self.checkpoint), self.sources)


@contextlib.contextmanager
def log_settings(spark: Any, choice: random.Random) -> Iterator[None]:
    """A session whose logs are compacted and cleaned at other times, in one of the layouts."""
    settings = {
        "spark.sql.streaming.fileSource.log.compactInterval": choice.choice(["2", "3", "10"]),
        "spark.sql.streaming.fileSource.log.cleanupDelay": choice.choice(["0", "10m"]),
        "spark.sql.streaming.minBatchesToRetain": choice.choice(["2", "100"]),
        "spark.sql.streaming.offsetLog.formatVersion": choice.choice(["1", "2"]),
    }
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name in settings:
            spark.conf.unset(name)


FILES = ("json", "parquet", "ours")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(16))
def test_random_changes_of_random_queries_take_each_row_once(spark, tmp_path, seed):
    choice, folders = random.Random(seed), (tmp_path / f"source {number}" for number in range(99))

    def streams(most: int) -> list[Stream]:
        kinds = (*FILES, "rate", "rate-micro-batch")
        return [Stream(spark, next(folders), choice, kinds if n else FILES) for n in range(choice.randint(1, most))]

    with log_settings(spark, choice):
        old = Query(tmp_path / "query 0", streams(4), choice)
        for change in (1, 2, 3):
            for run in range(choice.randint(1, 2)):
                for stream in old.streams:
                    stream.add(*((1, 13) if run == 0 else ()))
                old.run(f"{seed}, before change {change}")
            if choice.random() < 0.4:
                old.forget_last()
            added, only_built = streams(2), streams(1)
            build = Query(tmp_path / f"build {change}", [*added, *only_built], choice)
            for stream in build.streams:
                stream.add(1, 2, 11)
            build.run(f"{seed}, build {change}")
            kept = choice.sample(old.streams, choice.randint(0, len(old.streams)))
            new = Query(tmp_path / f"query {change}", [*kept, *added], choice)
            before, built = old.stands(spark), build.stands(spark)
            parts = [
                (before, old.order.index(stream)) if stream in kept else (built, build.order.index(stream))
                for stream in new.order
            ]
            to, batch = str(new.checkpoint), built.version - 1
            write_checkpoint(spark, to, built.query_id, batch, parts, build=built, sources=new.sources)
            for stream in choice.sample(new.streams, choice.randint(0, len(new.streams))):
                stream.add()
            new.run(f"{seed}, after change {change}")
            assert min(new.batches, default=built.version) == built.version
            old = new
        for stream in old.streams:
            stream.add()
        old.run(f"{seed}, at the end")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["1", "2"])
def test_sources_with_names_go_on_by_name(spark, tmp_path, layout):
    """Spark 4.2 has a named source's files in a folder of that name, and offsets by name in the layout ``v2`` only."""
    if not hasattr(spark.readStream, "name"):
        pytest.skip("no names of sources before Spark 4.2")
    choice, of_session = random.Random(1), "spark.sql.streaming.queryEvolution.enableSourceEvolution"
    feeds = {name: Feed(tmp_path / name) for name in "abc"}
    spark.conf.set(of_session, "true")
    spark.conf.set("spark.sql.streaming.offsetLog.formatVersion", layout)

    def read(name: str, called: str) -> Any:
        return spark.readStream.name(called).schema(SCHEMA).json(str(tmp_path / name)).select(f.lit(name), "v")

    try:
        for feed in feeds.values():
            feed.add(1, choice.randint(1, 3))
        old, build = union(read("a", "first"), read("b", "second")), union(read("c", "first"))
        rows(old, tmp_path / "old")
        rows(build, tmp_path / "build")
        new = union(read("b", "b"), read("c", "first"), read("a", "second"))
        before, built = (
            Checkpoint.read(spark, str(tmp_path / name), sources_of(df))
            for name, df in (("old", old), ("build", build))
        )
        assert before.folders == ("first", "second")
        parts, sources = [(before, 1), (built, 0), (before, 0)], sources_of(new)
        write_checkpoint(
            spark, str(tmp_path / "new"), built.query_id, built.version - 1, parts, build=built, sources=sources
        )
        assert rows(new, tmp_path / "new") == []
        added = {name: feed.add(2) for name, feed in feeds.items()}
        assert rows(new, tmp_path / "new") == [(name, v) for name in "abc" for v in added[name]]
    finally:
        spark.conf.unset(of_session)
        spark.conf.unset("spark.sql.streaming.offsetLog.formatVersion")
