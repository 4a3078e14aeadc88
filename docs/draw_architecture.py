"""Writes into architecture.md what can be taken from the code: the floors, the picture of the imports, the figures.

``python docs/draw_architecture.py`` writes the page; with the root of another checkout it prints that one's.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Mapping, Sequence
from pathlib import Path

import grimp
import networkx as nx

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
PACKAGES = ("gpu_ops", "cpu_fallback")
_BETWEEN = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_COMPARES = re.compile(r"kernels\.(equal_rows|equal_at|matches|sole_matches)\(")
_KINDS = re.compile(r"isinstance\([^)]*\b(Join|IntervalJoin|MultiJoin|Aggregate|CoGroup)\b")


def part_of(module: str, inside: str | None = None) -> str | None:
    """The part of the picture that a module belongs to; None for `gpu_ops` itself.

    Args:
        module: its name.
        inside: of the picture of a package of `gpu_ops`, that one: then None is for what is outside, too.
    """
    names = module.split(".")
    if inside is not None:
        return names[2] if names[:2] == ["gpu_ops", inside] and len(names) > 2 else None
    if names[0] != "gpu_ops":
        return names[0]
    if names[1:3] == ["operators", "core"]:
        return "/".join(names[1:3])
    return names[1] if len(names) > 1 else None


def part_imports(root: Path = ROOT, inside: str | None = None) -> nx.DiGraph:
    """Parts and what they import when they run; an edge's ``example`` is one such import. See `part_of`."""
    sys.path.insert(0, str(root))
    modules = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True, cache_dir=None)
    sys.path.remove(str(root))
    parts = nx.DiGraph()
    for importer in sorted(modules.modules):
        parts.add_nodes_from(filter(None, [part_of(importer, inside)]))
        for imported in modules.find_modules_directly_imported_by(importer):
            ends = part_of(importer, inside), part_of(imported, inside)
            if None not in ends and ends[0] != ends[1]:
                parts.add_edge(*ends, example=f"{importer} imports {imported}")
    return parts


def cycles(parts: nx.DiGraph) -> list[list[str]]:
    """Parts that import each other, directly or round about."""
    return sorted(sorted(group) for group in nx.strongly_connected_components(parts) if len(group) > 1)


def joined(parts: nx.DiGraph) -> nx.DiGraph:
    """The parts without cycles: those that import each other are one."""
    one = nx.condensation(parts)
    return nx.relabel_nodes(one, {n: " + ".join(sorted(one.nodes[n]["members"])) for n in one})


def floors(parts: nx.DiGraph) -> list[list[str]]:
    """The parts by floors, the top first: each stands just above the highest part that it imports."""
    return [sorted(floor) for floor in nx.topological_generations(joined(parts).reverse())][::-1]


def mermaid(parts: nx.DiGraph) -> str:
    """The picture: an arrow for each import, but where another way leads to the same part."""
    one = joined(parts)
    name = {part: re.sub(r"\W+", "_", part) for part in one}
    boxes = [f'    {name[part]}["{part}"]' for part in sorted(one) if name[part] != part or not one.degree(part)]
    arrows = [f"    {name[a]} --> {name[b]}" for a, b in sorted(nx.transitive_reduction(one).edges)]
    return "\n".join(["flowchart TD", *boxes, *arrows])


def code_lines(path: Path) -> int:
    """Lines of a file that are neither blank nor comment nor docstring."""
    text = path.read_text()
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _BETWEEN:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node):
            lines.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def source_files(root: Path = ROOT) -> list[Path]:
    """The files that the figures are of."""
    return [path for package in PACKAGES for path in (root / package).rglob("*.py")]


def promises(parts: nx.DiGraph, root: Path = ROOT) -> dict[str, str]:
    """Rows of the page's table that have to be right at any time, by how they begin."""
    files = source_files(root)
    width, widest = max((len(list(folder.glob("*.py"))), folder) for folder in {path.parent for path in files})
    comparing = [path for path in files if "operators" in path.parts and _COMPARES.search(path.read_text())]
    return {
        "floors of the import graph": f"{len(floors(parts))}",
        "imports that run back up": ", ".join(" and ".join(cycle) for cycle in cycles(parts)) or "none",
        "widest folder": f"{width} (`{widest.relative_to(root)}/`)",
        "files that compare rows": f"{len(comparing)}",
    }


def sizes(root: Path = ROOT) -> dict[str, str]:
    """Rows that are as of the day on which the page was written."""
    files = source_files(root)
    others = [path for path in files if not {"descriptions", "operators"} & {*path.parts}]
    return {
        "code lines": f"{sum(map(code_lines, files)):,}",
        "files": f"{len(files)}",
        "questions of a description's kind": f"{sum(len(_KINDS.findall(path.read_text())) for path in others)}",
    }


def written(page: str, pictures: Sequence[nx.DiGraph], rows: Mapping[str, str]) -> str:
    """The page with floors and picture of the parts, then of those inside `spark`, and these rows of its table."""
    blocks = {
        "text": iter(["\n".join(", ".join(floor) for floor in floors(parts)) for parts in pictures]),
        "mermaid": iter([mermaid(parts) for parts in pictures]),
    }
    for language, texts in blocks.items():
        block = re.compile(rf"(?<=```{language}\n).*?(?=\n```)", re.DOTALL)
        page = block.sub(lambda found, texts=texts: next(texts, found[0]), page)
    for row, figure in rows.items():
        now = re.compile(rf"^(\| {row} \|)[^|]*", re.MULTILINE)
        page, found = now.subn(rf"\1 {figure} ", page)
        assert found == 1, f"the table of {PAGE.name} has {found} rows '{row}'"
    return page


if __name__ == "__main__":
    if len(sys.argv) > 1:
        root = Path(sys.argv[1]).resolve()
        found = part_imports(root)
        print(mermaid(found), promises(found, root), sizes(root), sep="\n")
    else:
        found = part_imports()
        inside = part_imports(inside="spark")
        PAGE.write_text(written(PAGE.read_text(), [found, inside], promises(found) | sizes()))
