"""No part of the code imports one above it; docs/architecture.md has the floors, picture and figures of the code."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import grimp
import networkx as nx
import pytest

from gpu_ops.descriptions.dataflow import Dataflow
from gpu_ops.descriptions.description import Description
from gpu_ops.descriptions.kinds import _KINDS
from gpu_ops.operators.keyed import KeyedOperator

SCRIPT = Path(__file__).resolve().parents[1] / "docs" / "draw_architecture.py"
OPERATORS = Path("docs", "contributing", "add_an_operator.md")


@pytest.fixture(scope="module")
def draw() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


@pytest.fixture(scope="module")
def parts(draw) -> Any:
    return draw["part_imports"]()


@pytest.fixture(scope="module")
def inside_spark(draw) -> Any:
    return draw["part_imports"](inside="spark")


@pytest.mark.parametrize("which", ["parts", "inside_spark"])
def test_no_part_imports_one_above_it(draw, which, request):
    parts = request.getfixturevalue(which)
    found = draw["cycles"](parts)
    between = [
        example
        for cycle in found
        for importer, imported, example in parts.edges(data="example")
        if importer in cycle and imported in cycle
    ]
    assert not between, "parts import each other, of these imports one has to go"


@pytest.mark.parametrize("order", [("wire", "server", "tasks", "driver", "sources", "plan", "api"), ("plan", "sinks")])
def test_the_floors_inside_spark_are_these(inside_spark, order):
    upward = [
        inside_spark.edges[below, above]["example"]
        for number, below in enumerate(order)
        for above in order[number + 1 :]
        if inside_spark.has_edge(below, above)
    ]
    assert not upward


def test_the_page_has_what_the_code_has(draw, parts, inside_spark):
    page = draw["PAGE"].read_text()
    assert draw["written"](page, [parts, inside_spark], draw["promises"](parts)) == page, (
        "run `python docs/draw_architecture.py`"
    )


def test_files_that_the_pages_name_are_there(draw):
    root = draw["ROOT"]
    pages = [root / "README.md", root / "CONTRIBUTING.md", *(root / "docs").rglob("*.md")]
    text = "".join(page.read_text() for page in pages)
    names = {name for name in re.findall(r"`([\w/]+(?:\.py|/))`", text) if "distinct" not in name}
    paths = [
        path
        for folder in ("gpu_ops", "cpu_fallback", "docs", "tests", "examples")
        for path in (root / folder).rglob("*")
    ]
    paths += [root / "gpu_ops", root / "cpu_fallback", root / "examples", *(root / "benchmarks").rglob("*")]
    there = [f"/{path.relative_to(root)}" + "/" * path.is_dir() for path in paths]
    assert not [name for name in names if not any(path.endswith("/" + name) for path in there)]


def test_the_page_on_operators_has_all_that_one_has_to_answer(draw):
    text = (draw["ROOT"] / OPERATORS).read_text()
    assert all(f"`{name}`" in text for name in Description.__abstractmethods__)
    assert all(f"def {name}(" in text for name in KeyedOperator.__abstractmethods__)


def test_the_page_of_proofs_has_what_the_code_and_the_tests_have():
    proofs = runpy.run_path(str(SCRIPT.with_name("list_proofs.py")))
    assert proofs["PAGE"].read_text() == proofs["written"](), "python docs/list_proofs.py writes the page anew"
    described = {operator.description.kind for operator in proofs["OPERATORS"].values()}
    assert described == {*_KINDS, Dataflow.kind}, "an operator of the page for each kind of description"


def test_no_file_imports_one_that_imports_it_for_types_neither():
    modules = grimp.build_graph("gpu_ops", "cpu_fallback", cache_dir=None)
    imports = nx.DiGraph((a, b) for a in modules.modules for b in modules.find_modules_directly_imported_by(a))
    assert not [sorted(circle) for circle in nx.strongly_connected_components(imports) if len(circle) > 1]
