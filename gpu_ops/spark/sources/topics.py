"""Notices, when a query is started again, that one of its Kafka topics was deleted and created anew.

A checkpoint of Spark's reader has the offsets of a topic's partitions by the topic's name. If the topic is another one
by now, the reader would go on in its middle. So the ids of the topics, which Kafka 2.8 and newer have, are kept in the
checkpoint as well, in a file of ours beside Spark's.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from py4j.java_gateway import JavaClass
from pyspark.sql import SparkSession

from gpu_ops.errors import StateError
from gpu_ops.spark.driver.checkpoint import Checkpoint
from gpu_ops.spark.driver.queries import children_of

MARK: Final = "gpu_ops.topics"
"""Option that marks a source of Spark's Kafka reader as one of `gpu_ops.read_kafka`; Spark ignores it."""

_FILE: Final = "gpu_ops_topics.json"
_WITHIN_MS: Final = 10_000
_NO_ID: Final = "AAAAAAAAAAAAAAAAAAAAAA"
"""The id that a client reports for a topic of an older Kafka."""

_MAY_HAVE_RUN: Final = "The query was stopped, and rows of a first micro-batch may have been written"
"""Part of an error: the query runs already when it is checked."""

_log = logging.getLogger(__name__)

Ids = Mapping[str, set[str]]
"""The id of each topic, by name; several ids where a query reads from several Kafka clusters."""


def check_topics(query: Any) -> None:
    """Refuses a query whose checkpoint has offsets of another topic of the same name.

    Topics whose ids cannot be read, as they may not be described or Kafka does not answer, are not checked.

    Args:
        query: the query that was started.

    Raises:
        StateError: which topic; or the ids cannot be written to the checkpoint.
    """
    try:
        running = query._jsq.streamingQuery()
        sources = [dict(options) for options in _sources(running.analyzedPlan())]
        if not sources:
            return
        file = _Stored(running)
        now, known = _ids(running, sources), file.read()
    except Exception as error:  # whatever py4j makes of another version's classes, or a client of Kafka of its settings
        _log.warning("whether topics of query %s were made anew cannot be told: %s", query.id, error)
        return
    anew = sorted(topic for topic, ids in now.items() if topic in known and not ids <= known[topic])
    if anew and any(options.get("failondataloss", "true").lower() != "false" for options in sources):
        raise StateError(
            f"topic {anew[0]!r} was deleted and made anew since the query's last run, and its checkpoint has offsets "
            f"of the one before: its first messages would not be read. {_MAY_HAVE_RUN}. Begin the query anew, with "
            "another checkpoint and state folder; with options={'failOnDataLoss': 'false'} it goes on at these offsets"
        )
    if any(known.get(topic) != ids for topic, ids in now.items()):
        try:
            file.write({**known, **now})
        except Exception as error:  # of any file system of Hadoop's, by way of py4j
            raise StateError(
                f"the ids of topics {', '.join(sorted(now))} cannot be written to the query's checkpoint, so that one "
                f"that is made anew would not be noticed ({_MAY_HAVE_RUN}): {error}"
            ) from error


def _sources(node: Any) -> Iterator[Any]:
    """Yields the options of each source of ours in a plan, their names in lower case."""
    if str(node.nodeName()) == "StreamingRelationV2":
        options = {str(name).lower(): str(value) for name, value in dict(node.extraOptions()).items()}
        if MARK in options:
            yield options
    for child in children_of(node):
        yield from _sources(child)


def _ids(running: Any, sources: list[dict[str, str]]) -> Ids:
    ids = defaultdict[str, set[str]](set)
    for options in sources:
        properties = _java(running, "java.util.Properties")()
        for name in ("default.api.timeout.ms", "request.timeout.ms"):
            properties.put(name, str(_WITHIN_MS))
        for name, value in options.items():
            if name.startswith("kafka."):
                properties.put(name.removeprefix("kafka."), value)
        admin = _java(running, "org.apache.kafka.clients.admin.Admin").create(properties)
        try:
            names = _java(running, "java.util.ArrayList")()
            for topic in _topics(running, admin, options):
                names.add(topic)
            for topic, future in dict(admin.describeTopics(names).topicNameValues()).items():
                try:
                    number = str(future.get().topicId())
                except Exception as error:  # it is not there, or may not be described
                    _log.warning("topic %s is not described: %s", topic, error)
                    continue
                if number != _NO_ID:
                    ids[str(topic)].add(number)
        finally:
            admin.close()
    return ids


def _topics(running: Any, admin: Any, options: Mapping[str, str]) -> list[str]:
    """Returns the names of the topics that a source reads."""
    if "subscribe" in options:
        return [name.strip() for name in options["subscribe"].split(",") if name.strip()]
    if "assign" in options:
        return list(json.loads(options["assign"]))
    pattern = options["subscribepattern"]
    fits = _java(running, "java.util.regex.Pattern").matches
    return [str(name) for name in admin.listTopics().names().get() if fits(pattern, name)]


class _Stored:
    """The file of topic ids in a query's checkpoint.

    Args:
        running: the query, as the JVM has it.
    """

    def __init__(self, running: Any) -> None:
        self._running = running
        self._path = _java(running, "org.apache.hadoop.fs.Path")(running.resolvedCheckpointRoot(), _FILE)
        self._files = self._path.getFileSystem(running.sparkSession().sparkContext().hadoopConfiguration())

    def read(self) -> Ids:
        """Reads the ids; empty if there is no file, or one that was broken off."""
        if not self._files.exists(self._path):
            return {}
        stream = self._files.open(self._path)
        try:
            return _parsed(_java(self._running, "org.apache.commons.io.IOUtils").toString(stream, "UTF-8"))
        finally:
            stream.close()

    def write(self, ids: Ids) -> None:
        """Writes the ids in place of the earlier ones."""
        stream = self._files.create(self._path, True)
        try:
            stream.write(bytearray(_text(ids).encode()))
        finally:
            stream.close()


def topics_beside(session: SparkSession, parts: Sequence[tuple[Checkpoint, int]]) -> dict[str, str]:
    """Returns the file of topic ids for a checkpoint that is made of parts of others, by name; empty if there is none.

    Args:
        session: a session.
        parts: checkpoints, and numbers of sources in them, as `gpu_ops.spark.driver.checkpoint.write_checkpoint` has.
    """
    ids: dict[str, set[str]] = {}
    for checkpoint, number in parts:
        offset = json.loads(checkpoint.offsets[number] or "{}")
        if not isinstance(offset, dict):  # a number, as Spark's rate source has
            continue
        known = _parsed(checkpoint.text_of(session, _FILE) or "{}")
        # of a topic that was made anew between two of them no id is left, and the query that starts with it is refused
        ids |= {topic: ids.get(topic, known[topic]) & known[topic] for topic in known.keys() & set(offset)}
    return {_FILE: _text(ids)} if ids else {}


def _parsed(text: str) -> dict[str, set[str]]:
    """Reads the ids from a file's text; none from one that was broken off."""
    try:
        return {str(topic): set(map(str, ids)) for topic, ids in json.loads(text).items()}
    except ValueError:
        return {}


def _text(ids: Ids) -> str:
    return json.dumps({topic: sorted(numbers) for topic, numbers in sorted(ids.items())})


def _java(running: Any, name: str) -> Any:
    """Returns a class of the JVM by its full name."""
    return JavaClass(name, running._gateway_client)
