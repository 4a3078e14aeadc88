"""What can be set: of a job, and of what is read and written. Names are ours, Spark's stand behind them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final, Literal, get_args

from gpu_ops.backends import Backend
from gpu_ops.descriptions.description import Emit
from gpu_ops.descriptions.inputs import Updates

Kind = Literal["text", "count", "flag", "path", "state", "duration", "names"]


@dataclasses.dataclass(frozen=True)
class Option:
    """Something that can be set.

    Attributes:
        spark: Spark's name for it; empty for one that Spark does not see.
        kind: text, a whole number above zero, true or false, a path relative to the job's file, a state folder
            likewise, a duration, or names separated by commas.
        required: whether there is no default.
        values: what it may be; empty for anything.
    """

    spark: str = ""
    kind: Kind = "text"
    required: bool = False
    values: tuple[str, ...] = ()


JOB: Final[Mapping[str, Option]] = {
    "state": Option(kind="state"),
    "checkpoint": Option(kind="path"),
    "emit": Option(values=get_args(Emit)),
    "partitions": Option(kind="count"),
    "backend": Option(values=get_args(Backend)),
    "name": Option(),
    "multi_way": Option(values=("auto", "never")),
    "trigger": Option(kind="duration"),
    "master": Option(),
}
"""Settings of a job."""

OF_SOURCE: Final[Mapping[str, Option]] = {
    "row_kind": Option(),
    "updates": Option(values=get_args(Updates)),
    "ttl": Option(kind="duration"),
    "sequence_by": Option(),
    "bad_rows": Option(values=("fail", "drop")),
    "idle_timeout": Option(kind="duration"),
}
"""What any source has besides its connector's options."""

OF_SINK: Final[Mapping[str, Option]] = {"row_kind": Option()}
"""What any sink has besides."""

_PATH: Final = {"path": Option("path", "path", required=True)}
_FILES: Final = {
    **_PATH,
    "max_files_per_trigger": Option("maxFilesPerTrigger", "count"),
    "max_bytes_per_trigger": Option("maxBytesPerTrigger"),
    "glob": Option("pathGlobFilter"),
    "recursive": Option("recursiveFileLookup", "flag"),
    "latest_first": Option("latestFirst", "flag"),
    "max_file_age": Option("maxFileAge"),
    "reader": Option(values=("spark", "arrow")),
}
_TEXT: Final = {
    "multi_line": Option("multiLine", "flag"),
    "date_format": Option("dateFormat"),
    "timestamp_format": Option("timestampFormat"),
    "mode": Option("mode", values=("PERMISSIVE", "DROPMALFORMED", "FAILFAST")),
    "encoding": Option("encoding"),
}
_CSV: Final = {
    "header": Option("header", "flag"),
    "delimiter": Option("sep"),
    "quote": Option("quote"),
    "escape": Option("escape"),
    "null_value": Option("nullValue"),
}
_WRITTEN: Final = {"compression": Option("compression")}
_BROKER: Final = {"bootstrap_servers": Option("kafka.bootstrap.servers", required=True)}

SOURCES: Final[Mapping[str, Mapping[str, Option]]] = {
    "parquet": _FILES,
    "json": {**_FILES, **_TEXT},
    "csv": {**_FILES, **_TEXT, **_CSV},
    "delta": {
        **_PATH,
        "change_feed": Option("readChangeFeed", "flag"),
        "starting_version": Option("startingVersion"),
        "starting_timestamp": Option("startingTimestamp"),
        "max_files_per_trigger": Option("maxFilesPerTrigger", "count"),
        "max_bytes_per_trigger": Option("maxBytesPerTrigger"),
    },
    "kafka": {
        **_BROKER,
        "topic": Option("subscribe", required=True),
        "format": Option(values=("json", "debezium-json")),
        "starting_offsets": Option("startingOffsets"),
        "max_offsets_per_trigger": Option("maxOffsetsPerTrigger", "count"),
        "fail_on_data_loss": Option("failOnDataLoss", "flag"),
    },
    "rate": {
        "rows_per_second": Option("rowsPerSecond", "count"),
        "ramp_up_time": Option("rampUpTime"),
        "num_partitions": Option("numPartitions", "count"),
    },
}
"""By connector, the options of a source."""

SINKS: Final[Mapping[str, Mapping[str, Option]]] = {
    "parquet": {**_PATH, **_WRITTEN},
    "json": {**_PATH, **_WRITTEN, "date_format": Option("dateFormat"), "timestamp_format": Option("timestampFormat")},
    "csv": {
        **_PATH, **_WRITTEN, **_CSV,
        "date_format": Option("dateFormat"), "timestamp_format": Option("timestampFormat"),
    },
    "delta": {**_PATH, "merge_schema": Option("mergeSchema", "flag")},
    "kafka": {**_BROKER, "topic": Option("topic", required=True), "key": Option(kind="names")},
    "console": {"rows": Option("numRows", "count"), "truncate": Option("truncate")},
    "memory": {"table": Option(required=True)},
    "blackhole": {},
}  # fmt: skip
"""By connector, the options of a sink."""

FORMATS: Final = {"blackhole": "noop"}
"""What Spark calls a connector, where it calls it otherwise."""

UNRESUMED: Final = ("console", "memory", "blackhole")
"""Sinks that keep nothing, so a job may begin anew each time."""

FOREIGN: Final = {
    "filesystem": "name the format instead: parquet, json or csv",
    "print": "it is called console here",
    "datagen": "rate makes rows with a timestamp and a value",
    "upsert-kafka": "kafka takes the changelog as it is, with its row kinds",
}
"""What Flink has and we have not, or have under another name."""

DELTA_SETTINGS: Final = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}
"""What Delta asks a Spark session for."""

_DELTA: Final = {"3.5": "io.delta:delta-spark_2.12:3.3.2", "4.0": "io.delta:delta-spark_2.13:4.0.1"}


def package(connector: str, spark: str) -> str | None:
    """The Maven package that a connector needs.

    Args:
        connector: its name.
        spark: Spark's version.

    Returns:
        Its coordinates, or None for one that Spark brings itself.
    """
    line = ".".join(spark.split(".")[:2])
    if connector == "kafka":
        return f"org.apache.spark:spark-sql-kafka-0-10_{'2.12' if line < '4' else '2.13'}:{spark}"
    if connector == "delta":
        return _DELTA.get(line, f"io.delta:delta-spark_{line}_2.13:4.4.0")
    return None
