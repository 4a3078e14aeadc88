"""The settings of a job, and of the tables that it reads and writes. Names are ours, Spark's stand behind them.

Each is known, is set once, and has a value that it can have.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import re
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin

from gpu_ops.backends import Backend
from gpu_ops.descriptions.description import Emit
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.times import parse_duration
from gpu_ops.errors import DescriptionError, closest
from gpu_ops.fields import hints_of
from gpu_ops.jobs.sql_tables import Setting, TableText
from gpu_ops.jobs.sql_text import Text
from gpu_ops.messages.rows import MESSAGE_FORMATS
from gpu_ops.state.address import StateAddress

SettingKind = Literal[
    "text", "count", "length", "flag", "path", "state", "duration", "names", "list", "rate", "share", "time"
]


@dataclasses.dataclass(frozen=True)
class Option:
    """Something that can be set.

    Attributes:
        kind: text, a path relative to the job's file, a state folder likewise, a duration, names separated by commas or
            any list of such; or one of `_WANTED`.
        spark: Spark's name for it; None where that is ours in camel case, empty for what Spark does not see.
        required: whether there is no default.
        values: what it may be; empty for anything.
    """

    kind: SettingKind = "text"
    spark: str | None = None
    required: bool = False
    values: tuple[str, ...] = ()

    def spark_name(self, name: str) -> str:
        """Spark's name for an option of this name; empty for what Spark does not see."""
        first, *others = name.split("_")
        return first + "".join(map(str.capitalize, others)) if self.spark is None else self.spark


def _between(number: Any, least: float, most: float) -> Any:
    if not least <= number <= most:
        raise ValueError(number)
    return number


def _whole(text: str, most: float = float("inf")) -> int:
    return int(_between(int(text) if text.isascii() and text.isdigit() else 0, 1, most))


def _share(text: str) -> int:
    """Reads a share of a hundred."""
    share = _between(Decimal(text) * 100, 0, 100)
    return int(_between(int(share), share, share))


def _time(text: str) -> dt.datetime:
    time = dt.datetime.fromisoformat(text)
    return time if time.tzinfo is not None else time.replace(tzinfo=dt.UTC)


_WANTED: Final[Mapping[SettingKind, tuple[str, Callable[[str], Any]]]] = {
    "count": ("a whole number above zero", _whole),
    "length": ("a whole number from 1 to 1000000", lambda text: _whole(text, 1_000_000)),
    "flag": ("true or false", lambda text: ("false", "true").index(text.lower()) == 1),
    "rate": ("a number from 0 to 1", lambda text: float(_between(float(text), 0, 1))),
    "share": ("a number from 0 to 1 in steps of 0.01", _share),
    "time": ("a time like '2026-01-31 12:00:00'", _time),
}
"""What a value is, in words, and how it is read; where it is not, that is an error of Python's."""


def value_of(name: str, option: Option, text: str, folder: Path = Path()) -> Any:
    """A setting's value, durations in milliseconds.

    Args:
        name: the setting's, for errors.
        option: what it may be.
        text: as written.
        folder: where relative paths begin.

    Raises:
        DescriptionError: it cannot have this value.
    """
    if option.values and text not in option.values:
        raise DescriptionError(f"{name} is one of {', '.join(option.values)}, not {text!r}")
    match option.kind:
        case "duration":
            return parse_duration(text)
        case "path":
            return text if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", text) else str(folder / text)
        case "state":
            return StateAddress.of(text, seen_from=folder)
        case "names" | "list":
            return tuple(part.strip() for part in text.split(",") if part.strip() or option.kind == "list")
        case "text":
            return text
    expected, read = _WANTED[option.kind]
    try:
        return read(text)
    except (ValueError, ArithmeticError):
        raise DescriptionError(f"{name} is {expected}, not {text!r}") from None


# --- what can be set ------------------------------------------------------------------------------

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


def _of_fields(kind: type, *names: str) -> dict[str, Option]:
    """Options as fields of a class are: what they may be by the fields' types; durations are called so in the end."""
    hints = {name: hints_of(kind)[name] for name in names}
    return {
        name.removesuffix("_ms"): DURATION
        if name.endswith("_ms")
        else _one_of(*(get_args(hint) if get_origin(hint) is Literal else ()))
        for name, hint in hints.items()
    }


OF_SOURCE: Final[Mapping[str, Option]] = {
    **_of_fields(Input, "row_kind", "updates", "ttl_ms", "sequence_by", "idle_timeout_ms"),
    "bad_rows": _one_of("fail", "drop"),
    "scan": _one_of("continuous", "once"),
    "refresh": DURATION,
}
"""What any source has besides its connector's options."""

OF_SINK: Final[Mapping[str, Option]] = {"row_kind": OURS}
"""What any sink has besides."""

