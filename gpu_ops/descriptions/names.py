"""Columns that two queries call otherwise, as a name clashes in one of them: ``item`` and ``o__item``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from gpu_ops.descriptions.description import Description

_WORDS: Final = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|`(?P<quoted>[^`]+)`|(?P<plain>[^\W\d]\w*)""")


def paired_names(pairs: Iterable[tuple[Iterable[str], Iterable[str]]]) -> dict[str, str] | None:
    """By columns of one query what another one calls them; None if not only a clash makes them differ.

    Args:
        pairs: columns of either query, in the same order.
    """
    found = dict[str, str]()
    for was, now in pairs:
        one, other = list(was), list(now)
        if len(one) != len(other):
            return None
        for a, b in zip(one, other, strict=True):
            clash = a == b or a.endswith(f"__{b}") or b.endswith(f"__{a}")
            if not clash or found.setdefault(a, b) != b:
                return None
    return found


def called_by_name(text: str, names: Mapping[str, str]) -> str:
    """An expression's text with columns as another query calls them; what is between quotes stays."""

    def called(match: re.Match[str]) -> str:
        name = match["quoted"] or match["plain"] or ""
        return match[0].replace(name, names[name]) if name in names else match[0]

    return _WORDS.sub(called, text)


def columns_of_same(was: Description, now: Description) -> dict[str, str] | None:
    """By the columns of an operator what another one calls them that computes the same rows; None if it does not.

    When changes are told (``emit=``) and after which time rows are forgotten (``ttl=``) does not matter.
    """
    schemas = [(was.output_schema, now.output_schema)]
    schemas += ((a.schema, b.schema) for a, b in zip(was.inputs, now.inputs, strict=False))
    names = paired_names((a.names, b.names) for a, b in schemas)
    return names if names is not None and _content(was, names) == _content(now, {}) else None


def _content(description: Description, names: Mapping[str, str]) -> Any:
    """The part of a description that decides which rows there are, with columns as another query calls them."""
    content: dict[str, Any] = json.loads(description.to_json())
    content.pop("emit", None)
    for source, own in zip(description.inputs, content["inputs"], strict=True):
        own.pop("ttl_ms", None)
        own["schema"] = [[x.name, str(x.type), x.nullable, str(x.metadata)] for x in source.schema]
    return _renamed(content, names)


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, dict):  # how a condition is written does not matter, and constants are no names
        written = {name: part for name, part in value.items() if name != "text" or "tree" not in value}
        return {name: part if name == "value" else _renamed(part, names) for name, part in written.items()}
    if isinstance(value, list):
        return [_renamed(part, names) for part in value]
    return names.get(value, value) if isinstance(value, str) else value
