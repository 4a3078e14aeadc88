"""What a task does besides its work: Spark's connection is acknowledged at once, refusals come without a traceback."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from gpu_ops.errors import DescriptionError
from gpu_ops.spark.tasks import arrow


@pytest.mark.skipif(sys.platform != "linux", reason="TCP_QUICKACK is Linux's")
def test_the_connection_to_spark_is_found_once_in_a_worker(spark: Any) -> None:
    class Look(arrow.ArrowTask):
        def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            rows = sum(batch.num_rows for batch in batches)
            found = arrow._of_spark()
            assert found is arrow._of_spark()
            at_once = [one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for one in found]
            ours = [one.getsockname()[0] == one.getpeername()[0] for one in found]
            yield pa.RecordBatch.from_arrays([pa.array([rows]), pa.array([str((at_once, ours))])], ["rows", "found"])

    tasks = spark.range(6).repartition(2).mapInArrow(Look(), "rows long, found string").collect()
    assert sum(task.rows for task in tasks) == 6
    assert [task.found for task in tasks] == ["([1], [True])"] * 2


def test_a_process_that_is_no_worker_keeps_its_connections() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    with listening, socket.create_connection(listening.getsockname()):
        arrow._of_spark.cache_clear()
        arrow.acknowledge()
        assert arrow._of_spark() == ()


def test_a_refusal_has_no_traceback(spark: Any) -> None:
    class Refuse(arrow.ArrowTask):
        def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            yield from batches
            raise DescriptionError("not this one")

    with pytest.raises(Exception, match="not this one") as caught:
        spark.range(1).mapInArrow(Refuse(), "id long").collect()
    assert "Traceback" not in str(caught.value).split("not this one")[0]
