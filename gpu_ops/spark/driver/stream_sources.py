"""The sources of a streaming query as Spark counts them, and what tells one from another, here and in later sessions.

A source is a leaf of the analysed plan. `MicroBatchExecution` numbers distinct leaves in the order in which they stand
there, and notes an offset for each leaf: a plan that has one leaf twice (``df.union(df)``; a join makes a copy with
other attributes) notes the offset of that source twice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from py4j.java_gateway import JavaClass
from py4j.protocol import Py4JError
from pyspark.sql import DataFrame, SparkSession

from gpu_ops.errors import StateError
from gpu_ops.query.catalyst import class_of, items, java_class
from gpu_ops.spark.driver.queries import analyzed

_PACE: Final = frozenset(
    name.lower()
    for name in (
        "maxFilesPerTrigger", "maxBytesPerTrigger", "latestFirst", "maxFileAge", "maxCachedFiles",
        "discardCachedInputRatio", "cleanSource", "sourceArchiveDir",
        "startingOffsets", "startingOffsetsByTimestamp", "startingOffsetsByTimestampStrategy", "startingTimestamp",
        "startingVersion", "endingOffsets", "maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay",
        "maxRecordsPerPartition", "minPartitions", "failOnDataLoss", "includeHeaders", "groupIdPrefix",
        "fetchOffset.numRetries", "fetchOffset.retryIntervalMs", "kafkaConsumer.pollTimeoutMs",
        "given.first", "given.most", "given.lost", "given.schema",
    )
)  # fmt: skip
"""Options of where a new query begins, at what pace it reads and what becomes of a file then, not of what is read."""

_KAFKA: Final = ("kafka.bootstrap.servers", "kafka.isolation.level")
"""The settings of a Kafka client that say what is read; others are credentials and sizes."""

_LISTS: Final = ("subscribe", "kafka.bootstrap.servers")
"""Options whose value is a list in any order."""

_GIVEN: Final = "given"
"""The option that has all settings of a source of ours, as JSON."""

_SHOWN: Final = ("subscribe", "subscribepattern", "assign", "given.table")
"""Options that name what is read."""

_SECRET: Final = re.compile(
    r"secret|passw|passphrase|token|credential|jaas|access.?key|api.?key|private", re.IGNORECASE
)
_SECRET_VALUE: Final = re.compile(r"://[^/\s]*@|\b(password|secret|token|key|sig)\s*=", re.IGNORECASE)
_URL: Final = "(?i)url"
"""Spark's own choice of options that are hidden in plans; a description has them, but for their secrets."""

_NOTHING: Final = r"(?!)"
_USER: Final = re.compile(r"(?<=://)[^/\s]*@")
_ROUNDS: Final = 100_000


@dataclasses.dataclass(frozen=True)
class StreamSource:
    """A source of a streaming query.

    Attributes:
        number: which one of the query's sources it is, from 0.
        places: where its offset stands among those that the query notes; several for a leaf that the plan has twice.
        folder: the name of its folder below ``sources`` in the checkpoint: its number, or its name.
        name: the name that ``readStream.name()`` of Spark 4.2 gave it, or None.
        label: what it reads, for people; without secrets.
        description: JSON of what it reads, equal in any session that reads the same: format, paths or topics, and
            options that are not about pace, start or credentials of Kafka. Other secrets are in it as hashes.
        origin: the JVM's objects that each ``load()`` makes anew; empty where it was read from JSON.
    """

    number: int
    places: tuple[int, ...]
    folder: str
    name: str | None
    label: str
    description: str
    origin: tuple[Any, ...] = dataclasses.field(default=(), compare=False, repr=False)

    def same_load(self, other: StreamSource) -> bool:
        """True if both come from one call of ``readStream...load()``, also where a plan has copies of it."""
        return len(self.origin) == len(other.origin) > 0 and all(map(_same_object, self.origin, other.origin))

    def to_dict(self) -> dict[str, Any]:
        """Everything but the JVM's objects, as JSON has it."""
        fields = [field.name for field in dataclasses.fields(self) if field.compare]
        return {name: list(x) if isinstance(x := getattr(self, name), tuple) else x for name in fields}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StreamSource:
        """Reads what `to_dict` gives."""
        return cls(**{**data, "places": tuple(data["places"])})


def sources_of(df: DataFrame) -> tuple[StreamSource, ...]:
    """Returns the sources of a streaming DataFrame, in the order in which a query of it has them in its checkpoint.

    Args:
        df: the DataFrame that is written; with a static one there are none.

    Raises:
        StateError: it has a source that is no ``readStream``, so that a checkpoint would not say where it stands.
    """
    leaves: list[Any] = []
    places: list[list[int]] = []
    for place, leaf in enumerate(x for x in items(analyzed(df).collectLeaves()) if x.isStreaming()):
        if class_of(leaf) not in _ORIGINS:
            raise StateError(f"a source of the query is a {class_of(leaf)} in Spark's plan, and not from readStream")
        number = next((n for n, other in enumerate(leaves) if leaf.equals(other)), len(leaves))
        if number == len(leaves):
            leaves.append(leaf)
            places.append([])
        places[number].append(place)
    names = [_name(leaf) for leaf in leaves]
    unnamed = iter(range(len(leaves)))
    folders = [str(next(unnamed)) if name is None else name for name in names]
    return tuple(
        StreamSource(number, tuple(places[number]), folders[number], names[number], *_read(df.sparkSession, leaf))
        for number, leaf in enumerate(leaves)
    )


