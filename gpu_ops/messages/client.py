"""Kafka by librdkafka (the package ``confluent-kafka``): tasks fetch and send messages themselves, without a JVM.

A client lives as long as its process: to connect takes longer than a small micro-batch.
"""

from __future__ import annotations

import functools
import itertools
import logging
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from gpu_ops.errors import DescriptionError, GpuJoinError, NotBuiltError

_log = logging.getLogger(__name__)

Client: TypeAlias = Literal["spark", "librdkafka"]
"""What fetches and sends Kafka's messages: Spark's reader and sink, or the tasks themselves."""

Configuration: TypeAlias = tuple[tuple[str, str | bool], ...]
"""Names and values of librdkafka."""

Offsets: TypeAlias = dict[str, dict[str, int]]
"""By topic and partition; a partition is text, as where Spark keeps offsets as JSON."""

EARLIEST, LATEST = -2, -1
"""What Spark's ``startingOffsets`` has for a partition in place of an offset."""

_SECONDS: Final = 60.0
"""That a broker has for an answer."""

_PREFIX: Final = "kafka."

_CONSUMER: Final[dict[str, str | bool]] = {
    "group.id": "gpu_ops",  # librdkafka asks for one; no offset is ever committed
    "enable.auto.commit": "false",
    "enable.partition.eof": "true",
    "isolation.level": "read_uncommitted",  # as Spark's reader
    # what is fetched beyond a range is dropped with it, so little is fetched ahead, and a full queue is soon looked at
    "queued.max.messages.kbytes": "4096",
    "fetch.queue.backoff.ms": "2",
    "fetch.wait.max.ms": "10",  # what is asked for is there; a request that waits would hold up the next range's
}
_PRODUCER: Final[dict[str, str | bool]] = {
    "enable.idempotence": "true",  # as Kafka's own client: what is sent again is neither twice there nor out of order
    "partitioner": "murmur2_random",  # as Kafka's own client: a key is in the same partition whoever sent it
    "delivery.report.only.error": True,  # looked at by the package itself
}

_MESSAGES: Final = 10_000
"""So many are taken from librdkafka at a time: with 100,000 each took twice the time of the processor."""

_PATIENCE: Final = 120.0
"""Seconds without a message until a range is given up; Spark's reader waits as long."""


class KafkaError(GpuJoinError, RuntimeError):
    """A broker that cannot be reached, or does not take or have a message."""


class Range(NamedTuple):
    """Messages of a partition of a topic.

    Attributes:
        topic: the topic.
        partition: of it.
        begin: the offset of the first one.
        end: the offset behind the last one.
    """

    topic: str
    partition: int
    begin: int
    end: int

    def __str__(self) -> str:
        return f"topic {self.topic}, partition {self.partition}, offsets {self.begin} to {self.end}"


def configured(servers: str, options: Mapping[str, str], *, sends: bool, besides: Sequence[str] = ()) -> Configuration:
    """What a client is told.

    Args:
        servers: ``bootstrap.servers``.
        options: of librdkafka, each with ``kafka.`` before it, as Spark's reader and writer have theirs.
        sends: whether it is a producer's.
        besides: options that are somebody else's.

    Raises:
        DescriptionError: no such option, property or value.
        NotBuiltError: the package is not installed.
    """
    given = {name: str(value) for name, value in options.items() if name not in besides}
    other = next((name for name in given if not name.startswith(_PREFIX)), None)
    if other is not None:
        known = ", ".join([*besides, f"its properties with '{_PREFIX}' before their names"])
        raise DescriptionError(f"no option {other!r} with librdkafka; there are {known}")
    own = {name.removeprefix(_PREFIX): value for name, value in given.items()}
    config = tuple({**(_PRODUCER if sends else _CONSUMER), **own, "bootstrap.servers": servers}.items())
    kafka = package()
    try:
        (kafka.Producer if sends else kafka.Consumer)(dict(config))
    except kafka.KafkaException as error:
        raise DescriptionError(
            f"{_said(error)}; librdkafka's properties are not all those of Kafka's Java client "
            "(https://github.com/confluentinc/librdkafka/blob/master/CONFIGURATION.md)"
        ) from None
    return config


