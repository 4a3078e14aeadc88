"""Flink's names for the options of tables and for settings, and what each is here.

An option that changes nothing here, such as a parallelism, is taken with a note that says why; one that means
what we have not is refused with what to write instead.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Literal, NamedTuple

from gpu_ops.errors import DescriptionError
from gpu_ops.jobs.sql_tables import Setting, TableText
from gpu_ops.jobs.sql_text import Note, Text, Word, milliseconds


class Meaning(NamedTuple):
    """The meaning of an option or setting of Flink's.

    Attributes:
        name: the name here; empty for none.
        read: makes the value here of Flink's.
        ignored: why it has no effect here.
        refused: what to write instead.
        differs: what is different here.
    """

    name: str = ""
    read: Callable[[str], str] = str
    ignored: str = ""
    refused: str = ""
    differs: str = ""


def _one_of(values: Mapping[str, str], instead: str = "") -> Callable[[str], str]:
    """Reads one of some values."""

    def read(text: str) -> str:
        if text.lower() not in values:
            raise DescriptionError(
                f"{text!r} is not understood: there are {', '.join(values)}{instead and f'; {instead}'}"
            )
        return values[text.lower()]

    return read


def _duration(text: str) -> str:
    return f"{milliseconds(text)} milliseconds"


def _topics(text: str) -> str:
    return ",".join(part.strip() for part in text.split(";"))


def _offsets(text: str) -> str:
    """``partition:0,offset:42;partition:1,offset:300`` as offsets by partition."""
    pairs = re.findall(r"partition\s*:\s*(\d+)\s*,\s*offset\s*:\s*(\d+)\s*(?:;|$)", text)
    if not pairs or re.sub(r"partition\s*:\s*\d+\s*,\s*offset\s*:\s*\d+\s*(?:;|$)\s*", "", text).strip():
        raise DescriptionError(f"{text!r} is not understood: write 'partition:0,offset:42;partition:1,offset:300'")
    return json.dumps({number: int(offset) for number, offset in pairs})


_CLUSTER: Final = "it is about Flink's cluster"
_WRITES: Final = "each micro-batch is written as a whole"
_BY_SPARK: Final = "Spark's settings say how many tasks there are"
_NOT_YET: Final = "leave it out, or parse the messages in Python with gpu_ops.read_kafka"

_FORMATS: Final = {
    "json": "json", "debezium-json": "debezium-json", "avro-confluent": "avro",
    "debezium-avro-confluent": "debezium-avro",
    "avro": "avro", "debezium-avro": "debezium-avro",
}  # fmt: skip
_OTHER_FORMATS: Final = "messages in another format are parsed by Spark: df = spark.readStream..., then gpu_ops.sql"
_FORMAT: Final = Meaning("format", _one_of(_FORMATS, _OTHER_FORMATS))
_IGNORES: Final = Meaning(
    "bad_rows",
    _one_of({"true": "drop", "false": "fail"}),
    differs="a message with a value that cannot be read is left out and counted; Flink takes the value for NULL",
)
_KEY_FORMAT: Final = Meaning("", _one_of({"json": ""}), ignored="keys are JSON objects")
_ALL_FIELDS: Final = Meaning(
    "", _one_of({"all": ""}, "the columns of the key have to be in the value, too"), ignored="values have all columns"
)
_REGISTRY: Final = Meaning("schema_registry")
_PARALLEL: Final = Meaning(ignored=_BY_SPARK)

_KAFKA: Final[Mapping[str, Meaning]] = {
    "properties.bootstrap.servers": Meaning("bootstrap_servers"),
    "properties.group.id": Meaning(ignored="offsets are in the checkpoint, and no group of consumers is used"),
    "properties.enable.auto.commit": Meaning(ignored="offsets are in the checkpoint"),
    "properties.auto.offset.reset": Meaning(ignored="'scan.startup.mode' says where a table begins"),
    "scan.parallelism": _PARALLEL,
    "sink.parallelism": _PARALLEL,
    "sink.partitioner": Meaning(ignored="Kafka's client chooses the partition, by the key"),
    "value.format": _FORMAT,
    "format": _FORMAT,
    "key.format": _KEY_FORMAT,
    "key.json.ignore-parse-errors": Meaning(ignored="'bad_rows' says what becomes of messages that cannot be read"),
    "value.fields-include": _ALL_FIELDS,
    "key.fields-prefix": Meaning(refused="the columns of the key have the names that they have in the value"),
    **{f"{of}json.ignore-parse-errors": _IGNORES for of in ("", "value.", "debezium-")},
    **{
        f"{of}json.{name}": Meaning(ignored=why)
        for of in ("", "value.", "key.", "debezium-", "value.debezium-")
        for name, why in (
            ("map-null-key.mode", "maps are refused"),
            ("timestamp-format.standard", "both are read, 2026-01-31 12:00:00 and 2026-01-31T12:00:00Z"),
            ("schema-include", "a message says itself whether it has its schema"),
            ("encode.decimal-as-plain-number", "decimals are plain numbers"),
        )
    },
    **{f"{of}json.fail-on-missing-field": Meaning("", _one_of({"false": ""}, "declare the column NOT NULL"),
       ignored="what is missing is NULL") for of in ("", "value.")},
    **{
        f"{of}{name}": _REGISTRY
        for of in ("", "value.")
        for of_format in ("avro-confluent", "debezium-avro-confluent")
        for name in (f"{of_format}.url", f"{of_format}.schema-registry.url")
    },
}  # fmt: skip
_KAFKA_SOURCE: Final[Mapping[str, Meaning]] = {
    **_KAFKA,
    "topic": Meaning("topic", _topics),
    "key.fields": Meaning(ignored="they are read from the value"),
    "key.format": Meaning(ignored="the columns of the key are read from the value"),
    "scan.topic-partition-discovery.interval": Meaning(ignored="new partitions are found in each micro-batch"),
    "scan.bounded.mode": Meaning(
        "", _one_of({"unbounded": ""}, "a run with --once takes what there is, and ends"), ignored="it is the default"
    ),
}
_UPSERTS: Final = {"key.format": Meaning("key_format", _one_of({"json": "json", "raw": "raw"}))}
_KAFKA_SINK: Final[Mapping[str, Meaning]] = {
    **_KAFKA,
    "key.fields": Meaning("key", _topics),
    "scan.startup.mode": Meaning(ignored="the table is written"),
    "sink.delivery-guarantee": Meaning(
        "", _one_of({"at-least-once": "", "exactly-once": "", "none": ""}), ignored="messages are sent at least once"
    ),
    "sink.transactional-id-prefix": Meaning(ignored="messages are sent at least once"),
    **{f"sink.buffer-flush.{name}": Meaning(ignored=_WRITES) for name in ("interval", "max-rows")},
}
_CSV: Final = {
    "csv.field-delimiter": Meaning("delimiter"),
    "csv.quote-character": Meaning("quote"),
    "csv.escape-character": Meaning("escape"),
    "csv.null-literal": Meaning("null_value"),
}
_IGNORES_IN_FILES: Final = Meaning("mode", _one_of({"true": "PERMISSIVE", "false": "FAILFAST"}))
_FILES: Final[Mapping[str, Meaning]] = {
    **_CSV,
    **{f"{of}.ignore-parse-errors": _IGNORES_IN_FILES for of in ("csv", "json")},
    "source.monitor-interval": Meaning(ignored="each micro-batch looks for new files"),
    "source.path.regex-pattern": Meaning(refused="'glob' = '*.csv' says which files are read"),
    "parquet.compression": Meaning("compression", str.lower),
    "json.timestamp-format.standard": Meaning(refused="'timestamp_format' says how times are written"),
    "sink.parallelism": _PARALLEL,
    "auto-compaction": Meaning(ignored=_WRITES),
    "compaction.file-size": Meaning(ignored=_WRITES),
}
_FILE_PREFIXES: Final = {
    "sink.rolling-policy.": _WRITES,
    "sink.partition-commit.": "a partition's files are there with their micro-batch",
    "partition.time-extractor.": "a partition's files are there with their micro-batch",
}
_JDBC: Final[Mapping[str, Meaning]] = {
    "table-name": Meaning("table"),
    "username": Meaning("user"),
    "lookup.cache.ttl": Meaning("refresh", _duration),
    "lookup.partial-cache.expire-after-write": Meaning("refresh", _duration),
    "lookup.cache": Meaning(ignored="'refresh' says how often the table is read"),
    "lookup.cache.max-rows": Meaning(ignored="the whole table is read"),
    "lookup.partial-cache.max-rows": Meaning(ignored="the whole table is read"),
    "lookup.partial-cache.cache-missing-key": Meaning(ignored="the whole table is read"),
    "lookup.max-retries": Meaning(ignored="Spark repeats a task that fails"),
    "connection.max-retry-timeout": Meaning(ignored="Spark repeats a task that fails"),
    "scan.fetch-size": Meaning("option.fetchsize"),
    "scan.auto-commit": Meaning(ignored="Spark reads with it off"),
    "sink.parallelism": _PARALLEL,
    "sink.max-retries": Meaning(ignored="Spark repeats a task that fails"),
    **{f"sink.buffer-flush.{name}": Meaning(ignored=_WRITES) for name in ("interval", "max-rows")},
}
_PRINT: Final = {
    name: Meaning(ignored="rows are printed as a table")
    for name in ("print-identifier", "standard-error", "sink.parallelism")
}
_ICEBERG: Final = dict.fromkeys(
    (
        "catalog-name",
        "catalog-type",
        "catalog-impl",
        "catalog-database",
        "catalog-table",
        "warehouse",
        "uri",
        "hive-conf-dir",
    ),
    Meaning(refused="'table' = 'database.name', and catalog.type, catalog.uri and so on are the catalog's properties"),
)
_DATAGEN: Final = {"scan.parallelism": _PARALLEL}

_STARTS: Final = ("earliest-offset", "latest-offset", "timestamp", "specific-offsets", "group-offsets")
_FILE_FORMATS: Final = ("csv", "json", "parquet")

FOREIGN: Final[Mapping[str, str]] = {
    "faker": "rows are generated by datagen: 'fields.NAME.values' = 'a, b, c', .min, .max, .length",
    "nexmark": "rows are generated by datagen, and Nexmark's own by python -m benchmarks.nexmark",
    "hudi": "write a delta or parquet table",
    "paimon": "write a delta or parquet table",
    "mysql-cdc": "send the changes to Kafka with Debezium, and read 'kafka' with 'format' = 'debezium-json'",
    "postgres-cdc": "send the changes to Kafka with Debezium, and read 'kafka' with 'format' = 'debezium-json'",
    "mongodb-cdc": "send the changes to Kafka with Debezium, and read 'kafka' with 'format' = 'debezium-json'",
    "elasticsearch-7": "write 'upsert-kafka', and let Kafka Connect's sink bring it to Elasticsearch",
    "elasticsearch-6": "write 'upsert-kafka', and let Kafka Connect's sink bring it to Elasticsearch",
    "opensearch": "write 'upsert-kafka', and let Kafka Connect's sink bring it to OpenSearch",
    "kinesis": "read it with Spark, and give the stream to gpu_ops.sql",
    "socket": "read it with Spark: spark.readStream.format('socket'), and give the stream to gpu_ops.sql",
}
"""Connectors that are not here, and what to write instead."""


def own_options(file: Text, table: TableText, kind: Literal["source", "sink"], notes: list[Note]) -> TableText:
    """A table with our names for the options that have Flink's.

    Args:
        file: the job's text, for errors.
        table: as it is written down.
        kind: whether it is read or written.
        notes: gets what has no effect, or another one.

    Raises:
        JobError: an option whose meaning is not here; says what to write instead.
    """
    by_name = {setting.name.text.lower(): setting for setting in table.settings}
    old = next((setting for name, setting in by_name.items() if name.startswith("connector.")), None)
    if old is not None:
        problem = "these are the options of Flink before 1.11: write 'connector' = 'kafka', 'topic' = ... and so on"
        raise file.error(problem, old.name.at)
    named = by_name.get("connector")
    if named is None:
        return table
    connector = named.value.text.lower()
    if connector in FOREIGN:
        raise file.error(f"there is no connector {connector!r}; {FOREIGN[connector]}", named.value.at)
    settings = list(table.settings)
    if connector == "filesystem":
        connector = _file_format(file, named, by_name)
        settings = [setting for setting in settings if setting not in (named, by_name["format"])]
        settings.append(_set("connector", connector, named))
        if connector in ("csv", "json") and kind == "source" and f"{connector}.ignore-parse-errors" not in by_name:
            settings.append(_set("mode", "FAILFAST", named))
        meanings, prefixes = _FILES, _FILE_PREFIXES
    elif connector in ("kafka", "upsert-kafka"):
        meanings, prefixes = (_KAFKA_SOURCE if kind == "source" else _KAFKA_SINK), {}
        meanings = {**meanings, **_UPSERTS} if kind == "source" and connector == "upsert-kafka" else meanings
        settings = _of_startup(file, by_name, settings) if kind == "source" else settings
    elif connector == "jdbc":
        meanings, prefixes = _JDBC, {}
        if kind == "source" and "table-name" in by_name and "scan" not in by_name:
            settings.append(_set("scan", "once", named))  # what Flink's does
    elif connector == "print":
        settings[settings.index(named)] = _set("connector", "console", named)
        meanings, prefixes = _PRINT, {}
    else:
        meanings, prefixes = {"datagen": _DATAGEN, "iceberg": _ICEBERG}.get(connector, {}), {}
    read = _read(file, settings, meanings, prefixes, notes)
    own = [_with_prefix(setting) if "kafka" in connector else setting for setting in read]
    if connector in ("kafka", "upsert-kafka"):
        own = _with_formats(file, connector, own, named, kind)
    return dataclasses.replace(table, settings=tuple(own))


def _set(name: str, value: str, like: Setting) -> Setting:
    return Setting(Word(name, like.name.at), Word(value, like.value.at))


def _file_format(file: Text, named: Setting, by_name: Mapping[str, Setting]) -> str:
    format_ = by_name.get("format")
    if format_ is None:
        raise file.error("filesystem needs the option 'format'", named.value.at)
    if format_.value.text.lower() not in _FILE_FORMATS:
        problem = f"files are {', '.join(_FILE_FORMATS)}, not {format_.value.text!r}"
        raise file.error(f"{problem}: Spark reads others, and gpu_ops.sql takes the stream", format_.value.at)
    return format_.value.text.lower()


def _of_startup(file: Text, by_name: Mapping[str, Setting], settings: list[Setting]) -> list[Setting]:
    """``scan.startup.mode`` and its companions, as Spark's options."""
    mode = by_name.get("scan.startup.mode")
    rest = [setting for setting in settings if not setting.name.text.lower().startswith("scan.startup.")]
    if mode is None:
        return settings
    needed = {"timestamp": "scan.startup.timestamp-millis", "specific-offsets": "scan.startup.specific-offsets"}
    text = mode.value.text.lower()
    companion = by_name.get(needed.get(text, ""))
    if text not in _STARTS:
        raise file.error(f"scan.startup.mode is one of {', '.join(_STARTS)}, not {text!r}", mode.value.at)
    if text in needed and companion is None:
        raise file.error(f"{text} needs the option {needed[text]!r}", mode.value.at)
    if text == "group-offsets":
        reset = by_name.get("properties.auto.offset.reset")
        if reset is None or reset.value.text not in ("earliest", "latest"):
            raise file.error(
                "offsets are in the checkpoint, not in a group of consumers: write earliest-offset or latest-offset "
                "for the first run, or add 'properties.auto.offset.reset'",
                mode.value.at,
            )
        return [*rest, _set("starting_offsets", reset.value.text, mode)]
    if companion is None:
        return [*rest, _set("starting_offsets", text.removesuffix("-offset"), mode)]
    if text == "timestamp":
        return [
            *rest,
            _set("option.startingTimestamp", companion.value.text, companion),
            _set("option.startingOffsetsByTimestampStrategy", "latest", companion),
        ]
    topic = by_name["topic"].value.text if "topic" in by_name else ""
    with file.errors_at(companion.value.at):
        offsets = _offsets(companion.value.text)
    return [*rest, _set("starting_offsets", f"{{{json.dumps(topic)}: {offsets}}}", companion)]


