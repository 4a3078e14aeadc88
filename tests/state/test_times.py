"""What of event time is stored with a micro-batch, and read back without reading its rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_ops.state.durable import NO_TIMES, PartitionLog, Record, Times
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import Manifest
from state.support import make_join, wire_batches

TABLE = wire_batches(1, rows=50)[0]
MANIFEST = Manifest(make_join().to_json(), 2, "q")
TIMES = Times(-5, (7, None))


def test_the_later_of_each() -> None:
    other = Times(-9, (3, 4))
    assert TIMES.later(other) == other.later(TIMES) == Times(-5, (7, 4))
    assert NO_TIMES.later(TIMES) == TIMES
    one, two = Times({"a": 3, "b": None}, (1, 2, None)), Times({"a": 2, "b": 5}, (2, None, None))
    assert one.later(two) == two.later(one) == Times({"a": 3, "b": 5}, (2, 2, None))
    assert NO_TIMES.later(one) == one


@pytest.mark.parametrize("times", [TIMES, NO_TIMES, Times(0, (0, 0)), Times({"a": 3, "b": 5}, (1, None, 7))])
def test_times_come_back(tmp_path: Path, times: Times) -> None:
    log = PartitionLog(Files.at(str(tmp_path)), MANIFEST, 0)
    log.write_record(3, Record(TABLE, 11, "{}", times))
    log.write_snapshot(4, {"left": TABLE, "right": TABLE}, 11, times)
    assert log.read_record(3).times == log.record_times(3) == log.snapshot_times(4) == times
    assert log.record_times(4) is None
    assert log.snapshot_times(3) is None


def test_a_record_that_is_cut_short_has_none(tmp_path: Path) -> None:
    log = PartitionLog(Files.at(str(tmp_path)), MANIFEST, 0)
    log.write_record(0, Record(TABLE, 11, "{}", TIMES))
    (path,) = (tmp_path / "p" / "0").iterdir()
    content = path.read_bytes()
    for size in (0, 5, len(content) - 1):
        path.write_bytes(content[:size])
        assert log.record_times(0) is None
