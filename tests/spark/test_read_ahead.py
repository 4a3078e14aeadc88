"""Files that are read before Spark asks for them: the rows are as without that, whatever happens. Needs no Spark."""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from gpu_ops.descriptions.projection import Projection
from gpu_ops.errors import BadInputError
from gpu_ops.files.formats import FileFormat
from gpu_ops.spark.sources.files import _files_per_batch
from gpu_ops.spark.tasks import packing, read_ahead
from gpu_ops.spark.tasks.arrow import TaskIdentity
from gpu_ops.spark.tasks.packing import FileRows, Pack, Packer, PackForSeveral
from gpu_ops.spark.wire.arrivals import Message
from gpu_ops.state.blocks import Blocks, Mapped

SCHEMA = pa.schema([("k", pa.int64()), ("n", pa.int64())])
OTHER_RUN, RUN = "b0a1c6d2-2c12-4ddf-94e6-9f1ea2a2821a", "a7e7ec62-2c12-4ddf-94e6-9f1ea2a2821a"
FORMAT = FileFormat("csv", SCHEMA)


class Source:
    """A folder of files, and the tasks that pack them, micro-batch by micro-batch."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files, self.blocks = folder / "files", folder / "blocks"
        self.files.mkdir()
        self.blocks.mkdir(mode=0o700)
        self.run, self.batch, self.threads, self.read = RUN, -1, list[threading.Thread](), list[str]()
        monkeypatch.setattr(read_ahead, "_PAUSE", 0)
        monkeypatch.setattr(read_ahead, "_next_files", read_ahead.NextFiles())
        read_ahead._guesses.clear()
        monkeypatch.setattr(packing, "streaming_task", lambda: TaskIdentity("6f1c", self.run, self.batch, 0, 1))
        monkeypatch.setattr(threading, "Timer", self._timer)
        original, main = FileFormat.read, threading.main_thread()

        def read(one: FileFormat, uri: str, *rest: Any) -> Iterator[pa.RecordBatch]:
            if threading.current_thread() is main:
                self.read.append(os.path.basename(uri))
            return original(one, uri, *rest)

        monkeypatch.setattr(FileFormat, "read", read)

    def _timer(self, *what: Any) -> threading.Thread:
        self.threads.append(threading.Thread(target=what[1], args=what[2]))
        return self.threads[-1]

    def wait(self) -> None:
        for thread in self.threads:
            thread.join(30)
        self.threads.clear()

    def write(self, name: str, rows: list[tuple[int, int]], time: int) -> tuple[str, int]:
        """Writes a file whose modification time is so many seconds; gives it as Spark lists it."""
        path = self.files / name
        path.write_text("".join(f"{k},{n}\n" for k, n in rows))
        os.utime(path, (time, time))
        return f"file:{path}", time * 1_000_000

    def pack(self, inputs: int = 1, per_batch: int = 1, partitions: int = 2) -> Pack | PackForSeveral:
        made = []
        for number in range(inputs):
            routes = tuple(range(partitions))
            blocks = Blocks(str(self.blocks), 64)
            packer = Packer(f"in{number}", "join", number, SCHEMA, (("k", pa.int64()),), routes, 100, blocks=blocks)
            rows = FileRows(FORMAT, f"in{number}", Projection.all(SCHEMA), SCHEMA, per_batch=per_batch)
            made.append(Pack(packer, rows, Projection.all(SCHEMA)))
        return made[0] if inputs == 1 else PackForSeveral(made)

    def task(self, function: Pack | PackForSeveral, files: list[tuple[str, int]]) -> list[Any]:
        """The rows that one task gives, with the input, partition, time, file and number of each."""
        listed = pa.record_batch([*map(pa.array, zip(*files, strict=True))], names=["path", "time"])
        found = list[Any]()
        content = Mapped(str(self.blocks))
        for batch in list(function.run(iter([listed]))):
            for row in batch.to_pylist():
                about = Message.of(row["about"])
                message = content.message(about.block) if about.block.file else pa.py_buffer(row["rows"])
                rows = pa.ipc.read_record_batch(message, SCHEMA).to_pylist()
                key = (about.input, about.target, about.time, os.path.basename(about.source), about.number)
                found += [(key, at, *one.values()) for at, one in enumerate(rows)]
        return sorted(found)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Source]:
    made = Source(tmp_path, monkeypatch)
    yield made
    made.wait()


def expected(source: Source, inputs: int, files: list[tuple[str, int]]) -> list[Any]:
    """The rows without reading ahead."""
    source.run = OTHER_RUN
    found = source.task(source.pack(inputs, per_batch=0), files)
    source.run = RUN
    return found


@pytest.mark.parametrize("inputs", [1, 3])
@pytest.mark.parametrize("per_batch", [1, 2, 5])
def test_the_same_rows_as_without_it(source: Source, inputs: int, per_batch: int) -> None:
    rng = np.random.default_rng(inputs * 10 + per_batch)
    files = []
    for time in range(1000, 1020):
        rows = [(int(k), n) for n, k in enumerate(rng.integers(0, 9, rng.integers(0, 60)))]
        files.append(source.write(f"{rng.integers(1 << 30)}.csv", rows, time))
    (source.files / "_SUCCESS").write_text("")
    (source.files / ".part").write_text("not,a,file")
    taken = 0
    for source.batch, start in enumerate(range(0, len(files), per_batch)):
        some = files[start : start + per_batch]
        tasks = [some[:1], some[1:]] if per_batch > 1 else [some]  # in Spark a task has one file or more
        tasks = [task for task in tasks if task]
        wanted = [expected(source, inputs, task) for task in tasks]
        source.read.clear()
        assert [source.task(source.pack(inputs, per_batch), task) for task in tasks] == wanted
        taken += not source.read
        source.wait()
        assert bool(source.read) == (source.batch == 0)  # behind the first all have been read
        folders = sorted(int(one.name) for one in (source.blocks / RUN).iterdir())
        assert folders[0] >= source.batch - 1
        assert folders[-1] <= source.batch + 1
    assert taken == source.batch


def test_files_that_change_are_read_anew(source: Source) -> None:
    first = source.write("a", [(1, 1)], 1)
    source.write("b", [(2, 2)], 2)
    source.batch = 0
    source.task(source.pack(), [first])
    source.wait()
    source.batch = 1
    # as Spark has listed it before it was written over
    later = ("file:" + str(source.files / "b"), 2_000_000)
    source.write("b", [(3, 3)], 3)
    assert [row[2:] for row in source.task(source.pack(), [later])] == [(3, 3)]
    assert source.read[-1] == "b"
    source.wait()
    # nothing was left for the time that it has now
    source.batch = 2
    assert [row[2:] for row in source.task(source.pack(), [(later[0], 3_000_000)])] == [(3, 3)]


def test_of_a_wrong_file_the_one_who_asks_is_told(source: Source) -> None:
    first = source.write("a", [(1, 1)], 1)
    wrong = source.write("b", [(2, 2)], 2)
    (source.files / "b").write_text("2,no\n")
    os.utime(source.files / "b", (2, 2))
    source.batch = 0
    source.task(source.pack(), [first])
    source.wait()
    source.batch = 1
    with pytest.raises(BadInputError, match="'no'"):
        source.task(source.pack(), [wrong])


def test_a_task_waits_for_the_file_that_is_being_read(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (source.write(name, [(time, time)], time) for time, name in enumerate("ab", 1))
    begun, go_on = threading.Event(), threading.Event()
    original: Callable[..., None] = read_ahead._leave

    def slowly(*what: Any) -> None:
        def waits(*files: Any) -> Iterator[pa.RecordBatch]:
            begun.set()
            assert go_on.wait(30)
            yield from what[-1](*files)

        original(*what[:-1], waits)

    monkeypatch.setattr(read_ahead, "_leave", slowly)
    source.batch = 0
    source.task(source.pack(), [first])
    assert begun.wait(30)
    source.batch = 1
    source.read.clear()

    def goes_on() -> None:
        go_on.wait(0.2)
        go_on.set()

    later = threading.Thread(target=goes_on)
    later.start()
    assert [row[2:] for row in source.task(source.pack(), [second])] == [(2, 2)]
    assert not source.read
    later.join(30)


def test_what_a_worker_has_not_finished_is_read_anew(source: Source) -> None:
    first, second = (source.write(name, [(n, time) for n in range(99)], time) for time, name in enumerate("ab", 1))
    source.batch = 0
    source.task(source.pack(), [first])
    source.wait()
    (left,) = (source.blocks / RUN / "1").glob("ahead-*")
    whole = left.read_bytes()
    use = left.parent, "join.0", second
    assert read_ahead._taken(*use) is not None
    for size in range(len(whole)):
        left.write_bytes(whole[:size])
        assert read_ahead._taken(*use) is None
    source.batch = 1
    source.read.clear()
    assert len(source.task(source.pack(), [second])) == 99
    assert source.read == ["b"]
    left.write_bytes(whole)
    (source.files / "b").unlink()
    assert read_ahead._taken(*use) is None


def test_a_micro_batch_that_is_computed_again_reads_ahead_once(source: Source) -> None:
    files = [source.write(name, [(time, time)], time) for time, name in enumerate("abc", 1)]
    source.batch = 0
    source.task(source.pack(), files[:1])
    source.wait()
    for source.batch in (0, 1, 1):
        there = sorted(source.blocks.glob("*/*/*"))
        source.read.clear()
        source.task(source.pack(), files[source.batch : source.batch + 1])
        source.wait()
        assert source.read == [] if source.batch else ["a"]
    assert sorted(one for one in source.blocks.glob("*/*/ahead-*")) == [one for one in there if "ahead-" in one.name]


def test_guesses_that_nobody_asks_for_end(source: Source) -> None:
    files = [source.write(f"{time:02}", [(time, time)], time) for time in range(40)]
    for source.batch, file in enumerate(files[::2]):  # as from a source that leaves out some
        source.task(source.pack(), [file])
        source.wait()
        if source.batch == 7:
            assert len(list((source.blocks / RUN).glob("*/ahead-*"))) == 2
    assert not list((source.blocks / RUN).glob("*/ahead-*"))
    assert next(iter(read_ahead._guesses.values())).missed == read_ahead._MOST_MISSED


def test_a_run_that_is_over_leaves_nothing(source: Source, caplog: pytest.LogCaptureFixture) -> None:
    first, _ = (source.write(name, [(time, time)] * 100, time) for time, name in enumerate("ab", 1))
    source.batch = 0
    function = source.pack()
    original, has_ended = read_ahead._leave, threading.Event()

    def over(*what: Any) -> None:
        assert has_ended.wait(30)
        shutil.rmtree(source.blocks / RUN)
        original(*what)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read_ahead, "_leave", over)
        source.task(function, [first])
        has_ended.set()
        source.wait()
    assert not (source.blocks / RUN).exists()
    assert not caplog.records


def test_what_is_left_for_the_next_micro_batch(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is whole, or nothing: of two files and two inputs all four."""
    monkeypatch.setattr(read_ahead, "_MOST_S", 0.05)
    files = [source.write(name, [(time, time)] * 9, time) for time, name in enumerate("abcd", 1)]
    source.batch, came, later = 0, list[Message](), source.blocks / RUN / "1"
    for file in files[:2]:
        listed = pa.record_batch([[file[0]], [file[1]]], names=["path", "time"])
        packed = list(source.pack(2, per_batch=2).run(iter([listed])))
        messages = [Message.of(text) for batch in packed for text in batch["about"].to_pylist()]
        came += [one for one in messages if one.source]  # a partition without rows gets one without
    source.wait()
    for one in later.glob("ahead-*"):
        whole = one.read_bytes()
        for cut in (whole[:-1], b""):
            one.write_bytes(cut)
            assert read_ahead.left_for_next(later, came) is None
        one.write_bytes(whole)
    left = read_ahead.left_for_next(later, came)
    assert left is not None
    found = [Message.of(text) for batch in left for text in batch["about"].to_pylist()]
    assert {(one.input, os.path.basename(one.source)) for one in found if one.source} == {
        (0, "c"), (0, "d"), (1, "c"), (1, "d"),
    }  # fmt: skip
    others = [one._replace(source="other") for one in came]
    assert read_ahead.left_for_next(later, others) is None
    monkeypatch.setattr(read_ahead, "_MOST_S", 999)
    removed = threading.Timer(0.1, shutil.rmtree, [source.blocks / RUN / "0"])
    removed.start()
    assert read_ahead.left_for_next(later, others) is None
    removed.join(30)


