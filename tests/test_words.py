"""Words of the code: a name means one thing in the whole tree, a docstring begins with a sentence by itself."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAIRS = {"Datum", "Frame"}
"""Names that both backends give to their own form of one thing, of which `gpu_ops.kernels` knows nothing more."""
STILL_TWICE: set[str] = set()
"""Names that have two meanings yet: the set only shrinks."""
ELLIPSES_AT_MOST = 0
"""Docstrings that need the code around them yet: the number only falls."""

_ELLIPSIS = re.compile(r"(Of|As|Those|These|The same|It|Some|Which|What|Whether|How|Where|Likewise)\b")


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    files = [file for part in ("gpu_ops", "cpu_fallback") for file in (ROOT / part).rglob("*.py")]
    return {str(file.relative_to(ROOT)): ast.parse(file.read_text()) for file in files}


def defined(tree: ast.Module) -> Iterator[str]:
    """The classes and type aliases at the top of a file."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield node.name
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and target.id.lstrip("_")[:1].isupper() and not target.id.isupper():
                yield target.id


def test_a_name_of_a_class_or_a_type_means_one_thing(trees):
    files: dict[str, set[str]] = {}
    for file, tree in trees.items():
        for name in defined(tree):
            files.setdefault(name, set()).add(file)
    twice = {name: sorted(where) for name, where in files.items() if len(where) > 1 and name not in PAIRS}
    assert not {name: where for name, where in twice.items() if name not in STILL_TWICE}, "another name for one of them"


def is_ellipsis(docstring: str) -> bool:
    """Tells whether a docstring's first line says nothing without the code around it."""
    first = docstring.splitlines()[0]
    return not first.startswith("See") and (len(first.split()) < 4 or _ELLIPSIS.match(first) is not None)


def test_a_docstring_begins_with_a_sentence_that_stands_alone(trees):
    found = [
        f"{file}:{node.lineno} {node.name}: {text.splitlines()[0]}"
        for file, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and (text := ast.get_docstring(node))
        if is_ellipsis(text)
    ]
    assert len(found) <= ELLIPSES_AT_MOST, "\n".join(found)
