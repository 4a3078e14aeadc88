"""The text of a job: positions in it, what is written there, and the error that shows a position."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from gpu_ops.errors import DescriptionError


class JobError(DescriptionError):
    """A job that cannot be.

    Args:
        message: what is wrong, and what to do instead.
        path: the file.
        line: 1-based line in it.
        column: 1-based column in that line.
        shown: the line.
    """

    def __init__(self, message: str, path: Path, line: int, column: int, shown: str) -> None:
        self.message, self.path, self.line, self.column = message, path, line, column
        caret = "".join("\t" if c == "\t" else " " for c in shown[: column - 1].ljust(column - 1)) + "^"
        super().__init__(f"{path}:{line}:{column}: {message}\n  {shown}\n  {caret}")


@dataclasses.dataclass(frozen=True)
class Text:
    """A file's text."""

    path: Path
    text: str

    def position(self, offset: int) -> tuple[int, int]:
        """Line and column of an offset, both from 1."""
        before = self.text[:offset]
        return before.count("\n") + 1, offset - (before.rfind("\n") + 1) + 1

    def error(self, message: str, offset: int) -> JobError:
        """An error at an offset."""
        return self.error_at(message, *self.position(offset))

    def error_at(self, message: str, line: int, column: int) -> JobError:
        """An error at a line and column."""
        lines = self.text.split("\n")
        shown = lines[line - 1].rstrip("\r") if line <= len(lines) else ""
        shown = re.sub(r"(?<=://)[^\s'\"]*(?=@)", lambda found: "*" * len(found[0]), shown)  # a URI's credentials
        return JobError(message, self.path, line, column, shown)


@dataclasses.dataclass(frozen=True)
class Word:
    """A name or value as written, and its offset in the file."""

    text: str
    at: int


@dataclasses.dataclass(frozen=True)
class Setting:
    """A name and its value."""

    name: Word
    value: Word


@dataclasses.dataclass(frozen=True)
class TableText:
    """A source or the sink, as it is written down.

    Attributes:
        name: what the query calls it.
        columns: names, and types as Spark writes them; None where none are given.
        primary_key: names of columns, or None.
        watermark: a column, and how late its rows may come, such as ``5 SECOND``; or None.
        settings: all the rest.
    """

    name: Word
    columns: tuple[tuple[Word, str], ...] | None
    primary_key: tuple[Word, ...] | None
    watermark: tuple[Word, Word] | None
    settings: tuple[Setting, ...]


@dataclasses.dataclass(frozen=True)
class QueryText:
    """The query.

    Attributes:
        text: without what is around it in the file.
        at: where it begins.
    """

    text: str
    at: int

    def position(self, file: Text, line: int, column: int) -> tuple[int, int]:
        """Line and column in the file of a line and column of the query."""
        first_line, first_column = file.position(self.at)
        return first_line + line - 1, column + (first_column - 1 if line == 1 else 0)


@dataclasses.dataclass(frozen=True)
class JobText:
    """A job as it is written down."""

    file: Text
    sources: tuple[TableText, ...]
    sink: TableText
    query: QueryText
    settings: tuple[Setting, ...]
