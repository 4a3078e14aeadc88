"""Watermarks over all partitions, without Spark: when they advance, and that they are found again."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from gpu_ops.descriptions.by_time import IntervalJoin
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.interval import Interval
from gpu_ops.descriptions.join import Join
from gpu_ops.descriptions.keys import Key
from gpu_ops.errors import StateError
from gpu_ops.spark.driver.watermarks import Moment, Watermarks, operator_watermark
from gpu_ops.spark.wire.command import EventTimes
from gpu_ops.state.durable import PartitionLog, Record, Times
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import Manifest, ensure

SCHEMA = pa.schema([("k", pa.int64()), ("t", pa.timestamp("us", "UTC"))])
NOTHING = EventTimes((None, None), (False, False))


def make_join(*, idle: tuple[int | None, int | None] = (None, None), **interval: object) -> Join:
    left, right = (
        Input(name, SCHEMA, event_time="t", delay_ms=delay, idle_timeout_ms=timeout)
        for name, delay, timeout in (("l", 10, idle[0]), ("r", 20, idle[1]))
    )
    bounds = {"lower_ms": -5, "upper_ms": 30, **interval}
    return IntervalJoin(
        "full", left, right, (Key("k", "k", using=True),), suffixes=("", "_r"), interval=Interval(**bounds)
    )


def make(join: Join | None = None, state: Path | None = None, **options: object) -> Watermarks:
    join = join or make_join()
    return Watermarks(join, Manifest(join.to_json(), 2, "q"), None if state is None else str(state), **options)


def both(marks: Watermarks, batch: int, *reports: EventTimes) -> None:
    for partition, report in enumerate(reports):
        marks.report(batch, partition, report)


def test_the_minimum_of_inputs_and_the_maximum_of_partitions() -> None:
    marks = make()
    assert marks.begin(0, 1000) == Moment(None, 1000)
    both(marks, 0, EventTimes((100, None), (True, False)), NOTHING)
    assert marks.begin(1, 1001) == Moment(None, 1001)  # nothing of the right yet
    both(marks, 1, EventTimes((100, None), (False, False)), EventTimes((70, 300), (True, True)))
    assert marks.begin(2, 1002).watermark == 90
    assert marks.output_before(2) is None  # what batch 1 said, it said without a watermark
    both(marks, 2, EventTimes((500, 10), (True, True)), EventTimes((70, 300), (False, False)))
    assert marks.begin(3, 1003).watermark == 280
    assert marks.output_before(3) == 90 - 30


def test_asked_and_told_again_it_answers_alike() -> None:
    marks = make()
    marks.begin(0, 1000)
    for _ in range(2):
        both(marks, 0, EventTimes((100, 100), (True, True)), NOTHING)
        assert marks.begin(0, 5000) == Moment(None, 1000)
    assert marks.begin(1, 2000) == marks.begin(1, 9000) == Moment(80, 2000)
    both(marks, 0, EventTimes((10**6, 10**6), (True, True)))  # a task that nobody waits for
    assert marks.begin(0, 9000) == Moment(None, 1000)
    both(marks, 1, EventTimes((100, 100), (False, False)), NOTHING)
    assert marks.begin(2, 0) == Moment(80, 0)  # the watermark never goes back; the clock is what it is
    with pytest.raises(StateError, match="at batch 2, Spark asks for batch 0"):
        marks.begin(0, 9000)


def test_not_all_partitions_reported_is_refused_without_a_folder() -> None:
    marks = make()
    marks.begin(0, 1000)
    marks.report(0, 1, EventTimes((100, 100), (True, True)))
    with pytest.raises(StateError, match=r"state= was not given.*holds the watermark of batch 0; batch 1"):
        marks.begin(1, 1001)
    with pytest.raises(StateError, match=r"holds nothing; batch 4 does not follow"):
        make().begin(4, 1000)


def test_by_processing_time_there_is_only_a_clock() -> None:
    sides = (Input(name, SCHEMA) for name in "lr")
    join = IntervalJoin(
        "inner", *sides, (Key("k", "k"),), suffixes=("", "_r"), interval=Interval(-1, 1, time="processing")
    )
    marks = make(join)
    assert [marks.begin(batch, 1000 - batch) for batch in range(3)] == [Moment(None, 1000 - n) for n in range(3)]
    assert marks.begin(2, 5000) == Moment(None, 998)


def test_an_input_is_idle_after_its_timeout_also_where_the_clock_was_ahead_once() -> None:
    """Its rows came when the clock was an hour ahead: nobody waits an hour for it."""
    marks = make(make_join(idle=(None, 100)))
    for batch, clock in enumerate((1000, 1050, 3_601_100, 1150)):
        marks.begin(batch, clock)
        both(marks, batch, EventTimes((100 + batch, 100), (True, True)), NOTHING)
    for batch, clock in ((4, 1200), (5, 1240)):
        assert marks.begin(batch, clock).watermark == 91  # as it was when the clock was ahead: the right was idle then
        both(marks, batch, EventTimes((500, 100), (True, False)), NOTHING)
    assert marks.begin(6, 1260).watermark == 490


@pytest.mark.parametrize(
    ("own", "silent", "before", "expected"),
    [
        ((100, 50), (0, 0), None, 50),
        ((100, 50), (0, 99), 70, 70),  # not idle yet; never back
        ((100, 50), (0, 100), 70, 100),  # idle
        ((100, None), (0, 100), None, 100),  # idle from the start
        ((100, None), (0, 0), 7, 7),
        ((100, 150), (10**9, 0), None, 100),  # the left has no timeout
        ((None, 150), (10**9, 0), 3, 3),
    ],
)
def test_idle_inputs(own: tuple[int, int], silent: tuple[int, int], before: int | None, expected: int) -> None:
    assert operator_watermark(make_join(idle=(None, 100)), own, silent, before) == expected


def test_both_idle_leave_it_where_it_is() -> None:
    assert operator_watermark(make_join(idle=(100, 100)), (500, 600), (100, 200), 50) == 50


def test_an_idle_input_counts_again_when_it_has_rows() -> None:
    marks = make(make_join(idle=(None, 100)))
    marks.begin(0, 1000)
    both(marks, 0, EventTimes((500, None), (True, False)), NOTHING)
    assert marks.begin(1, 1099).watermark is None
    both(marks, 1, EventTimes((500, None), (True, False)), NOTHING)
    assert marks.begin(2, 1100).watermark == 490
    both(marks, 2, EventTimes((900, None), (True, False)), EventTimes((None, 530), (False, True)))
    assert marks.begin(3, 1101).watermark == 510
    both(marks, 3, EventTimes((900, None), (False, False)), EventTimes((None, 530), (False, False)))
    assert marks.begin(4, 1199).watermark == 510
    both(marks, 4, EventTimes((900, None), (False, False)), EventTimes((None, 530), (False, False)))
    assert marks.begin(5, 1200).watermark == 890


def test_an_input_fed_by_a_join_goes_by_that_joins_output() -> None:
    told: list[int | None] = [None, 33, 60]
    marks = make(upstream={"": (told.__getitem__, None)})
    for batch, expected in enumerate([None, 33, 40]):
        assert marks.begin(batch, 1000).watermark == expected
        both(marks, batch, EventTimes((10**6, 60), (True, True)), NOTHING)


def test_how_long_rows_are_kept() -> None:
    assert make_join().interval.kept_ms == (30, 5)
    assert make_join(lower_ms=10, upper_ms=40, min_cleanup_ms=7).interval.kept_ms == (47, 7)
    assert make_join(lower_ms=-90, upper_ms=-10).interval.keep_ms == 90


# --- found again in the state folder -------------------------------------------------------------


def store(folder: Path, batch: int, partition: int, times: Times, *, snapshot: bool = False) -> None:
    """What partition ``partition`` leaves after a micro-batch."""
    files = Files.at(str(folder))
    manifest = ensure(files, Manifest(make_join().to_json(), 2, "q"), create=True)
    assert manifest is not None
    log, rows = PartitionLog(files, manifest, partition), pa.table({"x": [1]})
    if snapshot:
        log.write_snapshot(batch + 1, {"left": rows}, 5, times)
    else:
        log.write_record(batch, Record(rows, 5, "{}", times))


def test_a_new_driver_goes_on_where_the_old_one_stopped(tmp_path: Path) -> None:
    assert make(state=tmp_path / "none").begin(0, 1000).watermark is None
    store(tmp_path, 6, 0, Times(40, (100, 60)))
    store(tmp_path, 6, 1, Times(40, (90, 300)), snapshot=True)
    marks = make(state=tmp_path)
    assert marks.begin(7, 1000).watermark == 90
    assert marks.output_before(7) == 10
    # nobody has reported, but the records say it
    store(tmp_path, 7, 0, Times(90, (150, 60)))
    store(tmp_path, 7, 1, Times(90, (90, 300)))
    assert marks.begin(8, 1000).watermark == 140


def test_a_batch_that_some_partition_did_has_the_same_watermark(tmp_path: Path) -> None:
    for partition in (0, 1):
        store(tmp_path, 6, partition, Times(40, (100, 200)))
    store(tmp_path, 7, 1, Times(55, (10**6, 10**6)))  # as an idle input had made it
    assert make(state=tmp_path).begin(7, 1000).watermark == 55
    store(tmp_path, 7, 1, Times(None, (10**6, 10**6)))
    assert make(state=tmp_path).begin(7, 1000).watermark is None


def test_the_watermark_never_goes_back_over_a_restart(tmp_path: Path) -> None:
    for partition in (0, 1):
        store(tmp_path, 6, partition, Times(400, (100, 200)))
    assert make(state=tmp_path).begin(7, 1000).watermark == 400


def test_folders_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="nothing is stored in"):
        make(state=tmp_path / "none").begin(3, 1000)
    store(tmp_path, 6, 0, Times(), snapshot=True)
    with pytest.raises(StateError, match="partition 1 of 2: nothing is stored"):
        make(state=tmp_path).begin(7, 1000)
    store(tmp_path, 6, 1, Times(), snapshot=True)
    with pytest.raises(StateError, match=r"ends with batch 6, Spark asks for batch 9"):
        make(state=tmp_path).begin(9, 1000)
    with pytest.raises(StateError, match=r"is at batch 6, Spark asks for batch 2.*older than the state"):
        make(state=tmp_path).begin(2, 1000)
    with pytest.raises(StateError, match="belongs to another join"):
        make(make_join(idle=(5, None)), tmp_path).begin(7, 1000)
