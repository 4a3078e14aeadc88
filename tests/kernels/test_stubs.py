"""The calls that the GPU backend and its benchmarks make exist in pylibcudf, cupy and rmm, with those arguments.

Importing them needs no card. Skipped where they are not installed.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gpu_ops
from kernels.emulated_libcudf import _KINDS, CompressionType

pytestmark = pytest.mark.thorough

BACKEND = Path(gpu_ops.__file__).parent / "cudf_backend"
BENCHMARKS = Path(gpu_ops.__file__).parents[1] / "benchmarks" / "gpu"
LIBRARIES = {"plc": "pylibcudf", "pylibcudf": "pylibcudf", "cp": "cupy", "cupyx": "cupyx", "rmm": "rmm"}
METHODS = {
    "Column": "child children copy data device_buffer_size list_view null_count null_mask offset size to_arrow to_scalar type with_mask",
    "Table": "columns copy num_rows",
    "io.parquet.ParquetReaderOptions": "set_column_names",
    "io.parquet.ParquetReaderOptionsBuilder": "build ignore_missing_columns use_arrow_schema use_pandas_metadata",
    "io.types.TableWithMetadata": "column_names columns",
    "io.parquet.ParquetWriterOptionsBuilder": "build compression key_value_metadata metadata row_group_size_rows stats_level utc_timestamps",
    "io.types.ColumnInMetadata": "set_decimal_precision set_name set_nullability set_output_as_binary",
    "io.types.TableInputMetadata": "column_metadata",
}  # fmt: skip


def _chain(node: ast.AST) -> list[str] | None:
    """``a.b.c`` as a list; None for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    return [node.id, *parts] if isinstance(node, ast.Name) and parts else None


def _uses() -> Iterator[tuple[str, tuple[str, ...], int | None, tuple[str, ...]]]:
    """Where, what, and for calls the number of positional arguments and the names of the others."""
    for path in sorted([*BACKEND.rglob("*.py"), *BENCHMARKS.glob("*.py")]):
        tree = ast.parse(path.read_text())
        called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
        inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for node in ast.walk(tree):
            chain = _chain(node)
            if chain is None or chain[0] not in LIBRARIES or id(node) in inner:
                continue
            call = called.get(id(node))
            where = f"{path.name}:{node.lineno}"
            if call is None or any(isinstance(arg, ast.Starred) for arg in call.args):
                yield where, tuple(chain), None, ()
            else:
                yield where, tuple(chain), len(call.args), tuple(k.arg for k in call.keywords if k.arg)


@pytest.fixture(scope="module")
def libraries() -> dict[str, Any]:
    missing = [name for name in LIBRARIES.values() if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not installed")
    return {short: importlib.import_module(name) for short, name in LIBRARIES.items()}


@pytest.mark.filterwarnings("ignore")
def test_calls_exist(libraries: dict[str, Any]) -> None:
    importlib.import_module("rmm.mr")
    seen = set()
    for where, chain, positional, keywords in _uses():
        found = libraries[chain[0]]
        for name in chain[1:]:
            assert hasattr(found, name), f"{where}: {'.'.join(chain)}: no {name}"
            found = getattr(found, name)
        seen.add(".".join(chain))
        if positional is None:
            continue
        try:
            signature = inspect.signature(found)
        except (TypeError, ValueError):
            continue  # ufuncs and builtin classes tell nothing
        try:
            signature.bind(*[None] * positional, **dict.fromkeys(keywords))
        except TypeError as error:
            pytest.fail(f"{where}: {'.'.join(chain)}{signature}: {error}")
    assert {"plc.copying.gather", "plc.join.inner_join", "plc.hashing.xxhash_64", "cp.add.at"} <= seen


@pytest.mark.filterwarnings("ignore")
def test_methods_exist(libraries: dict[str, Any]) -> None:
    for owner, names in METHODS.items():
        for name in names.split():
            assert hasattr(operator.attrgetter(owner)(libraries["plc"]), name), f"{owner}.{name}"
    text = "".join(path.read_text() for path in BACKEND.rglob("*.py"))
    for name in [
        *(
            name
            for owner, names in METHODS.items()
            if owner.endswith(("Builder", "InMetadata"))
            for name in names.split()
        ),
        "child",
        "copy",
        "data",
        "device_buffer_size",
        "list_view",
        "null_count",
        "null_mask",
        "offset",
        "to_scalar",
        "with_mask",
    ]:
        assert f".{name}(" in text, f"{name} is checked and not used"


@pytest.mark.filterwarnings("ignore")
def test_enums_exist(libraries: dict[str, Any]) -> None:
    plc = libraries["plc"]
    assert plc.copying.OutOfBoundsPolicy.NULLIFY.name == "NULLIFY"
    assert plc.copying.OutOfBoundsPolicy.DONT_CHECK.name == "DONT_CHECK"
    assert plc.reduce.ScanType.INCLUSIVE.name == "INCLUSIVE"
    assert plc.types.NullEquality.UNEQUAL.name == "UNEQUAL"
    assert {"EQUAL", "LESS"} <= set(plc.binaryop.BinaryOperator.__members__)
    assert set(_KINDS) <= set(plc.TypeId.__members__)
    assert set(CompressionType.__members__) <= set(plc.io.types.CompressionType.__members__)
    assert plc.io.types.StatisticsFreq.STATISTICS_ROWGROUP.name == "STATISTICS_ROWGROUP"


def test_uses_are_found() -> None:
    """The search above finds what is there to find."""
    chains = {".".join(chain) for _, chain, _, _ in _uses()}
    assert len(chains) > 40
    assert {"plc.join.mixed_inner_join", "cp.cuda.get_elapsed_time", "cupyx.empty_pinned"} <= chains
    assert {"plc.io.parquet.write_parquet", "plc.io.types.SinkInfo", "plc.io.types.TableInputMetadata"} <= chains
    assert {"plc.unary.is_valid", "rmm.mr.LimitingResourceAdaptor", "cp.cuda.MemoryPointer"} <= chains