def _same_object(one: Any, other: Any) -> bool:
    objects = JavaClass("java.util.IdentityHashMap", one._gateway_client)()
    objects.put(one, True)
    return bool(objects.containsKey(other))


def _name(leaf: Any) -> str | None:
    with contextlib.suppress(Py4JError):  # before Spark 4.2
        name = leaf.sourceIdentifyingName()
        return None if class_of(name).startswith("Unassigned") else str(name.name())
    return None


def _read(session: SparkSession, leaf: Any) -> tuple[str, str, tuple[Any, ...]]:
    """The label, the description and the origin of a leaf."""
    if class_of(leaf) == "StreamingRelation":
        source = leaf.dataSource()
        form, entry, paths = str(source.className()), source.catalogTable(), list(map(str, items(source.paths())))
        table = str(entry.get().identifier().unquotedString()) if entry.isDefined() else None
        options = {str(pair._1()): str(pair._2()) for pair in items(source.options().toSeq())}
        origin: tuple[Any, ...] = (source,)
    else:
        form, entry, paths = str(leaf.sourceName()), leaf.identifier(), []
        table = str(entry.get().toString()) if entry.isDefined() else None
        options = dict(leaf.extraOptions().asCaseSensitiveMap())
        origin = (leaf.table(), leaf.extraOptions())
    options = {str(name).lower(): str(value) for name, value in options.items()}
    if "path" in options:
        paths.insert(0, options.pop("path"))
    paths = [_qualified(session, path) for path in paths]
    settled = dict(_settled(options, _redacted(session)))
    shown = [*(_USER.sub("…@", path) for path in paths), table, *map(settled.get, _SHOWN)]
    read = {"format": form.lower(), "paths": list(map(_hidden, paths)), "table": table, "options": settled}
    return " ".join([form, *filter(None, shown)]), json.dumps(read, sort_keys=True), origin


_ORIGINS: Final = ("StreamingRelation", "StreamingRelationV2")
"""The leaves that `readStream` makes, for sources of Spark's first and second interface."""


def _qualified(session: SparkSession, path: str) -> str:
    """A path with the file system's name, as all spellings of it have it."""
    at = java_class(session, "org.apache.hadoop.fs.Path")(path)
    files = at.getFileSystem(session._jsparkSession.sessionState().newHadoopConf())
    return str(files.makeQualified(at).toString())


def _redacted(session: SparkSession) -> re.Pattern[str]:
    """The names that Spark hides in plans by `SQLConf.SQL_OPTIONS_REDACTION_PATTERN` beyond those that it always hides.

    A job adds those whose values stand elsewhere.
    """
    setting = session.conf.get("spark.sql.redaction.options.regex", _URL) or _URL
    return re.compile(setting.removeprefix(_URL).removeprefix("|") or _NOTHING, re.IGNORECASE)


def _settled(options: Mapping[str, str], redacted: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    """Yields the options that say what is read, each value in one spelling, secrets as hashes.

    Args:
        options: by their names in small letters.
        redacted: names of options with secrets, beside those whose names or values tell it.
    """
    for name, value in sorted(_flat(options)):
        if name in _PACE or (name.startswith("kafka.") and name not in _KAFKA):
            continue
        if name in _LISTS:
            value = ",".join(sorted(x.strip() for x in value.split(",")))  # noqa: PLW2901 - the same in one spelling
        parts = name.split(".")
        names = (".".join(parts[at:]) for at in range(len(parts)))  # the option's own stands behind "given."
        is_secret = _SECRET.search(name) or any(map(redacted.search, names))
        yield name, _hash(name, value) if is_secret else _hidden(value, name)


def _flat(options: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yields the options, those of a source of ours one by one."""
    for name, value in options.items():
        given = json.loads(value) if name == _GIVEN else None
        if isinstance(given, dict):
            for inner, x in given.items():
                below = x if isinstance(x, dict) else {"": x}
                yield from (
                    (f"{name}.{inner}{'.' * bool(y)}{y}".lower(), z if isinstance(z, str) else json.dumps(z))
                    for y, z in below.items()
                )
        else:
            yield name, value


def _hidden(value: str, name: str = "") -> str:
    """A value, as a hash where it has a secret."""
    return _hash(name, value) if _SECRET_VALUE.search(value) else value


@functools.lru_cache(maxsize=256)
def _hash(name: str, value: str) -> str:
    """A hash that takes long enough that passwords are not found by trying them."""
    return f"hash {hashlib.pbkdf2_hmac('sha256', value.encode(), f'gpu_ops {name}'.encode(), _ROUNDS).hex()[:32]}"


def unknown_sources(keys: Sequence[str]) -> tuple[StreamSource, ...]:
    """Sources of which only the names or numbers in a checkpoint are known, so that each is taken as one of its own."""
    return tuple(
        StreamSource(number, (int(key),), key, None, f"source {key}", "")
        if key.isdigit()
        else StreamSource(number, (number,), key, key, f"source {key}", "")
        for number, key in enumerate(keys)
    )
