"""librdkafka as tasks use it, with its own stand-in for a broker."""

from __future__ import annotations

import sys
from itertools import repeat
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_ops.errors import DescriptionError, NotBuiltError
from gpu_ops.messages.client import (
    EARLIEST,
    LATEST,
    KafkaError,
    Range,
    Sender,
    configured,
    divided,
    fetched,
    limited,
    offsets,
    partitions,
)  # fmt: skip
from messages.broker import PARTITIONS, Broker

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def broker() -> Broker:
    return Broker()


def values(config: Any, wanted: Range, *, lost: bool = False) -> list[bytes]:
    return [message.value() for messages in fetched(config, wanted, lost=lost) for message in messages]


def test_a_range_is_what_was_sent(broker: Broker) -> None:
    config = configured(broker.servers, {}, sends=False)
    numbers = [b"%d" % number for number in range(25_000)]  # more than are taken at a time
    broker.send("numbers", *((2, number) for number in numbers), (1, b"other"))
    assert partitions(config, ["numbers"], "") == {"numbers": [str(n) for n in range(PARTITIONS)]}
    assert partitions(config, None, "num.*") == {"numbers": [str(n) for n in range(PARTITIONS)]}
    places = [("numbers", "2", LATEST), ("numbers", "1", LATEST), ("numbers", "0", EARLIEST)]
    assert offsets(config, places) == {"numbers": {"2": 25_000, "1": 1, "0": 0}}
    for begin, end in ((0, 25_000), (7, 24_000), (24_999, 25_000), (10, 10)):
        assert values(config, Range("numbers", 2, begin, end)) == numbers[begin:end]
    assert values(config, Range("numbers", 1, 0, 1)) == [b"other"]


def test_a_range_that_is_given_up_leaves_nothing(broker: Broker) -> None:
    config = configured(broker.servers, {}, sends=False)
    broker.send("given_up", *((0, b"%d" % number) for number in range(30_000)), (1, b"x"))
    for messages in fetched(config, Range("given_up", 0, 0, 30_000), lost=False):
        assert messages[0].offset() == 0
        break
    assert values(config, Range("given_up", 1, 0, 1)) == [b"x"]


def test_messages_that_are_gone(broker: Broker) -> None:
    config = configured(broker.servers, {}, sends=False)
    broker.send("gone", *((0, b"%d" % number) for number in range(5)))
    wanted = Range("gone", 0, 100, 103)
    with pytest.raises(KafkaError, match=r"topic gone, partition 0, offsets 100 to 103.*gone.*failOnDataLoss=false"):
        values(config, wanted)


def test_messages_are_sent(broker: Broker) -> None:
    config = configured(
        broker.servers, {"kafka.linger.ms": "1", "kafka.queue.buffering.max.messages": "10"}, sends=True
    )
    for half in (0, 1):  # a producer serves several tasks
        sender = Sender(config, "sent")
        numbers = range(half * 100, half * 100 + 100)
        keys = [b"%d" % (number % 3) for number in numbers]
        headers = [[("n", b"%d" % number)] for number in numbers]
        sender.send(keys, [str(number) for number in numbers], headers)
        sender.finish()
    found = broker.received("sent")
    by_key: dict[bytes, list[int]] = {}
    for messages in found:
        for message in messages:
            by_key.setdefault(message.key(), []).append(int(message.value()))
            assert message.headers() == [("n", message.value())]
    assert by_key == {b"%d" % key: [n for n in range(200) if n % 3 == key] for key in range(3)}
    # Kafka's murmur2 of "0", "1" and "2" (org.apache.kafka.common.utils.Utils), of 4 partitions
    assert [{message.key() for message in messages} for messages in found] == MURMUR2


MURMUR2: list[set[bytes]] = [{b"2", b"0"}, set(), set(), {b"1"}]


def test_a_message_that_does_not_arrive(broker: Broker) -> None:
    sender = Sender(configured(broker.servers, {"kafka.message.max.bytes": "1000"}, sends=True), "large")
    with pytest.raises(KafkaError, match=r"a message for topic large did not arrive.*too large"):
        sender.send(repeat(None), ["x" * 2000], repeat(None))
    lost = {"kafka.message.timeout.ms": "200", "kafka.enable.idempotence": "false"}
    sender = Sender(configured("localhost:1", lost, sends=True), "nobody")
    sender.send(repeat(None), ["x"], repeat(None))
    with pytest.raises(KafkaError, match=r"a message for topic nobody did not arrive.*timed out"):
        sender.finish()


def test_what_a_client_is_told() -> None:
    with pytest.raises(DescriptionError, match=r"buffer.memory.*librdkafka's properties"):
        configured("localhost:1", {"kafka.buffer.memory": "1"}, sends=True)
    with pytest.raises(DescriptionError, match="'startingOffsets'"):
        configured("localhost:1", {"startingOffsets": "earliest"}, sends=False)
    config = dict(
        configured("localhost:1", {"kafka.partitioner": "random", "kafka.bootstrap.servers": "x"}, sends=True)
    )
    assert (config["partitioner"], config["bootstrap.servers"]) == ("random", "localhost:1")


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    with pytest.raises(NotBuiltError, match="pip install confluent-kafka"):
        configured("localhost:1", {}, sends=True)


@given(
    st.dictionaries(st.sampled_from("abc"), st.tuples(st.integers(0, 9), st.integers(0, 50)), min_size=1),
    st.integers(1, 60),
)
def test_shares_of_a_limit(sizes: dict[str, tuple[int, int]], most: int) -> None:
    begins = {"t": {name: at for name, (at, _) in sizes.items()}}
    ends = {"t": {name: at + size for name, (at, size) in sizes.items()}}
    shares = {name: at - begins["t"][name] for name, at in limited(begins, ends, most)["t"].items()}
    assert all(min(size, 1) <= shares[name] <= size for name, (_, size) in sizes.items())
    total = sum(size for _, size in sizes.values())
    assert sum(shares.values()) == total if total <= most else sum(shares.values()) < most + len(sizes)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 50)), min_size=1, max_size=4), st.integers(0, 20))
def test_ranges_are_divided(sizes: list[tuple[int, int]], least: int) -> None:
    whole = [Range("t", number, begin, begin + size) for number, (begin, size) in enumerate(sizes)]
    found = divided(whole, least)
    assert [offset for one in found for offset in _places(one)] == [offset for one in whole for offset in _places(one)]
    assert all(one.begin < one.end for one in found)
    assert abs(len(found) - max(least, len(whole))) <= len(whole) or len(found) == sum(size for _, size in sizes)


def _places(of: Range) -> list[tuple[int, int]]:
    return [(of.partition, offset) for offset in range(of.begin, of.end)]
