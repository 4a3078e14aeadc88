"""Which cards a server is given, folders for its kernels, and what becomes of one that computes without its card."""

from __future__ import annotations

import logging
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import gpu_ops
from gpu_ops.backends import kernel_caches
from gpu_ops.errors import BackendError
from gpu_ops.spark.driver import machine
from gpu_ops.spark.driver.machine import find_gpus
from gpu_ops.spark.driver.pools import Death
from gpu_ops.spark.driver.process import EmbeddedServers
from gpu_ops.spark.settings import LOST_GPU
from spark.made_up_cards import identity, made_up_cards

pytestmark = pytest.mark.thorough


@pytest.fixture
def cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Eight cards, of which all can be seen, and the libraries for them."""
    found = made_up_cards(tmp_path)
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LD_LIBRARY_PATH", found["LD_LIBRARY_PATH"])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([found["PYTHONPATH"], os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(found["PYTHONPATH"])
    monkeypatch.setattr(machine, "_version", lambda name: "14.2.0" if name == "cupy-cuda13x" else None)
    return monkeypatch


# --- which there are ---------------------------------------------------------------------------


def test_cards_are_those_that_cuda_finds_by_their_own_names(cards: pytest.MonkeyPatch) -> None:
    """A container with the host's fourth card has /dev/nvidia3, and CUDA counts from 0; WSL2 has no such file."""
    cards.setenv("MADE_UP_CARDS", "2")
    assert find_gpus() == ([identity(0), identity(1)], "2 GPUs: Card 0, 16.0 GiB; Card 1, 17.0 GiB")


@pytest.mark.parametrize(
    ("listed", "wanted"),
    [
        ("3", [identity(3)]),
        ("2, 0", [identity(2), identity(0)]),
        ("0,-1,1", [identity(0)]),
        ("0,9,1", [identity(0)]),
        (identity(5)[:12], [identity(5)[:12]]),
        ("", []),
        ("void", []),
        ("NoDevFiles", []),
        ("-1", []),
    ],
)
def test_a_list_of_cards_is_read_by_cuda(cards: pytest.MonkeyPatch, listed: str, wanted: list[str]) -> None:
    cards.setenv("CUDA_VISIBLE_DEVICES", listed)
    found, why = find_gpus()
    assert found == wanted
    assert wanted or why == (
        f"cuInit says 100, no CUDA-capable device is detected (CUDA_VISIBLE_DEVICES is {listed!r})"
    )


def test_slices_of_a_card_have_names_of_their_own(cards: pytest.MonkeyPatch) -> None:
    cards.setenv("MADE_UP_SLICES", "1")
    own = identity(4).replace("GPU-", "MIG-")
    cards.setenv("CUDA_VISIBLE_DEVICES", own)
    assert find_gpus() == ([own], "1 GPU: Card 4 MIG 1g.10gb, 20.0 GiB")
    cards.delenv("CUDA_VISIBLE_DEVICES")
    assert find_gpus()[0][0] == identity(0).replace("GPU-", "MIG-")


def test_addresses_of_spark_are_those_of_nvidia_smi(cards: pytest.MonkeyPatch) -> None:
    orders = []
    ask = machine._ask
    cards.setattr(
        machine, "_ask", lambda environment: orders.append(environment["CUDA_DEVICE_ORDER"]) or ask(environment)
    )
    cards.setenv("CUDA_VISIBLE_DEVICES", "0")  # of the executor, which Spark does not go by
    assert find_gpus(["7"])[0] == [identity(7)]
    cards.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    find_gpus(["7"])
    assert orders == ["PCI_BUS_ID", "FASTEST_FIRST"]


@pytest.mark.parametrize(
    ("variable", "value", "why"),
    [
        ("MADE_UP_ERROR", "803", "cuInit says 803, made up"),
        ("MADE_UP_CRASH", "1", "asking CUDA ended with -6: "),
        ("MADE_UP_CAPABILITY", "70", "not Card 0, 16.0 GiB: compute capability 7.0, 7.5 is needed"),
        ("MADE_UP_DRIVER", "12040", "not Card 0, 16.0 GiB: its driver is for CUDA 12.4, and gpu-cu13 is installed: "),
    ],
)
def test_no_card_can_be_used_and_why(cards: pytest.MonkeyPatch, variable: str, value: str, why: str) -> None:
    cards.setenv(variable, value)
    cards.setenv("MADE_UP_CARDS", "1")
    found, said = find_gpus()
    assert not found
    assert said.startswith(why)


