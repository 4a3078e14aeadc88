"""What can be set: of a job, and of what is read and written. Names are ours, Spark's stand behind them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final, Literal, get_args

from gpu_ops.backends import Backend
from gpu_ops.descriptions.description import Emit
from gpu_ops.descriptions.inputs import Updates
from gpu_ops.messages.rows import MESSAGE_FORMATS

Kind = Literal["text", "count", "flag", "path", "state", "duration", "names"]


@dataclasses.dataclass(frozen=True)
class Option:
    """Something that can be set.

    Attributes:
        kind: text, a whole number above zero, true or false, a path relative to the job's file, a state folder
            likewise, a duration, or names separated by commas.
        spark: Spark's name for it; None where that is ours in camel case, empty for what Spark does not see.
        required: whether there is no default.
        values: what it may be; empty for anything.
    """

    kind: Kind = "text"
    spark: str | None = None
    required: bool = False
    values: tuple[str, ...] = ()

    def spark_name(self, name: str) -> str:
        """Spark's name for an option of this name; empty for what Spark does not see."""
        first, *others = name.split("_")
        return first + "".join(map(str.capitalize, others)) if self.spark is None else self.spark


TEXT, COUNT, FLAG = Option(), Option("count"), Option("flag")
"""Options of Spark's."""

OURS, DURATION = Option(spark=""), Option("duration", "")


def _one_of(*values: str) -> Option:
    return Option(spark="", values=values)


JOB: Final[Mapping[str, Option]] = {
    "state": Option("state", ""),
    "checkpoint": Option("path", ""),
    "emit": _one_of(*get_args(Emit)),
    "partitions": Option("count", ""),
    "backend": _one_of(*get_args(Backend)),
    "name": OURS,
    "multi_way": _one_of("auto", "never"),
    "backlog": Option("flag", ""),
    "trigger": DURATION,
    "master": OURS,
}
"""Settings of a job."""

OF_SOURCE: Final[Mapping[str, Option]] = {
    "row_kind": OURS,
    "updates": _one_of(*get_args(Updates)),
    "ttl": DURATION,
    "sequence_by": OURS,
    "bad_rows": _one_of("fail", "drop"),
    "idle_timeout": DURATION,
    "scan": _one_of("continuous", "once"),
    "refresh": DURATION,
}
"""What any source has besides its connector's options."""

OF_SINK: Final[Mapping[str, Option]] = {"row_kind": OURS}
"""What any sink has besides."""

_PATH: Final = {"path": Option("path", required=True)}
_LIMITS: Final = {"max_files_per_trigger": COUNT, "max_bytes_per_trigger": TEXT}
_FILES: Final = {
    **_PATH,
    **_LIMITS,
    "glob": Option(spark="pathGlobFilter"),
    "recursive": Option("flag", "recursiveFileLookup"),
    "latest_first": FLAG,
    "max_file_age": TEXT,
    "reader": _one_of("spark", "arrow"),
}
_TIMES: Final = {"date_format": TEXT, "timestamp_format": TEXT}
_MODES: Final = ("PERMISSIVE", "DROPMALFORMED", "FAILFAST")
_LINES: Final = {"multi_line": FLAG, **_TIMES, "mode": Option(values=_MODES), "encoding": TEXT}
_CSV: Final = {"header": FLAG, "delimiter": Option(spark="sep"), "quote": TEXT, "escape": TEXT, "null_value": TEXT}
_WRITTEN: Final = {**_PATH, "compression": TEXT}
_BY_TASKS: Final = {"partition_by": Option("names", ""), "file_bytes": Option("count", "")}
_WRITER: Final = {"writer": _one_of("spark", "arrow"), **_BY_TASKS}
_BROKER: Final = {"bootstrap_servers": Option(spark="kafka.bootstrap.servers", required=True)}
_TOPIC: Final = {**_BROKER, "topic": Option(required=True)}
_FEED: Final = {"change_feed": Option("flag", "readChangeFeed"), "starting_version": TEXT, "starting_timestamp": TEXT}

_TABLE: Final = {
    "url": Option(required=True),
    "table": Option(spark="dbtable", required=True),
    "user": TEXT,
    "password": TEXT,
    "driver": TEXT,
}

SOURCES: Final[Mapping[str, Mapping[str, Option]]] = {
    "parquet": _FILES,
    "json": {**_FILES, **_LINES},
    "csv": {**_FILES, **_LINES, **_CSV},
    "delta": {**_PATH, **_FEED, **_LIMITS},
    "kafka": {
        **_BROKER,
        "topic": Option(spark="subscribe", required=True),
        "format": _one_of(*MESSAGE_FORMATS),
        "encoded": Option("names", ""),
        "schema_registry": OURS,
        "unavailable": _one_of("fail", "keep"),
        "unavailable_value": OURS,
        "starting_offsets": TEXT,
        "max_offsets_per_trigger": COUNT,
        "fail_on_data_loss": FLAG,
    },
    "jdbc": _TABLE,
    "rate": {"rows_per_second": COUNT, "ramp_up_time": TEXT, "num_partitions": COUNT},
    "datagen": {
        "rows_per_second": Option("count", ""),
        "number_of_rows": Option("count", ""),
        "seed": Option("count", ""),
        "start_time": OURS,
        "share_of_updates": OURS,
        "share_of_deletes": OURS,
    },
}
"""By connector, the options of a source."""

SINKS: Final[Mapping[str, Mapping[str, Option]]] = {
    "parquet": {**_WRITTEN, **_WRITER},
    "arrow": {**_WRITTEN, **_BY_TASKS},
    "json": {**_WRITTEN, **_TIMES},
    "csv": {**_WRITTEN, **_CSV, **_TIMES},
    "delta": {**_WRITTEN, "merge_schema": FLAG, **_WRITER},
    "kafka": {**_TOPIC, "key": Option("names", ""), "format": _one_of("json", "debezium-json")},
    "upsert-kafka": _TOPIC,
    "jdbc": _TABLE,
    "console": {"rows": Option("count", "numRows"), "truncate": TEXT},
    "memory": {"table": Option(spark="", required=True)},
    "blackhole": {},
}
"""By connector, the options of a sink."""

FORMATS: Final = {"blackhole": "noop"}
"""What Spark calls a connector, where it calls it otherwise."""

UNRESUMED: Final = ("console", "memory", "blackhole")
"""Sinks that keep nothing, so a job may begin anew each time."""

FOREIGN: Final = {
    "filesystem": "name the format instead: parquet, json or csv",
    "print": "it is called console here",
}
"""What Flink has and we have not, or have under another name."""
