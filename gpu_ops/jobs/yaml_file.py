"""Jobs as YAML.

::

    sources:
      orders:
        connector: parquet
        path: orders
        columns: {id: BIGINT, item: STRING, at: TIMESTAMP}    # or one text: id BIGINT, item STRING, at TIMESTAMP
        primary_key: id                                       # or a list
        watermark: {column: at, delay: 5 seconds}
    sink: {connector: parquet, path: changes}
    query: |
      SELECT ... FROM orders ...
    options: {state: state}
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import yaml

from gpu_ops.jobs.text import Said, SaidColumn, SaidJob, SaidQuery, SaidTable, Setting, Text
from gpu_ops.jobs.tokens import Cursor, tokenize
from gpu_ops.jobs.types import read_type
from gpu_ops.query.errors import closest

_SECTIONS: Final = ("sources", "sink", "query", "options")
_WATERMARK: Final = ("column", "delay")


def read_yaml(file: Text) -> SaidJob:
    """Reads a job.

    Raises:
        JobError: it is none; says where.
    """
    try:
        # nodes instead of values: they know their places, and a number stays as it was written
        root: Any = yaml.compose(file.text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        file.fail(f"this is no YAML: {error.problem or error}", mark.index if mark else 0)
    except yaml.YAMLError as error:
        file.fail(f"this is no YAML: {error}", 0)
    sections: dict[str, Any] = {}
    for name, node in _entries(file, root, "a job"):
        if name.text not in _SECTIONS:
            file.fail(f"a job has no section {name.text!r}; there are {', '.join(_SECTIONS)}", name.at)
        sections[name.text] = node
    for section in _SECTIONS[:3]:
        if section not in sections:
            file.fail(f"the section {section!r} is missing", 0)
    sources = [_table(file, name, node) for name, node in _entries(file, sections["sources"], "sources")]
    if not sources:
        file.fail("there is no source", sections["sources"].start_mark.index)
    sink = _table(file, Said("sink", sections["sink"].start_mark.index), sections["sink"])
    options = _entries(file, sections["options"], "options") if "options" in sections else ()
    settings = tuple(Setting(name, _scalar(file, node, f"option {name.text!r}")) for name, node in options)
    return SaidJob(file, tuple(sources), sink, _query(file, sections["query"]), settings)


def _entries(file: Text, node: Any, what: str) -> Iterator[tuple[Said, Any]]:
    """Names and values of a mapping."""
    if not isinstance(node, yaml.MappingNode):
        file.fail(f"{what} is a mapping, name: value", node.start_mark.index if node is not None else 0)
    seen: set[str] = set()
    for key, value in node.value:
        name = _scalar(file, key, "a name")
        if name.text in seen:
            file.fail(f"{name.text!r} is there twice", name.at)
        seen.add(name.text)
        yield name, value


def _scalar(file: Text, node: Any, what: str) -> Said:
    if not isinstance(node, yaml.ScalarNode):
        file.fail(f"{what} is one value, not a list or a mapping", node.start_mark.index)
    return Said(node.value, node.start_mark.index)


def _table(file: Text, name: Said, node: Any) -> SaidTable:
    columns: tuple[SaidColumn, ...] | None = None
    key: tuple[Said, ...] | None = None
    watermark: tuple[Said, Said] | None = None
    settings: list[Setting] = []
    for option, value in _entries(file, node, f"{name.text!r}"):
        if option.text == "columns":
            columns = tuple(_columns(file, value))
        elif option.text == "primary_key":
            nodes = value.value if isinstance(value, yaml.SequenceNode) else [value]
            key = tuple(_scalar(file, one, "a column of the primary key") for one in nodes)
        elif option.text == "watermark":
            watermark = _watermark(file, value)
        else:
            settings.append(Setting(option, _scalar(file, value, f"option {option.text!r}")))
    return SaidTable(name, columns, key, watermark, tuple(settings))


def _columns(file: Text, node: Any) -> Iterator[SaidColumn]:
    if isinstance(node, yaml.ScalarNode):
        cursor = _cursor(file, node)
        while True:
            yield SaidColumn(cursor.name("a column's name"), read_type(cursor))
            if not cursor.accepts(","):
                break
        _ends(cursor)
        return
    for name, value in _entries(file, node, "columns"):
        _scalar(file, value, f"the type of column {name.text!r}")
        cursor = _cursor(file, value)
        yield SaidColumn(name, read_type(cursor))
        _ends(cursor)


def _cursor(file: Text, node: Any) -> Cursor:
    """The tokens of a scalar, where they stand in the file."""
    begin, end = node.start_mark.index, node.end_mark.index
    if node.style in ("'", '"'):
        begin, end = begin + 1, end - 1
    elif node.style is not None:  # | or >, and perhaps an indent
        begin = file.text.index("\n", begin)
    return Cursor(file, tokenize(file, begin, end))


def _ends(cursor: Cursor) -> None:
    if cursor.token.kind != "end":
        cursor.fail(f"expected nothing more, found {cursor.token.shown}")


def _watermark(file: Text, node: Any) -> tuple[Said, Said]:
    found = {}
    for name, value in _entries(file, node, "a watermark"):
        if name.text not in _WATERMARK:
            known = closest(name.text, _WATERMARK)
            file.fail(f"a watermark has no {name.text!r}; there are {known}", name.at)
        found[name.text] = _scalar(file, value, f"{name.text!r}")
    for part in _WATERMARK:
        if part not in found:
            file.fail(f"a watermark has a {part}", node.start_mark.index)
    return found["column"], found["delay"]


def _query(file: Text, node: Any) -> SaidQuery:
    query = _scalar(file, node, "the query")
    at, text = query.at, query.text
    if node.style == "|":
        body = file.text.index("\n", at) + 1
        first = re.compile(r"\s*^([ \t]*)\S", re.MULTILINE).search(file.text, body)
        if first is not None and text.strip():
            line_at = file.text.rfind("\n", 0, first.start(1)) + 1
            indent = first.start(1) + len(first[1]) - line_at
            return SaidQuery(text.lstrip("\n"), line_at + indent, indent)
    lines = file.text[at : node.end_mark.index].count("\n")
    return SaidQuery(text, at + (node.style in ("'", '"')), None if lines else 0)