def test_volta_is_one_for_cuda_12(cards: pytest.MonkeyPatch) -> None:
    cards.setattr(machine, "_version", lambda _: None)
    cards.setenv("MADE_UP_CAPABILITY", "70")
    assert len(find_gpus()[0]) == 8


def test_a_driver_that_hangs_is_not_waited_for(cards: pytest.MonkeyPatch) -> None:
    cards.setattr(machine, "_ANSWERS_S", 0.001)
    assert find_gpus() == ([], "CUDA has not answered for 0 s")


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch, cards: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").unlink()
    found, why = find_gpus()
    if found:
        pytest.skip("there is a card")
    assert why.startswith(("there is no driver of NVIDIA's: libcuda.so.1", "cuInit says"))


def test_what_asks_cuda_imports_nothing_of_ours_and_no_numpy() -> None:
    """Also `make gpu-verify` says what is missing, where nothing is installed."""
    command = "import sys, gpu_ops.spark.driver.machine as m; print(m.numpy_environment(), *sys.modules)"
    env = {**os.environ, "PYTHONPATH": str(Path(gpu_ops.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-S", "-c", command], env=env, capture_output=True, text=True, check=True)
    assert not {"numpy", "pyarrow", "gpu_ops.errors"} & set(done.stdout.split())


# --- a server that has one, or not -------------------------------------------------------------


def test_a_server_whose_card_it_cannot_use_is_warned_of(
    cards: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cards.setenv("MADE_UP_CARDS", "2")
    caplog.set_level(logging.WARNING)
    servers = EmbeddedServers(4)
    try:
        assert servers.gpus == "2 GPUs: Card 0, 16.0 GiB; Card 1, 17.0 GiB"
        pool = servers.pool("auto")
        assert (pool.kind, len(pool), len(servers.pool("cpu"))) == ("gpu", 2, min(4, os.cpu_count() or 1))
        pool.location(1)
        (server,) = pool.running
        assert server.on_cpu == "ImportError: made up"
        environment = Path(f"/proc/{server.pid}/environ").read_text().split("\0")
        assert f"CUDA_VISIBLE_DEVICES={identity(1)}" in environment
        assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in environment
        assert "state server gpu-1 was given a GPU and computes on the CPU" in caplog.text
        assert "ImportError: made up" in caplog.text
    finally:
        servers.close()


def test_servers_of_the_cpu_leave_the_cards_alone(cards: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """They would share the first card, one per core."""
    cards.setenv("MADE_UP_ERROR", "803")
    servers = EmbeddedServers(1)
    try:
        pool = servers.pool("auto")
        assert pool.kind == "cpu"
        with pytest.raises(BackendError, match="no GPU answers: cuInit says 803"):
            servers.begin("gpu", 1)
        pool.location(0)
        (server,) = pool.running
        assert server.on_cpu is None
        words = Path(f"/proc/{server.pid}/cmdline").read_text().split("\0")
        assert words[words.index("--backend") + 1] == "cpu"
        assert not caplog.records
    finally:
        servers.close()


@pytest.mark.spark
def test_explain_says_what_was_found(
    spark: Any, cards: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from gpu_ops.spark.driver.directory import Directory
    from spark.support import Source, in_memory

    cards.setenv("MADE_UP_CARDS", "1")
    sources = [Source(spark, tmp_path / name, "k long") for name in ("left", "right")]
    directory = Directory.of(spark)
    servers = EmbeddedServers(2)
    cards.setattr(directory, "servers", servers)
    try:
        changes = in_memory(gpu_ops.join, *(source.df for source in sources), on="k", suffixes=("", "_r"))
        until = time.monotonic() + 60
        while not servers.pool("auto").running and time.monotonic() < until:
            time.sleep(0.1)
        (line,) = [line for line in gpu_ops.explain(changes).splitlines() if line.startswith("  backend")]
    finally:
        servers.close()
    assert line == (
        "  backend     gpu (1 GPU: Card 0, 16.0 GiB); 1 state server on this machine, 1 running; probe auto: "
        "a search of the index, or cuDF's hash join where that costs less; "
        "WARNING: one computes on the CPU: ImportError: made up"
    )


# --- one that is lost --------------------------------------------------------------------------


def test_a_server_that_lost_its_card_says_so() -> None:
    death = Death.of(
        "gpu-0", 5, LOST_GPU, "the GPU answers this process no more, which ends: cudaErrorIllegalAddress\n"
    )
    assert death == Death(*death)  # as it comes from an executor
    for part in ("gpu-0", "process 5", "GPU answered it no more", "Xid", "cudaErrorIllegalAddress"):
        assert part in str(death)
    assert Death.of("gpu-0", 5, 1, "") is None


# --- folders for kernels -----------------------------------------------------------------------

CACHES = ("CUPY_CACHE_DIR", "LIBCUDF_KERNEL_CACHE_PATH", "CUDA_CACHE_PATH")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's folder."""
    found = tmp_path / "temporary"
    found.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(found))
    return found


def test_kernels_are_kept_in_the_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, temporary: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert kernel_caches() == {}
    assert not list(temporary.iterdir())


def test_kernels_have_a_folder_where_no_home_can_be_written_to(
    monkeypatch: pytest.MonkeyPatch, temporary: Path
) -> None:
    wanted = temporary / f"gpu-join-kernels-{os.getuid()}"
    for home in ("/proc/1", "~"):  # `expanduser` leaves it where nobody says which is this user's
        monkeypatch.setenv("HOME", home)
        assert kernel_caches() == dict.fromkeys(CACHES, str(wanted))
    assert stat.S_IMODE(wanted.stat().st_mode) == 0o700
    assert not Path("~").exists()


@pytest.mark.parametrize("what", ["link", "file", "open to others"])
def test_kernels_are_not_kept_where_another_may_have_put_some(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, temporary: Path, what: str
) -> None:
    monkeypatch.setenv("HOME", "/proc/1")
    wanted = temporary / f"gpu-join-kernels-{os.getuid()}"
    if what == "link":
        (tmp_path / "elsewhere").mkdir(0o700)
        wanted.symlink_to(tmp_path / "elsewhere")
    elif what == "file":
        wanted.touch()
    else:
        wanted.mkdir(0o777)
        wanted.chmod(0o777)
    (own,) = set(kernel_caches().values())
    assert Path(own) != wanted
    assert stat.S_IMODE(Path(own).stat().st_mode) == 0o700


_CUPY = """
import os
folder = os.environ.get("CUPY_CACHE_DIR") or os.path.expanduser("~/.cupy/kernel_cache")
os.makedirs(folder, exist_ok=True)
raise ImportError(f"made up: kernels in {folder}, of the driver in {os.environ.get('CUDA_CACHE_PATH')}")
"""
_AT_THE_END = """
from gpu_ops import Input, Join, Key
from gpu_ops.spark.tasks.engine import BoundedTask
import pyarrow as pa
inputs = (Input(name, pa.schema([("id", pa.int64())])) for name in "ab")
join = Join("left", *inputs, keys=(Key("id", "id", using=True),), emit="at_end")
list(BoundedTask("a_join", join.to_json(), None, None, backend="gpu", probe="auto").run(iter(())))
"""


def test_a_process_with_a_card_has_the_folder_and_what_a_user_says_goes_first(tmp_path: Path, temporary: Path) -> None:
    """Also a Spark task that joins tables on a card: its worker has the executor's home, and no launcher of ours."""
    for name, text in (("cupy", _CUPY), ("pylibcudf", ""), ("rmm", "")):
        (tmp_path / f"{name}.py").write_text(text)
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", ""), *filter(None, sys.path)])
    own = {"PYTHONPATH": paths, "HOME": "/proc/1", "TMPDIR": str(temporary), "CUDA_CACHE_PATH": "/own"}
    done = subprocess.run(
        [sys.executable, "-c", _AT_THE_END], env={**os.environ, **own}, check=False, capture_output=True, text=True
    )
    folder = temporary / f"gpu-join-kernels-{os.getuid()}"
    assert f"no GPU answers: ImportError: made up: kernels in {folder}, of the driver in /own" in done.stderr