def _with_prefix(setting: Setting) -> Setting:
    """An option of Kafka's client, under Spark's name for it."""
    name = setting.name.text
    if not name.startswith("properties."):
        return setting
    return Setting(Word(f"kafka.{name.removeprefix('properties.')}", setting.name.at), setting.value)


def _with_formats(
    file: Text, connector: str, settings: list[Setting], named: Setting, kind: Literal["source", "sink"]
) -> list[Setting]:
    """Options of a topic, where the connector says the format by itself, or has its own default."""
    formats = [setting for setting in settings if setting.name.text == "format"]
    if len(formats) > 1:
        raise file.error("'format' and 'value.format' are the same: leave one out", formats[1].name.at)
    if connector != "upsert-kafka":
        return settings
    if formats and formats[0].value.text != "json":
        raise file.error("upsert-kafka has keys and values in json", formats[0].value.at)
    others = [setting for setting in settings if setting.name.text != "format"]
    if kind == "sink":
        return [setting for setting in others if setting.name.text != "key"]
    names = {setting.name.text for setting in others}
    begins = {"starting_offsets", "option.startingTimestamp"} & names
    return others if begins else [*others, _set("starting_offsets", "earliest", named)]


def _read(
    file: Text,
    settings: Iterable[Setting],
    meanings: Mapping[str, Meaning],
    prefixes: Mapping[str, str],
    notes: list[Note],
) -> list[Setting]:
    """Settings of Flink's as ours; those that are none of Flink's stay."""
    read = list[Setting]()
    for setting in settings:
        name = setting.name.text.lower()
        meaning = meanings.get(name)
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
        if meaning is None and prefix is not None:
            meaning = Meaning(ignored=prefixes[prefix])
        if meaning is None:
            read.append(setting)
            continue
        if meaning.refused:
            raise file.error(f"{setting.name.text} is not understood: {meaning.refused}", setting.name.at)
        try:
            value = meaning.read(setting.value.text)
        except DescriptionError as error:
            raise file.error(f"{setting.name.text}: {error}", setting.value.at) from error
        if meaning.name:
            read.append(Setting(Word(meaning.name, setting.name.at), dataclasses.replace(setting.value, text=value)))
        if meaning.ignored:
            notes.append(Note(f"{setting.name.text} has no effect here: {meaning.ignored}", setting.name.at))
        elif meaning.differs:
            notes.append(Note(f"{setting.name.text}: {meaning.differs}", setting.name.at))
    return read


