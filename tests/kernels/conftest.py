"""The backends under contract: ``emulated`` is the GPU backend on stand-ins for its libraries."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import pytest
from conftest import backend_param, backends
from oracle.drive import Backend

from cpu_fallback import CpuKernels
from gpu_ops.backends import make_kernels
from gpu_ops.kernels import Kernels
from kernels.emulation import emulated

Test = TypeVar("Test", bound=Callable[..., object])
EMULATED = ("emulated", "emulated-tiny")


def only_on(*names: str) -> Callable[[Test], Test]:
    """Run a test on these backends only, where they are asked for."""

    def mark(test: Test) -> Test:
        test.__dict__["only_on"] = names
        return test

    return mark


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every test that takes ``kernels`` or ``engines`` on each backend.

    Engines and state tables also run with tiny segments, where more happens. Stand-ins are for `make test-all`, which has
    half of those that have other parameters as well, and only in the soak with segments that are not tiny.
    """
    for fixture in ("kernels", "engines"):
        if fixture in metafunc.fixturenames:
            segmented = fixture == "engines" or metafunc.module.__name__ == "kernels.test_state"
            names = [b.name for b in backends(metafunc.config)] + list(EMULATED)
            names = [n for n in names if segmented or not n.endswith("-tiny")]
            names = [n for n in names if n in getattr(metafunc.function, "only_on", names)]
            params = []
            wide = metafunc.definition.get_closest_marker("parametrize") is not None
            wide &= metafunc.definition.get_closest_marker("one_in") is None
            for name in names:
                marks = [pytest.mark.thorough] if name in EMULATED else []
                marks += [pytest.mark.one_in(2)] if name in EMULATED and wide else []
                marks += [pytest.mark.slow] if (name, fixture) == ("emulated", "engines") else []
                params.append(backend_param(Backend(name), name=name, marks=marks))
            metafunc.parametrize(fixture, params, indirect=True)


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
        made, _ = make_kernels("gpu" if backend.gpu else "cpu", tiny_segments=backend.name.endswith("-tiny"))
        yield made
        made.close()


@pytest.fixture
def one_hash(monkeypatch: pytest.MonkeyPatch, engines: Backend) -> Iterator[Any]:
    """Make all hashes of the backend equal, or all but a few; of both halves, or of the upper one."""

    def force(distinct: int, *, shift: int = 0) -> None:
        backend: Any = sys.modules["gpu_ops.cudf_backend"].CudfKernels if engines.gpu else CpuKernels
        honest = backend.hash_rows

        def hash_rows(self: Any, *args: Any) -> Any:
            hashes = honest(self, *args)
            return hashes % np.uint64(distinct) if not shift else (hashes << np.uint64(shift)) >> np.uint64(shift)

        monkeypatch.setattr(backend, "hash_rows", hash_rows)

    if engines.gpu:
        import gpu_ops.cudf_backend  # noqa: F401

    return force
