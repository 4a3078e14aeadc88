"""The ranges of offsets of Kafka's topics as a stream: Spark remembers which are done, tasks fetch their messages.

A data source in Python, of Spark 4.2 on. Offsets have the form that Spark's own reader of Kafka gives them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as st
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from gpu_ops.errors import DescriptionError
from gpu_ops.messages.client import (
    EARLIEST,
    LATEST,
    Configuration,
    KafkaError,
    Offsets,
    Range,
    divided,
    limited,
    offsets,
    partitions,
)

COLUMNS: Final = st.StructType(
    [
        st.StructField("topic", st.StringType(), False), st.StructField("partition", st.IntegerType(), False),
        st.StructField("begin", st.LongType(), False), st.StructField("end", st.LongType(), False),
    ]
)  # fmt: skip

_NUMBERS: Final = ("maxOffsetsPerTrigger", "minPartitions")
OPTIONS: Final = ("startingOffsets", *_NUMBERS, "failOnDataLoss", "subscribePattern")
"""Of Spark's reader of Kafka, as far as they mean something here."""


def ranges(
    spark: SparkSession, topics: str | None, config: Configuration, options: Mapping[str, str], *, lost: bool
) -> DataFrame:
    """A stream of ranges, a row each.

    Args:
        spark: the session.
        topics: their names with commas between; None with the option ``subscribePattern``.
        config: of a consumer.
        options: `OPTIONS`.
        lost: whether messages may be gone before they were read.

    Raises:
        DescriptionError: an option that means nothing.
    """
    starting: Any = options.get("startingOffsets", "latest")
    if starting not in ("earliest", "latest"):
        try:
            starting = {topic: dict(places) for topic, places in json.loads(starting).items()}
        except (ValueError, AttributeError, TypeError):
            raise DescriptionError(
                f"startingOffsets={starting!r}; it is 'earliest', 'latest' or JSON: "
                '{"topic":{"0":23,"1":-2}}, where -2 is the earliest offset and -1 the latest'
            ) from None
    numbers = {name: options[name] for name in _NUMBERS if name in options}
    wrong = next((name for name, value in numbers.items() if not (value.isdecimal() and int(value))), None)
    if wrong is not None:
        raise DescriptionError(f"{wrong}={numbers[wrong]!r} is no number above 0")
    most, tasks = (int(numbers[name]) if name in numbers else None for name in _NUMBERS)
    pattern = options.get("subscribePattern")
    given = {
        "topics": None if topics is None else [topic.strip() for topic in topics.split(",")],
        "pattern": pattern, "config": config, "starting": starting, "most": most, "tasks": tasks,
        "lost": lost,
    }  # fmt: skip
    spark.dataSource.register(KafkaRanges)
    return spark.readStream.format(KafkaRanges.name()).option("given", json.dumps(given)).load()


class KafkaRanges(DataSource):
    """See the module."""

    @classmethod
    def name(cls) -> str:
        """How Spark calls it."""
        return "gpu_ops_kafka_ranges"

    def schema(self) -> st.StructType:
        """`COLUMNS`."""
        return COLUMNS

    def streamReader(self, schema: st.StructType) -> Planner:
        """What plans micro-batches."""
        return Planner(json.loads(self.options["given"]))