_PATH: Final = {"path": Option("path", required=True)}
_LIMITS: Final = {"max_files_per_trigger": COUNT, "max_bytes_per_trigger": TEXT}
_READER: Final = _one_of("spark", "arrow")
_FILES: Final = {
    **_PATH,
    **_LIMITS,
    "glob": Option(spark="pathGlobFilter"),
    "recursive": Option("flag", "recursiveFileLookup"),
    "latest_first": FLAG,
    "max_file_age": TEXT,
    "reader": _READER,
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

_ICEBERG: Final = {"table": Option(required=True), "catalog": TEXT}

SOURCES: Final[Mapping[str, Mapping[str, Option]]] = {
    "parquet": _FILES,
    "json": {**_FILES, **_LINES},
    "csv": {**_FILES, **_LINES, **_CSV},
    "delta": {**_PATH, **_FEED, **_LIMITS, "reader": _READER},
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
    "upsert-kafka": {
        **_BROKER,
        "topic": Option(spark="subscribe", required=True),
        "key_format": _one_of("json", "raw"),
        "starting_offsets": TEXT,
        "max_offsets_per_trigger": COUNT,
        "fail_on_data_loss": FLAG,
    },
    "jdbc": _TABLE,
    "iceberg": {**_ICEBERG, "max_snapshots_per_trigger": COUNT},
    "rate": {"rows_per_second": COUNT, "ramp_up_time": TEXT, "num_partitions": COUNT},
    "datagen": {
        "rows_per_second": Option("count", ""),
        "number_of_rows": Option("count", ""),
        "seed": Option("count", ""),
        "start_time": Option("time", ""),
        "share_of_updates": Option("share", ""),
        "share_of_deletes": Option("share", ""),
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
    "iceberg": _ICEBERG,
    "console": {"rows": Option("count", "numRows"), "truncate": TEXT},
    "memory": {"table": Option(spark="", required=True)},
    "blackhole": {},
}
"""By connector, the options of a sink."""

FORMATS: Final = {"blackhole": "noop"}
"""What Spark calls a connector, where it calls it otherwise."""

UNRESUMED: Final = ("console", "memory", "blackhole")
"""Sinks that keep nothing, so a job may begin anew each time."""

# --- what is set ----------------------------------------------------------------------------------

_PACKAGES: Final = "spark.packages"
_PREFIX: Final = "option."


@dataclasses.dataclass(frozen=True)
class JobSettings:
    """The settings of a job file.

    Attributes:
        values: ours, by name.
        spark: Spark's, by its names.
        at: where a value stands in the file, by name.
    """

    values: dict[str, Any]
    spark: dict[str, str]
    at: dict[str, int]


def of_job(file: Text, settings: Iterable[Setting]) -> JobSettings:
    """The settings of a job.

    Raises:
        JobError: an unknown one, one set twice, or a value that it cannot have.
    """
    unknown = "a job has no option {!r}; there are {}; spark.NAME sets one of Spark's own"
    values = _read(file, settings, JOB, ("spark.",), unknown)
    if _PACKAGES in values.spark:
        values.spark["spark.jars.packages"] = values.spark.pop(_PACKAGES)
    return values


def of_table(file: Text, table: TableText, kind: Literal["source", "sink"]) -> tuple[str, JobSettings]:
    """A table's connector and its other settings.

    Raises:
        JobError: no connector or an unknown one; of the others as `of_job`, or one is missing.
    """
    connectors, common = (SOURCES, OF_SOURCE) if kind == "source" else (SINKS, OF_SINK)
    named = next((setting for setting in table.settings if setting.name.text.lower() == "connector"), None)
    if named is None:
        raise file.error(f"{table.name.text!r} has no connector; there are {', '.join(connectors)}", table.name.at)
    text, at = named.value.text, named.value.at
    connector = text.lower()
    if connector not in connectors:
        hint = f"there are {closest(text, connectors)}"
        elsewhere = connector in SOURCES or connector in SINKS
        raise file.error(f"{f'{text} is no {kind}' if elsewhere else f'there is no connector {text!r}'}; {hint}", at)
    options = connectors[connector]
    others = [setting for setting in table.settings if setting is not named]
    unknown = f"{connector} has no option {{!r}}; there are {{}}; {_PREFIX}NAME hands any other to Spark"
    prefixes = (_PREFIX, "kafka.") if "kafka" in connector else (_PREFIX,)
    if connector == "iceberg":
        unknown = "iceberg has no option {!r}; there are {}; and catalog.NAME for the catalog's own"
        prefixes = ("catalog.",)
    if connector == "datagen":
        unknown = "datagen has no option {!r}; there are {}; and fields.COLUMN.kind, .min, .max and so on"
        prefixes = ("fields.",)
    values = _read(file, others, {**options, **common}, prefixes, unknown)
    for name, option in options.items():
        if option.required and name not in values.at:
            raise file.error(f"{connector} needs the option {name!r}", at)
    return connector, values


def _read(
    file: Text, settings: Iterable[Setting], known: Mapping[str, Option], prefixes: tuple[str, ...], unknown: str
) -> JobSettings:
    """Settings by their names; what begins with a prefix is Spark's, and not looked at."""
    values = JobSettings({}, {}, {})
    for setting in settings:
        name, value = setting.name.text, setting.value
        own = name.startswith(prefixes)
        name = name if own else name.lower().replace("-", "_")
        if name in values.at:
            raise file.error(f"{setting.name.text!r} is set twice", setting.name.at)
        values.at[name] = value.at
        if own:
            values.spark[name.removeprefix(_PREFIX)] = value.text
            if value.secret:
                file.secrets.options.add(name.removeprefix(_PREFIX))
            continue
        if name not in known:
            raise file.error(unknown.format(setting.name.text, closest(setting.name.text, known)), setting.name.at)
        with file.errors_at(value.at):
            checked = value_of(name, known[name], value.text, file.path.resolve().parent)
        of_spark = known[name].spark_name(name)
        if value.secret:
            file.secrets.options.add(of_spark or name)
        if of_spark:
            values.spark[of_spark] = str(checked).lower() if isinstance(checked, bool) else str(checked)
        else:
            values.values[name] = checked
    return values
