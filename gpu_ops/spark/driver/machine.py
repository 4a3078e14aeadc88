"""The environment of a state server: variables that make NumPy fast on this processor, and the GPU it may use.

**CUDA says which GPUs there are**: files in ``/dev`` bear the host's numbers, which are not CUDA's in a container, and
are not there under WSL2; of ``CUDA_VISIBLE_DEVICES`` CUDA takes what comes before the first entry that it does not
know. It is asked in a child process, which is this file as a program, so no other module of this pack is imported here:
a process that has asked CUDA cannot be forked, as a driver and Spark's workers are.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final

ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""With a server per core each does with one thread; Arrow, OpenBLAS and MKL listen to these."""

KEPT_MEMORY: Final = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_ARENA_MAX": "1",  # each call may have another thread, and the heap of each would keep as much
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # the most that glibc takes
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
    "MALLOC_TOP_PAD_": str(64 << 20),  # as much as a heap of a thread, which is else unmapped when empty
}
"""glibc keeps what a micro-batch frees for the next (`mallopt(3)`): else the system clears the same pages each time.

Half as many page faults, and as much time in the kernel. One heap has it all, Arrow's too, so that it is kept once and
can be given back: when the server is idle (`StateServer.trim`), and after each snapshot.
"""

_ZEN_4: Final = {"vendor_id": "AuthenticAMD", "cpu family": "25"}
"""Fields of /proc/cpuinfo on AMD's Zen 4: processors of this family with AVX-512."""