def package() -> Any:
    """The package.

    Raises:
        NotBuiltError: it is not installed.
    """
    try:
        import confluent_kafka  # noqa: PLC0415 - an extra
    except ImportError:
        raise NotBuiltError(
            "Kafka without the JVM needs librdkafka here and where tasks run: pip install confluent-kafka"
        ) from None
    return confluent_kafka


def partitions(config: Configuration, topics: Sequence[str] | None, pattern: str) -> dict[str, list[str]]:
    """The partitions of some topics.

    Args:
        config: of a consumer.
        topics: their names; None: those whose whole name a pattern matches.
        pattern: a regular expression.

    Raises:
        KafkaError: a topic is not there, or no broker answers.
    """
    admin, found = _admin(config), dict[str, Any]()
    try:
        if topics is None:
            known = admin.list_topics(timeout=_SECONDS).topics
            found = {name: topic for name, topic in known.items() if re.fullmatch(pattern, name)}
        else:
            found = {name: admin.list_topics(name, timeout=_SECONDS).topics[name] for name in topics}
    except package().KafkaException as error:
        raise KafkaError(f"Kafka's topics cannot be had: {_said(error)}") from None
    wrong = next(((name, topic.error) for name, topic in found.items() if topic.error is not None), None)
    if wrong is not None:
        raise KafkaError(f"topic {wrong[0]}: {wrong[1].str()}")
    return {name: [str(number) for number in sorted(topic.partitions)] for name, topic in found.items()}


def offsets(config: Configuration, places: Sequence[tuple[str, str, int]]) -> Offsets:
    """The earliest or latest offsets of partitions.

    Args:
        config: of a consumer.
        places: topics, partitions, and `EARLIEST` or `LATEST` of each.

    Raises:
        KafkaError: they cannot be had.
    """
    if not places:
        return {}
    kafka = package()
    from confluent_kafka import admin  # noqa: PLC0415 - an extra

    level = kafka.IsolationLevel[str(dict(config)["isolation.level"]).upper()]
    which = {EARLIEST: admin.OffsetSpec.earliest(), LATEST: admin.OffsetSpec.latest()}
    asked = {kafka.TopicPartition(topic, int(number)): which[at] for topic, number, at in places}
    found: Offsets = {}
    try:
        answers = _admin(config).list_offsets(asked, isolation_level=level, request_timeout=_SECONDS)
        for place, answer in answers.items():
            found.setdefault(place.topic, {})[str(place.partition)] = answer.result().offset
    except kafka.KafkaException as error:
        raise KafkaError(f"Kafka's offsets cannot be had: {_said(error)}") from None
    return found