# --- SET ------------------------------------------------------------------------------------------

_STATE: Final = "SET 'state' and SET 'checkpoint' say where they are"
_SETTINGS: Final[Mapping[str, Meaning]] = {
    "pipeline.name": Meaning("name"),
    "table.local-time-zone": Meaning("spark.sql.session.timeZone"),
    "parallelism.default": Meaning("partitions"),
    "table.exec.resource.default-parallelism": Meaning("partitions"),
    "table.exec.state.ttl": Meaning("ttl", _duration),
    "table.exec.source.idle-timeout": Meaning("idle_timeout", _duration),
    "execution.runtime-mode": Meaning(
        "",
        _one_of({"streaming": "", "automatic": ""}, "SET 'emit' = 'at_end' gives the result alone"),
        ignored="it is the default",
    ),
    "execution.checkpointing.interval": Meaning(ignored="each micro-batch is one, and 'trigger' says how often"),
    "execution.checkpointing.mode": Meaning(ignored="each micro-batch is a checkpoint"),
    "execution.checkpointing.dir": Meaning(ignored=_STATE),
    "table.sql-dialect": Meaning("", _one_of({"default": ""}), ignored="it is the default"),
    "table.dml-sync": Meaning(ignored="all INSERTs are one query"),
    "table.exec.mini-batch.enabled": Meaning(
        "emit", _one_of({"true": "per_batch", "false": "per_event"})
    ),
    "table.exec.mini-batch.size": Meaning(ignored="a micro-batch has what its sources give it"),
    "table.exec.mini-batch.allow-latency": Meaning(ignored="'trigger' says how often a micro-batch begins"),
    "table.exec.sink.not-null-enforcer": Meaning(ignored="NOT NULL columns of sinks take what the query gives"),
    "table.exec.sink.upsert-materialize": Meaning(ignored="views are kept by their key"),
}  # fmt: skip
_SETTING_PREFIXES: Final[Mapping[str, str]] = {
    "sql-client.": "it is about Flink's client",
    "table.optimizer.": "there is one way to run each query; see the option multi_way",
    "execution.checkpointing.": "each micro-batch is a checkpoint",
    "state.": _STATE,
    "restart-strategy": "a restart goes on where the job stopped",
    **dict.fromkeys(
        ("pipeline.", "taskmanager.", "jobmanager.", "cluster.", "rest.", "metrics.", "akka.", "pekko.", "env.",
         "yarn.", "kubernetes.", "heartbeat.", "high-availability", "execution.target", "execution.attached"),
        _CLUSTER,
    ),
}  # fmt: skip
OF_SOURCES: Final = ("ttl", "idle_timeout")
"""Settings of a job that are options of its sources."""


def own_settings(
    file: Text, settings: Iterable[Setting], notes: list[Note]
) -> tuple[list[Setting], dict[str, Setting]]:
    """Settings of a job with our names, and those that its sources have where they have none of their own.

    Args:
        file: the job's text, for errors.
        settings: as they are written down.
        notes: gets what has no effect.

    Raises:
        JobError: a setting that is not understood.
    """
    read = _read(file, settings, _SETTINGS, _SETTING_PREFIXES, notes)
    of_sources = {setting.name.text: setting for setting in read if setting.name.text in OF_SOURCES}
    of_sources = {name: setting for name, setting in of_sources.items() if not setting.value.text.startswith("0 ")}
    return [setting for setting in read if setting.name.text not in OF_SOURCES], of_sources
