"""librdkafka's stand-in for a broker, in this process: topics are made when they are first asked for."""

from __future__ import annotations

from typing import Any

import confluent_kafka

PARTITIONS = 4
"""Of its topics."""


class Broker:
    """One broker, for as long as the object lives."""

    def __init__(self) -> None:
        self._host = confluent_kafka.Producer({"bootstrap.servers": "none", "test.mock.num.brokers": 1, "log_level": 0})
        (at,) = self._host.list_topics(timeout=30).brokers.values()
        self.servers = f"{at.host}:{at.port}"
        self._producer = confluent_kafka.Producer({"bootstrap.servers": self.servers, "log_level": 0})

    def send(self, topic: str, *messages: tuple[int, Any]) -> None:
        """Puts values into partitions of a topic, in their order."""
        for partition, value in messages:
            self._producer.produce(topic, value, partition=partition)
        assert self._producer.flush(30) == 0

    def received(self, topic: str) -> list[list[Any]]:
        """All messages of a topic, by partition."""
        consumer = confluent_kafka.Consumer(
            {"bootstrap.servers": self.servers, "group.id": "tests", "enable.partition.eof": True, "log_level": 0}
        )
        found: list[list[Any]] = []
        for partition in range(PARTITIONS):
            consumer.assign([confluent_kafka.TopicPartition(topic, partition, 0)])
            messages: list[Any] = []
            while True:
                message = consumer.poll(30)
                assert message is not None
                if message.error() is not None:
                    assert message.error().code() == confluent_kafka.KafkaError._PARTITION_EOF, message.error()
                    break
                messages.append(message)
            found.append(messages)
        consumer.close()
        return found
