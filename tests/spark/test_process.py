"""Functions of pairs, `interval_join(process=)`: their life, their side outputs, late rows beside them, and errors."""

from __future__ import annotations

import datetime as dt
import uuid
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import types as st

import gpu_ops
from gpu_ops.spark.tasks.functions import ProcessPairs
from spark.support import Sink, Source, drain
from spark.test_interval import joined, metrics, order, shipment

pytestmark = [pytest.mark.spark, pytest.mark.thorough]


@pytest.fixture
def orders(spark: Any, tmp_path: Path) -> Source:
    return Source(spark, tmp_path / "orders", "k long, t timestamp, a string")


@pytest.fixture
def shipments(spark: Any, tmp_path: Path) -> Source:
    return Source(spark, tmp_path / "shipments", "k long, u timestamp, b string")


def test_process_is_given_pairs_and_their_times(orders: Source, shipments: Source, tmp_path: Path) -> None:
    def gaps(batch: pa.RecordBatch) -> pa.RecordBatch:
        gap = pc.subtract(batch["right_timestamp"].cast(pa.int64()), batch["left_timestamp"].cast(pa.int64()))
        return pa.RecordBatch.from_pydict({"at": batch["timestamp"], "gap_ms": pc.divide(gap, 1000), "k": batch["k"]})

    orders.add(order(1, 10), order(2, 20), order(3, 0))
    shipments.add(shipment(1, 12.5), shipment(2, 19), shipment(4, 0))
    pairs = joined(orders, shipments, how="inner", process=gaps, process_schema="k bigint, gap_ms bigint, at timestamp")
    sink = Sink()
    drain(pairs, sink, tmp_path / "checkpoint")
    moment = dt.datetime(2026, 1, 1)
    assert sorted(sink.batches[0]) == [
        (1, 2500, moment + dt.timedelta(seconds=12.5)),
        (2, -1000, moment + dt.timedelta(seconds=20)),
    ]


def gaps_of(marks: Path) -> Any:
    """A function whose class travels with it, as one of a notebook."""

    class Gaps:
        """Gives the gap of near pairs, and far pairs to a side output; notes when it is opened and closed."""

        def __init__(self, folder: Path) -> None:
            self.folder, self.life = folder, ""

        def mark(self, what: str) -> None:
            (self.folder / f"{self.life}-{what}").touch(exist_ok=False)

        def open(self) -> None:
            self.life = uuid.uuid4().hex
            self.mark("open")

        def __call__(self, pairs: pa.RecordBatch) -> Any:
            assert self.life
            gap = pc.abs(pc.subtract(pairs["right_timestamp"].cast("int64"), pairs["left_timestamp"].cast("int64")))
            ms = pc.cast(pc.divide(gap, 1000), pa.int32())
            if 7 in pairs["k"].to_pylist():
                raise ValueError("seven")
            near = pc.less(ms, 2000)
            both = pa.record_batch({"ms": ms, "k": pairs["k"]})
            far = both.filter(pc.invert(near))
            return both.filter(near), {
                "far": pa.record_batch({"pair": far["k"], "at": pairs["timestamp"].filter(pc.invert(near))})
            }

        def close(self) -> None:
            self.mark("close")

    return Gaps(marks)


@pytest.mark.slow
def test_a_rich_function_beside_late_rows(orders: Source, shipments: Source, tmp_path: Path) -> None:
    """Its side output and the late rows are apart; each copy that was opened is closed, also where it has failed."""
    marks = tmp_path / "marks"
    marks.mkdir()
    orders.add(order(1, 0), order(2, 50), order(3, 50))
    shipments.add(shipment(1, 1), shipment(2, 54), shipment(3, 49, "near"))
    orders.add(order(1, 8, "too late"), order(3, 60))
    shipments.add(shipment(3, 7, "late, too"))
    given = {"process": gaps_of(marks), "process_schema": "k bigint, ms bigint"}
    given["side_outputs"] = {"far": "at timestamp not null, pair bigint"}
    pairs = joined(orders, shipments, how="inner", late="tag", **given)
    assert pairs.columns == ["row_kind", "k", "ms", "far", "left_late", "right_late"]
    found: dict[str, list[Any]] = {"rows": [], "far": [], "left_late": [], "right_late": [], "late": []}

    def sink(df: Any, batch: int) -> None:
        df.persist()
        found["rows"] += [tuple(r) for r in df.where("row_kind = '+I'").select("k", "ms").collect()]
        for name in ("far", "left_late", "right_late"):
            found[name] += [(batch, *r) for r in gpu_ops.side(df, name).collect()]
        found["late"] += gpu_ops.late(df, "left").collect()
        assert df.where("row_kind = 'far'").count() == gpu_ops.side(df, "far").count()
        df.unpersist()

    def time_of(second: int) -> dt.datetime:
        return dt.datetime(2026, 1, 1) + dt.timedelta(seconds=second)

    query = drain(pairs, sink, tmp_path / "checkpoint")
    assert sorted(found["rows"]) == [(1, 1000), (3, 1000)]
    assert found["far"] == [(0, time_of(54), 2)]
    assert found["left_late"] == [(1, 1, time_of(8), "too late")]
    assert found["right_late"] == [(1, 3, time_of(7), "late, too")]
    assert [tuple(r) for r in found["late"]] == [r[1:] for r in found["left_late"]]
    assert metrics(query)[1]["left_late"] == 1
    assert gpu_ops.side(pairs, "left_late").columns == ["k", "t", "a"]
    with pytest.raises(gpu_ops.DescriptionError, match="no side output 'near'; there are far, left_late, right_late"):
        gpu_ops.side(pairs, "near")
    with pytest.raises(gpu_ops.DescriptionError, match=r"side\(\) takes the changelog of an interval"):
        gpu_ops.side(orders.df, "far")
    lives = sorted(path.name.split("-")[1] for path in marks.iterdir())
    assert lives == ["close"] * (len(lives) // 2) + ["open"] * (len(lives) // 2)
    assert lives
    # a failure is the query's, and the copy is closed
    orders.add(order(7, 70))
    shipments.add(shipment(7, 70))
    with pytest.raises(Exception, match="seven"):
        drain(pairs, sink, tmp_path / "checkpoint")
    assert len(list(marks.glob("*-open"))) == len(list(marks.glob("*-close"))) > len(lives) // 2


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda rows: rows.to_pydict(), "gives a record batch, not dict"),
        (lambda rows: (rows.select(["k"]), [rows]), "as a dict by name, not list"),
        (
            lambda rows: (rows.select(["k"]), {"fra": rows}),
            "gives a side output 'fra'; side_outputs= says there are far",
        ),
        (
            lambda rows: (rows.select(["k"]), {"far": rows}),
            "side output 'far', gives the columns k, t, a; its schema says k",
        ),
        (lambda rows: rows.select(["a"]).rename_columns(["k"]), "gives column 'k' as string; its schema says int64"),
    ],
)
def test_what_a_function_gives_is_checked(made: Any, message: str) -> None:
    row = pa.record_batch({"k": [1], "t": [2], "a": ["x"]})
    k = st.StructType([st.StructField("k", st.LongType())])
    with pytest.raises(gpu_ops.DescriptionError, match=message):
        list(ProcessPairs(made, k, {"far": k}, {})(iter([row])))
