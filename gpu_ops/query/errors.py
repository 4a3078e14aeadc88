"""The error of a query, with its place in the text."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from gpu_ops.errors import DescriptionError


class SqlError(DescriptionError):
    """A query that cannot be planned.

    Args:
        message: what is wrong, and what to do instead.
        sql: the query as given.
        line: 1-based line in ``sql``.
        column: 1-based column in that line.
    """

    def __init__(self, message: str, sql: str, line: int, column: int) -> None:
        self.message, self.sql, self.line, self.column = message, sql, line, column
        lines = sql.splitlines() or [""]
        shown = lines[line - 1] if line <= len(lines) else ""
        caret = "".join("\t" if c == "\t" else " " for c in shown[: column - 1].ljust(column - 1)) + "^"
        super().__init__(f"{message} (line {line}, column {column})\n  {shown}\n  {caret}")

    def __reduce__(self) -> tuple[type[SqlError], tuple[str, str, int, int]]:
        return type(self), (self.message, self.sql, self.line, self.column)


def closest(wanted: str, names: Iterable[str]) -> str:
    """The names, those most like the wanted one first, as a message lists them."""
    lowered = {name: name.lower() for name in dict.fromkeys(names)}
    close = difflib.get_close_matches(wanted.lower(), list(lowered.values()), n=3)
    found = sorted(lowered, key=lambda name: close.index(lowered[name]) if lowered[name] in close else len(close))
    more = len(found) - 12
    return ", ".join(found[:12]) + (f" and {more} more" if more > 0 else "") if found else "none"