def numpy_environment(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """Environment variables with which NumPy sorts fast on this machine's processor.

    NumPy sorts 64-bit numbers with AVX-512 where there is any. On AMD's Zen 4 an instruction of it, a compressing store
    to memory, is microcode, and AVX2 sorts four times as fast (github.com/numpy/x86-simd-sort/issues/6; the JDK chooses
    by the same family, JDK-8317976).

    Args:
        cpuinfo: the file in which Linux describes the processor.
    """
    version = _version("numpy")
    try:
        described = cpuinfo.read_text().split("\n\n", maxsplit=1)[0]
    except OSError:
        return {}  # no Linux
    parts = (line.split(":", maxsplit=1) for line in described.splitlines() if ":" in line)
    facts = {name.strip(): value.strip() for name, value in parts}
    known = all(facts.get(name) == value for name, value in _ZEN_4.items()) and "avx512f" in facts.get("flags", "")
    if version is None or not known:
        return {}
    # a name that this NumPy does not have is warned of
    older = tuple(map(int, version.split(".")[:2])) < (2, 4)
    return {"NPY_DISABLE_CPU_FEATURES": f"{'AVX512_SKX' if older else 'X86_V4'} AVX512_ICL"}


def _version(distribution: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


BY_BUS: Final = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""Numbers of GPUs are those of nvidia-smi, which Spark has them from; CUDA's own begin with the fastest."""

_ANSWERS_S: Final = 60.0
_WORDS: Final = 300


def find_gpus(addresses: Sequence[str] | None = None) -> tuple[list[str], str]:
    """Finds the GPUs that a server could use: their names for CUDA_VISIBLE_DEVICES, and in words which, or why none.

    Args:
        addresses: those that are asked for, as Spark names them; None for all that this process may see.
    """
    for module in ("cupy", "pylibcudf", "rmm"):
        if importlib.util.find_spec(module) is None:
            return [], f"{module} is not installed"
    environment = {**BY_BUS, **os.environ}
    if addresses is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(addresses)
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    answer = _ask(environment)
    cards, why = answer.get("cards", []), answer.get("why", "CUDA finds none")
    names = [name.strip() for name in (listed or "").split(",")]
    ids, described = [], []
    for number, card in enumerate(cards):
        lacks = _lacks(card, answer["driver"])
        if lacks is None:
            visible_as = names[number] if number < len(names) else ""
            ids.append(visible_as if visible_as.startswith(("GPU-", "MIG-")) else card["id"])
        text = f"{card['name']}, {card['memory'] / 2**30:.1f} GiB"
        described.append(text if lacks is None else f"not {text}: {lacks}")
    if ids:
        return ids, f"{len(ids)} GPU{'s' if len(ids) > 1 else ''}: {'; '.join(described)}"
    return [], f"{'; '.join(described) or why}{'' if listed is None else f' (CUDA_VISIBLE_DEVICES is {listed!r})'}"


def _lacks(card: dict[str, Any], driver: int) -> str | None:
    """Says what a card lacks for the packages that are installed here; None if nothing."""
    newer = _version("cupy-cuda13x") is not None
    if driver < 13000 and newer:
        return (
            f"its driver is for CUDA {driver // 1000}.{driver % 1000 // 10}, and gpu-cu13 is installed: "
            "a newer driver, or gpu-cu12"
        )
    least = 75 if newer else 70  # CUDA 13 compiles nothing for Volta
    capability = card["capability"]
    return None if capability >= least else f"compute capability {capability / 10:.1f}, {least / 10:.1f} is needed"


def _ask(environment: dict[str, str]) -> dict[str, Any]:
    """Asks CUDA for its GPUs in a process of its own; ``why`` in the answer says why there are none."""
    try:
        done = subprocess.run(  # noqa: S603 - this file, by our own interpreter
            [sys.executable, "-I", "-S", __file__],
            env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=_ANSWERS_S,
        )  # fmt: skip
        return dict(json.loads(done.stdout))
    except subprocess.TimeoutExpired:
        return {"why": f"CUDA has not answered for {_ANSWERS_S:.0f} s"}
    except OSError as error:
        return {"why": f"CUDA cannot be asked: {error}"}
    except ValueError:
        return {"why": f"asking CUDA ended with {done.returncode}: {done.stderr.strip()[-_WORDS:] or 'no word'}"}


_CAPABILITY: Final = (75, 76)
"""``CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR``, ``_MINOR``."""


def _cuda_says() -> dict[str, Any]:
    """Asks CUDA's driver for its GPUs without making a context on any; the calling process has to end afterwards."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return {"why": f"there is no driver of NVIDIA's: {error}"}
    number, memory, identity = ctypes.c_int(), ctypes.c_size_t(), (ctypes.c_ubyte * 16)()
    name, text = ctypes.create_string_buffer(256), ctypes.c_char_p()

    def ask(function: str, *arguments: Any) -> None:
        status = getattr(cuda, function)(*arguments)
        if status:
            cuda.cuGetErrorString(status, ctypes.byref(text))
            raise OSError(f"{function} says {status}, {(text.value or b'unknown').decode(errors='replace')}")

    def number_of(function: str, *arguments: Any) -> int:
        ask(function, ctypes.byref(number), *arguments)
        return number.value

    cards = []
    try:
        ask("cuInit", 0)
        for ordinal in range(number_of("cuDeviceGetCount")):
            device = number_of("cuDeviceGet", ordinal)
            ask("cuDeviceGetName", name, 256, device)
            ask("cuDeviceTotalMem_v2", ctypes.byref(memory), device)
            ask("cuDeviceGetUuid_v2", identity, device)
            major, minor = (number_of("cuDeviceGetAttribute", attribute, device) for attribute in _CAPABILITY)
            called = name.value.decode(errors="replace")
            kind = "MIG" if " MIG " in called else "GPU"  # of a card's slice it is the slice's
            cards.append({
                "id": f"{kind}-{uuid.UUID(bytes=bytes(identity))}", "name": called, "memory": memory.value,
                "capability": 10 * major + minor,
            })  # fmt: skip
        return {"driver": number_of("cuDriverGetVersion"), "cards": cards}
    except (OSError, AttributeError) as error:
        return {"why": str(error)}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_cuda_says()))
