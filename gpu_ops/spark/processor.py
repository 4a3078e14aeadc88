"""What NumPy has to be told of the processor before it is imported."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Final

_ZEN_4: Final = {"vendor_id": "AuthenticAMD", "cpu family": "25"}
"""The processors of that family with AVX-512."""


def numpy_environment(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """Variables of the environment with which NumPy sorts fast.

    NumPy sorts 64-bit numbers with AVX-512 where there is any. On AMD's Zen 4 an instruction of it, a compressing store
    to memory, is microcode, and AVX2 sorts four times as fast (github.com/numpy/x86-simd-sort/issues/6; the JDK chooses
    by the same family, JDK-8317976).

    Args:
        cpuinfo: the file in which Linux describes the processor.
    """
    try:
        described = cpuinfo.read_text().split("\n\n", maxsplit=1)[0]
    except OSError:
        return {}  # no Linux
    parts = (line.split(":", maxsplit=1) for line in described.splitlines() if ":" in line)
    facts = {name.strip(): value.strip() for name, value in parts}
    if any(facts.get(name) != value for name, value in _ZEN_4.items()) or "avx512f" not in facts.get("flags", ""):
        return {}
    # a name that this NumPy does not have is warned of
    older = tuple(map(int, metadata.version("numpy").split(".")[:2])) < (2, 4)
    return {"NPY_DISABLE_CPU_FEATURES": f"{'AVX512_SKX' if older else 'X86_V4'} AVX512_ICL"}
