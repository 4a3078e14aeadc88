"""Names of a package that are imported when they are first used."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType


def attach(
    package: str, file: str, gone: Mapping[str, str] = MappingProxyType({})
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """A package's ``__getattr__``, ``__dir__`` and ``__all__``, from the imports of its stub.

    Args:
        package: its name.
        file: its ``__init__.py``; type checkers read the ``__init__.pyi`` beside it, and so does this.
        gone: names that there were, and what to use instead.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    module_of = {alias.name: str(node.module) for node in imports for alias in node.names}

    def __getattr__(name: str) -> object:  # noqa: N807 - the package's
        if name not in module_of:
            instead = f"; {gone[name]}" if name in gone else ""
            raise AttributeError(f"module {package!r} has no attribute {name!r}{instead}")
        try:
            if module_of[name] == package:  # a module of its own
                return importlib.import_module(f"{package}.{name}")
            value = getattr(importlib.import_module(module_of[name]), name)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] != "pyspark":
                raise
            raise ImportError(f"{package}.{name} needs PySpark: pip install 'gpu-join[spark]'") from error
        setattr(sys.modules[package], name, value)
        return value

    def __dir__() -> list[str]:  # noqa: N807 - the package's
        return sorted({*vars(sys.modules[package]), *module_of})

    return __getattr__, __dir__, sorted(module_of)
