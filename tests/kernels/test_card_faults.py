"""A card that is full for a moment, or answers no more: what the backend says of it, and what a state server does."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from state.support import WIRE_SCHEMA, expected, make_command, wire_batches

from gpu_ops import backends
from gpu_ops.errors import StateError
from gpu_ops.spark.driver import process
from gpu_ops.spark.driver.pools import Death, Pool
from gpu_ops.spark.driver.process import EmbeddedServers
from gpu_ops.spark.settings import LOST_GPU
from gpu_ops.spark.wire.command import LocateRequest
from gpu_ops.spark.wire.connection import Address
from gpu_ops.spark.wire.exchange import Exchange
from kernels.card import emulated_card
from kernels.emulated_cupy import CudaError

pytestmark = pytest.mark.thorough


def failing(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise error

    return fail


# --- what is said of a card --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "error", "found"),
    [
        ("memGetInfo", CudaError(2), True),  # no room for a context
        ("arange", MemoryError("out of memory"), True),
        ("arange", CudaError(700), False),
        ("arange", RuntimeError("NVRTC is not there"), False),
        ("memGetInfo", CudaError(35), False),
    ],
)
def test_a_card_without_memory_at_this_moment_is_one(function: str, error: Exception, found: bool) -> None:
    with emulated_card() as cupy:
        setattr(cupy if function == "arange" else cupy.cuda.runtime, function, failing(error))
        from gpu_ops.cudf_backend.device import describe_device

        answer, why = describe_device()
    assert answer is found
    assert why.startswith("it has no memory left: ") is found


@pytest.mark.parametrize(
    ("capability", "version", "found"), [(70, 12090, True), (70, 13000, False), (60, 12090, False)]
)
def test_cuda_13_is_nothing_for_volta(capability: int, version: int, found: bool) -> None:
    with emulated_card() as cupy:
        known = cupy.cuda.runtime.getDeviceProperties(0)
        cupy.cuda.runtime.getDeviceProperties = lambda _: {**known, "major": capability // 10, "minor": 0}
        cupy.cuda.runtime.runtimeGetVersion = lambda: version
        from gpu_ops.cudf_backend.device import describe_device

        assert describe_device()[0] is found


@pytest.mark.parametrize(
    ("errors", "lost"), [([], False), ([2, 2], False), ([700], False), ([700, 700], True), ([46, 46], True)]
)
def test_a_card_is_lost_that_says_so_twice(errors: list[int], lost: bool) -> None:
    left = list(errors)

    def mem_get_info() -> tuple[int, int]:
        if left:
            raise CudaError(left.pop(0))
        return 1, 1

    with emulated_card() as cupy:
        cupy.cuda.runtime.memGetInfo = mem_get_info
        from gpu_ops.cudf_backend import device

        assert (device.lost() is not None) is lost


def test_the_backend_is_decided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that failed did not make a process the CPU's in the middle of a query."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in {"cupy", "pylibcudf", "rmm"} or found(name))
    asked = backends.gpu_available
    asked.cache_clear()
    try:
        with emulated_card() as cupy:
            assert asked()[0]
            cupy.arange = failing(CudaError(700))
            assert asked()[0]
            assert backends.lost_gpu() is None
            cupy.cuda.runtime.memGetInfo = failing(CudaError(700))
            assert backends.lost_gpu() == "cudaErrorIllegalAddress: an illegal memory access"
    finally:
        asked.cache_clear()


def test_without_a_card_none_is_lost() -> None:
    assert backends.lost_gpu() is None


@pytest.mark.parametrize(("free", "left"), [(80 << 30, 3 << 29), (14 << 30, 3 << 29), (2 << 30, 1 << 30)])
def test_what_stays_free_is_no_share_of_the_card(free: int, left: int) -> None:
    with emulated_card(free):
        from gpu_ops.cudf_backend import device

        try:
            assert device.acquire(None) == free - left
        finally:
            device.release()


def test_a_home_that_cannot_be_written_to_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """cupy makes its folder when it is imported; that error came out of the engine."""

    class Finder:
        def find_spec(self, name: str, *_: Any) -> None:
            if name == "gpu_ops.cudf_backend.device":
                raise FileNotFoundError(2, "No such file or directory", "/.cupy")

    asked = backends.gpu_available.__wrapped__
    with emulated_card():  # whose backend is not imported yet
        monkeypatch.setattr(importlib.util, "find_spec", lambda _: True)
        monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
        found, why = asked()
    assert not found
    assert "'/.cupy'; CUPY_CACHE_DIR names one" in why


# --- a state server that has one ---------------------------------------------------------------


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedServers]:
    """One server, with an emulated card."""
    monkeypatch.setenv("CARD_FAULT", str(tmp_path / "fault"))
    monkeypatch.setattr(process, "_MODULE", "kernels.emulated_server")
    monkeypatch.setattr(process, "find_gpus", lambda: (["GPU-x"], "1 GPU: Emulated Card"))
    made = EmbeddedServers(1)
    yield made
    made.close()


class Task:
    """A task that asks where the server is, and repeats what fails."""

    def __init__(self, servers: EmbeddedServers, state: str) -> None:
        self.pool: Pool = servers.pool("auto")
        self._token, self._state = servers.token, state
        from gpu_ops.spark.driver.registry import JoinState  # PySpark, which no test on a card needs

        self._known = JoinState("q", "r", None, None)

    def apply(self, number: int, rows: pa.Table, backend: str = "gpu") -> pa.Table:
        command = json.loads(make_command(number, self._state, backend="auto").to_json())

        def locate(failed: str | None) -> tuple[Address, Mapping[str, Any]]:
            where = self.pool.location(0, failed=failed)
            request = LocateRequest("j", "q", "r", number, None, "auto", 0, 1, 7, "e", failed)
            self._known.begin(request)
            self._known.note_death(request, self.pool.deaths.get(failed or ""))
            return Address(where, self._token), {}

        exchange = Exchange(locate, command, WIRE_SCHEMA)
        tables = list(exchange.run(rows.to_batches()))
        assert exchange.answer["backend"] == backend
        self.retries = exchange.retries
        return pa.Table.from_batches(tables, expected([rows])[0].schema)

    @property
    def pid(self) -> int:
        return self.pool.running[0].pid


@pytest.mark.parametrize("fault", ["", "memory", "sticky"])
def test_a_server_goes_on_without_memory_for_a_moment_and_is_replaced_when_its_card_is_lost(
    servers: EmbeddedServers, tmp_path: Path, fault: str
) -> None:
    """It answered `ping`, so nobody replaced it, and every repetition failed."""
    batches = wire_batches(4)
    task, pids = Task(servers, str(tmp_path / "state")), []
    for number, (rows, wanted) in enumerate(zip(batches, expected(batches), strict=True)):
        if number == 2 and fault:
            (tmp_path / "fault").write_text(fault)
        assert task.apply(number, rows).sort_by(ORDER).equals(wanted.sort_by(ORDER))
        assert task.retries == (number == 2 and fault == "sticky")
        pids.append(task.pid)
    assert len(set(pids)) == 1 + (fault == "sticky")
    deaths = list(task.pool.deaths.values())
    assert [death.code for death in deaths] == ([LOST_GPU] if fault == "sticky" else [])
    assert all("the GPU answers this process no more" in death.tail for death in deaths)


ORDER = [(name, "ascending") for name in ("row_kind", "id", "item", "amount", "price", "since")]


def test_a_ping_asks_the_card(servers: EmbeddedServers, tmp_path: Path) -> None:
    """A server that a task found silent is looked at; one whose card fails answered that it lives."""
    batches = wire_batches(1)
    task = Task(servers, str(tmp_path / "state"))
    task.apply(0, batches[0])
    before, where = task.pid, task.pool.location(0)
    assert task.pool.location(0, failed=where) == where
    (tmp_path / "fault").write_text("silent")
    assert task.pool.location(0, failed=where) != where
    assert task.pid != before
    assert [death.code for death in task.pool.deaths.values()] == [LOST_GPU]


def test_a_micro_batch_that_breaks_every_card_is_given_up(servers: EmbeddedServers, tmp_path: Path) -> None:
    batches = wire_batches(1)
    (tmp_path / "fault").write_text("for good")
    task = Task(servers, str(tmp_path / "state"))
    with pytest.raises(
        StateError, match=r"(?s)killed 3 times. State server gpu-0, .* its GPU answered it no more.*Xid"
    ):
        task.apply(0, batches[0])
    assert all(isinstance(death, Death) for death in task.pool.deaths.values())


def test_where_no_card_is_left_the_cpu_goes_on_and_that_is_said(
    servers: EmbeddedServers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was not, and a query became slower for no reason that anybody saw."""
    batches = wire_batches(2)
    task, wanted = Task(servers, str(tmp_path / "state")), expected(batches)
    task.apply(0, batches[0])
    (tmp_path / "fault").write_text("gone")
    assert task.apply(1, batches[1], "cpu").sort_by(ORDER).equals(wanted[1].sort_by(ORDER))
    assert task.pool.running[0].on_cpu == "it is gone"
    assert "state server gpu-0 was given a GPU and computes on the CPU" in caplog.text
    assert "its GPU answered it no more" in caplog.text
