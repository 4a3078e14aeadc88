"""Writes docs/contributing/proofs.md: of each operator its law, its description, what proves it, and its page.

``python docs/list_proofs.py`` writes the page. A file of tests belongs to an operator if it is called after it, imports
a module of the tests that is, or names the operator's description or function and those of at most one other.
"""

from __future__ import annotations

import ast
import functools
import inspect
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from gpu_ops.descriptions.aggregate import Aggregate
from gpu_ops.descriptions.by_time import AsofJoin, IntervalJoin, TemporalJoin
from gpu_ops.descriptions.dataflow import Dataflow
from gpu_ops.descriptions.description import Description
from gpu_ops.descriptions.groups import Latest, Top
from gpu_ops.descriptions.join import CoGroup, Join, LookupJoin
from gpu_ops.descriptions.multi_join import MultiJoin
from gpu_ops.descriptions.over import Over
from gpu_ops.descriptions.sessions import SessionAggregate

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "contributing" / "proofs.md"


class Operator(NamedTuple):
    """An operator of the page.

    Attributes:
        description: its class.
        functions: of `gpu_ops`, for users.
        sql: what it is in SQL.
        page: for users.
        words: a pattern: what files of tests, and what they import of `tests/`, are called.
        more: files of operators beside those that the description names.
    """

    description: type[Description]
    functions: tuple[str, ...]
    sql: str
    page: str
    words: str
    more: tuple[str, ...] = ()


OPERATORS: Mapping[str, Operator] = {
    "regular, semi and anti join": Operator(
        Join, ("join", "semi_join", "anti_join"), "`JOIN`, `[NOT] EXISTS`, `[NOT] IN`", "semantics.md",
        "join|traces|rules|sql|unique_keys|hot_keys|insert_only",
        ("operators/semi_anti.py", "operators/keyed.py", "operators/core/visibility.py"),
    ),
    "multi-way join": Operator(
        MultiJoin, ("multi_join",), "joins in a row that share a key", "semantics.md", "multi.*"
    ),
    "interval join": Operator(
        IntervalJoin, ("interval_join",), "`JOIN` with times `BETWEEN`", "time.md", "interval.*"
    ),
    "temporal join": Operator(
        TemporalJoin, ("temporal_join",), "`FOR SYSTEM_TIME AS OF l.time`", "time.md", "temporal.*"
    ),
    "ASOF join": Operator(
        AsofJoin, ("asof_join",), "`ASOF JOIN`", "asof.md", "asof.*|nearest",
        ("operators/by_time/asof_at_watermark.py",),
    ),
    "lookup join": Operator(
        LookupJoin, ("lookup_join", "lookup"), "`FOR SYSTEM_TIME AS OF proctime`", "end_of_input.md", "lookup.*"
    ),
    "co-group": Operator(CoGroup, ("co_group",), "none", "end_of_input.md", "co_group"),
    "aggregate": Operator(
        Aggregate, ("aggregate",), "`GROUP BY`, `DISTINCT`", "aggregates.md", "aggregate.*|own_aggregates",
        ("operators/groups/aggregate/sums.py", "operators/groups/aggregate/extremes.py"),
    ),
    "aggregate of sessions": Operator(
        SessionAggregate, ("aggregate",), "`GROUP BY session_window(...)`", "aggregates.md", "sessions"
    ),
    "top-N": Operator(Top, ("top",), "`ROW_NUMBER() ... <= n`, `ORDER BY ... LIMIT`", "top.md", "top.*|least"),
    "window functions": Operator(
        Over, (), "`OVER (PARTITION BY ... ORDER BY ...)`", "windows.md", "over|windows",
        ("operators/groups/windows.py",),
    ),
    "latest row of a key": Operator(Latest, ("latest",), "below upserts", "top.md", "latest|unavailable"),
    "dataflow": Operator(
        Dataflow, ("engine",), "a query of several operators", "guides/without_spark.md", "dataflows?"
    ),
}  # fmt: skip


def law_files(operator: Operator) -> list[str]:
    """The operator's files in `gpu_ops`, that with the law first."""
    description = operator.description
    live = [] if description.takes_function else [description.runs]
    files = [f"operators/{name.replace('.', '/')}.py" for name in (*live, description.runs_at_end)]
    return list(dict.fromkeys([*files, *operator.more]))


@functools.cache
def names_in(path: Path) -> frozenset[str]:
    """What a file of the tests names: identifiers, attributes and imported modules."""
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(f"{node.value.id}.{node.attr}" if isinstance(node.value, ast.Name) else node.attr)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found)


def tests_of(operator: Operator) -> Iterator[Path]:
    """The files of tests that are about an operator."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        named = names_in(path)
        modules = [name.removeprefix("oracle.") for name in named if name.startswith("oracle.")]
        called = any(re.fullmatch(operator.words, name) for name in (path.stem.removeprefix("test_"), *modules))
        others = sum(_names(other, named) for other in OPERATORS.values())
        if called or (_names(operator, named) and others <= 2):
            yield path


def _names(operator: Operator, named: frozenset[str]) -> bool:
    functions = {f"gpu_ops.{name}" for name in operator.functions}
    return operator.description.__name__ in named or bool(functions & named)


def written() -> str:
    """The page."""
    lines = [
        "# From an operator to its proof",
        "",
        "Which file has an operator's law, what describes it, and which tests prove it. `python docs/list_proofs.py`",
        "writes this page from the code; `tests/test_architecture.py` fails where it says otherwise. How to add an",
        "operator is a [page of its own](add_an_operator.md).",
    ]
    for title, operator in OPERATORS.items():
        description = operator.description
        source = Path(inspect.getfile(description)).relative_to(ROOT)
        lines += ["", f"## {title[0].upper()}{title[1:]}", "", "| | |", "|---|---|"]
        names = ", ".join(f"`gpu_ops.{name}`" for name in operator.functions)
        lines += [f"| functions | {names or 'none'} |"]
        lines += [f"| in SQL | {operator.sql} |", f"| for users | [{operator.page}](../{operator.page}) |"]
        lines += [f"| description | `{description.__name__}` in `{source}` |"]
        lines += [f"| law | {', '.join(f'`gpu_ops/{file}`' for file in law_files(operator))} |"]
        found: dict[str, list[str]] = {}
        for path in tests_of(operator):
            found.setdefault(str(path.parent.relative_to(ROOT)), []).append(path.stem.removeprefix("test_"))
        lines += [f"| `{folder}` | {', '.join(f'`{name}`' for name in names)} |" for folder, names in found.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    os.chdir(ROOT)
    PAGE.write_text(written())
