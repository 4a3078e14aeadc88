"""What may be imported where."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCKED = ("pyspark", "py4j", "cudf", "pylibcudf", "cupy", "rmm", "java", "jpype")

PROGRAM = f"""
import os, sys

for name in {BLOCKED!r}:
    sys.modules[name] = None  # as if it were not installed
for name in ("JAVA_HOME", "SPARK_HOME"):
    os.environ.pop(name, None)
os.environ["PATH"] = "/nowhere"

import gpu_ops
loaded = [m for m, module in sys.modules.items() if module and m.partition(".")[0] in {BLOCKED!r}]
assert not loaded, loaded
assert "pandas" not in sys.modules, "import gpu_ops alone loads pandas"
dir(gpu_ops)
"""

USE = """
import pyarrow as pa
schema = pa.schema([("k", pa.int64())])
inputs = gpu_ops.Input("a", schema), gpu_ops.Input("b", schema)
join = gpu_ops.Join("left", *inputs, (gpu_ops.Key("k", "k", using=True),))
engine = gpu_ops.JoinEngine(join)
assert engine.backend == "cpu", engine.backend
assert engine.backend_reason
print(engine.process(left=pa.table({"k": [1, 2]})).to_pylist())
try:
    gpu_ops.join
except ImportError as error:
    assert "PySpark" in str(error), error
else:
    raise AssertionError("gpu_ops.join without PySpark")
"""


NAMES = """
import gpu_ops, gpu_ops.spark
for package in (gpu_ops, gpu_ops.spark):
    assert package.__all__ == sorted(set(package.__all__))
    assert {"join", "explain"} <= set(package.__all__) <= set(dir(package))
    for name in package.__all__:
        value = getattr(package, name)
        assert getattr(value, "__name__", name) in (name, f"gpu_ops.{name}"), (name, value)
    try:
        package.joint
    except AttributeError as error:
        assert str(error) == f"module {package.__name__!r} has no attribute 'joint'"
    else:
        raise AssertionError("joint")
"""


OLDER = """
import importlib.util

find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if "streaming.datasource" in name else find_spec(name, *rest)
import gpu_ops.jobs.runner, gpu_ops
assert gpu_ops.read_iceberg
"""


def python(program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", program]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def test_import_without_spark_java_and_gpu() -> None:
    done = python(PROGRAM)
    assert done.returncode == 0, done.stderr


def test_the_engine_works_without_spark_java_and_gpu() -> None:
    done = python(PROGRAM + USE)
    assert done.returncode == 0, done.stderr
    assert "{'row_kind': '+I', 'k': 1}" in done.stdout


def test_jobs_and_sources_are_there_before_spark_4_2() -> None:
    done = python(OLDER)
    assert done.returncode == 0, done.stderr


def test_every_name_is_there() -> None:
    done = python(NAMES)
    assert done.returncode == 0, done.stderr


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Line and module of every import of a file, calls that import by name included."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in ("import_module", "__import__", "optional_module") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


ONLY = {
    "pandas": ("cpu_fallback",),
    "cudf": ("gpu_ops/cudf_backend",),
    "pylibcudf": ("gpu_ops/cudf_backend",),
    "cupy": ("gpu_ops/cudf_backend",),
    "cupyx": ("gpu_ops/cudf_backend",),
    "rmm": ("gpu_ops/cudf_backend",),
}


@pytest.mark.parametrize("module", ONLY)
def test_imported_in_its_backend_only(module: str) -> None:
    files = [p for folder in ("gpu_ops", "cpu_fallback") for p in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 20
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in files
        for line, name in imported(path)
        if name.partition(".")[0] == module
        and not str(path.relative_to(ROOT)).startswith(tuple(f"{place}/" for place in ONLY[module]))
    ]
    assert not wrong, f"{module} is imported in {', '.join(wrong)}"


def test_operators_know_no_backend() -> None:
    """Operators are written once: against kernels and arrays, not against a backend or Arrow data."""
    for path in sorted((ROOT / "gpu_ops" / "operators").glob("*.py")):
        for line, name in imported(path):
            assert not name.startswith(("cpu_fallback", "gpu_ops.cudf_backend", "gpu_ops.spark")), f"{path}:{line}"


def test_the_scan_sees_an_import(tmp_path: Path) -> None:
    sample = tmp_path / "sample.py"
    sample.write_text("def f():\n    import pandas.core as pd\n    importlib.import_module('cupy')\n")
    assert sorted(imported(sample)) == [(2, "pandas.core"), (3, "cupy")]