class Planner(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Says which offsets there are, in a process of its own beside the driver.

    Args:
        given: what `ranges` has made of its arguments.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = given
        self._config: Configuration = tuple((name, value) for name, value in given["config"])
        self._target: Offsets | None = None
        self._latest: Offsets | None = None

    def initialOffset(self) -> Offsets:
        """Where a new query begins."""
        starting = self._given["starting"]
        if isinstance(starting, str):
            return self._all(EARLIEST if starting == "earliest" else LATEST)
        known = {(topic, number) for topic, numbers in self._partitions().items() for number in numbers}
        named = {(topic, number) for topic, numbers in starting.items() for number in numbers}
        if known != named:
            odd = sorted(f"{topic} {number}" for topic, number in known ^ named)
            raise DescriptionError(
                f"startingOffsets names each partition of the topics and no other; this is not so of {', '.join(odd)}"
            )
        asked = [(topic, number, at) for topic, number in sorted(named) if (at := starting[topic][number]) < 0]
        found = self._asked(asked)
        return {
            topic: {number: at if at >= 0 else found[topic][number] for number, at in numbers.items()}
            for topic, numbers in starting.items()
        }

    def latestOffset(self, start: Offsets, limit: ReadLimit) -> Offsets:
        """Where the next micro-batch ends."""
        ends = self._latest = self._all(LATEST) if self._target is None else self._target
        begins = self._begins(start, ends)
        self._check(start, begins, ends)
        if not isinstance(limit, ReadMaxRows):
            return _never_back(begins, ends)
        return limited(begins, _never_back(begins, ends), limit.max_rows)

    def getDefaultReadLimit(self) -> ReadLimit:
        """``maxOffsetsPerTrigger``."""
        most = self._given["most"]
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def reportLatestOffset(self) -> Offsets | None:
        """For Spark's progress."""
        return self._latest

    def prepareForTriggerAvailableNow(self) -> None:
        """What comes later is for the next run."""
        self._target = self._all(LATEST)

    def partitions(self, start: Offsets, end: Offsets) -> Sequence[InputPartition]:
        """A range of each partition of a topic that has messages, or several, one behind the other."""
        begins = self._begins(start, end)
        whole = [
            Range(topic, int(number), begins[topic][number], at)
            for topic, numbers in end.items()
            for number, at in numbers.items()
            if begins[topic][number] < at
        ]
        return [InputPartition(tuple(part)) for part in divided(whole, self._given["tasks"] or 0)]

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        """The range itself, as a row."""
        yield partition.value

    def _begins(self, start: Offsets, ends: Offsets) -> Offsets:
        """Where each partition begins: those that are new at their earliest offset."""
        new = [
            (topic, number, EARLIEST)
            for topic, there in ends.items()
            for number in there
            if number not in start.get(topic, {})
        ]
        earliest = self._asked(new)
        return {
            topic: {
                number: start.get(topic, {}).get(number, earliest.get(topic, {}).get(number, 0)) for number in there
            }
            for topic, there in ends.items()
        }

    def _check(self, start: Offsets, begins: Offsets, ends: Offsets) -> None:
        """Refuses to go on where a topic has fewer messages than were read already, or is gone."""
        if self._given["lost"]:
            return
        gone = next(((t, n) for t, there in start.items() for n in there if n not in ends.get(t, {})), None)
        if gone is not None:
            raise KafkaError(
                f"topic {gone[0]}, partition {gone[1]}: it is not there any more, and messages from offset "
                f"{start[gone[0]][gone[1]]} on may not have been read. With the option failOnDataLoss=false the query "
                "goes on"
            )
        for topic, there in begins.items():
            for number, at in there.items():
                if ends[topic][number] < at:
                    raise KafkaError(
                        f"topic {topic}, partition {number}: offset {at} was reached before, and the latest one is "
                        f"{ends[topic][number]} now: was the topic deleted? With the option failOnDataLoss=false the "
                        "query goes on"
                    )

    def _all(self, which: int) -> Offsets:
        partitions = self._partitions()
        return self._asked([(topic, number, which) for topic, there in partitions.items() for number in there])

    def _asked(self, places: Sequence[tuple[str, str, int]]) -> Offsets:
        """Offsets by what they are."""
        return offsets(self._config, places)

    def _partitions(self) -> dict[str, list[str]]:
        """The partitions of all topics.

        Raises:
            KafkaError: there is no such topic.
        """
        return partitions(self._config, self._given["topics"], self._given["pattern"])


def _never_back(begins: Offsets, ends: Offsets) -> Offsets:
    return {
        topic: {number: max(at, begins[topic][number]) for number, at in there.items()} for topic, there in ends.items()
    }
