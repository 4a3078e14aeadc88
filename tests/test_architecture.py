"""The floors in docs/architecture.md are those of the code: no part imports one above it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "architecture.md"


def floors() -> dict[str, int]:
    """Each part's floor, counted from the ground."""
    block = re.search(r"```text\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert block is not None
    lines = block[1].strip().splitlines()
    return {part.strip(): n for n, line in enumerate(reversed(lines)) for part in line.split(",")}


def part_of(module: str) -> str | None:
    parts = module.split(".")
    if parts[0] == "cpu_fallback":
        return "cpu_fallback"
    if parts[0] != "gpu_ops" or len(parts) < 2:
        return None
    return "operators/core" if parts[1:3] == ["operators", "core"] else parts[1]


def imports(path: Path) -> Iterator[str]:
    """Modules of ours that a file imports when it runs; what only a type checker reads is left out."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            names = (
                [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "gpu_ops" else [node.module]
            )
            yield from names
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_no_part_imports_one_above_it() -> None:
    floor = floors()
    wrong, seen = [], set()
    for path in sorted([*ROOT.glob("gpu_ops/**/*.py"), *ROOT.glob("cpu_fallback/**/*.py")]):
        own = part_of(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
        if own is None:
            continue
        seen.add(own)
        assert own in floor, f"{path.relative_to(ROOT)}: {own} stands on no floor in {DOCUMENT.name}"
        for module in imports(path):
            other = part_of(module)
            if other is not None and other != own and floor[other] > floor[own]:
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not wrong
    assert seen == set(floor)
