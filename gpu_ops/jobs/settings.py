"""The settings of a table or a job: each is known, is said once, and has a value that it can have."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from gpu_ops.jobs.connectors import FOREIGN, SINKS, SOURCES, Option
from gpu_ops.jobs.text import Setting, TableText, Text, Word
from gpu_ops.query.errors import closest

OF_JOB: Final = (
    "state", "checkpoint", "emit", "partitions", "backend", "name", "multi_way", "trigger", "master",
)  # fmt: skip
OF_SOURCE: Final = ("row_kind", "updates", "ttl", "sequence_by", "bad_rows", "idle_timeout")
OF_SINK: Final = ("row_kind",)

_PACKAGES: Final = "spark.packages"
_PREFIX: Final = "option."


class Settings:
    """Hands out settings by their names; `end` refuses those that nobody took.

    Args:
        file: their file.
        said: the settings.
        known: names that there are.
        options: names that a connector has, besides.
        connector: its name; empty for those of a job.
    """

    def __init__(
        self,
        file: Text,
        said: Sequence[Setting],
        known: Sequence[str],
        options: Mapping[str, Option] | None = None,
        connector: str = "",
    ) -> None:
        self.file, self.connector = file, connector
        self._known, self._options = known, options or {}
        self._said: dict[str, Setting] = {}
        for setting in said:
            name = setting.name.text
            if not name.startswith((_PREFIX, "kafka.", "spark.")):
                name = name.lower().replace("-", "_")
            if name in self._said:
                file.fail(f"{setting.name.text!r} is set twice", setting.name.at)
            self._said[name] = setting

    @classmethod
    def of_job(cls, file: Text, said: Sequence[Setting]) -> Settings:
        """Those of a job."""
        return cls(file, said, OF_JOB)

    @classmethod
    def of_source(cls, file: Text, table: TableText) -> Settings:
        """Those of a source.

        Raises:
            JobError: no connector, or an unknown one.
        """
        return cls._of_table(file, table, SOURCES, OF_SOURCE, "source")

    @classmethod
    def of_sink(cls, file: Text, table: TableText) -> Settings:
        """Those of a sink.

        Raises:
            JobError: no connector, or an unknown one.
        """
        return cls._of_table(file, table, SINKS, OF_SINK, "sink")

    @classmethod
    def _of_table(
        cls,
        file: Text,
        table: TableText,
        connectors: Mapping[str, Mapping[str, Option]],
        known: Sequence[str],
        what: str,
    ) -> Settings:
        found = [s for s in table.settings if s.name.text.lower() == "connector"]
        if not found:
            file.fail(f"{table.name.text!r} has no connector; there are {', '.join(connectors)}", table.name.at)
        name = found[0].value
        if name.text.lower() not in connectors:
            hint = FOREIGN.get(name.text.lower(), f"there are {closest(name.text, connectors)}")
            other = SINKS if what == "source" else SOURCES
            only = f"{name.text} is no {what}" if name.text.lower() in other else f"there is no connector {name.text!r}"
            file.fail(f"{only}; {hint}", name.at)
        connector = name.text.lower()
        said = [s for s in table.settings if s is not found[0]]
        settings = cls(file, said, known, connectors[connector], connector)
        for option, how in settings._options.items():
            if how.required and option not in settings._said:
                file.fail(f"{connector} needs the option {option!r}", name.at)
        return settings

    def take(self, name: str) -> Word | None:
        """A setting's value, or None."""
        setting = self._said.pop(name, None)
        return None if setting is None else setting.value

    def text(self, name: str) -> str | None:
        """A setting's text; one of a connector's options is checked.

        Raises:
            JobError: a value that it cannot have.
        """
        said = self.take(name)
        if said is not None and name in self._options:
            return self._checked(name, self._options[name], said)
        return None if said is None else said.text

    def one_of(self, name: str, values: Sequence[str], default: str) -> Any:
        """A setting that has one of some values.

        Raises:
            JobError: another one.
        """
        said = self.take(name)
        if said is None:
            return default
        if said.text not in values:
            self.file.fail(f"{name} is one of {', '.join(values)}, not {said.text!r}", said.at)
        return said.text

    def count(self, name: str) -> int | None:
        """A setting that is a whole number above zero.

        Raises:
            JobError: it is none.
        """
        said = self.take(name)
        return None if said is None else int(self._checked(name, Option("", "count"), said))

    def options(self) -> dict[str, str]:
        """The connector's options for Spark, by Spark's names.

        Raises:
            JobError: a value that cannot be.
        """
        found = {}
        for name in [n for n, how in self._options.items() if how.spark and n in self._said]:
            found[self._options[name].spark] = self._checked(name, self._options[name], self._said.pop(name).value)
        for name in [n for n in self._said if n.startswith(_PREFIX)]:
            found[name.removeprefix(_PREFIX)] = self._said.pop(name).value.text
        if self.connector == "kafka":
            for name in [n for n in self._said if n.startswith("kafka.")]:
                found[name] = self._said.pop(name).value.text
        return found

    def spark(self) -> dict[str, str]:
        """Settings for the Spark session."""
        names = [n for n in self._said if n.startswith("spark.")]
        found = {name: self._said.pop(name).value.text for name in names}
        if _PACKAGES in found:
            found["spark.jars.packages"] = found.pop(_PACKAGES)
        return found

    def end(self) -> None:
        """Refuses what was not taken.

        Raises:
            JobError: there is something.
        """
        for setting in self._said.values():
            known = closest(setting.name.text, [*self._options, *self._known])
            more = f"{_PREFIX}NAME hands any other to Spark" if self.connector else "spark.NAME sets one of Spark's own"
            whose = f"{self.connector} has" if self.connector else "a job has"
            self.file.fail(f"{whose} no option {setting.name.text!r}; there are {known}; {more}", setting.name.at)

    def _checked(self, name: str, how: Option, said: Word) -> str:
        text = said.text
        if how.kind == "count" and not (text.isascii() and text.isdigit() and int(text) > 0):
            self.file.fail(f"{name} is a whole number above zero, not {text!r}", said.at)
        if how.kind == "flag":
            text = text.lower()
            if text not in ("true", "false"):
                self.file.fail(f"{name} is true or false, not {said.text!r}", said.at)
        if how.kind == "path":
            return located(text, self.file.path.resolve().parent)
        if how.values and text not in how.values:
            self.file.fail(f"{name} is one of {', '.join(how.values)}, not {text!r}", said.at)
        return text


def located(path: str, folder: Path) -> str:
    """A path, relative ones as seen from a folder; URIs stay as they are."""
    return path if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", path) else str(folder / path)