def test_the_files_behind_others(tmp_path: Path) -> None:
    for time, name in ((2, "b"), (2, "a"), (1, "z"), (5, "y")):
        (tmp_path / name).write_text(name)
        os.utime(tmp_path / name, (time, time))
    found = read_ahead.NextFiles()
    order = [str(tmp_path / name) for name in "zaby"]
    for place, path in enumerate(order):
        for count in range(1, 5):
            wanted = order[place + count] if place + count < 4 else None
            assert (found.behind(path, count) or (None,))[0] == wanted
    (tmp_path / "x").write_text("")
    os.utime(tmp_path / "x", (9, 9))
    found = read_ahead.NextFiles()
    assert (found.behind(order[3], 1) or (None,))[0] == str(tmp_path / "x")
    (tmp_path / "x").unlink()
    with pytest.raises(FileNotFoundError):
        found.behind(order[3], 1)


@pytest.mark.parametrize(
    ("path", "options", "count"),
    [
        ("/data", {"maxFilesPerTrigger": "3"}, 3),
        ("/data", {}, 0),
        ("/data/*.csv", {"maxFilesPerTrigger": "3"}, 0),
        ("/data", {"maxFilesPerTrigger": "3", "latestFirst": "true"}, 0),
        ("/data", {"maxFilesPerTrigger": "3", "latestFirst": "false", "header": "true"}, 3),
        ("/data", {"maxFilesPerTrigger": "3", "pathGlobFilter": "*.csv"}, 0),
        ("/data", {"maxBytesPerTrigger": "3"}, 0),
        ("/data", {"maxFilesPerTrigger": "many"}, 0),
    ],
)
def test_of_which_sources(path: str, options: dict[str, str], count: int) -> None:
    assert _files_per_batch(path, options) == count


def test_locks_hold_between_openings(tmp_path: Path) -> None:
    """What `packed_ahead` goes by: a lock is that of an opened file, so threads of one process wait, too."""
    path = tmp_path / "lock"
    with open(path, "xb") as one, open(path, "rb") as other:
        fcntl.flock(one, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
