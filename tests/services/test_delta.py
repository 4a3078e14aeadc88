"""A view in a real Delta table beside another writer."""

from __future__ import annotations

import functools
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError

from gpu_ops import sinks
from gpu_ops.errors import DescriptionError
from gpu_ops.spark.sinks import delta

pytestmark = [pytest.mark.spark, pytest.mark.services]


def changelog(spark: Any, *rows: tuple[Any, ...], schema: str = "id LONG, item STRING") -> Any:
    return spark.createDataFrame(list(rows), f"row_kind STRING, {schema}")


@pytest.mark.parametrize("key", ["id", None])
def test_a_view_is_right_beside_another_writer(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: Any
) -> None:
    """It ended at ConcurrentAppendException. Both writers read the whole table, so that each is in the other's way."""
    path, choice, done = str(tmp_path / "table"), random.Random(3), threading.Event()
    view, other = sinks.delta_view(path, key), spark.newSession()
    view(changelog(spark, ("+I", 0, "a")), 0)
    count, seen, added = "" if key else ", 1L gpu_ops_count", [], 0

    def beside() -> None:
        nonlocal added
        while not done.is_set() and not seen:
            rows = f"SELECT {100 + added}L id, 'other' item{count}"
            try:
                other.sql(
                    f"MERGE INTO delta.`{path}` t USING ({rows}) s ON t.id = s.id "
                    "WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *"
                )
                added += 1
            except Exception as error:
                if not was_between(error):
                    raise
            done.wait(choice.random() * 2)

    was_between = delta._came_between
    monkeypatch.setattr(delta, "_came_between", lambda error: seen.append(error) or was_between(error))
    writer = threading.Thread(target=beside)
    writer.start()
    number = 0
    try:
        while number < 3 or (not seen and number < 12):
            number += 1
            view(changelog(spark, ("-D", number - 1, "a"), ("+I", number, "a")), number)
    finally:
        done.set()
        writer.join()
    rows = [tuple(row) for row in spark.read.format("delta").load(path).select("id", "item").collect()]
    assert sorted(rows) == [(number, "a"), *((100 + n, "other") for n in range(added))]
    assert seen


@pytest.mark.parametrize(
    "name", ["ConcurrentAppendException", "ConcurrentDeleteReadException", "ConcurrentTransactionException",
             "ConcurrentWriteException", "MetadataChangedException", "ProtocolChangedException"],
)  # fmt: skip
def test_what_another_writer_may_cause_is_repeated(spark: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Nine times; the tenth such error of Delta's is the query's, and any other one is at once."""
    monkeypatch.setattr(delta, "_PAUSE_S", 0.0)
    jvm = spark.sparkContext._jvm
    made = getattr(jvm.io.delta.exceptions, name)
    tried = 0

    def failing(fails: int, thrown: Any) -> None:
        nonlocal tried
        tried += 1
        if tried <= fails:
            raise Py4JJavaError("in between", thrown)

    for fails, thrown, times in ((9, made("x"), 10), (2, jvm.java.lang.RuntimeException("x", made("x")), 3)):
        tried = 0
        delta.repeated(functools.partial(failing, fails, thrown))
        assert tried == times
    for thrown, times in ((made("x"), 10), (jvm.java.lang.IllegalStateException("x"), 1)):
        tried = 0
        with pytest.raises(Py4JJavaError):
            delta.repeated(functools.partial(failing, 99, thrown))
        assert tried == times


def test_columns_that_delta_does_not_take_are_refused(spark: Any, tmp_path: Path) -> None:
    path = tmp_path / "table"
    with pytest.raises(DescriptionError, match=r"(?s)cannot be made: .*a b"):
        sinks.delta_view(str(path), "id")(changelog(spark, ("+I", 1, "x"), schema="id LONG, `a b` STRING"), 0)
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        with pytest.raises(DescriptionError, match="differ by more than upper case: s, S"):
            sinks.delta_view(str(path), "s")(changelog(spark, ("+I", 1, "x"), schema="s LONG, S STRING"), 0)
    finally:
        spark.conf.unset("spark.sql.caseSensitive")
    assert not (path / "_delta_log").exists()
    sinks.delta_view(str(path), "k.`1")(changelog(spark, ("+I", 1, "x"), schema='`k.``1` LONG, `%"S` STRING'), 0)
    assert [tuple(row) for row in spark.read.format("delta").load(str(path)).collect()] == [(1, "x")]
