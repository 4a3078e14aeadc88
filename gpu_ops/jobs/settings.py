"""The settings of a table or a job: each is known, is set once, and has a value that it can have."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from gpu_ops.descriptions.times import parse_duration
from gpu_ops.errors import DescriptionError
from gpu_ops.jobs.connectors import FOREIGN, JOB, OF_SINK, OF_SOURCE, SINKS, SOURCES, Option
from gpu_ops.jobs.text import Setting, TableText, Text
from gpu_ops.query.errors import closest
from gpu_ops.state.address import StateAddress

_PACKAGES: Final = "spark.packages"
_PREFIX: Final = "option."


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is set.

    Attributes:
        values: ours, by name.
        spark: Spark's, by its names.
        at: where a value stands in the file, by name.
    """

    values: dict[str, Any]
    spark: dict[str, str]
    at: dict[str, int]


def of_job(file: Text, settings: Iterable[Setting]) -> Settings:
    """The settings of a job.

    Raises:
        JobError: an unknown one, one set twice, or a value that it cannot have.
    """
    unknown = "a job has no option {!r}; there are {}; spark.NAME sets one of Spark's own"
    found = _read(file, settings, JOB, ("spark.",), unknown)
    if _PACKAGES in found.spark:
        found.spark["spark.jars.packages"] = found.spark.pop(_PACKAGES)
    return found


def of_table(file: Text, table: TableText, kind: Literal["source", "sink"]) -> tuple[str, Settings]:
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
        hint = FOREIGN.get(connector, f"there are {closest(text, connectors)}")
        elsewhere = connector in SOURCES or connector in SINKS
        raise file.error(f"{f'{text} is no {kind}' if elsewhere else f'there is no connector {text!r}'}; {hint}", at)
    options = connectors[connector]
    others = [setting for setting in table.settings if setting is not named]
    unknown = f"{connector} has no option {{!r}}; there are {{}}; {_PREFIX}NAME hands any other to Spark"
    prefixes = (_PREFIX, "kafka.") if "kafka" in connector else (_PREFIX,)
    if connector == "datagen":
        unknown = "datagen has no option {!r}; there are {}; and fields.COLUMN.kind, .min, .max and so on"
        prefixes = ("fields.",)
    found = _read(file, others, {**options, **common}, prefixes, unknown)
    for name, option in options.items():
        if option.required and name not in found.at:
            raise file.error(f"{connector} needs the option {name!r}", at)
    return connector, found


def _read(
    file: Text, settings: Iterable[Setting], known: Mapping[str, Option], prefixes: tuple[str, ...], unknown: str
) -> Settings:
    """Settings by their names; what begins with a prefix is Spark's, and not looked at."""
    found = Settings({}, {}, {})
    for setting in settings:
        name, value = setting.name.text, setting.value
        own = name.startswith(prefixes)
        name = name if own else name.lower().replace("-", "_")
        if name in found.at:
            raise file.error(f"{setting.name.text!r} is set twice", setting.name.at)
        found.at[name] = value.at
        if own:
            found.spark[name.removeprefix(_PREFIX)] = value.text
            continue
        if name not in known:
            raise file.error(unknown.format(setting.name.text, closest(setting.name.text, known)), setting.name.at)
        try:
            checked = value_of(name, known[name], value.text, file.path.resolve().parent)
        except DescriptionError as error:
            raise file.error(str(error), value.at) from None
        of_spark = known[name].spark_name(name)
        if of_spark:
            found.spark[of_spark] = str(checked)
        else:
            found.values[name] = checked
    return found


def value_of(name: str, option: Option, text: str, folder: Path) -> Any:
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
        case "count":
            if not (text.isascii() and text.isdigit() and int(text) > 0):
                raise DescriptionError(f"{name} is a whole number above zero, not {text!r}")
            return int(text)
        case "flag":
            if text.lower() not in ("true", "false"):
                raise DescriptionError(f"{name} is true or false, not {text!r}")
            return text.lower()
        case "duration":
            return parse_duration(text)
        case "path":
            return text if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", text) else str(folder / text)
        case "state":
            return StateAddress.of(text, seen_from=folder)
        case "names":
            return tuple(part.strip() for part in text.split(",") if part.strip())
    return text
