"""Build what `fake_cuda` needs beside the installed cupy: a driver on host memory, and cupy's wrapper of the runtime.

cupy's wheels link CUDA's runtime statically, so its wrapper (one Cython file) is compiled again, against ours:

    git clone --depth 1 --branch v14.2.0 https://github.com/cupy/cupy SOURCE    # the installed version's tag
    PYTHONPATH=tests python -m kernels.fake_cuda.build SOURCE

Needs g++, Cython of the version that built the wheel (3.2.4 for 14.2.0), and CUDA's headers (``nvidia-cuda-runtime``).
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

from kernels.fake_cuda import BUILT, DRIVER, HERE, WRAPPER, headers

_CYTHON = "CUPY_USE_CUDA_PYTHON=False,CUPY_CUDA_VERSION=13020,CUPY_HIP_VERSION=0,CUPY_CUFFT_STATIC=False"
_DIRECTIVES = "c_api_binop_methods=True,binding=False,warn.deprecated.IF=False,freethreading_compatible=True"
_PROFILER = 'extern "C" { int cudaProfilerStart(); int cudaProfilerStop(); }\n'


def _run(*command: str | Path) -> str:
    return subprocess.run([str(part) for part in command], check=True, stdout=subprocess.PIPE, text=True).stdout


def _symbols(library: Path, which: str) -> set[str]:
    found = (line.split()[-1] for line in _run("nm", "-D", which, library).splitlines())
    return {name for name in found if re.match(r"cuda[A-Z]", name)}


def build(source: Path) -> None:
    """Build from cupy's source."""
    BUILT.mkdir(parents=True, exist_ok=True)
    api = source / "cupy_backends" / "cuda" / "api"
    code = BUILT / "runtime.cpp"
    cython = [sys.executable, "-m", "cython", "-3", "--cplus", "-E", _CYTHON, "-X", _DIRECTIVES]
    subprocess.run([*cython, "cupy_backends/cuda/api/runtime.pyx", "-o", str(code)], check=True, cwd=source)
    (BUILT / "cuda_profiler_api.h").write_text(_PROFILER)  # not in the wheel of headers
    compiler = ["g++", "-O1", "-fPIC", "-shared", "-w", f"-I{headers()}"]
    python = f"-I{sysconfig.get_path('include')}"
    _run(*compiler, python, f"-I{BUILT}", f"-I{api}", f"-I{source}", code, "-o", WRAPPER)
    driver = [*compiler, HERE / "driver.cpp", f"-Wl,-soname,{DRIVER.name}", "-o", DRIVER]
    _run(*driver)
    missing = sorted(_symbols(WRAPPER, "--undefined-only") - _symbols(DRIVER, "--defined-only"))
    rest = BUILT / "rest.cpp"
    refusals = (f'int {name}() {{ std::fprintf(stderr, "{name} is not there\\n"); return 999; }}' for name in missing)
    rest.write_text("\n".join(['#include <cstdio>\nextern "C" {', *refusals, "}\n"]))
    _run(*driver, rest, "-ldl")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("source", type=Path, help="a checkout of cupy, of the installed version")
    build(parser.parse_args().source.resolve())
    print(f"written: {BUILT}")


if __name__ == "__main__":
    main()