def limited(begins: Offsets, ends: Offsets, most: int) -> Offsets:
    """Ends within a number of messages, each partition's share in proportion to what it has.

    No partition starves: each that has messages gets one (Spark's ``KafkaMicroBatchStream.rateLimit``).
    """
    sizes = {(t, n): at - begins[t][n] for t, there in ends.items() for n, at in there.items()}
    total = sum(sizes.values())
    if total <= most:
        return ends
    shares = {place: max(most * size // total, min(size, 1)) for place, size in sizes.items()}
    return {t: {n: begins[t][n] + shares[t, n] for n in there} for t, there in ends.items()}


def divided(ranges: Sequence[Range], least: int) -> list[Range]:
    """Ranges cut into about so many, each into a share that goes by its size; in the same order.

    As Spark's ``KafkaOffsetRangeCalculator`` does it for ``minPartitions``.
    """
    total = sum(one.end - one.begin for one in ranges)
    if least <= len(ranges):
        return list(ranges)
    found = []
    for one in ranges:
        size = one.end - one.begin
        parts = min(size, max(1, round(size * least / total)))
        cuts = [one.begin + size * part // parts for part in range(parts + 1)]
        found += [one._replace(begin=begin, end=end) for begin, end in itertools.pairwise(cuts)]
    return found


@functools.cache
def _admin(config: Configuration) -> Any:
    """What asks brokers, told what a consumer is told of them."""
    from confluent_kafka.admin import AdminClient  # noqa: PLC0415 - an extra

    of_consumers = ("group.id", "isolation.level", "enable.auto.commit", "enable.partition.eof", "check.crcs")
    own = {x: y for x, y in config if x not in of_consumers and not x.startswith(("queued.", "fetch.", "session."))}
    return AdminClient(own, logger=_log)


def fetched(config: Configuration, wanted: Range, *, lost: bool) -> Iterator[list[Any]]:
    """The messages of a range, in their order, many at a time.

    Args:
        config: of a consumer.
        wanted: the range.
        lost: whether messages may be gone before they were read.

    Raises:
        KafkaError: they cannot be had.
    """
    kafka = package()
    consumer = _consumer(config, "earliest" if lost else "error")
    place, waiting = kafka.TopicPartition(wanted.topic, wanted.partition, wanted.begin), time.monotonic()
    consumer.assign([place])
    try:
        at = wanted.begin
        while at < wanted.end:
            messages, events = consumer.consume(min(_MESSAGES, wanted.end - at), 1), []
            if not _only_messages(messages):
                events = [message for message in messages if message.error() is not None]
                messages = [message for message in messages if message.error() is None]
            while messages and messages[-1].offset() >= wanted.end:  # some before are gone: a compacted topic
                messages.pop()
                at = wanted.end
            if messages:
                yield messages
                at, waiting = max(at, messages[-1].offset() + 1), time.monotonic()
            for event in events:
                at = max(at, _reached(event, wanted))
            if time.monotonic() - waiting > _PATIENCE:
                raise KafkaError(f"{wanted}: nothing came for {_PATIENCE:.0f} s, from {at} on")
    finally:
        consumer.unassign()


def _only_messages(found: list[Any]) -> bool:
    """Whether there is no event among them; not to be asked of each one: their offsets are without a gap."""
    if not found or found[0].error() is not None or found[-1].error() is not None:
        return False
    return bool(found[-1].offset() - found[0].offset() + 1 == len(found))


def _reached(event: Any, wanted: Range) -> int:
    """The offset that an event says was reached.

    Raises:
        KafkaError: it says that the messages cannot be had.
    """
    error = event.error()
    codes = package().KafkaError
    if error.code() == codes._PARTITION_EOF:
        return int(event.offset())
    if error.code() in (codes._AUTO_OFFSET_RESET, codes.OFFSET_OUT_OF_RANGE):
        raise KafkaError(
            f"{wanted}: some of these messages are gone ({error.str()}); with the option failOnDataLoss=false a query "
            "goes on without them"
        )
    if error.retriable() or error.code() in (codes._TRANSPORT, codes._ALL_BROKERS_DOWN, codes._TIMED_OUT):
        return wanted.begin
    raise KafkaError(f"{wanted}: {error.str()}")


@functools.cache
def _consumer(config: Configuration, reset: str) -> Any:
    return package().Consumer({**dict(config), "auto.offset.reset": reset}, logger=_log)


class Sender:
    """Sends messages to a topic; they have arrived when `finish` returns.

    Args:
        config: of a producer.
        topic: the topic.
    """

    def __init__(self, config: Configuration, topic: str) -> None:
        self._topic, self._kafka, self._failed = topic, package(), list[Any]()
        self._producer = _producer(config)

    def send(self, keys: Iterable[bytes | str | None], values: Iterable[bytes | str], headers: Iterable[Any]) -> None:
        """Hands messages over, in their order.

        Raises:
            KafkaError: one before did not arrive.
        """
        produce, topic, failed = self._producer.produce, self._topic, self._failed_to_arrive
        for key, value, header in zip(keys, values, headers, strict=False):  # librdkafka takes them one by one
            while True:
                try:
                    produce(topic, value, key, on_delivery=failed, headers=header)
                    break
                except BufferError:  # as many wait as may
                    self._producer.poll(0.1)
                except self._kafka.KafkaException as error:
                    raise self._error(error.args[0]) from None
        self._producer.poll(0)
        self._check()

    def finish(self) -> None:
        """Waits until all have arrived.

        Raises:
            KafkaError: one did not.
        """
        while self._producer.flush(1):
            self._check()
        self._check()

    def _failed_to_arrive(self, error: Any, _: Any) -> None:
        self._failed.append(error)

    def _check(self) -> None:
        if self._failed:
            self._producer.purge()  # the task sends them all again
            raise self._error(self._failed[0])

    def _error(self, error: Any) -> KafkaError:
        return KafkaError(f"a message for topic {self._topic} did not arrive: {error.str()}")


@functools.cache
def _producer(config: Configuration) -> Any:
    return package().Producer(dict(config), logger=_log)


def _said(error: Any) -> str:
    return str(error.args[0].str())
