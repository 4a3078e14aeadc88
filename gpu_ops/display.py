"""How changelogs, state and plans look in a notebook: HTML where it is understood, text elsewhere."""

from __future__ import annotations

import dataclasses
import html
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

import pyarrow as pa

from gpu_ops.descriptions.changelog import FOLDED, ROW_KIND_COLUMN
from gpu_ops.descriptions.frames import as_table
from gpu_ops.descriptions.inputs import Input
from gpu_ops.errors import DescriptionError

#: Readable on a light page and on a dark one.
_COLORS: Final = {"+I": "#1a7f37", "+U": "#1a7f37", "-U": "#bc4c00", "-D": "#cf222e"}
_OTHER: Final = "#8250df"
_BOX: Final = "border:1px solid #8c959f;border-radius:6px;padding:4px 10px;margin:3px;white-space:nowrap"


class Explanation(str):
    """The text of `gpu_ops.explain`, which a notebook shows below a picture of the operators."""

    __slots__ = ("picture",)

    def __new__(cls, text: str, picture: str) -> Self:
        """A text and the HTML that goes above it."""
        made = super().__new__(cls, text)
        made.picture = picture
        return made

    picture: str

    def _repr_html_(self) -> str:
        return f'{self.picture}<pre style="font-family:monospace">{html.escape(self)}</pre>'


def operator_box(name: str, inputs: Sequence[str]) -> str:
    """An operator with its inputs to its left, each the HTML of an operator or of a source."""
    left = "".join(
        f'<div style="display:flex;align-items:center;justify-content:flex-end">{x}\u2192</div>' for x in inputs
    )
    box = f'<div style="{_BOX};font-weight:bold">{html.escape(name)}</div>'
    return f'<div style="display:inline-flex;align-items:center"><div>{left}</div>{box}</div>'


def source_box(name: str) -> str:
    """An input that is no operator's."""
    return f'<div style="{_BOX}">{html.escape(name)}</div>'


@dataclasses.dataclass(frozen=True)
class Tables:
    """Tables with a caption each, as `gpu_ops.show` gives them: ``str()`` is plain text.

    Attributes:
        tables: Arrow tables by caption; a column ``row_kind`` colours its rows.
        rows: how many of each are shown; what is more is counted.
    """

    tables: Mapping[str, pa.Table]
    rows: int = 50

    def _repr_html_(self) -> str:
        parts = []
        for caption, table in self.tables.items():
            head = "".join(f"<th>{html.escape(name)}</th>" for name in table.column_names)
            body = "".join(_row(row) for row in table.slice(0, self.rows).to_pylist())
            more = table.num_rows - self.rows
            foot = f'<tr><td colspan="{table.num_columns}">and {more:,} more</td></tr>' if more > 0 else ""
            title = f"<caption style='white-space:nowrap'>{html.escape(caption)}</caption>" if caption else ""
            parts.append(
                f'<table style="display:inline-table;margin-right:2em">{title}<tr>{head}</tr>{body}{foot}</table>'
            )
        return "".join(parts)

    def __str__(self) -> str:
        return "\n\n".join("\n".join(self._lines(caption, table)) for caption, table in self.tables.items())

    def _lines(self, caption: str, table: pa.Table) -> list[str]:
        shown = [[_text(value) for value in row.values()] for row in table.slice(0, self.rows).to_pylist()]
        grid = [list(table.column_names), *shown]
        widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
        lines = ["  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)).rstrip() for row in grid]
        more = [f"and {table.num_rows - self.rows:,} more"] if table.num_rows > self.rows else []
        return [*([caption] if caption else []), *lines, *more]


def changes_of(source: Input) -> str:
    """The changes of an input, in words."""
    changes = "insert-only" if source.insert_only else f"row kinds in {source.row_kind!r}"
    if source.row_kind is None and source.unique_key is not None:
        changes = "upserts"
    return changes


def lookups_text(counts: Mapping[str, int]) -> str:
    """The number of lookups by each way, see `gpu_ops.kernels.LOOKUPS`."""
    return ", ".join(f"{count:,} by {way.replace('_', ' ')}" for way, count in counts.items())


def show(what: Any, rows: int = 50) -> Tables:
    """Shows a changelog coloured by row kind, or the state of an engine as tables, in a notebook.

    Args:
        what: a changelog: an Arrow table, a DataFrame of pandas, polars or cuDF, or a static one of Spark's, such as
            the table of a ``memory`` sink; a `MicroBatch`; or a `JoinEngine`, whose state rows are shown with their
            counts of matches.
        rows: the largest number of rows.

    Raises:
        DescriptionError: it is none of these.

    Example:
        >>> gpu_ops.show(pa.table({"row_kind": ["+I", "-D"], "id": [1, 1]}))  # doctest: +SKIP
    """
    if hasattr(what, "snapshot"):
        kept = what.snapshot()
        folded = {"table": kept.pop(FOLDED)} if FOLDED in kept else {}
        return Tables({f"state of {name}": _counted(table) for name, table in kept.items()} | folded, rows)
    return Tables({"": _as_arrow(getattr(what, "changelog", what))}, rows)


def _as_arrow(what: Any) -> pa.Table:
    if isinstance(what, pa.Table):
        return what
    if getattr(what, "isStreaming", False):
        raise DescriptionError(
            "show() takes rows that are there; of a streaming DataFrame show the table it is written to"
        )
    for method in ("toArrow", "to_arrow"):
        if hasattr(what, method):
            return getattr(what, method)()
    try:
        return as_table(what)
    except (TypeError, ValueError, pa.ArrowException):
        raise DescriptionError(f"show() takes a changelog or a JoinEngine, not a {type(what).__name__}") from None


def _counted(table: pa.Table) -> pa.Table:
    """A table of a snapshot, with its columns of counts in plain words."""
    names = (re.sub("^__count$", "matches", name) for name in table.column_names)
    return table.rename_columns([re.sub("^__count_", "matches in step ", name) for name in names])


def _row(row: Mapping[str, Any]) -> str:
    kind = row.get(ROW_KIND_COLUMN)
    color = "" if kind is None else f' style="color:{_COLORS.get(kind, _OTHER)}"'
    cells = "".join(f"<td>{html.escape(_text(value))}</td>" for value in row.values())
    return f"<tr{color}>{cells}</tr>"


def _text(value: Any) -> str:
    return "null" if value is None else str(value)
