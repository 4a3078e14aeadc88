"""The backends under contract: ``emulated`` is the GPU backend on stand-ins for its libraries."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import backend_param, backends
from kernels.emulation import emulated
from oracle.drive import Backend

from gpu_ops.backends import make_kernels
from gpu_ops.kernels import Kernels

EMULATED = ("emulated", "emulated-tiny")
SEGMENTED = ("kernels.test_state", "kernels.test_engine")
"""Where the size of segments can make a difference."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every test that takes ``kernels`` or ``engines`` on each backend."""
    for fixture in ("kernels", "engines"):
        if fixture in metafunc.fixturenames:
            asked = [*backends(metafunc.config), *map(Backend, EMULATED)]
            asked = [b for b in asked if metafunc.module.__name__ in SEGMENTED or not b.name.endswith("-tiny")]
            metafunc.parametrize(fixture, [backend_param(b, name=b.name) for b in asked], indirect=True)


@contextlib.contextmanager
def running(backend: Backend) -> Iterator[Backend]:
    """The backend as engines call it, emulated if need be."""
    with contextlib.ExitStack() as stack:
        if backend.name in EMULATED:
            stack.enter_context(emulated())
            backend = Backend(backend.name.replace("emulated", "gpu"))
        yield backend


@pytest.fixture
def engines(request: Any) -> Iterator[Backend]:
    """A backend that makes engines."""
    with running(request.param) as backend:
        yield backend


@pytest.fixture
def kernels(request: Any) -> Iterator[Kernels]:
    """A backend's kernels."""
    with running(request.param) as backend:
        made, _ = make_kernels(
            "gpu" if backend.gpu else "cpu", tiny_segments=backend.name.endswith("-tiny")
        )
        yield made
        made.close()
